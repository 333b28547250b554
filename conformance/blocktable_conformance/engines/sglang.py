"""SGLang's `ReqToTokenPool`: a slot for every token of every request, and the Triton kernels that fill and read it."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from blocktable_conformance.engines.adapter import AFTER, Engine, Rows, Shape, Span
from blocktable_conformance.engines.packages import SGLANG

POOL = "ReqToTokenPool"


def _pool_class() -> Any:
    """Return the class alone: its module imports the whole server."""
    folder = importlib.util.find_spec("sglang")
    assert folder is not None
    assert folder.origin is not None
    source = (Path(folder.origin).parent / "srt/mem_cache/memory_pool.py").read_text()
    (found,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == POOL)
    saver = SimpleNamespace(create=lambda **_: SimpleNamespace(region=lambda *_: contextlib.nullcontext()))
    names: dict[str, Any] = {"torch": torch, "TorchMemorySaverAdapter": saver, "GPU_MEMORY_TYPE_KV_CACHE": None}
    exec(
        "from __future__ import annotations\nfrom typing import *\n" + (ast.get_source_segment(source, found) or ""),
        names,
    )
    return names[POOL]


class SGLang(Engine):
    """A page of B tokens is B slots. How long a request is, its batch knows: here the adapter."""

    label = "SGLang"
    version = SGLANG.version
    features = frozenset({"any order", "padding entries", "padded tokens"})
    block_sizes = (1, 2, 4)
    batch_null = -1
    notes: ClassVar[dict[str, str]] = {
        "R5": "What follows a request's tokens is not read: the batch knows its length.",
        "R10.6": "The attention kernel reads no further than a request's length.",
        AFTER: "The batch asks for slots of tokens that it has.",
    }

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        memory: Any = importlib.import_module("sglang.kernels.ops.memory.common")
        indices: Any = importlib.import_module("sglang.kernels.ops.attention.kv_indices")
        self.write, self.last_slots = memory.write_req_to_token_pool_triton, memory.get_last_loc_triton
        self.pages, self.num_page_blocks = (
            indices.create_flashmla_kv_indices_triton,
            indices.get_num_kv_index_blocks_flashmla,
        )
        self.pool = _pool_class()(shape.rows, (shape.blocks + 2) * shape.block_size, "cpu", False)
        self.pool.alloc_rows(shape.rows)
        self.lengths = [0] * shape.rows
        self.batch = torch.full((shape.rows, shape.blocks), -1, dtype=torch.int32)

    def append_row(self, row: int, ids: list[list[int]]) -> None:
        """The kernel of an extend: the prefix again, then the new slots."""
        slots = self._slots(ids)
        held = self.lengths[row]
        prefix = self.pool.req_to_token[row + 1, :held].to(torch.int64)
        lengths = [torch.tensor([count]) for count in (held, held + len(slots), len(slots))]
        table = self.pool.req_to_token
        self.write[(1,)](
            table,
            torch.tensor([row + 1]),
            torch.tensor([prefix.data_ptr()], dtype=torch.uint64),
            *lengths,
            slots,
            table.shape[1],
        )
        self.lengths[row] += len(slots)

    def set_row(self, row: int, ids: list[list[int]]) -> None:
        """A request ends and another one begins, whose slots torch writes."""
        self.clear_row(row)
        slots = self._slots(ids)
        self.pool.write((row + 1, slice(0, len(slots))), slots.to(torch.int32))
        self.lengths[row] = len(slots)

    def _slots(self, ids: list[list[int]]) -> torch.Tensor:
        size = self.shape.block_size
        return torch.tensor([block * size + offset for block in ids[0] for offset in range(size)], dtype=torch.int64)

    def clear_row(self, row: int) -> None:
        """A request ends: its row is free for another."""
        self.pool.free_rows([row + 1])
        self.pool.free_slots.remove(row + 1)
        self.lengths[row] = 0

    def columns(self) -> Rows:
        """The page of each B slots."""
        return [
            [
                row[: length // self.shape.block_size]
                for row, length in zip(self.device_table()[0], self.lengths, strict=True)
            ]
        ]

    def device_table(self) -> Rows:
        """The page of each B slots; nothing is there where no page is."""
        size = self.shape.block_size
        return [[[slot // size for slot in row[::size]] for row in self.pool.req_to_token[1:].tolist()]]

    def gather(self, rows: Sequence[int], padded: int) -> Rows:
        """The pages that the kernel for FlashMLA writes into a buffer that lasts; padding is one token of row 0."""
        lengths = [1 if row < 0 else self.lengths[row] for row in rows]
        self.pages[(len(rows), self.num_page_blocks(self.shape.blocks, self.shape.block_size))](
            self.pool.req_to_token,
            torch.tensor([row + 1 for row in rows]),
            torch.tensor(lengths),
            None,
            self.batch,
            self.pool.req_to_token.stride(0),
            self.batch.stride(0),
            PAGED_SIZE=self.shape.block_size,
        )
        found: list[list[int]] = self.batch.tolist()
        return [found[:padded]]

    def slots(self, spans: Sequence[Span]) -> list[list[int]]:
        """The kernel that finds the slot of a request's last token, with each token as the last."""
        places = [(span.row + 1, span.start + i + 1) for span in spans for i in range(span.size)]
        rows, lengths = (torch.tensor(list(part)) for part in zip(*places, strict=True))
        found: list[int] = self.last_slots(self.pool.req_to_token, rows, lengths).tolist()
        return [found]
