"""What pyproject.toml says of the distribution, and what is installed."""

import importlib
import importlib.metadata
import importlib.util
import shutil
import tomllib
from pathlib import Path

import pytest

import blocktable as bt

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_one_version() -> None:
    assert PROJECT["version"] == bt.__version__ == importlib.metadata.version("blocktable")


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
