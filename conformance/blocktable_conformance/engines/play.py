"""Play one history on an engine and on the oracle, and look at what a rule is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from blocktable_conformance.engines.adapter import NUM_TOKENS, Engine, Rows, Shape, Span, flatten
from blocktable_conformance.oracle import OracleTable, Refused, Slot

Call = tuple[Any, ...]
"""Name, then arguments."""

Look = Callable[["Model", Call, Any, Any], str | None]
"""Of the model, the last call, what is right and what was found: a sentence about the difference."""


@dataclass(frozen=True)
class History:
    """A table and the calls on it; the last one's result is looked at."""

    shape: Shape
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        shape = self.shape
        words = [f"B {shape.block_size}"]
        words += [f"Bk {shape.kernel_block_size}"] * (shape.split > 1)
        words += [f"{shape.groups} groups"] * (shape.groups > 1)
        words += [f"W {shape.world_size}, rank {shape.rank}, I {shape.interleave_size}"] * (shape.world_size > 1)
        words += ["ring"] * shape.ring + [f"window {shape.window}"] * (shape.window is not None)
        rows = f"{shape.rows} row{'s' * (shape.rows > 1)} of {shape.blocks} block{'s' * (shape.blocks > 1)}"
        return f"{', '.join(words)}, {rows}: " + "; ".join(_spell(call) for call in self.calls)


def _spell(call: Call) -> str:
    name, *arguments = call
    if name == "slots":
        return f"slots({', '.join(_spell_span(span) for span in arguments[0])})"
    if name in ("append_row", "set_row") and len(arguments[1]) == 1:
        arguments = [arguments[0], arguments[1][0]]
    return f"{name}({', '.join(map(str, arguments))})"


def _spell_span(span: Span) -> str:
    whose = "a padding entry" if span.row < 0 else f"row {span.row}"
    if span.size == 1:
        return f"{whose} at {span.start}"
    return f"{whose} at {span.start} to {span.start + span.size - 1}"


class Model(OracleTable):
    """The oracle with an adapter's calls."""

    def __init__(self, shape: Shape, engine: type[Engine]) -> None:
        super().__init__(shape.config(engine))
        self.engine = engine

    def columns_of_rows(self) -> Rows:
        """Return the filled columns of each row on the host."""
        return [[self.columns(group, row) for row in range(self.num_rows)] for group in range(len(self.shapes))]

    def answer(self, call: Call) -> Any:
        """Make a call and return what is right."""
        name, *arguments = call
        groups = range(len(self.shapes))
        if name == "columns":
            return self.columns_of_rows()
        if name in ("host_table", "device_table"):
            return [getattr(self, name)(group) for group in groups]
        if name == "gather":
            rows, _, *computed = arguments
            return self.gather(rows, *computed)
        if name == "slots":
            rows, starts, positions = flatten(arguments[0])
            return self.slots(rows, starts, positions, NUM_TOKENS)
        return getattr(self, name)(*arguments)


def play(engine: type[Engine], history: History, look: Look) -> str | None:
    """Play a history.

    Returns:
        A sentence about the difference; None where there is none.
    """
    model, table = Model(history.shape, engine), engine(history.shape)
    right: Any = None
    found: Any = None
    for call in history.calls:
        name, *arguments = call
        try:
            if not hasattr(engine, "commit"):
                model.commit()
            right = model.answer(call)
        except Refused:
            try:
                getattr(table, name)(*arguments)
            except Exception:  # whatever the engine raises
                continue
            return f"{_spell(call)} is taken, and a refusal is right"
        try:
            found = getattr(table, name)(*arguments)
        except Exception as error:  # whatever the engine raises
            return f"{_spell(call)} raises {type(error).__name__}"
    return look(model, history.calls[-1], right, found)


def _compare(right: Sequence[int], found: Sequence[int], filler: int, where: str) -> str | None:
    """Compare as many columns as the engine has; those that it lacks hold nothing."""
    seen = list(found[: len(right)]) + [filler] * (len(right) - len(found))
    return None if seen == list(right) else f"{where} is {seen}, and {list(right)} is right"


def _where(model: Model, group: int, what: str) -> str:
    return f"group {group}, {what}" if len(model.shapes) > 1 else what


def filled_columns(model: Model, call: Call, right: Rows, found: Rows) -> str | None:
    """Look at the filled columns of every row, and at how many there are."""
    for group, (rows, seen) in enumerate(zip(right, found, strict=True)):
        for row, columns in enumerate(rows):
            if list(seen[row]) != columns:
                return f"{_where(model, group, f'row {row}')} holds {list(seen[row])}, and {columns} is right"
    return None


def tails(model: Model, call: Call, right: Rows, found: Rows) -> str | None:
    """Look at the columns after the filled ones."""
    for group, rows in enumerate(right):
        filler = model.shapes[group].filler
        for row, columns in enumerate(rows):
            size = len(model.columns(group, row))
            where = _where(model, group, f"row {row} from column {size} on")
            difference = _compare(columns[size:], found[group][row][size:], filler, where)
            if difference:
                return difference
    return None


def committed_columns(model: Model, call: Call, right: Rows, found: Rows) -> str | None:
    """Look at the filled columns of every row on the device."""
    for group, rows in enumerate(right):
        for row in range(len(rows)):
            columns = model.committed_columns(group, row)
            where = _where(model, group, f"row {row} on the device")
            difference = _compare(columns, found[group][row][: len(columns)], 0, where)
            if difference:
                return difference
    return None


def batch_rows(choose: Callable[[Sequence[int], int, int], range | list[int]]) -> Look:
    """Return what looks at some rows of a batch: `choose(rows, num_reqs_padded, max_num_reqs)`."""

    def look(model: Model, call: Call, right: Rows, found: Rows) -> str | None:
        rows, padded = call[1:3]
        for group, tables in enumerate(right):
            for index in choose(rows, padded, len(tables)):
                columns, filler = tables[index], model.shapes[group].filler
                seen = found[group][index]
                if model.engine.batch_null is not None:
                    seen = [filler if entry == model.engine.batch_null else entry for entry in seen]
                difference = _compare(columns, seen, filler, _where(model, group, f"batch row {index}"))
                if difference:
                    return difference
        return None

    return look


def _is_null(model: Model, group: int, slot: int) -> bool:
    """Say whether a slot lies in the null block, which nobody reads."""
    shape = model.shapes[group]
    return shape.null_block_id >= 0 and slot // shape.block_size == shape.null_block_id


def tokens(choose: Callable[[Slot], bool]) -> Look:
    """Return what looks at some tokens' slots."""

    def look(model: Model, call: Call, right: list[list[Slot]], found: list[list[int]]) -> str | None:
        for group, slots in enumerate(right):
            for slot in slots:
                is_pad = slot.value == model.shapes[group].pad_slot_id
                if not choose(slot) or (is_pad and _is_null(model, group, found[group][slot.token])):
                    continue
                if found[group][slot.token] != slot.value:
                    what = f"token {slot.token}" + ("" if slot.position is None else f" at position {slot.position}")
                    seen = found[group][slot.token]
                    return f"{_where(model, group, what)} has slot {seen}, and {slot.value} is right"
        return None

    return look
