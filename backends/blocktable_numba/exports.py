"""The export kernels in Numba: a batch's rows as attention kernels read them. Loops are as in kernels.py.

All begin with the same arguments: the batch, and the groups that are exported together ("members"), which share one
geometry. counts is [2 * max_num_reqs + 2] int32: entries of each batch row; those of the call before; all; all of the
call before.
"""

from __future__ import annotations

import numpy as np
from numba import cuda, types
from numba.cuda.core import config

from blocktable.device import INT32_MAX
from blocktable_numba.kernels import (
    BLOCKS_PER_KV_BLOCK,
    FILLER,
    NULL_START,
    NUM_FIELDS,
    SLIDING_WINDOW,
    TABLE_START,
    TOKENS_PER_COLUMN,
    WIDTH,
    WORLD_SIZE,
    advance,
    device_function,
    divide,
    is_missing,
    local_length,
    row_of,
)

COUNT_BLOCKS = 1  # an entry is a kernel block that holds tokens; with 0 it is a column,
COUNT_TOKENS = 2  # with 2 a token
STATE_LAST = 1
STATE_ALIGNED = 2


@device_function
def length_of(groups, group, seq_lens, i, row):
    """Tokens of a batch row that this rank holds; none for a dummy."""
    length = np.int64(0)
    if row >= 0:
        length = max(np.int64(seq_lens[i]), 0)
    if groups[group + WORLD_SIZE] > 1:
        length = local_length(groups, group, length)
    return length


@device_function
def first_column_of(groups, group, num_computed_tokens, i, row):
    """Columns of a batch row that the window has left behind."""
    first = np.int64(0)
    sliding_window = groups[group + SLIDING_WINDOW]
    if sliding_window and row >= 0:
        first = max(num_computed_tokens[i] - sliding_window + 1, 0)
        if groups[group + WORLD_SIZE] > 1:
            first = local_length(groups, group, first)
        first = divide(first, groups[group + TOKENS_PER_COLUMN])
    return first


@device_function
def filled_columns(groups, group, g, arena, max_num_rows, row):
    """Columns that a row fills; none for a dummy."""
    filled = np.int64(0)
    if row >= 0:
        filled = min(groups[group + WIDTH], np.int64(arena[np.int64(g) * max_num_rows + row]))
    return filled


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


if config.ENABLE_CUDASIM:

    def atomic_max(array, place, value):
        """array[place] = max(array[place], value), of all threads that do so."""
        cuda.atomic.max(array, place, value)

else:
    from numba.cuda.extending import intrinsic  # the simulator has none

    @intrinsic
    def atomic_max(typing_context, array, place, value):
        """array[place] = max(array[place], value), of all threads that do so.

        Numba's own wants an array, where the kernels have a pointer.
        """

        def generate(context, builder, signature, arguments):
            pointer, index, new = arguments
            builder.atomic_rmw("max", builder.gep(pointer, [index]), new, "monotonic")
            return context.get_dummy_value()

        return types.void(types.CPointer(types.int32), types.int64, types.int32), generate


@cuda.jit
def count_entries(
    idx_mapping,  # [num_reqs] int32, batch index -> row
    num_computed_tokens,  # [num_reqs] int32, batch index -> tokens
    seq_lens,  # [num_reqs] int32, batch index -> tokens
    num_reqs,
    max_num_reqs,
    max_num_rows,
    groups,  # [num_groups, NUM_FIELDS] int64
    members,  # [num_members] int32, groups
    num_members,
    arena,  # [arena.size] int32
    width,  # columns that a row may export
    unit,  # 0, COUNT_BLOCKS or COUNT_TOKENS
    counts,  # [2 * max_num_reqs + 2] int32, written
    lengths,  # [max_num_reqs] int32, written
):
    """Count what every batch row exports, and keep what it did before."""
    group = members[0] * NUM_FIELDS
    # step 1: which batch row
    i = cuda.grid(1)
    while i < max_num_reqs:
        row = row_of(idx_mapping, i, num_reqs, max_num_rows)
        # step 2: how many columns its row fills, in every group
        columns = np.int64(0)
        if row >= 0:
            columns = np.int64(width)
            m = 0
            while m < num_members:
                columns = min(columns, np.int64(arena[np.int64(members[m]) * max_num_rows + row]))
                m = advance(m, 1)
        # step 3: how many tokens of it this rank holds
        length = length_of(groups, group, seq_lens, i, row)
        lengths[i] = length
        # step 4: store how many entries that makes
        tokens = groups[group + TOKENS_PER_COLUMN]
        count = columns
        if unit == COUNT_BLOCKS:
            count = min(columns, divide(length + tokens - 1, tokens))
        if unit == COUNT_TOKENS:
            count = min(columns * tokens, length)
        counts[max_num_reqs + i] = counts[i]
        counts[i] = count
        i = advance(i, cuda.gridsize(1))


