"""An exception between any two bytecodes of a row operation or a commit: all of it was done, or nothing (R6, R9.9)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable.rows import Journal
from blocktable.typing import IntArray

pytestmark = [pytest.mark.slow, pytest.mark.faults]

CONFIG = bt.BlockTableConfig(
    groups=[
        bt.KVCacheGroup(block_size=16, num_blocks=2000, allow_null=True),
        bt.KVCacheGroup(block_size=32, kernel_block_size=16, null_block_id=3),
    ],
    max_num_reqs=6,
    max_num_batched_tokens=4,
    max_model_len=16 * 32,
)
IDS = np.arange(10, 14, dtype=np.int32)


class Subclass(np.ndarray[Any, Any]):
    """What the compiled path leaves to the numpy path."""


CALLS: dict[str, Callable[[bt.BlockTable], Any]] = {
    "append_row": lambda table: table.append_row(1, [[9, 0], [5]]),
    "set_row": lambda table: table.set_row(0, [[1, 7, 3], [4]]),
    "clear_row": lambda table: table.clear_row(0),
    "clear": lambda table: table.clear(),
    "move_row": lambda table: table.move_row(0, 1),
    "swap_rows": lambda table: table.swap_rows(0, 1),
    "copy_row": lambda table: table.copy_row(0, 5),
    "copy_rows": lambda table: table.copy_rows([0, 0, 1], [1, 4, 5]),
    "permute_rows": lambda table: table.permute_rows([0, 1], [1, 4]),
    "truncate_row": lambda table: table.truncate_row(0, [1, 5]),
    "truncate_rows": lambda table: table.truncate_rows([0, 1], [1, 0]),
    "clear_rows": lambda table: table.clear_rows(np.array([1, 0], np.int32)),
    "null_range": lambda table: table.null_range(0, 1, 0, 2),
    "null_ranges": lambda table: table.null_ranges([0, 1], 0, [1, 0], [3, 1]),
    "replace_blocks": lambda table: table.replace_blocks(0, 1, 0, [8, 2]),
    "replace_block_ranges": lambda table: table.replace_block_ranges([0, 1], 0, [1, 0], [50, 3, 51], [2, 1]),
    "remap_blocks": lambda table: table.remap_blocks(0, [1, 3, 6], [3, 1, 60]),
    "append_rows": lambda table: table.append_rows([1, 4], [IDS, IDS[:3]], [[3, 1], [1, 2]]),
    "append_rows of subclasses": lambda table: table.append_rows([1, 4], [IDS.view(Subclass), IDS], [2, 2]),
    "set_rows": lambda table: table.set_rows(np.array([1, 0]), [IDS, IDS], np.array([3, 1])),
    "invalidate": lambda table: table.invalidate(),
}


class Injected(BaseException):
    """As a KeyboardInterrupt: no `except Exception` stops it."""


class Tracer:
    """Raises before the bytecode with the number `stop` of a call, counted in our own functions.

    Numpy's change nothing of a table: an exception inside of one is one at the call of it.
    """

    def __init__(self, stop: int) -> None:
        self._left = stop

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_globals.get("__name__", "").startswith("blocktable"):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            if self._left == 0:
                raise Injected
            self._left -= 1
        return self


def is_interrupted(call: Callable[[bt.BlockTable], Any], table: bt.BlockTable, stop: int) -> bool:
    before = sys.gettrace()
    sys.settrace(Tracer(stop))
    try:
        call(table)
    except Injected:
        return True
    finally:
        sys.settrace(before)
    return False


def make() -> bt.BlockTable:
    """Return a table with blocks, some of them pending, whose journal has no room left."""
    table = bt.BlockTable(CONFIG, "numpy")
    table.set_rows([0, 1], [[1, 2, 3, 4, 5, 6], [1, 2, 4]], [[4, 2], [2, 1]])
    table.commit()
    table.replace_blocks(0, 0, 3, [40])
    table.append_row(1, [[7], None])
    table.null_range(0, 0, 2, 3)
    journal: Any = table._rows.journal
    if isinstance(journal, Journal):  # the compiled one is not interrupted
        journal._ranges = journal._ranges[:, : journal.size].copy()
    return table


def state(table: bt.BlockTable) -> list[IntArray]:
    return [table.num_blocks_per_row, *(table.host_table(group).copy() for group in range(len(CONFIG.groups)))]


def is_same(one: list[IntArray], other: list[IntArray]) -> bool:
    return all(np.array_equal(*arrays) for arrays in zip(one, other, strict=True))


def expect_sent(table: bt.BlockTable, expected: list[IntArray], where: str) -> None:
    """The device gets what the host holds."""
    table.verify()
    table.commit()
    table.verify()
    assert table._rows.pending_ranges()[1].size == 0
    for group in range(len(CONFIG.groups)):
        assert np.array_equal(table.device_table(group), expected[1 + group]), where


@pytest.fixture(params=["numpy", "compiled"])
def host_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "compiled":
        pytest.importorskip("blocktable_compiled.operations")
    monkeypatch.setenv("BLOCKTABLE_HOST_PATH", request.param)
    path: str = request.param
    return path


@pytest.mark.parametrize("name", CALLS)
def test_an_exception_at_any_bytecode_leaves_all_or_nothing(name: str, host_path: str) -> None:
    """Rules: R6."""
    call, table = CALLS[name], make()
    before = state(table)
    call(table)
    after = state(table)
    call(table)
    after_both = state(table)
    stop, outcomes = 0, set()
    while True:
        table, where = make(), f"{name}, bytecode {stop}"
        if not is_interrupted(call, table, stop):
            break
        found = state(table)
        is_done = is_same(found, after)
        assert is_done or is_same(found, before), where
        outcomes.add(is_done)
        expect_sent(table, found, where)
        call(table)
        assert is_same(state(table), after_both if is_done else after), where
        stop += 1
    assert stop > 5
    assert outcomes == {False, True} or is_same(before, after)


def test_an_exception_at_any_bytecode_of_a_commit_loses_nothing(host_path: str) -> None:
    """Rules: R9.9."""
    stop = 0
    expected = state(make())
    while True:
        table = make()
        if not is_interrupted(lambda table: table.commit(), table, stop):
            break
        assert is_same(state(table), expected)
        table.verify()
        expect_sent(table, expected, f"bytecode {stop}")
        stop += 1
    assert stop > 20


LIMITED = r"""
import resource, sys
import numpy as np
import blocktable as bt

