"""One backend under a replay: its table, the clock around its calls, and what it got wrong."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from blocktable import PAD_SLOT_ID, BlockTable, BlockTableConfig, BlockTableError, CheckError, Finding, StepBuffers
from blocktable.backend import Backend, Writes
from blocktable.typing import IntArray
from blocktable_replay.btrace import ARRAYS, OUTPUT_CALLS
from blocktable_replay.checker import ExpectedStep, compare_block_table, compare_slots, slot_sizes
from blocktable_replay.digest import output_digest
from blocktable_replay.result import Findings

T = TypeVar("T")

MAX_KEPT = 64
"""Findings of the checker that are kept: the first ones. All are counted."""

LOST = 1
"""What memory holds after a sleep: wrong, but no count that leads a kernel outside of its arrays."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a backend wrote in one step, on the host.

    Attributes:
        block_tables: for each group [num_reqs_padded, width] int32.
        slot_mappings: for each group that the call writes the whole buffer, in the order of the call.
        has_kept: whether the slot buffers of the set's other groups are what they were (R15).
    """

    block_tables: tuple[IntArray, ...]
    slot_mappings: tuple[IntArray, ...]
    has_kept: bool = True


class Lane:
    """Runs a replay on one backend.

    Args:
        name: what the user calls the backend.
        backend: the backend.
        config: the table's configuration.
        device: what the backend calls a device. None: its default.
        check: whether its table looks for the engine's own mistakes.

    Attributes:
        table: the table.
        findings: what the backend got wrong so far.
        engine_findings: the first mistakes of the engine's that its table found.
        num_engine_findings: kind -> how many it found.
        host_us: microseconds of host time of each step: row operations, commit, gather and slots.
        bytes_sent: bytes that each step's commit sent.
        slot_digest: of all slots so far, the same for every order of the requests in a batch.
        output_digest: of all outputs so far, bit for bit; empty where it was not asked for.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        config: BlockTableConfig,
        device: str | None = None,
        check: Literal["off", "host", "device"] = "off",
    ) -> None:
        self.name = name
        self.backend = backend
        self.device = device
        self.findings: Findings = Findings()
        self.host_us: array[float] = array("d")
        self.bytes_sent: array[int] = array("q")
        self.slot_digest: bytes = b""
        self.output_digest: bytes = b""
        self._elapsed_ns = 0
        self._bytes_before = 0
        self.engine_findings: list[Finding] = []
        self.num_engine_findings: Counter[str] = Counter()
        self._raises = False
        self.table: BlockTable = self._guard(
            "create_block_store", lambda: BlockTable(config, backend, device, check=check, on_finding=self._hear)
        )
        self._sets: list[StepBuffers] = [self.table.buffers]

    @property
    def description(self) -> str:
        """What the backend calls itself; an emulated one says so."""
        return str(getattr(self.backend, "description", self.name))

    # Calls.

    def operate(self, name: str, values: Sequence[Any]) -> None:
        """Do one call that puts nothing out; its time counts to the next step."""
        method = getattr(self.table, name)
        result = self._timed(name, lambda: method(*values))
        if name == "create_buffers":
            self._sets.append(result)

    def lose_memory(self) -> None:
        """Fill the device's rows and counts with rubbish, as if its memory had been released and mapped again.

        Costs no time of a step. `invalidate` and a commit must follow.
        """
        arena = self.table.config.arena
        lost = np.full(arena.size, LOST, np.int32)
        writes = Writes(arena, np.zeros(1, np.int64), np.array([arena.size], np.int32), lost)
        self._guard("write", lambda: self.table.store.write(writes, stream=None))
        self._guard("synchronize", lambda: self.backend.synchronize(self.device))

    def run(self, name: str, arguments: Mapping[str, Any]) -> Outputs:
        """Do one call that puts something out, and fetch it.

        Args:
            name: the method, one of `OUTPUT_CALLS`.
            arguments: parameter -> value; arrays on the host, `out` as the number of a set or the lengths of arrays.
        """
        given = self._guard("from_host", lambda: self._on_device(arguments))
        slots, others = self._slots(name, arguments, given["out"])
        before = self._guard("to_host", lambda: [values.copy() for values in self._fetch(others)])
        method = getattr(self.table, name)
        result = self._timed(name, lambda: method(**given))
        self.host_us.append(self._elapsed_ns / 1000.0)
        self.bytes_sent.append(self.table.num_bytes_sent - self._bytes_before)
        self._elapsed_ns, self._bytes_before = 0, self.table.num_bytes_sent
        tables = () if name == "compute_slot_mappings" else result if name == "gather" else result.block_tables
        has_kept = all(map(np.array_equal, before, self._guard("to_host", lambda: self._fetch(others))))
        return self._guard("to_host", lambda: Outputs(self._fetch(tables), self._fetch(slots), has_kept))

    def _slots(self, name: str, arguments: Mapping[str, Any], out: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the slot arrays that a call writes, and those of its set that it must leave alone (R15)."""
        if name == "gather" or not isinstance(out, StepBuffers):
            return () if name == "gather" else out, ()
        named, arrays = slot_sizes(self.table.config, name, arguments), out.slot_mappings
        return [arrays[group] for group in named], [slots for group, slots in enumerate(arrays) if group not in named]

    def error_of(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Do a call that should fail and return the name of its error; None where it does not fail."""
        method = getattr(self.table, name)
        self._raises = True
        try:
            method(**(self._on_device(arguments) if name in OUTPUT_CALLS else arguments))
        except Exception as error:
            return type(error).__name__
        finally:
            self._raises = False
        return None

    def _hear(self, finding: Finding) -> None:
        """Keep a finding; it is raised where the recorded table raised one, whose call then changed nothing."""
        self.num_engine_findings[finding.kind] += 1
        if len(self.engine_findings) < MAX_KEPT:
            self.engine_findings.append(finding)
        if self._raises:
            raise CheckError(finding.message, finding)

    def _on_device(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments as the table takes them."""
        given = dict(arguments)
        for name in ARRAYS:
            if isinstance(given.get(name), np.ndarray):
                given[name] = self.backend.from_host(given[name], self.device)
        out, dtype = given["out"], np.dtype(self.table.config.slot_dtype)
        given["out"] = (
            self._sets[out]
            if isinstance(out, int)
            else [self.backend.from_host(np.full(size, PAD_SLOT_ID, dtype), self.device) for size in out]
        )
        return given

    def _fetch(self, arrays: Sequence[Any]) -> tuple[IntArray, ...]:
        return tuple(np.asarray(self.backend.to_host(values)) for values in arrays)

    def _timed(self, name: str, call: Callable[[], T]) -> T:
        begin = time.perf_counter_ns()
        result = self._guard(name, call)
        self._elapsed_ns += time.perf_counter_ns() - begin
        return result

    def _guard(self, what: str, call: Callable[[], T]) -> T:
        """A backend's own exception is the backend's fault: say whose it is, and keep it as the cause."""
        try:
            return call()
        except Exception as error:
            raised = "" if isinstance(error, BlockTableError) else f"it raised {type(error).__name__}: "
            step, reason = len(self.host_us) + 1, " ".join(str(error).split())
            raise BlockTableError(f"Backend {self.name!r} failed in {what} at step {step}: {raised}{reason}") from error

    # Outputs.

    def compare(self, number: int, expected: ExpectedStep, outputs: Outputs) -> None:
        """Compare every entry of a step's outputs."""
        for group, table in enumerate(outputs.block_tables):
            self.findings.add(number, *compare_block_table(expected, group, table))
        for group, slots in zip(expected.slot_mappings, outputs.slot_mappings, strict=True):
            self.findings.add(number, *compare_slots(expected, group, slots))

    def digest_outputs(self, outputs: Outputs) -> bytes:
        """Return the digest of one step's outputs, and add it to that of all."""
        digest = output_digest((*outputs.block_tables, *outputs.slot_mappings))
        self.output_digest = hashlib.blake2b(self.output_digest + digest, digest_size=16).digest()
        return digest
