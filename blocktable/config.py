"""Geometry of a block table: groups, capacity, width, the arena (R1-R3, R14, R16, R18-R20)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from blocktable.arrays import IntArray, Ints
from blocktable.check_plan import MARKS_START, NOTES, CheckPlan, CheckRegions, lay_out_checks
from blocktable.checks import int_array, int_scalar
from blocktable.constants import NO_NULL_BLOCK, NULL_BLOCK_ID, PAD_SLOT_ID
from blocktable.context_parallel import ContextParallel
from blocktable.errors import ArgumentError, ConfigError

SlotMode = Literal["linear", "ring", "none", "cross"]
SlotDtype = Literal["int64", "int32"]

LAYOUT_VERSION = 1
"""Version of the arena's layout; part of the fingerprint."""

ARENA_ALIGNMENT = 32
"""int32 entries in 128 bytes: where each group's rows start."""

OVERREAD_TOKENS = 128
"""Attention kernels read whole tiles of the table, up to this many tokens past a row's last column."""

INT32_LIMIT = 2**31

LIMIT_ADVICE = {
    "sliding_window": "leave it None for full attention",
    "max_num_reqs": "batch indices are int32",
    "max_num_rows": "rows are int32",
    "max_num_batched_tokens": "tokens of a step are counted in int32",
    "pad_slot_id": "slots are int64",
}
"""Fields that have an upper limit -> why, or what to do."""


def _normalise_int(instance: object, name: str, minimum: int, limit: int | None = None) -> None:
    """Make a field a plain int (numpy integers are taken too), or raise. limit: it must be below it."""
    owner, value = type(instance).__name__, getattr(instance, name)
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ConfigError(f"{owner}: {name} must be an int, got {value!r} of type {type(value).__name__}.")
    if value < minimum:
        raise ConfigError(f"{owner}: {name} must be at least {minimum}, got {value}.")
    if limit is not None and value >= limit:
        raise ConfigError(f"{owner}: {name} must be below {limit}, got {value}; {LIMIT_ADVICE[name]}.")
    object.__setattr__(instance, name, int(value))


