"""Memory, streams and completion marks: on a GPU through CuPy, and on the host for the emulation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np

from blocktable import ArgumentError, BlockTableError, DtypeError, address_of
from blocktable_cupy.emulation import EmulatedKernel, build_library, export_source, kernel_source
from blocktable_cupy.fused_step import GraphRunner, HostRunner


class StagingSlot:
    """Host memory that one commit's or one step's inputs travel in.

    Attributes:
        host: [entries] int32. The host's view.
        address: where kernels read it.
    """

    def __init__(self, host: np.ndarray[Any, Any], address: int, mirror: Any = None) -> None:
        self.host = host
        self.address = address
        self.mirror = mirror  # the device's copy; None: kernels read the host's memory


class HostDevice:
    """The emulation: arrays are numpy arrays, and everything is done when a call returns."""

    staging = "host memory"
    takes_host_arrays = True
    step_runner = HostRunner

    def __init__(self, device: Any = None) -> None:
        if device is not None:
            raise ArgumentError(f"The host emulation has no device to choose, got device={device!r}; leave it None.")

    def is_current(self) -> bool:
        return True

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def full(self, size: int, value: int, dtype: str) -> Any:
        return np.full(size, value, dtype)

    def fill(self, array: Any, value: int, stream: Any) -> None:
        array[:] = value

    def upload(self, array: np.ndarray[Any, Any]) -> Any:
        return array.copy()

    def download(self, array: Any) -> np.ndarray[Any, Any]:
        return np.array(array)

    def synchronize(self) -> None:
        """Everything is done."""

    def kernel(self, name: str, options: tuple[str, ...] = ()) -> Any:
        return EmulatedKernel(build_library(options, kernel_source()), name)

    def export_kernel(self, name: str) -> Any:
        return EmulatedKernel(build_library((), export_source()), name)

    def address(self, array: Any) -> int:
        return int(array.ctypes.data) if isinstance(array, np.ndarray) else address_of(array)

    def staging_slot(self, entries: int) -> StagingSlot:
        host = np.empty(entries, np.int32)
        return StagingSlot(host, host.ctypes.data)

    def stream(self, handle: int | None) -> Any:
        return None

    def is_capturing(self, stream: Any) -> bool:
        return False

    def send(self, slot: StagingSlot, entries: int, stream: Any) -> None:
        """Kernels read the host's memory."""

    def copy_in(self, values: np.ndarray[Any, Any], target: Any, stream: Any) -> None:
        target[:] = values

    def mark(self, stream: Any) -> Any:
        return None

    def wait(self, mark: Any) -> None:
        """Everything is done."""

    def order(self, before: Any, after: Any) -> None:
        """There is one stream."""


