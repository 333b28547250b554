"""`blocktable bench`: time our table over every backend, and the engines' own tables beside it, on this machine."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import blocktable as bt
from blocktable.cli import Parser, UsageError, warn
from blocktable_benchmarks.page import require_matplotlib, write_report
from blocktable_benchmarks.peers import find_peers
from blocktable_benchmarks.peers.drop_in import MODES
from blocktable_benchmarks.render import as_text, fill_page
from blocktable_benchmarks.runner import Lane, Results, merge, run_lane
from blocktable_benchmarks.tables import make_tables

SECTIONS = ("callers", "steps", "slots", "bandwidth", "probes", "exports", "launches")
DROP_IN_SECTION = "drop-in"
HOST_PATH_VARIABLE = "BLOCKTABLE_HOST_PATH"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = Parser(
        prog="blocktable bench",
        description="Time a step in every way that an engine may call it, whole steps at their best (append, commit, "
        "gather, slots), the slot kernel alone and its share of the copy bandwidth, for every backend that can run "
        "here and for the engines' own tables. Results are compared with the numpy backend's before anything is timed. "
        "The exit status is 1 where something failed.",
    )
    add = parser.add_argument
    add(
        "--backend",
        action="append",
        metavar="NAME",
        help="only this one (may be repeated); default: every installed one",
    )
    add("--peers", metavar="DIR", help="folder with vllm-<version>/vllm folders; default: an installed vLLM, if any")
    add("--no-peers", action="store_true", help="no engine's table")
    add(
        "--drop-in",
        action="store_true",
        help="also time the vLLM drop-ins, of both runners over each backend; needs torch",
    )
    add("--quick", action="store_true", help="a smoke test over tiny sizes; the one mode that runs emulated backends")
    add(
        "--sweep",
        action="store_true",
        help="also sweep requests, rows, tokens, groups, width and share of rows changed",
    )
    add(
        "--section",
        action="append",
        choices=(*SECTIONS, DROP_IN_SECTION),
        help="only this one (may be repeated); the machine is always measured; drop-in: the drop-ins beside the "
        "engine's own tables, by the same calls",
    )
    add(
        "--both-host-paths",
        action="store_true",
        help="time steps with the numpy host path too where a compiled one runs",
    )
    add(
        "--seconds",
        type=float,
        default=150,
        help="for each lane (%(default)g): what comes later is recorded as not run",
    )
    add("--sweep-seconds", type=float, default=30, help="for each lane's sweep (%(default)g)")
    add("--budget", type=float, default=3600, help="seconds for everything (%(default)g), shared out in order")
    add("--json", type=Path, metavar="FILE", help="write results there, after every single one")
    add("--report", type=Path, metavar="FILE", help="write an HTML report with plots there")
    add(
        *("--from",),
        type=Path,
        nargs="+",
        metavar="FILE",
        dest="sources",
        help="measure nothing: show the results of that JSON file; what it lacks, of the next ones",
    )
    add(
        *("--fill",),
        type=Path,
        nargs="+",
        default=[],
        metavar="PAGE",
        help="put the tables between the markers of these Markdown pages",
    )
    add(
        "--check",
        action="store_true",
        help="instead, time tables that kernels check beside unchecked ones; exit status 1 where one finds anything",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = parse(words)
    if options.report:
        require_matplotlib()
    if options.check:
        return _checks(options)
    results = (
        merge([_load(path) for path in options.sources])
        if options.sources
        else _measure(options, shlex.join(["blocktable", "bench", *words]))
    )
    tables = make_tables(results)
    for table in tables:
        print(as_text(table), end="\n\n")
    for page in options.fill:
        fill_page(page, tables)
    if options.report:
        write_report(results, options.report)
    return _status(results, options.backend or [])


def _load(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--from {path} cannot be read: {error}.") from error
    return found


def _measure(options: argparse.Namespace, command: str) -> dict[str, Any]:
    results = Results(command, options.json)
    end = time.monotonic() + options.budget
    for lane in make_lanes(options):
        lane.plan["seconds"] = min(lane.plan["seconds"], end - time.monotonic())
        lane.plan["pace_us"] = results.data["machine"].get("pace_us", math.inf)
        if lane.plan["seconds"] > 0:
            run_lane(lane, results, warn)
        else:
            results.skip(lane, "everything", "the budget was used up")
    return results.data


def make_lanes(options: argparse.Namespace) -> list[Lane]:
    """Return the processes to run, in order.

    Raises:
        UsageError: a backend is not installed.
    """
    installed = [info.name for info in bt.list_backends()]
    for name in options.backend or []:
        if name not in installed:
            raise UsageError(f"There is no backend {name!r}; installed are {', '.join(installed)}.")
    asked = list(options.section or SECTIONS)
    has_drop_ins = DROP_IN_SECTION in asked
    sections = [section for section in asked if section != DROP_IN_SECTION] + (["sweep"] if options.sweep else [])
    shared = {"is_quick": options.quick, "seconds": options.seconds, "sweep_seconds": options.sweep_seconds}
    lanes = [Lane("machine", {"kind": "machine", "sections": ["machine"], **shared})]
    backends = options.backend or installed
    for name in backends if sections else []:
        # Curves of host kernels beside those of a GPU say nothing, and take the longest.
        own = [section for section in sections if section != "sweep" or name != "numpy" or backends == ["numpy"]]
        lanes.append(Lane(name, {"kind": "backend", "name": name, "sections": own, **shared}))
    if not options.no_peers:
        lanes += [
            Lane(peer.name, {"kind": "peer", "table": peer.table, "sections": own, **shared}, peer.path)
            for peer in find_peers(options.peers)
            for own in [sections + ["drop_ins"] * has_drop_ins]
        ]
    if options.drop_in or has_drop_ins:
        lanes += [
            Lane(f"drop-in, {mode}, {name}", {"kind": "drop-in", "name": name, "mode": mode, "sections": own, **shared})
            for name in backends
            for mode in MODES
            for own in [[each for each in sections if each in ("steps", "launches")] + ["drop_ins"] * has_drop_ins]
        ]
    if options.both_host_paths:
        lanes += [
            Lane(
                f"{name}, numpy host path",
                {"kind": "backend", "name": name, "sections": ["steps"], **shared},
                environment={HOST_PATH_VARIABLE: "numpy"},
            )
            for name in backends
        ]
    return lanes


def _status(results: dict[str, Any], asked_for: list[str]) -> int:
    lanes = results["lanes"]
    took_part = {name.rpartition(", ")[2] for name, lane in lanes.items() if "absent" not in lane}
    missing = [name for name in asked_for if name not in took_part]  # a drop-in over it counts too
    for name in missing:
        warn(f"{name} was asked for, but is absent: {lanes.get(name, {}).get('absent', 'it was not run')}.")
    measured = any("absent" not in lane for lane in lanes.values())
    if not any(lane["kind"] == "peer" for lane in lanes.values()):
        warn("no engine's table took part: vLLM is not installed, and --peers names no folder.")
    return 1 if results["errors"] or missing or not measured else 0


def _checks(options: argparse.Namespace) -> int:
    from blocktable_benchmarks.checks import as_lines, measure_checks
    from blocktable_benchmarks.gpu import find_gpu

    results = []
    for name in options.backend or [info.name for info in bt.list_backends()]:
        try:
            backend = bt.get_backend(name)
        except bt.BlockTableError as error:
            warn(f"{name}: {error}")
            continue
        is_emulated = getattr(backend, "is_emulated", False)
        if "device_checks" not in backend.capabilities or (is_emulated and not options.quick):
            warn(f"{name}: no kernels that check, or emulated ones, whose times mean nothing (--quick runs those).")
            continue
        found = measure_checks(name, None if is_emulated else find_gpu(), is_quick=options.quick)
        print(as_lines(found), flush=True)
        results += found
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return int(any(each["findings"] for each in results))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
