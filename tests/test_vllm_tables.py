"""The drop-in's tables by themselves: what a commit sends, who may write to what, and what is refused.

That they do what vLLM's do is the fuzzer's matter.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable.device.staging import steady_entries
from blocktable_vllm import drop_in

torch: Any = pytest.importorskip("torch", reason="torch is not installed: tox -e torch")
pytestmark = pytest.mark.torch
ON_GPU = torch.cuda.is_available()
EMULATED = {"triton": "TRITON_INTERPRET", "cupy": "BLOCKTABLE_CUPY_EMULATE", "numba": "NUMBA_ENABLE_CUDASIM"}
WIDTH = 8
ROWS = 6


def can_run(backend: str) -> bool:
    if backend == "numpy":
        return True
    if os.environ.get(EMULATED[backend]) == "1":
        return backend == "cupy" or importlib.util.find_spec(backend) is not None
    return ON_GPU and importlib.util.find_spec(backend) is not None


@pytest.fixture(params=["numpy", "triton", "cupy", "numba"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not can_run(name):
        pytest.skip(f"wants a GPU or {EMULATED[name]}=1, and the package")
    return name


def device_of(backend: str) -> Any:
    found = bt.get_backend(backend)
    is_host = "streams" not in found.capabilities or getattr(found, "is_emulated", False)
    return torch.device("cpu" if is_host else "cuda:0")


def make(mode: str = "fast", backend: str = "numpy", **changes: Any) -> Any:
    """Two groups of 8 columns; the second has two columns a block."""
    device = device_of(backend)
    arguments: dict[str, Any] = {
        "max_num_reqs": ROWS,
        "max_model_len": 128,
        "max_num_batched_tokens": 16,
        "pin_memory": device.type == "cuda",
        "device": device,
        "block_sizes": [16, 32],
        "kernel_block_sizes": [16, 16],
        "max_num_blocks": [WIDTH, WIDTH // 2],
        **changes,
    }
    clean_tails = arguments.pop("clean_tails", False)
    multi = drop_in("0.25.1", mode, backend, clean_tails).MultiGroupBlockTable
    return multi(**arguments)


class Sent:
    """Notes what a table's commits send: entries by the journal, and rows that are copied whole."""

    def __init__(self, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = table.__blocktable__
        self.entries: list[int] = []
        self.rows: list[tuple[int, int]] = []
        store, send_whole = self.state.device.store, self.state._send_whole
        write = store.write

        def noting_write(writes: Any, *, stream: Any) -> None:
            self.entries.append(writes.values.size)
            write(writes, stream=stream)

        def noting_send(group: int, start: int, stop: int) -> None:
            self.rows.append((start, stop))
            send_whole(group, start, stop)

        def noting_commit(used: int, *, stream: Any) -> None:
            singles, _, num_values, _, num_constants = store.lend(stream)[:5].tolist()
            self.entries.append(singles + num_values + num_constants)
            commit(used, stream=stream)

        monkeypatch.setattr(store, "write", noting_write)
        if hasattr(store, "lend"):
            commit = store.commit
            monkeypatch.setattr(store, "commit", noting_commit)
        monkeypatch.setattr(self.state, "_send_whole", noting_send)

    def take(self) -> tuple[int, list[tuple[int, int]]]:
        found = sum(self.entries), list(self.rows)
        self.entries.clear()
        self.rows.clear()
        return found


def agree(table: Any, rows: int) -> bool:
    """Whether the first rows are the same on the host and on the device."""
    host_rows, _ = table.__blocktable__.host_state()
    return all(
        np.array_equal(each.block_table.gpu[:rows].cpu().numpy(), host[:rows])
        for each, host in zip(table.block_tables, host_rows, strict=True)
    )


def compute(table: Any, starts: list[int], positions: list[int]) -> list[list[int]]:
    device = table[0].block_table.gpu.device
    table.compute_slot_mapping(
        len(starts) - 1,
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(positions, dtype=torch.int64, device=device),
    )
    return [each.slot_mapping.gpu.tolist() for each in table.block_tables]


# What a commit sends.


def test_a_commit_sends_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make()
    for row in range(4):
        table.add_row(([10 + row], [20 + row]), row)
    table.commit_block_table(4)
    sent = Sent(table, monkeypatch)
    table.commit_block_table(4)
    assert sent.take() == (0, [])
    table.append_row(([7], [8]), 2)
    table.commit_block_table(4)
    assert sent.take() == (2 + 1 + 2, [])  # two counts, a column, a block of two columns
    table.append_row(([7], [8]), 1)
    table.append_row(([9], [9]), 1)
    table.append_row(([5], [6]), 3)
    table.clear_row(0)
    table.commit_block_table(4)
    assert sent.take() == (2 * 3 + (2 + 4) + (1 + 2) + (1 + 2), [])
    assert agree(table, 4)


def test_rows_behind_the_commit_wait_and_come_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make()
    for row in range(4):
        table.add_row(([10 + row], [20 + row]), row)
    table.commit_block_table(2)
    assert not table[0].block_table.gpu[2:].any()
    sent = Sent(table, monkeypatch)
    table[0].get_device_tensor(4)[2:4].fill_(-1)  # vLLM's runner, for a padded batch
    table.append_row(([7], [8]), 3)
    table.append_row(([7], [8]), 0)
    table.commit_block_table(3)
    assert sent.take() == (2 * WIDTH + 2 + 5, [])  # row 2 in both groups, and row 0's append
    assert agree(table, 3)
    assert (table[0].block_table.gpu[3] == -1).all()
    table.commit_block_table(5)
    entries, rows = sent.take()
    assert (entries, rows) == (0, [(3, 5), (3, 5)])  # more than the store stages without a wait
    assert agree(table, 5)


def test_no_commit_is_larger_than_what_is_staged_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows replaced at once, in the middle of the batch and behind it."""
    table = make(max_num_reqs=64)
    state = table.__blocktable__
    for row in range(40):
        table.add_row(([1, 2], [3]), row)
    table.commit_block_table(40)
    write, sizes = state.device.store.write, []

    def noting_write(writes: Any, *, stream: Any) -> None:
        sizes.append(writes.most_packed_entries)
        write(writes, stream=stream)

    monkeypatch.setattr(state.device.store, "write", noting_write)
    monkeypatch.setattr(state, "_pack", lambda block: (-1, 0))  # as if memory that is lent were too small
    for row in (*range(0, 40, 3), *range(40, 60)):
        table.add_row(([row + 1] * WIDTH, [row + 2] * (WIDTH // 2)), row)
    for row in range(20, 30):
        table.swap_row(row, 29 - row)
    table.commit_block_table(55)
    assert agree(table, 55)
    assert not table[0].block_table.gpu[55:].any()
    assert len(sizes) == 1
    assert sum(sizes) <= steady_entries(state.device.config)
    monkeypatch.setattr(state, "_most_staged", 40)  # as if a row were much narrower than all of these changes
    sizes.clear()
    for row in range(55):
        table.add_row(([row + 3] * WIDTH, [row + 4] * (WIDTH // 2)), row)
    table.commit_block_table(55)
    assert agree(table, 55)
    assert len(sizes) > 10
    assert max(sizes) <= 40


def test_what_is_never_committed_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocktable_vllm.tracking.MAX_MARKS", 50)
    table = make()
    state = table.__blocktable__
    for turn in range(400):
        table.add_row(([turn + 1] * 3, [turn + 2]), turn % ROWS)
        assert table[0].block_table.np[turn % ROWS, 2] == turn + 1
        assert table[1].num_blocks_per_row[turn % ROWS] == 2
        table.append_row(([7], [8]), (turn + 1) % ROWS)
    assert len(state._marks) <= 50
    assert len(state._shown) <= 66
    assert state._journal.size <= 500  # of thousands of changes
    table.commit_block_table(ROWS)
    assert agree(table, ROWS)


@pytest.mark.parametrize("path", ["numpy", "auto"])
@pytest.mark.parametrize("is_queued", [True, False])
def test_a_commit_that_raises_leaves_its_changes_pending(
    monkeypatch: pytest.MonkeyPatch, path: str, is_queued: bool
) -> None:
    monkeypatch.setenv("BLOCKTABLE_HOST_PATH", path)
    table = make()
    for row in range(4):
        table.add_row(([10 + row], [20 + row]), row)
    table.commit_block_table(4)
    for row in (2, 0):
        table.append_row(([7, 8], [8, 9]), row)
    if not is_queued:
        table.clear_row(1)

    def failing(changes: Any, *, stream: Any) -> None:
        raise bt.BlockTableError("the stream is capturing.")

    with monkeypatch.context() as patch:
        store = table.__blocktable__.device.store
        patch.setattr(store, "write", failing)
        patch.setattr(store, "commit", failing, raising=False)
        with pytest.raises(bt.BlockTableError):
            table.commit_block_table(4)
    assert not agree(table, 4)
    table.commit_block_table(4)
    assert agree(table, 4)
    assert table[0].block_table.gpu[2, :4].tolist() == [12, 7, 8, 0]


def test_every_range_that_is_sent_holds_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of two groups that lie side by side, where one of the groups has been sent whole."""
    table = make(max_num_reqs=4, block_sizes=[16] * 3, kernel_block_sizes=[16] * 3, max_num_blocks=[WIDTH] * 3)
    table.append_row(([1, 2, 3, 4],) * 3, 3)
    table.append_row(([5, 6, 7], [5, 6, 7], [5, 6]), 0)
    table[2].commit_block_table(1)
    write, sizes = table.__blocktable__.device.store.write, []

    def noting_write(writes: Any, *, stream: Any) -> None:
        sizes.extend(writes.lengths.tolist())
        write(writes, stream=stream)

    monkeypatch.setattr(table.__blocktable__.device.store, "write", noting_write)
    table.commit_block_table(4)
    assert agree(table, 4)
    assert sizes
    assert min(sizes) > 0


def test_a_row_once_outside_the_batch_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make()
    for row in range(4):
        table.add_row(([10 + row], [20 + row]), row)
    table.commit_block_table(4)
    table.commit_block_table(3)
    table[0].block_table.gpu[3].fill_(0)
    table.commit_block_table(4)
    assert agree(table, 4)


def test_who_holds_the_rows_may_write_to_them_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make()
    table.add_row(([1, 2], [3]), 0)
    table.commit_block_table(1)
    sent = Sent(table, monkeypatch)
    row = table[1].block_table.np[0]
    for value in (41, 42):
        row[5] = value
        table.commit_block_table(1)
        assert table[1].block_table.gpu[0, 5] == value
        assert sent.take()[1] == [(0, 1), (0, 1)]
    tensor = table[0].block_table.cpu[:1]
    del row
    tensor[0, 7] = 9
    table.append_row(([5], [6]), 0)
    table.commit_block_table(1)
    assert table[0].block_table.gpu[0].tolist() == [1, 2, 5, 0, 0, 0, 0, 9]
    del tensor
    table.commit_block_table(1)  # the last whole copy
    sent.take()
    table.append_row(([5], [6]), 0)
    table.commit_block_table(1)
    assert sent.take() == (5, [])
    assert agree(table, 1)


def test_counts_that_are_written_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make()
    table.add_row(([1, 2, 3], [4]), 0)
    table.commit_block_table(1)
    sent = Sent(table, monkeypatch)
    table[0].num_blocks_per_row[0] = 1  # a runner takes rejected tokens back
    table.append_row(([9], [8]), 0)
    table.commit_block_table(1)
    entries, rows = sent.take()
    assert rows == []
    assert entries == 2 + 1 + 2
    assert table[0].block_table.gpu[0, :4].tolist() == [1, 9, 3, 0]
    assert compute(table, [0, 3], [16, 32, 0])[0][:3] == [9 * 16, -1, 16]


def test_the_host_path_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative entries, which the core never has, are no trouble to a compiled append either."""
    found = []
    for path in ("numpy", "auto"):
        monkeypatch.setenv("BLOCKTABLE_HOST_PATH", path)
        table = make(max_num_reqs=40)
        for each in table.block_tables:
            each.block_table.np[:] = -7
        table.commit_block_table(40)
        for row in (*range(30, 0, -1), *range(5, 12)):
            table.append_row(([2**31 - 1 - row], [2**30 + row]), row)
        table.commit_block_table(40)
        found.append([each.block_table.gpu.clone() for each in table.block_tables])
        assert agree(table, 40)
    assert all(map(torch.equal, *found))


# Slots.


@pytest.mark.parametrize("mode", ["fast", "strict"])
def test_slots_on_every_backend(backend: str, mode: str) -> None:
    table = make(mode, backend)
    table.add_row(([3, 4], [5]), 0)
    table.add_row(([6], [7]), 1)
    table.commit_block_table(2)
    found = compute(table, [0, 3, 5], [0, 17, 40, 15, 127, 3])
    unheld = [-1, -1] if mode == "fast" else [8, 15]  # of block 0, where vLLM would write too
    assert found[0] == [48, 65, unheld[0], 111, unheld[1], *[-1] * 11]
    assert found[1][:5] == [160, 177, unheld[0], 239, unheld[1]]
    assert compute(table, [0], []) == [[-1] * 16] * 2
    table[1].compute_slot_mapping(  # one group of many
        1, *(torch.tensor([0, 1], device=device_of(backend), dtype=kind) for kind in (torch.int32, torch.int64))
    )
    assert table[1].slot_mapping.gpu[:3].tolist() == [160, -1, -1]  # the second token is no request's
    assert table[0].slot_mapping.gpu[0] == -1
    table.clear()
    assert not table[0].block_table.gpu.any()


def test_ranks_may_be_assigned_after_the_table_was_made(backend: str) -> None:
    table = make("fast", backend)
    table.add_row(([3, 4], [5]), 0)
    table.commit_block_table(1)
    for each in table.block_tables:
        each.dcp_world_size, each.dcp_rank = 2, 1
    assert compute(table, [0, 4], [0, 1, 33, 62]) == [
        [-1, 48, 64, -1, *[-1] * 12],
        [-1, 160, 176, -1, *[-1] * 12],
    ]


def test_a_tensor_put_in_place_of_the_slots_is_written(backend: str) -> None:
    table = make("fast", backend)
    table.add_row(([3, 4], [5]), 0)
    table.commit_block_table(1)
    mine = torch.full((5,), 9, dtype=torch.int64, device=device_of(backend))
    table[0].slot_mapping.gpu = mine
    compute(table, [0, 2], [16, 1])
    assert mine.tolist() == [64, 49, -1, -1, -1]
    assert table[1].slot_mapping.gpu[:3].tolist() == [176, 161, -1]


@pytest.mark.parametrize("mode", ["fast", "strict"])
def test_rows_of_another_type_are_used_from_then_on(mode: str) -> None:
    """A plugin replaces the host's rows by int64 ones."""
    table = make(mode)
    table.append_row(([3], [5]), 0)
    buffer = table[0].block_table
    buffer.cpu = buffer.cpu.to(torch.int64)
    buffer.np = buffer.cpu.numpy()
    table.append_row(([2**31 - 1], [6]), 0)
    table.commit_block_table(1)
    assert table[0].get_numpy_array()[0, :3].tolist() == [3, 2**31 - 1, 0]
    assert table[0].block_table.gpu[0, :3].tolist() == [3, 2**31 - 1, 0]
    assert compute(table, [0, 2], [1, 16])[0][:2] == [49, (2**31 - 1) * 16]


@pytest.mark.parametrize("mode", ["fast", "strict"])
def test_a_model_without_a_cache_has_tables_of_no_group(mode: str) -> None:
    table = make(mode, block_sizes=[], kernel_block_sizes=[], max_num_blocks=[])
    for call in (table.append_row, table.add_row):
        call((), 0)
    table.move_row(0, 1)
    table.swap_row(0, 1)
    table.clear_row(0)
    table.commit_block_table(3)
    table.compute_slot_mapping(0, torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int64))
    table.clear()
    assert list(table) == []


