"""What a step costs the way engines call it: every spelling of its arguments, beside the engines' own tables.

Each spelling is checked against the numpy backend, then timed on the host. The share of V1's time that is wanted
stands with it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from blocktable_benchmarks.agreement import CHECKED_STEPS, compare_slots, compare_tables
from blocktable_benchmarks.timing import QUEUE_ENTRIES, Pace, host_time
from blocktable_benchmarks.workloads import Inputs, IntArray, Workload, make_inputs, shrink

SPARE_ROWS = 8
"""Rows of the table beyond the largest batch: a request that begins takes a row that was given up earlier."""

RUNS = 9
PATIENCE, PATIENT_SECONDS = 0.5, 8.0
"""Seconds to wait for a calm processor: for one figure, and for how long a lane does so."""

Ids = tuple[list[int], ...]


@dataclass(frozen=True)
class Spelling:
    """One way to call a step.

    Attributes:
        key: of its figures.
        name: what a reader is told.
        work: "steady" (some requests get a block), "nothing", "churn", "mix"; "" where there is no result to check.
        beside: V1's work whose time stands beside it (`PEER_SPELLINGS`). "": none.
        share: wanted of that time, 256 or 32 requests in one group. None: no such target.
        needs: "device", "torch" (a device whose arrays are torch's), "capture" (such a one that captures), or "".
    """

    key: str
    name: str
    work: str
    beside: str
    share: float | None = None
    needs: str = ""


SPELLINGS = [
    Spelling("same", "the same three tensors; rows int64, ids int32, contiguous", "steady", "steady", 0.25),
    Spelling("rows_int32", "rows and counts int32", "steady", "steady", 0.35),
    Spelling("ids_int64", "ids int64", "steady", "steady", 0.35),
    Spelling("strided", "rows as a strided view", "steady", "steady", 0.35),
    Spelling("sliced", "tensors sliced anew each step", "steady", "steady", 0.5),
    Spelling("slicing", "the slicing alone", "", ""),
    Spelling("lists", "Python lists in `append_rows`", "steady", "steady", 0.3),
    Spelling("single", "`append_row` for each request", "steady", "steady", 0.5),
    Spelling("nothing", "no change", "nothing", "nothing"),
    Spelling("empty", "`clear_rows([])`, `append_rows([], [], [])`, then the step", "nothing", "nothing", 0.25),
    Spelling("host", "numpy arrays for a GPU backend", "steady", "steady", 1.0, "device"),
    Spelling("captured", "captured: `append_rows` (lists) and `commit` alone", "steady", "steady", 0.4, "capture"),
    Spelling("churn", "requests that begin and end each step (lists)", "churn", "churn", 0.75),
    Spelling("mix", "a serving mix, each request by its own call", "mix", "mix"),
    Spelling("moved", "`idx_mapping` at another address each step", "steady", "steady"),
    Spelling("inference", "inference mode", "steady", "steady", 0.25, "torch"),
    Spelling("default_device", "`torch.set_default_device`", "steady", "steady", 0.25, "torch"),
    Spelling("append_row", "the `append_row` calls alone", "steady", ""),
    Spelling("commit_steady", "`commit` alone, after one `append_rows`", "steady", ""),
    Spelling("commit_mix", "`commit` alone, after the serving mix", "mix", ""),
]
"""In the order they are measured and shown."""

PEER_SPELLINGS = [
    Spelling("steady", "each request that grows by its own call, commit, slots", "steady", ""),
    Spelling("nothing", "no change", "nothing", ""),
    Spelling("captured", "captured: rows and commit alone", "steady", ""),
    Spelling("churn", "requests that begin and end each step", "churn", ""),
    Spelling("mix", "a serving mix", "mix", ""),
]
"""What an engine's table does by its own calls."""

ADDED_FOR_FEW = 0.15
"""To a wanted share, at 8 requests."""
DIVISOR_FOR_GROUPS = 3
"""Of a wanted share, in 8 groups."""
FACTORS = {"numba": 1.5}
"""Of a wanted share, for a backend."""
WITHOUT_SHARES = frozenset({"torch"})
"""Backends of which no share is wanted: plain torch operations are there to run everywhere."""


def wanted_share(spelling: Spelling, num_reqs: int, num_groups: int, backend: str = "") -> float | None:
    """Return the share of V1's time that is wanted."""
    if spelling.share is None or backend in WITHOUT_SHARES:
        return None
    share = spelling.share + (ADDED_FOR_FEW if num_reqs <= 8 else 0)
    return share / (DIVISOR_FOR_GROUPS if num_groups > 1 else 1) * FACTORS.get(backend, 1)


SIZES = [(256, 1), (32, 1), (8, 1), (256, 8), (32, 8), (8, 8)]
"""Requests in the batch, and groups."""


def case_name(num_reqs: int, num_groups: int) -> str:
    """Return what a size is called."""
    return f"{num_reqs} requests, {num_groups} group{'s' if num_groups > 1 else ''}"


def caller_workloads(*, is_quick: bool) -> list[Workload]:
    """Return a workload for each size: rows of 131,072 tokens, one request in 16 gets a block (one at least)."""
    workloads = [
        Workload(
            name=case_name(num_reqs, num_groups),
            num_reqs=num_reqs,
            num_groups=num_groups,
            max_model_len=131072,
            max_num_reqs=256 + SPARE_ROWS,
        )
        for num_reqs, num_groups in SIZES
    ]
    if not is_quick:
        return workloads
    # A quarter of eight: views of one entry are always contiguous.
    return [replace(shrink(workload), share=1 / 4) for workload in workloads if workload.num_reqs == 256]


class Churned(NamedTuple):
    """What one step of a serving mix changes. A place is that in the batch; ids are a list for each group.

    Attributes:
        ends: (place, row) of requests that end, or are preempted.
        begins: (place, row, ids) of requests that begin, or resume: in the places of those, in rows that were free.
        grows: (place, row, ids) of requests that get a block.
        idx_mapping: [num_reqs] int32. After all that.
    """

    ends: list[tuple[int, int]]
    begins: list[tuple[int, int, Ids]]
    grows: list[tuple[int, int, Ids]]
    idx_mapping: IntArray


def make_churn(inputs: Inputs, steps: int, *, is_mix: bool) -> list[Churned]:
    """Return the changes of each step; the same ones every time.

    Churn is three requests that end, three that begin and as many as usual that grow (fewer in a small batch). A mix is
    up to three of the former, and half to one and a half times the latter.
    """
    workload, random = inputs.workload, np.random.default_rng(1)
    most, usual = min(3, workload.num_appended), workload.num_appended
    rows, free = inputs.idx_mapping.copy(), deque(range(workload.num_reqs, workload.num_reqs + SPARE_ROWS))
    prompts = [_blocks(inputs, request) for request in range(SPARE_ROWS)]
    found = []
    for _ in range(steps):
        changed = int(random.integers(0, most + 1)) if is_mix else most
        grown = int(random.integers(max(1, usual // 2), usual * 3 // 2 + 1)) if is_mix else usual
        places = random.permutation(workload.num_reqs)[: changed + grown].tolist()
        ends = [(place, int(rows[place])) for place in places[:changed]]
        begins = []
        for place, row in ends:
            rows[place] = free.popleft()
            free.append(row)
            begins.append((place, int(rows[place]), prompts[place % len(prompts)]))
        grows = [
            (place, int(rows[place]), tuple([int(random.integers(1, 1 << 20))] for _ in range(workload.num_groups)))
            for place in places[changed:]
        ]
        found.append(Churned(ends, begins, grows, rows.copy()))
    return found


def _blocks(inputs: Inputs, request: int) -> Ids:
    filled = inputs.workload.filled
    return tuple(ids[request * filled : (request + 1) * filled].tolist() for ids in inputs.fill)


class Lane(Protocol):
    """A table that can be called in these ways: ours, or an engine's by its own calls."""

    launches_per_step: int
    untimed: float
    """Seconds that steps have spent on what does not count."""

    def open(self, inputs: Inputs) -> None:
        """Make the table and fill its rows."""

    def close(self) -> None:
        """Let the memory go."""

    def reset(self) -> None:
        """Make every row what it was when the table was opened."""

    def can_spell(self, spelling: Spelling) -> bool:
        """Whether this lane has such a call."""

    def spelling_context(self, key: str) -> AbstractContextManager[Any]:
        """Return what the calls are made in."""

    def spell(self, key: str, churn: list[Churned]) -> Callable[[int], object]:
        """Return the step in that spelling; what it is given is made here, before the clock starts."""

    def synchronize(self) -> None:
        """Wait for the device."""

    def tables(self) -> list[Any]:
        """Return the batch tables on the host."""

    def slots(self) -> list[Any]:
        """Return the slot mappings on the host."""


class Spelled:
    """One spelling, as the clock sees it.

    Args:
        lane: an open one.
        step: of that spelling.
        resets: whether each run begins with the first rows; otherwise rows go on growing.
    """

    def __init__(self, lane: Lane, step: Callable[[int], object], *, resets: bool) -> None:
        self.lane = lane
        self.step = step
        self.resets = resets

    def rewind(self) -> None:
        """Take back what a run changed, where the next one needs that."""
        if self.resets:
            self.lane.reset()

    def synchronize(self) -> None:
        """Wait for the device."""
        self.lane.synchronize()


@dataclass(frozen=True)
class Clock:
    """How long runs are.

    Attributes:
        steps: of a run, at most.
        runs: that count.
        pace: of the processor.
        patient_until: monotonic seconds up to which figures wait for a calm processor.
    """

    steps: int
    runs: int
    pace: Pace
    patient_until: float

    def time(self, subject: Spelled) -> dict[str, Any]:
        """Return the host's time of a step."""
        lane = subject.lane
        steps = min(self.steps, QUEUE_ENTRIES // lane.launches_per_step)
        patience = PATIENCE if time.monotonic() < self.patient_until else 0.0
        host_us = host_time(subject, steps, self.runs, self.pace, patience, lambda: lane.untimed)
        return {"host_us": host_us, "pace": round(self.pace.last, 2)}


class CallerCase:
    """One size of one lane; the table is made when the first spelling is measured.

    Args:
        workload: of the size.
        lane: to open.
        reference: the same over the numpy backend, to open.
        clock: for it.
        is_peer: what lies after a row's last block is the peer's own affair.
    """

    def __init__(self, workload: Workload, lane: Lane, reference: Lane, clock: Clock, *, is_peer: bool) -> None:
        self.workload = workload
        self.lane = lane
        self.reference = reference
        self.clock = clock
        self.is_peer = is_peer
        self.churns: dict[str, list[Churned]] = {}
        self.results: dict[str, tuple[list[Any], list[Any]]] = {}

    def measure(self, spelling: Spelling) -> dict[str, Any]:
        """Check one spelling, and time it."""
        if not self.churns:
            self._open()
        lane, work = self.lane, spelling.work
        with lane.spelling_context(spelling.key):
            step = lane.spell(spelling.key, self.churns.get(work, []))
            if work:
                self._check(step, work)
            lane.reset()
            found = self.clock.time(Spelled(lane, step, resets=work in self.churns))
            if spelling.key.startswith("commit"):
                found["bytes_per_step"] = self._bytes_per_step(step)
        return found | {"appended": self.workload.num_appended}

    def close(self) -> None:
        """Let the memory go."""
        if self.churns:
            self.lane.close()
            self.reference.close()

    def _open(self) -> None:
        inputs = make_inputs(self.workload)
        for lane in (self.lane, self.reference):
            lane.open(inputs)
        steps = max(self.clock.steps, CHECKED_STEPS)
        self.churns = {name: make_churn(inputs, steps, is_mix=name == "mix") for name in ("churn", "mix")}

    def _check(self, step: Callable[[int], object], work: str) -> None:
        """Compare a few steps with the numpy backend's; whole rows the first time, later what they hold.

        Raises:
            WrongResult: they differ.
        """
        columns = self.workload.filled + CHECKED_STEPS if self.results else None
        self.lane.reset()
        _few(step)
        self.lane.synchronize()
        if work not in self.results:
            key = "same" if work == "steady" else work
            self.reference.reset()
            _few(self.reference.spell(key, self.churns.get(work, [])))
            tables = [table[:, :columns].copy() for table in self.reference.tables()]
            self.results[work] = tables, [slots.copy() for slots in self.reference.slots()]
        tables, slots = self.results[work]
        compare_slots(self.lane.slots(), slots)
        found = [table[:, :columns] for table in self.lane.tables()]
        compare_tables(found, [table[:, :columns] for table in tables], is_peer=self.is_peer)

    def _bytes_per_step(self, step: Callable[[int], object]) -> float:
        lane: Any = self.lane
        lane.reset()
        before = lane.bytes_sent
        for turn in range(self.clock.steps):
            step(turn)
        lane.synchronize()
        return float(lane.bytes_sent - before) / self.clock.steps


def _few(step: Callable[[int], object]) -> None:
    for turn in range(CHECKED_STEPS):
        step(turn)


def measure_callers(
    make_lane: Callable[[], Lane],
    make_reference: Callable[[], Lane],
    attempt: Callable[[str, str, Callable[[], Any]], object],
    clock: Clock,
    *,
    is_peer: bool,
    is_quick: bool,
) -> None:
    """Measure every spelling in every size.

    Args:
        make_lane: makes what is timed.
        make_reference: makes the numpy backend's.
        attempt: takes a section, a key and a function that measures it.
        clock: for all of them.
        is_peer: an engine's table, by its own calls.
        is_quick: tiny sizes.
    """
    for workload in caller_workloads(is_quick=is_quick):
        case = CallerCase(workload, make_lane(), make_reference(), clock, is_peer=is_peer)
        for spelling in PEER_SPELLINGS if is_peer else SPELLINGS:
            if case.lane.can_spell(spelling):
                attempt("callers", f"{workload.name}: {spelling.key}", partial(case.measure, spelling))
        case.close()
