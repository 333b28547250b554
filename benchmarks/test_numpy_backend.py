"""The numpy backend: tokens a second, the gather of a batch, and a whole step.

Each benchmark's `extra_info` holds its tokens, so tokens a second are tokens / mean.
"""

import itertools

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import blocktable as bt
from blocktable_benchmarks.workloads import make_inputs, step_workloads


def make_table(context_parallel: bt.ContextParallel, num_reqs: int, num_tokens: int) -> bt.BlockTable:
    config = bt.BlockTableConfig(
        groups=[bt.KVCacheGroup(block_size=16)],
        max_num_reqs=num_reqs,
        max_num_batched_tokens=num_tokens,
        max_model_len=16384,
        context_parallel=context_parallel,
    )
    table = bt.BlockTable(config, backend="numpy")
    capacity = config.capacity(0)
    ids = np.arange(1, 1 + num_reqs * capacity, dtype=np.int32)
    table.set_rows(np.arange(num_reqs), [ids], np.full(num_reqs, capacity))
    table.commit()
    return table


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize(("num_reqs", "length"), [(1, 8192), (16, 512), (256, 1)])
def test_slot_mapping(benchmark: BenchmarkFixture, world_size: int, num_reqs: int, length: int) -> None:
    """Prefills of 8,192 tokens should reach 40 million tokens/s, and 20 million under context parallelism."""
    num_tokens = num_reqs * length
    table = make_table(bt.ContextParallel(world_size=world_size, rank=world_size - 1), num_reqs, num_tokens)
    idx_mapping = np.arange(num_reqs, dtype=np.int32)[::-1].copy()
    query_start_loc = np.arange(0, num_tokens + 1, length, dtype=np.int32)
    positions = np.tile(np.arange(length), num_reqs)
    benchmark.extra_info["tokens"] = num_tokens
    (slots,) = benchmark(table.compute_slot_mappings, idx_mapping, query_start_loc, positions)
    owned = (positions % world_size == world_size - 1).sum()
    assert (slots >= 0).sum() == owned


@pytest.mark.parametrize("num_reqs", [16, 256])
@pytest.mark.parametrize("is_permuted", [False, True])
def test_gather(benchmark: BenchmarkFixture, num_reqs: int, is_permuted: bool) -> None:
    """The same batch again costs little, since it shows the rows already; a permuted one is copied whole."""
    table = make_table(bt.ContextParallel(), num_reqs, num_reqs)
    batches = [np.arange(num_reqs, dtype=np.int32)[::step].copy() for step in (1, -1 if is_permuted else 1)]
    turns = itertools.cycle(batches)
    (batch,) = benchmark(lambda: table.gather(next(turns)))
    assert (np.sort(batch[:, 0]) == np.sort(table.host_table(0)[:, 0])).all()


def test_steady_step(benchmark: BenchmarkFixture) -> None:
    """`step`, commit included, of 256 decodes in 8 groups; 16 of them got a block: their rows are copied whole."""
    workload = next(found for found in step_workloads() if found.name == "256 requests, 8 groups, 128k, 1/16")
    inputs, table = make_inputs(workload), bt.BlockTable(workload.config(), backend="numpy")
    table.set_rows(np.arange(256), inputs.fill, np.full(256, workload.filled))
    turns = itertools.cycle(inputs.turns)

    def step() -> None:
        table.step(inputs.idx_mapping, inputs.query_start_loc, inputs.positions, num_reqs_padded=256)

    def append() -> None:
        rows, ids, counts, *_ = next(turns)
        table.append_rows(rows, ids, counts)

    step()
    benchmark.pedantic(step, setup=append, rounds=960, warmup_rounds=32)  # type: ignore[no-untyped-call]
    assert (table.buffers.block_tables[7] == table.host_table(7)[inputs.idx_mapping]).all()
