"""The harness of the stream, graph and race layers: torch for streams and graphs, and a kernel that holds a stream.

A backend that declares "streams" or "graph_capture" says that it runs on a CUDA device, so these layers run on one.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from blocktable_conformance.subject import Subject

HOLD_LIMIT_SECONDS = 10
"""A held stream lets go by itself after this long, so that a call that waits for it fails instead of hanging."""

HOLD_SOURCE = r"""
extern "C" __global__ void hold(volatile int* flags, unsigned long long limit) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  while (flags[0] == 0) {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (now - start > limit) { flags[1] = 1; return; }
  }
}
"""


def need(subject: Subject, capability: str) -> ModuleType:
    """Return torch for a backend that declares `capability`; skip where it does not, fail where torch is missing."""
    if not subject.declares(capability):
        pytest.skip(f"{subject.label} does not declare {capability!r}")
    if getattr(subject.backend, "is_emulated", False):
        pytest.skip(f"{subject.label} is emulated: this wants a GPU")
    try:
        import torch
    except ImportError:
        pytest.fail(f"{subject.label} declares {capability!r}; the suite needs torch to check it: pip install torch")
    if not torch.cuda.is_available():
        pytest.fail(f"{subject.label} declares {capability!r}, but torch finds no GPU to check it on")
    module: ModuleType = torch
    return module


def tensor(torch: Any, values: Sequence[int], dtype: str) -> Any:
    """Return a device tensor."""
    return torch.tensor(list(values), dtype=getattr(torch, dtype), device="cuda")


def inputs(torch: Any, idx_mapping: Sequence[int], query_start_loc: Sequence[int], positions: Sequence[int]) -> Any:
    """Return the three inputs of a step as device tensors."""
    return (
        tensor(torch, idx_mapping, "int32"),
        tensor(torch, query_start_loc, "int32"),
        tensor(torch, positions, "int64"),
    )


def as_tensor(torch: Any, array: Any) -> Any:
    """Return a backend's array as a tensor over the same memory."""
    return torch.as_tensor(array, device="cuda")


class Hold:
    """A kernel on a stream that spins until it is released."""

    def __init__(self, torch: Any, stream: Any) -> None:
        self._torch = torch
        self._stream = stream
        self._flags = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        _launch_hold(torch, stream.cuda_stream, self._flags.data_ptr())

    @property
    def is_busy(self) -> bool:
        """Whether the stream still has work queued."""
        return not self._stream.query()

    def release(self) -> None:
        """Let the stream go on."""
        self._flags[0] = 1

    def release_after(self, seconds: float) -> threading.Timer:
        """Let it go on later, from another thread."""
        timer = threading.Timer(seconds, self.release)
        timer.start()
        return timer

    @property
    def timed_out(self) -> bool:
        """Whether it let go by itself: something waited for the stream."""
        return bool(self._flags[1])


@contextmanager
def held(torch: Any, stream: Any) -> Iterator[Hold]:
    """Hold a stream inside the block; wait for it on the way out.

    Nothing of an earlier test is freed inside: that may wait for the device.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    torch.cuda.synchronize()
    hold = Hold(torch, stream)
    try:
        assert hold.is_busy
        yield hold
    finally:
        hold.release()
        torch.cuda.synchronize()
        if was_enabled:
            gc.enable()
    assert not hold.timed_out, f"the stream was held for {HOLD_LIMIT_SECONDS} s: a call waited for the device"


def _launch_hold(torch: Any, stream: int, flags: int) -> None:
    driver, function = _hold_function(torch.cuda.current_device())
    arguments = ((flags, HOLD_LIMIT_SECONDS * 10**9), (ctypes.c_void_p, ctypes.c_uint64))
    (error,) = driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0)
    assert int(error) == 0, error


@cache
def _hold_function(device: int) -> tuple[Any, Any]:
    """Compile the kernel through NVRTC, which every CUDA build of torch brings along."""
    import torch
    from cuda.bindings import driver, nvrtc

    major, minor = torch.cuda.get_device_capability(device)
    torch.cuda.synchronize()  # the primary context exists and is current from here on
    _, program = _checked(nvrtc.nvrtcCreateProgram(HOLD_SOURCE.encode(), b"hold.cu", 0, [], []))
    _checked(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]))
    size = _checked(nvrtc.nvrtcGetCUBINSize(program))[1]
    binary = bytearray(size)
    _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    module = _checked(driver.cuModuleLoadData(bytes(binary)))[1]
    return driver, _checked(driver.cuModuleGetFunction(module, b"hold"))[1]


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    assert int(result[0]) == 0, result[0]
    return result
