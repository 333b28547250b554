"""The tensors of one device: what comes in, and on which stream."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from blocktable import ArgumentError
from blocktable.device import refuse_capture

RELAXED, CUDA = 2, "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
"""cudaStreamCaptureModeRelaxed, which is HIP's too; CUDA's library."""


class Memory:
    """One device for one table, with the streams of CUDA or ROCm for the core's `StreamOrder`.

    Attributes:
        device: as torch names it, with its index.
        is_cuda: whether there are streams with handles.
        is_capturing_now: whether the stream of this call is being captured.
    """

    def __init__(self, device: Any) -> None:
        self.device, self.is_cuda, self.is_capturing_now = device, device.type == "cuda", False

    def send(self, array: np.ndarray[Any, Any]) -> Any:
        """Return a copy of a host array on the device, in stream order.

        From pinned memory, which torch uses again only when the copy is done: no call waits for an earlier one (R9.3).
        """
        staged = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), pin_memory=self.is_cuda)
        staged.numpy()[...] = array
        return staged.to(self.device, non_blocking=self.is_cuda)

    def tensor(self, array: Any) -> Any:
        """Return an input as a tensor of the device: without a copy, or of a host array one that was sent."""
        if isinstance(array, np.ndarray):
            refuse_capture(self.is_capturing_now, "A step over host arrays")
            return self.send(array)
        try:
            if not isinstance(array, torch.Tensor):
                has_interface = hasattr(array, "__cuda_array_interface__")
                array = torch.as_tensor(array, device=self.device) if has_interface else torch.from_dlpack(array)
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
            raise ArgumentError(f"torch cannot read a {type(array).__name__} without a copy: {error}") from error
        if array.device != self.device:
            raise ArgumentError(f"The table is on {self.device}; got an array on {array.device}.")
        return array

    def synchronize(self) -> None:
        """Wait for the device: what was made on torch's current stream may then be used on any."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    # Streams.

    def current(self) -> Any:
        return torch.cuda.device(self.device)

    def stream(self, handle: int | None) -> int:
        found = int(torch.cuda.current_stream(self.device).cuda_stream) if handle is None else handle
        return 0 if found == 1 else found  # both are the legacy default stream

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Work on a stream. Memory that torch takes meanwhile breaks no capture of anyone on another one."""
        mode = ctypes.c_int(RELAXED)
        capture_mode_exchange()(ctypes.byref(mode))
        try:
            with torch.cuda.stream(stream_object(self.device, stream)):
                yield
        finally:
            capture_mode_exchange()(ctypes.byref(mode))

    def is_capturing(self, stream: int) -> bool:
        with self.on(stream):  # the default one cannot be captured, and asking about it breaks captures of others
            return bool(stream and torch.cuda.is_current_stream_capturing())

    def order(self, before: int, after: int) -> None:
        stream_object(self.device, after).wait_stream(stream_object(self.device, before))

    def check(self, stream: int) -> None:
        stream_object(self.device, stream).query()  # raises what the device has run into


@cache
def capture_mode_exchange() -> Any:
    """Return the driver's call that exchanges how strict captures are with this thread."""
    prefix, library = ("hip", "libamdhip64.so") if torch.version.hip else ("cu", CUDA)
    return getattr(ctypes.CDLL(library), f"{prefix}ThreadExchangeStreamCaptureMode")


@lru_cache(64)
def stream_object(device: Any, stream: int) -> Any:
    """Return torch's object of a stream; ExternalStream takes 0 for "make a new one"."""
    return torch.cuda.ExternalStream(stream, device) if stream else torch.cuda.default_stream(device)
