"""Why a token has its slot, or none: R12 and R13, clause by clause, for one token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from blocktable.arrays import IntArray
from blocktable.checking.calls import number
from blocktable.config import BlockTableConfig

Clause = Literal["slot", "padding", "negative", "other_rank", "not_held", "null_block", "no_slots"]


@dataclass(frozen=True, slots=True)
class SlotReason:
    """Why a token has a slot, or none.

    Attributes:
        clause: "slot": it has one (R12). Otherwise the clause of R13: "padding": the row is outside the table;
            "negative": the position is; "other_rank": another context-parallel rank owns the position; "not_held": the
            row holds no such column; "null_block": the entry is missing, and such tokens are PAD; "no_slots": the group
            has none in a step.
        message: the same as a sentence.
        slot: the slot; None where it has none.
        block_id: the manager block; None where there is none.
        block_index: place of the block in its row, in manager blocks; None where the clause comes before it.
    """

    clause: Clause
    message: str
    slot: int | None = None
    block_id: int | None = None
    block_index: int | None = None


def slot_reason(config: BlockTableConfig, arena: IntArray, row: int, group: int, position: int) -> SlotReason:
    """Return the first clause of R13 that holds for a token, or its slot by R12.

    Args:
        arena: [arena.size] int32. The rows.
        row, group, position: of the token; the group exists.
    """
    geometry, num_rows = config.groups[group], config.num_rows
    tokens, expansion = geometry.tokens_per_column, geometry.blocks_per_kv_block
    who = f"Row {row} of group {group}"
    if not 0 <= row < num_rows:
        rows = f"rows go from 0 to {num_rows - 1}"
        return SlotReason("padding", f"Row {row} is outside the table ({rows}): it is a padding entry.")
    if geometry.slot_mode in ("none", "cross"):
        named = "" if geometry.slot_mode == "none" else ", except where compute_slot_mappings(groups=) names it"
        return SlotReason("no_slots", f'Group {group} has slot_mode="{geometry.slot_mode}": no slots{named}.')
    if position < 0:
        return SlotReason("negative", f"Position {position} is below 0: it stands for no token.")
    local, shard = position, config.context_parallel
    if geometry.is_sharded:
        turn, offset = divmod(position, shard.world_size * shard.interleave_size)
        owner = offset // shard.interleave_size
        if owner != shard.rank:
            return SlotReason("other_rank", f"Position {position} belongs to rank {owner}; this is rank {shard.rank}.")
        local = turn * shard.interleave_size + position % shard.interleave_size
    held = int(config.arena.view(arena, -1)[group, row])
    holds = f"{who} holds {number(held // expansion, 'block')}, {held * tokens} tokens"
    if geometry.slot_mode == "ring" and held:
        local %= held * tokens
    column = local // tokens
    index = column // expansion
    if column >= held:
        more = " of this rank" if geometry.is_sharded and shard.world_size > 1 else ""
        return SlotReason(
            "not_held", f"{holds}{more}; position {position} lies in its block {index}.", block_index=index
        )
    entry = int(config.arena.view(arena, group)[row, column])
    is_missing = entry // expansion == geometry.null_block_id
    where = f"{who}: position {position} lies in its block {index}, which"
    if is_missing and (geometry.null_is_pad or geometry.null_block_id < 0):
        return SlotReason("null_block", f"{where} is a hole.", block_index=index)
    slot = entry * tokens + local % tokens
    what = f"the null block {geometry.null_block_id}" if is_missing else f"block {entry // expansion}"
    return SlotReason("slot", f"{where} is {what}: slot {slot}.", slot, entry // expansion, index)
