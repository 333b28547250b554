"""Recordings: what a table was asked to do runs again bit for bit, on any backend, up to a tear (docs/recording.md)."""

import contextlib
import errno
import gzip
import inspect
import json
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis.stateful import run_state_machine_as_test

import blocktable as bt
from blocktable import cli
from blocktable.backend import Batch
from blocktable.observer import OBSERVED_CALLS, OpenRecording
from blocktable_conformance import profiles
from blocktable_conformance.oracle import OracleTable, Refused
from blocktable_conformance.subject import Subject
from blocktable_conformance.test_stateful import TableHistory
from blocktable_numpy import NumpyBackend, NumpyBlockStore, NumpySlotMapper
from blocktable_replay import synthetic
from blocktable_replay.btrace import PARAMETERS, Foreign, RecordingError, call_line, parse_line
from blocktable_replay.lane import Lane
from blocktable_replay.player import Player
from blocktable_replay.progress import SilentProgress
from blocktable_replay.readers import read_trace
from blocktable_replay.recorded import Recording
from blocktable_replay.recording import Recorder
from blocktable_replay.result import ReplayResult
from blocktable_replay.rowmodel import RowModel
from blocktable_replay.run import Replay

pytestmark = pytest.mark.slow

CONFIG = bt.BlockTableConfig(
    groups=[
        bt.KVCacheGroup(block_size=4),
        bt.KVCacheGroup(block_size=8, kernel_block_size=2, sliding_window=9, allow_null=True),
    ],
    max_num_reqs=6,
    max_num_batched_tokens=24,
    max_model_len=64,
)
NO_NULL = bt.BlockTableConfig(
    groups=[
        bt.KVCacheGroup(block_size=4, null_block_id=-1),
        bt.KVCacheGroup(
            block_size=8, kernel_block_size=2, sliding_window=9, null_block_id=-1, allow_null=True, pad_slot_id=-7
        ),
        bt.KVCacheGroup(block_size=4, slot_mode="cross", blocks_per_row=5),
    ],
    max_num_reqs=6,
    max_num_batched_tokens=24,
    max_model_len=64,
    max_num_rows=4,
)
NULL_INSIDE = bt.BlockTableConfig(
    groups=[
        bt.KVCacheGroup(block_size=4, null_block_id=3, pad_slot_id=13),
        bt.KVCacheGroup(
            block_size=8,
            kernel_block_size=2,
            num_blocks=100,
            sliding_window=9,
            null_block_id=5,
            allow_null=True,
            null_is_pad=True,
            pad_slot_id=803,
        ),
        bt.KVCacheGroup(block_size=4, slot_mode="cross", blocks_per_row=5, null_block_id=99),
    ],
    max_num_reqs=6,
    max_num_batched_tokens=24,
    max_model_len=64,
    max_num_rows=9,
)
CONFIGS = pytest.mark.parametrize(
    "config", [CONFIG, NO_NULL, NULL_INSIDE], ids=["plain", "no null, fewer rows", "null inside, more rows"]
)
HOST_PATHS = pytest.mark.parametrize("host_path", ["numpy", "compiled"])


PLAIN = frozenset({"int32_slots", "exports", "export_parts"})
"""No fused step: each of its parts may be replaced."""


class Wrong(NumpyBackend):
    """The tenth step's first slot is wrong."""

    capabilities = PLAIN

    def create_slot_mapper(self, store: NumpyBlockStore) -> NumpySlotMapper:
        class Mapper(NumpySlotMapper):
            calls = 0

            def compute_slot_mappings(
                self, batch: Batch, out: Sequence[Any], *, stream: int | None, groups: Sequence[int] | None = None
            ) -> None:
                super().compute_slot_mappings(batch, out, stream=stream)
                self.calls += 1
                if self.calls == 10:
                    out[0][0] += 1

        return Mapper(store)


def play(path: Path, backend: Any = None) -> tuple[ReplayResult, Lane]:
    recording = Recording(path)
    lane = Lane("numpy", backend or bt.get_backend("numpy"), recording.config)
    return Player(recording, [lane]).run(SilentProgress()), lane


