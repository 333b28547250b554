"""Cases C and the sweep: ranks that share the tokens of a request."""

from __future__ import annotations

from math import gcd

import pytest

from blocktable import BlockTableConfig, ConfigError, ContextParallel, KVCacheGroup
from blocktable_conformance.asserts import check, check_values, must_raise
from blocktable_conformance.cases import expect_slots, expect_table, make, one_request, shard, small_config
from blocktable_conformance.oracle import PAD, Share
from blocktable_conformance.pair import Pair
from blocktable_conformance.subject import Subject

X = PAD


@pytest.mark.parametrize(
    ("rank", "slots"),
    [
        (0, [640, X, X, X, X, X]),
        (1, [X, 640, 712, 767, X, 1152]),
        (2, [X, X, X, X, 684, X]),
        (3, [X, X, X, X, X, X]),
    ],
)
def test_ownership_is_in_interleaved_tokens_not_kernel_blocks(subject: Subject, rank: int, slots: list[int]) -> None:
    """128 tokens each in turn, kernel blocks of 64: an engine that used kernel blocks lost accuracy.

    Cases: C1. Rules: R12, R13, R18.
    """
    pair = make(
        subject,
        KVCacheGroup(block_size=128, kernel_block_size=64),
        width=8,
        context_parallel=shard(4, rank, 128),
        rows=[[5, 9]],
    )
    expect_slots(one_request(pair, [0, 128, 200, 255, 300, 640]), slots, "R12")


def test_a_replicated_group_ignores_context_parallelism(subject: Subject) -> None:
    """A sharded and a replicated group in one table.

    Cases: C2. Rules: R12, R18.
    """
    groups = [KVCacheGroup(block_size=16), KVCacheGroup(block_size=16, sharded=False)]
    pair = make(subject, *groups, context_parallel=shard(2, 0, 1), rows=[([3], [4, 5])])
    seen = one_request(pair, [0, 1, 2, 3, 20])
    expect_slots(seen, [48, X, 49, X, 58], "R12")
    expect_slots(seen, [64, 65, 66, 67, 84], "R18", group=1)


def test_two_ranks_with_two_tokens_in_turn(subject: Subject) -> None:
    """What rank 0 leaves out is exactly what rank 1 holds.

    Cases: C3. Rules: R12, R18.
    """
    local = [40, 41, X, X, 42, 43, X, X, 44, 45, X, X, 46, 47, X, X]
    for rank, slots in ((0, local), (1, local[-2:] + local[:-2])):
        pair = make(subject, KVCacheGroup(block_size=4), context_parallel=shard(2, rank, 2), rows=[[10, 11]])
        expect_slots(one_request(pair, range(16)), slots, "R12")


def test_an_interleave_that_does_not_divide_the_block_is_refused(subject_once: Subject) -> None:
    """Blocks of 4, three tokens in turn: refused, unless nothing is sharded.

    Cases: C4. Rules: R18.
    """
    with must_raise(ConfigError, "R18", "interleave_size 3 with block_size 4") as raised:
        small_config(KVCacheGroup(block_size=4), context_parallel=shard(2, 0, 3))
    named = "3" in raised.message and "4" in raised.message
    check(named, "R18", f"the error must name both numbers: {raised.message}")
    small_config(KVCacheGroup(block_size=4, sharded=False), context_parallel=shard(2, 0, 3))
    small_config(KVCacheGroup(block_size=4), context_parallel=shard(1, 0, 3))
    small_config(KVCacheGroup(block_size=4, kernel_block_size=1), context_parallel=shard(2, 0, 2))
    for options in ({"world_size": 2, "rank": 2}, {"world_size": 0}, {"rank": -1}, {"interleave_size": 0}):
        with must_raise(ConfigError, "R18", f"ContextParallel({options})"):
            ContextParallel(**options)


def test_the_second_rank_counts_its_own_tokens(subject: Subject) -> None:
    """Every other token of blocks of 16.

    Cases: C5. Rules: R12.
    """
    pair = make(subject, KVCacheGroup(block_size=16), context_parallel=shard(2, 1, 1), rows=[[5, 6]])
    expect_slots(one_request(pair, [0, 1, 2, 3, 4, 5, 32, 33]), [X, 80, X, 81, X, 82, X, 96], "R12")


def test_padding_under_context_parallelism(subject: Subject) -> None:
    """Three tokens, six launched.

    Cases: C6. Rules: R13, R15.
    """
    pair = make(subject, KVCacheGroup(block_size=4), context_parallel=shard(2, 0, 1), rows=[[10]])
    expect_slots(one_request(pair, [0, 1, 2], num_tokens_padded=6), [40, X, 41], "R15")


@pytest.mark.parametrize(("rank", "passed"), [(0, 3), (1, 2)])
def test_a_window_over_shared_tokens(subject: Subject, rank: int, passed: int) -> None:
    """Window 8, 29 computed: of the 22 tokens that it has passed rank 0 held 12 and rank 1 held 10, in columns of 4.

    Cases: C7. Rules: R11, R19.
    """
    window = KVCacheGroup(block_size=4, sliding_window=8)
    pair = make(subject, window, width=12, context_parallel=shard(2, rank, 2), rows=[range(11, 17)])
    seen = one_request(pair, [29], num_computed_tokens=[29])
    expect_table(seen.block_tables[0], [[0] * passed + list(range(11 + passed, 17))], "R11")


