"""The rules tried on engines' own tables: ours keeps each, planted faults are found and cut down, the page is true."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable_conformance.engines import matrix, wheels
from blocktable_conformance.engines.adapter import FEATURES, Engine, Rows, Shape, Span
from blocktable_conformance.engines.own import OwnTable
from blocktable_conformance.engines.packages import Package
from blocktable_conformance.engines.registry import ENGINES
from blocktable_conformance.engines.trials import TRIALS, Result, Trial

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/matrix.md"
ADAPTERS = {name.partition(":")[0] for name, _ in ENGINES.values()}


def trial(rule: str, what: str) -> Trial:
    (found,) = (each for each in TRIALS if each.rule == rule and what in each.what)
    return found


def broken(engine: type[Engine], rule: str, what: str) -> Result:
    result = trial(rule, what).run(engine, 40)
    assert result.verdict == "broken", result
    return result


@pytest.mark.parametrize("each", TRIALS, ids=lambda each: f"{each.rule} {each.what}")
def test_our_own_table_keeps_every_rule(each: Trial) -> None:
    assert each.run(OwnTable, 15) == Result("kept")


class DropsWhatIsTooMuch(OwnTable):
    def append_row(self, row: int, ids: list[list[int]]) -> None:
        room = self.shape.blocks - int(self.table.num_blocks_per_row[0, row])
        super().append_row(row, [each[:room] for each in ids])


class LeavesTheSource(OwnTable):
    def move_row(self, src: int, dst: int) -> None:
        self.table.copy_row(src, dst)


class ChangesOneGroup(OwnTable):
    def append_row(self, row: int, ids: list[list[int]]) -> None:
        for group in range(self.shape.groups):
            super().append_row(row, [each if g == group else [] for g, each in enumerate(ids)])


class CommitsAtOnce(OwnTable):
    def set_row(self, row: int, ids: list[list[int]]) -> None:
        super().set_row(row, ids)
        self.table.commit()


class LeavesWhatWasThere(OwnTable):
    """Its gather writes filled columns alone."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.last: Rows | None = None

    def gather(self, rows: Sequence[int], padded: int, computed: Sequence[int] | None = None) -> Rows:
        found = super().gather(rows, padded, computed)
        if self.last is not None:
            kept = [np.where(np.array(new) == 0, old, new) for new, old in zip(found, self.last, strict=True)]
            found = [table.tolist() for table in kept]
        self.last = found
        return found


class MapsEveryToken(OwnTable):
    """Its slots are those of a table that knows no counts."""

    def slots(self, spans: Sequence[Span]) -> list[list[int]]:
        found = super().slots(spans)
        size = sum(span.size for span in spans)
        return [[99 if slot < 0 and token < size else slot for token, slot in enumerate(slots)] for slots in found]


class WritesNothingAfterTheTokens(OwnTable):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.last = [[-1] * 16] * shape.groups

    def slots(self, spans: Sequence[Span]) -> list[list[int]]:
        size = sum(span.size for span in spans)
        self.last = [new[:size] + old[size:] for new, old in zip(super().slots(spans), self.last, strict=True)]
        return self.last


class CutsSlots(OwnTable):
    def slots(self, spans: Sequence[Span]) -> list[list[int]]:
        return [np.array(slots).astype(np.int32).tolist() for slots in super().slots(spans)]


class KnowsOneRank(OwnTable):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        if shape.world_size > 1:
            self.table = bt.BlockTable(Shape(**{**vars(shape), "rank": 0}).config(OwnTable), "numpy")
            self.out = self.table.create_buffers()


class TakesEveryId(OwnTable):
    def set_row(self, row: int, ids: list[list[int]]) -> None:
        super().set_row(row, [[abs(block) % 1000 for block in each] for each in ids])


class Raises(OwnTable):
    def swap_rows(self, a: int, b: int) -> None:
        raise IndexError("no")


@pytest.mark.parametrize(
    ("engine", "rule", "what", "history", "difference"),
    [
        (
            DropsWhatIsTooMuch,
            "R6",
            "over the capacity",
            "B 1, 1 row of 1 block: set_row(0, [1]); append_row(0, [2]); columns()",
            "append_row(0, [2]) is taken, and a refusal is right",
        ),
        (LeavesTheSource, "R4", "move_row", "set_row(1, [1]); move_row(1, 0); columns()", "and [] is right"),
        (ChangesOneGroup, "R6", "changes no group", "append_row(0, [[", "group 0, row 0 holds"),
        (CommitsAtOnce, "R9.2", "later changes", "commit(); set_row(0, [", "row 0 on the device is"),
        (LeavesWhatWasThere, "R10.6", "in a row", "1 row of 2 blocks: ", "batch row 0 is ["),
        (LeavesWhatWasThere, "R10.6", "after the batch", "2 rows of 1 block: ", "batch row 1 is ["),
        (MapsEveryToken, "R13", "after the filled columns", "slots(row 0 at 1)", "has slot 99, and -1 is right"),
        (MapsEveryToken, "R13", "below 0", "row 1 at -1)", "position -1 has slot 99"),
        (MapsEveryToken, "R13", "of a padding entry", "slots(a padding entry at 0)", "has slot 99, and -1 is right"),
        (MapsEveryToken, "R14", "longer than a ring", "slots(row 0 at 0 to 1)", "token 0 at position 0 has slot 99"),
        (WritesNothingAfterTheTokens, "R15", "from the last token on", "; slots(", "and -1 is right"),
        (CutsSlots, "R16", "2**31", "set_row(0, [1073741824])", "and 2147483648 is right"),
        (KnowsOneRank, "R18", "another rank's", "W 2, rank 1", "and -1 is right"),
        (TakesEveryId, "R7", "are refused", "columns()", "is taken, and a refusal is right"),
        (Raises, "R4", "swap_rows", "swap_rows(", "raises IndexError"),
    ],
)
def test_a_planted_fault_is_found_and_cut_down(
    engine: type[Engine], rule: str, what: str, history: str, difference: str
) -> None:
    result = broken(engine, rule, what)
    assert history in str(result.history)
    assert difference in result.difference
    assert len(result.history.calls if result.history else ()) <= 8


