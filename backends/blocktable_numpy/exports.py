"""The kernels of exports, as array expressions.

Batch row i stands for row `rows[i]`; every batch row behind the batch and every dummy exports nothing. An entry is
what the batch table shows at its place (R10, R11): a kernel block id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blocktable import Layout
from blocktable_numpy.kernels import Ints, is_missing


def count_entries(
    rows: Ints,  # [num_reqs] int64, batch index -> row; -1: dummy
    lengths: Ints,  # [num_reqs] int64, batch index -> tokens that this rank holds, 0 for a dummy
    filled: Ints,  # [num_groups, max_num_rows] int32, row -> columns in use
    members: Ints,  # [num_members] int32, groups of the export
    width: int,  # columns that a batch row may export
    tokens_per_column: int,
    kind: str,
    counts: Ints,  # [2 * max_num_reqs + 2] int32, written
    out_lengths: Ints | None,  # [max_num_reqs] int32, written
) -> None:
    """Count what every batch row exports, and keep what it did before."""
    # step 1: which batch row
    max_num_reqs, num_reqs = counts.size // 2 - 1, rows.size
    counts[max_num_reqs : 2 * max_num_reqs] = counts[:max_num_reqs]
    counts[:max_num_reqs] = 0
    # step 2: how many columns its row fills, in every group
    columns = np.minimum(filled[members].min(0)[rows], width).astype(np.int64) * (rows >= 0)
    # step 3: how many tokens of it this rank holds
    if out_lengths is not None:
        out_lengths[:num_reqs], out_lengths[num_reqs:] = lengths, 0
    # step 4: store how many entries that makes
    if kind in ("csr", "inverse_map"):
        columns = np.minimum(-(-lengths // tokens_per_column), columns)
    elif kind == "token_csr":
        columns = np.minimum(lengths, columns * tokens_per_column)
    counts[:num_reqs] = columns


def start_requests(
    num_reqs: int,
    max_num_reqs: int,
    capacity: int,  # entries of each group's indices
    tokens_per_page: int,  # of a kernel block, or 1
    lengths: Ints,  # [max_num_reqs] int32, tokens that this rank holds
    counts: Ints,  # [2 * max_num_reqs + 2] int32, totals written
    indptr: Ints,  # [max_num_reqs + 1] int32, written
    last_page_lens: Ints,  # [max_num_reqs] int32, written
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
    counts[2 * max_num_reqs + 1] = counts[2 * max_num_reqs]
    counts[2 * max_num_reqs] = indptr[max_num_reqs]
    cut = max(int(ends[-1]) - capacity, 0) if num_reqs else 0
    num_cut[0] = min(int(num_cut[0]) + cut, np.iinfo(np.int32).max)


def write_indices(
    rows: Ints,  # [num_reqs] int64, batch index -> row; -1: dummy
    first_columns: Ints,  # [num_groups, num_reqs] int64, batch index -> columns that the window has left behind
    row_starts: Ints,  # [num_groups, max_num_rows] int64, row -> its first entry
    arena: Ints,  # [arena.size] int32
    members: Ints,  # [num_members] int32, groups of the export
    null_starts: Ints,  # [num_groups] int64, first kernel block of the null block; -k where there is none
    blocks_per_kv_block: Ints,  # [num_groups] int64
    fills: Sequence[int],  # [num_members], what a place without an entry holds
    tokens_per_column: int,
    is_token_level: bool,
    counts: Ints,  # [2 * max_num_reqs + 2] int32
    indptr: Ints,  # [max_num_reqs + 1] int32
    indices: Ints,  # [num_members, capacity] int32, written
) -> None:
    """Write the entries of all requests, one request after another, and the fill over those of a larger batch before."""
    # step 1: which entry and group
    total, total_before = counts[-2:]
    for member, group in enumerate(members):
        # step 2: the fill behind the last entry
        indices[member, total:total_before] = fills[member]
        # step 3: which request and column
        starts = indptr[: rows.size].astype(np.int64)
        lengths = np.diff(indptr[: rows.size + 1])
        request = np.repeat(np.arange(rows.size), lengths)
        local = np.arange(total) - starts[request]
        column = local // tokens_per_column if is_token_level else local
        # step 4: store the entry
        entry = arena[row_starts[group, rows[request]] + column].astype(np.int64)
        no_block = is_missing(entry, null_starts[group], blocks_per_kv_block[group])
        no_block |= column < first_columns[group, request]
        if is_token_level:
            entry *= tokens_per_column
        entry[no_block] = fills[member]
        indices[member, :total] = entry + local % tokens_per_column if is_token_level else entry


def write_table(
    rows: Ints,  # [num_reqs] int64, batch index -> row; -1: dummy
    first_columns: Ints,  # [num_groups, num_reqs] int64, batch index -> columns that the window has left behind
    row_starts: Ints,  # [num_groups, max_num_rows] int64, row -> its first entry
    arena: Ints,  # [arena.size] int32
    members: Ints,  # [num_members] int32, groups of the export
    null_starts: Ints,  # [num_groups] int64, first kernel block of the null block; -k where there is none
    blocks_per_kv_block: Ints,  # [num_groups] int64
    fills: Sequence[int],  # [num_members], what a place without an entry holds
    max_num_reqs: int,
    layout: Layout,
    counts: Ints,  # [2 * max_num_reqs + 2] int32
    table: Ints,  # [num_members, max_num_reqs, width] or, for K and V, [num_members, max_num_reqs, 2, width], written
) -> None:
    """Write the columns in use of every batch row, and the fill behind them."""
    # step 1: which batch row and group
    count, before = counts[:max_num_reqs], counts[max_num_reqs : 2 * max_num_reqs]
    for member, group in enumerate(members):
        # step 2: the fill over what an earlier batch left behind its columns
        for i in np.flatnonzero(before > count):
            table[member, i, ..., count[i] : before[i]] = fills[member]
        for i in np.flatnonzero(count):
            # step 3: how many of them the window has left behind
            start = row_starts[group, rows[i]]
            entry = arena[start : start + count[i]].astype(np.int64)
            no_block = is_missing(entry, null_starts[group], blocks_per_kv_block[group])
            no_block[: first_columns[group, i]] = True
            # step 4: store the columns in use
            stored = np.where(no_block, fills[member], entry * layout.entry_scale)
            if layout.kind == "kv_offsets":
                table[member, i, 0, : count[i]], table[member, i, 1, : count[i]] = stored, stored + layout.value_offset
            else:
                table[member, i, : count[i]] = stored


def clear_inverse_map(
    max_num_reqs: int,
    counts: Ints,  # [2 * max_num_reqs + 2] int32
    mapped: Ints,  # [num_members, max_num_reqs, width] int32, blocks of the call before
    fills: Sequence[int],  # [num_members], what a block that is not there has
    inverse_map: Ints,  # [num_members, max_num_reqs, num_kernel_blocks] int32, written
) -> None:
    """Take the blocks of the call before out of every batch row's map."""
    # step 1: which batch row and group
    before = counts[max_num_reqs : 2 * max_num_reqs]
    for i in np.flatnonzero(before):
        for member in range(mapped.shape[0]):
            # step 2: forget the column of every block that it held
            blocks = mapped[member, i, : before[i]]
            inverse_map[member, i, blocks[(blocks >= 0) & (blocks < inverse_map.shape[2])]] = fills[member]


