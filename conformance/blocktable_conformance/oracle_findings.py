"""What the checker must find in the tokens of one call, token by token in plain Python (R40)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from blocktable import Finding
from blocktable_conformance.oracle import Geometry, OracleTable

COMPARED = (
    "missing_block",
    "unset_row",
    "shared_block_written",
    "slot_written_twice",
    "bad_starts",
    "padding_below_tokens",
    "null_written",
)
"""Kinds that this page knows: those that rows and one call decide. Where a window is, who wrote last counts as well."""

Summary = tuple[str, int, int, int, int, int]
"""Kind, group, row, position, block, slot of a finding; -99 for None."""


def summary(finding: Finding) -> Summary:
    """Return what is compared of a finding."""
    place = (finding.group, finding.row, finding.position, finding.block_id, finding.slot)
    group, row, position, block, slot = (-99 if value is None else value for value in place)
    return finding.kind, group, row, position, block, slot


class Token(NamedTuple):
    """One token of a call, and the position of its request's last one."""

    request: int
    row: int
    position: int
    last: int


def expected_findings(
    oracle: OracleTable,
    idx_mapping: Sequence[int],
    query_start_loc: Sequence[int],
    positions: Sequence[int],
    num_tokens_padded: int | None,
    groups: Sequence[int] | None,
    *,
    is_on_host: bool,
) -> list[Summary]:
    """Return the findings of a call over the rows as of the last commit."""
    found: list[Summary] = []
    end, num_positions = query_start_loc[-1], len(positions)
    is_short = end < num_positions and is_on_host and num_tokens_padded is None
    if query_start_loc[0] != 0 or end > num_positions or is_short:
        found.append(("bad_starts", *[-99] * 5))  # type: ignore[arg-type]
    if num_tokens_padded is not None and num_tokens_padded < min(end, num_positions):
        found.append(("padding_below_tokens", *[-99] * 5))  # type: ignore[arg-type]
    all_groups = range(len(oracle.shapes))
    with_slots = [group for group in all_groups if oracle.shapes[group].slot_mode in ("linear", "ring")]
    chosen = with_slots if groups is None else [group for group in groups if group in with_slots]
    if not chosen:
        return found
    tokens = list(_tokens(idx_mapping, query_start_loc, positions))
    unset = set()
    for token in tokens:
        is_row = 0 <= token.row < oracle.num_rows
        is_empty = is_row and not any(oracle.committed_columns(group, token.row) for group in all_groups)
        is_mine = any(_is_mine(oracle.shapes[group], token.position) for group in with_slots)
        if (is_empty or (not is_row and token.row != -1)) and is_mine and token.request not in unset:
            unset.add(token.request)
            found.append(("unset_row", -99, token.row, token.position, -99, -99))
    written = [token for token in tokens if 0 <= token.row < oracle.num_rows and token.request not in unset]
    for group in chosen:
        found += _in_group(oracle, group, written)
    return found


def _tokens(mapping: Sequence[int], starts: Sequence[int], positions: Sequence[int]) -> Iterator[Token]:
    for request, row in enumerate(mapping):
        given = positions[starts[request] : starts[request + 1]]
        for position in given:
            yield Token(request, row, position, given[-1])


def _is_mine(shape: Geometry, position: int) -> bool:
    return position >= 0 and (shape.share is None or shape.share.owner(position) == shape.share.rank)


def _in_group(oracle: OracleTable, group: int, tokens: Sequence[Token]) -> list[Summary]:
    shape, size = oracle.shapes[group], oracle.shapes[group].kernel_block_size
    found: dict[tuple[str, int], Summary] = {}
    slots: dict[int, Token] = {}

    def note(kind: str, token: Token, block: int = -99, slot: int = -99) -> None:
        found.setdefault((kind, token.request), (kind, group, token.row, token.position, block, slot))

    for token in tokens:
        columns = oracle.committed_columns(group, token.row)
        if not _is_mine(shape, token.position):
            continue
        local = token.position if shape.share is None else shape.share.local_index(token.position)
        if shape.slot_mode == "ring" and columns:
            if token.position <= token.last - len(columns) * size:
                continue
            local %= len(columns) * size
        column = local // size
        if column >= len(columns):
            note("missing_block", token)
            continue
        slot = columns[column] * size + local % size
        if shape.is_missing(columns[column]):
            is_pad = shape.null_is_pad or shape.null_block_id == -1
            note("null_written", token, shape.null_block_id, -99 if is_pad else slot)
            continue
        block = columns[column] // shape.blocks_per_kv_block
        if shape.sliding_window is None and any(
            block * shape.blocks_per_kv_block in oracle.committed_columns(group, other)
            for other in range(oracle.num_rows)
            if other != token.row
        ):
            note("shared_block_written", token, block, slot)
        if slot in slots:
            note("slot_written_twice", token, block, slot)
        slots[slot] = token
    kept = found.values()
    return [each for each in kept if shape.sliding_window is None or each[0] != "shared_block_written"]


def expected_duplicates(
    oracle: OracleTable, before: Sequence[Sequence[Sequence[int | None]]], operation: str, args: Sequence[Any]
) -> list[tuple[int, int]]:
    """Return the (group, row) in which an accepted operation's block stands twice.

    Args:
        oracle: the table after it.
        before: [groups][rows] block ids before it; None: a hole.
        operation, args: the call, in plain lists.
    """
    found = []
    for group, shape in enumerate(oracle.shapes):
        if shape.slot_mode != "linear" or shape.sliding_window is not None:
            continue
        for row, blocks in enumerate(oracle.rows[group]):
            handed = [blocks[i] for i in _handed_in(operation, args, group, row, before[group][row], blocks)]
            if any(block is not None and blocks.count(block) > 1 for block in handed):
                found.append((group, row))
    return found


def _handed_in(
    operation: str,
    args: Sequence[Any],
    group: int,
    row: int,
    before: Sequence[int | None],
    after: Sequence[int | None],
) -> Sequence[int]:
    """Return the places of a row whose blocks an operation handed in."""
    if operation in ("append_row", "append_rows"):
        return range(len(before), len(after))
    if operation in ("set_row", "set_rows"):
        rows = [args[0]] if operation == "set_row" else args[0]
        return range(len(after)) if row in rows else ()
    if operation == "replace_blocks" and (args[0], args[1]) == (row, group):
        return range(args[2], args[2] + len(args[3] or ()))
    if operation == "replace_block_ranges" and args[1] == group and row in args[0]:
        place = list(args[0]).index(row)
        return range(args[2][place], args[2][place] + args[4][place])
    if operation == "remap_blocks" and args[0] == group:
        return [i for i, block in enumerate(before) if block is not None and block in (args[1] or ())]
    return ()
