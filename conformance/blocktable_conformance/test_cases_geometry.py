"""Cases G: block sizes of every kind, groups of different ones, rings and windows."""

from __future__ import annotations

from typing import Any

import pytest

from blocktable import BlockTableConfig, ConfigError, KVCacheGroup
from blocktable_conformance.asserts import check, must_raise
from blocktable_conformance.cases import (
    expect_counts,
    expect_host,
    expect_slots,
    expect_table,
    make,
    one_request,
    shard,
    small_config,
)
from blocktable_conformance.oracle import PAD, OracleTable
from blocktable_conformance.subject import Subject

HYBRID = KVCacheGroup(block_size=32, kernel_block_size=16)


def _width(subject: Subject, config: BlockTableConfig, group: int = 0) -> int:
    """Return the columns of the device's table, which the config and the oracle must agree on."""
    width = int(subject.table(config).device_table(group).shape[1])
    check(width == config.width(group), "R3", f"the table is {width} wide, the config says {config.width(group)}")
    oracle = OracleTable(config).shapes[group].width
    check(width == oracle, "R3", f"the table is {width} wide, the rule gives {oracle}")
    return width


@pytest.mark.parametrize(
    ("block_size", "width_alignment", "width"), [(32, 128, 296), (32, 1, 295), (64, 128, 148), (256, 128, 37)]
)
def test_widths_are_aligned_in_tokens(subject_once: Subject, block_size: int, width_alignment: int, width: int) -> None:
    """9416 tokens are 295 blocks of 32 and, aligned to 128 tokens, 296 columns.

    Cases: G1. Rules: R3.
    """
    config = BlockTableConfig(
        groups=[KVCacheGroup(block_size=block_size)],
        max_num_reqs=1,
        max_num_batched_tokens=1,
        max_model_len=9416,
        width_alignment=width_alignment,
    )
    check(_width(subject_once, config) == width, "R3", f"the width must be {width}")


@pytest.mark.large
def test_a_sharded_group_needs_half_the_columns(subject_once: Subject) -> None:
    """A million tokens over two ranks are 8192 blocks of 64; a replicated group holds all 16384.

    Cases: G2. Rules: R3, R18.
    """
    config = BlockTableConfig(
        groups=[KVCacheGroup(block_size=64), KVCacheGroup(block_size=64, sharded=False)],
        max_num_reqs=1,
        max_num_batched_tokens=1,
        max_model_len=1_048_576,
        context_parallel=shard(2, 0, 1),
    )
    check(_width(subject_once, config, 0) == 8192, "R3", "the sharded group must have 8192 columns")
    check(_width(subject_once, config, 1) == 16384, "R3", "the replicated group must have 16384 columns")
    check(config.width(0) == 8192, "R3", f"config.width must give what the table has, got {config.width(0)}")


def test_a_block_expands_into_its_kernel_blocks(subject: Subject) -> None:
    """Blocks 2 and 5 of 32 tokens are kernel blocks 4, 5, 10 and 11 of 16.

    Cases: G3. Rules: R2, R12.
    """
    pair = make(subject, HYBRID, rows=[[2, 5]])
    seen = one_request(pair, [0, 17, 32, 63])
    expect_slots(seen, [64, 81, 160, 191], "R12")
    expect_table(seen.block_tables[0], [[4, 5, 10, 11]], "R2")
    pair.do("append_row", 0, [7])
    expect_host(pair, [[4, 5, 10, 11, 14, 15]], "R2")
    expect_counts(pair, [3], "R4")


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 48, "kernel_block_size": 32},
        {"block_size": 16, "kernel_block_size": 0},
        {"block_size": 0},
        {"block_size": -16},
        {"block_size": 16, "kernel_block_size": 32},
        {"block_size": 16.0},
        {"block_size": True},
        {"block_size": 16, "sharded": True, "slot_mode": "ring"},
        {"block_size": 16, "sharded": True, "slot_mode": "none"},
        {"block_size": 16, "slot_mode": "circle"},
        {"block_size": 16, "blocks_per_row": 2, "extra_blocks": 1},
    ],
    ids=str,
)
def test_impossible_groups_are_refused_in_a_sentence(subject_once: Subject, options: dict[str, Any]) -> None:
    """A kernel block that does not divide the block, sizes that are none, sharded rings: a ConfigError that says what.

    Cases: G4. Rules: R1, R14.
    """
    rules = "R14" if "slot_mode" in options else "R1, R3"
    with must_raise(ConfigError, rules, f"KVCacheGroup({options})") as raised:
        KVCacheGroup(**options)
    last = str(list(options.values())[-1])
    check(last in raised.message, rules, f"the error must name {last}: {raised.message}")
    check(len(raised.message.split()) > 5, rules, f"the error must be a sentence: {raised.message}")


