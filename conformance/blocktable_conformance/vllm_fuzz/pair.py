"""Both sides of the comparison: every call goes to vLLM's tables and to the drop-in's, and everything is compared."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from blocktable import PAD_SLOT_ID, ConfigError, DtypeError, RowCapacityError
from blocktable_conformance.vllm_fuzz.histories import MULTI, Call, Geometry, Look
from blocktable_vllm import drop_in, home

SLACK = 4096
"""Entries before and after vLLM's table on the device, and after its slots: it reads and writes there."""

MARK = -77
"""What lies after vLLM's slots."""


class Different(AssertionError):
    """The two sides differ, and no named difference explains it."""


class Pair:
    """Tables of one geometry on both sides.

    Args:
        geometry: theirs.
        profile, mode, backend, clean_tails: of the drop-in.
        device: torch.device of both sides.
        met: name of a difference -> how often it was met; added to.

    Raises:
        ConfigError: the drop-in refuses the geometry; vLLM has taken it.
    """

    def __init__(
        self,
        geometry: Geometry,
        profile: str,
        mode: str,
        backend: str,
        device: Any,
        met: Counter[str],
        *,
        clean_tails: bool = False,
    ) -> None:
        import vllm.distributed
        import vllm.v1.worker.block_table as module

        self.geometry, self.profile, self.mode, self.device, self.met = geometry, profile, mode, device, met
        self.is_fast = mode == "fast"
        self.cleans = clean_tails
        self.module: Any = module
        shares = (None, None) if geometry.assigns else (geometry.pcp, geometry.dcp)
        distributed: Any = vllm.distributed
        distributed.PCP, distributed.DCP = (None if share is None else distributed.Group(*share) for share in shares)
        classes = drop_in(profile, mode, backend, clean_tails)
        self.theirs = self._make(module, module.SlotMappingMode if profile == "0.33.0" else None)
        self.ours = self._make(classes, home.SlotMappingMode)
        self.their_tables = list(self.theirs.block_tables) if geometry.is_multi else [self.theirs]
        self.our_tables = list(self.ours.block_tables) if geometry.is_multi else [self.ours]
        self.state: Any = self.our_tables[0].__blocktable__[0]
        if geometry.assigns:
            for table in (*self.their_tables, *self.our_tables):
                for name, share in (("pcp", geometry.pcp), ("dcp", geometry.dcp)):
                    if share is not None:
                        setattr(table, f"{name}_world_size", share[0])
                        setattr(table, f"{name}_rank", share[1])
        self.slot_memory: list[Any] = []
        for table in self.their_tables:
            self._give_slack(table)
        self.widths = [int(table.block_table.np.shape[1]) for table in self.their_tables]
        rows = geometry.max_num_reqs
        # Columns of each row that may give slots: as of the last commit of the row.
        self.bounds = [np.zeros(rows, np.int64) for _ in self.widths]
        self.last_commit = 0
        self.held: list[tuple[Any, Any]] = []
        self.saved: list[list[tuple[Any, Any]]] = [[], []]
        # Entries of the device's rows that other code has written to, and what.
        self.overwritten: list[list[tuple[int, int, int]]] = [[] for _ in self.widths]
        self.addresses = [table.block_table.gpu.data_ptr() for table in self.our_tables]
        self.compare()

    def _make(self, classes: Any, modes: Any) -> Any:
        geometry = self.geometry
        shared: dict[str, Any] = {
            "max_num_reqs": geometry.max_num_reqs,
            "max_num_batched_tokens": geometry.max_num_batched_tokens,
            "pin_memory": self.device.type == "cuda",
            "device": self.device,
            "cp_kv_cache_interleave_size": geometry.interleave_size,
        }
        old = self.profile == "0.25.1"
        slot_modes = [] if old else [modes.TOKEN_TO_KV_SLOT if has else modes.NONE for has in geometry.has_slots]
        if geometry.is_multi:
            own: dict[str, Any] = {"slot_mapping_modes": slot_modes}
            if old:
                own = {"max_model_len": 1, "kernel_block_sizes": list(geometry.kernel_block_sizes)}
            return classes.MultiGroupBlockTable(
                block_sizes=list(geometry.block_sizes), max_num_blocks=list(geometry.max_num_blocks), **own, **shared
            )
        own = {"kernel_block_size": geometry.kernel_block_sizes[0]} if old else {"slot_mapping_mode": slot_modes[0]}
        return classes.BlockTable(
            block_size=geometry.block_sizes[0], max_num_blocks_per_req=geometry.max_num_blocks[0], **own, **shared
        )

    def _give_slack(self, table: Any) -> None:
        """Put vLLM's device arrays into larger ones, so that what it reads and writes outside them is harmless."""
        rows = table.block_table.gpu
        memory = torch.zeros(2 * SLACK + rows.numel(), dtype=rows.dtype, device=rows.device)
        table.block_table.gpu = memory[SLACK : SLACK + rows.numel()].view(rows.shape)
        size = table.slot_mapping.gpu.shape[0]
        slots = torch.full((size + SLACK,), MARK, dtype=torch.int64, device=rows.device)
        slots[:size] = 0
        table.slot_mapping.gpu = slots[:size]
        self.slot_memory.append(slots)

    def look(self) -> Look:
        """Return what the generator of calls wants to know."""
        counts = [table.num_blocks_per_row.tolist() for table in self.their_tables]
        return Look(self.geometry, self.widths, counts, self.last_commit, self.cleans)

    # Calls.

    def do(self, call: Call) -> None:
        """Make a call on both sides and compare.

        Raises:
            Different: they differ.
        """
        name, target, *arguments = call
        special: Callable[..., None] | None = getattr(self, f"_do_{name}", None)
        if special is not None:
            special(target, *arguments)
        else:
            self._on_both(name, target, *arguments)
        self.compare()

    def _side(self, target: int) -> tuple[Any, Any]:
        if target == MULTI:
            return self.theirs, self.ours
        return self.their_tables[target], self.our_tables[target]

    def _groups(self, target: int) -> list[int]:
        return list(range(len(self.widths))) if target == MULTI else [target]

    def _on_both(self, name: str, target: int, *arguments: Any) -> None:
        theirs, ours = self._side(target)
        before = self._their_rows()
        their_error, our_error = (_outcome(getattr(side, name), arguments) for side in (theirs, ours))
        if self.is_fast and self.state.has_own_rows and our_error is not None:
            self._explain_refusal(name, their_error, our_error, before)
        elif type(their_error) is not type(our_error):
            raise Different(f"vLLM: {their_error!r}; ours: {our_error!r}")

    def _explain_refusal(self, name: str, their_error: Any, our_error: Any, before: list[Any]) -> None:
        """Ours raised and must have changed nothing; take back what vLLM did."""
        if isinstance(our_error, DtypeError):
            self.met["row_no_integer"] += 1
        elif their_error is None:
            if not isinstance(our_error, RowCapacityError):
                raise Different(f"vLLM raises nothing; ours: {our_error!r}")
            self._require_lost_ids(before)
            self.met["lost_id"] += 1
        else:
            if not isinstance(our_error, type(their_error)):
                if not isinstance(our_error, RowCapacityError):
                    raise Different(f"vLLM: {their_error!r}; ours: {our_error!r}")
                self._require_lost_ids(before)  # in a group before the one that vLLM complains of
            if any(
                (now != then).any()
                for group in zip(self._their_rows(), before, strict=True)
                for now, then in zip(*group, strict=True)
            ):
                self.met["failed_append_counted"] += 1
        for table, (rows, counts) in zip(self.their_tables, before, strict=True):
            table.block_table.np[:] = rows
            table.num_blocks_per_row[:] = counts

    def _require_lost_ids(self, before: list[Any]) -> None:
        """In some group the count grew beyond the row, and no entry was stored for it."""
        for width, (rows, counts), (old_rows, old_counts) in zip(self.widths, self._their_rows(), before, strict=True):
            grown = np.flatnonzero(counts != old_counts)
            if any(counts[row] > width and (rows[row] == old_rows[row]).all() for row in grown):
                return
        raise Different("ours refuses an append for want of room that vLLM has stored")

    def _their_rows(self) -> list[tuple[Any, Any]]:
        return [(table.block_table.np.copy(), table.num_blocks_per_row.copy()) for table in self.their_tables]

    def _do_append_row(self, target: int, ids: Any, row: Any) -> None:
        self._ids_on_both("append_row", target, ids, row)

    def _do_decode(self, target: int, rows: list[int], ids: list[Any]) -> None:
        for row, each in zip(rows, ids, strict=True):
            self._ids_on_both("append_row", target, each if target == MULTI else each[0], row)

    def _do_add_row(self, target: int, ids: Any, row: Any) -> None:
        self._ids_on_both("add_row", target, ids, row)

    def _ids_on_both(self, name: str, target: int, ids: Any, row: Any) -> None:
        """As `_on_both`, with ids of their own for each side: a generator is used up."""
        theirs, ours = self._side(target)
        before = self._their_rows()
        their_error, our_error = (
            _outcome(getattr(side, name), (_materialise(ids, is_many=target == MULTI), row)) for side in (theirs, ours)
        )
        if self.is_fast and self.state.has_own_rows and our_error is not None:
            self._explain_refusal(name, their_error, our_error, before)
        elif type(their_error) is not type(our_error):
            raise Different(f"vLLM: {their_error!r}; ours: {our_error!r}")

    def _do_commit_block_table(self, target: int, num_rows: int) -> None:
        self._on_both("commit_block_table", target, num_rows)
        self._note_commit(target, num_rows)

    def _do_copy_to_gpu(self, target: int, num_rows: int) -> None:
        for group in self._groups(target):
            for table in (self.their_tables[group], self.our_tables[group]):
                table.block_table.copy_to_gpu(num_rows)
            self._note_commit(group, num_rows)

    def _note_commit(self, target: int, num_rows: int) -> None:
        stop = len(range(self.geometry.max_num_reqs)[:num_rows])
        for group in self._groups(target):
            counts = self.their_tables[group].num_blocks_per_row[:stop]
            self.bounds[group][:stop] = np.clip(counts, 0, self.widths[group])
        self.last_commit = stop if target == MULTI else max(stop, self.last_commit)

    def _do_compute_slot_mapping(self, target: int, num_reqs: int, starts: Any, positions: Any, is_odd: bool) -> None:
        arguments = (num_reqs, *self._tensors(starts, positions, is_odd))
        theirs, ours = self._side(target)
        their_error, our_error = (_outcome(side.compute_slot_mapping, arguments) for side in (theirs, ours))
        if isinstance(our_error, ConfigError) and "interleave" in str(our_error) and their_error is None:
            self.met["interleave_refused"] += 1
        elif their_error is not None or our_error is not None:
            raise Different(f"vLLM: {their_error!r}; ours: {our_error!r}")
        else:
            for group in self._groups(target):
                self._compare_slots(group, num_reqs, starts, positions)
        for group in self._groups(target):
            self._settle_slots(group)

    def _tensors(self, starts: Any, positions: Any, is_odd: bool) -> tuple[Any, Any]:
        types = (torch.int64, torch.int32) if is_odd else (torch.int32, torch.int64)
        made = (torch.tensor(values, dtype=kind) for values, kind in zip((starts, positions), types, strict=True))
        found = tuple(array.to(self.device) for array in made)
        return found[0], found[1]

    def _do_patched_kernel(self, target: int, num_reqs: int, starts: Any, positions: Any, is_odd: bool) -> None:
        """Other code puts another kernel under vLLM's name: both must call it, with the same arguments."""
        name = "_compute_slot_mapping_kernel" if self.profile == "0.25.1" else "_COMPUTE_SLOT_MAPPING_KERNEL"
        arguments = (num_reqs, *self._tensors(starts, positions, is_odd))
        records = []
        for place, side in zip((self.module, home), self._side(target), strict=True):
            record, present = Recorder(), getattr(place, name)
            setattr(place, name, record)
            try:
                side.compute_slot_mapping(*arguments)
            finally:
                setattr(place, name, present)
            records.append(record.calls)
        if len(records[0]) != len(records[1]) or not all(map(_same, *records)):
            raise Different(f"a patched kernel is called with {records[0]} by vLLM, with {records[1]} by ours")

    def _do_look(self, target: int) -> None:
        """Ask for everything by its public name."""
        for group in self._groups(target):
            theirs, ours = self.their_tables[group], self.our_tables[group]
            for name in ("get_cpu_tensor", "get_numpy_array"):
                _require_equal(name, getattr(theirs, name)(), getattr(ours, name)())
            for count in (1, self.geometry.max_num_reqs):
                _require_equal("get_device_tensor", theirs.get_device_tensor(count), ours.get_device_tensor(count))
            _require_equal("num_blocks_per_row", theirs.num_blocks_per_row, ours.num_blocks_per_row)
        if self.geometry.is_multi:
            assert self.ours[-1] is self.our_tables[-1]
            assert list(self.ours) == self.our_tables
            assert not hasattr(self.ours, "__len__")

    def _do_write_rows(self, target: int, way: str, row: int, column: int, values: list[int], holds: bool) -> None:
        group = max(target, 0)
        views = []
        for table in (self.their_tables[group], self.our_tables[group]):
            view = getattr(table, way)() if way.startswith("get") else getattr(table.block_table, way)
            view[row, column : column + len(values)] = (
                torch.tensor(values) if isinstance(view, torch.Tensor) else values
            )
            views.append(view[row])  # a part of it holds it too
        if holds:
            self.held.append((views[0], views[1]))

    def _do_fill_rows(self, target: int, way: str, value: int) -> None:
        for group in self._groups(target):
            for table in (self.their_tables[group], self.our_tables[group]):
                getattr(table.block_table, way)[:] = value

    def _do_write_counts(self, target: int, row: int, count: int, holds: bool) -> None:
        group = max(target, 0)
        views = [table.num_blocks_per_row for table in (self.their_tables[group], self.our_tables[group])]
        for view in views:
            view[row] = count
        if holds:
            self.held.append((views[0][: row + 1], views[1][: row + 1]))

    def _do_write_held(self, target: int, which: float, where: float, value: float) -> None:
        """Write to a view that was taken some calls ago; counts are the shorter ones, and stay small."""
        if not self.held:
            return
        views = self.held[int(which * len(self.held))]
        number = int(value * 4)
        for view in views:
            view[int(where * len(view))] = number

    def _do_let_go(self, target: int) -> None:
        self.held.clear()

    def _do_fill_device(self, target: int, stop: int, value: int) -> None:
        """What vLLM's runner does to the rows after the batch."""
        for group in self._groups(target):
            for table in (self.their_tables[group], self.our_tables[group]):
                table.get_device_tensor(max(stop, self.last_commit))[self.last_commit :].fill_(value)

    def _do_overwrite_device(self, target: int, row: int, column: int, value: int) -> None:
        """Other code writes to a row of the batch on the device."""
        group = max(target, 0)
        for table in (self.their_tables[group], self.our_tables[group]):
            table.block_table.gpu[row, column] = value
        self.overwritten[group].append((row, column, value))

    def _do_save(self, target: int) -> None:
        """What 0.33.0's runner does before a dummy run: it keeps copies of all rows, and clears them."""
        self.saved = [
            [(table.block_table.gpu.clone(), table.block_table.cpu.clone()) for table in tables]
            for tables in (self.their_tables, self.our_tables)
        ]
        for side in (self.theirs, self.ours):
            side.clear()

    def _do_restore(self, target: int) -> None:
        """And after it: the copies come back, on the device and on the host."""
        for tables, saved in zip((self.their_tables, self.our_tables), self.saved, strict=True):
            for table, (gpu, cpu) in zip(tables, saved, strict=False):  # nothing, where nothing was saved
                table.block_table.gpu.copy_(gpu)
                table.block_table.cpu.copy_(cpu)
        self.saved = [[], []]

    def _do_attributes(self, target: int) -> None:
        for group in self._groups(target):
            compare_attributes(self.their_tables[group], self.our_tables[group])
            compare_signatures(self.their_tables[group], self.our_tables[group])
        if self.geometry.is_multi:
            compare_signatures(self.theirs, self.ours)

    def _do_map_to_kernel_blocks(self, target: int, ids: list[int]) -> None:
        if self.profile != "0.25.1":
            return
        theirs, ours = self.their_tables[max(target, 0)], self.our_tables[max(target, 0)]
        array = np.array(ids, np.int64)
        found = [
            table.map_to_kernel_blocks(array, table.blocks_per_kv_block, table._kernel_block_arange)
            for table in (theirs, ours)
        ]
        _require_equal("map_to_kernel_blocks", *found)
        if (found[0] is array) != (found[1] is array):
            raise Different("map_to_kernel_blocks returns its argument on one side alone")

    def _do_assign(self, target: int, world_size: int, rank: int) -> None:
        for group in self._groups(target):
            for table in (self.their_tables[group], self.our_tables[group]):
                table.dcp_world_size, table.dcp_rank = world_size, rank

    def _do_replace_slots(self, target: int) -> None:
        """A test puts a tensor of its own in place of the slots."""
        for group in self._groups(target):
            size = self.geometry.max_num_batched_tokens
            slots = torch.full((size + SLACK,), MARK, dtype=torch.int64, device=self.device)
            slots[:size] = 5
            self.slot_memory[group] = slots
            self.their_tables[group].slot_mapping.gpu = slots[:size]
            self.our_tables[group].slot_mapping.gpu = torch.full((size,), 5, dtype=torch.int64, device=self.device)

    def _do_rebind_to_cpu(self, target: int) -> None:
        """What vLLM's CPU runner does to every buffer of a table."""
        if self.device.type != "cpu":
            return
        self.held.clear()  # vLLM's rows move, for the room around them
        for tables, kind in ((self.their_tables, self.module.CpuGpuBuffer), (self.our_tables, home.CpuGpuBuffer)):
            for group in self._groups(MULTI):
                found = [value for value in vars(tables[group]).values() if isinstance(value, kind)]
                if len(found) != 2:
                    raise Different(f"vars() of a table holds {len(found)} CpuGpuBuffers, vLLM's 2")
                found[0].gpu = found[0].cpu
                if tables is self.their_tables:  # room for the columns that it reads outside of the table
                    self._give_room(found[0])

    def _give_room(self, buffer: Any) -> None:
        rows = buffer.cpu
        memory = torch.zeros(2 * SLACK + rows.numel(), dtype=rows.dtype)
        buffer.gpu = buffer.cpu = memory[SLACK : SLACK + rows.numel()].view(rows.shape)
        buffer.cpu.copy_(rows)
        buffer.np = buffer.cpu.numpy()

    # Comparing.

    def compare(self) -> None:
        """Compare rows, counts, device rows and slots. Ours is never asked for its rows: that would end tracking."""
        rows, counts = self._our_rows()
        for group, (theirs, ours) in enumerate(zip(self.their_tables, self.our_tables, strict=True)):
            where = f"group {group}"
            _require_equal(f"{where}: num_blocks_per_row", theirs.num_blocks_per_row, counts[group])
            if self.cleans:
                self._clean_theirs(theirs, counts[group], rows[group])
            _require_equal(f"{where}: host rows", theirs.block_table.np, rows[group])
            if self.is_fast:
                self._restore_device(group)
            _require_equal(f"{where}: device rows", theirs.block_table.gpu, ours.block_table.gpu)
            _require_equal(f"{where}: slots", theirs.slot_mapping.gpu, ours.slot_mapping.gpu)
            if self.state.has_own_rows and ours.block_table.gpu.data_ptr() != self.addresses[group]:
                raise Different(f"{where}: the device rows have moved")

    def _restore_device(self, group: int) -> None:
        """Where vLLM's commit has undone what other code wrote, and ours has it still, undo it there too."""
        theirs, ours = self.their_tables[group].block_table.gpu, self.our_tables[group].block_table.gpu
        kept = []
        for row, column, value in self.overwritten[group]:
            their_value, our_value = int(theirs[row, column]), int(ours[row, column])
            if their_value == value == our_value:
                kept.append((row, column, value))
            elif our_value == value:
                ours[row, column] = their_value
                self.met["overwritten_device_row"] += 1
        self.overwritten[group] = kept

    def _our_rows(self) -> tuple[list[Any], Any]:
        if self.is_fast:
            found: tuple[list[Any], Any] = self.state.host_state()
            return found
        return self.state.host.rows, self.state.host.counts

    def _clean_theirs(self, theirs: Any, counts: Any, rows: Any) -> None:
        """Take the tails of ours over, where they are NULL as promised."""
        tail = np.arange(rows.shape[1]) >= counts[:, None]
        differs = tail & (theirs.block_table.np != rows)
        if (rows[tail] != 0).any():
            raise Different("a tail is not clean")
        if differs.any():
            self.met["clean_tail"] += 1
            theirs.block_table.np[differs] = 0

    def _compare_slots(self, group: int, num_reqs: int, starts: Any, positions: Any) -> None:
        theirs, ours = self.their_tables[group], self.our_tables[group]
        if self.profile == "0.33.0" and not self.geometry.has_slots[group]:
            return
        found, expected = theirs.slot_mapping.gpu.cpu().numpy(), ours.slot_mapping.gpu.cpu().numpy()
        right, reasons = self._right_slots(group, num_reqs, starts, positions)
        wrong = np.flatnonzero(expected != right)
        if wrong.size:
            token = wrong[0]
            raise Different(f"group {group}, token {token}: ours says {expected[token]}, the formula {right[token]}")
        for token in np.flatnonzero(found != expected).tolist():
            reason = reasons.get(token)
            if reason is None:
                raise Different(f"group {group}, token {token}: vLLM says {found[token]}, ours {expected[token]}")
            self.met[reason] += 1

    def _right_slots(self, group: int, num_reqs: int, starts: Any, positions: Any) -> tuple[Any, dict[int, str]]:
        """Return the slots that ours promises, and why vLLM may differ: token -> name of a difference."""
        ours, rows = self.our_tables[group], self.our_tables[group].block_table.gpu.cpu().numpy()
        size, width = ours.slot_mapping.gpu.shape[0], self.widths[group]
        slots, reasons = np.full(size, PAD_SLOT_ID), {}
        for token in range(min(len(positions), size)):
            reasons[token] = "stale_gap"
        tokens, turn = ours.block_size, ours.cp_kv_cache_interleave_size
        world_size, rank = ours.dcp_world_size, ours.dcp_rank
        if self.profile == "0.25.1":
            world_size, rank = ours.pcp_world_size * world_size, ours.pcp_rank * world_size + rank
        for row in range(num_reqs):
            for token in range(starts[row], min(starts[row + 1], size)):
                position = positions[token]
                del reasons[token]
                owner = position // turn % world_size
                local = position // (world_size * turn) * turn + position % turn if world_size > 1 else position
                column = local // tokens
                if position < 0:
                    reasons[token] = "negative_position"
                elif column >= width or position // (tokens * world_size) >= width:
                    reasons[token] = "column_beyond_row"
                elif world_size > 1 and tokens % turn:
                    reasons[token] = "interleave_above_kernel_block"
                elif self.is_fast and column >= self._bound(group, row):
                    reasons[token] = "unbounded_column"
                bound = self._bound(group, row) if self.is_fast else width
                if position >= 0 and (world_size == 1 or owner == rank) and column < bound:
                    slots[token] = int(rows[row, column]) * tokens + local % tokens
        return slots, reasons

    def _bound(self, group: int, row: int) -> int:
        if self.state.has_own_rows:
            return int(self.bounds[group][row])
        return int(np.clip(self.their_tables[group].num_blocks_per_row[row], 0, self.widths[group]))

    def _settle_slots(self, group: int) -> None:
        """Take what ours says over, now that every difference is explained."""
        theirs, memory = self.their_tables[group].slot_mapping.gpu, self.slot_memory[group]
        theirs.copy_(self.our_tables[group].slot_mapping.gpu)
        behind = memory[theirs.shape[0] :]
        if bool((behind != MARK).any()):
            self.met["tokens_above_buffer"] += 1
            behind.fill_(MARK)


