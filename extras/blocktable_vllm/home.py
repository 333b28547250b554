"""What the drop-in looks up by name at call time, as vLLM's module does; installed in vLLM it looks there instead."""

from __future__ import annotations

import math
import sys
from enum import Enum
from typing import Any

import torch


def get_dcp_group() -> Any:
    """Return vLLM's group of decode ranks; AssertionError: there is none yet."""
    return _group("get_dcp_group")


def get_pcp_group() -> Any:
    """Return vLLM's group of prefill ranks; AssertionError: there is none yet."""
    return _group("get_pcp_group")


def get_total_cp_world_size() -> int:
    """Return how many ranks share a request's tokens."""
    world_size = 1
    for getter in (get_pcp_group, get_dcp_group):
        try:
            world_size *= getter().world_size
        except AssertionError:  # torch.distributed is not initialised
            continue
    return world_size


def _group(name: str) -> Any:
    distributed: Any = sys.modules.get("vllm.distributed")
    getter = getattr(distributed, name, None)
    if getter is None:
        raise AssertionError("vLLM is not loaded: there are no ranks.")
    return getter()


class CpuGpuBuffer:
    """A host tensor, its device copy, and the host's memory as numpy.

    Args:
        size: of each dimension.
        dtype: torch dtype.
        device: of the device copy.
        pin_memory: whether the host's memory is pinned.
        with_numpy: whether there is a numpy view.
    """

    def __init__(self, *size: int, dtype: Any, device: Any, pin_memory: bool = False, with_numpy: bool = True) -> None:
        self.cpu: Any = torch.zeros(*size, dtype=dtype, pin_memory=pin_memory)
        self.gpu: Any = torch.zeros_like(self.cpu, device=device)
        if with_numpy:
            self.np: Any = self.cpu.numpy()

    def copy_to_gpu(self, n: int | None = None) -> Any:
        """Copy the first n entries (None: all) to the device, without a wait, and return them there."""
        return self.gpu[:n].copy_(self.cpu[:n], non_blocking=True)

    def copy_to_cpu(self, n: int | None = None) -> Any:
        """Copy the first n entries (None: all) to the host, without a wait, and return them there."""
        return self.cpu[:n].copy_(self.gpu[:n], non_blocking=True)


class SlotMappingMode(Enum):
    """Whether a group's tokens have slots (profile 0.33.0)."""

    TOKEN_TO_KV_SLOT = "token_to_kv_slot"
    NONE = "none"


def get_block_table_width(max_num_blocks: int, block_size: int, *, token_alignment: int | None = 128) -> int:
    """Return the columns of a row, rounded up so that they hold a multiple of `token_alignment` tokens.

    Args:
        max_num_blocks: columns needed.
        block_size: tokens in a column.
        token_alignment: tokens. None: no rounding.

    Raises:
        ValueError: the alignment is not positive.
    """
    if token_alignment is None:
        return max_num_blocks
    if token_alignment <= 0:
        raise ValueError("token_alignment must be positive")
    step = token_alignment // math.gcd(token_alignment, block_size)
    return -(-max_num_blocks // step) * step


class OwnKernel:
    """Stands under the names of vLLM's slot kernel, so that another one can be put there; it is never launched."""

    def __getitem__(self, grid: Any) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: slots come from `compute_slot_mapping`."""
        from blocktable import UnsupportedError

        raise UnsupportedError(
            "The drop-in launches its backend's own slot kernel: call compute_slot_mapping. This name is here to be "
            "replaced by a kernel of vLLM's signature, which is then called."
        )


_compute_slot_mapping_kernel: Any = OwnKernel()
_COMPUTE_SLOT_MAPPING_KERNEL: Any = _compute_slot_mapping_kernel
