"""Write the golden vectors: `python -m blocktable_conformance.make_vectors`.

The oracle works out every answer. Where CASES of public engines gave numbers worked out on paper, they stand here as
`slots`, and a vector whose answer differs from them is not written.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blocktable_conformance.golden import FOLDER, OracleAnswers, config_of

COMMENT = (
    "Golden vectors of the block table contract (docs/spec.md); the format is described in README.md beside this file."
)
X = -1

Operation = dict[str, Any]


@dataclass
class Scenario:
    """A history before its answers are known; fields as in `golden.Vector`.

    Attributes:
        slots: for each step, one prefix of slots for each group, worked out by hand; PAD follows.
    """

    id: str
    rules: str
    title: str
    config: dict[str, Any]
    calls: list[Operation] = field(default_factory=list)
    slots: list[list[list[int]]] = field(default_factory=list)
    raises: str | None = None

    def answered(self) -> dict[str, Any]:
        """Return the vector, with the oracle's answers."""
        vector = {"id": self.id, "rules": self.rules, "title": self.title, "config": self.config}
        if self.raises is not None:
            return vector | {"raises": self.raises}
        answers = OracleAnswers(config_of(self.config))
        operations = [call | {"expect": answers.answer(call["call"], call["args"])} for call in self.calls]
        self._check_hand_numbers([op["expect"]["slot_mappings"] for op in operations if op["call"] == "step"])
        return vector | {"operations": operations}

    def _check_hand_numbers(self, steps: list[list[list[int]]]) -> None:
        for step, by_hand in zip(steps, self.slots, strict=False):
            for got, wanted in zip(step, by_hand, strict=True):
                if got != wanted + [X] * (len(got) - len(wanted)):
                    raise ValueError(f"{self.id}: the oracle gives {got}, the paper {wanted}.")


def call(name: str, **args: Any) -> Operation:
    """Return one operation."""
    return {"call": name, "args": args}


def set_row(row: int, *block_ids: Sequence[int]) -> Operation:
    """Return a set_row with one list for each group."""
    return call("set_row", row=row, block_ids=[list(ids) for ids in block_ids])


def one(positions: Sequence[int], row: int = 0, **options: Any) -> Operation:
    """Return a step of one request."""
    return step([row], [0, len(positions)], positions, **options)


def step(idx_mapping: Sequence[int], starts: Sequence[int], positions: Sequence[int], **options: Any) -> Operation:
    """Return a step."""
    inputs = {"idx_mapping": list(idx_mapping), "query_start_loc": list(starts), "positions": list(positions)}
    return call("step", **inputs, **options)


LOOK = call("look")


def small(*groups: dict[str, Any], width: int = 4, **options: Any) -> dict[str, Any]:
    """Return a config of 4 rows, 16 tokens and `width` blocks in a row of the first group."""
    return {
        "groups": list(groups),
        "max_num_reqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": width * groups[0]["block_size"],
        "width_alignment": 1,
    } | options


def block(size: int, **options: Any) -> dict[str, Any]:
    """Return a group."""
    return {"block_size": size} | options


def shard(world_size: int, rank: int, interleave_size: int) -> dict[str, int]:
    """Return one rank's share."""
    return {"world_size": world_size, "rank": rank, "interleave_size": interleave_size}


def padding() -> list[Scenario]:
    """Vectors on entries that stand for no token."""
    return [
        Scenario("P1", "R13, R15", "Launched tokens without a request are PAD", small(block(16)),
                 [set_row(0, [5]), one([0, 1, 2])], [[[80, 81, 82]]]),
        Scenario("P2", "R15", "A shorter step leaves nothing of a longer one", small(block(4)),
                 [set_row(0, [7, 8, 9]), one(range(10)), one([10, 11])], [[list(range(28, 38))], [[38, 39]]]),
        Scenario("P5", "R9.1, R10.2, R13", "A step of padding pads every group, and commits", small(block(4), block(2)),
                 [set_row(0, [5, 6], [8, 9]), one([0, 3]), set_row(2, [3], [4]), step([-1] * 4, range(5), range(4)),
                  call("commit")], [[[20, 23], [16, 19]], [[], []]]),
        Scenario("P6", "R7, R13", "Block 0 has slots where it is allowed", small(block(4, allow_null=True)),
                 [set_row(0, [0, 6]), one([3, 5])], [[[3, 25]]]),
        Scenario("P6-pad", "R13", "Block 0 is PAD with null_is_pad", small(block(4, allow_null=True, null_is_pad=True)),
                 [set_row(0, [0, 6]), one([3, 5])], [[[X, 25]]]),
        Scenario("P9", "R5, R10.3", "Padded rows hold nothing of an earlier batch", small(block(16)),
                 [*(set_row(row, [row + 1]) for row in range(4)), step(range(4), range(5), [0] * 4), set_row(0, [9]),
                  step([0], [0, 1], [0], num_reqs_padded=4)], [[[16, 32, 48, 64]], [[144]]]),
        Scenario("P12", "R2, R13", "The NULL block spans all its kernel blocks",
                 small(block(32, kernel_block_size=16, allow_null=True, null_is_pad=True)),
                 [set_row(0, [0, 6]), one([5, 20, 37])], [[[X, X, 197]]]),
        Scenario("P12-slots", "R7, R13", "A null that is handed in is the filler in every column",
                 small(block(32, kernel_block_size=16, null_block_id=3, allow_null=True)),
                 [set_row(0, [3, 6]), one([5, 20, 37])], [[[101, 100, 197]]]),
        Scenario("null-none", "R5, R7, R13", "Every block is real: tables hold -1, and holes are PAD",
                 small(block(4, null_block_id=-1, allow_null=True), block(8, kernel_block_size=4, null_block_id=-1)),
                 [set_row(0, [0, -1, 2], [0, 1]), one([0, 5, 9, 12]), call("null_range", row=0, group=1, start=0,
                  stop=1), set_row(1, [-1], [-1]), LOOK, one([0, 8], num_computed_tokens=[0]), call("commit")],
                 [[[0, X, 9, X], [0, 5, 9, 12]], [[0, 8], [X, 8]]]),
        Scenario("null-trash", "R5, R7, R10.2, R13", "A block of the engine's own stands for none",
                 small(block(8, kernel_block_size=4, num_blocks=6, null_block_id=5, pad_slot_id=47)),
                 [set_row(0, [0, 1]), set_row(1, [5]), LOOK, step([0, -1], [0, 2, 3], [0, 17, 0]), call("commit")],
                 [[[0, 47, 47, *[47] * 13]]]),
        Scenario("pads", "R13, R15", "Each group says what PAD is",
                 small(block(4, pad_slot_id=-7), block(4, num_blocks=10, pad_slot_id=40), block(4, pad_slot_id=3),
                       slot_dtype="int64"),
                 [set_row(0, [1], [2], [3]), one([0, 4])],
                 [[[4, *[-7] * 15], [8, *[40] * 15], [12, *[3] * 15]]]),
        Scenario("P13", "R10.2, R13", "An entry outside the table is a padding entry", small(block(8)),
                 [*(set_row(row, [row + 3]) for row in range(4)), one([0, 1], row=4), one([0, 1], row=-7),
                  step([4, 1, -1], [0, 1, 2, 3], [0, 1, 2])], [[[]], [[]], [[X, 33]]]),
        Scenario("P13-short", "R15", "query_start_loc says more than there are positions", small(block(8)),
                 [set_row(0, [3]), step([0], [0, 5], [0, 1, 2])], [[[24, 25, 26]]]),
        Scenario("K1", "R15", "No requests, no tokens", small(block(4)),
                 [set_row(0, [3]), one([0, 1, 2, 3]), step([], [0], [])], [[[12, 13, 14, 15]], [[]]]),
        Scenario("K2", "R13", "An empty request inside a batch", small(block(4)),
                 [set_row(1, [3]), step([0, 1], [0, 0, 2], [0, 1])], [[[12, 13]]]),
        Scenario("K3", "R12", "The next token may lie in another block", small(block(4)),
                 [set_row(0, [2, 9]), one([3, 4])], [[[11, 36]]]),
    ]  # fmt: skip


