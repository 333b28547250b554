"""The tables in fast mode: vLLM's calls over tracked rows. An append that does not fit raises and changes nothing."""

from __future__ import annotations

from typing import Any

from blocktable_vllm.state import State
from blocktable_vllm.tables import Multi0251, Multi0330, PlainMulti, PlainTable, Table0251, Table0330
from blocktable_vllm.tracking import TrackedState


def change_row(state: Any, tables: list[Any], block_ids: Any, row_idx: Any, *, replaces: bool) -> None:
    """Append to a row of some tables, or replace what it holds, in all of them or, where it does not fit, in none."""
    row = state.row_index(row_idx) if replaces else row_idx
    prepared = []
    for index, table in enumerate(tables):
        ids, (_, group) = block_ids[index], table.__blocktable__
        if ids:
            prepared.append((group, *state.prepare(group, table._expand(ids), row, replaces=replaces)))
        elif replaces:  # to append nothing vLLM does not look at the row
            prepared.append((group, row, None))
    for group, place, columns in prepared:
        state.store(group, columns, place, replaces=replaces)


def plain(kind: type, *names: str, **others: Any) -> dict[str, Any]:
    """Return methods of a plain class, which a tracked one does again when its rows are given up."""
    return {**{name: vars(kind)[name] for name in names}, **others}


class TrackedTable(PlainTable):
    """One group's rows in fast mode. Where its arrays were replaced it does what strict mode does."""

    __state_type__ = TrackedState
    __given_up__ = plain(
        PlainTable, "append_row", "add_row", "clear_row", "move_row", "swap_row", "clear", num_blocks_per_row=None
    )

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
        """Add blocks after what a row holds.

        Raises:
            RowCapacityError: they do not fit; nothing was changed.
        """
        state, _ = self.__blocktable__
        if not (len(state.groups) == 1 and state.queue((block_ids,), row_idx)):
            change_row(state, [self], [block_ids], row_idx, replaces=False)

    def add_row(self, block_ids: Any, row_idx: int) -> None:
        """Replace what a row holds; what it held after the new blocks stays. Errors: as `append_row`."""
        state, _ = self.__blocktable__
        change_row(state, [self], [block_ids], row_idx, replaces=True)

    def clear_row(self, row_idx: int) -> None:
        """Make a row empty, and its counted columns NULL."""
        state, group = self.__blocktable__
        state.clear_row(group, state.row_index(row_idx))

    def move_row(self, src: int, tgt: int) -> None:
        """Copy what row src holds to row tgt; profile 0.33.0 empties row src."""
        state, group = self.__blocktable__
        source, target = state.row_index(src), state.row_index(tgt)
        state.move_row(group, source, target, clears_source=self._clears_source)

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange two rows."""
        state, group = self.__blocktable__
        state.swap_row(group, state.row_index(src), state.row_index(tgt))

    def clear(self) -> None:
        """Make every entry NULL, on the host and on the device. Counts stay, as in vLLM."""
        state, group = self.__blocktable__
        state.clear_group(group)

    def _bounds(self, state: State, group: int) -> Any:
        if state.has_own_rows:
            return state.device.counts[group]
        return self.num_blocks_per_row[: self.block_table.gpu.shape[0]]


class TrackedMulti(PlainMulti):
    """The tables of every KV cache group in fast mode: an append or a replacement changes every group, or none."""

    __given_up__ = plain(PlainMulti, "append_row", "add_row", "commit_block_table")

    def append_row(self, block_ids: Any, row_idx: int) -> None:
        """Add blocks after what a row holds. block_ids: one sequence for each group.

        Raises:
            RowCapacityError: a group's row cannot hold them; no group was changed.
        """
        state = self.__blocktable__
        if not state.has_own_rows:
            super().append_row(block_ids, row_idx)
        elif not state.queue(block_ids, row_idx):
            change_row(state, self.block_tables, block_ids, row_idx, replaces=False)

    def add_row(self, block_ids: Any, row_idx: int) -> None:
        """Replace what a row holds. Args and errors: as `append_row`."""
        state = self.__blocktable__
        if state.has_own_rows:
            change_row(state, self.block_tables, block_ids, row_idx, replaces=True)
        else:
            super().add_row(block_ids, row_idx)

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
