"""Observing a table: what an observer is told, and that nobody pays for it otherwise."""

import gc
import importlib.metadata
import inspect
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable.observer import OBSERVED_CALLS

CONFIG = bt.BlockTableConfig(
    groups=[bt.KVCacheGroup(block_size=4), bt.KVCacheGroup(block_size=8, kernel_block_size=2)],
    max_num_reqs=4,
    max_num_batched_tokens=16,
    max_model_len=64,
)
BATCH = np.array([0], np.int32), np.array([0, 1], np.int32), np.array([0])
NOT_OBSERVED = {  # they change no row and write no output of a step
    "block_ids",
    "collect_findings",
    "common_blocks",
    "device_table",
    "digest",
    "export_host",
    "host_row",
    "host_table",
    "locate",
    "observe",
    "pack_changes",
    "record",
    "verify",
    "warmup",
    "why",
}


class Notes:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, Any]] = []

    def before(self, call: str, arguments: Mapping[str, Any]) -> None:
        self.told.append(("before", call, dict(arguments)))

    def after(self, call: str, result: Any) -> None:
        self.told.append(("after", call, result))

    def failed(self, call: str, error: Exception) -> None:
        self.told.append(("failed", call, type(error)))

    @property
    def calls(self) -> list[tuple[str, str]]:
        return [(event, call) for event, call, _ in self.told]


@pytest.fixture
def table() -> bt.BlockTable:
    return bt.BlockTable(CONFIG, "numpy")


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_every_public_method_is_observed_or_need_not_be() -> None:
    methods = {name for name, _ in inspect.getmembers(bt.BlockTable, inspect.isfunction) if name[0] != "_"}
    assert methods == NOT_OBSERVED | set(OBSERVED_CALLS)


def test_an_observer_is_told_arguments_and_result(table: bt.BlockTable) -> None:
    notes = Notes()
    with table.observe(notes):
        table.append_rows([1], counts=[2], block_ids=([3, 4], [5, 6]))
        step = table.step(*BATCH, num_tokens_padded=2)
    idx_mapping, query_start_loc, positions = BATCH
    assert notes.told[0] == ("before", "append_rows", {"rows": [1], "block_ids": ([3, 4], [5, 6]), "counts": [2]})
    assert notes.told[1] == ("after", "append_rows", None)
    event, call, arguments = notes.told[2]
    assert (event, call, list(arguments)) == ("before", "step", list(inspect.signature(table.step).parameters))
    assert [arguments[name] for name in list(arguments)[3:]] == [None, 2, None, None, None]
    assert arguments["idx_mapping"] is idx_mapping
    assert arguments["query_start_loc"] is query_start_loc
    assert arguments["positions"] is positions
    assert notes.told[3][2] is step


