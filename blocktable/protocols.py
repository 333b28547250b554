"""What a backend is: memory for one table and three kernels (docs/writing-a-backend.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from blocktable.arrays import Array, IntArray
from blocktable.config import Arena, BlockTableConfig
from blocktable.inputs import torch_modes_off
from blocktable.layouts import Layout

CHANGES_HEADER = 5
"""int32 entries before the data of packed changes."""

MOST_SINGLES = 2
"""Entries of a range of packed changes that travel as single values."""

STEP_INPUTS = ("idx_mapping", "num_computed_tokens", "query_start_loc", "positions")
"""The arrays of a step, in the order in which a `PreparingStore` is given them."""

Part = Literal["step", "tables", "slots"]
"""What of a step is done: all of it, the commit and the gather, or the slots alone."""


def ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Return every entry of every range `starts[i] .. starts[i] + lengths[i] - 1`, range after range.

    Args:
        starts: [n] int64.
        lengths: [n] integers, at least 0.

    Returns:
        [sum(lengths)] int64.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if ends.size else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)


class Batch(NamedTuple):
    """The inputs of one step.

    Arrays are on the device, or numpy arrays, which a device backend stages: the caller may reuse them immediately. A
    batch is made for one call; who keeps it keeps the caller's arrays, and their memory.

    Attributes:
        idx_mapping: [num_reqs] int32. Batch index -> row; one outside the table is a padding entry. None: identity.
        query_start_loc: [num_reqs + 1] int32. First token of each request. None: for `gather` alone.
        positions: [>= num_tokens] int64. Token -> its absolute index in its request. None: for `gather` alone.
        num_reqs: requests in the batch.
        num_reqs_padded: batch rows to produce; rows from `num_reqs` on are NULL. At most `max_num_reqs`, and with the
            identity at most the table's rows.
        num_computed_tokens: [num_reqs] int32. Batch index -> tokens computed before this step (R11).
        num_positions: entries of `positions`; an array may not say it itself.
        needs_gather: whether a fused step must gather; else the caller is given the table's own rows (R10.9).
        seq_lens: [num_reqs] int32. Batch index -> tokens of the sequence, for exports that need it (R27).
        first_tokens: [num_reqs] int32. Batch index -> token that the exported part of its row begins with (R34).
    """

    idx_mapping: Array | None
    query_start_loc: Array | None
    positions: Array | None
    num_reqs: int
    num_reqs_padded: int
    num_computed_tokens: Array | None = None
    num_positions: int = 0
    needs_gather: bool = True
    seq_lens: Array | None = None
    first_tokens: Array | None = None


class Writes:
    """The changes of one commit, as ranges of the arena that are disjoint and in ascending order.

    The arrays belong to the core, which may reuse them after `BlockStore.write` returns: copy what must outlive it.

    Attributes:
        offsets: [n] int64. First entry of each range in the arena.
        lengths: [n] int32. Entries of each range, at least 1.
        values: [sum(lengths)] int32. New contents, range after range.
        num_ranges: n.
        num_bytes: what a backend sends when it sends the ranges as they are.
    """

    def __init__(self, arena: Arena, offsets: IntArray, lengths: IntArray, values: IntArray) -> None:
        self.arena: Arena = arena
        self.offsets: IntArray = offsets
        self.lengths: IntArray = lengths
        self.values: IntArray = values
        self.num_ranges: int = offsets.size
        self.num_bytes: int = int(offsets.nbytes + lengths.nbytes + values.nbytes)

    def pack_changes(self, block: IntArray) -> int:
        """Lay a commit out for a kernel that takes it by value, in its own parameters.

        Five counts (single values, ranges, range values, constant ranges, their entries), then: offsets of the single
        values, those values; offsets of the ranges, where each starts among the range values, those values; offsets of
        the constant ranges, where each starts among their entries, the one value of each. A range is constant where all
        its entries have one value. Up to MOST_SINGLES entries travel as single values, which a kernel need not search.
        All int32: for arenas below 2**31 entries.

        Args:
            block: [n] int32, written.

        Returns:
            Entries used; 0: they do not fit, and nothing is to be launched from the block.
        """
        offsets, lengths, values = self.offsets, self.lengths, self.values
        num_ranges = offsets.size
        if num_ranges == values.size:  # steady decode
            end = CHANGES_HEADER + 2 * num_ranges
            if end > block.size:
                return 0
            block[:CHANGES_HEADER] = (num_ranges, 0, 0, 0, 0)
            block[CHANGES_HEADER : CHANGES_HEADER + num_ranges] = offsets
            block[CHANGES_HEADER + num_ranges : end] = values
            return end
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        is_short = lengths <= MOST_SINGLES
        first_values = values[starts]
        differs = np.logical_or.reduceat(values != np.repeat(first_values, lengths), starts)
        is_constant = ~is_short & ~differs
        is_range = ~is_short & differs
        sizes = [
            int(lengths[is_short].sum()),
            int(np.count_nonzero(is_range)),
            int(lengths[is_range].sum()),
            int(np.count_nonzero(is_constant)),
            int(lengths[is_constant].sum()),
        ]
        end = CHANGES_HEADER + 2 * (sizes[0] + sizes[1]) + sizes[2] + 3 * sizes[3]
        if end > block.size:
            return 0
        block[:CHANGES_HEADER] = sizes
        parts = (
            ranges(offsets[is_short], lengths[is_short]),
            values[np.repeat(is_short, lengths)],
            offsets[is_range],
            np.cumsum(lengths[is_range]) - lengths[is_range],
            values[np.repeat(is_range, lengths)],
            offsets[is_constant],
            np.cumsum(lengths[is_constant]) - lengths[is_constant],
            first_values[is_constant],
        )
        np.concatenate(parts, out=block[CHANGES_HEADER:end], casting="unsafe")
        return end

    def split_long(self, limit: int = 1 << 16) -> tuple[list[tuple[int, IntArray]], Writes]:
        """Return the ranges of more than `limit` entries, each with its first entry, and the others as writes.

        For backends that copy a long range as it is, and scatter the rest.
        """
        is_long = self.lengths > limit
        ends = np.cumsum(self.lengths, dtype=np.int64)
        long_ranges = [
            (int(self.offsets[i]), self.values[ends[i] - self.lengths[i] : ends[i]]) for i in np.flatnonzero(is_long)
        ]
        if not long_ranges:
            return [], self
        values = self.values[ranges((ends - self.lengths)[~is_long], self.lengths[~is_long])]
        return long_ranges, Writes(self.arena, self.offsets[~is_long], self.lengths[~is_long], values)

    def split_at(self, size: int) -> Iterator[tuple[int, Writes]]:
        """Yield the changes of each `size` entries of the arena that has any: their first entry, and writes from there.

        For kernels that count entries in fewer bits than a large arena has.
        """
        pieces = self.offsets // size
        ends = np.cumsum(self.lengths, dtype=np.int64)
        for piece in np.unique(pieces):
            first, last = (int(np.searchsorted(pieces, piece, side)) for side in ("left", "right"))
            values = self.values[ends[first] - self.lengths[first] : ends[last - 1]]
            offsets, lengths = self.offsets[first:last] - piece * size, self.lengths[first:last]
            yield int(piece) * size, Writes(self.arena, offsets, lengths, values)

    @property
    def most_packed_entries(self) -> int:
        """Int32 entries that `pack_changes` may need."""
        return CHANGES_HEADER + 2 * self.num_ranges + int(self.values.size)

    def split_by_row(self) -> Writes:
        """Return the same changes as ranges that each stay inside one row, for backends without an arena.

        Entries between groups are left out: they never change.
        """
        arena = self.arena
        starts = [arena.num_rows * np.arange(arena.num_groups)]
        lengths = [np.full(arena.num_groups, arena.num_rows)]
        for offset, width in zip(arena.group_offsets, arena.widths, strict=True):
            starts.append(offset + width * np.arange(arena.num_rows))
            lengths.append(np.full(arena.num_rows, width))
        row_starts, row_ends = np.concatenate(starts), np.concatenate(starts) + np.concatenate(lengths)
        ends = self.offsets + self.lengths
        first = np.searchsorted(row_ends, self.offsets, side="right")
        pieces = np.searchsorted(row_starts, ends, side="left") - first
        source = np.repeat(np.arange(self.offsets.size), pieces)
        row = ranges(first, pieces)
        piece_starts = np.maximum(self.offsets[source], row_starts[row])
        piece_lengths = np.minimum(ends[source], row_ends[row]) - piece_starts
        value_starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        values = self.values[ranges(piece_starts - self.offsets[source] + value_starts[source], piece_lengths)]
        return Writes(arena, piece_starts, piece_lengths.astype(np.int32), values)

    @cached_property
    def groups(self) -> IntArray:
        """[n] int32. Group of each range; -1: filled counts."""
        starts = np.asarray(self.arena.group_offsets, np.int64)
        return (np.searchsorted(starts, self.offsets, side="right") - 1).astype(np.int32)

    @cached_property
    def rows(self) -> IntArray:
        """[n] int32. Row of each range's first entry; for filled counts the group that they belong to."""
        return self._rows_and_columns[0]

    @cached_property
    def columns(self) -> IntArray:
        """[n] int32. Column of each range's first entry; for filled counts the row that they belong to."""
        return self._rows_and_columns[1]

    @cached_property
    def _rows_and_columns(self) -> tuple[IntArray, IntArray]:
        starts = np.asarray((*self.arena.group_offsets, 0), np.int64)[self.groups]
        widths = np.asarray((*self.arena.widths, self.arena.num_rows), np.int64)[self.groups]
        rows, columns = np.divmod(self.offsets - starts, widths)
        return rows.astype(np.int32), columns.astype(np.int32)


