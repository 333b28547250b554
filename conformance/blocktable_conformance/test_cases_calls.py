"""Cases K and M: empty calls, odd batches, several sets of buffers, wake-up, and what a commit sends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blocktable import BlockTableError, KVCacheGroup
from blocktable.backend import Writes
from blocktable_conformance.asserts import check, check_array, check_values, must_raise
from blocktable_conformance.cases import expect_slots, expect_table, make, one_request, shard
from blocktable_conformance.oracle import PAD
from blocktable_conformance.pair import Pair
from blocktable_conformance.subject import Subject, address

B4 = KVCacheGroup(block_size=4)


def test_no_requests_and_no_tokens(subject: Subject) -> None:
    """An empty step pads everything: after a real one, in a new table, and with rows launched.

    Cases: K1. Rules: R10.3, R10.6, R15.
    """
    pair = make(subject, B4, max_num_batched_tokens=8, rows=[[3]])
    for num_reqs_padded in (None, 4):
        one_request(pair, [0, 1, 2, 3])
        seen = pair.step([], [0], [], num_reqs_padded=num_reqs_padded)
        expect_slots(seen, [], "R15")
        expect_table(seen.block_tables[0], [], "R10.3")
    # Requests without a token, and launched tokens without a request.
    expect_slots(pair.step([0, 0], [0, 0, 0], [], num_tokens_padded=8), [], "R15")


def test_an_empty_request_inside_a_batch(subject: Subject) -> None:
    """A request without tokens takes none of the next one's.

    Cases: K2. Rules: R13, R15.
    """
    pair = make(subject, B4, rows=[[], [3]])
    expect_slots(pair.step([0, 1], [0, 0, 2], [0, 1]), [12, 13], "R13")
    expect_slots(pair.step([1, 0, 1, 0], [0, 1, 1, 2, 2], [0, 1]), [12, 13], "R13")


def test_a_token_in_the_next_block(subject: Subject) -> None:
    """Positions 3, 4 and 8 lie in blocks 2, 9 and 5: the next block is looked up, not the next slot taken.

    Cases: K3. Rules: R12.
    """
    expect_slots(one_request(make(subject, B4, rows=[[2, 9, 5]]), [3, 4, 8]), [11, 36, 20], "R12")


def test_warmup_changes_nothing(subject: Subject) -> None:
    """Rows, what is pending and every buffer are after `warmup()` what they were; steps of many sizes follow.

    Cases: K4. Rules: R21.
    """
    pair = make(subject, B4, max_num_reqs=16, max_num_batched_tokens=48, rows=[[2, 9]])
    one_request(pair, [3, 4])
    pair.do("set_row", 1, [7])
    pair.table.warmup()
    pair.check_host()
    pair.check_device()
    pair.check_outputs()
    for num_tokens in (1, 2, 16, 17, 33):
        one_request(pair, [token % 12 for token in range(num_tokens)])
    for num_reqs in (1, 2, 16):
        pair.step([row % 3 for row in range(num_reqs)], range(num_reqs + 1), [0] * num_reqs)


@pytest.mark.large
def test_a_few_tokens_in_a_buffer_of_many_tiles(subject: Subject) -> None:
    """Three tokens in a buffer of 1030 entries: everything after them is PAD, to the last entry.

    Cases: K8. Rules: R15.
    """
    pair = make(subject, B4, max_num_batched_tokens=1030, rows=[[2, 9]])
    expect_slots(one_request(pair, [0, 1, 2]), [8, 9, 10], "R15")


@pytest.mark.large
@pytest.mark.parametrize("null", [0, -1])
def test_more_tokens_than_a_tile_and_more_requests_than_a_warp(subject: Subject, null: int) -> None:
    """A batch of 40 requests, some long, some empty, one with a hole, and 700 tokens crosses every tile's edge.

    Cases: K8. Rules: R10.1, R12, R13.
    """
    lengths = [0, 300, 1, 1, 0, 0, 200, 33, *[1] * 20, 0, 64, *[5] * 10, 0]
    starts = [sum(lengths[:request]) for request in range(len(lengths) + 1)]
    group = KVCacheGroup(block_size=4, null_block_id=null, pad_slot_id=-9)
    pair = make(subject, group, width=80, max_num_reqs=len(lengths), max_num_batched_tokens=700)
    counts = [1 + 7 * row % 80 for row in range(len(lengths))]
    pair.do("set_rows", list(range(len(lengths))), list(range(1, sum(counts) + 1)), counts)
    pair.do("null_range", 11, 0, 5, 9)  # of request 1, which is long
    order = [(11 * request) % len(lengths) for request in range(len(lengths))]
    positions = [token % 311 for token in range(starts[-1])]
    pair.step(order, starts, positions)


def test_two_sets_of_buffers_hold_their_own(subject: Subject) -> None:
    """Position 0 computed into one set and position 1 into another: the first still holds its own.

    Cases: M3. Rules: R17.
    """
    pair = make(subject, B4, rows=[[2, 9], [5]])
    other = pair.create_buffers()
    first = one_request(pair, [0])
    second = one_request(pair, [1], row=1, outputs=other)
    expect_slots(first, [8], "R17")
    expect_slots(second, [21], "R17")
    tables, slots = pair.check_outputs(0, "R17")
    check_values(slots[0], [8] + [PAD] * 15, "R17", "the first set's slots")
    check(tables[0][0].tolist() == [2, 9, 0, 0], "R17", f"the first set's table changed: {tables[0].tolist()}")
    pair.check_outputs(other, "R17")


def test_slots_into_arrays_of_the_caller(subject_once: Subject) -> None:
    """`out=` takes one array for each group, longer or shorter than the buffer, PAD to its end; the own set stays.

    Cases: M3. Rules: R15, R17.
    """
    pair = make(subject_once, B4, KVCacheGroup(block_size=2), rows=[([2, 9], [4, 5])])
    pair.commit()
    pair.compute([0], [0, 1], [2])
    arrays = [subject_once.device_array([77] * length, "int64") for length in (3, 21)]
    inputs = _inputs(subject_once, [0], [0, 2], [0, 4, 5])
    returned = pair.table.compute_slot_mappings(*inputs, out=arrays)
    for group, (slots, length) in enumerate((([8, 36], 3), ([8], 21))):
        check(address(returned[group]) == address(arrays[group]), "R17", "out= must be written in place.")
        expected = slots + [PAD] * (length - len(slots))
        check_values(subject_once.to_host(arrays[group]), expected, "R15, R17", f"out[{group}]")
    pair.check_outputs(0, "R17")


def test_wrong_outputs_are_refused(subject_once: Subject) -> None:
    """Too short, of the wrong dtype or number, or not this table's: refused before any launch.

    Cases: M3. Rules: R17.
    """
    pair = make(subject_once, B4, rows=[[2, 9]])
    stranger = make(subject_once, B4).table.create_buffers()
    inputs = _inputs(subject_once, [0], [0, 2], [0, 4])
    short, wrong, right = (
        subject_once.device_array([77] * n, dtype) for n, dtype in ((1, "int64"), (4, "int32"), (4, "int64"))
    )
    launches = subject_once.call_log.launches
    outs: list[Any] = [[short], [wrong], [right, right], [], stranger]
    for out in outs:
        with must_raise(BlockTableError, "R17", f"out={out!r}"):
            pair.table.compute_slot_mappings(*inputs, out=out)
    check(subject_once.call_log.launches == launches, "R17", "something was launched before the refusal.")


def _inputs(
    subject: Subject, idx_mapping: list[int], query_start_loc: list[int], positions: list[int]
) -> tuple[Any, Any, Any]:
    return (
        subject.device_array(idx_mapping, "int32"),
        subject.device_array(query_start_loc, "int32"),
        subject.device_array(positions, "int64"),
    )


def test_inputs_may_be_host_arrays_and_views_at_any_offset(subject: Subject) -> None:
    """Numpy inputs give what device arrays give, and may be overwritten immediately; so may views from element 1 on.

    Rules: R10.8, R21, R22.
    """
    pair = make(subject, B4, rows=[[2, 9], [5]])
    idx_mapping, starts = np.array([9, 1, 0], np.int32)[1:], np.array([9, 0, 1, 3], np.int32)[1:]
    positions = np.array([9, 3, 3, 4], np.int64)[1:]
    step = pair.table.step(idx_mapping, starts, positions)
    for array in (idx_mapping, starts, positions):
        array[:] = 0
    check_values(subject.to_host(step.slot_mappings[0]), [23, 11, 36], "R10.8", "slots of host inputs")
    expect_table(subject.to_host(step.block_tables[0]), [[5], [2, 9]], "R10.8")
    device = [
        subject.device_array(values, dtype)[1:]
        for values, dtype in (([9, 0], "int32"), ([9, 0, 2], "int32"), ([9, 4, 3], "int64"))
    ]
    step = pair.table.step(*device)
    check_values(subject.to_host(step.slot_mappings[0]), [36, 11], "R21", "slots of inputs at an offset")


def test_positions_may_be_longer_than_the_tokens(subject: Subject) -> None:
    """A whole persistent buffer of positions may be handed in: query_start_loc says how many count.

    Rules: R15.
    """
    pair = make(subject, B4, rows=[[2, 9]])
    expect_slots(pair.step([0], [0, 2], [0, 4] + [1] * 14, num_tokens_padded=4), [8, 36], "R15")


def test_a_row_may_occur_twice_in_a_batch(subject: Subject) -> None:
    """Two requests of one row give its batch row twice, and each its slots.

    Rules: R10.1.
    """
    pair = make(subject, B4, rows=[[2, 9]])
    seen = pair.step([0, 0], [0, 1, 2], [0, 5])
    expect_table(seen.block_tables[0], [[2, 9], [2, 9]], "R10.1")
    expect_slots(seen, [8, 37], "R12")


def test_kernels_see_the_last_commit_not_the_host(subject_once: Subject) -> None:
    """Rows changed after a commit do not show in gather, slots or the device table before the next one.

    Rules: R9.1, R9.2.
    """
    pair = make(subject_once, B4, rows=[[2, 9], [5]])
    pair.commit()
    pair.do("set_row", 0, [7])
    pair.do("clear_row", 1)
    pair.check_device("R9.2")
    expect_table(pair.gather([0, 1])[0], [[2, 9], [5]], "R9.2")
    slots = pair.compute([0, 1], [0, 2, 3], [0, 4, 0])[0]
    check_values(slots, [8, 36, 20], "R9.2", "the slots of the last commit")
    pair.commit()
    expect_table(pair.gather([0, 1])[0], [[7], []], "R9.1")


def test_an_entry_changed_twice_is_sent_once(subject_once: Subject) -> None:
    """A commit sends each changed entry once, with its last value, and nothing where nothing changed.

    Rules: R9.6, R9.7.
    """
    pair = make(subject_once, B4, rows=[[2, 9]])
    pair.commit()
    for block_id in (5, 6, 7):
        pair.do("truncate_row", 0, 2)
        pair.do("append_row", 0, [block_id])
    with subject_once.recording() as sent:
        pair.commit()
        pair.commit()
    values = sorted(value for writes in sent for value in writes.values)
    check(values == [3, 7], "R9.6, R9.7", f"block 7 and a count of 3 must be sent, got {values}")


@pytest.mark.large
def test_disjoint_changes_of_a_row_stay_disjoint(subject_once: Subject) -> None:
    """An eviction at the front and an append at the end of a row of 1000 blocks send four entries, not the row.

    Rules: R9.6.
    """
    pair = make(subject_once, B4, width=1001, max_num_reqs=1, rows=[range(1, 1001)])
    pair.commit()
    pair.do("null_range", 0, 0, 0, 2)
    pair.do("append_row", 0, [1001])
    sent_before = pair.table.num_bytes_sent
    with subject_once.recording() as sent:
        pair.commit()
    entries = sum(length for writes in sent for length in writes.lengths)
    check(entries == 4, "R9.6", f"two NULLs, one block and one count are 4 entries, {entries} were sent.")
    check(pair.table.num_bytes_sent > sent_before, "R9.6", "num_bytes_sent must count what was sent.")


def test_a_commit_that_raises_leaves_its_changes_pending(subject: Subject) -> None:
    """A failing write changes nothing and loses nothing: the next commit, or step, sends it.

    Rules: R9.9.
    """
    pair = make(subject, B4, rows=[[2, 9]])
    for again in (lambda: pair.commit("R9.9"), lambda: one_request(pair, [0])):
        pair.do("append_row", 0, [5])
        subject.call_log.fail_next_write = RuntimeError("injected by the suite")
        with must_raise(RuntimeError, "R9.9", "a commit whose write fails"):
            again()
        pair.check_host()
        pair.check_device("R9.9")
        again()


def test_invalidate_rebuilds_the_device_and_every_set(subject: Subject) -> None:
    """After the device's memory was overwritten the next commit restores all of it; addresses stay.

    Rules: R24.
    """
    pair = make(subject, B4, KVCacheGroup(block_size=2), rows=[([2, 9], [3])])
    pair.create_buffers()
    one_request(pair, [0, 1, 4])
    one_request(pair, [0, 1, 4], outputs=1)
    before = [address(pair.table.device_table(group)) for group in range(2)]
    _overwrite(pair, 5)
    pair.do("set_row", 3, ([8], [9]))
    pair.invalidate()
    check(before == [address(pair.table.device_table(group)) for group in range(2)], "R24", "a device table moved.")
    expect_slots(one_request(pair, [0], row=3), [32], "R24")


def _overwrite(pair: Pair, value: int) -> None:
    """Put `value` into every entry of the device's arena, without the core's knowledge."""
    size = pair.config.arena.size
    writes = Writes(
        pair.config.arena, np.zeros(1, np.int64), np.array([size], np.int32), np.full(size, value, np.int32)
    )
    pair.table.store.write(writes, stream=None)


def test_verify_finds_what_differs(subject_once: Subject) -> None:
    """`verify()` accepts an equal device, also with changes pending, and names the first entry that differs.

    Rules: R5, R9.1.
    """
    pair = make(subject_once, B4, rows=[[2, 9]])
    pair.commit()
    pair.do("append_row", 0, [5])
    pair.table.verify()
    pair.commit()
    pair.table.verify()
    arena = pair.config.arena
    offset = arena.group_offsets[0] + 1 * arena.widths[0] + 3
    pair.table.store.write(
        Writes(arena, np.array([offset]), np.array([1], np.int32), np.array([6], np.int32)), stream=None
    )
    with must_raise(BlockTableError, "R9.1", "verify() of a device that differs") as raised:
        pair.table.verify()
    check("row 1, column 3" in raised.message, "R9.1", f"verify() must name row 1, column 3: {raised.message}")


def test_locate_says_whose_slot_it_is(subject_once: Subject) -> None:
    """A slot of any token leads back to its block, its row and its position, on each rank.

    Rules: R2, R12, R18.
    """
    hybrid = KVCacheGroup(block_size=4, kernel_block_size=2)
    for rank in range(2):
        groups = [hybrid, KVCacheGroup(block_size=4, sharded=False), KVCacheGroup(block_size=4, slot_mode="ring")]
        pair = make(subject_once, *groups, context_parallel=shard(2, rank, 2))
        pair.do("set_row", 1, ([7, 3], [5], [6]))
        pair.do("copy_row", 1, 2)
        for group, num_slots in ((0, 40), (1, 30), (2, 30)):
            for slot in range(1, num_slots):
                got, expected = pair.table.locate(group, slot), pair.oracle.locate(group, slot)
                seen = (got.block_id, got.kernel_block_id, got.offset, got.rows)
                check(seen == expected, "R12", f"locate({group}, {slot}) must be {expected}, got {seen}")


def test_a_slot_that_is_none_cannot_be_located(subject_once: Subject) -> None:
    """PAD, and slots beyond the cache, are refused.

    Rules: R12.
    """
    pair = make(subject_once, KVCacheGroup(block_size=4, num_blocks=10))
    for slot in (PAD, 40, -7):
        with must_raise(ValueError, "R12", f"locate of slot {slot}") as raised:
            pair.table.locate(0, slot)
        check(str(slot) in raised.message, "R12", f"the error must name slot {slot}: {raised.message}")


def test_tables_share_nothing(subject: Subject) -> None:
    """Two tables of one backend, used in turn, keep their own rows, device memory and outputs.

    Rules: R23.
    """
    one, other = make(subject, B4, rows=[[2]]), make(subject, B4, rows=[[7, 8]])
    expect_slots(one_request(one, [0]), [8], "R23")
    expect_slots(one_request(other, [4]), [32], "R23")
    one.do("clear_row", 0)
    one.check_outputs()
    expect_slots(one_request(one, [0]), [], "R23")
    other.check_device()
    other.check_outputs()


def test_slots_of_32_bits(subject: Subject) -> None:
    """A backend that declares `int32_slots` gives int32, up to the last slot that fits; PAD is -1.

    Cases: B6. Rules: R16.
    """
    if not subject.declares("int32_slots"):
        pytest.skip(f"{subject.label} does not declare int32_slots")
    group = KVCacheGroup(block_size=64, num_blocks=33_554_432)
    pair = make(subject, group, slot_dtype="int32", rows=[[33_554_431, 1]])
    seen = one_request(pair, [63, 64, 128])
    check_array(seen.slot_mappings[0], "int32", (3,), "R16", "the slot mapping")
    expect_slots(seen, [2**31 - 1, 64], "R16")
