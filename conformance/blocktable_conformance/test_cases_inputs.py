"""Inputs of steps that follow one another: what an array is when a step is called counts, not what it was before.

A table may keep what it found out about the arrays of a step. Whatever it keeps, every case here must come out as if it
were the table's first step.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blocktable import ArgumentError, BlockTableError, DtypeError, KVCacheGroup
from blocktable_conformance.asserts import check, check_values, must_raise
from blocktable_conformance.cases import NO_REQUEST, expect_slots, make, one_request
from blocktable_conformance.oracle import PAD
from blocktable_conformance.pair import Pair
from blocktable_conformance.subject import Subject
from blocktable_conformance.test_memory import without_collector

B4 = KVCacheGroup(block_size=4)
ROWS = [[2, 9, 5, 7], [3, 8]]


def host_array(values: Any, dtype: str) -> Any:
    """Return a numpy array, which every backend takes."""
    return np.array(values, dtype)


def makers(subject: Subject) -> list[Callable[[Any, str], Any]]:
    """Return what makes the arrays of a step: on the device, and on the host."""
    return [subject.device_array, host_array]


def slots_of(pair: Pair, *inputs: Any, **options: Any) -> Any:
    """Do a step of the table alone; return its slots, on the host."""
    return pair.subject.to_host(pair.table.step(*inputs, **options).slot_mappings[0])


def reshape(array: Any, shape: tuple[int, ...], step: int = 1) -> None:
    """Change the shape of an array in place, and the entries between two of its own; skip where that cannot be done."""
    strides = tuple(step * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    if hasattr(array, "as_strided_"):
        array.as_strided_(shape, strides)
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            array.shape = shape
            array.strides = tuple(array.dtype.itemsize * stride for stride in strides)
    except (AttributeError, ValueError) as error:
        pytest.skip(f"{type(array).__name__} cannot be changed in place: {error}")


def test_host_arrays_filled_again(subject: Subject) -> None:
    """The same arrays hold another batch at each step, as those of an engine do.

    Rules: R10.8, R15, R17.
    """
    pair = make(subject, B4, rows=ROWS)
    idx_mapping, starts, positions = (
        host_array([0, 1], "int32"),
        host_array([0, 1, 2], "int32"),
        host_array([0, 0], "int64"),
    )
    for rows, ends, places, slots in (
        ([0, 1], [1, 2], [0, 5], [8, 33]),
        ([1, 0], [1, 2], [5, 0], [33, 8]),
        ([1, NO_REQUEST], [1, 2], [4, 4], [32, PAD]),
        ([0, 1], [2, 2], [15, 8], [31, 20]),
        ([0, 1], [0, 1], [7, 1], [35, PAD]),
    ):
        idx_mapping[:], starts[1:], positions[:] = rows, ends, places
        check_values(slots_of(pair, idx_mapping, starts, positions), slots, "R17", f"the slots of rows {rows}")


def test_new_arrays_of_the_same_sizes(subject: Subject) -> None:
    """Many steps of one size over arrays that are all alive, so that no two lie in one place; then the first again.

    Rules: R12, R17.
    """
    pair = make(subject, B4, rows=ROWS)
    for new in makers(subject):
        steps = [
            (new([row], "int32"), new([0, 2], "int32"), new([place, place + 1], "int64"))
            for row in (0, 1)
            for place in range(7)
        ]
        for turn in range(2):
            for index, inputs in enumerate(steps):
                row, place = divmod(index, 7)
                expected = [4 * ROWS[row][p // 4] + p % 4 for p in (place, place + 1)]
                check_values(slots_of(pair, *inputs), expected, "R17", f"the slots of step {index} in turn {turn}")


def test_sizes_sets_and_paddings_in_turn(subject: Subject) -> None:
    """Steps of other sizes, into another set, padded and not, again and again: each is what it would be alone.

    Rules: R10, R15, R17.
    """
    pair = make(subject, B4, rows=ROWS)
    other = pair.create_buffers()
    for turn in range(3):
        one_request(pair, [0, 1, 2], outputs=other)
        pair.step([0, 1], [0, 1, 2], [turn, turn], num_reqs_padded=4, num_tokens_padded=6)
        expect_slots(one_request(pair, [3, 4], row=1), [15, 32], "R17")
        pair.step([1, 0], [0, 1, 2], [turn, turn])
        pair.step(None, [0, 1, 2], [turn, 4])
        one_request(pair, [turn], num_tokens_padded=16)
        pair.check_outputs(other, "R17")


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "same"])
def test_rows_of_the_padding_are_looked_at_in_every_step(subject: Subject, is_new: bool) -> None:
    """With the identity a row after the batch is filled between two steps over the same, or over new, arrays.

    Rules: R10.10.
    """
    pair = make(subject, B4, rows=ROWS)
    starts, positions = host_array([0, 1, 2], "int32"), host_array([0, 0], "int64")
    for _ in range(2):
        slots_of(pair, None, starts, positions, num_reqs_padded=3)
    pair.do("set_row", 2, [4])
    if is_new:
        starts, positions = starts.copy(), positions.copy()
    with must_raise(ArgumentError, "R10.10", "a step whose padding is row 2, which holds a block"):
        slots_of(pair, None, starts, positions, num_reqs_padded=3)
    pair.do("clear_row", 2)
    slots_of(pair, None, starts, positions, num_reqs_padded=3)


@pytest.mark.parametrize("shape", [(2, 2), (4,)], ids=["two dimensions", "strided"])
@pytest.mark.parametrize("device", [True, False], ids=["device", "host"])
def test_an_array_reshaped_in_place_is_refused(subject: Subject, device: bool, shape: tuple[int, ...]) -> None:
    """The step before took it as it was. It is refused each time, and what is pending stays so.

    Rules: R15, R17.
    """
    pair = make(subject, B4, rows=ROWS)
    new = makers(subject)[0 if device else 1]
    idx_mapping, starts = new([0], "int32"), new([0, 4], "int32")
    positions = new([*range(12)], "int64")[:4]
    for _ in range(2):
        check_values(slots_of(pair, idx_mapping, starts, positions), [8, 9, 10, 11], "R12", "the slots")
    pair.do("append_row", 1, [6])
    reshape(positions, shape, step=1 if len(shape) > 1 else 3)
    with subject.recording() as sent:
        for _ in range(2):
            with must_raise(
                ArgumentError, "R15, R17", f"a step over positions of {'2 dimensions' if shape[1:] else 'strides'}"
            ):
                pair.table.step(idx_mapping, starts, positions)
    check(not sent, "R17", "a step that is refused must commit nothing.")
    reshape(positions, (4,))
    check_values(slots_of(pair, idx_mapping, starts, positions), [8, 9, 10, 11], "R12", "the slots")
    check(pair.table.num_bytes_sent > 0, "R9.1", "what was pending must be sent by the next step that is taken.")


def test_another_dtype_of_the_same_sizes_is_refused(subject: Subject) -> None:
    """Positions of int32, an idx_mapping of int64, a strided array, after a step that had the right ones.

    Rules: R15, R17.
    """
    pair = make(subject, B4, rows=ROWS)
    for new in makers(subject):
        right = new([0, 1], "int32"), new([0, 1, 2], "int32"), new([0, 5], "int64")
        slots_of(pair, *right)
        for place, wrong in (
            (0, new([0, 1], "int64")),
            (1, new([0, 1, 2], "int64")),
            (2, new([0, 5], "int32")),
            (2, new([0, 5], "float64")),
            (2, new([0, 9, 5, 9], "int64")[::2]),
        ):
            inputs = [wrong if index == place else array for index, array in enumerate(right)]
            with must_raise(BlockTableError, "R15, R17", f"a step with a wrong array in place {place}"):
                slots_of(pair, *inputs)
        slots_of(pair, *right)


@pytest.mark.parametrize("name", ["num_reqs_padded", "num_tokens_padded"])
def test_sizes_that_only_equal_ints_are_refused(subject: Subject, name: str) -> None:
    """True, 1.0 and a list, after a step that was given 1.

    Rules: R15, R17.
    """
    pair = make(subject, B4, rows=ROWS)
    inputs = host_array([0], "int32"), host_array([0, 1], "int32"), host_array([3], "int64")
    size: Any
    for size in (1, np.int64(1), 1):
        check_values(slots_of(pair, *inputs, **{name: size}), [11], "R12", "the slots")
    for size in (True, np.bool_(True), 1.0, [1]):
        with must_raise(DtypeError, "R15, R17", f"a step with {name}={size!r}"):
            slots_of(pair, *inputs, **{name: size})
    check_values(slots_of(pair, *inputs, **{name: 1}), [11], "R12", "the slots")


@pytest.mark.parametrize("device", [True, False], ids=["device", "host"])
def test_no_array_of_a_step_is_kept(subject: Subject, device: bool) -> None:
    """A table that held on to the inputs of its last steps would keep their memory from the next ones.

    Rules: R17.
    """
    pair = make(subject, B4, rows=ROWS)
    new = makers(subject)[0 if device else 1]

    def step(size: int) -> list[weakref.ref[Any]]:  # of so many requests of a token
        zeros, starts = [0] * size, [*range(size + 1)]
        arrays = new(zeros, "int32"), new(starts, "int32"), new(starts[:size], "int64"), new(zeros, "int32")
        slots_of(pair, *arrays[:3], num_computed_tokens=arrays[3])
        slots_of(pair, *arrays[:3])
        pair.table.gather(arrays[0])
        subject.backend.synchronize()
        return [weakref.ref(array) for array in arrays]

    step(1)  # the first use loads libraries, whose exceptions may keep frames
    gc.collect()
    with without_collector():
        kept = [reference() is not None for reference in step(1) + step(2)]
    check(not any(kept), "R17", f"of the 8 arrays of two steps {sum(kept)} are kept after them.")


def device_inputs(subject: Subject, *inputs: list[int]) -> list[Any]:
    """Return idx_mapping, query_start_loc and positions on the device."""
    return [
        subject.device_array(values, dtype) for values, dtype in zip(inputs, ("int32", "int32", "int64"), strict=True)
    ]


def require_addresses(array: Any) -> None:
    """Skip where arrays do not say where they lie."""
    if not any(hasattr(array, name) for name in ("data_ptr", "__array_interface__", "__cuda_array_interface__")):
        pytest.skip(f"{type(array).__name__} says no address.")


def test_an_input_inside_what_a_call_writes_is_refused(subject: Subject) -> None:
    """Slots given as positions, batch tables as rows: before anything is launched, also after right steps of that form.

    Rules: R17.
    """
    pair = make(subject, B4, rows=ROWS)
    right = device_inputs(subject, [1], [0, 2], [4, 5])
    table: Any = pair.table
    buffers = table.buffers
    require_addresses(buffers.slot_mappings[0])
    positions, rows = buffers.slot_mappings[0][:2], buffers.block_tables[0].reshape(-1)[:1]
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("a step", lambda: table.step(*right[:2], positions)),
        ("a step", lambda: table.step(rows, *right[1:])),
        ("slots", lambda: table.compute_slot_mappings(*right[:2], positions)),
        ("a gather", lambda: table.gather(rows)),
        ("slots", lambda: table.compute_slot_mappings(*right, out=[right[2]])),
    ]
    for inputs in (right, device_inputs(subject, [1], [0, 2], [4, 5])):
        check_values(slots_of(pair, *inputs), [32, 33], "R12", "the slots")
    pair.do("append_row", 0, [6])
    for name, call in calls:
        launches = subject.call_log.launches
        with must_raise(ArgumentError, "R17", f"{name} that reads what it writes"):
            call()
        check(subject.call_log.launches == launches, "R17", f"{name} was launched before the refusal.")
    check_values(slots_of(pair, *right), [32, 33], "R12", "the slots")


def test_outputs_that_overlap_are_refused(subject: Subject) -> None:
    """The slots of two groups, one entry of which is the same.

    Rules: R17.
    """
    pair = make(subject, B4, B4, rows=[[[2], [9]]])
    inputs = device_inputs(subject, [0], [0, 2], [1, 2])
    pair.commit()
    memory = subject.device_array([77] * 9, "int64")
    require_addresses(memory)
    launches = subject.call_log.launches
    with must_raise(ArgumentError, "R17", "two outputs that share an entry"):
        pair.table.compute_slot_mappings(*inputs, out=[memory[:5], memory[4:]])
    check(subject.call_log.launches == launches, "R17", "something was launched before the refusal.")
    pair.table.compute_slot_mappings(*inputs, out=[memory[:5], memory[5:]])
    check_values(subject.to_host(memory), [9, 10, PAD, PAD, PAD, 37, 38, PAD, PAD], "R17", "both outputs")
