"""The CuPy backend without a GPU: kernels.cu compiled for real ones, its launchers, staging and refusals."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable_cupy import CupyBackend, device, emulation, kernels

ARCHITECTURES = (80, 90, 100)
KERNELS = (
    *("scatter_writes", "null_stale_columns", "gather_block_tables", "map_slots", "map_slots_long"),
    *("apply_changes_tiny", "apply_changes_large", "step_batch", "step_batch_long"),
)
PLAIN = {
    slot_dtype: bt.BlockTableConfig(
        groups=[bt.KVCacheGroup(block_size=16, num_blocks=8)],
        max_num_reqs=1,
        max_num_batched_tokens=1,
        max_model_len=1,
        slot_dtype=slot_dtype,
    )
    for slot_dtype in ("int64", "int32")
}
"""Slot dtype -> a table that needs nothing besides."""
EXPORT_KERNELS = (
    *("count_entries", "start_requests", "write_indices", "write_table"),
    *("clear_inverse_map", "write_inverse_map", "gather_state_indices"),
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("slot_dtype", ["int64", "int32"])
@pytest.mark.parametrize("features", ["all", "none"])
def test_kernels_compile_ahead_of_time(architecture: int, slot_dtype: str, features: str, tmp_path: Path) -> None:
    """With all that a group may need, and with none of it."""
    macros = kernels.module_options(PLAIN[slot_dtype])
    switched_off = [f"{name}=0" for name in re.findall(r"#ifndef (HAS_\w+)", emulation.kernel_source())]
    assert set(switched_off) == {macro for macro in macros if macro.startswith("HAS_")}
    options = [f"-D{macro}" for macro in macros if features == "none" or macro not in switched_off]
    source = emulation.kernel_source()
    ptx = _compile_by_nvcc(source, architecture, options, tmp_path) or _compile_by_nvrtc(source, architecture, options)
    assert f".target sm_{architecture}" in ptx
    for name in KERNELS:
        assert f".entry {name}(" in ptx
    # The fused step's kernels, and no other, overlap: a plain kernel that waited would wait for nothing.
    bodies = {body.partition("(")[0]: body for body in ptx.split(".entry ")[1:]}
    for name, body in bodies.items():
        overlaps = architecture >= 90 and name.startswith(("apply_changes", "step_batch"))
        assert ("griddepcontrol" in body) == overlaps, name
        # The gather waits, and the slots do: nothing is stored before.
        if overlaps and name.startswith("step_batch"):
            before, *behind = body.split("griddepcontrol.wait")
            assert len(behind) >= 2
            assert not re.search(r"\bst\.(?!local)", before)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_export_kernels_compile_ahead_of_time(architecture: int, tmp_path: Path) -> None:
    source = emulation.export_source()
    ptx = _compile_by_nvcc(source, architecture, [], tmp_path) or _compile_by_nvrtc(source, architecture, [])
    assert f".target sm_{architecture}" in ptx
    assert re.findall(r"\.entry (\w+)\(", ptx) == list(EXPORT_KERNELS)


def _compile_by_nvcc(text: str, architecture: int, options: list[str], folder: Path) -> str | None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    source, target = folder / "kernels.cu", folder / "kernels.ptx"
    source.write_text(text)
    command = [nvcc, "-std=c++17", "-ptx", f"-arch=sm_{architecture}", *options, str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return target.read_text()


def _compile_by_nvrtc(text: str, architecture: int, options: list[str]) -> str:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="neither nvcc nor cuda.bindings is here")
    options = [f"--gpu-architecture=compute_{architecture}", "-std=c++17", *options]
    error, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernels.cu", 0, [], [])
    assert error == 0
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    assert error == 0, log.decode()
    ptx = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, ptx)
    return ptx.decode()


def test_a_scalar_that_does_not_fit_its_kernel_raises() -> None:
    """Cases: K5."""

    def never_launched(*_: Any, **__: Any) -> None:
        raise AssertionError("launched")

    with pytest.raises(OverflowError, match="4294967301 does not fit"):
        kernels.launch_scatter_writes(never_launched, 32, 8, 2**32 + 5, 1, 8, None)


def test_nothing_is_launched_for_nothing() -> None:
    def never_launched(*_: Any, **__: Any) -> None:
        raise AssertionError("launched")

    kernels.launch_scatter_writes(never_launched, 32, 8, 0, 0, 8, None)
    kernels.launch_map_slots((never_launched, never_launched), 32, 0, 8, 8, 0, 0, 4, 8, 0, 1, 8, 8, 0, 0, None)


def test_no_package_no_gpu_no_compiler_each_say_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases: K7."""
    monkeypatch.delenv(emulation.EMULATE_VARIABLE, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "install blocktable[cupy]" in str(CupyBackend().why_unavailable())
    monkeypatch.setenv(emulation.EMULATE_VARIABLE, "1")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "install g++" in str(CupyBackend().why_unavailable())


@pytest.mark.parametrize(("shown", "works"), [((1, 2), True), ((1, 1), False), ((0, 0), False)])
def test_mapped_memory_that_hides_later_writes_is_found_out(
    shown: tuple[int, ...], works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases: M4."""
    values = iter(shown)
    host = np.zeros(8, np.int32)
    fake = SimpleNamespace(
        staging_slot=lambda entries: device.StagingSlot(host, 8),
        full=lambda *_: None,
        kernel=lambda *_: lambda *_, **__: None,
        stream=lambda handle: None,
        current=lambda: device.HostDevice().current(),
        download=lambda target: [next(values)],
        upload=lambda array: array,
    )
    monkeypatch.setattr(device, "CupyDevice", lambda index, staging: fake)
    device.mapped_memory_works.cache_clear()
    assert device.mapped_memory_works(0) is works
    device.mapped_memory_works.cache_clear()
