"""Looking into a table: what is shown of it in one line, and who holds a slot."""

from __future__ import annotations

import pytest

import blocktable as bt
from blocktable.typing import CheckMode


def make(check: CheckMode = "off", **options: object) -> bt.BlockTable:
    group = bt.KVCacheGroup(block_size=4, kernel_block_size=2)
    small = bt.KVCacheGroup(block_size=2)
    config = bt.BlockTableConfig(
        groups=[group, small, group],
        max_num_reqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
        width_alignment=1,
        **options,  # type: ignore[arg-type]
    )
    return bt.BlockTable(config, "numpy", check=check)


@pytest.mark.parametrize("check", ["off", "host"])
def test_a_table_shows_its_geometry_backend_and_state(check: CheckMode) -> None:
    table = make(check)
    geometry = "<BlockTable groups: 2 of block size 4 and width 32, 1 of block size 2 and width 32"
    backend = f"backend 'numpy'; check '{check}'"
    assert repr(table) == f"{geometry}; {backend}; 0 of 4 rows in use; no changes pending>"
    table.append_row(2, [None, [7], None])
    table.append_row(3, [[1], [2], [3]])
    assert repr(table) == f"{geometry}; {backend}; 2 of 4 rows in use; changes pending>"
    table.commit()
    assert repr(table) == f"{geometry}; {backend}; 2 of 4 rows in use; no changes pending>"
    table.clear()
    assert repr(table) == f"{geometry}; {backend}; 0 of 4 rows in use; changes pending>"


def test_a_table_shows_its_rank_and_its_device() -> None:
    table = make(context_parallel=bt.ContextParallel(world_size=2, rank=1, interleave_size=2), max_num_rows=9)
    assert "; rank 1 of 2; " in repr(table)
    assert "0 of 9 rows" in repr(table)
    table.device = "cuda:3"
    assert "; backend 'numpy' on cuda:3; " in repr(table)


def test_who_holds_a_slot_is_named() -> None:
    table = make()
    for row in (1, 3):
        table.set_row(row, [[5, 6], None, None])
    found = table.locate(0, 6 * 4 + 3)
    assert [(held.row, held.block_index, held.position) for held in found.rows] == [(1, 1, 7), (3, 1, 7)]
    assert found.rows[1] == (3, 1, 7)
