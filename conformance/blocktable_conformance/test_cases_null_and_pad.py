"""Which block stands for none, and which slot for "do not write": the engine's choice, in each group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blocktable import LAYOUTS, ArgumentError, ConfigError, KVCacheGroup, Layout
from blocktable_conformance.asserts import check, check_values, must_raise
from blocktable_conformance.cases import expect_slots, expect_table, make, one_request, small_config
from blocktable_conformance.exports import ExportPair
from blocktable_conformance.subject import Subject, address

B4 = KVCacheGroup(block_size=4)
STATE = KVCacheGroup(block_size=4, slot_mode="none", blocks_per_row=2)
NO_NULL = KVCacheGroup(block_size=4, num_blocks=20, null_block_id=-1)


def need_exports(subject: Subject) -> None:
    """Skip a test for a backend that cannot export."""
    if not subject.declares("exports"):
        pytest.skip(f"{subject.label} does not declare exports")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"null_block_id": -2}, "null_block_id"),
        ({"null_block_id": 8, "num_blocks": 8}, "num_blocks"),
        ({"null_block_id": 2**30, "kernel_block_size": 2}, "2**31"),
        ({"null_block_id": True}, "null_block_id"),
        ({"allow_null": None}, "allow_null"),
        ({"pad_slot_id": 4}, "pad_slot_id"),
        ({"pad_slot_id": 31, "num_blocks": 8}, "32"),
        ({"pad_slot_id": 0, "null_block_id": -1}, "pad_slot_id"),
        ({"pad_slot_id": 12, "null_block_id": 2}, "null block 2"),
        ({"pad_slot_id": 2**63}, "pad_slot_id"),
        ({"slot_mode": "cross", "sliding_window": 4}, "cross"),
        ({"slot_mode": "cross", "sharded": True}, "cross"),
    ],
)
def test_impossible_nulls_and_pads_are_refused(options: dict[str, Any], word: str) -> None:
    """The sentence names the field, and the limit that it breaks.

    Rules: R5, R13, R14.
    """
    with must_raise(ConfigError, "R5, R13, R14", f"a group with {options}") as raised:
        KVCacheGroup(block_size=4, **options)
    check(word in raised.message, "R5, R13", f"{word!r} is not in {raised.message!r}")


def test_limits_of_pad_slots() -> None:
    """The first slot past the cache, any negative one, and one inside the null block are taken; int32 has limits.

    Rules: R13, R16.
    """
    for pad in (32, -(2**63), 23):
        group = KVCacheGroup(block_size=4, num_blocks=8, null_block_id=5, pad_slot_id=pad)
        check(group.pad_slot_id == pad, "R13", f"{pad} is allowed.")
    for pad, is_allowed in ((-(2**31), True), (2**31 - 1, True), (-(2**31) - 1, False), (2**31, False)):
        group = KVCacheGroup(block_size=4, num_blocks=8, pad_slot_id=pad)
        if is_allowed:
            small_config(group, slot_dtype="int32")
            continue
        with must_raise(ConfigError, "R13, R16", f"int32 slots with PAD {pad}"):
            small_config(group, slot_dtype="int32")


def test_a_ring_shorter_than_its_window_is_refused() -> None:
    """Two blocks of four tokens hold a window of eight, and not one of nine.

    Cases: W4. Rules: R14.
    """
    ring = KVCacheGroup(block_size=4, slot_mode="ring", blocks_per_row=2, sliding_window=8)
    small_config(ring)
    with must_raise(ConfigError, "R14", "a window of nine tokens"):
        small_config(replace(ring, sliding_window=9))


def test_numbers_that_no_machine_holds_are_refused_in_a_sentence() -> None:
    """From the configuration, not as a MemoryError or an OverflowError later.

    Rules: R1.
    """
    for options in ({"max_num_batched_tokens": 2**40}, {"max_num_reqs": 2**31}, {"max_num_rows": 2**63}):
        with must_raise(ConfigError, "R1", f"a config with {options}"):
            small_config(B4, **options)
    with must_raise(ConfigError, "R1", "a window of 2**70"):
        KVCacheGroup(block_size=4, sliding_window=2**70)


def test_real_state_in_block_0(subject_once: Subject) -> None:
    """A state in block 0 is exported where there is no null block, is a hole with `allow_null`, and refused by default.

    Cases: W2. Rules: R5, R7, R31.
    """
    real, holes = replace(STATE, null_block_id=-1), replace(STATE, allow_null=True)
    for group, states in ((real, [0, 3, -1]), (holes, [-1, 3, -1])):
        pair = make(subject_once, group, rows=[[0], [3]])
        pair.commit()
        if subject_once.declares("exports"):
            got = subject_once.to_host(ExportPair(pair, LAYOUTS["state"]).run([0, 1, -1]).entries[0])
            check_values(got, states, "R31", f"the states of {group}")
    pair = make(subject_once, STATE)
    message = pair.refuse("ArgumentError", "set_row", 0, [0])
    check("allow_null=True" in message and "null_block_id=-1" in message, "R7", f"both settings belong in {message!r}")


@pytest.mark.parametrize(("null", "filler"), [(0, 0), (-1, -1), (5, 10)])
def test_what_stands_where_no_block_is(subject: Subject, null: int, filler: int) -> None:
    """Tails, padding entries, padded rows, holes and columns that a window has passed hold fillers, k for each block.

    Rules: R4, R5, R7, R9.1, R10.1, R10.2, R10.3, R10.6, R11.
    """
    group = KVCacheGroup(
        block_size=4, kernel_block_size=2, num_blocks=9, null_block_id=null, allow_null=True, sliding_window=3
    )
    pair = make(subject, group, B4, rows=[[[7, null, 8], [1]], [[3], [2]]])
    host = pair.table.host_table(0)
    check_values(host[0], [14, 15, filler, filler, 16, 17, filler, filler], "R7", "the host's first row")
    check_values(host[3], [filler] * 8, "R5", "an empty row")
    pair.commit()
    pair.do("null_range", 0, 0, 0, 2)  # four columns: a range of one value
    table = pair.step([0], [0, 1], [9]).block_tables[0]
    check_values(table[0], [*[filler] * 4, 16, 17, filler, filler], "R9.1", "a row whose first blocks have become NULL")
    seen = pair.step([1, -1, 0], [0, 1, 2, 3], [0, 0, 9], num_reqs_padded=4, num_computed_tokens=[0, 0, 12])
    table = seen.block_tables[0]
    check_values(table[0], [6, 7, *[filler] * 6], "R10.1", "a batch row")
    for row in (1, 3):
        check_values(table[row], [filler] * 8, "R10.2, R10.3", "the row of a padding entry, or a padded row")
    check_values(table[2], [filler] * 5 + [17, filler, filler], "R11", "a row with a window")
    table = pair.step([1], [0, 1], [0]).buffer_tables[0]
    for row in (1, 2, 3):
        check_values(table[row], [filler] * 8, "R5, R10.6", "a row that the batch before this one had")
    table = pair.step([-1], [0, 1], [0]).buffer_tables[0]
    check_values(table[0], [filler] * 8, "R5, R10.2", "a padding entry's row, where there were columns")
    pair.do("clear")
    pair.invalidate()


@pytest.mark.parametrize("null", [0, -1, 3])
def test_tokens_in_holes(subject: Subject, null: int) -> None:
    """A token in a hole is PAD with `null_is_pad`, and where there is no null block anyhow; else it has a slot there.

    With two kernel blocks to a block, both of a hole's columns are the filler. Rules: R5, R13.
    """
    for null_is_pad, size in ((False, 4), (True, 4), (False, 2), (True, 2)):
        group = KVCacheGroup(
            block_size=4,
            kernel_block_size=size,
            null_block_id=null,
            allow_null=True,
            null_is_pad=null_is_pad,
            pad_slot_id=-5,
        )
        pair = make(subject, group, rows=[[7, null]])
        hole = -5 if null_is_pad or null == -1 else 4 * null + 6 % size
        check_values(one_request(pair, [1, 6]).slot_mappings[0], [29, hole], "R13", "a block's slot, and a hole's")
        with must_raise(ArgumentError, "R13", "locate() of PAD"):
            pair.table.locate(0, -5)


def test_slots_of_pad_are_the_groups_own(subject: Subject) -> None:
    """Three groups, three pads, in fresh buffers, in steps, in a caller's arrays and after invalidate().

    Rules: R13, R15, R17, R24.
    """
    pads = [-7, 40, 3]
    pair = make(subject, *(KVCacheGroup(block_size=4, num_blocks=10, pad_slot_id=pad) for pad in pads))
    pair.check_outputs()
    pair.do("set_row", 0, [[1], [2], [3]])
    seen = one_request(pair, [0, 4, 1])
    for group, pad in enumerate(pads):
        check_values(seen.buffer_slots[group], [4 * group + 4, pad, 4 * group + 5, *[pad] * 13], "R13, R15", "slots")
    out = [subject.device_array([77] * length, "int64") for length in (4, 9, 2)]
    array = subject.device_array
    pair.table.compute_slot_mappings(array([0], "int32"), array([0, 1], "int32"), array([2], "int64"), out=out)
    for group, slots in enumerate(out):
        got = subject.to_host(slots)
        check_values(got, [4 * group + 6, *[pads[group]] * (got.size - 1)], "R15, R17", "a caller's slots")
    pair.invalidate()


# Exports.


def layout(kind: Any, **fields: Any) -> Layout:
    """Return a layout without rules on block sizes."""
    return Layout(name=f"test_{kind}", consumer="this suite", kind=kind, **fields)


def test_what_a_layout_puts_where_no_block_is(subject_once: Subject) -> None:
    """-1 where the consumer tests for it; otherwise the filler, or block 0 where that is -1: a valid address.

    Rules: R25.3, R25.7, R26, R27, R28, R29.
    """
    need_exports(subject_once)
    for wrong in (0, 1, -2):
        with must_raise(ConfigError, "R25.3", f"a null of {wrong}"):
            layout("table", null=wrong)
    wanted = [layout("table"), layout("table", null=-1), layout("table", entry_scale=3), layout("csr")]
    wanted += [layout("token_csr"), layout("kv_offsets", entry_scale=2, value_offset=1), layout("inverse_map", null=-1)]
    for null, fills in ((-1, [0, -1, 0, 0, 0, 0, -1]), (0, [0, -1, 0, 0, 0, 0, -1]), (5, [10, -1, 30, 10, 20, 20, -1])):
        group = KVCacheGroup(block_size=4, kernel_block_size=2, num_blocks=9, null_block_id=null, allow_null=True)
        pair = make(subject_once, group, rows=[[7, null, 2], [1]])
        pair.commit()
        for each, fill in zip(wanted, fills, strict=True):
            export = ExportPair(pair, each)
            check(
                export.out.fills == (fill,), "R25.7", f"the fill of {each.kind} must be {fill}, got {export.out.fills}"
            )
            export.run([0, 1, -1], [12, 4, 9])
            export.run([1], [3])
    several = [replace(group, null_block_id=null) for null in (5, -1, 0)]
    pair = make(subject_once, *several, rows=[[[1, 2], [3], [4, 5]]])
    pair.commit()
    for each in wanted:
        ExportPair(pair, each, (2, 0, 1)).run([0, -1], [6, 9])
    pair.invalidate()


def test_the_batch_table_is_handed_out_where_its_filler_fits(subject_once: Subject) -> None:
    """A -1 group hands its batch table to who tests for -1, and a copy to who reads past the length; 0 the other way.

    Rules: R26.
    """
    need_exports(subject_once)
    for group, null, is_own in ((NO_NULL, -1, True), (NO_NULL, None, False), (B4, -1, False), (B4, None, True)):
        pair = make(subject_once, group, rows=[[5, 6], [1]])
        pair.commit()
        mapping = subject_once.device_array([1, -1, 0], "int32")
        pair.table.gather(mapping)
        found = pair.table.export(layout("table", null=null), mapping).entries[0]
        same = address(found) == address(pair.table.buffers.block_tables[0])
        check(same is is_own, "R26", f"null {null} of null block {group.null_block_id}: itself is {same}.")
        fill = 0 if null is None else -1
        expected = [[1, fill, fill, fill], [fill] * 4, [5, 6, fill, fill]]
        got = subject_once.to_host(found).tolist()
        check(got == expected, "R26", f"the table must be {expected}, got {got}.")


def test_an_export_of_another_batch_is_refused(subject_once: Subject) -> None:
    """The batch table holds what was gathered: another batch, and one from before a commit, are refused.

    Cases: W5. Rules: R26.
    """
    need_exports(subject_once)
    pair = make(subject_once, B4, replace(B4, sliding_window=2), rows=[[[5], [3, 4]], [[9], [6]]])
    table, array = pair.table, subject_once.device_array
    table.commit()
    zero, one, both = array([0], "int32"), array([1], "int32"), array([0, 1], "int32")
    computed, more = array([5], "int32"), table.create_buffers()

    def refused(what: str, *args: Any, **options: Any) -> None:
        with must_raise(ArgumentError, "R26", what) as raised:
            table.export("flash_attention_3", *args, **options)
        check("create_export" in raised.message, "R26", f"a way out belongs in {raised.message!r}")

    refused("a set that holds nothing", zero)
    table.gather(zero, 3)
    for padded in (None, 2, 3):
        table.export("flash_attention_3", zero, num_reqs_padded=padded)
    table.export("flash_attention_3", zero, groups=1)
    refused("another row", one)
    refused("a longer batch", both)
    refused("another set", zero, out=more)
    refused("a window that was not cut", zero, groups=1, num_computed_tokens=computed)
    table.export("flash_attention_3", zero, num_computed_tokens=computed)  # its group has no window
    copy = ExportPair(pair, LAYOUTS["flash_attention_3"])
    pair.oracle.commit()
    copy.run([1])
    table.commit()
    table.export("flash_attention_3", zero)  # nothing had changed
    table.append_row(0, [[7], []])
    table.export("flash_attention_3", zero)
    table.commit()
    refused("a batch from before a commit", zero)
    table.step(one, array([0, 1], "int32"), array([0], "int64"), num_computed_tokens=computed)
    table.export("flash_attention_3", one)
    table.export("flash_attention_3", one, groups=1, num_computed_tokens=computed)
    refused("without the window that was cut", one, groups=1)
    table.export("flash_attention_3", None, num_reqs=2)  # the table's own rows
    table.invalidate()
    table.commit()
    refused("what was invalidated", one)
    values = np.array([0], np.int32)
    table.gather(values)
    table.export("flash_attention_3", np.array([0], np.int32))
    values[0] = 1
    refused("host arrays of other values", values)


# More rows than a batch, and fewer.


def test_rows_apart_from_the_batch(subject: Subject) -> None:
    """Five rows for batches of two, and one row for batches of four: each limit is the one that its rule names.

    Rules: R3, R7, R10.1, R10.2, R10.4, R10.9, R13.
    """
    pair = make(subject, B4, max_num_reqs=2, max_num_rows=5, rows=[[1], [2], [3], [], [5, 6]])
    pair.refuse("RowIndexError", "set_row", 5, [1])
    check(pair.table.host_table(0).shape == (5, 4), "R3", "the table must have five rows.")
    check(pair.table.num_blocks_per_row.shape == (1, 5), "R3", "there must be a count for each row.")
    seen = pair.step([4, 2], [0, 2, 3], [1, 4, 0])
    expect_table(seen.buffer_tables[0], [[5, 6], [3]], "R10.1")
    expect_slots(seen, [21, 24, 12], "R12")
    expect_slots(pair.step([5, 3], [0, 2, 3], [0, 1, 0]), [], "R13")
    pair.gather(None, num_reqs=2)
    array = subject.device_array
    with must_raise(ArgumentError, "R10.4", "a batch of three"):
        pair.table.gather(array([0, 1, 2], "int32"))
    with must_raise(ArgumentError, "R10.4", "a batch padded to three"):
        pair.table.gather(None, 3, num_reqs=2)
    check(pair.table.locate(0, 21).rows == ((4, 0, 1),), "R12", "locate() must find row 4.")
    pair.table.verify()
    few = make(subject, B4, max_num_rows=1, rows=[[7]])
    expect_table(few.step([0, 1, 0, -1], range(5), [0, 0, 3, 0]).buffer_tables[0], [[7], [], [7]], "R10.1, R10.2")
    few.gather(None, num_reqs=1)
    with must_raise(ArgumentError, "R10.9", "more of the table's own rows than it has"):
        few.table.gather(None, 2, num_reqs=1)
    few.refuse("RowIndexError", "clear_row", 1)


def test_padding_rows_that_are_empty_on_both_sides(subject_once: Subject) -> None:
    """A row that was set and cleared since the last commit is empty on the host and on the device.

    Cases: W7. Rules: R10.10.
    """
    pair = make(subject_once, B4, rows=[[2]])
    pair.commit()
    pair.do("set_row", 3, [1])
    check(not pair.gather_in_place(1, 4), "R10.10", "row 3 holds a block.")
    pair.do("clear_row", 3)
    check(pair.gather_in_place(1, 4), "R10.10", "row 3 is empty on both sides.")
    pair.do("set_row", 3, [1])
    pair.commit()
    pair.do("clear_row", 3)
    check(not pair.gather_in_place(1, 4), "R10.10", "row 3 is not empty on the device.")


# Chosen groups, and cross-attention.


def test_slots_of_chosen_groups(subject: Subject) -> None:
    """Only the named groups are written, in that order; cross groups have slots where they are named.

    Cases: W3. Rules: R13, R14, R15, R17.
    """
    pair = make(subject, B4, replace(B4, slot_mode="cross"), B4, rows=[[[2], [5, 6], [3]]])
    expect_slots(one_request(pair, [1]), [], "R14", group=1)
    slots = pair.compute([0], [0, 6], range(6), groups=[1])
    check_values(slots[0], [20, 21, 22, 23, 24, 25], "R14", "the encoder's slots")
    pair.compute([0], [0, 2], [2, 9], groups=[2, 0])
    expect_slots(one_request(pair, [1]), [], "R14", group=1)
    array = subject.device_array
    inputs = array([0], "int32"), array([0, 2], "int32"), array([3, 4], "int64")
    out = [array([77] * 3, "int64") for _ in range(2)]
    pair.table.compute_slot_mappings(*inputs, groups=(1, 0), out=out)
    for got, expected in zip(out, ([23, 24, -1], [11, -1, -1]), strict=True):
        check_values(subject.to_host(got), expected, "R17", "a caller's slots")
    pair.check_outputs()
    for wrong in ([], [3], [-1], [0, 0], [1, 2, 1]):
        with must_raise(ArgumentError, "R15", f"groups {wrong}"):
            pair.table.compute_slot_mappings(*inputs, groups=wrong)
    with must_raise(ArgumentError, "R17", "an output too many"):
        pair.table.compute_slot_mappings(*inputs, groups=[0], out=out)
    pair.check_outputs()


def test_lengths_of_each_group(subject_once: Subject) -> None:
    """A decoder step at position 1 over an encoder of six tokens: the cross group has the lengths of the encoder.

    Cases: W3. Rules: R27, R33.
    """
    need_exports(subject_once)
    pair = make(subject_once, B4, replace(B4, slot_mode="cross"), rows=[[[2], [5, 6]]])
    array, host = subject_once.device_array, subject_once.to_host
    inputs = array([0], "int32"), array([0, 1], "int32"), array([1], "int64")
    own, encoder = array([2], "int32"), array([6], "int32")
    for _ in range(2):
        found = pair.table.step_metadata(*inputs, [own, encoder], layouts="flashinfer")
        for group, pages, last in ((0, [2], 2), (1, [5, 6], 2)):
            export = found.groups[group].export
            assert export is not None
            check_values(host(export.entries[0])[: len(pages)], pages, "R27", f"the pages of group {group}")
            check_values(host(export.last_page_lens), [last], "R27", f"the last page of group {group}")
        check(found.groups[0].seq_lens is own and found.groups[1].seq_lens is encoder, "R33", "each has its lengths.")
        check_values(host(found.groups[1].slot_mapping), [-1], "R14", "the cross group's slot")
    shared = pair.table.step_metadata(*inputs, [own, own], layouts="flashinfer")
    check(shared.groups[0].export is shared.groups[1].export, "R33", "groups of one array share an export.")
    for wrong in ([own], [own, encoder, own], [own, array([1, 2], "int32")]):
        with must_raise(ArgumentError, "R33", "other lengths"):
            pair.table.step_metadata(*inputs, wrong)
