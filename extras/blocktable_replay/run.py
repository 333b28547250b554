"""The replay of a trace: one schedule, every backend, every step checked."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

import numpy as np

from blocktable.typing import IntArray
from blocktable_replay.btrace import OUTPUT_CALLS
from blocktable_replay.checker import expected_step
from blocktable_replay.digest import slot_digest
from blocktable_replay.invariants import AUDIT_EVERY, broken_by_blocks, broken_by_slots
from blocktable_replay.lane import Lane
from blocktable_replay.options import ReplayOptions, describe_options, tokens_per_block
from blocktable_replay.plan import StepPlan
from blocktable_replay.progress import Progress
from blocktable_replay.ranks import Ranks
from blocktable_replay.recording import Recorder
from blocktable_replay.result import ReplayResult
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


class Run(ABC):
    """Drives lanes step by step; `result` says what was found."""

    result: ReplayResult
    has_ended = False

    def run(self, progress: Progress, max_steps: int | None = None) -> ReplayResult:
        """Go on to the end, to `max_steps`, or until the user interrupts."""
        begin = time.perf_counter()
        try:
            for num_steps, num_done in self._steps():
                progress.update(num_steps, num_done, self.result.num_mismatches)
                if max_steps is not None and num_steps >= max_steps:
                    self.result.is_whole = self.has_ended
                    break
        except KeyboardInterrupt:  # perhaps in the middle of a step, whose books do not add up
            self.result.is_whole, self.result.was_interrupted = False, True
        self._conclude()
        self.result.wall_s = time.perf_counter() - begin
        return self.result

    @abstractmethod
    def _steps(self) -> Iterator[tuple[int, int]]:
        """Do one step, or a call between two; yield how many steps, and what the progress counts, are done."""

    @abstractmethod
    def _conclude(self) -> None:
        """Write down what is known at the end."""

    def _note(self, clock_s: float, num_reqs: int, num_tokens: int, holders: Iterable[IntArray]) -> None:
        """Write a step down. holders: of each group, how many requests hold each block."""
        counts = list(holders)
        self.result.series.add(
            clock_s=clock_s,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            blocks_used=sum(int(np.count_nonzero(held)) for held in counts),
            blocks_shared=sum(int(np.count_nonzero(held > 1)) for held in counts),
            full_copy_bytes=num_reqs * sum(self.result.config.arena.widths) * INT32_BYTES,
        )


class Replay(Run):
    """Drives lanes through a schedule.

    Args:
        trace: requests that all fit (`unfit_requests`).
        options: how.
        lanes: the backends.
        recorder: records the first lane's table; every step's digest goes there too.
        checker: as `ReplayResult`.
        ranks: the other context-parallel ranks, which replay the same. None: this process is alone.
    """

    def __init__(
        self,
        trace: Trace,
        options: ReplayOptions,
        lanes: Sequence[Lane],
        recorder: Recorder | None = None,
        checker: Lane | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.scheduler: Scheduler = Scheduler(trace, options)
        self._recorder, self._ranks = recorder, ranks
        facts = {"requests": len(trace), "bad_lines": len(trace.bad_lines)}
        self.result = ReplayResult(
            source={"source": trace.source, "format": trace.format} | facts,
            options=describe_options(options),
            config=self.scheduler.config,
            lanes=list(lanes),
            checker=checker,
            notes=list(trace.notes),
        )

    def _steps(self) -> Iterator[tuple[int, int]]:
        counters = self.scheduler.counters
        while (plan := self.scheduler.next_step()) is not None:
            self.has_ended = self.scheduler.has_ended
            self._step(plan)
            yield counters.steps, counters.requests

    def _conclude(self) -> None:
        if not self.result.was_interrupted:
            self._audit()
        self.result.counters = asdict(self.scheduler.counters)

    def _step(self, plan: StepPlan) -> None:
        number, config, pools = self.scheduler.counters.steps, self.result.config, self.scheduler.pools
        arguments = {name: getattr(plan, name) for name in OUTPUT_CALLS["step"][:-1]} | {"out": 0}
        record = self.scheduler.record
        expected = expected_step(config, record, plan.handles, "step", arguments, plan.requests, plan.rows)
        for lane in self.result.driven:
            for name, values in plan.operations:
                if name == "invalidate":
                    lane.lose_memory()
                lane.operate(name, values)
            outputs = lane.run("step", arguments)
            if lane is self.result.checker:
                continue
            lane.compare(number, expected, outputs)
            lane.findings.add_all(number, broken_by_slots(plan, pools, config.groups, outputs.slot_mappings))
            if self._ranks is not None:
                lane.findings.add_all(number, self._ranks.broken_by_owners(plan, config, outputs.slot_mappings))
            lane.slot_digest = slot_digest(lane.slot_digest, plan, outputs.slot_mappings)
            if self._recorder is not None:
                digest = lane.digest_outputs(outputs)
                if lane is self.result.lanes[0]:
                    self._recorder.add_digest(digest)
        if number % AUDIT_EVERY == 0:
            self._audit()
        references = (pool.references for pool in pools)
        self._note(self.scheduler.clock_ms / 1000.0, plan.handles.size, plan.positions.size, references)

    def _audit(self) -> None:
        self.result.broken.add_all(self.scheduler.counters.steps, broken_by_blocks(self.scheduler))
