"""CUDA C++ kernels (kernels.cu) through CuPy; BLOCKTABLE_CUPY_EMULATE=1 runs the same source on the host."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from blocktable import PROTOCOL_VERSION, BlockTableConfig, staging_mode
from blocktable_cupy.block_store import CupyBlockStore
from blocktable_cupy.device import CupyDevice, HostDevice, compiled_modules
from blocktable_cupy.emulation import EMULATE_VARIABLE, compiler, is_emulated
from blocktable_cupy.slot_mapper import CupySlotMapper

__all__ = ["CupyBackend", "CupyBlockStore", "CupySlotMapper"]


def _has_cuda_bindings() -> bool:
    """Whether the driver's bindings are here; CuPy alone brings another package of the namespace `cuda`."""
    return importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None


class CupyBackend:
    """RawModule kernels on a GPU, or their host emulation; which one is decided when the backend is made."""

    name = "cupy"
    protocol_version = PROTOCOL_VERSION

    def __init__(self) -> None:
        self.is_emulated = is_emulated()
        declared = {"int32_slots", "exports"}
        if not self.is_emulated:
            declared |= {"streams", "graph_capture"}
        if self.is_emulated or _has_cuda_bindings():
            declared.add("fused_step")
        self.capabilities = frozenset(declared)
        self.description = "cupy (host emulation)" if self.is_emulated else "cupy"

    def why_unavailable(self) -> str | None:
        if self.is_emulated:
            if compiler() is None:
                return "the host emulation needs a C++ compiler; install g++ or set CXX."
            return None
        if importlib.util.find_spec("cupy") is None:
            return (
                "the package cupy is not installed; install blocktable[cupy] (CUDA 13) or blocktable[cupy-cuda12], or "
                f"set {EMULATE_VARIABLE}=1 to run its kernels on the host."
            )
        import cupy

        try:
            if cupy.cuda.runtime.getDeviceCount() > 0:
                return None
            reason = "no GPU was found"
        except cupy.cuda.runtime.CUDARuntimeError as error:
            reason = f"no usable GPU or driver ({error})"
        return f"{reason}; run it where one is, or set {EMULATE_VARIABLE}=1 to run its kernels on the host."

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Sentences on what runs instead of the first choice."""
        if self.is_emulated:
            return ()
        sentences = []
        staging = self._device(None).staging
        if not staging.startswith("mapped"):
            sentences.append(f"changes travel in {staging}: mapped memory is not used here")
        if "fused_step" not in self.capabilities:
            sentences.append("steps are separate launches: the fused step needs the package cuda-bindings")
        return tuple(sentences)

    @property
    def num_compilations(self) -> int:
        """Modules compiled so far in this process: one for each device and slot dtype."""
        return compiled_modules()

    def create_block_store(self, config: BlockTableConfig, device: Any = None) -> CupyBlockStore:
        return CupyBlockStore(config, self._device(device), emulated=self.is_emulated)

    def create_slot_mapper(self, store: CupyBlockStore) -> CupySlotMapper:
        return CupySlotMapper(store)

    def from_host(self, array: np.ndarray[Any, Any], device: Any = None) -> Any:
        return self._device(device).upload(array)

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = self._device(getattr(array, "device", None)).download(array)
        return found

    def synchronize(self, device: Any = None) -> None:
        self._device(device).synchronize()

    def _device(self, device: Any) -> Any:
        if self.is_emulated:
            return HostDevice(None if device == "cpu" else device)  # numpy arrays say "cpu"
        return CupyDevice(device, staging_mode())
