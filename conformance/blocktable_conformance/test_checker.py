"""Bugs planted into right histories: the checker names kind, step, row, group, position and block (R38-R40)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from blocktable import (
    ArgumentError,
    BlockTable,
    BlockTableConfig,
    BlockTableError,
    CheckError,
    ContextParallel,
    Finding,
    KVCacheGroup,
)
from blocktable_conformance.asserts import check, must_raise
from blocktable_conformance.captures import Streams
from blocktable_conformance.subject import Subject

pytestmark = pytest.mark.host

B4 = KVCacheGroup(block_size=4)
WINDOW = KVCacheGroup(block_size=4, sliding_window=4, allow_null=True)

Call = Callable[[], Any]


class Engine:
    """A checked table, and steps over lists.

    Attributes:
        table: the table.
    """

    def __init__(
        self,
        subject: Subject,
        *groups: KVCacheGroup,
        rows: Sequence[Any] = (),
        kinds: Any = None,
        check_mode: str = "host",
        **options: Any,
    ) -> None:
        self.subject = subject
        config = BlockTableConfig(
            groups=groups or (B4,), max_num_reqs=6, max_num_batched_tokens=64, max_model_len=32, **options
        )
        self.table: BlockTable = subject.table(config, check=check_mode, check_kinds=kinds)
        for row, block_ids in enumerate(rows):
            self.table.set_row(row, block_ids)

    def arrays(self, mapping: Sequence[int] | None, starts: Sequence[int], positions: Sequence[int]) -> list[Any]:
        """Return the inputs of a call on the device."""
        device = self.subject.device_array
        return [
            None if mapping is None else device(mapping, "int32"),
            device(starts, "int32"),
            device(positions, "int64"),
        ]

    def step(
        self, mapping: Sequence[int] | None, starts: Sequence[int], positions: Sequence[int], **options: Any
    ) -> Any:
        """Do a step."""
        return self.table.step(*self.arrays(mapping, starts, positions), **options)

    def slots(
        self, mapping: Sequence[int] | None, starts: Sequence[int], positions: Sequence[int], **options: Any
    ) -> Any:
        """Compute slots."""
        return self.table.compute_slot_mappings(*self.arrays(mapping, starts, positions), **options)

    def write(self, row: int, start: int, stop: int) -> Any:
        """Do a step of one request with positions start .. stop - 1."""
        return self.step([row], [0, stop - start], range(start, stop))

    def raises(self, call: Call, **expected: Any) -> Finding:
        """Demand that a call raises a finding with these fields, and does nothing else."""
        before, launches = self.table.num_findings, self.subject.call_log.launches
        with pytest.raises(CheckError) as caught:
            call()
        finding = caught.value.finding
        self._compare(finding, expected)
        check(str(caught.value) == finding.message, "R38", "the error must say the finding's sentence.")
        check(self.table.num_findings > before, "R38", "what was raised must be counted.")
        check(self.subject.call_log.launches == launches, "R39", "a call that raises must launch nothing.")
        return finding

    def reports(self, call: Call, **expected: Any) -> Finding:
        """Demand that a call reports one finding with these fields, and goes on."""
        before = self.table.num_findings
        call()
        check(self.table.num_findings == before + 1, "R38", f"one finding must be reported: {self.table.findings}.")
        finding = self.table.findings[-1]
        self._compare(finding, expected)
        return finding

    def right(self) -> None:
        """Demand that nothing was found."""
        check(self.table.collect_findings() == (), "R40", f"the history is right: {self.table.findings}.")

    @staticmethod
    def _compare(finding: Finding, expected: dict[str, Any]) -> None:
        names = ("kind", "step", "group", "row", "position", "block_id", "slot", "other_row")
        given = {name: getattr(finding, name) for name in names}
        check(given == {name: expected.get(name) for name in names}, "R40", f"expected {expected}, found {given}.")


# missing_block


def test_tokens_past_a_row_are_missing(subject: Subject) -> None:
    """Row [5, 6] of 4 tokens a block, positions 4..11: nothing is sent, and the step after an append is right.

    Rules: R39, R40.
    """
    engine = Engine(subject, rows=[[5, 6]])
    engine.write(0, 0, 4)
    finding = engine.raises(lambda: engine.write(0, 4, 12), kind="missing_block", step=1, group=0, row=0, position=8)
    check("holds 2 blocks, 8 tokens" in finding.message, "R38", finding.message)
    check("4 tokens" in finding.message, "R38", finding.message)
    engine.table.append_row(0, [7])
    engine.write(0, 4, 12)
    engine.table.verify()
    check(engine.table.num_findings == 1, "R40", "the history went on rightly.")


def test_a_step_that_raises_commits_nothing(subject: Subject) -> None:
    """Changes stay pending, and a call without a commit sees the rows as of the last one.

    Rules: R39.
    """
    engine = Engine(subject, rows=[[5]])
    engine.write(0, 0, 4)
    engine.table.append_row(0, [6])
    sent = engine.table.num_bytes_sent
    engine.raises(lambda: engine.write(0, 4, 9), kind="missing_block", step=1, group=0, row=0, position=8)
    check(engine.table.num_bytes_sent == sent, "R39", "a step that raises must send nothing.")
    engine.raises(lambda: engine.slots([0], [0, 1], [4]), kind="missing_block", step=1, group=0, row=0, position=4)
    engine.table.commit()
    slots = engine.slots([0], [0, 1], [4])
    check(subject.to_host(slots[0]).tolist() == [24], "R12", "after the commit the token has its slot.")


def test_one_group_of_several_misses_a_block(subject: Subject) -> None:
    """The finding names the group, also one with several kernel blocks in a block.

    Rules: R40.
    """
    k3 = KVCacheGroup(block_size=6, kernel_block_size=2)
    engine = Engine(subject, B4, k3, rows=[[[5, 6, 7], [3]]])
    engine.write(0, 0, 6)
    engine.raises(lambda: engine.write(0, 6, 9), kind="missing_block", step=1, group=1, row=0, position=6)


def test_an_empty_ring_beside_a_filled_group_misses_its_block(subject: Subject) -> None:
    """Rules: R40."""
    ring = KVCacheGroup(block_size=4, slot_mode="ring", blocks_per_row=2)
    engine = Engine(subject, B4, ring, rows=[[[5], []]])
    engine.raises(lambda: engine.write(0, 0, 2), kind="missing_block", step=0, group=1, row=0, position=0)


@pytest.mark.parametrize("rank", [0, 1])
def test_tokens_of_other_ranks_are_no_findings(subject: Subject, rank: int) -> None:
    """Two ranks share a row, two tokens each in turn; a block of 4 stands for 8 positions.

    Rules: R40.
    """
    engine = Engine(subject, rows=[[5]], context_parallel=ContextParallel(world_size=2, rank=rank, interleave_size=2))
    engine.write(0, 0, 8)
    other = 10 if rank == 0 else 8
    engine.step([0], [0, 1], [other])
    engine.right()
    engine.raises(lambda: engine.write(0, 8, 12), kind="missing_block", step=2, group=0, row=0, position=8 + 2 * rank)


# unset_row


def test_a_row_that_was_cleared_too_early(subject: Subject) -> None:
    """Rules: R40."""
    engine = Engine(subject, rows=[[5], [6]])
    engine.step([0, 1], [0, 1, 2], [0, 0])
    engine.table.clear_row(1)
    engine.raises(lambda: engine.step([0, 1], [0, 1, 3], [1, 1, 2]), kind="unset_row", step=1, row=1, position=1)


@pytest.mark.parametrize("row", [6, -2, 2**31 - 1])
def test_a_row_outside_the_table_is_unset_but_with_tokens_only(subject: Subject, row: int) -> None:
    """-1 is usual for padding, and an entry without tokens is padding whatever it says.

    Rules: R40.
    """
    engine = Engine(subject, rows=[[5]])
    engine.step([0, row, -1], [0, 1, 1, 3], [0, 5, 6])
    engine.right()
    engine.raises(lambda: engine.step([0, row], [0, 1, 2], [1, 7]), kind="unset_row", step=1, row=row, position=7)


def test_nothing_is_found_before_the_first_row_operation(subject: Subject) -> None:
    """Warm-up and profiling run over an empty table.

    Rules: R40.
    """
    engine = Engine(subject)
    engine.table.warmup()
    engine.step([0, 3], [0, 1, 2], [0, 9])
    engine.slots(None, [0, 2], [0, 0])
    engine.right()
    engine.table.set_row(0, [5])
    engine.raises(lambda: engine.step([3], [0, 1], [0]), kind="unset_row", step=1, row=3, position=0)


# shared_block_written


def test_a_fork_whose_last_block_was_not_copied(subject: Subject) -> None:
    """Both rows would write slot 26; a fork with a copy is right.

    Rules: R40.
    """
    engine = Engine(subject, rows=[[5, 6]])
    engine.write(0, 0, 6)
    engine.table.copy_row(0, 1)
    finding = engine.raises(
        lambda: engine.step([0, 1], [0, 1, 2], [6, 6]),
        kind="shared_block_written",
        step=1,
        group=0,
        row=0,
        position=6,
        block_id=6,
        slot=26,
        other_row=1,
    )
    check("since commit 1" in finding.message, "R38", finding.message)
    engine.table.replace_blocks(1, 0, 1, [7])
    seen = engine.step([0, 1], [0, 1, 2], [6, 6])
    check(subject.to_host(seen.slot_mappings[0]).tolist() == [26, 30], "R12", "the fork has a block of its own.")


def test_a_block_that_was_freed_twice(subject: Subject) -> None:
    """The allocator gives block 6 out although row 0 still holds it; also with k = 2 and no null block.

    Rules: R40.
    """
    k2 = KVCacheGroup(block_size=4, kernel_block_size=2, null_block_id=-1)
    engine = Engine(subject, k2, rows=[[0, 6]])
    engine.write(0, 0, 5)
    engine.table.set_row(1, [6])
    engine.raises(
        lambda: engine.write(1, 0, 2),
        kind="shared_block_written",
        step=1,
        group=0,
        row=1,
        position=0,
        block_id=6,
        slot=24,
        other_row=0,
    )


def test_a_block_of_another_group_of_the_pool(subject: Subject) -> None:
    """Groups of one pool share ids; without a pool each group has its own.

    Rules: R38, R40.
    """
    pooled = KVCacheGroup(block_size=4, pool="kv")
    engine = Engine(subject, pooled, pooled, rows=[[[5], [7]], [[8], [5]]])
    engine.write(0, 0, 0)
    engine.raises(
        lambda: engine.write(1, 0, 1),
        kind="shared_block_written",
        step=1,
        group=1,
        row=1,
        position=0,
        block_id=5,
        slot=20,
        other_row=0,
    )
    apart = Engine(subject, B4, B4, rows=[[[5], [7]], [[8], [5]]])
    apart.step([0, 1], [0, 1, 2], [0, 0])
    apart.right()


def test_prefixes_are_shared_and_read_never_written(subject: Subject) -> None:
    """Full blocks of two rows are one, in blocks of their own they write.

    Rules: R40.
    """
    engine = Engine(subject, rows=[[5, 6, 7]])
    engine.write(0, 0, 9)
    engine.table.set_row(1, [5, 6, 8])
    engine.step([0, 1], [0, 1, 2], [9, 8])
    engine.right()


def test_three_rows_hold_a_block(subject: Subject) -> None:
    """The sum of rows 0 and 2 is twice row 1: it is found all the same.

    Rules: R40.
    """
    engine = Engine(subject, rows=[[5], [5], [5]])
    engine.raises(
        lambda: engine.write(1, 0, 1),
        kind="shared_block_written",
        step=0,
        group=0,
        row=1,
        position=0,
        block_id=5,
        slot=20,
        other_row=0,
    )


def test_in_a_window_a_block_comes_back_to_another_row(subject: Subject) -> None:
    """Row 0 still lists block 5, which its window has passed: row 1 begins it, and may; a fork may not.

    Rules: R40.
    """
    engine = Engine(subject, WINDOW, rows=[[5, 6, 7]])
    engine.write(0, 0, 10)
    engine.table.set_row(1, [5])
    engine.write(1, 0, 2)
    engine.write(1, 2, 4)
    engine.right()
    engine.table.copy_row(1, 2)
    engine.table.append_row(2, [8])
    engine.table.append_row(1, [7])  # row 0's last block, which it still writes
    engine.raises(
        lambda: engine.write(1, 5, 6),
        kind="shared_block_written",
        step=3,
        group=0,
        row=1,
        position=5,
        block_id=7,
        slot=29,
        other_row=0,
    )


def test_stale_rows_keep_blocks_that_others_begin(subject: Subject) -> None:
    """A request ended and its row stayed: its block goes to another row. A fork without a copy is found.

    Rules: R40.
    """
    engine = Engine(subject, rows=[[5, 6]], stale_rows=True)
    engine.write(0, 0, 8)
    engine.table.set_row(1, [6, 5])
    engine.write(1, 0, 6)
    engine.table.set_row(0, [9])
    engine.write(0, 0, 2)
    engine.right()
    engine.table.copy_row(0, 2)
    engine.raises(
        lambda: engine.write(2, 2, 3),
        kind="shared_block_written",
        step=3,
        group=0,
        row=2,
        position=2,
        block_id=9,
        slot=38,
        other_row=0,
    )


# slot_written_twice


def test_a_row_twice_in_a_batch(subject: Subject) -> None:
    """Rules: R40."""
    engine = Engine(subject, rows=[[5, 6]])
    engine.write(0, 0, 3)
    engine.raises(
        lambda: engine.step([0, 0], [0, 1, 2], [3, 3]),
        kind="slot_written_twice",
        step=1,
        group=0,
        row=0,
        position=3,
        block_id=5,
        slot=23,
        other_row=0,
    )
    engine.slots([0], [0, 1], [3])
    engine.slots([0], [0, 1], [3])  # a draft over the same position, in a call of its own
    check(engine.table.num_findings == 1, "R40", f"{engine.table.findings}")


def test_a_tree_by_positions_writes_a_slot_twice(subject: Subject) -> None:
    """Siblings share position 6.

    Rules: R40.
    """
    engine = Engine(subject, rows=[[5, 6, 7]])
    engine.write(0, 0, 5)
    engine.raises(
        lambda: engine.step([0], [0, 4], [5, 6, 6, 7]),
        kind="slot_written_twice",
        step=1,
        group=0,
        row=0,
        position=6,
        block_id=6,
        slot=26,
        other_row=0,
    )


def test_a_ring_that_turns_is_right_and_places_out_of_order_are_not(subject: Subject) -> None:
    """Ascending positions leave overwritten tokens out (R14); of others two may share a place.

    Rules: R14, R40.
    """
    ring = KVCacheGroup(block_size=4, slot_mode="ring", blocks_per_row=2)
    engine = Engine(subject, ring, rows=[[5, 9]])
    engine.write(0, 0, 12)
    engine.write(0, 12, 25)
    engine.right()
    engine.raises(
        lambda: engine.step([0], [0, 3], [33, 25, 26]),
        kind="slot_written_twice",
        step=2,
        group=0,
        row=0,
        position=25,
        block_id=5,
        slot=21,
        other_row=0,
    )


# duplicate_block


@pytest.mark.parametrize("operation", ["append_row", "append_rows", "set_row", "set_rows", "replace", "remap"])
def test_a_block_comes_twice_into_a_row(subject: Subject, operation: str) -> None:
    """Row [5, 9, 9]: position 8 would get position 4's slot. The operation changes nothing.

    Rules: R6, R40.
    """
    engine = Engine(subject, rows=[[5, 9, 7] if operation in ("replace", "remap") else [5, 9]])
    table = engine.table
    calls: dict[str, Call] = {
        "append_row": lambda: table.append_row(0, [9]),
        "append_rows": lambda: table.append_rows([1, 0], [3, 9], [1, 1]),
        "set_row": lambda: table.set_row(0, [5, 9, 9]),
        "set_rows": lambda: table.set_rows([1, 0], [[9, 5, 9, 9]], [1, 3]),
        "replace": lambda: table.replace_blocks(0, 0, 2, [9]),
        "remap": lambda: table.remap_blocks(0, [7], [9]),
    }
    before = table.host_table(0).copy()
    finding = engine.raises(calls[operation], kind="duplicate_block", step=0, group=0, row=0, position=8, block_id=9)
    check("slot of position 4" in finding.message, "R38", finding.message)
    check(np.array_equal(before, table.host_table(0)), "R6", "a row operation that raises has changed nothing.")


def test_blocks_that_are_no_duplicates(subject: Subject) -> None:
    """Holes, a window's blocks that come back, exchanged blocks, and rings that say so.

    Rules: R40.
    """
    holes = Engine(subject, KVCacheGroup(block_size=4, allow_null=True), rows=[[0, 0, 5]])
    holes.table.append_row(0, [0, 6])
    holes.table.remap_blocks(0, [5, 6], [6, 5])
    holes.table.replace_blocks(0, 0, 2, [6, 7])
    holes.right()
    window = Engine(subject, WINDOW, rows=[[5, 6]])
    window.table.append_row(0, [5])
    window.right()
    ring = Engine(subject, kinds=[{"duplicate_block": "off"}], rows=[[5, 9, 5, 9]])
    ring.write(0, 0, 8)
    ring.write(0, 8, 12)
    ring.right()


# live_row_set, position_gap, null_written: reported


def test_two_requests_are_given_one_row(subject: Subject) -> None:
    """A list that only grows is the same request's.

    Rules: R40.
    """
    engine = Engine(subject, rows=[[5]])
    engine.table.set_row(0, [5, 6])
    engine.write(0, 0, 5)
    engine.right()
    finding = engine.reports(
        lambda: engine.table.set_row(0, [7]), kind="live_row_set", step=1, group=0, row=0, block_id=5
    )
    check(engine.table.block_ids(0, 0).tolist() == [7], "R38", f"it is reported, and goes on: {finding}")


def test_a_hole_between_positions(subject: Subject) -> None:
    """A rollback that writes lower positions again is right, and marks follow the row; 8 after 6 is not.

    Rules: R40.
    """
    engine = Engine(subject, rows=[[5, 6, 7]])
    engine.write(0, 2, 6)
    engine.table.truncate_row(0, 1)
    engine.table.append_row(0, [8, 9])
    engine.write(0, 4, 6)
    engine.write(0, 3, 7)
    engine.table.move_row(0, 3)
    engine.write(3, 7, 7)
    engine.right()
    engine.reports(lambda: engine.write(3, 8, 9), kind="position_gap", step=4, row=3, position=8)
    engine.reports(lambda: engine.step([3], [0, 2], [9, 11]), kind="position_gap", step=5, row=3, position=11)
    engine.table.truncate_row(3, 1)
    engine.table.append_row(3, [10])
    engine.reports(lambda: engine.write(3, 5, 6), kind="position_gap", step=6, row=3, position=5)
    engine.table.copy_row(3, 0)
    engine.table.replace_blocks(0, 0, 0, [11, 12])
    engine.write(0, 7, 8)
    check(engine.table.num_findings == 3, "R40", "the first step after replace_blocks may start anywhere.")


def test_nothing_is_written_into_holes(subject: Subject) -> None:
    """A token falls into a hole, or into the null block, which collects it.

    Rules: R40.
    """
    engine = Engine(subject, KVCacheGroup(block_size=4, allow_null=True, null_block_id=3), rows=[[5, 3, 6]])
    engine.reports(
        lambda: engine.write(0, 2, 6),
        kind="null_written",
        step=0,
        group=0,
        row=0,
        position=4,
        block_id=3,
        slot=12,
    )
    none = Engine(subject, KVCacheGroup(block_size=4, allow_null=True, null_block_id=-1), rows=[[5, -1, 6]])
    none.reports(
        lambda: none.write(0, 2, 6),
        kind="null_written",
        step=0,
        group=0,
        row=0,
        position=4,
        block_id=-1,
    )


# The call as a whole


@pytest.mark.parametrize(("starts", "num_positions"), [([1, 3], 3), ([0, 2, 1], 3), ([0, 4], 3), ([3, 2], 5)])
def test_starts_that_are_none(subject: Subject, starts: list[int], num_positions: int) -> None:
    """Not from 0, decreasing, past the positions, lengths given as starts.

    Rules: R40.
    """
    engine = Engine(subject, rows=[[5, 6], [7]])
    mapping = list(range(len(starts) - 1))
    engine.raises(lambda: engine.step(mapping, starts, range(num_positions)), kind="bad_starts", step=0)


def test_positions_past_the_last_start(subject: Subject) -> None:
    """They are padding where it was asked for, or where only the device knows the starts.

    Rules: R15, R40.
    """
    engine = Engine(subject, rows=[[5, 6]])
    engine.step([0], [0, 2], range(4), num_tokens_padded=4)
    if type(subject.device_array([0], "int32")) is np.ndarray:
        engine.raises(lambda: engine.step([0], [0, 3], range(4)), kind="bad_starts", step=1)
    else:
        engine.step([0], [0, 3], range(4))
        engine.right()


def test_padding_below_the_tokens(subject: Subject) -> None:
    """Rules: R40."""
    engine = Engine(subject, rows=[[5, 6]])
    engine.raises(lambda: engine.step([0], [0, 4], range(4), num_tokens_padded=3), kind="padding_below_tokens", step=0)
    engine.slots([0], [0, 0], range(4), num_tokens_padded=2)


def test_an_export_that_is_cut(subject: Subject) -> None:
    """Lengths 16 and 14 in a set for 5 blocks: 3 blocks are gone. Host arrays are refused without a checker too.

    Rules: R27, R40.
    """
    if not subject.declares("exports"):
        pytest.skip("the backend does not export.")
    engine = Engine(subject, rows=[[1, 2, 3, 4], [5, 6, 7, 8]])
    engine.table.commit()
    out = engine.table.create_export("csr", capacity=5)
    mapping, lens = (subject.device_array(values, "int32") for values in ([0, 1], [16, 14]))

    def call() -> Any:
        return engine.table.export("csr", mapping, seq_lens=lens, out=out)

    if type(mapping) is np.ndarray:
        with pytest.raises(ArgumentError, match="3 would be left out"):
            call()
    else:
        engine.raises(call, kind="export_cut", step=1, group=0)


def test_a_batch_table_of_another_batch(subject: Subject) -> None:
    """An array that was refilled in place has the same address: the checker sees its values.

    Rules: R26, R40.
    """
    if not subject.declares("exports"):
        pytest.skip("the backend does not export.")
    engine = Engine(subject, rows=[[5], [9]])
    engine.table.commit()
    mapping = subject.device_array([0], "int32")
    engine.table.gather(mapping)
    engine.table.export("flash_attention_3", mapping)
    engine.right()
    try:
        mapping[0] = 1
    except TypeError:
        pytest.skip("the backend's arrays cannot be refilled from the host.")

    def call() -> Any:
        return engine.table.export("flash_attention_3", mapping)

    if type(mapping) is np.ndarray:
        with pytest.raises(ArgumentError, match="another batch"):
            call()
    else:
        engine.raises(call, kind="stale_batch", step=1, group=0)


# Severities, and what is kept


def test_severities_change_what_is_done(subject: Subject) -> None:
    """A kind may be reported, or off, in one group alone; on_finding is told, and nothing raises.

    Rules: R38.
    """
    engine = Engine(subject, B4, B4, rows=[[[5], [6]]], kinds=[{"missing_block": "off"}, {"missing_block": "report"}])
    engine.reports(lambda: engine.write(0, 4, 5), kind="missing_block", step=0, group=1, row=0, position=4)
    told: list[Finding] = []
    config = engine.table.config
    table = subject.table(config, check="host", on_finding=told.append)
    table.append_row(0, [[5, 5], [6]])
    table.commit()
    check([each.kind for each in told] == ["duplicate_block"], "R38", f"{told}")
    check(table.block_ids(0, 0).tolist() == [5, 5], "R38", "with on_finding the operation goes on.")
    table.step(*engine.arrays([0], [0, 2], [0, 4]))
    kinds = [each.kind for each in told[1:]]
    check(kinds == ["slot_written_twice", "missing_block"], "R38", f"{kinds}")
    check(table.findings == tuple(told), "R38", "what is told is kept.")


def test_findings_are_bounded_and_counted(subject_once: Subject) -> None:
    """Rules: R38."""
    engine = Engine(subject_once, rows=[[5]], kinds={"missing_block": "report"})
    engine.table.commit()
    for _ in range(70):
        engine.slots([0], [0, 1], [9])
    check(engine.table.num_findings == 70, "R38", f"all are counted: {engine.table.num_findings}")
    check(len(engine.table.findings) == 64, "R38", "the first 64 are kept.")


def test_why_names_the_clause(subject_once: Subject) -> None:
    """Each clause of R13, and a slot; pending changes included.

    Rules: R12, R13, R38.
    """
    share = ContextParallel(world_size=2, rank=1, interleave_size=2)
    ring = KVCacheGroup(block_size=4, slot_mode="ring", blocks_per_row=2)
    holes = KVCacheGroup(block_size=4, allow_null=True, null_is_pad=True, sharded=False)
    cross = KVCacheGroup(block_size=4, slot_mode="cross")
    engine = Engine(subject_once, B4, ring, holes, cross, rows=[[[5], [7, 9], [0, 3], [2]]], context_parallel=share)
    expected = {
        (0, 0, 2): ("slot", 20),
        (0, 0, 7): ("slot", 23),
        (0, 0, 0): ("other_rank", None),
        (0, 0, 10): ("not_held", None),
        (0, 0, -1): ("negative", None),
        (-1, 0, 0): ("padding", None),
        (9, 0, 0): ("padding", None),
        (0, 1, 13): ("slot", 37),
        (0, 2, 3): ("null_block", None),
        (0, 2, 4): ("slot", 12),
        (0, 3, 1): ("no_slots", None),
        (1, 1, 0): ("not_held", None),
    }
    for (row, group, position), (clause, slot) in expected.items():
        reason = engine.table.why(row, group, position)
        what = f"why({row}, {group}, {position}): {reason}"
        check((reason.clause, reason.slot) == (clause, slot), "R13", f"{what}, expected {clause}, {slot}")
        check(reason.message.endswith("."), "R38", what)


def test_host_mode_is_refused_on_a_capturing_stream(subject: Subject) -> None:
    """Steps, gathers, slots and exports say so; the capture ends well, and eager calls go on.

    Rules: R39.
    """
    streams = Streams(subject)
    engine, stream = Engine(subject, rows=[[5]]), streams.create()
    arrays = engine.arrays([0], [0, 1], [0])
    engine.table.step(*arrays, stream=stream)
    streams.synchronize()
    calls: list[Call] = [
        lambda: engine.table.step(*arrays, stream=stream),
        lambda: engine.table.compute_slot_mappings(*arrays, stream=stream),
        lambda: engine.table.gather(arrays[0], stream=stream),
    ]
    with streams.capture(stream):
        for call in calls:
            with must_raise(BlockTableError, "R39", "a checked call on a capturing stream") as raised:
                call()
            check('check="device"' in raised.message, "R39", raised.message)
    engine.table.step(*arrays, stream=stream)
    engine.right()
