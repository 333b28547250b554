"""Exports that begin anywhere, of rings and of requests, and slots of any positions (R34-R36)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktable import (
    LAYOUTS,
    ArgumentError,
    BlockTableConfig,
    ConfigError,
    DtypeError,
    KVCacheGroup,
    Layout,
)
from blocktable_conformance.asserts import check, check_values, must_raise
from blocktable_conformance.cases import make, shard
from blocktable_conformance.exports import ExportPair
from blocktable_conformance.pair import Pair
from blocktable_conformance.strategies import INT32_MAX, INT32_MIN, bulk_calls, configs
from blocktable_conformance.subject import HostArray, Subject
from blocktable_conformance.test_exports import (
    CSR,
    EXACT,
    FIRST_STATE,
    FULL,
    GARBAGE,
    INVERSE_MAP,
    KV,
    LENGTHS,
    MISSING_IS_MINUS_1,
    PLACEHOLDER,
    SCALED,
    TABLE,
    TOKEN_CSR,
    VARIANTS,
    WIDE,
    layout,
    three_rows,
)

RING = layout("ring")
RING_OF_MINUS_1 = layout("ring", null=-1, dtype="int64", width_tokens=24)
BLOCK_REQUESTS = layout("block_requests", shape=("n",), null=-1)
TOKEN_REQUESTS = layout("token_requests", shape=("T",), null=-1)
PARTS = [CSR, TOKEN_CSR, BLOCK_REQUESTS, TABLE, MISSING_IS_MINUS_1, WIDE, EXACT, SCALED, KV, LENGTHS, INVERSE_MAP]
ALL = [*VARIANTS, RING, RING_OF_MINUS_1, BLOCK_REQUESTS]
PAIRS = KVCacheGroup(block_size=2, num_blocks=40)


@pytest.fixture(autouse=True)
def exporting(request: pytest.FixtureRequest) -> None:
    """Skip for a backend that does not declare exports of parts."""
    found: Subject = request.getfixturevalue("subject_once")
    for capability in ("exports", "export_parts"):
        if not found.declares(capability):
            pytest.skip(f"{found.label} does not declare {capability}")


def capacity_of(wanted: Layout, capacity: int) -> int | None:
    """Return the capacity for kinds that take one."""
    return capacity if wanted.kind in ("csr", "token_csr", "block_requests", "token_requests") else None


# Parts of rows (R34).


def test_local_attention_by_hand(subject_once: Subject) -> None:
    """One row of 5 blocks, chunks of 4 tokens as entries of their own, in a batch larger than `max_num_reqs`.

    Rules: R27, R34.
    """
    pair = make(subject_once, PAIRS, width=5, rows=[[11, 12, 13, 14, 15]], max_num_reqs=2)
    pair.commit()
    host = subject_once.to_host
    export = ExportPair(pair, CSR, capacity=16, max_batch=4)
    result = export.run([0, 0, 0], [4, 8, 10], first_tokens=[0, 4, 8])
    check_values(host(result.entries[0])[:6], [11, 12, 13, 14, 15, 0], "R34", "the indices")
    check_values(host(result.indptr), [0, 2, 4, 5], "R34", "indptr")
    check_values(host(result.last_page_lens), [2, 2, 2], "R34", "last_page_lens")
    check_values(host(result.lengths), [4, 4, 2], "R34", "lengths")
    result = export.run([0, -1, 0], [9, 8, 3], first_tokens=[6, 3, 8], num_reqs_padded=4)
    check_values(host(result.entries[0])[:3], [14, 15, 0], "R34", "the indices after a larger batch")
    check_values(host(result.indptr), [0, 2, 2, 2, 2], "R34", "indptr")
    check_values(host(result.last_page_lens), [1, 0, 0, 0], "R34", "last_page_lens")
    check_values(host(result.lengths), [3, 0, 0, 0], "R34", "lengths")


@pytest.mark.parametrize("wanted", PARTS, ids=lambda wanted: f"{wanted.kind}{PARTS.index(wanted)}")
def test_parts_of_every_kind(subject_once: Subject, wanted: Layout) -> None:
    """Parts from the start, the middle, the last block and past the end; with a hole, with windows, after other parts.

    Rules: R11, R30, R34.
    """
    group = replace(FULL, sliding_window=5, null_is_pad=True)
    pair = three_rows(subject_once, group, replace(group, allow_null=True), width=5)
    pair.do("append_row", 0, [[30, 31], [0, 31]])
    pair.commit()
    for groups in ((0,), (1, 0)):
        export = ExportPair(pair, wanted, groups, capacity=capacity_of(wanted, 90), max_batch=7)
        export.run([0, 0, 0, 2, 1, 3, -1], [20, 17, 19, 8, 4, 9, 9], first_tokens=[0, 8, 16, 4, 4, 0, 4])
        export.run(
            [0, 0, 2], [20, 17, 7], first_tokens=[8, 4, 8], num_reqs_padded=7, num_computed_tokens=[19, 9, INT32_MAX]
        )
        export.run([0], [INT32_MAX], first_tokens=[4])
        export.run([2, 0, 1], [8, INT32_MIN, 4])
        export.run([0, 2], [9, 8], first_tokens=[INT32_MIN, INT32_MAX - 3])


def test_the_inverse_map_counts_from_the_rows_start(subject_once: Subject) -> None:
    """The columns of a part are those of the whole row: a mask asks for true positions.

    Rules: R30, R34.
    """
    pair = make(subject_once, PAIRS, width=5, rows=[[11, 12, 13, 14, 15]])
    pair.commit()
    result = ExportPair(pair, INVERSE_MAP).run([0], [9], first_tokens=[4])
    got = subject_once.to_host(result.entries[0])[0]
    check_values(np.flatnonzero(got >= 0), [13, 14, 15], "R34", "the blocks in the map")
    check_values(got[[13, 14, 15]], [2, 3, 4], "R34", "their columns")


def test_first_tokens_that_are_no_boundary(subject_once: Subject) -> None:
    """Host arrays are refused with the nearest two; of device arrays they are rounded down and counted.

    Rules: R34.
    """
    pair = three_rows(subject_once, FULL)
    for wanted in PARTS:
        export = ExportPair(pair, wanted, capacity=capacity_of(wanted, 90), max_batch=4)
        export.run([0, 2, -1, 0], [12, 8, 4, 11], first_tokens=[4, 3, 1, 9])
        export.run([0, 2], [12, 8], first_tokens=[1, 4])
    firsts, lens = np.array([4, 9], np.int32), np.array([12, 12], np.int32)
    with must_raise(ArgumentError, "R34", "a first token inside a block") as raised:
        pair.table.export(CSR, np.array([0, 0], np.int32), seq_lens=lens, first_tokens=firsts)
    check("8 and 12" in raised.message, "R34", f"the refusal must name 8 and 12: {raised.message}")


def test_more_cuts_than_31_bits(subject_once: Subject) -> None:
    """A count of cuts that is full stays full when first tokens that are not a boundary come to it.

    Rules: R27, R34.
    """
    pair = make(subject_once, KVCacheGroup(block_size=2**20, num_blocks=2048), width=2048)
    pair.do("set_row", 0, [1 + index % 2047 for index in range(2048)])
    pair.commit()
    export = ExportPair(pair, TOKEN_CSR, capacity=5)
    export.run([0, 0], [INT32_MAX] * 2)
    export.run([0, 0], [4, 4], first_tokens=[1, 2])


@pytest.mark.parametrize(("interleave", "first", "nearest"), [(2, 9, (8, 16)), (4, 10, (8, 12)), (1, 4, (0, 8))])
@pytest.mark.parametrize("rank", [0, 1])
def test_boundaries_of_ranks(
    subject_once: Subject, rank: int, interleave: int, first: int, nearest: tuple[int, int]
) -> None:
    """Where two ranks share a group a part begins where a block begins on both; each exports its own.

    Rules: R19, R34.
    """
    pair = make(subject_once, FULL, context_parallel=shard(2, rank, interleave), rows=[[5, 6, 7]])
    pair.commit()
    with must_raise(ArgumentError, "R34", "a first token that one rank has inside a block") as raised:
        pair.table.export(
            CSR,
            np.array([0], np.int32),
            seq_lens=np.array([20], np.int32),
            first_tokens=np.array([first], np.int32),
        )
    check(f"{nearest[0]} and {nearest[1]}" in raised.message, "R34", f"the nearest are {nearest}: {raised.message}")
    for wanted in PARTS:
        export = ExportPair(pair, wanted, capacity=capacity_of(wanted, 90), max_batch=5)
        export.run([0, 0, 0], [20, 24, 13], first_tokens=[0, nearest[1], nearest[0]])
        export.run([0, 0, 0, -1], [20, 24, 13, 4], first_tokens=[first, first + 1, 3, 1])


def test_a_part_of_a_batch_table_is_a_copy(subject_once: Subject) -> None:
    """A layout that the batch table meets is written apart where parts are asked for, with nothing gathered.

    Rules: R26, R34.
    """
    pair = three_rows(subject_once, FULL)
    array = subject_once.device_array
    result = pair.table.export("flash_attention_3", array([0, 0], "int32"), first_tokens=array([4, 8], "int32"))
    got = subject_once.to_host(result.entries[0])
    check_values(got[0], [11, 12, 0, 0], "R34", "the row from its second block on")
    check_values(got[1], [12, 0, 0, 0], "R34", "the row from its third block on")


def test_refusals_of_parts(subject_once: Subject) -> None:
    """Groups and kinds without parts, sets without a capacity, batches above a set's, and what CSR does not take.

    Rules: R27, R34, R35.
    """
    ring = KVCacheGroup(block_size=4, slot_mode="ring", blocks_per_row=2, num_blocks=20)
    state = KVCacheGroup(block_size=4, slot_mode="none", blocks_per_row=2)
    cross = KVCacheGroup(block_size=4, slot_mode="cross", num_blocks=20)
    pair = make(subject_once, FULL, ring, state, cross)
    table, array = pair.table, subject_once.device_array
    one, many, starts = array([0], "int32"), array([0] * 6, "int32"), array([0, 1], "int32")
    wide = table.create_export(CSR, capacity=4, max_batch=6)
    narrow = table.create_export(CSR, capacity=4, max_batch=1)
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ArgumentError, "linear", lambda: table.export(CSR, one, groups=1, seq_lens=one, first_tokens=one)),
        (ArgumentError, "linear", lambda: table.export(CSR, one, groups=3, seq_lens=one, first_tokens=one)),
        (ArgumentError, "linear", lambda: table.export(TABLE, one, groups=2, first_tokens=one)),
        (ArgumentError, "state", lambda: table.export(FIRST_STATE, one, groups=2, first_tokens=one)),
        (ArgumentError, "placeholder", lambda: table.export(PLACEHOLDER, one, first_tokens=one)),
        (ArgumentError, "ring", lambda: table.export(RING, one, groups=1, seq_lens=one, first_tokens=one)),
        (ArgumentError, "first_tokens", lambda: table.export(CSR, one, seq_lens=one, first_tokens=many)),
        (DtypeError, "int32", lambda: table.export(CSR, one, seq_lens=one, first_tokens=array([0], "int64"))),
        (ArgumentError, "capacity", lambda: table.create_export(CSR, max_batch=8)),
        (ArgumentError, "max_batch", lambda: table.create_export(TABLE, max_batch=0)),
        (ArgumentError, "max_num_reqs", lambda: table.export(CSR, many, seq_lens=many)),
        (ArgumentError, "max_batch", lambda: table.export(CSR, starts, seq_lens=starts, out=narrow)),
        (ArgumentError, "max_batch", lambda: table.export(CSR, many, seq_lens=many, num_reqs_padded=7, out=wide)),
        (ArgumentError, "ring", lambda: table.export(RING, one, seq_lens=one)),
        (DtypeError, "seq_lens", lambda: table.export(RING, one, groups=1)),
        (DtypeError, "query_start_loc", lambda: table.export(TOKEN_REQUESTS, one)),
        (ArgumentError, "token_requests", lambda: table.export(CSR, one, seq_lens=one, query_start_loc=starts)),
        (ArgumentError, "token_requests", lambda: table.export(CSR, one, seq_lens=one, num_tokens_padded=1)),
        (
            ArgumentError,
            "num_tokens_padded",
            lambda: table.export(TOKEN_REQUESTS, one, query_start_loc=starts, num_tokens_padded=17),
        ),
        (ConfigError, "CSR is int32", lambda: layout("csr", dtype="int64")),
        (ConfigError, "null", lambda: layout("block_requests")),
    ]
    for index, (error, word, call) in enumerate(refused):
        launches = subject_once.call_log.launches
        with must_raise(error, "R34, R35", f"wrong argument {index}") as raised:
            call()
        check(word in raised.message, "R34, R35", f"refusal {index} must name {word!r}: {raised.message}")
        check(subject_once.call_log.launches - launches <= 1, "R34, R35", f"wrong argument {index} was exported.")


def test_the_refusal_of_a_token_csr_names_its_capacity(subject_once: Subject) -> None:
    """A token-level CSR of any batch may be too large; the sentence says what a capacity counts.

    Rules: R28.
    """
    table = make(subject_once, KVCacheGroup(block_size=2**20, num_blocks=2048), width=2048).table
    with must_raise(ArgumentError, "R28", "a token CSR without capacity") as raised:
        table.create_export("token_csr")
    for word in ("capacity", "tokens of your largest batch", "out="):
        check(word in raised.message, "R28", f"the refusal must say {word!r}: {raised.message}")


# Rings and requests (R35).


def test_a_ring_over_true_positions(subject_once: Subject) -> None:
    """A ring of 3 columns repeats; what it has overwritten, and what a window leaves, is not there.

    Rules: R35.
    """
    group = KVCacheGroup(block_size=4, slot_mode="ring", blocks_per_row=3, sliding_window=6, num_blocks=30)
    pair = make(subject_once, group, rows=[[5, 9, 7], [4], []], max_model_len=32)
    pair.commit()
    host = subject_once.to_host
    export = ExportPair(pair, RING_OF_MINUS_1)
    result = export.run([0, 1, 0, 2], [10, 3, 25, 9])
    rows = host(result.entries[0])
    check_values(rows[0][:5], [5, 9, 7, -1, -1], "R35", "a ring before its first turn")
    check_values(rows[1][:2], [4, -1], "R35", "a short ring")
    check_values(rows[2][:8], [-1, -1, -1, 5, 9, 7, 5, -1], "R35", "a ring after two turns")
    check_values(rows[3], [-1] * len(rows[3]), "R35", "an empty ring")
    result = export.run([0, 1, -1], [25, 9, 7], num_computed_tokens=[24, 2, 3], num_reqs_padded=4)
    check_values(host(result.entries[0])[0][:8], [-1, -1, -1, -1, 9, 7, 5, -1], "R35", "a ring cut to its window")
    for lengths in ([12, 13, 31, 33], [0, -1, INT32_MAX, INT32_MIN], [4, 8, 24, 1]):
        for computed in (None, [11, 12, 30, 0], GARBAGE[:4]):
            for wanted in (RING, RING_OF_MINUS_1):
                ExportPair(pair, wanted).run([0, 0, 1, 2], lengths, num_computed_tokens=computed)


def test_rings_of_two_groups(subject_once: Subject) -> None:
    """Rings of different fill turn each in its own columns; a row that is empty in one group is the fill in both.

    Rules: R25.15, R35.
    """
    group = KVCacheGroup(block_size=8, kernel_block_size=4, slot_mode="ring", blocks_per_row=3, num_blocks=30)
    pair = make(subject_once, group, group, rows=[[[5, 6], [7, 8, 9]], [[3], []]], max_model_len=64)
    pair.commit()
    export = ExportPair(pair, RING, (1, 0))
    export.run([0, 1, 0], [40, 8, 5])
    export.run([1, 0], [64, 64])


def test_requests_of_tokens_by_hand(subject_once: Subject) -> None:
    """Two requests padded to four, three tokens to six; then fewer, a padding entry, empty requests and a late start.

    Rules: R35.
    """
    pair = three_rows(subject_once, FULL)
    host = subject_once.to_host
    export = ExportPair(pair, LAYOUTS["token_requests"])
    result = export.run([0, 1], query_start_loc=[0, 2, 3], num_reqs_padded=4, num_tokens_padded=6)
    check_values(host(result.entries[0]), [0, 0, 1, -1, -1, -1], "R35", "the requests")
    check_values(host(result.indptr), [0, 2, 3, 3, 3], "R35", "the starts")
    export.run([0, -1, 2, 1], query_start_loc=[1, 3, 6, 6, 16])
    export.run([2, 1, 0], query_start_loc=[0, 1, 2, 3], num_reqs_padded=4)
    export.run([], query_start_loc=[0], num_reqs_padded=4, num_tokens_padded=0)
    export.run(None, num_reqs=2, query_start_loc=[0, 1, 5])
    small = ExportPair(pair, TOKEN_REQUESTS, (0,), capacity=5, max_batch=9)
    small.run([0, 1] * 4, query_start_loc=[0, 1, 1, 2, 2, 3, 3, 4, 5])
    with must_raise(ArgumentError, "R35", "more tokens than the set holds"):
        pair.table.export(
            TOKEN_REQUESTS, np.array([0], np.int32), query_start_loc=np.array([0, 6], np.int32), out=small.out
        )


def test_garbage_starts_write_nothing_outside(subject_once: Subject) -> None:
    """A `query_start_loc` of garbage gives unspecified requests, inside the arrays, each one of the batch or -1.

    Rules: R25.17, R35.
    """
    pair = three_rows(subject_once, FULL)
    export, array = ExportPair(pair, TOKEN_REQUESTS), subject_once.device_array
    for shift in range(6):
        starts = [*(GARBAGE[shift:] + GARBAGE[:shift])[:4], 9]  # an end that fits, or host arrays would be refused
        result = pair.table.export(
            TOKEN_REQUESTS, array([0, 1, 2, 3], "int32"), query_start_loc=array(starts, "int32"), out=export.out
        )
        clipped = np.clip(starts, 0, export.out.capacity).tolist()
        check_values(subject_once.to_host(result.indptr), clipped, "R35", "the starts")
        requests = subject_once.to_host(result.entries[0])
        check(bool(((requests >= -1) & (requests < 4)).all()), "R35", f"the requests are {requests.tolist()}.")
    pair.check_device()
    export.run([0], query_start_loc=[0, 3])


def test_requests_of_blocks(subject_once: Subject) -> None:
    """They lie beside the indices of the same batch's CSR, of parts too.

    Rules: R27, R35.
    """
    pair = three_rows(subject_once, FULL)
    host = subject_once.to_host
    export = ExportPair(pair, LAYOUTS["block_requests"], capacity=12, max_batch=6)
    result = export.run([2, 0, -1, 1, 0], [5, 12, 9, 4, 12])
    check_values(host(result.entries[0])[:10], [0, 0, 1, 1, 1, 3, 4, 4, 4, -1], "R35", "the requests")
    result = export.run([0, 0], [12, 12], first_tokens=[8, 4])
    check_values(host(result.entries[0])[:4], [0, 1, 1, -1], "R35", "the requests of parts")
    ExportPair(pair, BLOCK_REQUESTS, capacity=4).run([1, 2, 0, 1], [3, 6, 9, 1])


# Slots of any positions (R36).


def check_positions(
    pair: Pair, rows: Sequence[int], group: int, positions: Sequence[Sequence[int]], dtype: str | None = None
) -> HostArray:
    """Map positions on the table and compare with the oracle. dtype: of an output of the caller's; None: a new one."""
    array, out = pair.subject.device_array, None
    given = np.array(positions, np.int32).reshape(len(rows), len(positions[0]) if positions else 3)
    if dtype is not None:
        out = array(np.full(given.shape, 77), dtype)
    result = pair.table.map_positions(array(rows, "int32"), group, array(given, "int32"), out=out)
    check(out is None or result is out, "R36", "out must be returned.")
    got = pair.subject.to_host(result)
    wanted = np.array(pair.oracle.positions(rows, group, given.tolist()), np.int64).reshape(given.shape)
    expected_dtype = pair.config.slot_dtype if dtype is None else dtype
    check(got.dtype == expected_dtype and got.shape == given.shape, "R36", f"got {got.dtype} of shape {got.shape}.")
    check(np.array_equal(got, wanted), "R36", f"group {group} must give {wanted.tolist()}, got {got.tolist()}.")
    return got


