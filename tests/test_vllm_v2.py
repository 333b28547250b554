"""The V2 drop-in by itself: launches, what others write, what is refused. The fuzzer compares it with vLLM's own."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable_vllm import drop_in_v2

torch: Any = pytest.importorskip("torch", reason="torch is not installed: tox -e torch")
pytestmark = pytest.mark.torch
ON_GPU = torch.cuda.is_available()
EMULATED = {"triton": "TRITON_INTERPRET", "cupy": "BLOCKTABLE_CUPY_EMULATE"}
WIDTH, ROWS, TOKENS = 8, 6, 16


@pytest.fixture(params=["numpy", "triton", "cupy"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name != "numpy" and not (os.environ.get(EMULATED[name]) == "1" or ON_GPU):
        pytest.skip(f"wants a GPU or {EMULATED[name]}=1")
    if name == "triton" and not importlib.util.find_spec("triton"):
        pytest.skip("triton is not installed")
    return name


def device_of(backend: str) -> Any:
    found = bt.get_backend(backend)
    is_host = "streams" not in found.capabilities or getattr(found, "is_emulated", False)
    return torch.device("cpu" if is_host else "cuda:0")


def make(backend: str = "numpy", profile: str = "0.33.0", **changes: Any) -> Any:
    """Two groups of 8 columns of 16 tokens."""
    arguments: dict[str, Any] = {
        "block_sizes": [16, 16],
        "max_num_reqs": ROWS,
        "max_num_batched_tokens": TOKENS,
        "max_num_blocks_per_group": [WIDTH, WIDTH],
        "device": device_of(backend),
        **({"kernel_block_sizes": [16, 16]} if profile == "0.25.1" else {}),
        **changes,
    }
    return drop_in_v2(profile, backend)(**arguments)


def ints(table: Any, values: Any, dtype: Any = None) -> Any:
    return torch.tensor(values, dtype=dtype or torch.int32, device=table.slot_mappings.device)


def gather(table: Any, rows: list[int], padded: int | None = None, **options: Any) -> list[list[list[int]]]:
    found = table.gather_block_tables(ints(table, rows), len(rows) if padded is None else padded, **options)
    return [each.tolist() for each in found]


def filled(backend: str, **changes: Any) -> Any:
    table = make(backend, **changes)
    for row in range(4):
        table.append_block_ids(row, ([10 + row, 20 + row], [30 + row]), overwrite=True)
    table.apply_staged_writes()
    return table


class Calls:
    """Counts what a table asks its store for."""

    def __init__(self, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        store = table.__rows__._store
        for name in ("commit", "write", "run_step", "gather", "compute_slot_mappings"):
            if hasattr(store, name):
                monkeypatch.setattr(store, name, self._wrap(name, getattr(store, name)))

    def _wrap(self, name: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.made.append(name)
            return method(*args, **kwargs)

        return call

    def take(self) -> list[str]:
        found, self.made = self.made, []
        return found


def step(table: Any, rows: list[int]) -> None:
    for row in rows:
        table.append_block_ids(row, ([7], [8]), overwrite=False)
    table.apply_staged_writes()
    mapping = ints(table, rows)
    starts, positions = ints(table, range(len(rows) + 1)), ints(table, [0] * TOKENS, torch.int64)
    table.gather_block_tables(mapping, len(rows))
    table.compute_slot_mappings(mapping, starts, positions, TOKENS)


def test_a_commit_travels_with_the_gather_that_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get(EMULATED["cupy"]) != "1" and not ON_GPU:
        pytest.skip("wants a GPU or BLOCKTABLE_CUPY_EMULATE=1")
    table = filled("cupy")
    step(table, [0, 1])  # now it knows that a gather follows
    calls = Calls(table, monkeypatch)
    step(table, [0, 1])
    assert calls.take() == ["run_step", "run_step"]
    table.block_tables[0].gpu  # noqa: B018 - somebody looks at the rows whenever it likes, from now on
    step(table, [0, 1])
    assert calls.take() == ["commit", "run_step", "run_step"]
    assert gather(table, [0])[0] == [[10, 20, 7, 7, 7, 0, 0, 0]]


def test_a_waiting_commit_is_what_it_was_when_it_was_asked_for(backend: str) -> None:
    table = filled(backend)
    step(table, [0, 1])
    table.append_block_ids(0, ([100], []), overwrite=False)
    table.apply_staged_writes()
    table.append_block_ids(0, ([200], []), overwrite=False)  # after it: for the next one
    assert gather(table, [0])[0] == [[10, 20, 7, 100, 0, 0, 0, 0]]
    table.apply_staged_writes()
    slots = table.compute_slot_mappings(ints(table, [0]), ints(table, [0, 1]), ints(table, [64], torch.int64), 1)
    assert slots.tolist() == [[200 * 16], [-1]]
    assert table.block_tables[0].gpu[0].tolist() == [10, 20, 7, 100, 200, 0, 0, 0]
    assert table.num_blocks.np[:, 0].tolist() == [5, 2]
    assert table.num_blocks.gpu[:, 0].tolist() == [5, 2]


def test_the_number_of_requests_is_that_of_idx_mapping(backend: str) -> None:
    """query_start_loc and positions are whole buffers: what lies after the batch is never a token."""
    table = filled(backend)
    starts, positions = ints(table, [0, 1, 3, 3, 3, 9]), ints(table, [16, 0, 1, *[5] * 13], torch.int64)
    slots = table.compute_slot_mappings(ints(table, [2, -1]), starts, positions, 4)
    assert slots.tolist() == [[22 * 16, -1, -1, -1], [-1, -1, -1, -1]]
    assert (table.slot_mappings[:, 4:] == -1).all()
    with pytest.raises(bt.ArgumentError, match="query_start_loc holds 2 entries; 2 requests need one more"):
        table.compute_slot_mappings(ints(table, [2, 1]), starts[:2], positions, 4)


@pytest.mark.parametrize("num_reqs", [0, 2])
def test_what_others_wrote_to_batch_rows_does_not_survive(backend: str, num_reqs: int) -> None:
    table = filled(backend)
    assert gather(table, [0, 1, 2, 3], 5)[0][4] == [0] * WIDTH
    for rows in table.get_dummy_block_tables(5):
        assert not rows.any()
        rows.fill_(99)
    found = gather(table, [0, 1][:num_reqs], 5)
    assert found[0][:num_reqs] == [[10, 20, *[0] * 6], [11, 21, *[0] * 6]][:num_reqs]
    assert found[0][num_reqs:] == [[0] * WIDTH] * (5 - num_reqs)
    gather(table, [], 5)
    assert not any(rows.any() for rows in table.input_block_tables)


def test_columns_below_the_reach_are_null_by_row(backend: str) -> None:
    table = make(backend, sliding_window_reach=[17, 0])
    table.append_block_ids(3, ([1, 2, 3, 4], [5, 6, 7, 8]), overwrite=True)
    table.apply_staged_writes()
    computed = ints(table, [0, 0, 0, 49, 0, 0])  # tokens from 32 on are read: columns 0 and 1 are passed
    first, second = gather(table, [3, -1], num_computed_tokens=computed)
    assert first == [[0, 0, 3, 4, 0, 0, 0, 0], [0] * WIDTH]
    assert second[0][:4] == [5, 6, 7, 8]
    sharded = make(backend, sliding_window_reach=[17, 0], cp_size=2, cp_rank=1)
    assert not sharded.has_sliding_window_groups


def test_a_gather_into_other_tables_may_be_of_more_requests_than_rows(backend: str) -> None:
    table = filled(backend)
    out = tuple(torch.full((9, WIDTH), 5, dtype=torch.int32, device=each.device) for each in table.input_block_tables)
    found = gather(table, [0, 1, 2, 3, 0, 1, 2], 8, out=out, out_ptrs=None)
    assert [row[0] for row in found[0]] == [10, 11, 12, 13, 10, 11, 12, 0]
    assert found[1][7] == [0] * WIDTH
    assert (out[0][8] == 5).all()
    assert not table.input_block_tables[0].any()


def test_redirected_blocks_are_block_0(backend: str) -> None:
    table = make(backend)
    table.redirect_writes_to_null_block = True
    table.append_block_ids(1, ([3, 4], [5]), overwrite=True)
    table.redirect_writes_to_null_block = False
    table.append_block_ids(1, ([6], []), overwrite=False)
    table.apply_staged_writes()
    slots = table.compute_slot_mappings(ints(table, [1]), ints(table, [0, 2]), ints(table, [17, 33], torch.int64), 2)
    assert slots.tolist() == [[1, 6 * 16 + 1], [-1, -1]]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((0, ([1] * 9, []), True), RuntimeError),
        ((0, ([1] * 7, []), False), bt.RowCapacityError),
        ((ROWS, ([1], [1]), True), IndexError),
        ((-1, ([1], [1]), True), bt.RowIndexError),
        ((0, ([1], [-1]), False), bt.ArgumentError),
        ((0, ([1], [2**31]), False), bt.ArgumentError),
        ((0, ([1], [1.5]), False), bt.DtypeError),
        ((0, ([1],), False), bt.ArgumentError),
    ],
)
def test_a_refused_append_changes_nothing(arguments: Any, error: type[Exception]) -> None:
    table = filled("numpy")
    with pytest.raises(error):
        table.append_block_ids(*arguments)
    assert table.num_blocks.np[:, :4].tolist() == [[2] * 4, [1] * 4]
    table.apply_staged_writes()
    assert gather(table, [0])[0] == [[10, 20, *[0] * 6]]


def test_counts_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        filled("numpy").num_blocks.np[0, 0] = 1


def test_blocks_of_the_manager_become_blocks_of_the_kernel() -> None:
    """Also block 0, whose columns vLLM numbers like any other's."""
    table = make("numpy", "0.25.1", block_sizes=[32, 16], max_num_blocks_per_group=[4, 8])
    table.append_block_ids(0, ([0, 5], [5]), overwrite=True)
    table.apply_staged_writes()
    assert gather(table, [0]) == [[[0, 1, 10, 11, *[0] * 4]], [[5, *[0] * 7]]]
    for ids in ([None], [1.5], 7):
        with pytest.raises(bt.BlockTableError):
            table.append_block_ids(0, (ids, []), overwrite=False)


