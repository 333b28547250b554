"""The three kernels, as array expressions. The other backends write the same ones, step by step, in their languages."""

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
    # step 1: which entry of which range
    entries = ranges(offsets, lengths)
    # step 2: store the value
    arena[entries] = values


def gather_block_tables(
    idx_mapping: Ints,  # [num_reqs] int64, batch index -> row
    filled: Ints,  # [max_num_reqs] int32, row -> columns in use
    table: Ints,  # [max_num_reqs, width] int32
    first_columns: Ints | None,  # [num_reqs] int64, batch index -> columns that the window left behind; None: no window
    num_reqs_padded: int,
    held: Ints,  # [max_num_reqs] int32, batch index -> columns the batch table holds, read and written
    block_table: Ints,  # [max_num_reqs, width] int32, written
) -> None:
    """Write the batch view of one group."""
    num_reqs, width = idx_mapping.size, table.shape[1]
    # step 1: which row; padding rows and dummies have none
    is_real = (idx_mapping >= 0) & (idx_mapping < table.shape[0])
    rows = np.where(is_real, idx_mapping, 0)
    # step 2: how many columns it fills
    columns = np.zeros(num_reqs_padded, np.int64)
    columns[:num_reqs] = np.where(is_real, filled[rows], 0)
    # step 3: how many of them the window has left behind
    first = np.zeros(num_reqs, np.int64) if first_columns is None else np.minimum(first_columns, columns[:num_reqs])
    # step 4: copy the columns in use, NULL before them
    targets = np.arange(num_reqs_padded) * width
    copied, into = columns[:num_reqs] - first, targets[:num_reqs]
    flat = block_table.reshape(-1)
    flat[ranges(into + first, copied)] = table.reshape(-1)[ranges(rows * width + first, copied)]
    flat[ranges(into, first)] = NULL_BLOCK_ID
    # step 5: NULL over what an earlier batch left behind them
    flat[ranges(targets + columns, np.maximum(held[:num_reqs_padded] - columns, 0))] = NULL_BLOCK_ID
    held[:num_reqs_padded] = columns


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
    """Write the slot of every token of one group."""
    # step 1: which tokens
    num_tokens = max(0, min(int(query_start_loc[-1]), positions.size, slots.size))
    position = positions[:num_tokens]
    # step 2: PAD behind the last real token
    slots[num_tokens:] = PAD_SLOT_ID
    # step 3: which request, its row, and how many columns that fills; a dummy fills none
    is_real = (idx_mapping >= 0) & (idx_mapping < table.shape[0])
    row = np.where(is_real, idx_mapping, 0)
    starts = np.maximum.accumulate(np.clip(query_start_loc, 0, num_tokens))
    lengths = np.diff(starts)
    first_token = int(starts[0])  # tokens before it belong to no request
    slots[:first_token] = PAD_SLOT_ID
    position = position[first_token:]
    columns = np.repeat(np.where(is_real, filled[row], 0), lengths)
    row_start = np.repeat(row * table.shape[1], lengths)
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
    # step 6: the kernel block
    block_id = table.reshape(-1)[np.where(is_valid, row_start + column, 0)]
    if null_is_pad:
        is_valid &= block_id >= blocks_per_kv_block
    # step 7: store the slot
    slot = block_id * np.int64(tokens_per_column) + (local - column * tokens_per_column)
    slots[first_token:num_tokens] = np.where(is_valid, slot, PAD_SLOT_ID)
