"""Damaged recordings end in a sentence and an exit status; a replay and its output never destroy a file."""

import contextlib
import copy
import gc
import gzip
import inspect
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable import cli
from blocktable_replay import Recording, RecordingError, synthetic
from blocktable_replay.explain import main as explain
from blocktable_replay.lane import Lane

pytestmark = [pytest.mark.slow, pytest.mark.faults]

NUM_FILES = 300
"""Damaged recordings of each seed."""

ODD: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 2, 7, 2**31 - 1, -(2**31), 2**32, 2**53, 2**63 - 1, -(2**63), 2**70, 1.5, 1e300),
    *("", "x", "AAAA", "\ud800", [], [[]], [0], [1, 2], [-1], [2**40], [0, 0], [None], [[1], [2]], [1.5], ["a"], {}),
    *({"int32": []}, {"int32": [0]}, {"int64": [2**31]}, {"uint64": [2**64 - 1]}, {"int8": [1, 2, 3]}, {"int32": "!"}),
    *({"int64": [0], "lengths": [2**31]}, {"int64": [0] * 9, "lengths": [2**22] * 9}, {"foreign": "x"}, {"float": [1]}),
    *({"int32": [], "shape": [0, 2**30]}, {"int64": [1, 2], "shape": [2, 1]}, {"int64": [1, 2], "shape": [1, -2]}),
)


CONFIG = bt.BlockTableConfig(
    groups=[
        bt.KVCacheGroup(block_size=4, num_blocks=60),
        bt.KVCacheGroup(block_size=8, kernel_block_size=2, sliding_window=9, allow_null=True),
        bt.KVCacheGroup(block_size=4, slot_mode="ring", blocks_per_row=2),
    ],
    max_num_reqs=5,
    max_num_batched_tokens=90,
    max_model_len=128,
)


def lines_of_everything(path: Path) -> list[Any]:
    """Return what the lines of a recording say that has every call."""
    table = bt.BlockTable(CONFIG, "numpy")
    with table.record(path, digests=True):
        more = table.create_buffers()
        table.set_rows([0, 1], [[1, 2, 3], [4, 5], [6, 7, 8, 9]], [[2, 1], [1, 1], [2, 2]])
        table.append_row(0, [list(range(10, 30)), np.arange(11, 20), None])
        table.set_row(2, [[5], np.array([6, 7], np.int32), [10, 11]])
        table.append_rows([0, 2], [[31, 32], [9, 10], []], [[1, 1], [1, 1], [0, 0]])
        step = np.array([0, 2, 1], np.int32), np.array([0, 70, 72, 73], np.int32), np.r_[0:70, 3:5, 2]
        small = np.array([1], np.int32), np.array([0, 1], np.int32), np.array([3])
        table.step(*step, num_computed_tokens=np.array([0, 3, 2], np.int32), out=more)
        table.null_range(0, 1, 0, 1)
        table.null_ranges([0, 2], 1, [0, 0], [1, 1])
        table.copy_row(0, 3)
        table.copy_rows([1], [4])
        table.replace_blocks(3, 0, 2, [40, 41])
        table.replace_block_ranges([3, 4], 0, [0, 0], [42, 43], [1, 1])
        table.remap_blocks(0, [42, 43], [43, 42])
        table.move_row(4, 1)
        table.swap_rows(0, 2)
        table.permute_rows([0, 2], [2, 0])
        with contextlib.suppress(bt.BlockTableError):
            table.clear_row(9)
        table.commit()
        table.gather(np.array([0, 2], np.int32), 4)
        table.compute_slot_mappings(*small, groups=[1, 0], out=[np.zeros(80, np.int64), np.zeros(75, np.int64)])
        table.truncate_row(0, [3, 1, 2])
        table.truncate_rows([2], [[1], [1], [2]])
        table.clear_row(3)
        table.clear_rows([2])
        table.invalidate()
        table.step(*small)
        table.clear()
        table.step(step[0], step[1] * 0, step[2][:0])
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def damage(chance: random.Random, lines: list[Any]) -> list[Any]:
    """Return the lines with one to three things in them changed, most of them deep inside."""
    lines = copy.deepcopy(lines)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(lines)) if chance.random() < 0.85 else 0
        change = chance.random()
        if change < 0.04:
            del lines[place]
        elif change < 0.08:
            lines.insert(place, copy.deepcopy(chance.choice(lines)))
        elif change < 0.12:
            other = chance.randrange(len(lines))
            lines[place], lines[other] = lines[other], lines[place]
        elif not lines or isinstance(lines[place], dict):
            damage_inside(chance, lines, place)
        if not lines:
            return lines
    return lines


