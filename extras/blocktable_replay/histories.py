"""Who had which block, and who wrote it when: the history of a recorded table, from its calls alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blocktable import BlockTableConfig
from blocktable.typing import IntArray
from blocktable_replay.checker import expected_slots
from blocktable_replay.lane import Lane
from blocktable_replay.player import Player, rows_of
from blocktable_replay.recorded import RecordedCall, Recording
from blocktable_replay.rowmodel import RowModel, as_many

NOBODY = -1


@dataclass(slots=True)
class Life:
    """What a row holds between being set and being cleared or set again: one request, as far as a table can know.

    Attributes:
        row: its row, or the last one that it had.
        began: step of the call that began it.
        ended, ended_call: step and number of the call that ended it. None: it has not.
    """

    row: int
    began: int
    ended: int | None = None
    ended_call: int | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """A call that changed a life.

    Attributes:
        step, call: which.
        row: the life's row after it.
        text: what it did, in words.
    """

    step: int
    call: str
    row: int
    text: str


@dataclass(slots=True)
class Holding:
    """A life has a block.

    Attributes:
        life: its number.
        since, how: step and name of the call that gave it.
        until, how_ended: those of the call that took it. None: it has it still.
    """

    life: int
    since: int
    how: str
    until: int | None = None
    how_ended: str | None = None


@dataclass(slots=True)
class Writing:
    """Tokens of a life were written into a block, without another life's getting it between them.

    Attributes:
        life: its number.
        row: its row at the last of them.
        first_step, last_step: steps of the first and the last such call.
        first_position, last_position: lowest and highest position.
        num_holdings: how often the block had been given to a life before.
    """

    life: int
    row: int
    first_step: int
    last_step: int
    first_position: int
    last_position: int
    num_holdings: int


@dataclass(slots=True)
class BlockHistory:
    """Everything that happened to a block.

    Attributes:
        holdings: in the order of their beginnings.
        writings: in the order of their last tokens.
    """

    holdings: list[Holding] = field(default_factory=list)
    writings: list[Writing] = field(default_factory=list)

    def hold(self, life: int, step: int, call: str) -> Holding:
        """Note that a life has got the block, by a call of a step."""
        self.holdings.append(Holding(life, step, call))
        return self.holdings[-1]

    def write(self, life: int, row: int, step: int, position: int) -> None:
        """Note that a token of a life, in a row, is written."""
        mine = [each for each in self.writings if each.life == life and each.num_holdings == len(self.holdings)]
        if mine:
            self.writings.remove(mine[0])
        last = mine[0] if mine else Writing(life, row, step, step, position, position, len(self.holdings))
        last.row, last.last_step = row, step
        last.first_position = min(last.first_position, position)
        last.last_position = max(last.last_position, position)
        self.writings.append(last)


class Historian(Player):
    """Follows a recording up to a step.

    Args:
        recording: the file.
        step: the last one; its calls are the last that count.
        blocks: group -> manager ids whose history is kept.
        followed: number of the life whose events are kept.
        num_calls: the first calls are followed. None: all up to the step.
        checker: as `ReplayResult`; None: the calls are trusted, since they were checked before.

    Attributes:
        lives: all of them, by number.
        life_of: [num_rows] int64. Number of the life in each row now, or `NOBODY`.
        last_life_of: [num_rows] int64. The same, or of the one that was there last.
        events: of the followed life.
        blocks: group -> block -> its history.
        num_calls: that were followed.
        last_step: of the last call that was followed.
    """

    def __init__(
        self,
        recording: Recording,
        step: int | None,
        blocks: Mapping[int, Iterable[int]] | None = None,
        followed: int = NOBODY,
        num_calls: int | None = None,
        checker: Lane | None = None,
    ) -> None:
        super().__init__(recording, [], checker)
        self.lives: list[Life] = []
        self.life_of: IntArray = np.full(self.config.num_rows, NOBODY)
        self.last_life_of: IntArray = self.life_of.copy()
        self.events: list[Event] = []
        self.blocks: dict[int, dict[int, BlockHistory]] = {
            group: {block: BlockHistory() for block in ids} for group, ids in (blocks or {}).items()
        }
        self.num_calls = self.last_step = 0
        self._wanted = {group: np.array(sorted(ids), np.int64) for group, ids in self.blocks.items()}
        self._held: dict[int, dict[int, dict[int, Holding]]] = {group: {} for group in self.blocks}
        self._committed_life = self.life_of.copy()
        self._followed = followed
        for call in recording:
            if (step is not None and call.step > step) or call.number == num_calls:
                break
            self._follow(call)

    @property
    def config(self) -> BlockTableConfig:
        """The table's."""
        return self._config

    @property
    def rows(self) -> RowModel:
        """What the rows hold."""
        return self._rows

    def _follow(self, call: RecordedCall) -> None:
        before = self._blocks_of_followed()
        is_done = self._play(call)
        self.num_calls, self.last_step = self.num_calls + 1, call.step
        if not is_done:
            return
        name, values = as_many(call.name, list(call.arguments.values()))
        rows = self._touched(name, values)
        if rows.size:
            self._change(call, name, values, rows)
            self._tell(call, name, before)
        if call.name in ("commit", "step"):
            self._committed_life = self.life_of.copy()
        if call.name in ("compute_slot_mappings", "step"):
            self._write(call)

    # Rows.

    def _touched(self, name: str, values: Sequence[Any]) -> IntArray:
        """Return the rows that a call may have changed, [n] int64."""
        if name == "clear":
            return np.arange(self.config.num_rows)
        if name == "remap_blocks":
            return np.flatnonzero(self._rows.host.counts[values[0]])
        if name not in CHANGES:
            return np.empty(0, np.int64)
        return np.unique(np.concatenate([np.asarray(each, np.int64) for each in values[: CHANGES[name]]]))

    def _change(self, call: RecordedCall, name: str, values: Sequence[Any], rows: IntArray) -> None:
        before = self.life_of[rows]
        if name == "permute_rows":
            src, dst = (np.asarray(each, np.int64) for each in values)
            moved = self.life_of[src]
            self.life_of[src] = NOBODY
            self.life_of[dst] = moved
        elif name == "copy_rows":
            src, dst = (np.asarray(each, np.int64) for each in values)
            self.life_of[dst[src != dst]] = NOBODY
        elif name in ("set_rows", "clear_rows", "clear"):
            self.life_of[rows] = NOBODY
        for row in rows.tolist():
            if self.life_of[row] == NOBODY and self._rows.host.counts[:, row].any():
                self.life_of[row] = len(self.lives)
                self.lives.append(Life(row, call.step))
        now = self.life_of[rows]
        for number in np.setdiff1d(before, np.append(now, NOBODY)).tolist():
            self.lives[number].ended, self.lives[number].ended_call = call.step, call.number
            self._hold(call, number, None)
        for row, number in zip(rows.tolist(), now.tolist(), strict=True):
            if number != NOBODY:
                self.lives[number].row, self.last_life_of[row] = row, number
                self._hold(call, number, row)

    def _hold(self, call: RecordedCall, life: int, row: int | None) -> None:
        """Write down which of the wanted blocks a life has now; row None: it is over."""
        for group, wanted in self._wanted.items():
            ids = self._rows.host.held(group, row) if row is not None else wanted[:0]
            now, held = set(ids[np.isin(ids, wanted)].tolist()), self._held[group].setdefault(life, {})
            for block in held.keys() - now:
                held[block].until, held[block].how_ended = call.step, call.name
                del held[block]
            for block in sorted(now - held.keys()):
                held[block] = self.blocks[group][block].hold(life, call.step, call.name)

    # The life that is followed.

    def _blocks_of_followed(self) -> list[list[int]] | None:
        """Return its blocks of each group; None: it is not there."""
        rows = np.flatnonzero(self.life_of == self._followed)
        if self._followed == NOBODY or not rows.size:
            return None
        return [self._rows.host.held(group, int(rows[0])).tolist() for group in range(len(self.config.groups))]

    def _tell(self, call: RecordedCall, name: str, before: list[list[int]] | None) -> None:
        """Write down what a call did to the life that is followed."""
        now = self._blocks_of_followed()
        if now is None:
            if before is not None:
                row = self.lives[self._followed].row
                self.events.append(Event(call.step, call.name, row, "the row is taken from the request"))
            return
        row, texts = self.lives[self._followed].row, list[str]()
        if before is None:
            source = f" as a copy of row {_source(call, row)}" if name == "copy_rows" else ""
            texts.append(f"begins{source}")
        elif row != self.events[-1].row:
            texts.append(f"moves from row {self.events[-1].row}")
        for group, ids in enumerate(now):
            had = before[group] if before else []
            for sign, more, less in (("+", ids, set(had)), ("-", had, set(ids))):
                found = [block for block in more if block not in less]
                if found:
                    shown = " ".join(map(str, found[:MAX_SHOWN])) + " ..." * (len(found) > MAX_SHOWN)
                    where = f"group {group}: " if len(now) > 1 else ""
                    texts.append(f"{where}{sign}{len(found)} {'block' if len(found) == 1 else 'blocks'} ({shown})")
        if texts:
            self.events.append(Event(call.step, call.name, row, ", ".join(texts)))

    # Tokens.

    def _write(self, call: RecordedCall) -> None:
        """Write down which of the wanted blocks a call writes, for which life."""
        arguments, committed = call.arguments, self._rows.committed
        rows, starts, positions = rows_of(arguments), arguments["query_start_loc"], arguments["positions"]
        if not starts.size or (np.diff(starts) < 0).any() or starts[0] < 0:
            return  # slots are unspecified (R15)
        named = arguments.get("groups")
        groups = self._wanted if named is None else self._wanted.keys() & set(np.atleast_1d(named).tolist())
        for group in sorted(groups):
            geometry = self.config.groups[group]
            slots = expected_slots(
                *(self.config, group, committed.blocks[group], committed.counts[group]),
                *(rows, starts, positions, positions.size),
                is_named=named is not None,
            )
            blocks = np.where(slots == geometry.pad_slot_id, NOBODY, slots // geometry.block_size)
            for token in np.flatnonzero(np.isin(blocks, self._wanted[group])).tolist():
                row = int(rows[np.searchsorted(starts, token, side="right") - 1])
                self.blocks[group][int(blocks[token])].write(
                    int(self._committed_life[row]), row, call.step, int(positions[token])
                )


MAX_SHOWN = 8
"""Block ids that an event names."""

CHANGES = {
    **dict.fromkeys(("append_rows", "set_rows", "clear_rows", "truncate_rows"), 1),
    **dict.fromkeys(("null_ranges", "replace_block_ranges"), 1),
    **dict.fromkeys(("permute_rows", "copy_rows"), 2),
}
"""Operations of many rows -> how many of their first arguments are rows."""


def _source(call: RecordedCall, row: int) -> int:
    """Return the row that a copying call made this one of."""
    src, dst = as_many(call.name, list(call.arguments.values()))[1]
    return int(np.asarray(src)[np.flatnonzero(np.asarray(dst) == row)[0]])
