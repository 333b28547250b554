"""Whole histories: any row operations, right and wrong ones, and steps between them, against the oracle."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from blocktable import BlockTableConfig
from blocktable_conformance import profiles
from blocktable_conformance.pair import Pair
from blocktable_conformance.strategies import (
    BatchDraw,
    batches,
    block_ids,
    bulk_ids,
    configs,
    distinct_rows,
)
from blocktable_conformance.subject import Subject

MAX_SETS = 3
"""Sets of buffers that one history makes."""


class TableHistory(RuleBasedStateMachine):
    """One table's life. Every rule leads table and oracle through the same call; `Pair` compares."""

    subject: Subject

    @initialize(config=configs())
    def start(self, config: BlockTableConfig) -> None:
        """Begin with an empty table of any geometry."""
        self.pair = Pair(self.subject, config)
        self.config = config
        self.shapes = self.pair.oracle.shapes
        self.num_rows = config.max_num_reqs

    # One row at a time.

    def _row(self, data: st.DataObject) -> int:
        return int(data.draw(st.integers(0, self.num_rows - 1)))

    def _ids(self, data: st.DataObject) -> Any:
        per_group = [data.draw(block_ids(shape, max_size=3)) for shape in self.shapes]
        return per_group[0] if len(per_group) == 1 and data.draw(st.booleans()) else per_group

    @rule(data=st.data())
    def append_row(self, data: st.DataObject) -> None:
        """Append, also over capacity."""
        self.pair.do("append_row", self._row(data), self._ids(data))

    @rule(data=st.data())
    def set_row(self, data: st.DataObject) -> None:
        """Replace, also by nothing or over capacity."""
        self.pair.do("set_row", self._row(data), self._ids(data))

    @rule(data=st.data(), operation=st.sampled_from(["move_row", "swap_rows", "copy_row"]))
    def between_rows(self, data: st.DataObject, operation: str) -> None:
        """Move, swap or fork, also onto itself."""
        self.pair.do(operation, self._row(data), self._row(data))

    @rule(data=st.data())
    def clear_row(self, data: st.DataObject) -> None:
        """Empty a row."""
        self.pair.do("clear_row", self._row(data))

    @rule(data=st.data(), num_blocks=st.integers(0, 4))
    def truncate_row(self, data: st.DataObject, num_blocks: int) -> None:
        """Roll back, by one number or one for each group."""
        per_group = data.draw(st.booleans())
        self.pair.do("truncate_row", self._row(data), [num_blocks] * len(self.shapes) if per_group else num_blocks)

    @rule(data=st.data(), start=st.integers(0, 3), length=st.integers(0, 3))
    def null_range(self, data: st.DataObject, start: int, length: int) -> None:
        """Evict blocks, also more than there are."""
        group = data.draw(st.integers(0, len(self.shapes) - 1))
        self.pair.do("null_range", self._row(data), group, start, start + length)

    # Many at a time.

    @rule(data=st.data(), operation=st.sampled_from(["append_rows", "append_rows", "set_rows"]))
    def bulk_blocks(self, data: st.DataObject, operation: str) -> None:
        """Append to or replace several rows, also over capacity."""
        rows = data.draw(distinct_rows(self.num_rows))
        self.pair.do(operation, rows, *data.draw(bulk_ids(self.shapes, len(rows))))

    @rule(data=st.data())
    def clear_rows(self, data: st.DataObject) -> None:
        """Empty several rows."""
        self.pair.do("clear_rows", data.draw(distinct_rows(self.num_rows)))

    @rule(data=st.data(), shift=st.integers(0, 3))
    def truncate_rows(self, data: st.DataObject, shift: int) -> None:
        """Roll several rows back, each to its own number."""
        rows = data.draw(distinct_rows(self.num_rows))
        kept = [(row + shift) % 4 for row in rows]
        per_group = len(rows) > 0 and data.draw(st.booleans())
        self.pair.do("truncate_rows", rows, [kept] * len(self.shapes) if per_group else kept)

    @rule(data=st.data(), start=st.integers(0, 2), length=st.integers(0, 2))
    def null_ranges(self, data: st.DataObject, start: int, length: int) -> None:
        """Evict from several rows."""
        rows = data.draw(distinct_rows(self.num_rows))
        group = data.draw(st.integers(0, len(self.shapes) - 1))
        self.pair.do("null_ranges", rows, group, [start] * len(rows), [start + length] * len(rows))

    @rule(data=st.data())
    def permute_rows(self, data: st.DataObject) -> None:
        """Move and swap many rows at once."""
        src = data.draw(distinct_rows(self.num_rows))
        dst = data.draw(st.lists(st.integers(0, self.num_rows - 1), unique=True, min_size=len(src), max_size=len(src)))
        self.pair.do("permute_rows", src, dst)

    @rule()
    def clear(self) -> None:
        """Empty the table."""
        self.pair.do("clear")

    @rule(data=st.data())
    def wrong_call(self, data: st.DataObject) -> None:
        """Make one mistake: it is refused and changes nothing."""
        row, last = self._row(data), self.num_rows - 1
        too_high = [[shape.block_id_limit] for shape in self.shapes]
        calls: list[tuple[Any, ...]] = [
            ("append_row", self.num_rows, None),
            ("set_row", -1, None),
            ("append_row", row, too_high),
            ("set_row", row, [[1]] * (len(self.shapes) + 1)),
            ("append_rows", [row, row], [[1, 1]] * len(self.shapes), [1, 1]),
            ("move_row", row, last + 1),
            ("truncate_row", row, -1),
            ("null_range", row, 0, 2, 1),
            ("permute_rows", [row], []),
        ]
        self.pair.do(*data.draw(st.sampled_from(calls)))

    # The device.

    @rule()
    def commit(self) -> None:
        """Commit; the whole device is compared."""
        self.pair.commit()

    def _batch(self, data: st.DataObject) -> BatchDraw:
        batch: BatchDraw = data.draw(batches(self.config, self.pair.oracle, in_place=True))
        return batch

    def _set(self, data: st.DataObject) -> int:
        return int(data.draw(st.integers(0, len(self.pair.outputs) - 1)))

    @rule(data=st.data())
    def gather(self, data: st.DataObject) -> None:
        """Gather without a commit: the last committed rows."""
        batch = self._batch(data)
        if batch.idx_mapping is None and (batch.num_reqs_padded or 0) > batch.num_reqs:
            self.pair.commit()  # padding rows in place must be empty on the device too
        self.pair.gather(
            batch.idx_mapping,
            batch.num_reqs_padded,
            num_reqs=batch.num_reqs,
            num_computed_tokens=batch.num_computed_tokens,
            outputs=self._set(data),
        )

    @rule(data=st.data())
    def compute_slot_mappings(self, data: st.DataObject) -> None:
        """Compute slots without a commit."""
        batch = self._batch(data)
        self.pair.compute(
            batch.idx_mapping,
            batch.query_start_loc,
            batch.positions,
            num_tokens_padded=batch.num_tokens_padded,
            outputs=self._set(data),
        )

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Do a whole step."""
        batch = self._batch(data)
        self.pair.step(
            batch.idx_mapping,
            batch.query_start_loc,
            batch.positions,
            num_reqs_padded=batch.num_reqs_padded,
            num_tokens_padded=batch.num_tokens_padded,
            num_computed_tokens=batch.num_computed_tokens,
            outputs=self._set(data),
        )

    @precondition(lambda self: len(self.pair.outputs) < MAX_SETS)
    @rule()
    def create_buffers(self) -> None:
        """Make one more set of outputs."""
        self.pair.create_buffers()

    @rule()
    def invalidate(self) -> None:
        """Sleep and wake."""
        self.pair.invalidate()

    @rule()
    def verify(self) -> None:
        """Let the table compare itself."""
        self.pair.table.verify()

    def teardown(self) -> None:
        """Every set still holds what was last written to it, and a last commit makes device and host equal."""
        if hasattr(self, "pair"):
            for index in range(len(self.pair.outputs)):
                self.pair.check_outputs(index, "R17")
            self.pair.commit()


def test_any_history_keeps_table_and_oracle_equal(subject: Subject) -> None:
    """After any operations and steps, host, device and every set of buffers are what the oracle says.

    Rules: R1, R2, R3, R4, R5, R6, R7, R8, R9, R10, R11, R12, R13, R14, R15, R17, R18, R24.
    """
    machine = type("TableHistory", (TableHistory,), {"subject": subject})
    profile = profiles.current()
    run_state_machine_as_test(machine, settings=profile.settings(profile.machine_examples))
