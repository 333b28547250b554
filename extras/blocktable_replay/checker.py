"""R10 to R15 once more, over a whole step at a time: what the batch tables and the slot buffers must hold.

Shares no code with a backend nor with the core's rows. It starts from manager blocks as the scheduler recorded them,
never from a table, so a fault of a row operation, of a commit and of a kernel all show.

A *record* is a pair of arrays for each group, `blocks` [n, capacity] manager ids and `counts` [n]; `handles`
[num_reqs] says which line of it each request of the batch has. A handle outside the record is a padding entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from blocktable import BlockTableConfig, KVCacheGroup
from blocktable.typing import IntArray
from blocktable_replay.record import BlockRecord

MAX_NAMED = 5
"""Mismatches of one buffer in one step that are named; all are counted."""


def local_index(config: BlockTableConfig, group: int, positions: IntArray) -> tuple[IntArray, IntArray]:
    """Return each token's index among its owner's tokens, and whether this rank is the owner (R12).

    Args:
        positions: [n] int64, at least 0.

    Returns:
        [n] int64 and [n] bool.
    """
    shard = config.context_parallel
    if not config.groups[group].is_sharded or shard.world_size == 1:
        return positions, np.ones(positions.shape, np.bool_)
    round_tokens = shard.world_size * shard.interleave_size
    rounds, within = np.divmod(positions, round_tokens)
    return (
        rounds * shard.interleave_size + within % shard.interleave_size,
        within // shard.interleave_size == shard.rank,
    )


def expected_slots(
    config: BlockTableConfig,
    group: int,
    blocks: IntArray,
    counts: IntArray,
    handles: IntArray,
    query_start_loc: IntArray,
    positions: IntArray,
    size: int,
    *,
    is_named: bool = False,
) -> IntArray:
    """Return what a group's slot buffer must hold after `compute_slot_mappings`.

    Args:
        blocks: [n, capacity] int32. Manager ids of each line of the record; `record.NULLED` for one released.
        counts: [n] int64. Manager blocks of each line.
        handles: [num_reqs] integers. Batch index -> line of the record; outside of it: a padding entry.
        query_start_loc: [num_reqs + 1] int32, not decreasing.
        positions: [>= num_tokens] int64.
        size: entries of the buffer.
        is_named: whether the call names the group.

    Returns:
        [size] int64.

    Rules: R12, R13, R14, R15.
    """
    geometry = config.groups[group]
    slots = np.full(size, geometry.pad_slot_id, np.int64)
    last = min(int(query_start_loc[-1]), positions.size, size)
    first = max(int(query_start_loc[0]), 0)
    has_slots = geometry.slot_mode != "none" and (geometry.slot_mode != "cross" or is_named)
    if not has_slots or last <= first:
        return slots
    starts = np.clip(query_start_loc, first, last)
    lengths = np.diff(starts)
    handle = np.repeat(handles, lengths).astype(np.int64, copy=False)
    position = positions[first:last]
    has_line = (handle >= 0) & (handle < counts.size)
    line = np.where(has_line, handle, 0)
    num_tokens = np.where(has_line, counts[line], 0) * geometry.block_size
    is_written = position >= 0
    if geometry.slot_mode == "ring":
        index = position % np.maximum(num_tokens, 1)
        # Of tokens that share a place the last one of the call is written.
        last_position = np.repeat(positions[np.maximum(starts[1:] - 1, 0)], lengths)
        is_written &= np.maximum(last_position, 0) - np.maximum(position, 0) < num_tokens
    else:
        index, is_owner = local_index(config, group, np.maximum(position, 0))
        is_written &= is_owner
    is_written &= index < num_tokens
    place = np.where(is_written, index // geometry.block_size, 0)
    block = blocks[line, place].astype(np.int64)
    # A block stands whole, kernel block after kernel block; of a null, handed in or released, each is the filler.
    is_null = (block < 0) | (block == geometry.null_block_id)
    slot = np.where(
        is_null,
        geometry.filler * geometry.tokens_per_column + index % geometry.tokens_per_column,
        block * geometry.block_size + index % geometry.block_size,
    )
    if geometry.null_is_pad or geometry.null_block_id < 0:
        is_written &= ~is_null
    slots[first:last] = np.where(is_written, slot, geometry.pad_slot_id)
    return slots


def expected_block_table(
    config: BlockTableConfig,
    group: int,
    blocks: IntArray,
    counts: IntArray,
    handles: IntArray,
    num_computed_tokens: IntArray | None = None,
) -> IntArray:
    """Return what the batch table's first rows must hold up to the longest one; all after it is NULL.

    Args:
        blocks, counts, handles: as `expected_slots`.
        num_computed_tokens: [num_reqs] int32. None: no window is cut out.

    Returns:
        [num_reqs, the most columns that a request fills] int32. Columns after these, and rows after num_reqs, hold the
        filler.

    Rules: R2, R5, R10, R11.
    """
    geometry = config.groups[group]
    has_line = (handles >= 0) & (handles < counts.size)
    line = np.where(has_line, handles, 0)
    num_blocks = np.where(has_line, counts[line], 0)
    longest = int(num_blocks.max(initial=0))
    expansion = geometry.blocks_per_kv_block
    table = np.full((handles.size, longest * expansion), geometry.filler, np.int32)
    # Row by row: one request may be many times longer than the others, and cost should follow what rows hold.
    for row, (held, count) in enumerate(zip(line.tolist(), num_blocks.tolist(), strict=True)):
        _expand(blocks[held, :count], geometry, table[row, : count * expansion])
    if geometry.cut_window is not None and num_computed_tokens is not None:
        left = _columns_left_behind(config, group, num_computed_tokens.astype(np.int64))
        if left.any():
            table = np.where(np.arange(table.shape[1]) < left[:, None], np.int32(geometry.filler), table)
    return table


def _expand(blocks: IntArray, geometry: KVCacheGroup, columns: IntArray) -> None:
    """Write the kernel blocks of manager blocks; of a null, handed in or released, each is the filler (R2, R5, R7)."""
    expansion = geometry.blocks_per_kv_block
    kernel_blocks = blocks[:, None] * np.int32(expansion) + np.arange(expansion, dtype=np.int32)
    kernel_blocks[(blocks < 0) | (blocks == geometry.null_block_id)] = geometry.filler
    columns[:] = kernel_blocks.ravel()


def _columns_left_behind(config: BlockTableConfig, group: int, num_computed_tokens: IntArray) -> IntArray:
    geometry = config.groups[group]
    assert geometry.sliding_window is not None
    first_token = np.maximum(num_computed_tokens - geometry.sliding_window + 1, 0)
    shard = config.context_parallel
    if geometry.is_sharded and shard.world_size > 1:
        rounds, within = np.divmod(first_token, shard.world_size * shard.interleave_size)
        own = np.minimum(np.maximum(within - shard.rank * shard.interleave_size, 0), shard.interleave_size)
        first_token = rounds * shard.interleave_size + own
    columns: IntArray = first_token // geometry.tokens_per_column
    return columns


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """What one call must give, for every group that it writes, and what a message calls the members of its batch.

    Attributes:
        block_tables: as `expected_block_table` returns them.
        table_shapes: (num_reqs_padded, width) of each batch table.
        fillers: what an entry of each batch table without a block holds.
        slot_mappings: group -> its whole buffer, as `expected_slots` returns it, in the order of the call.
        query_start_loc: [num_reqs + 1] int32.
        positions: [num_tokens] int64.
        requests: [num_reqs] integers. Number of each request, -1 for a padding entry.
        rows: [num_reqs] integers. Row of each request in the table.
    """

    block_tables: tuple[IntArray, ...]
    table_shapes: tuple[tuple[int, int], ...]
    fillers: tuple[int, ...]
    slot_mappings: Mapping[int, IntArray]
    query_start_loc: IntArray
    positions: IntArray
    requests: IntArray
    rows: IntArray


def expected_step(
    config: BlockTableConfig,
    record: BlockRecord,
    handles: IntArray,
    call: str,
    arguments: Mapping[str, Any],
    requests: IntArray,
    rows: IntArray,
) -> ExpectedStep:
    """Return what a call must put out.

    Args:
        record: what the rows hold as of the last commit.
        handles: as `expected_slots`.
        call: the method, one of `OUTPUT_CALLS`.
        arguments: parameter -> value, arrays on the host.
        requests, rows: as `ExpectedStep`.
    """
    starts, positions = arguments.get("query_start_loc"), arguments.get("positions")
    starts = np.zeros(1, np.int32) if starts is None else starts
    positions = np.empty(0, np.int64) if positions is None else positions
    padded = arguments.get("num_reqs_padded")
    padded = handles.size if padded is None else padded
    groups = () if call == "compute_slot_mappings" else range(len(config.groups))
    is_named, computed = arguments.get("groups") is not None, arguments.get("num_computed_tokens")
    held = [(config, group, record.blocks[group], record.counts[group], handles) for group in range(len(config.groups))]
    return ExpectedStep(
        block_tables=tuple(expected_block_table(*held[group], computed) for group in groups),
        table_shapes=tuple((padded, config.arena.widths[group]) for group in groups),
        fillers=tuple(config.arena.fillers[group] for group in groups),
        slot_mappings={
            group: expected_slots(*held[group], starts, positions, size, is_named=is_named)
            for group, size in slot_sizes(config, call, arguments).items()
        },
        query_start_loc=starts,
        positions=positions,
        requests=requests,
        rows=rows,
    )


def slot_sizes(config: BlockTableConfig, call: str, arguments: Mapping[str, Any]) -> dict[int, int]:
    """Return the entries of the slot array of each group whose slots a call puts out, in the order of the call."""
    if call == "gather":
        return {}
    groups, out = arguments.get("groups"), arguments["out"]
    chosen = range(len(config.groups)) if groups is None else np.atleast_1d(groups).tolist()
    sizes = [config.max_num_batched_tokens] * len(chosen) if isinstance(out, int) else out
    return dict(zip(chosen, sizes, strict=True))


def compare_slots(expected: ExpectedStep, group: int, got: IntArray) -> tuple[int, list[str]]:
    """Return how many entries of a whole slot buffer are wrong, and the first ones as sentences."""
    wanted = expected.slot_mappings[group]
    if got.shape != wanted.shape:
        return 1, [_sentence(f"group {group}, slot buffer: number of entries", "R3", wanted.size, got.size)]
    if np.array_equal(got, wanted):
        return 0, []
    wrong = np.flatnonzero(got != wanted)
    return wrong.size, [
        _sentence(*_name_token(expected, group, token), wanted[token], got[token])
        for token in wrong[:MAX_NAMED].tolist()
    ]


def _name_token(expected: ExpectedStep, group: int, token: int) -> tuple[str, str]:
    """Return what a token is, and the rules that say its slot."""
    index = int(np.searchsorted(expected.query_start_loc, token, side="right")) - 1
    if not 0 <= index < expected.rows.size or token >= expected.positions.size:
        return f"group {group}, token {token}, after the last real token", "R15"
    return (
        f"group {group}, token {token}, request {expected.requests[index]} (batch index {index}, row "
        f"{expected.rows[index]}), position {expected.positions[token]}"
    ), "R12, R13"


def compare_block_table(expected: ExpectedStep, group: int, got: IntArray) -> tuple[int, list[str]]:
    """Return how many entries of a whole batch table are wrong, and the first ones as sentences.

    Args:
        got: [num_reqs_padded, width] int32.
    """
    wanted, filler = expected.block_tables[group], expected.fillers[group]
    num_reqs, columns = wanted.shape
    for axis, (name, rule) in enumerate((("rows", "R10.4"), ("columns", "R3"))):
        size = expected.table_shapes[group][axis]
        if got.ndim != 2 or got.shape[axis] != size:
            return 1, [_sentence(f"group {group}, batch table: number of {name}", rule, size, got.shape[axis])]
    is_right = (
        np.array_equal(got[:num_reqs, :columns], wanted)
        and (got[:num_reqs, columns:] == filler).all()
        and (got[num_reqs:] == filler).all()
    )
    if is_right:
        return 0, []
    whole = np.full(got.shape, filler, np.int64)
    whole[:num_reqs, :columns] = wanted
    wrong = np.argwhere(got != whole)
    return len(wrong), [
        _sentence(*_name_entry(expected, group, row, column), whole[row, column], got[row, column])
        for row, column in wrong[:MAX_NAMED].tolist()
    ]


def _name_entry(expected: ExpectedStep, group: int, index: int, column: int) -> tuple[str, str]:
    """Return where an entry of a batch table is, and the rules that it breaks when it is wrong."""
    if index >= expected.rows.size:
        return f"group {group}, batch row {index} (padding), column {column}", "R10.3"
    request, row = expected.requests[index], expected.rows[index]
    rule = "R10.2" if request < 0 else "R10.1, R11"
    return f"group {group}, request {request} (batch index {index}, row {row}), column {column}", rule


def _sentence(where: str, rule: str, expected: int, got: int) -> str:
    return f"{where}: expected {expected}, got {got} ({rule})"
