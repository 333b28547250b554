"""The compiled host path gives what the numpy path gives, entry for entry, and refuses what that refuses."""

from __future__ import annotations

import gc
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from blocktable import BlockTable, BlockTableConfig, BlockTableError, ContextParallel, KVCacheGroup
from blocktable.host_path import HostPath, make_rows
from blocktable.rows import NumpyRows

pytest.importorskip("blocktable_compiled.operations", reason="the compiled host path was not built")

from blocktable_compiled.rows import CompiledRows

CONFIG = BlockTableConfig(
    groups=[
        KVCacheGroup(block_size=16),
        KVCacheGroup(block_size=48, kernel_block_size=16, sliding_window=64),
        KVCacheGroup(block_size=4, num_blocks=500),
    ],
    max_num_reqs=12,
    max_num_batched_tokens=64,
    max_model_len=200,
    context_parallel=ContextParallel(world_size=2, rank=0, interleave_size=4),
)
ONE_GROUP = BlockTableConfig(
    groups=[KVCacheGroup(block_size=16)], max_num_reqs=12, max_num_batched_tokens=64, max_model_len=200
)
PLAIN_GROUPS = BlockTableConfig(
    groups=[KVCacheGroup(block_size=16), KVCacheGroup(block_size=8), KVCacheGroup(block_size=16)],
    max_num_reqs=12,
    max_num_batched_tokens=64,
    max_model_len=200,
)


def both(config: BlockTableConfig) -> tuple[CompiledRows, NumpyRows]:
    return CompiledRows(config), NumpyRows(config)


def packed(host: HostPath, size: int = 2000) -> dict[int, int] | int:
    """Return what a commit writes, entry by entry, each once; or what it says instead."""
    block = np.zeros(size, np.int32)
    used = host.pack_changes(block)
    if used <= 0:
        return used
    singles, num_ranges, num_values, num_constants, num_entries = block[:5].tolist()
    sizes = [singles, singles, num_ranges, num_ranges, num_values, num_constants, num_constants]
    parts = [part.tolist() for part in np.split(block[5:used], np.cumsum(sizes))]
    found = [*zip(parts[0], parts[1], strict=True)]
    for offset, (start, end) in zip(parts[2], pairwise([*parts[3], num_values]), strict=True):
        found += enumerate(parts[4][start:end], offset)
    for offset, (start, end), value in zip(parts[5], pairwise([*parts[6], num_entries]), parts[7], strict=True):
        found += [(offset + place, value) for place in range(end - start)]
    assert len(dict(found)) == len(found)
    return dict(found)


def same(compiled: CompiledRows, plain: NumpyRows) -> None:
    assert compiled.has_changes == plain.has_changes
    assert packed(compiled) == packed(plain)
    assert np.array_equal(compiled.mirror, plain.mirror)
    first, second = compiled.writes(), plain.writes()
    assert first.num_bytes == second.num_bytes
    for name in ("offsets", "lengths", "values"):
        assert np.array_equal(getattr(first, name), getattr(second, name))
    assert compiled.has_changes == plain.has_changes == (first.num_ranges > 0)
    assert packed(compiled) == packed(plain)
    assert packed(compiled, 6) == packed(plain, 6) == (-1 if first.num_ranges else 0)


def _edit(host: HostPath, step: int) -> None:
    """Change blocks inside rows, in one of three ways."""
    rng, group = np.random.default_rng(step), step % host.filled.shape[0]
    if step % 3 == 0:
        old = rng.permutation(np.arange(1, 400))[:150]
        host.remap(group, old, rng.permutation(old))
    elif step % 3 == 1:
        held = host.filled[group] // host.columns_per_block[group]
        rows = np.flatnonzero(held)
        host.replace(rows, group, held[rows] - 1, rng.integers(1, 400, rows.size), np.ones(rows.size, np.int64))
    else:
        host.copy(np.array([0, 3, 0]), np.array([3, 0, 4]), vacate=False)