NUM_IDS, MIB = 25_165_824, 1 << 20
config = bt.BlockTableConfig(
    groups=[bt.KVCacheGroup(block_size=16, blocks_per_row=NUM_IDS + 2)], max_num_reqs=2, max_num_batched_tokens=4,
    max_model_len=16,
)
ids = np.arange(1, NUM_IDS + 1, dtype=np.int32)
CALLS = {
    "append_rows": lambda table: table.append_rows([0], ids, [NUM_IDS]),
    "copy_row": lambda table: table.copy_row(1, 0),
}


def used():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()


call = CALLS[sys.argv[1]]
table, failures = bt.BlockTable(config, "numpy"), 0
table.set_row(0, [7, 8])
if sys.argv[1] == "copy_row":
    table.set_row(1, ids)
table.commit()
counts, before = table.num_blocks_per_row, table.host_table(0).copy()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
for limit in range(8, 4096, 200):
    resource.setrlimit(resource.RLIMIT_AS, (used() + limit * MIB, hard))
    try:
        call(table)
        is_done = True
    except MemoryError:
        is_done = False
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    if is_done:
        break
    failures += 1
    assert np.array_equal(table.num_blocks_per_row, counts), limit
    assert np.array_equal(table.host_table(0), before), limit
    assert table._rows.pending_ranges()[1].size == 0, limit
table.verify()
assert is_done
table.commit()
assert np.array_equal(table.device_table(0), table.host_table(0))
print(failures)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="wants RLIMIT_AS")
@pytest.mark.parametrize("call", ["append_rows", "copy_row"])
def test_an_operation_on_25_million_blocks_without_memory_changes_nothing(call: str, host_path: str) -> None:
    """Rules: R6."""
    done = subprocess.run([sys.executable, "-c", LIMITED, call], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 0
