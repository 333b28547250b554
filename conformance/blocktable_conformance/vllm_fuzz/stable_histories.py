"""Random geometries and calls for the V2 runner's tables. A call is plain data: (name, *arguments)."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

Call = tuple[Any, ...]


class Geometry(NamedTuple):
    """What both sides' tables are made with.

    Attributes:
        block_sizes, kernel_block_sizes: tokens, one a group; equal but in profile 0.25.1.
        max_num_blocks: blocks of a row, one a group.
        max_num_reqs: rows.
        max_num_batched_tokens: entries of the slot buffer.
        cp_size, cp_rank, interleave_size: of context parallelism.
        has_slots, is_sharded, reach: one a group, of later profiles.
    """

    block_sizes: tuple[int, ...]
    kernel_block_sizes: tuple[int, ...]
    max_num_blocks: tuple[int, ...]
    max_num_reqs: int
    max_num_batched_tokens: int
    cp_size: int
    cp_rank: int
    interleave_size: int
    has_slots: tuple[bool, ...]
    is_sharded: tuple[bool, ...]
    reach: tuple[int, ...]

    @property
    def num_groups(self) -> int:
        """KV cache groups."""
        return len(self.block_sizes)

    @property
    def expansions(self) -> list[int]:
        """Columns of a block, one a group."""
        return [size // kernel for size, kernel in zip(self.block_sizes, self.kernel_block_sizes, strict=True)]

    def shares(self, group: int) -> bool:
        """Whether the ranks share a group's tokens."""
        return self.is_sharded[group] and self.has_slots[group]


SIZES = ((16, 16), (16, 16), (32, 16), (48, 16), (24, 24), (3, 3), (1, 1), (64, 16))
SHARES = (*[(1, 0, 1)] * 6, (2, 0, 1), (2, 1, 1), (4, 3, 8), (3, 2, 16), (2, 1, 32), (1, 0, 8))


def draw_geometry(chance: random.Random, profile: str) -> Geometry:
    """Return a geometry; few rows and tokens, since vLLM's kernels are interpreted on the CPU."""
    cp_size, cp_rank, interleave_size = chance.choice(SHARES)
    is_old = profile == "0.25.1"
    sizes = [(block if is_old else kernel, kernel) for block, kernel in SIZES]
    whole = [size for size in sizes if size[1] % interleave_size == 0]
    if whole and chance.random() < 0.9:  # otherwise it may be refused
        sizes = whole
    groups = [chance.choice(sizes) for _ in range(chance.choice((1, 1, 2, 3)))]
    number = range(len(groups))
    return Geometry(
        block_sizes=tuple(block for block, _ in groups),
        kernel_block_sizes=tuple(kernel for _, kernel in groups),
        max_num_blocks=tuple(chance.randint(1, 9) for _ in number),
        max_num_reqs=chance.choice((chance.randint(1, 6), chance.randint(1, 6), 12)),
        max_num_batched_tokens=chance.choice((8, 24, 40)),
        cp_size=cp_size,
        cp_rank=cp_rank,
        interleave_size=interleave_size,
        has_slots=tuple(is_old or chance.random() < 0.85 for _ in number),
        is_sharded=tuple(is_old or chance.random() < 0.8 for _ in number),
        reach=tuple(0 if is_old else chance.choice((0, 0, chance.randint(1, 40))) for _ in number),
    )


class Look(NamedTuple):
    """What the generator knows of the tables.

    Attributes:
        geometry, profile: theirs.
        widths: columns, one a group.
        committed: columns of each row that kernels see, [num_groups][max_num_reqs].
        counts: columns of each row on the host, likewise.
    """

    geometry: Geometry
    profile: str
    widths: list[int]
    committed: list[list[int]]
    counts: list[list[int]]


WEIGHTS: dict[str, float] = {
    "append": 30,
    "apply": 12,
    "gather": 12,
    "slots": 10,
    "dummy_tables": 1.5,
    "dummy_slots": 1,
    "write_tables": 3,
    "write_slots": 1,
    "redirect": 1,
    "read_rows": 0.1,
    "layout": 0.2,
    "attributes": 0.5,
}
"""Name of a call -> how often, relative to the others."""


def draw_call(chance: random.Random, look: Look) -> Call:
    """Return one call."""
    (name,) = chance.choices([*WEIGHTS], [*WEIGHTS.values()])
    return (name, *DRAW[name](chance, look))


