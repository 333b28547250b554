"""Rows for requests: which row each request has, and what of its blocks the table does not hold yet (R42-R44)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import numpy as np

from blocktable.arrays import Array, BlockIds, IntArray
from blocktable.checks import flag, ids_per_group, int_array, int_scalar
from blocktable.errors import ArgumentError, DtypeError, NoFreeRowError
from blocktable.table import BlockTable


class _ArrayIds:
    """Ids that were given in a numpy array, as they were then; equal to an array that holds the same."""

    __slots__ = ("_data", "_dtype", "_shape")

    def __init__(self, ids: IntArray) -> None:
        self._data, self._dtype, self._shape = ids.tobytes(), ids.dtype, ids.shape

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is np.ndarray
            and other.shape == self._shape
            and other.dtype == self._dtype
            and other.tobytes() == self._data
        )

    def new_ids(self, ids: IntArray) -> IntArray | None:
        """Return what an array [n] holds after these. None: they are not its first entries."""
        is_alike = len(self._shape) == 1 == ids.ndim and ids.dtype == self._dtype
        return ids[self._shape[0] :] if is_alike and ids.tobytes().startswith(self._data) else None


_UNKNOWN = object()
"""What is kept of a row that another may have changed, or of ids in a sequence of another kind."""


class Requests:
    """The rows of a table, given out to requests.

    A request is any hashable key: a string, a number, an object of the engine's own. It has one row from its first
    `sync` until it is finished or preempted. One such object serves a table. The rows of its requests may be changed by
    the table's own calls too, such as `truncate_row`, but are not to be moved.

    Args:
        table: the table. All of its rows are given out.

    Attributes:
        table: as given.

    Rules: R42-R44.
    """

    def __init__(self, table: BlockTable) -> None:
        if not isinstance(table, BlockTable):
            raise DtypeError(f"table must be a BlockTable, got {type(table).__name__}.")
        self.table: BlockTable = table
        self._num_groups = len(table.config.groups)
        self._row: dict[Hashable, int] = {}
        self._preempted: set[Hashable] = set()
        self._free = list(reversed(range(table.config.num_rows)))
        # A copy of what each sync was given last: right while the table counts no change of anybody else.
        self._kept: dict[Hashable, Any] = {}
        self._num_changes = table.num_row_changes
        # [max_num_reqs] int32 each. Batch index -> row; -1 after the batch.
        self._idx_mapping: IntArray = np.full(table.config.max_num_reqs, -1, np.int32)
        self._on_device: Array = None

    def __len__(self) -> int:
        """Return how many requests have a row."""
        return len(self._row)

    def __contains__(self, request: Hashable) -> bool:
        """Say whether a request has a row."""
        return request in self._row

    @property
    def num_free_rows(self) -> int:
        """Rows that no request has."""
        return len(self._free)

    def row(self, request: Hashable) -> int:
        """Return the row of a request.

        Raises:
            ArgumentError: it has none.
        """
        row = self._find(request)
        if row is None:
            raise self._no_row(request)
        return row

    # What a request holds.

    def sync(self, request: Hashable, block_ids: BlockIds) -> int:
        """Make the row of a request hold exactly these blocks, and return it; only what differs is sent.

        Args:
            request: the request. One that has no row gets a free one.
            block_ids: all blocks of the request, as `BlockTable.set_row` takes them. They are not kept: the engine may
                go on changing its lists.

        Raises:
            NoFreeRowError: the request has no row, and none is free. Nothing is changed.
            RowCapacityError, ArgumentError, DtypeError: as `BlockTable.set_row`. Nothing is changed.

        Rules: R42, R43.
        """
        table, row = self.table, self._find(request)
        is_known = row is not None and self._num_changes == table.num_row_changes
        if not (is_known and _is_same(self._kept.get(request, _UNKNOWN), block_ids)):
            self.sync_batch((request,), (block_ids,))
        return self._row[request]

    def sync_batch(self, requests: Sequence[Hashable], block_ids: Sequence[BlockIds]) -> None:
        """Do `sync` for many requests: all of it, or nothing.

        Args:
            requests: [n]. Distinct requests.
            block_ids: [n]. All blocks of each one, as `sync` takes them.

        Raises:
            ArgumentError: a request that changed stands there twice; lengths that disagree. Nothing is changed.
            NoFreeRowError: no row is left for a request; the first one is named. Nothing is changed.
            RowCapacityError, DtypeError: as `sync`. Nothing is changed.

        Rules: R42, R43.
        """
        keys, blocks = _listed("requests", requests), _listed("block_ids", block_ids)
        if len(keys) != len(blocks):
            raise ArgumentError(
                f"block_ids must hold the blocks of each of the {len(keys)} requests, got {len(blocks)}."
            )
        self._forget_changed()
        kept_of, changed = self._kept.get, []
        for request, ids in zip(keys, blocks, strict=True):
            try:
                if (kept_of(request, _UNKNOWN) == ids) is True:
                    continue
            except (TypeError, ValueError):  # no key, or an array where a list was before: looked at below
                pass
            changed.append((request, ids))
        if changed:
            self._change(changed)

    def _change(self, changed: list[tuple[Hashable, Any]]) -> None:
        """Append to the rows whose requests have grown, and set all others."""
        rows = self._take_rows([request for request, _ in changed])
        grown: list[tuple[int, list[Any]]] = []  # row, and the new ids of each group
        others: list[tuple[int, list[IntArray]]] = []  # row, and all ids of each group
        for request, ids in changed:
            new = self._new_ids(self._kept.get(request, _UNKNOWN), ids)
            if new is None:
                others.append((rows[request], ids_per_group(ids, self._num_groups)))
            else:
                grown.append((rows[request], new))
        grown_rows = [row for row, _ in grown]
        before = self.table.num_blocks_per_row[:, grown_rows] if grown and others else None
        has_grown = False
        try:
            if grown:
                self.table.append_rows(*_flat(grown, self._num_groups))
                has_grown = True
            if others:
                self.table.set_rows(*_flat(others, self._num_groups))
        except BaseException:
            if has_grown and before is not None:
                self.table.truncate_rows(grown_rows, before)
            raise
        finally:
            self._num_changes = self.table.num_row_changes
        num_new = sum(request not in self._row for request, _ in changed)
        del self._free[len(self._free) - num_new :]
        for request, ids in changed:
            self._row[request] = rows[request]
            self._preempted.discard(request)
            self._kept[request] = _copy(ids)

    def _take_rows(self, requests: list[Hashable]) -> dict[Hashable, int]:
        """Return the row of each request, for a new one one that is free."""
        rows: dict[Hashable, int] = {}
        num_taken = 0
        for request in requests:
            row = self._find(request)
            if request in rows:
                raise ArgumentError(f"request {request!r} is repeated; the requests of one call must be distinct.")
            if row is None:
                if num_taken == len(self._free):
                    raise NoFreeRowError(
                        f"request {request!r} finds no free row: all {self.table.config.num_rows} rows of the table "
                        "are in use; finish or preempt a request first, or make the table with a larger max_num_rows."
                    )
                num_taken += 1
                row = self._free[-num_taken]
            rows[request] = row
        return rows

    # What requests held before.

    def _forget_changed(self) -> None:
        """Forget what rows hold where the table was changed by others: the next sync compares with the rows."""
        if self._num_changes != self.table.num_row_changes:
            self._kept.clear()
            self._num_changes = self.table.num_row_changes

    def _new_ids(self, kept: Any, ids: Any) -> list[Any] | None:
        """Return the ids of each group after those that were kept. None: more has changed, or it is not known."""
        before, now = self._split(kept), self._split(ids)
        if before is None or now is None or len(before) != len(now):
            return None
        new = [_new_ids(old, group_ids) for old, group_ids in zip(before, now, strict=True)]
        return None if any(more is None for more in new) else new

    def _split(self, ids: Any) -> Sequence[Any] | None:
        """Return the ids of each group, of lists, tuples and flat arrays; None of anything else."""
        if type(ids) is list or type(ids) is tuple:
            if not ids:
                return [[]] * self._num_groups
            return (ids,) if self._num_groups == 1 and isinstance(ids[0], int) else ids
        return (ids,) if self._num_groups == 1 and isinstance(ids, np.ndarray | _ArrayIds) else None

    # The end of a request.

    def finish(self, request: Hashable) -> None:
        """Forget a request; its row, if it has one, becomes empty and free.

        Raises:
            ArgumentError: it has no row and was not preempted.

        Rules: R42.
        """
        if self._find(request) is None and request in self._preempted:
            self._preempted.remove(request)
        else:
            self._free_row(request)

    def preempt(self, request: Hashable) -> None:
        """Take the row of a request away; the next `sync` gives it one again.

        Raises:
            ArgumentError: it has no row.

        Rules: R42.
        """
        self._free_row(request)
        self._preempted.add(request)

    def _free_row(self, request: Hashable) -> None:
        row = self.row(request)
        self._forget_changed()
        self.table.clear_row(row)
        self._num_changes = self.table.num_row_changes
        del self._row[request]
        self._kept.pop(request, None)
        self._free.append(row)

    # The batch.

    def idx_mapping(
        self,
        requests: Sequence[Hashable],
        num_reqs_padded: int | None = None,
        *,
        on_device: bool = False,
        stream: Any = None,
    ) -> Array:
        """Return the rows of a batch, for the calls of the table.

        Args:
            requests: [num_reqs]. The batch.
            num_reqs_padded: entries to return, -1 after the batch: what a graph of that size reads. None: `num_reqs`.
            on_device: return the device's copy, which this call fills in stream order, without a wait. Otherwise the
                host's array, which a step of a GPU sends itself; a graph reads the device's.
            stream: as `BlockTable.commit`, for the device's copy.

        Returns:
            [num_reqs_padded] int32. The first entries of one persistent array of `max_num_reqs`, which is -1 after the
            batch to its end. Its address never changes. Valid until the next call; callers only read.

        Raises:
            ArgumentError: a request has no row, or there are more than `max_num_reqs`.
            DtypeError: `requests` is no list; `on_device` is no bool.
            UnsupportedError: the backend cannot keep a copy on its device.

        Rules: R44.
        """
        mapping, keys = self._idx_mapping, _listed("requests", requests)
        num_reqs, is_sent = len(keys), flag("on_device", on_device)
        size = num_reqs if num_reqs_padded is None else int_scalar("num_reqs_padded", num_reqs_padded)
        if not num_reqs <= size <= mapping.size:
            raise ArgumentError(
                f"num_reqs_padded must be from {num_reqs} (the requests) to {mapping.size} (max_num_reqs), got {size}."
            )
        try:
            rows = [self._row[request] for request in keys]
        except (KeyError, TypeError, ValueError):
            raise self._no_row(next(request for request in keys if self._find(request) is None)) from None
        mapping[:num_reqs], mapping[num_reqs:] = rows, -1
        return (self._send(stream) if is_sent else mapping)[:size]

    def _send(self, stream: Any) -> Array:
        """Bring the device's copy up to date, and return it."""
        if self._on_device is None:
            made = self.table.backend.from_host(self._idx_mapping, self.table.device)
            # A backend on the host reads the host's array.
            self._on_device = self._idx_mapping if type(made) is np.ndarray else made
        if self._on_device is not self._idx_mapping:
            self.table._put(self._idx_mapping, self._on_device, stream)
        return self._on_device

    # Refusals.

    def _find(self, request: Any) -> int | None:
        try:
            return self._row.get(request)
        except (TypeError, ValueError):
            raise DtypeError(f"a request must be hashable, since it names a row; got {request!r}.") from None

    def _no_row(self, request: Any) -> ArgumentError:
        why = "was preempted" if request in self._preempted else "was never synced, or has finished"
        return ArgumentError(f"request {request!r} has no row: it {why}; sync it first.")


