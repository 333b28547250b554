"""vLLM's V1 table: rows in batch order, whole rows copied at every commit, one slot launch for each group."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from blocktable_benchmarks.peers.base import Group, PeerLane, construct
from blocktable_benchmarks.workloads import Inputs


class VllmV1Lane(PeerLane):
    """`MultiGroupBlockTable`. It knows no `idx_mapping`: row i holds the batch's request i."""

    def open(self, inputs: Inputs, steps_in_flight: int = 2) -> None:
        """Make the table and fill its rows."""
        module, table_type = self._names()
        workload, groups = inputs.workload, inputs.workload.num_groups
        group = Group(workload.world_size, workload.world_size - 1)
        module.get_dcp_group = lambda: group
        module.get_pcp_group = lambda: Group(1, 0)
        self.take_inputs(inputs)
        self.table = construct(
            table_type,
            max_num_reqs=workload.num_rows,
            max_model_len=workload.max_model_len,
            max_num_batched_tokens=workload.num_slots,
            pin_memory=self.gpu is not None,
            device=self.device,
            block_sizes=[workload.block_size] * groups,
            kernel_block_sizes=[workload.block_size] * groups,
            max_num_blocks=[workload.row_blocks] * groups,
            cp_kv_cache_interleave_size=1,
        )
        self.place = np.empty(workload.num_reqs, np.int64)  # row of ours -> row of theirs
        self.place[inputs.idx_mapping] = np.arange(workload.num_reqs)
        for row in range(workload.num_reqs):
            self.table.add_row(self.first_ids(row), int(self.place[row]))
        self.table.commit_block_table(workload.num_reqs)
        self.requests = [
            [(int(self.place[row]), ids) for row, ids in turn.requests] if workload.num_appended else []
            for turn in inputs.turns
        ]
        self.step = self._make_step()
        self.launches_per_step = 2 * groups + 1

    def _names(self) -> tuple[Any, Any]:
        """Return the module whose process groups the table asks for, and the table's class."""
        module: Any = importlib.import_module("vllm.v1.worker.block_table")
        return module, module.MultiGroupBlockTable

    def _make_step(self) -> Callable[[int], None]:
        workload, table, requests = self.inputs.workload, self.table, self.requests
        append_row, num_turns, num_reqs = table.append_row, len(requests), workload.num_reqs
        _, query_start_loc, positions = self.arrays

        def whole_step(turn: int) -> None:
            for row, ids in requests[turn % num_turns]:
                append_row(ids, row)
            table.commit_block_table(num_reqs)
            table.compute_slot_mapping(num_reqs, query_start_loc, positions)

        def rolled_back_step(turn: int) -> None:
            whole_step(turn)
            rows = [row for row, _ in requests[turn % num_turns]]
            for part in table.block_tables:  # there is no call for it: the counts are set back, the ids stay
                part.num_blocks_per_row[rows] = workload.filled

        return rolled_back_step if workload.rolls_back else whole_step

    def append(self, turn: int) -> None:
        """Append what that turn appends, on the host alone."""
        append_row = self.table.append_row
        for row, ids in self.requests[turn % len(self.requests)]:
            append_row(ids, row)

    def set_row(self, row: int, ids: tuple[list[int], ...]) -> None:
        """Replace what a row holds."""
        self.table.add_row(ids, int(self.place[row]))

    def rewind(self) -> None:
        """Set the counts back; the ids beyond them stay, as they do in the engine."""
        for part in self.table.block_tables:
            part.num_blocks_per_row[: self.inputs.workload.num_reqs] = self.inputs.workload.filled

    def map_slots(self) -> None:
        """Run the slot kernels alone."""
        self.table.compute_slot_mapping(self.inputs.workload.num_reqs, self.arrays[1], self.arrays[2])

    gather = None  # the device table is the batch's

    def tables(self) -> list[Any]:
        """Return the batch tables on the host."""
        num_reqs = self.inputs.workload.num_reqs
        return [part.block_table.gpu[:num_reqs].cpu().numpy() for part in self.table.block_tables]

    def slots(self) -> list[Any]:
        """Return the slot mappings on the host."""
        return [part.slot_mapping.gpu.cpu().numpy() for part in self.table.block_tables]

    @property
    def bytes_per_step(self) -> int:
        """What its commit copies: whole rows."""
        num_reqs = self.inputs.workload.num_reqs
        return sum(4 * num_reqs * part.max_num_blocks_per_req for part in self.table.block_tables)
