"""What checks by kernels cost: the reference steps, and 65,536 tokens in 8 groups, beside a table without (R41)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import blocktable as bt
from blocktable_benchmarks.gpu import Gpu
from blocktable_benchmarks.timing import eager_time, graph_time, no_garbage_collection
from blocktable_benchmarks.workloads import MAX_BLOCK_ID, Inputs, Workload, make_inputs, shrink, step_workloads

NUM_REFERENCE_STEPS = 4
LONG = Workload(name="65,536 tokens, 8 groups", num_reqs=64, num_groups=8, tokens_per_req=1024, share=1 / 64)
MODES: dict[str, dict[str, Any]] = {
    "unchecked": {"check": "off"},
    "without double writes": {"check": "device", "check_kinds": {"slot_written_twice": "off"}},
    "all kinds": {"check": "device"},
}
STEPS = 200


def measure_checks(name: str, gpu: Gpu | None, *, is_quick: bool) -> list[dict[str, Any]]:
    """Return, for each workload and mode, microseconds of a step on the host and on the GPU, and of slots in a graph.

    Args:
        name: of the backend.
        gpu: its clock. None: only the host's time is taken, as in an emulation.
        is_quick: small sizes, and few steps.
    """
    workloads = [*step_workloads()[:NUM_REFERENCE_STEPS], LONG]
    found = []
    for workload in map(shrink, workloads) if is_quick else workloads:
        for mode, options in MODES.items():
            found.append(
                {"backend": name, "workload": workload.name, "mode": mode}
                | _measure(name, gpu, workload, options, is_quick)
            )
    return found


def _measure(name: str, gpu: Gpu | None, workload: Workload, options: dict[str, Any], is_quick: bool) -> dict[str, Any]:
    inputs, steps = make_inputs(workload), 3 if is_quick else STEPS
    table = _make_table(name, workload, options)
    device = gpu.array if gpu is not None and name != "numpy" else table.backend.from_host
    arrays: Any = [device(array) for array in (inputs.idx_mapping, inputs.query_start_loc, inputs.positions)]
    step = _steps(table, inputs, arrays)
    table.warmup()
    for _ in range(3):
        step()
    result: dict[str, Any] = {"host_us": _host_time(table, step, steps)}
    if gpu is not None and name != "numpy":
        result["gpu_us"] = eager_time(gpu, step)
        table.commit()
        result["slots_in_a_graph_us"] = graph_time(gpu, lambda: table.compute_slot_mappings(*arrays))
    result["findings"] = len(table.collect_findings())
    return result


def _make_table(name: str, workload: Workload, options: dict[str, Any]) -> bt.BlockTable:
    config = bt.BlockTableConfig(
        groups=[bt.KVCacheGroup(block_size=workload.block_size, num_blocks=MAX_BLOCK_ID)] * workload.num_groups,
        max_num_reqs=workload.num_reqs,
        max_num_batched_tokens=workload.num_slots,
        max_model_len=workload.max_model_len,
    )
    table = bt.BlockTable(config, name, **options)
    ids = np.arange(1, workload.num_reqs * workload.filled + 1, dtype=np.int32)  # none twice: nothing is to be found
    table.set_rows(
        np.arange(workload.num_reqs), [ids] * workload.num_groups, np.full(workload.num_reqs, workload.filled)
    )
    return table


def _steps(table: bt.BlockTable, inputs: Inputs, arrays: Any) -> Callable[[], object]:
    """Return what appends new blocks to the rows whose turn it is, and does a step."""
    turns, count = inputs.turns, 0
    next_id = inputs.workload.num_reqs * inputs.workload.filled + 1

    def step() -> None:
        nonlocal count, next_id
        turn = turns[count % len(turns)]
        ids = np.arange(next_id, next_id + turn.rows.size, dtype=np.int32)
        table.append_rows(turn.rows, [ids] * inputs.workload.num_groups, turn.counts)
        table.step(*arrays)
        count, next_id = count + 1, next_id + turn.rows.size

    return step


def _host_time(table: bt.BlockTable, step: Callable[[], object], steps: int) -> float:
    table.backend.synchronize()
    with no_garbage_collection():
        start = time.perf_counter()
        for _ in range(steps):
            step()
        elapsed = time.perf_counter() - start
    table.backend.synchronize()
    return elapsed / steps * 1e6


def as_lines(found: list[dict[str, Any]]) -> str:
    """Return the results as text, one line each; shares are of the unchecked table's."""
    lines, base = [], {}
    for each in found:
        place = each["backend"], each["workload"]
        base.setdefault(place, each)
        parts = [
            f"{key} {each[key]:.2f} ({each[key] / base[place][key]:.2f}x)"
            for key in ("host_us", "gpu_us", "slots_in_a_graph_us")
            if key in each
        ]
        lines.append(f"{', '.join(place)}, {each['mode']}: {', '.join(parts)}, findings {each['findings']}")
    return "\n".join(lines)
