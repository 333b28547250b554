"""Buffers of exports, and what a call of `BlockTable.export` returns (R25-R31)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from blocktable.checks import int_scalar
from blocktable.config import INT32_LIMIT, BlockTableConfig, KVCacheGroup
from blocktable.errors import ArgumentError, ConfigError, DtypeError
from blocktable.layouts import Layout, check_block_size, exact_width
from blocktable.protocols import (
    Array,
    Backend,
    Batch,
    BlockStore,
    ExportBuffers,
    ExportingStore,
    IntArray,
    StepBuffers,
)

MAX_CACHED_EXPORTS = 4096
"""Results kept for each set of an export's buffers."""

NEEDS_SEQ_LENS = ("csr", "token_csr", "lengths", "inverse_map")
"""Kinds that read `seq_lens`; state columns that are aligned do too."""


@dataclass(frozen=True, slots=True)
class Export:
    """One batch in a consumer's layout: views of an export's buffers, valid until the next call that writes the same.

    Attributes:
        layout: the layout.
        entries: one array for each group, shaped as the layout says, `num_reqs_padded` batch rows long; for "csr" and
            "token_csr" the whole buffer of indices, of which `indptr[-1]` are used; none for "lengths".
        indptr: [num_reqs_padded + 1] int32. First index of each request, and their number.
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
    width, step = config.width(group), layout.width_step(config.groups[group].tokens_per_column)
    if layout.kind not in ("table", "kv_offsets"):
        return width
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

    Rules: R25.
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
    chosen = tuple(groups) if isinstance(groups, Sequence | np.ndarray) else (groups,)
    numbers = tuple(int_scalar("groups", group) for group in chosen)
    num_groups = len(config.groups)
    if not numbers or len(set(numbers)) < len(numbers) or not all(0 <= number < num_groups for number in numbers):
        raise ArgumentError(f"groups must be distinct ones of 0 .. {num_groups - 1}, at least one; got {numbers}.")
    return numbers


def most_entries(config: BlockTableConfig, layout: Layout, groups: Sequence[int]) -> int:
    """Return the indices of the largest batch in a CSR layout; 0 for other kinds."""
    if layout.kind not in ("csr", "token_csr"):
        return 0
    tokens = config.groups[groups[0]].tokens_per_column if layout.kind == "token_csr" else 1
    return config.max_num_reqs * config.width(groups[0]) * tokens


def check_capacity(config: BlockTableConfig, filled: IntArray, batch: Batch, out: ExportBuffers) -> None:
    """Refuse a batch of host arrays whose entries `capacity` would cut; of device arrays the kernels count them.

    Args:
        config: the geometry.
        filled: [num_groups, num_rows] int32. Columns in use, as of the last commit.
        batch: what is exported.
        out: where to.

    Rules: R27.
    """
    layout, rows, seq_lens = out.layout, batch.idx_mapping, batch.seq_lens
    if out.capacity >= most_entries(config, layout, out.groups) or type(seq_lens) is not np.ndarray:
        return
    rows = np.arange(batch.num_reqs) if rows is None else rows
    if type(rows) is not np.ndarray:
        return
    spec = config.groups[out.groups[0]]
    is_row = (rows >= 0) & (rows < config.num_rows)
    columns = np.maximum(filled[list(out.groups)].min(0), 0)[np.where(is_row, rows, 0)].astype(np.int64)
    lengths = np.maximum(seq_lens, 0).astype(np.int64)
    if spec.is_sharded:
        lengths = config.context_parallel.local_lengths(lengths)
    tokens = spec.tokens_per_column
    if layout.kind == "token_csr":
        counts = np.minimum(lengths, columns * tokens)
    else:
        counts = np.minimum(-(-lengths // tokens), columns)
    total = int(counts[is_row].sum())
    if total > out.capacity:
        raise ArgumentError(
            f"{layout.name!r} of this batch holds {total} entries, but capacity is {out.capacity}: "
            f"{total - out.capacity} would be left out; make the set with create_export(capacity={total}) or more."
        )


def check_export(
    config: BlockTableConfig, layout: Layout, groups: Sequence[int], capacity: int | None
) -> tuple[int, int]:
    """Refuse what the groups cannot be exported as; return the capacity and the number of kernel blocks.

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
    if capacity is not None and layout.kind not in ("csr", "token_csr"):
        raise ArgumentError(f"capacity is for kinds 'csr' and 'token_csr'; {layout.name!r} is {layout.kind!r}.")
    most = most_entries(config, layout, groups)
    if capacity is not None:
        most = int_scalar("capacity", capacity)
        if not 1 <= most < INT32_LIMIT:
            raise ArgumentError(f"capacity must be at least 1 and below 2**31, got {most}.")
    elif most >= INT32_LIMIT:
        raise ArgumentError(f"{layout.name!r} could need {most} entries, too many for int32: give a smaller capacity.")
    num_kernel_blocks = 0
    if layout.kind == "inverse_map":
        num_kernel_blocks = max((spec.num_blocks or 0) * spec.blocks_per_kv_block for spec in specs)
    return most, num_kernel_blocks


