"""Memory, streams, launches and completion marks: on a GPU through Numba, and in Numba's simulator."""

from __future__ import annotations

import ctypes
import threading
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core.utils import StridedMemoryView
from numba import cuda, types

from blocktable import NULL_BLOCK_ID, PAD_SLOT_ID, ArgumentError, BlockTableError, DtypeError, address_of
from blocktable_numba.fused_step import HEADER, GraphRunner, SimulatedRunner
from blocktable_numba.kernels import KERNELS, MAX_INT32, signature, specialised

SIMULATED_TILE = 4
SIMULATED_GRID = 2  # blocks along each axis: a simulated thread costs some 250 us
TILE = 128

LEGACY_STREAM = 1  # 0 is the same stream, unless CUDA's Python bindings are told otherwise

BYTES = {NULL_BLOCK_ID: 0x00, PAD_SLOT_ID: 0xFF}
"""What both look like, byte by byte."""

Features = tuple[tuple[str, bool], ...]
"""What kernels are compiled with: `kernels.needed_features`."""

_simulator_lock = threading.Lock()  # it runs one kernel at a time


class StagingSlot:
    """Host memory that one commit's or one step's inputs travel in.

    Attributes:
        host: [entries] int32. The host's view.
        header: its first entries: the counts of packed changes.
        address: where kernels read it.
        mirror: the device's copy at `address`. None: kernels read the host's memory.
    """

    def __init__(self, host: np.ndarray[Any, Any], address: Any, mirror: Any = None) -> None:
        self.host = host
        self.header = host[:HEADER]
        self.address = address
        self.mirror = mirror


class Device:
    """What both devices share: how changes travel.

    Args:
        staging: "mapped" or "copy"; "auto" probes.
    """

    tile: int
    takes_host_arrays: bool
    copies_inputs = False  # whether kernels read copies of foreign arrays, which must be made anew for each step
    step_runner: Any
    max_step_blocks: int  # for each part of a fused step's kernels: the changes, the gather, a group's slots

    def __init__(self, staging: str = "auto") -> None:
        if staging == "params":
            raise ArgumentError(
                "BLOCKTABLE_STAGING=params needs kernels that take changes by value, which Numba has not; choose auto, "
                "mapped or copy."
            )
        self._staging = staging

    @cached_property
    def is_mapped(self) -> bool:
        """Whether kernels read what the host wrote; else it is copied first."""
        return self._staging == "mapped" or (self._staging == "auto" and self.mapped_memory_works())

    @property
    def staging(self) -> str:
        return "mapped pinned memory" if self.is_mapped else "pinned memory and copies"

    def staging_slot(self, entries: int) -> StagingSlot:
        return self.mapped_slot(entries) if self.is_mapped else self.copied_slot(entries)

    def mapped_memory_works(self) -> bool:
        raise NotImplementedError

    def mapped_slot(self, entries: int) -> StagingSlot:
        raise NotImplementedError

    def copied_slot(self, entries: int) -> StagingSlot:
        raise NotImplementedError