def rows() -> list[Scenario]:
    """Vectors on row operations."""
    b16 = block(16)
    return [
        Scenario("T1", "R4, R5", "A move leaves no tail and vacates its source", small(b16),
                 [set_row(0, [1, 2, 3, 4]), set_row(1, [55, 56]), call("move_row", src=1, dst=0), LOOK,
                  call("commit")]),
        Scenario("T2", "R5, R9.1", "A shorter row leaves no tail on the device", small(b16),
                 [set_row(0, [5, 6, 7]), call("commit"), set_row(0, [8]), call("commit")]),
        Scenario("T3", "R4, R5", "A row moved over a cleared one", small(b16),
                 [set_row(0, [21, 22, 23]), set_row(1, [31, 32]), call("clear_row", row=0),
                  call("move_row", src=1, dst=0), LOOK]),
        Scenario("T4", "R4, R5", "Swaps", small(b16),
                 [set_row(0, [1, 2, 3]), set_row(1, [9]), set_row(2, [4, 5]), call("swap_rows", a=0, b=1),
                  call("swap_rows", a=1, b=2), LOOK, call("swap_rows", a=1, b=1), LOOK]),
        Scenario("T6", "R6", "A row over capacity is refused whole, by one block too", small(b16),
                 [set_row(0, [1, 2, 3]), call("append_row", row=0, block_ids=[[4, 5]]), LOOK,
                  call("append_row", row=0, block_ids=[[4]]), call("append_row", row=0, block_ids=[[5]]), LOOK]),
        Scenario("T8", "R8", "Nothing appended and nothing set", small(b16, block(8)),
                 [set_row(0, [1], [2]), call("append_row", row=0, block_ids=None),
                  call("append_row", row=0, block_ids=[]),
                  call("append_row", row=0, block_ids=[[], [3]]), LOOK, call("set_row", row=0, block_ids=[None, [4]]),
                  LOOK, call("set_row", row=0, block_ids=[]), LOOK]),
        Scenario("T9", "R6", "One group over capacity changes no group", small(b16, block(16, blocks_per_row=2)),
                 [set_row(0, [1, 2], [3, 4]), call("append_row", row=0, block_ids=[[5], [6]]), LOOK]),
        Scenario("T12", "R2, R7", "The largest id", small(block(48, kernel_block_size=16)),
                 [set_row(0, [715827881]), set_row(0, [715827882]), LOOK]),
        Scenario("T13", "R4", "Permutations, and repeated rows", small(b16),
                 [set_row(0, [1]), set_row(1, [2]), set_row(2, [3]), call("permute_rows", src=[0, 1, 2], dst=[1, 2, 0]),
                  LOOK, call("append_rows", rows=[3, 3], block_ids=[[1, 2]], counts=[1, 1]),
                  call("permute_rows", src=[2, 1], dst=[0, 2]), LOOK]),
        Scenario("bulk", "R4, R6", "Bulk calls with counts for all groups, and for each", small(b16, block(8)),
                 [call("append_rows", rows=[2, 0], block_ids=[[1, 2, 3], [4, 5, 6]], counts=[1, 2]),
                  call("append_rows", rows=[0, 2], block_ids=[[7], [8, 9]], counts=[[1, 0], [0, 2]]), LOOK,
                  call("append_rows", rows=[1, 0], block_ids=[[1, 2], None], counts=[1, 1]), LOOK,
                  call("set_rows", rows=[0, 1], block_ids=[[5], [6]], counts=[0, 1]), LOOK,
                  call("truncate_rows", rows=[2, 1], num_blocks=[0, 1]), LOOK,
                  call("append_rows", rows=[1, 3], block_ids=[[1, 2, 3, 4], [1, 2, 3, 4]], counts=[4, 0]), LOOK]),
        Scenario("evict", "R4, R7, R13", "null_range leaves later blocks where they are",
                 small(block(8, kernel_block_size=4, null_is_pad=True)),
                 [set_row(0, [5, 6, 7]), call("null_range", row=0, group=0, start=0, stop=2), LOOK, one([0, 8, 16, 23]),
                  call("null_range", row=0, group=0, start=2, stop=4), call("truncate_row", row=0, num_blocks=1), LOOK],
                 [[[X, X, 56, 63]]]),
    ]  # fmt: skip


