"""The replay itself: one schedule, every backend, every step checked."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from blocktable.replay.checker import ExpectedStep, expected_block_table, expected_slots
from blocktable.replay.invariants import AUDIT_EVERY, broken_by_blocks, broken_by_slots
from blocktable.replay.lane import Findings, Lane
from blocktable.replay.options import ReplayOptions, tokens_per_block
from blocktable.replay.plan import Counters, StepPlan
from blocktable.replay.progress import Progress
from blocktable.replay.schedule import Scheduler
from blocktable.replay.traces import Trace

INT32_BYTES = 4


@dataclass(slots=True)
class Series:
    """One number a step, for the report.

    Attributes:
        clock_s: simulated seconds.
        num_reqs: requests of the batch.
        num_tokens: tokens of the step.
        blocks_used: blocks that live requests hold, all groups together.
        blocks_shared: of these, held by more than one.
        full_copy_bytes: what sending every row of the batch whole would cost.
    """

    clock_s: array[float] = field(default_factory=lambda: array("d"))
    num_reqs: array[int] = field(default_factory=lambda: array("q"))
    num_tokens: array[int] = field(default_factory=lambda: array("q"))
    blocks_used: array[int] = field(default_factory=lambda: array("q"))
    blocks_shared: array[int] = field(default_factory=lambda: array("q"))
    full_copy_bytes: array[int] = field(default_factory=lambda: array("q"))


@dataclass(slots=True)
class ReplayResult:
    """What a replay found.

    Attributes:
        trace: what was replayed, without the requests that did not fit.
        options: how.
        num_blocks: manager blocks of all groups together.
        counters: what the schedule did.
        series: one number a step.
        lanes: each backend, with its findings and times.
        broken: broken invariants of the schedule itself.
        wall_s: seconds that it took.
        is_whole: False where `max_steps` or the user ended it before the trace did.
    """

    trace: Trace
    options: ReplayOptions
    num_blocks: int
    counters: Counters
    series: Series
    lanes: list[Lane]
    broken: Findings
    wall_s: float = 0.0
    is_whole: bool = True

    @property
    def num_mismatches(self) -> int:
        """Wrong entries of all backends, and broken invariants."""
        return self.broken.count + sum(lane.findings.count for lane in self.lanes)


def unfit_requests(trace: Trace, options: ReplayOptions) -> dict[int, str]:
    """Return index -> why not, for every request that these options cannot serve."""
    config = options.config()
    totals = trace.input_lengths + trace.output_lengths
    wrong = {}
    for index in np.flatnonzero(totals > config.max_model_len).tolist():
        wrong[index] = (
            f"the request has {trace.input_lengths[index]} + {trace.output_lengths[index]} tokens, more than "
            f"max_model_len {config.max_model_len}"
        )
    ends = totals + options.lookahead
    for number, group in enumerate(config.groups):
        assert group.num_blocks is not None
        tokens = tokens_per_block(group, config.context_parallel)
        needed = -(-ends // tokens)
        if group.sliding_window is not None:
            needed = np.minimum(needed, -(-(group.sliding_window + config.max_num_batched_tokens) // tokens) + 2)
        if group.slot_mode != "linear":
            needed = np.full_like(needed, group.blocks_per_row or 0)
        for index in np.flatnonzero(needed > group.num_blocks - 1).tolist():
            wrong.setdefault(
                index,
                f"the request needs {needed[index]} blocks of group {number}, whose cache has {group.num_blocks - 1}",
            )
    return wrong


class Replay:
    """Drives lanes through a schedule.

    Args:
        trace: requests that all fit (`unfit_requests`).
        options: how.
        lanes: the backends.
    """

    def __init__(self, trace: Trace, options: ReplayOptions, lanes: Sequence[Lane]) -> None:
        self._scheduler = Scheduler(trace, options)
        self._config = self._scheduler.config
        self._widths = [self._config.width(group) for group in range(len(self._config.groups))]
        self._block_sizes = [group.block_size for group in self._config.groups]
        self.result = ReplayResult(
            trace=trace,
            options=options,
            num_blocks=sum(group.num_blocks or 0 for group in self._config.groups),
            counters=self._scheduler.counters,
            series=Series(),
            lanes=list(lanes),
            broken=Findings(),
        )

    def run(self, progress: Progress, max_steps: int | None = None) -> ReplayResult:
        """Replay to the end, to `max_steps`, or until the user interrupts; then say what was found."""
        begin = time.perf_counter()
        try:
            while (plan := self._next_plan(max_steps)) is not None:
                self._step(plan)
                progress.update(self._scheduler.counters, self.result.num_mismatches)
        except KeyboardInterrupt:
            self.result.is_whole = False
        self._audit()
        self.result.wall_s = time.perf_counter() - begin
        return self.result

    def _next_plan(self, max_steps: int | None) -> StepPlan | None:
        if max_steps is not None and self._scheduler.counters.steps >= max_steps:
            self.result.is_whole = self._scheduler.has_ended
            return None
        return self._scheduler.next_step()

    def _step(self, plan: StepPlan) -> None:
        number = self._scheduler.counters.steps
        expected = self._expect(plan)
        for lane in self.result.lanes:
            outputs = lane.run(plan)
            lane.check(number, plan, expected, outputs)
            broken = broken_by_slots(plan, self._scheduler.pools, self._block_sizes, outputs.slot_mappings)
            lane.findings.add(number, len(broken), broken)
        if number % AUDIT_EVERY == 0:
            self._audit()
        self._note(plan)

    def _expect(self, plan: StepPlan) -> ExpectedStep:
        config, record, handles = self._config, self._scheduler.record, plan.handles
        groups = range(len(config.groups))
        return ExpectedStep(
            block_tables=tuple(
                expected_block_table(
                    config, group, record.blocks[group], record.counts[group], handles, plan.num_computed_tokens
                )
                for group in groups
            ),
            table_shapes=tuple((plan.num_reqs_padded, width) for width in self._widths),
            slot_mappings=tuple(
                expected_slots(
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
            ),
            query_start_loc=plan.query_start_loc,
            positions=plan.positions,
        )

    def _audit(self) -> None:
        broken = broken_by_blocks(self._scheduler)
        self.result.broken.add(self._scheduler.counters.steps, len(broken), broken)

    def _note(self, plan: StepPlan) -> None:
        series, pools = self.result.series, self._scheduler.pools
        series.clock_s.append(self._scheduler.clock_ms / 1000.0)
        series.num_reqs.append(plan.handles.size)
        series.num_tokens.append(plan.positions.size)
        series.blocks_used.append(sum(pool.num_used for pool in pools))
        series.blocks_shared.append(sum(int(np.count_nonzero(pool.references > 1)) for pool in pools))
        series.full_copy_bytes.append(plan.handles.size * sum(self._widths) * INT32_BYTES)
