"""What must hold beyond each entry's value: no slot has two writers, and every block is accounted for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blocktable import KVCacheGroup
from blocktable.typing import IntArray
from blocktable_replay.plan import StepPlan
from blocktable_replay.pool import BlockPool
from blocktable_replay.schedule import Scheduler

AUDIT_EVERY = 256
"""Steps between two audits of all blocks; written slots are checked at every step."""


def broken_by_slots(
    plan: StepPlan, pools: Sequence[BlockPool], groups: Sequence[KVCacheGroup], slots: Sequence[IntArray]
) -> list[str]:
    """Return a sentence for each kind of forbidden write that a step's slots mean.

    Args:
        pools: of each group, as the scheduler has them during the step.
        groups: their geometry.
        slots: for each group a slot buffer that a backend wrote.
    """
    broken = []
    writers = np.repeat(plan.requests, np.diff(plan.query_start_loc))
    for group, (pool, geometry, buffer) in enumerate(zip(pools, groups, slots, strict=True)):
        written = buffer[: writers.size]
        tokens = np.flatnonzero((written >= 0) & (written != geometry.pad_slot_id))
        blocks = written[tokens] // geometry.block_size
        inside = blocks < pool.num_blocks
        if not inside.all():
            token = int(tokens[~inside][0])
            broken.append(f"group {group}, token {token}: slot {written[token]} is beyond the cache's last block")
            tokens, blocks = tokens[inside], blocks[inside]
        for is_wrong, what in (
            (blocks == geometry.null_block_id, "is in the NULL block, which must not be written"),
            (pool.owners[blocks] != writers[tokens], "is in a block that another request owns, or none"),
            (pool.references[blocks] > 1, "is in a block that several requests share"),
        ):
            if is_wrong.any():
                token = int(tokens[is_wrong][0])
                broken.append(f"group {group}, token {token} of request {writers[token]}: slot {written[token]} {what}")
    return broken


def broken_by_blocks(scheduler: Scheduler) -> list[str]:
    """Return a sentence for each block of the scheduler's own books that does not add up."""
    broken = []
    for group, pool in enumerate(scheduler.pools):
        held = scheduler.record.holders(group, scheduler.running, pool.num_blocks)
        wrong = np.flatnonzero(held != pool.references)
        if wrong.size:
            block = int(wrong[0])
            broken.append(
                f"group {group}: block {block} is held by {held[block]} live requests, its count says "
                f"{pool.references[block]}"
            )
        num_used = int(np.count_nonzero(held))
        if num_used != pool.num_used:
            broken.append(f"group {group}: {num_used} blocks are held, the allocator says {pool.num_used}")
    return broken
