"""Whole histories: any row operations, right and wrong ones, and steps between them, against the oracle."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from blocktable import BlockTableConfig
from blocktable.typing import CheckMode
from blocktable_conformance import profiles
from blocktable_conformance.pair import Pair
from blocktable_conformance.strategies import (
    INT32_MAX,
    BatchDraw,
    batches,
    bulk_calls,
    configs,
    distinct_rows,
    integers_as_given,
    mappings,
    named_groups,
    replacements,
    row_ids,
)
from blocktable_conformance.subject import Subject

MAX_SETS = 3
"""Sets of buffers that one history makes."""


class TableHistory(RuleBasedStateMachine):
    """One table's life. Every rule leads table and oracle through the same call; `Pair` compares.

    Hypothesis picks each rule equally often, so what fills rows and what reads them stands here twice, and the many
    ways of emptying rows are one rule.
    """

    subject: Subject

    @initialize(
        data=st.data(),
        config=configs(),
        is_empty=st.sampled_from([True, False, False, False]),
        mode=st.sampled_from(["off", "host", "device", "device"]),
    )
    def start(self, data: st.DataObject, config: BlockTableConfig, is_empty: bool, mode: CheckMode) -> None:
        """Begin with a table of any geometry: empty, or with blocks in every row; checked or not."""
        self.pair = Pair(self.subject, config, mode=mode)
        self.config = config
        self.shapes = self.pair.oracle.shapes
        self.num_rows = config.num_rows
        self.batch: BatchDraw | None = None
        if not is_empty:
            rows = list(range(self.num_rows))
            self.pair.do("set_rows", *data.draw(bulk_calls(self.pair.oracle, rows, replace=True, fit=True)))
            self.pair.commit()

    # What the rules draw.

    def _row(self, data: st.DataObject) -> int:
        return int(data.draw(st.integers(0, self.num_rows - 1)))

    def _rows(self, data: st.DataObject) -> list[int]:
        return list(data.draw(distinct_rows(self.num_rows)))

    def _group(self, data: st.DataObject) -> int:
        return int(data.draw(st.integers(0, len(self.shapes) - 1)))

    def _set(self, data: st.DataObject) -> int:
        return int(data.draw(st.integers(0, len(self.pair.outputs) - 1)))

    def _do_in_bulk(self, data: st.DataObject, operation: str, *args: list[int]) -> None:
        self.pair.do(operation, *(data.draw(integers_as_given(arg)) for arg in args))

    # Rows.

    @rule(data=st.data(), operation=st.sampled_from(["append_row", "append_rows", "set_row", "set_rows"]))
    def fill(self, data: st.DataObject, operation: str) -> None:
        """Append or replace, one row or several, also over capacity, also by nothing."""
        oracle, replace = self.pair.oracle, operation.startswith("set")
        if operation.endswith("_row"):
            row = self._row(data)
            self.pair.do(operation, row, data.draw(row_ids(oracle, row, replace=replace)))
        else:
            self.pair.do(operation, *data.draw(bulk_calls(oracle, self._rows(data), replace=replace)))

    @rule(data=st.data(), operation=st.sampled_from(["append_row", "append_rows"]))
    def fill_more(self, data: st.DataObject, operation: str) -> None:
        """Append, so that histories do not stay near the empty table."""
        self.fill(data, operation)

    @rule(data=st.data(), operation=st.sampled_from(["move_row", "swap_rows", "copy_row", "permute_rows", "copy_rows"]))
    def rearrange(self, data: st.DataObject, operation: str) -> None:
        """Move, swap or fork, also onto itself; or many moves and swaps, or many forks, in one call."""
        if operation == "copy_rows":
            dst = self._rows(data)
            src = data.draw(st.lists(st.integers(0, self.num_rows - 1), min_size=len(dst), max_size=len(dst)))
            self._do_in_bulk(data, operation, src, dst)
        elif operation == "permute_rows":
            src = self._rows(data)
            dst = data.draw(st.permutations(range(self.num_rows)))[: len(src)]
            self._do_in_bulk(data, operation, src, dst)
        else:
            self.pair.do(operation, self._row(data), self._row(data))

    @rule(
        data=st.data(), operation=st.sampled_from(["truncate_row", "truncate_rows", "clear_row", "clear_rows", "clear"])
    )
    def empty(self, data: st.DataObject, operation: str) -> None:
        """Roll back, by one number or one for each group, or empty rows."""
        if operation == "truncate_row":
            kept = data.draw(st.integers(0, 4))
            self.pair.do(operation, self._row(data), [kept] * len(self.shapes) if data.draw(st.booleans()) else kept)
        elif operation == "truncate_rows":
            rows, shift = self._rows(data), data.draw(st.integers(0, 3))
            self._do_in_bulk(data, operation, rows, [(row + shift) % 4 for row in rows])
        elif operation == "clear_row":
            self.pair.do(operation, self._row(data))
        elif operation == "clear_rows":
            self._do_in_bulk(data, operation, self._rows(data))
        else:
            self.pair.do(operation)

    @rule(data=st.data(), start=st.integers(0, 2), length=st.integers(0, 3), many=st.booleans())
    def evict(self, data: st.DataObject, start: int, length: int, many: bool) -> None:
        """Null blocks of one row, also more than there are, or of several rows, none of which holds too few."""
        group = self._group(data)
        if many:
            held = self.pair.oracle.rows[group]
            rows = [row for row in self._rows(data) if len(held[row]) >= start]
            stops = [min(len(held[row]), start + length) for row in rows]
            rows, starts, stops = (
                data.draw(integers_as_given(values)) for values in (rows, [start] * len(rows), stops)
            )
            self.pair.do("null_ranges", rows, group, starts, stops)
        else:
            self.pair.do("null_range", self._row(data), group, start, start + length)

    @rule(data=st.data(), operation=st.sampled_from(["replace_blocks", "replace_block_ranges", "remap_blocks"]))
    def edit(self, data: st.DataObject, operation: str) -> None:
        """Exchange blocks inside rows, also past their ends, or everywhere; then look at what rows hold."""
        group = self._group(data)
        if operation == "remap_blocks":
            self.pair.do(operation, group, *data.draw(mappings(self.pair.oracle, group)))
        elif operation == "replace_block_ranges":
            self.pair.do(operation, *data.draw(replacements(self.pair.oracle, group, self._rows(data))))
        else:
            row = self._row(data)
            _, _, (start,), block_ids, _ = data.draw(replacements(self.pair.oracle, group, [row]))
            self.pair.do(operation, row, group, int(start), block_ids)
        rows = [self._row(data) for _ in range(data.draw(st.integers(0, 3)))]
        self.pair.look_at(group, rows, data.draw(integers_as_given(rows)))

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
            ("copy_rows", [row], []),
            ("copy_rows", [row, row], [last, last]),
            ("replace_blocks", row, 0, -1, None),
            ("remap_blocks", 0, [self.shapes[0].null_block_id], [1]),
            ("remap_blocks", 0, [1, 1], [2, 3]),
        ]
        self.pair.do(*data.draw(st.sampled_from(calls)))

    # The device.

    def _batch(self, data: st.DataObject) -> BatchDraw:
        batch: BatchDraw = data.draw(batches(self.config, self.pair.oracle, in_place=True))
        return batch

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Do a whole step."""
        self._step(data, self._batch(data))

    @rule(data=st.data(), moved=st.integers(0, 5))
    def step_again(self, data: st.DataObject, moved: int) -> None:
        """Do the last step once more, perhaps into another set, with windows that have moved on."""
        batch, computed = self.batch or self._batch(data), None
        if batch.idx_mapping is None:  # its padding rows may hold blocks by now
            batch = self._batch(data)
        if batch.num_computed_tokens is not None:
            computed = [min(tokens + moved, INT32_MAX) for tokens in batch.num_computed_tokens]
        self._step(data, dataclasses.replace(batch, num_computed_tokens=computed))

    def _step(self, data: st.DataObject, batch: BatchDraw) -> None:
        self.batch = batch
        self.pair.step(
            batch.idx_mapping,
            batch.query_start_loc,
            batch.positions,
            num_reqs_padded=batch.num_reqs_padded,
            num_tokens_padded=batch.num_tokens_padded,
            num_computed_tokens=batch.num_computed_tokens,
            outputs=self._set(data),
        )

    @rule(data=st.data())
    def look_without_commit(self, data: st.DataObject) -> None:
        """Gather and compute slots without a commit: both see the last committed rows."""
        batch, outputs = self._batch(data), self._set(data)
        padded = batch.num_reqs_padded or 0
        if (
            batch.idx_mapping is None
            and padded > batch.num_reqs
            and not self.pair.gather_in_place(batch.num_reqs, padded)
        ):
            return
        self.pair.gather(
            batch.idx_mapping,
            batch.num_reqs_padded,
            num_reqs=batch.num_reqs,
            num_computed_tokens=batch.num_computed_tokens,
            outputs=outputs,
        )
        self.pair.compute(
            batch.idx_mapping,
            batch.query_start_loc,
            batch.positions,
            groups=data.draw(named_groups(len(self.shapes))),
            num_tokens_padded=batch.num_tokens_padded,
            outputs=self._set(data),
        )

    @rule(what=st.sampled_from(["commit", "commit", "verify", "create_buffers", "invalidate"]))
    def tend(self, what: str) -> None:
        """Commit, let the table compare itself, make a set of outputs, or sleep and wake."""
        if what == "verify":
            self.pair.table.verify()
        elif what != "create_buffers" or len(self.pair.outputs) < MAX_SETS:
            getattr(self.pair, what)()

    def teardown(self) -> None:
        """Every set still holds what was last written to it, and a last commit makes device and host equal."""
        if hasattr(self, "pair") and sys.exc_info()[0] is None:  # a rule that failed has said more than this would
            for index in range(len(self.pair.outputs)):
                self.pair.check_outputs(index, "R17")
            self.pair.commit()


def test_any_history_keeps_table_and_oracle_equal(subject: Subject) -> None:
    """After any operations and steps, host, device and every set of buffers are what the oracle says.

    Rules: R1, R2, R3, R4, R5, R6, R7, R8, R9.1, R10, R11, R12, R13, R14, R15, R17, R18, R24, R39, R40.
    """
    machine = type("TableHistory", (TableHistory,), {"subject": subject})
    profile = profiles.current()
    run_state_machine_as_test(machine, settings=profile.settings(profile.machine_examples))
