"""Exports: the layouts that attention kernels read, in numbers worked out by hand, over garbage, and as properties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from blocktable import (
    LAYOUTS,
    ArgumentError,
    BlockTableConfig,
    BlockTableError,
    ConfigError,
    DtypeError,
    KVCacheGroup,
    Layout,
    UnsupportedError,
)
from blocktable.backend import Writes
from blocktable.exports import RING_AND_REQUEST_KINDS
from blocktable_conformance import profiles
from blocktable_conformance.asserts import check, check_values, must_raise
from blocktable_conformance.cases import make, shard
from blocktable_conformance.exports import ARRAYS, RULES, ExportPair
from blocktable_conformance.oracle import Geometry
from blocktable_conformance.pair import Pair
from blocktable_conformance.strategies import INT32_MAX, INT32_MIN, BatchDraw, batches, bulk_calls, configs
from blocktable_conformance.subject import Subject, address
from blocktable_conformance.test_stateful import TableHistory


def layout(kind: Any, **fields: Any) -> Layout:
    """Return a layout without rules on block sizes."""
    return Layout(name=f"test_{kind}", consumer="this suite", kind=kind, **fields)


TABLE = layout("table")
MISSING_IS_MINUS_1 = layout("table", dtype="int64", null=-1)
WIDE = layout("table", width_tokens=96)
EXACT = layout("table", exact_width=True)
SCALED = layout("table", entry_scale=3)
KV = layout("kv_offsets", shape=("B", "2", "M"), entry_scale=2, value_offset=1)
CSR = layout("csr", shape=("n",))
TOKEN_CSR = layout("token_csr", shape=("n",))
LENGTHS = layout("lengths", shape=("B",))
INVERSE_MAP = layout("inverse_map", shape=("B", "N"), null=-1)
FIRST_STATE = layout("state", shape=("B",), null=-1)
LAST_STATES = layout("state", shape=("B", "S"), null=-1, state_columns="last", num_columns=2)
ALIGNED_STATES = layout("state", shape=("B", "S"), state_columns="aligned", num_columns=3, dtype="int64")
STATE = LAYOUTS["state"]
PLACEHOLDER = layout("placeholder", shape=("B", "1"))

VARIANTS = [TABLE, MISSING_IS_MINUS_1, WIDE, EXACT, SCALED, KV, CSR, TOKEN_CSR, LENGTHS, INVERSE_MAP, FIRST_STATE]
VARIANTS += [LAST_STATES, ALIGNED_STATES, PLACEHOLDER]

FULL = KVCacheGroup(block_size=4, num_blocks=40)


@pytest.fixture(autouse=True)
def exporting(request: pytest.FixtureRequest) -> None:
    """Skip tests of exports for a backend that does not declare them, and the one of the refusal for one that does."""
    found: Subject = request.getfixturevalue("subject" if "subject" in request.fixturenames else "subject_once")
    if found.declares("exports") == ("undeclared" in request.node.name):
        pytest.skip(f"{found.label} {'declares' if found.declares('exports') else 'does not declare'} exports")


def three_rows(subject: Subject, *groups: KVCacheGroup, **options: Any) -> Pair:
    """Return a committed table of four rows of 3, 1, 2 and 0 blocks in every group."""
    pair = make(subject, *groups, **options)
    for row, number in enumerate((3, 1, 2)):
        pair.do("set_row", row, [[10 + 4 * row + 3 * group + i for i in range(number)] for group in range(len(groups))])
    counts = pair.table.num_blocks_per_row[:, :3].tolist()
    assert counts == [[3, 1, 2]] * len(groups), "a row does not fit: the case would look at empty rows"
    pair.commit()
    return pair


# Refusals.


def test_undeclared_exports_are_refused(subject_once: Subject) -> None:
    """Without `exports` both calls raise UnsupportedError, and nothing is launched.

    Rules: R25.1.
    """
    table = make(subject_once, FULL).table
    mapping = subject_once.device_array([0], "int32")
    launches = subject_once.call_log.launches
    calls: list[Callable[[], Any]] = [
        lambda: table.create_export("flash_attention_3"),
        lambda: table.export("flash_attention_3", mapping),
    ]
    for call in calls:
        with must_raise(UnsupportedError, "R25.1", "an export") as raised:
            call()
        check("exports" in raised.message, "R25.1", f"the refusal must name the capability: {raised.message}")
    check(subject_once.call_log.launches == launches, "R25.1", "something was launched before the refusal.")


def test_bad_arguments_are_refused_before_any_launch(subject_once: Subject) -> None:
    """Each wrong argument raises its error; nothing is launched and no buffer changes.

    Rules: R10.4, R25.2, R25.9, R25.15, R25.18, R27, R28, R29, R30, R31.
    """
    state = KVCacheGroup(block_size=4, slot_mode="none", blocks_per_row=2)
    unknown, zero = KVCacheGroup(block_size=4), KVCacheGroup(block_size=4, num_blocks=20)
    half = KVCacheGroup(block_size=4, kernel_block_size=2, num_blocks=20)
    pair = make(subject_once, FULL, state, unknown, zero, half)
    table, array = pair.table, subject_once.device_array
    csr, other = ExportPair(pair, CSR), make(subject_once, FULL).table.create_export(CSR)
    one, two, wide = array([0], "int32"), array([3, 3], "int32"), array([0], "int64")
    no_layout: Any = "no_such_layout"
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ConfigError, "R25.2", lambda: table.export(no_layout, one)),
        (ConfigError, "R25.18", lambda: table.create_export("flash_mla")),
        (ConfigError, "R25.18", lambda: table.export("flash_mla", one)),
        (ConfigError, "R25.18", lambda: table.export("cutlass_mla", one)),
        (DtypeError, "R27", lambda: table.export(CSR, one)),
        (DtypeError, "R30", lambda: table.export(INVERSE_MAP, one)),
        (DtypeError, "R31", lambda: table.export(ALIGNED_STATES, one, groups=1)),
        (DtypeError, "R27", lambda: table.export(CSR, one, seq_lens=wide)),
        (ArgumentError, "R27", lambda: table.export(CSR, one, seq_lens=two)),
        (ArgumentError, "R27", lambda: table.export(CSR, None, seq_lens=one, num_reqs=2)),
        (ArgumentError, "R10.4", lambda: table.export(CSR, one, seq_lens=one, num_reqs_padded=5)),
        (ArgumentError, "R25.15", lambda: table.export(CSR, one, seq_lens=one, groups=())),
        (ArgumentError, "R25.15", lambda: table.export(CSR, one, seq_lens=one, groups=(0, 0))),
        (ArgumentError, "R25.15", lambda: table.export(CSR, one, seq_lens=one, groups=5)),
        (ArgumentError, "R25.15", lambda: table.export(CSR, one, seq_lens=one, groups=-1)),
        (DtypeError, "R25.15", lambda: table.export(CSR, one, seq_lens=one, groups=True)),
        (ArgumentError, "R25.15", lambda: table.export(CSR, one, seq_lens=one, groups=(0, 4))),
        (ArgumentError, "R25.18", lambda: table.export(CSR, one, seq_lens=one, groups=1)),
        (ArgumentError, "R28", lambda: table.export(TOKEN_CSR, one, seq_lens=one, groups=2)),
        (ArgumentError, "R30", lambda: table.export(INVERSE_MAP, one, seq_lens=one, groups=2)),
        (ArgumentError, "R29", lambda: table.export(KV, one, groups=2)),
        (ArgumentError, "R31", lambda: table.export(FIRST_STATE, one, groups=4)),
        (ArgumentError, "R27", lambda: table.create_export(TABLE, capacity=4)),
        (ArgumentError, "R27", lambda: table.create_export(CSR, capacity=0)),
        (ArgumentError, "R27", lambda: table.create_export(CSR, capacity=2**31)),
        (ArgumentError, "R25.9", lambda: table.export(CSR, one, seq_lens=one, out=other)),
        (ArgumentError, "R25.9", lambda: table.export(TOKEN_CSR, one, seq_lens=one, out=csr.out)),
        (ArgumentError, "R25.9", lambda: table.export(CSR, one, seq_lens=one, groups=4, out=csr.out)),
    ]
    for index, (error, rules, call) in enumerate(refused):
        launches = subject_once.call_log.launches
        with must_raise(error, rules, f"wrong argument {index}"):
            call()
        check(subject_once.call_log.launches - launches <= 1, rules, f"wrong argument {index} was exported.")
    csr.check_written([])


def test_entries_of_32_bits(subject_once: Subject) -> None:
    """A cache whose K and V entries, or slots, need 32 bits is refused; one block fewer is taken.

    Rules: R28, R29.
    """
    for num_blocks, is_allowed in ((2**28, True), (2**28 + 1, False)):
        table = make(subject_once, KVCacheGroup(block_size=8, num_blocks=num_blocks)).table
        wide = replace(KV, entry_scale=8, value_offset=7)
        for wanted in (TOKEN_CSR, wide):
            if is_allowed:
                table.create_export(wanted)
                continue
            with must_raise(ArgumentError, RULES[wanted.kind], f"{wanted.kind} of {num_blocks} blocks"):
                table.create_export(wanted)
    pair = make(subject_once, KVCacheGroup(block_size=8, num_blocks=2**28), rows=[[2**28 - 1]])
    pair.commit()
    export = ExportPair(pair, wide).run([0])
    last = subject_once.to_host(export.entries[0])[0, :, 0]
    check_values(last, [2**31 - 8, 2**31 - 1], "R29", "the entries of the last block")
    slots = ExportPair(pair, TOKEN_CSR).run([0], [8])
    check_values(subject_once.to_host(slots.entries[0])[7:8], [2**31 - 1], "R28", "the last slot")


# By hand.


def test_csr_by_hand(subject_once: Subject) -> None:
    """Rows of 3, 1, 2 and 0 blocks of 4 tokens: lengths on both sides of a block's edge, padding, an empty request.

    Rules: R25.13, R27.
    """
    export = ExportPair(three_rows(subject_once, FULL), CSR)
    result = export.run([2, 0, -1, 1], [5, 12, 9, 4])
    host = subject_once.to_host
    check_values(host(result.indptr), [0, 2, 5, 5, 6], "R27", "indptr")
    check_values(host(result.entries[0])[:8], [18, 19, 10, 11, 12, 14, 0, 0], "R27", "the indices")
    check_values(host(result.last_page_lens), [1, 4, 0, 4], "R27", "last_page_lens")
    check_values(host(result.lengths), [5, 12, 0, 4], "R27", "lengths")
    result = export.run([0, 3], [4, 7], num_reqs_padded=4)
    check_values(host(result.indptr), [0, 1, 1, 1, 1], "R27", "indptr")
    check_values(host(result.entries[0])[:6], [10, 0, 0, 0, 0, 0], "R25.13", "the indices after a larger batch")
    check_values(host(result.last_page_lens), [4, 0, 0, 0], "R27", "last_page_lens")
    export.run([0, 1, 2], [0, -3, INT32_MIN])
    export.run(None, [1, 2, 3])
    export.run([], [])


def test_lengths_past_what_a_row_holds_are_cut(subject_once: Subject) -> None:
    """A length above the filled columns is cut to them and the last block counts as full; nothing after them is read.

    Rules: R27, R28.
    """
    pair = three_rows(subject_once, FULL)
    result = ExportPair(pair, CSR).run([1, 0, 3], [6, INT32_MAX, 1])
    host = subject_once.to_host
    check_values(host(result.indptr), [0, 1, 4, 4], "R27", "indptr")
    check_values(host(result.last_page_lens), [4, 4, 0], "R27", "last_page_lens")
    check_values(host(result.lengths), [6, INT32_MAX, 1], "R27", "lengths")
    tokens = ExportPair(pair, TOKEN_CSR).run([1, 0, 3], [6, INT32_MAX, 1])
    check_values(host(tokens.indptr), [0, 4, 16, 16], "R28", "indptr")
    check_values(host(tokens.entries[0])[:5], [56, 57, 58, 59, 40], "R28", "the slots")
    check_values(host(tokens.last_page_lens), [1, 1, 0], "R28", "last_page_lens")


def test_a_small_capacity_cuts_the_running_sum(subject_once: Subject) -> None:
    """With room for four entries the third request is cut, and the fourth has none; host arrays are refused.

    Rules: R27, R28.
    """
    pair = three_rows(subject_once, FULL)
    for capacity in (1, 4, 5):
        ExportPair(pair, CSR, capacity=capacity).run([1, 2, 0, 1], [3, 6, 9, 1])
        ExportPair(pair, TOKEN_CSR, capacity=capacity).run([1, 2, 0, 1], [3, 6, 9, 1])
    export = ExportPair(pair, CSR, capacity=4)
    result = export.run([1, 2, 0, 1], [3, 6, 9, 1])
    if result is None:
        return
    host = subject_once.to_host
    check_values(host(export.out.num_cut), [3], "R27", "num_cut")
    check_values(host(result.indptr), [0, 1, 3, 4, 4], "R27", "indptr")
    check_values(host(result.last_page_lens), [3, 2, 4, 0], "R27", "last_page_lens")


def test_sums_of_more_than_31_bits(subject_once: Subject) -> None:
    """Blocks of a million tokens: a row holds more than 2**31, and so do the requests together; room is for five.

    Rules: R27, R28.
    """
    group = KVCacheGroup(block_size=2**20, num_blocks=2048)
    pair = make(subject_once, group, width=2100)
    pair.do("set_row", 0, [1 + index % 2047 for index in range(2100)])
    pair.do("set_row", 1, [9])
    pair.commit()
    for wanted, indptr in ((TOKEN_CSR, [0, 2, 5, 5, 5]), (CSR, [0, 1, 5, 5, 5])):
        export = ExportPair(pair, wanted, capacity=5)
        result = export.run([1, 0, 0, 0], [2, INT32_MAX, INT32_MAX, INT32_MAX])
        if result is not None:
            check_values(subject_once.to_host(result.indptr), indptr, RULES[wanted.kind], "indptr")
        export.run([0, 0, 0, 1], [INT32_MAX] * 4)
    ExportPair(pair, CSR).run([0, 1, 0, 0], [INT32_MAX] * 4)


@pytest.mark.parametrize("rank", [0, 1])
def test_csr_of_one_rank(subject_once: Subject, rank: int) -> None:
    """Two ranks share the tokens, two in turn: each exports its own lengths and slots.

    Rules: R19, R27, R28.
    """
    pair = make(subject_once, FULL, context_parallel=shard(2, rank, 2), rows=[[5, 6], [7]])
    pair.commit()
    result = ExportPair(pair, CSR).run([0, 1], [11, 3])
    host = subject_once.to_host
    check_values(host(result.lengths), [[6, 2], [5, 1]][rank], "R27", "lengths")
    check_values(host(result.last_page_lens), [[2, 2], [1, 1]][rank], "R27", "last_page_lens")
    tokens = ExportPair(pair, TOKEN_CSR).run([0, 1], [11, 3])
    slots = host(tokens.entries[0])[: host(tokens.indptr)[-1]].tolist()
    positions = [*range(11), *range(3)]
    mapped = pair.compute([0, 1], [0, 11, 14], positions)[0]
    wanted = [slot for slot in mapped[:14].tolist() if slot >= 0]
    check(slots == wanted, "R28", f"the slots of rank {rank} must be {wanted}, got {slots}.")
    ExportPair(pair, LENGTHS).run([1, 0, -1], [INT32_MAX, 8, 4])


def test_tables_by_hand(subject_once: Subject) -> None:
    """-1 for every missing block, int64; a width of its own; scaled entries.

    Rules: R26.
    """
    pair = three_rows(subject_once, KVCacheGroup(block_size=8, kernel_block_size=4, num_blocks=30), width=3)
    pair.do("null_range", 0, 0, 1, 2)
    pair.commit()
    host = subject_once.to_host
    missing = host(ExportPair(pair, MISSING_IS_MINUS_1).run([0, -1, 1]).entries[0])
    check_values(missing[0], [20, 21, -1, -1, 24, 25], "R26", "the row with a block that became NULL")
    check_values(missing[1], [-1] * 6, "R26", "the row of a padding entry")
    check_values(missing[2], [28, 29, -1, -1, -1, -1], "R26", "a shorter row")
    wide = ExportPair(pair, WIDE)
    check(wide.out.width == 24, "R26", f"a multiple of 96 tokens takes 24 columns, got {wide.out.width}.")
    for idx_mapping in ([0, 1, 2, 3], [1], [], [2, 0]):
        wide.run(idx_mapping)
        ExportPair(pair, SCALED).run(idx_mapping)
    exact = make(subject_once, KVCacheGroup(block_size=8, kernel_block_size=4), rows=[[1, 2, 3]], max_model_len=17)
    exact.commit()
    narrow = ExportPair(exact, EXACT)
    check(narrow.out.width == 5, "R26", f"17 tokens take just 5 columns, got {narrow.out.width}.")
    check_values(host(narrow.run([0]).entries[0])[0], [2, 3, 4, 5, 6], "R26", "a row cut to the exact width")


def test_null_is_all_kernel_blocks_of_block_0(subject_once: Subject) -> None:
    """A 0 that the engine hands in for an evicted block is missing in all its columns, in tables and in maps.

    Rules: R7, R26, R30.
    """
    group = KVCacheGroup(block_size=8, kernel_block_size=4, num_blocks=20, allow_null=True)
    pair = make(subject_once, group, rows=[[5, 0, 7], [0]], width=3)
    pair.commit()
    got = subject_once.to_host(ExportPair(pair, MISSING_IS_MINUS_1).run([0, 1]).entries[0])
    check_values(got[0], [10, 11, -1, -1, 14, 15], "R26", "the row with block 0")
    check_values(got[1], [-1] * 6, "R26", "the row of block 0 alone")
    got = subject_once.to_host(ExportPair(pair, INVERSE_MAP).run([0, 1], [24, 8]).entries[0])
    check_values(np.flatnonzero(got[0] >= 0), [10, 11, 14, 15], "R30", "the blocks in the map")
    check(bool((got[1] == -1).all()), "R30", "block 0 must not be mapped.")
    check_values(
        subject_once.to_host(ExportPair(pair, TABLE).run([0]).entries[0])[0], [10, 11, 0, 0, 14, 15], "R7", "row"
    )


@pytest.mark.parametrize("null", [-1, 5])
def test_block_0_is_real_where_another_block_is_null(subject_once: Subject, null: int) -> None:
    """Block 0 that is given out is exported like any other, and the group's own null is missing.

    Rules: R5, R25.7, R26, R27, R30, R31.
    """
    group = KVCacheGroup(block_size=4, num_blocks=20, null_block_id=null, allow_null=True)
    state = replace(group, slot_mode="none", blocks_per_row=3)
    pair = make(subject_once, group, state, rows=[[[0, null, 7], [0, null]], [[3, 0], [null]]], width=3)
    pair.commit()
    host = subject_once.to_host
    got = host(ExportPair(pair, MISSING_IS_MINUS_1).run([0, 1]).entries[0]).tolist()
    check(got == [[0, -1, 7], [3, 0, -1]], "R26", f"the table with -1 is {got}.")
    fill = max(null, 0)
    got = host(ExportPair(pair, SCALED).run([0, 1]).entries[0]).tolist()
    check(got == [[0, 3 * fill, 21], [9, 0, 3 * fill]], "R25.7, R26", f"the scaled table is {got}.")
    got = host(ExportPair(pair, CSR).run([0, 1], [12, 8]).entries[0])
    check_values(got[:6], [0, fill, 7, 3, 0, fill], "R25.7, R27", "the indices")
    got = host(ExportPair(pair, INVERSE_MAP).run([0, 1], [12, 8]).entries[0])
    check_values(got[:, 0], [0, 1], "R30", "the columns of block 0")
    got = host(ExportPair(pair, FIRST_STATE, (1,)).run([0, 1]).entries[0])
    check_values(got, [0, -1], "R31", "the states")
    ExportPair(pair, TOKEN_CSR).run([1, 0], [8, 12])
    ExportPair(pair, KV).run([1, 0])


def test_another_batch_than_the_gathered_one_is_refused(subject_once: Subject) -> None:
    """The batch table that was gathered is handed out, and not for another row. Cases: W5. Rules: R26."""
    pair = three_rows(subject_once, KVCacheGroup(block_size=16))
    zero, one = (subject_once.device_array([row], "int32") for row in (0, 1))
    pair.table.gather(zero)
    pair.table.export("flash_attention_3", zero)
    with must_raise(ArgumentError, "R26", "an export of another row"):
        pair.table.export("flash_attention_3", one)


def test_a_table_that_fits_is_the_batch_table(subject: Subject) -> None:
    """Nothing is launched or copied where the batch table is what the layout asks for; other sets have their own.

    Rules: R25.10, R26.
    """
    pair = three_rows(subject, *[KVCacheGroup(block_size=16, num_blocks=40)] * 2)
    more = pair.table.create_buffers()
    mapping = subject.device_array([2, 0], "int32")
    for out in (more, None):
        pair.table.gather(mapping, 3, out=out)
    launches = subject.call_log.launches
    first = pair.table.export("flash_attention_3", mapping, groups=(0, 1), num_reqs_padded=3)
    flat = pair.table.export("tpu_ragged", mapping, groups=1, num_reqs_padded=3)
    other = pair.table.export("triton_unified", mapping, out=more)
    shaped = pair.table.export("cudnn", mapping)
    check(subject.call_log.launches == launches, "R26", "a table that is there already was written again.")
    for group, entries in enumerate(first.entries):
        same = address(entries) == address(pair.table.buffers.block_tables[group])
        check(same and tuple(entries.shape) == (3, 4), "R26", f"group {group} must be the batch table itself.")
    check(address(other.entries[0]) == address(more.block_tables[0]), "R26", "out= must choose the batch table.")
    again = pair.table.export("flash_attention_3", mapping, groups=(0, 1), num_reqs_padded=3)
    check(again is first, "R25.10", "a steady export must return the same object.")
    check(tuple(flat.entries[0].shape) == (12,), "R26", f"the flat table has shape {flat.entries[0].shape}.")
    check(tuple(shaped.entries[0].shape) == (2, 1, 4, 1), "R26", f"cuDNN's has shape {shaped.entries[0].shape}.")
    for unlike in (MISSING_IS_MINUS_1, WIDE, SCALED):
        copy = pair.table.export(unlike, mapping).entries[0]
        apart = address(copy) != address(pair.table.buffers.block_tables[0])
        is_like = unlike is not MISSING_IS_MINUS_1 or subject.to_host(copy)[1].tolist() == [10, 11, 12, -1]
        check(apart and is_like, "R26", f"{unlike} is not the batch table, and holds {subject.to_host(copy).tolist()}.")
    own = pair.table.export("flash_attention_3", None, num_reqs=3)
    check(address(own.entries[0]) == address(pair.table.device_table(0)), "R26", "the identity is the table itself.")


def test_kv_offsets_by_hand(subject_once: Subject) -> None:
    """K entries are doubled ids, V entries one more; both are 0 after the row.

    Rules: R29.
    """
    pair = three_rows(subject_once, FULL)
    export = ExportPair(pair, KV)
    result = export.run([1, 0], num_reqs_padded=3)
    got = subject_once.to_host(result.entries[0])
    check_values(got[0, 0], [28, 0, 0, 0], "R29", "the K entries")
    check_values(got[0, 1], [29, 0, 0, 0], "R29", "the V entries")
    check_values(got[1, 1], [21, 23, 25, 0], "R29", "the V entries")
    export.run([3, 1])
    export.run([0])


def test_inverse_map_by_hand(subject_once: Subject) -> None:
    """Blocks to columns, as far as the sequence goes; NULL and unknown blocks are never there; a repeat is the last.

    Rules: R30.
    """
    group = KVCacheGroup(block_size=4, num_blocks=20, allow_null=True)
    pair = make(subject_once, group, rows=[[3, 5, 9], [5, 5, 2], [7, 0, 8]])
    pair.commit()
    export = ExportPair(pair, INVERSE_MAP)
    got = subject_once.to_host(export.run([0, 1, 2, -1], [9, 12, 12, 5]).entries[0])
    check_values(np.flatnonzero(got[0] >= 0), [3, 5, 9], "R30", "the blocks of the first request")
    check_values(got[1, [5, 2, 0]], [1, 2, -1], "R30", "the columns of blocks 5, 2 and 0")
    check_values(got[2, [7, 0, 8]], [0, -1, 2], "R30", "the columns of blocks 7, 0 and 8")
    check(bool((got[3] == -1).all()), "R30", "a padding entry's map must be empty.")
    got = subject_once.to_host(export.run([1, 0], [4, 5]).entries[0])
    check_values(got[0, [5, 2, 3]], [0, -1, -1], "R30", "the columns after a longer batch")
    check_values(got[1, [3, 5, 9]], [0, 1, -1], "R30", "the columns after a longer batch")
    pair.do("set_row", 0, [8])
    pair.commit()
    export.run([0, 1], [12, 1])
    export.run([], [])


def test_states_by_hand(subject_once: Subject) -> None:
    """Column 0, the last two columns, and the one of the last token with two more, on rows of 3, 1, 2 and 0 blocks.

    Rules: R31.
    """
    pair = three_rows(subject_once, KVCacheGroup(block_size=4, slot_mode="none", blocks_per_row=3))
    pair.do("null_range", 2, 0, 0, 1)
    pair.commit()
    host, rows = subject_once.to_host, [0, 1, 2, 3]
    check_values(host(ExportPair(pair, FIRST_STATE).run(rows).entries[0]), [10, 14, -1, -1], "R31", "the first columns")
    last = host(ExportPair(pair, LAST_STATES).run([0, 1, -5, 2]).entries[0]).tolist()
    check(last == [[11, 12], [14, -1], [-1, -1], [-1, 19]], "R31", f"the last two columns are {last}.")
    aligned = ExportPair(pair, ALIGNED_STATES)
    got = host(aligned.run(rows, [5, 4, 9, 0]).entries[0]).tolist()
    check(got == [[11, 12, 0], [14, 0, 0], [0, 0, 0], [0, 0, 0]], "R31", f"the aligned columns are {got}.")
    aligned.run([0, 0, 0, 1], [INT32_MIN, 1, INT32_MAX, -1])
    aligned.run([0], [4])
    # The last columns of 32 bits, and none.
    single = three_rows(subject_once, KVCacheGroup(block_size=1, slot_mode="none", blocks_per_row=3))
    ExportPair(single, ALIGNED_STATES).run([0, 0, 1, 2], [INT32_MAX, INT32_MAX - 1, 2, INT32_MIN])
    for wanted in (FIRST_STATE, LAST_STATES):
        export = ExportPair(pair, replace(wanted, null=None, dtype="int64"))
        export.run(rows)
        export.run([3, 2], num_reqs_padded=4)


def test_placeholder(subject_once: Subject) -> None:
    """Zeros, one column, and nothing is launched.

    Rules: R26.
    """
    pair = three_rows(subject_once, FULL)
    export = ExportPair(pair, PLACEHOLDER)
    launches = subject_once.call_log.launches
    result = export.run([0, 1], num_reqs_padded=3)
    check(subject_once.call_log.launches == launches, "R26", "a placeholder must launch nothing.")
    check(tuple(result.entries[0].shape) == (3, 1), "R26", f"the placeholder has shape {result.entries[0].shape}.")


def test_groups_of_one_geometry_share_their_counts(subject_once: Subject) -> None:
    """One export of three groups holds what three exports hold; where one holds fewer columns, all are cut to it.

    Rules: R25.15, R25.16, R27, R28, R29, R30.
    """
    groups = (FULL, replace(FULL, sliding_window=5), KVCacheGroup(block_size=8, num_blocks=20, kernel_block_size=4))
    pair = make(subject_once, *groups)
    for row in range(3):
        pair.do("set_row", row, [[4 + row, 7, 9 + row], [3, 1 + row, 8], [2, 6 + row]])
    pair.commit()
    for wanted in (CSR, TOKEN_CSR, KV, INVERSE_MAP, MISSING_IS_MINUS_1):
        together = ExportPair(pair, wanted, (2, 0, 1))
        before = subject_once.call_log.launches
        together.run([0, 2, -1, 1], [11, 4, 8, 12], num_computed_tokens=[10, 3, 0, 11])
        check(subject_once.call_log.launches - before == 1, "R25.16", "groups of one geometry must take one call.")
    pair.do("truncate_row", 1, [1, 3, 2])
    pair.commit()
    for wanted in (CSR, TOKEN_CSR, KV, INVERSE_MAP):
        together = ExportPair(pair, wanted, (2, 0, 1))
        together.run([1, 0], [12, 12])
        together.run([0], [3])


def test_metadata_of_a_step(subject: Subject) -> None:
    """A bundle holds what step and exports give; groups of one geometry share their counts, and take one call.

    Rules: R25.16, R33.
    """
    state = KVCacheGroup(block_size=4, slot_mode="none", blocks_per_row=3)
    groups = (FULL, replace(FULL, sliding_window=6), state, KVCacheGroup(block_size=8, num_blocks=40))
    pair, reference = (three_rows(subject, *groups, width=6) for _ in range(2))
    csr = LAYOUTS["flashinfer"]
    array = subject.device_array
    idx, starts, lens, computed = (
        array(values, "int32") for values in ([2, 0, -1], [0, 2, 5, 5], [7, 12, 3], [5, 9, 0])
    )
    positions = array([5, 6, 9, 10, 11], "int64")
    sizes: dict[str, Any] = {"num_reqs_padded": 4, "num_computed_tokens": computed}
    layouts: list[Any] = [csr, "flashinfer", STATE, "cudnn"]
    pair.table.step_metadata(idx, starts, positions, lens, layouts=layouts, **sizes)  # makes the buffers
    pair.do("append_row", 2, [[9], [9], [9], [9]])
    reference.do("append_row", 2, [[9], [9], [9], [9]])
    launches = subject.call_log.launches
    found = pair.table.step_metadata(idx, starts, positions, lens, layouts=layouts, max_seq_len=12, **sizes)
    calls = subject.call_log.launches - launches
    step = 1 if subject.step_path == "fused" else 3
    check(calls == step + 2, "R33", f"a step, CSR for two groups and states must take {step + 2} calls, took {calls}.")
    expected = reference.table.step(idx, starts, positions, **sizes)
    host = subject.to_host
    check((found.num_reqs, found.num_reqs_padded, found.max_seq_len) == (3, 4, 12), "R33", "sizes must be handed on.")
    check(found.query_start_loc is starts and found.seq_lens is lens, "R33", "inputs must be handed on.")
    for group, part in enumerate(found.groups):
        same = np.array_equal(host(part.block_table), host(expected.block_tables[group]))
        check(same and np.array_equal(host(part.slot_mapping), host(expected.slot_mappings[group])), "R33", f"{group}")
        check(part.seq_lens is lens, "R33", "on one rank the lengths are those that were given.")
    first, second = found.groups[0].export, found.groups[1].export
    check(first is not None and first is second, "R25.16, R33", "two groups of one geometry must share an export.")
    assert first is not None
    wanted = reference.table.export(csr, idx, groups=(0, 1), seq_lens=lens, **sizes)
    for group in range(2):
        entries = found.groups[group].entries
        same = np.array_equal(host(entries), host(wanted.entries[group]))
        check(same and entries is first.entries[group], "R33", f"the CSR of group {group} is {host(entries).tolist()}.")
    check(np.array_equal(host(first.indptr), host(wanted.indptr)), "R33", f"indptr is {host(first.indptr).tolist()}.")
    check_values(host(found.groups[2].entries), [24, 16, -1, -1], "R31, R33", "the states")
    same_memory = address(found.groups[3].entries) == address(pair.table.buffers.block_tables[3])
    check(same_memory, "R26, R33", "a table that fits is the batch table.")


@pytest.mark.parametrize("wanted", [None, CSR, TABLE], ids=["none", "csr", "table"])
def test_metadata_of_one_rank(subject: Subject, wanted: Layout | None) -> None:
    """Lengths of groups that two ranks share are this rank's, one array for all of them; others have what was given.

    Rules: R19, R33.
    """
    groups = (FULL, replace(FULL, sharded=False), KVCacheGroup(block_size=8, num_blocks=40))
    pair = three_rows(subject, *groups, context_parallel=shard(2, 1, 2), width=12)
    idx, starts, lens = (subject.device_array(values, "int32") for values in ([0, 1], [0, 1, 2], [11, 3]))
    positions = subject.device_array([10, 2], "int64")
    pair.table.step_metadata(idx, starts, positions, lens, layouts=wanted)
    launches = subject.call_log.launches
    found = pair.table.step_metadata(idx, starts, positions, lens, layouts=wanted)
    calls = subject.call_log.launches - launches - (1 if subject.step_path == "fused" else 2)
    expected = {None: 1, CSR: 3, TABLE: 1}[wanted]
    check(calls == expected, "R33", f"{expected} exports are needed, {calls} were made.")
    check_values(subject.to_host(found.groups[0].seq_lens), [5, 1], "R19, R33", "the lengths of rank 1")
    shared = found.groups[0].seq_lens is found.groups[2].seq_lens
    check(shared and found.groups[1].seq_lens is lens, "R33", "lengths must be computed once for all shared groups.")


def test_metadata_that_is_refused_commits_nothing(subject_once: Subject) -> None:
    """A wrong argument is found before the commit, that of an export too.

    Rules: R33.
    """
    pair = three_rows(subject_once, FULL, KVCacheGroup(block_size=4))
    array = subject_once.device_array
    idx, starts, lens = (array(values, "int32") for values in ([0, 1], [0, 1, 2], [11, 3]))
    positions, short = array([10, 2], "int64"), array([3], "int32")
    pair.do("set_row", 3, [[5], [6]])
    wrong: list[tuple[Any, Any, Any]] = [
        (ArgumentError, short, None),
        (DtypeError, None, None),
        (DtypeError, positions, None),
        (ArgumentError, lens, [CSR]),
        (ArgumentError, lens, 3),
        (ConfigError, lens, "nobody"),
        (ConfigError, lens, "flash_mla"),
        (ArgumentError, lens, [None, INVERSE_MAP]),
        (ArgumentError, lens, [None, TOKEN_CSR]),
    ]
    for index, (error, these, layouts) in enumerate(wrong):
        with must_raise(error, "R33", f"wrong argument {index}"):
            pair.table.step_metadata(idx, starts, positions, these, layouts=layouts)
        pair.check_device()
    pair.commit()


def test_windows_are_cut_out(subject_once: Subject) -> None:
    """With num_computed_tokens the columns that a window has passed are NULL in every layout but states.

    Rules: R11, R25.5.
    """
    group = KVCacheGroup(block_size=4, num_blocks=20, sliding_window=6, null_is_pad=True)
    pair = three_rows(subject_once, group)
    for wanted in (TABLE, MISSING_IS_MINUS_1, KV, CSR, TOKEN_CSR, INVERSE_MAP, FIRST_STATE):
        export = ExportPair(pair, wanted)
        export.run([0, 2, 1], [12, 8, 2], num_computed_tokens=[11, 7, INT32_MAX])
        export.run([0, 2, 1], [12, 8, 2], num_computed_tokens=[-1, 9, INT32_MIN])
        export.run([0, 2], [12, 8])


def test_the_identity(subject_once: Subject) -> None:
    """`idx_mapping=None` exports the first rows; a row after the batch must be empty, as for a gather.

    Rules: R10.9, R10.10, R25.4.
    """
    pair = three_rows(subject_once, FULL)
    for wanted in VARIANTS:
        if wanted.kind != "state":
            ExportPair(pair, wanted).run(None, [12, 2, 8], num_reqs=3, num_reqs_padded=4)
    with must_raise(ArgumentError, "R10.10", "an export whose padding rows hold blocks"):
        pair.table.export(LENGTHS, None, seq_lens=subject_once.device_array([4], "int32"), num_reqs_padded=2)


def test_exports_see_the_last_commit(subject_once: Subject) -> None:
    """A pending change is not exported; a commit shows it, in the same arrays.

    Rules: R9.2, R25.4.
    """
    pair = three_rows(subject_once, FULL)
    exports = [ExportPair(pair, wanted) for wanted in (CSR, KV, INVERSE_MAP, MISSING_IS_MINUS_1)]
    for change in (("set_row", 0, [4, 5]), ("append_row", 1, [6, 7]), ("clear_row", 2), ("swap_rows", 0, 1)):
        for export in exports:
            export.run([0, 1, 2], [9, 9, 9])
        pair.do(*change)
        for export in exports:
            export.run([0, 1, 2], [9, 9, 9])
        pair.commit()
    for export in exports:
        export.run([2, 1, 0], [9, 9, 9])


def test_sets_of_buffers_have_exports_of_their_own(subject_once: Subject) -> None:
    """`out=` of a set of buffers gives arrays of its own, the same at each call; the table's own are others.

    Rules: R17, R25.8, R25.9, R25.10.
    """
    pair = three_rows(subject_once, FULL)
    more = pair.table.create_buffers()
    mapping, lens = subject_once.device_array([0, 1], "int32"), subject_once.device_array([12, 4], "int32")
    other = subject_once.device_array([1, 0], "int32")
    first = pair.table.export(CSR, mapping, seq_lens=lens)
    second = pair.table.export(CSR, other, seq_lens=lens, out=more)
    host = subject_once.to_host
    check_values(host(first.entries[0])[:4], [10, 11, 12, 14], "R25.9", "the table's own indices")
    check_values(host(second.entries[0])[:4], [14, 10, 0, 0], "R25.9", "the other set's indices")
    again = pair.table.export(CSR, mapping, seq_lens=lens, out=more)
    check(again is second, "R25.10", "a steady export must return the same object.")
    check(address(again.entries[0]) == address(second.entries[0]), "R25.8", "an export moved.")


SPOILED = 77


def spoil(array: Any) -> None:
    """Overwrite an array of the backend's device, as memory that was unmapped in between."""
    if hasattr(array, "fill_"):
        array.fill_(SPOILED)
    elif array is not None:
        array[:] = SPOILED


