"""The API fuzzer: it knows every public call, catches what it is for, and runs a history again."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import blocktable as bt
from blocktable import checks, requests
from blocktable.overlaps import OutputMemory
from blocktable.rows import NumpyRows
from blocktable_conformance.api_fuzz import Fuzz, run
from blocktable_conformance.asserts import ContractViolation
from blocktable_conformance.hostile_arguments import CALLS
from blocktable_conformance.subject import Subject


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setenv("BLOCKTABLE_HOST_PATH", "numpy")
    return Subject("numpy", bt.get_backend("numpy"))


def test_every_public_call_is_taken_and_refused(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none is missing. Rules: R6."""
    public = {name for kind in (bt.BlockTable, bt.Requests) for name in dir(kind) if not name.startswith("_")}
    assert set(CALLS) == {
        name for name in public if callable(getattr(bt.BlockTable, name, getattr(bt.Requests, name, 0)))
    }
    seen, compare = Counter[tuple[str, str]](), Fuzz.compare

    def counted(fuzz: Fuzz, expected: dict[str, Any], what: str) -> None:
        seen[fuzz.name, what] += 1
        compare(fuzz, expected, what)

    monkeypatch.setattr(Fuzz, "compare", counted)
    fuzz = Fuzz(subject, 3)
    for name in [*CALLS, "sync_batch"] * 30:
        fuzz.call(name)
    assert {name for name, what in seen if what == "is accepted"} == set(CALLS) - {"record"}
    assert {name for name, what in seen if what == "is refused"} >= {name for name in CALLS if CALLS[name]}


def clears_before_it_looks(table: bt.BlockTable, row: Any, block_ids: Any) -> None:
    table.clear_row(row)
    table._changing.set_row(row, block_ids)


STEP = bt.BlockTable.step


def commits_before_it_looks(table: bt.BlockTable, *arguments: Any, **options: Any) -> Any:
    table.commit()
    return STEP(table, *arguments, **options)


FAULTS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "masked arrays": (checks, "refuse_mask", lambda name, array: None, "must be refused, but was accepted"),
    "a list that is none": (requests, "_listed", lambda name, values: values, "but raised TypeError"),
    "ids of no block": (NumpyRows, "_refuse_ids", lambda *arguments: None, "but raised IndexError|must be refused"),
    "half an operation": (bt.BlockTable, "set_row", clears_before_it_looks, "is refused, and "),
    "half a step": (bt.BlockTable, "step", commits_before_it_looks, "is refused, and "),
    "memory that is read and written": (OutputMemory, "refuse", lambda *arguments: None, "must be refused, but was"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name: str, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R6, R7, R17, R42."""
    owner, attribute, fault, message = FAULTS[name]
    monkeypatch.setattr(owner, attribute, fault)
    with pytest.raises(ContractViolation, match=message) as caught:
        run(subject, 5000)
    assert "again: python -m blocktable_conformance.api_fuzz numpy separate" in str(caught.value)


def test_a_history_runs_again() -> None:
    command = [sys.executable, "-m", "blocktable_conformance.api_fuzz", "numpy", "separate", "7", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
