"""The continuous-batching cache of transformers: a list of blocks for each request and kind of attention."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from blocktable_conformance.engines.adapter import AFTER, Engine, Rows, Shape, Span, as_rows
from blocktable_conformance.engines.packages import TRANSFORMERS

NUM_BLOCKS = 4  # of the cache tensor, which nothing here writes to
TRASH = 2
"""The first blocks are for padding and are given to no request: block 0 of a history is the one after them."""


class Pool:
    """Stands for the pool of blocks: it hands out what it is told."""

    def __init__(self) -> None:
        self.next: list[int] = []

    def set_blocks_per_sector(self, index: int, count: int) -> None:
        """Nothing."""

    def get_free_blocks(self, index: int, count: int) -> list[int]:
        """The next ones."""
        taken, self.next = self.next[:count], self.next[count:]
        return taken

    def free_blocks(self, index: int, block_ids: list[int]) -> None:
        """Nothing."""


class Transformers(Engine):
    """A cache allocator of full attention; of sliding attention, whose request is a ring, where the shape is one."""

    label = "transformers"
    version = TRANSFORMERS.version
    features = frozenset({"any order", "ring", "any id"})
    null_block_id = -1
    notes: ClassVar[dict[str, str]] = {
        "R7": "Ids are those of its own pool, and are not checked again.",
        AFTER: "A request is given its blocks before it is asked for slots; the list of them ends there.",
    }

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        module: Any = importlib.import_module("transformers.generation.continuous_batching.cache_allocators")
        kind = module.SlidingAttentionCacheAllocator if shape.ring else module.FullAttentionCacheAllocator
        self.allocator = kind(
            index=0,
            config=SimpleNamespace(head_dim=1, sliding_window=shape.block_size * shape.blocks),
            num_key_value_heads=1,
            cache_dtype=torch.float32,
            page_size=shape.block_size,
            layer_indices=[0],
            allow_block_sharing=True,
        )
        size = self.allocator.bytes_per_block
        memory = torch.zeros((NUM_BLOCKS + TRASH) * size, dtype=torch.uint8)
        self.pool = Pool()
        self.allocator.register_cache_tensor(size, NUM_BLOCKS * size, memory, self.pool)
        self.stride = self.allocator.block_physical_stride

    def append_row(self, row: int, ids: list[list[int]]) -> None:
        """A request grows by as many tokens as fill the blocks."""
        size = self.shape.block_size
        held = len(self.allocator.block_table.get(str(row), []))
        self.pool.next = [block + TRASH for block in ids[0]]
        self.allocator.allocate_cache_to_request(str(row), held * size, len(ids[0]) * size)

    def set_row(self, row: int, ids: list[list[int]]) -> None:
        """A request ends and another one begins."""
        self.clear_row(row)
        self.append_row(row, ids)

    def clear_row(self, row: int) -> None:
        """A request ends."""
        self.allocator.free_blocks(str(row))

    def copy_row(self, src: int, dst: int) -> None:
        """A fork of a request whose blocks are all written, so that each is shared."""
        self.clear_row(dst)
        if str(src) in self.allocator.block_table:
            held = len(self.allocator.block_table[str(src)])
            self.allocator.fork_blocks(str(src), str(dst), held * self.shape.block_size)

    def columns(self) -> Rows:
        """The lists."""
        tables = self.allocator.block_table
        return [[[block - TRASH for block in tables.get(str(row), [])] for row in range(self.shape.rows)]]

    def gather(self, rows: Sequence[int], padded: int) -> Rows:
        """The rows of a block table that held -1, as its batches reset it; an entry counts pages of keys and values."""
        batch = torch.full((padded, self.shape.blocks), -1, dtype=torch.int32)
        for i, row in enumerate(rows):
            self.allocator.fill_block_table(str(row), 0, 1, batch[i])
        pages = self.stride // self.shape.block_size
        return as_rows([torch.where(batch < 0, batch, batch // pages - TRASH)])

    def slots(self, spans: Sequence[Span]) -> list[list[int]]:
        """The write indices, counted in tokens of one layer's keys; the trash for writes is PAD."""
        found = []
        for span in spans:
            for index in self.allocator.get_write_indices(str(span.row), span.start, span.size):
                block, offset = divmod(index, self.stride)
                is_trash = index == self.allocator.write_trash_index
                found.append(-1 if is_trash else (block - TRASH) * self.shape.block_size + offset)
        return [found]