@cuda.jit
def start_requests(
    idx_mapping, num_computed_tokens, seq_lens, num_reqs, max_num_reqs, max_num_rows, groups, members,
    num_members, arena,  # as above
    unit,  # COUNT_BLOCKS or COUNT_TOKENS
    capacity,  # entries of a member's indices
    lengths,  # [max_num_reqs] int32
    counts,  # [2 * max_num_reqs + 2] int32, the last two written
    indptr,  # [max_num_reqs + 1] int32, written
    last_page_lens,  # [max_num_reqs] int32, written
    num_cut,  # [1] int32, what the capacity has left out is added
):  # fmt: skip
    """Write where each request's entries begin, and how many tokens its last page holds."""
    # step 1: which request
    i = cuda.grid(1)
    while i <= max_num_reqs:
        # step 2: store how many entries lie before it
        before = np.int64(0)
        j = 0
        while j < min(i, num_reqs):
            before += counts[j]
            j = advance(j, 1)
        start = min(before, np.int64(capacity))
        indptr[i] = start
        if i < max_num_reqs:
            # step 3: store how many tokens its last page holds
            end = before
            if i < num_reqs:
                end = before + counts[i]
            num_pages = min(end, np.int64(capacity)) - start
            tokens = groups[members[0] * NUM_FIELDS + TOKENS_PER_COLUMN]
            if unit == COUNT_TOKENS:
                tokens = np.int64(1)
            last_page_len = np.int64(0)
            if num_pages > 0:
                last_page_len = min(tokens, lengths[i] - (num_pages - 1) * tokens)
            last_page_lens[i] = last_page_len
        else:
            # step 4: remember how many entries there are, and count those that are cut
            counts[2 * max_num_reqs + 1] = counts[2 * max_num_reqs]
            counts[2 * max_num_reqs] = start
            num_cut[0] = min(num_cut[0] + (before - start), np.int64(INT32_MAX))
        i = advance(i, cuda.gridsize(1))


@cuda.jit
def write_indices(
    idx_mapping, num_computed_tokens, seq_lens, num_reqs, max_num_reqs, max_num_rows, groups, members,
    num_members, arena,  # as above
    unit,  # COUNT_BLOCKS or COUNT_TOKENS
    capacity,  # entries of a member's indices
    counts,  # [2 * max_num_reqs + 2] int32
    indptr,  # [max_num_reqs + 1] int32
    entries,  # [num_members, capacity] int32, written
):  # fmt: skip
    """Write the entries of all requests, one request after another, and the fill over what a larger batch left."""
    total = counts[2 * max_num_reqs]
    end = min(capacity, max(total, counts[2 * max_num_reqs + 1]))
    # step 1: which entry and group
    m = cuda.blockIdx.y
    while m < num_members:
        g = members[m]
        group = g * NUM_FIELDS
        tokens = groups[group + TOKENS_PER_COLUMN] if unit == COUNT_TOKENS else np.int64(1)
        fill = fill_of(groups, group, 0, tokens)
        entry = cuda.grid(1)
        while entry < end:
            # step 2: the fill behind the last entry
            index = fill
            if entry < total:
                # step 3: which request and column
                i, high = 0, max_num_reqs
                while high - i > 1:
                    middle = i + ((high - i) >> 1)
                    if indptr[middle] <= entry:
                        i = middle
                    else:
                        high = middle
                row = row_of(idx_mapping, i, num_reqs, max_num_rows)
                place = np.int64(entry - indptr[i])
                column = divide(place, tokens)
                first_column = first_column_of(groups, group, num_computed_tokens, i, row)
                filled = filled_columns(groups, group, g, arena, max_num_rows, row)
                table_row = groups[group + TABLE_START] + row * groups[group + WIDTH]
                block_id = block_of(groups, group, arena, table_row, first_column, filled, column)
                index = (fill if block_id < 0 else block_id * tokens) + (place - column * tokens)
            # step 4: store the entry
            entries[np.int64(m) * capacity + entry] = index
            entry = advance(entry, cuda.gridsize(1))
        m = advance(m, cuda.gridDim.y)


