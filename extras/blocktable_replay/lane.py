"""One backend under a replay: its table, the clock around its calls, and what it got wrong."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from blocktable import (
    PAD_SLOT_ID,
    Backend,
    BlockTable,
    BlockTableConfig,
    BlockTableError,
    IntArray,
    StepBuffers,
    Writes,
)
from blocktable_replay.checker import BatchNames, ExpectedStep, compare_block_table, compare_slots
from blocktable_replay.digest import chain_digests, output_digest
from blocktable_replay.result import Findings

T = TypeVar("T")

LOST = 1
"""What memory holds after a sleep: wrong, but no count that leads a kernel outside of its arrays."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arrays of a step, on the host: see `Batch`. None where the call has none."""

    idx_mapping: IntArray | None
    query_start_loc: IntArray | None
    positions: IntArray | None
    num_computed_tokens: IntArray | None


@dataclass(frozen=True, slots=True)
class Target:
    """A call that puts something out.

    Attributes:
        inputs: its arrays.
        num_reqs_padded: batch rows. None: as many as requests.
        num_tokens_padded: slots of the returned view. None: all.
        out: number of the set of buffers; or the lengths of the caller's own slot arrays.
        has_tables: whether it puts out batch tables.
        has_slots: whether it puts out slots.
        num_reqs: requests, for a gather without `idx_mapping`.
        groups: as the call names them: those whose slots it puts out. None: all.
    """

    inputs: Inputs
    num_reqs_padded: int | None
    num_tokens_padded: int | None
    out: int | list[int] = 0
    has_tables: bool = True
    has_slots: bool = True
    num_reqs: int | None = None
    groups: Any = None

    def slot_groups(self, config: BlockTableConfig) -> list[int]:
        """Return the groups whose slots are put out, in their order."""
        if not self.has_slots:
            return []
        return list(range(len(config.groups))) if self.groups is None else np.atleast_1d(self.groups).tolist()

    def slot_sizes(self, config: BlockTableConfig) -> dict[int, int]:
        """Return the entries of the slot array of each such group."""
        groups = self.slot_groups(config)
        sizes = self.out if isinstance(self.out, list) else [config.max_num_batched_tokens] * len(groups)
        return dict(zip(groups, sizes, strict=True))


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

    Attributes:
        table: the table.
        findings: what was wrong so far.
        host_us: microseconds of host time of each step: row operations, commit, gather and slots.
        bytes_sent: bytes that each step's commit sent.
        slot_digest: of all slots so far, the same for every order of the requests in a batch.
        output_digest: of all outputs so far, bit for bit; empty where nobody asked for it.
    """

    def __init__(self, name: str, backend: Backend, config: BlockTableConfig, device: str | None = None) -> None:
        self.name = name
        self.backend = backend
        self.device = device
        self.findings: Findings = Findings()
        self.host_us: array[float] = array("d")
        self.bytes_sent: array[int] = array("q")
        self.slot_digest = 0
        self.output_digest: bytes = b""
        self._elapsed_ns = 0
        self._bytes_before = 0
        self.table: BlockTable = self._guard("create_block_store", lambda: BlockTable(config, backend, device))
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

    def run(self, name: str, target: Target) -> Outputs:
        """Do one call that puts something out, and fetch it."""
        call, out = self._guard("from_host", lambda: self._prepare(name, target))
        slots, others = self._slots(name, target, out)
        before = self._guard("to_host", lambda: [values.copy() for values in self._fetch(others)])
        result = self._timed(name, call)
        self.host_us.append(self._elapsed_ns / 1000.0)
        self.bytes_sent.append(self.table.num_bytes_sent - self._bytes_before)
        self._elapsed_ns, self._bytes_before = 0, self.table.num_bytes_sent
        tables = () if name == "compute_slot_mappings" else result if name == "gather" else result.block_tables
        has_kept = all(map(np.array_equal, before, self._guard("to_host", lambda: self._fetch(others))))
        return self._guard("to_host", lambda: Outputs(self._fetch(tables), self._fetch(slots), has_kept))

    def _slots(self, name: str, target: Target, out: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the slot arrays that a call writes, and those of its set that it must leave alone (R15)."""
        if name == "gather" or not isinstance(out, StepBuffers):
            return () if name == "gather" else out, ()
        named, arrays = target.slot_groups(self.table.config), out.slot_mappings
        return [arrays[group] for group in named], [slots for group, slots in enumerate(arrays) if group not in named]

    def error_of(self, name: str, values: Sequence[Any], target: Target | None) -> str | None:
        """Do a call that should fail and return the name of its error; None where it does not fail."""
        try:
            if target is None:
                getattr(self.table, name)(*values)
            else:
                self._prepare(name, target)[0]()
        except Exception as error:
            return type(error).__name__
        return None

    def _prepare(self, name: str, target: Target) -> tuple[Callable[[], Any], Any]:
        """Return the call with its inputs on the device, and what it writes: a set, or the caller's own arrays."""
        inputs = target.inputs
        arrays = [inputs.idx_mapping, inputs.query_start_loc, inputs.positions]
        idx_mapping, starts, positions = map(self._to_device, arrays)
        out: Any = target.out if isinstance(target.out, list) else self._sets[target.out]
        if isinstance(out, list):
            dtype = np.dtype(self.table.config.slot_dtype)
            out = [self.backend.from_host(np.full(size, PAD_SLOT_ID, dtype), self.device) for size in out]
        table, rows, tokens = self.table, target.num_reqs_padded, target.num_tokens_padded
        if name == "compute_slot_mappings":
            return (
                lambda: table.compute_slot_mappings(
                    idx_mapping, starts, positions, num_tokens_padded=tokens, groups=target.groups, out=out
                )
            ), out
        computed = self._to_device(inputs.num_computed_tokens)
        if name == "gather":
            return (
                lambda: table.gather(idx_mapping, rows, num_reqs=target.num_reqs, num_computed_tokens=computed, out=out)
            ), out
        return (
            lambda: table.step(
                idx_mapping,
                starts,
                positions,
                num_reqs_padded=rows,
                num_tokens_padded=tokens,
                num_computed_tokens=computed,
                out=out,
            )
        ), out

    def _to_device(self, array: Any) -> Any:
        return self.backend.from_host(array, self.device) if isinstance(array, np.ndarray) else array

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
            step = len(self.host_us) + 1
            raise BlockTableError(f"Backend {self.name!r} failed in {what} at step {step}: {raised}{error}") from error

    # Outputs.

    def compare(self, number: int, expected: ExpectedStep, names: BatchNames, outputs: Outputs) -> None:
        """Compare every entry of a step's outputs."""
        for group, table in enumerate(outputs.block_tables):
            self.findings.add(number, *compare_block_table(expected, group, table, names))
        for group, slots in zip(expected.slot_mappings, outputs.slot_mappings, strict=True):
            self.findings.add(number, *compare_slots(expected, group, slots, names))

    def digest_outputs(self, outputs: Outputs) -> bytes:
        """Return the digest of one step's outputs, and add it to that of all."""
        digest = output_digest((*outputs.block_tables, *outputs.slot_mappings))
        self.output_digest = chain_digests(self.output_digest, digest)
        return digest
