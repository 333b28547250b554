"""Exports on the host, from the mirror, and how many entries a batch of host arrays has (R27, R34, R37)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from blocktable.arrays import IntArray
from blocktable.config import INT32_LIMIT, BlockTableConfig, KVCacheGroup
from blocktable.errors import ArgumentError
from blocktable.exports import (
    CSR_KINDS,
    Export,
    check_groups_of,
    check_sizes,
    export_width,
    fill_of,
    most_entries,
    num_kernel_blocks_of,
    shaped,
)
from blocktable.host_path import HostPath
from blocktable.layouts import Layout
from blocktable.protocols import Batch, ExportBuffers, ranges


class Counted(NamedTuple):
    """What each request of a batch exports.

    Attributes:
        rows: [num_reqs] int64. Its row; 0 for a padding entry.
        is_row: [num_reqs] bool. Whether it is in the table: not a padding entry.
        lengths: [num_reqs] int64. Tokens of its part that this rank holds.
        first_columns: [num_reqs] int64. Column of its row that its part begins with.
        counts: [num_reqs] int64. Its entries.
    """

    rows: IntArray
    is_row: IntArray
    lengths: IntArray
    first_columns: IntArray
    counts: IntArray


def count_entries(
    config: BlockTableConfig, filled: IntArray, layout: Layout, groups: Sequence[int], batch: Batch
) -> Counted:
    """Count what a batch of host arrays exports.

    Args:
        config: the geometry.
        filled: [num_groups, num_rows] int32. Columns in use.
        layout: the layout.
        groups: of the export.
        batch: the inputs.
    """
    given = _mapping(batch)
    is_row = (given >= 0) & (given < config.num_rows)
    rows = np.where(is_row, given, 0).astype(np.int64)
    spec, width = config.groups[groups[0]], export_width(config, layout, groups[0])
    tokens = spec.tokens_per_column
    columns = np.maximum(filled[list(groups)].min(0), 0)[rows].astype(np.int64) * is_row
    lengths = _local(config, spec, batch.seq_lens, batch.num_reqs) * is_row
    first_columns = _local(config, spec, batch.first_tokens, batch.num_reqs) * is_row // tokens
    lengths = np.maximum(lengths - first_columns * tokens, 0)
    pages = -(-lengths // tokens)
    if layout.kind == "ring":
        counts = np.minimum(pages, width) * (columns > 0)
    else:
        counts = np.maximum(np.minimum(columns, width) - first_columns, 0)
        if layout.kind == "token_csr":
            counts = np.minimum(lengths, counts * tokens)
        elif layout.kind in ("csr", "block_requests", "inverse_map"):
            counts = np.minimum(pages, counts)
    return Counted(rows, is_row, lengths, first_columns, counts)


def _local(config: BlockTableConfig, spec: KVCacheGroup, tokens: IntArray | None, num_reqs: int) -> IntArray:
    """Return how many of the first tokens of each request this rank holds, [num_reqs] int64; 0 where none are given."""
    if tokens is None:
        return np.zeros(num_reqs, np.int64)
    lengths: IntArray = np.maximum(tokens, 0).astype(np.int64)
    return config.context_parallel.local_lengths(lengths) if spec.is_sharded else lengths


def check_capacity(config: BlockTableConfig, filled: IntArray, batch: Batch, out: ExportBuffers) -> None:
    """Refuse a batch of host arrays whose entries `capacity` would cut; of device arrays the kernels count them.

    Args:
        config: the geometry.
        filled: [num_groups, num_rows] int32. Columns in use, as of the last commit.
        batch: what is exported.
        out: where to.

    Rules: R27, R35.
    """
    layout, starts = out.layout, batch.query_start_loc
    if layout.kind == "token_requests":
        if type(starts) is np.ndarray and int(starts[-1]) > out.capacity:
            raise ArgumentError(
                f"query_start_loc ends at {int(starts[-1])} tokens, the set of {layout.name!r} holds {out.capacity}: "
                "make one with a larger capacity."
            )
        return
    if layout.kind not in CSR_KINDS:
        return
    if out.capacity >= most_entries(config, layout, out.groups) and out.max_batch <= config.max_num_reqs:
        return
    arrays = (batch.seq_lens, batch.idx_mapping, batch.first_tokens)
    if not all(array is None or type(array) is np.ndarray for array in arrays):
        return
    total = int(count_entries(config, filled, layout, out.groups, batch).counts.sum())
    if total > out.capacity:
        raise ArgumentError(
            f"{layout.name!r} of this batch holds {total} entries, but capacity is {out.capacity}: "
            f"{total - out.capacity} would be left out; make the set with create_export(capacity={total}) or more."
        )


def export_on_host(
    config: BlockTableConfig,
    rows: HostPath,
    layout: Layout,
    groups: tuple[int, ...],
    batch: Batch,
    num_tokens: int | None,
) -> Export:
    """Do what `BlockTable.export_host` says, for arguments that were checked."""
    check_groups_of(config, layout, groups)
    is_bounded = batch.num_reqs_padded <= config.max_num_reqs and most_entries(config, layout, groups) < INT32_LIMIT
    is_unlike_a_set = layout.kind in CSR_KINDS and not is_bounded
    most, _ = check_sizes(config, layout, groups, INT32_LIMIT - 1 if is_unlike_a_set else None, None)
    padded, kind = batch.num_reqs_padded, layout.kind
    fills = [fill_of(config, layout, group) for group in groups]
    if kind == "placeholder":
        return Export(layout, tuple(np.zeros((padded, 1), np.int32) for _ in groups))
    mirror = rows.mirror
    if kind == "state":
        return Export(
            layout, tuple(_states(config, mirror, layout, g, batch, f) for g, f in zip(groups, fills, strict=True))
        )
    counted = count_entries(config, rows.filled, layout, groups, batch)
    if kind == "token_requests":
        return _token_requests(layout, batch, counted, len(groups), most, num_tokens)
    lengths = _padded(counted.lengths, padded)
    if kind == "lengths":
        return Export(layout, (), lengths=lengths)
    shown = [
        _entries(config, mirror, rows.filled, layout, g, batch, counted, f) for g, f in zip(groups, fills, strict=True)
    ]
    if kind not in CSR_KINDS:
        widths = export_width(config, layout, groups[0]), num_kernel_blocks_of(config, layout, groups)
        tables = (_table(layout, padded, counted, *parts, *widths) for parts in zip(shown, fills, strict=True))
        return Export(layout, tuple(shaped(table, layout) for table in tables))
    ends = counted.counts.cumsum(dtype=np.int64)
    total = int(ends[-1]) if ends.size else 0
    if total >= INT32_LIMIT:
        raise ArgumentError(f"{layout.name!r} of this batch holds {total} entries, too many for int32.")
    indptr = np.full(padded + 1, total, np.int32)
    indptr[0], indptr[1 : ends.size + 1] = 0, ends
    page = 1 if kind == "token_csr" else config.groups[groups[0]].tokens_per_column
    last = np.minimum(counted.lengths - (counted.counts - 1) * page, page) * (counted.counts > 0)
    whole = tuple(
        _flat(entries, fill, most if is_bounded else total) for entries, fill in zip(shown, fills, strict=True)
    )
    return Export(layout, whole, indptr, _padded(last, padded), lengths)


def _padded(values: IntArray, size: int) -> IntArray:
    """Return [size] int32: the values, and 0 after them."""
    whole = np.zeros(size, np.int32)
    whole[: values.size] = values
    return whole


def _flat(entries: IntArray, fill: int, size: int) -> IntArray:
    """Return [size] int32: the entries, and the fill after them. Memory of zeros costs nothing until it is read."""
    whole = np.full(size, fill, np.int32) if fill else np.zeros(size, np.int32)
    whole[: entries.size] = entries
    return whole


def _token_requests(
    layout: Layout, batch: Batch, counted: Counted, num_groups: int, capacity: int, num_tokens: int | None
) -> Export:
    """Return the request of each token (R35)."""
    given: Any = batch.query_start_loc
    size = capacity if num_tokens is None else num_tokens
    if int(given[-1]) > capacity or size > capacity:
        raise ArgumentError(
            f"A batch of {int(given[-1])} tokens, {size} of them returned, is above max_num_batched_tokens {capacity}."
        )
    starts = np.clip(given, 0, capacity)
    indptr = np.full(batch.num_reqs_padded + 1, starts[-1], np.int32)
    indptr[: starts.size] = starts
    requests = np.full(capacity, -1, np.int32)
    numbers = np.where(counted.is_row, np.arange(batch.num_reqs), -1)
    spans = np.diff(np.maximum.accumulate(starts))
    requests[starts[0] : starts[0] + spans.sum()] = np.repeat(numbers, spans)
    return Export(layout, tuple(requests[:size].copy() for _ in range(num_groups)), indptr)


def _entries(
    config: BlockTableConfig,
    mirror: IntArray,
    filled: IntArray,
    layout: Layout,
    group: int,
    batch: Batch,
    counted: Counted,
    fill: int,
) -> IntArray:
    """Return what each request exports of a group, one request after another, [sum(counts)] int64."""
    spec, counts = config.groups[group], counted.counts
    request = np.repeat(np.arange(counts.size), counts)
    if layout.kind == "block_requests":
        return request
    place = ranges(np.zeros(counts.size, np.int64), counts)
    tokens = spec.tokens_per_column
    by_token = layout.kind == "token_csr"
    column = counted.first_columns[request] + (place // tokens if by_token else place)
    first = _first_shown(config, spec, layout.kind, batch)
    source = column
    if layout.kind == "ring":
        ring = filled[group][counted.rows].astype(np.int64)
        first = np.maximum(first, np.maximum(counted.lengths - ring * tokens, 0) // tokens)
        source = column % np.maximum(ring, 1)[request]
    entry = config.arena.view(mirror, group)[counted.rows[request], source].astype(np.int64)
    is_missing = _is_missing(spec, entry) | (column < first[request])
    if by_token:
        entry = entry * tokens + place % tokens
        return np.where(is_missing, fill + place % tokens, entry)
    return np.where(is_missing, fill, entry * layout.entry_scale)


def _is_missing(spec: KVCacheGroup, entry: IntArray) -> IntArray:
    found: IntArray = (entry >= spec.null_start) & (entry < spec.null_start + spec.blocks_per_kv_block)
    return found


def _first_shown(config: BlockTableConfig, spec: KVCacheGroup, kind: str, batch: Batch) -> IntArray:
    """Return the first column that a window has not passed, [num_reqs] int64 (R11, R35)."""
    window = spec.sliding_window if kind == "ring" else spec.cut_window
    if batch.num_computed_tokens is None or window is None:
        return np.zeros(batch.num_reqs, np.int64)
    first = batch.num_computed_tokens.astype(np.int64) - window + 1
    return _local(config, spec, first, batch.num_reqs) // spec.tokens_per_column


def _table(
    layout: Layout, num_rows: int, counted: Counted, entries: IntArray, fill: int, width: int, num_kernel_blocks: int
) -> IntArray:
    """Return batch rows as a table, as K and V rows, or as maps."""
    counts = counted.counts
    request = np.repeat(np.arange(counts.size), counts)
    place = ranges(np.zeros(counts.size, np.int64), counts)
    if layout.kind == "inverse_map":
        columns = np.full((num_rows, num_kernel_blocks), fill, np.int32)
        is_mapped = (entries >= 0) & (entries < num_kernel_blocks)
        where = request[is_mapped], entries[is_mapped]
        np.maximum.at(columns, where, (counted.first_columns[request] + place)[is_mapped].astype(np.int32))
        return columns
    if layout.kind == "kv_offsets":
        pairs = np.full((num_rows, 2, width), fill, np.int32)
        pairs[request, 0, place], pairs[request, 1, place] = entries, entries + layout.value_offset
        return pairs
    table = np.full((num_rows, width), fill, layout.dtype)
    table[request, place] = entries
    return table


def _mapping(batch: Batch) -> IntArray:
    """Return [num_reqs] int64, batch index -> row, as given; a copy: what is checked must not change."""
    given = batch.idx_mapping
    rows: IntArray = np.arange(batch.num_reqs) if given is None else given.astype(np.int64)
    return rows


def _states(
    config: BlockTableConfig, mirror: IntArray, layout: Layout, group: int, batch: Batch, fill: int
) -> IntArray:
    """Return the blocks that hold each request's states (R31)."""
    spec, arena = config.groups[group], config.arena
    given = _mapping(batch)
    is_row = (given >= 0) & (given < config.num_rows)
    rows = np.where(is_row, given, 0)
    columns = arena.view(mirror, -1)[group][rows].astype(np.int64) * is_row
    first = np.zeros(batch.num_reqs, np.int64)
    if layout.state_columns == "last":
        first = np.maximum(columns - layout.num_columns, 0)
    elif layout.state_columns == "aligned":
        seq_lens: Any = batch.seq_lens
        first = np.maximum(seq_lens.astype(np.int64) - 1, 0) // spec.tokens_per_column
    column = first[:, None] + np.arange(layout.num_columns)
    is_held = column < columns[:, None]
    entry = arena.view(mirror, group)[rows[:, None], np.where(is_held, column, 0)]
    states = np.full((batch.num_reqs_padded, layout.num_columns), fill, layout.dtype)
    states[: batch.num_reqs] = np.where(is_held & ~_is_missing(spec, entry), entry, fill)
    return states[:, 0].copy() if layout.state_columns == "first" else states
