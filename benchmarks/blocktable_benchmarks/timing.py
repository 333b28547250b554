"""How a step is timed. All times are microseconds, all figures medians."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from blocktable_benchmarks.gpu import Gpu

CALLS_PER_GRAPH = 20
"""So that a replay's own cost on the host is hidden by the GPU's work."""

QUEUE_ENTRIES = 800
"""Launches and copies that may be queued: a full queue (1,024) makes the host wait."""

HELD_STEPS = 16
HOLD_US = 30_000
MAX_HOLD_US = 400_000
RETRIES = 3

PACE_NUMBERS = 3000
CALM = 1.15
"""The processor is undisturbed where a fixed piece of work takes at most this times its best."""
PATIENCE_SECONDS = 2.0
WAIT_US = 5_000
"""A step on a held stream that takes longer than this has waited for it."""


class Subject(Protocol):
    """What is timed: something with a step."""

    @property
    def step(self) -> Callable[[int], object]:
        """The step of that turn."""

    def rewind(self) -> None:
        """Take back what steps appended, untimed."""

    def synchronize(self) -> None:
        """Wait for the device."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep the collector out of a timed part."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Pace:
    """How fast the processor runs now, against the best that was seen: a neighbour on the machine may take half of it.

    Args:
        best_us: the best that another process has seen.

    Attributes:
        best_us: microseconds of a fixed piece of work.
        last: of the last figure, how much longer that work took beside it than at best.
    """

    def __init__(self, best_us: float = math.inf) -> None:
        self.best_us = best_us
        self.last = 1.0

    def now(self) -> float:
        """Do the piece of work, and return its time."""
        start, total = time.perf_counter(), 0
        for number in range(PACE_NUMBERS):
            total += number & 7
        elapsed = (time.perf_counter() - start) * 1e6
        self.best_us = min(self.best_us, elapsed)
        return elapsed


def host_time(
    subject: Subject,
    steps: int,
    runs: int,
    pace: Pace,
    patience: float = PATIENCE_SECONDS,
    untimed: Callable[[], float] = lambda: 0.0,
) -> float:
    """Return the time until a step returns: per run a mean over `steps` steps from an idle device, then the median.

    Runs during which the processor was slow are repeated for up to `patience` seconds, the same for every lane.
    `pace.last` then says what pace the runs had that count. `untimed` returns the seconds that all steps so far have
    spent on what does not count.
    """
    samples: list[tuple[float, float]] = []
    deadline = time.perf_counter() + patience
    is_warm = False  # the first run warms up
    while True:
        subject.rewind()
        subject.synchronize()
        step = subject.step
        with no_garbage_collection():
            slowest = pace.now()
            left_out = untimed()
            start = time.perf_counter()
            for turn in range(steps):
                step(turn)
            elapsed = time.perf_counter() - start - (untimed() - left_out)
            slowest = max(slowest, pace.now())
        subject.synchronize()
        if is_warm:
            samples.append((slowest, elapsed / steps * 1e6))
        is_warm = True
        calm = sum(slowness <= CALM * pace.best_us for slowness, _ in samples)
        if calm >= runs or (len(samples) >= runs and time.perf_counter() > deadline):
            break
    counted = sorted(samples)[:runs]
    pace.last = statistics.median(slowness for slowness, _ in counted) / pace.best_us
    return statistics.median(per_step for _, per_step in counted)


def waited_time(subject: Subject, steps: int) -> float:
    """Return the time of a step and a wait for the device."""
    subject.rewind()
    subject.synchronize()
    step, synchronize = subject.step, subject.synchronize
    times = []
    with no_garbage_collection():
        for turn in range(steps):
            start = time.perf_counter()
            step(turn)
            synchronize()
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def gpu_step_time(gpu: Gpu, subject: Subject, steps: int, host_us: float, runs: int = 3) -> float | None:
    """Return the GPU's own time of a step: events around steps that all queued up on a held stream.

    None where the host waits for the device within these steps: then events would time the host.
    """
    hold = 2000 + 3 * steps * host_us
    per_step: list[float] = []
    for _ in range(runs + 1 + RETRIES):  # the first run warms up: pinned memory may have to be allocated
        subject.rewind()
        subject.synchronize()
        gpu.hold(hold)
        start = gpu.event()
        for turn in range(steps):
            subject.step(turn)
        was_held = not start.query()
        end = gpu.event()
        subject.synchronize()
        if not was_held:
            hold = min(2 * hold, MAX_HOLD_US)
            continue
        per_step.append(start.elapsed_time(end) / steps * 1e3)
        if len(per_step) > runs:
            break
    return statistics.median(per_step[1:] or per_step) if per_step else None


def steps_before_wait(gpu: Gpu, subject: Subject) -> int | None:
    """Return how many steps return while the device is busy with something else; None: all that were tried."""
    for is_measured in (False, True):
        subject.rewind()
        subject.synchronize()
        gpu.hold(HOLD_US)
        for turn in range(HELD_STEPS):
            start = time.perf_counter()
            subject.step(turn)
            if is_measured and (time.perf_counter() - start) * 1e6 > WAIT_US:
                subject.synchronize()
                return turn
        subject.synchronize()
    return None


def graph_time(gpu: Gpu, call: Callable[[], object], runs: int = 7) -> float:
    """Return the GPU's time of a call: replays of a graph that holds many of it."""
    graph = gpu.capture(call, CALLS_PER_GRAPH)
    return _events_time(gpu, graph.replay, 10, runs) / CALLS_PER_GRAPH


def eager_time(gpu: Gpu, call: Callable[[], object], runs: int = 5) -> float:
    """Return the GPU's time of a call that is longer than its launch: calls that queue up on a held stream."""
    return _events_time(gpu, call, 10, runs, hold=1000)


def _events_time(gpu: Gpu, call: Callable[[], object], times: int, runs: int, hold: float = 0) -> float:
    found: list[float] = []
    for run in range(runs + 1):
        gpu.synchronize()
        if hold:
            gpu.hold(hold)
        start = gpu.event()
        for _ in range(times):
            call()
        end = gpu.event()
        gpu.synchronize()
        if run:
            found.append(start.elapsed_time(end) / times * 1e3)
    return statistics.median(found)


def call_time(call: Callable[[], object], times: int = 2000, runs: int = 5) -> float:
    """Return the host's time of a call, in a loop; `times` is adapted so that a run takes some 20 ms."""
    with no_garbage_collection():
        start = time.perf_counter()
        call()
        first = time.perf_counter() - start
        times = max(3, min(times, int(0.02 / max(first, 1e-7))))
        found = []
        for _ in range(runs):
            start = time.perf_counter()
            for _ in range(times):
                call()
            found.append((time.perf_counter() - start) / times)
    return statistics.median(found) * 1e6


def queued_call_time(gpu: Gpu, call: Callable[[], object], times: int = 200, runs: int = 9) -> float:
    """Return the host's time of a call that launches something, from an idle device."""
    found = []
    for run in range(runs + 2):
        gpu.synchronize()
        with no_garbage_collection():
            start = time.perf_counter()
            for _ in range(times):
                call()
            elapsed = time.perf_counter() - start
        if run > 1:
            found.append(elapsed / times * 1e6)
    gpu.synchronize()
    return statistics.median(found)


def percentage(part: float, whole: float) -> Any:
    """Return part of whole in per cent, rounded."""
    return round(100 * part / whole, 1) if whole else None
