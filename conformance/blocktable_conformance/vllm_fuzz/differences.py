"""Where the drop-in differs from vLLM on purpose: each difference has a name and a reason, and is counted when met."""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """One named difference.

    Attributes:
        vllm: what vLLM does.
        ours: what the drop-in does instead.
        modes: in which modes.
        profiles: of which versions.
    """

    vllm: str
    ours: str
    modes: tuple[str, ...] = ("fast", "strict")
    profiles: tuple[str, ...] = ("0.25.1", "0.33.0")


DIFFERENCES = {
    "stale_gap": Difference(
        "tokens in `positions` that belong to no request keep whatever slot the buffer held", "their slot is PAD"
    ),
    "column_beyond_row": Difference(
        "a position beyond the row reads the next row's blocks, or memory behind the table", "its slot is PAD"
    ),
    "negative_position": Difference(
        "a negative position gets a slot in front of a block, or of the table", "its slot is PAD"
    ),
    "tokens_above_buffer": Difference(
        "tokens above max_num_batched_tokens are stored behind the slot buffer", "nothing is stored there"
    ),
    "interleave_above_kernel_block": Difference(
        "an interleave size that does not divide the kernel block gives tokens to blocks that are not theirs",
        "their slots are those of the blocks that hold them",
        profiles=("0.25.1",),  # 0.33.0's tables know one block size alone
    ),
    "interleave_refused": Difference(
        "an interleave size that does not divide the block size is taken, and slots overlap",
        "the constructor raises ConfigError, a ValueError",
    ),
    "unbounded_column": Difference(
        "a position in a column that the row does not hold gets a slot of block 0, or of a block it held before",
        "its slot is PAD",
        modes=("fast",),
    ),
    "overwritten_device_row": Difference(
        "what somebody writes to the batch's rows on the device is undone by the next commit",
        "it stays until the entry changes on the host",
        modes=("fast",),
    ),
    "lost_id": Difference(
        "one id appended to a full row is dropped without an error, and counted",
        "RowCapacityError, a ValueError; nothing is changed",
        modes=("fast",),
    ),
    "failed_append_counted": Difference(
        "a row operation that raises has counted its ids by then, and changed the groups before",
        "nothing is changed",
        modes=("fast",),
    ),
    "clean_tail": Difference(
        "blocks that a row no longer holds stay behind its count",
        "with clean tails they are NULL",
        modes=("fast, clean tails",),
    ),
}
