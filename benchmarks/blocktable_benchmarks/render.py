"""Tables as text for a terminal, and as Markdown between the markers of a page."""

from __future__ import annotations

import re
from pathlib import Path

from blocktable import BlockTableError
from blocktable_benchmarks.cells import Table

SHOWN_ONCE_MEASURED = ("headline", "callers", "caller_cases")
"""Tables whose place on a page stays empty without results."""

MARKER = re.compile(r"(<!-- bench: (?P<name>\w+) -->\n).*?(<!-- bench end -->)", re.DOTALL)


def as_text(table: Table) -> str:
    """Return a table with aligned columns; numbers to the right."""
    lines = [table.header, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.header))]
    if len(table.header) == 2:  # a name and a sentence
        return "\n".join([table.title, *(f"  {name:<{widths[0]}}  {text}" for name, text in table.rows)])
    rows = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([table.title, *("  " + row.rstrip() for row in rows)])


def as_markdown(table: Table) -> str:
    """Return a table in Markdown."""
    lines = [table.header, ["---", *("---:" for _ in table.header[1:])], *table.rows]
    text = [table.text, ""] if table.text else []
    return "\n".join([*text, f"**{table.title}**", "", *("| " + " | ".join(line) + " |" for line in lines)])


def fill_page(path: Path, tables: list[Table]) -> None:
    """Replace what stands between `<!-- bench: NAME -->` and `<!-- bench end -->` by the tables of that name.

    Raises:
        BlockTableError: the page has no such place.
    """
    page = path.read_text()
    if not MARKER.search(page):
        raise BlockTableError(f"{path} has no `<!-- bench: NAME -->` to fill.")

    def fill(place: re.Match[str]) -> str:
        found = [as_markdown(table) for table in tables if table.name == place["name"]]
        nothing = "" if place["name"] in SHOWN_ONCE_MEASURED else "Not measured yet.\n"
        return place[1] + ("\n\n".join(found) + "\n" if found else nothing) + place[3]

    path.write_text(MARKER.sub(fill, page))
