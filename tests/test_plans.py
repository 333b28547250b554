"""The plan of a step is found by what its arrays are: which steps find one, and what a table keeps of them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import blocktable as bt
import blocktable.inputs
from blocktable.inputs import read_each, read_step
from blocktable.views import MAX_PLANS

CONFIG = bt.BlockTableConfig(
    groups=[bt.KVCacheGroup(block_size=4)], max_num_reqs=8, max_num_batched_tokens=256, max_model_len=64
)


@pytest.fixture(params=["numpy", "cupy"])
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bt.BlockTable:
    """A table over the host, and one over the device layer, whose rows 0 .. 7 hold blocks 1 .. 8."""
    if request.param == "cupy":
        monkeypatch.setenv("BLOCKTABLE_CUPY_EMULATE", "1")
        problem = bt.get_backend("cupy").why_unavailable()
        if problem is not None:
            pytest.skip(problem)
    made = bt.BlockTable(CONFIG, request.param)
    made.set_rows(np.arange(8), [np.arange(1, 9)], np.ones(8, np.int64))
    return made


@pytest.fixture
def torch() -> Any:
    found = pytest.importorskip("torch", reason="torch is not installed: tox -e torch")
    read_each((found.zeros(1),))  # the first tensor of a process finds no plan
    return found


def buffers_of(torch: Any) -> tuple[Any, Any, Any]:
    """Return the inputs of an engine: rows 7, 6, ..., one token each, at position 3."""
    return torch.arange(7, -1, -1, dtype=torch.int32), torch.arange(9, dtype=torch.int32), torch.full((256,), 3)


def slots_of(table: bt.BlockTable, *inputs: Any, **options: Any) -> list[int]:
    found: list[int] = table.backend.to_host(table.step(*inputs, **options).slot_mappings[0]).tolist()
    return found


def test_slices_made_anew_find_the_plan(table: bt.BlockTable, plans: list[Any], torch: Any) -> None:
    """Rules: R17."""
    idx_mapping, starts, positions = buffers_of(torch)
    for turn in range(20):
        for size in (4, 7):
            expected = [4 * (8 - i) + 3 for i in range(size)]
            assert slots_of(table, idx_mapping[:size], starts[: size + 1], positions[:size]) == expected
        table.append_row(turn % 8, [20 + turn])
    assert len(plans) == 2


def test_arrays_filled_again_find_the_plan(table: bt.BlockTable, plans: list[Any], torch: Any) -> None:
    """Each refill raises a tensor's version. Rules: R17."""
    idx_mapping, starts, positions = (array[:n] for array, n in zip(buffers_of(torch), (2, 3, 2), strict=True))
    for turn in range(4):
        idx_mapping.copy_(torch.tensor([turn, 7]))
        positions.fill_(turn)
        assert slots_of(table, idx_mapping, starts, positions) == [4 * (turn + 1) + turn, 32 + turn]
    assert len(plans) == 1


def test_inference_mode_changes_nothing(table: bt.BlockTable, plans: list[Any], torch: Any) -> None:
    """Such tensors have no version. Rules: R17, R22."""
    with torch.inference_mode():
        idx_mapping, starts, positions = buffers_of(torch)
        for size in (3, 3, 2, 3):
            assert slots_of(table, idx_mapping[:size], starts[: size + 1], positions[:size])[0] == 35
    assert slots_of(table, idx_mapping[:3], starts[:4], positions[:3]) == [35, 31, 27]
    assert len(plans) == 2


def test_a_thousand_addresses_are_one_plan(table: bt.BlockTable, plans: list[Any], torch: Any) -> None:
    """Rules: R17."""
    _, starts, positions = buffers_of(torch)
    alive = [torch.tensor([row % 8, 3], dtype=torch.int32) for row in range(1000)]
    assert len({array.data_ptr() for array in alive}) == 1000
    for row, idx_mapping in enumerate(alive):
        assert slots_of(table, idx_mapping, starts[:3], positions[:2]) == [4 * (row % 8 + 1) + 3, 19]
    assert len(plans) == len(table._own_views.plans) == 1