def test_invalidate_refills_exports(subject_once: Subject) -> None:
    """After sleep and wake every set is as fresh, whatever its memory holds, and the next export is right.

    Rules: R24, R25.12.
    """
    pair = three_rows(subject_once, FULL)
    exports = [ExportPair(pair, wanted) for wanted in (CSR, KV, INVERSE_MAP, MISSING_IS_MINUS_1, LENGTHS)]
    for export in exports:
        export.run([0, 1, 2], [9, 9, 9])
        for name in (*ARRAYS, "counts", "mapped"):
            spoil(getattr(export.out, name))
    subject_once.backend.synchronize()
    pair.invalidate()
    for export in exports:
        export.check_written([], rules="R24, R25.12")
        export.run([1, 0], [9, 9])


def test_host_arrays_are_staged(subject_once: Subject) -> None:
    """Numpy inputs give what device arrays give, and may be reused immediately.

    Rules: R10.8, R25.4.
    """
    pair = three_rows(subject_once, replace(FULL, sliding_window=6, null_is_pad=True))
    for wanted in (CSR, INVERSE_MAP, KV):
        export = ExportPair(pair, wanted)
        inputs = [np.array(values, np.int32) for values in ([2, 0], [7, 12], [6, 11])]
        pair.table.export(
            wanted, inputs[0], seq_lens=inputs[1], num_computed_tokens=inputs[2], out=export.out, num_reqs_padded=4
        )
        for array in inputs:
            array[:] = -77
        export.check_written([2, 0], [7, 12], num_computed_tokens=[6, 11])


