"""A backend for NVIDIA GPUs: torch's memory and streams, four plain Triton kernels, and the core's device layer."""

import importlib.util
import os
from typing import Any

from blocktable import ArgumentError
from blocktable.device import DeviceBackend, Driver, device_index


class TorchExampleBackend(DeviceBackend):
    name = "torch-example"
    # What this was written for. Not blocktable.backend.PROTOCOL_VERSION, which would match whatever is installed.
    protocol_version = 2
    has_exports = False
    has_checks = False

    def __init__(self) -> None:
        super().__init__(is_emulated=os.environ.get("TRITON_INTERPRET") == "1")
        self.description = f"{self.name} (interpreter)" if self.is_emulated else self.name

    def why_unavailable(self) -> str | None:
        for package in ("torch", "triton"):
            if importlib.util.find_spec(package) is None:
                return f"the package {package} is not installed; pip install {package}."
        if self.is_emulated:
            return None
        import torch

        if torch.version.cuda is not None and torch.cuda.is_available():
            return None
        return "torch finds no NVIDIA GPU; run it where one is, or set TRITON_INTERPRET=1 to run it on the host."

    def place(self, device: Any) -> Any:
        if self.is_emulated:
            return "cpu" if device is None else str(device)
        import torch

        index = device_index(device, self.name)
        if index is None:
            return torch.cuda.current_device()
        if not 0 <= index < torch.cuda.device_count():
            raise ArgumentError(f"There is no GPU {index}: torch sees {torch.cuda.device_count()}.")
        return index

    def make_driver(self, place: Any) -> Driver:
        from blocktable_torch_example.driver import InterpreterDriver, TorchDriver

        return InterpreterDriver(place) if self.is_emulated else TorchDriver(place)

    @property
    def num_compilations(self) -> int:
        """Kernels compiled so far in this process; the suite asks whether a warm table compiles any more."""
        from blocktable_torch_example.driver import compiled

        return compiled.cache_info().currsize
