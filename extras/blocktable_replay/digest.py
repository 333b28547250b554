"""Digests: of slots by request and position, to compare other row layouts; of outputs, bit for bit, for recordings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from blocktable.typing import IntArray
from blocktable_replay.plan import StepPlan


def slot_digest(digest: bytes, plan: StepPlan, slots: Sequence[IntArray]) -> bytes:
    """Return the digest, 8 bytes, after one more step.

    Within a step the order of tokens does not matter, between steps it does.

    Args:
        digest: before the step; empty at first.
        slots: for each group a slot buffer that a backend wrote.
    """
    requests = np.repeat(plan.requests, np.diff(plan.query_start_loc))
    order = np.lexsort((plan.positions, requests))
    tokens = [requests, plan.positions, *(buffer[: requests.size] for buffer in slots)]
    return hashlib.blake2b(digest + np.array(tokens, np.int64)[:, order].tobytes(), digest_size=8).digest()


def output_digest(arrays: Iterable[IntArray]) -> bytes:
    """Return 16 bytes that differ when any entry, shape or dtype of the arrays does."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()