def row_edits() -> list[Scenario]:
    """Vectors on calls that edit rows in place, and on looks at rows."""
    b16, hybrid = block(16), block(32, kernel_block_size=16, allow_null=True)

    def ids(row: int, group: int = 0) -> Operation:
        return call("block_ids", row=row, group=group)

    def replace(row: int, group: int, start: int, block_ids: Sequence[int] | None) -> Operation:
        return call("replace_blocks", row=row, group=group, start=start, block_ids=block_ids)

    def replace_many(
        rows: Sequence[int], group: int, starts: Sequence[int], block_ids: Sequence[int], counts: Sequence[int]
    ) -> Operation:
        options = {"starts": list(starts), "block_ids": list(block_ids), "counts": list(counts)}
        return call("replace_block_ranges", rows=list(rows), group=group, **options)

    def remap(group: int, old_ids: Sequence[int], new_ids: Sequence[int]) -> Operation:
        return call("remap_blocks", group=group, old_ids=list(old_ids), new_ids=list(new_ids))

    def common(*rows: int, group: int = 0) -> Operation:
        return call("common_blocks", rows=list(rows), group=group)

    def kernel_ids(group: int, *blocks: int) -> Operation:
        return call("kernel_block_ids", group=group, ids=list(blocks))

    def copies(src: Sequence[int], dst: Sequence[int]) -> Operation:
        return call("copy_rows", src=list(src), dst=list(dst))

    return [
        Scenario("replace", "R4, R6, R7, R8", "Blocks exchanged inside a row", small(b16, block(8, num_blocks=10)),
                 [set_row(0, [5, 6, 7], [1, 2]), replace(0, 0, 1, [9]), LOOK, replace(0, 0, 2, [1, 2]),
                  replace(0, 0, 4, []), replace(0, 0, -1, [1]), replace(0, 1, 0, [10]), replace(0, 1, 0, [0]),
                  replace(0, 2, 0, [1]), replace(4, 0, 0, [1]), LOOK, replace(0, 1, 0, [9, 8]), replace(0, 0, 3, None),
                  LOOK, one([16, 8])], [[[144, 88], [X, 64]]]),
        Scenario("replace-many", "R4, R6", "Blocks exchanged inside several rows", small(hybrid, b16),
                 [set_row(0, [1, 2, 3], [9]), set_row(2, [4, 5], [8, 7]), call("commit"),
                  replace_many([2, 0], 0, [0, 1], [6, 7, 8], [1, 2]), LOOK,
                  replace_many([2, 0], 0, [1, 1], [6, 7, 8], [2, 1]), replace_many([2, 2], 0, [0, 1], [1, 2], [1, 1]),
                  replace_many([2, 0], 0, [0, 0], [1, 2], [1, 2]), replace_many([2, 0], 1, [0], [1], [1, 0]), LOOK,
                  replace_many([0, 2, 1], 1, [1, 1, 0], [3], [0, 1, 0]), LOOK, call("commit")]),
        Scenario("holes", "R2, R4, R7", "A hole has the id of the NULL block, and may be filled", small(hybrid),
                 [set_row(0, [3, 7, 2]), ids(0), call("null_range", row=0, group=0, start=1, stop=2), ids(0), ids(1),
                  kernel_ids(0, 3, 7), kernel_ids(0, 3, 0, 2), remap(0, [0], [5]), replace(0, 0, 1, [5]), ids(0), LOOK,
                  call("commit")]),
        Scenario("remap", "R4, R6, R7, R8", "Blocks that change their ids in every row, all together",
                 small(b16, hybrid),
                 [set_row(0, [1, 2], [1, 2]), set_row(1, [2], [5]), remap(0, [1, 2], [2, 1]), LOOK,
                  remap(0, [1, 2, 7], [2, 3, 8]), LOOK, remap(1, [2, 5], [6, 6]), LOOK, remap(0, [3, 3], [4, 5]),
                  remap(0, [3], [4, 5]), remap(0, [0], [4]), remap(0, [3], [0]), remap(0, [3], [2147483648]),
                  remap(2, [3], [4]), remap(0, [], []), LOOK, call("commit"), one([0])], [[[48], [32]]]),
        Scenario("copies", "R4, R5, R6", "Copies of rows, whose sources may repeat", small(b16),
                 [set_row(0, [1, 5]), set_row(1, [1, 6]), set_row(2, [1, 7, 8]), call("commit"),
                  copies([1, 0, 0], [0, 1, 2]), LOOK, call("commit"), copies([0, 1], [3, 3]), copies([0], [1, 2]),
                  copies([4], [0]), call("permute_rows", src=[0, 0], dst=[1, 2]), copies([], []), copies([3], [3]),
                  LOOK, copies([3, 0], [0, 3]), LOOK, call("commit")]),
        Scenario("common", "R2, R4", "Leading blocks that rows share; a hole is not common", small(hybrid, b16),
                 [set_row(0, [1, 2, 10], [5]), set_row(1, [1, 2, 11, 12], [5]), set_row(2, [1, 3, 13], []),
                  common(0, 1), common(0, 1, 2), common(0, 0), common(2), common(), common(0, 3), common(0, 1, group=1),
                  common(0, 2, group=1), call("null_range", row=0, group=0, start=0, stop=1),
                  call("null_range", row=1, group=0, start=0, stop=1), common(0, 1), common(0)]),
        Scenario("set-again", "R4, R5, R9.1", "A row set to nearly what it held", small(hybrid),
                 [set_row(0, [1, 2, 3]), call("commit"), set_row(0, [1, 4, 3]), call("commit"), set_row(0, [1, 4]),
                  call("commit"), set_row(0, [1, 4, 3, 2]), call("commit"), set_row(0, [1, 4, 3, 2]), call("commit")]),
        *(Scenario(f"edits-{seed}", "R4, R7, R9.1", "A random history of edits", config, _edits(config, seed))
          for seed, config in enumerate((small(block(4), block(6, kernel_block_size=2), width=5), small(block(3)))))
    ]  # fmt: skip