def write_inverse_map(
    rows: Ints,  # [num_reqs] int64, batch index -> row; -1: dummy
    first_columns: Ints,  # [num_groups, num_reqs] int64, batch index -> columns that the window has left behind
    row_starts: Ints,  # [num_groups, max_num_rows] int64, row -> its first entry
    arena: Ints,  # [arena.size] int32
    members: Ints,  # [num_members] int32, groups of the export
    null_starts: Ints,  # [num_groups] int64, first kernel block of the null block; -k where there is none
    blocks_per_kv_block: Ints,  # [num_groups] int64
    max_num_reqs: int,
    counts: Ints,  # [2 * max_num_reqs + 2] int32
    mapped: Ints,  # [num_members, max_num_reqs, width] int32, written
    inverse_map: Ints,  # [num_members, max_num_reqs, num_kernel_blocks] int32, written
) -> None:
    """Write the column of every block that a batch row's tokens lie in."""
    # step 1: which batch row and group
    count = counts[:max_num_reqs]
    for i in np.flatnonzero(count):
        for member, group in enumerate(members):
            # step 2: how many of its columns the window has left behind
            start = row_starts[group, rows[i]]
            block = arena[start : start + count[i]].copy()
            no_block = is_missing(block, null_starts[group], blocks_per_kv_block[group])
            no_block[: first_columns[group, i]] = True
            block[no_block] = -1
            # step 3: remember its blocks
            mapped[member, i, : count[i]] = block
            # step 4: store the column of each block, the last one of a block that stands there twice
            column = np.flatnonzero((block >= 0) & (block < inverse_map.shape[2]))
            np.maximum.at(inverse_map[member, i], block[column], column)


def gather_state_indices(
    rows: Ints,  # [num_reqs] int64, batch index -> row; -1: dummy
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
    states: Ints,  # [num_members, max_num_reqs, num_columns] of the layout's dtype, written
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
