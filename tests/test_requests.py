"""Rows for requests: lives against plain dictionaries, what is sent, what is refused (R42-R44)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest

import blocktable as bt

NUM_BLOCKS = 500
KINDS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "int32": lambda ids: np.array(ids, np.int32),
    "int64": lambda ids: np.array(ids, np.int64),
    "nothing": lambda ids: ids or None,
}


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def host_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "compiled":
        pytest.importorskip("blocktable_compiled.operations")
    monkeypatch.setenv("BLOCKTABLE_HOST_PATH", request.param)


def make(num_groups: int = 1, **options: Any) -> bt.Requests:
    group = bt.KVCacheGroup(block_size=16, num_blocks=NUM_BLOCKS, allow_null=True)
    settings: dict[str, Any] = {"max_num_reqs": 4, "max_num_batched_tokens": 16, "max_model_len": 256}
    config = bt.BlockTableConfig(groups=[group] * num_groups, **(settings | options))
    return bt.Requests(bt.BlockTable(config, "numpy"))


def held(requests: bt.Requests, request: Hashable) -> list[list[int]]:
    table = requests.table
    return [table.block_ids(requests.row(request), group).tolist() for group in range(len(table.config.groups))]


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_random_lives_hold_what_a_dictionary_says(num_groups: int, seed: int) -> None:
    """Every kind of sequence, changes by the table's own calls, batches. Rules: R42, R43."""
    chance, requests = random.Random(seed), make(num_groups, max_num_reqs=6, max_num_rows=5)
    table, expected, preempted = requests.table, dict[str, list[list[int]]](), set[str]()

    def change(ids: list[int]) -> list[int]:
        kept = ids[: chance.choice([len(ids), len(ids), chance.randint(0, len(ids))])]
        new = kept + [chance.randrange(1, NUM_BLOCKS) for _ in range(min(chance.randint(0, 3), 16 - len(kept)))]
        if new and chance.random() < 0.3:
            new[chance.randrange(len(new))] = chance.choice([0, chance.randrange(1, NUM_BLOCKS)])
        return new

    def given(groups: list[list[int]]) -> Any:
        chosen = [KINDS[chance.choice(list(KINDS))](ids) for ids in groups]
        return chosen[0] if num_groups == 1 and chance.random() < 0.5 else chance.choice([list, tuple])(chosen)

    for _ in range(300):
        what = chance.random()
        if what < 0.6:
            batch = chance.sample("abcdefgh", chance.randint(0, 4))
            wanted = {
                key: expected.get(key, [[]] * num_groups)
                if chance.random() < 0.3
                else [change(ids) for ids in expected.get(key, [[]] * num_groups)]
                for key in batch
            }
            new = [key for key in batch if key not in expected]
            if len(new) > requests.num_free_rows:
                with pytest.raises(bt.NoFreeRowError, match=f"request '{new[requests.num_free_rows]}' finds no free"):
                    requests.sync_batch(batch, [given(ids) for ids in wanted.values()])
            else:
                if len(batch) == 1:
                    assert requests.sync(batch[0], given(wanted[batch[0]])) == requests.row(batch[0])
                else:
                    requests.sync_batch(batch, [given(ids) for ids in wanted.values()])
                expected |= wanted
                preempted -= set(batch)
        elif what < 0.7 and expected:
            row = requests.row(chance.choice(list(expected)))  # what the next sync of it must undo
            table.truncate_row(row, 1) if chance.random() < 0.5 else table.set_row(row, [[7]] * num_groups)
            for key, ids in expected.items():
                requests.sync(key, given(ids))
        elif what < 0.8 and expected:
            key = chance.choice(list(expected))
            requests.preempt(key)
            preempted.add(key)
            del expected[key]
        elif expected or preempted:
            key = chance.choice([*expected, *preempted])
            requests.finish(key)
            expected.pop(key, None)
            preempted.discard(key)
        assert {key: held(requests, key) for key in expected} == expected
        assert len({requests.row(key) for key in expected}) == len(expected) == len(requests)
        assert requests.num_free_rows == table.config.num_rows - len(expected)
        used = {requests.row(key) for key in expected}
        assert not table.num_blocks_per_row[:, [row for row in range(5) if row not in used]].any()
        if chance.random() < 0.3:
            table.commit()
            table.verify()


