"""The numpy backend's compiled step copies only rows that changed since the last one into a set, and misses none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable.backend import Writes, compiled_step

CONFIG = bt.BlockTableConfig(
    groups=[
        bt.KVCacheGroup(block_size=4),
        bt.KVCacheGroup(block_size=6, kernel_block_size=3, sliding_window=8),
        bt.KVCacheGroup(block_size=4, sliding_window=5, sharded=False),
    ],
    max_num_reqs=6,
    max_num_batched_tokens=16,
    max_model_len=64,
    context_parallel=bt.ContextParallel(world_size=2, rank=1, interleave_size=2),
)
EVERY_ROW = np.arange(6, dtype=np.int32)
MARK = -7


def make_table() -> bt.BlockTable:
    """Return a table of six rows of three blocks each, gathered once."""
    table = bt.BlockTable(CONFIG, "numpy")
    ids = np.arange(1, 19, dtype=np.int32)
    table.set_rows(EVERY_ROW, [ids, ids + 20, ids + 40], np.full(6, 3))
    table.commit()
    check_gather(table, EVERY_ROW)
    return table


def show(table: bt.BlockTable, idx_mapping: Any, computed: Any = None, out: bt.StepBuffers | None = None) -> None:
    """Do a step without tokens."""
    starts = np.zeros(idx_mapping.size + 1, np.int32)
    table.step(idx_mapping, starts, np.zeros(0, np.int64), num_computed_tokens=computed, out=out)


def check_gather(
    table: bt.BlockTable, idx_mapping: Any, computed: Any = None, out: bt.StepBuffers | None = None
) -> None:
    """Gather, and compare the whole set with the host's rows, all of which are committed."""
    out = out or table.buffers
    show(table, idx_mapping, computed, out)
    for index, (group, batch) in enumerate(zip(CONFIG.groups, out.block_tables, strict=True)):
        expected = np.zeros_like(batch)
        for i, row in enumerate(idx_mapping.tolist()):
            if 0 <= row < CONFIG.max_num_reqs:
                expected[i] = table.host_table(index)[row]
            if computed is not None and group.sliding_window is not None:
                tokens = max(0, int(computed[i]) - group.sliding_window + 1)
                passed = int(CONFIG.context_parallel.local_lengths(tokens)) if group.is_sharded else tokens
                expected[i, : passed // group.tokens_per_column] = 0
        assert np.array_equal(batch, expected), f"group {index}"


def write(table: bt.BlockTable, offset: int, values: list[int]) -> None:
    """Write one range past the core."""
    table.store.write(
        Writes(CONFIG.arena, np.array([offset]), np.array([len(values)], np.int32), np.array(values, np.int32)),
        stream=None,
    )


@pytest.mark.skipif(compiled_step() is None, reason="the compiled host path was not built")
def test_a_steady_step_copies_only_rows_that_changed() -> None:
    """A mark planted in a batch row stays there until its row changes, or until another row stands there.

    Rules: R10.7.
    """
    table = make_table()
    batch = table.buffers.block_tables[0]
    batch[1:3, :2] = MARK
    table.append_row(2, [[90], [91], [92]])
    table.truncate_row(3, 1)
    table.commit()
    show(table, EVERY_ROW)
    assert batch[1, :4].tolist() == [MARK, MARK, 6, 0]
    assert batch[2, :5].tolist() == [7, 8, 9, 90, 0]
    assert batch[3, :3].tolist() == [10, 0, 0]
    check_gather(table, EVERY_ROW[::-1].copy())


def test_columns_that_a_count_uncovers_are_shown() -> None:
    """A write of counts alone changes what the rows fill. Rules: R10.1."""
    table = make_table()
    columns = CONFIG.arena.group_offsets[0] + 2 * CONFIG.arena.widths[0]
    write(table, columns + 3, [90, 91])
    show(table, EVERY_ROW)
    assert table.buffers.block_tables[0][2, :5].tolist() == [7, 8, 9, 0, 0]
    write(table, 2, [4])
    show(table, EVERY_ROW)
    assert table.buffers.block_tables[0][2, :5].tolist() == [7, 8, 9, 90, 0]
    write(table, columns + 4, [92])
    write(table, 2, [5])
    show(table, EVERY_ROW)
    assert table.buffers.block_tables[0][2, :5].tolist() == [7, 8, 9, 90, 92]


@pytest.mark.parametrize("first", [0, 17, CONFIG.arena.group_offsets[0], CONFIG.arena.group_offsets[1] - 3])
def test_one_range_over_many_rows_is_shown(first: int) -> None:
    """Rules: R10.1."""
    table = make_table()
    table.append_rows(EVERY_ROW, [EVERY_ROW + 1] * 3, np.ones(6, np.int64))
    table.commit()
    check_gather(table, EVERY_ROW)
    whole = table.store.arena.copy()  # type: ignore[attr-defined]
    rows = whole[18:]
    rows[rows > 0] += 100
    write(table, first, whole[first:].tolist())
    show(table, EVERY_ROW)
    for group in range(3):
        columns = int(table.store.table(-1)[group, 0])
        shown, expected = table.buffers.block_tables[group], table.store.table(group)
        assert np.array_equal(shown[:, :columns], expected[:, :columns])
    assert table.buffers.block_tables[2][5, 0] == 156


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_are_shown(seed: int) -> None:
    """Mostly the same batch again and again, over two sets, with moving windows. Rules: R10.1, R10.6, R11, R24."""
    random = np.random.default_rng(seed)
    table = make_table()
    sets = [table.buffers, table.create_buffers()]
    idx_mapping, computed = EVERY_ROW, np.zeros(6, np.int32)
    for _ in range(60):
        for _ in range(random.integers(0, 4)):
            _change(table, random)
        table.commit()
        if random.random() < 0.3:
            idx_mapping = random.integers(-1, 7, random.integers(0, 7)).astype(np.int32)
        computed = (computed + random.integers(0, 2, 6)).astype(np.int32) % 60
        sized = computed[: idx_mapping.size] if random.random() < 0.8 else None
        check_gather(table, idx_mapping, sized, sets[int(random.random() < 0.3)])


def _change(table: bt.BlockTable, random: np.random.Generator) -> None:
    rows = random.permutation(6)[: random.integers(1, 4)]
    room = (table.num_blocks_per_row[:, rows] < [[CONFIG.capacity(group)] for group in range(3)]).all(0)
    operations = {
        "append": lambda: table.append_rows(
            rows[room], [random.integers(1, 90, room.sum()).astype(np.int32)] * 3, np.ones(room.sum(), np.int64)
        ),
        "truncate": lambda: table.truncate_rows(rows, random.integers(0, 5, rows.size)),
        "null": lambda: table.null_range(int(rows[0]), 0, 0, int(table.num_blocks_per_row[0, rows[0]]) // 2),
        "swap": lambda: table.swap_rows(int(rows[0]), int(rows[-1])),
        "commit": table.commit,
        "invalidate": table.invalidate,
    }
    chances = {"append": 0.5, "truncate": 0.15, "null": 0.1, "swap": 0.08, "commit": 0.15, "invalidate": 0.02}
    operations[random.choice(list(chances), p=list(chances.values()))]()
