"""`blocktable bench`: inputs, the check before the clock starts, records, tables; no figure is looked at."""

import itertools
import json
import re
import runpy
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable_benchmarks import callers, exports, small_engine
from blocktable_benchmarks import worker as worker_module
from blocktable_benchmarks.__main__ import main, make_lanes, parse
from blocktable_benchmarks.agreement import WrongResult, check_slots, check_steps
from blocktable_benchmarks.caller_lane import CallerLane
from blocktable_benchmarks.callers import (
    PEER_SPELLINGS,
    SIZES,
    SPELLINGS,
    caller_workloads,
    case_name,
    make_churn,
    wanted_share,
)
from blocktable_benchmarks.cells import Table
from blocktable_benchmarks.peers import find_peers
from blocktable_benchmarks.render import as_markdown, as_text, fill_page
from blocktable_benchmarks.runner import Lane, Results, merge, run_lane
from blocktable_benchmarks.table_lane import TableLane
from blocktable_benchmarks.tables import best_peer, make_tables
from blocktable_benchmarks.timing import Pace, host_time
from blocktable_benchmarks.worker import SECTIONS, Worker
from blocktable_benchmarks.workloads import (
    SWEEPS,
    Workload,
    bandwidth_workloads,
    make_inputs,
    shrink,
    slot_workloads,
    step_workloads,
    sweep_workload,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

SMALL = [shrink(workload) for workload in (*step_workloads(), *slot_workloads())]


def make_worker(records: list[dict[str, Any]], **changes: Any) -> Worker:
    plan = {
        "kind": "backend",
        "name": "numpy",
        "sections": list(SECTIONS),
        "is_quick": True,
        "seconds": 100,
        "sweep_seconds": 100,
        **changes,
    }
    return Worker(plan, lambda section, key, **content: records.append({"section": section, "key": key, **content}))


def results_of(records: list[dict[str, Any]], name: str = "numpy", kind: str = "backend") -> Results:
    results = Results("blocktable bench", None)
    lane = Lane(name, {"kind": kind, "is_quick": False})
    results.begin(lane)
    for record in records:
        results.take(lane, record)
    return results


# Inputs.


@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.name)
def test_inputs_are_the_same_every_time_and_fit_the_table(workload: Workload) -> None:
    first, second = make_inputs(workload), make_inputs(workload)
    assert (first.positions == second.positions).all()
    assert sorted(first.idx_mapping.tolist()) == list(range(workload.num_reqs))
    assert first.query_start_loc[-1] == first.positions.size == workload.num_tokens
    assert first.positions.min() >= 0
    assert first.positions.max() < workload.filled * workload.block_size * workload.world_size
    rows = [row for turn in first.turns for row in turn.rows.tolist()]
    assert len(set(rows)) == len(rows)  # the turns come round to a row once


@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.name)
def test_both_forms_of_a_turn_say_the_same(workload: Workload) -> None:
    for turn in make_inputs(workload).turns:
        assert [row for row, _ in turn.requests] == turn.rows.tolist()
        for group, ids in enumerate(turn.ids):
            assert [blocks[group] for _, blocks in turn.requests] == [[block_id] for block_id in ids.tolist()]


def test_all_workloads_have_names_of_their_own_and_a_possible_table() -> None:
    workloads = [*step_workloads(), *slot_workloads(), *bandwidth_workloads()]
    workloads += [sweep_workload(axis, changes) for axis, points in SWEEPS.items() for _, changes in points]
    for workload in workloads:
        assert workload.config().capacity(0) >= workload.filled
        assert workload.max_steps > 20
    names = [workload.name for workload in step_workloads()]
    assert len(set(names)) == len(names)


def test_a_sweep_has_at_most_six_points_an_axis() -> None:
    assert max(len(points) for points in SWEEPS.values()) <= 6


# The check before the clock.


@pytest.mark.parametrize("takes_lists", [False, True])
@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.name)
def test_the_numpy_lane_agrees_with_itself(workload: Workload, takes_lists: bool) -> None:
    lane, inputs = TableLane("numpy", None, takes_lists=takes_lists), make_inputs(workload)
    lane.open(inputs)
    assert check_steps(lane, inputs, is_peer=False) == []
    lane.rewind()
    assert (lane.table.num_blocks_per_row[:, : workload.num_reqs] == workload.filled).all()


