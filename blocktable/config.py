"""Geometry of a block table: groups, capacity, width, the arena (R1-R3, R14, R16, R18-R20)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from blocktable.checks import int_array, int_scalar
from blocktable.constants import NULL_BLOCK_ID
from blocktable.context_parallel import ContextParallel
from blocktable.errors import ArgumentError, ConfigError

SlotMode = Literal["linear", "ring", "none"]
SlotDtype = Literal["int64", "int32"]

LAYOUT_VERSION = 1
"""Version of the arena's layout; part of the fingerprint."""

ARENA_ALIGNMENT = 32
"""int32 entries in 128 bytes: where each group's rows start."""

OVERREAD_TOKENS = 128
"""Attention kernels read whole tiles of the table, up to this many tokens past a row's last column."""

INT32_LIMIT = 2**31


def _normalise_int(instance: object, name: str, minimum: int) -> None:
    """Make a field a plain int (numpy integers are taken too), or raise."""
    owner, value = type(instance).__name__, getattr(instance, name)
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ConfigError(f"{owner}: {name} must be an int, got {value!r} of type {type(value).__name__}.")
    if value < minimum:
        raise ConfigError(f"{owner}: {name} must be at least {minimum}, got {value}.")
    object.__setattr__(instance, name, int(value))


@dataclass(frozen=True, kw_only=True)
class KVCacheGroup:
    """One KV cache group: the layers that share one block table.

    Args:
        block_size: tokens in a manager block.
        kernel_block_size: tokens in the attention kernel's block; divides `block_size`. None: `block_size`.
        num_blocks: manager blocks in this group's cache; ids must be below it. None: not checked.
        sliding_window: tokens, the current one included. None: full attention.
        slot_mode: "linear", "ring" (positions wrap around the row) or "none" (the group has no slots).
        sharded: over the context-parallel ranks. None: True for "linear", else False.
        allow_null: whether the engine may hand in block 0. None: True with a window or a mode other than "linear".
        null_is_pad: whether a token whose block is the NULL block gets `PAD_SLOT_ID`.
        blocks_per_row: fixed capacity of a row in manager blocks (state groups). None: from `max_model_len`.
        extra_blocks: manager blocks added to the capacity that `max_model_len` gives.

    Raises:
        ConfigError: a value is impossible, or two of them clash.

    Rules: R1, R3, R7, R14, R18.
    """

    block_size: int
    kernel_block_size: int | None = None
    num_blocks: int | None = None
    sliding_window: int | None = None
    slot_mode: SlotMode = "linear"
    sharded: bool | None = None
    allow_null: bool | None = None
    null_is_pad: bool = False
    blocks_per_row: int | None = None
    extra_blocks: int = 0

    def __post_init__(self) -> None:
        owner = type(self).__name__
        _normalise_int(self, "block_size", 1)
        for name in ("kernel_block_size", "num_blocks", "sliding_window", "blocks_per_row"):
            if getattr(self, name) is not None:
                _normalise_int(self, name, 1)
        _normalise_int(self, "extra_blocks", 0)
        for name, nullable in (("sharded", True), ("allow_null", True), ("null_is_pad", False)):
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
    def takes_null(self) -> bool:
        """Whether the engine may hand in block 0 (R7)."""
        if self.allow_null is not None:
            return self.allow_null
        return self.sliding_window is not None or self.slot_mode != "linear"

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

    First come the filled counts, `[num_groups, max_num_reqs]`, in columns; then each group's rows,
    `[max_num_reqs, width]`, each group on a 128-byte boundary. Entries between groups are always NULL.

    Attributes:
        size: int32 entries in the buffer.
        num_groups: KV cache groups.
        num_rows: rows of each group (`max_num_reqs`).
        group_offsets: first entry of each group's rows.
        widths: columns of each group's rows.
    """

    size: int
    num_groups: int
    num_rows: int
    group_offsets: tuple[int, ...]
    widths: tuple[int, ...]

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
)
"""What a kernel must know of a group, in the order of `BlockTableConfig.group_fields`."""


def overread_columns(width: int, kernel_block_size: int) -> int:
    """Return how many NULL columns must follow the last row, so that a kernel's whole tiles stay inside the buffer."""
    return 0 if width * kernel_block_size % OVERREAD_TOKENS == 0 else -(-OVERREAD_TOKENS // kernel_block_size)


@dataclass(frozen=True, kw_only=True)
class BlockTableConfig:
    """Everything that fixes the geometry and the memory of a table.

    Args:
        groups: one `KVCacheGroup` for each KV cache group.
        max_num_reqs: rows of the table, and rows of a batch.
        max_num_batched_tokens: entries of each slot buffer.
        max_model_len: tokens of the longest request.
        lookahead_tokens: tokens a request may run ahead of `max_model_len` (speculative decoding).
        context_parallel: this rank's share of the tokens.
        width_alignment: tokens; see `row_width`.
        slot_dtype: "int64", or "int32" where every slot fits.
        steps_in_flight: commits whose device work may be unfinished before the next one waits (R9).

    Raises:
        ConfigError: a value is impossible, or two of them clash.

    Rules: R1, R3, R16, R18.
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
            _normalise_int(self, name, 1)
        _normalise_int(self, "lookahead_tokens", 0)
        if not isinstance(self.context_parallel, ContextParallel):
            raise ConfigError(f"{owner}: context_parallel must be a ContextParallel, got {self.context_parallel!r}.")
        if self.slot_dtype not in get_args(SlotDtype):
            raise ConfigError(f"{owner}: slot_dtype must be one of {get_args(SlotDtype)}, got {self.slot_dtype!r}.")
        for index, group in enumerate(self.groups):
            self._check_interleave(index, group)
            if self.slot_dtype == "int32":
                self._check_int32_slots(index, group)

    def _check_interleave(self, index: int, group: KVCacheGroup) -> None:
        interleave_size = self.context_parallel.interleave_size
        if group.is_sharded and self.context_parallel.world_size > 1 and group.block_size % interleave_size:
            raise ConfigError(
                f"BlockTableConfig: interleave_size {interleave_size} does not divide block_size {group.block_size} of "
                f"group {index}; choose one that divides the block_size of every sharded group."
            )

    def _check_int32_slots(self, index: int, group: KVCacheGroup) -> None:
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

    def kernel_block_ids(self, group: int, ids: Any) -> np.ndarray[Any, Any]:
        """Return the kernel blocks that manager blocks consist of, as they stand in a row.

        Args:
            group: the group.
            ids: [n] ints. Manager block ids. The id of the NULL block, which `BlockTable.block_ids` returns for a
                hole, is NULL in all its columns.

        Returns:
            [n * blocks_per_kv_block] int32, n runs of ascending ids.

        Raises:
            ArgumentError: an id that the group cannot have.
            ConfigError, DtypeError: there is no such group; `ids` are no ints on the host.

        Rules: R2, R7.
        """
        geometry, blocks = self._group(int_scalar("group", group)), int_array("ids", ids)
        expansion, limit = geometry.blocks_per_kv_block, geometry.block_id_limit
        wrong = np.flatnonzero((blocks < 0) | (blocks >= limit))
        if wrong.size:
            raise ArgumentError(
                f"ids, index {wrong[0]}: block id {blocks[wrong[0]]} is outside 0 .. {limit - 1}, the ids of group "
                f"{group}."
            )
        columns = blocks.astype(np.int64)[:, None] * expansion + np.arange(expansion)
        columns[blocks == NULL_BLOCK_ID] = NULL_BLOCK_ID
        return columns.astype(np.int32).ravel()

    @cached_property
    def arena(self) -> Arena:
        """The layout of the table's one buffer."""
        widths = tuple(self.width(index) for index in range(len(self.groups)))
        offsets, end = [], len(self.groups) * self.max_num_reqs
        for group, width in zip(self.groups, widths, strict=True):
            offsets.append(-(-end // ARENA_ALIGNMENT) * ARENA_ALIGNMENT)
            end = offsets[-1] + self.max_num_reqs * width + overread_columns(width, group.tokens_per_column)
        return Arena(end, len(self.groups), self.max_num_reqs, tuple(offsets), widths)

    def group_fields(self) -> np.ndarray[Any, Any]:
        """Return `[num_groups, len(GROUP_FIELDS)]` int64: the geometry as kernels read it, one row a group.

        slot_mode counts "linear", "ring", "none" from 0; sliding_window is 0 where there is none; a replicated group
        has a world of one; tokens_per_column is 1 << column_shift where it is a power of two.
        """
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
                    get_args(SlotMode).index(group.slot_mode),
                    group.null_is_pad,
                    group.sliding_window or 0,
                    share.world_size,
                    share.rank,
                    share.interleave_size,
                    group.tokens_per_column.bit_length() - 1,
                )
            )
        return np.array(fields, np.int64)

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
