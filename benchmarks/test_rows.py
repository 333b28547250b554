"""Row operations and commits on the host: what one engine step costs before any kernel runs.

Timings are for comparing two versions on one machine: pytest benchmarks --benchmark-json=before.json
"""

from collections.abc import Callable

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import blocktable as bt

NUM_REQS = 256
NUM_GROUPS = 8


@pytest.fixture
def table() -> bt.BlockTable:
    """256 rows of 250 blocks in 8 groups of 128k tokens."""
    config = bt.BlockTableConfig(
        groups=[bt.KVCacheGroup(block_size=16)] * NUM_GROUPS,
        max_num_reqs=NUM_REQS,
        max_num_batched_tokens=8192,
        max_model_len=131072,
    )
    table = bt.BlockTable(config, backend="numpy")
    ids = np.arange(1, 1 + 250 * NUM_REQS, dtype=np.int32)
    table.set_rows(np.arange(NUM_REQS), [ids] * NUM_GROUPS, np.full(NUM_REQS, 250))
    table.commit()
    return table


def take_back(table: bt.BlockTable) -> None:
    """Undo an append and its commit, outside the timed part."""
    table.truncate_rows(np.arange(NUM_REQS), np.full(NUM_REQS, 250))
    table.commit()


def time(benchmark: BenchmarkFixture, call: Callable[[], None], before: Callable[[], None], rounds: int = 200) -> None:
    benchmark.pedantic(  # type: ignore[no-untyped-call]  # pytest-benchmark leaves it untyped
        call, setup=before, rounds=rounds, warmup_rounds=rounds // 10
    )


@pytest.mark.parametrize("num_rows", [16, NUM_REQS])
def test_append_one_block_in_bulk(benchmark: BenchmarkFixture, table: bt.BlockTable, num_rows: int) -> None:
    """One call for all rows, ids as int32 arrays. With 256 rows it should stay under 100 us."""
    rows, counts = np.arange(num_rows), np.ones(num_rows, np.int64)
    ids = [np.arange(1, 1 + num_rows, dtype=np.int32)] * NUM_GROUPS
    time(benchmark, lambda: table.append_rows(rows, ids, counts), lambda: take_back(table))
    assert (table.num_blocks_per_row[:, :num_rows] == 251).all()


def test_append_one_block_in_bulk_from_lists(benchmark: BenchmarkFixture, table: bt.BlockTable) -> None:
    """The same from Python lists: converting them is most of it."""
    rows, counts, ids = list(range(NUM_REQS)), [1] * NUM_REQS, [list(range(1, 1 + NUM_REQS))] * NUM_GROUPS
    time(benchmark, lambda: table.append_rows(rows, ids, counts), lambda: take_back(table))
    assert (table.num_blocks_per_row == 251).all()


def test_append_one_block_row_by_row(benchmark: BenchmarkFixture, table: bt.BlockTable) -> None:
    """256 single calls: the bulk form should take at most an eighth of it."""
    ids = [[7]] * NUM_GROUPS

    def append() -> None:
        for row in range(NUM_REQS):
            table.append_row(row, ids)

    time(benchmark, append, lambda: take_back(table), rounds=20)
    assert (table.num_blocks_per_row == 251).all()


@pytest.mark.parametrize("num_rows", [16, NUM_REQS])
def test_commit_after_append(benchmark: BenchmarkFixture, table: bt.BlockTable, num_rows: int) -> None:
    rows, counts = np.arange(num_rows), np.ones(num_rows, np.int64)
    ids = [np.arange(1, 1 + num_rows, dtype=np.int32)] * NUM_GROUPS

    def append() -> None:
        take_back(table)
        table.append_rows(rows, ids, counts)

    time(benchmark, table.commit, append)
    table.verify()


@pytest.mark.parametrize("operation", ["swap_rows", "copy_row"])
def test_two_long_rows(benchmark: BenchmarkFixture, table: bt.BlockTable, operation: str) -> None:
    """Cost follows the 250 filled columns, not the 8,192 of the width."""
    benchmark(getattr(table, operation), 3, 200)