def _append(chance: random.Random, look: Look) -> tuple[Any, ...]:
    geometry = look.geometry
    row = chance.randrange(geometry.max_num_reqs)
    overwrite = chance.random() < 0.3
    equal = chance.choice((1, 1, 1, 2, 3))
    block_ids: list[list[Any]] = []
    for group in range(geometry.num_groups):
        used = 0 if overwrite else look.counts[group][row]
        room = (look.widths[group] - used) // geometry.expansions[group]
        number = equal if chance.random() < 0.6 else chance.randint(0, max(room, 0))
        if number > room and chance.random() < 0.9:
            number = room
        block_ids.append([chance.choice((0, chance.randint(1, 5000), chance.randint(1, 5000))) for _ in range(number)])
    if chance.random() < 0.02:
        row = chance.choice((-1, geometry.max_num_reqs, -geometry.max_num_reqs))
    if chance.random() < 0.02:
        block_ids[chance.randrange(geometry.num_groups)].append(chance.choice((-1, 2**31, 1.5, "x", None, 2**40)))
    return row, block_ids, overwrite


def _batch(chance: random.Random, look: Look) -> list[int]:
    rows = look.geometry.max_num_reqs
    batch = chance.sample(range(rows), chance.randint(0, min(rows, 6)))
    if batch and chance.random() < 0.1:
        batch[chance.randrange(len(batch))] = chance.choice((-1, batch[0]))
    return batch


def _gather(chance: random.Random, look: Look) -> tuple[Any, ...]:
    batch = _batch(chance, look)
    padded = chance.choice((len(batch), chance.randint(len(batch), look.geometry.max_num_reqs)))
    computed = None
    if chance.random() < 0.6:
        computed = [chance.randint(0, 200) for _ in range(look.geometry.max_num_reqs)]
    return batch, padded, computed, look.profile != "0.25.1" and chance.random() < 0.15


def _slots(chance: random.Random, look: Look) -> tuple[Any, ...]:
    geometry = look.geometry
    batch = _batch(chance, look)
    room = geometry.max_num_batched_tokens
    starts, positions = [0], []
    if batch and chance.random() < 0.05:
        starts, positions = [2], [0, 0]
    group = chance.randrange(geometry.num_groups)
    for row in batch:
        number = min(chance.choice((0, 1, 1, 1, 2, 5)), room - len(positions))
        positions += [_position(chance, look, group, row) for _ in range(max(number, 0))]
        starts.append(len(positions))
    if chance.random() < 0.3:  # whole buffers are given, padding included
        positions += [0] * chance.randint(0, max(0, room - len(positions)))
    if chance.random() < 0.3:
        starts += [starts[-1]] * chance.randint(1, 3)
    elsewhere = chance.choice((0, 0, 0, 3)) if look.profile != "0.25.1" else 0
    return batch, starts, positions, chance.randint(0, room), elsewhere


def _position(chance: random.Random, look: Look, group: int, row: int) -> int:
    geometry = look.geometry
    tokens = geometry.kernel_block_sizes[group] * (geometry.cp_size if geometry.shares(group) else 1)
    held, width = look.committed[group][row] * tokens, look.widths[group] * tokens
    kind = chance.random()
    if kind < 0.9 and held > 0:
        return chance.randrange(held)
    if kind < 0.97:
        return chance.randrange(width)
    return chance.choice((width, width + chance.randrange(width), -1, -chance.randint(1, tokens)))


def _number_of_rows(chance: random.Random, look: Look) -> tuple[Any, ...]:
    return (chance.randint(0, look.geometry.max_num_reqs),)


def _number_of_tokens(chance: random.Random, look: Look) -> tuple[Any, ...]:
    return (chance.randint(0, look.geometry.max_num_batched_tokens),)


def _write_tables(chance: random.Random, look: Look) -> tuple[Any, ...]:
    """Return where the runner, a speculator or a model writes: in column 0, or a whole context."""
    group = chance.randrange(look.geometry.num_groups)
    column = chance.choice((0, 0, chance.randrange(look.widths[group])))
    number = chance.choice((1, chance.randint(1, look.widths[group] - column)))
    row = chance.randrange(look.geometry.max_num_reqs)
    return group, row, column, [chance.randint(0, 5000) for _ in range(number)]


def _write_slots(chance: random.Random, look: Look) -> tuple[Any, ...]:
    first = chance.randrange(look.geometry.max_num_batched_tokens)
    number = chance.randint(1, look.geometry.max_num_batched_tokens - first)
    return chance.randrange(look.geometry.num_groups), first, [chance.randint(-1, 5000) for _ in range(number)]


DRAW: dict[str, Any] = {
    "append": _append,
    "apply": lambda chance, look: (),
    "gather": _gather,
    "slots": _slots,
    "dummy_tables": _number_of_rows,
    "dummy_slots": _number_of_tokens,
    "write_tables": _write_tables,
    "write_slots": _write_slots,
    "redirect": lambda chance, look: (chance.random() < 0.3,),
    "read_rows": lambda chance, look: (),
    "layout": lambda chance, look: (),
    "attributes": lambda chance, look: (),
}
