"""One lane, in a process of its own: `python -m blocktable_benchmarks.worker`, a plan in, records out, JSON lines.

A record has a section, a key, and one of "value", "error" and "not_run". A failure costs its own record only.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import blocktable as bt
from blocktable.host_path import host_path_description
from blocktable_benchmarks.agreement import check_slots, check_steps
from blocktable_benchmarks.caller_lane import CallerLane
from blocktable_benchmarks.callers import (
    PATIENT_SECONDS,
    PEER_SPELLINGS,
    CallerCase,
    Clock,
    caller_workloads,
    measure_callers,
)
from blocktable_benchmarks.callers import RUNS as CALLER_RUNS
from blocktable_benchmarks.exports import measure_exports
from blocktable_benchmarks.gpu import Gpu, find_gpu
from blocktable_benchmarks.machine import measure_launches, measure_machine
from blocktable_benchmarks.peers.base import Impossible
from blocktable_benchmarks.small_engine import measure_small_engine
from blocktable_benchmarks.table_lane import TableLane
from blocktable_benchmarks.timing import (
    QUEUE_ENTRIES,
    Pace,
    eager_time,
    gpu_step_time,
    graph_time,
    host_time,
    percentage,
    steps_before_wait,
    waited_time,
)
from blocktable_benchmarks.workloads import (
    SWEEPS,
    Inputs,
    Workload,
    bandwidth_workloads,
    make_inputs,
    shrink,
    slot_workloads,
    step_workloads,
    sweep_workload,
)

SECTIONS = (
    *("machine", "callers", "steps", "drop_ins", "slots", "bandwidth", "sweep", "probes", "exports"),
    "launches",
)
"""In the order they run: a profiler's traces slow down what comes after it."""

DROP_IN_STEPS = 4
"""Of `step_workloads`, the first ones."""
(CHURN,) = [spelling for spelling in PEER_SPELLINGS if spelling.key == "churn"]

STEPS = 100
RUNS = 7
GPU_STEPS = 30
HOST_STEPS = 30
HOST_RUNS = 5
ALLOCATION_STEPS = 32
PACE_TRIES = 300
SWEEP_PATIENCE = 0.2
GUESSED_HOST_US = 100.0
"""A step's host time, for how long a stream must be held while steps queue up; held longer where that is too short."""
SWEEP_STEPS = 40
LARGEST_SWEEP = 1 << 22
"""Tokens of all steps in one timed run of a sweep."""
LARGEST_HOST_STEP = 1 << 20
"""Tokens of a step that numpy still maps in tens of milliseconds."""

Emit = Callable[..., None]


