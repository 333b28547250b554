"""What tests share. Those of the wheel run where blocktable is not installed: it is imported where it is used."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

LIBRARIES = {"torch": ("torch", "torch"), "numba": ("numba_cuda", "conformance-numba")}
"""Marker -> the module that such a test wants, and the environment that runs all of them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark those that take a library as a fixture of its name."""
    for item in items:
        for mark in LIBRARIES.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(mark)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what wants a library that is not here, and say where it runs."""
    for mark, (module, environment) in LIBRARIES.items():
        if item.get_closest_marker(mark) and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: tox -e {environment}")


@pytest.fixture
def expect_caught() -> Callable[[dict[str, dict[str, Any]], str, dict[str, str]], None]:
    """Return what checks the suite's verdicts on mutants.

    The unmutated one, `right`, passed; each mutant failed by an assertion of its rule or a part of it, and by nothing
    but assertions.
    """
    from blocktable_conformance.rules import is_within

    def complaint(verdict: dict[str, Any], rule: str) -> str | None:
        failures = verdict["failures"]
        others = [failure for failure in failures if failure["error"] != "AssertionError"]
        if others:
            return f"raised {others[0]['error']}: {others[0]['message']}"
        named = {name for failure in failures for name in failure["rules"].split(", ")}
        if not any(is_within(name, rule) for name in named):
            return f"was caught as {sorted(named)}, not as {rule}" if failures else "was not caught"
        return None

    def expect(verdicts: dict[str, dict[str, Any]], right: str, rules: dict[str, str]) -> None:
        assert verdicts[right]["is_pass"], verdicts[right]["unavailable"] or verdicts[right]["failures"]
        complaints = {name: complaint(verdicts[name], rule) for name, rule in rules.items()}
        assert not {name: said for name, said in complaints.items() if said is not None}

    return expect


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the plans of steps that are made from here on."""
    from blocktable import BlockTable

    made: list[Any] = []
    right = BlockTable._make_plan

    def make(self: BlockTable, *arguments: Any) -> Any:
        made.append(right(self, *arguments))
        return made[-1]

    monkeypatch.setattr(BlockTable, "_make_plan", make)
    return made
