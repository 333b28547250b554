"""Mutants: the plain backend with one step wrong. Each says which rule must catch it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from plain_backend import PlainBackend, PlainMapper, PlainStore

from blocktable import BlockTableConfig, StepBuffers
from blocktable.backend import Batch, Writes

CAUGHT_BY: dict[str, str] = {}
"""Mutant -> the rule that a failed assertion must name."""

CASES = (
    "a_batch_row_that_grew_and_shrank_over_traps",
    "a_batch_shown_again_after_a_reset",
    "a_dropped_table_is_freed_immediately",
    "a_large_a_small_and_a_large_batch_of_the_same_rows",
    "a_ring_keeps_its_window_whole",
    "basics",
    "more_tokens_than_a_tile_and_more_requests_than_a_warp",
    "nothing_past_a_filled_count_is_read",
    "rows_apart_from_the_batch",
    "sizes_sets_and_paddings_in_turn",
    "slots_of_32_bits",
    "slots_of_chosen_groups",
    "tokens_before_the_first_request_belong_to_none",
)
"""Tests of the suite that catch all of them."""


def _mutant(
    rule: str, name: str, *, store: type[PlainStore] = PlainStore, mapper: type[PlainMapper] = PlainMapper
) -> Any:
    CAUGHT_BY[name] = rule
    return type(name, (PlainBackend,), {"name": name, "store_class": store, "mapper_class": mapper})


# Slots.


class _OffByOne(PlainMapper):
    def slot(self, group: int, batch: Batch, token: int, num_tokens: int) -> int:
        right = super().slot(group, batch, token, num_tokens)
        return right - 1 if right > 0 else right


class _StaleSlots(PlainMapper):
    def pad(self, group: int, slots: Any, num_tokens: int) -> None:
        """Leaves what an earlier step wrote."""


class _PadsToTheLaunchedCount(PlainMapper):
    def compute_slot_mappings(
        self, batch: Batch, out: Any, *, stream: int | None, groups: Sequence[int] | None = None
    ) -> None:
        assert batch.positions is not None
        short = [slots[: len(batch.positions)] for slots in out]
        super().compute_slot_mappings(batch, short, stream=stream, groups=groups)


class _RankIgnored(PlainMapper):
    def share(self) -> tuple[int, int, int]:
        world_size, _, interleave_size = super().share()
        return world_size, 0, interleave_size


class _Group0ForAll(PlainMapper):
    def block_id(self, group: int, row: int, column: int) -> int:
        first = self.store.table(0)
        return int(first.reshape(-1)[min(row * first.shape[1] + column, first.size - 1)])


class _WidthAsStride(PlainMapper):
    """Takes the columns that a row may fill for the distance between rows."""

    def block_id(self, group: int, row: int, column: int) -> int:
        stride = self.config.capacity(group) * self.config.groups[group].blocks_per_kv_block
        return int(self.store.table(group).reshape(-1)[row * stride + column])


class _BoundedByWidth(PlainMapper):
    """Bounds the column by the row's width: unallocated columns give slots of block 0."""

    def is_filled(self, group: int, row: int, column: int) -> bool:
        return column < self.config.width(group)


class _NegativePositions(PlainMapper):
    def is_position(self, position: int) -> bool:
        return True

    def block_id(self, group: int, row: int, column: int) -> int:
        return super().block_id(group, row, max(column, -1))


class _NullIsNeverPad(PlainMapper):
    def is_null(self, group: int, block_id: int) -> bool:
        return False


class _HolesHaveSlots(PlainMapper):
    """Where there is no null block too: a slot below 0."""

    def is_null(self, group: int, block_id: int) -> bool:
        return self.config.groups[group].null_is_pad and self.store.is_missing(group, block_id)


class _BlockZeroIsNull(PlainMapper):
    def is_null(self, group: int, block_id: int) -> bool:
        return self.config.groups[group].null_is_pad and block_id < self.config.groups[group].blocks_per_kv_block


class _CrossGroupsInSteps(PlainMapper):
    def compute_slot_mappings(
        self, batch: Batch, out: Any, *, stream: int | None, groups: Sequence[int] | None = None
    ) -> None:
        chosen = range(len(out)) if groups is None else groups
        super().compute_slot_mappings(batch, out, stream=stream, groups=chosen)


class _RingOfTheWidth(PlainMapper):
    def ring_columns(self, group: int, row: int) -> int:
        return self.config.width(group)


class _FirstTokensToTheFirstRequest(PlainMapper):
    def request_of(self, batch: Batch, token: int) -> int | None:
        request = super().request_of(batch, token)
        return 0 if request is None and batch.num_reqs else request


class _SearchFromTheLeft(PlainMapper):
    """Takes the first token of a request for one of the request before it: `right=False` in a search."""

    def request_of(self, batch: Batch, token: int) -> int | None:
        assert batch.query_start_loc is not None
        request = int(np.searchsorted(batch.query_start_loc[1:], token, side="left"))
        return request if request < batch.num_reqs and token >= batch.query_start_loc[0] else None


# Batch tables.


class _DummyIsTheLastRow(PlainStore):
    def is_row(self, row: int) -> bool:
        return -self.config.num_rows <= row < self.config.num_rows


class _RowsOfTheBatch(PlainStore):
    def is_row(self, row: int) -> bool:
        return 0 <= row < self.config.max_num_reqs


class _RingsAreCut(PlainStore):
    def passed_columns(self, group: int, batch: Batch, i: int) -> int:
        geometry = self.config.groups[group]
        if geometry.sliding_window is None or batch.num_computed_tokens is None:
            return 0
        lo = max(0, self.first_token(int(batch.num_computed_tokens[i]), geometry.sliding_window))
        return self.local_length(group, lo) // geometry.tokens_per_column