@cuda.jit
def write_table(
    idx_mapping, num_computed_tokens, seq_lens, num_reqs, max_num_reqs, max_num_rows, groups, members,
    num_members, arena,  # as above
    width,  # columns of a row of the table
    counts,  # [2 * max_num_reqs + 2] int32
    null,  # -1; 0: the layout has none
    entry_scale,
    has_values,  # whether a row of V offsets follows each row of K offsets
    value_offset,  # from a K offset to its V offset
    entries,  # [num_members, max_num_reqs, 1 + has_values, width] of the layout's dtype, written
):  # fmt: skip
    """Write the columns in use of every batch row, and the fill behind them."""
    # step 1: which batch row and group
    m = cuda.blockIdx.y
    while m < num_members:
        g = members[m]
        group = g * NUM_FIELDS
        fill = fill_of(groups, group, null, entry_scale)
        i = cuda.blockIdx.x
        while i < max_num_reqs:
            count = min(width, counts[i])
            before = min(width, counts[max_num_reqs + i])
            start = (np.int64(m) * max_num_reqs + i) * (1 + has_values) * width
            # step 2: the fill over what an earlier batch left behind its columns
            column = count + cuda.threadIdx.x
            while column < before:
                entries[start + column] = fill
                if has_values:
                    entries[start + width + column] = fill
                column = advance(column, cuda.blockDim.x)
            # step 3: how many of them the window has left behind
            row = row_of(idx_mapping, i, num_reqs, max_num_rows)
            first_column = first_column_of(groups, group, num_computed_tokens, i, row)
            filled = filled_columns(groups, group, g, arena, max_num_rows, row)
            table_row = groups[group + TABLE_START] + row * groups[group + WIDTH]
            # step 4: store the columns in use
            column = cuda.threadIdx.x
            while column < count:
                block_id = block_of(groups, group, arena, table_row, first_column, filled, column)
                entry = fill if block_id < 0 else block_id * entry_scale
                entries[start + column] = entry
                if has_values:
                    entries[start + width + column] = entry + value_offset
                column = advance(column, cuda.blockDim.x)
            i = advance(i, cuda.gridDim.x)
        m = advance(m, cuda.gridDim.y)


@cuda.jit
def clear_inverse_map(
    idx_mapping, num_computed_tokens, seq_lens, num_reqs, max_num_reqs, max_num_rows, groups, members,
    num_members, arena,  # as above
    width,  # columns that a row may export
    num_kernel_blocks,
    counts,  # [2 * max_num_reqs + 2] int32
    mapped,  # [num_members, max_num_reqs, width] int32, blocks that the call before mapped
    null,
    entries,  # [num_members, max_num_reqs, num_kernel_blocks] int32, written
):  # fmt: skip
    """Take the blocks of the call before out of every batch row's map."""
    # step 1: which batch row and group
    m = cuda.blockIdx.y
    while m < num_members:
        i = cuda.blockIdx.x
        while i < max_num_reqs:
            before = min(width, counts[max_num_reqs + i])
            cell = np.int64(m) * max_num_reqs + i
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
    idx_mapping, num_computed_tokens, seq_lens, num_reqs, max_num_reqs, max_num_rows, groups, members,
    num_members, arena,  # as above
    width,  # columns that a row may export
    num_kernel_blocks,
    counts,  # [2 * max_num_reqs + 2] int32
    mapped,  # [num_members, max_num_reqs, width] int32, written
    entries,  # [num_members, max_num_reqs, num_kernel_blocks] int32, written
):  # fmt: skip
    """Write the column of every block that a batch row's tokens lie in."""
    # step 1: which batch row and group
    m = cuda.blockIdx.y
    while m < num_members:
        g = members[m]
        group = g * NUM_FIELDS
        i = cuda.blockIdx.x
        while i < max_num_reqs:
            count = min(width, counts[i])
            cell = np.int64(m) * max_num_reqs + i
            # step 2: how many of its columns the window has left behind
            row = row_of(idx_mapping, i, num_reqs, max_num_rows)
            first_column = first_column_of(groups, group, num_computed_tokens, i, row)
            filled = filled_columns(groups, group, g, arena, max_num_rows, row)
            table_row = groups[group + TABLE_START] + row * groups[group + WIDTH]
            column = cuda.threadIdx.x
            while column < count:
                # step 3: remember its blocks
                block_id = block_of(groups, group, arena, table_row, first_column, filled, column)
                mapped[cell * width + column] = block_id
                # step 4: store the column of each block, the last one of a block that stands there twice
                if block_id >= 0 and block_id < num_kernel_blocks:
                    atomic_max(entries, cell * num_kernel_blocks + block_id, column)
                column = advance(column, cuda.blockDim.x)
            i = advance(i, cuda.gridDim.x)
        m = advance(m, cuda.gridDim.y)


@cuda.jit
def gather_state_indices(
    idx_mapping, num_computed_tokens, seq_lens, num_reqs, max_num_reqs, max_num_rows, groups, members,
    num_members, arena,  # as above
    state_columns,  # 0: the first ones, STATE_LAST or STATE_ALIGNED
    num_columns,
    null,  # -1; 0: the layout has none
    entries,  # [num_members, max_num_reqs, num_columns] of the layout's dtype, written
):  # fmt: skip
    """Write the blocks that hold every batch row's states."""
    num_cells = np.int64(max_num_reqs) * num_columns
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
