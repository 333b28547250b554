"""A whole step in two kernels, launched as one graph: the changes, then gather and slots together."""

from __future__ import annotations

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


class HostRunner:
    """Runs the two kernels of the emulation, one after the other."""

    def __init__(self, kernels: tuple[Any, Any], *, overlaps: bool) -> None:
        self._kernels = kernels

    def run(self, launches: tuple[Launch, Launch], stream: Any) -> None:
        """Run apply_changes and step_batch."""
        for kernel, (programs, arguments) in zip(self._kernels, launches, strict=True):
            kernel((programs, 1, 1), arguments, stream)


class GraphRunner:
    """Launches the two kernels as one graph, whose nodes take new parameters where they have changed.

    Args:
        kernels: apply_changes and step_batch.
        overlaps: whether they are compiled for an overlap.
    """

    def __init__(self, kernels: tuple[Any, Any], *, overlaps: bool) -> None:
        self._kernels = kernels  # Triton unloads what nobody holds
        self._arguments = [KernelArguments(kernel.layout) for kernel in kernels]
        self._nodes = [
            KernelNode(kernel.handle, arguments.addresses, kernel.num_threads, kernel.shared_bytes)
            for kernel, arguments in zip(kernels, self._arguments, strict=True)
        ]
        self._graph = StepGraph(self._nodes, overlaps=overlaps)
        self._present: list[Launch | None] = [None, None]

    def run(self, launches: tuple[Launch, Launch], stream: Any) -> None:
        """Launch apply_changes and step_batch on a native stream."""
        for index, launch in enumerate(launches):
            if launch is not self._present[index]:
                programs, arguments = launch
                self._arguments[index].set(*arguments, *self._kernels[index].scratch)
                self._nodes[index].set_grid(programs)
                self._graph.update(index)
            self._present[index] = launch
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
        self._arena = (store.arena_address, self._num_groups, config.max_num_reqs, config.arena.size, batch)
        self._copy_parts = min(-(-config.max_num_reqs // self._change_tile), MAX_COPY_PARTS)
        self._last_mark, self._shown_mark = store.last_mark_address, store.shown_mark_address
        self._nothing = self._apply(store.arena_address, (0, 0, 0, 0, 0), 0)
        self._table = (store.groups_address, self._num_groups, store.arena_address)
        self._outputs = (config.arena.size, batch, slots, self._num_slots)
        parts = min(-(-self._num_slots // store.tiles[self._is_long]), MAX_SLOT_PROGRAMS // self._num_groups)
        self._slot_parts, self._rows = max(parts, 1), store.step_rows
        self._max_num_reqs = config.max_num_reqs
        self._address = store.device.address
        self._runner = store.device.step_runner(store.step_kernels, overlaps=store.device.can_overlap)
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
        apply = self._nothing
        if slot is not None:
            apply = self._apply(slot.address + 4 * HEADER, tuple(slot.host[:HEADER].tolist()), mark)
        self._runner.run((apply, self._step), stream)

    def _apply(self, changes: int, counts: tuple[int, ...], mark: int) -> Launch:
        singles, _, range_values, _, nulls = counts
        write_programs = min(-(-max(singles, range_values, nulls) // self._change_tile), MAX_WRITE_PROGRAMS)
        arguments = (changes, *counts, *self._arena, self._copy_parts, mark, self._last_mark)
        return self._num_groups * self._copy_parts + write_programs, arguments

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