def no_writes(arena: Arena) -> Writes:
    """Return the changes of a commit of nothing."""
    nothing = np.empty(0, np.int64)
    return Writes(arena, nothing, nothing.astype(np.int32), nothing.astype(np.int32))


@dataclass(frozen=True, eq=False)
class StepBuffers:
    """One set of outputs. Addresses and strides never change; callers only read (R17).

    A backend that keeps more beside them (how many columns each batch row holds) makes a subclass.

    Attributes:
        block_tables: one [max_num_reqs, width] int32 for each group.
        slot_mappings: one [max_num_batched_tokens] of the configured slot dtype for each group.
    """

    block_tables: tuple[Array, ...]
    slot_mappings: tuple[Array, ...]


class Step:
    """What one step made: views of a set of buffers, valid until the next call that writes the same set (R17).

    Args:
        block_tables: one [num_reqs_padded, width] int32 for each group.
        slot_mappings: one [>= num_tokens_padded] of the configured slot dtype for each group.
        num_tokens_padded: slots of each group. None: all.

    Attributes:
        block_tables: as given.
        slot_mappings: one [num_tokens_padded] for each group. Views are made when they are first asked for: each takes
            a microsecond, and token counts change from step to step.
    """

    __slots__ = ("_num_tokens_padded", "_slot_mappings", "block_tables")

    def __init__(
        self, block_tables: tuple[Array, ...], slot_mappings: tuple[Array, ...], num_tokens_padded: int | None = None
    ) -> None:
        self.block_tables: tuple[Array, ...] = block_tables
        self._slot_mappings = slot_mappings
        self._num_tokens_padded = num_tokens_padded

    @property
    def slot_mappings(self) -> tuple[Array, ...]:
        if self._num_tokens_padded is not None:
            with torch_modes_off():
                self._slot_mappings = tuple(slots[: self._num_tokens_padded] for slots in self._slot_mappings)
            self._num_tokens_padded = None
        return self._slot_mappings


