"""A small backend in plain loops, cut into steps so that a mutant can replace one; right as it stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blocktable import BlockTableConfig, StepBuffers
from blocktable.backend import PROTOCOL_VERSION, Batch, Writes


class PlainStore:
    def __init__(self, config: BlockTableConfig) -> None:
        self.config = config
        self.arena = config.arena.empty()
        self.num_rows = config.max_num_reqs  # of a batch

    def table(self, group: int) -> Any:
        return self.config.arena.view(self.arena, group)

    # step: write

    def write(self, writes: Writes, *, stream: int | None) -> None:
        first = 0
        for offset, length in zip(writes.offsets.tolist(), writes.lengths.tolist(), strict=True):
            self.store_range(offset, writes.values[first : first + length])
            first += length

    def store_range(self, offset: int, values: Any) -> None:
        self.arena[offset : offset + len(values)] = values

    # step: buffers

    def create_buffers(self) -> StepBuffers:
        widths = enumerate(self.config.arena.widths)
        tables = tuple(np.full((self.num_rows, width), self.filler(group), np.int32) for group, width in widths)
        slots = tuple(self.slot_buffer(group) for group in range(len(self.config.groups)))
        return StepBuffers(tables, slots)

    def filler(self, group: int) -> int:
        return self.config.groups[group].filler

    def slot_buffer(self, group: int) -> Any:
        pad = self.config.groups[group].pad_slot_id
        return np.full(self.config.max_num_batched_tokens, pad, self.config.slot_dtype)

    def reset_buffers(self, out: StepBuffers, *, stream: int | None) -> None:
        for group, (table, slots) in enumerate(zip(out.block_tables, out.slot_mappings, strict=True)):
            table[:] = self.filler(group)
            slots[:] = self.config.groups[group].pad_slot_id

    # step: gather

    def gather(self, batch: Batch, out: StepBuffers, *, stream: int | None) -> None:
        for group, table in enumerate(out.block_tables):
            for i in range(self.num_rows):
                self.store_batch_row(group, table, i, self.batch_row(group, batch, i), batch)

    def store_batch_row(self, group: int, table: Any, i: int, columns: list[int], batch: Batch) -> None:
        table[i] = self.filler(group)
        table[i, : len(columns)] = columns

    def batch_row(self, group: int, batch: Batch, i: int) -> list[int]:
        row = self.row_of(batch, i)
        if row is None:
            return []
        columns: list[int] = self.table(group)[row, : self.num_columns(group, row)].tolist()
        passed = min(self.passed_columns(group, batch, i), len(columns))
        return [self.filler(group)] * passed + columns[passed:]

    def row_of(self, batch: Batch, i: int) -> int | None:
        if i >= batch.num_reqs:
            return None
        row = i if batch.idx_mapping is None else int(batch.idx_mapping[i])
        return row if self.is_row(row) else None

    def is_row(self, row: int) -> bool:
        return 0 <= row < self.config.num_rows

    def is_missing(self, group: int, block_id: int) -> bool:
        geometry = self.config.groups[group]
        return 0 <= block_id - geometry.null_start < geometry.blocks_per_kv_block

    def num_columns(self, group: int, row: int) -> int:
        return int(self.table(-1)[group, row])

    def passed_columns(self, group: int, batch: Batch, i: int) -> int:
        geometry = self.config.groups[group]
        if geometry.cut_window is None or batch.num_computed_tokens is None:
            return 0
        lo = max(0, self.first_token(int(batch.num_computed_tokens[i]), geometry.cut_window))
        return self.local_length(group, lo) // geometry.tokens_per_column

    def first_token(self, num_computed_tokens: int, window: int) -> int:
        return num_computed_tokens - window + 1

    def local_length(self, group: int, length: int) -> int:
        sharded = self.config.groups[group].is_sharded
        return int(self.config.context_parallel.local_lengths(length)) if sharded else length


class PlainMapper:
    def __init__(self, store: PlainStore) -> None:
        self.store = store
        self.config = store.config

    def compute_slot_mappings(
        self, batch: Batch, out: Sequence[Any], *, stream: int | None, groups: Sequence[int] | None = None
    ) -> None:
        for group, slots in zip(range(len(out)) if groups is None else groups, out, strict=True):
            num_tokens = self.num_tokens(batch, slots)
            is_left_out = groups is None and self.config.groups[group].slot_mode == "cross"
            for token in range(num_tokens):
                slots[token] = self.pad_of(group) if is_left_out else self.slot(group, batch, token, num_tokens)
            self.pad(group, slots, num_tokens)

    def pad_of(self, group: int) -> int:
        return self.config.groups[group].pad_slot_id

    def num_tokens(self, batch: Batch, slots: Any) -> int:
        assert batch.query_start_loc is not None
        assert batch.positions is not None
        return max(0, min(int(batch.query_start_loc[-1]), len(batch.positions), len(slots)))

    def pad(self, group: int, slots: Any, num_tokens: int) -> None:
        slots[num_tokens:] = self.pad_of(group)

    def slot(self, group: int, batch: Batch, token: int, num_tokens: int) -> int:
        assert batch.positions is not None
        request = self.request_of(batch, token)
        row = None if request is None else self.store.row_of(batch, request)
        position = int(batch.positions[token])
        if row is None or self.config.groups[group].slot_mode == "none" or not self.is_position(position):
            return self.pad_of(group)
        if self.is_overwritten(group, row, position, self.last_position(batch, request, num_tokens)):
            return self.pad_of(group)
        local = self.local_index(group, row, position)
        if local is None:
            return self.pad_of(group)
        size = self.config.groups[group].tokens_per_column
        column = local // size
        if not self.is_filled(group, row, column):
            return self.pad_of(group)
        block_id = self.block_id(group, row, column)
        return self.pad_of(group) if self.is_null(group, block_id) else self.product(block_id, size) + local % size

    def last_position(self, batch: Batch, request: int | None, num_tokens: int) -> int:
        assert batch.query_start_loc is not None
        assert batch.positions is not None
        assert request is not None
        end = min(int(batch.query_start_loc[request + 1]), num_tokens)
        return int(batch.positions[max(end, 1) - 1])

    def is_overwritten(self, group: int, row: int, position: int, last_position: int) -> bool:
        """Say whether a later token of a ring has this one's place."""
        size = self.ring_columns(group, row) * self.config.groups[group].tokens_per_column
        return self.config.groups[group].slot_mode == "ring" and position <= last_position - size

    def request_of(self, batch: Batch, token: int) -> int | None:
        assert batch.query_start_loc is not None
        starts = batch.query_start_loc.tolist()
        for request in range(batch.num_reqs):
            if starts[request] <= token < starts[request + 1]:
                return request
        return None

    def is_position(self, position: int) -> bool:
        return position >= 0

    def local_index(self, group: int, row: int, position: int) -> int | None:
        geometry = self.config.groups[group]
        if geometry.slot_mode == "ring":
            return position % max(1, self.ring_columns(group, row) * geometry.tokens_per_column)
        if not geometry.is_sharded:
            return position
        world_size, rank, interleave_size = self.share()
        if (position // interleave_size) % world_size != rank:
            return None
        return position // (world_size * interleave_size) * interleave_size + position % interleave_size

    def share(self) -> tuple[int, int, int]:
        share = self.config.context_parallel
        return share.world_size, share.rank, share.interleave_size

    def ring_columns(self, group: int, row: int) -> int:
        return self.store.num_columns(group, row)

    def is_filled(self, group: int, row: int, column: int) -> bool:
        return column < self.store.num_columns(group, row)

    def block_id(self, group: int, row: int, column: int) -> int:
        return int(self.store.table(group)[row, column])

    def is_null(self, group: int, block_id: int) -> bool:
        geometry = self.config.groups[group]
        return self.store.is_missing(group, block_id) and (geometry.null_is_pad or block_id < 0)

    def product(self, block_id: int, size: int) -> int:
        return block_id * size


class PlainBackend:
    name = "plain"
    protocol_version = PROTOCOL_VERSION
    capabilities = frozenset({"int32_slots"})
    store_class: type[PlainStore] = PlainStore
    mapper_class: type[PlainMapper] = PlainMapper

    def why_unavailable(self) -> str | None:
        return None

    def create_block_store(self, config: BlockTableConfig, device: Any = None) -> PlainStore:
        return self.store_class(config)

    def create_slot_mapper(self, store: Any) -> PlainMapper:
        return self.mapper_class(store)

    def from_host(self, array: np.ndarray[Any, Any], device: Any = None) -> Any:
        return array.copy()

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        copy: np.ndarray[Any, Any] = array.copy()
        return copy

    def synchronize(self, device: Any = None) -> None:
        return None
