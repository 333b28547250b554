"""What the numpy host path does or refuses, the compiled one does or refuses in the same words, operation by operation.

    python tests/test_host_paths.py 1000000 --seed 7

runs that many random operations; pytest runs a few thousand. After each one both paths must hold the same rows, have
the same changes pending, and be independent of the arguments, which are overwritten.
"""

from __future__ import annotations

import argparse
import array
import copy
import re
import time
from collections import Counter, UserList, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest

from blocktable import BlockTableConfig, ConfigError, ContextParallel, KVCacheGroup
from blocktable.config import SlotMode
from blocktable.host_path import HostPath
from blocktable.row_operations import RowOperations
from blocktable.rows import NumpyRows
from blocktable.typing import IntArray

pytest.importorskip("blocktable_compiled.operations", reason="the compiled host path was not built")

from blocktable_compiled.rows import CompiledRows

# Tables.


class Table(RowOperations):
    """The row operations of a table over one host path, and what a device would hold."""

    def __init__(self, config: BlockTableConfig, rows: HostPath) -> None:
        self.config, self._rows = config, rows
        self.device = np.zeros(config.arena.size, np.int32)
        self.device[:] = rows.mirror

    def commit(self, room: int) -> int:
        """Send what is pending: packed where it fits in `room` entries, else as ranges."""
        block = np.zeros(room, np.int32)
        used = self._rows.pack_changes(block)
        if used < 0:
            writes = self._rows.writes()
            for offset, length, end in zip(writes.offsets, writes.lengths, np.cumsum(writes.lengths), strict=True):
                self.device[offset : offset + length] = writes.values[end - length : end]
        elif used:
            for entry, value in unpacked(block[:used]).items():
                self.device[entry] = value
        self._rows.committed()
        return used


def unpacked(block: IntArray) -> dict[int, int]:
    """Return what a packed commit writes, entry by entry; each is written once."""
    singles, num_ranges, num_values, num_constants, num_entries = block[:5].tolist()
    sizes = [singles, singles, num_ranges, num_ranges, num_values, num_constants, num_constants]
    parts = [part.tolist() for part in np.split(block[5:], np.cumsum(sizes))]
    found = [*zip(parts[0], parts[1], strict=True)]
    for offset, (start, end) in zip(parts[2], pairwise([*parts[3], num_values]), strict=True):
        found += enumerate(parts[4][start:end], offset)
    for offset, (start, end), value in zip(parts[5], pairwise([*parts[6], num_entries]), parts[7], strict=True):
        found += [(offset + place, value) for place in range(end - start)]
    assert parts[8:] == []
    assert len(dict(found)) == len(found)
    return dict(found)


class Watched(CompiledRows):
    """Compiled rows that count what falls to the numpy path."""

    falls = 0

    def append(self, rows: IntArray, block_ids: Any, counts: Any) -> None:
        self.falls += 1
        super().append(rows, block_ids, counts)

    def set(self, rows: IntArray, block_ids: Any, counts: Any) -> None:
        self.falls += 1
        super().set(rows, block_ids, counts)


def random_group(rng: Random) -> KVCacheGroup:
    k = rng.choice([1, 1, 2, 3])
    modes: list[SlotMode] = ["linear", "linear", "linear", "ring", "none", "cross"]
    mode = rng.choice(modes)
    return KVCacheGroup(
        block_size=4 * k,
        kernel_block_size=4,
        num_blocks=rng.choice([None, 12, 90]),
        sliding_window=rng.choice([None, 9]) if mode != "cross" else None,
        slot_mode=mode,
        null_block_id=rng.choice([0, 0, -1, 3]),
        allow_null=rng.choice([False, True]),
        blocks_per_row=rng.choice([None, 5]) if mode != "linear" else None,
    )


def random_config(rng: Random) -> BlockTableConfig:
    """Most tables are small; the large one is above the size from which a commit may send everything."""
    world_size = rng.choice([1, 1, 1, 2])
    length, num_rows = (4 * 2100, 40) if rng.random() < 0.02 else (rng.choice([16, 40, 100]), rng.choice([1, 2, 7, 12]))
    while True:
        try:
            return BlockTableConfig(
                groups=[random_group(rng) for _ in range(rng.choice([1, 1, 2, 3, 8]))],
                max_num_reqs=num_rows,
                max_num_batched_tokens=8,
                max_model_len=length,
                max_num_rows=rng.choice([None, num_rows + 3]),
                width_alignment=rng.choice([1, 128]),
                context_parallel=ContextParallel(world_size=world_size, rank=world_size - 1, interleave_size=4),
            )
        except ConfigError:
            continue


