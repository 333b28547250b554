"""Memory, streams and launches: on a GPU through Numba and the driver's bindings, and in Numba's simulator."""

from __future__ import annotations

import ctypes
import math
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from types import FunctionType
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core.utils import StridedMemoryView
from numba import cuda, types

from blocktable import BlockTableError, DtypeError
from blocktable.backend import address_of
from blocktable.device import (
    FEATURES,
    INT32_MAX,
    SIGNATURES,
    EmulatedDriver,
    EmulatedKernel,
    Grid,
    HostBlock,
    KernelArguments,
    KernelOptions,
    signature_of,
)
from blocktable.typing import Array
from blocktable_numba import checks, common, exports, kernels

TILE = 128
MAX_GATHER_BLOCKS = 1 << 15
VARIANTS = frozenset({"step_batch"})

SIMULATED_TILE = 4
SIMULATED_GRID = 2  # blocks along each axis: a simulated thread costs some 250 us
SIMULATED_SHARE = 64  # entries for each block of the kernels whose blocks have different work, and cannot be left out
SHARING = ("apply_changes", "step_batch")

LEGACY_STREAM = 1  # 0 is the same stream, unless CUDA's Python bindings are told otherwise
HOST_FLAGS = driver.CU_MEMHOSTALLOC_DEVICEMAP | driver.CU_MEMHOSTALLOC_PORTABLE

KNOWN = frozenset(FEATURES).intersection(vars(common))
"""The features that these kernels know."""

SPECIALISED: list[Any] = []
"""Every kernel that `specialised` has made."""

_simulator_lock = threading.Lock()  # it runs one kernel at a time


# Kernels.


@cache
def specialised(name: str, features: frozenset[str]) -> Any:
    """Return a kernel that is compiled with some of the features; those of exports know none."""
    if hasattr(exports, name):
        made = getattr(exports, name)
    else:
        functions = vars(common) | vars(checks) | vars(kernels)
        scope = functions | {feature: feature in features for feature in KNOWN}  # Numba takes globals as constants
        for function, known in functions.items():
            if hasattr(known, "py_func") and function not in SIGNATURES:
                scope[function] = common.device_function(_copy(known.py_func, scope))
        made = cuda.jit(_copy(scope[name].py_func, scope))
    SPECIALISED.append(made)
    return made


def _copy(function: Any, scope: dict[str, Any]) -> Any:
    copied = FunctionType(function.__code__, scope, function.__name__)
    copied.__module__ = function.__module__
    return copied


def element_types(name: str, dtype: str) -> list[tuple[str, bool]]:
    """Return the element type of each argument of a kernel, and whether it is an array of them. dtype: of `slot*`."""
    kinds = [kind for kind, _ in signature_of(name).arguments]
    return [(kind.removesuffix("*").replace("slot", dtype), kind.endswith("*")) for kind in kinds]


def numba_types(name: str, dtype: str) -> tuple[Any, ...]:
    """Return the Numba type of each argument of a kernel."""
    return tuple(
        types.CPointer(getattr(types, element)) if is_array else getattr(types, element)
        for element, is_array in element_types(name, dtype)
    )


class GpuKernel:
    """A loaded kernel, and the memory that its arguments are handed over in: one launch at a time.

    Numba's own launch costs some 25 us, and warns of small grids.
    """

    tile = num_threads = TILE
    shared_bytes = num_extra = 0

    def __init__(self, name: str, function: int) -> None:
        self.name, self.function = name, function
        self._function = driver.CUfunction(function)
        self._arguments = KernelArguments(signature_of(name).layout)

    def __call__(self, grid: Grid, arguments: Sequence[int], stream: int) -> None:
        self._arguments.set(arguments)
        _call(
            driver.cuLaunchKernel,
            *(self._function, *grid, 1, TILE, 1, 1),
            *(0, stream, self._arguments.pointers, 0),  # no shared memory; no further options
        )


# A GPU.


