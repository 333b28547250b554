"""The arguments of hostile calls: what is right for each public call, and what is given in place of some of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import numpy as np

import blocktable as bt
from blocktable_conformance import hostile_values as hostile
from blocktable_conformance.hostile_values import OPEN, REFUSED, Given
from blocktable_conformance.oracle import OracleTable
from blocktable_conformance.subject import Subject, address

LAYOUTS = ("csr", "token_csr", "local_lengths", "block_requests", "tensorrt_llm", "flex_attention", "aligned_state")
KEYS = ("a", 7, ("b", 1), "c", None, 2.5)
"""Requests."""

CALLS = {
    name: tuple(inspect.signature(call).parameters)[1:]
    for kind in (bt.BlockTable, bt.Requests)
    for name, call in inspect.getmembers(kind, inspect.isfunction)
    if not name.startswith("_")
}
"""Every public call -> its parameters: a new one is drawn too, and fails where `Fuzz.draw` has nothing for it."""

LAUNCHING = ("commit", "gather", "compute_slot_mappings", "step", "step_metadata", "export", "map_positions")
RARE: Sequence[str] = (
    "clear",
    "digest",
    "apply_changes",
    "create_buffers",
    "create_export",
    "warmup",
    "invalidate",
    "verify",
    "observe",
)


class Param(NamedTuple):
    """A parameter of a call: what it takes, and a right plain value of it. None: left out, where that is allowed."""

    kind: str
    plain: Any
    is_optional: bool = False


class Watcher:
    """An observer that does nothing."""

    def before(self, *_arguments: Any) -> None:
        """Do nothing."""

    after = failed = before


class Arguments:
    """What a history draws its arguments from.

    Attributes:
        subject: the backend under test.
        config, table, oracle: the table, and what it must be.
        groups: of the table.
        sets, exports: outputs of the table, which are compared after each call.
        row_of: request -> its row.
        other, others_oracle: another table of the same config.
        state: what both tables hold.
        launches: how many of the calls that launch something get right arguments, 0 to 1.
    """

    subject: Subject
    rng: Random
    config: bt.BlockTableConfig
    table: bt.BlockTable
    oracle: OracleTable
    groups: range
    sets: list[bt.StepBuffers]
    exports: list[bt.ExportBuffers]
    row_of: dict[Any, int]
    other: bt.BlockTable
    others_oracle: OracleTable
    state: dict[str, Any]
    launches: float

    def arguments(self, name: str) -> tuple[dict[str, Given], bool]:
        """Return the arguments of a call, and whether all of them are right."""
        rng, params = self.rng, self.draw(name)
        is_right = not params or rng.random() < (self.launches if name in LAUNCHING else 0.35)
        wrong = [] if is_right else rng.choices([*params], k=rng.choice([1, 1, 2]))
        out, written = params.get("out"), []
        if out is not None and out.kind == "set" and "out" not in wrong:
            buffers = self.sets[out.plain or 0]
            written = [buffers.block_tables[0], buffers.slot_mappings[0]]
        given = {each: self.give(param, is_hostile=each in wrong, written=written) for each, param in params.items()}
        return given, not wrong

    # What is right for a call.

    def draw(self, name: str) -> dict[str, Param]:
        """Return right arguments of a call."""
        rng, config = self.rng, self.config
        rows, group = range(config.num_rows), rng.choice(self.groups)
        n = rng.randrange(len(rows) + 1)
        some, row, held = rng.sample(rows, n), rng.choice(rows), self.oracle.rows[group]
        stops, counts = [rng.randrange(len(held[x]) + 1) for x in some], [rng.randrange(3) for _ in some]
        start, old = rng.randrange(len(held[row]) + 1), list(dict.fromkeys(self.ids(group, n, has_null=False)))
        num_reqs = rng.randrange(min(config.max_num_reqs, len(rows)) + 1)
        ends = sorted(rng.randrange(10) for _ in range(num_reqs))
        keys, e = rng.sample(KEYS, rng.randrange(4)), rng.randrange(len(self.exports) + 1)
        each = [self.ids(g, rng.randrange(3)) for g in self.groups]
        layout = self.exports[e].layout.name if e < len(self.exports) else rng.choice(LAYOUTS)
        params = {
            **{each: Param("int", rng.choice(rows)) for each in ("row", "a", "b", "src", "dst")},
            **{each: Param("any", 24) for each in ("max_query_len", "max_seq_len")},
            **{each: Param("size", None) for each in ("capacity", "max_batch")},
            "first_tokens": Param("int32", None, True),
            "num_computed_tokens": Param(
                "int32", rng.choice([None, [rng.randrange(24) for _ in range(num_reqs)]]), True
            ),
            "group": Param("int", group),
            "position": Param("int", rng.randrange(24)),
            "slot": Param("int", rng.randrange(60)),
            "rows": Param("ints", some),
            "counts": Param("counts", counts),
            "num_blocks": Param("counts", counts),
            "block_ids": Param("ids", each),
            "start": Param("int", 0),
            "stop": Param("int", start),
            "starts": Param("ints", [0] * n),
            "stops": Param("ints", stops),
            "old_ids": Param("ints", old, True),
            "new_ids": Param("ints", self.ids(group, len(old)), True),
            **{each: Param("flag", False) for each in ("digests", "on_device")},
            "whole": Param("flag", rng.random() < 0.5),
            **{each: Param(each, None) for each in ("changes", "observer", "path")},
            "request": Param("request", rng.choice(KEYS)),
            "requests": Param("requests", keys),
            "idx_mapping": Param("int32", [rng.randrange(-1, len(rows)) for _ in range(num_reqs)], True),
            "query_start_loc": Param("int32", [0, *ends]),
            "positions": Param("int64", [rng.randrange(24) for _ in range(ends[-1] if ends else 0)]),
            "seq_lens": Param("int32", [rng.randrange(24) for _ in range(num_reqs)]),
            "num_reqs": Param("int", num_reqs, True),
            "num_reqs_padded": Param("int", rng.choice([None, 3]), True),
            "num_tokens_padded": Param("int", rng.choice([None, 9]), True),
            "groups": Param("groups", rng.choice([None, [*self.groups]]), True),
            "layout": Param("layout", layout),
            "layouts": Param("layout", None, True),
            "out": Param("set", rng.choice([None, 0, 1]), True),
            "stream": Param("stream", None, True),
        }
        bulk = {"block_ids": Param("ids", [self.ids(g, sum(counts)) for g in self.groups])}
        several = {"src": params["rows"], "dst": Param("ints", rng.sample(rows, n))}
        is_one = name in ("export", "export_host", "create_export")
        if is_one:
            params["groups"] = Param("groups", [0])
        if layout == "token_requests" or name not in ("compute_slot_mappings", "step", "step_metadata"):
            params["query_start_loc"] = Param("int32", None, True)
        params |= {
            "append_rows": bulk,
            "set_rows": bulk,
            "truncate_row": {"num_blocks": rng.choice([Param("blocks", 1), Param("ints", [1 for _ in self.groups])])},
            "replace_blocks": {"start": Param("int", start), "block_ids": Param("ints", [], True)},
            "replace_block_ranges": {"counts": Param("ints", stops)}
            | {"block_ids": Param("ints", self.ids(group, sum(stops)), True)},
            "permute_rows": several,
            "copy_rows": several,
            "sync_batch": {"block_ids": Param("batch", [[self.ids(g, 1) for g in self.groups] for _ in keys])},
            "idx_mapping": {"requests": Param("requests", [key for key in keys if key in self.row_of])}
            | {"stream": Param("any", None)},
            "export": {"out": Param("export", e), "num_tokens_padded": Param("int", None, True)},
            "export_host": {"num_tokens_padded": Param("int", None, True), "num_reqs_padded": Param("size", None)},
            "map_positions": {"rows": params["idx_mapping"]._replace(is_optional=False), "out": Param("any", None)}
            | {"positions": Param("matrix", [[rng.randrange(24)] * 2 for _ in range(num_reqs)])},
        }.get(name, {})
        return {each: params[each] for each in CALLS[name]}

    def ids(self, group: int, count: int, *, has_null: bool = True) -> list[int]:
        """Return ids that a group takes, a null among them where it takes one."""
        shape, rng = self.oracle.shapes[group], self.rng
        ids = [rng.randrange(8, 36) for _ in range(count)]
        if has_null and shape.allow_null and ids and rng.random() < 0.2:
            ids[0] = shape.null_block_id
        return ids

    # Arguments.

    def give(self, param: Param, *, is_hostile: bool, written: Sequence[Any]) -> Given:
        """Return an argument. written: the arrays that the call writes."""
        kind, plain, rng = param.kind, param.plain, self.rng
        if param.is_optional and (rng.random() < 0.1 if is_hostile else plain is None):
            return Given(None, None)
        if kind in ("counts", "ids", "batch"):
            give: Callable[[Any, bool], Given] = getattr(self, f"give_{kind}")
            return give(plain, is_hostile)
        if kind == "int":
            return (
                hostile.hostile_int(rng, plain or 1)
                if is_hostile
                else Given(rng.choice(hostile.INT_FORMS)(plain), plain)
            )
        if kind in ("ints", "groups"):
            return (hostile.hostile_list if is_hostile else hostile.right_list)(rng, plain or [])
        if kind == "matrix":
            right = self.subject.device_array(np.array(plain).reshape(len(plain), 2), "int32")
            wrong = hostile.hostile_vector(rng, [0, 0], "int32") if is_hostile else Given(right, plain)
            is_matrix = isinstance(wrong.value, np.ndarray) and wrong.value.ndim == 2
            return Given(wrong.value, OPEN) if is_hostile and is_matrix else wrong
        if kind in ("int32", "int64"):
            return self.give_vector(kind, plain or [], is_hostile, written)
        return self.give_special(kind, plain, is_hostile)

    def give_vector(self, dtype: str, entries: list[int], is_hostile: bool, written: Sequence[Any]) -> Given:
        """Return an array of a batch, on the device or on the host."""
        rng = self.rng
        if is_hostile and rng.random() < 0.6:
            if written and entries and rng.random() < 0.3:  # inside what the call writes
                array = written[0 if dtype == "int32" else -1]
                return Given(array.reshape(-1)[: len(entries)], REFUSED if _has_address(array) else OPEN)
            return hostile.hostile_vector(rng, entries, dtype)
        if is_hostile:
            entries = [
                value for value in hostile.mutated(rng, entries) if abs(value) < (2**31 if dtype == "int32" else 2**63)
            ]
        if rng.random() < 0.5:
            return Given(self.subject.device_array(entries, dtype), entries)
        return Given(rng.choice(hostile.VECTOR_FORMS)(np.array(entries, dtype)), entries)

    def give_counts(self, plain: list[int], is_hostile: bool) -> Given:
        """Return counts: one for each row, or that for each group."""
        if self.rng.random() < 0.7:
            given = (hostile.hostile_list if is_hostile else hostile.right_list)(self.rng, plain)
            return Given(given.value, OPEN) if is_hostile and given.meaning is REFUSED else given  # or of each group
        groups = [hostile.right_list(self.rng, plain) for _ in self.groups]
        groups[-1] = hostile.hostile_list(self.rng, plain) if is_hostile else groups[-1]
        return _joined(groups, list)

    def give_ids(self, plain: list[list[int]], is_hostile: bool) -> Given:
        """Return block ids of every group."""
        rng = self.rng
        groups = [hostile.right_list(rng, ids) for ids in plain]
        kind = rng.randrange(8) if is_hostile else 8
        if kind == 0:
            return Given(rng.choice(hostile.JUNK)(), OPEN)  # among it nothing, and nested lists
        if kind == 1:
            groups.append(hostile.right_list(rng, [11]))
        elif kind == 2:
            return hostile.right_list(rng, [value for ids in plain for value in ids])
        elif kind == 3:
            groups[-1] = Given(None, None)
        elif kind < 8:
            place = rng.randrange(len(groups))
            groups[place] = hostile.hostile_list(rng, plain[place])
        return _joined(groups, rng.choice([list, tuple]))

    def give_batch(self, plain: list[list[list[int]]], is_hostile: bool) -> Given:
        """Return the block ids of each of some requests."""
        given = [self.give_ids(ids, is_hostile and self.rng.random() < 0.5) for ids in plain]
        if is_hostile and self.rng.random() < 0.2:
            return Given(self.rng.choice([5, None, object(), iter([]), hostile.Raising()]), REFUSED)
        return _joined(given, list)

    def give_special(self, kind: str, plain: Any, is_hostile: bool) -> Given:
        """Return an argument that is neither ints nor an array."""
        rng, junk, own, n = self.rng, self.rng.choice(hostile.JUNK)(), self.sets[0], len(self.groups)
        right, wrong = plain, tuple[Any, ...]([junk])
        match kind:
            case "any" if is_hostile:  # taken for true or false, handed on, or refused
                return Given(junk, OPEN)
            case "flag" if is_hostile and isinstance(junk, bool | np.bool_):
                return Given(junk, bool(junk))
            case "blocks" | "size" if is_hostile:
                given = hostile.hostile_int(rng, 1)
                if kind == "blocks":  # where one number for each group is right too
                    return Given(given.value, OPEN) if given.meaning is REFUSED else given
                # What is allocated must not be so much that a machine could only just hold it.
                return Given(2**31, 2**31) if given.meaning == 2**31 - 1 else given
            case "stream":
                wrong = (object(), 1.5, "0", True, [0], hostile.Raising(), b"", {})
            case "layout":
                wrong = ("none_such", "", 5, object(), b"csr", ["csr"] * 9, [object()], {}, hostile.Raising(), True)
            case "set":
                right, first = None if plain is None else self.sets[plain], own.slot_mappings[0]
                arrays = [
                    [first] * (n + 1),
                    [first[:0]] * 2,
                    [np.zeros(99)] * n,
                    [hostile.read_only(np.zeros(99, np.int64))] * n,
                ]
                over_one_another = [first[g : g + 8] for g in self.groups] if n > 1 else []
                wrong = (
                    self.other.buffers,
                    bt.StepBuffers(own.block_tables, own.slot_mappings),
                    own.block_tables,
                    first,
                    junk,
                )
                wrong += (*arrays, over_one_another, [None] * n)
            case "export":
                right, plain = (self.exports[plain], plain) if plain < len(self.exports) else (None, None)
                wrong = (*map(replace, self.exports), self.other.buffers, junk)
            case "observer":
                right = Watcher()
            case "path":
                return Given(
                    rng.choice((object(), 1.5, None, [], {}, hostile.Raising(), 1j, b"", -1, True, "", "/")), REFUSED
                )
            case "request":
                wrong = ([], {}, np.array([1]), bytearray(), hostile.Raising(), np.timedelta64(1))
            case "requests":
                right = rng.choice([list, tuple])(plain)
                wrong = (
                    [*plain, []],
                    (key for key in plain),
                    5,
                    None,
                    [*plain, hostile.Raising()],
                    object(),
                    iter(plain),
                    1.5,
                )
            case "changes":
                return self.give_changes(junk, is_hostile)
        return Given(rng.choice(wrong), REFUSED) if is_hostile else Given(right, plain)

    def give_changes(self, junk: Any, is_hostile: bool) -> Given:
        """Return a packet of another table that holds something else."""
        rng = self.rng
        row, ids = rng.randrange(self.config.num_rows), [self.ids(g, 1) for g in self.groups]
        self.other.set_row(row, ids)
        self.others_oracle.set_row(row, ids)
        self.state |= {f"other {g}": self.others_oracle.host_table(g) for g in self.groups}
        packet = self.other.pack_changes(whole=True)
        forms: Sequence[Callable[[bytes], Any]] = (
            bytes,
            bytearray,
            memoryview,
            lambda data: np.frombuffer(data, np.uint8),
        )
        place = rng.randrange(len(packet))
        damaged = packet[:place] + bytes([packet[place] ^ 1 << rng.randrange(8)]) + packet[place + 1 :]
        wrong = (damaged, packet[:place], packet * 2, b"", packet.hex(), list(packet), memoryview(packet)[::-1], junk)
        return Given(rng.choice(wrong), REFUSED) if is_hostile else Given(rng.choice(forms)(packet), packet)


def _joined(parts: Sequence[Given], container: Callable[[Any], Any]) -> Given:
    meanings = [part.meaning for part in parts]
    meaning = next((each for each in (REFUSED, OPEN) if any(m is each for m in meanings)), meanings)
    return Given(container([part.value for part in parts]), meaning)


def _has_address(array: Any) -> bool:
    try:
        return address(array) > 0
    except TypeError:
        return False
