"""Hostile calls: every public call of a table, with arguments of every kind; the whole state is compared after each.

A call that is taken leaves what the oracle says. One that is refused raises a `BlockTableError` whose message is a
sentence, or what the caller's own object raised, and everything is what it was: host, counts, device, every set of
buffers and of exports, the rows of requests, and another table.

Calls come in histories, each drawn from a seed of its own. A failure says how to run its history again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np

from blocktable import LAYOUTS as ALL_LAYOUTS
from blocktable import (
    BlockTable,
    BlockTableConfig,
    BlockTableError,
    ContextParallel,
    KVCacheGroup,
    Requests,
    UnsupportedError,
)
from blocktable.observer import ROW_CALLS
from blocktable_conformance.asserts import ContractViolation, check, fail
from blocktable_conformance.hostile_arguments import CALLS, KEYS, LAUNCHING, LAYOUTS, RARE, Arguments
from blocktable_conformance.hostile_values import OPEN, REFUSED, Given, Raised
from blocktable_conformance.oracle import OracleTable, Refused
from blocktable_conformance.oracle_exports import ExportOracle
from blocktable_conformance.subject import Subject

CALLS_OF_A_HISTORY = 250

GROUPS: Sequence[Sequence[KVCacheGroup]] = (
    [KVCacheGroup(block_size=4, num_blocks=50)],
    [KVCacheGroup(block_size=8, kernel_block_size=4, num_blocks=40, allow_null=True)],
    [KVCacheGroup(block_size=4), KVCacheGroup(block_size=4, kernel_block_size=2, sliding_window=5, null_block_id=-1)],
    [
        KVCacheGroup(block_size=2, num_blocks=60, null_block_id=7, allow_null=True, null_is_pad=True),
        KVCacheGroup(block_size=2, num_blocks=60, slot_mode="ring", blocks_per_row=3),
        KVCacheGroup(block_size=4, num_blocks=60, slot_mode="none", blocks_per_row=2),
    ],
)
MAY_BE_REFUSED = ("create_export", "export", "export_host", "map_positions", "step_metadata", "locate", "idx_mapping")
"""Calls that the backend, or the geometry, may have no answer to."""


class Fuzz(Arguments):
    """One history: a table, its oracle, and the state that both agreed on last.

    Args:
        subject: the backend under test.
        seed: of the history.
        launches: how many of the calls that launch something get right arguments, 0 to 1.
    """

    def __init__(self, subject: Subject, seed: int, launches: float = 0.5) -> None:
        self.subject, self.rng, self.launches = subject, Random(seed), launches
        rng = self.rng
        self.config = BlockTableConfig(
            groups=rng.choice(GROUPS),
            max_num_reqs=3,
            max_num_rows=rng.choice([None, 2, 5]),
            max_num_batched_tokens=9,
            max_model_len=24,
            width_alignment=1,
            context_parallel=rng.choice([ContextParallel(), ContextParallel(world_size=2, rank=1, interleave_size=2)]),
        )
        modes = ["off", "off", "host"]
        if subject.declares("device_checks") and all(group.num_blocks for group in self.config.groups):
            modes.append("device")
        self.mode: Any = rng.choice(modes)
        try:
            self.table = subject.table(self.config, check=self.mode, on_finding=lambda _finding: None)
        except UnsupportedError:  # no fused step that checks
            self.mode = "host"
            self.table = subject.table(self.config, check=self.mode, on_finding=lambda _finding: None)
        self.oracle = OracleTable(self.config)
        self.groups = range(len(self.config.groups))
        self.sets = [self.table.buffers, self.table.create_buffers()]
        self.exports = []
        for layout in rng.sample(LAYOUTS, 3) if subject.declares("exports") else ():
            try:
                self.exports.append(self.table.create_export(ALL_LAYOUTS[layout]))
            except BlockTableError:  # a capability, or a layout that makes no sense for the group
                continue
        self.requests, self.row_of, self.preempted = Requests(self.table), dict[Any, int](), set[Any]()
        self.other = subject.table(self.config)  # its packets are applied, and its arrays are given
        self.others_oracle = OracleTable(self.config)
        self.state = self.capture()
        kinds = ("table", "slots", "export")
        self.fresh = {name: value for name, value in self.state.items() if name.split()[0] in kinds}
        self.is_invalid = False
        self.name, self.given = "", dict[str, Given]()  # of the last call

    # The state.

    def capture(self) -> dict[str, Any]:
        """Return everything that a refused call must leave as it is: name -> what stands there, copied."""
        table, to_host = self.table, self.subject.to_host
        if self.mode == "device":
            table.collect_findings()
        state: dict[str, Any] = {"counts": table.num_blocks_per_row, "pending": table._rows.has_changes}
        state |= {"sent": table.num_bytes_sent, "findings": table.num_findings, "free": self.requests.num_free_rows}
        state["rows"] = {key: self.requests.row(key) for key in KEYS if key in self.requests}
        for g in (-1, *self.groups):
            state[f"device {g}"] = to_host(table.store.table(g))
        for g in self.groups:
            state[f"host {g}"] = table.host_table(g).copy()
            state[f"other {g}"] = self.other.host_table(g).copy()
            for s, buffers in enumerate((*self.sets, self.other.buffers)):
                state[f"table {s} {g}"] = to_host(buffers.block_tables[g])
                state[f"slots {s} {g}"] = to_host(buffers.slot_mappings[g])
        for e, out in enumerate(self.exports):
            for name in ("entries", "indptr", "last_page_lens", "lengths"):
                if getattr(out, name) is not None:
                    state[f"export {e} {name}"] = to_host(getattr(out, name))
        return state

    def compare(self, expected: dict[str, Any], what: str) -> None:
        """Check the state after a call, and keep it. expected: None is open."""
        state = self.capture()
        for name, value in state.items():
            wanted = expected[name]
            is_right = value == wanted if isinstance(value, int | dict) else np.array_equal(value, wanted)
            if wanted is not None and not is_right:
                left, right = np.array(wanted).tolist(), np.array(value).tolist()
                fail(self.rules, f"{what}, and {name} must then be {left}, got {right}.")
        self.state = state

    # A call.

    def call(self, name: str) -> None:
        """Do one call, and compare everything."""
        self.name = name
        self.given, is_right = self.arguments(name)
        target: Any = self.table if hasattr(BlockTable, name) else self.requests
        meanings = {each: given.meaning for each, given in self.given.items()}
        is_open, is_wrong = (any(m is each for m in meanings.values()) for each in (OPEN, REFUSED))
        try:
            result = getattr(target, name)(**{each: given.value for each, given in self.given.items()})
        except Exception as error:
            is_allowed = isinstance(error, BlockTableError | Raised) or (
                name == "record" and isinstance(error, OSError)
            )
            check(is_allowed, self.rules, f"must raise a BlockTableError, but raised {type(error).__name__}: {error}")
            words = str(error).split()
            is_sentence = len(words) > 3 and words[-1][-1] in ".)"
            check(
                is_sentence or not isinstance(error, BlockTableError),
                self.rules,
                f"must be refused in a sentence: {error}",
            )
            is_decided = (is_right or name in ROW_CALLS) and name not in MAY_BE_REFUSED and not (is_open or is_wrong)
            if is_decided and not any(map(_has_huge, meanings.values())):
                check(not self._takes(name, meanings), self.rules, f"must be accepted, but raised {error!r}")
            self.compare(self.state, "is refused")
            return
        check(not is_wrong, self.rules, "must be refused, but was accepted.")
        expected = self.state | {"findings": None, "pending": None}
        if is_open:
            self._take_over(name, expected)
        else:
            is_taken = self._takes(name, meanings, expected, result)
            check(is_taken, self.rules, "must be refused, but was accepted.")
        for g in self.groups:
            expected[f"host {g}"], expected[f"other {g}"] = self.oracle.host_table(g), self.others_oracle.host_table(g)
        expected["counts"] = self.oracle.num_blocks_per_row()
        self.compare(expected, "is accepted")

    @property
    def rules(self) -> str:
        """What a call breaks that does something else."""
        if self.name in ROW_CALLS:
            return "R6, R7"
        if "export" in self.name:
            return "R25.18"
        return "R46" if self.name.endswith("_changes") else "R17" if hasattr(BlockTable, self.name) else "R42"

    def __str__(self) -> str:
        """Return the last call as it would be written."""
        return f"{self.name}({', '.join(f'{name}={_shown(given.value)}' for name, given in self.given.items())})"

    # What the oracle says of a call that was taken.

    def _takes(
        self, name: str, meanings: dict[str, Any], expected: dict[str, Any] | None = None, result: Any = None
    ) -> bool:
        """Do a call on the oracle, and write what must follow into `expected`; False where the contract refuses it."""
        rows = [[list(blocks) for blocks in group] for group in self.oracle.rows]
        try:
            if name in ROW_CALLS:
                getattr(self.oracle, name)(**meanings)
            else:
                model: Callable[..., None] = getattr(self, f"_after_{name}", lambda *_arguments: None)
                model(meanings, {} if expected is None else expected, result)
        except Refused:
            self.oracle.rows = rows
            return False
        return True

    def _take_over(self, name: str, expected: dict[str, Any]) -> None:
        """Take what the table holds after an argument that may be read in many ways, as far as a table may hold it."""
        counts = self.table.num_blocks_per_row.tolist()
        for g, shape in enumerate(self.oracle.shapes):
            for row, columns in enumerate(self.table.host_table(g).tolist()):
                k, held = shape.blocks_per_kv_block, counts[g][row]
                ids = [None if shape.is_missing(first) else first // k for first in columns[: held * k : k]]
                are_ids = all(block is None or 0 <= block < shape.block_id_limit for block in ids)
                check(
                    are_ids and held <= shape.capacity, "R7", f"row {row} of group {g} holds {columns}, {held} blocks."
                )
                self.oracle.rows[g][row] = ids  # whose columns are compared with the table's next
        if name in ("step", "step_metadata"):
            self._after_commit({}, expected, None)
        if name not in ROW_CALLS:
            kinds = ("table", "slots", "export", "rows", "free")
            expected |= {each: None for each in expected if each.split()[0] in kinds}
        self.row_of = {key: self.requests.row(key) for key in KEYS if key in self.requests}

    def _after_commit(self, _meanings: Any, expected: dict[str, Any], _result: Any) -> None:
        self.oracle.commit()
        expected |= {f"device {g}": self.oracle.device_table(g) for g in self.groups}
        expected |= {"device -1": self.oracle.device_filled(), "sent": None, "pending": False}
        if self.is_invalid:
            expected |= self.fresh
            self.is_invalid = False

    def _after_gather(self, m: dict[str, Any], expected: dict[str, Any], _result: Any) -> None:
        mapping, computed = m["idx_mapping"], m["num_computed_tokens"]
        if mapping is None:
            starts = m.get("query_start_loc")
            mapping = range(m["num_reqs"] if starts is None else len(starts) - 1)
        tables = self.oracle.gather(mapping, computed)
        for g, shape in enumerate(self.oracle.shapes):
            is_own = m["idx_mapping"] is None and (computed is None or shape.sliding_window is None)
            expected[f"table {m['out'] or 0} {g}"] = None if is_own else tables[g]

    def _after_compute_slot_mappings(self, m: dict[str, Any], expected: dict[str, Any], _result: Any) -> None:
        mapping, starts, positions = m["idx_mapping"], m["query_start_loc"], m["positions"]
        groups = m.get("groups")
        if all(a <= b for a, b in pairwise([0, *starts])):
            mapping = range(len(starts) - 1) if mapping is None else mapping
            slots = self.oracle.slots(mapping, starts, positions, self.config.max_num_batched_tokens, groups)
            values: Any = [[slot.value for slot in each] for each in slots]
        else:  # not specified
            values = [None] * len(self.groups)
        for g, each in zip(self.groups if groups is None else groups, values, strict=False):
            expected[f"slots {m['out'] or 0} {g}"] = each

    def _after_step(self, m: dict[str, Any], expected: dict[str, Any], result: Any) -> None:
        self._after_commit(m, expected, result)
        self._after_gather(m, expected, result)
        self._after_compute_slot_mappings(m, expected, result)

    _after_step_metadata = _after_step

    def _after_export(self, m: dict[str, Any], expected: dict[str, Any], _result: Any) -> None:
        if m["out"] is None:
            return  # into arrays that nobody else sees
        out, lens = self.exports[m["out"]], m["seq_lens"]
        mapping = m["idx_mapping"]
        if mapping is None:
            mapping = range(len(lens) if lens is not None else m["num_reqs"])
        batch = (lens, m["num_computed_tokens"], m["first_tokens"], m["query_start_loc"])
        oracle = ExportOracle(self.oracle, self.config, out.layout, m["groups"], mapping, *batch)
        exported = oracle.run(capacity=out.capacity, num_kernel_blocks=out.num_kernel_blocks)
        for name in ("entries", "indptr", "last_page_lens", "lengths"):
            if f"export {m['out']} {name}" in expected:
                expected[f"export {m['out']} {name}"] = getattr(exported, name)

    def _after_map_positions(self, m: dict[str, Any], _expected: Any, result: Any) -> None:
        slots = self.oracle.positions(m["rows"], m["group"], m["positions"])
        check(self.subject.to_host(result).tolist() == slots, "R36", f"positions must have the slots {slots}: {result}")

    def _after_apply_changes(self, _meanings: Any, _expected: Any, _result: Any) -> None:
        self.oracle.rows = deepcopy(self.others_oracle.rows)

    def _after_invalidate(self, _meanings: Any, expected: dict[str, Any], _result: Any) -> None:
        self.is_invalid = True
        expected["pending"] = True

    def _after_observe(self, _meanings: Any, _expected: Any, result: Any) -> None:
        result.close()

    def _after_block_ids(self, m: dict[str, Any], _expected: Any, result: Any) -> None:
        check(result.tolist() == self.oracle.block_ids(m["row"], m["group"]), "R4", f"block_ids({m}) is {result}.")

    def _after_host_row(self, m: dict[str, Any], _expected: Any, result: Any) -> None:
        check(result.tolist() == self.oracle.columns(m["group"], m["row"]), "R4", f"host_row({m}) is {result}.")

    def _after_common_blocks(self, m: dict[str, Any], _expected: Any, result: Any) -> None:
        check(result == self.oracle.common_blocks(m["rows"], m["group"]), "R4", f"common_blocks({m}) is {result}.")

    # Requests.

    def _after_sync(self, m: dict[str, Any], expected: dict[str, Any], _result: Any) -> None:
        self._after_sync_batch({"requests": [m["request"]], "block_ids": [m["block_ids"]]}, expected, None)

    def _after_sync_batch(self, m: dict[str, Any], expected: dict[str, Any], _result: Any) -> None:
        free = [row for row in range(self.oracle.num_rows) if row not in self.row_of.values()]
        rows = dict(self.row_of)
        for key, block_ids in zip(m["requests"], m["block_ids"], strict=True):
            if key not in rows:
                if not free:
                    raise Refused("NoFreeRowError")
                rows[key] = self.requests.row(key) if expected else free[0]
                check(rows[key] in free, "R42", f"request {key!r} got row {rows[key]}, which is not free.")
                free.remove(rows[key])
            self.oracle.set_row(rows[key], block_ids)
        self._keep_rows(rows, expected)

    def _after_finish(self, m: dict[str, Any], expected: dict[str, Any], _result: Any) -> None:
        if m["request"] in self.preempted:
            self.preempted.discard(m["request"])
        else:
            self._after_preempt(m, expected, None)
            self.preempted.discard(m["request"])

    def _after_preempt(self, m: dict[str, Any], expected: dict[str, Any], _result: Any) -> None:
        self._after_row(m, expected, None)
        self.oracle.clear_row(self.row_of[m["request"]])
        self.preempted.add(m["request"])
        self._keep_rows({key: row for key, row in self.row_of.items() if key != m["request"]}, expected)

    def _after_row(self, m: dict[str, Any], _expected: Any, _result: Any) -> None:
        if m["request"] not in self.row_of:
            raise Refused("ArgumentError")

    def _keep_rows(self, rows: dict[Any, int], expected: dict[str, Any]) -> None:
        self.row_of = rows
        self.preempted -= rows.keys()
        expected |= {"rows": rows, "free": self.oracle.num_rows - len(rows)}


def _has_huge(meaning: Any) -> bool:
    """Say whether there is an int that numpy's arrays cannot hold."""
    if isinstance(meaning, list):
        return any(map(_has_huge, meaning))
    return isinstance(meaning, int) and not -(2**63) <= meaning < 2**63


