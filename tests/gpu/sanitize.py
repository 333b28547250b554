"""Run the suite's hand-drawn cases under compute-sanitizer: memory accesses, and reads of what nothing has written.

    python tests/gpu/sanitize.py triton cupy numba

First a planted overrun by one entry must be reported for each backend: a checker that sees nothing proves nothing. The
libraries' memory pools are off, so that every array is an allocation of its own, with 256 bytes of padding behind it.
Where there is no compute-sanitizer nothing runs, and that is said.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

CASES = "cases_bounds or cases_padding or cases_context_parallel or poison or garbage or behind_a_filled_count"
# Failed API calls are left out: libraries probe for entry points that a driver may not have.
TOOLS = {"memcheck": ["--padding", "256", "--report-api-errors", "no"], "initcheck": ["--report-api-errors", "no"]}
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")


def sanitize(tool: str, *program: str) -> tuple[int, str]:
    """Return how many errors the tool reports for a run of this file, and the whole output."""
    command = ["compute-sanitizer", "--tool", tool, *TOOLS[tool], sys.executable, __file__, *program]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    found = SUMMARY.findall(done.stdout)
    if not found:
        raise SystemExit(f"{tool} of {program} gave no summary:\n{done.stdout[-3000:]}")
    return int(found[-1]), done.stdout


def check(backend: str) -> list[str]:
    """Return a line for each run over one backend; a failed one begins with FAIL."""
    errors, output = sanitize("memcheck", "--plant", backend)
    is_reported = errors > 0 and "Invalid __global__ write" in output
    lines = [f"{'PASS' if is_reported else 'FAIL'} {backend}: planted overrun by one entry: {errors} errors reported"]
    for tool in TOOLS:
        errors, output = sanitize(tool, "--cases", backend)
        is_clean = errors == 0 and f"PASS {backend}" in output
        verdict = next((line for line in output.splitlines() if f" {backend}:" in line), "no verdict")
        lines.append(f"{'PASS' if is_clean else 'FAIL'} {backend}: {tool}: {errors} errors; {verdict}")
        if not is_clean:
            lines.append(output[-3000:])
    return lines


def without_pools() -> None:
    """Make CuPy allocate each array by itself; torch is told by the environment, and Numba keeps no pool."""
    try:
        import cupy
    except ImportError:
        return
    cupy.cuda.set_allocator(None)


def plant(backend: str) -> None:
    """Write one entry behind the arena, through the backend's own kernel."""
    import numpy as np

    import blocktable as bt
    from blocktable.backend import Writes

    config = bt.BlockTableConfig(
        groups=[bt.KVCacheGroup(block_size=16)], max_num_reqs=4, max_num_batched_tokens=16, max_model_len=2048
    )
    table = bt.BlockTable(config, backend)
    one = np.array([1], np.int32)
    table.store.write(Writes(config.arena, np.array([config.arena.size]), one, one), stream=None)
    table.backend.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("backends", nargs="*")
    parser.add_argument("--plant", metavar="BACKEND")
    parser.add_argument("--cases", metavar="BACKEND")
    arguments = parser.parse_args()
    without_pools()
    if arguments.plant:
        plant(arguments.plant)
        return 0
    if arguments.cases:
        from blocktable_conformance.__main__ import main as conformance

        return conformance([arguments.cases, "-q", "-k", CASES])
    if shutil.which("compute-sanitizer") is None:
        sys.stdout.write("Skipped: compute-sanitizer is not on the PATH; it comes with the CUDA toolkit.\n")
        return 0
    with ThreadPoolExecutor() as pool:
        lines = [line for found in pool.map(check, arguments.backends) for line in found]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(any(line.startswith("FAIL") for line in lines) or not lines)


if __name__ == "__main__":
    sys.exit(main())
