"""The CuPy backend without a GPU: kernels.cu compiled for real ones, its launchers, staging and refusals."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blocktable_cupy import CupyBackend, device, emulation, kernels

ARCHITECTURES = (80, 90, 100)
KERNELS = ("scatter_writes", "null_stale_columns", "gather_block_tables", "map_slots")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("slot_type", ["long long", "int"])
def test_kernels_compile_ahead_of_time(architecture: int, slot_type: str, tmp_path: Path) -> None:
    ptx = _compile_by_nvcc(architecture, slot_type, tmp_path) or _compile_by_nvrtc(architecture, slot_type)
    assert f".target sm_{architecture}" in ptx
    for name in KERNELS:
        assert f".entry {name}(" in ptx


def _compile_by_nvcc(architecture: int, slot_type: str, folder: Path) -> str | None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    source, target = folder / "kernels.cu", folder / "kernels.ptx"
    source.write_text(emulation.kernel_source())
    options = ["-std=c++17", "-ptx", f"-arch=sm_{architecture}", f"-DSLOT_T={slot_type}"]
    command = [nvcc, *options, str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return target.read_text()


def _compile_by_nvrtc(architecture: int, slot_type: str) -> str:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="neither nvcc nor cuda.bindings is here")
    options = [f"--gpu-architecture=compute_{architecture}", f"-DSLOT_T={slot_type}", "-std=c++17"]
    error, program = nvrtc.nvrtcCreateProgram(emulation.kernel_source().encode(), b"kernels.cu", 0, [], [])
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
    kernels.launch_map_slots(never_launched, 32, 0, 8, 8, 0, 0, 4, 8, 0, 1, 8, 8, 0, 0, None)


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
