"""Captures and changes of stream in every order, on a GPU and on emulated streams (R21, R22)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blocktable import BlockTableConfig, BlockTableError, KVCacheGroup
from blocktable.backend import address_of
from blocktable_conformance.asserts import check
from blocktable_conformance.captures import Streams
from blocktable_conformance.pair import Pair
from blocktable_conformance.subject import Subject


@pytest.fixture
def streams(subject: Subject) -> Streams:
    """Return streams of the backend's device."""
    return Streams(subject)


def small() -> BlockTableConfig:
    return BlockTableConfig(
        groups=[KVCacheGroup(block_size=4), KVCacheGroup(block_size=8, kernel_block_size=4)],
        max_num_reqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
    )


class Table:
    """A warm table with one row, and the device arrays of a batch over it."""

    def __init__(self, subject: Subject) -> None:
        self.pair = Pair(subject, small())
        self.pair.do("set_row", 0, ([3, 4], [5]))
        self.table = self.pair.table
        self.table.warmup()
        self.arrays = [
            subject.device_array(values, dtype)
            for values, dtype in (([0], "int32"), ([0, 2], "int32"), ([3, 4], "int64"))
        ]

    def step(self, stream: int) -> Any:
        return self.table.step(*self.arrays, stream=stream)

    def gather(self, stream: int) -> Any:
        return self.table.gather(self.arrays[0], stream=stream)


@pytest.mark.parametrize("eager", ["on the captured stream", "on a third stream", "never"])
@pytest.mark.parametrize("captures", [True, False])
def test_no_commit_is_drawn_into_a_capture(subject: Subject, streams: Streams, eager: str, captures: bool) -> None:
    """A capture on one stream, and a commit of changes on another: refused, or done apart; the capture ends well.

    Rules: R21, R22.
    """
    table = Table(subject)
    first, second, third = (streams.create() for _ in range(3))
    if eager != "never":
        table.step(first if eager == "on the captured stream" else third)
    table.table.commit(stream=first if eager == "on the captured stream" else third)
    streams.synchronize()
    is_involved = captures or eager == "on the captured stream"
    with streams.capture(first):
        if captures:
            table.gather(first)
        table.pair.do("append_row", 0, ([7], [8]))
        if is_involved:
            with pytest.raises(BlockTableError, match="captur"):
                table.table.commit(stream=second)
        else:
            table.table.commit(stream=second)
    table.table.commit(stream=second)
    table.pair.oracle.commit()
    streams.synchronize()
    table.pair.check_device()


def test_a_commit_on_the_captured_stream_is_refused(subject: Subject, streams: Streams) -> None:
    """Of changes and of nothing; what was pending still is. Rules: R21."""
    table = Table(subject)
    stream = streams.create()
    table.step(stream)
    with streams.capture(stream):
        with pytest.raises(BlockTableError, match="captur"):
            table.table.commit(stream=stream)
        table.pair.do("append_row", 0, ([7], [8]))
        with pytest.raises(BlockTableError, match="captur"):
            table.table.commit(stream=stream)
        with pytest.raises(BlockTableError, match="captur"):
            table.step(stream)
        table.gather(stream)
    slots = subject.to_host(table.step(stream).slot_mappings[0])
    check(slots[:2].tolist() == [15, 16], "R21", f"after a refused commit the slots are {slots[:2].tolist()}.")


def test_a_captured_call_runs_at_each_replay(subject: Subject, streams: Streams) -> None:
    """Nothing is done before the first replay, and each one sees what was committed before it. Rules: R21."""
    table = Table(subject)
    stream = streams.create()
    table.step(stream)
    table.pair.do("set_row", 0, ([9, 4], [5]))
    table.table.commit(stream=stream)
    streams.synchronize()
    with streams.capture(stream) as captured:
        table.gather(stream)
        slots = table.table.compute_slot_mappings(*table.arrays, stream=stream)[0]
    for block_id in (9, 6):
        table.table.set_row(0, ([block_id, 4], [5]))
        table.table.commit(stream=stream)
        streams.replay(captured)
        got = subject.to_host(slots)[:2].tolist()
        check(got == [4 * block_id + 3, 16], "R21", f"with block {block_id} committed a replay made the slots {got}.")
        first = subject.to_host(table.table.buffers.block_tables[0])[0, 0]
        check(first == block_id, "R21", f"with block {block_id} committed a replay gathered {first}.")


def test_captured_positions_are_mapped_at_each_replay(subject: Subject, streams: Streams) -> None:
    """Into the caller's array. The first call may be refused in a capture: it loads a kernel. Rules: R21, R36."""
    if not subject.declares("export_parts"):
        pytest.skip(f"{subject.label} does not declare 'export_parts'")
    table, stream = Table(subject), streams.create()
    rows, positions, out = (
        subject.device_array(np.array(values), dtype)
        for values, dtype in (([0], "int32"), ([[3, 4]], "int32"), ([[77, 77]], "int64"))
    )
    table.step(stream)
    table.table.map_positions(rows, 0, positions, out=out, stream=stream)
    with streams.capture(stream) as captured:
        table.table.map_positions(rows, 0, positions, out=out, stream=stream)
    for block_id in (9, 6):
        table.table.set_row(0, ([block_id, 4], [5]))
        table.table.commit(stream=stream)
        streams.replay(captured)
        got = subject.to_host(out).tolist()
        check(got == [[4 * block_id + 3, 16]], "R36", f"with block {block_id} committed a replay made the slots {got}.")


def test_host_arrays_are_refused_in_a_capture(subject: Subject, streams: Streams) -> None:
    """Rules: R21."""
    table = Table(subject)
    stream = streams.create()
    table.step(stream)
    with streams.capture(stream):
        with pytest.raises(BlockTableError, match="captur"):
            table.table.gather(np.array([0], np.int32), stream=stream)
        table.gather(stream)


class Interface:
    """Nothing but a `__cuda_array_interface__`."""

    def __init__(self, owner: Any, address: int, length: int, typestr: str) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": typestr,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@pytest.mark.parametrize("together", [True, False])
def test_outputs_known_by_their_interface_alone(subject: Subject, streams: Streams, together: bool) -> None:
    """Slots may go to arrays of any library. Rules: R15, R22."""
    table = Table(subject)
    table.step(streams.create())
    memory = subject.device_array([-7] * 40, "int64")
    start = memory.ctypes.data if isinstance(memory, np.ndarray) else address_of(memory)
    lengths = (8, 8) if together else (8, 11)
    out = [Interface(memory, start + 8 * 16 * group, length, "<i8") for group, length in enumerate(lengths)]
    table.table.compute_slot_mappings(*table.arrays, out=out)
    got = subject.to_host(memory)
    expected = np.full(40, -7)
    for group, slots in enumerate(([15, 16], [43, 44])):
        expected[16 * group : 16 * group + lengths[group]] = slots + [-1] * (lengths[group] - 2)
    check(np.array_equal(got, expected), "R15, R22", f"the arrays hold {got.tolist()}.")
