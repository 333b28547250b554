"""The golden vectors in C++: their reader and its example, compiled, and that wrong mappers are caught."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from blocktable_conformance.golden import FOLDER

CPP = FOLDER / "cpp"
COMPILER = next(filter(None, map(shutil.which, ("g++", "clang++"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")]

FAULTS = {
    "a negative position": ("p < 0 || filled == 0", "filled == 0"),
    "an empty row": ("p < 0 || filled == 0", "p < 0"),
    "a lap of a ring": ("last >= 0 && p <= last", "false && p <= last"),
    "the owner": ("% share.world_size != share.rank", "% share.world_size != 0"),
    "interleaving": ("p / turn * share.interleave_size + p % share.interleave_size", "p / share.world_size"),
    "the filled count": ("if (local / size >= filled)", "if (local / size >= static_cast<int64_t>(row.capacity()))"),
    "null blocks": ("if (is_missing &&", "if (false &&"),
    "groups without slots": ('group.slot_mode == "none" || ', ""),
    "cross-attention": ('(group.slot_mode == "cross" && !is_named)', "false"),
    "named groups": ('(group.slot_mode == "cross" && !is_named)', 'group.slot_mode == "cross"'),
    "dummies": ("if (row < 0 || row >= static_cast<int64_t>(table.size())) continue;", "if (row < 0) return slots;"),
    "the pad slot": ("slots(num_slots, group.pad_slot_id)", "slots(num_slots, -1)"),
}
"""What a wrong mapper does not care for -> its text, and another one."""


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds the reader, compiled ahead: it takes three seconds."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copy(CPP / "golden_vectors.hpp", folder)
    subprocess.run([str(COMPILER), "-std=c++17", "-x", "c++-header", str(folder / "golden_vectors.hpp")], check=True)
    return folder


def compiled(folder: Path, reader: Path, source: str, *options: str) -> Path:
    program = folder / "slot_mapper"
    (folder / "slot_mapper.cpp").write_text(source)
    command = [str(COMPILER), "-std=c++17", *options, "-I", str(reader), "-o", str(program)]
    subprocess.run([*command, str(folder / "slot_mapper.cpp")], check=True)
    return program


def run(program: Path, *vectors: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *map(str, vectors)], capture_output=True, text=True, check=False)


def num_mappings() -> int:
    """Return how many slot mappings the vectors hold, as Python counts them."""
    contents = [json.loads(path.read_text()) for path in FOLDER.glob("*.json")]
    operations = [
        each for content in contents for vector in content["vectors"] for each in vector.get("operations", [])
    ]
    return sum(len(each["expect"].get("slot_mappings", [])) for each in operations)


def test_the_example_gives_every_slot_of_the_vectors(reader: Path, tmp_path: Path) -> None:
    """Rules: R4, R7, R12-R16."""
    program = compiled(tmp_path, reader, (CPP / "slot_mapper.cpp").read_text(), "-Wall", "-Wextra", "-Werror")
    done = run(program, *sorted(FOLDER.glob("*.json")))
    assert (done.returncode, done.stdout) == (0, f"{num_mappings()} slot mappings compared, 0 wrong\n")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_mapper_is_caught(fault: str, reader: Path, tmp_path: Path) -> None:
    """Rules: R12-R16."""
    right, wrong = FAULTS[fault]
    source = (CPP / "slot_mapper.cpp").read_text()
    assert source.count(right) == 1
    source = source.replace(right, wrong)
    done = run(compiled(tmp_path, reader, source), *sorted(FOLDER.glob("*.json")))
    assert done.returncode != 0
    assert "must be" in done.stdout or done.returncode < 0  # it may read outside its arrays


def test_another_format_is_refused(reader: Path, tmp_path: Path) -> None:
    program = compiled(tmp_path, reader, (CPP / "slot_mapper.cpp").read_text())
    path = tmp_path / "vectors.json"
    path.write_text('{"format": 5, "vectors": []}')
    done = run(program, path)
    assert done.returncode != 0
    assert "has format 5; this reader knows 1 to 4" in done.stderr