@dataclass(frozen=True, eq=False)
class ExportBuffers:
    """The arrays of one export, made by the core. Addresses and strides never change; callers only read (R25.8).

    Attributes:
        layout: what it holds.
        groups: the groups, of one geometry: equal block sizes, width and sharding.
        width: columns that a batch row may export.
        max_batch: batch rows: `max_num_reqs`, or what `create_export(max_batch=...)` said.
        capacity: "csr", "token_csr", "block_requests", "token_requests": entries of each group's array; else 0.
        num_kernel_blocks: "inverse_map": kernel blocks of each group's cache; else 0.
        members: [num_groups] int32. `groups` on the device.
        fills: for each group, what a place without an entry holds: the layout's null, or where that is None a valid
            entry, made of the group's filler, or of block 0 where that is -1 (R25.7).
        counts: [2 * max_batch + 2] int32, the backend's own. Entries of each batch row; those of the call before;
            all of them together; all of the call before.
        entries: by kind, C-contiguous; None for "lengths".
            "table", "ring": [num_groups, max_batch, width] of the layout's dtype.
            "kv_offsets": [num_groups, max_batch, 2, width] int32.
            "csr", "token_csr", "block_requests", "token_requests": [num_groups, capacity] int32.
            "inverse_map": [num_groups, max_batch, num_kernel_blocks] int32.
            "state": [num_groups, max_batch, num_columns] of the layout's dtype; for the first column
            [num_groups, max_batch], which is the same memory.
        indptr: "csr", "token_csr", "block_requests": [max_batch + 1] int32. First entry of each request, and their
            number. "token_requests": first token of each request, and their number.
        last_page_lens: "csr", "token_csr", "block_requests": [max_batch] int32. Tokens in each request's last kernel
            block.
        lengths: the same and "lengths": [max_batch] int32. Tokens of each request that this rank holds.
        mapped: "inverse_map": [num_groups, max_batch, width] int32, the backend's own. The blocks in the map.
        num_cut: all but "state", "ring", "token_requests" and "placeholder": [1] int32. Entries that `capacity` has
            left out, and first tokens that were rounded down to a boundary, of all calls together since the set was
            made or reset; at most 2**31 - 1.
    """

    layout: Layout
    groups: tuple[int, ...]
    width: int
    capacity: int
    num_kernel_blocks: int
    members: Array
    fills: tuple[int, ...]
    counts: Array
    max_batch: int
    entries: Array | None = None
    indptr: Array | None = None
    last_page_lens: Array | None = None
    lengths: Array | None = None
    mapped: Array | None = None
    num_cut: Array | None = None