def damage_inside(chance: random.Random, holder: Any, key: Any) -> None:
    """Change a value, or something in it."""
    value = holder[key]
    if isinstance(value, dict | list) and value and chance.random() < 0.9:
        inner = chance.choice([*value]) if isinstance(value, dict) else chance.randrange(len(value))
        damage_inside(chance, value, inner)
        return
    change = chance.random()
    if change < 0.1 and isinstance(holder, dict):
        del holder[key]
    elif change < 0.2 and isinstance(holder, dict):
        holder[chance.choice(("call", "row", "int32", "int64", "lengths", "shape", "raised", "x"))] = holder.pop(key)
    elif change < 0.5 and type(value) is int:
        holder[key] = value + chance.choice((-1, 1, 2, 1 << chance.randrange(64), -(1 << chance.randrange(64))))
    elif change < 0.6 and isinstance(value, str) and value:
        place = chance.randrange(len(value))
        holder[key] = value[:place] + chance.choice("Az09+/=!") + value[place + 1 :]
    else:
        holder[key] = copy.deepcopy(chance.choice(ODD))


def write(path: Path, lines: list[Any]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode(), 1))


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return lines_of_everything(tmp_path_factory.mktemp("recorded") / "run.btrace")


@pytest.mark.parametrize("seed", range(6))
def test_wrong_contents_end_in_a_sentence(
    seed: int, lines: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checksums are right, what they guard is not: 938 of 4,000 such files of the first format ended in a traceback."""
    chance, path, ends = random.Random(seed), tmp_path / "run.btrace", Counter[int]()
    for number in range(NUM_FILES):
        write(path, damage(chance, lines))
        status = cli.main(["replay", str(path), "--quiet"])
        said = capsys.readouterr()
        assert status in (0, 1, cli.USAGE_ERROR), f"file {number}"
        assert len(said.err.splitlines()) == (status == cli.USAGE_ERROR), f"file {number}: {said.err}"
        ends[status] += 1
    assert sorted(ends) == [0, 1, cli.USAGE_ERROR]
    assert min(ends.values()) > 10


def test_explain_takes_them_too(
    lines: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_find", lambda name: explain)
    chance, path, ends = random.Random(9), tmp_path / "run.btrace", Counter[int]()
    for number in range(200):
        write(path, damage(chance, lines))
        status = cli.main(["explain", "--row", "0", str(path)])
        said = capsys.readouterr()
        assert len(said.err.splitlines()) == (status == cli.USAGE_ERROR), f"file {number}: {said.err}"
        ends[status] += 1
    assert min(ends[0], ends[cli.USAGE_ERROR]) > 10


HEAD = 1
"""Lines before the first call."""

LARGE: dict[str, Any] = {
    "runs": {"call": "gather", "idx_mapping": {"int64": [0] * 900, "lengths": [1 << 24] * 900}},
    "out": {"call": "compute_slot_mappings", "out": [1 << 40, 1, 1]},
    "a line": {"call": "set_row", "row": 0, "block_ids": [0] * (1 << 23)},
    "an id": {"call": "set_row", "row": 0, "block_ids": [[1], [2**31 - 1], [1, 2]]},
}


@pytest.mark.parametrize("name", [*LARGE, "rows", "tokens", "a bomb", "sets of buffers"])
def test_no_small_file_takes_much_memory(
    name: str, lines: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of some kilobytes: what it asks for is refused before it is made."""
    path, changed = tmp_path / "run.btrace", copy.deepcopy(lines)
    if name in LARGE:
        (place,) = [i for i, line in enumerate(lines) if line.get("call") == LARGE[name]["call"]][:1]
        changed[place] |= LARGE[name]
    elif name == "sets of buffers":
        changed[HEAD:HEAD] = [{"call": "create_buffers"}] * 5000
    elif name != "a bomb":
        changed[0]["config"]["max_num_reqs" if name == "rows" else "max_num_batched_tokens"] = 2**31 - 1
    write(path, changed)
    if name == "a bomb":
        path.write_bytes(gzip.compress(json.dumps(lines[0]).encode() + b"\n", 1) + gzip.compress(bytes(1 << 28)))
    tracemalloc.start()
    try:
        status = cli.main(["replay", str(path), "--quiet"])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    said = capsys.readouterr()
    assert status in (0, 1, cli.USAGE_ERROR)
    assert peak < 1.2e9
    assert len(said.err.splitlines()) == (status == cli.USAGE_ERROR)


# Files and streams of the command.


@pytest.mark.parametrize("option", ["--report", "--json", "--record"])
def test_no_output_replaces_the_input(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording, trace, link = tmp_path / "run.btrace", tmp_path / "trace.jsonl", tmp_path / "link"
    trace.write_bytes(synthetic.SHIPPED.read_bytes())
    assert cli.main(["replay", str(trace), "--quiet", "--max-steps", "3", "--record", str(recording)]) == 0
    for path in (recording, trace):
        content = path.read_bytes()
        link.unlink(missing_ok=True)
        link.symlink_to(path)
        for other in (path, link):
            assert cli.main(["replay", str(path), "--quiet", option, str(other)]) == cli.USAGE_ERROR
            assert f"TRACE and {option} are one file" in capsys.readouterr().err
        assert path.read_bytes() == content
    both = str(tmp_path / "both")
    assert cli.main(["replay", "--json", both, "--report", both]) == cli.USAGE_ERROR
    assert "--json and --report are one file" in capsys.readouterr().err


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "numbers.json"
    cli.write_file(str(path), "old")

    def interrupt(source: str, target: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cli.write_file(str(path), "new")
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["numbers.json"])
    link = tmp_path / "link"
    link.symlink_to(path)
    cli.write_file(str(link), "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    cli.write_file(os.devnull, "text")
    with pytest.raises(cli.UsageError, match="cannot be written"):
        cli.write_file(str(tmp_path), "text")


def run(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    shell = [*("bash", "-c", command.replace("blocktable", f"{sys.executable} -m blocktable"))]
    return subprocess.run(shell, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_output_that_is_closed_or_full(tmp_path: Path) -> None:
    done = run("blocktable replay --quiet --max-steps 3 > /dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (
        cli.USAGE_ERROR,
        "blocktable: the output cannot be written: No space left on device.\n",
    )
    done = run("blocktable replay --quiet --max-steps 3 >&-", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    """A file may be called any bytes."""
    (tmp_path / os.fsdecode(b"\xff.jsonl")).write_bytes(synthetic.SHIPPED.read_bytes())
    done = run("blocktable replay --quiet --max-steps 3 $'\\xff.jsonl' --json numbers.json", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("\\udcff.jsonl (Mooncake JSONL")
    assert json.loads((tmp_path / "numbers.json").read_text())["trace"]["source"] == "\udcff.jsonl"


@pytest.mark.parametrize("is_recording", [False, True])
def test_an_interrupt_before_the_first_step(
    is_recording: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the report needs the extra `report`")
    recording, page = tmp_path / "run.btrace", tmp_path / "report.html"
    assert cli.main(["replay", "--quiet", "--max-steps", "3", "--record", str(recording)]) == 0

    capsys.readouterr()

    def interrupt(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Lane, "operate", interrupt)
    trace = [str(recording)] if is_recording else []
    assert cli.main(["replay", *trace, "--quiet", "--report", str(page)]) == cli.INTERRUPTED
    said = capsys.readouterr().out
    assert re.search("ended after [01] steps, before it was over", said)
    assert page.read_text().count("<svg") == 0


# A recording that nobody closes.


def test_a_recording_of_a_table_that_is_dropped_is_closed(tmp_path: Path) -> None:
    path, num_threads = tmp_path / "run.btrace", threading.active_count()
    table = bt.BlockTable(CONFIG, "numpy")
    table.record(path)
    table.set_row(0, [[1], [2], [3, 4]])
    assert threading.active_count() == num_threads + 1
    del table
    gc.collect()
    assert threading.active_count() == num_threads
    with Recording(path) as recording:
        assert [call.name for call in recording] == ["set_row"]
    assert recording.tear is None


def test_a_process_that_ends_closes_its_recordings(tmp_path: Path) -> None:
    source = (
        "import blocktable as bt\n"
        "table = bt.BlockTable(bt.BlockTableConfig(groups=[bt.KVCacheGroup(block_size=4)], max_num_reqs=2, "
        "max_num_batched_tokens=8, max_model_len=16), 'numpy')\n"
        "table.record('run.btrace')\n"
        "table.set_row(1, [5])\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True, cwd=tmp_path)
    recording = Recording(tmp_path / "run.btrace")
    assert [call.arguments["row"] for call in recording] == [1]
    assert recording.tear is None


# The public reader.


def test_the_reader(tmp_path: Path) -> None:
    path, table = tmp_path / "run.btrace", bt.BlockTable(CONFIG, "numpy")
    with table.record(path, digests=True):
        table.set_row(1, [[7], [8], [9, 10]])
        with pytest.raises(bt.RowIndexError):
            table.clear_row(9)
        table.step(np.array([1], np.int32), np.array([0, 1], np.int32), np.array([0]))
        table.clear_row(1)
    with Recording(path) as recording:
        assert recording.config == CONFIG
        assert (recording.header["backend"], recording.header["check"]) == ("numpy", "off")
        calls = list(recording)
        other = iter(recording)
        assert next(other).name == next(iter(recording)).name == "set_row"
    with pytest.raises(StopIteration):
        next(other)
    with pytest.raises(RecordingError, match="the recording is closed"):
        iter(recording)
    assert [(call.number, call.step, call.name, call.raised, call.has_effect) for call in calls] == [
        (0, 0, "set_row", None, True),
        (1, 0, "clear_row", "RowIndexError", False),
        (2, 0, "step", None, True),
        (3, 1, "clear_row", None, True),
    ]
    step = calls[2]
    assert [*step.arguments] == [*inspect.signature(bt.BlockTable.step).parameters][1:-1]
    assert (step.arguments["query_start_loc"].dtype, step.arguments["query_start_loc"].tolist()) == (np.int32, [0, 1])
    assert (step.arguments["out"], len(step.digest or b"")) == (0, 16)
    assert calls[0].arguments["block_ids"][2].tolist() == [9, 10]


def test_a_finding_of_the_device_is_raised_by_a_call_that_did_its_work(lines: list[Any], tmp_path: Path) -> None:
    path, changed = tmp_path / "run.btrace", copy.deepcopy(lines)
    changed[HEAD:] = [{"call": "commit"}, {"raised": "CheckError"}, {"call": "clear"}, {"end": True}]
    for check, effects in (("device", [(0, True), (1, True)]), ("host", [(0, False), (0, True)])):
        changed[0]["check"] = check
        write(path, changed)
        assert [(call.step, call.has_effect) for call in Recording(path)] == effects


def test_a_file_that_is_still_written_gives_its_calls(tmp_path: Path) -> None:
    path, table = tmp_path / "run.btrace", bt.BlockTable(CONFIG, "numpy")
    recorder: Any = table.record(path)
    table.clear_row(1)
    recorder.flush()
    deadline = time.monotonic() + 30
    recording = Recording(path)
    while not (names := [call.name for call in recording]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert names == ["clear_row"]
    assert recording.tear == "it has no end mark: whoever wrote it did not close it"
    recorder.close()