@dataclass(frozen=True, kw_only=True)
class KVCacheGroup:
    """One KV cache group: the layers that share one block table.

    Args:
        block_size: tokens in a manager block.
        kernel_block_size: tokens in the attention kernel's block; divides `block_size`. None: `block_size`.
        num_blocks: manager blocks in this group's cache; ids must be below it. None: not checked.
        sliding_window: tokens, the current one included. None: full attention.
        slot_mode: "linear", "ring" (positions wrap around the row), "none" (the group has no slots) or "cross"
            (cross-attention: slots only where `compute_slot_mappings(groups=...)` names the group).
        sharded: over the context-parallel ranks. None: True for "linear", else False.
        null_block_id: the block that stands for none, and fills table entries without a block. 0, or another block that
            the engine never allocates; -1: there is none, every id from 0 on is real, and tables hold -1 there.
        allow_null: whether the engine may hand in `null_block_id`, as a hole.
        null_is_pad: whether a token whose block is the null block gets `pad_slot_id`; where there is none it does.
        pad_slot_id: slot of a token that must not be written: negative, at least `num_blocks * block_size`, or inside
            the null block.
        blocks_per_row: fixed capacity of a row in manager blocks (state groups). None: from `max_model_len`.
        extra_blocks: manager blocks added to the capacity that `max_model_len` gives.
        pool: name of the blocks that this group's ids count. Groups of one name share their ids, as vLLM's do; None:
            the group has its own. The checker alone asks for it.

    Raises:
        ConfigError: a value is impossible, or two of them clash.

    Rules: R1, R3, R5, R7, R13, R14, R18, R38.
    """

    block_size: int
    kernel_block_size: int | None = None
    num_blocks: int | None = None
    sliding_window: int | None = None
    slot_mode: SlotMode = "linear"
    sharded: bool | None = None
    null_block_id: int = NULL_BLOCK_ID
    allow_null: bool = False
    null_is_pad: bool = False
    pad_slot_id: int = PAD_SLOT_ID
    blocks_per_row: int | None = None
    extra_blocks: int = 0
    pool: str | None = None

    def __post_init__(self) -> None:
        owner = type(self).__name__
        _normalise_int(self, "block_size", 1)
        for name in ("kernel_block_size", "num_blocks", "sliding_window", "blocks_per_row"):
            if getattr(self, name) is not None:
                _normalise_int(self, name, 1, INT32_LIMIT if name == "sliding_window" else None)
        _normalise_int(self, "extra_blocks", 0)
        for name, nullable in (("sharded", True), ("allow_null", False), ("null_is_pad", False)):
            value = getattr(self, name)
            if not (isinstance(value, bool) or (nullable and value is None)):
                raise ConfigError(f"{owner}: {name} must be a bool{' or None' if nullable else ''}, got {value!r}.")
        if self.block_size % self.tokens_per_column:
            raise ConfigError(
                f"{owner}: kernel_block_size {self.kernel_block_size} does not divide block_size {self.block_size}; "
                "choose a kernel_block_size that divides it."
            )
        if self.slot_mode != "none" and self.block_id_limit * self.block_size > 2**63:
            raise ConfigError(
                f"{owner}: slots of block_size {self.block_size} with block ids up to {self.block_id_limit - 1} do not "
                "fit 64 bits; set num_blocks, or a smaller block_size."
            )
        if self.slot_mode not in get_args(SlotMode):
            raise ConfigError(f"{owner}: slot_mode must be one of {get_args(SlotMode)}, got {self.slot_mode!r}.")
        if self.sharded and self.slot_mode != "linear":
            raise ConfigError(
                f'{owner}: a group with slot_mode="{self.slot_mode}" cannot be sharded over context-parallel ranks; '
                "leave sharded unset or set it to False."
            )
        if self.blocks_per_row is not None and self.extra_blocks:
            raise ConfigError(
                f"{owner}: extra_blocks is added to a capacity that comes from max_model_len; with blocks_per_row "
                f"{self.blocks_per_row} add the {self.extra_blocks} blocks there instead."
            )
        if self.slot_mode == "cross" and self.sliding_window is not None:
            raise ConfigError(
                f'{owner}: a group with slot_mode="cross" has no sliding window; leave sliding_window unset.'
            )
        if not (self.pool is None or isinstance(self.pool, str)):
            raise ConfigError(f"{owner}: pool must be a name or None, got {self.pool!r}.")
        self._check_null()
        self._check_pad()

    def _check_null(self) -> None:
        owner = type(self).__name__
        _normalise_int(self, "null_block_id", NO_NULL_BLOCK)
        if self.null_block_id >= self.block_id_limit:
            reason = "num_blocks" if self.block_id_limit == self.num_blocks else f"2**31 // {self.blocks_per_kv_block}"
            raise ConfigError(
                f"{owner}: null_block_id {self.null_block_id} is outside the cache: it must be below "
                f"{self.block_id_limit} ({reason}), or -1 where no block stands for none."
            )

    def _check_pad(self) -> None:
        owner = type(self).__name__
        _normalise_int(self, "pad_slot_id", -(2**63), 2**63)
        pad, size, first = self.pad_slot_id, self.block_size, self.null_block_id * self.block_size
        is_in_null_block = self.null_block_id >= 0 and first <= pad < first + size
        if 0 <= pad < self.block_id_limit * size and not is_in_null_block:
            beyond = f"at least {self.num_blocks * size} (num_blocks * block_size)" if self.num_blocks else ""
            raise ConfigError(
                f"{owner}: pad_slot_id {pad} may be the slot of a token; it must be negative, "
                + (f"{beyond}, " if beyond else "beyond the cache (which needs num_blocks), ")
                + f"or inside the null block {self.null_block_id}."
            )

    @property
    def tokens_per_column(self) -> int:
        """Tokens in a kernel block: `kernel_block_size`, or `block_size` where that is None."""
        return self.block_size if self.kernel_block_size is None else self.kernel_block_size

    @property
    def blocks_per_kv_block(self) -> int:
        """Kernel blocks in a manager block."""
        return self.block_size // self.tokens_per_column

    @property
    def is_sharded(self) -> bool:
        """Whether the context-parallel ranks share this group's tokens."""
        return self.slot_mode == "linear" if self.sharded is None else self.sharded

    @property
    def filler(self) -> int:
        """What a table entry without a block holds: the null block's first kernel block, or -1 (R5)."""
        return self.null_block_id * self.blocks_per_kv_block if self.null_block_id >= 0 else NO_NULL_BLOCK

    @property
    def null_start(self) -> int:
        """The f of R5: an entry is missing where `uint32(entry - f) < blocks_per_kv_block`."""
        return self.null_block_id * self.blocks_per_kv_block

    @property
    def cut_window(self) -> int | None:
        """Tokens of the window that a gather cuts out: that of a linear group (R11)."""
        return self.sliding_window if self.slot_mode == "linear" else None

    @property
    def has_fixed_capacity(self) -> bool:
        """Whether the width is the capacity itself, without rounding (R3)."""
        return self.blocks_per_row is not None or self.slot_mode == "none"

    @property
    def block_id_limit(self) -> int:
        """Manager block ids must be below this (R7)."""
        limit = INT32_LIMIT // self.blocks_per_kv_block
        return limit if self.num_blocks is None else min(limit, self.num_blocks)


