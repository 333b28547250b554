"""The kernels of a device backend: name, arguments in order, and the grid of a launch. Every language takes these.

A table's memory is one arena: filled counts [num_groups, max_num_rows], then each group's rows [max_num_rows, width]
from its `table_start` on. A set of outputs ("batch") is laid out likewise for max_num_reqs rows: its counts,
[num_groups, max_num_reqs], say how many columns each batch row holds, and a group's batch rows begin at its
`batch_start`. After these batch_entries entries come how many rows the last batch had, one entry that is free, and a
copy of the batch's counts that the fused step makes for itself: [batch_entries + 2 + num_groups * max_num_reqs] int32
in all. An entry of idx_mapping outside 0 .. max_num_rows - 1 is a padding entry.

`groups` is [num_groups, len(GROUP_FIELDS)] int64. What stands where a group has no block is its `filler`, and where a
token has no slot its `pad_slot_id`. An entry is missing where uint32(entry - null_start) < blocks_per_kv_block; its
token is PAD where null_is_pad is set. In a ring of n columns a token is PAD as well where max(p_last, 0) - position is
at least n * tokens_per_column, p_last the position of its request's last token in this call: one more load.

No argument is ever missing: the identity is a mapping of its own, and zeros stand for lengths and first tokens that
were not given. The argument `null` of exports is -1, or 0 where the layout has none: then a missing entry, and a place
without one, hold max(filler, 0), as `ExportBuffers.fills` says.

An export's batch row i is the part of a row from token max(first_tokens[i], 0) on (R34). With `part`, that token's
local_lengths // tokens_per_column, it has max(local_lengths(seq_lens[i]) - part * tokens_per_column, 0) tokens, and its
place j is column part + j of the row. The columns of a window, and those that an inverse map tells, count from the
row's start. In a ring (R35) column c of true positions is the ring's column c % filled; it is missing below
max(local_lengths(seq_lens[i]) - filled * tokens_per_column, 0) // tokens_per_column, and below the window.

Where kernels check, the arena ends with what the host tells them, `checker` is memory of their own, and `findings` the
host's memory for their records: blocktable/check_plan.py says what lies where. Unchecked ones look at neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from blocktable.config import BlockTableConfig

INT32_MAX = 2**31 - 1
MAX_GRID_Y = 65535
MAX_DRAFT = 16
"""Tokens of one request in a step of speculative decoding, at most."""

LAYOUT_OF_TYPES = {"int32": "i", "int64": "q", "changes": "S"}
"""Type of an argument -> its letter in `KernelArguments`; pointers are "Q"."""


@dataclass(frozen=True)
class Signature:
    """A kernel's arguments and grid.

    Attributes:
        name: the kernel's.
        declaration: its arguments as C declares them. `slot*` is a pointer to slots, or exported entries, of the dtype
            that the kernel is made for; `changes` is packed changes by value, handed over by the address of a copy.
        entries: the arguments whose product is what the grid's first axis counts.
        groups: the argument that its second axis counts. None: it is 1.
        is_by_row: whether a block takes one entry of the first axis; otherwise `Kernel.tile` of them.
        most_blocks: of the first axis.
    """

    name: str
    declaration: str
    entries: tuple[str, ...] = ()
    groups: str | None = None
    is_by_row: bool = False
    most_blocks: int = INT32_MAX

    @cached_property
    def arguments(self) -> tuple[tuple[str, str], ...]:
        """(type, name) of each argument, in order."""
        pairs = (argument.split() for argument in self.declaration.replace("\n", " ").split(","))
        return tuple((kind, name) for kind, name in pairs)

    @cached_property
    def layout(self) -> str:
        """A letter for each argument, as `KernelArguments` takes them."""
        return "".join("Q" if kind.endswith("*") else LAYOUT_OF_TYPES[kind] for kind, _ in self.arguments)

    @cached_property
    def _grid_arguments(self) -> tuple[tuple[int, ...], int | None]:
        names = [name for _, name in self.arguments]
        groups = None if self.groups is None else names.index(self.groups)
        return tuple(names.index(name) for name in self.entries), groups

    def grid(self, arguments: Sequence[int], tile: int) -> tuple[int, int]:
        """Return the blocks of a launch along x and y; at least one, for a kernel that clears as well.

        Triton multiplies the sizes as 32-bit ints, and launches nothing where the product overflows.
        """
        entry_arguments, group_argument = self._grid_arguments
        entries = 1
        for index in entry_arguments:
            entries *= arguments[index]
        grid_y = 1 if group_argument is None else min(arguments[group_argument], MAX_GRID_Y)
        blocks = entries if self.is_by_row else -(-entries // tile)
        return max(1, min(blocks, self.most_blocks, INT32_MAX // (1024 * grid_y))), grid_y


_APPLY_TAIL = """int32* arena, int32 num_groups, int32 max_num_reqs, int64 batch_entries, int32* batch,
    int32 copy_parts, int32* checker, int64 mark, int64* last_mark"""
_BATCH_TAIL = """int32 num_reqs, int32 num_reqs_padded, int32 max_num_reqs, int32 max_num_rows, int64* groups,
    int32 num_groups, int32* arena, int64 batch_entries, int32* batch"""
_SOURCE = """int32* idx_mapping, int32* num_computed_tokens, int32* seq_lens, int32* first_tokens, int32 num_reqs,
    int32 max_batch, int32 max_num_rows, int64* groups, int32* members, int32 num_members, int32* arena"""
_BY_MEMBER_ROW = {"entries": ("max_batch",), "groups": "num_members", "is_by_row": True}

PLAIN_KERNELS = (
    Signature(
        "apply_changes",
        "int32* changes, int32 num_singles, int32 num_ranges, int32 num_range_values, int32 num_constant_ranges, "
        f"int32 num_constants, {_APPLY_TAIL}",
    ),
    Signature(
        "null_stale_columns",
        f"int32* idx_mapping, {_BATCH_TAIL}",
        entries=("num_reqs_padded",),
        groups="num_groups",
        is_by_row=True,
    ),
    Signature(
        "gather_block_tables",
        f"int32* idx_mapping, int32* num_computed_tokens, {_BATCH_TAIL}",
        entries=("num_reqs_padded",),
        groups="num_groups",
        is_by_row=True,
    ),
    Signature(
        "map_slots",
        """int32* idx_mapping, int32* query_start_loc, int64* positions, int32 num_reqs, int32 num_positions,
        int32 max_num_rows, int64* groups, int32 first_group, int32 num_groups, int32* arena, slot* slots,
        int64 slots_stride, int32 num_slots, int64 requests_per_token, int32* checker, int32* findings""",
        entries=("num_slots",),
        groups="num_groups",
    ),
)
"""What every device backend has."""

FUSED_KERNELS = (
    Signature(
        "step_batch",
        """int32* idx_mapping, int32* num_computed_tokens, int32* query_start_loc, int64* positions, int32 num_reqs,
        int32 num_reqs_padded, int32 num_positions, int32 max_num_reqs, int32 max_num_rows,
        int64 requests_per_token, int64* groups, int32 num_groups, int32* arena, int64 batch_entries, int32* batch,
        slot* slots, int32 num_slots,
        int32 gather_blocks, int32 blocks_per_group, int64* last_mark, int64* shown_mark, int32* checker,
        int32* findings""",
    ),
    Signature("apply_changes_by_value", f"changes changes, {_APPLY_TAIL}"),
)
"""What a backend may have in addition: gather and slots in one kernel, and changes in a launch's own parameters."""

