"""The Triton backend where there is no GPU: launchers, memory, streams, staging, and what it says without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable_triton import INTERPRET_VARIABLE, TritonBackend, is_emulated

NEEDS_TRITON = pytest.mark.skipif(
    not (importlib.util.find_spec("triton") and importlib.util.find_spec("torch")),
    reason="triton or torch is not installed: tox -e conformance-triton",
)
NEEDS_INTERPRETER = pytest.mark.skipif(
    not (importlib.util.find_spec("triton") and importlib.util.find_spec("torch") and is_emulated()),
    reason="wants Triton's interpreter: tox -e conformance-triton",
)
CONFIG = bt.BlockTableConfig(
    groups=[
        bt.KVCacheGroup(block_size=6, kernel_block_size=3, sliding_window=8),
        bt.KVCacheGroup(block_size=4, slot_mode="ring"),
    ],
    max_num_reqs=5,
    max_num_batched_tokens=80,
    max_model_len=90,
    context_parallel=bt.ContextParallel(world_size=2, rank=1, interleave_size=2),
)


def make_table(backend: Any = None) -> bt.BlockTable:
    made: Any = backend or TritonBackend()
    return bt.BlockTable(CONFIG, made)


# Launchers.


def never_launched(*_: Any) -> None:
    raise AssertionError("launched")


NEVER_LAUNCHED = (never_launched, never_launched)


@NEEDS_TRITON
def test_a_scalar_that_does_not_fit_its_kernel_raises() -> None:
    """Cases: K5."""
    from blocktable_triton import kernels

    with pytest.raises(OverflowError, match="4294967301 does not fit"):
        kernels.launch_scatter_writes(never_launched, 32, 8, 2**32 + 5, 1, 8, None)
    with pytest.raises(OverflowError, match="4294967301 does not fit"):
        kernels.launch_map_slots(NEVER_LAUNCHED, (32, 64), 0, 8, 8, 1, 1, 4, 8, 0, 1, 8, 8, 0, 2**32 + 5, None)


@NEEDS_TRITON
def test_nothing_is_launched_for_nothing() -> None:
    from blocktable_triton import kernels

    kernels.launch_scatter_writes(never_launched, 32, 8, 0, 0, 8, None)
    kernels.launch_map_slots(NEVER_LAUNCHED, (32, 64), 0, 8, 8, 0, 0, 4, 8, 0, 1, 8, 8, 0, 0, None)


@NEEDS_TRITON
@pytest.mark.parametrize("num_slots", [1, 256, 257, 2**31 - 1])
@pytest.mark.parametrize("num_groups", [1, 3, 70000])
def test_no_grid_is_empty_or_overflows(num_slots: int, num_groups: int) -> None:
    """Triton multiplies a grid's sizes as 32-bit ints, and launches nothing where the product is not positive."""
    from blocktable_triton import kernels

    grids: list[tuple[int, ...]] = []

    def kernel(grid: tuple[int, ...], arguments: tuple[int, ...], stream: Any) -> None:
        grids.append(grid)

    kernels.launch_map_slots(
        (kernel, kernel), (128, 1024), 0, 8, 8, 0, 0, 4, 8, 0, num_groups, 8, 8, 0, num_slots, None
    )
    kernels.launch_null_stale_columns(kernel, 32, 8, 0, 0, 4, 8, num_groups, 8, 8, 8, None)
    for x, y, z in grids:
        assert (x >= 1, 1 <= y <= 65535, z) == (True, True, 1)
        assert x * y * 256 <= 2**31
    assert grids[1][0] == 1


# Memory.


class Guard:
    """Refuses every access of an interpreted kernel outside the arrays it was told of."""

    def __init__(self) -> None:
        self.allowed: dict[str, tuple[int, int]] = {}
        self.accesses = 0
        self.is_armed = False

    def allow(self, name: str, array: Any) -> None:
        start = array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data
        self.allowed[name] = (start, start + array.nbytes)

    def check(self, pointers: Any, mask: Any) -> None:
        if not self.is_armed:
            return
        addresses = pointers.data[mask.data].astype(np.int64)
        size = pointers.get_element_ty().primitive_bitwidth // 8
        inside = np.zeros(addresses.shape, np.bool_)
        for start, end in self.allowed.values():
            inside |= (addresses >= start) & (addresses + size <= end)
        self.accesses += addresses.size
        assert inside.all(), f"an access at {addresses[~inside][:3]}, outside of {self.allowed}"


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Guard:
    from triton.runtime.interpreter import InterpreterBuilder

    guard = Guard()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        guard.check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        guard.check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", checked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", checked_store)
    return guard


