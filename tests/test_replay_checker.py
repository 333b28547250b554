"""The replay's checker says what the suite's plain-Python oracle says, and names what differs. Rules: R10-R15."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable.config import SlotMode
from blocktable_conformance.oracle import OracleTable
from blocktable_replay.checker import (
    ExpectedStep,
    compare_block_table,
    compare_slots,
    expected_block_table,
    expected_slots,
)
from blocktable_replay.record import NULLED

MODES: tuple[SlotMode, ...] = ("linear", "linear", "linear", "ring", "none", "cross")
WINDOWS: dict[SlotMode, tuple[int | None, ...]] = {"linear": (None, 3, 17), "ring": (None, 3), "none": (None, 3)}
NUM_ROWS = 5
NUM_TOKENS = 40


def random_config(chance: random.Random) -> bt.BlockTableConfig:
    world_size = chance.choice((1, 1, 2, 3))
    interleave_size = chance.choice((1, 2, 4))
    groups = []
    for _ in range(chance.randint(1, 3)):
        kernel_block_size = chance.choice((1, 2, 3, 4))
        block_size = kernel_block_size * chance.choice((1, 2, 4))
        mode: SlotMode = chance.choice(MODES)
        divides = block_size % interleave_size == 0
        groups.append(
            bt.KVCacheGroup(
                block_size=block_size,
                kernel_block_size=kernel_block_size,
                sliding_window=chance.choice(WINDOWS.get(mode, (None,))),
                slot_mode=mode,
                sharded=None if mode == "linear" and (world_size == 1 or divides) else False,
                allow_null=True,
                null_is_pad=chance.random() < 0.3,
                blocks_per_row=chance.choice((None, 6)),
                null_block_id=chance.choice((0, 0, -1, 30)),
                pad_slot_id=chance.choice((-1, -1, -8)),
            )
        )
    return bt.BlockTableConfig(
        groups=groups,
        max_num_reqs=NUM_ROWS,
        max_num_batched_tokens=NUM_TOKENS,
        max_model_len=48,
        width_alignment=chance.choice((1, 8)),
        context_parallel=bt.ContextParallel(
            world_size=world_size, rank=chance.randrange(world_size), interleave_size=interleave_size
        ),
    )


class Pair:
    """One table twice: as the oracle keeps it, and as the scheduler's record."""

    def __init__(self, config: bt.BlockTableConfig, chance: random.Random) -> None:
        self.oracle = OracleTable(config)
        self.blocks, self.counts = [], []
        for group in range(len(config.groups)):
            capacity = config.capacity(group)
            blocks = np.array([[chance.randrange(50) for _ in range(capacity)] for _ in range(NUM_ROWS)], np.int32)
            counts = np.array([chance.choice((0, 1, capacity, chance.randint(0, capacity))) for _ in range(NUM_ROWS)])
            for row in range(NUM_ROWS):
                ids: list[Any] = [[] for _ in config.groups]
                ids[group] = blocks[row, : counts[row]].tolist()
                self.oracle.append_row(row, ids)
                stop = chance.randint(0, counts[row])
                start = chance.randint(0, stop)
                self.oracle.null_range(row, group, start, stop)
                blocks[row, start:stop] = NULLED
            self.blocks.append(blocks)
            self.counts.append(counts)
        self.oracle.commit()


@pytest.mark.parametrize("seed", range(150))
def test_the_checker_is_the_oracle(seed: int) -> None:
    chance = random.Random(seed)
    config = random_config(chance)
    pair = Pair(config, chance)
    num_reqs = chance.randint(0, NUM_ROWS)
    handles = np.array([chance.choice((0, 1, 2, 3, 4, -1, 5, -7)) for _ in range(num_reqs)], np.int64)
    starts = np.cumsum([chance.choice((0, 0, 3)), *(chance.randint(0, 12) for _ in range(num_reqs))], dtype=np.int32)
    positions = np.array([chance.randint(-2, 60) for _ in range(chance.randint(0, NUM_TOKENS))], np.int64)
    computed = np.array([chance.randint(0, 48) for _ in range(num_reqs)], np.int32)
    slots = pair.oracle.slots(handles.tolist(), starts.tolist(), positions.tolist(), NUM_TOKENS)
    for windows in (None, computed):
        tables = pair.oracle.gather(handles.tolist(), None if windows is None else windows.tolist())
        for group in range(len(config.groups)):
            record = (config, group, pair.blocks[group], pair.counts[group], handles)
            got = expected_slots(*record, starts, positions, NUM_TOKENS)
            assert got.tolist() == [slot.value for slot in slots[group]]
            table = expected_block_table(*record, windows)
            whole = np.full((NUM_ROWS, config.width(group)), config.groups[group].filler, np.int64)
            whole[:num_reqs, : table.shape[1]] = table
            assert whole.tolist() == tables[group]


