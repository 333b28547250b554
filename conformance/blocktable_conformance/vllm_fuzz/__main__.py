"""`python -m blocktable_conformance.vllm_fuzz`: each profile, mode and backend in a process of its own."""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PROFILES = ("0.25.1", "0.32.0", "0.33.0")
MODES = ("fast", "strict", "fast+clean-tails", "v2")
SAME_FILE = ("0.32.0", "0.33.0")
"""Their tables of the V1 runner are one file."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m blocktable_conformance.vllm_fuzz", description=__doc__)
    add = parser.add_argument
    add("--peers", metavar="DIR", type=Path, required=True, help="folder with vllm-<version>/vllm folders")
    add("--profile", action="append", choices=PROFILES, help="only this one (may be repeated); default: every one")
    add("--mode", action="append", choices=MODES, help="only this one (may be repeated); default: every one")
    add("--backend", action="append", metavar="NAME", help="may be repeated; default: numpy")
    add("--calls", type=int, default=2000, help="of each (%(default)d)")
    add("--calls-per-table", type=int, default=120, help="(%(default)d)")
    add("--seed", type=int, default=0, help="(%(default)d)")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time (%(default)d)")
    add("--shrink-seconds", type=float, default=20, help="spent on a failing history (%(default)g)")
    add("--here", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything that is asked for and return the exit status: 0 where nothing unexplained was found."""
    options = parse(sys.argv[1:] if argv is None else argv)
    every_plan = itertools.product(options.backend or ["numpy"], options.profile or PROFILES, options.mode or MODES)
    plans = [plan for plan in every_plan if plan[1] != SAME_FILE[0] or plan[2] == "v2"]
    if options.here:
        (plan,) = plans
        return _run_here(options, *plan)
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        statuses = [pool.submit(_run_there, options, *plan) for plan in plans]
        failed = 0
        for each in statuses:
            status, text = each.result()
            print(text, end="", flush=True)
            failed += status != 0
    print(f"vLLM's tables and ours: {len(plans)} comparisons, {failed} failed")
    return 1 if failed else 0


def _run_there(options: argparse.Namespace, backend: str, profile: str, mode: str) -> tuple[int, str]:
    """Run one comparison in a process of its own: two versions of vLLM cannot be in one."""
    words = ["--here", "--peers", str(options.peers), "--profile", profile, "--mode", mode, "--backend", backend]
    for name in ("calls", "calls_per_table", "seed", "shrink_seconds"):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    done = subprocess.run(
        [sys.executable, "-m", "blocktable_conformance.vllm_fuzz", *words], capture_output=True, text=True, check=False
    )
    noise = done.stderr if done.returncode else ""
    return done.returncode, noise + done.stdout


def _run_here(options: argparse.Namespace, backend: str, profile: str, mode: str) -> int:
    place = options.peers / f"vllm-{profile}"
    if not (place / "vllm").is_dir():
        print(f"{place}/vllm is not there: python -m blocktable_benchmarks.peers.lay_out {options.peers}")
        return 2
    sys.path.insert(0, str(place))
    import blocktable as bt

    found: Any = bt.get_backend(backend)
    is_host = "streams" not in found.capabilities or getattr(found, "is_emulated", False)
    if is_host:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before vLLM's module is imported
    import torch

    from blocktable_conformance.vllm_fuzz.differences import differences_of
    from blocktable_conformance.vllm_fuzz.run import Plan, run

    device = torch.device("cpu" if is_host else "cuda:0")
    mode, _, tails = mode.partition("+")
    plan = Plan(
        profile,
        mode,
        backend,
        bool(tails),
        options.calls,
        options.calls_per_table,
        options.seed,
        options.shrink_seconds,
    )
    try:
        outcome = run(plan, device)
    except Exception:
        traceback.print_exc()
        return 1
    what = (
        f"vLLM {profile}, {mode}{', clean tails' if tails else ''}, {getattr(found, 'description', backend)}, {device}"
    )
    verdict = "FAILED" if outcome.failure else "passed"
    print(
        f"{verdict}: {what}: {outcome.calls} calls on {outcome.tables} tables, seed {options.seed}, "
        f"{outcome.seconds:.1f} s"
    )
    for name, count in outcome.met.items():
        difference = differences_of(mode)[name]
        print(f"  {name}: met {count} times; vLLM: {difference.vllm}; ours: {difference.ours}")
    if outcome.failure:
        print(outcome.failure)
    return 1 if outcome.failure or not outcome.calls else 0


if __name__ == "__main__":
    sys.exit(main())
