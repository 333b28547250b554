"""The slot mapper over a Triton store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl

from blocktable import Batch
from blocktable_triton.block_store import Inputs, TritonBlockStore
from blocktable_triton.kernels import launch_map_slots, map_features, map_slots, num_warps


class TritonSlotMapper:
    """Slots of every token, all groups of a table's own buffers in one launch."""

    def __init__(self, store: TritonBlockStore) -> None:
        self.store = store
        store.mapper = self
        slot_type, features = getattr(tl, store.config.slot_dtype), map_features(store.features)
        short, long = (
            store.device.kernel(
                map_slots, slot_type, features, is_long, store.tiles[is_long], num_warps=num_warps(is_long)
            )
            if is_long <= store.is_long
            else None
            for is_long in (False, True)
        )
        self._kernels = short, long

    def compute_slot_mappings(self, batch: Batch, out: Sequence[Any], *, stream: int | None) -> None:
        store, num_groups = self.store, len(out)
        starts = [store.device.address(slots) for slots in out]
        lengths = [_length(slots) for slots in out]
        stride = starts[1] - starts[0] if num_groups > 1 else 0
        itemsize = np.dtype(store.config.slot_dtype).itemsize
        is_regular = all(
            start == starts[0] + group * stride and length == lengths[0]
            for group, (start, length) in enumerate(zip(starts, lengths, strict=True))
        )
        with store.device.current(), store.inputs(batch, stream) as inputs:
            if is_regular and stride % itemsize == 0:
                self._launch(batch, inputs, 0, num_groups, starts[0], stride // itemsize, lengths[0])
                return
            for group, (start, length) in enumerate(zip(starts, lengths, strict=True)):  # a caller's own arrays
                self._launch(batch, inputs, group, 1, start, 0, length)

    def _launch(
        self, batch: Batch, inputs: Inputs, first_group: int, num_groups: int, slots: int, stride: int, num_slots: int
    ) -> None:
        store = self.store
        launch_map_slots(
            self._kernels,
            store.tiles,
            inputs.idx_mapping,
            inputs.query_start_loc,
            inputs.positions,
            batch.num_reqs,
            batch.num_positions,
            store.config.max_num_reqs,
            store.groups_address,
            first_group,
            num_groups,
            store.arena_address,
            slots,
            stride,
            num_slots,
            inputs.stream,
        )


def _length(slots: Any) -> int:
    """Entries of an output; an array of another library may say its shape by its interface alone."""
    shape = getattr(slots, "shape", None)
    return int((slots.__cuda_array_interface__["shape"] if shape is None else shape)[0])
