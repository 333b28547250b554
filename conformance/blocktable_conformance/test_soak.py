"""Random steps on a GPU for as long as asked (`--soak SECONDS`), compared there, one mismatch counter read at the end.

The expectation is a third statement of R10-R15, over torch tensors, and a host model of the rows in plain numpy.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import pytest

from blocktable import BlockTable, BlockTableConfig, ContextParallel, KVCacheGroup
from blocktable_conformance.asserts import check
from blocktable_conformance.gpu import as_tensor, need
from blocktable_conformance.subject import Subject

MAX_ROWS, MAX_TOKENS, MAX_LEN = 48, 512, 640

CONFIGS = (
    BlockTableConfig(
        groups=[
            KVCacheGroup(block_size=16),
            KVCacheGroup(block_size=48, kernel_block_size=16, sliding_window=100),
            KVCacheGroup(block_size=3, null_is_pad=True, allow_null=True),
        ],
        max_num_reqs=MAX_ROWS,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=MAX_LEN,
    ),
    BlockTableConfig(
        groups=[
            KVCacheGroup(block_size=32, kernel_block_size=8),
            KVCacheGroup(block_size=16, sliding_window=64),
            KVCacheGroup(block_size=8, slot_mode="ring", blocks_per_row=5),
        ],
        max_num_reqs=MAX_ROWS,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=MAX_LEN,
        context_parallel=ContextParallel(world_size=3, rank=1, interleave_size=4),
    ),
)


class Model:
    """The rows on the host: [rows, columns] of kernel ids for each group, and what is filled."""

    def __init__(self, config: BlockTableConfig) -> None:
        self.config = config
        self.width = max(config.width(group) for group in range(len(config.groups)))
        self.tables = np.zeros((len(config.groups), config.max_num_reqs, self.width), np.int64)
        self.filled = np.zeros((len(config.groups), config.max_num_reqs), np.int64)

    def set(self, group: int, row: int, start: int, ids: np.ndarray[Any, Any]) -> None:
        """Put manager ids after the first `start` blocks of a row, and nothing after them."""
        size = self.config.groups[group].block_size
        k = size // (self.config.groups[group].kernel_block_size or size)
        columns = (ids[:, None] * k + np.arange(k)).ravel()
        end = start * k + columns.size
        self.tables[group, row, start * k : end] = columns
        self.tables[group, row, end:] = 0
        self.filled[group, row] = end


class Driver:
    """Random row operations, on the table and on the model."""

    def __init__(self, table: BlockTable, model: Model, seed: int) -> None:
        self.table, self.model = table, model
        self.rng = np.random.default_rng(seed)
        self.blocks = np.zeros(model.filled.shape, np.int64)

    def change(self) -> None:
        """Do one operation on a few rows."""
        rows = self.rng.permutation(MAX_ROWS)[: self.rng.integers(1, 5)]
        kind = self.rng.integers(0, 10)
        if kind < 6:
            self._extend(rows, replace=kind == 0)
        elif kind < 8:
            kept = self.rng.integers(0, 6, rows.size)
            self.table.truncate_rows(rows, kept)
            for group in range(len(self.blocks)):
                for row, count in zip(rows, np.minimum(self.blocks[group, rows], kept), strict=True):
                    self._set(group, row, int(count), np.empty(0, np.int64))
        elif rows.size > 1:
            self.table.swap_rows(int(rows[0]), int(rows[1]))
            for array in (self.model.tables, self.model.filled, self.blocks):
                array[:, rows[:2]] = array[:, rows[1::-1]]

    def _extend(self, rows: np.ndarray[Any, Any], *, replace: bool) -> None:
        ids, counts = [], []
        for group in range(len(self.blocks)):
            room = self.table.config.capacity(group) - (0 if replace else self.blocks[group, rows])
            counts.append(np.minimum(self.rng.integers(0, 4, rows.size), room))
            ids.append(self.rng.integers(1, 2**20, counts[-1].sum()))
        (self.table.set_rows if replace else self.table.append_rows)(rows, ids, counts)
        for group, (flat, count) in enumerate(zip(ids, counts, strict=True)):
            if replace or flat.size:  # nothing for a group leaves it in an append, and clears it in a set
                for row, part in zip(rows, np.split(flat, np.cumsum(count)[:-1]), strict=True):
                    self._set(group, row, 0 if replace else int(self.blocks[group, row]), part)

    def _set(self, group: int, row: int, start: int, ids: np.ndarray[Any, Any]) -> None:
        self.model.set(group, row, start, ids)
        self.blocks[group, row] = start + ids.size


class Batch(NamedTuple):
    """The inputs of one step on the device, and its sizes on the host."""

    idx: Any
    starts: Any
    positions: Any
    computed: Any
    num_reqs: int
    num_reqs_padded: int


class Inputs:
    """What a step and its expectation read, at fixed places on the device, so that the expectation can be a graph.

    One copy brings a step's random numbers and the whole model. It is from pageable memory: the host need not wait.

    Attributes:
        tables, filled: the model, as in `Model`.
        idx: [MAX_ROWS] int32. -1 after the batch.
        starts: [MAX_ROWS + 1] int32. The number of tokens after the batch.
        positions: [MAX_TOKENS] int64.
        computed: [MAX_ROWS] int32.
    """

    def __init__(self, torch: Any, model: Model) -> None:
        parts = (model.tables, model.filled, np.empty(MAX_TOKENS), np.empty(3 * MAX_ROWS + 1))
        ends = np.cumsum([part.size for part in parts])
        self._host = np.zeros(ends[-1], np.int64)
        self._device = torch.zeros(self._host.shape, dtype=torch.int64, device="cuda")
        self._small = torch.zeros(3 * MAX_ROWS + 1, dtype=torch.int32, device="cuda")
        self._source = torch.from_numpy(self._host)
        host = np.split(self._host, ends[:-1])
        tables, filled, self.positions, self._wide = torch.split(self._device, [part.size for part in parts])
        self.tables, self.filled = tables.view(model.tables.shape), filled.view(model.filled.shape)
        self.idx, self.starts, self.computed = torch.split(self._small, [MAX_ROWS, MAX_ROWS + 1, MAX_ROWS])
        # The model lives here from now on.
        for part, name in zip(host, ("tables", "filled"), strict=False):
            view = part.reshape(getattr(model, name).shape)
            view[:] = getattr(model, name)
            setattr(model, name, view)
        self._positions = host[2]
        self._idx, self._starts, self._computed = np.split(host[3], [MAX_ROWS, 2 * MAX_ROWS + 1])

    def draw(self, rng: np.random.Generator) -> Batch:
        """Draw a batch with padding entries, empty requests and wild positions, and send it with the model."""
        num_reqs = int(rng.integers(0, MAX_ROWS + 1))
        lengths = rng.integers(0, MAX_TOKENS // max(num_reqs, 1) + 1, num_reqs)
        tokens = int(lengths.sum())
        self._idx[:num_reqs] = rng.integers(-1, MAX_ROWS, num_reqs)
        self._idx[num_reqs:] = -1
        self._starts[1 : num_reqs + 1] = np.cumsum(lengths)
        self._starts[num_reqs + 1 :] = tokens
        self._positions[:tokens] = rng.integers(-3, MAX_LEN + 40, tokens)
        if rng.integers(0, 20) == 0:
            self._positions[:tokens] *= 2**33
        self._computed[:num_reqs] = rng.integers(0, MAX_LEN, num_reqs)
        self._device.copy_(self._source)
        self._small.copy_(self._wide)
        return Batch(
            self.idx[:num_reqs],
            self.starts[: num_reqs + 1],
            self.positions[:tokens],
            self.computed[:num_reqs],
            num_reqs,
            int(rng.integers(num_reqs, MAX_ROWS + 1)),
        )


def expectation(torch: Any, config: BlockTableConfig, inputs: Inputs) -> list[tuple[Any, Any]]:
    """Return what R10-R15 say each group's batch table and slots are, whole buffers, on the device."""
    token = torch.arange(MAX_TOKENS, device="cuda")
    nobody = torch.full((1,), -1, dtype=torch.int64, device="cuda")
    idx = torch.cat((inputs.idx.long(), nobody))
    request = torch.searchsorted(inputs.starts[1:].contiguous(), token.int(), right=True)
    row_of_token = idx[request]
    last_token = (inputs.starts[1:].long() - 1).clamp(min=0)
    column = torch.arange(inputs.tables.shape[2], device="cuda")
    share = config.context_parallel
    found = []
    for g, group in enumerate(config.groups):
        size = group.kernel_block_size or group.block_size
        sharded = group.is_sharded and share.world_size > 1
        held = torch.where(idx >= 0, inputs.filled[g][idx], 0)
        # R10, R11: the batch table
        shown = column < held[:MAX_ROWS, None]
        if group.sliding_window is not None:
            low = (inputs.computed.long() - group.sliding_window + 1).clamp(min=0)
            passed = (share.local_lengths(low) if sharded else low) // size
            shown &= column >= passed[:, None]
        table = torch.where(shown, inputs.tables[g][idx[:MAX_ROWS]], 0)[:, : config.width(g)]
        # R12-R15: the slots
        p = inputs.positions
        valid = (row_of_token >= 0) & (p >= 0)
        local = p.clamp(min=0)
        if sharded:
            turn = local // share.interleave_size
            valid &= turn % share.world_size == share.rank
            local = turn // share.world_size * share.interleave_size + local % share.interleave_size
        held_by_token = held[request]
        if group.slot_mode == "ring":
            turn_of_ring = held_by_token * size
            # R14: the request's last token says what has been overwritten.
            valid &= p > p[last_token[request.clamp(max=MAX_ROWS - 1)]] - turn_of_ring
            local = local % turn_of_ring.clamp(min=1)
        place = local // size
        valid &= place < held_by_token
        block = inputs.tables[g][row_of_token, place.clamp(max=column.numel() - 1)]
        if group.null_is_pad:
            valid &= block >= group.block_size // size
        found.append((table, torch.where(valid, block * size + local % size, -1)))
    return found


