"""The Triton backend where there is no GPU: its kernels' memory, its drivers, and what it says without a GPU."""

from __future__ import annotations

import importlib.util
import os
import struct
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable.device import FEATURES, SIGNATURES, KernelOptions
from blocktable_triton import INTERPRET_VARIABLE, TritonBackend, is_interpreted

pytestmark = pytest.mark.torch
NEEDS_INTERPRETER = pytest.mark.skipif(not is_interpreted(), reason="wants Triton's interpreter: tox -e torch")
CONFIG = bt.BlockTableConfig(
    groups=[
        bt.KVCacheGroup(block_size=6, kernel_block_size=3, sliding_window=8),
        bt.KVCacheGroup(block_size=4, slot_mode="ring"),
    ],
    max_num_reqs=5,
    max_num_rows=7,
    max_num_batched_tokens=80,
    max_model_len=90,
    context_parallel=bt.ContextParallel(world_size=2, rank=1, interleave_size=2),
)


def make_table() -> bt.BlockTable:
    made: Any = TritonBackend()
    return bt.BlockTable(CONFIG, made)


# Arguments.


def test_kernels_take_what_their_signatures_list() -> None:
    from blocktable_triton import kernels
    from blocktable_triton.driver import FUNCTIONS

    for name, function in FUNCTIONS.items():
        python: dict[str, str] = getattr(function, "fn", function).__annotations__
        found = [(kind, argument) for argument, kind in python.items() if kind != "tl.constexpr"]
        kinds = ["tl.int64" if kind.endswith("*") else f"tl.{kind}" for kind, _ in SIGNATURES[name].arguments]
        assert found == list(zip(kinds, [argument for _, argument in SIGNATURES[name].arguments], strict=True))
    for bit, feature in enumerate(FEATURES):
        assert getattr(kernels, feature).value == 1 << bit


@NEEDS_INTERPRETER
@pytest.mark.parametrize(("place", "value"), [(0, -1), (1, 2**31), (1, 2**32 + 5), (2, -(2**31) - 1)])
def test_an_argument_that_does_not_fit_its_type_raises(place: int, value: int) -> None:
    """Cases: K5."""
    from blocktable_triton.driver import InterpretedDriver

    driver = InterpretedDriver()
    kernel = driver.kernel("null_stale_columns", KernelOptions())
    ends = [driver.address(driver.full(size, 0, "int64")) for size in (2, 9)]
    arguments = [ends[0], *[0] * 8, ends[1]]
    kernel((1, 1), arguments, 0)
    arguments[place] = value
    with pytest.raises(struct.error):
        kernel((1, 1), arguments, 0)


# Memory.


class Guard:
    """Refuses every access of an interpreted kernel outside the arrays that the driver has made."""

    def __init__(self) -> None:
        self.allowed: list[tuple[int, int]] = []
        self.accesses = 0
        self.is_armed = False

    def allow(self, array: Any) -> Any:
        start = array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data
        self.allowed.append((start, start + array.nbytes))
        return array

    def check(self, pointers: Any, mask: Any) -> None:
        if not self.is_armed:
            return
        addresses = pointers.data[mask.data].astype(np.int64)
        size = pointers.get_element_ty().primitive_bitwidth // 8
        inside = np.zeros(addresses.shape, np.bool_)
        for start, end in self.allowed:
            inside |= (addresses >= start) & (addresses + size <= end)
        self.accesses += addresses.size
        assert inside.all(), f"an access at {addresses[~inside][:3]}, outside of {self.allowed}"


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Guard:
    from triton.runtime.interpreter import InterpreterBuilder

    from blocktable_triton.driver import InterpretedDriver

    guard = Guard()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    full, upload, host_block = InterpretedDriver.full, InterpretedDriver.upload, InterpretedDriver.host_block

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        guard.check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        guard.check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def allowed_block(self: Any, entries: int) -> Any:
        block = host_block(self, entries)
        guard.allow(block.host)
        return block

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", checked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", checked_store)
    monkeypatch.setattr(InterpretedDriver, "full", lambda *args: guard.allow(full(*args)))
    monkeypatch.setattr(InterpretedDriver, "upload", lambda *args: guard.allow(upload(*args)))
    monkeypatch.setattr(InterpretedDriver, "host_block", allowed_block)
    return guard


@pytest.fixture
def guarded(guard: Guard) -> bt.BlockTable:
    """Return a table whose kernels may reach its own memory and nothing else."""
    guard.is_armed = True
    return make_table()


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
        rows = rng.permutation(7)[:3]
        table.set_rows(rows, [rng.integers(1, 99, 6), rng.integers(1, 99, 3)], [[2] * 3, [1] * 3])
        arrays = {
            "idx_mapping": rng.choice(extremes[np.abs(extremes.astype(float)) < 2**31], num_reqs).astype(np.int32),
            "query_start_loc": rng.integers(-5, 90, num_reqs + 1).astype(np.int32),
            "positions": rng.choice(extremes, num_positions),
            "num_computed_tokens": rng.choice([-(2**31), -1, 0, 9, 2**31 - 1], num_reqs).astype(np.int32),
        }
        given = {name: table.backend.from_host(array) for name, array in arrays.items()}
        before = guard.accesses
        table.step(**given, num_reqs_padded=int(rng.integers(num_reqs, 6)))
        assert guard.accesses > before
    table.verify()


