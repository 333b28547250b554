"""How far a replay is: a bar with rich, plain lines without it."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any, Protocol

from blocktable.replay.plan import Counters

PLAIN_LINE_EVERY_S = 10.0
LOOK_AT_CLOCK_EVERY = 64
"""Steps between two looks at the clock."""


class Progress(Protocol):
    """Hears of every step."""

    def update(self, counters: Counters, num_mismatches: int) -> None:
        """Show it, if it is time."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class SilentProgress:
    """Shows nothing."""

    def update(self, counters: Counters, num_mismatches: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class PlainProgress:
    """A line on stderr every ten seconds.

    Args:
        num_requests: requests that will finish.
    """

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._begin = self._shown = time.monotonic()

    def update(self, counters: Counters, num_mismatches: int) -> None:
        """Print a line, if the last one is old."""
        if counters.steps % LOOK_AT_CLOCK_EVERY:
            return
        now = time.monotonic()
        if now - self._shown >= PLAIN_LINE_EVERY_S:
            self._shown = now
            self._print(counters, num_mismatches, now - self._begin)

    def _print(self, counters: Counters, num_mismatches: int, seconds: float) -> None:
        done = counters.requests
        left = f", about {seconds * (self._num_requests - done) / done:.0f} s left" if done else ""
        sys.stderr.write(
            f"{done} of {self._num_requests} requests, {counters.steps} steps, {counters.steps / seconds:.0f} steps/s, "
            f"{num_mismatches} mismatches{left}\n"
        )
        sys.stderr.flush()

    def close(self) -> None:
        """Nothing to put back."""


class RichProgress:
    """A bar on stderr with steps a second and the time left.

    Args:
        num_requests: requests that will finish.
        rich_progress: the module rich.progress.
    """

    REFRESH_S = 0.2

    def __init__(self, num_requests: int, rich_progress: Any) -> None:
        console = importlib.import_module("rich.console").Console(stderr=True)
        self._bar = rich_progress.Progress(
            rich_progress.TextColumn("replay"),
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn("requests · {task.fields[steps]} steps · {task.fields[rate]:.0f} steps/s"),
            rich_progress.TextColumn("· {task.fields[mismatches]} mismatches ·"),
            rich_progress.TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("replay", total=num_requests, steps=0, rate=0.0, mismatches=0)
        self._begin = self._shown = time.monotonic()
        self._bar.start()

    def update(self, counters: Counters, num_mismatches: int) -> None:
        """Move the bar, a few times a second."""
        if counters.steps % LOOK_AT_CLOCK_EVERY:
            return
        now = time.monotonic()
        if now - self._shown >= self.REFRESH_S:
            self._shown = now
            rate = counters.steps / (now - self._begin)
            self._bar.update(
                self._task, completed=counters.requests, steps=counters.steps, rate=rate, mismatches=num_mismatches
            )

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()


def make_progress(num_requests: int, *, is_quiet: bool) -> Progress:
    """Return a bar where rich is installed and stderr is a terminal, else plain lines."""
    if is_quiet:
        return SilentProgress()
    if sys.stderr.isatty():
        try:
            return RichProgress(num_requests, importlib.import_module("rich.progress"))
        except ImportError:
            pass
    return PlainProgress(num_requests)
