"""The export kernels in Triton: a batch's rows as attention kernels read them.

All but the last two begin with the same arguments: the batch, and the groups that are exported together ("members"),
which share one geometry. Place j of a batch row is column part + j of its row (R34). counts is [2 * max_batch + 2]
int32: entries of each batch row; those of the call before; all; all of the call before. As in kernels.py every loop is
grid-stride, arrays come as addresses, and no value asks for another compilation, and shapes that no line
gives are those of kernels.py; members is [num_members] int32, groups.
"""

# ruff: noqa: N803 - Triton writes compile-time arguments in capitals.
from __future__ import annotations

import triton
import triton.language as tl

from blocktable_triton.common import (
    BLOCKS_PER_KV_BLOCK,
    FILLER,
    INT32_MAX,
    NULL_START,
    NUM_FIELDS,
    OVERLAPS,
    SLIDING_WINDOW,
    TABLE_START,
    TOKENS_PER_COLUMN,
    WIDTH,
    _divide,
    _is_missing,
    _jit,
    _local_length,
    _pointer,
    _row_of,
)
from blocktable_triton.kernels import _request_of, _slots_in

COUNT_BLOCKS = tl.constexpr(1)  # unit: an entry is a kernel block that holds tokens; with 0 it is a column,
COUNT_TOKENS = tl.constexpr(2)  # with 2 a token,
COUNT_RING = tl.constexpr(3)  # with 3 such a block of a ring,
REQUESTS = tl.constexpr(4)  # with 4 the request of such a block
FORM_VALUES = tl.constexpr(1)  # form: a row of V offsets follows each row of K offsets; with 0 none does,
FORM_RING = tl.constexpr(2)  # with 2 a row is a ring over true positions
STATE_LAST = tl.constexpr(1)  # state_columns: the last ones; with 0 the first ones,
STATE_ALIGNED = tl.constexpr(2)  # with 2 from that of the last token on
EVERY_FEATURE = tl.constexpr(OVERLAPS.value - 1)  # that groups may need


@triton.jit
def _length_of(group_ptr, tokens, i, row):
    """How many of batch rows' first so many tokens this rank holds; 0 for a padding entry. i, row: [n] int."""
    length = tl.maximum(tl.load(_pointer(tokens, tl.int32) + i, mask=row >= 0, other=0), 0)
    return _local_length(length.to(tl.int64), group_ptr)


@triton.jit
def _row_in(group_ptr, g, arena_ptr, max_num_rows, row):
    """Where rows begin, and how many columns they fill: for a padding entry the first row, and none."""
    width = tl.load(group_ptr + WIDTH)
    filled = tl.load(arena_ptr + max_num_rows.to(tl.int64) * g + row, mask=row >= 0, other=0)
    table_row = arena_ptr + tl.load(group_ptr + TABLE_START) + width * tl.maximum(row, 0)
    return table_row, tl.minimum(filled.to(tl.int64), width)


@triton.jit
def _part_in(batch, group_ptr, g, arena_ptr, i, row):
    """Where parts of rows begin; how many of their places the window has passed; how many are filled; `part`."""
    num_computed_tokens, first_tokens, max_num_rows = batch
    tokens, sliding_window = tl.load(group_ptr + TOKENS_PER_COLUMN), tl.load(group_ptr + SLIDING_WINDOW)
    first_column = row.to(tl.int64) * 0
    if sliding_window > 0:
        computed = tl.load(_pointer(num_computed_tokens, tl.int32) + i, mask=row >= 0, other=0).to(tl.int64)
        first_column = _divide(_local_length(tl.maximum(computed - sliding_window + 1, 0), group_ptr), tokens)
    part = _divide(_length_of(group_ptr, first_tokens, i, row), tokens)
    table_row, filled = _row_in(group_ptr, g, arena_ptr, max_num_rows, row)
    return table_row + part, first_column - part, filled - part, part


