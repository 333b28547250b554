"""What a replay found, whether of a trace or of a recording."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blocktable import BlockTableConfig

if TYPE_CHECKING:
    from blocktable_replay.lane import Lane

MAX_SHOWN = 10
"""Mismatches of one backend that are shown; all are counted."""


@dataclass(slots=True)
class Findings:
    """What is wrong.

    Attributes:
        count: wrong entries, and broken invariants.
        shown: the first ones as sentences.
    """

    count: int = 0
    shown: list[str] = field(default_factory=list)

    def add_all(self, step: int, sentences: Sequence[str]) -> None:
        """Count the sentences, and keep those for which there is room."""
        self.add(step, len(sentences), sentences)

    def add(self, step: int, count: int, sentences: Sequence[str]) -> None:
        """Count, and keep the sentences for which there is room."""
        self.count += count
        self.shown += [f"step {step}, {sentence}" for sentence in sentences[: MAX_SHOWN - len(self.shown)]]


@dataclass(slots=True)
class Series:
    """One number a step, for the report.

    Attributes:
        clock_s: simulated seconds; of a recording, the number of the step.
        num_reqs: requests of the batch.
        num_tokens: tokens of the step.
        blocks_used: blocks that live requests hold, all groups together.
        blocks_shared: of these, held by more than one.
        full_copy_bytes: what sending every row of the batch whole would cost.
    """

    clock_s: array[float] = field(default_factory=lambda: array("d"))
    num_reqs: array[int] = field(default_factory=lambda: array("q"))
    num_tokens: array[int] = field(default_factory=lambda: array("q"))
    blocks_used: array[int] = field(default_factory=lambda: array("q"))
    blocks_shared: array[int] = field(default_factory=lambda: array("q"))
    full_copy_bytes: array[int] = field(default_factory=lambda: array("q"))

    def add(self, **values: float) -> None:
        """Add one step: a number for each attribute."""
        for name, value in values.items():
            getattr(self, name).append(value)


@dataclass(slots=True)
class ReplayResult:
    """What a replay found.

    Attributes:
        source: what was replayed: the file, its format, how much of it.
        options: how, in words; empty for a recording.
        config: the table's configuration.
        lanes: each backend, with its findings and times.
        checker: a table beside them that is never timed or compared, and looks for the engine's mistakes. None: nothing
            looks for them.
        series: one number a step.
        broken: broken invariants of the schedule itself.
        counters: what happened, by name.
        notes: sentences for the user.
        wall_s: seconds that it took.
        was_interrupted: whether the user ended it.
        is_whole: False where a limit or the user ended it early.
    """

    source: dict[str, Any]
    options: dict[str, Any]
    config: BlockTableConfig
    lanes: list[Lane]
    checker: Lane | None = None
    series: Series = field(default_factory=Series)
    broken: Findings = field(default_factory=Findings)
    counters: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    was_interrupted: bool = False
    is_whole: bool = True

    @property
    def num_mismatches(self) -> int:
        """Wrong entries of all backends, and broken invariants."""
        return self.broken.count + sum(lane.findings.count for lane in self.lanes)

    @property
    def driven(self) -> list[Lane]:
        """Every lane that does each call."""
        return self.lanes if self.checker is None else [*self.lanes, self.checker]
