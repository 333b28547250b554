"""Build the compiled host path with the address and undefined-behaviour sanitizers, and run its tests under them.

    python tests/sanitize_compiled.py --operations 20000

First planted faults must be reported: a checker that sees nothing proves nothing. Wants GCC on Linux, and `build` and
pytest where it runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"

# A function that trusts its arrays, since only our own code calls it.
PLANTED = """
import numpy as np
from blocktable_compiled.drop_in import append_to_all_groups
one, tables, journal = np.ones(1, np.int64), np.array([[4, 10_000, 1]]), np.zeros(8, np.int64)
mirror = np.zeros(4 * 40_004 + 4, np.uint8)[{start}:][: 4 * 40_004].view(np.int32)
append_to_all_groups(one, 9_000 * one, np.ones({ids}, np.int32), tables, 4, mirror, journal, journal)
print("no fault")
"""
PLANTS = {
    "nothing": ({"ids": 9_000, "start": 0}, "no fault"),
    "missing ids": ({"ids": 8_000, "start": 0}, "heap-buffer-overflow"),
    "misaligned rows": ({"ids": 9_000, "start": 1}, "misaligned address"),
}


def build(folder: Path) -> None:
    """Unpack a wheel that was built with the sanitizers, from an sdist: nothing in the checkout is touched."""
    flags = dict.fromkeys(("CFLAGS", "CXXFLAGS", "LDFLAGS"), FLAGS)
    command: list[str | Path] = [sys.executable, "-m", "build", "--outdir", folder, ROOT]
    subprocess.run(command, env=os.environ | flags, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "wheel")
    if wheel.stem.endswith("-any"):
        raise SystemExit("The compiled host path was not built: there is no C++ compiler.")


def run(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python, which was built without them, under the sanitizers."""
    libraries = ("libasan.so", "libubsan.so", "libstdc++.so")
    found = [
        subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in libraries
    ]
    variables = {
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",  # of what CPython keeps to the end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(folder / "wheel"),
        "PYTHONSAFEPATH": "1",
        "BLOCKTABLE_HOST_PATH": "compiled",
    }
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def main() -> None:
    """Print a line for each run, and end with 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=20_000, help="of the random histories")
    operations = str(parser.parse_args().operations)
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_compiled.py", "tests/test_arguments.py"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        verdicts = []
        for planted, (values, expected) in PLANTS.items():
            done = run(folder, "-c", PLANTED.format(**values))
            verdicts.append((f"planted {planted}", expected in done.stdout, done.stdout))
        for what, arguments in (("tests", tests), ("histories", ["tests/test_host_paths.py", operations])):
            done = run(folder, *arguments)
            verdicts.append((what, done.returncode == 0, done.stdout))
    for what, is_right, output in verdicts:
        said = output.strip().splitlines()[-1] if what in ("tests", "histories") else "reported"
        print(f"{'PASS' if is_right else 'FAIL'} {what}: {said if is_right else output[-5000:]}")  # noqa: T201
    sys.exit(not all(is_right for _, is_right, _ in verdicts))


if __name__ == "__main__":
    main()
