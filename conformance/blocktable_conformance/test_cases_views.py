"""Batch views that a backend may keep by what changed since it last wrote them: every change must show, once it is due.

One table of two groups, rows of three blocks each, is shown whole, something happens, and it is shown again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from blocktable import KVCacheGroup
from blocktable_conformance.asserts import check
from blocktable_conformance.cases import NO_REQUEST, expect_table, make
from blocktable_conformance.pair import Pair
from blocktable_conformance.subject import HostArray, Subject

GROUPS = KVCacheGroup(block_size=4), KVCacheGroup(block_size=4, sliding_window=5)
EVERY_ROW = range(4)


def shown_once(subject: Subject) -> Pair:
    """Return a pair whose rows k hold blocks 10k + 1 .. 10k + 3, in the second group 100 more, and were shown."""
    rows = [[10 * row + 1, 10 * row + 2, 10 * row + 3] for row in EVERY_ROW]
    pair = make(subject, *GROUPS, width=6, rows=[both(ids) for ids in rows])
    show(pair)
    return pair


def both(ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return a row's ids for the two groups."""
    return list(ids), [block_id + 100 for block_id in ids]


def show(
    pair: Pair, rows: Sequence[int] = EVERY_ROW, *, computed: Sequence[int] | None = None, outputs: int = 0
) -> list[HostArray]:
    """Do a step of one token for each row, which commits; return the whole batch tables, already compared."""
    seen = pair.step(rows, range(len(rows) + 1), [0] * len(rows), num_computed_tokens=computed, outputs=outputs)
    return seen.buffer_tables


def test_changes_of_two_commits_between_gathers(subject: Subject) -> None:
    """The first commit changes the front of a row, the second its end, or the other way round: both show.

    Rules: R9.1, R10.1.
    """
    pair = shown_once(subject)
    pair.do("null_range", 1, 0, 0, 1)
    pair.do("append_row", 2, both([91]))
    pair.commit()
    pair.do("append_row", 1, both([92]))
    pair.do("null_range", 2, 0, 0, 1)
    tables = show(pair)
    expect_table(tables[0], [[1, 2, 3], [0, 12, 13, 92], [0, 22, 23, 91], [31, 32, 33]], "R10.1")
    pair.do("null_range", 3, 0, 1, 2)
    pair.commit()
    pair.commit()
    expect_table(show(pair)[0][3:], [[31, 0, 33]], "R10.1")


def test_low_and_high_changes_of_one_commit(subject: Subject) -> None:
    """A row loses its first block and gets a fourth, in either order, in one commit: both show.

    Rules: R9.1, R10.1.
    """
    pair = shown_once(subject)
    pair.do("append_row", 1, both([91]))
    pair.do("null_range", 1, 0, 0, 1)
    pair.do("null_range", 2, 1, 1, 2)
    pair.do("append_row", 2, both([92]))
    tables = show(pair)
    expect_table(tables[0], [[1, 2, 3], [0, 12, 13, 91], [21, 22, 23, 92], [31, 32, 33]], "R10.1")
    expect_table(tables[1][2:], [[121, 0, 123, 192], [131, 132, 133]], "R10.1")


def test_a_window_moves_while_its_row_changes(subject: Subject) -> None:
    """Columns that the window passes become NULL, those it gives back return, whatever else changed in the row.

    Rules: R10.1, R11.
    """
    pair = shown_once(subject)
    tables = show(pair, computed=[4, 8, 8, 8])
    expect_table(tables[1], [[101, 102, 103], [0, 112, 113], [0, 122, 123], [0, 132, 133]], "R11")
    pair.do("append_row", 1, both([91]))
    pair.do("set_row", 2, both([92, 93, 94]))
    tables = show(pair, computed=[8, 12, 8, 12])
    expect_table(tables[1], [[0, 102, 103], [0, 0, 113, 191], [0, 193, 194], [0, 0, 133]], "R11")
    expect_table(tables[0], [[1, 2, 3], [11, 12, 13, 91], [92, 93, 94], [31, 32, 33]], "R10.1, R11")
    pair.do("append_row", 3, both([95]))
    tables = show(pair, computed=[4, 8, 8, 8])
    expect_table(tables[1], [[101, 102, 103], [0, 112, 113, 191], [0, 193, 194], [0, 132, 133, 195]], "R11")
    tables = show(pair)
    expect_table(tables[1], [[101, 102, 103], [111, 112, 113, 191], [192, 193, 194], [131, 132, 133, 195]], "R11")


def test_a_large_a_small_and_a_large_batch_of_the_same_rows(subject: Subject) -> None:
    """Rows that were out of a batch, or after a padding entry, come back as they are by then.

    Rules: R10.1, R10.2, R10.6.
    """
    pair = shown_once(subject)
    expect_table(show(pair, [0])[0], [[1, 2, 3]], "R10.1, R10.6")
    expect_table(show(pair)[0], [[1, 2, 3], [11, 12, 13], [21, 22, 23], [31, 32, 33]], "R10.1")
    show(pair, [0])
    pair.do("append_row", 1, both([91]))
    pair.do("truncate_row", 2, 1)
    expect_table(show(pair, [0, NO_REQUEST, NO_REQUEST])[0], [[1, 2, 3]], "R10.1, R10.2")
    expect_table(show(pair)[0], [[1, 2, 3], [11, 12, 13, 91], [21], [31, 32, 33]], "R10.1")