def test_one_wrong_slot_is_named() -> None:
    lane, inputs = TableLane("numpy", None), make_inputs(SMALL[0])
    lane.open(inputs)
    lane.slots = lambda: [slots + (np.arange(slots.size) == 3) for slots in TableLane.slots(lane)]  # type: ignore[method-assign]
    with pytest.raises(WrongResult, match=r"1 of 64 slots differ; the first is token 3"):
        check_slots(lane, inputs)


def test_an_entry_behind_a_row_is_a_note_for_a_peer_and_wrong_for_a_backend() -> None:
    inputs = make_inputs(SMALL[0])
    for is_peer in (True, False):
        lane = TableLane("numpy", None)
        lane.open(inputs)

        def stale(lane: TableLane = lane) -> list[Any]:
            tables = TableLane.tables(lane)
            tables[0][0, -1] = 7
            return tables

        lane.tables = stale  # type: ignore[method-assign]
        if is_peer:
            assert check_steps(lane, inputs, is_peer=True) == [
                "group 0: 1 entries after filled columns are not NULL (R5)"
            ]
        else:
            with pytest.raises(WrongResult, match="column 63"):
                check_steps(lane, inputs, is_peer=False)


def test_runs_beside_which_the_processor_was_slow_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timed:
        """Its steps take as long as the processor is slow."""

        slowness = 1

        def step(self, turn: int) -> None:
            time.sleep(0.0002 * self.slowness)

        def rewind(self) -> None:
            self.slowness = next(slowness)

        def synchronize(self) -> None:
            pass

    slowness: Iterator[int] = itertools.cycle([20, 1, 20])
    subject = Timed()
    pace = Pace(best_us=100.0)
    monkeypatch.setattr(pace, "now", lambda: 100.0 * subject.slowness)
    assert host_time(subject, 3, 4, pace) < 2000  # of its runs two in three take 4000
    assert pace.last == 1.0
    slowness = itertools.repeat(20)
    assert host_time(subject, 3, 4, pace, patience=0.0) > 4000  # rather a slow figure than none, and it says so
    assert pace.last == 20.0


# Records.


def test_every_section_runs_and_makes_a_table() -> None:
    """Those of a GPU run on one alone."""
    records: list[dict[str, Any]] = []
    make_worker(records, sections=[section for section in SECTIONS if section != "machine"]).run()
    assert not [record for record in records if "error" in record or "not_run" in record]
    titles = " ".join(table.title for table in make_tables(results_of(records).data))
    for word in (
        "machine",
        "took part",
        "256 requests, 8 groups: host us",
        "On the CPU",
        "DCP 4",
        "Scaling over width",
    ):
        assert word in titles


def test_a_workload_that_fails_costs_its_own_record_only(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = check_steps

    def break_one(lane: Any, inputs: Any, **options: Any) -> list[str]:
        if inputs.workload.world_size > 1:
            raise WrongResult("planted")
        return plain(lane, inputs, **options)

    monkeypatch.setattr(worker_module, "check_steps", break_one)
    records: list[dict[str, Any]] = []
    make_worker(records, sections=["steps"]).run()
    failed = [record for record in records if "error" in record]
    assert [record["error"] for record in failed] == ["WrongResult: planted"]
    assert len(records) == 2 + len(step_workloads())  # what the lane is, and its pace
    (error,) = results_of(records).data["errors"]
    assert error["where"] == f"steps: {failed[0]['key']}"


def test_what_the_time_is_over_for_is_recorded_as_not_run() -> None:
    records: list[dict[str, Any]] = []
    make_worker(records, sections=["steps"], seconds=-1).run()
    assert all("not_run" in record for record in records[1:-1])
    assert records[-1]["value"]["pace_us"] > 0
    results = results_of(records).data
    assert not results["errors"]
    assert [table.title for table in make_tables(results)][-1] == "What was not run"


def test_an_emulated_backend_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bt.get_backend("numpy").__class__, "is_emulated", True, raising=False)
    records: list[dict[str, Any]] = []
    make_worker(records, is_quick=False, sections=["steps"]).run()
    assert len(records) == 1
    assert "mean nothing" in records[0]["value"]["absent"]


