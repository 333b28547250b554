"""The oracle is held to the golden vectors, to counting, and to the checker of `blocktable replay`."""

import contextlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktable import BlockTableConfig
from blocktable_conformance import golden
from blocktable_conformance.oracle import OracleTable, Refused, Share
from blocktable_conformance.pair import plain
from blocktable_conformance.strategies import (
    batches,
    bulk_calls,
    configs,
    distinct_rows,
    mappings,
    named_groups,
    replacements,
)
from blocktable_replay.checker import expected_block_table, expected_slots
from blocktable_replay.rowmodel import RowModel

VECTORS = list(golden.load())


@pytest.mark.parametrize("vector", [vector for vector in VECTORS if vector.raises is None], ids=repr)
def test_the_oracle_gives_the_answers_that_are_written_down(vector: golden.Vector) -> None:
    """Rules: R2-R15, R18."""
    answers = golden.OracleAnswers(golden.config_of(vector.config))
    for operation in vector.operations:
        assert answers.answer(operation["call"], operation["args"]) == operation["expect"]


@pytest.mark.parametrize("path", sorted(golden.FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_an_answer_that_is_missing_is_the_oracles(path: Path) -> None:
    text = path.read_text()
    assert golden.completed(re.sub(r', "expect": .*?\}(?=,?\n)', "}", text)) == text


def test_a_file_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "new.json").write_text('{"format": 99, "vectors": []}')
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match="format 99"):
        list(golden.load())


def test_the_vectors_use_no_backend_words() -> None:
    for path in golden.FOLDER.glob("*.json"):
        assert not re.search(r"numpy|torch|cuda", path.read_text())


@given(
    world_size=st.integers(1, 9),
    interleave_size=st.integers(1, 17),
    position=st.integers(0, 2**40),
    data=st.data(),
)
def test_ranks_share_positions_one_to_one(
    world_size: int, interleave_size: int, position: int, data: st.DataObject
) -> None:
    """Owner and local index lead back to the position. Rules: R12, R18."""
    share = Share(world_size, 0, interleave_size)
    owner, local = share.owner(position), share.local_index(position)
    assert Share(world_size, owner, interleave_size).position(local) == position
    assert Share(world_size, owner, interleave_size).local_length(position) == local


def filled_tables(data: st.DataObject, config: BlockTableConfig) -> tuple[OracleTable, RowModel]:
    """Return the oracle and the row model of the replay after the same drawn calls, committed."""
    oracle, model = OracleTable(config), RowModel(config)

    def do(call: str, *arguments: Any) -> None:
        with contextlib.suppress(Refused):  # now and then it is more than a row holds
            getattr(oracle, call)(*(plain(argument) for argument in arguments))
            model.apply(call, arguments)

    rows = list(range(config.num_rows))
    do("set_rows", *data.draw(bulk_calls(oracle, rows, replace=True, fit=True)))
    for group, held in enumerate(oracle.rows):
        for row, blocks in enumerate(held):
            if blocks and data.draw(st.integers(0, 3)) == 0:
                do("null_range", row, group, 0, data.draw(st.integers(0, len(blocks))))
    for call in data.draw(st.lists(st.sampled_from(["replace_block_ranges", "remap_blocks", "copy_rows"]), max_size=3)):
        do(call, *data.draw(edits(oracle, call)))
    oracle.commit()
    model.commit()
    return oracle, model


@st.composite
def edits(draw: Any, oracle: OracleTable, call: str) -> tuple[Any, ...]:
    """Draw the arguments of an edit."""
    group, rows = draw(st.integers(0, len(oracle.shapes) - 1)), draw(distinct_rows(oracle.num_rows))
    if call == "replace_block_ranges":
        return tuple(draw(replacements(oracle, group, rows)))
    if call == "remap_blocks":
        return (group, *draw(mappings(oracle, group)))
    return [draw(st.integers(0, oracle.num_rows - 1)) for _ in rows], rows


@settings(max_examples=300, deadline=None)
@given(data=st.data(), config=configs())
def test_the_checker_of_the_replay_equals_the_oracle(data: st.DataObject, config: BlockTableConfig) -> None:
    """Two statements of rows, batch view and slots, one vectorised and one plain, agree. Rules: R4, R10-R15, R18."""
    oracle, model = filled_tables(data, config)
    batch = data.draw(batches(config, oracle))
    assert batch.idx_mapping is not None
    starts, size = batch.query_start_loc, config.max_num_batched_tokens
    named = data.draw(named_groups(len(config.groups)))
    chosen = range(len(config.groups)) if named is None else named
    slots_of = dict(zip(chosen, oracle.slots(batch.idx_mapping, starts, batch.positions, size, named), strict=True))
    tables = oracle.gather(batch.idx_mapping, batch.num_computed_tokens)
    computed = None if batch.num_computed_tokens is None else np.array(batch.num_computed_tokens, np.int32)
    handles = np.array(batch.idx_mapping, np.int32)
    for group in range(len(config.groups)):
        blocks, counts = model.committed.blocks[group], model.committed.counts[group]
        if group in slots_of:
            slots = expected_slots(
                *(config, group, blocks, counts, handles),
                np.array(starts, np.int32),
                np.array(batch.positions, np.int64),
                size,
                is_named=named is not None,
            )
            assert slots.tolist() == [slot.value for slot in slots_of[group]]
        narrow = expected_block_table(config, group, blocks, counts, handles, computed)
        table = np.full((config.max_num_reqs, oracle.shapes[group].width), oracle.shapes[group].filler, np.int32)
        table[: narrow.shape[0], : narrow.shape[1]] = narrow
        assert table.tolist() == tables[group]
