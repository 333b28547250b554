"""docs/debugging.md: each of its mistakes, planted into the example engine, prints what stands on the page."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: tox -e torch")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/debugging.md").read_text()
PARTS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
SECTIONS = {part.partition("\n")[0]: part for part in PARTS if "```diff" in part}
"""Heading -> the section of a mistake."""
COMMANDS = {
    "python": f'exec "{sys.executable}" "$@"',
    "blocktable": f'exec "{sys.executable}" -m blocktable "$@"',
}


def commands(section: str) -> list[tuple[str, str]]:
    """Return each command of a section with what the page says that it prints."""
    blocks = re.findall(r"```console\n(.*?)```", section, re.DOTALL)
    parts = [part.partition("\n") for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [(command, output) for command, _, output in parts]


@pytest.fixture
def shell(tmp_path: Path) -> Path:
    """A checkout of the engine alone, whose `python` and `blocktable` are those of the tests."""
    built = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "examples/engine", tmp_path / "examples/engine", ignore=built)
    (tmp_path / "bin").mkdir()
    for name, line in COMMANDS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    return tmp_path


def printed(command: str, folder: Path) -> str:
    path = os.pathsep.join((str(folder / "bin"), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("BLOCKTABLE_CHECK", None)
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, check=False, text=True, stdout=-1, stderr=subprocess.STDOUT
    )
    return "".join(line.rstrip() + "\n" for line in done.stdout.splitlines())


def plant(section: str, folder: Path) -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    subprocess.run(["git", "apply", "-"], cwd=folder, input=diff, text=True, check=True)


def as_pattern(output: str) -> str:
    """Return a pattern of quoted output: `...` stands for lines, or for the rest of a line."""
    lines = ["(?:.*\n)*?" if line == "..." else re.escape(line) + "\n" for line in output.splitlines()]
    return "".join(lines).replace(r"\.\.\.", ".*")


def test_the_page_has_four_mistakes() -> None:
    assert len(SECTIONS) == 4
    assert all(len(commands(section)) >= 4 for section in SECTIONS.values())


@pytest.mark.parametrize("name", SECTIONS)
def test_a_mistake_prints_what_the_page_says(name: str, shell: Path) -> None:
    """Wrong tokens, the checker's finding, the same of a recording, the life of a row. Rules: R38-R41."""
    plant(SECTIONS[name], shell)
    for command, output in commands(SECTIONS[name]):
        got = printed(command, shell)
        assert re.fullmatch(as_pattern(output), got), f"{command}\n{got}"
        if "CHECK=host" in command:
            step_and_kind = got.split(": ")[:2]
            assert printed(command.replace("host", "device"), shell).split(": ")[:2] == step_and_kind


def test_without_a_mistake_the_same_requests_are_right(shell: Path) -> None:
    got = printed("BLOCKTABLE_CHECK=host python examples/engine --requests 1 2 5", shell)
    assert got.endswith("\nPASS: 1 of 1 as with a dense cache\n"), got
    assert got.count(": all right\n") == 5


def test_the_calls_of_the_page_print_what_stands_below_them() -> None:
    """Rules: R13, R38-R41."""
    source = "\n".join(re.findall(r"<!-- checker -->\n```python\n(.*?)```", PAGE, re.DOTALL))
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == re.findall(r"^# (.*)$", source, re.MULTILINE)