def _edits(config: dict[str, Any], seed: int) -> list[Operation]:
    generator = random.Random(seed)
    num_groups, num_rows = len(config["groups"]), config["max_num_reqs"]
    calls = [set_row(row, *([row + 1, 5, 6 + row % 2] for _ in range(num_groups))) for row in range(num_rows)]
    for _ in range(24):
        row, group = generator.randrange(num_rows), generator.randrange(num_groups)
        some = [generator.randrange(1, 9) for _ in range(generator.randrange(3))]
        old = generator.sample(range(1, 9), 3)
        calls.append(
            generator.choice(
                [
                    call("replace_blocks", row=row, group=group, start=generator.randrange(3), block_ids=some),
                    call("remap_blocks", group=group, old_ids=old, new_ids=generator.sample(old, 3)),
                    call("remap_blocks", group=group, old_ids=old, new_ids=generator.sample(range(1, 9), 3)),
                    call(
                        "copy_rows", src=[row, generator.randrange(num_rows)], dst=generator.sample(range(num_rows), 2)
                    ),
                    call("append_row", row=row, block_ids=[some] * num_groups),
                    set_row(row, *[some] * num_groups),
                    call("null_range", row=row, group=group, start=0, stop=1),
                    call("block_ids", row=row, group=group),
                    call("common_blocks", rows=[row, generator.randrange(num_rows)], group=group),
                    call("commit"),
                ]
            )
        )
    return [*calls, LOOK, call("commit")]


def geometry() -> list[Scenario]:
    """Vectors on block sizes, groups, rings, windows and edges."""
    b16 = block(16)
    hybrid = block(32, kernel_block_size=16)
    return [
        Scenario("B1", "R13", "A token never reaches another row", small(b16, width=2),
                 [set_row(0, [5, 6]), set_row(1, [9, 10]), one([31, 32]), set_row(0, [5]), one([15, 16])],
                 [[[111]], [[95]]]),
        Scenario("B3", "R3, R12", "Rows lie a width apart", small(b16, width_alignment=96),
                 [set_row(0, [1, 2, 3, 4]), set_row(1, [5, 6]), step([1], [0, 2], [0, 16])], [[[80, 96]]]),
        Scenario("B4", "R12", "Slots are 64 bits wide", small(b16), [set_row(0, [200000000]), one([5])],
                 [[[3200000005]]]),
        Scenario("B4-large", "R12", "Slots are 64 bits wide", small(block(262144)), [set_row(0, [9000]), one([0])],
                 [[[2359296000]]]),
        Scenario("B5", "R13", "Positions below 0, and at the ends of 64 bits", small(b16),
                 [set_row(0, [5]), one([-1, -(2**63), 2**63 - 1, 2**40, 3])], [[[X, X, X, X, 83]]]),
        Scenario("G3", "R2, R12", "A block is several kernel blocks", small(hybrid),
                 [set_row(0, [2, 5]), one([0, 17, 32, 63]), call("append_row", row=0, block_ids=[[7]]), LOOK],
                 [[[64, 81, 160, 191]]]),
        Scenario("G5", "R2, R12", "Edges of kernel blocks", small(hybrid),
                 [set_row(0, [5, 9]), one([0, 15, 16, 31, 32, 47, 48])], [[[160, 175, 176, 191, 288, 303, 304]]]),
        Scenario("G6", "R8, R12", "Groups of different block sizes", small(b16, block(32), block(8)),
                 [set_row(0, [1, 2], [10], [4, 5, 6, 7]), one([20]),
                  call("append_row", row=0, block_ids=[[], [11], []]), LOOK,
                  call("append_row", row=0, block_ids=[[1], [2]]), LOOK], [[[36], [340], [52]]]),
        Scenario("G7", "R12", "Blocks of three tokens", small(block(3)), [set_row(0, [7, 1, 4]), one(range(9))],
                 [[[21, 22, 23, 3, 4, 5, 12, 13, 14]]]),
        Scenario("G9", "R13, R14", "A ring wraps", small(block(4, slot_mode="ring")),
                 [set_row(0, [7, 9]), one([0, 5, 8, 13]), one([0, 1], row=1)], [[[X, X, 28, 37]], [[]]]),
        Scenario("W4", "R14", "Of tokens that share a place in one call the last has the slot",
                 small(block(4, slot_mode="ring", blocks_per_row=2)), [set_row(0, [5, 9]), one(range(12))],
                 [[[*[X] * 4, 36, 37, 38, 39, 20, 21, 22, 23]]]),
        Scenario("W1", "R11, R14", "A ring keeps its window whole",
                 small(block(4, slot_mode="ring", blocks_per_row=2, sliding_window=5)),
                 [set_row(0, [5, 9]), one([9], num_computed_tokens=[9])], [[[21]]]),
        Scenario("W3", "R13, R14", "A cross-attention group has slots where it is named",
                 small(block(4), block(4, slot_mode="cross")),
                 [set_row(0, [2], [5, 6]), one([1]),
                  call("slots", idx_mapping=[0], query_start_loc=[0, 6], positions=list(range(6)), groups=[1])],
                 [[[9], []]]),
        Scenario("rows", "R7, R10.1, R10.2, R13", "More rows than a batch has requests",
                 small(b16, max_num_reqs=2, max_num_rows=5),
                 [set_row(4, [7]), set_row(1, [3]), set_row(5, [1]), step([4, 1], [0, 1, 2], [1, 2]), LOOK,
                  step([4, 5], [0, 1, 2], [1, 2]), call("commit")], [[[113, 50]], [[113]]]),
        Scenario("few-rows", "R7, R10.1, R10.2, R13", "Fewer rows than a batch has requests",
                 small(b16, max_num_rows=2),
                 [set_row(1, [7]), set_row(2, [1]), step([1, 2, 0, 1], range(5), [0, 0, 0, 1]), LOOK, call("commit")],
                 [[[112, X, X, 113]]]),
        Scenario("G10", "R11", "A sliding window", small(block(4, sliding_window=8), width=6),
                 [set_row(0, range(11, 17)), one([19], num_computed_tokens=[19]), one([19])], [[[63]], [[63]]]),
        Scenario("T11", "R3, R6", "Columns of alignment take no block",
                 small(block(48, kernel_block_size=16), max_model_len=96, width_alignment=128),
                 [set_row(0, [1, 2]), call("append_row", row=0, block_ids=[[3]]), LOOK]),
        Scenario("none", "R3, R13", "A group without slots", small(b16, block(16, slot_mode="none", blocks_per_row=2)),
                 [set_row(0, [1], [7, 8]), one([0, 1])], [[[16, 17], []]]),
    ]  # fmt: skip


