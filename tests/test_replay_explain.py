"""`blocktable explain`: who had a block, who wrote it when, and which row a request was in (docs/recording.md)."""

import gzip
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable import cli
from blocktable_replay import Recording
from blocktable_replay.explain import explain, main

ONE = bt.BlockTableConfig(
    groups=[bt.KVCacheGroup(block_size=4, num_blocks=60)],
    max_num_reqs=6,
    max_num_batched_tokens=64,
    max_model_len=64,
)
TWO = bt.BlockTableConfig(
    groups=[bt.KVCacheGroup(block_size=4), bt.KVCacheGroup(block_size=8, kernel_block_size=4, allow_null=True)],
    max_num_reqs=6,
    max_num_batched_tokens=64,
    max_model_len=64,
)


BLOCK_17 = "Block 17 of group 0 (index 2 of row 0)"
SINCE, WRITTEN = "since step 3", "steps 3-4 (positions 9-10)"
MARKED = f"! row 3, {WRITTEN}"


def step(table: bt.BlockTable, **positions: Sequence[int]) -> None:
    """Make a step of rows: `row3=[5, 6]`."""
    rows = [int(name.removeprefix("row")) for name in positions]
    starts = np.cumsum([0, *map(len, positions.values())], dtype=np.int32)
    table.step(np.array(rows, np.int32), starts, np.concatenate([np.array(each) for each in positions.values()]))


@pytest.fixture
def corrupted(tmp_path: Path) -> Path:
    """Block 17: a finished request's, then row 1's, which moves to row 3, then row 0's too, by a fault."""
    path, table = tmp_path / "run.btrace", bt.BlockTable(ONE, "numpy")
    with table.record(path):
        table.set_row(2, [17, 18])
        step(table, row2=range(6))  # step 0
        table.clear_row(2)
        table.set_rows([0, 1], [1, 2, 3, 4], [2, 2])
        step(table, row0=range(7), row1=range(5))  # step 1
        table.append_row(1, [17])
        step(table, row0=[7], row1=range(5, 9))  # step 2
        table.move_row(1, 3)
        table.append_row(0, [17])
        step(table, row0=[8], row3=[9])  # step 3
        step(table, row0=[9], row3=[10])  # step 4
    return path


def story_of(path: Path, *arguments: Any) -> dict[str, Any]:
    with Recording(path) as recording:
        return explain(recording, *arguments)


