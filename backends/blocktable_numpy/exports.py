"""The kernels of exports, as array expressions.

Batch row i stands for row `rows[i]`; batch rows after the batch and padding entries export nothing. An entry is
what the batch table shows at its place (R10, R11): a kernel block id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blocktable import Layout
from blocktable_numpy.kernels import Ints, is_missing


def count_entries(
    rows: Ints,  # [num_reqs] int64, batch index -> row; -1: padding
    lengths: Ints,  # [num_reqs] int64, batch index -> tokens of its part that this rank holds, 0 for a padding entry
    part_columns: Ints,  # [num_reqs] int64, batch index -> column of its row that its part begins with
    filled: Ints,  # [num_groups, max_num_rows] int32, row -> columns in use
    members: Ints,  # [num_members] int32, groups of the export
    width: int,  # columns that a batch row may export
    tokens_per_column: int,
    kind: str,
    counts: Ints,  # [2 * max_batch + 2] int32, written
    out_lengths: Ints | None,  # [max_batch] int32, written
) -> None:
    """Count what every batch row exports, and keep what it did before."""
    # step 1: which batch row
    max_batch, num_reqs = counts.size // 2 - 1, rows.size
    counts[max_batch : 2 * max_batch] = counts[:max_batch]
    counts[:max_batch] = 0
    # step 2: how many columns its row fills, in every group
    columns = filled[members].min(0)[rows].astype(np.int64) * (rows >= 0)
    if kind == "ring":
        columns = width * (columns > 0)
    columns = np.maximum(np.minimum(columns, width) - part_columns, 0)
    # step 3: how many tokens of it this rank holds
    if out_lengths is not None:
        out_lengths[:num_reqs], out_lengths[num_reqs:] = lengths, 0
    # step 4: store how many entries that makes
    if kind in ("csr", "inverse_map", "block_requests", "ring"):
        columns = np.minimum(-(-lengths // tokens_per_column), columns)
    elif kind == "token_csr":
        columns = np.minimum(lengths, columns * tokens_per_column)
    counts[:num_reqs] = columns


def start_requests(
    num_reqs: int,
    max_batch: int,
    capacity: int,  # entries of each group's indices
    tokens_per_page: int,  # of a kernel block, or 1
    lengths: Ints,  # [max_batch] int32, tokens that this rank holds
    counts: Ints,  # [2 * max_batch + 2] int32, totals written
    indptr: Ints,  # [max_batch + 1] int32, written
    last_page_lens: Ints,  # [max_batch] int32, written
    num_cut: Ints,  # [1] int32, what the capacity has left out is added
) -> None:
    """Write where each request's entries begin, and how many tokens its last page holds."""
    # step 1: which request
    request_counts = counts[:num_reqs]
    # step 2: store how many entries lie before it
    indptr[0] = 0
    ends = request_counts.cumsum(dtype=np.int64)
    indptr[1 : num_reqs + 1] = np.minimum(ends, capacity)
    indptr[num_reqs + 1 :] = indptr[num_reqs]
    # step 3: store how many tokens its last page holds
    pages = np.diff(indptr).astype(np.int64)
    last_page_lens[:] = np.minimum(tokens_per_page, lengths - (pages - 1) * tokens_per_page) * (pages > 0)
    # step 4: remember how many entries there are, and count those that are cut
    counts[2 * max_batch + 1] = counts[2 * max_batch]
    counts[2 * max_batch] = indptr[max_batch]
    cut = max(int(ends[-1]) - capacity, 0) if num_reqs else 0
    num_cut[0] = min(int(num_cut[0]) + cut, np.iinfo(np.int32).max)