def test_a_thousand_sizes_are_a_bounded_number_of_plans(table: bt.BlockTable, plans: list[Any], torch: Any) -> None:
    """Rules: R17."""
    idx_mapping, starts, positions = buffers_of(torch)
    for turn in range(1000):
        size, padded = turn % 250 + 2, turn % 5 + 4
        step = table.step(
            idx_mapping[:4], starts[:5], positions[:size], num_reqs_padded=padded, num_tokens_padded=turn // 5
        )
        assert (len(step.slot_mappings[0]), len(step.block_tables[0])) == (turn // 5, padded)
        assert len(table._own_views.plans) <= MAX_PLANS
    assert len(plans) == 1000 > MAX_PLANS


def test_any_number_of_tokens_is_one_plan(table: bt.BlockTable, plans: list[Any], torch: Any) -> None:
    """Only an array of one entry has another, as its strides say nothing. Rules: R15, R17."""
    idx_mapping, starts, positions = buffers_of(torch)
    table.create_buffers()
    for size in (4, 9, 256, 4, 2, 100):
        step = table.step(idx_mapping[:4], starts[:5], positions[:size], num_reqs_padded=6)
        assert len(step.slot_mappings[0]) == size
        found = table.backend.to_host(table.buffers.slot_mappings[0]).tolist()
        assert found == [4 * (8 - i) + 3 for i in range(min(size, 4))] + [-1] * (256 - min(size, 4))
    assert len(plans) == 1
    with pytest.raises(bt.ArgumentError, match="positions holds 257 tokens"):
        table.step(idx_mapping[:4], starts[:5], torch.full((257,), 3), num_reqs_padded=6)
    wide = torch.full((9,), 3)
    strided = wide[::4]
    assert slots_of(table, idx_mapping[:1], starts[:2], strided[:1]) == [35]
    for _ in range(2):
        with pytest.raises(bt.BlockTableError, match="contiguous"):
            table.step(idx_mapping[:1], starts[:2], strided)
    assert slots_of(table, idx_mapping[:1], starts[:2], strided[:1]) == [35]


def test_a_store_that_cannot_resize_prepares_each_number_of_tokens(
    table: bt.BlockTable, plans: list[Any], torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`resize` is what a store's own object may have, not what it must. Rules: R17."""
    if not table._prepares:
        pytest.skip("this table's store prepares nothing")
    monkeypatch.delattr("blocktable.device.fused.PreparedStep.resize")
    idx_mapping, starts, positions = buffers_of(torch)
    for size in (4, 6, 4):
        step = table.step(idx_mapping[:4], starts[:5], positions[:size])
        assert table.backend.to_host(step.slot_mappings[0]).tolist()[:4] == [35, 31, 27, 23]
        assert len(step.slot_mappings[0]) == size
    assert len(plans) == 3


def test_two_models_in_turn_find_their_plans(table: bt.BlockTable, plans: list[Any], torch: Any) -> None:
    """Rules: R17."""
    idx_mapping, starts, positions = buffers_of(torch)
    draft = table.create_buffers()
    for _ in range(5):
        assert slots_of(table, idx_mapping[:3], starts[:4], positions[:3]) == [35, 31, 27]
        assert slots_of(table, idx_mapping[:1], starts[:2], positions[:1], out=draft) == [35]
    assert len(plans) == 2


def test_a_set_that_is_dropped_takes_its_plans_along(table: bt.BlockTable, plans: list[Any], torch: Any) -> None:
    """Rules: R24."""
    idx_mapping, starts, positions = buffers_of(torch)
    draft = table.create_buffers()
    table.step(idx_mapping[:1], starts[:2], positions[:1], out=draft)
    gc.collect()
    gc.disable()
    try:
        kept = [weakref.ref(draft), *map(weakref.ref, draft.slot_mappings)]
        plans.clear()
        del draft
        assert [reference() for reference in kept] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda array: array.as_strided_((4,), (3,)), bt.ArgumentError, "contiguous"),
        (lambda array: array.resize_(2, 2), bt.ArgumentError, "one-dimensional"),
        (lambda array: array.unsqueeze_(0), bt.ArgumentError, "one-dimensional"),
        (lambda array: setattr(array, "data", array.int()), bt.DtypeError, "int64"),
        (lambda array: setattr(array, "data", array.double()), bt.DtypeError, "int64"),
    ],
)
def test_a_tensor_changed_in_place_is_another_one(
    table: bt.BlockTable, torch: Any, change: Callable[[Any], Any], error: type[Exception], words: str
) -> None:
    """It is refused each time, before anything is committed. Rules: R17."""
    idx_mapping, starts, _ = buffers_of(torch)
    positions = torch.zeros(12, dtype=torch.int64)[:4]
    inputs = idx_mapping[:4], starts[:5], positions
    for _ in range(2):
        table.step(*inputs)
    change(positions)
    table.append_row(0, [9])
    sent = table.num_bytes_sent
    for _ in range(2):
        with pytest.raises(error, match=words):
            table.step(*inputs)
    assert table.num_bytes_sent == sent


def test_a_tensor_given_other_memory_in_place_is_read_there(table: bt.BlockTable, torch: Any) -> None:
    """Rules: R17."""
    idx_mapping, starts, positions = (array[:n].clone() for array, n in zip(buffers_of(torch), (2, 3, 2), strict=True))
    assert slots_of(table, idx_mapping, starts, positions) == [35, 31]
    positions.set_(torch.tensor([1, 2]))
    assert slots_of(table, idx_mapping, starts, positions) == [33, 30]
    idx_mapping.data = torch.tensor([0, 1], dtype=torch.int32)
    assert slots_of(table, idx_mapping, starts, positions) == [5, 10]


