"""vLLM's V2 block tables over ours: `BlockTables`, as its model runner, its speculators and its kernels use it.

Other names than vLLM's begin and end with two underscores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from blocktable import PAD_SLOT_ID, BlockTableConfig, ContextParallel, KVCacheGroup, RowCapacityError
from blocktable.typing import IntArray
from blocktable_vllm.memory import COMMITS_IN_FLIGHT
from blocktable_vllm.stable import StableRows


class RowOverflowError(RowCapacityError, RuntimeError):
    """A row cannot hold the blocks; nothing was changed. vLLM 0.33.0 raises a RuntimeError."""


class Group(NamedTuple):
    """One KV cache group, as a constructor of vLLM's describes it.

    Attributes:
        block_size: tokens in a column.
        columns_per_block: columns that one block id fills.
        max_num_blocks: columns of a row.
        has_slots: whether tokens have slots.
        is_sharded: whether the ranks share its tokens.
        reach: tokens before the first scheduled one that attention still reads. 0: all of them.
    """

    block_size: int
    columns_per_block: int
    max_num_blocks: int
    has_slots: bool = True
    is_sharded: bool = True
    reach: int = 0


class RowsOfGroup:
    """`block_tables[g]`: the rows of one group on the device.

    Attributes:
        num_rows, dtype, device: of `gpu`.
    """

    def __init__(self, rows: StableRows, group: int) -> None:
        self.__rows__ = rows
        self.__group__ = group
        table = rows.tables[group]
        self.num_rows: int = table.shape[0]
        self.dtype: Any = table.dtype
        self.device: Any = table.device

    @property
    def gpu(self) -> Any:
        """[max_num_reqs, max_num_blocks] int32, torch. Its address never changes."""
        self.__rows__.show_tables()
        return self.__rows__.tables[self.__group__]


class CountsOfRows:
    """`num_blocks`: columns of each row."""

    def __init__(self, rows: StableRows) -> None:
        self.__rows__ = rows

    @property
    def np(self) -> IntArray:
        """[num_groups, max_num_reqs] int32, numpy, read-only: they follow the appended blocks."""
        return self.__rows__.filled

    @property
    def gpu(self) -> Any:
        """[num_groups, max_num_reqs] int32, torch, as of the last `apply_staged_writes`."""
        self.__rows__.show_tables()
        return self.__rows__.counts


class StableTables:
    """`BlockTables`: rows that stay while a request lives, and the batch's tables and slots made of them.

    Rows hold NULL after their blocks, batch tables too; a token of a block that its row does not hold gets PAD.

    Attributes:
        block_tables: one group's rows each.
        input_block_tables: [max_num_reqs, max_num_blocks] int32 each, torch. The batch's; others may write to them.
        slot_mappings: [num_kv_cache_groups, max_num_batched_tokens] int64, torch. Others may write to it.
        redirect_writes_to_null_block: whether appended blocks become block 0, whatever they are.
    """

    __backend__: str | None = None
    __rows__: StableRows | None

    redirect_writes_to_null_block = False

    block_sizes: list[int]
    max_num_reqs: int
    max_num_batched_tokens: int
    device: Any
    cp_size: int
    cp_rank: int
    cp_interleave: int

    def _make(self, groups: list[Group]) -> None:
        self.num_kv_cache_groups: int = len(groups)
        self.has_sliding_window_groups: bool = any(group.reach for group in groups)
        self._expansions = [group.columns_per_block for group in groups]
        self._expands = max(self._expansions, default=1) > 1
        self._groups = groups
        self._without_slots = [g for g, group in enumerate(groups) if group.reach and not group.has_slots]
        device = torch.device(self.device)
        if not groups:  # a model without a KV cache
            self.__rows__ = None
            self.block_tables: list[Any] = []
            self.input_block_tables: list[Any] = []
            self.slot_mappings: Any = torch.zeros((0, self.max_num_batched_tokens), dtype=torch.int64, device=device)
            return
        config = BlockTableConfig(
            groups=[
                KVCacheGroup(
                    block_size=group.block_size,
                    blocks_per_row=group.max_num_blocks,
                    # A window is cut out of linear groups alone; slots that one of these must not have are PAD below.
                    slot_mode="linear" if group.has_slots or group.reach else "none",
                    sharded=group.is_sharded and group.has_slots,
                    sliding_window=group.reach + 1 if group.reach else None,  # R11 counts the current token too
                    allow_null=True,
                )
                for group in groups
            ],
            max_num_reqs=self.max_num_reqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=1,  # capacities are given
            steps_in_flight=COMMITS_IN_FLIGHT,
            context_parallel=ContextParallel(
                world_size=self.cp_size,
                rank=self.cp_rank,
                interleave_size=self.cp_interleave if self.cp_size > 1 else 1,
            ),
        )
        rows = self.__rows__ = StableRows(config, self.__backend__, device)
        self.block_tables = [RowsOfGroup(rows, group) for group in range(len(groups))]
        self.num_blocks: CountsOfRows = CountsOfRows(rows)
        self.input_block_tables = rows.batch_tables
        self.slot_mappings = rows.slots
        # Batch rows that others may have written to since they were last NULL, and whether in columns of any number.
        self.__foreign__, self.__is_dummy__ = 0, False
        self._make_layout_tensors()

    def _make_ptr_tensor(self, x: Iterable[Any]) -> Any:
        return torch.tensor([tensor.data_ptr() for tensor in x], dtype=torch.uint64, device=self.device)

    def _make_layout_tensors(self) -> None:
        assert self.__rows__ is not None
        tables, groups = self.__rows__.tables, self._groups
        with torch.inference_mode(False):
            self.block_table_ptrs: Any = self._make_ptr_tensor(tables)
            self.input_block_table_ptrs: Any = self._make_ptr_tensor(self.input_block_tables)
            of_groups: Any = {
                "block_table_strides": ([table.stride(0) for table in tables], torch.int64),
                "block_sizes_tensor": ([group.block_size for group in groups], torch.int32),
                **self._more_layout_tensors(),
            }
            for name, (values, dtype) in of_groups.items():
                setattr(self, name, torch.tensor(values, dtype=dtype, device=self.device))

    def _more_layout_tensors(self) -> dict[str, Any]:
        return {}

    def init_block_table_layout_tensors(self) -> None:
        """Fill what the device knows of the tables again: vLLM's memory was released and mapped again.

        The next `apply_staged_writes` sends all rows.
        """
        if self.__rows__ is not None:
            self._make_layout_tensors()
            self.__rows__.invalidate()

    def append_block_ids(self, req_index: int, new_block_ids: Sequence[Any], overwrite: bool) -> None:
        """Add blocks after what a row holds, or put them in its place.

        Args:
            req_index: the row.
            new_block_ids: one sequence of ints for each group.
            overwrite: whether the row is emptied before.

        Raises:
            RowOverflowError: a group's row cannot hold them; no group was changed.
            RowIndexError, ArgumentError, DtypeError: what no row can be or hold; no group was changed.
        """
        if self.redirect_writes_to_null_block:
            new_block_ids = [[0] * len(ids) for ids in new_block_ids]
        if self._expands and len(new_block_ids) == self.num_kv_cache_groups:
            new_block_ids = [*map(_expand, new_block_ids, self._expansions)]
        if self.__rows__ is None:
            return
        try:
            self.__rows__.append(req_index, new_block_ids, replaces=overwrite)
        except RowCapacityError as error:
            raise RowOverflowError(f"Block table write for request {req_index}: {error}") from None

    def apply_staged_writes(self) -> None:
        """Make every append so far visible to kernels, without a wait."""
        if self.__rows__ is not None:
            self.__rows__.commit()

    def gather_block_tables(
        self,
        idx_mapping: Any,
        num_reqs_padded: int,
        out: tuple[Any, ...] | None = None,
        out_ptrs: Any = None,
        num_computed_tokens: Any = None,
    ) -> tuple[Any, ...]:
        """Write the tables of a batch: its rows' blocks, NULL after them, and NULL in all rows after the batch.

        Args:
            idx_mapping: [num_reqs] int32. Batch index -> row; -1: NULL.
            num_reqs_padded: rows to return.
            out: [>= num_reqs_padded, max_num_blocks] int32 for each group. None: `input_block_tables`.
            out_ptrs: not looked at: `out` says where it is.
            num_computed_tokens: [max_num_reqs] int32. Row -> tokens before this step: in groups with a window, columns
                that lie wholly before its reach are NULL.
        """
        rows = self.__rows__
        if rows is None:
            return ()
        computed = None
        if num_computed_tokens is not None and self.has_sliding_window_groups:
            computed = num_computed_tokens[idx_mapping]  # of row -1 the last one's, for a batch row that is NULL anyway
        if out is not None:
            assert len(out) == self.num_kv_cache_groups
            rows.gather_elsewhere(idx_mapping, num_reqs_padded, computed, out)
            return tuple(table[:num_reqs_padded] for table in out)
        num_reqs = idx_mapping.shape[0]
        start, end = 0 if self.__is_dummy__ else num_reqs, max(num_reqs_padded, self.__foreign__)
        if start < end:
            torch._foreach_zero_(rows.batch_rows(start, end))
        rows.gather(idx_mapping, num_reqs_padded, computed)
        self.__foreign__, self.__is_dummy__ = num_reqs, False
        return rows.batch_rows(0, num_reqs_padded)

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[Any, ...]:
        """Return the first batch rows, all NULL; they may be written to until the next gather."""
        rows = self.__rows__
        if rows is None:
            return ()
        torch._foreach_zero_(rows.batch_rows(0, max(num_reqs, self.__foreign__)))
        self.__foreign__, self.__is_dummy__ = num_reqs, True
        return rows.batch_rows(0, num_reqs)

    def compute_slot_mappings(
        self, idx_mapping: Any, query_start_loc: Any, positions: Any, num_tokens_padded: int, out: Any = None
    ) -> Any:
        """Write the slot of every token of a batch, and PAD to the end.

        Args:
            idx_mapping: [num_reqs] int32. Batch index -> row; -1: its tokens get PAD.
            query_start_loc: [>= num_reqs + 1] int32. First token of each request.
            positions: [>= num_tokens] int64. Token -> its index in its request.
            num_tokens_padded: entries to return.
            out: [num_kv_cache_groups, entries] int64. None: `slot_mappings`.
        """
        slots = self.slot_mappings if out is None else out
        if self.__rows__ is not None:
            self.__rows__.map_slots(idx_mapping, query_start_loc, positions, out)
            for group in self._without_slots:
                slots[group].fill_(PAD_SLOT_ID)
        return slots[:, :num_tokens_padded]

    def get_dummy_slot_mappings(self, num_tokens: int) -> Any:
        """Return the first slots of every group, all PAD to the end of the buffer."""
        self.slot_mappings.fill_(PAD_SLOT_ID)
        return self.slot_mappings[:, :num_tokens]


def _expand(block_ids: Any, k: int) -> Any:
    """Return the columns of blocks; what is not a list of ints as it is, for the rows to refuse.

    Block 0 becomes the columns 0 .. k - 1, as in vLLM, not the core's filler.
    """
    if k == 1:
        return block_ids
    try:
        return [block_id * k + part for block_id in block_ids for part in range(k)]
    except TypeError:
        return block_ids


class Tables0251(StableTables):
    """vLLM 0.25.1's `BlockTables`. It knows block sizes of the manager and of the kernel."""

    def __init__(
        self,
        block_sizes: list[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_num_blocks_per_group: list[int],
        device: Any,
        kernel_block_sizes: list[int],
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_interleave: int = 1,
    ) -> None:
        self.block_sizes = block_sizes
        self.kernel_block_sizes: list[int] = kernel_block_sizes
        self.max_num_reqs, self.max_num_batched_tokens, self.device = max_num_reqs, max_num_batched_tokens, device
        self.cp_size, self.cp_rank, self.cp_interleave = cp_size, cp_rank, cp_interleave
        assert len(max_num_blocks_per_group) == len(block_sizes)
        self.blocks_per_kv_block: list[int] = [
            block_size // kernel_block_size
            for block_size, kernel_block_size in zip(block_sizes, kernel_block_sizes, strict=True)
        ]
        sizes = zip(kernel_block_sizes, self.blocks_per_kv_block, max_num_blocks_per_group, strict=True)
        self._make([Group(block_size, k, most * k) for block_size, k, most in sizes])


class Tables0320(StableTables):
    """vLLM 0.32.0's `BlockTables`."""

    def __init__(
        self,
        block_sizes: list[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_num_blocks_per_group: list[int],
        device: Any,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_interleave: int = 1,
        slot_mapping_enabled: list[bool] | None = None,
        dcp_sharded: list[bool] | None = None,
    ) -> None:
        self._set(block_sizes, max_num_reqs, max_num_batched_tokens, device, (cp_size, cp_rank, cp_interleave))
        self._make(self._groups_of(max_num_blocks_per_group, slot_mapping_enabled, dcp_sharded, None))

    def _set(
        self,
        block_sizes: list[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        device: Any,
        shares: tuple[int, int, int],
    ) -> None:
        self.block_sizes = block_sizes
        self.max_num_reqs, self.max_num_batched_tokens, self.device = max_num_reqs, max_num_batched_tokens, device
        self.cp_size, self.cp_rank, self.cp_interleave = shares

    def _groups_of(
        self,
        max_num_blocks_per_group: list[int],
        slot_mapping_enabled: list[bool] | None,
        dcp_sharded: list[bool] | None,
        sliding_window_reach: list[int] | None,
    ) -> list[Group]:
        number = len(self.block_sizes)
        if sliding_window_reach is None or self.cp_size > 1:  # a column is not a run of tokens there
            sliding_window_reach = [0] * number
        lists: tuple[list[Any], ...] = (
            max_num_blocks_per_group,
            [True] * number if slot_mapping_enabled is None else slot_mapping_enabled,
            [True] * number if dcp_sharded is None else dcp_sharded,
            sliding_window_reach,
        )
        assert all(len(values) == number for values in lists)
        self._slot_mapping_enabled, self._dcp_sharded, self._sliding_window_reach = lists[1:]
        return [Group(size, 1, *values) for size, *values in zip(self.block_sizes, *lists, strict=True)]

    def _more_layout_tensors(self) -> dict[str, Any]:
        return {
            "slot_mapping_enabled": (self._slot_mapping_enabled, torch.bool),
            "dcp_sharded": (self._dcp_sharded, torch.bool),
        }


class Tables0330(Tables0320):
    """vLLM 0.33.0's `BlockTables`."""

    def __init__(
        self,
        block_sizes: list[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_num_blocks_per_group: list[int],
        device: Any,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_interleave: int = 1,
        slot_mapping_enabled: list[bool] | None = None,
        dcp_sharded: list[bool] | None = None,
        sliding_window_reach: list[int] | None = None,
    ) -> None:
        self._set(block_sizes, max_num_reqs, max_num_batched_tokens, device, (cp_size, cp_rank, cp_interleave))
        self._make(self._groups_of(max_num_blocks_per_group, slot_mapping_enabled, dcp_sharded, sliding_window_reach))

    def _more_layout_tensors(self) -> dict[str, Any]:
        return {**super()._more_layout_tensors(), "sliding_window_reach": (self._sliding_window_reach, torch.int32)}
