"""Random geometries and calls. A call is plain data: (name, arguments), so that a history can be replayed and cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

Call = tuple[Any, ...]

MULTI = -1
"""Stands in place of a group's index for the tables of all groups."""


class Geometry(NamedTuple):
    """What both sides' tables are made with.

    Attributes:
        is_multi: `MultiGroupBlockTable`, or one `BlockTable`.
        block_sizes, kernel_block_sizes, max_num_blocks: one a group. Tokens, tokens, blocks of a row.
        has_slots: one a group; profile 0.33.0.
        max_num_reqs: rows.
        max_num_batched_tokens: entries of the slot buffer.
        pcp, dcp: (world size, rank). None: not initialised.
        interleave_size: tokens.
        assigns: whether the ranks are assigned to the tables after they are made.
    """

    is_multi: bool
    block_sizes: tuple[int, ...]
    kernel_block_sizes: tuple[int, ...]
    max_num_blocks: tuple[int, ...]
    has_slots: tuple[bool, ...]
    max_num_reqs: int
    max_num_batched_tokens: int
    pcp: tuple[int, int] | None
    dcp: tuple[int, int] | None
    interleave_size: int
    assigns: bool

    @property
    def num_groups(self) -> int:
        """KV cache groups."""
        return len(self.block_sizes)


class Kernels(NamedTuple):
    """Which geometries are drawn: each (block size, world size, interleave size) is a kernel that vLLM compiles.

    Attributes:
        block_sizes: (block size, kernel block size) pairs.
        shares: (pcp, dcp, interleave size).
    """

    block_sizes: Sequence[tuple[int, int]]
    shares: Sequence[tuple[tuple[int, int] | None, tuple[int, int] | None, int]]


NO_SHARE = (None, None, 1)
MANY = Kernels(
    block_sizes=((16, 16), (16, 16), (32, 16), (48, 16), (24, 24), (3, 3), (1, 1), (64, 16), (160, 32), (256, 256)),
    shares=(
        *[NO_SHARE] * 5,
        (None, (2, 0), 1),
        (None, (2, 1), 1),
        (None, (4, 3), 8),
        ((2, 1), None, 1),
        ((2, 1), (2, 0), 2),
        ((1, 0), (3, 2), 16),
        (None, (2, 1), 32),
        ((1, 0), (1, 0), 1),
    ),
)
FEW = Kernels(
    block_sizes=((16, 16), (16, 16), (32, 16), (48, 16)),
    shares=(*[NO_SHARE] * 4, (None, (2, 1), 1), ((2, 1), (2, 0), 16), (None, (2, 1), 32)),
)
"""For a GPU, where each one costs a compilation."""


def draw_geometry(chance: random.Random, profile: str, kernels: Kernels) -> Geometry:
    """Return a geometry; few rows and tokens, since vLLM's kernel is interpreted on the CPU."""
    is_multi = chance.random() < 0.75
    shares = [share for share in kernels.shares if profile != "0.33.0" or share[0] in (None, (1, 0))]
    pcp, dcp, interleave_size = chance.choice(shares)
    sizes = [(kernel if profile == "0.33.0" else block, kernel) for block, kernel in kernels.block_sizes]
    whole = [size for size in sizes if size[0] % interleave_size == 0]
    if whole and chance.random() < 0.7:  # else it may be refused
        sizes = whole
    groups = [chance.choice(sizes) for _ in range(chance.choice((1, 2, 2, 3)) if is_multi else 1)]
    has_slots = [profile != "0.33.0" or chance.random() < 0.85 for _ in groups]
    return Geometry(
        is_multi=is_multi,
        block_sizes=tuple(block for block, _ in groups),
        kernel_block_sizes=tuple(kernel for _, kernel in groups),
        max_num_blocks=tuple(chance.randint(1, 9) for _ in groups),
        has_slots=tuple(has_slots),
        max_num_reqs=chance.choice((chance.randint(1, 6), chance.randint(1, 6), 40)),
        max_num_batched_tokens=chance.choice((8, 24, 64)),
        pcp=pcp,
        dcp=dcp,
        interleave_size=interleave_size,
        assigns=chance.random() < 0.25,
    )


class Look(NamedTuple):
    """What the generator knows of the tables.

    Attributes:
        geometry: theirs.
        widths: columns, one a group.
        counts: columns of each row, [num_groups][max_num_reqs].
        committed: rows of the last commit.
        cleans: whether tails are clean: then nobody writes to the host's rows.
    """

    geometry: Geometry
    widths: list[int]
    counts: list[list[int]]
    committed: int
    cleans: bool


