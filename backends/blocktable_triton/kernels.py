"""The four kernels in Triton, each with its launcher below it. Every loop is grid-stride: any grid gives one result.

A table's memory is one arena: filled counts [num_groups, max_num_reqs], then each group's rows [max_num_reqs, width].
A batch has the same layout, so its counts say how many columns each batch row holds; behind it lie how many rows the
last batch had, and a copy of these counts that the fused step makes for itself: [arena_size + 2 + num_groups *
max_num_reqs] in all.

Arrays come as addresses and every argument has its type beside it: nothing about a call's values, alignment or owner
asks for another compilation, and memory that Triton takes for the host's (mapped) is read like any other. Loops are
`while`: over a `range` of tensors the interpreter of triton 3.6 fails with numpy 2.4.
"""

# ruff: noqa: N803 - Triton writes compile-time arguments in capitals.
from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

from blocktable import GROUP_FIELDS, BlockTableConfig
from blocktable import NULL_BLOCK_ID as _NULL_BLOCK_ID
from blocktable import PAD_SLOT_ID as _PAD_SLOT_ID

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether `triton.jit` made interpreted functions when this module was loaded."""

MAX_INT32 = 2**31 - 1
MAX_GRID_Y = 65535
MANY_SLOTS = 1 << 18
"""About one slot for each thread that a large GPU keeps resident."""
MAX_DRAFT = 16
"""Tokens of one request in a step of speculative decoding, at most."""
TILE, LONG_TILE, EMULATED_TILE = 128, 512, 32
WARPS, LONG_WARPS = 4, 2
"""Of a program. At 16 million tokens LONG_TILE with 2 is at 92 % of a copy, with 4 at 89 %, a tile of 1,024 at 84 %."""

PAD_SLOT_ID = tl.constexpr(_PAD_SLOT_ID)
NULL_BLOCK_ID = tl.constexpr(_NULL_BLOCK_ID)
SLOT_MODE_RING = tl.constexpr(1)
SLOT_MODE_NONE = tl.constexpr(2)
INT32_LIMIT = tl.constexpr(MAX_INT32)

# What a table's groups need, as bits of FEATURES. A launch of a few microseconds is half instruction fetches: what no
# group needs is left out when a kernel is compiled.
HAS_SHARDS = tl.constexpr(1)  # a group is sharded over context-parallel ranks
HAS_MODES = tl.constexpr(2)  # a group's slot_mode is "ring" or "none"
HAS_NULL_PADS = tl.constexpr(4)  # a group's null_is_pad is set
HAS_WINDOWS = tl.constexpr(8)  # a group has a sliding window
HAS_ODD_SIZES = tl.constexpr(16)  # a group's tokens_per_column is no power of two
HAS_LARGE_POSITIONS = tl.constexpr(32)  # a position that has a slot may not fit 32 bits
OVERLAPS = tl.constexpr(64)  # step_batch may start before apply_changes has ended, and waits for that (CUDA, sm_90)

# Places in a row of `group_fields`.
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
COLUMN_SHIFT = tl.constexpr(len(GROUP_FIELDS))  # tokens_per_column is 1 << it, where it is a power of two
NUM_FIELDS = tl.constexpr(len(GROUP_FIELDS) + 1)

Kernel = Any  # called with (grid, arguments, stream)


def group_fields(config: BlockTableConfig) -> np.ndarray[Any, Any]:
    """Return [num_groups, NUM_FIELDS] int64: the configuration's fields, and what only these kernels want."""
    shifts = [group.tokens_per_column.bit_length() - 1 for group in config.groups]
    return np.column_stack((config.group_fields(), np.array(shifts, np.int64)))


def needed_features(config: BlockTableConfig) -> int:
    """Return which features a table's groups need."""
    groups = config.groups
    world_size = config.context_parallel.world_size
    tokens = [
        width * group.tokens_per_column * (world_size if group.is_sharded else 1)
        for group, width in zip(groups, config.arena.widths, strict=True)
    ]
    # A ring takes any position.
    is_large = any(group.slot_mode == "ring" for group in groups) or max(tokens) >= MAX_INT32
    features = {
        HAS_SHARDS: world_size > 1 and any(group.is_sharded for group in groups),
        HAS_MODES: any(group.slot_mode != "linear" for group in groups),
        HAS_NULL_PADS: any(group.null_is_pad for group in groups),
        HAS_WINDOWS: any(group.sliding_window is not None for group in groups),
        HAS_ODD_SIZES: any(group.tokens_per_column.bit_count() != 1 for group in groups),
        HAS_LARGE_POSITIONS: is_large,
    }
    return sum(feature.value for feature, is_needed in features.items() if is_needed)


