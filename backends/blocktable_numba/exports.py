"""The export kernels in Numba: a batch's rows as attention kernels read them. Loops are as in kernels.py.

All but the last two begin with the same arguments: the batch, and the groups that are exported together ("members"),
which share one geometry. counts is [2 * max_batch + 2] int32: entries of each batch row; those of the call before; all;
all of the call before. Shapes that no line gives are those of kernels.py; members is [num_members] int32, groups.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from blocktable.device import INT32_MAX
from blocktable_numba.common import (
    BLOCKS_PER_KV_BLOCK,
    FILLER,
    NULL_IS_PAD,
    NULL_START,
    NUM_FIELDS,
    SLIDING_WINDOW,
    SLOT_MODE,
    SLOT_MODE_RING,
    TABLE_START,
    TOKENS_PER_COLUMN,
    WIDTH,
    WORLD_SIZE,
    advance,
    atomic,
    atomic_add,
    device_function,
    divide,
    is_missing,
    local_length,
    row_of,
)
from blocktable_numba.kernels import local_index, request_of

COUNT_BLOCKS = 1  # an entry is a kernel block that holds tokens; with 0 it is a column,
COUNT_TOKENS = 2  # with 2 a token,
COUNT_RING = 3  # with 3 such a block of a ring over true positions
WRITE_REQUESTS = 4
KV_ROWS = 1
RING = 2
STATE_LAST = 1
STATE_ALIGNED = 2


@device_function
def held_of(groups, group, tokens, cut, i, row):
    """How many of the first `tokens[i] - cut` tokens of a batch row this rank holds; none for a padding entry."""
    held = max(np.int64(tokens[i]) - cut, 0) if row >= 0 else np.int64(0)
    return local_length(groups, group, held) if groups[group + WORLD_SIZE] > 1 else held


@device_function
def part_of(groups, group, first_tokens, i, row):
    """Column of its row that a batch row's part begins with; 0 for a padding entry."""
    return divide(held_of(groups, group, first_tokens, 0, i, row), groups[group + TOKENS_PER_COLUMN])


@device_function
def first_column_of(groups, group, num_computed_tokens, i, row):
    """Columns of a batch row that the window has passed."""
    sliding_window = groups[group + SLIDING_WINDOW]
    if sliding_window == 0:
        return np.int64(0)
    left = held_of(groups, group, num_computed_tokens, sliding_window - 1, i, row)
    return divide(left, groups[group + TOKENS_PER_COLUMN])


@device_function
def filled_columns(groups, group, g, arena, max_num_rows, row):
    """Columns that a row fills; none for a padding entry."""
    return min(groups[group + WIDTH], np.int64(arena[np.int64(g) * max_num_rows + row])) if row >= 0 else np.int64(0)


@device_function
def block_of(groups, group, arena, table_row, first_column, filled, column):
    """Kernel block in a column of a row; -1 for a missing one, before the window, and after what the row fills."""
    block_id = np.int64(-1)
    if column >= first_column and column < filled:
        block_id = np.int64(arena[table_row + column])
        if is_missing(block_id, groups[group + NULL_START], groups[group + BLOCKS_PER_KV_BLOCK]):
            block_id = np.int64(-1)
    return block_id


@device_function
def fill_of(groups, group, null, entry_scale):
    """What a place without an entry holds: the layout's null, or where it has none (0) a valid entry."""
    return null if null < 0 else max(groups[group + FILLER], 0) * entry_scale


atomic_max, atomic_unsigned_min = map(atomic, ("max", "umin"), (np.int32, np.uint32))