def context_parallel() -> list[Scenario]:
    """Vectors on ranks that share the tokens."""
    c1 = ([640, X, X, X, X, X], [X, 640, 712, 767, X, 1152], [X, X, X, X, 684, X], [X, X, X, X, X, X])
    c3 = [40, 41, X, X, 42, 43, X, X, 44, 45, X, X, 46, 47, X, X]
    return [
        *(Scenario(f"C1-{rank}", "R12, R18", "Ownership in interleaved tokens",
                   small(block(128, kernel_block_size=64), width=8, context_parallel=shard(4, rank, 128)),
                   [set_row(0, [5, 9]), one([0, 128, 200, 255, 300, 640])], [[slots]])
          for rank, slots in enumerate(c1)),
        Scenario("C2", "R12, R18", "A sharded and a replicated group",
                 small(block(16), block(16, sharded=False), context_parallel=shard(2, 0, 1)),
                 [set_row(0, [3], [4, 5]), one([0, 1, 2, 3, 20])], [[[48, X, 49, X, 58], [64, 65, 66, 67, 84]]]),
        *(Scenario(f"C3-{rank}", "R12, R18", "Two tokens in turn", small(block(4), context_parallel=shard(2, rank, 2)),
                   [set_row(0, [10, 11]), one(range(16))], [[slots]])
          for rank, slots in enumerate((c3, c3[-2:] + c3[:-2]))),
        Scenario("C5", "R12", "The second rank", small(block(16), context_parallel=shard(2, 1, 1)),
                 [set_row(0, [5, 6]), one([0, 1, 2, 3, 4, 5, 32, 33])], [[[X, 80, X, 81, X, 82, X, 96]]]),
        *(Scenario(f"C7-{rank}", "R11, R19", "A window over shared tokens",
                   small(block(4, sliding_window=8), width=12, context_parallel=shard(2, rank, 2)),
                   [set_row(0, range(11, 17)), one([29], num_computed_tokens=[29])])
          for rank in range(2)),
    ]  # fmt: skip


def refusals() -> list[Scenario]:
    """Vectors that must be rejected: configs, and operations that change nothing."""
    b16 = block(16)
    wrong_rows = [
        set_row(4, [1], [1]),
        set_row(-1, [1], [1]),
        set_row(0, [0], [1]),
        set_row(0, [-1], [1]),
        set_row(0, [1], [10]),
        set_row(0, [1]),
        set_row(0, [1], [1], [1]),
        call("append_rows", rows=[0, 1], block_ids=[[1, 1], [1, 1]], counts=[1]),
        call("append_rows", rows=[0, 1], block_ids=[[1, 1], [1, 1]], counts=[1, 2]),
        call("truncate_row", row=0, num_blocks=-1),
        call("null_range", row=0, group=0, start=0, stop=3),
        call("null_range", row=0, group=0, start=2, stop=1),
        call("permute_rows", src=[0, 0], dst=[1, 2]),
        call("permute_rows", src=[0], dst=[1, 2]),
        call("move_row", src=0, dst=4),
    ]
    config = "ConfigError"
    return [
        Scenario("calls", "R6, R7", "Wrong calls change nothing", small(b16, block(8, num_blocks=10)),
                 [set_row(0, [1, 2], [3]), *(operation for wrong in wrong_rows for operation in (wrong, LOOK))]),
        Scenario("G4", "R1", "48 is not a multiple of 32", small(block(48, kernel_block_size=32)), raises=config),
        Scenario("G4-zero", "R1", "A kernel block of no tokens", small(block(16, kernel_block_size=0)), raises=config),
        Scenario("G4-none", "R1", "A block of no tokens", small(block(0), max_model_len=64),
                 raises=config),
        Scenario("C4", "R18", "3 tokens in turn do not divide a block of 4",
                 small(block(4), context_parallel=shard(2, 0, 3)), raises=config),
        Scenario("rank", "R18", "A rank outside its world", small(b16, context_parallel=shard(2, 2, 1)), raises=config),
        Scenario("ring", "R14", "A sharded ring", small(block(16, slot_mode="ring", sharded=True)), raises=config),
        Scenario("B6", "R16", "More slots than 32 bits", small(block(64, num_blocks=33554433), slot_dtype="int32"),
                 raises=config),
        Scenario("B6-unknown", "R16", "int32 slots of a cache of unknown size", small(b16, slot_dtype="int32"),
                 raises=config),
    ]  # fmt: skip


def export(layout: dict[str, Any], idx_mapping: Sequence[int], groups: Sequence[int] = (0,), **args: Any) -> Operation:
    """Return an export."""
    return call("export", layout=layout, groups=list(groups), idx_mapping=list(idx_mapping), **args)


