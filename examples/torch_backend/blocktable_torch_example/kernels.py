"""The four plain kernels in Triton, written to be read. What they compute is R10 to R16 and R19 of docs/spec.md.

    arena: [arena.size] int32. The filled counts [num_groups, max_num_rows], then the rows of each group.
    batch: [batch_entries + 1 ..] int32. How many columns each batch row holds, [num_groups, max_num_reqs], then the
        batch rows of each group, and then how many rows the last batch had.
    groups: [.., len(GROUP_FIELDS)] int64. The geometry of each group, `BlockTableConfig.group_fields`.
    idx_mapping, num_computed_tokens: [num_reqs] int32, batch index -> row, tokens.
    query_start_loc: [num_reqs + 1] int32. First token of each request.
    positions: [num_positions] int64, token -> its index in its request.
    slots: [num_groups, slots_stride] int64 or int32. The first num_slots of each group are written.

The other arguments are numbers, of the bits that the layer's `SIGNATURES` say. Programs take their work in strides, so
that any grid will do.
"""

import triton
import triton.language as tl

from blocktable.backend import GROUP_FIELDS

SLOT_MODE_RING, SLOT_MODE_NONE = tl.constexpr(1), tl.constexpr(2)

# Places in a group's row of `groups`.
NUM_FIELDS = tl.constexpr(len(GROUP_FIELDS))
TABLE_START, BATCH_START = (tl.constexpr(GROUP_FIELDS.index(name)) for name in ("table_start", "batch_start"))
WIDTH = tl.constexpr(GROUP_FIELDS.index("width"))
TOKENS_PER_COLUMN = tl.constexpr(GROUP_FIELDS.index("tokens_per_column"))
BLOCKS_PER_KV_BLOCK = tl.constexpr(GROUP_FIELDS.index("blocks_per_kv_block"))
SLOT_MODE, NULL_IS_PAD = tl.constexpr(GROUP_FIELDS.index("slot_mode")), tl.constexpr(GROUP_FIELDS.index("null_is_pad"))
SLIDING_WINDOW = tl.constexpr(GROUP_FIELDS.index("sliding_window"))
WORLD_SIZE, RANK = tl.constexpr(GROUP_FIELDS.index("world_size")), tl.constexpr(GROUP_FIELDS.index("rank"))
INTERLEAVE_SIZE = tl.constexpr(GROUP_FIELDS.index("interleave_size"))
FILLER, NULL_START = tl.constexpr(GROUP_FIELDS.index("filler")), tl.constexpr(GROUP_FIELDS.index("null_start"))
PAD_SLOT_ID = tl.constexpr(GROUP_FIELDS.index("pad_slot_id"))


@triton.jit
def last_start(starts, size, value, is_wanted):
    """Return for each value the last of `size` ascending starts that is not above it, or else the first."""
    found = value * 0
    while size > 1:
        half = size // 2
        start = tl.load(starts + found + half, mask=is_wanted, other=0)
        found = tl.where(start <= value, found + half, found)
        size -= half
    return found


@triton.jit
def row_of(idx_mapping, i, num_reqs, max_num_rows):
    """Return the row of a batch index; -1 for a padding entry and after the batch."""
    row = tl.load(idx_mapping + i, mask=i < num_reqs, other=-1)
    return tl.where((row >= 0) & (row < max_num_rows), row, -1)


@triton.jit
def place_of(offsets, starts, num_ranges, i, is_value):
    """Return in which of some packed ranges the values `i` lie, and where in the arena."""
    n = last_start(starts, num_ranges, i, is_value)
    offset = tl.load(offsets + n, mask=is_value, other=0).to(tl.int64)  # a range may end above 32 bits
    return n, offset + i - tl.load(starts + n, mask=is_value, other=0)


