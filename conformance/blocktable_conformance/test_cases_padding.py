"""Cases P: entries that stand for no token must say so, all of them, every time."""

from __future__ import annotations

import numpy as np

from blocktable import KVCacheGroup
from blocktable_conformance.asserts import check
from blocktable_conformance.cases import NO_REQUEST, expect_slots, expect_table, make, one_request
from blocktable_conformance.oracle import PAD
from blocktable_conformance.pair import Pair
from blocktable_conformance.subject import Subject


def test_padding_is_pad_and_a_writer_that_skips_it_touches_no_block(subject: Subject) -> None:
    """Tokens launched beyond the real ones get PAD, and slot 95 of a cache keeps its value.

    An engine indexed its cache with -1 // 16 and -1 % 16.

    Cases: P1. Rules: R13, R15.
    """
    pair = make(subject, KVCacheGroup(block_size=16), rows=[[5]])
    seen = one_request(pair, [0, 1, 2], num_tokens_padded=8)
    expect_slots(seen, [80, 81, 82], "R15")
    cache = np.full(6 * 16, 7)
    slots = seen.slot_mappings[0]
    cache[slots[slots >= 0]] = 1
    check(cache[95] == 7 and cache.sum() == 7 * 93 + 3, "R13", f"the cache must hold 3 ones, got {cache.tolist()}")


def test_a_shorter_step_leaves_no_slot_of_the_longer_one(subject: Subject) -> None:
    """Ten tokens, then two with eight launched: the whole buffer after the two is PAD.

    Cases: P2. Rules: R15.
    """
    pair = make(subject, KVCacheGroup(block_size=4), rows=[[7, 8, 9]])
    expect_slots(one_request(pair, range(10)), range(28, 38), "R12")
    expect_slots(one_request(pair, [10, 11], num_tokens_padded=8), [38, 39], "R15")


def test_a_smaller_decode_leaves_no_slot_of_the_larger_one(subject: Subject) -> None:
    """Eight decoding requests, then three: entries from 3 to the end are PAD, and so are the batch rows.

    Cases: P3. Rules: R10.1, R10.3, R15.
    """
    pair = make(subject, KVCacheGroup(block_size=4), max_num_reqs=8, rows=[[row + 1, row + 11] for row in range(8)])
    pair.step(range(8), range(9), [5] * 8)
    seen = pair.step([6, 1, 3], range(4), [5, 4, 2], num_reqs_padded=8, num_tokens_padded=8)
    expect_slots(seen, [17 * 4 + 1, 12 * 4, 4 * 4 + 2], "R15")
    expect_table(seen.block_tables[0], [[7, 17], [2, 12], [4, 14]], "R10.1, R10.3")


def test_a_new_table_is_pad_and_null(subject_once: Subject) -> None:
    """Before anything is computed every slot is PAD and every batch table NULL.

    Cases: P4. Rules: R15, R17.
    """
    pair = make(subject_once, KVCacheGroup(block_size=16), KVCacheGroup(block_size=8))
    tables, slots = pair.check_outputs()
    for group in range(2):
        check(bool((slots[group] == PAD).all()), "R15", f"a fresh slot buffer must be PAD, got {slots[group].tolist()}")
        expect_table(tables[group], [], "R17", "a fresh batch table")


def test_a_dummy_step_pads_every_group_and_still_commits(subject: Subject) -> None:
    """After a real step a step of four padding entries leaves nothing in any group, and commits what changed before it.

    Cases: P5. Rules: R9.1, R10.2, R13, R17.
    """
    pair = make(subject, KVCacheGroup(block_size=4), KVCacheGroup(block_size=2), rows=[([5, 6], [8, 9, 10])])
    real = one_request(pair, [0, 5, 3])
    expect_slots(real, [20, 25, 23], "R12")
    expect_slots(real, [16, 21, 19], "R12", group=1)
    pair.do("set_row", 2, ([3], [4]))
    dummy = pair.step([NO_REQUEST] * 4, range(5), [0, 1, 2, 3])
    for group in range(2):
        expect_slots(dummy, [], "R13", group=group)
        expect_table(dummy.block_tables[group], [], "R10.2")
    # Pair.step has compared the addresses; the row set before that step must be there.
    on_device = subject.to_host(pair.table.device_table(0))
    expect_table(on_device, [[5, 6], [], [3]], "R9.1", "the device table")