@pytest.fixture
def guarded(guard: Guard) -> bt.BlockTable:
    """Return a table whose kernels may reach its own memory and nothing else."""
    table = make_table()
    store: Any = table.store
    buffers: Any = table.buffers
    for name, array in {"arena": store.arena, "groups": store.groups, "batch": buffers.batch}.items():
        guard.allow(name, array)
    guard.allow("slots", buffers.slots)
    guard.allow("last mark", store._last_mark)
    guard.allow("shown mark", store._shown.host)
    for index, slot in enumerate(store._writes_ring._slots):
        guard.allow(f"staging {index}", slot.host)
    guard.is_armed = True
    return table


@NEEDS_INTERPRETER
@pytest.mark.parametrize("seed", range(3))
def test_no_kernel_leaves_its_arrays_whatever_they_hold(guarded: bt.BlockTable, guard: Guard, seed: int) -> None:
    """Rules: R13, R15."""
    rng = np.random.default_rng(seed)
    table = guarded
    extremes = np.array([-(2**63), -(2**31), -2, -1, 0, 1, 5, 79, 2**31 - 1, 2**31, 2**32 + 7, 2**62, 2**63 - 1])
    for _ in range(4):
        num_reqs = int(rng.integers(0, 6))
        num_positions = int(rng.integers(0, 81))
        rows = rng.permutation(5)[:3]
        table.set_rows(rows, [rng.integers(1, 99, 6), rng.integers(1, 99, 3)], [[2] * 3, [1] * 3])
        arrays = {
            "idx_mapping": rng.choice(extremes[np.abs(extremes.astype(float)) < 2**31], num_reqs).astype(np.int32),
            "query_start_loc": rng.integers(-5, 90, num_reqs + 1).astype(np.int32),
            "positions": rng.choice(extremes, num_positions),
            "num_computed_tokens": rng.choice([-(2**31), -1, 0, 9, 2**31 - 1], num_reqs).astype(np.int32),
        }
        given = {name: table.backend.from_host(array) for name, array in arrays.items()}
        for name, array in given.items():
            guard.allow(name, array)
        before = guard.accesses
        table.step(**given, num_reqs_padded=int(rng.integers(num_reqs, 6)))
        assert guard.accesses > before
    table.verify()


@NEEDS_INTERPRETER
def test_an_overrun_by_one_entry_is_seen(guarded: bt.BlockTable, guard: Guard) -> None:
    starts, positions = guarded.backend.from_host(np.array([0, 3], np.int32)), np.zeros(3, np.int64)
    guard.allow("query_start_loc", starts[:1])
    with pytest.raises(Exception, match="an access at"):
        guarded.compute_slot_mappings(None, starts, guarded.backend.from_host(positions))


@NEEDS_INTERPRETER
def test_host_positions_longer_than_the_buffer_are_staged() -> None:
    """Rules: R10, R17."""
    import torch

    table = make_table()
    table.set_row(2, ([7, 8], [9]))
    table.commit()
    positions = np.zeros(500, np.int64)
    out = [torch.full((501,), 7) for _ in CONFIG.groups]
    arrays = (np.array([2], np.int32), np.array([0, 500], np.int32), positions)
    for _ in range(3):
        positions[:] = 2
        table.compute_slot_mappings(*arrays, out=out)
        positions[:] = -1
        assert out[0].tolist() == [7 * 6] * 500 + [-1]
        assert out[1].tolist() == [9 * 4 + 2] * 500 + [-1]


@NEEDS_INTERPRETER
def test_an_array_on_another_device_is_refused() -> None:
    """Rules: R22."""
    import torch

    table = make_table()
    elsewhere = torch.zeros(1, dtype=torch.int32, device="meta")
    with pytest.raises(bt.DtypeError, match="on meta, but this table is on cpu"):
        table.gather(elsewhere)


