"""The tables in strict mode: what vLLM's classes do, effect by effect, on our memory and with our slot kernels.

Names that begin and end with two underscores hold what vLLM's tables do not have: who compares two tables attribute by
attribute skips such names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from blocktable import PAD_SLOT_ID
from blocktable.typing import IntArray
from blocktable_vllm.buffers import SlotBuffer, as_vllm
from blocktable_vllm.memory import Geometry, Sizes
from blocktable_vllm.settings import Settings
from blocktable_vllm.state import State

GEOMETRY_NAMES = frozenset(
    {
        "block_size",
        "blocks_per_kv_block",
        "max_num_batched_tokens",
        "pcp_world_size",
        "pcp_rank",
        "dcp_world_size",
        "dcp_rank",
        "cp_kv_cache_interleave_size",
        "slot_mapping",
        "slot_mapping_mode",
    }
)
"""Attributes that decide a slot. Engines and tests assign some of them after the table was made."""

VLLM_TILE = 1024
"""What vLLM launches its own kernel with."""


class PlainTable:
    """One group's rows in strict mode.

    Attributes:
        block_table: buffer of [max_num_reqs, max_num_blocks_per_req] int32; a row keeps what it once held after its
            count, as in vLLM.
        num_blocks_per_row: [max_num_reqs] int32, numpy, writable. Columns of each row.
        slot_mapping: buffer of [max_num_batched_tokens] int64.
    """

    __home__: Any
    __own_kernel__: Any
    __settings__: Settings
    __state_type__: Any = State
    __blocktable__: Any

    max_num_blocks_per_req: int
    block_size: int
    pcp_world_size: int
    pcp_rank: int
    dcp_world_size: int
    dcp_rank: int
    num_blocks_per_row: Any

    _clears_source = False

    def __setattr__(self, name: str, value: Any) -> None:
        state = vars(self).get("__blocktable__")
        if state is not None:
            if name in GEOMETRY_NAMES:
                state[0].has_own_slots = False
            elif name in ("block_table", "num_blocks_per_row"):
                state[0].give_up_rows()
        object.__setattr__(self, name, value)

    # Making one.

    def _set_sizes(
        self, max_num_reqs: int, max_num_batched_tokens: int, pin_memory: bool, device: Any, interleave_size: int
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.pin_memory = pin_memory
        self.device = device
        for name in ("pcp", "dcp"):
            try:
                group = getattr(self.__home__, f"get_{name}_group")()
                world_size, rank = group.world_size, group.rank_in_group
            except AssertionError:  # torch.distributed is not initialised
                world_size, rank = 1, 0
            setattr(self, f"{name}_world_size", world_size)
            setattr(self, f"{name}_rank", rank)
        self.cp_kv_cache_interleave_size = interleave_size

    def _take_memory(self) -> None:
        """Take memory of its own, unless the tables of all groups will share one."""
        if "__blocktable__" not in vars(self):
            share_memory([self])

    def _join(self, state: State, group: int) -> None:
        """Take the memory of one group."""
        home_buffer = self.__home__.CpuGpuBuffer
        self.block_table = as_vllm(state.buffer_type, home_buffer)(state, group)
        vars(self)["num_blocks_per_row"] = state.count_rows[group]
        slots = state.device.slots[group]
        with torch.inference_mode(False):
            # The mapper pads the slots of a group that has none; vLLM leaves them alone.
            gpu = slots if self._has_slots() else torch.zeros_like(slots)
            cpu = torch.zeros(self.max_num_batched_tokens, dtype=torch.int64, pin_memory=self.pin_memory)
        self.slot_mapping = as_vllm(SlotBuffer, home_buffer)(state, gpu, cpu)
        vars(self)["__blocktable__"] = (state, group)
        for thing in (self, self.block_table):
            state.belongs_to(thing)

    def _has_slots(self) -> bool:
        return True

    def _columns_per_block(self) -> int:
        return 1

    def _rank_and_world(self) -> tuple[int, int]:
        raise NotImplementedError

    def _geometry(self, width: int) -> Geometry:
        expansion = self._columns_per_block()
        rank, world_size = self._rank_and_world()
        return Geometry(
            block_size=self.block_size * (1 if width % expansion else expansion),
            kernel_block_size=self.block_size,
            width=width,
            has_slots=self._has_slots(),
            world_size=world_size,
            rank=rank,
            interleave_size=self.cp_kv_cache_interleave_size if world_size > 1 else 1,
        )

    # Rows, on the host.

    def _expand(self, block_ids: Any) -> Any:
        return block_ids

    def append_row(self, block_ids: Any, row_idx: int) -> None:
        """Add blocks after what a row holds. The count is raised before the ids are stored, as in vLLM."""
        if not block_ids:
            return
        columns = self._expand(block_ids)
        number = len(columns)
        start = self.num_blocks_per_row[row_idx]
        self.num_blocks_per_row[row_idx] += number
        self.block_table.np[row_idx, start : start + number] = columns

    def add_row(self, block_ids: Any, row_idx: int) -> None:
        """Replace what a row holds; what it held after the new blocks stays."""
        self.num_blocks_per_row[row_idx] = 0
        self.append_row(block_ids, row_idx)

    def clear_row(self, row_idx: int) -> None:
        """Make a row empty, and its counted columns NULL."""
        count = self.num_blocks_per_row[row_idx]
        if count > 0:
            self.block_table.np[row_idx, :count] = 0
        self.num_blocks_per_row[row_idx] = 0

    def move_row(self, src: int, tgt: int) -> None:
        """Copy what row src holds to row tgt, whose columns after it stay; profile 0.33.0 empties row src."""
        rows, counts = self.block_table.np, self.num_blocks_per_row
        count = counts[src]
        rows[tgt, :count] = rows[src, :count]
        counts[tgt] = count
        if self._clears_source:
            rows[src, :count] = 0
            counts[src] = 0

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange two rows, every column of them."""
        for array in (self.num_blocks_per_row, self.block_table.np):
            array[[src, tgt]] = array[[tgt, src]]

    def clear(self) -> None:
        """Make every entry NULL, on the host and on the device. Counts stay, as in vLLM."""
        self.block_table.gpu.zero_()
        self.block_table.cpu.zero_()

    # Device.

    def commit_block_table(self, num_reqs: int) -> None:
        """Bring the first rows to the device, without a wait."""
        self.block_table.copy_to_gpu(num_reqs)

    def compute_slot_mapping(self, num_reqs: int, query_start_loc: Any, positions: Any) -> None:
        """Write the slot of every token of the batch whose request i has row i, and PAD to the end of the buffer.

        A token whose column lies past its row gets PAD, and so do tokens of no request.

        Args:
            num_reqs: requests.
            query_start_loc: [>= num_reqs + 1] int32. First token of each request.
            positions: [num_tokens] int64. Each token's index in its request.
        """
        if not self._has_slots():
            return
        kernel = self._replaced_kernel()
        if kernel is not None:
            self._launch(kernel, num_reqs, query_start_loc, positions)
            return
        state, group = self.__blocktable__
        if state.has_own_slots and len(state.groups) == 1:
            state.device.map_slots(num_reqs, query_start_loc, positions)
            return
        table = self.block_table.gpu
        counts = self._bounds(state, group)
        batch = (num_reqs, query_start_loc, positions)
        state.map_slots_aside(group, self._geometry(table.shape[1]), table, counts, batch, self.slot_mapping.gpu)

    def _bounds(self, state: State, group: int) -> Any:
        """Return how many columns of each row may give slots; None: all."""
        return None

    _kernel_name: str

    def _replaced_kernel(self) -> Any:
        """Return the kernel that other code put in place of vLLM's; None: there is none."""
        kernel = getattr(self.__home__, self._kernel_name)
        return None if kernel is self.__own_kernel__ else kernel

    def _launch(self, kernel: Any, num_reqs: int, query_start_loc: Any, positions: Any) -> None:
        raise NotImplementedError

    # Looking.

    def get_device_tensor(self, num_reqs: int) -> Any:
        """Return the first rows on the device, [num_reqs, width] int32, as a view."""
        return self.block_table.gpu[:num_reqs]

    def get_cpu_tensor(self) -> Any:
        """Return the rows on the host, [max_num_reqs, width] int32, torch."""
        return self.block_table.cpu

    def get_numpy_array(self) -> Any:
        """Return the rows on the host, [max_num_reqs, width] int32, numpy."""
        return self.block_table.np


