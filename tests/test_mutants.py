"""The suite is tested by what it must catch: backends and a core with one fault each.

A mutant must fail by an assertion that names its rule, never by an exception of another kind; the same tests over the
unmutated backend and core must pass. Each set of mutants runs on a few tests of the suite that catch all of it: more
would only take longer. One test holds a set, for two processes would run it twice.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

MUTANTS = Path(__file__).parent / "mutants"
SUITE = [sys.executable, "-m", "blocktable_conformance"]

# The wrong backends are collected and run by the suite's own process; here only their names and rules are needed.
sys.path.insert(0, str(MUTANTS))
try:
    import wrong_backends
    import wrong_core
    import wrong_exports
finally:
    sys.path.remove(str(MUTANTS))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("plain_backend:PlainBackend", wrong_backends), ("plain_exports:PlainExportBackend", wrong_exports)],
    ids=["backends", "exports"],
)
def test_wrong_backends_are_caught(right: str, wrong: Any, tmp_path: Path, expect_caught: Any) -> None:
    path = tmp_path / "verdict.json"
    classes = [right, *(f"{wrong.__name__}:{name}" for name in wrong.CAUGHT_BY)]
    command = [*SUITE, *classes, f"--verdict={path}", "-q", "--tb=no", "-k", " or ".join(wrong.CASES)]
    subprocess.run(command, cwd=MUTANTS, stdout=subprocess.DEVNULL, check=False)
    verdicts = {verdict["backend"].partition(":")[2]: verdict for verdict in json.loads(path.read_text())}
    expect_caught(verdicts, right.partition(":")[2], wrong.CAUGHT_BY)
    for name in getattr(wrong, "FIRST", ()):
        first = verdicts[name]["failures"][0]
        assert "test_basics.py" in first["test"]
        assert "R13" in first["rules"].split(", ")
        assert re.search(r"wrong slot for token \d+ \(row \d+, position \d+\)", first["message"])


def test_wrong_cores_are_caught(tmp_path: Path, expect_caught: Any) -> None:
    environment = os.environ | {"BLOCKTABLE_HOST_PATH": "numpy"}  # which the mutants of rows replace
    command = [sys.executable, str(MUTANTS / "wrong_core.py"), str(tmp_path)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    verdicts = {path.stem: json.loads(path.read_text())[0] for path in tmp_path.glob("*.json")}
    expect_caught(verdicts, "right", {name: rule for name, (rule, _) in wrong_core.MUTANTS.items()})