@pytest.mark.parametrize("profile", ["0.25.1", "0.32.0", "0.33.0"])
def test_a_model_without_a_cache_has_no_tables(profile: str) -> None:
    empty: dict[str, Any] = {"kernel_block_sizes": []} if profile == "0.25.1" else {}
    table = make("numpy", profile, block_sizes=[], max_num_blocks_per_group=[], **empty)
    table.append_block_ids(0, (), overwrite=True)
    table.apply_staged_writes()
    assert gather(table, [0]) == []
    assert table.get_dummy_block_tables(2) == ()
    for slots in (table.get_dummy_slot_mappings(3), table.compute_slot_mappings(None, None, None, 3)):
        assert slots.shape == (0, 3)
    table.init_block_table_layout_tensors()


def test_memory_that_was_mapped_anew_is_filled_again(backend: str) -> None:
    table = filled(backend)
    gather(table, [0, 1])
    for tensor in (*table.__rows__.tables, table.__rows__.counts, *table.input_block_tables):
        tensor.fill_(-5)
    table.init_block_table_layout_tensors()
    table.apply_staged_writes()
    assert gather(table, [0, 3], 4)[0] == [[10, 20, *[0] * 6], [13, 23, *[0] * 6], [0] * WIDTH, [0] * WIDTH]
    assert not table.input_block_tables[0][4:].any()