class Table0251(PlainTable):
    """vLLM 0.25.1's `BlockTable`."""

    _kernel_name = "_compute_slot_mapping_kernel"

    def __init__(
        self,
        block_size: int,
        max_num_reqs: int,
        max_num_blocks_per_req: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: Any,
        kernel_block_size: int,
        cp_kv_cache_interleave_size: int,
    ) -> None:
        if block_size % kernel_block_size:
            raise ValueError(
                f"kernel_block_size {kernel_block_size} must divide kv_manager_block_size size {block_size} evenly"
            )
        expansion = block_size // kernel_block_size
        self.block_size = kernel_block_size
        self.blocks_per_kv_block = expansion
        self.use_hybrid_blocks: bool = expansion > 1
        self._kernel_block_arange = np.arange(expansion).reshape(1, -1) if expansion > 1 else None
        self.max_num_blocks_per_req: int = max_num_blocks_per_req * expansion
        self._set_sizes(max_num_reqs, max_num_batched_tokens, pin_memory, device, cp_kv_cache_interleave_size)
        self._take_memory()

    def _columns_per_block(self) -> int:
        return self.blocks_per_kv_block

    def _rank_and_world(self) -> tuple[int, int]:
        return self.pcp_rank * self.dcp_world_size + self.dcp_rank, self.pcp_world_size * self.dcp_world_size

    def _expand(self, block_ids: Any) -> Any:
        if not self.use_hybrid_blocks:
            return block_ids
        return self.map_to_kernel_blocks(np.array(block_ids), self.blocks_per_kv_block, self._kernel_block_arange)

    @staticmethod
    def map_to_kernel_blocks(
        kv_manager_block_ids: IntArray, blocks_per_kv_block: int, kernel_block_arange: Any
    ) -> IntArray:
        """Return the kernel blocks of manager blocks, in order; the same array where each has one.

        Args:
            kv_manager_block_ids: [n] integers.
            blocks_per_kv_block: kernel blocks of each.
            kernel_block_arange: [1, blocks_per_kv_block]: 0, 1, ...
        """
        if blocks_per_kv_block == 1:
            return kv_manager_block_ids
        first: IntArray = kv_manager_block_ids.reshape(-1, 1) * blocks_per_kv_block
        columns: IntArray = (first + kernel_block_arange).ravel()
        return columns

    def _launch(self, kernel: Any, num_reqs: int, query_start_loc: Any, positions: Any) -> None:
        rank, world_size = self._rank_and_world()
        table = self.block_table.gpu
        kernel[(num_reqs + 1,)](
            positions.shape[0],
            self.max_num_batched_tokens,
            query_start_loc,
            positions,
            table,
            table.stride(0),
            self.block_size,
            self.slot_mapping.gpu,
            TOTAL_CP_WORLD_SIZE=world_size,
            TOTAL_CP_RANK=rank,
            CP_KV_CACHE_INTERLEAVE_SIZE=self.cp_kv_cache_interleave_size,
            PAD_ID=PAD_SLOT_ID,
            BLOCK_SIZE=VLLM_TILE,
        )