def test_positions_at_the_edges_of_kernel_blocks(subject: Subject) -> None:
    """The last token of a kernel block and the first of the next, inside a block and across two.

    Cases: G5. Rules: R2, R12.
    """
    seen = one_request(make(subject, HYBRID, rows=[[5, 9]]), [0, 15, 16, 31, 32, 47, 48])
    expect_slots(seen, [160, 175, 176, 191, 288, 303, 304], "R12")


def test_groups_of_different_block_sizes(subject: Subject) -> None:
    """Position 20 lies in another column of each group, and an append may change one group only.

    Cases: G6. Rules: R7, R8, R12.
    """
    groups = [KVCacheGroup(block_size=size) for size in (16, 32, 8)]
    pair = make(subject, *groups, rows=[([1, 2], [10], [4, 5, 6, 7])])
    seen = one_request(pair, [20])
    for group, slot in enumerate((36, 340, 52)):
        expect_slots(seen, [slot], "R12", group=group)
    pair.do("append_row", 0, ([], [11], []))
    for group, row in enumerate(([1, 2], [10, 11], [4, 5, 6, 7])):
        expect_host(pair, [row], "R8", group=group)
    pair.refuse("ArgumentError", "append_row", 0, ([1], [2]))
    pair.commit()


def test_block_sizes_need_not_be_powers_of_two(subject: Subject) -> None:
    """Blocks of 3 tokens.

    Cases: G7. Rules: R1, R12.
    """
    seen = one_request(make(subject, KVCacheGroup(block_size=3), rows=[[7, 1, 4]]), range(9))
    expect_slots(seen, [21, 22, 23, 3, 4, 5, 12, 13, 14], "R12")


def test_groups_of_one_size_have_tables_of_their_own(subject: Subject) -> None:
    """Two groups of 16 tokens a block hold different blocks.

    Cases: G8. Rules: R12.
    """
    pair = make(subject, KVCacheGroup(block_size=16), KVCacheGroup(block_size=16), rows=[([1], [2])])
    seen = one_request(pair, [0])
    for group, (slot, block_id) in enumerate(((16, 1), (32, 2))):
        expect_slots(seen, [slot], "R12", group=group)
        expect_table(seen.block_tables[group], [[block_id]], "R10.1")


def test_a_ring_wraps_around_its_row(subject: Subject) -> None:
    """Positions wrap at the eight tokens of two blocks, and of two tokens in one place the last has the slot.

    An empty ring row has no slots. Cases: G9. Rules: R13, R14.
    """
    pair = make(subject, KVCacheGroup(block_size=4, slot_mode="ring"), rows=[[7, 9]])
    expect_slots(one_request(pair, [0, 5, 8, 13]), [PAD, PAD, 28, 37], "R14")
    expect_slots(one_request(pair, [6, 7, 8, 13]), [38, 39, 28, 37], "R14")
    expect_slots(pair.step([0, 0], [0, 1, 2], [2**40 + 5, 2**63 - 1]), [37, 39], "R14")
    expect_slots(one_request(pair, [0, 1], row=1), [], "R14")


