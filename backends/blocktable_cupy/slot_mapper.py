"""The slot mapper over a CuPy store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blocktable import Batch
from blocktable_cupy.block_store import CupyBlockStore, Inputs
from blocktable_cupy.kernels import launch_map_slots, module_options


class CupySlotMapper:
    """Slots of every token, all groups of a table's own buffers in one launch."""

    def __init__(self, store: CupyBlockStore) -> None:
        self.store = store
        store.mapper = self
        options = module_options(store.config)
        self._kernels = store.device.kernel("map_slots", options), store.device.kernel("map_slots_long", options)

    def compute_slot_mappings(self, batch: Batch, out: Sequence[Any], *, stream: int | None) -> None:
        store, num_groups = self.store, len(out)
        address = store.device.address
        starts = [address(slots) for slots in out]
        stride = starts[1] - starts[0] if num_groups > 1 else 0
        itemsize = np.dtype(store.config.slot_dtype).itemsize
        length = out[0].shape[0]
        is_regular = stride % itemsize == 0 and all(
            start == starts[0] + group * stride and slots.shape[0] == length
            for group, (start, slots) in enumerate(zip(starts, out, strict=True))
        )
        with store.device.current(), store.inputs(batch, stream) as inputs:
            if is_regular:
                self._launch(batch, inputs, 0, num_groups, starts[0], stride // itemsize, length)
                return
            for group, (start, slots) in enumerate(zip(starts, out, strict=True)):  # a caller's own arrays
                self._launch(batch, inputs, group, 1, start, 0, slots.shape[0])

    def _launch(
        self, batch: Batch, inputs: Inputs, first_group: int, num_groups: int, slots: int, stride: int, num_slots: int
    ) -> None:
        store = self.store
        launch_map_slots(
            self._kernels,
            store.tile,
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
