"""`blocktable backends`: every installed backend, what it can do on this machine, and which host path runs."""

from __future__ import annotations

from collections.abc import Sequence

from blocktable.cli import Parser, say
from blocktable.constants import CAPABILITIES
from blocktable.errors import BlockTableError
from blocktable.host_path import host_path_description
from blocktable.protocols import Backend
from blocktable.registry import BackendInfo, get_backend, list_backends


def main(argv: Sequence[str]) -> int:
    """Print one paragraph for each backend, and the host path, which all of them share."""
    Parser(
        prog="blocktable backends",
        description="List the installed backends: where each comes from, whether it can run here or why not, "
        "its capabilities, and the fallbacks it takes inside itself; and which host path runs.",
    ).parse_args(argv)
    installed = list_backends()
    if not installed:
        say('No backend is installed; a plain `pip install blocktable` brings "numpy".')
    for info in installed:
        say("\n".join(_paragraph(info)))
    say(_host_path())
    return 0


def _host_path() -> str:
    try:
        return f"host path: {host_path_description()}"
    except BlockTableError as error:
        return f"host path: not available: {error}"


def _paragraph(info: BackendInfo) -> list[str]:
    heading = f"{info.name}  ({info.distribution} {info.version}, {info.value})"
    try:
        backend = get_backend(info.name)
    except BlockTableError as error:
        return [heading, f"  not available: {error}"]
    except Exception as error:  # anything may go wrong inside a stranger's import
        return [heading, f"  not available: it raised {type(error).__name__}: {error}"]
    return [heading, f"  available: {getattr(backend, 'description', info.name)}", *_abilities(backend)]


def _abilities(backend: Backend) -> list[str]:
    lines = [f"  can {name}: {sentence}" for name, sentence in CAPABILITIES.items() if name in backend.capabilities]
    missing = [name for name in CAPABILITIES if name not in backend.capabilities]
    if missing:
        lines.append(f"  cannot: {', '.join(missing)}")
    fallbacks = tuple(getattr(backend, "fallbacks", ()))
    lines += [f"  fallback: {sentence}" for sentence in fallbacks] or ["  fallbacks: none"]
    return lines
