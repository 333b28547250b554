"""How far a replay is: a bar with rich, plain lines without it."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

LOOK_AT_CLOCK_EVERY = 64
"""Steps between two looks at the clock."""


class Progress:
    """A line on stderr every ten seconds.

    Args:
        total: how many will be done at the end. None: not known.
        unit: of what.
    """

    every_s = 10.0

    def __init__(self, total: int | None, unit: str) -> None:
        self._total = total
        self._unit = unit
        self._begin = self._shown = time.monotonic()

    def update(self, num_steps: int, num_done: int, num_mismatches: int) -> None:
        """Hear of a step; show it, if it is time."""
        if num_steps % LOOK_AT_CLOCK_EVERY:
            return
        now = time.monotonic()
        if now - self._shown >= self.every_s:
            self._shown = now
            self._show(num_steps, num_done, num_mismatches, now - self._begin)

    def _show(self, num_steps: int, num_done: int, num_mismatches: int, seconds: float) -> None:
        goal, left = "", ""
        if self._total is not None:
            goal = f"{num_done} of {self._total} {self._unit}, "
            left = f", about {seconds * (self._total - num_done) / num_done:.0f} s left" if num_done else ""
        rate = num_steps / seconds
        sys.stderr.write(f"{goal}{num_steps} steps, {rate:.0f} steps/s, {num_mismatches} mismatches{left}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Leave the terminal as it was."""


class SilentProgress(Progress):
    """Shows nothing."""

    every_s = float("inf")

    def __init__(self) -> None:
        super().__init__(None, "")


class RichProgress(Progress):
    """A bar on stderr with steps a second and the time left.

    Args:
        total, unit: as `Progress`.
        rich: the module rich.progress.
    """

    every_s = 0.2

    def __init__(self, total: int | None, unit: str, rich: Any) -> None:
        super().__init__(total, unit)
        text = rich.TextColumn
        self._bar = rich.Progress(
            *(text("replay"), rich.BarColumn(), rich.MofNCompleteColumn(), text(unit)),
            text("· {task.fields[steps]} steps · {task.fields[rate]:.0f} steps/s"),
            *(text("· {task.fields[mismatches]} mismatches ·"), rich.TimeRemainingColumn()),
            console=importlib.import_module("rich.console").Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("replay", total=total, steps=0, rate=0.0, mismatches=0)
        self._bar.start()

    def _show(self, num_steps: int, num_done: int, num_mismatches: int, seconds: float) -> None:
        rate = num_steps / seconds
        self._bar.update(self._task, completed=num_done, steps=num_steps, rate=rate, mismatches=num_mismatches)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()


def make_progress(total: int | None, unit: str, *, is_quiet: bool) -> Progress:
    """Return a bar where rich is installed and stderr is a terminal, else plain lines."""
    if is_quiet:
        return SilentProgress()
    if sys.stderr.isatty():
        try:
            return RichProgress(total, unit, importlib.import_module("rich.progress"))
        except ImportError:
            pass
    return Progress(total, unit)
