"""The plain backend with exports, in loops cut into steps so that a mutant can replace one; right as it stands."""

from __future__ import annotations

from typing import Any

import numpy as np
from plain_backend import PlainBackend, PlainStore

from blocktable import ExportBuffers, Layout
from blocktable.backend import Batch
from blocktable.device.emulation import DeviceArray


class ExportStore(PlainStore):
    def export(self, layout: Layout, batch: Batch, out: ExportBuffers, *, stream: int | None) -> None:
        if layout.kind in ("csr", "token_csr", "block_requests"):
            self.write_csr(batch, out)
        elif layout.kind == "lengths":
            self.write_lengths(batch, out)
        elif layout.kind == "state":
            self.write_states(batch, out)
        elif layout.kind == "token_requests":
            self.write_token_requests(batch, out)
        else:
            for member in range(len(out.groups)):
                for i in range(out.max_batch):
                    self.write_row(batch, out, member, i)
        self.count_rounded(batch, out)

    def map_positions(self, rows: Any, group: int, positions: Any, out: Any, *, stream: int | None) -> None:
        for token in range(out.shape[0]):
            for place in range(out.shape[1]):
                out[token, place] = self.position_slot(group, int(rows[token]), int(positions[token, place]))

    def reset_export(self, out: ExportBuffers, *, stream: int | None) -> None:
        for array in (out.indptr, out.last_page_lens, out.lengths, out.counts, out.num_cut):
            if array is not None:
                array[:] = 0
        if out.entries is not None:
            for entries, fill in zip(out.entries, out.fills, strict=True):
                entries[:] = fill

    # step: the slot of a position

    def position_slot(self, group: int, row: int, position: int) -> int:
        geometry = self.config.groups[group]
        local = self.local_position(group, row, position) if self.is_row(row) and position >= 0 else None
        if local is None or local // geometry.tokens_per_column >= self.num_columns(group, row):
            return self.no_slot(group)
        block_id = int(self.table(group)[row, local // geometry.tokens_per_column])
        if self.is_missing(group, block_id) and (geometry.null_is_pad or block_id < 0):
            return self.no_slot(group)
        return block_id * geometry.tokens_per_column + local % geometry.tokens_per_column

    def no_slot(self, group: int) -> int:
        return -1

    def local_position(self, group: int, row: int, position: int) -> int | None:
        geometry, share = self.config.groups[group], self.config.context_parallel
        if geometry.slot_mode == "ring":
            return position % max(1, self.num_columns(group, row) * geometry.tokens_per_column)
        if not geometry.is_sharded:
            return position
        turn, offset = divmod(position, share.interleave_size)
        if turn % share.world_size != share.rank:
            return None
        return turn // share.world_size * share.interleave_size + offset

    # step: where a request's part begins

    def first_column(self, out: ExportBuffers, batch: Batch, i: int) -> int:
        return self.tokens_before(out, batch, i) // self.block_tokens(out)

    def tokens_before(self, out: ExportBuffers, batch: Batch, i: int) -> int:
        """Return how many tokens of this rank lie before a request's part."""
        if batch.first_tokens is None or self.row_of(batch, i) is None:
            return 0
        return self.local_length(out.groups[0], max(0, int(batch.first_tokens[i])))

    def count_rounded(self, batch: Batch, out: ExportBuffers) -> None:
        rounded = sum(self.tokens_before(out, batch, i) % self.block_tokens(out) != 0 for i in range(batch.num_reqs))
        if out.num_cut is not None:
            out.num_cut[0] = min(int(out.num_cut[0]) + rounded, 2**31 - 1)

    # step: what a request exports

    def num_exported_columns(self, batch: Batch, out: ExportBuffers, i: int) -> int:
        row = self.row_of(batch, i)
        if row is None:
            return 0
        columns = min(out.width, *(self.num_columns(group, row) for group in self.counted_groups(out)))
        return max(0, columns - self.first_column(out, batch, i))

    def counted_groups(self, out: ExportBuffers) -> tuple[int, ...]:
        return out.groups

    def entries(self, group: int, batch: Batch, i: int, count: int, first: int = 0) -> list[int]:
        """Return `count` entries that the batch shows of a request, from a column on."""
        return self.batch_row(group, batch, i)[first : first + count]

    def length(self, out: ExportBuffers, batch: Batch, i: int) -> int:
        """Return how many tokens of a request this rank holds."""
        if self.row_of(batch, i) is None or batch.seq_lens is None:
            return 0
        whole = self.local_length(out.groups[0], max(0, int(batch.seq_lens[i])))
        return max(0, whole - self.first_column(out, batch, i) * self.block_tokens(out))

    def page_size(self, out: ExportBuffers) -> int:
        return 1 if out.layout.kind == "token_csr" else self.block_tokens(out)

    def block_tokens(self, out: ExportBuffers) -> int:
        return self.config.groups[out.groups[0]].tokens_per_column

    def count(self, batch: Batch, out: ExportBuffers, i: int) -> int:
        """Return how many pages a request exports."""
        page = self.page_size(out)
        most = self.num_exported_columns(batch, out, i) * (self.block_tokens(out) // page)
        return min(self.pages(self.length(out, batch, i), page), most)

    def pages(self, length: int, page: int) -> int:
        return -(-length // page)

    # step: CSR

    def write_csr(self, batch: Batch, out: ExportBuffers) -> None:
        self.write_lengths(batch, out)
        start = 0
        for i in range(out.max_batch):
            wanted = self.count(batch, out, i)
            count = min(wanted, self.room(out) - start)
            out.num_cut[0] = min(int(out.num_cut[0]) + wanted - count, 2**31 - 1)  # type: ignore[index]
            self.store_start(batch, out, i, start, count)
            out.last_page_lens[i] = self.last_page_len(int(out.lengths[i]), count, self.page_size(out))  # type: ignore[index]
            for member, group in enumerate(out.groups):
                indices = self.indices(out, group, batch, i, count)
                room = max(0, out.capacity - start)
                out.entries[member, start : start + count] = indices[:room]  # type: ignore[index]
            start += count
        out.indptr[out.max_batch] = start  # type: ignore[index]
        self.clear_indices(out, start)

    def room(self, out: ExportBuffers) -> int:
        return out.capacity

    def store_start(self, batch: Batch, out: ExportBuffers, i: int, start: int, count: int) -> None:
        out.indptr[i] = start  # type: ignore[index]

    def clear_indices(self, out: ExportBuffers, total: int) -> None:
        for entries, fill in zip(out.entries, out.fills, strict=True):  # type: ignore[arg-type]
            entries[total:] = fill

    def last_page_len(self, length: int, count: int, page: int) -> int:
        return min(page, length - (count - 1) * page) if count else 0

    def indices(self, out: ExportBuffers, group: int, batch: Batch, i: int, count: int) -> list[int]:
        tokens = self.block_tokens(out)
        is_by_block, first = out.layout.kind == "csr", self.first_column(out, batch, i)
        if out.layout.kind == "block_requests":
            return [self.request_number(batch, i)] * count
        found = self.entries(group, batch, i, count if is_by_block else -(-count // tokens), first)
        valid = max(self.filler(group), 0)
        blocks = [valid if self.is_missing(group, block_id) else block_id for block_id in found]
        if is_by_block:
            return blocks
        return [self.slot(blocks[local // tokens], local % tokens, tokens) for local in range(count)]

    def request_number(self, batch: Batch, i: int) -> int:
        return i

    def slot(self, block_id: int, offset: int, tokens: int) -> int:
        return block_id * tokens + offset

    def write_lengths(self, batch: Batch, out: ExportBuffers) -> None:
        for i in range(out.max_batch):
            out.lengths[i] = self.length(out, batch, i)  # type: ignore[index]

    # step: rows of tables and maps

    def write_row(self, batch: Batch, out: ExportBuffers, member: int, i: int) -> None:
        group, row = out.groups[member], out.entries[member, i]  # type: ignore[index]
        if out.layout.kind == "inverse_map":
            first = self.first_column(out, batch, i)
            self.clear_map(out, row)
            self.map_row(group, out, row, self.entries(group, batch, i, self.count(batch, out, i), first))
            row[row >= 0] += self.mapped_from(first)
            return
        if out.layout.kind == "ring":
            self.write_ring(batch, out, member, i)
            return
        first = self.first_column(out, batch, i)
        found = self.entries(group, batch, i, self.num_exported_columns(batch, out, i), first)
        values = [self.table_entry(group, out, block_id) for block_id in found]
        self.clear_table(out, member, row)
        if out.layout.kind == "kv_offsets":
            row[0, : len(values)] = values
            row[1, : len(values)] = [self.value_entry(out.layout, value) for value in values]
        else:
            row[: len(values)] = values

    def mapped_from(self, first_column: int) -> int:
        return first_column

    # step: rings, and requests of tokens

    def write_ring(self, batch: Batch, out: ExportBuffers, member: int, i: int) -> None:
        group, row = out.groups[member], self.row_of(batch, i)
        shown: Any = out.entries[member, i]  # type: ignore[index]
        shown[:] = out.fills[member]
        if row is None or not all(self.num_columns(other, row) for other in out.groups):
            return
        length, ring, tokens = self.length(out, batch, i), self.num_columns(group, row), self.block_tokens(out)
        first = max(self.first_of_ring(length, ring, tokens), self.first_of_window(group, batch, i))
        for column in range(first, min(-(-length // tokens), out.width)):
            shown[column] = self.table_entry(group, out, int(self.table(group)[row, self.ring_column(column, ring)]))

    def first_of_ring(self, length: int, ring: int, tokens: int) -> int:
        return max(0, length - ring * tokens) // tokens

    def first_of_window(self, group: int, batch: Batch, i: int) -> int:
        geometry = self.config.groups[group]
        if geometry.sliding_window is None or batch.num_computed_tokens is None:
            return 0
        return max(0, int(batch.num_computed_tokens[i]) - geometry.sliding_window + 1) // geometry.tokens_per_column

    def ring_column(self, column: int, ring: int) -> int:
        return column % ring

    def write_token_requests(self, batch: Batch, out: ExportBuffers) -> None:
        given: Any = batch.query_start_loc
        requests: Any = out.entries
        starts = [min(max(int(start), 0), out.capacity) for start in given]
        requests[:] = -1
        for i in range(batch.num_reqs):
            if self.is_request_of_tokens(batch, i):
                requests[:, starts[i] : starts[i + 1]] = i
        for i in range(out.max_batch + 1):
            out.indptr[i] = starts[i] if i < len(starts) else self.padded_start(starts)  # type: ignore[index]

    def is_request_of_tokens(self, batch: Batch, i: int) -> bool:
        return self.row_of(batch, i) is not None

    def padded_start(self, starts: list[int]) -> int:
        return starts[-1]

    # step: rows of tables

    def clear_table(self, out: ExportBuffers, member: int, row: Any) -> None:
        row[:] = out.fills[member]

    def table_entry(self, group: int, out: ExportBuffers, block_id: int) -> int:
        fill = out.fills[out.groups.index(group)]
        return fill if self.is_missing(group, block_id) else block_id * out.layout.entry_scale

    def value_entry(self, layout: Layout, key_entry: int) -> int:
        return key_entry + layout.value_offset

    def clear_map(self, out: ExportBuffers, row: Any) -> None:
        row[:] = -1

    def map_row(self, group: int, out: ExportBuffers, row: Any, blocks: list[int]) -> None:
        for column, block_id in enumerate(blocks):
            if self.is_mapped(group, block_id) and block_id < out.num_kernel_blocks:
                row[block_id] = column

    def is_mapped(self, group: int, block_id: int) -> bool:
        return not self.is_missing(group, block_id)

    # step: states

    def write_states(self, batch: Batch, out: ExportBuffers) -> None:
        assert out.entries is not None
        states = out.entries.reshape(len(out.groups), out.max_batch, out.layout.num_columns)
        for member, group in enumerate(out.groups):
            for i in range(out.max_batch):
                for j in range(out.layout.num_columns):
                    states[member, i, j] = self.state(group, batch, out, i, j)

    def state(self, group: int, batch: Batch, out: ExportBuffers, i: int, place: int) -> int:
        row, fill = self.row_of(batch, i), out.fills[out.groups.index(group)]
        if row is None:
            return fill
        filled = self.num_columns(group, row)
        column = self.first_state(group, batch, out.layout, i, filled) + place
        block_id = int(self.table(group)[row, column]) if column < filled else self.filler(group)
        return fill if self.is_missing(group, block_id) else block_id

    def first_state(self, group: int, batch: Batch, layout: Layout, i: int, filled: int) -> int:
        if layout.state_columns == "last":
            return max(0, filled - layout.num_columns)
        if layout.state_columns == "aligned":
            assert batch.seq_lens is not None
            return self.aligned_column(int(batch.seq_lens[i]), self.config.groups[group].block_size)
        return 0

    def aligned_column(self, seq_len: int, block_size: int) -> int:
        return max(0, seq_len - 1) // block_size


class PlainExportBackend(PlainBackend):
    """Its arrays are a device's, whose contents the core does not see: what a capacity cuts is left to the kernels."""

    is_emulated = True  # its arrays are those of an emulated device
    name = "plain-exports"
    capabilities = PlainBackend.capabilities | {"exports", "export_parts"}
    store_class: type[PlainStore] = ExportStore

    def from_host(self, array: Any, device: Any = None) -> Any:
        return np.array(array).view(DeviceArray)

    def to_host(self, array: Any) -> Any:
        return np.array(array, subok=False)
