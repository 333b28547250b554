"""The four kernels in Numba, each with its launcher below it. Loops are grid-stride: any grid gives the same result.

A table's memory is one arena: filled counts [num_groups, max_num_reqs], then each group's rows [max_num_reqs, width].
A batch has the same layout, so its counts say how many columns each batch row holds; behind it lie how many rows the
last batch had, and a copy of these counts that the fused step makes for itself: [arena_size + 2 + num_groups *
max_num_reqs] in all.

Arrays come as pointers, and SIGNATURES fixes every argument's type: nothing about an array (its owner, layout, flags)
asks for another compilation, and an index is never taken from the end. Loops are `while`: Numba counts the turns of a
`range` first, by a 64-bit division. Arithmetic on int32 gives int64 in Numba.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
from numba import cuda, types

from blocktable import GROUP_FIELDS, NULL_BLOCK_ID, PAD_SLOT_ID, BlockTableConfig

MAX_INT32 = 2**31 - 1
MAX_GRID_Y = 65535

# What the table's groups need. A launch of a few microseconds is half instruction fetches: what no group needs is left
# out when a kernel is compiled (`specialised`).
HAS_SHARDS = True  # a group is sharded over context-parallel ranks
HAS_MODES = True  # a group's slot_mode is "ring" or "none"
HAS_NULL_PADS = True  # a group's null_is_pad is set
HAS_WINDOWS = True  # a group has a sliding window
HAS_ODD_SIZES = True  # a group's tokens_per_column is no power of two

SLOT_MODE_RING = 1
SLOT_MODE_NONE = 2

# Places in a row of BlockTableConfig.group_fields().
NUM_FIELDS = len(GROUP_FIELDS)
TABLE_START = GROUP_FIELDS.index("table_start")
WIDTH = GROUP_FIELDS.index("width")
TOKENS_PER_COLUMN = GROUP_FIELDS.index("tokens_per_column")
BLOCKS_PER_KV_BLOCK = GROUP_FIELDS.index("blocks_per_kv_block")
SLOT_MODE = GROUP_FIELDS.index("slot_mode")
NULL_IS_PAD = GROUP_FIELDS.index("null_is_pad")
SLIDING_WINDOW = GROUP_FIELDS.index("sliding_window")
WORLD_SIZE = GROUP_FIELDS.index("world_size")
RANK = GROUP_FIELDS.index("rank")
INTERLEAVE_SIZE = GROUP_FIELDS.index("interleave_size")

Kernel = Any  # called with (grid, block, args, stream=)
Pointer = Any  # an address; in the simulator what stands for one

# `inline`, so that a kernel compiles where there is no GPU: Numba asks one for its architecture to compile a call.
_device_function = cuda.jit(device=True, inline="always")


@_device_function
def advance(i, stride):
    """I + stride, unsigned: LLVM then neither counts a loop's turns, by a division, nor unrolls it."""
    return np.int64(np.uint64(i) + np.uint64(stride))


