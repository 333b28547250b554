"""Launchers of the seven kernels in exports.cu, and which of them make which export."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from blocktable import Batch, ExportBuffers, Layout
from blocktable_cupy.kernels import INT32_MAX, MAX_GRID_Y, _int32

COUNT_UNITS = {"table": 0, "kv_offsets": 0, "lengths": 0, "csr": 1, "inverse_map": 1, "token_csr": 2}
"""Layout kind -> what is an entry: a column, a kernel block that holds tokens, or a token."""
STATE_COLUMNS = {"first": 0, "last": 1, "aligned": 2}
MAX_BLOCKS = 2048
"""Of a launch over entries whose number only the device knows: enough to fill a large GPU."""

Kernel = Any  # called with (grid, block, args, stream=)


class Source(NamedTuple):
    """What every export kernel reads, in the order of its first parameters.

    Attributes:
        idx_mapping, num_computed_tokens, seq_lens: addresses; 0 where there is none.
        num_reqs, max_num_reqs: requests, and batch rows.
        groups, members: addresses of the geometry of all groups, and of the numbers of those that are exported.
        num_members: groups that are exported.
        arena: address.
    """

    idx_mapping: np.uint64
    num_computed_tokens: np.uint64
    seq_lens: np.uint64
    num_reqs: np.int32
    max_num_reqs: np.int32
    groups: np.uint64
    members: np.uint64
    num_members: np.int32
    arena: np.uint64


class Memory(NamedTuple):
    """One set of export buffers, as addresses; 0 where there is none."""

    members: np.uint64
    counts: np.uint64
    entries: np.uint64
    indptr: np.uint64
    last_page_lens: np.uint64
    lengths: np.uint64
    mapped: np.uint64


class Exporter:
    """The exports of one store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._kernels: dict[str, Kernel] = {}
        self._memories: WeakKeyDictionary[ExportBuffers, Memory] = WeakKeyDictionary()

    def export(self, layout: Layout, batch: Batch, out: ExportBuffers, *, stream: int | None) -> None:
        """Write a batch in a layout."""
        store, memory = self._store, self._memory(out)
        with store.device.current(), store.inputs(batch, stream) as inputs:
            source = Source(
                np.uint64(inputs.idx_mapping),
                np.uint64(inputs.num_computed_tokens),
                np.uint64(inputs.seq_lens),
                _int32(batch.num_reqs),
                _int32(store.config.max_num_reqs),
                np.uint64(store.groups_address),
                memory.members,
                _int32(len(out.groups)),
                np.uint64(store.arena_address),
            )
            self._launch(layout, source, out, memory, inputs.stream)

    def reset(self, out: ExportBuffers, stream: Any) -> None:
        """Fill the entries with the layout's null, and all else but the members with 0 (R24)."""
        for name in Memory._fields:
            array = getattr(out, name)
            if array is not None and name != "members":
                self._store.device.fill(array, out.layout.null if name == "entries" else 0, stream)

    def _launch(self, layout: Layout, source: Source, out: ExportBuffers, memory: Memory, stream: Any) -> None:
        kind, tile, kernel = layout.kind, self._store.tile, self._kernel
        if kind == "state":
            launch_gather_state_indices(kernel("gather_state_indices"), tile, source, layout, memory, stream)
            return
        unit = COUNT_UNITS[kind]
        launch_count_entries(kernel("count_entries"), tile, source, out.width, unit, memory, stream)
        if kind in ("table", "kv_offsets"):
            launch_write_table(kernel("write_table"), tile, source, out.width, layout, memory, stream)
        elif kind in ("csr", "token_csr"):
            launch_start_requests(kernel("start_requests"), tile, source, unit, out.capacity, memory, stream)
            launch_write_indices(kernel("write_indices"), tile, source, unit, out.capacity, memory, stream)
        elif kind == "inverse_map":
            sizes = out.width, out.num_kernel_blocks
            launch_clear_inverse_map(kernel("clear_inverse_map"), tile, source, *sizes, layout.null, memory, stream)
            launch_write_inverse_map(kernel("write_inverse_map"), tile, source, *sizes, memory, stream)

    def _kernel(self, name: str) -> Kernel:
        if name not in self._kernels:
            self._kernels[name] = self._store.device.export_kernel(name)
        return self._kernels[name]

    def _memory(self, out: ExportBuffers) -> Memory:
        if out not in self._memories:
            arrays = (getattr(out, name) for name in Memory._fields)
            address = self._store.device.address
            self._memories[out] = Memory(*(np.uint64(0 if array is None else address(array)) for array in arrays))
        return self._memories[out]