@triton.jit
def _nulls_of(group_ptr):
    """What says which entries of a group are missing, and the block that stands for them where the layout has no null.

    Loaded before a loop: a compiler moves no load out of one that stores.
    """
    null_start, blocks_per_kv_block = tl.load(group_ptr + NULL_START), tl.load(group_ptr + BLOCKS_PER_KV_BLOCK)
    return null_start, blocks_per_kv_block, tl.maximum(tl.load(group_ptr + FILLER), 0)


@triton.jit
def _block_in(table_row, column, is_there, nulls):
    """Blocks of columns of rows, [n] int32; -1: missing, or not there."""
    null_start, blocks_per_kv_block, _ = nulls
    block_id = tl.load(table_row + column, mask=is_there, other=-1)
    return tl.where(_is_missing(block_id, null_start, blocks_per_kv_block), -1, block_id)


@_jit
def count_entries(
    idx_mapping: tl.int64,  # [num_reqs] int32, batch index -> row
    num_computed_tokens: tl.int64,  # [num_reqs] int32, batch index -> tokens
    seq_lens: tl.int64,  # [num_reqs] int32, batch index -> tokens
    first_tokens: tl.int64,  # [num_reqs] int32, batch index -> token that its part begins with
    num_reqs: tl.int32, max_batch: tl.int32, max_num_rows: tl.int32, groups: tl.int64,
    members: tl.int64, num_members: tl.int32, arena: tl.int64,
    width: tl.int32,  # columns that a batch row may export
    unit: tl.int32,  # what an entry is
    counts: tl.int64,  # [2 * max_batch + 2] int32, written
    lengths: tl.int64,  # [max_batch] int32, written
    num_cut: tl.int64, TILE: tl.constexpr,  # [1] int32, first tokens that are not a boundary are added
):  # fmt: skip
    """Count what every batch row exports, and keep what it did before."""
    member_ptr, arena_ptr = _pointer(members, tl.int32), _pointer(arena, tl.int32)
    count_ptr, cut_ptr = _pointer(counts, tl.int32), _pointer(num_cut, tl.uint32)
    group_ptr = _pointer(groups, tl.int64) + tl.load(member_ptr) * NUM_FIELDS
    tokens = tl.load(group_ptr + TOKENS_PER_COLUMN)
    # step 1: which batch row
    first = tl.program_id(0) * TILE
    while first < max_batch:
        i = first + tl.arange(0, TILE)
        is_row = i < max_batch
        row = _row_of(idx_mapping, i, num_reqs, max_num_rows)
        # step 2: how many columns its row fills, in every group
        columns = tl.where(row >= 0, width, 0)
        m = num_members * 0
        while m < num_members:
            first_count = max_num_rows.to(tl.int64) * tl.load(member_ptr + m)
            columns = tl.minimum(columns, tl.load(arena_ptr + first_count + row, mask=row >= 0, other=0))
            m += 1
        if unit == COUNT_RING:
            columns = tl.where(columns > 0, width, 0)
        begin = _length_of(group_ptr, first_tokens, i, row)
        part = _divide(begin, tokens)
        count = tl.maximum(columns.to(tl.int64) - part, 0)
        # step 3: how many tokens of it this rank holds
        length = tl.maximum(_length_of(group_ptr, seq_lens, i, row) - part * tokens, 0)
        tl.store(_pointer(lengths, tl.int32) + i, length.to(tl.int32), mask=is_row)
        num_rounded = tl.sum((begin != part * tokens).to(tl.uint32), 0)
        if num_rounded > 0:
            tl.atomic_add(cut_ptr, num_rounded)  # at most 2**31 - 1 before, and a launch has fewer rows than 2**31
            tl.atomic_min(cut_ptr, INT32_MAX)
        # step 4: store how many entries that makes
        if (unit == COUNT_BLOCKS) | (unit == COUNT_RING):
            count = tl.minimum(count, _divide(length + tokens - 1, tokens))
        if unit == COUNT_TOKENS:
            count = tl.minimum(count * tokens, length)
        tl.store(count_ptr + max_batch + i, tl.load(count_ptr + i, mask=is_row, other=0), mask=is_row)
        tl.store(count_ptr + i, count.to(tl.int32), mask=is_row)
        first += tl.num_programs(0) * TILE


