"""The tables' shared state in fast mode: what changed since the last commit, so that a commit sends that alone.

Three things differ from the core's own rows, and are why vLLM's tables have a mirror of their own: columns after a
row's count keep their contents; whoever holds `.np`, `.cpu` or `num_blocks_per_row` may write to them at any time; and
engines write to the device's rows after the committed ones (padding for CUDA graphs).

So a commit of n rows sends the journal for rows that were committed before, and whole rows for those that come back
into the batch, whatever they hold on the device by then. While others hold the host's rows nothing is trusted, and a
commit copies whole rows, as in strict mode.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from blocktable import DtypeError, RowCapacityError
from blocktable.backend import Writes, ranges
from blocktable.device.staging import steady_entries
from blocktable.host_path import compiled_changes
from blocktable.protocols import CHANGES_HEADER
from blocktable.rows import Journal
from blocktable.typing import IntArray
from blocktable_vllm.buffers import TrackedBuffer
from blocktable_vllm.memory import copy_rows
from blocktable_vllm.state import State

MAX_MARKS, MAX_SHOWN = 1 << 15, 64

RANGE_ENTRIES = 4
"""int32 entries that a range takes beside its values where a commit is staged, and a little more."""


class TrackedState(State):
    """Memory of all groups, a journal of changes, and a queue of appends that are not in the rows yet.

    The host's rows and counts are up to date where the queue is empty: every reader flushes it first.
    """

    is_bounded = True
    buffer_type: type = TrackedBuffer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        arena = self.device.config.arena
        self._num_groups, self._num_rows = arena.num_groups, arena.num_rows
        self._num_counts = self._num_groups * self._num_rows
        self._widths = list(arena.widths)
        self._starts = list(arena.group_offsets)
        self._expansions = [group.block_size // group.kernel_block_size for group in self.groups]
        self._cleans = self.settings.clean_tails
        columns = [np.array(values, np.int64)[:, None] for values in (self._starts, self._widths, self._expansions)]
        self._start_column, self._width_column, self._expansion_column = columns
        self._first_cells = (np.arange(self._num_groups) * self._num_rows)[:, None]
        self._expands = max(self._expansions) > 1
        self._indices = np.arange(self._num_rows)
        self._ones = np.ones(self._num_counts, np.int64)
        self._tables = np.hstack(columns)
        self._new_row_budget = sum(self._widths)
        self._most_staged = steady_entries(self.device.config)
        # What queued appends change: a count and a range of columns for each row and group.
        self._offsets = np.empty(2 * self._num_counts, np.int64)
        self._lengths = np.empty(2 * self._num_counts, np.int64)

        capacity, compiled = 4 * self._num_counts + 64, compiled_changes()
        self._append_to_all_groups = self._pack = None
        self._journal: Any
        if compiled is None:
            self._journal = Journal(capacity)
        else:
            self._append_to_all_groups = compiled.append_to_all_groups
            self._journal, self._pack = compiled.make_journal(arena, self.host.mirror, capacity)
        store = self.device.store
        self._lender: Any = store if hasattr(store, "lend") else None
        self._marks: list[tuple[int, int]] = []
        self._last_marked = -1  # the largest row with a change in the journal
        # Rows below hold the same on the host and on the device, except for what the journal says.
        self._trusted = [0] * self._num_groups
        # Columns of a row from there on are NULL on the host, unless its count is larger.
        self._highest = np.zeros((self._num_groups, self._num_rows), np.int32)

        self._queued_rows: list[int] = []
        self._queued_counts: list[int] = []
        self._queued_ids = array("i")
        self._queued: set[int] = set()
        self._lists = [list] * self._num_groups
        # Blocks that a row surely has room for in every group; 0: not known.
        self._rooms = [0] * self._num_rows

        self._shown: list[weakref.ref[Any]] = []  # rows and counts that other code may hold
        self._is_shown = False
        self._counts_before: IntArray | None = None

    # Appends, queued.

    def queue(self, block_ids: Any, row: Any) -> bool:
        """Take an append of as many blocks to every group; False with nothing changed: it is of another kind.

        Args:
            block_ids: a list of ints for each group, all of one length.
            row: the row.
        """
        queued = self._queued_ids
        before = len(queued)
        if type(row) is not int:  # what it is, the slow path says
            return False
        try:
            room = self._rooms[row]
            if room < 1 or row in self._queued or row < 0:
                room = self._make_room(row)
                before = len(queued)  # it may have flushed
            if self._num_groups == 1:
                ids = block_ids[0]
                if type(ids) is not list:
                    return False
                number = len(ids)
                queued.extend(ids)
            else:
                if [*map(type, block_ids)] != self._lists:
                    return False
                number = len(block_ids[0])
                if number == 1:
                    queued.extend([block_id for (block_id,) in block_ids])
                elif [*map(len, block_ids)].count(number) == self._num_groups:
                    queued.extend(chain.from_iterable(block_ids))
                else:
                    return False
            if not 0 < number <= room:
                del queued[before:]
                return False
        except (IndexError, TypeError, ValueError, OverflowError):  # the slow path says that too
            del queued[before:]
            return False
        self._queued_rows.append(row)
        self._queued_counts.append(number)
        self._queued.add(row)
        self._rooms[row] = room - number
        return True

    def _make_room(self, row: Any) -> int:
        """Return how many blocks fit into a row in every group, 0 where appends cannot be queued."""
        self._settle_counts()
        if self._is_shown or row < 0:
            return 0
        if row in self._queued:
            self.flush()
        if self._rooms[row] < 1:
            rooms = (self._width_column[:, 0] - self.host.counts[:, row]) // self._expansion_column[:, 0]
            self._rooms[row] = max(0, int(rooms.min()))
        room: int = self._rooms[row]
        return room

    def flush(self) -> None:
        """Put the queued appends into the rows."""
        if not self._queued_rows:
            return
        mirror, queued = self.host.mirror, self._take_queue()
        if self._append_to_all_groups is None:
            self._append_by_numpy(mirror, *queued, self._journal.mark)
            return
        offsets, lengths = self._offsets, self._lengths
        size = self._append_to_all_groups(*queued, self._tables, self._num_rows, mirror, offsets, lengths)
        self._journal.mark(offsets[:size], lengths[:size])

    def _queue_arrays(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return what is queued: rows [n] and counts [n] int64, ids int32, row after row, group after group."""
        rows, counts = np.array(self._queued_rows, np.int64), np.array(self._queued_counts, np.int64)
        return rows, counts, np.array(self._queued_ids)

    def _take_queue(self) -> tuple[IntArray, IntArray, IntArray]:
        """Empty the queue and return it."""
        queued = self._queue_arrays()
        self._last_marked = max(self._last_marked, *self._queued_rows)
        self._queued_rows.clear()
        self._queued_counts.clear()
        self._queued.clear()
        del self._queued_ids[:]
        return queued

    def _append_by_numpy(
        self,
        mirror: IntArray,
        rows: IntArray,
        counts: IntArray,
        ids: IntArray,
        mark: Callable[[IntArray, IntArray], None],
    ) -> None:
        """Append what was queued to a mirror, and mark its new ranges before they are written."""
        order = rows.argsort()
        first_ids = (counts.cumsum() - counts)[order] * self._num_groups
        rows, counts = rows[order], counts[order]
        cells = self._first_cells + rows
        filled = mirror[cells]
        starts = self._start_column + rows * self._width_column + filled
        columns = counts * self._expansion_column
        each = np.broadcast_to(counts, cells.shape).ravel()
        blocks = ids[ranges((first_ids + np.arange(self._num_groups)[:, None] * counts).ravel(), each)].astype(np.int64)
        if self._expands:
            expansions = np.repeat(np.broadcast_to(self._expansion_column, cells.shape).ravel(), each)
            blocks = ranges(blocks * expansions, expansions)
        mark(cells, self._ones[: cells.size])  # they lie before the rows
        mark(starts, columns)
        mirror[ranges(starts.ravel(), columns.ravel())] = blocks
        mirror[cells] = filled + columns

    # Row operations, one row of one group. A row is an index into the table, at least 0.

    def row_index(self, row: Any) -> int:
        """Return a row as numpy's indexing takes it: negative ones count from the end. Its queued appends are done.

        Raises:
            IndexError: numpy's own: outside the table, or no index at all.
            DtypeError: what numpy takes for several rows; vLLM stores such things by halves.
        """
        found = self._indices[row]
        if found.ndim or isinstance(row, (bool, tuple)):
            raise DtypeError(f"A row must be one integer, got {row!r}; nothing was changed.")
        index = int(found)
        if index in self._queued:
            self.flush()
        self._settle_counts()
        return index

    def prepare(self, group: int, columns: Any, row: Any, *, replaces: bool) -> tuple[int, IntArray]:
        """Check an append, or with `replaces` new contents, of kernel blocks; change nothing.

        Args:
            group: which one.
            columns: a sequence of ints, whatever numpy stores into int32.
            row: as `row_index` takes it.
            replaces: whether they go in place of what the row holds.

        Returns:
            The row's index; [n] int32.

        Raises:
            RowCapacityError: they do not fit.
        """
        checked = np.empty(len(columns), np.int32)
        row = self.row_index(row)  # in vLLM's order, for its errors: length, row, contents
        checked[:] = columns
        used = 0 if replaces else int(self.host.counts[group, row])
        if used < 0 or used + checked.size > self._widths[group]:
            raise RowCapacityError(
                f"row {row} of group {group} holds {used} of {self._widths[group]} columns: {checked.size} more do not "
                "fit; nothing was changed."
            )
        return row, checked

    def store(self, group: int, columns: IntArray | None, row: int, *, replaces: bool) -> None:
        """Append kernel blocks that `prepare` returned, or replace a row by them; None: by nothing."""
        before = int(self.host.counts[group, row])
        first = 0 if replaces else before
        if columns is not None:
            self.host.rows[group][row, first : first + columns.size] = columns
            self._mark(group, row, first, columns.size)
        self._set_count(group, row, first + (0 if columns is None else columns.size), before)

    def clear_row(self, group: int, row: int) -> None:
        """Make a row empty, and its counted columns NULL."""
        count = int(self.host.counts[group, row])
        if count > 0:
            self._null(group, row, 0, count)
        self._set_count(group, row, 0, count)

    def move_row(self, group: int, src: int, tgt: int, *, clears_source: bool) -> None:
        """Copy what row src holds to row tgt, and with `clears_source` empty row src."""
        rows, counts = self.host.rows[group], self.host.counts[group]
        count, before = int(counts[src]), int(counts[tgt])
        rows[tgt, :count] = rows[src, :count]
        self._mark(group, tgt, 0, count)
        self._set_count(group, tgt, count, before)
        if clears_source:
            self.clear_row(group, src)

    def swap_row(self, group: int, a: int, b: int) -> None:
        """Exchange two rows and all that they hold after their counts."""
        rows, counts, highest = self.host.rows[group], self.host.counts[group], self._highest[group]
        ends = [max(int(highest[row]), int(counts[row])) for row in (a, b)]
        end = max(ends)
        rows[[a, b], :end] = rows[[b, a], :end]
        counts[[a, b]] = counts[[b, a]]
        highest[[a, b]] = ends[::-1]
        for row in (a, b):
            self._mark(group, row, 0, end)
            self._mark_count(group, row)

    def clear_group(self, group: int) -> None:
        """Make every entry of a group NULL, on the host and on the device; counts stay."""
        self.flush()
        self.device.tables[group].zero_()
        self.host.rows[group].fill(0)
        self._trusted[group] = 0
        if not self._is_shown:
            self._highest[group] = 0

    def _null(self, group: int, row: int, start: int, stop: int) -> None:
        self.host.rows[group][row, start:stop] = 0
        self._mark(group, row, start, stop - start)

    def _set_count(self, group: int, row: int, count: int, before: int) -> None:
        if before > count:
            if self._cleans:
                self._null(group, row, count, before)
            elif before > self._highest[group, row]:
                self._highest[group, row] = before
        self.host.counts[group, row] = count
        self._mark_count(group, row)

    def _mark(self, group: int, row: int, column: int, length: int) -> None:
        length = min(length, self._widths[group] - column)  # a count may be past the row where other code wrote it
        if length > 0:
            self._marks.append((self._starts[group] + row * self._widths[group] + column, length))

    def _mark_count(self, group: int, row: int) -> None:
        self._marks.append((group * self._num_rows + row, 1))
        if len(self._marks) > MAX_MARKS:  # a caller that never commits must not fill the memory
            self._take_marks()
        self._rooms[row] = 0
        if row > self._last_marked:
            self._last_marked = row

    # What others see and may write.

    def show_rows(self, group: int, name: str) -> Any:
        """Return a group's rows, "np" or "cpu", as a view that may be written to while other code holds it."""
        self.flush()
        self._is_shown = True
        self._rooms = [0] * self._num_rows
        self._highest[group] = self._widths[group]
        view = self._watched(self.host.tables[group].numpy())
        if name == "np":
            return view
        with torch.inference_mode(False):
            return torch.from_numpy(view)

    def show_counts(self, group: int) -> Any:
        """Return a group's counts, likewise. What is written there is found by comparing."""
        self.flush()
        if self._counts_before is None:
            self._counts_before = self.host.counts.copy()
            self._rooms = [0] * self._num_rows
        return self._watched(self.host.memory.numpy())[group * self._num_rows : (group + 1) * self._num_rows]

    def _watched(self, view: IntArray) -> IntArray:
        """Return a new view after noting it: it lives as long as anything that is made of it."""
        if len(self._shown) > MAX_SHOWN:
            self._is_held()  # forgets those that are gone
        self._shown.append(weakref.ref(view))
        return view

    def _is_held(self) -> bool:
        self._shown = [view for view in self._shown if view() is not None]
        return bool(self._shown)

    def _settle_counts(self) -> None:
        """Find what was written to the counts since they were shown, if they were."""
        before, self._counts_before = self._counts_before, None
        if before is None:
            return
        counts = self.host.counts
        np.maximum(self._highest, np.clip(before, 0, self._width_column), out=self._highest)
        changed = np.flatnonzero(counts != before)
        self._journal.mark(changed, self._ones[: changed.size])
        if changed.size:
            rows = changed % self._num_rows
            self._last_marked = max(self._last_marked, int(rows.max()))
        if self._is_held() or not self._are_counts_sane():
            self._is_shown = True
            self._highest[:] = self._width_column
            self._rooms = [0] * self._num_rows

    def _are_counts_sane(self) -> bool:
        counts = self.host.counts
        return bool(((counts >= 0) & (counts <= self._width_column)).all())

    def give_up_rows(self) -> None:
        """As in strict mode; what is queued is put into the rows first."""
        if self.has_own_rows:
            self.flush()
            self._rooms = [0] * self._num_rows
        super().give_up_rows()

    def host_state(self) -> tuple[list[IntArray], IntArray]:
        """Return copies of every group's rows and of the counts, queued appends included; changes nothing.

        For tests: it looks without asking for the rows, which would end tracking.
        """
        mirror, arena = self.host.mirror.copy(), self.device.config.arena
        self._append_by_numpy(mirror, *self._queue_arrays(), lambda offsets, lengths: None)
        return [arena.view(mirror, group) for group in range(self._num_groups)], arena.view(mirror, -1)

    # Commits.

    def commit(self, n: int) -> None:
        """Bring the first n rows of every group to the device: whole where they came back, else what changed."""
        n = self.num_rows(n)
        self.flush()
        self._settle_counts()
        if self._is_shown:
            for group in range(self._num_groups):
                self._send_whole(group, 0, n)
            self._forget_changes()
            self._trust(n)
            return
        limits = [n] * self._num_groups  # rows of each group whose changes the journal sends
        if min(self._trusted) < n:
            limits = self._send_new_rows(n)
        self._take_marks()
        if self._journal.size and not self._send_packed(min(limits)):
            self._send_journal(limits)
        self._forget_changes()
        self._trusted = [n] * self._num_groups

    def commit_group(self, group: int, n: int | None) -> None:
        """Bring the first n rows of one group to the device, whole."""
        if self._num_groups == 1:
            self.commit(self.num_rows(n))
            return
        self.flush()
        self._settle_counts()
        stop = self.num_rows(n)
        self._send_whole(group, 0, stop)
        # What the journal says of rows below is sent once more by the next commit of all groups.
        self._trusted[group] = 0 if self._is_shown else stop

    def _take_marks(self) -> None:
        """Put what single operations have marked into the journal."""
        if self._marks:
            marks = np.array(self._marks)
            self._journal.mark(marks[:, 0], marks[:, 1])
            self._marks.clear()

    def _trust(self, n: int) -> None:
        """Track again where no other code holds the rows any more."""
        if self._is_held() or not self._are_counts_sane():
            self._trusted = [0] * self._num_groups
            self._counts_before = None
            return
        self._is_shown = False
        self._trusted = [n] * self._num_groups

    def _forget_changes(self) -> None:
        self._marks.clear()
        self._journal.clear()
        self._last_marked = -1

    def _send_new_rows(self, n: int) -> list[int]:
        """Send rows whole that were not in the last commit: by the journal where they are few, else as copies.

        Returns:
            [num_groups]. Below which row the journal still has something to send.
        """
        entries = sum(max(0, n - first) * width for first, width in zip(self._trusted, self._widths, strict=True))
        limits = [n] * self._num_groups
        for group, first in enumerate(self._trusted):
            if first >= n:
                continue
            if entries <= self._new_row_budget:
                width = self._widths[group]
                self._marks.append((self._starts[group] + first * width, (n - first) * width))
                self._marks.append((group * self._num_rows + first, n - first))
            else:
                self._send_whole(group, first, n)
                limits[group] = first
        return limits

    def _send_whole(self, group: int, start: int, stop: int) -> None:
        if start < stop:
            copy_rows(self.host.tables[group], self.device.tables[group], start, stop)
            counts = torch.from_numpy(self.host.counts[group].clip(0, self._widths[group]))
            copy_rows(counts, self.device.counts[group], start, stop)
            self.num_bytes_sent += 4 * (stop - start) * (self._widths[group] + 1)

    def _send_packed(self, limit: int) -> bool:
        """Send the journal as it is packed by compiled code; False with nothing done: it is too much, or rows wait."""
        if self._pack is None or self._lender is None or self._last_marked >= limit:
            return False
        stream = self.device.stream
        used, num_bytes = self._pack(self._lender.lend(stream))
        if used < 0:
            return False
        self._lender.commit(used, stream=stream)
        self.num_bytes_sent += num_bytes
        return True

    def _send_journal(self, limits: list[int]) -> None:
        offsets, lengths = self._journal.merge()
        if self._last_marked >= min(limits):
            offsets, lengths = self._within(offsets, lengths, np.array(limits))
        mirror, arena = self.host.mirror, self.device.config.arena
        for starts, sizes in self._parts(offsets, lengths):
            values = mirror[starts if sizes.max() == 1 else ranges(starts, sizes)]
            self._write(Writes(arena, starts, sizes.astype(np.int32), values))

    def _within(self, offsets: IntArray, lengths: IntArray, limits: IntArray) -> tuple[IntArray, IntArray]:
        """Return the parts of disjoint ascending ranges that lie in rows and counts below each group's limit."""
        starts = np.concatenate((self._first_cells[:, 0], self._start_column[:, 0]))
        stops = starts + np.concatenate((limits, limits * self._width_column[:, 0]))
        ends = offsets + lengths
        first, last = ends.searchsorted(starts, "right"), offsets.searchsorted(stops, "left")
        pieces = np.maximum(last - first, 0)
        source, part = ranges(first, pieces), np.repeat(np.arange(starts.size), pieces)
        lower = np.maximum(offsets[source], starts[part])
        sizes = np.minimum(ends[source], stops[part]) - lower
        is_some = sizes > 0  # a range over the counts of two groups also meets an empty part of one of them
        return lower[is_some], sizes[is_some]

    def _parts(self, offsets: IntArray, lengths: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
        """Cut ranges into parts that a store stages without a wait (R9.3)."""
        cost = lengths + RANGE_ENTRIES
        most = self._most_staged // 2 - RANGE_ENTRIES  # of one piece: a part may go beyond it by another piece
        if CHANGES_HEADER + cost.sum() <= self._most_staged:
            if offsets.size:
                yield offsets, lengths
            return
        pieces = -(-lengths // most)
        index = ranges(np.zeros_like(pieces), pieces)
        starts = np.repeat(offsets, pieces) + index * most
        sizes = np.minimum(np.repeat(offsets + lengths, pieces) - starts, most)
        part = (np.cumsum(sizes + RANGE_ENTRIES) - 1) // most
        bounds = [0, *(np.flatnonzero(part[1:] != part[:-1]) + 1), starts.size]
        for first, last in pairwise(bounds):
            yield starts[first:last], sizes[first:last]

    def _write(self, writes: Writes) -> None:
        self.device.store.write(writes, stream=self.device.stream)
        self.num_bytes_sent += writes.num_bytes
