"""What the tokens of a call write in one group: into nothing, into holes, into others' blocks, twice into one slot."""

from __future__ import annotations

import numpy as np

from blocktable.arrays import IntArray
from blocktable.checking.calls import number
from blocktable.checking.lives import RowLives
from blocktable.checking.pools import Holders
from blocktable.checking.reasons import slot_reason
from blocktable.checking.tokens import GroupTokens, LocatedTokens
from blocktable.config import BlockTableConfig
from blocktable.findings import Finding, Findings


class GroupFinder:
    """Finds mistakes in one group. One finding is made for each kind and request: that of its first token.

    Args:
        config: the geometry.
        group: a group of mode "linear" or "ring".
        tokens: where its tokens lie.
        holders: the rows, and who holds what.
        findings: says which kinds are off.
        lives: whose rows are.

    Attributes:
        is_lenient: whether a row may list a block that it has released: then who wrote last decides.
    """

    def __init__(
        self,
        config: BlockTableConfig,
        group: int,
        tokens: GroupTokens,
        holders: Holders,
        findings: Findings,
        lives: RowLives,
    ) -> None:
        self._config, self._group, self._tokens, self._holders = config, group, tokens, holders
        self._findings, self._lives = findings, lives
        self._geometry = config.groups[group]
        self._pool = holders.pools[group]
        self.is_lenient: bool = config.stale_rows or any(
            config.groups[member].cut_window is not None for member in self._pool.groups
        )

    def find(self, located: LocatedTokens, firsts: LocatedTokens, step: int) -> list[Finding]:
        """Return what is found of a call's tokens.

        Args:
            located: of the tokens.
            firsts: of the first token in each run of one column: where these are right all are.
            step: commits so far.
        """
        return [] if self._is_clean(firsts) else self._find(located, step)

    def _is_clean(self, located: LocatedTokens) -> bool:
        if not located.tokens.has_distinct_slots or self._tokens.is_outside(located).any():
            return False
        blocks = self._tokens.blocks(self._tokens.entries(located))
        if (blocks == self._geometry.null_block_id).any():
            return False
        return not blocks.size or int(self._pool.counts.take(self._pool.index(blocks)).max()) == 1

    def note_writers(self, located: LocatedTokens) -> None:
        """Note whose life the written blocks were written by last, where it is ever asked."""
        if not self.is_lenient:
            return
        inside = self._part(located, ~self._tokens.is_outside(located))
        blocks = self._tokens.blocks(self._tokens.entries(inside))
        is_block = blocks != self._geometry.null_block_id
        self._pool.writers[self._pool.index(blocks[is_block])] = self._lives.committed[inside.tokens.row[is_block]]

    @staticmethod
    def _part(located: LocatedTokens, chosen: IntArray) -> LocatedTokens:
        tokens, *arrays = located
        return LocatedTokens(tokens.part(chosen), *(array[chosen] for array in arrays))

    def _find(self, located: LocatedTokens, step: int) -> list[Finding]:
        outside = self._tokens.is_outside(located)
        found = self._missing(self._part(located, outside), step)
        inside = self._part(located, ~outside)
        entries = self._tokens.entries(inside)
        is_null = self._tokens.blocks(entries) == self._geometry.null_block_id
        found += self._null(self._part(inside, is_null), step)
        written, entries = self._part(inside, ~is_null), entries[~is_null]
        blocks, slots = self._tokens.blocks(entries), self._tokens.slots(written, entries)
        found += self._shared(written, blocks, slots, step)
        return found + self._twice(written, blocks, slots, step)

    def _is_off(self, kind: str) -> bool:
        return self._findings.severity(kind, self._group) == "off"

    def _why(self, row: int, position: int) -> str:
        return slot_reason(self._config, self._holders.arena, row, self._group, position).message

    def _missing(self, located: LocatedTokens, step: int) -> list[Finding]:
        if self._is_off("missing_block"):
            return []
        found = []
        for i, count in _first_of_requests(located):
            row, position = int(located.tokens.row[i]), int(located.tokens.position[i])
            message = (
                f"missing_block: {self._why(row, position)} {number(count, 'token')} from there on cannot be written: "
                "append the blocks before the step."
            )
            found.append(Finding("missing_block", message, step, group=self._group, row=row, position=position))
        return found

    def _null(self, located: LocatedTokens, step: int) -> list[Finding]:
        if self._is_off("null_written"):
            return []
        null = self._geometry.null_block_id
        found = []
        for i, count in _first_of_requests(located):
            row, position = int(located.tokens.row[i]), int(located.tokens.position[i])
            reason = slot_reason(self._config, self._holders.arena, row, self._group, position)
            message = f"null_written: {reason.message} {number(count, 'token')} from there on: " + (
                "not written." if reason.slot is None else f"written into the null block {null}, and lost."
            )
            finding = Finding(
                "null_written",
                message,
                step,
                group=self._group,
                row=row,
                position=position,
                block_id=null,
                slot=reason.slot,
            )
            found.append(finding)
        return found

    def _shared(self, located: LocatedTokens, blocks: IntArray, slots: IntArray, step: int) -> list[Finding]:
        if self._is_off("shared_block_written") or not blocks.size:
            return []
        tokens, index = located.tokens, self._pool.index(blocks)
        is_shared = self._pool.counts[index] > 1
        keys = tokens.row << 32 | blocks
        if self.is_lenient:
            begun = keys[located.local % self._geometry.block_size == 0]
            writers = self._pool.writers[index]
            is_shared &= (writers != 0) & (writers != self._lives.committed[tokens.row]) & ~np.isin(keys, begun)
        if not is_shared.any():
            return []
        # A block that one row holds twice is not shared: the counts do not tell, so each block is searched for.
        unique, first = np.unique(keys[is_shared], return_index=True)
        chosen = np.flatnonzero(is_shared)[first].tolist()
        others = [self._holders.other_cell(self._group, int(tokens.row[i]), int(blocks[i])) for i in chosen]
        place = np.minimum(unique.searchsorted(keys), unique.size - 1)
        is_shared &= np.array([other is not None for other in others])[place]
        sharing = self._part(located, is_shared)
        blocks, slots, index, place = blocks[is_shared], slots[is_shared], index[is_shared], place[is_shared]
        found = []
        for i, count in _first_of_requests(sharing):
            other = others[int(place[i])]
            assert other is not None
            row, position = int(sharing.tokens.row[i]), int(sharing.tokens.position[i])
            block, slot, since = int(blocks[i]), int(slots[i]), int(self._pool.since[index[i]])
            where = "" if other[0] == self._group else f" of group {other[0]}"
            message = (
                f"shared_block_written: {number(count, 'token')} of row {row}, group {self._group}, from position "
                f"{position} on, written into blocks that another row holds too: block {block} (slot {slot}) is also "
                f"row {other[1]}'s{where}, since commit {since}. Each row reads what the other one wrote last; give "
                "it a block of its own (a copy, and replace_blocks), or take it from the row that has ended."
            )
            finding = Finding(
                "shared_block_written",
                message,
                step,
                group=self._group,
                row=row,
                position=position,
                block_id=block,
                slot=slot,
                other_row=other[1],
            )
            found.append(finding)
        return found

    def _twice(self, located: LocatedTokens, blocks: IntArray, slots: IntArray, step: int) -> list[Finding]:
        if self._is_off("slot_written_twice") or slots.size < 2:
            return []
        order = slots.argsort(kind="stable")
        ordered = slots[order]
        repeats = np.concatenate(([False], ordered[1:] == ordered[:-1]))
        if not repeats.any():
            return []
        earlier = np.full(slots.size, -1)
        earlier[order[repeats]] = order[np.flatnonzero(repeats) - 1]
        again = earlier >= 0
        repeated = self._part(located, again)
        earlier, blocks, slots = earlier[again], blocks[again], slots[again]
        found = []
        for i, count in _first_of_requests(repeated):
            row, position = int(repeated.tokens.row[i]), int(repeated.tokens.position[i])
            what = number(count, "token")
            before, slot, block = int(earlier[i]), int(slots[i]), int(blocks[i])
            other, its_position = int(located.tokens.row[before]), int(located.tokens.position[before])
            message = (
                f"slot_written_twice: {what} of row {row}, group {self._group}, from position {position} on, with "
                f"slots that earlier tokens of the same call have: slot {slot} (block {block}) is also that of row "
                f"{other}, position {its_position}. Only one of them stays, and which is not specified."
            )
            finding = Finding(
                "slot_written_twice",
                message,
                step,
                group=self._group,
                row=row,
                position=position,
                block_id=block,
                slot=slot,
                other_row=other,
            )
            found.append(finding)
        return found


def _first_of_requests(located: LocatedTokens) -> list[tuple[int, int]]:
    """Return (index of its first token, number of its tokens) for each request that has some."""
    request = located.tokens.request
    _, first, numbers = np.unique(request, return_index=True, return_counts=True)
    return list(zip(first.tolist(), numbers.tolist(), strict=True))
