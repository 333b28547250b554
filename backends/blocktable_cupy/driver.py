"""Memory, streams and kernels for the device layer: of a GPU through CuPy, and of the host for the emulation."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from blocktable import DtypeError
from blocktable.backend import address_of
from blocktable.device import (
    CHECK_KERNELS,
    EXPORT_KERNELS,
    PLAIN_KERNELS,
    EmulatedDriver,
    EmulatedKernel,
    Grid,
    HostBlock,
    KernelArguments,
    KernelOptions,
    signature_of,
)
from blocktable.typing import Array

IntArray = np.ndarray[Any, Any]

VARIANTS = ("map_slots_long", "step_batch", "step_batch_long")
CHANGE_SIZES = (245, 605, 1905, 8165)
KERNELS = {
    "exports": tuple(signature.name for signature in EXPORT_KERNELS),
    "kernels": (
        *(signature.name for signature in (*PLAIN_KERNELS, *CHECK_KERNELS)),
        *VARIANTS,
        *(f"apply_changes_{size}" for size in CHANGE_SIZES),
    ),
}
"""Source -> what stands in it."""
FEATURES = ("HAS_SHARDS", "HAS_MODES", "HAS_NULL_PADS", "HAS_WINDOWS", "HAS_ODD_SIZES", "CHECKED")
"""Those that kernels.cu knows. A division looks whether it needs 64 bits, and a GPU whether kernels may overlap."""
SLOT_TYPES = {"int64": "long long", "int32": "int"}

WARP = 32
TOKENS_PER_THREAD = 8
"""Of the kernels for long launches: CHUNK / WARP of kernels.cu."""
GATHER_WARPS = 2048
"""Warps that gather, where the batch has fewer rows: then several take a part of each row."""
MAX_GATHER_BLOCKS = 8192
NOT_READY = 600
"""CUDA's error of a stream that is still at work."""


def source_of(name: str) -> str:
    """Return which source a kernel stands in."""
    return "exports" if name in KERNELS["exports"] else "kernels"


@cache
def read_source(source: str) -> str:
    """Return a source, complete."""
    names = ("common.cuh", "checks.cu", "kernels.cu") if source == "kernels" else ("common.cuh", f"{source}.cu")
    return "".join(files("blocktable_cupy").joinpath(name).read_text() for name in names)


def macros(source: str, options: KernelOptions) -> tuple[str, ...]:
    """Return what a source is compiled with."""
    features = FEATURES if source == "kernels" else ()
    return f"SLOT_T={SLOT_TYPES[options.dtype]}", *(f"{name}={int(name in options.features)}" for name in features)


def num_compilations() -> int:
    """Return how many modules have been compiled and loaded."""
    return load_module.cache_info().currsize + build_library.cache_info().currsize