class Recorder:
    """Stands in for a slot kernel of either version, and writes down what it is called with."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.grid: Any = None

    def __getitem__(self, grid: Any) -> Recorder:
        self.grid = grid
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Launch nothing."""
        self.calls.append((self.grid, args, kwargs))


def _same(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return isinstance(ours, torch.Tensor) and theirs.dtype == ours.dtype and torch.equal(theirs, ours)
    if isinstance(theirs, tuple):
        return len(theirs) == len(ours) and all(map(_same, theirs, ours))
    return bool(type(theirs) is type(ours) and theirs == ours)


def compare_attributes(theirs: Any, ours: Any) -> None:
    """Compare every attribute that vLLM's table has, as vLLM's own tests do, and require that ours has no other.

    Raises:
        Different: they differ.
    """
    names = [
        {name for name, _ in inspect.getmembers(table, lambda value: not inspect.isroutine(value))}
        for table in (theirs, ours)
    ]
    their_names, our_names = ({name for name in found if not name.startswith("__")} for found in names)
    own = {name for name in our_names - their_names if name not in ("_clears_source", "_kernel_name")}
    if their_names - our_names or own:
        raise Different(f"attributes that one side alone has: {their_names ^ our_names}")
    for name in their_names:
        a, b = getattr(theirs, name), getattr(ours, name)
        if hasattr(a, "copy_to_gpu"):
            _require_equal(f"{name}.np", a.np, b.np)
            _require_equal(f"{name}.cpu", a.cpu, b.cpu)
            _require_equal(f"{name}.gpu", a.gpu, b.gpu)
            if (a.gpu.stride(), a.gpu.is_contiguous()) != (b.gpu.stride(), b.gpu.is_contiguous()):
                raise Different(f"{name}.gpu has other strides")
        elif hasattr(a, "shape"):
            _require_equal(name, a, b)
        elif getattr(a, "value", a) != getattr(b, "value", b):
            raise Different(f"{name}: vLLM {a!r}, ours {b!r}")


def compare_signatures(theirs: Any, ours: Any) -> None:
    """Require that every public method of vLLM's, and the constructor, has the same parameters in ours.

    Raises:
        Different: they differ.
    """
    names = [name for name, _ in inspect.getmembers(theirs, inspect.isroutine) if not name.startswith("_")]
    for name in ("__init__", *names):
        found = [list(inspect.signature(getattr(side, name)).parameters) for side in (theirs, ours)]
        if found[0] != found[1]:
            raise Different(f"{name}: vLLM takes {found[0]}, ours {found[1]}")


def _require_equal(what: str, theirs: Any, ours: Any) -> None:
    if theirs is ours:
        return
    if type(theirs) is not type(ours) or theirs.dtype != ours.dtype or theirs.shape != ours.shape:
        raise Different(f"{what}: vLLM {_kind(theirs)}, ours {_kind(ours)}")
    is_tensor = isinstance(theirs, torch.Tensor)
    if torch.equal(theirs, ours) if is_tensor else np.array_equal(theirs, ours):
        return
    a, b = (np.asarray(array.cpu()) if is_tensor else array for array in (theirs, ours))
    place = tuple(int(index) for index in np.argwhere(a != b)[0])
    raise Different(f"{what} at {place}: vLLM {a[place]}, ours {b[place]}; {int((a != b).sum())} entries differ")


def _kind(array: Any) -> str:
    return f"{type(array).__name__} of {array.dtype} {tuple(array.shape)}"


def _outcome(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Exception | None:
    try:
        result = call(*arguments)
    except Exception as error:  # whatever vLLM raises
        return error
    if result is not None:
        raise Different(f"{call} returns {result!r}, not None")
    return None


def _materialise(ids: Any, *, is_many: bool) -> Any:
    """Return ids as a call takes them; they are written down as plain data."""
    if is_many and isinstance(ids, list):
        return tuple(_materialise(each, is_many=False) for each in ids)
    if isinstance(ids, tuple) and ids:
        kind, values = ids
        makers: dict[str, Callable[[Any], Any]] = {
            "tuple": tuple,
            "range": lambda bounds: range(*bounds),
            "array": lambda given: np.array(given, np.int64),
            "generator": iter,
            "set": set,
        }
        return makers[kind](values)
    return list(ids) if isinstance(ids, list) else ids
