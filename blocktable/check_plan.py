"""What the kernels of a table check, and where what they need lies: on the device alone, and in the arena (R41)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DEVICE_KINDS = (
    "missing_block",
    "unset_row",
    "shared_block_written",
    "slot_written_twice",
    "position_gap",
    "bad_starts",
    "null_written",
)
"""Kinds of findings that kernels make. A record counts them from 1; bit i of a group's `checks` says that it wants the
i-th."""

REQUEST_KINDS = ("unset_row", "position_gap", "bad_starts")
"""Those of a whole request: no group's own."""

MAX_RECORDS = 64
RECORD = 8
"""int32 entries of a record: kind + 16 * (group + 1), group -1 for no group; row; token of the call; low and high half
of the position; the table's entry, or -1; the step; and its number, counted from 1, which is written last. Of
"bad_starts" row, token and position are the request, its start and its end."""

MARKS_START = 8
"""First entry of the marks in a checker's memory. The first entry of all is the number of the last call."""

NOTES = 8
"""Entries of a row in the notes of a group: the last call in which a kind was found of the row, at the kind's number,
and at 0 that of a row outside the table. So a call has one finding for each kind, row and group."""

MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class CheckPlan:
    """What kernels check, group by group.

    Attributes:
        kinds: of each group, those of `DEVICE_KINDS` that it wants; those of `REQUEST_KINDS` in all groups or none.
        pools: of each group, the pool that its blocks come from, counted from 0; -1: it has no slots.
        num_blocks: manager blocks of each pool.
        has_owners: of each group, whether a block that two rows hold may be right: only who wrote it last tells, as in
            groups with a window, and where rows are not cleared.
    """

    kinds: tuple[frozenset[str], ...]
    pools: tuple[int, ...]
    num_blocks: tuple[int, ...]
    has_owners: tuple[bool, ...]

    def mask(self, group: int) -> int:
        """Return the kinds of a group as bits."""
        return sum(1 << index for index, kind in enumerate(DEVICE_KINDS) if kind in self.kinds[group])


@dataclass(frozen=True)
class CheckRegions:
    """What the host tells the kernels, as entries of the arena, and what they keep for themselves.

    Attributes:
        step: entry of the number of commits.
        lives: [num_rows] from here on. Row -> number of its life, below 0 while it holds no block; 0 everywhere before
            the first row operation.
        restarts: [num_rows] from here on. Row -> under which number its mark is kept; modulo num_rows it is the mark's
            place.
        caps: [num_rows] from here on. Row -> tokens that the mark under the number before falls to; -1: there is none.
        held: of each pool, entry of its first 32 blocks: bit b % 32 of entry b // 32 says that two hold block b.
        copies: of each pool, entry of its first block: block -> life of the row that it was last put into by
            `replace_blocks` or `remap_blocks`, which may write it. 0: not kept: no kind needs the last writer.
        end: first entry after all of them.
        block_stamps: of each group, entry of the checker's memory: block -> life of the row that wrote it last. -1:
            not kept.
        slot_stamps: of each group, entry of the checker's memory: slot -> last call that wrote it. -1: not kept.
        checker_size: int32 entries of the checker's memory: the number of the last call, then from MARKS_START on
            [num_rows, 2], place -> number that the mark belongs to, mark; [num_groups, num_rows, NOTES]; then the
            stamps.
    """

    step: int
    lives: int
    restarts: int
    caps: int
    held: tuple[int, ...]
    copies: tuple[int, ...]
    end: int
    block_stamps: tuple[int, ...]
    slot_stamps: tuple[int, ...]
    checker_size: int


def lay_out_checks(plan: CheckPlan, groups: Sequence[Any], num_rows: int, start: int) -> CheckRegions:
    """Return where everything lies.

    Args:
        plan: what is checked.
        groups: the table's.
        num_rows: its rows.
        start: entry of the arena where its tables end.
    """
    lives = start + 1
    end = lives + 3 * num_rows
    held = []
    for num_blocks in plan.num_blocks:
        held.append(end)
        end += -(-num_blocks // 32)
    with_owners = {pool for pool, has_owners in zip(plan.pools, plan.has_owners, strict=True) if has_owners}
    copies = []
    for pool, num_blocks in enumerate(plan.num_blocks):
        copies.append(end if pool in with_owners else 0)
        end += num_blocks if pool in with_owners else 0
    size = MARKS_START + (2 + NOTES * len(groups)) * num_rows
    blocks: dict[int, int] = {}
    slots: dict[tuple[int, int], int] = {}
    for index, group in enumerate(groups):
        pool = plan.pools[index]
        if pool < 0:
            continue
        if plan.has_owners[index] and "shared_block_written" in plan.kinds[index] and pool not in blocks:
            blocks[pool] = size
            size += plan.num_blocks[pool]
        key = pool, group.block_size  # groups of one pool and size give one block the same slots
        if "slot_written_twice" in plan.kinds[index] and key not in slots:
            slots[key] = size
            size += plan.num_blocks[pool] * group.block_size
    block_stamps, slot_stamps = [], []
    for index, group in enumerate(groups):
        pool, kinds = plan.pools[index], plan.kinds[index]
        has_owner = plan.has_owners[index] and "shared_block_written" in kinds
        block_stamps.append(blocks[pool] if pool >= 0 and has_owner else -1)
        slot_stamps.append(slots[pool, group.block_size] if pool >= 0 and "slot_written_twice" in kinds else -1)
    return CheckRegions(
        start,
        lives,
        lives + num_rows,
        lives + 2 * num_rows,
        tuple(held),
        tuple(copies),
        end,
        tuple(block_stamps),
        tuple(slot_stamps),
        size,
    )


def empty_records() -> np.ndarray[Any, Any]:
    """Return memory for a table's records, [(1 + MAX_RECORDS) * RECORD] int32.

    First their number, then how many the host has read; from RECORD on record i at place i % MAX_RECORDS, unless
    MAX_RECORDS before it were unread.
    """
    return np.zeros((1 + MAX_RECORDS) * RECORD, np.int32)