def test_it_works_in_inference_mode_and_out_of_it(backend: str) -> None:
    with torch.inference_mode():
        table = filled(backend)
        step(table, [0, 1])
    table.input_block_tables[0][0, 0] = 3
    table.slot_mappings[0, 0] = 3
    step(table, [0, 1])
    with torch.inference_mode():
        step(table, [2, 3])
        table.get_dummy_slot_mappings(4)
    assert gather(table, [2])[0] == [[12, 22, 7, *[0] * 5]]


def test_an_interleave_size_that_gives_tokens_to_wrong_blocks_is_refused() -> None:
    with pytest.raises(bt.ConfigError, match="interleave_size 32"):
        make("numpy", cp_size=2, cp_interleave=32)


def test_addresses_and_strides_are_what_they_were() -> None:
    table = filled("numpy")
    assert table.block_table_ptrs.tolist() == [each.gpu.data_ptr() for each in table.block_tables]
    assert table.block_table_strides.tolist() == [each.gpu.stride(0) for each in table.block_tables]
    assert table.input_block_table_ptrs.tolist() == [each.data_ptr() for each in table.input_block_tables]
    assert (table.block_tables[0].num_rows, table.block_tables[0].dtype) == (ROWS, torch.int32)
    assert np.array_equal(table.slot_mappings.stride(), (TOKENS, 1))