# Poison and garbage.

TRAP = 1_000_003


def _write_traps(pair: Pair) -> None:
    """Put a block id that no row holds into every column after a filled count; the counts stay."""
    arena = pair.config.arena
    offsets, lengths = [], []
    for group, filled in enumerate(pair.oracle.device_filled()):
        for row, columns in enumerate(filled):
            if columns < arena.widths[group]:
                offsets.append(arena.group_offsets[group] + row * arena.widths[group] + columns)
                lengths.append(arena.widths[group] - columns)
    values = np.full(sum(lengths), TRAP, np.int32)
    pair.table.store.write(Writes(arena, np.array(offsets, np.int64), np.array(lengths, np.int32), values), stream=None)


def test_nothing_behind_a_filled_count_is_exported(subject_once: Subject) -> None:
    """With traps after every filled count no export shows one, however long the sequences claim to be.

    Rules: R10.5, R25.5, R26, R27, R28, R29, R30, R31.
    """
    state = KVCacheGroup(block_size=4, slot_mode="none", blocks_per_row=3)
    pair = three_rows(subject_once, FULL, replace(FULL, sliding_window=4, null_is_pad=True), state)
    _write_traps(pair)
    for wanted in VARIANTS:
        for group in (2,) if wanted.kind == "state" else (0, 1):
            export = ExportPair(pair, wanted, (group,))
            export.run([0, 1, 2, 3], [INT32_MAX] * 4)
            export.run([3, 2, -1], [5, 16, 16], num_computed_tokens=[9, 9, 9])


