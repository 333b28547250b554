"""How a commit's changes and a step's host arrays travel: in blocks that are never overwritten while in use (R9.2)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from itertools import cycle
from typing import Any

import numpy as np

from blocktable.arrays import Array, IntArray
from blocktable.config import BlockTableConfig
from blocktable.device.driver import Driver, HostBlock
from blocktable.device.emulation import DeviceArray
from blocktable.device.ordering import StreamOrder
from blocktable.errors import ConfigError
from blocktable.protocols import CHANGES_HEADER, Batch

STAGING_VARIABLE = "BLOCKTABLE_STAGING"
STAGING_MODES = ("auto", "params", "mapped", "copy")

INPUTS = ("positions", "idx_mapping", "query_start_loc", "num_computed_tokens", "seq_lens", "first_tokens")
"""The arrays of a batch; first the one of 8-byte entries."""


def staging_mode() -> str:
    """Return how changes shall travel, from the environment: "auto" unless BLOCKTABLE_STAGING says otherwise."""
    mode = os.environ.get(STAGING_VARIABLE, "auto")
    if mode not in STAGING_MODES:
        raise ConfigError(f"{STAGING_VARIABLE} must be one of {', '.join(STAGING_MODES)}; got {mode!r}.")
    return mode


def steady_entries(config: BlockTableConfig) -> int:
    """Return the int32 entries of the largest commit that must not allocate, packed.

    One new block for every row and group, a filled count beside each, and one full row for every group (R9.4). Of a row
    that replaces another only the entries that differ are sent: where every third one is the same, a range of two
    takes four entries.
    """
    arena = config.arena
    appended = sum(2 + group.blocks_per_kv_block for group in config.groups) * arena.num_rows
    counts = 2 * arena.num_groups * arena.num_rows + 2 * arena.num_check_entries
    return CHANGES_HEADER + appended + counts + sum(5 + width + -(-width // 3) for width in arena.widths)


class StepMarks:
    """Completion marks without events: a kernel of each fused step writes the step's number where the host reads it.

    Recording an event would cost as much as the launch, and a wait here is a look at memory.

    Args:
        block: [>= 2 entries]; its memory holds the number.

    Attributes:
        address: of that memory, for the kernel; where it shares none with the host, of a copy that is not looked at.
        shown: [1] int64. The host's view of it.
        last: number of the last step that needed one; counted from 1.
    """

    def __init__(self, block: HostBlock) -> None:
        self._block = block  # owns the memory
        self.address: int = block.address
        self.shown: IntArray = block.host[:2].view(np.int64)
        self.shown[0] = 0
        self.last: int = 0

    def wait(self, number: int, order: StreamOrder) -> None:
        """Wait until the device has finished the step of that number.

        Args:
            number: the step's.
            order: asked every second whether the device has failed and will never write it.
        """
        spins, last_check = 0, time.monotonic()
        while self.shown[0] < number:
            spins += 1
            if spins > 100:  # the first microseconds without giving the processor away
                time.sleep(20e-6)
                if time.monotonic() - last_check > 1:
                    order.check()
                    last_check = time.monotonic()


class StagingRing:
    """Blocks that are handed out in turn, each again only when the device has finished with it (R9.2).

    Whoever takes one sets its `mark` once everything that reads it is launched.

    Args:
        driver: the device.
        entries: int32 entries of a block.
        num_blocks: calls that may be in flight.
        order: the streams of the table.
        step_marks: what marks that are numbers belong to.
        is_copied: whether all blocks are sent to one place on the device, one after another in stream order: kernels
            find what they hold at the same addresses each time, and read it there more than once.
    """

    def __init__(
        self,
        driver: Driver,
        entries: int,
        num_blocks: int,
        order: StreamOrder,
        step_marks: StepMarks | None = None,
        *,
        is_copied: bool = False,
    ) -> None:
        self._driver, self._order, self._step_marks = driver, order, step_marks
        self.entries: int = entries
        blocks = [driver.host_block(entries) for _ in range(num_blocks)]
        if is_copied:
            place = driver.full(entries, 0, "int32")
            blocks = [HostBlock(block.host, driver.address(place), place, block.owner) for block in blocks]
        self.blocks: Iterator[HostBlock] = cycle(blocks)

    def acquire(self) -> HostBlock:
        """Return the next block; waits where the work that used it last is unfinished."""
        block = next(self.blocks)
        return block if block.mark is None else self.wait_for(block)

    def wait_for(self, block: HostBlock) -> HostBlock:
        """Wait until a block is free, and return it."""
        with self._driver.current():
            if isinstance(block.mark, int):
                assert self._step_marks is not None
                self._step_marks.wait(block.mark, self._order)
            else:
                self._driver.wait(block.mark)
        block.mark = None
        return block


def is_host_array(array: Any) -> bool:
    """Say whether an array lies in the host's memory and must be staged; arrays of an emulated device do not."""
    return isinstance(array, np.ndarray) and not isinstance(array, DeviceArray)


def inputs_of(batch: Batch) -> dict[str, Array]:
    """Return the arrays of a batch that are given."""
    named = ((name, getattr(batch, name)) for name in INPUTS)
    return {name: array for name, array in named if array is not None}


def staged_entries(arrays: Mapping[str, Array]) -> int:
    """Return the int32 entries that those of some arrays take which lie in the host's memory."""
    return sum(array.nbytes // 4 for array in arrays.values() if is_host_array(array))


def place_inputs(arrays: Mapping[str, Array], driver: Driver, block: HostBlock | None) -> tuple[dict[str, int], int]:
    """Return the address of each array, and how many entries of the block are used.

    Args:
        arrays: those of 8-byte entries first.
        driver: the device.
        block: where host arrays go. None: there are none.
    """
    addresses: dict[str, int] = {}
    used = 0
    for name, array in arrays.items():
        if block is None or not is_host_array(array):
            addresses[name] = driver.address(array)
            continue
        entries = array.reshape(-1).view(np.int32)
        block.host[used : used + entries.size] = entries
        addresses[name] = block.address + 4 * used
        used += entries.size
    return addresses, used
