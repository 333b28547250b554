"""vLLM's V2 table: stable rows, staged writes, gather and slots of all groups in one launch each. It needs a GPU."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

from blocktable_benchmarks.peers.base import Impossible, PeerLane, construct
from blocktable_benchmarks.workloads import Inputs

MAX_GRID_Y = 65535


class VllmV2Lane(PeerLane):
    """`BlockTables`."""

    launches_per_step = 8  # an upload of the ids, three launches, and what pinned memory costs beside them

    def open(self, inputs: Inputs, steps_in_flight: int = 2) -> None:
        """Make the table and fill its rows."""
        table_type = self._table_type()
        workload, groups = inputs.workload, inputs.workload.num_groups
        if workload.num_reqs >= MAX_GRID_Y:
            raise Impossible(f"its grid's second dimension holds num_reqs + 1, which must be at most {MAX_GRID_Y}")
        self.take_inputs(inputs)
        self.table = construct(
            table_type,
            block_sizes=[workload.block_size] * groups,
            kernel_block_sizes=[workload.block_size] * groups,
            max_num_reqs=workload.num_rows,
            max_num_batched_tokens=workload.num_slots,
            max_num_blocks_per_group=[workload.row_blocks] * groups,
            device=self.device,
            cp_size=workload.world_size,
            cp_rank=workload.world_size - 1,
            cp_interleave=1,
        )
        self.reset()
        self.requests = [turn.requests if workload.num_appended else [] for turn in inputs.turns]
        self.step = self._make_step()

    def _table_type(self) -> Any:
        module: Any = importlib.import_module("vllm.v1.worker.gpu.block_table")
        return module.BlockTables

    def _make_step(self) -> Callable[[int], None]:
        workload, table, requests = self.inputs.workload, self.table, self.requests
        append, num_turns, num_reqs, num_tokens = (
            table.append_block_ids,
            len(requests),
            workload.num_reqs,
            workload.num_tokens,
        )
        idx_mapping, query_start_loc, positions = self.arrays

        def whole_step(turn: int) -> None:
            for row, ids in requests[turn % num_turns]:
                append(row, ids, False)
            table.apply_staged_writes()
            table.gather_block_tables(idx_mapping, num_reqs)
            table.compute_slot_mappings(idx_mapping, query_start_loc, positions, num_tokens)

        def rolled_back_step(turn: int) -> None:
            whole_step(turn)
            rows = [row for row, _ in requests[turn % num_turns]]
            table.num_blocks.np[:, rows] = workload.filled  # there is no call for it: the ids stay

        return rolled_back_step if workload.rolls_back else whole_step

    def _nothing_step(self) -> Callable[[int], None]:
        table, workload = self.table, self.inputs.workload
        num_reqs, num_tokens = workload.num_reqs, workload.num_tokens
        idx_mapping, query_start_loc, positions = self.arrays

        def step(turn: int) -> None:
            table.apply_staged_writes()
            table.gather_block_tables(idx_mapping, num_reqs)
            table.compute_slot_mappings(idx_mapping, query_start_loc, positions, num_tokens)

        return step

    def _captured_step(self) -> Callable[[int], None]:
        table, requests, workload = self.table, self.requests, self.inputs.workload
        append, num_turns = table.append_block_ids, len(requests)
        num_reqs, num_tokens = workload.num_reqs, workload.num_tokens
        idx_mapping, query_start_loc, positions = self.arrays

        def step(turn: int) -> None:
            for row, ids in requests[turn % num_turns]:
                append(row, ids, False)
            table.apply_staged_writes()
            start = time.perf_counter()
            table.gather_block_tables(idx_mapping, num_reqs)
            table.compute_slot_mappings(idx_mapping, query_start_loc, positions, num_tokens)
            self.untimed += time.perf_counter() - start

        return step

    def _churn_step(self) -> Callable[[int], None]:
        """The end of a request calls nothing: its row stays until it is overwritten."""
        table, churn, workload = self.table, self.churn, self.inputs.workload
        append, num_reqs, num_tokens = table.append_block_ids, workload.num_reqs, workload.num_tokens
        batches = [self.torch.from_numpy(change.idx_mapping).to(self.device) for change in churn]
        _, query_start_loc, positions = self.arrays

        def step(turn: int) -> None:
            _, begins, grows, _ = churn[turn]
            for _, row, ids in begins:
                append(row, ids, True)
            for _, row, ids in grows:
                append(row, ids, False)
            table.apply_staged_writes()
            table.gather_block_tables(batches[turn], num_reqs)
            table.compute_slot_mappings(batches[turn], query_start_loc, positions, num_tokens)

        return step

    _mix_step = _churn_step

    def reset(self) -> None:
        """Make every row what it was when the table was opened."""
        for row in range(self.inputs.workload.num_reqs):
            self.table.append_block_ids(row, self.first_ids(row), True)
        self.table.apply_staged_writes()
        self.synchronize()

    def append(self, turn: int) -> None:
        """Append what that turn appends, on the host alone."""
        append_block_ids = self.table.append_block_ids
        for row, ids in self.requests[turn % len(self.requests)]:
            append_block_ids(row, ids, False)

    def set_row(self, row: int, ids: tuple[list[int], ...]) -> None:
        """Replace what a row holds."""
        self.table.append_block_ids(row, ids, True)

    def rewind(self) -> None:
        """Set the counts back; the ids beyond them stay, as they do in the engine."""
        self.table.num_blocks.np[:, : self.inputs.workload.num_reqs] = self.inputs.workload.filled

    def map_slots(self) -> None:
        """Run the slot kernel alone."""
        self.table.compute_slot_mappings(*self.arrays, self.inputs.workload.num_tokens)

    def gather(self) -> None:
        """Run the gather alone."""
        self.table.gather_block_tables(self.arrays[0], self.inputs.workload.num_reqs)

    def tables(self) -> list[Any]:
        """Return the batch tables on the host."""
        num_reqs = self.inputs.workload.num_reqs
        return [table[:num_reqs].cpu().numpy() for table in self.table.input_block_tables]

    def slots(self) -> list[Any]:
        """Return the slot mappings on the host."""
        return list(self.table.slot_mappings.cpu().numpy())

    @property
    def bytes_per_step(self) -> int:
        """What a step sends: four int32 for each write (five with several groups), and all counts."""
        workload = self.inputs.workload
        groups = workload.num_groups
        return 4 * groups * ((5 if groups > 1 else 4) * workload.num_appended + workload.num_rows)
