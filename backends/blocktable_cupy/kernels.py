"""Launchers of the four kernels in kernels.cu: they name the sizes, choose the grid, and launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from blocktable import BlockTableConfig

INT32_MAX = 2**31 - 1
MAX_GRID_Y = 65535
TILE, EMULATED_TILE = 128, 32
MANY_SLOTS = 1 << 18
"""About one slot for each thread that a large GPU keeps resident."""

SLOT_TYPES = {"int64": "long long", "int32": "int"}

Kernel = Any  # called with (grid, block, args, stream=)


def _int32(value: int) -> np.int32:
    """An exact scalar: CuPy hands on the bytes of what it is given."""
    if not -(2**31) <= value <= INT32_MAX:
        raise OverflowError(f"{value} does not fit the kernel's int")
    return np.int32(value)


def module_options(config: BlockTableConfig) -> tuple[str, ...]:
    """Return the macros that kernels.cu is compiled with: the slots' type, and what no group of the table needs."""
    groups = config.groups
    features = {
        "HAS_SHARDS": config.context_parallel.world_size > 1 and any(group.is_sharded for group in groups),
        "HAS_MODES": any(group.slot_mode != "linear" for group in groups),
        "HAS_NULL_PADS": any(group.null_is_pad for group in groups),
        "HAS_WINDOWS": any(group.sliding_window is not None for group in groups),
        "HAS_ODD_SIZES": any(group.tokens_per_column.bit_count() != 1 for group in groups),
    }
    return (f"SLOT_T={SLOT_TYPES[config.slot_dtype]}", *(f"{name}={int(value)}" for name, value in features.items()))


def is_long_launch(num_slots: int, tile: int) -> bool:
    """Whether warps map chunks of tokens: where one token a thread would fill the GPU many times over.

    The emulation, whose blocks are small, does so early: its tests are to run both ways.
    """
    few = MANY_SLOTS if tile > EMULATED_TILE else EMULATED_TILE
    return few < num_slots < INT32_MAX - 512  # a chunk counts its tokens in int


def requests_per_token(num_reqs: int, num_positions: int) -> int:
    """Return the mean number of requests in a token times 2**32, rounded up: what a kernel guesses a request from."""
    return min(-(-(num_reqs << 32) // max(num_positions, 1)), 1 << 32)


def tokens_per_thread(is_long: bool) -> int:
    """Return how many tokens a thread maps: CHUNK / WARP of kernels.cu in a long launch."""
    return 8 if is_long else 1


def _grid_x(entries: int, tile: int) -> int:
    return min(-(-entries // tile), INT32_MAX // max(tile, 1))


def launch_scatter_writes(
    kernel: Kernel,
    tile: int,
    staged: int,  # address of a packed commit: offsets, starts, values
    num_ranges: int,
    num_values: int,
    arena: int,  # address
    stream: Any,
) -> None:
    """Launch scatter_writes; nothing for no values."""
    if num_values == 0:
        return
    starts = staged + 8 * num_ranges
    values = starts + 4 * (num_ranges + 1)
    arguments = (
        np.uint64(staged),
        np.uint64(starts),
        np.uint64(values),
        _int32(num_ranges),
        _int32(num_values),
        np.uint64(arena),
    )
    kernel((_grid_x(num_values, tile), 1), (tile,), arguments, stream=stream)


def launch_null_stale_columns(
    kernel: Kernel,
    tile: int,
    idx_mapping: int,  # address; 0: identity
    num_reqs: int,
    num_reqs_padded: int,
    max_num_reqs: int,
    groups: int,  # address
    num_groups: int,
    arena: int,  # address
    arena_size: int,
    batch: int,  # address
    stream: Any,
) -> None:
    """Launch null_stale_columns; an empty batch too: a larger one may have come before."""
    arguments = (
        np.uint64(idx_mapping),
        _int32(num_reqs),
        _int32(num_reqs_padded),
        _int32(max_num_reqs),
        np.uint64(groups),
        _int32(num_groups),
        np.uint64(arena),
        np.int64(arena_size),
        np.uint64(batch),
    )
    kernel((max(num_reqs_padded, 1), min(num_groups, MAX_GRID_Y)), (tile,), arguments, stream=stream)


def launch_gather_block_tables(
    kernel: Kernel,
    tile: int,
    idx_mapping: int,  # address; 0: identity
    num_computed_tokens: int,  # address; 0: no window is cut
    num_reqs: int,
    num_reqs_padded: int,
    max_num_reqs: int,
    groups: int,  # address
    num_groups: int,
    arena: int,  # address
    arena_size: int,
    batch: int,  # address
    stream: Any,
) -> None:
    """Launch gather_block_tables."""
    arguments = (
        np.uint64(idx_mapping),
        np.uint64(num_computed_tokens),
        _int32(num_reqs),
        _int32(num_reqs_padded),
        _int32(max_num_reqs),
        np.uint64(groups),
        _int32(num_groups),
        np.uint64(arena),
        np.int64(arena_size),
        np.uint64(batch),
    )
    kernel((max(num_reqs_padded, 1), min(num_groups, MAX_GRID_Y)), (tile,), arguments, stream=stream)


def launch_map_slots(
    kernels: tuple[Kernel, Kernel],  # map_slots, map_slots_long
    tile: int,
    idx_mapping: int,  # address; 0: identity
    query_start_loc: int,  # address
    positions: int,  # address
    num_reqs: int,
    num_positions: int,
    max_num_reqs: int,
    groups: int,  # address
    first_group: int,
    num_groups: int,
    arena: int,  # address
    slots: int,  # address
    slots_stride: int,
    num_slots: int,
    stream: Any,
) -> None:
    """Launch map_slots, or its twin for long launches; nothing for no slots."""
    if num_slots == 0:
        return
    is_long = is_long_launch(num_slots * num_groups, tile)
    kernel = kernels[1] if is_long else kernels[0]
    arguments = (
        np.uint64(idx_mapping),
        np.uint64(query_start_loc),
        np.uint64(positions),
        _int32(num_reqs),
        _int32(num_positions),
        _int32(max_num_reqs),
        np.uint64(groups),
        _int32(first_group),
        _int32(num_groups),
        np.uint64(arena),
        np.uint64(slots),
        np.int64(slots_stride),
        _int32(num_slots),
        np.int64(requests_per_token(num_reqs, num_positions)),
    )
    blocks = _grid_x(num_slots, tile * tokens_per_thread(is_long))
    kernel((blocks, min(num_groups, MAX_GRID_Y)), (tile,), arguments, stream=stream)
