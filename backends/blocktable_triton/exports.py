"""The export kernels in Triton, each with its launcher below it: a batch's rows as attention kernels read them.

All begin with the same arguments: the batch, and the groups that are exported together ("members"), which share one
geometry. counts is [2 * max_num_reqs + 2] int32: entries of each batch row; those of the call before; all; all of the
call before. As in kernels.py every loop is grid-stride, arrays come as addresses, and no value asks for another
compilation.
"""

# ruff: noqa: N803 - Triton writes compile-time arguments in capitals.
from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import triton
import triton.language as tl

from blocktable import Batch, ExportBuffers, Layout
from blocktable_triton.kernels import (
    BLOCKS_PER_KV_BLOCK,
    INTERLEAVE_SIZE,
    NULL_BLOCK_ID,
    NUM_FIELDS,
    RANK,
    SLIDING_WINDOW,
    TABLE_START,
    TOKENS_PER_COLUMN,
    WIDTH,
    WORLD_SIZE,
    _divide,
    _grid,
    _int32,
    _jit,
    _local_length,
    _pointer,
    _row_of,
)

COUNT_BLOCKS = tl.constexpr(1)  # an entry is a kernel block that holds tokens; with 0 it is a column,
COUNT_TOKENS = tl.constexpr(2)  # with 2 a token
COUNT_UNITS = {"table": 0, "kv_offsets": 0, "lengths": 0, "csr": 1, "inverse_map": 1, "token_csr": 2}
"""Layout kind -> what is an entry."""
STATE_LAST = tl.constexpr(1)
STATE_ALIGNED = tl.constexpr(2)
STATE_COLUMNS = {"first": 0, "last": 1, "aligned": 2}
MAX_PROGRAMS = 2048
"""Of a launch over entries whose number only the device knows: enough to fill a large GPU."""

Kernel = Any  # called with (grid, arguments, stream)


class Source(NamedTuple):
    """What every export kernel reads, in the order of its first arguments.

    Attributes:
        idx_mapping, num_computed_tokens, seq_lens: addresses; 0 where there is none.
        num_reqs, max_num_reqs: requests, and batch rows.
        groups, members: addresses of the geometry of all groups, and of the numbers of those that are exported.
        num_members: groups that are exported.
        arena: address.
    """

    idx_mapping: int
    num_computed_tokens: int
    seq_lens: int
    num_reqs: int
    max_num_reqs: int
    groups: int
    members: int
    num_members: int
    arena: int


class Memory(NamedTuple):
    """One set of export buffers, as addresses; 0 where there is none."""

    members: int
    counts: int
    entries: int
    indptr: int
    last_page_lens: int
    lengths: int
    mapped: int


