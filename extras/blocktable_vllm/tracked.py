"""The tables in fast mode: vLLM's calls over tracked rows. An append that does not fit raises and changes nothing."""

from __future__ import annotations

from typing import Any

from blocktable import IntArray
from blocktable_vllm.state import State
from blocktable_vllm.tables import Multi0251, Multi0330, PlainMulti, PlainTable, Table0251, Table0330
from blocktable_vllm.tracking import TrackedState


class TrackedTable(PlainTable):
    """One group's rows in fast mode. Where its arrays were replaced it does what strict mode does."""

    __state_type__ = TrackedState

    @property
    def num_blocks_per_row(self) -> Any:
        """[max_num_reqs] int32, numpy, writable. Columns of each row."""
        value = vars(self)["num_blocks_per_row"]
        found = vars(self).get("__blocktable__")
        if found is None:
            return value
        state, group = found
        return state.show_counts(group) if value is state.count_rows[group] else value

    @num_blocks_per_row.setter
    def num_blocks_per_row(self, value: Any) -> None:
        vars(self)["num_blocks_per_row"] = value

    def append_row(self, block_ids: Any, row_idx: int) -> None:
        """Add blocks behind what a row holds.

        Raises:
            RowCapacityError: they do not fit; nothing was changed.
        """
        state, group = self.__blocktable__
        if not state.has_own_rows:
            super().append_row(block_ids, row_idx)
        elif not (len(state.groups) == 1 and state.queue((block_ids,), row_idx)) and block_ids:
            row, columns = self._prepare(block_ids, row_idx, replaces=False)
            state.store(group, columns, row, replaces=False)

    def add_row(self, block_ids: Any, row_idx: int) -> None:
        """Replace what a row holds; what it held behind the new blocks stays. Errors: as `append_row`."""
        state, group = self.__blocktable__
        if not state.has_own_rows:
            super().add_row(block_ids, row_idx)
            return
        row = state.row_index(row_idx)
        columns = self._prepare(block_ids, row, replaces=True)[1] if block_ids else None
        state.store(group, columns, row, replaces=True)

    def _prepare(self, block_ids: Any, row_idx: Any, *, replaces: bool) -> tuple[int, IntArray]:
        """Return the row and the columns of an append, checked."""
        state, group = self.__blocktable__
        return state.prepare(group, self._expand(block_ids), row_idx, replaces=replaces)  # type: ignore[no-any-return]

    def clear_row(self, row_idx: int) -> None:
        """Make a row empty, and its counted columns NULL."""
        state, group = self.__blocktable__
        if state.has_own_rows:
            state.clear_row(group, state.row_index(row_idx))
        else:
            super().clear_row(row_idx)

    def move_row(self, src: int, tgt: int) -> None:
        """Copy what row src holds to row tgt; profile 0.33.0 empties row src."""
        state, group = self.__blocktable__
        if state.has_own_rows:
            source, target = state.row_index(src), state.row_index(tgt)
            state.move_row(group, source, target, clears_source=self._clears_source)
        else:
            super().move_row(src, tgt)

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange two rows."""
        state, group = self.__blocktable__
        if state.has_own_rows:
            state.swap_row(group, state.row_index(src), state.row_index(tgt))
        else:
            super().swap_row(src, tgt)

    def clear(self) -> None:
        """Make every entry NULL, on the host and on the device. Counts stay, as in vLLM."""
        state, group = self.__blocktable__
        if state.has_own_rows:
            state.clear_group(group)
        else:
            super().clear()

    def _bounds(self, state: State, group: int) -> Any:
        if state.has_own_rows:
            return state.device.counts[group]
        return self.num_blocks_per_row[: self.block_table.gpu.shape[0]]


class TrackedMulti(PlainMulti):
    """The tables of every KV cache group in fast mode: an append or a replacement changes every group, or none."""

    def append_row(self, block_ids: Any, row_idx: int) -> None:
        """Add blocks behind what a row holds. block_ids: one sequence for each group.

        Raises:
            RowCapacityError: a group's row cannot hold them; no group was changed.
        """
        state = self.__blocktable__
        if state.queue(block_ids, row_idx):
            return
        if not state.has_own_rows:
            super().append_row(block_ids, row_idx)
            return
        prepared = []
        for group, table in enumerate(self.block_tables):
            ids = block_ids[group]
            if ids:  # else vLLM does not look at the row
                prepared.append((group, *table._prepare(ids, row_idx, replaces=False)))
        for group, row, columns in prepared:
            state.store(group, columns, row, replaces=False)

    def add_row(self, block_ids: Any, row_idx: int) -> None:
        """Replace what a row holds. Args and errors: as `append_row`."""
        state = self.__blocktable__
        if not state.has_own_rows:
            super().add_row(block_ids, row_idx)
            return
        row = state.row_index(row_idx)
        prepared = []
        for group, table in enumerate(self.block_tables):
            ids = block_ids[group]
            prepared.append(table._prepare(ids, row, replaces=True)[1] if ids else None)
        for group, columns in enumerate(prepared):
            state.store(group, columns, row, replaces=True)

    def commit_block_table(self, num_reqs: int) -> None:
        """Bring the first rows to the device, without a wait: what changed of them, of all groups in one launch."""
        state = self.__blocktable__
        if state.has_own_rows:
            state.commit(num_reqs)
        else:
            super().commit_block_table(num_reqs)


class TrackedTable0251(TrackedTable, Table0251):
    """vLLM 0.25.1's `BlockTable` in fast mode."""


class TrackedTable0330(TrackedTable, Table0330):
    """vLLM 0.33.0's `BlockTable` in fast mode."""


class TrackedMulti0251(TrackedMulti, Multi0251):
    """vLLM 0.25.1's `MultiGroupBlockTable` in fast mode."""


class TrackedMulti0330(TrackedMulti, Multi0330):
    """vLLM 0.33.0's `MultiGroupBlockTable` in fast mode."""
