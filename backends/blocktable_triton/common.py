"""What the kernels in Triton begin with: how they are made, the geometry of a group, the arithmetic of the contract."""

# ruff: noqa: N803 - Triton writes compile-time arguments in capitals.
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from blocktable.backend import GROUP_FIELDS
from blocktable.device import FEATURES as _FEATURES
from blocktable.device import INT32_MAX as _INT32_MAX

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether `triton.jit` made interpreted functions when this module was loaded."""

INT32_MAX = tl.constexpr(_INT32_MAX)
SLOT_MODE_RING = tl.constexpr(1)
SLOT_MODE_NONE = tl.constexpr(2)

# What a table's groups need, as bits of FEATURES, in the order of `blocktable.device.FEATURES`.
HAS_SHARDS, HAS_MODES, HAS_NULL_PADS, HAS_WINDOWS, HAS_ODD_SIZES, HAS_LARGE_POSITIONS, OVERLAPS, CHECKED = (
    tl.constexpr(1 << bit) for bit in range(len(_FEATURES))
)


def _field(name: str) -> Any:
    """Return the place of a field in a group's row of `groups`."""
    return tl.constexpr(GROUP_FIELDS.index(name))


NUM_FIELDS = tl.constexpr(len(GROUP_FIELDS))
TABLE_START, WIDTH, TOKENS_PER_COLUMN, BLOCKS_PER_KV_BLOCK, SLOT_MODE = map(
    _field, ("table_start", "width", "tokens_per_column", "blocks_per_kv_block", "slot_mode")
)
NULL_IS_PAD, SLIDING_WINDOW, WORLD_SIZE, RANK, INTERLEAVE_SIZE = map(
    _field, ("null_is_pad", "sliding_window", "world_size", "rank", "interleave_size")
)
COLUMN_SHIFT, FILLER, NULL_START, PAD_SLOT_ID, BATCH_START = map(
    _field, ("column_shift", "filler", "null_start", "pad_slot_id", "batch_start")
)
CHECKS, LIVES_START, HELD_START, BLOCK_STAMPS, SLOT_STAMPS, NOTES_START, COPIES_START = map(
    _field, ("checks", "lives_start", "held_start", "block_stamps", "slot_stamps", "notes_start", "copies_start")
)


def _jit(function: Any) -> Any:
    """Make a kernel whose arguments are never specialised: neither 1, nor multiples of 16, nor values above 2**31."""
    names = [name for name, kind in function.__annotations__.items() if kind != "tl.constexpr"]
    return triton.jit(function, do_not_specialize=names, do_not_specialize_on_alignment=names)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr):
    """An address as a pointer; the interpreter types arguments by their value, so 64 bits are asked for here."""
    return address.to(tl.int64).to(tl.pointer_type(DTYPE))


@triton.jit
def _divide(a, b):
    """A // b for a >= 0 and b > 0, as wide as `a`: 64-bit division costs some 70 instructions."""
    if a.dtype == tl.int32:
        quotient = (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int32)
    else:
        quotient = (a.to(tl.uint64) // b.to(tl.uint64)).to(tl.int64)
    return quotient


@triton.jit
def _local_length(tokens, group_ptr):
    """How many of the first `tokens` tokens this rank holds (R19)."""
    world_size = tl.load(group_ptr + WORLD_SIZE)
    if world_size > 1:
        rank, interleave_size = tl.load(group_ptr + RANK), tl.load(group_ptr + INTERLEAVE_SIZE)
        turn = world_size * interleave_size
        turns = _divide(tokens, turn)
        rest = tokens - turns * turn - rank * interleave_size
        tokens = turns * interleave_size + tl.minimum(tl.maximum(rest, 0), interleave_size)
    return tokens


@triton.jit
def _row_of(idx_mapping, i, num_reqs, max_num_rows):
    """Row of a batch index; -1 for a padding entry, after the batch and for an index below 0. No branch: _map_tile."""
    row = tl.load(_pointer(idx_mapping, tl.int32) + i, mask=(i >= 0) & (i < num_reqs), other=-1)
    return tl.where((row >= 0) & (row < max_num_rows), row, -1)


@triton.jit
def _is_missing(block_id, null_start, blocks_per_kv_block):
    """Whether table entries stand for no block (R5)."""
    return (block_id - null_start).to(tl.uint32) < blocks_per_kv_block.to(tl.uint32)
