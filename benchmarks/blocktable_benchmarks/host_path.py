"""Time the row operations of the host path that BLOCKTABLE_HOST_PATH chooses, called as engines call them.

Run `python -m blocktable_benchmarks.host_path`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from blocktable import BlockTableConfig, KVCacheGroup
from blocktable.host_path import host_path_description, make_rows

NUM_ROWS, CALLS, RUNS = 256, 500, 25


def config(num_groups: int, max_blocks: int) -> BlockTableConfig:
    """Return the geometry of a table of rows of so many blocks."""
    return BlockTableConfig(
        groups=[KVCacheGroup(block_size=16)] * num_groups,
        max_num_reqs=NUM_ROWS,
        max_num_batched_tokens=NUM_ROWS,
        max_model_len=16 * max_blocks,
    )


def first_call() -> float:
    """Return milliseconds from an imported library to the end of a first operation."""
    start = time.perf_counter()
    make_rows(config(1, 4)).append_row(3, [5])
    return 1e3 * (time.perf_counter() - start)


def operations(num_groups: int) -> list[float]:
    """Return microseconds of `append_row` of one id, and of `append_rows` of 16 of them as lists and as arrays.

    Each is checked, stored and noted for the next commit. The least of 25 means, over a table that has room for all.
    """
    host = make_rows(config(num_groups, CALLS))
    rows, counts, ids = list(range(0, NUM_ROWS, 16)), [1] * 16, [list(range(1000, 1016))] * num_groups
    one = [[5]] * num_groups
    arrays = np.array(rows), [np.array(group, np.int32) for group in ids], np.array(counts)

    def least(call: Callable[[], None]) -> float:
        means = []
        for _ in range(RUNS):
            host.truncate(np.arange(NUM_ROWS), 0)
            host.committed()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            means.append(1e6 * (time.perf_counter() - start) / CALLS)
        return min(means)

    nothing = least(lambda: None)
    calls = [
        lambda: host.append_row(3, one),
        lambda: host.append_rows(rows, ids, counts),
        lambda: host.append_rows(*arrays),
    ]
    return [least(call) - nothing for call in calls]


def main() -> None:
    """Print a line for each number of groups."""
    first = first_call()
    print("| host path | groups | first call, ms | append_row, us | append_rows, lists | append_rows, arrays |")  # noqa: T201
    print("| --- | --- | --- | --- | --- | --- |")  # noqa: T201
    for num_groups in (1, 8):
        figures = " | ".join(f"{each:.2f}" for each in operations(num_groups))
        print(f"| {host_path_description()} | {num_groups} | {first:.1f} | {figures} |")  # noqa: T201


if __name__ == "__main__":
    main()
