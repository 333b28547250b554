"""What tests share. Those of the wheel run where blocktable is not installed: it is imported where it is used."""

from __future__ import annotations

import importlib.util
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
