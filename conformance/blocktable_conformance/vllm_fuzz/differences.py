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
        "a position past the row reads the next row's blocks, or memory after the table", "its slot is PAD"
    ),
    "negative_position": Difference(
        "a negative position gets a slot in front of a block, or of the table", "its slot is PAD"
    ),
    "tokens_above_buffer": Difference(
        "tokens above max_num_batched_tokens are stored after the slot buffer", "nothing is stored there"
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
        "what other code writes to the batch's rows on the device is undone by the next commit",
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
    "row_no_integer": Difference(
        "a list, a slice, True or None in place of a row means several rows, or raises after counts were changed",
        "DtypeError, a TypeError; nothing is changed",
        modes=("fast",),
    ),
    "clean_tail": Difference(
        "blocks that a row no longer holds stay after its count",
        "with clean tails they are NULL",
        modes=("fast, clean tails",),
    ),
}

SINCE_0320 = ("0.32.0", "0.33.0")

V2_DIFFERENCES = {
    "stale_gap": Difference(
        "tokens before the first request's keep whatever slot the buffer held", "their slot is PAD", modes=("v2",)
    ),
    "column_beyond_row": Difference(
        "a position after the row reads the next row's blocks, or memory after the table",
        "its slot is PAD",
        modes=("v2",),
    ),
    "negative_position": Difference(
        "a negative position gets a slot before a block, or before the table", "its slot is PAD", modes=("v2",)
    ),
    "unbounded_column": Difference(
        "a position in a column that the row does not hold gets a slot of block 0, or of a block it held before",
        "its slot is PAD",
        modes=("v2",),
    ),
    "row_tail": Difference(
        "blocks that a row no longer holds stay after its count, on the device", "they are NULL", modes=("v2",)
    ),
    "batch_tail": Difference(
        "a batch row keeps what an earlier batch left after its columns", "it is NULL there", modes=("v2",)
    ),
    "dummy_gathered": Difference(
        "a gather of row -1 reads the memory before the tables", "the batch row is NULL", modes=("v2",)
    ),
    "dummy_mapped": Difference(
        "tokens of row -1 get slots out of the memory before the tables",
        "their slot is PAD, as in later versions",
        modes=("v2",),
        profiles=("0.25.1",),
    ),
    "dummy_not_cleared": Difference(
        "dummy tables hold the blocks of the last batch",
        "they are NULL, as in later versions",
        modes=("v2",),
        profiles=("0.25.1",),
    ),
    "overflow": Difference(
        "0.25.1 writes after the row; later ones raise, and have changed the groups before",
        "RowCapacityError, a ValueError and a RuntimeError; nothing is changed",
        modes=("v2",),
    ),
    "row_outside": Difference(
        "a row outside the table is an AssertionError or an IndexError, for some after the write is staged",
        "RowIndexError, an IndexError; nothing is changed",
        modes=("v2",),
    ),
    "impossible_id": Difference(
        "ids below 0 are stored, others fail at the next apply_staged_writes, or are rounded",
        "ArgumentError or DtypeError; nothing is changed",
        modes=("v2",),
    ),
    "interleave_refused": Difference(
        "an interleave size that does not divide the block size of the kernel is taken, and slots overlap",
        "the constructor raises ConfigError, a ValueError",
        modes=("v2",),
    ),
}
"""The same of the V2 runner's tables."""

for _name, _difference in V2_DIFFERENCES.items():
    if _difference.profiles == ("0.25.1", "0.33.0"):
        V2_DIFFERENCES[_name] = _difference._replace(profiles=("0.25.1", *SINCE_0320))


def differences_of(mode: str) -> dict[str, Difference]:
    """Return the differences of a mode's tables."""
    return V2_DIFFERENCES if mode == "v2" else DIFFERENCES
