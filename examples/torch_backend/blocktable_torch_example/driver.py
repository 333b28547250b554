"""One NVIDIA GPU through torch; and its emulation, which runs the kernels in Triton's interpreter."""

import ctypes
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
from triton.compiler import ASTSource

from blocktable.backend import address_of
from blocktable.device import (
    INT32_MAX,
    EmulatedDriver,
    EmulatedKernel,
    Grid,
    HostBlock,
    KernelArguments,
    KernelOptions,
    signature_of,
)
from blocktable_torch_example import kernels

IntArray = np.ndarray[Any, np.dtype[Any]]

TILE = 256
"""Entries that a program takes in one turn."""
INTERPRETED_TILE = 32
"""Few enough that the suite's small tables take several."""


def triton_types(name: str, dtype: str) -> dict[str, str]:
    """Return a kernel's arguments, each with its type as Triton writes it. dtype: of slots."""
    types = {"int32": "i32", "int64": "i64", "int32*": "*i32", "int64*": "*i64"}
    return {argument: types[kind.replace("slot", dtype)] for kind, argument in signature_of(name).arguments}


class CompiledKernel:
    """A kernel, compiled and loaded for the current GPU. It is a `GraphKernel`."""

    def __init__(self, name: str, dtype: str) -> None:
        types = triton_types(name, dtype)
        source = ASTSource(getattr(kernels, name), types | {"tile": "constexpr"}, {"tile": TILE})
        self._compiled = triton.compile(source, options={"enable_fp_fusion": False})  # said, or Triton 3.9 warns
        self._compiled[(1, 1, 1)]  # loads it: a first launch inside a capture could not
        self._arguments = KernelArguments(signature_of(name).layout)
        self.name, self.tile = name, TILE
        self.function = int(self._compiled.function)
        self.num_threads = 32 * int(self._compiled.metadata.num_warps)
        self.shared_bytes = int(self._compiled.metadata.shared)
        self.num_extra = num_parameters(self._compiled.asm["ptx"]) - len(types)

    def __call__(self, grid: Grid, arguments: Sequence[int], stream: int) -> None:
        self._arguments.set(arguments)  # raises where a value does not fit; some versions of Triton cut it off
        self._compiled[(*grid, 1)](*arguments, TILE, stream=stream)


def num_parameters(ptx: str) -> int:
    """Return how many parameters a kernel has: Triton appends pointers to memory that these kernels do not need."""
    return len(set(re.findall(r"_param_\d+", ptx)))


@cache
def compiled(device: int, name: str, dtype: str) -> CompiledKernel:
    """Return the kernel of a device, which is current; its tables share it."""
    return CompiledKernel(name, dtype)


class TorchDriver:
    """One GPU. The layer makes it the current one where that matters."""

    is_emulated = False
    is_mapped = True
    overlaps = False
    many_slots = INT32_MAX
    change_sizes: tuple[int, ...] = ()
    variants: frozenset[str] = frozenset()

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)

    # Memory.

    def full(self, size: int, value: int, dtype: str) -> Any:
        return torch.full((size,), value, dtype=getattr(torch, dtype), device=self.device)

    def fill(self, array: Any, value: int, stream: int) -> None:
        with torch.cuda.stream(self._stream(stream)):
            array.fill_(value)

    def upload(self, array: IntArray) -> Any:
        return torch.tensor(array, device=self.device)

    def download(self, array: Any) -> IntArray:
        self.synchronize()
        found: IntArray = torch.as_tensor(array, device=self.device).cpu().numpy()
        return found

    def address(self, array: Any) -> int:
        return address_of(array)

    def host_block(self, entries: int) -> HostBlock:
        memory = torch.empty(entries, dtype=torch.int32, pin_memory=True)  # kernels reach it by the host's address
        copy = None if self.is_mapped else torch.empty(entries, dtype=torch.int32, device=self.device)
        return HostBlock(memory.numpy(), (memory if copy is None else copy).data_ptr(), copy, memory)

    def send(self, block: HostBlock, entries: int, stream: int) -> None:
        if block.copy is not None:
            with torch.cuda.stream(self._stream(stream)):
                block.copy[:entries].copy_(block.owner[:entries], non_blocking=True)

    def copy_in(self, values: IntArray, target: Any, stream: int) -> None:
        with torch.cuda.stream(self._stream(stream)):
            target.copy_(torch.tensor(values))  # torch waits, as this memory is not pinned

    # Streams.

    def current(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.device(self.device)
        return context

    def is_current(self) -> bool:
        return bool(torch.cuda.current_device() == self.device.index)

    def stream(self, handle: int | None) -> int:
        if handle is None:
            return int(torch.cuda.current_stream(self.device).cuda_stream)
        return 0 if handle == 1 else handle  # both are the legacy default stream

    def _stream(self, handle: int) -> Any:
        if handle == 0:  # which ExternalStream takes for "make a new one"
            return torch.cuda.default_stream(self.device)
        return torch.cuda.ExternalStream(handle, device=self.device)

    def is_capturing(self, stream: int) -> bool:
        if stream == 0:  # it cannot be captured, and a question about it breaks captures of others
            return False
        with torch.cuda.stream(self._stream(stream)):
            return bool(torch.cuda.is_current_stream_capturing())

    def order(self, before: int, after: int) -> None:
        self._stream(after).wait_event(self.mark(before))

    def mark(self, stream: int) -> Any:
        event = torch.cuda.Event()
        event.record(self._stream(stream))
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def check(self, stream: int) -> None:
        self._stream(stream).query()  # raises what the device has run into

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    # Kernels.

    def kernel(self, name: str, options: KernelOptions) -> CompiledKernel:
        return compiled(self.device.index, name, options.dtype)  # which serves tables with whatever features

    def gather_blocks(self, num_rows: int, num_groups: int, width: int) -> int:
        raise NotImplementedError  # there is no "step_batch" in `variants`


class InterpreterDriver(EmulatedDriver):
    """The layer's emulated memory and streams, and the kernels in Triton's interpreter."""

    def kernel(self, name: str, options: KernelOptions) -> EmulatedKernel:
        function, types = getattr(kernels, name), triton_types(name, options.dtype).values()

        def run(grid: Grid, arguments: Sequence[int]) -> None:
            function[grid](*map(interpreted, arguments, types), INTERPRETED_TILE)

        return EmulatedKernel(self, name, INTERPRETED_TILE, run)


def interpreted(value: int, kind: str) -> Any:
    """Return an argument as the interpreter takes it: a number, or a tensor of 8 bytes at an address.

    Of arrays at one address, as empty ones may be, the interpreter takes the first one's memory for all: it is as long.
    """
    if not kind.startswith("*"):
        return value
    memory: Any = (ctypes.c_uint8 * 8).from_address(value)
    return torch.from_numpy(np.frombuffer(memory, np.int32 if kind == "*i32" else np.int64))
