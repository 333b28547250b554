"""Cases E: edits inside rows, forks and remaps, what they send, and looks at what rows hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktable import BlockTable, BlockTableConfig, BlockTableError, KVCacheGroup
from blocktable_conformance.asserts import check
from blocktable_conformance.cases import expect_counts, expect_host, make
from blocktable_conformance.oracle import NULL
from blocktable_conformance.pair import Pair
from blocktable_conformance.strategies import bulk_calls, configs, distinct_rows, mappings, replacements
from blocktable_conformance.subject import Subject

B16 = KVCacheGroup(block_size=16)
B32 = KVCacheGroup(block_size=32, kernel_block_size=16)

RANGE_BYTES, ENTRY_BYTES = 12, 4
"""What `num_bytes_sent` counts for a range, and for each of its entries."""


def sent_entries(subject: Subject, pair: Pair) -> list[int]:
    """Commit, check the device, and return the entries of the arena that were sent, in order."""
    with subject.recording() as sent:
        pair.commit()
    return sorted(
        offset + index
        for writes in sent
        for offset, length in zip(writes.offsets, writes.lengths, strict=True)
        for index in range(length)
    )


def expect_sent(subject: Subject, pair: Pair, cells: Sequence[tuple[int, int, int]], ranges: int) -> None:
    """Commit and check what is sent.

    Args:
        subject: the backend under test.
        pair: table and oracle.
        cells: (group, row, column) of every entry, in order; of the filled counts (-1, group, row).
        ranges: how many ranges they are sent in.
    """
    arena, before = pair.config.arena, pair.table.num_bytes_sent
    places = [arena.view(np.arange(arena.size), group)[row, column] for group, row, column in cells]
    got = sent_entries(subject, pair)
    check(got == places, "R9.8", f"the entries {places} of the arena must be sent, got {got}.")
    num_bytes = pair.table.num_bytes_sent - before
    expected = RANGE_BYTES * ranges + ENTRY_BYTES * len(cells)
    check(num_bytes == expected, "R9.6", f"{expected} bytes must be sent, got {num_bytes}.")


def test_a_block_inside_a_row_is_replaced(subject_once: Subject) -> None:
    """Row [5, 6, 7] becomes [5, 9, 7], counts stay, and one entry is sent.

    Cases: E1. Rules: R4, R9.8.
    """
    pair = make(subject_once, B16, rows=[[5, 6, 7], [6]])
    pair.commit()
    pair.do("replace_blocks", 0, 0, 1, [9])
    expect_host(pair, [[5, 9, 7], [6]], "R4")
    expect_counts(pair, [3, 1], "R4")
    expect_sent(subject_once, pair, [(0, 0, 1)], 1)
    pair.do("replace_blocks", 0, 0, 0, [5, 8, 7])
    expect_sent(subject_once, pair, [(0, 0, 1)], 1)


def test_replaced_blocks_expand_and_leave_other_groups(subject_once: Subject) -> None:
    """Blocks 1 and 2 of a row of k = 2 are columns 2 to 5, and the second group keeps what it has.

    Cases: E1. Rules: R2, R4.
    """
    pair = make(subject_once, B32, B16, rows=[([1, 2, 3], [4, 5])])
    pair.do("replace_blocks", 0, 0, 1, np.array([7, 8], np.int32))
    expect_host(pair, [[2, 3, 14, 15, 16, 17]], "R2, R4")
    expect_host(pair, [[4, 5]], "R4", group=1)
    pair.do("replace_blocks", 0, 1, 0, range(8, 10))
    expect_host(pair, [[8, 9]], "R4", group=1)
    nothings: list[Any] = [None, [], ()]
    for nothing in nothings:
        pair.do("replace_blocks", 0, 0, 3, nothing)
    pair.commit()


def test_blocks_of_many_rows_are_replaced_at_once(subject_once: Subject) -> None:
    """Each row gets its share of the flat ids, from a start of its own; a share may be nothing.

    Cases: E1. Rules: R4.
    """
    pair = make(subject_once, B16, rows=[[1, 2, 3], [4], [5, 6]])
    pair.do("replace_block_ranges", [2, 0, 1], 0, [0, 1, 1], [9, 8, 7], [1, 2, 0])
    expect_host(pair, [[1, 8, 7], [4], [9, 6]], "R4")
    expect_counts(pair, [3, 1, 2], "R4")
    pair.do("replace_block_ranges", [], 0, [], None, [])
    pair.commit()


def test_a_replacement_outside_the_row_is_refused_whole(subject_once: Subject) -> None:
    """A start below 0, an end past the blocks held, a wrong id or group: nothing changes.

    Cases: E2. Rules: R4, R6, R7.
    """
    pair = make(subject_once, B16, KVCacheGroup(block_size=16, num_blocks=10), rows=[([1, 2], [3]), ([4], [])])
    message = pair.refuse("ArgumentError", "replace_blocks", 0, 0, 1, [5, 6])
    for part in ("row 0", "group 0", "2"):
        check(part in message, "R4", f"the error must name row, group and blocks held: {message}")
    for error, operation, *args in (
        ("ArgumentError", "replace_blocks", 0, 0, -1, [5]),
        ("ArgumentError", "replace_blocks", 0, 0, 3, []),
        ("ArgumentError", "replace_blocks", 2, 0, 0, [5]),
        ("ArgumentError", "replace_blocks", 0, 2, 0, [5]),
        ("ArgumentError", "replace_blocks", 0, -1, 0, [5]),
        ("ArgumentError", "replace_blocks", 0, 0, 0, [0]),
        ("ArgumentError", "replace_blocks", 0, 1, 0, [10]),
        ("ArgumentError", "replace_blocks", 0, 0, 0, [5, 2**31]),
        ("ArgumentError", "replace_blocks", 0, 0, 2**63 - 1, [5]),
        ("RowIndexError", "replace_blocks", 4, 0, 0, [5]),
        ("DtypeError", "replace_blocks", True, 0, 0, [5]),
        ("DtypeError", "replace_blocks", 0, 0, 0, [True]),
        ("DtypeError", "replace_blocks", 0, 0, 0, [5.0]),
        ("DtypeError", "replace_blocks", 0, 0, 0, [[5]]),
        ("ArgumentError", "replace_block_ranges", [0, 1], 0, [1, 1], [5, 6], [1, 1]),
        ("ArgumentError", "replace_block_ranges", [0, 0], 0, [0, 1], [5, 6], [1, 1]),
        ("ArgumentError", "replace_block_ranges", [0, 1], 0, [0, 0], [5, 6], [1, 2]),
        ("ArgumentError", "replace_block_ranges", [0, 1], 0, [0, 0], [5, 6], [3, -1]),
        ("ArgumentError", "replace_block_ranges", [0, 1], 0, [0], [5, 6], [1, 1]),
        ("ArgumentError", "replace_block_ranges", [0, 1], 0, [0, 0], [5, 6], [2]),
        ("RowIndexError", "replace_block_ranges", [0, 4], 0, [0, 0], [5, 6], [1, 1]),
    ):
        pair.refuse(error, operation, *args)
    pair.commit()


def test_a_hole_is_filled_and_made_by_a_replacement(subject_once: Subject) -> None:
    """A block that a window released comes back; where the group takes NULL, a replacement may also leave a hole.

    Cases: E2. Rules: R4, R7.
    """
    pair = make(subject_once, KVCacheGroup(block_size=16, allow_null=True), rows=[[1, 2, 3]])
    pair.do("null_range", 0, 0, 0, 2)
    pair.do("replace_blocks", 0, 0, 1, [7])
    expect_host(pair, [[NULL, 7, 3]], "R4, R7")
    pair.do("replace_blocks", 0, 0, 2, [NULL])
    expect_host(pair, [[NULL, 7, NULL]], "R4, R7")
    expect_counts(pair, [3], "R4")
    pair.commit()


@pytest.mark.parametrize("null", [-1, 0, 3])
def test_holes_have_the_id_of_the_groups_null_block(subject_once: Subject, null: int) -> None:
    """With null block -1, 0 or 3 a hole is that id, is not common and is not an old id; every other id is real, 0 too.

    Cases: E2. Rules: R4, R5, R7.
    """
    group = KVCacheGroup(block_size=32, kernel_block_size=16, num_blocks=9, null_block_id=null, allow_null=True)
    real = 0 if null else 1
    pair = make(subject_once, group, rows=[[real, 5, 6], [real, null, 6]])
    filler = -1 if null == -1 else 2 * null
    pair.do("null_range", 0, 0, 1, 2)
    check(pair.table.block_ids(0, 0).tolist() == [real, null, 6], "R4", "a hole must have the id of the null block.")
    check(pair.table.common_blocks([0, 1], 0) == 1, "R4", "a hole is not common.")
    pair.look_at(0, [0, 1])
    pair.refuse("ArgumentError", "remap_blocks", 0, [null], [5])
    pair.do("remap_blocks", 0, [real, 6], [7, null])
    columns = pair.table.host_table(0)[0].tolist()
    check(columns == [14, 15, *[filler] * 6], "R4, R5", f"block 6 must be a hole of {filler}, got {columns}")
    pair.do("replace_blocks", 1, 0, 0, [null, real])
    pair.do("set_row", 0, [null, real])
    pair.commit()


def test_copies_read_every_source_first(subject_once: Subject) -> None:
    """Rows [1, 5], [1, 6]; sources 1, 0, 0 over 0, 1, 2 give [1, 6], [1, 5], [1, 5], and the shared block is not sent.

    Cases: E3. Rules: R4, R5, R9.8.
    """
    pair = make(subject_once, B16, rows=[[1, 5], [1, 6], [1, 7, 8]])
    pair.commit()
    pair.do("copy_rows", [1, 0, 0], [0, 1, 2])
    expect_host(pair, [[1, 6], [1, 5], [1, 5]], "R4, R5")
    expect_counts(pair, [2, 2, 2], "R4")
    expect_sent(subject_once, pair, [(-1, 0, 2), (0, 0, 1), (0, 1, 1), (0, 2, 1), (0, 2, 2)], 4)


def test_a_copied_source_stays(subject_once: Subject) -> None:
    """A source that is not a destination keeps its blocks, also if it is copied onto itself or an empty row is copied.

    Cases: E3. Rules: R4, R5.
    """
    pair = make(subject_once, B32, B16, rows=[([1, 2], [3]), ([], [4, 5])])
    pair.do("copy_rows", [0, 0, 0], [2, 0, 3])
    for row in (0, 2, 3):
        check(pair.table.block_ids(row, 0).tolist() == [1, 2], "R4", f"row {row} must hold the blocks of row 0.")
    pair.do("copy_rows", np.array([1, 2]), np.array([0, 1], np.int32))
    expect_host(pair, [[], [2, 3, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5]], "R4, R5")
    expect_host(pair, [[4, 5], [3], [3], [3]], "R4, R5", group=1)
    pair.do("copy_rows", [], [])
    pair.commit()


def test_repeated_rows_of_copies_and_permutations(subject_once: Subject) -> None:
    """A destination may not repeat; a permutation refuses a repeated row and says which call takes one.

    Cases: E3. Rules: R4, R6, R7.
    """
    pair = make(subject_once, B16, rows=[[1], [2]])
    message = pair.refuse("ArgumentError", "copy_rows", [0, 1], [2, 2])
    check("row 2" in message, "R4", f"the error must name the repeated row: {message}")
    for args in (([0, 0], [1, 2]), ([0, 1], [2, 2])):
        message = pair.refuse("ArgumentError", "permute_rows", *args)
        check("copy_rows" in message, "R4", f"the error must point to copy_rows: {message}")
    pair.refuse("ArgumentError", "copy_rows", [0], [1, 2])
    pair.refuse("RowIndexError", "copy_rows", [4], [1])
    pair.refuse("RowIndexError", "copy_rows", [0], [-1])
    pair.refuse("DtypeError", "copy_rows", [0.0], [1])
    pair.commit()


def test_a_remap_is_all_at_once_and_in_every_row(subject_once: Subject) -> None:
    """Rows [1, 2], [2]; 1 -> 2 and 2 -> 1 give [2, 1], [1]; a chain maps no block twice; only hits are sent.

    Cases: E4. Rules: R4, R9.8.
    """
    pair = make(subject_once, B16, B16, rows=[([1, 2, 4], [1]), ([2], [2])])
    pair.commit()
    pair.do("remap_blocks", 0, [1, 2], [2, 1])
    expect_host(pair, [[2, 1, 4], [1]], "R4")
    expect_host(pair, [[1], [2]], "R4", group=1)
    expect_sent(subject_once, pair, [(0, 0, 0), (0, 0, 1), (0, 1, 0)], 2)
    pair.do("remap_blocks", 0, [1, 2, 9], [3, 1, 7])
    expect_host(pair, [[1, 3, 4], [3]], "R4")
    pair.do("remap_blocks", 0, [4, 3], [4, 5])
    pair.do("remap_blocks", 0, np.array([1, 5], np.int32), np.array([6, 6], np.uint8))
    expect_host(pair, [[6, 6, 4], [6]], "R4")
    pair.commit()
    pair.do("remap_blocks", 0, [8, 4], [1, 4])
    pair.do("remap_blocks", 0, [], None)
    expect_sent(subject_once, pair, [], 0)


def test_a_remap_knows_whole_blocks(subject_once: Subject) -> None:
    """With k = 2, block 2 is columns 4, 5: neither the columns of block 1 nor a hole are taken for it.

    Cases: E4. Rules: R2, R4, R7.
    """
    pair = make(subject_once, B32, rows=[[1, 2, 3, 4], [2, 4]])
    pair.do("null_range", 0, 0, 2, 3)
    pair.do("remap_blocks", 0, [2, 4, 3], [4, 1, 9])
    expect_host(pair, [[2, 3, 8, 9, 0, 0, 2, 3], [8, 9, 2, 3]], "R2, R4")
    pair.do("remap_blocks", 0, [2**30 - 1, 1], [1, 2**30 - 1])
    expect_host(pair, [[2**31 - 2, 2**31 - 1, 8, 9, 0, 0, 2**31 - 2, 2**31 - 1], [8, 9, 2**31 - 2, 2**31 - 1]], "R2")
    pair.commit()


def test_a_wrong_remap_is_refused_whole(subject_once: Subject) -> None:
    """Repeated old ids, NULL among them, ids that the group cannot have, two lengths: nothing changes.

    Cases: E4. Rules: R4, R6, R7.
    """
    null_taken = KVCacheGroup(block_size=16, num_blocks=10, allow_null=True)
    pair = make(subject_once, B16, null_taken, rows=[([1, 2], [3, NULL])])
    message = pair.refuse("ArgumentError", "remap_blocks", 0, [2, 1, 2], [4, 5, 6])
    check("2" in message, "R4", f"the error must name the repeated id: {message}")
    for error, *args in (
        ("ArgumentError", 0, [1], [2, 3]),
        ("ArgumentError", 0, [1], None),
        ("ArgumentError", 0, [NULL], [2]),
        ("ArgumentError", 1, [NULL], [2]),
        ("ArgumentError", 0, [1], [NULL]),
        ("ArgumentError", 0, [-1], [1]),
        ("ArgumentError", 0, [1], [2**31]),
        ("ArgumentError", 1, [10], [1]),
        ("ArgumentError", 1, [3], [10]),
        ("ArgumentError", 2, [1], [2]),
        ("DtypeError", 0, [1.0], [2]),
        ("DtypeError", 0, [1], [True]),
        ("DtypeError", 0.0, [1], [2]),
    ):
        pair.refuse(error, "remap_blocks", *args)
    pair.do("remap_blocks", 1, [3], [NULL])
    expect_host(pair, [[NULL, NULL]], "R4, R7", group=1)
    pair.commit()


def test_a_row_set_again_sends_what_differs(subject_once: Subject) -> None:
    """[1, 2, 3] set to [1, 4, 3] sends one block; to [1, 4] a count and the tail; to itself nothing.

    Cases: E5. Rules: R4, R5, R9.8.
    """
    pair = make(subject_once, B32, rows=[[1, 2, 3], [7]])
    pair.commit()
    pair.do("set_row", 0, [1, 4, 3])
    expect_sent(subject_once, pair, [(0, 0, 2), (0, 0, 3)], 1)
    pair.do("set_row", 0, [1, 4, 3])
    expect_sent(subject_once, pair, [], 0)
    pair.do("set_row", 0, [1, 4])
    expect_sent(subject_once, pair, [(-1, 0, 0), (0, 0, 4), (0, 0, 5)], 2)
    pair.do("set_row", 0, [1, 4, 3, 5])
    expect_sent(subject_once, pair, [(-1, 0, 0), *((0, 0, column) for column in range(4, 8))], 2)
    pair.do("set_rows", [1, 0, 2], [[7, 2, 4, 3, 3, 5]], [1, 4, 1])
    expected = [(-1, 0, 2), *((0, 0, column) for column in (0, 1, 6, 7)), (0, 2, 0), (0, 2, 1)]
    expect_sent(subject_once, pair, expected, 4)


def test_an_entry_set_back_before_the_commit_is_right(subject_once: Subject) -> None:
    """An appended block that is replaced, remapped or set back before the commit reaches the device as it is last.

    Cases: E5. Rules: R9.1, R9.7.
    """
    edits: list[Callable[[Pair], Any]] = [
        lambda pair: pair.do("replace_blocks", 1, 0, 1, [9]),
        lambda pair: pair.do("remap_blocks", 0, [5], [9]),
        lambda pair: pair.do("set_row", 1, [2, 9]),
        lambda pair: pair.do("copy_rows", [1, 0], [0, 1]),
        lambda pair: pair.do("set_row", 1, [2, 5]),
    ]
    rows, counts, ids = np.array([0, 1, 3]), np.ones(3, np.int64), np.array([4, 5, 6], np.int32)
    for edit in edits:
        pair = make(subject_once, B16, rows=[[1], [2]])
        pair.commit()
        for _ in range(2):
            pair.do("append_rows", rows, ids, counts)
            edit(pair)
            pair.commit()
            pair.do("truncate_rows", rows, np.array([1, 1, 0]))
            pair.commit()


def test_what_rows_hold_can_be_asked(subject_once: Subject) -> None:
    """Manager ids as they were given, holes as NULL, and their kernel blocks; the answer is a copy.

    Rules: R2, R4.
    """
    pair = make(subject_once, B32, B16, rows=[([3, 7], [1]), ([2**30 - 1], [])])
    check(pair.config.kernel_block_ids(0, [3, 7]).tolist() == [6, 7, 14, 15], "R2", "blocks 3, 7 of k = 2.")
    pair.look_at(0, [0, 1, 2])
    pair.look_at(1, [0, 1])
    pair.do("null_range", 0, 0, 0, 1)
    check(pair.table.block_ids(0, 0).tolist() == [NULL, 7], "R4", "a hole must have the id of the NULL block.")
    pair.table.block_ids(0, 0)[:] = 1
    pair.look_at(0, [0])
    table, config = pair.table, pair.config
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("RowIndexError", lambda: table.block_ids(4, 0)),
        ("RowIndexError", lambda: table.block_ids(-1, 0)),
        ("ArgumentError", lambda: table.block_ids(0, 2)),
        ("DtypeError", lambda: table.block_ids(True, 0)),
        ("RowIndexError", lambda: table.common_blocks([0, 4], 0)),
        ("ArgumentError", lambda: table.common_blocks([0], -1)),
        ("DtypeError", lambda: table.common_blocks([0.0], 0)),  # type: ignore[list-item]
        ("ArgumentError", lambda: config.kernel_block_ids(0, [2**30])),
        ("ArgumentError", lambda: config.kernel_block_ids(0, [-1])),
        ("DtypeError", lambda: config.kernel_block_ids(0, [1.0])),  # type: ignore[list-item]
        ("ConfigError", lambda: config.kernel_block_ids(2, [1])),
    ]
    for error, look in wrong:
        try:
            look()
        except BlockTableError as raised:
            check(
                type(raised).__name__ == error, "R7", f"{error} must be raised, got {type(raised).__name__}: {raised}"
            )
        else:
            check(False, "R7", f"{error} must be raised.")


def test_leading_blocks_that_rows_share_are_counted(subject_once: Subject) -> None:
    """[1, 2, 10] and [1, 2, 11, 12] share 2, with [1, 3, 13] it is 1; holes, other groups and empty rows count apart.

    Rules: R2, R4.
    """
    pair = make(subject_once, B32, B16, rows=[([1, 2, 10], [5]), ([1, 2, 11, 12], [5]), ([1, 3, 13], [])])
    for rows, group, common in (
        ([0, 1], 0, 2),
        ([0, 1, 2], 0, 1),
        ([1, 1], 0, 4),
        ([0], 0, 3),
        ([], 0, 0),
        ([0, 3], 0, 0),
        ([0, 1], 1, 1),
        ([0, 2], 1, 0),
    ):
        got = pair.table.common_blocks(rows, group)
        check(got == common, "R4", f"rows {rows} of group {group} share {common} blocks, got {got}.")
        pair.look_at(group, rows, np.array(rows, np.int32))
    pair.do("null_ranges", [0, 1], 0, [1, 1], [2, 2])
    check(pair.table.common_blocks([0, 1], 0) == 1, "R4", "a hole is not common.")
    pair.do("null_ranges", [0, 1], 0, [0, 0], [1, 1])
    check(pair.table.common_blocks([0, 1], 0) == 0, "R4", "a hole is not common.")


@pytest.mark.parametrize("common", [0, 1, 63, 64, 65, 320, 321, 999, 1000])
def test_long_shared_prefixes_are_counted(subject_once: Subject, common: int) -> None:
    """Rows of 1,000 blocks that share so many.

    Rules: R4.
    """
    table = make(subject_once, B16, width=1000).table
    first, second = np.arange(1, 1001), np.arange(1, 1001)
    second[common:] += 1000
    table.set_rows([0, 1, 2], np.concatenate((first, second, first)), [1000] * 3)
    got = table.common_blocks([2, 0, 1], 0)
    check(got == common, "R4", f"the rows share {common} blocks, got {got}.")


def _bounds(table: BlockTable, before: list[Any], held: Any) -> tuple[set[int], set[int]]:
    """Return the entries of the arena that differ from what they were, and those and all that rows have given up."""
    arena = table.config.arena
    index = [arena.view(np.arange(arena.size), group) for group in range(-1, arena.num_groups)]
    differ, given_up = set(index[0][table.num_blocks_per_row != held].tolist()), set()
    for group, old in enumerate(before):
        places, new = index[group + 1], table.host_table(group)
        differ |= set(places[old != new].tolist())
        expansion = table.config.groups[group].blocks_per_kv_block
        for row, (was, now) in enumerate(zip(held[group], table.num_blocks_per_row[group], strict=True)):
            given_up |= set(places[row, now * expansion : was * expansion].tolist())
    return differ, differ | given_up


@given(data=st.data(), config=configs())
def test_no_edit_sends_a_block_that_stood_there(
    subject_once: Subject, data: st.DataObject, config: BlockTableConfig
) -> None:
    """After any one edit a commit sends the entries that changed, and apart from them only columns that rows gave up.

    Rules: R4, R5, R9.7, R9.8.
    """
    pair = Pair(subject_once, config)
    oracle, all_rows = pair.oracle, list(range(config.num_rows))
    pair.do("set_rows", *data.draw(bulk_calls(oracle, all_rows, replace=True, fit=True)))
    pair.commit()
    before, held = [table.copy() for table in pair.host_tables()], pair.table.num_blocks_per_row
    group = data.draw(st.integers(0, len(config.groups) - 1))
    rows = data.draw(distinct_rows(config.num_rows))
    edits: dict[str, Callable[[], Any]] = {
        "set_rows": lambda: data.draw(bulk_calls(oracle, rows, replace=True)),
        "copy_rows": lambda: ([all_rows[row // 2] for row in rows], rows),
        "permute_rows": lambda: (rows, rows[1:] + rows[:1]),
        "replace_block_ranges": lambda: data.draw(replacements(oracle, group, rows)),
        "remap_blocks": lambda: (group, *data.draw(mappings(oracle, group))),
    }
    edit = data.draw(st.sampled_from(list(edits)))
    pair.do(edit, *edits[edit]())
    least, most = _bounds(pair.table, before, held)
    got = sent_entries(subject_once, pair)
    check(len(set(got)) == len(got), "R9.7", f"{edit} sent an entry twice: {got}")
    check(least <= set(got) <= most, "R9.8", f"{edit} must send {sorted(least)}, at most {sorted(most)}; got {got}.")