def draw_call(chance: random.Random, look: Look) -> Call:
    """Return one call."""
    names = [name for name in WEIGHTS if not (look.cleans and name in WRITES_ROWS)]
    (name,) = chance.choices(names, [WEIGHTS[name] for name in names])
    target = MULTI
    if not look.geometry.is_multi or chance.random() < 0.08:
        target = chance.randrange(look.geometry.num_groups)
    return (name, target, *DRAW[name](chance, look, target))


def _row(chance: random.Random, look: Look) -> Any:
    rows = look.geometry.max_num_reqs
    if chance.random() < 0.002:
        return chance.choice((True, None, [0], (0,), slice(0, rows)))
    if chance.random() < 0.02:
        return chance.choice((-1, -rows, rows, -rows - 1))
    return chance.randrange(rows)


def _ids(chance: random.Random, most: int) -> list[int]:
    return [chance.randint(1, 5000) for _ in range(chance.randint(0, most))]


def _odd_ids(chance: random.Random) -> Any:
    kinds: tuple[Any, ...] = (
        None,
        (),
        ("tuple", [3, 4]),
        ("range", [5, 8]),
        ("array", [9]),
        ("array", [0]),
        ("array", [1, 2]),
        ("array", []),
        ("generator", [1, 2]),
        ("set", [6]),
        [0],
        [0, 0, 7],
        [-3],
        [2**31],
        [2**31 - 1],
        [2**30],
        [1.75],
        ["x"],
        [True],
        [None],
        7,
    )
    return chance.choice(kinds)


def _equal_ids(chance: random.Random, number: int) -> list[list[int]]:
    """Return as many ids for each group: one, or a few for a chunk of a prompt."""
    length = chance.choice((1, 1, 1, 1, 2, 4))
    return [[chance.randint(1, 5000) for _ in range(length)] for _ in range(number)]


def _ids_of(chance: random.Random, look: Look, target: int, most: int) -> Any:
    """Return ids for one group, or one sequence for each; mostly one block each, as in decode."""
    number = 1 if target != MULTI else look.geometry.num_groups
    if chance.random() < 0.65:
        ids: list[Any] = _equal_ids(chance, number)
    else:
        ids = [_ids(chance, most) for _ in range(number)]
    if chance.random() < 0.05:
        ids[chance.randrange(number)] = _odd_ids(chance)
    if target != MULTI:
        return ids[0]
    if chance.random() < 0.01:
        ids = chance.choice((ids[:-1], [*ids, [1]]))
    return ids


def _append(chance: random.Random, look: Look, target: int) -> tuple[Any, ...]:
    most = chance.choice((1, 2, 2, 3, 12))
    return _ids_of(chance, look, target, most), _row(chance, look)


def _decode(chance: random.Random, look: Look, target: int) -> tuple[Any, ...]:
    """Return rows, and one new block for each of them in every group: a step of decode."""
    rows = chance.sample(range(look.geometry.max_num_reqs), chance.randint(0, look.geometry.max_num_reqs))
    if chance.random() < 0.5:
        rows.sort()
    number = 1 if target != MULTI else look.geometry.num_groups
    return rows, [_equal_ids(chance, number) for _ in rows]


def _add(chance: random.Random, look: Look, target: int) -> tuple[Any, ...]:
    return _ids_of(chance, look, target, max(look.geometry.max_num_blocks) + (chance.random() < 0.05)), _row(
        chance, look
    )


def _one_row(chance: random.Random, look: Look, target: int) -> tuple[Any, ...]:
    return (_row(chance, look),)


def _two_rows(chance: random.Random, look: Look, target: int) -> tuple[Any, ...]:
    return _row(chance, look), _row(chance, look)


def _nothing(chance: random.Random, look: Look, target: int) -> tuple[Any, ...]:
    return ()


def _num_rows(chance: random.Random, look: Look, target: int) -> tuple[Any, ...]:
    rows = look.geometry.max_num_reqs
    return (chance.choices((rows, chance.randint(0, rows), rows + 2, -1), (5, 5, 0.3, 0.3))[0],)


def _slots(chance: random.Random, look: Look, target: int) -> tuple[Any, ...]:
    """Return num_reqs, query_start_loc, positions, and whether they are of other dtypes than vLLM's runner has."""
    geometry = look.geometry
    num_reqs = chance.choice((geometry.max_num_reqs, chance.randint(0, min(geometry.max_num_reqs, 6))))
    if chance.random() < 0.9:
        num_reqs = min(num_reqs, 6)  # a program of vLLM's kernel a request
    room = geometry.max_num_batched_tokens + (6 if chance.random() < 0.03 else 0)
    group = chance.randrange(geometry.num_groups)
    starts, positions = [0], []
    if num_reqs and chance.random() < 0.03:
        starts, positions = [2], [0, 0]
    for row in range(num_reqs):
        number = min(chance.choice((0, 1, 1, 1, 2, 5)), room - len(positions))
        positions += [_position(chance, look, group, row) for _ in range(max(number, 0))]
        starts.append(len(positions))
    if chance.random() < 0.15:
        positions += [0] * chance.randint(1, 4)
    if chance.random() < 0.1:
        starts += [starts[-1]] * 2
    return num_reqs, starts, positions, chance.random() < 0.03


