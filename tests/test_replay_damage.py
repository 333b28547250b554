"""Recordings with wrong contents and right checksums end in a sentence and an exit status, never in a traceback."""

import contextlib
import copy
import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable import cli

NUM_FILES = 1500
"""Damaged recordings of each kind that are tried; all come from fixed seeds."""

ODD: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 2, 7, 2**31 - 1, -(2**31), 2**32, 2**53, 2**63 - 1, -(2**63), 2**70, 1.5, 1e300),
    *("", "x", "AAAA", "\ud800", [], [[]], [0], [1, 2], [-1], [2**40], [0, 0], [None], [[1], [2]], [1.5], ["a"], {}),
    *({"int32": []}, {"int32": [0]}, {"int64": [2**31]}, {"uint64": [2**64 - 1]}, {"int8": [1, 2, 3]}, {"int32": "!"}),
    *({"int64": [0], "lengths": [2**31]}, {"int64": [0] * 9, "lengths": [2**22] * 9}, {"foreign": "x"}, {"float": [1]}),
    *({"int32": [], "shape": [0, 2**30]}, {"int64": [1, 2], "shape": [2, 1]}, {"int64": [1, 2], "shape": [1, -2]}),
)


CONFIG = bt.BlockTableConfig(
    groups=[
        bt.KVCacheGroup(block_size=4, num_blocks=60),
        bt.KVCacheGroup(block_size=8, kernel_block_size=2, sliding_window=9, allow_null=True),
        bt.KVCacheGroup(block_size=4, slot_mode="ring", blocks_per_row=2),
    ],
    max_num_reqs=5,
    max_num_batched_tokens=90,
    max_model_len=128,
)


def lines_of_everything(path: Path) -> list[Any]:
    """Return what the lines of a recording say that has every call."""
    table = bt.BlockTable(CONFIG, "numpy")
    with table.record(path, digests=True):
        more = table.create_buffers()
        table.set_rows([0, 1], [[1, 2, 3], [4, 5], [6, 7, 8, 9]], [[2, 1], [1, 1], [2, 2]])
        table.append_row(0, [list(range(10, 30)), np.arange(11, 20), None])
        table.set_row(2, [[5], np.array([6, 7], np.int32), [10, 11]])
        table.append_rows([0, 2], [[31, 32], [9, 10], []], [[1, 1], [1, 1], [0, 0]])
        step = np.array([0, 2, 1], np.int32), np.array([0, 70, 72, 73], np.int32), np.r_[0:70, 3:5, 2]
        small = np.array([1], np.int32), np.array([0, 1], np.int32), np.array([3])
        table.step(*step, num_computed_tokens=np.array([0, 3, 2], np.int32), out=more)
        table.null_range(0, 1, 0, 1)
        table.null_ranges([0, 2], 1, [0, 0], [1, 1])
        table.copy_row(0, 3)
        table.copy_rows([1], [4])
        table.replace_blocks(3, 0, 2, [40, 41])
        table.replace_block_ranges([3, 4], 0, [0, 0], [42, 43], [1, 1])
        table.remap_blocks(0, [42, 43], [43, 42])
        table.move_row(4, 1)
        table.swap_rows(0, 2)
        table.permute_rows([0, 2], [2, 0])
        with contextlib.suppress(bt.BlockTableError):
            table.clear_row(9)
        table.commit()
        table.gather(np.array([0, 2], np.int32), 4)
        table.compute_slot_mappings(*small, groups=[1, 0], out=[np.zeros(80, np.int64), np.zeros(75, np.int64)])
        table.truncate_row(0, [3, 1, 2])
        table.truncate_rows([2], [[1], [1], [2]])
        table.clear_row(3)
        table.clear_rows([2])
        table.invalidate()
        table.step(*small)
        table.clear()
        table.step(step[0], step[1] * 0, step[2][:0])
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def damage(chance: random.Random, lines: list[Any]) -> list[Any]:
    """Return the lines with one to three things in them changed, most of them deep inside."""
    lines = copy.deepcopy(lines)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(lines)) if chance.random() < 0.85 else 0
        change = chance.random()
        if change < 0.04:
            del lines[place]
        elif change < 0.08:
            lines.insert(place, copy.deepcopy(chance.choice(lines)))
        elif change < 0.12:
            other = chance.randrange(len(lines))
            lines[place], lines[other] = lines[other], lines[place]
        elif not lines or isinstance(lines[place], dict):
            damage_inside(chance, lines, place)
        if not lines:
            return lines
    return lines


def damage_inside(chance: random.Random, holder: Any, key: Any) -> None:
    """Change a value, or something in it."""
    value = holder[key]
    if isinstance(value, dict | list) and value and chance.random() < 0.9:
        inner = chance.choice([*value]) if isinstance(value, dict) else chance.randrange(len(value))
        damage_inside(chance, value, inner)
        return
    change = chance.random()
    if change < 0.1 and isinstance(holder, dict):
        del holder[key]
    elif change < 0.2 and isinstance(holder, dict):
        holder[chance.choice(("call", "row", "int32", "int64", "lengths", "shape", "raised", "x"))] = holder.pop(key)
    elif change < 0.5 and type(value) is int:
        holder[key] = value + chance.choice((-1, 1, 2, 1 << chance.randrange(64), -(1 << chance.randrange(64))))
    elif change < 0.6 and isinstance(value, str) and value:
        place = chance.randrange(len(value))
        holder[key] = value[:place] + chance.choice("Az09+/=!") + value[place + 1 :]
    else:
        holder[key] = copy.deepcopy(chance.choice(ODD))


def write(path: Path, lines: list[Any]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode(), 1))


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return lines_of_everything(tmp_path_factory.mktemp("recorded") / "run.btrace")


@pytest.mark.parametrize("seed", range(4))
def test_wrong_contents_end_in_a_sentence(
    seed: int, lines: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance, path, ends = random.Random(seed), tmp_path / "run.btrace", Counter[int]()
    for number in range(NUM_FILES // 4):
        write(path, damage(chance, lines))
        status = cli.main(["replay", str(path), "--quiet"])
        said = capsys.readouterr()
        assert status in (0, 1, cli.USAGE_ERROR), f"file {number}"
        assert len(said.err.splitlines()) == (status == cli.USAGE_ERROR), f"file {number}: {said.err}"
        ends[status] += 1
    assert min(ends.values()) > 10
    assert len(ends) == 3
