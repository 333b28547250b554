"""How changes travel to a device: one packed block for each commit, in a ring that never overwrites what is in use.

Shared by the device backends, since it decides what R9 promises; the memory itself and its completion marks are theirs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from blocktable.config import BlockTableConfig
from blocktable.errors import ConfigError
from blocktable.protocols import IntArray, Writes

STAGING_VARIABLE = "BLOCKTABLE_STAGING"
STAGING_MODES = ("auto", "params", "mapped", "copy")

Slot = TypeVar("Slot")


def staging_mode() -> str:
    """Return how changes shall travel, from the environment: "auto" unless BLOCKTABLE_STAGING says otherwise."""
    mode = os.environ.get(STAGING_VARIABLE, "auto")
    if mode not in STAGING_MODES:
        raise ConfigError(f"{STAGING_VARIABLE} must be one of {', '.join(STAGING_MODES)}; got {mode!r}.")
    return mode


def staged_entries(num_ranges: int, num_values: int) -> int:
    """Return the int32 entries of a packed commit: `offsets` as int64, `starts`, `values`."""
    return 2 * num_ranges + (num_ranges + 1) + num_values


def steady_entries(config: BlockTableConfig) -> int:
    """Return the int32 entries of the largest commit that must not allocate.

    One new block for every row and group, a filled count beside each, and one full row for every group (R9).
    """
    arena = config.arena
    cells = arena.num_groups * arena.num_rows
    appended = sum(group.blocks_per_kv_block for group in config.groups) * arena.num_rows
    return staged_entries(2 * cells + arena.num_groups, appended + cells + sum(arena.widths))


def pack_writes(writes: Writes, block: IntArray) -> None:
    """Lay a commit out for the scatter kernel: `offsets` [n] int64, `starts` [n + 1] int32, `values` int32.

    `starts[i]` is the first value of range i, `starts[n]` the number of values.

    Args:
        block: [>= staged_entries(...)] int32, 8-byte aligned, written.
    """
    num_ranges = writes.offsets.size
    values_start = 3 * num_ranges + 1
    block[: 2 * num_ranges].view(np.int64)[:] = writes.offsets
    block[2 * num_ranges] = 0
    np.cumsum(writes.lengths, out=block[2 * num_ranges + 1 : values_start])
    block[values_start : values_start + writes.values.size] = writes.values


class StagingRing(Generic[Slot]):
    """Memory that is handed out in turn, each slot again only when the device has finished with it (R9).

    Args:
        slots: one for each commit that may be in flight.
        wait: waits for a completion mark.
    """

    def __init__(self, slots: Sequence[Slot], wait: Callable[[Any], None]) -> None:
        self._slots = slots
        self._marks: list[Any] = [None] * len(slots)
        self._wait = wait
        self._next = 0

    def acquire(self) -> Slot:
        """Return the next slot; waits where the work that used it last is unfinished."""
        mark = self._marks[self._next]
        if mark is not None:
            self._wait(mark)
            self._marks[self._next] = None
        return self._slots[self._next]

    def release(self, mark: Any) -> None:
        """Say that the slot is in use until `mark`, and go on to the next one."""
        self._marks[self._next] = mark
        self._next = (self._next + 1) % len(self._slots)


class StepMarks:
    """Completion marks without events: a kernel of each step writes the step's number where the host reads it.

    For steps that are launched as one graph. Recording an event would cost as much as the launch, and a wait here is
    a look at memory.

    Args:
        shown: [1] int64. The host's view of that memory, which holds 0.
    """

    def __init__(self, shown: IntArray) -> None:
        self._shown = shown
        self._last = self._seen = 0

    def next(self) -> int:
        """Return the number of a step that is about to be launched; counted from 1."""
        self._last += 1
        return self._last

    def wait(self, mark: int, check: Callable[[], Any]) -> None:
        """Wait until the device has finished the step of that number.

        Args:
            mark: the number.
            check: raises where the device has failed and will never write it; asked every second.
        """
        if mark <= self._seen:  # most often: the device is many steps further
            return
        spins, last_check = 0, time.monotonic()
        while self._shown[0] < mark:
            spins += 1
            if spins > 100:  # the first microseconds without giving the processor away
                time.sleep(20e-6)
                if time.monotonic() - last_check > 1:
                    check()
                    last_check = time.monotonic()
        self._seen = int(self._shown[0])
