"""Arguments that are not ints, that another thread changes, or that no memory is left for (R6, R7, R17, R23)."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import blocktable as bt

NUM_BLOCKS = 1000


@pytest.fixture(params=["numpy", "compiled"])
def host_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "compiled":
        pytest.importorskip("blocktable_compiled.operations")
    monkeypatch.setenv("BLOCKTABLE_HOST_PATH", request.param)
    path: str = request.param
    return path


def make(num_groups: int = 2) -> bt.BlockTable:
    config = bt.BlockTableConfig(
        groups=[bt.KVCacheGroup(block_size=16, num_blocks=NUM_BLOCKS)] * num_groups,
        max_num_reqs=4,
        max_num_batched_tokens=16,
        max_model_len=256,
    )
    table = bt.BlockTable(config, "numpy")
    table.set_rows([0, 1], [[1, 2, 3, 4]] * num_groups, [2, 2])
    table.commit()
    return table


def masked(*values: Any) -> Any:
    """Return a masked array whose wrong entries are those that its own `min` leaves out."""
    return np.ma.array(values, np.int32, mask=[False] * (len(values) - 1) + [True])


def span(*values: int) -> list[Any]:
    return [np.timedelta64(value) for value in values]


def typed(*values: int) -> Any:
    return np.array(values, np.int32)


ROW_CALLS: dict[str, Callable[[bt.BlockTable, Callable[..., Any]], Any]] = {
    "append_row, ids": lambda table, make: table.append_row(0, [make(5, 6), None]),
    "append_rows, rows": lambda table, make: table.append_rows(make(0, 1), [[5, 6]] * 2, [1, 1]),
    "append_rows, ids": lambda table, make: table.append_rows([0, 1], [make(5, 6), make(5, 6)], [1, 1]),
    "append_rows, counts": lambda table, make: table.append_rows([0, 1], [[5, 6]] * 2, make(1, 1)),
    "append_rows, nested counts": lambda table, make: table.append_rows([0, 1], [[5, 6]] * 2, [make(1, 1)] * 2),
    "set_row, ids": lambda table, make: table.set_row(0, [make(5, 6), [7]]),
    "set_rows, counts": lambda table, make: table.set_rows([0, 1], [[5, 6]] * 2, make(1, 1)),
    "clear_rows": lambda table, make: table.clear_rows(make(0, 1)),
    "truncate_row": lambda table, make: table.truncate_row(0, make(1, 1)),
    "truncate_rows": lambda table, make: table.truncate_rows([0, 1], make(1, 1)),
    "null_ranges": lambda table, make: table.null_ranges([0, 1], 0, make(0, 0), [1, 1]),
    "replace_blocks": lambda table, make: table.replace_blocks(0, 0, 0, make(5, 6)),
    "replace_block_ranges": lambda table, make: table.replace_block_ranges([0, 1], 0, [0, 0], [5, 6], make(1, 1)),
    "remap_blocks, old": lambda table, make: table.remap_blocks(0, make(1, 2), [8, 9]),
    "remap_blocks, new": lambda table, make: table.remap_blocks(0, [1, 2], make(8, 9)),
    "copy_rows": lambda table, make: table.copy_rows([0, 1], make(2, 3)),
    "permute_rows": lambda table, make: table.permute_rows(make(0, 1), [2, 3]),
    "common_blocks": lambda table, make: table.common_blocks(make(0, 1), 0),
}


@pytest.mark.parametrize("kind", [masked, span, lambda *values: bytearray(values)], ids=["masked", "span", "bytearray"])
@pytest.mark.parametrize("call", ROW_CALLS.values(), ids=list(ROW_CALLS))
def test_what_only_looks_like_ints_is_refused(
    call: Callable[[bt.BlockTable, Any], Any], kind: Callable[..., Any], host_path: str
) -> None:
    """Rules: R7."""
    table, same = make(), make()
    with pytest.raises(bt.DtypeError, match=r"masked array|timedelta64|bytearray"):
        call(table, kind)
    assert table.num_blocks_per_row.tolist() == same.num_blocks_per_row.tolist()
    assert table._rows.pending_ranges()[1].size == 0
    table.verify()
    call(table, typed)


@pytest.mark.parametrize("array", [np.ma.array([[5, 6], [7, 8]]), np.ma.array([5, 6], mask=[False, True])])
def test_masked_arrays_in_place_of_lists_are_refused(array: Any, host_path: str) -> None:
    """Rules: R7."""
    table = make(array.ndim)
    with pytest.raises(bt.DtypeError, match="masked"):
        table.append_rows([0, 1], array, [1, 1])
    with pytest.raises(bt.DtypeError, match="masked"):
        table.append_rows([0, 1], [[5, 6]] * array.ndim, array)


def test_a_span_of_time_is_no_int(host_path: str) -> None:
    """Rules: R7, R10.4."""
    table: Any = make()
    two = np.timedelta64(2)
    calls: list[Callable[[], Any]] = [
        lambda: table.append_row(two, [[5], [6]]),
        lambda: table.truncate_row(0, two),
        lambda: table.null_range(0, 0, two, two),
        lambda: table.replace_blocks(0, 0, two, [5]),
        lambda: table.host_table(two),
        lambda: table.gather(typed(0), two),
    ]
    for call in calls:
        with pytest.raises(bt.DtypeError, match="timedelta64"):
            call()


def test_masked_inputs_of_calls_are_refused(host_path: str) -> None:
    """Rules: R7, R10.8, R12, R37."""
    table = make()
    right = {
        "idx_mapping": typed(0, 1),
        "query_start_loc": typed(0, 1, 2),
        "positions": np.array([0, 17]),
        "num_computed_tokens": typed(0, 0),
    }
    table.step(**right)
    for name, array in right.items():
        with pytest.raises(bt.DtypeError, match=f"{name} is a masked array"):
            table.step(**(right | {name: np.ma.array(array)}))
    lens = np.ma.array(typed(3, 4))
    for call in (table.export, table.export_host):
        with pytest.raises(bt.DtypeError, match="seq_lens is a masked array"):
            call("csr", typed(0, 1), seq_lens=lens)
    with pytest.raises(bt.DtypeError, match="masked array"):
        bt.ContextParallel().local_lengths(lens)
    with pytest.raises(bt.DtypeError, match="masked array"):
        table.map_positions(np.ma.array(typed(0)), 0, typed(0)[None])


class Liar(np.ndarray[Any, Any]):
    """An array that says of its entries what a check wants to hear."""

    def min(self, *arguments: Any, **options: Any) -> Any:
        return np.int32(1)

    def max(self, *arguments: Any, **options: Any) -> Any:
        return np.int32(1)

    def __lt__(self, other: Any) -> Any:
        return np.zeros(self.shape, np.bool_)

    __gt__ = __ge__ = __eq__ = __lt__


def test_arrays_of_other_classes_are_what_numpy_holds(host_path: str) -> None:
    """Rules: R7, R12."""
    table = make()
    for ids in ([-7, 5], [5, NUM_BLOCKS], [0, 5]):
        with pytest.raises(bt.ArgumentError):
            table.append_rows([0, 1], [typed(*ids).view(Liar)] * 2, [1, 1])
    with pytest.raises(bt.RowIndexError):
        table.clear_rows(typed(0, 4).view(Liar))
    table.append_rows(typed(0, 1).view(Liar), [typed(5, 6).view(Liar)] * 2, typed(1, 1).view(Liar))
    assert table.block_ids(1, 1).tolist() == [3, 4, 6]
    table.step(typed(9, 1).view(Liar), typed(0, 1, 2).view(Liar), np.array([0, 35]).view(Liar))
    assert table.buffers.slot_mappings[0][:3].tolist() == [-1, 6 * 16 + 3, -1]


def test_a_table_is_neither_copied_nor_pickled() -> None:
    """Rules: R17."""
    table = make()
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(bt.DtypeError, match=r"cannot be copied or pickled.*config"):
            call(table)
    assert pickle.loads(pickle.dumps(table.config)) == table.config


def test_inputs_inside_what_an_export_writes_are_refused(host_path: str) -> None:
    """Rules: R17."""
    table = make()
    rows, starts, positions, lens = typed(0, 1), typed(0, 1, 2), np.array([0, 17]), typed(3, 18)
    out = table.create_export("csr")
    assert out.lengths is not None
    for inputs in (lens, out.lengths[:2], lens, out.lengths[:2]):
        if inputs is lens:
            table.export("csr", rows, seq_lens=inputs, out=out)
            continue
        with pytest.raises(bt.ArgumentError, match=r"seq_lens shares memory with out\.lengths"):
            table.export("csr", rows, seq_lens=inputs, out=out)
    step = rows, starts, positions
    table.step_metadata(*step, lens, layouts="csr")
    table.append_row(0, [[9], [9]])
    written = table._exports.find(bt.LAYOUTS["csr"], (0, 1), table.buffers)
    assert written is not None
    assert written.lengths is not None
    sent = table.num_bytes_sent
    with pytest.raises(bt.ArgumentError, match="seq_lens shares memory"):
        table.step_metadata(*step, written.lengths[:2], layouts="csr")
    assert table.num_bytes_sent == sent
    table.step_metadata(*step, lens, layouts="csr")
    assert table.num_bytes_sent > sent
    places = np.array([[0], [17]], np.int32)
    with pytest.raises(bt.ArgumentError, match="positions shares memory with out"):
        table.map_positions(rows, 0, places, out=places)


def test_what_is_only_taken_for_a_flag_a_list_or_an_observer_is_refused(host_path: str) -> None:
    """Rules: R17, R25.15, R42, R45."""
    table: Any = make()
    requests: Any = bt.Requests(table)
    step = typed(0), typed(0, 1), np.array([0])
    calls: dict[str, Callable[[], Any]] = {
        "whole must be True or False": lambda: table.pack_changes(whole=2),
        "on_device must be True or False": lambda: requests.idx_mapping([], on_device=np.array([0, 1])),
        "digests must be True or False": lambda: table.record("x.btrace", digests="no"),
        "path must be": lambda: table.record(1),
        "observer must have": lambda: table.observe([]),
        "requests must be a list": lambda: requests.sync_batch(5, []),
        "block_ids must be a list": lambda: requests.sync_batch(["a"], iter([[1]])),
        "requests must be a": lambda: requests.idx_mapping(key for key in "a"),
        "must be hashable": lambda: requests.row(np.timedelta64(1)),
        "groups must be an int": lambda: table.export_host("csr", typed(0), groups=bytes(1), seq_lens=typed(1)),
        "num_reqs_padded must be an int": lambda: table.step(*step, num_reqs_padded=np.timedelta64(1)),
    }
    for message, call in calls.items():
        with pytest.raises(bt.DtypeError, match=message):
            call()
    with pytest.raises(bt.ArgumentError, match="out must be a set"):
        table.gather(typed(0), out=np.timedelta64(1))
    assert table.pack_changes(whole=np.True_)


def test_lengths_inside_what_a_step_writes_are_refused(host_path: str) -> None:
    """Whether or not anything is exported: the caller is handed them with the step. Rules: R17, R33."""
    table = make()
    lens = table.buffers.block_tables[0].reshape(-1)[:1]
    step = typed(0), typed(0, 1), np.array([0])
    for layouts in (None, "csr", None):
        with pytest.raises(bt.ArgumentError, match="seq_lens shares memory"):
            table.step_metadata(*step, lens, layouts=layouts)
        table.step_metadata(*step, typed(1), layouts=layouts)


FLIPPING = r"""
import sys, threading, time
import numpy as np
import blocktable as bt

