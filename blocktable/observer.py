"""Observing a table: what is called, with which arguments, and how it ends. Costs nothing without an observer."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from blocktable.checks import flag
from blocktable.errors import BlockTableError, DtypeError, UnsupportedError

__all__ = ["OBSERVED_CALLS", "ROW_CALLS", "Observation", "Observer", "OpenRecording"]

ROW_CALLS = (
    "append_row",
    "set_row",
    "clear_row",
    "clear",
    "move_row",
    "swap_rows",
    "copy_row",
    "truncate_row",
    "null_range",
    "replace_blocks",
    "append_rows",
    "set_rows",
    "clear_rows",
    "truncate_rows",
    "null_ranges",
    "replace_block_ranges",
    "remap_blocks",
    "permute_rows",
    "copy_rows",
)
"""Methods that change rows. Their order is part of the format of recordings."""

OBSERVED_CALLS = (
    *ROW_CALLS,
    "commit",
    "gather",
    "compute_slot_mappings",
    "step",
    "step_metadata",
    "create_buffers",
    "create_export",
    "export",
    "map_positions",
    "invalidate",
    "apply_changes",
)
"""Methods that an observer hears of: they change rows or write outputs."""

RECORDERS_GROUP = "blocktable.recorders"
RECORDER_NAME = "btrace"


class Observer(Protocol):
    """Is told of the outer calls of a table; what such a call does inside is not observed.

    After `before` comes `after`, or `failed`, or neither where the call was interrupted (KeyboardInterrupt). What an
    observer raises goes to the caller of the table; raised by `before`, it prevents the call.
    """

    def before(self, call: str, arguments: Mapping[str, Any]) -> None:
        """A call begins.

        Args:
            call: one of `OBSERVED_CALLS`.
            arguments: parameter -> value in the order of the method's parameters, its defaults filled in.
        """

    def after(self, call: str, result: Any) -> None:
        """The call has returned `result`. A device may still be writing it."""

    def failed(self, call: str, error: Exception) -> None:
        """The call has raised `error`."""


class OpenRecording(Protocol):
    """A recording that is being written. Leaving its `with` block closes it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def flush(self) -> None:
        """Hand everything recorded so far to whatever writes the file."""

    def close(self) -> None:
        """End the recording; the table goes on without it."""


class Observation:
    """An observer at a table, until `close` or the end of a `with` block. It does not keep the table alive."""

    def __init__(self, calls: ObservedCalls, observer: Observer) -> None:
        self._observer = observer
        self._calls: ObservedCalls | None = calls
        calls.add(observer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the observation, of a call in progress too. A second call changes nothing."""
        if self._calls is not None:
            self._calls.remove(self._observer)
            self._calls = None


class ObservedCalls:
    """The observers of one table. Wrappers stand on the table itself, and only while there is one.

    They hold the table weakly: it is freed when its last user drops it, observed or not.

    Args:
        table: the table.
    """

    def __init__(self, table: Any) -> None:
        self._table = weakref.ref(table)
        self._observers: tuple[Observer, ...] = ()
        self._is_inside = False

    def add(self, observer: Observer) -> None:
        """Tell an observer of the calls to come.

        Raises:
            DtypeError: it is none.
        """
        missing = [name for name in ("before", "after", "failed") if not callable(getattr(observer, name, None))]
        if missing:
            raise DtypeError(
                f"observer must have the methods before, after and failed; {type(observer).__name__} has no "
                f"{', no '.join(missing)}."
            )
        if not self._observers:
            table = self._table()
            for name in OBSERVED_CALLS:
                setattr(table, name, self._wrap(name, getattr(type(table), name)))
        self._observers = (*self._observers, observer)

    def remove(self, observer: Observer) -> None:
        """Tell an observer no more."""
        place = next(i for i, each in enumerate(self._observers) if each is observer)
        self._observers = self._observers[:place] + self._observers[place + 1 :]
        table = self._table()
        if not self._observers and table is not None:
            for name in OBSERVED_CALLS:
                delattr(table, name)

    def _wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        bind = _binder(method)
        table_of = self._table

        def observed(*args: Any, **kwargs: Any) -> Any:
            table = table_of()
            if table is None:
                raise BlockTableError(f"{name} was called on a table that is gone; keep the table, not its method.")
            arguments = None if self._is_inside else bind(args, kwargs)
            if arguments is None:
                return method(table, *args, **kwargs)
            self._is_inside = True
            try:
                for observer in self._observers:
                    observer.before(name, arguments)
                try:
                    result = method(table, *args, **kwargs)
                except Exception as error:
                    for observer in self._observers:
                        observer.failed(name, error)
                    raise
                for observer in self._observers:
                    observer.after(name, result)
                return result
            finally:
                self._is_inside = False

        return observed


def _binder(method: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any] | None]:
    """Return what gives parameter -> value of a call; None: it is not a call of this method, which then says so.

    `inspect.Signature.bind` takes 4 microseconds for a step; this takes 1.
    """
    parameters = list(inspect.signature(method).parameters.values())[1:]  # without self
    positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    required = frozenset(each.name for each in parameters if each.default is each.empty)
    all_names = frozenset(each.name for each in parameters)
    defaults = {each.name: each.default for each in parameters}  # in their order

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        if len(args) == len(defaults) and not kwargs:  # most row operations
            return dict(zip(positional, args, strict=False))
        given = dict(zip(positional, args, strict=False))
        if len(given) < len(args) or not kwargs.keys().isdisjoint(given):
            return None
        given |= kwargs
        return {**defaults, **given} if required <= given.keys() <= all_names else None

    return bind


def start_recording(table: Any, path: str | Path, *, digests: bool) -> OpenRecording:
    """Start the recorder that is installed.

    Raises:
        UnsupportedError: none is, or it cannot be imported.
        DtypeError: `path` names no file; `digests` is no bool.
    """
    if not isinstance(path, str | os.PathLike):
        raise DtypeError(f"path must be a str or a path-like object that names a file, got {type(path).__name__}.")
    with_digests = flag("digests", digests)
    offers = list(importlib.metadata.entry_points(group=RECORDERS_GROUP, name=RECORDER_NAME))
    if not offers:
        raise UnsupportedError(
            f"A table is recorded by the entry point {RECORDER_NAME!r} of the group {RECORDERS_GROUP!r}, which no "
            "installed distribution offers; install the whole of blocktable, which has one."
        )
    try:
        recorder: Callable[..., OpenRecording] = offers[0].load()
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"The recorder ({offers[0].value}) cannot be loaded: {error}.") from error
    return recorder(table, path, digests=with_digests)
