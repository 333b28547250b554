"""Rows whose changes are told to the kernels that check: what the host knows of them travels in the arena (R39)."""

from __future__ import annotations

from typing import Any

import numpy as np

from blocktable.check_plan import MAX_INT32
from blocktable.config import BlockTableConfig
from blocktable.holders import Holders
from blocktable.protocols import IntArray, Writes

OPERATIONS = ("append_row", "append_rows", "null", "invalidate")
"""Those that change neither a row's life nor where its tokens may go on."""


class CheckedRows:
    """A host path, and beside it what the kernels are told: lives, marks, blocks that two rows hold, the commit's number.

    Methods do what `HostPath` says of them.

    Args:
        rows: the host path.
        config: with a `check_plan`.

    Attributes:
        holders: which rows hold each block, as of the last commit.
        num_commits: with changes, those that have failed too.
    """

    def __init__(self, rows: Any, config: BlockTableConfig) -> None:
        plan = config.check_plan
        assert plan is not None
        self._rows, self._regions, self._num_rows = rows, config.check_regions, config.num_rows
        self._mirror: IntArray = rows.watch()
        self.filled: IntArray = rows.filled
        self.committed_filled: IntArray = rows.committed_filled
        self.columns_per_block: IntArray = rows.columns_per_block
        self.journal: Any = rows.journal
        self.holders = Holders(config, plan.pools, plan.num_blocks, self._mirror)
        self.num_commits: int = 0
        self._plan = plan
        self._is_told = False  # whether any row operation has come
        self._lives, self._restarts, self._caps = (
            self._mirror[start : start + self._num_rows]
            for start in (self._regions.lives, self._regions.restarts, self._regions.caps)
        )
        self._touched: list[IntArray] = []  # rows whose life has changed since the last commit
        world = config.context_parallel.world_size
        # Tokens that a kept block stands for, in groups whose blocks stand for a row's positions from its start on.
        self._tokens = [
            (index, group.block_size * (world if group.is_sharded else 1))
            for index, group in enumerate(config.groups)
            if group.slot_mode == "linear"
        ]
        for name in OPERATIONS:
            setattr(self, name, getattr(rows, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    @property
    def mirror(self) -> IntArray:
        return self._mirror

    @property
    def has_changes(self) -> bool:
        return bool(self._rows.has_changes)

    # Operations.

    def set_row(self, row: Any, block_ids: Any) -> None:
        self._rows.set_row(row, block_ids)
        self._begin(np.array([row]))

    def set_rows(self, rows: Any, block_ids: Any, counts: Any) -> None:
        self._rows.set_rows(rows, block_ids, counts)
        self._begin(np.asarray(rows, np.int64))

    def truncate_row(self, row: Any, num_blocks: Any) -> None:
        self._rows.truncate_row(row, num_blocks)
        self._truncate(np.array([row]), not np.any(num_blocks))

    def truncate_rows(self, rows: Any, num_blocks: Any) -> None:
        self._rows.truncate_rows(rows, num_blocks)
        self._truncate(np.asarray(rows, np.int64), False)

    def truncate(self, rows: IntArray, num_blocks: IntArray | int) -> None:
        self._rows.truncate(rows, num_blocks)
        self._truncate(rows, not np.any(num_blocks))

    def clear_rows(self, rows: Any) -> None:
        self._rows.clear_rows(rows)
        self._begin(np.asarray(rows, np.int64))

    def copy(self, src: IntArray, dst: IntArray, *, vacate: bool) -> None:
        self._rows.copy(src, dst, vacate=vacate)
        if not vacate:
            self._begin(dst)
            return
        self._tell()
        emptied, kept = src[~np.isin(src, dst)], dst[~np.isin(dst, src)]
        # Lives and marks follow; rows that were overwritten and not moved give their numbers' places to those vacated.
        target, source = np.concatenate((dst, emptied)), np.concatenate((src, kept))
        for region in (self._lives, self._restarts, self._caps):
            region[target] = region[source]
        self._touched.append(target)
        self._mark(target)
        self._begin(emptied)

    def replace(self, rows: IntArray, group: int, starts: IntArray, block_ids: Any, counts: IntArray | None) -> None:
        self._rows.replace(rows, group, starts, block_ids, counts)
        self._restart(rows, -1)

    def remap(self, group: int, old_ids: Any, new_ids: Any) -> None:
        self._rows.remap(group, old_ids, new_ids)
        self._restart(np.flatnonzero(self.filled[group]), -1)

    def _begin(self, rows: IntArray) -> None:
        """Begin new lives."""
        self._tell()
        lives = np.abs(self._lives[rows])
        self._lives[rows] = self._following(lives)
        self._touched.append(rows)
        self._restart(rows, -1)

    def _truncate(self, rows: IntArray, is_cleared: bool) -> None:
        if is_cleared:
            self._begin(rows)
        elif self._tokens and rows.size:
            kept = [self.filled[g, rows] // self.columns_per_block[g] * np.int64(tokens) for g, tokens in self._tokens]
            self._restart(rows, np.minimum(np.min(kept, 0), MAX_INT32))

    def _restart(self, rows: IntArray, caps: Any) -> None:
        """Give the rows' marks new numbers: those kept under the numbers before fall to `caps`, or are forgotten."""
        self._tell()
        self._restarts[rows] = self._following(self._restarts[rows])
        self._caps[rows] = caps
        self._mark(rows)

    def _following(self, numbers: IntArray) -> IntArray:
        """Return new numbers; modulo num_rows they stay what they are, so that no two rows have the same."""
        is_last = numbers > MAX_INT32 - self._num_rows
        following: IntArray = np.where(is_last, numbers % self._num_rows, numbers) + self._num_rows
        return following

    def _tell(self) -> None:
        """Give each row its first life, when the first row operation comes."""
        if not self._is_told:
            self._is_told = True
            self._lives[:] = -np.arange(self._num_rows) - self._num_rows
            self._restarts[:] = np.arange(self._num_rows) + self._num_rows
            self._caps[:] = -1
            self.journal.mark(np.array([self._regions.lives]), np.array([3 * self._num_rows]))

    def _mark(self, rows: IntArray) -> None:
        regions = self._regions
        starts = np.array([regions.lives, regions.restarts, regions.caps])[:, None] + rows
        self.journal.mark(starts, np.ones_like(starts))

    # A commit.

    def pack_changes(self, block: IntArray) -> int:
        self._note()
        return int(self._rows.pack_changes(block))

    def writes(self) -> Writes:
        self._note()
        writes: Writes = self._rows.writes()
        return writes

    def committed(self) -> int:
        return int(self._rows.committed())

    def _note(self) -> None:
        """Write what a commit's changes mean to the kernels into the mirror, as changes of the same commit."""
        if not self._rows.has_changes:
            return
        self._tell()
        regions, mirror = self._regions, self._mirror
        rows, blocks = self.holders.update(*self._rows.pending_ranges())
        rows = np.unique(np.concatenate((rows, *self._touched)))
        self._touched.clear()
        if rows.size:
            lives = np.abs(self._lives[rows])
            self._lives[rows] = np.where(self.filled[:, rows].any(0), lives, -lives)
            self.journal.mark(regions.lives + rows, np.ones_like(rows))
        if blocks.size:
            pool = self.holders.first_block.searchsorted(blocks, side="right") - 1
            block = blocks - self.holders.first_block[pool]
            words = np.array(regions.held)[pool] + block // 32
            bits = np.left_shift(np.uint32(1), (block % 32).astype(np.uint32))
            view, is_shared = mirror.view(np.uint32), self.holders.is_shared[blocks]
            np.bitwise_or.at(view, words[is_shared], bits[is_shared])
            np.bitwise_and.at(view, words[~is_shared], ~bits[~is_shared])
            words = np.unique(words)
            self.journal.mark(words, np.ones_like(words))
        self.num_commits += 1
        mirror[regions.step] = self.num_commits
        self.journal.mark(np.array([regions.step]), np.ones(1, np.int64))
