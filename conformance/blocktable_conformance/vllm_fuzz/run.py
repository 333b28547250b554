"""One run: histories until the calls are used up, and a failing history cut down to what is needed."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from blocktable import ConfigError
from blocktable_conformance.vllm_fuzz import histories, stable_histories
from blocktable_conformance.vllm_fuzz.differences import differences_of
from blocktable_conformance.vllm_fuzz.histories import FEW, MANY, Call
from blocktable_conformance.vllm_fuzz.pair import Pair
from blocktable_conformance.vllm_fuzz.stable_pair import StablePair

MANY_CALLS = 20000
"""A run of so many calls must meet every difference that it lists: one that is never met is not a known fault."""


class Plan(NamedTuple):
    """What is compared.

    Attributes:
        profile, mode, backend, clean_tails: of the drop-in; mode "v2" for the V2 runner's tables.
        calls: how many.
        calls_per_table: of one history.
        seed: of everything.
        shrink_seconds: to spend on a failing history.
    """

    profile: str
    mode: str
    backend: str
    clean_tails: bool
    calls: int
    calls_per_table: int
    seed: int
    shrink_seconds: float


class Outcome(NamedTuple):
    """What a run found.

    Attributes:
        calls, tables: made.
        seconds: taken.
        met: name of a difference -> how often it was met.
        failure: sentences on a history that differs. None: there is none.
    """

    calls: int
    tables: int
    seconds: float
    met: dict[str, int]
    failure: str | None


def run(plan: Plan, device: Any) -> Outcome:
    """Run a plan; the same plan gives the same histories."""
    chance, met = random.Random(f"{plan.seed} {plan.profile}"), Counter[str]()
    start, calls, tables = time.monotonic(), 0, 0
    failure = None
    kernels = MANY if device.type == "cpu" else FEW
    is_v2 = plan.mode == "v2"
    draw_call: Any = stable_histories.draw_call if is_v2 else histories.draw_call
    while calls < plan.calls and failure is None:
        geometry: Any = (
            stable_histories.draw_geometry(chance, plan.profile)
            if is_v2
            else histories.draw_geometry(chance, plan.profile, kernels)
        )
        history: list[Call] = []
        try:
            pair = _make_pair(plan, geometry, device, met)
            tables += 1
            for _ in range(min(plan.calls_per_table, plan.calls - calls)):
                history.append(draw_call(chance, pair.look()))
                calls += 1
                pair.do(history[-1])
        except ConfigError as error:
            if history or "interleave" not in str(error):
                failure = _report(plan, geometry, history, device, error)
            met["interleave_refused"] += 1
            calls += 1
        except Exception as error:  # also one of the fuzzer's own
            failure = _report(plan, geometry, history, device, error)
    expected = [name for name in differences_of(plan.mode) if is_expected(name, plan)]
    never = [name for name in expected if not met[name]]
    if failure is None and plan.calls >= MANY_CALLS and never:
        failure = f"never met in {calls} calls, so no known difference: {', '.join(never)}"
    return Outcome(calls, tables, time.monotonic() - start, {name: met[name] for name in expected}, failure)


def is_expected(name: str, plan: Plan) -> bool:
    """Whether a difference may be met by a plan."""
    difference = differences_of(plan.mode).get(name)
    if difference is None:
        return False
    mode = "fast, clean tails" if plan.clean_tails else plan.mode
    return plan.profile in difference.profiles and (mode in difference.modes or plan.mode in difference.modes)


def _make_pair(plan: Plan, geometry: Any, device: Any, met: Counter[str]) -> Pair | StablePair:
    if plan.mode == "v2":
        return StablePair(geometry, plan.profile, plan.backend, device, met)
    return Pair(geometry, plan.profile, plan.mode, plan.backend, device, met, clean_tails=plan.clean_tails)


def _report(plan: Plan, geometry: Any, history: list[Call], device: Any, error: Exception) -> str:
    kind = type(error)

    def still_fails(calls: list[Call]) -> bool:
        try:
            pair = _make_pair(plan, geometry, device, Counter())
            for call in calls:
                pair.do(call)
        except Exception as found:
            return type(found) is kind
        return False

    kept = shrink(history, still_fails, plan.shrink_seconds)
    lines = [f"{kind.__name__}: {error}", f"{geometry}", f"{len(kept)} of {len(history)} calls are enough:"]
    return "\n".join(lines + [f"  {call}" for call in kept[-60:]])


def shrink(history: list[Call], still_fails: Callable[[list[Call]], bool], seconds: float) -> list[Call]:
    """Return a history that still fails, with calls left out as long as there is time."""
    end, size = time.monotonic() + seconds, len(history) // 2
    while size and time.monotonic() < end:
        first = 0
        while first < len(history) and time.monotonic() < end:
            shorter = history[:first] + history[first + size :]
            if still_fails(shorter):
                history = shorter
            else:
                first += size
        size //= 2
    return history
