"""Both sides of the comparison for the V2 runner: every call goes to vLLM's `BlockTables` and to the drop-in's."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from blocktable import PAD_SLOT_ID, BlockTableError, RowCapacityError
from blocktable.typing import IntArray
from blocktable_conformance.vllm_fuzz.pair import Different
from blocktable_conformance.vllm_fuzz.stable_histories import Call, Geometry, Look
from blocktable_vllm import drop_in_v2


@cache
def import_tables(*, is_interpreted: bool) -> Any:
    """Return vLLM's module of block tables, for the CPU with what is missing there.

    Those are buffers that a GPU sees too; and masks of type bool: the interpreter of triton 3.9 makes int32 of a scalar
    and a block together.
    """
    import vllm.v1.worker.gpu.block_table as module
    import vllm.v1.worker.gpu.buffer_utils as buffers

    if is_interpreted:
        module_buffers: Any = buffers
        module_buffers.UvaBuffer = HostBuffer
        module_buffers.is_uva_available = lambda: True
        from triton.runtime.interpreter import InterpreterBuilder

        for name in ("create_masked_load", "create_masked_store"):
            setattr(InterpreterBuilder, name, _with_bool_mask(getattr(InterpreterBuilder, name)))
    return module


def _with_bool_mask(method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        mask = signature.bind(*args, **kwargs).arguments["mask"]
        mask.data = mask.data.astype(bool)
        return method(*args, **kwargs)

    return call


class HostBuffer:
    """Stands for vLLM's `UvaBuffer` where there is no GPU: host and device share memory anyway."""

    def __init__(self, size: Any, dtype: Any) -> None:
        self.cpu: Any = torch.zeros(size, dtype=dtype)
        self.np: Any = self.cpu.numpy()
        self.uva: Any = HostView(self.cpu)


