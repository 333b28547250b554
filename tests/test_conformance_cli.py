"""`python -m blocktable_conformance`: verdicts, exit status, and that the folder it is run in does not matter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from blocktable.backend import PROTOCOL_VERSION

pytestmark = pytest.mark.slow

ONE_TEST = ["-k", "no_requests"]
MUTANTS = Path(__file__).parent / "mutants"


def run(*args: str | Path, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "blocktable_conformance", *map(str, args)]
    # With the compiled host path the numpy backend has a second step path.
    environment = os.environ | {"BLOCKTABLE_HOST_PATH": "numpy"}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)


def verdict_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(("PASS ", "FAIL "))]


def test_a_backend_by_name(tmp_path: Path) -> None:
    """It passes, the header says what was tested, and the folder is left as it was."""
    done = run("numpy", *ONE_TEST, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert verdict_lines(done.stdout) == ["PASS numpy (host): 1 passed, 0 failed, 0 skipped, 12 launches"]
    for part in (
        "backend numpy: numpy (host), from blocktable ",
        f"protocol version: {PROTOCOL_VERSION}",
        "step paths: separate",
        "device: cpu",
    ):
        assert part in done.stdout
    assert "no  graph_capture: " in done.stdout
    assert "yes int32_slots: " in done.stdout
    assert not list(tmp_path.iterdir())


def test_the_settings_of_the_folder_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --maxfail=nonsense -p no_such_plugin\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError('read')\n")
    (tmp_path / "test_own.py").write_text("def test_own(): assert False\n")
    assert run("numpy", *ONE_TEST, cwd=tmp_path).returncode == 0


def test_a_backend_that_is_not_installed_by_module_and_class() -> None:
    done = run("plain_backend:PlainBackend", "numpy", *ONE_TEST, cwd=MUTANTS)
    assert done.returncode == 0, done.stdout
    words = [line.split(":")[:-1] for line in verdict_lines(done.stdout)]
    assert words == [["PASS plain_backend", "PlainBackend, plain"], ["PASS numpy (host)"]]


def test_a_wrong_backend_fails_with_its_rule_and_what_the_test_holds() -> None:
    done = run("wrong_backends:StaleSlots", "numpy", "-k", "shorter_step", cwd=MUTANTS)
    assert done.returncode == 1
    words = [line.split(":")[:-1] for line in verdict_lines(done.stdout)]
    assert words == [["FAIL wrong_backends", "StaleSlots, StaleSlots"], ["PASS numpy (host)"]]
    for part in ("R15: wrong slot for token 2: expected slot PAD, got 30", "request None", "Cases: P2. Rules: R15."):
        assert part in done.stdout


def test_a_failure_names_the_part_of_its_rule(tmp_path: Path) -> None:
    """A batch row of a dummy is wrong: that is part 2 of R10, in the failure and in the verdict."""
    path = tmp_path / "verdict.json"
    done = run("wrong_backends:DummyIsTheLastRow", "--verdict", path, "-k", "minus_one_is_a_dummy", cwd=MUTANTS)
    assert done.returncode == 1
    assert "R10.2, R5: the batch table's view of group 0 is wrong at row 0, column 0" in done.stdout
    (failure,) = json.loads(path.read_text())[0]["failures"]
    assert failure["rules"] == "R10.2, R5"


def test_a_rule_selects_the_tests_of_its_parts(tmp_path: Path) -> None:
    """And a part those that cite it, or the whole rule."""
    counts = []
    for rule in ("R10", "R10.2", "R10.5"):
        done = run("numpy", "--rule", rule, "--co", "-q", cwd=tmp_path)
        counts.append(done.stdout.count("::test_"))
        assert ("::test_a_dummy_between_requests[" in done.stdout) == (rule != "R10.5")
    assert counts[0] > counts[1] > counts[2] > 0
    refused = run("numpy", "--rule", "10", *ONE_TEST, cwd=tmp_path)
    assert refused.returncode == 4
    assert "--rule takes a rule, such as R10, or a part of one, such as R10.2; got '10'." in refused.stderr


def test_a_run_in_which_nothing_ran_fails(tmp_path: Path) -> None:
    done = run("numpy", "-k", "no_such_test", cwd=tmp_path)
    assert done.returncode == 1
    assert verdict_lines(done.stdout) == ["FAIL numpy (host): nothing ran (0 skipped)"]


def test_a_run_in_which_everything_was_skipped_fails(tmp_path: Path) -> None:
    done = run("numpy", "-k", "test_int32_slots_are_refused_where_not_declared", cwd=tmp_path)
    assert done.returncode == 1
    assert verdict_lines(done.stdout) == ["FAIL numpy (host): nothing ran (1 skipped)"]


def test_backends_that_cannot_run_fail_in_a_sentence_and_stop_no_other(tmp_path: Path) -> None:
    names = ["no_such_backend", "no_such_module:Backend", "json:JSONDecoder"]
    done = run(*names, "numpy", *ONE_TEST, cwd=tmp_path)
    assert done.returncode == 1
    *failed, passed = verdict_lines(done.stdout)
    for name, line in zip(names, failed, strict=True):
        assert line.startswith(f"FAIL {name}: unavailable: ")
        assert len(line.split()) > 6
    assert passed.startswith("PASS numpy (host): ")


def test_only_a_backend_that_cannot_run(tmp_path: Path) -> None:
    done = run("no_such_backend", cwd=tmp_path)
    assert done.returncode == 1
    assert len(verdict_lines(done.stdout)) == 1


def test_no_backend_is_a_usage_error(tmp_path: Path) -> None:
    done = run(cwd=tmp_path)
    assert done.returncode == 2
    assert "blocktable conformance NAME" in done.stderr


def test_a_step_path_that_the_backend_lacks_ran_nothing(tmp_path: Path) -> None:
    done = run("numpy", "--step-path", "fused", *ONE_TEST, cwd=tmp_path)
    assert done.returncode == 1
    assert "nothing ran" in done.stdout


def test_verdicts_as_json(tmp_path: Path) -> None:
    path = tmp_path / "verdict.json"
    run("--profile", "small", "--examples=3", "numpy", "--verdict", path, *ONE_TEST, cwd=tmp_path)
    (verdict,) = json.loads(path.read_text())
    assert verdict["backend"] == "numpy"
    assert verdict["is_pass"]
    assert (verdict["passed"], verdict["failed"], verdict["failures"]) == (1, 0, [])


def test_options_of_pytest_pass_through(tmp_path: Path) -> None:
    done = run("numpy", "--collect-only", "-q", "-k", "golden", cwd=tmp_path)
    assert done.returncode == 0
    assert "test_vectors.py::test_golden_vector[numpy-separate-P1]" in done.stdout
    assert not verdict_lines(done.stdout)


def test_the_profile_says_how_much_runs(tmp_path: Path) -> None:
    chosen = "exports_in_any_history or golden_vector"
    few = run("numpy", "--profile", "kernels", "--examples", "2", "-k", chosen, cwd=tmp_path)
    more = run("numpy", "--profile", "deep", "--examples=20", "-k", "exports_in_any_history", cwd=tmp_path)
    launches = [int(verdict_lines(done.stdout)[0].split()[-2]) for done in (few, more)]
    assert few.returncode == more.returncode == 0
    assert launches[0] < launches[1]
    assert "1 passed, 0 failed, 0 skipped" in few.stdout  # golden vectors are a matter of the host's