# Streams.


class Streams:
    """A device whose streams are names, and which notes what is ordered behind what."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.handle = 0
        self.capturing: set[str] = set()
        self.ordered: list[tuple[str, str]] = []
        self._names = {number: f"stream {number}" for number in range(9)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def stream(self, handle: int | None) -> str:
        return self._names[self.handle if handle is None else handle]

    def is_capturing(self, stream: str) -> bool:
        return stream in self.capturing

    def order(self, before: str, after: str) -> None:
        self.ordered.append((before, after))


@pytest.fixture
def streams() -> Streams:
    from blocktable_triton.device import HostDevice

    return Streams(HostDevice())


@pytest.fixture
def store(streams: Streams) -> Any:
    from blocktable_triton.block_store import TritonBlockStore

    return TritonBlockStore(CONFIG, streams, emulated=True)


def nothing() -> bt.Writes:
    empty = np.empty(0, np.int32)
    return bt.Writes(CONFIG.arena, empty.astype(np.int64), empty, empty)


def batch(array: Callable[[Any], Any]) -> bt.Batch:
    idx, starts, positions = (array(np.array(x, t)) for x, t in (([0], "i4"), ([0, 1], "i4"), ([0], "i8")))
    return bt.Batch(idx, starts, positions, 1, 1, None, 1)


@NEEDS_INTERPRETER
def test_a_change_of_stream_is_ordered_once(store: Any, streams: Streams) -> None:
    """Rules: R22."""
    for handle in (3, 3, 4, 4, 3):
        store.write(nothing(), stream=handle)
    streams.handle = 4
    store.write(nothing(), stream=None)
    assert streams.ordered == [("stream 3", "stream 4"), ("stream 4", "stream 3"), ("stream 3", "stream 4")]


@NEEDS_INTERPRETER
def test_a_capture_takes_no_changes_no_host_arrays_and_one_stream(store: Any, streams: Streams) -> None:
    """Rules: R21, R22."""
    out = store.create_buffers()
    given = batch(streams.upload)
    store.write(nothing(), stream=3)
    streams.capturing = {"stream 3", "stream 4"}
    with pytest.raises(bt.BlockTableError, match=r"commit\(\) cannot be captured"):
        store.write(nothing(), stream=3)
    with pytest.raises(bt.BlockTableError, match="cannot be captured"):
        store.reset_buffers(out, stream=3)
    with pytest.raises(bt.BlockTableError, match="host arrays cannot be captured"):
        store.gather(batch(lambda array: array), out, stream=3)
    store.gather(given, out, stream=3)
    for handle in (4, 5):  # one that captures too, and one that does not
        with pytest.raises(bt.BlockTableError, match="cannot change stream inside a capture"):
            store.gather(given, out, stream=handle)
    streams.capturing = set()
    store.gather(given, out, stream=5)
    assert streams.ordered == [("stream 3", "stream 5")]


@NEEDS_INTERPRETER
def test_no_stream_is_drawn_into_a_capture_that_began_elsewhere(store: Any, streams: Streams) -> None:
    """A mark on a stream that captures by now would capture what waits for it. Rules: R22."""
    store.write(nothing(), stream=3)
    streams.capturing = {"stream 3"}
    with pytest.raises(bt.BlockTableError, match="cannot change stream inside a capture"):
        store.write(nothing(), stream=4)
    assert streams.ordered == []


# The fused step.


@pytest.fixture
def fused() -> Any:
    """Return a table on the fused path, a function that makes a step, and the calls of its store so far."""
    backend: Any = TritonBackend()
    table: Any = bt.BlockTable(CONFIG, backend, step_path="fused")
    calls: list[str] = []

    def note(name: str) -> None:
        call = getattr(table.store, name)

        def noted(*args: Any, **options: Any) -> None:
            calls.append(name)
            call(*args, **options)

        setattr(table.store, name, noted)

    note("write")
    note("gather")
    given = [table.backend.from_host(np.array(x, t)) for x, t in (([1], "i4"), ([0, 2], "i4"), ([1, 7], "i8"))]

    def step(*blocks: int) -> tuple[Any, ...]:
        calls.clear()
        if blocks:
            table.set_row(1, ([], blocks))
        slots = table.step(*given).slot_mappings[1].tolist()[:2]
        return *calls, *slots, int(table.store._shown.host[0]), table.store._writes_ring._marks

    return SimpleNamespace(table=table, step=step)


@NEEDS_INTERPRETER
def test_changes_of_a_fused_step_travel_in_a_ring_whose_marks_are_numbers(
    fused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules: R9, R21."""
    assert fused.step() == (-1, -1, 0, [None, None])
    assert fused.step(5, 6) == (21, 27, 1, [1, None])
    assert fused.step(7, 8) == (29, 35, 2, [1, 2])
    assert fused.step() == (29, 35, 2, [1, 2])
    for turn, marks in ((3, [3, 2]), (4, [3, 4]), (5, [5, 4])):
        assert fused.step(turn, 9) == (4 * turn + 1, 39, turn, marks)
    monkeypatch.setattr(fused.table.store.device, "is_capturing", lambda stream: True)
    assert fused.step() == ("gather", 21, 39, 5, [5, 4])
    with pytest.raises(bt.BlockTableError, match="pending changes cannot be captured"):
        fused.step(7, 8)


