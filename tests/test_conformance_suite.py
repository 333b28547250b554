"""The suite's own order: each test and check says which rules it holds, and every rule and case has its test."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import blocktable_conformance
from blocktable_conformance.rules import NUMBER, are_about, is_within, numbers

SUITE = Path(blocktable_conformance.__file__).parent
TESTS = Path(__file__).parent
SPEC = (TESTS.parent / "docs/spec.md").read_text()
RULES = re.findall(r"^### (R\d+)\. ", SPEC, re.MULTILINE)
PARTS = re.findall(r"^- \*\*(R\d+\.\d+) ", SPEC, re.MULTILINE)
SPLIT = {part.partition(".")[0] for part in PARTS}
"""Rules that have parts."""
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


def cited_by_tests() -> set[str]:
    """Return every rule and part that a test of the suite or of the project cites."""
    texts = [text for _, text in docstrings()]
    texts += [path.read_text() for path in TESTS.glob("test_*.py")]
    return set().union(*(numbers("Rules", text) for text in texts))


def named_by_checks() -> Iterator[tuple[str, str]]:
    """Yield (file and line, number) of every rule and part that stands as a string in the suite and the mutants."""
    paths = [*SUITE.glob("*.py"), *TESTS.glob("mutants/*.py"), TESTS / "test_kernel_mutants.py"]
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if re.fullmatch(r"(R\d+(\.\d+)?(, )?)+", text):
                for number in re.findall(NUMBER, text):
                    yield f"{path.name}:{getattr(node, 'lineno', 0)}", number


def test_every_test_of_the_suite_names_its_rules() -> None:
    assert not [name for name, text in docstrings() if not numbers("Rules", text)]


def test_every_rule_and_every_part_has_a_test() -> None:
    assert not ({*RULES, *PARTS} - SPLIT) - cited_by_tests()


def test_every_rule_that_is_named_is_in_the_contract() -> None:
    named = [*((number, number) for number in cited_by_tests()), *named_by_checks()]
    assert not [where for where, number in named if number not in {*RULES, *PARTS}]


def test_every_check_names_the_part_of_a_rule_that_has_parts() -> None:
    whole = {(where, number) for where, number in named_by_checks() if number in SPLIT}
    assert not whole


def test_a_rule_stands_for_its_parts() -> None:
    assert numbers("Rules", "It is. Rules: R2, R9.1, R10-R12.") == {"R2", "R9.1", "R10", "R11", "R12"}
    assert [is_within(number, "R1") for number in ("R1", "R1.2", "R10", "R10.1")] == [True, True, False, False]
    assert are_about({"R3", "R9.2"}, ["R9"])
    assert are_about({"R9"}, ["R9.2"])
    assert not are_about({"R9.2"}, ["R9.1", "R92"])


def test_every_case_has_a_test() -> None:
    cited = set().union(*(numbers("Cases", text) for _, text in docstrings()))
    assert not set(CASES) - cited
