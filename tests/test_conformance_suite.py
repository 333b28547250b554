"""The suite's own order: each test says which rules it holds, and every rule and every case has its test."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import blocktable_conformance

SUITE = Path(blocktable_conformance.__file__).parent
CASES = [
    f"{letter}{number}"
    for letter, count in zip("PTBGC", (13, 13, 6, 10, 7), strict=True)
    for number in range(1, count + 1)
]
CASES += ["M1", "M2", "M3", "M5", "M6", "K1", "K2", "K3", "K4", "K6", "K8"]
"""Cases that the suite holds; M4, K5 and K7 are about a backend's own staging, launcher and loading."""


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield (file and name, docstring) of every test of the suite."""
    for path in sorted(SUITE.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{path.name}::{node.name}", ast.get_docstring(node) or ""


def numbers(word: str, text: str) -> set[str]:
    """Return what a docstring's `Rules: R1, R2.` names; a range R10-R15 names all of it."""
    named = set()
    for listed in re.findall(rf"{word}: ([A-Z]\d+(?:(?:, |-)[A-Z]\d+)*)", text):
        for item in listed.split(", "):
            first, _, last = item.partition("-")
            span = range(int(first[1:]), int((last or first)[1:]) + 1)
            named |= {f"{first[0]}{number}" for number in span}
    return named


def test_every_test_of_the_suite_names_its_rules() -> None:
    assert not [name for name, text in docstrings() if not numbers("Rules", text)]


def test_every_rule_has_a_test() -> None:
    texts = [text for _, text in docstrings()]
    texts += [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    cited = set().union(*(numbers("Rules", text) for text in texts))
    assert not {f"R{number}" for number in (*range(1, 21), 23, 24)} - cited


def test_every_case_has_a_test() -> None:
    cited = set().union(*(numbers("Cases", text) for _, text in docstrings()))
    assert not set(CASES) - cited
