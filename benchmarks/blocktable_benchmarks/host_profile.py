"""Where the host time of a steady step goes: methods of blocktable's classes and calls of the driver, wrapped."""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from blocktable_benchmarks.cells import Table
from blocktable_benchmarks.gpu import Gpu, find_gpu
from blocktable_benchmarks.table_lane import TableLane
from blocktable_benchmarks.timing import Pace, host_time
from blocktable_benchmarks.workloads import Inputs, Workload, make_inputs

STEPS = 60
RUNS = 20
DRIVER_CALLS = (
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuEventRecord",
)


class Clock:
    """Times of wrapped calls.

    Attributes:
        is_on: whether calls are timed.
        calls: name -> number of calls.
        total: name -> seconds, callees included.
        own: name -> seconds, wrapped callees taken out.
        direct: name -> wrapped calls that it made itself.
        nested: name -> wrapped calls made in it, however deep.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.calls: dict[str, int] = {}
        self.total: dict[str, float] = {}
        self.own: dict[str, float] = {}
        self.direct: dict[str, int] = {}
        self.nested: dict[str, int] = {}
        self._stack: list[list[float]] = []

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, timed."""
        now, stack = time.perf_counter, self._stack
        for counter in (self.calls, self.total, self.own, self.direct, self.nested):
            counter.setdefault(name, 0)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return function(*args, **kwargs)
            frame = [0.0, 0, 0]  # seconds in wrapped callees, how many, how many further down
            stack.append(frame)
            start = now()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = now() - start
                stack.pop()
                self.calls[name] += 1
                self.total[name] += elapsed
                self.own[name] += elapsed - frame[0]
                self.direct[name] += int(frame[1])
                self.nested[name] += int(frame[1] + frame[2])
                if stack:
                    parent = stack[-1]
                    parent[0] += elapsed
                    parent[1] += 1
                    parent[2] += frame[1] + frame[2]

        return timed


@contextmanager
def wrapped(clock: Clock) -> Iterator[None]:
    """Wrap the methods of every loaded class of blocktable and its backends, and the driver's calls."""
    changed: list[tuple[Any, str, Any]] = []
    for module_name, module in list(sys.modules.items()):
        package = module_name.partition(".")[0]
        if not package.startswith("blocktable") or package == "blocktable_benchmarks":
            continue
        for kind in [
            each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module_name
        ]:
            for name, function in list(vars(kind).items()):
                if inspect.isfunction(function) and not name.startswith("__"):
                    changed.append((kind, name, function))
                    setattr(kind, name, clock.wrap(f"{kind.__name__}.{name}", function))
    driver = sys.modules.get("cuda.bindings.driver")
    for name in DRIVER_CALLS if driver is not None else ():
        function = getattr(driver, name, None)
        if function is not None:
            changed.append((driver, name, function))
            setattr(driver, name, clock.wrap(name, function))
    try:
        yield
    finally:
        for owner, name, function in changed:
            setattr(owner, name, function)


def overhead() -> tuple[float, float]:
    """Return what wrapping adds to a call's own time, and what to its caller's, in seconds."""
    tries = [_overhead() for _ in range(7)]
    return min(inner for inner, _ in tries), min(outer for _, outer in tries)


def _overhead(times: int = 20_000) -> tuple[float, float]:
    clock = Clock()

    def nothing() -> None:
        return None

    def empty_loop() -> None:
        for _ in range(times):
            nothing()

    timed = clock.wrap("nothing", nothing)
    loop = clock.wrap("loop", lambda: [timed() for _ in range(times)])
    start = time.perf_counter()
    empty_loop()
    plain = (time.perf_counter() - start) / times
    clock.is_on = True
    loop()
    inner = max(0.0, clock.own["nothing"] / times - plain)
    return inner, max(0.0, clock.own["loop"] / times)


def profile_host(name: str, workload: Workload) -> Table:
    """Return the costs of a steady step, and of everything inside it.

    Args:
        name: of the backend.
        workload: the step.
    """
    inputs = make_inputs(workload)
    gpu = find_gpu() if name != "numpy" else None
    steps = min(STEPS, workload.max_steps)
    plain = _opened(name, gpu, inputs)
    unwrapped = host_time(plain, steps, RUNS, Pace())
    plain.close()
    clock = Clock()
    with wrapped(clock):
        lane = _opened(name, gpu, inputs)
        for _ in range(RUNS):
            lane.rewind()
            lane.synchronize()
            lane.step(0)
            clock.is_on = True
            for turn in range(1, steps):
                lane.step(turn)
            clock.is_on = False
            lane.synchronize()
        lane.close()
    title = f"{name}: {workload.name}: {unwrapped:.2f} us of host time a step; inside it, us a step, wrappers taken out"
    return Table("profile", title, ["", "calls", "with callees", "own"], _rows(clock, RUNS * (steps - 1)))


def _opened(name: str, gpu: Gpu | None, inputs: Inputs) -> TableLane:
    lane = TableLane(name, gpu)
    lane.open(inputs, steps_in_flight=STEPS + 4)
    lane.step(0)
    lane.synchronize()
    return lane


def _rows(clock: Clock, steps: int) -> list[list[str]]:
    inner, outer = overhead()
    found = []
    for name, calls in clock.calls.items():
        if calls:
            total = clock.total[name] - calls * inner - clock.nested[name] * (inner + outer)
            own = clock.own[name] - calls * inner - clock.direct[name] * outer
            found.append((max(0.0, total) / steps * 1e6, max(0.0, own) / steps * 1e6, calls / steps, name))
    found.sort(reverse=True)
    return [[name, f"{calls:.2f}", f"{total:.2f}", f"{own:.2f}"] for total, own, calls, name in found]
