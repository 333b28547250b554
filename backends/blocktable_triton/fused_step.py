"""A whole step in two kernels, launched as one graph: the changes, then gather and slots together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blocktable import Batch, KernelArguments, KernelNode, StepGraph
from blocktable_triton.kernels import likely_tokens_per_req

HEADER = 5
"""Counts before packed changes: single values, ranges, range values, NULL ranges, their entries."""

MAX_COPY_PARTS = 16
MAX_WRITE_PROGRAMS = 128
MAX_GATHER_PARTS = 1 << 12
MAX_SLOT_PROGRAMS = 1 << 22

Launch = tuple[int, tuple[int, ...]]
"""Programs, and the kernel's arguments."""


NO_CHANGES = (0, 0, 0, 0, 0)


class HostRunner:
    """Runs the two kernels of the emulation, one after the other."""

    def __init__(self, kernels: tuple[Any, Any], fixed: tuple[int, ...], last_mark: int, *, overlaps: bool) -> None:
        self._apply, self._step = kernels
        self._fixed, self._last_mark = fixed, last_mark

    def run(self, programs: int, changes: int, counts: Sequence[int], mark: int, step: Launch, stream: Any) -> None:
        """Run apply_changes and step_batch."""
        self._apply((programs, 1, 1), (changes, *counts, *self._fixed, mark, self._last_mark), stream)
        self._step((step[0], 1, 1), step[1], stream)


class GraphRunner:
    """Launches the two kernels as one graph, whose nodes take new parameters where they have changed.

    Args:
        kernels: apply_changes and step_batch.
        fixed: what is between the first one's counts and its mark.
        last_mark: its last argument.
        overlaps: whether they are compiled for an overlap.
    """

    def __init__(self, kernels: tuple[Any, Any], fixed: tuple[int, ...], last_mark: int, *, overlaps: bool) -> None:
        self._kernels = kernels  # Triton unloads what nobody holds
        apply, self._step_arguments = (KernelArguments(kernel.layout) for kernel in kernels)
        apply.set(0, *NO_CHANGES, *fixed, 0, last_mark, *kernels[0].scratch)
        self._set_changes, self._set_mark = apply.setter(0, 1 + HEADER), apply.setter(1 + HEADER + len(fixed), 1)
        self._apply, self._step = (
            KernelNode(kernel.handle, arguments.addresses, kernel.num_threads, kernel.shared_bytes)
            for kernel, arguments in zip(kernels, (apply, self._step_arguments), strict=True)
        )
        self._graph = StepGraph((self._apply, self._step), overlaps=overlaps)
        self._programs, self._has_changes = 0, True
        self._present: Launch | None = None

    def run(self, programs: int, changes: int, counts: Sequence[int], mark: int, step: Launch, stream: Any) -> None:
        """Launch apply_changes and step_batch on a native stream."""
        if mark or self._has_changes:
            self._set_changes(changes, *counts)
            self._set_mark(mark)
            if programs != self._programs:
                self._apply.set_grid(programs)
                self._programs = programs
            self._graph.update(0)
            self._has_changes = mark != 0
        if step is not self._present:
            self._step_arguments.set(*step[1], *self._kernels[1].scratch)
            self._step.set_grid(step[0])
            self._graph.update(1)
            self._present = step
        self._graph.launch(stream.cuda_stream)


class FusedStep:
    """The fused step over one set of buffers.

    Args:
        store: the table's memory.
        batch, slots: addresses of the set.

    Attributes:
        batch: the last one that was run.
    """

    def __init__(self, store: Any, batch: int, slots: int) -> None:
        config = store.config
        self._num_groups, self._num_slots = len(config.groups), config.max_num_batched_tokens
        self._change_tile = store.tiles[0]
        self._is_long = store.is_long
        copy_parts = min(-(-config.max_num_reqs // self._change_tile), MAX_COPY_PARTS)
        arena = (store.arena_address, self._num_groups, config.max_num_reqs, config.arena.size, batch, copy_parts)
        self._copy_programs = self._num_groups * copy_parts
        self._last_mark, self._shown_mark = store.last_mark_address, store.shown_mark_address
        self._table = (store.groups_address, self._num_groups, store.arena_address)
        self._outputs = (config.arena.size, batch, slots, self._num_slots)
        parts = min(-(-self._num_slots // store.tiles[self._is_long]), MAX_SLOT_PROGRAMS // self._num_groups)
        self._slot_parts, self._rows = max(parts, 1), store.step_rows
        self._max_num_reqs = config.max_num_reqs
        self._address = store.device.address
        self._runner = store.device.step_runner(
            store.step_kernels, arena, self._last_mark, overlaps=store.device.can_overlap
        )
        self._step: Launch = (0, ())
        self.batch: Batch | None = None

    def run(self, batch: Batch, slot: Any, mark: int, stream: Any) -> None:
        """Launch the step over a batch of device arrays, on a native stream.

        Args:
            batch: its inputs.
            slot: staging memory that holds packed changes. None: there are none.
            mark: the step's number where there are changes.
            stream: to launch on.
        """
        if batch is not self.batch:
            self._set_batch(batch)
        if slot is None:
            self._runner.run(self._copy_programs, self._last_mark, NO_CHANGES, 0, self._step, stream)
            return
        counts = slot.header.tolist()
        most = max(counts[0], counts[2], counts[4])  # single values, range values, NULL entries
        programs = self._copy_programs + min(-(-most // self._change_tile), MAX_WRITE_PROGRAMS)
        self._runner.run(programs, slot.address + 4 * HEADER, counts, mark, self._step, stream)

    def _set_batch(self, batch: Batch) -> None:
        arrays = (batch.idx_mapping, batch.num_computed_tokens, batch.query_start_loc, batch.positions)
        addresses = [0 if array is None else self._address(array) for array in arrays]
        gather_parts = 0
        if batch.wants_tables:  # of no rows too: a larger batch may have come before
            gather_parts = min(max(-(-batch.num_reqs_padded // self._rows), 1), MAX_GATHER_PARTS)
        arguments = (
            *addresses,
            batch.num_reqs,
            batch.num_reqs_padded,
            batch.num_positions,
            self._max_num_reqs,
            likely_tokens_per_req(batch.num_positions, batch.num_reqs, self._is_long),
            *self._table,
            *self._outputs,
            gather_parts,
            self._slot_parts,
            self._last_mark,
            self._shown_mark,
        )
        self._step = (gather_parts + self._slot_parts) * self._num_groups + 1, arguments
        self.batch = batch