def test_a_token_in_block_0_has_a_slot_unless_null_is_pad(subject: Subject) -> None:
    """Block 0 is a block like any other where the engine gives it out; `null_is_pad` makes it PAD.

    Cases: P6. Rules: R7, R13.
    """
    for null_is_pad, slots in ((False, [3, 25]), (True, [PAD, 25])):
        group = KVCacheGroup(block_size=4, allow_null=True, null_is_pad=null_is_pad)
        expect_slots(one_request(make(subject, group, rows=[[0, 6]]), [3, 5]), slots, "R13")


def test_launched_rows_beyond_the_batch_are_null_not_pad(subject: Subject) -> None:
    """Two requests, four rows launched: column 0 is [3, 4, 0, 0], never -1.

    Cases: P7. Rules: R10.3.
    """
    pair = make(subject, KVCacheGroup(block_size=16), rows=[[3], [4]])
    seen = pair.step([0, 1], [0, 1, 2], [0, 0], num_reqs_padded=4)
    expect_table(seen.block_tables[0], [[3], [4]], "R10.3")


def test_addresses_stay_over_steps_of_any_size(subject: Subject) -> None:
    """Batch tables and slot mappings lie where they lay, and a step of sizes seen before is the same object.

    Cases: P8. Rules: R17.
    """
    pair = make(subject, KVCacheGroup(block_size=16), max_num_reqs=8, rows=[[row + 1] for row in range(5)])
    before = pair.outputs[0].addresses
    for num_reqs in (1, 5, 2):
        pair.step(range(num_reqs), range(num_reqs + 1), [0] * num_reqs)
        check(pair.outputs[0].current_addresses() == before, "R17", f"a buffer moved in a step of {num_reqs} requests.")
    steps = [_decode_step(pair, num_reqs) for num_reqs in (2, 5, 2)]
    check(steps[0] is steps[2], "R17", "step() must return the same Step for the same sizes.")
    check(steps[0] is not steps[1], "R17", "step() must not return one Step for two sizes.")


def _decode_step(pair: Pair, num_reqs: int) -> object:
    arrays = (
        pair.subject.device_array(range(num_reqs), "int32"),
        pair.subject.device_array(range(num_reqs + 1), "int32"),
        pair.subject.device_array([0] * num_reqs, "int64"),
    )
    return pair.table.step(*arrays)


def test_padded_rows_hold_nothing_of_an_earlier_batch(subject: Subject) -> None:
    """Four requests, then one padded to four: three NULL rows.

    Cases: P9. Rules: R5, R10.3.
    """
    pair = make(subject, KVCacheGroup(block_size=16), rows=[[1], [2], [3], [4]])
    pair.step(range(4), range(5), [0] * 4)
    pair.do("set_row", 0, [9])
    seen = pair.step([0], [0, 1], [0], num_reqs_padded=4)
    expect_table(seen.block_tables[0], [[9]], "R10.3")


def test_a_row_that_shrank_leaves_no_column_in_its_batch_row(subject_once: Subject) -> None:
    """A batch row that held four columns and now holds one, or another row's two, is NULL after them.

    Cases: P9. Rules: R5, R10.1, R10.2.
    """
    pair = make(subject_once, KVCacheGroup(block_size=16), rows=[[1, 2, 3, 4], [5, 6]])
    pair.commit()
    pair.gather([0, 1])
    expect_table(pair.gather([1, 0])[0], [[5, 6], [1, 2, 3, 4]], "R10.1")
    pair.do("truncate_row", 0, 1)
    pair.commit()
    expect_table(pair.gather([0, NO_REQUEST])[0], [[1], []], "R10.1, R10.2")


def test_a_batch_padded_in_requests_and_tokens(subject: Subject) -> None:
    """Five requests of six tokens, padded to six rows and 36 tokens: the sixth row is NULL, its tokens PAD.

    Cases: P10. Rules: R10.1, R10.3, R15.
    """
    pair = make(
        subject,
        KVCacheGroup(block_size=16),
        max_num_reqs=6,
        max_num_batched_tokens=40,
        rows=[[row + 1] for row in range(5)],
    )
    positions = [position for _ in range(5) for position in range(6)]
    seen = pair.step(range(5), range(0, 31, 6), positions, num_reqs_padded=6, num_tokens_padded=36)
    expect_table(seen.block_tables[0], [[row + 1] for row in range(5)], "R10.1, R10.3")
    expect_slots(seen, [(row + 1) * 16 + offset for row in range(5) for offset in range(6)], "R15")