def test_which_other_request_wrote_my_block_and_since_when_both_have_it(
    corrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(corrupted), "--row", "0"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{corrupted}: row 0 up to step 4, after 11 calls"
    table = said[said.index("Blocks of group 0") + 1 :][:4]
    assert [re.split("  +", line) for line in table] == [
        ["index", "block", "since", "held before by", "now also by", "written by this row", "written last by"],
        ["0", "1", "1", "-", "-", "step 1 (positions 0-3)", "row 0, step 1 (positions 0-3)"],
        ["1", "2", "1", "-", "-", "steps 1-2 (positions 4-7)", "row 0, steps 1-2 (positions 4-7)"],
        [*("2", "17", "3", "row 2 (0-1)", "row 3 since 2", "steps 3-4 (positions 8-9)"), MARKED],
    ]
    assert said[-6:-4] == [
        f"{BLOCK_17}: another request, in row 3 since step 1, wrote it at {WRITTEN}, while this row had it, {SINCE}.",
        f"{BLOCK_17}: row 3 has it too, both since step 3, and this row wrote it at steps 3-4 (positions 8-9).",
    ]
    assert said[-4].startswith("Checker, step 3: ")
    assert "block 17" in said[-4]


def test_a_request_is_followed_through_its_rows(corrupted: Path) -> None:
    story = story_of(corrupted, 3, 3)
    assert [(event["step"], event["call"], event["row"], event["text"]) for event in story["events"]] == [
        (1, "set_rows", 1, "begins, +2 blocks (3 4)"),
        (2, "append_row", 1, "+1 block (17)"),
        (3, "move_row", 3, "moves from row 1"),
    ]
    assert story["step"] == 3
    (entry,) = [block for block in story["groups"][0]["blocks"] if block["block_id"] == 17]
    assert (entry["index"], entry["since"], entry["how"]) == (2, 2, "append_row")
    assert [(each["row"], each["since"], each["until"]) for each in entry["held_before_by"]] == [(2, 0, 1)]


def test_before_the_fault_nothing_looks_wrong(corrupted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for row in (0, 1):
        assert main([str(corrupted), "--row", str(row), "--step", "2"]) == 0
        assert capsys.readouterr().out.endswith("Nothing here looks wrong: no block has two writers.\n")


def test_a_request_that_has_left_has_the_blocks_that_it_had_last(corrupted: Path) -> None:
    story = story_of(corrupted, None, 2)
    assert story["life"]["ended"] == 1
    assert [event["text"] for event in story["events"]] == [
        "begins, +2 blocks (17 18)",
        "the row is taken from the request",
    ]
    first, second = story["groups"][0]["blocks"]
    assert (first["block_id"], second["block_id"], first["index"], second["index"]) == (17, 18, 0, 1)
    assert [each["row"] for each in first["held_now_by"]] == [3, 0]
    assert first["written_by_others_meanwhile"] == []
    assert (first["written_last"]["row"], first["written_last"]["last_step"]) == (3, 4)


def test_any_block_and_a_file(corrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "story.json"
    assert main([str(corrupted), "--row", "0", "--block", "18", "--json", str(path)]) == 0
    assert "\n-      18     -      row 2 (0-1)" in capsys.readouterr().out
    assert json.loads(path.read_text()) == story_of(corrupted, None, 0, None, 18)


def test_a_fork_whose_last_block_was_not_copied(tmp_path: Path) -> None:
    path, table = tmp_path / "run.btrace", bt.BlockTable(TWO, "numpy")
    with table.record(path):
        table.set_row(0, [[1, 2], [7]])
        step(table, row0=range(6))
        table.copy_row(0, 4)
        table.replace_blocks(4, 1, 0, [8])
        step(table, row0=[6], row4=[6])
        table.truncate_row(4, [1, 1])
        table.null_range(0, 1, 0, 1)
        table.commit()
    story = story_of(path, None, 4)
    assert [(event["call"], event["text"]) for event in story["events"]] == [
        ("copy_row", "begins as a copy of row 0, group 0: +2 blocks (1 2), group 1: +1 block (7)"),
        ("replace_blocks", "group 1: +1 block (8), group 1: -1 block (7)"),
        ("truncate_row", "group 0: -1 block (2)"),
    ]
    assert [[entry["block_id"] for entry in group["blocks"]] for group in story["groups"]] == [[1], [8]]
    story = story_of(path, 1, 4, 0)
    shared = story["groups"][0]["blocks"][1]
    assert [(each["row"], each["first_step"]) for each in shared["written_by_others_meanwhile"]] == [(0, 1)]
    assert {finding["kind"] for finding in story["findings"]} == {"shared_block_written", "slot_written_twice"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--row", "6"], "--row 6 is not there: the recorded table has 6 rows."),
        (["--row", "0", "--group", "1"], "--group 1 is not there: the recorded table has 1 groups."),
        (["--row", "5"], "Row 5 holds nothing up to step 4, where the calls end."),
        (["--row", "-1"], "is not a whole number"),
        (["--row", "0", "--json", "RECORDING"], "--json would replace the recording"),
    ],
)
def test_what_is_not_there(
    arguments: list[str], sentence: str, corrupted: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(cli, "_find", lambda name: main)
    content = corrupted.read_bytes()
    words = [str(corrupted) if word == "RECORDING" else word for word in arguments]
    assert cli.main(["explain", str(corrupted), *words]) == cli.USAGE_ERROR
    assert sentence in capsys.readouterr().err
    assert corrupted.read_bytes() == content


def test_a_torn_recording_is_explained_up_to_there(
    corrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "torn.btrace"
    lines = gzip.decompress(corrupted.read_bytes()).splitlines(keepends=True)
    path.write_bytes(gzip.compress(b"".join(lines[:-3])))
    assert main([str(path), "--row", "0"]) == 0
    assert "The recording is torn (it has no end mark" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(6))
def test_any_history(seed: int, tmp_path: Path) -> None:
    """Blocks, who has them too, when they were written last: as the recorded table itself says. Rules: R4-R8, R13."""
    chance, path, table = random.Random(seed), tmp_path / "run.btrace", bt.BlockTable(ONE, "numpy")
    last_written: dict[int, int] = {}
    with table.record(path):
        for number in range(40):
            for _ in range(chance.randint(0, 3)):
                change_rows(chance, table)
            rows = [row for row in range(6) if table.num_blocks_per_row[0, row]]
            if not rows:
                rows = [0]
            starts = np.arange(len(rows) + 1, dtype=np.int32)
            last = np.array([chance.randrange(4 * max(1, int(table.num_blocks_per_row[0, row]))) for row in rows])
            slots = table.step(np.array(rows, np.int32), starts, last).slot_mappings[0]
            last_written |= dict.fromkeys((slots[slots >= 0] // 4).tolist(), number)
    for row in range(6):
        ids = table.block_ids(row, 0).tolist()
        if not ids:
            continue
        story = story_of(path, None, row)
        assert [entry["block_id"] for entry in story["groups"][0]["blocks"]] == list(dict.fromkeys(ids))
        for entry in story["groups"][0]["blocks"]:
            block, last_step = entry["block_id"], (entry["written_last"] or {}).get("last_step")
            others = [other for other in range(6) if other != row and block in table.block_ids(other, 0)]
            assert sorted(each["row"] for each in entry["held_now_by"]) == others
            assert last_step == last_written.get(block)


def change_rows(chance: random.Random, table: bt.BlockTable) -> None:
    row, other = chance.sample(range(6), 2)
    free = [chance.randint(1, 30) for _ in range(2)]
    held = int(table.num_blocks_per_row[0, row])
    chance.choice(
        (
            lambda: table.set_row(row, free),
            lambda: table.append_row(row, free) if held < 14 else table.clear_row(row),
            lambda: table.clear_rows([row]),
            lambda: table.move_row(row, other),
            lambda: table.swap_rows(row, other),
            lambda: table.permute_rows([row, other], [other, row]),
            lambda: table.copy_rows([row], [other]),
            lambda: table.truncate_row(row, max(held - 1, 1)),
            lambda: table.replace_blocks(row, 0, 0, free[: min(held, 1)]),
            lambda: table.remap_blocks(0, [1, 2, 3], [2, 3, 1]),
        )
    )()
