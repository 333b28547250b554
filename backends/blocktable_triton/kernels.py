"""The four kernels in Triton, each with its launcher below it. Every loop is grid-stride: any grid gives one result.

A table's memory is one arena: filled counts [num_groups, max_num_reqs], then each group's rows [max_num_reqs, width].
A batch has the same layout, and one entry behind it: its counts say how many columns each batch row holds, the last
entry how many rows the last batch had.

Arrays come as addresses and every argument has its type beside it: nothing about a call's values, alignment or owner
asks for another compilation, and memory that Triton takes for the host's (mapped) is read like any other. Loops are
`while`: over a `range` of tensors the interpreter of triton 3.6 fails with numpy 2.4.
"""

# ruff: noqa: N803 - Triton writes compile-time arguments in capitals.
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from blocktable import GROUP_FIELDS
from blocktable import NULL_BLOCK_ID as _NULL_BLOCK_ID
from blocktable import PAD_SLOT_ID as _PAD_SLOT_ID

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether `triton.jit` made interpreted functions when this module was loaded."""

MAX_INT32 = 2**31 - 1
MAX_GRID_Y = 65535

PAD_SLOT_ID = tl.constexpr(_PAD_SLOT_ID)
NULL_BLOCK_ID = tl.constexpr(_NULL_BLOCK_ID)
SLOT_MODE_RING = tl.constexpr(1)
SLOT_MODE_NONE = tl.constexpr(2)
INT32_LIMIT = tl.constexpr(MAX_INT32)

# Places in a row of BlockTableConfig.group_fields().
NUM_FIELDS = tl.constexpr(len(GROUP_FIELDS))
TABLE_START = tl.constexpr(GROUP_FIELDS.index("table_start"))
WIDTH = tl.constexpr(GROUP_FIELDS.index("width"))
TOKENS_PER_COLUMN = tl.constexpr(GROUP_FIELDS.index("tokens_per_column"))
BLOCKS_PER_KV_BLOCK = tl.constexpr(GROUP_FIELDS.index("blocks_per_kv_block"))
SLOT_MODE = tl.constexpr(GROUP_FIELDS.index("slot_mode"))
NULL_IS_PAD = tl.constexpr(GROUP_FIELDS.index("null_is_pad"))
SLIDING_WINDOW = tl.constexpr(GROUP_FIELDS.index("sliding_window"))
WORLD_SIZE = tl.constexpr(GROUP_FIELDS.index("world_size"))
RANK = tl.constexpr(GROUP_FIELDS.index("rank"))
INTERLEAVE_SIZE = tl.constexpr(GROUP_FIELDS.index("interleave_size"))

Kernel = Any  # called with (grid, arguments, stream)


def _jit(function: Any) -> Any:
    """Make a kernel whose arguments are never specialised: neither 1, nor multiples of 16, nor values above 2**31."""
    names = [name for name, kind in function.__annotations__.items() if kind != "tl.constexpr"]
    return triton.jit(function, do_not_specialize=names, do_not_specialize_on_alignment=names)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr):
    """An address as a pointer; the interpreter types arguments by their value, so 64 bits are asked for here."""
    return address.to(tl.int64).to(tl.pointer_type(DTYPE))


@triton.jit
def _divide(a, b, is_small):
    """A // b for a >= 0 and b > 0: 64-bit division costs some 70 instructions, and few operands need it.

    is_small: whether no entry of `a` reaches INT32_LIMIT; then a larger `b` may stand for it.
    """
    quotient = a
    if is_small:
        quotient = (a.to(tl.uint32) // tl.minimum(b, INT32_LIMIT).to(tl.uint32)).to(tl.int64)
    else:
        quotient = a // b
    return quotient


@triton.jit
def _local_length(tokens, world_size, rank, interleave_size):
    """How many of the first `tokens` tokens this rank holds (R19)."""
    turn = world_size * interleave_size
    rest = tokens % turn - rank * interleave_size
    rest = tl.minimum(tl.maximum(rest, 0), interleave_size)
    return tokens // turn * interleave_size + rest


@triton.jit
def _row_of(idx_mapping, batch_index, num_reqs, max_num_reqs):
    """Row of a batch index; -1 for a dummy, for padding and for a batch index of -1."""
    is_request = (batch_index >= 0) & (batch_index < num_reqs)
    row = batch_index
    if idx_mapping != 0:
        row = tl.load(_pointer(idx_mapping, tl.int32) + batch_index, mask=is_request, other=-1)
    return tl.where(is_request & (row >= 0) & (row < max_num_reqs), row, -1)


@_jit
def scatter_writes(
    offsets: tl.int64,  # [num_ranges] int64, first entry of each range in the arena
    starts: tl.int64,  # [num_ranges + 1] int32, first value of each range
    values: tl.int64,  # [num_values] int32
    num_ranges: tl.int32,
    num_values: tl.int32,
    arena: tl.int64,  # [arena.size] int32, written
    TILE: tl.constexpr,
):
    """Write every range of values into the arena."""
    offset_ptr, start_ptr = _pointer(offsets, tl.int64), _pointer(starts, tl.int32)
    value_ptr, arena_ptr = _pointer(values, tl.int32), _pointer(arena, tl.int32)
    first = tl.program_id(0).to(tl.int64) * TILE
    while first < num_values:
        # step 1: which value of which range
        value = first + tl.arange(0, TILE)
        is_value = value < num_values
        range_index = value
        if num_ranges != num_values:  # else each range holds one value, as in steady decode
            range_index = value * 0
            size = num_ranges
            while size > 1:  # the range is one of `size` from range_index on
                half = size // 2
                middle = range_index + half
                start = tl.load(start_ptr + middle, mask=is_value, other=0)
                range_index = tl.where(start <= value, middle, range_index)
                size -= half
        # step 2: store the value
        offset = tl.load(offset_ptr + range_index, mask=is_value, other=0)
        start = tl.load(start_ptr + range_index, mask=is_value, other=0)
        stored = tl.load(value_ptr + value, mask=is_value, other=0)
        tl.store(arena_ptr + offset + (value - start), stored, mask=is_value)
        first += tl.num_programs(0).to(tl.int64) * TILE


def launch_scatter_writes(
    kernel: Kernel,
    tile: int,
    staged: int,  # address of a packed commit: offsets, starts, values
    num_ranges: int,
    num_values: int,
    arena: int,  # address
    stream: Any,
) -> None:
    """Launch scatter_writes; nothing for no values."""
    if num_values == 0:
        return
    starts = staged + 8 * num_ranges
    values = starts + 4 * (num_ranges + 1)
    arguments = (staged, starts, values, _int32(num_ranges), _int32(num_values), arena)
    kernel(_grid(num_values, tile, 1), arguments, stream)


@_jit
def null_stale_columns(
    idx_mapping: tl.int64,  # [num_reqs] int32, batch index -> row; 0: identity
    num_reqs: tl.int32,
    num_reqs_padded: tl.int32,
    max_num_reqs: tl.int32,
    groups: tl.int64,  # [num_groups, NUM_FIELDS] int64
    num_groups: tl.int32,
    arena: tl.int64,  # [arena_size] int32
    arena_size: tl.int64,
    batch: tl.int64,  # [arena_size + 1] int32, tables written, counts read
    TILE: tl.constexpr,
):
    """Make every batch row NULL behind the columns that its row fills."""
    arena_ptr, batch_ptr = _pointer(arena, tl.int32), _pointer(batch, tl.int32)
    # Rows behind this batch hold what a larger one left; further ones are NULL, whatever their old counts say.
    held_rows = tl.load(batch_ptr + arena_size)
    num_rows = tl.maximum(held_rows, num_reqs_padded)
    # step 1: which batch row and group
    g = tl.program_id(1)
    while g < num_groups:
        group_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS
        table_start, width = tl.load(group_ptr + TABLE_START), tl.load(group_ptr + WIDTH)
        first_count = max_num_reqs.to(tl.int64) * g
        i = tl.program_id(0)
        while i < num_rows:
            # step 2: how many columns its row fills
            row = _row_of(idx_mapping, i, num_reqs, max_num_reqs)
            columns = tl.load(arena_ptr + first_count + row, mask=row >= 0, other=0)
            # step 3: NULL over what an earlier batch left behind them
            held = tl.load(batch_ptr + first_count + i)
            batch_row = batch_ptr + table_start + width * i
            first = columns
            while first < held:
                column = first + tl.arange(0, TILE)
                tl.store(batch_row + column, NULL_BLOCK_ID, mask=column < held)
                first += TILE
            i += tl.num_programs(0)
        g += tl.num_programs(1)


def launch_null_stale_columns(
    kernel: Kernel,
    tile: int,
    idx_mapping: int,  # address; 0: identity
    num_reqs: int,
    num_reqs_padded: int,
    max_num_reqs: int,
    groups: int,  # address
    num_groups: int,
    arena: int,  # address
    arena_size: int,
    batch: int,  # address
    stream: Any,
) -> None:
    """Launch null_stale_columns; an empty batch too: a larger one may have come before."""
    arguments = (
        idx_mapping,
        _int32(num_reqs),
        _int32(num_reqs_padded),
        _int32(max_num_reqs),
        groups,
        _int32(num_groups),
        arena,
        arena_size,
        batch,
    )
    kernel(_grid(num_reqs_padded, 1, num_groups), arguments, stream)


@_jit
def gather_block_tables(
    idx_mapping: tl.int64,  # [num_reqs] int32, batch index -> row; 0: identity
    num_computed_tokens: tl.int64,  # [num_reqs] int32, batch index -> tokens; 0: no window is cut
    num_reqs: tl.int32,
    num_reqs_padded: tl.int32,
    max_num_reqs: tl.int32,
    groups: tl.int64,  # [num_groups, NUM_FIELDS] int64
    num_groups: tl.int32,
    arena: tl.int64,  # [arena_size] int32
    arena_size: tl.int64,
    batch: tl.int64,  # [arena_size + 1] int32, written
    TILE: tl.constexpr,
):
    """Write the columns that the batch's rows fill, and remember how many there are."""
    arena_ptr, batch_ptr = _pointer(arena, tl.int32), _pointer(batch, tl.int32)
    is_first_program = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    tl.store(batch_ptr + arena_size, num_reqs_padded, mask=is_first_program)
    # step 1: which batch row and group
    g = tl.program_id(1)
    while g < num_groups:
        group_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS
        table_start, width = tl.load(group_ptr + TABLE_START), tl.load(group_ptr + WIDTH)
        sliding_window, world_size = tl.load(group_ptr + SLIDING_WINDOW), tl.load(group_ptr + WORLD_SIZE)
        first_count = max_num_reqs.to(tl.int64) * g
        i = tl.program_id(0)
        while i < num_reqs_padded:
            # step 2: how many columns its row fills
            row = _row_of(idx_mapping, i, num_reqs, max_num_reqs)
            columns = tl.load(arena_ptr + first_count + row, mask=row >= 0, other=0)
            # step 3: how many of them the window has left behind
            first_kept = tl.full((), 0, tl.int64)
            if (num_computed_tokens != 0) & (sliding_window > 0) & (num_reqs > i):
                computed = tl.load(_pointer(num_computed_tokens, tl.int32) + i).to(tl.int64)
                first_kept = tl.maximum(computed - sliding_window + 1, 0)
                if world_size > 1:
                    rank, interleave_size = tl.load(group_ptr + RANK), tl.load(group_ptr + INTERLEAVE_SIZE)
                    first_kept = _local_length(first_kept, world_size, rank, interleave_size)
                first_kept = first_kept // tl.load(group_ptr + TOKENS_PER_COLUMN)
            # step 4: store the columns in use, NULL before them
            table_row = arena_ptr + table_start + width * tl.maximum(row, 0)
            batch_row = batch_ptr + table_start + width * i
            first = 0
            while first < columns:
                column = first + tl.arange(0, TILE)
                is_kept = (column >= first_kept) & (column < columns)
                block_id = tl.load(table_row + column, mask=is_kept, other=NULL_BLOCK_ID)
                tl.store(batch_row + column, block_id, mask=column < columns)
                first += TILE
            # step 5: remember how many columns the batch row holds
            tl.store(batch_ptr + first_count + i, columns)
            i += tl.num_programs(0)
        g += tl.num_programs(1)