def test_one_entry_with_a_stride_vouches_for_no_other(table: bt.BlockTable, torch: Any) -> None:
    """An array of one entry is contiguous with any stride; four with that stride are not. Rules: R17."""
    idx_mapping, starts, positions = buffers_of(torch)
    assert slots_of(table, idx_mapping[::3][:1], starts[:2], positions[::3][:1]) == [35]
    for inputs in (
        (idx_mapping[::3][:2], starts[:3], positions[:2]),
        (idx_mapping[:2], starts[:3], positions[::3][:2]),
    ):
        with pytest.raises(bt.ArgumentError, match="contiguous"):
            table.step(*inputs)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_default_device_changes_nothing(plans: list[Any], torch: Any, device: str) -> None:
    """Also where a table is made under it: "meta" tensors have no memory. Rules: R17, R22."""
    idx_mapping, starts, positions = buffers_of(torch)
    torch.set_default_device(device)
    try:
        table = bt.BlockTable(CONFIG, "numpy")
        table.set_row(7, [8])
        table.warmup()
        for _ in range(3):
            assert slots_of(table, idx_mapping[:1], starts[:2], positions[:1]) == [35]
    finally:
        torch.set_default_device(None)
    assert slots_of(table, idx_mapping[:1], starts[:2], positions[:1]) == [35]
    assert len(plans) == 1


# What is read of an array.


class Named(SimpleNamespace):
    """An array of some library."""


class CupyArray(Named):
    """As CuPy's."""


class NumbaArray(Named):
    """As Numba's: its interface is dear."""

    device_ctypes_pointer = SimpleNamespace(value=64)

    @property
    def __cuda_array_interface__(self) -> Any:
        raise AssertionError


class InterfaceArray(Named):
    """As of whatever says no more than that."""

    @property
    def __cuda_array_interface__(self) -> Any:
        return {"shape": self.shape, "strides": self.strides, "typestr": self.typestr, "data": (64, False)}


def cupy_array(**other: Any) -> Any:
    values: dict[str, Any] = {"strides": (8,), "dtype": np.dtype("int64"), "device_id": 0, "ptr": 64, "size": 4}
    values |= other
    memory = SimpleNamespace(device_id=values.pop("device_id"), ptr=values.pop("ptr"))
    return CupyArray(data=memory, **values)


def numba_array(**other: Any) -> Any:
    return NumbaArray(**{"strides": (8,), "dtype": np.dtype("int64"), "size": 4, **other})


def interface_array(**other: Any) -> Any:
    return InterfaceArray(**{"shape": (4,), "strides": None, "typestr": "<i8", **other})


@pytest.mark.parametrize(
    ("make", "length", "others"),
    [
        (cupy_array, {"size": 5}, [{"strides": (16,)}, {"dtype": np.dtype("int32")}, {"device_id": 1}]),
        (numba_array, {"size": 5}, [{"strides": (16,)}, {"dtype": np.dtype("int32")}]),
        (interface_array, {"shape": (5,)}, [{"strides": (16,)}, {"typestr": "<i4"}, {"shape": (2, 2)}]),
    ],
)
def test_arrays_of_other_libraries_are_told_apart(
    make: Callable[..., Any], length: Any, others: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules: R17, R22."""
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=CupyArray))
    monkeypatch.setattr(blocktable.inputs, "_READERS", {})
    kinds, lengths, addresses = read_each((make(),))
    assert (lengths, addresses) == ((4,), (64,))
    assert read_each((make(),)) == (kinds, lengths, addresses)
    assert read_each((make(**length),)) == (kinds, (5,), addresses)
    for other in others:
        assert read_each((make(**other),))[0] != kinds
    assert hash(kinds) == hash(read_each((make(),))[0])


def test_what_cannot_be_read_has_no_plan(plans: list[Any], torch: Any) -> None:
    """It is checked, and refused or taken, in each step. Rules: R17, R22."""
    table = bt.BlockTable(CONFIG, "numpy")
    idx_mapping, starts, positions = (array[:n] for array, n in zip(buffers_of(torch), (1, 2, 1), strict=True))

    class Exchanged:
        """An array that says itself by DLPack alone."""

        def __init__(self, array: Any) -> None:
            self.dtype, self.shape = array.dtype, array.shape
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    nothing = (None,) * 4
    exchanged = Exchanged(idx_mapping.numpy())
    assert read_step((exchanged, None, starts, positions)) == (None, nothing, nothing)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1]), (1,), check_invariants=True)
    assert read_step((idx_mapping, None, starts, sparse)) == (None, nothing, nothing)
    assert not table._own_views.plans


def test_kinds_of_host_arrays(torch: Any) -> None:
    """Rules: R17."""
    array = np.zeros(6, np.int64)
    kinds = read_each((array[:3],))[0]
    assert read_each((array[3:6],))[0] == kinds
    assert read_each((array[:2],)) == (kinds, (2,), (None,))
    frozen = array[:3]
    frozen.flags.writeable = False
    different = [array[::2], array[:3].astype(">i8"), array[:3].astype(np.uint64), array.reshape(2, 3)[:1], frozen]
    different += [np.zeros(32, np.uint8)[4:28].view(np.int64), np.ma.masked_array(array[:3]), torch.zeros(3).long()]
    assert kinds not in [read_each((other,))[0] for other in different]
