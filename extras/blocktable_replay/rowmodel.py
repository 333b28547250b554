"""What the calls of a recording leave in the rows, worked out once more from manager blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blocktable import BlockTableConfig
from blocktable.typing import IntArray
from blocktable_replay.record import NULLED, BlockRecord

OF_ONE_ROW: dict[str, Callable[..., tuple[Any, ...]]] = {
    "append_row": lambda row, ids: ("append_rows", [row], ids, None),
    "set_row": lambda row, ids: ("set_rows", [row], ids, None),
    "clear_row": lambda row: ("clear_rows", [row]),
    "truncate_row": lambda row, kept: ("truncate_rows", [row], np.reshape(kept, (-1, 1))),
    "null_range": lambda row, group, start, stop: ("null_ranges", [row], group, [start], [stop]),
    "replace_blocks": lambda row, group, start, ids: ("replace_block_ranges", [row], group, [start], ids, None),
    "move_row": lambda src, dst: ("permute_rows", [src], [dst]),
    "swap_rows": lambda a, b: ("permute_rows", [a, b], [b, a]),
    "copy_row": lambda src, dst: ("copy_rows", [src], [dst]),
}
"""Operations of one row -> the same of many, with its arguments; counts None: all ids are for the one row."""


def as_many(name: str, values: Sequence[Any]) -> tuple[str, Sequence[Any]]:
    """Return a call on one row as the same of many; any other call is as it was."""
    if name in OF_ONE_ROW:
        name, *values = OF_ONE_ROW[name](*values)
    return name, values


MAX_COUNTED = 1 << 24
"""Ids below are counted in an array as long as the highest one, which is faster than sorting them."""


class RowModel:
    """Rows on the host, and as the last commit left them, by row.

    Attributes:
        host: after every call so far.
        committed: what kernels see.
    """

    def __init__(self, config: BlockTableConfig) -> None:
        self.host: BlockRecord = BlockRecord(config, config.num_rows)
        self.committed: BlockRecord = BlockRecord(config, config.num_rows)
        self._num_groups = len(config.groups)
        self._num_rows = config.num_rows
        self._changed: IntArray = np.zeros(config.num_rows, np.bool_)

    def apply(self, name: str, values: Sequence[Any]) -> None:
        """Do what one call does to the rows; a call that changes none does nothing."""
        name, values = as_many(name, values)
        operation = getattr(self, f"_{name}", None)
        if operation is not None:
            operation(*values)

    def commit(self) -> None:
        """Let kernels see what the host has."""
        rows = np.flatnonzero(self._changed)
        self.committed.copy(self.host, rows, rows)
        self._changed[:] = False

    def holders(self) -> list[IntArray]:
        """Return for each group [n] int64: how many rows hold each block that any holds; NULL belongs to none."""
        record = self.committed
        rows = [np.flatnonzero(counts).tolist() for counts in record.counts]
        held = ([record.held(group, row) for row in each] for group, each in enumerate(rows))
        return [_counts(np.concatenate([np.empty(0, np.int32), *each])) for each in held]

    # The operations of many rows, named as the methods of BlockTable.

    def _append_rows(self, rows: Any, block_ids: Any, counts: Any) -> None:
        where, ids = self._change(rows), self._ids(block_ids)
        sizes = np.array([[group.size] for group in ids]) if counts is None else self._sizes(counts, where.size)
        for group in range(self._num_groups):
            if ids[group].size:
                self.host.extend(group, where, ids[group].astype(np.int32), sizes[group])

    def _set_rows(self, rows: Any, block_ids: Any, counts: Any) -> None:
        self._clear_rows(rows)
        self._append_rows(rows, block_ids, counts)

    def _clear_rows(self, rows: Any) -> None:
        self.host.counts[:, self._change(rows)] = 0

    def _clear(self) -> None:
        self._clear_rows(np.arange(self._num_rows))

    def _truncate_rows(self, rows: Any, num_blocks: Any) -> None:
        where = self._change(rows)
        kept = self._sizes(num_blocks, where.size)
        self.host.counts[:, where] = np.minimum(self.host.counts[:, where], kept)

    def _null_ranges(self, rows: Any, group: int, starts: Any, stops: Any) -> None:
        firsts = np.asarray(starts, np.int64)
        self.host.put(group, self._change(rows), firsts, np.asarray(stops, np.int64) - firsts, NULLED)

    def _permute_rows(self, src: Any, dst: Any) -> None:
        counts = self.host.counts[:, np.asarray(src, np.int64)]
        self._copy_rows(src, dst)
        self.host.counts[:, self._change(src)] = 0
        self.host.counts[:, np.asarray(dst, np.int64)] = counts

    def _copy_rows(self, src: Any, dst: Any) -> None:
        self.host.copy(self.host, np.asarray(src, np.int64), self._change(dst))

    def _replace_block_ranges(self, rows: Any, group: int, starts: Any, block_ids: Any, counts: Any) -> None:
        ids = _one_group(block_ids)
        sizes = np.asarray([ids.size] if counts is None else counts, np.int64)
        self.host.put(group, self._change(rows), np.asarray(starts, np.int64), sizes, ids)

    def _remap_blocks(self, group: int, old_ids: Any, new_ids: Any) -> None:
        self.host.remap(group, _one_group(old_ids), _one_group(new_ids))
        self._changed |= self.host.counts[group] > 0

    def _change(self, rows: Any) -> IntArray:
        """Return rows as [n] int64, and note that they change."""
        where = np.asarray(rows, np.int64)
        self._changed[where] = True
        return where

    # Arguments, in the many forms that the contract allows (R8).

    def _ids(self, block_ids: Any) -> list[IntArray]:
        """One [n] array of ids for each group; nothing (None, []) in place of all groups is nothing for each."""
        if block_ids is None or len(block_ids) == 0:
            return [np.empty(0, np.int64)] * self._num_groups
        is_flat = self._num_groups == 1 and not (block_ids[0] is None or hasattr(block_ids[0], "__len__"))
        groups = [block_ids] if is_flat else block_ids
        return [_one_group(ids) for ids in groups]

    def _sizes(self, counts: Any, num_rows: int) -> IntArray:
        """[num_groups, num_rows] int64, from counts for all groups or for each."""
        return np.broadcast_to(_bounded(counts), (self._num_groups, num_rows))


def _counts(ids: IntArray) -> IntArray:
    """[n] int64. How often each of the ids stands there; ids of a damaged file are not sizes of an array."""
    if ids.max(initial=0) < MAX_COUNTED:
        counts = np.bincount(ids)
        return counts[counts > 0]
    return np.unique(ids, return_counts=True)[1]


def _bounded(counts: Any) -> IntArray:
    """Return counts as int64; those of uint64 above what int64 holds keep everything just as well as its largest."""
    array = np.asarray(counts)
    if array.dtype == np.uint64:
        array = np.minimum(array, np.iinfo(np.int64).max)
    return array.astype(np.int64)


def _one_group(ids: Any) -> IntArray:
    """[n] int64; nothing (None) is an empty array."""
    return np.asarray([] if ids is None else ids, np.int64)
