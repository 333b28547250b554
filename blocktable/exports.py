"""Buffers of exports, and what a call of `BlockTable.export` returns (R25-R31)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from blocktable.arrays import Array, IntArray
from blocktable.checks import TEXT, int_array, int_scalar
from blocktable.config import INT32_LIMIT, BlockTableConfig, KVCacheGroup
from blocktable.errors import ArgumentError, BlockTableError, ConfigError, DtypeError
from blocktable.layouts import Layout, check_block_size, exact_width
from blocktable.overlaps import OutputMemory
from blocktable.protocols import Backend, Batch, BlockStore, ExportBuffers, ExportingStore, StepBuffers, no_writes

WRITTEN = ("entries", "indptr", "last_page_lens", "lengths", "num_cut", "counts", "mapped")
"""Arrays of a set that an export writes."""

MAX_CACHED_EXPORTS = 4096
"""Results kept for each set of an export's buffers."""

CSR_KINDS = ("csr", "token_csr", "block_requests")
"""Kinds with `indptr`, `last_page_lens` and `lengths` beside their entries."""

CAPACITY_KINDS = (*CSR_KINDS, "token_requests")
"""Kinds whose entries are one row for all requests."""

RING_AND_REQUEST_KINDS = ("ring", "block_requests", "token_requests")
"""Kinds that want the capability "export_parts"."""

NEEDS_SEQ_LENS = (*CSR_KINDS, "lengths", "inverse_map", "ring")
"""Kinds that read `seq_lens`; state columns that are aligned do too."""

PART_KINDS = ("table", "kv_offsets", *CSR_KINDS, "inverse_map", "lengths")
"""Kinds that may begin anywhere in a row (R34), and count what they had to cut."""


@dataclass(frozen=True, slots=True)
class Export:
    """One batch in a consumer's layout: views of an export's buffers, valid until the next call that writes the same.

    Attributes:
        layout: the layout.
        entries: one array for each group, shaped as the layout says, `num_reqs_padded` batch rows long; for "csr",
            "token_csr" and "block_requests" the whole buffer, of which `indptr[-1]` are used; for "token_requests"
            `num_tokens_padded` of them; none for "lengths".
        indptr: [num_reqs_padded + 1] int32. First entry of each request, and their number.
        last_page_lens: [num_reqs_padded] int32. Tokens in each request's last page.
        lengths: [num_reqs_padded] int32. Tokens of each request that this rank holds.
    """

    layout: Layout
    entries: tuple[Array, ...]
    indptr: Array | None = None
    last_page_lens: Array | None = None
    lengths: Array | None = None


def needs_seq_lens(layout: Layout) -> bool:
    """Say whether an export of `layout` reads `seq_lens`."""
    return layout.kind in NEEDS_SEQ_LENS or layout.state_columns == "aligned"


