"""Hypothesis strategies: geometries, block ids and batches of the sizes that the profile allows.

They draw few numbers and spread them out (a start and a stride instead of a position for every token): what is drawn
is what Hypothesis has to shrink, and drawing costs more than the kernels of an emulated backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from blocktable import BlockTableConfig, ContextParallel, KVCacheGroup
from blocktable_conformance import profiles
from blocktable_conformance.oracle import Geometry, OracleTable

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

ODD_ROWS = [-1, -7, INT32_MIN, INT32_MAX]
"""Entries of an idx_mapping that are not a row of any table."""

ODD_POSITIONS = [-1, -2, -(2**40), INT64_MIN, 2**31, 2**32 + 1, 2**40, INT64_MAX]
"""Positions that have no slot in a linear group."""

ARRAYS = [(None, None, None), (np.int64, np.int32, np.int64), (np.int32, np.int64, np.int32), (None, np.int32, None)]
"""Dtypes of (rows, block ids, counts) of a bulk call; None: lists. The compiled host path takes the second one."""

Draw = Callable[[st.SearchStrategy[Any]], Any]


def _rarely(draw: Draw, one_in: int) -> bool:
    """Return True one time in so many. The number asked for lies inside the range: Hypothesis likes its ends."""
    return int(draw(st.integers(0, one_in - 1))) == one_in // 2


@st.composite
def groups(draw: Draw, share: ContextParallel) -> KVCacheGroup:
    """Draw one group of any mode; sharded where the interleave size allows it."""
    kernel_block_size = draw(st.sampled_from([4, 1, 2, 3, 5, 8, 16]))
    blocks_per_kv_block = draw(st.sampled_from([1, 1, 2, 3]))
    block_size = kernel_block_size * blocks_per_kv_block
    slot_mode = draw(st.sampled_from([*["linear"] * 5, "ring", "ring", "none", "cross"]))
    shardable = slot_mode == "linear" and (share.world_size == 1 or block_size % share.interleave_size == 0)
    most = max(1, profiles.current().max_columns // blocks_per_kv_block)
    window = None if slot_mode == "cross" else draw(st.sampled_from([None, None, 1, 7, 16]))
    fixed = draw(st.booleans())
    blocks_per_row = draw(st.integers(1, min(most, 6))) if fixed else None
    if slot_mode == "ring" and window is not None:  # a ring holds its window (R14)
        blocks_per_row = min(max(blocks_per_row or 1, -(-window // block_size)), most)
        window = min(window, blocks_per_row * block_size)
    num_blocks = draw(st.sampled_from([None, None, 8, 1000]))
    null_block_id = draw(st.sampled_from([0, 0, -1, 0 if num_blocks is None else num_blocks - 1, 5]))
    in_null_block = max(null_block_id, 0) * block_size + block_size - 1 if null_block_id >= 0 else -7
    beyond = -7 if num_blocks is None else num_blocks * block_size + 3
    return KVCacheGroup(
        block_size=block_size,
        kernel_block_size=kernel_block_size if draw(st.booleans()) or blocks_per_kv_block > 1 else None,
        num_blocks=num_blocks,
        sliding_window=window,
        slot_mode=slot_mode,
        sharded=draw(st.sampled_from([None, False])) if shardable else False,
        null_block_id=null_block_id,
        allow_null=draw(st.booleans()),
        null_is_pad=draw(st.booleans()),
        pad_slot_id=draw(st.sampled_from([-1, -1, -1, -2, in_null_block, beyond])),
        blocks_per_row=blocks_per_row,
        extra_blocks=0 if blocks_per_row is not None else draw(st.integers(0, 1)),
    )


@st.composite
def shares(draw: Draw) -> ContextParallel:
    """Draw one rank's share; often that of a world of one."""
    world_size = draw(st.sampled_from([1, 1, 1, 2, 3, 4]))
    rank = draw(st.integers(0, world_size - 1))
    return ContextParallel(world_size=world_size, rank=rank, interleave_size=draw(st.sampled_from([1, 2, 3, 4, 8])))


