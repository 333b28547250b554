"""Mutants: the plain backend with one step of its exports wrong. Each says which rule must catch it."""

from __future__ import annotations

from typing import Any

from plain_exports import ExportStore, PlainExportBackend

from blocktable import ExportBuffers, Layout
from blocktable.backend import Batch

CAUGHT_BY: dict[str, str] = {}
"""Mutant -> the rule that a failed assertion must name."""

CASES = (
    "a_ring_over_true_positions",
    "a_small_capacity_cuts_the_running_sum",
    "block_0_is_real_where_another_block_is_null",
    "boundaries_of_ranks",
    "every_layout_of_the_package_can_be_exported",
    "garbage_starts_write_nothing_outside",
    "invalidate_refills_exports",
    "inverse_map_by_hand",
    "parts_of_every_kind",
)
"""Tests of the suite that catch all of them."""


def _mutant(rule: str, store: type[ExportStore]) -> Any:
    name = store.__name__.removeprefix("_")
    CAUGHT_BY[name] = rule
    return type(name, (PlainExportBackend,), {"name": name, "store_class": store})


class _LastPageIsTheRest(ExportStore):
    """Says 0 for a full last page."""

    def last_page_len(self, length: int, count: int, page: int) -> int:
        return length % page if count else 0


class _PagesAreRoundedDown(ExportStore):
    def pages(self, length: int, page: int) -> int:
        return length // page


class _OnePageTooMany(ExportStore):
    """Takes the block of the next token with it, where the row has one."""

    def pages(self, length: int, page: int) -> int:
        return length // page + 1 if length else 0


class _CutPagesAreNotFull(ExportStore):
    def last_page_len(self, length: int, count: int, page: int) -> int:
        return (length - 1) % page + 1 if count else 0


class _AnEmptyRequestHasAPage(ExportStore):
    def last_page_len(self, length: int, count: int, page: int) -> int:
        return super().last_page_len(length, count, page) if count else 1


class _DummiesHaveLengths(ExportStore):
    def length(self, out: ExportBuffers, batch: Batch, i: int) -> int:
        if i >= batch.num_reqs or batch.seq_lens is None:
            return 0
        return self.local_length(out.groups[0], max(0, int(batch.seq_lens[i])))


class _ADummyIsTheLastRow(ExportStore):
    def is_row(self, row: int) -> bool:
        return -self.config.num_rows <= row < self.config.num_rows


class _StaleStarts(ExportStore):
    def store_start(self, batch: Batch, out: ExportBuffers, i: int, start: int, count: int) -> None:
        if i < batch.num_reqs:
            super().store_start(batch, out, i, start, count)


class _StartsAreCounts(ExportStore):
    def store_start(self, batch: Batch, out: ExportBuffers, i: int, start: int, count: int) -> None:
        super().store_start(batch, out, i, count, count)


class _FirstGroupForAll(ExportStore):
    def entries(self, group: int, batch: Batch, i: int, count: int, first: int = 0) -> list[int]:
        return super().entries(0, batch, i, count, first)


class _BlocksForSlots(ExportStore):
    def slot(self, block_id: int, offset: int, tokens: int) -> int:
        return block_id


class _NulledBlocksStay(ExportStore):
    def table_entry(self, group: int, out: ExportBuffers, block_id: int) -> int:
        return block_id * out.layout.entry_scale


class _ZerosAreMissing(ExportStore):
    """Takes block 0 for the null block of every group."""

    def table_entry(self, group: int, out: ExportBuffers, block_id: int) -> int:
        fill = out.fills[out.groups.index(group)]
        return block_id * out.layout.entry_scale if block_id else fill


class _ScaleIgnored(ExportStore):
    def table_entry(self, group: int, out: ExportBuffers, block_id: int) -> int:
        return super().table_entry(group, out, block_id) // out.layout.entry_scale


class _KeysForValues(ExportStore):
    def value_entry(self, layout: Layout, key_entry: int) -> int:
        return key_entry


class _MapGoesPastTheLength(ExportStore):
    def count(self, batch: Batch, out: ExportBuffers, i: int) -> int:
        is_map = out.layout.kind == "inverse_map"
        return self.num_exported_columns(batch, out, i) if is_map else super().count(batch, out, i)


class _FirstColumnOfARepeat(ExportStore):
    def map_row(self, group: int, out: ExportBuffers, row: Any, blocks: list[int]) -> None:
        super().map_row(group, out, row, blocks)
        for column, block_id in reversed(list(enumerate(blocks))):
            if self.is_mapped(group, block_id):
                row[block_id] = column


class _NullIsMapped(ExportStore):
    def is_mapped(self, group: int, block_id: int) -> bool:
        return True


class _LastOfTheWidth(ExportStore):
    def first_state(self, group: int, batch: Batch, layout: Layout, i: int, filled: int) -> int:
        width = self.config.width(group)
        is_last = layout.state_columns == "last"
        return width - layout.num_columns if is_last else super().first_state(group, batch, layout, i, filled)


