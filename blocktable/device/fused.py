"""A whole step as one graph: a commit, the gather and the slots."""

from __future__ import annotations

from typing import Any

from blocktable.device.driver import Driver, HostBlock
from blocktable.device.graph import DirectLaunches, StepGraph
from blocktable.device.launches import NO_CHANGES, Inputs, Launches
from blocktable.device.signatures import Launch
from blocktable.device.staging import StepMarks
from blocktable.protocols import CHANGES_HEADER, Batch


class FusedStep:
    """The step over one set of outputs.

    Two kernels where the backend has "step_batch": the changes, then gather and slots together. Otherwise the plain
    ones.

    Args:
        launches: the table's kernels.
        driver: the device.
        batch, slots: addresses of the set's memory.
        last_mark: address of the device's copy of the last step's number.
        shown_mark: address of where the host looks for it.

    Attributes:
        batch: the last one that was set, if it may be used again.
    """

    def __init__(
        self, launches: Launches, driver: Driver, batch: int, slots: int, last_mark: int, shown_mark: int
    ) -> None:
        self._launches, self._driver = launches, driver
        self._memory = batch, slots
        self._marks = last_mark, shown_mark
        self._no_changes = self._apply(0, NO_CHANGES, 0)
        self._rest: list[Launch] = []
        self._graphs: dict[int, Any] = {}
        self.batch: Batch | None = None
        for wants_tables in (True, False):  # a graph takes memory, which a later step must not (R21)
            self.set_batch(Batch(None, None, None, 0, 0, wants_tables=wants_tables), launches.inputs({}), keep=False)
            self._graph([self._no_changes, *self._rest])

    def _apply(self, address: int, counts: Any, mark: int) -> Launch:
        copies = self._launches.has_step_batch
        return self._launches.apply_changes(
            address, counts, batch=self._memory[0], copies=copies, mark=mark, last_mark=self._marks[0]
        )

    def set_batch(self, batch: Batch, inputs: Inputs, *, keep: bool) -> None:
        """Take the inputs of the next step. keep: whether `batch` stands for the same addresses later."""
        if self._launches.has_step_batch:
            self._rest = [self._launches.step_batch(inputs, batch, *self._memory, *self._marks)]
        else:
            num_slots = self._launches.num_slots
            gather = self._launches.gather(inputs, batch, self._memory[0]) if batch.wants_tables else []
            self._rest = gather + self._launches.map_slots(inputs, batch, self._memory[1], num_slots, num_slots)
        self.batch = batch if keep else None

    def run(self, stream: int) -> None:
        """Launch a step without changes."""
        self._run(self._no_changes, stream)

    def run_with_changes(self, block: HostBlock, used: int, marks: StepMarks | None, stream: int) -> Any:
        """Launch a step with packed changes; return a mark of when the block is free, None where it is already.

        Args:
            block: what holds them.
            used: its entries in use.
            marks: the step's numbers.
            stream: to launch on.
        """
        counts = block.host[:CHANGES_HEADER].tolist()
        launch = self._apply(block.address, counts, 0)
        by_value = self._launches.apply_by_value(block.host_address, used, launch)
        if by_value is not None:
            self._run(by_value, stream)
            return None
        self._driver.send(block, used, stream)
        if not self._launches.has_step_batch or marks is None:
            self._run(launch, stream)
            return self._driver.mark(stream)
        mark = marks.next()
        self._run(self._apply(block.address, counts, mark), stream)
        return mark

    def _run(self, apply: Launch, stream: int) -> None:
        launches = [apply, *self._rest]
        self._graph(launches).run(launches, stream)

    def _graph(self, launches: list[Launch]) -> Any:
        """Return the graph of so many launches."""
        graph = self._graphs.get(len(launches))
        if graph is None:
            made = DirectLaunches if self._driver.is_emulated else StepGraph
            overlaps = self._driver.overlaps and self._launches.has_step_batch
            graph = self._graphs[len(launches)] = made(launches, overlaps=overlaps)
        return graph
