"""The host's rows as a table uses them, and what makes them: numpy, or the compiled path by entry point."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from blocktable.arrays import IntArray
from blocktable.config import Arena, BlockTableConfig
from blocktable.errors import BackendUnavailableError, ConfigError
from blocktable.protocols import Writes, ranges
from blocktable.rows import DISTINCT_ROWS, NumpyRows

HOST_PATH_VARIABLE = "BLOCKTABLE_HOST_PATH"
HOST_PATHS = ("auto", "numpy", "compiled")
ENTRY_POINT_GROUP = "blocktable.host_paths"


class Changes(Protocol):
    """What has changed since the last commit."""

    @property
    def size(self) -> int:
        """0 where nothing has."""


class Difference(NamedTuple):
    """Entries of the arena that differ.

    Attributes:
        entries: [n] int64, ascending.
        old, new: [n] int32.
    """

    entries: IntArray
    old: IntArray
    new: IntArray


class HostPath(Protocol):
    """Rows of block ids for all groups, and what of them the device does not have yet.

    Operations are atomic: they change every group, or raise and change nothing. `rows` [n] int64 without a name of its
    own are rows that `check_rows` returned.

    Attributes:
        filled: [num_groups, num_rows] int32. Columns in use of each row; up to date after every operation.
        committed_filled: [num_groups, num_rows] int32. The same as of the last commit; -1: not known (R24).
        columns_per_block: [num_groups, 1] int64.

    Rules: R4-R9.
    """

    filled: IntArray
    committed_filled: IntArray
    columns_per_block: IntArray

    @property
    def mirror(self) -> IntArray:
        """[arena.size] int32. What the device holds after a commit. Valid until the next operation."""

    def live_mirror(self) -> IntArray:
        """Return the mirror, which from now on follows every operation: the caller keeps a view of it."""

    @property
    def journal(self) -> Changes:
        """What has changed since the last commit."""

    # Operations.

    def check_rows(self, name: str, rows: Any, *, advice: str | None = DISTINCT_ROWS) -> IntArray:
        """Return rows as [n] int64, a copy: inside the table and distinct.

        Args:
            name: of the argument.
            rows: [n] ints.
            advice: what the refusal of a repeated row says about it. None: rows may repeat.
        """

    def one_row(self, name: str, row: Any) -> IntArray:
        """Return a row of the table as [1] int64."""

    def check_blocks(
        self, rows: IntArray, block_ids: Any, counts: Any, *, is_append: bool
    ) -> tuple[IntArray, IntArray]:
        """Do the checks of `append` or `set`, and change nothing.

        Returns:
            ids: [total] integers. Manager block ids, group after group, row after row.
            blocks: [num_groups, n] int64. How many of them go to each row of each group.
        """

    def check_replacement(
        self, rows: IntArray, group: int, starts: IntArray, block_ids: Any, counts: IntArray | None
    ) -> tuple[IntArray, IntArray]:
        """Do the checks of `replace`, and change nothing; return ids [total] int64 and counts [n] int64."""

    def check_mapping(self, group: int, old_ids: Any, new_ids: Any) -> tuple[IntArray, IntArray]:
        """Do the checks of `remap`, and change nothing; return old and new ids, [n] int64 each."""

    def append_row(self, row: Any, block_ids: Any) -> None:
        """Check the row and append; arguments as `BlockTable.append_row`."""

    def set_row(self, row: Any, block_ids: Any) -> None:
        """Check the row and replace what it holds; arguments as `BlockTable.append_row`."""

    def truncate_row(self, row: Any, num_blocks: Any) -> None:
        """Check the row and truncate it; arguments as `BlockTable.truncate_row`."""

    def append_rows(self, rows: Any, block_ids: Any, counts: Any) -> None:
        """Check the rows and append; arguments as `BlockTable.append_rows`."""

    def set_rows(self, rows: Any, block_ids: Any, counts: Any) -> None:
        """Check the rows and replace what they hold; arguments as `BlockTable.append_rows`."""

    def truncate_rows(self, rows: Any, num_blocks: Any) -> None:
        """Check the rows and truncate; arguments as `BlockTable.truncate_rows`."""

    def clear_rows(self, rows: Any) -> None:
        """Check the rows and make them empty."""

    def append(self, rows: IntArray, block_ids: Any, counts: Any) -> None:
        """Add blocks after what the rows hold; `counts` None: all ids of a group go to the one row."""

    def set(self, rows: IntArray, block_ids: Any, counts: Any) -> None:
        """Replace what the rows hold; arguments as `append`."""

    def truncate(self, rows: IntArray, num_blocks: IntArray | int) -> None:
        """Keep the first blocks of each row in each group; where there are fewer, change nothing.

        Args:
            rows: [n] int64.
            num_blocks: [num_groups, n] integers, or one for all.
        """

    def null(self, rows: IntArray, group: int, starts: IntArray, stops: IntArray) -> None:
        """Make manager blocks `starts[i] .. stops[i] - 1` of each row NULL; later ones stay."""

    def replace(self, rows: IntArray, group: int, starts: IntArray, block_ids: Any, counts: IntArray | None) -> None:
        """Exchange counts[i] manager blocks of each row in one group, from starts[i] on.

        Args:
            rows: [n] int64.
            group: a group that exists.
            starts: [n] int64.
            block_ids: flat ids, row after row; nothing: none.
            counts: [n] integers. None: all ids are for the one row.
        """

    def remap(self, group: int, old_ids: Any, new_ids: Any) -> None:
        """Exchange block old_ids[i] by new_ids[i] wherever a row holds it, all together."""

    def copy(self, src: IntArray, dst: IntArray, *, vacate: bool) -> None:
        """Replace each row dst[i] by what src[i] held before the call; with `vacate`, other sources become empty.

        Args:
            src: [n] int64. Rows; with `vacate` distinct.
            dst: [n] int64. Distinct rows.
            vacate: whether rows move.
        """

    def exchange(self, entries: IntArray, values: IntArray) -> None:
        """Write values [n] int32 to entries [n] int64 of the mirror, distinct ones; those that differ are changes.

        Nothing is checked: they are right, and filled counts are among them.
        """

    def invalidate(self) -> None:
        """Mark everything as changed, as one range."""

    # A commit: `pack_changes` or `writes`, the store's launch, `committed`. Only the last one forgets anything.

    @property
    def has_changes(self) -> bool:
        """Whether the device does not hold everything yet."""

    def pending_ranges(self) -> tuple[IntArray, IntArray]:
        """Return what has changed as disjoint ascending ranges of the arena. Valid until the next operation.

        Returns:
            offsets: [n] int64.
            lengths: [n] int64, at least 1.
        """

    def writes(self) -> Writes:
        """Return what has changed as arrays. Valid until the next operation.

        Where that is most of a large table, the whole arena as one range, which needs no scatter.
        """

    def pack_changes(self, block: IntArray) -> int:
        """Lay what has changed out as `Writes.pack_changes` does.

        Args:
            block: [n] int32, C-contiguous, written. May hold anything after a result of -1.

        Returns:
            int32 entries used; 0: nothing is pending; -1: the changes do not fit, or are too many to be scattered, and
            `writes` must be used.
        """

    def committed(self) -> int:
        """Forget what has changed: the device takes what `writes` or `pack_changes` returned last.

        Returns:
            Bytes of those changes as ranges, as `Writes.num_bytes`.
        """


def difference(held: IntArray, rows: HostPath) -> Difference:
    """Return what is pending in rows that differs from an older copy of their mirror's first entries, [n] int32."""
    mirror = rows.mirror
    entries = ranges(*rows.pending_ranges())
    entries = entries[: np.searchsorted(entries, held.size)]
    old, new = held[entries], mirror[entries]
    differs = old != new
    return Difference(entries[differs], old[differs], new[differs])