GARBAGE = [INT32_MIN, INT32_MAX, -1, 0, 2**30, 5]


@pytest.mark.parametrize("wanted", VARIANTS, ids=lambda wanted: f"{wanted.kind}{VARIANTS.index(wanted)}")
def test_garbage_writes_nothing_outside(subject_once: Subject, wanted: Layout) -> None:
    """Garbage rows, lengths and computed tokens: each export is what the rules say, and the tables stay as they are.

    Rules: R15, R25.17.
    """
    group = KVCacheGroup(block_size=4, slot_mode="none", blocks_per_row=3) if wanted.kind == "state" else FULL
    window = replace(group, sliding_window=3, null_is_pad=True)
    pair = three_rows(subject_once, group, window)
    for groups in ((0,), (1, 0)):
        export = ExportPair(pair, wanted, groups, capacity=5 if wanted.kind.endswith("csr") else None)
        for shift in range(3):
            values = GARBAGE[shift:] + GARBAGE[:shift]
            export.run(values[:4], values[1:5], num_computed_tokens=values[2:6])
            export.run([0, 1, 2, 3], values[:4], num_computed_tokens=values[2:6])
    pair.check_device()


# Properties.


def is_allowed(wanted: Layout, spec: KVCacheGroup, shape: Geometry) -> bool:
    """Say whether a group may be exported in a layout of this suite (R25-R31), worked out once more."""
    world_size = shape.share.world_size if shape.share else 1
    if wanted.kind == "placeholder":
        return True
    if wanted.kind == "state":
        if shape.blocks_per_kv_block > 1 or world_size > 1:
            return False
    elif wanted.kind in ("csr", "token_csr", "lengths", "inverse_map") and shape.slot_mode == "none":
        return False
    num_kernel_blocks = shape.block_id_limit * shape.blocks_per_kv_block
    if wanted.kind == "inverse_map":
        return spec.num_blocks is not None
    if wanted.kind == "token_csr":
        return num_kernel_blocks * shape.kernel_block_size <= 2**31
    return wanted.dtype == "int64" or (num_kernel_blocks - 1) * wanted.entry_scale + wanted.value_offset < 2**31