NUM_ROWS, NUM_BLOCKS = 2048, 1000
sys.setswitchinterval(1e-6)
config = bt.BlockTableConfig(
    groups=[bt.KVCacheGroup(block_size=32, kernel_block_size=32 // int(sys.argv[1]), num_blocks=NUM_BLOCKS)] * 2,
    max_num_reqs=NUM_ROWS, max_num_batched_tokens=2 * NUM_ROWS, max_model_len=32 * 64,
)
table = bt.BlockTable(config, "numpy")
right = np.arange(NUM_ROWS, dtype=np.int32)
LATE = slice(NUM_ROWS - 64, None)  # far from what a check looks at first


def flipped(values, wrong, dtype):
    # What the caller passes, and what another thread writes into it all the time.
    arrays = [np.array(values, dtype) for _ in range(3)]
    arrays[2][LATE] = wrong
    return arrays


ARRAYS = {
    "rows": flipped(right, 2**29, np.int32), "far rows": flipped(right, -(2**60), np.int64),
    "counts": flipped(np.ones(NUM_ROWS), -5, np.int64), "ids": flipped(right % 900 + 1, 5000, np.int32),
    "long ids": flipped(right % 900 + 1, -(2**40), np.int64), "starts": flipped(np.zeros(NUM_ROWS), 2**20, np.int64),
    "idx": flipped(right, 2**29, np.int32), "positions": flipped(np.zeros(NUM_ROWS), -(2**40), np.int64),
}
is_over = False


def flip():
    while not is_over:
        for place in (2, 1):
            for arrays in ARRAYS.values():
                arrays[0][:] = arrays[place]
                if place == 2:
                    arrays[0][LATE] = arrays[1][LATE]  # under the GIL, and right again soon
                    arrays[0][LATE] = arrays[2][LATE]


given = {name: arrays[0] for name, arrays in ARRAYS.items()}
ids, ones = [given["ids"], given["long ids"]], np.ones(NUM_ROWS, np.int64)
starts = np.arange(NUM_ROWS + 1, dtype=np.int32)
CALLS = [
    lambda: table.append_rows(given["rows"], ids, given["counts"]),
    lambda: table.append_rows(given["far rows"], [*ids[::-1]], [given["counts"], ones]),
    lambda: table.append_rows(given["far rows"], np.array([right % 900 + 1] * 2), ones),
    lambda: table.set_rows(given["rows"], ids, given["counts"]),
    lambda: table.set_rows(range(NUM_ROWS), ids, ones),
    lambda: table.truncate_rows(given["far rows"], given["counts"]),
    lambda: table.clear_rows(given["rows"]),
    lambda: table.copy_rows(given["rows"], given["far rows"]),
    lambda: table.permute_rows(given["far rows"], given["rows"]),
    lambda: table.null_ranges(given["far rows"], 0, given["starts"], given["counts"]),
    lambda: table.replace_block_ranges(given["far rows"], 0, given["starts"], given["ids"], given["counts"]),
    lambda: table.replace_block_ranges(range(NUM_ROWS), 1, np.zeros(NUM_ROWS, int), given["long ids"], ones),
    lambda: table.remap_blocks(0, [1, 2, 3], given["ids"][-3:]),
    lambda: table.common_blocks(given["far rows"], 0),
    lambda: table.step(given["idx"], starts, given["positions"]),
    lambda: table.export_host("table", given["idx"]),
    lambda: table.export("csr", given["idx"], seq_lens=given["rows"]),
    lambda: table.map_positions(given["rows"], 0, given["ids"][:, None]),
]
thread = threading.Thread(target=flip)
thread.start()
done = refused = 0
end = time.monotonic() + float(sys.argv[2])
try:
    while time.monotonic() < end:
        for call in CALLS:
            try:
                call()
                done += 1
            except bt.BlockTableError:
                refused += 1
        for group in range(2):
            held = table.host_table(group).copy()
            expansion = config.groups[group].blocks_per_kv_block
            assert 0 <= held.min() and held.max() < NUM_BLOCKS * expansion, "an id that was not checked"
            slots = table.buffers.slot_mappings[group]
            assert -1 <= slots.min() and slots.max() < NUM_BLOCKS * 32, "a slot of no block"
        table.commit()
        table.verify()
        table.clear()
finally:
    is_over = True
    thread.join()
print(done, refused)
"""


@pytest.mark.parametrize("expansion", [1, 2])
def test_arrays_that_another_thread_changes_are_read_once(expansion: int, host_path: str) -> None:
    """In a process of its own, since a wrong row would end it. Rules: R23."""
    command = [sys.executable, "-c", FLIPPING, str(expansion), "3"]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    calls, refused = map(int, done.stdout.split())
    assert calls > 50
    assert refused > 50
