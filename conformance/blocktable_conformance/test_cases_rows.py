"""Cases T: row operations that lost, kept or half-wrote something."""

from __future__ import annotations

from typing import Any

import pytest

from blocktable import BlockTableConfig, BlockTableError, KVCacheGroup
from blocktable_conformance.asserts import check, fail
from blocktable_conformance.cases import expect_counts, expect_host, expect_table, make, small_config
from blocktable_conformance.pair import Pair
from blocktable_conformance.subject import Subject

B16 = KVCacheGroup(block_size=16)


def test_a_move_replaces_the_destination_and_vacates_the_source(subject_once: Subject) -> None:
    """Two blocks moved over four leave no tail, and the source is empty.

    Cases: T1. Rules: R4, R5.
    """
    pair = make(subject_once, B16, rows=[[1, 2, 3, 4], [55, 56]])
    pair.do("move_row", 1, 0)
    expect_host(pair, [[55, 56], []], "R4, R5")
    expect_counts(pair, [2, 0], "R4")
    pair.commit()


def test_a_move_onto_itself_changes_nothing(subject_once: Subject) -> None:
    """One engine's `move_row(i, i)` erased row i.

    Cases: T1. Rules: R4.
    """
    pair = make(subject_once, B16, rows=[[1, 2, 3]])
    pair.do("move_row", 0, 0)
    pair.do("copy_row", 0, 0)
    pair.do("swap_rows", 0, 0)
    pair.do("permute_rows", [0], [0])
    expect_host(pair, [[1, 2, 3]], "R4")


def test_a_shorter_row_leaves_no_tail_on_the_device(subject_once: Subject) -> None:
    """Three blocks committed, then one: the device's row is [8, 0, 0, 0].

    Cases: T2. Rules: R5, R9.1.
    """
    pair = make(subject_once, B16, rows=[[5, 6, 7]])
    pair.commit()
    pair.do("set_row", 0, [8])
    pair.commit()
    expect_table(subject_once.to_host(pair.table.device_table(0)), [[8]], "R5, R9.1", "the device table")


def test_an_empty_row_moved_empties_the_destination(subject_once: Subject) -> None:
    """Row 0 is cleared, row 1 moved onto it: row 1 is all NULL; so is row 0 after an empty row is moved there.

    Cases: T3. Rules: R4, R5.
    """
    pair = make(subject_once, B16, rows=[[21, 22, 23], [31, 32]])
    pair.do("clear_row", 0)
    pair.do("move_row", 1, 0)
    expect_host(pair, [[31, 32], []], "R5")
    pair.do("move_row", 3, 0)
    expect_host(pair, [], "R5")
    expect_counts(pair, [0, 0], "R4")
    pair.commit()


def test_swaps_exchange_rows_of_different_lengths(subject_once: Subject) -> None:
    """Three swapped rows keep their own counts, and no tail stays after the shorter ones.

    Cases: T4. Rules: R4, R5.
    """
    pair = make(subject_once, B16, rows=[[1, 2, 3], [9], [4, 5]])
    pair.do("swap_rows", 0, 1)
    pair.do("swap_rows", 1, 2)
    expect_host(pair, [[9], [4, 5], [1, 2, 3]], "R4, R5")
    expect_counts(pair, [1, 2, 3], "R4")
    pair.do("swap_rows", 1, 1)
    expect_host(pair, [[9], [4, 5], [1, 2, 3]], "R4")
    pair.commit()


@pytest.mark.large
@pytest.mark.parametrize("width", [100, 100_000])
def test_a_swap_costs_filled_columns_not_width(subject_once: Subject, width: int) -> None:
    """Swapping rows of 3 and 5 blocks sends both rows and both counts, however wide the table is.

    Cases: T5. Rules: R4, R9.6.
    """
    table = subject_once.table(small_config(B16, width=width, max_num_reqs=2))
    table.set_row(0, [1, 2, 3])
    table.set_row(1, [11, 12, 13, 14, 15])
    table.commit()
    table.swap_rows(0, 1)
    with subject_once.recording() as sent:
        table.commit()
    touched = sum(length for writes in sent for length in writes.lengths)
    check(touched == 12, "R4, R9.6", f"two rows of 5 touched columns and 2 counts are 12 entries, {touched} were sent.")
    got = subject_once.to_host(table.device_table(0))[:, :6].tolist()
    check(got == [[11, 12, 13, 14, 15, 0], [1, 2, 3, 0, 0, 0]], "R4", f"the rows are not swapped: {got}")


