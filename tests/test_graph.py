"""What a fused step asks of the CUDA driver, on a machine without one."""

# ruff: noqa: N802 - the driver's own names
from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from blocktable import StepGraph


class Driver(ModuleType):
    """A driver of one version, on a GPU of one compute capability, that remembers how nodes were ordered.

    Attributes:
        befores: what each kernel node was told to wait for, in full.
        edges: (before, after, port, type) of what was ordered otherwise.
    """

    def __init__(self, version: int, capability: int) -> None:
        super().__init__("cuda.bindings.driver")
        self.version, self.capability = version, capability
        self.befores: list[list[int]] = []
        self.edges: list[tuple[int, int, int, int]] = []
        self.CUgraphEdgeData = SimpleNamespace
        self.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC = 1
        self.CUgraphDependencyType = SimpleNamespace(CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC=1)
        self.CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75)

    def cuDriverGetVersion(self) -> Any:
        return 0, self.version

    def cuCtxGetDevice(self) -> Any:
        return 0, 0

    def cuDeviceGetAttribute(self, kind: int, device: int) -> Any:
        return 0, self.capability

    def cuGraphCreate(self, flags: int) -> Any:
        return 0, "graph"

    def cuGraphAddKernelNode(self, graph: str, before: list[int], num_before: int, params: Any) -> Any:
        assert num_before == len(before)
        self.befores.append(before)
        return 0, len(self.befores) - 1

    def cuGraphAddDependencies(
        self, graph: str, before: list[int], after: list[int], edges: list[Any], number: int
    ) -> Any:
        if self.version < 12030:
            raise RuntimeError('Function "cuGraphAddDependencies_v2" not found')
        assert len(before) == len(after) == len(edges) == number
        self.edges += [(a, b, e.from_port, e.type) for a, b, e in zip(before, after, edges, strict=True)]
        return (0,)

    def cuGraphInstantiate(self, graph: str, flags: int) -> Any:
        return 0, "exec"

    def cuGraphExecDestroy(self, graph: str) -> Any:
        return (0,)

    def cuGraphDestroy(self, graph: str) -> Any:
        return (0,)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("version", [12020, 12030, 13000])
@pytest.mark.parametrize("capability", [8, 9, 10])
def test_kernels_overlap_only_where_gpu_and_driver_can(
    capability: int, version: int, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules: R9, R21."""
    driver = Driver(version, capability)
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver = driver
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", bindings), ("cuda.bindings.driver", driver)):
        monkeypatch.setitem(sys.modules, name, module)
    nodes: Any = [SimpleNamespace(params=number) for number in range(3)]
    graph = StepGraph(nodes, overlaps=overlaps)
    assert graph.overlaps == (overlaps and capability >= 9 and version >= 12030)
    if graph.overlaps:
        assert (driver.befores, driver.edges) == ([[], [], []], [(0, 1, 1, 1), (1, 2, 1, 1)])
    else:
        assert (driver.befores, driver.edges) == ([[], [0], [1]], [])
