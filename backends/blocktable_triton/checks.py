"""What the kernels in Triton look for where the table is checked (CHECKED), and the one that does nothing else."""

# ruff: noqa: N803 - Triton writes compile-time arguments in capitals.
from __future__ import annotations

import triton
import triton.language as tl

from blocktable import check_plan
from blocktable_triton.common import (
    BLOCK_STAMPS,
    BLOCKS_PER_KV_BLOCK,
    CHECKS,
    COPIES_START,
    HAS_SHARDS,
    HELD_START,
    INT32_MAX,
    INTERLEAVE_SIZE,
    LIVES_START,
    NOTES_START,
    NULL_START,
    RANK,
    SLOT_STAMPS,
    TOKENS_PER_COLUMN,
    WORLD_SIZE,
    _divide,
    _is_missing,
    _jit,
    _pointer,
)

# Kinds of findings, counted from 1.
MISSING_BLOCK, UNSET_ROW, SHARED_BLOCK_WRITTEN, SLOT_WRITTEN_TWICE, POSITION_GAP, BAD_STARTS, NULL_WRITTEN = (
    tl.constexpr(1 + index) for index in range(len(check_plan.DEVICE_KINDS))
)
MARKS_START, NOTES = tl.constexpr(check_plan.MARKS_START), tl.constexpr(check_plan.NOTES)
MAX_RECORDS, RECORD = tl.constexpr(check_plan.MAX_RECORDS), tl.constexpr(check_plan.RECORD)


@triton.jit
def _wants(kinds, KIND: tl.constexpr):
    """Whether a kind is among a group's. kinds: [n], one number: the interpreter makes no mask of one and a scalar."""
    return ((kinds >> (KIND - 1)) & 1) > 0


@triton.jit
def _note(checks, note_ptr, step, kind, g, row, token, position, entry):
    """Record a finding of each lane whose kind is not 0, unless this call has noted the like at note_ptr.

    All but step: [n]; g -1: it belongs to no group.
    """
    checker_ptr, finding_ptr = checks
    is_found = kind > 0
    if tl.max(kind, 0) > 0:
        call = tl.load(checker_ptr)
        before = tl.atomic_xchg(note_ptr, kind * 0 + call, mask=is_found)
        is_found = is_found & (before != call)
        number = tl.atomic_add(finding_ptr + kind * 0, kind * 0 + 1, mask=is_found)
        num_read = tl.load(finding_ptr + 1, volatile=True)
        is_kept = is_found & (number - num_read < MAX_RECORDS)
        record = finding_ptr + (tl.where(is_kept, number, 0) % MAX_RECORDS + 1) * RECORD
        tl.store(record, kind + 16 * (g + 1), mask=is_kept)
        tl.store(record + 1, row, mask=is_kept)
        tl.store(record + 2, token, mask=is_kept)
        tl.store(record + 3, position.to(tl.int32), mask=is_kept)
        tl.store(record + 4, (position >> 32).to(tl.int32), mask=is_kept)
        tl.store(record + 5, entry.to(tl.int32), mask=is_kept)
        tl.store(record + 6, kind * 0 + step, mask=is_kept)
        # The host trusts a record that has its number.
        tl.atomic_xchg(record + 7, number + 1, mask=is_kept, sem="release", scope="sys")


@triton.jit
def _writes_first_token(
    group_ptr, start, position_ptr, token, position, local, offset, is_asked, FEATURES: tl.constexpr
):
    """Whether this call writes the first token of a token's block, which lies `offset` tokens before it here."""
    first = local - offset
    before = offset.to(tl.int64)
    if HAS_SHARDS & FEATURES:
        world_size = tl.load(group_ptr + WORLD_SIZE)
        if world_size > 1:
            rank, interleave_size = tl.load(group_ptr + RANK), tl.load(group_ptr + INTERLEAVE_SIZE)
            turn = _divide(first, interleave_size)
            before = position - ((turn * world_size + rank) * interleave_size + (first - turn * interleave_size))
    is_there = is_asked & (before <= token - start)
    return is_there & (tl.load(position_ptr + token - before, mask=is_there, other=-1) == position - before)