# Arguments. Each is made anew for each path: some change when they are looked at.

Make = Callable[[list[Any]], Any]


class Subclass(np.ndarray[Any, Any]):
    pass


class OddList(list[Any]):
    pass


class OddTuple(tuple[Any, ...]):
    pass


class OddInt(int):
    """An int of a class of its own, which empties the list that it is in when it is asked for its value."""

    home: list[Any]

    def __index__(self) -> int:
        self.home.clear()
        return 1

    __int__ = __index__


class Indexed:
    """No int, and empties its list when it is asked to be one."""

    home: list[Any]

    def __index__(self) -> int:
        self.home.clear()
        return 1

    def __repr__(self) -> str:
        return "Indexed()"


class Liar(Sequence[Any]):
    """Has another length than it says."""

    def __init__(self, items: list[Any], length: int) -> None:
        self.items, self.length = items, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]


class LyingList(list[Any]):
    def __len__(self) -> int:
        return 1


class BrokenList(list[Any]):
    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __repr__(self) -> str:
        return "BrokenList()"


def strided(ints: list[int], dtype: str, step: int) -> IntArray:
    wide = np.full(abs(step) * max(len(ints), 1), 77, dtype)
    view = wide[::step][: len(ints)]
    view[:] = np.array(ints, np.int64).astype(dtype)
    return view


def misaligned(ints: list[int]) -> IntArray:
    shifted = np.zeros(8 * len(ints) + 1, np.uint8)[1:].view(np.int64)
    shifted[:] = ints
    return shifted


def read_only(ints: list[int]) -> IntArray:
    found = np.array(ints, np.int32)
    found.flags.writeable = False
    return found


def as_range(ints: list[int]) -> Any:
    step = ints[1] - ints[0] if len(ints) > 1 else 1
    if not ints or not step or any(after - before != step for before, after in pairwise(ints)):
        return ints or range(3, 3)
    return range(ints[0], ints[-1] + (1 if step > 0 else -1), step)


def with_one(item: Any) -> Make:
    def make(ints: list[Any]) -> Any:
        found = list(ints)
        found[len(found) // 2 : len(found) // 2 + 1] = [copy.copy(item)]
        return found

    return make


def with_owner(kind: type[Any]) -> Make:
    def make(ints: list[Any]) -> Any:
        item = kind(5) if kind is OddInt else kind()
        item.home = [item, *ints[1:]]
        return item.home

    return make


DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "longlong", "ulonglong")
"""Of ints that are no larger than 127, so each holds them."""

ORDINARY: list[Make] = [
    list,
    list,
    tuple,
    as_range,
    as_range,
    read_only,
    *(lambda ints, dtype=dtype: np.array(ints, np.int64).astype(dtype) for dtype in DTYPES),
    *(lambda ints, dtype=dtype: strided(ints, dtype, 3) for dtype in DTYPES),
    *(lambda ints, dtype=dtype: strided(ints, dtype, -2) for dtype in DTYPES),
]
"""What the compiled path takes."""

