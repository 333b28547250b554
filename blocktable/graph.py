"""A CUDA graph of a few kernels in a row, whose nodes get new parameters before each launch (R21).

What a fused step of a device backend is made of. A launch in flight keeps the parameters it was launched with, so that
nothing has to be staged, marked or waited for. Needs the package cuda-bindings, which CUDA builds of torch and
numba-cuda bring along.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

FIRST_DRIVER_WITH_OVERLAPS = 12030
"""CUDA 12.3, as the driver says it."""


class KernelArguments:
    """A kernel's arguments in one block of memory.

    Args:
        layout: the arguments as `struct` writes them, naturally aligned.

    Attributes:
        addresses: where each argument lies.
    """

    def __init__(self, layout: str) -> None:
        self._layout = layout
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

    def setter(self, first: int, count: int) -> Callable[..., None]:
        """Return what writes `count` of them, from number `first` on: at each step only these change."""
        packer = struct.Struct("@" + self._layout[first : first + count])
        return partial(packer.pack_into, self._memory, self.addresses[first] - self.addresses[0])


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
        overlaps: a kernel says itself from when on the next one may start (`griddepcontrol.launch_dependents`), and the
            next one waits for its end before it reads what it wrote (`griddepcontrol.wait`). Where the GPU cannot, each
            starts when the one before it has ended.

    Attributes:
        overlaps: whether they do.
    """

    def __init__(self, nodes: Sequence[KernelNode], *, overlaps: bool = False) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._graph = _checked(driver.cuGraphCreate(0))
        self.overlaps: bool = overlaps and _can_overlap(driver)
        self._handles: list[Any] = []
        for node in nodes:
            before = [] if self.overlaps else self._handles[-1:]
            self._handles.append(_checked(driver.cuGraphAddKernelNode(self._graph, before, len(before), node.params)))
        if self.overlaps:
            for pair in pairwise(self._handles):
                self._overlap(*pair)
        self._exec = _checked(driver.cuGraphInstantiate(self._graph, 0))
        self._nodes = nodes

    def _overlap(self, before: Any, after: Any) -> None:
        edge = self._driver.CUgraphEdgeData()
        edge.from_port = self._driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
        edge.type = self._driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
        # CUDA 13 gave the name without a number to what was called _v2 in CUDA 12.
        add = getattr(self._driver, "cuGraphAddDependencies_v2", self._driver.cuGraphAddDependencies)
        _checked(add(self._graph, [before], [after], [edge], 1))

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


def _can_overlap(driver: Any) -> bool:
    """Whether a kernel may start while the one before it runs.

    The current GPU must be of compute capability 9 or newer. Drivers before CUDA 12.3 know no such edges.
    """
    if _checked(driver.cuDriverGetVersion()) < FIRST_DRIVER_WITH_OVERLAPS:
        return False
    kind = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    return bool(_checked(driver.cuDeviceGetAttribute(kind, _checked(driver.cuCtxGetDevice()))) >= 9)


def _checked(result: tuple[Any, ...]) -> Any:
    if result[0] != 0:
        raise RuntimeError(f"CUDA driver: {result[0]}")
    return result[1] if len(result) > 1 else None
