"""Exports as whole-array operations (R25-R31, R34, R35)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from blocktable import ExportBuffers, Layout
from blocktable.backend import Batch

CSR_KINDS = ("csr", "token_csr", "block_requests")


class ExportCall:
    """One batch in one layout.

    Attributes:
        rows: [max_batch] int64. Batch index -> row; -1 for padding entries and after the batch, which export nothing.
        lengths: [max_batch] int64. Tokens of each request's part on this rank.
        part: [max_batch] int64. Column of its row that the part begins with.
    """

    def __init__(self, store: Any, layout: Layout, batch: Batch, out: ExportBuffers) -> None:
        self.store, self.layout, self.batch, self.out = store, layout, batch, out
        self.tokens = store.config.groups[out.groups[0]].tokens_per_column
        self.rows = store.rows_of(batch, out.max_batch)
        self.seq_lens, first = (
            self.store.padded(tokens, out.max_batch).clamp(min=0).masked_fill(self.rows < 0, 0)
            for tokens in (batch.seq_lens, batch.first_tokens)
        )
        first = self.local(first)
        self.part = first // self.tokens
        self.num_rounded = (first % self.tokens != 0).sum()
        self.lengths = (self.local(self.seq_lens) - self.part * self.tokens).clamp(min=0)

    def local(self, tokens: Any) -> Any:
        return self.store.local(tokens, self.store.config.groups[self.out.groups[0]])

    def write(self) -> None:
        """Write it."""
        kind, out = self.layout.kind, self.out
        if kind == "token_requests":
            self.write_token_requests()
        elif kind == "state":
            self.write_states()
        elif kind != "placeholder":
            if out.num_cut is not None:
                self.count_cut(self.num_rounded)
            if out.lengths is not None:
                out.lengths.copy_(self.lengths)
            if kind in CSR_KINDS:
                self.write_csr()
            elif kind != "lengths":
                self.write_rows()

    def counts(self) -> Any:
        """Return [max_batch] int64, entries of each batch row."""
        kind, tokens = self.layout.kind, self.tokens
        columns = torch.stack([self.store.columns_of(index, self.rows) for index in self.out.groups]).amin(0)
        if kind == "ring":
            columns = (columns > 0) * self.out.width
        columns = (columns.clamp(max=self.out.width) - self.part).clamp(min=0)
        if kind == "token_csr":
            return torch.minimum(self.lengths, columns * tokens)
        return columns if kind in ("table", "kv_offsets") else torch.minimum(-(-self.lengths // tokens), columns)

    def members(self) -> Iterator[tuple[Any, int, int]]:
        """Return the array of each group, the group, and what a place without an entry holds."""
        return zip(self.out.entries, self.out.groups, self.out.fills, strict=True)  # type: ignore[arg-type]

    def blocks(self, index: int, request: Any, column: Any, is_used: Any) -> tuple[Any, Any]:
        """Return the kernel block of each place, and which places stand for none.

        Args:
            index: the group.
            request: batch index of each place; it may broadcast.
            column: of its row, by true positions.
            is_used: which places have an entry at all.
        """
        store, batch, is_ring = self.store, self.batch, self.layout.kind == "ring"
        group = store.config.groups[index]
        columns = store.columns_of(index, self.rows)
        source = column % columns.clamp(min=1)[request] if is_ring else column
        block = store.entries(index, self.rows[request], source, is_used)
        no_block = ~is_used | ((block >= group.null_start) & (block < group.null_start + group.blocks_per_kv_block))
        window = group.sliding_window if is_ring else group.cut_window
        if window is not None and batch.num_computed_tokens is not None and self.layout.kind != "state":
            no_block |= column < store.first_columns(batch, group, window, self.out.max_batch)[request]
        if is_ring:  # later tokens have overwritten the tokens of a turn before
            no_block |= column < ((self.lengths - columns * self.tokens).clamp(min=0) // self.tokens)[request]
        return block, no_block

    def write_rows(self) -> None:
        """Write the kinds that have a row for each request."""
        kind, place, request = self.layout.kind, self.store.arange(self.out.width), self.requests()
        is_used, column = place < self.counts()[:, None], place + self.part[:, None]
        for entries, index, fill in self.members():
            block, no_block = self.blocks(index, request, column, is_used)
            if kind == "inverse_map":
                no_block |= (block < 0) | (block >= self.out.num_kernel_blocks)
                entries.fill_(fill)  # -1, which is below every column
                found = column.masked_fill(no_block, -1).to(entries.dtype)
                entries.scatter_reduce_(1, block.masked_fill(no_block, 0), found, "amax")
                continue
            stored = (block * self.layout.entry_scale).masked_fill(no_block, fill)
            if kind == "kv_offsets":
                entries[:, 1] = (stored + self.layout.value_offset).masked_fill(~is_used, fill)
            (entries[:, 0] if kind == "kv_offsets" else entries).copy_(stored)

    def write_states(self) -> None:
        """Write the blocks that hold each request's states."""
        which, num_columns = self.layout.state_columns, self.layout.num_columns
        for entries, index, fill in self.members():
            columns = self.store.columns_of(index, self.rows)
            first = torch.zeros_like(columns)
            if which == "last":
                first = (columns - num_columns).clamp(min=0)
            elif which == "aligned":
                first = (self.seq_lens - 1).clamp(min=0) // self.tokens
            column = first[:, None] + self.store.arange(num_columns)
            block, no_block = self.blocks(index, self.requests(), column, column < columns[:, None])
            entries.copy_(block.masked_fill(no_block, fill).reshape(entries.shape))

    def write_csr(self) -> None:
        """Write the entries of one request after another, and where each request's begin."""
        out, is_token_level = self.out, self.layout.kind == "token_csr"
        page, ends = 1 if is_token_level else self.tokens, self.counts().cumsum(0)
        self.count_cut((ends[-1] - out.capacity).clamp(min=0))
        ends = torch.nn.functional.pad(ends.clamp(max=out.capacity), (1, 0))
        pages = ends.diff()
        last_page_lens = (self.lengths - (pages - 1) * page).clamp(max=page).masked_fill(pages == 0, 0)
        out.indptr.copy_(ends)  # type: ignore[union-attr]
        out.last_page_lens.copy_(last_page_lens)  # type: ignore[union-attr]
        request = self.store.requests_of(ends, out.capacity)
        is_used, request = request < out.max_batch, request.clamp(max=out.max_batch - 1)
        local = self.store.arange(out.capacity) - ends[request]
        column = self.part[request] + local // (self.tokens if is_token_level else 1)
        for entries, index, fill in self.members():
            if self.layout.kind == "block_requests":
                entries.copy_(request.masked_fill(~is_used, fill))
                continue
            block, no_block = self.blocks(index, request, column, is_used)
            stored = (block * (self.tokens // page)).masked_fill(no_block, fill)
            entries.copy_(stored + (local % self.tokens).masked_fill(~is_used, 0) if is_token_level else stored)

    def write_token_requests(self) -> None:
        """Write the request of every token, and where each request's tokens begin (R35)."""
        out: Any = self.out
        starts = self.store.memory.tensor(self.batch.query_start_loc).clamp(0, out.capacity)
        out.indptr[: starts.shape[0]] = starts
        out.indptr[starts.shape[0] :] = starts[-1]
        request = self.store.requests_of(starts, out.capacity)
        is_none = self.rows[request.clamp(max=out.max_batch - 1)] < 0
        out.entries.copy_(request.masked_fill(is_none | (request >= starts.shape[0] - 1), -1))

    def requests(self) -> Any:
        return self.store.arange(self.out.max_batch)[:, None]

    def count_cut(self, more: Any) -> None:
        """Add to what was cut, which stays at 2**31 - 1."""
        count: Any = self.out.num_cut
        count.copy_((count.long() + more).clamp(max=2**31 - 1))
