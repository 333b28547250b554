"""The memory of one table, on the host but apart from the core's mirror, so that a commit means something."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from blocktable import NULL_BLOCK_ID, PAD_SLOT_ID, ArgumentError, Batch, BlockTableConfig, StepBuffers, Writes
from blocktable_numpy.kernels import Ints, gather_block_tables, null_stale_columns, scatter_writes


@dataclass(frozen=True, eq=False)
class NumpyBuffers(StepBuffers):
    """Outputs, and how many columns each batch row holds: `held` [num_groups, max_num_reqs] int32."""

    held: Ints


class NumpyBlockStore:
    """Arena, gather and outputs of one table."""

    def __init__(self, config: BlockTableConfig) -> None:
        self.config = config
        self.arena: Ints = np.zeros(config.arena.size, np.int32)
        self.filled: Ints = self.table(-1)

    def write(self, writes: Writes, *, stream: int | None) -> None:
        scatter_writes(writes.offsets, writes.lengths, writes.values, self.arena)

    def table(self, group: int) -> Ints:
        view: Ints = self.config.arena.view(self.arena, group)
        return view

    def create_buffers(self) -> NumpyBuffers:
        arena = self.config.arena
        batch_tables = np.zeros(arena.size, np.int32)  # laid out as the arena, room behind each group's rows included
        slot_dtype = np.dtype(self.config.slot_dtype)
        return NumpyBuffers(
            block_tables=tuple(arena.view(batch_tables, group) for group in range(arena.num_groups)),
            slot_mappings=tuple(
                np.full(self.config.max_num_batched_tokens, PAD_SLOT_ID, slot_dtype) for _ in self.config.groups
            ),
            held=arena.view(batch_tables, -1),
        )

    def reset_buffers(self, out: StepBuffers, *, stream: int | None) -> None:
        assert isinstance(out, NumpyBuffers)
        for table, slots in zip(out.block_tables, out.slot_mappings, strict=True):
            table[:] = NULL_BLOCK_ID
            slots[:] = PAD_SLOT_ID
        out.held[:] = 0

    def gather(self, batch: Batch, out: StepBuffers, *, stream: int | None) -> None:
        assert isinstance(out, NumpyBuffers)
        idx_mapping = rows_of(batch)
        for index, group in enumerate(self.config.groups):
            first_columns = None
            if group.sliding_window is not None and batch.num_computed_tokens is not None:
                computed = host_array(batch.num_computed_tokens).astype(np.int64)
                first_tokens = np.maximum(0, computed - group.sliding_window + 1)
                if group.is_sharded:
                    first_tokens = self.config.context_parallel.local_lengths(first_tokens)
                first_columns = first_tokens // group.tokens_per_column
            filled, held, block_table = self.filled[index], out.held[index], out.block_tables[index]
            null_stale_columns(idx_mapping, filled, held, block_table)
            gather_block_tables(
                idx_mapping,
                first_columns,
                filled,
                self.table(index),
                held,
                block_table,
            )


def host_array(array: Any) -> Ints:
    """Return an input as a numpy array without a copy: a CPU tensor and the like come in through DLPack."""
    if isinstance(array, np.ndarray):
        return array
    try:
        return np.from_dlpack(array)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"The numpy backend takes arrays on the host, got {type(array).__module__}.{type(array).__name__}: {error}"
        ) from error


def rows_of(batch: Batch) -> Ints:
    """Return [num_reqs] int64, batch index -> row."""
    return np.arange(batch.num_reqs) if batch.idx_mapping is None else host_array(batch.idx_mapping).astype(np.int64)
