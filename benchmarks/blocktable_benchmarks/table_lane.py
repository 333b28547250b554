"""Our own table over one backend, as an engine drives it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np

import blocktable as bt
from blocktable_benchmarks.gpu import Gpu
from blocktable_benchmarks.workloads import Inputs

LAUNCHES_PER_STEP = 8
"""At most: for the separate path, with its marks."""


class TableLane:
    """A `BlockTable` over one backend.

    Args:
        name: of the backend.
        gpu: where the three device arrays are torch tensors; None: they are what the backend makes of numpy's.
        takes_lists: hand the table the lists that peers get, instead of arrays.
    """

    launches_per_step = LAUNCHES_PER_STEP

    def __init__(self, name: str, gpu: Gpu | None, *, takes_lists: bool = False) -> None:
        self.backend = bt.get_backend(name)
        self.gpu = None if name == "numpy" or getattr(self.backend, "is_emulated", False) else gpu
        self.takes_lists = takes_lists
        self.table: bt.BlockTable
        self.inputs: Inputs
        self.step: Callable[[int], object]

    def open(self, inputs: Inputs, steps_in_flight: int = 2) -> None:
        """Make the table and fill its rows."""
        workload = inputs.workload
        self.inputs = inputs
        self.table = bt.BlockTable(workload.config(steps_in_flight), self.backend)
        self.table.warmup()
        rows = np.arange(workload.num_reqs)
        if workload.filled:
            self.table.set_rows(rows, inputs.fill, np.full(workload.num_reqs, workload.filled))
        self.table.commit()
        self.arrays = tuple(
            self.device_array(array) for array in (inputs.idx_mapping, inputs.query_start_loc, inputs.positions)
        )
        self.step = self._list_step() if self.takes_lists else self._array_step()

    def device_array(self, host: Any) -> Any:
        """Return a copy on the device."""
        return self.backend.from_host(host) if self.gpu is None else self.gpu.array(host)

    def close(self) -> None:
        """Let the memory go."""
        del self.table, self.step, self.arrays
        gc.collect()
        if self.gpu is not None:
            self.gpu.release()

    def _array_step(self) -> Callable[[int], object]:
        table, turns, num_reqs = self.table, self.inputs.turns, self.inputs.workload.num_reqs
        append, step, num_turns = table.append_rows, table.step, len(turns)
        idx_mapping, query_start_loc, positions = self.arrays

        def whole_step(turn: int) -> None:
            rows, ids, counts, _, _ = turns[turn % num_turns]
            append(rows, ids, counts)
            step(idx_mapping, query_start_loc, positions, num_reqs_padded=num_reqs)

        def rolled_back_step(turn: int) -> None:
            whole_step(turn)
            rows, _, _, kept, _ = turns[turn % num_turns]
            table.truncate_rows(rows, kept)

        def still_step(turn: int) -> None:
            step(idx_mapping, query_start_loc, positions, num_reqs_padded=num_reqs)

        if not self.inputs.workload.num_appended:
            return still_step
        return rolled_back_step if self.inputs.workload.rolls_back else whole_step

    def _list_step(self) -> Callable[[int], object]:
        """As `_array_step`, from one tuple of lists a request: joining them is part of the step."""
        table, turns, num_reqs = self.table, self.inputs.turns, self.inputs.workload.num_reqs
        append, step, num_turns, groups = table.append_rows, table.step, len(turns), range(len(self.inputs.fill))
        idx_mapping, query_start_loc, positions = self.arrays
        rolls_back = self.inputs.workload.rolls_back

        def whole_step(turn: int) -> None:
            requests = turns[turn % num_turns].requests
            rows = [row for row, _ in requests]
            ids = [list(chain.from_iterable(blocks[group] for _, blocks in requests)) for group in groups]
            append(rows, ids, [len(blocks[0]) for _, blocks in requests])
            step(idx_mapping, query_start_loc, positions, num_reqs_padded=num_reqs)
            if rolls_back:
                table.truncate_rows(rows, turns[turn % num_turns].kept)

        return whole_step

    def rewind(self) -> None:
        """Take back what steps appended."""
        workload = self.inputs.workload
        if workload.num_appended:
            rows = np.arange(workload.num_reqs)
            self.table.truncate_rows(rows, np.full(workload.num_reqs, workload.filled))
            self.table.commit()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.gpu is None:
            self.backend.synchronize()
        else:
            self.gpu.synchronize()

    def map_slots(self) -> None:
        """Run the slot kernel alone."""
        self.table.compute_slot_mappings(*self.arrays)

    def gather(self) -> None:
        """Run the gather alone."""
        self.table.gather(self.arrays[0], self.inputs.workload.num_reqs)

    def tables(self) -> list[Any]:
        """Return the batch tables on the host: one [num_reqs, width] int32 for each group."""
        rows = self.inputs.workload.num_reqs
        return [self.backend.to_host(table)[:rows] for table in self.table.buffers.block_tables]

    def slots(self) -> list[Any]:
        """Return the slot mappings on the host: one [num_slots] int64 for each group."""
        return [self.backend.to_host(slots) for slots in self.table.buffers.slot_mappings]

    @property
    def bytes_sent(self) -> int:
        """Bytes of all changes so far."""
        return self.table.num_bytes_sent

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of each part of the table."""
        arena, config = self.table.config.arena, self.table.config
        return {
            "host_mirror": 4 * arena.size,
            "device_arena": 4 * arena.size,
            "batch_tables_per_set": 4 * sum(arena.num_rows * width for width in arena.widths),
            "slots_per_set": np.dtype(config.slot_dtype).itemsize * arena.num_groups * config.max_num_batched_tokens,
        }
