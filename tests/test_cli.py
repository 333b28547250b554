"""The command line: its commands, what it says of wrong ones, and that it loads no more than it runs."""

import importlib.metadata
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

import blocktable as bt
from blocktable import cli, host_path
from blocktable.backend import CAPABILITIES


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "blocktable", *arguments], capture_output=True, text=True, check=False)


class FakeEntryPoint:
    """An entry point of another distribution, loaded or not."""

    def __init__(self, name: str, value: str, target: Any) -> None:
        self.name = name
        self.value = value
        self.dist = importlib.metadata.distribution("blocktable")
        self.target = target

    def __lt__(self, other: "FakeEntryPoint") -> bool:
        return self.name < other.name

    def load(self) -> Any:
        if isinstance(self.target, Exception):
            raise self.target
        return self.target


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[FakeEntryPoint]:
    found: list[FakeEntryPoint] = []
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: found)
    return found


def test_help_names_every_command_and_imports_none() -> None:
    for arguments in (["--help"], []):
        done = run(*arguments)
        assert done.returncode == (0 if arguments else cli.USAGE_ERROR)
        for command in ("backends", "replay", "conformance"):
            assert f"\n  {command} " in done.stdout
    source = """
import sys
from blocktable.cli import main
try:
    main(["--help"])
except SystemExit:
    print(*sys.modules)
"""
    loaded = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout
    modules = loaded.splitlines()[-1].split()  # the help stands before them
    assert "blocktable.cli" in modules
    assert not [name for name in modules if name.startswith("blocktable_")]


def test_version() -> None:
    assert run("--version").stdout == f"blocktable {bt.__version__}\n"


def test_an_unknown_command_is_one_sentence() -> None:
    done = run("repaly")
    assert done.returncode == cli.USAGE_ERROR
    assert done.stdout == ""
    assert done.stderr.startswith("blocktable: There is no command 'repaly'; the commands are backends, bench, ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["replay", "--rows", "loose"], "argument --rows: invalid choice"),
        (["replay", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["replay", "--group", "block=16"], "'block=16' is no KEY=VALUE of KVCacheGroup; its keys are block_size"),
        (["replay", "--group", "block_size=x"], "block_size must be a whole number, got 'x'"),
        (["replay", "--group", "kernel_block_size=8"], "must say block_size"),
        (["replay", "--group", "block_size=16,block_size=16"], "block_size is said twice"),
        (["replay", "--group", "block_size=16,null_is_pad=1"], "null_is_pad must be true or false"),
        (["replay", "--group", "block_size=16,kernel_block_size=5"], "does not divide block_size 16"),
        (["replay", "--group", "block_size=16,slot_mode=ring"], "say how many blocks it takes with blocks_per_row"),
        (["replay", "--context-parallel", "world_size=2,rank=2"], "rank 2 is outside a world of 2"),
        (
            ["replay", "--context-parallel", "world_size=2,interleave_size=5"],
            "interleave_size 5 does not divide block_size",
        ),
        (["replay", "--max-num-reqs", "0"], "'0' is not a whole number from 1"),
        (["replay", "--step-ms", "-3"], "'-3' is not a number above 0"),
        (["replay", "--from", "3 days"], "'3 days' is not a time"),
        (["replay", "nowhere.csv"], "nowhere.csv: the file cannot be read"),
        (["replay", "--backend", "abacus"], "No installed distribution offers a backend named 'abacus'"),
        (["replay", "--backend", "no.module:Backend"], "cannot be loaded"),
        (["backends", "numpy"], "unrecognized arguments: numpy"),
    ],
)
def test_a_wrong_call_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == cli.USAGE_ERROR
    said = capsys.readouterr()
    assert said.out == ""
    assert sentence in said.err
    assert said.err.startswith("blocktable: ")
    assert said.err.endswith(".\n")
    assert said.err.count("\n") == 1


def test_a_command_of_another_distribution(commands: list[FakeEntryPoint]) -> None:
    seen: list[Sequence[str]] = []

    def command(argv: Sequence[str]) -> int:
        seen.append(argv)
        return 7

    commands.append(FakeEntryPoint("other", "package:main", command))
    assert cli.main(["other", "--flag", "x"]) == 7
    assert seen == [["--flag", "x"]]


def test_two_offers_of_one_command(commands: list[FakeEntryPoint], capsys: pytest.CaptureFixture[str]) -> None:
    commands += [FakeEntryPoint("other", "a:main", None), FakeEntryPoint("other", "b:main", None)]
    assert cli.main(["other"]) == cli.USAGE_ERROR
    assert "is offered by blocktable" in capsys.readouterr().err


def test_a_command_that_cannot_be_loaded(commands: list[FakeEntryPoint], capsys: pytest.CaptureFixture[str]) -> None:
    commands.append(FakeEntryPoint("other", "package:main", ImportError("No module named 'package'")))
    assert cli.main(["other"]) == cli.USAGE_ERROR
    assert "Command 'other', from blocktable" in capsys.readouterr().err


def test_backends_says_what_each_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["backends"]) == 0
    said = capsys.readouterr().out
    assert f"numpy  (blocktable {bt.__version__}, blocktable_numpy:NumpyBackend)\n  available: numpy (host)\n" in said
    assert f"  can int32_slots: {CAPABILITIES['int32_slots']}\n" in said
    for info in bt.list_backends():
        assert f"\n{info.name}  (" in f"\n{said}"


@pytest.mark.parametrize("error", [bt.BackendUnavailableError("no GPU is here."), OSError("libcuda.so.1 is missing")])
def test_backends_says_why_one_cannot_run(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> None:
        raise error

    monkeypatch.setattr("blocktable.backends_command.get_backend", refuse)
    assert cli.main(["backends"]) == 0
    said = capsys.readouterr().out
    assert "  not available: " in said
    assert str(error) in said


def test_backends_names_the_host_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("blocktable.backends_command.list_backends", list)

    def said(choice: str, module: object, reason: str | None) -> str:
        monkeypatch.setenv(host_path.HOST_PATH_VARIABLE, choice)
        monkeypatch.setattr(host_path, "_load", lambda name: (module, reason))
        assert cli.main(["backends"]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    assert said("auto", object(), None) == "host path: compiled"
    assert said("auto", None, "not installed") == "host path: numpy (not installed)"
    assert said("numpy", object(), None) == "host path: numpy (BLOCKTABLE_HOST_PATH=numpy)"
    assert said("compiled", None, "not installed").startswith(
        "host path: not available: The compiled host path cannot be imported (not installed). It is built when "
    )
    assert said("quick", None, None).startswith("host path: not available: BLOCKTABLE_HOST_PATH must be one of ")


def test_the_reader_of_our_output_may_leave() -> None:
    source = "import sys; from blocktable.cli import main; sys.exit(main(['backends']))"
    command = [sys.executable, "-c", source]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
