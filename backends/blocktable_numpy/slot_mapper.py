"""The slot mapper over a numpy store."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from blocktable import ContextParallel, KVCacheGroup
from blocktable.backend import Batch
from blocktable_numpy.block_store import NumpyBlockStore, host_array
from blocktable_numpy.checks import check_requests, check_tokens
from blocktable_numpy.kernels import map_slots

MAX_ENTRIES = 1 << 20
"""Tokens times groups of one call: each step of the kernel makes an array of as many entries."""


class Geometry(NamedTuple):
    """What decides a group's slots beside its rows."""

    tokens_per_column: int
    blocks_per_kv_block: int
    is_ring: bool
    null_is_pad: bool
    null_start: int
    pad_slot_id: int
    world_size: int
    rank: int
    interleave_size: int


Plan = tuple[dict[Geometry, list[tuple[int, int]]], list[tuple[int, int]]]
"""(group, place among the outputs) of the groups of each geometry, and of those without slots."""


class NumpySlotMapper:
    """Slots of every token, for many groups of one geometry together."""

    def __init__(self, store: NumpyBlockStore) -> None:
        self.store = store
        self._plans: dict[tuple[int, ...] | None, Plan] = {}

    def compute_slot_mappings(
        self, batch: Batch, out: Sequence[Any], *, stream: int | None, groups: Sequence[int] | None = None
    ) -> None:
        key = None if groups is None else tuple(groups)
        if key not in self._plans:
            self._plans[key] = self._make_plan(key)
        by_geometry, without_slots = self._plans[key]
        idx_mapping = self.store.rows_of(batch)
        query_start_loc, positions = host_array(batch.query_start_loc), host_array(batch.positions)
        checks = self.store.checks
        checked: Any = {}
        if checks is not None and (key is None or any(map(checks.is_checked, key))):
            check_requests(idx_mapping, query_start_loc, positions, checks)
            given = idx_mapping if batch.idx_mapping is None else host_array(batch.idx_mapping).astype(np.int64)
            checked = {"look": partial(check_tokens, checks=checks), "rows": given}
        groups_at_once = max(1, MAX_ENTRIES // max(1, positions.size))
        for geometry, alike in by_geometry.items():
            for first in range(0, len(alike), groups_at_once):
                members = alike[first : first + groups_at_once]
                map_slots(
                    idx_mapping,
                    query_start_loc,
                    positions,
                    np.array([group for group, _ in members])[:, None],
                    self.store.filled,
                    self.store.row_starts,
                    self.store.arena,
                    **geometry._asdict(),
                    slots=[out[place] for _, place in members],
                    **checked,
                )
        for group, place in without_slots:
            out[place][:] = self.store.config.groups[group].pad_slot_id

    def _make_plan(self, named: tuple[int, ...] | None) -> Plan:
        """Put the groups of a call together by geometry. named: those that the caller names; None: all."""
        config = self.store.config
        by_geometry: dict[Geometry, list[tuple[int, int]]] = {}
        without_slots: list[tuple[int, int]] = []
        for place, index in enumerate(range(len(config.groups)) if named is None else named):
            group = config.groups[index]
            if group.slot_mode == "none" or (group.slot_mode == "cross" and named is None):
                without_slots.append((index, place))
            else:
                by_geometry.setdefault(_geometry(group, config.context_parallel), []).append((index, place))
        return by_geometry, without_slots


def _geometry(group: KVCacheGroup, shard: ContextParallel) -> Geometry:
    return Geometry(
        tokens_per_column=group.tokens_per_column,
        blocks_per_kv_block=group.blocks_per_kv_block,
        is_ring=group.slot_mode == "ring",
        null_is_pad=group.null_is_pad or group.null_block_id < 0,
        null_start=group.null_start,
        pad_slot_id=group.pad_slot_id,
        world_size=shard.world_size if group.is_sharded else 1,
        rank=shard.rank,
        interleave_size=shard.interleave_size,
    )
