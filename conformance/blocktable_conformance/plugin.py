"""The pytest plug-in of the suite: which backends, which step paths, how much, and the verdict.

Loaded with `-p blocktable_conformance.plugin`, never by an entry point: nobody's other tests should change because
blocktable is installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis.configuration import set_hypothesis_home_dir

from blocktable import BlockTableError, get_backend, list_backends
from blocktable.backend import CAPABILITIES, Backend
from blocktable_conformance import profiles, rules
from blocktable_conformance.subject import Subject

pytest.register_assert_rewrite("blocktable_conformance.asserts", "blocktable_conformance.pair")

STEP_PATHS = {"separate": None, "fused": "fused_step"}
"""Step path -> the capability that it needs."""


@dataclass
class Failure:
    """One failed test: what raised, and the rules, or parts of them, that it names."""

    test: str
    error: str
    rules: str
    message: str


@dataclass
class Verdict:
    """What the run found about one backend.

    Attributes:
        backend: what it was asked for by.
        description: what is running, such as "triton (interpreter)".
        unavailable: why it cannot run here; None where it can.
        passed, failed, skipped: tests.
        launches: calls that start work on the device.
        failures: the failed tests.
    """

    backend: str
    description: str = ""
    unavailable: str | None = None
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    launches: int = 0
    failures: list[Failure] = field(default_factory=list)

    @property
    def is_pass(self) -> bool:
        """Whether something ran and nothing failed."""
        return self.unavailable is None and self.passed > 0 and self.failed == 0

    def line(self) -> str:
        """Return the verdict in one line."""
        word = "PASS" if self.is_pass else "FAIL"
        if self.description not in ("", self.backend):
            short = self.description.startswith(self.backend)
            word += f" {self.description}" if short else f" {self.backend}, {self.description}"
        else:
            word += f" {self.backend}"
        if self.unavailable is not None:
            return f"{word}: unavailable: {self.unavailable}"
        if self.passed + self.failed == 0:
            return f"{word}: nothing ran ({self.skipped} skipped)"
        counts = f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
        return f"{word}: {counts}, {self.launches} launches"


@dataclass
class Run:
    """The backends of one run."""

    subjects: list[Subject] = field(default_factory=list)
    verdicts: dict[str, Verdict] = field(default_factory=dict)


RUN = pytest.StashKey[Run]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's options."""
    group = parser.getgroup("blocktable conformance")
    group.addoption(
        "--backend",
        action="append",
        default=[],
        metavar="NAME",
        help="a backend to test: an installed name, or package.module:Class. Repeatable.",
    )
    group.addoption(
        "--step-path",
        action="append",
        default=[],
        choices=sorted(STEP_PATHS),
        help="test this step path only. Repeatable; default: every path that a backend has.",
    )
    group.addoption(
        "--rule",
        action="append",
        default=[],
        metavar="RULE",
        help="run the tests of this rule only: R10 with all of its parts, or a part such as R10.2. Repeatable.",
    )
    group.addoption(
        "--profile",
        choices=sorted(profiles.PROFILES),
        default="small",
        help="how much to run: small; kernels, without what other backends prove of the host; or deep.",
    )
    group.addoption("--examples", type=int, metavar="N", help="examples of each property and of the state machine.")
    group.addoption(
        "--soak",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="how long the random steps on a GPU run, for each backend and step path (default 2).",
    )
    group.addoption("--verdict", type=Path, metavar="FILE", help="write the verdicts to FILE as JSON.")


def pytest_configure(config: pytest.Config) -> None:
    """Find the backends, before any test module is imported."""
    home = TemporaryDirectory()  # Hypothesis would make a folder in the caller's
    config.add_cleanup(home.cleanup)
    set_hypothesis_home_dir(home.name)
    config.addinivalue_line(
        "markers",
        "host: what the core does beside the kernels, or a history whose steps other tests make too; "
        "the profile `kernels` leaves it out.",
    )
    config.addinivalue_line("markers", "large: a case with a wide table or many tokens; runs in every profile.")
    profile = profiles.PROFILES[config.getoption("--profile")]
    examples = config.getoption("--examples")
    profiles.use(profile if examples is None else profile.with_examples(examples))
    unknown = [rule for rule in config.getoption("--rule") if not re.fullmatch(rules.NUMBER, rule)]
    if unknown:
        raise pytest.UsageError(
            f"--rule takes a rule, such as R10, or a part of one, such as R10.2; got {unknown[0]!r}."
        )
    run = config.stash[RUN] = Run()
    for label in dict.fromkeys(config.getoption("--backend")):
        _add_backend(run, label, config.getoption("--step-path"))


