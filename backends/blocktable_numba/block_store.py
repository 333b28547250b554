"""The memory of one table on a GPU: arena, staging, batch tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

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
from blocktable_numba.device import StagingSlot, refuse_capture
from blocktable_numba.exports import Exporter
from blocktable_numba.fused_step import HEADER, FusedStep
from blocktable_numba.kernels import (
    Pointer,
    launch_gather_block_tables,
    launch_null_stale_columns,
    launch_scatter_writes,
    needed_features,
)

INT32_LIMIT = 2**31


class SlotMappings(tuple[Any, ...]):
    """The slot mappings of one set, and the array that they are views of, one behind the other: `memory`."""

    memory: Any

    @classmethod
    def of(cls, memory: Any, num_groups: int, num_tokens: int) -> SlotMappings:
        views = cls(memory[group * num_tokens : (group + 1) * num_tokens] for group in range(num_groups))
        views.memory = memory
        return views


@dataclass(frozen=True, eq=False)
class NumbaBuffers(StepBuffers):
    """Outputs, and what they are views of.

    Attributes:
        batch: [arena.size + 2 + num_groups * max_num_reqs] int32. The batch tables and how many columns each row holds,
            laid out as the arena; then how many rows the last batch had, and the fused step's copy of these counts.
        fused: the fused step over them; None where steps are separate launches.
    """

    slot_mappings: SlotMappings
    batch: Any
    fused: FusedStep | None


class Inputs(NamedTuple):
    """One call's inputs as addresses, None where there is none, and the native stream to launch on."""

    stream: Any
    positions: Pointer | None
    idx_mapping: Pointer | None
    query_start_loc: Pointer | None
    num_computed_tokens: Pointer | None
    seq_lens: Pointer | None


INPUTS = Inputs._fields[1:]  # positions first: it is the one of 8-byte entries