class Table0330(PlainTable):
    """vLLM 0.33.0's `BlockTable`."""

    _kernel_name = "_COMPUTE_SLOT_MAPPING_KERNEL"
    _clears_source = True

    def __init__(
        self,
        block_size: int,
        max_num_reqs: int,
        max_num_blocks_per_req: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: Any,
        cp_kv_cache_interleave_size: int,
        slot_mapping_mode: Any = None,
    ) -> None:
        self.block_size = block_size
        self.max_num_blocks_per_req = max_num_blocks_per_req
        self._set_sizes(max_num_reqs, max_num_batched_tokens, pin_memory, device, cp_kv_cache_interleave_size)
        modes = self.__home__.SlotMappingMode
        self.slot_mapping_mode: Any = modes.TOKEN_TO_KV_SLOT if slot_mapping_mode is None else slot_mapping_mode
        self._take_memory()

    def _join(self, state: State, group: int) -> None:
        super()._join(state, group)
        kernel = self._replaced_kernel()
        if kernel is not None and self._has_slots():
            kernel.register_warmup(
                kv_cache_block_size=self.block_size,
                total_cp_world_size=self.dcp_world_size,
                total_cp_rank=self.dcp_rank,
                cp_kv_cache_interleave_size=self.cp_kv_cache_interleave_size,
                block_table_stride=self.block_table.gpu.stride(0),
            )

    def _has_slots(self) -> bool:
        return bool(self.slot_mapping_mode != self.__home__.SlotMappingMode.NONE)

    def _rank_and_world(self) -> tuple[int, int]:
        return self.dcp_rank, self.dcp_world_size

    def _launch(self, kernel: Any, num_reqs: int, query_start_loc: Any, positions: Any) -> None:
        table = self.block_table.gpu
        kernel(
            num_reqs,
            positions.shape[0],
            self.max_num_batched_tokens,
            query_start_loc,
            positions,
            table,
            table.stride(0),
            self.slot_mapping.gpu,
            self.block_size,
            self.dcp_world_size,
            self.dcp_rank,
            self.cp_kv_cache_interleave_size,
        )