ODD: list[Make] = [
    misaligned,
    OddList,
    OddTuple,
    UserList,
    deque,
    iter,
    set,
    dict.fromkeys,
    str,
    lambda ints: bytes(each % 256 for each in ints),
    lambda ints: memoryview(bytes(each % 256 for each in ints)),
    LyingList,
    BrokenList,
    with_owner(OddInt),
    with_owner(Indexed),
    *(with_one(item) for item in (True, False, None, 2.0, "3", [4], np.int64(5), np.uint64(2**63), np.bool_(1))),
    *(with_one(item) for item in (2**31, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**64), -1, np.array(3))),
    lambda ints: (each for each in ints),
    lambda ints: array.array("q", ints),
    lambda ints: Liar(ints, len(ints) + 1),
    lambda ints: Liar(ints, max(len(ints) - 1, 0)),
    lambda ints: Liar(ints, 0),
    lambda ints: np.array(ints, ">i4"),
    lambda ints: np.array(ints, ">i8"),
    lambda ints: np.array(ints, np.int32).view(Subclass),
    lambda ints: np.ma.array(ints, np.int32, mask=[each % 2 for each in ints]),
    lambda ints: np.array([ints], np.int32),
    lambda ints: np.array([ints], np.int32).T,
    lambda ints: np.array(ints, np.float64),
    lambda ints: np.array(ints, np.float16)[:0],
    lambda ints: np.array(ints, np.bool_),
    lambda ints: np.array(ints, object),
    lambda ints: np.array(ints, "datetime64[s]"),
    lambda ints: np.array(ints, "timedelta64[s]"),
    lambda ints: np.array([str(each) for each in ints]),
    lambda ints: np.zeros(len(ints), [("a", np.int32), ("b", np.int16)]),
    lambda ints: np.array([(each, 9) for each in ints], [("a", np.int32), ("b", np.int16)])["a"],
    lambda ints: np.broadcast_to(np.int32(3), len(ints)),
    lambda ints: np.array(len(ints)),
    lambda ints: [ints],
    lambda ints: [[ints]],
    lambda ints: [list(ints), None],
    lambda ints: [[each] for each in ints],
    lambda ints: ints[:-1],
    lambda ints: [*ints, 1],
    lambda ints: range(2**40, 2**40 + len(ints)),
    lambda ints: range(2**64, 2**64 + len(ints)),
    lambda ints: range(0, len(ints) * 2**62, 2**62),
    lambda ints: range(0, -len(ints), -1),
    lambda ints: range(5, 5, 2**70),
    lambda ints: range(2**40),
    lambda ints: range(2**70),
    lambda ints: len(ints),
    lambda ints: None,
    lambda ints: 1.5,
]
"""What it may leave to the numpy path, which takes or refuses it."""

ODD_SCALARS: list[Any] = [
    True, None, 1.0, "1", [1], (1,), 2**31, 2**62, 2**63, 2**64, -1, -(2**63), -(2**64), np.int64(1), np.uint8(0),
    np.bool_(True), np.array(1), np.array([1]), np.float64(1), b"1", 12, range(1), slice(1),
]  # fmt: skip


class Argument(NamedTuple):
    """What makes an argument, and whether the compiled path must take it."""

    make: Callable[[], Any]
    is_ordinary: bool


