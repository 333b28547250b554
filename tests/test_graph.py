"""What a fused step asks of the CUDA driver, on a machine without one."""

# ruff: noqa: N802 - the driver's own names
from __future__ import annotations

import _thread
import ctypes
import importlib
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import blocktable.device.graph
import blocktable.inputs
from blocktable import BlockTable, BlockTableConfig, KVCacheGroup
from blocktable.device import DeviceBackend, EmulatedDriver, KernelOptions, signature_of
from blocktable.device.graph import NativeKernel, StepGraph


class Driver(ModuleType):
    """A driver of one version, on a GPU of one compute capability, that remembers how nodes were ordered.

    Attributes:
        befores: what each kernel node was told to wait for, in full.
        edges: (before, after, port, type) of what was ordered otherwise.
        updates: node, function and blocks of each node that was set anew.
        launches: of graphs.
    """

    def __init__(self, version: int, capability: int) -> None:
        super().__init__("cuda.bindings.driver")
        self.version, self.capability = version, capability
        self.befores: list[list[int]] = []
        self.edges: list[tuple[int, int, int, int]] = []
        self.updates: list[tuple[int, int, int]] = []
        self.kernels: list[Any] = []
        self.status = 0
        self.launches = 0
        self.CUDA_KERNEL_NODE_PARAMS = Params
        self.CUfunction = self.CUresult = int
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
        return 0, 17

    def cuGraphExecDestroy(self, graph: str) -> Any:
        return (0,)

    def cuGraphDestroy(self, graph: str) -> Any:
        return (0,)

    def set_params(self, graph: int, node: int | None, address: int | None) -> int:
        params = Params.made[address or 0]  # 0 comes as None
        self.updates.append((node or 0, params.func, params.gridDimX))
        return 0

    def launch(self, graph: int, stream: int) -> int:
        self.launches += 1
        return self.status

    def launch_kernel(self, function: int, *sizes: Any) -> int:
        self.kernels.append((function, *sizes))
        return self.status


class Params(SimpleNamespace):
    """A kernel node's parameters, found by what stands for their address."""

    made: ClassVar[list[Any]] = []

    def getPtr(self) -> int:
        self.made.append(self)
        return len(self.made) - 1


class GraphKernel:
    """A kernel that is only ever a node."""

    num_threads, shared_bytes, num_extra, tile = 128, 0, 0, 128

    def __init__(self, name: str = "apply_changes") -> None:
        self.name = name
        self.function = hash(name)

    def __call__(self, grid: Any, arguments: Any, stream: int) -> None:
        """Nothing is run."""


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what puts a driver in place of CUDA's."""

    def install(driver: Driver) -> Driver:
        bindings: Any = ModuleType("cuda.bindings")
        bindings.driver = driver
        modules = {"cuda": ModuleType("cuda"), "cuda.bindings": bindings, "cuda.bindings.driver": driver}
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        # As the driver's own: functions with an address.
        calls = [
            ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * number)(call)
            for call, number in ((driver.set_params, 3), (driver.launch, 2))
        ]
        monkeypatch.setattr(blocktable.device.graph, "native_calls", lambda: calls)
        monkeypatch.setattr(blocktable.device.graph, "native_launch", lambda: driver.launch_kernel)
        return driver

    return install


def launch(kernel: Any, value: int = 0, blocks: int = 1) -> Any:
    return kernel, (blocks, 1), (value,) * len(signature_of(kernel.name).arguments)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("version", [12020, 12030, 13000])
@pytest.mark.parametrize("capability", [8, 9, 10])
def test_kernels_overlap_only_where_gpu_and_driver_can(
    capability: int, version: int, overlaps: bool, install: Any
) -> None:
    """Rules: R9.1, R21."""
    driver = install(Driver(version, capability))
    StepGraph([launch(GraphKernel()) for _ in range(3)], overlaps=overlaps)
    if overlaps and capability >= 9 and version >= 12030:
        assert (driver.befores, driver.edges) == ([[], [], []], [(0, 1, 1, 1), (1, 2, 1, 1)])
    else:
        assert (driver.befores, driver.edges) == ([[], [0], [1]], [])


@pytest.fixture(params=["numpy", "compiled"])
def host_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test on each host path."""
    monkeypatch.setenv("BLOCKTABLE_HOST_PATH", request.param)
    if request.param == "compiled" and find_spec("blocktable_compiled.launching") is None:
        pytest.skip("the host path is not compiled here")
    return str(request.param)


def test_only_what_has_changed_is_set_anew(install: Any, host_path: str) -> None:
    """A launch is set where it is another object; a node may change its kernel and grid. Rules: R21."""
    driver = install(Driver(13000, 9))
    first, second = GraphKernel(), GraphKernel("step_batch")
    launches = [launch(first), launch(second)]
    graph = StepGraph(launches).launcher()
    assert type(graph).__name__ == {"numpy": "StepGraph", "compiled": "GraphLauncher"}[host_path]
    graph.run(launches[0], launches[1:], 7)
    driver.updates.clear()
    graph.run(launches[0], launches[1:], 7)
    assert (driver.updates, driver.launches) == ([], 2)
    graph.run(launches[0], launches[1:], 7, is_refilled=True)
    assert driver.updates.pop() == (0, first.function, 1)
    other = GraphKernel("apply_changes_240")
    graph.run(launch(other, 1, 3), launches[1:], 7)
    assert driver.updates == [(0, other.function, 3)]
    graph.run(launches[0], [launch(second, 5)], 7)
    assert driver.updates[1:] == [(0, first.function, 1), (1, second.function, 1)]
    driver.status = 700
    with pytest.raises(RuntimeError, match="CUDA driver: 700"):
        graph.run(launches[0], launches[1:], 7)


def test_a_native_launch_says_all_of_it(install: Any) -> None:
    """Rules: R21."""
    driver, kernel = install(Driver(13000, 9)), GraphKernel()
    native = NativeKernel(kernel)
    native((3, 2), launch(kernel, 5)[2], 7)
    function, *sizes, pointers, extra = driver.kernels[0]
    assert (function, sizes, extra) == (kernel.function, [3, 2, 1, 128, 1, 1, 0, 7], None)
    assert pointers == native._arguments.pointers
    driver.status = 700
    with pytest.raises(RuntimeError, match="cuLaunchKernel of apply_changes returned 700"):
        native((1, 1), launch(kernel)[2], 7)


class Gpu(EmulatedDriver):
    """Host memory that passes for a GPU's, whose kernels are only ever nodes."""

    is_emulated, overlaps = False, True
    variants = frozenset({"step_batch"})

    def kernel(self, name: str, options: KernelOptions) -> Any:
        return GraphKernel(name)

    def is_capturing(self, stream: int) -> bool:
        return False