def share_memory(tables: list[Any]) -> State:
    """Give tables of one size, one a group, their memory: one arena for all of them."""
    first = tables[0]
    geometries = [table._geometry(table.max_num_blocks_per_req) for table in tables]
    sizes = Sizes(first.max_num_reqs, first.max_num_batched_tokens)
    state: State = first.__state_type__(
        geometries, sizes, first.__settings__, torch.device(first.device), pin_memory=first.pin_memory
    )
    for group, table in enumerate(tables):
        table._join(state, group)
    return state


class NoGroups:
    """The state of a model without a KV cache: there are no rows."""

    has_own_rows = False
    has_own_slots = False


class PlainMulti:
    """The tables of every KV cache group, in strict mode: every operation goes through the groups in order.

    Attributes:
        block_tables: one table a group.
    """

    __table_type__: Any
    __blocktable__: Any
    block_tables: list[Any]

    def _make_tables(self, arguments: list[tuple[Any, ...]]) -> None:
        self.block_tables = tables = [object.__new__(self.__table_type__) for _ in arguments]
        for table, each in zip(tables, arguments, strict=True):
            vars(table)["__blocktable__"] = None
            table.__init__(*each)
        vars(self)["__blocktable__"] = state = share_memory(tables) if tables else NoGroups()
        if isinstance(state, State):
            state.belongs_to(self)

    def append_row(self, block_ids: Any, row_idx: int) -> None:
        """Add blocks after what a row holds. block_ids: one sequence for each group."""
        for group, table in enumerate(self.block_tables):
            table.append_row(block_ids[group], row_idx)

    def add_row(self, block_ids: Any, row_idx: int) -> None:
        """Replace what a row holds. block_ids: one sequence for each group."""
        for group, table in enumerate(self.block_tables):
            table.add_row(block_ids[group], row_idx)

    def clear_row(self, row_idx: int) -> None:
        """Make a row empty."""
        for table in self.block_tables:
            table.clear_row(row_idx)

    def move_row(self, src: int, tgt: int) -> None:
        """Copy what row src holds to row tgt."""
        for table in self.block_tables:
            table.move_row(src, tgt)

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchange two rows."""
        for table in self.block_tables:
            table.swap_row(src, tgt)

    def clear(self) -> None:
        """Make every entry NULL, on the host and on the device."""
        for table in self.block_tables:
            table.clear()

    def commit_block_table(self, num_reqs: int) -> None:
        """Bring the first rows to the device, without a wait."""
        for table in self.block_tables:
            table.commit_block_table(num_reqs)

    def compute_slot_mapping(self, num_reqs: int, query_start_loc: Any, positions: Any) -> None:
        """Write the slots of a batch, of all groups in one launch. Args: as of one table."""
        state = self.__blocktable__
        if state.has_own_slots and self.block_tables[0]._replaced_kernel() is None:
            state.device.map_slots(num_reqs, query_start_loc, positions)
            return
        for table in self.block_tables:
            table.compute_slot_mapping(num_reqs, query_start_loc, positions)

    def __getitem__(self, idx: int) -> Any:
        return self.block_tables[idx]


class Multi0251(PlainMulti):
    """vLLM 0.25.1's `MultiGroupBlockTable`."""

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: Any,
        block_sizes: list[int],
        kernel_block_sizes: list[int],
        max_num_blocks: list[int] | None = None,
        cp_kv_cache_interleave_size: int = 1,
    ) -> None:
        _require_one_each("kernel_block_sizes", kernel_block_sizes, block_sizes)
        if max_num_blocks is None:
            world_size = self.__table_type__.__home__.get_total_cp_world_size()
            max_num_blocks = [-(-max_model_len // (block_size * world_size)) for block_size in block_sizes]
        _require_one_each("max_num_blocks", max_num_blocks, block_sizes)
        self._make_tables(
            [
                (
                    block_size,
                    max_num_reqs,
                    _rounded(blocks, block_size),
                    max_num_batched_tokens,
                    pin_memory,
                    device,
                    kernel_block_size,
                    cp_kv_cache_interleave_size,
                )
                for block_size, kernel_block_size, blocks in zip(
                    block_sizes, kernel_block_sizes, max_num_blocks, strict=True
                )
            ]
        )


class Multi0330(PlainMulti):
    """vLLM 0.33.0's `MultiGroupBlockTable`."""

    def __init__(
        self,
        max_num_reqs: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: Any,
        block_sizes: list[int],
        max_num_blocks: list[int],
        cp_kv_cache_interleave_size: int = 1,
        slot_mapping_modes: list[Any] | None = None,
    ) -> None:
        home = self.__table_type__.__home__
        modes = home.SlotMappingMode
        if slot_mapping_modes is None:
            slot_mapping_modes = [modes.TOKEN_TO_KV_SLOT] * len(block_sizes)
        _require_one_each("slot_mapping_modes", slot_mapping_modes, block_sizes)
        _require_one_each("max_num_blocks", max_num_blocks, block_sizes)
        self._make_tables(
            [
                (
                    block_size,
                    max_num_reqs,
                    home.get_block_table_width(blocks, block_size, token_alignment=None if mode == modes.NONE else 128),
                    max_num_batched_tokens,
                    pin_memory,
                    device,
                    cp_kv_cache_interleave_size,
                    mode,
                )
                for block_size, blocks, mode in zip(block_sizes, max_num_blocks, slot_mapping_modes, strict=True)
            ]
        )


def _require_one_each(name: str, values: list[Any], block_sizes: list[int]) -> None:
    if len(values) != len(block_sizes):
        raise ValueError(f"{name} length ({len(values)}) must match block_sizes length ({len(block_sizes)})")


def _rounded(blocks: int, block_size: int) -> int:
    """Return `blocks` rounded up to 128 tokens as vLLM 0.25.1 does it: exact for block sizes that divide 128 alone."""
    if block_size > 128:
        return blocks
    step = 128 // block_size
    return -(-blocks // step) * step
