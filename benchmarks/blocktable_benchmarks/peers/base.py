"""What the adapters of vLLM's two tables share."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from blocktable_benchmarks.callers import Churned, Spelling
from blocktable_benchmarks.gpu import Gpu
from blocktable_benchmarks.workloads import Inputs


class Group:
    """Stands for a context-parallel process group."""

    def __init__(self, world_size: int, rank: int) -> None:
        self.world_size = world_size
        self.rank_in_group = rank


def construct(kind: Any, **arguments: Any) -> Any:
    """Make a `kind` from those arguments that this version of it takes."""
    accepted = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in arguments.items() if name in accepted})


class Impossible(Exception):
    """The peer's own limits do not allow it."""


class PeerLane:
    """A peer's table. Each of its tensors is torch's; on the CPU where there is no GPU."""

    def __init__(self, gpu: Gpu | None) -> None:
        import torch

        self.gpu = gpu
        self.torch = torch
        self.device = torch.device("cpu" if gpu is None else "cuda")
        self.inputs: Inputs
        self.table: Any
        self.step: Callable[[int], object]
        self.untimed = 0.0

    def can_spell(self, spelling: Spelling) -> bool:
        """Whether it has such a call."""
        return True

    def spelling_context(self, key: str) -> AbstractContextManager[Any]:
        """Return what the calls are made in."""
        return nullcontext()

    def spell(self, key: str, churn: list[Churned]) -> Callable[[int], object]:
        """Return the step that does this work, by the table's own calls (`PEER_SPELLINGS`)."""
        self.churn = churn
        found: Callable[[int], object] = self.step if key == "steady" else getattr(self, f"_{key}_step")()
        return found

    def take_inputs(self, inputs: Inputs) -> None:
        """Put the three arrays on the device."""
        self.inputs = inputs
        self.arrays = tuple(
            self.torch.from_numpy(array.copy()).to(self.device)
            for array in (inputs.idx_mapping, inputs.query_start_loc, inputs.positions)
        )

    def first_ids(self, row: int) -> tuple[list[int], ...]:
        """Return what a row holds before the first step."""
        filled = self.inputs.workload.filled
        return tuple(ids[row * filled : (row + 1) * filled].tolist() for ids in self.inputs.fill)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.gpu is not None:
            self.gpu.synchronize()

    def close(self) -> None:
        """Let the memory go."""
        del self.table, self.step, self.arrays
        gc.collect()
        if self.gpu is not None:
            self.gpu.release()

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of each part: not said."""
        return {}
