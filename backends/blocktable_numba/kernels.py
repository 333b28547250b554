"""The step's kernels in Numba. Loops are grid-stride: any grid and any block give the same result.

blocktable/device/signatures.py lists the arguments, and says what lies where in an arena and in a batch.

Arrays come as pointers: nothing about an array (its owner, layout, flags) asks for another compilation, and an index is
never taken from the end. Loops are `while`: Numba counts the turns of a `range` first, by a 64-bit division. Arithmetic
on int32 gives int64 in Numba. Shapes that no line gives: groups [num_groups, NUM_FIELDS] int64; arena [arena.size],
checker [checker_size], findings in the host's memory [(1 + MAX_RECORDS) * RECORD], all int32, the last two written.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from blocktable_numba.checks import check_request, check_token
from blocktable_numba.common import (
    BATCH_START,
    BLOCKS_PER_KV_BLOCK,
    CHECKED,
    COLUMN_SHIFT,
    FILLER,
    HAS_MODES,
    HAS_NULL_PADS,
    HAS_ODD_SIZES,
    HAS_SHARDS,
    HAS_WINDOWS,
    HELD_START,
    INTERLEAVE_SIZE,
    NULL_IS_PAD,
    NULL_START,
    NUM_FIELDS,
    PAD_SLOT_ID,
    RANK,
    SLIDING_WINDOW,
    SLOT_MODE,
    SLOT_MODE_NONE,
    SLOT_MODE_RING,
    TABLE_START,
    TOKENS_PER_COLUMN,
    WIDTH,
    WORLD_SIZE,
    advance,
    device_function,
    divide,
    divide_32,
    is_missing,
    local_length,
    row_of,
)


@device_function
def range_of(changes, starts, num_ranges, value):
    """Index of the range that a value lies in; the first one starts at 0."""
    range_index, end = 0, num_ranges
    while end - range_index > 1:
        middle = range_index + ((end - range_index) >> 1)
        if changes[starts + middle] <= value:
            range_index = middle
        else:
            end = middle
    return range_index


@cuda.jit
def apply_changes(
    changes,  # [..] int32, packed changes without their counts
    num_singles, num_ranges, num_range_values, num_constant_ranges, num_constants,
    arena, num_groups, max_num_reqs, batch_entries,  # arena is written
    batch,  # [batch_entries + 2 + num_groups * max_num_reqs] int32, the copy of its counts written
    copy_parts,  # blocks that copy the counts of one group; 0: nothing is copied. All further blocks write
    checker,  # [checker_size] int32, the number of the call advanced where counts are copied
    mark,  # of this step; 0: the host waits for none
    last_mark,  # [1] int64, written where counts are copied
):  # fmt: skip
    """Write the changes of a commit into the arena, and copy the counts that step_batch reads and replaces."""
    copy_blocks = num_groups * copy_parts
    # step 1: keep the counts that step_batch replaces
    if cuda.blockIdx.x < copy_blocks:
        held_rows = batch[batch_entries]
        g = divide_32(cuda.blockIdx.x, copy_parts)
        counts = g * max_num_reqs
        copy = batch_entries + 2 + counts
        i = (cuda.blockIdx.x - g * copy_parts) * cuda.blockDim.x + cuda.threadIdx.x
        while i < max_num_reqs:
            held = batch[counts + i]  # loaded together with how many there are
            if i >= held_rows:
                break
            batch[copy + i] = held
            i = advance(i, copy_parts * cuda.blockDim.x)
        if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
            batch[batch_entries + 1] = held_rows
            last_mark[0] = mark
            if CHECKED:
                checker[0] += 1  # the call that step_batch belongs to
        return
    thread = (cuda.blockIdx.x - copy_blocks) * cuda.blockDim.x + cuda.threadIdx.x
    num_threads = (cuda.gridDim.x - copy_blocks) * cuda.blockDim.x
    # step 2: store the single values
    i = thread
    while i < num_singles:
        arena[changes[i]] = changes[num_singles + i]
        i = advance(i, num_threads)
    # step 3: store the ranges
    offsets = 2 * num_singles
    starts = offsets + num_ranges
    values = starts + num_ranges
    i = thread
    while i < num_range_values:
        range_index = range_of(changes, starts, num_ranges, i)
        arena[np.int64(changes[offsets + range_index]) + (i - changes[starts + range_index])] = changes[values + i]
        i = advance(i, num_threads)
    # step 4: store the constant ranges
    offsets = values + num_range_values
    starts = offsets + num_constant_ranges
    values = starts + num_constant_ranges
    i = thread
    while i < num_constants:
        range_index = range_of(changes, starts, num_constant_ranges, i)
        place = np.int64(changes[offsets + range_index]) + (i - changes[starts + range_index])
        arena[place] = changes[values + range_index]
        i = advance(i, num_threads)


@device_function
def null_columns(batch, batch_row, columns, held, filler):
    """Make the columns of a batch row from `columns` to `held` NULL, by the threads of a block."""
    column = columns + cuda.threadIdx.x
    while column < held:
        batch[batch_row + column] = filler
        column = advance(column, cuda.blockDim.x)


@cuda.jit
def null_stale_columns(
    idx_mapping,  # [num_reqs] int32, batch index -> row
    num_reqs, num_reqs_padded, max_num_reqs, max_num_rows, groups, num_groups, arena, batch_entries,
    batch,  # [batch_entries + 1 ..] int32, tables written, counts read
):  # fmt: skip
    """Make every batch row NULL after the columns that its row fills."""
    # Rows after this batch hold what a larger one left; further ones are NULL, whatever their old counts say.
    num_shown = max(batch[batch_entries], num_reqs_padded)
    # step 1: which batch row and group
    g = cuda.blockIdx.y
    while g < num_groups:
        counts = np.int64(g) * max_num_reqs
        filled = np.int64(g) * max_num_rows
        group = g * NUM_FIELDS
        batch_start, width, filler = groups[group + BATCH_START], groups[group + WIDTH], groups[group + FILLER]
        i = cuda.blockIdx.x
        while i < num_shown:
            # step 2: how many columns its row fills
            row = row_of(idx_mapping, i, num_reqs, max_num_rows)
            columns = 0 if row < 0 else arena[filled + row]
            # step 3: NULL over what an earlier batch left after them
            null_columns(batch, batch_start + i * width, columns, batch[counts + i], filler)
            i = advance(i, cuda.gridDim.x)
        g = advance(g, cuda.gridDim.y)


@device_function
def gather_row(
    idx_mapping, num_computed_tokens, num_reqs, max_num_rows, groups, g, arena, batch, batch_row, filler, i
):  # fmt: skip
    """Write the columns that one batch row's row fills, by the threads of a block, and return how many they are."""
    group = g * NUM_FIELDS
    table_start, width = groups[group + TABLE_START], groups[group + WIDTH]
    # step 2: how many columns its row fills
    row = row_of(idx_mapping, i, num_reqs, max_num_rows)
    columns = 0 if row < 0 else arena[np.int64(g) * max_num_rows + row]
    # step 3: how many of them the window has passed
    first = np.int64(0)
    if HAS_WINDOWS and i < num_reqs:
        sliding_window = groups[group + SLIDING_WINDOW]
        if sliding_window:
            first = max(num_computed_tokens[i] - sliding_window + 1, 0)
            if HAS_SHARDS and groups[group + WORLD_SIZE] > 1:
                first = local_length(groups, group, first)
            first = divide(first, groups[group + TOKENS_PER_COLUMN])
    # step 4: store the columns in use, NULL before them
    table_row = table_start + max(row, 0) * width
    column = cuda.threadIdx.x
    while column < columns:
        # Two at a time: a load after a store would wait for it.
        other = column + cuda.blockDim.x
        block_id = arena[table_row + column]
        other_id = arena[table_row + other] if other < columns else 0
        batch[batch_row + column] = filler if HAS_WINDOWS and column < first else block_id
        if other < columns:
            batch[batch_row + other] = filler if HAS_WINDOWS and other < first else other_id
        column = advance(other, cuda.blockDim.x)
    return columns


