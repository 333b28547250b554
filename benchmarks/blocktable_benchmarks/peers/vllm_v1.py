"""vLLM's V1 table: rows in batch order, whole rows copied at every commit, one slot launch for each group."""

from __future__ import annotations

import importlib
import time
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
        self.reset()
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

    def _nothing_step(self) -> Callable[[int], None]:
        table, num_reqs = self.table, self.inputs.workload.num_reqs
        _, query_start_loc, positions = self.arrays

        def step(turn: int) -> None:
            table.commit_block_table(num_reqs)
            table.compute_slot_mapping(num_reqs, query_start_loc, positions)

        return step

    def _captured_step(self) -> Callable[[int], None]:
        table, requests, num_reqs = self.table, self.requests, self.inputs.workload.num_reqs
        append_row, num_turns = table.append_row, len(requests)
        _, query_start_loc, positions = self.arrays

        def step(turn: int) -> None:
            for row, ids in requests[turn % num_turns]:
                append_row(ids, row)
            table.commit_block_table(num_reqs)
            start = time.perf_counter()
            table.compute_slot_mapping(num_reqs, query_start_loc, positions)
            self.untimed += time.perf_counter() - start

        return step

    def _churn_step(self) -> Callable[[int], None]:
        """A request that begins takes the place of one that ended, as vLLM's input batch has it."""
        table, churn, num_reqs = self.table, self.churn, self.inputs.workload.num_reqs
        _, query_start_loc, positions = self.arrays

        def step(turn: int) -> None:
            ends, begins, grows, _ = churn[turn]
            for place, _ in ends:
                table.clear_row(place)
            for place, _, ids in begins:
                table.add_row(ids, place)
            for place, _, ids in grows:
                table.append_row(ids, place)
            table.commit_block_table(num_reqs)
            table.compute_slot_mapping(num_reqs, query_start_loc, positions)

        return step

    _mix_step = _churn_step

    def reset(self) -> None:
        """Make every row what it was when the table was opened."""
        num_reqs = self.inputs.workload.num_reqs
        for row in range(num_reqs):
            self.table.add_row(self.first_ids(row), int(self.place[row]))
        self.table.commit_block_table(num_reqs)
        self.synchronize()

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
