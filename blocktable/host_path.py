"""The compiled host path: found by entry point, used where what it stands on is installed."""

from __future__ import annotations

import importlib.metadata
import os
from functools import cache
from typing import Any

from blocktable.errors import BackendUnavailableError, ConfigError

HOST_PATH_VARIABLE = "BLOCKTABLE_HOST_PATH"
HOST_PATHS = ("auto", "numpy", "compiled")
ENTRY_POINT_GROUP = "blocktable.host_paths"


def compiled_host_path() -> Any | None:
    """Return the module of compiled functions, or None for the numpy path.

    BLOCKTABLE_HOST_PATH chooses: "auto" (compiled where it can be imported), "numpy", "compiled".

    Raises:
        BackendUnavailableError: "compiled" is asked for and cannot be imported.
    """
    choice = os.environ.get(HOST_PATH_VARIABLE, "auto")
    if choice not in HOST_PATHS:
        raise ConfigError(f"{HOST_PATH_VARIABLE} must be one of {', '.join(HOST_PATHS)}; got {choice!r}.")
    if choice == "numpy":
        return None
    module, reason = _load()
    if module is None and choice == "compiled":
        raise BackendUnavailableError(
            f"The compiled host path cannot be imported ({reason}); install blocktable[compiled]."
        )
    return module


def host_path_description() -> str:
    """Return which host path runs, in a sentence for `blocktable backends`."""
    if compiled_host_path() is not None:
        return "compiled (Numba)"
    return f"numpy ({_load()[1] or f'{HOST_PATH_VARIABLE}=numpy'})"


@cache
def _load() -> tuple[Any | None, str | None]:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name="compiled"):
        try:
            return entry.load()(), None
        except Exception as error:  # Numba missing, or no place where it may keep what it compiles
            return None, f"{type(error).__name__}: {error}"
    return None, "not installed"