@pytest.fixture
def expected() -> ExpectedStep:
    """One group of two requests: rows [7, 8] and [9], three tokens, buffers of five slots and three rows."""
    return ExpectedStep(
        block_tables=(np.array([[7, 8], [9, 0]], np.int32),),
        table_shapes=((3, 4),),
        fillers=(0,),
        slot_mappings={0: np.array([28, 29, 36, -1, -1])},
        query_start_loc=np.array([0, 2, 3], np.int32),
        positions=np.array([0, 1, 0]),
        requests=np.array([40, 41]),
        rows=np.array([6, 2]),
    )


@pytest.mark.parametrize(
    ("token", "got", "said"),
    [
        (1, 30, "group 0, token 1, request 40 (batch index 0, row 6), position 1: expected 29, got 30 (R12, R13)"),
        (2, -1, "group 0, token 2, request 41 (batch index 1, row 2), position 0: expected 36, got -1 (R12, R13)"),
        (4, 0, "group 0, token 4, after the last real token: expected -1, got 0 (R15)"),
    ],
)
def test_a_wrong_slot_is_named(expected: ExpectedStep, token: int, got: int, said: str) -> None:
    buffer = expected.slot_mappings[0].copy()
    assert compare_slots(expected, 0, buffer) == (0, [])
    buffer[token] = got
    count, (named,) = compare_slots(expected, 0, buffer)
    assert (count, named) == (1, said)


@pytest.mark.parametrize(
    ("row", "column", "got", "said"),
    [
        (0, 1, 3, "group 0, request 40 (batch index 0, row 6), column 1: expected 8, got 3 (R10.1, R11)"),
        (1, 1, 8, "group 0, request 41 (batch index 1, row 2), column 1: expected 0, got 8 (R10.1, R11)"),
        (1, 3, -1, "group 0, request 41 (batch index 1, row 2), column 3: expected 0, got -1 (R10.1, R11)"),
        (2, 0, 7, "group 0, batch row 2 (padding), column 0: expected 0, got 7 (R10.3)"),
    ],
)
def test_a_wrong_table_entry_is_named(expected: ExpectedStep, row: int, column: int, got: int, said: str) -> None:
    table = np.zeros((3, 4), np.int32)
    table[:2, :2] = expected.block_tables[0]
    assert compare_block_table(expected, 0, table) == (0, [])
    table[row, column] = got
    count, (named,) = compare_block_table(expected, 0, table)
    assert (count, named) == (1, said)


@pytest.mark.parametrize("filler", [-1, 12])
def test_padding_holds_the_filler(expected: ExpectedStep, filler: int) -> None:
    """Rules: R5, R10.1, R10.3."""
    other = dataclasses.replace(expected, fillers=(filler,))
    table = np.full((3, 4), filler, np.int32)
    table[:2, :2] = expected.block_tables[0]
    assert compare_block_table(other, 0, table) == (0, [])
    table[2, 3] = table[0, 2] = 0
    count, named = compare_block_table(other, 0, table)
    assert count == 2
    said = [entry.split(": ")[1] for entry in named]
    assert said == [f"expected {filler}, got 0 ({rules})" for rules in ("R10.1, R11", "R10.3")]


def test_wrong_shapes_are_named(expected: ExpectedStep) -> None:
    assert compare_block_table(expected, 0, np.zeros((2, 4), np.int32))[0] == 1
    assert compare_block_table(expected, 0, np.zeros((3, 5), np.int32))[0] == 1
    assert compare_slots(expected, 0, np.zeros(4, np.int64))[0] == 1
