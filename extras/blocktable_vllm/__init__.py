"""vLLM's V1 block tables over ours: the same calls, the same effects, our kernels (docs/vllm.md).

    from blocktable_vllm import drop_in
    classes = drop_in(profile="0.25.1", mode="fast", backend="triton")
    classes.MultiGroupBlockTable(...)

`BLOCKTABLE_VLLM=1` puts them into an installed vLLM instead. torch is imported by `drop_in`, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blocktable_vllm.plugin import register
from blocktable_vllm.settings import Settings, make_check, make_settings, make_v2_settings

if TYPE_CHECKING:
    from blocktable_vllm.dropin import DropIn

__all__ = ["Settings", "drop_in", "drop_in_v2", "make_settings", "register"]


def drop_in(
    profile: str | None = None,
    mode: str | None = None,
    backend: str | None = None,
    clean_tails: bool | None = None,
    check: str | None = None,
) -> DropIn:
    """Return the classes `BlockTable` and `MultiGroupBlockTable`; the same ones for the same settings.

    Args:
        profile: "0.25.1" or "0.33.0". None: that of the vLLM that is loaded or installed.
        mode: "fast" or "strict". None: BLOCKTABLE_VLLM_MODE, else "fast".
        backend: name of the backend. None: BLOCKTABLE_VLLM_BACKEND, else "triton" on a GPU and "numpy" on the CPU.
        clean_tails: whether blocks that a row no longer holds become NULL immediately.
            None: BLOCKTABLE_VLLM_CLEAN_TAILS, else no.
        check: "off", "host" or "device": whether calls are checked, and findings logged. None: BLOCKTABLE_VLLM_CHECK,
            else "off".

    Raises:
        UnsupportedError: there is no such profile, or none is named and vLLM is not there.
        ConfigError: a setting is impossible.
    """
    from blocktable_vllm.dropin import make_classes  # imports torch

    return make_classes(make_settings(profile, mode, backend, clean_tails), check=make_check(check))


def drop_in_v2(profile: str | None = None, backend: str | None = None, check: str | None = None) -> Any:
    """Return the class `BlockTables`, which vLLM's V2 runner makes its tables of; the same one for the same arguments.

    Args:
        profile: "0.25.1", "0.32.0" or "0.33.0". None: that of the vLLM that is loaded or installed.
        backend, check: as `drop_in`.

    Raises:
        UnsupportedError: there is no such profile, or none is named and vLLM is not there.
        ConfigError: a setting is impossible.
    """
    from blocktable_vllm.dropin import make_v2_class  # imports torch

    return make_v2_class(*make_v2_settings(profile, backend), make_check(check))