@cuda.jit
def count_entries(
    idx_mapping,  # [num_reqs] int32, batch index -> row
    num_computed_tokens,  # [num_reqs] int32, batch index -> tokens
    seq_lens,  # [num_reqs] int32, batch index -> tokens
    first_tokens,  # [num_reqs] int32, batch index -> token of its row that its part begins with
    num_reqs, max_batch, max_num_rows, groups, members, num_members, arena,
    width,  # columns that a row may export
    unit,  # 0, COUNT_BLOCKS, COUNT_TOKENS or COUNT_RING
    counts,  # [2 * max_batch + 2] int32, written
    lengths,  # [max_batch] int32, written
    num_cut,  # [1] int32, parts that begin inside a column are added
):  # fmt: skip
    """Count what every batch row exports, and keep what it did before."""
    group = members[0] * NUM_FIELDS
    tokens = groups[group + TOKENS_PER_COLUMN]
    # step 1: which batch row
    i = cuda.grid(1)
    while i < max_batch:
        row = row_of(idx_mapping, i, num_reqs, max_num_rows)
        # step 2: how many columns its row fills, in every group
        columns, m = np.int64(width), 0
        while m < num_members:
            columns = min(columns, filled_columns(groups, group, members[m], arena, max_num_rows, row))
            m = advance(m, 1)
        if unit == COUNT_RING and columns > 0:
            columns = np.int64(width)
        first = held_of(groups, group, first_tokens, 0, i, row)
        part = divide(first, tokens)
        columns = max(columns - part, 0)
        if first > part * tokens:
            atomic_add(num_cut, 0, 1)
            atomic_unsigned_min(num_cut, 0, INT32_MAX)
        # step 3: how many tokens of it this rank holds
        length = max(held_of(groups, group, seq_lens, 0, i, row) - part * tokens, 0)
        lengths[i] = length
        # step 4: store how many entries that makes
        count = columns
        if unit == COUNT_TOKENS:
            count = min(columns * tokens, length)
        elif unit != 0:
            count = min(columns, divide(length + tokens - 1, tokens))
        counts[max_batch + i] = counts[i]
        counts[i] = count
        i = advance(i, cuda.gridsize(1))


@cuda.jit
def start_requests(
    idx_mapping, num_computed_tokens, seq_lens, first_tokens, num_reqs, max_batch, max_num_rows, groups,
    members, num_members, arena,  # as above
    unit, capacity,  # COUNT_BLOCKS or COUNT_TOKENS; entries of a member's indices
    lengths,  # [max_batch] int32
    counts,  # [2 * max_batch + 2] int32, the last two written
    indptr,  # [max_batch + 1] int32, written
    last_page_lens,  # [max_batch] int32, written
    num_cut,  # [1] int32, what the capacity has left out is added
):  # fmt: skip
    """Write where each request's entries begin, and how many tokens its last page holds."""
    # step 1: which request
    i = cuda.grid(1)
    while i <= max_batch:
        # step 2: store how many entries lie before it
        before = np.int64(0)
        j = 0
        while j < min(i, num_reqs):
            before += counts[j]
            j = advance(j, 1)
        start = min(before, np.int64(capacity))
        indptr[i] = start
        if i < max_batch:
            # step 3: store how many tokens its last page holds
            num_pages = min(before + counts[i], np.int64(capacity)) - start
            tokens = np.int64(1) if unit == COUNT_TOKENS else groups[members[0] * NUM_FIELDS + TOKENS_PER_COLUMN]
            last_page_lens[i] = min(tokens, lengths[i] - (num_pages - 1) * tokens) if num_pages > 0 else 0
        else:
            # step 4: remember how many entries there are, and count those that are cut
            counts[2 * max_batch + 1] = counts[2 * max_batch]
            counts[2 * max_batch] = start
            num_cut[0] = min(num_cut[0] + (before - start), np.int64(INT32_MAX))
        i = advance(i, cuda.gridsize(1))