def _add_backend(run: Run, label: str, step_paths: list[str]) -> None:
    verdict = run.verdicts[label] = Verdict(label)
    try:
        backend = get_backend(label)
    except BlockTableError as error:
        verdict.unavailable = str(error)
        return
    verdict.description = _description(backend)
    for path, capability in STEP_PATHS.items():
        if path in (step_paths or STEP_PATHS) and (capability is None or capability in backend.capabilities):
            run.subjects.append(Subject(label, backend, path))


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what is tested: backend, version, device, capabilities, fallbacks."""
    run = config.stash[RUN]
    lines = [f"blocktable conformance, profile {profiles.current().name}"]
    for label, verdict in run.verdicts.items():
        if verdict.unavailable is not None:
            lines.append(f"backend {label}: unavailable: {verdict.unavailable}")
            continue
        subjects = [subject for subject in run.subjects if subject.label == label]
        lines += _describe(label, get_backend(label), [subject.step_path for subject in subjects])
    return lines


def _describe(label: str, backend: Backend, step_paths: list[str]) -> list[str]:
    lines = [
        f"backend {label}: {_description(backend)}, from {_origin(label)}",
        f"  protocol version: {backend.protocol_version}",
        f"  device: {getattr(backend.from_host(np.zeros(1, np.int32)), 'device', 'unknown')}",
        f"  step paths: {', '.join(step_paths)}",
    ]
    for name, sentence in CAPABILITIES.items():
        lines.append(f"  {'yes' if name in backend.capabilities else 'no ':<3} {name}: {sentence}")
    fallbacks = getattr(backend, "fallbacks", None) or ["none"]
    pairs = fallbacks.items() if hasattr(fallbacks, "items") else [("fallback", sentence) for sentence in fallbacks]
    return lines + [f"  {name}: {sentence}" for name, sentence in pairs]


def _description(backend: Backend) -> str:
    return str(getattr(backend, "description", backend.name))


def _origin(label: str) -> str:
    for info in list_backends():
        if info.name == label:
            return f"{info.distribution} {info.version}"
    return "a module that is not installed"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test that asks for `subject` on every backend and step path; `backend_once` on one step path only."""
    subjects = metafunc.config.stash[RUN].subjects
    for name in ("subject", "subject_once"):
        if name in metafunc.fixturenames:
            chosen = subjects if name == "subject" else _first_of_each(subjects)
            ids = [f"{subject.label}-{subject.step_path}" for subject in chosen]
            metafunc.parametrize(name, chosen, ids=ids, indirect=True, scope="session")


def _first_of_each(subjects: list[Subject]) -> list[Subject]:
    return list({subject.label: subject for subject in reversed(subjects)}.values())[::-1]


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Subject:
    """The backend and step path under test."""
    chosen: Subject = request.param
    return chosen


@pytest.fixture(scope="session")
def subject_once(request: pytest.FixtureRequest) -> Subject:
    """The backend under test, on one step path: for tests that make no step."""
    chosen: Subject = request.param
    return chosen


def _subject_of(item: pytest.Item) -> Subject | None:
    params = getattr(getattr(item, "callspec", None), "params", {})
    found = params.get("subject") or params.get("subject_once")
    return found if isinstance(found, Subject) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the rules that were asked for, and note in each which backend it is about, for the verdict."""
    if not config.stash[RUN].subjects:
        items.clear()  # no backend can run: pytest would report every test as skipped for want of one
    wanted = config.getoption("--rule")
    if wanted:
        others = [item for item in items if not rules.are_about(rules.numbers("Rules", _docstring(item)), wanted)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    if not profiles.current().has_host_tests:
        of_host = [item for item in items if item.get_closest_marker("host")]
        config.hook.pytest_deselected(items=of_host)
        items[:] = [item for item in items if item not in of_host]
    for item in items:
        found = _subject_of(item)
        if found is not None:  # xdist's workers send it home in the report
            item.user_properties.append(("backend", found.label))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Count the launches of a test."""
    found = _subject_of(item)
    before = found.call_log.launches if found else 0
    try:
        return (yield)
    finally:
        if found:
            item.user_properties.append(("launches", found.call_log.launches - before))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failure what the test is about, and note it for the verdict."""
    report = yield
    if report.failed and call.excinfo is not None:
        error = call.excinfo.value
        broken, message = str(getattr(error, "rules", "")), str(error).partition("\n")[0]
        failure = Failure(item.nodeid, _kind(error), broken, message)
        report.user_properties.append(("failure", asdict(failure)))
        report.sections.append(("what the test holds", _docstring(item).strip()))
    return report


def _docstring(item: pytest.Item) -> str:
    return getattr(item, "obj", None).__doc__ or ""


def _kind(error: BaseException) -> str:
    """Name an error; those of the suite's own checks are all AssertionError."""
    return "AssertionError" if isinstance(error, AssertionError) else type(error).__name__


class _Counter:
    """Collects reports into verdicts; in the process that prints them."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        verdict = self.run.verdicts.get(str(properties.get("backend")))
        if verdict is None:
            return
        if report.failed:
            verdict.failed += 1
            failure: Any = properties.get("failure")
            if failure:
                verdict.failures.append(Failure(**failure))
        elif report.skipped:
            verdict.skipped += 1
        elif report.when == "call":
            verdict.passed += 1
        if report.when == "call":
            launches: Any = properties.get("launches", 0)
            verdict.launches += launches


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse a run that names no backend."""
    run = session.config.stash[RUN]
    if not run.verdicts and not session.config.option.collectonly:
        raise pytest.UsageError("name at least one backend: --backend numpy, or --backend package.module:Class.")
    session.config.pluginmanager.register(_Counter(run))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
    """Fail where a backend failed, could not run, or had nothing run."""
    config = session.config
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    verdicts = config.stash[RUN].verdicts.values()
    all_pass = all(verdict.is_pass for verdict in verdicts)
    if not all_pass and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    path: Path | None = config.getoption("--verdict")
    if path is not None:
        path.write_text(json.dumps([asdict(verdict) | {"is_pass": verdict.is_pass} for verdict in verdicts], indent=1))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the verdict, one line for each backend."""
    if config.option.collectonly:
        return
    verdicts: Iterable[Verdict] = config.stash[RUN].verdicts.values()
    terminalreporter.section("verdict")
    for verdict in verdicts:
        terminalreporter.write_line(verdict.line(), green=verdict.is_pass, red=not verdict.is_pass)
