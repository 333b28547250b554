"""Who may import whom: the contracts cover every package, hold, and break when they should."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS = {contract["id"]: contract for contract in PROJECT["tool"]["importlinter"]["contracts"]}
BACKENDS = {path.parent.name for path in ROOT.glob("backends/*/__init__.py")}
WHEEL = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(root / shelf) for shelf in WHEEL["dev-mode-dirs"])
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", root / "pyproject.toml"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "400", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_package_of_the_wheel_is_under_contract() -> None:
    packages = {Path(package).name for package in WHEEL["packages"]}
    assert packages == set(PROJECT["tool"]["importlinter"]["root_packages"])
    assert packages >= BACKENDS


@pytest.mark.parametrize(
    ("contract", "key"),
    [
        ("core-names-no-backend", "forbidden_modules"),
        ("replay-needs-the-core-alone", "forbidden_modules"),
        ("drop-in-needs-core-and-torch", "forbidden_modules"),
        ("suite-names-no-backend", "forbidden_modules"),
        ("backends-use-the-public-contract", "source_modules"),
        ("backends-are-strangers", "modules"),
    ],
)
def test_every_backend_is_named_in(contract: str, key: str) -> None:
    named: list[Any] = CONTRACTS[contract][key]
    assert set(named) >= BACKENDS


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkout")
    shutil.copy(ROOT / "pyproject.toml", root)
    for package in WHEEL["packages"]:
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def test_the_contracts_hold(checkout: Path) -> None:
    done = lint(checkout)
    assert done.returncode == 0, done.stdout
    assert f"{len(CONTRACTS)} kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("contract", "file", "line"),
    [
        ("core-names-no-backend", "blocktable/table.py", "import blocktable_numpy"),
        ("core-names-no-backend", "blocktable/streams.py", "import torch"),
        ("core-names-no-backend", "blocktable/cli.py", "import blocktable_replay.command"),
        ("core-names-no-backend", "blocktable/registry.py", "import blocktable_vllm"),
        ("layers", "blocktable/table.py", "import blocktable_conformance"),
        ("layers", "extras/blocktable_replay/lane.py", "import blocktable_vllm"),
        ("layers", "extras/blocktable_vllm/tables.py", "import blocktable_replay"),
        ("replay-needs-the-core-alone", "extras/blocktable_replay/lane.py", "import torch"),
        ("drop-in-needs-core-and-torch", "extras/blocktable_vllm/tables.py", "import blocktable_triton"),
        ("suite-names-no-backend", "conformance/blocktable_conformance/oracle.py", "import blocktable_replay.checker"),
        ("suite-names-no-backend", "conformance/blocktable_conformance/oracle.py", "import blocktable_numpy"),
        ("backends-use-the-public-contract", "backends/blocktable_numpy/kernels.py", "import blocktable.checks"),
        ("backends-use-the-public-contract", "backends/blocktable_numpy/kernels.py", "from blocktable import config"),
        ("backends-use-the-public-contract", "backends/blocktable_numpy/kernels.py", "import blocktable_conformance"),
    ],
)
def test_a_wrong_import_breaks_its_contract(checkout: Path, contract: str, file: str, line: str) -> None:
    path = checkout / file
    source = path.read_text()
    path.write_text(f"{source}\n{line}\n")
    try:
        done = lint(checkout)
    finally:
        path.write_text(source)
    assert done.returncode == 1, done.stdout
    assert re.search(rf"^{re.escape(CONTRACTS[contract]['name'])} BROKEN", done.stdout, re.MULTILINE), done.stdout
