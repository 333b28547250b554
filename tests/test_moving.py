"""The walk-throughs of docs/integrating.md for engines that move onto a table, each driven by a random schedule.

Every token is written to the slot that it was given; then each request must find its tokens through its block table.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blocktable as bt

PAGE = Path(__file__).parents[1] / "docs/integrating.md"
SIZES = (4, 8)
NUM_BLOCKS = 400
CONFIG = bt.BlockTableConfig(
    groups=[bt.KVCacheGroup(block_size=size, num_blocks=NUM_BLOCKS) for size in SIZES],
    max_num_reqs=8,
    max_num_batched_tokens=64,
    max_model_len=48,
)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the page's code defines."""
    found = re.findall(r"<!-- moving -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(found) == 3
    defined: dict[str, Any] = {"__name__": "page"}
    for code in found:
        exec(compile(code, str(PAGE), "exec"), defined)
    return defined


class Engine:
    """Requests that grow by a token a step, their blocks, and a cache of what was written to each slot."""

    def __init__(self, sizes: Sequence[int], chance: random.Random) -> None:
        self.sizes, self.chance = sizes, chance
        self.free = [list(range(1, NUM_BLOCKS)) for _ in sizes]
        self.blocks: dict[str, list[list[int]]] = {}
        self.length: dict[str, int] = {}
        self.cells: list[dict[int, tuple[str, int]]] = [{} for _ in sizes]
        self.made = 0

    def take(self, request: str, num_tokens: int) -> list[list[int]]:
        """Return the blocks that a request needs now to hold so many tokens."""
        new = []
        for group, size in enumerate(self.sizes):
            held = self.blocks[request][group]
            taken = [self.free[group].pop(0) for _ in range(-(-num_tokens // size) - len(held))]
            held += taken
            new.append(taken)
        return new

    def begin(self) -> tuple[str, list[list[int]]]:
        request, self.made = f"request {self.made}", self.made + 1
        self.blocks[request], self.length[request] = [[] for _ in self.sizes], 0
        return request, self.take(request, self.chance.randint(1, 9))

    def end(self, request: str) -> None:
        for group, held in enumerate(self.blocks.pop(request)):
            self.free[group] += held
            self.cells[group] = {slot: tag for slot, tag in self.cells[group].items() if tag[0] != request}
        del self.length[request]

    def write(self, tokens: list[tuple[str, int]], slots: Sequence[Any]) -> None:
        for group, array in enumerate(slots):
            assert (array[len(tokens) :] == bt.PAD_SLOT_ID).all()
            for tag, slot in zip(tokens, array[: len(tokens)].tolist(), strict=True):
                assert slot not in self.cells[group] or self.cells[group][slot] == tag
                self.cells[group][slot] = tag

    def check(self, batch: Sequence[str], tables: Sequence[Any]) -> None:
        for group, size in enumerate(self.sizes):
            for request, row in zip(batch, tables[group].tolist(), strict=False):
                for position in range(self.length[request]):
                    slot = row[position // size] * size + position % size
                    assert self.cells[group][slot] == (request, position)


def plan(engine: Engine, batch: Sequence[str]) -> tuple[list[tuple[str, int]], np.ndarray[Any, Any]]:
    """Return the tokens of a step, all that a request has no slot for yet, and query_start_loc."""
    tokens, starts = [], [0]
    for request in batch:
        first = engine.length[request]
        last = min(first + engine.chance.randint(1, 3), engine.sizes[0] * len(engine.blocks[request][0]))
        tokens += [(request, position) for position in range(first, max(last, first))]
        engine.length[request] = max(last, first)
        starts.append(len(tokens))
    return tokens, np.array(starts, np.int32)


@pytest.mark.parametrize("seed", range(5))
def test_rows_in_batch_order(names: dict[str, Any], seed: int) -> None:
    chance = random.Random(seed)
    engine, batch = Engine(SIZES, chance), names["DenseBatch"](CONFIG, "numpy")
    for _ in range(40):
        finished = {request for request in batch.requests if chance.random() < 0.2}
        batch.finish(finished)
        for request in finished:
            engine.end(request)
        while len(batch.requests) < 8 and chance.random() < 0.7:
            batch.add(*engine.begin())
        tokens, starts = plan(engine, batch.requests)
        step = batch.step(starts, np.array([position for _, position in tokens], np.int64), 8)
        engine.write(tokens, step.slot_mappings)
        engine.check(batch.requests, step.block_tables)
        for row in range(len(batch.requests), 8):
            assert not any(table[row].any() for table in step.block_tables)


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_stay(names: dict[str, Any], seed: int) -> None:
    chance = random.Random(seed)
    config = replace(CONFIG, max_model_len=400)
    engine, stable = Engine(SIZES, chance), names["StableBatch"](config, "numpy")
    for _ in range(40):
        for request in [request for request in stable.blocks if chance.random() < 0.2]:
            stable.finish(request)
            engine.end(request)
        while stable.requests.num_free_rows and chance.random() < 0.7:
            stable.add(*engine.begin())
        new = {request: engine.take(request, engine.length[request] + 3) for request in stable.blocks}
        batch = chance.sample(list(stable.blocks), chance.randint(0, len(stable.blocks)))
        tokens, starts = plan(engine, batch)
        positions = np.array([position for _, position in tokens], np.int64)
        step = stable.step(batch, {request: ids for request, ids in new.items() if any(ids)}, starts, positions)
        engine.write(tokens, step.slot_mappings)
        engine.check(batch, step.block_tables)


@pytest.mark.parametrize("seed", range(5))
def test_a_slot_for_every_token(names: dict[str, Any], seed: int) -> None:
    chance = random.Random(seed)
    table = names["TokenTable"](NUM_BLOCKS, 8, 48, "numpy")
    free = list(range(1, NUM_BLOCKS))
    held: dict[int, list[int]] = {}
    shared: list[int] = []  # what the prefix tree holds: the slots of the first request's prompt
    for _ in range(40):
        for row in [row for row in held if chance.random() < 0.15]:
            free += [slot for slot in held.pop(row) if slot not in shared]
            table.keep(row, 0)
        for row in range(8):
            if row not in held and chance.random() < 0.5:
                held[row] = shared[: chance.randint(0, len(shared))]
                table.begin(row, held[row])
        rows = [row for row in held if len(held[row]) < 40 and chance.random() < 0.8]
        counts = [chance.randint(0, 3) for _ in rows]
        slots = [[free.pop(0) for _ in range(count)] for count in counts]
        starts: list[int] = [0]
        positions: list[int] = []
        for row, taken in zip(rows, slots, strict=True):
            positions += range(len(held[row]), len(held[row]) + len(taken))
            held[row] = held[row] + taken
            starts.append(len(positions))
        flat = [slot for taken in slots for slot in taken]
        table.extend(rows, np.array(flat, np.int32), counts)
        where, of_each = table.step(rows, np.array(starts, np.int32), np.array(positions, np.int64))
        assert where[: len(flat)].tolist() == flat
        for row, found in zip(rows, of_each.tolist(), strict=True):
            assert found[: len(held[row])] == held[row]
        if not shared and held:
            shared = list(next(iter(held.values())))
        rejected = [row for row in rows if chance.random() < 0.3 and len(held[row]) > len(shared)]
        for row in rejected:  # the last token
            free.append(held[row].pop())
            table.keep(row, len(held[row]))