def test_a_process_that_dies_is_recorded() -> None:
    results = Results("blocktable bench", None)
    run_lane(Lane("broken", {"kind": "backend", "seconds": 10, "is_quick": True}), results, lambda text: None)
    (error,) = results.data["errors"]
    assert error["where"] == "process"


# The command.


def test_the_command_measures_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    words = ["--quick", "--backend", "numpy", "--no-peers", "--section", "slots", "--json", str(path)]
    assert main(words) == 0
    results = json.loads(path.read_text())
    assert set(results["lanes"]["numpy"]["slots"]) == {workload.name for workload in slot_workloads()}
    assert results["machine"]["numpy_scatter_us"] > 0
    assert results["versions"]["blocktable"] == bt.__version__
    printed = capsys.readouterr().out
    assert "blocktable bench --quick --backend numpy" in printed
    assert "nothing was timed" in printed


def test_results_can_be_shown_again_and_fill_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records: list[dict[str, Any]] = []
    make_worker(records, sections=["steps"]).run()
    results = results_of(records)
    results.path = tmp_path / "result.json"
    results.write()
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- bench: steps -->\nold\n<!-- bench end -->\nafter\n<!-- bench: sweep -->\n<!-- bench end -->\n"
    )
    assert main(["--from", str(results.path), "--fill", str(page)]) == 0
    filled = page.read_text()
    assert "old" not in filled
    assert "| numpy |" in filled
    assert "Not measured yet." in filled
    assert main(["--from", str(results.path), "--fill", str(page)]) == 0
    assert page.read_text() == filled
    assert "numpy, from lists" in capsys.readouterr().out


def test_a_page_without_places_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(bt.BlockTableError, match="bench: NAME"):
        fill_page(page, [])


def test_the_report_draws_steps_and_sweeps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records: list[dict[str, Any]] = []
    make_worker(records, sections=["steps", "sweep"]).run()
    results = results_of(records)
    results.path = tmp_path / "result.json"
    results.write()
    assert main(["--from", str(results.path), "--report", str(tmp_path / "report.html")]) == 0
    report = (tmp_path / "report.html").read_text()
    assert report.count("data:image/svg+xml;base64,") == 2
    assert "http" not in report.replace("http://www.w3.org", "")


def test_a_backend_that_is_asked_for_and_absent_is_a_failure(tmp_path: Path) -> None:
    results = Results("blocktable bench", tmp_path / "result.json")
    results.begin(lane := Lane("numpy", {"kind": "backend", "is_quick": True}))
    results.take(lane, {"section": "lane", "key": "about", "value": {"absent": "no GPU"}})
    assert main(["--from", str(results.path), "--backend", "numpy"]) == 1


@pytest.mark.parametrize("words", [["--backend", "nosuch"], ["--from", "nosuch.json"], ["--peers", "nosuch"], ["--x"]])
def test_a_wrong_call_is_refused_in_a_sentence(words: list[str]) -> None:
    with pytest.raises(bt.BlockTableError):
        main(words)


def test_a_later_run_adds_what_the_first_one_lacks() -> None:
    def record(section: str, key: str, value: float) -> dict[str, Any]:
        return {"section": section, "key": key, "value": {"host_us": value}}

    late = {"section": "sweep", "key": "width 8", "not_run": "the lane's time was over"}
    first = results_of([record("steps", "a step", 1.0), late]).data
    second = results_of([record("steps", "a step", 2.0), record("sweep", "width 8", 3.0)]).data
    merged = merge([first, second])
    (lane,) = merged["lanes"].values()
    assert lane["steps"]["a step"] == {"host_us": 1.0}
    assert lane["sweep"]["width 8"] == {"host_us": 3.0}
    assert not merged["not_run"]
    assert len(merged["further_commands"]) == 1


def test_ratios_are_those_to_the_best_peer() -> None:
    def step(host_us: float) -> list[dict[str, Any]]:
        value = {"host_us": host_us, "waited_us": 2 * host_us, "notes": [], "memory": {}}
        return [{"section": "steps", "key": "a step", "value": value}]

    results = results_of(step(10.0)).data
    for name, time_us in (("slow", 100.0), ("fast", 45.0)):
        results["lanes"].update(results_of(step(time_us), name, "peer").data["lanes"])
    (table,) = [table for table in make_tables(results) if table.name == "steps"]
    assert [row[-2] for row in table.rows] == ["4.5x", "0.5x", "1.0x"]


