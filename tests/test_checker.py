"""The checker at the table's own door: modes, the environment, severities, errors that travel; off costs nothing."""

import gc
import pickle
import sys
import weakref
from typing import Any

import numpy as np
import pytest

import blocktable as bt

CONFIG = bt.BlockTableConfig(
    groups=[bt.KVCacheGroup(block_size=4, num_blocks=100)],
    max_num_reqs=8,
    max_num_batched_tokens=64,
    max_model_len=64,
)
STARTS, POSITIONS, MAPPING = np.array([0, 1], np.int32), np.array([9], np.int64), np.array([0], np.int32)


def table(**options: Any) -> bt.BlockTable:
    made = bt.BlockTable(CONFIG, "numpy", **options)
    made.append_row(0, [5, 6])
    return made


@pytest.mark.parametrize(
    ("variable", "given", "mode"), [(None, None, "off"), ("host", None, "host"), ("host", "off", "off")]
)
def test_the_environment_says_what_is_left_open(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, given: Any, mode: str
) -> None:
    """Rules: R38."""
    monkeypatch.delenv("BLOCKTABLE_CHECK", raising=False)
    if variable is not None:
        monkeypatch.setenv("BLOCKTABLE_CHECK", variable)
    made = table(check=given)
    assert made.check == mode
    if mode == "off":
        made.step(MAPPING, STARTS, POSITIONS)
        assert made.collect_findings() == made.findings == ()
        assert made.num_findings == 0
    else:
        with pytest.raises(bt.CheckError, match="missing_block"):
            made.step(MAPPING, STARTS, POSITIONS)


def test_unknown_modes_kinds_and_severities_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R38."""
    for options, words in (
        ({"check": "on"}, "check must be one of off, host, device; got 'on'"),
        ({"check": "host", "check_kinds": {"missing": "off"}}, "there is no kind 'missing'; kinds are missing_block"),
        ({"check": "host", "check_kinds": {"missing_block": "warn"}}, "must be one of .*'report'"),
        ({"check": "host", "check_kinds": [{}, {}]}, "one for each of the 1 groups"),
    ):
        with pytest.raises(bt.ConfigError, match=words):
            table(**options)
    monkeypatch.setenv("BLOCKTABLE_CHECK", "yes")
    with pytest.raises(bt.ConfigError, match="BLOCKTABLE_CHECK must be one of off, host, device; got 'yes'"):
        table()


def test_pools_and_stale_rows_are_what_they_should_be() -> None:
    """Rules: R38."""
    wrong: Any = 3
    with pytest.raises(bt.ConfigError, match="pool must be a name or None, got 3"):
        bt.KVCacheGroup(block_size=4, pool=wrong)
    with pytest.raises(bt.ConfigError, match="stale_rows must be a bool, got 3"):
        bt.BlockTableConfig(
            groups=[bt.KVCacheGroup(block_size=4)],
            max_num_reqs=1,
            max_num_batched_tokens=1,
            max_model_len=4,
            stale_rows=wrong,
        )


def test_a_check_error_can_be_pickled() -> None:
    """Rules: R38."""
    with pytest.raises(bt.CheckError) as caught:
        table(check="host").step(MAPPING, STARTS, POSITIONS)
    error = pickle.loads(pickle.dumps(caught.value))
    assert issubclass(bt.CheckError, RuntimeError)
    assert (str(error), error.finding) == (str(caught.value), caught.value.finding)
    assert str(error) == error.finding.message


def calls_of(made: bt.BlockTable) -> int:
    """Return how many Python functions a steady step calls."""
    positions = np.array([3], np.int64)
    for _ in range(3):
        made.step(MAPPING, STARTS, positions)
    count = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(count_call)
    made.step(MAPPING, STARTS, positions)
    sys.setprofile(None)
    return count


def test_off_adds_no_call_and_loads_no_checker() -> None:
    """Rules: R38."""
    made = table(check="off")
    assert made._checker is None
    assert "blocktable.checking" not in type(made._rows).__module__
    assert calls_of(made) < calls_of(table(check="host"))


def test_a_checked_table_is_freed_without_the_collector() -> None:
    """Rules: R24."""
    made = table(check="host")
    made.step(MAPPING, STARTS, np.array([3], np.int64))
    freed = weakref.ref(made.store) if hasattr(made.store, "__weakref__") else weakref.ref(made)
    gc.collect()
    gc.disable()
    try:
        del made
        assert freed() is None
    finally:
        gc.enable()


def test_ids_without_a_bound_are_counted_in_pages() -> None:
    """A block near 2**31 is found as a small one is. Rules: R40."""
    config = bt.BlockTableConfig(
        groups=[bt.KVCacheGroup(block_size=4)], max_num_reqs=4, max_num_batched_tokens=8, max_model_len=16
    )
    made = bt.BlockTable(config, "numpy", check="host")
    made.set_rows([0, 1, 2], [[2**31 - 1, 7, 1 << 20, 7]], [2, 1, 1])
    made.step(MAPPING, STARTS, np.array([1], np.int64))
    with pytest.raises(bt.CheckError, match=r"block 7 .* also row 2's"):
        made.step(MAPPING, STARTS, np.array([5], np.int64))
    made.clear_row(2)
    made.step(MAPPING, STARTS, np.array([5], np.int64))