def test_a_ring_keeps_its_window_whole(subject: Subject) -> None:
    """The columns of a ring stand for no positions: a window takes none of them out, nor of a group without slots.

    Cases: W1. Rules: R11, R14.
    """
    ring = KVCacheGroup(block_size=4, slot_mode="ring", blocks_per_row=2, sliding_window=5)
    state = KVCacheGroup(block_size=4, slot_mode="none", blocks_per_row=2, sliding_window=5)
    pair = make(subject, ring, state, rows=[[[5, 9], [3, 4]]])
    seen = one_request(pair, [9], num_computed_tokens=[9])
    expect_table(seen.block_tables[0], [[5, 9]], "R11")
    expect_table(seen.block_tables[1], [[3, 4]], "R11")
    expect_slots(seen, [21], "R14")


def test_a_step_longer_than_its_ring(subject: Subject) -> None:
    """Twelve tokens in a ring of eight: the first four are PAD, the last of each place has the slot.

    Cases: W4. Rules: R14.
    """
    ring = KVCacheGroup(block_size=4, slot_mode="ring", blocks_per_row=2)
    pair = make(subject, ring, rows=[[5, 9], [2, 7]])
    expect_slots(one_request(pair, range(12)), [*[PAD] * 4, 36, 37, 38, 39, 20, 21, 22, 23], "R14")
    seen = pair.step([1, 0], [0, 9, 12], [*range(9), 0, 1, 2])
    expect_slots(seen, [PAD, *range(9, 12), *range(28, 32), 8, 20, 21, 22], "R14")
    expect_slots(one_request(pair, [3, 11, -(2**63)]), [23, 23, PAD], "R14")


def test_a_ring_of_kernel_blocks(subject: Subject) -> None:
    """A ring wraps at its filled columns, in kernel blocks, not at its width.

    Cases: G9. Rules: R2, R14.
    """
    group = KVCacheGroup(block_size=4, kernel_block_size=2, slot_mode="ring", blocks_per_row=3)
    pair = make(subject, group, rows=[[7, 9]])
    expect_slots(one_request(pair, [0, 3, 4, 7, 8, 11]), [PAD, PAD, 36, 39, 28, 31], "R14")


def test_a_group_without_slots(subject: Subject) -> None:
    """A state group has a table of exactly its blocks, and PAD for every token.

    Cases: G9. Rules: R3, R13.
    """
    state = KVCacheGroup(block_size=16, slot_mode="none", blocks_per_row=3)
    pair = make(subject, KVCacheGroup(block_size=16), state, width_alignment=128, rows=[([1], [7, 8, 9])])
    check(pair.host_tables()[1].shape == (4, 3), "R3", f"the table must be [4, 3], got {pair.host_tables()[1].shape}")
    seen = one_request(pair, [0, 1])
    expect_slots(seen, [16, 17], "R12")
    expect_slots(seen, [], "R13", group=1)
    expect_table(seen.block_tables[1], [[7, 8, 9]], "R10.1")


def test_columns_left_by_a_sliding_window_are_null(subject: Subject) -> None:
    """Window 8, 19 tokens computed: tokens 0..11 are passed, three columns of 4; the table and the slots stay.

    Cases: G10. Rules: R11, R12.
    """
    pair = make(subject, KVCacheGroup(block_size=4, sliding_window=8), width=6, rows=[range(11, 17)])
    seen = one_request(pair, [19], num_computed_tokens=[19])
    expect_table(seen.block_tables[0], [[0, 0, 0, 14, 15, 16]], "R11")
    expect_slots(seen, [63], "R12")
    expect_table(subject.to_host(pair.table.device_table(0)), [range(11, 17)], "R11", "the device table")
    whole = one_request(pair, [19])
    expect_table(whole.block_tables[0], [range(11, 17)], "R11")