class HostView:
    """The device's view of such a buffer: sliced in vLLM 0.25.1, called since."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def __getitem__(self, entries: slice) -> Any:
        return self._memory[entries]

    def __call__(self, n: int | None = None) -> Any:
        """Return the first n entries; None: all."""
        return self._memory[:n]


class StablePair:
    """Tables of one geometry on both sides.

    Args:
        geometry: theirs.
        profile, backend: of the drop-in.
        device: torch.device of both sides.
        met: name of a difference -> how often it was met; added to.

    Raises:
        ConfigError: the drop-in refuses the geometry; vLLM has taken it.
    """

    def __init__(self, geometry: Geometry, profile: str, backend: str, device: Any, met: Counter[str]) -> None:
        module = import_tables(is_interpreted=device.type == "cpu")
        self.geometry, self.profile, self.device, self.met = geometry, profile, device, met
        arguments = self._arguments()
        self.theirs: Any = module.BlockTables(**arguments)
        self.ours: Any = drop_in_v2(profile, backend)(**arguments)
        self.widths = [table.shape[1] for table in self.theirs.input_block_tables]
        self.counts: IntArray = np.zeros((geometry.num_groups, geometry.max_num_reqs), np.int64)
        self.committed = self.counts.copy()
        # What our batch tables must hold, and how many columns of each row a gather has written.
        self.expected = [np.zeros((geometry.max_num_reqs, width), np.int32) for width in self.widths]
        self.held = np.zeros_like(self.counts)
        self.num_staged = 0
        self.foreign = 0  # batch rows that the runner may have written to
        self.is_dummy = False  # whether since they were handed out for that
        self.slots: IntArray = np.zeros((geometry.num_groups, geometry.max_num_batched_tokens), np.int64)
        self.addresses = self._addresses()
        self.compare()

    def _arguments(self) -> dict[str, Any]:
        geometry = self.geometry
        arguments: dict[str, Any] = {
            "block_sizes": list(geometry.block_sizes),
            "max_num_reqs": geometry.max_num_reqs,
            "max_num_batched_tokens": geometry.max_num_batched_tokens,
            "max_num_blocks_per_group": list(geometry.max_num_blocks),
            "device": self.device,
            "cp_size": geometry.cp_size,
            "cp_rank": geometry.cp_rank,
            "cp_interleave": geometry.interleave_size,
        }
        if self.profile == "0.25.1":
            return {**arguments, "kernel_block_sizes": list(geometry.kernel_block_sizes)}
        arguments["slot_mapping_enabled"] = list(geometry.has_slots)
        arguments["dcp_sharded"] = list(geometry.is_sharded)
        if self.profile == "0.33.0":
            arguments["sliding_window_reach"] = list(geometry.reach)
        return arguments

    def _addresses(self) -> list[int]:
        tensors = (*self.ours.input_block_tables, self.ours.slot_mappings, *self.ours.__rows__.tables)
        return [tensor.data_ptr() for tensor in tensors]

    def look(self) -> Look:
        """Return what the generator of calls wants to know."""
        return Look(self.geometry, self.profile, self.widths, self.committed.tolist(), self.counts.tolist())

    def do(self, call: Call) -> None:
        """Make a call on both sides and compare.

        Raises:
            Different: they differ.
        """
        name, *arguments = call
        made: Callable[..., None] = getattr(self, f"_do_{name}")
        made(*arguments)
        self.compare()

    # Calls.

    def _do_append(self, row: int, block_ids: Any, overwrite: bool) -> None:
        geometry = self.geometry
        fault = self._fault(row, block_ids, overwrite)
        if fault is None:
            if self.profile == "0.25.1" and self.num_staged == geometry.max_num_reqs:
                self._do_apply()  # it has no room for more writes
            self.num_staged += 1
            self.theirs.append_block_ids(row, tuple(map(list, block_ids)), overwrite)
            self.ours.append_block_ids(row, tuple(map(list, block_ids)), overwrite)
            added = [len(ids) * k for ids, k in zip(block_ids, geometry.expansions, strict=True)]
            self.counts[:, row] = np.array(added) + (0 if overwrite else self.counts[:, row])
            return
        self.met[fault] += 1
        try:
            self.ours.append_block_ids(row, block_ids, overwrite)
        except BlockTableError as error:
            if isinstance(error, RowCapacityError) and not isinstance(error, RuntimeError):
                raise Different("A full row is no RuntimeError.") from error
        else:
            raise Different(f"{fault}: ours took it.")

    def _fault(self, row: int, block_ids: Any, overwrite: bool) -> str | None:
        """Return the name of the difference that an append meets, None for one that vLLM defines."""
        if not 0 <= row < self.geometry.max_num_reqs:
            return "row_outside"
        is_redirected = self.ours.redirect_writes_to_null_block
        for ids, k in zip(block_ids, self.geometry.expansions, strict=True):
            if not is_redirected and any(type(each) is not int or not 0 <= each < 2**31 // k for each in ids):
                return "impossible_id"
        for group, (ids, k) in enumerate(zip(block_ids, self.geometry.expansions, strict=True)):
            used = 0 if overwrite else int(self.counts[group, row])
            if used + len(ids) * k > self.widths[group]:
                return "overflow"
        return None

    def _do_apply(self) -> None:
        for tables in (self.theirs, self.ours):
            tables.apply_staged_writes()
        self.committed = self.counts.copy()
        self.num_staged = 0

    def _do_gather(self, idx_mapping: list[int], padded: int, computed: list[int] | None, elsewhere: bool) -> None:
        rows = np.array(idx_mapping, np.int32)
        if (rows < 0).any():
            self.met["dummy_gathered"] += 1  # vLLM reads before its tables
        given: dict[str, Any] = {}
        if computed is not None and self.profile == "0.33.0":
            given["num_computed_tokens"] = self._on_device(computed, torch.int32)
        theirs, ours = self._given(elsewhere, padded), self._given(elsewhere, padded)
        on_device = [self._on_device(values, torch.int32) for values in (np.maximum(rows, 0), rows)]
        found = self.theirs.gather_block_tables(on_device[0], padded, **given, **theirs)
        returned = self.ours.gather_block_tables(on_device[1], padded, **given, **ours)
        _require(len(returned) == len(found), "gather returns as many tables")
        end = padded
        if not elsewhere:
            end = max(padded, self.foreign)
            if self.is_dummy:
                for expected in self.expected:
                    expected[:end] = 0
            self.foreign, self.is_dummy = len(rows), False
        for group in range(self.geometry.num_groups):
            want = found[group].cpu().numpy().copy()
            for index, row in enumerate(rows):
                count = self.committed[group, row] if row >= 0 else 0
                if want[index, count:].any():
                    self.met["batch_tail"] += 1
                want[index, count:] = 0
                if not elsewhere:
                    expected = self.expected[group][index]
                    expected[:count] = want[index, :count]
                    expected[count : self.held[group, index]] = 0
                    self.held[group, index] = count
            got = returned[group].cpu().numpy()
            _require(got.shape == want.shape, "the shape of a batch table")
            if elsewhere:
                _require(np.array_equal(got, want), f"group {group}, a gather into other tables: {got}, not {want}")
                continue
            self.expected[group][len(rows) : end] = 0
            for index in range(end, self.geometry.max_num_reqs):
                self.expected[group][index, : self.held[group, index]] = 0
            self.held[group, len(rows) :] = 0
            place = self.ours.input_block_tables[group].data_ptr()
            _require(not padded or returned[group].data_ptr() == place, "where a batch table is")
            for index in range(len(rows), padded):
                _require(not want[index].any(), "vLLM's padding")

    def _given(self, elsewhere: bool, padded: int) -> dict[str, Any]:
        """Return tables of the caller's own for a gather."""
        if not elsewhere:
            return {}
        out = tuple(torch.full((padded + 1, width), 9, dtype=torch.int32, device=self.device) for width in self.widths)
        return {"out": out, "out_ptrs": self.theirs._make_ptr_tensor(out)}

    def _do_slots(
        self, idx_mapping: list[int], starts: list[int], positions: list[int], padded: int, elsewhere: int
    ) -> None:
        rows = np.array(idx_mapping, np.int32)
        num_reqs, end = len(rows), min(starts[len(rows)], len(positions))
        wanted, defined = self._defined(rows, starts, positions)  # lists: group -> token -> slot or None; positions
        size = self.geometry.max_num_batched_tokens + elsewhere
        groups = self.geometry.num_groups
        outs = [torch.full((groups, size), 7, dtype=torch.int64, device=self.device) for _ in range(2)]
        given = [{"out": out} if elsewhere else {} for out in outs]
        their_rows = np.maximum(rows, 0) if self.profile == "0.25.1" else rows
        if self.profile == "0.25.1" and (rows < 0).any():
            self.met["dummy_mapped"] += 1
        theirs = self.theirs.compute_slot_mappings(
            self._on_device(their_rows, torch.int32),
            self._on_device(starts, torch.int32),
            self._on_device(defined, torch.int64),
            padded,
            **given[0],
        )
        arrays = (
            self._on_device(values, dtype)
            for values, dtype in ((rows, torch.int32), (starts, torch.int32), (positions, torch.int64))
        )
        ours = self.ours.compute_slot_mappings(*arrays, padded, **given[1])
        _require(tuple(ours.shape) == tuple(theirs.shape) == (groups, padded), "the shape of slots")
        memory = outs[0] if elsewhere else self.theirs.slot_mappings
        want = memory.cpu().numpy().copy()
        if starts[0]:
            self.met["stale_gap"] += 1
            want[:, : starts[0]] = PAD_SLOT_ID
        request = np.searchsorted(np.array(starts[: num_reqs + 1]), np.arange(end), side="right") - 1
        for group in range(groups):
            for token in range(starts[0], end):
                slot = wanted[group][token]
                if slot is None and rows[request[token]] >= 0 and want[group, token] != PAD_SLOT_ID:
                    self.met["unbounded_column"] += 1
                if slot is None or defined[token] != positions[token]:
                    want[group, token] = PAD_SLOT_ID if slot is None else slot
        got = (outs[1] if elsewhere else self.ours.slot_mappings).cpu().numpy()
        _require(np.array_equal(got, want), f"slots: {got}, not {want}")
        if not elsewhere:
            self.slots = want
            self.theirs.slot_mappings.copy_(torch.from_numpy(want))

    def _defined(
        self, rows: IntArray, starts: list[int], positions: list[int]
    ) -> tuple[list[list[int | None]], list[int]]:
        """Return each token's slot in each group, None without one, and positions that vLLM may be given.

        Those are 0 where a group's row is too short for the position: vLLM would read another row, or another memory.
        """
        geometry = self.geometry
        wanted: list[list[int | None]] = [[None] * len(positions) for _ in range(geometry.num_groups)]
        defined = list(positions)
        world = geometry.cp_size
        tables = [table.gpu.cpu().numpy() for table in self.theirs.block_tables]
        for index, row in enumerate(rows.tolist()):
            for token in range(starts[index], min(starts[index + 1], len(positions))):
                position = positions[token]
                for group in range(geometry.num_groups):
                    local, size, is_own = position, geometry.kernel_block_sizes[group], True
                    if world > 1 and geometry.shares(group):
                        turn = position // geometry.interleave_size
                        is_own = turn % world == geometry.cp_rank
                        local = turn // world * geometry.interleave_size + position % geometry.interleave_size
                    column = local // size
                    if position < 0 or column >= self.widths[group]:
                        self.met["negative_position" if position < 0 else "column_beyond_row"] += 1
                        defined[token] = 0
                    if position >= 0 and row >= 0 and column < self.committed[group, row]:
                        slot = int(tables[group][row, column]) * size + local % size
                        wanted[group][token] = slot if is_own and geometry.has_slots[group] else PAD_SLOT_ID
        return wanted, defined

    def _do_dummy_tables(self, number: int) -> None:
        theirs, ours = (tables.get_dummy_block_tables(number) for tables in (self.theirs, self.ours))
        end = max(number, self.foreign)
        self.foreign, self.is_dummy = number, True
        for group, (their, our) in enumerate(zip(theirs, ours, strict=True)):
            is_null = not their.any()
            _require((is_null or self.profile == "0.25.1") and not our.any(), "dummy tables are NULL")
            self.met["dummy_not_cleared"] += not is_null
            _require(our.shape == their.shape, "the shape of a dummy table")
            self.expected[group][:end] = 0

    def _do_dummy_slots(self, number: int) -> None:
        theirs, ours = (tables.get_dummy_slot_mappings(number) for tables in (self.theirs, self.ours))
        _require(theirs.shape == ours.shape, "the shape of dummy slots")
        self.slots[:] = PAD_SLOT_ID

    def _do_write_tables(self, group: int, row: int, column: int, values: list[int]) -> None:
        """Other code writes to the batch tables: the dummy context, a Mamba kernel."""
        written = torch.tensor(values, dtype=torch.int32, device=self.device)
        for tables in (self.theirs, self.ours):
            tables.input_block_tables[group][row, column : column + len(values)] = written
        self.expected[group][row, column : column + len(values)] = values

    def _do_write_slots(self, group: int, first: int, values: list[int]) -> None:
        written = torch.tensor(values, dtype=torch.int64, device=self.device)
        for tables in (self.theirs, self.ours):
            tables.slot_mappings[group, first : first + len(values)] = written
        self.slots[group, first : first + len(values)] = values

    def _do_redirect(self, is_on: bool) -> None:
        for tables in (self.theirs, self.ours):
            tables.redirect_writes_to_null_block = is_on and self.profile != "0.25.1"

    def _do_read_rows(self) -> None:
        """Other code asks for the device's rows: from now on they are read whenever a commit is done."""
        self._compare_rows(self.ours.block_tables)

    def _do_layout(self) -> None:
        """The memory was mapped again: all rows are sent, and the outputs are NULL and PAD until they are made."""
        for tables in (self.theirs, self.ours):
            tables.init_block_table_layout_tensors()
        self._do_apply()
        for theirs, expected in zip(self.theirs.input_block_tables, self.expected, strict=True):
            theirs.zero_()
            expected[:] = 0
        self.held[:] = 0
        self._do_dummy_slots(0)

    def _do_attributes(self) -> None:
        names = (
            *("block_sizes", "max_num_reqs", "max_num_batched_tokens", "cp_size", "cp_rank", "cp_interleave"),
            *("num_kv_cache_groups", "redirect_writes_to_null_block", "kernel_block_sizes", "blocks_per_kv_block"),
            "has_sliding_window_groups",
        )
        for name in names:
            if hasattr(self.theirs, name):
                _require(getattr(self.theirs, name) == getattr(self.ours, name), f"attribute {name}")
        for name in ("block_table_strides", "block_sizes_tensor", "dcp_sharded", "slot_mapping_enabled"):
            if hasattr(self.theirs, name):
                _require(torch.equal(getattr(self.theirs, name), getattr(self.ours, name)), f"attribute {name}")
        for name, tables in (("block_table_ptrs", self.ours.__rows__.tables),):
            pointers = getattr(self.ours, name).cpu().numpy().tolist()
            _require(pointers == [table.data_ptr() for table in tables], f"attribute {name}")

    # Comparing.

    def _on_device(self, values: Any, dtype: Any) -> Any:
        return torch.as_tensor(np.array(values), dtype=dtype).to(self.device)

    def compare(self) -> None:
        """Compare all that is visible.

        Raises:
            Different: something differs.
        """
        _require(np.array_equal(self.theirs.num_blocks.np, self.counts), "vLLM's counts")
        _require(np.array_equal(self.ours.num_blocks.np, self.counts), f"counts: {self.ours.num_blocks.np}")
        _require(self._addresses() == self.addresses, "addresses")
        if not self.ours.__rows__.is_waiting:
            self._compare_rows(None)
        for group, expected in enumerate(self.expected):
            ours = self.ours.input_block_tables[group].cpu().numpy()
            _require(np.array_equal(ours, expected), f"batch table {group}: {ours}, not {expected}")
        slots = self.ours.slot_mappings.cpu().numpy()
        _require(np.array_equal(slots, self.slots), f"slot_mappings: {slots}, not {self.slots}")

    def _compare_rows(self, shown: Any) -> None:
        """Compare the device's rows. shown: `block_tables` of ours; None: without asking for them."""
        for group, table in enumerate(self.theirs.block_tables):
            theirs = table.gpu.cpu().numpy()
            ours = (self.ours.__rows__.tables[group] if shown is None else shown[group].gpu).cpu().numpy()
            is_held = np.arange(theirs.shape[1]) < self.committed[group][:, None]
            self.met["row_tail"] += bool((theirs * ~is_held).any())
            want = np.where(is_held, theirs, 0)
            _require(np.array_equal(ours, want), f"rows of group {group}: {ours}, not {want}")


def _require(is_right: Any, what: str) -> None:
    if not is_right:
        raise Different(f"Different: {what}")
