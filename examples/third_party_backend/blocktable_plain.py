"""The smallest backend: one buffer, and a plain loop for each of the three kernels. Slow, and right."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from blocktable import BlockTableConfig, StepBuffers
from blocktable.backend import Batch, Writes


class PlainTable:
    """One table's memory and its kernels: a block store and a slot mapper in one."""

    def __init__(self, config: BlockTableConfig) -> None:
        self.config = config
        self.memory = config.arena.empty()

    def table(self, group: int) -> Any:
        return self.config.arena.view(self.memory, group)

    def write(self, writes: Writes, *, stream: int | None) -> None:
        ends = np.cumsum(writes.lengths)
        for offset, length, end in zip(writes.offsets, writes.lengths, ends, strict=True):
            self.memory[offset : offset + length] = writes.values[end - length : end]

    def create_buffers(self) -> StepBuffers:
        # An arena too: it brings the NULL columns that attention kernels read past the last row.
        arena, dtype, groups = self.config.batch_arena, self.config.slot_dtype, self.config.groups
        memory = arena.empty()
        slots = [np.full(self.config.max_num_batched_tokens, group.pad_slot_id, dtype) for group in groups]
        return StepBuffers(tuple(arena.view(memory, group) for group in range(len(groups))), tuple(slots))

    def reset_buffers(self, out: StepBuffers, *, stream: int | None) -> None:
        for group, table, slots in zip(self.config.groups, out.block_tables, out.slot_mappings, strict=True):
            table[:], slots[:] = group.filler, group.pad_slot_id

    def gather(self, batch: Batch, out: StepBuffers, *, stream: int | None) -> None:
        for group, (geometry, batch_table) in enumerate(zip(self.config.groups, out.block_tables, strict=True)):
            batch_table[:] = geometry.filler
            for i, row in self.rows_of(batch):
                filled = self.table(-1)[group, row]
                batch_table[i, :filled] = self.table(group)[row, :filled]
                if geometry.cut_window is not None and batch.num_computed_tokens is not None:
                    passed = max(0, int(batch.num_computed_tokens[i]) - geometry.cut_window + 1)
                    if geometry.is_sharded:
                        passed = self.config.context_parallel.local_lengths(passed)
                    batch_table[i, : passed // geometry.tokens_per_column] = geometry.filler

    def compute_slot_mappings(
        self, batch: Batch, out: Sequence[Any], *, stream: int | None, groups: Sequence[int] | None = None
    ) -> None:
        assert batch.query_start_loc is not None  # the core's promise
        assert batch.positions is not None
        starts = batch.query_start_loc.tolist()
        for group, slots in zip(range(len(out)) if groups is None else groups, out, strict=True):
            slots[:] = self.config.groups[group].pad_slot_id
            if groups is None and self.config.groups[group].slot_mode == "cross":
                continue
            num_tokens = min(starts[-1], len(batch.positions), len(slots))
            for i, row in self.rows_of(batch):
                end = min(starts[i + 1], num_tokens)
                for token in range(max(starts[i], 0), end):
                    slots[token] = self.slot(group, row, int(batch.positions[token]), int(batch.positions[end - 1]))

    def rows_of(self, batch: Batch) -> Iterator[tuple[int, int]]:
        rows = range(batch.num_reqs) if batch.idx_mapping is None else batch.idx_mapping.tolist()
        return ((i, row) for i, row in enumerate(rows) if 0 <= row < self.config.num_rows)

    def slot(self, group: int, row: int, position: int, last_position: int) -> int:
        geometry, shard = self.config.groups[group], self.config.context_parallel
        tokens, filled = geometry.tokens_per_column, int(self.table(-1)[group, row])
        if position < 0 or filled == 0 or geometry.slot_mode == "none":
            return geometry.pad_slot_id
        if geometry.slot_mode == "ring" and position <= last_position - filled * tokens:
            return geometry.pad_slot_id  # a later token of this call has its slot
        local = position % (filled * tokens) if geometry.slot_mode == "ring" else position
        if geometry.is_sharded:
            turn, place = divmod(position, shard.interleave_size)
            if turn % shard.world_size != shard.rank:
                return geometry.pad_slot_id
            local = turn // shard.world_size * shard.interleave_size + place
        column, offset = divmod(local, tokens)
        if column >= filled:
            return geometry.pad_slot_id
        block_id = int(self.table(group)[row, column])
        is_missing = 0 <= block_id - geometry.null_start < geometry.blocks_per_kv_block
        if is_missing and (geometry.null_is_pad or block_id < 0):
            return geometry.pad_slot_id
        return block_id * tokens + offset


class PlainBackend:
    name = "plain"
    # What this file was written for. Not blocktable.backend.PROTOCOL_VERSION, which would match whatever is installed.
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
