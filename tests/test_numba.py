"""The Numba backend where there is no GPU: launches, memory, the simulator, and what it says where it cannot run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from blocktable import ArgumentError
from blocktable_numba import SIMULATOR_VARIABLE, NumbaBackend

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.numba


def run_simulated(source: str, **environment: str) -> str:
    """Run `source` in a process of its own with Numba's simulator, and return what it printed."""
    return run_source(source, **{SIMULATOR_VARIABLE: "1"}, **environment)


def run_source(source: str, **environment: str) -> str:
    """Run `source` in a process of its own, without the simulator unless `environment` says so."""
    inherited = {name: value for name, value in os.environ.items() if name != SIMULATOR_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# A GPU, by a driver that notes what it is asked.

FAKE = """
import ctypes, struct
import numpy as np
from numba import cuda
from blocktable.device import signature_of
from blocktable_numba import driver as module

log, answers = [], {"cuMemAlloc": 1 << 40, "cuCtxGetCurrent": 7, "cuThreadExchangeStreamCaptureMode": 0}
answers["cuEventCreate"] = object()
host = np.zeros(64, np.int32)
answers["cuMemHostAlloc"] = host.ctypes.data

def fake(name):
    def call(*arguments):
        log.append((name, *arguments))
        return 0, answers[name] if name in answers else None
    call.__name__ = name
    return call

class Bindings:
    def __getattr__(self, name):
        real = getattr(real_driver, name)
        return fake(name) if name.startswith("cu") else real

def names():
    found = [entry[0].removeprefix("cu") for entry in log]
    log.clear()
    return " ".join(found).replace("ThreadExchangeStreamCaptureMode", "Mode")

real_driver, module.driver = module.driver, Bindings()
class Gpus:
    def __getitem__(self, index):
        return module.nullcontext()
cuda.gpus, cuda.current_context = Gpus(), lambda: None
device = module.NumbaDriver(0)
log.clear()
"""


def test_a_launch_hands_over_the_exact_bytes_of_each_argument_or_raises() -> None:
    """Cases: K5."""
    printed = run_source(
        FAKE
        + """
def launch(function, *rest):
    addresses = (ctypes.c_uint64 * len(layout)).from_address(rest[8])
    cells = [struct.unpack(kind, ctypes.string_at(at, struct.calcsize(kind)))[0] for at, kind in zip(addresses, layout)]
    print(int(function), *rest[:8])
    assert cells == list(arguments)
    return (0,)

module.driver.cuLaunchKernel = launch
layout, high = signature_of("map_slots").layout, 2**46 + 8
arguments = (high, high, 16, 3, 700, 4, 24, 1, 2, 32, 40, 2**33, 600, 2**32, 48, 56)
kernel = module.GpuKernel("map_slots", 77)
kernel((3, 2), arguments, 5)
try:
    kernel((3, 2), (*arguments[:12], 2**32 + 5, 1, 48, 56), 5)
except struct.error:
    print("refused")
"""
    )
    assert printed.splitlines() == ["77 3 2 1 128 1 1 0 5", "refused"]


def test_dropped_memory_is_freed_immediately_and_breaks_no_capture() -> None:
    """Each call that a capture elsewhere would refuse stands between two exchanges of the thread's mode."""
    printed = run_source(
        FAKE
        + """
array = device.full(6, 0, "int32")
print(names())
view = array.gpu_data.view(8, 16)
del array
print(names())
del view
print(names())
block = device.host_block(64)
block.host[3] = 5
assert host[3] == 5 and block.address == host.ctypes.data
print(names())
part = block.host[2:4]
del block
print(names())
del part
print(names())
device.wait(device.mark(5))
device.order(5, 6)
print(names())
"""
    )
    freed = "CtxPushCurrent Mode {} Mode CtxPopCurrent"
    assert printed.splitlines() == [
        "Mode MemAlloc Mode MemsetD8Async",
        "",
        freed.format("MemFree"),
        "Mode MemHostAlloc Mode",
        "",
        freed.format("MemFreeHost"),
        "EventCreate EventRecord Mode EventSynchronize Mode EventRecord StreamWaitEvent",
    ]


def test_memory_that_cannot_be_pinned_is_pageable_where_changes_are_copied() -> None:
    """Where kernels read the host's memory the refusal is passed on. Rules: R9.1."""
    printed = run_source(
        FAKE
        + """
def refuse(*arguments):
    return real_driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
refuse.__name__ = "cuMemHostAlloc"
module.driver.cuMemHostAlloc = refuse
try:
    device.host_block(8)
except module.BlockTableError as error:
    print(error)
device.is_mapped = False
block = device.host_block(8)
print(block.address == 1 << 40, block.host.size, block.copy.size)
names()
device.send(block, 3, 5)
print(names())
"""
    )
    assert printed.splitlines() == [
        "The CUDA driver refused cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY.",
        "True 8 8",
        "MemcpyHtoDAsync",
    ]


def test_memory_is_filled_with_any_value_by_the_driver() -> None:
    """Only values of 8 bytes that are no byte repeated take a copy. Rules: R5, R15."""
    printed = run_source(
        FAKE
        + """
arrays = []
for value, dtype in ((-1, "int64"), (10, "int32"), (-3, "int32"), (41, "int64")):
    arrays.append(device.full(6, value, dtype))
    print(*[entry[2:] for entry in log if entry[0].startswith("cuMemset")], names().split()[3:])
"""
    )
    assert printed.splitlines() == [
        "(255, 48, 1) ['MemsetD8Async']",
        "(10, 6, 1) ['MemsetD32Async']",
        f"({2**32 - 3}, 6, 1) ['MemsetD32Async']",
        "['MemcpyHtoDAsync', 'StreamSynchronize']",
    ]


def test_the_legacy_stream_has_one_handle_and_is_never_asked_about() -> None:
    """Rules: R22."""
    printed = run_source(
        FAKE
        + """
print([device.stream(handle) for handle in (None, 0, 1, 2, 99)], device.is_capturing(1), names())
answers["cuStreamIsCapturing"] = real_driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
print(device.is_capturing(99), names())
"""
    )
    assert printed.splitlines() == ["[1, 1, 1, 2, 99] False ", "True StreamIsCapturing"]


def test_a_device_is_named_by_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpus(list[int]):
        current = SimpleNamespace(id=1)

    _fake_numba(monkeypatch, gpus=Gpus([0, 1]))
    backend = NumbaBackend()
    assert [backend.place(device) for device in (None, 0, "cuda:1", SimpleNamespace(id=0))] == [1, 0, 1, 0]
    with pytest.raises(ArgumentError, match="GPU 2 does not exist: there are 2"):
        backend.place(2)


# The simulator.

TABLE = """
import numpy as np
import blocktable as bt
from blocktable_numba import NumbaBackend

config = bt.BlockTableConfig(
    groups=2 * [bt.KVCacheGroup(block_size=4)], max_num_reqs=3, max_num_batched_tokens=8, max_model_len=64
)
table = bt.BlockTable(config, NumbaBackend())
driver, to_device = table.store.driver, table.backend.from_host
inputs = [to_device(array) for array in (np.array([1], np.int32), np.array([0, 2], np.int32), np.array([1, 6]))]
"""


@pytest.mark.parametrize("staging", ["mapped", "copy"])
def test_changes_arrive_however_they_travel(staging: str) -> None:
    """Rules: R9.1."""
    source = """
for block_id in range(5, 12):
    table.set_row(1, [[block_id, block_id + 1], [3, 4]])
    table.step(*inputs)
    slots = table.backend.to_host(table.buffers.slot_mappings[0])
    assert slots.tolist() == [4 * block_id + 1, 4 * block_id + 6] + [-1] * 6, slots
    table.verify()
"""
    run_simulated(TABLE + source, BLOCKTABLE_STAGING=staging)


def test_groups_may_have_slots_of_their_own_in_any_order() -> None:
    """Rules: R17."""
    source = """
table.set_row(1, [[5, 6], [7, 8]])
memory = [to_device(np.zeros(8, np.int64)) for _ in range(2)]
for out in (memory, memory[::-1]):
    table.commit()
    table.compute_slot_mappings(*inputs, out=out)
    print(*(table.backend.to_host(slots)[:3].tolist() for slots in out))
"""
    assert run_simulated(TABLE + source).splitlines() == 2 * ["[21, 26, -1] [29, 34, -1]"]


def test_a_kernel_reaches_no_further_than_the_array_of_its_address() -> None:
    source = """
memory = driver._memory
array = to_device(np.arange(6, dtype=np.int32))
start = driver.address(array[2:])
print([memory.entries(at, "int32")[0].tolist() for at in (start, start + 16, start + 4096, 0)])
print(memory.entries(start + 4, "int64")[0].size)
del array
print(memory.entries(start, "int32")[0].size)
"""
    assert run_simulated(TABLE + source).splitlines() == ["[[2, 3, 4, 5], [], [], []]", "1", "0"]


def test_a_simulated_launch_refuses_what_a_gpu_could_not_take() -> None:
    """Cases: K5."""
    source = """
import struct
from blocktable.device import KernelOptions
batch, kernel = driver.address(table.buffers.batch), driver.kernel("null_stale_columns", KernelOptions())
arguments = [driver.address(inputs[0]), 1, 1, 3, 3, batch, 2, batch, 0, batch]
for place, value in ((1, 2**32 + 1), (8, 1 << 20)):  # beyond int32; beyond the array
    try:
        kernel((1, 1), [*arguments[:place], value, *arguments[place + 1 :]], 1)
    except (struct.error, IndexError) as error:
        print(type(error).__name__)
"""
    assert run_simulated(TABLE + source).splitlines() == ["error", "IndexError"]


def test_kernels_know_the_features_that_they_name() -> None:
    sources = [(ROOT / f"backends/blocktable_numba/{name}.py").read_text() for name in ("checks", "kernels")]
    named = re.findall(r"\b(?:HAS_[A-Z_]+|CHECKED)\b(?! =)", "".join(sources))
    printed = run_simulated("from blocktable_numba.driver import KNOWN\nprint(*sorted(KNOWN))")
    assert printed.split() == sorted(set(named))


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


def test_the_backend_opens_numba_only_when_asked_to_run() -> None:
    printed = run_simulated(
        "import sys, blocktable_numba\nblocktable_numba.NumbaBackend()\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('numba', 'cuda')])"
    )
    assert printed.strip() == "[]"