@pytest.mark.parametrize("mode", ["fast", "strict"])
@pytest.mark.parametrize(("made_in", "used_in"), [(True, False), (False, True), (True, True)])
def test_inference_mode_is_nobodys_trouble(mode: str, made_in: bool, used_in: bool) -> None:
    with torch.inference_mode(made_in):
        table = make(mode)
        host = table[0].block_table.cpu
    with torch.inference_mode(used_in):
        table.add_row(([3, 4], [5]), 0)
        host[0, 7] = 9
        table.commit_block_table(1)
        assert compute(table, [0, 2], [1, 16])[0][:2] == [49, 64]
        table[0].slot_mapping.gpu[1:].fill_(-1)
        table[0].get_device_tensor(3)[1:].fill_(0)
    table[0].block_table.gpu.copy_(table[0].block_table.gpu.clone())
    table[0].block_table.cpu.copy_(table[0].block_table.cpu.clone())
    assert table[0].block_table.gpu[0, 7] == 9


# What is refused.


@pytest.mark.parametrize("ids", [([1] * 9, [1]), ([1], [1] * 5), (["x"], [1]), ([1],), ([2**31], [1])])
def test_an_append_that_cannot_be_changes_no_group(ids: Any) -> None:
    table = make()
    table.add_row(([3, 4], [5]), 0)
    before = table.__blocktable__.host_state()
    for call in (table.append_row, table.add_row):
        with pytest.raises((ValueError, IndexError, OverflowError)):
            call(ids, 0)
        after = table.__blocktable__.host_state()
        assert all(map(np.array_equal, (*before[0], before[1]), (*after[0], after[1])))


