"""The memory of a drop-in: a host mirror and a backend's arena in one layout, as torch tensors, and the slots."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from blocktable import (
    ArgumentError,
    BlockTableConfig,
    ConfigError,
    ContextParallel,
    DtypeError,
    KVCacheGroup,
    get_backend,
)
from blocktable.backend import Batch, address_of
from blocktable.typing import Array, IntArray

COMMITS_IN_FLIGHT = 8
"""Commits whose device work may be unfinished before the next one waits: more than an engine ever is ahead."""


class Geometry(NamedTuple):
    """What decides a group's memory and slots.

    Attributes:
        block_size: tokens in a manager block.
        kernel_block_size: tokens in a column.
        width: columns of a row.
        has_slots: whether tokens have slots.
        world_size, rank, interleave_size: of context parallelism; 1, 0, 1 without.
    """

    block_size: int
    kernel_block_size: int
    width: int
    has_slots: bool
    world_size: int
    rank: int
    interleave_size: int


class Sizes(NamedTuple):
    """Rows of a table, and entries of its slot buffer."""

    max_num_reqs: int
    max_num_batched_tokens: int


def make_config(groups: list[Geometry], sizes: Sizes) -> BlockTableConfig:
    """Return our configuration of vLLM's groups; every column may be filled, by any block.

    Raises:
        ConfigError: the interleave size does not divide the block size, which would give tokens to wrong blocks.
    """
    first = groups[0]
    return BlockTableConfig(
        groups=[
            KVCacheGroup(
                block_size=group.block_size,
                kernel_block_size=group.kernel_block_size,
                blocks_per_row=group.width * group.kernel_block_size // group.block_size,
                slot_mode="linear" if group.has_slots else "none",
                allow_null=True,
            )
            for group in groups
        ],
        max_num_reqs=sizes.max_num_reqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=1,  # capacities are given
        steps_in_flight=COMMITS_IN_FLIGHT,
        context_parallel=ContextParallel(
            world_size=first.world_size, rank=first.rank, interleave_size=first.interleave_size
        ),
    )


def choose_backend(name: str | None, device: Any) -> Any:
    """Return the backend of that name, or the device's default; it must run where `device` is.

    Raises:
        ConfigError: it works elsewhere.
    """
    is_host = device.type == "cpu"
    backend = get_backend(name or ("numpy" if is_host else "triton"))
    runs_on_host = "streams" not in backend.capabilities or getattr(backend, "is_emulated", False)
    if is_host != runs_on_host:
        where = "the CPU" if is_host else f"a device of type {device.type!r}"
        raise ConfigError(
            f"The table is to be on {where}, where backend {backend.name!r} does not run; choose another one by "
            "BLOCKTABLE_VLLM_BACKEND or backend=."
        )
    return backend


def as_tensor(array: Array, device: Any) -> Any:
    """Return a backend's array as a torch tensor over the same memory.

    Raises:
        ArgumentError: torch cannot see it.
    """
    if isinstance(array, torch.Tensor):
        return array
    if device.type == "cpu":
        host = np.asarray(array)
        tensor, is_shared = torch.from_numpy(host), np.shares_memory(host, getattr(array, "_ary", array))
    else:
        tensor = torch.as_tensor(array, device=device)
        is_shared = tensor.data_ptr() == address_of(array)
    if not is_shared:
        raise ArgumentError(f"torch cannot see the memory of a backend's {type(array).__name__} on {device}.")
    return tensor


def stream_index(tensor: Any) -> int | None:
    """Return the number of a tensor's GPU, None on the CPU."""
    if not tensor.is_cuda:
        return None
    index = tensor.device.index
    return torch.cuda.current_device() if index is None else int(index)


def current_stream(index: int | None) -> int | None:
    """Return the handle of torch's current stream of a GPU; None on the CPU."""
    # The raw handle costs 0.2 us, torch.cuda.current_stream() 4 to 8.
    return None if index is None else int(torch._C._cuda_getCurrentRawStream(index))