def test_a_row_over_capacity_is_refused_whole(subject_once: Subject) -> None:
    """Two blocks too many, and one too many into a full row: both raise, nothing changes.

    numpy broadcasts a list of one into an empty slice and loses it: two shipped versions of one engine did.

    Cases: T6. Rules: R6.
    """
    pair = make(subject_once, B16, rows=[[1, 2, 3]])
    message = pair.refuse("RowCapacityError", "append_row", 0, [4, 5])
    for part in ("row 0", "group 0", "2", "1"):
        check(part in message, "R6", f"the error must name row, group, needed and available blocks: {message}")
    expect_host(pair, [[1, 2, 3]], "R6")
    expect_counts(pair, [3], "R6")
    pair.do("append_row", 0, [4])
    pair.refuse("RowCapacityError", "append_row", 0, [5])
    pair.refuse("RowCapacityError", "append_rows", [0], [5], [1])
    pair.refuse("RowCapacityError", "set_row", 0, [1, 2, 3, 4, 5])
    pair.refuse("RowCapacityError", "append_rows", [1, 0], [6, 7], [1, 1])
    expect_host(pair, [[1, 2, 3, 4]], "R6")
    pair.commit()


def test_set_row_replaces(subject_once: Subject) -> None:
    """A request that resumes after preemption holds its new blocks only.

    Cases: T7. Rules: R4.
    """
    pair = make(subject_once, B16, width=3, rows=[[1, 2, 3]])
    pair.do("set_row", 0, [8])
    expect_host(pair, [[8]], "R4, R5")
    expect_counts(pair, [1], "R4")


def test_nothing_appended_is_a_no_op_and_nothing_set_clears(subject_once: Subject) -> None:
    """None and [] append nothing, in any place; set_row with nothing leaves an empty row.

    Cases: T8. Rules: R8.
    """
    pair = make(subject_once, B16, KVCacheGroup(block_size=8), rows=[([1, 2], [3])])
    nothings: list[Any] = [None, [], ([], []), (None, None), ([], None)]
    for nothing in nothings:
        pair.do("append_row", 0, nothing)
        pair.do("append_rows", [0, 1], nothing, [0, 0])
    expect_host(pair, [[1, 2]], "R8")
    pair.do("append_row", 0, ([], [4]))
    expect_host(pair, [[3, 4]], "R8", group=1)
    pair.do("set_row", 0, (None, [5]))
    expect_host(pair, [], "R8")
    expect_host(pair, [[5]], "R8", group=1)
    pair.do("set_row", 0, [])
    expect_host(pair, [], "R8", group=1)
    expect_counts(pair, [0], "R8", group=1)
    pair.commit()


def test_one_group_takes_a_flat_sequence(subject_once: Subject) -> None:
    """[1, 2], ([1, 2],) and a tuple or range of ints are the same blocks.

    Cases: T8. Rules: R8.
    """
    pair = make(subject_once, B16)
    for block_ids in ([1, 2], (1, 2), range(1, 3), [[1, 2]], ((1, 2),)):
        pair.do("set_row", 0, block_ids)
        expect_host(pair, [[1, 2]], "R8")


def test_a_group_over_capacity_changes_no_group(subject_once: Subject) -> None:
    """The second of two groups is over capacity, then the first: neither changes.

    Cases: T9. Rules: R6.
    """
    wide, narrow = KVCacheGroup(block_size=16), KVCacheGroup(block_size=16, blocks_per_row=2)
    for groups in ((wide, narrow), (narrow, wide)):
        pair = make(subject_once, *groups, rows=[([1, 2], [3, 4])])
        pair.refuse("RowCapacityError", "append_row", 0, ([5], [6]))
        pair.refuse("RowCapacityError", "set_row", 1, ([5, 6, 7], [6, 7, 8]))
        pair.refuse("RowCapacityError", "append_rows", [2, 0], ([5, 6], [7, 8]), [1, 1])
        expect_host(pair, [[1, 2]], "R6")
        expect_host(pair, [[3, 4]], "R6", group=1)
        pair.commit()


def test_a_lookahead_adds_capacity_and_alignment_does_not(subject_once: Subject) -> None:
    """8192 tokens and 7 ahead are 513 blocks of 16: 513 columns, or 520 aligned; 513 ids fit, 514 raise.

    Cases: T10. Rules: R3, R6.
    """
    for width_alignment, width in ((1, 513), (128, 520)):
        config = BlockTableConfig(
            groups=[B16],
            max_num_reqs=1,
            max_num_batched_tokens=1,
            max_model_len=8192,
            lookahead_tokens=7,
            width_alignment=width_alignment,
        )
        pair = Pair(subject_once, config)
        check(config.capacity(0) == 513, "R3", f"the capacity must be 513, got {config.capacity(0)}")
        check(pair.table.device_table(0).shape == (1, width), "R3", f"the table must be {width} wide.")
        pair.do("set_row", 0, range(1, 514))
        pair.refuse("RowCapacityError", "set_row", 0, range(1, 515))


