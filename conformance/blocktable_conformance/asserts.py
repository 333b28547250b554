"""Checks whose failures explain themselves: the rule first, then where, what was expected and what came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from blocktable_conformance.oracle import Geometry, Slot

HostArray = npt.NDArray[Any]


class ContractViolation(AssertionError):
    """A rule of the contract does not hold.

    Attributes:
        rules: the rules, or their parts, as "R10.2, R13".
    """

    def __init__(self, rules: str, message: str) -> None:
        super().__init__(f"{rules}: {message}")
        self.rules = rules


def joined(*rules: str) -> str:
    """Return several lists of rules as one; an empty one adds nothing."""
    return ", ".join(filter(None, rules))


def fail(rules: str, message: str) -> NoReturn:
    """Fail naming the rules."""
    __tracebackhide__ = True  # here and below: the reader wants the line that checked, not how it was checked
    raise ContractViolation(rules, message)


def check(condition: bool, rules: str, message: str) -> None:
    """Fail naming the rules unless `condition` holds."""
    __tracebackhide__ = True
    if not condition:
        fail(rules, message)


@dataclass
class Raised:
    """What `must_raise` caught."""

    message: str = ""


@contextmanager
def must_raise(error: type[Exception], rules: str, what: str) -> Iterator[Raised]:
    """Fail naming the rules unless the block raises `error`."""
    raised = Raised()
    try:
        yield raised
    except error as caught:
        raised.message = str(caught)
    except Exception as other:
        fail(rules, f"{what} must raise {error.__name__}, but raised {type(other).__name__}: {other}")
    else:
        fail(rules, f"{what} must raise {error.__name__}, but was accepted.")


def check_array(got: HostArray, dtype: str, shape: tuple[int, ...], rules: str, what: str) -> None:
    """Check dtype and shape of an output."""
    __tracebackhide__ = True
    check(got.dtype == dtype, rules, f"{what} must be {dtype}, got {got.dtype}.")
    check(got.shape == shape, rules, f"{what} must have shape {shape}, got {got.shape}.")


def check_table(
    got: HostArray,
    expected: Sequence[Sequence[int]],
    filled: Sequence[int],
    *,
    rules: str | Sequence[str],
    what: str,
    group: int,
) -> None:
    """Check a whole table, [rows, width] int32.

    Args:
        got: the table.
        expected: [rows][width].
        filled: [rows]. Columns that each row holds: a wrong entry after them is a matter of hygiene (R5).
        rules: what a wrong entry among the filled columns breaks, in any row or in each of them.
        what: such as "batch table".
        group: the group.
    """
    __tracebackhide__ = True
    wide = np.array(expected, np.int32).reshape(len(expected), -1)
    of_rows = [rules] * len(expected) if isinstance(rules, str) else rules
    check_array(got, "int32", wide.shape, of_rows[0], what)
    if np.array_equal(got, wide):
        return
    wrong = np.argwhere(got != wide)
    row, column = (int(place) for place in wrong[0])
    fail(
        joined(of_rows[row], "R5" if column >= filled[row] else ""),
        f"{what} of group {group} is wrong at row {row}, column {column} (the row holds {filled[row]} columns): "
        f"expected {wide[row, column]}, got {got[row, column]}; {len(wrong)} entries differ.\n"
        f"  expected row {row}: {wide[row].tolist()}\n"
        f"  got      row {row}: {got[row].tolist()}",
    )


def check_slots(
    got: HostArray, expected: Sequence[Slot], *, dtype: str, group: int, shape: Geometry, rules: str = ""
) -> None:
    """Check a whole slot mapping, [length], against the oracle's slots, which say how each came about.

    Args:
        got: the slot mapping.
        expected: [length].
        dtype: of the slots.
        group: the group.
        shape: of the group.
        rules: what a wrong slot breaks in addition to the rule that gave it.
    """
    __tracebackhide__ = True
    values = np.array([slot.value for slot in expected], np.int64)
    check_array(got, dtype, values.shape, "R15, R16", f"slot mapping of group {group}")
    if np.array_equal(got, values):
        return
    wrong = np.flatnonzero(got != values)
    slot = expected[int(wrong[0])]
    fail(
        joined(rules, slot.rule),
        _describe(slot, int(got[wrong[0]]), group, shape) + f"\n  tokens that differ: {wrong.tolist()[:20]}",
    )


def _describe(slot: Slot, got: int, group: int, shape: Geometry) -> str:
    size = shape.kernel_block_size
    where = "" if slot.row is None else f" (row {slot.row}, position {slot.position})"
    lines = [
        f"wrong slot for token {slot.token}{where}: expected slot {_name(slot.value, shape)}, got {_name(got, shape)}.",
        f"  group {group}, slot_mode {shape.slot_mode}, kernel_block_size {size}",
        f"  blocks_per_kv_block {shape.blocks_per_kv_block}, context parallel {tuple(shape.share or ()) or 'no'}",
        f"  request {slot.request}, column {slot.column}, kernel block id {slot.block_id}",
    ]
    if got != shape.pad_slot_id:
        lines.append(f"  the slot got lies in kernel block {got // size}, offset {got % size}")
    return "\n".join(lines)


def _name(slot: int, shape: Geometry) -> str:
    return "PAD" if slot == shape.pad_slot_id else str(slot)


def check_values(got: HostArray, expected: Sequence[int], rules: str, what: str) -> None:
    """Check one whole vector against numbers worked out by hand."""
    __tracebackhide__ = True
    wanted = np.array(expected, np.int64)
    check(
        got.shape == wanted.shape and np.array_equal(got, wanted),
        rules,
        f"{what} must be {wanted.tolist()}, got {got.tolist()}.",
    )
