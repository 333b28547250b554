"""The numpy host path: a mirror of the arena, and a journal of what changed since the last commit (R4-R9).

Methods do what `HostPath` says of them. An operation is one pass of array calls over all groups together. A *cell* is
one row of one group; per-cell arrays are `[num_groups, n]` for the n rows of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blocktable.arrays import IntArray
from blocktable.checks import (
    COUNT_LIMIT,
    bounded,
    ids_per_group,
    int_array,
    is_within,
    non_negative,
    per_group_counts,
    row_index,
)
from blocktable.config import BlockTableConfig
from blocktable.errors import ArgumentError, ConfigError, DtypeError, RowCapacityError, RowIndexError
from blocktable.protocols import Writes, ranges

BULK_SHARE, BULK_ENTRIES = 0.1, 1 << 16
"""Above this share of changed entries a commit sends all of an arena of at least so many: a scatter of a tenth takes
longer than one copy of everything, on an H200 as in numpy."""

MAX_RANGE = 1 << 30
"""Entries of the longest range of a commit: lengths are int32."""

MAX_INT32 = 2**31 - 1

DISTINCT_ROWS = "rows of one call must be distinct."
"""What the refusal of a repeated row says about it."""


Change = tuple[IntArray, IntArray, IntArray]
"""Ranges of the arena and what they shall hold: first entries and lengths, of one shape, and values [sum(lengths)]."""


class Journal:
    """Dirty ranges of the arena. Values are taken from the mirror at commit, so the last one wins.

    An exception between any two bytecodes, such as a KeyboardInterrupt, leaves every range that was noted covered.
    """

    def __init__(self, capacity: int) -> None:
        self.size: int = 0
        self._ranges: IntArray = np.empty((2, capacity), np.int64)  # offsets, lengths

    @property
    def offsets(self) -> IntArray:
        """[capacity] int64. First entry of each range; the first `size` are noted."""
        offsets: IntArray = self._ranges[0]
        return offsets

    @property
    def lengths(self) -> IntArray:
        """[capacity] int64. Entries of each range."""
        lengths: IntArray = self._ranges[1]
        return lengths

    def clear(self) -> None:
        """Forget everything: it is on the device."""
        self.size = 0

    def mark(self, offsets: IntArray, lengths: IntArray) -> None:
        """Add ranges; of length 0 too.

        Args:
            offsets: any shape, int64. First entry of each range.
            lengths: the same shape, integers.
        """
        if self.size + offsets.size > self._ranges.shape[1]:
            self.make_room(offsets.size)
        end = self.size + offsets.size
        self._ranges[0, self.size : end] = offsets.ravel()
        self._ranges[1, self.size : end] = lengths.ravel()
        self.size = end

    def make_room(self, num_ranges: int) -> None:
        """Merge what is there, then grow: a caller that never commits must not fill the memory with repetitions."""
        self.merge()
        grown = np.empty((2, max(self._ranges.shape[1], 2 * (self.size + num_ranges))), np.int64)
        grown[:, : self.size] = self._ranges[:, : self.size]
        self._ranges = grown

    def merge(self) -> tuple[IntArray, IntArray]:
        """Return what is dirty as disjoint ascending ranges, and keep it in that form.

        Returns:
            offsets: [n] int64.
            lengths: [n] int64, at least 1.
        """
        offsets, lengths = held = self.offsets[: self.size], self.lengths[: self.size]
        if not lengths.all():
            kept = lengths > 0
            offsets, lengths = offsets[kept], lengths[kept]
        offsets, lengths = _merge_ranges(offsets, lengths)
        if offsets is held[0]:
            return held
        merged = np.stack((offsets, lengths))
        self._ranges[:, : offsets.size] = merged  # one store; until the next one what follows repeats parts of it
        self.size = offsets.size
        return merged[0], merged[1]


def _merge_ranges(offsets: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
    ends = offsets + lengths
    if offsets.size == 0 or (offsets[1:] > ends[:-1]).all():
        return offsets, lengths
    order = offsets.argsort(kind="stable")
    offsets, ends = offsets[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(offsets[1:] > ends[:-1]) + 1
    starts = offsets[np.concatenate(([0], first))]
    return starts, ends[np.concatenate((first - 1, [ends.size - 1]))] - starts


class NumpyRows:
    """Rows of block ids for all groups, changed and sent by numpy.

    Attributes:
        journal: what differs from the device.
    """

    journal_type: Any = Journal

    def __init__(self, config: BlockTableConfig) -> None:
        groups, arena = config.groups, config.arena
        self.config = config
        self.arena = arena
        try:
            self._mirror: IntArray = arena.empty()
        except (MemoryError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"The table does not fit the host's memory: {4 * arena.size} bytes for {arena.num_rows} rows of "
                f"{arena.widths} columns; lower max_num_reqs, max_num_rows or max_model_len."
            ) from error
        self.filled: IntArray = arena.view(self._mirror, -1)
        self.committed_filled: IntArray = self.filled.copy()
        # Room for a step that appends to every row: a count and a range of columns for each cell.
        self.journal: Any = self.journal_type(4 * arena.num_groups * arena.num_rows + 64)
        self.columns_per_block: IntArray = _column([group.blocks_per_kv_block for group in groups])
        self._capacity = _column([config.capacity(group) for group in range(len(groups))])
        self._max_columns = self._capacity * self.columns_per_block
        self._expands = bool((self.columns_per_block > 1).any())
        self._group_offsets = _column(arena.group_offsets)
        self._widths = _column(arena.widths)
        self._first_filled = _column([group * arena.num_rows for group in range(len(groups))])
        self._null_ids = [group.null_block_id for group in groups]
        self._fillers = _column(arena.fillers)
        self._is_null_0 = not any(arena.fillers)
        # Without an expansion a null that is handed in is its own filler.
        self._expands_nulls = self._expands and any(group.allow_null for group in groups)
        self._id_limits = [group.block_id_limit for group in groups]
        # Ids that no group refuses, whatever its null block is.
        self._safe_ids = max(0, *(null + 1 for null in self._null_ids)), min(self._id_limits) - 1
        # What a steady commit may change (R9.4) is scattered in any case: sending everything may wait.
        cells = arena.num_groups * arena.num_rows
        steady = arena.num_rows * int(self.columns_per_block.sum()) + cells + sum(arena.widths)
        is_large = arena.size >= BULK_ENTRIES
        self._most_scattered = max(int(BULK_SHARE * arena.size), steady) if is_large else arena.size
        # Packed offsets are int32.
        self._most_packed = min(self._most_scattered, MAX_RANGE) if arena.size <= MAX_INT32 else -1
        self._num_bytes = 0  # of the changes that `writes` or `pack_changes` returned last
        self._indices: IntArray = np.arange(arena.num_rows)
        self._stamps: IntArray = np.zeros(arena.num_rows, np.int64)

    @property
    def mirror(self) -> IntArray:
        return self._mirror

    def live_mirror(self) -> IntArray:
        return self._mirror

    # Checks. Everything below runs before the first entry changes.

    def one_row(self, name: str, row: Any) -> IntArray:
        return np.array([row_index(name, row, self.arena.num_rows)])

    def check_rows(self, name: str, rows: Any, *, advice: str | None = DISTINCT_ROWS) -> IntArray:
        array = int_array(name, rows).astype(np.int64, copy=False)
        if array.size == 0:
            return array
        if not is_within(array, 0, self.arena.num_rows - 1):
            wrong = array[(array < 0) | (array >= self.arena.num_rows)][0]
            raise RowIndexError(
                f"{name}: row {wrong} is outside the table: rows go from 0 to {self.arena.num_rows - 1}."
            )
        if advice is None:
            return array
        # Each row is stamped with the index of its last occurrence: distinct rows all read their own index back.
        own = self._indices[: array.size] if array.size <= self._indices.size else np.arange(array.size)
        self._stamps[array] = own
        repeated = self._stamps[array] != own
        if repeated.any():
            raise ArgumentError(f"{name}: row {array[repeated][0]} is repeated; {advice}")
        return array

    def check_ids(self, block_ids: Any, counts: Any, num_rows: int) -> tuple[IntArray, IntArray]:
        """Return all groups' ids in one array, and how many go to each cell.

        Args:
            block_ids: one flat sequence for each group.
            counts: as `per_group_counts` takes them; None: all ids of a group go to the one row.

        Returns:
            ids: [total] integers, group after group.
            counts: [num_groups, num_rows] int64.
        """
        groups = ids_per_group(block_ids, self.arena.num_groups)
        sizes = [ids.size for ids in groups]
        if counts is None:
            cells = np.array(sizes, np.int64)[:, None]
        else:
            cells = self._check_counts(counts, sizes, num_rows)
        ids = _concatenate(groups)
        if ids.size and not is_within(ids, *self._safe_ids):
            for group, wrong in enumerate(groups):
                self._refuse_ids(group, wrong)
        return ids, cells

    def check_blocks(
        self, rows: IntArray, block_ids: Any, counts: Any, *, is_append: bool
    ) -> tuple[IntArray, IntArray]:
        ids, blocks = self.check_ids(block_ids, counts, rows.size)
        self._require_capacity(rows, blocks, self.mirror[self._first_filled + rows] if is_append else None)
        return ids, blocks

    def check_replacement(
        self, rows: IntArray, group: int, starts: IntArray, block_ids: Any, counts: IntArray | None
    ) -> tuple[IntArray, IntArray]:
        ids = self._check_group_ids("block_ids", group, block_ids)
        blocks = np.array([ids.size]) if counts is None else bounded(counts)
        if blocks.sum() != ids.size:
            raise ArgumentError(f"block_ids holds {ids.size} ids, but counts add up to {blocks.sum()}.")
        held = self.filled[group, rows] // int(self.columns_per_block[group, 0])
        wrong = np.flatnonzero((starts < 0) | (blocks < 0) | (starts > held - blocks))
        if wrong.size:
            i = wrong[0]
            raise ArgumentError(
                f"row {rows[i]} of group {group}: {blocks[i]} blocks from {starts[i]} on cannot be replaced; "
                f"0 <= start <= start + blocks <= {held[i]} (the blocks it holds) must hold. append_row adds blocks."
            )
        return ids, blocks

    def _check_counts(self, counts: Any, sizes: list[int], num_rows: int) -> IntArray:
        cells = per_group_counts("counts", counts, len(sizes), num_rows)
        if 0 in sizes:  # nothing for a group is nothing, whatever the shared counts say (R8)
            cells = cells * (np.array(sizes)[:, None] > 0)
        shared = cells.strides[0] == 0 and len(sizes) > 1
        totals = [int(cells[0].sum())] * len(sizes) if shared else cells.sum(1).tolist()
        if totals != sizes:
            group = next(group for group, size in enumerate(sizes) if size != totals[group])
            raise ArgumentError(
                f"block_ids of group {group} holds {sizes[group]} ids, but its counts add up to {totals[group]}."
            )
        return cells

    def _refuse_ids(self, group: int, ids: IntArray, name: str = "block_ids") -> None:
        null, limit, is_null = self._null_ids[group], self._id_limits[group], ids == self._null_ids[group]
        is_wrong = (ids < 0) | (ids >= limit)
        wrong = np.flatnonzero(is_wrong & ~is_null if self.config.groups[group].allow_null else is_wrong | is_null)
        if not wrong.size:
            return
        where, block_id = f"{name} of group {group}, index {wrong[0]}", int(ids[wrong[0]])
        if block_id == null:
            raise ArgumentError(
                f"{where}: {null} is the group's null_block_id, which stands for no block; set allow_null=True on the "
                "group if the engine hands it in as a hole"
                + (", or null_block_id=-1 if its allocator gives out block 0." if null == 0 else ".")
            )
        num_blocks, expansion = self.config.groups[group].num_blocks, int(self.columns_per_block[group, 0])
        reason = f"num_blocks {num_blocks}" if limit == num_blocks else f"2**31 // {expansion}"
        raise ArgumentError(f"{where}: block id {block_id} is outside 0 .. {limit - 1} ({reason}).")

    def _check_group_ids(self, name: str, group: int, ids: Any) -> IntArray:
        """Return ids of one group as [n] int64; nothing is an empty array."""
        array = int_array(name, [] if ids is None else ids)
        self._refuse_ids(group, array, name)
        return array.astype(np.int64, copy=False)

    def _require_capacity(self, rows: IntArray, blocks: IntArray, filled: IntArray | None = None) -> IntArray:
        """Return `blocks` [num_groups, n] in columns, or raise where they do not fit beside the filled columns."""
        columns = blocks * self.columns_per_block if self._expands else blocks
        over = (columns if filled is None else columns + filled) > self._max_columns
        if over.any():
            group, index = (int(place[0]) for place in np.nonzero(over))
            capacity, expansion = int(self._capacity[group, 0]), int(self.columns_per_block[group, 0])
            used = 0 if filled is None else int(filled[group, index]) // expansion
            raise RowCapacityError(
                f"row {rows[index]} of group {group} needs {blocks[group, index]} more blocks, but {capacity - used} "
                f"are available (capacity {capacity}, used {used}); nothing was changed."
                if used
                else f"row {rows[index]} of group {group} needs {blocks[group, index]} blocks, but {capacity} are "
                f"available (its capacity); nothing was changed."
            )
        return columns

    # Operations.

    def append_row(self, row: Any, block_ids: Any) -> None:
        self.append(self.one_row("row", row), block_ids, None)

    def set_row(self, row: Any, block_ids: Any) -> None:
        self.set(self.one_row("row", row), block_ids, None)

    def truncate_row(self, row: Any, num_blocks: Any) -> None:
        rows = self.one_row("row", row)
        if isinstance(num_blocks, Sequence | np.ndarray):
            kept, num_groups = int_array("num_blocks", num_blocks), self.arena.num_groups
            if kept.size != num_groups:
                raise ArgumentError(
                    f"num_blocks must be an int, or one for each of the {num_groups} groups; got {kept.size}."
                )
            if kept.min() < 0:
                raise ArgumentError(f"num_blocks must be at least 0, got {kept.min()}.")
            self.truncate(rows, bounded(kept)[:, None])
        else:
            self.truncate(rows, min(non_negative("num_blocks", num_blocks), COUNT_LIMIT))

    def append_rows(self, rows: Any, block_ids: Any, counts: Any) -> None:
        _require_counts(counts)
        self.append(self.check_rows("rows", rows), block_ids, counts)

    def set_rows(self, rows: Any, block_ids: Any, counts: Any) -> None:
        _require_counts(counts)
        self.set(self.check_rows("rows", rows), block_ids, counts)

    def append(self, rows: IntArray, block_ids: Any, counts: Any) -> None:
        ids, blocks = self.check_ids(block_ids, counts, rows.size)
        cells = self._first_filled + rows
        filled = self.mirror[cells]
        columns = self._require_capacity(rows, blocks, filled)
        added = self._starts(rows) + filled, columns, self._kernel_ids(ids, blocks)
        self._change(_counts(cells, filled, filled + columns), added)

    def set(self, rows: IntArray, block_ids: Any, counts: Any) -> None:
        ids, blocks = self.check_ids(block_ids, counts, rows.size)
        columns = self._require_capacity(rows, blocks)
        self._replace(rows, columns, self._kernel_ids(ids, blocks))

    def truncate_rows(self, rows: Any, num_blocks: Any) -> None:
        checked = self.check_rows("rows", rows)
        self.truncate(checked, per_group_counts("num_blocks", num_blocks, self.arena.num_groups, checked.size))

    def clear_rows(self, rows: Any) -> None:
        self.truncate(self.check_rows("rows", rows), 0)

    def truncate(self, rows: IntArray, num_blocks: IntArray | int) -> None:
        cells = self._first_filled + rows
        filled = self.mirror[cells]
        kept = np.minimum(filled, np.minimum(num_blocks, self._capacity) * self.columns_per_block)
        self._change(_counts(cells, filled, kept), self._nulls(self._starts(rows) + kept, filled - kept))

    def null(self, rows: IntArray, group: int, starts: IntArray, stops: IntArray) -> None:
        expansion = int(self.columns_per_block[group, 0])
        held = self.filled[group, rows] // expansion
        wrong = np.flatnonzero((starts < 0) | (starts > stops) | (stops > held))
        if wrong.size:
            i = wrong[0]
            raise ArgumentError(
                f"row {rows[i]} of group {group}: blocks {starts[i]} to {stops[i]} cannot become NULL; "
                f"0 <= start <= stop <= {held[i]} (the blocks it holds) must hold."
            )
        first = self.arena.group_offsets[group] + rows * self.arena.widths[group]
        columns = (stops - starts) * expansion
        self._change((first + starts * expansion, columns, np.full(columns.sum(), self.arena.fillers[group], np.int32)))

    def replace(self, rows: IntArray, group: int, starts: IntArray, block_ids: Any, counts: IntArray | None) -> None:
        ids, blocks = self.check_replacement(rows, group, starts, block_ids, counts)
        expansion = int(self.columns_per_block[group, 0])
        first = self.arena.group_offsets[group] + rows * self.arena.widths[group]
        entries, values = ranges(first + starts * expansion, blocks * expansion), self._group_kernel_ids(group, ids)
        self.exchange(entries, values)

    def remap(self, group: int, old_ids: Any, new_ids: Any) -> None:
        old, new = self.check_mapping(group, old_ids, new_ids)
        expansion, filled = int(self.columns_per_block[group, 0]), self.filled[group]
        rows = np.flatnonzero(filled)
        if not (old.size and rows.size):
            return
        blocks = filled[rows] // expansion
        first = self.arena.group_offsets[group] + rows * self.arena.widths[group]
        # The first column of each block that a row of the group holds.
        entries = np.repeat(first, blocks) + expansion * ranges(np.zeros_like(first), blocks)
        held = self.mirror[entries] // expansion
        order = old.argsort()
        place = old.searchsorted(held, sorter=order)
        place[place == old.size] = 0
        place = order[place]
        found = old[place] == held
        columns = entries[found][:, None] + np.arange(expansion)
        self.exchange(columns.ravel(), self._group_kernel_ids(group, new[place[found]]))

    def check_mapping(self, group: int, old_ids: Any, new_ids: Any) -> tuple[IntArray, IntArray]:
        old = int_array("old_ids", [] if old_ids is None else old_ids)
        null = self._null_ids[group]
        if (old == null).any():
            raise ArgumentError(
                f"old_ids of group {group}: {null} is the group's null_block_id, which stands for no block; fill a "
                "hole in a row by replace_blocks."
            )
        old, new = self._check_group_ids("old_ids", group, old), self._check_group_ids("new_ids", group, new_ids)
        if old.size != new.size:
            raise ArgumentError(f"old_ids and new_ids must be of one length, got {old.size} and {new.size}.")
        ordered = np.sort(old)
        repeated = np.flatnonzero(ordered[1:] == ordered[:-1])
        if repeated.size:
            raise ArgumentError(
                f"old_ids of group {group}: block id {ordered[repeated[0]]} is repeated; it can become one block only."
            )
        return old, new

    def copy(self, src: IntArray, dst: IntArray, *, vacate: bool) -> None:
        columns = self.mirror[self._first_filled + src].astype(np.int64)
        values = self.mirror[_entries(self._starts(src), columns)]
        if vacate:
            emptied = src[~np.isin(src, dst)]
            dst = np.concatenate((dst, emptied))
            columns = np.pad(columns, ((0, 0), (0, emptied.size)))
        self._replace(dst, columns, values)

    def invalidate(self) -> None:
        self.journal.mark(np.zeros(1, np.int64), np.array([self.arena.size]))
        self.committed_filled.fill(-1)

    # A commit.

    @property
    def has_changes(self) -> bool:
        return bool(self.journal.lengths[: self.journal.size].any())

    def pending_ranges(self) -> tuple[IntArray, IntArray]:
        pending: tuple[IntArray, IntArray] = self.journal.merge()
        return pending

    def writes(self) -> Writes:
        offsets, lengths = self.pending_ranges()
        if lengths.size > 1 and lengths.sum() > self._most_scattered:
            offsets, lengths = np.zeros(1, np.int64), np.array([self.arena.size])
        if lengths.size and lengths.max() > MAX_RANGE:
            offsets, lengths = _split_ranges(offsets, lengths)
        return self._take_writes(offsets, lengths)

    def pack_changes(self, block: IntArray) -> int:
        offsets, lengths = self.pending_ranges()
        if not lengths.size:
            return 0
        if lengths.sum() > self._most_packed:
            return -1
        return self._take_writes(offsets, lengths).pack_changes(block) or -1

    def committed(self) -> int:
        self.committed_filled[...] = self.filled
        self.journal.clear()  # last: after an exception before it all is sent again
        num_bytes, self._num_bytes = self._num_bytes, 0
        return num_bytes

    def _take_writes(self, offsets: IntArray, lengths: IntArray) -> Writes:
        writes = Writes(self.arena, offsets, lengths.astype(np.int32), _take(self.mirror, offsets, lengths))
        self._num_bytes = writes.num_bytes
        return writes

    # Steps of an operation.

    def _starts(self, rows: IntArray) -> IntArray:
        starts: IntArray = self._group_offsets + rows * self._widths
        return starts

    def _kernel_ids(self, ids: IntArray, blocks: IntArray) -> IntArray:
        """Expand manager ids, group after group, into kernel ids (R2)."""
        if not self._expands:
            return ids
        sizes = blocks.sum(1)
        expansion = np.repeat(self.columns_per_block.ravel(), sizes)
        kernel_ids = ranges(ids * expansion, expansion)
        if self._expands_nulls:
            is_null = np.repeat(ids == np.repeat(self._null_ids, sizes), expansion)
            if is_null.any():
                fillers = np.repeat(self._fillers.ravel(), sizes * self.columns_per_block.ravel())
                kernel_ids[is_null] = fillers[is_null]
        return kernel_ids

    def _group_kernel_ids(self, group: int, ids: IntArray) -> IntArray:
        """Expand the manager ids of one group."""
        blocks = np.zeros((self.arena.num_groups, 1), np.int64)
        blocks[group] = ids.size
        return self._kernel_ids(ids, blocks)

    def _replace(self, rows: IntArray, columns: IntArray, values: IntArray) -> None:
        cells = self._first_filled + rows
        filled, starts = self.mirror[cells], self._starts(rows)
        entries, blocks = _entries(starts, columns), (starts, columns, values)
        # Of blocks over others only those that differ are sent. Rows of new requests hold none to compare with.
        if filled.any() and (self.mirror[entries] == values).any():
            entries, values = self._differences(entries, values)
            blocks = *runs_of(entries), values
        nulls = self._nulls(starts + columns, np.maximum(filled - columns, 0))
        self._change(_counts(cells, filled, columns), blocks, nulls)

    def exchange(self, entries: IntArray, values: IntArray) -> None:
        entries, values = self._differences(entries, values)
        self._store(*runs_of(entries), entries, values)

    def _differences(self, entries: IntArray, values: IntArray) -> tuple[IntArray, IntArray]:
        """Return those of entries [n] of the mirror that hold another value, and their values: only those are sent."""
        changed = self.mirror[entries] != values
        return entries[changed], values[changed]

    def _nulls(self, starts: IntArray, columns: IntArray) -> Change:
        """Return what makes `columns` entries from `starts` on NULL, [num_groups, n] each."""
        if self._is_null_0:
            return starts, columns, np.zeros(columns.sum(), np.int32)
        return starts, columns, np.repeat(self._fillers.ravel(), columns.sum(1))

    def _change(self, *changes: Change) -> None:
        """Do all changes of an operation: wherever an exception comes, all of them are done or none (R6)."""
        offsets = np.concatenate([offsets.ravel() for offsets, _, _ in changes])
        lengths = np.concatenate([lengths.ravel() for _, lengths, _ in changes])
        values = np.concatenate([values for _, _, values in changes], dtype=np.int32, casting="unsafe")
        # The steady decode step, one entry for every cell, needs no work.
        are_single = values.size == offsets.size > 0 and np.maximum.reduce(lengths) == 1
        self._store(offsets, lengths, offsets if are_single else ranges(offsets, lengths), values)

    def _store(self, offsets: IntArray, lengths: IntArray, entries: IntArray, values: IntArray) -> None:
        """Note ranges, and write values [n] into their entries [n].

        All of it is made before: what is noted in vain does no harm. Then one call of numpy's stores counts and columns
        of all groups. Its arrays need no conversion, so it asks for no memory and runs no Python of others.
        """
        mirror, values = self.mirror, values.astype(np.int32, copy=False)
        self.journal.mark(offsets, lengths)
        mirror[entries] = values


def _counts(cells: IntArray, before: IntArray, after: IntArray) -> Change:
    """Return what makes filled counts `after`, where they differ; [num_groups, n] each."""
    changed = before != after
    return cells, changed, after.ravel() if changed.all() else after[changed]


def _require_counts(counts: Any) -> None:
    if counts is None:
        raise DtypeError("counts must say how many ids go to each row, got None.")


def _column(values: Any) -> IntArray:
    return np.array(values, np.int64)[:, None]


def _split_ranges(offsets: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
    """Cut ranges so that their lengths fit int32."""
    pieces = -(-lengths // MAX_RANGE)
    index = ranges(np.zeros_like(pieces), pieces)
    starts = np.repeat(offsets, pieces) + index * MAX_RANGE
    return starts, np.minimum(np.repeat(offsets + lengths, pieces) - starts, MAX_RANGE)


def _take(mirror: IntArray, offsets: IntArray, lengths: IntArray) -> IntArray:
    """Return the contents of every range; of one range, such as a whole arena, without a copy."""
    if offsets.size == 1:
        return mirror[offsets[0] : offsets[0] + lengths[0]]
    if 0 < offsets.size < 64 and lengths.max() > 4096:  # an index of 8 bytes an entry would cost more than the copy
        return np.concatenate([mirror[:0], *(mirror[o : o + n] for o, n in zip(offsets, lengths, strict=True))])
    return mirror[_entries(offsets, lengths)]


def _entries(starts: IntArray, lengths: IntArray) -> IntArray:
    """Flat `ranges`; the steady decode step, one entry for every cell, needs no work."""
    starts, lengths = starts.ravel(), lengths.ravel()
    if lengths.size and lengths.min() == 1 == lengths.max():
        return starts
    return ranges(starts, lengths)


def runs_of(entries: IntArray) -> tuple[IntArray, IntArray]:
    """Return entries [n] int64 as ranges: a new one wherever an entry does not follow the one before it."""
    if not entries.size:
        return entries, entries
    bounds = np.concatenate(([0], np.flatnonzero(np.diff(entries) != 1) + 1, [entries.size]))
    return entries[bounds[:-1]], np.diff(bounds)


def _concatenate(groups: list[IntArray]) -> IntArray:
    dtype = np.int32 if all(ids.dtype == np.int32 for ids in groups) else np.int64
    if len(groups) == 1:
        return groups[0].astype(dtype, copy=False)
    # uint64 ids above 2**63 turn negative here, and are refused for it.
    return np.concatenate(groups, dtype=dtype, casting="unsafe")