def test_columns_added_by_alignment_take_no_block(subject_once: Subject) -> None:
    """Two free columns of an aligned width are no room: the third block of two raises, and the tenth of nine.

    Cases: T11. Rules: R3, R6.
    """
    wide = KVCacheGroup(block_size=48, kernel_block_size=16)
    for group, max_model_len, capacity, width in ((wide, 96, 2, 8), (B16, 144, 9, 16)):
        pair = make(subject_once, group, max_model_len=max_model_len, width_alignment=128)
        check(pair.config.capacity(0) == capacity, "R3", f"the capacity must be {capacity}")
        check(pair.host_tables()[0].shape == (4, width), "R3", f"the table must be {width} wide")
        pair.do("set_row", 3, range(1, capacity + 1))
        pair.refuse("RowCapacityError", "append_row", 3, [99])


def test_the_largest_id_expands_and_the_next_is_refused(subject_once: Subject) -> None:
    """Three kernel blocks to a block: id 715827881 ends at 2147483645, id 715827882 would not fit 31 bits.

    Cases: T12. Rules: R2, R7.
    """
    pair = make(subject_once, KVCacheGroup(block_size=48, kernel_block_size=16))
    pair.do("set_row", 0, [715827881])
    expect_host(pair, [[2147483643, 2147483644, 2147483645]], "R2")
    pair.refuse("ArgumentError", "set_row", 1, [715827882])
    pair.refuse("ArgumentError", "append_row", 0, [2**31])
    pair.refuse("ArgumentError", "append_row", 0, [2**63])
    pair.commit()
    pair = make(subject_once, B16, KVCacheGroup(block_size=16, num_blocks=10))
    pair.do("set_row", 0, ([2**31 - 1], [9]))
    pair.refuse("ArgumentError", "set_row", 0, ([2**31], [9]))
    pair.refuse("ArgumentError", "set_row", 0, ([1], [10]))
    pair.commit()


def test_rows_of_one_call_are_distinct(subject_once: Subject) -> None:
    """A repeated row is refused by name, in every bulk form, and nothing changes.

    Cases: T13. Rules: R4, R6.
    """
    pair = make(subject_once, B16, rows=[[], [], [], [9]])
    message = pair.refuse("ArgumentError", "append_rows", [3, 3], [1, 2], [1, 1])
    check("3" in message, "R4", f"the error must name the repeated row: {message}")
    pair.refuse("ArgumentError", "set_rows", [3, 1, 3], [1, 2, 3], [1, 1, 1])
    pair.refuse("ArgumentError", "clear_rows", [3, 3])
    pair.refuse("ArgumentError", "truncate_rows", [3, 3], [0, 0])
    pair.refuse("ArgumentError", "null_ranges", [3, 3], 0, [0, 0], [1, 1])
    pair.refuse("ArgumentError", "permute_rows", [0, 0], [1, 2])
    pair.refuse("ArgumentError", "permute_rows", [0, 1], [2, 2])
    expect_host(pair, [[], [], [], [9]], "R6")


def test_a_permutation_reads_every_source_first(subject_once: Subject) -> None:
    """Rows [1], [2], [3] sent round give [3], [1], [2]; a source that is not a destination becomes empty.

    Cases: T13. Rules: R4.
    """
    pair = make(subject_once, B16, rows=[[1], [2, 20], [3, 30, 31]])
    pair.do("permute_rows", [0, 1, 2], [1, 2, 0])
    expect_host(pair, [[3, 30, 31], [1], [2, 20]], "R4, R5")
    pair.do("permute_rows", [2, 1], [0, 2])
    expect_host(pair, [[2, 20], [], [1]], "R4, R5")
    pair.commit()