class CupyKernels:
    """What both drivers say of the kernels: how large blocks are, and who shares the gather."""

    change_sizes: tuple[int, ...] = CHANGE_SIZES
    variants: frozenset[str] = frozenset(VARIANTS)
    num_threads = 128
    columns_per_warp = 256

    def tile(self, name: str) -> int:
        """Return the entries along the grid's first axis that a block takes."""
        return self.num_threads * (TOKENS_PER_THREAD if name.endswith("_long") else 1)

    def gather_blocks(self, num_rows: int, num_groups: int, width: int) -> int:
        """Return the blocks of step_batch that gather; it shares their warps out evenly."""
        pairs = max(num_rows, 1) * num_groups
        parts = max(min(GATHER_WARPS // pairs, -(-width // self.columns_per_warp)), 1)
        return min(-(-pairs * parts * WARP // self.num_threads), MAX_GATHER_BLOCKS)


class CupyKernel:
    """A loaded kernel, and the memory that its arguments are handed over in: one launch at a time.

    Args:
        raw: CuPy's object, which keeps the module loaded.
        name: the kernel's.
        driver: the device.
        launch: cuLaunchKernel by CuPy: plain launches need no cuda-bindings.
    """

    shared_bytes = 0
    num_extra = 0

    def __init__(self, raw: Any, name: str, driver: CupyDriver, launch: Any) -> None:
        self.name, self.tile, self.num_threads = name, driver.tile(name), driver.num_threads
        self.function: int = raw.kernel.ptr
        self._raw, self._launch = raw, launch
        self._arguments = KernelArguments(signature_of(name).layout)

    def __call__(self, grid: Grid, arguments: Sequence[int], stream: int) -> None:
        self._arguments.set(arguments)
        self._launch(self.function, *grid, 1, self.num_threads, 1, 1, 0, stream, self._arguments.pointers, 0)


class CupyDriver(CupyKernels):
    """One GPU through CuPy.

    Args:
        index: of the GPU.
    """

    is_emulated = False
    overlaps = True
    many_slots = 1 << 18

    def __init__(self, index: int) -> None:
        import cupy

        self.is_mapped = True
        self.index = index
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._device = cupy.cuda.Device(index)

    # Memory.

    def full(self, size: int, value: int, dtype: str) -> Array:
        with self.current():
            return self._cupy.full(size, value, dtype)

    def fill(self, array: Any, value: int, stream: int) -> None:
        if value in (0, -1):  # bytes of one value
            self._runtime.memsetAsync(array.data.ptr, value & 255, array.nbytes, stream)
        else:
            self.copy_in(np.full(array.size, value, array.dtype), array, stream)

    def upload(self, array: IntArray) -> Array:
        with self.current():
            made = self._cupy.array(array)
            self._cupy.cuda.get_current_stream().synchronize()  # another stream may use it immediately
            return made

    def download(self, array: Array) -> IntArray:
        self.synchronize()  # the work may be on any stream
        with self.current():
            host: IntArray = self._cupy.asnumpy(self._cupy.asarray(array))
        return host

    def address(self, array: Any) -> int:
        try:
            return address_of(array)
        except DtypeError:
            if not hasattr(array, "__dlpack__") or isinstance(array, np.ndarray):
                raise
            return int(self._cupy.from_dlpack(array).data.ptr)  # without a copy; JAX arrays say no address otherwise

    def host_block(self, entries: int) -> HostBlock:
        with self.current():
            memory = self._cupy.cuda.alloc_pinned_memory(4 * entries)
            host = np.frombuffer(memory, np.int32, entries)
            if self.is_mapped:
                return HostBlock(host, host.ctypes.data, owner=memory)  # unified addressing: one address on both sides
            copy = self._cupy.empty(entries, np.int32)
            return HostBlock(host, copy.data.ptr, copy, owner=memory)

    def send(self, block: HostBlock, entries: int, stream: int) -> None:
        if block.copy is not None:
            self._send(block.host_address, block.address, 4 * entries, stream)

    def copy_in(self, values: IntArray, target: Any, stream: int) -> None:
        self._send(values.ctypes.data, target.data.ptr, values.nbytes, stream)
        self._runtime.streamSynchronize(stream)

    def _send(self, source: int, target: int, num_bytes: int, stream: int) -> None:
        self._runtime.memcpyAsync(target, source, num_bytes, self._runtime.memcpyHostToDevice, stream)

    # Streams.

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.is_current() else self._device

    def is_current(self) -> bool:
        return bool(self._runtime.getDevice() == self.index)

    def stream(self, handle: int | None) -> int:
        if handle is None:
            handle = int(self._cupy.cuda.get_current_stream().ptr)
        return 0 if handle == 1 else handle

    def is_capturing(self, stream: int) -> bool:
        # The legacy default stream cannot be captured, and asking about it breaks a capture elsewhere.
        return stream != 0 and bool(self._runtime.streamIsCapturing(stream))

    def order(self, before: int, after: int) -> None:
        event = self.mark(before)  # alive until the call has returned
        self._runtime.streamWaitEvent(after, event.ptr)

    def mark(self, stream: int) -> Any:
        event = self._cupy.cuda.Event(disable_timing=True)
        self._runtime.eventRecord(event.ptr, stream)
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def check(self, stream: int) -> None:
        status = self._runtime.streamQuery(stream)
        if status != NOT_READY:
            self._runtime.check_status(status)

    def synchronize(self) -> None:
        self._device.synchronize()

    # Kernels.

    def kernel(self, name: str, options: KernelOptions) -> CupyKernel:
        source = source_of(name)
        with self.current():
            raw = load_module(self.index, read_source(source), macros(source, options)).get_function(name)
            raw.num_regs  # noqa: B018 - loads it now: CUDA would do so at the first launch, and wait for the device
            return CupyKernel(raw, name, self, self._cupy.cuda.driver.launchKernel)


@cache
def load_module(device: int, source: str, options: tuple[str, ...]) -> Any:
    """Compile a source for the current device, `device`."""
    import cupy

    return cupy.RawModule(code=source, options=("-std=c++17", *(f"-D{option}" for option in options)))


class EmulatedCupyDriver(CupyKernels, EmulatedDriver):
    """The emulation: kernels compiled by the C++ compiler over emulate.h, in small blocks so that there are several."""

    num_threads = WARP
    columns_per_warp = 16

    def kernel(self, name: str, options: KernelOptions) -> EmulatedKernel:
        source = source_of(name)
        launch = getattr(build_library(source, macros(source, options)), f"launch_{name}")
        packed = KernelArguments(signature_of(name).layout)

        def run(grid: Grid, arguments: Sequence[int]) -> None:
            packed.set(arguments)
            launch(*map(ctypes.c_uint, (*grid, self.num_threads)), ctypes.c_void_p(packed.pointers))

        return EmulatedKernel(self, name, self.tile(name), run)


def compiler() -> str | None:
    """Return the host's C++ compiler, or None."""
    named = filter(None, (os.environ.get("CXX"), "g++", "clang++"))
    return next(filter(None, map(shutil.which, named)), None)


@cache
def build_library(source: str, options: tuple[str, ...]) -> ctypes.CDLL:
    """Compile a source for the host, once for each set of macros, and load it."""
    shim = files("blocktable_cupy").joinpath("emulate.h").read_text()
    defined = [f"#define {option.replace('=', ' ', 1)}" for option in options]
    launches = [f"EMULATE({name})" for name in KERNELS[source]]
    text = "\n".join((*defined, shim, read_source(source), *launches, "")).encode()
    # A folder of this user's own: nobody else can put a library there.
    folder = Path(tempfile.gettempdir()) / f"blocktable-cupy-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to someone else; set TMPDIR to a folder of your own.")
    library = folder / f"{hashlib.sha256(text).hexdigest()[:24]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / "kernels.so"
            command = [str(compiler()), "-std=c++17", "-O2", "-fwrapv", "-shared", "-fPIC", "-x", "c++", "-"]
            subprocess.run([*command, "-o", built], input=text, check=True)
            built.replace(library)  # atomic: another process may build the same one
    return ctypes.CDLL(str(library))