def outputs_of(torch: Any, table: BlockTable) -> list[tuple[Any, Any]]:
    """Return the table's own buffers as tensors, made once: their addresses never change."""
    buffers = table.buffers
    return [
        (as_tensor(torch, rows), as_tensor(torch, slots))
        for rows, slots in zip(buffers.block_tables, buffers.slot_mappings, strict=True)
    ]


def count_mismatches(torch: Any, expected: list[tuple[Any, Any]], outputs: list[tuple[Any, Any]]) -> Any:
    """Return how many entries differ, on the device."""
    return torch.stack(
        [
            (got != wanted).sum()
            for pairs in zip(outputs, expected, strict=True)
            for got, wanted in zip(*pairs, strict=True)
        ]
    ).sum()


def capture_check(torch: Any, config: BlockTableConfig, inputs: Inputs, outputs: Any, mismatches: Any) -> Any:
    """Return a graph that adds to `mismatches` what is wrong in `outputs`."""

    def add() -> None:
        mismatches.add_(count_mismatches(torch, expectation(torch, config, inputs), outputs))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        add()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        add()
    mismatches.zero_()
    return graph


@pytest.mark.parametrize("index", range(len(CONFIGS)))
def test_random_steps(subject: Subject, index: int, request: pytest.FixtureRequest, record_property: Any) -> None:
    """Rules: R4, R5, R9.1, R10.1, R10.2, R10.3, R10.6, R11, R12, R13, R14, R15."""
    torch = need(subject, "streams")
    config = CONFIGS[index]
    table, model = BlockTable(config, subject.backend, step_path=subject.step_path), Model(config)  # type: ignore[arg-type]
    driver = Driver(table, model, index)
    inputs = Inputs(torch, model)
    mismatches = torch.zeros((), dtype=torch.int64, device="cuda")
    outputs = outputs_of(torch, table)
    check_step = capture_check(torch, config, inputs, outputs, mismatches)

    # The checker must be able to see: one wrong entry of each output is counted.
    inputs.draw(driver.rng)
    for pair in outputs:
        for output in pair:
            output[-1:] += 1
    check_step.replay()
    seen = int(mismatches)
    wrong = sum(output[-1:].numel() for pair in outputs for output in pair)
    check(seen == wrong, "R10.1, R12", f"{wrong} planted faults and nothing else must be counted, got {seen}.")
    for pair in outputs:
        for output in pair:
            output[-1:] -= 1
    mismatches.zero_()

    deadline = time.monotonic() + request.config.getoption("--soak") / len(CONFIGS)
    steps = 0
    while steps < 10 or time.monotonic() < deadline:
        for _ in range(3):
            driver.change()
        batch = inputs.draw(driver.rng)
        table.step(
            batch.idx,
            batch.starts,
            batch.positions,
            num_reqs_padded=batch.num_reqs_padded,
            num_computed_tokens=batch.computed,
        )
        check_step.replay()
        steps += 1
    found = int(mismatches)
    record_property("steps", steps)
    print(f"\n{subject.label}-{subject.step_path}: {steps} random steps, {found} mismatches")  # noqa: T201
    check(found == 0, "R10.1, R12", f"{found} entries are wrong over {steps} random steps.")
    table.verify()


