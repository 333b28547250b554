"""The CuPy backend without a GPU: its kernels compiled for real ones, its launches, staging and refusals."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blocktable.device import KernelOptions, signature_of
from blocktable.device.driver import mapped_memory_works
from blocktable_cupy import EMULATE_VARIABLE, CupyBackend, driver

pytestmark = pytest.mark.slow

ARCHITECTURES = (80, 90, 100)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("features", [driver.FEATURES, ()], ids=["all", "none"])
def test_kernels_compile_ahead_of_time(
    architecture: int, dtype: str, features: tuple[str, ...], tmp_path: Path
) -> None:
    """With all that a group may need, and with none of it."""
    ptx = compile_source("kernels", KernelOptions(dtype, frozenset(features)), architecture, tmp_path)
    bodies = {body.partition("(")[0]: body for body in ptx.split(".entry ")[1:]}
    assert set(bodies) == set(driver.KERNELS["kernels"])
    # The fused step's kernels, and no other, overlap: a plain kernel that waited would wait for nothing.
    for name, body in bodies.items():
        overlaps = architecture >= 90 and name.startswith(("apply_changes", "step_batch"))
        assert ("griddepcontrol" in body) == overlaps, name
        # The gather waits, the slots do, and so does the mark: nothing is stored before.
        if overlaps and name.startswith("step_batch"):
            before, *after = body.split("griddepcontrol.wait")
            assert len(after) >= 3
            assert not re.search(r"\bst\.(?!local)", before)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_export_kernels_compile_ahead_of_time(architecture: int, dtype: str, tmp_path: Path) -> None:
    ptx = compile_source("exports", KernelOptions(dtype), architecture, tmp_path)
    assert tuple(re.findall(r"\.entry (\w+)\(", ptx)) == driver.KERNELS["exports"]


@pytest.mark.parametrize("source", driver.KERNELS)
def test_every_kernel_takes_its_signature(source: str, tmp_path: Path) -> None:
    """Sizes of the arguments, in order."""
    ptx = compile_source(source, KernelOptions(), 80, tmp_path)
    sizes = {"Q": ".u64", "q": ".u64", "i": ".u32", "S": ".b8"}
    for name in driver.KERNELS[source]:
        head = re.search(rf"\.entry {name}\((.*?)\)\s*[.{{]", ptx, re.DOTALL)
        assert head is not None
        found = re.findall(r"\.param (?:\.align \d+ )?(\.\w+)", head[1])
        assert found == [sizes[letter] for letter in signature_of(name).layout], name


def compile_source(source: str, options: KernelOptions, architecture: int, folder: Path) -> str:
    """Return PTX, by nvcc or by what CuPy compiles with."""
    text = driver.read_source(source)
    macros = [f"-D{macro}" for macro in driver.macros(source, options)]
    ptx = _compile_by_nvcc(text, architecture, macros, folder) or _compile_by_nvrtc(text, architecture, macros)
    assert f".target sm_{architecture}" in ptx
    return ptx


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


def test_features_are_those_of_the_source() -> None:
    assert set(re.findall(r"\b(?:HAS_[A-Z_]+|CHECKED)\b", driver.read_source("kernels"))) == set(driver.FEATURES)


def test_a_launch_hands_over_its_arguments_or_raises() -> None:
    """Cases: K5."""
    launched: list[Any] = []
    device: Any = driver.CupyKernels()
    kernel = driver.CupyKernel(
        SimpleNamespace(kernel=SimpleNamespace(ptr=77)),
        "null_stale_columns",
        device,
        lambda *call: launched.append(call),
    )
    arguments = (1 << 40, 2, 3, 4, 5, 1 << 41, 6, 1 << 42, 1 << 43, 1 << 44)
    kernel((6, 7), arguments, 99)
    ((*head, pointers, extra),) = launched
    assert (head, extra) == ([77, 6, 7, 1, 128, 1, 1, 0, 99], 0)
    letters = {"Q": np.uint64, "q": np.int64, "i": np.int32}
    layout = signature_of("null_stale_columns").layout
    addresses = read(pointers, np.uint64, len(layout))
    assert [read(int(at), letters[letter], 1)[0] for at, letter in zip(addresses, layout, strict=True)] == [*arguments]
    with pytest.raises(struct.error):
        kernel((6, 7), (1 << 40, 2**32 + 5, *arguments[2:]), 99)
    assert len(launched) == 1


def read(address: int, dtype: Any, count: int) -> np.ndarray[Any, Any]:
    """Return what lies at an address."""
    return np.frombuffer(ctypes.string_at(address, count * np.dtype(dtype).itemsize), dtype)


@pytest.mark.parametrize(
    ("rows", "groups", "width"), [(0, 1, 8), (1, 1, 4096), (5, 3, 600), (256, 2, 8192), (9000, 4, 8)]
)
def test_a_gather_of_few_rows_has_several_warps_for_each(rows: int, groups: int, width: int) -> None:
    """A warp for 256 columns while 2,048 warps are enough, and one at least until the grid is full."""
    warps = driver.CupyKernels().gather_blocks(rows, groups, width) * 4
    pairs = max(rows, 1) * groups
    parts = max(warps // pairs, 1)  # as step_batch shares them out
    assert parts >= min(2048 // pairs or 1, -(-width // 256))
    assert warps < 2048 + 4 or parts == 1
    assert warps >= min(pairs, 32768)


def test_no_package_no_gpu_no_compiler_each_say_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases: K7."""
    monkeypatch.delenv(EMULATE_VARIABLE, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "install blocktable[cupy]" in str(CupyBackend().why_unavailable())
    monkeypatch.setenv(EMULATE_VARIABLE, "1")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "install g++" in str(CupyBackend().why_unavailable())


@pytest.mark.parametrize(("shown", "works"), [((1, 2), True), ((1, 1), False), ((0, 0), False)])
def test_mapped_memory_that_hides_later_writes_is_found_out(
    shown: tuple[int, ...], works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases: M4."""
    device, values = driver.EmulatedCupyDriver(), iter(shown)
    monkeypatch.setattr(device, "download", lambda target: [next(values)])
    assert mapped_memory_works(device) is works