def test_two_sets_of_buffers_in_turn_while_rows_change(subject: Subject) -> None:
    """Each set gets all that changed since it was written itself, not since the other one was.

    Rules: R10.1, R17.
    """
    pair = shown_once(subject)
    other = pair.create_buffers()
    show(pair, outputs=other)
    pair.do("null_range", 1, 0, 0, 1)
    expect_table(show(pair)[0][1:2], [[0, 12, 13]], "R10.1")
    pair.do("append_row", 1, both([91]))
    expect_table(show(pair, outputs=other)[0][1:2], [[0, 12, 13, 91]], "R10.1, R17")
    expect_table(show(pair)[0][1:2], [[0, 12, 13, 91]], "R10.1, R17")


def test_a_row_replaced_by_an_equally_long_one(subject: Subject) -> None:
    """Other blocks, as many as before: the count has not changed, and what the row shows has.

    Rules: R10.1.
    """
    pair = shown_once(subject)
    pair.do("set_row", 1, both([91, 92, 93]))
    expect_table(show(pair)[0], [[1, 2, 3], [91, 92, 93], [21, 22, 23], [31, 32, 33]], "R10.1")
    pair.do("truncate_row", 2, 1)
    pair.commit()
    pair.do("append_row", 2, both([94, 95]))
    expect_table(show(pair)[0], [[1, 2, 3], [91, 92, 93], [21, 94, 95], [31, 32, 33]], "R10.1")


def test_shown_rows_change_places(subject: Subject) -> None:
    """Two rows swapped in the table, in the batch, or in both: each batch row shows the blocks of its row.

    Rules: R4, R10.1.
    """
    pair = shown_once(subject)
    pair.do("swap_rows", 0, 1)
    expect_table(show(pair)[0], [[11, 12, 13], [1, 2, 3], [21, 22, 23], [31, 32, 33]], "R10.1")
    expect_table(show(pair, [0, 1, 3, 2])[0], [[11, 12, 13], [1, 2, 3], [31, 32, 33], [21, 22, 23]], "R10.1")
    pair.do("append_row", 3, both([91]))
    pair.do("swap_rows", 3, 2)
    expect_table(show(pair)[0], [[11, 12, 13], [1, 2, 3], [31, 32, 33, 91], [21, 22, 23]], "R10.1")


def test_a_batch_shown_again_after_a_reset(subject: Subject) -> None:
    """`invalidate` makes the batch tables NULL: the same batch must be written again, and so must one that changed.

    Rules: R10.1, R24.
    """
    pair = shown_once(subject)
    pair.do("append_row", 1, both([91]))
    show(pair)
    pair.invalidate()
    expect_table(show(pair)[0], [[1, 2, 3], [11, 12, 13, 91], [21, 22, 23], [31, 32, 33]], "R10.1, R24")
    pair.do("append_row", 2, both([92]))
    pair.invalidate()
    expect_table(show(pair)[0], [[1, 2, 3], [11, 12, 13, 91], [21, 22, 23, 92], [31, 32, 33]], "R10.1, R24")


@pytest.mark.parametrize("padding", ["empty", "occupied", "cleared"])
def test_appends_outlive_a_look_at_padded_rows_in_place(subject: Subject, padding: str) -> None:
    """Rows appended to in any order, then looked at in place without a commit: a step sends the right block to each.

    The look is refused where a padding row holds blocks, or lost some that the device still has.

    Rules: R9.1, R10.1, R10.10, R12.
    """
    pair = make(subject, *GROUPS, rows=[both([1]), both([2]), both([]), both([3] * (padding != "empty"))])
    pair.commit()
    pair.do("append_rows", *_as_arrays([1, 0], [21, 22]))
    if padding == "cleared":
        pair.do("clear_row", 3)
    taken = pair.gather_in_place(2, 4)
    check(
        taken == (padding == "empty"), "R10.10", f"padding rows are {padding}, and the look at them was taken: {taken}"
    )
    seen = pair.step([0, 1], [0, 2, 4], [3, 4, 0, 5])
    expect_table(seen.block_tables[0], [[1, 22], [2, 21]], "R9.1, R10.1")
    slots = seen.slot_mappings[1].tolist()[:4]
    check(
        slots == [407, 488, 408, 485], "R9.1, R12", f"the second group's slots must be 407, 488, 408, 485, got {slots}"
    )


def _as_arrays(rows: Sequence[int], ids: Sequence[int]) -> tuple[Any, Any, Any]:
    """Return the arguments of a bulk call of one block a row as arrays, the kind that the compiled host path takes."""
    return (
        np.array(rows, np.int64),
        [np.array(group, np.int32) for group in both(ids)],
        np.ones(len(rows), np.int64),
    )
