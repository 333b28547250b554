"""Kernels with one fault each, in the three languages of a GPU: the suite must catch every one of them, emulated.

A mutant is a copy of a backend's package, under a name of its own, in whose kernels a piece of source is replaced. Its
cases must fail by an assertion that names the rule, and by nothing else; an unchanged copy must pass all cases. The
suite runs once for each backend, over all of its mutants.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
UNCHANGED = "unchanged"


@dataclass(frozen=True)
class Target:
    """A backend whose kernels are made wrong.

    Attributes:
        name: of its class.
        suffix: of the files that hold its kernels.
        shared: name of the file that all of them begin with.
        variable: what asks for its emulation.
    """

    name: str
    suffix: str
    variable: str
    shared: str


TARGETS = {
    "triton": Target("TritonBackend", ".py", "TRITON_INTERPRET", "common.py"),
    "cupy": Target("CupyBackend", ".cu", "BLOCKTABLE_CUPY_EMULATE", "common.cuh"),
    "numba": Target("NumbaBackend", ".py", "NUMBA_ENABLE_CUDASIM", "common.py"),
}


@dataclass(frozen=True)
class Fault:
    """What is wrong with a kernel.

    Attributes:
        rule: what a failed assertion must name.
        cases: those that must catch it, as pytest's -k takes them.
        changes: backend -> pieces of its source and what replaces them; each stands there exactly once.
        source: which of the backend's files they are in, without its suffix.
    """

    rule: str
    cases: str
    changes: dict[str, dict[str, str]]
    source: str = "kernels"


FAULTS = {
    # The plain kernels.
    "pads_from_the_launched_count": Fault(
        "R15",
        "more_positions_than_query",
        {
            "triton": {"tl.minimum(end_of_tokens, ": "tl.minimum(num_positions, "},
            "cupy": {"num_tokens = query_start_loc[num_reqs];": "num_tokens = num_positions;"},
            "numba": {"min(end_of_tokens, num_positions)": "num_positions"},
        },
    ),
    "column_is_unbounded": Fault(
        "R13",
        "separate and never_reaches_another_row",
        {
            "triton": {
                "(column < num_entries)": "(row >= 0)",
                "is_valid & (column < columns)": "is_valid",
            },
            "cupy": {"column < width ?": "column < 2 * width ?", "  if (column >= columns) {": "  if (false) {"},
            "numba": {
                "is_valid & (column < width)": "is_valid & (column < 2 * width)",
                "is_valid & (column < columns)": "is_valid",
            },
        },
    ),
    "product_of_32_bits": Fault(
        "R12",
        "slots_are_64_bits_wide",
        {
            "triton": {"block_id * tokens_per_column.to(tl.int64)": "(block_id * tokens_per_column << 32 >> 32)"},
            "cupy": {"int64 slot = block_id * tokens_per_column": "int64 slot = (int)(block_id * tokens_per_column)"},
            "numba": {"slot = block_id * tokens_per_column +": "slot = (block_id * tokens_per_column << 32 >> 32) +"},
        },
    ),
    "rows_of_a_larger_batch_stay": Fault(
        "R10.6",
        "separate and addresses_stay",
        {
            "triton": {"tl.maximum(tl.load(batch_ptr + batch_entries), num_reqs_padded)": "num_reqs_padded"},
            "cupy": {"= held_rows > num_reqs_padded ? held_rows : num_reqs_padded;": "= num_reqs_padded;"},
            "numba": {"max(batch[batch_entries], num_reqs_padded)": "num_reqs_padded"},
        },
    ),
    "columns_of_a_longer_row_stay": Fault(
        "R5",
        "separate and padded_rows_hold",
        {
            "triton": {"columns, held, filler, TILE)": "columns, columns, filler, TILE)"},
            "cupy": {"held, blockDim.x);": "0, blockDim.x);"},
            "numba": {"while column < held:": "while column < 0:"},
        },
    ),
    "last_tile_is_left_out": Fault(
        "R12",
        "separate and (token_in_the_next_block or first_and_last_entries)",
        {
            "triton": {
                "tl.program_id(0).to(tl.int64) * TILE\n        while first < num_slots:": (
                    "tl.program_id(0).to(tl.int64) * TILE\n        while first + TILE <= num_slots:"
                )
            },
            "cupy": {
                # The deeper one, of map_slots.
                "    for (int64 token = thread; token < num_slots;": (
                    "    for (int64 token = thread; token + blockDim.x <= num_slots;"
                )
            },
            "numba": {"        while token < num_slots:": "        while token + cuda.blockDim.x < num_slots:"},
        },
    ),
    "last_chunk_is_left_out": Fault(
        "R12",
        "separate and first_and_last_entries",
        {
            "cupy": {
                "y += gridDim.y)\n    for (int64 chunk = thread / WARP * CHUNK; chunk < num_slots": (
                    "y += gridDim.y)\n    for (int64 chunk = thread / WARP * CHUNK; chunk + CHUNK <= num_slots"
                )
            }
        },
    ),
    "interleave_is_ignored": Fault(
        "R12",
        "separate and two_tokens_in_turn",
        {
            "triton": {
                "_divide(local, interleave_size)": "local",
                "round_index * interleave_size + (local - turn * interleave_size)": "round_index",
            },
            "cupy": {
                "divide(position, group.interleave_size)": "position",
                "round_index * group.interleave_size + (position - turn * group.interleave_size)": "round_index",
            },
            "numba": {
                "divide(local, interleave_size)": "local",
                "round_index * interleave_size + (local - turn * interleave_size)": "round_index",
            },
        },
    ),
    "null_block_is_one_kernel_block": Fault(
        "R13",
        "separate and (null_block_spans or tokens_in_holes)",
        {
            "triton": {"< blocks_per_kv_block.to(tl.uint32)": "< 1"},
            "cupy": {
                "null_is_pad && is_missing(groups[g], block_id)": "null_is_pad && block_id == groups[g].null_start"
            },
            "numba": {"(entry - null_start) < blocks_per_kv_block": "(entry - null_start) < 1"},
        },
    ),
    "window_is_one_short": Fault(
        "R11",
        "passes_no_column_before",
        {
            "triton": {"- sliding_window + 1": "- sliding_window + 2"},
            "cupy": {"- groups[g].sliding_window + 1": "- groups[g].sliding_window + 2"},
            "numba": {"- sliding_window + 1": "- sliding_window + 2"},
        },
    ),
    "last_value_is_not_written": Fault(
        "R9.1",
        "separate and token_in_the_next_block",
        {
            "triton": {"while first < num_singles:": "while first + TILE <= num_singles:"},
            "cupy": {"i < counts.num_singles;": "i + 1 < counts.num_singles;"},
            "numba": {"while i < num_singles:": "while i + 1 < num_singles:"},
        },
    ),
    "null_behind_a_row_is_block_0": Fault(
        "R5",
        "what_stands_where_no_block_is",
        {
            "triton": {"column, filler, mask=is_stale)": "column, 0, mask=is_stale)"},
            "cupy": {"int filler = (int)groups[g].filler;\n  int*": "int filler = 0;\n  int*"},
            "numba": {"batch[batch_row + column] = filler\n": "batch[batch_row + column] = 0\n"},
        },
    ),
    "null_before_a_window_is_block_0": Fault(
        "R11",
        "what_stands_where_no_block_is",
        {
            "triton": {"mask=is_kept, other=filler)": "mask=is_kept, other=0)"},
            "cupy": {"int filler = (int)groups[g].filler;\n    for": "int filler = 0;\n    for"},
            "numba": {
                "filler if HAS_WINDOWS and column < first": "0 if HAS_WINDOWS and column < first",
                "filler if HAS_WINDOWS and other < first": "0 if HAS_WINDOWS and other < first",
            },
        },
    ),
    "constant_range_is_block_0": Fault(
        "R9.1",
        "what_stands_where_no_block_is",
        {
            "triton": {"(value - start), stored,": "(value - start), stored * (0 if IS_CONSTANT else 1),"},
            "cupy": {"= constants[range_index];": "= 0;"},
            "numba": {"arena[place] = changes[values + range_index]": "arena[place] = 0"},
        },
    ),
    "pad_is_minus_1": Fault(
        "R13",
        "slots_of_pad_are_the_groups_own",
        {
            "triton": {"is_valid, slot, pad_slot_id)": "is_valid, slot, -1)"},
            "cupy": {"int64 pad = groups[g].pad_slot_id;": "int64 pad = -1;"},
            "numba": {"if is_valid else pad_slot_id": "if is_valid else np.int64(-1)"},
        },
    ),
    "chunk_pad_is_minus_1": Fault(
        "R13",
        "more_tokens_than_a_tile",
        {"cupy": {"int64 pad = groups[g].pad_slot_id, columns": "int64 pad = -1, columns"}},
    ),
    "chunk_has_no_holes": Fault(
        "R13",
        "more_tokens_than_a_tile",
        {"cupy": {"|| !is_missing(groups[g], block_id)": "|| true"}},
    ),
    "ring_repeats_in_a_step": Fault(
        "R14",
        "step_longer_than_its_ring",
        {
            "triton": {"is_valid & (tl.maximum(last_position, 0) - position < tl.maximum(ring, 1))": "is_valid"},
            "cupy": {"if ((last > 0 ? last : 0) - position >= ring) return -1;": ""},
            "numba": {"is_valid & (max(last_position, 0) - local < ring)": "is_valid"},
        },
    ),
    # The fused step.
    "fused_single_change_is_lost": Fault(
        "R9.1",
        "fused and token_in_the_next_block",
        {
            "triton": {"while first < num_singles:": "while first + TILE <= num_singles:"},
            "cupy": {"i < counts.num_singles;": "i + 1 < counts.num_singles;"},
            "numba": {"while i < num_singles:": "while i + 1 < num_singles:"},
        },
    ),
    "fused_range_is_cut_short": Fault(
        "R9.1",
        "fused and token_in_the_next_block",
        {
            "triton": {"while first < num_range_values:": "while first + TILE <= num_range_values:"},
            "cupy": {"i < counts.num_range_values;": "i + 1 < counts.num_range_values;"},
            "numba": {"while i < num_range_values:": "while i + 1 < num_range_values:"},
        },
    ),
    "fused_rows_of_a_larger_batch_stay": Fault(
        "R10.6",
        "fused and addresses_stay",
        {
            "triton": {"tl.maximum(held_rows, num_reqs_padded)": "num_reqs_padded"},
            "cupy": {"end = held_rows > num_reqs_padded ?": "end = false ?"},
            "numba": {"max(held_rows, num_reqs_padded)": "num_reqs_padded"},
        },
    ),
    "fused_columns_of_a_longer_row_stay": Fault(
        "R5",
        "fused and padded_rows_hold",
        {
            "triton": {"tl.where(i < held_rows, held, 0), filler, ROW_TILE)": "columns, filler, ROW_TILE)"},
            "cupy": {"if (i < held_rows) null_columns(": "if (false) null_columns("},
            "numba": {"if stale > columns:": "if False:"},
        },
    ),
    "fused_last_tile_is_left_out": Fault(
        "R12",
        "fused and (token_in_the_next_block or first_and_last_entries)",
        {
            "triton": {
                "blocks_per_group).to(tl.int64) * TILE\n        while first < num_slots:": (
                    "blocks_per_group).to(tl.int64) * TILE\n        while first + TILE <= num_slots:"
                )
            },
            "cupy": {
                "\n  for (int64 token = thread; token < num_slots;": (
                    "\n  for (int64 token = thread; token + blockDim.x <= num_slots;"
                )
            },
            "numba": {"\n    while token < num_slots:": "\n    while token + cuda.blockDim.x < num_slots:"},
        },
    ),
    "fused_last_chunk_is_left_out": Fault(
        "R12",
        "fused and first_and_last_entries",
        {
            "cupy": {
                "wait_for_changes(arena);\n    for (int64 chunk = thread / WARP * CHUNK; chunk < num_slots": (
                    "wait_for_changes(arena);\n    for (int64 chunk = thread / WARP * CHUNK; chunk + CHUNK <= num_slots"
                )
            }
        },
    ),
    # The kernels of exports.
    "export_of_the_first_group_counts": Fault(
        "R25.15",
        "separate and groups_of_one_geometry",
        {
            "triton": {"while m < num_members:\n            first_count": "while m < 1:\n            first_count"},
            "cupy": {"m < num_members && row >= 0": "m < 1 && row >= 0"},
            "numba": {"while m < num_members:\n            columns": "while m < 1:\n            columns"},
        },
        "exports",
    ),
    "export_of_all_ranks": Fault(
        "R27",
        "csr_of_one_rank",
        {
            "triton": {"_local_length(length.to(tl.int64), group_ptr)": "length.to(tl.int64)"},
            "cupy": {"return group.world_size > 1 ? local_length(group, length) : length;": "return length;"},
            "numba": {"local_length(groups, group, held) if groups[group + WORLD_SIZE] > 1 else held": "held"},
        },
        "exports",
    ),
    "export_without_a_window": Fault(
        "R25.5",
        "separate and windows_are_cut_out",
        {
            "triton": {"if sliding_window > 0:": "if sliding_window < 0:"},
            "cupy": {"!group.sliding_window": "true"},
            "numba": {"if sliding_window == 0:": "if sliding_window >= 0:"},
        },
        "exports",
    ),
    "export_begins_behind_itself": Fault(
        "R27",
        "separate and csr_by_hand",
        {
            "triton": {"tl.minimum(end - count, limit)": "tl.minimum(end, limit)"},
            "cupy": {"j < end; ++j": "j <= end; ++j"},
            "numba": {"while j < min(i, num_reqs):": "while j <= min(i, num_reqs):"},
        },
        "exports",
    ),
    "export_whose_last_page_is_full": Fault(
        "R27",
        "separate and csr_by_hand",
        {
            "triton": {"tl.minimum(tokens, length - (num_pages - 1) * tokens)": "tokens"},
            "cupy": {"smaller(tokens, lengths[i] - (num_pages - 1) * tokens)": "tokens"},
            "numba": {"min(tokens, lengths[i] - (num_pages - 1) * tokens)": "tokens"},
        },
        "exports",
    ),
    "export_keeps_indices_of_a_larger_batch": Fault(
        "R25.13",
        "separate and csr_by_hand",
        {
            "triton": {"tl.minimum(tl.maximum(total, tl.load(total_ptr + 1)), capacity)": "total"},
            "cupy": {"larger(total, counts[2 * max_batch + 1])": "total"},
            "numba": {"max(total, counts[2 * max_batch + 1])": "total"},
        },
        "exports",
    ),
    "export_keeps_columns_of_a_longer_row": Fault(
        "R25.7",
        "separate and tables_by_hand",
        {
            "triton": {
                "first = count\n            while first < before:": "first = count\n            while first < 0:"
            },
            "cupy": {"j = count + threadIdx.x; j < before;": "j = count + threadIdx.x; j < 0;"},
            "numba": {
                "column = count + cuda.threadIdx.x\n            while column < before:": (
                    "column = count + cuda.threadIdx.x\n            while column < 0:"
                )
            },
        },
        "exports",
    ),
    "export_keeps_blocks_in_the_map": Fault(
        "R30",
        "separate and inverse_map_by_hand",
        {
            "triton": {
                "first = before * 0\n            while first < before:": "first = before\n            while first < 0:"
            },
            "cupy": {"j = threadIdx.x; j < before;": "j = threadIdx.x; j < 0;"},
            "numba": {
                "column = cuda.threadIdx.x\n            while column < before:": (
                    "column = cuda.threadIdx.x\n            while column < 0:"
                )
            },
        },
        "exports",
    ),
    "export_fill_is_block_0": Fault(
        "R25.7",
        "what_a_layout_puts",
        {
            "triton": {"nulls[2] * entry_scale)": "0)"},
            "cupy": {"larger(0, groups[g].filler) * entry_scale": "0"},
            "numba": {"max(groups[group + FILLER], 0) * entry_scale": "0"},
        },
        "exports",
    ),
    "export_counts_no_cut": Fault(
        "R27",
        "separate and small_capacity",
        {
            "triton": {"other=0) + tl.maximum(end - limit, 0)": "other=0).to(tl.int64)"},
            "cupy": {"num_cut[0] + (before - start)": "num_cut[0]"},
            "numba": {"num_cut[0] + (before - start)": "num_cut[0]"},
        },
        "exports",
    ),
    "export_of_the_next_state": Fault(
        "R31",
        "separate and states_by_hand",
        {
            "triton": {"tl.maximum(seq_len - 1, 0)": "tl.maximum(seq_len, 0)"},
            "cupy": {"(int64)seq_lens[i] - 1)": "(int64)seq_lens[i])"},
            "numba": {"max(np.int64(seq_lens[i]) - 1, 0)": "max(np.int64(seq_lens[i]), 0)"},
        },
        "exports",
    ),
    # Exports of parts, rings and requests, and slots of any positions.
    "part_shows_its_rows_start": Fault(
        "R34",
        "local_attention_by_hand",
        {"cupy": {"return divide(length_of(group, first_tokens, i, row), group.tokens_per_column);": "return 0;"}},
        "exports",
    ),
    "part_has_the_columns_of_its_row": Fault(
        "R34",
        "parts_of_every_kind",
        {"cupy": {"larger(0, columns - part)": "columns"}},
        "exports",
    ),
    "part_is_as_long_as_its_row": Fault(
        "R34",
        "local_attention_by_hand",
        {
            "triton": {"i, row) - part * tokens, 0)": "i, row), 0)"},
            "cupy": {"seq_lens, (int)i, row) - part * tokens": "seq_lens, (int)i, row)"},
        },
        "exports",
    ),
    "part_inside_a_block_is_not_counted": Fault(
        "R34",
        "first_tokens_that_are_no_boundary",
        {"cupy": {"if (first != part * tokens)": "if (false)"}},
        "exports",
    ),
    "part_is_mapped_from_its_own_start": Fault(
        "R34",
        "inverse_map_counts_from_the_rows_start",
        {"cupy": {"+ block_id, (int)column)": "+ block_id, (int)j)"}},
        "exports",
    ),
    "ring_has_no_second_turn": Fault(
        "R35",
        "ring_over_true_positions",
        {"cupy": {"form == FORM_RING ? modulo(column, filled) : column": "column"}},
        "exports",
    ),
    "ring_keeps_what_it_has_overwritten": Fault(
        "R35",
        "ring_over_true_positions",
        {
            "triton": {"first_column = tl.maximum(first_column, _divide(overwritten, tokens))": "pass"},
            "cupy": {"if (form == FORM_RING) {": "if (false) {"},
        },
        "exports",
    ),
    "block_of_the_next_request": Fault(
        "R35",
        "requests_of_blocks",
        {"cupy": {"index = i;": "index = i + 1;"}},
        "exports",
    ),
    "token_of_a_dummy_has_a_request": Fault(
        "R35",
        "requests_of_tokens_by_hand",
        {"cupy": {"!is_given || row_of(idx_mapping, request, num_reqs, max_num_rows) < 0": "!is_given"}},
        "exports",
    ),
    "token_after_the_last_has_a_request": Fault(
        "R35",
        "requests_of_tokens_by_hand",
        {"cupy": {"token < query_start_loc[request + 1]": "true"}},
        "exports",
    ),
    "requests_end_before_the_last": Fault(
        "R35",
        "requests_of_tokens_by_hand",
        {"cupy": {"query_start_loc[smaller(i, num_reqs)]": "query_start_loc[smaller(i, larger(0, num_reqs - 1))]"}},
        "exports",
    ),
    "position_of_another_token": Fault(
        "R36",
        "positions_by_hand",
        {"cupy": {"(int)divide(cell, num_positions)": "(int)modulo(cell, num_tokens)"}},
        "exports",
    ),
    "position_of_another_rank_has_a_slot": Fault(
        "R36",
        "positions_of_one_rank",
        {"cupy": {"is_valid && local >= 0 && column < columns": "is_valid && column < columns"}},
        "exports",
    ),
    "position_past_its_row_has_a_slot": Fault(
        "R36",
        "positions_by_hand",
        {"cupy": {"is_valid && local >= 0 && column < columns": "is_valid && local >= 0 && column < spec.width"}},
        "exports",
    ),
    "position_in_a_ring_does_not_turn": Fault(
        "R36",
        "positions_of_every_mode",
        {"cupy": {"local = modulo(position, columns * tokens)": "local = position"}},
        "exports",
    ),
    "position_in_a_hole_has_a_slot": Fault(
        "R36",
        "positions_of_every_mode",
        {"cupy": {"if (spec.null_is_pad &&": "if (false &&"}},
        "exports",
    ),
    "position_without_a_slot_is_pad": Fault(
        "R36",
        "positions_by_hand",
        {"cupy": {"(local - column * tokens) : NONE": "(local - column * tokens) : spec.pad_slot_id"}},
        "exports",
    ),
    "export_of_the_first_part": Fault(
        "R34",
        "separate and local_attention_by_hand",
        {
            "numba": {
                "return divide(held_of(groups, group, first_tokens, 0, i, row), groups[group + TOKENS_PER_COLUMN])": (
                    "return np.int64(0)"
                )
            }
        },
        "exports",
    ),
    "export_counts_the_columns_before_a_part": Fault(
        "R34",
        "separate and parts_of_every_kind and csr0",
        {"numba": {"columns = max(columns - part, 0)": "columns = max(columns, 0)"}},
        "exports",
    ),
    "export_counts_the_tokens_before_a_part": Fault(
        "R34",
        "separate and local_attention_by_hand",
        {"numba": {"seq_lens, 0, i, row) - part * tokens, 0)": "seq_lens, 0, i, row), 0)"}},
        "exports",
    ),
    "export_counts_no_part_that_is_rounded": Fault(
        "R34",
        "separate and first_tokens_that_are_no_boundary",
        {"numba": {"if first > part * tokens:": "if False:"}},
        "exports",
    ),
    "export_maps_columns_of_a_part": Fault(
        "R34",
        "separate and inverse_map_counts_from",
        {"numba": {"num_kernel_blocks + block_id, column)": "num_kernel_blocks + block_id, place)"}},
        "exports",
    ),
    "export_of_a_ring_that_does_not_turn": Fault(
        "R35",
        "separate and ring_over_true_positions",
        {"numba": {"divide(column, max(filled, 1)) * filled if form == RING else np.int64(0)": "np.int64(0)"}},
        "exports",
    ),
    "export_of_an_overwritten_ring": Fault(
        "R35",
        "separate and ring_over_true_positions",
        {"numba": {"max(first_column, divide(overwritten, tokens))": "first_column"}},
        "exports",
    ),
    "export_of_no_more_than_a_ring": Fault(
        "R35",
        "separate and ring_over_true_positions",
        {"numba": {"if unit == COUNT_RING and columns > 0:": "if False:"}},
        "exports",
    ),
    "export_of_a_row_as_its_request": Fault(
        "R35",
        "separate and requests_of_blocks",
        {"numba": {"index = i\n": "index = row\n"}},
        "exports",
    ),
    "export_of_request_0_behind_the_last": Fault(
        "R35",
        "separate and requests_of_blocks",
        {"numba": {"-1 if unit == WRITE_REQUESTS else 0": "0"}},
        "exports",
    ),
    "requests_of_dummies": Fault(
        "R35",
        "separate and requests_of_tokens",
        {"numba": {"row >= 0 and token < query_start_loc[num_reqs]": "token < query_start_loc[num_reqs]"}},
        "exports",
    ),
    "requests_of_padding": Fault(
        "R35",
        "separate and requests_of_tokens",
        {"numba": {"row >= 0 and token < query_start_loc[num_reqs]": "row >= 0"}},
        "exports",
    ),
    "starts_of_padding_are_0": Fault(
        "R35",
        "separate and requests_of_tokens",
        {"numba": {"query_start_loc[min(i, num_reqs)]": "(query_start_loc[i] if i <= num_reqs else 0)"}},
        "exports",
    ),
    "positions_of_the_first_token": Fault(
        "R36",
        "separate and positions_by_hand",
        {"numba": {"row_of(rows, divide(cell, num_positions)": "row_of(rows, 0"}},
        "exports",
    ),
    "positions_of_every_rank": Fault(
        "R36",
        "separate and positions_of_one_rank",
        {"numba": {"is_valid, local = local_index(groups, group, is_valid, local)": "pass"}},
        "exports",
    ),
    "positions_of_a_ring_that_does_not_turn": Fault(
        "R36",
        "separate and positions_of_every_mode",
        {"numba": {"local -= divide(local, ring) * ring": "pass"}},
        "exports",
    ),
    "positions_in_holes": Fault(
        "R36",
        "separate and positions_of_every_mode",
        {"numba": {"if not (groups[group + NULL_IS_PAD] and is_none):": "if True:"}},
        "exports",
    ),
    "positions_below_0": Fault(
        "R36",
        "separate and positions_by_hand",
        {"numba": {"is_valid = position >= 0": "is_valid = True"}},
        "exports",
    ),
    "part_begins_with_its_row": Fault(
        "R34",
        "local_attention_by_hand",
        {"triton": {"return table_row + part,": "return table_row,"}},
        "exports",
    ),
    "part_is_rounded_up": Fault(
        "R34",
        "first_tokens_that_are_no_boundary",
        {"triton": {"part = _divide(begin, tokens)": "part = _divide(begin + tokens - 1, tokens)"}},
        "exports",
    ),
    "part_has_all_columns_of_its_row": Fault(
        "R34",
        "parts_of_every_kind and csr",
        {"triton": {"tl.maximum(columns.to(tl.int64) - part, 0)": "columns.to(tl.int64)"}},
        "exports",
    ),
    "part_has_a_window_of_its_own": Fault(
        "R34",
        "parts_of_every_kind and table",
        {"triton": {"first_column - part,": "first_column,"}},
        "exports",
    ),
    "part_in_the_map_counts_from_itself": Fault(
        "R34",
        "inverse_map_counts_from_the_rows_start",
        {"triton": {"(part + place).to(tl.int32)": "place"}},
        "exports",
    ),
    "part_that_was_rounded_is_not_counted": Fault(
        "R34",
        "first_tokens_that_are_no_boundary",
        {"triton": {"if num_rounded > 0:": "if num_rounded < 0:"}},
        "exports",
    ),
    "parts_that_were_rounded_overflow": Fault(
        "R34",
        "more_cuts_than_31_bits",
        {"triton": {"tl.atomic_min(cut_ptr, INT32_MAX)": "pass"}},
        "exports",
    ),
    "ring_turns_backwards": Fault(
        "R35",
        "ring_over_true_positions",
        {
            "triton": {
                "column -= _divide(column, filled) * filled": (
                    "column = filled - 1 - column + _divide(column, filled) * filled"
                )
            }
        },
        "exports",
    ),
    "ring_ends_with_its_row": Fault(
        "R35",
        "ring_over_true_positions",
        {"triton": {"columns = tl.where(columns > 0, width, 0)": "pass"}},
        "exports",
    ),
    "block_of_a_row_not_of_a_request": Fault(
        "R35",
        "requests_of_blocks",
        {"triton": {"tl.where(unit == REQUESTS, i, index)": "tl.where(unit == REQUESTS, row, index)"}},
        "exports",
    ),
    "request_of_a_dummy": Fault(
        "R35",
        "requests_of_tokens_by_hand",
        {"triton": {"tl.where(row >= 0, request, -1)": "request"}},
        "exports",
    ),
    "request_begins_behind_the_entries": Fault(
        "R35",
        "garbage_starts_write_nothing_outside",
        {"triton": {"tl.minimum(start, capacity)": "start"}},
        "exports",
    ),
    "position_of_the_next_token": Fault(
        "R36",
        "positions_by_hand",
        {"triton": {"_divide(cell, num_positions.to(tl.int64))": "_divide(cell + 1, num_positions.to(tl.int64))"}},
        "exports",
    ),
    # What kernels check.
    "bit_of_the_next_block": Fault(
        "R41.2",
        "separate and planted_bug_is_found and not graph and shared_block_of_three_rows",
        {
            "triton": {"(held >> (block & 31))": "(held >> (block + 1 & 31))"},
            "cupy": {">> block % 32 & 1": ">> (block + 1) % 32 & 1"},
            "numba": {">> (block & 31)) & 1 > 0": ">> ((block + 1) & 31)) & 1 > 0"},
        },
        "checks",
    ),
    "first_token_is_no_excuse": Fault(
        "R41.2",
        "separate and planted_bug_is_found and not graph and shared_block_in_a_window",
        {
            "triton": {"is_shared & (is_first == 0)": "is_shared"},
            "cupy": {"if (offset > 0 && !writes_first_token(": "if (offset >= 0 || !writes_first_token("},
            "numba": {"if writes_first_token(": "if offset < 0 and writes_first_token("},
        },
        "checks",
    ),
    "marks_are_not_kept": Fault(
        "R41.2",
        "separate and planted_bug_is_found and not graph and position_gap_after",
        {
            "triton": {"tl.store(kept_ptr, restart, mask=is_asked)": "pass"},
            "cupy": {"kept[0] = restart;": ""},
            "numba": {"checker[kept] = restart": "pass"},
        },
        "checks",
    ),
    "every_call_has_one_number": Fault(
        "R41.2",
        "separate and planted_bug_is_found and not graph and slot_written_twice_in_a_tree",
        {
            "triton": {"tl.load(_pointer(checker, tl.int32)) + 1)": "tl.load(_pointer(checker, tl.int32)))"},
            "cupy": {"checker[0] += 1;": ";"},
            "numba": {"checker[0] += 1": "pass"},
        },
        "checks",
    ),
    "position_has_the_groups_pad": Fault(
        "R36",
        "positions_by_hand",
        {"triton": {"0, -1)\n    num_cells": "0, -5)\n    num_cells"}},
        "exports",
    ),
}


def copy_package(backend: str, name: str, fault: Fault | None, folder: Path) -> str:
    """Copy a backend's package as `name`, with changes to its kernels, and return what the suite knows it by."""
    package = f"blocktable_{backend}"
    copied = Path(shutil.copytree(ROOT / "backends" / package, folder / name, ignore=shutil.ignore_patterns("__pyc*")))
    if fault is not None:
        target = TARGETS[backend]
        paths = [copied / file for file in (f"{fault.source}{target.suffix}", target.shared)]
        for old, new in fault.changes[backend].items():
            sources = {path: path.read_text() for path in paths}
            count = sum(source.count(old) for source in sources.values())
            assert count == 1, f"{name}: {old!r} stands {count} times in {backend}'s kernels"
            for path, source in sources.items():
                path.write_text(source.replace(old, new))
    for module in copied.rglob("*.py"):
        module.write_text(module.read_text().replace(package, name))
    return f"{name}:{TARGETS[backend].name}"


