"""The suite is tested by what it must catch: backends and a core with one fault each.

A mutant must fail by an assertion that names its rule, never by an exception of another kind; the same run over the
unmutated backend and core must pass. Kernel mutants are run on the padding, bounds, geometry, call, poison and memory
cases, core mutants on the hand-drawn cases; neither on the sweeps, properties and histories, which would only take
longer.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from blocktable_conformance.rules import is_within

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


def check_caught(verdict: dict[str, Any], rule: str) -> None:
    """Check that a mutant was caught by an assertion naming `rule` or a part of it, and by nothing but assertions."""
    failures = verdict["failures"]
    assert failures, f"{verdict['backend']} was not caught at all"
    assert not [failure for failure in failures if failure["error"] != "AssertionError"]
    named = {name for failure in failures for name in failure["rules"].split(", ")}
    is_caught = any(is_within(name, rule) for name in named)
    assert is_caught, f"{verdict['backend']} was caught as {sorted(named)}, not as {rule}"


def verdicts_of(plain: str, wrong: str, names: Iterable[str], selection: str, path: Path) -> dict[str, dict[str, Any]]:
    """Run the suite over the unmutated class and its mutants in one process: name -> verdict.

    Args:
        plain, wrong: `module:Class` of the unmutated one, and the module of the mutants.
        names: of the mutants.
        selection: of the suite's tests, as `-k` takes it.
        path: where the verdicts are written.
    """
    classes = [plain, *(f"{wrong}:{name}" for name in names)]
    command = [*SUITE, *classes, f"--verdict={path}", "-q", "--tb=no", "-k", selection]
    subprocess.run(command, cwd=MUTANTS, stdout=subprocess.DEVNULL)
    return {verdict["backend"].partition(":")[2]: verdict for verdict in json.loads(path.read_text())}


@pytest.fixture(scope="module")
def kernel_verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("kernels") / "verdict.json"
    selection = "(cases or poison or memory) and not partition"
    return verdicts_of("plain_backend:PlainBackend", "wrong_backends", wrong_backends.CAUGHT_BY, selection, path)


def test_the_plain_backend_passes(kernel_verdicts: dict[str, dict[str, Any]]) -> None:
    assert kernel_verdicts["PlainBackend"]["is_pass"], kernel_verdicts["PlainBackend"]["failures"]


@pytest.mark.parametrize(("name", "rule"), wrong_backends.CAUGHT_BY.items())
def test_a_wrong_backend_is_caught(kernel_verdicts: dict[str, dict[str, Any]], name: str, rule: str) -> None:
    check_caught(kernel_verdicts[name], rule)


@pytest.fixture(scope="module")
def export_verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("exports") / "verdict.json"
    # Without the cases of large tables: a failure holds on to its own, and all wrong exports run in one process.
    chosen = "(test_exports.py or test_export_parts.py)"
    selection = f"{chosen} and not equal and not on_the_host_are and not any_history and not long_rows and not bits"
    return verdicts_of("plain_exports:PlainExportBackend", "wrong_exports", wrong_exports.CAUGHT_BY, selection, path)


def test_plain_exports_pass(export_verdicts: dict[str, dict[str, Any]]) -> None:
    assert export_verdicts["PlainExportBackend"]["is_pass"], export_verdicts["PlainExportBackend"]["failures"]


@pytest.mark.parametrize(("name", "rule"), wrong_exports.CAUGHT_BY.items())
def test_a_wrong_export_is_caught(export_verdicts: dict[str, dict[str, Any]], name: str, rule: str) -> None:
    check_caught(export_verdicts[name], rule)


@pytest.fixture(scope="module")
def core_verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("core")
    environment = os.environ | {"BLOCKTABLE_HOST_PATH": "numpy"}  # which the mutants of rows replace
    command = [sys.executable, str(MUTANTS / "wrong_core.py"), str(folder)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return {path.stem: json.loads(path.read_text())[0] for path in folder.glob("*.json")}


def test_the_core_passes(core_verdicts: dict[str, dict[str, Any]]) -> None:
    assert core_verdicts["right"]["is_pass"], core_verdicts["right"]["failures"]


@pytest.mark.parametrize("name", wrong_core.MUTANTS)
def test_a_wrong_core_is_caught(core_verdicts: dict[str, dict[str, Any]], name: str) -> None:
    check_caught(core_verdicts[name], wrong_core.MUTANTS[name][0])