@st.composite
def configs(draw: Draw, share: ContextParallel | None = None) -> BlockTableConfig:
    """Draw a config of one to three groups of different geometry, inside the profile's sizes.

    Now and then its rows are more or fewer than those of a batch.
    """
    profile = profiles.current()
    parallel = draw(shares()) if share is None else share
    chosen = draw(st.lists(groups(parallel), min_size=1, max_size=3))
    longest = draw(st.integers(1, max_model_len(chosen, parallel)))
    lookahead_tokens = draw(st.integers(0, min(3, longest - 1)))
    options = {
        "groups": chosen,
        "max_num_reqs": draw(st.integers(1 if _rarely(draw, 8) else 3, profile.max_rows)),
        "max_num_batched_tokens": draw(st.integers(1 if _rarely(draw, 8) else 12, profile.max_tokens)),
        "max_model_len": longest - lookahead_tokens,
        "lookahead_tokens": lookahead_tokens,
        "context_parallel": parallel,
        "max_num_rows": draw(st.integers(1, profile.max_rows + 3)) if _rarely(draw, 4) else None,
    }
    alignment = draw(st.sampled_from([1, 4, 12, 16, 128]))
    aligned = BlockTableConfig(**options, width_alignment=alignment)
    narrow = all(aligned.width(group) <= profile.max_columns for group in range(len(chosen)))
    return aligned if narrow else BlockTableConfig(**options, width_alignment=1)


def max_model_len(chosen: Sequence[KVCacheGroup], share: ContextParallel) -> int:
    """Return the longest request whose rows stay inside the profile's columns, in every group."""
    longest = 10_000
    for group in chosen:
        if group.blocks_per_row is None:
            blocks = profiles.current().max_columns // group.blocks_per_kv_block - group.extra_blocks
            longest = min(longest, blocks * group.block_size * (share.world_size if group.is_sharded else 1))
    return longest


def distinct_rows(num_rows: int) -> st.SearchStrategy[list[int]]:
    """Draw distinct rows in any order, none too."""
    return st.lists(st.integers(0, num_rows - 1), unique=True, max_size=num_rows)


def named_groups(num_groups: int) -> st.SearchStrategy[list[int] | None]:
    """Draw the groups whose slots a call asks for, in any order; often all of them, which are then not named."""
    some = st.lists(st.integers(0, num_groups - 1), min_size=1, max_size=num_groups, unique=True)
    return st.one_of(st.none(), some)


def _room(oracle: OracleTable, group: int, row: int, *, replace: bool) -> int:
    return oracle.shapes[group].capacity - (0 if replace else len(oracle.rows[group][row]))


@st.composite
def row_ids(draw: Draw, oracle: OracleTable, row: int, *, replace: bool, fit: bool = False) -> Any:
    """Draw the block ids of a single append or set: such that fit, but without `fit` now and then one too many."""
    per_group: list[Any] = []
    for group, shape in enumerate(oracle.shapes):
        room = _room(oracle, group, row, replace=replace)
        per_group.append(_stretched(draw, shape, draw(st.integers(0, min(room, 4)))))
    if not fit and _rarely(draw, 8):
        group = draw(st.integers(0, len(per_group) - 1))
        per_group[group] = _stretched(draw, oracle.shapes[group], _room(oracle, group, row, replace=replace) + 1)
    return per_group[0] if len(per_group) == 1 and draw(st.booleans()) else per_group


@st.composite
def mappings(draw: Draw, oracle: OracleTable, group: int) -> tuple[Any, Any]:
    """Draw (old_ids, new_ids) of a remap: some ids that rows hold, perhaps others, to each other's places or to any."""
    shape = oracle.shapes[group]
    held = sorted({block for blocks in oracle.rows[group] for block in blocks if block is not None})
    old = draw(st.lists(st.sampled_from(held), unique=True, max_size=4)) if held else []
    old += [block for block in _stretched(draw, shape, 1) if block != shape.null_block_id and block not in old]
    new = _stretched(draw, shape, len(old)) if draw(st.booleans()) else draw(st.permutations(old))
    ids_dtype = draw(st.sampled_from([None, np.int64, np.int32]))
    return as_given(old, ids_dtype), as_given(new, ids_dtype)


