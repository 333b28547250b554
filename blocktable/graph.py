"""A CUDA graph of a few kernels in a row, whose nodes get new parameters before each launch (R21).

What a fused step of a device backend is made of. A launch in flight keeps the parameters it was launched with, so that
nothing has to be staged, marked or waited for. Needs the package cuda-bindings, which CUDA builds of torch and
numba-cuda bring along.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np


class KernelArguments:
    """A kernel's arguments in one block of memory.

    Args:
        layout: the arguments as `struct` writes them, naturally aligned.

    Attributes:
        addresses: where each argument lies.
    """

    def __init__(self, layout: str) -> None:
        self._packer = struct.Struct("@" + layout)
        self._memory = ctypes.create_string_buffer(self._packer.size)
        start = ctypes.addressof(self._memory)
        self.addresses: list[int] = [
            start + struct.calcsize("@" + layout[: index + 1]) - struct.calcsize("@" + kind)
            for index, kind in enumerate(layout)
        ]

    def set(self, *values: int) -> None:
        """Write all of them; one that does not fit its type raises."""
        self._packer.pack_into(self._memory, 0, *values)


class KernelNode:
    """One kernel launch: what to run, on which grid, and the memory that holds its arguments.

    Args:
        function: CUfunction handle.
        arguments: address of each argument, in the kernel's order. The memory is the caller's, and stays in place.
        block: threads of a block.
        shared_bytes: dynamic shared memory of a block.
    """

    def __init__(self, function: int, arguments: Sequence[int], block: int, shared_bytes: int = 0) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._addresses = np.array(arguments, np.uint64)
        params = driver.CUDA_KERNEL_NODE_PARAMS()
        params.gridDimX = params.gridDimY = params.gridDimZ = 1
        params.blockDimX, params.blockDimY, params.blockDimZ = block, 1, 1
        params.sharedMemBytes = shared_bytes
        params.kernelParams = self._addresses.ctypes.data
        self.params: Any = params
        self.set_function(function)

    def set_function(self, function: int) -> None:
        """Run another kernel that takes its arguments at the same addresses."""
        self.params.func = self._driver.CUfunction(function)

    def set_grid(self, blocks: int) -> None:
        """Run on that many blocks."""
        self.params.gridDimX = blocks


class StepGraph:
    """An executable graph that runs its nodes one after another.

    Args:
        nodes: the kernels, in order.
    """

    def __init__(self, nodes: Sequence[KernelNode]) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._graph = _checked(driver.cuGraphCreate(0))
        self._handles: list[Any] = []
        for node in nodes:
            before = self._handles[-1:]
            self._handles.append(_checked(driver.cuGraphAddKernelNode(self._graph, before, len(before), node.params)))
        self._exec = _checked(driver.cuGraphInstantiate(self._graph, 0))
        self._nodes = nodes

    def update(self, index: int) -> None:
        """Use a node's present parameters from the next launch on; launches in flight keep theirs."""
        params = self._nodes[index].params
        _checked(self._driver.cuGraphExecKernelNodeSetParams(self._exec, self._handles[index], params))

    def launch(self, stream: int) -> None:
        """Run the graph on a stream, behind what is queued there; returns at once."""
        _checked(self._driver.cuGraphLaunch(self._exec, stream))

    def __del__(self) -> None:
        driver = getattr(self, "_driver", None)
        if driver is not None and hasattr(self, "_exec"):
            driver.cuGraphExecDestroy(self._exec)  # launches in flight finish first
            driver.cuGraphDestroy(self._graph)


def _checked(result: tuple[Any, ...]) -> Any:
    if result[0] != 0:
        raise RuntimeError(f"CUDA driver: {result[0]}")
    return result[1] if len(result) > 1 else None
