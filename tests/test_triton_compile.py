"""The Triton kernels compiled for real GPUs on a machine without one, and what a launch hands over.

All in one process of its own: TRITON_INTERPRET, which the other Triton tests want, leaves nothing to compile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

KERNELS = ("scatter_writes", "null_stale_columns", "gather_block_tables", "map_slots")
TARGETS = {
    "sm_80": (("cuda", 80, 32), "ptx", ".target sm_80"),
    "sm_90": (("cuda", 90, 32), "ptx", ".target sm_90"),
    "sm_100": (("cuda", 100, 32), "ptx", ".target sm_100"),
    "gfx942": (("hip", "gfx942", 64), "amdgcn", "gfx942"),
}
SLOT_TYPES = ("int64", "int32")

# Each would be a kernel of its own if a launch were specialised: 0, 1, multiples of 16, odd ones, beyond 32 bits.
VALUES = (0, 1, 2, 16, 17, 33, 2**31 - 1)
ADDRESSES = (0, 1, 4, 16, 2**33 + 4, 2**47 + 8, 2**47 + 16)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("triton", reason="triton is not installed: tox -e conformance-triton")
    pytest.importorskip("torch", reason="torch is not installed: tox -e conformance-triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, Path(__file__)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("kernel", "slot_type"), [*((name, "") for name in KERNELS[:3]), *product(KERNELS[3:], SLOT_TYPES)]
)
def test_kernels_compile_ahead_of_time(compiled: dict[str, Any], kernel: str, target: str, slot_type: str) -> None:
    text, size = compiled["binaries"][f"{kernel} {target} {slot_type}"]
    assert TARGETS[target][2] in text
    assert kernel in text
    assert size > 1000


@pytest.mark.parametrize("kernel", KERNELS)
def test_arguments_are_exact_and_never_specialised(compiled: dict[str, Any], kernel: str) -> None:
    """Whatever the values and alignments, Triton's key for a launch is one and the same. Cases: K4. Rules: R21."""
    (key,) = compiled["keys"][kernel]
    types = {kind for kind, specialised in key if kind != "constexpr"}
    assert types == {"i64", "i32"}
    assert not [specialised for kind, specialised in key if kind != "constexpr" and specialised is not None]


@pytest.mark.parametrize("kernel", KERNELS)
def test_launches_compile_nothing(compiled: dict[str, Any], kernel: str) -> None:
    """Each kernel is compiled and loaded once, before its first launch. Cases: K4. Rules: R21."""
    assert compiled["cached"][kernel] == {"before": 1, "after": 1}


def test_a_launch_names_its_stream_and_hands_over_exact_numbers(compiled: dict[str, Any]) -> None:
    """Rules: R21, R22."""
    assert compiled["loaded"] == ["scatter_writes", "null_stale_columns", "gather_block_tables", "map_slots"]
    high = 2**46 + 8
    assert compiled["launches"] == [
        ["map_slots", [3, 2, 1], 77, [0, high, 16, 3, 700, 4, 24, 1, 2, 32, 40, 2**33, 600, "int64", 256]],
    ]


def main() -> None:
    """Compile everything and print what the tests look at, as JSON."""
    import triton
    from triton.backends.compiler import GPUTarget

    found: dict[str, Any] = {"binaries": _binaries(triton, GPUTarget), "keys": _keys()}
    driver = _FakeDriver(GPUTarget("cuda", 90, 32))
    triton.runtime.driver.set_active(driver)
    found.update(_launches(driver))
    json.dump(found, sys.stdout)


def _binaries(triton: Any, make_target: Any) -> dict[str, tuple[str, int]]:
    import triton.language as tl

    from blocktable_triton import kernels

    found = {}
    for name in KERNELS:
        function = getattr(kernels, name)
        signature = {parameter.name: parameter.annotation for parameter in function.params}
        for slot_type in SLOT_TYPES if name == "map_slots" else ("",):
            constants = {"TILE": 256, **({"SLOT_T": getattr(tl, slot_type)} if slot_type else {})}
            for target, (place, stage, _) in TARGETS.items():
                source = triton.compiler.ASTSource(function, signature, constexprs=constants)
                options = {"num_warps": 4, "enable_fp_fusion": False}
                binary = triton.compile(source, target=make_target(*place), options=options)
                found[f"{name} {target} {slot_type}"] = (binary.asm[stage], len(binary.kernel))
    return found


def _keys() -> dict[str, list[Any]]:
    """Return every key that Triton makes of launches with all kinds of values."""
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import create_function_from_signature

    from blocktable_triton import kernels

    found = {}
    for name in KERNELS:
        function = getattr(kernels, name)
        bind = create_function_from_signature(function.signature, function.params, BaseBackend)
        keys = []
        for turn in range(len(VALUES)):
            arguments = {
                parameter.name: 8
                if parameter.is_constexpr
                else (ADDRESSES if parameter.annotation == "i64" else VALUES)[turn]
                for parameter in function.params
            }
            key = bind(**arguments)[1]
            if key not in keys:
                keys.append(key)
        found[name] = keys
    return found


def _launches(driver: _FakeDriver) -> dict[str, Any]:
    """Make every kernel as on a GPU, launch one of them, and look into Triton's caches."""
    import triton.language as tl

    from blocktable_triton import kernels
    from blocktable_triton.device import CompiledKernel

    functions = {name: getattr(kernels, name) for name in KERNELS}
    made = {
        name: CompiledKernel(function, (tl.int64, 256) if name == "map_slots" else (256,), 4)
        for name, function in functions.items()
    }
    before = {name: len(function.device_caches[0][0]) for name, function in functions.items()}
    stream = SimpleNamespace(cuda_stream=77)
    high = 2**46 + 8
    kernels.launch_map_slots(made["map_slots"], 256, 0, high, 16, 3, 700, 4, 24, 1, 2, 32, 40, 2**33, 600, stream)
    return {
        "loaded": driver.loaded,
        "launches": driver.launches,
        "cached": {
            name: {"before": before[name], "after": len(function.device_caches[0][0])}
            for name, function in functions.items()
        },
    }


class _FakeDriver:
    """What Triton asks a GPU's driver for, without one: it notes what is loaded and launched."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.loaded: list[str] = []
        self.launches: list[list[Any]] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 2**16},
            load_binary=self._load_binary,
            unload_module=lambda module: None,
        )

    def _load_binary(self, name: str, *_: Any) -> tuple[int, str, int, int, int]:
        self.loaded.append(name)
        return 1, name, 32, 0, 1024

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 5  # asked for while compiling; a launch names its own

    def get_current_target(self) -> Any:
        return self.target

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
            arguments = [getattr(value, "name", value) for value in rest[4:]]
            self.launches.append([function, [x, y, z], stream, arguments])

        return launch


if __name__ == "__main__":
    main()
