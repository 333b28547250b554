"""The host's rows as a table uses them, and what makes them: numpy, or the compiled path by entry point."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from functools import cache
from typing import Any

from blocktable.config import BlockTableConfig
from blocktable.errors import BackendUnavailableError, ConfigError
from blocktable.rows import NumpyRows

HOST_PATH_VARIABLE = "BLOCKTABLE_HOST_PATH"
HOST_PATHS = ("auto", "numpy", "compiled")
ENTRY_POINT_GROUP = "blocktable.host_paths"


def make_rows(config: BlockTableConfig) -> NumpyRows:
    """Return empty rows of a new table.

    Raises:
        BackendUnavailableError, ConfigError: as `rows_maker`.
    """
    return rows_maker()(config)


def rows_maker() -> Callable[[BlockTableConfig], NumpyRows]:
    """Return what makes rows.

    BLOCKTABLE_HOST_PATH chooses: "auto" (compiled where it can be imported), "numpy", "compiled".

    Raises:
        BackendUnavailableError: "compiled" is asked for and cannot be imported.
        ConfigError: the variable has another value.
    """
    return _compiled("rows") or NumpyRows


def compiled_step() -> Callable[..., Any] | None:
    """Return what does the numpy backend's whole step in one compiled call; None where the host path is numpy.

    Raises:
        BackendUnavailableError, ConfigError: as `rows_maker`.
    """
    found: Callable[..., Any] | None = _compiled("step")
    return found


def compiled_append() -> Callable[..., int] | None:
    """Return the compiled `append_equally`, for a drop-in that has rows of its own; None for the numpy path."""
    return getattr(rows_maker(), "append_equally", None)


def host_path_description() -> str:
    """Return which host path runs, in a sentence for `blocktable backends`."""
    if rows_maker() is not NumpyRows:
        return "compiled"
    return f"numpy ({_load('rows')[1] or f'{HOST_PATH_VARIABLE}=numpy'})"


def _compiled(name: str) -> Any:
    choice = os.environ.get(HOST_PATH_VARIABLE, "auto")
    if choice not in HOST_PATHS:
        raise ConfigError(f"{HOST_PATH_VARIABLE} must be one of {', '.join(HOST_PATHS)}; got {choice!r}.")
    if choice == "numpy":
        return None
    found, reason = _load(name)
    if found is None and choice == "compiled":
        raise BackendUnavailableError(
            f"The compiled host path cannot be imported ({reason}); install blocktable where a C++ compiler is, which "
            "builds it."
        )
    return found


@cache
def _load(name: str) -> tuple[Any, str | None]:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            return entry.load(), None
        except ImportError as error:  # it was not built
            return None, f"{type(error).__name__}: {error}"
    return None, "not installed"
