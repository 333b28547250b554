"""The matrix: rules by engines, as data, as lines of a report and as docs/matrix.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blocktable_conformance.engines.adapter import Shape, Span
from blocktable_conformance.engines.play import History
from blocktable_conformance.engines.registry import ENGINES, load, package_of
from blocktable_conformance.engines.trials import TRIALS, Result

Cells = dict[str, Any]
"""Of one engine: its label and version, and a list of cells, one for each trial."""

COMMAND = "blocktable conformance --engine all --write docs/matrix.md"
MARKS = {"kept": "kept", "broken": "broken", "no such call": "-", "not tried": "not tried"}


def try_engine(name: str, examples: int, known: Cells | None) -> Cells:
    """Try every rule on an engine.

    Args:
        name: of the engine.
        examples: histories of each trial.
        known: what is expected. A history that broke a rule is replayed instead of being looked for; None: none is.
    """
    engine, package = load(name), package_of(name)
    before = {} if known is None else {(cell["rule"], cell["what"]): cell for cell in known["cells"]}
    cells = []
    for trial in TRIALS:
        expected = before.get((trial.rule, trial.what))
        if expected is not None and expected["verdict"] == "broken" and trial.is_for(engine):
            result = trial.replay(engine, _history(expected["history"]))
        else:
            result = trial.run(engine, examples)
        cells.append({"rule": trial.rule, "what": trial.what, **_as_data(result)})
    return {
        "label": engine.label,
        "version": engine.version,
        "package": None if package is None else package.folder,
        "examples": examples,
        "notes": dict(engine.notes),
        "cells": cells,
    }


def _as_data(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = {"verdict": result.verdict, "difference": result.difference}
    if result.history is not None:
        found |= {"history": asdict(result.history), "text": str(result.history)}
    return found


def _history(data: Mapping[str, Any]) -> History:
    calls = tuple(
        ("slots", [Span(*span) for span in call[1]]) if call[0] == "slots" else tuple(call) for call in data["calls"]
    )
    return History(Shape(**data["shape"]), calls)


def report(name: str, cells: Cells) -> str:
    """Return one line for each trial of an engine, and two more where a rule is broken."""
    lines = [f"{name}: {cells['label']} {cells['version']}, {cells['examples']} histories of each trial"]
    for cell in cells["cells"]:
        lines.append(f"  {cell['rule']:<6} {cell['what']:<46} {cell['verdict']}")
        lines += [f"         {line}" for line in (cell.get("text"), cell["difference"]) if line]
    return "\n".join(lines)


def read(page: Path) -> dict[str, Cells]:
    """Return what a page's data says, by engine."""
    found: dict[str, Cells] = json.loads(page.with_suffix(".json").read_text())
    return found


def compare(expected: Mapping[str, Cells], found: Mapping[str, Cells]) -> list[str]:
    """Return a sentence for each cell that is not what is expected."""
    lines = []
    for name, cells in found.items():
        before = {(cell["rule"], cell["what"]): cell["verdict"] for cell in expected.get(name, {"cells": []})["cells"]}
        for cell in cells["cells"]:
            verdict = before.get((cell["rule"], cell["what"]), "nothing")
            if verdict != cell["verdict"]:
                lines.append(
                    f"{name}, {cell['rule']}, {cell['what']}: the page says {verdict}, and this run {cell['verdict']}."
                )
    return lines


HEAD = f"""\
# Rules by engines

<!-- Written by `{COMMAND}` beside matrix.json: run that again. -->

This page shows which rules of the [contract](spec.md) engines' *own* tables keep. An adapter of at most 150 lines
calls an engine's table ([how](#how-a-cell-comes-about)). "-" means that the table has no such call, which is neither
good nor bad. "broken" means that a history was found after which the engine's table is not what the rule says; it leads
to the smallest one. The rules are this library's: an engine may be right to do without one. Where it says how it does
so, that stands beside the history. None of these cells was reported to an engine's authors.

Everything ran on a CPU, Triton's kernels in its interpreter, with the engines' files as they were released:

"""

FOOT = """\
## How a cell comes about

A trial draws small histories for one sentence of the contract: a table of at most 2 rows of 3 blocks, row changes, and
a last call whose result is looked at. Each is played on the engine's table and on the suite's
[oracle](../conformance/blocktable_conformance/oracle.py), and only what the sentence is about is compared. Where they
differ, [Hypothesis](https://hypothesis.readthedocs.io) cuts the history down. "kept" means that none of the histories
differed: evidence, not proof.

Ids count manager blocks and slots count tokens, as in the contract, whatever an engine's units are. The entry that
stands for no block is the engine's own, and a slot of its null block counts as PAD. An adapter makes the calls that the
engine's scheduler or model runner makes. Where an engine takes blocks from a pool of its own, the adapter tells the
pool which ones to hand out.

```bash
pip install 'blocktable[conformance]' torch triton
blocktable conformance --engine sglang
blocktable conformance --engine my_package.my_module:MyEngine
```

The files come from the package index, each with a digest that is checked; nothing of theirs is in this repository. An
adapter of your own is a subclass of `blocktable_conformance.engines.adapter.Engine` with the calls that your table has.
`tox -e torch` replays what is shown here and tries the rest on a few histories; a weekly job searches for
all of it again.
"""


def write(page: Path, found: Mapping[str, Cells]) -> None:
    """Write a page, and its data beside it; what is there of other engines stays."""
    before = read(page) if page.with_suffix(".json").is_file() else {}
    everything = {name: {**before, **found}[name] for name in ENGINES if name in before or name in found}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(cells)}" for name, cells in everything.items())
    page.with_suffix(".json").write_text(f"{{{lines}}}\n")
    page.write_text(render(everything))


def render(found: Mapping[str, Cells]) -> str:
    """Return the page."""
    engines = [(name, found[name]) for name in ENGINES if name in found]
    rows = ["| engine | version | from |", "| --- | --- | --- |"]
    for _, cells in engines:
        where = "torch" if cells["package"] is None else cells["package"]
        rows.append(
            f"| {cells['label']} | {cells['version']} | {'here' if cells['label'] == 'blocktable' else where} |"
        )
    titles = [f"{cells['label']} {cells['version']}" for _, cells in engines]
    rows += ["", f"| rule | what it says | {' | '.join(titles)} |", "| --- | --- |" + " --- |" * len(engines)]
    details = []
    for index, trial in enumerate(TRIALS):
        words, broken = [], []
        for _, cells in engines:
            cell = cells["cells"][index]
            mark = MARKS[cell["verdict"]]
            words.append(f"[{mark}](#{_anchor(trial.rule, trial.what)})" if mark in ("broken", "not tried") else mark)
            if mark in ("broken", "not tried"):
                broken.append(_detail(cells, cell))
        rows.append(f"| {trial.rule} | {trial.what} | {' | '.join(words)} |")
        if broken:
            details += [f"### {trial.rule}: {trial.what}", "", *broken, ""]
    return HEAD + "\n".join([*rows, "", "## Smallest histories", "", *details, ""]) + FOOT


def _anchor(rule: str, what: str) -> str:
    text = f"{rule}: {what}".lower()
    return "".join(letter for letter in text if letter.isalnum() or letter in " -_").replace(" ", "-")


def _detail(cells: Cells, cell: Mapping[str, Any]) -> str:
    title = f"- {cells['label']} {cells['version']}: "
    if cell["verdict"] == "not tried":
        return f"{title}{cell['difference']}."
    note = cells["notes"].get(cell["what"], cells["notes"].get(cell["rule"]))
    return f"{title}`{cell['text']}`; {cell['difference']}." + (f" {note}" if note else "")
