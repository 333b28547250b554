"""The replay of a trace: one schedule, every backend, every step checked."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from blocktable_replay.checker import BatchNames, ExpectedStep, expected_block_table, expected_slots
from blocktable_replay.digest import slot_digest
from blocktable_replay.invariants import AUDIT_EVERY, broken_by_blocks, broken_by_slots
from blocktable_replay.lane import Inputs, Lane, Outputs, Target
from blocktable_replay.options import ReplayOptions, describe_options, tokens_per_block
from blocktable_replay.plan import StepPlan
from blocktable_replay.progress import Progress
from blocktable_replay.recording import Recorder
from blocktable_replay.result import Findings, ReplayResult, Series
from blocktable_replay.schedule import Scheduler
from blocktable_replay.traces import Trace

INT32_BYTES = 4


def unfit_requests(trace: Trace, options: ReplayOptions) -> dict[int, str]:
    """Return index -> why not, for every request that these options cannot serve."""
    config = options.config()
    totals = trace.input_lengths + trace.output_lengths
    wrong = {
        index: f"the request has {trace.input_lengths[index]} + {trace.output_lengths[index]} tokens, more than "
        f"max_model_len {config.max_model_len}"
        for index in np.flatnonzero(totals > config.max_model_len).tolist()
    }
    ends = totals + options.lookahead
    for number, group in enumerate(config.groups):
        assert group.num_blocks is not None
        tokens = tokens_per_block(group, config.context_parallel)
        needed = -(-ends // tokens)
        if group.slot_mode != "linear":
            needed = np.full_like(needed, group.blocks_per_row or 0)
        elif group.sliding_window is not None:
            needed = np.minimum(needed, -(-(group.sliding_window + config.max_num_batched_tokens) // tokens) + 2)
        usable = group.num_blocks - (group.null_block_id >= 0)
        for index in np.flatnonzero(needed > usable).tolist():
            reason = f"the request needs {needed[index]} blocks of group {number}, whose cache has {usable}"
            wrong.setdefault(index, reason)
    return wrong


class Replay:
    """Drives lanes through a schedule.

    Args:
        trace: requests that all fit (`unfit_requests`).
        options: how.
        lanes: the backends.
        recorder: records the first lane's table; every step's digest goes there too.
    """

    def __init__(
        self, trace: Trace, options: ReplayOptions, lanes: Sequence[Lane], recorder: Recorder | None = None
    ) -> None:
        self.scheduler: Scheduler = Scheduler(trace, options)
        self._recorder = recorder
        self._config = self.scheduler.config
        self._widths = [self._config.width(group) for group in range(len(self._config.groups))]
        self.result: ReplayResult = ReplayResult(
            source={
                "source": trace.source,
                "format": trace.format,
                "requests": len(trace),
                "bad_lines": len(trace.bad_lines),
            },
            options=describe_options(options),
            config=self._config,
            series=Series(),
            lanes=list(lanes),
            broken=Findings(),
            notes=list(trace.notes),
        )

    def run(self, progress: Progress, max_steps: int | None = None) -> ReplayResult:
        """Replay to the end, to `max_steps`, or until the user interrupts; then say what was found."""
        begin = time.perf_counter()
        counters = self.scheduler.counters
        try:
            while (plan := self._next_plan(max_steps)) is not None:
                self._step(plan)
                progress.update(counters.steps, counters.requests, self.result.num_mismatches)
            self._audit()
        except KeyboardInterrupt:  # perhaps in the middle of a step, whose books do not add up
            self.result.is_whole, self.result.was_interrupted = False, True
        self.result.counters = dict(counters.items())
        self.result.wall_s = time.perf_counter() - begin
        return self.result

    def _next_plan(self, max_steps: int | None) -> StepPlan | None:
        if max_steps is not None and self.scheduler.counters.steps >= max_steps:
            self.result.is_whole = self.scheduler.has_ended
            return None
        return self.scheduler.next_step()

    def _step(self, plan: StepPlan) -> None:
        number = self.scheduler.counters.steps
        expected, names = self._expect(plan), BatchNames(plan.requests, plan.rows)
        inputs = Inputs(plan.idx_mapping, plan.query_start_loc, plan.positions, plan.num_computed_tokens)
        target = Target(inputs, plan.num_reqs_padded, plan.num_tokens_padded)
        for lane in self.result.lanes:
            for name, arguments in plan.operations:
                if name == "invalidate":
                    lane.lose_memory()
                lane.operate(name, arguments)
            outputs = lane.run("step", target)
            lane.compare(number, expected, names, outputs)
            self._check_writers(number, plan, lane, outputs)
            lane.slot_digest = slot_digest(lane.slot_digest, plan, outputs.slot_mappings)
            self._record_digest(lane, outputs)
        if number % AUDIT_EVERY == 0:
            self._audit()
        self._note(plan)

    def _check_writers(self, number: int, plan: StepPlan, lane: Lane, outputs: Outputs) -> None:
        broken = broken_by_slots(plan, self.scheduler.pools, self._config.groups, outputs.slot_mappings)
        lane.findings.add(number, len(broken), broken)

    def _record_digest(self, lane: Lane, outputs: Outputs) -> None:
        if self._recorder is not None:
            digest = lane.digest_outputs(outputs)
            if lane is self.result.lanes[0]:
                self._recorder.add_digest(digest)

    def _expect(self, plan: StepPlan) -> ExpectedStep:
        config, record, handles = self._config, self.scheduler.record, plan.handles
        groups = range(len(config.groups))
        return ExpectedStep(
            block_tables=tuple(
                expected_block_table(
                    config, group, record.blocks[group], record.counts[group], handles, plan.num_computed_tokens
                )
                for group in groups
            ),
            table_shapes=tuple((plan.num_reqs_padded, width) for width in self._widths),
            fillers=tuple(group.filler for group in config.groups),
            slot_mappings={
                group: expected_slots(
                    config,
                    group,
                    record.blocks[group],
                    record.counts[group],
                    handles,
                    plan.query_start_loc,
                    plan.positions,
                    config.max_num_batched_tokens,
                )
                for group in groups
            },
            query_start_loc=plan.query_start_loc,
            positions=plan.positions,
        )

    def _audit(self) -> None:
        broken = broken_by_blocks(self.scheduler)
        self.result.broken.add(self.scheduler.counters.steps, len(broken), broken)

    def _note(self, plan: StepPlan) -> None:
        series, pools = self.result.series, self.scheduler.pools
        series.clock_s.append(self.scheduler.clock_ms / 1000.0)
        series.num_reqs.append(plan.handles.size)
        series.num_tokens.append(plan.positions.size)
        series.blocks_used.append(sum(pool.num_used for pool in pools))
        series.blocks_shared.append(sum(int(np.count_nonzero(pool.references > 1)) for pool in pools))
        series.full_copy_bytes.append(plan.handles.size * sum(self._widths) * INT32_BYTES)
