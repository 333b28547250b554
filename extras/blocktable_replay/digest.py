"""Digests: of slots by request and position, to compare other row layouts; of outputs, bit for bit, for recordings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from blocktable import IntArray
from blocktable_replay.plan import StepPlan

_MULTIPLIERS = [np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)]
_FINAL = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)
_CHAIN = 0x94D049BB133111EB
_MASK = 2**64 - 1


def slot_digest(digest: int, plan: StepPlan, slots: Sequence[IntArray]) -> int:
    """Return the digest after one more step.

    Within a step the order of tokens does not matter, between steps it does.

    Args:
        digest: before the step; 0 at first.
        slots: for each group a slot buffer that a backend wrote.
    """
    requests = np.repeat(plan.requests.astype(np.uint64), np.diff(plan.query_start_loc))
    tokens = requests * _MULTIPLIERS[0] + plan.positions.astype(np.uint64) * _MULTIPLIERS[1]
    for buffer in slots:
        mixed = tokens + buffer[: tokens.size].astype(np.uint64) * _MULTIPLIERS[2]
        mixed = (mixed ^ (mixed >> _SHIFT)) * _FINAL
        mixed ^= mixed >> _SHIFT
        digest = (digest * _CHAIN + int(mixed.sum(dtype=np.uint64)) + 1) & _MASK
    return digest


def output_digest(arrays: Iterable[IntArray]) -> bytes:
    """Return 16 bytes that differ when any entry, shape or dtype of the arrays does."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()
