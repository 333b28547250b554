"""Who holds each block, as of the last commit: counted from what a commit changes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from blocktable.arrays import IntArray
from blocktable.config import BlockTableConfig
from blocktable.host_path import Difference, HostPath, difference

DENSE_BLOCKS = 1 << 22
"""Blocks of the largest pool that has room for each of its ids; 36 bytes a block, taken when they are touched."""

PAGE_BITS = 10
"""Ids of other pools are looked up in pages of so many bits."""


class Pool:
    """The blocks that some groups share. All arrays are by `index`.

    A *cell* is one row of one group, `group * num_rows + row`. A block that stands twice in a row is held twice.

    Attributes:
        groups: the groups.
        is_dense: whether a block stands at its own id, in arrays that stay the same.
        counts: int32. Columns that hold the block.
        cells: int64. Sum of the cells that hold it.
        since: int64. Commits before the one by which it was taken last.
        writers: int64. The life of the row that wrote into it last; 0: none that is known.
        handed: int64. `epoch` when it was last handed in by a row operation.
        epoch: changes with every commit of changes.
    """

    arrays: tuple[str, ...] = ("counts", "cells", "since", "writers", "handed")

    def __init__(self, groups: tuple[int, ...], limit: int) -> None:
        self.groups: tuple[int, ...] = groups
        self.is_dense: bool = limit <= DENSE_BLOCKS
        size = limit if self.is_dense else 1 << PAGE_BITS
        self._pages: IntArray = np.zeros(1 if self.is_dense else (limit >> PAGE_BITS) + 1, np.int32)
        self._num_pages = 1  # the first one belongs to no block: ids that were never held are found there
        self.counts: IntArray = np.zeros(size, np.int32)
        self.cells: IntArray = np.zeros(size, np.int64)
        self.since: IntArray = np.zeros(size, np.int64)
        self.writers: IntArray = np.zeros(size, np.int64)
        self.handed: IntArray = np.zeros(size, np.int64)
        self.epoch: int = 1

    def index(self, ids: IntArray) -> IntArray:
        """Return where blocks stand in the arrays. ids: integers from 0 on, of any shape."""
        if self.is_dense:
            return ids
        indexes: IntArray = (self._pages[ids >> PAGE_BITS].astype(np.int64) << PAGE_BITS) + (
            ids & ((1 << PAGE_BITS) - 1)
        )
        return indexes

    def hand_in(self, ids: IntArray) -> bool:
        """Note blocks that a row operation hands in; return whether any of them may be in a row already."""
        index = self.index(ids)
        may_be_held = bool(self.counts[index].any() or (self.handed[index] == self.epoch).any())
        self.handed[index] = self.epoch
        return may_be_held

    def hold(self, ids: IntArray, cells: IntArray, step: int) -> None:
        """Note that cells take blocks; ids may repeat. ids, cells: [n] integers."""
        if not self.is_dense:
            self._make_room(ids)
        index = self.index(ids)
        np.add.at(self.counts, index, 1)
        np.add.at(self.cells, index, cells)
        self.since[index] = step

    def release(self, ids: IntArray, cells: IntArray) -> None:
        """Note that cells released blocks; ids may repeat. ids, cells: [n] integers."""
        index = self.index(ids)
        np.subtract.at(self.counts, index, 1)
        np.subtract.at(self.cells, index, cells)

    def _make_room(self, ids: IntArray) -> None:
        pages = np.unique(ids >> PAGE_BITS)
        pages = pages[self._pages[pages] == 0]
        if not pages.size:
            return
        self._pages[pages] = np.arange(self._num_pages, self._num_pages + pages.size)
        self._num_pages += pages.size
        size = self._num_pages << PAGE_BITS
        if size > self.counts.size:
            for name in self.arrays:
                old = getattr(self, name)
                new = np.zeros(2 * size, old.dtype)
                new[: old.size] = old
                setattr(self, name, new)


class Holders:
    """The rows as of the last commit, and the pools that say who holds what in them.

    Attributes:
        arena: [arena.size] int32. What the device holds once the commits so far are done.
        filled: [num_groups, num_rows] int32. A view: columns in use.
        pools: group -> its pool.
    """

    pool_type: type[Pool] = Pool

    def __init__(self, config: BlockTableConfig) -> None:
        self.config = config
        self.arena: IntArray = config.arena.empty()
        self.filled: IntArray = config.arena.view(self.arena, -1)
        names = [group.pool for group in config.groups]
        made: dict[int, Pool] = {}
        for group, name in enumerate(names):
            first = group if name is None else names.index(name)
            if first not in made:
                members = (group,) if name is None else tuple(i for i, other in enumerate(names) if other == name)
                made[first] = self.pool_type(members, max(config.groups[member].block_id_limit for member in members))
        self.pools: list[Pool] = [made[i if name is None else names.index(name)] for i, name in enumerate(names)]
        self._bounds = np.array(config.arena.group_offsets, np.int64)

    def difference(self, rows: HostPath) -> Difference:
        """Return what of the rows a commit would change."""
        return difference(self.arena, rows)

    def apply(self, change: Difference, step: int) -> None:
        """Make the change. step: commits before it."""
        entries, old, new = change
        if not entries.size:
            return
        self.arena[entries] = new
        ends = np.append(entries.searchsorted(self._bounds), entries.size).tolist()
        for group, (start, stop) in enumerate(pairwise(ends)):
            if start < stop:
                self._count(group, entries[start:stop], old[start:stop], new[start:stop], step)

    def _count(self, group: int, entries: IntArray, old: IntArray, new: IntArray, step: int) -> None:
        geometry, arena = self.config.groups[group], self.config.arena
        expansion, null, pool = geometry.blocks_per_kv_block, geometry.null_block_id, self.pools[group]
        rows, columns = np.divmod(entries - arena.group_offsets[group], arena.widths[group])
        if expansion > 1:  # one column stands for a block
            is_first = columns % expansion == 0
            rows, old, new = rows[is_first], old[is_first] // expansion, new[is_first] // expansion
        cells = rows + group * arena.num_rows
        was_held, is_held = old != null, new != null
        pool.release(old[was_held], cells[was_held])
        pool.hold(new[is_held], cells[is_held], step)

    def undo(self, change: Difference, step: int) -> None:
        """Take a change back."""
        self.apply(Difference(change.entries, change.new, change.old), step)

    def other_cell(self, group: int, row: int, block_id: int) -> tuple[int, int] | None:
        """Return a (group, row) that holds a block beside this one; None: no other one does."""
        pool, num_rows = self.pools[group], self.config.num_rows
        index, cell = int(pool.index(np.array([block_id]))[0]), group * num_rows + row
        if pool.counts[index] == 2:
            other = int(pool.cells[index]) - cell
            return None if other == cell else divmod(other, num_rows)
        for member in pool.groups:
            expansion = self.config.groups[member].blocks_per_kv_block
            table = self.config.arena.view(self.arena, member)
            for other in np.flatnonzero((table[:, ::expansion] == block_id * expansion).any(1)).tolist():
                if (member, other) != (group, row):
                    return member, other
        return None
