"""What an adapter of an engine's own table is, and the sizes of the tables that histories are played on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import blocktable as bt

Rows = list[list[list[int]]]
"""[groups][rows][columns], kernel block ids."""

AFTER = "a token after the filled columns is PAD"
"""What a trial is about, for engines' notes."""

NUM_TOKENS = 16
"""Entries of a slot buffer."""


class Span(NamedTuple):
    """One request's tokens in a step: its row, -1 for padding; the position of the first token; how many there are."""

    row: int
    start: int
    size: int


@dataclass(frozen=True)
class Shape:
    """The sizes of one table.

    Attributes:
        block_size: tokens in a manager block.
        split: kernel blocks in a manager block.
        groups: that share a row.
        rows: of the table, and of a batch at most.
        blocks: manager blocks that a row may hold.
        world_size, rank, interleave_size: of context parallelism.
        ring: whether positions wrap around a row.
        window: tokens of a sliding window; None: there is none.
    """

    block_size: int = 1
    split: int = 1
    groups: int = 1
    rows: int = 2
    blocks: int = 1
    world_size: int = 1
    rank: int = 0
    interleave_size: int = 1
    ring: bool = False
    window: int | None = None

    @property
    def kernel_block_size(self) -> int:
        """Tokens in a kernel block."""
        return self.block_size // self.split

    def config(self, engine: type[Engine]) -> bt.BlockTableConfig:
        """Return the same sizes as the contract has them."""
        group = bt.KVCacheGroup(
            block_size=self.block_size,
            kernel_block_size=self.kernel_block_size,
            blocks_per_row=self.blocks,
            slot_mode="ring" if self.ring else "linear",
            sliding_window=self.window,
            null_block_id=engine.null_block_id,
        )
        return bt.BlockTableConfig(
            groups=[group] * self.groups,
            max_num_reqs=self.rows,
            max_num_batched_tokens=NUM_TOKENS,
            max_model_len=1,
            context_parallel=bt.ContextParallel(
                world_size=self.world_size, rank=self.rank, interleave_size=self.interleave_size
            ),
        )


class Engine:
    """An engine's own table, by the calls that it has; a subclass defines only those.

    Calls, by the names that trials use. Ids are manager blocks, `[groups]` lists; what is returned is in kernel blocks.

    - `append_row(row, ids)`, `set_row(row, ids)`, `clear_row(row)`, `move_row(src, dst)`, `swap_rows(a, b)`,
      `copy_row(src, dst)`, `truncate_row(row, num_blocks)`: as R4 has them.
    - `commit()`: what makes rows visible to kernels; an engine without one has a single copy.
    - `columns() -> Rows`: the filled columns of each row on the host.
    - `host_table() -> Rows`, `device_table() -> Rows`: the same with what follows them, as wide as the engine's.
    - `gather(rows, num_reqs_padded) -> Rows`: a batch's tables.
    - `slots(spans) -> [groups][tokens] ints`: the step's slots.

    Attributes:
        label, version: of the engine.
        features: what its calls can do beside that, names of `FEATURES`.
        block_sizes: that it can have.
        capacity_block_size: with which a row has no column more than its blocks; None: with each.
        null_block_id: what stands for none in its tables.
        batch_null: what stands for none in its batch tables, where that is another entry; None: it is the same.
        untried: feature that the engine has -> why it cannot be tried on a CPU.
        notes: rule, or what a trial of one is about -> a neutral sentence about how the engine does without it.
    """

    label: ClassVar[str]
    version: ClassVar[str]
    features: ClassVar[frozenset[str]] = frozenset()
    block_sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4)
    capacity_block_size: ClassVar[int | None] = None
    null_block_id: ClassVar[int] = 0
    batch_null: ClassVar[int | None] = None
    untried: ClassVar[Mapping[str, str]] = {}
    notes: ClassVar[Mapping[str, str]] = {}

    def __init__(self, shape: Shape) -> None:
        self.shape = shape


FEATURES = {
    "any order": "a batch names its rows in any order",
    "padding": "a batch has rows for no request",
    "whole buffer": "the rows after the batch are the engine's too",
    "padding entries": "a batch has entries that stand for no request",
    "padded tokens": "a step has tokens of such entries",
    "aligned spans": "a step's tokens begin where a block begins",
    "split": "manager blocks of several kernel blocks",
    "groups": "several groups share a row",
    "context parallel": "ranks share a request's tokens",
    "ring": "positions wrap around a row",
    "window": "a batch leaves out blocks that a window has left",
    "slot buffer": "the slots after the tokens are the engine's too",
    "negative positions": "a step takes positions below 0",
    "any id": "a table takes ids of any size",
    "capacity": "a row holds so many blocks and no more",
}


def as_rows(tables: Sequence[Any]) -> Rows:
    """Return tables, each `[rows, columns]`, as lists."""
    return [[[int(entry) for entry in row] for row in table] for table in tables]


def flatten(spans: Sequence[Span]) -> tuple[list[int], list[int], list[int]]:
    """Return the rows, where the tokens of each begin, and the positions."""
    starts: list[int] = [0]
    positions: list[int] = []
    for span in spans:
        positions += range(span.start, span.start + span.size)
        starts.append(len(positions))
    return [span.row for span in spans], starts, positions
