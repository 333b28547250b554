"""vLLM's general plugin: puts the drop-in's classes in place of vLLM's own where BLOCKTABLE_VLLM=1."""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType
from typing import Any

from blocktable import UnsupportedError
from blocktable_vllm.settings import SWITCH_VARIABLE, is_on, make_settings

MODULE = "vllm.v1.worker.block_table"
CLASSES = ("BlockTable", "MultiGroupBlockTable")
KERNELS = {"0.25.1": "_compute_slot_mapping_kernel", "0.33.0": "_COMPUTE_SLOT_MAPPING_KERNEL"}

logger: logging.Logger = logging.getLogger("blocktable")


def register() -> None:
    """Install the drop-in in the vLLM of this process, if BLOCKTABLE_VLLM=1; vLLM calls this in each of its processes.

    A version that the drop-in does not know is left alone, with one sentence in the log.

    Raises:
        ConfigError: a variable of the drop-in's own has an impossible value.
    """
    if not is_on(SWITCH_VARIABLE):
        return
    try:
        install()
    except UnsupportedError as error:
        logger.warning("%s vLLM keeps its own tables.", error)


def install() -> None:
    """Put the drop-in's classes wherever a loaded module of vLLM names vLLM's own. A second call changes nothing.

    Raises:
        UnsupportedError: the version is not known, or its module is not what that version has; nothing was changed.
    """
    settings = make_settings()
    module = importlib.import_module(MODULE)
    missing = [name for name in (*CLASSES, KERNELS[settings.profile]) if not hasattr(module, name)]
    if missing:
        raise UnsupportedError(f"{MODULE} of vLLM {settings.profile} has no {', '.join(missing)}.")
    if getattr(module, CLASSES[0]).__module__.startswith("blocktable_vllm."):
        return
    from blocktable_vllm.dropin import make_classes

    made = make_classes(settings, module)
    for name in CLASSES:
        _replace(getattr(module, name), getattr(made, name))
    logger.info("Block tables are blocktable's: profile %s, mode %s.", settings.profile, settings.mode)


def _replace(old: Any, new: Any) -> None:
    """Put `new` where loaded modules of vLLM, its plugins too, name `old`."""
    modules: list[Any] = list(sys.modules.values())  # some are no modules, or None
    for module in modules:
        if isinstance(module, ModuleType) and "vllm" in module.__name__:
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)
