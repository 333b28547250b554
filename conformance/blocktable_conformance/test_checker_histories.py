"""A small engine without bugs, in every way to serve: the checker finds nothing (R40)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from blocktable import BlockTable, BlockTableConfig, KVCacheGroup
from blocktable_conformance.asserts import check
from blocktable_conformance.cases import shard
from blocktable_conformance.subject import Subject

pytestmark = pytest.mark.host

NUM_BLOCKS, MAX_ROWS, MAX_TOKENS = 120, 6, 40
MAX_LEN = 60

LINEAR = KVCacheGroup(block_size=4, num_blocks=NUM_BLOCKS)
WIDE = KVCacheGroup(block_size=6, kernel_block_size=2, num_blocks=NUM_BLOCKS)
NO_NULL = KVCacheGroup(block_size=4, kernel_block_size=2, null_block_id=-1)
WINDOW = KVCacheGroup(block_size=4, num_blocks=NUM_BLOCKS, sliding_window=6)
RING = KVCacheGroup(block_size=4, num_blocks=NUM_BLOCKS, slot_mode="ring", blocks_per_row=2, sliding_window=5)
STATE = KVCacheGroup(block_size=4, num_blocks=NUM_BLOCKS, slot_mode="none", blocks_per_row=1)


def pooled(group: KVCacheGroup) -> KVCacheGroup:
    """Return a group whose ids are those of the one pool."""
    return KVCacheGroup(**{**vars(group), "pool": "kv"})


CONFIGS: dict[str, dict[str, Any]] = {
    "linear": {"groups": [LINEAR]},
    "wide": {"groups": [WIDE]},
    "no-null": {"groups": [NO_NULL]},
    "several": {"groups": [LINEAR, WIDE, STATE, RING]},
    "pool": {"groups": [pooled(group) for group in (LINEAR, LINEAR, RING, STATE)]},
    "window": {"groups": [WINDOW, LINEAR]},
    "window-kept": {"groups": [pooled(WINDOW), pooled(LINEAR)], "keeps_passed": True},
    "stale": {"groups": [LINEAR, WINDOW], "stale_rows": True, "keeps_passed": True},
    "rank-0": {"groups": [LINEAR, RING], "context_parallel": shard(3, 0, 2)},
    "rank-2": {"groups": [LINEAR, WIDE], "context_parallel": shard(3, 2, 2)},
}


@dataclass
class Request:
    """One request.

    Attributes:
        length: tokens written.
        own_from: positions from here on lie in blocks of its own, in every group.
        blocks: manager ids for each group; None: the block was released.
    """

    length: int = 0
    own_from: int = 0
    blocks: list[list[int | None]] = field(default_factory=list)


class RightEngine:
    """Requests that come, share prefixes, grow, fork, roll back, move and end; and their blocks, counted.

    Args:
        subject: the backend under test.
        seed: of what happens.
        keeps_passed: whether rows keep blocks that a window has passed, though they go to others.
        options: of the table's config.

    Attributes:
        mode: how the table is checked.
    """

    mode = "host"

    def __init__(self, subject: Subject, seed: int, *, keeps_passed: bool = False, **options: Any) -> None:
        self.config = BlockTableConfig(
            max_num_reqs=MAX_ROWS + 1, max_num_batched_tokens=MAX_TOKENS, max_model_len=MAX_LEN, **options
        )
        self.table: BlockTable = subject.table(self.config, check=self.mode)
        self.subject, self.random, self.keeps_passed = subject, random.Random(seed), keeps_passed
        self.requests: dict[int, Request] = {}
        pools = [group.pool or str(index) for index, group in enumerate(self.config.groups)]
        self.holders: list[dict[int, int]] = [{} for _ in pools]  # of each block, by the group's pool
        for index, pool in enumerate(pools):
            self.holders[index] = self.holders[pools.index(pool)]
        self.free: list[list[int]] = [list(range(1, NUM_BLOCKS)) for _ in pools]
        for index, pool in enumerate(pools):
            self.free[index] = self.free[pools.index(pool)]

    # Blocks.

    def take(self, group: int) -> int:
        """Take a free block, mostly one that was freed not long ago."""
        free = self.free[group]
        block = free.pop(-1 if self.random.random() < 0.7 else self.random.randrange(len(free)))
        self.holders[group][block] = 1
        return block

    def drop(self, group: int, block: int | None) -> None:
        """Let go of a block."""
        if block is None:
            return
        self.holders[group][block] -= 1
        if not self.holders[group][block]:
            self.free[group].append(block)

    def reach(self, group: int) -> int:
        """Return how many positions a block stands for."""
        shape = self.config.groups[group]
        return shape.block_size * (self.config.context_parallel.world_size if shape.is_sharded else 1)

    def needed(self, group: int, length: int) -> int:
        """Return how many blocks so many tokens need."""
        shape = self.config.groups[group]
        return shape.blocks_per_row or -(-length // self.reach(group))

    @property
    def linear(self) -> list[int]:
        """Groups whose blocks stand for positions."""
        return [index for index, shape in enumerate(self.config.groups) if shape.slot_mode == "linear"]

    # What happens.

    def admit(self) -> None:
        """Begin a request, perhaps with the full blocks of another one's prefix."""
        rows = [row for row in range(MAX_ROWS) if row not in self.requests]
        if not rows:
            return
        row, request = self.random.choice(rows), Request()
        request.blocks = [[] for _ in self.config.groups]
        donors = [other for other in self.requests.values() if other.length > 1]
        if donors and len(self.linear) == len(self.config.groups) and self.random.random() < 0.5:
            donor = self.random.choice(donors)
            span = max(self.reach(group) for group in self.linear)
            if all(span % self.reach(group) == 0 for group in self.linear):
                shared = self.random.randint(0, (donor.length - 1) // span) * span
                parts = [donor.blocks[group][: shared // self.reach(group)] for group in self.linear]
                if not any(None in part for part in parts):
                    donor.own_from = max(donor.own_from, shared)
                    request.length = request.own_from = shared
                    request.blocks = [list(part) for part in parts]
                    for group, part in enumerate(parts):
                        for block in part:
                            self.holders[group][block] += 1  # type: ignore[index]
        for group, blocks in enumerate(request.blocks):
            while len(blocks) < self.needed(group, request.length + 1):
                blocks.append(self.take(group))
        self.requests[row] = request
        self.table.set_row(row, request.blocks)  # type: ignore[arg-type]

    def fork(self) -> None:
        """Copy a row; what the copy will write gets blocks of its own."""
        rows = [row for row in range(MAX_ROWS) if row not in self.requests]
        if not rows or not self.requests:
            return
        src, dst = self.random.choice(list(self.requests)), self.random.choice(rows)
        parent = self.requests[src]
        child = Request(parent.length, 0, [list(blocks) for blocks in parent.blocks])
        self.table.copy_row(src, dst)
        for group, blocks in enumerate(child.blocks):
            first = parent.length // self.reach(group) if group in self.linear else 0
            for block in blocks[:first]:
                if block is not None:
                    self.holders[group][block] += 1
            fresh = [self.take(group) for _ in blocks[first:]]
            blocks[first:] = fresh
            self.table.replace_blocks(dst, group, first, fresh)
        full = [parent.length // self.reach(group) * self.reach(group) for group in self.linear]
        parent.own_from = child.own_from = max(full)
        self.requests[dst] = child

    def roll_back(self) -> None:
        """Forget the last tokens of a request."""
        if not self.requests:
            return
        row, request = self.random.choice(list(self.requests.items()))
        lowest = max(request.own_from, request.length - 5)
        passed = [len(blocks) for blocks in request.blocks]
        if lowest >= request.length or any(None in blocks for blocks in request.blocks):
            return
        request.length = self.random.randint(lowest, request.length - 1)
        kept = [min(had, self.needed(group, request.length + 1)) for group, had in enumerate(passed)]
        for group, blocks in enumerate(request.blocks):
            for block in blocks[kept[group] :]:
                self.drop(group, block)
            del blocks[kept[group] :]
        self.table.truncate_row(row, kept)

    def let_go(self, row: int, request: Request) -> None:
        """Free what a window has passed."""
        for group in self.linear:
            window = self.config.groups[group].sliding_window
            if window is None:
                continue
            passed = max(0, request.length - window) // self.reach(group)
            held = [index for index, block in enumerate(request.blocks[group][:passed]) if block is not None]
            for index in held:
                self.drop(group, request.blocks[group][index])
                request.blocks[group][index] = None
            if held and not self.keeps_passed:
                self.table.null_range(row, group, held[0], passed)

    def end(self) -> None:
        """End a request, or preempt it."""
        if not self.requests:
            return
        row = self.random.choice(list(self.requests))
        for group, blocks in enumerate(self.requests.pop(row).blocks):
            for block in blocks:
                self.drop(group, block)
        if not self.config.stale_rows:
            self.table.clear_row(row)

    def rearrange(self) -> None:
        """Move, swap or permute rows."""
        if self.config.stale_rows:
            return
        src = list(range(MAX_ROWS))
        dst = self.random.sample(src, MAX_ROWS)
        if self.random.random() < 0.5:
            a, b = dst[:2]
            self.table.swap_rows(a, b)
            dst = [b if row == a else a if row == b else row for row in src]
        else:
            self.table.permute_rows(src, dst)
        self.requests = {dst[row]: request for row, request in self.requests.items()}

    def step(self) -> None:
        """Write some tokens of some requests, whose blocks are appended; then a draft's, in a call of its own."""
        rows = self.random.sample(list(self.requests), self.random.randint(0, len(self.requests)))
        starts, positions, mapping = [0], list[int](), list[int]()
        for row in rows:
            request = self.requests[row]
            number = self.random.choice([0, 1, 1, 1, 3, 9])
            number = min(number, MAX_LEN - request.length, MAX_TOKENS - len(positions))
            more = []
            for group, blocks in enumerate(request.blocks):
                missing = self.needed(group, request.length + number) - len(blocks)
                more.append([self.take(group) for _ in range(missing)])
                blocks += more[-1]
            self.table.append_row(row, more)
            mapping.append(row)
            positions += range(request.length, request.length + number)
            starts.append(len(positions))
            request.length += number
        mapping.append(-1)
        starts.append(starts[-1])
        device = self.subject.device_array
        arrays = device(mapping, "int32"), device(starts, "int32"), device(positions, "int64")
        if self.random.random() < 0.5:
            self.table.step(*arrays)
        else:
            self.table.commit()
            self.table.gather(arrays[0])
            self.table.compute_slot_mappings(*arrays)
        if self.random.random() < 0.3:
            self.table.compute_slot_mappings(*arrays)
        for row in rows:
            self.let_go(row, self.requests[row])

    def run(self, num_steps: int) -> None:
        """Let things happen; nothing is ever found."""
        actions = [self.admit, self.admit, self.fork, self.roll_back, self.end, self.rearrange]
        for _ in range(num_steps):
            for action in self.random.sample(actions, 2):
                if all(len(free) > 40 for free in self.free) or action == self.end:
                    action()
            if not all(len(free) > 40 for free in self.free):
                self.end()
            self.step()
            check(not self.table.num_findings, "R40", f"the history is right: {self.table.findings}")


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_is_found_in_a_right_history(subject: Subject, name: str) -> None:
    """Prefixes are shared, rows forked with a copy, rolled back, preempted, moved; windows let blocks go.

    Rules: R39, R40.
    """
    for seed in range(2):
        engine = RightEngine(subject, seed, **CONFIGS[name])
        engine.run(40)
        engine.table.collect_findings()
        engine.table.verify()
