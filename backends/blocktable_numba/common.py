"""What the kernels in Numba begin with: the geometry of a group, and the arithmetic of the contract."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, types
from numba.cuda.core import config

from blocktable.backend import GROUP_FIELDS

# What the table's groups need (`KernelOptions.features`): the driver replaces these in a copy of a kernel.
HAS_SHARDS = True
HAS_MODES = True
HAS_NULL_PADS = True
HAS_WINDOWS = True
HAS_ODD_SIZES = True
CHECKED = True

SLOT_MODE_RING = 1
SLOT_MODE_NONE = 2

# Places in a row of BlockTableConfig.group_fields().
NUM_FIELDS = len(GROUP_FIELDS)
TABLE_START, WIDTH, TOKENS_PER_COLUMN, BLOCKS_PER_KV_BLOCK, SLOT_MODE = map(
    GROUP_FIELDS.index, ("table_start", "width", "tokens_per_column", "blocks_per_kv_block", "slot_mode")
)
NULL_IS_PAD, SLIDING_WINDOW, WORLD_SIZE, RANK, INTERLEAVE_SIZE, COLUMN_SHIFT = map(
    GROUP_FIELDS.index, ("null_is_pad", "sliding_window", "world_size", "rank", "interleave_size", "column_shift")
)
FILLER, NULL_START, PAD_SLOT_ID, BATCH_START = map(
    GROUP_FIELDS.index, ("filler", "null_start", "pad_slot_id", "batch_start")
)
CHECKS, LIVES_START, HELD_START, BLOCK_STAMPS, SLOT_STAMPS, NOTES_START, COPIES_START = map(
    GROUP_FIELDS.index,
    ("checks", "lives_start", "held_start", "block_stamps", "slot_stamps", "notes_start", "copies_start"),
)

# `inline`, so that a kernel compiles where there is no GPU: Numba asks one for its architecture to compile a call.
device_function = cuda.jit(device=True, inline="always")


@device_function
def advance(i, stride):
    """I + stride, unsigned: LLVM then neither counts a loop's turns, by a division, nor unrolls it."""
    return np.int64(np.uint64(i) + np.uint64(stride))


@device_function
def divide(a, b):
    """A // b for a >= 0 and b > 0: unsigned, which needs no care for signs, and in 32 bits where both operands fit."""
    return np.int64(np.uint64(a) // np.uint64(b))


@device_function
def divide_32(a, b):
    """A // b for 0 <= a < 2**32 and 0 < b < 2**32."""
    return np.int64(np.uint32(a) // np.uint32(b))


@device_function
def local_length(groups, group, tokens):
    """How many of the first `tokens` tokens this rank holds (R19)."""
    world_size, interleave_size = groups[group + WORLD_SIZE], groups[group + INTERLEAVE_SIZE]
    turn = world_size * interleave_size
    turns = divide(tokens, turn)
    rest = tokens - turns * turn - groups[group + RANK] * interleave_size
    return turns * interleave_size + min(max(rest, 0), interleave_size)


@device_function
def row_of(idx_mapping, batch_index, num_reqs, max_num_rows):
    """Row of a batch index; -1 for a padding entry and after the batch."""
    if batch_index >= num_reqs:
        return -1
    row = idx_mapping[batch_index]
    return row if 0 <= row < max_num_rows else -1


@device_function
def is_missing(entry, null_start, blocks_per_kv_block):
    """Whether an int64 entry of a table stands for no block: one comparison, unsigned."""
    return np.uint32(entry - null_start) < blocks_per_kv_block


_simulated_atomics = threading.Lock()


def atomic(operation, dtype):
    """Return what changes array[place] by a value of each thread, and gives what was there.

    Numba's own wants an array, not a pointer.
    """
    if config.ENABLE_CUDASIM:
        changes = {"add": np.add, "xchg": lambda _, value: value, "max": np.maximum, "umin": np.minimum}
        change: Callable[..., Any] = changes[operation]

        def simulated(array, place, value):
            entries = array.view(dtype)
            with _simulated_atomics:
                before = entries[place]
                entries[place] = change(before, dtype(value))
                return before

        return simulated

    from numba.cuda.extending import intrinsic  # the simulator has none

    @intrinsic
    def update(typing_context, array, place, value):
        def generate(context, builder, signature, arguments):
            pointer, index, new = arguments
            return builder.atomic_rmw(operation, builder.gep(pointer, [index]), new, "monotonic")

        return types.int32(types.CPointer(types.int32), types.int64, types.int32), generate

    return update


atomic_add, atomic_exchange = map(atomic, ("add", "xchg"), (np.int32, np.int32))
