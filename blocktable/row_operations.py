"""The row operations of a table: one row at a time, and many (R4-R8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blocktable.checks import COUNT_LIMIT, bounded, int_array, int_scalar, non_negative, row_index
from blocktable.config import BlockTableConfig
from blocktable.errors import ArgumentError
from blocktable.host_path import HostPath
from blocktable.protocols import IntArray


class RowOperations:
    """What changes the rows of a table, on the host alone.

    Attributes:
        config: the geometry.
    """

    config: BlockTableConfig
    _rows: HostPath

    # Rows, one at a time.

    def append_row(self, row: int, block_ids: Any) -> None:
        """Add blocks behind what a row holds. Nothing for a group (None, []) changes nothing there.

        Args:
            row: the row.
            block_ids: one sequence of manager block ids for each group; with one group also a flat sequence of ints.

        Raises:
            RowCapacityError: a group's row cannot hold them. No group is changed.
            RowIndexError, ArgumentError, DtypeError: a bad argument. No group is changed.

        Rules: R4, R6, R7, R8.
        """
        self._rows.append(self._one_row("row", row), block_ids, None)

    def set_row(self, row: int, block_ids: Any) -> None:
        """Replace what a row holds. Nothing for a group (None, []) clears it there.

        Args and errors: as `append_row`. Rules: R4, R6, R7, R8.
        """
        self._rows.set(self._one_row("row", row), block_ids, None)

    def clear_row(self, row: int) -> None:
        """Make a row empty in every group. Rules: R4, R5."""
        self._rows.truncate(self._one_row("row", row), 0)

    def clear(self) -> None:
        """Make every row empty. Rules: R4, R5."""
        self._rows.truncate(self._rows.occupied_rows(), 0)

    def move_row(self, src: int, dst: int) -> None:
        """Replace row dst by row src and leave src empty; onto itself changes nothing. Rules: R4, R5."""
        source, target = self._one_row("src", src), self._one_row("dst", dst)
        if src != dst:
            self._rows.copy(source, target, vacate=True)

    def swap_rows(self, a: int, b: int) -> None:
        """Exchange two rows; a row with itself changes nothing. Rules: R4."""
        rows = np.concatenate((self._one_row("a", a), self._one_row("b", b)))
        if a != b:
            self._rows.copy(rows, rows[::-1], vacate=True)

    def copy_row(self, src: int, dst: int) -> None:
        """Replace row dst by row src (a fork): both hold the same ids; onto itself changes nothing. Rules: R4."""
        source, target = self._one_row("src", src), self._one_row("dst", dst)
        if src != dst:
            self._rows.copy(source, target, vacate=False)

    def truncate_row(self, row: int, num_blocks: int | Sequence[int] | IntArray) -> None:
        """Keep the first blocks of a row (speculative rollback); asking for more than there are changes nothing.

        Args:
            row: the row.
            num_blocks: manager blocks to keep: one number, or one for each group.

        Rules: R4.
        """
        rows, num_groups = self._one_row("row", row), len(self.config.groups)
        if isinstance(num_blocks, Sequence | np.ndarray):
            kept = int_array("num_blocks", num_blocks)
            if kept.size != num_groups:
                raise ArgumentError(
                    f"num_blocks must be an int, or one for each of the {num_groups} groups; got {kept.size}."
                )
            if kept.min() < 0:
                raise ArgumentError(f"num_blocks must be at least 0, got {kept.min()}.")
            self._rows.truncate(rows, bounded(kept)[:, None])
        else:
            self._rows.truncate(rows, min(non_negative("num_blocks", num_blocks), COUNT_LIMIT))

    def null_range(self, row: int, group: int, start: int, stop: int) -> None:
        """Make manager blocks start .. stop - 1 of a row NULL in one group (eviction); later ones stay.

        Raises:
            ArgumentError: not `0 <= start <= stop <= blocks the row holds`.

        Rules: R4, R7.
        """
        rows, index = self._one_row("row", row), self._group_index(group)
        bounds = (np.array([int_scalar(name, value)]) for name, value in (("start", start), ("stop", stop)))
        self._rows.null(rows, index, *bounds)

    # Rows, many at a time.

    def append_rows(self, rows: Any, block_ids: Any, counts: Any) -> None:
        """Add blocks behind what many rows hold.

        Args:
            rows: [n] ints. Distinct rows.
            block_ids: one flat sequence of manager block ids for each group (with one group, that sequence itself):
                the ids of rows[0], then those of rows[1], and so on. Nothing (None, []) changes nothing in that group.
            counts: [n] ints. Blocks of each row; or one [n] for each group.

        Raises:
            RowCapacityError: a row cannot hold its blocks. Nothing is changed.
            RowIndexError, ArgumentError, DtypeError: a bad argument, a repeated row. Nothing is changed.

        Rules: R4, R6, R7, R8.
        """
        self._rows.append_rows(rows, block_ids, counts)

    def set_rows(self, rows: Any, block_ids: Any, counts: Any) -> None:
        """Replace what many rows hold. Args and errors: as `append_rows`. Rules: R4, R6, R7, R8."""
        self._rows.set_rows(rows, block_ids, counts)

    def clear_rows(self, rows: Any) -> None:
        """Make many rows empty in every group. Rules: R4, R5."""
        self._rows.truncate(self._rows.check_rows("rows", rows), 0)

    def truncate_rows(self, rows: Any, num_blocks: Any) -> None:
        """Keep the first blocks of many rows.

        Args:
            rows: [n] ints. Distinct rows.
            num_blocks: [n] ints. Manager blocks to keep; or one [n] for each group.

        Rules: R4.
        """
        self._rows.truncate_rows(rows, num_blocks)

    def null_ranges(self, rows: Any, group: int, starts: Any, stops: Any) -> None:
        """Make manager blocks starts[i] .. stops[i] - 1 of many rows NULL in one group.

        Args:
            rows: [n] ints. Distinct rows.
            group: the group.
            starts, stops: [n] ints. Manager blocks.

        Raises:
            ArgumentError: not `0 <= start <= stop <= blocks the row holds` for a row. Nothing is changed.

        Rules: R4, R7.
        """
        checked, index = self._rows.check_rows("rows", rows), self._group_index(group)
        bounds = [int_array(name, values) for name, values in (("starts", starts), ("stops", stops))]
        for name, array in zip(("starts", "stops"), bounds, strict=True):
            if array.size != checked.size:
                raise ArgumentError(f"{name} must hold one int for each of the {checked.size} rows, got {array.size}.")
        self._rows.null(checked, index, *(array.astype(np.int64) for array in bounds))

    def permute_rows(self, src: Any, dst: Any) -> None:
        """Replace each row dst[i] by what row src[i] held before the call; other sources become empty.

        Args:
            src: [n] ints. Distinct rows.
            dst: [n] ints. Distinct rows.

        Rules: R4, R5.
        """
        # Checked before the stamps of the first check are used again.
        source, target = self._rows.check_rows("src", src), self._rows.check_rows("dst", dst)
        if source.size != target.size:
            raise ArgumentError(f"src and dst must be of one length, got {source.size} and {target.size}.")
        self._rows.copy(source, target, vacate=True)

    def _one_row(self, name: str, row: Any) -> IntArray:
        return np.array([row_index(name, row, self.config.num_rows)])

    def _group_index(self, group: Any) -> int:
        index = int_scalar("group", group)
        if not 0 <= index < len(self.config.groups):
            raise ArgumentError(f"group {index} does not exist: groups go from 0 to {len(self.config.groups) - 1}.")
        return index
