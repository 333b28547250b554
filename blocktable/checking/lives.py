"""Whose rows are: a number for each row's life, and how far it has been written."""

from __future__ import annotations

from typing import Any

import numpy as np

from blocktable.arrays import IntArray
from blocktable.config import BlockTableConfig

UNMARKED = np.iinfo(np.int64).max
"""The mark of a row whose next tokens may have any position."""


def positions_per_block(config: BlockTableConfig) -> IntArray:
    """[num_groups, 1] int64. Positions that a block of each group stands for; 0 where blocks stand for none."""
    world_size = config.context_parallel.world_size
    reach = [
        group.block_size * (world_size if group.is_sharded else 1) if group.slot_mode == "linear" else 0
        for group in config.groups
    ]
    return np.array(reach, np.int64)[:, None]


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
        self._next: IntArray = np.array([config.num_rows + 1])
        self._reach = positions_per_block(config)

    def attach(self, mirror: IntArray, journal: Any) -> None:
        """Nothing is told to kernels."""

    @property
    def arrays(self) -> tuple[IntArray, ...]:
        """What the compiled path changes too: lives, marks, and [1] int64 the next life."""
        return self.lives, self.marks, self._next

    def begin(self, rows: IntArray) -> None:
        """Begin a life for each row, unmarked."""
        self.lives[rows] = np.arange(self._next[0], self._next[0] + rows.size)
        self._next[0] += rows.size
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
