"""Poison and garbage: what no kernel may read, what none may write, whatever the device's arrays hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from blocktable import KVCacheGroup
from blocktable.backend import Writes
from blocktable_conformance.asserts import check, check_table, fail
from blocktable_conformance.cases import make, shard
from blocktable_conformance.oracle import Slot
from blocktable_conformance.pair import Pair
from blocktable_conformance.strategies import INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN
from blocktable_conformance.subject import Subject

TRAP = 1_000_003
"""A block id that no row holds: a table or slot that shows it has read past a filled count."""

GROUPS = (
    KVCacheGroup(block_size=4),
    KVCacheGroup(block_size=6, kernel_block_size=2),
    KVCacheGroup(block_size=4, slot_mode="ring", blocks_per_row=3),
    KVCacheGroup(block_size=4, sliding_window=6, null_is_pad=True),
    KVCacheGroup(block_size=16, slot_mode="none", blocks_per_row=2),
    KVCacheGroup(block_size=4, sharded=False),
)


def _trapped_pair(subject: Subject, rank: int) -> Pair:
    """Return a table of rows of 0 to 3 blocks, with a trap in every column after a filled count."""
    pair = make(subject, *GROUPS, width=8, width_alignment=8, context_parallel=shard(2, rank, 2))
    for row in range(4):
        held = [list(range(10 * row + 1, 10 * row + 1 + min(row, shape.capacity))) for shape in pair.oracle.shapes]
        pair.do("set_row", row, held)
    pair.commit()
    _write_traps(pair)
    return pair


def _write_traps(pair: Pair) -> None:
    arena = pair.config.arena
    offsets, lengths = [], []
    for group, filled in enumerate(pair.oracle.device_filled()):
        for row, columns in enumerate(filled):
            width = arena.widths[group]
            if columns < width:
                offsets.append(arena.group_offsets[group] + row * width + columns)
                lengths.append(width - columns)
    values = np.full(sum(lengths), TRAP, np.int32)
    writes = Writes(arena, np.array(offsets, np.int64), np.array(lengths, np.int32), values)
    pair.table.store.write(writes, stream=None)


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_past_a_filled_count_is_read(subject_once: Subject, rank: int) -> None:
    """With traps after every filled count batch tables show NULL there, and no slot lies in a trap.

    Rules: R10.5, R11, R13.
    """
    pair = _trapped_pair(subject_once, rank)
    for computed in (None, [0, 9, 30]):
        pair.gather([3, 1, 2], 4, num_computed_tokens=computed, rules="R10.5")
    positions = [*range(0, 40, 3), -1]
    starts = [0, len(positions)]
    for row in range(4):
        mappings = pair.compute([row], starts, positions)
        for group, slots in enumerate(mappings):
            size = pair.oracle.shapes[group].kernel_block_size
            trapped = [token for token, slot in enumerate(slots.tolist()) if slot // size == TRAP]
            check(not trapped, "R13", f"row {row}, group {group}: tokens {trapped} got slots of an unallocated block.")


def test_a_batch_row_that_grew_and_shrank_over_traps(subject: Subject) -> None:
    """Steps over trapped rows in changing order: what a batch row held before is NULL after.

    Rules: R5, R10.1, R10.2, R10.3.
    """
    pair = _trapped_pair(subject, 0)
    for idx_mapping in ([3, 2, 1, 0], [0, 1, 2, 3], [-1, 3], [2]):
        pair.gather(idx_mapping, 4)


# Garbage. Slots are unspecified where query_start_loc decreases, but nothing outside the arrays is read or written.

GUARD = 123_456_789
"""What stands before and after an output array; a kernel that writes outside changes it."""

GARBAGE_STARTS = [
    [0, 5, 3, 8, 8],
    [8, 0, 8, 0, 8],
    [-3, 2, 4, 4, 9],
    [0, INT32_MAX, INT32_MIN, 7, 3],
    [INT32_MIN, INT32_MAX, 0, 1, INT32_MAX],
    [INT32_MAX] * 5,
    [0, 0, 0, 0, INT32_MIN],
    [-5, -4, -3, -2, -1],
]
GARBAGE_ROWS = [[0, 1, 2, 3], [INT32_MIN, INT32_MAX, -1, 4], [3, -2, 2**20, 0]]
GARBAGE_POSITIONS = [0, -1, 2**40, -(2**40), INT64_MIN, INT64_MAX, 7, 2**31]


def _guarded(subject: Subject, length: int) -> tuple[Any, Any]:
    """Return a whole array of guards, and the view of `length` entries in its middle."""
    whole = subject.device_array([GUARD] * (length + 64), "int64")
    return whole, whole[32 : 32 + length]


@pytest.mark.parametrize("starts", GARBAGE_STARTS, ids=str)
def test_garbage_starts_write_nothing_outside(subject_once: Subject, starts: list[int]) -> None:
    """Whatever query_start_loc holds, only the output arrays are written, and no row changes.

    Rules: R15.
    """
    pair = make(subject_once, *GROUPS[:3], rows=[([5, 6], [2, 3], [7, 9])] * 4)
    pair.commit()
    for idx_mapping in GARBAGE_ROWS[:2]:
        _compute_guarded(pair, idx_mapping, starts, GARBAGE_POSITIONS)
    pair.check_device()


def _compute_guarded(pair: Pair, idx_mapping: list[int], starts: list[int], positions: Sequence[int]) -> None:
    subject, length = pair.subject, len(positions) + 3
    guarded = [_guarded(subject, length) for _ in pair.config.groups]
    pair.table.compute_slot_mappings(
        subject.device_array(idx_mapping, "int32"),
        subject.device_array(starts, "int32"),
        subject.device_array(positions, "int64"),
        out=[view for _, view in guarded],
    )
    for group, (whole, _) in enumerate(guarded):
        got = subject.to_host(whole)
        outside = np.concatenate((got[:32], got[32 + length :]))
        check(bool((outside == GUARD).all()), "R15", f"group {group}: entries outside the output were written.")


@pytest.mark.parametrize("starts", GARBAGE_STARTS, ids=str)
def test_garbage_starts_in_a_step_harm_nothing_else(subject: Subject, starts: list[int]) -> None:
    """A step over garbage still commits and gathers right, and the next step is right in everything.

    Rules: R9.1, R10.1, R10.2, R15.
    """
    pair = make(subject, *GROUPS[:3], rows=[([5, 6], [2, 3], [7, 9])] * 4)
    inputs = (([3, 1, -9, 0], "int32"), (starts, "int32"), (GARBAGE_POSITIONS, "int64"))
    step = pair.table.step(*(subject.device_array(values, dtype) for values, dtype in inputs))
    pair.oracle.commit()
    pair.check_device()
    for group, expected in enumerate(pair.oracle.gather([3, 1, -9, 0])):
        filled = [len(pair.oracle.columns(group, row)) if row >= 0 else 0 for row in (3, 1, -9, 0)]
        table, rules = (
            subject.to_host(step.block_tables[group]),
            ["R10.1, R15", "R10.1, R15", "R10.2, R15", "R10.1, R15"],
        )
        check_table(table, expected, filled, rules=rules, what="the batch table", group=group)
    pair.step([1], [0, 3], [0, 4, 9])


def test_inputs_inside_larger_arrays(subject: Subject) -> None:
    """Inputs that are views into arrays of other, plausible values: nothing before or after the views is read.

    Rules: R10.8, R15, R21.
    """
    pair = make(subject, *GROUPS[:2], rows=[([5, 6], [2, 3]), ([7], [4]), ([8], [9]), ([10], [11])])
    step = pair.table.step(
        subject.device_array([2, 3, 1, 0, 2, 3], "int32")[2:4],
        subject.device_array([1, 2, 0, 2, 9, 12, 14], "int32")[2:5],
        subject.device_array([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], "int64")[2:6],
    )
    pair.oracle.commit()
    mapping, starts, positions = [1, 0], [0, 2, 9], [3, 4, 5, 6]
    pair.check_written(mapping, starts, positions)
    for group, table in enumerate(pair.oracle.gather(mapping)):
        check(
            subject.to_host(step.block_tables[group]).tolist() == table[:2],
            "R10.8",
            "the batch table read past a view.",
        )


@pytest.mark.parametrize("idx_mapping", GARBAGE_ROWS, ids=str)
def test_garbage_rows_and_positions(subject: Subject, idx_mapping: list[int]) -> None:
    """Garbage in idx_mapping and positions is no reason for an unspecified result: NULL rows and PAD, exactly.

    Rules: R10.2, R12, R13.
    """
    pair = make(subject, *GROUPS, rows=[([5, 6], [2, 3], [7, 9], [4], [8], [1, 3])] * 4)
    pair.step(idx_mapping, [0, 2, 4, 6, 8], GARBAGE_POSITIONS, num_computed_tokens=[INT32_MAX, INT32_MIN, -1, 5])
    pair.step(idx_mapping, [0, 8, 8, 8, 8], GARBAGE_POSITIONS)


@pytest.mark.parametrize(("world_size", "interleave_size"), [(1, 1), (2, 2), (3, 1), (8, 2)])
def test_positions_at_the_ends_of_64_bits(subject_once: Subject, world_size: int, interleave_size: int) -> None:
    """The whole range of int64 is a legal position: ownership and columns are worked out without overflow.

    Rules: R12, R13, R18.
    """
    edges = [INT64_MAX, INT64_MAX - 1, INT64_MIN, INT64_MIN + 1, -1, 0, 2**62, 2**32, 2**31 - 1, 2**31]
    for rank in {0, world_size - 1}:
        share = shard(world_size, rank, interleave_size)
        pair = make(subject_once, *GROUPS[:3], context_parallel=share, rows=[([5, 6], [2, 3], [7, 9])])
        pair.commit()
        pair.compute([0], [0, len(edges)], edges)


def test_the_first_and_last_entries_of_everything(subject: Subject) -> None:
    """Full rows, the full batch and the full buffer: the last row's last column, the last token's slot.

    Rules: R10.1, R12, R15.
    """
    pair = make(subject, *GROUPS, width=6, context_parallel=shard(2, 1, 2))
    for row in range(4):
        pair.do(
            "set_row", row, [[100 * row + index + 1 for index in range(shape.capacity)] for shape in pair.oracle.shapes]
        )
    last = max(shape.capacity * shape.block_size * 2 for shape in pair.oracle.shapes)
    positions = [last - 1 - index for index in range(8)] + list(range(8))
    seen = pair.step([3, 2, 1, 0], [0, 4, 8, 12, 16], positions)
    expected: list[Slot] = pair.outputs[0].slots[0]
    if any(slot.request is None for slot in expected):
        fail("R15", "the full buffer must have no entry without a token.")
    check(len(seen.buffer_slots[0]) == 16, "R15", "the buffer must hold 16 tokens.")
