"""CUDA C++ kernels (kernels.cu) through CuPy; BLOCKTABLE_CUPY_EMULATE=1 runs the same source on the host."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from blocktable.device import DeviceBackend, device_index
from blocktable_cupy.driver import CupyDriver, EmulatedCupyDriver, compiler, num_compilations

__all__ = ["CupyBackend"]

EMULATE_VARIABLE = "BLOCKTABLE_CUPY_EMULATE"


class CupyBackend(DeviceBackend):
    """RawModule kernels on a GPU, or their host emulation; which one is decided when the backend is made."""

    name = "cupy"

    def __init__(self) -> None:
        super().__init__(is_emulated=os.environ.get(EMULATE_VARIABLE, "") not in ("", "0"))
        self.description: str = "cupy (host emulation)" if self.is_emulated else "cupy"

    def why_unavailable(self) -> str | None:
        """Return None where the backend can run, else one sentence: why not, and how to get it."""
        if self.is_emulated:
            return None if compiler() else "the host emulation needs a C++ compiler; install g++ or set CXX."
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

    def place(self, device: Any) -> Any:
        """Return the index of a GPU, CuPy's current one for None; the emulation has one place."""
        if self.is_emulated:
            return None if str(device) == "cpu" else device  # numpy arrays say "cpu"
        index = device_index(device, self.name)
        if index is not None:
            return index
        import cupy

        return int(cupy.cuda.runtime.getDevice())

    def make_driver(self, place: Any) -> Any:
        """Return a new driver."""
        return EmulatedCupyDriver(place) if self.is_emulated else CupyDriver(place)

    @property
    def num_compilations(self) -> int:
        """Modules compiled so far in this process: one for each source, device and set of options."""
        return num_compilations()
