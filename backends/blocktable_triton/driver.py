"""One GPU through torch, and Triton's interpreter over torch's CPU tensors, with Triton's kernels on both."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl

from blocktable import DtypeError
from blocktable.backend import address_of
from blocktable.device import (
    FEATURES,
    SIGNATURES,
    EmulatedDriver,
    EmulatedKernel,
    Grid,
    HostBlock,
    KernelOptions,
    signature_of,
)
from blocktable.typing import Array
from blocktable_triton import exports, kernels

MAX_GATHER_PARTS = 1 << 12
WARPS, LONG_WARPS = 4, 2
"""Of a program. At 16 million tokens long tiles of 512 with 2 reach 92 % of a copy, with 4 89 %, of 1,024 84 %."""
NAMES = [name for name in SIGNATURES if name != "apply_changes_by_value"]
FUNCTIONS = {name: getattr(kernels, name, None) or getattr(exports, name) for name in NAMES}


class Sizes(NamedTuple):
    """What a program takes at a time."""

    tile: int  # entries
    long_tile: int  # entries of a long launch
    row_tile: int  # columns; rows are long, and a row's lanes that have no column cost next to nothing
    step_rows: int  # rows that the fused step gathers together, and columns of each
    step_row_tile: int


class Build:
    """How a kernel is compiled.

    Attributes:
        function: Triton's.
        constants: its compile-time arguments.
        tile: entries that a program takes.
        num_warps: of a program.
        pack: raises struct.error where an argument does not fit its type: triton 3.9 cuts off what does not.
    """

    def __init__(self, name: str, options: KernelOptions, sizes: Sizes) -> None:
        is_long, signature = name.endswith("_long"), signature_of(name)
        self.function: Any = FUNCTIONS[signature.name]
        self.tile: int = sizes.row_tile if signature.is_by_row else sizes.long_tile if is_long else sizes.tile
        features = sum(1 << FEATURES.index(feature) for feature in options.features)
        values = {"SLOT_T": getattr(tl, options.dtype), "FEATURES": features, "IS_LONG": is_long, "TILE": self.tile}
        values |= {"ROWS": sizes.step_rows, "ROW_TILE": sizes.step_row_tile}
        self.constants: tuple[Any, ...] = tuple(values[name] for name in self.function.arg_names if name in values)
        self.num_warps: int = LONG_WARPS if is_long else WARPS
        self.pack: Any = struct.Struct("@" + signature.layout).pack


class CompiledKernel:
    """One kernel, compiled and loaded for the current GPU when this is made.

    A launch asks neither Triton's cache nor torch's current stream: it names the stream, and cannot compile.
    """

    def __init__(self, name: str, build: Build) -> None:
        self.name, self.tile = name, build.tile
        self._constants, self._pack = build.constants, build.pack
        layout = signature_of(name).layout
        self._sizes = [struct.calcsize(kind) for kind in layout]
        # No kernel has floating point; saying so keeps triton 3.9 from warning that its default will change.
        self._compiled = build.function.warmup(
            *([0] * len(layout)), *build.constants, grid=(1,), num_warps=build.num_warps, enable_fp_fusion=False
        )
        self._compiled[(1, 1, 1)]  # loads it: a first launch inside a capture could not
        self.num_threads: int = 32 * build.num_warps

    def __call__(self, grid: Grid, arguments: Sequence[int], stream: int) -> None:
        self._pack(*arguments)
        self._compiled[(*grid, 1)](*arguments, *self._constants, stream=stream)

    @property
    def function(self) -> int:
        """CUfunction."""
        return int(self._compiled.function)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a program."""
        return int(self._compiled.metadata.shared)

    @cached_property
    def num_extra(self) -> int:
        """Arguments that Triton has appended: pointers to scratch memory, unused here."""
        return len(_parameter_sizes(self.function)) - len(self._sizes)

    def graph_problem(self) -> str | None:
        """Return why it cannot be a node of a graph of ours, in a few words; None: it can."""
        metadata = self._compiled.metadata
        for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"):
            if getattr(metadata, name, 0):
                return f"this Triton compiles with {name}"
        if getattr(metadata, "num_ctas", 1) != 1:
            return "this Triton compiles for clusters"
        sizes = _parameter_sizes(self.function)
        own, more = sizes[: len(self._sizes)], sizes[len(self._sizes) :]
        if own != self._sizes or len(more) > 2 or any(size != 8 for size in more):
            return "this Triton's kernels take other arguments, or the driver does not say which"
        return None


def _parameter_sizes(function: int) -> list[int]:
    """Return the bytes of each parameter of a loaded kernel, as the driver says them; nothing where it does not."""
    from cuda.bindings import driver

    sizes: list[int] = []
    try:
        while True:
            error, _, size = driver.cuFuncGetParamInfo(driver.CUfunction(function), len(sizes))
            if error:
                return sizes
            sizes.append(int(size))
    except (AttributeError, RuntimeError):  # bindings or a driver of before CUDA 12.4
        return []


