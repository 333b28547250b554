"""`blocktable replay --ranks`: every token of a trace has one owner among processes, and a fault is seen (R18)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable_replay.command import main
from blocktable_replay.plan import StepPlan
from blocktable_replay.ranks import Ranks

CONFIG = bt.BlockTableConfig(
    groups=[
        bt.KVCacheGroup(block_size=4, pad_slot_id=-7),
        bt.KVCacheGroup(block_size=4, sharded=False),
    ],
    max_num_reqs=3,
    max_num_batched_tokens=6,
    max_model_len=32,
    context_parallel=bt.ContextParallel(world_size=2, rank=0, interleave_size=2),
)


def torchrun(size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(size),
        "-m",
        "blocktable",
        "replay",
    ]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else None
    done = [*command, "--ranks", str(size), *arguments]
    return subprocess.run(done, capture_output=True, text=True, check=False, timeout=300, env=environment)


@pytest.mark.torch
def test_every_token_of_a_trace_has_one_owner() -> None:
    """Rules: R12, R13, R18."""
    done = torchrun(2, "--context-parallel", "interleave_size=8", "--limit", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    (count,) = re.findall(
        r"^([\d,]+) tokens in sharded groups, whose owners among 2 ranks were counted$", done.stdout, re.MULTILINE
    )
    (tokens,) = re.findall(r"^tokens +([\d,]+)$", done.stdout, re.MULTILINE)
    assert int(count.replace(",", "")) == 2 * int(tokens.replace(",", "")) > 10000  # two groups are sharded
    assert done.stdout.count("OK: every slot") == 1  # rank 0 alone speaks


def counted(others: list[list[int]], own: list[list[int]]) -> list[str]:
    """Return what is broken where the other rank's slots are `others` and this one's `own`, of five tokens.

    The first two are of request 4, the third is a dummy's, the fourth of request 5, the others padding.
    """
    ranks = Ranks.__new__(Ranks)
    pads = [group.pad_slot_id for group in CONFIG.groups]
    theirs = np.array([[slot != pad for slot in slots] for slots, pad in zip(others, pads, strict=True)], np.int32)

    def add(array: Any) -> None:
        array += theirs

    vars(ranks).update(
        _torch=SimpleNamespace(from_numpy=lambda array: array),
        _distributed=SimpleNamespace(all_reduce=add),
        _size=2,
        num_tokens=0,
    )
    plan: Any = SimpleNamespace(requests=np.array([4, -1, 5]), query_start_loc=np.array([0, 2, 3, 4], np.int32))
    assert StepPlan.__annotations__.keys() >= {"requests", "query_start_loc"}
    broken = ranks.broken_by_owners(plan, CONFIG, [np.array(slots) for slots in own])
    assert ranks.num_tokens == 3
    return broken


RIGHT = [[8, -7, -7, -7, -7, -7], [4, 5, -1, 6, -1, -1]]
OTHERS = [[-7, 9, -7, 0, -7, -7], [4, 5, -1, 6, -1, -1]]


def test_right_owners_are_not_broken() -> None:
    """Rules: R18."""
    assert counted(OTHERS, RIGHT) == []


@pytest.mark.parametrize(
    ("group", "token", "slot", "sentence"),
    [
        (0, 0, -7, "group 0, token 0: 0 ranks of 2 have a slot for it, expected 1"),
        (0, 1, 9, "group 0, token 1: 2 ranks of 2 have a slot for it, expected 1"),
        (0, 2, 3, "group 0, token 2: 1 ranks of 2 have a slot for it, expected 0"),
        (0, 5, 3, "group 0, token 5: 1 ranks of 2 have a slot for it, expected 0"),
        (1, 3, -1, "group 1, token 3: 1 ranks of 2 have a slot for it, expected 0"),
        (1, 4, 7, "group 1, token 4: 1 ranks of 2 have a slot for it, expected 2"),
    ],
)
def test_a_wrong_owner_is_named(group: int, token: int, slot: int, sentence: str) -> None:
    """Rules: R18."""
    wrong = [list(slots) for slots in RIGHT]
    wrong[group][token] = slot
    assert counted(OTHERS, wrong) == [f"{sentence} (R18)"]


def test_ranks_want_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R18."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(bt.BlockTableError, match=r"WORLD_SIZE not set; run torchrun --nproc-per-node 2 -m blocktable"):
        main(["--ranks", "2"])
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(bt.BlockTableError, match="--ranks 2 needs a process for each rank, and finds WORLD_SIZE 4"):
        main(["--ranks", "2"])


def test_ranks_and_replicated_groups_are_refused() -> None:
    """Nothing would be proved. Rules: R18."""
    ranks = Ranks.__new__(Ranks)
    vars(ranks).update(_size=2, _rank=1)
    config = bt.BlockTableConfig(groups=[CONFIG.groups[1]], max_num_reqs=1, max_num_batched_tokens=1, max_model_len=8)
    with pytest.raises(bt.BlockTableError, match="needs a sharded group"):
        ranks.require_sharded(config)
    ranks.require_sharded(CONFIG)
    with pytest.raises(bt.BlockTableError, match="leave them out of --context-parallel"):
        ranks.share(bt.ContextParallel(world_size=2, rank=0))
    assert ranks.share(bt.ContextParallel(interleave_size=4)) == bt.ContextParallel(
        world_size=2, rank=1, interleave_size=4
    )