# Callers.


@pytest.mark.parametrize("is_mix", [False, True])
@pytest.mark.parametrize("workload", caller_workloads(is_quick=True), ids=lambda workload: workload.name)
def test_requests_come_and_go_as_the_batch_says(workload: Workload, is_mix: bool) -> None:
    inputs = make_inputs(workload)
    steps = make_churn(inputs, 100, is_mix=is_mix)
    assert [step.ends for step in steps] == [step.ends for step in make_churn(inputs, 100, is_mix=is_mix)]
    rows = inputs.idx_mapping.tolist()
    free = set(range(workload.num_reqs, workload.num_rows))
    for step in steps:
        assert all(rows[place] == row for place, row in step.ends)
        assert all(row in free for _, row, _ in step.begins)
        assert [place for place, _ in step.ends] == [place for place, _, _ in step.begins]
        for (place, old), (_, new, ids) in zip(step.ends, step.begins, strict=True):
            free = free - {new} | {old}
            rows[place] = new
            assert [len(group) for group in ids] == [workload.filled] * workload.num_groups
        assert rows == step.idx_mapping.tolist()
        assert all(rows[place] == row for place, row, _ in step.grows)
        assert not {place for place, _, _ in step.grows} & {place for place, _ in step.ends}
    assert len({len(step.ends) for step in steps}) == (3 if is_mix else 1)


def test_every_spelling_is_checked_and_timed() -> None:
    records: list[dict[str, Any]] = []
    make_worker(records, sections=["callers"]).run()
    assert not [record for record in records if "error" in record]
    found = {record["key"]: record["value"] for record in records if record["section"] == "callers"}
    names = [workload.name for workload in caller_workloads(is_quick=True)]
    spelled = [spelling for spelling in SPELLINGS if CallerLane("numpy", None).can_spell(spelling)]
    assert list(found) == [f"{name}: {spelling.key}" for name in names for spelling in spelled]
    assert all(value["host_us"] > 0 for value in found.values())
    assert (
        found[f"{names[0]}: commit_mix"]["bytes_per_step"] > found[f"{names[0]}: commit_steady"]["bytes_per_step"] > 0
    )
    assert [record["key"] for record in records if record["section"] == "small_engine"] == ["8 requests x 200 tokens"]


def test_a_host_backend_has_no_calls_of_a_device() -> None:
    lane = CallerLane("numpy", None)
    missing = {spelling.key for spelling in SPELLINGS if not lane.can_spell(spelling)}
    assert missing == {"host", "captured", "inference", "default_device"}


def test_a_spelling_whose_result_is_wrong_costs_its_own_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = CallerLane._lists_step

    def wrong(self: CallerLane) -> Callable[[int], object]:
        self.id_lists = [callers_ids_plus_one(ids) for ids in self.id_lists]
        return plain(self)

    def callers_ids_plus_one(ids: Any) -> Any:
        return [callers_ids_plus_one(each) if isinstance(each, list) else each + 1 for each in ids]

    monkeypatch.setattr(CallerLane, "_lists_step", wrong)
    records: list[dict[str, Any]] = []
    make_worker(records, sections=["callers"]).run()
    failed = [(record["key"].rpartition(": ")[2], record["error"]) for record in records if "error" in record]
    # What comes later takes the same lists.
    assert failed[0][0] == "lists"
    assert {key for key, _ in failed} <= {"lists", "commit_steady"}
    assert all("entries of the batch table differ" in error for _, error in failed)


def test_a_table_that_cannot_be_made_is_said_for_each_figure() -> None:
    workload, records = caller_workloads(is_quick=True)[0], []

    class Broken(CallerLane):
        def open(self, inputs: Any, steps_in_flight: int = 2) -> None:
            raise bt.ConfigError("planted")

    clock = callers.Clock(3, 2, Pace(), 0.0)
    case = callers.CallerCase(workload, Broken("numpy", None), CallerLane("numpy", None), clock, is_peer=False)
    for spelling in SPELLINGS[:2]:
        with pytest.raises(bt.ConfigError) as error:
            case.measure(spelling)
        records.append(str(error.value))
    case.close()
    assert records == ["planted", "planted"]


