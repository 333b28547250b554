"""Triton kernels over torch's memory and streams; TRITON_INTERPRET=1 runs the same kernels on the host."""

from __future__ import annotations

import importlib.util
import os
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from blocktable import PROTOCOL_VERSION, BlockTableConfig, BlockTableError, staging_mode

if TYPE_CHECKING:
    from blocktable_triton.block_store import TritonBlockStore
    from blocktable_triton.device import HostDevice
    from blocktable_triton.slot_mapper import TritonSlotMapper

__all__ = ["TritonBackend"]

INTERPRET_VARIABLE = "TRITON_INTERPRET"


def is_emulated() -> bool:
    """Whether the environment asks for Triton's interpreter, in Triton's own words."""
    return os.environ.get(INTERPRET_VARIABLE, "").lower() in ("1", "true", "yes", "on", "y")


class TritonBackend:
    """Triton kernels on a GPU, or in Triton's interpreter; which one is decided when the backend is made."""

    name = "triton"
    protocol_version = PROTOCOL_VERSION

    def __init__(self) -> None:
        self.is_emulated = is_emulated()
        self.description = "triton (interpreter)" if self.is_emulated else "triton"
        self._devices: dict[tuple[int, str], HostDevice] = {}

    @cached_property
    def capabilities(self) -> frozenset[str]:
        declared = {"int32_slots", "exports"}
        if not self.is_emulated:
            declared |= {"streams", "graph_capture"}
        if self.is_emulated or _has_cuda_graphs():
            declared.add("fused_step")
        return frozenset(declared)

    def why_unavailable(self) -> str | None:
        for package in ("triton", "torch"):
            if importlib.util.find_spec(package) is None:
                return f"the package {package} is not installed; install blocktable[triton]."
        if self.is_emulated:
            return None
        import torch

        if torch.cuda.is_available():
            return None
        if torch.version.cuda is None and torch.version.hip is None:
            reason = f"torch {torch.__version__} is a build without GPUs; install one for CUDA or ROCm"
        else:
            reason = "torch finds no GPU or no driver; run it where one is"
        return f"{reason}, or set {INTERPRET_VARIABLE}=1 to run its kernels on the host."

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Sentences on what runs instead of the first choice."""
        device = self._device(None)
        sentences = []
        if not device.is_mapped:
            sentences.append(f"changes travel in {device.staging}: mapped memory is not used here")
        if "fused_step" not in self.capabilities:
            sentences.append("steps are separate launches: the fused step needs CUDA and the package cuda-bindings")
        elif device.graph_problem:
            sentences.append(f"steps are separate launches: {device.graph_problem}")
        return tuple(sentences)

    @property
    def num_compilations(self) -> int:
        """Kernels compiled so far in this process, for any table."""
        from blocktable_triton import exports, kernels

        functions = (
            kernels.scatter_writes,
            kernels.null_stale_columns,
            kernels.gather_block_tables,
            kernels.map_slots,
            kernels.apply_changes,
            kernels.step_batch,
            *exports.EXPORT_KERNELS,
        )
        caches = [cache for function in functions for cache in getattr(function, "device_caches", {}).values()]
        return sum(len(compiled) for compiled, *_ in caches)

    def create_block_store(self, config: BlockTableConfig, device: Any = None) -> TritonBlockStore:
        from blocktable_triton.block_store import TritonBlockStore

        has_fused_step = "fused_step" in self.capabilities
        return TritonBlockStore(config, self._device(device), emulated=self.is_emulated, has_fused_step=has_fused_step)

    def create_slot_mapper(self, store: TritonBlockStore) -> TritonSlotMapper:
        from blocktable_triton.slot_mapper import TritonSlotMapper

        return TritonSlotMapper(store)

    def from_host(self, array: np.ndarray[Any, Any], device: Any = None) -> Any:
        return self._device(device).upload(array)

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        return self._device(getattr(array, "device", None)).download(array)

    def synchronize(self, device: Any = None) -> None:
        self._device(device).synchronize()

    def _device(self, device: Any) -> HostDevice:
        """Return the device, kept for each index and way of staging: a new one probes."""
        from blocktable_triton.device import HostDevice, TorchDevice
        from blocktable_triton.kernels import IS_INTERPRETED

        if self.is_emulated != IS_INTERPRETED:
            raise BlockTableError(
                f"{INTERPRET_VARIABLE} has changed since the kernels were loaded; set it before the process starts."
            )
        kind = HostDevice if self.is_emulated else TorchDevice
        place = kind.place(device)
        key = (place, staging_mode())
        if key not in self._devices:
            self._devices[key] = kind(place, staging_mode())
        return self._devices[key]


def _has_cuda_graphs() -> bool:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("cuda") is None:
        return False
    if importlib.util.find_spec("cuda.bindings") is None:
        return False
    import torch

    return torch.version.cuda is not None