def export_width(config: BlockTableConfig, layout: Layout, group: int) -> int:
    """Return how many columns a row of an export has: the table's where the layout takes them, else the least it takes.

    Rules: R26.
    """
    tokens = config.groups[group].tokens_per_column
    width, step = config.width(group), layout.width_step(tokens)
    if layout.kind not in ("table", "kv_offsets", "ring"):
        return width
    if layout.kind == "ring":  # as wide as the row of a linear group (R3, R35)
        width = -(-(config.max_model_len + config.lookahead_tokens) // tokens)
        step = math.lcm(step, config.width_alignment // math.gcd(config.width_alignment, tokens))
    if layout.exact_width:
        return exact_width(config, group)
    return -(-width // step) * step


def is_batch_table(config: BlockTableConfig, layout: Layout, groups: Sequence[int]) -> bool:
    """Say whether a set's own batch table is what the layout asks for (R26)."""
    is_plain = layout.kind == "table" and (layout.dtype, layout.entry_scale) == ("int32", 1)
    return is_plain and all(
        export_width(config, layout, group) == config.width(group)
        and fill_of(config, layout, group) == config.groups[group].filler
        for group in groups
    )


def fill_of(config: BlockTableConfig, layout: Layout, group: int) -> int:
    """Return what a place without an entry holds: the layout's null, or where that is None a valid entry.

    That is made of the group's filler, or of kernel block 0 where that is -1.

    Rules: R25.7.
    """
    if layout.kind == "placeholder":
        return 0
    if layout.null is not None:
        return layout.null
    block = max(config.groups[group].filler, 0)
    return block * (config.groups[group].tokens_per_column if layout.kind == "token_csr" else layout.entry_scale)


def check_groups(config: BlockTableConfig, groups: int | Sequence[int]) -> tuple[int, ...]:
    """Return groups of a call as a tuple of distinct ones that exist.

    Raises:
        ArgumentError: they are not, or there are none.
    """
    if isinstance(groups, np.ndarray):
        groups = int_array("groups", groups).tolist()
    chosen = tuple(groups) if isinstance(groups, Sequence) and not isinstance(groups, TEXT) else (groups,)
    numbers = tuple(int_scalar("groups", group) for group in chosen)
    num_groups = len(config.groups)
    if not numbers or len(set(numbers)) < len(numbers) or not all(0 <= number < num_groups for number in numbers):
        raise ArgumentError(f"groups must be distinct ones of 0 .. {num_groups - 1}, at least one; got {numbers}.")
    return numbers


def most_entries(config: BlockTableConfig, layout: Layout, groups: Sequence[int]) -> int:
    """Return the entries of the largest batch in one row for all requests; 0 for kinds that have none."""
    if layout.kind == "token_requests":
        return config.max_num_batched_tokens
    if layout.kind not in CSR_KINDS:
        return 0
    tokens = config.groups[groups[0]].tokens_per_column if layout.kind == "token_csr" else 1
    return config.max_num_reqs * config.width(groups[0]) * tokens


def check_groups_of(config: BlockTableConfig, layout: Layout, groups: Sequence[int]) -> None:
    """Refuse what the groups cannot be exported as.

    Raises:
        ArgumentError: groups of several geometries, or a layout that makes no sense for them.
        ConfigError: a kernel block size that the layout does not take.

    Rules: R25-R31.
    """
    specs = [config.groups[group] for group in groups]
    geometries = {
        (spec.tokens_per_column, spec.is_sharded and config.context_parallel.world_size > 1, config.width(group))
        for spec, group in zip(specs, groups, strict=True)
    }
    if len(geometries) > 1:
        raise ArgumentError(
            f"Groups {tuple(groups)} are of different geometry (kernel block size, sharding, width): "
            f"{sorted(geometries)}; export each geometry on its own."
        )
    for spec, group in zip(specs, groups, strict=True):
        _check_group(layout, spec, group, spec.is_sharded and config.context_parallel.world_size > 1)


def check_sizes(
    config: BlockTableConfig, layout: Layout, groups: Sequence[int], capacity: int | None, max_batch: int | None
) -> tuple[int, int]:
    """Return the entries and the batch rows of a set of a layout.

    Raises:
        ArgumentError: they are impossible, or must be given.

    Rules: R27, R34.
    """
    is_indexed = layout.kind in CAPACITY_KINDS
    rows = config.max_num_reqs if max_batch is None else int_scalar("max_batch", max_batch)
    if not 1 <= rows < INT32_LIMIT:
        raise ArgumentError(f"max_batch must be at least 1 and below 2**31, got {rows}.")
    if capacity is None and is_indexed and max_batch is not None:
        raise ArgumentError(f"{layout.name!r} with max_batch needs a capacity: how many {_unit(layout)} a batch has.")
    if capacity is not None and not is_indexed:
        raise ArgumentError(f"capacity is for kinds {', '.join(CAPACITY_KINDS)}; {layout.name!r} is {layout.kind!r}.")
    most = most_entries(config, layout, groups) if capacity is None else int_scalar("capacity", capacity)
    if capacity is not None and not 1 <= most < INT32_LIMIT:
        raise ArgumentError(f"capacity counts {_unit(layout)}, from 1 to 2**31 - 1; got {most}.")
    if most >= INT32_LIMIT:
        raise ArgumentError(
            f"{layout.name!r} of any batch could need {most} entries, one for each of its {_unit(layout)}, too many "
            f"for int32: make a set with create_export(capacity=...), the {_unit(layout)} of your largest batch, and "
            "pass it as out=."
        )
    return most, rows


def _unit(layout: Layout) -> str:
    """Return what an entry stands for."""
    return "tokens" if layout.kind in ("token_csr", "token_requests") else "kernel blocks"


def num_kernel_blocks_of(config: BlockTableConfig, layout: Layout, groups: Sequence[int]) -> int:
    """Return the entries of a request in an inverse map; 0 for other kinds."""
    if layout.kind != "inverse_map":
        return 0
    specs = [config.groups[group] for group in groups]
    return max((spec.num_blocks or 0) * spec.blocks_per_kv_block for spec in specs)


def _check_group(layout: Layout, spec: KVCacheGroup, group: int, is_split_over_ranks: bool) -> None:
    kind = layout.kind
    if kind in ("placeholder", "token_requests"):
        return
    if kind == "ring" and spec.slot_mode != "ring":
        raise ArgumentError(
            f"{layout.name!r} shows the true positions of a ring, and group {group} has slot_mode={spec.slot_mode!r}; "
            "export a table of it."
        )
    if kind != "state":
        check_block_size(spec, [layout])
    if kind in NEEDS_SEQ_LENS and spec.slot_mode == "none":
        raise ArgumentError(f'group {group} has slot_mode="none": its blocks hold no tokens, as {layout.name!r} needs.')
    if kind == "state" and (spec.blocks_per_kv_block > 1 or is_split_over_ranks):
        raise ArgumentError(
            f"{layout.name!r} needs a group of whole blocks that is not sharded; group {group} "
            f"has {spec.blocks_per_kv_block} kernel blocks in a block and is "
            f"{'' if is_split_over_ranks else 'not '}sharded."
        )
    if kind in ("kv_offsets", "token_csr", "inverse_map") or layout.entry_scale > 1:
        _check_int32(layout, spec, group)


def _check_int32(layout: Layout, spec: KVCacheGroup, group: int) -> None:
    """Refuse entries that may not fit int32, and caches of unknown size where it matters (R28, R29)."""
    if layout.kind == "inverse_map":
        if spec.num_blocks is None:
            raise ArgumentError(f"{layout.name!r} has an entry for each block: give group {group} num_blocks.")
        return
    num_kernel_blocks = spec.block_id_limit * spec.blocks_per_kv_block
    if layout.kind == "token_csr":
        largest = num_kernel_blocks * spec.tokens_per_column - 1
    else:
        largest = (num_kernel_blocks - 1) * layout.entry_scale + layout.value_offset
    if layout.dtype == "int32" and largest >= INT32_LIMIT:
        hint = "; set num_blocks" if spec.num_blocks is None else ""
        raise ArgumentError(f"{layout.name!r} holds int32, and entries of group {group} may reach {largest}{hint}.")


class ExportSets:
    """The export buffers of one table, and the views of them that steady calls hand out again."""

    def __init__(self, config: BlockTableConfig, backend: Backend, device: Any, store: BlockStore) -> None:
        self._config = config
        self._backend = backend
        self._device = device
        self._store = cast(ExportingStore, store)
        self._own: weakref.WeakKeyDictionary[StepBuffers, dict[tuple[Layout, tuple[int, ...]], ExportBuffers]]
        self._own = weakref.WeakKeyDictionary()
        self._views: weakref.WeakKeyDictionary[ExportBuffers, dict[Any, Export]] = weakref.WeakKeyDictionary()
        self._memory: weakref.WeakKeyDictionary[ExportBuffers, OutputMemory] = weakref.WeakKeyDictionary()
        self._tables: weakref.WeakKeyDictionary[StepBuffers, dict[Any, tuple[Any, Export]]]
        self._tables = weakref.WeakKeyDictionary()

    def find(self, layout: Layout, groups: tuple[int, ...], buffers: StepBuffers) -> ExportBuffers | None:
        """Return the export buffers that belong to a set of buffers, where they were made."""
        return self._own.get(buffers, {}).get((layout, groups))

    def keep(self, out: ExportBuffers, buffers: StepBuffers) -> None:
        """Make export buffers belong to a set of buffers."""
        self._own.setdefault(buffers, {})[(out.layout, out.groups)] = out

    def batch_tables(
        self, layout: Layout, groups: tuple[int, ...], buffers: StepBuffers, tables: tuple[Array, ...]
    ) -> Export:
        """Return the batch tables of some groups as an export, the same object for the same tables (R26).

        Args:
            layout: that the batch tables meet.
            groups: the groups.
            buffers: the set that the tables belong to.
            tables: one view for each group of the table, the same tuple for the same sizes.
        """
        views = self._tables.setdefault(buffers, {})
        key = (layout, groups, id(tables))  # of a tuple that is kept beside its export, so the number stays its own
        if key not in views:
            if len(views) >= MAX_CACHED_EXPORTS:
                views.clear()
            views[key] = (tables, Export(layout, tuple(shaped(tables[group], layout) for group in groups)))
        return views[key][1]

    def is_batch_table(self, layout: Layout, groups: tuple[int, ...]) -> bool:
        """Say whether a set's own batch table is what the layout asks for, of groups that may be exported so (R26)."""
        if not is_batch_table(self._config, layout, groups):
            return False
        check_block_size(self._config.groups[groups[0]], [layout])
        return True

    def refuse_outputs(self, out: ExportBuffers, batch: Batch) -> None:
        """Refuse inputs that lie in the set that is written."""
        names = "idx_mapping", "query_start_loc", "num_computed_tokens", "seq_lens", "first_tokens"
        self._memory[out].refuse(tuple((name, getattr(batch, name)) for name in names))

    def check_own(self, out: ExportBuffers, layout: Layout, groups: tuple[int, ...]) -> None:
        """Refuse buffers that this table did not make, or made for something else."""
        if out not in self._views:
            raise ArgumentError("out must be what this table's create_export() or create_buffers() made.")
        if (out.layout, out.groups) != (layout, groups):
            raise ArgumentError(
                f"out was made for layout {out.layout.name!r} of groups {out.groups}, not for {layout.name!r} of "
                f"groups {groups}."
            )

    def create(
        self, layout: Layout, groups: tuple[int, ...], capacity: int | None = None, max_batch: int | None = None
    ) -> ExportBuffers:
        """Allocate one set, and compile what writes it."""
        check_groups_of(self._config, layout, groups)
        most, rows = check_sizes(self._config, layout, groups, capacity, max_batch)
        try:
            out = self._allocate(layout, groups, most, rows)
        except MemoryError as error:
            hint = "give a smaller capacity" if layout.kind in CAPACITY_KINDS else "give a smaller max_batch"
            raise ArgumentError(
                f"A set of layout {layout.name!r} for {rows} requests and {most} indices does not fit the memory: "
                f"{hint}."
            ) from error
        self._views[out] = {}
        self._memory[out] = OutputMemory([(f"out.{name}", getattr(out, name)) for name in WRITTEN])
        if layout.kind != "placeholder":
            self._warm_up(out)
        return out

    def _allocate(self, layout: Layout, groups: tuple[int, ...], most: int, rows: int) -> ExportBuffers:
        num_kernel_blocks = num_kernel_blocks_of(self._config, layout, groups)
        width = export_width(self._config, layout, groups[0])
        make, is_csr = self._array, layout.kind in CSR_KINDS
        fills = tuple(fill_of(self._config, layout, group) for group in groups)
        shape = {
            "table": (rows, width),
            "ring": (rows, width),
            "kv_offsets": (rows, 2, width),
            **dict.fromkeys(CAPACITY_KINDS, (most,)),
            "inverse_map": (rows, num_kernel_blocks),
            "state": (rows,) if layout.state_columns == "first" else (rows, layout.num_columns),
            "placeholder": (rows, 1),
        }.get(layout.kind)
        return ExportBuffers(
            layout=layout,
            groups=groups,
            width=width,
            capacity=most,
            num_kernel_blocks=num_kernel_blocks,
            members=self._backend.from_host(np.array(groups, np.int32), self._device),
            fills=fills,
            counts=make((2 * rows + 2,)),
            max_batch=rows,
            entries=None if shape is None else make((len(groups), *shape), layout.dtype, fills),
            indptr=make((rows + 1,)) if layout.kind in CAPACITY_KINDS else None,
            last_page_lens=make((rows,)) if is_csr else None,
            lengths=make((rows,)) if is_csr or layout.kind == "lengths" else None,
            mapped=make((len(groups), rows, width)) if layout.kind == "inverse_map" else None,
            num_cut=make((1,)) if layout.kind in PART_KINDS else None,
        )

    def _array(self, shape: tuple[int, ...], dtype: str = "int32", fills: tuple[int, ...] = ()) -> Array:
        """Return an array of zeros, or of one number for each entry of its first axis."""
        array = np.zeros(shape, dtype)
        for part, value in zip(array, fills, strict=bool(fills)):
            part[...] = value
        return self._backend.from_host(array, self._device)

    def _warm_up(self, out: ExportBuffers) -> None:
        """Compile every kernel that writes `out`, over batches that leave it as it is."""
        dummy, zero, starts = (
            self._backend.from_host(np.array(values, np.int32), self._device) for values in ([-1], [0], [0, 0])
        )
        seq_lens = zero if needs_seq_lens(out.layout) else None
        first_tokens = zero if out.layout.kind in PART_KINDS else None
        for batch in (
            Batch(dummy, starts, None, 1, 1, zero, seq_lens=seq_lens, first_tokens=first_tokens),
            Batch(None, zero, None, 0, 0, None, seq_lens=seq_lens),
        ):
            self._store.export(out.layout, batch, out, stream=None)
        self._backend.synchronize(self._device)

    def refuse_capture(self, layout: Layout | None, stream: int | None) -> None:
        """Refuse to make buffers of a layout, or the array of `map_positions`, on a capturing stream (R21)."""
        try:
            self._store.write(no_writes(self._config.arena), stream=stream)  # of nothing: it raises there
        except BlockTableError as error:
            raise BlockTableError(
                f"Buffers of layout {layout.name!r} cannot be made inside a capture: export once before it, or call "
                "create_export() before it and pass its result as out=."
                if layout
                else "map_positions() without out= allocates, which a capture cannot: pass out=."
            ) from error

    def reset(self, stream: int | None) -> None:
        """Fill every set again (R24)."""
        for out in list(self._views):
            self._store.reset_export(out, stream=stream)

    def view(self, out: ExportBuffers, num_rows: int, num_tokens: int | None = None) -> Export:
        """Return the result over `num_rows` batch rows, and `num_tokens` tokens, the same object each time."""
        views = self._views[out]
        found = views.get((num_rows, num_tokens))
        if found is None:
            found = self._make_view(out, num_rows, num_tokens)
            if len(views) >= MAX_CACHED_EXPORTS:
                views.clear()
            views[num_rows, num_tokens] = found
        return found

    def _make_view(self, out: ExportBuffers, num_rows: int, num_tokens: int | None) -> Export:
        entries: tuple[Array, ...] = ()
        if out.entries is not None:
            entries = tuple(out.entries[index] for index in range(len(out.groups)))
            if num_tokens is not None:
                entries = tuple(array[:num_tokens] for array in entries)
            if out.indptr is None:
                entries = tuple(shaped(array[:num_rows], out.layout) for array in entries)
        return Export(
            out.layout,
            entries,
            None if out.indptr is None else out.indptr[: num_rows + 1],
            None if out.last_page_lens is None else out.last_page_lens[:num_rows],
            None if out.lengths is None else out.lengths[:num_rows],
        )


def shaped(rows: Array, layout: Layout) -> Array:
    """Return batch rows in the shape that a layout of kind "table" names, without a copy."""
    if layout.kind != "table" or layout.shape == ("B", "M"):
        return rows
    num_rows, width = rows.shape
    sizes = {"B": num_rows, "M": width, "B*M": num_rows * width, "1": 1}
    try:
        return rows.reshape(tuple(sizes[name] for name in layout.shape))
    except KeyError:
        message = f"Layout {layout.name!r}: a table's shape is made of B, M, B*M and 1, got {layout.shape}."
        raise ConfigError(message) from None


def require_inputs(
    layout: Layout, seq_lens: Array | None, query_start_loc: Array | None, num_tokens_padded: int | None
) -> None:
    """Refuse an export without the arrays that it reads, or with the starts of tokens that it does not."""
    if seq_lens is None and needs_seq_lens(layout):
        raise DtypeError(f"seq_lens must be an int32 array of num_reqs entries for {layout.name!r}, got None.")
    is_of_tokens = layout.kind == "token_requests"
    if is_of_tokens and query_start_loc is None:
        raise DtypeError(
            f"query_start_loc must be an int32 array of num_reqs + 1 entries for {layout.name!r}, got None."
        )
    if not is_of_tokens and (query_start_loc is not None or num_tokens_padded is not None):
        raise ArgumentError(
            f"query_start_loc and num_tokens_padded are for kind 'token_requests'; {layout.name!r} is {layout.kind!r}."
        )


def check_first_tokens(config: BlockTableConfig, layout: Layout, groups: Sequence[int], batch: Batch) -> None:
    """Refuse parts of rows where there are none, and host arrays of first tokens that are not boundaries (R34)."""
    firsts = batch.first_tokens
    if firsts is None:
        return
    if layout.kind not in PART_KINDS:
        raise ArgumentError(
            f"first_tokens mean nothing to {layout.name!r} of kind {layout.kind!r}; kinds {', '.join(PART_KINDS)} take "
            "them."
        )
    for group in groups:
        if config.groups[group].slot_mode != "linear":
            raise ArgumentError(
                f"first_tokens are for linear groups, whose columns stand for positions; group {group} has "
                f"slot_mode={config.groups[group].slot_mode!r}."
            )
    if type(firsts) is not np.ndarray:
        return
    spec = config.groups[groups[0]]
    if batch.idx_mapping is not None and type(batch.idx_mapping) is np.ndarray:
        firsts = firsts[(batch.idx_mapping >= 0) & (batch.idx_mapping < config.num_rows)]
    firsts = np.maximum(firsts, 0).astype(np.int64)
    is_wrong = ~is_boundary(config, spec, firsts)
    if is_wrong.any():
        first = int(firsts[is_wrong][0])
        below, above = nearest_boundaries(config, spec, first)
        raise ArgumentError(
            f"first_tokens holds {first}, where no block of {spec.tokens_per_column} tokens begins"
            f"{' on every rank' if spec.is_sharded and config.context_parallel.world_size > 1 else ''}; the nearest "
            f"boundaries are {below} and {above}."
        )


def is_boundary(config: BlockTableConfig, spec: KVCacheGroup, tokens: IntArray) -> IntArray:
    """Say which tokens, [n] int64, a kernel block begins with on every rank (R34)."""
    if not spec.is_sharded:
        return np.asarray(tokens % spec.tokens_per_column == 0)
    shard, found = config.context_parallel, np.ones(tokens.shape, np.bool_)
    for rank in range(shard.world_size):
        found &= replace(shard, rank=rank).local_lengths(tokens) % spec.tokens_per_column == 0
    return found


def nearest_boundaries(config: BlockTableConfig, spec: KVCacheGroup, token: int) -> tuple[int, int]:
    """Return the last boundary before a token that is none, and the first one after it."""
    shard, size = config.context_parallel, spec.tokens_per_column
    period = shard.world_size * math.lcm(shard.interleave_size, size) if spec.is_sharded else size
    start = token // period * period
    for reach in (min(period, 1 << 12), min(period, 1 << 20)):  # a whole period always has one at each end
        near = np.arange(max(start, token - reach), min(start + period, token + reach) + 1)
        found = near[is_boundary(config, spec, near)]
        before, after = found[found < token], found[found > token]
        if before.size and after.size:
            return int(before[-1]), int(after[0])
    return start, start + period
