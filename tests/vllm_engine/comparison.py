"""Serves each scenario with vLLM's tables and with ours, and compares tokens, block tables and slots."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import faults
import tiny_models
from launch import Engine, Outcome, Side, import_vllm
from scenarios import SCENARIOS, Scenario

OURS = {"BLOCKTABLE_VLLM": "1", "BLOCKTABLE_VLLM_BACKEND": "cupy"}
"""The drop-in as on a GPU, on the emulated backend: a commit waits for its gather there."""
CHECKED = {"BLOCKTABLE_VLLM": "1", "BLOCKTABLE_VLLM_CHECK": "host"}
"""The drop-in as on a CPU, with the checker."""


class Run(NamedTuple):
    """One engine, and what is asked of its outcome.

    Attributes:
        name: of the scenario.
        what: "vLLM", "ours", "checked", "fault", or "found": a mistake of the engine's, which the checker must name.
        side: of the engine.
    """

    name: str
    what: str
    side: Side


def runs_of(name: str, scenario: Scenario, runner: str) -> Iterator[Run]:
    """Yield what is run of a scenario with a runner, vLLM's own tables first."""
    if runner == "V2" and scenario.v2_work is None:
        return
    yield Run(name, "vLLM", Side(runner, {}))
    yield Run(name, "ours", Side(runner, OURS))
    yield Run(name, "checked", Side(runner, CHECKED, is_as_on_gpu=False))
    if scenario.fault is not None:
        yield Run(name, "fault", Side(runner, OURS, scenario.fault))
    if name == "preempt":
        yield Run(name, "found", Side(runner, CHECKED, faults.OF_THE_ENGINE))


def run_all(runs: Sequence[Run], models: Path, jobs: int) -> Iterator[tuple[Run, Outcome]]:
    """Yield each run with its outcome as it ends, `jobs` of them at a time."""
    waiting = list(reversed(runs))
    running: dict[int, tuple[Run, Engine]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            run = waiting.pop()
            engine = Engine(SCENARIOS[run.name], run.side, models)
            running[engine.pid] = run, engine
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid:
            run, engine = running.pop(pid)
            yield run, engine.outcome()
            continue
        for pid, (_, engine) in running.items():
            if engine.is_late():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def verdict(run: Run, own: Outcome, found: Outcome) -> str | None:
    """Return what is wrong with an outcome beside that of vLLM's own tables; None: nothing."""
    is_ours = found.tables.startswith("blocktable_vllm.")
    differs = "tokens" if found.tokens != own.tokens else "tables" if found.trace != own.trace else None
    if found.error:
        return f"an error: {found.error}"
    if run.what == "fault":
        return None if differs == "tokens" else f"it is not seen: {run.side.fault}"
    if run.what == "found":
        return None if any("missing_block" in said for said in found.findings) else "no finding names it"
    if run.what == "vLLM":
        return "the tables are not vLLM's own" if is_ours else None
    if not is_ours:
        return f"the tables are {found.tables}'s, not the drop-in's"
    if not found.is_in_log:
        return "vLLM's log does not say that the tables are ours"
    if differs:
        first = next(
            (i for i, pair in enumerate(zip(own.trace, found.trace, strict=False)) if pair[0] != pair[1]), None
        )
        at = "" if first is None else f"; first at call {first}: {own.trace[first]} there, {found.trace[first]} here"
        return f"{differs} differ; {len(own.trace)} and {len(found.trace)} calls{at}"
    if run.what == "checked" and found.findings:
        return f"findings in a right engine: {found.findings}"
    if run.what == "checked" and own.trace and not found.is_checked:
        return "the checker has seen no row"
    return None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="tox -e vllm-engine --", description=__doc__)
    add = parser.add_argument
    add("--full", action="store_true", help=f"every one of {len(SCENARIOS)} scenarios, not the chosen ones alone")
    add("--only", action="append", metavar="NAME", choices=SCENARIOS, help="this scenario (may be repeated)")
    add("--runner", action="append", choices=("V1", "V2"), help="this one; default: both")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="engines at a time (%(default)d)")
    add("--models", type=Path, metavar="DIR", help="keep the models there; default: made anew, 1 s each")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for and return the exit status: 0 where nothing differs and every fault is seen."""
    options = parse(argv)
    started = time.monotonic()
    names = options.only or [name for name, each in SCENARIOS.items() if options.full or each.is_chosen]
    with tempfile.TemporaryDirectory() as temporary:
        models = options.models or Path(temporary)
        version = import_vllm()
        for model in sorted({SCENARIOS[name].options["model"] for name in names}):
            if not (models / model).is_dir():
                tiny_models.make(model, models / model)
        print(f"vLLM {version}, its models made: {time.monotonic() - started:.0f} s", flush=True)
        runs = [
            run
            for name in names
            for runner in options.runner or ("V2", "V1")
            for run in runs_of(name, SCENARIOS[name], runner)
        ]
        failed = _compare(runs, models, options.jobs)
    print(f"{len(names)} scenarios, {len(runs)} engines, {failed} failed, {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


def _compare(runs: Sequence[Run], models: Path, jobs: int) -> int:
    owns: dict[tuple[str, str], Outcome] = {}
    early: list[tuple[Run, Outcome]] = []
    failed = 0
    for run, found in run_all(runs, models, jobs):
        key = run.name, run.side.runner
        if run.what == "vLLM":
            owns[key] = found
        early.append((run, found))
        for each in [each for each in early if (each[0].name, each[0].side.runner) in owns]:
            early.remove(each)
            failed += _say(each[0], owns[each[0].name, each[0].side.runner], each[1])
    return failed


def _say(run: Run, own: Outcome, found: Outcome) -> bool:
    wrong = verdict(run, own, found)
    what = f"{run.side.runner} {run.name:16} {run.what:8} {len(found.trace):4} calls {found.seconds:5.1f} s"
    print(f"{what}  {wrong or 'right'}", flush=True)
    return wrong is not None


if __name__ == "__main__":
    sys.exit(main())