@cuda.jit
def gather_block_tables(
    idx_mapping,  # as above
    num_computed_tokens,  # [num_reqs] int32, batch index -> tokens
    num_reqs, num_reqs_padded, max_num_reqs, max_num_rows, groups, num_groups, arena, batch_entries,  # as above
    batch,  # [batch_entries + 1 ..] int32, written
):  # fmt: skip
    """Write the columns that the batch's rows fill, and remember how many there are."""
    if cuda.blockIdx.x == 0 and cuda.blockIdx.y == 0 and cuda.threadIdx.x == 0:
        batch[batch_entries] = num_reqs_padded
    # step 1: which batch row and group
    g = cuda.blockIdx.y
    while g < num_groups:
        group = g * NUM_FIELDS
        batch_start, width, filler = groups[group + BATCH_START], groups[group + WIDTH], groups[group + FILLER]
        i = cuda.blockIdx.x
        while i < num_reqs_padded:
            columns = gather_row(
                idx_mapping, num_computed_tokens, num_reqs, max_num_rows, groups, g, arena,
                batch, batch_start + i * width, filler, i,
            )  # fmt: skip
            # step 5: remember how many columns the batch row holds
            if cuda.threadIdx.x == 0:
                batch[np.int64(g) * max_num_reqs + i] = columns
            i = advance(i, cuda.gridDim.x)
        g = advance(g, cuda.gridDim.y)