@pytest.mark.parametrize("dtype", [None, "int32", "int64"])
def test_positions_by_hand(subject_once: Subject, dtype: str | None) -> None:
    """Two rows and a padding entry, positions in any order and past the row.

    Rules: R36.
    """
    pair = make(subject_once, replace(FULL, pad_slot_id=-5), rows=[[9, 5], [7]])
    pair.commit()
    got = check_positions(pair, [0, 1, -1], 0, [[6, 0, -1, 99], [1, 3, -1, -1], [0, 1, 2, 3]], dtype)
    check_values(got.ravel(), [22, 36, -1, -1, 29, 31, -1, -1, *[-1] * 4], "R36", "the slots")
    check_positions(pair, [1, 0] * 40, 0, [[index % 9] for index in range(80)], dtype)
    check_positions(pair, [INT32_MIN, INT32_MAX, 4, 3], 0, [[0, 4], [0, 4], [0, 4], [0, 4]], dtype)
    check_positions(pair, [0], 0, [GARBAGE], dtype)
    check_positions(pair, [], 0, [], dtype)
    pair.do("set_row", 1, [3])
    check_positions(pair, [1], 0, [[0]], dtype)


def test_positions_of_every_mode(subject_once: Subject) -> None:
    """Rings, cross groups, holes and no null block: as a token's slot, and -1 where that is PAD.

    Rules: R12, R13, R14, R36.
    """
    ring = KVCacheGroup(block_size=4, slot_mode="ring", blocks_per_row=2, num_blocks=20)
    cross = KVCacheGroup(block_size=4, slot_mode="cross", num_blocks=20)
    holes = KVCacheGroup(block_size=4, null_is_pad=True, num_blocks=20, pad_slot_id=2)
    pair = make(subject_once, ring, cross, holes, replace(FULL, null_block_id=-1), FULL)
    pair.do("set_row", 0, [[5, 6], [7, 8], [9, 10], [0, 11], [12, 13]])
    for group in (1, 2, 3, 4):
        pair.do("null_range", 0, group, 0, 1)
    pair.commit()
    for group in range(5):
        check_positions(pair, [0, 1, 2], group, [[0, 3, 4, 9, 12, -1, INT32_MAX]] * 3, "int64")


