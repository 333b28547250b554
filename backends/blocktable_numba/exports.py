"""The export kernels in Numba, each with its launcher below it: a batch's rows as attention kernels read them.

All begin with the same arguments: the batch, and the groups that are exported together ("members"), which share one
geometry. counts is [2 * max_num_reqs + 2] int32: entries of each batch row; those of the call before; all; all of the
call before. As in kernels.py every loop is grid-stride, and arrays come as pointers.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numba import cuda, types
from numba.cuda.core import config

from blocktable import NULL_BLOCK_ID, Batch, ExportBuffers, Layout
from blocktable_numba.kernels import (
    _SLOTS,
    BLOCKS_PER_KV_BLOCK,
    INTERLEAVE_SIZE,
    KERNELS,
    MAX_GRID_Y,
    NUM_FIELDS,
    RANK,
    SIGNATURES,
    SLIDING_WINDOW,
    TABLE_START,
    TOKENS_PER_COLUMN,
    WIDTH,
    WORLD_SIZE,
    Kernel,
    Pointer,
    _device_function,
    _grid_x,
    _int32,
    advance,
    divide,
    local_length,
    row_of,
)

COUNT_BLOCKS = 1  # an entry is a kernel block that holds tokens; with 0 it is a column,
COUNT_TOKENS = 2  # with 2 a token
COUNT_UNITS = {"table": 0, "kv_offsets": 0, "lengths": 0, "csr": 1, "inverse_map": 1, "token_csr": 2}
"""Layout kind -> what is an entry."""
STATE_LAST = 1
STATE_ALIGNED = 2
STATE_COLUMNS = {"first": 0, "last": 1, "aligned": 2}
MAX_BLOCKS = 2048
"""Of a launch over entries whose number only the device knows: enough to fill a large GPU."""


class Source(NamedTuple):
    """What every export kernel reads, in the order of its first arguments; an array that is not there is None and 0."""

    idx_mapping: Pointer | None
    has_idx_mapping: int
    num_computed_tokens: Pointer | None
    has_num_computed_tokens: int
    seq_lens: Pointer | None
    has_seq_lens: int
    num_reqs: int
    max_num_reqs: int
    groups: Pointer
    members: Pointer
    num_members: int
    arena: Pointer


class Memory(NamedTuple):
    """One set of export buffers; None where there is none."""

    members: Pointer
    counts: Pointer
    entries: Pointer | None
    indptr: Pointer | None
    last_page_lens: Pointer | None
    lengths: Pointer | None
    mapped: Pointer | None


class Exporter:
    """The exports of one store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._kernels: dict[tuple[str, str], Kernel] = {}
        self._memories: WeakKeyDictionary[ExportBuffers, Memory] = WeakKeyDictionary()

    def export(self, layout: Layout, batch: Batch, out: ExportBuffers, *, stream: int | None) -> None:
        """Write a batch in a layout."""
        store, memory = self._store, self._memory(out)
        with store.device.current(), store.inputs(batch, stream) as inputs:
            source = Source(
                inputs.idx_mapping,
                int(inputs.idx_mapping is not None),
                inputs.num_computed_tokens,
                int(inputs.num_computed_tokens is not None),
                inputs.seq_lens,
                int(inputs.seq_lens is not None),
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
        kind, tile, kernel = layout.kind, self._store.device.tile, self._kernel
        if kind == "state":
            gather = kernel("gather_state_indices", layout.dtype)
            launch_gather_state_indices(gather, tile, source, layout, memory, stream)
            return
        unit = COUNT_UNITS[kind]
        launch_count_entries(kernel("count_entries"), tile, source, out.width, unit, memory, stream)
        if kind in ("table", "kv_offsets"):
            launch_write_table(kernel("write_table", layout.dtype), tile, source, out.width, layout, memory, stream)
        elif kind in ("csr", "token_csr"):
            launch_start_requests(kernel("start_requests"), tile, source, unit, out.capacity, memory, stream)
            launch_write_indices(kernel("write_indices"), tile, source, unit, out.capacity, memory, stream)
        elif kind == "inverse_map":
            sizes = out.width, out.num_kernel_blocks
            launch_clear_inverse_map(kernel("clear_inverse_map"), tile, source, *sizes, layout.null, memory, stream)
            launch_write_inverse_map(kernel("write_inverse_map"), tile, source, *sizes, memory, stream)

    def _kernel(self, name: str, entry_dtype: str = "int32") -> Kernel:
        key = name, entry_dtype
        if key not in self._kernels:
            self._kernels[key] = self._store.device.kernel(name, entry_dtype)
        return self._kernels[key]

    def _memory(self, out: ExportBuffers) -> Memory:
        if out not in self._memories:
            with self._store.device.current():  # Numba makes a view only where a GPU is current
                self._memories[out] = Memory(*(self._address(getattr(out, name)) for name in Memory._fields))
        return self._memories[out]

    def _address(self, array: Any) -> Pointer | None:
        return None if array is None else self._store.device.address(array.reshape(-1))


@_device_function
def length_of(groups, group, seq_lens, has_seq_lens, i, row):
    """Tokens of a batch row that this rank holds; none for a dummy."""
    length = np.int64(0)
    if has_seq_lens and row >= 0:
        length = max(np.int64(seq_lens[i]), 0)
    if groups[group + WORLD_SIZE] > 1:
        length = local_length(length, groups[group + WORLD_SIZE], groups[group + RANK], groups[group + INTERLEAVE_SIZE])
    return length


@_device_function
def first_column_of(groups, group, num_computed_tokens, has_num_computed_tokens, i, row):
    """Columns of a batch row that the window has left behind."""
    first = np.int64(0)
    sliding_window = groups[group + SLIDING_WINDOW]
    if has_num_computed_tokens and sliding_window and row >= 0:
        first = max(num_computed_tokens[i] - sliding_window + 1, 0)
        if groups[group + WORLD_SIZE] > 1:
            first = local_length(
                first, groups[group + WORLD_SIZE], groups[group + RANK], groups[group + INTERLEAVE_SIZE]
            )
        first = divide(first, groups[group + TOKENS_PER_COLUMN])
    return first


@_device_function
def filled_columns(groups, group, g, arena, max_num_reqs, row):
    """Columns that a row fills; none for a dummy."""
    filled = np.int64(0)
    if row >= 0:
        filled = min(groups[group + WIDTH], np.int64(arena[np.int64(g) * max_num_reqs + row]))
    return filled


@_device_function
def entry_of(arena, table_row, first_column, filled, column):
    """What column `column` of a row holds: NULL before the window, and behind what the row fills."""
    entry = np.int64(NULL_BLOCK_ID)
    if column >= first_column and column < filled:
        entry = np.int64(arena[table_row + column])
    return entry


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
    has_idx_mapping,  # 0: identity
    num_computed_tokens,  # [num_reqs] int32, batch index -> tokens
    has_num_computed_tokens,  # 0: no window is cut
    seq_lens,  # [num_reqs] int32, batch index -> tokens
    has_seq_lens,  # 0: not asked for
    num_reqs,
    max_num_reqs,
    groups,  # [num_groups, NUM_FIELDS] int64
    members,  # [num_members] int32, groups
    num_members,
    arena,  # [arena.size] int32
    width,  # columns that a row may export
    unit,  # COUNT_UNITS
    counts,  # [2 * max_num_reqs + 2] int32, written
    lengths,  # [max_num_reqs] int32, written
    has_lengths,  # 0: not wanted
):
    """Count what every batch row exports, and keep what it did before."""
    group = members[0] * NUM_FIELDS
    # step 1: which batch row
    i = cuda.grid(1)
    while i < max_num_reqs:
        row = row_of(idx_mapping, has_idx_mapping, i, num_reqs, max_num_reqs)
        # step 2: how many columns its row fills, in every group
        columns = np.int64(0)
        if row >= 0:
            columns = np.int64(width)
            m = 0
            while m < num_members:
                columns = min(columns, np.int64(arena[np.int64(members[m]) * max_num_reqs + row]))
                m = advance(m, 1)
        # step 3: how many tokens of it this rank holds
        length = length_of(groups, group, seq_lens, has_seq_lens, i, row)
        if has_lengths:
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