@_jit
def start_requests(
    idx_mapping: tl.int64, num_computed_tokens: tl.int64, seq_lens: tl.int64, first_tokens: tl.int64,
    num_reqs: tl.int32, max_batch: tl.int32, max_num_rows: tl.int32, groups: tl.int64,
    members: tl.int64, num_members: tl.int32, arena: tl.int64,  # as above
    unit: tl.int32, capacity: tl.int32,  # what an entry is; entries of a member's indices
    lengths: tl.int64,  # [max_batch] int32
    counts: tl.int64,  # [2 * max_batch + 2] int32, the last two written
    indptr: tl.int64,  # [max_batch + 1] int32, written
    last_page_lens: tl.int64,  # [max_batch] int32, written
    num_cut: tl.int64, TILE: tl.constexpr,  # [1] int32, what the capacity has left out is added
):  # fmt: skip
    """Write where each request's entries begin, and how many tokens its last page holds."""
    group_ptr = _pointer(groups, tl.int64) + tl.load(_pointer(members, tl.int32)) * NUM_FIELDS
    count_ptr = _pointer(counts, tl.int32)
    limit = capacity.to(tl.int64)
    # step 1: which request
    first = tl.program_id(0) * TILE
    while first <= max_batch:
        i = first + tl.arange(0, TILE)
        # step 2: store how many entries lie before it
        before = tl.zeros((TILE,), tl.int64)
        j = first * 0
        while j < tl.minimum(first, num_reqs):
            lane = j + tl.arange(0, TILE)
            other = tl.load(count_ptr + lane, mask=lane < tl.minimum(first, num_reqs), other=0)
            before += tl.sum(other.to(tl.int64), 0)
            j += TILE
        count = tl.load(count_ptr + i, mask=i < num_reqs, other=0).to(tl.int64)
        end = before + tl.cumsum(count, 0)
        start = tl.minimum(end - count, limit)
        tl.store(_pointer(indptr, tl.int32) + i, start.to(tl.int32), mask=i <= max_batch)
        # step 3: store how many tokens its last page holds
        num_pages = tl.minimum(end, limit) - start
        tokens = tl.load(group_ptr + TOKENS_PER_COLUMN)
        tokens = tl.where(unit == COUNT_TOKENS, tokens * 0 + 1, tokens)
        length = tl.load(_pointer(lengths, tl.int32) + i, mask=i < max_batch, other=0)
        last_page_len = tl.minimum(tokens, length - (num_pages - 1) * tokens)
        last_page_len = tl.where(num_pages > 0, last_page_len, 0)
        tl.store(_pointer(last_page_lens, tl.int32) + i, last_page_len.to(tl.int32), mask=i < max_batch)
        # step 4: remember how many entries there are, and count those that are cut
        is_total = i == max_batch
        total_ptr = count_ptr + i + max_batch
        tl.store(total_ptr + 1, tl.load(total_ptr, mask=is_total, other=0), mask=is_total)
        tl.store(total_ptr, start.to(tl.int32), mask=is_total)
        cut_ptr = _pointer(num_cut, tl.int32) + i * 0
        cut = tl.load(cut_ptr, mask=is_total, other=0) + tl.maximum(end - limit, 0)
        tl.store(cut_ptr, tl.minimum(cut, INT32_MAX).to(tl.int32), mask=is_total)
        first += tl.num_programs(0) * TILE