@pytest.mark.parametrize("rank", [0, 1])
def test_positions_of_one_rank(subject_once: Subject, rank: int) -> None:
    """Two ranks share the tokens, two in turn: each has the slots of its own, and -1 for the other's.

    Rules: R12, R18, R36.
    """
    pair = make(subject_once, FULL, context_parallel=shard(2, rank, 2), rows=[[5, 6]])
    pair.commit()
    got = check_positions(pair, [0], 0, [[0, 1, 2, 3, 4, 9, 14, 16]])
    wanted = [[20, 21, -1, -1, 22, 25, -1, -1], [-1, -1, 20, 21, -1, -1, 26, -1]][rank]
    check_values(got[0], wanted, "R36", f"the slots of rank {rank}")


def test_refusals_of_positions(subject_once: Subject) -> None:
    """Groups without slots, wrong shapes and dtypes, slots that int32 cannot hold: nothing is launched.

    Rules: R36.
    """
    state = KVCacheGroup(block_size=4, slot_mode="none", blocks_per_row=2)
    pair = make(subject_once, FULL, state, KVCacheGroup(block_size=4))
    table, array = pair.table, subject_once.device_array
    square = np.array([[0, 1], [2, 3]])
    rows, positions, out = array([0, 1], "int32"), array(square, "int32"), array(square, "int32")
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ArgumentError, "slot_mode", lambda: table.map_positions(rows, 1, positions)),
        (ArgumentError, "group", lambda: table.map_positions(rows, 3, positions)),
        (DtypeError, "rows", lambda: table.map_positions(array([0, 1], "int64"), 0, positions)),
        (DtypeError, "positions", lambda: table.map_positions(rows, 0, array(square, "int64"))),
        (ArgumentError, "positions", lambda: table.map_positions(rows, 0, rows)),
        (ArgumentError, "positions", lambda: table.map_positions(array([0], "int32"), 0, positions)),
        (ArgumentError, "out", lambda: table.map_positions(rows, 0, positions, out=array(square[:1], "int32"))),
        (DtypeError, "int64", lambda: table.map_positions(rows, 2, positions, out=out)),
    ]
    for index, (error, word, call) in enumerate(refused):
        launches = subject_once.call_log.launches
        with must_raise(error, "R36", f"wrong argument {index}") as raised:
            call()
        check(word in raised.message, "R36", f"refusal {index} must name {word!r}: {raised.message}")
        check(subject_once.call_log.launches - launches <= 1, "R36", f"wrong argument {index} was mapped.")
    check_values(subject_once.to_host(out).ravel(), [0, 1, 2, 3], "R36", "the output of a refused call")


def filled_pair(subject: Subject, data: st.DataObject, config: BlockTableConfig) -> Pair:
    """Return a table of random rows, committed."""
    pair = Pair(subject, config)
    pair.do("set_rows", *data.draw(bulk_calls(pair.oracle, list(range(config.num_rows)), replace=True, fit=True)))
    pair.commit()
    return pair


@given(data=st.data(), config=configs())
def test_positions_equal_the_oracle(subject_once: Subject, data: st.DataObject, config: BlockTableConfig) -> None:
    """Any rows and positions of any group with slots.

    Rules: R12, R13, R14, R18, R36.
    """
    pair = filled_pair(subject_once, data, config)
    rows = data.draw(
        st.lists(st.sampled_from([-1, *range(config.num_rows), INT32_MAX]), max_size=2 * config.max_num_reqs)
    )
    first, stride = data.draw(st.integers(-2, 40)), data.draw(st.integers(0, 9))
    positions = [[first + stride * (3 * token + place) for place in range(3)] for token in range(len(rows))]
    for group, shape in enumerate(pair.oracle.shapes):
        if shape.slot_mode != "none":
            check_positions(pair, rows, group, positions)
