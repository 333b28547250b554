"""Check mode of the vLLM drop-ins: planted mistakes are named with request and block, right histories bring none."""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import blocktable as bt
from blocktable_vllm import drop_in, drop_in_v2

torch: Any = pytest.importorskip("torch", reason="torch is not installed: tox -e torch")
pytestmark = pytest.mark.torch

ROWS, TOKENS, COLUMNS, NUM_BLOCKS = 6, 128, 24, 50
SIZES, WINDOW = (16, 32), 40
"""Two groups of one pool; blocks of the second one are freed after a window, and no table is told."""

V1 = [("V1", "0.25.1", "fast"), ("V1", "0.25.1", "strict"), ("V1", "0.33.0", "fast"), ("V1", "0.33.0", "strict")]
V2 = [("V2", "0.25.1", ""), ("V2", "0.32.0", ""), ("V2", "0.33.0", "")]


def make(runner: str, profile: str, mode: str, check: str | None = "host") -> Any:
    arguments: dict[str, Any] = {
        "block_sizes": list(SIZES),
        "max_num_reqs": ROWS,
        "max_num_batched_tokens": TOKENS,
        "device": torch.device("cpu"),
    }
    if profile == "0.25.1":
        arguments["kernel_block_sizes"] = [16, 16]
    if runner == "V2":
        if profile == "0.33.0":
            arguments["sliding_window_reach"] = [0, WINDOW - 1]
        return drop_in_v2(profile, "numpy", check)(max_num_blocks_per_group=[COLUMNS, COLUMNS // 2], **arguments)
    if profile == "0.25.1":
        arguments["max_model_len"] = 1
    multi = drop_in(profile, mode, "numpy", check=check).MultiGroupBlockTable
    return multi(max_num_blocks=[COLUMNS, COLUMNS // 2], pin_memory=False, **arguments)


class Request:
    def __init__(self, name: str) -> None:
        self.name, self.row = name, -1
        self.blocks: list[list[int]] = [[], []]  # a block that a window has left is None, here as 0
        self.computed, self.length = 0, 0


class Runner:
    """What vLLM's scheduler, block pool and model runner do, as far as tables see it.

    Blocks that are freed are the next to be given out.

    Args:
        kind: "V1" or "V2".
        tables: of the drop-in.
    """

    def __init__(self, kind: str, tables: Any, seed: int = 0) -> None:
        self.is_v1, self.tables, self.chance = kind == "V1", tables, random.Random(seed)
        self.kv_cache_config = SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=[None, None])
        if self.is_v1:
            self.input_batch = SimpleNamespace(block_table=tables, req_ids=[])
        else:
            self.block_tables, self.req_states = tables, SimpleNamespace(index_to_req_id={})
        self.free = list(range(NUM_BLOCKS - 1, 0, -1))
        self.used: Counter[int] = Counter()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.number = 0
        self.seen: Counter[str] = Counter()
        self.call: Callable[..., None] = lambda method, *arguments: method(*arguments)

    # Blocks.

    def take(self) -> int:
        block = self.free.pop()
        self.used[block] = 1
        return block

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            if block:
                self.used[block] -= 1
                if not self.used[block]:
                    self.free.append(block)

    def grow(self, request: Request, tokens: int) -> list[list[int]]:
        new = [
            [self.take() for _ in range(-(-tokens // size) - len(held))]
            for size, held in zip(SIZES, request.blocks, strict=True)
        ]
        for held, more in zip(request.blocks, new, strict=True):
            held += more
        return new

    # Rows.

    def note_rows(self) -> None:
        if self.is_v1:
            for row, request in enumerate(self.running):
                request.row = row
            self.input_batch.req_ids[:] = [request.name for request in self.running]
        else:
            self.req_states.index_to_req_id = {request.row: request.name for request in self.running}

    def begin(self, request: Request) -> None:
        """Give a request a row, and the blocks that it has."""
        if self.is_v1:
            request.row = len(self.running)
        else:
            request.row = min(set(range(ROWS)) - {each.row for each in self.running})
        self.running.append(request)
        self.note_rows()
        if self.is_v1:
            self.tables.add_row(tuple(map(list, request.blocks)), request.row)
        else:
            self.tables.append_block_ids(request.row, tuple(map(list, request.blocks)), overwrite=True)

    def append(self, request: Request, new: list[list[int]]) -> None:
        if not any(new):
            return
        if self.is_v1:
            self.tables.append_row(tuple(new), request.row)
        else:
            self.tables.append_block_ids(request.row, tuple(new), overwrite=False)

    def end(self, request: Request) -> None:
        """A request leaves its row: V1 is told and moves its last row there, V2 is not told."""
        for blocks in request.blocks:
            self.release(blocks)
        request.blocks = [[], []]
        if self.is_v1:
            self.tables.clear_row(request.row)
            last = self.running.pop()
            if last is not request:
                self.tables.move_row(last.row, request.row)
                self.running[request.row] = last
        else:
            self.running.remove(request)
        self.note_rows()

    def map_slots(self, scheduled: list[tuple[Request, int, int]]) -> None:
        """Commit, and compute the slots of positions start .. stop - 1 of each request."""
        starts, positions = [0], list[int]()
        for _, start, stop in scheduled:
            positions += range(start, stop)
            starts.append(len(positions))
        tensors = torch.tensor(starts, dtype=torch.int32), torch.tensor(positions, dtype=torch.int64)
        if self.is_v1:
            self.tables.commit_block_table(len(scheduled))
            self.call(self.tables.compute_slot_mapping, len(scheduled), *tensors)
        else:
            self.tables.apply_staged_writes()
            rows = torch.tensor([request.row for request, *_ in scheduled], dtype=torch.int32)
            self.tables.gather_block_tables(rows, len(scheduled))
            self.call(self.tables.compute_slot_mappings, rows, *tensors, TOKENS)

    # Steps.

    def arrive(self) -> None:
        self.number += 1
        request = Request(f"r{self.number}")
        request.length = self.chance.randint(20, 250)
        self.waiting.append(request)

    def admit(self, request: Request) -> None:
        request.computed = 0
        donors = [each for each in self.running if each.computed >= 64]
        if donors and self.chance.random() < 0.5:  # its first tokens are cached; what the window has left is a hole
            donor = self.chance.choice(donors)
            tokens = donor.computed // 32 * 32
            window_start = max(0, tokens - WINDOW + 1) // SIZES[1]
            wide, narrow = donor.blocks[0][: tokens // 16], donor.blocks[1][: tokens // 32]
            narrow = [0 if place < window_start else block for place, block in enumerate(narrow)]
            if all(wide) and all(narrow[window_start:]):
                request.blocks, request.computed = [list(wide), narrow], tokens
                request.length = max(request.length, tokens + 1)
                self.used.update(each for each in (*wide, *narrow) if each)
                self.seen["shared"] += 1
        self.begin(request)

    def step(self) -> None:
        while self.chance.random() < 0.5:
            self.arrive()
        for request in [each for each in self.running if each.computed >= each.length]:
            self.end(request)
            self.seen["ended"] += 1
        while self.waiting and len(self.running) < ROWS and len(self.free) > 12:
            self.admit(self.waiting.pop(0))
        while len(self.free) < 15 and len(self.running) > 1:
            victim = self.running[-1]
            self.end(victim)
            self.waiting.insert(0, victim)
            self.seen["preempted"] += 1
        if self.is_v1 and len(self.running) > 1 and self.chance.random() < 0.2:
            a, b = self.chance.sample(range(len(self.running)), 2)
            self.tables.swap_row(a, b)
            self.running[a], self.running[b] = self.running[b], self.running[a]
            self.note_rows()
        scheduled = []
        for request in self.running:
            stop = request.computed + self.chance.choice((1, 1, 4, 16))  # decode, drafts, a chunk of a prompt
            self.append(request, self.grow(request, stop))
            scheduled.append((request, request.computed, stop))
        if not scheduled:
            return
        self.map_slots(scheduled)
        for request, start, stop in scheduled:
            request.computed = stop if stop - start != 4 else start + self.chance.randint(1, 4)  # drafts are refused
            left = max(0, request.computed - WINDOW + 1) // SIZES[1]
            self.release(request.blocks[1][:left])
            request.blocks[1][:left] = [0] * len(request.blocks[1][:left])


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[int], list[str]]]:
    """What was logged at a level, in order."""
    with caplog.at_level(logging.INFO, "vllm"):
        yield lambda level: [
            each.getMessage() for each in caplog.records if each.levelno == level and each.name.startswith("vllm.")
        ]


def prepared(kind: str, profile: str, mode: str) -> tuple[Runner, list[Request]]:
    """Three requests that have been served a while: 40 tokens each."""
    runner = Runner(kind, make(kind, profile, mode))
    requests = [Request(name) for name in ("one", "two", "three")]
    for request in requests:
        runner.begin(request)
        runner.append(request, runner.grow(request, 40))
        request.computed = 40
    runner.map_slots([(request, 0, 40 if request is requests[0] else 20) for request in requests])
    runner.map_slots([(requests[0], 40, 40), (requests[1], 20, 40), (requests[2], 20, 40)])
    return runner, requests


@pytest.mark.parametrize(("kind", "profile", "mode"), V1 + V2)
def test_right_histories_bring_no_finding(log: Any, kind: str, profile: str, mode: str) -> None:
    runner = Runner(kind, make(kind, profile, mode), seed=2)
    for _ in range(150):
        runner.step()
    assert min(runner.seen[name] for name in ("shared", "ended", "preempted")) > 5
    assert log(logging.ERROR) == log(logging.WARNING) == []
    assert log(logging.INFO) == ["Block tables are checked on the host."]
    assert runner.tables.__check__.table.num_findings == 0


@pytest.mark.parametrize(("kind", "profile", "mode"), V1 + V2)
def test_a_neighbours_block_id_is_named(log: Any, kind: str, profile: str, mode: str) -> None:
    """The next block of a request is one that another request has written to."""
    runner, (one, two, _) = prepared(kind, profile, mode)
    wrong = two.blocks[0][2]
    runner.append(one, [[wrong], []])
    runner.map_slots([(one, 40, 52), (two, 40, 41)])
    assert log(logging.ERROR) == []  # it begins with the block's first token, as whoever gets a freed block does
    runner.map_slots([(one, 52, 53), (two, 41, 42)])
    (said,) = log(logging.ERROR)
    assert said.startswith("shared_block_written: 1 token of row 0, group 0, from position 52 on, ")
    assert f"block {wrong} (slot {wrong * 16 + 4}) is also row 1's" in said
    assert said.endswith("Row 0 is request 'one'. Row 1 is request 'two'. (after commit 4)")


@pytest.mark.parametrize(("kind", "profile", "mode"), V1 + V2)
def test_a_double_free_is_named(log: Any, kind: str, profile: str, mode: str) -> None:
    """A block of a running request is freed, and handed out to another one."""
    runner, (one, two, three) = prepared(kind, profile, mode)
    block = three.blocks[0][-1]
    runner.free.append(block)
    runner.append(two, runner.grow(two, 49))
    for tokens in (1, 2):
        runner.map_slots([(one, 40, 41), (two, 40 + 9 * (tokens - 1), 48 + tokens), (three, 39 + tokens, 40 + tokens)])
    lines = log(logging.ERROR)
    assert lines
    assert all(line.startswith("shared_block_written: ") and f"block {block} " in line for line in lines)
    assert any(f"Row {three.row} is request 'three'." in line for line in lines)
    assert any(f"Row {two.row} is request 'two'." in line for line in lines)


@pytest.mark.parametrize(("kind", "profile", "mode"), V1 + V2)
def test_a_forgotten_block_is_named_and_of_a_speculator_reported(log: Any, kind: str, profile: str, mode: str) -> None:
    runner, (one, *_) = prepared(kind, profile, mode)
    runner.map_slots([(one, 40, 50)])
    (line,) = log(logging.ERROR)
    assert line.startswith("missing_block: Row 0 of group 0 holds 3 blocks, 48 tokens; position 48 ")
    assert line.endswith("Row 0 is request 'one'. (after commit 3)")
    runner, (one, *_) = prepared(kind, profile, mode)
    space: dict[str, Any] = {"__name__": "vllm.v1.worker.gpu.spec_decode.some.speculator"}
    exec("def call(method, *arguments): method(*arguments)", space)
    runner.call = space["call"]
    runner.map_slots([(one, 40, 50)])
    assert log(logging.ERROR) == [line]
    assert [said.partition(":")[0] for said in log(logging.WARNING)] == ["missing_block"]


@pytest.mark.parametrize(("kind", "profile", "mode"), [*V1[::3], V2[2]])
def test_ids_outside_the_pool_are_named_once(log: Any, kind: str, profile: str, mode: str) -> None:
    runner, (one, *_) = prepared(kind, profile, mode)
    for _ in range(2):
        runner.append(one, [[NUM_BLOCKS + 3], []])
        runner.map_slots([(one, 40, 41)])
    (line,) = log(logging.ERROR)
    assert str(NUM_BLOCKS + 3) in line
    assert line.endswith(" Row 0 is request 'one'.")


def test_a_row_of_no_running_request_is_said_to_be_one(log: Any) -> None:
    runner, (one, two, _) = prepared("V2", "0.33.0", "")
    runner.tables.append_block_ids(one.row, ([two.blocks[0][2]], []), overwrite=False)
    runner.end(two)
    runner.map_slots([(one, 50, 51)])
    (line,) = log(logging.ERROR)
    assert "Row 0 is request 'one'. Row 1 is no running request's." in line


def test_without_a_runner_nothing_is_known_of_requests(log: Any) -> None:
    tables = make("V2", "0.33.0", "")
    tables.append_block_ids(0, ([5000], [1]), overwrite=True)
    tables.apply_staged_writes()
    one = torch.zeros(1, dtype=torch.int32)
    tables.compute_slot_mappings(one, torch.tensor([0, 1], dtype=torch.int32), torch.tensor([40]), 1)
    (first,) = log(logging.WARNING)
    assert first.startswith("The runner's KV cache configuration does not say how many blocks there are: ids above ")
    assert [line.partition(": ")[0] for line in log(logging.ERROR)] == ["missing_block", "missing_block"]
    assert not any("request" in line for line in log(logging.ERROR))


def test_groups_whose_places_are_no_positions_are_not_asked(log: Any) -> None:
    """A state's row holds one block, whatever the position."""
    tables = make("V1", "0.25.1", "fast")
    runner = Runner("V1", tables)
    spec = type("MambaSpec", (), {})()
    runner.kv_cache_config.kv_cache_groups = [
        SimpleNamespace(kv_cache_spec=None),
        SimpleNamespace(kv_cache_spec=spec),
    ]
    request = Request("one")
    request.blocks = [[1, 2, 3, 4, 5, 6], [7]]
    runner.begin(request)
    runner.map_slots([(request, 0, 90)])
    assert log(logging.ERROR) == []


def test_warm_up_is_not_looked_at(log: Any) -> None:
    tables = make("V1", "0.33.0", "fast")
    tables.commit_block_table(1)
    tables.compute_slot_mapping(1, torch.tensor([0, 2], dtype=torch.int32), torch.tensor([7, 7]))
    tables.clear()
    assert tables.__check__.table is None
    assert log(logging.ERROR) == []


def test_the_log_is_bounded(log: Any) -> None:
    runner, (one, *_) = prepared("V1", "0.33.0", "fast")
    for block in range(1000, 1100):
        runner.append(one, [[block], []])
        runner.tables.add_row(one.blocks, one.row)
    lines = log(logging.ERROR)
    assert len(lines) == 65
    assert lines[-1] == "More of ERROR are not logged."


@pytest.mark.parametrize("profile", ["0.25.1", "0.33.0"])
def test_tables_whose_rows_were_given_up_are_checked(log: Any, profile: str) -> None:
    """vLLM's runner for CPUs puts the host's rows in the place of the device's."""
    runner, (one, two, _) = prepared("V1", profile, "fast")
    for table in runner.tables.block_tables:
        table.block_table.gpu = table.block_table.cpu
    wrong = two.blocks[0][2]
    runner.append(one, [[wrong], []])
    runner.map_slots([(one, 40, 52), (two, 40, 41)])
    runner.map_slots([(one, 52, 53), (two, 41, 42)])
    (said,) = log(logging.ERROR)
    assert f"block {wrong} (slot {wrong * 16 + 4}) is also row 1's" in said
    runner.begin(Request("four"))
    assert runner.tables.__check__.table.block_ids(0, 0).tolist() == one.blocks[0] + [wrong]


def test_tables_without_groups_are_taken(log: Any) -> None:
    tables = drop_in_v2("0.33.0", "numpy", "host")(
        block_sizes=[],
        max_num_reqs=2,
        max_num_batched_tokens=8,
        max_num_blocks_per_group=[],
        device=torch.device("cpu"),
    )
    tables.append_block_ids(0, (), overwrite=True)
    tables.apply_staged_writes()
    assert tables.__check__.table is None


def test_a_table_is_freed_with_its_check() -> None:
    """Neither keeps the other, nor the runner, alive."""
    runner, _ = prepared("V2", "0.33.0", "")
    gone = weakref.ref(runner.tables), weakref.ref(runner)
    gc.disable()
    try:
        del runner
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


def test_off_is_the_class_without_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drop_in("0.33.0", "fast", "numpy", check="off") is drop_in("0.33.0", "fast", "numpy")
    assert not hasattr(make("V1", "0.33.0", "fast", None), "__check__")
    monkeypatch.setenv("BLOCKTABLE_VLLM_CHECK", "host")
    assert hasattr(make("V1", "0.33.0", "fast", None), "__check__")
    assert hasattr(make("V2", "0.33.0", "", None), "__check__")
    monkeypatch.setenv("BLOCKTABLE_VLLM_CHECK", "yes")
    with pytest.raises(bt.ConfigError, match=r"BLOCKTABLE_VLLM_CHECK, or check, must be one of off, host, device"):
        make("V2", "0.33.0", "", None)


def test_device_mode_is_of_the_drop_ins_own_backend_and_wants_the_number_of_blocks(
    monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    made: list[tuple[Any, dict[str, Any]]] = []

    def noting_table(config: bt.BlockTableConfig, backend: Any, device: Any, **options: Any) -> bt.BlockTable:
        made.append((backend.name, {"device": device, **options}))
        return bt.BlockTable(config, backend, device, check="host", on_finding=options["on_finding"])

    monkeypatch.setattr("blocktable_vllm.check.BlockTable", noting_table)
    tables = make("V1", "0.33.0", "fast", "device")
    tables.add_row([[1], [2]], 0)
    assert tables.__check__.table is None
    assert log(logging.WARNING)[0].endswith("how many blocks there are: the tables are not checked.")
    runner = Runner("V1", make("V1", "0.33.0", "fast", "device"))
    for _ in range(20):
        runner.step()
    ((backend, options),) = made
    assert backend == "numpy"
    assert (options["check"], options["device"]) == ("device", None)
    assert log(logging.ERROR) == []
    runner.append(runner.running[0], [[NUM_BLOCKS], []])
    assert len(log(logging.ERROR)) == 1
