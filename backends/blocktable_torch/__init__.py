"""The backend that runs everywhere: plain torch operations, on any device that torch has."""

from __future__ import annotations

import importlib.util
import os
from functools import cached_property
from typing import Any

import numpy as np

from blocktable import ArgumentError, BlockTableConfig
from blocktable.backend import PROTOCOL_VERSION

DEVICE_VARIABLE = "BLOCKTABLE_TORCH_DEVICE"


class TorchBackend:
    """No kernel of its own: whole-array operations, which never wait for what an array holds.

    Attributes:
        costs_follow_width: no launch here depends on filled columns, which the device alone knows (R10.7, R25.14).
        num_compilations: none.
    """

    name = "torch"
    protocol_version = PROTOCOL_VERSION
    costs_follow_width = True
    num_compilations = 0

    @property
    def description(self) -> str:
        """The default device too."""
        return f"torch ({self.default_device})"

    def why_unavailable(self) -> str | None:
        if importlib.util.find_spec("torch") is None:
            return "the package torch is not installed; install blocktable[torch]."
        try:
            self.default_device  # noqa: B018 - whether there is one is the question
        except ArgumentError as error:
            return f"{DEVICE_VARIABLE}: {error}"
        return None

    @cached_property
    def capabilities(self) -> frozenset[str]:
        """What it can do beyond the protocol; streams have handles, and captures exist, where torch speaks CUDA."""
        is_cuda = self.why_unavailable() is None and self.default_device.type == "cuda"
        found = {"int32_slots", "exports", "export_parts"}
        return frozenset(found | {"streams", "graph_capture"} if is_cuda else found)

    @cached_property
    def default_device(self) -> Any:
        """What BLOCKTABLE_TORCH_DEVICE names, else an accelerator that torch finds, else the CPU."""
        import torch

        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        return self.device(os.environ.get(DEVICE_VARIABLE) or found)

    def device(self, device: Any) -> Any:
        """Return what torch takes for a device, with its index; for None the default one.

        Raises:
            ArgumentError: torch has no such device.
        """
        import torch

        if device is None:
            return self.default_device
        try:
            return torch.empty(0, device=device).device
        except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ArgumentError(f"torch has no device {str(device)!r} here: {reason}.") from error

    def create_block_store(self, config: BlockTableConfig, device: Any = None) -> Any:
        from blocktable_torch.store import TorchStore

        return TorchStore(config, self.device(device))

    def create_slot_mapper(self, store: Any) -> Any:
        return store

    def from_host(self, array: np.ndarray[Any, Any], device: Any = None) -> Any:
        import torch

        return torch.tensor(array, device=self.device(device))

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        self.synchronize(array.device)
        return np.asarray(array.to("cpu", copy=True))

    def synchronize(self, device: Any = None) -> None:
        from blocktable_torch.memory import Memory

        Memory(self.device(device)).synchronize()
