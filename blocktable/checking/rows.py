"""Rows that tell a checker of every operation, and are asked first whether it hands in a block twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from blocktable.arrays import IntArray
from blocktable.checking.pools import Holders, has_distinct_blocks
from blocktable.config import BlockTableConfig
from blocktable.findings import Finding, Findings
from blocktable.host_path import HostPath
from blocktable.inspection import position_of
from blocktable.protocols import ranges


class RowWatcher(Protocol):
    """What `CheckedRows` tells.

    Attributes:
        config: the geometry.
        findings: where findings go.
        lives: follows the rows, as `RowLives`.
        holders: the rows as of the last commit.
        num_commits: commits so far.
    """

    config: BlockTableConfig
    findings: Findings
    lives: Any
    holders: Holders
    num_commits: int

    def on_row_call(self) -> None:
        """A row operation changes the rows. It is not refused any more."""

    def hand_in(self, group: int, ids: IntArray) -> bool:
        """Blocks come into rows; return whether any of them may be in a row of the pool already. ids: [n] int64."""

    def has_replaced(self, rows: IntArray, group: int, ids: IntArray) -> None:
        """Blocks took the place of others inside rows: what those held was copied into them.

        Args:
            rows: [n] int64. The row of each block.
            group: the group.
            ids: [n] int64. Blocks, never the null block.
        """

    def before_committed(self, rows: HostPath) -> None:
        """The device has taken what is pending in the rows."""


class Held(NamedTuple):
    """Blocks of some rows in one group. All [n] int64.

    Attributes:
        rows: rows.
        block_indexes: place of each block in its row, in manager blocks.
        ids: manager blocks, never the null block.
        is_new: [n] bool. Whether the operation hands the block in.
    """

    rows: IntArray
    block_indexes: IntArray
    ids: IntArray
    is_new: IntArray


class CheckedRows:
    """A `HostPath` before the real one: it checks what an operation hands in, and follows the lives of rows.

    Args:
        rows: the real ones; everything that changes nothing is theirs.
        watcher: whom to tell.
    """

    def __init__(self, rows: HostPath, watcher: RowWatcher) -> None:
        self._rows, self._watcher, self._lives = rows, watcher, watcher.lives
        # What each step asks for: found here, not by way of `__getattr__`.
        self.journal: Any = rows.journal
        self.pack_changes: Callable[[IntArray], int] = rows.pack_changes
        self._append_checked = self._set_checked = self._truncate_checked = _says_no
        self._is_compiled = False  # from the first operation on, which tells of itself
        config = watcher.config
        self._with_distinct = [group for group in range(len(config.groups)) if has_distinct_blocks(config, group)]
        self._with_slots = [i for i, geometry in enumerate(config.groups) if geometry.slot_mode in ("linear", "ring")]
        self._nulls = np.array([group.null_block_id for group in config.groups])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    # Blocks come in.

    def append_row(self, row: Any, block_ids: Any) -> None:
        if self._append_checked(row, block_ids, None):
            return
        self._append(self._rows.one_row("row", row), block_ids, None, lambda: self._rows.append_row(row, block_ids))

    def append_rows(self, rows: Any, block_ids: Any, counts: Any) -> None:
        if counts is not None and self._append_checked(rows, block_ids, counts):
            return
        chosen = self._chosen(rows)
        if counts is None:
            self._rows.append_rows(rows, block_ids, counts)  # refuses it
        self._append(chosen, block_ids, counts, lambda: self._rows.append_rows(chosen, block_ids, counts))

    def _on_row_call(self) -> None:
        self._watcher.on_row_call()
        compiled = self._watcher.holders.compiled
        if compiled is not None and not self._is_compiled:
            compiled_rows: Any = self._rows
            operations = compiled_rows.checked_operations(compiled)
            self._append_checked, self._set_checked, self._truncate_checked = operations
            self._is_compiled = True

    def _is_done(self, operation: Callable[..., bool], *arguments: Any) -> bool:
        self._watcher.on_row_call()
        return operation(*arguments)

    def _append(self, rows: IntArray, block_ids: Any, counts: Any, call: Callable[[], None]) -> None:
        ids, blocks = self._rows.check_blocks(rows, block_ids, counts, is_append=True)
        self._on_row_call()
        for group, given, owners, block_indexes in self._given(ids, blocks):
            if group in self._with_distinct and given.size:
                held = self._rows.filled[group, rows] // self._expansion(group)
                new = Held(rows[owners], block_indexes + held[owners], given, np.ones(given.size, np.bool_))
                self._refuse_twice(group, rows, new, None)
        call()

    def set_row(self, row: Any, block_ids: Any) -> None:
        if self._is_compiled and self._is_done(self._set_checked, row, block_ids, None):
            return
        self._set(self._rows.one_row("row", row), block_ids, None, lambda: self._rows.set_row(row, block_ids))

    def set_rows(self, rows: Any, block_ids: Any, counts: Any) -> None:
        if self._is_compiled and counts is not None and self._is_done(self._set_checked, rows, block_ids, counts):
            return
        chosen = self._chosen(rows)
        if counts is None:
            self._rows.set_rows(rows, block_ids, counts)  # refuses it
        self._set(chosen, block_ids, counts, lambda: self._rows.set_rows(chosen, block_ids, counts))

    def _set(self, rows: IntArray, block_ids: Any, counts: Any, call: Callable[[], None]) -> None:
        ids, blocks = self._rows.check_blocks(rows, block_ids, counts, is_append=False)
        self._on_row_call()
        differs, goes_on = np.zeros((2, rows.size), np.bool_)
        first_group = np.zeros(rows.size, np.int64)
        for group, given, owners, block_indexes in self._given(ids, blocks):
            if group in self._with_slots:
                old = self._first_blocks(group, rows)
                new = np.full(rows.size, self._nulls[group])
                new[owners[block_indexes == 0]] = given[block_indexes == 0]
                is_held = (old != self._nulls[group]) & (new != self._nulls[group])
                first_group[is_held & (old != new) & ~differs] = group
                differs |= is_held & (old != new)
                goes_on |= is_held & (old == new)
            if group in self._with_distinct and given.size:
                new_ids = Held(rows[owners], block_indexes, given, np.ones(given.size, np.bool_))
                self._refuse_twice(group, rows[:0], new_ids, None)
        if differs.any() and not self._watcher.config.stale_rows:
            self._note_live_rows(rows[differs], first_group[differs])
        call()
        begins = differs | ~goes_on
        self._lives.begin(rows[begins])
        self._lives.unmark(rows[~begins])

    def replace(self, rows: IntArray, group: int, starts: IntArray, block_ids: Any, counts: IntArray | None) -> None:
        ids, blocks = self._rows.check_replacement(rows, group, starts, block_ids, counts)
        self._watcher.on_row_call()
        if group in self._with_distinct and ids.size:
            owners = np.repeat(np.arange(rows.size), blocks)
            block_indexes = ranges(starts, blocks)
            stops = starts + blocks
            new = Held(rows[owners], block_indexes, ids, np.ones(ids.size, np.bool_))
            self._refuse_twice(group, rows, new, lambda row, place: (place >= starts[row]) & (place < stops[row]))
        self._rows.replace(rows, group, starts, ids, None if counts is None else blocks)
        self._lives.unmark(rows[blocks > 0])
        is_block = ids != self._nulls[group]
        self._watcher.has_replaced(np.repeat(rows, blocks)[is_block], group, ids[is_block])

    def remap(self, group: int, old_ids: Any, new_ids: Any) -> None:
        old, new = self._rows.check_mapping(group, old_ids, new_ids)
        self._watcher.on_row_call()
        rows = np.flatnonzero(self._rows.filled[group])
        held = self._held(group, rows)
        order = old.argsort()
        found, ids = np.isin(held.ids, old), held.ids.copy()
        if found.any():
            ids[found] = new[order][old[order].searchsorted(ids[found])]
            if group in self._with_distinct:
                is_block = ids != self._nulls[group]
                self._watcher.hand_in(group, ids[found & is_block])
                self._report_twice(group, Held(*(a[is_block] for a in (held.rows, held.block_indexes, ids, found))))
        self._rows.remap(group, old, new)
        self._lives.unmark(np.unique(held.rows[found]))
        is_block = found & (ids != self._nulls[group])
        self._watcher.has_replaced(held.rows[is_block], group, ids[is_block])

    # Blocks go, or follow their rows.

    def truncate_row(self, row: Any, num_blocks: Any) -> None:
        if self._is_compiled and self._is_done(self._truncate_checked, row, num_blocks, True):
            return
        self._truncate(self._rows.one_row("row", row), lambda: self._rows.truncate_row(row, num_blocks))

    def truncate_rows(self, rows: Any, num_blocks: Any) -> None:
        if (
            self._is_compiled
            and num_blocks is not None
            and self._is_done(self._truncate_checked, rows, num_blocks, False)
        ):
            return
        chosen = self._chosen(rows)
        self._truncate(chosen, lambda: self._rows.truncate_rows(chosen, num_blocks))

    def clear_rows(self, rows: Any) -> None:
        if self._is_compiled and self._is_done(self._truncate_checked, rows, None, False):
            return
        chosen = self._chosen(rows)
        self._truncate(chosen, lambda: self._rows.clear_rows(chosen))

    def truncate(self, rows: IntArray, num_blocks: IntArray | int) -> None:
        self._truncate(rows, lambda: self._rows.truncate(rows, num_blocks))

    def _truncate(self, rows: IntArray, call: Callable[[], None]) -> None:
        before = self._rows.filled[:, rows] // self._rows.columns_per_block
        call()  # may refuse it
        self._watcher.on_row_call()
        self._lives.truncate(rows, before, self._rows.filled[:, rows] // self._rows.columns_per_block)

    def null(self, rows: IntArray, group: int, starts: IntArray, stops: IntArray) -> None:
        self._rows.null(rows, group, starts, stops)  # may refuse it
        self._watcher.on_row_call()

    def copy(self, src: IntArray, dst: IntArray, *, vacate: bool) -> None:
        self._watcher.on_row_call()
        self._rows.copy(src, dst, vacate=vacate)
        self._lives.copy(src, dst, vacate=vacate)

    def exchange(self, entries: IntArray, values: IntArray) -> None:
        """Another table's changes: its own checker looks at them. They stand for copies, as `replace` does."""
        groups, rows, _ = self._watcher.config.arena.coordinates(entries)
        changed = np.unique(rows)
        self._watcher.on_row_call()
        before = [self._first_blocks(group, changed) for group in self._with_slots]
        self._rows.exchange(entries, values)
        differs, goes_on = np.zeros((2, changed.size), np.bool_)
        for group, old in zip(self._with_slots, before, strict=True):
            new, null = self._first_blocks(group, changed), self._nulls[group]
            differs |= (old != new) & (old != null) & (new != null)
            goes_on |= (old == new) & (old != null)
        begins = differs | ~goes_on
        self._lives.begin(changed[begins])
        self._lives.unmark(changed[~begins])
        for group in range(self._nulls.size):
            ids = values[groups == group].astype(np.int64) // self._expansion(group)
            is_block = (ids != self._nulls[group]) & (ids >= 0)
            self._watcher.hand_in(group, ids[is_block])
            self._watcher.has_replaced(rows[groups == group][is_block], group, ids[is_block])

    def committed(self) -> int:
        self._watcher.before_committed(self._rows)
        return self._rows.committed()

    # What rows hold, and what is handed in.

    def _chosen(self, rows: Any) -> IntArray:
        return np.array(self._rows.check_rows("rows", rows))

    def _expansion(self, group: int) -> int:
        return self._watcher.config.groups[group].blocks_per_kv_block

    def _table(self, group: int) -> IntArray:
        """[num_rows, blocks] int32. The first column of each block."""
        table: IntArray = self._watcher.config.arena.view(self._rows.mirror, group)[:, :: self._expansion(group)]
        return table

    def _first_blocks(self, group: int, rows: IntArray) -> IntArray:
        blocks: IntArray = self._table(group)[rows, 0] // self._expansion(group)
        return blocks

    def _held(self, group: int, rows: IntArray) -> Held:
        """Return the blocks that rows hold now, holes left out."""
        held = (self._rows.filled[group, rows] // self._expansion(group)).astype(np.int64)
        owners, block_indexes = np.repeat(rows, held), ranges(np.zeros_like(held), held)
        ids = (self._table(group)[owners, block_indexes] // self._expansion(group)).astype(np.int64)
        is_block = ids != self._nulls[group]
        return Held(owners[is_block], block_indexes[is_block], ids[is_block], np.zeros(int(is_block.sum()), np.bool_))

    def _given(self, ids: IntArray, blocks: IntArray) -> Any:
        """Yield, for each group, (group, ids, index of the row of each, its place among those of its row)."""
        ends = blocks.sum(1).cumsum().tolist()
        for group, counts in enumerate(blocks):
            start = ends[group - 1] if group else 0
            given = ids[start : ends[group]].astype(np.int64)
            owners = np.repeat(np.arange(counts.size), counts)
            yield group, given, owners, ranges(np.zeros_like(counts), counts)

    # Findings.

    def _refuse_twice(self, group: int, rows: IntArray, new: Held, is_replaced: Any) -> None:
        """Report blocks of `new` that stand twice in a row, or are among what `rows` hold already.

        Args:
            rows: [n] int64. Rows whose blocks stay.
            is_replaced: (index of a row, place) -> whether what stands there goes. None: nothing goes.
        """
        is_block = new.ids != self._nulls[group]
        if not is_block.all():
            new = Held(*(array[is_block] for array in new))
        may_be_held = self._watcher.hand_in(group, new.ids)
        if not may_be_held and np.unique(new.ids).size == new.ids.size:
            return
        if rows.size and may_be_held:
            old = self._held(group, rows)
            stays = np.isin(old.ids, new.ids)
            if stays.any() and is_replaced is not None:
                index = np.argsort(rows)[np.searchsorted(np.sort(rows), old.rows)]
                stays &= ~is_replaced(index, old.block_indexes)
            if stays.any():
                new = Held(*(np.concatenate((a[stays], b)) for a, b in zip(old, new, strict=True)))
        self._report_twice(group, new)

    def _report_twice(self, group: int, blocks: Held) -> None:
        """Report, of each row, the first place of a block that stands twice there and is handed in."""
        order = np.lexsort((blocks.block_indexes, blocks.ids, blocks.rows))
        rows, block_indexes, ids, is_new = (array[order] for array in blocks)
        twice = np.flatnonzero((rows[1:] == rows[:-1]) & (ids[1:] == ids[:-1]) & (is_new[1:] | is_new[:-1])) + 1
        if not twice.size:
            return
        twice = twice[np.lexsort((block_indexes[twice], rows[twice]))]
        chosen = twice[np.unique(rows[twice], return_index=True)[1]]
        size = self._watcher.config.groups[group].block_size
        found = []
        for place in chosen.tolist():
            row, block, first, second = (
                int(rows[place]),
                int(ids[place]),
                int(block_indexes[place - 1]),
                int(block_indexes[place]),
            )
            position, earlier = (position_of(self._watcher.config, group, index * size) for index in (second, first))
            message = (
                f"duplicate_block: block {block} comes a second time into row {row} of group {group}, as its block "
                f"{second}; it is its block {first} already. Position {position} would get the slot of position "
                f"{earlier}, and overwrite it."
            )
            found.append(
                Finding(
                    "duplicate_block",
                    message,
                    self._watcher.num_commits,
                    group=group,
                    row=row,
                    position=position,
                    block_id=block,
                )
            )
        self._watcher.findings.add(found)

    def _note_live_rows(self, rows: IntArray, groups: IntArray) -> None:
        found = []
        for row, group in zip(rows.tolist(), groups.tolist(), strict=True):
            first = int(self._first_blocks(group, np.array([row]))[0])
            held = int(self._rows.filled[group, row]) // self._expansion(group)
            message = (
                f"live_row_set: row {row} is set to other blocks while it holds {held} in group {group}, the first of "
                f"them block {first}. If its request still runs, two requests share a row and read each other's "
                "tokens; if it has ended, clear the row first."
            )
            found.append(
                Finding("live_row_set", message, self._watcher.num_commits, group=group, row=row, block_id=first)
            )
        self._watcher.findings.add(found)


def _says_no(*arguments: Any) -> bool:
    return False
