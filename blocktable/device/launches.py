"""Every launch of a table's kernels, as data: which kernel, on which grid, with which arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from blocktable.config import BlockTableConfig
from blocktable.device.driver import Driver, HostBlock
from blocktable.device.graph import NativeKernel
from blocktable.device.signatures import (
    PLAIN_KERNELS,
    Grid,
    KernelOptions,
    Launch,
    known_features,
    needed_features,
    requests_per_token,
    signature_of,
)
from blocktable.device.staging import StepMarks
from blocktable.layouts import Layout
from blocktable.protocols import CHANGES_HEADER, STEP_INPUTS, Batch, ExportBuffers

MAX_COPY_PARTS = 16
MAX_WRITE_BLOCKS = 1 << 15
MAX_SLOT_BLOCKS = 1 << 22
REQUESTS_PER_BLOCK = 128

COUNT_UNITS = {
    "table": 0,
    "kv_offsets": 0,
    "lengths": 0,
    "csr": 1,
    "block_requests": 1,
    "inverse_map": 1,
    "token_csr": 2,
    "ring": 3,
}
"""Layout kind -> what is counted: columns, kernel blocks that hold tokens, tokens, or such blocks of a ring."""
INDEX_UNITS = {"csr": 1, "token_csr": 2, "block_requests": 4}
"""Layout kind -> what is written: kernel blocks, slots, or the requests of kernel blocks."""
TABLE_FORMS = {"table": 0, "kv_offsets": 1, "ring": 2}
"""Layout kind -> a row of entries; one of K offsets and one of V offsets; a row of a ring."""
STATE_COLUMNS = {"first": 0, "last": 1, "aligned": 2}


class Inputs(NamedTuple):
    """The arrays of one batch as addresses; what was not given is the identity, or zeros."""

    positions: int
    idx_mapping: int
    query_start_loc: int
    num_computed_tokens: int


LaunchForm = tuple[Any, Grid, Callable[[tuple[int, ...]], tuple[int, ...]], tuple[int, ...]]
"""A launch of a step whose inputs may lie anywhere: kernel, grid, what picks the kernel's inputs, its first arguments,
out of the addresses of all of a step in the order of `STEP_INPUTS`, and the arguments after them."""


def launch_form(launch: Launch) -> LaunchForm:
    """Return what a launch has in common with those over inputs at other addresses."""
    kernel, grid, arguments = launch
    pick, number = _leading_inputs(kernel.name)
    return kernel, grid, pick, arguments[number:]


def resized_form(form: LaunchForm, num_reqs: int, num_positions: int) -> LaunchForm:
    """Return the form of a launch over another number of tokens."""
    kernel, grid, pick, rest = form
    indexes = _token_arguments(kernel.name)
    if indexes is None:
        return form
    arguments, guess = [*rest], requests_per_token(num_reqs, num_positions, is_long=kernel.name.endswith("_long"))
    arguments[indexes[0]], arguments[indexes[1]] = num_positions, guess
    return kernel, grid, pick, tuple(arguments)


@cache
def _token_arguments(kernel: str) -> tuple[int, int] | None:
    """Return which arguments after a kernel's inputs follow the number of tokens; None: none do."""
    names = [name for _, name in signature_of(kernel).arguments if name not in STEP_INPUTS]
    if "requests_per_token" not in names:
        return None
    return names.index("num_positions"), names.index("requests_per_token")


@cache
def _leading_inputs(kernel: str) -> tuple[Callable[[tuple[int, ...]], tuple[int, ...]], int]:
    """Return what picks a kernel's inputs out of all of a step, and how many of its arguments they are."""
    places = [STEP_INPUTS.index(name) for _, name in signature_of(kernel).arguments if name in STEP_INPUTS]
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1)), len(places)


class Blank(NamedTuple):
    """Memory for what an export's batch has not, as addresses, and the arrays that own it.

    Attributes:
        zeros: of lengths and first tokens that were not given.
        unwanted: where lengths go that an export does not keep.
        owners: the arrays.
    """

    zeros: int
    unwanted: int
    owners: tuple[Any, ...]


