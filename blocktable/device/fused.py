"""A whole step as one graph: a commit, the gather and the slots."""

from __future__ import annotations

from typing import Any

from blocktable.device.driver import Driver, HostBlock
from blocktable.device.graph import DirectLaunches, StepGraph
from blocktable.device.launches import Inputs, Launches
from blocktable.device.signatures import Launch
from blocktable.device.staging import StepMarks
from blocktable.protocols import Batch


class FusedStep:
    """The step over one set of outputs.

    Two kernels where the backend has "step_batch": the changes, then gather and slots together. Otherwise the plain
    ones.

    Args:
        launches: the table's kernels.
        driver: the device.
        batch, slots: addresses of the set's memory.
        last_mark: address of the device's copy of the last step's number.
        marks: the steps' numbers, as the host sees them.

    Attributes:
        batch: the last one that was set, if it may be used again.
    """

    def __init__(
        self, launches: Launches, driver: Driver, batch: int, slots: int, last_mark: int, marks: StepMarks
    ) -> None:
        self._launches, self._driver = launches, driver
        self._memory = batch, slots
        self._last_mark, self._marks = last_mark, marks
        self._numbers = marks if launches.has_step_batch else None
        self._apply_memory = launches.apply_memory(0, batch, last_mark) if self._numbers else launches.apply_memory()
        self._no_changes = launches.no_changes(self._apply_memory)
        self._rest: list[Launch] = []
        self._graphs: dict[int, Any] = {}
        self.batch: Batch | None = None
        for wants_tables in (True, False):  # a graph takes memory, which a later step must not (R21)
            self.set_batch(Batch(None, None, None, 0, 0, wants_tables=wants_tables), launches.inputs({}), keep=False)

    def set_batch(self, batch: Batch, inputs: Inputs, *, keep: bool) -> None:
        """Take the inputs of the next step. keep: whether `batch` stands for the same addresses later."""
        launches = self._launches
        if launches.has_step_batch:
            self._rest = [launches.step_batch(inputs, batch, *self._memory, self._last_mark, self._marks.address)]
        else:
            num_slots = launches.num_slots
            gather = launches.gather(inputs, batch, self._memory[0]) if batch.wants_tables else []
            self._rest = gather + launches.map_slots(
                *(inputs, batch, self._memory[1], num_slots, num_slots), groups=launches.all_groups, is_named=False
            )
        self.batch = batch if keep else None
        length = 1 + len(self._rest)
        if length not in self._graphs:
            made = DirectLaunches if self._driver.is_emulated else StepGraph
            overlaps = self._driver.overlaps and launches.has_step_batch
            self._graphs[length] = made([self._no_changes, *self._rest], overlaps=overlaps)
        self._graph = self._graphs[length]

    def run(self, block: HostBlock | None, used: int, stream: int) -> None:
        """Launch a step, and mark the block that holds its changes.

        Args:
            block: holds packed changes. None: there are none.
            used: its entries in use.
            stream: to launch on.
        """
        if block is None:
            self._graph.run([self._no_changes, *self._rest], stream)
            return
        driver = self._driver
        apply, mark = self._launches.apply_changes(block, used, self._apply_memory, self._numbers)
        if not driver.is_mapped and mark is not None:
            driver.send(block, used, stream)
        self._graph.run([apply, *self._rest], stream, is_refilled=mark is None)
        if mark is None or (self._numbers is not None and driver.is_mapped):
            block.mark = mark
        else:  # the host sees no number where it shares no memory with kernels
            block.mark = driver.mark(stream)
