"""vllm-ascend's table of rows: the paths of it that are numpy and torch."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from blocktable_conformance.engines.adapter import AFTER, NUM_TOKENS, Shape, Span, flatten
from blocktable_conformance.engines.cpu import use_the_cpu
from blocktable_conformance.engines.packages import VLLM_ASCEND
from blocktable_conformance.engines.vllm_v1 import MORE_ROWS, NO_CHECK, ProcessGroup, RowTables


class VllmAscend(RowTables):
    """`MultiGroupBlockTable` of vllm_ascend.worker.block_table; slots by its numpy path, and torch's among ranks."""

    label = "vllm-ascend"
    version = VLLM_ASCEND.version
    features = RowTables.features | {"split", "capacity"}
    notes: ClassVar[dict[str, str]] = {
        "R4": "A row that was moved away is written again, or cleared, before it is used.",
        "R5": "What follows a row's blocks is not read: attention knows each request's length.",
        "R7": NO_CHECK,
        "R10.6": "What follows a row's blocks is not read: attention knows each request's length.",
        AFTER: "The scheduler gives a request its blocks before it asks for their slots.",
        "R16": "Its slots are int32, as its cache kernels want them.",
    }

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        use_the_cpu()
        module: Any = importlib.import_module("vllm_ascend.worker.block_table")
        group = ProcessGroup(shape.world_size, shape.rank)
        module.get_dcp_group = lambda: group
        module.get_pcp_group = lambda: ProcessGroup(1, 0)
        self.table = module.MultiGroupBlockTable(
            max_num_reqs=shape.rows + MORE_ROWS,
            max_model_len=1,
            max_num_batched_tokens=NUM_TOKENS,
            pin_memory=False,
            device=torch.device("cpu"),
            block_sizes=[shape.block_size] * shape.groups,
            max_num_blocks=[shape.blocks] * shape.groups,
            kernel_sizes=[[shape.kernel_block_size]] * shape.groups,
            cp_kv_cache_interleave_size=shape.interleave_size,
        )

    def slots(self, spans: Sequence[Span]) -> list[list[int]]:
        """The slots of the tokens alone: these paths write no more."""
        _, starts, positions = flatten(spans)
        requests = np.repeat(np.arange(len(spans)), [span.size for span in spans])
        size = len(positions)
        if self.shape.world_size > 1:
            self.table.compute_slot_mapping(
                len(spans), torch.tensor(starts, dtype=torch.int32), torch.tensor(positions, dtype=torch.int64)
            )
        else:
            self.table.compute_slot_mapping_draft(requests, np.array(positions, np.int64))
        return [part.slot_mapping.np[:size].tolist() for part in self.table.block_tables]
