"""A CUDA graph of a few kernels in a row, whose nodes get new parameters before each launch (R21).

What a fused step is made of. A launch in flight keeps the parameters it was launched with, so that nothing has to be
staged, marked or waited for. Needs the package cuda-bindings, which CUDA builds of torch and numba-cuda bring along.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from blocktable.device.signatures import Grid, Launch, signature_of
from blocktable.host_path import compiled_part

FIRST_DRIVER_WITH_OVERLAPS = 12030
"""CUDA 12.3, as the driver says it."""


class KernelArguments:
    """A kernel's arguments in one block of memory, naturally aligned, and where each of them lies.

    Args:
        layout: a letter for each argument: "i" int32, "q" int64, "Q" an address, "S" a structure by value, which is
            given as the address of a copy.
        num_extra: further addresses after those, which stay 0.

    Attributes:
        pointers: address of an array that holds the address of each argument, as cuLaunchKernel takes it.
        set: writes all of them; one that does not fit its type raises struct.error.
    """

    def __init__(self, layout: str, *, num_extra: int = 0) -> None:
        self._has_structure = layout.startswith("S")
        packed = layout.removeprefix("S")
        self._present: Sequence[int] = ()
        self._pack = struct.Struct("@" + packed).pack_into
        padded = packed + "Q" * num_extra
        memory: Any = np.zeros(struct.calcsize("@" + padded), np.uint8)
        self._memory = memoryview(memory)
        start: int = memory.ctypes.data
        places = [
            start + struct.calcsize("@" + padded[: index + 1]) - struct.calcsize("@" + kind)
            for index, kind in enumerate(padded)
        ]
        self._pointers = np.array([0] * self._has_structure + places, np.uint64)
        self.pointers: int = self._pointers.ctypes.data
        writer = compiled_part("arguments")
        written = [self.pointers] * self._has_structure + places[: len(packed)]
        self.set: Callable[[Sequence[int]], None] = self._set if writer is None else writer(layout, written).set

    def _set(self, values: Sequence[int]) -> None:
        if self._has_structure:
            self._pointers[0], rest = values[0], values[1:]
            if rest != self._present:  # they hardly ever change
                self._pack(self._memory, 0, *rest)
                self._present = rest
        else:
            self._pack(self._memory, 0, *values)


class NativeKernel:
    """A `GraphKernel` that is launched by the driver's own call: a library's takes several times as long.

    Args:
        kernel: as the backend has loaded it.
    """

    def __init__(self, kernel: Any) -> None:
        self.name: str = kernel.name
        self.tile: int = kernel.tile
        self.function: int = kernel.function
        self.num_threads: int = kernel.num_threads
        self.shared_bytes: int = kernel.shared_bytes
        self.num_extra: int = kernel.num_extra
        self._arguments = KernelArguments(signature_of(kernel.name).layout, num_extra=kernel.num_extra)
        self._launch = native_launch()
        self._kernel = kernel  # whoever loaded it unloads what is not held

    def __call__(self, grid: Grid, arguments: Sequence[int], stream: int) -> None:
        """Launch it. A launch copies its arguments."""
        self._arguments.set(arguments)
        error = self._launch(
            *(self.function, *grid, 1, self.num_threads, 1, 1, self.shared_bytes, stream),
            *(self._arguments.pointers, None),
        )
        if error:
            raise RuntimeError(f"CUDA driver: cuLaunchKernel of {self.name} returned {error}.")


class _Node:
    """One kernel as a node: its parameters, and the memory that holds its arguments."""

    def __init__(self, kernel: Any) -> None:
        from cuda.bindings import driver

        # Those that the compiler has added stay 0.
        self.arguments: KernelArguments = KernelArguments(signature_of(kernel.name).layout, num_extra=kernel.num_extra)
        self._kernel = kernel  # whoever loaded it unloads what is not held
        self.grid: Grid = (1, 1)
        self.launch: Launch | None = None  # the last one that it was set to
        params = driver.CUDA_KERNEL_NODE_PARAMS()
        params.gridDimX = params.gridDimY = params.gridDimZ = 1
        params.blockDimX, params.blockDimY, params.blockDimZ = kernel.num_threads, 1, 1
        params.sharedMemBytes = kernel.shared_bytes
        params.kernelParams = self.arguments.pointers
        params.func = driver.CUfunction(kernel.function)
        self.params: Any = params
        self.params_address: int = params.getPtr()


class StepGraph:
    """An executable graph that runs launches one after another.

    Args:
        launches: the first ones, in order; the kernels are `GraphKernel`s.
        overlaps: a kernel says itself from when on the next one may start (`griddepcontrol.launch_dependents`), and the
            next one waits for its end before it reads what it wrote (`griddepcontrol.wait`). Where the GPU cannot, each
            starts when the one before it has ended.
    """

    def __init__(self, launches: Sequence[Launch], *, overlaps: bool = False) -> None:
        from cuda.bindings import driver

        self._set_params, self._launch = native_calls()
        self._driver = driver
        self._graph = _checked(driver.cuGraphCreate(0))
        overlaps = overlaps and _can_overlap(driver)
        self._present: list[Launch | None] = [None] * len(launches)
        self._rest: Sequence[Launch] = ()  # the last ones, all of them set
        self._nodes: list[dict[Any, _Node]] = [{} for _ in launches]
        self._handles: list[Any] = []
        for nodes, (kernel, grid, arguments) in zip(self._nodes, launches, strict=True):
            node = nodes[kernel] = _Node(kernel)
            node.arguments.set(arguments)
            node.params.gridDimX, node.params.gridDimY = node.grid = grid
            before = [] if overlaps else self._handles[-1:]
            self._handles.append(_checked(driver.cuGraphAddKernelNode(self._graph, before, len(before), node.params)))
        if overlaps:
            for pair in pairwise(self._handles):
                self._overlap(*pair)
        self._exec = _checked(driver.cuGraphInstantiate(self._graph, 0))
        self._exec_address, self._node_addresses = int(self._exec), [int(handle) for handle in self._handles]

    def _overlap(self, before: Any, after: Any) -> None:
        edge = self._driver.CUgraphEdgeData()
        edge.from_port = self._driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
        edge.type = self._driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
        # CUDA 13 gave the name without a number to what was called _v2 in CUDA 12.
        add = getattr(self._driver, "cuGraphAddDependencies_v2", self._driver.cuGraphAddDependencies)
        _checked(add(self._graph, [before], [after], [edge], 1))

    def run(self, first: Launch, rest: Sequence[Launch], stream: int, *, is_refilled: bool = False) -> None:
        """Launch the graph on a stream, after what is queued there; returns immediately.

        A launch that is the same object as last time is left as it is; launches in flight keep their parameters.

        Args:
            first, rest: as many as it was made of. A sequence that is the same object as last time holds the same.
            stream: to launch on.
            is_refilled: whether the structure that the first one takes by value holds something else by now.
        """
        launches: Sequence[Launch] = (first,)
        if rest is not self._rest:
            launches, self._rest = (first, *rest), ()  # until all of them are set
        present = self._present
        for index, launch in enumerate(launches):
            if launch is not present[index] or is_refilled:
                is_refilled = False
                node = self.node(index, launch)
                error = self._set_params(self._exec_address, self._node_addresses[index], node.params_address)
                if error:
                    self.refuse(error)
                present[index] = launch
        self._rest = rest
        error = self._launch(self._exec_address, stream)
        if error:
            self.refuse(error)

    def node(self, index: int, launch: Launch) -> _Node:
        """Return what the node of a place becomes, its parameters and arguments set to a launch."""
        kernel, grid, arguments = launch
        node = self._nodes[index].get(kernel)
        if node is None:
            node = self._nodes[index][kernel] = _Node(kernel)
        if launch is not node.launch:
            node.arguments.set(arguments)
            if grid != node.grid:
                node.params.gridDimX, node.params.gridDimY = node.grid = grid
            node.launch = launch
        return node

    def refuse(self, error: int) -> None:
        """Raise for what the driver has returned."""
        raise RuntimeError(f"CUDA driver: {self._driver.CUresult(error)}")

    def launcher(self) -> Any:
        """Return what runs it: a compiled one, where the host path is; it holds this graph."""
        launcher = compiled_part("graph")
        if launcher is None:
            return self
        calls = [ctypes.cast(call, ctypes.c_void_p).value for call in (self._set_params, self._launch)]
        return launcher(self, *calls, self._exec_address, self._node_addresses)

    def __del__(self) -> None:
        driver = getattr(self, "_driver", None)
        if driver is not None and hasattr(self, "_exec"):
            driver.cuGraphExecDestroy(self._exec)  # launches in flight finish first
            driver.cuGraphDestroy(self._graph)


class DirectLaunches:
    """Runs the launches of a step as they are: in an emulation."""

    def run(self, first: Launch, rest: Sequence[Launch], stream: int, *, is_refilled: bool = False) -> None:
        """Run them, one after another."""
        for kernel, grid, arguments in (first, *rest):
            kernel(grid, arguments, stream)


@cache
def native_calls() -> tuple[Any, Any]:
    """Return the driver's cuGraphExecKernelNodeSetParams and cuGraphLaunch, which every step calls.

    Through ctypes: the package's own functions make an enum in Python for each result. The first never waits, and keeps
    the GIL; the second may, where a thousand launches are queued.
    """
    name = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
    set_params, launch = ctypes.PyDLL(name).cuGraphExecKernelNodeSetParams_v2, ctypes.CDLL(name).cuGraphLaunch
    set_params.argtypes, launch.argtypes = [ctypes.c_void_p] * 3, [ctypes.c_void_p] * 2
    return set_params, launch


@cache
def native_launch() -> Callable[..., int]:
    """Return the driver's cuLaunchKernel."""
    launch = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1").cuLaunchKernel
    launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    found: Callable[..., int] = launch
    return found


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
