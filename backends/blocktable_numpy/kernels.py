"""The four kernels, as array expressions. The other backends write the same ones, step by step, in their languages."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from blocktable import NULL_BLOCK_ID, PAD_SLOT_ID, ranges

Ints = npt.NDArray[Any]


def scatter_writes(
    offsets: Ints,  # [n] int64, first entry of each range
    lengths: Ints,  # [n] int32, entries of each range
    values: Ints,  # [sum(lengths)] int32
    arena: Ints,  # [arena.size] int32, written
) -> None:
    """Write every range of values into the arena."""
    # step 1: which value of which range
    entries = ranges(offsets, lengths)
    # step 2: store the value
    arena[entries] = values


def null_stale_columns(
    idx_mapping: Ints,  # [num_reqs] int64, batch index -> row
    filled: Ints,  # [max_num_reqs] int32, row -> columns in use
    held: Ints,  # [max_num_reqs] int32, batch index -> columns the batch row holds
    block_table: Ints,  # [max_num_reqs, width] int32, written
) -> None:
    """Make every batch row NULL behind the columns that its row fills."""
    # step 1: which batch row and group
    batch_rows = np.arange(held.size) * block_table.shape[1]
    # step 2: how many columns its row fills
    columns = _columns_in_use(idx_mapping, held.size, filled)
    # step 3: NULL over what an earlier batch left behind them
    stale = np.maximum(held - columns, 0)
    block_table.reshape(-1)[ranges(batch_rows + columns, stale)] = NULL_BLOCK_ID


def gather_block_tables(
    idx_mapping: Ints,  # [num_reqs] int64, batch index -> row
    first_columns: Ints | None,  # [num_reqs] int64, batch index -> columns that the window left behind; None: no window
    filled: Ints,  # [max_num_reqs] int32, row -> columns in use
    table: Ints,  # [max_num_reqs, width] int32
    held: Ints,  # [max_num_reqs] int32, batch index -> columns the batch row holds, written
    block_table: Ints,  # [max_num_reqs, width] int32, written
) -> None:
    """Write the columns that the batch's rows fill, and remember how many there are."""
    num_reqs, width = idx_mapping.size, table.shape[1]
    # step 1: which batch row and group
    batch_rows = np.arange(num_reqs) * width
    # step 2: how many columns its row fills
    columns = _columns_in_use(idx_mapping, held.size, filled)
    # step 3: how many of them the window has left behind
    filling = columns[:num_reqs]
    first = np.zeros_like(filling) if first_columns is None else np.minimum(first_columns, filling)
    # step 4: store the columns in use, NULL before them
    copied = ranges(idx_mapping * width + first, filling - first)
    target = block_table.reshape(-1)
    target[ranges(batch_rows + first, filling - first)] = table.reshape(-1)[copied]
    target[ranges(batch_rows, first)] = NULL_BLOCK_ID
    # step 5: remember how many columns the batch row holds
    held[:] = columns


def map_slots(
    idx_mapping: Ints,  # [num_reqs] int64, batch index -> row
    query_start_loc: Ints,  # [num_reqs + 1] int32, first token of each request
    positions: Ints,  # [>= num_tokens] int64, token -> its index in its request
    filled: Ints,  # [max_num_reqs] int32, row -> columns in use
    table: Ints,  # [max_num_reqs, width] int32
    tokens_per_column: int,
    blocks_per_kv_block: int,
    is_ring: bool,
    null_is_pad: bool,
    world_size: int,  # 1 for a replicated group
    rank: int,
    interleave_size: int,
    slots: Ints,  # [>= len(positions)] int64 or int32, written
) -> None:
    """Write the slot of every token of one group, and PAD from the last real token to the end of the slots."""
    # step 1: which token and group
    num_tokens = max(0, min(int(query_start_loc[-1]), positions.size, slots.size))
    starts = np.maximum.accumulate(np.clip(query_start_loc, 0, num_tokens))
    position = positions[starts[0] : num_tokens]  # tokens before the first request belong to none
    # step 2: PAD behind the last real token
    slots[: starts[0]] = PAD_SLOT_ID
    slots[num_tokens:] = PAD_SLOT_ID
    # step 3: which request and row
    lengths = np.diff(starts)
    columns = np.repeat(_columns_in_use(idx_mapping, idx_mapping.size, filled), lengths)
    row_start = np.repeat(idx_mapping * table.shape[1], lengths)
    # step 4: whose token it is, and its index among this rank's tokens
    is_valid = position >= 0
    local = position
    if world_size > 1:
        turn = position // interleave_size
        is_valid &= turn % world_size == rank
        local = turn // world_size * interleave_size + (position - turn * interleave_size)
    if is_ring:
        local = position % np.maximum(columns * tokens_per_column, 1)
    # step 5: which column, and whether the row fills it
    column = local // tokens_per_column
    is_valid &= column < columns
    # step 6: which kernel block
    block_id = table.reshape(-1)[np.where(is_valid, row_start + column, 0)]
    if null_is_pad:
        is_valid &= block_id >= blocks_per_kv_block
    # step 7: store the slot
    slot = block_id * np.int64(tokens_per_column) + (local - column * tokens_per_column)
    slots[starts[0] : num_tokens] = np.where(is_valid, slot, PAD_SLOT_ID)


def _columns_in_use(idx_mapping: Ints, num_rows: int, filled: Ints) -> Ints:
    """Return [num_rows] int64, batch index -> columns its row fills: none for a dummy and for padding."""
    columns = np.zeros(num_rows, np.int64)
    is_real = (idx_mapping >= 0) & (idx_mapping < filled.size)
    columns[: idx_mapping.size] = np.where(is_real, filled[np.where(is_real, idx_mapping, 0)], 0)
    return columns