class Worker:
    """Runs the sections of a plan.

    Args:
        plan: `kind` ("backend", "peer", "drop-in" or "machine"), `name` of the backend or `table` of the peer, the
            drop-in's `mode`, `sections`, `is_quick`, `seconds` for everything, `sweep_seconds` for the sweeps among it,
            `pace_us` that an earlier lane has seen.
        emit: takes section, key, and `value` or `error`.
    """

    def __init__(self, plan: dict[str, Any], emit: Emit) -> None:
        self.plan = plan
        self.emit = emit
        self.is_quick: bool = plan["is_quick"]
        self.deadline = time.monotonic() + plan["seconds"]
        self.gpu = find_gpu() if plan.get("name") != "numpy" else None
        self.pace = Pace(plan.get("pace_us", math.inf))
        self.steps, self.runs = (3, 2) if self.is_quick else (STEPS, RUNS) if self.gpu else (HOST_STEPS, HOST_RUNS)

    def run(self) -> None:
        """Run every section of the plan."""
        if self.plan["kind"] != "machine" and not self._introduce():
            return
        for section in SECTIONS:
            if section in self.plan["sections"]:
                getattr(self, f"_{section}")()
        for _ in range(PACE_TRIES):
            self.pace.now()
        self.emit("machine", "pace", value={"pace_us": self.pace.best_us})

    def _try(self, section: str, key: str, measure: Callable[[], Any]) -> bool:
        if time.monotonic() > self.deadline:
            self.emit(section, key, not_run="the lane's time was over")
            return False
        try:
            self.emit(section, key, value=measure())
        except Impossible as error:
            self.emit(section, key, value={"impossible": str(error)})
        except Exception as error:
            self.emit(section, key, error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
            return False
        return True

    # Lanes.

    def _introduce(self) -> bool:
        """Say what the lane is, or why it is absent."""
        try:
            about = self._describe_peer() if self.plan["kind"] == "peer" else self._describe_backend()
        except (bt.BlockTableError, ImportError) as error:
            about = {"absent": str(error)}
        if about.get("is_emulated") and not self.is_quick:
            about["absent"] = f"{about['description']}: times of emulated kernels mean nothing; --quick runs it untimed"
        self.emit("lane", "about", value=about)
        return "absent" not in about

    def _describe_backend(self) -> dict[str, Any]:
        backend = bt.get_backend(self.plan["name"])
        return {
            "description": str(getattr(backend, "description", backend.name)),
            "capabilities": sorted(backend.capabilities),
            "fallbacks": list(getattr(backend, "fallbacks", ())),
            "is_emulated": bool(getattr(backend, "is_emulated", False)),
            "host_path": host_path_description(),
        }

    def _describe_peer(self) -> dict[str, Any]:
        from blocktable_benchmarks.peers import make_lane

        table = self.plan["table"]
        if self.gpu is None:
            if table == "V2":
                raise bt.BlockTableError("vLLM's V2 table needs a GPU")
            os.environ["TRITON_INTERPRET"] = "1"
        make_lane(table, self.gpu)
        description = f"vLLM's {table} table" + (" (Triton's interpreter)" if self.gpu is None else "")
        return {"description": description, "is_emulated": self.gpu is None}

    def _make_lane(self, *, takes_lists: bool = False) -> Any:
        if self.plan["kind"] == "peer":
            from blocktable_benchmarks.peers import make_lane

            return make_lane(self.plan["table"], self.gpu)
        if self.plan["kind"] == "drop-in":
            from blocktable_benchmarks.peers.drop_in import make_drop_in_lane

            return make_drop_in_lane(self.plan["mode"], self.plan["name"], self.gpu)
        return TableLane(self.plan["name"], self.gpu, takes_lists=takes_lists)

    @property
    def _is_peer(self) -> bool:
        """Whether the lane is driven through an engine's own calls: an engine's table, or the drop-in."""
        return self.plan["kind"] in ("peer", "drop-in")

    def _lane_gpu(self, lane: Any) -> Gpu | None:
        found: Gpu | None = lane.gpu
        return found

    def _inputs(self, workload: Workload) -> Inputs:
        return make_inputs(shrink(workload) if self.is_quick else workload)

    # Sections.

    def _machine(self) -> None:
        gpu = self.gpu
        self._try("machine", "measured", lambda: measure_machine(gpu, is_quick=self.is_quick))
        if gpu:
            self._try("machine", "launches", lambda: measure_launches(gpu))

    def _callers(self) -> None:
        patient_until = time.monotonic() + (0 if self.is_quick else PATIENT_SECONDS)
        clock = Clock(self.steps, 2 if self.is_quick else CALLER_RUNS, self.pace, patient_until)
        make_lane = self._make_lane if self._is_peer else partial(CallerLane, self.plan["name"], self.gpu)
        make_reference = partial(CallerLane, "numpy", None)
        measure_callers(make_lane, make_reference, self._try, clock, is_peer=self._is_peer, is_quick=self.is_quick)
        if self.plan.get("name") == "numpy":
            measure_small_engine(self._try, self.pace, is_quick=self.is_quick)

    def _steps(self) -> None:
        for workload in step_workloads():
            self._try("steps", workload.name, partial(self._measure_step, workload))

    def _measure_step(self, workload: Workload) -> dict[str, Any]:
        inputs = self._inputs(workload)
        lane = self._make_lane()
        gpu = self._lane_gpu(lane)
        free = gpu.free_bytes() if gpu else 0
        lane.open(inputs)
        used = free - gpu.free_bytes() if gpu else None
        notes = check_steps(lane, inputs, is_peer=self._is_peer)
        steps = min(self.steps, inputs.workload.max_steps, QUEUE_ENTRIES // lane.launches_per_step)
        found: dict[str, Any] = {"notes": notes, "steps": steps, "memory": lane.memory, "device_bytes": used}
        found["blocks_per_step"] = inputs.workload.num_appended * inputs.workload.num_groups
        found["host_us"] = host_time(lane, steps, self.runs, self.pace)
        found["pace"] = round(self.pace.last, 2)
        part = partial(self._part, workload, found)
        part("waited_us", lambda: waited_time(lane, steps))
        part("bytes_per_step", lambda: self._bytes_per_step(lane, steps))
        if gpu:
            part("steps_before_wait", lambda: steps_before_wait(gpu, lane))
            part("allocations", lambda: self._allocations(gpu, lane))
            if self._is_peer:
                queued = min(steps, getattr(lane, "queued_steps", GPU_STEPS))
                part("gpu_us", lambda: gpu_step_time(gpu, lane, queued, found["host_us"]))
        lane.close()
        if not self._is_peer:
            part("host_no_wait_us", lambda: self._measure_unlimited(inputs, steps, found))
            part("host_lists_us", lambda: self._list_step_time(inputs, steps))
        return found

    def _part(self, workload: Workload, found: dict[str, Any], key: str, measure: Callable[[], Any]) -> None:
        """Add one figure; one that fails is recorded, and leaves the others standing."""
        try:
            found[key] = measure()
        except Exception as error:
            where = f"{workload.name}: {key}"
            self.emit("steps", where, error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())

    def _measure_unlimited(self, inputs: Inputs, steps: int, found: dict[str, Any]) -> float:
        """Return the host's time with so many steps in flight that none waits for an earlier one, and add the GPU's."""
        lane = self._make_lane()
        lane.open(inputs, steps_in_flight=steps + 4)
        host_us = host_time(lane, steps, self.runs, self.pace)
        if lane.gpu:
            found["gpu_us"] = gpu_step_time(lane.gpu, lane, min(steps, GPU_STEPS), host_us)
        lane.close()
        return host_us

    def _list_step_time(self, inputs: Inputs, steps: int) -> float:
        lane = self._make_lane(takes_lists=True)
        lane.open(inputs)
        check_steps(lane, inputs, is_peer=False)
        found = host_time(lane, steps, self.runs, self.pace)
        lane.close()
        return found

    def _bytes_per_step(self, lane: Any, steps: int) -> float:
        if not hasattr(lane, "bytes_sent"):
            return float(lane.bytes_per_step)
        lane.rewind()
        before = lane.bytes_sent
        for turn in range(steps):
            lane.step(turn)
        lane.synchronize()
        return float(lane.bytes_sent - before) / steps

    def _allocations(self, gpu: Gpu, lane: Any) -> dict[str, int]:
        lane.rewind()
        lane.step(0)
        before, free = gpu.num_allocations(), gpu.free_bytes()
        for turn in range(ALLOCATION_STEPS):
            lane.step(turn)
        return {
            "steps": ALLOCATION_STEPS,
            "torch_blocks": gpu.num_allocations() - before,
            "device_bytes": free - gpu.free_bytes(),
        }

    def _drop_ins(self) -> None:
        """What a drop-in is measured by, and the engine's own tables beside it: steps, and churn."""
        if not self._is_peer:
            return
        for workload in step_workloads()[:DROP_IN_STEPS]:
            self._try("drop_ins", workload.name, partial(self._measure_calls, workload))
        workload = caller_workloads(is_quick=self.is_quick)[0]
        clock = Clock(self.steps, 2 if self.is_quick else CALLER_RUNS, self.pace, time.monotonic() + PATIENT_SECONDS)
        case = CallerCase(workload, self._make_lane(), CallerLane("numpy", None), clock, is_peer=True)
        self._try("drop_ins", f"{workload.name}, 128k, {CHURN.name}", partial(case.measure, CHURN))
        case.close()

    def _measure_calls(self, workload: Workload) -> dict[str, Any]:
        inputs = self._inputs(workload)
        lane = self._make_lane()
        lane.open(inputs)
        notes = check_steps(lane, inputs, is_peer=True)
        steps = min(self.steps, inputs.workload.max_steps, QUEUE_ENTRIES // lane.launches_per_step)
        host_us = host_time(lane, steps, self.runs, self.pace)
        found = {"notes": notes, "steps": steps, "host_us": host_us, "pace": round(self.pace.last, 2)}
        found["waited_us"] = waited_time(lane, steps)
        lane.close()
        return found

    def _slots(self) -> None:
        for workload in slot_workloads():
            self._try("slots", workload.name, partial(self._measure_slots, workload))

    def _measure_slots(self, workload: Workload) -> dict[str, Any]:
        inputs = self._inputs(workload)
        lane = self._make_lane()
        lane.open(inputs, steps_in_flight=GPU_STEPS + 4)
        check_slots(lane, inputs)
        found: dict[str, Any] = {"tokens": inputs.workload.num_tokens}
        gpu = self._lane_gpu(lane)
        if gpu:
            steps = min(GPU_STEPS, inputs.workload.max_steps, QUEUE_ENTRIES // lane.launches_per_step)
            found["step_us"] = gpu_step_time(gpu, lane, steps, GUESSED_HOST_US)
            found["gpu_us"] = graph_time(gpu, lane.map_slots)
            if lane.gather:
                found["gather_us"] = graph_time(gpu, lane.gather)
        lane.close()
        return found

    def _bandwidth(self) -> None:
        gpu = self.gpu
        if gpu is None or self.is_quick:
            return
        for workload in bandwidth_workloads():
            self._try("bandwidth", workload.name, partial(self._measure_bandwidth, gpu, workload))

    def _measure_bandwidth(self, gpu: Gpu, workload: Workload) -> dict[str, Any]:
        inputs = make_inputs(workload)
        lane = self._make_lane()
        lane.open(inputs)
        check_slots(lane, inputs)
        time_us = eager_time(gpu, lane.map_slots)
        lane.close()
        source, target = gpu.empty(workload.num_tokens), gpu.empty(workload.num_tokens)
        source.random_()
        copy_us = eager_time(gpu, lambda: target.copy_(source))
        moved = 16 * workload.num_tokens  # a position read, a slot written
        return {
            "gpu_us": time_us,
            "GB_per_s": moved / time_us / 1e3,
            "copy_GB_per_s": moved / copy_us / 1e3,
            "share_of_copy": percentage(copy_us, time_us),
        }

    def _sweep(self) -> None:
        self.deadline, deadline = min(self.deadline, time.monotonic() + self.plan["sweep_seconds"]), self.deadline
        for axis, points in SWEEPS.items():
            for value, changes in points[:: len(points) - 1] if self.is_quick else points:
                workload = sweep_workload(axis, changes)
                if self.gpu is None and workload.num_tokens > LARGEST_HOST_STEP:
                    continue
                measure = partial(self._measure_point, axis, value, workload)
                self._try("sweep", f"{axis} {value:g}", measure)
        self.deadline = deadline

    def _measure_point(self, axis: str, value: float, workload: Workload) -> dict[str, Any]:
        inputs = self._inputs(workload)
        lane = self._make_lane()
        most = min(3 if self.is_quick else SWEEP_STEPS, inputs.workload.max_steps)
        lane.open(inputs, steps_in_flight=most + 4)
        # Of steps that take the GPU milliseconds, a few are enough.
        steps = max(2, min(most, QUEUE_ENTRIES // lane.launches_per_step, LARGEST_SWEEP // inputs.workload.num_tokens))
        if inputs.workload.num_tokens <= LARGEST_HOST_STEP:  # the larger ones are checked where bandwidth is measured
            check_steps(lane, inputs, is_peer=self._is_peer, steps=1)
        found: dict[str, Any] = {
            "axis": axis,
            "x": value,
            "host_us": host_time(lane, steps, 3, self.pace, SWEEP_PATIENCE),
        }
        gpu = self._lane_gpu(lane)
        if gpu:
            found["gpu_us"] = gpu_step_time(gpu, lane, steps, found["host_us"], runs=1)
        lane.close()
        return found

    def _probes(self) -> None:
        if self._is_peer:
            from blocktable_benchmarks.peers.probes import probe

            self._try("probes", "contract", lambda: probe(self._make_lane, self.gpu))

    def _exports(self) -> None:
        """After all other times: a profiler counts what exports launch."""
        if self._is_peer or "exports" not in bt.get_backend(self.plan["name"]).capabilities:
            return
        measure_exports(self.plan["name"], self.gpu, self._try, is_quick=self.is_quick)

    def _launches(self) -> None:
        gpu = self.gpu
        if gpu is None:
            return
        for workload in step_workloads():
            self._try("launches", workload.name, partial(self._count_launches, gpu, workload))

    def _count_launches(self, gpu: Gpu, workload: Workload) -> dict[str, Any]:
        inputs = self._inputs(workload)
        lane = self._make_lane()
        lane.open(inputs)
        for turn in range(3):
            lane.step(turn)
        lane.synchronize()
        names = gpu.launched(lambda: lane.step(3))
        lane.close()
        return {"on_the_gpu": sum(names.values()), "names": names}


def main() -> int:
    """Run the plan that standard input holds."""
    plan = json.loads(sys.stdin.read())
    records = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not stand between the records

    def emit(section: str, key: str, **content: Any) -> None:
        records.write(json.dumps({"section": section, "key": key, **content}) + "\n")
        records.flush()

    worker = Worker(plan, emit)
    gc.freeze()  # what is loaded stays: collections between tables need not look at it
    worker.run()
    records.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