class _StatesPastTheRow(ExportStore):
    def state(self, group: int, batch: Batch, out: ExportBuffers, i: int, place: int) -> int:
        row, fill = self.row_of(batch, i), out.fills[0]
        if row is None:
            return fill
        filled = self.num_columns(group, row)
        column = min(self.first_state(group, batch, out.layout, i, filled) + place, self.config.width(group) - 1)
        return int(self.table(group)[row, column]) or fill


class _ExportsKeptAtWakeUp(ExportStore):
    def reset_export(self, out: ExportBuffers, *, stream: int | None) -> None:
        """Leaves what was there."""


class _CopiesEachCall(ExportStore):
    def export(self, layout: Layout, batch: Batch, out: ExportBuffers, *, stream: int | None) -> None:
        super().export(layout, batch, out, stream=stream)
        if out.entries is not None:
            object.__setattr__(out, "entries", out.entries.copy())


class _CapacityIgnored(ExportStore):
    def room(self, out: ExportBuffers) -> int:
        return 2**31

    def indices(self, out: ExportBuffers, group: int, batch: Batch, i: int, count: int) -> list[int]:
        found = super().indices(out, group, batch, i, count)
        return found[: max(0, out.capacity - int(out.indptr[i]))]  # type: ignore[index]


class _FirstTokensOfAllRanks(ExportStore):
    def tokens_before(self, out: ExportBuffers, batch: Batch, i: int) -> int:
        given = batch.first_tokens
        return 0 if given is None or self.row_of(batch, i) is None else max(0, int(given[i]))


class _PartsAreRoundedUp(ExportStore):
    def first_column(self, out: ExportBuffers, batch: Batch, i: int) -> int:
        return -(-self.tokens_before(out, batch, i) // self.block_tokens(out))


class _DummiesAreRounded(ExportStore):
    def count_rounded(self, batch: Batch, out: ExportBuffers) -> None:
        if out.num_cut is not None and batch.first_tokens is not None:
            size = self.block_tokens(out)
            for first in batch.first_tokens.tolist():
                out.num_cut[0] += self.local_length(out.groups[0], max(0, first)) % size != 0


class _PartlyOverwrittenColumnsGo(ExportStore):
    def first_of_ring(self, length: int, ring: int, tokens: int) -> int:
        return max(0, -(-length // tokens) - ring)


class _RingsIgnoreTheirWindow(ExportStore):
    def first_of_window(self, group: int, batch: Batch, i: int) -> int:
        return 0


class _StartsArePaddedWithZero(ExportStore):
    def padded_start(self, starts: list[int]) -> int:
        return 0


class _RequestsAreRows(ExportStore):
    def request_number(self, batch: Batch, i: int) -> int:
        return self.row_of(batch, i) or 0


LastPageIsTheRest = _mutant("R27", _LastPageIsTheRest)
PagesAreRoundedDown = _mutant("R27", _PagesAreRoundedDown)
OnePageTooMany = _mutant("R27", _OnePageTooMany)
CutPagesAreNotFull = _mutant("R27", _CutPagesAreNotFull)
AnEmptyRequestHasAPage = _mutant("R27", _AnEmptyRequestHasAPage)
DummiesHaveLengths = _mutant("R27", _DummiesHaveLengths)
ADummyIsTheLastRow = _mutant("R25.6", _ADummyIsTheLastRow)
StaleStarts = _mutant("R27", _StaleStarts)
StartsAreCounts = _mutant("R27", _StartsAreCounts)
FirstGroupForAll = _mutant("R25.15", _FirstGroupForAll)
BlocksForSlots = _mutant("R28", _BlocksForSlots)
NulledBlocksStay = _mutant("R26", _NulledBlocksStay)
ZerosAreMissing = _mutant("R26", _ZerosAreMissing)
ScaleIgnored = _mutant("R26", _ScaleIgnored)
KeysForValues = _mutant("R29", _KeysForValues)
MapGoesPastTheLength = _mutant("R30", _MapGoesPastTheLength)
FirstColumnOfARepeat = _mutant("R30", _FirstColumnOfARepeat)
NullIsMapped = _mutant("R30", _NullIsMapped)
LastOfTheWidth = _mutant("R31", _LastOfTheWidth)
StatesPastTheRow = _mutant("R31", _StatesPastTheRow)
ExportsKeptAtWakeUp = _mutant("R24", _ExportsKeptAtWakeUp)
CopiesEachCall = _mutant("R25.8", _CopiesEachCall)
CapacityIgnored = _mutant("R27", _CapacityIgnored)
FirstTokensOfAllRanks = _mutant("R34", _FirstTokensOfAllRanks)
PartsAreRoundedUp = _mutant("R34", _PartsAreRoundedUp)
DummiesAreRounded = _mutant("R34", _DummiesAreRounded)
PartlyOverwrittenColumnsGo = _mutant("R35", _PartlyOverwrittenColumnsGo)
RingsIgnoreTheirWindow = _mutant("R35", _RingsIgnoreTheirWindow)
StartsArePaddedWithZero = _mutant("R35", _StartsArePaddedWithZero)
RequestsAreRows = _mutant("R35", _RequestsAreRows)
