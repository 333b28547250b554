"""The tokens of one call against the rows that they are written by: what is quickly clean, and what is found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from blocktable.arrays import IntArray
from blocktable.config import BlockTableConfig, KVCacheGroup


@dataclass(slots=True)
class Tokens:
    """The tokens of a call that could be written: those of rows of the table, from position 0 on.

    Tokens of one request stand together, and requests in the order of the batch.

    Attributes:
        index: [T] int64. Place in the call.
        request: [T] int64. Batch index.
        row: [T] int64.
        position: [T] int64.
        last: [T] int64. Position of the last token of the request in this call.
        firsts: [R] int64. First token of each of the requests that have tokens here.
        is_single: whether each request has one token.
        has_distinct_slots: whether no two tokens can share a slot unless a block is held twice: distinct rows, and
            positions that ascend in each request.
    """

    index: IntArray
    request: IntArray
    row: IntArray
    position: IntArray
    last: IntArray
    firsts: IntArray
    is_single: bool
    has_distinct_slots: bool

    def part(self, chosen: IntArray) -> Tokens:
        """Return some of the tokens. chosen: [T] bool."""
        request = self.request[chosen]
        return Tokens(
            *(self.index[chosen], request, self.row[chosen], self.position[chosen], self.last[chosen]),
            *(first_of_each(request), self.is_single, self.has_distinct_slots),
        )


def first_of_each(request: IntArray) -> IntArray:
    """Return the index of the first token of each request. request: [T], equal ones together."""
    if not request.size:
        return request
    return np.concatenate(([0], np.flatnonzero(request[1:] != request[:-1]) + 1))


def make_tokens(mapping: IntArray | None, starts: IntArray, positions: IntArray, num_rows: int) -> Tokens:
    """Return the tokens of a call.

    Args:
        mapping: [num_reqs] int32. Batch index -> row. None: the identity.
        starts: [num_reqs + 1] int32, from 0 on, not decreasing.
        positions: [n] int64.
        num_rows: of the table.
    """
    bounds = np.minimum(starts, positions.size).astype(np.int64)
    num_reqs, begin, end = bounds.size - 1, int(bounds[0]), int(bounds[-1])
    position = positions[begin:end]
    is_single = end - begin == num_reqs and bool((bounds[1:] != bounds[:-1]).all())
    if is_single:
        request = firsts = np.arange(num_reqs)
        last, ascends = np.maximum(position, 0), True
    else:
        counts = bounds[1:] - bounds[:-1]
        request = np.repeat(np.arange(num_reqs), counts)
        firsts = bounds[:-1][counts > 0] - begin
        last = np.repeat(np.maximum(positions[bounds[1:][counts > 0] - 1], 0), counts[counts > 0])
        steps = position[1:] > position[:-1]
        steps[firsts[1:] - 1] = True
        ascends = bool(steps.all())
    rows_of = np.arange(num_reqs) if mapping is None else mapping.astype(np.int64)
    row = rows_of if is_single else rows_of[request]
    is_real = (row >= 0) & (row < num_rows) & (position >= 0)
    written_by = row[firsts]
    distinct = mapping is None or np.unique(written_by).size == written_by.size
    index = np.arange(begin, end)
    tokens = Tokens(index, request, row, position, last, firsts, is_single, ascends and distinct)
    return tokens if is_real.all() else tokens.part(is_real)


class LocatedTokens(NamedTuple):
    """Where tokens lie in one group.

    Attributes:
        tokens: those that this rank writes, and that no later token of the call overwrites (R14).
        local: [T] int64. Place in the row, in tokens.
        column: [T] int64.
        held: [T] int32. Columns that the row holds.
    """

    tokens: Tokens
    local: IntArray
    column: IntArray
    held: IntArray


class Written(NamedTuple):
    """What some tokens of a group write into.

    Attributes:
        located: of the tokens, which all have an entry that is not missing.
        block: [T] integers. Manager block.
        slot: [T] int64.
    """

    located: LocatedTokens
    block: IntArray
    slot: IntArray


class GroupTokens:
    """What tokens are in one group.

    Args:
        config: the geometry.
        group: a group of mode "linear" or "ring".
        arena: [arena.size] int32. The rows; kept as a view.
    """

    def __init__(self, config: BlockTableConfig, group: int, arena: IntArray) -> None:
        self._geometry: KVCacheGroup = config.groups[group]
        self._shard = config.context_parallel
        self._is_split_over_ranks = self._geometry.is_sharded and self._shard.world_size > 1
        self._filled = config.arena.view(arena, -1)[group]
        table = config.arena.view(arena, group)
        self._table, self._width = table.reshape(-1), table.shape[1]

    def owned(self, tokens: Tokens) -> Tokens:
        """Return the tokens that this rank owns."""
        if not self._is_split_over_ranks:
            return tokens
        size = self._shard.interleave_size
        mine = tokens.position // size % self._shard.world_size == self._shard.rank
        return tokens if mine.all() else tokens.part(mine)

    def locate(self, tokens: Tokens) -> LocatedTokens:
        """Return where tokens lie, those of other ranks and overwritten ones left out."""
        tokens = self.owned(tokens)
        local, held, geometry = tokens.position, self._filled[tokens.row], self._geometry
        if self._is_split_over_ranks:
            size = self._shard.interleave_size
            local = local // (self._shard.world_size * size) * size + local % size
        elif geometry.slot_mode == "ring":
            capacity = held.astype(np.int64) * geometry.tokens_per_column
            stays = (capacity == 0) | (local > tokens.last - capacity)
            if not stays.all():
                tokens, local, held, capacity = tokens.part(stays), local[stays], held[stays], capacity[stays]
            local = np.where(capacity > 0, local % np.maximum(capacity, 1), local)
        return LocatedTokens(tokens, local, _divide(local, geometry.tokens_per_column), held)

    def is_outside(self, located: LocatedTokens) -> IntArray:
        """[T] bool. Whether the row holds no such column."""
        outside: IntArray = located.column >= located.held
        return outside

    def entries(self, located: LocatedTokens) -> IntArray:
        """[T] int32. What stands in the table for tokens inside their rows."""
        found: IntArray = self._table.take(located.tokens.row * self._width + located.column)
        return found

    def blocks(self, entries: IntArray) -> IntArray:
        """[T] int32. Manager blocks of entries; the group's null_block_id where they are missing."""
        expansion = self._geometry.blocks_per_kv_block
        return entries if expansion == 1 else entries // expansion

    def slots(self, located: LocatedTokens, entries: IntArray) -> IntArray:
        """[T] int64. The slots of tokens (R12)."""
        tokens = self._geometry.tokens_per_column
        slots: IntArray = entries.astype(np.int64) * tokens + located.local % tokens
        return slots


def runs(located: LocatedTokens) -> LocatedTokens:
    """Return the first token of each run of tokens that lie in one column of one row."""
    tokens, column = located.tokens, located.column
    if tokens.is_single or not column.size:
        return located
    is_first = np.empty(column.size, np.bool_)
    is_first[0] = True
    np.not_equal(column[1:], column[:-1], out=is_first[1:])
    is_first[tokens.firsts] = True
    chosen = np.flatnonzero(is_first)
    part = Tokens(
        *(tokens.index[chosen], tokens.request[chosen], tokens.row[chosen], tokens.position[chosen]),
        *(tokens.last[chosen], chosen[:0], False, tokens.has_distinct_slots),
    )
    return LocatedTokens(part, located.local[chosen], column[chosen], located.held[chosen])


def _divide(values: IntArray, size: int) -> IntArray:
    shift = size.bit_length() - 1
    result: IntArray = values >> shift if size == 1 << shift else values // size
    return result