@st.composite
def replacements(draw: Draw, oracle: OracleTable, group: int, rows: Sequence[int]) -> tuple[Any, ...]:
    """Draw (rows, group, starts, block_ids, counts) of a bulk replacement: inside the rows, except for one in eight."""
    held, shape = [len(oracle.rows[group][row]) for row in rows], oracle.shapes[group]
    starts = [min(pair) for pair in zip(_spread(draw, len(rows), 4), held, strict=True)]
    room = [number - start for number, start in zip(held, starts, strict=True)]
    counts = _fitting(draw, room, fit=False)
    rows_dtype, ids_dtype, counts_dtype = draw(st.sampled_from(ARRAYS))
    ids = as_given(_stretched(draw, shape, sum(counts)), ids_dtype)
    return as_given(rows, rows_dtype), group, as_given(starts, counts_dtype), ids, as_given(counts, counts_dtype)


def as_given(values: Any, dtype: Any) -> Any:
    """Return a call's integers as an array of `dtype`, or as they are for None."""
    return values if dtype is None or values is None else np.array(values, dtype)


@st.composite
def integers_as_given(draw: Draw, values: Any) -> Any:
    """Draw how a call gets its integers: as a list, or as an array of int64 or int32."""
    return as_given(values, draw(st.sampled_from([None, np.int64, np.int32])))


@st.composite
def bulk_calls(
    draw: Draw, oracle: OracleTable, rows: Sequence[int], *, replace: bool, fit: bool = False
) -> tuple[Any, Any, Any]:
    """Draw (rows, block_ids, counts) of a bulk call: counts shared or per group, lists or arrays, sometimes nothing.

    Args:
        oracle: the table.
        rows: of the call.
        replace: whether the rows' blocks are replaced.
        fit: never over capacity, and never nothing in place of a group's ids.
    """
    shapes = oracle.shapes
    room = [[_room(oracle, group, row, replace=replace) for row in rows] for group in range(len(shapes))]
    shared = draw(st.booleans())
    if shared:
        counts = [_fitting(draw, [min(column) for column in zip(*room, strict=True)], fit)] * len(shapes)
    else:
        counts = [_fitting(draw, rooms, fit) for rooms in room]
    flat: list[Any] = [_stretched(draw, shape, sum(numbers)) for shape, numbers in zip(shapes, counts, strict=True)]
    if not fit and _rarely(draw, 8):
        flat[draw(st.integers(0, len(shapes) - 1))] = None
    rows_dtype, ids_dtype, counts_dtype = draw(st.sampled_from(ARRAYS))
    flat = [as_given(ids, ids_dtype) for ids in flat]
    ids: Any = flat[0] if len(shapes) == 1 and draw(st.booleans()) else flat
    return as_given(rows, rows_dtype), ids, as_given(counts[0] if shared else counts, counts_dtype)


def _fitting(draw: Draw, room: list[int], fit: bool) -> list[int]:
    """Return how many blocks each row gets: no more than there is room for, except one time in eight."""
    counts = _spread(draw, len(room), max(room, default=0) + 2)
    over = not fit and _rarely(draw, 8)
    return counts if over else [min(pair) for pair in zip(counts, room, strict=True)]


def _spread(draw: Draw, number: int, limit: int) -> list[int]:
    """Return `number` values below `limit` from a start and a stride."""
    if number == 0:
        return []
    first, stride = draw(st.integers(0, limit - 1)), draw(st.integers(0, min(limit - 1, 7)))
    return [(first + stride * index) % limit for index in range(number)]


def _stretched(draw: Draw, shape: Geometry, number: int) -> list[int]:
    """Return `number` ids that a group takes, from two drawn numbers."""
    lowest, limit = -1 if shape.null_block_id == -1 and shape.allow_null else 0, shape.block_id_limit
    first, stride = draw(st.integers(lowest, limit - 1)), draw(st.sampled_from([1, 1, 0, 3]))
    ids = [lowest + (first - lowest + index * stride) % (limit - lowest) for index in range(number)]
    if shape.allow_null:
        return ids
    other = (shape.null_block_id + 1) % limit
    return [other if block_id == shape.null_block_id else block_id for block_id in ids]


@dataclass(frozen=True)
class BatchDraw:
    """The inputs of one step.

    Attributes:
        idx_mapping: [num_reqs], or None: the identity.
        query_start_loc: [num_reqs + 1].
        positions: [num_tokens], which may be more or fewer than query_start_loc says.
        num_reqs_padded: at least num_reqs; None: left out.
        num_tokens_padded: at most the buffer; None: left out.
        num_computed_tokens: [num_reqs], or None.
    """

    idx_mapping: list[int] | None
    query_start_loc: list[int]
    positions: list[int]
    num_reqs_padded: int | None
    num_tokens_padded: int | None
    num_computed_tokens: list[int] | None

    @property
    def num_reqs(self) -> int:
        """Requests of the batch."""
        return len(self.query_start_loc) - 1