@pytest.mark.parametrize("config", [CONFIG, ONE_GROUP], ids=["groups", "one"])
@pytest.mark.parametrize("seed", range(5))
def test_random_histories_are_equal(config: BlockTableConfig, seed: int) -> None:
    """Rules: R4, R6, R9."""
    rng = np.random.default_rng(seed)
    pair = both(config)
    taken = 0
    for step in range(120):
        rows = rng.permutation(12)[: rng.integers(0, 13)]
        counts = rng.integers(0, 3, rows.size)
        ids = [rng.integers(1, 400, counts.sum()).astype(np.int32) for _ in config.groups]
        if rng.integers(0, 6) == 0:
            ids[0] = np.empty(0, np.int32)
        outcomes = []
        for host in pair:
            try:
                host.append_rows(rows, ids[0] if len(ids) == 1 and step % 2 else ids, counts)
                outcomes.append("")
            except BlockTableError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        taken += not outcomes[0]
        kept = rng.integers(0, 3, 4)
        for host in pair:
            if step % 7 == 0:
                host.truncate_rows(np.arange(0, 12, 3), kept)
            if step % 5 == 0:
                _edit(host, step)
            if step % 11 == 0:
                host.copy(np.array([1, 2]), np.array([2, 5]), vacate=True)
            if step % 23 == 0:
                host.truncate(np.arange(12), 0)
        same(*pair)
        if step % 3 == 0:
            assert len({host.committed() for host in pair}) == 1
            assert not any(host.has_changes for host in pair)
    assert taken > 40


@pytest.mark.parametrize(
    ("rows", "ids", "counts"),
    [
        ([0, 0], [[1, 2], [3, 4], [5, 6]], [1, 1]),
        ([0, 12], [[1, 2], [3, 4], [5, 6]], [1, 1]),
        ([0, -1], [[1, 2], [3, 4], [5, 6]], [1, 1]),
        ([0, 1], [[1, 0], [3, 4], [5, 6]], [1, 1]),
        ([0, 1], [[1, 2], [3, 4], [5, 500]], [1, 1]),
        ([0, 1], [[1, 2], [3, 4], [5]], [1, 1]),
        ([0, 1], [[1, 2], [3, 4], [5, 6]], [3, -1]),
        ([0, 1], [[1] * 60, [3] * 60, [5] * 60], [59, 1]),
        ([0, 1], [[1, 2], [3, 4]], [1, 1]),
    ],
)
def test_what_is_wrong_is_refused_alike(rows: list[int], ids: list[list[int]], counts: list[int]) -> None:
    """Rules: R6, R7."""
    messages = []
    for host in both(CONFIG):
        with pytest.raises(BlockTableError) as caught:
            host.append_rows(np.array(rows), [np.array(g, np.int32) for g in ids], np.array(counts))
        messages.append((type(caught.value), str(caught.value)))
        assert not host.mirror.any()
        assert host.writes().num_ranges == 0
    assert messages[0] == messages[1]


@pytest.mark.parametrize("wrong", [np.array([True, True]), np.array([1.0, 2.0]), np.array([[1, 2]], np.int32)])
def test_arrays_that_numpy_would_promote_are_refused_alike(wrong: Any) -> None:
    """Rules: R7."""
    right = np.array([1, 2], np.int32)
    messages = []
    for host in both(CONFIG):
        with pytest.raises(BlockTableError) as caught:
            host.append_rows(np.array([0, 1]), [right, wrong, right], np.array([1, 1]))
        messages.append(str(caught.value))
        assert not host.mirror.any()
    assert messages[0] == messages[1]