def exports() -> list[Scenario]:
    """Vectors on what attention kernels read in place of a table."""
    csr, tokens, lengths = {"kind": "csr"}, {"kind": "token_csr"}, {"kind": "lengths"}
    inverse_map = {"kind": "inverse_map", "null": -1}
    kv = {"kind": "kv_offsets", "entry_scale": 2, "value_offset": 1}
    missing = {"kind": "table", "null": -1, "dtype": "int64"}
    first = {"kind": "state", "null": -1}
    last = {"kind": "state", "null": -1, "state_columns": "last", "num_columns": 2}
    aligned = {"kind": "state", "state_columns": "aligned", "num_columns": 3}
    b4, room = block(4, num_blocks=24), {"capacity": 16}
    windowed: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (csr, room),
        (tokens, {"capacity": 64}),
        (missing, {}),
        (kv, {}),
        (inverse_map, {"num_kernel_blocks": 24}),
    ]
    nulls = [*windowed, ({"kind": "table"}, {}), ({"kind": "table", "entry_scale": 3}, {})]
    shared: list[tuple[dict[str, Any], dict[str, Any]]] = [(csr, {"capacity": 9}), (kv, {})]
    ranked: list[tuple[dict[str, Any], dict[str, Any]]] = [(csr, room), (tokens, room), (lengths, {})]
    rows = [set_row(0, [10, 11, 12]), set_row(1, [14]), set_row(2, [18, 19]), call("commit")]
    window = block(4, num_blocks=24, sliding_window=6, null_is_pad=True)
    hybrid = block(8, kernel_block_size=4, num_blocks=12, sliding_window=20)
    state = block(4, slot_mode="none", blocks_per_row=3)
    return [
        Scenario("csr", "R27", "Edges of blocks, a padding entry, an empty request, then a smaller batch", small(b4),
                 [*rows, export(csr, [2, 0, -1, 1], seq_lens=[5, 12, 9, 4], capacity=16),
                  export(csr, [0, 3], seq_lens=[4, 7], capacity=16), export(csr, [], seq_lens=[], capacity=16)]),
        Scenario("csr-cut", "R27", "Lengths past the row, below 0, and a small capacity", small(b4),
                 [*rows, export(csr, [1, 0, 2, 9], seq_lens=[6, 2147483647, -3, 1], capacity=16),
                  export(csr, [1, 2, 0, 1], seq_lens=[3, 6, 9, 1], capacity=4)]),
        Scenario("token-csr", "R28", "A page is a token", small(b4),
                 [*rows, export(tokens, [2, -1, 1], seq_lens=[6, 4, 9], capacity=20),
                  export(tokens, [1], seq_lens=[2], capacity=20)]),
        *(Scenario(f"csr-rank-{rank}", "R19, R27, R28", "Two ranks, two tokens in turn",
                   small(b4, context_parallel=shard(2, rank, 2)),
                   [set_row(0, [5, 6]), set_row(1, [7]), call("commit"),
                    *(export(layout, [0, 1, -1], seq_lens=[11, 3, 8], **options) for layout, options in ranked)])
          for rank in range(2)),
        Scenario("tables", "R26, R29", "-1 for every missing block; K and V entries",
                 small(hybrid | {"allow_null": True}, width=3),
                 [set_row(0, [5, 0, 7]), set_row(1, [3]), call("commit"), export(missing, [0, -1, 1]),
                  export(kv, [0, 1]), export(kv, [1]), export(missing, [1]),
                  export({"kind": "table", "width_tokens": 40}, [1, 0]),
                  export({"kind": "table", "exact_width": True}, [0]), export({"kind": "placeholder"}, [1, 0])]),
        Scenario("window", "R11, R25.5", "A window in every layout", small(window),
                 [*rows, *(export(layout, [0, 2, 1], seq_lens=[12, 8, 2], num_computed_tokens=[11, 7, -1], **options)
                           for layout, options in windowed)]),
        Scenario("inverse-map", "R30", "Repeated and NULL blocks, and a shorter batch",
                 small(hybrid | {"allow_null": True}, width=3),
                 [set_row(0, [3, 5, 9]), set_row(1, [5, 0, 5]), call("commit"),
                  export(inverse_map, [0, 1, -1], seq_lens=[17, 24, 5], num_kernel_blocks=24),
                  export(inverse_map, [1], seq_lens=[4], num_kernel_blocks=24)]),
        Scenario("states", "R31", "Rows of 3, 1, 2 and 0 states, one of them NULL", small(state),
                 [*rows[:3], call("null_range", row=2, group=0, start=0, stop=1), call("commit"),
                  export(first, [0, 1, 2, 3]), export(first, [1]), export(last, [0, 1, -5, 2]),
                  export(aligned, [0, 1, 2, 3], seq_lens=[5, 4, 9, 0]),
                  export(aligned, [0, 0, 0, 1], seq_lens=[-2147483648, 1, 2147483647, -1])]),
        *(Scenario(f"null-{null}", "R5, R25.7", "Block 0 is real, and another stands for none, or none does",
                   small(hybrid | {"null_block_id": null, "allow_null": True}, state | {"null_block_id": null},
                         width=3),
                   [set_row(0, [7, null, 0], [0, 2]), set_row(1, [0], [2]),
                    call("null_range", row=0, group=1, start=1, stop=2), call("commit"),
                    *(export(layout, [0, 1, -1], seq_lens=[24, 5, 9], **options) for layout, options in nulls),
                    *(export(layout, [1], seq_lens=[3], **options) for layout, options in nulls),
                    *(export(layout, [0, 1, -1], (1,)) for layout in (first, last, {"kind": "state"}))])
          for null in (-1, 5)),
        Scenario("groups", "R25.15, R27, R29", "Groups of one geometry; where one holds less, all are cut",
                 small(b4, window, hybrid, width=4),
                 [set_row(0, [1, 2, 3], [4, 5, 6], [7, 8]), set_row(1, [9], [10, 11], [3]), call("commit"),
                  *(export(layout, [1, 0, -1], groups, seq_lens=[7, 11, 4], num_computed_tokens=[6, 10, 3], **options)
                    for groups in ([0, 1], [1, 0]) for layout, options in shared)]),
    ]  # fmt: skip


