"""What the slot kernel looks for where the table is checked, as array expressions, and what begins a call."""

from __future__ import annotations

from typing import Any

import numpy as np

from blocktable import BlockTableConfig
from blocktable.check_plan import (
    DEVICE_KINDS,
    MARKS_START,
    MAX_INT32,
    MAX_RECORDS,
    NOTES,
    RECORD,
    REQUEST_KINDS,
    empty_records,
)
from blocktable_numpy.kernels import Ints, Tokens, is_missing

CODES = {kind: 1 + index for index, kind in enumerate(DEVICE_KINDS)}


class Checks:
    """The memory that kernels check with, and what the host tells them in the arena.

    Args:
        config: with a `check_plan`.
        arena: [arena.size] int32.

    Attributes:
        checker: [checker_size] int32. `CheckRegions` says what lies where.
        findings: [(1 + MAX_RECORDS) * RECORD] int32. Records.
        lives, restarts, caps: [max_num_rows] int32. As the host told them.
    """

    def __init__(self, config: BlockTableConfig, arena: Ints) -> None:
        plan, regions, num_rows = config.check_plan, config.check_regions, config.num_rows
        assert plan is not None
        self.config, self._plan, self._regions = config, plan, regions
        self._arena = arena
        self.checker: Ints = np.zeros(regions.checker_size, np.int32)
        self.findings: Ints = empty_records()
        self.lives, self.restarts, self.caps = (
            arena[start : start + num_rows] for start in (regions.lives, regions.restarts, regions.caps)
        )
        notes = self.checker[MARKS_START + 2 * num_rows :][: NOTES * num_rows * len(config.groups)]
        self._notes: Ints = notes.reshape(len(config.groups), num_rows, NOTES)
        self.marks: Ints = self.checker[MARKS_START : MARKS_START + 2 * num_rows].reshape(num_rows, 2)

    def is_checked(self, group: int) -> bool:
        """Say whether anything is looked for in a group."""
        return self._plan.pools[group] >= 0

    def wants(self, kind: str, group: int = 0) -> bool:
        """Say whether a kind is among a group's."""
        return kind in self._plan.kinds[group]

    def note(
        self, kind: str, group: int, rows: Ints, tokens: Ints, positions: Ints, entries: Any = -1, places: Any = None
    ) -> None:
        """Record findings, the first of each row, unless this call has noted the like of a row.

        Args:
            kind: of all of them.
            group: theirs; of a kind of `REQUEST_KINDS` it does not matter.
            rows, tokens, positions: [n] integers.
            entries: [n] integers, or one.
            places: [n] integers. Rows whose notes are asked. None: `rows`.
        """
        is_requests = kind in REQUEST_KINDS
        noted = self._notes[0 if is_requests else group]
        call = self.checker[0]
        entries, places = np.broadcast_to(entries, rows.shape), rows if places is None else places
        for row, token, position, entry, place in zip(rows, tokens, positions, entries, places, strict=True):
            note = 0 if kind == "unset_row" and not 0 <= row < self.lives.size else CODES[kind]
            if noted[place, note] == call:
                continue
            noted[place, note] = call
            number = int(self.findings[0])
            self.findings[0] += 1
            if number - self.findings[1] < MAX_RECORDS:
                record = self.findings[RECORD * (1 + number % MAX_RECORDS) :][:RECORD]
                halves = np.array([position], np.int64).view(np.int32)
                code = CODES[kind] + 16 * (0 if is_requests else group + 1)
                record[:] = code, row, token, *halves, entry, self._arena[self._regions.step], number + 1

    def is_held(self, group: int, blocks: Ints) -> Ints:
        """[n] bool. Whether two rows hold a block."""
        words = self._arena[self._regions.held[self._plan.pools[group]] + (blocks >> 5)]
        held: Ints = (words >> (blocks & 31)) & 1 > 0
        return held

    def copies(self, group: int, blocks: Ints) -> Ints:
        """[n] int32. Life of the row that each block was copied for, last."""
        copies: Ints = self._arena[self._regions.copies[self._plan.pools[group]] + blocks]
        return copies

    def block_stamps(self, group: int) -> Ints | None:
        """Return [num_blocks] int32, block -> life of the row that wrote it last; None: they are not kept."""
        return self._stamps(self._regions.block_stamps[group])

    def slot_stamps(self, group: int) -> Ints | None:
        """Return [num_slots] int32, slot -> last call that wrote it; None: they are not kept."""
        return self._stamps(self._regions.slot_stamps[group])

    def _stamps(self, start: int) -> Ints | None:
        return None if start < 0 else self.checker[start:]