def test_only_what_differs_is_sent() -> None:
    """Rules: R9.6, R9.8, R43."""
    requests = make()
    table, ids = requests.table, list(range(1, 9))
    requests.sync_batch(["a", "b"], [ids, [20]])
    table.commit()

    def sent(new: list[int]) -> int:
        before = table.num_bytes_sent
        requests.sync_batch(["a", "b"], [new, [20]])
        table.commit()
        return table.num_bytes_sent - before

    one_range = 8 + 4  # where it begins, and its length
    assert sent(ids) == 0
    assert sent([*ids, 30]) == 2 * (one_range + 4)  # the block, and the count
    assert sent([*ids[:3], 40, *ids[4:], 30]) == one_range + 4
    assert sent([0, 0, 3, 40, *ids[4:], 30]) == one_range + 8
    assert sent([0, 0, 3, 40]) == one_range + 4 * 5 + one_range + 4


def test_a_request_that_did_not_change_calls_nothing_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R43."""
    for kind in (list, KINDS["int32"]):
        requests = make(2)
        groups = [kind([3, 4]), kind([5])]
        requests.sync_batch(["a", "b"], [groups, [[6], [7, 8]]])
        before = requests.table.num_row_changes
        requests.sync_batch(["a", "b"], [groups, [[6], [7, 8]]])
        requests.sync("a", groups)
        assert requests.table.num_row_changes == before


def test_the_engine_may_change_its_lists_after_the_call() -> None:
    """Rules: R43."""
    requests, ids = make(), [[3, 4]]
    array = np.array([7, 8], np.int32)
    for _ in range(2):
        requests.sync("list", ids)
        requests.sync("array", array)
        assert held(requests, "list") == ids
        assert held(requests, "array") == [array.tolist()]
        ids[0].append(9)
        array[0] = 1


@pytest.mark.parametrize("make_ids", [list, KINDS["int32"]], ids=["list", "array"])
def test_a_request_that_did_not_change_takes_at_most_five_microseconds(make_ids: Callable[..., Any]) -> None:
    """Of 512 blocks, the best of many calls; one of a batch takes less. Rules: R43."""
    requests = make(max_num_reqs=64, max_num_batched_tokens=64, max_model_len=16 * 512)
    names, ids = [f"request {i}" for i in range(64)], [make_ids([i % 499 + 1 for i in range(512)]) for _ in range(64)]
    requests.sync_batch(names, ids)

    def one() -> None:
        for name, blocks in zip(names, ids, strict=True):
            requests.sync(name, blocks)

    def best(call: Callable[[], None]) -> float:
        times = []
        for _ in range(50):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times) / len(names)

    assert best(one) < 5e-6
    assert best(lambda: requests.sync_batch(names, ids)) < 5e-6


def test_any_hashable_is_a_request() -> None:
    """Rules: R42."""
    requests = make(max_num_reqs=8)
    keys: list[Hashable] = ["a", 7, (1, "b"), None, frozenset([1]), b"x", object(), 2.5]
    requests.sync_batch(keys, [[i + 1] for i in range(8)])
    assert requests.idx_mapping(keys).tolist() == [requests.row(key) for key in keys]
    for i, key in enumerate(keys):
        assert key in requests
        assert held(requests, key) == [[i + 1]]
    calls: list[Callable[[Any], Any]] = [
        requests.finish,
        requests.preempt,
        requests.row,
        lambda key: requests.sync(key, [1]),
        lambda key: requests.sync_batch([key], [[1]]),
        lambda key: requests.idx_mapping([key]),
    ]
    for call in calls:
        with pytest.raises(bt.DtypeError, match="must be hashable"):
            call(["a list"])


def test_rows_that_run_out_are_refused_with_the_request() -> None:
    """Rules: R42."""
    requests = make(max_num_rows=2, max_num_reqs=4)
    requests.sync_batch(["a", "b"], [[1], [2]])
    with pytest.raises(bt.NoFreeRowError, match="request 'c' finds no free row: all 2 rows") as caught:
        requests.sync("c", [3])
    assert isinstance(caught.value, IndexError)
    with pytest.raises(bt.NoFreeRowError, match="'d'"):
        requests.sync_batch(["a", "d"], [[1, 5], [3]])
    assert held(requests, "a") == [[1]]
    requests.preempt("a")
    requests.sync("c", [3])
    assert held(requests, "c") == [[3]]
    with pytest.raises(bt.NoFreeRowError, match="'a'"):
        requests.sync("a", [1])


def test_a_request_without_a_row_is_refused() -> None:
    """Rules: R42, R44."""
    requests = make()
    requests.sync_batch(["a", "b"], [[1], [2]])
    requests.preempt("a")
    requests.finish("b")
    for call in (requests.finish, requests.preempt, requests.row, lambda key: requests.idx_mapping([key])):
        with pytest.raises(
            bt.ArgumentError, match="'b' has no row: it was never synced, or has finished; sync it first"
        ):
            call("b")
    for call in (requests.preempt, requests.row, lambda key: requests.idx_mapping([key])):
        with pytest.raises(bt.ArgumentError, match="'a' has no row: it was preempted; sync it first"):
            call("a")
    requests.finish("a")
    with pytest.raises(bt.ArgumentError, match="'a' has no row: it was never synced"):
        requests.finish("a")


@pytest.mark.parametrize(
    ("batch", "error", "match"),
    [
        (["a", "b", "new"], bt.RowCapacityError, "needs 17 blocks"),
        (["a", "new", "new"], bt.ArgumentError, "'new' is repeated"),
        (["new", "a", "b"], bt.RowCapacityError, "row . of group 0"),
    ],
)
def test_a_batch_of_which_a_part_is_refused_changes_nothing(batch: list[str], error: Any, match: str) -> None:
    """The first request grows, the second one is replaced, the third one is too long. Rules: R6, R42."""
    requests = make()
    requests.sync_batch(["a", "b"], [[1], [2, 3]])
    requests.table.commit()
    with pytest.raises(error, match=match):
        requests.sync_batch(batch, [[1, 5], [9], list(range(1, 18))])
    with pytest.raises(bt.ArgumentError, match="each of the 3 requests, got 1"):
        requests.sync_batch(batch, [[1, 5]])
    wrong: list[Any] = [[[1, 2], [3]], 7, [1.5], {1: 2}, [NUM_BLOCKS], [1, True]]
    for ids in wrong:
        with pytest.raises(bt.BlockTableError):
            requests.sync("a", ids)
    assert (held(requests, "a"), held(requests, "b"), requests.num_free_rows) == ([[1]], [[2, 3]], 2)
    requests.table.verify()
    requests.sync_batch(["a", "b", "new"], [[1, 5], [2], [6]])
    assert [held(requests, key) for key in ("a", "b", "new")] == [[[1, 5]], [[2]], [[6]]]


def test_a_kind_of_sequence_that_changes_is_compared_with_the_row() -> None:
    """Rules: R43."""
    requests = make()
    given: Any
    for given in ([1, 2], np.array([1, 2]), np.array([1]), [1], [[1]], [np.array([1])], [np.array([], int)], [[]], []):
        requests.sync("a", given)
        requests.sync_batch(["a"], [given])
        assert held(requests, "a") == [np.array(given, int).ravel().tolist()]
    for given in ([], None, range(3, 5), (3, 4), (np.int64(3), 5)):
        requests.sync("a", given)
        assert held(requests, "a") == [list(given or [])]


def test_the_mapping_is_one_array_padded_to_its_end() -> None:
    """Rules: R44."""
    requests = make()
    requests.sync_batch("abc", [[1], [2], [3]])
    whole = requests.idx_mapping("cab", 4)
    assert whole.tolist() == [requests.row(key) for key in "cab"] + [-1]
    assert whole.dtype == np.int32
    part = requests.idx_mapping(["b"])
    assert part.tolist() == [requests.row("b")]
    assert whole.tolist() == [requests.row("b"), -1, -1, -1]
    assert part.ctypes.data == whole.ctypes.data == requests.idx_mapping([], on_device=True).ctypes.data
    for size, match in ((1, "from 2"), (5, "to 4"), (True, "must be an int"), (2.0, "must be an int")):
        with pytest.raises(bt.BlockTableError, match=match):
            requests.idx_mapping("ab", size)  # type: ignore[arg-type]
    with pytest.raises(bt.ArgumentError, match=r"from 5 .* to 4"):
        requests.idx_mapping("abcab")


def test_only_a_table_has_rows_to_give() -> None:
    with pytest.raises(bt.DtypeError, match="must be a BlockTable, got str"):
        bt.Requests("table")  # type: ignore[arg-type]