CHECK_KERNELS = (
    Signature(
        "check_requests",
        """int32* idx_mapping, int32* query_start_loc, int64* positions, int32 num_reqs, int32 num_positions,
        int32 max_num_rows, int64* groups, int32* arena, int32* checker, int32* findings""",
        entries=("num_reqs",),
    ),
)
"""What a backend with the capability "device_checks" has: it runs before the slots, where step_batch does not do it."""

EXPORT_KERNELS = (
    Signature(
        "count_entries",
        f"{_SOURCE}, int32 width, int32 unit, int32* counts, int32* lengths, int32* num_cut",
        entries=("max_batch",),
    ),
    Signature(
        "start_requests",
        f"{_SOURCE}, int32 unit, int32 capacity, int32* lengths, int32* counts, int32* indptr, int32* last_page_lens, "
        "int32* num_cut",
        entries=("max_batch",),
    ),
    Signature(
        "write_indices",
        f"{_SOURCE}, int32 unit, int32 capacity, int32* counts, int32* indptr, int32* entries",
        entries=("capacity",),
        groups="num_members",
        most_blocks=2048,  # only the device knows how many there are; enough to fill a large GPU
    ),
    Signature(
        "write_table",
        f"{_SOURCE}, int32 width, int32* counts, int64 null, int64 entry_scale, int32 form, int64 value_offset, "
        "slot* entries",
        **_BY_MEMBER_ROW,  # type: ignore[arg-type]
    ),
    Signature(
        "clear_inverse_map",
        f"{_SOURCE}, int32 width, int32 num_kernel_blocks, int32* counts, int32* mapped, int32 null, int32* entries",
        **_BY_MEMBER_ROW,  # type: ignore[arg-type]
    ),
    Signature(
        "write_inverse_map",
        f"{_SOURCE}, int32 width, int32 num_kernel_blocks, int32* counts, int32* mapped, int32* entries",
        **_BY_MEMBER_ROW,  # type: ignore[arg-type]
    ),
    Signature(
        "gather_state_indices",
        f"{_SOURCE}, int32 state_columns, int32 num_columns, int64 null, slot* entries",
        entries=("max_batch", "num_columns"),
        groups="num_members",
    ),
    Signature(
        "map_requests",
        """int32* idx_mapping, int32* query_start_loc, int32 num_reqs, int32 max_batch, int32 max_num_rows,
        int32 num_members, int32 capacity, int32* indptr, int32* entries""",
        entries=("capacity",),
        groups="num_members",
    ),
    Signature(
        "map_positions",
        """int32* rows, int32* positions, int32 num_tokens, int32 num_positions, int32 max_num_rows, int64* groups,
        int32 group, int32* arena, slot* slots""",
        entries=("num_tokens", "num_positions"),
    ),
)
"""What a backend with the capability "exports" has."""