def test_an_arena_beyond_32_bits(subject: Subject) -> None:
    """More than 2**31 entries: a row at their end is gathered and mapped. Rules: R10.1, R12."""
    torch = need(subject, "streams")
    rows, columns = 16_512, 131_072
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GB of free device memory")
    config = BlockTableConfig(
        groups=[KVCacheGroup(block_size=16)],
        max_num_reqs=rows,
        max_num_batched_tokens=64,
        max_model_len=16 * columns,
    )
    check(config.arena.size > 2**31, "R3", f"the arena has {config.arena.size} entries.")
    table = BlockTable(config, subject.backend, step_path=subject.step_path)  # type: ignore[arg-type]
    table.set_rows([0, rows - 1], np.arange(1, columns + 4), [3, columns])
    idx, starts, positions = (
        torch.tensor(values, dtype=dtype, device="cuda")
        for values, dtype in (
            ([rows - 1, 0], torch.int32),
            ([0, 2, 3], torch.int32),
            ([16 * columns - 1, 5, 47], torch.int64),
        )
    )
    step = table.step(idx, starts, positions, num_reqs_padded=2)
    got = subject.to_host(table.buffers.slot_mappings[0])[:4].tolist()
    check(got == [16 * (columns + 3) + 15, 16 * 4 + 5, 3 * 16 + 15, -1], "R12", f"slots of the last row are {got}.")
    batch = as_tensor(torch, step.block_tables[0])
    check(
        bool((batch[0] == torch.arange(4, columns + 4, device="cuda")).all()),
        "R10.1",
        "the last row is gathered wrong.",
    )