def check_requests(
    idx_mapping: Ints,  # [num_reqs] int64, batch index -> row; -1: padding
    query_start_loc: Ints,  # [num_reqs + 1] int32, first token of each request
    positions: Ints,  # [num_positions] int64, token -> its index in its request
    checks: Checks,
) -> None:
    """Begin a call that maps slots: give it a number, and look at its requests."""
    # step 1: give the call a number
    checks.checker[0] += 1
    if not checks.lives[0]:  # before the first row operation there is nothing to be wrong about
        return
    # step 2: which request
    num_reqs, num_rows = idx_mapping.size, checks.lives.size
    starts, ends = query_start_loc[:-1].astype(np.int64), query_start_loc[1:].astype(np.int64)
    # step 3: whether its tokens begin and end where they can
    is_bad = starts > ends
    is_bad[:1] |= starts[:1] != 0
    is_bad[-1:] |= ends[-1:] > positions.size
    bad = np.flatnonzero(is_bad)
    if bad.size and checks.wants("bad_starts"):
        checks.note("bad_starts", -1, bad, starts[bad], ends[bad], places=np.zeros_like(bad))
    # step 4: whether its positions go on where those before have ended
    if not checks.wants("position_gap"):
        return
    ends = np.minimum(ends, positions.size)
    for i in np.flatnonzero(~is_bad & (starts >= 0) & (starts < ends) & (idx_mapping >= 0))[:num_reqs].tolist():
        row = int(idx_mapping[i])
        if checks.lives[row] < 0:
            continue
        given, restart, cap = positions[starts[i] : ends[i]], int(checks.restarts[row]), int(checks.caps[row])
        kept = checks.marks[restart % num_rows]
        is_marked = kept[0] == restart or (cap >= 0 and kept[0] == restart - num_rows)
        mark = int(kept[1]) if kept[0] == restart else min(int(kept[1]), cap)
        above = np.flatnonzero(given - np.arange(given.size) > mark) if is_marked and mark < MAX_INT32 else given[:0]
        if above.size:
            checks.note("position_gap", -1, np.array([row]), starts[i] + above[:1], given[above[:1]])
        # step 5: keep where they end
        end = max(int(given.max()) + 1, mark if is_marked else 0)
        kept[:] = restart, min(max(end, 0), MAX_INT32)


def check_tokens(tokens: Tokens, groups: Ints, checks: Checks) -> None:
    """Look at the tokens of a call that are about to be written, and at those that have no column.

    Args:
        tokens: as map_slots knows them after its step 6.
        groups: [num_groups, 1] int64, groups of one geometry.
        checks: the memory.
    """
    for i, group in enumerate(groups[:, 0].tolist()):
        if checks.is_checked(group):
            _check_group(tokens, i, group, checks)


def _check_group(tokens: Tokens, i: int, group: int, checks: Checks) -> None:
    row, token, position, is_mine = tokens.row, tokens.token, tokens.position, tokens.is_mine[i]
    is_row = (row >= 0) & (row < checks.lives.size)
    life = np.where(is_row, checks.lives[np.where(is_row, row, 0)], 0)
    is_inside = is_mine & is_row & tokens.is_inside[i]
    is_outside = is_mine & is_row & ~tokens.is_inside[i]
    if checks.wants("missing_block", group):
        chosen = np.flatnonzero(is_outside & (life > 0))
        checks.note("missing_block", group, row[chosen], token[chosen], position[chosen])
    if checks.wants("unset_row") and checks.lives[0]:
        chosen = np.flatnonzero((is_outside & (life < 0)) | (is_mine & ~is_row & (row != -1)))
        places = row[chosen].astype(np.uint32) % checks.lives.size
        checks.note("unset_row", group, row[chosen], token[chosen], position[chosen], places=places.astype(np.int64))
    entry = tokens.entry[i].astype(np.int64)
    is_null = is_inside & is_missing(entry, tokens.null_start, tokens.blocks_per_kv_block)
    if checks.wants("null_written", group):
        chosen = np.flatnonzero(is_null)
        checks.note("null_written", group, row[chosen], token[chosen], position[chosen], entry[chosen])
    chosen = np.flatnonzero(is_inside & ~is_null)
    entry, block = entry[chosen], entry[chosen] // tokens.blocks_per_kv_block
    is_shared = checks.is_held(group, block)
    stamps = checks.block_stamps(group)
    if stamps is not None:
        size = checks.config.groups[group].block_size
        keys = row[chosen].astype(np.int64) << 32 | block
        begun = keys[tokens.local[i][chosen] % size == 0]
        writer, own = stamps[block], life[chosen]
        is_shared &= (writer != 0) & (writer != own) & (checks.copies(group, block) != own) & ~np.isin(keys, begun)
        stamps[block] = own
    if checks.wants("shared_block_written", group):
        found = chosen[is_shared]
        checks.note("shared_block_written", group, row[found], token[found], position[found], entry[is_shared])
    slot_stamps = checks.slot_stamps(group)
    if slot_stamps is not None:
        slot = entry * tokens.tokens_per_column + tokens.local[i][chosen] % tokens.tokens_per_column
        order = slot.argsort(kind="stable")
        again = np.zeros(slot.size, np.bool_)
        again[order[1:]] = slot[order[1:]] == slot[order[:-1]]
        again |= slot_stamps[slot] == checks.checker[0]
        slot_stamps[slot] = checks.checker[0]
        found = chosen[again]
        checks.note("slot_written_twice", group, row[found], token[found], position[found], entry[again])