class BlockStore(Protocol):
    """The device memory of one table.

    Optional: the methods of `StagingStore`, `PreparingStore` and `PuttingStore`, and by capability "exports" those of
    `ExportingStore`.
    """

    def write(self, writes: Writes, *, stream: int | None) -> None:
        """Scatter the changes into the arena, in stream order (R9.1).

        Zero ranges change nothing, and still prepare (compile) what a later call needs.
        """

    def table(self, group: int) -> Array:
        """Return group's rows, `[num_rows, width]` int32, or for -1 the filled counts, without a copy."""

    def create_buffers(self) -> StepBuffers:
        """Return a new set of outputs, filled with NULL and PAD."""

    def reset_buffers(self, out: StepBuffers, *, stream: int | None) -> None:
        """Fill a set with NULL and PAD again, trusting nothing it held (R24)."""

    def gather(self, batch: Batch, out: StepBuffers, *, stream: int | None) -> None:
        """Write the batch view of every group into `out.block_tables` (R10, R11)."""


class StagingStore(BlockStore, Protocol):
    """A block store that lends the memory its changes travel in, and with the capability "fused_step" does whole steps.

    The core packs changes into what it lends (`Writes.pack_changes` says how), and then calls `commit` or `step`.
    """

    def lend(self, stream: int | None) -> IntArray:
        """Return [n] int32 for the changes of one commit on this stream; waits where all of it is in use (R9.3).

        Raises:
            BlockTableError: the stream is capturing (R21).
        """

    def commit(self, used: int, *, stream: int | None) -> None:
        """Send what was packed into the memory that was lent last: `used` entries of it; 0 is nothing."""

    def step(self, used: int, batch: Batch, out: StepBuffers, *, stream: int | None) -> None:
        """Do a whole step: what `commit` does, then what `gather` and `compute_slot_mappings` do.

        Args:
            used: entries packed into the memory that was lent last; 0: nothing was lent for this step.
            batch: its inputs.
            out: a set of outputs.
            stream: as `gather`. Inside a capture there are no changes, and what is captured is the rest (R21).
        """


class PreparingStore(StagingStore, Protocol):
    """A store with the capability "fused_step" that works out once what steps of one form have in common.

    The form of a step is everything but what its arrays hold and where they lie: which are given, their kinds, dtypes,
    shapes and devices, the sizes and the set of outputs. The core keeps what was prepared, for a bounded number of
    forms.
    """

    def prepare_step(self, batch: Batch, out: StepBuffers, addresses: Sequence[int | None], part: Part = "step") -> Any:
        """Return what all steps of one form have in common.

        It must hold neither the batch's arrays, whose memory the caller wants back, nor `out`, which it goes with.

        Args:
            batch: the first one of this form.
            out: a set of outputs.
            addresses: of its arrays, in the order of `STEP_INPUTS`. None, in this and every step of the form: the array
                is not given, is on the host, or only the store can say it.
            part: what `run_step` shall do of a step; changes never come with "slots".

        Returns:
            An object of the store's own. If it has `resize(num_positions: int) -> bool`, that makes it serve another
            number of tokens, or returns False and changes nothing; without it each number is prepared again.
        """

    def run_step(
        self,
        used: int,
        prepared: Any,
        addresses: Sequence[int | None],
        arrays: Sequence[Array | None],
        *,
        stream: int | None,
    ) -> None:
        """Do a step, as `step` does.

        Args:
            used: as `step`.
            prepared: what `prepare_step` returned.
            addresses: as `prepare_step`, of this step's arrays.
            arrays: in the order of `STEP_INPUTS`, for what has no address.
            stream: as `gather`.
        """