class Exporter:
    """The exports of one store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._kernels: dict[Any, Kernel] = {}
        self._memories: WeakKeyDictionary[ExportBuffers, Memory] = WeakKeyDictionary()

    def export(self, layout: Layout, batch: Batch, out: ExportBuffers, *, stream: int | None) -> None:
        """Write a batch in a layout."""
        store, memory = self._store, self._memory(out)
        with store.device.current(), store.inputs(batch, stream) as inputs:
            source = Source(
                inputs.idx_mapping,
                inputs.num_computed_tokens,
                inputs.seq_lens,
                _int32(batch.num_reqs),
                _int32(store.config.max_num_reqs),
                store.groups_address,
                memory.members,
                _int32(len(out.groups)),
                store.arena_address,
            )
            self._launch(layout, source, out, memory, inputs.stream)

    def reset(self, out: ExportBuffers, stream: Any) -> None:
        """Fill the entries with the layout's null, and all else but the members with 0 (R24)."""
        for name in Memory._fields:
            array = getattr(out, name)
            if array is not None and name != "members":
                self._store.device.fill(array, out.layout.null if name == "entries" else 0, stream)

    def _launch(self, layout: Layout, source: Source, out: ExportBuffers, memory: Memory, stream: Any) -> None:
        kind, tile, kernel, row_kernel = layout.kind, self._store.tile, self._kernel, self._row_kernel
        entry_type = getattr(tl, layout.dtype)
        if kind == "state":
            gather = kernel(gather_state_indices, entry_type)
            launch_gather_state_indices(gather, tile, source, layout, memory, stream)
            return
        unit = COUNT_UNITS[kind]
        launch_count_entries(kernel(count_entries), tile, source, out.width, unit, memory, stream)
        if kind in ("table", "kv_offsets"):
            launch_write_table(row_kernel(write_table, entry_type), source, out.width, layout, memory, stream)
        elif kind in ("csr", "token_csr"):
            launch_start_requests(kernel(start_requests), tile, source, unit, out.capacity, memory, stream)
            launch_write_indices(kernel(write_indices), tile, source, unit, out.capacity, memory, stream)
        elif kind == "inverse_map":
            sizes = out.width, out.num_kernel_blocks
            launch_clear_inverse_map(row_kernel(clear_inverse_map), source, *sizes, layout.null, memory, stream)
            launch_write_inverse_map(row_kernel(write_inverse_map), source, *sizes, memory, stream)

    def _kernel(self, function: Any, *constants: Any) -> Kernel:
        return self._made(function, *constants, self._store.tile)

    def _row_kernel(self, function: Any, *constants: Any) -> Kernel:
        """Return a kernel whose programs take a row each."""
        return self._made(function, *constants, self._store.row_tile)

    def _made(self, *key: Any) -> Kernel:
        if key not in self._kernels:
            self._kernels[key] = self._store.device.kernel(*key)
        return self._kernels[key]

    def _memory(self, out: ExportBuffers) -> Memory:
        if out not in self._memories:
            arrays = (getattr(out, name) for name in Memory._fields)
            address = self._store.device.address
            self._memories[out] = Memory(*(0 if array is None else address(array) for array in arrays))
        return self._memories[out]


@triton.jit
def _length_of(group_ptr, seq_lens, i, row):
    """Tokens of batch rows that this rank holds; none for a dummy. i, row: [n] int32."""
    asked_row = tl.where(seq_lens != 0, row, -1)
    length = tl.maximum(tl.load(_pointer(seq_lens, tl.int32) + i, mask=asked_row >= 0, other=0), 0).to(tl.int64)
    world_size = tl.load(group_ptr + WORLD_SIZE)
    if world_size > 1:
        rank, interleave_size = tl.load(group_ptr + RANK), tl.load(group_ptr + INTERLEAVE_SIZE)
        length = _local_length(length, world_size, rank, interleave_size)
    return length


@triton.jit
def _first_column_of(group_ptr, num_computed_tokens, i, row):
    """Columns of batch rows that the window has left behind. i, row: [n] int32."""
    first = row.to(tl.int64) * 0
    sliding_window = tl.load(group_ptr + SLIDING_WINDOW)
    if (num_computed_tokens != 0) & (sliding_window > 0):
        computed = tl.load(_pointer(num_computed_tokens, tl.int32) + i, mask=row >= 0, other=0).to(tl.int64)
        first = tl.maximum(computed - sliding_window + 1, 0)
        world_size = tl.load(group_ptr + WORLD_SIZE)
        if world_size > 1:
            rank, interleave_size = tl.load(group_ptr + RANK), tl.load(group_ptr + INTERLEAVE_SIZE)
            first = _local_length(first, world_size, rank, interleave_size)
        first = _divide(first, tl.load(group_ptr + TOKENS_PER_COLUMN))
    return first


@triton.jit
def _filled_columns(group_ptr, g, arena_ptr, max_num_reqs, row):
    """Columns that rows fill; none for a dummy."""
    filled = tl.load(arena_ptr + max_num_reqs.to(tl.int64) * g + row, mask=row >= 0, other=0)
    return tl.minimum(filled.to(tl.int64), tl.load(group_ptr + WIDTH))


@triton.jit
def _row_ptr(group_ptr, arena_ptr, row):
    """Where rows begin; the first one stands for a dummy's."""
    return arena_ptr + tl.load(group_ptr + TABLE_START) + tl.load(group_ptr + WIDTH) * tl.maximum(row, 0)


@triton.jit
def _entry_of(table_row, first_column, filled, column):
    """What columns of rows hold: NULL before the window, and behind what the row fills."""
    return tl.load(table_row + column, mask=(column >= first_column) & (column < filled), other=NULL_BLOCK_ID)


