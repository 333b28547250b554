"""Which draft tokens are accepted: a fixed function of request and position, so that every run is the same."""

from __future__ import annotations

import math

import numpy as np

from blocktable.typing import IntArray
from blocktable_replay.requests import LiveRequests

ACCEPTANCE = 0.7
"""Chance that a draft token is accepted, if all before it were."""


def num_accepted(live: LiveRequests, handles: IntArray, num_drafts: IntArray) -> IntArray:
    """[n] int64. Draft tokens of each request that are accepted; never more than it still has to generate."""
    chance = uniform(live.uids[handles], live.computed[handles])
    accepted = np.floor(np.log(chance) / math.log(ACCEPTANCE)).astype(np.int64)
    left = np.maximum(live.outputs[handles] - live.generated[handles] - 1, 0)
    fewest: IntArray = np.minimum(np.minimum(accepted, num_drafts), left)
    return fewest


def uniform(first: IntArray, second: IntArray) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return [n] float64 inside (0, 1), a fixed function of two integers (SplitMix64)."""
    mixed = first.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + second.astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    chance: np.ndarray[tuple[int], np.dtype[np.float64]] = (
        (mixed >> np.uint64(12)).astype(np.float64) + 0.5
    ) * 2.0**-52
    return chance
