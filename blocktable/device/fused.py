"""A whole step as one graph: a commit, the gather and the slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blocktable.device.driver import Driver, HostBlock
from blocktable.device.graph import DirectLaunches, StepGraph
from blocktable.device.launches import Launches, LaunchForm, launch_form, resized_form, run
from blocktable.device.signatures import Launch
from blocktable.device.staging import StepMarks
from blocktable.protocols import Batch, Part


class PreparedStep:
    """What the steps of one form have in common: no array of the caller's, and not the set of outputs.

    Args:
        fused: the step over the set.
        graph: what runs it. None: its launches are run as they are, without changes.
        batch: the first batch of the form.
        part: what of a step is done.
        forms: its launches after the changes.
        absent: addresses for inputs that are not given.

    Attributes:
        fused, graph: as given.
        asked: places in `STEP_INPUTS` of the inputs whose address only the driver knows.
        staged: place, first and last entry of each input that travels in a block.
        num_staged: int32 entries of such a block.
        addresses: of the last step's inputs.
        launches: over those.
    """

    __slots__ = (
        *("_absent", "_forms", "_part", "_sizes", "addresses", "asked", "fused", "graph", "launches"),
        *("num_staged", "staged"),
    )

    def __init__(
        self,
        fused: FusedStep,
        graph: Any,
        batch: Batch,
        part: Part,
        forms: Sequence[LaunchForm],
        absent: tuple[int, ...],
    ) -> None:
        self.fused: FusedStep = fused
        self.graph: Any = graph
        self._sizes = batch.num_reqs, batch.num_reqs_padded, None, batch.num_positions, batch.needs_gather
        self.asked: tuple[int, ...] = ()
        self.staged: tuple[tuple[int, int, int], ...] = ()
        self.num_staged: int = 0
        self.addresses: Sequence[int | None] = ()
        self.launches: Sequence[Launch] = ()
        self._part, self._forms, self._absent = part, forms, absent

    def plain_launches(self, addresses: dict[str, int]) -> list[Launch]:
        """Return the steps without their changes as plain kernels. addresses: of the inputs that are given."""
        return self.fused.plain_launches(Batch(None, None, None, *self._sizes), addresses, self._part)

    def resize(self, num_positions: int) -> bool:
        """Serve another number of tokens; False, with nothing changed, where a block holds inputs of this one."""
        if self.staged:
            return False
        num_reqs, num_reqs_padded, _, _, needs_gather = self._sizes
        self._sizes = num_reqs, num_reqs_padded, None, num_positions, needs_gather
        self._forms = [resized_form(form, num_reqs, num_positions) for form in self._forms]
        self.addresses = ()  # binds again
        return True

    def bind(self, addresses: Sequence[int | None]) -> None:
        """Take the addresses of a step's inputs; they are often those of the step before, whose launches serve again.

        Args:
            addresses: in the order of `STEP_INPUTS`.
        """
        idx_mapping, num_computed_tokens, query_start_loc, positions = addresses
        absent = self._absent
        present: Any = (
            absent[0] if idx_mapping is None else idx_mapping,
            absent[1] if num_computed_tokens is None else num_computed_tokens,
            absent[2] if query_start_loc is None else query_start_loc,
            absent[3] if positions is None else positions,
        )
        self.launches = [(kernel, grid, pick(present) + rest) for kernel, grid, pick, rest in self._forms]
        self.addresses = addresses


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
        self._graphs: dict[int, Any] = {}
        for needs_gather in (True, False):  # a graph takes memory, which a later step must not (R21)
            self.prepare(Batch(None, None, None, 0, 0, needs_gather=needs_gather))

    def prepare(self, batch: Batch, part: Part = "step") -> PreparedStep:
        """Return what steps over batches of these sizes have in common, or such parts of a step."""
        launches = self._launches
        if launches.has_step_batch and part != "slots":
            addresses = (*self._memory, self._last_mark, self._marks.address)
            made = [launches.step_batch(launches.no_inputs, batch, *addresses, has_slots=part == "step")]
        else:
            made = self.plain_launches(batch, {}, part)
        graph = None if part == "slots" else self._graph_of(made)
        return PreparedStep(self, graph, batch, part, [*map(launch_form, made)], launches.absent)

    def _graph_of(self, made: list[Launch]) -> Any:
        """Return the graph of a commit and as many launches; another one made it where these are as many."""
        length = 1 + len(made)
        if length not in self._graphs:
            overlaps = self._driver.overlaps and self._launches.has_step_batch
            self._graphs[length] = (
                DirectLaunches()
                if self._driver.is_emulated
                else StepGraph([self._no_changes, *made], overlaps=overlaps).launcher()
            )
        return self._graphs[length]

    def plain_launches(self, batch: Batch, addresses: dict[str, int], part: Part = "step") -> list[Launch]:
        """Return the step without its changes as plain kernels. addresses: of the inputs that are given."""
        launches, (tables, slots) = self._launches, self._memory
        inputs, num_slots = launches.inputs(addresses), launches.num_slots
        gather = launches.gather(inputs, batch, tables) if batch.needs_gather and part != "slots" else []
        if part == "tables":
            return gather
        return (
            gather
            + launches.check_requests(inputs, batch)
            + launches.map_slots(
                *(inputs, batch, slots, num_slots, num_slots), groups=launches.all_groups, is_named=False
            )
        )

    def run(self, prepared: PreparedStep, block: HostBlock | None, used: int, stream: int) -> int | None:
        """Launch a step, and mark the block that holds its changes.

        Args:
            prepared: what follows the changes.
            block: holds packed changes. None: there are none.
            used: its entries in use.
            stream: to launch on.

        Returns:
            The step's number, which the host sees when the device has finished it; None: it has none.
        """
        if prepared.graph is None:
            run(prepared.launches, stream)
            return None
        if block is None:
            prepared.graph.run(self._no_changes, prepared.launches, stream)
            return None
        driver = self._driver
        apply, mark = self._launches.apply_changes(block, used, self._apply_memory, self._numbers)
        if not driver.is_mapped and mark is not None:
            driver.send(block, used, stream)
        prepared.graph.run(apply, prepared.launches, stream, is_refilled=mark is None)
        if mark is None or (self._numbers is not None and driver.is_mapped):
            block.mark = mark
            return mark
        block.mark = driver.mark(stream)  # the host sees no number where it shares no memory with kernels
        return None
