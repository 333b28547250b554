"""The Numba kernels, compiled to PTX where there is no GPU: that needs Numba's compiler (NVVM, NVRTC), nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from blocktable.device import CHECK_KERNELS, EXPORT_KERNELS, PLAIN_KERNELS, signature_of

pytestmark = pytest.mark.numba

ARCHITECTURES = (80, 90, 100)
KERNELS = (*(kernel.name for kernel in (*PLAIN_KERNELS, *CHECK_KERNELS)), "step_batch")
EXPORTS = tuple(kernel.name for kernel in EXPORT_KERNELS)
FEATURES = ("all", "none")
CHECKING = ("apply_changes", "map_slots", "step_batch")
"""What has a form that checks, which takes three times as long to compile: for one GPU and dtype."""
SLOT_DTYPES = ("int64", "int32")
BITS = {"i": 32, "q": 64, "Q": 64}

COMPILE = """
import json
from numba import cuda
from numba.cuda.cudadrv import nvvm
from blocktable_numba.driver import KNOWN, numba_types, specialised

features = {"all": KNOWN - {"CHECKED"}, "none": frozenset()}
found = {}
if nvvm.is_available():
    for architecture in ARCHITECTURES:
        for slot_dtype in SLOT_DTYPES:
            for name in NAMES:
                for label, known in features.items() if name not in EXPORTS else [("all", frozenset())]:
                    kernel = specialised(name, known).py_func
                    ptx, _ = cuda.compile_ptx(kernel, numba_types(name, slot_dtype), cc=divmod(architecture, 10))
                    found[f"{architecture} {slot_dtype} {name} {label}"] = ptx
    for name in CHECKING:
        ptx, _ = cuda.compile_ptx(specialised(name, KNOWN).py_func, numba_types(name, "int64"), cc=(9, 0))
        found[f"90 int64 {name} checked"] = ptx
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    """Return "architecture slot_dtype kernel features" -> PTX.

    From a process of its own: the simulator, where it is asked for, has no compiler.
    """
    given = ARCHITECTURES, SLOT_DTYPES, KERNELS + EXPORTS, EXPORTS, CHECKING
    source = f"ARCHITECTURES, SLOT_DTYPES, NAMES, EXPORTS, CHECKING = {given!r}\n{COMPILE}"
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    command = [sys.executable, "-W", "error", "-c", source]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    if not found:
        pytest.skip("Numba finds no NVVM: pip install 'numba-cuda[cu13]'")
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("slot_dtype", SLOT_DTYPES)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_ahead_of_time(
    compiled: dict[str, str], architecture: int, slot_dtype: str, name: str, features: str
) -> None:
    check_ptx(name, architecture, compiled[f"{architecture} {slot_dtype} {name} {features}"])


@pytest.mark.parametrize("name", CHECKING)
def test_kernels_that_check_compile_ahead_of_time(compiled: dict[str, str], name: str) -> None:
    """Rules: R41."""
    check_ptx(name, 90, compiled[f"90 int64 {name} checked"])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("entry_dtype", SLOT_DTYPES)
@pytest.mark.parametrize("name", EXPORTS)
def test_export_kernels_compile_ahead_of_time(
    compiled: dict[str, str], architecture: int, entry_dtype: str, name: str
) -> None:
    ptx = compiled[f"{architecture} {entry_dtype} {name} all"]
    check_ptx(name, architecture, ptx)
    assert ("atom" in ptx or "red." in ptx) == (name in ("count_entries", "write_inverse_map"))


def check_ptx(name: str, architecture: int, ptx: str) -> None:
    assert f".target sm_{architecture}" in ptx
    assert re.search(rf"\.entry \w*{name}\w*\(", ptx)
    # The launch hands each argument over as bytes: their number and sizes are those of the signature.
    sizes = [int(bits) for bits in re.findall(r"\.param \.[a-z](\d+)", ptx)]
    assert sizes == [BITS[kind] for kind in signature_of(name).layout]
    assert ".local" not in ptx, "a thread keeps something in memory"
    assert not re.search(r"\bcall\b", ptx), "a device function was not inlined"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["map_slots", "step_batch"])
def test_small_numbers_are_divided_in_32_bits(compiled: dict[str, str], architecture: int, name: str) -> None:
    ptx = compiled[f"{architecture} int64 {name} all"]
    assert ptx.count("div.u32") >= ptx.count("div.u64") > 0
    assert "div.s64" not in ptx


@pytest.mark.parametrize("architecture", [80, 90])  # NVVM's newer LLVM, from sm_100 on, unrolls all the same
@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_divided_in_64_bits_where_no_group_needs_it(
    compiled: dict[str, str], architecture: int, name: str
) -> None:
    """Not even to count a loop's turns: LLVM would, to unroll it."""
    ptx = compiled[f"{architecture} int64 {name} none"]
    assert not re.search(r"(div|rem)\.[su]64", ptx)
