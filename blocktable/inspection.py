"""Looking into a table: the device against the host, what a slot is, what rows hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blocktable.config import BlockTableConfig
from blocktable.errors import ArgumentError, BlockTableError
from blocktable.host_path import HostPath
from blocktable.protocols import Backend, BlockStore, IntArray

FIRST_LOOK = 64
"""Blocks of each row that `num_common_blocks` compares first; then four times as many, and so on."""


@dataclass(frozen=True, slots=True)
class SlotLocation:
    """Where a slot lies, and which rows hold its block.

    Attributes:
        block_id: manager block.
        kernel_block_id: kernel block.
        offset: the token's place in the kernel block.
        rows: (row, block index in that row, position of the token there) for every row that holds the block.
    """

    block_id: int
    kernel_block_id: int
    offset: int
    rows: tuple[tuple[int, int, int], ...]


def verify(config: BlockTableConfig, backend: Backend, store: BlockStore, rows: HostPath) -> None:
    """Do what `BlockTable.verify` says."""
    arena = config.arena
    pending = np.zeros(arena.size, np.bool_)
    for offset, length in zip(*(array.tolist() for array in rows.pending_ranges()), strict=True):
        pending[offset : offset + length] = True
    for group in range(-1, len(config.groups)):
        expected = arena.view(rows.mirror, group)
        got = backend.to_host(store.table(group))
        wrong = np.argwhere((got != expected) & ~arena.view(pending, group))
        if wrong.size:
            row, column = wrong[0]
            where = (
                f"group {row}, filled columns of row {column}"
                if group < 0
                else f"group {group}, row {row}, column {column}"
            )
            raise BlockTableError(
                f"The device differs from the host at {where}: it holds {got[row, column]}, the host "
                f"{expected[row, column]}; {len(wrong)} entries differ there (R9.1)."
            )


def locate(config: BlockTableConfig, rows: HostPath, group: int, slot: int) -> SlotLocation:
    """Do what `BlockTable.locate` says, for a group that exists."""
    geometry = config.groups[group]
    tokens, expansion = geometry.tokens_per_column, geometry.blocks_per_kv_block
    if geometry.slot_mode == "none":
        raise ArgumentError(f'group {group} has slot_mode="none": it has no slots.')
    is_pad = slot == geometry.pad_slot_id
    if is_pad or not 0 <= slot < geometry.block_id_limit * geometry.block_size:
        meaning = " (pad_slot_id, no slot)" if is_pad else ""
        raise ArgumentError(f"slot {slot}{meaning} is outside the cache of group {group}.")
    kernel_block_id, offset = divmod(slot, tokens)
    found_rows, columns = np.nonzero(config.arena.view(rows.mirror, group) == kernel_block_id)
    held = columns < rows.filled[group][found_rows]
    return SlotLocation(
        kernel_block_id // expansion,
        kernel_block_id,
        offset,
        tuple(
            (row, column // expansion, _position(config, group, column * tokens + offset))
            for row, column in zip(found_rows[held].tolist(), columns[held].tolist(), strict=True)
        ),
    )


def _position(config: BlockTableConfig, group: int, local: int) -> int:
    if not config.groups[group].is_sharded:
        return local
    shard = config.context_parallel
    turn, offset = divmod(local, shard.interleave_size)
    return turn * shard.world_size * shard.interleave_size + shard.rank * shard.interleave_size + offset


def block_ids_of(config: BlockTableConfig, rows: HostPath, row: int, group: int) -> IntArray:
    """Do what `BlockTable.block_ids` says, for a row and a group that exist."""
    expansion = config.groups[group].blocks_per_kv_block
    # The first column of each block. A hole is the filler in all columns: the null block's first one, or -1.
    firsts = config.arena.view(rows.mirror, group)[row, : rows.filled[group, row] : expansion]
    ids: IntArray = firsts // expansion
    return ids


def num_common_blocks(config: BlockTableConfig, rows: HostPath, chosen: IntArray, group: int) -> int:
    """Do what `BlockTable.common_blocks` says, for rows [n] int64 of the table and a group that exists."""
    if not chosen.size:
        return 0
    expansion = config.groups[group].blocks_per_kv_block
    firsts = config.arena.view(rows.mirror, group)[:, ::expansion]
    end = int(rows.filled[group, chosen].min()) // expansion
    null, start, size = config.groups[group].null_block_id, 0, FIRST_LOOK
    while start < end:
        ids = firsts[chosen, start : min(start + size, end)] // expansion
        is_common = (ids == ids[0]).all(0) & (ids[0] != null)
        if not is_common.all():
            return start + int(is_common.argmin())
        start, size = start + size, 4 * size
    return end