def _check_group(layout: Layout, spec: KVCacheGroup, group: int, is_shared_out: bool) -> None:
    kind = layout.kind
    if kind == "placeholder":
        return
    if kind != "state":
        check_block_size(spec, [layout])
    if kind in NEEDS_SEQ_LENS and spec.slot_mode == "none":
        raise ArgumentError(f'group {group} has slot_mode="none": its blocks hold no tokens, as {layout.name!r} needs.')
    if kind == "state" and (spec.blocks_per_kv_block > 1 or is_shared_out):
        raise ArgumentError(
            f"{layout.name!r} needs a group of whole blocks that is not sharded; group {group} has "
            f"{spec.blocks_per_kv_block} kernel blocks in a block and is {'' if is_shared_out else 'not '}sharded."
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
        self._views: weakref.WeakKeyDictionary[ExportBuffers, dict[int, Export]] = weakref.WeakKeyDictionary()
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

    def check_own(self, out: ExportBuffers, layout: Layout, groups: tuple[int, ...]) -> None:
        """Refuse buffers that this table did not make, or made for something else."""
        if out not in self._views:
            raise ArgumentError("out must be what this table's create_export() or create_buffers() made.")
        if (out.layout, out.groups) != (layout, groups):
            raise ArgumentError(
                f"out was made for layout {out.layout.name!r} of groups {out.groups}, not for {layout.name!r} of "
                f"groups {groups}."
            )

    def create(self, layout: Layout, groups: tuple[int, ...], capacity: int | None) -> ExportBuffers:
        """Allocate one set, and compile what writes it."""
        most, num_kernel_blocks = check_export(self._config, layout, groups, capacity)
        width = export_width(self._config, layout, groups[0])
        rows, make = self._config.max_num_reqs, self._array  # of a batch
        is_csr = layout.kind in ("csr", "token_csr")
        fills = tuple(fill_of(self._config, layout, group) for group in groups)
        shape = {
            "table": (rows, width),
            "kv_offsets": (rows, 2, width),
            "csr": (most,),
            "token_csr": (most,),
            "inverse_map": (rows, num_kernel_blocks),
            "state": (rows,) if layout.state_columns == "first" else (rows, layout.num_columns),
            "placeholder": (rows, 1),
        }.get(layout.kind)
        out = ExportBuffers(
            layout=layout,
            groups=groups,
            width=width,
            capacity=most,
            num_kernel_blocks=num_kernel_blocks,
            members=self._backend.from_host(np.array(groups, np.int32), self._device),
            fills=fills,
            counts=make((2 * rows + 2,)),
            entries=None if shape is None else make((len(groups), *shape), layout.dtype, fills),
            indptr=make((rows + 1,)) if is_csr else None,
            last_page_lens=make((rows,)) if is_csr else None,
            lengths=make((rows,)) if is_csr or layout.kind == "lengths" else None,
            mapped=make((len(groups), rows, width)) if layout.kind == "inverse_map" else None,
            num_cut=make((1,)) if is_csr else None,
        )
        self._views[out] = {}
        if layout.kind != "placeholder":
            self._warm_up(out)
        return out

    def _array(self, shape: tuple[int, ...], dtype: str = "int32", fills: tuple[int, ...] = ()) -> Array:
        """Return an array of zeros, or of one number for each entry of its first axis."""
        array = np.zeros(shape, dtype)
        for part, value in zip(array, fills, strict=bool(fills)):
            part[...] = value
        return self._backend.from_host(array, self._device)

    def _warm_up(self, out: ExportBuffers) -> None:
        """Compile every kernel that writes `out`, over batches that leave it as it is."""
        dummy, zero = (self._backend.from_host(np.array([value], np.int32), self._device) for value in (-1, 0))
        seq_lens = zero if needs_seq_lens(out.layout) else None
        for batch in (
            Batch(dummy, None, None, 1, 1, zero, seq_lens=seq_lens),
            Batch(None, None, None, 0, 0, None, seq_lens=seq_lens),
        ):
            self._store.export(out.layout, batch, out, stream=None)
        self._backend.synchronize(self._device)

    def reset(self, stream: int | None) -> None:
        """Fill every set again (R24)."""
        for out in list(self._views):
            self._store.reset_export(out, stream=stream)

    def view(self, out: ExportBuffers, num_rows: int) -> Export:
        """Return the result over `num_rows` batch rows, the same object each time."""
        views = self._views[out]
        found = views.get(num_rows)
        if found is None:
            found = self._make_view(out, num_rows)
            if len(views) >= MAX_CACHED_EXPORTS:
                views.clear()
            views[num_rows] = found
        return found

    def _make_view(self, out: ExportBuffers, num_rows: int) -> Export:
        entries: tuple[Array, ...] = ()
        if out.entries is not None:
            whole = tuple(out.entries[index] for index in range(len(out.groups)))
            is_csr = out.indptr is not None
            entries = whole if is_csr else tuple(shaped(array[:num_rows], out.layout) for array in whole)
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


def require_seq_lens(layout: Layout, seq_lens: Array | None) -> None:
    """Refuse an export without the lengths that it reads."""
    if seq_lens is None and needs_seq_lens(layout):
        raise DtypeError(f"seq_lens must be an int32 array of num_reqs entries for {layout.name!r}, got None.")
