"""Whole steps of `blocktable bench` under pytest-benchmark, over every backend that can run here.

Host time, for comparing two versions on one machine; `blocktable bench` times the GPU and the engines' tables too.
"""

import itertools

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import blocktable as bt
from blocktable_benchmarks.agreement import check_steps
from blocktable_benchmarks.gpu import find_gpu
from blocktable_benchmarks.table_lane import TableLane
from blocktable_benchmarks.workloads import Workload, make_inputs, shrink, step_workloads

STEPS = 20


def available_backends() -> list[str]:
    found = []
    for info in bt.list_backends():
        try:
            found.append(bt.get_backend(info.name).name)
        except bt.BlockTableError:
            continue
    return found


@pytest.mark.parametrize("workload", step_workloads(), ids=lambda workload: workload.name)
@pytest.mark.parametrize("backend", available_backends())
def test_step(benchmark: BenchmarkFixture, backend: str, workload: Workload) -> None:
    lane = TableLane(backend, None if backend == "numpy" else find_gpu())
    is_emulated = getattr(lane.backend, "is_emulated", False)
    if is_emulated and not benchmark.disabled:
        pytest.skip("times of emulated kernels mean nothing; --benchmark-disable runs them")
    inputs = make_inputs(shrink(workload) if is_emulated else workload)
    lane.open(inputs)
    check_steps(lane, inputs, is_peer=False)
    turns = itertools.cycle(range(STEPS))

    def before() -> tuple[tuple[int], dict[str, int]]:
        turn = next(turns)
        if turn == 0:
            lane.rewind()
        lane.synchronize()
        return (turn,), {}

    benchmark.pedantic(  # type: ignore[no-untyped-call]  # pytest-benchmark leaves it untyped
        lane.step, setup=before, rounds=2 * STEPS, warmup_rounds=STEPS
    )
