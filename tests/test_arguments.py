"""Wrong and odd arguments: refused in a sentence with nothing changed, or taken for what they say."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable.backend import PROTOCOL_VERSION
from blocktable.views import MAX_PLANS

ROWS, COUNTS = np.array([0, 1]), np.array([1, 1])
IDS = np.array([7, 8], np.int32)
HUGE = np.array([2**64 - 1, 3], np.uint64)


def make(num_groups: int = 1, **options: Any) -> bt.BlockTable:
    settings: dict[str, Any] = {"max_num_reqs": 4, "max_num_batched_tokens": 16, "max_model_len": 256}
    config = bt.BlockTableConfig(groups=[bt.KVCacheGroup(block_size=16)] * num_groups, **(settings | options))
    return bt.BlockTable(config, "numpy")


@pytest.mark.parametrize("path", ["compiled", "numpy"])
@pytest.mark.parametrize(
    "call",
    [
        lambda table: table.append_rows(ROWS, [IDS, IDS], None),
        lambda table: table.set_rows(ROWS, [IDS, IDS], None),
        lambda table: table.append_rows(ROWS, [IDS, IDS], HUGE),
        lambda table: table.set_rows(ROWS, [IDS, IDS], HUGE),
        lambda table: table.append_rows(ROWS, 5, COUNTS),
        lambda table: table.append_rows(ROWS, np.array(5), COUNTS),
        lambda table: table.append_rows(ROWS, np.empty((0, 3), np.int32), COUNTS),
        lambda table: table.set_row(0, np.empty((0, 3), np.int32)),
        lambda table: table.truncate_row(0, np.array([-1, 1])),
        lambda table: table.truncate_row(0, range(2**70)),
        lambda table: table.append_rows(ROWS, range(2**40), COUNTS),
        lambda table: table.append_rows(ROWS, [range(2**40), IDS], COUNTS),
        lambda table: table.append_rows(ROWS, [IDS, IDS], range(2**70)),
        lambda table: table.clear_rows(range(2**70)),
        lambda table: table.append_rows(np.array([2**64 - 1, 0], np.uint64), [IDS, IDS], COUNTS),
    ],
)
def test_a_wrong_bulk_argument_changes_nothing(
    call: Callable[[bt.BlockTable], Any], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules: R6, R7."""
    if path == "compiled":
        pytest.importorskip("blocktable_compiled.operations")
    monkeypatch.setenv("BLOCKTABLE_HOST_PATH", path)
    table = make(2)
    table.set_row(0, [[1, 2], [3]])
    before = [table.host_table(group).copy() for group in range(2)]
    with pytest.raises(bt.BlockTableError):
        call(table)
    assert table.num_blocks_per_row.tolist() == [[2, 0, 0, 0], [1, 0, 0, 0]]
    for group in range(2):
        assert np.array_equal(table.host_table(group), before[group])
    table.commit()
    table.verify()


@pytest.mark.parametrize("kept", [2**63, np.array([2**63], np.uint64), np.array([2**64 - 1], np.uint64)])
def test_keeping_more_blocks_than_there_are_changes_nothing(kept: Any) -> None:
    """Rules: R4."""
    table = make()
    table.set_row(0, [1, 2, 3])
    table.truncate_row(0, kept)
    if isinstance(kept, np.ndarray):
        table.truncate_rows([0], kept)
    assert table.num_blocks_per_row[0, 0] == 3
    table.truncate_row(0, np.array([1], np.uint64))
    assert table.host_table(0)[0, :3].tolist() == [1, 0, 0]


@pytest.mark.parametrize("path", ["compiled", "numpy"])
def test_nothing_for_all_groups_is_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R8."""
    if path == "compiled":
        pytest.importorskip("blocktable_compiled.operations")
    monkeypatch.setenv("BLOCKTABLE_HOST_PATH", path)
    table = make(2)
    table.append_rows(ROWS, None, COUNTS)
    assert not table.num_blocks_per_row.any()


def test_arrays_that_no_kernel_can_read_are_refused() -> None:
    """Rules: R10.8, R12, R17."""
    table = make(2)
    idx, starts, positions = np.array([0], np.int32), np.array([0, 1], np.int32), np.array([1])
    with pytest.raises(bt.DtypeError, match=">i4"):
        table.compute_slot_mappings(idx.astype(">i4"), starts, positions)
    shifted = np.zeros(100, np.uint8)[4:36].view(np.int64)
    with pytest.raises(bt.ArgumentError, match="aligned"):
        table.compute_slot_mappings(idx, starts, positions, out=[np.zeros(4, np.int64), shifted])
    twice = np.zeros(4, np.int64)
    with pytest.raises(bt.ArgumentError, match="twice"):
        table.compute_slot_mappings(idx, starts, positions, out=[twice, twice])


def test_an_empty_query_start_loc_is_refused_as_such() -> None:
    """Rules: R15."""
    table, none = make(), np.empty(0, np.int32)
    for idx in (np.array([0], np.int32), None):
        with pytest.raises(bt.ArgumentError, match=r"no requests is \[0\]"):
            table.step(idx, none, np.empty(0, np.int64))


def test_verify_sees_a_committed_entry_beside_many_pending_ones() -> None:
    """Rules: R9.1."""
    table = make(max_num_reqs=64, max_model_len=16 * 2048)
    table.set_row(63, [5])
    table.commit()
    table.device_table(0)[63, 0] = 999
    table.set_rows(np.arange(45), np.tile(np.arange(1, 2049), 45), np.full(45, 2048))
    with pytest.raises(bt.BlockTableError, match="row 63, column 0"):
        table.verify()
    table.gather(None, 60, num_reqs=50)  # their counts are not pending


def test_a_backend_may_ask_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R23."""

    class Wrapper:
        name, protocol_version, capabilities = "wrapper", PROTOCOL_VERSION, frozenset[str]()

        def __init__(self) -> None:
            self.inner = bt.get_backend("numpy")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    monkeypatch.setattr(bt, "Wrapper", Wrapper, raising=False)
    assert bt.get_backend("blocktable:Wrapper").name == "wrapper"


