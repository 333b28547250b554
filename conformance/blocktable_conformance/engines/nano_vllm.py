"""nano-vllm's tables: a list of blocks in each sequence, made into arrays for each step."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from blocktable_conformance.engines.adapter import AFTER, Engine, Rows, Shape, Span, as_rows
from blocktable_conformance.engines.cpu import use_the_cpu
from blocktable_conformance.engines.packages import NANO_VLLM
from blocktable_conformance.engines.trials import MAX_ID


class NanoVllm(Engine):
    """`BlockManager` hands blocks to a `Sequence`; `ModelRunner` prepares the batch, for a graph of its size."""

    label = "nano-vllm"
    version = f"fork {NANO_VLLM.version}"
    features = frozenset({"any order", "padding", "whole buffer", "aligned spans"})
    block_sizes = (2, 3, 4)
    null_block_id = -1
    notes: ClassVar[dict[str, str]] = {
        "R10.3": "Rows after the batch are not read: their context length is 0.",
        "R10.6": "Rows after the batch are not read: their context length is 0.",
        AFTER: "A sequence is given its blocks before it is asked for slots; the list of them ends there.",
    }

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        use_the_cpu()
        self.sequence: Any = importlib.import_module("nanovllm.engine.sequence").Sequence
        self.runner: Any = importlib.import_module("nanovllm.engine.model_runner").ModelRunner
        self.context: Any = importlib.import_module("nanovllm.utils.context")
        manager: Any = importlib.import_module("nanovllm.engine.block_manager").BlockManager
        self.manager = manager(MAX_ID + 1, shape.block_size)
        self.sequence.block_size = shape.block_size
        self.rows = [self._new() for _ in range(shape.rows)]
        self.tokens = 0
        names = ("input_ids", "positions", "context_lens", "slot_mapping")
        buffers = {name: torch.zeros(shape.rows, dtype=torch.int64) for name in names}
        self.me = SimpleNamespace(
            block_size=shape.block_size,
            enforce_eager=False,
            graph_vars={
                **buffers,
                "block_tables": torch.zeros((shape.rows, shape.blocks), dtype=torch.int32),
                "outputs": torch.zeros(shape.rows),
            },
            model=SimpleNamespace(compute_logits=lambda hidden: hidden),
            **{f"_cpu_{name}": torch.zeros(shape.rows, dtype=torch.int64) for name in names},
        )
        self.me.prepare_block_tables = lambda seqs: self.runner.prepare_block_tables(self.me, seqs)

    def _new(self) -> Any:
        sequence = self.sequence([0])
        sequence.token_ids, sequence.num_tokens = [], 0
        return sequence

    def _grow(self, sequence: Any, count: int) -> None:
        for _ in range(count):
            self.tokens += 1  # no two tokens are alike, so no block is found in the cache
            sequence.append_token(self.tokens)

    def append_row(self, row: int, ids: list[list[int]]) -> None:
        """A sequence takes tokens one by one, and a block with the first of each."""
        sequence = self.rows[row]
        if not sequence.block_table:
            self.set_row(row, ids)
            return
        for block in ids[0]:
            self._free_next([block])
            for _ in range(self.shape.block_size):
                self._grow(sequence, 1)
                self.manager.may_append(sequence)

    def set_row(self, row: int, ids: list[list[int]]) -> None:
        """A sequence ends and another begins, whose prompt fills the blocks."""
        self.clear_row(row)
        self.rows[row] = self._new()
        self._grow(self.rows[row], len(ids[0]) * self.shape.block_size)
        self._free_next(ids[0])
        self.manager.allocate(self.rows[row])

    def _free_next(self, blocks: list[int]) -> None:
        """Put blocks first in the queue of free ones."""
        free = [block for block in self.manager.free_block_ids if block not in blocks]
        self.manager.free_block_ids = deque([*blocks, *free])

    def clear_row(self, row: int) -> None:
        """A sequence ends."""
        self.manager.deallocate(self.rows[row])

    def columns(self) -> Rows:
        """The lists."""
        return [[list(sequence.block_table) for sequence in self.rows]]

    def gather(self, rows: Sequence[int], padded: int) -> Rows:
        """The buffer of a decode step's graph, which is for a batch of `padded`."""
        sequences = [self.rows[row] for row in rows]
        inputs = self.runner.prepare_decode(self.me, sequences)
        self.me.graph_bs, self.me.graphs = [padded], {padded: SimpleNamespace(replay=lambda: None)}
        self.runner.run_model(self.me, *inputs, False)
        return as_rows([self.me.graph_vars["block_tables"]])

    def slots(self, spans: Sequence[Span]) -> list[list[int]]:
        """The slots of a prefill whose first blocks are in the cache already."""
        sequences = []
        for span in spans:
            whole = self.rows[span.row]
            part = self._new()
            part.token_ids = [0] * (span.start + span.size)
            part.num_tokens = part.num_prompt_tokens = len(part.token_ids)
            part.num_cached_tokens, part.block_table = span.start, whole.block_table
            sequences.append(part)
        self.runner.prepare_prefill(self.me, sequences)
        found: list[int] = self.context.get_context().slot_mapping.tolist()
        return [found]
