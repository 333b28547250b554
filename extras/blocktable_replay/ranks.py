"""A replay in several processes, one for each context-parallel rank: together they own every token once (R18)."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from blocktable import BlockTableConfig, ContextParallel
from blocktable.cli import UsageError
from blocktable.typing import IntArray
from blocktable_replay.plan import StepPlan


class Ranks:
    """The processes that torchrun has started, joined over gloo.

    Args:
        size: how many the user wants.

    Attributes:
        num_tokens: tokens whose owners were counted, in each sharded group.

    Raises:
        UsageError: torchrun has not started so many; torch is not installed.
    """

    def __init__(self, size: int) -> None:
        if os.environ.get("WORLD_SIZE") != str(size) or "RANK" not in os.environ:
            raise UsageError(
                f"--ranks {size} needs a process for each rank, and finds WORLD_SIZE "
                f"{os.environ.get('WORLD_SIZE', 'not set')}; run torchrun --nproc-per-node {size} -m blocktable replay "
                f"--ranks {size} ..."
            )
        try:  # by name: the replay itself does without torch
            self._torch: Any = importlib.import_module("torch")
            self._distributed: Any = importlib.import_module("torch.distributed")
        except ImportError as error:
            raise UsageError(f"--ranks compares over torch.distributed ({error}); install torch.") from None
        self._distributed.init_process_group("gloo")
        self._rank, self._size = int(os.environ["RANK"]), size
        self.num_tokens: int = 0

    def share(self, given: ContextParallel) -> ContextParallel:
        """Return this process's share of the tokens.

        Raises:
            UsageError: the user has said a world or a rank too.
        """
        if given.world_size != 1:
            raise UsageError("--ranks says world_size and rank; leave them out of --context-parallel.")
        return dataclasses.replace(given, world_size=self._size, rank=self._rank)

    def require_sharded(self, config: BlockTableConfig) -> None:
        """Raise UsageError where no group is sharded: nothing would be proved."""
        if not any(group.is_sharded for group in config.groups):
            raise UsageError(f"--ranks {self._size} needs a sharded group, and all are replicated; give a linear one.")

    def broken_by_owners(self, plan: StepPlan, config: BlockTableConfig, slots: Sequence[IntArray]) -> list[str]:
        """Return a sentence for each group in which a token of a step has more owners than one, or none.

        A collective call: each rank makes it in each step.

        Args:
            plan: the step.
            config: the geometry.
            slots: for each group a slot buffer that a backend wrote.
        """
        pads = [group.pad_slot_id for group in config.groups]
        owned = np.stack([buffer != pad for buffer, pad in zip(slots, pads, strict=True)]).astype(np.int32)
        owners = owned.copy()  # [num_groups, entries of a buffer]. Ranks that have a slot for the token
        self._distributed.all_reduce(self._torch.from_numpy(owners))
        writers = np.repeat(plan.requests, np.diff(plan.query_start_loc))
        wanted = np.zeros_like(owners[0])
        wanted[: writers.size] = writers >= 0
        broken = []
        for index, group in enumerate(config.groups):
            expected = wanted if group.is_sharded else owned[index] * self._size
            self.num_tokens += int(wanted.sum()) if group.is_sharded else 0
            broken += [
                f"group {index}, token {token}: {owners[index, token]} ranks of {self._size} have a slot for it, "
                f"expected {expected[token]} (R18)"
                for token in np.flatnonzero(owners[index] != expected)[:1].tolist()
            ]
        return broken

    def note(self) -> str:
        """Return what was looked at, in a line."""
        return f"{self.num_tokens:,} tokens in sharded groups, whose owners among {self._size} ranks were counted"

    def close(self) -> None:
        """Leave the other processes."""
        self._distributed.destroy_process_group()
