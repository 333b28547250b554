"""A table of the backend under test and the oracle, led through the same history and compared at every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from blocktable import (
    ArgumentError,
    BlockTableConfig,
    BlockTableError,
    ConfigError,
    Finding,
    StepBuffers,
    UnsupportedError,
)
from blocktable.typing import CheckMode
from blocktable_conformance.asserts import check, check_array, check_slots, check_table, fail, joined
from blocktable_conformance.oracle import OracleTable, Refused, Slot, Table
from blocktable_conformance.oracle_findings import (
    COMPARED,
    Summary,
    expected_duplicates,
    expected_findings,
    summary,
)
from blocktable_conformance.subject import HostArray, Subject, address

RULES_OF_REFUSALS = {"RowCapacityError": "R6", "RowIndexError": "R7", "DtypeError": "R7", "ArgumentError": "R4, R7"}


ONTO_ITSELF = ("move_row", "swap_rows", "copy_row")
"""Operations that are none where both rows are one."""


@dataclass
class Outputs:
    """One set of buffers, and what it must hold.

    Attributes:
        buffers: the set.
        tables: for each group the whole batch table. None: the caller got the table's own rows, and what the buffer
            holds is open.
        filled: [groups][max_num_reqs]. Columns that each batch row holds.
        rules: [max_num_reqs]. What a wrong entry of each batch row breaks.
        slots: for each group the whole slot mapping.
        addresses: where each array lay when the set was made.
    """

    buffers: StepBuffers
    tables: list[Table | None]
    filled: list[list[int]]
    rules: list[str]
    slots: list[list[Slot]]
    addresses: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.addresses = self.current_addresses()

    def current_addresses(self) -> list[int]:
        """Return where every array of the set lies."""
        return [address(array) for array in (*self.buffers.block_tables, *self.buffers.slot_mappings)]


@dataclass(frozen=True)
class Seen:
    """What a call returned, on the host, already compared with the oracle.

    Attributes:
        block_tables: one [num_reqs_padded, width] for each group.
        slot_mappings: one [num_tokens_padded] for each group.
        buffer_tables: one [max_num_reqs, width] for each group: the whole buffer.
        buffer_slots: one [max_num_batched_tokens] for each group: the whole buffer.
    """

    block_tables: list[HostArray]
    slot_mappings: list[HostArray]
    buffer_tables: list[HostArray]
    buffer_slots: list[HostArray]


def plain(value: Any) -> Any:
    """Return arrays as lists, for the oracle."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def has_nothing(value: Any) -> bool:
    """Say whether a call's arguments hold a nothing: None or an empty sequence, in any place (R8)."""
    if isinstance(value, list | tuple):
        return len(value) == 0 or any(has_nothing(item) for item in value)
    return value is None or (isinstance(value, np.ndarray) and value.size == 0)


