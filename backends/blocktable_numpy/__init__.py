"""The reference backend: numpy on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from blocktable import ArgumentError, BlockTableConfig
from blocktable.backend import PROTOCOL_VERSION, compiled_step
from blocktable_numpy.block_store import NumpyBlockStore
from blocktable_numpy.fused import FusedNumpyStore
from blocktable_numpy.slot_mapper import NumpySlotMapper

__all__ = ["NumpyBackend", "NumpyBlockStore", "NumpySlotMapper"]


class NumpyBackend:
    """Vectorised and readable; its "device" is host memory of its own."""

    name = "numpy"
    protocol_version = PROTOCOL_VERSION
    description = "numpy (host)"

    @property
    def capabilities(self) -> frozenset[str]:
        """What it can do beyond the protocol."""
        declared = {"int32_slots", "exports", "export_parts", "device_checks"}
        return frozenset(declared if compiled_step() is None else declared | {"fused_step"})

    def why_unavailable(self) -> str | None:
        return None

    def create_block_store(self, config: BlockTableConfig, device: Any = None) -> NumpyBlockStore:
        if str(device) not in ("None", "cpu"):
            raise ArgumentError(f'The numpy backend runs on the host: device must be None or "cpu", got {device!r}.')
        make_step = compiled_step() if config.check_plan is None else None  # the compiled one looks for nothing
        return NumpyBlockStore(config) if make_step is None else FusedNumpyStore(config, make_step)

    def create_slot_mapper(self, store: NumpyBlockStore) -> NumpySlotMapper:
        return NumpySlotMapper(store)

    def from_host(self, array: np.ndarray[Any, Any], device: Any = None) -> np.ndarray[Any, Any]:
        return array.copy()

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        return np.array(array)

    def synchronize(self, device: Any = None) -> None:
        """Everything is done when a call returns."""