def launch_count_entries(
    kernel: Kernel, tile: int, source: Source, width: int, unit: int, memory: Memory, stream: Any
) -> None:
    """Launch count_entries."""
    arguments = (*source, _int32(width), _int32(unit), memory.counts, memory.lengths)
    kernel((_grid_x(int(source.max_num_reqs), tile), 1), (tile,), arguments, stream=stream)


def launch_start_requests(
    kernel: Kernel, tile: int, source: Source, unit: int, capacity: int, memory: Memory, stream: Any
) -> None:
    """Launch start_requests."""
    outputs = memory.lengths, memory.counts, memory.indptr, memory.last_page_lens
    arguments = (*source, _int32(unit), _int32(capacity), *outputs)
    kernel((_grid_x(int(source.max_num_reqs) + 1, tile), 1), (tile,), arguments, stream=stream)


def launch_write_indices(
    kernel: Kernel, tile: int, source: Source, unit: int, capacity: int, memory: Memory, stream: Any
) -> None:
    """Launch write_indices: over as many entries as there may be, since only the device knows how many there are."""
    arguments = (*source, _int32(unit), _int32(capacity), memory.counts, memory.indptr, memory.entries)
    blocks = min(_grid_x(capacity, tile), MAX_BLOCKS)
    kernel((blocks, _grid_y(source)), (tile,), arguments, stream=stream)


def launch_write_table(
    kernel: Kernel, tile: int, source: Source, width: int, layout: Layout, memory: Memory, stream: Any
) -> None:
    """Launch write_table."""
    arguments = (
        *source,
        _int32(width),
        memory.counts,
        np.int64(layout.null),
        np.int64(layout.entry_scale),
        np.int32(layout.kind == "kv_offsets"),
        np.int64(layout.value_offset),
        np.int32(layout.dtype == "int64"),
        memory.entries,
    )
    kernel((int(source.max_num_reqs), _grid_y(source)), (tile,), arguments, stream=stream)


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
    arguments = (*source, *sizes, memory.counts, memory.mapped, _int32(null), memory.entries)
    kernel((int(source.max_num_reqs), _grid_y(source)), (tile,), arguments, stream=stream)


def launch_write_inverse_map(
    kernel: Kernel, tile: int, source: Source, width: int, num_kernel_blocks: int, memory: Memory, stream: Any
) -> None:
    """Launch write_inverse_map."""
    sizes = _int32(width), _int32(num_kernel_blocks)
    arguments = (*source, *sizes, memory.counts, memory.mapped, memory.entries)
    kernel((int(source.max_num_reqs), _grid_y(source)), (tile,), arguments, stream=stream)


def launch_gather_state_indices(
    kernel: Kernel, tile: int, source: Source, layout: Layout, memory: Memory, stream: Any
) -> None:
    """Launch gather_state_indices."""
    arguments = (
        *source,
        _int32(STATE_COLUMNS[layout.state_columns]),
        _int32(layout.num_columns),
        np.int64(layout.null),
        np.int32(layout.dtype == "int64"),
        memory.entries,
    )
    blocks = _grid_x(int(source.max_num_reqs) * layout.num_columns, tile)
    kernel((blocks, _grid_y(source)), (tile,), arguments, stream=stream)


def _grid_x(entries: int, tile: int) -> int:
    return max(1, min(-(-entries // tile), INT32_MAX // tile))


def _grid_y(source: Source) -> int:
    return min(int(source.num_members), MAX_GRID_Y)