SWEEP = [(world_size, interleave_size) for world_size in (1, 2, 3, 4, 8) for interleave_size in (1, 2, 3, 4, 16, 128)]


def _sweep_groups(interleave_size: int) -> list[KVCacheGroup]:
    """Return sharded groups of many (block_size, kernel_block_size), as far as the interleave divides the block."""
    sizes = [(1, 1), (4, 4), (4, 1), (6, 2), (6, 3), (16, 16), (16, 4), (48, 16), (128, 64), (128, 128)]
    groups = [
        KVCacheGroup(block_size=block_size, kernel_block_size=kernel_block_size, blocks_per_row=3)
        for block_size, kernel_block_size in sizes
        if block_size % interleave_size == 0
    ]
    return [*groups, KVCacheGroup(block_size=16, sharded=False, blocks_per_row=3)]


def _sweep_positions(world_size: int, interleave_size: int) -> list[int]:
    """Return 32 positions around the edges of turns, blocks and rows."""
    turn = world_size * interleave_size
    edges = {0, interleave_size, turn, 2 * turn, 3 * turn, 16 * turn // gcd(16, interleave_size), 48, 384 * world_size}
    return sorted({max(0, edge + offset) for edge in edges for offset in (-1, 0, 1, 2)})[:32]


@pytest.mark.parametrize(("world_size", "interleave_size"), SWEEP)
def test_ranks_partition_the_tokens(subject_once: Subject, world_size: int, interleave_size: int) -> None:
    """Each position has a slot on exactly one rank, inside that rank's block, or on none where the owner's row ends.

    Rules: R12, R13, R18, R19.
    """
    groups = _sweep_groups(interleave_size)
    positions = _sweep_positions(world_size, interleave_size)
    mappings = [
        _slots_of_rank(subject_once, groups, world_size, rank, interleave_size, positions) for rank in range(world_size)
    ]
    for index, group in enumerate(groups):
        share = Share(world_size, 0, interleave_size)
        for token, position in enumerate(positions):
            slots = [mapping[index][token] for mapping in mappings]
            owner, local = (share.owner(position), share.local_index(position)) if group.is_sharded else (0, position)
            expected = [owner] if group.is_sharded else list(range(world_size))
            if local >= 3 * group.block_size:
                expected = []
            holders = [rank for rank, slot in enumerate(slots) if slot != PAD]
            where = f"position {position}, block_size {group.block_size}/{group.kernel_block_size}, ranks {holders}"
            check(holders == expected, "R18", f"{where} hold it, but {expected} must.")
            blocks = {slots[rank] // group.block_size for rank in holders}
            wanted = {(5, 2, 9)[local // group.block_size]} if holders else set()
            check(blocks == wanted, "R18", f"{where}: the slots {slots} lie in blocks {blocks}, not {wanted}.")


def _slots_of_rank(
    subject: Subject,
    groups: list[KVCacheGroup],
    world_size: int,
    rank: int,
    interleave_size: int,
    positions: list[int],
) -> list[list[int]]:
    config = BlockTableConfig(
        groups=groups,
        max_num_reqs=1,
        max_num_batched_tokens=32,
        max_model_len=384 * world_size,
        context_parallel=shard(world_size, rank, interleave_size),
        width_alignment=1,
    )
    pair = Pair(subject, config)
    pair.do("set_row", 0, [[5, 2, 9]] * len(groups))
    pair.table.commit()
    pair.oracle.commit()
    return [mapping.tolist() for mapping in pair.compute([0], [0, len(positions)], positions)]


def test_local_lengths_count_the_owners(subject_once: Subject) -> None:
    """Every rank's length is the number of positions that it owns, and all ranks' lengths add up.

    Rules: R18, R19.
    """
    import numpy as np

    for world_size, interleave_size in SWEEP:
        lengths = range(3 * world_size * interleave_size + 2) if interleave_size < 16 else range(0, 700, 37)
        for seq_len in lengths:
            owned = [Share(world_size, 0, interleave_size).owner(position) for position in range(seq_len)]
            for rank in range(world_size):
                got = shard(world_size, rank, interleave_size).local_lengths(seq_len)
                expected = owned.count(rank)
                where = f"local_lengths({seq_len}) of {(world_size, rank, interleave_size)}"
                check(got == expected, "R19", f"{where} must be {expected}, got {got}")
        array = np.array(lengths, np.uint32)
        for rank in range(world_size):
            share = Share(world_size, rank, interleave_size)
            got_array = shard(world_size, rank, interleave_size).local_lengths(array)
            check(got_array.dtype == np.uint32, "R19", f"local_lengths must keep uint32, got {got_array.dtype}")
            check_values(got_array, [share.local_length(int(length)) for length in lengths], "R19", "local_lengths")
