"""vLLM's general plugin: puts the drop-in's classes in place of vLLM's own where BLOCKTABLE_VLLM=1."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from blocktable import UnsupportedError
from blocktable_vllm.settings import (
    SWITCH_VARIABLE,
    V1_FILE,
    V2_FILE,
    is_on,
    make_check,
    make_settings,
    make_v2_settings,
)

CLASSES = ("BlockTable", "MultiGroupBlockTable")
V2_CLASS = "BlockTables"
KERNELS = {"0.25.1": "_compute_slot_mapping_kernel", "0.33.0": "_COMPUTE_SLOT_MAPPING_KERNEL"}

logger: logging.Logger = logging.getLogger("vllm.blocktable")
"""Below `vllm`: vLLM gives its handlers to that logger alone."""


def register() -> None:
    """Install the drop-in in the vLLM of this process, if BLOCKTABLE_VLLM=1; vLLM calls this in each of its processes.

    The process that makes tables says so in vLLM's log. Each runner's tables that the drop-in does not know are left
    alone, with one sentence there.

    Raises:
        ConfigError: a variable of the drop-in's own has an impossible value.
    """
    if not is_on(SWITCH_VARIABLE):
        return
    runners: tuple[tuple[str, Callable[[], str | None]], ...] = (("V1", install), ("V2", install_v2))
    for runner, install_one in runners:
        try:
            install_one()
        except UnsupportedError as error:
            logger.warning("%s vLLM keeps its own tables in the %s runner.", error, runner)


def install() -> str | None:
    """Put the V1 runner's classes wherever a loaded module of vLLM names vLLM's own. A second call changes nothing.

    Returns:
        What was installed, in words; None: it was there already.

    Raises:
        UnsupportedError: the file is not known, or its module is not what the file says; nothing was changed.
    """
    settings, check = make_settings(), make_check()
    module = _import(V1_FILE.module)
    _require_names(module, (*CLASSES, KERNELS[settings.profile]))
    if _is_ours(getattr(module, CLASSES[0])):
        return None
    from blocktable_vllm.dropin import make_classes

    made = make_classes(settings, module, check)
    for name in CLASSES:
        _replace(getattr(module, name), getattr(made, name))
    said = f"profile {settings.profile}, mode {settings.mode}{_checked(check)}"
    _say_when_made(made.MultiGroupBlockTable, "V1", said)
    return said


def install_v2() -> str | None:
    """Put the V2 runner's class wherever a loaded module of vLLM names vLLM's own. Returns and raises: as `install`."""
    (profile, backend), check = make_v2_settings(), make_check()
    module = _import(V2_FILE.module)
    _require_names(module, (V2_CLASS,))
    if _is_ours(getattr(module, V2_CLASS)):
        return None
    from blocktable_vllm.dropin import make_v2_class

    made, said = make_v2_class(profile, backend, check), f"profile {profile}{_checked(check)}"
    _replace(getattr(module, V2_CLASS), made)
    _say_when_made(made, "V2", said)
    return said


def _say_when_made(kind: Any, runner: str, said: str) -> None:
    """Log what was installed with the first tables of a class: plugins are loaded before vLLM has set its log up."""
    make = kind.__init__

    @wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if kind.__init__ is init:
            kind.__init__ = make
            logger.info("Block tables of the %s runner are blocktable's: %s.", runner, said)

    kind.__init__ = init


def _checked(check: str) -> str:
    return "" if check == "off" else f", checked on the {check}"


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(f"{name} cannot be imported: {error}.") from error


def _require_names(module: ModuleType, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise UnsupportedError(f"{module.__name__} has no {', '.join(missing)}.")


def _is_ours(found: Any) -> bool:
    return str(found.__module__).startswith("blocktable_vllm.")


def _replace(old: Any, new: Any) -> None:
    """Put `new` where loaded modules of vLLM, its plugins too, name `old`."""
    modules: list[Any] = list(sys.modules.values())  # some are not modules, or None
    for module in modules:
        if isinstance(module, ModuleType) and "vllm" in module.__name__:
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)