@cuda.jit
def write_indices(
    idx_mapping, num_computed_tokens, seq_lens, first_tokens, num_reqs, max_batch, max_num_rows, groups,
    members, num_members, arena,  # as above
    unit, capacity,  # COUNT_BLOCKS, COUNT_TOKENS or WRITE_REQUESTS; as above
    counts,  # [2 * max_batch + 2] int32
    indptr,  # [max_batch + 1] int32
    entries,  # [num_members, capacity] int32, written
):  # fmt: skip
    """Write the entries of all requests, one request after another, and the fill over what a larger batch left."""
    total = counts[2 * max_batch]
    end = min(capacity, max(total, counts[2 * max_batch + 1]))
    # step 1: which entry and group
    m = cuda.blockIdx.y
    while m < num_members:
        g = members[m]
        group = g * NUM_FIELDS
        tokens = groups[group + TOKENS_PER_COLUMN] if unit == COUNT_TOKENS else np.int64(1)
        fill = fill_of(groups, group, -1 if unit == WRITE_REQUESTS else 0, tokens)
        entry = cuda.grid(1)
        while entry < end:
            # step 2: the fill after the last entry
            index = fill
            if entry < total:
                # step 3: which request and column
                i = request_of(indptr, max_batch, entry)
                row = row_of(idx_mapping, i, num_reqs, max_num_rows)
                place = np.int64(entry - indptr[i])
                turn = divide(place, tokens)
                column = part_of(groups, group, first_tokens, i, row) + turn
                first_column = first_column_of(groups, group, num_computed_tokens, i, row)
                filled = filled_columns(groups, group, g, arena, max_num_rows, row)
                table_row = groups[group + TABLE_START] + row * groups[group + WIDTH]
                block_id = block_of(groups, group, arena, table_row, first_column, filled, column)
                index = (fill if block_id < 0 else block_id * tokens) + (place - turn * tokens)
                if unit == WRITE_REQUESTS:
                    index = i
            # step 4: store the entry
            entries[np.int64(m) * capacity + entry] = index
            entry = advance(entry, cuda.gridsize(1))
        m = advance(m, cuda.gridDim.y)


@cuda.jit
def write_table(
    idx_mapping, num_computed_tokens, seq_lens, first_tokens, num_reqs, max_batch, max_num_rows, groups,
    members, num_members, arena,  # as above
    width,  # columns of a row of the table
    counts,  # [2 * max_batch + 2] int32
    null, entry_scale,  # null is -1, or 0 where the layout has none
    form,  # 0; KV_ROWS: a row of V offsets follows each row of K offsets; RING: true positions of a ring
    value_offset,  # from a K offset to its V offset
    entries,  # [num_members, max_batch, rows, width] of the layout's dtype, written
):  # fmt: skip
    """Write the columns in use of every batch row, and the fill after them."""
    # step 1: which batch row and group
    m = cuda.blockIdx.y
    while m < num_members:
        g = members[m]
        group = g * NUM_FIELDS
        tokens = groups[group + TOKENS_PER_COLUMN]
        fill = fill_of(groups, group, null, entry_scale)
        i = cuda.blockIdx.x
        while i < max_batch:
            count = min(width, counts[i])
            before = min(width, counts[max_batch + i])
            start = (np.int64(m) * max_batch + i) * (2 if form == KV_ROWS else 1) * width
            # step 2: the fill over what an earlier batch left after its columns
            column = count + cuda.threadIdx.x
            while column < before:
                entries[start + column] = fill
                if form == KV_ROWS:
                    entries[start + width + column] = fill
                column = advance(column, cuda.blockDim.x)
            # step 3: how many of them the window has passed
            row = row_of(idx_mapping, i, num_reqs, max_num_rows)
            first_column = first_column_of(groups, group, num_computed_tokens, i, row)
            filled = filled_columns(groups, group, g, arena, max_num_rows, row)
            if form == RING:
                overwritten = max(held_of(groups, group, seq_lens, 0, i, row) - filled * tokens, 0)
                first_column = max(first_column, divide(overwritten, tokens))
            part = part_of(groups, group, first_tokens, i, row)
            table_row = groups[group + TABLE_START] + row * groups[group + WIDTH]
            # step 4: store the columns in use
            place = cuda.threadIdx.x
            while place < count:
                column = part + place
                turned = divide(column, max(filled, 1)) * filled if form == RING else np.int64(0)
                block_id = block_of(groups, group, arena, table_row, first_column - turned, filled, column - turned)
                entry = fill if block_id < 0 else block_id * entry_scale
                entries[start + place] = entry
                if form == KV_ROWS:
                    entries[start + width + place] = entry + value_offset
                place = advance(place, cuda.blockDim.x)
            i = advance(i, cuda.gridDim.x)
        m = advance(m, cuda.gridDim.y)