class _PaddedRowsKept(PlainStore):
    def store_batch_row(self, group: int, table: Any, i: int, columns: list[int], batch: Batch) -> None:
        if i < batch.num_reqs:
            super().store_batch_row(group, table, i, columns, batch)


class _WholeRows(PlainStore):
    """Copies a row to its width, past the filled count."""

    def batch_row(self, group: int, batch: Batch, i: int) -> list[int]:
        row = self.row_of(batch, i)
        return super().batch_row(group, batch, i) if row is None else self._whole(group, row)

    def _whole(self, group: int, row: int) -> list[int]:
        columns: list[int] = self.table(group)[row].tolist()
        return columns


class _WindowOfGlobalTokens(PlainStore):
    def local_length(self, group: int, length: int) -> int:
        return length


class _FreshBufferEachCall(PlainStore):
    def gather(self, batch: Batch, out: StepBuffers, *, stream: int | None) -> None:
        super().gather(batch, out, stream=stream)
        object.__setattr__(out, "block_tables", tuple(table.copy() for table in out.block_tables))


class _OneSetForAll(PlainStore):
    """Hands out sets of buffers that lie over each other."""

    first: StepBuffers | None = None

    def create_buffers(self) -> StepBuffers:
        self.first = self.first or super().create_buffers()
        return StepBuffers(self.first.block_tables, self.first.slot_mappings)


# Memory.


class _OneCommitLate(PlainStore):
    """Writes what the host held at the commit before."""

    late: Writes | None = None

    def write(self, writes: Writes, *, stream: int | None) -> None:
        if self.late is not None:
            super().write(self.late, stream=stream)
        copies = (writes.offsets.copy(), writes.lengths.copy(), writes.values.copy())
        self.late = Writes(self.config.arena, *copies)


class _BuffersKeptAtWakeUp(PlainStore):
    def reset_buffers(self, out: StepBuffers, *, stream: int | None) -> None:
        """Leaves what was there."""


class _RefersToItself(PlainStore):
    def __init__(self, config: BlockTableConfig) -> None:
        super().__init__(config)
        self.owner = self


class _Slots64(PlainStore):
    def slot_buffer(self, group: int) -> Any:
        return super().slot_buffer(group).astype(np.int64)


OffByOne = _mutant("R12", "OffByOne", mapper=_OffByOne)
StaleSlots = _mutant("R15", "StaleSlots", mapper=_StaleSlots)
PadsToTheLaunchedCount = _mutant("R15", "PadsToTheLaunchedCount", mapper=_PadsToTheLaunchedCount)
RankIgnored = _mutant("R18", "RankIgnored", mapper=_RankIgnored)
Group0ForAll = _mutant("R12", "Group0ForAll", mapper=_Group0ForAll)
WidthAsStride = _mutant("R12", "WidthAsStride", mapper=_WidthAsStride)
BoundedByWidth = _mutant("R13", "BoundedByWidth", mapper=_BoundedByWidth)
NegativePositions = _mutant("R13", "NegativePositions", mapper=_NegativePositions)
NullIsNeverPad = _mutant("R13", "NullIsNeverPad", mapper=_NullIsNeverPad)
HolesHaveSlots = _mutant("R13", "HolesHaveSlots", mapper=_HolesHaveSlots)
BlockZeroIsNull = _mutant("R13", "BlockZeroIsNull", mapper=_BlockZeroIsNull)
CrossGroupsInSteps = _mutant("R14", "CrossGroupsInSteps", mapper=_CrossGroupsInSteps)
RowsOfTheBatch = _mutant("R10.1", "RowsOfTheBatch", store=_RowsOfTheBatch)
RingsAreCut = _mutant("R11", "RingsAreCut", store=_RingsAreCut)
RingOfTheWidth = _mutant("R14", "RingOfTheWidth", mapper=_RingOfTheWidth)
FirstTokensToTheFirstRequest = _mutant("R13", "FirstTokensToTheFirstRequest", mapper=_FirstTokensToTheFirstRequest)
DummyIsTheLastRow = _mutant("R10.2", "DummyIsTheLastRow", store=_DummyIsTheLastRow)
PaddedRowsKept = _mutant("R10.3", "PaddedRowsKept", store=_PaddedRowsKept)
WholeRows = _mutant("R10.5", "WholeRows", store=_WholeRows)
WindowOfGlobalTokens = _mutant("R11", "WindowOfGlobalTokens", store=_WindowOfGlobalTokens)
FreshBufferEachCall = _mutant("R17", "FreshBufferEachCall", store=_FreshBufferEachCall)
OneSetForAll = _mutant("R17", "OneSetForAll", store=_OneSetForAll)
OneCommitLate = _mutant("R9.1", "OneCommitLate", store=_OneCommitLate)
BuffersKeptAtWakeUp = _mutant("R24", "BuffersKeptAtWakeUp", store=_BuffersKeptAtWakeUp)
RefersToItself = _mutant("R24", "RefersToItself", store=_RefersToItself)
Slots64 = _mutant("R16", "Slots64", store=_Slots64)
SearchFromTheLeft = _mutant("R13", "SearchFromTheLeft", mapper=_SearchFromTheLeft)


class Aliases(PlainBackend):
    """Its arrays are the caller's own."""

    name = "Aliases"

    def from_host(self, array: np.ndarray[Any, Any], device: Any = None) -> Any:
        return array


CAUGHT_BY["Aliases"] = "R10.8"

FIRST = ("BoundedByWidth", "SearchFromTheLeft", "Aliases")
"""Mutants whose first failure names token, row, position and R13."""