def write_indices(
    rows: Ints,  # [num_reqs] int64, batch index -> row; -1: padding
    first_columns: Ints,  # [num_groups, num_reqs] int64, batch index -> columns that the window has passed
    part_columns: Ints,  # [num_reqs] int64, batch index -> column of its row that its part begins with
    row_starts: Ints,  # [num_groups, max_num_rows] int64, row -> its first entry
    arena: Ints,  # [arena.size] int32
    members: Ints,  # [num_members] int32, groups of the export
    null_starts: Ints,  # [num_groups] int64, first kernel block of the null block; -k where there is none
    blocks_per_kv_block: Ints,  # [num_groups] int64
    fills: Sequence[int],  # [num_members], what a place without an entry holds
    tokens_per_column: int,
    kind: str,
    counts: Ints,  # [2 * max_batch + 2] int32
    indptr: Ints,  # [max_batch + 1] int32
    indices: Ints,  # [num_members, capacity] int32, written
) -> None:
    """Write the entries of all requests, one request after another, and the fill over what a larger batch left."""
    # step 1: which entry and group
    total, total_before = counts[-2:]
    for member, group in enumerate(members):
        # step 2: the fill after the last entry
        indices[member, total:total_before] = fills[member]
        # step 3: which request and column
        starts = indptr[: rows.size].astype(np.int64)
        lengths = np.diff(indptr[: rows.size + 1])
        request = np.repeat(np.arange(rows.size), lengths)
        local = np.arange(total) - starts[request]
        if kind == "block_requests":
            indices[member, :total] = request
            continue
        is_token_level = kind == "token_csr"
        column = part_columns[request] + (local // tokens_per_column if is_token_level else local)
        # step 4: store the entry
        entry = arena[row_starts[group, rows[request]] + column].astype(np.int64)
        no_block = is_missing(entry, null_starts[group], blocks_per_kv_block[group])
        no_block |= column < first_columns[group, request]
        if is_token_level:
            entry *= tokens_per_column
        entry[no_block] = fills[member]
        indices[member, :total] = entry + local % tokens_per_column if is_token_level else entry


def write_table(
    rows: Ints,  # [num_reqs] int64, batch index -> row; -1: padding
    first_columns: Ints,  # [num_groups, num_reqs] int64, batch index -> columns that the window has passed
    part_columns: Ints,  # [num_reqs] int64, batch index -> column of its row that its part begins with
    row_starts: Ints,  # [num_groups, max_num_rows] int64, row -> its first entry
    arena: Ints,  # [arena.size] int32
    members: Ints,  # [num_members] int32, groups of the export
    null_starts: Ints,  # [num_groups] int64, first kernel block of the null block; -k where there is none
    blocks_per_kv_block: Ints,  # [num_groups] int64
    fills: Sequence[int],  # [num_members], what a place without an entry holds
    max_batch: int,
    filled: Ints,  # [num_groups, max_num_rows] int32, row -> columns in use
    layout: Layout,
    counts: Ints,  # [2 * max_batch + 2] int32
    table: Ints,  # [num_members, max_batch, width] or, for K and V, [num_members, max_batch, 2, width], written
) -> None:
    """Write the columns in use of every batch row, and the fill after them."""
    # step 1: which batch row and group
    count, before = counts[:max_batch], counts[max_batch : 2 * max_batch]
    for member, group in enumerate(members):
        # step 2: the fill over what an earlier batch left after its columns
        for i in np.flatnonzero(before > count):
            table[member, i, ..., count[i] : before[i]] = fills[member]
        for i in np.flatnonzero(count):
            # step 3: how many of them the window has passed
            start, column = row_starts[group, rows[i]], np.arange(part_columns[i], part_columns[i] + count[i])
            ring = filled[group, rows[i]] if layout.kind == "ring" else column.size + part_columns[i]
            entry = arena[start + column % ring].astype(np.int64)
            no_block = is_missing(entry, null_starts[group], blocks_per_kv_block[group])
            no_block |= column < first_columns[group, i]
            # step 4: store the columns in use
            stored = np.where(no_block, fills[member], entry * layout.entry_scale)
            if layout.kind == "kv_offsets":
                table[member, i, 0, : count[i]], table[member, i, 1, : count[i]] = stored, stored + layout.value_offset
            else:
                table[member, i, : count[i]] = stored


def clear_inverse_map(
    max_batch: int,
    counts: Ints,  # [2 * max_batch + 2] int32
    mapped: Ints,  # [num_members, max_batch, width] int32, blocks of the call before
    fills: Sequence[int],  # [num_members], what a block that is not there has
    inverse_map: Ints,  # [num_members, max_batch, num_kernel_blocks] int32, written
) -> None:
    """Take the blocks of the call before out of every batch row's map."""
    # step 1: which batch row and group
    before = counts[max_batch : 2 * max_batch]
    for i in np.flatnonzero(before):
        for member in range(mapped.shape[0]):
            # step 2: forget the column of every block that it held
            blocks = mapped[member, i, : before[i]]
            inverse_map[member, i, blocks[(blocks >= 0) & (blocks < inverse_map.shape[2])]] = fills[member]


def write_inverse_map(
    rows: Ints,  # [num_reqs] int64, batch index -> row; -1: padding
    first_columns: Ints,  # [num_groups, num_reqs] int64, batch index -> columns that the window has passed
    part_columns: Ints,  # [num_reqs] int64, batch index -> column of its row that its part begins with
    row_starts: Ints,  # [num_groups, max_num_rows] int64, row -> its first entry
    arena: Ints,  # [arena.size] int32
    members: Ints,  # [num_members] int32, groups of the export
    null_starts: Ints,  # [num_groups] int64, first kernel block of the null block; -k where there is none
    blocks_per_kv_block: Ints,  # [num_groups] int64
    max_batch: int,
    counts: Ints,  # [2 * max_batch + 2] int32
    mapped: Ints,  # [num_members, max_batch, width] int32, written
    inverse_map: Ints,  # [num_members, max_batch, num_kernel_blocks] int32, written
) -> None:
    """Write the column of every block that a batch row's tokens lie in."""
    # step 1: which batch row and group
    count = counts[:max_batch]
    for i in np.flatnonzero(count):
        for member, group in enumerate(members):
            # step 2: how many of its columns the window has passed
            start = row_starts[group, rows[i]] + part_columns[i]
            block = arena[start : start + count[i]].copy()
            no_block = is_missing(block, null_starts[group], blocks_per_kv_block[group])
            no_block[: max(first_columns[group, i] - part_columns[i], 0)] = True
            block[no_block] = -1
            # step 3: remember its blocks
            mapped[member, i, : count[i]] = block
            # step 4: store the column of each block, the last one of a block that stands there twice
            column = np.flatnonzero((block >= 0) & (block < inverse_map.shape[2]))
            np.maximum.at(inverse_map[member, i], block[column], column + part_columns[i])


def gather_state_indices(
    rows: Ints,  # [num_reqs] int64, batch index -> row; -1: padding
    seq_lens: Ints | None,  # [num_reqs] int32, batch index -> tokens of the sequence
    filled: Ints,  # [num_groups, max_num_rows] int32, row -> columns in use
    row_starts: Ints,  # [num_groups, max_num_rows] int64, row -> its first entry
    arena: Ints,  # [arena.size] int32
    members: Ints,  # [num_members] int32, groups of the export
    null_starts: Ints,  # [num_groups] int64, first kernel block of the null block; -k where there is none
    blocks_per_kv_block: Ints,  # [num_groups] int64
    fills: Sequence[int],  # [num_members], what a place without a state holds
    tokens_per_column: int,
    layout: Layout,
    states: Ints,  # [num_members, max_batch, num_columns] of the layout's dtype, written
) -> None:
    """Write the blocks that hold every batch row's states."""
    # step 1: which batch row, group and place
    place = np.arange(layout.num_columns)
    for member, group in enumerate(members):
        states[member, rows.size :] = fills[member]
        # step 2: which column
        columns = filled[group, rows].astype(np.int64) * (rows >= 0)
        first = np.zeros_like(columns)
        if layout.state_columns == "last":
            first = np.maximum(0, columns - layout.num_columns)
        elif layout.state_columns == "aligned":
            assert seq_lens is not None  # the core's promise
            first = np.maximum(0, seq_lens.astype(np.int64) - 1) // tokens_per_column
        column = first[:, None] + place
        # step 3: store the block, or the fill where there is none
        is_filled = column < columns[:, None]
        block = arena[row_starts[group, rows][:, None] + np.where(is_filled, column, 0)]
        is_filled &= ~is_missing(block, null_starts[group], blocks_per_kv_block[group])
        states[member, : rows.size] = np.where(is_filled, block, fills[member])


def map_requests(
    rows: Ints,  # [num_reqs] int64, batch index -> row; -1: padding
    query_start_loc: Ints,  # [num_reqs + 1] int32, first token of each request
    indptr: Ints,  # [max_batch + 1] int32, written
    requests: Ints,  # [num_members, capacity] int32, written
) -> None:
    """Write the request of every token, and where each request's tokens begin."""
    # step 1: store where each request begins, and the last start over the padding
    capacity = requests.shape[1]
    starts = np.clip(query_start_loc, 0, capacity)
    indptr[: starts.size], indptr[starts.size :] = starts, starts[-1]
    # step 2: store each token's request, -1 for tokens of padding entries and of no request
    spans = np.diff(np.maximum.accumulate(starts))
    requests[:] = -1
    requests[:, starts[0] : starts[0] + spans.sum()] = np.repeat(np.where(rows >= 0, np.arange(rows.size), -1), spans)


def map_positions(
    rows: Ints,  # [num_tokens] int64, token -> row
    positions: Ints,  # [num_tokens, num_positions] int32
    filled: Ints,  # [max_num_rows] int32, row -> columns in use
    table: Ints,  # [max_num_rows, width] int32, the group's rows
    tokens_per_column: int,
    blocks_per_kv_block: int,
    is_ring: bool,
    null_is_pad: bool,
    null_start: int,  # first kernel block of the null block; -blocks_per_kv_block where there is none
    world_size: int,  # 1 for a replicated group
    rank: int,
    interleave_size: int,
    slots: Ints,  # [num_tokens, num_positions] int64 or int32, written
) -> None:
    """Write the slot of every position, -1 where it has none."""
    # step 1: which token and position
    position = positions.astype(np.int64)
    is_valid = position >= 0
    # step 2: which row, and how many columns it fills
    is_row = (rows >= 0) & (rows < filled.size)
    row = np.where(is_row, rows, 0)[:, None]
    columns = np.where(is_row[:, None], filled[row], 0).astype(np.int64)
    # step 3: whose token it is, and its index among this rank's tokens
    local = position
    if world_size > 1:
        turn = position // interleave_size
        is_valid &= turn % world_size == rank
        local = turn // world_size * interleave_size + (position - turn * interleave_size)
    if is_ring:
        local = position % np.maximum(columns * tokens_per_column, 1)
    # step 4: which column, and whether the row fills it
    column = local // tokens_per_column
    is_valid &= column < columns
    # step 5: which kernel block
    block_id = table[row, np.where(is_valid, column, 0)]
    if null_is_pad:
        is_valid &= ~is_missing(block_id, null_start, blocks_per_kv_block)
    # step 6: store the slot
    slots[...] = np.where(is_valid, block_id * np.int64(tokens_per_column) + local % tokens_per_column, -1)
