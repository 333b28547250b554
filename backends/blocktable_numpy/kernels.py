"""The four kernels, in numpy. The other backends write the same ones, step by step, in their languages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blocktable.backend import ranges

Ints = npt.NDArray[Any]


class Tokens(NamedTuple):
    """The tokens of a call that belong to a request, for what looks at them (checks.py).

    Attributes:
        token, position: [n] int64. Place in the call, and position.
        row: [n] int64. As the batch says it.
        is_mine: [num_groups, n] bool. Whether this rank writes them: not where a later one takes a ring's place.
        local: [num_groups or 1, n] int64. Their places among this rank's tokens of the row.
        is_inside: [num_groups, n] bool. Whether the row has a column for them.
        entry: [num_groups, n] int32. What stands there.
        tokens_per_column, blocks_per_kv_block, null_start: as map_slots is given.
    """

    token: Ints
    position: Ints
    row: Ints
    is_mine: Ints
    local: Ints
    is_inside: Ints
    entry: Ints
    tokens_per_column: int
    blocks_per_kv_block: int
    null_start: int


def apply_changes(
    offsets: Ints,  # [n] int64, first entry of each range
    lengths: Ints,  # [n] int32, entries of each range
    values: Ints,  # [sum(lengths)] int32
    arena: Ints,  # [arena.size] int32, written
) -> None:
    """Write the changes of a commit into the arena."""
    # step 1: keep the counts that step_batch replaces
    # Nothing to keep: a gather here ends before the next commit begins.
    # step 2: store the single values
    if offsets.size == values.size:
        arena[offsets] = values
        return
    # step 3: store the ranges
    is_one = offsets.size == 1  # such as a whole arena
    entries: Any = slice(offsets[0], offsets[0] + lengths[0]) if is_one else ranges(offsets, lengths)
    # step 4: store the constant ranges
    # They are ranges like the others: their values are given as well.
    arena[entries] = values


def null_stale_columns(
    idx_mapping: Ints,  # [num_reqs] int64, batch index -> row; -1: padding
    filled: Ints,  # [num_groups, max_num_rows] int32, row -> columns in use
    batch_starts: Ints,  # [num_groups, max_num_reqs] int64, batch row -> its first entry
    fillers: Ints,  # [num_groups] int32, what an entry without a block holds
    held: Ints,  # [num_groups, max_num_reqs] int32, batch row -> columns it holds
    batch: Ints,  # [batch_arena.size] int32, written
) -> None:
    """Make every batch row NULL after the columns that its row fills."""
    # step 1: which batch row and group
    columns = np.zeros_like(held)  # of every one; batch rows after the batch hold none
    # step 2: how many columns its row fills
    columns[:, : idx_mapping.size] = _columns_in_use(idx_mapping, filled)
    # step 3: NULL over what an earlier batch left after them
    is_stale = held > columns
    stale = np.stack((batch_starts + columns, batch_starts + held))[:, is_stale]
    for (start, end), group in zip(stale.T.tolist(), np.nonzero(is_stale)[0].tolist(), strict=True):
        batch[start:end] = fillers[group]


def gather_block_tables(
    idx_mapping: Ints,  # [num_reqs] int64, batch index -> row; -1: padding
    first_columns: Ints,  # [num_groups, num_reqs] int64, batch index -> columns that the window has passed
    filled: Ints,  # [num_groups, max_num_rows] int32, row -> columns in use
    arena: Ints,  # [arena.size] int32
    row_starts: Ints,  # [num_groups, max_num_rows] int64, row -> its first entry
    batch_starts: Ints,  # [num_groups, max_num_reqs] int64, batch row -> its first entry
    fillers: Ints,  # [num_groups] int32, what an entry without a block holds
    held: Ints,  # [num_groups, max_num_reqs] int32, batch row -> columns it holds, written
    batch: Ints,  # [batch_arena.size] int32, written
) -> None:
    """Write the columns that the batch's rows fill, and remember how many there are."""
    # step 1: which batch row and group
    num_reqs = idx_mapping.size
    batch_rows, rows = batch_starts[:, :num_reqs], row_starts.take(idx_mapping, axis=1)
    # step 2: how many columns its row fills
    columns = _columns_in_use(idx_mapping, filled)
    # step 3: how many of them the window has passed
    first_columns = np.minimum(first_columns, columns)
    # step 4: store the columns in use, NULL before them
    # A slice for each row: one copy by index arrays takes 16 ms instead of 3 ms for 2,048 rows of 2,000 columns.
    copies = np.stack((batch_rows, rows, first_columns, columns)).reshape(4, -1)
    for (batch_row, row, first, end), filler in zip(
        copies.T.tolist(), np.repeat(fillers, num_reqs).tolist(), strict=True
    ):
        batch[batch_row + first : batch_row + end] = arena[row + first : row + end]
        if first:
            batch[batch_row : batch_row + first] = filler
    # step 5: remember how many columns the batch row holds
    held[:, :num_reqs], held[:, num_reqs:] = columns, 0


