"""Whose rows are: a number for each row's life, and how far it has been written."""

from __future__ import annotations

import numpy as np

from blocktable.arrays import IntArray
from blocktable.config import BlockTableConfig

UNMARKED = np.iinfo(np.int64).max
"""The mark of a row whose next tokens may have any position."""


class RowLives:
    """The life and the mark of every row.

    A life begins where a row is set to other blocks or emptied. It follows moves, swaps and permutations; a copy begins
    one of its own. A mark is one past the highest position written since the row was set; it follows copies too.

    Attributes:
        lives: [num_rows] int64. Distinct, from 1 on.
        marks: [num_rows] int64. `UNMARKED`: the next tokens may have any position.
        committed: [num_rows] int64. The lives as of the last commit.
    """

    def __init__(self, config: BlockTableConfig) -> None:
        self.lives: IntArray = np.arange(1, config.num_rows + 1)
        self.marks: IntArray = np.full(config.num_rows, UNMARKED)
        self.committed: IntArray = self.lives.copy()
        self._next = config.num_rows + 1
        shard = config.context_parallel.world_size
        # Positions that a block of each group stands for; 0 where blocks do not stand for positions.
        self._reach = np.array(
            [
                group.block_size * (shard if group.is_sharded else 1) if group.slot_mode == "linear" else 0
                for group in config.groups
            ],
            np.int64,
        )[:, None]

    def begin(self, rows: IntArray) -> None:
        """Begin a life for each row, unmarked."""
        self.lives[rows] = np.arange(self._next, self._next + rows.size)
        self._next += rows.size
        self.marks[rows] = UNMARKED

    def unmark(self, rows: IntArray) -> None:
        """Let the next tokens of rows have any position."""
        self.marks[rows] = UNMARKED

    def copy(self, src: IntArray, dst: IntArray, *, vacate: bool) -> None:
        """Follow a copy of rows, or with `vacate` a move; arguments as `HostPath.copy`."""
        lives, marks = self.lives[src], self.marks[src]
        if vacate:
            self.begin(src[~np.isin(src, dst)])
            self.lives[dst] = lives
        else:
            self.begin(dst[src != dst])
        self.marks[dst] = marks

    def truncate(self, rows: IntArray, before: IntArray, after: IntArray) -> None:
        """Let marks fall to what is left; rows that became empty begin a life.

        Args:
            rows: [n] int64.
            before, after: [num_groups, n] integers. Manager blocks of each row.
        """
        is_emptied = before.any(0) & ~after.any(0)
        self.begin(rows[is_emptied])
        left = np.where((after < before) & (self._reach > 0), after * self._reach, UNMARKED).min(0)
        rest = rows[~is_emptied]
        marks = self.marks[rest]
        self.marks[rest] = np.where(marks == UNMARKED, UNMARKED, np.minimum(marks, left[~is_emptied]))
