"""The memory of one table on a device: a block store and a slot mapper in one, over a driver and its kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from blocktable.arrays import Array, IntArray
from blocktable.check_plan import empty_records
from blocktable.checks import array_spec
from blocktable.config import Arena, BlockTableConfig
from blocktable.device.driver import Driver, HostBlock
from blocktable.device.fused import FusedStep, PreparedStep
from blocktable.device.launches import ApplyMemory, Launches, run
from blocktable.device.ordering import StreamOrder, refuse_capture
from blocktable.device.signatures import INT32_MAX
from blocktable.device.staging import (
    StagingRing,
    StepMarks,
    inputs_of,
    is_host_array,
    place_inputs,
    staged_entries,
    staging_mode,
    steady_entries,
)
from blocktable.errors import BlockTableError
from blocktable.layouts import Layout
from blocktable.protocols import STEP_INPUTS, Batch, ExportBuffers, Part, StepBuffers, Writes

LARGEST_OFFSET = INT32_MAX
"""Packed changes count entries in int32: a commit of a larger arena is cut into pieces."""


@dataclass(frozen=True, eq=False)
class DeviceBuffers(StepBuffers):
    """Outputs, and what they are views of.

    Attributes:
        batch: [batch_arena.size + 2 + num_groups * max_num_reqs] int32. The batch tables and how many columns each row
            holds, laid out as `config.batch_arena`; then how many rows the last batch had, an entry that is free, and
            the fused step's copy of these counts.
        slots: [num_groups * max_num_batched_tokens] of the slot dtype.
        fused: the fused step over them. None: steps are separate launches.
    """

    batch: Array
    slots: Array
    fused: FusedStep | None


class DeviceStore:
    """One table on a device.

    Args:
        config: the geometry.
        driver: the device.
        has_fused_step: whether a step may be one graph.

    Attributes:
        findings: [(1 + MAX_RECORDS) * RECORD] int32. Records of what kernels have found (`check_plan`), in the host's
            memory; None: they check nothing.
    """

    def __init__(self, config: BlockTableConfig, driver: Driver, *, has_fused_step: bool) -> None:
        self.config = config
        self.driver = driver
        self._has_fused_step = has_fused_step
        self.arena: Array = driver.full(config.arena.size, 0, "int32")
        self._fill_parts(self.arena, config.arena, driver.stream(None))
        by_value, is_native = staging_mode() in ("auto", "params"), has_fused_step and not driver.is_emulated
        self._checker, self._records = None, None
        self.findings: IntArray | None = None
        checks: dict[str, int] = {}
        if config.check_plan is not None:
            self._checker = driver.full(config.check_regions.checker_size, 0, "int32")
            self._records = driver.host_block(empty_records().size)
            self.findings = self._records.host
            self.findings[:] = 0
            if self._records.copy is not None:
                driver.send(self._records, self.findings.size, driver.stream(None))
            checks = {"checker": driver.address(self._checker), "findings": self._records.address}
        self._launches = Launches(config, driver, self.arena, by_value=by_value, is_native=is_native, **checks)
        self._alone = self._launches.apply_memory()
        self._order = StreamOrder(driver)
        self._marks = StepMarks(driver.host_block(2)) if has_fused_step else None
        self._last_mark: Array = driver.full(1, 0, "int64")
        # What travels by value is copied as long as its kernel takes it, whatever is used of it.
        self._largest = largest = self._launches.most_by_value
        entries = max(steady_entries(config), largest)
        self._changes = StagingRing(driver, entries, config.steps_in_flight, self._order, self._marks)
        # A launch copies it, so that one block is enough; the host reads pinned memory more slowly.
        one = cycle([HostBlock(np.empty(largest, np.int32), 0)])
        self._lendable = one if largest else self._changes.blocks
        # gather and compute_slot_mappings take a block each.
        entries = 3 * config.max_num_reqs + 1 + 2 * config.max_num_batched_tokens
        num_blocks = 2 * config.steps_in_flight
        self._inputs = StagingRing(driver, entries, num_blocks, self._order, self._marks, is_copied=True)
        self._lent: tuple[HostBlock | None, int] = None, 0
        # A kernel may be loaded at its first launch, which must not be inside a capture.
        run([self._launches.no_changes(self._launches.apply_memory())], driver.stream(None))
        driver.synchronize()  # the fills ran on whatever stream was current

    def collect_findings(self) -> None:
        """Wait for the device; then `findings` holds all that it has found."""
        with self.driver.current():
            self.driver.synchronize()
            if self._records is not None and self._records.copy is not None:
                self._records.host[:] = self.driver.download(self._records.copy)

    def reset_checks(self, *, stream: int | None) -> None:
        """Forget who wrote what: the memory was lost (R24)."""
        if self._checker is not None:
            with self.driver.current():
                native, is_capturing = self._order.enter(stream)
                refuse_capture(is_capturing, "A commit after invalidate()")
                self.driver.fill(self._checker, 0, native)

    def table(self, group: int) -> Array:
        """Return a group's rows, or with -1 the filled counts, without a copy."""
        with self.driver.current():  # a library may make a view only where its device is current
            return self.config.arena.view(self.arena, group)

    # Outputs.

    def create_buffers(self) -> DeviceBuffers:
        """Return a new set of outputs, filled with NULL and PAD."""
        arena, driver, num_tokens = self.config.batch_arena, self.driver, self.config.max_num_batched_tokens
        pads = [group.pad_slot_id for group in self.config.groups]
        with driver.current():
            batch = driver.full(arena.size + 2 + arena.num_groups * arena.num_rows, 0, "int32")
            self._fill_parts(batch, arena, driver.stream(None))
            slots = driver.full(arena.num_groups * num_tokens, pads[0], self.config.slot_dtype)
            if len(set(pads)) > 1:
                self._fill_slots(slots, driver.stream(None))
            driver.synchronize()
            fused = None
            if self._has_fused_step and self._marks is not None:
                addresses = [driver.address(array) for array in (batch, slots, self._last_mark)]
                fused = FusedStep(self._launches, driver, addresses[0], addresses[1], addresses[2], self._marks)
            return DeviceBuffers(
                block_tables=tuple(arena.view(batch, group) for group in range(arena.num_groups)),
                slot_mappings=tuple(slots[g * num_tokens : (g + 1) * num_tokens] for g in range(arena.num_groups)),
                batch=batch,
                slots=slots,
                fused=fused,
            )

    def reset_buffers(self, out: StepBuffers, *, stream: int | None) -> None:
        """Fill a set with NULL and PAD again, trusting nothing it held (R24)."""
        assert isinstance(out, DeviceBuffers)
        with self.driver.current():
            native, is_capturing = self._order.enter(stream)
            refuse_capture(is_capturing, "A commit after invalidate()")
            self.driver.fill(out.batch, 0, native)
            self._fill_parts(out.batch, self.config.batch_arena, native)
            self._fill_slots(out.slots, native)

    def _fill_parts(self, array: Array, arena: Arena, stream: int) -> None:
        """Fill the parts of an array of zeros, laid out as `arena`, whose fillers are others."""
        for part, filler in arena.filled_parts:
            self.driver.fill(array[part], filler, stream)

    def _fill_slots(self, slots: Array, stream: int) -> None:
        pads = [group.pad_slot_id for group in self.config.groups]
        if len(set(pads)) == 1:
            self.driver.fill(slots, pads[0], stream)
            return
        num_tokens = self.config.max_num_batched_tokens
        for group, pad in enumerate(pads):
            self.driver.fill(slots[group * num_tokens : (group + 1) * num_tokens], pad, stream)

    # Changes.

    def lend(self, stream: int | None) -> IntArray:
        """Return [n] int32 of memory for packed changes, which the next `commit` or `step` on this stream sends.

        Waits where all of it is in use (R9.3).

        Raises:
            BlockTableError: the stream is capturing, or may not be changed.
        """
        native, is_capturing = self._order.enter(stream)
        if is_capturing:
            refuse_capture(is_capturing, "A commit")
        block = self._lent[0]
        if block is None or block.mark is not None:  # otherwise it was lent for a commit of nothing, or by value
            block = next(self._lendable)
            mark = block.mark
            # Most often the device is many steps further: a look at memory, and no call.
            if mark is not None and (self._marks is None or type(mark) is not int or self._marks.shown[0] < mark):
                self._changes.wait_for(block)
            block.mark = None
        self._lent = block, native
        return block.host

    def commit(self, used: int, *, stream: int | None) -> None:
        """Send the changes that were packed into what `lend` returned. used: their int32 entries; 0: there are none."""
        block, native = self._lent
        if used:
            assert block is not None
            with self.driver.current():
                self._apply(block, used, native)

    def write(self, writes: Writes, *, stream: int | None) -> None:
        """Send changes of any size; more than the ring holds may allocate and wait (R9.5)."""
        with self.driver.current():
            native, is_capturing = self._order.enter(stream)
            refuse_capture(is_capturing, "A commit")
            for first_entry, piece in writes.split_at(LARGEST_OFFSET):
                block = self._changes.acquire()
                used = piece.pack_changes(block.host)
                if used:
                    self._apply(block, used, native, self._launches.apply_memory(first_entry) if first_entry else None)
                else:
                    self._write_large(piece, first_entry, native)

    def put(self, values: IntArray, out: Array, *, stream: int | None) -> None:
        """Write a host array [n] int32 into one of the device's, as a commit of n entries that lie there (R44)."""
        writes = Writes(self.config.arena, np.zeros(1, np.int64), np.array([values.size], np.int32), values)
        with self.driver.current():
            native, is_capturing = self._order.enter(stream)
            refuse_capture(is_capturing, "Filling an array from the host")
            memory = self._launches.apply_memory(address=self.driver.address(out))
            block = self._changes.acquire()
            used = writes.pack_changes(block.host)
            if not used:  # more than a commit of one block for each row
                block = self.driver.host_block(writes.most_packed_entries)
                used = writes.pack_changes(block.host)
            self._apply(block, used, native, memory)
            if block.host.size > self._changes.entries and block.mark is not None:  # one of its own
                self.driver.wait(block.mark)

    def _write_large(self, writes: Writes, first_entry: int, stream: int) -> None:
        long_ranges, rest = writes.split_long()
        for start, values in long_ranges:  # most of a table, at start-up or wake-up: no scatter needed
            first = first_entry + start
            self.driver.copy_in(values, self.arena[first : first + values.size], stream)
        if rest.num_ranges:
            block = self.driver.host_block(max(rest.most_packed_entries, self._largest))
            memory = self._launches.apply_memory(first_entry) if first_entry else None
            self._apply(block, rest.pack_changes(block.host), stream, memory)
            if block.mark is not None:
                self.driver.wait(block.mark)

    def _apply(self, block: HostBlock, used: int, stream: int, memory: ApplyMemory | None = None) -> None:
        """Launch a commit alone, and mark the block. memory: what it writes. None: the arena."""
        memory = self._alone if memory is None else memory
        launch, mark = self._launches.apply_changes(block, used, memory)
        if mark is not None:
            self.driver.send(block, used, stream)
        run([launch], stream)
        block.mark = None if mark is None else self.driver.mark(stream)

    # Steps.

    def step(self, used: int, batch: Batch, out: StepBuffers, *, stream: int | None) -> None:
        """Do a whole step; inside a foreign capture by the plain kernels (R21).

        Args:
            used: int32 entries of the changes that were packed into what `lend` returned for this stream; 0: none.
            batch: the inputs.
            out: a set of outputs.
            stream: as `gather`.
        """
        arrays = [getattr(batch, name) for name in STEP_INPUTS]
        unknown = [None] * len(arrays)
        self.run_step(used, self.prepare_step(batch, out, unknown), unknown, arrays, stream=stream)

    def prepare_step(
        self, batch: Batch, out: StepBuffers, addresses: Sequence[int | None], part: Part = "step"
    ) -> PreparedStep:
        """Return what the steps of one form have in common; `addresses` in the order of `STEP_INPUTS`, where known."""
        assert isinstance(out, DeviceBuffers)
        assert out.fused is not None
        with self.driver.current():
            prepared = out.fused.prepare(batch, part)
        is_emulated = self.driver.is_emulated
        # Positions come first in a block: their entries have 8 bytes.
        arrays = (
            (3, batch.positions),
            (0, batch.idx_mapping),
            (1, batch.num_computed_tokens),
            (2, batch.query_start_loc),
        )
        for place, array in arrays:
            if array is None or (addresses[place] is not None and not is_emulated):
                continue
            if is_host_array(array):
                first = prepared.num_staged
                prepared.num_staged += array.nbytes // 4
                prepared.staged = *prepared.staged, (place, first, prepared.num_staged)
            else:
                self.driver.address(array)  # refuses what no kernel can reach
                prepared.asked = *prepared.asked, place
        return prepared

    def run_step(
        self,
        used: int,
        prepared: PreparedStep,
        addresses: Sequence[int | None],
        arrays: Sequence[Array | None],
        *,
        stream: int | None,
    ) -> None:
        """Do a step as `step` does.

        Args:
            used: as `step`.
            prepared: what `prepare_step` returned.
            addresses: of this step's inputs, where known.
            arrays: the inputs, in the order of `STEP_INPUTS`.
            stream: as `step`.
        """
        if not self.driver.is_current():
            with self.driver.current():
                self.run_step(used, prepared, addresses, arrays, stream=stream)
            return
        block, native = self._lent if used else (None, 0)
        if block is None:
            native, is_capturing = self._order.enter(stream)
            if is_capturing:
                self._plain_step(prepared, arrays, native)
                return
        staged = None
        if prepared.asked or prepared.staged:
            addresses, staged = self._place_step(prepared, addresses, arrays, native)
        if addresses != prepared.addresses:
            prepared.bind(addresses)
        mark = prepared.fused.run(prepared, block, used, native)
        if staged is not None:
            self._release(staged, native, mark)

    def _plain_step(self, prepared: PreparedStep, arrays: Sequence[Array | None], stream: int) -> None:
        given = {name: array for name, array in zip(STEP_INPUTS, arrays, strict=True) if array is not None}
        addresses, _ = self._place(given, stream, is_capturing=True)
        run(prepared.plain_launches(addresses), stream)

    def _place_step(
        self, prepared: PreparedStep, addresses: Sequence[int | None], arrays: Sequence[Array | None], stream: int
    ) -> tuple[Sequence[int | None], HostBlock | None]:
        """Return the addresses of all inputs of a step; host arrays are staged, in the block that is returned."""
        found, block = [*addresses], None
        for place in prepared.asked:
            found[place] = self.driver.address(arrays[place])
        if prepared.staged:
            block = self._staging_block(prepared.num_staged)
            for place, first, last in prepared.staged:
                array: Any = arrays[place]
                block.host[first:last] = array.view(np.int32)
                found[place] = block.address + 4 * first
            self.driver.send(block, prepared.num_staged, stream)
        return tuple(found), block

    def gather(self, batch: Batch, out: StepBuffers, *, stream: int | None) -> None:
        """Write the batch view of every group (R10, R11)."""
        assert isinstance(out, DeviceBuffers)
        with self.driver.current():
            native, is_capturing = self._order.enter(stream)
            addresses, staged = self._place(inputs_of(batch), native, is_capturing=is_capturing)
            inputs = self._launches.inputs(addresses)
            run(self._launches.gather(inputs, batch, self.driver.address(out.batch)), native)
            self._release(staged, native)

    def compute_slot_mappings(
        self, batch: Batch, out: Sequence[Array], *, stream: int | None, groups: Sequence[int] | None = None
    ) -> None:
        """Write the slot of every token for every group, or those that are named.

        In one launch where the groups follow one another and their arrays lie equally far apart.
        """
        driver, is_named = self.driver, groups is not None
        chosen = self._launches.all_groups if groups is None else groups
        starts = [driver.address(slots) for slots in out]
        lengths = [length_of(slots) for slots in out]
        distance = starts[1] - starts[0] if len(out) > 1 else 0
        stride, rest = divmod(distance, np.dtype(self.config.slot_dtype).itemsize)
        is_regular = rest == 0 and all(
            group == chosen[0] + i and start == starts[0] + i * distance and length == lengths[0]
            for i, (group, start, length) in enumerate(zip(chosen, starts, lengths, strict=True))
        )
        if is_regular:
            runs = [(range(chosen[0], chosen[0] + len(chosen)), starts[0], stride, lengths[0])]
        else:
            each = zip(chosen, starts, lengths, strict=True)
            runs = [(range(group, group + 1), start, 0, length) for group, start, length in each]
        with driver.current():
            native, is_capturing = self._order.enter(stream)
            addresses, staged = self._place(inputs_of(batch), native, is_capturing=is_capturing)
            inputs = self._launches.inputs(addresses)
            if not is_named or any(self.config.groups[group].slot_mode in ("linear", "ring") for group in chosen):
                run(self._launches.check_requests(inputs, batch), native)
            for numbers, *slots in runs:
                run(self._launches.map_slots(inputs, batch, *slots, groups=numbers, is_named=is_named), native)
            self._release(staged, native)

    # Exports.

    def export(self, layout: Layout, batch: Batch, out: ExportBuffers, *, stream: int | None) -> None:
        """Write a batch in a layout (R25-R31)."""
        with self.driver.current():
            native, is_capturing = self._order.enter(stream)
            addresses, staged = self._place(inputs_of(batch), native, is_capturing=is_capturing)
            run(self._launches.export(layout, addresses, batch, out), native)
            self._release(staged, native)

    def map_positions(self, rows: Array, group: int, positions: Array, out: Array, *, stream: int | None) -> None:
        """Write the slot of each position of each token's row (R36).

        Raises:
            BlockTableError: the stream is capturing, and the kernel has never been launched.
        """
        spec = array_spec("out", out)
        with self.driver.current():
            native, is_capturing = self._order.enter(stream)
            if is_capturing and not self._launches.is_made("map_positions", spec.dtype):
                raise BlockTableError(
                    f"The first map_positions() into {spec.dtype} cannot be captured: it loads a kernel. Call it once "
                    "before the capture."
                )
            named = {"rows": rows, "positions": positions, "out": out}
            addresses, staged = self._place(named, native, is_capturing=is_capturing)
            run([self._launches.map_positions(addresses, group, spec.shape, spec.dtype)], native)
            self._release(staged, native)

    def reset_export(self, out: ExportBuffers, *, stream: int | None) -> None:
        """Fill the entries of each group with its `fills`, and all else but the members with 0 (R24)."""
        with self.driver.current():
            native, is_capturing = self._order.enter(stream)
            refuse_capture(is_capturing, "A commit after invalidate()")
            if out.entries is not None and len(set(out.fills)) == 1:
                self.driver.fill(out.entries, out.fills[0], native)
            elif out.entries is not None:
                for entries, value in enumerate(out.fills):
                    self.driver.fill(out.entries[entries : entries + 1], value, native)
            for array in (out.counts, out.indptr, out.last_page_lens, out.lengths, out.mapped, out.num_cut):
                if array is not None:
                    self.driver.fill(array, 0, native)

    # Inputs.

    def _place(
        self, arrays: Mapping[str, Array], stream: int, *, is_capturing: bool
    ) -> tuple[dict[str, int], HostBlock | None]:
        """Return arrays as addresses; host arrays are staged, in the block that is returned."""
        if not any(map(is_host_array, arrays.values())):
            return place_inputs(arrays, self.driver, None)[0], None
        refuse_capture(is_capturing, "A step over host arrays")
        block = self._staging_block(staged_entries(arrays))
        addresses, used = place_inputs(arrays, self.driver, block)
        self.driver.send(block, used, stream)
        return addresses, block

    def _staging_block(self, entries: int) -> HostBlock:
        """Return a block for host arrays."""
        # More than the table's own buffers hold is possible with longer `out=` arrays: it may allocate and wait.
        return self._inputs.acquire() if entries <= self._inputs.entries else self.driver.host_block(entries)

    def _release(self, staged: HostBlock | None, stream: int, mark: int | None = None) -> None:
        """Say that everything that reads staged arrays is launched. mark: number of the step that does; None: none."""
        if staged is not None:
            staged.mark = self.driver.mark(stream) if mark is None else mark
            if staged.host.size > self._inputs.entries:  # one of its own: it must live until then
                self._inputs.wait_for(staged)


def length_of(array: Array) -> int:
    """Return the entries of an array; one of another library may say its shape by its interface alone."""
    shape = getattr(array, "shape", None)
    return int((array.__cuda_array_interface__["shape"] if shape is None else shape)[0])
