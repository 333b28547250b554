"""Makes the classes of a drop-in."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from blocktable_vllm import home as own_home
from blocktable_vllm import tables, tracked, v2
from blocktable_vllm.check import V1Check, V2Check, checked
from blocktable_vllm.settings import CheckMode, Settings

CLASSES: dict[tuple[str, str], tuple[Any, Any]] = {
    ("0.25.1", "strict"): (tables.Table0251, tables.Multi0251),
    ("0.33.0", "strict"): (tables.Table0330, tables.Multi0330),
    ("0.25.1", "fast"): (tracked.TrackedTable0251, tracked.TrackedMulti0251),
    ("0.33.0", "fast"): (tracked.TrackedTable0330, tracked.TrackedMulti0330),
}

V2_CLASSES: dict[str, Any] = {"0.25.1": v2.Tables0251, "0.32.0": v2.Tables0320, "0.33.0": v2.Tables0330}


class DropIn(NamedTuple):
    """The two classes, with vLLM's signatures.

    Attributes:
        BlockTable: one KV cache group.
        MultiGroupBlockTable: all groups, on one arena.
        settings: what they were made for.
    """

    BlockTable: Any
    MultiGroupBlockTable: Any
    settings: Settings


@cache
def make_classes(settings: Settings, home: Any = own_home, check: CheckMode = "off") -> DropIn:
    """Return the classes for these settings.

    Args:
        settings: profile, mode, backend.
        home: the module whose names they look up at call time: vLLM's own where they are installed in vLLM.
        check: whether the calls of `MultiGroupBlockTable` are checked.
    """
    table, multi = CLASSES[settings.profile, settings.mode]
    if check != "off":
        multi = checked(multi, V1Check, check)
    names: dict[str, Any] = {
        "__home__": home,
        # A plain function, as it is where Triton is off, would be bound as a method.
        "__own_kernel__": staticmethod(getattr(home, table._kernel_name)),
        "__settings__": settings,
        "__module__": __name__,
        "__doc__": table.__doc__,
    }
    table_type = type("BlockTable", (table,), names)
    multi_type = type(
        "MultiGroupBlockTable",
        (multi,),
        {"__table_type__": table_type, "__module__": __name__, "__doc__": multi.__doc__},
    )
    return DropIn(table_type, multi_type, settings)


@cache
def make_v2_class(profile: str, backend: str | None, check: CheckMode = "off") -> Any:
    """Return the V2 runner's class of a profile over a backend. None: the device's default."""
    base = V2_CLASSES[profile]
    if check != "off":
        base = checked(base, V2Check, check)
    return type("BlockTables", (base,), {"__backend__": backend, "__module__": __name__, "__doc__": base.__doc__})
