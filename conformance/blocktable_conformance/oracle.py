"""The contract in plain Python: lists, ints and loops, written to be read beside docs/spec.md.

It shares no code with any backend, nor with the core's rows: from a `BlockTableConfig` it reads the fields that the
author of the config gave, and works out everything else once more. Where a backend and this page disagree, one of the
two is wrong, and this one is short enough to be checked by eye.

A *column list* below is the filled columns of one row, in kernel blocks; what follows it in the table is NULL, that is
the group's filler (R5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple, TypeAlias

from blocktable import BlockTableConfig, KVCacheGroup

PAD = -1
NULL = 0
"""What a group has that says nothing else."""

Block: TypeAlias = int | None
"""A manager block that a row holds; None is one that `null_range` made NULL (R4), or a null that was handed in (R7)."""

Table: TypeAlias = list[list[int]]
"""[rows][columns], kernel block ids."""


class Refused(Exception):
    """The contract refuses the call: any of `errors`, names of error classes, is a right answer."""

    def __init__(self, *errors: str) -> None:
        super().__init__(", ".join(errors))
        self.errors = frozenset(errors)


def ceil_div(a: int, b: int) -> int:
    """Return the smallest integer that is at least a / b."""
    return (a + b - 1) // b


class Share(NamedTuple):
    """One context-parallel rank's share: `world_size`, `rank`, `interleave_size`."""

    world_size: int
    rank: int
    interleave_size: int

    def owner(self, position: int) -> int:
        """Return the rank that holds a position (R12)."""
        return (position // self.interleave_size) % self.world_size

    def local_index(self, position: int) -> int:
        """Return where the owner keeps a position (R12)."""
        turn = self.world_size * self.interleave_size
        return (position // turn) * self.interleave_size + position % self.interleave_size

    def position(self, local_index: int) -> int:
        """Return the position that this rank keeps at a local index: the inverse of the two above."""
        interleave = self.interleave_size
        turn = local_index // interleave
        return turn * self.world_size * interleave + self.rank * interleave + local_index % interleave

    def local_length(self, seq_len: int) -> int:
        """Return how many of the first `seq_len` tokens this rank holds (R19)."""
        turn = self.world_size * self.interleave_size
        in_turn = seq_len % turn - self.rank * self.interleave_size
        return (seq_len // turn) * self.interleave_size + min(max(in_turn, 0), self.interleave_size)


@dataclass(frozen=True)
class Geometry:
    """One group's numbers, worked out from the config's fields (R1-R3, R7, R14)."""

    block_size: int
    kernel_block_size: int
    blocks_per_kv_block: int
    capacity: int
    width: int
    share: Share | None
    slot_mode: str
    sliding_window: int | None  # that a gather cuts out (R11)
    null_block_id: int
    allow_null: bool
    null_is_pad: bool
    pad_slot_id: int
    block_id_limit: int

    @property
    def filler(self) -> int:
        """Return what stands where there is no block (R5)."""
        return -1 if self.null_block_id == -1 else self.null_block_id * self.blocks_per_kv_block

    @property
    def is_shared(self) -> bool:
        """Say whether ranks share the group's tokens (R18)."""
        return self.share is not None and self.share.world_size > 1

    def is_missing(self, entry: int) -> bool:
        """Say whether a table entry stands for no block (R5)."""
        if self.null_block_id == -1:
            return entry == -1
        return entry // self.blocks_per_kv_block == self.null_block_id

    def columns_of(self, block: Block) -> list[int]:
        """Return the kernel blocks that stand for a manager block (R2, R7)."""
        if block is None:
            return [self.filler] * self.blocks_per_kv_block
        first = block * self.blocks_per_kv_block
        return list(range(first, first + self.blocks_per_kv_block))


def geometry(config: BlockTableConfig, group: KVCacheGroup) -> Geometry:
    """Work out one group's numbers."""
    kernel_block_size = group.kernel_block_size or group.block_size
    blocks_per_kv_block = group.block_size // kernel_block_size
    linear = group.slot_mode == "linear"
    sharded = linear if group.sharded is None else group.sharded
    parallel = config.context_parallel
    share = Share(parallel.world_size, parallel.rank, parallel.interleave_size)

    capacity = group.blocks_per_row
    if capacity is None:
        tokens_per_block = group.block_size * (share.world_size if sharded else 1)
        capacity = ceil_div(config.max_model_len + config.lookahead_tokens, tokens_per_block) + group.extra_blocks
    width = capacity * blocks_per_kv_block
    if group.blocks_per_row is None and group.slot_mode != "none":
        step = config.width_alignment // gcd(config.width_alignment, kernel_block_size)
        width = ceil_div(width, step) * step

    limit = 2**31 // blocks_per_kv_block
    return Geometry(
        block_size=group.block_size,
        kernel_block_size=kernel_block_size,
        blocks_per_kv_block=blocks_per_kv_block,
        capacity=capacity,
        width=width,
        share=share if sharded else None,
        slot_mode=group.slot_mode,
        sliding_window=group.sliding_window if linear else None,
        null_block_id=group.null_block_id,
        allow_null=group.allow_null,
        null_is_pad=group.null_is_pad,
        pad_slot_id=group.pad_slot_id,
        block_id_limit=limit if group.num_blocks is None else min(limit, group.num_blocks),
    )


class Slot(NamedTuple):
    """One entry of a slot mapping, and how it came about: what a failure has to say."""

    value: int
    rule: str
    token: int
    request: int | None = None
    row: int | None = None
    position: int | None = None
    column: int | None = None
    block_id: int | None = None


def place(
    shape: Geometry, filled: int, position: int, last_position: int, *, is_named: bool = False
) -> tuple[int, int] | str:
    """Return column and offset of a position in a row of `filled` columns, or the rules that make it PAD.

    Args:
        shape: of the group.
        filled: columns of the row.
        position: of the token.
        last_position: of its request's last token in this call.
        is_named: whether the call names the group.

    Rules: R12, R13, R14.
    """
    size = shape.kernel_block_size
    if shape.slot_mode == "none" or position < 0:
        return "R13"
    if shape.slot_mode == "cross" and not is_named:
        return "R13, R14"
    if shape.slot_mode == "ring" and filled and position <= last_position - filled * size:
        return "R14"
    if shape.slot_mode == "ring":
        local = position % (filled * size) if filled else 0
    elif shape.share is None:
        local = position
    elif shape.share.owner(position) != shape.share.rank:
        return "R13, R18"
    else:
        local = shape.share.local_index(position)
    column = local // size
    return (column, local % size) if column < filled else "R13"


class Located(NamedTuple):
    """What `BlockTable.locate` answers about a slot."""

    block_id: int
    kernel_block_id: int
    offset: int
    rows: tuple[tuple[int, int, int], ...]


class OracleTable:
    """A block table, host and device: what every operation must leave.

    Attributes:
        shapes: one `Geometry` for each group.
        rows: [groups][num_rows], each the list of manager blocks the row holds; the host's state.
        committed: [groups][num_rows], each a column list; what kernels see (R9.2).
    """

    def __init__(self, config: BlockTableConfig) -> None:
        self.shapes = [geometry(config, group) for group in config.groups]
        self.num_rows = config.max_num_reqs if config.max_num_rows is None else config.max_num_rows
        self.num_batch_rows = config.max_num_reqs
        self.num_tokens = config.max_num_batched_tokens
        self.rows: list[list[list[Block]]] = [[[] for _ in range(self.num_rows)] for _ in self.shapes]
        self.committed: list[Table] = [[[] for _ in range(self.num_rows)] for _ in self.shapes]

    # Row operations (R4-R8). Each looks at everything first, so that a refusal has changed nothing (R6).

    def append_row(self, row: int, block_ids: Any) -> None:
        """Add blocks after what a row holds."""
        self._check_row(row)
        self._extend([row], [[ids] for ids in self._ids_per_group(block_ids)])

    def set_row(self, row: int, block_ids: Any) -> None:
        """Replace what a row holds."""
        self._check_row(row)
        self._replace([row], [[ids] for ids in self._ids_per_group(block_ids)])

    def append_rows(self, rows: Sequence[int], block_ids: Any, counts: Any) -> None:
        """Add blocks after what each of several rows holds."""
        self._check_rows(rows)
        self._extend(rows, self._split(block_ids, counts, len(rows)))

    def set_rows(self, rows: Sequence[int], block_ids: Any, counts: Any) -> None:
        """Replace what each of several rows holds."""
        self._check_rows(rows)
        self._replace(rows, self._split(block_ids, counts, len(rows)))

    def clear_row(self, row: int) -> None:
        """Empty a row."""
        self.clear_rows([row])

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Empty several rows."""
        self._check_rows(rows)
        for group in self.rows:
            for row in rows:
                group[row] = []

    def clear(self) -> None:
        """Empty every row."""
        self.clear_rows(range(self.num_rows))

    def move_row(self, src: int, dst: int) -> None:
        """Make `dst` what `src` was, and vacate `src`."""
        self._check_row(src)
        self._check_row(dst)
        if src != dst:
            self.permute_rows([src], [dst])

    def swap_rows(self, a: int, b: int) -> None:
        """Exchange two rows."""
        self._check_row(a)
        self._check_row(b)
        if a != b:
            self.permute_rows([a, b], [b, a])

    def copy_row(self, src: int, dst: int) -> None:
        """Make `dst` what `src` is; both then hold the same ids."""
        self._check_row(src)
        self._check_row(dst)
        for group in self.rows:
            group[dst] = list(group[src])

    def permute_rows(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Make every `dst[i]` what `src[i]` was before the call; a source that is not a destination becomes empty."""
        self._check_rows(src)
        self._check_rows(dst)
        if len(src) != len(dst):
            raise Refused("ArgumentError")
        for group in self.rows:
            sources = [group[row] for row in src]
            for row in src:
                group[row] = []
            for row, blocks in zip(dst, sources, strict=True):
                group[row] = blocks

    def copy_rows(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Make every `dst[i]` what `src[i]` was before the call; a source may repeat."""
        for row in src:
            self._check_row(row)
        self._check_rows(dst)
        if len(src) != len(dst):
            raise Refused("ArgumentError")
        for group in self.rows:
            sources = [list(group[row]) for row in src]
            for row, blocks in zip(dst, sources, strict=True):
                group[row] = blocks

    def truncate_row(self, row: int, num_blocks: Any) -> None:
        """Keep the first blocks of a row: one number for all groups, or one for each."""
        self._check_row(row)
        kept = [num_blocks] * len(self.shapes) if isinstance(num_blocks, int) else list(num_blocks)
        self._truncate([row], [[number] for number in kept])

    def truncate_rows(self, rows: Sequence[int], num_blocks: Any) -> None:
        """Keep the first blocks of several rows: [n] for all groups, or [n] for each."""
        self._check_rows(rows)
        self._truncate(rows, self._counts(num_blocks, len(rows)))

    def null_range(self, row: int, group: int, start: int, stop: int) -> None:
        """Make manager blocks `start .. stop - 1` of a row NULL; later ones stay."""
        self._check_row(row)
        self.null_ranges([row], group, [start], [stop])

    def null_ranges(self, rows: Sequence[int], group: int, starts: Sequence[int], stops: Sequence[int]) -> None:
        """Make manager blocks of several rows NULL."""
        self._check_rows(rows)
        if not 0 <= group < len(self.shapes) or not len(rows) == len(starts) == len(stops):
            raise Refused("ArgumentError")
        for row, start, stop in zip(rows, starts, stops, strict=True):
            if not 0 <= start <= stop <= len(self.rows[group][row]):
                raise Refused("ArgumentError")
        for row, start, stop in zip(rows, starts, stops, strict=True):
            self.rows[group][row][start:stop] = [None] * (stop - start)

    def replace_blocks(self, row: int, group: int, start: int, block_ids: Any) -> None:
        """Exchange blocks of a row from `start` on, one for each id."""
        self._check_row(row)
        ids = block_ids or []
        self.replace_block_ranges([row], group, [start], ids, [len(ids)])

    def replace_block_ranges(
        self, rows: Sequence[int], group: int, starts: Sequence[int], block_ids: Any, counts: Sequence[int]
    ) -> None:
        """Exchange blocks of several rows: `counts[i]` of the ids are for row `rows[i]`."""
        self._check_rows(rows)
        ids = self._ids_of(group, block_ids)
        if not len(rows) == len(starts) == len(counts) or sum(counts) != len(ids):
            raise Refused("ArgumentError")
        for row, start, count in zip(rows, starts, counts, strict=True):
            if start < 0 or count < 0 or start + count > len(self.rows[group][row]):
                raise Refused("ArgumentError")
        for row, start, count in zip(rows, starts, counts, strict=True):
            self.rows[group][row][start : start + count], ids = ids[:count], ids[count:]

    def remap_blocks(self, group: int, old_ids: Any, new_ids: Any) -> None:
        """Make every `old_ids[i]` that a row holds `new_ids[i]`, all together."""
        old, new = self._ids_of(group, old_ids), self._ids_of(group, new_ids)
        if len(old) != len(new) or len(set(old)) != len(old) or None in old:
            raise Refused("ArgumentError")
        mapping = dict(zip(old, new, strict=True))
        self.rows[group] = [[mapping.get(block, block) for block in blocks] for blocks in self.rows[group]]

    # Looking at the host.

    def block_ids(self, row: int, group: int) -> list[int]:
        """Return the manager ids of a row; the null block's where there is a hole."""
        null = self.shapes[group].null_block_id
        return [null if block is None else block for block in self.rows[group][row]]

    def common_blocks(self, rows: Sequence[int], group: int) -> int:
        """Return how many leading blocks all of some rows hold; a hole is not common."""
        count = 0
        for blocks in zip(*(self.rows[group][row] for row in rows), strict=False):
            if len(set(blocks)) > 1 or blocks[0] is None:
                break
            count += 1
        return count

    def kernel_block_ids(self, group: int, ids: Sequence[int]) -> list[int]:
        """Return the kernel blocks of manager blocks; the null block stands for a hole (R2, R7)."""
        shape = self.shapes[group]
        return [column for block in ids for column in shape.columns_of(None if block == shape.null_block_id else block)]

    def num_blocks_per_row(self) -> list[list[int]]:
        """Return [groups][num_rows]: manager blocks of each row."""
        return [[len(blocks) for blocks in group] for group in self.rows]

    def columns(self, group: int, row: int) -> list[int]:
        """Return the column list of a row on the host (R2)."""
        shape = self.shapes[group]
        return [column for block in self.rows[group][row] for column in shape.columns_of(block)]

    def host_table(self, group: int) -> Table:
        """Return [num_rows][width], NULL after the filled columns (R5)."""
        return [self._wide(group, self.columns(group, row)) for row in range(self.num_rows)]

    def locate(self, group: int, slot: int) -> Located:
        """Return which block a slot lies in, and every (row, block index, position) whose token lives there.

        In a ring group the position is the smallest of those that share the slot.
        """
        shape = self.shapes[group]
        kernel_block_id, offset = divmod(slot, shape.kernel_block_size)
        found = []
        for row in range(self.num_rows):
            for column, block_id in enumerate(self.columns(group, row)):
                if block_id == kernel_block_id:
                    local = column * shape.kernel_block_size + offset
                    position = local if shape.share is None else shape.share.position(local)
                    found.append((row, column // shape.blocks_per_kv_block, position))
        return Located(kernel_block_id // shape.blocks_per_kv_block, kernel_block_id, offset, tuple(found))

    # Device (R9-R15).

    def commit(self) -> None:
        """Make the device what the host is (R9.1)."""
        self.committed = [[self.columns(g, row) for row in range(self.num_rows)] for g in range(len(self.shapes))]

    def device_table(self, group: int) -> Table:
        """Return [num_rows][width] as of the last commit."""
        return [self._wide(group, columns) for columns in self.committed[group]]

    def device_filled(self) -> list[list[int]]:
        """Return [groups][num_rows]: filled columns as of the last commit."""
        return [[len(columns) for columns in group] for group in self.committed]

    def gather(self, idx_mapping: Sequence[int], num_computed_tokens: Sequence[int] | None = None) -> list[Table]:
        """Return the whole batch buffer of each group, [max_num_reqs][width] (R10, R11).

        Rows after the batch are NULL, asked for or not: nothing of an earlier, larger batch survives.
        """
        tables = []
        for g in range(len(self.shapes)):
            batch_rows = []
            for i, row in enumerate(idx_mapping):
                computed = None if num_computed_tokens is None else num_computed_tokens[i]
                batch_rows.append(self._wide(g, self.batch_columns(g, row, computed)))
            batch_rows += [self._wide(g, []) for _ in range(self.num_batch_rows - len(idx_mapping))]
            tables.append(batch_rows)
        return tables

    def batch_columns(self, group: int, row: int, num_computed_tokens: int | None = None) -> list[int]:
        """Return the column list that a batch shows of a row; a padding entry's is empty (R10, R11)."""
        shape, columns = self.shapes[group], self.committed_columns(group, row)
        if shape.sliding_window is None or num_computed_tokens is None:
            return columns
        passed = self._passed_columns(shape, num_computed_tokens)
        return [shape.filler] * min(passed, len(columns)) + columns[passed:]

    def slots(
        self,
        idx_mapping: Sequence[int],
        query_start_loc: Sequence[int],
        positions: Sequence[int],
        length: int,
        groups: Sequence[int] | None = None,
    ) -> list[list[Slot]]:
        """Return `length` slots for each group, or for those that are named, in that order (R12-R15)."""
        num_tokens = min(query_start_loc[-1], len(positions), length)
        mappings = []
        for g in range(len(self.shapes)) if groups is None else groups:
            slots = []
            for token in range(num_tokens):
                request = request_of(token, query_start_loc)
                last = (
                    positions[token]
                    if request is None
                    else positions[min(query_start_loc[request + 1], num_tokens) - 1]
                )
                row = None if request is None else idx_mapping[request]
                slots.append(self.slot(g, token, request, row, positions[token], last, is_named=groups is not None))
            slots += [Slot(self.shapes[g].pad_slot_id, "R15", token) for token in range(num_tokens, length)]
            mappings.append(slots)
        return mappings

    def slot(
        self,
        group: int,
        token: int,
        request: int | None,
        row: int | None,
        position: int,
        last_position: int,
        *,
        is_named: bool = False,
    ) -> Slot:
        """Return the slot of one token (R12, R13)."""
        shape = self.shapes[group]
        pad = shape.pad_slot_id
        if row is None:
            return Slot(pad, "R13", token, position=position)
        columns = self.committed_columns(group, row)
        found = place(shape, len(columns), position, last_position, is_named=is_named)
        if isinstance(found, str):
            return Slot(pad, found, token, request, row, position)
        column, offset = found
        block_id = columns[column]
        if shape.is_missing(block_id) and (shape.null_is_pad or block_id == -1):
            return Slot(pad, "R13", token, request, row, position, column, block_id)
        rule = "R14" if shape.slot_mode == "ring" else "R12" if shape.share is None else "R12, R18"
        return Slot(block_id * shape.kernel_block_size + offset, rule, token, request, row, position, column, block_id)

    def positions(self, rows: Sequence[int], group: int, positions: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the slot of every position of every token's row, -1 where it has none (R36)."""
        return [
            [self._slot_of_position(group, row, position) for position in wanted]
            for row, wanted in zip(rows, positions, strict=True)
        ]

    def _slot_of_position(self, group: int, row: int, position: int) -> int:
        shape, columns = self.shapes[group], self.committed_columns(group, row)
        found = place(shape, len(columns), position, position, is_named=True)
        if isinstance(found, str):
            return -1
        column, offset = found
        is_hole = shape.is_missing(columns[column]) and (shape.null_is_pad or shape.null_block_id == -1)
        return -1 if is_hole else columns[column] * shape.kernel_block_size + offset

    # Parts.

    def _wide(self, group: int, columns: list[int]) -> list[int]:
        return columns + [self.shapes[group].filler] * (self.shapes[group].width - len(columns))

    def committed_columns(self, group: int, row: int) -> list[int]:
        """Return a row's column list as of the last commit; a padding entry's is empty (R10.2)."""
        return self.committed[group][row] if 0 <= row < self.num_rows else []

    @staticmethod
    def _passed_columns(shape: Geometry, num_computed_tokens: int) -> int:
        assert shape.sliding_window is not None
        lo = max(0, num_computed_tokens - shape.sliding_window + 1)
        return (lo if shape.share is None else shape.share.local_length(lo)) // shape.kernel_block_size

    def _check_row(self, row: Any) -> None:
        if isinstance(row, bool) or not isinstance(row, int):
            raise Refused("DtypeError")
        if not 0 <= row < self.num_rows:
            raise Refused("RowIndexError")

    def _check_rows(self, rows: Iterable[int]) -> None:
        seen = set()
        for row in rows:
            self._check_row(row)
            if row in seen:
                raise Refused("ArgumentError")
            seen.add(row)

    def _ids_per_group(self, block_ids: Any) -> list[list[Block]]:
        """Return one list of ids for each group; nothing is an empty list (R7, R8)."""
        if block_ids is None or len(block_ids) == 0:
            return [[] for _ in self.shapes]
        flat = all(isinstance(value, int) for value in block_ids)
        if flat and len(self.shapes) == 1:
            block_ids = [block_ids]
        elif flat:
            raise Refused("DtypeError", "ArgumentError")
        if len(block_ids) != len(self.shapes):
            raise Refused("ArgumentError")
        for shape, ids in zip(self.shapes, block_ids, strict=True):
            for block_id in ids or []:
                self._check_id(shape, block_id)
        return [
            [None if block_id == shape.null_block_id else block_id for block_id in ids or []]
            for shape, ids in zip(self.shapes, block_ids, strict=True)
        ]

    def _ids_of(self, group: int, ids: Any) -> list[Block]:
        """Return the blocks that ids of one group name; nothing is an empty list (R7, R8)."""
        if isinstance(group, bool) or not isinstance(group, int):
            raise Refused("DtypeError")
        if not 0 <= group < len(self.shapes):
            raise Refused("ArgumentError")
        shape = self.shapes[group]
        for block_id in ids or []:
            self._check_id(shape, block_id)
        return [None if block_id == shape.null_block_id else block_id for block_id in ids or []]

    @staticmethod
    def _check_id(shape: Geometry, block_id: Any) -> None:
        if isinstance(block_id, bool) or not isinstance(block_id, int):
            raise Refused("DtypeError")
        if block_id == shape.null_block_id:
            if not shape.allow_null:
                raise Refused("ArgumentError")
        elif not 0 <= block_id < shape.block_id_limit:
            raise Refused("ArgumentError")

    def _split(self, block_ids: Any, counts: Any, num_rows: int) -> list[list[list[Block]]]:
        """Return [groups][rows] lists of ids from one flat list for each group and the counts (R4)."""
        cells = []
        for flat, numbers in zip(self._ids_per_group(block_ids), self._counts(counts, num_rows), strict=True):
            if flat and sum(numbers) != len(flat):
                raise Refused("ArgumentError")
            rest = list(flat)
            cells.append([[rest.pop(0) for _ in range(number if flat else 0)] for number in numbers])
        return cells

    def _counts(self, counts: Any, num_rows: int) -> list[list[int]]:
        nested = len(counts) > 0 and not isinstance(counts[0], int)
        per_group = [list(numbers) for numbers in counts] if nested else [list(counts) for _ in self.shapes]
        if len(per_group) != len(self.shapes) or any(len(numbers) != num_rows for numbers in per_group):
            raise Refused("ArgumentError")
        if any(number < 0 for numbers in per_group for number in numbers):
            raise Refused("ArgumentError")
        return per_group

    def _extend(self, rows: Sequence[int], cells: list[list[list[Block]]]) -> None:
        self._store(rows, cells, lambda old, new: old + new)

    def _replace(self, rows: Sequence[int], cells: list[list[list[Block]]]) -> None:
        self._store(rows, cells, lambda _old, new: new)

    def _store(
        self,
        rows: Sequence[int],
        cells: list[list[list[Block]]],
        combine: Callable[[list[Block], list[Block]], list[Block]],
    ) -> None:
        """Make each row `combine(old blocks, new blocks)`, or refuse all of it where one is over capacity (R6)."""
        changed = [
            [combine(self.rows[g][row], list(blocks)) for row, blocks in zip(rows, cells[g], strict=True)]
            for g in range(len(self.shapes))
        ]
        for shape, group in zip(self.shapes, changed, strict=True):
            if any(len(blocks) > shape.capacity for blocks in group):
                raise Refused("RowCapacityError")
        for g, group in enumerate(changed):
            for row, blocks in zip(rows, group, strict=True):
                self.rows[g][row] = blocks

    def _truncate(self, rows: Sequence[int], kept: list[list[int]]) -> None:
        if len(kept) != len(self.shapes) or any(number < 0 for numbers in kept for number in numbers):
            raise Refused("ArgumentError")
        for group, numbers in zip(self.rows, kept, strict=True):
            for row, number in zip(rows, numbers, strict=True):
                del group[row][number:]


def request_of(token: int, query_start_loc: Sequence[int]) -> int | None:
    """Return the request that a token belongs to; tokens before the first request belong to none (R13).

    `query_start_loc` does not decrease: what it gives otherwise is unspecified (R15).
    """
    for request in range(len(query_start_loc) - 1):
        if query_start_loc[request] <= token < query_start_loc[request + 1]:
            return request
    return None
