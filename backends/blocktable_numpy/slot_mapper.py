"""The slot mapper over a numpy store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blocktable import PAD_SLOT_ID, Batch
from blocktable_numpy.block_store import NumpyBlockStore, host_array, rows_of
from blocktable_numpy.kernels import map_slots


class NumpySlotMapper:
    """Slots of every token, group after group."""

    def __init__(self, store: NumpyBlockStore) -> None:
        self.store = store

    def compute_slot_mappings(self, batch: Batch, out: Sequence[Any], *, stream: int | None) -> None:
        config, shard = self.store.config, self.store.config.context_parallel
        idx_mapping = rows_of(batch)
        query_start_loc, positions = host_array(batch.query_start_loc), host_array(batch.positions)
        for index, (group, slots) in enumerate(zip(config.groups, out, strict=True)):
            if group.slot_mode == "none":
                slots[:] = PAD_SLOT_ID
                continue
            map_slots(
                idx_mapping,
                query_start_loc,
                positions,
                self.store.filled[index],
                self.store.table(index),
                tokens_per_column=group.tokens_per_column,
                blocks_per_kv_block=group.blocks_per_kv_block,
                is_ring=group.slot_mode == "ring",
                null_is_pad=group.null_is_pad,
                world_size=shard.world_size if group.is_sharded else 1,
                rank=shard.rank,
                interleave_size=shard.interleave_size,
                slots=slots,
            )
