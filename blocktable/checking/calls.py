"""What is wrong with a call as a whole: its starts, its padding, the rows that it names."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from blocktable.arrays import IntArray
from blocktable.config import BlockTableConfig
from blocktable.findings import Finding


class StartsCheck(NamedTuple):
    """What says which tokens belong to which request.

    Attributes:
        starts: [num_reqs + 1] int32. `query_start_loc`.
        num_positions: entries of `positions`.
        num_tokens_padded: as given; None: no padding was asked for.
        is_on_host: whether the caller gave host arrays, which are as long as they mean to be.
    """

    starts: IntArray
    num_positions: int
    num_tokens_padded: int | None
    is_on_host: bool


def check_starts(call: StartsCheck, step: int) -> tuple[list[Finding], bool]:
    """Return what is wrong with the starts and the padding, and whether the tokens can be told apart at all."""
    starts, end = call.starts, int(call.starts[-1])
    falls = np.flatnonzero(starts[1:] < starts[:-1])
    is_usable = not falls.size and starts[0] >= 0
    problem = ""
    if falls.size:
        i = int(falls[0])
        problem = (
            f"it falls from {starts[i]} to {starts[i + 1]} at index {i + 1}; it holds the first token of each request, "
            "not their lengths: tokens are given to the wrong requests"
        )
    elif starts[0] != 0:
        problem = f"it begins with {starts[0]}, not 0: the tokens before that belong to no request and are not written"
    elif end > call.num_positions:
        problem = f"it ends at {end} tokens, but positions holds {call.num_positions}: the last tokens are not written"
    elif end < call.num_positions and call.is_on_host and call.num_tokens_padded is None:
        problem = (
            f"it ends at {end} tokens, but positions holds {call.num_positions} and num_tokens_padded was not given: "
            "the last tokens are not written"
        )
    found = [Finding("bad_starts", f"bad_starts: query_start_loc is wrong: {problem}.", step)] if problem else []
    padded, num_tokens = call.num_tokens_padded, min(end, call.num_positions)
    if is_usable and padded is not None and padded < num_tokens:
        message = (
            f"padding_below_tokens: num_tokens_padded is {padded}, but the call has {num_tokens} tokens: the slots of "
            f"the last {num_tokens - padded} are not handed out, and their keys and values are lost."
        )
        found.append(Finding("padding_below_tokens", message, step))
    return found, is_usable


def find_unset_rows(
    config: BlockTableConfig,
    mapping: IntArray | None,
    starts: IntArray,
    positions: IntArray,
    filled: IntArray,
    step: int,
) -> list[tuple[Finding, int]]:
    """Return the batch entries with tokens of this rank whose row holds nothing, or is none, with their batch index.

    Args:
        mapping: [num_reqs] int32. None: the identity.
        starts: [num_reqs + 1] int32, from 0 on, not decreasing.
        positions: [n] int64.
        filled: [num_groups, num_rows] int32. Columns in use.
        step: commits so far.
    """
    num_rows, num_reqs = config.num_rows, starts.size - 1
    rows = np.arange(num_reqs) if mapping is None else mapping
    is_row = (rows >= 0) & (rows < num_rows)
    if is_row.all() and filled.take(rows, axis=1).any(0).all():
        return []
    holds = np.zeros(num_reqs, np.bool_)
    holds[is_row] = filled[:, rows[is_row]].any(0)
    bounds = np.minimum(starts, positions.size)
    suspects = np.flatnonzero(~holds & (rows != -1) & (bounds[1:] > bounds[:-1]))
    found = []
    for request in suspects.tolist():
        given = positions[bounds[request] : bounds[request + 1]]
        mine = given[_owned_anywhere(config, given)]
        if not mine.size:
            continue
        row, position = int(rows[request]), int(mine[0])
        what = "holds no blocks in any group" if is_row[request] else f"is outside the table (rows 0 to {num_rows - 1})"
        message = (
            f"unset_row: request {request} of the batch has {number(mine.size, 'token')} from position {position} on, "
            f"but its row {row} {what}: none of them is written. Set the row before the step, or pass -1 for a padding "
            "entry."
        )
        found.append((Finding("unset_row", message, step, row=row, position=position), request))
    return found


def number(count: int, what: str) -> str:
    """Return a count with its noun."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _owned_anywhere(config: BlockTableConfig, positions: IntArray) -> IntArray:
    """[n] bool. Whether this rank writes tokens at such positions in any group."""
    shard, owned = config.context_parallel, np.zeros(positions.size, np.bool_)
    for group in config.groups:
        if group.slot_mode not in ("linear", "ring"):
            continue
        if not group.is_sharded:
            return positions >= 0
        owned |= (positions >= 0) & (positions // shard.interleave_size % shard.world_size == shard.rank)
    return owned
