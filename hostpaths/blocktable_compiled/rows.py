"""The compiled host path: the numpy one, with compiled functions for what a steady step does."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from blocktable import BlockTableConfig, KVCacheGroup
from blocktable.rows import Journal, NumpyRows
from blocktable_compiled import functions

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)

LATE_STEPS, MAX_LATE = 8, 1 << 16
"""Appends of one block to every row and group that the mirror may be behind, and the most entries of them."""

NOT_NOTED = -1
"""No size of a journal."""

IntArray = npt.NDArray[Any]


class CompiledJournal(Journal):
    """A journal that knows whether it is merged, and the values of a lone compiled append.

    Those values spare the commit a look at rows of the mirror that lie far apart. What is noted of a `size` no longer
    holds when the journal has grown: single operations pay nothing for it.

    Attributes:
        merged_size: the size at which the ranges are disjoint and ascending. NOT_NOTED: none.
        num_values: entries of all ranges at `merged_size`.
        known_size: the size at which `values` hold: only one compiled append was noted since the last commit.
        values: [capacity] int32. The value of each range of one entry after the filled counts.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.values: IntArray = np.empty(capacity, np.int32)
        self.merged_size: int = 0
        self.num_values: int = 0
        self.known_size: int = NOT_NOTED

    def clear(self) -> None:
        self.size = self.merged_size = self.num_values = 0
        self.known_size = NOT_NOTED

    def make_room(self, num_ranges: int) -> None:
        super().make_room(num_ranges)
        self.values = np.empty(self.offsets.size, np.int32)

    def merge(self) -> tuple[IntArray, IntArray]:
        if self.merged_size != self.size:
            size, self.num_values, is_in_place = functions.merge(self.offsets, self.lengths, self.size)
            if self.known_size != self.size or not is_in_place:
                self.known_size = NOT_NOTED
            self.size = self.merged_size = size
        return self.offsets[: self.size], self.lengths[: self.size]


