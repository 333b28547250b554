"""Our own table, called in every way that an engine may call it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from blocktable_benchmarks.callers import Churned, Spelling
from blocktable_benchmarks.gpu import Gpu
from blocktable_benchmarks.table_lane import TableLane
from blocktable_benchmarks.workloads import Inputs

NUM_ADDRESSES = 1024
"""Of `idx_mapping`, where it moves: more than a table keeps plans for."""

Step = Callable[[int], object]


class CallerLane(TableLane):
    """A `BlockTable` over one backend.

    Args:
        name: of the backend.
        gpu: as `TableLane`.
    """

    def __init__(self, name: str, gpu: Gpu | None) -> None:
        super().__init__(name, gpu)
        self.is_host = name == "numpy"
        self.untimed = 0.0

    def open(self, inputs: Inputs, steps_in_flight: int = 2) -> None:
        """Make the table, fill its rows, and lay out what steps append in every form."""
        super().open(inputs, steps_in_flight)
        turns, is_one = inputs.turns, inputs.workload.num_groups == 1
        self.rows = [turn.rows for turn in turns]
        self.counts = [turn.counts for turn in turns]
        self.ids: list[Any] = [turn.ids[0] if is_one else turn.ids for turn in turns]
        self.row_lists = [rows.tolist() for rows in self.rows]
        self.count_lists = [counts.tolist() for counts in self.counts]
        self.id_lists = [_converted(ids, np.ndarray.tolist) for ids in self.ids]
        self.requests = [[(row, self._own(ids)) for row, ids in turn.requests] for turn in turns]

    def _own(self, ids: Sequence[list[int]]) -> Any:
        """Return a request's ids as our calls take them: with one group that list itself."""
        return ids[0] if len(ids) == 1 else list(ids)

    def reset(self) -> None:
        """Make every row what it was when the table was opened."""
        workload = self.inputs.workload
        num_reqs, filled = workload.num_reqs, workload.filled
        self.table.set_rows(np.arange(num_reqs), self.inputs.fill, np.full(num_reqs, filled))
        self.table.clear_rows(np.arange(num_reqs, workload.num_rows))
        self.table.commit()
        self.synchronize()

    def can_spell(self, spelling: Spelling) -> bool:
        """Whether this backend has such a call."""
        if spelling.needs == "device":
            return not self.is_host
        if spelling.needs == "capture":
            return self.gpu is not None and "graph_capture" in self.backend.capabilities
        return not spelling.needs or self.gpu is not None

    def spelling_context(self, key: str) -> AbstractContextManager[Any]:
        """Return what the calls are made in."""
        if key == "inference" and self.gpu is not None:
            return self.gpu.inference_mode()
        if key == "default_device" and self.gpu is not None:
            return self.gpu.default_device()
        return nullcontext()

    def spell(self, key: str, churn: list[Churned]) -> Step:
        """Return the step in that spelling; what it is given is made here, before the clock starts."""
        self.churn = churn
        found: Step = getattr(self, f"_{key}_step")()
        return found

    # One `append_rows`, then the step.

    def _append_step(self, rows: Sequence[Any], ids: Sequence[Any], counts: Sequence[Any], batch: Any = None) -> Step:
        append, step, num_turns = self.table.append_rows, self.table.step, len(rows)
        idx_mapping, query_start_loc, positions = batch or self.arrays

        def call(turn: int) -> None:
            turn %= num_turns
            append(rows[turn], ids[turn], counts[turn])
            step(idx_mapping, query_start_loc, positions)

        return call

    def _same_step(self) -> Step:
        return self._append_step(self.rows, self.ids, self.counts)

    def _rows_int32_step(self) -> Step:
        rows, counts = ([array.astype(np.int32) for array in arrays] for arrays in (self.rows, self.counts))
        return self._append_step(rows, self.ids, counts)

    def _ids_int64_step(self) -> Step:
        return self._append_step(self.rows, [_converted(ids, _to_int64) for ids in self.ids], self.counts)

    def _strided_step(self) -> Step:
        return self._append_step([np.repeat(rows, 2)[::2] for rows in self.rows], self.ids, self.counts)

    def _lists_step(self) -> Step:
        return self._append_step(self.row_lists, self.id_lists, self.count_lists)

    def _host_step(self) -> Step:
        inputs = self.inputs
        batch = inputs.idx_mapping, inputs.query_start_loc, inputs.positions
        return self._append_step(self.rows, self.ids, self.counts, batch)

    def _inference_step(self) -> Step:
        inputs = self.inputs
        batch = [self.device_array(each) for each in (inputs.idx_mapping, inputs.query_start_loc, inputs.positions)]
        return self._append_step(self.rows, self.ids, self.counts, batch)

    def _default_device_step(self) -> Step:
        return self._same_step()

    # Other tensors each step.

    def _buffers(self) -> list[Any]:
        """Return the three arrays in the larger ones of an engine, which it slices."""
        workload, inputs = self.inputs.workload, self.inputs
        sizes = (workload.num_rows, workload.num_rows + 1, workload.num_slots)
        found = []
        for array, size in zip((inputs.idx_mapping, inputs.query_start_loc, inputs.positions), sizes, strict=True):
            whole = np.zeros(size, array.dtype)
            whole[: array.size] = array
            found.append(self.device_array(whole))
        return found

    def _sliced_step(self) -> Step:
        append, step, num_turns = self.table.append_rows, self.table.step, len(self.rows)
        rows, ids, counts, num_reqs = self.rows, self.ids, self.counts, self.inputs.workload.num_reqs
        idx_mapping, query_start_loc, positions = self._buffers()

        def call(turn: int) -> None:
            turn %= num_turns
            append(rows[turn], ids[turn], counts[turn])
            step(idx_mapping[:num_reqs], query_start_loc[: num_reqs + 1], positions[:num_reqs])

        return call

    def _slicing_step(self) -> Step:
        num_reqs = self.inputs.workload.num_reqs
        idx_mapping, query_start_loc, positions = self._buffers()

        def call(turn: int) -> None:
            idx_mapping[:num_reqs], query_start_loc[: num_reqs + 1], positions[:num_reqs]

        return call

    def _moved_step(self) -> Step:
        append, step, num_turns = self.table.append_rows, self.table.step, len(self.rows)
        rows, ids, counts = self.rows, self.ids, self.counts
        copies = self.device_array(np.tile(self.inputs.idx_mapping, (NUM_ADDRESSES, 1)))
        moving = [copies[place] for place in range(NUM_ADDRESSES)]
        _, query_start_loc, positions = self.arrays

        def call(turn: int) -> None:
            place = turn % num_turns
            append(rows[place], ids[place], counts[place])
            step(moving[turn % NUM_ADDRESSES], query_start_loc, positions)

        return call

    # Other calls.

    def _nothing_step(self) -> Step:
        step = self.table.step
        idx_mapping, query_start_loc, positions = self.arrays

        def call(turn: int) -> None:
            step(idx_mapping, query_start_loc, positions)

        return call

    def _empty_step(self) -> Step:
        append, clear, step = self.table.append_rows, self.table.clear_rows, self.table.step
        idx_mapping, query_start_loc, positions = self.arrays

        def call(turn: int) -> None:
            clear([])
            append([], [], [])
            step(idx_mapping, query_start_loc, positions)

        return call

    def _single_step(self) -> Step:
        append_row, step, requests, num_turns = self.table.append_row, self.table.step, self.requests, len(self.rows)
        idx_mapping, query_start_loc, positions = self.arrays

        def call(turn: int) -> None:
            for row, ids in requests[turn % num_turns]:
                append_row(row, ids)
            step(idx_mapping, query_start_loc, positions)

        return call

    def _append_row_step(self) -> Step:
        append_row, requests, num_turns = self.table.append_row, self.requests, len(self.rows)
        step = self._nothing_step()

        def call(turn: int) -> None:
            for row, ids in requests[turn % num_turns]:
                append_row(row, ids)
            start = time.perf_counter()
            step(turn)
            self.untimed += time.perf_counter() - start

        return call

    # Requests that come and go.

    def _changes(self) -> list[Any]:
        """Return, for each step, the rows that end, (row, ids) of those that begin and that grow, and the batch."""
        return [
            (
                [row for _, row in step.ends],
                [(row, self._own(ids)) for _, row, ids in step.begins],
                [(row, self._own(ids)) for _, row, ids in step.grows],
                self.device_array(step.idx_mapping),
            )
            for step in self.churn
        ]

    def _churn_step(self) -> Step:
        table, is_one = self.table, self.inputs.workload.num_groups == 1
        clear_row, set_row, append, step = table.clear_row, table.set_row, table.append_rows, table.step
        _, query_start_loc, positions = self.arrays
        changes = [
            (
                ends,
                begins,
                [row for row, _ in grows],
                _joined([ids for _, ids in grows], is_one),
                [1] * len(grows),
                batch,
            )
            for ends, begins, grows, batch in self._changes()
        ]

        def call(turn: int) -> None:
            ends, begins, rows, ids, counts, idx_mapping = changes[turn]
            for row in ends:
                clear_row(row)
            for row, prompt in begins:
                set_row(row, prompt)
            append(rows, ids, counts)
            step(idx_mapping, query_start_loc, positions)

        return call

    def _mix_changes(self) -> tuple[Step, list[Any]]:
        """Return what makes the row changes of a step, each by its own call, and the batches."""
        table, changes = self.table, self._changes()
        clear_row, set_row, append_row = table.clear_row, table.set_row, table.append_row

        def change(turn: int) -> None:
            ends, begins, grows, _ = changes[turn]
            for row in ends:
                clear_row(row)
            for row, ids in begins:
                set_row(row, ids)
            for row, ids in grows:
                append_row(row, ids)

        return change, [batch for *_, batch in changes]

    def _mix_step(self) -> Step:
        step = self.table.step
        change, batches = self._mix_changes()
        _, query_start_loc, positions = self.arrays

        def call(turn: int) -> None:
            change(turn)
            step(batches[turn], query_start_loc, positions)

        return call

    # The commit apart from the rest.

    def _gather_and_map(self, idx_mapping: Any) -> None:
        self.table.gather(idx_mapping)
        self.table.compute_slot_mappings(idx_mapping, *self.arrays[1:])

    def _captured_step(self) -> Step:
        assert self.gpu is not None
        append, commit, num_turns = self.table.append_rows, self.table.commit, len(self.rows)
        rows, ids, counts = self.row_lists, self.id_lists, self.count_lists
        graph = self.gpu.capture(lambda: self._gather_and_map(self.arrays[0]), 1)

        def call(turn: int) -> None:
            turn %= num_turns
            append(rows[turn], ids[turn], counts[turn])
            commit()
            start = time.perf_counter()
            graph.replay()
            self.untimed += time.perf_counter() - start

        return call

    def _commit_steady_step(self) -> Step:
        append, num_turns = self.table.append_rows, len(self.rows)
        rows, ids, counts = self.row_lists, self.id_lists, self.count_lists

        def change(turn: int) -> None:
            turn %= num_turns
            append(rows[turn], ids[turn], counts[turn])

        return self._commit_alone(change, [self.arrays[0]])

    def _commit_mix_step(self) -> Step:
        return self._commit_alone(*self._mix_changes())

    def _commit_alone(self, change: Step, batches: list[Any]) -> Step:
        commit, num_batches = self.table.commit, len(batches)

        def call(turn: int) -> None:
            start = time.perf_counter()
            change(turn)
            self.untimed += time.perf_counter() - start
            commit()
            start = time.perf_counter()
            self._gather_and_map(batches[turn % num_batches])
            self.untimed += time.perf_counter() - start

        return call


def _converted(ids: Any, convert: Callable[[Any], Any]) -> Any:
    return [convert(group) for group in ids] if isinstance(ids, list) else convert(ids)


def _to_int64(ids: Any) -> Any:
    return ids.astype(np.int64)


def _joined(ids: list[Any], is_one: bool) -> Any:
    """Return the ids of many requests as `append_rows` takes them: flat, or flat for each group."""
    if is_one:
        return [block_id for blocks in ids for block_id in blocks]
    return [[block_id for blocks in group for block_id in blocks] for group in zip(*ids, strict=True)]