class NumbaDriver:
    """One GPU through Numba, in its primary context, which torch and CuPy use too.

    Args:
        index: of the GPU.
    """

    is_emulated = overlaps = False
    many_slots = INT32_MAX  # there are no kernels for long launches
    change_sizes: tuple[int, ...] = ()
    variants = VARIANTS

    def __init__(self, index: int) -> None:
        # The simulator has none of these.
        from numba.cuda.cudadrv.devicearray import DeviceNDArray
        from numba.cuda.cudadrv.driver import MemoryPointer

        self._native, self._pointer = DeviceNDArray, MemoryPointer
        self.index, self.is_mapped = index, True
        with cuda.gpus[index]:
            self._context = int(_call(driver.cuCtxGetCurrent))
        self._idle_events: list[Any] = []

    # Memory.

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a new array: memory of our own, since Numba keeps what is dropped, and frees it at any time."""
        size, itemsize = math.prod(shape), np.dtype(dtype).itemsize
        strides = tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        if size == 0:
            return self._native(shape, strides, dtype)
        with relaxed_capture():
            address = int(_call(driver.cuMemAlloc, size * itemsize))
        owner = _Owner()
        _free_after(owner, self._context, driver.cuMemFree, address)
        # An owner that is not Numba's is held by each view.
        memory = self._pointer(cuda.current_context(), driver.CUdeviceptr(address), size * itemsize, owner=owner)
        return self._native(shape, strides, dtype, gpu_data=memory)

    def full(self, size: int, value: int, dtype: str) -> Array:
        array = self._empty((size,), dtype)
        self.fill(array, value, LEGACY_STREAM)
        return array

    def fill(self, array: Any, value: int, stream: int) -> None:
        if value in (0, -1):  # bytes of one value
            _call(driver.cuMemsetD8Async, self.address(array), value & 255, array.nbytes, stream)
        elif array.dtype.itemsize == 4:
            _call(driver.cuMemsetD32Async, self.address(array), value & (2**32 - 1), array.size, stream)
        else:
            self.copy_in(np.full(array.size, value, array.dtype), array, stream)

    def upload(self, array: Any) -> Array:
        host = np.ascontiguousarray(array)
        copy = self._empty(host.shape, host.dtype)
        if host.size:
            self.copy_in(host, copy, LEGACY_STREAM)  # it waits, as another stream would not
        return copy

    def download(self, array: Any) -> Any:
        native = array if isinstance(array, self._native) else cuda.as_cuda_array(array, sync=False)
        address = self.address(native)
        index = _call(driver.cuPointerGetAttribute, _ORDINAL, address) if address else self.index
        with cuda.gpus[int(index)]:  # a Numba array does not say on which GPU it is
            _call(driver.cuCtxSynchronize)  # the work may be on any stream
            host = native.copy_to_host()
            # A foreign array may name a stream, and Numba copies on that one without a wait.
            _call(driver.cuCtxSynchronize)
        return host

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

    def host_block(self, entries: int) -> HostBlock:
        if self.is_mapped:
            host = self._pinned(entries)
            return HostBlock(host, host.ctypes.data)  # unified addressing: one address on both sides
        copy = self.full(entries, 0, "int32")
        try:
            host = self._pinned(entries)
        except BlockTableError:  # there is none; the driver then copies once more
            host = np.empty(entries, np.int32)
        return HostBlock(host, self.address(copy), copy)

    def _pinned(self, entries: int) -> Any:
        with relaxed_capture():
            address = int(_call(driver.cuMemHostAlloc, 4 * entries, HOST_FLAGS))
        memory: Any = (ctypes.c_int32 * entries).from_address(address)  # each view of it holds it
        _free_after(memory, self._context, driver.cuMemFreeHost, address)
        return np.frombuffer(memory, np.int32)

    def send(self, block: HostBlock, entries: int, stream: int) -> None:
        if block.copy is not None:
            _call(driver.cuMemcpyHtoDAsync, block.address, block.host_address, 4 * entries, stream)

    def copy_in(self, values: Any, target: Array, stream: int) -> None:
        _call(driver.cuMemcpyHtoDAsync, self.address(target), values.ctypes.data, values.nbytes, stream)
        _call(driver.cuStreamSynchronize, stream)

    # Streams.

    def current(self) -> AbstractContextManager[Any]:
        """Make this GPU the current one; a no-op where it is, which is what an engine does."""
        return nullcontext() if self.is_current() else cuda.gpus[self.index]

    def is_current(self) -> bool:
        return int(_call(driver.cuCtxGetCurrent)) == self._context

    def stream(self, handle: int | None) -> int:
        """Return a handle; None: Numba's default stream, which is the legacy one."""
        return handle or LEGACY_STREAM

    def is_capturing(self, stream: int) -> bool:
        # The legacy stream cannot be captured, and asking about it while another one is capturing is an error.
        if stream == LEGACY_STREAM:
            return False
        return bool(_call(driver.cuStreamIsCapturing, stream) != _NOT_CAPTURING)

    def order(self, before: int, after: int) -> None:
        event = self.mark(before)
        _call(driver.cuStreamWaitEvent, after, event.handle, 0)

    def mark(self, stream: int) -> Any:
        idle = self._idle_events
        handle = idle.pop() if idle else _call(driver.cuEventCreate, driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        event = _Event(handle, idle)
        _call(driver.cuEventRecord, handle, stream)
        return event

    def wait(self, mark: Any) -> None:
        with relaxed_capture():
            _call(driver.cuEventSynchronize, mark.handle)

    def check(self, stream: int) -> None:
        with relaxed_capture():
            (error,) = driver.cuStreamQuery(stream)
        if error not in (driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_READY):
            raise BlockTableError(f"The GPU has failed: {error.name}.")

    def synchronize(self) -> None:
        _call(driver.cuCtxSynchronize)

    # Kernels.

    def kernel(self, name: str, options: KernelOptions) -> GpuKernel:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Numba's linker warns wherever there is no nvJitLink
            compiled = specialised(name, options.features & KNOWN).compile(numba_types(name, options.dtype))
            compiled.bind()
            # Numba's handle is a CUkernel, which a launch takes and a graph's node does not.
            loaded = driver.CUkernel(int(compiled.library.get_cufunc().handle))
            return GpuKernel(name, int(_call(driver.cuKernelGetFunction, loaded)))

    def gather_blocks(self, num_rows: int, num_groups: int, width: int) -> int:
        return min(max(num_rows, 1) * num_groups, MAX_GATHER_BLOCKS)


class _Event:
    """An event, which goes back to the idle ones when it is dropped: a later record leaves alone who already waits."""

    def __init__(self, handle: Any, idle: list[Any]) -> None:
        self.handle, self._idle = handle, idle

    def __del__(self) -> None:
        self._idle.append(self.handle)


class _Owner:
    """Stands for memory whose views hold it."""


_ORDINAL = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_NOT_CAPTURING = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE


def _call(function: Any, *arguments: Any) -> Any:
    """Call the driver, and return its answer or raise."""
    error, *answer = function(*arguments)
    if error:
        raise BlockTableError(f"The CUDA driver refused {function.__name__}: {error.name}.")
    return answer[0] if answer else None


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread allocate, free and wait while anyone captures a graph, which it would break otherwise."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = _call(driver.cuThreadExchangeStreamCaptureMode, relaxed)
    try:
        yield
    finally:
        _call(driver.cuThreadExchangeStreamCaptureMode, before)


def _free_after(owner: Any, context: int, free: Any, address: int) -> None:
    """Free memory immediately when its owner is dropped, in whatever thread that is."""
    weakref.finalize(owner, _free, context, free, address).atexit = False  # the process ends with its memory


def _free(context: int, free: Any, address: int) -> None:
    driver.cuCtxPushCurrent(driver.CUcontext(context))
    with relaxed_capture():
        free(address)  # nobody is there to hear of a failure: the next call on this GPU raises
    driver.cuCtxPopCurrent()


# Numba's simulator.


class SimulatedMemory:
    """Which array lies at an address: a simulated kernel takes arrays, of which each ends somewhere."""

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[int, weakref.ref[Any]]] = {}  # address -> end, and what must be alive
        self._lock = threading.Lock()

    def add(self, array: Any, address: int) -> None:
        """Take note of an array, and of the whole memory that it is a view of, until that dies."""
        interface = getattr(array, "__cuda_array_interface__", None)
        if isinstance(array, np.ndarray):
            while isinstance(array.base, np.ndarray):
                array = array.base
            address, nbytes = array.ctypes.data, array.nbytes
        elif interface is not None:
            nbytes = math.prod(interface["shape"]) * np.dtype(interface["typestr"]).itemsize
        else:
            nbytes = np.from_dlpack(array).nbytes
        with self._lock:
            self._arrays[address] = address + nbytes, weakref.ref(array)

    def entries(self, address: int, dtype: str) -> Any:
        """Return [n] of a type: what is at an address and after it, to the end of its array; nothing where none is."""
        with self._lock:
            self._arrays = {start: found for start, found in self._arrays.items() if found[1]() is not None}
            start = max((start for start, (end, _) in self._arrays.items() if start <= address < end), default=None)
            end, owner = self._arrays[start] if start is not None else (address, lambda: None)
            size = np.dtype(dtype).itemsize
            memory: Any = (ctypes.c_uint8 * ((end - address) // size * size)).from_address(address)
            found = np.frombuffer(memory, dtype)
            return found, owner()  # which lives as long as the caller holds it


class SimulatedDriver(EmulatedDriver):
    """Numba's simulator: arrays are on the host, and a launch runs when it is made."""

    variants = VARIANTS

    def __init__(self, device: Any = None) -> None:
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        super().__init__(device)
        self._memory, self._array = SimulatedMemory(), FakeCUDAArray

    def address(self, array: Any) -> int:
        address = super().address(array)
        self._memory.add(array, address)
        return address

    def gather_blocks(self, num_rows: int, num_groups: int, width: int) -> int:
        return min(max(num_rows, 1) * num_groups, SIMULATED_GRID)

    def kernel(self, name: str, options: KernelOptions) -> EmulatedKernel:
        run = partial(self._run, name, options, KernelArguments(signature_of(name).layout))
        return EmulatedKernel(self, name, SIMULATED_SHARE if name in SHARING else SIMULATED_TILE, run)

    def _run(
        self, name: str, options: KernelOptions, checked: KernelArguments, grid: Grid, arguments: Sequence[int]
    ) -> None:
        checked.set(arguments)  # Python's ints would fit any type
        if name not in SHARING:
            grid = min(grid[0], SIMULATED_GRID), min(grid[1], SIMULATED_GRID)
        kernel, kinds = specialised(name, options.features & KNOWN), element_types(name, options.dtype)
        for launch in self._split(arguments, options) if name == "map_slots" else [arguments]:
            found = [
                self._memory.entries(value, element) if is_array else (value, None)
                for (element, is_array), value in zip(kinds, launch, strict=True)
            ]
            # The simulator's own kind of array: a numpy array would be copied at each launch.
            given = [self._array(value) if isinstance(value, np.ndarray) else value for value, _ in found]
            with _simulator_lock:
                kernel[grid, (SIMULATED_TILE,)](*given)

    def _split(self, arguments: Sequence[int], options: KernelOptions) -> list[tuple[int, ...]]:
        """Return map_slots as one launch, or one for each group where these have arrays of their own.

        A kernel on a GPU reaches from one into the other.
        """
        *head, first_group, num_groups, arena, slots, stride, num_slots, guess, checker, findings = arguments
        present = self._memory.entries(slots, options.dtype)[0].size
        if 0 <= (num_groups - 1) * stride <= present - num_slots:
            return [tuple(arguments)]
        distance = stride * np.dtype(options.dtype).itemsize
        return [
            (*head, first_group + y, 1, arena, slots + y * distance, 0, num_slots, guess, checker, findings)
            for y in range(num_groups)
        ]