@_device_function
def divide(a, b):
    """A // b for a >= 0 and b > 0: unsigned, which needs no care for signs, and in 32 bits where both operands fit."""
    return np.int64(np.uint64(a) // np.uint64(b))


@_device_function
def divide_32(a, b):
    """A // b for 0 <= a < 2**32 and 0 < b < 2**32."""
    return np.int64(np.uint32(a) // np.uint32(b))


@_device_function
def column_of(local, tokens_per_column):
    """The column that a token lies in."""
    if HAS_ODD_SIZES:
        return divide(local, tokens_per_column)
    return local >> cuda.popc(tokens_per_column - 1)


@_device_function
def local_length(tokens, world_size, rank, interleave_size):
    """How many of the first `tokens` tokens this rank holds (R19)."""
    turn = world_size * interleave_size
    turns = divide(tokens, turn)
    rest = tokens - turns * turn - rank * interleave_size
    return turns * interleave_size + min(max(rest, 0), interleave_size)


@_device_function
def row_of(idx_mapping, has_idx_mapping, batch_index, num_reqs, max_num_reqs):
    """Row of a batch index; -1 for a dummy and for padding."""
    if batch_index >= num_reqs:
        return -1
    row = idx_mapping[batch_index] if has_idx_mapping else batch_index
    return row if 0 <= row < max_num_reqs else -1


@cuda.jit
def scatter_writes(
    offsets,  # [num_ranges] int64, first entry of each range in the arena
    starts,  # [num_ranges + 1] int32, first value of each range
    values,  # [num_values] int32
    num_ranges,
    num_values,
    arena,  # [arena.size] int32, written
):
    """Write every range of values into the arena."""
    value = cuda.grid(1)
    while value < num_values:
        # step 1: which value of which range
        range_index, end = value, num_ranges
        if num_ranges != num_values:  # else each range holds one value, as in steady decode
            range_index = 0
            while end - range_index > 1:
                middle = range_index + ((end - range_index) >> 1)
                if starts[middle] <= value:
                    range_index = middle
                else:
                    end = middle
        # step 2: store the value
        arena[offsets[range_index] + (value - starts[range_index])] = values[value]
        value = advance(value, cuda.gridsize(1))


def launch_scatter_writes(
    kernel: Kernel,
    tile: int,
    staged: Pointer,  # a packed commit: offsets, starts, values
    num_ranges: int,
    num_values: int,
    arena: Pointer,
    stream: Any,
) -> None:
    """Launch scatter_writes; one block that does nothing for no values, since a first launch loads the kernel."""
    starts = staged + 8 * num_ranges
    values = starts + 4 * (num_ranges + 1)
    arguments = (staged, starts, values, _int32(num_ranges), _int32(num_values), arena)
    kernel((_grid_x(max(num_values, 1), tile), 1), (tile,), arguments, stream=stream)


@cuda.jit
def null_stale_columns(
    idx_mapping,  # [num_reqs] int32, batch index -> row
    has_idx_mapping,  # 0: identity
    num_reqs,
    num_reqs_padded,
    max_num_reqs,
    groups,  # [num_groups, NUM_FIELDS] int64
    num_groups,
    arena,  # [arena_size] int32
    arena_size,
    batch,  # [arena_size + 1 ..] int32, tables written, counts read
):
    """Make every batch row NULL behind the columns that its row fills."""
    # Rows behind this batch hold what a larger one left; further ones are NULL, whatever their old counts say.
    num_rows = max(batch[arena_size], num_reqs_padded)
    # step 1: which batch row and group
    g = cuda.blockIdx.y
    while g < num_groups:
        counts = np.int64(g) * max_num_reqs
        group = g * NUM_FIELDS
        table_start, width = groups[group + TABLE_START], groups[group + WIDTH]
        i = cuda.blockIdx.x
        while i < num_rows:
            # step 2: how many columns its row fills
            row = row_of(idx_mapping, has_idx_mapping, i, num_reqs, max_num_reqs)
            columns = 0 if row < 0 else arena[counts + row]
            # step 3: NULL over what an earlier batch left behind them
            held = batch[counts + i]
            batch_row = table_start + i * width
            column = columns + cuda.threadIdx.x
            while column < held:
                batch[batch_row + column] = NULL_BLOCK_ID
                column = advance(column, cuda.blockDim.x)
            i = advance(i, cuda.gridDim.x)
        g = advance(g, cuda.gridDim.y)


def launch_null_stale_columns(
    kernel: Kernel,
    tile: int,
    idx_mapping: Pointer | None,  # None: identity
    num_reqs: int,
    num_reqs_padded: int,
    max_num_reqs: int,
    groups: Pointer,
    num_groups: int,
    arena: Pointer,
    arena_size: int,
    batch: Pointer,
    stream: Any,
) -> None:
    """Launch null_stale_columns; an empty batch too: a larger one may have come before."""
    arguments = (
        idx_mapping,
        int(idx_mapping is not None),
        _int32(num_reqs),
        _int32(num_reqs_padded),
        _int32(max_num_reqs),
        groups,
        _int32(num_groups),
        arena,
        arena_size,
        batch,
    )
    kernel((max(num_reqs_padded, 1), min(num_groups, MAX_GRID_Y)), (tile,), arguments, stream=stream)


@_device_function
def gather_row(
    idx_mapping,
    has_idx_mapping,
    num_computed_tokens,
    has_num_computed_tokens,
    num_reqs,
    max_num_reqs,
    groups,
    g,
    arena,
    batch,
    i,
):
    """Write the columns that one batch row's row fills, by the threads of a block, and return how many they are."""
    group = g * NUM_FIELDS
    table_start, width = groups[group + TABLE_START], groups[group + WIDTH]
    # step 2: how many columns its row fills
    row = row_of(idx_mapping, has_idx_mapping, i, num_reqs, max_num_reqs)
    columns = 0 if row < 0 else arena[np.int64(g) * max_num_reqs + row]
    # step 3: how many of them the window has left behind
    first = np.int64(0)
    if HAS_WINDOWS and has_num_computed_tokens and i < num_reqs:
        sliding_window = groups[group + SLIDING_WINDOW]
        if sliding_window:
            first = max(num_computed_tokens[i] - sliding_window + 1, 0)
            if HAS_SHARDS and groups[group + WORLD_SIZE] > 1:
                first = local_length(
                    first, groups[group + WORLD_SIZE], groups[group + RANK], groups[group + INTERLEAVE_SIZE]
                )
            first = divide(first, groups[group + TOKENS_PER_COLUMN])
    # step 4: store the columns in use, NULL before them
    table_row = table_start + max(row, 0) * width
    batch_row = table_start + i * width
    column = cuda.threadIdx.x
    while column < columns:
        # Two at a time: a load behind a store would wait for it.
        other = column + cuda.blockDim.x
        block_id = arena[table_row + column]
        other_id = arena[table_row + other] if other < columns else NULL_BLOCK_ID
        batch[batch_row + column] = NULL_BLOCK_ID if column < first else block_id
        if other < columns:
            batch[batch_row + other] = NULL_BLOCK_ID if other < first else other_id
        column = advance(other, cuda.blockDim.x)
    return columns


@cuda.jit
def gather_block_tables(
    idx_mapping,  # [num_reqs] int32, batch index -> row
    has_idx_mapping,  # 0: identity
    num_computed_tokens,  # [num_reqs] int32, batch index -> tokens
    has_num_computed_tokens,  # 0: no window is cut
    num_reqs,
    num_reqs_padded,
    max_num_reqs,
    groups,  # [num_groups, NUM_FIELDS] int64
    num_groups,
    arena,  # [arena_size] int32
    arena_size,
    batch,  # [arena_size + 1 ..] int32, written
):
    """Write the columns that the batch's rows fill, and remember how many there are."""
    if cuda.blockIdx.x == 0 and cuda.blockIdx.y == 0 and cuda.threadIdx.x == 0:
        batch[arena_size] = num_reqs_padded
    # step 1: which batch row and group
    g = cuda.blockIdx.y
    while g < num_groups:
        i = cuda.blockIdx.x
        while i < num_reqs_padded:
            columns = gather_row(
                idx_mapping,
                has_idx_mapping,
                num_computed_tokens,
                has_num_computed_tokens,
                num_reqs,
                max_num_reqs,
                groups,
                g,
                arena,
                batch,
                i,
            )
            # step 5: remember how many columns the batch row holds
            if cuda.threadIdx.x == 0:
                batch[np.int64(g) * max_num_reqs + i] = columns
            i = advance(i, cuda.gridDim.x)
        g = advance(g, cuda.gridDim.y)


def launch_gather_block_tables(
    kernel: Kernel,
    tile: int,
    idx_mapping: Pointer | None,  # None: identity
    num_computed_tokens: Pointer | None,  # None: no window is cut
    num_reqs: int,
    num_reqs_padded: int,
    max_num_reqs: int,
    groups: Pointer,
    num_groups: int,
    arena: Pointer,
    arena_size: int,
    batch: Pointer,
    stream: Any,
) -> None:
    """Launch gather_block_tables."""
    arguments = (
        idx_mapping,
        int(idx_mapping is not None),
        num_computed_tokens,
        int(num_computed_tokens is not None),
        _int32(num_reqs),
        _int32(num_reqs_padded),
        _int32(max_num_reqs),
        groups,
        _int32(num_groups),
        arena,
        arena_size,
        batch,
    )
    kernel((max(num_reqs_padded, 1), min(num_groups, MAX_GRID_Y)), (tile,), arguments, stream=stream)


@_device_function
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


@_device_function
def map_token(
    idx_mapping,
    has_idx_mapping,
    query_start_loc,
    positions,
    num_reqs,
    num_positions,
    max_num_reqs,
    groups,
    g,
    arena,
    num_slots,
    token,
):
    """The slot of one token.

    What can be loaded at once is, before the first branch: a small launch takes as long as its chain of loads, and a
    compiler moves no load across a branch.
    """
    group = g * NUM_FIELDS
    table_start, width = groups[group + TABLE_START], groups[group + WIDTH]
    tokens_per_column, slot_mode = groups[group + TOKENS_PER_COLUMN], groups[group + SLOT_MODE]
    if num_reqs <= 0 or num_positions <= 0:
        return np.int64(PAD_SLOT_ID)
    # The request is the token's own index in decode, and the first one in a prefill of one request.
    request = token if token < num_reqs else 0
    end_of_tokens = query_start_loc[num_reqs]
    start, end = query_start_loc[request], query_start_loc[request + 1]
    entry = idx_mapping[request]
    position = positions[min(token, num_positions - 1)]
    row = entry if has_idx_mapping else request
    # step 2: PAD behind the last real token
    is_valid = token < min(end_of_tokens, num_positions, num_slots)
    if HAS_MODES:
        is_valid = is_valid & (slot_mode != SLOT_MODE_NONE)
    # step 3: which request and row
    if is_valid & ((start > token) | (end <= token)):
        request = request_of(query_start_loc, num_reqs, token)
        row = -1
        if request >= 0:
            row = idx_mapping[request] if has_idx_mapping else request
    is_valid = is_valid & (row >= 0) & (row < max_num_reqs) & (position >= 0)
    columns = arena[np.int64(g) * max_num_reqs + row] if is_valid else 0
    local = position if is_valid else np.int64(0)
    # step 4: whose token it is, and its index among this rank's tokens
    if HAS_SHARDS and groups[group + WORLD_SIZE] > 1:
        world_size, interleave_size = groups[group + WORLD_SIZE], groups[group + INTERLEAVE_SIZE]
        turn = divide(local, interleave_size)
        round_index = divide(turn, world_size)
        is_valid = is_valid & (turn - round_index * world_size == groups[group + RANK])
        local = round_index * interleave_size + (local - turn * interleave_size)
    if HAS_MODES and slot_mode == SLOT_MODE_RING:
        ring = max(columns * tokens_per_column, 1)
        local = local - divide(local, ring) * ring
    # step 5: which column, and whether the row fills it
    column = column_of(local, tokens_per_column)
    # step 6: which kernel block
    is_entry = is_valid & (column < width)
    block_id = np.int64(arena[table_start + row * width + column] if is_entry else 0)
    is_valid = is_valid & (column < columns)
    if HAS_NULL_PADS and groups[group + NULL_IS_PAD]:
        is_valid = is_valid & (block_id >= groups[group + BLOCKS_PER_KV_BLOCK])
    return block_id * tokens_per_column + (local - column * tokens_per_column) if is_valid else np.int64(PAD_SLOT_ID)


@cuda.jit
def map_slots(
    idx_mapping,  # [num_reqs] int32, batch index -> row
    has_idx_mapping,  # 0: identity, and idx_mapping is any array of as many entries
    query_start_loc,  # [num_reqs + 1] int32, first token of each request
    positions,  # [num_positions] int64, token -> its index in its request
    num_reqs,
    num_positions,
    max_num_reqs,
    groups,  # [>= first_group + num_groups, NUM_FIELDS] int64
    first_group,
    num_groups,
    arena,  # [arena.size] int32
    slots,  # [num_groups, slots_stride] of the slot dtype, the first num_slots of each written
    slots_stride,
    num_slots,
):
    """Write the slot of every token, and PAD from the last real token to the end of the slots."""
    # step 1: which token and group
    y = cuda.blockIdx.y
    while y < num_groups:
        token = cuda.grid(1)
        while token < num_slots:
            slot = map_token(
                idx_mapping,
                has_idx_mapping,
                query_start_loc,
                positions,
                num_reqs,
                num_positions,
                max_num_reqs,
                groups,
                first_group + y,
                arena,
                num_slots,
                token,
            )
            # step 7: store the slot
            slots[y * slots_stride + token] = slot
            token = advance(token, cuda.gridsize(1))
        y = advance(y, cuda.gridDim.y)


def launch_map_slots(
    kernel: Kernel,
    tile: int,
    idx_mapping: Pointer | None,  # None: identity
    query_start_loc: Pointer,
    positions: Pointer,
    num_reqs: int,
    num_positions: int,
    max_num_reqs: int,
    groups: Pointer,
    first_group: int,
    num_groups: int,
    arena: Pointer,
    slots: Pointer,
    slots_stride: int,
    num_slots: int,
    stream: Any,
) -> None:
    """Launch map_slots; nothing for no slots."""
    if num_slots == 0:
        return
    arguments = (
        query_start_loc if idx_mapping is None else idx_mapping,
        int(idx_mapping is not None),
        query_start_loc,
        positions,
        _int32(num_reqs),
        _int32(num_positions),
        _int32(max_num_reqs),
        groups,
        _int32(first_group),
        _int32(num_groups),
        arena,
        slots,
        slots_stride,
        _int32(num_slots),
    )
    kernel((_grid_x(num_slots, tile), min(num_groups, MAX_GRID_Y)), (tile,), arguments, stream=stream)


# The fused step is two kernels, one after the other: apply_changes, then step_batch.


@_device_function
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
    changes,  # [..] int32: Writes.pack_changes, without its counts
    num_singles,
    num_ranges,
    num_range_values,
    num_null_ranges,
    num_nulls,
    arena,  # [arena_size] int32, written
    num_groups,
    max_num_reqs,
    arena_size,
    batch,  # [arena_size + 2 + num_groups * max_num_reqs] int32, the copy of its counts written
    copy_parts,  # blocks that copy the counts of one group; blocks behind all of them write
    mark,  # of this step; 0: the host waits for none
    last_mark,  # [1] int64, written
):
    """Write the changes of a commit into the arena, and copy the counts that step_batch reads and replaces."""
    copy_blocks = num_groups * copy_parts
    if cuda.blockIdx.x < copy_blocks:
        held_rows = batch[arena_size]
        g = divide_32(cuda.blockIdx.x, copy_parts)
        counts = g * max_num_reqs
        copy = arena_size + 2 + counts
        i = (cuda.blockIdx.x - g * copy_parts) * cuda.blockDim.x + cuda.threadIdx.x
        while i < max_num_reqs:
            held = batch[counts + i]  # at once with how many there are
            if i >= held_rows:
                break
            batch[copy + i] = held
            i = advance(i, copy_parts * cuda.blockDim.x)
        if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
            batch[arena_size + 1] = held_rows
            last_mark[0] = mark
        return
    thread = (cuda.blockIdx.x - copy_blocks) * cuda.blockDim.x + cuda.threadIdx.x
    num_threads = (cuda.gridDim.x - copy_blocks) * cuda.blockDim.x
    i = thread
    while i < num_singles:
        arena[changes[i]] = changes[num_singles + i]
        i = advance(i, num_threads)
    offsets = 2 * num_singles
    starts = offsets + num_ranges
    values = starts + num_ranges
    i = thread
    while i < num_range_values:
        range_index = range_of(changes, starts, num_ranges, i)
        arena[np.int64(changes[offsets + range_index]) + (i - changes[starts + range_index])] = changes[values + i]
        i = advance(i, num_threads)
    offsets = values + num_range_values
    starts = offsets + num_null_ranges
    i = thread
    while i < num_nulls:
        range_index = range_of(changes, starts, num_null_ranges, i)
        arena[np.int64(changes[offsets + range_index]) + (i - changes[starts + range_index])] = NULL_BLOCK_ID
        i = advance(i, num_threads)


@cuda.jit
def step_batch(
    idx_mapping,  # [num_reqs] int32, batch index -> row
    has_idx_mapping,  # 0: identity, and idx_mapping is any array of as many entries
    num_computed_tokens,  # [num_reqs] int32, batch index -> tokens
    has_num_computed_tokens,  # 0: no window is cut
    query_start_loc,  # [num_reqs + 1] int32, first token of each request
    positions,  # [num_positions] int64, token -> its index in its request
    num_reqs,
    num_reqs_padded,
    num_positions,
    max_num_reqs,
    groups,  # [num_groups, NUM_FIELDS] int64
    num_groups,
    arena,  # [arena_size] int32
    arena_size,
    batch,  # [arena_size + 2 + num_groups * max_num_reqs] int32, written
    slots,  # [num_groups, num_slots] of the slot dtype, written
    num_slots,
    gather_blocks,  # 0: nothing is gathered
    blocks_per_group,  # that map its slots
    last_mark,  # [1] int64, what apply_changes wrote
    shown_mark,  # [1] int64 in the host's memory, written
):
    """The gather and the slots of a whole step: the first gather_blocks blocks gather, the last shows, others map."""
    if cuda.blockIdx.x < gather_blocks:
        held = arena_size + 2
        held_rows = batch[held - 1]
        if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
            batch[arena_size] = num_reqs_padded
        pair = cuda.blockIdx.x
        is_pair = True  # the first turn waits for no load
        while is_pair:
            i = divide_32(pair, num_groups)
            g = pair - i * num_groups
            cell = g * max_num_reqs + i
            held_columns = batch[held + cell]
            columns = gather_row(
                idx_mapping,
                has_idx_mapping,
                num_computed_tokens,
                has_num_computed_tokens,
                num_reqs,
                max_num_reqs,
                groups,
                g,
                arena,
                batch,
                i,
            )
            stale = held_columns if i < held_rows else 0
            if stale > columns:
                batch_row = groups[g * NUM_FIELDS + TABLE_START] + i * groups[g * NUM_FIELDS + WIDTH]
                column = columns + cuda.threadIdx.x
                while column < stale:
                    batch[batch_row + column] = NULL_BLOCK_ID
                    column = advance(column, cuda.blockDim.x)
            if cuda.threadIdx.x == 0 and i < num_reqs_padded:
                batch[cell] = columns
            pair = advance(pair, gather_blocks)
            is_pair = pair < max(held_rows, num_reqs_padded) * num_groups
        return
    block = cuda.blockIdx.x - gather_blocks
    g = divide_32(block, blocks_per_group)
    if g >= num_groups:
        # apply_changes is done: the host may use the changes' memory again
        if cuda.threadIdx.x == 0 and last_mark[0] > 0:
            shown_mark[0] = last_mark[0]
        return
    token = (block - g * blocks_per_group) * cuda.blockDim.x + cuda.threadIdx.x
    while token < num_slots:
        slot = map_token(
            idx_mapping,
            has_idx_mapping,
            query_start_loc,
            positions,
            num_reqs,
            num_positions,
            max_num_reqs,
            groups,
            g,
            arena,
            num_slots,
            token,
        )
        slots[g * num_slots + token] = slot
        token = advance(token, blocks_per_group * cuda.blockDim.x)


_INT, _LONG = types.int32, types.int64
_INTS, _LONGS = types.CPointer(_INT), types.CPointer(_LONG)
_SLOTS = types.CPointer(types.void)  # stands for slots, or exported entries, of either dtype

DEVICE_FUNCTIONS = (
    *("advance", "divide", "divide_32", "column_of", "local_length", "row_of", "gather_row", "request_of", "map_token"),
    "range_of",
)
KERNELS = {
    "scatter_writes": scatter_writes,
    "null_stale_columns": null_stale_columns,
    "gather_block_tables": gather_block_tables,
    "map_slots": map_slots,
    "apply_changes": apply_changes,
    "step_batch": step_batch,
}
SIGNATURES = {
    "scatter_writes": (_LONGS, _INTS, _INTS, _INT, _INT, _INTS),
    "null_stale_columns": (_INTS, _INT, _INT, _INT, _INT, _LONGS, _INT, _INTS, _LONG, _INTS),
    "gather_block_tables": (_INTS, _INT, _INTS, _INT, _INT, _INT, _INT, _LONGS, _INT, _INTS, _LONG, _INTS),
    "map_slots": (
        *(_INTS, _INT, _INTS, _LONGS, _INT, _INT, _INT, _LONGS, _INT, _INT, _INTS),
        *(_SLOTS, _LONG, _INT),
    ),
    "apply_changes": (
        *(_INTS, _INT, _INT, _INT, _INT, _INT, _INTS, _INT, _INT, _LONG, _INTS),
        *(_INT, _LONG, _LONGS),
    ),
    "step_batch": (
        *(_INTS, _INT, _INTS, _INT, _INTS, _LONGS, _INT, _INT, _INT, _INT, _LONGS, _INT, _INTS, _LONG, _INTS),
        *(_SLOTS, _INT, _INT, _INT, _LONGS, _LONGS),
    ),
}


def signature(name: str, slot_dtype: str) -> tuple[Any, ...]:
    """Return the Numba type of each argument of a kernel."""
    slots = {"int64": _LONGS, "int32": _INTS}[slot_dtype]
    return tuple(slots if kind is _SLOTS else kind for kind in SIGNATURES[name])


def needed_features(config: BlockTableConfig) -> tuple[tuple[str, bool], ...]:
    """Return which of the features above a table's groups need."""
    groups = config.groups
    return (
        ("HAS_SHARDS", config.context_parallel.world_size > 1 and any(group.is_sharded for group in groups)),
        ("HAS_MODES", any(group.slot_mode != "linear" for group in groups)),
        ("HAS_NULL_PADS", any(group.null_is_pad for group in groups)),
        ("HAS_WINDOWS", any(group.sliding_window is not None for group in groups)),
        ("HAS_ODD_SIZES", any(group.tokens_per_column.bit_count() != 1 for group in groups)),
    )


FEATURES_OF = {
    "gather_block_tables": ("HAS_SHARDS", "HAS_WINDOWS"),
    "map_slots": ("HAS_SHARDS", "HAS_MODES", "HAS_NULL_PADS", "HAS_ODD_SIZES"),
    "step_batch": ("HAS_SHARDS", "HAS_MODES", "HAS_NULL_PADS", "HAS_WINDOWS", "HAS_ODD_SIZES"),
}
"""Which features a kernel knows; the others know none."""


def specialised(name: str, features: tuple[tuple[str, bool], ...]) -> Any:
    """Return a kernel that is compiled with some of the features, the same one for those that it knows."""
    return _specialised(name, tuple(feature for feature in features if feature[0] in FEATURES_OF.get(name, ())))


@cache
def _specialised(name: str, features: tuple[tuple[str, bool], ...]) -> Any:
    scope = {**KERNELS[name].py_func.__globals__, **dict(features)}  # Numba takes globals as constants
    for function in scope.keys() & DEVICE_FUNCTIONS:
        scope[function] = _device_function(_copy(scope[function].py_func, scope))
    made = cuda.jit(_copy(KERNELS[name].py_func, scope))
    SPECIALISED.append(made)
    return made


SPECIALISED: list[Any] = []
"""Every kernel that `specialised` has made."""


def _copy(function: Any, scope: dict[str, Any]) -> Any:
    copied = FunctionType(function.__code__, scope, function.__name__)
    copied.__module__ = function.__module__
    return copied


def _int32(value: int) -> int:
    """An exact scalar: the bytes of an argument are handed on as the kernel's type."""
    if not -MAX_INT32 - 1 <= value <= MAX_INT32:
        raise OverflowError(f"{value} does not fit the kernel's int")
    return value


def _grid_x(entries: int, tile: int) -> int:
    return min(-(-entries // tile), MAX_INT32 // tile)
