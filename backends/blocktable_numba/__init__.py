"""Numba CUDA kernels; NUMBA_ENABLE_CUDASIM=1 runs them in Numba's simulator."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from blocktable import ArgumentError
from blocktable.device import DeviceBackend, device_index

__all__ = ["NumbaBackend"]

SIMULATOR_VARIABLE = "NUMBA_ENABLE_CUDASIM"


class NumbaBackend(DeviceBackend):
    """Numba's kernels on a GPU, or in its simulator; which one is decided when the backend is made.

    Nothing of Numba is imported before the backend is asked whether it can run.
    """

    name = "numba"

    def __init__(self) -> None:
        super().__init__(is_emulated=os.environ.get(SIMULATOR_VARIABLE, "") not in ("", "0"))
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

    def place(self, device: Any) -> Any:
        if self.is_emulated:
            return None if str(device) == "cpu" else device
        from numba import cuda

        index = device_index(device, self.name)
        if index is None:
            current = cuda.gpus.current  # of this thread; None: it has used none yet
            return 0 if current is None else int(current.id)
        if not 0 <= index < len(cuda.gpus):
            raise ArgumentError(f"GPU {index} does not exist: there are {len(cuda.gpus)}, counted from 0.")
        return index

    def make_driver(self, place: Any) -> Any:
        from blocktable_numba.driver import NumbaDriver, SimulatedDriver

        return SimulatedDriver(place) if self.is_emulated else NumbaDriver(place)

    @property
    def num_compilations(self) -> int:
        """Kernels compiled so far in this process: one for each signature. The simulator compiles none."""
        if self.is_emulated:
            return 0
        from blocktable_numba.driver import SPECIALISED

        return sum(len(kernel.signatures) for kernel in SPECIALISED)
