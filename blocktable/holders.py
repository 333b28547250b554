"""Which rows hold each block, kept up to date from what changes between two commits."""

from __future__ import annotations

import numpy as np

from blocktable.config import BlockTableConfig
from blocktable.protocols import IntArray, ranges


class Holders:
    """How many cells hold each block of each pool, and whether they are of two rows or more.

    Of each block it keeps the number of cells, the sum of their rows and that of the rows' squares: all are of one row
    where number * squares == sum ** 2. They commute, so that the order of changes does not matter.

    Args:
        config: the geometry.
        pools: of each group, its pool; -1: it does not count.
        num_blocks: manager blocks of each pool.
        mirror: [>= end of the tables] int32. What rows hold now; read at each `update`.

    Attributes:
        shadow: [end of the tables] int32. What rows held at the last update.
        first_block: [num_pools + 1] int64. Where the blocks of each pool begin in the arrays of all pools.
        counts: [blocks of all pools] int64. Cells that hold each block.
        is_shared: [blocks of all pools] bool. Whether two rows or more hold it.
    """

    def __init__(
        self, config: BlockTableConfig, pools: tuple[int, ...], num_blocks: tuple[int, ...], mirror: IntArray
    ) -> None:
        arena = config.arena
        self._arena, self._pools, self._mirror = arena, pools, mirror
        self._end = arena.size - arena.num_check_entries
        self.shadow: IntArray = arena.empty()[: self._end]
        self.first_block: IntArray = np.concatenate(([0], np.cumsum(num_blocks, dtype=np.int64)))
        total = int(self.first_block[-1])
        self.counts: IntArray = np.zeros(total, np.int64)
        self._sums, self._squares = np.zeros(total, np.int64), np.zeros(total, np.int64)
        self.is_shared: IntArray = np.zeros(total, np.bool_)
        self._num_counts = arena.num_groups * arena.num_rows
        self._offsets = np.array(arena.group_offsets)
        self._widths = np.array(arena.widths)
        self._first = np.array([self.first_block[pool] if pool >= 0 else -1 for pool in pools])
        self._columns = np.array([group.blocks_per_kv_block for group in config.groups])
        self._null_starts = np.array([group.null_start for group in config.groups])

    def update(self, offsets: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
        """Take the changes of a commit in.

        Args:
            offsets, lengths: [n] int64. Disjoint ranges of the arena; nothing else has changed since the last update.

        Returns:
            rows: [r] int64. Rows whose filled counts have changed; they may repeat.
            blocks: [b] int64. Blocks, counted over all pools, whose `is_shared` has changed.
        """
        entries = ranges(offsets, lengths)
        if entries.size and entries[-1] >= self._end:
            entries = entries[entries < self._end]
        old, new = self.shadow[entries], self._mirror[entries]
        changed = old != new
        entries, old, new = entries[changed], old[changed], new[changed]
        self.shadow[entries] = new
        num_counts = int(entries.searchsorted(self._num_counts))
        rows = entries[:num_counts] % self._arena.num_rows
        return rows, self._count(entries[num_counts:], old[num_counts:], new[num_counts:])

    def _count(self, entries: IntArray, old: IntArray, new: IntArray) -> IntArray:
        group = self._offsets.searchsorted(entries, side="right") - 1
        row, column = np.divmod(entries - self._offsets[group], self._widths[group])
        expansion, first = self._columns[group], self._first[group]
        counts = (column % expansion == 0) & (first >= 0)
        touched = []
        for values, sign in ((old, -1), (new, 1)):
            is_block = counts & ((values - self._null_starts[group]).astype(np.uint32) >= expansion)
            blocks = first[is_block] + values[is_block] // expansion[is_block]
            rows = row[is_block]
            np.add.at(self.counts, blocks, sign)
            np.add.at(self._sums, blocks, sign * rows)
            np.add.at(self._squares, blocks, sign * rows * rows)
            touched.append(blocks)
        blocks = np.unique(np.concatenate(touched))
        number, total = self.counts[blocks], self._sums[blocks]
        is_shared = (number > 1) & (number * self._squares[blocks] != total * total)
        switched = is_shared != self.is_shared[blocks]
        self.is_shared[blocks] = is_shared
        found: IntArray = blocks[switched]
        return found