def launch_gather_block_tables(
    kernel: Kernel,
    tile: int,
    idx_mapping: int,  # address; 0: identity
    num_computed_tokens: int,  # address; 0: no window is cut
    num_reqs: int,
    num_reqs_padded: int,
    max_num_reqs: int,
    groups: int,  # address
    num_groups: int,
    arena: int,  # address
    arena_size: int,
    batch: int,  # address
    stream: Any,
) -> None:
    """Launch gather_block_tables."""
    arguments = (
        idx_mapping,
        num_computed_tokens,
        _int32(num_reqs),
        _int32(num_reqs_padded),
        _int32(max_num_reqs),
        groups,
        _int32(num_groups),
        arena,
        arena_size,
        batch,
    )
    kernel(_grid(num_reqs_padded, 1, num_groups), arguments, stream)


@_jit
def map_slots(
    idx_mapping: tl.int64,  # [num_reqs] int32, batch index -> row; 0: identity
    query_start_loc: tl.int64,  # [num_reqs + 1] int32, first token of each request
    positions: tl.int64,  # [num_positions] int64, token -> its index in its request
    num_reqs: tl.int32,
    num_positions: tl.int32,
    max_num_reqs: tl.int32,
    groups: tl.int64,  # [>= first_group + num_groups, NUM_FIELDS] int64
    first_group: tl.int32,
    num_groups: tl.int32,
    arena: tl.int64,  # [arena.size] int32
    slots: tl.int64,  # [num_groups, slots_stride] SLOT_T, the first num_slots of each written
    slots_stride: tl.int64,
    num_slots: tl.int32,
    SLOT_T: tl.constexpr,  # tl.int64 or tl.int32
    TILE: tl.constexpr,
):
    """Write the slot of every token, and PAD from the last real token to the end of the slots."""
    start_ptr, arena_ptr = _pointer(query_start_loc, tl.int32), _pointer(arena, tl.int32)
    position_ptr, slot_ptr = _pointer(positions, tl.int64), _pointer(slots, SLOT_T)
    num_tokens = tl.minimum(tl.load(start_ptr + num_reqs), tl.minimum(num_positions, num_slots))
    # step 1: which token and group
    y = tl.program_id(1)
    while y < num_groups:
        g = first_group + y
        group_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS
        table_start, width = tl.load(group_ptr + TABLE_START), tl.load(group_ptr + WIDTH)
        tokens_per_column, slot_mode = tl.load(group_ptr + TOKENS_PER_COLUMN), tl.load(group_ptr + SLOT_MODE)
        null_is_pad, world_size = tl.load(group_ptr + NULL_IS_PAD), tl.load(group_ptr + WORLD_SIZE)
        blocks_per_kv_block = tl.load(group_ptr + BLOCKS_PER_KV_BLOCK)
        first = tl.program_id(0).to(tl.int64) * TILE
        while first < num_slots:
            token = first + tl.arange(0, TILE)
            slot = tl.full((TILE,), PAD_SLOT_ID, tl.int64)
            # step 2: PAD behind the last real token
            is_valid = token < num_tokens
            if (num_tokens > first) & (slot_mode != SLOT_MODE_NONE):
                # step 3: which request and row
                may_guess = is_valid & (token < num_reqs)
                start = tl.load(start_ptr + token, mask=may_guess, other=0)
                end = tl.load(start_ptr + token + 1, mask=may_guess, other=0)
                is_guess = may_guess & (start <= token) & (token < end)
                request = tl.where(is_guess, token, 0).to(tl.int32)
                is_searched = is_valid & (is_guess == 0)  # else the token has its request's index, as in decode
                size = tl.max(tl.where(is_searched, num_reqs, 0), 0)
                while size > 1:  # the request is one of `size` from `request` on
                    half = size // 2
                    middle = request + half
                    start = tl.load(start_ptr + middle, mask=is_searched, other=0)
                    request = tl.where(is_searched & (start <= token), middle, request)
                    size -= half
                start = tl.load(start_ptr + request, mask=is_searched, other=0)
                request = tl.where(is_searched & (start > token), -1, request)
                row = _row_of(idx_mapping, request, num_reqs, max_num_reqs)
                row = tl.where(is_valid, row, -1)
                count_ptr = arena_ptr + max_num_reqs.to(tl.int64) * g
                columns = tl.load(count_ptr + row, mask=row >= 0, other=0).to(tl.int64)
                position = tl.load(position_ptr + token, mask=is_valid, other=-1)
                is_valid = (columns > 0) & (position >= 0)
                position = tl.where(is_valid, position, 0)
                # step 4: whose token it is, and its index among this rank's tokens
                is_small = tl.max(position, 0) < INT32_LIMIT
                local = position
                if world_size > 1:
                    rank, interleave_size = tl.load(group_ptr + RANK), tl.load(group_ptr + INTERLEAVE_SIZE)
                    turn = _divide(position, interleave_size, is_small)
                    round_index = _divide(turn, world_size, is_small)
                    is_valid = is_valid & (turn - round_index * world_size == rank)
                    local = round_index * interleave_size + (position - turn * interleave_size)
                if slot_mode == SLOT_MODE_RING:
                    ring = tl.maximum(columns * tokens_per_column, 1)
                    local = position - _divide(position, ring, is_small) * ring
                # step 5: which column, and whether the row fills it
                column = _divide(local, tokens_per_column, is_small)
                is_valid = is_valid & (column < columns)
                # step 6: which kernel block
                table_row = arena_ptr + table_start + width * row
                block_id = tl.load(table_row + column, mask=is_valid, other=0).to(tl.int64)
                is_valid = is_valid & ((null_is_pad == 0) | (block_id >= blocks_per_kv_block))
                slot = tl.where(is_valid, block_id * tokens_per_column + (local - column * tokens_per_column), slot)
            # step 7: store the slot
            tl.store(slot_ptr + slots_stride.to(tl.int64) * y + token, slot.to(SLOT_T), mask=token < num_slots)
            first += tl.num_programs(0).to(tl.int64) * TILE
        y += tl.num_programs(1)


