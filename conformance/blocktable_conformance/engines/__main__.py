"""`blocktable conformance --engine NAME`: try the contract's rules on an engine's own table."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from blocktable_conformance.engines import matrix
from blocktable_conformance.engines.registry import ENGINES, package_of
from blocktable_conformance.engines.wheels import lay_out


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="blocktable conformance --engine NAME",
        description="Try the contract's rules on an engine's own table: kept, broken with the smallest history that "
        "shows it, or no such call. Everything runs on the CPU; an engine's files come from its released package.",
    )
    add = parser.add_argument
    add("--engine", action="append", metavar="NAME", help=f"may be repeated; {', '.join(ENGINES)}, or all")
    add("--peers", type=Path, default=Path(".peers"), metavar="DIR", help="where files are laid out (%(default)s)")
    add("--examples", type=int, default=60, metavar="N", help="histories of each trial (%(default)d)")
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="engines at a time (%(default)d)")
    add("--write", type=Path, metavar="PAGE", help="write the matrix to PAGE, its cells beside it as JSON")
    add("--check", type=Path, metavar="PAGE", help="fail where a cell is not what PAGE says")
    add("--replay", type=Path, metavar="PAGE", help="the same, and what PAGE shows is replayed instead of looked for")
    add("--here", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Try every engine that is asked for, each in a process of its own; 0 where each was tried, and as expected."""
    options = parse(sys.argv[1:] if argv is None else argv)
    if options.here:
        (name,) = options.engine
        known = None if options.replay is None else matrix.read(options.replay).get(name)
        json.dump(matrix.try_engine(name, options.examples, known), sys.stdout)
        return 0
    asked = options.engine or ["all"]
    names = list(ENGINES) if "all" in asked else asked
    unknown = [name for name in names if name not in ENGINES and ":" not in name]
    if unknown:
        print(
            f"--engine takes {', '.join(ENGINES)}, all, or package.module:Class; got {unknown[0]!r}.", file=sys.stderr
        )
        return 2
    engines = set(ENGINES).difference(["blocktable"]).intersection(names)
    missing = [library for library in ("torch", "triton") if engines and find_spec(library) is None]
    if missing:
        print(f"{min(engines)} needs {' and '.join(missing)}: pip install torch triton.", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        found = dict(zip(names, pool.map(lambda name: _run_there(options, name), names), strict=True))
    failed = [name for name, cells in found.items() if cells is None]
    found = {name: cells for name, cells in found.items() if cells is not None}
    for name, cells in found.items():
        print(matrix.report(name, cells))
    if options.write is not None:
        matrix.write(options.write, found)
    page = options.check or options.replay
    differences = [] if page is None else matrix.compare(matrix.read(page), found)
    for line in (*(f"{name}: not tried, see above" for name in failed), *differences):
        print(line)
    print(f"engines: {len(found)} tried, {len(failed)} failed, {len(differences)} cells other than expected")
    return 1 if failed or differences else 0


def _run_there(options: argparse.Namespace, name: str) -> dict[str, Any] | None:
    """Try one engine in a process of its own: two versions of a package cannot be in one."""
    words = ["--here", "--engine", name, "--examples", str(options.examples)]
    words += ["--replay", str(options.replay)] if options.replay is not None else []
    path = [entry for entry in sys.path if entry]
    package = package_of(name)
    if package is not None:
        lay_out(package, options.peers / package.folder)
        path.insert(0, str((options.peers / package.folder).absolute()))
    done = subprocess.run(
        [sys.executable, "-m", "blocktable_conformance.engines", *words],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)},
    )
    if done.returncode:
        print(f"{name}: exit status {done.returncode}\n{done.stderr}", file=sys.stderr)
        return None
    cells: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return cells


if __name__ == "__main__":
    sys.exit(main())
