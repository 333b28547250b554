"""The fuzzer itself: it finds broken drop-ins, repeats itself, and fails where it compared nothing (tox -e torch)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed: tox -e torch")
pytestmark = pytest.mark.torch
pytest.importorskip("triton", reason="triton is not installed: tox -e torch")

PROFILE = "0.25.1"
PEERS = Path(os.environ.get("BLOCKTABLE_PEERS") or Path(__file__).parents[1] / ".peers")
PEER = PEERS / f"vllm-{PROFILE}"

if not PEER.is_dir():
    pytest.skip(f"vLLM's files are not laid out: tox -e torch, or lay_out {PEERS}", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("vLLM's kernel is to be interpreted: TRITON_INTERPRET=1", allow_module_level=True)

from blocktable_conformance.vllm_fuzz import stable_histories  # noqa: E402
from blocktable_conformance.vllm_fuzz.differences import DIFFERENCES, V2_DIFFERENCES  # noqa: E402
from blocktable_conformance.vllm_fuzz.histories import MANY, MULTI, Geometry, draw_call, draw_geometry  # noqa: E402
from blocktable_conformance.vllm_fuzz.pair import Pair  # noqa: E402
from blocktable_conformance.vllm_fuzz.run import Outcome, Plan, is_expected, run, shrink  # noqa: E402
from blocktable_vllm.stable import StableRows  # noqa: E402
from blocktable_vllm.tables import PlainTable  # noqa: E402
from blocktable_vllm.tracking import TrackedState  # noqa: E402
from blocktable_vllm.v2 import StableTables  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEER))


def fuzz(mode: str, calls: int, seed: int = 5) -> Outcome:
    return run(Plan(PROFILE, mode, "numpy", False, calls, 120, seed, 0.0), CPU)


def without(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A state whose method does nothing."""
    return lambda patch: patch.setattr(TrackedState, name, lambda self, *args, **kwargs: None)


def changed(name: str, change: Callable[..., Any], kind: type = TrackedState) -> Callable[[pytest.MonkeyPatch], None]:
    """A state one of whose methods is wrapped: `change` gets the method, then its arguments."""
    method = getattr(kind, name)
    return lambda patch: patch.setattr(kind, name, lambda self, *args, **kw: change(method, self, *args, **kw))


def show_rows_and_forget(method: Any, state: Any, group: int, name: str) -> Any:
    view = method(state, group, name)
    state._shown.clear()
    return view


def swap_what_is_counted(method: Any, state: Any, group: int, a: int, b: int) -> None:
    state._highest[group] = 0
    method(state, group, a, b)


def clear_counts(method: Any, state: Any, group: int) -> None:
    method(state, group)
    state.host.counts[group] = 0


