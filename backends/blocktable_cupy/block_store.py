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
    Writes,
    pack_writes,
    staged_entries,
    staging_mode,
    steady_entries,
)
from blocktable_cupy.device import refuse_capture
from blocktable_cupy.exports import Exporter
from blocktable_cupy.fused_step import APPLY_KERNELS, FusedStep
from blocktable_cupy.kernels import (
    EMULATED_TILE,
    TILE,
    launch_gather_block_tables,
    launch_null_stale_columns,
    launch_scatter_writes,
    module_options,
)


@dataclass(frozen=True, eq=False)
class CupyBuffers(StepBuffers):
    """Outputs, and what they are views of.

    Attributes:
        batch: [arena.size + 2 + num_groups * max_num_reqs] int32. The batch tables and how many columns each row holds,
            laid out as the arena; then how many rows the last batch had, and the fused step's copy of these counts.
        slots: [num_groups * max_num_batched_tokens] of the slot dtype.
        fused: the fused step over them.
    """

    batch: Any
    slots: Any
    fused: FusedStep


class Inputs(NamedTuple):
    """One call's inputs as addresses, 0 where there is none, and the native stream to launch on."""

    stream: Any
    positions: int
    idx_mapping: int
    query_start_loc: int
    num_computed_tokens: int
    seq_lens: int


INPUTS = Inputs._fields[1:]  # positions first: it is the one of 8-byte entries


class CupyBlockStore:
    """Arena, staging and gather of one table."""

    def __init__(self, config: BlockTableConfig, device: Any, *, emulated: bool) -> None:
        self.config = config
        self.device = device
        self.tile = EMULATED_TILE if emulated else TILE
        self.arena = device.full(config.arena.size, NULL_BLOCK_ID, "int32")
        self.groups = device.upload(config.group_fields())
        self.arena_address, self.groups_address = device.address(self.arena), device.address(self.groups)
        options = module_options(config)
        self._scatter, self._null_stale, self._gather = (
            device.kernel(name, options) for name in ("scatter_writes", "null_stale_columns", "gather_block_tables")
        )
        self._fused_kernels = {
            name: device.kernel(name, options)
            for name in (*(name for name, _ in APPLY_KERNELS), "step_batch", "step_batch_long")
        }
        self._steady_entries = steady_entries(config)
        slots = [device.staging_slot(self._steady_entries) for _ in range(config.steps_in_flight)]
        self._writes_ring: StagingRing[Any] = StagingRing(slots, device.wait)
        # Host arrays of a step: gather and compute_slot_mappings take a slot each.
        self._inputs_entries = 3 * config.max_num_reqs + 1 + 2 * config.max_num_batched_tokens
        inputs = [] if device.takes_host_arrays else range(2 * config.steps_in_flight)
        self._inputs_ring: StagingRing[Any] = StagingRing(
            [device.staging_slot(self._inputs_entries) for _ in inputs], device.wait
        )
        self._last_stream: Any = None
        self._captured_stream: Any = None
        nothing = np.empty(0, np.int64)
        self._no_writes = Writes(config.arena, nothing, nothing.astype(np.int32), nothing.astype(np.int32))
        self._takes_params = staging_mode() in ("auto", "params")
        self.mapper: Any = None  # the slot mapper over this store, once it is made
        self._exporter = Exporter(self)
        device.synchronize()  # the fills ran on whatever stream was current

    def enter(self, handle: int | None) -> tuple[Any, bool]:
        """Return the stream to work on, ordered behind this table's last call, and whether it is capturing (R22)."""
        device = self.device
        stream = device.stream(handle)
        other = self._captured_stream
        if other is not None and other is not stream and device.is_capturing(other):
            raise BlockTableError("A table's calls cannot change stream inside a capture; use one stream for them.")
        if device.is_capturing(stream):
            self._captured_stream = stream
            return stream, True
        self._captured_stream = None
        if stream is not self._last_stream:
            if self._last_stream is not None:
                device.order(self._last_stream, stream)
            self._last_stream = stream
        return stream, False

    def write(self, writes: Writes, *, stream: int | None) -> None:
        with self.device.current():
            native, capturing = self.enter(stream)
            refuse_capture(capturing, "commit()")
            num_ranges, num_values = writes.offsets.size, writes.values.size
            if num_values == 0:
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

    def table(self, group: int) -> Any:
        return self.config.arena.view(self.arena, group)

    def create_buffers(self) -> CupyBuffers:
        arena, device = self.config.arena, self.device
        batch = device.full(arena.size + 2 + arena.num_groups * arena.num_rows, NULL_BLOCK_ID, "int32")
        num_tokens = self.config.max_num_batched_tokens
        slots = device.full(arena.num_groups * num_tokens, PAD_SLOT_ID, self.config.slot_dtype)
        device.synchronize()
        addresses = (self.groups_address, self.arena_address, device.address(batch), device.address(slots))
        return CupyBuffers(
            block_tables=tuple(arena.view(batch, group) for group in range(arena.num_groups)),
            slot_mappings=tuple(slots[g * num_tokens : (g + 1) * num_tokens] for g in range(arena.num_groups)),
            batch=batch,
            slots=slots,
            fused=FusedStep(self.config, self._fused_kernels, device.step_runner, self.tile, device.address, addresses),
        )

    def reset_buffers(self, out: StepBuffers, *, stream: int | None) -> None:
        assert isinstance(out, CupyBuffers)
        with self.device.current():
            native, capturing = self.enter(stream)
            refuse_capture(capturing, "A commit after invalidate()")
            self.device.fill(out.batch, NULL_BLOCK_ID, native)
            self.device.fill(out.slots, PAD_SLOT_ID, native)

    def gather(self, batch: Batch, out: StepBuffers, *, stream: int | None) -> None:
        assert isinstance(out, CupyBuffers)
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
            launch_null_stale_columns(self._null_stale, self.tile, inputs.idx_mapping, *sizes, *tail)
            launch_gather_block_tables(
                self._gather, self.tile, inputs.idx_mapping, inputs.num_computed_tokens, *sizes, *tail
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
        assert isinstance(out, CupyBuffers)
        native, capturing = self.enter(stream)
        fused = out.fused
        if capturing:
            refuse_capture(writes.num_ranges > 0, "A step with pending changes")
            self._plain_step(batch, out, stream)
        elif batch is not fused.batch and self._has_host_arrays(batch):
            self.write(writes, stream=stream)
            self._plain_step(batch, out, stream)
        else:
            if not (self._takes_params and fused.pack(writes)):
                fused.pack(self._no_writes)
                self.write(writes, stream=stream)
            fused.run(batch, native)

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
        addresses, host = dict.fromkeys(INPUTS, 0), {}
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
        entries = sum(array.nbytes for array in host.values()) // 4
        is_large = entries > self._inputs_entries  # longer `out=` arrays than the table's own: it may allocate and wait
        slot = device.staging_slot(entries) if is_large else self._inputs_ring.acquire()
        end = 0
        for name, array in host.items():
            slot.host[end : end + array.nbytes // 4] = array.view(np.int32)
            addresses[name] = slot.address + 4 * end
            end += array.nbytes // 4
        device.send(slot, end, stream)
        yield Inputs(stream, **addresses)
        mark = device.mark(stream)
        if is_large:
            device.wait(mark)
        else:
            self._inputs_ring.release(mark)
