"""The memory of one table, on the host but apart from the core's mirror, so that a commit means something."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from blocktable import ArgumentError, BlockTableConfig, ExportBuffers, KVCacheGroup, Layout, StepBuffers
from blocktable.backend import Arena, Batch, Writes
from blocktable_numpy.checks import Checks
from blocktable_numpy.exports import (
    clear_inverse_map,
    count_entries,
    gather_state_indices,
    map_positions,
    map_requests,
    start_requests,
    write_indices,
    write_inverse_map,
    write_table,
)
from blocktable_numpy.kernels import Ints, apply_changes, gather_block_tables, null_stale_columns


@dataclass(frozen=True, eq=False)
class NumpyBuffers(StepBuffers):
    """Outputs, and what they show.

    Attributes:
        batch: [batch_arena.size] int32. The batch tables, laid out as `config.batch_arena`.
        held: [num_groups, max_num_reqs] int32, a view of it. Batch row -> columns it holds; the others are NULL.
    """

    batch: Ints
    held: Ints


class NumpyBlockStore:
    """Arena, gather and outputs of one table.

    Attributes:
        config: as given.
        arena: [arena.size] int32.
        filled: [num_groups, num_rows] int32, a view of it. Row -> columns in use.
        row_starts: [num_groups, num_rows] int64. Row -> its first entry.
        batch_starts: [num_groups, max_num_reqs] int64. Batch row -> its first entry in the batch tables.
        fillers: [num_groups] int32. What an entry without a block holds.
        null_starts: [num_groups] int64. First kernel block of the null block; -k where there is none.
        blocks_per_kv_block: [num_groups] int64.
        checks: what kernels check with; None: they check nothing.
        findings: their records (`check_plan`); None: there are none.
    """

    def __init__(self, config: BlockTableConfig) -> None:
        arena = config.arena
        self.config = config
        self.arena: Ints = arena.empty()
        self.filled: Ints = self.table(-1)
        self.row_starts: Ints = _starts(arena)
        self.batch_starts: Ints = _starts(config.batch_arena)
        self.fillers: Ints = np.array(arena.fillers, np.int32)
        self.null_starts: Ints = np.array([group.null_start for group in config.groups])
        self.blocks_per_kv_block: Ints = np.array([group.blocks_per_kv_block for group in config.groups])

        self.checks: Checks | None = None if config.check_plan is None else Checks(config, self.arena)
        self.findings: Ints | None = None if self.checks is None else self.checks.findings

    def collect_findings(self) -> None:
        """Everything that was found is there."""

    def reset_checks(self, *, stream: int | None) -> None:
        if self.checks is not None:
            self.checks.checker.fill(0)

    def write(self, writes: Writes, *, stream: int | None) -> None:
        apply_changes(writes.offsets, writes.lengths, writes.values, self.arena)

    def table(self, group: int) -> Ints:
        view: Ints = self.config.arena.view(self.arena, group)
        return view

    def create_buffers(self) -> NumpyBuffers:
        arena = self.config.batch_arena
        batch = arena.empty()
        slots = np.empty((arena.num_groups, self.config.max_num_batched_tokens), self.config.slot_dtype)
        slots[:] = np.array([group.pad_slot_id for group in self.config.groups], slots.dtype)[:, None]
        return NumpyBuffers(
            block_tables=tuple(arena.view(batch, group) for group in range(arena.num_groups)),
            slot_mappings=tuple(slots),
            batch=batch,
            held=arena.view(batch, -1),
        )

    def reset_buffers(self, out: StepBuffers, *, stream: int | None) -> None:
        assert isinstance(out, NumpyBuffers)
        out.batch[...] = self.config.batch_arena.empty()
        for group, slots in zip(self.config.groups, out.slot_mappings, strict=True):
            slots.fill(group.pad_slot_id)

    def gather(self, batch: Batch, out: StepBuffers, *, stream: int | None) -> None:
        assert isinstance(out, NumpyBuffers)
        rows, first_columns = self.rows_of(batch), self.first_columns(batch)
        fillers, batch_starts = self.fillers, self.batch_starts
        null_stale_columns(rows, self.filled, batch_starts, fillers, out.held, out.batch)
        table = (self.filled, self.arena, self.row_starts)
        gather_block_tables(rows, first_columns, *table, batch_starts, fillers, out.held, out.batch)

    def export(self, layout: Layout, batch: Batch, out: ExportBuffers, *, stream: int | None) -> None:
        kind, counts = layout.kind, out.counts
        rows, first_columns = self.rows_of(batch), self.first_columns(batch)
        if kind == "token_requests":
            map_requests(rows, host_array(batch.query_start_loc), _given(out.indptr), _given(out.entries))
            return
        seq_lens = None if batch.seq_lens is None else host_array(batch.seq_lens)
        group, max_batch = self.config.groups[out.groups[0]], out.max_batch
        tokens, table = group.tokens_per_column, (self.row_starts, self.arena, out.members)
        nulls = (self.null_starts, self.blocks_per_kv_block)
        if kind == "state":
            states = _given(out.entries).reshape(len(out.groups), max_batch, layout.num_columns)
            gather_state_indices(rows, seq_lens, self.filled, *table, *nulls, out.fills, tokens, layout, states)
            return
        lengths, part_columns = self._parts(batch, rows, group, out.num_cut)
        if kind == "ring":
            first_columns = self._first_columns_of_rings(batch, rows, lengths)
        count_entries(
            rows, lengths, part_columns, self.filled, out.members, out.width, tokens, kind, counts, out.lengths
        )
        columns = (first_columns, part_columns)
        if kind in ("csr", "token_csr", "block_requests"):
            indptr = _given(out.indptr)
            sizes = (rows.size, max_batch, out.capacity, 1 if kind == "token_csr" else tokens)
            start_requests(*sizes, _given(out.lengths), counts, indptr, _given(out.last_page_lens), _given(out.num_cut))
            write_indices(rows, *columns, *table, *nulls, out.fills, tokens, kind, counts, indptr, _given(out.entries))
        elif kind in ("table", "kv_offsets", "ring"):
            entries = _given(out.entries)
            write_table(rows, *columns, *table, *nulls, out.fills, max_batch, self.filled, layout, counts, entries)
        elif kind == "inverse_map":
            mapped, entries = _given(out.mapped), _given(out.entries)
            clear_inverse_map(max_batch, counts, mapped, out.fills, entries)
            write_inverse_map(rows, *columns, *table, *nulls, max_batch, counts, mapped, entries)

    def map_positions(self, rows: Any, group: int, positions: Any, out: Any, *, stream: int | None) -> None:
        spec, shard = self.config.groups[group], self.config.context_parallel
        map_positions(
            host_array(rows).astype(np.int64),
            host_array(positions),
            self.filled[group],
            self.table(group),
            spec.tokens_per_column,
            spec.blocks_per_kv_block,
            spec.slot_mode == "ring",
            spec.null_is_pad or spec.null_block_id < 0,
            spec.null_start,
            shard.world_size if spec.is_sharded else 1,
            shard.rank,
            shard.interleave_size,
            host_array(out),
        )

    def reset_export(self, out: ExportBuffers, *, stream: int | None) -> None:
        if out.entries is not None:
            for entries, fill in zip(out.entries, out.fills, strict=True):
                entries.fill(fill)
        for array in (out.counts, out.indptr, out.last_page_lens, out.lengths, out.mapped, out.num_cut):
            if array is not None:
                array.fill(0)

    def first_columns(self, batch: Batch) -> Ints:
        """Return [num_groups, num_reqs] int64, batch index -> columns that the window has passed (R11)."""
        first_columns = np.zeros((len(self.config.groups), batch.num_reqs), np.int64)
        if batch.num_computed_tokens is None:
            return first_columns
        computed = host_array(batch.num_computed_tokens).astype(np.int64)
        for columns, group in zip(first_columns, self.config.groups, strict=True):
            if group.cut_window is not None:
                tokens = np.maximum(0, computed - group.cut_window + 1)
                if group.is_sharded:
                    tokens = self.config.context_parallel.local_lengths(tokens)
                columns[:] = tokens // group.tokens_per_column
        return first_columns

    def _first_columns_of_rings(self, batch: Batch, rows: Ints, lengths: Ints) -> Ints:
        """Return [num_groups, num_reqs] int64, batch index -> columns of true positions that its ring has not (R35)."""
        first_columns = np.zeros((len(self.config.groups), batch.num_reqs), np.int64)
        for columns, group, filled in zip(first_columns, self.config.groups, self.filled, strict=True):
            tokens = group.tokens_per_column
            columns[:] = np.maximum(lengths - filled[rows].astype(np.int64) * tokens, 0) // tokens
            if batch.num_computed_tokens is not None and group.sliding_window is not None:
                computed = host_array(batch.num_computed_tokens).astype(np.int64)
                np.maximum(columns, np.maximum(0, computed - group.sliding_window + 1) // tokens, out=columns)
        return first_columns

    def rows_of(self, batch: Batch) -> Ints:
        """Return [num_reqs] int64, batch index -> row; -1 for a padding entry (R10.2)."""
        if batch.idx_mapping is None:
            return np.arange(batch.num_reqs)
        rows = host_array(batch.idx_mapping).astype(np.int64)  # a copy: what is checked must not change
        return np.where((rows >= 0) & (rows < self.config.num_rows), rows, np.int64(-1))

    def _parts(self, batch: Batch, rows: Ints, group: KVCacheGroup, num_cut: Ints | None) -> tuple[Ints, Ints]:
        """Return tokens of each request's part on this rank, and the column that it begins with (R27, R34).

        Args:
            num_cut: [1] int32. First tokens that are not a boundary are added.
        """
        lengths, firsts = (self._local(tokens, rows, group) for tokens in (batch.seq_lens, batch.first_tokens))
        tokens = group.tokens_per_column
        columns = firsts // tokens
        if num_cut is not None:
            rounded = np.count_nonzero(firsts % tokens)
            num_cut[0] = min(int(num_cut[0]) + rounded, np.iinfo(np.int32).max)
        return np.maximum(lengths - columns * tokens, 0), columns

    def _local(self, tokens: Any, rows: Ints, group: KVCacheGroup) -> Ints:
        """Return [num_reqs] int64, batch index -> how many of so many tokens this rank holds, 0 for a padding entry."""
        if tokens is None:
            return np.zeros(rows.size, np.int64)
        lengths: Ints = np.maximum(host_array(tokens).astype(np.int64), 0) * (rows >= 0)
        return self.config.context_parallel.local_lengths(lengths) if group.is_sharded else lengths


def _starts(arena: Arena) -> Ints:
    """Return [num_groups, num_rows] int64, row -> its first entry."""
    starts, widths = np.array(arena.group_offsets)[:, None], np.array(arena.widths)[:, None]
    rows: Ints = starts + widths * np.arange(arena.num_rows)
    return rows


def host_array(array: Any) -> Ints:
    """Return an input as a numpy array without a copy: a CPU tensor and the like come in through DLPack."""
    if isinstance(array, np.ndarray):
        return np.asarray(array)  # a class of its own may index and compare in its own way
    try:
        return np.from_dlpack(array)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"The numpy backend takes arrays on the host, got {type(array).__module__}.{type(array).__name__}: {error}"
        ) from error


def _given(array: Ints | None) -> Ints:
    assert array is not None  # the core's promise for this kind
    return array