class GpuBackend(DeviceBackend):
    """A backend over it."""

    name = "gpu"

    def why_unavailable(self) -> None:
        return None

    def place(self, device: Any) -> int:
        return 0

    def make_driver(self, place: int) -> Gpu:
        return Gpu()

    def graph_problem(self) -> None:
        return None


class Tensor:
    """As torch's, on a GPU."""

    is_cuda, device = True, "cuda:0"

    def __init__(self, *shape: int, dtype: str, address: int = 4096) -> None:
        self.shape, self.dtype, self.address = shape, dtype, address

    def is_contiguous(self) -> bool:
        return True

    def numel(self) -> int:
        return self.shape[0]

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def data_ptr(self) -> int:
        return self.address


CONFIG = BlockTableConfig(
    groups=[KVCacheGroup(block_size=16)], max_num_reqs=8, max_num_batched_tokens=64, max_model_len=1 << 20
)


def make_inputs(turn: int = 0) -> Any:
    """Return the inputs of a step, which lie elsewhere in each turn."""
    dtypes = (4, "int32"), (5, "int32"), (4, "int64")
    return [Tensor(length, dtype=dtype, address=4096 * (turn + 1)) for length, dtype in dtypes]


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize(("arrays", "most"), [("the same", 15), ("made anew", 15), ("elsewhere", 19)])
def test_a_steady_step_is_few_calls(
    arrays: str, most: int, appends: bool, install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 15 Python calls of ours from step() to the graph's launch, with the compiled host path.

    Four more where the arrays lie elsewhere than in the step before: they are looked at, and one kernel gets other
    arguments. Rules: R17, R21.
    """
    monkeypatch.setenv("BLOCKTABLE_STAGING", "mapped")
    # Modes of torch are kept out by a call in C.
    torch = SimpleNamespace(Tensor=Tensor, _C=SimpleNamespace(DisableTorchFunction=_thread.RLock))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(blocktable.inputs, "_READERS", {})
    monkeypatch.setattr(blocktable.inputs, "_TENSORS", {})
    driver = install(Driver(13000, 9))
    table = BlockTable(CONFIG, GpuBackend(is_emulated=False))
    if appends and type(table._rows).__name__ != "CompiledRows":
        pytest.skip("the host path is not compiled here")
    rows, ids, ones = np.arange(4), np.arange(1, 5, dtype=np.int32), np.ones(4, np.int64)
    called: list[str] = []

    def note(frame: Any, event: str, argument: object) -> None:
        ours = frame.f_code.co_filename != __file__ or frame.f_code.co_name == "is_capturing"
        if event == "call" and ours:
            called.append(frame.f_code.co_qualname)

    assert table._lender is not None
    table._lender._marks.shown[0] = 1 << 40  # no kernel shows a mark here
    monkeypatch.setattr(table, "_current_stream", lambda: 7)  # a call of torch's, in C
    inputs = make_inputs()
    for _ in range(2):  # the first tensor of a process finds no plan
        table.step(*inputs)
    for turn in range(4):
        if appends:
            table.append_rows(rows, ids, ones)
        if arrays != "the same":
            inputs = make_inputs(0 if arrays == "made anew" else turn + 1)
        launches = driver.launches
        called.clear()
        sys.setprofile(note)
        try:
            table.step(*inputs)
        finally:
            sys.setprofile(None)
        assert driver.launches == launches + 1
        assert len(called) <= most, called


@pytest.mark.torch
def test_a_steady_step_calls_nothing_of_torch_that_a_mode_would_see(
    install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.set_default_device` is such a mode; it takes 2 us for each call that it sees. Rules: R17, R22."""
    torch: Any = importlib.import_module("torch")
    driver, seen = install(Driver(13000, 9)), []

    class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    table = BlockTable(CONFIG, GpuBackend(is_emulated=True))
    idx_mapping, starts = torch.zeros(4, dtype=torch.int32), torch.arange(5, dtype=torch.int32)
    positions, computed = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    with Mode():
        for _ in range(3):
            table.step(idx_mapping, starts, positions)
            table.step(idx_mapping, starts, positions, num_computed_tokens=computed)
            table.step(None, starts, positions)
        assert (len(seen), driver.launches) == (0, 9)
        torch.zeros(1)
        assert seen