class PuttingStore(BlockStore, Protocol):
    """A block store that fills small arrays on its device from the host, as it sends a commit."""

    def put(self, values: IntArray, out: Array, *, stream: int | None) -> None:
        """Write `values` into `out` in stream order, without a wait as R9.3 says.

        Args:
            values: [n] int32, on the host. They are copied before the call returns.
            out: [n] int32, an array that the backend's `from_host` made.
            stream: as `gather`. A capturing one is refused.
        """


class ExportingStore(BlockStore, Protocol):
    """A block store with the capability "exports"."""

    def export(self, layout: Layout, batch: Batch, out: ExportBuffers, *, stream: int | None) -> None:
        """Write the batch in a layout that an attention kernel reads (R25-R31, R34, R35).

        Args:
            layout: that of `out`.
            batch: `idx_mapping`, `num_reqs`, `num_computed_tokens` and `seq_lens` matter; with "export_parts" also
                `first_tokens`, and `query_start_loc` for "token_requests".
            out: made by the core over this backend's `from_host`. Everything the call needs is there: it allocates
                nothing.
            stream: as `gather`.
        """

    def reset_export(self, out: ExportBuffers, *, stream: int | None) -> None:
        """Fill the entries of each group with its `fills` and all else but `members` with 0, trusting nothing (R24)."""


class PartsExportingStore(ExportingStore, Protocol):
    """A block store with the capability "export_parts": its `export` also knows `first_tokens` and R35's kinds."""

    def map_positions(self, rows: Array, group: int, positions: Array, out: Array, *, stream: int | None) -> None:
        """Write the slot of each position of each token's row, -1 where it has none (R36).

        Args:
            rows: [T] int32. Token -> its row; one outside the table stands for none.
            group: the group, one with slots.
            positions: [T, K] int32.
            out: [T, K] int32 or int64, written.
            stream: as `gather`.
        """


class CheckingStore(BlockStore, Protocol):
    """A block store with the capability "device_checks": where `config.check_plan` is given its kernels look (R41).

    The memory that it keeps for them, and what the host tells them, are laid out in `blocktable.check_plan`.

    Attributes:
        findings: [(1 + MAX_RECORDS) * RECORD] int32, in the host's memory: records, which kernels write at any time,
            and at entry 1 how many of them the core has read. None: nothing is checked.
    """

    findings: IntArray | None

    def collect_findings(self) -> None:
        """Wait for the device; then `findings` holds all that was found."""

    def reset_checks(self, *, stream: int | None) -> None:
        """Forget who wrote what, in stream order: the memory was lost (R24)."""


class SlotMapper(Protocol):
    """The slot-mapping kernel of one table."""

    def compute_slot_mappings(
        self, batch: Batch, out: Sequence[Array], *, stream: int | None, groups: Sequence[int] | None = None
    ) -> None:
        """Write the slot of every token, PAD to the end of each array (R12-R16).

        Args:
            batch: `query_start_loc` and `positions` are given.
            out: one array for each group, of the configured slot dtype, at least `len(positions)` long.
            stream: handle of the stream to work on; None: the backend's current one.
            groups: the groups that `out` belongs to, distinct, in that order: cross-attention groups among them have
                slots, as linear ones do. None: all groups, and those have none (R14).
        """


@runtime_checkable
class Backend(Protocol):
    """What an entry point of the group `blocktable.backends` names: a class called without arguments or an instance."""

    @property
    def name(self) -> str: ...
    @property
    def protocol_version(self) -> int: ...
    @property
    def capabilities(self) -> frozenset[str]: ...

    def why_unavailable(self) -> str | None:
        """Return None where the backend can run, else one sentence: why not, and how to get it."""

    def create_block_store(self, config: BlockTableConfig, device: Any = None) -> BlockStore:
        """Allocate one table, all NULL and empty, on `device` (None: the backend's default)."""

    def create_slot_mapper(self, store: BlockStore) -> SlotMapper:
        """Return the slot mapper over a store that this backend made."""

    def from_host(self, array: np.ndarray[Any, Any], device: Any = None) -> Array:
        """Return a device copy of `array`."""

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """Wait for the device and return a host copy of `array`."""

    def synchronize(self, device: Any = None) -> None:
        """Wait until everything queued on `device` is done."""
