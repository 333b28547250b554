"""The parts of the schedule: allocator, row layouts, arrivals, budget, preemption, drafts."""

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable_replay.layout import NO_ROW, DenseRows, StableRows
from blocktable_replay.options import ReplayOptions
from blocktable_replay.plan import StepPlan
from blocktable_replay.pool import NO_OWNER, BlockPool
from blocktable_replay.record import NULLED
from blocktable_replay.sampling import ACCEPTANCE, uniform
from blocktable_replay.schedule import Scheduler
from blocktable_replay.traces import Trace


class PlainPool:
    """The allocator as one would write it first: a list of free blocks in the order they were freed."""

    def __init__(self, num_blocks: int, null_block_id: int) -> None:
        self.free_blocks = [block for block in range(num_blocks) if block != null_block_id]
        self.holders: Counter[int] = Counter()
        self.block_of: dict[int, int] = {}

    def take(self, count: int) -> list[int]:
        taken, self.free_blocks = self.free_blocks[:count], self.free_blocks[count:]
        self.holders.update(taken)
        self.block_of = {key: block for key, block in self.block_of.items() if block not in taken}
        return taken

    def share(self, blocks: list[int]) -> None:
        self.free_blocks = [block for block in self.free_blocks if block not in blocks]
        self.holders.update(blocks)

    def free(self, blocks: list[int]) -> None:
        self.holders.subtract(blocks)
        # One that loses two holders in one call stands where its last one stood.
        last = {block: place for place, block in enumerate(blocks)}
        self.free_blocks += sorted((block for block in last if not self.holders[block]), key=lambda block: last[block])

    def remember(self, keys: list[int], blocks: list[int]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            self.block_of.setdefault(key, block)


@pytest.mark.parametrize("seed", range(30))
def test_the_pool_is_the_plain_one(seed: int) -> None:
    chance = random.Random(seed)
    num_blocks = chance.choice((2, 9, 40))
    null_block_id = chance.choice((0, -1, num_blocks - 1))
    pool, plain = BlockPool(num_blocks, 50, null_block_id), PlainPool(num_blocks, null_block_id)
    next_key = 0
    for _ in range(400):
        held = [block for block, count in plain.holders.items() if count]
        action = chance.randrange(4)
        if action == 0:
            count = chance.randint(0, len(plain.free_blocks))
            assert pool.take(count, np.arange(count)).tolist() == plain.take(count)
        elif action == 1 and held:
            given = [block for block in held for _ in range(chance.randint(0, plain.holders[block]))]
            chance.shuffle(given)
            pool.free(np.array([*given, NULLED]))
            plain.free(given)
        elif action == 2 and held and next_key < 46:
            blocks = chance.sample(held, min(len(held), 4))
            # A block is filled once, so it gets one key at most; a key may be there already.
            blocks = [block for block in blocks if block not in plain.block_of.values()]
            keys = chance.sample(range(next_key + len(blocks)), len(blocks))
            pool.remember(np.array(keys, np.int64), np.array(blocks, np.int64))
            plain.remember(keys, blocks)
            next_key += len(blocks)
        else:
            found = sorted(set(plain.block_of.values()))
            shared = chance.sample(found, chance.randint(0, len(found)))
            assert pool.num_unheld(np.array([*shared, NULLED])) == sum(not plain.holders[block] for block in shared)
            pool.share(np.array([NULLED, *shared]))
            plain.share(shared)
        assert pool.num_free == len(plain.free_blocks)
        assert pool.references.tolist() == [plain.holders[block] for block in range(num_blocks)]
        assert pool.lookup(np.arange(50)).tolist() == [plain.block_of.get(key, NULLED) for key in range(50)]
    assert (pool.owners[pool.references == 0] == NO_OWNER).all()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", [StableRows, DenseRows])
def test_layouts_keep_every_request_where_they_say(kind: Any, seed: int) -> None:
    """The operations are done on a plain list of rows; the batch must find its requests there."""
    chance = random.Random(seed)
    layout = kind(12)
    rows: list[Any] = [None] * 12
    live: list[int] = []
    for _ in range(200):
        gone = chance.sample(live, chance.randint(0, min(4, len(live))))
        live = [handle for handle in live if handle not in gone]
        if gone:
            apply(rows, layout.release(np.array(gone)))
        free = [handle for handle in range(12) if handle not in live]
        come = chance.sample(free, chance.randint(0, min(3, len(free))))
        layout.place(np.array(come, np.int64))
        live += come
        handles = np.array(live, np.int64)
        is_prefill = np.array([chance.random() < 0.4 for _ in live], np.bool_)
        order, idx_mapping, operations = layout.arrange(handles, is_prefill)
        apply(rows, operations)
        for handle in come:
            assert rows[layout.row_of[handle]] is None
            rows[layout.row_of[handle]] = handle
        batch = handles[order]
        places = np.arange(len(live)) if idx_mapping is None else idx_mapping
        assert [rows[place] for place in places] == batch.tolist()
        assert sorted(row for row in rows if row is not None) == sorted(live)
        assert [handle for handle in range(12) if layout.row_of[handle] == NO_ROW] == sorted(set(range(12)) - set(live))
        if kind is DenseRows:
            assert is_prefill[order].tolist() == sorted(is_prefill.tolist())


def apply(rows: list[Any], operations: list[Any]) -> None:
    for name, arguments in operations:
        if name == "clear_rows":
            for row in arguments[0]:
                rows[row] = None
        else:
            first, second = arguments
            sources, targets = {
                "move_row": ([first], [second]),
                "swap_rows": ([first, second], [second, first]),
                "permute_rows": (first, second),
            }[name]
            moved = [rows[row] for row in sources]
            for row in sources:
                rows[row] = None
            for row, handle in zip(targets, moved, strict=True):
                rows[row] = handle


def trace_of(*requests: tuple[float, int, int]) -> Trace:
    """Requests of (arrival in ms, input length, output length)."""
    arrivals, inputs, outputs = zip(*requests, strict=True)
    return Trace(
        source="",
        format="",
        arrivals=np.array(arrivals, np.float64),
        input_lengths=np.array(inputs),
        output_lengths=np.array(outputs),
        lines=np.arange(len(requests)),
    )


def plans_of(trace: Trace, **options: Any) -> tuple[list[StepPlan], list[float], Scheduler]:
    scheduler = Scheduler(trace, ReplayOptions(max_model_len=4096, **options))
    plans, clocks = [], []
    while (plan := scheduler.next_step()) is not None:
        plans.append(plan)
        clocks.append(scheduler.clock_ms)
    return plans, clocks, scheduler


def tokens_of(plan: StepPlan) -> dict[int, list[int]]:
    """Request -> its positions in the step."""
    bounds = itertools.pairwise(plan.query_start_loc.tolist())
    return {
        int(request): plan.positions[start:stop].tolist()
        for request, (start, stop) in zip(plan.requests, bounds, strict=True)
    }


def test_arrivals_follow_the_clock_and_idle_time_is_skipped() -> None:
    plans, clocks, _ = plans_of(trace_of((0, 10, 3), (45, 5, 1), (9000, 5, 2)), step_ms=30.0)
    assert [list(tokens_of(plan)) for plan in plans] == [[0], [0], [0, 1], [2], [2], []]
    assert clocks == [30, 60, 90, 9030, 9060, 9090]
    plans, _, _ = plans_of(trace_of((0, 10, 3), (45, 5, 1), (9000, 5, 2)), all_at_once=True)
    assert list(tokens_of(plans[0])) == [0, 1, 2]


def test_prompts_are_chunked_by_the_budget_and_decodes_come_first() -> None:
    plans, _, scheduler = plans_of(trace_of((0, 20, 3), (0, 50, 2)), max_num_batched_tokens=32)
    seen = [tokens_of(plan) for plan in plans]
    assert seen[0] == {0: list(range(20)), 1: list(range(12))}
    assert seen[1] == {0: [20], 1: list(range(12, 43))}
    assert seen[2] == {0: [21], 1: list(range(43, 50))}
    assert seen[3] == {1: [50]}
    assert len(seen) == 5
    assert scheduler.counters.chunked_prefills == 2
    assert all(plan.positions.size <= 32 for plan in plans)


def test_the_youngest_is_thrown_out_and_computes_everything_again() -> None:
    group = bt.KVCacheGroup(block_size=4, num_blocks=8)  # 7 blocks, 28 tokens
    plans, _, scheduler = plans_of(trace_of((0, 12, 8), (0, 12, 8)), groups=(group,))
    counters = scheduler.counters
    assert (counters.preemptions, counters.resumes, counters.requests) == (1, 1, 2)
    seen = [tokens_of(plan) for plan in plans]
    (step,) = [step for step, tokens in enumerate(seen) if tokens.get(1, [0])[0] == 0 and step > 0 and 1 in tokens]
    assert seen[step][1] == list(range(len(seen[step][1])))
    assert len(seen[step][1]) > 12, "what it had generated is there to be computed again"
    assert [name for name, _ in plans[step].operations][-1] == "set_rows"
    for request in (0, 1):
        last = [tokens[request][-1] for tokens in seen if request in tokens][-1]
        assert last == 12 + 8 - 2, "the last generated token is never computed"


def test_a_request_that_asks_for_nothing_more_than_its_prompt() -> None:
    plans, _, scheduler = plans_of(trace_of((0, 5, 0), (0, 6, 1)))
    assert [tokens_of(plan) for plan in plans] == [{0: list(range(5)), 1: list(range(6))}, {}]
    assert scheduler.counters.requests == 2


def test_drafts_are_verified_and_rejected_ones_computed_again() -> None:
    plans, _, scheduler = plans_of(
        trace_of((0, 30, 60)), lookahead=4, groups=(bt.KVCacheGroup(block_size=2, num_blocks=90),)
    )
    ends = [tokens_of(plan)[0] for plan in plans[:-1]]
    assert ends[0] == list(range(30))
    for before, after in itertools.pairwise(ends[1:]):
        assert len(before) == 5
        assert before[0] < after[0] <= before[-1] + 1
    assert scheduler.counters.rollbacks > 0
    assert max(map(max, ends)) < 30 + 60 - 1 + 4


def test_acceptance_is_as_likely_as_it_says() -> None:
    chance = uniform(np.repeat(np.arange(200), 200), np.tile(np.arange(200), 200))
    assert 0 < chance.min() <= chance.max() < 1
    accepted = np.floor(np.log(chance) / np.log(ACCEPTANCE))
    for count in (1, 2, 3):
        assert float((accepted >= count).mean()) == pytest.approx(ACCEPTANCE**count, abs=0.01)