def launch_count_entries(
    kernel: Kernel, tile: int, source: Source, width: int, unit: int, memory: Memory, stream: Any
) -> None:
    """Launch count_entries."""
    arguments = (*source, _int32(width), unit, memory.counts, memory.lengths, int(memory.lengths is not None))
    kernel((_grid_x(source.max_num_reqs, tile), 1), (tile,), arguments, stream=stream)


@cuda.jit
def start_requests(
    idx_mapping,  # as count_entries, to arena
    has_idx_mapping,
    num_computed_tokens,
    has_num_computed_tokens,
    seq_lens,
    has_seq_lens,
    num_reqs,
    max_num_reqs,
    groups,
    members,
    num_members,
    arena,
    unit,  # COUNT_UNITS
    capacity,  # entries of a member's indices
    lengths,  # [max_num_reqs] int32
    counts,  # [2 * max_num_reqs + 2] int32, the last two written
    indptr,  # [max_num_reqs + 1] int32, written
    last_page_lens,  # [max_num_reqs] int32, written
):
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
            # step 4: remember how many entries there are
            counts[2 * max_num_reqs + 1] = counts[2 * max_num_reqs]
            counts[2 * max_num_reqs] = start
        i = advance(i, cuda.gridsize(1))


def launch_start_requests(
    kernel: Kernel, tile: int, source: Source, unit: int, capacity: int, memory: Memory, stream: Any
) -> None:
    """Launch start_requests."""
    outputs = memory.lengths, memory.counts, memory.indptr, memory.last_page_lens
    arguments = (*source, unit, _int32(capacity), *outputs)
    kernel((_grid_x(source.max_num_reqs + 1, tile), 1), (tile,), arguments, stream=stream)


