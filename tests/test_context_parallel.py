"""Which rank this is, and how much of a request it holds."""

from typing import Any

import numpy as np
import pytest

import blocktable as bt


class Group:
    """As much of a torch.distributed.ProcessGroup as is asked for."""

    def __init__(self, world: int, rank: int) -> None:
        self.world = world
        self.own_rank = rank

    def size(self) -> int:
        return self.world

    def rank(self) -> int:
        return self.own_rank


@pytest.mark.parametrize("pcp_world", [1, 2, 3])
@pytest.mark.parametrize("dcp_world", [1, 2, 4])
def test_every_pair_of_ranks_has_its_own_total_rank(pcp_world: int, dcp_world: int) -> None:
    """Rules: R20."""
    shares = [
        bt.ContextParallel.from_process_groups(
            pcp=Group(pcp_world, pcp_rank), dcp=Group(dcp_world, dcp_rank), interleave_size=4
        )
        for pcp_rank in range(pcp_world)
        for dcp_rank in range(dcp_world)
    ]
    assert [share.rank for share in shares] == list(range(pcp_world * dcp_world))
    assert {(share.world_size, share.interleave_size) for share in shares} == {(pcp_world * dcp_world, 4)}


def test_a_missing_group_counts_as_a_world_of_one() -> None:
    """Rules: R20."""
    assert bt.ContextParallel.from_process_groups() == bt.ContextParallel()
    assert bt.ContextParallel.from_process_groups(dcp=Group(4, 3)) == bt.ContextParallel(world_size=4, rank=3)
    assert bt.ContextParallel.from_process_groups(pcp=Group(4, 3)) == bt.ContextParallel(world_size=4, rank=3)


@pytest.mark.parametrize(("world_size", "interleave_size"), [(1, 1), (2, 1), (3, 5), (4, 16)])
def test_local_lengths_count_this_ranks_tokens(world_size: int, interleave_size: int) -> None:
    """Rules: R19."""
    for length in (0, 1, interleave_size, world_size * interleave_size, 7 * world_size * interleave_size + 3):
        owners = np.arange(length) // interleave_size % world_size
        for rank in range(world_size):
            share = bt.ContextParallel(world_size=world_size, rank=rank, interleave_size=interleave_size)
            assert share.local_lengths(length) == (owners == rank).sum()


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint32, np.int64])
def test_local_lengths_keep_the_kind_of_what_they_are_given(dtype: type[np.integer[Any]]) -> None:
    """Rules: R19."""
    share = bt.ContextParallel(world_size=4, rank=3, interleave_size=16)
    lengths = np.array([[0, 1, 47], [48, 64, 200]], dtype)
    found = share.local_lengths(lengths)
    assert found.dtype == dtype
    assert found.tolist() == [[0, 0, 0], [0, 16, 48]]
    assert type(share.local_lengths(200)) is int