@device_function
def request_of(query_start_loc, num_reqs, token):
    """Request that a token belongs to, or -1, by bisection."""
    request, end = -1, num_reqs
    while end - request > 1:
        middle = request + ((end - request) >> 1)
        if query_start_loc[middle] <= token:
            request = middle
        else:
            end = middle
    return request


@device_function
def local_index(groups, group, is_valid, local):
    """Whether a valid token is this rank's, and its index among its rank's tokens. local: its index among all."""
    world_size, interleave_size = groups[group + WORLD_SIZE], groups[group + INTERLEAVE_SIZE]
    turn = divide(local, interleave_size)
    round_index = divide(turn, world_size)
    is_valid = is_valid & (turn - round_index * world_size == groups[group + RANK])
    return is_valid, round_index * interleave_size + (local - turn * interleave_size)


@device_function
def map_token(
    idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows,
    groups, g, arena, requests_per_token, checker, findings, token,
):  # fmt: skip
    """The slot of one token.

    What can be loaded early is loaded before the first branch: a small launch takes as long as its chain of loads, and
    a compiler moves no load across a branch.
    """
    group = g * NUM_FIELDS
    table_start, width = groups[group + TABLE_START], groups[group + WIDTH]
    tokens_per_column, slot_mode = groups[group + TOKENS_PER_COLUMN], groups[group + SLOT_MODE]
    column_shift, pad_slot_id = groups[group + COLUMN_SHIFT], groups[group + PAD_SLOT_ID]
    null_is_pad, null_start = groups[group + NULL_IS_PAD], groups[group + NULL_START]
    blocks_per_kv_block = groups[group + BLOCKS_PER_KV_BLOCK]
    if num_reqs <= 0 or num_positions <= 0:
        return pad_slot_id
    request = min((token * requests_per_token) >> 32, num_reqs - 1)  # a guess, which step 3 checks
    end_of_tokens = query_start_loc[num_reqs]
    start, end = query_start_loc[request], query_start_loc[request + 1]
    row = idx_mapping[request]
    position = positions[min(token, num_positions - 1)]
    # step 2: PAD after the last real token
    is_valid = token < min(end_of_tokens, num_positions)
    if HAS_MODES:
        is_valid = is_valid & (slot_mode != SLOT_MODE_NONE)
    # step 3: which request and row
    if is_valid & ((start > token) | (end <= token)):
        request = request_of(query_start_loc, num_reqs, token)
        row = idx_mapping[request] if request >= 0 else -1
        if HAS_MODES:
            end = query_start_loc[request + 1]
        if CHECKED:
            start = query_start_loc[max(request, 0)]
    is_row = (row >= 0) & (row < max_num_rows)
    is_stranger = is_valid & (not is_row) & (request >= 0) & (position >= 0)
    is_valid = is_valid & is_row & (position >= 0)
    columns = arena[np.int64(g) * max_num_rows + row] if is_valid else 0
    local = position if is_valid else np.int64(0)
    # step 4: whose token it is, and its index among this rank's tokens
    if HAS_SHARDS and groups[group + WORLD_SIZE] > 1:
        is_valid, local = local_index(groups, group, is_valid, local)
    if HAS_MODES and slot_mode == SLOT_MODE_RING:
        ring = max(columns * tokens_per_column, 1)  # step 5 finds that an empty one has no column
        last_position = positions[min(end, num_positions) - 1] if is_valid else np.int64(0)
        is_valid = is_valid & (max(last_position, 0) - local < ring)
        local = local - divide(local, ring) * ring
    # step 5: which column, and whether the row fills it
    column = divide(local, tokens_per_column) if HAS_ODD_SIZES else local >> column_shift
    # step 6: which kernel block
    is_entry = is_valid & (column < width)
    block_id = np.int64(arena[table_start + row * width + column] if is_entry else 0)
    is_mine, is_valid = is_valid | is_stranger, is_valid & (column < columns)
    slot = block_id * tokens_per_column + (local - column * tokens_per_column)
    if CHECKED and is_mine and groups[group + HELD_START] > 0:
        is_null = is_missing(block_id, null_start, blocks_per_kv_block)
        check_token(
            groups, group, arena, checker, findings, positions, max_num_rows, g, row, start, token, position, local,
            block_id, slot, is_row, is_valid, is_null,
        )  # fmt: skip
    if HAS_NULL_PADS and null_is_pad:
        is_valid = is_valid & (not is_missing(block_id, null_start, blocks_per_kv_block))
    return slot if is_valid else pad_slot_id