@pytest.mark.parametrize("row", [True, None, [0], (0,), slice(0, 2), np.array([0, 1]), ...], ids=repr)
def test_what_is_no_one_row_is_refused_and_changes_nothing(row: Any) -> None:
    table = make()
    table.add_row(([3, 4], [5]), 0)
    before = table.__blocktable__.host_state()
    calls: tuple[Any, ...] = (
        lambda: table.append_row(([1], [1]), row),
        lambda: table.add_row(([1], [1]), row),
        lambda: table.clear_row(row),
        lambda: table.move_row(0, row),
        lambda: table.move_row(row, 1),
        lambda: table.swap_row(0, row),
    )
    for call in calls:
        with pytest.raises(bt.DtypeError, match="one integer"):
            call()
        after = table.__blocktable__.host_state()
        assert all(map(np.array_equal, (*before[0], before[1]), (*after[0], after[1])))


@pytest.mark.parametrize("row", [np.int64(1), np.uint8(1), np.array(1), torch.tensor(1), -5], ids=repr)
def test_a_row_may_be_any_integer(row: Any) -> None:
    table, same = make(), make()
    for each, where in ((table, row), (same, 1)):
        each.add_row(([3, 4], [5]), where)
        each.append_row(([6], [7]), where)
        each.move_row(where, 2)
        each.swap_row(where, 3)
    rows, counts = table.__blocktable__.host_state()
    expected, expected_counts = same.__blocktable__.host_state()
    assert counts.tolist() == expected_counts.tolist()
    assert all(map(np.array_equal, rows, expected))


