"""torch's PagedAttention for FlexAttention: a page table, and the pages that are free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention

from blocktable_conformance.engines.adapter import AFTER, Engine, Rows, Shape, Span, as_rows
from blocktable_conformance.engines.trials import MAX_ID


class FlexAttention(Engine):
    """`PagedAttention` of torch.nn.attention.experimental; it takes pages from the end of its list of free ones."""

    label = "FlexAttention"
    version = torch.__version__.partition("+")[0]
    features = frozenset({"any order"})
    null_block_id = -1
    notes: ClassVar[dict[str, str]] = {
        AFTER: "`reserve` is called before `assign`; a page of -1 gives addresses below 0, from the cache's end."
    }

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.pages = MAX_ID + 1
        self.table = PagedAttention(self.pages, shape.block_size, shape.rows, device="cpu")

    def append_row(self, row: int, ids: list[list[int]]) -> None:
        """A request's capacity grows by so many pages, the next of the free ones."""
        if ids[0]:
            self.table.empty_pages = [page for page in self.table.empty_pages if page not in ids[0]] + ids[0]
        index = torch.tensor([row])
        size = self.table.capacity[index] + len(ids[0]) * self.shape.block_size
        self.table.reserve(index, size)

    def set_row(self, row: int, ids: list[list[int]]) -> None:
        """A request ends and another one begins."""
        self.clear_row(row)
        self.append_row(row, ids)

    def clear_row(self, row: int) -> None:
        """A request ends."""
        self.table.erase(torch.tensor([row]))

    def columns(self) -> Rows:
        """As many pages as each request's capacity has."""
        counts = (self.table.capacity // self.shape.block_size).tolist()
        return [[self.table.page_table[row, :count].tolist() for row, count in enumerate(counts)]]

    def host_table(self) -> Rows:
        """The page table."""
        return as_rows([self.table.page_table])

    device_table = host_table

    def gather(self, rows: Sequence[int], padded: int) -> Rows:
        """The pages that a mask of whole rows is converted to."""
        from torch.nn.attention.flex_attention import BlockMask

        held = (self.table.capacity[list(rows)] // self.shape.block_size).to(torch.int32)
        indices = torch.arange(int(held.max()), dtype=torch.int32).repeat(len(rows), 1, 1, 1)
        mask = BlockMask.from_kv_blocks(held.view(-1, 1, 1), indices, BLOCK_SIZE=self.shape.block_size)
        found = self.table.convert_logical_block_mask(mask, torch.tensor(list(rows)))
        return [[found.kv_indices[i, 0, 0, :count].tolist() for i, count in enumerate(held.tolist())]]

    def slots(self, spans: Sequence[Span]) -> list[list[int]]:
        """Where `assign` puts the values of each token: the places of a cache of zeros that hold them then."""
        found = []
        for span in spans:
            size = self.pages * self.shape.block_size
            cache = torch.zeros((1, 1, size, 1), dtype=torch.float64)
            values = torch.arange(1, span.size + 1, dtype=torch.float64).view(1, 1, -1, 1)
            positions = torch.arange(span.start, span.start + span.size).view(1, -1)
            self.table.assign(torch.tensor([span.row]), positions, values, values, cache, cache.clone())
            places = cache.view(-1).tolist()
            found += [places.index(token) if token in places else -1 for token in range(1, span.size + 1)]
        return [found]