SIGNATURES: dict[str, Signature] = {
    signature.name: signature for signature in (*PLAIN_KERNELS, *FUSED_KERNELS, *CHECK_KERNELS, *EXPORT_KERNELS)
}


def signature_of(name: str) -> Signature:
    """Return the signature of a kernel or of a variant of it, such as "map_slots_long" or "apply_changes_240"."""
    if name in SIGNATURES:
        return SIGNATURES[name]
    kernel, _, variant = name.rpartition("_")
    return SIGNATURES["apply_changes_by_value" if variant.isdecimal() else kernel]


@dataclass(frozen=True)
class KernelOptions:
    """What a kernel is compiled for.

    Attributes:
        dtype: "int64" or "int32": of `slot*` arguments.
        features: what the table's groups need: a launch of a few microseconds is half instruction fetches, so what no
            group needs is left out. HAS_SHARDS (a group is sharded over context-parallel ranks), HAS_MODES (a
            slot_mode is not "linear"), HAS_NULL_PADS (a null_is_pad is set, as without a null block), HAS_WINDOWS (a
            gather cuts a window out of a group), HAS_ODD_SIZES (a tokens_per_column is not a power of two),
            HAS_LARGE_POSITIONS (a position that has a slot may not fit 32 bits); OVERLAPS (a fused step's kernel may
            start before the one before it has ended, and waits for that itself); CHECKED (it looks for the engine's
            mistakes).
    """

    dtype: str = "int64"
    features: frozenset[str] = frozenset()


FEATURES = (
    "HAS_SHARDS",
    "HAS_MODES",
    "HAS_NULL_PADS",
    "HAS_WINDOWS",
    "HAS_ODD_SIZES",
    "HAS_LARGE_POSITIONS",
    "OVERLAPS",
    "CHECKED",
)
"""All of `KernelOptions.features`, in an order that never changes."""

FEATURES_OF: dict[str, tuple[str, ...]] = {
    "apply_changes": ("OVERLAPS", "CHECKED"),
    "gather_block_tables": ("HAS_SHARDS", "HAS_WINDOWS"),
    "map_slots": ("HAS_SHARDS", "HAS_MODES", "HAS_NULL_PADS", "HAS_ODD_SIZES", "HAS_LARGE_POSITIONS", "CHECKED"),
    "step_batch": FEATURES,
}
"""The features that a kernel knows; the others know none. Tables that differ in no other one share a kernel."""


def known_features(name: str, features: frozenset[str]) -> frozenset[str]:
    """Return those of the features that a kernel, or the kernel that it is a variant of, knows."""
    for kernel, known in FEATURES_OF.items():
        if name.startswith(kernel):
            found = features.intersection(known)
            return found if kernel != "gather_block_tables" or "HAS_WINDOWS" in found else frozenset()
    return frozenset()


def needed_features(config: BlockTableConfig) -> frozenset[str]:
    """Return the features that a table's groups need."""
    groups, world_size = config.groups, config.context_parallel.world_size
    largest_positions = [
        width * group.tokens_per_column * (world_size if group.is_sharded else 1)
        for group, width in zip(groups, config.arena.widths, strict=True)
    ]
    needed = {
        "HAS_SHARDS": world_size > 1 and any(group.is_sharded for group in groups),
        "HAS_MODES": any(group.slot_mode != "linear" for group in groups),
        "HAS_NULL_PADS": any(group.null_is_pad or group.null_block_id < 0 for group in groups),
        "HAS_WINDOWS": any(group.cut_window is not None for group in groups),
        "HAS_ODD_SIZES": any(group.tokens_per_column.bit_count() != 1 for group in groups),
        # A ring takes any position, and a check tells of any.
        "HAS_LARGE_POSITIONS": max(largest_positions) >= INT32_MAX
        or any(group.slot_mode == "ring" for group in groups)
        or config.check_plan is not None,
        "CHECKED": config.check_plan is not None,
    }
    return frozenset(name for name, is_needed in needed.items() if is_needed)


def requests_per_token(num_reqs: int, num_positions: int, *, is_long: bool) -> int:
    """Return what a kernel guesses a token's request from: `token * this >> 32`, which it then checks.

    Exact where all requests are of one length, as in decode and in a prefill of one request. More than MAX_DRAFT tokens
    for many requests in a short launch mean a buffer that is longer than its tokens, and decode.
    """
    tokens, rest = divmod(num_positions, max(num_reqs, 1))
    if not is_long and num_reqs != 1 and (rest or tokens > MAX_DRAFT):
        return 1 << 32
    return min(-(-(num_reqs << 32) // max(num_positions, 1)), 1 << 32)


Grid = tuple[int, int]
Launch = tuple[Any, Grid, tuple[int, ...]]
"""One launch as data: the kernel, its grid, its arguments."""
