"""The compiled host path: the numpy one, with compiled operations for what a steady step does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from blocktable import BlockTableConfig
from blocktable.backend import Arena
from blocktable.rows import MAX_INT32, MAX_RANGE, NumpyRows
from blocktable_compiled.checks import TokenCheck
from blocktable_compiled.drop_in import append_to_all_groups
from blocktable_compiled.holders import CompiledHolders
from blocktable_compiled.journal import CompiledJournal
from blocktable_compiled.operations import Operations

IntArray = npt.NDArray[Any]


class CompiledRows(NumpyRows):
    """Rows whose steady operations are compiled. What those say no to, the numpy path does.

    Large appends may only be noted at first: the mirror is some steps late until it is looked at.
    """

    journal: CompiledJournal
    journal_type = CompiledJournal
    append_to_all_groups = staticmethod(append_to_all_groups)
    token_check = TokenCheck
    holders_type = CompiledHolders

    def __init__(self, config: BlockTableConfig) -> None:
        super().__init__(config)
        arena = config.arena
        sizes = (arena.group_offsets, arena.widths, self.columns_per_block[:, 0], self._max_columns[:, 0])
        ids = (self._id_limits, self._null_ids, [group.allow_null for group in config.groups], arena.fillers)
        geometry = np.column_stack((*sizes, *ids)).astype(np.int64)
        self._operations = Operations(self._mirror, geometry, arena.num_rows, self.journal)

    @staticmethod
    def make_journal(
        arena: Arena, mirror: IntArray, capacity: int
    ) -> tuple[CompiledJournal, Callable[[IntArray], tuple[int, int]]]:
        """Return a journal of an arena's changes, and what packs them (`CompiledChanges`)."""
        journal, number = CompiledJournal(capacity), arena.num_groups
        columns = [(1,) * number, arena.widths, (MAX_INT32,) * number, (0,) * number, (1,) * number, arena.fillers]
        geometry = np.column_stack((arena.group_offsets, arena.widths, *columns)).astype(np.int64)
        pack = Operations(mirror, geometry, arena.num_rows, journal).pack_changes
        most = MAX_RANGE if arena.size <= MAX_INT32 else -1
        return journal, lambda block: pack(block, most)

    @property
    def mirror(self) -> IntArray:
        self._operations.catch_up()
        return self._mirror

    def live_mirror(self) -> IntArray:
        self._operations.catch_up(is_watched=True)
        return self._mirror

    def append_row(self, row: Any, block_ids: Any) -> None:
        if not self._operations.append_row(row, block_ids):
            super().append_row(row, block_ids)

    def set_row(self, row: Any, block_ids: Any) -> None:
        if not self._operations.set_row(row, block_ids):
            super().set_row(row, block_ids)

    def truncate_row(self, row: Any, num_blocks: Any) -> None:
        if not self._operations.truncate_row(row, num_blocks):
            super().truncate_row(row, num_blocks)

    def append_rows(self, rows: Any, block_ids: Any, counts: Any) -> None:
        if not self._operations.append_rows(rows, block_ids, counts):
            super().append_rows(rows, block_ids, counts)

    def set_rows(self, rows: Any, block_ids: Any, counts: Any) -> None:
        if not self._operations.set_rows(rows, block_ids, counts):
            super().set_rows(rows, block_ids, counts)

    def truncate_rows(self, rows: Any, num_blocks: Any) -> None:
        if not self._operations.truncate_rows(rows, num_blocks):
            super().truncate_rows(rows, num_blocks)

    def clear_rows(self, rows: Any) -> None:
        if not self._operations.clear_rows(rows):
            super().clear_rows(rows)

    def checked_operations(self, holders: CompiledHolders) -> tuple[Callable[..., bool], ...]:
        """Return appends, sets and truncations of a checked table, which follow lives; arguments as in `Operations`.

        Each returns whether it was done; where not, nothing was, and what is given must be looked at one by one.
        """
        of = self._operations
        return tuple(partial(each, holders) for each in (of.append_checked, of.set_checked, of.truncate_checked))

    @property
    def has_changes(self) -> bool:
        return self.journal.size > 0

    def committed(self) -> int:
        self._operations.committed(self.committed_filled)
        num_bytes, self._num_bytes = self._num_bytes, 0
        return num_bytes

    def pack_changes(self, block: IntArray) -> int:
        used: int
        used, num_bytes = self._operations.pack_changes(block, self._most_packed)
        if used >= 0:  # otherwise `writes` counts
            self._num_bytes = num_bytes
        return used
