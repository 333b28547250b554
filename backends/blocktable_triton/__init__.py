"""Triton kernels over torch's memory and streams; TRITON_INTERPRET=1 runs the same kernels on the host."""

from __future__ import annotations

import importlib.util
import os
from functools import cached_property
from typing import Any

from blocktable import ArgumentError, BlockTableError
from blocktable.device import DeviceBackend, KernelOptions, device_index

__all__ = ["TritonBackend"]

INTERPRET_VARIABLE = "TRITON_INTERPRET"


def is_interpreted() -> bool:
    """Whether the environment asks for Triton's interpreter, in Triton's own words."""
    return os.environ.get(INTERPRET_VARIABLE, "").lower() in ("1", "true", "yes", "on", "y")


class TritonBackend(DeviceBackend):
    """Triton kernels on a GPU, or in Triton's interpreter; which one is decided when the backend is made."""

    name = "triton"

    def __init__(self) -> None:
        super().__init__(is_emulated=is_interpreted())
        self.description = "triton (interpreter)" if self.is_emulated else "triton"

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

    def place(self, device: Any) -> Any:
        from blocktable_triton.kernels import IS_INTERPRETED

        if self.is_emulated != IS_INTERPRETED:
            raise BlockTableError(
                f"{INTERPRET_VARIABLE} has changed since the kernels were loaded; set it before the process starts."
            )
        if self.is_emulated:
            return None if str(device) == "cpu" else device
        import torch

        index = device_index(device, self.name)
        if index is None:
            return int(torch.cuda.current_device())
        if not 0 <= index < torch.cuda.device_count():
            raise ArgumentError(f"There is no GPU {index}: torch sees {torch.cuda.device_count()}.")
        return index

    def make_driver(self, place: Any) -> Any:
        from blocktable_triton import driver

        return driver.InterpretedDriver(place) if self.is_emulated else driver.TorchDriver(place)

    def graph_problem(self) -> str | None:
        return None if self.why_unavailable() else self._graph_problem

    @cached_property
    def _graph_problem(self) -> str | None:
        import torch

        if torch.version.cuda is None:
            return "the fused step needs CUDA"
        problem = super().graph_problem()
        if problem is None:  # any kernel shows what this Triton adds to its own; this one every table has
            problem = self.driver(None).kernel("null_stale_columns", KernelOptions()).graph_problem()
        return problem

    @property
    def num_compilations(self) -> int:
        """Kernels compiled so far in this process, for any table."""
        from blocktable_triton.driver import FUNCTIONS

        caches = [cache for function in FUNCTIONS.values() for cache in getattr(function, "device_caches", {}).values()]
        return sum(len(compiled) for compiled, *_ in caches)
