"""The exports of a batch in plain Python, written to be read beside docs/spec.md (R25-R31).

A *batch* below is a list of rows; -1, or one outside the table, is a padding entry. A result covers all batch rows that
the table has, asked for or not, and every group of the export.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any

from blocktable import BlockTableConfig, Layout
from blocktable_conformance.oracle import Geometry, OracleTable, ceil_div


@dataclass
class Exported:
    """What an export must hold; None where its kind has no such array.

    Attributes:
        entries: one nested list for each group, of the shape that `ExportBuffers.entries` has.
        indptr: [max_batch + 1].
        last_page_lens: [max_batch].
        lengths: [max_batch].
        num_cut: entries that the capacity leaves out, and first tokens that are not a boundary.
    """

    entries: list[Any]
    indptr: list[int] | None = None
    last_page_lens: list[int] | None = None
    lengths: list[int] | None = None
    num_cut: int = 0


@dataclass(frozen=True)
class Request:
    """One batch row.

    Attributes:
        row: its row.
        seq_len: tokens of its sequence; 0 where none are given.
        num_computed_tokens: tokens before this step; None where they are not given.
        first_token: where its part of the row begins.
    """

    row: int
    seq_len: int = 0
    num_computed_tokens: int | None = None
    first_token: int = 0


class ExportOracle:
    """Exports one batch of a table as of its last commit.

    Attributes:
        table: the table.
        config: its config.
        layout: the layout.
        groups: the groups.
        batch: [max_batch] requests; those after the batch are padding entries.
        num_reqs: requests of the batch.
        starts: [num_reqs + 1]. First token of each request; None where they are not given.
    """

    def __init__(
        self,
        table: OracleTable,
        config: BlockTableConfig,
        layout: Layout,
        groups: Sequence[int],
        idx_mapping: Sequence[int],
        seq_lens: Sequence[int] | None = None,
        num_computed_tokens: Sequence[int] | None = None,
        first_tokens: Sequence[int] | None = None,
        query_start_loc: Sequence[int] | None = None,
        max_batch: int | None = None,
    ) -> None:
        self.starts = query_start_loc
        self.table = table
        self.config = config
        self.layout = layout
        self.groups = list(groups)
        self.batch = [
            Request(
                row,
                0 if seq_lens is None else seq_lens[i],
                None if num_computed_tokens is None else num_computed_tokens[i],
                0 if first_tokens is None else max(0, first_tokens[i]),
            )
            for i, row in enumerate(idx_mapping)
        ]
        self.num_reqs = len(self.batch)
        num_rows = table.num_batch_rows if max_batch is None else max_batch
        self.batch += [Request(-1) for _ in range(num_rows - len(self.batch))]

    @property
    def shape(self) -> Geometry:
        """The geometry that all groups of an export share."""
        return self.table.shapes[self.groups[0]]

    @property
    def width(self) -> int:
        """Columns of an export's rows (R26)."""
        size, width = self.shape.kernel_block_size, self.shape.width
        if self.layout.kind == "ring":
            width = ceil_div(self.config.max_model_len + self.config.lookahead_tokens, size)
            while width % self._step(self.config.width_alignment) or width % self._step(self.layout.width_tokens):
                width += 1
            return width
        if self.layout.kind not in ("table", "kv_offsets"):
            return width
        if self.layout.exact_width:
            ranks = self.shape.share.world_size if self.shape.share else 1
            return ceil_div(self.config.max_model_len + self.config.lookahead_tokens, size * ranks)
        step = self._step(self.layout.width_tokens)
        return ceil_div(width, step) * step

    def _step(self, tokens: int) -> int:
        """Return what a width is a multiple of where its tokens are one of `tokens`."""
        return tokens // gcd(tokens, self.shape.kernel_block_size)

    def is_dummy(self, request: Request) -> bool:
        """Say whether a batch row stands for no row (R10.2)."""
        return not 0 <= request.row < self.table.num_rows

    def columns(self, group: int, request: Request) -> list[int]:
        """Return the entries that a batch shows of a request (R10, R11), as many as every group of the export has."""
        least = min(len(self.table.committed_columns(other, request.row)) for other in self.groups)
        whole = self.table.batch_columns(group, request.row, request.num_computed_tokens)[: min(least, self.width)]
        return whole[self.first_column(request) :]

    def local(self, tokens: int) -> int:
        """Return how many of the first tokens of a request this rank holds (R19)."""
        return tokens if self.shape.share is None else self.shape.share.local_length(tokens)

    def first_column(self, request: Request) -> int:
        """Return the column of its row that a request's part begins with (R34)."""
        return 0 if self.is_dummy(request) else self.local(request.first_token) // self.shape.kernel_block_size

    def is_rounded(self, request: Request) -> bool:
        """Say whether this rank rounds a request's first token down (R34)."""
        return not self.is_dummy(request) and self.local(request.first_token) % self.shape.kernel_block_size != 0

    def is_boundary(self, request: Request) -> bool:
        """Say whether a block begins at a request's first token on every rank (R34)."""
        share, size = self.shape.share, self.shape.kernel_block_size
        if share is None or self.is_dummy(request):
            return not self.is_rounded(request)
        ranks = [share._replace(rank=rank) for rank in range(share.world_size)]
        return all(rank.local_length(request.first_token) % size == 0 for rank in ranks)

    def length(self, request: Request) -> int:
        """Return how many tokens of a request's part this rank holds (R27, R34)."""
        if self.is_dummy(request) or request.seq_len < 0:
            return 0
        return max(0, self.local(request.seq_len) - self.first_column(request) * self.shape.kernel_block_size)

    def blocks(self, group: int, request: Request) -> list[int]:
        """Return the entries that a request's tokens lie in (R27)."""
        return self.columns(group, request)[: ceil_div(self.length(request), self.shape.kernel_block_size)]

    def run(self, *, capacity: int = 0, num_kernel_blocks: int = 0) -> Exported:
        """Return the export.

        Args:
            capacity: "csr", "token_csr": entries of each group's indices.
            num_kernel_blocks: "inverse_map": entries of each request.
        """
        found = self._run(capacity, num_kernel_blocks)
        found.num_cut += sum(map(self.is_rounded, self.batch))
        return found

    def _run(self, capacity: int, num_kernel_blocks: int) -> Exported:
        kind = self.layout.kind
        if kind == "lengths":
            return Exported([], lengths=[self.length(request) for request in self.batch])
        if kind == "token_requests":
            return self._token_requests(capacity)
        if kind in ("csr", "block_requests"):
            return self._csr(self.shape.kernel_block_size, capacity)
        if kind == "token_csr":
            return self._csr(1, capacity)
        make: dict[str, Callable[[int, Request], Any]] = {
            "table": self._table_row,
            "ring": self._ring_row,
            "kv_offsets": self._kv_rows,
            "state": self._states,
            "placeholder": lambda _group, _request: [0],
            "inverse_map": lambda group, request: self._map_row(group, request, num_kernel_blocks),
        }
        return Exported([[make[kind](group, request) for request in self.batch] for group in self.groups])

    def fill(self, group: int) -> int:
        """Return what a place without an entry holds: what the consumer tests for, or a valid entry (R25.7)."""
        if self.layout.null is not None:
            return self.layout.null
        return max(0, self.table.shapes[group].filler) * self.layout.entry_scale

    def entry(self, group: int, block_id: int) -> int:
        """Return the entry of a kernel block, or what stands for one that is missing (R25.7)."""
        is_missing = self.table.shapes[group].is_missing(block_id)
        return self.fill(group) if is_missing else block_id * self.layout.entry_scale

    # Tables (R26, R29).

    def _table_row(self, group: int, request: Request) -> list[int]:
        row = [self.entry(group, block_id) for block_id in self.columns(group, request)]
        return row + [self.fill(group)] * (self.width - len(row))

    def _ring_row(self, group: int, request: Request) -> list[int]:
        """Return a ring over true positions (R35)."""
        size, ring = self.shape.kernel_block_size, self.table.committed_columns(group, request.row)
        row = [self.fill(group)] * self.width
        if not all(self.table.committed_columns(other, request.row) for other in self.groups):
            return row
        window = self.config.groups[group].sliding_window
        for column in range(min(self.width, ceil_div(self.length(request), size))):
            is_overwritten = column < (self.length(request) - len(ring) * size) // size
            is_left = (
                window is not None
                and request.num_computed_tokens is not None
                and column < max(0, request.num_computed_tokens - window + 1) // size
            )
            if not is_overwritten and not is_left:
                row[column] = self.entry(group, ring[column % len(ring)])
        return row

    def _kv_rows(self, group: int, request: Request) -> list[list[int]]:
        keys = [self.entry(group, block_id) for block_id in self.columns(group, request)]
        values = [key + self.layout.value_offset for key in keys]
        behind = [self.fill(group)] * (self.width - len(keys))
        return [keys + behind, values + behind]

    # CSR (R27, R28).

    def _csr(self, page_size: int, capacity: int) -> Exported:
        """Return indices of pages: of kernel blocks, or of single tokens, whose ids are slots."""
        pages_per_block = self.shape.kernel_block_size // page_size
        indices: list[list[int]] = [[] for _ in self.groups]
        indptr, last_page_lens, num_cut = [0], [], 0
        for number, request in enumerate(self.batch):
            columns = [[self.entry(g, block_id) for block_id in self.columns(g, request)] for g in self.groups]
            pages = min(ceil_div(self.length(request), page_size), len(columns[0]) * pages_per_block)
            count = min(pages, capacity - indptr[-1])
            num_cut += pages - count
            indptr.append(indptr[-1] + count)
            rest = self.length(request) - (count - 1) * page_size
            last_page_lens.append(min(rest, page_size) if count else 0)
            for flat, row in zip(indices, columns, strict=True):
                if self.layout.kind == "block_requests":
                    flat += [number] * count
                    continue
                flat += [
                    row[page // pages_per_block] * pages_per_block + page % pages_per_block for page in range(count)
                ]
        whole = [
            flat + [self.fill(group) * pages_per_block] * (capacity - len(flat))
            for group, flat in zip(self.groups, indices, strict=True)
        ]
        lengths = [self.length(request) for request in self.batch]
        return Exported(whole, indptr, last_page_lens, lengths, num_cut)

    def _token_requests(self, capacity: int) -> Exported:
        """Return the request of each token, and padded starts (R35)."""
        assert self.starts is not None
        held = [min(max(start, 0), capacity) for start in self.starts]
        requests = [-1] * capacity
        for number, (first, end) in enumerate(pairwise(held)):
            if not self.is_dummy(self.batch[number]):
                requests[first:end] = [number] * (end - first)
        padded = held + held[-1:] * (len(self.batch) + 1 - len(held))
        return Exported([requests for _ in self.groups], padded)

    # The inverse map (R30).

    def _map_row(self, group: int, request: Request, num_kernel_blocks: int) -> list[int]:
        columns = [-1] * num_kernel_blocks
        for column, block_id in enumerate(self.blocks(group, request)):
            if not self.table.shapes[group].is_missing(block_id) and block_id < num_kernel_blocks:
                columns[block_id] = self.first_column(request) + column
        return columns

    # States (R31).

    def _states(self, group: int, request: Request) -> Any:
        columns = self.table.committed_columns(group, request.row)
        first = {
            "first": 0,
            "last": max(0, len(columns) - self.layout.num_columns),
            "aligned": max(0, request.seq_len - 1) // self.shape.kernel_block_size,
        }[self.layout.state_columns]
        found = columns[first : first + self.layout.num_columns]
        states = [self.entry(group, block_id) for block_id in found]
        states += [self.fill(group)] * (self.layout.num_columns - len(states))
        return states[0] if self.layout.state_columns == "first" else states