@_jit
def count_entries(
    idx_mapping: tl.int64,  # [num_reqs] int32, batch index -> row; 0: identity
    num_computed_tokens: tl.int64,  # [num_reqs] int32, batch index -> tokens; 0: no window is cut
    seq_lens: tl.int64,  # [num_reqs] int32, batch index -> tokens; 0: not asked for
    num_reqs: tl.int32,
    max_num_reqs: tl.int32,
    groups: tl.int64,  # [num_groups, NUM_FIELDS] int64
    members: tl.int64,  # [num_members] int32, groups
    num_members: tl.int32,
    arena: tl.int64,  # [arena.size] int32
    width: tl.int32,  # columns that a row may export
    unit: tl.int32,  # COUNT_UNITS
    counts: tl.int64,  # [2 * max_num_reqs + 2] int32, written
    lengths: tl.int64,  # [max_num_reqs] int32, written; 0: not wanted
    TILE: tl.constexpr,
):
    """Count what every batch row exports, and keep what it did before."""
    member_ptr, arena_ptr = _pointer(members, tl.int32), _pointer(arena, tl.int32)
    count_ptr = _pointer(counts, tl.int32)
    group_ptr = _pointer(groups, tl.int64) + tl.load(member_ptr) * NUM_FIELDS
    # step 1: which batch row
    first = tl.program_id(0) * TILE
    while first < max_num_reqs:
        i = first + tl.arange(0, TILE)
        is_row = i < max_num_reqs
        row = _row_of(idx_mapping, i, num_reqs, max_num_reqs)
        # step 2: how many columns its row fills, in every group
        columns = tl.where(row >= 0, width, 0)
        m = num_members * 0
        while m < num_members:
            first_count = max_num_reqs.to(tl.int64) * tl.load(member_ptr + m)
            columns = tl.minimum(columns, tl.load(arena_ptr + first_count + row, mask=row >= 0, other=0))
            m += 1
        # step 3: how many tokens of it this rank holds
        length = _length_of(group_ptr, seq_lens, i, row)
        num_lengths = tl.where(lengths != 0, max_num_reqs, 0)
        tl.store(_pointer(lengths, tl.int32) + i, length.to(tl.int32), mask=i < num_lengths)
        # step 4: store how many entries that makes
        tokens = tl.load(group_ptr + TOKENS_PER_COLUMN)
        count = columns.to(tl.int64)
        if unit == COUNT_BLOCKS:
            count = tl.minimum(count, _divide(length + tokens - 1, tokens))
        if unit == COUNT_TOKENS:
            count = tl.minimum(count * tokens, length)
        tl.store(count_ptr + max_num_reqs + i, tl.load(count_ptr + i, mask=is_row, other=0), mask=is_row)
        tl.store(count_ptr + i, count.to(tl.int32), mask=is_row)
        first += tl.num_programs(0) * TILE


def launch_count_entries(
    kernel: Kernel, tile: int, source: Source, width: int, unit: int, memory: Memory, stream: Any
) -> None:
    """Launch count_entries."""
    kernel(_grid(source.max_num_reqs, tile, 1), (*source, _int32(width), unit, memory.counts, memory.lengths), stream)


