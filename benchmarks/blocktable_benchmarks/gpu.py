"""The GPU's clock, through torch: events, captures, and a stream held busy while steps queue up."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

CYCLES_PER_MICROSECOND = 2000
"""At least what an SM runs at, so that a hold is never shorter than asked for."""


class Gpu:
    """The current GPU."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._cuda = torch.cuda

    def array(self, host: np.ndarray[Any, Any]) -> Any:
        """Return a torch tensor on the GPU."""
        return self._torch.from_numpy(host).to("cuda")

    def empty(self, entries: int) -> Any:
        """Return [entries] int64 on the GPU."""
        return self._torch.empty(entries, dtype=self._torch.int64, device="cuda")

    def synchronize(self) -> None:
        """Wait for everything."""
        self._cuda.synchronize()

    def hold(self, microseconds: float) -> None:
        """Keep the current stream busy for at least that long."""
        self._cuda._sleep(int(microseconds * CYCLES_PER_MICROSECOND))

    def current_stream(self) -> int:
        """Return the handle of torch's current stream: inside `capture`, the one that captures."""
        return int(self._cuda.current_stream().cuda_stream)

    def event(self) -> Any:
        """Return an event that is recorded on the current stream."""
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def capture(self, call: Callable[[], object], times: int) -> Any:
        """Return a graph of `times` calls."""
        call()
        self.synchronize()
        graph = self._cuda.CUDAGraph()
        with self._cuda.graph(graph):
            for _ in range(times):
                call()
        return graph

    def inference_mode(self) -> AbstractContextManager[Any]:
        """Return torch's inference mode."""
        mode: AbstractContextManager[Any] = self._torch.inference_mode()
        return mode

    @contextmanager
    def default_device(self) -> Iterator[None]:
        """Make the GPU torch's default device, as many engines do."""
        self._torch.set_default_device("cuda")
        try:
            yield
        finally:
            self._torch.set_default_device(None)

    def free_bytes(self) -> int:
        """Return the device's free memory."""
        self.synchronize()
        return int(self._cuda.mem_get_info()[0])

    def num_allocations(self) -> int:
        """Return how many blocks torch's allocator has handed out so far."""
        return int(self._cuda.memory_stats().get("allocation.all.allocated", 0))

    def release(self) -> None:
        """Give cached memory back, torch's and CuPy's."""
        self._cuda.empty_cache()
        cupy = sys.modules.get("cupy")
        if cupy is not None:
            cupy.get_default_memory_pool().free_all_blocks()
            cupy.get_default_pinned_memory_pool().free_all_blocks()

    def launched(self, call: Callable[[], object]) -> dict[str, int]:
        """Return what runs on the GPU during a call: name -> how often. It slows down what this process does later."""
        profiler = self._torch.profiler
        with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
            call()
            self.synchronize()
        found: dict[str, int] = {}
        for event in profile.events():
            if event.device_type == self._torch.autograd.DeviceType.CUDA:
                found[event.name] = found.get(event.name, 0) + 1
        return found


def find_gpu() -> Gpu | None:
    """Return the GPU; None where torch is missing or sees none."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return Gpu(torch) if torch.cuda.is_available() else None
