"""Cases B: tokens, sizes and numbers at an edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from blocktable import ConfigError, KVCacheGroup
from blocktable_conformance.asserts import check, must_raise
from blocktable_conformance.cases import expect_slots, expect_table, make, one_request, small_config
from blocktable_conformance.oracle import PAD
from blocktable_conformance.subject import Subject

B16 = KVCacheGroup(block_size=16)


def test_a_token_never_reaches_another_row(subject: Subject) -> None:
    """A position past the row is PAD, never a slot of the next row's block; nor is one in an unallocated column.

    Cases: B1. Rules: R13.
    """
    pair = make(subject, B16, width=2, rows=[[5, 6], [9, 10], [], [7]])
    expect_slots(one_request(pair, [31, 32]), [111], "R13")
    expect_slots(one_request(pair, [15, 16, 31, 32], row=3), [127], "R13")
    expect_slots(one_request(pair, [0, 1], row=2), [], "R13")
    pair.do("truncate_row", 0, 1)
    expect_slots(one_request(pair, [15, 16]), [95], "R13")


def test_positions_far_past_every_row_are_pad(subject_once: Subject) -> None:
    """Positions that would overflow 32 bits, or reach the end of 64, are PAD.

    Cases: B1. Rules: R12, R13.
    """
    pair = make(subject_once, B16, width=2, rows=[[5, 6]])
    pair.commit()
    slots = pair.compute([0], [0, 5], [2**31, 2**32, 2**40, 2**63 - 1, 31], num_tokens_padded=16)
    check(slots[0].tolist() == [PAD] * 4 + [111] + [PAD] * 11, "R13", f"four PADs, then 111, got {slots[0].tolist()}")


def test_sizes_above_the_buffer_are_refused_before_any_launch(subject: Subject) -> None:
    """More tokens than the buffer holds, positions or padding, raise; a shorter view is not an answer.

    Cases: B2. Rules: R15.
    """
    pair = make(subject, B16, max_num_batched_tokens=132, rows=[[5]])
    arrays = [subject.device_array(values, dtype) for values, dtype in (([0], "int32"), ([0, 1], "int32"))]
    one, many = (subject.device_array([0] * number, "int64") for number in (1, 133))
    launches = subject.call_log.launches
    calls: list[Callable[..., Any]] = [pair.table.step, pair.table.compute_slot_mappings]
    for call in calls:
        for positions, options in ((one, {"num_tokens_padded": 136}), (many, {})):
            with must_raise(ValueError, "R15", f"{call.__name__} of {len(positions)} positions, {options},"):
                call(*arrays, positions, **options)
    check(subject.call_log.launches == launches, "R15", "something was launched, or committed, before the refusal.")
    pair.check_outputs()


def test_rows_above_the_batch_are_refused_before_any_launch(subject: Subject) -> None:
    """More padded rows than the table has, fewer than the batch, or lengths that disagree raise.

    Cases: B2. Rules: R10.4, R15.
    """
    pair = make(subject, B16, rows=[[5]])
    two, three, five = (subject.device_array(range(number), "int32") for number in (2, 3, 5))
    position = subject.device_array([0], "int64")
    launches = subject.call_log.launches
    for name, call in (
        ("num_reqs_padded 5 of 4 rows", lambda: pair.table.gather(two, 5)),
        ("num_reqs_padded 1 of 2 requests", lambda: pair.table.gather(two, 1)),
        ("a batch of 5 requests in 4 rows", lambda: pair.table.gather(five)),
        ("no number of requests", lambda: pair.table.gather(None)),
        ("num_reqs_padded 5 of 4 rows", lambda: pair.table.step(two, three, position, num_reqs_padded=5)),
        ("idx_mapping of 2, query_start_loc of 2", lambda: pair.table.step(two, two, position)),
        ("idx_mapping of 2, query_start_loc of 5", lambda: pair.table.compute_slot_mappings(two, five, position)),
        ("num_computed_tokens of 3", lambda: pair.table.gather(two, num_computed_tokens=three)),
    ):
        with must_raise(ValueError, "R10.4, R15", name):
            call()
    check(subject.call_log.launches == launches, "R15", "something was launched, or committed, before the refusal.")


def test_dtypes_are_exact(subject: Subject) -> None:
    """An int64 idx_mapping, int32 positions, floats and two-dimensional arrays raise, and nothing is committed.

    Cases: B2. Rules: R10.8, R12.
    """
    pair = make(subject, B16, rows=[[5]])
    right: dict[str, tuple[list[Any], str]] = {
        "idx_mapping": ([0], "int32"),
        "query_start_loc": ([0, 1], "int32"),
        "positions": ([0], "int64"),
    }
    launches = subject.call_log.launches
    for name, wrong in (("idx_mapping", "int64"), ("query_start_loc", "int64"), ("positions", "int32")):
        for dtype in (wrong, "float32"):
            inputs = right | {name: (right[name][0], dtype)}
            with must_raise(TypeError, "R10.8, R12", f"{name} of {dtype}"):
                pair.table.step(*(subject.device_array(values, dtype) for values, dtype in inputs.values()))
    for name in right:
        nested = right | {name: ([right[name][0]], right[name][1])}
        with must_raise(ValueError, "R10.8, R12", f"a two-dimensional {name}"):
            pair.table.step(*(subject.device_array(values, dtype) for values, dtype in nested.values()))
    check(subject.call_log.launches == launches, "R10.8", "something was launched, or committed, before the refusal.")


def test_rows_lie_a_width_apart_not_a_capacity(subject: Subject) -> None:
    """Four blocks a row in a width of six columns: row 1's first block is read at stride 6, never 4.

    Cases: B3. Rules: R3, R12.
    """
    pair = make(subject, B16, width_alignment=96, rows=[[1, 2, 3, 4], [5, 6, 7, 8], [9]])
    check(pair.host_tables()[0].shape == (4, 6), "R3", f"the table must be [4, 6], got {pair.host_tables()[0].shape}")
    seen = pair.step([1, 2], [0, 2, 4], [0, 63, 0, 16])
    expect_slots(seen, [80, 8 * 16 + 15, 144, PAD], "R12")
    expect_table(seen.block_tables[0], [[5, 6, 7, 8], [9]], "R10.1")


@pytest.mark.parametrize(
    ("block_size", "block_id", "position", "slot"),
    [(16, 200_000_000, 5, 3_200_000_005), (64, 33_554_432, 63, 2_147_483_711), (262_144, 9000, 0, 2_359_296_000)],
)
def test_slots_are_64_bits_wide(
    subject_once: Subject, block_size: int, block_id: int, position: int, slot: int
) -> None:
    """Slots beyond 2**31 come out whole.

    Cases: B4. Rules: R12, R16.
    """
    pair = make(subject_once, KVCacheGroup(block_size=block_size), width=1, rows=[[block_id]])
    pair.commit()
    slots = pair.compute([0], [0, 1], [position], num_tokens_padded=16)[0]
    check(slots.tolist() == [slot] + [PAD] * 15, "R12, R16", f"{slot}, then PAD, got {slots.tolist()}")


def test_negative_positions_are_pad(subject_once: Subject) -> None:
    """A position below 0 is PAD in every mode: no division of it may find a block.

    Cases: B5. Rules: R13, R14.
    """
    for group in (B16, KVCacheGroup(block_size=16, slot_mode="ring")):
        pair = make(subject_once, group, rows=[[5]])
        pair.commit()
        positions = [-1, -16, -17, -(2**40), -(2**63), 0]
        slots = pair.compute([0], [0, 6], positions, num_tokens_padded=16)[0]
        check(slots.tolist() == [PAD] * 5 + [80] + [PAD] * 10, "R13", f"five PADs, then 80, got {slots.tolist()}")


def test_int32_slots_need_a_cache_they_can_count(subject_once: Subject) -> None:
    """One block more than 2**31 slots is refused, and so is a cache of unknown size.

    Cases: B6. Rules: R16.
    """
    for num_blocks in (33_554_433, None):
        with must_raise(ConfigError, "R16", f"int32 slots with num_blocks {num_blocks} and block_size 64"):
            small_config(KVCacheGroup(block_size=64, num_blocks=num_blocks), slot_dtype="int32")
    small_config(KVCacheGroup(block_size=64, num_blocks=33_554_432), slot_dtype="int32")
    small_config(KVCacheGroup(block_size=64, slot_mode="none"), slot_dtype="int32")