@triton.jit
def apply_changes(
    changes,  # Writes.pack_changes lays them out
    num_singles, num_ranges, num_range_values, num_constant_ranges, num_constants, arena,
    num_groups, max_num_reqs, batch_entries, batch, copy_parts, checker, mark, last_mark,  # for step_batch
    tile: tl.constexpr,
):  # fmt: skip
    """Write the changes of a commit into the arena."""
    # step 1: keep the counts that step_batch replaces
    # There is no step_batch here.
    first, stride = tl.program_id(0) * tile, tl.num_programs(0) * tile
    # step 2: store the single values
    for start in range(first, num_singles, stride):
        i = start + tl.arange(0, tile)
        is_value = i < num_singles
        offset = tl.load(changes + i, mask=is_value, other=0)
        value = tl.load(changes + num_singles + i, mask=is_value, other=0)
        tl.store(arena + offset, value, mask=is_value)
    # step 3: store the ranges
    offsets = changes + 2 * num_singles
    starts, values = offsets + num_ranges, offsets + 2 * num_ranges
    for start in range(first, num_range_values, stride):
        i = start + tl.arange(0, tile)
        is_value = i < num_range_values
        _, offset = place_of(offsets, starts, num_ranges, i, is_value)
        tl.store(arena + offset, tl.load(values + i, mask=is_value, other=0), mask=is_value)
    # step 4: store the constant ranges
    offsets = values + num_range_values
    starts, values = offsets + num_constant_ranges, offsets + 2 * num_constant_ranges
    for start in range(first, num_constants, stride):
        i = start + tl.arange(0, tile)
        is_value = i < num_constants
        n, offset = place_of(offsets, starts, num_constant_ranges, i, is_value)
        tl.store(arena + offset, tl.load(values + n, mask=is_value, other=0), mask=is_value)


@triton.jit
def null_stale_columns(
    idx_mapping, num_reqs, num_reqs_padded, max_num_reqs, max_num_rows,
    groups, num_groups, arena, batch_entries, batch,
    tile: tl.constexpr,
):  # fmt: skip
    """Make every batch row NULL after the columns that its row fills."""
    num_rows = tl.maximum(tl.load(batch + batch_entries), num_reqs_padded)  # an earlier batch may have had more
    # step 1: which batch row and group
    for g in range(tl.program_id(1), num_groups, tl.num_programs(1)):
        group, count = groups + NUM_FIELDS * g, arena + max_num_rows.to(tl.int64) * g
        held_columns, width = batch + max_num_reqs.to(tl.int64) * g, tl.load(group + WIDTH)
        for i in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            # step 2: how many columns its row fills
            row = row_of(idx_mapping, i, num_reqs, max_num_rows)
            columns = tl.load(count + row, mask=row >= 0, other=0)
            # step 3: NULL over what an earlier batch left after them
            held, batch_row = tl.load(held_columns + i), batch + tl.load(group + BATCH_START) + width * i
            for first in range(columns, held, tile):
                column = first + tl.arange(0, tile)
                tl.store(batch_row + column, tl.load(group + FILLER), mask=column < held)


