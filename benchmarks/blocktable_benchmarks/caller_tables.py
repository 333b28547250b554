"""The tables of what callers get (callers.py), each share of V1's time beside the one that is wanted."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from blocktable_benchmarks import small_engine
from blocktable_benchmarks.callers import (
    FACTORS,
    PEER_SPELLINGS,
    SIZES,
    SPELLINGS,
    Spelling,
    case_name,
    wanted_share,
)
from blocktable_benchmarks.cells import Results, Table, is_timed, number

REFERENCE = "vLLM 0.25.1 V1"
"""The engine's table whose times are the measure; where it took no part, the first V1 table that did."""

HOST_LANE = "numpy"
"""Has no share of a GPU table's time."""

STEADY_ON_HOST = 150.0
"""Microseconds, at most, of a steady step of 256 requests in 8 groups on the host."""

HEADLINE = ("single", "lists", "nothing", "churn")
HEADLINE_REQUESTS, HEADLINE_GROUPS = 256, (1, 8)
"""Of a page's first table: spellings, requests, and numbers of groups."""

LEAD = """\
Host time of a step in each way that an engine may call it, in microseconds until the calls have returned. There are
256 requests, each holds 250 blocks, and 16 of them get a block in each step. How it is measured, and smaller batches,
are [below](#every-size-of-batch)."""

SHARES = """\
In brackets is the share of what {reference} takes for the same work in the same run, called as vLLM calls it. The
second column is the share that we want; "missed" says where it is not reached."""

NO_SHARES = "No engine's table took part in that run, so there are no shares."

METHOD = """\
### Every size of batch

The table at the top of the page for fewer requests and for 8 groups, then what single calls cost, then vLLM's tables.

- Figures are the mean of up to 100 steps, and the median of nine such runs. Rows have room for 131,072 tokens. In a
  step 16 of 256 requests get a block, 2 of 32, or 1 of 8. vLLM's tables take lists, and one call for each request
  that grows.
- Each spelling begins from the same rows, and its first steps are compared with the numpy backend's before it is
  timed. What it is given is made before the clock starts, except for slices where the row says so.
- Captured: a graph of `gather` and `compute_slot_mappings` is replayed after each commit, which is not counted. The
  share is that of V1's whole step.
- Where requests begin and end, 3 of 256 do in each step, 2 of 32 or 1 of 8; each begins with 250 blocks. In a serving
  mix up to so many end or are preempted, as many begin or resume, and a varying number grows. A request that begins
  takes a row that was given up earlier, so `idx_mapping` differs in each step. In V1's table, where a request's row
  is its place in the batch, it takes the place of one that ended (`clear_row`, `add_row`). In V2's the end of a
  request calls nothing.
- The small engine on the CPU keeps a list of block ids for each request. In each step it makes lists of positions,
  slots, context lengths and padded block tables, and a tensor of each. Beside it stands our table with the same
  lists: `append_rows` for the requests whose token begins a block, then `step`, and the same four arrays."""

Size = tuple[int, int]
Lane = dict[str, Any]
Figures = Callable[[str], float | None]


def _more(us: Figures, one: str, other: str, parts: int = 1) -> float | None:
    longer, shorter = us(one), us(other)
    return None if longer is None or shorter is None else (longer - shorter) / parts


def _each(us: Figures, appended: int) -> float | None:
    whole = us("append_row")
    return None if whole is None else whole / appended


COSTS: list[tuple[str, Callable[[Figures, int], float | None], dict[int, float]]] = [
    ("lists in place of arrays", lambda us, _: _more(us, "lists", "same"), {1: 2.0}),
    ("one `append_row` of one block, on average", _each, {1: 0.4, 8: 1.2}),
    ("an empty `append_rows` or `clear_rows`", lambda us, _: _more(us, "empty", "nothing", 2), {1: 1.0, 8: 1.0}),
    ("`idx_mapping` at another address", lambda us, _: _more(us, "moved", "same"), {1: 3.0, 8: 3.0}),
]
"""What is told, how it is found (figures of a size, requests that get a block), groups -> microseconds at most."""


