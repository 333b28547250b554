"""What a new backend gets wrong first, run first: each failure names the token, its row, its position and the clause.

The later layers find the same faults by what they do elsewhere, and would blame that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blocktable import KVCacheGroup
from blocktable_conformance.asserts import check_slots
from blocktable_conformance.cases import make
from blocktable_conformance.pair import Pair
from blocktable_conformance.subject import Subject

DTYPES = ("int32", "int32", "int64")
"""Of idx_mapping, query_start_loc and positions."""

B4 = KVCacheGroup(block_size=4)


def filled(subject: Subject) -> Pair:
    """Return a pair whose rows 0 and 1 hold one and two blocks of four."""
    pair = make(subject, B4, rows=[[2], [5, 7]])
    pair.commit()
    return pair


def check_tokens(pair: Pair, inputs: Sequence[Any], batch: tuple[list[int], list[int], list[int]], rules: str) -> None:
    """Compute the slots of a batch, and compare them with the oracle's.

    Args:
        pair: a table and its oracle.
        inputs, batch: idx_mapping, query_start_loc and positions, as the table gets them and as lists.
        rules: what a wrong slot breaks besides the rule that gave it.
    """
    slots = pair.subject.to_host(pair.table.compute_slot_mappings(*inputs)[0])
    expected = pair.oracle.slots(*batch, len(slots))[0]
    check_slots(slots, expected, dtype="int64", group=0, shape=pair.oracle.shapes[0], rules=rules)


def test_a_column_ends_at_the_filled_count(subject: Subject) -> None:
    """Positions in the last column that a row holds, in the first one after it, and in the last of the width.

    Rules: R13.
    """
    pair = filled(subject)
    for row, positions in ((0, [3, 4, 15]), (1, [7, 8, 15])):
        pair.compute([row], [0, 3], positions)


def test_the_first_token_of_a_request_is_its_own(subject: Subject) -> None:
    """And the last one of the request before it is not; empty requests lie at the front and in between.

    Rules: R13.
    """
    batch = [1, 0, 1, 1], [0, 0, 2, 2, 4], [0, 1, 0, 1]
    inputs = [subject.device_array(values, dtype) for values, dtype in zip(batch, DTYPES, strict=True)]
    check_tokens(filled(subject), inputs, batch, "R13")


def test_what_from_host_made_is_the_devices_own(subject: Subject) -> None:
    """The host's arrays are used again after `from_host`, which copies: a token keeps the position that it had then.

    Rules: R10.8, R13.
    """
    batch = [0], [0, 2], [8, 4]
    host = [np.array(values, dtype) for values, dtype in zip(batch, DTYPES, strict=True)]
    inputs = [subject.backend.from_host(array) for array in host]
    host[2][:] = 0
    check_tokens(filled(subject), inputs, batch, "R10.8")