class Caller:
    """Makes operations that mostly fit what a table holds.

    Args:
        rng: where they come from.
        table: looked at, not changed.
        oddness: how often an argument is out of the ordinary.
    """

    def __init__(self, rng: Random, table: Table, oddness: float) -> None:
        self.rng, self.table, self.oddness = rng, table, oddness
        self.num_groups, self.num_rows = len(table.config.groups), table.config.num_rows
        self.capacities = [table.config.capacity(group) for group in range(self.num_groups)]

    def is_odd(self) -> bool:
        return self.rng.random() < self.oddness

    def ints(self, values: list[int]) -> Argument:
        is_odd = self.is_odd()
        make = self.rng.choice(ODD if is_odd else ORDINARY)
        return Argument(lambda: make(list(values)), not is_odd and min(values, default=0) >= 0)

    def scalar(self, value: int) -> Argument:
        if self.is_odd():
            odd = self.rng.choice(ODD_SCALARS)
            return Argument(lambda: copy.copy(odd), False)
        return Argument(lambda: value, True)

    def row(self) -> Argument:
        return self.scalar(self.rng.randrange(self.num_rows))

    def group(self) -> int:
        return self.rng.randrange(self.num_groups)

    def rows(self) -> list[int]:
        n = self.rng.randint(0, self.num_rows)
        if self.rng.random() < 0.2:
            first = self.rng.randint(0, self.num_rows - n)
            return list(range(first, first + n))
        found = self.rng.sample(range(self.num_rows), n)
        if n and self.is_odd():
            found[0] = self.rng.choice([found[-1], -1, self.num_rows, 127])
        return found

    def ids(self, group: int, n: int) -> list[int]:
        geometry = self.table.config.groups[group]
        limit = min(geometry.num_blocks or 120, 120)
        if self.rng.random() < 0.1 and n < limit - 4:
            return list(range(4, 4 + n))
        found = [self.rng.choice((1, 2, self.rng.randrange(4, limit))) for _ in range(n)]
        if n and geometry.allow_null and self.rng.random() < 0.3:
            found[self.rng.randrange(n)] = geometry.null_block_id
        if n and self.is_odd():
            found[self.rng.randrange(n)] = self.rng.choice([-1, 0, 3, limit - 1, limit, -5])
        return found

    def per_group(self, lines: list[Argument]) -> Argument:
        """All groups' lines: a list or tuple of them; of one group also itself; sometimes one array."""
        rng = self.rng
        if self.is_odd():
            make: Callable[[], Any] = rng.choice(
                [
                    lambda: None,
                    list,
                    lambda: [line.make() for line in lines[1:]],
                    lambda: [*(line.make() for line in lines), []],
                    lambda: OddList(line.make() for line in lines),
                    lambda: UserList([line.make() for line in lines]),
                    lambda: (line.make() for line in lines),
                    lambda: LyingList(line.make() for line in lines),
                    lambda: Liar([line.make() for line in lines], len(lines) + 1),
                    lambda: {index: line.make() for index, line in enumerate(lines)},
                    lambda: [[line.make()] for line in lines],
                    lambda: np.empty((len(lines), 0)),
                    lambda: np.zeros((len(lines), 2, 2), np.int32),
                    lambda: [1] * len(lines),
                    lambda: np.array(7),
                ]
            )
            return Argument(make, False)
        is_ordinary = all(line.is_ordinary for line in lines)
        if len(lines) == 1 and rng.random() < 0.5:
            return lines[0]
        kind = rng.choice([list, tuple])
        return Argument(lambda: kind(line.make() for line in lines), is_ordinary)

    def block_ids(self, counts: list[list[int]]) -> Argument:
        """Ids for counts[group][i] blocks; nothing for a group in each of its spellings."""
        if len({sum(line) for line in counts}) == 1 and self.rng.random() < 0.15:
            return self.matrix([self.ids(group, sum(line)) for group, line in enumerate(counts)])
        lines = []
        for group, line in enumerate(counts):
            ids = self.ids(group, sum(line))
            nothing = not ids and self.num_groups > 1 and self.rng.random() < 0.3
            lines.append(Argument(lambda: None, True) if nothing else self.ints(ids))
        return self.per_group(lines)

    def matrix(self, lines: list[list[int]]) -> Argument:
        dtype, step = self.rng.choice(DTYPES), self.rng.choice([1, -1, 2])
        is_ordinary = min((each for line in lines for each in line), default=0) >= 0

        def make() -> IntArray:
            array = np.array([line[::-1] if step < 0 else line for line in lines], np.int64).astype(dtype)
            return array.repeat(abs(step), 1)[:, ::step]

        return Argument(make, is_ordinary)

    def counts(self, counts: list[list[int]], *, is_shared: bool) -> Argument:
        if is_shared:
            return self.ints(counts[0])
        if self.rng.random() < 0.2:
            return self.matrix(counts)
        if len(counts) > 1 and counts[1] and self.is_odd():  # as many as there should be, in the wrong lines
            counts = [[*counts[0], counts[1][0]], counts[1][1:], *counts[2:]]
        kind = self.rng.choice([list, tuple])
        lines = [self.ints(line) for line in counts]
        return Argument(lambda: kind(line.make() for line in lines), all(line.is_ordinary for line in lines))

    def room(self, rows: list[int], *, is_append: bool, is_shared: bool) -> list[list[int]]:
        """How many blocks each row gets in each group, mostly no more than fit; now and then a group gets none."""
        held = self.table._rows.filled // self.table._rows.columns_per_block
        most = self.rng.choice([1, 1, 2, 9])
        found = []
        for group, capacity in enumerate(self.capacities):
            is_nothing = self.rng.random() < 0.1
            line = []
            for row in rows:
                used = int(held[group, row]) if is_append and 0 <= row < self.num_rows else 0
                line.append(0 if is_nothing else self.rng.randint(0, min(most, capacity - used)))
            found.append(line)
        if is_shared:
            found = [[min(column) for column in zip(*found, strict=True)]] * self.num_groups
        if rows and self.is_odd():
            group, i = self.group(), self.rng.randrange(len(rows))
            used = int(held[group, rows[i]]) if is_append and 0 <= rows[i] < self.num_rows else 0
            for line in found if is_shared else found[group : group + 1]:
                line[i] = self.capacities[group] - used + self.rng.choice([0, 1, 30])
        return found

    # Operations: a method of `Table`, and its arguments.

    def one_row(self) -> tuple[str, list[Argument]]:
        name, row = self.rng.choice(["append_row", "append_row", "set_row"]), self.row()
        index = row.make() if row.is_ordinary else 0
        counts = self.room([index], is_append=name == "append_row", is_shared=False)
        return name, [row, self.block_ids(counts)]

    def many_rows(self) -> tuple[str, list[Argument]]:
        name, rows, is_shared = self.rng.choice(["append_rows", "set_rows"]), self.rows(), self.rng.random() < 0.6
        counts = self.room(rows, is_append=name == "append_rows", is_shared=is_shared)
        ids = counts
        if is_shared and self.rng.random() < 0.2:  # nothing for a group, whatever the shared counts say
            nothing = self.group()
            ids = [[] if group == nothing else line for group, line in enumerate(counts)]
        return name, [self.ints(rows), self.block_ids(ids), self.counts(counts, is_shared=is_shared)]

    def truncate_row(self) -> tuple[str, list[Argument]]:
        if self.rng.random() < 0.3:
            return "clear_row", [self.row()]
        kept = self.scalar(self.rng.randint(0, 9))
        if self.rng.random() < 0.3:
            kept = self.ints([self.rng.randint(0, 9) for _ in range(self.num_groups)])
        return "truncate_row", [self.row(), kept]

    def truncate_rows(self) -> tuple[str, list[Argument]]:
        rows, is_shared = self.rows(), self.rng.random() < 0.6
        if self.rng.random() < 0.3:
            return "clear_rows", [self.ints(rows)]
        kept = [[self.rng.randint(0, 9) for _ in rows] for _ in range(self.num_groups)]
        return "truncate_rows", [self.ints(rows), self.counts(kept, is_shared=is_shared)]

    def edit(self) -> tuple[str, list[Argument]]:
        group, rows = self.group(), self.rows()
        held = self.table._rows.filled[group] // self.table._rows.columns_per_block[group]
        rows = [row for row in rows if not 0 <= row < self.num_rows or held[row]]
        limits = [int(held[row]) if 0 <= row < self.num_rows else 1 for row in rows]
        starts = [self.rng.randrange(limit + self.is_odd()) for limit in limits]
        sizes = [self.rng.randint(0, max(limit - start, 0)) for limit, start in zip(limits, starts, strict=True)]
        stops = [start + size for start, size in zip(starts, sizes, strict=True)]
        index, ids = self.scalar(group), self.ints(self.ids(group, sum(sizes)))
        if self.rng.random() < 0.5:
            if rows and self.rng.random() < 0.5:
                row, ids = self.scalar(rows[0]), self.ints(self.ids(group, sizes[0]))
                if self.rng.random() < 0.5:
                    return "null_range", [row, index, self.scalar(starts[0]), self.scalar(stops[0])]
                return "replace_blocks", [row, index, self.scalar(starts[0]), ids]
            return "null_ranges", [self.ints(rows), index, self.ints(starts), self.ints(stops)]
        return "replace_block_ranges", [self.ints(rows), index, self.ints(starts), ids, self.ints(sizes)]

    def remap(self) -> tuple[str, list[Argument]]:
        group = self.group()
        old = list(dict.fromkeys(self.ids(group, self.rng.randint(0, 9))))
        return "remap_blocks", [self.scalar(group), self.ints(old), self.ints(self.ids(group, len(old)))]

    def copy(self) -> tuple[str, list[Argument]]:
        if self.rng.random() < 0.5:
            return self.rng.choice(["move_row", "swap_rows", "copy_row"]), [self.row(), self.row()]
        src, dst = self.rows(), self.rows()
        n = min(len(src), len(dst))
        return self.rng.choice(["permute_rows", "copy_rows"]), [self.ints(src[:n]), self.ints(dst[:n])]

    def look(self) -> tuple[str, list[Argument]]:
        if self.rng.random() < 0.5:
            return "block_ids", [self.row(), self.scalar(self.group())]
        return "common_blocks", [self.ints(self.rows()), self.scalar(self.group())]

    def operation(self) -> tuple[str, list[Argument]]:
        if self.rng.random() < 0.01:
            return "clear", []
        kinds = [self.one_row, self.many_rows, self.truncate_row, self.truncate_rows, self.edit, self.remap, self.copy]
        (kind,) = self.rng.choices([*kinds, self.look], [10, 8, 3, 3, 3, 1, 2, 1])
        return kind()


