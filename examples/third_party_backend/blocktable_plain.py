"""The smallest backend: one buffer, and a plain loop for each of the three kernels. Slow, and right."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from blocktable import NULL_BLOCK_ID, PAD_SLOT_ID, Batch, BlockTableConfig, StepBuffers, Writes


class PlainTable:
    """One table's memory and its kernels: a block store and a slot mapper in one."""

    def __init__(self, config: BlockTableConfig) -> None:
        self.config = config
        self.memory = np.zeros(config.arena.size, np.int32)

    def table(self, group: int) -> Any:
        return self.config.arena.view(self.memory, group)

    def write(self, writes: Writes, *, stream: int | None) -> None:
        ends = np.cumsum(writes.lengths)
        for offset, length, end in zip(writes.offsets, writes.lengths, ends, strict=True):
            self.memory[offset : offset + length] = writes.values[end - length : end]

    def create_buffers(self) -> StepBuffers:
        # A second arena: it brings the NULL columns that attention kernels read past the last row.
        memory, groups = np.zeros_like(self.memory), range(len(self.config.groups))
        slots = [np.full(self.config.max_num_batched_tokens, PAD_SLOT_ID, self.config.slot_dtype) for _ in groups]
        return StepBuffers(tuple(self.config.arena.view(memory, group) for group in groups), tuple(slots))

    def reset_buffers(self, out: StepBuffers, *, stream: int | None) -> None:
        for table, slots in zip(out.block_tables, out.slot_mappings, strict=True):
            table[:], slots[:] = NULL_BLOCK_ID, PAD_SLOT_ID

    def gather(self, batch: Batch, out: StepBuffers, *, stream: int | None) -> None:
        for group, (geometry, batch_table) in enumerate(zip(self.config.groups, out.block_tables, strict=True)):
            batch_table[:] = NULL_BLOCK_ID
            for i, row in self.rows_of(batch):
                filled = self.table(-1)[group, row]
                batch_table[i, :filled] = self.table(group)[row, :filled]
                if geometry.sliding_window is not None and batch.num_computed_tokens is not None:
                    passed = max(0, int(batch.num_computed_tokens[i]) - geometry.sliding_window + 1)
                    if geometry.is_sharded:
                        passed = self.config.context_parallel.local_lengths(passed)
                    batch_table[i, : passed // geometry.tokens_per_column] = NULL_BLOCK_ID

    def compute_slot_mappings(self, batch: Batch, out: Sequence[Any], *, stream: int | None) -> None:
        assert batch.query_start_loc is not None  # the core's promise
        assert batch.positions is not None
        starts = batch.query_start_loc.tolist()
        for group, slots in enumerate(out):
            slots[:] = PAD_SLOT_ID
            num_tokens = min(starts[-1], len(batch.positions), len(slots))
            for i, row in self.rows_of(batch):
                for token in range(max(starts[i], 0), min(starts[i + 1], num_tokens)):
                    slots[token] = self.slot(group, row, int(batch.positions[token]))

    def rows_of(self, batch: Batch) -> Iterator[tuple[int, int]]:
        rows = range(batch.num_reqs) if batch.idx_mapping is None else batch.idx_mapping.tolist()
        return ((i, row) for i, row in enumerate(rows) if 0 <= row < self.config.max_num_reqs)

    def slot(self, group: int, row: int, position: int) -> int:
        geometry, shard = self.config.groups[group], self.config.context_parallel
        tokens, filled = geometry.tokens_per_column, int(self.table(-1)[group, row])
        if position < 0 or filled == 0 or geometry.slot_mode == "none":
            return PAD_SLOT_ID
        local = position % (filled * tokens) if geometry.slot_mode == "ring" else position
        if geometry.is_sharded:
            turn, place = divmod(position, shard.interleave_size)
            if turn % shard.world_size != shard.rank:
                return PAD_SLOT_ID
            local = turn // shard.world_size * shard.interleave_size + place
        column, offset = divmod(local, tokens)
        block_id = int(self.table(group)[row, column]) if column < filled else None
        if block_id is None or (geometry.null_is_pad and block_id < geometry.blocks_per_kv_block):
            return PAD_SLOT_ID
        return block_id * tokens + offset


class PlainBackend:
    name = "plain"
    # What this file was written for. Not blocktable.PROTOCOL_VERSION, which would match whatever is installed.
    protocol_version = 2
    capabilities = frozenset({"int32_slots"})

    def why_unavailable(self) -> str | None:
        return None

    def create_block_store(self, config: BlockTableConfig, device: Any = None) -> PlainTable:
        return PlainTable(config)

    def create_slot_mapper(self, store: Any) -> PlainTable:
        assert isinstance(store, PlainTable)
        return store

    def from_host(self, array: np.ndarray[Any, Any], device: Any = None) -> Any:
        return array.copy()

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        return np.array(array)

    def synchronize(self, device: Any = None) -> None:
        pass
