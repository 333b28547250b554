"""What an export costs, and what groups of one geometry save by sharing what depends on counts alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import blocktable as bt
from blocktable_benchmarks.agreement import WrongResult
from blocktable_benchmarks.gpu import Gpu
from blocktable_benchmarks.timing import call_time, graph_time, queued_call_time
from blocktable_benchmarks.workloads import Inputs, Workload, make_inputs, shrink, step_workloads

NUM_BLOCKS = 1 << 16
"""Of each group's cache: an inverse map has an entry for each of them, for each request."""

KV = replace(bt.LAYOUTS["trtllm_gen_kv"], entry_scale=2, value_offset=1)
STATES = replace(bt.LAYOUTS["speculative_state"], null=None, num_columns=4)

COUNT_ARRAYS = ("counts", "indptr", "last_page_lens", "lengths")
"""Arrays of `ExportBuffers` that depend on counts alone."""


@dataclass(frozen=True)
class Case:
    """One thing that is timed.

    Attributes:
        name: of it.
        layout: the layout.
        all_groups: every group of the table, or the first one alone.
        together: the groups in one export, or each in its own.
    """

    name: str
    layout: bt.Layout
    all_groups: bool = False
    together: bool = True


CASES = [
    Case("CSR, 1 group", bt.LAYOUTS["flashinfer"]),
    Case("CSR, all groups at once", bt.LAYOUTS["flashinfer"], all_groups=True),
    Case("CSR, each group alone", bt.LAYOUTS["flashinfer"], all_groups=True, together=False),
    Case("token-level CSR, 1 group", bt.LAYOUTS["aiter_mla"]),
    Case("K/V offsets, all groups at once", KV, all_groups=True),
    Case("K/V offsets, each group alone", KV, all_groups=True, together=False),
    Case("int64 table with -1, 1 group", bt.LAYOUTS["torch_paged_attention"]),
    Case("inverse map, 1 group", bt.LAYOUTS["flex_attention"]),
    Case("state indices, 4 columns, 1 group", STATES),
    Case("lengths of a rank, 1 group", bt.LAYOUTS["local_lengths"]),
]


def export_workload(*, is_quick: bool) -> Workload:
    """Return 256 requests of 250 blocks in 8 groups of one geometry, rows of 128k tokens."""
    workload = next(w for w in step_workloads() if w.num_groups == 8)
    return shrink(workload) if is_quick else workload


class ExportLane:
    """A table over one backend whose batch is exported.

    Args:
        name: of the backend.
        gpu: where the inputs are torch tensors; None: they are what the backend makes of numpy's.
        inputs: of the workload; its first rows are filled.
    """

    def __init__(self, name: str, gpu: Gpu | None, inputs: Inputs) -> None:
        self.backend = bt.get_backend(name)
        self.gpu = None if name == "numpy" or getattr(self.backend, "is_emulated", False) else gpu
        workload = inputs.workload
        config = workload.config()
        self.table = bt.BlockTable(
            replace(config, groups=[replace(group, num_blocks=NUM_BLOCKS) for group in config.groups]), self.backend
        )
        self.table.warmup()
        rows = np.arange(workload.num_reqs)
        ids = [1 + fill % (NUM_BLOCKS - 1) for fill in inputs.fill]
        self.table.set_rows(rows, ids, np.full(workload.num_reqs, workload.filled))
        self.table.commit()
        tokens = workload.filled * workload.block_size
        # Lengths in any order, up to the whole row.
        self.seq_lens = (1 + (inputs.idx_mapping.astype(np.int64) * 7919) % tokens).astype(np.int32)
        self.num_tokens = int(self.seq_lens.sum())
        self.arrays = [self._device_array(array) for array in (inputs.idx_mapping, self.seq_lens)]

    def _device_array(self, host: Any) -> Any:
        return self.backend.from_host(host) if self.gpu is None else self.gpu.array(host)

    def open(self, case: Case) -> list[bt.ExportBuffers]:
        """Make the buffers of a case."""
        groups = tuple(range(len(self.table.config.groups))) if case.all_groups else (0,)
        sets = [groups] if case.together else [(group,) for group in groups]
        capacity = self.num_tokens if case.layout.kind.endswith("csr") else None
        return [self.table.create_export(case.layout, chosen, capacity=capacity) for chosen in sets]

    def run(self, sets: list[bt.ExportBuffers]) -> None:
        """Export the batch into every set."""
        idx_mapping, seq_lens = self.arrays
        for out in sets:
            self.table.export(out.layout, idx_mapping, groups=out.groups, seq_lens=seq_lens, out=out)

    def arrays_of(self, sets: list[bt.ExportBuffers]) -> dict[str, Any]:
        """Return every array of an export on the host, the groups one after the other."""
        found: dict[str, Any] = {}
        for name in ("entries", "indptr", "last_page_lens", "lengths"):
            arrays = [getattr(out, name) for out in sets]
            if arrays[0] is None:
                continue
            host = [self.backend.to_host(array) for array in arrays]
            found[name] = np.concatenate(host) if name == "entries" else host[0]
        return found


def measure_exports(
    name: str, gpu: Gpu | None, attempt: Callable[[str, str, Callable[[], Any]], object], *, is_quick: bool
) -> None:
    """Measure every case, each checked against the numpy backend first; then count what each launches.

    Args:
        name: of the backend.
        gpu: the GPU's clock.
        attempt: takes a section, a case's name and a function that measures it.
        is_quick: tiny sizes.
    """
    inputs = make_inputs(export_workload(is_quick=is_quick))
    lane, reference = ExportLane(name, gpu, inputs), ExportLane("numpy", None, inputs)
    for case in CASES:
        attempt("exports", case.name, partial(_measure, lane, reference, case))
    if lane.gpu is not None:  # a profiler slows down what comes after it
        for case in CASES:
            attempt("export_launches", case.name, partial(_count_launches, lane, lane.gpu, case))


def _measure(lane: ExportLane, reference: ExportLane, case: Case) -> dict[str, Any]:
    sets, gpu = lane.open(case), lane.gpu
    lane.run(sets)
    _check(lane, reference, case, sets)
    count_bytes = [getattr(out, array) for out in sets for array in COUNT_ARRAYS]
    found: dict[str, Any] = {
        "calls": len(sets),
        "count_bytes": sum(4 * int(np.prod(array.shape)) for array in count_bytes if array is not None),
    }

    def call() -> None:
        lane.run(sets)

    if gpu is None:
        found["host_us"] = call_time(call)
        return found
    found["host_us"] = queued_call_time(gpu, call)
    found["gpu_us"] = graph_time(gpu, call)
    return found


def _count_launches(lane: ExportLane, gpu: Gpu, case: Case) -> dict[str, Any]:
    sets = lane.open(case)
    lane.run(sets)
    names = gpu.launched(lambda: lane.run(sets))
    return {"on_the_gpu": sum(names.values()), "names": names}


def _check(lane: ExportLane, reference: ExportLane, case: Case, sets: list[bt.ExportBuffers]) -> None:
    """Compare whole arrays with the numpy backend's.

    Raises:
        WrongResult: they differ.
    """
    expected = reference.open(case)
    reference.run(expected)
    right = reference.arrays_of(expected)
    for name, got in lane.arrays_of(sets).items():
        wrong = np.argwhere(got != right[name])
        if wrong.size:
            place = tuple(wrong[0].tolist())
            raise WrongResult(
                f"{case.name}: {len(wrong)} of {got.size} {name} differ; the first is {place}: it says {got[place]}, "
                f"the numpy backend {right[name][place]}."
            )