@_jit
def write_indices(
    idx_mapping: tl.int64, num_computed_tokens: tl.int64, seq_lens: tl.int64, first_tokens: tl.int64,
    num_reqs: tl.int32, max_batch: tl.int32, max_num_rows: tl.int32, groups: tl.int64,
    members: tl.int64, num_members: tl.int32, arena: tl.int64,  # as above
    unit: tl.int32, capacity: tl.int32,  # what an entry is; entries of a member's indices
    counts: tl.int64,  # [2 * max_batch + 2] int32
    indptr: tl.int64,  # [max_batch + 1] int32
    entries: tl.int64, TILE: tl.constexpr,  # [num_members, capacity] int32, written
):  # fmt: skip
    """Write the entries of all requests, one request after another, and the fill over what a larger batch left."""
    arena_ptr, start_ptr = _pointer(arena, tl.int32), _pointer(indptr, tl.int32)
    total_ptr = _pointer(counts, tl.int32) + max_batch.to(tl.int64) * 2
    total = tl.load(total_ptr)
    end = tl.minimum(tl.maximum(total, tl.load(total_ptr + 1)), capacity)
    batch = (num_computed_tokens, first_tokens, max_num_rows)
    # step 1: which entry and group
    m = tl.program_id(1)
    while m < num_members:
        g = tl.load(_pointer(members, tl.int32) + m)
        group_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS
        entry_ptr = _pointer(entries, tl.int32) + capacity.to(tl.int64) * m
        nulls = _nulls_of(group_ptr)
        first = tl.program_id(0).to(tl.int64) * TILE
        while first < end:
            entry = first + tl.arange(0, TILE)
            # step 2: the fill after the last entry
            is_real = entry < total
            # step 3: which request and column
            i = _request_of(indptr, 0, num_reqs, entry, is_real)
            row = _row_of(idx_mapping, i, num_reqs, max_num_rows)
            place = tl.where(is_real, entry - tl.load(start_ptr + i, mask=is_real, other=0), 0)
            tokens = tl.load(group_ptr + TOKENS_PER_COLUMN)
            tokens = tl.where(unit == COUNT_TOKENS, tokens, tokens * 0 + 1)
            column = _divide(place, tokens)
            table_row, first_column, filled, _ = _part_in(batch, group_ptr, g, arena_ptr, i, row)
            is_there = (column >= first_column) & (column < filled)
            block_id = _block_in(table_row, column, is_there, nulls).to(tl.int64)
            # step 4: store the entry
            index = tl.where(block_id < 0, nulls[2], block_id) * tokens + (place - column * tokens)
            index = tl.where(unit == REQUESTS, i, index)
            tl.store(entry_ptr + entry, index.to(tl.int32), mask=entry < end)
            first += tl.num_programs(0).to(tl.int64) * TILE
        m += tl.num_programs(1)