def _shown(value: Any) -> str:
    try:
        return repr(value)[:80].replace("\n", " ")
    except Raised:
        return f"<{type(value).__name__}>"


def run(subject: Subject, num_calls: int, seed: int = 0, launches: float = 0.5) -> None:
    """Do so many calls, in histories of which each has the seed after the one before."""
    weights = [0.1 if name in RARE else 1.0 if name in LAUNCHING else 2.0 for name in CALLS]
    while num_calls > 0:
        fuzz = Fuzz(subject, seed, launches)
        names = fuzz.rng.choices([*CALLS], weights, k=min(num_calls, CALLS_OF_A_HISTORY))
        for number, name in enumerate(names):
            try:
                fuzz.call(name)
            except ContractViolation as error:
                again = (
                    f"python -m blocktable_conformance.api_fuzz {subject.label} {subject.step_path} {seed} {launches}"
                )
                what = f"{fuzz} {str(error).removeprefix(f'{error.rules}: ')}"
                raise ContractViolation(
                    error.rules, f"{what}\n  call {number} of history {seed}; again: {again}"
                ) from error
        num_calls, seed = num_calls - len(names), seed + 1


if __name__ == "__main__":
    import sys

    from blocktable import get_backend

    label, path, first, share = (*sys.argv[1:], "separate", "0", "0.5")[:4]
    run(Subject(label, get_backend(label), path), CALLS_OF_A_HISTORY, int(first), float(share))
