"""`blocktable replay` whole: right backends pass, broken ones are named, both row styles give the same slots."""

import dataclasses
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable import cli
from blocktable.backend import Batch, Writes
from blocktable_numpy import NumpyBackend, NumpyBlockStore, NumpySlotMapper
from blocktable_replay import synthetic
from blocktable_replay.lane import Lane
from blocktable_replay.options import ReplayOptions
from blocktable_replay.plan import Counters
from blocktable_replay.progress import Progress, RichProgress, SilentProgress, make_progress
from blocktable_replay.readers import read_trace
from blocktable_replay.result import ReplayResult
from blocktable_replay.run import Replay, unfit_requests
from blocktable_replay.traces import Trace

pytestmark = pytest.mark.slow

FULL = bt.KVCacheGroup(block_size=16)
WINDOWED = bt.KVCacheGroup(block_size=64, kernel_block_size=16, sliding_window=200)


def trace_of(num_requests: int, seed: int = 3) -> Trace:
    """Prompts of up to 900 tokens that begin with one of three of 512, 10 a second."""
    chance = random.Random(seed)
    inputs = [chance.randint(1, 900) for _ in range(num_requests)]
    return Trace(
        source="made by the test",
        format="test",
        arrivals=np.cumsum([chance.expovariate(1 / 100) for _ in range(num_requests)]),
        input_lengths=np.array(inputs),
        output_lengths=np.array([chance.randint(0, 40) for _ in range(num_requests)]),
        lines=np.arange(num_requests),
        hash_ids=tuple(
            np.array([chance.randrange(3), 10 + index][: -(-length // 512)]) for index, length in enumerate(inputs)
        ),
    )


def replay(trace: Trace, options: ReplayOptions, backend: Any = None) -> tuple[ReplayResult, Lane]:
    lane = Lane("under test", backend or bt.get_backend("numpy"), options.config())
    return Replay(trace, options, [lane]).run(SilentProgress()), lane


def num_second_samples(trace: Trace, options: ReplayOptions) -> int:
    """A request that generates one token has nothing left to fork for."""
    return int(np.count_nonzero(trace.output_lengths[:: options.fork_every] > 1)) if options.fork_every else 0


OPTIONS = {
    "plain": {},
    "preempted": {"num_blocks": 80, "all_at_once": True},
    "drafts": {"lookahead": 4, "num_blocks": 100},
    "windowed": {"groups": (FULL, WINDOWED), "num_blocks": 120},
    "odd sizes": {"groups": (bt.KVCacheGroup(block_size=3), bt.KVCacheGroup(block_size=48, kernel_block_size=16))},
    "sharded": {
        "groups": (bt.KVCacheGroup(block_size=32, kernel_block_size=16), bt.KVCacheGroup(block_size=16, sharded=False)),
        "context_parallel": bt.ContextParallel(world_size=3, rank=1, interleave_size=8),
    },
    "state groups": {
        "groups": (
            FULL,
            bt.KVCacheGroup(block_size=8, slot_mode="ring", blocks_per_row=3),
            bt.KVCacheGroup(block_size=1, slot_mode="none", blocks_per_row=2),
        ),
        "fork_every": 2,
        "lookahead": 2,
    },
    "no null": {
        "groups": (FULL, WINDOWED),
        "num_blocks": 130,
        "null_block_id": -1,
        "fork_every": 3,
        "max_num_rows": 40,
    },
    "null inside": {
        "groups": (
            dataclasses.replace(FULL, pad_slot_id=7 * 16 + 5, null_block_id=7),
            dataclasses.replace(WINDOWED, pad_slot_id=9 * 64 + 5, null_block_id=9),
        ),
        "num_blocks": 130,
        "max_num_rows": 12,
        "dummy_every": 5,
    },
    "pad after the cache": {
        "groups": (FULL, bt.KVCacheGroup(block_size=4, slot_mode="cross", blocks_per_row=3)),
        "num_blocks": 200,
        "pad_slot_id": 200 * 16,
        "max_num_reqs": 9,
        "max_num_rows": 21,
    },
    "small budget": {"max_num_batched_tokens": 7, "max_num_reqs": 9, "step_ms": 2.0},
    "everything": {
        "groups": (FULL, WINDOWED),
        "num_blocks": 130,
        "lookahead": 3,
        "fork_every": 3,
        "sleep_every": 11,
        "dummy_every": 7,
        "max_num_batched_tokens": 300,
    },
}
SEEN_BY = {
    "preempted": ("preemptions", "resumes", "shared_blocks"),
    "drafts": ("rollbacks",),
    "windowed": ("evictions",),
    "no null": ("evictions", "forks", "shared_blocks"),
    "null inside": ("evictions", "dummy_steps", "shared_blocks"),
    "small budget": ("chunked_prefills",),
    "state groups": ("forks", "shared_blocks"),
    "everything": [field.name for field in dataclasses.fields(Counters)],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_both_row_styles_are_right_and_give_the_same_slots(name: str) -> None:
    trace, options = trace_of(60), ReplayOptions(max_model_len=2048, **OPTIONS[name])  # type: ignore[arg-type]
    assert not unfit_requests(trace, options)
    digests = set()
    for rows in ("stable", "dense"):
        result, lane = replay(trace, dataclasses.replace(options, rows=rows))
        assert (result.num_mismatches, result.broken.shown, lane.findings.shown) == (0, [], [])
        counts = result.counters
        assert counts["requests"] == len(trace) + num_second_samples(trace, options)
        for seen in SEEN_BY.get(name, ()):
            assert counts[seen] > 0, f"the options were to make {seen} happen"
        assert lane.table.num_blocks_per_row.sum() == 0, "the last step takes every end to the device"
        lane.table.verify()
        digests.add((lane.slot_digest, *counts.values()))
    assert len(digests) == 1


def test_sharing_changes_slots_and_not_tokens_of_the_rest() -> None:
    trace = trace_of(60)
    with_sharing, _ = replay(trace, ReplayOptions(max_model_len=2048))
    without, _ = replay(trace, ReplayOptions(max_model_len=2048, share_prefixes=False))
    assert with_sharing.counters["shared_blocks"] > 0
    assert without.counters["shared_blocks"] == 0
    saved = without.counters["tokens"] - with_sharing.counters["tokens"]
    assert saved == 16 * with_sharing.counters["shared_blocks"]


def test_ranks_share_the_tokens() -> None:
    """Each position has one owner: the ranks' slots that are no PAD add up to all tokens. Rules: R18."""
    trace, written = trace_of(20), 0

    class Counting(NumpyBackend):
        def to_host(self, array: Any) -> Any:
            nonlocal written
            if array.dtype == np.int64:
                written += int((array >= 0).sum())
            return super().to_host(array)

    for rank in range(4):
        shard = bt.ContextParallel(world_size=4, rank=rank, interleave_size=4)
        result, _ = replay(trace, ReplayOptions(max_model_len=2048, context_parallel=shard), Counting())
        assert result.num_mismatches == 0
    assert written == result.counters["tokens"]


# Broken backends. Each is named to the command as `module:Class`.


PLAIN = frozenset({"int32_slots", "exports", "export_parts"})
"""No fused step: each of its parts may be replaced."""


class OffByOne(NumpyBackend):
    """Every slot is one too high."""

    capabilities = PLAIN

    def create_slot_mapper(self, store: NumpyBlockStore) -> NumpySlotMapper:
        class Mapper(NumpySlotMapper):
            def compute_slot_mappings(
                self, batch: Batch, out: Sequence[Any], *, stream: int | None, groups: Sequence[int] | None = None
            ) -> None:
                super().compute_slot_mappings(batch, out, stream=stream)
                for slots in out:
                    slots[slots >= 0] += 1

        return Mapper(store)


class NoPadding(NumpyBackend):
    """What an earlier, larger step left behind the last token stays there."""

    capabilities = PLAIN

    def create_slot_mapper(self, store: NumpyBlockStore) -> NumpySlotMapper:
        class Mapper(NumpySlotMapper):
            def compute_slot_mappings(
                self, batch: Batch, out: Sequence[Any], *, stream: int | None, groups: Sequence[int] | None = None
            ) -> None:
                before = [slots.copy() for slots in out]
                super().compute_slot_mappings(batch, out, stream=stream)
                for slots, old in zip(out, before, strict=True):
                    slots[batch.positions.size :] = old[batch.positions.size :]  # type: ignore[union-attr]

        return Mapper(store)


class StaleTail(NumpyBackend):
    """Batch rows are never made shorter."""

    capabilities = PLAIN

    def create_block_store(self, config: bt.BlockTableConfig, device: Any = None) -> NumpyBlockStore:
        class Store(NumpyBlockStore):
            def gather(
                self, batch: Batch, out: bt.StepBuffers, *, stream: int | None, groups: Sequence[int] | None = None
            ) -> None:
                before = [table.copy() for table in out.block_tables]
                super().gather(batch, out, stream=stream)
                for table, old in zip(out.block_tables, before, strict=True):
                    table[:] = np.where(table == 0, old, table)

        return Store(config)


class LostWrite(NumpyBackend):
    """The last range of a commit of several gets lost."""

    capabilities = PLAIN

    def create_block_store(self, config: bt.BlockTableConfig, device: Any = None) -> NumpyBlockStore:
        class Store(NumpyBlockStore):
            def write(self, writes: Writes, *, stream: int | None, groups: Sequence[int] | None = None) -> None:
                if writes.offsets.size > 3:
                    kept = int(writes.lengths[:-1].sum())
                    writes = Writes(writes.arena, writes.offsets[:-1], writes.lengths[:-1], writes.values[:kept])
                super().write(writes, stream=stream)

        return Store(config)


class Raises(NumpyBackend):
    """Has a fault that is no wrong entry."""

    capabilities = PLAIN

    def create_slot_mapper(self, store: NumpyBlockStore) -> NumpySlotMapper:
        class Mapper(NumpySlotMapper):
            def compute_slot_mappings(
                self, batch: Batch, out: Sequence[Any], *, stream: int | None, groups: Sequence[int] | None = None
            ) -> None:
                raise RuntimeError("the launch failed")

        return Mapper(store)


@pytest.fixture
def csv(tmp_path: Path) -> str:
    trace = trace_of(40)
    path = tmp_path / "burst.csv"
    lines = zip(trace.arrivals.tolist(), trace.input_lengths.tolist(), trace.output_lengths.tolist(), strict=True)
    path.write_text(
        "Timestamp,Request tokens,Response tokens\n"
        + "".join(f"{at / 1000},{tokens},{out}\n" for at, tokens, out in lines)
    )
    return str(path)


@pytest.mark.parametrize(
    ("mutant", "rule", "rows"),
    [
        (OffByOne, "(R12, R13)", "stable"),
        (OffByOne, "(R12, R13)", "dense"),
        (NoPadding, "after the last real token", "stable"),
        (NoPadding, "after the last real token", "dense"),
        (StaleTail, "(R10.", "stable"),  # dense: without a window the identity gathers nothing
        (LostWrite, "(R1", "stable"),
        (LostWrite, "(R1", "dense"),
    ],
)
def test_a_broken_backend_is_found(
    mutant: type[Any], rule: str, rows: str, csv: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{__name__}:{mutant.__name__}"
    arguments = ["replay", csv, "--backend", "numpy", "--backend", name, "--rows", rows, "--max-model-len", "2048"]
    assert cli.main(arguments) == 1
    said = capsys.readouterr().out
    assert "\nFAILED: " in said
    assert rule in said
    lines = dict(line.split("  ", 1) for line in said.splitlines() if "  " in line)
    right, wrong = lines["mismatches"].split()
    assert right == "0", "the right backend beside it is not blamed"
    assert int(wrong.replace(",", "")) > 0


def test_a_sleep_that_nobody_noticed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R24."""
    options = ReplayOptions(max_model_len=2048, sleep_every=9)
    assert replay(trace_of(20), options)[0].num_mismatches == 0
    monkeypatch.setattr(bt.BlockTable, "invalidate", lambda table: None)
    assert replay(trace_of(20), options)[0].num_mismatches > 0


def test_an_interrupted_replay_still_says_what_it_saw(
    csv: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = 0

    def interrupt(self: Lane, *arguments: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Lane, "compare", interrupt)
    assert cli.main(["replay", csv, "--quiet"]) == cli.INTERRUPTED
    assert "ended after 5 steps, before it was over" in capsys.readouterr().out


def test_a_backend_that_raises_is_named(csv: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", csv, "--backend", f"{__name__}:Raises"]) == cli.USAGE_ERROR
    said = capsys.readouterr().err
    assert "Raises' failed in step at step 1: it raised RuntimeError: the launch failed" in said
    assert "Traceback" not in said


def test_a_mismatch_says_where(csv: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["replay", csv, "--backend", f"{__name__}:OffByOne", "--max-steps", "3"])
    (first, *_) = [line for line in capsys.readouterr().out.splitlines() if "step 1, " in line]
    for part in ("group 0, token 0, request 0 (batch index 0, row 0), position 0", "expected 16, got 17"):
        assert part in first


# The command.


def test_the_command_passes_and_says_so(csv: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--group", "block_size=16", "--group", "block_size=64,kernel_block_size=16,sliding_window=200"]
    arguments += ["--context-parallel", "world_size=2,rank=1,interleave_size=16", "--num-blocks", "300"]
    assert cli.main(["replay", csv, *arguments, "--max-model-len", "4096"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1].startswith("OK: every slot and every batch table entry of ")
    assert said.err == ""


def test_parts_of_a_trace(csv: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", csv, "--limit", "5"]) == 0
    assert "(BurstGPT CSV, 5 requests)" in capsys.readouterr().out
    assert cli.main(["replay", csv, "--max-steps", "4"]) == 0
    assert "ended after 4 steps, before it was over" in capsys.readouterr().out
    assert cli.main(["replay", csv, "--from", "1h"]) == cli.USAGE_ERROR
    assert "no request lies in the part that --from" in capsys.readouterr().err


@pytest.mark.parametrize("rows", ["stable", "dense"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--null-block-id", "-1", "--pad-slot-id", "-9", "--max-num-rows", "5"], "null_block_id=-1"),
        (["--null-block-id", "299", "--pad-slot-id", "999999999", "--max-num-rows", "70"], "null_block_id=299"),
    ],
)
def test_nulls_pads_and_rows_of_the_command(options: list[str], said: str, rows: str, tmp_path: Path) -> None:
    """The synthetic trace passes, and what was recorded of it passes again."""
    path, numbers = tmp_path / "run.btrace", tmp_path / "numbers.json"
    arguments = ["replay", "--quiet", "--json", str(numbers), "--max-steps", "300"]
    assert cli.main([*arguments, "--record", str(path), "--rows", rows, *options]) == 0
    summary = json.loads(numbers.read_text())
    assert all(said in group for group in summary["config"]["groups"])
    assert summary["config"]["num_rows"] == int(options[-1])
    assert summary["config"]["max_num_reqs"] == synthetic.EXERCISE.max_num_reqs
    assert cli.main([*arguments, str(path)]) == 0
    assert json.loads(numbers.read_text())["trace"]["digests"] == 300


def test_a_null_block_outside_the_cache_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", "--null-block-id", "300"]) == cli.USAGE_ERROR
    assert "null_block_id 300 is outside the cache" in capsys.readouterr().err


def test_requests_that_do_not_fit(csv: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option, reason in (("--max-model-len", "more than max_model_len 400"), ("--num-blocks", "whose cache has 19")):
        value = "400" if option == "--max-model-len" else "20"
        assert cli.main(["replay", csv, option, value]) == cli.USAGE_ERROR
        said = capsys.readouterr().err
        assert f"{csv}:" in said
        assert reason in said
        assert cli.main(["replay", csv, option, value, "--on-bad-line", "skip"]) == 0
        assert " bad lines skipped)\n" in capsys.readouterr().out
    assert cli.main(["replay", csv, "--num-blocks", "1", "--on-bad-line", "skip"]) == cli.USAGE_ERROR
    assert "no request fits" in capsys.readouterr().err


def test_unfit_requests_name_the_group() -> None:
    trace = trace_of(10)
    options = ReplayOptions(groups=(FULL, WINDOWED), num_blocks=40, max_num_batched_tokens=64)
    wrong = unfit_requests(trace, options)
    totals = trace.input_lengths + trace.output_lengths
    assert sorted(wrong) == np.flatnonzero(-(-totals // 16) > 39).tolist()
    assert all("of group 0, whose cache has 39" in reason for reason in wrong.values())


def test_a_bar_where_rich_and_a_terminal_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich", reason="the bar needs the extra `report`")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert isinstance(make_progress(10, "requests", is_quiet=True), SilentProgress)
    for total in (100, None):  # of a recording nobody knows how long it is
        progress = make_progress(total, "requests", is_quiet=False)
        assert isinstance(progress, RichProgress)
        monkeypatch.setattr(RichProgress, "every_s", 0.0)
        for step in range(64, 1280, 64):
            progress.update(step, step // 64, 2)
        progress.close()
        said = capsys.readouterr().err
        for part in ("19/100" if total else "19/?", "1216 steps", "steps/s", "2 mismatches"):
            assert part in said


def test_plain_progress_is_seldom(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr("blocktable_replay.progress.time.monotonic", lambda: now)
    progress = Progress(100, "requests")
    for step in range(1, 6401):
        now = step / 100
        progress.update(step, step // 64, 0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert lines[0] == "16 of 100 requests, 1024 steps, 100 steps/s, 0 mismatches, about 54 s left"


# Without TRACE: the README's options, under which everything happens.


def test_the_shipped_trace_is_what_its_generator_writes(tmp_path: Path) -> None:
    synthetic.write(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == synthetic.SHIPPED.read_bytes()
    assert not unfit_requests(read_trace(synthetic.SHIPPED), synthetic.EXERCISE)


@pytest.mark.parametrize("rows", ["stable", "dense"])
def test_plain_replay_makes_every_feature_happen(rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "numbers.json"
    assert cli.main(["replay", "--quiet", "--rows", rows, "--json", str(path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("the synthetic trace (Mooncake JSONL, 414 requests)\n")
    summary = json.loads(path.read_text())
    for field in dataclasses.fields(Counters):
        assert summary["schedule"][field.name] > 0, f"{field.name} did not happen"
        assert f"\n{field.name.replace('_', ' ')} " in said
    assert summary["schedule"]["blocks_shared_peak"] > 0
    assert summary["backends"][0]["bytes_sent_per_step_mean"] > 0


def test_options_replace_those_of_the_synthetic_trace_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    arguments = ["--lookahead", "0", "--fork-every", "0", "--no-prefix-sharing", "--max-steps", "300"]
    assert cli.main(["replay", "--quiet", "--json", str(path), *arguments]) == 0
    schedule = json.loads(path.read_text())["schedule"]
    assert [schedule[name] for name in ("rollbacks", "forks", "shared_blocks")] == [0, 0, 0]
    assert schedule["evictions"] > 0
    assert schedule["steps"] == 300


def test_json_holds_what_its_page_describes(csv: str, tmp_path: Path) -> None:
    """Every field of the file stands in docs/replay.md, and every field there is in the file."""
    path = tmp_path / "numbers.json"
    arguments = ["replay", csv, "--quiet", "--json", str(path), "--backend", "numpy"]
    assert cli.main([*arguments, "--record", str(tmp_path / "run.btrace")]) == 0
    summary = json.loads(path.read_text())
    assert summary["schema_version"] == 1
    assert summary["command"].startswith(f"blocktable replay {csv} ")
    page = (Path(__file__).parents[1] / "docs/replay.md").read_text()
    described = set(re.findall(r"^\| `([a-z_.\[\]0-9]+)` \|", page, re.MULTILINE))
    assert fields_of(summary) == described


def fields_of(value: Any, name: str = "") -> set[str]:
    """Return the dotted names of all values in a JSON document; of a list, those of its first object."""
    if isinstance(value, dict):
        return set().union(*(fields_of(inner, f"{name}.{key}".lstrip(".")) for key, inner in value.items()))
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return fields_of(value[0], f"{name}[]")
    return {name}


def test_a_file_that_cannot_be_written_is_said(csv: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--json", "--record"):
        assert cli.main(["replay", csv, "--quiet", "--max-steps", "2", option, str(tmp_path)]) == cli.USAGE_ERROR
        assert "cannot be written" in capsys.readouterr().err
