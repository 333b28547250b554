"""What a drop-in is made for: a vLLM version, a mode, a backend. Keywords first, then the environment."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from typing import Any, Literal, NamedTuple, get_args

from blocktable import ConfigError, UnsupportedError

Profile = Literal["0.25.1", "0.33.0"]
Mode = Literal["fast", "strict"]

SWITCH_VARIABLE = "BLOCKTABLE_VLLM"
MODE_VARIABLE = "BLOCKTABLE_VLLM_MODE"
BACKEND_VARIABLE = "BLOCKTABLE_VLLM_BACKEND"
CLEAN_TAILS_VARIABLE = "BLOCKTABLE_VLLM_CLEAN_TAILS"


class Settings(NamedTuple):
    """What the classes of a drop-in are made for.

    Attributes:
        profile: the vLLM version whose signatures and effects they have.
        mode: "strict" copies whole rows at every commit, as vLLM does; "fast" sends what changed.
        backend: name of the backend. None: "triton" on a GPU, "numpy" on the CPU.
        clean_tails: whether blocks that a row no longer holds become NULL at once; else they stay until they are
            overwritten, as in vLLM.
    """

    profile: Profile
    mode: Mode
    backend: str | None
    clean_tails: bool


def make_settings(
    profile: str | None = None, mode: str | None = None, backend: str | None = None, clean_tails: bool | None = None
) -> Settings:
    """Return the settings: each keyword that is given, else the environment, else the default.

    Raises:
        UnsupportedError: no drop-in was made for this version of vLLM.
        ConfigError: a mode that does not exist, or clean tails in strict mode.
    """
    version = installed_version() if profile is None else profile
    chosen = mode or os.environ.get(MODE_VARIABLE) or "fast"
    if chosen not in get_args(Mode):
        raise ConfigError(f"{MODE_VARIABLE}, or mode, must be one of {', '.join(get_args(Mode))}; got {chosen!r}.")
    cleans = is_on(CLEAN_TAILS_VARIABLE) if clean_tails is None else clean_tails
    if cleans and chosen == "strict":
        raise ConfigError(f"Strict mode keeps tails as vLLM does: clear {CLEAN_TAILS_VARIABLE}, or take mode fast.")
    known: Any = known_profile(version)
    right: Any = chosen
    return Settings(known, right, backend or os.environ.get(BACKEND_VARIABLE) or None, cleans)


def is_on(variable: str) -> bool:
    """Return whether an environment variable is 1; unset, empty and 0 are off.

    Raises:
        ConfigError: it is anything else.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{variable} must be 0 or 1, got {value!r}.")
    return value == "1"


def known_profile(version: str) -> str:
    """Return the profile of a vLLM version, whatever build it is.

    Raises:
        UnsupportedError: there is none.
    """
    release = version.partition("+")[0]
    if release not in get_args(Profile):
        raise UnsupportedError(
            f"The block tables of vLLM {version} are not known: the drop-in was compared with "
            f"{' and '.join(get_args(Profile))} alone."
        )
    return release


def installed_version() -> str:
    """Return the version of the vLLM that is loaded, or else installed.

    Raises:
        UnsupportedError: there is none; a profile must be named.
    """
    loaded = getattr(sys.modules.get("vllm"), "__version__", None)
    if isinstance(loaded, str):
        return loaded
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(f"vLLM is not installed: name a profile, {' or '.join(get_args(Profile))}.") from None
