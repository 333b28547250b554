"""What the hand-drawn cases share: small tables, one-request steps, and checks of whole buffers against hand numbers.

Each case is a fault that a public engine shipped, reduced to numbers that can be checked on paper. The pair compares
every call with the oracle; the numbers in the tests are there so that the oracle, too, is held to something.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blocktable import BlockTableConfig, ContextParallel, KVCacheGroup
from blocktable_conformance.asserts import check, check_values
from blocktable_conformance.oracle import NULL, PAD
from blocktable_conformance.pair import Pair, Seen
from blocktable_conformance.subject import HostArray, Subject

NO_REQUEST = -1
"""An idx_mapping entry that marks a padding entry."""


def small_config(*groups: KVCacheGroup, width: int = 4, **options: Any) -> BlockTableConfig:
    """Return a config of 4 rows and 16 tokens, whose first group has `width` manager blocks in a row, unaligned."""
    defaults: dict[str, Any] = {
        "max_num_reqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": width * groups[0].block_size,
        "width_alignment": 1,
    }
    return BlockTableConfig(groups=groups, **(defaults | options))


def make(subject: Subject, *groups: KVCacheGroup, width: int = 4, rows: Sequence[Any] = (), **options: Any) -> Pair:
    """Return a pair over `small_config`, with `rows[k]` set as row k."""
    pair = Pair(subject, small_config(*groups, width=width, **options))
    for row, block_ids in enumerate(rows):
        pair.do("set_row", row, block_ids)
    return pair


def shard(world_size: int, rank: int, interleave_size: int) -> ContextParallel:
    """Return one rank's share."""
    return ContextParallel(world_size=world_size, rank=rank, interleave_size=interleave_size)


def one_request(pair: Pair, positions: Sequence[int], *, row: int = 0, **options: Any) -> Seen:
    """Do a step of one request."""
    return pair.step([row], [0, len(positions)], positions, **options)


def expect_slots(seen: Seen, slots: Sequence[int], rules: str, *, group: int = 0) -> None:
    """Check the whole slot buffer: these slots, then PAD to its end."""
    buffer = seen.buffer_slots[group]
    check_values(buffer, [*slots, *[PAD] * (len(buffer) - len(slots))], rules, f"the slot buffer of group {group}")


def expect_table(table: HostArray, rows: Sequence[Sequence[int]], rules: str, what: str = "the batch table") -> None:
    """Check a whole table: these rows, each NULL to its end, and NULL rows after them."""
    expected = np.full(table.shape, NULL, np.int32)
    for row, columns in enumerate(rows):
        expected[row, : len(columns)] = columns
    check(np.array_equal(table, expected), rules, f"{what} must be {expected.tolist()}, got {table.tolist()}.")


def expect_host(pair: Pair, rows: Sequence[Sequence[int]], rules: str, *, group: int = 0) -> None:
    """Check a whole host table."""
    expect_table(pair.host_tables()[group], rows, rules, "the host table")


def expect_counts(pair: Pair, counts: Sequence[int], rules: str, *, group: int = 0) -> None:
    """Check the blocks of the first rows; the others hold none."""
    got = pair.table.num_blocks_per_row[group]
    check_values(got, [*counts, *[0] * (len(got) - len(counts))], rules, "num_blocks_per_row")
