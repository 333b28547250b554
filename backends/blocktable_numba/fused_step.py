"""A whole step in two kernels, launched as one graph: the changes, then gather and slots together."""

from __future__ import annotations

from typing import Any

from blocktable import Batch, KernelArguments, KernelNode, StepGraph
from blocktable_numba.kernels import Pointer

HEADER = 5
"""Counts before packed changes: single values, ranges, range values, NULL ranges, their entries."""

MAX_COPY_PARTS = 16
MAX_WRITE_BLOCKS = 64
MAX_GATHER_BLOCKS = 1 << 15
MAX_SLOT_BLOCKS = 1 << 22

Launch = tuple[int, tuple[Any, ...]]
"""Blocks, and the kernel's arguments."""


class SimulatedRunner:
    """Runs the two kernels in the simulator, one after the other."""

    def __init__(self, kernels: tuple[Any, Any], block: int) -> None:
        self._kernels, self._block = kernels, block

    def run(self, launches: tuple[Launch, Launch], stream: Any) -> None:
        """Run apply_changes and step_batch."""
        for kernel, (blocks, arguments) in zip(self._kernels, launches, strict=True):
            kernel((blocks, 1), (self._block,), arguments, stream)


class GraphRunner:
    """Launches the two kernels as one graph, whose nodes take new parameters where they have changed."""

    def __init__(self, kernels: tuple[Any, Any], block: int) -> None:
        self._arguments = [KernelArguments(kernel.layout) for kernel in kernels]
        self._nodes = [
            KernelNode(kernel.handle, arguments.addresses, block)
            for kernel, arguments in zip(kernels, self._arguments, strict=True)
        ]
        self._graph = StepGraph(self._nodes)
        self._present: list[Launch | None] = [None, None]

    def run(self, launches: tuple[Launch, Launch], stream: Any) -> None:
        """Launch apply_changes and step_batch on a native stream."""
        for index, launch in enumerate(launches):
            if launch is not self._present[index]:
                blocks, arguments = launch
                self._arguments[index].set(*arguments)
                self._nodes[index].set_grid(blocks)
                self._graph.update(index)
            self._present[index] = launch
        self._graph.launch(stream.handle)


class FusedStep:
    """The fused step over one set of buffers.

    Args:
        store: the table's memory.
        batch, slots: the set's.

    Attributes:
        batch: the last one that was run.
    """

    def __init__(self, store: Any, batch: Pointer, slots: Pointer) -> None:
        config, device = store.config, store.device
        self._device = device
        self._num_groups, self._num_slots = len(config.groups), config.max_num_batched_tokens
        self._block, self._max_blocks = device.tile, device.max_step_blocks
        self._arena = (store.arena_address, self._num_groups, config.max_num_reqs, config.arena.size, batch)
        self._copy_parts = min(-(-config.max_num_reqs // self._block), MAX_COPY_PARTS, self._max_blocks)
        self._last_mark, self._shown_mark = store.last_mark_address, store.shown_mark_address
        self._nothing = self._apply(store.shown_mark_address, (0, 0, 0, 0, 0), 0)
        self._table = (config.max_num_reqs, store.groups_address, self._num_groups, store.arena_address)
        self._outputs = (config.arena.size, batch, slots, self._num_slots)
        blocks = min(-(-self._num_slots // self._block), MAX_SLOT_BLOCKS // self._num_groups, self._max_blocks)
        self._blocks_per_group = max(blocks, 1)
        self._runner = device.step_runner(store.step_kernels, self._block)
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
        if batch is not self.batch or self._device.copies_inputs:
            self._set_batch(batch)
        apply = self._nothing
        if slot is not None:
            apply = self._apply(slot.address + 4 * HEADER, tuple(slot.host[:HEADER].tolist()), mark)
        self._runner.run((apply, self._step), stream)

    def _apply(self, changes: Pointer, counts: tuple[int, ...], mark: int) -> Launch:
        singles, _, range_values, _, nulls = counts
        write_blocks = min(-(-max(singles, range_values, nulls) // self._block), MAX_WRITE_BLOCKS, self._max_blocks)
        arguments = (changes, *counts, *self._arena, self._copy_parts, mark, self._last_mark)
        return self._num_groups * self._copy_parts + write_blocks, arguments

    def _set_batch(self, batch: Batch) -> None:
        arrays = (batch.idx_mapping, batch.num_computed_tokens, batch.query_start_loc, batch.positions)
        idx_mapping, num_computed_tokens, query_start_loc, positions = (
            0 if array is None else self._device.address(array) for array in arrays
        )
        pairs = max(batch.num_reqs_padded, 1) * self._num_groups
        gather_blocks = min(pairs, MAX_GATHER_BLOCKS, self._max_blocks) if batch.wants_tables else 0
        arguments = (
            query_start_loc if batch.idx_mapping is None else idx_mapping,
            int(batch.idx_mapping is not None),
            num_computed_tokens,
            int(batch.num_computed_tokens is not None),
            query_start_loc,
            positions,
            batch.num_reqs,
            batch.num_reqs_padded,
            batch.num_positions,
            *self._table,
            *self._outputs,
            gather_blocks,
            self._blocks_per_group,
            self._last_mark,
            self._shown_mark,
        )
        self._step = gather_blocks + self._blocks_per_group * self._num_groups + 1, arguments
        self.batch = batch
