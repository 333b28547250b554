"""A whole step in two kernels: the changes by value, then gather and slots together (kernels.cu, the fused step)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blocktable import Batch, BlockTableConfig, KernelArguments, KernelNode, StepGraph, Writes
from blocktable_cupy.kernels import is_long_launch, requests_per_token, tokens_per_thread

APPLY_KERNELS = (
    ("apply_changes_tiny", 245),
    ("apply_changes_small", 605),
    ("apply_changes_medium", 1905),
    ("apply_changes_large", 8165),
)
"""Kernels that take changes by value, and the int32 entries of that parameter: `Changes` of kernels.cu."""
TINY = APPLY_KERNELS[0][1]

HEADER, NULLS = 5, 4
"""Counts before packed changes, and which of them counts the entries of NULL ranges."""

BLOCK = 128
WARP = 32
GATHER_WARPS = 2048
"""Warps that gather, where the batch has fewer rows: then several take a part of each row."""
COLUMNS_PER_WARP = 256
MAX_GATHER_BLOCKS = 8192
MAX_APPLY_BLOCKS = 64
INT32_LIMIT = 2**31

APPLY_LAYOUT = "QiiqQ"  # arena, num_groups, max_num_reqs, arena_size, batch
STEP_LAYOUT = "QQQQiiiiQiQqQQiiiiq"  # step_batch's arguments, in order


class HostRunner:
    """Runs the two kernels of the emulation, one after the other."""

    def __init__(self, kernels: dict[str, Any], step_kernel: str, apply: Sequence[int], step: Sequence[int]) -> None:
        self._kernels, self._step_kernel, self._apply, self._step = kernels, step_kernel, apply, step

    def run(self, apply_kernel: str, apply_blocks: int, step_blocks: int, is_new: bool, stream: Any) -> None:
        """Run apply_changes and step_batch."""
        self._kernels[apply_kernel].launch((apply_blocks, 1), BLOCK, self._apply)
        self._kernels[self._step_kernel].launch((step_blocks, 1), BLOCK, self._step)


class GraphRunner:
    """Launches the two kernels as one graph, whose nodes take new parameters each time."""

    def __init__(self, kernels: dict[str, Any], step_kernel: str, apply: Sequence[int], step: Sequence[int]) -> None:
        self._functions = {name: kernel.kernel.ptr for name, kernel in kernels.items()}
        self._present = (APPLY_KERNELS[0][0], 1)
        self._apply = KernelNode(self._functions[self._present[0]], apply, BLOCK)
        self._step = KernelNode(self._functions[step_kernel], step, BLOCK)
        self._graph = StepGraph((self._apply, self._step), overlaps=True)

    def run(self, apply_kernel: str, apply_blocks: int, step_blocks: int, is_new: bool, stream: Any) -> None:
        """Launch apply_changes with the changes as they are in its memory now; step_batch anew where `is_new`."""
        if self._present != (apply_kernel, apply_blocks):
            self._apply.set_function(self._functions[apply_kernel])
            self._apply.set_grid(apply_blocks)
            self._present = (apply_kernel, apply_blocks)
        self._graph.update(0)
        if is_new:
            self._step.set_grid(step_blocks)
            self._graph.update(1)
        self._graph.launch(stream.ptr)


class FusedStep:
    """The fused step over one set of buffers.

    Args:
        config: of the table.
        kernels: name -> kernel, of all apply kernels and step_batch.
        runner: `HostRunner` or `GraphRunner`.
        tile: threads of a block of the plain kernels: small when emulated.
        address: says where an array lies.
        addresses: of the group fields, the arena, the batch and the slots.

    Attributes:
        batch: the last one that was run.
    """

    def __init__(
        self,
        config: BlockTableConfig,
        kernels: dict[str, Any],
        runner: Any,
        tile: int,
        address: Callable[[Any], int],
        addresses: tuple[int, int, int, int],
    ) -> None:
        groups, arena, batch, slots = addresses
        num_groups = len(config.groups)
        # The kernels' offsets are int32: a larger arena takes its changes through the staging ring.
        self._takes_changes = config.arena.size < INT32_LIMIT
        self._changes = np.zeros(APPLY_KERNELS[-1][1], np.int32)
        apply = KernelArguments(APPLY_LAYOUT)
        apply.set(arena, num_groups, config.max_num_reqs, config.arena.size, batch)
        self._apply = apply  # owns the memory
        self._step = KernelArguments(STEP_LAYOUT)
        self._fixed = (config.max_num_reqs, groups, num_groups, arena, config.arena.size, batch, slots)
        self._num_slots = config.max_num_batched_tokens
        is_long = is_long_launch(self._num_slots * num_groups, tile)
        self._slot_blocks = -(-self._num_slots // (BLOCK * tokens_per_thread(is_long)))
        self._num_groups = num_groups
        self._max_parts = -(-max(config.arena.widths) // COLUMNS_PER_WARP)
        step_kernel = "step_batch_long" if is_long else "step_batch"
        self._runner = runner(kernels, step_kernel, [self._changes.ctypes.data, *apply.addresses], self._step.addresses)
        self._address = address
        self.batch: Batch | None = None
        self._used = HEADER
        self._step_blocks = 0
        self._num_pairs = 0

    def pack(self, writes: Writes) -> bool:
        """Take a commit's changes; False where they must travel through the staging ring."""
        self._used = writes.pack_changes(self._changes) if self._takes_changes else 0
        if self._used == 0:
            self._changes[:HEADER] = 0
            self._used = HEADER
            return writes.num_ranges == 0
        return True

    def run(self, batch: Batch, stream: Any) -> None:
        """Launch the step over a batch of device arrays, on a native stream."""
        is_new = batch is not self.batch
        if is_new:
            self._set_batch(batch)
        used = self._used
        kernel = next(name for name, size in APPLY_KERNELS if size >= used) if used > TINY else APPLY_KERNELS[0][0]
        entries = max(used + int(self._changes[NULLS]), self._num_pairs)
        apply_blocks = min(1 + entries // BLOCK, MAX_APPLY_BLOCKS)
        self._runner.run(kernel, apply_blocks, self._step_blocks, is_new, stream)

    def _set_batch(self, batch: Batch) -> None:
        arrays = (batch.idx_mapping, batch.num_computed_tokens, batch.query_start_loc, batch.positions)
        addresses = [0 if array is None else self._address(array) for array in arrays]
        pairs = max(batch.num_reqs_padded, 1) * self._num_groups
        parts = max(min(GATHER_WARPS // pairs, self._max_parts), 1)
        gather_blocks = min(-(-pairs * parts * WARP // BLOCK), MAX_GATHER_BLOCKS) if batch.wants_tables else 0
        sizes = (batch.num_reqs, batch.num_reqs_padded, batch.num_positions)
        tail = parts, self._slot_blocks, requests_per_token(batch.num_reqs, batch.num_positions)
        self._step.set(*addresses, *sizes, *self._fixed, self._num_slots, gather_blocks, *tail)
        self._num_pairs = pairs  # about as many held counts are copied as the last batch had
        self._step_blocks = gather_blocks + self._slot_blocks * self._num_groups
        self.batch = batch