@_jit
def write_table(
    idx_mapping: tl.int64, num_computed_tokens: tl.int64, seq_lens: tl.int64, first_tokens: tl.int64,
    num_reqs: tl.int32, max_batch: tl.int32, max_num_rows: tl.int32, groups: tl.int64,
    members: tl.int64, num_members: tl.int32, arena: tl.int64,  # as above
    width: tl.int32,  # columns of a row of the table
    counts: tl.int64,  # [2 * max_batch + 2] int32
    null: tl.int64, entry_scale: tl.int64,  # null 0: the layout has none
    form: tl.int32, value_offset: tl.int64,  # what a row is; from a K offset to its V offset
    entries: tl.int64,  # [num_members, max_batch, width], for K and V [.., max_batch, 2, width], SLOT_T, written
    SLOT_T: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the columns in use of every batch row, and the fill after them."""
    arena_ptr, count_ptr = _pointer(arena, tl.int32), _pointer(counts, tl.int32)
    batch, has_values = (num_computed_tokens, first_tokens, max_num_rows), (form == FORM_VALUES).to(tl.int32)
    # step 1: which batch row and group
    m = tl.program_id(1)
    while m < num_members:
        g = tl.load(_pointer(members, tl.int32) + m)
        group_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS
        nulls = _nulls_of(group_ptr)
        fill = tl.where(null < 0, null, nulls[2] * entry_scale)
        i = tl.program_id(0)
        while i < max_batch:
            count = tl.minimum(tl.load(count_ptr + i), width)
            before = tl.minimum(tl.load(count_ptr + max_batch + i), width)
            cell = max_batch.to(tl.int64) * m + i
            row_ptr = _pointer(entries, SLOT_T) + cell * (1 + has_values) * width
            # step 2: the fill over what an earlier batch left after its columns
            first = count
            while first < before:
                column = first + tl.arange(0, TILE)
                tl.store(row_ptr + column, fill.to(SLOT_T), mask=column < before)
                tl.store(row_ptr + width + column, fill.to(SLOT_T), mask=column < before * has_values)
                first += TILE
            # step 3: how many of them the window has passed
            row = _row_of(idx_mapping, i, num_reqs, max_num_rows)
            table_row, first_column, filled, _ = _part_in(batch, group_ptr, g, arena_ptr, i, row)
            end = tl.where(form == FORM_RING, width, filled)
            if form == FORM_RING:
                tokens = tl.load(group_ptr + TOKENS_PER_COLUMN)
                overwritten = tl.maximum(_length_of(group_ptr, seq_lens, i, row) - filled * tokens, 0)
                first_column = tl.maximum(first_column, _divide(overwritten, tokens))
            # step 4: store the columns in use
            first = count * 0
            while first < count:
                place = first + tl.arange(0, TILE)
                column = place.to(tl.int64)
                if form == FORM_RING:
                    column -= _divide(column, filled) * filled
                is_there = (place >= first_column) & (place < end)
                block_id = _block_in(table_row, column, is_there, nulls).to(tl.int64)
                entry = tl.where(block_id < 0, fill, block_id * entry_scale)
                tl.store(row_ptr + place, entry.to(SLOT_T), mask=place < count)
                value = (entry + value_offset).to(SLOT_T)
                tl.store(row_ptr + width + place, value, mask=place < count * has_values)
                first += TILE
            i += tl.num_programs(0)
        m += tl.num_programs(1)


@_jit
def clear_inverse_map(
    idx_mapping: tl.int64, num_computed_tokens: tl.int64, seq_lens: tl.int64, first_tokens: tl.int64,
    num_reqs: tl.int32, max_batch: tl.int32, max_num_rows: tl.int32, groups: tl.int64,
    members: tl.int64, num_members: tl.int32, arena: tl.int64,  # as above
    width: tl.int32, num_kernel_blocks: tl.int32,  # columns that a batch row may export; blocks of the cache
    counts: tl.int64,  # [2 * max_batch + 2] int32
    mapped: tl.int64,  # [num_members, max_batch, width] int32, blocks that the call before mapped
    null: tl.int32, entries: tl.int64, TILE: tl.constexpr,  # [num_members, max_batch, num_kernel_blocks] int32, written
):  # fmt: skip
    """Take the blocks of the call before out of every batch row's map."""
    count_ptr = _pointer(counts, tl.int32)
    # step 1: which batch row and group
    m = tl.program_id(1)
    while m < num_members:
        i = tl.program_id(0)
        while i < max_batch:
            before = tl.minimum(tl.load(count_ptr + max_batch + i), width)
            cell = max_batch.to(tl.int64) * m + i
            mapped_ptr = _pointer(mapped, tl.int32) + cell * width
            entry_ptr = _pointer(entries, tl.int32) + cell * num_kernel_blocks
            # step 2: forget the column of every block that it held
            first = before * 0
            while first < before:
                column = first + tl.arange(0, TILE)
                block_id = tl.load(mapped_ptr + column, mask=column < before, other=-1)
                is_mapped = (block_id >= 0) & (block_id < num_kernel_blocks)
                tl.store(entry_ptr + block_id, block_id * 0 + null, mask=is_mapped)
                first += TILE
            i += tl.num_programs(0)
        m += tl.num_programs(1)


@_jit
def write_inverse_map(
    idx_mapping: tl.int64, num_computed_tokens: tl.int64, seq_lens: tl.int64, first_tokens: tl.int64,
    num_reqs: tl.int32, max_batch: tl.int32, max_num_rows: tl.int32, groups: tl.int64,
    members: tl.int64, num_members: tl.int32, arena: tl.int64,  # as above
    width: tl.int32, num_kernel_blocks: tl.int32,  # columns that a batch row may export; blocks of the cache
    counts: tl.int64,  # [2 * max_batch + 2] int32
    mapped: tl.int64,  # [num_members, max_batch, width] int32, written
    entries: tl.int64, TILE: tl.constexpr,  # [num_members, max_batch, num_kernel_blocks] int32, written
):  # fmt: skip
    """Write the column of every block that a batch row's tokens lie in."""
    arena_ptr, count_ptr = _pointer(arena, tl.int32), _pointer(counts, tl.int32)
    batch = (num_computed_tokens, first_tokens, max_num_rows)
    # step 1: which batch row and group
    m = tl.program_id(1)
    while m < num_members:
        g = tl.load(_pointer(members, tl.int32) + m)
        group_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS
        nulls = _nulls_of(group_ptr)
        i = tl.program_id(0)
        while i < max_batch:
            count = tl.minimum(tl.load(count_ptr + i), width)
            # step 2: how many of its columns the window has passed
            row = _row_of(idx_mapping, i, num_reqs, max_num_rows)
            table_row, first_column, filled, part = _part_in(batch, group_ptr, g, arena_ptr, i, row)
            cell = max_batch.to(tl.int64) * m + i
            mapped_ptr = _pointer(mapped, tl.int32) + cell * width
            entry_ptr = _pointer(entries, tl.int32) + cell * num_kernel_blocks
            first = count * 0
            while first < count:
                place = first + tl.arange(0, TILE)
                # step 3: remember its blocks
                is_place = place < count
                block_id = _block_in(table_row, place, (place >= first_column) & (place < filled), nulls)
                tl.store(mapped_ptr + place, block_id, mask=is_place)
                # step 4: store the column of each block, the last one of a block that stands there twice
                is_mapped = is_place & (block_id >= 0) & (block_id < num_kernel_blocks)
                tl.atomic_max(entry_ptr + block_id, (part + place).to(tl.int32), mask=is_mapped)
                first += TILE
            i += tl.num_programs(0)
        m += tl.num_programs(1)


@_jit
def gather_state_indices(
    idx_mapping: tl.int64, num_computed_tokens: tl.int64, seq_lens: tl.int64, first_tokens: tl.int64,
    num_reqs: tl.int32, max_batch: tl.int32, max_num_rows: tl.int32, groups: tl.int64,
    members: tl.int64, num_members: tl.int32, arena: tl.int64,  # as above
    state_columns: tl.int32, num_columns: tl.int32, null: tl.int64,  # null 0: the layout has none
    entries: tl.int64,  # [num_members, max_batch, num_columns] SLOT_T, written
    SLOT_T: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the blocks that hold every batch row's states."""
    arena_ptr = _pointer(arena, tl.int32)
    num_cells = max_batch.to(tl.int64) * num_columns
    # step 1: which batch row, group and place
    m = tl.program_id(1)
    while m < num_members:
        g = tl.load(_pointer(members, tl.int32) + m)
        group_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS
        entry_ptr = _pointer(entries, SLOT_T) + num_cells * m
        nulls = _nulls_of(group_ptr)
        fill = tl.where(null < 0, null, nulls[2])
        first_cell = tl.program_id(0).to(tl.int64) * TILE
        while first_cell < num_cells:
            cell = first_cell + tl.arange(0, TILE)
            i = _divide(cell, num_columns.to(tl.int64))
            row = _row_of(idx_mapping, i.to(tl.int32), num_reqs, max_num_rows)
            # step 2: which column
            table_row, filled = _row_in(group_ptr, g, arena_ptr, max_num_rows, row)
            first = cell * 0
            if state_columns == STATE_LAST:
                first = tl.maximum(filled - num_columns, 0)
            if state_columns == STATE_ALIGNED:
                seq_len = tl.load(_pointer(seq_lens, tl.int32) + i, mask=row >= 0, other=0).to(tl.int64)
                first = _divide(tl.maximum(seq_len - 1, 0), tl.load(group_ptr + TOKENS_PER_COLUMN))
            column = first + (cell - i * num_columns)
            # step 3: store the block, or the fill where there is none
            block_id = _block_in(table_row, column, column < filled, nulls).to(tl.int64)
            stored = tl.where(block_id < 0, fill, block_id)
            tl.store(entry_ptr + cell, stored.to(SLOT_T), mask=cell < num_cells)
            first_cell += tl.num_programs(0).to(tl.int64) * TILE
        m += tl.num_programs(1)


@_jit
def map_requests(
    idx_mapping: tl.int64,  # as above
    query_start_loc: tl.int64,  # [num_reqs + 1] int32, first token of each request
    num_reqs: tl.int32, max_batch: tl.int32, max_num_rows: tl.int32, num_members: tl.int32,
    capacity: tl.int32, indptr: tl.int64, entries: tl.int64, TILE: tl.constexpr,  # as above
):  # fmt: skip
    """Write the request of every token, and where each request's tokens begin."""
    start_ptr = _pointer(query_start_loc, tl.int32)
    begin, stride = tl.program_id(0).to(tl.int64) * TILE, tl.num_programs(0).to(tl.int64) * TILE
    # step 1: store where each request begins, and the last start over the padding
    first = begin
    while first <= max_batch:
        i = first + tl.arange(0, TILE)
        start = tl.maximum(tl.load(start_ptr + tl.minimum(i, num_reqs)), 0)
        tl.store(_pointer(indptr, tl.int32) + i, tl.minimum(start, capacity), mask=i <= max_batch)
        first += stride
    # step 2: store each token's request, -1 for tokens of padding entries and of no request
    end = tl.minimum(tl.load(start_ptr + num_reqs), capacity)
    m = tl.program_id(1)
    while m < num_members:
        entry_ptr = _pointer(entries, tl.int32) + capacity.to(tl.int64) * m
        first = begin
        while first < capacity:
            token = first + tl.arange(0, TILE)
            request = _request_of(query_start_loc, 0, num_reqs, token, token < end)
            row = _row_of(idx_mapping, request, num_reqs, max_num_rows)
            tl.store(entry_ptr + token, tl.where(row >= 0, request, -1).to(tl.int32), mask=token < capacity)
            first += stride
        m += tl.num_programs(1)


@_jit
def map_positions(
    rows: tl.int64,  # [num_tokens] int32, token -> row
    positions: tl.int64,  # [num_tokens, num_positions] int32
    num_tokens: tl.int32, num_positions: tl.int32, max_num_rows: tl.int32,
    groups: tl.int64, group: tl.int32, arena: tl.int64,  # as above
    slots: tl.int64,  # [num_tokens, num_positions] SLOT_T, written
    SLOT_T: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the slot of every position, -1 where it has none."""
    arena_ptr = _pointer(arena, tl.int32)
    count_ptr = arena_ptr + max_num_rows.to(tl.int64) * group
    group_ptr = _pointer(groups, tl.int64) + group * NUM_FIELDS
    table_start, width = tl.load(group_ptr + TABLE_START), tl.load(group_ptr + WIDTH)
    table = (count_ptr, group_ptr, arena_ptr, table_start, width, tl.load(group_ptr + TOKENS_PER_COLUMN), 0, -1)
    num_cells = num_tokens.to(tl.int64) * num_positions
    # step 1: which token and position
    first = tl.program_id(0).to(tl.int64) * TILE
    while first < num_cells:
        cell = first + tl.arange(0, TILE)
        token = _divide(cell, num_positions.to(tl.int64))
        position = tl.load(_pointer(positions, tl.int32) + cell, mask=cell < num_cells, other=-1).to(tl.int64)
        # step 2: which row, and how many columns it fills
        row = _row_of(rows, token, num_tokens, max_num_rows)
        # step 3: whose token it is, and its index among this rank's tokens
        # In _slots_in, as for map_slots.
        # step 4: which column, and whether the row fills it
        # In _slots_in.
        # step 5: which kernel block
        slot = _slots_in(position, None, row, None, table, EVERY_FEATURE)
        # step 6: store the slot
        tl.store(_pointer(slots, SLOT_T) + cell, slot.to(SLOT_T), mask=cell < num_cells)
        first += tl.num_programs(0).to(tl.int64) * TILE
