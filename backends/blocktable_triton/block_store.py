"""The memory of one table on a GPU: arena, staging, batch tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl

from blocktable import (
    NULL_BLOCK_ID,
    PAD_SLOT_ID,
    Batch,
    BlockTableConfig,
    BlockTableError,
    ExportBuffers,
    Layout,
    StagingRing,
    StepBuffers,
    StepMarks,
    Writes,
    pack_writes,
    staged_entries,
    steady_entries,
)
from blocktable_triton.device import StagingSlot, refuse_capture
from blocktable_triton.exports import Exporter
from blocktable_triton.fused_step import HEADER, FusedStep
from blocktable_triton.kernels import (
    EMULATED_TILE,
    LONG_TILE,
    MAX_INT32,
    OVERLAPS,
    TILE,
    apply_changes,
    gather_block_tables,
    gather_features,
    group_fields,
    is_long_launch,
    launch_gather_block_tables,
    launch_null_stale_columns,
    launch_scatter_writes,
    needed_features,
    null_stale_columns,
    num_warps,
    scatter_writes,
    step_batch,
)

ROW_TILE = 1024  # rows are long, and a row's lanes that have no column cost next to nothing
STEP_ROWS, STEP_ROW_TILE = 4, 256  # what a program of the fused step gathers at once


@dataclass(frozen=True, eq=False)
class TritonBuffers(StepBuffers):
    """Outputs, and what they are views of.

    Attributes:
        batch: [arena.size + 2 + num_groups * max_num_reqs] int32. The batch tables and how many columns each row holds,
            laid out as the arena; then how many rows the last batch had, and the fused step's copy of these counts.
        slots: [num_groups * max_num_batched_tokens] of the slot dtype.
        fused: the fused step over them; None where steps are separate launches.
    """

    batch: Any
    slots: Any
    fused: FusedStep | None


class Inputs(NamedTuple):
    """One call's inputs as addresses, 0 where there is none, and the native stream to launch on."""

    stream: Any
    positions: int
    idx_mapping: int
    query_start_loc: int
    num_computed_tokens: int
    seq_lens: int


INPUTS = Inputs._fields[1:]  # positions first: it is the one of 8-byte entries