# The comparison.


def spoil(argument: Any) -> None:
    """Overwrite what the caller passed."""
    if isinstance(argument, np.ndarray) and argument.dtype.kind in "iu" and argument.flags.writeable:
        argument[...] = 99
    elif type(argument) is list:
        for item in argument:
            spoil(item)
        argument.clear()


def outcome(table: Table, name: str, arguments: list[Any]) -> tuple[str, Any]:
    """Return what a call gives, or what it raises; addresses of objects left out."""
    try:
        result = getattr(table, name)(*arguments)
    except Exception as error:
        return type(error).__name__, re.sub(r"0x[0-9a-f]+", "0x", str(error))
    finally:
        for argument in arguments:
            spoil(argument)
    return "", result.tolist() if isinstance(result, np.ndarray) else result


class Difference(AssertionError):
    """The two paths differ."""


def compare(first: Table, second: Table) -> None:
    one, other = first._rows, second._rows
    if not np.array_equal(one.mirror, other.mirror):
        raise Difference(f"mirrors differ at {np.flatnonzero(one.mirror != other.mirror).tolist()}")
    if one.has_changes != other.has_changes:
        raise Difference(f"has_changes: {one.has_changes}, {other.has_changes}")


def compare_changes(first: Table, second: Table) -> None:
    pending = [[each.tolist() for each in table._rows.pending_ranges()] for table in (first, second)]
    if pending[0] != pending[1]:
        raise Difference(f"pending: {pending[0]}, {pending[1]}")
    one, other = first._rows.writes(), second._rows.writes()
    if one.num_bytes != other.num_bytes or one.values.tolist() != other.values.tolist():
        raise Difference("what writes() returns differs")