def test_no_id_is_lost_on_a_full_row() -> None:
    table = make()
    table.add_row((list(range(1, 9)), [1]), 0)
    with pytest.raises(bt.RowCapacityError, match=r"row 0 of group 0 holds 8 of 8 columns: 1 more do not fit"):
        table.append_row(([9], [2]), 0)
    assert [each.num_blocks_per_row[0] for each in table.block_tables] == [8, 2]


def test_clean_tails_leave_nothing_behind_a_row() -> None:
    table = make(clean_tails=True)
    table.add_row(([1, 2, 3], [4, 5]), 0)
    table.add_row(([6, 7], []), 1)
    table.commit_block_table(2)
    table.add_row(([8], []), 0)
    table.move_row(0, 1)
    table.commit_block_table(2)
    assert table[0].block_table.gpu[:2, :3].tolist() == [[8, 0, 0]] * 2
    assert not table[1].block_table.gpu.any()


def test_a_backend_that_runs_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        name = "elsewhere"
        capabilities = frozenset({"streams"})

    monkeypatch.setattr("blocktable_vllm.memory.get_backend", lambda name: Elsewhere())
    with pytest.raises(bt.ConfigError, match="on the CPU, where backend 'elsewhere' does not run"):
        make(backend="numpy")


def test_an_interleave_size_that_cuts_blocks_is_refused() -> None:
    table = make(cp_kv_cache_interleave_size=3)  # no ranks: it means nothing
    table[0].dcp_world_size = 2
    with pytest.raises(ValueError, match="interleave_size 3 does not divide block_size 16"):
        compute(table, [0, 1], [0])