class TritonBlockStore:
    """Arena, staging and gather of one table."""

    def __init__(self, config: BlockTableConfig, device: Any, *, emulated: bool, has_fused_step: bool = False) -> None:
        self.config = config
        self.device = device
        self.tiles = (EMULATED_TILE, 2 * EMULATED_TILE) if emulated else (TILE, LONG_TILE)
        self.tile, self.row_tile = (EMULATED_TILE, EMULATED_TILE) if emulated else (TILE, ROW_TILE)
        self.features = needed_features(config)
        self.is_long = is_long_launch(config.max_num_batched_tokens * len(config.groups), self.tiles)
        self.arena = device.full(config.arena.size, NULL_BLOCK_ID, "int32")
        self.groups = device.upload(group_fields(config))
        self.arena_address, self.groups_address = device.address(self.arena), device.address(self.groups)
        self._scatter = device.kernel(scatter_writes, self.tile)
        self._null_stale = device.kernel(null_stale_columns, self.row_tile)
        self._gather = device.kernel(gather_block_tables, gather_features(self.features), self.row_tile)
        self.step_kernels = self._step_kernels(emulated) if has_fused_step else None
        self._steady_entries = steady_entries(config)
        self._inputs_entries = 3 * config.max_num_reqs + 1 + 2 * config.max_num_batched_tokens
        self._writes_ring = self._staging_ring(config.steps_in_flight, self._steady_entries + HEADER)
        # Compact changes count entries in int32, and are read where the host wrote them.
        self._takes_changes = device.is_mapped and config.arena.size <= MAX_INT32
        shown = device.staging_slot(2)
        shown.host[:] = 0
        self._marks = StepMarks(shown.host.view(np.int64))
        self._last_mark = device.full(1, 0, "int64")
        self.last_mark_address, self.shown_mark_address = device.address(self._last_mark), shown.address
        self._shown = shown  # owns the memory
        self.mapper: Any = None  # the slot mapper over this store, once it is made
        self._exporter = Exporter(self)
        # For host arrays; gather and compute_slot_mappings take a slot each.
        self._inputs_ring = self._staging_ring(2 * config.steps_in_flight, self._inputs_entries)
        self._last_stream: Any = None
        self._captured_stream: Any = None
        device.synchronize()  # the fills ran on whatever stream was current

    def _step_kernels(self, emulated: bool) -> tuple[Any, Any] | None:
        """Return apply_changes and step_batch; None where they cannot be launched as a graph."""
        config = self.config
        self.step_rows = 2 if emulated else STEP_ROWS
        slot_type, row_tile = getattr(tl, config.slot_dtype), EMULATED_TILE if emulated else STEP_ROW_TILE
        overlaps = int(OVERLAPS.value) if self.device.can_overlap else 0
        kernels = (
            self.device.kernel(apply_changes, overlaps, self.tiles[0]),
            self.device.kernel(
                *(step_batch, slot_type, self.features | overlaps, self.is_long, self.tiles[self.is_long]),
                *(self.step_rows, row_tile),
                num_warps=num_warps(self.is_long),
            ),
        )
        return None if any(kernel.graph_problem for kernel in kernels) else kernels

    def enter(self, handle: int | None) -> tuple[Any, bool]:
        """Return the stream to work on, ordered behind this table's last call, and whether it is capturing (R22)."""
        device = self.device
        stream = device.stream(handle)
        is_capturing = device.is_capturing(stream)
        if self._captured_stream is not None and self._captured_stream is not stream:
            self._refuse_change(self._captured_stream)
            self._captured_stream = None  # that capture has ended
        if is_capturing:
            self._captured_stream = stream
        elif stream is not self._last_stream:
            if self._last_stream is not None:
                self._refuse_change(self._last_stream)  # a mark on it would draw the other stream into its capture
                device.order(self._last_stream, stream)
            self._last_stream = stream
        return stream, is_capturing

    def _refuse_change(self, other: Any) -> None:
        if self.device.is_capturing(other):
            raise BlockTableError("A table's calls cannot change stream inside a capture; use one stream for them.")

    def write(self, writes: Writes, *, stream: int | None) -> None:
        with self.device.current():
            native, capturing = self.enter(stream)
            refuse_capture(capturing, "commit()")
            num_ranges, num_values = writes.offsets.size, writes.values.size
            if num_values == 0:  # from warmup(): CUDA may load a kernel no earlier than at its first launch
                self._scatter((1, 1, 1), (0, 0, 0, 0, 0, self.arena_address), native)
                return
            entries = staged_entries(num_ranges, num_values)
            if entries <= self._steady_entries:
                slot = self._writes_ring.acquire()
                pack_writes(writes, slot.host)
                self.device.send(slot, entries, native)
                self._launch_scatter(slot.address, num_ranges, num_values, native)
                self._writes_ring.release(self.device.mark(native))
            else:
                self._write_large(writes, native)

    def _write_large(self, writes: Writes, stream: Any) -> None:
        """Send what the ring has no room for: it may allocate and wait (R9)."""
        long_ranges, rest = writes.split_long()
        for start, values in long_ranges:  # most of a table, at start-up or wake-up: no scatter needed
            self.device.copy_in(values, self.arena[start : start + values.size], stream)
        if rest.num_ranges == 0:
            return
        packed = np.empty(staged_entries(rest.num_ranges, rest.values.size), np.int32)
        pack_writes(rest, packed)
        staged = self.device.full(packed.size, 0, "int32")
        self.device.synchronize()
        self.device.copy_in(packed, staged, stream)
        self._launch_scatter(self.device.address(staged), rest.num_ranges, rest.values.size, stream)
        self.device.wait(self.device.mark(stream))

    def _launch_scatter(self, staged: int, num_ranges: int, num_values: int, stream: Any) -> None:
        launch_scatter_writes(self._scatter, self.tile, staged, num_ranges, num_values, self.arena_address, stream)

    def _wait(self, mark: Any) -> None:
        """Wait for a fused step's number, or for what the device made as a mark."""
        if isinstance(mark, int):
            self._marks.wait(mark, lambda: self.device.check(self._last_stream))
        else:
            self.device.wait(mark)

    def table(self, group: int) -> Any:
        return self.config.arena.view(self.arena, group)

    def create_buffers(self) -> TritonBuffers:
        arena, device = self.config.arena, self.device
        batch = device.full(arena.size + 2 + arena.num_groups * arena.num_rows, NULL_BLOCK_ID, "int32")
        num_tokens = self.config.max_num_batched_tokens
        slots = device.full(arena.num_groups * num_tokens, PAD_SLOT_ID, self.config.slot_dtype)
        device.synchronize()
        with device.current():
            fused = FusedStep(self, device.address(batch), device.address(slots)) if self.step_kernels else None
        return TritonBuffers(
            block_tables=tuple(arena.view(batch, group) for group in range(arena.num_groups)),
            slot_mappings=tuple(slots[g * num_tokens : (g + 1) * num_tokens] for g in range(arena.num_groups)),
            batch=batch,
            slots=slots,
            fused=fused,
        )

    def reset_buffers(self, out: StepBuffers, *, stream: int | None) -> None:
        assert isinstance(out, TritonBuffers)
        with self.device.current():
            native, capturing = self.enter(stream)
            refuse_capture(capturing, "A commit after invalidate()")
            self.device.fill(out.batch, NULL_BLOCK_ID, native)
            self.device.fill(out.slots, PAD_SLOT_ID, native)

    def gather(self, batch: Batch, out: StepBuffers, *, stream: int | None) -> None:
        assert isinstance(out, TritonBuffers)
        with self.device.current(), self.inputs(batch, stream) as inputs:
            sizes = (batch.num_reqs, batch.num_reqs_padded, self.config.max_num_reqs)
            tail = (
                self.groups_address,
                len(self.config.groups),
                self.arena_address,
                self.config.arena.size,
                self.device.address(out.batch),
                inputs.stream,
            )
            launch_null_stale_columns(self._null_stale, self.row_tile, inputs.idx_mapping, *sizes, *tail)
            launch_gather_block_tables(
                self._gather, self.row_tile, inputs.idx_mapping, inputs.num_computed_tokens, *sizes, *tail
            )

    def export(self, layout: Layout, batch: Batch, out: ExportBuffers, *, stream: int | None) -> None:
        self._exporter.export(layout, batch, out, stream=stream)

    def reset_export(self, out: ExportBuffers, *, stream: int | None) -> None:
        with self.device.current():
            native, capturing = self.enter(stream)
            refuse_capture(capturing, "A commit after invalidate()")
            self._exporter.reset(out, native)

    def step(self, writes: Writes, batch: Batch, out: StepBuffers, *, stream: int | None) -> None:
        """Do a whole step; inside a foreign capture by the plain kernels (R21)."""
        if self.device.is_current():
            self._step(writes, batch, out, stream)
            return
        with self.device.current():
            self._step(writes, batch, out, stream)

    def _step(self, writes: Writes, batch: Batch, out: StepBuffers, stream: int | None) -> None:
        assert isinstance(out, TritonBuffers)
        fused = out.fused
        native, capturing = self.enter(stream)
        if capturing:
            refuse_capture(writes.num_ranges > 0, "A step with pending changes")
            self._plain_step(batch, out, stream)
        elif fused is None or (batch is not fused.batch and self._has_host_arrays(batch)):
            if writes.num_ranges:
                self.write(writes, stream=stream)
            self._plain_step(batch, out, stream)
        else:
            slot = self._pack(writes)
            if slot is None:
                if writes.num_ranges:
                    self.write(writes, stream=stream)
                fused.run(batch, None, 0, native)
            else:
                mark = self._marks.next()
                fused.run(batch, slot, mark, native)
                self._writes_ring.release(mark)

    def _pack(self, writes: Writes) -> StagingSlot | None:
        """Put a commit's changes into a slot; None where there are none, or they must travel the plain way."""
        if writes.num_ranges == 0 or not self._takes_changes:
            return None
        slot: StagingSlot = self._writes_ring.acquire()
        return slot if writes.pack_changes(slot.host) else None

    def _has_host_arrays(self, batch: Batch) -> bool:
        return any(isinstance(getattr(batch, name), np.ndarray) for name in INPUTS)

    def _plain_step(self, batch: Batch, out: StepBuffers, stream: int | None) -> None:
        if batch.wants_tables:
            self.gather(batch, out, stream=stream)
        self.mapper.compute_slot_mappings(batch, out.slot_mappings, stream=stream)

    @contextmanager
    def inputs(self, batch: Batch, handle: int | None) -> Iterator[Inputs]:
        """Give a batch's arrays as addresses, host arrays staged; leave it once everything is launched."""
        device = self.device
        stream, capturing = self.enter(handle)
        addresses, host = dict.fromkeys(INPUTS, 0), {}
        for name in INPUTS:
            array = getattr(batch, name)
            if isinstance(array, np.ndarray):
                host[name] = array.view(np.int32)
            elif array is not None:
                addresses[name] = device.address(array)
        if not host:
            yield Inputs(stream, **addresses)
            return
        refuse_capture(capturing, "A step over host arrays")
        self._require_room(sum(entries.size for entries in host.values()))
        slot = self._inputs_ring.acquire()
        end = 0
        for name, entries in host.items():
            slot.host[end : end + entries.size] = entries
            addresses[name] = slot.address + 4 * end
            end += entries.size
        device.send(slot, end, stream)
        yield Inputs(stream, **addresses)
        self._inputs_ring.release(device.mark(stream))

    def _require_room(self, entries: int) -> None:
        """Make the ring of host arrays larger for more tokens than a batch has, which `out=` arrays allow: it waits."""
        if entries > self._inputs_entries:
            self.device.synchronize()  # kernels may still read the smaller one
            self._inputs_entries = entries
            self._inputs_ring = self._staging_ring(2 * self.config.steps_in_flight, entries)

    def _staging_ring(self, num_slots: int, entries: int) -> StagingRing[Any]:
        return StagingRing([self.device.staging_slot(entries) for _ in range(num_slots)], self._wait)
