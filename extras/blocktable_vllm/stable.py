"""What the tables of the V2 runner share: rows that stay where they are, their copy on the device, and the outputs."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from blocktable import ArgumentError, BlockTableConfig, StepBuffers
from blocktable.backend import Batch
from blocktable.host_path import HostPath, make_rows
from blocktable.typing import IntArray
from blocktable_vllm.memory import as_tensor, choose_backend, current_stream, stream_index

MAX_FORMS = 1024
"""Forms of calls, and views, that are kept, the oldest goes; an engine that pads uses a few dozen."""


class StableRows:
    """The rows of all groups on the host and on the device, one set of outputs, and one launch for each call.

    A commit may wait for the gather that follows it, and is launched with it: where that pair has been seen before, and
    no other code was given the device's rows. Whatever else comes first launches the commit alone.

    Args:
        config: the geometry.
        backend: name of the backend. None: the device's default.
        device: torch.device.

    Attributes:
        config: as given.
        tables: [max_num_reqs, width] int32, torch, one a group. The device's rows; addresses never change.
        counts: [num_groups, max_num_reqs] int32, torch, on the device.
        batch_tables: [max_num_reqs, width] int32, torch, one a group.
        slots: [num_groups, max_num_batched_tokens] int64, torch.
        is_waiting: whether a commit waits for a gather.
        num_bytes_sent: bytes of all commits so far.
    """

    def __init__(self, config: BlockTableConfig, backend: str | None, device: Any) -> None:
        self.config = config
        self._device = device
        self._backend: Any = choose_backend(backend, device)
        self._rows: HostPath = make_rows(config)
        place, groups = None if device.type == "cpu" else device, range(len(config.groups))
        with torch.inference_mode(False):  # otherwise the tensors could not be written in another mode
            self._store: Any = self._backend.create_block_store(config, place)
            self._mapper: Any = self._backend.create_slot_mapper(self._store)
            self._buffers: StepBuffers = self._store.create_buffers()
            self.tables: list[Any] = [as_tensor(self._store.table(group), device) for group in groups]
            self.counts: Any = as_tensor(self._store.table(-1), device)
            self.batch_tables: list[Any] = [as_tensor(array, device) for array in self._buffers.block_tables]
            self.slots: Any = _one_tensor([as_tensor(array, device) for array in self._buffers.slot_mappings])
            self.slots.zero_()  # as in vLLM
        self._stream_index = stream_index(self.tables[0])
        self._lender: Any = self._store if hasattr(self._store, "lend") else None
        self._prepares = hasattr(self._store, "prepare_step") and "fused_step" in self._backend.capabilities
        # Addresses that an emulated device does not know are asked for again by the store.
        self._gives_addresses = self._stream_index is not None
        self.is_waiting = False
        self.num_bytes_sent: int = 0
        self._may_wait = self._prepares
        self._is_pair = False  # whether a gather has followed a commit
        self._is_first = False  # whether nothing has followed the last one
        self._is_invalid = False
        self._forms: dict[Any, Any] = {}
        self._views: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._other: tuple[StepBuffers, list[Any]] | None = None  # for gathers into other tables

    # Rows, on the host.

    @property
    def filled(self) -> IntArray:
        """[num_groups, max_num_reqs] int32. Columns of each row, read-only."""
        filled = self._rows.filled.view()
        filled.flags.writeable = False
        return filled

    def append(self, row: int, block_ids: Any, *, replaces: bool) -> None:
        """Add blocks after what a row holds, or put them in its place; for the device nothing changes.

        Args:
            row: the row.
            block_ids: one sequence of ints for each group.
            replaces: whether the row is emptied before.
        """
        if self.is_waiting:
            self._commit_now()
        if replaces:
            self._rows.set_row(row, block_ids)
        else:
            self._rows.append_row(row, block_ids)

    def invalidate(self) -> None:
        """Trust nothing on the device any more (R24)."""
        self.is_waiting = False
        self._is_invalid = True
        self._rows.invalidate()

    # Commits.

    def commit(self) -> None:
        """Make every row change so far visible to kernels, now or with the gather that follows."""
        if self.is_waiting or not self._rows.journal.size:
            return
        if self._may_wait and self._is_pair and not self._is_invalid:
            self.is_waiting = True
        else:
            self._commit_now()
            self._is_first = True

    def _commit_now(self) -> None:
        self.is_waiting = self._is_pair = False
        stream = self.stream
        if self._is_invalid:
            for buffers in (self._buffers, *(self._other or ())[:1]):
                self._store.reset_buffers(buffers, stream=stream)
        if self._lender is None:
            self._store.write(self._rows.writes(), stream=stream)
        else:
            used = self._pack(self._lender.lend(stream), stream)
            self._lender.commit(used, stream=stream)
        self.num_bytes_sent += self._rows.committed()
        self._is_invalid = False

    def _pack(self, block: IntArray, stream: int | None) -> int:
        """Pack what is pending into lent memory; return the entries used, 0 where it was too much and is sent."""
        used = self._rows.pack_changes(block)
        if used < 0:
            self._store.write(self._rows.writes(), stream=stream)
            return 0
        return used

    def show_tables(self) -> None:
        """Other code is given the device's rows: from now on no commit waits."""
        self._may_wait = False
        if self.is_waiting:
            self._commit_now()

    # Calls of the device.

    @property
    def stream(self) -> int | None:
        """Handle of torch's current stream; None on the CPU."""
        return current_stream(self._stream_index)

    def gather(self, idx_mapping: Any, num_reqs_padded: int, num_computed_tokens: Any) -> None:
        """Write the batch tables: R10, R11 of the core's contract.

        Args:
            idx_mapping: [num_reqs] integers, torch, on the device. Batch index -> row.
            num_reqs_padded: batch rows, at most `max_num_reqs`.
            num_computed_tokens: [num_reqs] int32, torch, on the device. None: nothing is cut.
        """
        rows = self._vector("idx_mapping", idx_mapping, torch.int32)
        num_reqs = self._num_reqs(rows, num_reqs_padded)
        self._is_pair, self._is_first = self._is_pair or self._is_first, False
        if num_computed_tokens is not None:
            num_computed_tokens = self._vector("num_computed_tokens", num_computed_tokens, torch.int32)
        arrays = rows, num_computed_tokens, None, None
        key = num_reqs, num_reqs_padded, num_computed_tokens is None
        if not self._prepares:
            if self.is_waiting:
                self._commit_now()
            batch = Batch(rows, None, None, num_reqs, num_reqs_padded, num_computed_tokens)
            self._store.gather(batch, self._buffers, stream=self.stream)
            return
        computed = None if num_computed_tokens is None else self._address(num_computed_tokens)
        addresses = self._address(rows), computed, None, None
        prepared = self._forms.get(key)
        if prepared is None:
            batch = Batch(rows, None, None, num_reqs, num_reqs_padded, num_computed_tokens)
            prepared = _keep(self._forms, key, self._store.prepare_step(batch, self._buffers, addresses, "tables"))
        stream, used = self.stream, 0
        if self.is_waiting:
            used = self._pack(self._lender.lend(stream), stream)
        self._store.run_step(used, prepared, addresses, arrays, stream=stream)
        if self.is_waiting:
            self.is_waiting = False
            self.num_bytes_sent += self._rows.committed()

    def gather_elsewhere(self, idx_mapping: Any, num_reqs_padded: int, num_computed_tokens: Any, out: Any) -> None:
        """Write batch tables into other tensors, whole rows.

        Args:
            idx_mapping, num_reqs_padded, num_computed_tokens: as `gather`; `out` may have room for a larger batch.
            out: [>= num_reqs_padded, width] int32, torch, one a group.
        """
        if self.is_waiting:
            self._commit_now()
        self._is_first = False
        rows = self._vector("idx_mapping", idx_mapping, torch.int32)
        if self._other is None:
            with torch.inference_mode(False):
                buffers = self._store.create_buffers()
                self._other = buffers, [as_tensor(array, self._device) for array in buffers.block_tables]
        buffers, tables = self._other
        most = self.config.max_num_reqs
        for first in range(0, num_reqs_padded, most):  # a batch of ranks that share prefills may be a larger one
            some, size = rows[first : first + most], min(most, num_reqs_padded - first)
            computed = num_computed_tokens
            if computed is not None:
                computed = self._vector("num_computed_tokens", computed[first : first + most], torch.int32)
            batch = Batch(some, None, None, some.shape[0], size, computed)
            self._store.gather(batch, buffers, stream=self.stream)
            targets = [table[first : first + size] for table in out]
            torch._foreach_copy_(targets, [table[:size] for table in tables])

    def map_slots(self, idx_mapping: Any, query_start_loc: Any, positions: Any, out: Any) -> None:
        """Write the slots of a batch of as many requests as `idx_mapping` has entries, PAD to the end.

        Args:
            idx_mapping: [num_reqs] integers, torch, on the device.
            query_start_loc: [>= num_reqs + 1] integers, likewise.
            positions: [>= num_tokens] integers, likewise.
            out: [num_groups, entries] int64, torch, on the device. None: `slots`.
        """
        if self.is_waiting:
            self._commit_now()
        self._is_first = False
        rows = self._vector("idx_mapping", idx_mapping, torch.int32)
        starts = self._vector("query_start_loc", query_start_loc, torch.int32)
        tokens = self._vector("positions", positions, torch.int64)
        num_reqs, num_tokens = rows.shape[0], tokens.shape[0]
        if starts.shape[0] <= num_reqs:
            raise ArgumentError(f"query_start_loc holds {starts.shape[0]} entries; {num_reqs} requests need one more.")
        if not self._prepares or out is not None:
            batch = Batch(rows, starts[: num_reqs + 1], tokens, num_reqs, num_reqs, None, num_tokens)
            arrays = self.slots if out is None else out
            self._mapper.compute_slot_mappings(batch, self._slot_arrays(arrays), stream=self.stream)
            return
        addresses = self._address(rows), None, self._address(starts), self._address(tokens)
        key = num_reqs, num_tokens
        prepared = self._forms.get(key)
        if prepared is None:
            batch = Batch(rows, starts, tokens, num_reqs, num_reqs, None, num_tokens)
            prepared = _keep(self._forms, key, self._store.prepare_step(batch, self._buffers, addresses, "slots"))
        self._store.run_step(0, prepared, addresses, (rows, None, starts, tokens), stream=self.stream)

    def batch_rows(self, start: int, stop: int) -> tuple[Any, ...]:
        """Return rows of the batch tables, the same views for the same rows: making them takes 1 us a group."""
        found = self._views.get((start, stop))
        if found is None:
            with torch.inference_mode(False):
                found = tuple([table[start:stop] for table in self.batch_tables])
            found = _keep(self._views, (start, stop), found)
        return found

    def _slot_arrays(self, slots: Any) -> list[Any]:
        if self._stream_index is None and not getattr(self._backend, "is_emulated", False):
            return list(slots.numpy())
        return list(slots.unbind(0))

    def _address(self, array: Any) -> int | None:
        return array.data_ptr() if self._gives_addresses else None

    def _num_reqs(self, rows: Any, num_reqs_padded: int) -> int:
        num_reqs: int = rows.shape[0]
        if not num_reqs <= num_reqs_padded <= self.config.max_num_reqs:
            raise ArgumentError(
                f"num_reqs_padded {num_reqs_padded} must be at least the {num_reqs} requests of the batch and at most "
                f"max_num_reqs {self.config.max_num_reqs}."
            )
        return num_reqs

    def _vector(self, name: str, array: Any, dtype: Any) -> Any:
        """Return a tensor as kernels take it: of this dtype, and contiguous."""
        if array.is_cuda is not (self._stream_index is not None):
            raise ArgumentError(f"{name} is on {array.device}, but the table is on {self._device}; move it there.")
        if array.dtype is not dtype:
            array = array.to(dtype)
        return array if array.is_contiguous() else array.contiguous()