def _position(chance: random.Random, look: Look, group: int, row: int) -> int:
    geometry = look.geometry
    world_size = (geometry.pcp or (1, 0))[0] * (geometry.dcp or (1, 0))[0]
    tokens = geometry.kernel_block_sizes[group] * world_size
    held, width = min(look.counts[group][row], look.widths[group]) * tokens, look.widths[group] * tokens
    kind = chance.random()
    if kind < 0.9 and held > 0:
        return chance.randrange(held)
    if kind < 0.985:
        return chance.randrange(width)
    return chance.choice((width, width + chance.randrange(width), -1, -chance.randint(1, tokens)))


def _write_rows(chance: random.Random, look: Look, target: int) -> tuple[Any, ...]:
    group = max(target, 0)
    column = chance.randrange(look.widths[group])
    lowest = chance.choice((0, -5000))
    values = [chance.randint(lowest, 5000) for _ in range(chance.randint(1, look.widths[group] - column))]
    row = chance.randrange(look.geometry.max_num_reqs)
    return chance.choice(("np", "cpu", "get_numpy_array", "get_cpu_tensor")), row, column, values, chance.random() < 0.3


def _fill_rows(chance: random.Random, look: Look, target: int) -> tuple[Any, ...]:
    return chance.choice(("np", "cpu")), chance.randint(-9, 9)


def _write_counts(chance: random.Random, look: Look, target: int) -> tuple[Any, ...]:
    count = chance.randint(0, look.widths[max(target, 0)])
    if chance.random() < 0.04:
        count = look.widths[max(target, 0)] + 3
    return chance.randrange(look.geometry.max_num_reqs), count, chance.random() < 0.2


def _write_held(chance: random.Random, look: Look, target: int) -> tuple[Any, ...]:
    return chance.random(), chance.random(), chance.random()


def _fill_device(chance: random.Random, look: Look, target: int) -> tuple[Any, ...]:
    return chance.randint(0, look.geometry.max_num_reqs), chance.randint(-1, 3)


def _overwrite_device(chance: random.Random, look: Look, target: int) -> tuple[Any, ...]:
    column = chance.randrange(look.widths[max(target, 0)])
    return chance.randrange(look.geometry.max_num_reqs), column, chance.randint(0, 3)


def _assign(chance: random.Random, look: Look, target: int) -> tuple[Any, ...]:
    return chance.choice(((2, 1), (2, 0), (1, 0)))  # world size and rank


WEIGHTS: dict[str, float] = {
    "append_row": 30,
    "decode": 4,
    "add_row": 11,
    "clear_row": 5,
    "move_row": 6,
    "swap_row": 5,
    "clear": 0.6,
    "commit_block_table": 15,
    "copy_to_gpu": 0.7,
    "compute_slot_mapping": 10,
    "patched_kernel": 0.7,
    "look": 2,
    "write_rows": 1.2,
    "fill_rows": 0.3,
    "write_counts": 1.5,
    "write_held": 0.8,
    "let_go": 0.8,
    "fill_device": 2,
    "overwrite_device": 0.5,
    "save": 0.3,
    "restore": 0.5,
    "attributes": 0.5,
    "map_to_kernel_blocks": 0.3,
    "assign": 0.1,
    "replace_slots": 0.1,
    "rebind_to_cpu": 0.03,
}
"""Name of a call -> how often, relative to the others."""

WRITES_ROWS = {"write_rows", "fill_rows", "write_counts", "write_held", "rebind_to_cpu", "save", "restore"}

DRAW: dict[str, Any] = {
    "append_row": _append,
    "decode": _decode,
    "add_row": _add,
    "clear_row": _one_row,
    "move_row": _two_rows,
    "swap_row": _two_rows,
    "clear": _nothing,
    "commit_block_table": _num_rows,
    "copy_to_gpu": _num_rows,
    "compute_slot_mapping": _slots,
    "patched_kernel": _slots,
    "look": _nothing,
    "write_rows": _write_rows,
    "fill_rows": _fill_rows,
    "write_counts": _write_counts,
    "write_held": _write_held,
    "let_go": _nothing,
    "fill_device": _fill_device,
    "overwrite_device": _overwrite_device,
    "save": _nothing,
    "restore": _nothing,
    "attributes": _nothing,
    "map_to_kernel_blocks": lambda chance, look, target: (_ids(chance, 4),),
    "assign": _assign,
    "replace_slots": _nothing,
    "rebind_to_cpu": _nothing,
}
