"""A whole step in two kernels, launched as one graph: the changes, then gather and slots together."""

from __future__ import annotations

from collections.abc import Sequence
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


NO_CHANGES = (0, 0, 0, 0, 0)


class SimulatedRunner:
    """Runs the two kernels in the simulator, one after the other."""

    def __init__(self, kernels: tuple[Any, Any], block: int, fixed: tuple[Any, ...], last_mark: Pointer) -> None:
        self._apply, self._step = kernels
        self._block, self._fixed, self._last_mark = (block,), fixed, last_mark

    def run(self, blocks: int, changes: Pointer, counts: Sequence[int], mark: int, step: Launch, stream: Any) -> None:
        """Run apply_changes and step_batch."""
        self._apply((blocks, 1), self._block, (changes, *counts, *self._fixed, mark, self._last_mark), stream)
        self._step((step[0], 1), self._block, step[1], stream)


class GraphRunner:
    """Launches the two kernels as one graph, whose nodes take new parameters where they have changed.

    Args:
        kernels: apply_changes and step_batch.
        block: threads of a block.
        fixed: what is between the first one's counts and its mark.
        last_mark: its last argument.
    """

    def __init__(self, kernels: tuple[Any, Any], block: int, fixed: tuple[Any, ...], last_mark: Pointer) -> None:
        apply, self._step_arguments = (KernelArguments(kernel.layout) for kernel in kernels)
        apply.set(0, *NO_CHANGES, *fixed, 0, last_mark)
        self._set_changes, self._set_mark = apply.setter(0, 1 + HEADER), apply.setter(1 + HEADER + len(fixed), 1)
        self._apply, self._step = (
            KernelNode(kernel.handle, arguments.addresses, block)
            for kernel, arguments in zip(kernels, (apply, self._step_arguments), strict=True)
        )
        self._graph = StepGraph((self._apply, self._step))
        self._blocks, self._has_changes = 0, True
        self._present: Launch | None = None

    def run(self, blocks: int, changes: Pointer, counts: Sequence[int], mark: int, step: Launch, stream: Any) -> None:
        """Launch apply_changes and step_batch on a native stream."""
        if mark or self._has_changes:
            self._set_changes(changes, *counts)
            self._set_mark(mark)
            if blocks != self._blocks:
                self._apply.set_grid(blocks)
                self._blocks = blocks
            self._graph.update(0)
            self._has_changes = mark != 0
        if step is not self._present:
            self._step_arguments.set(*step[1])
            self._step.set_grid(step[0])
            self._graph.update(1)
            self._present = step
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
        copy_parts = min(-(-config.max_num_reqs // self._block), MAX_COPY_PARTS, self._max_blocks)
        arena = (store.arena_address, self._num_groups, config.max_num_reqs, config.arena.size, batch, copy_parts)
        self._copy_blocks = self._num_groups * copy_parts
        self._last_mark, self._shown_mark = store.last_mark_address, store.shown_mark_address
        self._table = (config.max_num_reqs, store.groups_address, self._num_groups, store.arena_address)
        self._outputs = (config.arena.size, batch, slots, self._num_slots)
        blocks = min(-(-self._num_slots // self._block), MAX_SLOT_BLOCKS // self._num_groups, self._max_blocks)
        self._blocks_per_group = max(blocks, 1)
        self._runner = device.step_runner(store.step_kernels, self._block, arena, self._last_mark)
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
        if slot is None:
            self._runner.run(self._copy_blocks, self._shown_mark, NO_CHANGES, 0, self._step, stream)
            return
        counts = slot.header.tolist()
        most = max(counts[0], counts[2], counts[4])  # single values, range values, NULL entries
        blocks = self._copy_blocks + min(-(-most // self._block), MAX_WRITE_BLOCKS, self._max_blocks)
        self._runner.run(blocks, slot.address + 4 * HEADER, counts, mark, self._step, stream)

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