def test_a_history_that_was_found_breaks_again_as_data() -> None:
    """What tox replays is what the page's data holds."""
    result = broken(LeavesTheSource, "R4", "move_row")
    data = matrix._as_data(result)
    again = trial("R4", "move_row").replay(LeavesTheSource, matrix._history(data["history"]))
    assert matrix._as_data(again) == data
    assert trial("R4", "move_row").replay(OwnTable, matrix._history(data["history"])) == Result("kept")


class HasFewCalls(Engine):
    """What is missing is no pass."""

    label, version = "few", "1"

    def set_row(self, row: int, ids: list[list[int]]) -> None:
        pass


def test_what_is_missing_is_no_such_call() -> None:
    assert {each.run(HasFewCalls, 5).verdict for each in TRIALS} == {"no such call"}


def test_what_cannot_be_tried_here_is_no_pass() -> None:
    engine = type("Untried", (OwnTable,), {"untried": {"ring": "it wants a GPU"}})
    assert trial("R14", "wrap").run(engine, 5) == Result("not tried", "it wants a GPU")


def test_the_trials_name_rules_and_features() -> None:
    spec = (ROOT / "docs/spec.md").read_text()
    for each in TRIALS:
        number = rf"^### {each.rule}\. " if "." not in each.rule else rf"^- \*\*{each.rule} "
        assert re.search(number, spec, re.MULTILINE), each.rule
        assert set(each.features) <= set(FEATURES)


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
def test_an_adapter_is_short(adapter: str) -> None:
    path = ROOT / f"conformance/blocktable_conformance/engines/{adapter}.py"
    assert len(path.read_text().splitlines()) <= 150


# The page.


def test_the_page_is_what_its_data_says() -> None:
    assert PAGE.read_text() == matrix.render(matrix.read(PAGE))


def test_the_page_has_every_engine_and_trial() -> None:
    known = matrix.read(PAGE)
    assert list(known) == list(ENGINES)
    for cells in known.values():
        assert [(cell["rule"], cell["what"]) for cell in cells["cells"]] == [(each.rule, each.what) for each in TRIALS]
        assert all(cell["text"] for cell in cells["cells"] if cell["verdict"] == "broken")


def test_a_cell_that_changed_is_named() -> None:
    known = matrix.read(PAGE)
    found = {"blocktable": {**known["blocktable"], "cells": [dict(cell) for cell in known["blocktable"]["cells"]]}}
    assert matrix.compare(known, found) == []
    found["blocktable"]["cells"][0]["verdict"] = "broken"
    (line,) = matrix.compare(known, found)
    assert line.startswith("blocktable, R2")
    assert line.endswith("the page says kept, and this run broken.")


# The command, and the files.


def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "blocktable_conformance", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_tries_an_engine_by_name_and_by_class(tmp_path: Path) -> None:
    names = ("--engine", "blocktable", "--engine", "blocktable_conformance.engines.own:OwnTable")
    done = run(*names, "--examples", 2, "--peers", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "engines: 2 tried, 0 failed, 0 cells other than expected"
    assert "broken" not in done.stdout
    assert not list(tmp_path.iterdir())
    assert run("--engine", "nonsense").returncode == 2


def test_a_file_that_is_not_the_released_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], check: bool) -> None:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "engine-1-py3-none-any.whl", "w") as archive:
            archive.writestr("engine/table.py", "rows = []\n")

    monkeypatch.setattr(subprocess, "run", download)
    wrong = Package("engine", "1", {"engine/table.py": "0" * 64})
    with pytest.raises(wheels.WrongFileError, match=r"engine/table.py of engine 1 has the digest [0-9a-f]{64}"):
        wheels.lay_out(wrong, tmp_path)
    assert not list(tmp_path.iterdir())
    released = Package(
        "engine",
        "1",
        {"engine/table.py": "771ce927e68304ac8e43c9e7c1036ae7ea71004ef45985fcb6414e436b4591dd"},
        {"helper.py": "X = 1\n"},
    )
    wheels.lay_out(released, tmp_path)
    assert (tmp_path / "engine/table.py").read_text() == "rows = []\n"
    assert (tmp_path / "engine/__init__.py").read_text() == '__version__ = "1"\n'
    assert wheels.is_laid_out(released, tmp_path)
    (tmp_path / "engine/table.py").write_text("rows = {}\n")
    assert not wheels.is_laid_out(released, tmp_path)