@cuda.jit
def clear_inverse_map(
    idx_mapping, num_computed_tokens, seq_lens, first_tokens, num_reqs, max_batch, max_num_rows, groups,
    members, num_members, arena, width, num_kernel_blocks,  # as above
    counts,  # [2 * max_batch + 2] int32
    mapped,  # [num_members, max_batch, width] int32, blocks that the call before mapped
    null, entries,  # [num_members, max_batch, num_kernel_blocks] int32, written
):  # fmt: skip
    """Take the blocks of the call before out of every batch row's map."""
    # step 1: which batch row and group
    m = cuda.blockIdx.y
    while m < num_members:
        i = cuda.blockIdx.x
        while i < max_batch:
            before = min(width, counts[max_batch + i])
            cell = np.int64(m) * max_batch + i
            # step 2: forget the column of every block that it held
            column = cuda.threadIdx.x
            while column < before:
                block_id = mapped[cell * width + column]
                if block_id >= 0 and block_id < num_kernel_blocks:
                    entries[cell * num_kernel_blocks + block_id] = null
                column = advance(column, cuda.blockDim.x)
            i = advance(i, cuda.gridDim.x)
        m = advance(m, cuda.gridDim.y)


@cuda.jit
def write_inverse_map(
    idx_mapping, num_computed_tokens, seq_lens, first_tokens, num_reqs, max_batch, max_num_rows, groups,
    members, num_members, arena, width, num_kernel_blocks,  # as above
    counts,  # [2 * max_batch + 2] int32
    mapped,  # [num_members, max_batch, width] int32, written
    entries,  # [num_members, max_batch, num_kernel_blocks] int32, written
):  # fmt: skip
    """Write the column of every block that a batch row's tokens lie in."""
    # step 1: which batch row and group
    m = cuda.blockIdx.y
    while m < num_members:
        g = members[m]
        group = g * NUM_FIELDS
        i = cuda.blockIdx.x
        while i < max_batch:
            count = min(width, counts[i])
            cell = np.int64(m) * max_batch + i
            # step 2: how many of its columns the window has passed
            row = row_of(idx_mapping, i, num_reqs, max_num_rows)
            first_column = first_column_of(groups, group, num_computed_tokens, i, row)
            filled = filled_columns(groups, group, g, arena, max_num_rows, row)
            table_row = groups[group + TABLE_START] + row * groups[group + WIDTH]
            part = part_of(groups, group, first_tokens, i, row)
            place = cuda.threadIdx.x
            while place < count:
                # step 3: remember its blocks
                column = part + place
                block_id = block_of(groups, group, arena, table_row, first_column, filled, column)
                mapped[cell * width + place] = block_id
                # step 4: store the column of each block, the last one of a block that stands there twice
                if block_id >= 0 and block_id < num_kernel_blocks:
                    atomic_max(entries, cell * num_kernel_blocks + block_id, column)
                place = advance(place, cuda.blockDim.x)
            i = advance(i, cuda.gridDim.x)
        m = advance(m, cuda.gridDim.y)


