"""The block table: rows on the host, their copy on a device, the batch view and the slot mappings."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from blocktable.checks import (
    COUNT_LIMIT,
    bounded,
    int_array,
    int_scalar,
    non_negative,
    row_index,
    vector_length,
)
from blocktable.config import BlockTableConfig
from blocktable.constants import PAD_SLOT_ID
from blocktable.errors import ArgumentError, BlockTableError, ConfigError, DtypeError, UnsupportedError
from blocktable.exports import Export, ExportSets, is_batch_table, require_seq_lens
from blocktable.layouts import Layout, check_block_size, find_layout
from blocktable.metadata import Layouts, MetadataPlan, StepMetadata, layouts_per_group, make_metadata, make_plan
from blocktable.observer import Observation, ObservedCalls, Observer, OpenRecording, start_recording
from blocktable.protocols import (
    Array,
    Backend,
    Batch,
    BlockStore,
    ExportBuffers,
    IntArray,
    SlotMapper,
    Step,
    StepBuffers,
    Writes,
)
from blocktable.registry import check_backend, get_backend
from blocktable.rows import HostRows
from blocktable.streams import current_stream_getter, stream_handle, stream_owner

StepPath = Literal["auto", "separate", "fused"]

MAX_CACHED_VIEWS = 4096
"""Views and steps kept for each set of buffers; an engine that pads uses a few dozen."""


@dataclass(frozen=True, slots=True)
class SlotLocation:
    """Where a slot lies, and which rows hold its block.

    Attributes:
        block_id: manager block.
        kernel_block_id: kernel block.
        offset: the token's place in the kernel block.
        rows: (row, block index in that row, position of the token there) for every row that holds the block.
    """

    block_id: int
    kernel_block_id: int
    offset: int
    rows: tuple[tuple[int, int, int], ...]


@dataclass(slots=True)
class _Views:
    """The views of one set of buffers that steady steps hand out again (R17)."""

    block_tables: dict[tuple[int, bool, bool], tuple[Array, ...]] = field(default_factory=dict)
    slot_mappings: dict[int, tuple[Array, ...]] = field(default_factory=dict)
    steps: dict[tuple[int, bool, bool, int], Step] = field(default_factory=dict)


class _Plan:
    """What a step over the same arrays and sizes as the last one may use again: checked inputs, and what it returns."""

    __slots__ = ("batch", "buffers", "expected", "is_reusable", "probes", "sizes", "step")

    def __init__(self, batch: Batch | None = None, buffers: Any = None, step: Any = None, sizes: Any = None) -> None:
        self.batch: Batch = batch or Batch(None, None, None, 0, 0)
        self.buffers: StepBuffers = buffers
        self.step: Step = step
        self.sizes = sizes
        inputs: list[Any] = [self.batch.idx_mapping, self.batch.query_start_loc, self.batch.positions]
        if self.batch.num_computed_tokens is not None:
            inputs.append(self.batch.num_computed_tokens)
        # torch tensors only, whose length and address are cheap to ask for: somebody may resize one in place, or give
        # it other memory. With the identity the padding rows must be looked at each time.
        self.is_reusable = all(hasattr(array, "numel") and hasattr(array, "data_ptr") for array in inputs)
        self.probes: list[Callable[[], int]] = []
        if self.is_reusable:
            self.probes = [probe for array in inputs for probe in (array.numel, array.data_ptr)]
        self.expected = [probe() for probe in self.probes]

    def serves(
        self, idx_mapping: Any, query_start_loc: Any, positions: Any, num_computed_tokens: Any, sizes: Any
    ) -> bool:
        """Whether these are the arrays and sizes it was made for."""
        batch = self.batch
        return (
            positions is batch.positions
            and idx_mapping is batch.idx_mapping
            and query_start_loc is batch.query_start_loc
            and num_computed_tokens is batch.num_computed_tokens
            and self.is_reusable
            and sizes == self.sizes
            and [probe() for probe in self.probes] == self.expected
        )


class BlockTable:
    """Which KV-cache block and slot each token of each request lives in, on the host and on a device.

    Row operations change the host only; `commit` (or `step`) makes them visible to kernels. One thread at a time
    uses a table; tables share nothing.

    Args:
        config: the geometry.
        backend: a name that `get_backend` takes, or a backend object.
        device: what the backend calls a device. None: its default.
        step_path: "fused" or "separate" calls of the backend in `step`; "auto": fused where the backend has it.

    Attributes:
        config: as given.
        backend: the backend object.
        device: as given.
        store: the backend's memory.
        mapper: the backend's slot mapper.
        buffers: the table's own set of outputs.
        num_bytes_sent: bytes of all changes committed so far, as ranges.

    Raises:
        ConfigError: a value is impossible.
        UnsupportedError: the configuration or `step_path` needs a capability the backend does not declare.

    Rules: R4-R24.
    """

    def __init__(
        self,
        config: BlockTableConfig,
        backend: str | Backend,
        device: Any = None,
        *,
        step_path: StepPath = "auto",
    ) -> None:
        if not isinstance(config, BlockTableConfig):
            raise ConfigError(f"config must be a BlockTableConfig, got {type(config).__name__}.")
        if step_path not in get_args(StepPath):
            raise ConfigError(f"step_path must be one of {get_args(StepPath)}, got {step_path!r}.")
        self.config = config
        self.backend: Backend = get_backend(backend) if isinstance(backend, str) else check_backend(backend)
        self.device = device
        if config.slot_dtype == "int32":
            self._require("int32_slots", 'slot_dtype="int32"')
        if step_path == "fused":
            self._require("fused_step", 'step_path="fused"')
        self._has_streams = "streams" in self.backend.capabilities
        self._stream_owner: tuple[str, int] | None = None  # who made the last inputs
        self._last_array: Array | None = None
        self._current_stream: Callable[[], int | None] = current_stream_getter(None)
        self._has_windows = any(group.sliding_window is not None for group in config.groups)
        self._rows = HostRows(config)
        self._is_invalid = False
        self._plan = _Plan()
        self.num_bytes_sent: int = 0
        self.store: BlockStore = self.backend.create_block_store(config, device)
        self.mapper: SlotMapper = self.backend.create_slot_mapper(self.store)
        self._exports = ExportSets(config, self.backend, device, self.store)
        self._metadata_plans: dict[tuple[Layout | None, ...], MetadataPlan] = {}
        is_fused = step_path != "separate" and "fused_step" in self.backend.capabilities
        self._fused_step: Any = getattr(self.store, "step", None) if is_fused else None
        self._views: weakref.WeakKeyDictionary[StepBuffers, _Views] = weakref.WeakKeyDictionary()
        self.buffers: StepBuffers = self.create_buffers()
        self._observed_calls = ObservedCalls(self)

    def _require(self, capability: str, what: str) -> None:
        if capability not in self.backend.capabilities:
            raise UnsupportedError(
                f"{what} needs the capability {capability!r}, which backend {self.backend.name!r} does not declare."
            )

    # Rows, one at a time.

    def append_row(self, row: int, block_ids: Any) -> None:
        """Add blocks behind what a row holds. Nothing for a group (None, []) changes nothing there.

        Args:
            row: the row.
            block_ids: one sequence of manager block ids for each group; with one group also a flat sequence of ints.

        Raises:
            RowCapacityError: a group's row cannot hold them. No group is changed.
            RowIndexError, ArgumentError, DtypeError: a bad argument. No group is changed.

        Rules: R4, R6, R7, R8.
        """
        self._rows.append(self._one_row("row", row), block_ids, None)

    def set_row(self, row: int, block_ids: Any) -> None:
        """Replace what a row holds. Nothing for a group (None, []) clears it there.

        Args and errors: as `append_row`. Rules: R4, R6, R7, R8.
        """
        self._rows.set(self._one_row("row", row), block_ids, None)

    def clear_row(self, row: int) -> None:
        """Make a row empty in every group. Rules: R4, R5."""
        self._rows.truncate(self._one_row("row", row), 0)

    def clear(self) -> None:
        """Make every row empty. Rules: R4, R5."""
        self._rows.truncate(self._rows.occupied_rows(), 0)

    def move_row(self, src: int, dst: int) -> None:
        """Replace row dst by row src and leave src empty; onto itself changes nothing. Rules: R4, R5."""
        source, target = self._one_row("src", src), self._one_row("dst", dst)
        if src != dst:
            self._rows.copy(source, target, vacate=True)

    def swap_rows(self, a: int, b: int) -> None:
        """Exchange two rows; a row with itself changes nothing. Rules: R4."""
        rows = np.concatenate((self._one_row("a", a), self._one_row("b", b)))
        if a != b:
            self._rows.copy(rows, rows[::-1], vacate=True)

    def copy_row(self, src: int, dst: int) -> None:
        """Replace row dst by row src (a fork): both hold the same ids; onto itself changes nothing. Rules: R4."""
        source, target = self._one_row("src", src), self._one_row("dst", dst)
        if src != dst:
            self._rows.copy(source, target, vacate=False)

    def truncate_row(self, row: int, num_blocks: int | Sequence[int] | IntArray) -> None:
        """Keep the first blocks of a row (speculative rollback); asking for more than there are changes nothing.

        Args:
            row: the row.
            num_blocks: manager blocks to keep: one number, or one for each group.

        Rules: R4.
        """
        rows, num_groups = self._one_row("row", row), len(self.config.groups)
        if isinstance(num_blocks, Sequence | np.ndarray):
            kept = int_array("num_blocks", num_blocks)
            if kept.size != num_groups:
                raise ArgumentError(
                    f"num_blocks must be an int, or one for each of the {num_groups} groups; got {kept.size}."
                )
            if kept.min() < 0:
                raise ArgumentError(f"num_blocks must be at least 0, got {kept.min()}.")
            self._rows.truncate(rows, bounded(kept)[:, None])
        else:
            self._rows.truncate(rows, min(non_negative("num_blocks", num_blocks), COUNT_LIMIT))

    def null_range(self, row: int, group: int, start: int, stop: int) -> None:
        """Make manager blocks start .. stop - 1 of a row NULL in one group (eviction); later ones stay.

        Raises:
            ArgumentError: not `0 <= start <= stop <= blocks the row holds`.

        Rules: R4, R7.
        """
        rows, index = self._one_row("row", row), self._group_index(group)
        bounds = (np.array([int_scalar(name, value)]) for name, value in (("start", start), ("stop", stop)))
        self._rows.null(rows, index, *bounds)

    # Rows, many at a time.

    def append_rows(self, rows: Any, block_ids: Any, counts: Any) -> None:
        """Add blocks behind what many rows hold.

        Args:
            rows: [n] ints. Distinct rows.
            block_ids: one flat sequence of manager block ids for each group (with one group, that sequence itself):
                the ids of rows[0], then those of rows[1], and so on. Nothing (None, []) changes nothing in that group.
            counts: [n] ints. Blocks of each row; or one [n] for each group.

        Raises:
            RowCapacityError: a row cannot hold its blocks. Nothing is changed.
            RowIndexError, ArgumentError, DtypeError: a bad argument, a repeated row. Nothing is changed.

        Rules: R4, R6, R7, R8.
        """
        self._rows.append_rows(rows, block_ids, counts)

    def set_rows(self, rows: Any, block_ids: Any, counts: Any) -> None:
        """Replace what many rows hold. Args and errors: as `append_rows`. Rules: R4, R6, R7, R8."""
        self._rows.set_rows(rows, block_ids, counts)

    def clear_rows(self, rows: Any) -> None:
        """Make many rows empty in every group. Rules: R4, R5."""
        self._rows.truncate(self._rows.check_rows("rows", rows), 0)

    def truncate_rows(self, rows: Any, num_blocks: Any) -> None:
        """Keep the first blocks of many rows.

        Args:
            rows: [n] ints. Distinct rows.
            num_blocks: [n] ints. Manager blocks to keep; or one [n] for each group.

        Rules: R4.
        """
        self._rows.truncate_rows(rows, num_blocks)

    def null_ranges(self, rows: Any, group: int, starts: Any, stops: Any) -> None:
        """Make manager blocks starts[i] .. stops[i] - 1 of many rows NULL in one group.

        Args:
            rows: [n] ints. Distinct rows.
            group: the group.
            starts, stops: [n] ints. Manager blocks.

        Raises:
            ArgumentError: not `0 <= start <= stop <= blocks the row holds` for a row. Nothing is changed.

        Rules: R4, R7.
        """
        checked, index = self._rows.check_rows("rows", rows), self._group_index(group)
        bounds = [int_array(name, values) for name, values in (("starts", starts), ("stops", stops))]
        for name, array in zip(("starts", "stops"), bounds, strict=True):
            if array.size != checked.size:
                raise ArgumentError(f"{name} must hold one int for each of the {checked.size} rows, got {array.size}.")
        self._rows.null(checked, index, *(array.astype(np.int64) for array in bounds))

    def permute_rows(self, src: Any, dst: Any) -> None:
        """Replace each row dst[i] by what row src[i] held before the call; other sources become empty.

        Args:
            src: [n] ints. Distinct rows.
            dst: [n] ints. Distinct rows.

        Rules: R4, R5.
        """
        # Checked before the stamps of the first check are used again.
        source, target = self._rows.check_rows("src", src), self._rows.check_rows("dst", dst)
        if source.size != target.size:
            raise ArgumentError(f"src and dst must be of one length, got {source.size} and {target.size}.")
        self._rows.copy(source, target, vacate=True)

    def _one_row(self, name: str, row: Any) -> IntArray:
        return np.array([row_index(name, row, self.config.max_num_reqs)])

    def _group_index(self, group: Any) -> int:
        index = int_scalar("group", group)
        if not 0 <= index < len(self.config.groups):
            raise ArgumentError(f"group {index} does not exist: groups go from 0 to {len(self.config.groups) - 1}.")
        return index

    # Device.

    def commit(self, *, stream: Any = None) -> None:
        """Make every row change so far visible to kernels, in stream order.

        Changes made after the call never reach the device before the next commit. If it raises, its changes stay
        pending.

        Args:
            stream: what `stream_handle` takes. None: the current stream of the library that made the last inputs,
                else the backend's own.

        Raises:
            BlockTableError: the stream is capturing.

        Rules: R9, R21, R22, R24.
        """
        handle = self._stream(stream, None)
        writes = self._begin_commit(handle)
        self.store.write(writes, stream=handle)  # of nothing too: on a capturing stream it must raise (R21)
        self._end_commit(writes)

    def gather(
        self,
        idx_mapping: Array | None,
        num_reqs_padded: int | None = None,
        *,
        num_reqs: int | None = None,
        num_computed_tokens: Array | None = None,
        out: StepBuffers | None = None,
        stream: Any = None,
    ) -> tuple[Array, ...]:
        """Write the batch's block tables: row i holds the filled columns of row `idx_mapping[i]`, NULL behind them.

        Modifies no row.

        Args:
            idx_mapping: [num_reqs] int32. Batch index -> row; an entry outside the table is a dummy, all NULL.
                None: the identity over rows 0 .. num_reqs - 1; the result is then the device table's own first rows.
            num_reqs_padded: batch rows to produce, the further ones all NULL. None: `num_reqs`.
            num_reqs: requests; needed where `idx_mapping` is None.
            num_computed_tokens: [num_reqs] int32. Tokens computed before this step: columns that a group's sliding
                window has left behind come out NULL.
            out: a set of this table's buffers. None: the table's own.
            stream: as `commit`, where `idx_mapping` names none.

        Returns:
            One [num_reqs_padded, width] int32 for each group. Valid until the next call that writes the same set.

        Rules: R10, R11, R17, R22.
        """
        views = self._views_of(out)
        batch = self._batch(idx_mapping, None, None, num_reqs, num_reqs_padded, num_computed_tokens)
        handle = self._stream(stream, idx_mapping)
        if batch.wants_tables:
            self.store.gather(batch, self._buffers(out), stream=handle)
        return self._block_table_views(views, self._buffers(out), batch)

    def compute_slot_mappings(
        self,
        idx_mapping: Array | None,
        query_start_loc: Array,
        positions: Array,
        *,
        num_tokens_padded: int | None = None,
        out: StepBuffers | Sequence[Array] | None = None,
        stream: Any = None,
    ) -> tuple[Array, ...]:
        """Write the slot of every token for every group, and PAD from the last real token to the end of the buffer.

        Modifies no row.

        Args:
            idx_mapping: [num_reqs] int32. Batch index -> row; an entry outside the table is a dummy. None: identity.
            query_start_loc: [num_reqs + 1] int32. First token of each request; the last entry is the number of tokens.
            positions: [>= num_tokens] int64. Each token's index in its request, in any order.
            num_tokens_padded: entries of the views to return. None: the whole buffer.
            out: a set of this table's buffers, or one array for each group: of the slot dtype, contiguous, at least
                as long as `positions`. None: the table's own set.
            stream: what `stream_handle` takes. None: the current stream of the library that made `positions`.

        Returns:
            One [num_tokens_padded] of the slot dtype for each group. Valid until the next call that writes the set.

        Raises:
            ArgumentError: `positions` or `num_tokens_padded` is longer than the buffer, or lengths disagree.

        Rules: R12-R17, R22.
        """
        self._require_tokens(query_start_loc, positions)
        batch = self._batch(idx_mapping, query_start_loc, positions, None, None, None)
        num_tokens = batch.num_positions
        handle = self._stream(stream, positions)
        if isinstance(out, StepBuffers) or out is None:
            self._check_num_tokens(num_tokens, num_tokens_padded, self.config.max_num_batched_tokens)
            views, buffers = self._views_of(out), self._buffers(out)
            self.mapper.compute_slot_mappings(batch, buffers.slot_mappings, stream=handle)
            return self._slot_views(views, buffers, num_tokens_padded)
        arrays = self._check_outputs(out, num_tokens, num_tokens_padded)
        self.mapper.compute_slot_mappings(batch, arrays, stream=handle)
        return arrays if num_tokens_padded is None else tuple(array[:num_tokens_padded] for array in arrays)

    def step(
        self,
        idx_mapping: Array | None,
        query_start_loc: Array,
        positions: Array,
        *,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
        num_computed_tokens: Array | None = None,
        out: StepBuffers | None = None,
        stream: Any = None,
    ) -> Step:
        """Do a whole step: commit, gather and compute_slot_mappings.

        Args and errors: as those three. When an argument is refused nothing was committed.

        Returns:
            Views of the set `out`, the same object for the same sizes. Valid until the next call that writes the set.

        Rules: R9-R17, R22.
        """
        sizes = (num_reqs_padded, num_tokens_padded, out)
        plan = self._plan
        if not plan.serves(idx_mapping, query_start_loc, positions, num_computed_tokens, sizes):
            plan = self._make_plan(idx_mapping, query_start_loc, positions, num_computed_tokens, sizes)
        batch, buffers = plan.batch, plan.buffers
        handle = self._stream(stream, positions)
        writes = self._begin_commit(handle)
        if self._fused_step is not None:
            self._fused_step(writes, batch, buffers, stream=handle)
            self._end_commit(writes)
        else:
            if writes.num_ranges:
                self.store.write(writes, stream=handle)
            self._end_commit(writes)
            if batch.wants_tables:
                self.store.gather(batch, buffers, stream=handle)
            self.mapper.compute_slot_mappings(batch, buffers.slot_mappings, stream=handle)
        return plan.step

    def create_buffers(self) -> StepBuffers:
        """Return one more set of outputs, filled with NULL and PAD.

        For a second model, micro-batches, or a step that is prepared while another runs. Rules: R17.
        """
        buffers = self.store.create_buffers()
        self._views[buffers] = _Views()
        return buffers

    # Exports.

    def create_export(
        self, layout: str | Layout, groups: int | Sequence[int] = 0, *, capacity: int | None = None
    ) -> ExportBuffers:
        """Allocate buffers of one layout, and compile what writes them. Waits for the device; not inside a capture.

        Args:
            layout: a layout, or the name of one of `LAYOUTS`.
            groups: a group, or several of one geometry, whose counts are then computed once.
            capacity: "csr", "token_csr": entries of each group's indices. None: enough for any batch.

        Returns:
            A set for `export(out=)`. Keep the object itself: `invalidate` refills the sets that live.

        Raises:
            UnsupportedError: the backend does not declare `exports`.
            ArgumentError, ConfigError: the groups cannot be exported in this layout.

        Rules: R25-R31.
        """
        self._require("exports", "create_export()")
        found, chosen = find_layout(layout), self._exports.check_groups(groups)
        self._refuse_capture(found, self._stream(None, None))
        return self._exports.create(found, chosen, capacity)

    def export(
        self,
        layout: str | Layout,
        idx_mapping: Array | None,
        *,
        groups: int | Sequence[int] = 0,
        seq_lens: Array | None = None,
        num_reqs: int | None = None,
        num_reqs_padded: int | None = None,
        num_computed_tokens: Array | None = None,
        out: ExportBuffers | StepBuffers | None = None,
        stream: Any = None,
    ) -> Export:
        """Write the batch, as of the last commit, in the layout that an attention kernel reads. Modifies no row.

        A layout of kind "table" that the batch table itself meets is that batch table: nothing is launched, and it
        holds what the last `gather` or `step` wrote into the set.

        Args:
            layout: a layout, or the name of one of `LAYOUTS`.
            idx_mapping: [num_reqs] int32. As `gather`; None: the identity.
            groups: a group, or several of one geometry.
            seq_lens: [num_reqs] int32. Tokens of each sequence, over all ranks, this step's included. Needed for CSR,
                lengths, the inverse map and aligned states.
            num_reqs: requests; needed where `idx_mapping` is None and nothing else says it.
            num_reqs_padded: batch rows of the result, the further ones without entries. None: `num_reqs`.
            num_computed_tokens: [num_reqs] int32. As `gather`.
            out: what `create_export` made for this layout and these groups; or a set of this table's buffers, to which
                one such set for each layout belongs, made at the first call. None: the table's own set of buffers.
            stream: as `gather`.

        Returns:
            Views, the same object for the same sizes. Valid until the next call that writes the same buffers.

        Raises:
            UnsupportedError: the backend does not declare `exports`.
            BlockTableError: the first export into a set that belongs to one of buffers, or host arrays, on a capturing
                stream.
            ArgumentError, ConfigError, DtypeError: a bad argument. Nothing was launched.

        Rules: R25-R31.
        """
        self._require("exports", "export()")
        found, chosen = find_layout(layout), self._exports.check_groups(groups)
        require_seq_lens(found, seq_lens)
        requests = num_reqs
        if seq_lens is not None:
            requests = self._check_seq_lens(seq_lens, num_reqs)
        checked = self._batch(idx_mapping, None, None, requests, num_reqs_padded, num_computed_tokens)
        handle = self._stream(stream, seq_lens if idx_mapping is None else idx_mapping)
        if isinstance(out, ExportBuffers):
            self._exports.check_own(out)
            if (out.layout, out.groups) != (found, chosen):
                raise ArgumentError(
                    f"out was made for layout {out.layout.name!r} of groups {out.groups}, not for {found.name!r} of "
                    f"groups {chosen}."
                )
            target = out
        else:
            views, buffers = self._views_of(out), self._buffers(out)
            if is_batch_table(self.config, found, chosen):
                tables = self._block_table_views(views, buffers, checked)
                return self._exports.batch_tables(found, chosen, buffers, tables)
            target = self._export_buffers(found, chosen, buffers, handle)
        if found.kind != "placeholder":
            batch = Batch(
                idx_mapping,
                None,
                None,
                checked.num_reqs,
                checked.num_reqs_padded,
                num_computed_tokens,
                seq_lens=seq_lens,
            )
            self.store.export(found, batch, target, stream=handle)  # type: ignore[attr-defined]
        return self._exports.view(target, checked.num_reqs_padded)

    def step_metadata(
        self,
        idx_mapping: Array | None,
        query_start_loc: Array,
        positions: Array,
        seq_lens: Array,
        *,
        layouts: Layouts = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
        num_computed_tokens: Array | None = None,
        out: StepBuffers | None = None,
        stream: Any = None,
    ) -> StepMetadata:
        """Do a whole step, export it for each group, and return what an attention backend takes.

        Groups of one layout and geometry are exported by one call, which counts once for all of them; lengths of this
        rank are computed once for all groups that ranks share.

        Args:
            idx_mapping, query_start_loc, positions, num_reqs_padded, num_tokens_padded, num_computed_tokens, out,
                stream: as `step`.
            seq_lens: [num_reqs] int32. Tokens of each sequence, over all ranks, this step's included.
            layouts: what to export: one layout or name for all groups, or one for each; None: nothing.
            max_query_len, max_seq_len: handed on.

        Raises:
            As `step` and `export`. When an argument is refused nothing was committed.

        Rules: R25, R33.
        """
        chosen = layouts_per_group(self.config, layouts)
        plan = self._metadata_plans.get(chosen)
        if plan is None:
            plan = self._metadata_plans[chosen] = make_plan(self.config, chosen)
        if plan.families:
            self._require("exports", "step_metadata() with layouts, or over ranks that share a group,")
        num_reqs = self._num_reqs(idx_mapping, query_start_loc, None)
        self._check_seq_lens(seq_lens, num_reqs)
        handle, buffers = self._stream(stream, positions), self._buffers(out)
        self._views_of(out)
        for family in plan.families:  # refused before anything is committed
            if is_batch_table(self.config, family.layout, family.groups):
                check_block_size(self.config.groups[family.groups[0]], [family.layout])
            else:
                self._export_buffers(family.layout, family.groups, buffers, handle)
        step = self.step(
            idx_mapping,
            query_start_loc,
            positions,
            num_reqs_padded=num_reqs_padded,
            num_tokens_padded=num_tokens_padded,
            num_computed_tokens=num_computed_tokens,
            out=out,
            stream=stream,
        )
        padded = num_reqs if num_reqs_padded is None else num_reqs_padded
        exports = [
            self.export(
                family.layout,
                idx_mapping,
                groups=family.groups,
                seq_lens=seq_lens,
                num_reqs_padded=padded,
                num_computed_tokens=num_computed_tokens,
                out=out,
                stream=stream,
            )
            for family in plan.families
        ]
        return make_metadata(
            plan,
            step,
            exports,
            query_start_loc,
            seq_lens,
            config=self.config,
            num_reqs=num_reqs,
            num_reqs_padded=padded,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )

    def _check_seq_lens(self, seq_lens: Array, num_reqs: int | None) -> int:
        """Check lengths that are given, and return how many there are."""
        if seq_lens is None:
            raise DtypeError("seq_lens must be an int32 array of num_reqs entries, got None.")
        found = vector_length("seq_lens", seq_lens, "int32")
        if num_reqs not in (None, found):
            raise ArgumentError(f"seq_lens must hold {num_reqs} entries, one a request, got {found}.")
        self._require_device(seq_lens)
        return found

    def _export_buffers(
        self, layout: Layout, groups: tuple[int, ...], buffers: StepBuffers, stream: int | None
    ) -> ExportBuffers:
        """Return the export buffers that belong to a set, made at the first call."""
        found = self._exports.find(layout, groups, buffers)
        if found is None:
            self._refuse_capture(layout, stream)
            found = self._exports.create(layout, groups, None)
            self._exports.keep(found, buffers)
        return found

    def _refuse_capture(self, layout: Layout, stream: int | None) -> None:
        """Refuse to make buffers on a capturing stream, which shows by a write of nothing (R21)."""
        nothing = np.empty(0, np.int64)
        no_writes = Writes(self.config.arena, nothing, nothing.astype(np.int32), nothing.astype(np.int32))
        try:
            self.store.write(no_writes, stream=stream)
        except BlockTableError as error:
            raise BlockTableError(
                f"Buffers of layout {layout.name!r} cannot be made inside a capture: export once before it, or call "
                "create_export() before it and pass its result as out=."
            ) from error

    def warmup(self) -> None:
        """Compile and load everything a later step needs. Modifies no row and no set of buffers. Rules: R21."""
        nothing = np.empty(0, np.int64)
        no_writes = Writes(self.config.arena, nothing, nothing.astype(np.int32), nothing.astype(np.int32))
        self.store.write(no_writes, stream=None)
        buffers = self.store.create_buffers()
        dummy, starts, positions, computed = (
            self.backend.from_host(np.array(values, dtype), self.device)
            for values, dtype in (([-1], np.int32), ([0, 1], np.int32), ([0], np.int64), ([0], np.int32))
        )
        for idx_mapping in (dummy, None):
            for num_computed_tokens in (None, computed):
                batch = Batch(idx_mapping, starts, positions, 1, 1, num_computed_tokens, 1)
                self.store.gather(batch, buffers, stream=None)
                self.mapper.compute_slot_mappings(batch, buffers.slot_mappings, stream=None)
                if self._fused_step is not None:
                    self._fused_step(no_writes, batch, buffers, stream=None)
        self.backend.synchronize(self.device)
        self._rows.warmup()

    def invalidate(self) -> None:
        """Trust nothing on the device any more: its memory was released and mapped again (sleep and wake).

        The next commit sends everything and refills every set of buffers; addresses and captured graphs stay valid.

        Rules: R24.
        """
        self._rows.invalidate()
        self._is_invalid = True

    def _begin_commit(self, stream: int | None) -> Writes:
        if self._is_invalid:
            for buffers in list(self._views):
                self.store.reset_buffers(buffers, stream=stream)
            self._exports.reset(stream)
        return self._rows.writes()

    def _end_commit(self, writes: Writes) -> None:
        """Forget what the store has taken; until then it stays pending."""
        self._rows.journal.clear()
        self._is_invalid = False
        self.num_bytes_sent += writes.num_bytes

    def _stream(self, stream: Any, array: Array | None) -> int | None:
        if not self._has_streams:
            if stream is not None:
                self._require("streams", "stream=")
            return None
        if stream is not None:
            return stream_handle(stream)
        if array is not None and array is not self._last_array:
            self._last_array = array
            self._stream_owner = stream_owner(array) or self._stream_owner
            self._current_stream = current_stream_getter(self._stream_owner)
        return self._current_stream()

    # Arguments of a step.

    def _make_plan(
        self,
        idx_mapping: Array | None,
        query_start_loc: Array,
        positions: Array,
        num_computed_tokens: Array | None,
        sizes: tuple[int | None, int | None, StepBuffers | None],
    ) -> _Plan:
        num_reqs_padded, num_tokens_padded, out = sizes
        self._require_tokens(query_start_loc, positions)
        batch = self._batch(
            idx_mapping, query_start_loc, positions, None, num_reqs_padded, num_computed_tokens, will_commit=True
        )
        self._check_num_tokens(batch.num_positions, num_tokens_padded, self.config.max_num_batched_tokens)
        views, buffers = self._views_of(out), self._buffers(out)
        self._plan = _Plan(batch, buffers, self._step_view(views, buffers, batch, num_tokens_padded), sizes)
        return self._plan

    def _batch(
        self,
        idx_mapping: Array | None,
        query_start_loc: Array | None,
        positions: Array | None,
        num_reqs: int | None,
        num_reqs_padded: int | None,
        num_computed_tokens: Array | None,
        *,
        will_commit: bool = False,
    ) -> Batch:
        requests = self._num_reqs(idx_mapping, query_start_loc, num_reqs)
        padded = requests if num_reqs_padded is None else num_reqs_padded
        num_positions = 0 if positions is None else vector_length("positions", positions, "int64")
        if num_computed_tokens is not None:
            length = vector_length("num_computed_tokens", num_computed_tokens, "int32")
            if length != requests:
                raise ArgumentError(f"num_computed_tokens must hold {requests} entries, one a request, got {length}.")
        padded = int_scalar("num_reqs_padded", padded)
        if not requests <= padded <= self.config.max_num_reqs:
            raise ArgumentError(
                f"num_reqs_padded {padded} must be at least the {requests} requests of the batch and at most "
                f"max_num_reqs {self.config.max_num_reqs}."
            )
        if idx_mapping is None and padded > requests:
            self._require_empty_rows(requests, padded, will_commit=will_commit)
        for array in (idx_mapping, query_start_loc, positions, num_computed_tokens):
            self._require_device(array)
        # With the identity the batch's tables are the table's own rows, unless a window must be cut out of a copy.
        wants_tables = idx_mapping is not None or (num_computed_tokens is not None and self._has_windows)
        return Batch(
            idx_mapping,
            query_start_loc,
            positions,
            requests,
            padded,
            num_computed_tokens,
            num_positions,
            wants_tables,
        )

    def _num_reqs(self, idx_mapping: Array | None, query_start_loc: Array | None, num_reqs: int | None) -> int:
        found: dict[str, int] = {}
        if idx_mapping is not None:
            found["idx_mapping"] = vector_length("idx_mapping", idx_mapping, "int32")
        if query_start_loc is not None:
            entries = vector_length("query_start_loc", query_start_loc, "int32")
            if entries == 0:
                raise ArgumentError("query_start_loc must hold num_reqs + 1 entries, got none; no requests is [0].")
            found["query_start_loc"] = entries - 1
        if num_reqs is not None:
            found["num_reqs"] = non_negative("num_reqs", num_reqs)
        if not found:
            raise ArgumentError("num_reqs is needed where idx_mapping is None.")
        requests = next(iter(found.values()))
        if len(set(found.values())) > 1:
            raise ArgumentError(
                "The numbers of requests disagree: " + ", ".join(f"{name} says {n}" for name, n in found.items()) + "."
            )
        if requests > self.config.max_num_reqs:
            raise ArgumentError(f"A batch of {requests} requests is above max_num_reqs {self.config.max_num_reqs}.")
        return requests

    def _require_device(self, array: Array | None) -> None:
        """Refuse what lies elsewhere, before anything is committed."""
        if not self._has_streams:
            if getattr(array, "is_cuda", False):
                raise ArgumentError(f"Backend {self.backend.name!r} works on the host; an array on a GPU was given.")
            return
        if not getattr(array, "is_cuda", True):
            raise ArgumentError(
                "A torch tensor in the host's memory was given; pass it on the table's device, or as a numpy array, "
                "which is staged."
            )
        owner, own = stream_owner(array), stream_owner(self.buffers.slot_mappings[0])
        if owner is not None and own is not None and owner[1] != own[1]:
            raise ArgumentError(f"An array on device {owner[1]} was given to a table on device {own[1]}.")

    def _require_tokens(self, query_start_loc: Array | None, positions: Array | None) -> None:
        if query_start_loc is None:
            raise DtypeError("query_start_loc must be an int32 array of num_reqs + 1 entries, got None.")
        if positions is None:
            raise DtypeError("positions must be an int64 array of at least num_tokens entries, got None.")

    def _require_empty_rows(self, start: int, stop: int, *, will_commit: bool) -> None:
        occupied = np.flatnonzero(self._rows.filled[:, start:stop].any(0))
        if occupied.size:
            raise ArgumentError(
                f"Row {start + occupied[0]} is not empty: with idx_mapping=None the rows from num_reqs {start} to "
                f"num_reqs_padded {stop} are the batch's padding; clear it, move it, or pass an idx_mapping."
            )
        pending = np.empty(0) if will_commit else self._rows.pending_counts(start, stop)
        if pending.size:
            raise ArgumentError(
                f"Row {pending[0]} has changes that are not on the device yet: with idx_mapping=None the rows from "
                f"num_reqs {start} to num_reqs_padded {stop} are the batch's padding; commit first."
            )

    def _check_num_tokens(self, num_tokens: int, num_tokens_padded: int | None, size: int) -> None:
        if num_tokens > size:
            raise ArgumentError(f"positions holds {num_tokens} tokens, but the slot buffer has {size} entries.")
        if num_tokens_padded is not None and non_negative("num_tokens_padded", num_tokens_padded) > size:
            raise ArgumentError(f"num_tokens_padded {num_tokens_padded} is above the slot buffer's {size} entries.")

    def _check_outputs(self, out: Any, num_tokens: int, num_tokens_padded: int | None) -> tuple[Array, ...]:
        num_groups = len(self.config.groups)
        if not isinstance(out, Sequence) or len(out) != num_groups:
            raise ArgumentError(
                f"out must be a set of buffers from create_buffers(), or {num_groups} arrays, one a group."
            )
        if len({id(array) for array in out}) < num_groups:
            raise ArgumentError("out must hold another array for each group; one is given twice.")
        for group, array in enumerate(out):
            name = f"out[{group}]"
            self._check_num_tokens(num_tokens, num_tokens_padded, vector_length(name, array, self.config.slot_dtype))
            if isinstance(array, np.ndarray) != isinstance(self.buffers.slot_mappings[group], np.ndarray):
                raise DtypeError(
                    f"{name} must be on the device of backend {self.backend.name!r}, got {type(array).__name__}."
                )
            if isinstance(array, np.ndarray) and not array.flags.writeable:
                raise ArgumentError(f"{name} is read-only.")
        return tuple(out)

    # Views.

    def _buffers(self, out: StepBuffers | None) -> StepBuffers:
        return self.buffers if out is None else out

    def _views_of(self, out: StepBuffers | None) -> _Views:
        buffers: Any = self._buffers(out)
        views = self._views.get(buffers) if isinstance(buffers, StepBuffers) else None
        if views is None:
            raise ArgumentError("out must be a set of buffers that this table's create_buffers() made.")
        return views

    def _block_table_views(self, views: _Views, buffers: StepBuffers, batch: Batch) -> tuple[Array, ...]:
        num_rows, identity, windowed = _view_key(batch)
        found = views.block_tables.get((num_rows, identity, windowed))
        if found is None:
            found = tuple(
                (self.store.table(index) if identity and not (windowed and group.sliding_window) else table)[:num_rows]
                for index, (group, table) in enumerate(zip(self.config.groups, buffers.block_tables, strict=True))
            )
            _remember(views.block_tables, (num_rows, identity, windowed), found)
        return found

    def _slot_views(self, views: _Views, buffers: StepBuffers, num_tokens_padded: int | None) -> tuple[Array, ...]:
        if num_tokens_padded is None:
            return buffers.slot_mappings
        found = views.slot_mappings.get(num_tokens_padded)
        if found is None:
            found = tuple(slots[:num_tokens_padded] for slots in buffers.slot_mappings)
            _remember(views.slot_mappings, num_tokens_padded, found)
        return found

    def _step_view(self, views: _Views, buffers: StepBuffers, batch: Batch, num_tokens_padded: int | None) -> Step:
        key = (*_view_key(batch), -1 if num_tokens_padded is None else num_tokens_padded)
        found = views.steps.get(key)
        if found is None:
            found = Step(
                self._block_table_views(views, buffers, batch), self._slot_views(views, buffers, num_tokens_padded)
            )
            _remember(views.steps, key, found)
        return found

    # Looking.

    def observe(self, observer: Observer) -> Observation:
        """Tell `observer` of every call that changes rows or writes outputs, until the result is closed.

        A table that nobody observes pays nothing for it. Methods that were fetched before, such as
        `step = table.step`, are not observed.

        Args:
            observer: whom to tell. Several may observe one table; they are told in the order in which they came.

        Returns:
            A context manager; its `close` ends the observation.
        """
        return Observation(self._observed_calls, observer)

    def record(self, path: str | Path, *, digests: bool = False) -> OpenRecording:
        """Write every row change and step to a file until the result is closed; `blocktable replay FILE` runs it again.

        A table that is not recorded pays nothing for it.

        Args:
            path: the file (docs/recording.md); it is replaced.
            digests: whether to fetch every step's outputs and write their digest down. Slow: it waits for the device.

        Returns:
            A context manager; its `close` ends the recording.

        Raises:
            UnsupportedError: no recorder is installed.
            ArgumentError: the table is being recorded already.
        """
        return start_recording(self, path, digests=digests)

    @property
    def num_blocks_per_row(self) -> IntArray:
        """[num_groups, max_num_reqs] int32, read-only. Manager blocks that each row holds now, on the host."""
        blocks = (self._rows.filled // self._rows.columns_per_block).astype(np.int32)
        blocks.flags.writeable = False
        return blocks

    def host_table(self, group: int) -> IntArray:
        """Return a group's rows on the host, [max_num_reqs, width] int32, as a read-only view that follows changes."""
        view: IntArray = self.config.arena.view(self._rows.watch(), self._group_index(group)).view()
        view.flags.writeable = False
        return view

    def host_row(self, group: int, row: int) -> IntArray:
        """Return a copy of the columns that a row holds now, [n] int32, on the host.

        Unlike `host_table` it slows no later change down.
        """
        index, (number,) = self._group_index(group), self._one_row("row", row)
        filled = self._rows.filled[index, number]
        columns: IntArray = self.config.arena.view(self._rows.mirror, index)[number, :filled].copy()
        return columns

    def device_table(self, group: int) -> Array:
        """Return a group's rows on the device, [max_num_reqs, width] int32, without a copy; callers only read."""
        return self.store.table(self._group_index(group))

    def verify(self) -> None:
        """Wait for the device and compare it with the host as of the last commit; pending entries are not compared.

        Raises:
            BlockTableError: naming the first entry that differs.

        Rules: R5, R9.
        """
        pending = np.zeros(self.config.arena.size, np.bool_)
        offsets, lengths = self._rows.journal.merge()
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
            pending[offset : offset + length] = True
        for group in range(-1, len(self.config.groups)):
            expected = self.config.arena.view(self._rows.mirror, group)
            got = self.backend.to_host(self.store.table(group))
            wrong = np.argwhere((got != expected) & ~self.config.arena.view(pending, group))
            if wrong.size:
                row, column = wrong[0]
                where = (
                    f"group {row}, filled columns of row {column}"
                    if group < 0
                    else f"group {group}, row {row}, column {column}"
                )
                raise BlockTableError(
                    f"The device differs from the host at {where}: it holds {got[row, column]}, the host "
                    f"{expected[row, column]}; {len(wrong)} entries differ there (R9)."
                )

    def locate(self, group: int, slot: int) -> SlotLocation:
        """Say where a slot lies and which rows hold its block now, on the host. For debugging: it searches the table.

        In a ring group the position is the smallest one that the slot can stand for.

        Raises:
            ArgumentError: it is no slot of the group (PAD, or beyond the last block).

        Rules: R2, R12.
        """
        index, number = self._group_index(group), int_scalar("slot", slot)
        geometry = self.config.groups[index]
        tokens = geometry.tokens_per_column
        expansion = geometry.blocks_per_kv_block
        if geometry.slot_mode == "none":
            raise ArgumentError(f'group {index} has slot_mode="none": it has no slots.')
        if not 0 <= number < geometry.block_id_limit * geometry.block_size:
            meaning = " (PAD_SLOT_ID, no slot)" if number == PAD_SLOT_ID else ""
            raise ArgumentError(f"slot {number}{meaning} is outside the cache of group {index}.")
        kernel_block_id, offset = divmod(number, tokens)
        table, filled = self.config.arena.view(self._rows.mirror, index), self._rows.filled[index]
        rows, columns = np.nonzero(table == kernel_block_id)
        held = columns < filled[rows]
        return SlotLocation(
            kernel_block_id // expansion,
            kernel_block_id,
            offset,
            tuple(
                (row, column // expansion, self._position(index, column * tokens + offset))
                for row, column in zip(rows[held].tolist(), columns[held].tolist(), strict=True)
            ),
        )

    def _position(self, group: int, local: int) -> int:
        if not self.config.groups[group].is_sharded:
            return local
        shard = self.config.context_parallel
        turn, offset = divmod(local, shard.interleave_size)
        return turn * shard.world_size * shard.interleave_size + shard.rank * shard.interleave_size + offset


def _view_key(batch: Batch) -> tuple[int, bool, bool]:
    return batch.num_reqs_padded, batch.idx_mapping is None, batch.num_computed_tokens is not None


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    if len(cache) >= MAX_CACHED_VIEWS:  # an engine that never pads asks for every size
        cache.clear()
    cache[key] = value