def test_what_a_step_spends_otherwise_is_not_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        untimed = 0.0

        def step(self, turn: int) -> None:
            time.sleep(0.002)
            self.untimed += 0.002

        def rewind(self) -> None: ...

        def synchronize(self) -> None: ...

    subject, pace = Slow(), Pace()
    whole = host_time(subject, 3, 2, pace, patience=0.0)
    assert host_time(subject, 3, 2, pace, 0.0, lambda: subject.untimed) <= whole - 1900


@pytest.mark.parametrize(
    ("key", "num_reqs", "num_groups", "backend", "share"),
    [
        ("same", 256, 1, "cupy", 0.25),
        ("same", 32, 1, "triton", 0.25),
        ("same", 8, 1, "cupy", 0.40),
        ("same", 256, 8, "cupy", 0.25 / 3),
        ("same", 8, 8, "cupy", 0.40 / 3),
        ("single", 256, 1, "numba", 0.75),
        ("host", 256, 1, "cupy", 1.0),
        ("nothing", 256, 1, "cupy", None),
        ("same", 256, 1, "torch", None),
    ],
)
def test_shares_that_are_wanted(key: str, num_reqs: int, num_groups: int, backend: str, share: float | None) -> None:
    (spelling,) = [spelling for spelling in SPELLINGS if spelling.key == key]
    assert wanted_share(spelling, num_reqs, num_groups, backend) == (None if share is None else pytest.approx(share))


def test_a_row_stands_beside_a_work_that_engines_tables_do() -> None:
    works = {spelling.key for spelling in PEER_SPELLINGS}
    assert {spelling.beside for spelling in SPELLINGS} - {""} <= works
    assert all(spelling.beside for spelling in SPELLINGS if spelling.share is not None)


def caller_run(**lanes: float) -> dict[str, Any]:
    """Results in which each lane takes so many microseconds for everything, and half of it where nothing changes."""
    run = results_of([]).data | {"lanes": {}}
    for name, time_us in lanes.items():
        is_peer = name.startswith("v")
        records = [
            {"section": "callers", "key": f"{case_name(*size)}: {spelling.key}", "value": figure | {"pace": 1.0}}
            for size in SIZES
            for spelling in (PEER_SPELLINGS if is_peer else SPELLINGS)
            for figure in [{"host_us": time_us / (2 if spelling.work == "nothing" else 1), "appended": 16}]
        ]
        lane = name.replace("_", " ").replace("v", "vLLM 0.").replace("x", ".")
        run["lanes"].update(results_of(records, lane, "peer" if is_peer else "backend").data["lanes"])
    return run


def test_shares_are_those_of_the_v1_table_that_is_named() -> None:
    run = caller_run(cupy=13.0, numba=13.0, numpy=500.0, v33x0_V1=90.0, v25x1_V1=40.0, v25x1_V2=10.0)
    first, host, *others = [table for table in make_tables(run) if table.name.startswith("caller")]
    assert [table.title for table in make_tables(run) if table.name == "headline"]
    assert first.title == "256 requests, 1 group: host us of a step (share of vLLM 0.25.1 V1's)"
    assert first.header == ["", "wanted share", "cupy", "numba (1.5 x wanted)", "numpy", "vLLM 0.25.1 V1"]
    rows = {row[0]: row[1:] for row in first.rows}
    assert rows[SPELLINGS[0].name] == ["0.25", "13.0 (0.33) missed", "13.0 (0.33)", "500.0", "40.0"]
    assert rows["no change"] == ["-", "6.5", "6.5", "250.0", "20.0"]
    assert rows["the slicing alone"] == ["-", "13.0", "13.0", "500.0", "-"]
    assert rows["pace (1.00: undisturbed)"] == ["-", "1.00", "1.00", "1.00", "1.00"]
    assert [row[3] for row in host.rows] == ["500.0 missed"] * 2  # of 150 us that a step on the host may take
    assert [table.title for table in others][-2:] == [
        "What a call or another spelling adds, host us",
        "The engines' tables by their own calls, host us of a step",
    ]
    costs = {row[0]: row[1:] for row in others[-2].rows}
    assert costs["256 requests, 1 group: one `append_row` of one block, on average"] == [
        *("0.4", "0.81 missed", "0.81 missed", "31.25 missed")
    ]
    assert others[-1].header == ["", "vLLM 0.33.0 V1", "vLLM 0.25.1 V1", "vLLM 0.25.1 V2"]


