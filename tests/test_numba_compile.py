"""The Numba kernels, compiled to PTX where there is no GPU: that needs Numba's compiler (NVVM, NVRTC), nothing else."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

ARCHITECTURES = (80, 90, 100)
KERNELS = (
    *("scatter_writes", "null_stale_columns", "gather_block_tables", "map_slots"),
    *("apply_changes", "step_batch"),
)
EXPORT_KERNELS = (
    *("count_entries", "start_requests", "write_indices", "write_table"),
    *("clear_inverse_map", "write_inverse_map", "gather_state_indices"),
)
FEATURES = ("all", "none")
SLOT_DTYPES = ("int64", "int32")
BITS = {"int32": 32, "int64": 64}

COMPILE = """
import json
from numba import cuda
from numba.cuda.cudadrv import nvvm
from blocktable import BlockTableConfig, KVCacheGroup
from blocktable_numba import exports  # registers its kernels
from blocktable_numba.kernels import KERNELS, needed_features, signature, specialised

plain = BlockTableConfig(
    groups=[KVCacheGroup(block_size=16)], max_num_reqs=1, max_num_batched_tokens=1, max_model_len=1
)
features = {"all": (), "none": needed_features(plain)}
found = {}
if nvvm.is_available():
    for architecture in ARCHITECTURES:
        for slot_dtype in SLOT_DTYPES:
            for name in KERNELS:
                kinds = signature(name, slot_dtype)
                for label, needed in features.items() if name not in exports.EXPORT_KERNELS else [("all", ())]:
                    kernel = specialised(name, needed).py_func
                    ptx, _ = cuda.compile_ptx(kernel, kinds, cc=divmod(architecture, 10))
                    found[f"{architecture} {slot_dtype} {name} {label}"] = ptx, [str(kind) for kind in kinds]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled() -> dict[str, tuple[str, list[str]]]:
    """Return "architecture slot_dtype kernel features" -> PTX and the type of each argument.

    From a process of its own: the simulator, where it is asked for, has no compiler.
    """
    if importlib.util.find_spec("numba_cuda") is None:
        pytest.skip("numba-cuda is not installed: tox -e conformance-numba")
    source = f"ARCHITECTURES, SLOT_DTYPES = {ARCHITECTURES!r}, {SLOT_DTYPES!r}\n{COMPILE}"
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    command = [sys.executable, "-W", "error", "-c", source]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[str, list[str]]] = json.loads(done.stdout)
    if not found:
        pytest.skip("Numba finds no NVVM: pip install 'numba-cuda[cu13]'")
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("slot_dtype", SLOT_DTYPES)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_ahead_of_time(
    compiled: dict[str, tuple[str, list[str]]], architecture: int, slot_dtype: str, name: str, features: str
) -> None:
    check_ptx(name, architecture, *compiled[f"{architecture} {slot_dtype} {name} {features}"])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("entry_dtype", SLOT_DTYPES)
@pytest.mark.parametrize("name", EXPORT_KERNELS)
def test_export_kernels_compile_ahead_of_time(
    compiled: dict[str, tuple[str, list[str]]], architecture: int, entry_dtype: str, name: str
) -> None:
    ptx, kinds = compiled[f"{architecture} {entry_dtype} {name} all"]
    check_ptx(name, architecture, ptx, kinds)
    assert ("atom" in ptx or "red." in ptx) == (name == "write_inverse_map")


def check_ptx(name: str, architecture: int, ptx: str, kinds: list[str]) -> None:
    assert f".target sm_{architecture}" in ptx
    assert re.search(rf"\.entry \w*{name}\w*\(", ptx)
    # The launch hands each argument over as bytes: their number and sizes are what GpuKernel takes them to be.
    sizes = [int(bits) for bits in re.findall(r"\.param \.[a-z](\d+)", ptx)]
    assert sizes == [BITS.get(kind, 64) for kind in kinds]
    assert ".local" not in ptx, "a thread keeps something in memory"
    assert not re.search(r"\bcall\b", ptx), "a device function was not inlined"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["map_slots", "step_batch"])
def test_small_numbers_are_divided_in_32_bits(
    compiled: dict[str, tuple[str, list[str]]], architecture: int, name: str
) -> None:
    ptx, _ = compiled[f"{architecture} int64 {name} all"]
    assert ptx.count("div.u32") >= ptx.count("div.u64") > 0
    assert "div.s64" not in ptx


@pytest.mark.parametrize("architecture", [80, 90])  # NVVM's newer LLVM, from sm_100 on, unrolls all the same
@pytest.mark.parametrize("name", KERNELS)
def test_nothing_is_divided_in_64_bits_where_no_group_needs_it(
    compiled: dict[str, tuple[str, list[str]]], architecture: int, name: str
) -> None:
    """Not even to count a loop's turns: LLVM would, to unroll it."""
    ptx, _ = compiled[f"{architecture} int64 {name} none"]
    assert not re.search(r"(div|rem)\.[su]64", ptx)