class Pair:
    """One table and its oracle.

    Every method does the same to both and compares all that may be compared at no cost in launches.

    Args:
        subject: the backend under test.
        config: the geometry.
        mode: how the table is checked; then each step's findings are compared, too. What "device" refuses, such as a
            group that does not say how many blocks it has, is checked in host mode.

    Attributes:
        table: the table of the backend under test.
        oracle: what it must be.
        outputs: every set of buffers, the table's own first.
        findings: of the checker, in order; nothing is raised.
    """

    def __init__(self, subject: Subject, config: BlockTableConfig, *, mode: CheckMode = "off") -> None:
        self.subject = subject
        self.config = config
        self.findings: list[Finding] = []
        try:
            self.table = subject.table(config, check=mode, on_finding=self.findings.append)
        except (ConfigError, UnsupportedError):
            if mode != "device":
                raise
            mode = "host"
            self.table = subject.table(config, check=mode, on_finding=self.findings.append)
        self._mode, self._is_used = mode, False
        self._is_told = False  # kernels know of rows from the commit after the first operation on
        self.oracle = OracleTable(config)
        self.outputs = [self._fresh(self.table.buffers)]

    def _fresh(self, buffers: StepBuffers) -> Outputs:
        groups = range(len(self.config.groups))
        empty = self.oracle.gather([])
        return Outputs(
            buffers,
            [empty[group] for group in groups],
            [[0] * self.config.max_num_reqs for _ in groups],
            self._rules_of_rows([], 0),
            [
                [Slot(shape.pad_slot_id, "R15", token) for token in range(self.config.max_num_batched_tokens)]
                for shape in self.oracle.shapes
            ],
        )

    # Row operations.

    def do(self, operation: str, *args: Any) -> None:
        """Run a row operation on both: they accept it alike or refuse it alike, and the hosts are equal after it."""
        given = [plain(arg) for arg in args]
        held, found = [[list(blocks) for blocks in rows] for rows in self.oracle.rows], len(self.findings)
        refused = self._refused_by_oracle(operation, args)
        raised = self._raised_by_table(operation, args)
        call = f"{operation}{args!r}"
        if self._mode != "off":
            expected = [] if refused else expected_duplicates(self.oracle, held, operation, given)
            new = [each for each in self.findings[found:] if each.kind == "duplicate_block"]
            got = sorted((each.group, each.row) for each in new)
            check(got == expected, "R40", f"{call} hands blocks in twice in {expected}, found {got}.")
        if refused is None:
            self._is_used |= operation not in ONTO_ITSELF or args[0] != args[1]
            if raised is not None:
                fail("R4, R6", f"{call} must be accepted, but raised {type(raised).__name__}: {raised}")
        else:
            rules = ", ".join(sorted({RULES_OF_REFUSALS[error] for error in refused.errors}))
            check(raised is not None, rules, f"{call} must raise {refused}, but was accepted.")
            check(
                type(raised).__name__ in refused.errors,
                rules,
                f"{call} must raise {refused}, but raised {type(raised).__name__}: {raised}",
            )
        self.check_host("R8" if has_nothing(args) else "")

    def refuse(self, error: str, operation: str, *args: Any) -> str:
        """Run a row operation that must be refused with `error`, changing nothing; return the table's sentence."""
        before = [table.copy() for table in self.host_tables()]
        sent = self.table.num_bytes_sent
        refused = self._refused_by_oracle(operation, args)
        assert refused is not None, f"the oracle accepts {operation}{args!r}"
        assert error in refused.errors, f"the oracle refuses {operation}{args!r} with {refused}, not {error}"
        raised = self._raised_by_table(operation, args)
        check(
            type(raised).__name__ == error,
            RULES_OF_REFUSALS[error],
            f"{operation}{args!r} must raise {error}, got {type(raised).__name__}: {raised}",
        )
        for old, new in zip(before, self.host_tables(), strict=True):
            check(np.array_equal(old, new), "R6", f"{operation}{args!r} raised, but changed the host.")
        check(sent == self.table.num_bytes_sent, "R6", f"{operation}{args!r} raised, but sent something.")
        self.check_host()
        return str(raised)

    def look_at(self, group: int, rows: Sequence[int], given: Any = None) -> None:
        """Compare the ids of rows, and how many leading blocks they share (R4).

        Args:
            group: the group.
            rows: they may repeat.
            given: the rows as the call gets them. None: a list.
        """
        for row in rows:
            ids = self.oracle.block_ids(row, group)
            got = self.table.block_ids(row, group)
            check_array(got, "int32", (len(ids),), "R2, R4", f"the block ids of row {row}, group {group}")
            check(plain(got) == ids, "R2, R4", f"block_ids({row}, {group}) must be {ids}, got {plain(got)}.")
            columns, expected = self.config.kernel_block_ids(group, ids), self.oracle.kernel_block_ids(group, ids)
            check_array(columns, "int32", (len(expected),), "R2", f"the kernel blocks of ids {ids}")
            check(plain(columns) == expected, "R2", f"kernel_block_ids({group}, {ids}) must be {expected}: {columns}")
        common = self.oracle.common_blocks(rows, group)
        number = self.table.common_blocks(rows if given is None else given, group)
        check(number == common, "R4", f"common_blocks({rows}, {group}) must be {common}, got {number}.")

    def _refused_by_oracle(self, operation: str, args: tuple[Any, ...]) -> Refused | None:
        try:
            getattr(self.oracle, operation)(*(plain(arg) for arg in args))
        except Refused as refused:
            return refused
        return None

    def _raised_by_table(self, operation: str, args: tuple[Any, ...]) -> BlockTableError | None:
        try:
            getattr(self.table, operation)(*args)
        except BlockTableError as error:
            return error
        return None

    def host_tables(self) -> list[npt.NDArray[np.int32]]:
        """Return the host table of each group."""
        return [self.table.host_table(group) for group in range(len(self.config.groups))]

    def check_host(self, rules: str = "") -> None:
        """Check the whole host state.

        Args:
            rules: what a wrong entry breaks in addition to R4 and R2.
        """
        filled = [[len(self.oracle.columns(g, x)) for x in range(self.oracle.num_rows)] for g in self._groups()]
        for group, table in enumerate(self.host_tables()):
            expected = self.oracle.host_table(group)
            both = joined(rules, "R4" if self.oracle.shapes[group].blocks_per_kv_block == 1 else "R2, R4")
            check_table(table, expected, filled[group], rules=both, what="the host table", group=group)
        counts = self.table.num_blocks_per_row
        check(
            plain(counts) == self.oracle.num_blocks_per_row(),
            joined(rules, "R4"),
            f"num_blocks_per_row must be {self.oracle.num_blocks_per_row()}, got {plain(counts)}.",
        )

    # Device.

    def commit(self, rules: str = "R9.1") -> None:
        """Commit and check the whole device state."""
        self.table.commit()
        self._is_told = self._is_used
        self.oracle.commit()
        self.check_device(rules)

    def check_device(self, rules: str = "R9.1") -> None:
        """Check every table and every filled count on the device against the last commit."""
        filled = self.oracle.device_filled()
        for group in self._groups():
            got = self.subject.to_host(self.table.device_table(group))
            expected = self.oracle.device_table(group)
            check_table(got, expected, filled[group], rules=rules, what="the device table", group=group)
        counts = self.subject.to_host(self.table.store.table(-1))
        check(plain(counts) == filled, rules, f"the device's filled counts must be {filled}, got {plain(counts)}.")

    def gather(
        self,
        idx_mapping: Sequence[int] | None,
        num_reqs_padded: int | None = None,
        *,
        num_reqs: int | None = None,
        num_computed_tokens: Sequence[int] | None = None,
        outputs: int = 0,
        rules: str = "",
    ) -> list[HostArray]:
        """Gather on both; check the whole buffers and the views.

        Args:
            idx_mapping, num_reqs_padded, num_reqs, num_computed_tokens: the batch.
            outputs: the set.
            rules: what a wrong entry breaks in addition to the rules of its batch row.
        """
        returned = self.table.gather(
            self._int32(idx_mapping),
            num_reqs_padded,
            num_reqs=num_reqs,
            num_computed_tokens=self._int32(num_computed_tokens),
            out=self.outputs[outputs].buffers if outputs else None,
        )
        requests = self._num_reqs(idx_mapping, num_reqs)
        padded = requests if num_reqs_padded is None else num_reqs_padded
        self._expect_tables(idx_mapping, requests, padded, num_computed_tokens, outputs)
        views = self._check_table_views(returned, idx_mapping, padded, num_computed_tokens, outputs, rules)
        self.check_outputs(outputs, rules)
        return views

    def gather_in_place(self, num_reqs: int, num_reqs_padded: int) -> bool:
        """Gather the identity, padded, without a commit; say whether that was taken.

        It must be refused where a padding row holds blocks, on the host or still on the device (R10.10).
        """
        counts = [self.oracle.num_blocks_per_row(), self.oracle.device_filled()]
        occupied = [
            count for groups in counts for group in groups for count in group[num_reqs:num_reqs_padded] if count
        ]
        try:
            self.gather(None, num_reqs_padded, num_reqs=num_reqs)
        except ArgumentError:
            return False
        check(not occupied, "R10.10", f"rows {num_reqs} to {num_reqs_padded} hold blocks, and were taken as padding.")
        return True

    def compute(
        self,
        idx_mapping: Sequence[int] | None,
        query_start_loc: Sequence[int],
        positions: Sequence[int],
        *,
        groups: Sequence[int] | None = None,
        num_tokens_padded: int | None = None,
        outputs: int = 0,
    ) -> list[HostArray]:
        """Compute slot mappings on both; check the whole buffers and the views."""
        before = len(self.findings)
        returned = self.table.compute_slot_mappings(
            self._int32(idx_mapping),
            self._int32(query_start_loc),
            self._int64(positions),
            groups=groups,
            num_tokens_padded=num_tokens_padded,
            out=self.outputs[outputs].buffers if outputs else None,
        )
        self._check_findings(before, idx_mapping, query_start_loc, positions, num_tokens_padded, groups)
        self._expect_slots(idx_mapping, query_start_loc, positions, outputs, groups)
        num_returned = len(positions) if num_tokens_padded is None else num_tokens_padded
        views = self._check_slot_views(returned, num_returned, outputs, groups)
        self.check_outputs(outputs)
        return views

    def step(
        self,
        idx_mapping: Sequence[int] | None,
        query_start_loc: Sequence[int],
        positions: Sequence[int],
        *,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
        num_computed_tokens: Sequence[int] | None = None,
        outputs: int = 0,
    ) -> Seen:
        """Do a whole step on both; check the device, the whole buffers and the views."""
        before = len(self.findings)
        step = self.table.step(
            self._int32(idx_mapping),
            self._int32(query_start_loc),
            self._int64(positions),
            num_reqs_padded=num_reqs_padded,
            num_tokens_padded=num_tokens_padded,
            num_computed_tokens=self._int32(num_computed_tokens),
            out=self.outputs[outputs].buffers if outputs else None,
        )
        self._is_told = self._is_used
        self.oracle.commit()
        self._check_findings(before, idx_mapping, query_start_loc, positions, num_tokens_padded)
        self.check_device()
        requests = len(query_start_loc) - 1
        padded = requests if num_reqs_padded is None else num_reqs_padded
        self._expect_tables(idx_mapping, requests, padded, num_computed_tokens, outputs)
        self._expect_slots(idx_mapping, query_start_loc, positions, outputs)
        tables = self._check_table_views(step.block_tables, idx_mapping, padded, num_computed_tokens, outputs)
        num_returned = len(positions) if num_tokens_padded is None else num_tokens_padded
        slots = self._check_slot_views(step.slot_mappings, num_returned, outputs)
        buffers = self.check_outputs(outputs)
        return Seen(tables, slots, *buffers)

    def check_written(
        self,
        idx_mapping: Sequence[int],
        query_start_loc: Sequence[int],
        positions: Sequence[int],
        *,
        num_computed_tokens: Sequence[int] | None = None,
        outputs: int = 0,
    ) -> None:
        """Check the whole buffers after something else wrote them, such as a graph's replay."""
        requests = len(idx_mapping)
        self._expect_tables(idx_mapping, requests, requests, num_computed_tokens, outputs)
        self._expect_slots(idx_mapping, query_start_loc, positions, outputs)
        self.check_outputs(outputs)

    def create_buffers(self) -> int:
        """Make one more set of outputs and return its index."""
        self.outputs.append(self._fresh(self.table.create_buffers()))
        self.check_outputs(-1, "R17")
        return len(self.outputs) - 1

    def invalidate(self) -> None:
        """Invalidate; after the commit that follows, every set is as fresh (R24)."""
        self.table.invalidate()
        self.commit("R9.1, R24")
        self.outputs = [self._renewed(outputs) for outputs in self.outputs]
        for index in range(len(self.outputs)):
            self.check_outputs(index, "R24")

    def _renewed(self, outputs: Outputs) -> Outputs:
        fresh = self._fresh(outputs.buffers)
        check(fresh.addresses == outputs.addresses, "R24", "invalidate() moved a buffer: addresses must stay.")
        return fresh

    def check_outputs(self, index: int = 0, rules: str = "") -> tuple[list[HostArray], list[HostArray]]:
        """Check the whole of a set of buffers; return it on the host.

        Args:
            index: the set.
            rules: what a wrong entry breaks in addition to the rule that gave it: R17 in a set that nothing wrote.
        """
        outputs = self.outputs[index]
        check(outputs.current_addresses() == outputs.addresses, "R17", "a buffer moved: addresses never change.")
        tables = [self.subject.to_host(table) for table in outputs.buffers.block_tables]
        slots = [self.subject.to_host(mapping) for mapping in outputs.buffers.slot_mappings]
        for group in self._groups():
            table = outputs.tables[group]
            if table is not None:
                filled = outputs.filled[group]
                both = self._rules_of_table(group, outputs.rules, rules)
                check_table(tables[group], table, filled, rules=both, what="the batch table", group=group)
            self._check_slots(slots[group], outputs.slots[group], group, rules)
        return tables, slots

    # Parts.

    def _check_findings(
        self,
        before: int,
        idx_mapping: Sequence[int] | None,
        query_start_loc: Sequence[int],
        positions: Sequence[int],
        num_tokens_padded: int | None,
        groups: Sequence[int] | None = None,
    ) -> None:
        """Compare what was found in the last call; before: findings until then."""
        if self._mode == "off":
            return
        mapping = range(len(query_start_loc) - 1) if idx_mapping is None else idx_mapping
        is_on_host = type(self._int32([0])) is np.ndarray
        expected = (
            expected_findings(
                self.oracle, mapping, query_start_loc, positions, num_tokens_padded, groups, is_on_host=is_on_host
            )
            if (self._is_told if self._mode == "device" else self._is_used)
            else []
        )
        # In groups with a window who wrote last counts as well.
        with_windows = [g for g in self._groups() if self.oracle.shapes[g].sliding_window is not None]
        self.table.collect_findings()
        if self._mode == "device":
            modes = [self.oracle.shapes[group].slot_mode for group in (self._groups() if groups is None else groups)]
            is_looked_at = groups is None or "linear" in modes or "ring" in modes
            if len(query_start_loc) == 1 and not is_on_host:
                expected = [each for each in expected if each[0] != "bad_starts"]  # no request, no kernel
            if is_looked_at:
                self._check_device_findings(before, expected, with_windows)
            return
        got = sorted(
            summary(finding)
            for finding in self.findings[before:]
            if finding.kind in COMPARED
            and not (finding.kind == "shared_block_written" and finding.group in with_windows)
        )
        check(got == sorted(expected), "R40", f"the checker must find {sorted(expected)}, got {got}.")

    def _check_device_findings(self, before: int, expected: list[Summary], with_windows: list[int]) -> None:
        """Compare kinds, groups and rows: which of a row's tokens is named, and which of two, a device chooses."""

        def places(found: Iterable[Summary]) -> set[tuple[str, int, int]]:
            return {
                (kind, group, -99 if kind == "slot_written_twice" else row)
                for kind, group, row, *_ in found
                if kind in COMPARED
            }

        got = [summary(finding) for finding in self.findings[before:]]
        got = [each for each in got if each[0] != "shared_block_written" or each[1] not in with_windows]
        check(
            places(got) == places(expected), "R40, R41.2", f"kernels must find {sorted(expected)}, got {sorted(got)}."
        )

    def _groups(self) -> range:
        return range(len(self.config.groups))

    def _int32(self, values: Sequence[int] | None) -> Any:
        return None if values is None else self.subject.device_array(values, "int32")

    def _int64(self, values: Sequence[int]) -> Any:
        return self.subject.device_array(values, "int64")

    @staticmethod
    def _num_reqs(idx_mapping: Sequence[int] | None, num_reqs: int | None) -> int:
        if idx_mapping is not None:
            return len(idx_mapping)
        assert num_reqs is not None
        return num_reqs

    def _is_own_rows(
        self, group: int, idx_mapping: Sequence[int] | None, num_computed_tokens: Sequence[int] | None
    ) -> bool:
        """Say whether the batch table is the device table's own rows (R10.9): identity, and no window to cut out."""
        windowed = self.oracle.shapes[group].sliding_window is not None and num_computed_tokens is not None
        return idx_mapping is None and not windowed

    def _expect_tables(
        self,
        idx_mapping: Sequence[int] | None,
        num_reqs: int,
        num_reqs_padded: int,
        num_computed_tokens: Sequence[int] | None,
        outputs: int,
    ) -> None:
        mapping = range(num_reqs) if idx_mapping is None else idx_mapping
        tables = self.oracle.gather(mapping, num_computed_tokens)
        counts = self.oracle.device_filled()
        self.outputs[outputs].rules = self._rules_of_rows(mapping, num_reqs_padded)
        for group in self._groups():
            own = self._is_own_rows(group, idx_mapping, num_computed_tokens)
            # The buffer is not what the caller gets then, and what it holds does not matter.
            self.outputs[outputs].tables[group] = None if own else tables[group]
            held = [counts[group][row] if 0 <= row < self.oracle.num_rows else 0 for row in mapping]
            self.outputs[outputs].filled[group] = held + [0] * (self.config.max_num_reqs - num_reqs)

    def _expect_slots(
        self,
        idx_mapping: Sequence[int] | None,
        query_start_loc: Sequence[int],
        positions: Sequence[int],
        outputs: int,
        groups: Sequence[int] | None = None,
    ) -> None:
        mapping = range(len(query_start_loc) - 1) if idx_mapping is None else idx_mapping
        slots = self.oracle.slots(mapping, query_start_loc, positions, self.config.max_num_batched_tokens, groups)
        for group, expected in zip(self._groups() if groups is None else groups, slots, strict=True):
            self.outputs[outputs].slots[group] = expected  # those of the others stay

    def _check_table_views(
        self,
        returned: Sequence[Any],
        idx_mapping: Sequence[int] | None,
        num_reqs_padded: int,
        num_computed_tokens: Sequence[int] | None,
        outputs: int,
        rules: str = "",
    ) -> list[HostArray]:
        check(len(returned) == len(self.config.groups), "R10.1", "gather must return one batch table for each group.")
        views = []
        for group, view in enumerate(returned):
            own = self._is_own_rows(group, idx_mapping, num_computed_tokens)
            source = self.table.device_table(group) if own else self.outputs[outputs].buffers.block_tables[group]
            in_place = "" if idx_mapping is not None else "R10.9" if own else "R10.11"
            if num_reqs_padded:
                rule = f"{in_place or 'R10.6'}, R17"
                check(address(view) == address(source), rule, f"the batch table of group {group} is a copy.")
            views.append(self.subject.to_host(view))
            if own:
                whole = self.oracle.device_table(group)
            else:
                whole = self.outputs[outputs].tables[group] or []
            expected, width = whole[:num_reqs_padded], self.oracle.shapes[group].width
            check_array(views[-1], "int32", (num_reqs_padded, width), "R10.4", f"the batch table of group {group}")
            filled = self.outputs[outputs].filled[group]
            if num_reqs_padded:
                both = self._rules_of_table(group, self.outputs[outputs].rules, joined(rules, in_place))
                check_table(views[-1], expected, filled, rules=both, what="the batch table's view", group=group)
        return views

    def _check_slot_views(
        self, returned: Sequence[Any], num_tokens_padded: int, outputs: int, groups: Sequence[int] | None = None
    ) -> list[HostArray]:
        chosen = self._groups() if groups is None else groups
        check(len(returned) == len(chosen), "R12, R17", "there must be one slot mapping for each group.")
        views = []
        for group, view in zip(chosen, returned, strict=True):
            expected = self.outputs[outputs].slots[group]
            if num_tokens_padded != 0:
                source = self.outputs[outputs].buffers.slot_mappings[group]
                check(address(view) == address(source), "R17", f"the slot mapping of group {group} is a copy.")
            views.append(self.subject.to_host(view))
            self._check_slots(views[-1], expected[:num_tokens_padded], group)
        return views

    def _rules_of_rows(self, idx_mapping: Sequence[int], num_reqs_padded: int) -> list[str]:
        """Return the part of R10 that each row of a whole batch table is about."""
        held = ["R10.1" if 0 <= row < self.oracle.num_rows else "R10.2" for row in idx_mapping]
        padding = ["R10.3"] * (num_reqs_padded - len(held))
        return [*held, *padding, *["R10.6"] * (self.config.max_num_reqs - num_reqs_padded)]

    def _rules_of_table(self, group: int, of_rows: Sequence[str], rules: str) -> list[str]:
        """Return what a wrong entry of each row of a group's batch table breaks."""
        window = "" if self.config.groups[group].sliding_window is None else "R11"
        return [joined(rules, of_row, window) for of_row in of_rows]

    def _check_slots(self, got: HostArray, expected: Sequence[Slot], group: int, rules: str = "") -> None:
        shape = self.oracle.shapes[group]
        check_slots(got, expected, dtype=self.config.slot_dtype, group=group, shape=shape, rules=rules)
