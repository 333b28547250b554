"""Write docs/kernels.md: the plain kernels in four languages, side by side, from the backends' own sources.

    python docs/generate_kernels.py

A kernel is found by its name, and its steps by their numbered comments; functions in front of a kernel belong to it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/kernels.md"
COMMAND = "python docs/generate_kernels.py"

STEP_KERNELS = ("apply_changes", "null_stale_columns", "gather_block_tables", "map_slots")
EXPORT_KERNELS = (
    *("count_entries", "start_requests", "write_indices", "write_table"),
    *("clear_inverse_map", "write_inverse_map", "gather_state_indices"),
    *("map_requests", "map_positions"),
)
CHECK_KERNELS = ("check_requests",)
KERNELS = STEP_KERNELS + CHECK_KERNELS + EXPORT_KERNELS
SOURCES = {
    "numpy": (
        "backends/blocktable_numpy/kernels.py",
        "backends/blocktable_numpy/checks.py",
        "backends/blocktable_numpy/exports.py",
    ),
    "Triton": (
        "backends/blocktable_triton/kernels.py",
        "backends/blocktable_triton/checks.py",
        "backends/blocktable_triton/exports.py",
    ),
    "CUDA C++": (
        "backends/blocktable_cupy/kernels.cu",
        "backends/blocktable_cupy/checks.cu",
        "backends/blocktable_cupy/exports.cu",
    ),
    "Numba": (
        "backends/blocktable_numba/kernels.py",
        "backends/blocktable_numba/checks.py",
        "backends/blocktable_numba/exports.py",
    ),
}
"""Language -> where its kernels are: those of a step, what checks, those of exports."""

STEP = re.compile(r"^( *)(?:#|//) step (\d+): (.*)$")
CUDA_KERNEL = re.compile(r'^extern "C" __global__ void (\w+)\(')

HEAD = f"""\
# The kernels, side by side

<!-- Written by `{COMMAND}` from the backends' sources: change those and run it. -->

Every backend has the same kernels, {len(STEP_KERNELS)} for steps, one for steps of a table whose kernels check, and
{len(EXPORT_KERNELS)} for exports, in the same order and in the same numbered steps; a test holds that. This page lays
the steps side by side; kernels that only some backends have, such as a fused step's, are not on it.

| word | what it is in every language |
| --- | --- |
| `arena` | a table: filled counts `[num_groups, max_num_rows]`, then rows `[max_num_rows, width]` of each group |
| `batch` | what a step shows, in the same layout: its counts say how many columns each batch row holds |
| `groups` | the geometry of each group, one row of numbers each |
| `slots` | `[num_groups, slots_stride]`, the slots of every token |
| `members` | the groups of an export, which share one geometry |
| `counts` | of an export: entries of each batch row; those of the call before; all; all of the call before |
| `TILE`, a block | what a Triton program, or a block of threads, does at a time; any number of them gives one result |
"""


@dataclass(frozen=True)
class Step:
    """One numbered step of a kernel in one language.

    Attributes:
        number: its place, from 1.
        text: what its comment says.
        code: the lines under the comment.
    """

    number: int
    text: str
    code: str


def kernel_ends(source: str, is_cuda: bool) -> dict[str, int]:
    """Return every kernel of a source, in its order -> number of its last line."""
    if not is_cuda:
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        return {node.name: node.end_lineno or 0 for node in functions if node.name in KERNELS}
    lines, ends = source.splitlines(), {}
    for number, line in enumerate(lines):
        found = CUDA_KERNEL.match(line)
        if found and found[1] in KERNELS:
            ends[found[1]] = lines.index("}", number) + 1
    return ends


def steps_of(lines: list[str], is_cuda: bool) -> Iterator[Step]:
    """Find the steps in the lines of a kernel; a step ends at the next one, or where its block of code ends."""
    for start, line in enumerate(lines):
        found = STEP.match(line)
        if not found:
            continue
        indent, code = len(found[1]), []
        for following in lines[start + 1 :]:
            is_directive = is_cuda and following.startswith("#")  # #pragma stands at the margin
            depth = len(following) - len(following.lstrip())
            if STEP.match(following) or (following.strip() and depth < indent and not is_directive):
                break
            code.append(following[min(depth, indent) :])
        yield Step(int(found[2]), found[3], "\n".join(code).strip("\n"))


def read_kernels(source: str, is_cuda: bool) -> dict[str, list[Step]]:
    """Return every kernel of a source, in its order -> its steps, by number."""
    lines, found, start = source.splitlines(), {}, 0
    for name, end in kernel_ends(source, is_cuda).items():
        found[name] = sorted(steps_of(lines[start:end], is_cuda), key=lambda step: step.number)
        start = end
    return found


def read_backends() -> dict[str, dict[str, list[Step]]]:
    """Return language -> kernel -> steps."""
    found: dict[str, dict[str, list[Step]]] = {}
    for language, paths in SOURCES.items():
        found[language] = {}
        for path in paths:
            found[language] |= read_kernels((ROOT / path).read_text(), path.endswith(".cu"))
    return found


def purposes() -> dict[str, str]:
    """Return kernel -> what it does, as the reference says it."""
    modules = [ast.parse((ROOT / path).read_text()) for path in SOURCES["numpy"]]
    functions = [node for module in modules for node in module.body if isinstance(node, ast.FunctionDef)]
    return {node.name: (ast.get_docstring(node) or "").partition("\n")[0] for node in functions}


def _link(path: str) -> str:
    return f"[{path}](../{path})"


def page() -> str:
    """Return the page."""
    backends, purpose = read_backends(), purposes()
    parts = [HEAD, "\n".join(f"- {language}: {', '.join(map(_link, paths))}" for language, paths in SOURCES.items())]
    for number, name in enumerate(KERNELS, 1):
        parts.append(f"## {number}. `{name}`\n\n{purpose[name]}")
        for index, step in enumerate(backends["numpy"][name]):
            parts.append(f"### `{name}`, step {step.number}: {step.text}")
            for language in SOURCES:
                fence = "cuda" if language == "CUDA C++" else "python"
                parts.append(f"{language}:\n\n```{fence}\n{backends[language][name][index].code}\n```")
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE} is up to date.\n")