def test_the_page_says_which_shares_are_kept_and_which_one_is_missed_most() -> None:
    run = caller_run(cupy=15.0, numba=1.0, v25x1_V1=40.0)
    source, text, method = [table.text for table in make_tables(run) if table.text]
    assert source.startswith("From `")
    assert method.startswith("### Every size of batch\n")
    assert text.startswith("## What a user gets\n\nHost time of a step")
    assert re.search(
        r'^- cupy keeps \d+ of 78 shares\. Furthest off is ".*" with .* groups: 0\.\d+ where', text, re.MULTILINE
    )
    assert "- numba keeps 78 of 78 shares (1.5 times what is wanted of the others).\n" in text
    without = caller_run(cupy=15.0)
    assert any("so there are no shares" in table.text for table in make_tables(without))


def test_shares_are_of_one_run() -> None:
    """Of a second run that measured callers nothing is shown, though what the first one lacks is taken from it."""
    first, second = caller_run(cupy=10.0, v25x1_V1=40.0), caller_run(cupy=20.0, triton=20.0, v25x1_V1=20.0)
    older = results_of([]).data
    tables = [table for table in make_tables(merge([older, first, second])) if table.name == "callers"]
    assert tables[0].header == ["", "wanted share", "cupy", "vLLM 0.25.1 V1"]
    assert tables[0].rows[0][2:] == ["10.0 (0.25)", "40.0"]


def test_lists_and_table_prepare_the_same_step() -> None:
    make_tensor, view, _ = small_engine._library()
    engines: list[Any] = [small_engine.ListEngine(make_tensor), small_engine.TableEngine(5, view)]
    lists, table = (small_engine.Decode(engine, 5, 20) for engine in engines)
    for turn in range(40):
        small_engine._check(lists.step(turn), table.step(turn))
    positions, slots, context_lens, tables = table.step(40)
    assert positions.tolist() == [60, 61, 62, 63, 64]  # 20, 21, .. tokens at first, and one more each step
    assert context_lens.tolist() == [61, 62, 63, 64, 65]
    assert slots[0] == tables[0, 3] * 16 + 12
    with pytest.raises(WrongResult, match="slots differ"):
        small_engine._check(lists.step(40), (positions, slots + 1, context_lens, tables))


def test_callers_are_measured_by_default_and_can_be_measured_alone() -> None:
    for words, first in (([], "callers"), (["--section", "callers"], "callers"), (["--section", "steps"], "steps")):
        _, lane = make_lanes(parse(["--backend", "numpy", "--no-peers", *words]))
        assert lane.plan["sections"][0] == first


@pytest.mark.torch
@pytest.mark.parametrize("version", ["0.25.1", "0.33.0"])
def test_vllms_tables_do_the_same_works_by_their_own_calls(version: str, tmp_path: Path) -> None:
    """Where vLLM's files lie in .peers; in Triton's interpreter."""
    if not (ROOT / f".peers/vllm-{version}").is_dir():
        pytest.skip(f"no vLLM {version} in .peers: tox -e torch")
    (tmp_path / "peers").mkdir()
    (tmp_path / f"peers/vllm-{version}").symlink_to(ROOT / f".peers/vllm-{version}")
    path = tmp_path / "result.json"
    words = ["--quick", "--backend", "numpy", "--peers", str(tmp_path / "peers"), "--section", "callers"]
    assert main([*words, "--json", str(path)]) == 0
    found = json.loads(path.read_text())["lanes"][f"vLLM {version} V1"]["callers"]
    assert len(found) == 2 * len(PEER_SPELLINGS)


# The page.


PAGES = ("docs/performance.md", "benchmarks/results/README.md")


def page_command() -> list[str]:
    """Return the arguments of the command that the page names for its tables, without the pages."""
    page = (ROOT / PAGES[0]).read_text()
    (command,) = re.findall(rf"^blocktable (bench --from [^`]*?--fill) {' '.join(PAGES)}$", page, re.MULTILINE)
    return shlex.split(command.replace("\\\n", ""))[1:]


