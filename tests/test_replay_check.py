"""Replays run the checker: what a recorded engine did wrong is said, and a right one has no finding (R38)."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable import cli
from blocktable_replay.lane import Lane
from blocktable_replay.options import ReplayOptions
from blocktable_replay.progress import SilentProgress
from blocktable_replay.readers import read_trace
from blocktable_replay.run import Replay
from blocktable_replay.synthetic import EXERCISE, SHIPPED

CONFIG = bt.BlockTableConfig(
    groups=[bt.KVCacheGroup(block_size=4, num_blocks=60)],
    max_num_reqs=4,
    max_num_batched_tokens=32,
    max_model_len=64,
)


def step(table: bt.BlockTable, row: int, *positions: int) -> None:
    starts = np.array([0, len(positions)], np.int32)
    table.step(np.array([row], np.int32), starts, np.array(positions, np.int64))


def drive(table: bt.BlockTable) -> None:
    """Block 2 is given to row 1 while row 0 has it; row 0 writes it at the second step."""
    table.set_row(0, [1, 2])
    step(table, 0, *range(5))
    table.set_row(1, [3, 2])
    step(table, 0, 5)


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    path, table = tmp_path / "run.btrace", bt.BlockTable(CONFIG, "numpy")
    with table.record(path):
        drive(table)
    return path


def replay(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, dict[str, Any]]:
    numbers = path.with_suffix(".json")
    status = cli.main(["replay", str(path), "--quiet", "--json", str(numbers), *options])
    return status, capsys.readouterr().out, json.loads(numbers.read_text())


def test_a_recording_of_a_wrong_engine_fails(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said, summary = replay(wrong, capsys)
    assert status == 1
    head, line = (re.split("  +", text) for text in said.splitlines() if re.match("finding|shared_block", text))
    assert head == ["finding", "step", "group", "row", "position", "block", "message"]
    assert line[:6] == ["shared_block_written", "1", "0", "0", "5", "2"]
    assert "block 2 (slot 9)" in line[6]
    assert "FAILED: 1 findings of the engine, 1 of severity raise in 2 steps" in said
    assert summary["mismatches"] == 0
    findings = summary["findings"]
    assert (findings["count"], findings["raised"], findings["by_kind"]) == (1, 1, {"shared_block_written": 1})
    (shown,) = findings["shown"]
    wanted = {"kind": "shared_block_written", "step": 1, "group": 0, "row": 0, "position": 5, "block_id": 2, "slot": 9}
    assert {name: shown[name] for name in wanted} == wanted


def test_it_may_be_left_out(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said, summary = replay(wrong, capsys, "--check", "off")
    assert (status, summary["findings"]) == (0, None)
    assert "shared_block" not in said


def test_what_is_reported_alone_is_said_and_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, table = tmp_path / "run.btrace", bt.BlockTable(CONFIG, "numpy")
    with table.record(path):
        table.set_row(0, [1, 2])
        step(table, 0, 0, 1)
        step(table, 0, 4)
    status, said, summary = replay(path, capsys)
    assert (status, summary["findings"]["by_kind"], summary["findings"]["raised"]) == (0, {"position_gap": 1}, 0)
    assert "\nposition_gap" in said
    assert "is right (numpy (host)" in said
    assert said.endswith("; 1 findings of the engine, 0 of severity raise.\n")


def test_the_page_has_them(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the report needs the extra `report`")
    page = wrong.with_suffix(".html")
    assert replay(wrong, capsys, "--report", str(page))[0] == 1
    text = page.read_text()
    assert 'class="verdict failed"' in text
    assert "<h2>Findings of the engine</h2>" in text
    assert "<td>shared_block_written</td><td>1</td><td>0</td><td>0</td><td>5</td><td>2</td>" in text


def test_a_call_that_raised_a_finding_raises_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What follows such a call is right only where it changed nothing."""
    path, table = tmp_path / "run.btrace", bt.BlockTable(CONFIG, "numpy", check="host")
    with table.record(path, digests=True):
        table.set_row(0, [1, 2])
        with pytest.raises(bt.CheckError):
            table.append_row(0, [2])
        with pytest.raises(bt.CheckError):
            step(table, 0, 8)
        table.append_row(0, [3])
        step(table, 0, 8)
    status, _, summary = replay(path, capsys)
    assert (status, summary["mismatches"], summary["notes"]) == (1, 0, [])
    assert summary["findings"]["by_kind"] == {"duplicate_block": 1, "missing_block": 1}
    status, _, summary = replay(path, capsys, "--check", "off")
    assert (status, summary["mismatches"]) == (0, 0)


def test_a_right_replay_has_no_finding_and_a_recording_of_it_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything that the synthetic trace makes happen: sharing, forks, windows, rollbacks, preemption. Rules: R38."""
    path = tmp_path / "run.btrace"
    for trace in (["--record", str(path), "--max-steps", "700"], [str(path)]):
        assert cli.main(["replay", "--quiet", "--json", str(tmp_path / "numbers.json"), *trace]) == 0
        assert json.loads((tmp_path / "numbers.json").read_text())["findings"]["count"] == 0
    capsys.readouterr()


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,480,30\n2023-11-16 18:17:04.03,318,28\n"
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 27, "input_length": 1024, "output_length": 40, "hash_ids": [0, 1]}\n'
)


@pytest.mark.parametrize("rows", ["stable", "dense"])
@pytest.mark.parametrize("content", [AZURE, MOONCAKE], ids=["azure", "mooncake"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_right_replays_of_traces_have_no_finding(
    content: str, rows: str, ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prefixes that two requests share, drafts, forks and a window, on one rank and the second of two. Rules: R38."""
    path = tmp_path / "trace"
    path.write_text(content)
    options = ["--all-at-once", "--lookahead", "3", "--fork-every", "2", "--rows", rows]
    options += ["--group", "block_size=16", "--group", "block_size=64,kernel_block_size=16,sliding_window=128"]
    if ranks > 1:
        options += ["--context-parallel", "world_size=2,rank=1,interleave_size=16"]
    status, _, summary = replay(path, capsys, *options)
    assert (status, summary["mismatches"], summary["findings"]["count"]) == (0, 0, 0)
    assert summary["schedule"]["forks"] == 1


@pytest.mark.parametrize("content", [None, AZURE, MOONCAKE], ids=["synthetic", "azure", "mooncake"])
def test_kernels_find_nothing_in_right_replays_of_traces(content: str | None, tmp_path: Path) -> None:
    """As in host mode; every group says how many blocks it has. Rules: R41."""
    path, options = SHIPPED, EXERCISE
    if content is not None:
        path, options = tmp_path / "trace", ReplayOptions()
        path.write_text(content)
    config = options.config()
    groups = [replace(group, num_blocks=group.num_blocks or 1 << 16) for group in config.groups]
    lane = Lane("plain", bt.get_backend("numpy"), config)
    checker = Lane("checker", bt.get_backend("numpy"), replace(config, groups=groups), check="device")
    result = Replay(read_trace(path), options, [lane], None, checker).run(SilentProgress(), max_steps=300)
    assert result.counters["steps"] > 20
    assert (checker.table.collect_findings(), checker.engine_findings) == ((), [])
