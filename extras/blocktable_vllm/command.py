"""`blocktable vllm`: which vLLM is here, and which of its tables would be ours. It imports no vLLM."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from collections.abc import Callable, Sequence

from blocktable import UnsupportedError
from blocktable.cli import Parser, say
from blocktable_vllm.settings import (
    BACKEND_VARIABLE,
    SWITCH_VARIABLE,
    V1_FILE,
    V2_FILE,
    KnownFile,
    installed_profile,
    is_on,
    make_check,
    make_settings,
    make_v2_settings,
    vllm_folder,
)

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
PLUGINS_VARIABLE = "VLLM_PLUGINS"
PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN = "blocktable"

CHOICES = {
    "0.25.1": "V2 for dense text models on a GPU, V1 otherwise",
    "0.32.0": "V2 where Triton runs, but for features that V2 does not have; V1 otherwise, so on CPUs",
    "0.33.0": "V2 where Triton runs, but for features that V2 does not have; V1 otherwise, so on CPUs",
}
"""Profile of the V2 runner's tables -> which runner that vLLM takes where it may choose."""

EPILOG = """\
exit status:
  0  with these variables, the tables of every runner that this vLLM may take are blocktable's
  1  they are not; what is printed says why
  2  a wrong call, or a variable with an impossible value
"""


def main(argv: Sequence[str]) -> int:
    """Print what would happen and return the exit status: 0 where vLLM would use our tables, 1 where not."""
    Parser(
        prog="blocktable vllm",
        description="Say which vLLM is installed, which model runner it takes, which of its block tables are known, "
        "and what BLOCKTABLE_VLLM and its kin would put in their place. Nothing of vLLM is imported.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    ).parse_args(argv)
    is_switched_on, check = is_on(SWITCH_VARIABLE), make_check()
    folder = vllm_folder()
    if folder is None:
        say("vLLM is not installed in this environment: there are no block tables to replace.")
        return 1
    say(f"vLLM {_version()}, in {folder}")
    are_ours = [_say_plugin(is_switched_on=is_switched_on)]
    for runner, known, tables in _runners():
        are_ours.append(_say_tables(runner, known, tables))
    say(f"checker: {check}" + ("" if check == "off" else "; findings go to vLLM's log"))
    if not is_switched_on:
        say(f"Nothing is replaced: {SWITCH_VARIABLE} is not 1.")
    return 0 if is_switched_on and all(are_ours) else 1


def _version() -> str:
    names = importlib.metadata.packages_distributions().get("vllm", ())
    found = [f"{importlib.metadata.version(name)} ({name})" for name in dict.fromkeys(names)]
    return " and ".join(found) or "of an unknown version"


def _say_plugin(*, is_switched_on: bool) -> bool:
    """Say whether vLLM would load our plugin."""
    allowed = os.environ.get(PLUGINS_VARIABLE)
    is_there = any(entry.name == PLUGIN for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP))
    if not is_there:
        say(f"plugin: vLLM would not find it: {PLUGIN_GROUP!r} has no entry point {PLUGIN!r}; reinstall blocktable")
        return False
    if allowed is not None and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        say(f"plugin: vLLM would not load it: {PLUGINS_VARIABLE}={allowed!r} does not name {PLUGIN!r}")
        return False
    say(f"plugin: vLLM would load it, and {SWITCH_VARIABLE} turns it {'on' if is_switched_on else 'off'}")
    return True


def _runners() -> list[tuple[str, KnownFile, Callable[[], str]]]:
    """Say which runner vLLM takes, and return those that it may take, with what their tables would be."""
    value = os.environ.get(RUNNER_VARIABLE)
    every: list[tuple[str, KnownFile, Callable[[], str]]] = [("V1", V1_FILE, _v1_tables), ("V2", V2_FILE, _v2_tables)]
    if value in ("0", "1"):
        say(f"model runner: V{1 + int(value)}, as {RUNNER_VARIABLE}={value} says")
        return [every[int(value)]]
    try:
        chosen = CHOICES[installed_profile(V2_FILE)]
    except UnsupportedError:
        chosen = "this version is not known; its log says"
    say(f"model runner: vLLM's choice ({chosen}); {RUNNER_VARIABLE}=0 or 1 takes one")
    return every


def _v1_tables() -> str:
    settings = make_settings()
    tails = ", clean tails" if settings.clean_tails else ""
    return f"profile {settings.profile}, mode {settings.mode}{tails}: BlockTable and MultiGroupBlockTable"


def _v2_tables() -> str:
    profile, _ = make_v2_settings()
    return f"profile {profile}: BlockTables"


def _say_tables(runner: str, known: KnownFile, tables: Callable[[], str]) -> bool:
    """Say what would stand in the place of a runner's tables, and return whether it is ours."""
    try:
        found = tables()
    except UnsupportedError as error:
        say(f"{runner} tables: vLLM keeps its own: {error}")
        return False
    backend = os.environ.get(BACKEND_VARIABLE) or "triton on a GPU, numpy on a CPU"
    say(f"{runner} tables: {found} of {known.module}, by the backend {backend}")
    return True
