"""How far a replay is: a bar with rich, plain lines without it."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any, Protocol

PLAIN_LINE_EVERY_S = 10.0
LOOK_AT_CLOCK_EVERY = 64
"""Steps between two looks at the clock."""


class Progress(Protocol):
    """Hears of every step."""

    def update(self, num_steps: int, num_done: int, num_mismatches: int) -> None:
        """Show it, if it is time."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class SilentProgress:
    """Shows nothing."""

    def update(self, num_steps: int, num_done: int, num_mismatches: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class PlainProgress:
    """A line on stderr every ten seconds.

    Args:
        total: how many will be done at the end. None: nobody knows.
        unit: of what.
    """

    def __init__(self, total: int | None, unit: str = "requests") -> None:
        self._total = total
        self._unit = unit
        self._begin = self._shown = time.monotonic()

    def update(self, num_steps: int, num_done: int, num_mismatches: int) -> None:
        """Print a line, if the last one is old."""
        if num_steps % LOOK_AT_CLOCK_EVERY:
            return
        now = time.monotonic()
        if now - self._shown >= PLAIN_LINE_EVERY_S:
            self._shown = now
            self._print(num_steps, num_done, num_mismatches, now - self._begin)

    def _print(self, num_steps: int, num_done: int, num_mismatches: int, seconds: float) -> None:
        goal, left = "", ""
        if self._total is not None:
            goal = f"{num_done} of {self._total} {self._unit}, "
            left = f", about {seconds * (self._total - num_done) / num_done:.0f} s left" if num_done else ""
        rate = num_steps / seconds
        sys.stderr.write(f"{goal}{num_steps} steps, {rate:.0f} steps/s, {num_mismatches} mismatches{left}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Nothing to put back."""


class RichProgress:
    """A bar on stderr with steps a second and the time left.

    Args:
        total: how many will be done at the end. None: nobody knows.
        unit: of what.
        rich_progress: the module rich.progress.
    """

    REFRESH_S = 0.2

    def __init__(self, total: int | None, unit: str, rich_progress: Any) -> None:
        console = importlib.import_module("rich.console").Console(stderr=True)
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("replay"),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn(unit),
            rich_progress.TextColumn("· {task.fields[steps]} steps · {task.fields[rate]:.0f} steps/s"),
            rich_progress.TextColumn("· {task.fields[mismatches]} mismatches ·"),
            rich_progress.TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("replay", total=total, steps=0, rate=0.0, mismatches=0)
        self._begin = self._shown = time.monotonic()
        self._bar.start()

    def update(self, num_steps: int, num_done: int, num_mismatches: int) -> None:
        """Move the bar, a few times a second."""
        if num_steps % LOOK_AT_CLOCK_EVERY:
            return
        now = time.monotonic()
        if now - self._shown >= self.REFRESH_S:
            self._shown = now
            rate = num_steps / (now - self._begin)
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
    return PlainProgress(total, unit)
