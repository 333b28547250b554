"""The machine that a result comes from: what it is, and how fast its smallest operations are."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

from blocktable_benchmarks.gpu import Gpu
from blocktable_benchmarks.timing import call_time, eager_time, graph_time, queued_call_time
from blocktable_benchmarks.workloads import MILLION_16

PACKAGES = (
    "blocktable",
    "numpy",
    "torch",
    "triton",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "numba",
    "numba-cuda",
    "cuda-bindings",
    "vllm",
)

EMPTY = 'extern "C" __global__ void empty() {}'
CHAIN = r"""
extern "C" __global__ void chain(const int* links, int* out) {
  int thread = blockIdx.x * blockDim.x + threadIdx.x;
  out[thread] = links[links[links[thread]]];
}
"""
"""Three loads that depend on one another, and a store: what a small launch of this kind cannot do without."""
CHAIN_BLOCKS, CHAIN_THREADS = 1024, 128


def describe_machine() -> dict[str, Any]:
    """Return what the operating system says. No GPU library is loaded."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
    }


def package_versions() -> dict[str, str]:
    """Return the versions of what takes part, where installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def measure_machine(gpu: Gpu | None, *, is_quick: bool) -> dict[str, Any]:
    """Return what a figure of this machine must be read against (microseconds)."""
    found: dict[str, Any] = {"numpy_scatter_us": round(_numpy_scatter_time(), 2)}
    if gpu is None:
        return found
    import torch

    found["gpu"] = torch.cuda.get_device_name()
    found["cuda"] = torch.version.cuda
    entries = MILLION_16 >> (8 if is_quick else 0)
    source, target = gpu.empty(entries), gpu.empty(entries)
    source.random_()
    copy = eager_time(gpu, lambda: target.copy_(source))
    found["copy_GB_per_s"] = round(2 * 8 * entries / copy / 1e3, 1)
    found["copy_bytes"] = 2 * 8 * entries
    return found


def measure_launches(gpu: Gpu) -> dict[str, Any]:
    """Return the host's time of an empty launch by each way there is, and the GPU's time of an empty node."""
    return {"empty_launch_us": {name: round(time, 2) for name, time in _empty_launch_times(gpu).items()}}


def _numpy_scatter_time() -> float:
    """Return the time of one scatter of 128 entries into a mirror of 8 groups, 256 requests, 8,192 columns."""
    random = np.random.default_rng(0)
    mirror = np.zeros(8 * 256 * 8192, np.int32)
    where, what = random.integers(0, mirror.size, 128), random.integers(1, 1000, 128, np.int32)

    def scatter() -> None:
        mirror[where] = what

    return call_time(scatter)


def _empty_launch_times(gpu: Gpu) -> dict[str, float]:
    found: dict[str, float] = {}
    if importlib.util.find_spec("cupy") is None:
        found["torch sleep(0)"] = queued_call_time(gpu, lambda: gpu.hold(0))
        return found
    import cupy

    kernel = cupy.RawKernel(EMPTY, "empty")

    def launch() -> None:
        kernel((1,), (32,), (), stream=cupy.cuda.Stream.null)

    launch()
    found["CuPy"] = queued_call_time(gpu, launch)
    if importlib.util.find_spec("cuda") is None:
        return found
    from cuda.bindings import driver

    function, launch_kernel = driver.CUfunction(kernel.kernel.ptr), driver.cuLaunchKernel

    def launch_raw(stream: int = 0) -> None:
        launch_kernel(function, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0)

    (status,) = launch_kernel(function, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0)
    if status != 0:
        raise RuntimeError(f"cuLaunchKernel: {status}")

    def launch_current() -> None:
        launch_raw(gpu.current_stream())

    found["cuLaunchKernel"] = queued_call_time(gpu, launch_raw)
    found["node, on the GPU"] = graph_time(gpu, launch_current)
    found["graph replay"] = queued_call_time(gpu, gpu.capture(launch_current, 1).replay)
    found["graph of two empty nodes, on the GPU"] = eager_time(gpu, gpu.capture(launch_current, 2).replay)

    chain, entries = cupy.RawKernel(CHAIN, "chain"), CHAIN_BLOCKS * CHAIN_THREADS
    links, out = cupy.arange(entries, dtype=np.int32), cupy.zeros(entries, np.int32)

    def launch_chain() -> None:
        stream = cupy.cuda.ExternalStream(gpu.current_stream())
        chain((CHAIN_BLOCKS,), (CHAIN_THREADS,), (links, out), stream=stream)

    found["graph of two nodes of three loads each, on the GPU"] = eager_time(gpu, gpu.capture(launch_chain, 2).replay)
    return found