def export_parts() -> list[Scenario]:
    """Vectors on exports that begin anywhere, of rings and requests, on slots of positions, and on metadata."""
    csr, tokens, lengths = {"kind": "csr"}, {"kind": "token_csr"}, {"kind": "lengths"}
    inverse_map, requests = {"kind": "inverse_map", "null": -1}, {"kind": "block_requests", "null": -1}
    starts, ring = {"kind": "token_requests", "null": -1}, {"kind": "ring"}
    kv = {"kind": "kv_offsets", "entry_scale": 2, "value_offset": 1}
    table, missing = {"kind": "table"}, {"kind": "table", "null": -1, "dtype": "int64"}
    ring_of_minus_1 = missing | {"kind": "ring", "width_tokens": 24}
    room = {"capacity": 20}
    every: list[tuple[dict[str, Any], dict[str, Any]]] = [(layout, {}) for layout in (table, missing, kv, lengths)]
    every += [(inverse_map, {"num_kernel_blocks": 24}), (csr, room), (requests, room), (tokens, {"capacity": 72})]
    b2, b4 = block(2, num_blocks=24), block(4, num_blocks=24)
    cross, wrapped = b4 | {"slot_mode": "cross"}, b4 | {"slot_mode": "ring", "blocks_per_row": 3}
    window = b4 | {"sliding_window": 5, "null_is_pad": True}
    hybrid_ring = wrapped | {"block_size": 8, "kernel_block_size": 4}
    rows = [set_row(0, [10, 11, 12, 13, 9]), set_row(1, [14]), set_row(2, [18, 19]), call("commit")]

    def parts(layout: dict[str, Any], options: dict[str, Any]) -> list[Operation]:
        """Parts from the start, the middle, the last block and past the end; then fewer, with windows; then whole."""
        sizes = options | {"max_batch": 7}
        return [
            export(layout, [0, 0, 0, 2, 1, 3, -1], seq_lens=[20, 17, 19, 8, 4, 9, 9],
                   first_tokens=[0, 8, 16, 4, 4, 0, 4], **sizes),
            export(layout, [0, 0, 2], seq_lens=[20, 17, 7], first_tokens=[8, 4, 8],
                   num_computed_tokens=[19, 9, 2147483647], **sizes),
            export(layout, [2, 0, 1], seq_lens=[8, -2147483648, 4], **sizes),
            export(layout, [0], seq_lens=[2147483647], first_tokens=[-2147483648], **sizes),
        ]  # fmt: skip

    def positions(group: int, *wanted: Sequence[int]) -> Operation:
        return call("map_positions", rows=[0, 1, -1], group=group, positions=[list(line) for line in wanted])

    def metadata(seq_lens: Sequence[Any], *layouts: dict[str, Any] | None, **options: Any) -> Operation:
        inputs = {"idx_mapping": [1, -1, 0], "query_start_loc": [0, 1, 2, 4], "positions": [2, 0, 4, 5]}
        return call("step_metadata", **inputs, seq_lens=list(seq_lens), layouts=list(layouts), **options)

    far = [0, 3, 4, 9, 12, -1, 2147483647]
    turns = [
        {"seq_lens": [10, 3, 25, 9]},
        {"seq_lens": [12, 13, 31, 33], "num_computed_tokens": [11, 12, 30, 0]},
        {"seq_lens": [0, -1, 2147483647, -2147483648]},
    ]
    return [
        Scenario("chunks", "R34", "Chunks of a row as entries of their own, in a batch above max_num_reqs",
                 small(b2, width=5, max_num_reqs=2),
                 [set_row(0, range(11, 16)), call("commit"),
                  export(csr, [0, 0, 0], seq_lens=[4, 8, 10], first_tokens=[0, 4, 8], capacity=16, max_batch=4),
                  export(csr, [0, -1, 0], seq_lens=[9, 8, 3], first_tokens=[6, 3, 8], capacity=16, max_batch=4)]),
        *(Scenario(f"parts-{layout['kind']}-{layout.get('dtype', 'int32')}", "R34", "Parts of rows, then whole rows",
                   small(window, width=5), [*rows, *parts(layout, options)])
          for layout, options in every),
        *(Scenario(f"parts-rank-{rank}", "R19, R34", "Parts of rows that two ranks share",
                   small(b4, context_parallel=shard(2, rank, 2)),
                   [set_row(0, [5, 6, 7]), call("commit"),
                    *(export(layout, [0, 0, 0, -1], seq_lens=[20, 24, 13, 4], first_tokens=[0, 16, 8, 1], **options)
                      for layout, options in every)])
          for rank in range(2)),
        *(Scenario(f"rounded-{layout['kind']}", "R34", "First tokens inside a block", small(b4),
                   [set_row(0, [5, 6, 7]), call("commit"),
                    export(layout, [0, -1, 0], seq_lens=[12, 4, 11], first_tokens=[4, 1, 9], **options)])
          for layout, options in every if layout in (csr, table, inverse_map)),
        Scenario("ring", "R35", "A ring over true positions, what it overwrote, and its window",
                 small(wrapped | {"sliding_window": 6}, max_model_len=32),
                 [set_row(0, [5, 9, 7]), set_row(1, [4]), call("commit"),
                  *(export(layout, [0, 1, 0, 2], **lens) for layout in (ring_of_minus_1, ring) for lens in turns),
                  export(ring, [-1, 1], seq_lens=[25, 2])]),
        Scenario("rings", "R25.15, R35", "Rings of two groups; a row that is empty in one is the fill in both",
                 small(hybrid_ring, hybrid_ring, max_model_len=64),
                 [set_row(0, [5, 6], [7, 8, 9]), set_row(1, [3], []), call("commit"),
                  export(ring, [0, 1, 0], [1, 0], seq_lens=[40, 8, 5]),
                  export(ring, [1, 0], [1, 0], seq_lens=[64, 64])]),
        Scenario("block-requests", "R27, R35", "The request of each block, beside the indices; the last batch is cut",
                 small(b4), [*rows[1:3], set_row(0, [10, 11, 12]), call("commit"),
                  *(export(layout, [2, 0, -1, 1], seq_lens=[5, 12, 9, 4], capacity=6) for layout in (csr, requests)),
                  export(requests, [1, 0], seq_lens=[4, 12], first_tokens=[0, 8], capacity=6),
                  export(requests, [0, 1, 2, 0], seq_lens=[12, 3, 9, 1], capacity=6)]),
        Scenario("token-requests", "R35", "The request of each token: a late start, a padding entry, empty requests",
                 small(b4),
                 [export(starts, [0, -1, 2, 1], query_start_loc=[1, 3, 6, 6, 16], capacity=16),
                  export(starts, [0, 1], query_start_loc=[0, 2, 3], capacity=16),
                  export(starts, [], query_start_loc=[0], capacity=16),
                  export(starts, [0, 1] * 3, query_start_loc=[0, 1, 1, 2, 2, 3, 5], capacity=5, max_batch=7)]),
        Scenario("positions", "R12, R13, R14, R36", "Slots of any positions in every mode, -1 for none",
                 small(b4 | {"pad_slot_id": -5}, wrapped, cross, window | {"pad_slot_id": 2},
                       b4 | {"null_block_id": -1}, b4 | {"null_block_id": 5, "allow_null": True}),
                 [set_row(0, [9, 5], [5, 6], [7, 8], [9, 10], [0, 11], [5, 13]),
                  set_row(1, [7], [3], [2], [4], [1], [8]),
                  call("null_range", row=0, group=3, start=0, stop=1),
                  call("null_range", row=0, group=4, start=0, stop=1), positions(0, far, far, far), call("commit"),
                  *(positions(group, far, far[::-1], far) for group in range(6)), set_row(1, *[[6]] * 6),
                  positions(0, [0], [1], [2])]),
        *(Scenario(f"positions-rank-{rank}", "R12, R18, R36", "Positions of rows that two ranks share",
                   small(b4, context_parallel=shard(2, rank, 2)),
                   [set_row(0, [5, 6]), set_row(1, [7]), call("commit"),
                    positions(0, [0, 1, 2, 3, 4, 9, 14, 16], range(8), range(8))])
          for rank in range(2)),
        Scenario("cross", "R14, R15", "Slots of named groups, in their order; a cross group has some where it is named",
                 small(b4, cross | {"pad_slot_id": -3}, b4 | {"null_block_id": -1}),
                 [set_row(0, [2], [5, 6], [0]), set_row(1, [3], [8], [7]), one([1]),
                  *(call("slots", idx_mapping=[1, -1, 0], query_start_loc=[0, 2, 3, 9], positions=[0, 5, 1, *range(6)],
                         groups=groups) for groups in ([1], [2, 1], [0])), one([0], row=1)],
                 [[[9], [-3] * 16, [1]], [[12], [-3] * 16, [28]]]),
        Scenario("metadata", "R33", "A decoder over an encoder: each group has lengths of its own",
                 small(b4, cross, b4),
                 [set_row(0, [2, 9], [5, 6], [4, 1]), set_row(1, [3], [8], [7]),
                  metadata([[3, 1, 6], [4, 2, 7], [3, 1, 6]], csr, csr, csr),
                  call("append_row", row=1, block_ids=[[10], [], []]),
                  metadata([[7, 1, 6], [4, 2, 7], [3, 1, 5]], csr, tokens, table, num_reqs_padded=4),
                  metadata([3, 1, 6], missing, None, csr)]),
        Scenario("metadata-rank", "R19, R33", "Lengths of shared groups are this rank's",
                 small(b4, cross, b4, context_parallel=shard(2, 1, 2)),
                 [set_row(0, [2, 9], [5, 6], [4]), set_row(1, [3], [8], [7]),
                  metadata([[3, 1, 6], [4, 2, 7], [11, 1, 5]], csr, csr, None, num_reqs_padded=4),
                  metadata([7, 1, 11], None, csr, table)]),
    ]  # fmt: skip


