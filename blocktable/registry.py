"""Finding backends: entry points of the group `blocktable.backends`, opened only when their name is asked for."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import threading
from dataclasses import dataclass
from typing import Any

from blocktable.constants import CAPABILITIES, PROTOCOL_VERSION
from blocktable.errors import BackendUnavailableError, BlockTableError, UnknownBackendError
from blocktable.protocols import Backend

ENTRY_POINT_GROUP = "blocktable.backends"

_REQUIRED = [name for name in vars(Backend) if not name.startswith("_")]

_lock = threading.Lock()
_locks: dict[str, threading.RLock] = {}
_loaded: dict[str, Backend] = {}


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """One installed backend, not loaded.

    Attributes:
        name: what `get_backend` takes.
        distribution: the installed distribution that offers it.
        version: of that distribution.
        value: what its entry point names, "module:object".
    """

    name: str
    distribution: str
    version: str
    value: str


def list_backends() -> tuple[BackendInfo, ...]:
    """Return every installed backend, by name, and load none."""
    found = {
        BackendInfo(
            entry.name,
            entry.dist.name if entry.dist else "unknown",
            entry.dist.version if entry.dist else "unknown",
            entry.value,
        )
        for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    }
    return tuple(sorted(found, key=lambda info: (info.name, info.distribution)))


def get_backend(name: str) -> Backend:
    """Return the backend of that name; it is loaded once, and no other is.

    Args:
        name: an installed backend, or "package.module:Class" for one that is not installed.

    Raises:
        UnknownBackendError: no distribution offers it, or two do.
        BackendUnavailableError: it cannot be imported or cannot run here.
        BlockTableError: it is not a backend of this protocol version.

    May be called from any thread.

    Rules: R23.
    """
    if not isinstance(name, str):
        raise UnknownBackendError(f"A backend is asked for by name, got {name!r}; a backend object needs no lookup.")
    with _lock:
        lock = _locks.setdefault(name, threading.RLock())
    with lock:  # of this name alone: a backend may ask for another one while it is made
        if name not in _loaded:
            _loaded[name] = _load(name)
        return _loaded[name]


def check_backend(backend: Any) -> Backend:
    """Return `backend`, or what calling it makes, if it is of this protocol version and can run here; else raise."""
    if isinstance(backend, type):
        backend = backend()
    missing = [attribute for attribute in _REQUIRED if not hasattr(backend, attribute)]
    if missing:
        raise BlockTableError(
            f"{backend!r} is not a backend: it has no {', '.join(missing)}. Pass a name that `blocktable backends` "
            "lists, or a backend object as docs/writing-a-backend.md describes it."
        )
    if backend.protocol_version != PROTOCOL_VERSION:
        raise BlockTableError(
            f"Backend {backend.name!r} was written for protocol version {backend.protocol_version}, this blocktable "
            f"speaks version {PROTOCOL_VERSION}; install versions of the two that match."
        )
    unknown = sorted(set(backend.capabilities) - set(CAPABILITIES))
    if unknown:
        raise BlockTableError(
            f"Backend {backend.name!r} declares capabilities that do not exist: {', '.join(unknown)}; "
            f"choose from {', '.join(CAPABILITIES)}."
        )
    reason = backend.why_unavailable()
    if reason is not None:
        raise BackendUnavailableError(f"Backend {backend.name!r} cannot run here: {reason}")
    checked: Backend = backend
    return checked


def _load(name: str) -> Backend:
    value, distribution = _find(name)
    module_name, _, attribute = value.partition(":")
    if not (module_name and attribute):
        raise UnknownBackendError(f'A backend that is not installed is named "package.module:Class", got {name!r}.')
    try:
        target: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
        backend = target() if isinstance(target, type) else target
    except AttributeError as error:
        raise UnknownBackendError(f"Backend {name!r} cannot be loaded: {error}.") from error
    except Exception as error:  # a library whose own import fails may raise anything
        raise BackendUnavailableError(
            f"Backend {name!r} ({value}) cannot be loaded: {type(error).__name__}: {error}. "
            f"{_remedy(name, distribution)}"
        ) from error
    return check_backend(backend)


def _remedy(name: str, distribution: str | None) -> str:
    if distribution is not None:
        extras = importlib.metadata.metadata(distribution).get_all("Provides-Extra") or []
        if name in extras:
            return f"Install what it needs: pip install '{distribution}[{name}]'."
    return "Install what it needs, or choose one that `blocktable backends` shows as available."


def _find(name: str) -> tuple[str, str | None]:
    """Return "module:object" and the distribution that offers it, if one does."""
    if ":" in name:
        return name, None
    installed = list_backends()
    offers = [info for info in installed if info.name == name]
    if not offers:
        known = sorted({info.name for info in installed})
        close = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise UnknownBackendError(
            f"No installed distribution offers a backend named {name!r}{hint}; installed: {', '.join(known) or 'none'}."
            ' Name one of these, or "package.module:Class".'
        )
    if len(offers) > 1:
        raise UnknownBackendError(
            f"Backend {name!r} is offered by {' and by '.join(info.distribution for info in offers)}; uninstall one, "
            f"or name the object itself, such as {offers[0].value!r}."
        )
    return offers[0].value, offers[0].distribution