class DeviceMemory:
    """An arena and a slot mapper of one backend, and torch's view of the arena.

    Args:
        groups: one geometry for each group; the shares of context parallelism are those of the first.
        sizes: rows and slots.
        backend: a backend object that runs on `device`.
        device: torch.device.

    Attributes:
        config: our configuration; its arena is the host mirror's layout too.
        store: the backend's memory.
        tables: [max_num_reqs, width] int32 torch tensors over it, one a group. Addresses never change.
        counts: [num_groups, max_num_reqs] int32, likewise: columns of each row that may give slots.
        slots: [max_num_batched_tokens] int64 torch tensors, one a group.
    """

    def __init__(self, groups: list[Geometry], sizes: Sizes, backend: Any, device: Any) -> None:
        self.config: BlockTableConfig = make_config(groups, sizes)
        self.backend = backend
        self.device = device
        place = None if device.type == "cpu" else device
        num_slots = sizes.max_num_batched_tokens
        with torch.inference_mode(False):  # else the tensors could not be written in another mode
            self.store: Any = backend.create_block_store(self.config, place)
            self._mapper: Any = backend.create_slot_mapper(self.store)
            self.tables: list[Any] = [self._tensor(self.store.table(group)) for group in range(len(groups))]
            self.counts: Any = self._tensor(self.store.table(-1))
            # Zeros at first, as in vLLM. The backend's own memory, of regular strides: one launch for all groups.
            slots = backend.from_host(np.zeros(len(groups) * num_slots, np.int64), place)
            self._outputs = [slots[group * num_slots : (group + 1) * num_slots] for group in range(len(groups))]
            self.slots: list[Any] = [self._tensor(array) for array in self._outputs]
        self._stream_index: int | None = stream_index(self.tables[0])

    def _tensor(self, array: Array) -> Any:
        return as_tensor(array, self.device)

    @property
    def stream(self) -> int | None:
        """Handle of torch's current stream; None on the CPU."""
        return current_stream(self._stream_index)

    def map_slots(self, num_reqs: int, query_start_loc: Any, positions: Any) -> None:
        """Write the slots of a batch over rows 0 .. num_reqs - 1, PAD to the end of every group's.

        Args:
            num_reqs: requests.
            query_start_loc: [>= num_reqs + 1] integers, torch, on the device.
            positions: [num_tokens] integers, torch, on the device.

        Raises:
            ArgumentError: more requests than rows, `query_start_loc` is too short, or an array is elsewhere.
        """
        num_reqs = int(num_reqs)
        if not 0 <= num_reqs <= self.config.max_num_reqs:
            raise ArgumentError(f"num_reqs {num_reqs} is outside 0 .. {self.config.max_num_reqs} (max_num_reqs).")
        starts = self._vector("query_start_loc", query_start_loc, torch.int32)
        if starts.shape[0] != num_reqs + 1:
            if starts.shape[0] <= num_reqs:
                raise ArgumentError(
                    f"query_start_loc holds {starts.shape[0]} entries; {num_reqs} requests need one more."
                )
            starts = starts[: num_reqs + 1]
        tokens = self._vector("positions", positions, torch.int64)
        batch = Batch(None, starts, tokens, num_reqs, num_reqs, None, tokens.shape[0])
        self._mapper.compute_slot_mappings(batch, self._outputs, stream=self.stream)

    def _vector(self, name: str, array: Any, dtype: Any) -> Any:
        if array.is_cuda is not (self._stream_index is not None):
            raise ArgumentError(f"{name} is on {array.device}, but the table is on {self.device}; move it there.")
        if array.ndim != 1:
            raise DtypeError(f"{name} must have one dimension, got {array.ndim}.")
        if array.dtype is not dtype:
            array = array.to(dtype)
        return array if array.is_contiguous() else array.contiguous()


class HostMemory:
    """The mirror of an arena, pinned where vLLM asks for it.

    Attributes:
        memory: [arena.size] int32, torch.
        mirror: the same memory, numpy.
        counts: [num_groups, max_num_reqs] int32, numpy, the filled counts of the mirror.
        tables: [max_num_reqs, width] int32, torch, one a group.
        rows: the same, numpy.
    """

    def __init__(self, config: BlockTableConfig, *, pin_memory: bool) -> None:
        arena = config.arena
        with torch.inference_mode(False):
            self.memory: Any = torch.zeros(arena.size, dtype=torch.int32, pin_memory=pin_memory)
            self.tables: list[Any] = [arena.view(self.memory, group) for group in range(arena.num_groups)]
        self.mirror: IntArray = self.memory.numpy()
        self.counts: IntArray = arena.view(self.mirror, -1)
        self.rows: list[IntArray] = [arena.view(self.mirror, group) for group in range(arena.num_groups)]


def copy_rows(source: Any, target: Any, start: int, stop: int) -> None:
    """Copy rows of a host tensor to a device tensor without a wait; later changes on the host do not reach it.

    Args:
        source: [rows, ...] torch, on the host.
        target: the same shape, on the device; its dtype may differ.
        start, stop: rows.
    """
    rows = source[start:stop]
    if target.device.type != "cpu":
        # The copy reads a snapshot: torch's allocator keeps it until the copy has run.
        rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows)
    target[start:stop].copy_(rows, non_blocking=True)
