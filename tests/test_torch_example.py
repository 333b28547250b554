"""The kernels of examples/torch_backend, compiled for GPUs on a machine without one, and what a launch hands over."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blocktable.device import PLAIN_KERNELS, KernelOptions, Signature

pytestmark = pytest.mark.torch

SIZES = {"i": 4, "q": 8, "Q": 8}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `main` prints in a process of its own: TRITON_INTERPRET leaves nothing to compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, Path(__file__)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("signature", PLAIN_KERNELS, ids=lambda signature: signature.name)
def test_a_kernel_takes_what_its_signature_says(compiled: dict[str, Any], signature: Signature, dtype: str) -> None:
    """And after that only addresses, which a node of the step's graph gives it as zeros. Rules: R21."""
    ptx, num_extra = compiled["kernels"][f"{signature.name} {dtype}"]
    assert ".target sm_90" in ptx
    sizes = [int(bits) // 8 for bits in re.findall(r"\.param \.\w(\d+)", ptx)]
    assert sizes == [*(SIZES[kind] for kind in signature.layout), *num_extra * [8]]


def test_a_launch_names_its_stream_and_wraps_no_number(compiled: dict[str, Any]) -> None:
    """Rules: R21, R22."""
    assert compiled["launches"] == [[3, 2, 1, 77, *range(10), 256]]
    assert compiled["refused"]


def main() -> None:
    """Make the kernels as on a GPU, of which Triton asks nothing but this; print what the tests look at."""
    import triton
    from triton.backends.compiler import GPUTarget

    from blocktable_torch_example.driver import CompiledKernel, TorchDriver

    launches: list[Any] = []

    def launch(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        launches.append([x, y, z, stream, *rest[4:]])

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 2**16},
        load_binary=lambda *arguments: (1, 5, 32, 0, 1024),
        unload_module=lambda module: None,
    )
    triton.runtime.driver.set_active(
        SimpleNamespace(
            utils=utils,
            get_current_device=lambda: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            launcher_cls=lambda source, metadata: launch,
        )
    )
    driver, kernels = TorchDriver(0), {}
    for signature in PLAIN_KERNELS:
        for dtype in ("int64", "int32"):
            kernel: Any = driver.kernel(signature.name, KernelOptions(dtype))
            assert kernel is driver.kernel(signature.name, KernelOptions(dtype, frozenset({"HAS_SHARDS"})))
            assert (kernel.function, kernel.num_threads, kernel.shared_bytes) == (5, 128, 0)
            kernels[f"{signature.name} {dtype}"] = kernel._compiled.asm["ptx"], kernel.num_extra
    null: CompiledKernel = driver.kernel("null_stale_columns", KernelOptions())
    null((3, 2), tuple(range(10)), 77)
    try:
        null((3, 2), (0, 2**31, *range(8)), 77)
        refused = False
    except struct.error:
        refused = True
    json.dump({"kernels": kernels, "launches": launches, "refused": refused}, sys.stdout)


if __name__ == "__main__":
    main()
