"""Attention over our tables on the host: what tests/gpu/consumers.py runs on a GPU, as far as it goes without one.

FlexAttention and FlashInfer's page table need torch alone. vLLM's kernels run where somebody has laid them out under
.peers (`python -m blocktable_benchmarks.peers.consumers .peers`), in Triton's interpreter.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import blocktable as bt

torch: Any = pytest.importorskip("torch", reason="torch is not installed: tox -e torch")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/gpu"))
try:
    import attention_kernels as kernels
    import consumers
    import csr_kernels
    import recipes
finally:
    sys.path.remove(str(ROOT / "tests/gpu"))

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(kernels.ON_GPU, reason="there is a GPU: python tests/gpu/consumers.py triton cupy numba"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

EMULATED = {"triton": "TRITON_INTERPRET", "cupy": "BLOCKTABLE_CUPY_EMULATE", "numba": "NUMBA_ENABLE_CUDASIM"}
BACKENDS = ["numpy", *(name for name, variable in EMULATED.items() if os.environ.get(variable, "0") not in ("", "0"))]


class WrongTable(csr_kernels.PlainCsr):
    """Reads each request's pages one further."""

    name = "wrong table"

    def _attend(self, layer: Any, out: Any, inputs: Any, output: Any) -> None:
        kernels.as_tensor(out.entries)[0].copy_(kernels.as_tensor(out.entries)[0].roll(1))
        super()._attend(layer, out, inputs, output)


def write_pads_too(keys: Any, values: Any, key_cache: Any, value_cache: Any, slots: Any, *_: Any) -> None:
    """Write through PAD as well, to the cache's last slot."""
    for cache, new in ((key_cache, keys), (value_cache, values)):
        cache.flatten(0, 1)[slots] = new


def write_one_further(keys: Any, values: Any, key_cache: Any, value_cache: Any, slots: Any, *_: Any) -> None:
    """Write each token one slot too far."""
    further = torch.where(slots >= 0, slots + 1, slots)
    kernels.write_with_torch(keys, values, key_cache, value_cache, further)


def append_one_further(keys: Any, values: Any, requests: Any, positions: Any, *pages: Any) -> None:
    """Append each token one position too far."""
    append: Any = csr_kernels.append_with_torch
    append(keys, values, requests, positions + 1, *pages)


def require_parts(backend: str) -> None:
    if "export_parts" not in bt.get_backend(backend).capabilities:
        pytest.skip(f"{backend} does not declare export_parts")


def verdicts(lines: list[str]) -> list[str]:
    return [line.partition(" ")[0] for line in lines if not line.startswith("  ")]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_flashinfers_page_table_in_plain_python(backend: str, dtype: str) -> None:
    """Rules: R12, R13, R15, R27."""
    lines = consumers.judge(csr_kernels.PlainCsr(kernels.write_with_torch), backend, dtype)
    assert verdicts(lines) == ["PASS"], lines


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_and_values_appended_by_the_request_of_each_token(backend: str) -> None:
    """As FlashInfer's append_paged_kv_cache takes it. Rules: R27, R35, R37."""
    require_parts(backend)
    consumer = csr_kernels.PlainCsr(kernels.write_with_torch, csr_kernels.append_with_torch)
    lines = consumers.judge(consumer, backend, "float16")
    assert verdicts(lines) == ["PASS"], lines


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_recipes_of_the_exports_page(backend: str) -> None:
    """Rules: R34, R35, R37."""
    require_parts(backend)
    lines = recipes.judge("PlainTorch", backend)
    assert verdicts(lines) == ["PASS"] * len(recipes.RECIPES), lines


@pytest.mark.parametrize(
    ("backend", "dtype"), [("numpy", "float32"), *((backend, "bfloat16") for backend in BACKENDS[1:])]
)
def test_flex_attention_over_the_inverse_map(backend: str, dtype: str) -> None:
    """It is right, and NaN in the NULL block comes through, as said. Rules: R12, R13, R15, R30."""
    lines = consumers.judge(kernels.Flex(kernels.write_with_torch, is_compiled=False), backend, dtype)
    assert verdicts(lines) == ["PASS", "PASS"], lines


@pytest.fixture
def laid_out() -> Path:
    folders = sorted((ROOT / ".peers").glob("consumers-*"))
    if not folders or "triton" not in BACKENDS:
        pytest.skip("no vLLM under .peers, or TRITON_INTERPRET is not set")
    return folders[-1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy over NaN and infinities
@pytest.mark.parametrize("backend", BACKENDS)
def test_vllms_kernels(laid_out: Path, backend: str) -> None:
    """Rules: R10.1, R11, R12, R13, R15."""
    lines = consumers.judge(kernels.VllmTriton(laid_out, ("float16",)), backend, "float16")
    assert verdicts(lines) == ["PASS"], lines


@pytest.mark.parametrize(
    ("consumer", "complaint"),
    [
        (WrongTable(kernels.write_with_torch), "epsilons off"),
        (csr_kernels.PlainCsr(write_pads_too), "are wrong at"),
        (csr_kernels.PlainCsr(write_one_further), "are wrong at"),
        (csr_kernels.PlainCsr(kernels.write_with_torch, append_one_further), "are wrong at"),
    ],
    ids=["table", "pad", "slot", "append"],
)
def test_what_is_wrong_is_noticed(consumer: Any, complaint: str) -> None:
    lines = consumers.judge(consumer, "numpy", "float32")
    assert verdicts(lines) == ["FAIL"], lines
    assert any(complaint in line or "not finite" in line for line in lines), lines


def test_a_kernel_that_needs_finite_memory_is_found_out() -> None:
    flex = kernels.Flex(kernels.write_with_torch, is_compiled=False)
    flex.needs_finite = False
    lines = consumers.judge(flex, "numpy", "float32")
    assert verdicts(lines) == ["FAIL"], lines
    assert any("not finite" in line for line in lines), lines
