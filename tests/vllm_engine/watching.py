"""What two engines' tables are compared by: block ids and slots after each call that a kernel follows, as digests."""

from __future__ import annotations

import hashlib
from functools import wraps
from typing import Any

import numpy as np


def watch(kind: Any, runner: str) -> tuple[list[Any], list[Any]]:
    """Note what the tables of a class hold; return the entries, and the tables that were seen."""
    trace: list[Any] = []
    seen: list[Any] = []
    notes = {"compute_slot_mapping": _v1_slots} if runner == "V1" else V2_NOTES
    for name, note in notes.items():
        setattr(kind, name, _watched(getattr(kind, name), note, trace, seen))
    return trace, seen


def _watched(method: Any, note: Any, trace: list[Any], seen: list[Any]) -> Any:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if not seen or seen[-1] is not self:
            seen.append(self)
        trace.append(note(self, result, *args, **kwargs))
        return result

    return call


def _digest(*arrays: Any) -> str:
    found = hashlib.sha1()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def _held(table: Any, counts: Any) -> Any:
    """Return rows with 0 after what each holds: vLLM leaves there what was there before."""
    rows = table.numpy()
    return np.where(np.arange(rows.shape[1]) < np.asarray(counts)[:, None], rows, 0)


def _v1_counts(multi: Any) -> Any:
    state: Any = getattr(multi, "__blocktable__", None)
    if hasattr(state, "host_state") and state.has_own_rows:
        return list(state.host_state()[1])  # to ask for the counts would end tracking
    return [vars(each)["num_blocks_per_row"] for each in multi.block_tables]


def _v1_slots(multi: Any, result: Any, num_reqs: int, query_start_loc: Any, positions: Any) -> Any:
    """num_reqs, tokens; for each group counts, blocks, slots, and whether every other slot is PAD."""
    num_tokens, entry = int(query_start_loc[num_reqs]), []
    for each, counts in zip(multi.block_tables, _v1_counts(multi), strict=True):
        held = _held(each.get_device_tensor(num_reqs), counts[:num_reqs])
        slots = each.slot_mapping.gpu.numpy()
        has_slots = each.slot_mapping_mode.value != "none"
        of_slots = (_digest(slots[:num_tokens]), bool((slots[num_tokens:] == -1).all())) if has_slots else None
        entry.append((counts[:num_reqs].tolist(), _digest(held), of_slots))
    return num_reqs, num_tokens, entry


def _v2_tables(tables: Any, result: Any, idx_mapping: Any, num_reqs_padded: int, *args: Any, **kwargs: Any) -> Any:
    """Rows, batch rows; for each group the blocks."""
    rows = idx_mapping.tolist()
    entry = []
    for group, table in enumerate(result):
        counts = np.zeros(num_reqs_padded, np.int64)
        counts[: len(rows)] = tables.num_blocks.np[group, rows]
        entry.append((counts.tolist(), _digest(_held(table, counts))))
    return rows, num_reqs_padded, entry


def _v2_slots(tables: Any, result: Any, idx_mapping: Any, starts: Any, *args: Any, **kwargs: Any) -> Any:
    """Rows, tokens; the slots of every group, PAD to the end."""
    num_reqs = idx_mapping.shape[0]
    return idx_mapping.tolist(), int(starts[num_reqs]), _digest(result.numpy())


V2_NOTES = {"gather_block_tables": _v2_tables, "compute_slot_mappings": _v2_slots}