def commit(rng: Random, first: Table, second: Table) -> None:
    size = first.config.arena.size
    room = rng.choice([5, 9, 20, 4 * size])
    used = [table.commit(room) for table in (first, second)]
    if room == 4 * size and (used[0] < 0) != (used[1] < 0):
        raise Difference(f"packed: {used}")
    for table in (first, second):
        if not np.array_equal(table.device, table._rows.mirror):
            raise Difference(f"{type(table._rows).__name__}: a commit leaves the device behind")
        if not np.array_equal(table._rows.committed_filled, table._rows.filled) or table._rows.has_changes:
            raise Difference(f"{type(table._rows).__name__}: something is pending after a commit")


def run_history(seed: int, num_operations: int, count: Counter[str]) -> None:
    """Run a random history over a random table on both paths, and count what its operations came to."""
    rng = Random(seed)
    config = random_config(rng)
    watched = Watched(config)
    watched._operations.least_late = rng.choice([1, 256])  # small appends may leave the mirror behind, too
    compiled, plain = Table(config, watched), Table(config, NumpyRows(config))
    caller = Caller(rng, plain, (0, 0.02, 0.1)[seed % 3])
    commits, looks = rng.choice([0.02, 0.2]), rng.choice([0.02, 0.3])
    for step in range(num_operations):
        name, arguments = caller.operation()
        watched.falls = 0
        got = outcome(compiled, name, [each.make() for each in arguments])
        expected = outcome(plain, name, [each.make() for each in arguments])
        try:
            if got != expected:
                raise Difference(f"compiled: {got}, numpy: {expected}")
            if not got[0] and watched.falls and all(each.is_ordinary for each in arguments):
                raise Difference("the compiled path left it to numpy")
            compare(compiled, plain)
            if rng.random() < looks:
                compare_changes(compiled, plain)
            if rng.random() < 0.003:
                for table in (compiled, plain):
                    table._rows.invalidate()
            if rng.random() < commits:
                commit(rng, compiled, plain)
        except Difference as error:
            shown = [each.make() for each in arguments]
            raise Difference(f"seed {seed}, step {step}, {config.groups}: {name}{shown}: {error}") from None
        verdict = "refused" if got[0] else "fell" if watched.falls else "taken"
        count[verdict] += 1
        count[f"{name}: {got[0] or 'done'}"] += 1


def histories(num_operations: int, seed: int) -> Iterator[tuple[int, int]]:
    """Return (seed, length) of histories that come to so many operations."""
    for start in range(0, num_operations, 250):
        yield seed + start // 250, min(250, num_operations - start)


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_are_equal(seed: int) -> None:
    """Rules: R4, R6, R7, R8, R9."""
    count: Counter[str] = Counter()
    for each, length in histories(1500, 1000 * seed):
        run_history(each, length, count)
    assert count["taken"] > 500
    assert count["refused"] > 10
    assert count["fell"] > 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    options = parser.parse_args()
    count: Counter[str] = Counter()
    start = time.perf_counter()
    for seed, length in histories(options.operations, options.seed):
        run_history(seed, length, count)
    for name, number in sorted(count.items()):
        print(f"{number:9}  {name}")  # noqa: T201
    print(f"{options.operations} operations, no difference, {time.perf_counter() - start:.0f} s")  # noqa: T201


if __name__ == "__main__":
    main()