class CupyDevice:
    """One GPU through CuPy.

    Args:
        device: an index, "cuda:1", or an object with an `index` or an `id`. None: CuPy's current device.
        staging: "mapped" or "copy"; "auto" probes.
    """

    takes_host_arrays = False
    step_runner = GraphRunner

    def __init__(self, device: Any = None, staging: str = "auto") -> None:
        import cupy

        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self.index = _device_index(device, self._runtime.getDevice())
        self._device = cupy.cuda.Device(self.index)
        self._streams: dict[int, Any] = {}
        # Changes that fit travel in the launch's parameters; this is for the others, and for commit().
        self._is_mapped = staging == "mapped" or (staging != "copy" and mapped_memory_works(self.index))
        self.staging = "mapped pinned memory" if self._is_mapped else "pinned memory and copies"

    def current(self) -> AbstractContextManager[Any]:
        """Make this GPU the current one; a no-op where it is, which is what an engine does."""
        return nullcontext() if self.is_current() else self._device

    def is_current(self) -> bool:
        return bool(self._runtime.getDevice() == self.index)

    def full(self, size: int, value: int, dtype: str) -> Any:
        with self.current():
            return self._cupy.full(size, value, dtype)

    def fill(self, array: Any, value: int, stream: Any) -> None:
        with stream:
            array.fill(value)

    def upload(self, array: np.ndarray[Any, Any]) -> Any:
        with self.current():
            made = self._cupy.array(array)
            self._cupy.cuda.get_current_stream().synchronize()  # another stream may use it at once
            return made

    def download(self, array: Any) -> np.ndarray[Any, Any]:
        self.synchronize()  # the work may be on any stream
        with self.current():
            host: np.ndarray[Any, Any] = self._cupy.asnumpy(self._cupy.asarray(array))
        return host

    def synchronize(self) -> None:
        self._device.synchronize()

    def kernel(self, name: str, options: tuple[str, ...] = ()) -> Any:
        return self._load(name, options, kernel_source())

    def export_kernel(self, name: str) -> Any:
        return self._load(name, (), export_source())

    def _load(self, name: str, options: tuple[str, ...], source: str) -> Any:
        with self.current():
            kernel = _module(self.index, options, source).get_function(name)
            kernel.num_regs  # noqa: B018 - loads it now: CUDA would do so at the first launch, and wait for the device
            return kernel

    def address(self, array: Any) -> int:
        try:
            return address_of(array)
        except DtypeError:
            if not hasattr(array, "__dlpack__"):
                raise
            return int(self._cupy.from_dlpack(array).data.ptr)  # without a copy; JAX arrays say no address otherwise

    def staging_slot(self, entries: int) -> StagingSlot:
        with self.current():
            memory = self._cupy.cuda.alloc_pinned_memory(4 * entries)
            host = np.frombuffer(memory, np.int32, entries)
            if self._is_mapped:
                return StagingSlot(host, host.ctypes.data)  # unified addressing: one address on both sides
            mirror = self._cupy.empty(entries, np.int32)
            return StagingSlot(host, mirror.data.ptr, mirror)

    def stream(self, handle: int | None) -> Any:
        """Return CuPy's object for a handle; None: CuPy's current stream."""
        if handle is None:
            handle = self._cupy.cuda.get_current_stream().ptr
        found = self._streams.get(handle)
        if found is None:
            found = self._streams[handle] = _external_stream(self._cupy.cuda, handle)
        return found

    def is_capturing(self, stream: Any) -> bool:
        # The legacy default stream cannot be captured, and asking about it breaks a capture elsewhere.
        return stream.ptr > 1 and bool(self._runtime.streamIsCapturing(stream.ptr))

    def send(self, slot: StagingSlot, entries: int, stream: Any) -> None:
        if slot.mirror is not None:
            slot.mirror.data.copy_from_host_async(slot.host.ctypes.data, 4 * entries, stream)

    def copy_in(self, values: np.ndarray[Any, Any], target: Any, stream: Any) -> None:
        """Copy host memory into part of a device array, and wait for it."""
        target.data.copy_from_host_async(values.ctypes.data, values.nbytes, stream)
        stream.synchronize()

    def mark(self, stream: Any) -> Any:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def order(self, before: Any, after: Any) -> None:
        """Make what comes on stream `after` wait for what is on stream `before`, without a host wait."""
        after.wait_event(self.mark(before))


class _Handle:
    """A stream's handle, as the CUDA stream protocol says it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _external_stream(cuda: Any, handle: int) -> Any:
    if hasattr(cuda.Stream, "from_external"):  # CuPy 14
        return cuda.Stream.from_external(_Handle(handle))
    return cuda.ExternalStream(handle)


@cache
def _module(device: int, options: tuple[str, ...], source: str) -> Any:
    import cupy

    return cupy.RawModule(code=source, options=("-std=c++17", *(f"-D{option}" for option in options)))


def compiled_modules() -> int:
    """Return how many modules have been compiled and loaded."""
    return _module.cache_info().currsize


def _device_index(device: Any, default: int) -> int:
    if device is None:
        return default
    if isinstance(device, str):
        kind, _, index = device.partition(":")
        if kind != "cuda" or not (index == "" or index.isdecimal()):
            raise ArgumentError(f'The cupy backend runs on "cuda" or "cuda:<index>", got {device!r}.')
        return int(index) if index else default
    if getattr(device, "type", "cuda") != "cuda":
        raise ArgumentError(f"The cupy backend runs on CUDA devices, got {device!r}.")
    index = getattr(device, "index", getattr(device, "id", device))
    if index is None:
        return default
    if isinstance(index, bool) or not isinstance(index, int):
        raise ArgumentError(f'device must be an index, "cuda:<index>" or a device object, got {device!r}.')
    return index


@cache
def mapped_memory_works(device: int) -> bool:
    """Whether a kernel sees what the host writes to mapped memory after an earlier kernel has read it."""
    gpu = CupyDevice(device, "mapped")
    slot, target = gpu.staging_slot(8), gpu.full(1, 0, "int32")
    # Only the value is in the memory under suspicion: an offset from there might be anything.
    offset, starts = gpu.upload(np.zeros(1, np.int64)), gpu.upload(np.array([0, 1], np.int32))
    scatter = gpu.kernel("scatter_writes")
    arguments = (offset, starts, np.uint64(slot.address), np.int32(1), np.int32(1), target)
    for value in (1, 2):
        slot.host[0] = value
        with gpu.current():
            scatter((1, 1), (32,), arguments, stream=gpu.stream(None))
        if gpu.download(target)[0] != value:
            return False
    return True


def refuse_capture(capturing: bool, what: str) -> None:
    """Raise where the stream is capturing (R21)."""
    if capturing:
        raise BlockTableError(
            f"{what} cannot be captured: row changes and host arrays are read once, not at every replay. Call commit() "
            "before the capture and before each replay, and give device arrays."
        )