def row_capacity(
    group: KVCacheGroup, *, max_model_len: int, lookahead_tokens: int = 0, context_parallel_world_size: int = 1
) -> int:
    """Return how many manager blocks a row of `group` may hold.

    Rules: R3, R6.
    """
    if group.blocks_per_row is not None:
        return group.blocks_per_row
    tokens_per_block = group.block_size * (context_parallel_world_size if group.is_sharded else 1)
    return -(-(max_model_len + lookahead_tokens) // tokens_per_block) + group.extra_blocks


def row_width(
    group: KVCacheGroup,
    *,
    max_model_len: int,
    lookahead_tokens: int = 0,
    context_parallel_world_size: int = 1,
    width_alignment: int = 128,
) -> int:
    """Return how many columns (kernel blocks) a row of `group` has: the capacity, rounded up for attention kernels.

    The columns that rounding adds are always NULL: they never raise what an engine may append.

    Args:
        width_alignment: tokens; `width * kernel_block_size` becomes a multiple of it. 1 turns the rounding off.

    Rules: R3.
    """
    columns = group.blocks_per_kv_block * row_capacity(
        group,
        max_model_len=max_model_len,
        lookahead_tokens=lookahead_tokens,
        context_parallel_world_size=context_parallel_world_size,
    )
    if group.has_fixed_capacity:
        return columns
    step = width_alignment // math.gcd(width_alignment, group.tokens_per_column)
    return -(-columns // step) * step


@dataclass(frozen=True)
class Arena:
    """Where everything lives in the one int32 buffer of a table, on the host and on the device alike.

    First come the filled counts, `[num_groups, num_rows]`, in columns; then each group's rows, `[num_rows, width]`,
    each group on a 128-byte boundary. Entries after a group's last row, up to the next group, always hold its filler.
    Where kernels check, what the host tells them comes last (`CheckRegions`).

    Batch tables lie in a buffer of their own, laid out likewise: `BlockTableConfig.batch_arena`.

    Attributes:
        size: int32 entries in the buffer.
        num_groups: KV cache groups.
        num_rows: rows of each group: `max_num_rows` of the table, `max_num_reqs` of a batch.
        group_offsets: first entry of each group's rows.
        widths: columns of each group's rows.
        fillers: what an entry of each group without a block holds (R5).
        num_check_entries: entries after the tables.
    """

    size: int
    num_groups: int
    num_rows: int
    group_offsets: tuple[int, ...]
    widths: tuple[int, ...]
    fillers: tuple[int, ...]
    num_check_entries: int = 0

    def view(self, buffer: Any, group: int) -> Any:
        """Return the part of `buffer` that belongs to `group`, without a copy.

        Args:
            buffer: [size] int32. numpy, torch or CuPy: anything that slices and reshapes.
            group: 0 .. num_groups - 1: its rows, `[num_rows, width]`; -1: the filled counts, `[num_groups, num_rows]`.
        """
        if group == -1:
            return buffer[: self.num_groups * self.num_rows].reshape(self.num_groups, self.num_rows)
        start, width = self.group_offsets[group], self.widths[group]
        return buffer[start : start + self.num_rows * width].reshape(self.num_rows, width)

    @property
    def num_table_entries(self) -> int:
        """Entries of the counts and tables; those of checks come after them."""
        return self.size - self.num_check_entries

    def coordinates(self, entries: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return what entries of the buffer are: group, row and column of each, [n] int64.

        A filled count has group -1, its row, and its group for a column. What lies between two parts has a row, or for
        a filled count a group, that there is not.

        Args:
            entries: [n] int64.
        """
        groups = np.searchsorted(self.group_offsets, entries, "right") - 1
        starts, widths = np.array((0, *self.group_offsets)), np.array((self.num_rows, *self.widths))
        rows, columns = np.divmod(entries - starts[groups + 1], widths[groups + 1])
        of_counts = groups < 0
        return groups, np.where(of_counts, columns, rows), np.where(of_counts, rows, columns)

    @property
    def filled_parts(self) -> list[tuple[slice, int]]:
        """The parts of an empty table's buffer that do not hold 0, and what they hold: none with block 0 as NULL."""
        ends = (*self.group_offsets[1:], self.num_table_entries)
        parts = zip(self.group_offsets, ends, self.fillers, strict=True)
        return [(slice(start, end), filler) for start, end, filler in parts if filler]

    def empty(self) -> IntArray:
        """Return the buffer of an empty table, [size] int32 on the host."""
        buffer = np.zeros(self.size, np.int32)
        for part, filler in self.filled_parts:
            buffer[part] = filler
        return buffer


GROUP_FIELDS = (
    "table_start",
    "width",
    "tokens_per_column",
    "blocks_per_kv_block",
    "slot_mode",
    "null_is_pad",
    "sliding_window",
    "world_size",
    "rank",
    "interleave_size",
    "column_shift",
    "filler",
    "null_start",
    "pad_slot_id",
    "batch_start",
    "checks",
    "lives_start",
    "held_start",
    "block_stamps",
    "slot_stamps",
    "notes_start",
    "copies_start",
)
"""What a kernel must know of a group, in the order of `BlockTableConfig.group_fields`."""


@dataclass(frozen=True, kw_only=True)
class BlockTableConfig:
    """Everything that fixes the geometry and the memory of a table.

    Args:
        groups: one `KVCacheGroup` for each KV cache group.
        max_num_reqs: requests of a batch, at most: rows of the batch tables.
        max_num_batched_tokens: entries of each slot buffer.
        max_model_len: tokens of the longest request.
        lookahead_tokens: tokens a request may run ahead of `max_model_len` (speculative decoding).
        context_parallel: this rank's share of the tokens.
        width_alignment: tokens; see `row_width`.
        slot_dtype: "int64", or "int32" where every slot fits.
        steps_in_flight: commits whose device work may be unfinished before the next one waits (R9.3).
        max_num_rows: rows of the table, apart from those of a batch; either may be more. None: `max_num_reqs`.
        stale_rows: whether rows keep their blocks after their request has ended, until they are set again, as in vLLM's
            workers. The checker then asks less of a block that two rows hold (R38).
        check_plan: what kernels check; a table with `check="device"` sets it in a copy.

    Attributes:
        num_rows: rows of the table.

    Raises:
        ConfigError: a value is impossible, or two of them clash.

    Rules: R1, R3, R16, R18, R38.
    """

    groups: Sequence[KVCacheGroup]
    max_num_reqs: int
    max_num_batched_tokens: int
    max_model_len: int
    lookahead_tokens: int = 0
    context_parallel: ContextParallel = field(default_factory=ContextParallel)
    width_alignment: int = 128
    slot_dtype: SlotDtype = "int64"
    steps_in_flight: int = 2
    max_num_rows: int | None = None
    stale_rows: bool = False
    check_plan: CheckPlan | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        owner = type(self).__name__
        groups: Any = self.groups
        if (
            not isinstance(groups, Sequence)
            or not groups
            or not all(isinstance(group, KVCacheGroup) for group in groups)
        ):
            raise ConfigError(f"{owner}: groups must be a non-empty sequence of KVCacheGroup, got {self.groups!r}.")
        object.__setattr__(self, "groups", tuple(self.groups))
        for name in ("max_num_reqs", "max_num_batched_tokens", "max_model_len", "width_alignment", "steps_in_flight"):
            _normalise_int(self, name, 1, INT32_LIMIT if name in LIMIT_ADVICE else None)
        if self.max_num_rows is not None:
            _normalise_int(self, "max_num_rows", 1, INT32_LIMIT)
        _normalise_int(self, "lookahead_tokens", 0)
        if not isinstance(self.stale_rows, bool):
            raise ConfigError(f"{owner}: stale_rows must be a bool, got {self.stale_rows!r}.")
        if not isinstance(self.context_parallel, ContextParallel):
            raise ConfigError(f"{owner}: context_parallel must be a ContextParallel, got {self.context_parallel!r}.")
        if self.slot_dtype not in get_args(SlotDtype):
            raise ConfigError(f"{owner}: slot_dtype must be one of {get_args(SlotDtype)}, got {self.slot_dtype!r}.")
        for index, group in enumerate(self.groups):
            self._check_interleave(index, group)
            self._check_ring(index, group)
            if self.slot_dtype == "int32":
                self._check_int32_slots(index, group)

    def _check_interleave(self, index: int, group: KVCacheGroup) -> None:
        interleave_size = self.context_parallel.interleave_size
        if group.is_sharded and self.context_parallel.world_size > 1 and group.block_size % interleave_size:
            raise ConfigError(
                f"BlockTableConfig: interleave_size {interleave_size} does not divide block_size {group.block_size} of "
                f"group {index}; choose one that divides the block_size of every sharded group."
            )

    def _check_ring(self, index: int, group: KVCacheGroup) -> None:
        if group.slot_mode != "ring" or group.sliding_window is None:
            return
        blocks = self.capacity(index)
        if blocks * group.block_size < group.sliding_window:
            raise ConfigError(
                f"BlockTableConfig: the ring of group {index} is shorter than its window: {blocks} blocks of "
                f"{group.block_size} tokens for a sliding_window of {group.sliding_window}; set blocks_per_row to at "
                f"least {-(-group.sliding_window // group.block_size)}."
            )

    def _check_int32_slots(self, index: int, group: KVCacheGroup) -> None:
        if not -INT32_LIMIT <= group.pad_slot_id < INT32_LIMIT:
            raise ConfigError(
                f'BlockTableConfig: slot_dtype="int32" cannot hold pad_slot_id {group.pad_slot_id} of group {index}; '
                "choose -1, or int64 slots."
            )
        if group.slot_mode == "none":
            return
        if group.num_blocks is None:
            raise ConfigError(
                f'BlockTableConfig: slot_dtype="int32" needs num_blocks in every group that has slots; group {index} '
                "has none."
            )
        if group.num_blocks * group.block_size > INT32_LIMIT:
            raise ConfigError(
                f'BlockTableConfig: slot_dtype="int32" cannot hold the slots of group {index}: num_blocks '
                f"{group.num_blocks} * block_size {group.block_size} is above 2**31; use int64."
            )

    def _group(self, index: int) -> KVCacheGroup:
        if not 0 <= index < len(self.groups):
            raise ConfigError(f"group {index} does not exist: groups go from 0 to {len(self.groups) - 1}.")
        return self.groups[index]

    def _geometry(self) -> dict[str, int]:
        return {
            "max_model_len": self.max_model_len,
            "lookahead_tokens": self.lookahead_tokens,
            "context_parallel_world_size": self.context_parallel.world_size,
        }

    def capacity(self, group: int) -> int:
        """Return how many manager blocks a row of `group` may hold (R3)."""
        return row_capacity(self._group(group), **self._geometry())

    def width(self, group: int) -> int:
        """Return how many columns a row of `group` has (R3)."""
        return row_width(self._group(group), width_alignment=self.width_alignment, **self._geometry())

    def kernel_block_ids(self, group: int, ids: Ints) -> IntArray:
        """Return the kernel blocks that manager blocks consist of, as they stand in a row.

        Args:
            group: the group.
            ids: [n] ints. Manager block ids. The group's null_block_id, which `BlockTable.block_ids` returns for a
                hole, is the filler in all its columns.

        Returns:
            [n * blocks_per_kv_block] int32.

        Raises:
            ArgumentError: an id that the group cannot have.
            ConfigError, DtypeError: there is no such group; `ids` are not ints on the host.

        Rules: R2, R7.
        """
        geometry, blocks = self._group(int_scalar("group", group)), int_array("ids", ids)
        expansion, limit = geometry.blocks_per_kv_block, geometry.block_id_limit
        is_null = blocks == geometry.null_block_id
        wrong = np.flatnonzero(((blocks < 0) | (blocks >= limit)) & ~is_null)
        if wrong.size:
            raise ArgumentError(
                f"ids, index {wrong[0]}: block id {blocks[wrong[0]]} is outside 0 .. {limit - 1}, the ids of group "
                f"{group}."
            )
        columns = blocks.astype(np.int64)[:, None] * expansion + np.arange(expansion)
        columns[is_null] = geometry.filler
        return columns.astype(np.int32).ravel()

    @property
    def num_rows(self) -> int:
        """Rows of the table: `max_num_rows`, or `max_num_reqs` where that is None."""
        return self.max_num_reqs if self.max_num_rows is None else self.max_num_rows

    @cached_property
    def arena(self) -> Arena:
        """The layout of the table's one buffer."""
        arena = self._lay_out(self.num_rows)
        if self.check_plan is None:
            return arena
        end = self.check_regions.end
        return replace(arena, size=end, num_check_entries=end - arena.size)

    @cached_property
    def check_regions(self) -> CheckRegions:
        """Where what kernels check with lies; for a configuration with a `check_plan`."""
        assert self.check_plan is not None
        return lay_out_checks(self.check_plan, self.groups, self.num_rows, self._lay_out(self.num_rows).size)

    @cached_property
    def batch_arena(self) -> Arena:
        """The layout of a set's batch tables, in one buffer; its counts are the columns that each batch row holds."""
        is_same = self.num_rows == self.max_num_reqs and self.check_plan is None
        return self.arena if is_same else self._lay_out(self.max_num_reqs)

    def _lay_out(self, num_rows: int) -> Arena:
        widths = tuple(self.width(index) for index in range(len(self.groups)))
        offsets, end = [], len(self.groups) * num_rows
        for group, width in zip(self.groups, widths, strict=True):
            offsets.append(-(-end // ARENA_ALIGNMENT) * ARENA_ALIGNMENT)
            end = offsets[-1] + num_rows * width
            if width * group.tokens_per_column % OVERREAD_TOKENS:  # a kernel's whole tiles must stay inside the buffer
                end += -(-OVERREAD_TOKENS // group.tokens_per_column)
        fillers = tuple(group.filler for group in self.groups)
        return Arena(end, len(self.groups), num_rows, tuple(offsets), widths, fillers)

    def group_fields(self, *, is_named: bool = False, has_ring_windows: bool = False) -> IntArray:
        """Return `[num_groups, len(GROUP_FIELDS)]` int64: the geometry as kernels read it, one row a group.

        slot_mode counts "linear", "ring", "none" from 0: a "cross" group is "none" in a step and "linear" where a call
        names it, so that kernels know three modes. table_start is where the group's rows begin in the table's buffer,
        batch_start in that of the batch tables. sliding_window is the one that a gather cuts out, 0 where there is none
        (R11); a replicated group has a world of one; tokens_per_column is 1 << column_shift where it is a power of two.
        An entry is missing where `uint32(entry - null_start) < blocks_per_kv_block`, and its token is PAD where
        null_is_pad is set, as it is without a null block (R13). Of the fields of checks `checks` is 0 where nothing is
        checked: the kinds as bits (`CheckPlan.mask`); the others are as in `CheckRegions`.

        Args:
            is_named: for the calls that name the groups whose slots they want.
            has_ring_windows: for exports that show the true positions of a ring: its window is cut out as well (R35).
        """
        modes = {"linear": 0, "ring": 1, "none": 2, "cross": 0 if is_named else 2}
        shard, alone = self.context_parallel, ContextParallel()
        fields = []
        for index, group in enumerate(self.groups):
            share = shard if group.is_sharded else alone
            fields.append(
                (
                    self.arena.group_offsets[index],
                    self.arena.widths[index],
                    group.tokens_per_column,
                    group.blocks_per_kv_block,
                    modes[group.slot_mode],
                    group.null_is_pad or group.null_block_id < 0,
                    (group.sliding_window if has_ring_windows else group.cut_window) or 0,
                    share.world_size,
                    share.rank,
                    share.interleave_size,
                    group.tokens_per_column.bit_length() - 1,
                    group.filler,
                    group.null_start,
                    group.pad_slot_id,
                    self.batch_arena.group_offsets[index],
                    *self._check_fields(index),
                )
            )
        return np.array(fields, np.int64)

    def _check_fields(self, group: int) -> tuple[int, ...]:
        plan = self.check_plan
        if plan is None:
            return 0, 0, 0, -1, -1, 0, 0
        regions, pool = self.check_regions, plan.pools[group]
        held, copies = (regions.held[pool], regions.copies[pool]) if pool >= 0 else (0, 0)
        stamps = regions.block_stamps[group], regions.slot_stamps[group]
        notes = MARKS_START + (2 + NOTES * group) * self.num_rows
        return plan.mask(group), regions.lives, held, *stamps, notes, copies

    def fingerprint(self) -> str:
        """Return a hex digest of the geometry that two engines must share to exchange blocks.

        It covers block sizes, modes, sharding, world and interleave size and the layout version; neither the rank nor
        any maximum.
        """
        context_parallel = self.context_parallel
        geometry = {
            "layout_version": LAYOUT_VERSION,
            "world_size": context_parallel.world_size,
            "interleave_size": context_parallel.interleave_size,
            "groups": [
                [group.block_size, group.tokens_per_column, group.slot_mode, group.is_sharded] for group in self.groups
            ],
        }
        return hashlib.sha256(json.dumps(geometry, sort_keys=True).encode()).hexdigest()[:32]
