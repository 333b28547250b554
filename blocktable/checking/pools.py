"""Who holds each block, as of the last commit: counted from what a commit changes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from blocktable.arrays import IntArray
from blocktable.check_plan import CheckPlan, CheckRegions
from blocktable.checking.lives import positions_per_block
from blocktable.config import BlockTableConfig
from blocktable.host_path import Difference, HostPath, difference

DENSE_BLOCKS = 1 << 22
"""Blocks of the largest pool that has room for each of its ids; 48 bytes a block, taken when they are touched."""

PAGE_BITS = 10
"""Ids of other pools are looked up in pages of so many bits."""

BLOCK = np.dtype(
    [(name, "i8") for name in ("cells", "squares", "since", "writers", "handed")]
    + [("counts", "i4"), ("is_shared", "i4")]
)
"""What is known of a block, together, since a commit looks at all of it. `blocktable_compiled` has the same struct."""


class Pool:
    """The blocks that some groups share. All arrays are by `index`, and views of `blocks`.

    A *cell* is one row of one group, `group * num_rows + row`. A block that stands twice in a row is held twice.

    Args:
        groups: the groups.
        limit: ids are below it.
        hand_ins: [2] int64. How many row operations have handed in blocks, and of them those before the last commit.

    Attributes:
        groups, hand_ins: as given.
        is_dense: whether a block stands at its own id, in arrays that stay the same.
        blocks: [n] of `BLOCK`.
        counts: int32. Columns that hold the block.
        cells: int64. Sum of the cells that hold it.
        squares: int64. Sum of their squares.
        since: int64. Commits before the one by which it was taken last.
        writers: int64. The life of the row that wrote into it last; 0: none that is known.
        handed: int64. The number of the row operation that handed it in last.
        is_shared: int32. Whether two cells held it when `switched` was last asked.
    """

    def __init__(self, groups: tuple[int, ...], limit: int, hand_ins: IntArray) -> None:
        self.groups: tuple[int, ...] = groups
        self.hand_ins: IntArray = hand_ins
        self.is_dense: bool = limit <= DENSE_BLOCKS
        self._pages: IntArray = np.zeros(1 if self.is_dense else (limit >> PAGE_BITS) + 1, np.int32)
        self._num_pages = 1  # the first one belongs to no block: ids that were never held are found there
        self._use(np.zeros(limit if self.is_dense else 1 << PAGE_BITS, BLOCK))

    def _use(self, blocks: IntArray) -> None:
        self.blocks: IntArray = blocks
        self.cells: IntArray = blocks["cells"]
        self.squares: IntArray = blocks["squares"]
        self.since: IntArray = blocks["since"]
        self.writers: IntArray = blocks["writers"]
        self.handed: IntArray = blocks["handed"]
        self.counts: IntArray = blocks["counts"]
        self.is_shared: IntArray = blocks["is_shared"]

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
        may_be_held = bool(self.counts[index].any() or (self.handed[index] > self.hand_ins[1]).any())
        self.hand_ins[0] += 1
        self.handed[index] = self.hand_ins[0]
        return may_be_held

    def hold(self, ids: IntArray, cells: IntArray, step: int) -> None:
        """Note that cells take blocks; ids may repeat. ids, cells: [n] integers."""
        if not self.is_dense:
            self._make_room(ids)
        index = self.index(ids)
        np.add.at(self.counts, index, 1)
        np.add.at(self.cells, index, cells)
        np.add.at(self.squares, index, cells * cells)
        self.since[index] = step

    def release(self, ids: IntArray, cells: IntArray) -> None:
        """Note that cells released blocks; ids may repeat. ids, cells: [n] integers."""
        index = self.index(ids)
        np.subtract.at(self.counts, index, 1)
        np.subtract.at(self.cells, index, cells)
        np.subtract.at(self.squares, index, cells * cells)

    def switched(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Return those of some blocks that are shared now, or no longer, unlike before: ids, and whether they are now.

        Two cells hold a block where number * squares is not sum ** 2.
        """
        ids = np.unique(ids)
        index = self.index(ids)
        number, total = self.counts[index], self.cells[index]
        is_shared = (number > 1) & (number * self.squares[index] != total * total)
        has_switched = is_shared != self.is_shared[index]
        self.is_shared[index] = is_shared
        return ids[has_switched], is_shared[has_switched]

    def _make_room(self, ids: IntArray) -> None:
        pages = np.unique(ids >> PAGE_BITS)
        pages = pages[self._pages[pages] == 0]
        if not pages.size:
            return
        self._pages[pages] = np.arange(self._num_pages, self._num_pages + pages.size)
        self._num_pages += pages.size
        size = self._num_pages << PAGE_BITS
        if size > self.blocks.size:
            grown = np.zeros(2 * size, BLOCK)
            grown[: self.blocks.size] = self.blocks
            self._use(grown)


def has_distinct_blocks(config: BlockTableConfig, group: int) -> bool:
    """Say whether a block twice in a row of a group is a mistake; one that a window has left may come back to it."""
    geometry = config.groups[group]
    return geometry.slot_mode == "linear" and geometry.sliding_window is None and not config.stale_rows