class SimulatedPointer:
    """What an address is in the simulator: an array's bytes from there on, so that reading behind them is an error."""

    def __init__(self, entries: Any) -> None:
        self._bytes = entries.view(np.uint8)

    def __add__(self, offset: int) -> SimulatedPointer:
        return SimulatedPointer(self._bytes[offset:])

    def entries(self, dtype: str) -> Any:
        itemsize = np.dtype(dtype).itemsize
        return self._bytes[: len(self._bytes) // itemsize * itemsize].view(dtype)


class SimulatedKernel:
    """A kernel in the simulator, called as on a GPU."""

    def __init__(self, name: str, slot_dtype: str) -> None:
        self._kernel = KERNELS[name]
        self._types = signature(name, slot_dtype)
        self._is_fused = name in ("apply_changes", "step_batch")

    def __call__(self, grid: tuple[int, int], block: tuple[int], args: tuple[Any, ...], stream: Any = None) -> None:
        arrays = [
            arg.entries(str(kind.dtype)) if isinstance(arg, SimulatedPointer) else arg
            for kind, arg in zip(self._types, args, strict=True)
        ]
        # A fused step's blocks have different work, and are few.
        small_grid = grid if self._is_fused else tuple(min(size, SIMULATED_GRID) for size in grid)
        with _simulator_lock:
            self._kernel[small_grid, block](*arrays)


class SimulatedDevice(Device):
    """Numba's simulator: arrays are its own, on the host, and everything is done when a call returns."""

    tile = SIMULATED_TILE
    takes_host_arrays = copies_inputs = True
    step_runner = SimulatedRunner
    max_step_blocks = 1

    def __init__(self, device: Any = None, staging: str = "auto") -> None:
        if device is not None:
            raise ArgumentError(f"Numba's simulator has no device to choose, got device={device!r}; leave it None.")
        super().__init__(staging)

    def is_current(self) -> bool:
        return True

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def full(self, size: int, value: int, dtype: str) -> Any:
        return cuda.to_device(np.full(size, value, dtype))

    def fill(self, array: Any, value: int, stream: Any) -> None:
        array[:] = value

    def upload(self, array: np.ndarray[Any, Any]) -> Any:
        return cuda.to_device(array)

    def download(self, array: Any) -> np.ndarray[Any, Any]:
        return np.array(np.asarray(array))

    def synchronize(self) -> None:
        """Everything is done."""

    def kernel(self, name: str, slot_dtype: str, features: Features = ()) -> SimulatedKernel:
        return SimulatedKernel(name, slot_dtype)

    def address(self, array: Any) -> SimulatedPointer:
        if hasattr(array, "__cuda_ndarray__"):
            return SimulatedPointer(array)
        return SimulatedPointer(cuda.to_device(np.from_dlpack(array)))  # inputs, which kernels only read

    def mapped_memory_works(self) -> bool:
        return True

    def mapped_slot(self, entries: int) -> StagingSlot:
        memory = cuda.mapped_array(entries, np.int32)
        return StagingSlot(np.asarray(memory), SimulatedPointer(memory))

    def copied_slot(self, entries: int) -> StagingSlot:
        mirror = cuda.device_array(entries, np.int32)
        return StagingSlot(cuda.pinned_array(entries, np.int32), SimulatedPointer(mirror), mirror)

    def stream(self, handle: int | None) -> Any:
        return None

    def is_capturing(self, stream: Any) -> bool:
        return False

    def send(self, slot: StagingSlot, entries: int, stream: Any) -> None:
        if slot.mirror is not None:
            slot.mirror[:entries] = slot.host[:entries]

    def copy_in(self, values: np.ndarray[Any, Any], target: Any, stream: Any) -> None:
        target[:] = values

    def mark(self, stream: Any) -> Any:
        return None

    def wait(self, mark: Any) -> None:
        """Everything is done."""

    def check(self, stream: Any) -> None:
        """Nothing can have failed."""

    def order(self, before: Any, after: Any) -> None:
        """There is one stream."""


class GpuKernel:
    """A loaded kernel, and the memory that its arguments are handed over in: one launch at a time.

    Numba's own launch costs some 25 us, and warns of small grids.
    """

    def __init__(self, handle: int, types_of_arguments: tuple[Any, ...]) -> None:
        self.handle = handle
        self.layout = "".join(
            "Q" if isinstance(kind, types.CPointer) else {"int32": "i", "int64": "q"}[str(kind)]
            for kind in types_of_arguments
        )
        self._function = driver.CUfunction(handle)
        self._cells = [_cell(kind) for kind in types_of_arguments]
        addresses = [ctypes.addressof(cell) for cell in self._cells]
        self._addresses = (ctypes.c_void_p * len(addresses))(*addresses)
        self._arguments = ctypes.addressof(self._addresses)

    def __call__(self, grid: tuple[int, int], block: tuple[int], args: tuple[Any, ...], stream: Any = None) -> None:
        for cell, arg in zip(self._cells, args, strict=True):
            cell.value = 0 if arg is None else arg
        _call(
            driver.cuLaunchKernel,
            *(self._function, grid[0], grid[1], 1, block[0], 1, 1),
            *(0, stream.handle, self._arguments, 0),  # no shared memory; no further options
        )


class NumbaDevice(Device):
    """One GPU through Numba, in its primary context, which torch and CuPy use too.

    Args:
        device: an index, "cuda:1", or an object with an `index` or an `id`. None: the current device.
        staging: "mapped" or "copy"; "auto" probes.
    """

    tile = TILE
    takes_host_arrays = False
    step_runner = GraphRunner
    max_step_blocks = MAX_INT32

    def __init__(self, device: Any = None, staging: str = "auto") -> None:
        # The simulator has neither of the two.
        from numba.cuda.cudadrv.devicearray import DeviceNDArray
        from numba.cuda.cudadrv.error import CudaDriverError

        super().__init__(staging)
        self._native, self._refusal = DeviceNDArray, CudaDriverError
        self.index = _device_index(device)
        with cuda.gpus[self.index]:
            self._context = int(_call(driver.cuCtxGetCurrent))
        self._streams: dict[int, Any] = {}
        self._idle_events: list[Any] = []

    def current(self) -> AbstractContextManager[Any]:
        """Make this GPU the current one; a no-op where it is, which is what an engine does."""
        return nullcontext() if self.is_current() else cuda.gpus[self.index]

    def is_current(self) -> bool:
        return int(_call(driver.cuCtxGetCurrent)) == self._context

    def full(self, size: int, value: int, dtype: str) -> Any:
        with self.current():
            array = cuda.device_array(size, dtype)
            self.fill(array, value, self.stream(None))
        return array

    def fill(self, array: Any, value: int, stream: Any) -> None:
        _call(driver.cuMemsetD8Async, self.address(array), BYTES[value], array.nbytes, stream.handle)

    def upload(self, array: np.ndarray[Any, Any]) -> Any:
        with self.current():
            copy = cuda.to_device(np.ascontiguousarray(array))
            self.stream(None).synchronize()  # a short copy may still be on its way, and another stream would not wait
        return copy

    def download(self, array: Any) -> np.ndarray[Any, Any]:
        native = array if isinstance(array, self._native) else cuda.as_cuda_array(array, sync=False)
        address = self.address(native)
        owner = NumbaDevice(_device_of(address), self._staging) if address else self
        owner.synchronize()  # the work may be on any stream
        with owner.current():
            host: np.ndarray[Any, Any] = native.copy_to_host()
        owner.synchronize()  # a foreign array may name a stream, and Numba copies on that one without a wait
        return host

    def synchronize(self) -> None:
        with self.current():
            cuda.synchronize()

    def kernel(self, name: str, slot_dtype: str, features: Features = ()) -> GpuKernel:
        """Return a kernel that is ready to launch; without a say all features are compiled."""
        types_of_arguments = signature(name, slot_dtype)
        with self.current(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Numba's linker warns wherever there is no nvJitLink
            compiled = specialised(name, features).compile(types_of_arguments)
            compiled.bind()
            # Numba's handle is a CUkernel, which a launch takes and a graph's node does not.
            kernel = driver.CUkernel(int(compiled.library.get_cufunc().handle))
            return GpuKernel(int(_call(driver.cuKernelGetFunction, kernel)), types_of_arguments)

    def address(self, array: Any) -> int:
        if isinstance(array, self._native):
            return array.device_ctypes_pointer.value or 0  # its interface costs some 4 us
        try:
            return address_of(array)
        except DtypeError:
            if not hasattr(array, "__dlpack__"):
                raise
        # -1: the producer orders nothing. The array itself keeps the memory, as it does for every input.
        return int(StridedMemoryView.from_dlpack(array, stream_ptr=-1).ptr)

    def mapped_memory_works(self) -> bool:
        try:
            return _mapped_memory_works(self.index)
        except self._refusal:  # none can be had
            return False

    def mapped_slot(self, entries: int) -> StagingSlot:
        with self.current():
            memory = cuda.mapped_array(entries, np.int32)
        return StagingSlot(np.asarray(memory), memory.device_ctypes_pointer.value)

    def copied_slot(self, entries: int) -> StagingSlot:
        with self.current():
            mirror = cuda.device_array(entries, np.int32)
            try:
                host = cuda.pinned_array(entries, np.int32)
            except self._refusal:  # none can be had; the driver then copies once more
                host = np.empty(entries, np.int32)
        return StagingSlot(host, self.address(mirror), mirror)

    def stream(self, handle: int | None) -> Any:
        """Return Numba's object for a handle; None: Numba's default stream, which is the legacy one."""
        handle = handle or LEGACY_STREAM
        found = self._streams.get(handle)
        if found is None:
            found = self._streams[handle] = cuda.external_stream(handle)
        return found

    def is_capturing(self, stream: Any) -> bool:
        # The legacy stream cannot be captured, and asking about it while another one is capturing is an error.
        if stream is self._streams.get(LEGACY_STREAM):
            return False
        status = _call(driver.cuStreamIsCapturing, stream.handle)
        return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def send(self, slot: StagingSlot, entries: int, stream: Any) -> None:
        if slot.mirror is not None:
            _call(driver.cuMemcpyHtoDAsync, slot.address, slot.host.ctypes.data, 4 * entries, stream.handle)

    def copy_in(self, values: np.ndarray[Any, Any], target: Any, stream: Any) -> None:
        """Copy host memory into part of a device array, and wait for it."""
        _call(driver.cuMemcpyHtoDAsync, self.address(target), values.ctypes.data, values.nbytes, stream.handle)
        stream.synchronize()

    def mark(self, stream: Any) -> Any:
        event = self._idle_events.pop() if self._idle_events else cuda.event(timing=False)
        event.record(stream)
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()
        self._idle_events.append(mark)

    def check(self, stream: Any) -> None:
        """Raise where the device has failed."""
        (error,) = driver.cuStreamQuery(stream.handle)
        if error not in (driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_READY):
            raise BlockTableError(f"The GPU has failed: {error.name}.")

    def order(self, before: Any, after: Any) -> None:
        """Make what comes on stream `after` wait for what is on stream `before`, without a host wait."""
        event = self.mark(before)
        event.wait(after)
        self._idle_events.append(event)  # a later record leaves alone who already waits


def _call(function: Any, *arguments: Any) -> Any:
    """Call the driver, and return its answer or raise."""
    error, *answer = function(*arguments)
    if error:
        raise BlockTableError(f"The CUDA driver refused {function.__name__}: {error.name}.")
    return answer[0] if answer else None


def _cell(kind: Any) -> Any:
    """Return memory for one argument of a kernel."""
    if isinstance(kind, types.CPointer):
        return ctypes.c_uint64()
    return {"int32": ctypes.c_int32, "int64": ctypes.c_int64}[str(kind)]()


def _device_index(device: Any) -> int:
    index = _asked_index(device)
    if index is None:
        current = cuda.gpus.current  # of this thread; None: it has used none yet
        return 0 if current is None else int(current.id)
    if not 0 <= index < len(cuda.gpus):
        raise ArgumentError(f"GPU {index} does not exist: there are {len(cuda.gpus)}, counted from 0.")
    return index


def _asked_index(device: Any) -> int | None:
    if isinstance(device, str) or hasattr(device, "type"):  # torch.device names its kind
        kind, _, index = str(device).partition(":")
        if kind != "cuda" or not (index == "" or index.isdecimal()):
            raise ArgumentError(f'The numba backend runs on "cuda" or "cuda:<index>", got {str(device)!r}.')
        return int(index) if index else None
    index = getattr(device, "index", getattr(device, "id", device))
    if index is not None and (isinstance(index, bool) or not isinstance(index, int)):
        raise ArgumentError(f'device must be an index, "cuda:<index>" or a device object, got {device!r}.')
    return index


def _device_of(address: int) -> int:
    ordinal = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(_call(driver.cuPointerGetAttribute, ordinal, address))


@cache
def _mapped_memory_works(index: int) -> bool:
    return mapped_memory_works(NumbaDevice(index, "mapped"))


def mapped_memory_works(device: Any) -> bool:
    """Whether a kernel sees what the host writes to mapped memory after an earlier kernel has read it."""
    slot, target = device.mapped_slot(1), device.full(1, 0, "int32")
    where = device.upload(np.array([0, 0, 0, 1], np.int32))  # offsets [0], starts [0, 1]: never read from that memory
    scatter = device.kernel("scatter_writes", "int64")
    offsets = device.address(where)
    arguments = (offsets, offsets + 8, slot.address, 1, 1, device.address(target))
    for value in (1, 2):
        slot.host[0] = value
        with device.current():
            scatter((1, 1), (device.tile,), arguments, stream=device.stream(None))
        if device.download(target)[0] != value:
            return False
    return True


def refuse_capture(capturing: bool, what: str) -> None:
    """Raise where the stream is capturing (R21)."""
    if capturing:
        raise BlockTableError(
            f"{what} cannot be captured: row changes and host arrays are read once, not at every replay. Call commit() "
            "before the capture and before each replay, and give device arrays."
        )
