"""What the kernels in Numba look for where the table is checked (CHECKED), and the one that does nothing else."""

from __future__ import annotations

import numpy as np
from numba import cuda

from blocktable.check_plan import DEVICE_KINDS, MARKS_START, MAX_RECORDS, NOTES, RECORD
from blocktable.device import INT32_MAX
from blocktable_numba.common import (
    BLOCK_STAMPS,
    BLOCKS_PER_KV_BLOCK,
    CHECKS,
    COPIES_START,
    HAS_SHARDS,
    HELD_START,
    INTERLEAVE_SIZE,
    LIVES_START,
    NOTES_START,
    RANK,
    SLOT_STAMPS,
    TOKENS_PER_COLUMN,
    WORLD_SIZE,
    advance,
    atomic_add,
    atomic_exchange,
    device_function,
    divide,
    divide_32,
    row_of,
)

# Kinds of findings, counted from 1.
MISSING_BLOCK, UNSET_ROW, SHARED_BLOCK_WRITTEN, SLOT_WRITTEN_TWICE, POSITION_GAP, BAD_STARTS, NULL_WRITTEN = range(
    1, 1 + len(DEVICE_KINDS)
)


@device_function
def wants(groups, group, kind):
    """Whether a kind is among a group's."""
    return (groups[group + CHECKS] >> (kind - 1)) & 1 > 0


@device_function
def note(groups, group, arena, checker, findings, place, kind, g, row, token, position, entry):
    """Record a finding, unless this call has noted the like at `place` of the notes; g -1: it belongs to no group.

    The host trusts a record that has its number.
    """
    call = checker[0]
    number = np.int64(-1)
    if atomic_exchange(checker, groups[group + NOTES_START] + place, call) != call:
        number = np.int64(atomic_add(findings, 0, 1))
    if number >= 0 and number - findings[1] < MAX_RECORDS:
        record = (1 + number - divide_32(number, MAX_RECORDS) * MAX_RECORDS) * RECORD
        findings[record] = kind + 16 * (g + 1)
        findings[record + 1] = row
        findings[record + 2] = token
        findings[record + 3] = position & 0xFFFFFFFF
        findings[record + 4] = position >> 32
        findings[record + 5] = entry
        findings[record + 6] = arena[groups[group + LIVES_START] - 1]
        cuda.threadfence_system()
        findings[record + 7] = number + 1


@device_function
def writes_first_token(groups, group, positions, start, token, position, local, offset):
    """Whether this call writes the first token of a token's block, which lies `offset` tokens before it here."""
    first = local - offset
    before = np.int64(offset)
    if HAS_SHARDS and groups[group + WORLD_SIZE] > 1:
        interleave_size = groups[group + INTERLEAVE_SIZE]
        turn = divide(first, interleave_size)
        place = first - turn * interleave_size
        before = position - ((turn * groups[group + WORLD_SIZE] + groups[group + RANK]) * interleave_size + place)
    return before <= token - start and positions[max(token - before, 0)] == position - before


@device_function
def find_shared(groups, group, arena, checker, positions, row, start, token, position, local, entry):
    """Whether a token is about to be written into a block of another row's, as of the last commit."""
    block = divide(entry, groups[group + BLOCKS_PER_KV_BLOCK])
    is_found = (arena[groups[group + HELD_START] + (block >> 5)] >> (block & 31)) & 1 > 0
    if groups[group + BLOCK_STAMPS] >= 0:
        life = arena[groups[group + LIVES_START] + row]
        stamp = groups[group + BLOCK_STAMPS] + block
        writer = checker[stamp]
        if writer != life:
            writer = atomic_exchange(checker, stamp, life)
        is_found = is_found and writer != 0 and writer != life
        if is_found and arena[groups[group + COPIES_START] + block] == life:
            is_found = False
        if is_found:
            size = groups[group + TOKENS_PER_COLUMN] * groups[group + BLOCKS_PER_KV_BLOCK]
            offset = local - divide(local, size) * size
            if writes_first_token(groups, group, positions, start, token, position, local, offset):
                is_found = False
    return is_found


@device_function
def is_this_ranks(groups, group, position):
    """Whether this rank writes a position."""
    is_mine = True
    if HAS_SHARDS and groups[group + WORLD_SIZE] > 1:
        turn = divide(position, groups[group + INTERLEAVE_SIZE])
        is_mine = turn - divide(turn, groups[group + WORLD_SIZE]) * groups[group + WORLD_SIZE] == groups[group + RANK]
    return is_mine


