"""The recipes of docs/integrating.md that need no torch, run as they stand: draft trees, and engines' null blocks."""

from __future__ import annotations

import contextlib
import importlib
import io
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blocktable as bt

PAGE = Path(__file__).parents[1] / "docs/integrating.md"
BLOCK_SIZE = 4
NUM_BLOCKS = 60


def code(mark: str) -> str:
    (found,) = re.findall(rf"<!-- {mark} -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


def names_of(*marks: str) -> dict[str, Any]:
    """Return what the code after these marks defines."""
    names: dict[str, Any] = {"__name__": "page", "bt": bt}
    for mark in marks:
        exec(compile(code(mark), str(PAGE), "exec"), names)
    return names


# Draft trees.


def test_the_example_of_a_tree_prints_what_it_says() -> None:
    """Rules: R4, R12."""
    promised = re.findall(r"^print\(.*\)  # (.*)$", code("tree example"), re.MULTILINE)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names_of("trees", "tree example")
    assert promised == [
        "[5 6 7 8 9] [5 6 6 7 7]",
        "[25 26 26 27 27]",
        "[25 26 27 36 37]",
        "[100 102 104] [5 6]",
    ]
    assert printed.getvalue().splitlines() == promised


@pytest.mark.parametrize("library", ["numpy", pytest.param("torch", marks=pytest.mark.torch)])
@pytest.mark.parametrize("seed", range(4))
def test_accepted_paths_are_where_their_positions_say(library: str, seed: int) -> None:
    """Requests grow by a path of a random tree in each step; the cache holds their tokens in order. Rules: R4, R12."""
    names, chance = names_of("trees"), random.Random(seed)
    config = bt.BlockTableConfig(
        groups=[bt.KVCacheGroup(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)],
        max_num_reqs=3,
        max_num_batched_tokens=30,
        max_model_len=48,
        lookahead_tokens=9,
    )
    table = bt.BlockTable(config, "numpy")
    cells: Any = np.zeros((NUM_BLOCKS * BLOCK_SIZE, 2), np.int64)  # what lies in a slot: (token, its position)
    if library == "torch":
        cells = importlib.import_module("torch").from_numpy(cells)
    free = list(range(1, NUM_BLOCKS))
    kept: list[list[int]] = [[], [], []]  # the tokens of each request that are in the cache
    next_token, num_moved = 1, 0
    while max(map(len, kept)) <= 48 - 9:
        rows = chance.sample(range(3), chance.randint(1, 3))
        trees = [[-1, *(chance.randrange(node) for node in range(1, chance.randint(1, 9)))] for _ in rows]
        for row, tree in zip(rows, trees, strict=True):
            lacking = -(-(len(kept[row]) + len(tree)) // BLOCK_SIZE) - len(table.block_ids(row, 0))
            table.append_row(row, [free.pop(chance.randrange(len(free))) for _ in range(lacking)])
        placed = [names["place_tree"](len(kept[row]), tree) for row, tree in zip(rows, trees, strict=True)]
        starts = np.cumsum([0, *map(len, trees)], dtype=np.int32)
        places = np.concatenate([places for places, _ in placed])
        slots = table.step(np.array(rows, np.int32), starts, places).slot_mappings[0]
        assert len({*slots.tolist()}) == len(places), "two nodes have one slot"
        tokens = np.arange(next_token, next_token + len(places))
        next_token += len(places)
        written = np.stack((tokens, np.concatenate([positions for _, positions in placed])), 1)
        if library == "torch":
            torch = importlib.import_module("torch")
            written, slots = torch.from_numpy(written), torch.from_numpy(slots.copy())
        cells[slots] = written
        for i, (row, tree) in enumerate(zip(rows, trees, strict=True)):
            path = [0]
            while children := [node for node, parent in enumerate(tree) if parent == path[-1]]:
                path.append(chance.choice(children))
            path = path[: chance.randint(1, len(path))]
            num_moved += path != [*range(len(path))]
            before = set(table.block_ids(row, 0).tolist())
            names["keep_path"](table, row, len(kept[row]), slots[starts[i] : starts[i + 1]], path, [cells])
            kept[row] += tokens[starts[i] : starts[i + 1]][path].tolist()
            free += before - set(table.block_ids(row, 0).tolist())
        for row in range(3):
            blocks = table.block_ids(row, 0)
            assert len(blocks) == -(-len(kept[row]) // BLOCK_SIZE)
            lie_in = [int(blocks[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in range(len(kept[row]))]
            assert cells[lie_in].tolist() == [[token, p] for p, token in enumerate(kept[row])]
    assert num_moved


# Engines' null blocks and pad slots.

B, N = 16, 1000  # the page's block size and number of blocks


def step_of(engine: str, block_ids: list[int], positions: list[int]) -> tuple[bt.BlockTable, list[int], Any]:
    """Return a table of the page's group for an engine, the batch row of one request, and its slots padded to four."""
    names = names_of("nulls")
    assert (names["block_size"], names["num_blocks"]) == (B, N)
    config = bt.BlockTableConfig(groups=[names[engine]], max_num_reqs=2, max_num_batched_tokens=4, max_model_len=4 * B)
    table = bt.BlockTable(config, "numpy")
    table.set_row(0, block_ids)
    starts = np.array([0, len(positions)], np.int32)
    step = table.step(np.array([0], np.int32), starts, np.array(positions), num_tokens_padded=4)
    return table, step.block_tables[0][0, :4].tolist(), step.slot_mappings[0]


def written_slots(slots: Any, num_slots: int = N * B) -> list[int]:
    """Write to all slots as plain indexing does, which takes -1 for the last one; return those that are written."""
    cache = np.zeros(num_slots)
    cache[slots] = 1
    return [int(slot) for slot in np.flatnonzero(cache)]


def test_vllm_reserves_block_0() -> None:
    """Rules: R5, R7, R13."""
    table, row, slots = step_of("vllm", [0, 5], [16, 17])
    assert row == [0, 5, 0, 0]
    assert slots.tolist() == [80, 81, -1, -1]
    assert written_slots(slots[slots >= 0]) == [80, 81]
    assert table.block_ids(0, 0).tolist() == [0, 5]


def test_nano_vllm_gives_block_0_out() -> None:
    """Rules: R5, R7, R12, R13."""
    _, row, slots = step_of("nano_vllm", [0, 5], [15, 16])
    assert row == [0, 5, -1, -1]
    assert slots.tolist() == [15, 80, -1, -1]


def test_transformers_gives_block_0_out_and_writes_padding_after_the_cache() -> None:
    """Nothing needs to be skipped: padding is written to a slot of its own. Rules: R5, R7, R13."""
    _, row, slots = step_of("transformers", [5, 0], [0, 16, 32])
    assert row == [5, 0, -1, -1]
    assert slots.tolist() == [80, 0, N * B, N * B]
    assert written_slots(slots, N * B + 1) == [0, 80, N * B]


def test_tensorrt_llm_reads_a_block_of_its_own_past_the_end() -> None:
    """Rules: R5, R13, R29."""
    table, row, slots = step_of("tensorrt_llm", [0, 3], [1, 32])
    assert row == [0, 3, N - 1, N - 1]
    assert slots.tolist() == [1, *[N * B - 1] * 3]
    assert written_slots(slots) == [1, N * B - 1]
    layout = replace(bt.LAYOUTS["tensorrt_llm"], entry_scale=2, value_offset=1)
    entries = table.export(layout, np.array([0], np.int32)).entries[0]
    past = 2 * (N - 1)
    assert entries[0, :, :4].tolist() == [[0, 6, past, past], [1, 7, past, past]]


@pytest.mark.parametrize("engine", ["vllm", "tensorrt_llm"])
def test_a_reserved_block_is_refused_unless_holes_are_allowed(engine: str) -> None:
    """Rules: R7."""
    group = replace(names_of("nulls")[engine], allow_null=False)
    config = bt.BlockTableConfig(groups=[group], max_num_reqs=2, max_num_batched_tokens=4, max_model_len=4 * B)
    with pytest.raises(bt.ArgumentError, match="allow_null"):
        bt.BlockTable(config, "numpy").set_row(0, [group.null_block_id])
