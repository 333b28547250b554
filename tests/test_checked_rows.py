"""A checked table knows the same of its rows on both host paths: who holds each block, whose rows are, findings."""

import random
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable.checking import pools
from blocktable.findings import KINDS

pytest.importorskip("blocktable_compiled.holders", reason="the compiled host path was not built")

GROUP = bt.KVCacheGroup(block_size=4, num_blocks=48)
SHARDED = bt.ContextParallel(world_size=2, rank=1, interleave_size=2)
# Options of a table; the first has what a step of an ordinary engine has.
TABLES: dict[str, dict[str, Any]] = {
    "one group": {"groups": [GROUP]},
    "three groups": {
        "groups": [
            bt.KVCacheGroup(block_size=4, num_blocks=48, pool="kv"),
            bt.KVCacheGroup(block_size=8, kernel_block_size=4, num_blocks=48, pool="kv", allow_null=True),
            bt.KVCacheGroup(block_size=4, num_blocks=48, slot_mode="none", pool="kv"),
        ]
    },
    "no null block": {
        "groups": [
            bt.KVCacheGroup(block_size=8, kernel_block_size=2, num_blocks=40, allow_null=True, null_block_id=-1),
            bt.KVCacheGroup(block_size=4, num_blocks=40, slot_mode="ring", blocks_per_row=3, null_block_id=7),
        ]
    },
    "a window": {"groups": [GROUP, bt.KVCacheGroup(block_size=4, num_blocks=48, sliding_window=6)]},
    "stale rows": {"groups": [GROUP], "stale_rows": True},
    "two ranks": {"groups": [GROUP], "context_parallel": SHARDED},
}
NUM_ROWS, LONGEST = 9, 8


def make(
    monkeypatch: pytest.MonkeyPatch, path: str, mode: Any, options: dict[str, Any], severity: str | None = None
) -> bt.BlockTable:
    monkeypatch.setenv("BLOCKTABLE_HOST_PATH", path)
    sizes: Any = {"max_num_reqs": NUM_ROWS, "max_num_batched_tokens": 64, "max_model_len": 4 * LONGEST}
    kinds: Any = None if severity is None else dict.fromkeys(KINDS, severity)
    return bt.BlockTable(bt.BlockTableConfig(**sizes, **options), "numpy", check=mode, check_kinds=kinds)


class Caller:
    """Makes the same calls of two tables, most of them right, from few blocks, so that rows share them."""

    def __init__(self, seed: int, tables: list[bt.BlockTable]) -> None:
        self.random, self.tables = random.Random(seed), tables
        self.groups = tables[0].config.groups

    def ids(self, group: int, count: int) -> list[int]:
        geometry = self.groups[group]
        found = self.random.sample([i for i in range(30) if i != geometry.null_block_id], count)
        if count and self.random.random() < 0.1:
            found[-1] = found[0]  # twice in a row, if it is longer than one
        if count and geometry.allow_null and self.random.random() < 0.2:
            found[self.random.randrange(count)] = geometry.null_block_id
        return found

    def rows(self) -> list[int]:
        return self.random.sample(range(NUM_ROWS), self.random.randrange(1, 4))

    def given(self, num_rows: int) -> tuple[list[list[int]], list[list[int]]]:
        counts = [[self.random.randrange(3) for _ in range(num_rows)] for _ in self.groups]
        ids = [[each for n in own for each in self.ids(group, n)] for group, own in enumerate(counts)]
        return ids, counts

    def operation(self) -> tuple[str, list[Any]]:
        name = self.random.choice(
            ["append_row", "append_rows", "set_row", "set_rows", "truncate_row", "truncate_rows", "clear_rows"] * 3
            + ["copy_row", "move_row", "swap_rows", "replace_blocks", "remap_blocks", "step", "step", "commit", "slots"]
        )
        rows, number = self.rows(), self.random.randrange(LONGEST)
        if name in ("append_row", "set_row"):
            ids, _ = self.given(1)
            return name, [rows[0], ids]
        if name in ("append_rows", "set_rows"):
            return name, [rows, *self.given(len(rows))]
        if name == "truncate_row":
            return name, [rows[0], number]
        if name == "truncate_rows":
            return name, [rows, [self.random.randrange(LONGEST) for _ in rows]]
        if name == "clear_rows":
            return name, [rows]
        if name in ("copy_row", "move_row", "swap_rows"):
            other = self.random.randrange(NUM_ROWS)
            return name, [rows[0], other]
        if name == "replace_blocks":
            return name, [rows[0], 0, 0, self.ids(0, self.random.randrange(3))]
        if name == "remap_blocks":
            return name, [0, self.ids(0, 1), self.ids(0, 1)]
        starts = np.cumsum([0] + [self.random.randrange(1, 4) for _ in rows]).astype(np.int32)
        begin = [self.random.randrange(4 * LONGEST - 4) for _ in rows]
        positions = np.concatenate([np.arange(b, b + n) for b, n in zip(begin, np.diff(starts), strict=True)])
        return name, [np.array(rows, np.int32), starts, positions.astype(np.int64)]

    def call(self) -> str:
        """Make one call; return its name, and whether it was refused."""
        name, arguments = self.operation()
        outcomes = set()
        for table in self.tables:
            method = table.compute_slot_mappings if name == "slots" else getattr(table, name)
            try:
                method(*(() if name == "commit" else arguments))
                outcomes.add("")
            except bt.BlockTableError as error:
                outcomes.add(f"{type(error).__name__}: {error}")
        assert len(outcomes) == 1, (name, arguments, outcomes)
        return name + (" refused" if outcomes != {""} else "")