@cuda.jit
def write_indices(
    idx_mapping,  # as count_entries, to arena
    has_idx_mapping,
    num_computed_tokens,
    has_num_computed_tokens,
    seq_lens,
    has_seq_lens,
    num_reqs,
    max_num_reqs,
    groups,
    members,
    num_members,
    arena,
    unit,  # COUNT_UNITS
    capacity,  # entries of a member's indices
    counts,  # [2 * max_num_reqs + 2] int32
    indptr,  # [max_num_reqs + 1] int32
    entries,  # [num_members, capacity] int32, written
):
    """Write the entries of all requests, one request after another, and NULL over those of a larger batch before."""
    total = counts[2 * max_num_reqs]
    end = min(capacity, max(total, counts[2 * max_num_reqs + 1]))
    # step 1: which entry and group
    m = cuda.blockIdx.y
    while m < num_members:
        g = members[m]
        group = g * NUM_FIELDS
        entry = cuda.grid(1)
        while entry < end:
            # step 2: NULL behind the last entry
            index = np.int64(NULL_BLOCK_ID)
            if entry < total:
                # step 3: which request and column
                i, high = 0, max_num_reqs
                while high - i > 1:
                    middle = i + ((high - i) >> 1)
                    if indptr[middle] <= entry:
                        i = middle
                    else:
                        high = middle
                row = row_of(idx_mapping, has_idx_mapping, i, num_reqs, max_num_reqs)
                place = np.int64(entry - indptr[i])
                tokens = np.int64(1)
                if unit == COUNT_TOKENS:
                    tokens = groups[group + TOKENS_PER_COLUMN]
                column = divide(place, tokens)
                first_column = first_column_of(groups, group, num_computed_tokens, has_num_computed_tokens, i, row)
                filled = filled_columns(groups, group, g, arena, max_num_reqs, row)
                table_row = groups[group + TABLE_START] + row * groups[group + WIDTH]
                index = entry_of(arena, table_row, first_column, filled, column)
                index = index * tokens + (place - column * tokens)
            # step 4: store the entry
            entries[np.int64(m) * capacity + entry] = index
            entry = advance(entry, cuda.gridsize(1))
        m = advance(m, cuda.gridDim.y)


def launch_write_indices(
    kernel: Kernel, tile: int, source: Source, unit: int, capacity: int, memory: Memory, stream: Any
) -> None:
    """Launch write_indices: over as many entries as there may be, since only the device knows how many there are."""
    arguments = (*source, unit, _int32(capacity), memory.counts, memory.indptr, memory.entries)
    blocks = min(_grid_x(max(capacity, 1), tile), MAX_BLOCKS)
    kernel((blocks, min(source.num_members, MAX_GRID_Y)), (tile,), arguments, stream=stream)


