"""What every table of results is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Results = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        name: for markers in a page.
        title: a sentence.
        header: of each column.
        rows: cells; the first one names the row.
        text: what stands before it on a page, in Markdown.
    """

    name: str
    title: str
    header: list[str]
    rows: list[list[str]]
    text: str = ""


def number(value: Any, digits: int = 1) -> str:
    """Return a figure as a cell shows it; "-" for none."""
    if value is None:
        return "-"
    return f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}"


def is_timed(lane: dict[str, Any]) -> bool:
    """Whether a lane's times mean anything."""
    return not (lane.get("is_emulated") or lane.get("is_quick") or "absent" in lane)