def known(table: bt.BlockTable) -> dict[str, Any]:
    """Return what the checker of a table knows, but for how it numbers what is handed in."""
    checker: Any = table._checker
    fields = ("cells", "squares", "since", "writers", "counts", "is_shared")
    found = {"held": checker.holders.arena, "mirror": checker._rows.mirror}
    for group, pool in enumerate(checker.holders.pools):
        found |= {f"{name} of group {group}": pool.blocks[name] for name in fields}
    if table.check == "host":
        lives = checker.lives
        found |= {"lives": lives.lives, "marks": lives.marks, "committed": lives.committed}
    return found


@pytest.mark.parametrize("mode", ["host", "device"])
@pytest.mark.parametrize("name", TABLES)
def test_both_host_paths_know_the_same(monkeypatch: pytest.MonkeyPatch, name: str, mode: str) -> None:
    """Rules: R39, R41."""
    calls: set[str] = set()
    for seed in range(4):
        severity = "report" if seed % 2 else None
        tables = [make(monkeypatch, path, mode, TABLES[name], severity) for path in ("numpy", "compiled")]
        checkers: list[Any] = [table._checker for table in tables]
        assert [each.holders.compiled is not None for each in checkers] == [False, True]
        caller = Caller(seed, tables)
        for _ in range(150):
            calls.add(caller.call())
            first, second = map(known, tables)
            for key, value in first.items():
                assert np.array_equal(value, second[key]), (seed, key)
            assert tables[0].findings == tables[1].findings
        assert tables[0].collect_findings() == tables[1].collect_findings()
    assert {"append_rows", "append_rows refused", "set_row", "set_rows", "clear_rows", "step", "commit"} <= calls


@pytest.mark.parametrize("mode", ["host", "device"])
def test_steady_operations_are_compiled(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Requests that begin, grow, fall back and end need nothing of the numpy path. Rules: R39, R41."""
    table = make(monkeypatch, "compiled", mode, TABLES["three groups"])
    table.set_row(0, [[1], [2], [3]])  # the first operation begins the checks
    table.commit()
    for name in ("check_blocks", "check_rows", "one_row", "truncate"):
        monkeypatch.setattr(type(table._rows._rows), name, None)  # type: ignore[attr-defined]
    monkeypatch.setattr(pools, "difference", None)
    table.append_row(0, [[4], [5], [6]])
    table.set_rows([1, 2], [[7, 8], [9, 10], [11, 12]], [1, 1])
    table.commit()
    table.append_rows([1, 2], [[13, 14], [15, 16], []], [1, 1])
    table.truncate_row(0, 1)
    table.clear_rows([1, 2])
    table.set_row(0, [[1], [2], [3]])  # it goes on
    table.commit()
    assert not table.collect_findings()
    assert table.num_blocks_per_row[:, :3].tolist() == [[1, 0, 0]] * 3