def test_the_steady_append_runs_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above compares two paths, not one with itself."""
    host = both(CONFIG)[0]
    calls: list[Any] = []
    monkeypatch.setattr(host, "append", lambda *args: calls.append(args))
    host.append_rows(np.array([3, 1]), [np.array([5, 6], np.int32)] * 3, np.array([1, 1]))
    assert not calls
    assert host.filled[:, 3].tolist() == [1, 3, 1]


@pytest.mark.parametrize("path", ["compiled", "numpy"])
@pytest.mark.parametrize(("num_rows", "num_ranges"), [(20, None), (60, 1)])
def test_most_of_a_large_table_is_sent_as_one_range(
    path: str, num_rows: int, num_ranges: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules: R9."""
    monkeypatch.setenv("BLOCKTABLE_HOST_PATH", path)
    config = BlockTableConfig(
        groups=[KVCacheGroup(block_size=16)], max_num_reqs=256, max_num_batched_tokens=64, max_model_len=16 * 512
    )
    host = make_rows(config)
    rows = np.arange(num_rows)[::-1].copy()
    host.set(rows, np.tile(np.arange(1, 481, dtype=np.int32), num_rows), np.full(num_rows, 480))
    writes = host.writes()
    assert writes.num_ranges == (num_rows + 1 if num_ranges is None else num_ranges)
    sent = np.zeros(config.arena.size, np.int32)
    for offset, length, values in zip(
        writes.offsets, writes.lengths, np.split(writes.values, np.cumsum(writes.lengths)[:-1]), strict=True
    ):
        sent[offset : offset + length] = values
    assert np.array_equal(sent, host.mirror)
    if num_ranges == 1:
        assert host.pack_changes(np.zeros(config.arena.size, np.int32)) == -1
    assert host.committed() == writes.num_bytes
    assert not host.has_changes


def test_an_unsorted_append_survives_a_look_at_the_journal() -> None:
    """Values that the append noted are not taken once their ranges have moved. Rules: R9."""
    compiled, plain = both(ONE_GROUP)
    for host in (compiled, plain):
        host.append_rows(np.array([3, 1]), np.array([30, 10], np.int32), np.array([1, 1]))
        host.pending_ranges()
    same(compiled, plain)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("config", [CONFIG, PLAIN_GROUPS, ONE_GROUP], ids=["groups", "plain groups", "one"])
def test_a_mirror_that_is_behind_shows_nowhere(config: BlockTableConfig, seed: int) -> None:
    """Appends of one block each, one after another, are only noted; whatever looks sees them. Rules: R4, R5, R9.1."""
    rng = np.random.default_rng(seed)
    pair = both(config)
    pair[0]._operations.least_late = 1
    was_behind = 0
    for step in range(200):
        size = 12 if step % 7 == 0 else 5  # all rows: the counts of groups follow one another
        rows = np.sort(rng.permutation(12)[:size]) if step % 5 else rng.permutation(12)[:size]
        ids = [rng.integers(1, 400, size).astype(np.int32) for _ in config.groups]
        empties, copies, looks, edits = rng.integers(0, 12, 4) == 0
        for host in pair:
            if empties or (host.filled >= 4).any():
                host.truncate_rows(np.arange(12), np.full(12, int(looks)))
            host.append_rows(rows, ids, np.ones(size, np.int64))
            if copies:
                host.copy(np.array([1, 2]), np.array([2, 5]), vacate=True)
            if edits:
                host.set_row(3, [[7, 8]] * len(config.groups))
        was_behind += not np.array_equal(pair[0]._mirror, pair[1].mirror)
        assert packed(pair[0]) == packed(pair[1])
        if looks:
            same(*pair)
        for host in pair:
            host.committed()
    same(*pair)
    assert (was_behind > 10) == (config is not CONFIG)  # a group of several columns a block writes immediately


