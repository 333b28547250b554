"""The kernels of a step in Triton. Every loop is grid-stride: any grid gives one result.

blocktable/device/signatures.py says what they take, on which grids they run, and how a table's memory is laid out.

Arrays come as addresses and every argument has its type beside it: nothing about a call's values, alignment or owner
asks for another compilation, and memory that Triton takes for the host's (mapped) is read like any other. Loops are
`while`: over a `range` of tensors the interpreter of triton 3.6 fails with numpy 2.4. Shapes that no line gives:
groups [num_groups, NUM_FIELDS] int64; arena [arena.size], checker [checker_size], findings in the host's memory
[(1 + MAX_RECORDS) * RECORD], all int32, the last two written.
"""

# ruff: noqa: N803 - Triton writes compile-time arguments in capitals.
from __future__ import annotations

import triton
import triton.language as tl

from blocktable_triton.checks import _check_requests, _check_tokens, check_requests
from blocktable_triton.common import (
    BATCH_START,
    BLOCKS_PER_KV_BLOCK,
    CHECKED,
    COLUMN_SHIFT,
    FILLER,
    HAS_LARGE_POSITIONS,
    HAS_MODES,
    HAS_NULL_PADS,
    HAS_ODD_SIZES,
    HAS_SHARDS,
    HAS_WINDOWS,
    INT32_MAX,
    INTERLEAVE_SIZE,
    IS_INTERPRETED,
    NULL_IS_PAD,
    NULL_START,
    NUM_FIELDS,
    OVERLAPS,
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
    _divide,
    _is_missing,
    _jit,
    _local_length,
    _pointer,
    _row_of,
)

__all__ = ["IS_INTERPRETED", "check_requests"]


@triton.jit
def _store_ranges(change_ptr, num_ranges, num_values, first, arena_ptr, IS_CONSTANT: tl.constexpr, TILE: tl.constexpr):
    """Store TILE values of packed ranges, from the value `first` on. change_ptr: where their offsets begin."""
    start_ptr = change_ptr + num_ranges
    value = first + tl.arange(0, TILE)
    is_value = value < num_values
    range_index = tl.zeros((TILE,), tl.int32)
    size = num_ranges
    while size > 1:  # the range is one of `size` from range_index on
        half = size // 2
        start = tl.load(start_ptr + range_index + half, mask=is_value, other=0)
        range_index = tl.where(start <= value, range_index + half, range_index)
        size -= half
    offset = tl.load(change_ptr + range_index, mask=is_value, other=0)
    start = tl.load(start_ptr + range_index, mask=is_value, other=0)
    place = range_index if IS_CONSTANT else value  # a constant range has one value
    stored = tl.load(start_ptr + num_ranges + place, mask=is_value, other=0)
    tl.store(arena_ptr + offset + (value - start), stored, mask=is_value)