def drive(table: bt.BlockTable, seed: int, num_calls: int = 300) -> None:
    """Call everything that a recording holds, in an order of chance, refused calls among them."""
    chance = random.Random(seed)
    more = table.create_buffers()
    for _ in range(num_calls):
        with contextlib.suppress(bt.BlockTableError):
            one_call(table, chance, more)


def one_call(table: bt.BlockTable, chance: random.Random, more: bt.StepBuffers) -> None:
    num_rows, num_groups = table.config.num_rows, len(table.config.groups)
    row, other = chance.randrange(num_rows + 1), chance.randrange(num_rows)  # the last row does not exist
    rows = chance.sample(range(num_rows), chance.randint(0, 4))
    group = chance.randrange(num_groups)
    counts = [[chance.randint(0, 3) for _ in rows] for _ in range(num_groups)]
    ids = [[chance.randint(chance.randrange(2), 99) for _ in range(sum(numbers))] for numbers in counts]
    held = table.num_blocks_per_row
    stops = [chance.randint(0, int(held[1, row])) for row in rows]
    sizes = [min(2, int(held[group, row])) for row in rows]
    new_ids = [chance.randint(1, 99) for _ in range(sum(sizes))]
    old_ids = sorted(set(table.block_ids(other, group).tolist()))
    rest = [[2]] * (num_groups - 2)
    choices: list[Any] = [
        lambda: table.append_row(row, ([5, 6], [7], *rest)),
        lambda: table.set_row(row, [None, np.array([2, 4], np.int32), *rest]),
        lambda: table.set_row(row, [np.empty(0, np.int64), np.array([6, 5, 7]), *rest]),
        lambda: table.clear_row(row),
        lambda: table.move_row(row, other),
        lambda: table.swap_rows(a=other, b=row),
        lambda: table.copy_row(other, row),
        lambda: table.truncate_row(row, chance.choice((1, [1, 2, *[0] * (num_groups - 2)]))),
        lambda: table.null_range(other, 1, 0, chance.randint(0, int(held[1, other]))),
        lambda: table.append_rows(rows, ids, counts),
        lambda: table.append_rows(np.array(rows, np.int64), ids, np.array(counts, np.int64).reshape(num_groups, -1)),
        lambda: table.set_rows(rows, [[8] * len(rows)] * num_groups, [1] * len(rows)),
        lambda: table.clear_rows(tuple(rows)),
        lambda: table.truncate_rows(rows, [1] * len(rows)),
        lambda: table.null_ranges(rows, 1, [0] * len(rows), stops),
        lambda: table.permute_rows(rows, rows[1:] + rows[:1]),
        lambda: table.copy_rows([other] * len(rows), np.array(rows, np.int64)),
        lambda: table.copy_rows(rows[::-1], rows),
        lambda: table.replace_blocks(other, group, 0, [7]),
        lambda: table.replace_blocks(row, group, block_ids=None, start=0),
        lambda: table.replace_block_ranges(rows, group, [0] * len(rows), new_ids, sizes),
        lambda: table.replace_block_ranges(rows, 1, stops, np.array(new_ids, np.int32), np.array(sizes, np.int32)),
        lambda: table.remap_blocks(group, old_ids, old_ids[1:] + old_ids[:1]),
        lambda: table.remap_blocks(group, np.arange(10, 60, dtype=np.int32), np.arange(11, 61)),
        lambda: table.commit(),
        lambda: table.gather(np.array(rows, np.int32), 6),
        lambda: table.gather(None, num_reqs=6, num_computed_tokens=np.arange(6, dtype=np.int32)),
        lambda: table.clear() if chance.random() < 0.5 else table.invalidate(),
        lambda: table.set_row(other, "no ids"),  # type: ignore[arg-type]
        lambda: make_slots(table, chance, rows),
        lambda: make_step(table, chance, rows, more),
        lambda: make_step(table, chance, rows, None),
    ]
    chance.choice(choices)()


def batch(chance: random.Random, rows: list[int]) -> tuple[Any, Any, Any]:
    starts = np.cumsum([0, *(chance.randint(0, 5) for _ in rows)], dtype=np.int32)
    positions = np.array([chance.randint(-1, 40) for _ in range(int(starts[-1]))], np.int64)
    return np.array(rows, np.int32), starts, positions