@device_function
def check_token(
    groups, group, arena, checker, findings, positions, max_num_rows, g, row, start, token, position, local, entry,
    slot, is_row, is_inside, is_null,
):  # fmt: skip
    """Look at a token that this rank would write, as of the last commit.

    is_row: whether its row is in the table; is_inside: whether that has a column for it; is_null: whether that holds no
    block. One call of `note` for all kinds but one: each is a copy of it in the kernel.
    """
    lives_start = groups[group + LIVES_START]
    kind, notes = 0, np.int64(row)
    if not is_row:  # -1 is what says that there is none
        if row != -1 and arena[lives_start] != 0 and is_this_ranks(groups, group, position):
            kind = UNSET_ROW
            unsigned = np.int64(row) & 0xFFFFFFFF
            notes = unsigned - divide_32(unsigned, max_num_rows) * max_num_rows
    elif not is_inside:
        life = arena[lives_start + row]
        kind = MISSING_BLOCK if life > 0 else UNSET_ROW if life < 0 else 0
    elif is_null:
        kind = NULL_WRITTEN
    elif find_shared(groups, group, arena, checker, positions, row, start, token, position, local, entry):
        kind = SHARED_BLOCK_WRITTEN
    if kind > 0 and wants(groups, group, kind):
        is_unset = kind == UNSET_ROW
        place = NOTES * notes + (kind if is_row else 0)
        block = entry if is_inside else np.int64(-1)
        shown_group, noting = (-1, 0) if is_unset else (g, group)
        note(groups, noting, arena, checker, findings, place, kind, shown_group, row, token, position, block)
    if is_inside and not is_null and groups[group + SLOT_STAMPS] >= 0:
        call = checker[0]
        if atomic_exchange(checker, groups[group + SLOT_STAMPS] + slot, call) == call:
            place = NOTES * notes + SLOT_WRITTEN_TWICE
            note(groups, group, arena, checker, findings, place, SLOT_WRITTEN_TWICE, g, row, token, position, entry)


@device_function
def check_positions(groups, arena, positions, max_num_rows, checker, findings, row, start, end):
    """Look whether the positions of a request go on where those before have ended, and keep where they end."""
    lives_start = groups[LIVES_START]
    restart = arena[lives_start + max_num_rows + row]
    cap = arena[lives_start + 2 * np.int64(max_num_rows) + row]
    kept = MARKS_START + 2 * np.int64(restart - divide_32(restart, max_num_rows) * max_num_rows)
    number, mark = checker[kept], np.int64(checker[kept + 1])
    is_marked = number == restart or (cap >= 0 and number == restart - max_num_rows)
    if number != restart:
        mark = min(mark, np.int64(cap))
    first, last = positions[start], positions[end - 1]
    gap, at = np.int64(-1), np.int64(start)
    if is_marked and first > mark:
        gap = first
    end_position = last + 1
    if last - first != end - 1 - start:  # as a tree of drafts
        token = np.int64(start)
        while token < end:
            position = positions[token]
            end_position = max(end_position, position + 1)
            if is_marked and gap < 0 and position > mark + (token - start):
                gap, at = position, token
            token = advance(token, 1)
    if gap >= 0 and mark < INT32_MAX:
        note(groups, 0, arena, checker, findings, NOTES * row + POSITION_GAP, POSITION_GAP, -1, row, at, gap, -1)
    if is_marked:
        end_position = max(end_position, mark)
    # step 5: keep where they end
    checker[kept] = restart
    checker[kept + 1] = min(max(end_position, 0), INT32_MAX)


@device_function
def check_request(
    idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows, groups, arena, checker, findings, i
):  # fmt: skip
    """Look at a request: where its tokens begin, and whether its positions go on."""
    lives_start = groups[LIVES_START]
    # Before the first row operation there is nothing to be wrong about.
    if arena[lives_start] != 0:
        # step 3: whether its tokens begin and end where they can
        start, end = query_start_loc[i], query_start_loc[i + 1]
        is_bad = start > end or (i == 0 and start != 0) or (i == num_reqs - 1 and end > num_positions)
        stop = min(end, num_positions)
        if is_bad:
            if wants(groups, 0, BAD_STARTS):
                note(groups, 0, arena, checker, findings, BAD_STARTS, BAD_STARTS, -1, i, start, np.int64(end), -1)
        else:
            row = row_of(idx_mapping, i, num_reqs, max_num_rows)
            is_asked = start >= 0 and start < stop and row >= 0 and wants(groups, 0, POSITION_GAP)
            if is_asked and arena[lives_start + max(row, 0)] >= 0:
                # step 4: whether its positions go on where those before have ended
                check_positions(groups, arena, positions, max_num_rows, checker, findings, row, start, stop)


@cuda.jit
def check_requests(
    idx_mapping,  # [num_reqs] int32, batch index -> row
    query_start_loc,  # [num_reqs + 1] int32, first token of each request
    positions,  # [num_positions] int64, token -> its index in its request
    num_reqs, num_positions, max_num_rows, groups, arena, checker, findings,
):  # fmt: skip
    """Begin a call that maps slots: give it a number, and look at its requests."""
    # step 1: give the call a number
    if cuda.grid(1) == 0:
        checker[0] += 1
    # step 2: which request
    i = cuda.grid(1)
    while i < num_reqs:
        check_request(
            idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows,
            groups, arena, checker, findings, i,
        )  # fmt: skip
        i = advance(i, cuda.gridsize(1))