def fill(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the command over copies of the pages, and return what they then are."""
    monkeypatch.chdir(ROOT)
    copies = [folder / f"{number}.md" for number in range(len(PAGES))]
    for page, copy in zip(PAGES, copies, strict=True):
        shutil.copy(ROOT / page, copy)
    main([*words, *map(str, copies)])
    return [copy.read_text() for copy in copies]


def test_the_pages_show_what_their_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fill(tmp_path, page_command(), monkeypatch) == [(ROOT / page).read_text() for page in PAGES]


def test_the_page_leads_with_one_table_one_plot_and_the_command() -> None:
    first_screen = (ROOT / PAGES[0]).read_text().partition("\n## ")[0]
    assert len(first_screen.splitlines()) < 35
    assert (
        first_screen.count("<!-- bench: headline -->") == first_screen.count("![") == first_screen.count("```sh") == 1
    )


def test_no_page_says_that_a_lane_had_no_time() -> None:
    assert not [page for page in PAGES if re.search(r"time was over|budget was", (ROOT / page).read_text())]


def test_the_plot_is_drawn_from_the_run_that_it_names() -> None:
    script = runpy.run_path(str(ROOT / "docs/draw_step_times.py"))
    picture = script["PICTURE"].read_text()
    assert picture == script["draw"](json.loads(script["RUN"].read_text())), f"stale: run {script['COMMAND']}"
    (row,) = re.findall(r"^\| 8 groups: `append_row` .*$", (ROOT / PAGES[0]).read_text(), re.MULTILINE)
    assert not [figure for figure in re.findall(r"[\d,]+\.\d", row) if f">{figure}<" not in picture]


# Peers.


def test_peers_are_found_in_a_folder(tmp_path: Path) -> None:
    for version in ("0.33.0", "0.4.1"):
        (tmp_path / f"vllm-{version}" / "vllm").mkdir(parents=True)
    names = [peer.name for peer in find_peers(str(tmp_path))]
    assert names == ["vLLM 0.4.1 V1", "vLLM 0.33.0 V1", "vLLM 0.4.1 V2", "vLLM 0.33.0 V2"]
    lanes = make_lanes(parse(["--backend", "numpy", "--peers", str(tmp_path)]))
    assert [lane.name for lane in lanes] == ["machine", "numpy", *names]
    assert lanes[2].path == str(tmp_path / "vllm-0.4.1")


def test_a_peer_needs_a_gpu_or_says_so() -> None:
    records: list[dict[str, Any]] = []
    worker = make_worker(records, kind="peer", table="V2", sections=["steps"])
    worker.gpu = None
    worker.run()
    assert records[0]["value"] == {"absent": "vLLM's V2 table needs a GPU"}


# Rendering.


def test_both_renderings_hold_every_cell() -> None:
    table = Table("t", "A title", ["", "one", "two"], [["first", "1.0", "2"], ["second", "-", "3"]])
    assert as_text(table).splitlines()[-1].split() == ["second", "-", "3"]
    assert "| first | 1.0 | 2 |" in as_markdown(table)


def test_what_is_over_the_budget_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert main(["--quick", "--backend", "numpy", "--no-peers", "--budget", "0", "--json", str(path)]) == 1
    assert [entry["lane"] for entry in json.loads(path.read_text())["not_run"]] == ["machine", "numpy"]


# Exports.


def test_exports_are_measured_and_what_groups_share_is_counted() -> None:
    """Groups of one geometry at once take one call and one set of counts; each alone as many as there are groups."""
    records: list[dict[str, Any]] = []
    make_worker(records, sections=["exports"]).run()
    found = {record["key"]: record["value"] for record in records if record["section"] == "exports"}
    assert list(found) == [case.name for case in exports.CASES]
    together, alone = found["CSR, all groups at once"], found["CSR, each group alone"]
    assert (together["calls"], alone["calls"]) == (1, 2)
    assert alone["count_bytes"] == 2 * together["count_bytes"] > 0
    assert all(case["host_us"] > 0 for case in found.values())
    (table,) = [table for table in make_tables(results_of(records).data) if table.name == "exports"]
    assert [row[0] for row in table.rows] == [f"{name}: numpy" for name in found]


def test_a_wrong_export_is_found_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = exports.ExportLane.arrays_of

    def wrong(self: exports.ExportLane, sets: Any) -> dict[str, Any]:
        arrays = plain(self, sets)
        if self.table is not reference.table and "indptr" in arrays:
            arrays["indptr"][1] += 1
        return arrays

    inputs = make_inputs(exports.export_workload(is_quick=True))
    lane, reference = exports.ExportLane("numpy", None, inputs), exports.ExportLane("numpy", None, inputs)
    monkeypatch.setattr(exports.ExportLane, "arrays_of", wrong)
    with pytest.raises(WrongResult, match="CSR, 1 group: 1 of 9 indptr differ"):
        exports._measure(lane, reference, exports.CASES[0])


def test_the_drop_in_stands_beside_the_table_whose_calls_it_takes() -> None:
    """Its times are divided into those of every V1 table, and it is no peer of the backends."""
    workload = step_workloads()[0].name
    times = {
        "vLLM 1 V1": ("peer", 40.0, 80.0),
        "vLLM 1 V2": ("peer", 10.0, 20.0),
        "drop-in, fast, cupy": ("drop-in", 8.0, 16.0),
        "drop-in, v2, cupy": ("drop-in", 2.0, 5.0),
    }
    lanes = {
        name: {"kind": kind, "steps": {workload: {"host_us": host, "waited_us": waited}}}
        for name, (kind, host, waited) in times.items()
    }
    results = {"lanes": lanes, "machine": {}, "command": "", "date": "", "versions": {}, "errors": [], "not_run": []}
    assert best_peer(results, "steps", workload, "host_us") == 10.0
    first, second = [table for table in make_tables(results) if table.name.startswith("drop_ins")]
    assert [first.name, second.name] == ["drop_ins", "drop_ins_v2"]
    assert first.header == [
        *("", "host us", "host x vLLM 1 V1", "host x the faster"),
        *("with a wait us", "wait x vLLM 1 V1", "wait x the faster"),
    ]
    assert first.rows[-1] == ["drop-in, fast, cupy", "8.0", "5.0x", "5.0x", "16.0", "5.0x", "5.0x"]
    assert second.rows[-1] == ["drop-in, v2, cupy", "2.0", "5.0x", "5.0x", "5.0", "4.0x", "4.0x"]


def test_ratios_of_the_drop_in_are_of_its_own_run() -> None:
    """Beside it stands what the engine's table took then, though the first run keeps its own figure everywhere else."""
    workload = step_workloads()[0].name

    def run(**times: float) -> dict[str, Any]:
        lanes = {
            name: {
                "kind": "drop-in" if name == "drop_in" else "peer",
                "steps": {workload: {"host_us": time, "waited_us": time}},
            }
            for name, time in times.items()
        }
        return {"lanes": lanes, "command": "", "date": "", "errors": [], "not_run": [], "machine": {}, "versions": {}}

    merged = merge([run(V1=100.0), run(V1=40.0, drop_in=8.0)])
    assert merged["lanes"]["V1"]["steps"][workload]["host_us"] == 100.0
    (table,) = [table for table in make_tables(merged) if table.name == "drop_ins"]
    assert table.rows[1:] == [
        ["V1", "40.0", *["1.0x"] * 2, "40.0", *["1.0x"] * 2],
        ["drop_in", "8.0", *["5.0x"] * 2, "8.0", *["5.0x"] * 2],
    ]


@pytest.mark.torch
def test_the_drop_ins_and_the_engines_tables_do_the_same_work_once_more_with_churn() -> None:
    records: list[dict[str, Any]] = []
    make_worker(records, kind="drop-in", mode="v2", sections=["drop_ins"]).run()
    found = {record["key"]: record["value"] for record in records if record["section"] == "drop_ins"}
    assert [*found][:4] == [workload.name for workload in step_workloads()[:4]]
    assert "begin and end each step" in [*found][4]
    assert all(value["host_us"] > 0 for value in found.values())


def test_every_table_has_a_name_that_a_page_can_be_filled_by(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- bench: drop_ins -->\n<!-- bench end -->\n")
    fill_page(page, [Table("drop_ins", "title", ["", "x"], [["a", "1"]])])
    assert "| a | 1 |" in page.read_text()
