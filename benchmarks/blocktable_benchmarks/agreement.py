"""Are the results right? Asked before anything is timed."""

from __future__ import annotations

from typing import Any

import numpy as np

from blocktable_benchmarks.table_lane import TableLane
from blocktable_benchmarks.workloads import Inputs

CHECKED_STEPS = 3


class WrongResult(AssertionError):
    """A lane's result differs from the numpy backend's."""


def check_steps(lane: Any, inputs: Inputs, *, is_peer: bool, steps: int = CHECKED_STEPS) -> list[str]:
    """Do a few steps and compare batch tables and slots with the numpy backend's.

    Args:
        lane: opened with `inputs`, no step done yet.
        inputs: of the workload.
        is_peer: filled columns and slots must agree, what lies after a row is only reported.
        steps: how many.

    Returns:
        Sentences on what differs from our contract without changing a slot.

    Raises:
        WrongResult: the results differ.
    """
    reference = TableLane("numpy", None)
    reference.open(inputs)
    for turn in range(steps):
        lane.step(turn)
        reference.step(turn)
    lane.synchronize()
    compare_slots(lane.slots(), reference.slots())
    return compare_tables(lane.tables(), reference.tables(), is_peer=is_peer)


def check_slots(lane: Any, inputs: Inputs) -> None:
    """Map the slots once and compare them with the numpy backend's.

    Raises:
        WrongResult: they differ.
    """
    reference = TableLane("numpy", None)
    reference.open(inputs)
    for each in (lane, reference):
        each.map_slots()
        each.synchronize()
    compare_slots(lane.slots(), reference.slots())


def compare_slots(found: list[Any], expected: list[Any]) -> None:
    """Compare slot mappings: [num_slots] int64 for each group.

    Raises:
        WrongResult: they differ.
    """
    for group, (got, right) in enumerate(zip(found, expected, strict=True)):
        wrong = np.flatnonzero(got != right)
        if wrong.size:
            token = int(wrong[0])
            raise WrongResult(
                f"group {group}: {wrong.size} of {right.size} slots differ; the first is token {token}: it says "
                f"{got[token]}, the numpy backend {right[token]}."
            )


def compare_tables(found: list[Any], expected: list[Any], *, is_peer: bool) -> list[str]:
    """Compare batch tables: [num_reqs, width] int32 for each group. Returns and raises as `check_steps`."""
    notes = []
    for group, (got, right) in enumerate(zip(found, expected, strict=True)):
        width = min(got.shape[1], right.shape[1])  # a peer may round the width otherwise
        differs = got[:, :width] != right[:, :width]
        wrong = np.argwhere(differs & (right[:, :width] != 0) if is_peer else differs)
        if wrong.size:
            row, column = wrong[0].tolist()
            raise WrongResult(
                f"group {group}: {len(wrong)} entries of the batch table differ; the first is request {row}, column "
                f"{column}: it says {got[row, column]}, the numpy backend {right[row, column]}."
            )
        if differs.any():
            notes.append(f"group {group}: {int(differs.sum())} entries after filled columns are not NULL (R5)")
    return notes