@NEEDS_INTERPRETER
def test_an_overrun_by_one_entry_is_seen(guarded: bt.BlockTable, guard: Guard) -> None:
    starts = guarded.backend.from_host(np.array([0, 3], np.int32))
    guard.allowed.pop()
    guard.allow(starts[:1])
    with pytest.raises(Exception, match="an access at"):
        guarded.compute_slot_mappings(None, starts, guarded.backend.from_host(np.zeros(3, np.int64)))


@NEEDS_INTERPRETER
def test_host_positions_longer_than_the_buffer_are_staged() -> None:
    """Rules: R10.8, R17."""
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
@pytest.mark.parametrize("made_in", [True, False])
@pytest.mark.parametrize("used_in", [True, False])
def test_memory_of_a_table_is_written_in_any_mode(made_in: bool, used_in: bool) -> None:
    """What torch makes in inference mode it refuses to write outside it. Rules: R22, R24."""
    import torch

    with torch.inference_mode(made_in):
        table = make_table()
    host = np.array([2], np.int32), np.array([0, 1], np.int32), np.array([2])
    with torch.inference_mode(used_in):
        table.set_row(2, ([7, 8], [9]))
        for _ in range(2):
            step = table.step(*host)
            assert [slots.tolist() for slots in step.slot_mappings] == [[7 * 6], [9 * 4 + 2]]
            table.invalidate()


@NEEDS_INTERPRETER
def test_an_array_on_another_device_is_refused() -> None:
    """Rules: R22."""
    import torch

    table = make_table()
    elsewhere = torch.zeros(1, dtype=torch.int32, device="meta")
    with pytest.raises(bt.DtypeError, match="on meta, but this table is on cpu"):
        table.gather(elsewhere)
    table.set_row(2, ([7, 8], [9]))
    for _ in range(2):
        with pytest.raises(bt.DtypeError, match="on meta, but this table is on cpu"):
            table.step(elsewhere, np.array([0, 1], np.int32), np.array([2]))
    assert table.num_bytes_sent == 0


# The drivers.


def test_both_names_of_the_legacy_default_stream_give_one_that_is_never_captured() -> None:
    """Rules: R22."""
    from blocktable_triton.driver import TorchDriver

    driver = TorchDriver(0)
    assert (driver.stream(0), driver.stream(1), driver.stream(2), driver.stream(77)) == (0, 0, 2, 77)
    assert not driver.is_capturing(0)  # CUDA is not even asked: that would break a capture elsewhere


@pytest.mark.parametrize(
    ("cuda", "has_bindings", "kernel_problem", "said"),
    [
        ("13.0", True, None, None),
        ("13.0", True, "this Triton compiles for clusters", "this Triton compiles for clusters"),
        ("13.0", False, None, "the fused step needs the package cuda-bindings"),
        (None, True, None, "the fused step needs CUDA"),
    ],
)
def test_the_fused_step_is_declared_where_a_step_can_be_a_graph(
    cuda: str | None, has_bindings: bool, kernel_problem: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules: R21."""
    torch: Any = ModuleType("torch")
    torch.version = SimpleNamespace(cuda=cuda, hip=None if cuda else "7.0")
    torch.cuda = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delenv(INTERPRET_VARIABLE, raising=False)
    has = {"torch": True, "triton": True, "cuda": has_bindings, "cuda.bindings": has_bindings}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has[name] else None)
    backend = TritonBackend()
    kernel = SimpleNamespace(graph_problem=lambda: kernel_problem)
    driver = SimpleNamespace(kernel=lambda name, options: kernel, is_mapped=True)
    monkeypatch.setattr(backend, "driver", lambda device: driver)
    assert ("fused_step" in backend.capabilities) is (said is None)
    assert backend.fallbacks == (() if said is None else (f"steps are separate launches: {said}",))


@NEEDS_INTERPRETER
@pytest.mark.parametrize("step_path", ["separate", "fused"])
@pytest.mark.parametrize(("staging", "is_mapped"), [("auto", True), ("mapped", True), ("copy", False)])
def test_changes_arrive_however_they_travel(
    staging: str, is_mapped: bool, step_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More steps than may be in flight, so that blocks are used again. Rules: R9.2."""
    monkeypatch.setenv("BLOCKTABLE_STAGING", staging)
    backend: Any = TritonBackend()
    tables = bt.BlockTable(CONFIG, backend, step_path=step_path), bt.BlockTable(CONFIG, "numpy")
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
    assert backend.driver(None).is_mapped is is_mapped


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
    assert is_interpreted() is (word in {"1", "true", "ON"})
    backend = TritonBackend()
    assert backend.description == ("triton (interpreter)" if is_interpreted() else "triton")
    assert backend.is_emulated is is_interpreted()
    if importlib.util.find_spec("triton"):
        import triton

        assert bool(triton.knobs.runtime.interpret) is is_interpreted()


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