class CompiledRows(NumpyRows):
    """Rows whose steady operations are compiled.

    Appends of one block are only noted at first: the mirror may be some steps behind until someone looks at it.
    """

    journal: CompiledJournal
    journal_type = CompiledJournal
    append_equally = staticmethod(functions.append_equally)

    def __init__(self, config: BlockTableConfig) -> None:
        super().__init__(config)
        arena = config.arena
        sizes = (arena.group_offsets, arena.widths, self.columns_per_block[:, 0], self._max_columns[:, 0])
        ids = (self._id_limits, self._null_ids, [group.allow_null for group in config.groups], arena.fillers)
        self._geometry: IntArray = np.column_stack((*sizes, *ids)).astype(np.int64)  # GEOMETRY of `functions`
        self._row_stamps: IntArray = np.zeros(arena.num_rows, np.int64)
        self._stamp = 0
        # Entries that appends have noted and the mirror does not hold yet, oldest first.
        self._num_late = self._late_per_call = 0
        self._is_watched = False
        num_late = min(LATE_STEPS * arena.num_groups * arena.num_rows, MAX_LATE)
        self._late: tuple[IntArray, IntArray] = np.empty(num_late, np.int64), np.empty(num_late, np.int32)
        self._state: IntArray = np.empty(0, np.int64)
        self._state_of: IntArray | None = None

    @property
    def mirror(self) -> IntArray:
        if self._num_late:
            self._catch_up()
        return self._mirror

    def watch(self) -> IntArray:
        self._is_watched = True
        return self.mirror

    def warmup(self) -> None:
        group = KVCacheGroup(block_size=1)
        other = CompiledRows(
            BlockTableConfig(
                groups=[group, group], max_num_reqs=2, max_num_batched_tokens=1, max_model_len=8, width_alignment=1
            )
        )
        one = np.ones(1, np.int64)
        for _ in range(3):
            other.append_rows(one, [one.astype(np.int32)] * 2, one)
            other.pack_changes(np.zeros(64, np.int32))
            other.committed()
        other.truncate_rows(one, one)
        other.writes()

    def append_rows(self, rows: Any, block_ids: Any, counts: Any) -> None:
        if not self._append_compiled(rows, block_ids, counts):
            super().append_rows(rows, block_ids, counts)

    def _append_compiled(self, rows: Any, block_ids: Any, counts: Any) -> bool:
        """Append in one compiled call; False with nothing changed where anything is out of the ordinary.

        Ordinary are int64 arrays `rows` and `counts` and, for each group, an int32 array of the same size.
        """
        if type(block_ids) is np.ndarray:
            block_ids = [block_ids]
        elif type(block_ids) is not list and type(block_ids) is not tuple:
            return False
        num_groups = self.arena.num_groups
        if not (type(rows) is type(counts) is np.ndarray and rows.dtype is counts.dtype is _INT64):
            return False
        if [*map(type, block_ids)].count(np.ndarray) != num_groups or rows.shape != counts.shape or rows.ndim != 1:
            return False
        sizes = [ids.nbytes for ids in block_ids]
        try:
            flat = block_ids[0] if num_groups == 1 else np.concatenate(block_ids)
        except ValueError:  # some are not one-dimensional
            return False
        # Equal bytes that add up to the whole: each of them is int32, none a bool array that was promoted.
        if flat.dtype is not _INT32 or sizes.count(sizes[0]) != num_groups or flat.nbytes != sizes[0] * num_groups:
            return False
        # Contiguous, aligned and writable: for any other kind Numba would compile once more.
        if flat.ndim != 1 or not (rows.flags.carray and counts.flags.carray and flat.flags.carray):
            return False
        if not flat.size:
            return bool(rows.size == 0)
        journal = self.journal
        self._stamp += 1
        size = flat.size
        num_late = -1
        # After an append of as many blocks, with nothing between them that has looked at the mirror.
        if size == self._late_per_call and size <= self._late[0].size and not self._is_watched:
            if self._num_late + size > self._late[0].size:
                self._catch_up()
            num_late = self._num_late
        result: int = functions.append(rows, flat, counts, self._addresses(), self._stamp, journal.size, num_late)
        if result < 0:
            return False
        if result & functions.IS_LATE:
            self._num_late = num_late + size
        elif self._num_late:
            self._catch_up()
        self._late_per_call = size
        is_first = journal.size == 0
        journal.size = result >> functions.SIZE_SHIFT & functions.SIZE_MASK
        # Without an expansion each of its ranges of one column is one id, and its value was noted.
        journal.known_size = journal.size if is_first and not self._expands else NOT_NOTED
        journal.merged_size = journal.size if is_first and result & functions.IS_MERGED else NOT_NOTED
        journal.num_values = result >> functions.VALUES_SHIFT
        return True

    def truncate_rows(self, rows: Any, num_blocks: Any) -> None:
        if not self._truncate_compiled(rows, num_blocks):
            super().truncate_rows(rows, num_blocks)

    def _truncate_compiled(self, rows: Any, num_blocks: Any) -> bool:
        """Truncate in one compiled call; False with nothing changed where these are no int64 arrays of one length."""
        if not (type(rows) is type(num_blocks) is np.ndarray and rows.dtype is num_blocks.dtype is _INT64):
            return False
        if rows.shape != num_blocks.shape or rows.ndim != 1 or not (rows.flags.carray and num_blocks.flags.carray):
            return False
        if self._num_late:
            self._catch_up()
        self._stamp += 1
        size: int = functions.truncate(rows, num_blocks, self._addresses(), self._stamp, self.journal.size)
        if size < 0:
            return False
        self.journal.size = size
        return True

    @property
    def has_changes(self) -> bool:
        journal = self.journal
        return journal.size > 0 and (journal.merged_size == journal.size or super().has_changes)

    def pack_changes(self, block: IntArray) -> int:
        journal = self.journal
        if journal.merged_size != journal.size:
            journal.merge()
        if not journal.size:
            return 0
        if journal.num_values > self._most_packed:
            return -1
        knows_values = journal.known_size == journal.size
        if self._num_late and not knows_values:
            self._catch_up()
        self._num_bytes = 12 * journal.size + 4 * journal.num_values  # as `Writes.num_bytes` counts
        addresses = self._state if self._state_of is journal.offsets else self._addresses()
        used: int = functions.pack_changes(addresses, knows_values, journal.size, block)
        return used

    def committed(self) -> int:
        journal = self.journal
        journal.size = journal.merged_size = journal.num_values = 0
        journal.known_size = NOT_NOTED
        self.committed_filled[...] = self.filled
        num_bytes, self._num_bytes = self._num_bytes, 0
        return num_bytes

    def _catch_up(self) -> None:
        functions.catch_up(self._addresses(), self._num_late, self._late_per_call)
        self._num_late = self._late_per_call = 0

    def _addresses(self) -> IntArray:
        """Return what compiled functions reach by address: STATE of `functions`."""
        journal = self.journal
        if self._state_of is not journal.offsets:  # it has grown, or this is the first call
            self._state_of = journal.offsets
            arrays = (journal.offsets, journal.lengths, journal.values)
            self._state = np.array(
                [
                    *(self._mirror.ctypes.data, self._mirror.size),
                    *(self._geometry.ctypes.data, self.arena.num_groups, self.arena.num_rows),
                    self._row_stamps.ctypes.data,
                    *(array.ctypes.data for array in arrays),
                    journal.offsets.size,
                    *(array.ctypes.data for array in self._late),
                    int(self._expands),
                ],
                np.int64,
            )
        return self._state
