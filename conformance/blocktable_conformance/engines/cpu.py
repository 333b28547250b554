"""torch without an accelerator: the host's memory is the device's, and pinned."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_MAKERS = ("tensor", "zeros", "empty", "full")


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def wrapped(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        return make(*args, **kwargs)

    return wrapped


def _itself(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return tensor


def use_the_cpu() -> None:
    """Let an engine's calls for pinned memory and for a CUDA device run here. For a process that runs nothing else."""
    if torch.Tensor.pin_memory is _itself:
        return
    for name in _MAKERS:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = torch.Tensor.cuda = _itself