@triton.jit
def gather_block_tables(
    idx_mapping, num_computed_tokens, num_reqs, num_reqs_padded, max_num_reqs, max_num_rows,
    groups, num_groups, arena, batch_entries, batch,
    tile: tl.constexpr,
):  # fmt: skip
    """Write the columns that the batch's rows fill, and remember how many there are."""
    tl.store(batch + batch_entries, num_reqs_padded)  # every program stores the same
    # step 1: which batch row and group
    for g in range(tl.program_id(1), num_groups, tl.num_programs(1)):
        group, count = groups + NUM_FIELDS * g, arena + max_num_rows.to(tl.int64) * g
        held_columns, width = batch + max_num_reqs.to(tl.int64) * g, tl.load(group + WIDTH)
        for i in range(tl.program_id(0), num_reqs_padded, tl.num_programs(0)):
            # step 2: how many columns its row fills
            row = row_of(idx_mapping, i, num_reqs, max_num_rows)
            columns = tl.load(count + row, mask=row >= 0, other=0)
            # step 3: how many of them the window has passed
            window = tl.load(group + SLIDING_WINDOW)  # 0: there is none
            computed = tl.load(num_computed_tokens + i, mask=i < num_reqs, other=0)
            passed = tl.where(window > 0, tl.maximum(computed - window + 1, 0), 0)
            rank, interleave_size = tl.load(group + RANK), tl.load(group + INTERLEAVE_SIZE)
            turn = tl.load(group + WORLD_SIZE) * interleave_size  # one token, where the group is not sharded
            rest = tl.minimum(tl.maximum(passed % turn - rank * interleave_size, 0), interleave_size)
            first_kept = (passed // turn * interleave_size + rest) // tl.load(group + TOKENS_PER_COLUMN)
            # step 4: store the columns in use, NULL before them
            table_row = arena + tl.load(group + TABLE_START) + width * row
            batch_row, filler = batch + tl.load(group + BATCH_START) + width * i, tl.load(group + FILLER)
            for first in range(0, columns, tile):
                column = first + tl.arange(0, tile)
                is_kept = (column >= first_kept) & (column < columns)
                block_id = tl.load(table_row + column, mask=is_kept, other=filler)
                tl.store(batch_row + column, block_id, mask=column < columns)
            # step 5: remember how many columns the batch row holds
            tl.store(held_columns + i, columns)


@triton.jit
def map_slots(
    idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows,
    groups, first_group, num_groups, arena, slots, slots_stride, num_slots,
    requests_per_token,  # for a guess that saves the bisection; not used here
    checker, findings,  # for kernels that check; these do not
    tile: tl.constexpr,
):  # fmt: skip
    """Write the slot of every token, and PAD from the last real token to the end of the slots."""
    end_of_tokens = tl.minimum(tl.load(query_start_loc + num_reqs), tl.minimum(num_positions, num_slots))
    # step 1: which token and group
    for y in range(tl.program_id(1), num_groups, tl.num_programs(1)):
        group, count = groups + NUM_FIELDS * (first_group + y), arena + max_num_rows.to(tl.int64) * (first_group + y)
        slot_mode, tokens_per_column = tl.load(group + SLOT_MODE), tl.load(group + TOKENS_PER_COLUMN)
        for first in range(tl.program_id(0).to(tl.int64) * tile, num_slots, tl.num_programs(0) * tile):
            token = first + tl.arange(0, tile)
            # step 2: PAD after the last real token
            is_valid = token < tl.where(slot_mode == SLOT_MODE_NONE, 0, end_of_tokens)
            position = tl.load(positions + token, mask=is_valid, other=-1)
            is_valid = is_valid & (position >= 0)  # asked before anything is divided
            # step 3: which request and row
            request = last_start(query_start_loc, num_reqs, token, is_valid)
            is_valid = is_valid & (tl.load(query_start_loc + request, mask=is_valid, other=0) <= token)
            row = row_of(idx_mapping, request, num_reqs, max_num_rows)
            is_valid = is_valid & (row >= 0)
            # step 4: whose token it is, and its index among this rank's tokens
            world_size, interleave_size = tl.load(group + WORLD_SIZE), tl.load(group + INTERLEAVE_SIZE)
            local = tl.where(is_valid, position, 0)
            turn = local // interleave_size
            is_valid = is_valid & (turn % world_size == tl.load(group + RANK))
            local = turn // world_size * interleave_size + local % interleave_size
            # step 5: which column, and whether the row fills it
            columns = tl.load(count + row, mask=is_valid, other=0)
            ring = columns * tokens_per_column
            end = tl.minimum(tl.load(query_start_loc + request + 1, mask=is_valid, other=0), end_of_tokens)
            last_position = tl.maximum(tl.load(positions + end - 1, mask=is_valid & (end > 0), other=0), 0)
            ahead = tl.where(slot_mode == SLOT_MODE_RING, last_position - position, -1)
            is_valid = is_valid & (ahead < ring)  # otherwise a later token of the request has the place
            local = tl.where(slot_mode == SLOT_MODE_RING, local % tl.maximum(ring, 1), local)
            column = local // tokens_per_column
            is_valid = is_valid & (column < columns)
            # step 6: which kernel block
            table_row = arena + tl.load(group + TABLE_START) + tl.load(group + WIDTH) * row
            block_id = tl.load(table_row + column, mask=is_valid, other=0)
            blocks_per_kv_block = tl.load(group + BLOCKS_PER_KV_BLOCK).to(tl.uint32)
            is_missing = (block_id - tl.load(group + NULL_START)).to(tl.uint32) < blocks_per_kv_block
            is_valid = is_valid & ((tl.load(group + NULL_IS_PAD) == 0) | (is_missing == 0))
            # step 7: store the slot
            slot = block_id * tokens_per_column + local % tokens_per_column
            slot = tl.where(is_valid, slot, tl.load(group + PAD_SLOT_ID))
            tl.store(slots + slots_stride * y + token, slot, mask=token < num_slots)