@_jit
def apply_changes(
    changes: tl.int64,  # [..] int32: Writes.pack_changes, without its counts
    num_singles: tl.int32, num_ranges: tl.int32, num_range_values: tl.int32,
    num_constant_ranges: tl.int32, num_constants: tl.int32, arena: tl.int64,  # arena is written
    num_groups: tl.int32, max_num_reqs: tl.int32, batch_entries: tl.int64,
    batch: tl.int64,  # [batch_entries + 2 + num_groups * max_num_reqs] int32, the copy of its counts written
    copy_parts: tl.int32,  # programs that copy the counts of one group; those after all of them write. 0: none copies
    checker: tl.int64,  # [checker_size] int32, the number of the call advanced where counts are copied
    mark: tl.int64,  # of this step; 0: the host waits for none
    last_mark: tl.int64,  # [1] int64, written where counts are copied
    FEATURES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the changes of a commit into the arena, and copy the counts that step_batch reads and replaces."""
    if OVERLAPS & FEATURES:
        tl.extra.cuda.gdc_launch_dependents()
    change_ptr, arena_ptr, batch_ptr = _pointer(changes, tl.int32), _pointer(arena, tl.int32), _pointer(batch, tl.int32)
    program, copy_programs = tl.program_id(0), num_groups * copy_parts
    if program < copy_programs:
        # step 1: keep the counts that step_batch replaces
        held_rows = tl.load(batch_ptr + batch_entries)
        g = _divide(program, copy_parts)
        count_ptr = batch_ptr + max_num_reqs.to(tl.int64) * g
        first_row = (program - g * copy_parts) * TILE
        num_rows = first_row + 1  # the first turn waits for no load
        while first_row < num_rows:
            i = first_row + tl.arange(0, TILE)
            held = tl.load(count_ptr + i, mask=i < max_num_reqs, other=0)
            tl.store(count_ptr + batch_entries + 2 + i, held, mask=i < held_rows)
            first_row += copy_parts * TILE
            num_rows = held_rows
        tl.store(batch_ptr + batch_entries + 1, held_rows, mask=program == 0)
        tl.store(_pointer(last_mark, tl.int64), mark.to(tl.int64), mask=program == 0)
        if CHECKED & FEATURES:
            call = tl.load(_pointer(checker, tl.int32))  # that step_batch belongs to
            tl.store(_pointer(checker, tl.int32), call + 1, mask=program == 0)
    else:
        begin = (program - copy_programs).to(tl.int64) * TILE
        stride = (tl.num_programs(0) - copy_programs).to(tl.int64) * TILE
        # step 2: store the single values
        first = begin
        while first < num_singles:
            i = first + tl.arange(0, TILE)
            offset = tl.load(change_ptr + i, mask=i < num_singles, other=0)
            stored = tl.load(change_ptr + num_singles + i, mask=i < num_singles, other=0)
            tl.store(arena_ptr + offset, stored, mask=i < num_singles)
            first += stride
        # step 3: store the ranges
        range_ptr = change_ptr + num_singles.to(tl.int64) * 2
        first = begin
        while first < num_range_values:
            _store_ranges(range_ptr, num_ranges, num_range_values, first, arena_ptr, False, TILE)
            first += stride
        # step 4: store the constant ranges
        constant_ptr = range_ptr + num_ranges.to(tl.int64) * 2 + num_range_values
        first = begin
        while first < num_constants:
            _store_ranges(constant_ptr, num_constant_ranges, num_constants, first, arena_ptr, True, TILE)
            first += stride


@triton.jit
def _null_columns(batch_row, columns, held, filler, TILE: tl.constexpr):
    """Make batch rows NULL from the column `columns` to `held`, where there is any. batch_row, columns, held: [n]."""
    end = tl.max(tl.where(held > columns, held, 0), 0)
    if end > 0:
        first = tl.min(tl.where(held > columns, columns, end), 0)
        while first < end:
            column = first + tl.arange(0, TILE)[None, :]
            is_stale = (column >= columns[:, None]) & (column < held[:, None])
            tl.store(batch_row[:, None] + column, filler, mask=is_stale)
            first += TILE


@_jit
def null_stale_columns(
    idx_mapping: tl.int64,  # [num_reqs] int32, batch index -> row
    num_reqs: tl.int32, num_reqs_padded: tl.int32, max_num_reqs: tl.int32, max_num_rows: tl.int32,
    groups: tl.int64, num_groups: tl.int32, arena: tl.int64, batch_entries: tl.int64,
    batch: tl.int64, TILE: tl.constexpr,  # [batch_entries + 1 ..] int32, tables written, counts read
):  # fmt: skip
    """Make every batch row NULL after the columns that its row fills."""
    arena_ptr, batch_ptr = _pointer(arena, tl.int32), _pointer(batch, tl.int32)
    # Rows after this batch hold what a larger one left; further ones are NULL, whatever their old counts say.
    num_rows = tl.maximum(tl.load(batch_ptr + batch_entries), num_reqs_padded)
    # step 1: which batch row and group
    g = tl.program_id(1)
    while g < num_groups:
        group_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS
        batch_start, width = tl.load(group_ptr + BATCH_START), tl.load(group_ptr + WIDTH)
        filler = tl.load(group_ptr + FILLER).to(tl.int32)
        i = tl.program_id(0)
        while i < num_rows:
            rows = i + tl.arange(0, 1)
            # step 2: how many columns its row fills
            row = _row_of(idx_mapping, rows, num_reqs, max_num_rows)
            columns = tl.load(arena_ptr + max_num_rows.to(tl.int64) * g + row, mask=row >= 0, other=0)
            # step 3: NULL over what an earlier batch left after them
            held = tl.load(batch_ptr + max_num_reqs.to(tl.int64) * g + rows)
            _null_columns(batch_ptr + batch_start + width * rows, columns, held, filler, TILE)
            i += tl.num_programs(0)
        g += tl.num_programs(1)


@triton.jit
def _gather_rows(source, group_ptr, g, arena_ptr, batch_ptr, i, FEATURES: tl.constexpr, TILE: tl.constexpr):
    """Write the columns that batch rows' rows fill; return where the batch rows are, their columns, and the filler."""
    idx_mapping, num_computed_tokens, num_reqs, max_num_rows = source
    table_start, width = tl.load(group_ptr + TABLE_START), tl.load(group_ptr + WIDTH)
    batch_start, filler = tl.load(group_ptr + BATCH_START), tl.load(group_ptr + FILLER).to(tl.int32)
    # step 2: how many columns its row fills
    row = _row_of(idx_mapping, i, num_reqs, max_num_rows)
    columns = tl.load(arena_ptr + max_num_rows.to(tl.int64) * g + row, mask=row >= 0, other=0)
    # step 3: how many of them the window has passed
    first_kept = row.to(tl.int64) * 0
    if HAS_WINDOWS & FEATURES:
        sliding_window = tl.load(group_ptr + SLIDING_WINDOW)
        computed = tl.load(_pointer(num_computed_tokens, tl.int32) + i, mask=i < num_reqs, other=0).to(tl.int64)
        if sliding_window > 0:
            first_kept = tl.maximum(computed - sliding_window + 1, 0)
            if HAS_SHARDS & FEATURES:
                first_kept = _local_length(first_kept, group_ptr)
            first_kept = _divide(first_kept, tl.load(group_ptr + TOKENS_PER_COLUMN))
    # step 4: store the columns in use, NULL before them
    table_row = arena_ptr + table_start + width * tl.maximum(row, 0)
    batch_row = batch_ptr + batch_start + width * i
    end = tl.max(columns, 0)
    first = end * 0
    while first < end:
        column = first + tl.arange(0, TILE)[None, :]
        is_column = column < columns[:, None]
        is_kept = is_column
        if HAS_WINDOWS & FEATURES:
            is_kept = is_column & (column >= first_kept[:, None])
        block_id = tl.load(table_row[:, None] + column, mask=is_kept, other=filler)
        tl.store(batch_row[:, None] + column, block_id, mask=is_column)
        first += TILE
    return batch_row, columns, filler


@_jit
def gather_block_tables(
    idx_mapping: tl.int64,  # as above
    num_computed_tokens: tl.int64,  # [num_reqs] int32, batch index -> tokens
    num_reqs: tl.int32, num_reqs_padded: tl.int32, max_num_reqs: tl.int32, max_num_rows: tl.int32,
    groups: tl.int64, num_groups: tl.int32, arena: tl.int64, batch_entries: tl.int64,  # as above
    batch: tl.int64,  # [batch_entries + 1 ..] int32, written
    FEATURES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the columns that the batch's rows fill, and remember how many there are."""
    arena_ptr, batch_ptr = _pointer(arena, tl.int32), _pointer(batch, tl.int32)
    source = (idx_mapping, num_computed_tokens, num_reqs, max_num_rows)
    is_first_program = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    tl.store(batch_ptr + batch_entries, num_reqs_padded, mask=is_first_program)
    # step 1: which batch row and group
    g = tl.program_id(1)
    while g < num_groups:
        group_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS
        i = tl.program_id(0)
        while i < num_reqs_padded:
            rows = i + tl.arange(0, 1)
            _, columns, _ = _gather_rows(source, group_ptr, g, arena_ptr, batch_ptr, rows, FEATURES, TILE)
            # step 5: remember how many columns the batch row holds
            tl.store(batch_ptr + max_num_reqs.to(tl.int64) * g + rows, columns)
            i += tl.num_programs(0)
        g += tl.num_programs(1)


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
def _slots_in(position, request, row, tokens, table, FEATURES: tl.constexpr):
    """Slots of tokens at positions of rows: of one row, or of one each; a position of -1 and a row of -1 give PAD.

    The rows' counts and blocks are loaded together: a small launch takes as long as its chain of loads. `tokens` are
    those of a step, which `request` counts, and what is checked of them; None: no position is too old for its ring
    (R36).
    """
    count_ptr, group_ptr, arena_ptr, table_start, width, tokens_per_column, column_shift, pad_slot_id = table
    columns = tl.load(count_ptr + row, mask=row >= 0, other=0)
    is_valid = position >= 0
    local = position
    if not HAS_LARGE_POSITIONS & FEATURES:
        # A position beyond 32 bits is past every row's last column.
        is_valid = is_valid & (position < INT32_MAX)
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
            ring = columns.to(tl.int64) * tokens_per_column
            if tokens is not None:
                start_ptr, position_ptr, num_tokens, _, _, _, _, _, _ = tokens
                end = tl.minimum(tl.load(start_ptr + request + 1, mask=row >= 0, other=0), num_tokens)
                last_position = tl.load(position_ptr + end - 1, mask=end > 0, other=0)
                # Of a request's tokens that share a place the last one is written (R14).
                is_valid = is_valid & (tl.maximum(last_position, 0) - position < tl.maximum(ring, 1))
            place = tl.maximum(ring, 1).to(local.dtype)
            local = local - _divide(local, place) * place
    # step 5: which column, and whether the row fills it
    if HAS_ODD_SIZES & FEATURES:
        column = _divide(local, tokens_per_column)
    else:
        column = local >> column_shift.to(local.dtype)
    # step 6: which kernel block
    table_row = arena_ptr + table_start + width * row
    num_entries = tl.where(row >= 0, width, 0)
    block_id = tl.load(table_row + column, mask=is_valid & (column < num_entries), other=0).to(tl.int64)
    is_mine = is_valid
    is_valid = is_valid & (column < columns)
    is_inside = is_valid
    if HAS_NULL_PADS & FEATURES:
        null_start, blocks_per_kv_block = tl.load(group_ptr + NULL_START), tl.load(group_ptr + BLOCKS_PER_KV_BLOCK)
        is_null = _is_missing(block_id, null_start, blocks_per_kv_block)
        is_valid = is_valid & ((tl.load(group_ptr + NULL_IS_PAD) == 0) | (is_null == 0))
    slot = block_id * tokens_per_column.to(tl.int64) + (local - column * tokens_per_column)
    if (CHECKED & FEATURES) and tokens is not None:
        has_row = column * 0 + row >= 0
        is_outside = is_mine & has_row & (column >= columns)
        is_stranger = is_mine & (has_row == 0) & (column * 0 + request >= 0)
        written = (position, local, block_id, slot, is_inside, is_outside, is_stranger)
        _check_tokens(written, request, row, tokens, group_ptr, arena_ptr, FEATURES)
    return tl.where(is_valid, slot, pad_slot_id)


@triton.jit
def _map_tile(
    inputs, group, checks, num_slots, first, FEATURES: tl.constexpr, IS_LONG: tl.constexpr, TILE: tl.constexpr
):
    """Write a group's slots of the TILE tokens from `first` on.

    Loads that can go together do, before the first branch: a compiler moves no load across one, and no wait after it.
    """
    idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows, requests_per_token = inputs
    group_ptr, count_ptr, arena_ptr, slot_ptr, g = group
    start_ptr, position_ptr = _pointer(query_start_loc, tl.int32), _pointer(positions, tl.int64)
    table_start, width = tl.load(group_ptr + TABLE_START), tl.load(group_ptr + WIDTH)
    tokens_per_column, column_shift = tl.load(group_ptr + TOKENS_PER_COLUMN), tl.load(group_ptr + COLUMN_SHIFT)
    slot_mode, pad_slot_id = tl.load(group_ptr + SLOT_MODE), tl.load(group_ptr + PAD_SLOT_ID)
    table = (count_ptr, group_ptr, arena_ptr, table_start, width, tokens_per_column, column_shift, pad_slot_id)
    first = first.to(tl.int32)
    lane = tl.arange(0, TILE)
    token = first + lane  # beyond the slots it may overflow; nothing is stored there
    # Where requests are of one length, as in decode and in a prefill of one request, this says the request. Of a long
    # launch's tile it is asked for the first token.
    guessed = first if IS_LONG else token
    request = tl.minimum((guessed.to(tl.int64) * requests_per_token >> 32).to(tl.int32), num_reqs - 1)
    end_of_tokens = tl.load(start_ptr + num_reqs)
    start = tl.load(start_ptr + request, mask=request >= 0, other=0)
    end = tl.load(start_ptr + request + 1, mask=request >= 0, other=0)
    row = _row_of(idx_mapping, request, num_reqs, max_num_rows)
    position = tl.load(position_ptr + token, mask=lane < num_positions - first, other=-1)
    if OVERLAPS & FEATURES:  # all so far is nothing that apply_changes writes
        tl.extra.cuda.gdc_wait()
    num_tokens = tl.maximum(tl.minimum(end_of_tokens, tl.minimum(num_positions, num_slots)), 0)
    # step 2: PAD after the last real token
    is_valid = lane < num_tokens - first
    if HAS_MODES & FEATURES:
        is_valid = lane < tl.where(slot_mode == SLOT_MODE_NONE, 0, num_tokens - first)
    position = tl.where(is_valid, position, -1)
    tokens = (
        start_ptr,
        position_ptr,
        num_tokens,
        token,
        g,
        checks,
        idx_mapping,
        group_ptr - g * NUM_FIELDS,
        max_num_rows,
    )
    # step 3: which request and row
    if IS_LONG:
        last = tl.minimum(num_tokens - first, TILE) - 1 + first
        last_request = request
        if (num_tokens > first) & ((start > first) | (end <= last)):
            request = _request_of(query_start_loc, 0, num_reqs, first, first >= 0)
            last_request = _request_of(query_start_loc, 0, num_reqs, last, last >= 0)
            row = _row_of(idx_mapping, request, num_reqs, max_num_rows)
        if request == last_request:
            slot = _slots_in(position, request, row, tokens, table, FEATURES)
        else:
            low = tl.maximum(request, 0)
            requests = _request_of(query_start_loc, low, last_request - low + 1, token, is_valid)
            rows = _row_of(idx_mapping, requests, num_reqs, max_num_rows)
            slot = _slots_in(position, requests, rows, tokens, table, FEATURES)
    else:
        is_searched = is_valid & ((start > token) | (end <= token))
        if tl.max(is_searched.to(tl.int32), 0) > 0:
            found = _request_of(query_start_loc, 0, num_reqs, token, is_searched)
            request = tl.where(is_searched, found, request)
            row = tl.where(is_searched, _row_of(idx_mapping, found, num_reqs, max_num_rows), row)
        slot = _slots_in(position, request, row, tokens, table, FEATURES)
    # step 7: store the slot
    tl.store(slot_ptr + first + lane, slot.to(slot_ptr.dtype.element_ty), mask=lane < num_slots - first)


@_jit
def map_slots(
    idx_mapping: tl.int64,  # as above
    query_start_loc: tl.int64,  # [num_reqs + 1] int32, first token of each request
    positions: tl.int64,  # [num_positions] int64, token -> its index in its request
    num_reqs: tl.int32, num_positions: tl.int32, max_num_rows: tl.int32,
    groups: tl.int64,  # [>= first_group + num_groups, NUM_FIELDS] int64
    first_group: tl.int32, num_groups: tl.int32, arena: tl.int64,
    slots: tl.int64,  # [num_groups, slots_stride] SLOT_T, the first num_slots of each written
    slots_stride: tl.int64, num_slots: tl.int32,
    requests_per_token: tl.int64,  # a guess: token * this >> 32 is its request
    checker: tl.int64, findings: tl.int64,
    SLOT_T: tl.constexpr, FEATURES: tl.constexpr,
    IS_LONG: tl.constexpr, TILE: tl.constexpr,  # whether the launch fills the GPU many times over
):  # fmt: skip
    """Write the slot of every token, and PAD from the last real token to the end of the slots."""
    arena_ptr, slot_ptr = _pointer(arena, tl.int32), _pointer(slots, SLOT_T)
    checks = (_pointer(checker, tl.int32), _pointer(findings, tl.int32))
    inputs = (idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows, requests_per_token)
    # step 1: which token and group
    y = tl.program_id(1)
    while y < num_groups:
        g = first_group + y
        group_ptr, count_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS, arena_ptr + max_num_rows.to(tl.int64) * g
        group = (group_ptr, count_ptr, arena_ptr, slot_ptr + slots_stride.to(tl.int64) * y, g)
        first = tl.program_id(0).to(tl.int64) * TILE
        while first < num_slots:
            _map_tile(inputs, group, checks, num_slots, first, FEATURES, IS_LONG, TILE)
            first += tl.num_programs(0).to(tl.int64) * TILE
        y += tl.num_programs(1)


@_jit
def step_batch(
    idx_mapping: tl.int64, num_computed_tokens: tl.int64, query_start_loc: tl.int64,  # as above
    positions: tl.int64, num_reqs: tl.int32, num_reqs_padded: tl.int32, num_positions: tl.int32,  # as above
    max_num_reqs: tl.int32, max_num_rows: tl.int32, requests_per_token: tl.int64, groups: tl.int64,  # as above
    num_groups: tl.int32, arena: tl.int64, batch_entries: tl.int64,  # as above
    batch: tl.int64,  # [batch_entries + 2 + num_groups * max_num_reqs] int32, written
    slots: tl.int64, num_slots: tl.int32,  # [num_groups, num_slots] SLOT_T, written
    gather_blocks: tl.int32,  # programs that gather, num_groups at a time; 0: nothing is gathered
    blocks_per_group: tl.int32,  # programs that map the slots of one group
    last_mark: tl.int64,  # [1] int64, what apply_changes wrote
    shown_mark: tl.int64,  # [1] int64 in the host's memory, written
    checker: tl.int64, findings: tl.int64,
    SLOT_T: tl.constexpr, FEATURES: tl.constexpr, IS_LONG: tl.constexpr, TILE: tl.constexpr,  # as above
    ROWS: tl.constexpr, ROW_TILE: tl.constexpr,  # that a program gathers together; columns of each
):  # fmt: skip
    """The gather and the slots of a whole step: the first programs gather, the next ones map.

    The program after those shows the mark; it and further ones look at the requests, where anything is checked.
    """
    arena_ptr, batch_ptr = _pointer(arena, tl.int32), _pointer(batch, tl.int32)
    checks = (_pointer(checker, tl.int32), _pointer(findings, tl.int32))
    inputs = (idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows, requests_per_token)
    program = tl.program_id(0)
    last_programs = gather_blocks + num_groups * blocks_per_group
    if program < gather_blocks:
        if OVERLAPS & FEATURES:
            tl.extra.cuda.gdc_wait()
        held_rows = tl.load(batch_ptr + batch_entries + 1)
        tl.store(batch_ptr + batch_entries, num_reqs_padded, mask=program == 0)
        source = (idx_mapping, num_computed_tokens, num_reqs, max_num_rows)
        part = _divide(program, num_groups)
        g = program - part * num_groups
        group_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS
        count_ptr = batch_ptr + max_num_reqs.to(tl.int64) * g
        first_row = part * ROWS
        num_rows = first_row + 1  # the first turn waits for no load
        while first_row < num_rows:
            i = first_row + tl.arange(0, ROWS)
            held = tl.load(count_ptr + batch_entries + 2 + i, mask=i < max_num_reqs, other=0)
            batch_row, columns, filler = _gather_rows(source, group_ptr, g, arena_ptr, batch_ptr, i, FEATURES, ROW_TILE)
            _null_columns(batch_row, columns, tl.where(i < held_rows, held, 0), filler, ROW_TILE)
            tl.store(count_ptr + i, columns, mask=i < num_reqs_padded)
            first_row += _divide(gather_blocks, num_groups) * ROWS
            num_rows = tl.maximum(held_rows, num_reqs_padded)
    elif program >= last_programs:
        if OVERLAPS & FEATURES:
            tl.extra.cuda.gdc_wait()
        mark = tl.load(_pointer(last_mark, tl.int64))
        # apply_changes is done: the host may use the changes' memory again
        tl.store(_pointer(shown_mark, tl.int64), mark, mask=(mark > 0) & (program == last_programs))
        if CHECKED & FEATURES:
            first_request = (program - last_programs) * TILE
            while first_request < num_reqs:
                _check_requests(inputs, _pointer(groups, tl.int64), arena_ptr, checks, first_request, TILE)
                first_request += (tl.num_programs(0) - last_programs) * TILE
    else:
        program -= gather_blocks
        g = _divide(program, blocks_per_group)
        group_ptr, count_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS, arena_ptr + max_num_rows.to(tl.int64) * g
        group = (group_ptr, count_ptr, arena_ptr, _pointer(slots, SLOT_T) + num_slots.to(tl.int64) * g, g)
        first = (program - g * blocks_per_group).to(tl.int64) * TILE
        while first < num_slots:
            _map_tile(inputs, group, checks, num_slots, first, FEATURES, IS_LONG, TILE)
            first += blocks_per_group.to(tl.int64) * TILE
