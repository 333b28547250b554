"""The report: one HTML file with everything in it, that needs no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import matplotlib as mpl

from blocktable_replay.plots import draw_all
from blocktable_replay.result import ReplayResult
from blocktable_replay.summary import (
    finding_rows,
    has_failed,
    headline,
    label,
    shown,
    side_by_side,
    verdict,
    wrong_entries,
)

STYLE = """
:root { color-scheme: light; --ink: #1f2933; --soft: #66727f; --line: #e2e6eb; --paper: #fff; --wash: #f5f7f9; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--wash); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 22px; margin: 0 0 4px; }
h2 { font-size: 16px; margin: 0 0 2px; }
p { margin: 0 0 10px; color: var(--soft); overflow-wrap: anywhere; }
.verdict { padding: 12px 16px; border-radius: 8px; margin: 16px 0; font-weight: 600; }
.ok { background: #e3f4e8; color: #1c5c34; }
.failed { background: #fbe4e4; color: #8c1d2c; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 16px; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 16px; min-width: 0; }
section.wide { grid-column: 1 / -1; }
svg { width: 100%; height: auto; display: block; }
svg text { font-family: inherit !important; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 3px 8px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; font-weight: 400; color: var(--soft); padding-left: 0; }
thead th { color: var(--ink); font-weight: 600; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: 10px 16px; margin: 8px 0 0; }
dt { color: var(--soft); font-size: 12.5px; }
dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 12.5px/1.5 ui-monospace, Menlo, monospace; }
ul { margin: 0; padding-left: 18px; overflow-wrap: anywhere; }
"""


def make_page(summary: dict[str, Any], result: ReplayResult) -> str:
    """Return the page.

    Args:
        summary: the numbers, as `summarise` returns them.
        result: what they were made from, for the plots.
    """
    status = "failed" if has_failed(summary) else "ok"
    parts = [
        "<h1>blocktable replay</h1>",
        f"<p>{escape(headline(summary))}</p>",
        f'<div class="verdict {status}" id="verdict">{escape(verdict(summary))}</div>',
        _wrong(summary),
        '<div class="grid">',
        *(_section("Findings of the engine", _table(rows), wide=True) for rows in [finding_rows(summary)] if rows),
        _section("Backends", _table(side_by_side(summary)), wide=True),
        _section("Schedule", _tiles(summary["schedule"]), wide=True),
        *(_section(title, f"<p>{escape(text)}</p>{svg}") for title, text, svg in draw_all(result)),
        _section("How this was made", _origin(summary), wide=True),
        "</div>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>blocktable replay: {status}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{chr(10).join(parts)}\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, body: str, *, wide: bool = False) -> str:
    kind = ' class="wide"' if wide else ""
    return f"<section{kind}><h2>{escape(title)}</h2>{body}</section>"


def _tiles(values: dict[str, Any]) -> str:
    tiles = (f"<div><dt>{escape(label(name))}</dt><dd>{shown(value)}</dd></div>" for name, value in values.items())
    return f"<dl>{''.join(tiles)}</dl>"


def _table(rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return a table whose first row is its head."""
    (head_name, head), *body = rows
    cells = "".join(f"<tr>{_cells('td', name, values)}</tr>" for name, values in body)
    heading = f"<thead><tr>{_cells('th', head_name, head)}</tr></thead>"
    return f'<div class="scroll"><table>{heading}<tbody>{cells}</tbody></table></div>'


def _cells(tag: str, name: str, values: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in (name, *values))


def _wrong(summary: dict[str, Any]) -> str:
    sentences = wrong_entries(summary) + summary["notes"]
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in sentences)}</ul>" if sentences else ""


def _origin(summary: dict[str, Any]) -> str:
    config, options = summary["config"], summary["options"]
    versions = summary["versions"] | {"matplotlib": mpl.__version__}
    facts = [
        ("command", summary["command"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        *((f"group {number}", text) for number, text in enumerate(config["groups"])),
        ("table", ", ".join(f"{label(name)} {config[name]}" for name in config if name != "groups")),
        ("options", ", ".join(f"{label(name)} {options[name]}" for name in options) or "recorded"),
    ]
    return "<pre>" + escape("\n".join(f"{name}: {text}" for name, text in facts)) + "</pre>"