@triton.jit
def _check_tokens(written, request, row, tokens, group_ptr, arena_ptr, FEATURES: tl.constexpr):
    """Look at tokens that are about to be written, as of the last commit, and at those that have no column."""
    position, local, block_id, slot, is_inside, is_outside, is_stranger = written
    start_ptr, position_ptr, _, token, g, checks, idx_mapping, groups_ptr, max_num_rows = tokens
    checker_ptr, _ = checks
    kinds, lives_start = tl.load(group_ptr + CHECKS), tl.load(group_ptr + LIVES_START)
    blocks_per_kv_block, block_stamps = tl.load(group_ptr + BLOCKS_PER_KV_BLOCK), tl.load(group_ptr + BLOCK_STAMPS)
    slot_stamps, step = tl.load(group_ptr + SLOT_STAMPS), tl.load(arena_ptr + lives_start - 1)
    held_start = tl.load(group_ptr + HELD_START)
    row, kinds = token * 0 + row, token.to(tl.int64) * 0 + tl.where(held_start > 0, kinds, 0)
    is_looked_at = is_inside | is_outside
    life = tl.load(arena_ptr + lives_start + row, mask=is_looked_at, other=0)
    is_null = is_inside & _is_missing(block_id, tl.load(group_ptr + NULL_START), blocks_per_kv_block)
    is_written = is_inside & (is_null == 0) & (kinds != 0)
    block = _divide(tl.where(is_written, block_id, 0), blocks_per_kv_block).to(tl.int32)
    held = tl.load(arena_ptr + held_start + (block >> 5), mask=is_written, other=0)
    is_shared = is_written & (((held >> (block & 31)) & 1) > 0)
    if block_stamps >= 0:
        stamp_ptr = checker_ptr + block_stamps + block
        writer = tl.load(stamp_ptr, mask=is_written, other=0)
        is_other = is_written & (writer != life)
        if tl.max(is_other.to(tl.int32), 0) > 0:
            writer = tl.atomic_xchg(stamp_ptr, life, mask=is_other)
        is_shared = is_shared & is_other & (writer != 0) & (writer != life)
        if tl.max(is_shared.to(tl.int32), 0) > 0:
            copy_ptr = arena_ptr + tl.load(group_ptr + COPIES_START) + block
            is_shared = is_shared & (tl.load(copy_ptr, mask=is_shared, other=0) != life)
            tokens_per_block = tl.load(group_ptr + TOKENS_PER_COLUMN) * blocks_per_kv_block
            place = tl.where(is_shared, local, 0).to(tl.int64)
            offset = place - _divide(place, tokens_per_block) * tokens_per_block
            start = tl.load(start_ptr + token * 0 + request, mask=is_shared, other=0)
            is_first = _writes_first_token(
                group_ptr, start, position_ptr, token, position, place, offset, is_shared, FEATURES
            )
            is_shared = is_shared & (is_first == 0)
    kind = tl.where(is_outside & (life > 0) & _wants(kinds, MISSING_BLOCK), MISSING_BLOCK, 0)
    kind = tl.where(is_null & _wants(kinds, NULL_WRITTEN), NULL_WRITTEN, kind)
    kind = tl.where(is_shared & _wants(kinds, SHARED_BLOCK_WRITTEN), SHARED_BLOCK_WRITTEN, kind)
    is_unset = is_outside & (life < 0)
    place = row.to(tl.int64) * NOTES
    if tl.max(is_stranger.to(tl.int32), 0) > 0:  # -1 is what says that there is no row
        raw = tl.load(_pointer(idx_mapping, tl.int32) + token * 0 + request, mask=is_stranger, other=-1)
        is_stranger = (raw != -1) & (token * 0 + tl.load(arena_ptr + lives_start) != 0)
        row = tl.where(is_stranger, raw, row)
        place = tl.where(is_stranger, (raw.to(tl.uint32) % max_num_rows.to(tl.uint32)).to(tl.int64) * NOTES, place)
        is_unset = is_unset | is_stranger
    is_unset = is_unset & _wants(kinds, UNSET_ROW)
    kind = tl.where(is_unset, UNSET_ROW, kind)
    entry = tl.where(is_inside, block_id, -1)
    note_ptr = checker_ptr + tl.load(group_ptr + NOTES_START) + place
    note_ptr = tl.where(is_unset, checker_ptr + tl.load(groups_ptr + NOTES_START) + place, note_ptr)
    kind_place = tl.where(is_stranger, 0, kind)
    group_index = token * 0 + g
    _note(checks, note_ptr + kind_place, step, kind, tl.where(is_unset, -1, group_index), row, token, position, entry)
    if slot_stamps >= 0:
        call = tl.load(checker_ptr)
        stamp_ptr = checker_ptr + slot_stamps + tl.where(is_written, slot, 0)
        before = tl.atomic_xchg(stamp_ptr, token * 0 + call, mask=is_written)
        kind = tl.where(is_written & (before == call), SLOT_WRITTEN_TWICE, 0)
        _note(checks, note_ptr + kind, step, kind, group_index, row, token, position, entry)