@_jit
def start_requests(
    idx_mapping: tl.int64,  # as count_entries, to arena
    num_computed_tokens: tl.int64,
    seq_lens: tl.int64,
    num_reqs: tl.int32,
    max_num_reqs: tl.int32,
    groups: tl.int64,
    members: tl.int64,
    num_members: tl.int32,
    arena: tl.int64,
    unit: tl.int32,  # COUNT_UNITS
    capacity: tl.int32,  # entries of a member's indices
    lengths: tl.int64,  # [max_num_reqs] int32
    counts: tl.int64,  # [2 * max_num_reqs + 2] int32, the last two written
    indptr: tl.int64,  # [max_num_reqs + 1] int32, written
    last_page_lens: tl.int64,  # [max_num_reqs] int32, written
    TILE: tl.constexpr,
):
    """Write where each request's entries begin, and how many tokens its last page holds."""
    group_ptr = _pointer(groups, tl.int64) + tl.load(_pointer(members, tl.int32)) * NUM_FIELDS
    count_ptr = _pointer(counts, tl.int32)
    limit = capacity.to(tl.int64)
    # step 1: which request
    first = tl.program_id(0) * TILE
    while first <= max_num_reqs:
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
        tl.store(_pointer(indptr, tl.int32) + i, start.to(tl.int32), mask=i <= max_num_reqs)
        # step 3: store how many tokens its last page holds
        num_pages = tl.minimum(end, limit) - start
        tokens = tl.load(group_ptr + TOKENS_PER_COLUMN)
        tokens = tl.where(unit == COUNT_TOKENS, tokens * 0 + 1, tokens)
        length = tl.load(_pointer(lengths, tl.int32) + i, mask=i < max_num_reqs, other=0)
        last_page_len = tl.minimum(tokens, length - (num_pages - 1) * tokens)
        last_page_len = tl.where(num_pages > 0, last_page_len, 0)
        tl.store(_pointer(last_page_lens, tl.int32) + i, last_page_len.to(tl.int32), mask=i < max_num_reqs)
        # step 4: remember how many entries there are
        is_total = i == max_num_reqs
        total_ptr = count_ptr + i + max_num_reqs
        tl.store(total_ptr + 1, tl.load(total_ptr, mask=is_total, other=0), mask=is_total)
        tl.store(total_ptr, start.to(tl.int32), mask=is_total)
        first += tl.num_programs(0) * TILE


def launch_start_requests(
    kernel: Kernel, tile: int, source: Source, unit: int, capacity: int, memory: Memory, stream: Any
) -> None:
    """Launch start_requests."""
    outputs = memory.lengths, memory.counts, memory.indptr, memory.last_page_lens
    kernel(_grid(source.max_num_reqs + 1, tile, 1), (*source, unit, _int32(capacity), *outputs), stream)


@_jit
def write_indices(
    idx_mapping: tl.int64,  # as count_entries, to arena
    num_computed_tokens: tl.int64,
    seq_lens: tl.int64,
    num_reqs: tl.int32,
    max_num_reqs: tl.int32,
    groups: tl.int64,
    members: tl.int64,
    num_members: tl.int32,
    arena: tl.int64,
    unit: tl.int32,  # COUNT_UNITS
    capacity: tl.int32,  # entries of a member's indices
    counts: tl.int64,  # [2 * max_num_reqs + 2] int32
    indptr: tl.int64,  # [max_num_reqs + 1] int32
    entries: tl.int64,  # [num_members, capacity] int32, written
    TILE: tl.constexpr,
):
    """Write the entries of all requests, one request after another, and NULL over those of a larger batch before."""
    arena_ptr, start_ptr = _pointer(arena, tl.int32), _pointer(indptr, tl.int32)
    total_ptr = _pointer(counts, tl.int32) + 2 * max_num_reqs
    total = tl.load(total_ptr)
    end = tl.minimum(tl.maximum(total, tl.load(total_ptr + 1)), capacity)
    # step 1: which entry and group
    m = tl.program_id(1)
    while m < num_members:
        g = tl.load(_pointer(members, tl.int32) + m)
        group_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS
        entry_ptr = _pointer(entries, tl.int32) + capacity.to(tl.int64) * m
        first = tl.program_id(0).to(tl.int64) * TILE
        while first < end:
            entry = first + tl.arange(0, TILE)
            # step 2: NULL behind the last entry
            is_real = entry < total
            # step 3: which request and column
            i = tl.zeros((TILE,), tl.int32)
            size = max_num_reqs
            while size > 1:  # the request is one of `size` from i on
                half = size // 2
                start = tl.load(start_ptr + i + half, mask=is_real, other=0)
                i = tl.where(start <= entry, i + half, i)
                size -= half
            row = tl.where(is_real, _row_of(idx_mapping, i, num_reqs, max_num_reqs), -1)
            place = entry - tl.load(start_ptr + i, mask=is_real, other=0)
            tokens = tl.load(group_ptr + TOKENS_PER_COLUMN)
            tokens = tl.where(unit == COUNT_TOKENS, tokens, tokens * 0 + 1)
            column = _divide(tl.maximum(place, 0), tokens)
            first_column = _first_column_of(group_ptr, num_computed_tokens, i, row)
            filled = _filled_columns(group_ptr, g, arena_ptr, max_num_reqs, row)
            table_row = _row_ptr(group_ptr, arena_ptr, row)
            index = _entry_of(table_row, first_column, filled, column).to(tl.int64)
            index = tl.where(is_real, index * tokens + (place - column * tokens), 0)
            # step 4: store the entry
            tl.store(entry_ptr + entry, index.to(tl.int32), mask=entry < end)
            first += tl.num_programs(0).to(tl.int64) * TILE
        m += tl.num_programs(1)


