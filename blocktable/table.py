"""The block table: rows on the host, their copy on a device, the batch view and the slot mappings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from blocktable.arrays import AnyArray, Array, IntArray
from blocktable.batches import BatchChecks, SeqLens, StepPlan, require_tokens
from blocktable.checking import CheckMode, check_mode, make_checker, plan_checking
from blocktable.config import BlockTableConfig
from blocktable.errors import ConfigError, DtypeError, UnsupportedError
from blocktable.export_calls import ExportCalls
from blocktable.exports import ExportSets, check_groups
from blocktable.findings import CheckKinds, Finding, Findings
from blocktable.host_path import make_rows
from blocktable.inputs import Reading, read_each, read_step, torch_modes_off, without_torch_modes
from blocktable.metadata import Layouts, MetadataPlans, StepMetadata, lengths_of, make_metadata
from blocktable.observer import Observation, ObservedCalls, Observer, OpenRecording, start_recording
from blocktable.overlaps import refuse_overlaps
from blocktable.protocols import STEP_INPUTS, Backend, Batch, BlockStore, SlotMapper, Step, StepBuffers, no_writes
from blocktable.ranks import RankCalls
from blocktable.registry import check_backend, get_backend
from blocktable.streams import current_stream_getter, stream_handle, stream_owner
from blocktable.views import BufferViews, Views, batch_key

StepPath = Literal["auto", "separate", "fused"]

NO_ADDRESSES = (None,) * len(STEP_INPUTS)
"""Of a step whose inputs were not looked at."""


class BlockTable(RankCalls, ExportCalls):
    """Which KV-cache block and slot each token of each request lives in, on the host and on a device.

    Row operations change the host only; `commit` (or `step`) makes them visible to kernels. One thread at a time
    uses a table; tables share nothing.

    Args:
        config: the geometry.
        backend: a name that `get_backend` takes, or a backend object.
        device: what the backend calls a device. None: its default.
        step_path: "fused" or "separate" calls of the backend in `step`; "auto": fused where the backend has it.
        check: whether to look for the engine's own mistakes: "off"; "host": every call, before it does anything, which
            costs about as much as the numpy backend's step and waits for device arrays; "device": without a wait. None:
            what the environment's BLOCKTABLE_CHECK says, else "off".
        check_kinds: kind of finding -> "raise", "report" or "off", where it differs from `KINDS`; or one such mapping
            for each group.
        on_finding: is called with each `Finding`; then none raises, and calls go on.

    Attributes:
        config: as given; in device mode with what kernels check (`check_plan`).
        backend: the backend object.
        device: as given.
        check: the mode.
        store: the backend's memory.
        mapper: the backend's slot mapper.
        buffers: the table's own set of outputs.
        num_bytes_sent: bytes of all changes committed so far, as ranges.

    Raises:
        ConfigError: a value is impossible.
        UnsupportedError: the configuration or `step_path` needs a capability the backend does not declare.

    Rules: R4-R24, R38-R41 of the contract, which is docs/spec.md in the sources and blocktable/spec.md in a wheel.
    """

    @without_torch_modes
    def __init__(
        self,
        config: BlockTableConfig,
        backend: str | Backend,
        device: Any = None,
        *,
        step_path: StepPath = "auto",
        check: CheckMode | None = None,
        check_kinds: CheckKinds | Sequence[CheckKinds] | None = None,
        on_finding: Callable[[Finding], None] | None = None,
    ) -> None:
        if not isinstance(config, BlockTableConfig):
            raise ConfigError(f"config must be a BlockTableConfig, got {type(config).__name__}.")
        if step_path not in get_args(StepPath):
            raise ConfigError(f"step_path must be one of {get_args(StepPath)}, got {step_path!r}.")
        self.check: CheckMode = check_mode(check)
        findings = Findings(len(config.groups), check_kinds, on_finding)
        config = plan_checking(self.check, config, findings)
        self.config: BlockTableConfig = config
        self.backend: Backend = get_backend(backend) if isinstance(backend, str) else check_backend(backend)
        self.device = device
        if config.slot_dtype == "int32":
            self._require("int32_slots", 'slot_dtype="int32"')
        if step_path == "fused":
            self._require("fused_step", 'step_path="fused"')
        if self.check == "device":
            self._require("device_checks", 'check="device"')
        self._has_streams = "streams" in self.backend.capabilities
        self._current_stream: Callable[[], int | None] = current_stream_getter(None)  # of who made the last inputs
        self._rows = make_rows(config)
        self._is_invalid = False
        self.num_bytes_sent: int = 0
        self._num_commits = 0  # with changes
        self.store: BlockStore = self.backend.create_block_store(config, device)
        self.mapper: SlotMapper = self.backend.create_slot_mapper(self.store)
        self._checker = make_checker(self.check, config, self.backend, device, self.store, findings)
        if self._checker is not None:
            self._rows = self._checker.checked_rows(self._rows)
        self._committed = self._rows.committed
        self._views = BufferViews(config, self.store)
        self._exports = ExportSets(config, self.backend, device, self.store)
        self._metadata = MetadataPlans(config)
        # Where the store lends memory for changes, the core packs them into it.
        self._lender: Any = self.store if hasattr(self.store, "lend") else None
        can_fuse = self._lender is not None and "fused_step" in self.backend.capabilities
        self._is_fused = can_fuse and step_path != "separate"
        if step_path == "fused" and not can_fuse:
            raise UnsupportedError(
                f'Backend {self.backend.name!r} has no fused step that checks: with check="device" leave step_path '
                'to "auto", or set it to "separate".'
            )
        self._prepares = self._is_fused and hasattr(self.store, "prepare_step")
        self.buffers: StepBuffers = self.create_buffers()
        self._own_views = self._views.of(self.buffers)
        self._checks = BatchChecks(config, self.backend, self._rows, self.buffers.slot_mappings[0])
        self._observed_calls = ObservedCalls(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copy.copy, copy.deepcopy and pickle. Rules: R17."""
        raise DtypeError(
            "A BlockTable cannot be copied or pickled: it owns device memory that kernels and captured graphs address. "
            "Pickle its config, which is plain data, make a table of it, and set the rows from block_ids()."
        )

    # Device.

    def commit(self, *, stream: Any = None) -> None:
        """Make every row change so far visible to kernels, in stream order.

        Later changes never reach the device before the next commit. If it raises, its changes stay pending.

        Args:
            stream: what `stream_handle` takes. None: the current stream of the library that made the last inputs,
                else the backend's own.

        Raises:
            BlockTableError: the stream is capturing.

        Rules: R9, R21, R22, R24.
        """
        handle = self._stream(stream, None)
        if self._checker is not None:
            self._checker.before_commit(handle)
        self._commit(handle)
        if self._checker is not None:
            self._checker.after_call()

    def _commit(self, stream: int | None) -> None:
        if self._lender is None:
            self._reset_invalid(stream)
            self.store.write(self._rows.writes(), stream=stream)
        else:
            block = self._lender.lend(stream)  # for nothing too: on a capturing stream it must raise (R21)
            self._lender.commit(self._pack_changes(block, stream), stream=stream)
        self._end_commit()

    def _pack_changes(self, block: IntArray, stream: int | None) -> int:
        """Pack what is pending into memory that the store has lent; return the entries used, 0 where all is sent."""
        self._reset_invalid(stream)
        used = self._rows.pack_changes(block)
        if used < 0:  # more than it takes
            self.store.write(self._rows.writes(), stream=stream)
            return 0
        return used

    @without_torch_modes
    def gather(
        self,
        idx_mapping: AnyArray | None,
        num_reqs_padded: int | None = None,
        *,
        num_reqs: int | None = None,
        num_computed_tokens: AnyArray | None = None,
        out: StepBuffers | None = None,
        stream: Any = None,
    ) -> tuple[Array, ...]:
        """Write the batch's block tables: row i holds the filled columns of row `idx_mapping[i]`, NULL after them.

        Modifies no row.

        Args:
            idx_mapping: [num_reqs] int32. Batch index -> row; one outside the table is a padding entry, all NULL.
                None: the identity over rows 0 .. num_reqs - 1; the result is then the device table's own first rows.
            num_reqs_padded: batch rows to produce, the further ones all NULL. None: `num_reqs`.
            num_reqs: requests; needed where `idx_mapping` is None.
            num_computed_tokens: [num_reqs] int32. Tokens computed before this step: columns that a group's sliding
                window has passed are NULL.
            out: a set of this table's buffers. None: the table's own.
            stream: as `commit`, where `idx_mapping` names none.

        Returns:
            One [num_reqs_padded, width] int32 for each group. Valid until the next call that writes the same set.

        Rules: R10, R11, R17, R22.
        """
        buffers = self._buffers(out)
        batch = self._checks.batch(idx_mapping, None, None, num_reqs, num_reqs_padded, num_computed_tokens)
        views = self._views.of(buffers)
        views.memory.refuse((("idx_mapping", idx_mapping), ("num_computed_tokens", num_computed_tokens)))
        handle = self._stream(stream, idx_mapping)
        if batch.needs_gather:
            if self._checker is not None:
                self._checker.before_gather(batch, buffers, handle)
            self.store.gather(batch, buffers, stream=handle)
            views.held = batch_key(batch.num_reqs, idx_mapping, num_computed_tokens)
            views.held_commits = self._num_commits
        return self._views.block_tables(buffers, batch)

    @without_torch_modes
    def compute_slot_mappings(
        self,
        idx_mapping: AnyArray | None,
        query_start_loc: AnyArray,
        positions: AnyArray,
        *,
        num_tokens_padded: int | None = None,
        groups: Sequence[int] | None = None,
        out: StepBuffers | Sequence[AnyArray] | None = None,
        stream: Any = None,
    ) -> tuple[Array, ...]:
        """Write the slot of every token for every group, and PAD from the last real token to the end of the buffer.

        Modifies no row.

        Args:
            idx_mapping: [num_reqs] int32. Batch index -> row; one outside the table is a padding entry. None: identity.
            query_start_loc: [num_reqs + 1] int32. First token of each request; the last entry is the number of tokens.
            positions: [>= num_tokens] int64. Each token's index in its request, in any order.
            num_tokens_padded: entries of the views to return. None: `len(positions)`; of arrays given as `out` all.
            groups: distinct groups: only theirs are written and returned, in this order, and cross-attention groups
                among them have slots. None: all groups.
            out: a set of this table's buffers, or one array for each group: of the slot dtype, contiguous, at least
                as long as `positions`. None: the table's own set.
            stream: what `stream_handle` takes. None: the current stream of the library that made `positions`.

        Returns:
            One [num_tokens_padded] of the slot dtype for each group. Valid until the next call that writes the set.

        Raises:
            ArgumentError: `positions` or `num_tokens_padded` is longer than the buffer, lengths disagree, or `groups`
                are not distinct ones of this table.

        Rules: R12-R17, R22.
        """
        require_tokens(query_start_loc, positions)
        chosen = None if groups is None else check_groups(self.config, groups)
        batch = self._checks.batch(idx_mapping, query_start_loc, positions, None, None, None)
        buffers = self._buffers(out) if isinstance(out, StepBuffers) or out is None else None
        arrays, returned = self._checks.slot_outputs(batch, buffers, out, chosen, num_tokens_padded, self._views)
        inputs = ("idx_mapping", idx_mapping), ("query_start_loc", query_start_loc), ("positions", positions)
        if buffers is None:
            refuse_overlaps([(f"out[{place}]", array) for place, array in enumerate(arrays)], inputs)
        else:
            self._views.of(buffers).memory.refuse(inputs)
        handle = self._stream(stream, positions)
        if self._checker is not None:
            self._checker.before_slots(batch, num_tokens_padded, chosen, handle)
        options: Any = {} if chosen is None else {"groups": chosen}  # what most calls of a mapper never see
        self.mapper.compute_slot_mappings(batch, arrays, stream=handle, **options)
        if self._checker is not None:
            self._checker.after_call()
        return returned

    def step(
        self,
        idx_mapping: AnyArray | None,
        query_start_loc: AnyArray,
        positions: AnyArray,
        *,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
        num_computed_tokens: AnyArray | None = None,
        out: StepBuffers | None = None,
        stream: Any = None,
    ) -> Step:
        """Do a whole step: commit, gather and compute_slot_mappings of all groups.

        Args and errors: as those three. When an argument is refused nothing was committed.
        `num_reqs_padded` and `num_tokens_padded` are the batch rows and the slots that are returned. Left out, nothing
        is padded: `num_reqs` rows and `len(positions)` slots. The set is written to its end in each case: batch rows
        after the requests are NULL (with `idx_mapping` None they are the table's own rows), slots after the last real
        token are PAD.

        Returns:
            Views of the set `out`, the same object for the same sizes. Valid until the next call that writes the set.

        Rules: R9-R17, R22.
        """
        views = self._own_views if out is None else self._views.of(out)
        arrays = idx_mapping, num_computed_tokens, query_start_loc, positions
        reading = read_step(arrays)
        # With the types of the sizes: True equals 1, and is refused.
        sizes = num_reqs_padded, type(num_reqs_padded), num_tokens_padded, type(num_tokens_padded)
        lengths = reading[1]
        num_positions = lengths[3]
        # For any number of tokens, which changes from step to step; but strides say nothing of an array of one entry.
        key = reading[0], lengths[:3], num_positions and num_positions > 1, sizes
        try:
            plan = views.plans.get(key)
        except (TypeError, ValueError):  # sizes that are not hashable are no sizes
            plan = None
        if plan is not None and plan.num_positions != num_positions:
            plan = self._resize_plan(plan, num_positions, num_tokens_padded, out)
        if plan is None:
            plan = self._make_plan(arrays, reading, None, num_reqs_padded, num_tokens_padded, out)
            views.keep_plan(key, plan)
        self._run(plan, views, out, arrays, reading[2], stream)
        return plan.step

    def _make_plan(
        self,
        arrays: tuple[Array | None, ...],
        reading: Reading,
        seq_lens: SeqLens,
        num_reqs_padded: int | None,
        num_tokens_padded: int | None,
        out: StepBuffers | None,
    ) -> StepPlan:
        """Check the arguments of a step, and say what it has in common with steps over such arrays.

        Args:
            arrays: in the order of `STEP_INPUTS`.
            reading: what they are.
            seq_lens: as `step_metadata` keeps them.
            num_reqs_padded, num_tokens_padded, out: as given.
        """
        batch, current_stream = self._checks.step(arrays, reading, num_reqs_padded, seq_lens)
        self._checks.num_tokens(batch.num_positions, num_tokens_padded)
        buffers, addresses = self._buffers(out), reading[2]
        num_returned = batch.num_positions if num_tokens_padded is None else num_tokens_padded
        return StepPlan(
            batch,
            self._views.step(buffers, batch, num_returned),
            self._lender.prepare_step(batch, buffers, addresses) if self._prepares else None,
            current_stream,
            views=self._views.of(buffers).memory.to_look_at(arrays),
            has_addresses=(batch.idx_mapping is None or addresses[0] is not None)
            and (batch.num_computed_tokens is None or addresses[1] is not None),
            num_tokens_padded=num_tokens_padded,
        )

    def _resize_plan(
        self,
        plan: StepPlan,
        num_positions: int,
        num_tokens_padded: int | None,
        out: StepBuffers | None,
    ) -> StepPlan | None:
        """Return a plan for another number of tokens, the same object; None: it must be made again.

        Args:
            plan: a plan.
            num_positions: entries of `positions`.
            num_tokens_padded, out: as `_make_plan`.
        """
        self._checks.num_tokens(num_positions, num_tokens_padded)
        if plan.prepared is not None:
            resize = getattr(plan.prepared, "resize", None)
            if resize is None or not resize(num_positions):
                return None
        plan.num_positions = num_positions
        plan.num_bytes = (*plan.num_bytes[:3], 8 * num_positions)
        plan.addresses = NO_ADDRESSES
        num_returned = num_positions if num_tokens_padded is None else num_tokens_padded
        slots = (self.buffers if out is None else out).slot_mappings
        plan.step = Step(plan.step.block_tables, slots, num_returned)
        return plan

    def _run(
        self,
        plan: StepPlan,
        views: Views,
        out: StepBuffers | None,
        arrays: tuple[Array | None, ...],
        addresses: tuple[int | None, ...],
        stream: Any,
    ) -> int | None:
        """Commit, and do a step; return the handle of its stream. Its arguments are right, except for the padding."""
        if addresses != plan.addresses:
            plan.refuse_outputs(views.memory, arrays, addresses)
        for place in plan.views:
            if views.memory.may_hold(arrays[place]):  # type: ignore[arg-type]
                plan.refuse_outputs(views.memory, arrays, addresses, is_certain=False)
        if plan.has_padding_rows:
            self._checks.require_empty_rows(plan.num_reqs, plan.num_reqs_padded, will_commit=True)
        if stream is not None or not self._has_streams:
            handle = self._stream(stream, None)
        else:
            if plan.current_stream is not None:
                self._current_stream = plan.current_stream
            handle = self._current_stream()
        if self._checker is not None:
            buffers = self.buffers if out is None else out
            self._checker.before_step(plan.batch(arrays), plan.num_tokens_padded, buffers, handle)
        if self._prepares:  # each call here counts: a steady step is 15 of them
            rows, used = self._rows, 0
            if rows.journal.size:
                block = self._lender.lend(handle)
                used = -1 if self._is_invalid else rows.pack_changes(block)
                if used < 0:
                    used = self._pack_changes(block, handle)
            self._lender.run_step(used, plan.prepared, addresses, arrays, stream=handle)
            if rows.journal.size:
                self._is_invalid = False
                num_bytes = self._committed()
                self.num_bytes_sent += num_bytes
                self._num_commits += num_bytes > 0
        else:
            with torch_modes_off():
                self._run_batch(plan.batch(arrays), self.buffers if out is None else out, handle)
        if plan.needs_gather:
            if plan.has_addresses:
                views.held = (plan.num_reqs, addresses[0]), addresses[1]
            else:
                views.held = batch_key(plan.num_reqs, arrays[0], arrays[1])
            views.held_commits = self._num_commits
        if self._checker is not None:
            self._checker.after_call()
        return handle

    def _run_batch(self, batch: Batch, buffers: StepBuffers, stream: int | None) -> None:
        """Commit, and do a step over a backend that prepares nothing."""
        if self._is_fused:
            has_changes = self._rows.has_changes
            used = self._pack_changes(self._lender.lend(stream), stream) if has_changes else 0
            self._lender.step(used, batch, buffers, stream=stream)
            if has_changes:
                self._end_commit()
            return
        if self._rows.has_changes:
            self._commit(stream)
        if batch.needs_gather:
            self.store.gather(batch, buffers, stream=stream)
        self.mapper.compute_slot_mappings(batch, buffers.slot_mappings, stream=stream)

    @without_torch_modes
    def create_buffers(self) -> StepBuffers:
        """Return one more set of outputs, filled with NULL and PAD.

        For a second model, micro-batches, or a step that is prepared while another runs. Rules: R17.
        """
        return self._views.create()

    @without_torch_modes
    def step_metadata(
        self,
        idx_mapping: AnyArray | None,
        query_start_loc: AnyArray,
        positions: AnyArray,
        seq_lens: AnyArray | Sequence[AnyArray],
        *,
        layouts: Layouts = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
        num_computed_tokens: AnyArray | None = None,
        out: StepBuffers | None = None,
        stream: Any = None,
    ) -> StepMetadata:
        """Do a whole step, export it for each group, and return what an attention backend takes.

        Groups of one layout and geometry are exported by one call, which counts once for all of them; lengths of this
        rank are computed once for all groups that ranks share. Arguments that are not named here are those of `step`.

        Args:
            seq_lens: [num_reqs] int32. Tokens of each sequence, over all ranks, this step's included. Or a list of one
                such array for each group: a cross-attention group counts the encoder's tokens. Groups that are given
                the same array share their exports.
            layouts: what to export: one layout or name for all groups, or one for each; None: nothing.
            max_query_len: tokens. Handed on.
            max_seq_len: tokens. Handed on.

        Raises:
            BlockTableError: as `step` and `export` raise it. When an argument is refused nothing was committed.

        Rules: R25, R33.
        """
        if seq_lens is None:
            raise DtypeError("seq_lens must be an int32 array of num_reqs entries, got None.")
        exports, lens = self._metadata.plan(layouts, seq_lens)
        if exports.shared_exports:
            self._require("exports", "step_metadata() with layouts, or over ranks that share a group,")
        views = self._own_views if out is None else self._views.of(out)
        arrays = idx_mapping, num_computed_tokens, query_start_loc, positions
        reading = read_step(arrays)
        lens_reading = read_each(lens if isinstance(lens, tuple) else (lens,))
        sizes = num_reqs_padded, type(num_reqs_padded), num_tokens_padded, type(num_tokens_padded)
        key = reading[0], reading[1], sizes, lens_reading[:2], exports
        try:
            plan = views.plans.get(key)
        except (TypeError, ValueError):
            plan = None
        if plan is None:
            plan = self._make_plan(arrays, reading, lens, num_reqs_padded, num_tokens_padded, out)
            handle = self._stream(stream, positions)
            plan.exports = tuple(
                self._plan_export(
                    shared.layout, shared.groups, plan.batch(arrays, lengths_of(lens, shared.groups[0])), out, handle
                )
                for shared in exports.shared_exports
            )
            if lens_reading[0] is not None:
                views.keep_plan(key, plan)
        if lens_reading[2] != plan.lens_addresses or None in lens_reading[2]:
            views.memory.refuse([("seq_lens", array) for array in (lens if isinstance(lens, tuple) else (lens,))])
            for planned, shared in zip(plan.exports, exports.shared_exports, strict=True):
                self._refuse_outputs(planned, plan.batch(arrays, lengths_of(lens, shared.groups[0])))
            plan.lens_addresses = lens_reading[2]
        handle = self._run(plan, views, out, arrays, reading[2], stream)
        for planned, shared in zip(plan.exports, exports.shared_exports, strict=True):
            self._run_export(planned, plan.batch(arrays, lengths_of(lens, shared.groups[0])), handle)
        return make_metadata(
            exports,
            plan,
            query_start_loc,
            seq_lens=lens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )

    @without_torch_modes
    def warmup(self) -> None:
        """Compile and load everything a later step needs. Modifies no row and no set of buffers. Rules: R21."""
        self.store.write(no_writes(self.config.arena), stream=None)
        buffers = self.store.create_buffers()
        dummy, starts, positions, computed = (
            self.backend.from_host(np.array(values, dtype), self.device)
            for values, dtype in (([-1], np.int32), ([0, 0], np.int32), ([0], np.int64), ([0], np.int32))
        )
        for idx_mapping in (dummy, None):
            for num_computed_tokens in (None, computed):
                batch = Batch(idx_mapping, starts, positions, 1, 1, num_computed_tokens, 1)
                self.store.gather(batch, buffers, stream=None)
                self.mapper.compute_slot_mappings(batch, buffers.slot_mappings, stream=None)
                if self._is_fused:
                    self._lender.step(0, batch, buffers, stream=None)
        self.backend.synchronize(self.device)

    def invalidate(self) -> None:
        """Trust nothing on the device any more: its memory was released and mapped again (sleep and wake).

        The next commit sends everything and refills every set of buffers; addresses and captured graphs stay valid.

        Rules: R24.
        """
        self._rows.invalidate()
        self._is_invalid = True
        self._views.forget_batches()

    def _reset_invalid(self, stream: int | None) -> None:
        if self._is_invalid:
            for buffers in self._views:
                self.store.reset_buffers(buffers, stream=stream)
            self._exports.reset(stream)
            if self.check == "device":
                store: Any = self.store
                store.reset_checks(stream=stream)

    def _end_commit(self) -> None:
        """Forget what the store has taken; until then it stays pending."""
        self._is_invalid = False
        num_bytes = self._committed()
        self.num_bytes_sent += num_bytes
        self._num_commits += num_bytes > 0

    def _stream(self, stream: Any, array: Array | None) -> int | None:
        if not self._has_streams:
            if stream is not None:
                self._require("streams", "stream=")
            return None
        if stream is not None:
            return stream_handle(stream)
        owner = stream_owner(array)
        if owner is not None:
            self._current_stream = current_stream_getter(owner)
        return self._current_stream()

    def _put(self, values: IntArray, out: Array, stream: Any) -> None:
        """Write a host array [n] int32 into one of the backend's, in stream order."""
        put = getattr(self.store, "put", None)
        if put is None:
            raise UnsupportedError(
                f"Backend {self.backend.name!r} has no put() (PuttingStore), so nothing can be kept up to date on its "
                "device; give steps the host's array, which they send themselves."
            )
        put(values, out, stream=self._stream(stream, None))

    def _buffers(self, out: StepBuffers | None) -> StepBuffers:
        """Return the set that is meant, one of this table's."""
        if out is None:
            return self.buffers
        self._views.of(out)
        return out

    # Looking.

    def observe(self, observer: Observer) -> Observation:
        """Tell `observer` of every call that changes rows or writes outputs, until the result is closed.

        A table without an observer pays nothing for it. Methods that were fetched before, such as
        `step = table.step`, are not observed.

        Args:
            observer: whom to tell; else a DtypeError. Several are told in the order in which they came.

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
            UnsupportedError, DtypeError: no recorder is installed; `path` names no file, or `digests` is no bool.
            ArgumentError: the table is being recorded already.
        """
        return start_recording(self, path, digests=digests)