def _keep(kept: dict[Any, Any], key: Any, value: Any) -> Any:
    if len(kept) >= MAX_FORMS:
        del kept[next(iter(kept))]
    kept[key] = value
    return value


def _one_tensor(slots: list[Any]) -> Any:
    """Return [num_groups, entries] over tensors [entries] that lie one after another in one memory.

    Raises:
        ArgumentError: they do not.
    """
    first, size = slots[0], slots[0].shape[0]
    starts = [tensor.data_ptr() for tensor in slots]
    if starts != [starts[0] + 8 * size * group for group in range(len(slots))]:
        raise ArgumentError("The backend's slot mappings do not lie one after another, as vLLM's do; take another one.")
    if first.untyped_storage().nbytes() >= 8 * (first.storage_offset() + math.prod((len(slots), size))):
        return first.as_strided((len(slots), size), (size, 1))
    return _over_memory(first, len(slots), size)


def _over_memory(first: Any, rows: int, size: int) -> Any:
    """Return a tensor over memory of which `first` shows the first row alone."""
    # The tensor keeps what says where it is, and that keeps the memory's owner.
    interface = {"shape": (rows, size), "typestr": "<i8", "data": (first.data_ptr(), False), "version": 3}
    if first.is_cuda:
        memory = SimpleNamespace(__cuda_array_interface__=interface, owner=first)
        return torch.as_tensor(memory, device=first.device)
    return torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=interface, owner=first)))
