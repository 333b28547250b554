"""The slot mapper over a numpy store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from blocktable import PAD_SLOT_ID, Batch, ContextParallel, KVCacheGroup
from blocktable_numpy.block_store import NumpyBlockStore, host_array
from blocktable_numpy.kernels import map_slots

MAX_ENTRIES = 1 << 20
"""Tokens times groups of one call: each step of the kernel makes an array of as many entries."""


class Geometry(NamedTuple):
    """What decides a group's slots beside its rows."""

    tokens_per_column: int
    blocks_per_kv_block: int
    is_ring: bool
    null_is_pad: bool
    world_size: int
    rank: int
    interleave_size: int


class NumpySlotMapper:
    """Slots of every token, for many groups of one geometry at once."""

    def __init__(self, store: NumpyBlockStore) -> None:
        self.store = store
        self._families: dict[Geometry, list[int]] = {}
        self._without_slots: list[int] = []
        for index, group in enumerate(store.config.groups):
            if group.slot_mode == "none":
                self._without_slots.append(index)
            else:
                self._families.setdefault(_geometry(group, store.config.context_parallel), []).append(index)

    def compute_slot_mappings(self, batch: Batch, out: Sequence[Any], *, stream: int | None) -> None:
        idx_mapping = self.store.rows_of(batch)
        query_start_loc, positions = host_array(batch.query_start_loc), host_array(batch.positions)
        groups_at_once = max(1, MAX_ENTRIES // max(1, positions.size))
        for geometry, family in self._families.items():
            for first in range(0, len(family), groups_at_once):
                groups = family[first : first + groups_at_once]
                map_slots(
                    idx_mapping,
                    query_start_loc,
                    positions,
                    np.array(groups)[:, None],
                    self.store.filled,
                    self.store.row_starts,
                    self.store.arena,
                    **geometry._asdict(),
                    slots=[out[group] for group in groups],
                )
        for group in self._without_slots:
            out[group][:] = PAD_SLOT_ID


def _geometry(group: KVCacheGroup, shard: ContextParallel) -> Geometry:
    return Geometry(
        tokens_per_column=group.tokens_per_column,
        blocks_per_kv_block=group.blocks_per_kv_block,
        is_ring=group.slot_mode == "ring",
        null_is_pad=group.null_is_pad,
        world_size=shard.world_size if group.is_sharded else 1,
        rank=shard.rank,
        interleave_size=shard.interleave_size,
    )