class NumbaBlockStore:
    """Arena, staging and gather of one table."""

    def __init__(self, config: BlockTableConfig, device: Any, *, has_fused_step: bool = True) -> None:
        self.config = config
        self.device = device
        self.arena = device.full(config.arena.size, NULL_BLOCK_ID, "int32")
        self.groups = device.upload(config.group_fields().reshape(-1))
        self.arena_address, self.groups_address = device.address(self.arena), device.address(self.groups)
        self.features = needed_features(config)
        self._scatter, self._null_stale, self._gather = (
            device.kernel(name, config.slot_dtype, self.features)
            for name in ("scatter_writes", "null_stale_columns", "gather_block_tables")
        )
        self._steady_entries = steady_entries(config)
        slots = [device.staging_slot(self._steady_entries + HEADER) for _ in range(config.steps_in_flight)]
        self._writes_ring: StagingRing[Any] = StagingRing(slots, self._wait)
        self.step_kernels = (
            tuple(device.kernel(name, config.slot_dtype, self.features) for name in ("apply_changes", "step_batch"))
            if has_fused_step
            else None
        )
        # Compact changes count entries in int32, and are read where the host wrote them.
        self._takes_changes = device.is_mapped and config.arena.size < INT32_LIMIT
        shown = device.staging_slot(2)
        shown.host[:] = 0
        self._marks = StepMarks(shown.host.view(np.int64))
        self._last_mark = device.full(1, 0, "int64")
        self.last_mark_address, self.shown_mark_address = device.address(self._last_mark), shown.address
        self._shown = shown  # owns the memory
        self.mapper: Any = None  # the slot mapper over this store, once it is made
        self._exporter = Exporter(self)
        self._input_entries = 3 * config.max_num_reqs + 1 + 2 * config.max_num_batched_tokens
        # gather and compute_slot_mappings take a slot each
        num_slots = 0 if device.takes_host_arrays else 2 * config.steps_in_flight
        slots = [device.staging_slot(self._input_entries) for _ in range(num_slots)]
        self._inputs_ring: StagingRing[Any] = StagingRing(slots, device.wait)
        self._is_loaded = False  # whether the scatter has been launched: CUDA loads a kernel at its first launch
        self._last_stream: Any = None
        self._captured_stream: Any = None
        device.synchronize()  # the fills ran on another stream

    def enter(self, handle: int | None) -> tuple[Any, bool]:
        """Return the stream to work on, ordered behind this table's last call, and whether it is capturing (R22)."""
        device = self.device
        stream = device.stream(handle)
        if device.is_capturing(stream):
            other = self._captured_stream
            if other is not None and other is not stream and device.is_capturing(other):
                raise BlockTableError("A table's calls cannot change stream inside a capture; use one stream for them.")
            self._captured_stream = stream
            return stream, True
        if stream is not self._last_stream:
            if self._last_stream is not None:
                if device.is_capturing(self._last_stream):  # the event would draw this stream into the capture
                    raise BlockTableError(
                        "A table's calls cannot change stream while the last one's is capturing; end the capture first."
                    )
                device.order(self._last_stream, stream)
            self._last_stream = stream
        return stream, False

    def write(self, writes: Writes, *, stream: int | None) -> None:
        with self.device.current():
            native, capturing = self.enter(stream)
            refuse_capture(capturing, "commit()")
            num_ranges, num_values = writes.num_ranges, writes.values.size
            if num_values == 0 and self._is_loaded:
                return
            if num_values > self._steady_entries:  # most of a table: long ranges need no scatter
                long_ranges, writes = writes.split_long()
                for start, values in long_ranges:
                    self.device.copy_in(values, self.arena[start : start + values.size], native)
                num_ranges, num_values = writes.num_ranges, writes.values.size
                if num_ranges == 0:
                    return
            entries = staged_entries(num_ranges, num_values)
            is_large = entries > self._steady_entries  # then it may allocate and wait (R9)
            slot = self.device.staging_slot(entries) if is_large else self._writes_ring.acquire()
            pack_writes(writes, slot.host)
            self.device.send(slot, entries, native)
            launch_scatter_writes(
                self._scatter, self.device.tile, slot.address, num_ranges, num_values, self.arena_address, native
            )
            self._is_loaded = True
            mark = self.device.mark(native)
            if is_large:
                self.device.wait(mark)
            else:
                self._writes_ring.release(mark)

    def _wait(self, mark: Any) -> None:
        """Wait for a fused step's number, or for what the device made as a mark."""
        if isinstance(mark, int):
            self._marks.wait(mark, lambda: self.device.check(self._last_stream))
        else:
            self.device.wait(mark)

    def table(self, group: int) -> Any:
        with self.device.current():  # Numba makes a view only where a GPU is current
            return self.config.arena.view(self.arena, group)

    def create_buffers(self) -> NumbaBuffers:
        arena, device, num_tokens = self.config.arena, self.device, self.config.max_num_batched_tokens
        with device.current():
            batch = device.full(arena.size + 2 + arena.num_groups * arena.num_rows, NULL_BLOCK_ID, "int32")
            slots = device.full(arena.num_groups * num_tokens, PAD_SLOT_ID, self.config.slot_dtype)
            device.synchronize()
            return NumbaBuffers(
                block_tables=tuple(arena.view(batch, group) for group in range(arena.num_groups)),
                slot_mappings=SlotMappings.of(slots, arena.num_groups, num_tokens),
                batch=batch,
                fused=FusedStep(self, device.address(batch), device.address(slots)) if self.step_kernels else None,
            )

    def reset_buffers(self, out: StepBuffers, *, stream: int | None) -> None:
        assert isinstance(out, NumbaBuffers)
        with self.device.current():
            native, capturing = self.enter(stream)
            refuse_capture(capturing, "A commit after invalidate()")
            self.device.fill(out.batch, NULL_BLOCK_ID, native)
            self.device.fill(out.slot_mappings.memory, PAD_SLOT_ID, native)

    def gather(self, batch: Batch, out: StepBuffers, *, stream: int | None) -> None:
        assert isinstance(out, NumbaBuffers)
        tile = self.device.tile
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
            launch_null_stale_columns(self._null_stale, tile, inputs.idx_mapping, *sizes, *tail)
            launch_gather_block_tables(
                self._gather, tile, inputs.idx_mapping, inputs.num_computed_tokens, *sizes, *tail
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
        assert isinstance(out, NumbaBuffers)
        fused = out.fused
        assert fused is not None
        native, capturing = self.enter(stream)
        if capturing:
            refuse_capture(writes.num_ranges > 0, "A step with pending changes")
            self._plain_step(batch, out, stream)
        elif batch is not fused.batch and self._has_host_arrays(batch):
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
        return not self.device.takes_host_arrays and any(
            isinstance(getattr(batch, name), np.ndarray) for name in INPUTS
        )

    def _plain_step(self, batch: Batch, out: StepBuffers, stream: int | None) -> None:
        if batch.wants_tables:
            self.gather(batch, out, stream=stream)
        self.mapper.compute_slot_mappings(batch, out.slot_mappings, stream=stream)

    @contextmanager
    def inputs(self, batch: Batch, handle: int | None) -> Iterator[Inputs]:
        """Give a batch's arrays as addresses, host arrays staged; leave it once everything is launched."""
        device = self.device
        stream, capturing = self.enter(handle)
        addresses: dict[str, Pointer | None] = dict.fromkeys(INPUTS)
        host: dict[str, np.ndarray[Any, Any]] = {}
        for name in INPUTS:
            array = getattr(batch, name)
            if isinstance(array, np.ndarray) and not device.takes_host_arrays:
                host[name] = array
            elif array is not None:
                addresses[name] = device.address(array)
        if not host:
            yield Inputs(stream, **addresses)
            return
        refuse_capture(capturing, "A step over host arrays")
        entries = np.concatenate([array.view(np.int32) for array in host.values()])
        is_large = entries.size > self._input_entries  # more positions than the table's own buffers hold
        slot = device.staging_slot(entries.size) if is_large else self._inputs_ring.acquire()
        slot.host[: entries.size] = entries
        device.send(slot, entries.size, stream)
        address = slot.address
        for name, array in host.items():
            addresses[name] = address
            address = address + array.nbytes
        yield Inputs(stream, **addresses)
        mark = device.mark(stream)
        if is_large:
            device.wait(mark)
        else:
            self._inputs_ring.release(mark)