def _listed(name: str, values: Any) -> tuple[Any, ...]:
    """Return what a batch was given for each of its requests, as it is now."""
    if not isinstance(values, Collection):
        raise DtypeError(f"{name} must be a list with an item for each request, got {type(values).__name__}.")
    return tuple(values)


def _is_same(kept: Any, ids: Any) -> bool:
    """Say whether ids are those that were kept; True only of what is so."""
    try:
        return (kept == ids) is True
    except ValueError:  # an array where a list was before
        return False


def _copy(ids: Any) -> Any:
    """Return ids as something that stays as it is, and is equal to the same ids in the same kinds of sequences."""
    kind = type(ids)
    if kind is np.ndarray:
        return _ArrayIds(ids)
    if kind is list or kind is tuple:
        return kind(ids) if ids and type(ids[0]) is int else kind(_copy(each) for each in ids)
    return ids if kind is range or ids is None else _UNKNOWN


def _new_ids(kept: Any, ids: Any) -> Any:
    """Return the ids of one group after those that were kept. None: more has changed, or it is not known."""
    if isinstance(kept, _ArrayIds):
        return kept.new_ids(ids) if type(ids) is np.ndarray else None
    if type(kept) is not type(ids) or not isinstance(ids, list | tuple):
        return [] if kept is None and ids is None else None
    return ids[len(kept) :] if ids[: len(kept)] == kept else None


def _flat(changes: list[tuple[int, list[Any]]], num_groups: int) -> tuple[list[int], list[IntArray], list[list[int]]]:
    """Return rows, the ids of each group one row after another, and how many there are of each, for a bulk call."""
    ids, counts = [], []
    for group in range(num_groups):
        arrays = [int_array(f"block_ids of group {group}", each[group]) for _, each in changes]
        # uint64 ids above 2**63 turn negative here, and are refused for it.
        ids.append(np.concatenate(arrays, dtype=np.int64, casting="unsafe"))
        counts.append([array.size for array in arrays])
    return [row for row, _ in changes], ids, counts
