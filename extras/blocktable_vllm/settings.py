"""What a drop-in is made for: a vLLM version, a mode, a backend. Keywords first, then the environment."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from blocktable import ConfigError, UnsupportedError

Profile = Literal["0.25.1", "0.33.0"]
Mode = Literal["fast", "strict"]
V2Profile = Literal["0.25.1", "0.32.0", "0.33.0"]
CheckMode = Literal["off", "host", "device"]

SWITCH_VARIABLE = "BLOCKTABLE_VLLM"
MODE_VARIABLE = "BLOCKTABLE_VLLM_MODE"
BACKEND_VARIABLE = "BLOCKTABLE_VLLM_BACKEND"
CLEAN_TAILS_VARIABLE = "BLOCKTABLE_VLLM_CLEAN_TAILS"
CHECK_VARIABLE = "BLOCKTABLE_VLLM_CHECK"


class KnownFile(NamedTuple):
    """A file of vLLM's that a drop-in was compared with, whatever version it came in.

    Attributes:
        runner: "V1" or "V2", vLLM's two generations of model runners.
        path: below the package's folder.
        profiles: SHA-256 of its bytes -> profile.
    """

    runner: str
    path: str
    profiles: Mapping[str, str]

    @property
    def module(self) -> str:
        """Its name as a module."""
        return "vllm." + self.path.removesuffix(".py").replace("/", ".")


V1_FILE = KnownFile(
    "V1",
    "v1/worker/block_table.py",
    {
        "b3a6649b968fba0b48c333d7ac96e65cc713a86133cc7eef0a8399f5339ec600": "0.25.1",
        "4068aea7336627f809def92f45401659d7c7c592d4da5dace6a11c90e7850c4a": "0.33.0",  # and 0.32.0's
    },
)
V2_FILE = KnownFile(
    "V2",
    "v1/worker/gpu/block_table.py",
    {
        "5337965e7914c4e466d5a66f086cd616f81e81e3941f61ad4518fefafc62ce69": "0.25.1",
        "822b65f3d7bd4cad47693c101ba5134923876b9c81d5a609afd6bca6dee38ba8": "0.32.0",
        "3433729cad5aa5fceb312e0a8d9ffabb3f7327dbdd18966d576e64d090313020": "0.33.0",
    },
)


class Settings(NamedTuple):
    """What the classes of a drop-in are made for.

    Attributes:
        profile: the vLLM version whose signatures and effects they have.
        mode: "strict" copies whole rows at every commit, as vLLM does; "fast" sends what changed.
        backend: name of the backend. None: "triton" on a GPU, "numpy" on the CPU.
        clean_tails: whether blocks that a row no longer holds become NULL immediately; else they stay until they are
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
    chosen = mode or os.environ.get(MODE_VARIABLE) or "fast"
    if chosen not in get_args(Mode):
        raise ConfigError(f"{MODE_VARIABLE}, or mode, must be one of {', '.join(get_args(Mode))}; got {chosen!r}.")
    cleans = is_on(CLEAN_TAILS_VARIABLE) if clean_tails is None else clean_tails
    if cleans and chosen == "strict":
        raise ConfigError(f"Strict mode keeps tails as vLLM does: clear {CLEAN_TAILS_VARIABLE}, or take mode fast.")
    known: Any = _profile(V1_FILE, profile, get_args(Profile))
    right: Any = chosen
    return Settings(known, right, _backend(backend), cleans)


def make_v2_settings(profile: str | None = None, backend: str | None = None) -> tuple[str, str | None]:
    """Return profile and backend of the V2 runner's tables, as `make_settings` does.

    Raises:
        UnsupportedError: no drop-in was made for this version of vLLM.
    """
    return _profile(V2_FILE, profile, get_args(V2Profile)), _backend(backend)


def make_check(check: str | None = None) -> CheckMode:
    """Return whether a drop-in's calls are checked: what is given, else the environment, else "off".

    Raises:
        ConfigError: a mode that does not exist.
    """
    chosen: Any = check or os.environ.get(CHECK_VARIABLE) or "off"
    if chosen not in get_args(CheckMode):
        allowed = ", ".join(get_args(CheckMode))
        raise ConfigError(f"{CHECK_VARIABLE}, or check, must be one of {allowed}; got {chosen!r}.")
    mode: CheckMode = chosen
    return mode


def _backend(name: str | None) -> str | None:
    return name or os.environ.get(BACKEND_VARIABLE) or None


def is_on(variable: str) -> bool:
    """Return whether an environment variable is 1; unset, empty and 0 are off.

    Raises:
        ConfigError: it is anything else.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{variable} must be 0 or 1, got {value!r}.")
    return value == "1"


def _profile(known: KnownFile, name: str | None, profiles: tuple[str, ...]) -> str:
    if name is None:
        return installed_profile(known)
    if name not in profiles:
        raise UnsupportedError(f"There is no profile {name!r} of the {known.runner} runner: {' or '.join(profiles)}.")
    return name


def installed_profile(known: KnownFile) -> str:
    """Return the profile of the vLLM that is loaded, or otherwise installed: what its file is known as.

    Raises:
        UnsupportedError: there is no vLLM, it has no such file, or the file is another one.
    """
    folder = vllm_folder()
    profiles = sorted(set(known.profiles.values()))
    if folder is None:
        raise UnsupportedError(f"vLLM is not installed: name a profile, {' or '.join(profiles)}.")
    path, version = folder / known.path, _vllm_version()
    if not path.is_file():
        raise UnsupportedError(f"vLLM{version} has no {known.path}, the block tables of its {known.runner} runner.")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest not in known.profiles:
        raise UnsupportedError(
            f"The {known.runner} runner's block tables of this vLLM{version} are not known ({known.path}, SHA-256 "
            f"{digest[:16]}...): the drop-in was compared with those of {', '.join(profiles)} alone."
        )
    return known.profiles[digest]


def vllm_folder() -> Path | None:
    """Return where the package `vllm` is, whichever distribution it comes from; None: nowhere. Imports nothing."""
    loaded = sys.modules.get("vllm")
    places = getattr(loaded, "__path__", None)
    if places is None:
        try:
            spec = importlib.util.find_spec("vllm")
        except ValueError:  # something without a spec stands under that name
            spec = None
        places = spec and spec.submodule_search_locations
    return next((Path(place) for place in places or ()), None)


def _vllm_version() -> str:
    version = getattr(sys.modules.get("vllm"), "__version__", None)
    return f" {version}" if isinstance(version, str) else ""