@cuda.jit
def map_slots(
    idx_mapping,  # as above
    query_start_loc,  # [num_reqs + 1] int32, first token of each request
    positions,  # [num_positions] int64, token -> its index in its request
    num_reqs, num_positions, max_num_rows,
    groups,  # [>= first_group + num_groups, NUM_FIELDS] int64
    first_group, num_groups, arena,
    slots,  # [num_groups, slots_stride] of the slot dtype, the first num_slots of each written
    slots_stride, num_slots,
    requests_per_token,  # times 2**32
    checker, findings,
):  # fmt: skip
    """Write the slot of every token, and PAD from the last real token to the end of the slots."""
    # step 1: which token and group
    y = cuda.blockIdx.y
    while y < num_groups:
        token = cuda.grid(1)
        while token < num_slots:
            slot = map_token(
                idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows,
                groups, first_group + y, arena, requests_per_token, checker, findings, token,
            )  # fmt: skip
            # step 7: store the slot
            slots[y * slots_stride + token] = slot
            token = advance(token, cuda.gridsize(1))
        y = advance(y, cuda.gridDim.y)


@cuda.jit
def step_batch(
    idx_mapping, num_computed_tokens, query_start_loc, positions, num_reqs, num_reqs_padded,  # as above
    num_positions, max_num_reqs, max_num_rows, requests_per_token, groups, num_groups, arena,  # as above
    batch_entries, batch,  # [batch_entries + 2 + num_groups * max_num_reqs] int32, written
    slots, num_slots,  # [num_groups, num_slots] of the slot dtype, written
    gather_blocks,  # 0: nothing is gathered
    blocks_per_group,  # that map its slots
    last_mark,  # [1] int64, what apply_changes wrote
    shown_mark,  # [1] int64 in the host's memory, written
    checker, findings,  # as above
):  # fmt: skip
    """The gather and the slots of a whole step: the first gather_blocks blocks gather, the next ones map.

    The block after those shows the mark; it and further ones look at the requests, where anything is checked.
    """
    if cuda.blockIdx.x < gather_blocks:
        held = batch_entries + 2
        held_rows = batch[held - 1]
        if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
            batch[batch_entries] = num_reqs_padded
        pair = cuda.blockIdx.x
        is_pair = True  # the first turn waits for no load
        while is_pair:
            i = divide_32(pair, num_groups)
            g = pair - i * num_groups
            cell = g * max_num_reqs + i
            held_columns = batch[held + cell]
            group = g * NUM_FIELDS
            batch_row, filler = groups[group + BATCH_START] + i * groups[group + WIDTH], groups[group + FILLER]
            columns = gather_row(
                idx_mapping, num_computed_tokens, num_reqs, max_num_rows, groups, g, arena, batch, batch_row, filler, i
            )
            stale = held_columns if i < held_rows else 0
            if stale > columns:
                null_columns(batch, batch_row, columns, stale, filler)
            if cuda.threadIdx.x == 0 and i < num_reqs_padded:
                batch[cell] = columns
            pair = advance(pair, gather_blocks)
            is_pair = pair < max(held_rows, num_reqs_padded) * num_groups
        return
    block = cuda.blockIdx.x - gather_blocks
    g = divide_32(block, blocks_per_group)
    if g >= num_groups:
        # apply_changes is done: the host may use the changes' memory again
        last_block = block - num_groups * blocks_per_group
        if last_block == 0 and cuda.threadIdx.x == 0 and last_mark[0] > 0:
            shown_mark[0] = last_mark[0]
        if CHECKED:
            num_last = cuda.gridDim.x - gather_blocks - num_groups * blocks_per_group
            i = last_block * cuda.blockDim.x + cuda.threadIdx.x
            while i < num_reqs:
                check_request(
                    idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows,
                    groups, arena, checker, findings, i,
                )  # fmt: skip
                i = advance(i, num_last * cuda.blockDim.x)
        return
    token = (block - g * blocks_per_group) * cuda.blockDim.x + cuda.threadIdx.x
    while token < num_slots:
        slot = map_token(
            idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows,
            groups, g, arena, requests_per_token, checker, findings, token,
        )  # fmt: skip
        slots[g * num_slots + token] = slot
        token = advance(token, blocks_per_group * cuda.blockDim.x)
