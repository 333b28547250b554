"""What is measured: sizes, and the inputs of every step, made before the clock starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

import blocktable as bt

IntArray = np.ndarray[Any, Any]

MAX_TURNS = 16
MAX_BLOCK_ID = 1 << 20
MILLION_16 = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step, repeated: some rows get a block, the batch is gathered, every token gets its slot.

    Attributes:
        name: of the workload.
        num_reqs: requests in the batch; the batch is a random permutation of the table's first rows.
        num_groups: KV cache groups.
        max_model_len: tokens.
        share: part of the requests that gets one block in each step.
        tokens_per_req: tokens of each request in a step.
        filled: blocks that each row holds before the first step.
        block_size: tokens.
        world_size: context-parallel ranks; the table is that of the last one.
        max_num_reqs: rows of the table. None: `num_reqs`.
        max_num_batched_tokens: entries of a slot buffer; raised to the step's tokens where those are more.
        rows_ascend: whether the rows of one append are in order.
        rolls_back: whether what a step appended is taken away again after it (every draft was rejected).
    """

    name: str
    num_reqs: int
    num_groups: int = 1
    max_model_len: int = 32768
    share: float = 1 / 16
    tokens_per_req: int = 1
    filled: int = 250
    block_size: int = 16
    world_size: int = 1
    max_num_reqs: int | None = None
    max_num_batched_tokens: int = 8192
    rows_ascend: bool = True
    rolls_back: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of a step."""
        return self.num_reqs * self.tokens_per_req

    @property
    def num_slots(self) -> int:
        """Entries of a slot buffer."""
        return max(self.max_num_batched_tokens, self.num_tokens)

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return self.max_num_reqs or self.num_reqs

    @property
    def row_blocks(self) -> int:
        """Blocks that a row may hold."""
        return -(-self.max_model_len // (self.block_size * self.world_size))

    @property
    def num_appended(self) -> int:
        """Requests that get a block in one step; at least one, except with a share of 0."""
        return max(1, round(self.num_reqs * self.share)) if self.share else 0

    @property
    def num_turns(self) -> int:
        """Different steps; they come round in turn, so that every row grows alike."""
        return min(MAX_TURNS, self.num_reqs // self.num_appended) if self.num_appended else 1

    @property
    def max_steps(self) -> int:
        """Steps until the first row is full."""
        if self.rolls_back or not self.num_appended:
            return 1 << 30
        return self.num_turns * (self.row_blocks - self.filled)

    def config(self, steps_in_flight: int = 2) -> bt.BlockTableConfig:
        """Return the table's configuration."""
        return bt.BlockTableConfig(
            groups=[bt.KVCacheGroup(block_size=self.block_size)] * self.num_groups,
            max_num_reqs=self.num_rows,
            max_num_batched_tokens=self.num_slots,
            max_model_len=self.max_model_len,
            context_parallel=bt.ContextParallel(world_size=self.world_size, rank=self.world_size - 1),
            steps_in_flight=steps_in_flight,
        )


class Turn(NamedTuple):
    """What one step appends, in both forms.

    Attributes:
        rows: [n] int64. Rows of the table.
        ids: [n] int32 for each group. One new block for each of them.
        counts: [n] int64. Ones.
        kept: [n] int64. Blocks to truncate to where the workload rolls back.
        requests: (row, a list of ids for each group), as an engine's scheduler hands them over.
    """

    rows: IntArray
    ids: list[IntArray]
    counts: IntArray
    kept: IntArray
    requests: list[tuple[int, tuple[list[int], ...]]]


class Inputs(NamedTuple):
    """Everything that steps of a workload need; host arrays.

    Attributes:
        workload: what they are for.
        fill: [num_reqs * filled] int32 for each group. First contents of the rows.
        idx_mapping: [num_reqs] int32.
        query_start_loc: [num_reqs + 1] int32.
        positions: [num_tokens] int64.
        turns: the steps, in turn.
    """

    workload: Workload
    fill: list[IntArray]
    idx_mapping: IntArray
    query_start_loc: IntArray
    positions: IntArray
    turns: list[Turn]


def make_inputs(workload: Workload) -> Inputs:
    """Return the inputs of a workload; the same ones every time."""
    random = np.random.default_rng(0)
    num_reqs = workload.num_reqs
    fill = [_ids(random, num_reqs * workload.filled) for _ in range(workload.num_groups)]
    idx_mapping = random.permutation(num_reqs).astype(np.int32)
    order = random.permutation(num_reqs)
    turns = []
    for turn in range(workload.num_turns):
        rows = order[turn * workload.num_appended : (turn + 1) * workload.num_appended]
        turns.append(_turn(workload, np.sort(rows) if workload.rows_ascend else rows, random))
    starts = np.arange(num_reqs + 1, dtype=np.int32) * np.int32(workload.tokens_per_req)
    return Inputs(workload, fill, idx_mapping, starts, _positions(workload), turns)


