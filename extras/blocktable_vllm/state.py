"""What the tables of all groups share in strict mode: memory, and commits of whole rows."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from blocktable_vllm.buffers import TableBuffer, give_up
from blocktable_vllm.memory import (
    DeviceMemory,
    Geometry,
    HostMemory,
    Sizes,
    choose_backend,
    copy_rows,
)
from blocktable_vllm.settings import Settings


class State:
    """Memory of all groups, and what has been replaced from outside.

    Args:
        groups: one geometry for each group.
        sizes: rows and slots.
        settings: of the drop-in.
        device: torch.device.
        pin_memory: whether the host's memory is pinned.

    Attributes:
        has_own_rows: whether rows are still where this made them: no other arrays were put there.
        has_own_slots: whether slots are, and every group has the geometry that it was made with.
        device, host: the memory.
        num_bytes_sent: bytes of all commits so far.
    """

    is_bounded = False
    buffer_type: type = TableBuffer

    def __init__(
        self, groups: list[Geometry], sizes: Sizes, settings: Settings, device: Any, *, pin_memory: bool
    ) -> None:
        self.groups = groups
        self.sizes = sizes
        self.settings = settings
        self.has_own_rows: bool = True
        self.has_own_slots: bool = True
        self.num_bytes_sent: int = 0
        self.device: DeviceMemory = DeviceMemory(groups, sizes, choose_backend(settings.backend, device), device)
        self.host: HostMemory = HostMemory(self.device.config, pin_memory=pin_memory)
        self.count_rows: list[Any] = list(self.host.counts)  # [max_num_reqs] int32 each
        self._owners: list[weakref.ref[Any]] = []
        self._asides: dict[int, tuple[Any, DeviceMemory]] = {}
        if not self.is_bounded:
            for group, geometry in enumerate(groups):
                self.device.counts[group].fill_(geometry.width)
        if device.type != "cpu":
            torch.cuda.synchronize(device)  # the first step may be on another stream

    def give_up_rows(self) -> None:
        """Other code puts other arrays in place of the rows: from now on everything goes through these."""
        if self.has_own_rows:
            for owner in self._owners:
                thing = owner()
                if thing is not None and hasattr(thing, "__given_up__"):
                    give_up(thing)
        self.has_own_rows = self.has_own_slots = False

    def belongs_to(self, thing: Any) -> None:
        """Note a table, all of them or a buffer whose rows these are."""
        self._owners.append(weakref.ref(thing))

    def num_rows(self, n: int | None) -> int:
        """Return how many rows a slice `[:n]` has."""
        return len(range(self.sizes.max_num_reqs)[:n])

    def commit_group(self, group: int, n: int | None) -> None:
        """Copy the first n rows of a group to the device, whole."""
        stop = self.num_rows(n)
        copy_rows(self.host.tables[group], self.device.tables[group], 0, stop)
        self.num_bytes_sent += 4 * stop * self.groups[group].width

    def commit(self, n: int) -> None:
        """Copy the first n rows of every group to the device."""
        for group in range(len(self.groups)):
            self.commit_group(group, n)

    def map_slots_aside(
        self, group: int, geometry: Geometry, table: Any, counts: Any, batch: tuple[int, Any, Any], slots: Any
    ) -> None:
        """Write one group's slots through a copy of its rows: for replaced arrays, another geometry, one group of many.

        Args:
            group: which one.
            geometry: its present one.
            table: [rows, width] integers, torch, on the device: the rows to read.
            counts: [rows] integers, torch or numpy: columns that may give slots. None: all.
            batch: num_reqs, query_start_loc, positions.
            slots: [entries] int64, torch, on the device, written.
        """
        sizes = Sizes(table.shape[0], max(1, slots.shape[0]))
        key, memory = self._asides.get(group, (None, None))
        if memory is None or key != (geometry, sizes):
            memory = DeviceMemory([geometry], sizes, self.device.backend, self.device.device)
            self._asides[group] = (geometry, sizes), memory
        memory.tables[0].copy_(table)
        if counts is None:
            memory.counts.fill_(geometry.width)
        else:
            memory.counts[0].copy_(torch.as_tensor(counts).clamp(0, geometry.width))
        memory.map_slots(*batch)
        slots.copy_(memory.slots[0][: slots.shape[0]])