def test_an_idx_mapping_of_minus_one_is_a_dummy(subject: Subject) -> None:
    """Index 0 gives slots, index -1 gives PAD: never the table's last row.

    Cases: P11. Rules: R10.2, R13.
    """
    pair = make(subject, KVCacheGroup(block_size=8), rows=[[3], [], [], [9]])
    expect_slots(one_request(pair, [0, 1]), [24, 25], "R12")
    seen = one_request(pair, [0, 1], row=NO_REQUEST)
    expect_slots(seen, [], "R13")
    expect_table(seen.block_tables[0], [], "R10.2")


def test_a_dummy_between_requests(subject: Subject) -> None:
    """A padding entry in the middle pads its own tokens only.

    Cases: P11. Rules: R10.1, R10.2, R13.
    """
    pair = make(subject, KVCacheGroup(block_size=8), rows=[[3], [4]])
    seen = pair.step([0, NO_REQUEST, 1], [0, 2, 4, 6], [0, 1, 0, 1, 0, 1])
    expect_slots(seen, [24, 25, PAD, PAD, 32, 33], "R13")
    expect_table(seen.block_tables[0], [[3], [], [4]], "R10.1, R10.2")


def test_the_null_block_spans_all_its_kernel_blocks(subject: Subject) -> None:
    """With two kernel blocks to a block, a null that is handed in is the filler in both columns.

    Cases: P12. Rules: R2, R7, R13.
    """
    for null_is_pad, slots in ((False, [5, 4, 197]), (True, [PAD, PAD, 197])):
        group = KVCacheGroup(block_size=32, kernel_block_size=16, allow_null=True, null_is_pad=null_is_pad)
        expect_slots(one_request(make(subject, group, rows=[[0, 6]]), [5, 20, 37]), slots, "R13")


def test_an_entry_outside_the_table_is_a_dummy(subject: Subject) -> None:
    """Entries 4 and -7 of a table of four rows give PAD and a NULL batch row.

    Cases: P13. Rules: R10.2, R13.
    """
    pair = make(subject, KVCacheGroup(block_size=8), rows=[[3], [4], [5], [6]])
    for row in (4, -7, 2**31 - 1, -(2**31)):
        seen = one_request(pair, [0, 1], row=row)
        expect_slots(seen, [], "R13")
        expect_table(seen.block_tables[0], [], "R10.2")


def test_fewer_positions_than_query_start_loc_says(subject_once: Subject) -> None:
    """The tokens are as many as there are positions: three slots of five, then PAD.

    Cases: P13. Rules: R15.
    """
    pair = make(subject_once, KVCacheGroup(block_size=8), rows=[[3]])
    pair.commit()
    slots = pair.compute([0], [0, 5], [0, 1, 2], num_tokens_padded=16)
    check(slots[0].tolist() == [24, 25, 26] + [PAD] * 13, "R15", f"three slots, then PAD, got {slots[0].tolist()}")


def test_more_positions_than_query_start_loc_says(subject_once: Subject) -> None:
    """Positions after the last request, as in a padded buffer, are not tokens.

    Cases: P13. Rules: R15.
    """
    pair = make(subject_once, KVCacheGroup(block_size=8), rows=[[3]])
    pair.commit()
    slots = pair.compute([0], [0, 2], [0, 1, 2, 3, 4], num_tokens_padded=16)
    check(slots[0].tolist() == [24, 25] + [PAD] * 14, "R15", f"two slots, then PAD, got {slots[0].tolist()}")


def test_tokens_before_the_first_request_belong_to_none(subject_once: Subject) -> None:
    """With a query_start_loc that begins at 2 the first two tokens are PAD.

    Cases: P13. Rules: R13.
    """
    pair = make(subject_once, KVCacheGroup(block_size=8), rows=[[3], [4]])
    pair.commit()
    slots = pair.compute([0, 1], [2, 3, 5], [0, 1, 2, 3, 4])
    expected = [PAD, PAD, 26, 35, 36]
    check(slots[0].tolist() == expected, "R13", f"the slots must be {expected}, got {slots[0].tolist()}")