class Move(NamedTuple):
    """What a change means for the blocks of one group. Ids and cells: [n] integers.

    Attributes:
        group: the group.
        released, released_by: blocks that are let go of, and the cell of each.
        held, held_by: blocks that are taken, and the cell of each.
    """

    group: int
    released: IntArray
    released_by: IntArray
    held: IntArray
    held_by: IntArray


class Holders:
    """The rows as of the last commit, and the pools that say who holds what in them.

    Attributes:
        arena: [arena.num_table_entries] int32. What the device's tables hold once the commits so far are done.
        filled: [num_groups, num_rows] int32. A view: columns in use.
        pools: group -> its pool.
        hand_ins: [2] int64. As all pools know it.
        taken: what `take` took last; not kept by the compiled path.
        compiled: does all that where the compiled path runs; None elsewhere.
    """

    def __init__(self, config: BlockTableConfig) -> None:
        self.config = config
        self.arena: IntArray = config.arena.empty()[: config.arena.num_table_entries]
        self.filled: IntArray = config.arena.view(self.arena, -1)
        self.hand_ins: IntArray = np.zeros(2, np.int64)
        self.compiled: Any = None
        names = [group.pool for group in config.groups]
        made: dict[int, Pool] = {}
        for group, name in enumerate(names):
            first = group if name is None else names.index(name)
            if first not in made:
                members = (group,) if name is None else tuple(i for i, other in enumerate(names) if other == name)
                limit = max(config.groups[member].block_id_limit for member in members)
                made[first] = Pool(members, limit, self.hand_ins)
        self.pools: list[Pool] = [made[i if name is None else names.index(name)] for i, name in enumerate(names)]
        self._bounds = np.array(config.arena.group_offsets, np.int64)
        self._rows: Any = None
        self.taken: Difference = Difference(*(np.zeros((3, 0), np.int64)))

    def attach(self, rows: HostPath, lives: Any) -> None:
        """Take the rows, whose mirror is watched, and whose they are."""
        self._rows, make = rows, getattr(rows, "holders_type", None)
        if make is None or not all(pool.is_dense for pool in self.pools):
            return
        config, plan = self.config, self.config.check_plan
        regions = None if plan is None else config.check_regions
        bits = {} if plan is None or regions is None else self.bits(plan, regions)
        reach = positions_per_block(config)
        fields = [
            (
                *(config.arena.group_offsets[group], config.arena.widths[group], geometry.blocks_per_kv_block),
                *(geometry.null_block_id, geometry.slot_mode in ("linear", "ring")),
                *(has_distinct_blocks(config, group), reach[group, 0], *bits.get(self.pools[group], (-1, 0))),
            )
            for group, geometry in enumerate(config.groups)
        ]
        self.compiled = make(
            *(
                self.arena,
                rows.live_mirror(),
                rows.journal,
                config.num_rows,
                config.stale_rows,
                np.array(fields, np.int64),
            ),
            *([pool.blocks for pool in self.pools], self.hand_ins),
            *(lives.arrays, None if regions is None else (regions.step, regions.lives)),
        )

    def bits(self, plan: CheckPlan, regions: CheckRegions) -> dict[Pool, tuple[int, int]]:
        """Return, for each pool that kernels look at, the entry of the arena with its first bits, and their number."""
        found = list(zip(regions.held, plan.num_blocks, strict=True))
        return {self.pools[group]: found[pool] for group, pool in enumerate(plan.pools) if pool >= 0}

    def take(self, step: int) -> None:
        """Take what is pending in the rows. step: commits before it."""
        if self.compiled is not None:
            self.compiled.take(step)
        else:
            self.taken = difference(self.arena, self._rows)
            self._make(self.taken, step)

    def undo(self, step: int) -> None:
        """Take back what was taken last. step: commits so far."""
        if self.compiled is not None:
            self.compiled.undo(step)
        else:
            entries, old, new = self.taken
            self._make(Difference(entries, new, old), step)

    def _make(self, change: Difference, step: int) -> None:
        self.arena[change.entries] = change.new
        for move in self.moves(change):
            pool = self.pools[move.group]
            pool.release(move.released, move.released_by)
            pool.hold(move.held, move.held_by, step)

    def moves(self, change: Difference) -> Iterator[Move]:
        """Yield what a change means for the blocks of each group that it touches."""
        entries, old, new = change
        ends = np.append(entries.searchsorted(self._bounds), entries.size).tolist()
        for group, (start, stop) in enumerate(pairwise(ends)):
            if start < stop:
                yield self._move(group, entries[start:stop], old[start:stop], new[start:stop])

    def _move(self, group: int, entries: IntArray, old: IntArray, new: IntArray) -> Move:
        geometry, arena = self.config.groups[group], self.config.arena
        expansion, null = geometry.blocks_per_kv_block, geometry.null_block_id
        rows, columns = np.divmod(entries - arena.group_offsets[group], arena.widths[group])
        if expansion > 1:  # one column stands for a block
            is_first = columns % expansion == 0
            rows, old, new = rows[is_first], old[is_first] // expansion, new[is_first] // expansion
        cells = rows + group * arena.num_rows
        was_held, is_held = old != null, new != null
        return Move(group, old[was_held], cells[was_held], new[is_held], cells[is_held])

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
