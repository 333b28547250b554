"""The four kernels in Numba, each with its launcher below it. Loops are grid-stride: any grid gives the same result.

A table's memory is one arena: filled counts [num_groups, max_num_reqs], then each group's rows [max_num_reqs, width].
A batch has the same layout, and one entry behind it: its counts say how many columns each batch row holds, the last
entry how many rows the last batch had.

Arrays come as pointers, and SIGNATURES fixes every argument's type: nothing about an array (its owner, layout, flags)
asks for another compilation, and an index is never taken from the end. Loops are `while`: Numba counts the turns of a
`range` first, by a 64-bit division. Arithmetic on int32 gives int64 in Numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda, types

from blocktable import GROUP_FIELDS, NULL_BLOCK_ID, PAD_SLOT_ID

MAX_INT32 = 2**31 - 1
MAX_GRID_Y = 65535

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
def divide(a, b):
    """A // b for a >= 0 and b > 0: unsigned, which needs no care for signs, and in 32 bits where both operands fit."""
    return np.int64(np.uint64(a) // np.uint64(b))


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
        value += cuda.gridsize(1)


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
    batch,  # [arena_size + 1] int32, tables written, counts read
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
                column += cuda.blockDim.x
            i += cuda.gridDim.x
        g += cuda.gridDim.y


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
    batch,  # [arena_size + 1] int32, written
):
    """Write the columns that the batch's rows fill, and remember how many there are."""
    if cuda.blockIdx.x == 0 and cuda.blockIdx.y == 0 and cuda.threadIdx.x == 0:
        batch[arena_size] = num_reqs_padded
    # step 1: which batch row and group
    g = cuda.blockIdx.y
    while g < num_groups:
        counts = np.int64(g) * max_num_reqs
        group = g * NUM_FIELDS
        table_start, width = groups[group + TABLE_START], groups[group + WIDTH]
        sliding_window, world_size = groups[group + SLIDING_WINDOW], groups[group + WORLD_SIZE]
        i = cuda.blockIdx.x
        while i < num_reqs_padded:
            # step 2: how many columns its row fills
            row = row_of(idx_mapping, has_idx_mapping, i, num_reqs, max_num_reqs)
            columns = 0 if row < 0 else arena[counts + row]
            # step 3: how many of them the window has left behind
            first = np.int64(0)
            if has_num_computed_tokens and sliding_window and i < num_reqs:
                first = max(num_computed_tokens[i] - sliding_window + 1, 0)
                if world_size > 1:
                    first = local_length(first, world_size, groups[group + RANK], groups[group + INTERLEAVE_SIZE])
                first = divide(first, groups[group + TOKENS_PER_COLUMN])
            # step 4: store the columns in use, NULL before them
            table_row = table_start + max(row, 0) * width
            batch_row = table_start + i * width
            column = cuda.threadIdx.x
            while column < columns:
                batch[batch_row + column] = NULL_BLOCK_ID if column < first else arena[table_row + column]
                column += cuda.blockDim.x
            # step 5: remember how many columns the batch row holds
            if cuda.threadIdx.x == 0:
                batch[counts + i] = columns
            i += cuda.gridDim.x
        g += cuda.gridDim.y


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