class ApplyMemory(NamedTuple):
    """What a commit works on.

    Attributes:
        addresses: apply_changes' arguments from `arena` to `checker`.
        last_mark: address; 0 where no counts are copied.
        copy_blocks: blocks that copy counts.
        made: launches by value that may be used again: the same objects.
    """

    addresses: tuple[int, ...]
    last_mark: int
    copy_blocks: int
    made: dict[Any, Launch]


class Launches:
    """The kernels of one table over its memory.

    Args:
        config: the geometry.
        driver: the device.
        arena: [arena.size] int32. The table's memory.
        by_value: whether changes that fit travel in a launch's own parameters, where the backend has such kernels.
        is_native: whether its kernels may be nodes of a graph, and so be launched by the driver's own call.
        checker, findings: addresses of the memory of a table whose kernels check, and of its records; 0: none do.

    Attributes:
        has_step_batch: whether gather and slots have a kernel of their own in a fused step.
        num_slots: entries of a group's slots in a set of outputs.
        all_groups: 0 .. num_groups - 1.
        no_inputs: addresses for what a batch is not given.
        absent: the same for the inputs of a step, in the order of `STEP_INPUTS`.
        most_by_value: int32 entries of the largest changes that travel in a launch's own parameters; 0: none do.
    """

    def __init__(
        self,
        config: BlockTableConfig,
        driver: Driver,
        arena: Any,
        *,
        by_value: bool,
        is_native: bool = False,
        checker: int = 0,
        findings: int = 0,
    ) -> None:
        self._config, self._driver = config, driver
        self._is_native = is_native
        self._checker, self._findings = checker, findings
        self._features = needed_features(config)
        self._kernels: dict[tuple[str, str], Any] = {}
        self._groups = driver.upload(config.group_fields().reshape(-1))
        has_cross = any(group.slot_mode == "cross" for group in config.groups)
        named = config.group_fields(is_named=True).reshape(-1)
        self._named_groups = driver.upload(named) if has_cross else self._groups
        has_ring_windows = any(group.slot_mode == "ring" and group.sliding_window for group in config.groups)
        rings = config.group_fields(has_ring_windows=True).reshape(-1)
        self._ring_groups = driver.upload(rings) if has_ring_windows else self._groups
        self._identity = driver.upload(np.arange(max(config.max_num_reqs, config.num_rows), dtype=np.int32))
        self._groups_address, self._arena_address = driver.address(self._groups), driver.address(arena)
        self._blanks: dict[int, Blank] = {}
        zeros = self._blank(config.max_num_reqs).zeros
        self.no_inputs: Inputs = Inputs(0, driver.address(self._identity), 0, zeros)
        self.absent: tuple[int, ...] = tuple(getattr(self.no_inputs, name) for name in STEP_INPUTS)
        self.has_step_batch: bool = "step_batch" in driver.variants
        self.num_slots: int = config.max_num_batched_tokens
        self._may_be_long = self.is_long(config.max_num_batched_tokens * len(config.groups))
        names = [signature.name for signature in PLAIN_KERNELS] + ["map_slots_long"] * self._may_be_long
        for name in names + ["check_requests"] * bool(checker):
            self.kernel(name)
        self._apply = self.kernel("apply_changes")
        sizes = driver.change_sizes if by_value else ()
        self.most_by_value: int = max(sizes, default=0)
        self._by_value = [(size, self.kernel(f"apply_changes_{size}")) for size in sizes]
        self._num_groups = len(config.groups)
        self.all_groups: range = range(self._num_groups)
        self._copy_parts = min(-(-config.max_num_reqs // self._apply.tile), MAX_COPY_PARTS)
        self._sizes = (self._num_groups, config.max_num_reqs, config.batch_arena.size)
        self._max_width = max(config.arena.widths)

    def is_long(self, num_slots: int) -> bool:
        """Say whether a launch over so many slots fills the device many times over."""
        return "map_slots_long" in self._driver.variants and num_slots > self._driver.many_slots

    def kernel(self, name: str, dtype: str | None = None) -> Any:
        """Return a kernel, made at the first call. dtype: of `slot*`; None: the slots'."""
        key = (name, dtype or self._config.slot_dtype)
        if key not in self._kernels:
            features = self._features | ({"OVERLAPS"} if self._driver.overlaps and self.has_step_batch else set())
            options = KernelOptions(key[1], known_features(name, features))
            with self._driver.current():
                kernel = self._driver.kernel(name, options)
            self._kernels[key] = NativeKernel(kernel) if self._is_native else kernel
        return self._kernels[key]

    def launch(self, name: str, arguments: tuple[int, ...], dtype: str | None = None) -> Launch:
        """Return a launch on the grid that the kernel's signature says."""
        kernel = self.kernel(name, dtype)
        return kernel, signature_of(name).grid(arguments, kernel.tile), arguments

    def inputs(self, addresses: dict[str, int]) -> Inputs:
        """Return addresses for what was given, and for what was not."""
        return Inputs._make(map(addresses.get, Inputs._fields, self.no_inputs))

    def _blank(self, max_batch: int) -> Blank:
        """Return the memory for what a batch of up to so many requests has not, made at the first call."""
        if max_batch not in self._blanks:
            arrays = tuple(self._driver.full(max_batch, 0, "int32") for _ in range(2))
            zeros, unwanted = map(self._driver.address, arrays)
            self._blanks[max_batch] = Blank(zeros, unwanted, arrays)
        return self._blanks[max_batch]

    # The four plain kernels.

    def apply_memory(
        self, first_entry: int = 0, batch: int = 0, last_mark: int = 0, address: int | None = None
    ) -> ApplyMemory:
        """Return what a commit works on.

        Args:
            first_entry: entry of the arena that offset 0 means.
            batch: address of a set of outputs whose counts are copied for step_batch; 0: none are.
            last_mark: address of where a step's number is written then.
            address: of other memory that is written instead of the arena. None: the arena.
        """
        copy_parts = self._copy_parts if batch else 0
        memory, checker = (self._arena_address, self._checker) if address is None else (address, 0)
        addresses = (memory + 4 * first_entry, *self._sizes, batch, copy_parts, checker)
        return ApplyMemory(addresses, last_mark, self._num_groups * copy_parts, {})

    def apply_changes(
        self, block: HostBlock, used: int, memory: ApplyMemory, marks: StepMarks | None = None
    ) -> tuple[Launch, int | None]:
        """Return the launch of a commit, and the number of its step, 0 without one; None: the block is free already.

        Args:
            block: holds packed changes.
            used: its entries in use.
            memory: as `apply_memory` returned it.
            marks: gives the numbers. None: the step has none.
        """
        counts = block.header.tolist()
        most = max(counts[0], counts[2], counts[4])  # single values, range values, entries of constant ranges
        blocks = memory.copy_blocks + min(-(-most // self._apply.tile), MAX_WRITE_BLOCKS)
        for size, kernel in self._by_value:
            if used <= size:  # a launch keeps its parameters
                launch = memory.made.get((size, blocks))
                if launch is None or launch[2][0] != block.host_address:
                    arguments = (block.host_address, *memory.addresses, 0, memory.last_mark)
                    launch = memory.made[size, blocks] = kernel, (blocks, 1), arguments
                return launch, None
        mark = 0
        if marks is not None:
            mark = marks.last = marks.last + 1
        address = block.address + 4 * CHANGES_HEADER
        return (self._apply, (blocks, 1), (address, *counts, *memory.addresses, mark, memory.last_mark)), mark

    def no_changes(self, memory: ApplyMemory) -> Launch:
        """Return the launch of a commit of nothing; it copies counts for step_batch where `memory` says so."""
        arguments = (0, *(0,) * CHANGES_HEADER, *memory.addresses, 0, memory.last_mark)
        return self._apply, (max(memory.copy_blocks, 1), 1), arguments

    def gather(self, inputs: Inputs, batch: Batch, out: int) -> list[Launch]:
        """Return what writes the batch tables. out: address of a set's memory."""
        config = self._config
        sizes = (batch.num_reqs, batch.num_reqs_padded, config.max_num_reqs, config.num_rows)
        tail = (*sizes, self._groups_address, len(config.groups), self._arena_address, config.batch_arena.size, out)
        return [
            self.launch("null_stale_columns", (inputs.idx_mapping, *tail)),
            self.launch("gather_block_tables", (inputs.idx_mapping, inputs.num_computed_tokens, *tail)),
        ]

    def map_slots(
        self, inputs: Inputs, batch: Batch, slots: int, stride: int, num_slots: int, *, groups: range, is_named: bool
    ) -> list[Launch]:
        """Return what writes the slots of groups that follow one another, `stride` entries apart; nothing for no slots.

        Args:
            is_named: whether the caller has named these groups: then cross-attention groups have slots.
        """
        if num_slots == 0:
            return []
        num_groups = len(groups)
        fields = self._driver.address(self._named_groups) if is_named else self._groups_address
        is_long = self._may_be_long and self.is_long(num_slots * num_groups)
        arguments = (
            *(inputs.idx_mapping, inputs.query_start_loc, inputs.positions),
            *(batch.num_reqs, batch.num_positions, self._config.num_rows),
            *(fields, groups[0], num_groups, self._arena_address),
            *(slots, stride, num_slots, requests_per_token(batch.num_reqs, batch.num_positions, is_long=is_long)),
            *(self._checker, self._findings),
        )
        return [self.launch("map_slots_long" if is_long else "map_slots", arguments)]

    def check_requests(self, inputs: Inputs, batch: Batch) -> list[Launch]:
        """Return what begins a call that maps slots: nothing where nothing is checked."""
        if not self._checker:
            return []
        arguments = (
            *(inputs.idx_mapping, inputs.query_start_loc, inputs.positions),
            *(batch.num_reqs, batch.num_positions, self._config.num_rows),
            *(self._groups_address, self._arena_address, self._checker, self._findings),
        )
        return [self.launch("check_requests", arguments)]

    # The fused step.

    @cached_property
    def _step(self) -> tuple[Any, int]:
        """step_batch as a launch takes it, and the blocks of it that map a group's slots."""
        kernel = self.kernel("step_batch_long" if self._may_be_long else "step_batch")
        return kernel, max(min(-(-self.num_slots // kernel.tile), MAX_SLOT_BLOCKS // self._num_groups), 1)

    def step_batch(
        self, inputs: Inputs, batch: Batch, out: int, slots: int, last_mark: int, shown_mark: int, *, has_slots: bool
    ) -> Launch:
        """Return the launch of gather and slots together, or of the gather alone.

        Args:
            out, slots: addresses of a set's memory.
            has_slots: whether slots are written.
        """
        kernel, slot_blocks = self._step
        if not has_slots:
            slot_blocks = 0
        config, num_groups, num_reqs_padded = self._config, self._num_groups, batch.num_reqs_padded
        gather_blocks = 0
        if batch.needs_gather:  # of no rows too: a larger batch may have come before
            gather_blocks = self._driver.gather_blocks(num_reqs_padded, num_groups, self._max_width)
        arguments = (
            inputs.idx_mapping,
            inputs.num_computed_tokens,
            inputs.query_start_loc,
            inputs.positions,
            batch.num_reqs,
            num_reqs_padded,
            batch.num_positions,
            config.max_num_reqs,
            config.num_rows,
            requests_per_token(batch.num_reqs, batch.num_positions, is_long=self._may_be_long),
            self._groups_address,
            num_groups,
            self._arena_address,
            config.batch_arena.size,
            out,
            slots,
            self.num_slots,
            gather_blocks,
            slot_blocks,
            last_mark,
            shown_mark,
            self._checker,
            self._findings,
        )
        # The blocks after those that map: the first one shows the mark, and all of them check requests.
        request_blocks = max(-(-batch.num_reqs // REQUESTS_PER_BLOCK), 1) if self._checker else 1
        return kernel, (gather_blocks + slot_blocks * num_groups + request_blocks, 1), arguments

    # Exports.

    def export(self, layout: Layout, addresses: dict[str, int], batch: Batch, out: ExportBuffers) -> list[Launch]:
        """Return what writes a batch in a layout. addresses: of the inputs that are given."""
        kind, config, blank = layout.kind, self._config, self._blank(out.max_batch)
        members, counts, entries, indptr, last_page_lens, lengths, mapped, num_cut = (
            blank.unwanted if array is None else self._driver.address(array)
            for array in (
                *(out.members, out.counts, out.entries, out.indptr),
                *(out.last_page_lens, out.lengths, out.mapped, out.num_cut),
            )
        )
        num_members = len(out.groups)
        idx_mapping = addresses.get("idx_mapping", self.no_inputs.idx_mapping)
        if kind == "token_requests":
            sizes = (batch.num_reqs, out.max_batch, config.num_rows, num_members, out.capacity)
            arguments = (idx_mapping, addresses["query_start_loc"], *sizes, indptr, entries)
            return [self.launch("map_requests", arguments)]
        tokens = ("num_computed_tokens", "seq_lens", "first_tokens")
        source = (
            *(idx_mapping, *(addresses.get(name, blank.zeros) for name in tokens)),
            *(batch.num_reqs, out.max_batch, config.num_rows),
            self._driver.address(self._ring_groups if kind == "ring" else self._groups),
            *(members, num_members, self._arena_address),
        )
        null = 0 if layout.null is None else layout.null
        if kind == "state":
            columns = (STATE_COLUMNS[layout.state_columns], layout.num_columns, null, entries)
            return [self.launch("gather_state_indices", (*source, *columns), layout.dtype)]
        unit = COUNT_UNITS[kind]
        launches = [self.launch("count_entries", (*source, out.width, unit, counts, lengths, num_cut))]
        if kind in TABLE_FORMS:
            values = (null, layout.entry_scale, TABLE_FORMS[kind], layout.value_offset, entries)
            launches.append(self.launch("write_table", (*source, out.width, counts, *values), layout.dtype))
        elif kind in INDEX_UNITS:
            starts = (unit, out.capacity, lengths, counts, indptr, last_page_lens, num_cut)
            launches += [
                self.launch("start_requests", (*source, *starts)),
                self.launch("write_indices", (*source, INDEX_UNITS[kind], out.capacity, counts, indptr, entries)),
            ]
        elif kind == "inverse_map":
            shape = (out.width, out.num_kernel_blocks)
            launches += [
                self.launch("clear_inverse_map", (*source, *shape, counts, mapped, null, entries)),
                self.launch("write_inverse_map", (*source, *shape, counts, mapped, entries)),
            ]
        return launches

    def map_positions(self, addresses: dict[str, int], group: int, shape: Sequence[int], dtype: str) -> Launch:
        """Return what writes the slots of any positions.

        Args:
            addresses: of "rows", "positions" and "out".
            group: the group.
            shape: of positions and slots.
            dtype: of slots.
        """
        fields = self._driver.address(self._named_groups)
        given = addresses["rows"], addresses["positions"], *shape
        arguments = (*given, self._config.num_rows, fields, group, self._arena_address, addresses["out"])
        return self.launch("map_positions", arguments, dtype)

    def is_made(self, name: str, dtype: str) -> bool:
        """Say whether a kernel is made already, so that a launch compiles and loads nothing."""
        return (name, dtype) in self._kernels


def run(launches: Sequence[Launch], stream: int) -> None:
    """Launch each, one after another."""
    for kernel, grid, arguments in launches:
        kernel(grid, arguments, stream)
