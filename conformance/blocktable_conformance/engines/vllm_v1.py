"""vLLM's V1 table, `MultiGroupBlockTable`: rows in batch order, whole rows copied at a commit, one launch for slots."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from blocktable_conformance.engines.adapter import AFTER, NUM_TOKENS, Engine, Rows, Shape, Span, as_rows, flatten

MORE_ROWS = 8
"""Rows after those of a history: a column after a row's last one is still memory of the table."""

NO_CHECK = "Ids are those of the engine's own allocator, and are not checked again."


class ProcessGroup:
    """Stands for a context-parallel process group."""

    def __init__(self, world_size: int, rank: int) -> None:
        self.world_size = world_size
        self.rank_in_group = rank


def construct(kind: Any, **arguments: Any) -> Any:
    """Make a `kind` from those arguments that this version of it takes."""
    accepted = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in arguments.items() if name in accepted})


class RowTables(Engine):
    """The calls that vLLM's V1 table and those made after it share: rows of numpy, whose first ones are the batch."""

    features = frozenset({"groups", "context parallel", "padding", "whole buffer", "negative positions", "any id"})
    table: Any

    def append_row(self, row: int, ids: list[list[int]]) -> None:
        """R4."""
        self.table.append_row(tuple(ids), row)

    def set_row(self, row: int, ids: list[list[int]]) -> None:
        """R4."""
        self.table.add_row(tuple(ids), row)

    def clear_row(self, row: int) -> None:
        """R4."""
        self.table.clear_row(row)

    def move_row(self, src: int, dst: int) -> None:
        """R4."""
        self.table.move_row(src, dst)

    def swap_rows(self, a: int, b: int) -> None:
        """R4."""
        self.table.swap_row(a, b)

    def commit(self) -> None:
        """R9, of every row."""
        self.table.commit_block_table(self.shape.rows)

    def columns(self) -> Rows:
        """As many columns as each row counts."""
        return [
            [part.block_table.np[row, : part.num_blocks_per_row[row]].tolist() for row in range(self.shape.rows)]
            for part in self.table.block_tables
        ]

    def host_table(self) -> Rows:
        """The rows of numpy."""
        return as_rows([part.block_table.np[: self.shape.rows] for part in self.table.block_tables])

    def device_table(self) -> Rows:
        """The device's rows."""
        return as_rows([part.get_device_tensor(self.shape.rows) for part in self.table.block_tables])

    def gather(self, rows: Sequence[int], padded: int) -> Rows:
        """The batch is the first rows; what follows it there is the rest of the table."""
        self.table.commit_block_table(len(rows))
        return self.device_table()


class VllmV1(RowTables):
    """`MultiGroupBlockTable` of vllm.v1.worker.block_table."""

    label = "vLLM V1"
    features = RowTables.features | {"slot buffer", "capacity"}
    capacity_block_size = 128  # smaller ones are rounded up to as many tokens
    notes: ClassVar[dict[str, str]] = {
        "R4": "A row that was moved away is written again, or cleared, before it is used.",
        "R5": "What follows a row's blocks is not read: attention knows each request's length.",
        "R7": NO_CHECK,
        "R10.6": "What follows a row's blocks is not read: attention knows each request's length.",
        AFTER: "The scheduler gives a request its blocks before it asks for their slots.",
    }

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        module: Any = importlib.import_module("vllm.v1.worker.block_table")
        group = ProcessGroup(shape.world_size, shape.rank)
        module.get_dcp_group = lambda: group
        module.get_pcp_group = lambda: ProcessGroup(1, 0)
        kernel, num_groups = shape.kernel_block_size, shape.groups
        splits = "kernel_block_sizes" in inspect.signature(module.MultiGroupBlockTable).parameters
        self.table = construct(
            module.MultiGroupBlockTable,
            max_num_reqs=shape.rows + MORE_ROWS,
            max_model_len=1,
            max_num_batched_tokens=NUM_TOKENS,
            pin_memory=False,
            device=torch.device("cpu"),
            block_sizes=[shape.block_size if splits else kernel] * num_groups,
            kernel_block_sizes=[kernel] * num_groups,
            max_num_blocks=[shape.blocks] * num_groups,
            cp_kv_cache_interleave_size=shape.interleave_size,
        )

    def slots(self, spans: Sequence[Span]) -> list[list[int]]:
        """The whole buffers after one launch for each group."""
        _, starts, positions = flatten(spans)
        self.table.compute_slot_mapping(
            len(spans), torch.tensor(starts, dtype=torch.int32), torch.tensor(positions, dtype=torch.int64)
        )
        return [part.slot_mapping.gpu.tolist() for part in self.table.block_tables]


class VllmV1Old(VllmV1):
    """Of 0.25.1, which splits blocks itself."""

    version = "0.25.1"
    features = VllmV1.features | {"split"}


class VllmV1New(VllmV1):
    """Of 0.33.0."""

    version = "0.33.0"
