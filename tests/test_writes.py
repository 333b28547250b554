"""The forms in which a backend may take the changes of a commit."""

from __future__ import annotations

import numpy as np
import pytest

from blocktable import BlockTableConfig, KVCacheGroup, Writes, ranges

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
