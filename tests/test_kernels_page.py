"""The four backends can be laid side by side: same files, same kernels, same steps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
FILES = ("__init__.py", "py.typed")
BACKENDS = {
    "numpy": ("block_store.py", "slot_mapper.py", "kernels.py", "exports.py"),
    "triton": ("driver.py", "kernels.py", "exports.py"),
    "cupy": ("driver.py", "kernels.cu", "exports.cu"),
    "numba": ("driver.py", "kernels.py", "exports.py"),
}
"""Backend -> files that it has besides FILES: its own store, or a driver for the core's."""


def load_generator() -> Any:
    """Return docs/generate_kernels.py as a module: docs/ is no package."""
    spec = importlib.util.spec_from_file_location("generate_kernels", ROOT / "docs/generate_kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


generator = load_generator()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_has_the_same_files(backend: str) -> None:
    folder = ROOT / f"backends/blocktable_{backend}"
    assert not [name for name in (*FILES, *BACKENDS[backend]) if not (folder / name).is_file()]


@pytest.mark.parametrize("language", generator.SOURCES)
def test_every_language_has_the_same_kernels_in_order(language: str) -> None:
    assert tuple(generator.read_backends()[language]) == generator.KERNELS


@pytest.mark.parametrize("kernel", generator.KERNELS)
@pytest.mark.parametrize("language", generator.SOURCES)
def test_every_language_has_the_same_steps_word_for_word(language: str, kernel: str) -> None:
    def steps(found: str) -> list[str]:
        return [f"step {step.number}: {step.text}" for step in generator.read_backends()[found][kernel]]

    reference = steps("numpy")
    assert [int(step.split()[1].rstrip(":")) for step in reference] == list(range(1, len(reference) + 1))
    assert steps(language) == reference


@pytest.mark.parametrize("language", generator.SOURCES)
def test_every_step_has_code_or_a_reason(language: str) -> None:
    """A step with nothing to do keeps its label and says why, in a comment under it."""
    kernels = generator.read_backends()[language]
    assert not [(kernel, step.number) for kernel, steps in kernels.items() for step in steps if not step.code.strip()]


def test_the_page_has_every_step_of_every_kernel_in_every_language() -> None:
    page = generator.page()
    steps = sum(map(len, generator.read_backends()["numpy"].values()))
    assert page.count("\n### ") == steps
    for language in generator.SOURCES:
        assert page.count(f"\n{language}:\n\n```") == steps


# The reader itself.

PYTHON = """
def _helper(x):
    # step 2: add
    y = x + 1
    return y


@jit
def apply_changes(a):
    while a:
        # step 1: begin
        if a:
            b = _helper(a)
        # step 3: end
        store(b)
    more()


def launch_apply_changes():
    pass


def map_slots():
    # step 1: only

    pass
"""

CUDA = """
static int helper(int x) {
  // step 2: add
#pragma unroll
  for (;;) x += 1;
  return x;
}

extern "C" __global__ void apply_changes(
    int a  // [1]
) {
  for (;;) {
    // step 1: begin
    int b = helper(a);
    // step 3: end
    store(b);
  }
}

extern "C" __global__ void another(int a) {
  // step 1: of none
}
"""


@pytest.mark.parametrize(("source", "is_cuda"), [(PYTHON, False), (CUDA, True)])
def test_steps_are_read_by_number_to_the_end_of_their_block(source: str, is_cuda: bool) -> None:
    kernels = generator.read_kernels(source, is_cuda)
    assert list(kernels) == ["apply_changes"] if is_cuda else ["apply_changes", "map_slots"]
    found = [(step.number, step.text, step.code) for step in kernels["apply_changes"]]
    if is_cuda:
        assert found == [
            (1, "begin", "int b = helper(a);"),
            (2, "add", "#pragma unroll\nfor (;;) x += 1;\nreturn x;"),
            (3, "end", "store(b);"),
        ]
    else:
        assert found == [
            (1, "begin", "if a:\n    b = _helper(a)"),
            (2, "add", "y = x + 1\nreturn y"),
            (3, "end", "store(b)"),
        ]


def test_the_last_kernel_ends_where_its_function_ends() -> None:
    (step,) = generator.read_kernels(PYTHON, False)["map_slots"]
    assert step.code == "pass"