@given(data=st.data(), config=configs())
def test_exports_equal_the_oracle(subject_once: Subject, data: st.DataObject, config: BlockTableConfig) -> None:
    """Any layout of any group that may have it, over two batches of any rows, lengths and windows; others are refused.

    Rules: R25.5, R25.6, R25.7, R25.13, R25.18, R26, R27, R28, R29, R30, R31.
    """
    pair = Pair(subject_once, config)
    rows = list(range(config.num_rows))
    pair.do("set_rows", *data.draw(bulk_calls(pair.oracle, rows, replace=True, fit=True)))
    pair.commit()
    wanted = data.draw(st.sampled_from(VARIANTS))
    group = data.draw(st.integers(0, len(config.groups) - 1))
    if not is_allowed(wanted, config.groups[group], pair.oracle.shapes[group]):
        with must_raise(BlockTableError, f"R25.18, {RULES[wanted.kind]}", f"{wanted.kind} of {config.groups[group]}"):
            pair.table.create_export(wanted, group)
        return
    capacity = data.draw(st.sampled_from([None, None, 1, 7])) if wanted.kind.endswith("csr") else None
    export = ExportPair(pair, wanted, (group,), capacity=capacity)
    for _ in range(2):
        batch: Any = data.draw(batches(config, pair.oracle))
        export.run(
            batch.idx_mapping,
            _draw_lengths(data, pair, group, batch.idx_mapping),
            num_reqs_padded=batch.num_reqs_padded,
            num_computed_tokens=batch.num_computed_tokens,
        )