def make_rows(config: BlockTableConfig) -> HostPath:
    """Return empty rows of a new table.

    Raises:
        BackendUnavailableError, ConfigError: as `rows_maker`.
    """
    return rows_maker()(config)


def rows_maker() -> Callable[[BlockTableConfig], HostPath]:
    """Return what makes rows.

    BLOCKTABLE_HOST_PATH chooses: "auto" (compiled where it can be imported), "numpy", "compiled".

    Raises:
        BackendUnavailableError: "compiled" is asked for and cannot be imported.
        ConfigError: the variable has another value.
    """
    return compiled_part("rows") or NumpyRows


def compiled_step() -> Callable[..., Any] | None:
    """Return what does the numpy backend's whole step in one compiled call; None where the host path is numpy.

    Raises:
        BackendUnavailableError, ConfigError: as `rows_maker`.
    """
    found: Callable[..., Any] | None = compiled_part("step")
    return found


class CompiledChanges(Protocol):
    """What the compiled path does for a drop-in that has rows of its own."""

    @property
    def append_to_all_groups(self) -> Callable[..., int]:
        """Adds blocks to rows of all groups."""

    def make_journal(
        self, arena: Arena, mirror: IntArray, capacity: int
    ) -> tuple[Any, Callable[[IntArray], tuple[int, int]]]:
        """Return a journal of an arena's changes, and what packs them.

        Args:
            arena: the layout.
            mirror: [arena.size] int32, C-contiguous. Kept: values are taken from it when they are packed.
            capacity: ranges that the journal has room for at first.

        Returns:
            The journal; a function that lays what it says out in a block as `HostPath.pack_changes` does, and returns
            the entries used and the bytes of the changes as ranges.
        """


def compiled_changes() -> CompiledChanges | None:
    """Return the compiled parts for a drop-in; None for the numpy path."""
    rows: Any = rows_maker()
    return rows if hasattr(rows, "make_journal") else None


def host_path_description() -> str:
    """Return which host path runs, in a sentence for `blocktable backends`."""
    if rows_maker() is not NumpyRows:
        return "compiled"
    return f"numpy ({_load('rows')[1] or f'{HOST_PATH_VARIABLE}=numpy'})"


def compiled_part(name: str) -> Any:
    """Return a part of the compiled host path; None where the host path is numpy.

    Args:
        name: its entry point.

    Raises:
        BackendUnavailableError, ConfigError: as `rows_maker`.
    """
    choice = os.environ.get(HOST_PATH_VARIABLE, "auto")
    if choice not in HOST_PATHS:
        raise ConfigError(f"{HOST_PATH_VARIABLE} must be one of {', '.join(HOST_PATHS)}; got {choice!r}.")
    if choice == "numpy":
        return None
    found, reason = _load(name)
    if found is None and choice == "compiled":
        raise BackendUnavailableError(
            f"The compiled host path cannot be imported ({reason}). It is built when blocktable is installed from its "
            "source if there is a C++ compiler: get one, then install blocktable again, with pip's --force-reinstall "
            "and --no-cache-dir."
        )
    return found


@cache
def _load(name: str) -> tuple[Any, str | None]:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            return entry.load(), None
        except ImportError as error:  # it was not built
            return None, f"{type(error).__name__}: {error}"
    return None, "not installed"
