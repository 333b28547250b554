"""What is built: its contents, and that it works where the checkout is not (run by `tox -e wheel`)."""

import email
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WHEEL = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
PACKAGES = [ROOT / package for package in WHEEL["packages"]]
FORCED: dict[str, str] = WHEEL["force-include"]

COMPILER = next(filter(shutil.which, ("c++", "g++", "clang++", "cl")), None)
MODULES = [*ROOT.glob("extras/blocktable_compiled/*.pyx")]
BUILT = (".so", ".pyd")

Run = Callable[..., str]


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", out, ROOT], check=True)
    return out


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="session")
def run(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return runner(wheel, tmp_path_factory.mktemp("venv"))


def runner(wheel: Path, home: Path) -> Run:
    """Run a command of a fresh environment that holds the wheel and numpy, in an empty folder."""
    venv.create(home, with_pip=True)
    scripts = home / ("Scripts" if sys.platform == "win32" else "bin")
    elsewhere = home / "elsewhere"
    elsewhere.mkdir()

    def run(program: str, *arguments: str | Path, **variables: str) -> str:
        done = subprocess.run(
            [scripts / program, *arguments],
            cwd=elsewhere,
            env=os.environ | variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    run("python", "-m", "pip", "install", "--quiet", wheel)
    return run


def test_wheel_holds_the_packages_and_nothing_else(in_wheel: set[str]) -> None:
    tops = {name.partition("/")[0] for name in in_wheel}
    version = PROJECT["project"]["version"]
    assert tops == {package.name for package in PACKAGES} | {f"blocktable-{version}.dist-info"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_wheel_holds_every_file_of(package: Path, in_wheel: set[str]) -> None:
    files = {
        f"{package.name}/{path.relative_to(package).as_posix()}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in {".pyx", ".pxd", *BUILT}
    }
    files |= {
        name for source, name in FORCED.items() if name.startswith(f"{package.name}/") and (ROOT / source).exists()
    }
    assert files == {name for name in in_wheel if name.startswith(f"{package.name}/") and not name.endswith(BUILT)}
    assert f"{package.name}/py.typed" in files


def test_golden_vectors_travel_with_the_suite(in_wheel: set[str]) -> None:
    assert [name for name in in_wheel if name.startswith("blocktable_conformance/vectors/") and name.endswith(".json")]


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra") or ()) == set(PROJECT["project"]["optional-dependencies"])
    hard = [need for need in metadata.get_all("Requires-Dist") or () if "extra ==" not in need]
    assert hard == ["numpy>=2.0"]


def test_the_contract_travels_with_the_package(wheel: Path) -> None:
    """Docstrings cite its rules, and `help(blocktable.BlockTable)` says where it lies."""
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("blocktable/spec.md") == (ROOT / "docs/spec.md").read_bytes()


def test_sdist_holds_the_whole_project(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "tox.ini", ".ci/run", "LICENSE", "docs/spec.md", "tests/test_wheel.py"} <= names
    assert {"hatch_build.py", *(path.relative_to(ROOT).as_posix() for path in MODULES)} <= names
    if (ROOT / ".git").exists():  # not where the tests themselves came in an sdist
        done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        there = {name for name in done.stdout.splitlines() if (ROOT / name).exists()}
        assert names - {"PKG-INFO"} == there
    built = [name for name in names if name.startswith("extras/") and name.endswith(".cpp")]
    assert not [*built, *(name for name in names if name.endswith(BUILT))]


def test_the_host_path_is_compiled_where_a_compiler_is(wheel: Path, in_wheel: set[str], run: Run) -> None:
    built = {Path(name).name.partition(".")[0] for name in in_wheel if name.endswith(BUILT)}
    assert built == ({path.stem for path in MODULES} if COMPILER else set())
    assert wheel.stem.endswith("-py3-none-any") != bool(COMPILER)
    path = "compiled" if COMPILER else "numpy"
    assert run("blocktable", "backends").splitlines()[-1].startswith(f"host path: {path}")


def test_without_a_compiler_the_wheel_is_pure_and_says_so(dist: Path, tmp_path: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # 3.11.4 and newer
        archive.extractall(tmp_path, **safely)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, tmp_path / sdist.name.removesuffix(".tar.gz")],
        env=os.environ | {"PATH": os.path.dirname(sys.executable), "CC": "/bin/false", "CXX": "/bin/false"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    (said,) = (line for line in done.stdout.splitlines() if "compiled host path" in line)
    assert said.startswith("The compiled host path, which needs a C++ compiler, is left out and the numpy one runs: ")
    (pure,) = tmp_path.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(pure) as archive:
        assert not [name for name in archive.namelist() if name.endswith(BUILT)]
    run = runner(pure, tmp_path / "venv")
    assert run("blocktable", "backends").splitlines()[-1].startswith("host path: numpy (ModuleNotFoundError: ")
    assert "if there is a C++ compiler" in run("blocktable", "backends", BLOCKTABLE_HOST_PATH="compiled")
    assert run("python", ROOT / "examples/quickstart.py")


def test_imports_come_from_the_wheel(run: Run) -> None:
    assert str(ROOT) not in run("python", "-c", "import blocktable, blocktable_numpy; print(blocktable.__file__)")


def test_replay_needs_numpy_alone(run: Run) -> None:
    run("blocktable", "replay")


def test_the_suite_runs_from_the_wheel(run: Run, wheel: Path) -> None:
    run("python", "-m", "pip", "install", "--quiet", f"{wheel}[conformance]")
    assert " passed" in run("blocktable", "conformance", "numpy")