def histories() -> list[Scenario]:
    """Long random histories over tables of several groups, one of them for each rank of a world of two."""
    configs = [
        small(block(4), block(6, kernel_block_size=2), width=5),
        small(block(3), block(4, slot_mode="ring", blocks_per_row=2), block(8, sliding_window=6), width=6),
        *(small(block(4), block(8, kernel_block_size=4, sharded=False), width=4, context_parallel=shard(2, rank, 2))
          for rank in range(2)),
    ]  # fmt: skip
    return [
        Scenario(f"history-{seed}", "R4, R9.1, R10, R12, R13, R15", "A random history", config, _history(config, seed))
        for seed, config in enumerate(configs)
    ]


def _history(config: dict[str, Any], seed: int) -> list[Operation]:
    generator = random.Random(seed)
    num_groups, num_rows = len(config["groups"]), config["max_num_reqs"]
    calls = []
    for _ in range(24):
        row, other = generator.randrange(num_rows), generator.randrange(num_rows)
        ids = [[generator.randrange(1, 1000) for _ in range(generator.randrange(3))] for _ in range(num_groups)]
        calls.append(
            generator.choice(
                [
                    call("append_row", row=row, block_ids=ids),
                    call("append_row", row=row, block_ids=ids),
                    call("set_row", row=row, block_ids=ids),
                    call("move_row", src=row, dst=other),
                    call("swap_rows", a=row, b=other),
                    call("copy_row", src=row, dst=other),
                    call("truncate_row", row=row, num_blocks=generator.randrange(3)),
                    _random_step(generator, config),
                    _random_step(generator, config),
                ]
            )
        )
    return [*calls, LOOK, call("commit"), _random_step(generator, config)]


def _random_step(generator: random.Random, config: dict[str, Any]) -> Operation:
    num_reqs = generator.randrange(config["max_num_reqs"] + 1)
    starts = [0]
    for _ in range(num_reqs):
        starts.append(starts[-1] + generator.randrange(5))
    positions = [generator.randrange(-1, config["max_model_len"] + 2) for _ in range(starts[-1])]
    mapping = [generator.randrange(-1, config["max_num_reqs"]) for _ in range(num_reqs)]
    return step(mapping, starts, positions, num_reqs_padded=config["max_num_reqs"])


FILES = {
    "padding": padding,
    "rows": rows,
    "row_edits": row_edits,
    "geometry": geometry,
    "context_parallel": context_parallel,
    "refusals": refusals,
    "exports": exports,
    "export_parts": export_parts,
    "histories": histories,
}


FORMAT_OF = {"export_parts": 4, "exports": 3, "geometry": 3, "padding": 3, "row_edits": 3}
"""File -> its format, where it is not 1."""


def render(name: str) -> str:
    """Return the text of one file: one line for each operation, so that a change shows as one."""
    lines = ["{", f'"$comment": {json.dumps(COMMENT)},', f'"format": {FORMAT_OF.get(name, 1)},', '"vectors": [']
    vectors = [scenario.answered() for scenario in FILES[name]()]
    for index, vector in enumerate(vectors):
        operations = vector.pop("operations", None)
        head = json.dumps(vector)[:-1]
        end = "," if index + 1 < len(vectors) else ""
        if operations is None:
            lines.append(f"{head}}}{end}")
        else:
            body = ",\n".join(f" {json.dumps(operation)}" for operation in operations)
            lines.append(f'{head}, "operations": [\n{body}\n]}}{end}')
    return "\n".join([*lines, "]", "}", ""])


def main(folder: Path = FOLDER) -> None:
    """Write every file."""
    for name in FILES:
        (folder / f"{name}.json").write_text(render(name), encoding="utf-8")


if __name__ == "__main__":
    main()