class TritonDriver:
    """What the GPU and the interpreter share: torch's memory and the kernels."""

    change_sizes: tuple[int, ...] = ()
    variants = frozenset({"map_slots_long", "step_batch", "step_batch_long"})
    device: torch.device
    sizes: Sizes

    def full(self, size: int, value: int, dtype: str) -> Array:
        with torch.inference_mode(False):  # what is made in that mode cannot be written outside it
            return torch.full((size,), value, dtype=getattr(torch, dtype), device=self.device)

    def upload(self, array: np.ndarray[Any, Any]) -> Array:
        with torch.inference_mode(False):
            return torch.tensor(array, device=self.device)

    def address(self, array: Array) -> int:
        if not isinstance(array, torch.Tensor):
            try:
                return address_of(array)
            except DtypeError:
                array = torch.from_dlpack(array)
        if array.device != self.device:  # Triton would not look: it gets a number
            raise DtypeError(
                f"An array is on {array.device}, but this table is on {self.device}; move it there, or give a numpy "
                "array, which is staged."
            )
        return int(array.data_ptr())

    def gather_blocks(self, num_rows: int, num_groups: int, width: int) -> int:
        return min(max(-(-num_rows // self.sizes.step_rows), 1), MAX_GATHER_PARTS) * num_groups


class InterpretedDriver(TritonDriver, EmulatedDriver):
    """Triton's interpreter. Arrays are CPU tensors, which what runs torch on the CPU may share."""

    device = torch.device("cpu")
    sizes = Sizes(32, 64, 32, 2, 32)

    def kernel(self, name: str, options: KernelOptions) -> EmulatedKernel:
        build = Build(name, options, self.sizes)

        def run(grid: Grid, arguments: Sequence[int]) -> None:
            build.pack(*arguments)
            build.function[(*grid, 1)](*arguments, *build.constants)

        return EmulatedKernel(self, name, build.tile, run)


class TorchDriver(TritonDriver):
    """One GPU through torch.

    Args:
        index: of the GPU.
    """

    is_emulated = False
    many_slots = 1 << 18
    sizes = Sizes(128, 512, 1024, 4, 256)

    def __init__(self, index: int) -> None:
        self.is_mapped: bool = True
        self.index = index
        self.device = torch.device("cuda", index)
        self._streams: dict[int, torch.cuda.Stream] = {}

    @cached_property
    def overlaps(self) -> bool:
        """Whether a kernel may start while the one before it runs: NVIDIA GPUs of compute capability 9 and newer."""
        return torch.version.hip is None and torch.cuda.get_device_capability(self.index)[0] >= 9

    def kernel(self, name: str, options: KernelOptions) -> CompiledKernel:
        with self.current():
            return CompiledKernel(name, Build(name, options, self.sizes))

    # Memory.

    def fill(self, array: Array, value: int, stream: int) -> None:
        with self._on(stream):
            array.fill_(value)

    def download(self, array: Array) -> np.ndarray[Any, Any]:
        self.synchronize()  # the work may be on any stream
        with self.current():
            host: np.ndarray[Any, Any] = torch.as_tensor(array, device=self.device).cpu().numpy()
        return host

    def host_block(self, entries: int) -> HostBlock:
        with torch.inference_mode(False), self.current():
            memory = torch.empty(entries, dtype=torch.int32, pin_memory=True)
            if self.is_mapped:
                return HostBlock(memory.numpy(), memory.data_ptr(), owner=memory)
            copy = torch.empty(entries, dtype=torch.int32, device=self.device)
            return HostBlock(memory.numpy(), copy.data_ptr(), copy, owner=memory)

    def send(self, block: HostBlock, entries: int, stream: int) -> None:
        if block.copy is not None:
            # Under torch.set_default_device each of these calls would cost 5 us.
            with torch._C.DisableTorchFunction(), self._on(stream):
                block.copy[:entries].copy_(block.owner[:entries], non_blocking=True)

    def copy_in(self, values: np.ndarray[Any, Any], target: Array, stream: int) -> None:
        source = torch.from_numpy(values if values.flags.writeable else values.copy())
        with self._on(stream):
            target.copy_(source)
        self.wait(self.mark(stream))

    # Streams.

    def current(self) -> AbstractContextManager[Any]:
        """Make this GPU the current one; a no-op where it is, which is what an engine does."""
        return nullcontext() if self.is_current() else torch.cuda.device(self.index)

    def is_current(self) -> bool:
        return int(torch._C._cuda_getDevice()) == self.index  # torch.cuda.current_device() costs some 2 us

    def stream(self, handle: int | None) -> int:
        if handle is None:
            # 0.2 us, where torch.cuda.current_stream() costs 4 to 8.
            return int(torch._C._cuda_getCurrentRawStream(self.index))
        return 0 if handle == 1 else handle  # both are the legacy default stream

    def is_capturing(self, stream: int) -> bool:
        # The legacy default stream cannot be captured, and asking about it breaks a capture elsewhere.
        if stream == 0:
            return False
        if stream == torch._C._cuda_getCurrentRawStream(self.index):
            return bool(torch._C._cuda_isCurrentStreamCapturing())
        with torch.cuda.stream(self._stream_object(stream)):
            return bool(torch.cuda.is_current_stream_capturing())

    def order(self, before: int, after: int) -> None:
        self._stream_object(after).wait_event(self.mark(before))

    def mark(self, stream: int) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream_object(stream))
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def check(self, stream: int) -> None:
        self._stream_object(stream).query()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def _stream_object(self, stream: int) -> torch.cuda.Stream:
        found = self._streams.get(stream)
        if found is None:
            # As an external stream 0 would become another one, of torch's pool.
            found = self._streams[stream] = (
                torch.cuda.ExternalStream(stream, device=self.index)
                if stream
                else torch.cuda.default_stream(self.index)
            )
        return found

    def _on(self, stream: int) -> AbstractContextManager[Any]:
        # Switching costs several microseconds, and in an engine the stream is torch's current one.
        return nullcontext() if stream == self.stream(None) else torch.cuda.stream(self._stream_object(stream))