def launch_write_indices(
    kernel: Kernel, tile: int, source: Source, unit: int, capacity: int, memory: Memory, stream: Any
) -> None:
    """Launch write_indices: over as many entries as there may be, since only the device knows how many there are."""
    grid_x, *rest = _grid(capacity, tile, source.num_members)
    arguments = (*source, unit, _int32(capacity), memory.counts, memory.indptr, memory.entries)
    kernel((min(grid_x, MAX_PROGRAMS), *rest), arguments, stream)


@_jit
def write_table(
    idx_mapping: tl.int64,  # as count_entries, to arena
    num_computed_tokens: tl.int64,
    seq_lens: tl.int64,
    num_reqs: tl.int32,
    max_num_reqs: tl.int32,
    groups: tl.int64,
    members: tl.int64,
    num_members: tl.int32,
    arena: tl.int64,
    width: tl.int32,  # columns of a row of the table
    counts: tl.int64,  # [2 * max_num_reqs + 2] int32
    null: tl.int64,
    entry_scale: tl.int64,
    is_pair: tl.int32,  # whether a row of V offsets follows each row of K offsets
    value_offset: tl.int64,  # from a K offset to its V offset
    entries: tl.int64,  # [num_members, max_num_reqs, 1 + is_pair, width] ENTRY_T, written
    ENTRY_T: tl.constexpr,  # tl.int32 or tl.int64
    TILE: tl.constexpr,
):
    """Write the columns in use of every batch row, and the layout's null behind them."""
    arena_ptr, count_ptr = _pointer(arena, tl.int32), _pointer(counts, tl.int32)
    null_entry = null.to(tl.int64)
    # step 1: which batch row and group
    m = tl.program_id(1)
    while m < num_members:
        g = tl.load(_pointer(members, tl.int32) + m)
        group_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS
        i = tl.program_id(0)
        while i < max_num_reqs:
            count = tl.minimum(tl.load(count_ptr + i), width)
            before = tl.minimum(tl.load(count_ptr + max_num_reqs + i), width)
            cell = max_num_reqs.to(tl.int64) * m + i
            row_ptr = _pointer(entries, ENTRY_T) + cell * (1 + is_pair) * width
            # step 2: null over what an earlier batch left behind its columns
            first = count
            while first < before:
                column = first + tl.arange(0, TILE)
                tl.store(row_ptr + column, null_entry.to(ENTRY_T), mask=column < before)
                tl.store(row_ptr + width + column, null_entry.to(ENTRY_T), mask=column < before * is_pair)
                first += TILE
            # step 3: how many of them the window has left behind
            row = _row_of(idx_mapping, i, num_reqs, max_num_reqs)
            first_column = _first_column_of(group_ptr, num_computed_tokens, i, row)
            filled = _filled_columns(group_ptr, g, arena_ptr, max_num_reqs, row)
            table_row = _row_ptr(group_ptr, arena_ptr, row)
            # step 4: store the columns in use
            first_id = tl.where(null_entry != NULL_BLOCK_ID, tl.load(group_ptr + BLOCKS_PER_KV_BLOCK), 0)
            first = count * 0
            while first < count:
                column = first + tl.arange(0, TILE)
                block_id = _entry_of(table_row, first_column, filled, column).to(tl.int64)
                entry = tl.where(block_id < first_id, null_entry, block_id * entry_scale)
                tl.store(row_ptr + column, entry.to(ENTRY_T), mask=column < count)
                value = (entry + value_offset).to(ENTRY_T)
                tl.store(row_ptr + width + column, value, mask=column < count * is_pair)
                first += TILE
            i += tl.num_programs(0)
        m += tl.num_programs(1)