@cuda.jit
def gather_state_indices(
    idx_mapping, num_computed_tokens, seq_lens, first_tokens, num_reqs, max_batch, max_num_rows, groups,
    members, num_members, arena,  # as above
    state_columns, num_columns, null,  # 0: the first ones, STATE_LAST or STATE_ALIGNED
    entries,  # [num_members, max_batch, num_columns] of the layout's dtype, written
):  # fmt: skip
    """Write the blocks that hold every batch row's states."""
    num_cells = np.int64(max_batch) * num_columns
    # step 1: which batch row, group and place
    m = cuda.blockIdx.y
    while m < num_members:
        g = members[m]
        group = g * NUM_FIELDS
        fill = fill_of(groups, group, null, 1)
        cell = cuda.grid(1)
        while cell < num_cells:
            i = divide(cell, num_columns)
            row = row_of(idx_mapping, i, num_reqs, max_num_rows)
            # step 2: which column
            filled = filled_columns(groups, group, g, arena, max_num_rows, row)
            first = np.int64(0)
            if state_columns == STATE_LAST:
                first = max(filled - num_columns, 0)
            if row >= 0 and state_columns == STATE_ALIGNED:
                first = divide(max(np.int64(seq_lens[i]) - 1, 0), groups[group + TOKENS_PER_COLUMN])
            column = first + (cell - i * num_columns)
            # step 3: store the block, or the fill where there is none
            table_row = groups[group + TABLE_START] + row * groups[group + WIDTH]
            block_id = block_of(groups, group, arena, table_row, 0, filled, column)
            entries[m * num_cells + cell] = fill if block_id < 0 else block_id
            cell = advance(cell, cuda.gridsize(1))
        m = advance(m, cuda.gridDim.y)


@cuda.jit
def map_requests(
    idx_mapping,  # as above
    query_start_loc,  # [num_reqs + 1] int32, first token of each request
    num_reqs, max_batch, max_num_rows, num_members, capacity, indptr, entries,  # as above
):  # fmt: skip
    """Write the request of every token, and where each request's tokens begin."""
    # step 1: store where each request begins, and the last start over the padding
    i = cuda.grid(1)
    while i <= max_batch:
        indptr[i] = min(max(query_start_loc[min(i, num_reqs)], 0), capacity)
        i = advance(i, cuda.gridsize(1))
    # step 2: store each token's request, -1 for tokens of padding entries and of no request
    m = cuda.blockIdx.y
    while m < num_members:
        token = cuda.grid(1)
        while token < capacity:
            request = request_of(query_start_loc, num_reqs, token)
            row = row_of(idx_mapping, max(request, 0), num_reqs, max_num_rows)
            is_real = row >= 0 and token < query_start_loc[num_reqs]
            entries[np.int64(m) * capacity + token] = request if is_real else -1
            token = advance(token, cuda.gridsize(1))
        m = advance(m, cuda.gridDim.y)


@cuda.jit
def map_positions(
    rows,  # [num_tokens] int32, token -> row
    positions,  # [num_tokens, num_positions] int32
    num_tokens, num_positions, max_num_rows, groups, g, arena,  # as above; g is the group
    slots,  # [num_tokens, num_positions] of the slots' dtype, written
):  # fmt: skip
    """Write the slot of every position, -1 where it has none."""
    group = np.int64(g) * NUM_FIELDS
    tokens = groups[group + TOKENS_PER_COLUMN]
    # step 1: which token and position
    cell = cuda.grid(1)
    while cell < np.int64(num_tokens) * num_positions:
        position = np.int64(positions[cell])
        # step 2: which row, and how many columns it fills
        row = row_of(rows, divide(cell, num_positions), num_tokens, max_num_rows)
        columns = filled_columns(groups, group, g, arena, max_num_rows, row)
        # step 3: whose token it is, and its index among this rank's tokens
        is_valid = position >= 0
        local = max(position, 0)
        if groups[group + WORLD_SIZE] > 1:
            is_valid, local = local_index(groups, group, is_valid, local)
        if groups[group + SLOT_MODE] == SLOT_MODE_RING:
            ring = max(columns * tokens, 1)
            local -= divide(local, ring) * ring
        # step 4: which column, and whether the row fills it
        column = divide(local, tokens)
        slot = np.int64(-1)
        if is_valid and column < columns:
            # step 5: which kernel block
            block_id = np.int64(arena[groups[group + TABLE_START] + row * groups[group + WIDTH] + column])
            is_none = is_missing(block_id, groups[group + NULL_START], groups[group + BLOCKS_PER_KV_BLOCK])
            if not (groups[group + NULL_IS_PAD] and is_none):
                slot = block_id * tokens + (local - column * tokens)
        # step 6: store the slot
        slots[cell] = slot
        cell = advance(cell, cuda.gridsize(1))