def _draw_lengths(data: st.DataObject, pair: Pair, group: int, mapping: Sequence[int] | None) -> list[int]:
    """Draw a length for each request around what its row holds, and now and then a wild one."""
    assert mapping is not None
    shape = pair.oracle.shapes[group]
    tokens = shape.kernel_block_size * (shape.share.world_size if shape.share else 1)
    offsets = data.draw(st.lists(st.integers(-2 * tokens, 3), min_size=len(mapping), max_size=len(mapping)))
    held = [len(pair.oracle.committed_columns(group, row)) * tokens for row in mapping]
    lengths = [max(0, length + offset) for length, offset in zip(held, offsets, strict=True)]
    wild = data.draw(st.sampled_from([None, None, INT32_MIN, INT32_MAX, -1, 0]))
    if lengths and wild is not None:
        lengths[wild % len(lengths)] = wild
    return lengths


@settings(max_examples=max(1, profiles.current().property_examples // 3))
@given(data=st.data(), config=configs())
def test_csr_equals_the_batch_table(subject_once: Subject, data: st.DataObject, config: BlockTableConfig) -> None:
    """Without an oracle: the CSR of full lengths is the batch table's filled part, row after row.

    Rules: R10.1, R11, R27.
    """
    linear = [group for group, spec in enumerate(config.groups) if spec.slot_mode != "none"]
    if not linear:
        return
    pair, group = Pair(subject_once, config), data.draw(st.sampled_from(linear))
    rows = list(range(config.num_rows))
    pair.do("set_rows", *data.draw(bulk_calls(pair.oracle, rows, replace=True, fit=True)))
    pair.commit()
    batch: Any = data.draw(batches(config, pair.oracle))
    tables = pair.gather(batch.idx_mapping, num_computed_tokens=batch.num_computed_tokens)
    array = subject_once.device_array
    result = pair.table.export(
        CSR,
        array(batch.idx_mapping, "int32"),
        groups=group,
        seq_lens=array([INT32_MAX] * len(batch.idx_mapping), "int32"),
        num_computed_tokens=None if batch.num_computed_tokens is None else array(batch.num_computed_tokens, "int32"),
    )
    indptr, indices = subject_once.to_host(result.indptr), subject_once.to_host(result.entries[0])
    for request in range(len(batch.idx_mapping)):
        mine = indices[indptr[request] : indptr[request + 1]]
        filler = pair.oracle.shapes[group].filler
        columns, behind = np.split(tables[group][request], [mine.size])
        same = np.array_equal(mine, np.where(columns == filler, max(filler, 0), columns))
        check(
            same and bool((behind == filler).all()),
            "R27",
            f"request {request} of group {group} is exported as {mine.tolist()}.",
        )


class ExportHistory(TableHistory):
    """A table's life with exports after every step and in between, each into arrays that earlier ones have written."""

    @initialize(data=st.data(), config=configs(), is_empty=st.just(False))
    def start(self, data: st.DataObject, config: BlockTableConfig, is_empty: bool) -> None:
        """Begin with rows that hold blocks, and buffers of several layouts."""
        super().start(data, config, is_empty, mode="off")
        first = data.draw(st.integers(0, len(VARIANTS) - 1))
        layouts = [VARIANTS[(first + 5 * index) % len(VARIANTS)] for index in range(3)]
        wanted = [(each, group) for each in layouts for group in range(len(config.groups))]
        self.exports = [
            ExportPair(self.pair, each, (group,))
            for each, group in wanted
            if is_allowed(each, config.groups[group], self.shapes[group])
        ]

    @rule(data=st.data())
    def export(self, data: st.DataObject) -> None:
        """Export any batch."""
        batch = data.draw(batches(self.config, self.pair.oracle))
        for each in self.exports:
            lengths = _draw_lengths(data, self.pair, each.groups[0], batch.idx_mapping)
            each.run(
                batch.idx_mapping,
                lengths,
                num_reqs_padded=batch.num_reqs_padded,
                num_computed_tokens=batch.num_computed_tokens,
            )

    def _step(self, data: st.DataObject, batch: BatchDraw) -> None:
        super()._step(data, batch)
        self.export(data)


def test_exports_in_any_history(subject_once: Subject) -> None:
    """After any operations, steps, sleeps and other exports, an export is what the oracle says.

    Rules: R9.1, R24, R25.5, R25.6, R25.7, R25.13, R26, R27, R28, R29, R30, R31.
    """
    machine = type("ExportHistory", (ExportHistory,), {"subject": subject_once})
    profile = profiles.current()
    run_state_machine_as_test(machine, settings=profile.settings(max(1, profile.machine_examples // 6)))


@pytest.mark.large
@pytest.mark.parametrize(
    "wanted", [CSR, TOKEN_CSR, KV, INVERSE_MAP, MISSING_IS_MINUS_1], ids=lambda wanted: wanted.kind
)
def test_long_rows(subject_once: Subject, wanted: Layout) -> None:
    """Rows of hundreds of columns, more than a program does in one turn, beside short ones, and then the short alone.

    Rules: R25.13, R26, R27, R28, R29, R30.
    """
    group = KVCacheGroup(block_size=2, num_blocks=1500)
    pair = make(subject_once, group, width=700)
    for row, number in enumerate((700, 1, 331, 64)):
        pair.do("set_row", row, [1 + (7 * row + 3 * index) % 1499 for index in range(number)])
    pair.commit()
    export = ExportPair(pair, wanted)
    export.run([1, 0, 3, 2], [2, 1399, 127, 662])
    export.run([3, 1], [128, 1])
    export.run([2, -1, 0], [1, 5, 700])


def test_every_layout_of_the_package_can_be_exported(subject_once: Subject) -> None:
    """Each of `LAYOUTS` exports a group of the block size that it takes, and is what its kind says.

    Rules: R25.2, R32.
    """
    for name, known in LAYOUTS.items():
        if known.kind in RING_AND_REQUEST_KINDS and not subject_once.declares("export_parts"):
            continue
        size = next(size for size in (16, 32, 64, 128, 256) if known.takes_block_size(size))
        options: dict[str, Any] = {"slot_mode": "none", "blocks_per_row": 4} if known.kind == "state" else {}
        options |= {"slot_mode": "ring", "blocks_per_row": 4} if known.kind == "ring" else {}
        starts = [0, 2, 3, 3, 6] if known.kind == "token_requests" else None
        group = KVCacheGroup(block_size=size, num_blocks=40, **options)
        pair = three_rows(subject_once, group)
        columns = 3 if known.kind == "state" and known.state_columns != "first" else 1
        export = ExportPair(pair, replace(known, num_columns=columns))
        export.run([2, -1, 0, 1], [size + 1, 5, 2 * size, 1], query_start_loc=starts)
        check(export.layout.name == name, "R25.2", f"{name} has another name.")