def clamp_to_host(method: Any, state: Any, n: int) -> None:
    method(state, n)
    state.device.counts.copy_(torch.from_numpy(np.maximum(state.host.counts, 0)))


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "rows that come back are trusted": changed("_send_new_rows", lambda method, self, n: [n] * self._num_groups),
    "held rows are not watched": changed("show_rows", show_rows_and_forget),
    "written counts are not looked for": without("_settle_counts"),
    "a swap leaves tails": changed("swap_row", swap_what_is_counted),
    "clear() resets counts": changed("clear_group", clear_counts),
    "rows behind the commit are sent": changed("_within", lambda method, self, offsets, lengths, n: (offsets, lengths)),
    "counts of rows behind the commit are sent": changed("commit", clamp_to_host),
    "a count is not sent": changed("_mark_count", lambda method, self, group, row: self._rooms.__setitem__(row, 0)),
    "a move empties its source": changed(
        "move_row", lambda method, self, group, src, tgt, **kw: method(self, group, src, tgt, clears_source=True)
    ),
    "a patched kernel is ignored": lambda patch: patch.setattr(PlainTable, "_replaced_kernel", lambda self: None),
    "the interleave size is ignored": lambda patch: patch.setattr(
        PlainTable,
        "_geometry",
        lambda self, width, real=PlainTable._geometry: real(self, width)._replace(interleave_size=1),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_it_finds_a_broken_drop_in(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    MUTANTS[name](monkeypatch)
    outcome = fuzz("fast", 6000)
    assert outcome.failure is not None
    assert outcome.failure.startswith(("Different: ", "IndexError: "))  # counts that are not found lead out of the rows


@pytest.mark.parametrize("mode", ["fast", "strict", "v2"])
def test_the_right_one_passes(mode: str) -> None:
    assert fuzz(mode, 600).failure is None


@pytest.mark.parametrize("mode", ["fast", "strict", "v2"])
def test_a_check_changes_nothing(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("BLOCKTABLE_VLLM_CHECK", "host")
    assert fuzz(mode, 600).failure is None


def append_first(method: Any, rows: Any, row: int, block_ids: Any, *, replaces: bool) -> None:
    """A commit that waits takes what comes after it along."""
    rows.is_waiting, is_waiting = False, rows.is_waiting
    method(rows, row, block_ids, replaces=replaces)
    rows.is_waiting = is_waiting


def look_at_nothing(method: Any, rows: Any, *arguments: Any) -> None:
    """Slots are mapped before the commit that waits."""
    rows.is_waiting, is_waiting = False, rows.is_waiting
    method(rows, *arguments)
    rows.is_waiting = is_waiting


def as_v2(name: str, change: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    return changed(name, change, StableRows)


def table_without(name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """A drop-in one of whose attributes always has this value."""
    return lambda patch: patch.setattr(
        StableTables, name, property(lambda self: value, lambda self, given: None), raising=False
    )


V2_MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a waiting commit takes later appends along": as_v2("append", append_first),
    "slots do not wait for a commit": as_v2("map_slots", look_at_nothing),
    "a commit never comes": as_v2("commit", lambda method, rows: None),
    "an append overwrites": as_v2(
        "append", lambda method, rows, row, ids, *, replaces: method(rows, row, ids, replaces=True)
    ),
    "rows that others wrote to are forgotten": table_without("__foreign__", 0),
    "what dummy runs wrote is forgotten": table_without("__is_dummy__", False),
    "padded rows are left": as_v2("batch_rows", lambda method, rows, start, stop: method(rows, start, start or stop)),
    "memory that was mapped anew is trusted": as_v2("invalidate", lambda method, rows: None),
}


@pytest.mark.parametrize("name", V2_MUTANTS)
@pytest.mark.skipif(os.environ.get("BLOCKTABLE_CUPY_EMULATE") != "1", reason="commits wait: BLOCKTABLE_CUPY_EMULATE=1")
def test_it_finds_a_broken_v2_drop_in(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    V2_MUTANTS[name](monkeypatch)
    outcome = run(Plan(PROFILE, "v2", "cupy", False, 4000, 120, 5, 0.0), CPU)
    assert outcome.failure is not None
    assert outcome.failure.startswith("Different: ")


class Runner:
    """Calls a pair of tables as vLLM's runner does: rows in batch order, gaps filled by the last rows, padded rows."""

    def __init__(self, mode: str, seed: int) -> None:
        self.chance = random.Random(seed)
        self.met: Counter[str] = Counter()
        geometry = Geometry(True, (16, 32), (16, 16), (12, 6), (True, True), 12, 48, None, None, 1, False)
        self.rows, self.pair = geometry.max_num_reqs, Pair(geometry, PROFILE, mode, "numpy", CPU, self.met)
        self.lengths: list[int] = []  # tokens of the request in each row
        self.free = iter(range(1, 1 << 30))

    def do(self, name: str, *arguments: Any) -> None:
        self.pair.do((name, MULTI, *arguments))

    def new_blocks(self, before: int, after: int) -> list[list[int]]:
        return [[next(self.free) for _ in range(-(-after // size) + before // -size)] for size in (16, 32)]

    def finish_and_begin(self) -> None:
        gaps = [row for row, length in enumerate(self.lengths) if length > 150 or self.chance.random() < 0.1]
        for row in gaps:
            self.do("clear_row", row)
        while self.chance.random() < 0.6 and (gaps or len(self.lengths) < self.rows):
            row = gaps.pop(0) if gaps else len(self.lengths)
            self.lengths[row : row + 1] = [self.chance.randint(1, 60)]
            self.do("add_row", self.new_blocks(0, self.lengths[row]), row)
        while gaps:
            last = len(self.lengths) - 1
            if last not in gaps:
                self.do("move_row", last, gaps[0])
                self.lengths[gaps[0]] = self.lengths[last]
                gaps.pop(0)
            else:
                gaps.remove(last)
            self.lengths.pop()

    def step(self) -> None:
        self.finish_and_begin()
        number = len(self.lengths)
        if number > 2 and self.chance.random() < 0.2:
            a, b = self.chance.sample(range(number), 2)
            self.do("swap_row", a, b)
            self.lengths[a], self.lengths[b] = self.lengths[b], self.lengths[a]
        starts: list[int] = [0]
        positions: list[int] = []
        for row, before in enumerate(self.lengths):
            after = before + self.chance.choice((1, 1, 1, 3))
            if any(blocks := self.new_blocks(before, after)):
                self.do("append_row", blocks, row)
            positions += range(before, after)
            starts.append(len(positions))
            self.lengths[row] = after
        self.do("commit_block_table", number)
        self.do("compute_slot_mapping", number, starts, positions, False)
        self.do("fill_device", min(self.rows, number + self.chance.randint(0, 3)), 0)
        if self.chance.random() < 0.1:  # a dummy run
            self.do("save")
            self.do("commit_block_table", self.rows)
            self.do("restore")


@pytest.mark.parametrize("mode", ["fast", "strict"])
def test_vllms_runner_meets_no_difference_at_all(mode: str) -> None:
    """Not even a named one: they are met by calls that are faults already."""
    runner = Runner(mode, 3)
    for _ in range(80):
        runner.step()
    assert max(runner.lengths, default=0) > 0
    assert not runner.met


@pytest.mark.parametrize("mode", ["fast", "strict"])
def test_vllms_runner_is_right_to_the_checker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    monkeypatch.setenv("BLOCKTABLE_VLLM_CHECK", "host")
    runner = Runner(mode, 3)
    for _ in range(80):
        runner.step()
    assert runner.pair.ours.__check__.table.num_findings == 0
    assert [record.message[:36] for record in caplog.records] == ["The runner's KV cache configuration "]


def test_a_seed_gives_the_same_histories() -> None:
    first, second, other = (fuzz("fast", 300, seed) for seed in (1, 1, 2))
    assert first.met == second.met
    assert first.met != other.met


def test_a_difference_that_is_never_met_is_no_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktable_conformance.vllm_fuzz.run.MANY_CALLS", 1)
    outcome = fuzz("strict", 1)
    assert outcome.failure is not None
    assert "never met" in outcome.failure


def test_a_failing_history_is_cut_to_what_is_needed() -> None:
    history: list[Any] = [("call", number) for number in range(50)]
    kept = shrink(history, lambda calls: {("call", 7), ("call", 31)} <= set(calls), seconds=10)
    assert kept == [("call", 7), ("call", 31)]


def test_every_call_is_drawn_and_every_difference_belongs_somewhere() -> None:
    chance = random.Random(0)
    geometry = draw_geometry(chance, PROFILE, MANY)
    from blocktable_conformance.vllm_fuzz.histories import DRAW, WEIGHTS, Look

    assert DRAW.keys() == WEIGHTS.keys()
    rows = geometry.max_num_reqs
    widths = [8] * geometry.num_groups
    look = Look(geometry, widths, [[1] * rows for _ in widths], 0, False)
    assert {draw_call(chance, look)[0] for _ in range(30000)} == WEIGHTS.keys()
    plans = [
        Plan(profile, mode, "numpy", tails, 1, 1, 0, 0.0)
        for profile in ("0.25.1", "0.33.0")
        for mode, tails in (("fast", False), ("strict", False), ("fast", True))
    ]
    assert all(any(is_expected(name, plan) for plan in plans) for name in DIFFERENCES)


def test_every_call_of_the_v2_runner_is_drawn_and_every_difference_belongs_somewhere() -> None:
    chance = random.Random(0)
    geometry = stable_histories.draw_geometry(chance, "0.33.0")
    assert stable_histories.DRAW.keys() == stable_histories.WEIGHTS.keys()
    counts = [[1] * geometry.max_num_reqs for _ in geometry.block_sizes]
    look = stable_histories.Look(geometry, "0.33.0", [8] * geometry.num_groups, counts, counts)
    assert {stable_histories.draw_call(chance, look)[0] for _ in range(30000)} == stable_histories.WEIGHTS.keys()
    plans = [Plan(profile, "v2", "numpy", False, 1, 1, 0, 0.0) for profile in ("0.25.1", "0.32.0", "0.33.0")]
    assert all(any(is_expected(name, plan) for plan in plans) for name in V2_DIFFERENCES)


def test_without_vllms_files_it_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "blocktable_conformance.vllm_fuzz", "--peers", str(tmp_path), "--mode", "fast"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is not there" in done.stdout
    assert "2 comparisons, 2 failed" in done.stdout
