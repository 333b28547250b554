"""From which share of a table on one copy of all of it beats a scatter of what changed (docs/performance.md)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import blocktable as bt
from blocktable import rows

NUM_ROWS, COLUMNS, NUM_GROUPS = 256, 2048, (1, 8)
SHARES = (0.02, 0.05, 0.1, 0.2, 0.5)
RUNS = 5

Try = Callable[[str, str, Callable[[], Any]], bool]


def measure_bulk(name: str, try_: Try, *, is_quick: bool) -> None:
    """Measure every point.

    Args:
        name: of the backend.
        try_: takes a section, a key and what measures it.
        is_quick: one small point.
    """
    for num_groups in NUM_GROUPS[:1] if is_quick else NUM_GROUPS:
        for share in SHARES[:1] if is_quick else SHARES:
            key = f"{num_groups} x {NUM_ROWS} x {COLUMNS}, {share:.0%}"
            try_("bulk", key, partial(_measure, name, num_groups, share))


def _measure(name: str, num_groups: int, share: float) -> dict[str, float]:
    """Return microseconds of a commit, the wait for it included, by scatter and by one copy."""
    return {
        "scatter_us": _commit_time(name, num_groups, share, 2.0),
        "copy_us": _commit_time(name, num_groups, share, 0.0),
    }


def _commit_time(name: str, num_groups: int, share: float, bulk_share: float) -> float:
    config = bt.BlockTableConfig(
        groups=[bt.KVCacheGroup(block_size=16)] * num_groups,
        max_num_reqs=NUM_ROWS,
        max_num_batched_tokens=1024,
        max_model_len=16 * COLUMNS,
    )
    usual, rows.BULK_SHARE = rows.BULK_SHARE, bulk_share
    try:
        table = bt.BlockTable(config, name)
    finally:
        rows.BULK_SHARE = usual
    table.warmup()
    filled = max(1, round(share * COLUMNS))
    ids = [np.arange(1, NUM_ROWS * filled + 1, dtype=np.int32)] * num_groups
    times = []
    for _ in range(RUNS + 1):  # the first run warms up
        table.set_rows(np.arange(NUM_ROWS), ids, np.full(NUM_ROWS, filled))
        table.backend.synchronize()
        start = time.perf_counter()
        table.commit()
        table.backend.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[1:])