def test_a_view_of_the_host_table_follows_every_change() -> None:
    """Rules: R4."""
    table = BlockTable(ONE_GROUP, "numpy")
    assert isinstance(table._rows, CompiledRows)
    table._rows._operations.least_late = 1
    for step in range(3):
        table.append_rows(np.arange(4), np.arange(1, 5, dtype=np.int32) + 4 * step, np.ones(4, np.int64))
        table.commit()
    view = table.host_table(0)
    for step in range(3, 6):
        table.append_rows(np.arange(4), np.arange(1, 5, dtype=np.int32) + 4 * step, np.ones(4, np.int64))
        assert view[:4, step].tolist() == list(range(4 * step + 1, 4 * step + 5))
    table.verify()


@pytest.mark.parametrize("path", ["compiled", "numpy"])
def test_the_rows_of_a_dropped_table_are_freed_at_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the collector, which counts objects and not the gigabytes of a mirror."""
    monkeypatch.setenv("BLOCKTABLE_HOST_PATH", path)
    table = BlockTable(ONE_GROUP, "numpy")
    table.append_rows(np.arange(4), np.arange(1, 5, dtype=np.int32), np.ones(4, np.int64))
    table.commit()
    rows = weakref.ref(table._rows)
    gc.disable()
    try:
        del table
        assert rows() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("path", ["compiled", "numpy"])
def test_ranges_are_cut_where_their_lengths_would_not_fit(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R9."""
    monkeypatch.setenv("BLOCKTABLE_HOST_PATH", path)
    monkeypatch.setattr("blocktable.rows.MAX_RANGE", 100)
    host = make_rows(ONE_GROUP)
    host.invalidate()
    writes = host.writes()
    assert writes.num_ranges == writes.offsets.size == -(-ONE_GROUP.arena.size // 100)
    assert writes.lengths.max() <= 100
    assert writes.lengths.sum() == writes.values.size == ONE_GROUP.arena.size


def test_lists_that_another_thread_changes_are_read_safely() -> None:
    """Of a free-threaded build: what a call takes is what a list held at some time, or it is refused. Rules: R6, R7."""
    host = CompiledRows(CONFIG)
    ids: list[Any] = [[1, 2], [3, 4], [5, 6]]
    rows, counts = [0, 1], [1, 1]
    is_over = threading.Event()

    def change() -> None:
        step = 0
        while not is_over.is_set():
            step += 1
            for values in (rows, counts, ids[0], *ids, ids):
                kept = values.copy()
                values.clear()
                values.extend(kept * 40 if step % 3 == 0 else kept)
                values[:] = kept

    thread = threading.Thread(target=change)
    thread.start()
    outcomes: Counter[str] = Counter()
    calls: list[Callable[[], None]] = [lambda: host.set_rows(rows, ids, counts), lambda: host.set_row(0, ids)]
    try:
        for _ in range(20_000):
            for call in calls:
                try:
                    call()
                    outcomes["done"] += 1
                except BlockTableError as error:
                    outcomes[type(error).__name__] += 1
    finally:
        is_over.set()
        thread.join()
    assert outcomes["done"] > 0
    assert set(host.mirror[host.filled.size :].tolist()) <= {0, 1, 2, 5, 6, *range(9, 15)}


def test_an_engine_that_never_commits_fills_no_memory() -> None:
    """The journal merges what it holds before it grows, and here that makes the room it began with do."""
    rng, host = np.random.default_rng(0), CompiledRows(CONFIG)
    most = 0
    for _ in range(20_000):
        row, n = int(rng.integers(12)), int(rng.integers(1, 3))
        host.set_row(row, [rng.integers(1, 400, n).tolist() for _ in CONFIG.groups])
        host.truncate_row(row, int(rng.integers(3)))
        host.append_row(row, [[7], [8], [9]])
        most = max(most, host.journal.size)
    assert most <= 4 * host.filled.size + 64
    offsets, lengths = host.pending_ranges()
    assert (offsets[1:] > (offsets + lengths)[:-1]).all()


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="no free-threaded build")
def test_the_import_leaves_the_gil_off() -> None:
    source = "import sys, blocktable_compiled.operations; print(sys._is_gil_enabled())"
    done = subprocess.run([sys.executable, "-W", "error", "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