@cuda.jit
def map_slots(
    idx_mapping,  # [num_reqs] int32, batch index -> row
    has_idx_mapping,  # 0: identity
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
    num_tokens = min(query_start_loc[num_reqs], num_positions, num_slots)
    # step 1: which token and group
    y = cuda.blockIdx.y
    while y < num_groups:
        g = first_group + y
        counts = np.int64(g) * max_num_reqs
        group = g * NUM_FIELDS
        table_start, width = groups[group + TABLE_START], groups[group + WIDTH]
        tokens_per_column, slot_mode = groups[group + TOKENS_PER_COLUMN], groups[group + SLOT_MODE]
        null_is_pad, blocks_per_kv_block = groups[group + NULL_IS_PAD], groups[group + BLOCKS_PER_KV_BLOCK]
        world_size, rank = groups[group + WORLD_SIZE], groups[group + RANK]
        interleave_size = groups[group + INTERLEAVE_SIZE]
        token = cuda.grid(1)
        while token < num_slots:
            slot = np.int64(PAD_SLOT_ID)
            # step 2: PAD behind the last real token
            if token < num_tokens and slot_mode != SLOT_MODE_NONE:
                # step 3: which request and row
                request, end = token, num_reqs
                is_guess = token < num_reqs and query_start_loc[token] <= token and token < query_start_loc[token + 1]
                if not is_guess:  # else the token has its request's index, as in decode
                    request = -1
                    while end - request > 1:
                        middle = request + ((end - request) >> 1)
                        if query_start_loc[middle] <= token:
                            request = middle
                        else:
                            end = middle
                row = -1
                if request >= 0:
                    row = row_of(idx_mapping, has_idx_mapping, request, num_reqs, max_num_reqs)
                columns = 0 if row < 0 else arena[counts + row]
                position = positions[token]
                if columns > 0 and position >= 0:
                    # step 4: whose token it is, and its index among this rank's tokens
                    local = position
                    is_owner = True
                    if world_size > 1:
                        turn = divide(position, interleave_size)
                        round_index = divide(turn, world_size)
                        is_owner = turn - round_index * world_size == rank
                        local = round_index * interleave_size + (position - turn * interleave_size)
                    if slot_mode == SLOT_MODE_RING:
                        ring = columns * tokens_per_column
                        local = position - divide(position, ring) * ring
                    # step 5: which column, and whether the row fills it
                    column = divide(local, tokens_per_column)
                    if is_owner and column < columns:
                        # step 6: which kernel block
                        block_id = np.int64(arena[table_start + row * width + column])
                        if not null_is_pad or block_id >= blocks_per_kv_block:
                            slot = block_id * tokens_per_column + (local - column * tokens_per_column)
            # step 7: store the slot
            slots[y * slots_stride + token] = slot
            token += cuda.gridsize(1)
        y += cuda.gridDim.y


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
        idx_mapping,
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


_INT, _LONG = types.int32, types.int64
_INTS, _LONGS = types.CPointer(_INT), types.CPointer(_LONG)

KERNELS = {
    "scatter_writes": scatter_writes,
    "null_stale_columns": null_stale_columns,
    "gather_block_tables": gather_block_tables,
    "map_slots": map_slots,
}
SIGNATURES = {
    "scatter_writes": (_LONGS, _INTS, _INTS, _INT, _INT, _INTS),
    "null_stale_columns": (_INTS, _INT, _INT, _INT, _INT, _LONGS, _INT, _INTS, _LONG, _INTS),
    "gather_block_tables": (_INTS, _INT, _INTS, _INT, _INT, _INT, _INT, _LONGS, _INT, _INTS, _LONG, _INTS),
    "map_slots": (
        *(_INTS, _INT, _INTS, _LONGS, _INT, _INT, _INT, _LONGS, _INT, _INT, _INTS),
        *(_LONGS, _LONG, _INT),  # slots of int64
    ),
}


def signature(name: str, slot_dtype: str) -> tuple[Any, ...]:
    """Return the Numba type of each argument of a kernel."""
    types_of_arguments = SIGNATURES[name]
    if name == "map_slots" and slot_dtype == "int32":
        return (*types_of_arguments[:-3], _INTS, *types_of_arguments[-2:])
    return types_of_arguments


def _int32(value: int) -> int:
    """An exact scalar: the bytes of an argument are handed on as the kernel's type."""
    if not -MAX_INT32 - 1 <= value <= MAX_INT32:
        raise OverflowError(f"{value} does not fit the kernel's int")
    return value


def _grid_x(entries: int, tile: int) -> int:
    return min(-(-entries // tile), MAX_INT32 // tile)
