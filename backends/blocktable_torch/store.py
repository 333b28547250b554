"""The memory of one table on a device that torch has: a block store and a slot mapper in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from blocktable import BlockTableConfig, ExportBuffers, KVCacheGroup, Layout, StepBuffers
from blocktable.backend import Batch, Writes, ranges
from blocktable.device import StreamOrder, refuse_capture
from blocktable_torch.exports import ExportCall
from blocktable_torch.memory import Memory


class TorchStore:
    """Arena, gather, slots and exports of one table. Every shape follows from the call, never from what arrays hold.

    Attributes:
        arena: [arena.size] int32.
        filled: [num_groups, num_rows] int32, a view of it. Row -> columns in use.
        longest: [num_groups] int64, on the host. Columns of the longest row so far: no output holds more.
    """

    def __init__(self, config: BlockTableConfig, device: Any) -> None:
        self.config, self.memory, self.device = config, Memory(device), device
        self._order = StreamOrder(self.memory) if self.memory.is_cuda else None
        self.arena = torch.from_numpy(config.arena.empty()).to(device)
        self.filled = self.table(-1)
        self.longest = np.zeros(config.arena.num_groups, np.int64)

    def table(self, group: int) -> Any:
        return self.config.arena.view(self.arena, group)

    @contextmanager
    def on(self, stream: int | None, never_captured: str | None = None) -> Iterator[None]:
        """Work on a stream, after this table's earlier calls; elsewhere than on CUDA on torch's current one.

        Args:
            stream: its handle; None: torch's current one.
            never_captured: what cannot be captured; None: it can.
        """
        if self._order is None:
            yield
            return
        with self.memory.current():
            native, self.memory.is_capturing_now = self._order.enter(stream)
            if never_captured is not None:
                refuse_capture(self.memory.is_capturing_now, never_captured)
            with self.memory.on(native):
                yield

    # Changes.

    def write(self, writes: Writes, *, stream: int | None) -> None:
        with self.on(stream, "A commit"):
            self._note_longest(writes)
            long_ranges, rest = writes.split_long()
            for start, values in long_ranges:
                self.arena[start : start + values.size].copy_(self.memory.send(values))
            if rest.num_ranges:
                sent = self.memory.send(np.stack((ranges(rest.offsets, rest.lengths), rest.values)))
                self.arena.scatter_(0, sent[0], sent[1].int())
            elif not long_ranges:  # the first launch of an operation loads it, which must not wait for a busy device
                sent = self.memory.send(np.zeros((2, 1), np.int64))
                self.arena.scatter_(0, sent[0], sent[1].int() + self.arena[:1])

    def _note_longest(self, writes: Writes) -> None:
        num_rows, end = self.config.arena.num_rows, self.filled.numel()
        count = int(np.searchsorted(writes.offsets, end))  # ranges of filled counts, which come first
        offsets, lengths = writes.offsets[:count], writes.lengths[:count].astype(np.int64)
        starts, lengths = np.cumsum(lengths) - lengths, np.minimum(lengths, end - offsets)
        np.maximum.at(self.longest, ranges(offsets, lengths) // num_rows, writes.values[ranges(starts, lengths)])

    def put(self, values: np.ndarray[Any, Any], out: Any, *, stream: int | None) -> None:
        with self.on(stream, "Filling an array from the host"):
            out.copy_(self.memory.send(values))

    # Outputs.

    def create_buffers(self) -> StepBuffers:
        config, arena = self.config, self.config.batch_arena
        batch = torch.from_numpy(arena.empty()).to(self.device)
        size, dtype = (config.max_num_batched_tokens,), getattr(torch, config.slot_dtype)
        made = StepBuffers(
            tuple(arena.view(batch, group) for group in range(arena.num_groups)),
            tuple(torch.full(size, group.pad_slot_id, dtype=dtype, device=self.device) for group in config.groups),
        )
        self.memory.synchronize()
        return made

    def reset_buffers(self, out: StepBuffers, *, stream: int | None) -> None:
        with self.on(stream, "A commit after invalidate()"):
            for group, table, slots in zip(self.config.groups, out.block_tables, out.slot_mappings, strict=True):
                table.fill_(group.filler)
                slots.fill_(group.pad_slot_id)

    def gather(self, batch: Batch, out: StepBuffers, *, stream: int | None) -> None:
        with self.on(stream):
            rows = self.rows_of(batch, batch.num_reqs)
            for index, (group, whole) in enumerate(zip(self.config.groups, out.block_tables, strict=True)):
                # A replay meets rows that are longer by then.
                width = whole.shape[1]
                width = width if self.memory.is_capturing_now else min(width, int(self.longest[index]))
                block_table, column = whole[:, :width], self.arange(width)
                is_used = column < self.columns_of(index, rows)[:, None]
                if group.cut_window is not None and batch.num_computed_tokens is not None:
                    is_used &= column >= self.first_columns(batch, group, group.cut_window, batch.num_reqs)[:, None]
                found = self.table(index)[:, :width].index_select(0, rows.clamp(min=0))
                block_table[: batch.num_reqs] = found.masked_fill_(~is_used, group.filler)
                block_table[batch.num_reqs :] = group.filler

    # Slots.

    def compute_slot_mappings(
        self, batch: Batch, out: Sequence[Any], *, stream: int | None, groups: Sequence[int] | None = None
    ) -> None:
        with self.on(stream):
            starts, positions = self.memory.tensor(batch.query_start_loc), self.memory.tensor(batch.positions)
            num_reqs, num_tokens = starts.shape[0] - 1, positions.shape[0]
            request = self.requests_of(starts, num_tokens)
            rows = self.rows_of(batch, num_reqs + 1)[request]
            ends = torch.cat((starts[1:], starts[-1:]))[request]
            last = positions[ends.clamp(1, max(num_tokens, 1)) - 1]  # of each token: its request's last position
            for array, index in zip(out, range(len(out)) if groups is None else groups, strict=True):
                slots, group = self.memory.tensor(array), self.config.groups[index]
                slots[num_tokens:] = group.pad_slot_id
                if group.slot_mode == "none" or (group.slot_mode == "cross" and groups is None):
                    slots.fill_(group.pad_slot_id)
                else:
                    slots[:num_tokens] = self.slots_of(index, rows, positions, last, group.pad_slot_id)

    def map_positions(self, rows: Any, group: int, positions: Any, out: Any, *, stream: int | None) -> None:
        with self.on(stream):
            chosen = self.as_rows(self.memory.tensor(rows))[:, None]
            self.memory.tensor(out).copy_(self.slots_of(group, chosen, self.memory.tensor(positions), None, -1))

    def slots_of(self, index: int, rows: Any, positions: Any, last: Any, pad: int) -> Any:
        """Return the slot of each position, int64 of the shape of `positions` (R12-R14); `pad` where it has none.

        Args:
            rows: int64, of that shape or one that it broadcasts over. Row of each position; -1: none.
            positions: int64 or int32.
            last: last position of each one's request. None: in a ring no position is too old.
        """
        group, shard = self.config.groups[index], self.config.context_parallel
        tokens, columns = group.tokens_per_column, self.columns_of(index, rows)
        is_valid, position = positions >= 0, positions.clamp(min=0).long()
        local = position
        if group.is_sharded and shard.world_size > 1:
            turn = position // shard.interleave_size
            is_valid = is_valid & (turn % shard.world_size == shard.rank)
            local = turn // shard.world_size * shard.interleave_size + position % shard.interleave_size
        if group.slot_mode == "ring":
            local = position % (columns * tokens).clamp(min=1)
            if last is not None:
                is_valid = is_valid & (last.clamp(min=0) - position < columns * tokens)
        is_valid = is_valid & (local // tokens < columns)
        entry = self.entries(index, rows, local // tokens, is_valid)
        if group.null_is_pad or group.null_block_id < 0:
            is_valid = is_valid & ~is_missing(entry, group)
        return torch.where(is_valid, entry * tokens + local % tokens, pad)

    # What calls have in common.

    def arange(self, size: int) -> Any:
        return torch.arange(size, dtype=torch.int64, device=self.device)

    def requests_of(self, starts: Any, num_tokens: int) -> Any:
        """Return [num_tokens] int64, token -> its request; `num_reqs` stands for none. starts: [num_reqs + 1] int32."""
        token = self.arange(num_tokens).int()
        request = torch.searchsorted(starts, token, right=True) - 1
        return request.masked_fill((request < 0) | (token >= starts[-1:]), starts.shape[0] - 1)

    def padded(self, array: Any, size: int) -> Any:
        """Return an input [num_reqs] as [size] int64, 0 after it and where it is None."""
        found = torch.zeros(size, dtype=torch.int64, device=self.device)
        if array is not None:
            values = self.memory.tensor(array)
            found[: values.shape[0]] = values
        return found

    def as_rows(self, rows: Any) -> Any:
        """Return rows as int64, -1 for those outside the table."""
        return rows.long().masked_fill((rows < 0) | (rows >= self.config.num_rows), -1)

    def rows_of(self, batch: Batch, size: int) -> Any:
        """Return [size] int64, batch index -> row; -1 for a padding entry and after the batch (R10.2)."""
        given = self.arange(batch.num_reqs) if batch.idx_mapping is None else batch.idx_mapping
        return self.as_rows(self.padded(given, size).masked_fill(self.arange(size) >= batch.num_reqs, -1))

    def columns_of(self, index: int, rows: Any) -> Any:
        """Return how many columns each row fills, int64 of the shape of `rows`; 0 for -1."""
        return self.filled[index].long()[rows.clamp(min=0)].masked_fill(rows < 0, 0)

    def entries(self, index: int, rows: Any, columns: Any, is_read: Any) -> Any:
        """Return the entries of a group at rows and columns, int64; where nothing is to be read any entry."""
        place = rows * self.config.arena.widths[index] + columns
        return self.table(index).reshape(-1)[place.masked_fill(~is_read, 0)].long()

    def first_columns(self, batch: Batch, group: KVCacheGroup, window: int, size: int) -> Any:
        """Return [size] int64, batch index -> columns that a window has passed (R11)."""
        first = (self.padded(batch.num_computed_tokens, size) - window + 1).clamp(min=0)
        return self.local(first, group) // group.tokens_per_column

    def local(self, tokens: Any, group: KVCacheGroup) -> Any:
        """Return how many of so many tokens this rank holds (R19)."""
        return self.config.context_parallel.local_lengths(tokens) if group.is_sharded else tokens

    # Exports.

    def export(self, layout: Layout, batch: Batch, out: ExportBuffers, *, stream: int | None) -> None:
        with self.on(stream):
            ExportCall(self, layout, batch, out).write()

    def reset_export(self, out: ExportBuffers, *, stream: int | None) -> None:
        with self.on(stream, "A commit after invalidate()"):
            for entries, fill in zip(() if out.entries is None else out.entries, out.fills, strict=False):
                entries.fill_(fill)
            for array in (out.counts, out.indptr, out.last_page_lens, out.lengths, out.mapped, out.num_cut):
                if array is not None:
                    array.fill_(0)


def is_missing(entries: Any, group: KVCacheGroup) -> Any:
    """Say which entries stand for no block (R5)."""
    return (entries >= group.null_start) & (entries < group.null_start + group.blocks_per_kv_block)
