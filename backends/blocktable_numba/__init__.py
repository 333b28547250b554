"""Numba CUDA kernels; NUMBA_ENABLE_CUDASIM=1 runs them in Numba's simulator."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np

from blocktable import PROTOCOL_VERSION, BlockTableConfig, staging_mode

__all__ = ["NumbaBackend"]

SIMULATOR_VARIABLE = "NUMBA_ENABLE_CUDASIM"


class NumbaBackend:
    """Numba's kernels on a GPU, or in its simulator; which one is decided when the backend is made.

    Nothing of Numba is imported before the backend is asked whether it can run.
    """

    name = "numba"
    protocol_version = PROTOCOL_VERSION

    def __init__(self) -> None:
        self.is_emulated = os.environ.get(SIMULATOR_VARIABLE, "") not in ("", "0")
        declared = {"int32_slots", "exports"}
        if not self.is_emulated:
            declared |= {"streams", "graph_capture"}
        if self.is_emulated or importlib.util.find_spec("cuda") is not None:  # cuda-bindings
            declared.add("fused_step")
        self.capabilities = frozenset(declared)
        self.description = "numba (simulator)" if self.is_emulated else "numba"

    def why_unavailable(self) -> str | None:
        if importlib.util.find_spec("numba") is None or importlib.util.find_spec("numba_cuda") is None:
            return "the package numba-cuda is not installed; install blocktable[numba]."
        try:
            from numba import cuda
            from numba.cuda.core import config
        except Exception as error:  # numba-cuda 0.30 beside numpy 2.5 fails in more than one way
            return f"numba-cuda cannot be imported ({type(error).__name__}: {error}); install blocktable[numba]."
        if bool(config.ENABLE_CUDASIM) != self.is_emulated:
            return f"{SIMULATOR_VARIABLE} was changed after Numba was imported; set it before the process starts."
        if self.is_emulated:
            return None
        remedy = f"run it where one is, or set {SIMULATOR_VARIABLE}=1 for Numba's simulator."
        problem = cuda.cuda_error()
        if not problem:
            try:
                if len(cuda.gpus) == 0:
                    problem = "it shows none"
            except Exception as error:  # the driver says only at the first call that it cannot start
                problem = str(error)
        if problem:
            return f"no usable GPU or driver ({' '.join(str(problem).split()).rstrip('.:')}); {remedy}"
        if not cuda.is_available():
            return "Numba finds no NVVM to compile with; install numba-cuda[cu13] (CUDA 12: numba-cuda[cu12])."
        return None

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Sentences on what runs instead of the first choice."""
        if self.is_emulated:
            return ()
        device = self._device(None)
        sentences = []
        if not device.is_mapped:
            sentences.append(f"changes travel in {device.staging}: mapped memory is not used here")
        if "fused_step" not in self.capabilities:
            sentences.append("steps are separate launches: the fused step needs the package cuda-bindings")
        return tuple(sentences)

    @property
    def num_compilations(self) -> int:
        """Kernels compiled so far in this process: one for each signature. The simulator compiles none."""
        if self.is_emulated:
            return 0
        from blocktable_numba.kernels import SPECIALISED

        return sum(len(kernel.signatures) for kernel in SPECIALISED)

    def create_block_store(self, config: BlockTableConfig, device: Any = None) -> Any:
        from blocktable_numba.block_store import NumbaBlockStore

        return NumbaBlockStore(config, self._device(device), has_fused_step="fused_step" in self.capabilities)

    def create_slot_mapper(self, store: Any) -> Any:
        from blocktable_numba.slot_mapper import NumbaSlotMapper

        return NumbaSlotMapper(store)

    def from_host(self, array: np.ndarray[Any, Any], device: Any = None) -> Any:
        return self._device(device).upload(array)

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = self._device(None).download(array)
        return found

    def synchronize(self, device: Any = None) -> None:
        self._device(device).synchronize()

    def _device(self, device: Any) -> Any:
        from blocktable_numba.device import NumbaDevice, SimulatedDevice

        return (SimulatedDevice if self.is_emulated else NumbaDevice)(device, staging_mode())
