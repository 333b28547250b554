"""What tests share. Those of the wheel run where blocktable is not installed: it is imported where it is used."""

from __future__ import annotations

from typing import Any

import pytest


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