def make_slots(table: bt.BlockTable, chance: random.Random, rows: list[int]) -> None:
    every = range(len(table.config.groups))
    groups: Any = chance.choice((None, [1], (1, 0), np.array(every)[::-1], [0, 0], every[-1]))
    num_arrays = len(every) if groups is None else np.size(groups)
    out = [np.zeros(22, np.int64) for _ in range(num_arrays)] if chance.random() < 0.5 else None
    padded = chance.choice((None, 21))
    table.compute_slot_mappings(*batch(chance, rows), groups=groups, out=out, num_tokens_padded=padded)


def make_step(table: bt.BlockTable, chance: random.Random, rows: list[int], out: bt.StepBuffers | None) -> None:
    idx_mapping, starts, positions = batch(chance, rows)
    computed = np.array([chance.randint(0, 40) for _ in rows], np.int32) if chance.random() < 0.5 else None
    padded = chance.choice((None, 5, len(rows)))
    table.step(idx_mapping, starts, positions, num_reqs_padded=padded, num_computed_tokens=computed, out=out)


@HOST_PATHS
@CONFIGS
@pytest.mark.parametrize("seed", range(4))
def test_a_recording_runs_again_bit_for_bit(
    seed: int, config: bt.BlockTableConfig, host_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_host_path(host_path, monkeypatch)
    path = tmp_path / "run.btrace"
    table = bt.BlockTable(config, "numpy")
    with Recorder(table, path, digests=True):
        drive(table, seed)
    assert "step" not in vars(table)
    result, lane = play(path)
    assert (result.num_mismatches, lane.findings.shown, result.notes[1:]) == (0, [], [])
    assert lane.table.config == config
    assert set(PARAMETERS) <= set(result.counters)
    assert result.source["digests"] == result.counters["steps"] > 20
    assert not result.source["is_torn"]
    assert lane.table.num_blocks_per_row.tolist() == table.num_blocks_per_row.tolist()
    for group in range(len(config.groups)):
        assert (lane.table.host_table(group) == table.host_table(group)).all()


def choose_host_path(host_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if host_path == "compiled":
        pytest.importorskip("blocktable_compiled.operations", reason="the compiled host path was not built")
    monkeypatch.setenv("BLOCKTABLE_HOST_PATH", host_path)


class RecordedSubject(Subject):
    """Records every table that the suite makes."""

    path: Path
    recorder: OpenRecording

    def table(self, config: bt.BlockTableConfig, **options: Any) -> bt.BlockTable:
        table = super().table(config, **options)
        self.recorder = table.record(self.path, digests=True)
        return table


@HOST_PATHS
def test_any_history_of_the_suite_runs_again(host_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every geometry and every call that the suite draws. Rules: R4-R19."""
    choose_host_path(host_path, monkeypatch)
    recorded = RecordedSubject("numpy", bt.get_backend("numpy"))
    recorded.path = tmp_path / "run.btrace"

    class RecordedHistory(TableHistory):
        subject = recorded

        def teardown(self) -> None:
            super().teardown()
            if hasattr(self, "pair"):
                recorded.recorder.close()
                result, lane = play(recorded.path)
                assert (result.num_mismatches, lane.findings.shown, result.notes) == (0, [], [])

    run_state_machine_as_test(RecordedHistory, settings=profiles.current().settings(10))


def test_every_observed_call_is_in_the_format() -> None:
    """But for exports, which change nothing, the step with metadata, written as a step, and packets, as set_row."""
    others = {"create_export", "export", "map_positions", "step_metadata", "apply_changes"}
    assert set(OBSERVED_CALLS) - set(PARAMETERS) == others
    assert set(PARAMETERS) <= set(OBSERVED_CALLS)


def test_a_table_records_itself(tmp_path: Path) -> None:
    path, table = tmp_path / "run.btrace", bt.BlockTable(CONFIG, "numpy")
    with table.record(path, digests=True):
        drive(table, 1, 100)
    result, lane = play(path)
    assert (result.num_mismatches, lane.findings.shown) == (0, [])
    assert result.source["digests"] > 5


@pytest.mark.parametrize("seed", range(3))
def test_packets_are_written_as_the_rows_that_they_change(seed: int, tmp_path: Path) -> None:
    """Rules: R46."""
    chance, path = random.Random(seed), tmp_path / "run.btrace"
    sender, table = bt.BlockTable(CONFIG, "numpy"), bt.BlockTable(CONFIG, "numpy")
    more = sender.create_buffers()
    with table.record(path, digests=True):
        for _ in range(40):
            for _ in range(chance.randint(0, 4)):
                with contextlib.suppress(bt.BlockTableError):
                    one_call(sender, chance, more)
            table.apply_changes(sender.pack_changes())
            table.step(np.arange(2, dtype=np.int32), np.arange(3, dtype=np.int32), np.array([3, 5]))
        with pytest.raises(bt.ChangesError):
            table.apply_changes(b"")
    result, lane = play(path)
    assert (result.num_mismatches, lane.findings.shown, result.counters["steps"]) == (0, [], 40)
    assert lane.table.digest() == table.digest() != 0


INT32_0, STARTS, POSITIONS = np.zeros(1, np.int32), np.array([0, 1], np.int32), np.zeros(1, np.int64)


def map_into(out: Any) -> Callable[[bt.BlockTable], object]:
    """Return a call that writes its slots there."""
    return lambda table: table.compute_slot_mappings(INT32_0, STARTS, POSITIONS, out=out)


WRONG_OUTS: tuple[Any, ...] = ([None, None], [1, 1], "ab", b"ab", {}, 5, [np.array(3), np.array(3)])
REFUSED: dict[str, Callable[[bt.BlockTable], object]] = {
    **{f"out {out!r}": map_into(out) for out in WRONG_OUTS},
    "another table's set": lambda table: table.step(
        INT32_0, STARTS, POSITIONS, out=bt.BlockTable(CONFIG, "numpy").create_buffers()
    ),
    "a strided array": lambda table: table.gather(np.zeros(4, np.int32)[::2]),
    "a list": lambda table: table.step(INT32_0, STARTS, [0]),  # type: ignore[arg-type]
    "a memoryview": lambda table: table.step(INT32_0, STARTS, memoryview(b"ab")),  # type: ignore[arg-type]
    "an int above 64 bits in a list": lambda table: table.clear_rows([2**70]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_is_refused_as_without_a_recording(name: str, tmp_path: Path) -> None:
    """Whatever the format cannot hold: the table's own error, and a file that replays."""
    with pytest.raises(bt.BlockTableError) as plain:
        REFUSED[name](bt.BlockTable(CONFIG, "numpy"))
    path, table = tmp_path / "run.btrace", bt.BlockTable(CONFIG, "numpy")
    with table.record(path):
        with pytest.raises(bt.BlockTableError) as recorded:
            REFUSED[name](table)
        table.step(INT32_0, STARTS, POSITIONS)
    assert (type(recorded.value), str(recorded.value)) == (type(plain.value), str(plain.value))
    result, lane = play(path)
    assert (result.num_mismatches, lane.findings.shown) == (0, [])


class HostTensor:
    """A host array of another library: DLPack and the array interface, and none of numpy's methods."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.shape, self.dtype = array.shape, array.dtype
        self.__array_interface__ = array.__array_interface__
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def test_host_arrays_of_other_libraries_are_recorded(tmp_path: Path) -> None:
    path, table = tmp_path / "run.btrace", bt.BlockTable(CONFIG, "numpy")
    table.append_row(0, ([5], [4]))
    inputs: list[Any] = [HostTensor(array) for array in (INT32_0, STARTS, POSITIONS)]
    with table.record(path, digests=True):
        step = table.step(*inputs)
    result, lane = play(path)
    assert (result.num_mismatches, lane.findings.shown) == (0, [])
    assert (result.source["digests"], step.slot_mappings[0].tolist()) == (1, [20])


def test_a_count_above_64_bits_replays(tmp_path: Path) -> None:
    path, table, most = tmp_path / "run.btrace", bt.BlockTable(CONFIG, "numpy"), np.array([2**64 - 1] * 2, np.uint64)
    with table.record(path):
        table.append_row(0, ([1, 2, 3], [4]))
        table.truncate_row(0, most)
        table.truncate_rows([0, 1], most)
        table.step(INT32_0, STARTS, POSITIONS)
    result, lane = play(path)
    assert (result.num_mismatches, lane.findings.shown) == (0, [])
    assert table.block_ids(0, 0).tolist() == [1, 2, 3]


@CONFIGS
def test_recording_may_begin_in_the_middle(config: bt.BlockTableConfig, tmp_path: Path) -> None:
    path = tmp_path / "run.btrace"
    table = bt.BlockTable(config, "numpy")
    drive(table, 5, 100)
    table.set_row(2, ([1, 2], [6, config.groups[1].null_block_id, 1, 7], *[[4]] * (len(config.groups) - 2)))
    table.null_range(2, 1, 2, 3)
    table.null_range(2, 0, 0, 1)
    table.commit()
    with Recorder(table, path, digests=True) as recorder:
        table.create_buffers()
        make_step(table, random.Random(1), [2, 3, 0], None)
        with pytest.raises(bt.ArgumentError, match="being recorded already"):
            Recorder(table, tmp_path / "other.btrace")
        recorder.close()
        recorder.close()
    result, lane = play(path)
    assert (result.num_mismatches, lane.findings.shown) == (0, [])
    for group in range(len(config.groups)):
        assert (lane.table.host_table(group) == table.host_table(group)).all()


def test_a_wrong_backend_is_found_by_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fault seen in a live engine becomes a file: the digests of what was put out are in it."""
    backend: Any = Wrong()
    path, table = tmp_path / "run.btrace", bt.BlockTable(CONFIG, backend)
    with Recorder(table, path, digests=True):
        table.set_row(0, ([5], [6]))
        for _ in range(12):
            table.step(np.array([0], np.int32), np.array([0, 2], np.int32), np.array([0, 1]))
    assert cli.main(["replay", str(path), "--quiet"]) == 1
    said = capsys.readouterr().out
    assert "step 10, the outputs are not those that were recorded (digest)" in said
    assert "\nFAILED: 1 mismatches in 12 steps" in said
    assert cli.main(["replay", str(path), "--quiet", "--backend", f"{__name__}:Wrong"]) == 1
    assert "step 10, group 0, token 0, request 0 (batch index 0, row 0), position 0: expected 20, got 21" in (
        capsys.readouterr().out
    )


class Overzealous(NumpyBackend):
    """A call that names groups writes the first group's slots of the last step, too."""

    capabilities = PLAIN

    def create_slot_mapper(self, store: NumpyBlockStore) -> NumpySlotMapper:
        class Mapper(NumpySlotMapper):
            last: Sequence[Any]

            def compute_slot_mappings(
                self, batch: Batch, out: Sequence[Any], *, stream: int | None, groups: Sequence[int] | None = None
            ) -> None:
                super().compute_slot_mappings(batch, out, stream=stream, groups=groups)
                if groups is None:
                    self.last = out
                else:
                    self.last[0][:] = 5

        return Mapper(store)


def test_slots_of_a_group_that_was_not_named_must_stay(tmp_path: Path) -> None:
    """Rules: R15."""
    path, table = tmp_path / "run.btrace", bt.BlockTable(CONFIG, "numpy")
    inputs = np.array([0], np.int32), np.array([0, 2], np.int32), np.array([0, 1])
    with Recorder(table, path):
        table.set_row(0, ([5], [6]))
        table.step(*inputs)
        table.compute_slot_mappings(*inputs, groups=[1])
    assert play(path)[0].num_mismatches == 0
    assert play(path, Overzealous())[1].findings.shown == [
        "step 2, a slot buffer changed whose group the call does not name (R15)"
    ]


def test_a_call_that_was_refused_must_be_refused_again(tmp_path: Path) -> None:
    path, table = tmp_path / "run.btrace", bt.BlockTable(CONFIG, "numpy")
    with Recorder(table, path):
        with pytest.raises(bt.RowIndexError):
            table.clear_row(6)
        table.commit()
        table.step(np.array([0], np.int32), np.array([0, 0], np.int32), np.empty(0, np.int64))
    content = path.read_bytes()
    assert play(path)[0].num_mismatches == 0
    head, _, _, *lines = lines_of(path)
    rewrite(path, [head, b'{"call":"clear_row","row":5}', b'{"raised":"RowIndexError"}', *lines])
    result, lane = play(path)
    assert lane.findings.shown == ["step 0, clear_row raised RowIndexError when it was recorded, here nothing"]
    assert result.num_mismatches == 1
    assert content != path.read_bytes()


def lines_of(path: Path) -> list[bytes]:
    return gzip.decompress(path.read_bytes()).splitlines()


def rewrite(path: Path, lines: Sequence[bytes]) -> None:
    path.write_bytes(gzip.compress(b"".join(line + b"\n" for line in lines), 1))


def test_replay_records_and_runs_the_file_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, numbers = tmp_path / "run.btrace", tmp_path / "numbers.json"
    arguments = ["replay", "--quiet", "--max-steps", "400", "--json", str(numbers)]
    assert cli.main([*arguments, "--record", str(path)]) == 0
    recorded = json.loads(numbers.read_text())["backends"][0]
    assert cli.main(["replay", str(path), "--quiet", "--json", str(numbers)]) == 0
    again = json.loads(numbers.read_text())
    assert again["backends"][0]["output_digest"] == recorded["output_digest"]
    assert again["backends"][0]["bytes_sent_per_step_mean"] == recorded["bytes_sent_per_step_mean"]
    assert again["trace"]["digests"] == again["schedule"]["steps"] == 400
    capsys.readouterr()
    assert cli.main(["replay", str(path), "--rows", "dense", "--limit", "3"]) == cli.USAGE_ERROR
    assert "leave out what would set rows, limit" in capsys.readouterr().err


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A recording of several chunks."""
    path = tmp_path_factory.mktemp("recorded") / "run.btrace"
    table = bt.BlockTable(CONFIG, "numpy")
    with Recorder(table, path, digests=True) as recorder:
        for seed in range(4):
            drive(table, seed, 100)
            recorder.flush()
    return path.read_bytes()


def test_a_torn_file_runs_up_to_the_tear(recorded: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "torn.btrace"
    path.write_bytes(recorded)
    whole = play(path)[0].counters["steps"]
    seen = set()
    for cut in range(len(recorded) // 3, len(recorded), 97):
        path.write_bytes(recorded[:cut])
        result, lane = play(path)
        assert (result.num_mismatches, lane.findings.shown) == (0, [])
        assert result.source["is_torn"]
        assert "the recording is torn" in result.notes[0]
        seen.add(result.counters["steps"])
    assert len(seen) >= 3  # chunk by chunk
    assert max(seen) <= whole
    path.write_bytes(recorded[: len(recorded) * 2 // 3])
    assert cli.main(["replay", str(path), "--quiet", "--check", "off"]) == 0  # the calls are random
    said = capsys.readouterr().out
    assert f"{path}: the recording is torn (byte " in said
    assert "it was run up to there." in said


def test_a_damaged_file_is_said(recorded: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "damaged.btrace"
    chance = random.Random(2)
    for _ in range(60):
        content = bytearray(recorded)
        content[chance.randrange(10, len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        status = cli.main(["replay", str(path), "--quiet", "--check", "off"])
        said = capsys.readouterr()
        assert status in (0, cli.USAGE_ERROR)
        assert "Traceback" not in said.err
        assert re.search("torn|damaged|begins no known trace|no UTF-8", said.out + said.err)


HEAD = b'{"format":"blocktable recording","version":3,"config":'


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\x89BTRACE\n" + bytes(20), "has version 1 or 2, this blocktable reads version 3"),
        (gzip.compress(b'{"format":"blocktable recording","version":99}\n'), "has version 99, this blocktable reads"),
        (gzip.compress(b'{"format":"blocktable recording",\n'), "is not a recording, or its head is damaged"),
        (gzip.compress(HEAD + b"{}}\n"), "configuration cannot be used: 'groups'"),
        (gzip.compress(HEAD + b'{"groups":[{"block_size":"x"}],"context_parallel":{}}}\n'), "cannot be used"),
    ],
    ids=["binary", "version 99", "no JSON", "no config", "wrong config"],  # gzip writes the time
)
def test_no_recording_at_all(content: bytes, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.btrace"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=sentence):
        Recording(path)
    assert cli.main(["replay", str(path)]) == cli.USAGE_ERROR
    assert sentence in capsys.readouterr().err


def test_a_full_disk_ends_the_recording_and_not_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Any, lines: Sequence[str]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    table = bt.BlockTable(CONFIG, "numpy")
    recorder = Recorder(table, tmp_path / "run.btrace")
    monkeypatch.setattr("blocktable_replay.recording.write_member", fail)
    with pytest.warns(RuntimeWarning, match="the recording ends here: .*No space left"):
        commit_until_it_ends(table, recorder)
    table.set_row(0, ([3], [4]))
    assert table.host_table(0)[0, 0] == 3


def commit_until_it_ends(table: bt.BlockTable, recorder: Recorder) -> None:
    """The thread that writes meets the full disk; the next call hears of it."""
    deadline = time.monotonic() + 30
    while "step" in vars(table) and time.monotonic() < deadline:
        table.commit()
        recorder.flush()


VALUES: tuple[Any, ...] = (
    None,
    0,
    -5,
    2**62,
    np.arange(3, dtype=np.int32),
    np.empty(0, np.int64),
    np.arange(2**40, 2**40 + 5000),
    np.concatenate([np.arange(start, start + 70) for start in (0, 2**50, 3)]),
    np.array([2**63 - 1, -(2**63)] * 40),
    np.arange(100, dtype=np.uint64) + np.uint64(2**63),
    np.array([[1, 2], [3, 4]], np.int64),
    np.empty((2, 0), np.int64),
    np.arange(90, dtype=np.uint8).reshape(3, 30),
    np.arange(20, dtype=np.int32)[::2],
    np.arange(200)[::2],
    np.arange(300)[100:],
    [[1, 2, 3], [], None, (4,)],
    [],
)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_the_format_gives_back_what_went_in(value: Any) -> None:
    call = parse_line(call_line("set_row", {"row": 1, "block_ids": value}).encode())
    assert_equal(call["block_ids"], value)
    assert (call["call"], call["row"], [*call]) == ("set_row", 1, ["call", "row", "block_ids"])


def assert_equal(got: Any, expected: Any) -> None:
    if isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert (got == expected).all()
    elif isinstance(expected, list | tuple) and not (expected and all(type(value) is int for value in expected)):
        assert len(got) == len(expected)
        for inner, wanted in zip(got, expected, strict=True):
            assert_equal(inner, wanted)
    elif isinstance(expected, list | tuple):
        assert got.tolist() == list(expected)
    else:
        assert got == expected


@pytest.mark.parametrize("value", [1.5, "text", b"bytes", True, np.zeros(3), {1: 2}, 2**70], ids=repr)
def test_what_the_format_cannot_hold_is_marked(value: Any) -> None:
    call = parse_line(call_line("set_row", {"row": 0, "block_ids": [value]}).encode())
    assert isinstance(call["block_ids"][0], Foreign)


def test_prefill_positions_take_little_room() -> None:
    assert len(call_line("step", {"positions": np.arange(100_000, 108_192)})) < 80


@pytest.mark.parametrize("call", ["gather", "compute_slot_mappings", "step"])
def test_the_format_has_the_parameters_of_the_method(call: str) -> None:
    """A recorder writes arguments in the order of the parameters: another order is another version of the format."""
    page = (Path(__file__).parents[1] / "docs/recording.md").read_text()
    (values,) = re.findall(rf"^\| `{call}` \| (.*) \|$", page, re.MULTILINE)
    parameters = list(inspect.signature(getattr(bt.BlockTable, call)).parameters)
    assert ["self", *values.split(", "), "stream"] == parameters


@CONFIGS
@pytest.mark.parametrize("seed", range(12))
def test_the_row_model_is_the_oracle(seed: int, config: bt.BlockTableConfig) -> None:
    """What the player believes of rows is what the suite's oracle believes. Rules: R4-R8."""
    chance = random.Random(seed)
    model, oracle = RowModel(config), OracleTable(config)
    for _ in range(80):
        name, values = random_operation(chance, oracle)
        with contextlib.suppress(Refused):  # a null among drawn ids
            getattr(oracle, name)(*values)
            model.apply(name, values)
    oracle.commit()
    model.commit()
    for record in (model.host, model.committed):
        assert record.counts.tolist() == oracle.num_blocks_per_row()
        for group, rows in enumerate(oracle.rows):
            for row, blocks in enumerate(rows):
                held = record.blocks[group][row, : len(blocks)].tolist()
                null = config.groups[group].null_block_id
                assert [-1 if block == null else block for block in held] == [
                    -1 if block is None else block for block in blocks
                ]


def random_operation(chance: random.Random, oracle: OracleTable) -> tuple[str, tuple[Any, ...]]:
    every_row, groups = range(oracle.num_rows), range(len(oracle.shapes))
    a, b = chance.choice(every_row), chance.choice(every_row)
    rows = chance.sample(every_row, chance.randint(1, 4))
    group = chance.choice(groups)
    counts = [[chance.randint(0, 2) for _ in rows] for _ in groups]
    room = [min(oracle.shapes[g].capacity - len(oracle.rows[g][row]) for row in (*rows, a)) for g in groups]
    counts = [[min(count, room[g]) for count in counts[g]] for g in groups]
    ids = [[chance.randint(chance.randrange(2), 50) for _ in range(sum(group_counts))] for group_counts in counts]
    one: list[Any] = [[chance.randint(1, 50)] * min(2, room[0]), *[None] * len(groups[1:])]
    stops = [chance.randint(0, len(oracle.rows[group][row])) for row in rows]
    starts = [chance.randint(0, stop) for stop in stops]
    sizes = [stop - start for start, stop in zip(starts, stops, strict=True)]
    new_ids = [chance.randint(1, 50) for _ in range(sum(sizes))]
    old_ids = chance.sample(range(51), 20)
    operations: list[tuple[str, tuple[Any, ...]]] = [
        ("append_row", (a, one)),
        ("append_row", (a, None)),
        ("set_row", (a, one)),
        ("set_row", (a, [])),
        ("append_rows", (rows, ids, counts)),
        ("set_rows", (rows, ids, counts)),
        ("clear_row", (a,)),
        ("clear_rows", (rows,)),
        ("clear", ()),
        ("move_row", (a, b)),
        ("swap_rows", (a, b)),
        ("copy_row", (a, b)),
        ("copy_rows", ([chance.choice(every_row) for _ in rows], rows)),
        ("permute_rows", (rows, chance.sample(every_row, len(rows)))),
        ("truncate_row", (a, chance.choice((1, [1, 3, 2][: len(groups)])))),
        ("truncate_rows", (rows, [chance.randint(0, 3) for _ in rows])),
        ("null_range", (rows[0], group, starts[0], stops[0])),
        ("null_ranges", (rows, group, starts, stops)),
        ("replace_blocks", (rows[0], group, starts[0], new_ids[: sizes[0]])),
        ("replace_block_ranges", (rows, group, starts, new_ids, sizes)),
        ("remap_blocks", (group, old_ids, [chance.randint(1, 50) for _ in old_ids])),
    ]
    weights = [1 if name == "clear" else 6 for name, _ in operations]
    return chance.choices(operations, weights)[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_disk_that_is_full_from_the_start() -> None:
    table = bt.BlockTable(CONFIG, "numpy")
    with pytest.raises(RecordingError, match="the recording cannot be written: No space left"):
        Recorder(table, "/dev/full")
    assert "step" not in vars(table)


def test_cost_of_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """About a tenth of a step in numpy alone, with room for a busy machine: medians of the same steps on two tables."""
    monkeypatch.setenv("BLOCKTABLE_HOST_PATH", "numpy")
    costs = []
    for _ in range(3):  # a machine that does other things disturbs one try, seldom three
        lanes = [Lane(name, bt.get_backend("numpy"), synthetic.EXERCISE.config()) for name in ("plain", "recorded")]
        with tempfile.TemporaryDirectory() as folder, Recorder(lanes[1].table, Path(folder) / "run.btrace"):
            Replay(read_trace(synthetic.SHIPPED), synthetic.EXERCISE, lanes).run(SilentProgress(), max_steps=500)
        plain, recorded = (np.array(lane.host_us) for lane in lanes)
        costs.append(float(np.median(recorded - plain) / np.median(plain)))
    assert min(costs) < 0.15, f"recording costs {min(costs):.1%} of a step"
