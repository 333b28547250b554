"""The forms in which a backend may take the changes of a commit."""

from __future__ import annotations

import numpy as np
import pytest

from blocktable import BlockTable, BlockTableConfig, KVCacheGroup
from blocktable.backend import Writes, ranges
from blocktable.device.staging import steady_entries
from blocktable.rows import NumpyRows

CONFIG = BlockTableConfig(
    groups=[KVCacheGroup(block_size=16), KVCacheGroup(block_size=48, kernel_block_size=16)],
    max_num_reqs=5,
    max_num_batched_tokens=16,
    max_model_len=200,
    width_alignment=1,
)
ARENA = CONFIG.arena


def random_writes(seed: int) -> Writes:
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.permutation(ARENA.size + 1)[: 2 * rng.integers(1, 20)])
    offsets, lengths = edges[::2], np.diff(edges)[::2]
    return Writes(ARENA, offsets, lengths.astype(np.int32), rng.integers(1, 99, lengths.sum()).astype(np.int32))


def whole() -> Writes:
    return Writes(ARENA, np.zeros(1, np.int64), np.array([ARENA.size], np.int32), np.arange(ARENA.size, dtype=np.int32))


@pytest.mark.parametrize("writes", [whole(), *map(random_writes, range(30))])
def test_ranges_split_by_row_say_the_same_for_tables_without_an_arena(writes: Writes) -> None:
    arena = np.full(ARENA.size, -1, np.int64)
    arena[ranges(writes.offsets, writes.lengths)] = writes.values
    expected = [ARENA.view(arena, group) for group in range(-1, ARENA.num_groups)]

    split = writes.split_by_row()
    tables = [np.full(view.shape, -1, np.int64) for view in expected]
    starts = np.cumsum(split.lengths) - split.lengths
    for i, (group, row, column) in enumerate(zip(split.groups, split.rows, split.columns, strict=True)):
        values = split.values[starts[i] : starts[i] + split.lengths[i]]
        assert column + values.size <= tables[group + 1].shape[1]
        tables[group + 1][row, column : column + values.size] = values
    for got, wanted in zip(tables, expected, strict=True):
        assert np.array_equal(got, wanted)


@pytest.mark.parametrize("limit", [0, 3, 10**6])
@pytest.mark.parametrize("seed", range(10))
def test_long_ranges_and_the_others_are_all_of_them(seed: int, limit: int) -> None:
    writes = random_writes(seed)
    expected, got = np.zeros((2, ARENA.size), np.int64)
    expected[ranges(writes.offsets, writes.lengths)] = writes.values
    long_ranges, rest = writes.split_long(limit)
    for start, values in long_ranges:
        assert values.size > limit
        got[start : start + values.size] = values
    assert not (rest.lengths > limit).any()
    got[ranges(rest.offsets, rest.lengths)] = rest.values
    assert np.array_equal(got, expected)


def test_a_row_that_ends_stays_small() -> None:
    """A request of 8,192 columns that has finished: what becomes NULL travels as offset, length and value."""
    arena = BlockTableConfig(
        groups=[KVCacheGroup(block_size=16)], max_num_reqs=2, max_num_batched_tokens=16, max_model_len=16 * 8192
    ).arena
    offsets, lengths = np.array([1, arena.size - 8192], np.int64), np.array([1, 8192], np.int32)
    block = np.full(64, -1, np.int32)
    used = Writes(arena, offsets, lengths, np.zeros(8193, np.int32)).pack_changes(block)
    assert block[:used].tolist() == [1, 0, 0, 1, 8192, 1, 0, arena.size - 8192, 0, 0]


def test_changes_stay_pending_until_they_are_committed() -> None:
    """Rules: R9.9."""
    host, block = NumpyRows(CONFIG), np.zeros(100, np.int32)
    assert not host.has_changes
    assert host.pack_changes(block) == host.committed() == 0
    host.append_rows([2, 0], [[5, 6], [7, 8]], [1, 1])
    for _ in range(2):
        assert host.has_changes
        writes = host.writes()
        assert (writes.num_ranges, writes.values.size) == (8, 12)
        assert host.pack_changes(np.zeros(20, np.int32)) == -1
        assert host.pack_changes(block) == 5 + 2 * 6 + 2 * 2 + 6
        assert block[:5].tolist() == [6, 2, 6, 0, 0]
    assert host.committed() == 12 * 8 + 4 * 12
    assert not host.has_changes
    host.truncate_rows([0, 2], [1, 1])  # they hold no more
    assert not host.has_changes
    assert host.pack_changes(block) == host.committed() == 0


@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_a_steady_step_sends_at_most_32_bytes_for_each_block(num_rows: int) -> None:
    """And 4 for each further kernel column. Rules: R9.6."""
    sizes = [(16, 16), (32, 16), (48, 16), (16, 16)]
    config = BlockTableConfig(
        groups=[KVCacheGroup(block_size=size, kernel_block_size=kernel) for size, kernel in sizes],
        max_num_reqs=64,
        max_num_batched_tokens=64,
        max_model_len=4096,
    )
    table, ids = BlockTable(config, "numpy"), np.arange(1, 1 + num_rows, dtype=np.int32)
    rows, starts = np.arange(num_rows), np.arange(num_rows + 1, dtype=np.int32)
    for turn in range(3):
        before = table.num_bytes_sent
        table.append_rows(rows, [ids] * len(sizes), np.ones(num_rows, np.int64))
        table.step(np.arange(num_rows, dtype=np.int32), starts, np.full(num_rows, 16 * turn))
        further = sum(size // kernel - 1 for size, kernel in sizes)
        most = num_rows * (32 * len(sizes) + 4 * further) + 256
        assert 0 < table.num_bytes_sent - before <= most


@pytest.mark.parametrize("period", [2, 3, 4])
def test_a_row_that_differs_here_and_there_fits_a_steady_commit(period: int) -> None:
    """One more block for every row and group, and rows whose every n-th column stays, are packed without more memory.

    Rules: R9.4.
    """
    config = BlockTableConfig(
        groups=[KVCacheGroup(block_size=1)] * 2, max_num_reqs=3, max_num_batched_tokens=1, max_model_len=1000
    )
    host = NumpyRows(config)
    ids = np.arange(1, 991)
    host.set_rows([0], [ids] * 2, [990])
    host.committed()
    host.append_rows([0, 1, 2], [[1, 2, 3]] * 2, [1, 1, 1])
    host.set_rows([0], [np.append(np.where(ids % period, ids + 5000, ids), 1)] * 2, [991])
    used = host.pack_changes(np.zeros(steady_entries(config), np.int32))
    assert used >= 2 * 990
