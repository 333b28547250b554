"""The command line: `blocktable backends`, and the commands that packages add by entry point."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from blocktable.errors import BlockTableError

Command = Callable[[Sequence[str]], int]
"""Takes the arguments after its name, returns the exit status."""

ENTRY_POINT_GROUP = "blocktable.commands"

# Named here, imported only when asked for: `--help` must not pay for what it does not run.
BUILT_IN = {
    "backends": (
        "blocktable.backends_command:main",
        "list the installed backends: what each can do here, or why it cannot",
    ),
}

USAGE_ERROR = 2
INTERRUPTED = 130


class UsageError(BlockTableError, ValueError):
    """The command line says something that it cannot say."""


class Parser(argparse.ArgumentParser):
    """Raises a sentence instead of printing the usage and leaving."""

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`."""
        raise UsageError(f"{message.rstrip('.')}; see `{self.prog} --help`.")


def say(text: str) -> None:
    """Print a result."""
    print(text)


def warn(text: str) -> None:
    """Print a sentence that is not a result."""
    print(f"blocktable: {text}", file=sys.stderr)


def write_file(path: str, text: str) -> None:
    """Write a file whole or not at all: beside the old one first, which it then replaces.

    Raises:
        UsageError: it cannot be written.
    """
    target = os.path.realpath(path)
    is_plain = os.path.isfile(target) or not os.path.exists(target)  # no terminal, pipe or device
    place = f"{target}.{os.getpid()}.part" if is_plain else target
    try:
        try:
            with open(place, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            if is_plain:
                os.replace(place, target)
        except BaseException:
            if is_plain and os.path.exists(place):
                os.remove(place)
            raise
    except OSError as error:
        raise UsageError(f"{path}: the file cannot be written: {error.strerror or error}.") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 when all is well, 1 when something was found, 2 for a wrong call."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be text
    try:
        status = _run(arguments)
        if sys.stdout is not None:  # None: it was closed before we began
            sys.stdout.flush()  # here, where a reader who has left can be told from a fault
        return status
    except BlockTableError as error:
        warn(str(error))
        return USAGE_ERROR
    except KeyboardInterrupt:
        warn("interrupted.")
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()  # whoever read it has left
        return 1
    except MemoryError:
        warn("the memory does not suffice.")
        return USAGE_ERROR
    except OSError as error:
        if sys.stdout is None or error.filename is not None:
            raise
        _drop_output()
        warn(f"the output cannot be written: {error.strerror or error}.")
        return USAGE_ERROR


def _drop_output() -> None:
    """The interpreter must not complain about what is left to write while it shuts down."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        _parser().parse_args(arguments)
        _parser().print_help()
        return USAGE_ERROR
    status = _find(arguments[0])(arguments[1:])
    return int(status or 0)


def _find(name: str) -> Command:
    if name in BUILT_IN:
        module_name, _, attribute = BUILT_IN[name][0].partition(":")
        command: Command = getattr(importlib.import_module(module_name), attribute)
        return command
    offers = [entry for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP) if entry.name == name]
    if not offers:
        raise UsageError(f"There is no command {name!r}; the commands are {', '.join(_descriptions())}.")
    if len({entry.value for entry in offers}) > 1:
        origins = " and by ".join(sorted(_origin(entry) for entry in offers))
        raise UsageError(f"Command {name!r} is offered by {origins}; uninstall one.")
    try:
        loaded: Command = offers[0].load()
    except (ImportError, AttributeError) as error:
        raise BlockTableError(f"Command {name!r}, from {_origin(offers[0])}, cannot be loaded: {error}.") from error
    return loaded


def _origin(entry: importlib.metadata.EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"


def _descriptions() -> dict[str, str]:
    """Return every command and what it does; those of entry points are named without importing them."""
    found = {name: description for name, (_, description) in BUILT_IN.items()}
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)):
        found.setdefault(entry.name, f"from {_origin(entry)} ({entry.value})")
    return found


def _parser() -> Parser:
    commands = "\n".join(f"  {name:<14}{description}" for name, description in _descriptions().items())
    parser = Parser(
        prog="blocktable",
        usage="blocktable COMMAND [ARGUMENT ...]",
        description="The block table of a paged-KV inference engine: its backends, and what installed packages add.",
        epilog=f"commands:\n{commands}\n\n`blocktable COMMAND --help` says more about one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"blocktable {importlib.metadata.version('blocktable')}")
    return parser
