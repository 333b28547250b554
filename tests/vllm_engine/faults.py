"""Faults put into the drop-in: each scenario names one, and proves nothing if the tokens stay what they are.

A fault takes the class of tables that vLLM's runner makes, and changes it in this process. Those of one name are the
same mistake in the tables of both runners, as far as both can make it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

Fault = Callable[[Any], None]
Ids = list[list[int]]

APPENDS = {"V1": ("append_row", "add_row"), "V2": ("append_block_ids",)}
MAPS = {"V1": "compute_slot_mapping", "V2": "compute_slot_mappings"}


def of(runner: str, name: str) -> Fault:
    """Return a fault of a runner's tables."""
    return FAULTS[name][runner]


def _no_move(multi: Any) -> None:
    multi.move_row = lambda self, src, tgt: None


def _first_block_kept(multi: Any) -> None:
    add = multi.add_row

    def call(self: Any, block_ids: Any, row_idx: int) -> None:
        add(self, _with_former_first(self, [*map(list, block_ids)], row_idx), row_idx)

    multi.add_row = call


def _v2_first_block_kept(tables: Any) -> None:
    append = tables.append_block_ids

    def call(self: Any, row: int, block_ids: Any, overwrite: bool) -> None:
        ids = [*map(list, block_ids)]
        append(self, row, _with_former_first(self, ids, row) if overwrite else ids, overwrite)

    tables.append_block_ids = call


def _with_former_first(tables: Any, ids: Ids, row: int) -> Ids:
    """Return blocks whose first one is that of the row's last request."""
    firsts = vars(tables).setdefault("__firsts__", {})
    former, firsts[row] = firsts.get(row), [group[:1] for group in ids]
    return ids if former is None else [[*old, *group[len(old) :]] for old, group in zip(former, ids, strict=True)]


def _batch_is_rows(tables: Any) -> None:
    gather = tables.gather_block_tables

    def call(self: Any, idx_mapping: Any, *args: Any, **kwargs: Any) -> Any:
        return gather(self, torch.arange(idx_mapping.shape[0], dtype=torch.int32), *args, **kwargs)

    tables.gather_block_tables = call


def _dummies_clear_rows(tables: Any) -> None:
    dummy = tables.get_dummy_block_tables

    def call(self: Any, num_reqs: int) -> Any:
        for each in self.block_tables:
            each.gpu[:num_reqs].zero_()
        return dummy(self, num_reqs)

    tables.get_dummy_block_tables = call


def _rows_shown_as_copies(multi: Any) -> None:
    from blocktable_vllm.tracking import TrackedState

    state: Any = TrackedState
    show = state.show_rows
    state.show_rows = lambda self, group, name: (
        show(self, group, name).copy() if name == "np" else show(self, group, name).clone()
    )


def _changed_ids(runner: str, change: Callable[[Any, Ids], Ids]) -> Fault:
    """Return the fault that rows get other block ids; `change` takes the tables and one list for each group."""

    def fault(kind: Any) -> None:
        for name in APPENDS[runner]:
            setattr(kind, name, _with_ids(getattr(kind, name), is_row_first=runner == "V2", change=change))

    return fault


def _with_ids(method: Any, *, is_row_first: bool, change: Callable[[Any, Ids], Ids]) -> Any:
    if is_row_first:
        return lambda self, row, ids, overwrite: method(self, row, change(self, [*map(list, ids)]), overwrite)
    return lambda self, ids, row: method(self, change(self, [*map(list, ids)]), row)


def _second_group_as_first(tables: Any, ids: Ids) -> Ids:
    return [ids[0], ids[0], *ids[2:]]


def _one_state_for_all(tables: Any, ids: Ids) -> Ids:
    """Of a model whose first group is the recurrent state."""
    return [[1] * len(ids[0]), *ids[1:]]


def _shared_blocks_lost(tables: Any, ids: Ids) -> Ids:
    seen = vars(tables).setdefault("__seen__", set())
    found = [[0 if each in seen else each for each in group] for group in ids]
    seen.update(each for group in ids for each in group)
    return found


def _changed_positions(runner: str, change: Callable[[Any, Any, list[int]], Any]) -> Fault:
    """Return the fault that slots are those of other positions; `change` takes tables, positions, each first token."""

    def fault(kind: Any) -> None:
        method = getattr(kind, MAPS[runner])

        def call(self: Any, batch: Any, starts: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
            num_reqs = batch if runner == "V1" else batch.shape[0]
            changed = change(self, positions.clone(), starts[: num_reqs + 1].tolist())
            return method(self, batch, starts, changed, *args, **kwargs)

        setattr(kind, MAPS[runner], call)

    return fault


def _chunks_from_zero(tables: Any, positions: Any, starts: list[int]) -> Any:
    for first, stop in pairwise(starts):
        if stop - first > 1:
            positions[first:stop] -= positions[first].item()
    return positions


def _first_token_for_all(tables: Any, positions: Any, starts: list[int]) -> Any:
    for first, stop in pairwise(starts):
        if 1 < stop - first <= 5:  # a token and its drafts
            positions[first:stop] = positions[first].item()
    return positions


def _column_before_the_last(tables: Any, positions: Any, starts: list[int]) -> Any:
    positions[positions >= 224] -= 32
    return positions


def _block_before(tables: Any, positions: Any, starts: list[int]) -> Any:
    first = positions[: starts[1]]
    first[first >= 32] -= 32
    first[first < 32] ^= 1
    return positions


def _no_new_block(tables: Any, ids: Ids) -> Ids:
    return [[] if len(each) == 1 else each for each in ids]


OF_THE_ENGINE = "an engine forgets the new block of a request"
"""No fault of the drop-in: for the checker to find."""

FAULTS: dict[str, dict[str, Fault]] = {
    "a row that should move stays; or the batch is taken for the rows": {"V1": _no_move, "V2": _batch_is_rows},
    "a row keeps the first block of its last request": {"V1": _first_block_kept, "V2": _v2_first_block_kept},
    "what others write to the tables is lost; or their dummy batch clears the rows": {
        "V1": _rows_shown_as_copies,
        "V2": _dummies_clear_rows,
    },
    **{
        name: {runner: _changed_ids(runner, change) for runner in APPENDS}
        for name, change in {
            "the second group gets the first one's blocks": _second_group_as_first,
            "all requests have one state": _one_state_for_all,
            "a block that another row holds too is lost": _shared_blocks_lost,
            OF_THE_ENGINE: _no_new_block,
        }.items()
    },
    **{
        name: {runner: _changed_positions(runner, change) for runner in MAPS}
        for name, change in {
            "a chunk of a prompt is written where the prompt begins": _chunks_from_zero,
            "drafts are written where the token before them is": _first_token_for_all,
            "the last column is taken for the one before it": _column_before_the_last,
            "the first request is written to the block before, or the token beside": _block_before,
        }.items()
    },
}