def launch_map_slots(
    kernel: Kernel,
    tile: int,
    idx_mapping: int,  # address; 0: identity
    query_start_loc: int,  # address
    positions: int,  # address
    num_reqs: int,
    num_positions: int,
    max_num_reqs: int,
    groups: int,  # address
    first_group: int,
    num_groups: int,
    arena: int,  # address
    slots: int,  # address
    slots_stride: int,
    num_slots: int,
    stream: Any,
) -> None:
    """Launch map_slots; nothing for no slots."""
    if num_slots == 0:
        return
    arguments = (
        idx_mapping,
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
    kernel(_grid(num_slots, tile, num_groups), arguments, stream)


def _int32(value: int) -> int:
    """An exact scalar: triton 3.9 cuts off what does not fit, 3.6 raises."""
    if not -(2**31) <= value <= MAX_INT32:
        raise OverflowError(f"{value} does not fit the kernel's int")
    return value


def _grid(entries: int, tile: int, num_groups: int) -> tuple[int, int, int]:
    """Programs along x for the entries, along y for the groups; at least one, for a kernel that clears as well.

    Triton multiplies the sizes as 32-bit ints and launches nothing where the product overflows.
    """
    grid_y = min(num_groups, MAX_GRID_Y)
    return max(1, min(-(-entries // tile), MAX_INT32 // (1024 * grid_y))), grid_y, 1