@cuda.jit
def write_table(
    idx_mapping,  # as count_entries, to arena
    has_idx_mapping,
    num_computed_tokens,
    has_num_computed_tokens,
    seq_lens,
    has_seq_lens,
    num_reqs,
    max_num_reqs,
    groups,
    members,
    num_members,
    arena,
    width,  # columns of a row of the table
    counts,  # [2 * max_num_reqs + 2] int32
    null,
    entry_scale,
    is_pair,  # whether a row of V offsets follows each row of K offsets
    value_offset,  # from a K offset to its V offset
    entries,  # [num_members, max_num_reqs, 1 + is_pair, width] of the layout's dtype, written
):
    """Write the columns in use of every batch row, and the layout's null behind them."""
    # step 1: which batch row and group
    m = cuda.blockIdx.y
    while m < num_members:
        g = members[m]
        group = g * NUM_FIELDS
        i = cuda.blockIdx.x
        while i < max_num_reqs:
            count = min(width, counts[i])
            before = min(width, counts[max_num_reqs + i])
            start = (np.int64(m) * max_num_reqs + i) * (1 + is_pair) * width
            # step 2: null over what an earlier batch left behind its columns
            column = count + cuda.threadIdx.x
            while column < before:
                entries[start + column] = null
                if is_pair:
                    entries[start + width + column] = null
                column = advance(column, cuda.blockDim.x)
            # step 3: how many of them the window has left behind
            row = row_of(idx_mapping, has_idx_mapping, i, num_reqs, max_num_reqs)
            first_column = first_column_of(groups, group, num_computed_tokens, has_num_computed_tokens, i, row)
            filled = filled_columns(groups, group, g, arena, max_num_reqs, row)
            table_row = groups[group + TABLE_START] + row * groups[group + WIDTH]
            first_id = groups[group + BLOCKS_PER_KV_BLOCK] if null != NULL_BLOCK_ID else np.int64(0)
            # step 4: store the columns in use
            column = cuda.threadIdx.x
            while column < count:
                block_id = entry_of(arena, table_row, first_column, filled, column)
                entry = null if block_id < first_id else block_id * entry_scale
                entries[start + column] = entry
                if is_pair:
                    entries[start + width + column] = entry + value_offset
                column = advance(column, cuda.blockDim.x)
            i = advance(i, cuda.gridDim.x)
        m = advance(m, cuda.gridDim.y)


def launch_write_table(
    kernel: Kernel, tile: int, source: Source, width: int, layout: Layout, memory: Memory, stream: Any
) -> None:
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
    kernel((source.max_num_reqs, min(source.num_members, MAX_GRID_Y)), (tile,), arguments, stream=stream)


@cuda.jit
def clear_inverse_map(
    idx_mapping,  # as count_entries, to arena
    has_idx_mapping,
    num_computed_tokens,
    has_num_computed_tokens,
    seq_lens,
    has_seq_lens,
    num_reqs,
    max_num_reqs,
    groups,
    members,
    num_members,
    arena,
    width,  # columns that a row may export
    num_kernel_blocks,
    counts,  # [2 * max_num_reqs + 2] int32
    mapped,  # [num_members, max_num_reqs, width] int32, blocks that the call before mapped
    null,
    entries,  # [num_members, max_num_reqs, num_kernel_blocks] int32, written
):
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


def launch_clear_inverse_map(
    kernel: Kernel,
    tile: int,
    source: Source,
    width: int,
    num_kernel_blocks: int,
    null: int,
    memory: Memory,
    stream: Any,
) -> None:
    """Launch clear_inverse_map."""
    sizes = _int32(width), _int32(num_kernel_blocks)
    arguments = (*source, *sizes, memory.counts, memory.mapped, null, memory.entries)
    kernel((source.max_num_reqs, min(source.num_members, MAX_GRID_Y)), (tile,), arguments, stream=stream)


@cuda.jit
def write_inverse_map(
    idx_mapping,  # as count_entries, to arena
    has_idx_mapping,
    num_computed_tokens,
    has_num_computed_tokens,
    seq_lens,
    has_seq_lens,
    num_reqs,
    max_num_reqs,
    groups,
    members,
    num_members,
    arena,
    width,  # columns that a row may export
    num_kernel_blocks,
    counts,  # [2 * max_num_reqs + 2] int32
    mapped,  # [num_members, max_num_reqs, width] int32, written
    entries,  # [num_members, max_num_reqs, num_kernel_blocks] int32, written
):
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
            row = row_of(idx_mapping, has_idx_mapping, i, num_reqs, max_num_reqs)
            first_column = first_column_of(groups, group, num_computed_tokens, has_num_computed_tokens, i, row)
            filled = filled_columns(groups, group, g, arena, max_num_reqs, row)
            table_row = groups[group + TABLE_START] + row * groups[group + WIDTH]
            first_id = groups[group + BLOCKS_PER_KV_BLOCK]
            column = cuda.threadIdx.x
            while column < count:
                # step 3: remember its blocks
                block_id = entry_of(arena, table_row, first_column, filled, column)
                mapped[cell * width + column] = block_id
                # step 4: store the column of each block, the last one of a block that stands there twice
                if block_id >= first_id and block_id < num_kernel_blocks:
                    atomic_max(entries, cell * num_kernel_blocks + block_id, column)
                column = advance(column, cuda.blockDim.x)
            i = advance(i, cuda.gridDim.x)
        m = advance(m, cuda.gridDim.y)


