"""The four kernels, as array expressions. The other backends write the same ones, step by step, in their languages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from blocktable import NULL_BLOCK_ID, PAD_SLOT_ID, ranges

Ints = npt.NDArray[Any]

MAX_INDEX = 1 << 16
"""Entries that are copied at once: with more, the index arrays leave the cache, and a copy takes twice as long."""


class Shown:
    """What the batch rows of one set of buffers show, so that a gather copies only what has changed since.

    Columns `first` to `held` of a batch row are those of its row as of `versions`; all others are NULL.

    Attributes:
        num_rows: batch rows of the last batch; the further ones hold nothing.
        held: [num_groups, max_num_reqs] int32. Batch index -> columns the batch row holds.
        rows: [max_num_reqs] int64. Batch index -> row.
        first: [num_groups, max_num_reqs] int64. Batch index -> columns that the window had left behind.
        versions: [num_groups, max_num_reqs] int64. Batch index -> writes to the row's columns until then.
    """

    def __init__(self, held: Ints) -> None:
        self.num_rows: int = 0
        self.held: Ints = held
        self.rows: Ints = np.zeros(held.shape[1], np.int64)
        self.first: Ints = np.zeros(held.shape, np.int64)
        self.versions: Ints = np.zeros(held.shape, np.int64)

    def forget(self) -> None:
        """Show nothing: the batch tables are all NULL."""
        self.num_rows = 0
        self.held.fill(0)


def scatter_writes(
    offsets: Ints,  # [n] int64, first entry of each range
    lengths: Ints,  # [n] int32, entries of each range
    values: Ints,  # [sum(lengths)] int32
    arena: Ints,  # [arena.size] int32, written
) -> None:
    """Write every range of values into the arena."""
    # step 1: which value of which range
    if offsets.size == 1:
        entries: Any = slice(offsets[0], offsets[0] + lengths[0])
    else:
        entries = offsets if offsets.size == values.size else ranges(offsets, lengths)
    # step 2: store the value
    arena[entries] = values


def null_stale_columns(
    idx_mapping: Ints,  # [num_reqs] int64, batch index -> row; -1: dummy
    filled: Ints,  # [num_groups, max_num_reqs] int32, row -> columns in use
    row_starts: Ints,  # [num_groups, max_num_reqs] int64, (batch) row -> its first entry
    shown: Shown,
    batch: Ints,  # [arena.size] int32, written
) -> None:
    """Make every batch row NULL behind the columns that its row fills."""
    # step 1: which batch row and group
    num_rows = max(idx_mapping.size, shown.num_rows)
    batch_rows, held = row_starts[:, :num_rows], shown.held[:, :num_rows]
    # step 2: how many columns its row fills
    columns = np.zeros_like(held)
    columns[:, : idx_mapping.size] = _columns_in_use(idx_mapping, filled)
    # step 3: NULL over what an earlier batch left behind them
    cells = np.flatnonzero(held > columns)
    if cells.size:
        batch[ranges((batch_rows + columns).take(cells), (held - columns).take(cells))] = NULL_BLOCK_ID


def gather_block_tables(
    idx_mapping: Ints,  # [num_reqs] int64, batch index -> row; -1: dummy
    first_columns: Ints,  # [num_groups, num_reqs] int64, batch index -> columns that the window has left behind
    filled: Ints,  # [num_groups, max_num_reqs] int32, row -> columns in use
    versions: Ints,  # [num_groups, max_num_reqs] int64, row -> writes to its columns so far
    lowest: Ints,  # [num_groups, max_num_reqs] int64, row -> first column that the last of them changed
    arena: Ints,  # [arena.size] int32
    row_starts: Ints,  # [num_groups, max_num_reqs] int64, (batch) row -> its first entry
    shown: Shown,  # written
    batch: Ints,  # [arena.size] int32, written
) -> None:
    """Write the columns that the batch's rows fill, and remember how many there are."""
    # step 1: which batch row and group
    num_reqs = idx_mapping.size
    batch_rows, held = row_starts[:, :num_reqs], shown.held[:, :num_reqs]
    # step 2: how many columns its row fills
    columns = _columns_in_use(idx_mapping, filled)
    # step 3: how many of them the window has left behind
    first = np.minimum(first_columns, columns)
    # step 4: store the columns in use, NULL before them
    version = versions.take(idx_mapping, axis=1)
    changes = version - shown.versions[:, :num_reqs]
    is_other = (shown.rows[:num_reqs] != idx_mapping) | (shown.first[:, :num_reqs] != first) | (changes > 1)
    start = np.where(changes == 0, held, np.minimum(held, lowest.take(idx_mapping, axis=1)))
    start = np.where(is_other, first, np.maximum(start, first))
    cells = np.flatnonzero(start < columns)
    if cells.size:
        source, target = row_starts.take(idx_mapping, axis=1) + start, batch_rows + start
        _copy(arena, source.take(cells), batch, target.take(cells), (columns - start).take(cells))
    cells = np.flatnonzero(is_other & (first > 0))
    if cells.size:
        batch[ranges(batch_rows.ravel().take(cells), first.take(cells))] = NULL_BLOCK_ID
    # step 5: remember how many columns the batch row holds
    shown.held[:, : shown.num_rows] = 0
    shown.num_rows, shown.rows[:num_reqs], shown.held[:, :num_reqs] = num_reqs, idx_mapping, columns
    shown.first[:, :num_reqs], shown.versions[:, :num_reqs] = first, version


