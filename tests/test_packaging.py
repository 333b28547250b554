"""What pyproject.toml says of the distribution, and what is installed."""

import configparser
import importlib
import importlib.metadata
import importlib.util
import re
import runpy
import shutil
import tomllib
from pathlib import Path

import pytest

import blocktable as bt

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_one_version() -> None:
    assert PROJECT["version"] == bt.__version__ == importlib.metadata.version("blocktable")


def test_the_changelog_begins_with_that_version() -> None:
    first, *_ = re.findall(r"^## \[(.*?)\]", CHANGELOG, re.MULTILINE)
    assert first == PROJECT["version"]


def test_the_citation_has_that_version() -> None:
    assert f"version: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize(
    ("tag", "heading", "said"),
    [
        ("v1.2.0", "[1.2.0] - 2027-01-31", None),
        ("1.2.0", "[1.2.0] - 2027-01-31", "The tag is 1.2.0, but pyproject.toml has version 1.2.0; tag v1.2.0"),
        ("v1.3.0", "[1.2.0] - 2027-01-31", "The tag is v1.3.0, but pyproject.toml has version 1.2.0"),
        (
            "v1.2.0",
            "[1.2.0] - not released yet",
            "the date of the release, but has `## [1.2.0] - not released yet`",
        ),
        ("v1.2.0", "[1.1.0] - 2026-01-31", "must begin with `## [1.2.0] - `"),
    ],
)
def test_a_release_that_does_not_match_is_refused(tag: str, heading: str, said: str | None) -> None:
    problem = runpy.run_path(str(ROOT / ".github/check_release.py"))["problem"]
    found = problem(tag, "1.2.0", f"# Changelog\n\n## {heading}\n\n### Added\n")
    assert found == said if said is None else said in found


def test_wheels_are_built_for_every_python_that_is_supported() -> None:
    minors = re.findall(r"Python :: 3\.(\d+)", "\n".join(PROJECT["classifiers"]))
    built = PYPROJECT["tool"]["cibuildwheel"]["build"]
    assert [name for name in built if not name.endswith("t-*")] == [f"cp3{minor}-*" for minor in minors]


def test_all_asks_for_every_extra_but_the_other_cupy() -> None:
    (everything,) = PROJECT["optional-dependencies"]["all"]
    named = set(everything.removeprefix("blocktable[").removesuffix("]").split(","))
    assert named == set(PROJECT["optional-dependencies"]) - {"all", "cupy-cuda12"}


def test_the_host_path_is_compiled_where_a_compiler_is() -> None:
    """Otherwise the build failed, with a warning that nobody reads, and its tests are skipped."""
    if not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
        pytest.skip("no C++ compiler here")
    for source in ROOT.glob("extras/blocktable_compiled/*.pyx"):
        importlib.import_module(f"blocktable_compiled.{source.stem}")


@pytest.mark.parametrize("group", PROJECT["entry-points"])
def test_entry_points_lead_to_something(group: str) -> None:
    entries = [entry for entry in importlib.metadata.entry_points(group=group) if entry.dist is not None]
    ours = {entry.name: entry for entry in entries if entry.dist is not None and entry.dist.name == "blocktable"}
    assert set(ours) == set(PROJECT["entry-points"][group])
    for entry in ours.values():  # found, not loaded: a GPU backend's library may be missing here
        assert importlib.util.find_spec(entry.module) is not None


@pytest.mark.parametrize(
    "package", ["blocktable", *(path.parent.name for path in ROOT.glob("*/blocktable_*/__init__.py"))]
)
def test_every_package_is_typed(package: str) -> None:
    (folder,) = (path for path in (ROOT, *ROOT.iterdir()) if (path / package / "__init__.py").is_file())
    assert (folder / package / "py.typed").is_file()


# What runs where.


def tox_section(environment: str) -> dict[str, str]:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    names = {name: expanded(name.removeprefix("testenv:")) for name in tox.sections() if name.startswith("testenv:")}
    (section,) = (name for name, found in names.items() if environment in found)
    return dict(tox[section])


def expanded(text: str) -> list[str]:
    """Return the names that `a-{b, c}, d` stands for."""
    parts = re.findall(r"([\w-]*)(?:\{([^}]*)\})?", text)
    return [name + end.strip() for name, ends in parts if name for end in (ends or "").split(",")]


@pytest.mark.parametrize(
    ("mark", "environment"), [("torch", "torch"), ("numba", "conformance-numba"), ("faults", "faults")]
)
def test_what_wants_a_library_runs_in_one_environment(mark: str, environment: str) -> None:
    """By its mark: a test that only skips where the library is missing might run nowhere."""
    assert re.search(rf"pytest .*-m {mark} .*tests", tox_section(environment)["commands"])
    assert f"not {mark}" in tox_section("unit")["commands"]
    for path in ROOT.glob("tests/test_*.py"):
        source = path.read_text()
        if re.search(rf"""importorskip\("{mark}|^ *(import|from) {mark}\b""", source, re.MULTILINE):
            assert f"pytest.mark.{mark}" in source or f"def {mark}()" in source, path.name
        for named in re.findall(r"tox -e ([\w-]+)", source):
            tox_section(named)