def _turn(workload: Workload, rows: IntArray, random: np.random.Generator) -> Turn:
    ids = [_ids(random, rows.size) for _ in range(workload.num_groups)]
    lists = [array.tolist() for array in ids]
    requests = [(row, tuple([group[index]] for group in lists)) for index, row in enumerate(rows.tolist())]
    return Turn(rows.astype(np.int64), ids, np.ones(rows.size, np.int64), np.full(rows.size, workload.filled), requests)


def _ids(random: np.random.Generator, size: int) -> IntArray:
    return random.integers(1, MAX_BLOCK_ID, size, dtype=np.int32)


def _positions(workload: Workload) -> IntArray:
    """Return each request's last tokens, requests at different places of a block; from 0 again where rows are short."""
    held = workload.filled * workload.block_size * workload.world_size
    starts = held - workload.tokens_per_req - np.arange(workload.num_reqs) % workload.block_size
    positions = (np.maximum(starts, 0)[:, None] + np.arange(workload.tokens_per_req)) % held
    return positions.ravel().astype(np.int64)


def step_workloads() -> list[Workload]:
    """Return the whole steps: the four of DESIGN's table, context parallelism, speculation, and rows in any order."""
    long = 131072
    return [
        Workload(name="256 requests, 1 group, 32k, 1/16", num_reqs=256),
        Workload(name="256 requests, 8 groups, 128k, 1/16", num_reqs=256, num_groups=8, max_model_len=long),
        Workload(name="1024 requests, 1 group, 128k, 1/16", num_reqs=1024, max_model_len=long),
        Workload(
            name="256 requests, 8 groups, 128k, all append", num_reqs=256, num_groups=8, max_model_len=long, share=1
        ),
        Workload(
            name="256 requests, 8 groups, 128k, 1/16, rows in any order",
            num_reqs=256,
            num_groups=8,
            max_model_len=long,
            rows_ascend=False,
        ),
        Workload(
            name="256 requests, 1 group, 128k, 1/64, DCP 4",
            num_reqs=256,
            max_model_len=long,
            share=1 / 64,
            world_size=4,
        ),
        Workload(
            name="256 requests, 1 group, 128k, 1/4, 4 tokens each, rolled back",
            num_reqs=256,
            max_model_len=long,
            share=1 / 4,
            tokens_per_req=4,
            rolls_back=True,
        ),
    ]


def slot_workloads() -> list[Workload]:
    """Return the batches of the slot kernel alone."""
    long = 131072
    return [
        Workload(name="decode 256 x 1", num_reqs=256, max_model_len=long),
        Workload(name="prefill 1 x 8192", num_reqs=1, tokens_per_req=8192, filled=512, max_model_len=long),
        Workload(name="prefill 1 x 65536", num_reqs=1, tokens_per_req=65536, filled=4096, max_model_len=long),
        Workload(name="256 x 4, 8 groups", num_reqs=256, tokens_per_req=4, num_groups=8, max_model_len=long),
    ]


def bandwidth_workloads() -> list[Workload]:
    """Return 16 million tokens in few, some and many requests."""
    return [
        Workload(
            name=f"{num_reqs} requests",
            num_reqs=num_reqs,
            tokens_per_req=MILLION_16 // num_reqs,
            filled=MILLION_16 // num_reqs // 16,
            max_model_len=MILLION_16 // num_reqs + 16,
            share=0,
        )
        for num_reqs in (1, 2048, 65536)
    ]


SWEEP_BASE = Workload(name="base", num_reqs=256, max_model_len=32768, filled=100)

SWEEPS: dict[str, list[tuple[float, dict[str, Any]]]] = {
    "requests": [(n, {"num_reqs": n}) for n in (1, 16, 64, 256, 1024, 8192)],
    "max_num_reqs": [(n, {"max_num_reqs": n}) for n in (256, 512, 1024, 4096, 16384)],
    "tokens": [
        (n, {"num_reqs": min(n, 256), "tokens_per_req": max(1, n // 256)})
        for n in (1, 256, 8192, 1 << 17, 1 << 20, 1 << 24)
    ],
    "groups": [(n, {"num_groups": n}) for n in (1, 2, 4, 8, 16, 64)],
    "width": [(n, {"max_model_len": 16 * n}) for n in (128, 512, 2048, 8192, 32768, 131072)],
    "share of rows changed": [(share, {"share": share}) for share in (0, 1 / 64, 1 / 16, 1 / 4, 1 / 2, 1)],
}
"""axis -> points: the value, and what it changes in the base point."""


def sweep_workload(axis: str, changes: dict[str, Any]) -> Workload:
    """Return one point of a sweep."""
    return replace(SWEEP_BASE, name=axis, **changes)


def shrink(workload: Workload) -> Workload:
    """Return a small copy for a smoke test: emulated kernels take milliseconds for what takes microseconds."""
    num_reqs = min(workload.num_reqs, 8)
    filled = min(workload.filled, 6)
    return replace(
        workload,
        num_reqs=num_reqs,
        num_groups=min(workload.num_groups, 2),
        max_num_reqs=None if workload.max_num_reqs is None else min(workload.max_num_reqs, 16),
        tokens_per_req=min(workload.tokens_per_req, 64 // num_reqs),
        max_model_len=16 * 64 * workload.world_size,
        max_num_batched_tokens=64,
        filled=filled,
    )
