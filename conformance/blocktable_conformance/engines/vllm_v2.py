"""vLLM's V2 table, `BlockTables`: rows that stay, staged writes, gather and slots of all groups in one launch each."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from blocktable_conformance.engines.adapter import AFTER, NUM_TOKENS, Engine, Rows, Shape, Span, as_rows, flatten
from blocktable_conformance.engines.cpu import use_the_cpu
from blocktable_conformance.engines.vllm_v1 import MORE_ROWS, NO_CHECK, construct


class VllmV2(Engine):
    """`BlockTables` of vllm.v1.worker.gpu.block_table. The end of a request calls nothing: its row is overwritten."""

    label = "vLLM V2"
    features = frozenset(
        {
            "any order",
            "groups",
            "context parallel",
            "padding",
            "whole buffer",
            "slot buffer",
            "negative positions",
            "any id",
            "capacity",
        }
    )
    notes: ClassVar[dict[str, str]] = {
        "R5": "What follows a row's blocks is not read: the gather knows each row's count.",
        "R7": NO_CHECK,
        "R10.6": "What follows a row's blocks is not read: attention knows each request's length.",
        AFTER: "The scheduler gives a request its blocks before it asks for their slots.",
    }

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        use_the_cpu()
        buffers: Any = importlib.import_module("vllm.v1.worker.gpu.buffer_utils")
        buffers.get_accelerator_view_from_cpu_tensor = lambda tensor: tensor
        module: Any = importlib.import_module("vllm.v1.worker.gpu.block_table")
        self.table = construct(
            module.BlockTables,
            block_sizes=[shape.block_size] * shape.groups,
            kernel_block_sizes=[shape.kernel_block_size] * shape.groups,
            max_num_reqs=shape.rows + MORE_ROWS,
            max_num_batched_tokens=NUM_TOKENS,
            max_num_blocks_per_group=[shape.blocks] * shape.groups,
            device=torch.device("cpu"),
            cp_size=shape.world_size,
            cp_rank=shape.rank,
            cp_interleave=shape.interleave_size,
        )

    def append_row(self, row: int, ids: list[list[int]]) -> None:
        """R4."""
        self.table.append_block_ids(row, tuple(ids), False)

    def set_row(self, row: int, ids: list[list[int]]) -> None:
        """R4."""
        self.table.append_block_ids(row, tuple(ids), True)

    def commit(self) -> None:
        """R9."""
        self.table.apply_staged_writes()

    def columns(self) -> Rows:
        """As many columns as each row counts; its ids are on the device alone."""
        self.commit()
        counts = self.table.num_blocks.np
        return [
            [row[: counts[group, i]] for i, row in enumerate(rows)] for group, rows in enumerate(self.device_table())
        ]

    def device_table(self) -> Rows:
        """The device's rows."""
        return as_rows([part.gpu[: self.shape.rows] for part in self.table.block_tables])

    def gather(self, rows: Sequence[int], padded: int) -> Rows:
        """The whole buffers after one launch."""
        self.table.gather_block_tables(torch.tensor(rows, dtype=torch.int32), padded)
        return as_rows([part[: self.shape.rows] for part in self.table.input_block_tables])

    def slots(self, spans: Sequence[Span]) -> list[list[int]]:
        """The whole buffers after one launch."""
        rows, starts, positions = flatten(spans)
        self.table.compute_slot_mappings(
            torch.tensor(rows, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(positions, dtype=torch.int64),
            len(positions),
        )
        found: list[list[int]] = self.table.slot_mappings.tolist()
        return found


class VllmV2Old(VllmV2):
    """Of 0.25.1, which splits blocks itself."""

    version = "0.25.1"
    features = VllmV2.features | {"split"}


class VllmV2New(VllmV2):
    """Of 0.33.0, where a request of -1 is a padding entry."""

    version = "0.33.0"
    features = (VllmV2.features | {"padded tokens"}) - {"context parallel"}
    untried: ClassVar[dict[str, str]] = {"context parallel": "Triton's interpreter refuses the mask of its kernel"}