def test_wrong_arguments_are_refused_and_change_nothing(subject_once: Subject) -> None:
    """Booleans, floats, negative rows, rows past the end, wrong numbers of groups and unallowed zeros raise.

    Cases: T13. Rules: R6, R7.
    """
    pair = make(subject_once, B16, KVCacheGroup(block_size=8), rows=[([1, 2], [3])])
    for error, operation, *args in (
        ("RowIndexError", "append_row", -1, ([1], [1])),
        ("RowIndexError", "set_row", 4, ([1], [1])),
        ("RowIndexError", "append_rows", [0, 4], ([1, 1], [1, 1]), [1, 1]),
        ("RowIndexError", "clear_row", -4),
        ("RowIndexError", "move_row", 0, 4),
        ("RowIndexError", "swap_rows", -1, 0),
        ("RowIndexError", "copy_row", 4, 0),
        ("RowIndexError", "permute_rows", [0], [4]),
        ("DtypeError", "append_row", True, ([1], [1])),
        ("DtypeError", "append_row", 0.0, ([1], [1])),
        ("DtypeError", "append_row", 0, ([1.0], [1])),
        ("DtypeError", "append_row", 0, ([True], [1])),
        ("ArgumentError", "append_row", 0, ([1],)),
        ("ArgumentError", "append_row", 0, ([1], [1], [1])),
        ("ArgumentError", "append_row", 0, ([1], [0])),
        ("ArgumentError", "append_row", 0, ([-1], [1])),
        ("ArgumentError", "append_rows", [0, 1], ([1, 1], [1, 1]), [1]),
        ("ArgumentError", "append_rows", [0, 1], ([1, 1], [1, 1]), [2, 1]),
        ("ArgumentError", "append_rows", [0, 1], ([1, 1], [1, 1]), [3, -1]),
        ("ArgumentError", "truncate_row", 0, -1),
        ("ArgumentError", "truncate_row", 0, [1]),
        ("ArgumentError", "null_range", 0, 0, 1, 3),
        ("ArgumentError", "null_range", 0, 0, 2, 1),
        ("ArgumentError", "null_range", 0, 0, -1, 1),
        ("ArgumentError", "null_range", 0, 2, 0, 1),
        ("ArgumentError", "null_ranges", [0, 1], 0, [0, 0], [1, 1]),
    ):
        pair.refuse(error, operation, *args)
    pair.commit()


def test_truncate_and_null_range_count_in_manager_blocks(subject_once: Subject) -> None:
    """With two kernel blocks to a block, keeping one block keeps two columns, and nulling one nulls two.

    Rules: R4, R5, R7.
    """
    pair = make(subject_once, KVCacheGroup(block_size=32, kernel_block_size=16), rows=[[1, 2, 3], [4, 5]])
    pair.do("null_range", 0, 0, 1, 2)
    expect_host(pair, [[2, 3, 0, 0, 6, 7], [8, 9, 10, 11]], "R4, R7")
    expect_counts(pair, [3, 2], "R4")
    pair.do("truncate_row", 0, 5)
    pair.do("truncate_row", 1, [1])
    expect_host(pair, [[2, 3, 0, 0, 6, 7], [8, 9]], "R4, R5")
    pair.do("truncate_rows", [1, 0], [0, 2])
    expect_host(pair, [[2, 3, 0, 0], []], "R4, R5")
    pair.do("append_row", 0, [9])
    expect_host(pair, [[2, 3, 0, 0, 18, 19]], "R4")
    pair.commit()


def test_copied_rows_live_their_own_lives(subject_once: Subject) -> None:
    """A fork holds the same ids, and an append to one of the two leaves the other.

    Rules: R4.
    """
    pair = make(subject_once, B16, rows=[[1, 2], [7, 8, 9]])
    pair.do("copy_row", 0, 1)
    expect_host(pair, [[1, 2], [1, 2]], "R4, R5")
    pair.do("append_row", 1, [3])
    expect_host(pair, [[1, 2], [1, 2, 3]], "R4")
    pair.commit()


def test_appends_to_every_row_reach_the_device_in_every_group(subject_once: Subject) -> None:
    """Many columns may travel on a way of their own, and one after another: of each group and row.

    Rules: R9.1, R9.7.
    """
    groups = [KVCacheGroup(block_size=4) for _ in range(8)]
    config = BlockTableConfig(groups=groups, max_num_reqs=40, max_num_batched_tokens=40, max_model_len=96)
    table = subject_once.table(config)
    for turn in range(20):
        rows = [*range(40)] if turn % 3 else [*range(40)][::-1]
        ids = [[1 + (turn + 7 * group + row) % 90 for row in rows] for group in range(8)]
        table.append_rows(rows, ids, [1] * 40)
        table.commit()
        if turn in (0, 4, 19):
            try:
                table.verify()
            except BlockTableError as error:
                fail("R9.1", str(error))
    expected = [[1 + (turn + 7 * 3 + row) % 90 for turn in range(20)] for row in range(40)]
    check(table.host_table(3)[:, :20].tolist() == expected, "R9.1", "a row of group 3 holds other blocks.")