@NEEDS_INTERPRETER
def test_a_fused_step_waits_for_the_oldest_of_its_slots(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R9."""
    waited: list[int] = []
    monkeypatch.setattr(fused.table.store._marks, "wait", lambda mark, check: waited.append(mark))
    for turn in range(1, 6):
        fused.step(turn)
    assert waited == [1, 2, 3]


@NEEDS_INTERPRETER
def test_changes_of_a_fused_step_are_written_first_where_mapped_memory_does_not_work(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Rules: R9."""
    monkeypatch.setenv("BLOCKTABLE_STAGING", "copy")
    fused = request.getfixturevalue("fused")
    assert fused.step(5, 6) == ("write", 21, 27, 0, [None, None])
    assert fused.step() == (21, 27, 0, [None, None])


@NEEDS_INTERPRETER
def test_a_fused_step_is_plain_launches_where_triton_takes_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R21."""
    from blocktable_triton import device

    monkeypatch.setattr(device.EmulatedKernel, "graph_problem", "this Triton compiles for clusters")
    monkeypatch.setattr(device.HostDevice, "graph_problem", "this Triton compiles for clusters")
    backend = TritonBackend()
    table: Any = run_steps(backend)
    assert table.buffers.fused is None
    assert "steps are separate launches: this Triton compiles for clusters" in backend.fallbacks


@NEEDS_TRITON
def test_a_graph_gets_new_parameters_where_they_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R21."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="the package cuda-bindings is not installed")
    from blocktable_triton import fused_step

    calls: list[tuple[Any, ...]] = []

    def set_params(graph: int, node: int, params: Any) -> tuple[int]:
        layout = layouts[node]
        addresses = (ctypes.c_void_p * len(layout)).from_address(int(params.kernelParams))
        cells = [ctypes.string_at(at, struct.calcsize(kind)) for at, kind in zip(addresses, layout, strict=True)]
        values = [int.from_bytes(cell, "little", signed=True) for cell in cells]
        calls.append((node, params.gridDimX, params.blockDimX, params.sharedMemBytes, values))
        return (0,)

    def launch(graph: int, stream: int) -> tuple[int]:
        calls.append(("launch", stream))
        return (0,)

    edges: list[tuple[int, int, int]] = []

    def add_node(graph: int, before: list[int], count: int, params: Any) -> tuple[int, int]:
        assert count == len(before)
        edges.extend((one, int(params.func), 0) for one in before)
        return 0, int(params.func)

    def add_edge(graph: int, before: list[int], after: list[int], data: list[Any], count: int) -> tuple[int]:
        assert data[0].from_port == int(data[0].type)
        edges.append((before[0], after[0], int(data[0].type)))
        return (0,)

    answers: dict[str, Any] = {
        "cuGraphAddDependencies": add_edge,
        "cuDriverGetVersion": lambda: (0, 13000),
        "cuCtxGetDevice": lambda: (0, 0),
        "cuDeviceGetAttribute": lambda kind, device: (0, 9),
        "cuGraphCreate": lambda flags: (0, 1),
        "cuGraphInstantiate": lambda graph, flags: (0, 2),
        "cuGraphAddKernelNode": add_node,
        "cuGraphExecKernelNodeSetParams": set_params,
        "cuGraphLaunch": launch,
        "cuGraphExecDestroy": lambda graph: (0,),
        "cuGraphDestroy": lambda graph: (0,),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(driver, name, answer)
    layouts, high = {77: "qiiiiiqiqqQQ", 88: "iqQQ"}, 2**46 + 8
    first, second = (
        SimpleNamespace(handle=handle, layout=layout, num_threads=128, shared_bytes=16, scratch=(0, 0))
        for handle, layout in layouts.items()
    )
    fixed, last = (high, 24), high + 16
    runner = fused_step.GraphRunner((first, second), fixed, last, overlaps=True)
    assert edges == [(77, 88, 1)]  # at the port and of the kind that let the second start before the first has ended
    edges.clear()
    monkeypatch.setattr(driver, "cuDeviceGetAttribute", lambda kind, device: (0, 8))
    fused_step.GraphRunner((first, second), fixed, last, overlaps=True)
    assert edges == [(77, 88, 0)]
    stream = SimpleNamespace(cuda_stream=5)
    step, nothing = (4, (7, high)), (0, 0, 0, 0, 0)
    runner.run(2, last, nothing, 0, step, stream)
    runner.run(2, last, nothing, 0, step, stream)
    runner.run(3, high + 8, [1, 2, 3, 4, 5], 6, step, stream)
    runner.run(3, high + 8, [1, 0, 0, 0, 0], 7, step, stream)
    runner.run(2, last, nothing, 0, step, stream)
    runner.run(2, last, nothing, 0, (5, (8, high)), stream)
    assert calls == [
        (77, 2, 128, 16, [last, 0, 0, 0, 0, 0, *fixed, 0, last, 0, 0]),
        (88, 4, 128, 16, [7, high, 0, 0]),
        ("launch", 5),
        ("launch", 5),
        (77, 3, 128, 16, [high + 8, 1, 2, 3, 4, 5, *fixed, 6, last, 0, 0]),
        ("launch", 5),
        (77, 3, 128, 16, [high + 8, 1, 0, 0, 0, 0, *fixed, 7, last, 0, 0]),
        ("launch", 5),
        (77, 2, 128, 16, [last, 0, 0, 0, 0, 0, *fixed, 0, last, 0, 0]),
        ("launch", 5),
        (88, 5, 128, 16, [8, high, 0, 0]),
        ("launch", 5),
    ]


@pytest.mark.parametrize(
    ("cuda", "has_bindings", "is_fused"), [("13.0", True, True), (None, True, False), ("13.0", False, False)]
)
def test_the_fused_step_is_declared_where_cuda_and_its_bindings_are(
    cuda: str | None, has_bindings: bool, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules: R21."""
    torch: Any = ModuleType("torch")
    torch.version = SimpleNamespace(cuda=cuda, hip=None if cuda else "7.0")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delenv(INTERPRET_VARIABLE, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_bindings or name == "torch" else None)
    assert ("fused_step" in TritonBackend().capabilities) is is_fused


# Staging.


@pytest.fixture
def hiding(monkeypatch: pytest.MonkeyPatch) -> type:
    """Mapped memory of which kernels see only what it held at first."""
    from blocktable_triton import device

    class HidingDevice(device.HostDevice):
        def staging_slot(self, entries: int) -> Any:
            slot = super().staging_slot(entries)
            if self.is_mapped:
                slot.host = np.empty(entries, np.int32)
            return slot

    monkeypatch.setattr(device, "HostDevice", HidingDevice)
    return HidingDevice


def run_steps(backend: TritonBackend) -> bt.BlockTable:
    """Compare a few steps with the numpy backend."""
    tables = make_table(backend), bt.BlockTable(CONFIG, "numpy")
    for turn in range(5):
        got = []
        for table in tables:
            table.set_row(turn, ([turn + 1, 9, turn + 5], [3, turn + 2]))
            arrays = (np.array([turn, 0], np.int32), np.array([0, 30, 33], np.int32), np.arange(33))
            step = table.step(*arrays)
            got.append([table.backend.to_host(array) for array in (*step.block_tables, *step.slot_mappings)])
        for ours, theirs in zip(*got, strict=True):
            assert np.array_equal(ours, theirs)
        tables[0].verify()
    return tables[0]


@NEEDS_INTERPRETER
@pytest.mark.parametrize(("staging", "is_mapped"), [("auto", True), ("mapped", True), ("copy", False)])
def test_changes_arrive_however_they_travel(staging: str, is_mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R9."""
    monkeypatch.setenv("BLOCKTABLE_STAGING", staging)
    backend = TritonBackend()
    table: Any = run_steps(backend)
    assert table.store.device.is_mapped is is_mapped
    assert bool(backend.fallbacks) is not is_mapped


@NEEDS_INTERPRETER
def test_mapped_memory_that_hides_later_writes_is_found_out(hiding: type) -> None:
    """Cases: M4. Rules: R9."""
    backend = TritonBackend()
    table: Any = run_steps(backend)
    assert hiding in type(table.store.device).__mro__
    assert table.store.device.is_mapped is False
    assert backend.fallbacks == ("changes travel in pinned memory and copies: mapped memory is not used here",)


@NEEDS_INTERPRETER
def test_staging_by_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTABLE_STAGING", "params")
    with pytest.raises(bt.ArgumentError, match="choose auto, mapped or copy"):
        make_table()


# What it says where it cannot run.


@pytest.mark.parametrize("missing", ["triton", "torch"])
def test_a_missing_package_is_said_with_the_remedy(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases: K7."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else object())
    said = TritonBackend().why_unavailable()
    assert said == f"the package {missing} is not installed; install blocktable[triton]."


@pytest.mark.parametrize(
    ("found", "cuda", "hip", "said"),
    [
        (True, "13.0", None, None),
        (False, "13.0", None, "torch finds no GPU or no driver; run it where one is, or set TRITON_INTERPRET=1"),
        (False, None, "7.0", "torch finds no GPU or no driver"),
        (False, None, None, "torch 9.9 is a build without GPUs; install one for CUDA or ROCm, or set"),
    ],
)
def test_no_gpu_and_no_build_for_one_say_the_remedy(
    found: bool, cuda: str | None, hip: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases: K7."""
    torch: Any = ModuleType("torch")
    torch.__version__ = "9.9"
    torch.version = SimpleNamespace(cuda=cuda, hip=hip)
    torch.cuda = SimpleNamespace(is_available=lambda: found)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv(INTERPRET_VARIABLE, raising=False)
    reason = TritonBackend().why_unavailable()
    assert reason is None if said is None else str(reason).startswith(said), reason
    assert "\n" not in str(reason)


@pytest.mark.parametrize("word", ["1", "true", "ON", "0", "", "false"])
def test_the_interpreter_is_asked_for_in_tritons_own_words(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERPRET_VARIABLE, word)
    assert is_emulated() is (word in {"1", "true", "ON"})
    backend = TritonBackend()
    assert backend.description == ("triton (interpreter)" if is_emulated() else "triton")
    assert ("graph_capture" in backend.capabilities) is not is_emulated()
    if importlib.util.find_spec("triton"):
        import triton

        assert bool(triton.knobs.runtime.interpret) is is_emulated()


@NEEDS_INTERPRETER
def test_an_interpreter_that_was_asked_for_too_late_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERPRET_VARIABLE)
    with pytest.raises(bt.BlockTableError, match="set it before the process starts"):
        TritonBackend().create_block_store(CONFIG)


def test_the_backend_opens_triton_only_when_asked_to_run() -> None:
    source = (
        "import sys, blocktable_triton\nblocktable_triton.TritonBackend()\n"
        "print([name for name in sys.modules if name in ('triton', 'torch')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], env={**os.environ, INTERPRET_VARIABLE: "1"}, capture_output=True, text=True
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


@NEEDS_INTERPRETER
def test_nothing_is_compiled_in_the_interpreter() -> None:
    assert TritonBackend().num_compilations == 0
