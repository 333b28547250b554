"""`python -m blocktable_conformance NAME...`: prove that backends keep the contract."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

USAGE = """\
usage: blocktable conformance NAME... [--profile small|kernels|deep] [--step-path separate|fused] [--rule RULE]
                              [--examples N] [--soak SECONDS] [--verdict FILE]
                              [any option of pytest: -x, -k EXPRESSION, -n 4, ...]
       blocktable conformance --engine NAME [--examples N] [--peers DIR] [--check PAGE] [--replay PAGE] [--write PAGE]

Prove that backends keep the contract of docs/spec.md. NAME is an installed backend (see `blocktable backends`) or
package.module:Class for one that is not installed. The last lines are the verdict, one for each backend; the exit
status is 0 only where each of them passed. With --engine, try the rules on an engine's own table instead
(docs/matrix.md; --engine NAME --help says which).
"""

PACKAGE = Path(__file__).parent


def pytest_arguments(argv: Sequence[str]) -> list[str] | None:
    """Return pytest's arguments for the suite's; None where no backend is named.

    Names come before the first option of pytest's own; the suite's options may stand anywhere.
    """
    own = ("--backend", "--profile", "--step-path", "--rule", "--examples", "--soak", "--verdict")
    rest, options, names = list(argv), [], []
    while rest and (rest[0].split("=")[0] in own or not rest[0].startswith("-")):
        word = rest.pop(0)
        if not word.startswith("-"):
            names.append(word)
            continue
        name, equals, value = word.partition("=")
        value = value if equals or not rest else rest.pop(0)
        options.append(f"{name}={value}")
    names_backend = names or any(word.split("=")[0] == "--backend" for word in (*options, *rest))
    if not names_backend:
        return None
    return [
        "--pyargs",
        "blocktable_conformance",
        "-p",
        "blocktable_conformance.plugin",
        # Nothing of the folder it is run in may change the run, and the run leaves nothing there.
        "-c",
        str(PACKAGE / "suite.ini"),
        f"--rootdir={PACKAGE}",
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "--import-mode=importlib",
        *(f"--backend={name}" for name in names),
        *options,
        *rest,
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if any(word.split("=")[0] == "--engine" for word in words):
        return _try_engines(words)
    arguments = pytest_arguments(words)
    if arguments is None or "-h" in words or "--help" in words:
        print(USAGE, end="", file=sys.stderr if arguments is None else sys.stdout)
        return 0 if "-h" in words or "--help" in words else 2
    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if missing:
        print(f"The suite needs {' and '.join(missing)}: pip install 'blocktable[conformance]'.", file=sys.stderr)
        return 2
    import pytest  # opened late: `blocktable conformance --help` works without it

    if "" not in sys.path:
        sys.path.insert(0, "")  # so that package.module:Class is found in the folder it is run in
    return int(pytest.main(arguments))


def _try_engines(words: Sequence[str]) -> int:
    if find_spec("hypothesis") is None:
        print("--engine needs hypothesis: pip install 'blocktable[conformance]'.", file=sys.stderr)
        return 2
    from blocktable_conformance.engines.__main__ import main as try_engines

    return try_engines(words)


if __name__ == "__main__":
    sys.exit(main())
