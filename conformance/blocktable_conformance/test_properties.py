"""Properties that hold without an oracle: laws that outputs and row operations keep among themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from blocktable import BlockTable, BlockTableConfig, BlockTableError
from blocktable_conformance.asserts import check, must_raise
from blocktable_conformance.cases import shard
from blocktable_conformance.oracle import Geometry
from blocktable_conformance.pair import Pair
from blocktable_conformance.strategies import (
    ARRAYS,
    BatchDraw,
    as_given,
    batches,
    bulk_calls,
    configs,
    distinct_rows,
    integers_as_given,
    row_counts,
    row_ids,
)
from blocktable_conformance.subject import HostArray, Subject


def filled_pair(subject: Subject, data: st.DataObject, config: BlockTableConfig) -> Pair:
    """Return a pair whose rows hold drawn blocks, committed."""
    pair = Pair(subject, config)
    _fill(pair, data)
    pair.table.commit()
    pair.oracle.commit()
    return pair


def _fill(pair: Pair, data: st.DataObject) -> None:
    """Give each row up to its capacity, in one bulk call."""
    rows = list(range(pair.oracle.num_rows))
    pair.do("set_rows", *data.draw(bulk_calls(pair.oracle, rows, replace=True, fit=True)))


def draw_batch(data: st.DataObject, pair: Pair) -> BatchDraw:
    """Draw a batch with an idx_mapping."""
    batch: BatchDraw = data.draw(batches(pair.config, pair.oracle))
    assert batch.idx_mapping is not None
    return batch


def compute(pair: Pair, batch: BatchDraw, outputs: int = 0) -> list[HostArray]:
    """Compute the slots of a drawn batch."""
    return pair.compute(batch.idx_mapping, batch.query_start_loc, batch.positions, outputs=outputs)


@given(data=st.data(), config=configs())
def test_each_slot_lies_in_a_block_of_its_own_row(
    subject_once: Subject, data: st.DataObject, config: BlockTableConfig
) -> None:
    """Every slot that is not PAD is one that `locate` finds in the token's row, at the token's position.

    Rules: R12, R13.
    """
    pair = filled_pair(subject_once, data, config)
    batch = draw_batch(data, pair)
    assert batch.idx_mapping is not None
    mappings = compute(pair, batch)
    for request, row in enumerate(batch.idx_mapping):
        for token in range(batch.query_start_loc[request], batch.query_start_loc[request + 1]):
            for group, slots in enumerate(mappings):
                pad = pair.oracle.shapes[group].pad_slot_id
                if token < len(batch.positions) and slots[token] != pad:
                    _check_owner(pair, group, row, batch.positions[token], int(slots[token]))


def _check_owner(pair: Pair, group: int, row: int, position: int, slot: int) -> None:
    where = f"slot {slot} of group {group}, row {row}, position {position}"
    holders = pair.table.locate(group, slot).rows
    mine = [held for held in holders if held[0] == row]
    check(bool(mine), "R13", f"{where} lies in a block of rows {[held[0] for held in holders]}.")
    if pair.config.groups[group].slot_mode == "linear":
        check(position in [held[2] for held in mine], "R12", f"{where} is the slot of {mine}.")


@given(data=st.data(), config=configs())
def test_outputs_do_not_depend_on_what_came_before(
    subject: Subject, data: st.DataObject, config: BlockTableConfig
) -> None:
    """A step after another one gives what it gives into fresh buffers: nothing stale, in tables and slots.

    Rules: R5, R10.6, R15, R17.
    """
    pair = filled_pair(subject, data, config)
    fresh = pair.create_buffers()
    first, second = draw_batch(data, pair), draw_batch(data, pair)
    _step(pair, first, 0)
    used = _step(pair, second, 0)
    new = _step(pair, second, fresh)
    for group in range(len(config.groups)):
        same = np.array_equal(used.block_tables[group], new.block_tables[group])
        check(same, "R10.6", f"the batch table of group {group} depends on the step before it.")
        same = np.array_equal(used.buffer_slots[group], new.buffer_slots[group])
        check(same, "R15", f"the slots of group {group} depend on the step before it.")


def _step(pair: Pair, batch: BatchDraw, outputs: int) -> Any:
    return pair.step(
        batch.idx_mapping,
        batch.query_start_loc,
        batch.positions,
        num_reqs_padded=batch.num_reqs_padded,
        num_computed_tokens=batch.num_computed_tokens,
        outputs=outputs,
    )


@given(data=st.data(), config=configs())
def test_the_order_of_positions_does_not_matter(
    subject_once: Subject, data: st.DataObject, config: BlockTableConfig
) -> None:
    """One request's positions in any order, and in two requests of one row, get the same slots, each its own.

    But in rings, where a token depends on its request's last one. Rules: R12.
    """
    pair = filled_pair(subject_once, data, config)
    most = config.max_num_batched_tokens
    positions = data.draw(st.lists(st.integers(0, config.max_model_len), min_size=1, max_size=min(most, 8)))
    order = data.draw(st.permutations(range(len(positions))))
    row = data.draw(st.integers(0, pair.oracle.num_rows - 1))
    straight = pair.compute([row], [0, len(positions)], positions)
    mixed_positions = [positions[index] for index in order]
    mixed = pair.compute([row], [0, len(positions)], mixed_positions)
    outcomes = [mixed]
    if config.max_num_reqs > 1:
        cut = data.draw(st.integers(0, len(positions)))
        outcomes.append(pair.compute([row, row], [0, cut, len(positions)], mixed_positions))
    for outcome in outcomes:
        for group, slots in enumerate(outcome):
            if config.groups[group].slot_mode == "ring":
                continue
            expected = straight[group][list(order)].tolist()
            got = slots[: len(order)].tolist()
            check(got == expected, "R12", f"group {group}: slots in another order are {got}, not {expected}.")


@given(data=st.data(), world_size=st.integers(2, 4), interleave_size=st.sampled_from([1, 2, 4]))
def test_each_token_has_one_owner(
    subject_once: Subject, data: st.DataObject, world_size: int, interleave_size: int
) -> None:
    """Over all ranks each position of a sharded group has one slot, and a replicated one as many as there are ranks.

    Rules: R13, R18.
    """
    config: BlockTableConfig = data.draw(configs(shard(world_size, 0, interleave_size)))
    positions = data.draw(
        st.lists(st.integers(0, config.max_model_len - 1), max_size=min(8, config.max_num_batched_tokens))
    )
    holders = [np.zeros(len(positions), np.int64) for _ in config.groups]
    for rank in range(world_size):
        for group, slots in enumerate(
            _full_row_slots(subject_once, config, shard(world_size, rank, interleave_size), positions)
        ):
            holders[group] += slots[: len(positions)] != config.groups[group].pad_slot_id
    for group, spec in enumerate(config.groups):
        if spec.slot_mode in ("linear", "ring") and spec.blocks_per_row is None:
            ranks = 1 if spec.is_sharded else world_size
            check(
                bool((holders[group] == ranks).all()),
                "R18",
                f"group {group}: positions {positions} are held by {holders[group].tolist()} ranks, not {ranks}.",
            )


def _full_row_slots(
    subject: Subject, config: BlockTableConfig, share: Any, positions: Sequence[int]
) -> list[HostArray]:
    """Return the slots of positions in a row filled to its capacity with blocks that are not NULL, on one rank."""
    from dataclasses import replace

    pair = Pair(subject, replace(config, context_parallel=share))
    pair.do("set_row", 0, [_distinct_ids(shape) for shape in pair.oracle.shapes])
    pair.table.commit()
    pair.oracle.commit()
    return pair.compute([0], [0, len(positions)], positions)


def _distinct_ids(shape: Geometry) -> list[int]:
    first = shape.null_block_id + 1
    return [(first + index % (shape.block_id_limit - 1)) % shape.block_id_limit for index in range(shape.capacity)]


# Laws of row operations. They hold on the host: two tables that took different roads hold the same rows.


def _same_rows(one: BlockTable, other: BlockTable, law: str) -> None:
    for group in range(len(one.config.groups)):
        same = np.array_equal(one.host_table(group), other.host_table(group))
        check(same, "R4, R5", f"{law} must leave the same rows in group {group}.")
    check(np.array_equal(one.num_blocks_per_row, other.num_blocks_per_row), "R4", f"{law} must leave the same counts.")


def _twins(subject: Subject, data: st.DataObject, config: BlockTableConfig) -> tuple[Pair, Pair]:
    """Return two tables with the same drawn rows."""
    one, other = Pair(subject, config), Pair(subject, config)
    rows = list(range(config.num_rows))
    call = data.draw(bulk_calls(one.oracle, rows, replace=True, fit=True))
    for pair in (one, other):
        pair.do("set_rows", *call)
    return one, other


@given(data=st.data(), config=configs())
def test_a_bulk_call_equals_single_calls(subject_once: Subject, data: st.DataObject, config: BlockTableConfig) -> None:
    """Each bulk form does what its single form does to one row after another.

    Rules: R4, R6.
    """
    one, other = _twins(subject_once, data, config)
    shapes = one.oracle.shapes
    rows = data.draw(distinct_rows(config.num_rows))
    counts = data.draw(row_counts(len(rows), 2))
    cells = [
        [[1 + (row + index) % 4 for index in range(count)] for row, count in zip(rows, counts, strict=True)]
        for _ in shapes
    ]
    flat = [[block_id for cell in group for block_id in cell] for group in cells]
    dtypes = data.draw(st.sampled_from(ARRAYS))
    given_ids = [as_given(ids, dtypes[1]) for ids in flat]
    given_rows, given_counts = as_given(rows, dtypes[0]), as_given(counts, dtypes[2])
    for bulk, single in (("append_rows", "append_row"), ("set_rows", "set_row")):
        try:
            getattr(one.table, bulk)(given_rows, given_ids, given_counts)
        except BlockTableError:
            assume(False)  # over capacity: refused whole, while the single calls would stop half-way
        for index, row in enumerate(rows):
            getattr(other.table, single)(row, [group[index] for group in cells])
        _same_rows(one.table, other.table, f"{bulk} and {single}")
    kept = [row % 3 for row in rows]
    one.table.truncate_rows(given_rows, as_given(kept, dtypes[2]))
    for row, number in zip(rows, kept, strict=True):
        other.table.truncate_row(row, number)
    _same_rows(one.table, other.table, "truncate_rows and truncate_row")
    one.table.clear_rows(given_rows[:2])
    for row in rows[:2]:
        other.table.clear_row(row)
    _same_rows(one.table, other.table, "clear_rows and clear_row")


@given(data=st.data(), config=configs())
def test_laws_of_row_operations(subject_once: Subject, data: st.DataObject, config: BlockTableConfig) -> None:
    """Two swaps are none, a move is a copy and a clear, a set is a clear and an append, a rollback undoes an append.

    Rules: R4, R5.
    """
    one, other = _twins(subject_once, data, config)
    a, b = (data.draw(st.integers(0, config.num_rows - 1)) for _ in range(2))
    one.table.swap_rows(a, b)
    one.table.swap_rows(b, a)
    _same_rows(one.table, other.table, "two swaps and none")
    one.table.move_row(a, b)
    other.table.copy_row(a, b)
    if a != b:
        other.table.clear_row(a)
    _same_rows(one.table, other.table, "move, and copy and clear")
    ids = data.draw(row_ids(one.oracle, b, replace=True, fit=True))
    one.table.set_row(b, ids)
    other.table.clear_row(b)
    other.table.append_row(b, ids)
    _same_rows(one.table, other.table, "set, and clear and append")
    before = one.table.num_blocks_per_row[:, b].tolist()
    try:
        one.table.append_row(b, ids)
    except BlockTableError:
        assume(False)  # no room
    one.table.truncate_row(b, before)
    _same_rows(one.table, other.table, "append and truncate, and nothing")


@given(data=st.data(), config=configs())
def test_a_permutation_and_its_inverse_change_nothing(
    subject_once: Subject, data: st.DataObject, config: BlockTableConfig
) -> None:
    """Rows sent round and back are where they were, on the host and after a commit on the device.

    Rules: R4, R9.1.
    """
    one, other = _twins(subject_once, data, config)
    src = list(range(config.num_rows))
    dst = list(data.draw(st.permutations(src)))
    given_src, given_dst = (data.draw(integers_as_given(rows)) for rows in (src, dst))
    one.do("permute_rows", given_src, given_dst)
    one.do("permute_rows", given_dst, given_src)
    _same_rows(one.table, other.table, "a permutation and its inverse, and nothing")
    one.commit()


@given(data=st.data(), config=configs())
def test_a_refused_operation_leaves_nothing_behind(
    subject_once: Subject, data: st.DataObject, config: BlockTableConfig
) -> None:
    """An operation that raises changes no entry and no count, and the commit after it sends nothing.

    The mistake is in the last row and the last group, where a table that checks as it goes has done the rest.

    Rules: R6, R7.
    """
    pair = filled_pair(subject_once, data, config)
    shapes, rows = pair.oracle.shapes, list(range(config.num_rows))
    room = [shape.capacity - len(pair.oracle.rows[group][-1]) for group, shape in enumerate(shapes)]
    # One block for each group and row, and one too many, or a wrong one, at the very end.
    fitting = [[1] * (room[group] > 0) for group in range(len(shapes))]
    wrong = data.draw(st.sampled_from(["capacity", "id", "bool", "row"]))
    mistakes: dict[str, list[Any]] = {
        "capacity": [1] * (room[-1] + 1),
        "id": [shapes[-1].block_id_limit],
        "bool": [True],
        "row": [],
    }
    last = mistakes[wrong]
    row = rows[-1] + (wrong == "row")
    _refused(pair, "append_row", row, [*fitting[:-1], last])
    _refused(pair, "set_row", row, [*fitting[:-1], [1] * (shapes[-1].capacity + 1) if wrong == "capacity" else last])
    if wrong != "bool":
        counts = [[0] * (len(rows) - 1) + [len(ids)] for ids in (*fitting[:-1], last)]
        _refused(pair, "append_rows", [*rows[:-1], row], [*fitting[:-1], last], counts)
    with subject_once.recording() as sent:
        pair.commit()
    check(not any(writes.values for writes in sent), "R6", f"refused operations left something to send: {sent}")


def _refused(pair: Pair, operation: str, *args: Any) -> None:
    before = [table.copy() for table in pair.host_tables()]
    with must_raise(BlockTableError, "R6, R7", f"{operation}{args}"):
        getattr(pair.table, operation)(*args)
    for old, new in zip(before, pair.host_tables(), strict=True):
        check(np.array_equal(old, new), "R6", f"{operation}{args} raised, but changed the host.")
    pair.check_host()
