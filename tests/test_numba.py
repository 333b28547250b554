"""The Numba backend where there is no GPU: its launchers, its staging, what it says where it cannot run."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blocktable import StepMarks
from blocktable_numba import SIMULATOR_VARIABLE, NumbaBackend

NEEDS_NUMBA = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed: tox -e conformance-numba"
)


def never_launched(*_: Any, **__: Any) -> None:
    raise AssertionError("launched")


def run_simulated(source: str, **environment: str) -> str:
    """Run `source` in a process of its own with Numba's simulator, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        env={**os.environ, SIMULATOR_VARIABLE: "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Launchers.


@NEEDS_NUMBA
def test_a_scalar_that_does_not_fit_its_kernel_raises() -> None:
    """Cases: K5."""
    from blocktable_numba import kernels

    with pytest.raises(OverflowError, match="4294967301 does not fit"):
        kernels.launch_scatter_writes(never_launched, 32, 8, 2**32 + 5, 1, 8, None)
    with pytest.raises(OverflowError, match="4294967301 does not fit"):
        kernels.launch_map_slots(never_launched, 32, None, 8, 8, 1, 1, 4, 8, 0, 1, 8, 8, 0, 2**32 + 5, None)


@NEEDS_NUMBA
def test_no_grid_is_empty() -> None:
    from blocktable_numba import kernels

    grids = []

    def kernel(grid: tuple[int, int], block: tuple[int], args: tuple[Any, ...], stream: Any) -> None:
        grids.append((*grid, *block))

    kernels.launch_scatter_writes(kernel, 32, 8, 0, 0, 8, None)
    kernels.launch_null_stale_columns(kernel, 32, 8, 0, 0, 4, 8, 1, 8, 8, 8, None)
    kernels.launch_gather_block_tables(kernel, 32, 8, None, 0, 0, 4, 8, 1, 8, 8, 8, None)
    assert grids == [(1, 1, 32)] * 3
    kernels.launch_map_slots(never_launched, 32, None, 8, 8, 0, 0, 4, 8, 0, 1, 8, 8, 0, 0, None)