def map_slots(
    idx_mapping: Ints,  # [num_reqs] int64, batch index -> row; -1: dummy
    query_start_loc: Ints,  # [num_reqs + 1] int32, first token of each request
    positions: Ints,  # [>= num_tokens] int64, token -> its index in its request
    groups: Ints,  # [num_groups, 1] int64, groups of one geometry
    filled: Ints,  # [all groups, max_num_reqs] int32, row -> columns in use
    row_starts: Ints,  # [all groups, max_num_reqs] int64, row -> its first entry
    arena: Ints,  # [arena.size] int32
    tokens_per_column: int,
    blocks_per_kv_block: int,
    is_ring: bool,
    null_is_pad: bool,
    world_size: int,  # 1 for a replicated group
    rank: int,
    interleave_size: int,
    slots: Sequence[Ints],  # [num_groups] of [>= len(positions)] int64 or int32, written
) -> None:
    """Write the slot of every token of the groups, and PAD from the last real token to the end of their slots."""
    # step 1: which token and group
    num_tokens = max(0, min(int(query_start_loc[-1]), positions.size, *(array.size for array in slots)))
    starts = np.maximum.accumulate(np.minimum(np.maximum(query_start_loc, 0), num_tokens))
    first_token = starts[0]  # earlier ones belong to no request
    position = positions[first_token:num_tokens]
    # step 2: PAD behind the last real token
    for array in slots:
        array[:first_token] = PAD_SLOT_ID
        array[num_tokens:] = PAD_SLOT_ID
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
        local = position % np.maximum(columns * np.int64(tokens_per_column), 1)
    # step 5: which column, and whether the row fills it
    column = local // tokens_per_column
    is_valid = is_valid & (column < columns)
    # step 6: which kernel block
    block_id = arena[np.where(is_valid, row_start + column, 0)]
    if null_is_pad:
        is_valid &= block_id >= blocks_per_kv_block
    # step 7: store the slot
    slot = block_id * np.int64(tokens_per_column) + (local - column * tokens_per_column)
    for array, values in zip(slots, np.where(is_valid, slot, PAD_SLOT_ID), strict=True):
        array[first_token:num_tokens] = values


def _columns_in_use(idx_mapping: Ints, filled: Ints) -> Ints:
    """Return [num_groups, num_reqs] int32, batch index -> columns its row fills: none for a dummy."""
    return filled.take(idx_mapping, axis=1) * (idx_mapping >= 0)


def _copy(source: Ints, source_starts: Ints, target: Ints, target_starts: Ints, lengths: Ints) -> None:
    """Copy ranges, as many at a time as MAX_INDEX allows on average."""
    num_together = 1 + MAX_INDEX * lengths.size // int(lengths.sum())
    for first in range(0, lengths.size, num_together):
        some = slice(first, first + num_together)
        target[ranges(target_starts[some], lengths[some])] = source[ranges(source_starts[some], lengths[some])]
