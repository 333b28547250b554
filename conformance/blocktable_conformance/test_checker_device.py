"""Bugs planted into right histories, found by kernels: eager and in captured graphs; and right histories (R40, R41)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from blocktable import (
    KINDS,
    BlockTable,
    BlockTableConfig,
    CheckError,
    ConfigError,
    ContextParallel,
    Finding,
    KVCacheGroup,
    UnsupportedError,
)
from blocktable_conformance import profiles
from blocktable_conformance.asserts import check
from blocktable_conformance.captures import Streams
from blocktable_conformance.subject import Subject
from blocktable_conformance.test_checker_histories import CONFIGS, NUM_BLOCKS, RightEngine

B4 = KVCacheGroup(block_size=4, num_blocks=32)
K3 = KVCacheGroup(block_size=6, kernel_block_size=2, num_blocks=32)
WINDOW = KVCacheGroup(block_size=4, num_blocks=32, sliding_window=4, allow_null=True)
RING = KVCacheGroup(block_size=4, num_blocks=32, slot_mode="ring", blocks_per_row=2)
POOLED = KVCacheGroup(block_size=4, num_blocks=32, pool="kv")
HOLES = KVCacheGroup(block_size=4, num_blocks=32, allow_null=True, null_block_id=3)
NO_NULL = KVCacheGroup(block_size=4, num_blocks=32, allow_null=True, null_block_id=-1)

REPORTED: dict[str, Any] = dict.fromkeys(KINDS, "report")


def make_table(subject: Subject, *groups: KVCacheGroup, rows: Sequence[Any] = (), **options: Any) -> BlockTable:
    """Return a table that kernels check, with rows; skip where they cannot."""
    sizes = {"max_num_reqs": 6, "max_num_batched_tokens": 64, "max_model_len": 32}
    checks = {"check_kinds": options.pop("check_kinds", REPORTED)}
    config = BlockTableConfig(groups=groups or (B4,), **sizes | options)
    try:
        table = subject.table(config, check="device", **checks)
    except UnsupportedError as error:
        pytest.skip(str(error))
    for row, block_ids in enumerate(rows):
        table.set_row(row, block_ids)
    return table


class Batch:
    """A batch on the device."""

    def __init__(
        self, subject: Subject, mapping: Sequence[int], starts: Sequence[int], positions: Sequence[int]
    ) -> None:
        device = subject.device_array
        self.arrays = device(mapping, "int32"), device(starts, "int32"), device(positions, "int64")

    def step(self, table: BlockTable) -> None:
        """Do a step over it."""
        table.step(*self.arrays)


def write(subject: Subject, table: BlockTable, row: int, start: int, stop: int) -> None:
    """Do a right step of one request, with positions start .. stop - 1."""
    Batch(subject, [row], [0, stop - start], range(start, stop)).step(table)


@dataclass(frozen=True)
class Plant:
    """A bug in a right history.

    Attributes:
        groups: of the table.
        rows: it begins with.
        batch: mapping, starts and positions of the call that does the harm.
        found: what is found, field by field; `positions` are those that the finding may name.
        before: what the engine does before that, right and wrong.
        options: of the table.
    """

    groups: tuple[KVCacheGroup, ...]
    rows: list[Any]
    batch: tuple[Sequence[int], Sequence[int], Sequence[int]]
    found: list[dict[str, Any]]
    before: Callable[[Subject, BlockTable], None] = lambda subject, table: None
    options: dict[str, Any] = field(default_factory=dict)


def fork(subject: Subject, table: BlockTable) -> None:
    write(subject, table, 0, 0, 6)
    table.copy_row(0, 1)


def come_back_in_a_window(subject: Subject, table: BlockTable) -> None:
    """Row 0 still lists block 5, which its window has passed: row 1 begins it, and may. Block 7 row 0 still writes."""
    write(subject, table, 0, 0, 10)
    table.set_row(1, [5])
    write(subject, table, 1, 0, 2)
    write(subject, table, 1, 2, 4)
    check(not table.collect_findings(), "R41.2", f"all was right until here: {table.findings}")
    table.append_row(1, [7])


def stay_stale(subject: Subject, table: BlockTable) -> None:
    """A request ended and its row stayed: its blocks go to row 1, right. Then row 0 is forked without a copy."""
    write(subject, table, 0, 0, 8)
    table.set_row(1, [6, 5])
    write(subject, table, 1, 0, 6)
    table.set_row(0, [9])
    write(subject, table, 0, 0, 2)
    check(not table.collect_findings(), "R41.2", f"all was right until here: {table.findings}")
    table.copy_row(0, 2)


def go_on(subject: Subject, table: BlockTable) -> None:
    """Roll back, write lower positions again, move: all right."""
    write(subject, table, 0, 2, 6)
    table.truncate_row(0, 1)
    table.append_row(0, [8, 9])
    write(subject, table, 0, 4, 6)
    write(subject, table, 0, 3, 7)
    table.move_row(0, 3)
    check(not table.collect_findings(), "R41.2", f"all was right until here: {table.findings}")


def roll_back(subject: Subject, table: BlockTable) -> None:
    write(subject, table, 0, 0, 10)
    table.truncate_row(0, 1)
    table.append_row(0, [8, 9])


def is_written(kind: str, row: int, positions: Sequence[int], block: int, **more: Any) -> dict[str, Any]:
    """Return a finding of group 0 whose blocks are those of 4 tokens."""
    slots = [4 * block + position % 4 for position in positions]
    return {"kind": kind, "group": 0, "row": row, "positions": positions, "block_id": block, "slots": slots, **more}


PLANTS = {
    "missing_block": Plant(
        (B4,),
        [[5, 6]],
        ([0], [0, 8], range(4, 12)),
        [{"kind": "missing_block", "group": 0, "row": 0, "positions": range(8, 12)}],
    ),
    "missing_block_in_one_group": Plant(
        (B4, K3),
        [[[5, 6, 7], [3]]],
        ([0], [0, 3], range(6, 9)),
        [{"kind": "missing_block", "group": 1, "row": 0, "positions": range(6, 9)}],
        lambda subject, table: write(subject, table, 0, 0, 6),
    ),
    "missing_block_in_an_empty_ring": Plant(
        (B4, RING),
        [[[5], []]],
        ([0], [0, 2], [0, 1]),
        [{"kind": "missing_block", "group": 1, "row": 0, "positions": [0, 1]}],
    ),
    "missing_block_of_this_rank": Plant(
        (B4,),
        [[5]],
        ([0], [0, 4], range(8, 12)),
        [{"kind": "missing_block", "group": 0, "row": 0, "positions": [10, 11]}],
        lambda subject, table: write(subject, table, 0, 0, 8),
        {"context_parallel": ContextParallel(world_size=2, rank=1, interleave_size=2)},
    ),
    "unset_row": Plant(
        (B4, B4),
        [[[5], [5]], [[6], [6]]],
        ([0, 1], [0, 1, 3], [1, 1, 2]),
        [{"kind": "unset_row", "row": 1, "positions": [1, 2]}],
        lambda subject, table: table.clear_row(1),
    ),
    "unset_row_outside": Plant(
        (B4,),
        [[5]],
        ([0, 99, -1, -7], [0, 1, 2, 3, 3], [0, 7, 8]),
        [{"kind": "unset_row", "row": 99, "positions": [7]}],
    ),
    "shared_block_written": Plant(
        (B4,),
        [[5, 6]],
        ([1], [0, 1], [6]),
        [is_written("shared_block_written", 1, [6], 6, other_row=0)],
        fork,
    ),
    "shared_block_of_three_rows": Plant(
        (B4,),
        [[5], [5], [5]],
        ([1], [0, 2], [0, 1]),
        [is_written("shared_block_written", 1, [0, 1], 5, other_row=0)],
    ),
    "shared_block_of_a_pool": Plant(
        (POOLED, POOLED),
        [[[5], [7]], [[8], [5]]],
        ([0], [0, 1], [0]),
        [is_written("shared_block_written", 0, [0], 5, other_row=1)],
    ),
    "shared_block_in_a_window": Plant(
        (WINDOW,),
        [[5, 6, 7]],
        ([1], [0, 1], [5]),
        [
            is_written("shared_block_written", 1, [5], 7, other_row=0),
            {"kind": "position_gap", "row": 1, "positions": [5]},
        ],
        come_back_in_a_window,
    ),
    "shared_block_of_stale_rows": Plant(
        (B4,),
        [[5, 6]],
        ([2], [0, 1], [2]),
        [is_written("shared_block_written", 2, [2], 9, other_row=0)],
        stay_stale,
        {"stale_rows": True},
    ),
    "slot_written_twice": Plant(
        (B4,),
        [[5, 6]],
        ([0, 0], [0, 1, 2], [3, 3]),
        [is_written("slot_written_twice", 0, [3], 5)],
        lambda subject, table: write(subject, table, 0, 0, 3),
    ),
    "slot_written_twice_in_a_tree": Plant(
        (B4,),
        [[5, 6, 7]],
        ([0], [0, 4], [5, 6, 6, 7]),
        [is_written("slot_written_twice", 0, [6], 6)],
        lambda subject, table: write(subject, table, 0, 0, 5),
    ),
    "slot_written_twice_in_a_ring": Plant(
        (RING,), [[5, 9]], ([0], [0, 3], [33, 25, 26]), [is_written("slot_written_twice", 0, [33, 25], 5)]
    ),
    "position_gap": Plant(
        (B4,), [[5, 6, 7]], ([3], [0, 2], [8, 9]), [{"kind": "position_gap", "row": 3, "positions": [8]}], go_on
    ),
    "position_gap_inside": Plant(
        (B4,), [[5, 6, 7]], ([3], [0, 2], [7, 9]), [{"kind": "position_gap", "row": 3, "positions": [9]}], go_on
    ),
    "position_gap_after_a_rollback": Plant(
        (B4,), [[5, 6, 7]], ([0], [0, 1], [5]), [{"kind": "position_gap", "row": 0, "positions": [5]}], roll_back
    ),
    "bad_starts_not_from_0": Plant((B4,), [[5]], ([0], [1, 3], range(3)), [{"kind": "bad_starts"}]),
    "bad_starts_falling": Plant((B4,), [[5], [7]], ([0, 1], [0, 2, 1], range(3)), [{"kind": "bad_starts"}]),
    "bad_starts_past_the_end": Plant((B4,), [[5]], ([0], [0, 4], range(3)), [{"kind": "bad_starts"}]),
    "null_written": Plant(
        (HOLES,), [[5, 3, 6]], ([0], [0, 4], range(2, 6)), [is_written("null_written", 0, [4, 5], 3)]
    ),
    "null_without_a_block": Plant(
        (NO_NULL,),
        [[5, -1, 6]],
        ([0], [0, 4], range(2, 6)),
        [{"kind": "null_written", "group": 0, "row": 0, "positions": [4, 5], "block_id": -1}],
    ),
}
"""Name -> a bug; its name begins with the kind."""


def compare(found: Sequence[Finding], expected: Sequence[dict[str, Any]], step: int) -> None:
    """Demand these findings, all of one step, in any order."""
    got = sorted(found, key=lambda each: each.kind)
    check(len(got) == len(expected), "R41.2", f"expected {expected}, found {got}.")
    for finding, fields in zip(got, sorted(expected, key=lambda each: each["kind"]), strict=True):
        for name in ("group", "row", "block_id", "other_row"):
            check(getattr(finding, name) == fields.get(name), "R41.2", f"{name} of {fields}: {finding}.")
        check(finding.position in fields.get("positions", [None]), "R41.2", f"position of {fields}: {finding}.")
        check(finding.slot in fields.get("slots", [None]), "R41.2", f"slot of {fields}: {finding}.")
        check(finding.step == step, "R41.3", f"step {step}: {finding}.")
        check(finding.message.startswith(f"{finding.kind}: "), "R38", finding.message)


def told_step(table: BlockTable) -> int:
    """Return the step that kernels were told with the last commit that changed anything."""
    return int(table._rows.mirror[table.config.check_regions.step])


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(subject: Subject, name: str) -> None:
    """By a step, and again by slots alone; a later right call finds nothing.

    Rules: R40, R41.2, R41.3.
    """
    plant = PLANTS[name]
    table = make_table(subject, *plant.groups, rows=plant.rows, **plant.options)
    plant.before(subject, table)
    check(not table.collect_findings(), "R41.2", f"all was right until here: {table.findings}")
    table.commit()
    batch = Batch(subject, *plant.batch)
    table.compute_slot_mappings(*batch.arrays)
    found = table.collect_findings()
    compare(found, plant.found, told_step(table))
    if name == "position_gap" or name.startswith(("position_gap_", "shared_block_in", "shared_block_of_stale")):
        return  # found once: the mark, or the last writer, is another one now
    batch.step(table)
    again = table.collect_findings()[len(found) :]
    check([each.kind for each in again] == [each.kind for each in found], "R41.2", f"found again by a step: {again}.")


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found_in_a_graph(subject: Subject, name: str) -> None:
    """At a replay of what was captured before the bug was there; at each.

    Rules: R21, R41.2.
    """
    plant, streams = PLANTS[name], Streams(subject)
    table = make_table(subject, *plant.groups, rows=plant.rows, **plant.options)
    stream = streams.create()
    table.warmup()
    batch = Batch(subject, *plant.batch)
    table.commit(stream=stream)
    table.compute_slot_mappings(*Batch(subject, [-1], [0, 0], [0]).arrays, stream=stream)
    with streams.capture(stream) as graph:
        table.compute_slot_mappings(*batch.arrays, stream=stream)
    check(not table.collect_findings(), "R41.2", "a capture does nothing.")
    plant.before(subject, table)
    table.commit(stream=stream)
    streams.synchronize()
    streams.replay(graph)
    found = table.collect_findings()
    compare(found, plant.found, told_step(table))
    if "gap" in name or name.startswith(("shared_block_in", "shared_block_of_stale")):
        return
    streams.replay(graph)
    again = table.collect_findings()[len(found) :]
    check([each.kind for each in again] == [each.kind for each in found], "R41.2", f"found at each replay: {again}.")


def test_a_finding_raises_when_the_call_has_done_its_work(subject: Subject) -> None:
    """Of a later call, or of `collect_findings`; the slots are there, and the changes are committed.

    Rules: R38, R41.1.
    """
    table = make_table(subject, rows=[[5]], check_kinds=None)
    batch = Batch(subject, [0], [0, 2], [3, 4])

    def call() -> None:
        batch.step(table)
        table.collect_findings()

    with pytest.raises(CheckError, match="missing_block: a token at position 4 of row 0, group 0") as caught:
        call()
    check(caught.value.finding.kind == "missing_block", "R38", f"{caught.value.finding}")
    slots = subject.to_host(table.buffers.slot_mappings[0])[:2].tolist()
    check(slots == [23, -1], "R12, R41.1", f"the work is done first: {slots}.")
    table.verify()
    check(table.collect_findings() == table.findings, "R38", "it is raised once.")


def test_what_is_off_is_not_looked_for(subject: Subject) -> None:
    """In one group, or in the table.

    Rules: R38, R41.2.
    """
    kinds = [{**REPORTED, "missing_block": "off"}, {**REPORTED, "slot_written_twice": "off", "unset_row": "off"}]
    table = make_table(subject, B4, B4, rows=[[[5], [6]]], check_kinds=kinds)
    Batch(subject, [0, 0], [0, 2, 3], [3, 4, 3]).step(table)
    found = [(each.kind, each.group) for each in table.collect_findings()]
    check(sorted(found) == [("missing_block", 1), ("slot_written_twice", 0)], "R41.2", f"{found}")


def test_rules_of_the_host_hold_with_kernels_too(subject: Subject) -> None:
    """Row operations are looked at by the host, and host arrays' starts.

    Rules: R40, R41.1.
    """
    table = make_table(subject, rows=[[5]])
    table.append_row(0, [5])
    table.set_row(0, [7])
    table.step(np.array([0], np.int32), np.array([0, 2], np.int32), np.arange(4), num_tokens_padded=1)
    kinds = [each.kind for each in table.collect_findings()]
    check(kinds == ["duplicate_block", "live_row_set", "padding_below_tokens"], "R41.1", f"{kinds}")


def test_an_export_that_is_cut_is_known_at_the_end(subject: Subject) -> None:
    """Nobody sees it without a wait; `collect_findings` waits.

    Rules: R27, R41.1.
    """
    table = make_table(subject, rows=[[1, 2, 3, 4], [5, 6, 7, 8]])
    if not subject.declares("exports"):
        pytest.skip("the backend does not export.")
    table.commit()
    out = table.create_export("csr", capacity=5)
    mapping, lens = (subject.device_array(values, "int32") for values in ([0, 1], [16, 14]))
    if type(mapping) is np.ndarray:
        pytest.skip("host arrays are refused.")
    table.export("csr", mapping, seq_lens=lens, out=out)
    (found,) = table.collect_findings()
    check(found.kind == "export_cut", "R41.1", f"{found}")
    check("3 entries" in found.message, "R38", found.message)
    check(table.collect_findings() == (found,), "R41.1", "it is counted once.")


def test_a_cross_group_is_not_looked_at(subject: Subject) -> None:
    """Not where it is named either, and its positions are nobody's marks.

    Rules: R14, R40.
    """
    cross = KVCacheGroup(block_size=4, slot_mode="cross")
    table = make_table(subject, B4, cross, rows=[[[5], [2]], [[6], [2]]])
    write(subject, table, 0, 0, 2)
    batch = Batch(subject, [0, 1, 99], [0, 2, 4, 5], [9, 9, 0, 0, 9])
    table.compute_slot_mappings(*batch.arrays, groups=[1])
    write(subject, table, 0, 2, 3)
    check(not table.collect_findings(), "R40", f"{table.findings}")


def test_memory_that_was_lost_tells_nothing(subject: Subject) -> None:
    """After `invalidate` who wrote last is not known; what rows hold is.

    Rules: R24, R41.5.
    """
    table = make_table(subject, WINDOW, rows=[[5, 6]])
    write(subject, table, 0, 0, 2)
    table.copy_row(0, 1)
    table.invalidate()
    write(subject, table, 1, 2, 3)
    check(not table.collect_findings(), "R41.5", f"{table.findings}")
    write(subject, table, 0, 2, 3)
    compare(table.collect_findings(), [is_written("shared_block_written", 0, [2], 5, other_row=1)], told_step(table))
    table.verify()


def test_nothing_is_found_before_the_first_row_operation(subject: Subject) -> None:
    """Also of what the host sees: starts that end before the positions, padding below the tokens.

    Rules: R40, R41.1.
    """
    table = make_table(subject, B4)
    host = np.array([0], np.int32), np.array([0, 0], np.int32), np.array([0])
    table.compute_slot_mappings(*host)
    table.step(*host)
    check(not table.collect_findings(), "R41.1", f"{table.findings}")
    table.set_row(0, [5])
    table.step(*host)
    kinds = [each.kind for each in table.collect_findings()]
    check(kinds == ["bad_starts"], "R41.1", f"starts that end before the positions: {kinds}")


def test_starts_on_the_host_are_looked_at_without_requests(subject: Subject) -> None:
    """No kernel looks at a call that has no requests: `query_start_loc` has one entry, and it is not 0.

    Rules: R40, R41.2.
    """
    table = make_table(subject, B4)
    table.set_row(0, [5])
    table.step(np.zeros(0, np.int32), np.array([2], np.int32), np.array([0, 1]))
    kinds = [each.kind for each in table.collect_findings()]
    check(kinds == ["bad_starts"], "R41.2", f"starts that begin with 2: {kinds}")


def test_groups_say_how_many_blocks_they_have(subject: Subject) -> None:
    """Rules: R41.6."""
    make_table(subject)
    with pytest.raises(ConfigError, match="set num_blocks in every group that has slots; group 1 has none"):
        make_table(subject, B4, KVCacheGroup(block_size=4))


class DeviceEngine(RightEngine):
    """The right engine, whose table kernels check."""

    mode = "device"


@pytest.mark.parametrize("name", CONFIGS)
def test_kernels_find_nothing_in_a_right_history(subject: Subject, name: str) -> None:
    """As in host mode: prefixes, forks with a copy, rollback, preemption, moves, windows.

    Rules: R40, R41.2, R41.4.
    """
    options = dict(CONFIGS[name])
    options["groups"] = [replace(group, num_blocks=group.num_blocks or NUM_BLOCKS) for group in options["groups"]]
    make_table(subject)  # skips where kernels cannot
    engine = DeviceEngine(subject, 7, **options)
    engine.run(profiles.current().engine_steps)
    engine.table.collect_findings()
    check(not engine.table.num_findings, "R41.2", f"the history is right: {engine.table.findings}")
    engine.table.verify()