def test_slots_that_do_not_fit_64_bits_are_refused() -> None:
    """Rules: R16."""
    with pytest.raises(bt.ConfigError, match="64 bits"):
        bt.KVCacheGroup(block_size=2**40)


def test_local_lengths_keep_a_small_dtype() -> None:
    """Rules: R19."""
    shard = bt.ContextParallel(world_size=20, rank=0, interleave_size=16)
    lengths = shard.local_lengths(np.array([200, 3], np.uint8))
    assert (lengths.dtype, lengths.tolist()) == (np.dtype(np.uint8), [16, 3])
    with pytest.raises(bt.DtypeError):
        shard.local_lengths(np.array([1.5]))


def map_one_token(table: bt.BlockTable, **options: Any) -> Any:
    one = np.zeros(1, np.int32), np.array([0, 1], np.int32), np.zeros(1, np.int64)
    return table.compute_slot_mappings(*one, **options)


def test_an_output_of_another_dtype_is_told_which_to_allocate() -> None:
    """Rules: R16, R17."""
    with pytest.raises(bt.DtypeError, match=r'must be int64.*allocate it as int64, or make.*slot_dtype="int32"'):
        map_one_token(make(), out=[np.zeros(4, np.int32)])
    with pytest.raises(bt.DtypeError, match=r"allocate it as int64\.$"):
        map_one_token(make(), out=[np.zeros(4, np.float32)])


def num_steps() -> int:
    gc.collect()
    return sum(type(each) is bt.Step for each in gc.get_objects())


def test_ten_thousand_token_counts_keep_a_bounded_number_of_steps() -> None:
    """Rules: R17."""
    table = make(max_num_batched_tokens=10_000)
    inputs = np.zeros(1, np.int32), np.array([0, 1], np.int32), np.zeros(1, np.int64)
    before = num_steps()
    for num_tokens in range(10_000):
        kept = table.step(*inputs, num_tokens_padded=num_tokens)
        if num_tokens % 500 == 0:
            assert table.step(*inputs, num_tokens_padded=num_tokens) is kept
    assert num_steps() - before <= MAX_PLANS


def test_left_out_sizes_are_those_of_the_batch() -> None:
    """What is returned is not padded; buffers are written to their ends. Rules: R10.4, R15, R17."""
    table = make(max_model_len=32)
    table.set_rows([0, 1], [np.array([1, 2], np.int32)], [1, 1])
    table.step(np.array([1, 0, 1], np.int32), np.array([0, 2, 4, 6], np.int32), np.arange(6))
    step = table.step(np.zeros(1, np.int32), np.array([0, 2], np.int32), np.arange(3))
    assert [slots.tolist() for slots in step.slot_mappings] == [[16, 17, -1]]
    assert [rows[:, :2].tolist() for rows in step.block_tables] == [[[1, 0]]]
    assert table.buffers.slot_mappings[0].tolist() == [16, 17, *[-1] * 14]
    assert table.buffers.block_tables[0][:, :2].tolist() == [[1, 0], *[[0, 0]] * 3]


def test_buffers_that_do_not_fit_are_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R1."""
    table = make()

    def no_memory() -> Any:
        raise MemoryError

    monkeypatch.setattr(table.store, "create_buffers", no_memory)
    with pytest.raises(bt.ConfigError, match="max_num_batched_tokens"):
        table.create_buffers()
    with pytest.raises(bt.ConfigError, match="max_model_len"):
        make(max_model_len=2**80)
    with pytest.raises(bt.ConfigError, match="world_size"):
        bt.ContextParallel(world_size=2**40)