def run_suite(backend: str, faults: dict[str, Fault], folder: Path) -> dict[str, dict[str, Any]]:
    """Run every mutant on its cases, the unchanged copy on all of them, and return name -> verdict."""
    labels = [copy_package(backend, name, fault, folder) for name, fault in ({UNCHANGED: None} | faults).items()]
    every = " or ".join(f"({cases})" for cases in dict.fromkeys(fault.cases for fault in faults.values()))
    chosen = {UNCHANGED: every, **{name: fault.cases for name, fault in faults.items()}}
    selection = " or ".join(f"({name}: and ({cases}))" for name, cases in chosen.items())
    verdict = folder / "verdict.json"
    command = [sys.executable, "-m", "blocktable_conformance", *labels, f"--verdict={verdict}", "-q", "--tb=no"]
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, TARGETS[backend].variable: "1"}
    done = subprocess.run(
        [*command, "-k", selection], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert verdict.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    return {found["backend"].partition(":")[0]: found for found in json.loads(verdict.read_text())}


@pytest.mark.parametrize(
    "backend",
    [pytest.param("triton", marks=pytest.mark.torch), "cupy", pytest.param("numba", marks=pytest.mark.numba)],
)
def test_wrong_kernels_are_caught(backend: str, tmp_path: Path, expect_caught: Any) -> None:
    if backend == "cupy" and not any(map(shutil.which, ("g++", "clang++", os.environ.get("CXX") or "g++"))):
        pytest.skip("no C++ compiler is here")
    faults = {name: fault for name, fault in FAULTS.items() if backend in fault.changes}
    verdicts = run_suite(backend, faults, tmp_path)
    expect_caught(verdicts, UNCHANGED, {name: fault.rule for name, fault in faults.items()})