def gather_features(features: int) -> int:
    """Return those of the features that gather_block_tables knows: a table with others shares its kernel."""
    return features & int(HAS_WINDOWS.value | HAS_SHARDS.value) if features & HAS_WINDOWS.value else 0


def map_features(features: int) -> int:
    """Return those of the features that map_slots knows."""
    return features & ~int(HAS_WINDOWS.value)


def _jit(function: Any) -> Any:
    """Make a kernel whose arguments are never specialised: neither 1, nor multiples of 16, nor values above 2**31."""
    names = [name for name, kind in function.__annotations__.items() if kind != "tl.constexpr"]
    return triton.jit(function, do_not_specialize=names, do_not_specialize_on_alignment=names)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr):
    """An address as a pointer; the interpreter types arguments by their value, so 64 bits are asked for here."""
    return address.to(tl.int64).to(tl.pointer_type(DTYPE))


@triton.jit
def _divide(a, b):
    """A // b for a >= 0 and b > 0, as wide as `a`: 64-bit division costs some 70 instructions."""
    if a.dtype == tl.int32:
        quotient = (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int32)
    else:
        quotient = (a.to(tl.uint64) // b.to(tl.uint64)).to(tl.int64)
    return quotient


@triton.jit
def _local_length(tokens, world_size, rank, interleave_size):
    """How many of the first `tokens` tokens this rank holds (R19)."""
    turn = world_size * interleave_size
    turns = _divide(tokens, turn)
    rest = tokens - turns * turn - rank * interleave_size
    rest = tl.minimum(tl.maximum(rest, 0), interleave_size)
    return turns * interleave_size + rest


@triton.jit
def _row_of(idx_mapping, batch_index, num_reqs, max_num_reqs):
    """Row of a batch index; -1 for a dummy, for padding and for a batch index of -1. No branch: see _map_tile."""
    num_entries = tl.where(idx_mapping != 0, num_reqs, 0)
    is_entry = (batch_index >= 0) & (batch_index < num_entries)
    row = tl.load(_pointer(idx_mapping, tl.int32) + batch_index, mask=is_entry, other=-1)
    row = tl.where(idx_mapping != 0, row, batch_index)
    return tl.where((batch_index < num_reqs) & (row >= 0) & (row < max_num_reqs), row, -1)


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
    batch: tl.int64,  # [arena_size + 1 ..] int32, tables written, counts read
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


@triton.jit
def _gather_rows(
    idx_mapping,
    num_computed_tokens,
    num_reqs,
    max_num_reqs,
    group_ptr,
    g,
    arena_ptr,
    batch_ptr,
    i,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the columns that some batch rows' rows fill, and return how many they are. i: the batch rows."""
    table_start, width = tl.load(group_ptr + TABLE_START), tl.load(group_ptr + WIDTH)
    # step 2: how many columns its row fills
    row = _row_of(idx_mapping, i, num_reqs, max_num_reqs)
    columns = tl.load(arena_ptr + max_num_reqs.to(tl.int64) * g + row, mask=row >= 0, other=0)
    # step 3: how many of them the window has left behind
    first_kept = row.to(tl.int64) * 0
    if HAS_WINDOWS & FEATURES:
        sliding_window = tl.load(group_ptr + SLIDING_WINDOW)
        if (num_computed_tokens != 0) & (sliding_window > 0):
            computed = tl.load(_pointer(num_computed_tokens, tl.int32) + i, mask=i < num_reqs, other=0).to(tl.int64)
            first_kept = tl.maximum(computed - sliding_window + 1, 0)
            if HAS_SHARDS & FEATURES:
                world_size = tl.load(group_ptr + WORLD_SIZE)
                if world_size > 1:
                    rank, interleave_size = tl.load(group_ptr + RANK), tl.load(group_ptr + INTERLEAVE_SIZE)
                    first_kept = _local_length(first_kept, world_size, rank, interleave_size)
            first_kept = _divide(first_kept, tl.load(group_ptr + TOKENS_PER_COLUMN))
    # step 4: store the columns in use, NULL before them
    table_row = arena_ptr + table_start + width * tl.maximum(row, 0)
    batch_row = batch_ptr + table_start + width * i
    end = tl.max(columns, 0)
    first = end * 0
    while first < end:
        column = first + tl.arange(0, TILE)[None, :]
        is_column = column < columns[:, None]
        is_kept = is_column
        if HAS_WINDOWS & FEATURES:
            is_kept = is_column & (column >= first_kept[:, None])
        block_id = tl.load(table_row[:, None] + column, mask=is_kept, other=NULL_BLOCK_ID)
        tl.store(batch_row[:, None] + column, block_id, mask=is_column)
        first += TILE
    return columns


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
    batch: tl.int64,  # [arena_size + 1 ..] int32, written
    FEATURES: tl.constexpr,
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
        i = tl.program_id(0)
        while i < num_reqs_padded:
            rows = i + tl.arange(0, 1)
            columns = _gather_rows(
                idx_mapping,
                num_computed_tokens,
                num_reqs,
                max_num_reqs,
                group_ptr,
                g,
                arena_ptr,
                batch_ptr,
                rows,
                FEATURES,
                TILE,
            )
            # step 5: remember how many columns the batch row holds
            tl.store(batch_ptr + max_num_reqs.to(tl.int64) * g + rows, columns)
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


@triton.jit
def _request_of(query_start_loc, low, size, token, is_wanted):
    """Request that each token belongs to, or -1: one of `size` from `low` on, by bisection.

    Of none, where `size` is below 1, `low` is given: there is an entry of query_start_loc for it too.
    """
    start_ptr = _pointer(query_start_loc, tl.int32)
    request = token * 0 + low
    while size > 1:
        half = size // 2
        start = tl.load(start_ptr + request + half, mask=is_wanted, other=0)
        request = tl.where(is_wanted & (start <= token), request + half, request)
        size -= half
    start = tl.load(start_ptr + request, mask=is_wanted, other=0)
    return tl.where(is_wanted & (start <= token), request, -1)


@triton.jit
def _slots_in(
    position,
    row,
    count_ptr,
    group_ptr,
    arena_ptr,
    table_start,
    width,
    tokens_per_column,
    column_shift,
    FEATURES: tl.constexpr,
):
    """Slots of tokens at positions of rows: of one row, or of one each; a position of -1 and a row of -1 give PAD.

    The rows' counts and blocks are loaded at once: a small launch takes as long as its chain of loads.
    """
    columns = tl.load(count_ptr + row, mask=row >= 0, other=0)
    is_valid = position >= 0
    local = position
    if not HAS_LARGE_POSITIONS & FEATURES:
        # A position beyond 32 bits is behind every row's last column.
        is_valid = is_valid & (position < INT32_LIMIT)
        local, tokens_per_column = position.to(tl.int32), tokens_per_column.to(tl.int32)
    local = tl.where(is_valid, local, 0)
    # step 4: whose token it is, and its index among this rank's tokens
    if HAS_SHARDS & FEATURES:
        world_size = tl.load(group_ptr + WORLD_SIZE).to(local.dtype)
        if world_size > 1:
            rank, interleave_size = tl.load(group_ptr + RANK), tl.load(group_ptr + INTERLEAVE_SIZE).to(local.dtype)
            turn = _divide(local, interleave_size)
            round_index = _divide(turn, world_size)
            is_valid = is_valid & (turn - round_index * world_size == rank)
            local = round_index * interleave_size + (local - turn * interleave_size)
    if HAS_MODES & FEATURES:
        slot_mode = tl.load(group_ptr + SLOT_MODE)
        if slot_mode == SLOT_MODE_RING:
            ring = tl.maximum(columns.to(local.dtype) * tokens_per_column, 1)
            local = local - _divide(local, ring) * ring
    # step 5: which column, and whether the row fills it
    if HAS_ODD_SIZES & FEATURES:
        column = _divide(local, tokens_per_column)
    else:
        column = local >> column_shift.to(local.dtype)
    # step 6: which kernel block
    table_row = arena_ptr + table_start + width * row
    num_entries = tl.where(row >= 0, width, 0)
    block_id = tl.load(table_row + column, mask=is_valid & (column < num_entries), other=0).to(tl.int64)
    is_valid = is_valid & (column < columns)
    if HAS_NULL_PADS & FEATURES:
        blocks_per_kv_block = tl.load(group_ptr + BLOCKS_PER_KV_BLOCK)
        is_valid = is_valid & ((tl.load(group_ptr + NULL_IS_PAD) == 0) | (block_id >= blocks_per_kv_block))
    slot = block_id * tokens_per_column.to(tl.int64) + (local - column * tokens_per_column)
    return tl.where(is_valid, slot, PAD_SLOT_ID)


@triton.jit
def _map_tile(
    idx_mapping,
    query_start_loc,
    positions,
    num_reqs,
    num_positions,
    max_num_reqs,
    tokens_per_req,
    group_ptr,
    g,
    arena_ptr,
    num_slots,
    first,
    FEATURES: tl.constexpr,
    IS_LONG: tl.constexpr,
    TILE: tl.constexpr,
):
    """Slots of the TILE tokens from `first` on.

    What can be loaded at once is, before the first branch: a compiler moves no load across one, and no wait behind it.
    """
    start_ptr, position_ptr = _pointer(query_start_loc, tl.int32), _pointer(positions, tl.int64)
    count_ptr = arena_ptr + max_num_reqs.to(tl.int64) * g
    table_start, width = tl.load(group_ptr + TABLE_START), tl.load(group_ptr + WIDTH)
    tokens_per_column, column_shift = tl.load(group_ptr + TOKENS_PER_COLUMN), tl.load(group_ptr + COLUMN_SHIFT)
    slot_mode = tl.load(group_ptr + SLOT_MODE)
    first = first.to(tl.int32)
    lane = tl.arange(0, TILE)
    token = first + lane  # beyond the slots it may overflow; nothing is asked of it there
    # Where requests are of one length, as in decode and in a prefill of one request, a division says the request. Of a
    # long launch's tile it is asked for the first token.
    if IS_LONG:
        request = _divide(first, tokens_per_req)
        is_guess = request < num_reqs
    else:
        request = _divide(token, tokens_per_req)
        is_guess = (request < num_reqs) & (lane < num_slots - first)
    end_of_tokens = tl.load(start_ptr + num_reqs)
    start = tl.load(start_ptr + request, mask=is_guess, other=0)
    end = tl.load(start_ptr + request + 1, mask=is_guess, other=0)
    row = _row_of(idx_mapping, tl.where(is_guess, request, -1), num_reqs, max_num_reqs)
    position = tl.load(position_ptr + token, mask=lane < num_positions - first, other=-1)
    if OVERLAPS & FEATURES:  # all so far is nothing that apply_changes writes
        tl.extra.cuda.gdc_wait()
    num_tokens = tl.maximum(tl.minimum(end_of_tokens, tl.minimum(num_positions, num_slots)), 0)
    # step 2: PAD behind the last real token
    is_valid = lane < num_tokens - first
    if HAS_MODES & FEATURES:
        is_valid = lane < tl.where(slot_mode == SLOT_MODE_NONE, 0, num_tokens - first)
    position = tl.where(is_valid, position, -1)
    # step 3: which request and row
    if IS_LONG:
        last = tl.minimum(num_tokens - first, TILE) - 1 + first
        last_request = request
        if (num_tokens > first) & ((start > first) | (end <= last)):
            request = _request_of(query_start_loc, 0, num_reqs, first, first >= 0)
            last_request = _request_of(query_start_loc, 0, num_reqs, last, last >= 0)
            row = _row_of(idx_mapping, request, num_reqs, max_num_reqs)
        slot = tl.full((TILE,), PAD_SLOT_ID, tl.int64)
        if request == last_request:
            slot = _slots_in(
                *(position, row, count_ptr, group_ptr, arena_ptr),
                *(table_start, width, tokens_per_column, column_shift, FEATURES),
            )
        else:
            low = tl.maximum(request, 0)
            requests = _request_of(query_start_loc, low, last_request - low + 1, token, is_valid)
            rows = _row_of(idx_mapping, requests, num_reqs, max_num_reqs)
            slot = _slots_in(
                *(position, rows, count_ptr, group_ptr, arena_ptr),
                *(table_start, width, tokens_per_column, column_shift, FEATURES),
            )
    else:
        is_searched = is_valid & ((start > token) | (end <= token))
        if tl.max(is_searched.to(tl.int32), 0) > 0:
            request = _request_of(query_start_loc, 0, num_reqs, token, is_searched)
            row = tl.where(is_searched, _row_of(idx_mapping, request, num_reqs, max_num_reqs), row)
        slot = _slots_in(
            *(position, row, count_ptr, group_ptr, arena_ptr),
            *(table_start, width, tokens_per_column, column_shift, FEATURES),
        )
    return slot


@_jit
def map_slots(
    idx_mapping: tl.int64,  # [num_reqs] int32, batch index -> row; 0: identity
    query_start_loc: tl.int64,  # [num_reqs + 1] int32, first token of each request
    positions: tl.int64,  # [num_positions] int64, token -> its index in its request
    num_reqs: tl.int32,
    num_positions: tl.int32,
    max_num_reqs: tl.int32,
    tokens_per_req: tl.int32,  # a guess
    groups: tl.int64,  # [>= first_group + num_groups, NUM_FIELDS] int64
    first_group: tl.int32,
    num_groups: tl.int32,
    arena: tl.int64,  # [arena.size] int32
    slots: tl.int64,  # [num_groups, slots_stride] SLOT_T, the first num_slots of each written
    slots_stride: tl.int64,
    num_slots: tl.int32,
    SLOT_T: tl.constexpr,  # tl.int64 or tl.int32
    FEATURES: tl.constexpr,
    IS_LONG: tl.constexpr,  # whether the launch fills the GPU many times over
    TILE: tl.constexpr,
):
    """Write the slot of every token, and PAD from the last real token to the end of the slots."""
    arena_ptr, slot_ptr = _pointer(arena, tl.int32), _pointer(slots, SLOT_T)
    # step 1: which token and group
    y = tl.program_id(1)
    while y < num_groups:
        g = first_group + y
        group_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS
        first = tl.program_id(0).to(tl.int64) * TILE
        while first < num_slots:
            slot = _map_tile(
                idx_mapping,
                query_start_loc,
                positions,
                num_reqs,
                num_positions,
                max_num_reqs,
                tokens_per_req,
                group_ptr,
                g,
                arena_ptr,
                num_slots,
                first,
                FEATURES,
                IS_LONG,
                TILE,
            )
            # step 7: store the slot
            lane = tl.arange(0, TILE)
            tile_ptr = slot_ptr + slots_stride.to(tl.int64) * y + first
            tl.store(tile_ptr + lane, slot.to(SLOT_T), mask=lane < num_slots - first)
            first += tl.num_programs(0).to(tl.int64) * TILE
        y += tl.num_programs(1)


def launch_map_slots(
    kernels: tuple[Kernel, Kernel | None],  # of short launches and of long ones, where the table may make them
    tiles: tuple[int, int],
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
    short, long = kernels
    is_long = long is not None and is_long_launch(num_slots * num_groups, tiles)
    kernel: Any = long if is_long else short
    arguments = (
        idx_mapping,
        query_start_loc,
        positions,
        _int32(num_reqs),
        _int32(num_positions),
        _int32(max_num_reqs),
        likely_tokens_per_req(num_positions, num_reqs, is_long),
        groups,
        _int32(first_group),
        _int32(num_groups),
        arena,
        slots,
        slots_stride,
        _int32(num_slots),
    )
    kernel(_grid(num_slots, tiles[is_long], num_groups), arguments, stream)


def is_long_launch(num_slots: int, tiles: tuple[int, int]) -> bool:
    """Whether tokens are mapped in long tiles: where short ones would fill the GPU many times over.

    The interpreter, whose tiles are small, does so early: its tests are to run both ways.
    """
    return num_slots > (MANY_SLOTS if tiles[0] > EMULATED_TILE else EMULATED_TILE)


def num_warps(is_long: bool) -> int:
    """Return the warps of a program that maps slots."""
    return LONG_WARPS if is_long else WARPS


def likely_tokens_per_req(num_positions: int, num_reqs: int, is_long: bool) -> int:
    """Return how many tokens each request has, if they are of one length.

    In a short launch more than MAX_DRAFT tokens for many requests mean a buffer that is longer than its tokens, and
    decode.
    """
    if num_reqs == 0:
        return 1
    tokens, rest = divmod(num_positions, num_reqs)
    is_likely = is_long or num_reqs == 1 or (rest == 0 and tokens <= MAX_DRAFT)
    return max(tokens, 1) if is_likely else 1


# The fused step is two kernels, one after the other: apply_changes, then step_batch.


@triton.jit
def _store_ranges(
    change_ptr, first_range, num_ranges, num_values, first, arena_ptr, IS_NULL: tl.constexpr, TILE: tl.constexpr
):
    """Store TILE values of packed ranges, from the value `first` on."""
    offset_ptr = change_ptr + first_range
    start_ptr = offset_ptr + num_ranges
    value = first + tl.arange(0, TILE)
    is_value = value < num_values
    range_index = value * 0
    size = num_ranges
    while size > 1:  # the range is one of `size` from range_index on
        half = size // 2
        start = tl.load(start_ptr + range_index + half, mask=is_value, other=0)
        range_index = tl.where(start <= value, range_index + half, range_index)
        size -= half
    offset = tl.load(offset_ptr + range_index, mask=is_value, other=0).to(tl.int64)
    start = tl.load(start_ptr + range_index, mask=is_value, other=0)
    stored = tl.full((TILE,), NULL_BLOCK_ID, tl.int32)
    if not IS_NULL:
        stored = tl.load(start_ptr + num_ranges + value, mask=is_value, other=0)
    tl.store(arena_ptr + offset + (value - start), stored, mask=is_value)


@_jit
def apply_changes(
    changes: tl.int64,  # [..] int32: Writes.pack_changes, without its counts
    num_singles: tl.int32,
    num_ranges: tl.int32,
    num_range_values: tl.int32,
    num_null_ranges: tl.int32,
    num_nulls: tl.int32,
    arena: tl.int64,  # [arena_size] int32, written
    num_groups: tl.int32,
    max_num_reqs: tl.int32,
    arena_size: tl.int64,
    batch: tl.int64,  # [arena_size + 2 + num_groups * max_num_reqs] int32, the copy of its counts written
    copy_parts: tl.int32,  # programs that copy the counts of one group; programs behind all of them write
    mark: tl.int64,  # of this step; 0: the host waits for none
    last_mark: tl.int64,  # [1] int64, written
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the changes of a commit into the arena, and copy the counts that step_batch reads and replaces."""
    if OVERLAPS & FEATURES:
        tl.extra.cuda.gdc_launch_dependents()
    change_ptr, arena_ptr, batch_ptr = _pointer(changes, tl.int32), _pointer(arena, tl.int32), _pointer(batch, tl.int32)
    program, copy_programs = tl.program_id(0), num_groups * copy_parts
    if program < copy_programs:
        held_rows = tl.load(batch_ptr + arena_size)
        g = _divide(program, copy_parts)
        count_ptr = batch_ptr + max_num_reqs.to(tl.int64) * g
        first = (program - g * copy_parts) * TILE
        num_rows = first + 1  # the first turn waits for no load
        while first < num_rows:
            i = first + tl.arange(0, TILE)
            held = tl.load(count_ptr + i, mask=i < max_num_reqs, other=0)
            tl.store(count_ptr + arena_size + 2 + i, held, mask=i < held_rows)
            first += copy_parts * TILE
            num_rows = held_rows
        tl.store(batch_ptr + arena_size + 1, held_rows, mask=program == 0)
        tl.store(_pointer(last_mark, tl.int64), mark.to(tl.int64), mask=program == 0)
    else:
        stride = (tl.num_programs(0) - copy_programs) * TILE
        first = (program - copy_programs) * TILE
        while first < num_singles:
            i = first + tl.arange(0, TILE)
            offset = tl.load(change_ptr + i, mask=i < num_singles, other=0)
            stored = tl.load(change_ptr + num_singles + i, mask=i < num_singles, other=0)
            tl.store(arena_ptr + offset, stored, mask=i < num_singles)
            first += stride
        first = (program - copy_programs) * TILE
        while first < num_range_values:
            _store_ranges(change_ptr, 2 * num_singles, num_ranges, num_range_values, first, arena_ptr, False, TILE)
            first += stride
        nulls = 2 * num_singles + 2 * num_ranges + num_range_values
        first = (program - copy_programs) * TILE
        while first < num_nulls:
            _store_ranges(change_ptr, nulls, num_null_ranges, num_nulls, first, arena_ptr, True, TILE)
            first += stride


@_jit
def step_batch(
    idx_mapping: tl.int64,  # [num_reqs] int32, batch index -> row; 0: identity
    num_computed_tokens: tl.int64,  # [num_reqs] int32, batch index -> tokens; 0: no window is cut
    query_start_loc: tl.int64,  # [num_reqs + 1] int32, first token of each request
    positions: tl.int64,  # [num_positions] int64, token -> its index in its request
    num_reqs: tl.int32,
    num_reqs_padded: tl.int32,
    num_positions: tl.int32,
    max_num_reqs: tl.int32,
    tokens_per_req: tl.int32,  # a guess
    groups: tl.int64,  # [num_groups, NUM_FIELDS] int64
    num_groups: tl.int32,
    arena: tl.int64,  # [arena_size] int32
    arena_size: tl.int64,
    batch: tl.int64,  # [arena_size + 2 + num_groups * max_num_reqs] int32, written
    slots: tl.int64,  # [num_groups, num_slots] SLOT_T, written
    num_slots: tl.int32,
    gather_parts: tl.int32,  # programs that gather the tables of one group; 0: nothing is gathered
    slot_parts: tl.int32,  # programs that map its slots
    last_mark: tl.int64,  # [1] int64, what apply_changes wrote
    shown_mark: tl.int64,  # [1] int64 in the host's memory, written
    SLOT_T: tl.constexpr,  # tl.int64 or tl.int32
    FEATURES: tl.constexpr,
    IS_LONG: tl.constexpr,  # as for map_slots
    TILE: tl.constexpr,
    ROWS: tl.constexpr,  # that a program gathers at once, ROW_TILE columns of each
    ROW_TILE: tl.constexpr,
):
    """The gather and the slots of a whole step: the first programs gather, the last one shows the mark, others map."""
    arena_ptr, batch_ptr = _pointer(arena, tl.int32), _pointer(batch, tl.int32)
    program, gather_programs = tl.program_id(0), gather_parts * num_groups
    if program < gather_programs:
        if OVERLAPS & FEATURES:
            tl.extra.cuda.gdc_wait()
        held_rows = tl.load(batch_ptr + arena_size + 1)
        tl.store(batch_ptr + arena_size, num_reqs_padded, mask=program == 0)
        g = _divide(program, gather_parts)
        group_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS
        count_ptr = batch_ptr + max_num_reqs.to(tl.int64) * g
        first_row = (program - g * (gather_parts)) * ROWS
        num_rows = first_row + 1  # the first turn waits for no load
        while first_row < num_rows:
            i = first_row + tl.arange(0, ROWS)
            held = tl.load(count_ptr + arena_size + 2 + i, mask=i < max_num_reqs, other=0)
            columns = _gather_rows(
                idx_mapping,
                num_computed_tokens,
                num_reqs,
                max_num_reqs,
                group_ptr,
                g,
                arena_ptr,
                batch_ptr,
                i,
                FEATURES,
                ROW_TILE,
            )
            batch_row = batch_ptr + tl.load(group_ptr + TABLE_START) + tl.load(group_ptr + WIDTH) * i
            stale = tl.where((i < held_rows) & (held > columns), held, 0)
            end = tl.max(stale, 0)
            first = end * 0
            while first < end:
                column = first + tl.arange(0, ROW_TILE)[None, :]
                is_stale = (column >= columns[:, None]) & (column < stale[:, None])
                tl.store(batch_row[:, None] + column, NULL_BLOCK_ID, mask=is_stale)
                first += ROW_TILE
            tl.store(count_ptr + i, columns, mask=i < num_reqs_padded)
            first_row += gather_parts * ROWS
            num_rows = tl.maximum(held_rows, num_reqs_padded)
    elif program == tl.num_programs(0) - 1:
        if OVERLAPS & FEATURES:
            tl.extra.cuda.gdc_wait()
        mark = tl.load(_pointer(last_mark, tl.int64))
        # apply_changes is done: the host may use the changes' memory again
        tl.store(_pointer(shown_mark, tl.int64), mark, mask=mark > 0)
    else:
        program -= gather_programs
        g = _divide(program, slot_parts)
        group_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS
        first = (program - g * slot_parts).to(tl.int64) * TILE
        while first < num_slots:
            slot = _map_tile(
                idx_mapping,
                query_start_loc,
                positions,
                num_reqs,
                num_positions,
                max_num_reqs,
                tokens_per_req,
                group_ptr,
                g,
                arena_ptr,
                num_slots,
                first,
                FEATURES,
                IS_LONG,
                TILE,
            )
            lane = tl.arange(0, TILE)
            tile_ptr = _pointer(slots, SLOT_T) + num_slots.to(tl.int64) * g + first
            tl.store(tile_ptr + lane, slot.to(SLOT_T), mask=lane < num_slots - first)
            first += slot_parts.to(tl.int64) * TILE


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