def launch_write_table(kernel: Kernel, source: Source, width: int, layout: Layout, memory: Memory, stream: Any) -> None:
    """Launch write_table."""
    arguments = (
        *source,
        _int32(width),
        memory.counts,
        layout.null,
        layout.entry_scale,
        int(layout.kind == "kv_offsets"),
        layout.value_offset,
        memory.entries,
    )
    kernel(_grid(source.max_num_reqs, 1, source.num_members), arguments, stream)


@_jit
def clear_inverse_map(
    idx_mapping: tl.int64,  # as count_entries, to arena
    num_computed_tokens: tl.int64,
    seq_lens: tl.int64,
    num_reqs: tl.int32,
    max_num_reqs: tl.int32,
    groups: tl.int64,
    members: tl.int64,
    num_members: tl.int32,
    arena: tl.int64,
    width: tl.int32,  # columns that a row may export
    num_kernel_blocks: tl.int32,
    counts: tl.int64,  # [2 * max_num_reqs + 2] int32
    mapped: tl.int64,  # [num_members, max_num_reqs, width] int32, blocks that the call before mapped
    null: tl.int32,
    entries: tl.int64,  # [num_members, max_num_reqs, num_kernel_blocks] int32, written
    TILE: tl.constexpr,
):
    """Take the blocks of the call before out of every batch row's map."""
    count_ptr = _pointer(counts, tl.int32)
    # step 1: which batch row and group
    m = tl.program_id(1)
    while m < num_members:
        i = tl.program_id(0)
        while i < max_num_reqs:
            before = tl.minimum(tl.load(count_ptr + max_num_reqs + i), width)
            cell = max_num_reqs.to(tl.int64) * m + i
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


def launch_clear_inverse_map(
    kernel: Kernel, source: Source, width: int, num_kernel_blocks: int, null: int, memory: Memory, stream: Any
) -> None:
    """Launch clear_inverse_map."""
    sizes = _int32(width), _int32(num_kernel_blocks)
    arguments = (*source, *sizes, memory.counts, memory.mapped, null, memory.entries)
    kernel(_grid(source.max_num_reqs, 1, source.num_members), arguments, stream)


@_jit
def write_inverse_map(
    idx_mapping: tl.int64,  # as count_entries, to arena
    num_computed_tokens: tl.int64,
    seq_lens: tl.int64,
    num_reqs: tl.int32,
    max_num_reqs: tl.int32,
    groups: tl.int64,
    members: tl.int64,
    num_members: tl.int32,
    arena: tl.int64,
    width: tl.int32,  # columns that a row may export
    num_kernel_blocks: tl.int32,
    counts: tl.int64,  # [2 * max_num_reqs + 2] int32
    mapped: tl.int64,  # [num_members, max_num_reqs, width] int32, written
    entries: tl.int64,  # [num_members, max_num_reqs, num_kernel_blocks] int32, written
    TILE: tl.constexpr,
):
    """Write the column of every block that a batch row's tokens lie in."""
    arena_ptr, count_ptr = _pointer(arena, tl.int32), _pointer(counts, tl.int32)
    # step 1: which batch row and group
    m = tl.program_id(1)
    while m < num_members:
        g = tl.load(_pointer(members, tl.int32) + m)
        group_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS
        i = tl.program_id(0)
        while i < max_num_reqs:
            count = tl.minimum(tl.load(count_ptr + i), width)
            # step 2: how many of its columns the window has left behind
            row = _row_of(idx_mapping, i, num_reqs, max_num_reqs)
            first_column = _first_column_of(group_ptr, num_computed_tokens, i, row)
            filled = _filled_columns(group_ptr, g, arena_ptr, max_num_reqs, row)
            table_row = _row_ptr(group_ptr, arena_ptr, row)
            first_id = tl.load(group_ptr + BLOCKS_PER_KV_BLOCK)
            cell = max_num_reqs.to(tl.int64) * m + i
            mapped_ptr = _pointer(mapped, tl.int32) + cell * width
            entry_ptr = _pointer(entries, tl.int32) + cell * num_kernel_blocks
            first = count * 0
            while first < count:
                column = first + tl.arange(0, TILE)
                # step 3: remember its blocks
                is_column = column < count
                block_id = _entry_of(table_row, first_column, filled, column)
                tl.store(mapped_ptr + column, block_id, mask=is_column)
                # step 4: store the column of each block, the last one of a block that stands there twice
                is_mapped = is_column & (block_id >= first_id) & (block_id < num_kernel_blocks)
                tl.atomic_max(entry_ptr + block_id, column, mask=is_mapped)
                first += TILE
            i += tl.num_programs(0)
        m += tl.num_programs(1)


