"""Looking into a table: the device against the host, what a slot is, what rows hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from blocktable.arrays import Array, IntArray, Ints
from blocktable.checking import Checker, CheckMode
from blocktable.checking.reasons import SlotReason, slot_reason
from blocktable.checks import int_scalar
from blocktable.config import BlockTableConfig
from blocktable.errors import ArgumentError, BlockTableError, UnsupportedError
from blocktable.findings import Finding
from blocktable.host_path import HostPath
from blocktable.protocols import Backend, BlockStore

FIRST_LOOK = 64
"""Blocks of each row that `common_blocks` compares first; then four times as many, and so on."""


class SlotHolder(NamedTuple):
    """A row that holds the block of a slot.

    Attributes:
        row: the row.
        block_index: place of the block in the row, in manager blocks.
        position: of the token there.
    """

    row: int
    block_index: int
    position: int


@dataclass(frozen=True, slots=True)
class SlotLocation:
    """Where a slot lies, and which rows hold its block.

    Attributes:
        block_id: manager block.
        kernel_block_id: kernel block.
        offset: the token's place in the kernel block.
        rows: every row that holds the block, and where.
    """

    block_id: int
    kernel_block_id: int
    offset: int
    rows: tuple[SlotHolder, ...]


class Inspection:
    """What a table says of its rows, and of its device's copy of them. Nothing here changes either.

    Attributes:
        config: the geometry.
        backend: the backend object.
        device: what the backend calls a device.
        store: the backend's memory.
        check: the mode of the checker.
    """

    config: BlockTableConfig
    backend: Backend
    device: Any
    store: BlockStore
    check: CheckMode
    _rows: HostPath
    _checker: Checker | None

    def __repr__(self) -> str:
        """Return one line: geometry, backend and state. It does not wait for the device."""
        config, shard = self.config, self.config.context_parallel
        kinds = Counter((group.block_size, config.width(i)) for i, group in enumerate(config.groups))
        groups = ", ".join(f"{n} of block size {size} and width {width}" for (size, width), n in kinds.items())
        parts = [
            f"groups: {groups}",
            *([f"rank {shard.rank} of {shard.world_size}"] if shard.world_size > 1 else []),
            f"backend {self.backend.name!r}" + ("" if self.device is None else f" on {self.device!s}"),
            f"check {self.check!r}",
            f"{np.count_nonzero(self._rows.filled.any(0))} of {config.num_rows} rows in use",
            "changes pending" if self._rows.has_changes else "no changes pending",
        ]
        return f"<BlockTable {'; '.join(parts)}>"

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The first findings of the checker, in order, `MAX_FINDINGS` at most; `num_findings` counts all (R38)."""
        return () if self._checker is None else tuple(self._checker.findings.kept)

    @property
    def num_findings(self) -> int:
        """All findings of the checker so far, those too that are not kept (R38)."""
        return 0 if self._checker is None else self._checker.findings.count

    def collect_findings(self) -> tuple[Finding, ...]:
        """Wait for what the device still has to tell, and return the findings: the last line of a test.

        Raises:
            CheckError: the device tells of one that must be raised.

        Rules: R38.
        """
        if self._checker is not None:
            self._checker.collect()
        return self.findings

    def why(self, row: int, group: int, position: int) -> SlotReason:
        """Return why a token would have its slot, or none, with the rows as they are now on the host.

        Args:
            row: any int; one outside the table is a padding entry.
            group: the group.
            position: of the token in its request.

        Raises:
            ArgumentError, DtypeError: there is no such group; no ints.

        Rules: R12, R13.
        """
        index, number, place = self._group_index(group), int_scalar("row", row), int_scalar("position", position)
        return slot_reason(self.config, self._rows.mirror, number, index, place)

    def block_ids(self, row: int, group: int) -> IntArray:
        """Return the manager ids that a row holds now, as they were given; a hole has the group's null_block_id.

        Returns:
            [n] int32. A copy.

        Raises:
            RowIndexError, ArgumentError, DtypeError: there is no such row or group.

        Rules: R2, R4.
        """
        columns = self.host_row(group, row)
        # The first column of each block. A hole is the filler in all columns: the null block's first one, or -1.
        expansion = self.config.groups[group].blocks_per_kv_block
        ids: IntArray = columns[::expansion] // expansion
        return ids

    def common_blocks(self, rows: Ints, group: int) -> int:
        """Return how many leading manager blocks all of some rows share now (a shared prefix, for cascade attention).

        The count ends before the first block that differs, that a row does not hold, or that is NULL.

        Args:
            rows: [n] ints. Rows; they may repeat. Of no rows the result is 0.
            group: the group.

        Raises:
            RowIndexError, ArgumentError, DtypeError: a bad argument.

        Rules: R2, R4.
        """
        chosen, group = self._rows.check_rows("rows", rows, advice=None), self._group_index(group)
        if not chosen.size:
            return 0
        expansion = self.config.groups[group].blocks_per_kv_block
        firsts = self._table(group)[:, ::expansion]
        end = int(self._rows.filled[group, chosen].min()) // expansion
        null, start, size = self.config.groups[group].null_block_id, 0, FIRST_LOOK
        while start < end:
            ids = firsts[chosen, start : min(start + size, end)] // expansion
            is_common = (ids == ids[0]).all(0) & (ids[0] != null)
            if not is_common.all():
                return start + int(is_common.argmin())
            start, size = start + size, 4 * size
        return end

    @property
    def num_blocks_per_row(self) -> IntArray:
        """[num_groups, num_rows] int32, read-only. Manager blocks that each row holds now, on the host."""
        blocks = (self._rows.filled // self._rows.columns_per_block).astype(np.int32)
        blocks.flags.writeable = False
        return blocks

    def host_table(self, group: int) -> IntArray:
        """Return a group's rows on the host, [num_rows, width] int32, as a read-only view that follows changes."""
        view: IntArray = self.config.arena.view(self._rows.live_mirror(), self._group_index(group)).view()
        view.flags.writeable = False
        return view

    def host_row(self, group: int, row: int) -> IntArray:
        """Return a copy of the columns that a row holds now, [n] int32, on the host."""
        (number,) = self._rows.one_row("row", row)
        return self._table(group)[number, : self._rows.filled[group, number]].copy()

    def _table(self, group: int) -> IntArray:
        view: IntArray = self.config.arena.view(self._rows.mirror, self._group_index(group))
        return view

    def device_table(self, group: int) -> Array:
        """Return a group's rows on the device, [num_rows, width] int32, without a copy; callers only read."""
        return self.store.table(self._group_index(group))

    def verify(self) -> None:
        """Wait for the device and compare it with the host as of the last commit; pending entries are not compared.

        Raises:
            BlockTableError: naming the first entry that differs.

        Rules: R5, R9.1.
        """
        arena, rows = self.config.arena, self._rows
        pending = np.zeros(arena.size, np.bool_)
        for offset, length in zip(*(array.tolist() for array in rows.pending_ranges()), strict=True):
            pending[offset : offset + length] = True
        for group in range(-1, len(self.config.groups)):
            expected = arena.view(rows.mirror, group)
            got = self.backend.to_host(self.store.table(group))
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

    def locate(self, group: int, slot: int) -> SlotLocation:
        """Say where a slot lies and which rows hold its block now, on the host. For debugging: it searches the table.

        In a ring group the position is the smallest one that the slot can stand for.

        Raises:
            ArgumentError: the group has no such slot (PAD, or past the last block).

        Rules: R2, R12.
        """
        group, slot = self._group_index(group), int_scalar("slot", slot)
        geometry = self.config.groups[group]
        tokens, expansion = geometry.tokens_per_column, geometry.blocks_per_kv_block
        if geometry.slot_mode == "none":
            raise ArgumentError(f'group {group} has slot_mode="none": it has no slots.')
        is_pad = slot == geometry.pad_slot_id
        if is_pad or not 0 <= slot < geometry.block_id_limit * geometry.block_size:
            meaning = " (pad_slot_id, no slot)" if is_pad else ""
            raise ArgumentError(f"slot {slot}{meaning} is outside the cache of group {group}.")
        kernel_block_id, offset = divmod(slot, tokens)
        found_rows, columns = np.nonzero(self._table(group) == kernel_block_id)
        held = columns < self._rows.filled[group][found_rows]
        return SlotLocation(
            kernel_block_id // expansion,
            kernel_block_id,
            offset,
            tuple(
                SlotHolder(row, column // expansion, position_of(self.config, group, column * tokens + offset))
                for row, column in zip(found_rows[held].tolist(), columns[held].tolist(), strict=True)
            ),
        )

    def _require(self, capability: str, what: str) -> None:
        if capability not in self.backend.capabilities:
            raise UnsupportedError(
                f"{what} needs the capability {capability!r}, which backend {self.backend.name!r} does not declare."
            )

    def _group_index(self, group: Any) -> int:
        index = int_scalar("group", group)
        if not 0 <= index < len(self.config.groups):
            raise ArgumentError(f"group {index} does not exist: groups go from 0 to {len(self.config.groups) - 1}.")
        return index


def position_of(config: BlockTableConfig, group: int, local: int) -> int:
    """Return the position of a token that is this rank's `local`-th one in a linear group (R12)."""
    if not config.groups[group].is_sharded:
        return local
    shard = config.context_parallel
    turn, offset = divmod(local, shard.interleave_size)
    return turn * shard.world_size * shard.interleave_size + shard.rank * shard.interleave_size + offset