def map_slots(
    idx_mapping: Ints,  # [num_reqs] int64, batch index -> row; -1: padding
    query_start_loc: Ints,  # [num_reqs + 1] int32, first token of each request
    positions: Ints,  # [>= num_tokens] int64, token -> its index in its request
    groups: Ints,  # [num_groups, 1] int64, groups of one geometry
    filled: Ints,  # [all groups, max_num_rows] int32, row -> columns in use
    row_starts: Ints,  # [all groups, max_num_rows] int64, row -> its first entry
    arena: Ints,  # [arena.size] int32
    tokens_per_column: int,
    blocks_per_kv_block: int,
    is_ring: bool,
    null_is_pad: bool,
    null_start: int,  # first kernel block of the null block; -blocks_per_kv_block where there is none
    pad_slot_id: int,
    world_size: int,  # 1 for a replicated group
    rank: int,
    interleave_size: int,
    slots: Sequence[Ints],  # [num_groups] of [>= len(positions)] int64 or int32, written
    look: Callable[[Tokens, Ints], None] | None = None,  # at the tokens of the groups, where the table is checked
    rows: Ints | None = None,  # [num_reqs] int64, batch index -> row as it was given, for `look`
) -> None:
    """Write the slot of every token of the groups, and PAD from the last real token to the end of their slots."""
    # step 1: which token and group
    num_tokens = max(0, min(int(query_start_loc[-1]), positions.size, *(array.size for array in slots)))
    starts = np.maximum.accumulate(np.minimum(np.maximum(query_start_loc, 0), num_tokens))
    first_token = starts[0]  # earlier ones belong to no request
    position = positions[first_token:num_tokens].copy()  # what is checked must not change
    # step 2: PAD after the last real token
    for array in slots:
        array[:first_token] = pad_slot_id
        array[num_tokens:] = pad_slot_id
    # step 3: which request and row
    lengths = starts[1:] - starts[:-1]
    cells = groups * filled.shape[1] + idx_mapping
    columns = np.repeat(filled.take(cells) * (idx_mapping >= 0), lengths, axis=1)
    row_start = np.repeat(row_starts.take(cells), lengths, axis=1)
    # step 4: whose token it is, and its index among this rank's tokens
    is_valid = position >= 0
    local = position
    if world_size > 1:
        turn = position // interleave_size
        is_valid &= turn % world_size == rank
        local = turn // world_size * interleave_size + (position - turn * interleave_size)
    if is_ring:
        ring = columns * np.int64(tokens_per_column)
        last_position = positions[np.repeat(np.maximum(starts[1:] - 1, 0), lengths)]
        # Step 5 finds that an empty one has no column.
        is_valid = is_valid & (np.maximum(last_position, 0) - np.maximum(position, 0) < np.maximum(ring, 1))
        local = position % np.maximum(ring, 1)
    # step 5: which column, and whether the row fills it
    column = local // tokens_per_column
    is_mine, is_valid = is_valid, is_valid & (column < columns)
    # step 6: which kernel block
    block_id = arena[np.where(is_valid, row_start + column, 0)]
    if look is not None and rows is not None:
        shape, token = is_valid.shape, np.arange(first_token, num_tokens)
        everywhere = np.broadcast_to(is_mine, shape), np.broadcast_to(local, shape), is_valid, block_id
        geometry = tokens_per_column, blocks_per_kv_block, null_start
        look(Tokens(token, position, np.repeat(rows, lengths), *everywhere, *geometry), groups)
    if null_is_pad:
        is_valid = is_valid & ~is_missing(block_id, null_start, blocks_per_kv_block)
    # step 7: store the slot
    slot = block_id * np.int64(tokens_per_column) + (local - column * tokens_per_column)
    for array, values in zip(slots, np.where(is_valid, slot, pad_slot_id), strict=True):
        array[first_token:num_tokens] = values


def is_missing(entries: Ints, null_start: Any, blocks_per_kv_block: Any) -> Ints:
    """Say which entries stand for no block: those inside the null block, or below 0 where there is none."""
    missing: Ints = (entries >= null_start) & (entries - np.int64(null_start) < blocks_per_kv_block)
    return missing


def _columns_in_use(idx_mapping: Ints, filled: Ints) -> Ints:
    """Return [num_groups, num_reqs] int32, batch index -> columns its row fills: none for a padding entry."""
    return filled.take(idx_mapping, axis=1) * (idx_mapping >= 0)