def test_too_many_requests_are_refused() -> None:
    table = make()
    with pytest.raises(ValueError, match=r"num_reqs 7 is outside 0 \.\. 6"):
        compute(table, [0] * 8, [])
    with pytest.raises(ValueError, match="query_start_loc holds 1 entries"):
        table.compute_slot_mapping(1, torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))


def test_the_name_of_vllms_kernel_is_a_stand_in() -> None:
    from blocktable_vllm import home

    with pytest.raises(bt.UnsupportedError, match="call compute_slot_mapping"):
        home._compute_slot_mapping_kernel[(1,)](3)


@pytest.mark.parametrize("mode", ["fast", "strict"])
def test_a_table_is_freed_with_its_last_reference(mode: str) -> None:
    import gc
    import weakref

    gc.collect()
    gc.disable()
    try:
        table = make(mode)
        table.append_row(([1], [2]), 0)
        table.commit_block_table(1)
        compute(table, [0, 1], [0])
        state = weakref.ref(table.__blocktable__)
        del table
        assert state() is None
    finally:
        gc.enable()


def test_the_example_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs/vllm.md").read_text()
    (code,) = re.findall(r"<!-- drop-in -->\n```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "docs/vllm.md", "exec"), {"torch": torch})
    said = re.findall(r"print\(.*\)  # (.*)", code)
    assert capsys.readouterr().out.splitlines() == said


def test_where_rows_were_given_up_vllms_own_methods_run() -> None:
    """They cost what vLLM's cost: no view is made, and nothing is asked for."""
    table = make()
    kinds = type(table), type(table[0]), type(table[0].block_table)
    table.append_row(([1], [2]), 0)
    table[0].block_table.gpu = table[0].block_table.cpu
    for thing, kind in zip((table, table[0], table[0].block_table), kinds, strict=True):
        assert isinstance(thing, kind)
        assert type(thing) is not kind
    assert table[0].block_table.gpu is table[0].block_table.cpu
    assert table[0].block_table.np is vars(table[0].block_table)["np"]
    assert table[0].num_blocks_per_row is vars(table[0])["num_blocks_per_row"]
    table.append_row(([3], [4]), 0)
    table.move_row(0, 1)
    table.commit_block_table(2)
    assert table[0].block_table.gpu[1, :2].tolist() == [1, 3]
    assert table[1].block_table.gpu[1, :4].tolist() == [4, 5, 8, 9]
    assert compute(table, [0, 0, 1], [16])[0][0] == 3 * 16
    assert type(make()[0]) is kinds[1]