def launch_write_inverse_map(
    kernel: Kernel, source: Source, width: int, num_kernel_blocks: int, memory: Memory, stream: Any
) -> None:
    """Launch write_inverse_map."""
    sizes = _int32(width), _int32(num_kernel_blocks)
    arguments = (*source, *sizes, memory.counts, memory.mapped, memory.entries)
    kernel(_grid(source.max_num_reqs, 1, source.num_members), arguments, stream)


@_jit
def gather_state_indices(
    idx_mapping: tl.int64,  # as count_entries, to arena
    num_computed_tokens: tl.int64,
    seq_lens: tl.int64,
    num_reqs: tl.int32,
    max_num_reqs: tl.int32,
    groups: tl.int64,
    members: tl.int64,
    num_members: tl.int32,
    arena: tl.int64,
    columns: tl.int32,  # STATE_COLUMNS
    num_columns: tl.int32,
    null: tl.int64,
    entries: tl.int64,  # [num_members, max_num_reqs, num_columns] ENTRY_T, written
    ENTRY_T: tl.constexpr,  # tl.int32 or tl.int64
    TILE: tl.constexpr,
):
    """Write the blocks that hold every batch row's states."""
    arena_ptr = _pointer(arena, tl.int32)
    num_cells = max_num_reqs.to(tl.int64) * num_columns
    # step 1: which batch row, group and place
    m = tl.program_id(1)
    while m < num_members:
        g = tl.load(_pointer(members, tl.int32) + m)
        group_ptr = _pointer(groups, tl.int64) + g * NUM_FIELDS
        entry_ptr = _pointer(entries, ENTRY_T) + num_cells * m
        first_cell = tl.program_id(0).to(tl.int64) * TILE
        while first_cell < num_cells:
            cell = first_cell + tl.arange(0, TILE)
            i = _divide(cell, num_columns.to(tl.int64))
            row = _row_of(idx_mapping, i.to(tl.int32), num_reqs, max_num_reqs)
            # step 2: which column
            filled = _filled_columns(group_ptr, g, arena_ptr, max_num_reqs, row)
            first = cell * 0
            if columns == STATE_LAST:
                first = tl.maximum(filled - num_columns, 0)
            if columns == STATE_ALIGNED:
                seq_len = tl.load(_pointer(seq_lens, tl.int32) + i, mask=row >= 0, other=0).to(tl.int64)
                first = _divide(tl.maximum(seq_len - 1, 0), tl.load(group_ptr + TOKENS_PER_COLUMN))
            column = first + (cell - i * num_columns)
            # step 3: store the block, or null where there is none
            block_id = _entry_of(_row_ptr(group_ptr, arena_ptr, row), first * 0, filled, column).to(tl.int64)
            stored = tl.where(block_id == NULL_BLOCK_ID, null.to(tl.int64), block_id)
            tl.store(entry_ptr + cell, stored.to(ENTRY_T), mask=cell < num_cells)
            first_cell += tl.num_programs(0).to(tl.int64) * TILE
        m += tl.num_programs(1)


def launch_gather_state_indices(
    kernel: Kernel, tile: int, source: Source, layout: Layout, memory: Memory, stream: Any
) -> None:
    """Launch gather_state_indices."""
    columns = STATE_COLUMNS[layout.state_columns], _int32(layout.num_columns)
    arguments = (*source, *columns, layout.null, memory.entries)
    kernel(_grid(source.max_num_reqs * layout.num_columns, tile, source.num_members), arguments, stream)


EXPORT_KERNELS = (
    count_entries,
    start_requests,
    write_indices,
    write_table,
    clear_inverse_map,
    write_inverse_map,
    gather_state_indices,
)
