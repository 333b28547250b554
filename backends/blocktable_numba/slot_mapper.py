"""The slot mapper over a Numba store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blocktable import Batch
from blocktable_numba.block_store import Inputs, NumbaBlockStore, SlotMappings
from blocktable_numba.kernels import launch_map_slots


class NumbaSlotMapper:
    """Slots of every token, all groups of a table's own buffers in one launch."""

    def __init__(self, store: NumbaBlockStore) -> None:
        self.store = store
        store.mapper = self
        self._kernel = store.device.kernel("map_slots", store.config.slot_dtype, store.features)

    def compute_slot_mappings(self, batch: Batch, out: Sequence[Any], *, stream: int | None) -> None:
        store = self.store
        with store.device.current(), store.inputs(batch, stream) as inputs:
            if isinstance(out, SlotMappings):
                num_tokens = store.config.max_num_batched_tokens
                self._launch(batch, inputs, 0, len(out), out.memory, num_tokens, num_tokens)
                return
            for group, slots in enumerate(out):  # a caller's own arrays
                self._launch(batch, inputs, group, 1, slots, 0, slots.shape[0])

    def _launch(
        self, batch: Batch, inputs: Inputs, first_group: int, num_groups: int, slots: Any, stride: int, num_slots: int
    ) -> None:
        store = self.store
        launch_map_slots(
            self._kernel,
            store.device.tile,
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
            store.device.address(slots),
            stride,
            num_slots,
            inputs.stream,
        )