@NEEDS_NUMBA
def test_a_launch_hands_over_the_exact_bytes_of_each_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R21."""
    from blocktable_numba import device, kernels

    seen: list[Any] = []

    def launch(function: Any, *rest: Any) -> tuple[int]:
        addresses = (ctypes.c_void_p * len(kinds)).from_address(rest[8])
        sizes = [4 if str(kind) == "int32" else 8 for kind in kinds]
        cells = [ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
        seen.append((int(function), rest[:8], [int.from_bytes(cell, "little", signed=True) for cell in cells]))
        return (0,)

    monkeypatch.setattr("blocktable_numba.device.driver.cuLaunchKernel", launch)
    kinds = kernels.signature("map_slots", "int64")
    kernel = device.GpuKernel(77, kinds)
    stream = SimpleNamespace(handle=5)
    high = 2**46 + 8
    kernels.launch_map_slots(kernel, 256, None, high, 16, 3, 700, 4, 24, 1, 2, 32, 40, 2**33, 600, stream)
    # With the identity another array of as many entries stands for idx_mapping.
    assert seen == [(77, (3, 2, 1, 256, 1, 1, 0, 5), [high, 0, high, 16, 3, 700, 4, 24, 1, 2, 32, 40, 2**33, 600])]


# The fused step.


class FakeDriver:
    """What a graph asks of the driver, noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from cuda.bindings import driver

        self.calls: list[tuple[Any, ...]] = []
        self.kinds: dict[int, tuple[Any, ...]] = {}
        answers = {
            "cuGraphCreate": lambda flags: (0, 1),
            "cuGraphInstantiate": lambda graph, flags: (0, 2),
            "cuGraphAddKernelNode": lambda graph, before, count, params: (0, int(params.func)),
            "cuGraphAddDependencies": lambda *_: (0,),
            "cuGraphExecKernelNodeSetParams": self._set_params,
            "cuGraphLaunch": self._launch,
            "cuGraphExecDestroy": lambda graph: (0,),
            "cuGraphDestroy": lambda graph: (0,),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(driver, name, answer)

    def _launch(self, graph: int, stream: int) -> tuple[int]:
        self.calls.append(("launch", stream))
        return (0,)

    def _set_params(self, graph: int, node: int, params: Any) -> tuple[int]:
        kinds = self.kinds[node]
        addresses = (ctypes.c_void_p * len(kinds)).from_address(int(params.kernelParams))
        sizes = [4 if str(kind) == "int32" else 8 for kind in kinds]
        cells = [ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
        values = [int.from_bytes(cell, "little", signed=True) for cell in cells]
        self.calls.append((node, params.gridDimX, params.blockDimX, values))
        return (0,)


@NEEDS_NUMBA
def test_a_graph_gets_new_parameters_where_they_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R21."""
    from blocktable_numba import device, fused_step, kernels

    fake = FakeDriver(monkeypatch)
    fake.kinds = {
        handle: kernels.signature(name, "int64") for handle, name in ((77, "apply_changes"), (88, "step_batch"))
    }
    apply_changes, step_batch = (device.GpuKernel(*item) for item in fake.kinds.items())
    stream, high = SimpleNamespace(handle=5), 2**46 + 8
    fixed, last = (high + 8, 6, 7, 2**33, high + 16, 8), high + 24
    runner = fused_step.GraphRunner((apply_changes, step_batch), 128, fixed, last)
    step = [high, 1, high, 1, high, high, *range(2, 6), high, 6, high, 2**33, high, high, 7, 8, 9, high, high]
    launch, nothing = (4, tuple(step)), (0, 0, 0, 0, 0)
    runner.run(2, last, nothing, 0, launch, stream)
    runner.run(2, last, nothing, 0, launch, stream)
    runner.run(3, high, [1, 2, 3, 4, 5], 2**40, launch, stream)
    runner.run(2, last, nothing, 0, launch, stream)
    assert fake.calls == [
        (77, 2, 128, [last, 0, 0, 0, 0, 0, *fixed, 0, last]),
        (88, 4, 128, step),
        ("launch", 5),
        ("launch", 5),
        (77, 3, 128, [high, 1, 2, 3, 4, 5, *fixed, 2**40, last]),
        ("launch", 5),
        (77, 2, 128, [last, 0, 0, 0, 0, 0, *fixed, 0, last]),
        ("launch", 5),
    ]


FUSED = """
import numpy as np
import blocktable as bt
from blocktable_numba import NumbaBackend

config = bt.BlockTableConfig(
    groups=[bt.KVCacheGroup(block_size=4)], max_num_reqs=3, max_num_batched_tokens=8, max_model_len=64
)
table = bt.BlockTable(config, NumbaBackend(), step_path="fused")
store, to_device = table.store, table.backend.from_host
arrays = [to_device(array) for array in (np.array([1], np.int32), np.array([0, 2], np.int32), np.array([1, 6]))]
calls = []
for name in ("write", "gather"):
    def noted(*args, _name=name, _call=getattr(store, name), **kwargs):
        calls.append(_name)
        return _call(*args, **kwargs)
    setattr(store, name, noted)

def step(message):
    calls.clear()
    slots = table.backend.to_host(table.step(*arrays).slot_mappings[0])
    print(message, *calls, *slots[:2], int(store._shown.host[0]), store._writes_ring._marks)

step("empty")
table.set_row(1, [5, 6])
step("two")
table.set_row(1, [7, 8])
step("two")
step("none")
for block_id in (1, 2, 3):
    table.set_row(1, [block_id, 9])
    step("wait")
store.device.is_capturing = lambda stream: True
step("captured")
table.set_row(1, [7, 8])
try:
    step("refused")
except bt.BlockTableError as error:
    print(str(error).partition(":")[0])
"""


@NEEDS_NUMBA
def test_changes_of_a_fused_step_travel_in_a_ring_whose_marks_are_numbers() -> None:
    """Rules: R9, R21."""
    assert run_simulated(FUSED, BLOCKTABLE_STAGING="mapped").splitlines() == [
        "empty -1 -1 0 [None, None]",
        "two 21 26 1 [1, None]",
        "two 29 34 2 [1, 2]",
        "none 29 34 2 [1, 2]",
        "wait 5 38 3 [3, 2]",
        "wait 9 38 4 [3, 4]",
        "wait 13 38 5 [5, 4]",
        "captured gather 13 38 5 [5, 4]",
        "A step with pending changes cannot be captured",
    ]


@NEEDS_NUMBA
def test_changes_of_a_fused_step_are_written_first_where_mapped_memory_does_not_work() -> None:
    """Rules: R9."""
    lines = run_simulated(FUSED, BLOCKTABLE_STAGING="copy").splitlines()
    assert lines[:4] == [
        "empty -1 -1 0 [None, None]",
        "two write 21 26 0 [None, None]",
        "two write 29 34 0 [None, None]",
        "none 29 34 0 [None, None]",
    ]


def test_a_wait_for_a_step_ends_when_the_device_shows_its_number_or_has_failed() -> None:
    """Rules: R9."""
    shown = np.zeros(1, np.int64)
    marks = StepMarks(shown)
    assert [marks.next(), marks.next()] == [1, 2]
    shown[0] = 1
    marks.wait(1, never_launched)
    timer = threading.Timer(0.05, lambda: shown.__setitem__(0, 2))
    start = time.monotonic()
    timer.start()
    marks.wait(2, never_launched)
    assert 0.04 < time.monotonic() - start < 1
    with pytest.raises(AssertionError):
        marks.wait(3, never_launched)


# Staging.


@NEEDS_NUMBA
@pytest.mark.parametrize(("shown", "works"), [((1, 2), True), ((1, 1), False), ((0, 0), False)])
def test_mapped_memory_that_hides_later_writes_is_found_out(shown: tuple[int, ...], works: bool) -> None:
    """Cases: M4."""
    from blocktable_numba import device

    values = iter(shown)
    fake = SimpleNamespace(
        tile=32,
        mapped_slot=lambda entries: device.StagingSlot(np.zeros(entries, np.int32), 8),
        full=lambda *_: None,
        upload=lambda array: None,
        kernel=lambda *_: lambda *_, **__: None,
        address=lambda array: 8,
        stream=lambda handle: None,
        current=nullcontext,
        download=lambda target: [next(values)],
    )
    assert device.mapped_memory_works(fake) is works


def test_every_fallback_on_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SIMULATOR_VARIABLE, raising=False)
    backend = NumbaBackend()
    device = SimpleNamespace(is_mapped=True, staging="pinned memory and copies")
    monkeypatch.setattr(backend, "_device", lambda _: device)
    backend.capabilities = frozenset({"fused_step"})
    assert not list(backend.fallbacks)
    device.is_mapped, backend.capabilities = False, frozenset()
    assert backend.fallbacks == (
        "changes travel in pinned memory and copies: mapped memory is not used here",
        "steps are separate launches: the fused step needs the package cuda-bindings",
    )


COMPARE = """
import numpy as np
import blocktable as bt
from blocktable_numba import NumbaBackend, device

class Hiding(device.SimulatedDevice):
    # Its mapped memory never shows the device what the host writes.
    def mapped_memory_works(self):
        return device.mapped_memory_works(self)
    def mapped_slot(self, entries):
        return device.StagingSlot(np.empty(entries, np.int32), super().mapped_slot(entries).address)

if HIDING:
    device.SimulatedDevice = Hiding
config = bt.BlockTableConfig(
    groups=[bt.KVCacheGroup(block_size=4)], max_num_reqs=3, max_num_batched_tokens=8, max_model_len=64
)
table = bt.BlockTable(config, "blocktable_numba:NumbaBackend")
to_device = table.backend.from_host
for block_id in range(5, 12):
    table.set_row(1, [block_id, block_id + 1])
    arrays = np.array([1], np.int32), np.array([0, 2], np.int32), np.array([1, 6])
    slots = table.backend.to_host(table.step(*map(to_device, arrays)).slot_mappings[0])
    assert slots.tolist() == [4 * block_id + 1, 4 * block_id + 6] + [-1] * 6, slots
    table.verify()
print(table.store.device.is_mapped)
"""


@NEEDS_NUMBA
@pytest.mark.parametrize(
    ("hiding", "staging", "is_mapped"),
    [(True, "auto", False), (False, "auto", True), (False, "copy", False), (False, "mapped", True)],
)
def test_changes_arrive_however_they_travel(hiding: bool, staging: str, is_mapped: bool) -> None:
    """Cases: M4. Rules: R9."""
    printed = run_simulated(f"HIDING = {hiding}\n{COMPARE}", BLOCKTABLE_STAGING=staging)
    assert printed.strip() == str(is_mapped)


@NEEDS_NUMBA
def test_staging_by_parameters_is_refused() -> None:
    source = COMPARE.replace("table = ", "try:\n    bt.", 1).split("to_device")[0].replace("bt.bt.", "bt.")
    source += "except bt.ArgumentError as error:\n    print(error)\n"
    assert "choose auto, mapped or copy" in run_simulated("HIDING = False\n" + source, BLOCKTABLE_STAGING="params")


# What it says where it cannot run.


def test_a_missing_package_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases: K7."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "numba-cuda is not installed; install blocktable[numba]" in str(NumbaBackend().why_unavailable())


def _fake_numba(monkeypatch: pytest.MonkeyPatch, *, simulated: bool = False, **cuda: Any) -> None:
    modules = {name: ModuleType(name) for name in ("numba", "numba.cuda", "numba.cuda.core")}
    modules["numba"].cuda = modules["numba.cuda"]  # type: ignore[attr-defined]
    modules["numba.cuda.core"].config = SimpleNamespace(ENABLE_CUDASIM=int(simulated))  # type: ignore[attr-defined]
    for name, value in {"cuda_error": lambda: None, "gpus": [0], "is_available": lambda: True, **cuda}.items():
        setattr(modules["numba.cuda"], name, value)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv(SIMULATOR_VARIABLE, raising=False)


class _NoDriver:
    def __len__(self) -> int:
        raise RuntimeError("Error at driver init: \nno CUDA-capable device is detected (100):")


@pytest.mark.parametrize(
    ("cuda", "said"),
    [
        ({}, None),
        ({"cuda_error": lambda: "\nCUDA driver library cannot be found.\n"}, "(CUDA driver library cannot be found);"),
        ({"gpus": _NoDriver()}, "no CUDA-capable device is detected (100)); run it where one is"),
        ({"gpus": []}, "no usable GPU or driver"),
        ({"is_available": lambda: False}, "install numba-cuda[cu13]"),
    ],
)
def test_no_driver_no_gpu_no_compiler_each_say_the_remedy(
    cuda: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases: K7."""
    _fake_numba(monkeypatch, **cuda)
    reason = NumbaBackend().why_unavailable()
    assert reason is None if said is None else said in str(reason), reason
    assert "\n" not in str(reason)


def test_a_simulator_asked_for_too_late_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_numba(monkeypatch, simulated=False)
    monkeypatch.setenv(SIMULATOR_VARIABLE, "1")
    assert "set it before the process starts" in str(NumbaBackend().why_unavailable())


def test_a_library_that_cannot_be_imported_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases: K7."""
    _fake_numba(monkeypatch)
    monkeypatch.setitem(sys.modules, "numba.cuda.core", None)
    assert "numba-cuda cannot be imported" in str(NumbaBackend().why_unavailable())


@NEEDS_NUMBA
def test_the_backend_opens_numba_only_when_asked_to_run() -> None:
    printed = run_simulated(
        "import sys, blocktable_numba\nblocktable_numba.NumbaBackend()\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('numba', 'cuda')])"
    )
    assert printed.strip() == "[]"
