"""Context parallelism: which rank holds which token (R18-R20)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from blocktable.checks import refuse_mask
from blocktable.errors import ConfigError, DtypeError


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """One rank's share of every request's tokens: `interleave_size` tokens each in turn.

    Args:
        world_size: ranks that share one request's KV cache.
        rank: this one, `0 .. world_size - 1`.
        interleave_size: tokens a rank holds in a row before the next rank's turn.

    Raises:
        ConfigError: a value is not an int or out of range.

    Rules: R18, R19, R20.
    """

    world_size: int = 1
    rank: int = 0
    interleave_size: int = 1

    def __post_init__(self) -> None:
        for name, minimum in (("world_size", 1), ("rank", 0), ("interleave_size", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
                raise ConfigError(f"ContextParallel: {name} must be an int of at least {minimum}, got {value!r}.")
            if value >= 2**31:
                raise ConfigError(f"ContextParallel: {name} must be below 2**31, got {value}.")
            object.__setattr__(self, name, int(value))
        if self.rank >= self.world_size:
            raise ConfigError(
                f"ContextParallel: rank {self.rank} is outside a world of {self.world_size}; ranks go from 0 to "
                f"{self.world_size - 1}."
            )

    def local_lengths(self, seq_lens: Any) -> Any:
        """Return how many of the first `seq_lens` tokens this rank holds.

        Args:
            seq_lens: int, or [n] integer array (numpy, torch, CuPy). Tokens of each request.

        Returns:
            The same kind, shape and dtype as `seq_lens`.

        Rules: R19.
        """
        if isinstance(seq_lens, bool) or not (isinstance(seq_lens, int) or hasattr(seq_lens, "clip")):
            raise DtypeError(f"seq_lens must be an int or an integer array, got {type(seq_lens).__name__}.")
        if isinstance(seq_lens, np.ndarray | np.integer):  # in 64 bits: a turn need not fit a small dtype
            refuse_mask("seq_lens", seq_lens)
            if seq_lens.dtype.kind not in "iu":
                raise DtypeError(f"seq_lens must hold integers, got dtype {seq_lens.dtype}.")
            return self._local_lengths(seq_lens.astype(np.int64)).astype(seq_lens.dtype)
        if getattr(getattr(seq_lens, "dtype", None), "is_floating_point", False):
            raise DtypeError(f"seq_lens must hold integers, got dtype {seq_lens.dtype}.")
        return self._local_lengths(seq_lens)

    def _local_lengths(self, seq_lens: Any) -> Any:
        turn, first = self.world_size * self.interleave_size, self.rank * self.interleave_size
        rest, last = seq_lens % turn, first + self.interleave_size
        # Clipped before the subtraction: unsigned lengths must not wrap.
        rest = min(max(rest, first), last) if isinstance(seq_lens, int) else rest.clip(first, last)
        return seq_lens // turn * self.interleave_size + (rest - first)

    @classmethod
    def from_process_groups(cls, *, dcp: Any = None, pcp: Any = None, interleave_size: int = 1) -> ContextParallel:
        """Return this process's share from its torch.distributed groups.

        The total rank is `pcp_rank * dcp_world + dcp_rank` and the total world the product. Falls back to a world of
        one where torch.distributed is not initialised; a group that is None counts as a world of one.

        Args:
            dcp: torch.distributed.ProcessGroup of the decode ranks, or any object with `size()` and `rank()`.
            pcp: the same for the prefill ranks.
            interleave_size: tokens.

        Rules: R20.
        """
        dcp_world, dcp_rank = _world_and_rank(dcp)
        pcp_world, pcp_rank = _world_and_rank(pcp)
        return cls(
            world_size=pcp_world * dcp_world, rank=pcp_rank * dcp_world + dcp_rank, interleave_size=interleave_size
        )


def _world_and_rank(group: Any) -> tuple[int, int]:
    return (1, 0) if group is None else (int(group.size()), int(group.rank()))