def test_an_observer_is_told_what_failed(table: bt.BlockTable) -> None:
    notes = Notes()
    with table.observe(notes), pytest.raises(bt.RowIndexError):
        table.clear_row(9)
    assert notes.told == [("before", "clear_row", {"row": 9}), ("failed", "clear_row", bt.RowIndexError)]


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2), {}), ((1,), {"row": 1}), ((1,), {"more": 1}), ((), {"more": 1})]
)
def test_what_is_no_call_of_the_method_is_not_observed(
    table: bt.BlockTable, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    notes = Notes()
    with table.observe(notes), pytest.raises(TypeError, match="clear_row"):
        table.clear_row(*args, **kwargs)
    assert notes.told == []


def test_a_step_with_metadata_is_one_call(table: bt.BlockTable) -> None:
    notes = Notes()
    with table.observe(notes):
        table.step_metadata(*BATCH, np.array([1], np.int32), layouts="flashinfer")
    assert notes.calls == [("before", "step_metadata"), ("after", "step_metadata")]


def test_what_an_observer_calls_is_not_observed(table: bt.BlockTable) -> None:
    class Clearing(Notes):
        def before(self, call: str, arguments: Mapping[str, Any]) -> None:
            super().before(call, arguments)
            table.clear()

    notes = Clearing()
    table.set_row(0, ([1], [1]))
    with table.observe(notes):
        table.set_row(1, ([2], [2]))
    assert notes.calls == [("before", "set_row"), ("after", "set_row")]
    assert table.num_blocks_per_row.tolist() == [[0, 1, 0, 0]] * 2


def test_what_an_observer_raises_goes_to_the_caller(table: bt.BlockTable) -> None:
    class Refusing(Notes):
        def before(self, call: str, arguments: Mapping[str, Any]) -> None:
            if call == "set_row":
                raise RuntimeError("not now")

        def after(self, call: str, result: Any) -> None:
            raise RuntimeError("wrong")

    with table.observe(Refusing()):
        with pytest.raises(RuntimeError, match="not now"):
            table.set_row(0, ([1], [1]))
        assert not table.num_blocks_per_row.any()
        with pytest.raises(RuntimeError, match="wrong"):
            table.append_row(0, ([1], [1]))
        assert table.num_blocks_per_row.any()


def test_several_observers_come_and_go(table: bt.BlockTable) -> None:
    first, second = Notes(), Notes()
    one, two = table.observe(first), table.observe(second)
    table.commit()
    one.close()
    one.close()
    table.clear()
    assert "step" in vars(table)
    two.close()
    table.commit()
    assert first.calls == [("before", "commit"), ("after", "commit")]
    assert second.calls == [*first.calls, ("before", "clear"), ("after", "clear")]


def test_an_observer_may_end_inside_a_call(table: bt.BlockTable) -> None:
    class Once(Notes):
        def before(self, call: str, arguments: Mapping[str, Any]) -> None:
            super().before(call, arguments)
            observation.close()

    notes = Once()
    observation = table.observe(notes)
    table.commit()
    table.commit()
    assert notes.calls == [("before", "commit")]


def test_a_table_that_nobody_observes_is_as_it_was(table: bt.BlockTable) -> None:
    before = dict(vars(table))
    table.observe(Notes()).close()
    assert {name: value for name, value in vars(table).items() if name in OBSERVED_CALLS} == {}
    assert vars(table).keys() == before.keys()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("state", ["plain", "closed", "observed", "recorded"])
def test_a_table_is_freed_when_it_is_dropped(state: str, tmp_path: Path) -> None:
    table = bt.BlockTable(CONFIG, "numpy")
    if state in ("closed", "observed"):
        observation = table.observe(Notes())
        table.commit()
        if state == "closed":
            observation.close()
    if state == "recorded":
        recording = table.record(tmp_path / "run.btrace")
        table.commit()
    alive = weakref.ref(table)
    del table
    assert alive() is None
    if state == "recorded":
        recording.close()
    if state == "observed":
        observation.close()


def test_a_method_of_a_dropped_table_says_so() -> None:
    table = bt.BlockTable(CONFIG, "numpy")
    with table.observe(Notes()):
        commit = table.commit
        del table
        with pytest.raises(bt.BlockTableError, match=r"commit was called on a table that is gone; keep the table"):
            commit()


def test_a_recorder_that_is_not_installed(table: bt.BlockTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **group: ())
    with pytest.raises(bt.UnsupportedError, match=r"group 'blocktable.recorders', which no installed distribution"):
        table.record("run.btrace")


def test_a_recorder_that_cannot_be_loaded(table: bt.BlockTable, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("btrace", "no_such_module:Recorder", "blocktable.recorders")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **group: [entry])
    with pytest.raises(bt.UnsupportedError, match=r"The recorder \(no_such_module:Recorder\) cannot be loaded"):
        table.record("run.btrace")


def test_a_row_of_the_host_is_a_copy(table: bt.BlockTable) -> None:
    table.set_row(2, ([5, 6], [3]))
    table.null_range(2, 0, 0, 1)
    assert table.host_row(0, 2).tolist() == [0, 6]
    columns = table.host_row(1, 2)
    assert columns.tolist() == [12, 13, 14, 15]
    assert columns.dtype == np.int32
    columns[:] = 0
    assert table.host_row(1, 2).tolist() == table.host_table(1)[2, :4].tolist() == [12, 13, 14, 15]
    assert table.host_row(0, 0).size == 0
    with pytest.raises(bt.RowIndexError):
        table.host_row(0, 4)
    with pytest.raises(bt.ArgumentError):
        table.host_row(2, 0)
