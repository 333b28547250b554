"""One backend under a replay: its table, the clock around its calls, and what it got wrong."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from blocktable.config import BlockTableConfig
from blocktable.errors import BlockTableError
from blocktable.protocols import Backend, IntArray, Step
from blocktable.replay.checker import BatchNames, ExpectedStep, compare_block_table, compare_slots
from blocktable.replay.digest import slot_digest
from blocktable.replay.plan import StepPlan
from blocktable.table import BlockTable

T = TypeVar("T")

MAX_SHOWN = 10
"""Mismatches of one backend that are shown; all are counted."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a backend wrote in one step, on the host.

    Attributes:
        block_tables: for each group [num_reqs_padded, width] int32.
        slot_mappings: for each group the whole buffer, [max_num_batched_tokens].
    """

    block_tables: tuple[IntArray, ...]
    slot_mappings: tuple[IntArray, ...]


@dataclass(slots=True)
class Findings:
    """What is wrong with a backend's outputs.

    Attributes:
        count: wrong entries, and broken invariants.
        shown: the first ones as sentences.
    """

    count: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, step: int, count: int, sentences: Sequence[Any]) -> None:
        """Count, and keep the sentence where there is room."""
        self.count += count
        for sentence in sentences[: MAX_SHOWN - len(self.shown)]:
            self.shown.append(f"step {step}, {sentence}")


class Lane:
    """Runs plans on one backend.

    Args:
        name: what the user calls the backend.
        backend: the backend.
        config: the table's configuration.
        device: what the backend calls a device. None: its default.

    Attributes:
        table: the table.
        findings: what was wrong so far.
        host_us: microseconds of host time of each step: row operations, commit, gather and slots.
        bytes_sent: bytes that each step's commit sent.
        digest: of all slots so far, the same for every order of the requests in a batch.
    """

    def __init__(self, name: str, backend: Backend, config: BlockTableConfig, device: str | None = None) -> None:
        self.name = name
        self.backend = backend
        self.device = device
        self.findings = Findings()
        self.host_us = array("d")
        self.bytes_sent = array("q")
        self.digest = 0
        self.table: BlockTable = self._guard("create the table", lambda: BlockTable(config, backend, device))

    @property
    def description(self) -> str:
        """What the backend calls itself; an emulated one says so."""
        return str(getattr(self.backend, "description", self.name))

    def run(self, plan: StepPlan) -> Outputs:
        """Do the plan's row operations and its step, and fetch what came out."""
        inputs = self._guard("take the step's inputs", lambda: self._inputs(plan))
        sent_before = self.table.num_bytes_sent
        begin = time.perf_counter_ns()
        step = self._guard("run", lambda: self._step(plan, inputs))
        self.host_us.append((time.perf_counter_ns() - begin) / 1000.0)
        self.bytes_sent.append(self.table.num_bytes_sent - sent_before)
        return self._guard("give its outputs", lambda: self._fetch(step))

    def check(self, number: int, plan: StepPlan, expected: ExpectedStep, outputs: Outputs) -> None:
        """Compare every entry of a step's outputs."""
        names = BatchNames(plan.requests, plan.rows)
        for group, (table, slots) in enumerate(zip(outputs.block_tables, outputs.slot_mappings, strict=True)):
            self.findings.add(number, *compare_block_table(expected, group, table, names))
            self.findings.add(number, *compare_slots(expected, group, slots, names))
        self.digest = slot_digest(self.digest, plan, outputs.slot_mappings)

    def _guard(self, what: str, call: Callable[[], T]) -> T:
        """A backend's own exception is the backend's fault: say whose it is, and keep it as the cause."""
        try:
            return call()
        except Exception as error:
            raised = "" if isinstance(error, BlockTableError) else f"it raised {type(error).__name__}: "
            step = len(self.host_us) + 1
            raise BlockTableError(f"Backend {self.name!r} cannot {what} at step {step}: {raised}{error}") from error

    def _inputs(self, plan: StepPlan) -> list[Any]:
        arrays = (plan.idx_mapping, plan.query_start_loc, plan.positions, plan.num_computed_tokens)
        return [None if values is None else self.backend.from_host(values, self.device) for values in arrays]

    def _step(self, plan: StepPlan, inputs: list[Any]) -> Step:
        table = self.table
        for name, arguments in plan.operations:
            getattr(table, name)(*arguments)
        return table.step(
            *inputs[:3],
            num_reqs_padded=plan.num_reqs_padded,
            num_tokens_padded=plan.num_tokens_padded,
            num_computed_tokens=inputs[3],
        )

    def _fetch(self, step: Step) -> Outputs:
        to_host = self.backend.to_host
        return Outputs(
            tuple(np.asarray(to_host(table)) for table in step.block_tables),
            tuple(np.asarray(to_host(slots)) for slots in self.table.buffers.slot_mappings),
        )
