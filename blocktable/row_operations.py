"""The row operations of a table: one row at a time, and many (R4-R8)."""

from __future__ import annotations

import numpy as np

from blocktable.arrays import BlockIds, Counts, IntArray, Ints
from blocktable.checks import int_scalar, ints_per_row
from blocktable.errors import ArgumentError
from blocktable.host_path import HostPath
from blocktable.inspection import Inspection
from blocktable.rows import DISTINCT_ROWS


class RowOperations(Inspection):
    """What changes the rows of a table, on the host alone.

    Attributes:
        num_row_changes: calls so far that may have changed a row. Who has seen a row at the same number knows it still.
    """

    num_row_changes: int = 0

    @property
    def _changing(self) -> HostPath:
        """The rows, for a call that changes them."""
        self.num_row_changes += 1
        return self._rows

    # Rows, one at a time.

    def append_row(self, row: int, block_ids: BlockIds) -> None:
        """Add blocks after what a row holds. Nothing for a group (None, []) changes nothing there.

        Args:
            row: the row.
            block_ids: one sequence of manager block ids for each group; with one group also a flat sequence of ints.

        Raises:
            RowCapacityError: a group's row cannot hold them. No group is changed.
            RowIndexError, ArgumentError, DtypeError: a bad argument. No group is changed.

        Rules: R4, R6, R7, R8.
        """
        self._changing.append_row(row, block_ids)

    def set_row(self, row: int, block_ids: BlockIds) -> None:
        """Replace what a row holds. Nothing for a group (None, []) clears it there.

        Args and errors: as `append_row`. Rules: R4, R6, R7, R8.
        """
        self._changing.set_row(row, block_ids)

    def clear_row(self, row: int) -> None:
        """Make a row empty in every group. Rules: R4, R5."""
        self._changing.truncate_row(row, 0)

    def clear(self) -> None:
        """Make every row empty. Rules: R4, R5."""
        self._changing.truncate(np.flatnonzero(self._rows.filled.any(0)), 0)

    def move_row(self, src: int, dst: int) -> None:
        """Replace row dst by row src and leave src empty; onto itself changes nothing. Rules: R4, R5."""
        source, target = self._rows.one_row("src", src), self._rows.one_row("dst", dst)
        if src != dst:
            self._changing.copy(source, target, vacate=True)

    def swap_rows(self, a: int, b: int) -> None:
        """Exchange two rows; a row with itself changes nothing. Rules: R4."""
        rows = np.concatenate((self._rows.one_row("a", a), self._rows.one_row("b", b)))
        if a != b:
            self._changing.copy(rows, rows[::-1], vacate=True)

    def copy_row(self, src: int, dst: int) -> None:
        """Replace row dst by row src (a fork): both hold the same ids; onto itself changes nothing. Rules: R4."""
        source, target = self._rows.one_row("src", src), self._rows.one_row("dst", dst)
        if src != dst:
            self._changing.copy(source, target, vacate=False)

    def truncate_row(self, row: int, num_blocks: int | Ints) -> None:
        """Keep the first blocks of a row (speculative rollback); asking for more than there are changes nothing.

        Args:
            row: the row.
            num_blocks: manager blocks to keep: one number, or one for each group.

        Rules: R4.
        """
        self._changing.truncate_row(row, num_blocks)

    def null_range(self, row: int, group: int, start: int, stop: int) -> None:
        """Make manager blocks start .. stop - 1 of a row NULL in one group (eviction); later ones stay.

        Raises:
            ArgumentError: not `0 <= start <= stop <= blocks the row holds`.

        Rules: R4, R7.
        """
        rows, index = self._rows.one_row("row", row), self._group_index(group)
        bounds = (np.array([int_scalar(name, value)]) for name, value in (("start", start), ("stop", stop)))
        self._changing.null(rows, index, *bounds)

    def replace_blocks(self, row: int, group: int, start: int, block_ids: Ints | None) -> None:
        """Exchange blocks inside a row of one group; the others stay, and so does their number.

        For a block that was deduplicated, or copied because the row shares it and must write into it.

        Args:
            row: the row.
            group: the group.
            start: manager block of the row that the first id replaces.
            block_ids: [n] ints. Manager block ids for `start .. start + n - 1`. Nothing (None, []) changes nothing.

        Raises:
            ArgumentError: not `0 <= start <= start + n <= blocks the row holds`; an id that the group cannot have.
            RowIndexError, DtypeError: a bad argument. Nothing is changed.

        Rules: R4, R6, R7, R8.
        """
        rows, index = self._rows.one_row("row", row), self._group_index(group)
        first = ints_per_row("start", [int_scalar("start", start)], 1)
        self._changing.replace(rows, index, first, block_ids, None)

    # Rows, many at a time.

    def append_rows(self, rows: Ints, block_ids: BlockIds, counts: Counts) -> None:
        """Add blocks after what many rows hold.

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
        self._changing.append_rows(rows, block_ids, counts)

    def set_rows(self, rows: Ints, block_ids: BlockIds, counts: Counts) -> None:
        """Replace what many rows hold. Args and errors: as `append_rows`. Rules: R4, R6, R7, R8."""
        self._changing.set_rows(rows, block_ids, counts)

    def clear_rows(self, rows: Ints) -> None:
        """Make many rows empty in every group. Rules: R4, R5."""
        self._changing.clear_rows(rows)

    def truncate_rows(self, rows: Ints, num_blocks: Counts) -> None:
        """Keep the first blocks of many rows.

        Args:
            rows: [n] ints. Distinct rows.
            num_blocks: [n] ints. Manager blocks to keep; or one [n] for each group.

        Rules: R4.
        """
        self._changing.truncate_rows(rows, num_blocks)

    def null_ranges(self, rows: Ints, group: int, starts: Ints, stops: Ints) -> None:
        """Make manager blocks starts[i] .. stops[i] - 1 of many rows NULL in one group.

        Args:
            rows: [n] ints. Distinct rows.
            group: the group.
            starts: [n] ints. First manager block of each row that becomes NULL.
            stops: [n] ints. The manager block after the last one.

        Raises:
            ArgumentError: not `0 <= start <= stop <= blocks the row holds` for a row. Nothing is changed.

        Rules: R4, R7.
        """
        checked, index = self._rows.check_rows("rows", rows), self._group_index(group)
        bounds = [ints_per_row(name, values, checked.size) for name, values in (("starts", starts), ("stops", stops))]
        self._changing.null(checked, index, *(array.astype(np.int64) for array in bounds))

    def replace_block_ranges(self, rows: Ints, group: int, starts: Ints, block_ids: Ints | None, counts: Ints) -> None:
        """Exchange blocks inside many rows of one group; the others stay, and so does their number.

        Args:
            rows: [n] ints. Distinct rows.
            group: the group.
            starts: [n] ints. Manager block of each row that its first id replaces.
            block_ids: [sum(counts)] ints. Manager block ids: those of rows[0], then those of rows[1], and so on.
            counts: [n] ints. Blocks to replace of each row.

        Raises:
            ArgumentError: not `0 <= start <= start + count <= blocks the row holds` for a row; an id that the group
                cannot have; a repeated row; lengths that disagree. Nothing is changed.
            RowIndexError, DtypeError: a bad argument. Nothing is changed.

        Rules: R4, R6, R7, R8.
        """
        checked, index = self._rows.check_rows("rows", rows), self._group_index(group)
        firsts, blocks = (
            ints_per_row(name, values, checked.size) for name, values in (("starts", starts), ("counts", counts))
        )
        self._changing.replace(checked, index, firsts.astype(np.int64), block_ids, blocks)

    def remap_blocks(self, group: int, old_ids: Ints, new_ids: Ints) -> None:
        """Make block old_ids[i] block new_ids[i] in every row of one group, all together (defragmentation, migration).

        It searches what the rows of the group hold.

        Args:
            group: the group.
            old_ids: [n] ints. Distinct manager block ids, not null_block_id; those that no row holds change nothing.
            new_ids: [n] ints. Manager block ids; they may repeat.

        Raises:
            ArgumentError: a repeated old id; an id that the group cannot have; lengths that disagree. Nothing is
                changed.
            DtypeError: a bad argument. Nothing is changed.

        Rules: R4, R6, R7, R8.
        """
        self._changing.remap(self._group_index(group), old_ids, new_ids)

    def permute_rows(self, src: Ints, dst: Ints) -> None:
        """Replace each row dst[i] by what row src[i] held before the call; other sources become empty.

        Args:
            src: [n] ints. Distinct rows.
            dst: [n] ints. Distinct rows.

        Raises:
            ArgumentError: a repeated row (`copy_rows` takes a source more than once); lengths that disagree. Nothing
                is changed.

        Rules: R4, R5.
        """
        advice = (
            "permute_rows moves each row to one place of its own. To copy a row to several places call "
            "copy_rows(src, dst), whose src may repeat."
        )
        self._copy_rows(self._rows.check_rows("src", src, advice=advice), dst, advice, vacate=True)

    def copy_rows(self, src: Ints, dst: Ints) -> None:
        """Replace each row dst[i] by what row src[i] held before the call; other rows stay (beams, many forks).

        Args:
            src: [n] ints. Rows; they may repeat.
            dst: [n] ints. Distinct rows.

        Raises:
            ArgumentError: a repeated destination; lengths that disagree. Nothing is changed.

        Rules: R4, R5.
        """
        self._copy_rows(self._rows.check_rows("src", src, advice=None), dst, DISTINCT_ROWS, vacate=False)

    def _copy_rows(self, source: IntArray, dst: Ints, advice: str, *, vacate: bool) -> None:
        target = self._rows.check_rows("dst", dst, advice=advice)
        if source.size != target.size:
            raise ArgumentError(f"src and dst must be of one length, got {source.size} and {target.size}.")
        self._changing.copy(source, target, vacate=vacate)