def caller_tables(results: Results) -> list[Table]:
    """Return the headline, the largest batch and the host's by the name "callers", and all others as "caller_cases"."""
    run = CallerRun(results.get("caller_run") or results)
    largest, *others = [run.case(size) for size in SIZES]
    first = Table("callers", largest.title, largest.header, largest.rows, run.introduction())
    second = replace(others[0], text=METHOD)
    tables = [run.headline(), first, run.host(), second, *others[1:], run.costs(), run.peers()]
    return [table for table in tables if table.rows]


class CallerRun:
    """One run that measured callers.

    Args:
        run: its results.
    """

    def __init__(self, run: Results) -> None:
        lanes = {name: lane for name, lane in run["lanes"].items() if lane.get("callers")}
        self.run = run
        self.ours = {name: lane for name, lane in lanes.items() if lane["kind"] == "backend"}
        self.engines = {name: lane for name, lane in lanes.items() if lane["kind"] == "peer" and is_timed(lane)}
        names = [name for name in self.engines if name.endswith("V1")]
        self.reference = REFERENCE if REFERENCE in names else next(iter(names), None)

    def headline(self) -> Table:
        """Return a few spellings of the largest batches, over the GPU backends and beside every engine's table."""
        ours = {name: lane for name, lane in self.ours.items() if name != HOST_LANE and is_timed(lane)}
        rows = [
            [
                f"{case_name(*size).partition(', ')[2]}: {spelling.name}",
                *(number(_time(lane, size, spelling.key)) for lane in ours.values()),
                *(number(_time(lane, size, spelling.beside)) for lane in self.engines.values()),
            ]
            for num_groups in (HEADLINE_GROUPS if ours and self.engines else ())
            for size in [(HEADLINE_REQUESTS, num_groups)]
            for spelling in SPELLINGS
            if spelling.key in HEADLINE
        ]
        title = f"Host us of a step of {HEADLINE_REQUESTS} requests, until its calls have returned"
        return Table("headline", title, ["", *ours, *self.engines], rows, self._source())

    def _source(self) -> str:
        """Say which run the figures are of, in Markdown."""
        machine = self.run["machine"]
        return f"From `{self.run['command']}`, {self.run['date']}, {machine.get('gpu', machine.get('processor'))}."

    def introduction(self) -> str:
        """Return what a page says before the largest batch, in Markdown."""
        parts = ["## What a user gets", LEAD]
        parts += [SHARES.format(reference=self.reference), self._kept()] if self.reference else [NO_SHARES]
        parts.append(self._source())
        return "\n\n".join(part for part in parts if part)

    def case(self, size: Size) -> Table:
        """Return one size: a row for each spelling."""
        columns = dict(self.ours)
        if self.reference:
            columns[self.reference] = self.engines[self.reference]
        rows = []
        for spelling in SPELLINGS:
            if any(_found(lane, size, spelling.key) for lane in self.ours.values()):
                cells = [self._cell(name, spelling, size) for name in self.ours]
                beside = [number(self._beside(spelling, size))] if self.reference else []
                rows.append([spelling.name, _share_text(wanted_share(spelling, *size), size), *cells, *beside])
        if rows and any(is_timed(lane) for lane in self.ours.values()):
            rows.append(["pace (1.00: undisturbed)", "-", *(_pace(lane, size) for lane in columns.values())])
        names = [f"{name} ({FACTORS[name]:g} x wanted)" if name in FACTORS else name for name in columns]
        title = f"{case_name(*size)}: host us of a step" + (f" (share of {self.reference}'s)" if self.reference else "")
        return Table("caller_cases", title, ["", "wanted share", *names], rows)

    def host(self) -> Table:
        """Return the numpy backend beside a small engine's lists, and its steady step."""
        lane, rows = self.run["lanes"].get(HOST_LANE, {}), []
        for key, found in lane.get("small_engine", {}).items():
            wanted = small_engine.WANTED[found["num_reqs"]]
            ratio = found["table_us"] / found["lists_us"]
            times = [number(found["lists_us"]), number(found["table_us"]), f"{ratio:.2f}x{_missed(ratio, wanted)}"]
            rows.append([key, f"{wanted:g}x", *(times if is_timed(lane) else ["-", "right", "-"])])
        for key, name in (("same", "arrays"), ("lists", "lists")):
            time = _time(lane, (256, 8), key) if is_timed(lane) else None
            if time is not None:
                cell = number(time) + _missed(time, STEADY_ON_HOST)
                rows.append([f"a step of 256 requests in 8 groups, {name}", f"{STEADY_ON_HOST:g} us", "-", cell, "-"])
        title = "On the CPU, numpy backend: a decode step prepared by a small engine's lists, and by our table"
        return Table("callers", title, ["", "wanted", "lists and tensors, us", "our table, us", "ratio"], rows)

    def costs(self) -> Table:
        """Return what one spelling takes more than another."""
        lanes, rows = {name: lane for name, lane in self.ours.items() if is_timed(lane)}, []
        for size in SIZES if lanes else ():
            for name, find, limits in COSTS:
                limit, cells = limits.get(size[1]), []
                for lane in lanes.values():
                    us = find(partial(_time, lane, size), _found(lane, size, "append_row").get("appended", 1))
                    cells.append(number(us, 2) + _missed(us, limit))
                rows.append([f"{case_name(*size)}: {name}", number(limit), *cells])
        return Table("caller_cases", "What a call or another spelling adds, host us", ["", "wanted us", *lanes], rows)

    def peers(self) -> Table:
        """Return the engines' tables by their own calls."""
        rows = [
            [f"{case_name(*size)}: {spelling.name}", *(number(_time(lane, size, spelling.key)) for lane in lanes)]
            for lanes in [self.engines.values()]
            for size in (SIZES if lanes else ())
            for spelling in PEER_SPELLINGS
        ]
        title = "The engines' tables by their own calls, host us of a step"
        return Table("caller_cases", title, ["", *self.engines], rows)

    def _beside(self, spelling: Spelling, size: Size) -> float | None:
        """Return V1's time of the same work."""
        return _time(self.engines[self.reference], size, spelling.beside) if self.reference else None

    def _share(self, name: str, spelling: Spelling, size: Size) -> tuple[float, float] | None:
        """Return a backend's share of V1's time, and the one that is wanted; None where there is none."""
        time, theirs = _time(self.ours[name], size, spelling.key), self._beside(spelling, size)
        wanted = wanted_share(spelling, *size, backend=name)
        if time is None or wanted is None or not theirs or name == HOST_LANE or not is_timed(self.ours[name]):
            return None
        return time / theirs, wanted

    def _cell(self, name: str, spelling: Spelling, size: Size) -> str:
        lane = self.ours[name]
        found = _found(lane, size, spelling.key)
        if not found:
            return "-"
        if not is_timed(lane):
            return "right" if spelling.work else "-"
        text, share = number(found["host_us"]), self._share(name, spelling, size)
        if "bytes_per_step" in found:
            return f"{text} for {number(found['bytes_per_step'], 0)} bytes"
        return text if share is None else f"{text} ({_share_text(share[0], size)}){_missed(*share)}"

    def _kept(self) -> str:
        """Say how many shares each backend keeps, and which one it misses most."""
        said = []
        for name in self.ours:
            shares = [
                (share / wanted, f'"{spelling.name}" with {case_name(*size)}: {share:.3f} where {wanted:.3f} is wanted')
                for size in SIZES
                for spelling in SPELLINGS
                for share, wanted in filter(None, [self._share(name, spelling, size)])
            ]
            if shares:
                kept = sum(ratio <= 1 for ratio, _ in shares)
                factor = f" ({FACTORS[name]:g} times what is wanted of the others)" if name in FACTORS else ""
                worst = f" Furthest off is {max(shares)[1]}." if kept < len(shares) else ""
                said.append(f"- {name} keeps {kept} of {len(shares)} shares{factor}.{worst}")
        return "\n".join(said)


def _found(lane: Lane, size: Size, key: str) -> dict[str, Any]:
    found: dict[str, Any] = lane.get("callers", {}).get(f"{case_name(*size)}: {key}", {})
    return found


def _time(lane: Lane, size: Size, key: str) -> float | None:
    return _found(lane, size, key).get("host_us")


def _share_text(share: float | None, size: Size) -> str:
    return number(share, 3 if size[1] > 1 else 2)


def _missed(figure: float | None, limit: float | None) -> str:
    return " missed" if figure is not None and limit is not None and figure > limit else ""


def _pace(lane: Lane, size: Size) -> str:
    case = f"{case_name(*size)}: "
    paces = [float(found["pace"]) for key, found in lane["callers"].items() if key.startswith(case)]
    return number(statistics.median(paces), 2) if paces and is_timed(lane) else "-"