@triton.jit
def _check_requests(inputs, group_ptr, arena_ptr, checks, first, TILE: tl.constexpr):
    """Look at TILE requests: where their tokens begin, and whether their positions go on."""
    idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows, _ = inputs
    start_ptr, position_ptr = _pointer(query_start_loc, tl.int32), _pointer(positions, tl.int64)
    checker_ptr, _ = checks
    kinds, lives_start = tl.load(group_ptr + CHECKS), tl.load(group_ptr + LIVES_START)
    step = tl.load(arena_ptr + lives_start - 1)
    i = first.to(tl.int32) + tl.arange(0, TILE)
    # Before the first row operation there is nothing to be wrong about.
    is_request = (i < num_reqs) & (i * 0 + tl.load(arena_ptr + lives_start) != 0)
    wanted = i.to(tl.int64) * 0 + kinds
    # step 3: whether its tokens begin and end where they can
    start = tl.load(start_ptr + i, mask=is_request, other=0)
    end = tl.load(start_ptr + i + 1, mask=is_request, other=0)
    is_bad = (start > end) | ((i == 0) & (start != 0)) | ((i == num_reqs - 1) & (end > num_positions))
    is_bad = is_request & is_bad
    kind = tl.where(is_bad & _wants(wanted, BAD_STARTS), BAD_STARTS, 0)
    stop = tl.minimum(end, num_positions)
    has_tokens = is_request & (is_bad == 0) & (start >= 0) & (start < stop)
    row = tl.load(_pointer(idx_mapping, tl.int32) + i, mask=has_tokens, other=-1)
    is_row = (row >= 0) & (row < max_num_rows)
    is_asked = is_row & (tl.load(arena_ptr + lives_start + row, mask=is_row, other=-1) >= 0)
    first_position = tl.load(position_ptr + start, mask=is_asked, other=0)
    last_position = tl.load(position_ptr + stop - 1, mask=is_asked, other=0)
    token = start
    position = tl.where(is_bad, end.to(tl.int64), first_position)
    # step 4: whether its positions go on where those before have ended
    if _wants(kinds, POSITION_GAP):
        restart_ptr = arena_ptr + lives_start + max_num_rows
        restart = tl.load(restart_ptr + row, mask=is_asked, other=0)
        cap = tl.load(restart_ptr + max_num_rows + row, mask=is_asked, other=-1)
        kept_ptr = checker_ptr + MARKS_START + (restart % max_num_rows).to(tl.int64) * 2
        kept = tl.load(kept_ptr, mask=is_asked, other=0)
        mark = tl.load(kept_ptr + 1, mask=is_asked, other=0)
        is_marked = is_asked & ((kept == restart) | ((cap >= 0) & (kept == restart - max_num_rows)))
        mark = tl.where(kept == restart, mark, tl.minimum(mark, cap))
        is_gap = is_marked & (first_position > mark)
        end_position = last_position + 1
        is_tree = is_asked & (last_position - first_position != stop - 1 - start)
        num_left = tl.max(tl.where(is_tree, stop - start, 0), 0)
        j = num_left * 0
        while j < num_left:  # as a tree of drafts
            is_token = is_tree & (start + j < stop)
            other = tl.load(position_ptr + start + j, mask=is_token, other=-1)
            end_position = tl.maximum(end_position, other + 1)
            is_new = is_token & is_marked & (is_gap == 0) & (other > mark + j)
            position = tl.where(is_new, other, position)
            token = tl.where(is_new, start + j, token)
            is_gap = is_gap | is_new
            j += 1
        kind = tl.where(is_gap & (mark < INT32_MAX), POSITION_GAP, kind)
        end_position = tl.where(is_marked, tl.maximum(end_position, mark), end_position)
        # step 5: keep where they end
        tl.store(kept_ptr, restart, mask=is_asked)
        tl.store(kept_ptr + 1, tl.minimum(tl.maximum(end_position, 0), INT32_MAX).to(tl.int32), mask=is_asked)
    none = token * 0 - 1
    note_ptr = checker_ptr + tl.load(group_ptr + NOTES_START) + tl.where(is_bad, 0, row.to(tl.int64) * NOTES) + kind
    _note(checks, note_ptr, step, kind, none, tl.where(is_bad, i, row), token, position, none)


@_jit
def check_requests(
    idx_mapping: tl.int64,  # [num_reqs] int32, batch index -> row
    query_start_loc: tl.int64,  # [num_reqs + 1] int32, first token of each request
    positions: tl.int64,  # [num_positions] int64, token -> its index in its request
    num_reqs: tl.int32, num_positions: tl.int32, max_num_rows: tl.int32, groups: tl.int64,
    arena: tl.int64, checker: tl.int64, findings: tl.int64, TILE: tl.constexpr,
):  # fmt: skip
    """Begin a call that maps slots: give it a number, and look at its requests."""
    checks = (_pointer(checker, tl.int32), _pointer(findings, tl.int32))
    # step 1: give the call a number
    if tl.program_id(0) == 0:
        tl.store(_pointer(checker, tl.int32), tl.load(_pointer(checker, tl.int32)) + 1)
    # step 2: which request
    inputs = (idx_mapping, query_start_loc, positions, num_reqs, num_positions, max_num_rows, 0)
    first = tl.program_id(0) * TILE
    while first < num_reqs:
        _check_requests(inputs, _pointer(groups, tl.int64), _pointer(arena, tl.int32), checks, first, TILE)
        first += tl.num_programs(0) * TILE