@st.composite
def batches(draw: Draw, config: BlockTableConfig, oracle: OracleTable, *, in_place: bool = False) -> BatchDraw:
    """Draw a batch over a table: any rows, padding entries, empty requests, positions inside and outside the rows.

    Args:
        config: of the table.
        oracle: the table; its rows say which padding rows are empty.
        in_place: draw an `idx_mapping` of None now and then.
    """
    most_reqs, num_rows, num_tokens = config.max_num_reqs, oracle.num_rows, config.max_num_batched_tokens
    num_reqs = 0 if _rarely(draw, 10) else draw(st.integers(1, most_reqs))
    idx_mapping: list[int] | None = _idx_mapping(draw, num_reqs, num_rows)
    padding = most_reqs - num_reqs
    if in_place and num_reqs <= num_rows and _rarely(draw, 4):
        idx_mapping, padding = None, min(padding, _empty_rows_after(oracle, num_reqs))
    lengths = _spread(draw, num_reqs, 6)
    first = draw(st.sampled_from([0, 0, 0, 2]))
    starts = [first + sum(lengths[:request]) for request in range(num_reqs + 1)]
    mapping = range(num_reqs) if idx_mapping is None else idx_mapping
    positions = _positions(draw, oracle, mapping, starts)
    return BatchDraw(
        idx_mapping,
        starts,
        positions[:num_tokens],
        draw(st.sampled_from([None, num_reqs, num_reqs + padding])),
        draw(st.sampled_from([None, num_tokens, num_tokens // 2])),
        _computed_tokens(draw, config, num_reqs),
    )


def _with_an_odd_one(draw: Draw, values: list[int], odd: Sequence[int]) -> list[int]:
    """Return the values, a third of the time with one of `odd` among them."""
    if values and _rarely(draw, 3):
        values[draw(st.integers(0, len(values) - 1))] = draw(st.sampled_from(odd))
    return values


def _idx_mapping(draw: Draw, num_reqs: int, num_rows: int) -> list[int]:
    return _with_an_odd_one(draw, _spread(draw, num_reqs, num_rows), [*ODD_ROWS, num_rows])


def _empty_rows_after(oracle: OracleTable, num_reqs: int) -> int:
    """Return how many rows from `num_reqs` on are empty, up to the first that is not."""
    occupied = [row for row in range(num_reqs, oracle.num_rows) if any(group[row] for group in oracle.rows)]
    return min(occupied, default=oracle.num_rows) - num_reqs


def _positions(draw: Draw, oracle: OracleTable, mapping: Sequence[int], starts: list[int]) -> list[int]:
    """Return positions that run up or down inside the requests' rows, and a little past them.

    One of them is odd now and then, and they are sometimes one too many or too few.
    """
    group = draw(st.integers(0, len(oracle.shapes) - 1))
    reaches = [_reach(oracle, group, row) for row in mapping]
    begins, stride = _spread(draw, len(mapping), max(reaches, default=0) + 3), draw(st.sampled_from([1, 1, -1, 0, 7]))
    positions = [0] * starts[0]
    for begin, reach, (first, end) in zip(begins, reaches, pairwise(starts), strict=True):
        positions += [begin % (reach + 3) + stride * index for index in range(end - first)]
    _with_an_odd_one(draw, positions, ODD_POSITIONS)
    surplus = draw(st.sampled_from([0, 0, 1, -1]))
    return [*positions, 0] if surplus > 0 else positions[: len(positions) + surplus]


def _reach(oracle: OracleTable, group: int, row: int) -> int:
    """Return how many tokens a row holds in a group, over all ranks."""
    if not 0 <= row < oracle.num_rows:
        return 0
    shape = oracle.shapes[group]
    return len(oracle.rows[group][row]) * shape.block_size * (1 if shape.share is None else shape.share.world_size)


def _computed_tokens(draw: Draw, config: BlockTableConfig, num_reqs: int) -> list[int] | None:
    if draw(st.booleans()):
        return None
    return _with_an_odd_one(draw, _spread(draw, num_reqs, config.max_model_len + 1), [INT32_MAX, INT32_MIN, -1])