def test_a_window_passes_no_column_before_its_last_token_left_it(subject_once: Subject) -> None:
    """The first column goes when token 3 has left the window of 8, not a token earlier; and never more than there are.

    Cases: G10. Rules: R11.
    """
    window = KVCacheGroup(block_size=4, sliding_window=8)
    pair = make(subject_once, window, KVCacheGroup(block_size=4), width=6, rows=[(range(11, 17), range(1, 7))] * 4)
    pair.commit()
    computed = [10, 11, 2**31 - 1, -(2**31)]
    windowed, full = pair.gather([0, 1, 2, 3], num_computed_tokens=computed)
    row = list(range(11, 17))
    expect_table(windowed, [row, [0, *row[1:]], [], row], "R11")
    expect_table(full, [range(1, 7)] * 4, "R11")


def test_a_window_over_rows_in_place(subject: Subject) -> None:
    """Without an idx_mapping the windowed group is cut out of a copy, and the other hands out the table's own rows.

    Cases: G10. Rules: R10.11, R11.
    """
    window = KVCacheGroup(block_size=4, sliding_window=8)
    pair = make(subject, window, KVCacheGroup(block_size=4), width=6, rows=[(range(11, 17), [7])])
    seen = pair.step(None, [0, 1], [19], num_computed_tokens=[19], num_reqs_padded=3)
    expect_table(seen.block_tables[0], [[0, 0, 0, 14, 15, 16]], "R11")
    expect_table(seen.block_tables[1], [[7]], "R10.11")
    expect_slots(seen, [63], "R12")


def test_rows_in_place_of_a_batch(subject: Subject) -> None:
    """Without an idx_mapping batch row i is row i, and padding rows must be empty: an occupied one is named.

    Rules: R10.9, R10.10, R13.
    """
    pair = make(subject, KVCacheGroup(block_size=4), rows=[[5], [6, 7]])
    seen = pair.step(None, [0, 1, 3], [0, 3, 4], num_reqs_padded=4)
    expect_table(seen.block_tables[0], [[5], [6, 7]], "R10.9")
    expect_slots(seen, [20, 27, 28], "R12")
    launches = subject.call_log.launches
    with must_raise(ValueError, "R10.10", "an occupied padding row") as raised:
        pair.table.gather(None, 2, num_reqs=1)
    check("1" in raised.message, "R10.10", f"the error must name row 1: {raised.message}")
    check(subject.call_log.launches == launches, "R10.10", "something was launched before the refusal.")


def test_impossible_tables_are_refused_in_a_sentence(subject_once: Subject) -> None:
    """No groups, no rows, no tokens, a rank outside its world: a ConfigError.

    Cases: G4. Rules: R1, R3, R18.
    """
    for options in (
        {"max_num_reqs": 0},
        {"max_num_batched_tokens": 0},
        {"max_model_len": 0},
        {"lookahead_tokens": -1},
        {"width_alignment": 0},
        {"slot_dtype": "int16"},
        {"steps_in_flight": 0},
        {"max_num_reqs": 2.0},
    ):
        name = next(iter(options))
        with must_raise(ConfigError, "R1, R3", str(options)) as raised:
            small_config(HYBRID, **options)
        check(name in raised.message, "R1, R3", f"the error must name {name}: {raised.message}")


def test_what_is_no_request_is_pad_in_every_group(subject: Subject) -> None:
    """One step of padding entries over a linear, a ring, a sharded-off and a windowed group: PAD in all of them.

    Cases: P5. Rules: R13, R14.
    """
    groups = [
        KVCacheGroup(block_size=4),
        KVCacheGroup(block_size=4, slot_mode="ring"),
        KVCacheGroup(block_size=4, sliding_window=4),
        KVCacheGroup(block_size=4, slot_mode="none"),
    ]
    pair = make(subject, *groups, rows=[([1], [2], [3], [4])])
    seen = pair.step([-1, 0], [0, 2, 4], [0, 1, 0, 1], num_computed_tokens=[9, 0])
    for group, slots in enumerate(([4, 5], [8, 9], [12, 13], [PAD, PAD])):
        expect_slots(seen, [PAD, PAD, *slots], "R13", group=group)