def launch_write_inverse_map(
    kernel: Kernel, tile: int, source: Source, width: int, num_kernel_blocks: int, memory: Memory, stream: Any
) -> None:
    """Launch write_inverse_map."""
    sizes = _int32(width), _int32(num_kernel_blocks)
    arguments = (*source, *sizes, memory.counts, memory.mapped, memory.entries)
    kernel((source.max_num_reqs, min(source.num_members, MAX_GRID_Y)), (tile,), arguments, stream=stream)


@cuda.jit
def gather_state_indices(
    idx_mapping,  # as count_entries, to arena
    has_idx_mapping,
    num_computed_tokens,
    has_num_computed_tokens,
    seq_lens,
    has_seq_lens,
    num_reqs,
    max_num_reqs,
    groups,
    members,
    num_members,
    arena,
    columns,  # STATE_COLUMNS
    num_columns,
    null,
    entries,  # [num_members, max_num_reqs, num_columns] of the layout's dtype, written
):
    """Write the blocks that hold every batch row's states."""
    num_cells = np.int64(max_num_reqs) * num_columns
    # step 1: which batch row, group and place
    m = cuda.blockIdx.y
    while m < num_members:
        g = members[m]
        group = g * NUM_FIELDS
        cell = cuda.grid(1)
        while cell < num_cells:
            i = divide(cell, num_columns)
            row = row_of(idx_mapping, has_idx_mapping, i, num_reqs, max_num_reqs)
            # step 2: which column
            filled = filled_columns(groups, group, g, arena, max_num_reqs, row)
            first = np.int64(0)
            if columns == STATE_LAST:
                first = max(filled - num_columns, 0)
            if row >= 0 and columns == STATE_ALIGNED:
                first = divide(max(np.int64(seq_lens[i]) - 1, 0), groups[group + TOKENS_PER_COLUMN])
            column = first + (cell - i * num_columns)
            # step 3: store the block, or null where there is none
            table_row = groups[group + TABLE_START] + row * groups[group + WIDTH]
            block_id = entry_of(arena, table_row, 0, filled, column)
            entries[m * num_cells + cell] = null if block_id == NULL_BLOCK_ID else block_id
            cell = advance(cell, cuda.gridsize(1))
        m = advance(m, cuda.gridDim.y)


def launch_gather_state_indices(
    kernel: Kernel, tile: int, source: Source, layout: Layout, memory: Memory, stream: Any
) -> None:
    """Launch gather_state_indices."""
    columns = STATE_COLUMNS[layout.state_columns], _int32(layout.num_columns)
    arguments = (*source, *columns, layout.null, memory.entries)
    blocks = _grid_x(source.max_num_reqs * layout.num_columns, tile)
    kernel((blocks, min(source.num_members, MAX_GRID_Y)), (tile,), arguments, stream=stream)


_INT, _LONG = types.int32, types.int64
_INTS, _LONGS = types.CPointer(_INT), types.CPointer(_LONG)
_SOURCE = (_INTS, _INT, _INTS, _INT, _INTS, _INT, _INT, _INT, _LONGS, _INTS, _INT, _INTS)

EXPORT_KERNELS = {
    "count_entries": count_entries,
    "start_requests": start_requests,
    "write_indices": write_indices,
    "write_table": write_table,
    "clear_inverse_map": clear_inverse_map,
    "write_inverse_map": write_inverse_map,
    "gather_state_indices": gather_state_indices,
}
KERNELS.update(EXPORT_KERNELS)
SIGNATURES.update(
    count_entries=(*_SOURCE, _INT, _INT, _INTS, _INTS, _INT),
    start_requests=(*_SOURCE, _INT, _INT, _INTS, _INTS, _INTS, _INTS),
    write_indices=(*_SOURCE, _INT, _INT, _INTS, _INTS, _INTS),
    write_table=(*_SOURCE, _INT, _INTS, _LONG, _LONG, _INT, _LONG, _SLOTS),
    clear_inverse_map=(*_SOURCE, _INT, _INT, _INTS, _INTS, _INT, _INTS),
    write_inverse_map=(*_SOURCE, _INT, _INT, _INTS, _INTS, _INTS),
    gather_state_indices=(*_SOURCE, _INT, _INT, _LONG, _SLOTS),
)
