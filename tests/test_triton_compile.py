"""The Triton kernels compiled for real GPUs on a machine without one, and what a launch hands over.

All in one process of its own: TRITON_INTERPRET, which the other Triton tests want, leaves nothing to compile.
"""

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

from blocktable.device import FEATURES, SIGNATURES, KernelOptions

pytestmark = pytest.mark.torch

KERNELS = tuple(name for name in SIGNATURES if name != "apply_changes_by_value")
ALL = frozenset(FEATURES) - {"OVERLAPS", "CHECKED"}
VARIANTS = {
    **{name: (name, ALL) for name in (*KERNELS, "map_slots_long", "step_batch_long")},
    "apply_changes": ("apply_changes", frozenset()),
    **{
        f"{name} plain": (name, frozenset())
        for name in ("gather_block_tables", "map_slots", "map_slots_long", "step_batch", "step_batch_long")
    },
    **{f"{name} overlapping": (name, frozenset({"OVERLAPS"})) for name in ("apply_changes", "step_batch")},
    **{f"{name} checking": (name, ALL | {"CHECKED"}) for name in ("apply_changes", "map_slots", "step_batch")},
}
"""Variant -> the kernel as the driver is asked for it, and its features."""
TYPED = tuple(name for name in KERNELS if "slot*" in SIGNATURES[name].declaration)
"""Kernels that are made for the dtype of what they write."""
TARGETS = {
    "sm_80": (("cuda", 80, 32), "ptx", ".target sm_80"),
    "sm_90": (("cuda", 90, 32), "ptx", ".target sm_90"),
    "sm_100": (("cuda", 100, 32), "ptx", ".target sm_100"),
    "gfx942": (("hip", "gfx942", 64), "amdgcn", "gfx942"),
}
OVERLAPPING = ("sm_90", "sm_100")
CHECKING = ("sm_90", "gfx942")
OUTPUT_TYPES = ("int64", "int32")


def targets_of(variant: str) -> tuple[str, ...]:
    """Return what a variant can be compiled for."""
    if variant.endswith("checking"):
        return CHECKING
    return OVERLAPPING if variant.endswith("overlapping") else tuple(TARGETS)


ARGUMENTS = [0, 2**46 + 8, 16, 3, 700, 4, 24, 1, 2, 32, 40, 2**33, 600, 2**31, 48, 56]
"""Of map_slots."""

# Each would be a kernel of its own if a launch were specialised: 0, 1, multiples of 16, odd ones, beyond 32 bits.
VALUES = (0, 1, 2, 16, 17, 33, 2**31 - 1)
ADDRESSES = (0, 1, 4, 16, 2**33 + 4, 2**47 + 8, 2**47 + 16)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, Path(__file__)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("variant", "target"), [(variant, target) for variant in VARIANTS for target in targets_of(variant)]
)
def test_kernels_compile_ahead_of_time(compiled: dict[str, Any], variant: str, target: str) -> None:
    name = variant.partition(" ")[0]
    name = name.removesuffix("_long")
    for output_type in OUTPUT_TYPES if name in TYPED else ("",):
        text, size = compiled["binaries"][f"{variant} {target} {output_type}"]
        assert TARGETS[target][2] in text
        assert name in text
        assert size > 1000


@pytest.mark.parametrize("target", OVERLAPPING)
def test_an_overlapping_step_waits_before_it_reads_what_the_changes_write(
    compiled: dict[str, Any], target: str
) -> None:
    """Rules: R9.1."""
    apply, _ = compiled["binaries"][f"apply_changes overlapping {target} "]
    assert apply.index("griddepcontrol.launch_dependents") < apply.index("ld.global")
    step, _ = compiled["binaries"][f"step_batch overlapping {target} int64"]
    assert step.count("griddepcontrol.wait") == 3  # one each for the gather, the slots and the mark
    before, *behind = step.split("griddepcontrol.wait")
    assert "st.global" not in before
    for part in behind:
        assert "ld.global" in part
    plain, _ = compiled["binaries"][f"step_batch plain {target} int64"]
    assert "griddepcontrol" not in plain


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.endswith("plain")])
def test_nothing_is_divided_in_64_bits_where_no_group_needs_it(
    compiled: dict[str, Any], variant: str, target: str
) -> None:
    text, _ = compiled["binaries"][f"{variant} {target} {'' if variant.startswith('gather') else 'int64'}"]
    assert not re.search(r"(div|rem)\.[su]64", text)


@pytest.mark.parametrize("kernel", ["apply_changes", "step_batch"])
def test_a_node_of_a_graph_is_given_the_arguments_that_its_kernel_takes(compiled: dict[str, Any], kernel: str) -> None:
    """The fused step launches Triton's kernels itself: ours, then pointers to Triton's scratch memory. Rules: R21."""
    text, _ = compiled["binaries"][f"{kernel} sm_90 {'int64' if kernel in TYPED else ''}"]
    sizes = [int(bits) // 8 for bits in re.findall(r"\.param \.\w(\d+)", text)]
    layout = [struct.calcsize(kind) for kind in SIGNATURES[kernel].layout]
    node = compiled["nodes"][kernel]
    assert (node["problem"], node["extra"]) == (None, 2)
    assert sizes == [*layout, 8, 8]
    assert node["function"] == KERNELS.index(kernel) + 1
    assert (node["threads"], node["shared"]) == (128, node["metadata_shared"])


def test_a_kernel_that_takes_other_arguments_is_no_node_of_a_graph(compiled: dict[str, Any]) -> None:
    """Rules: R21."""
    assert [bool(problem) for problem in compiled["problems"]] == [True, True, True, False]


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
    """What does not fit its type raises; triton 3.9 would cut it off. Cases: K5. Rules: R21, R22."""
    assert compiled["loaded"] == list(KERNELS)
    assert compiled["launches"] == [["map_slots", [5, 2, 1], 77, [*ARGUMENTS, "int64", 63, False, 128]]]
    assert compiled["refused"] == [True, True]


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
    found = {}
    for variant, (name, features) in VARIANTS.items():
        for output_type in OUTPUT_TYPES if name.removesuffix("_long") in TYPED else ("",):
            build = _build(name, KernelOptions(output_type or "int64", features))
            parameters = build.function.params
            signature = {parameter.name: parameter.annotation for parameter in parameters}
            constexprs = zip([p.name for p in parameters if p.is_constexpr], build.constants, strict=True)
            source = triton.compiler.ASTSource(build.function, signature, constexprs=dict(constexprs))
            options = {"num_warps": build.num_warps, "enable_fp_fusion": False}
            for target in targets_of(variant):
                place, stage, _ = TARGETS[target]
                binary = triton.compile(source, target=make_target(*place), options=options)
                found[f"{variant} {target} {output_type}"] = (binary.asm[stage], len(binary.kernel))
    return found


def _build(name: str, options: KernelOptions) -> Any:
    from blocktable_triton.driver import Build, TorchDriver

    return Build(name, options, TorchDriver.sizes)


def _keys() -> dict[str, list[Any]]:
    """Return every key that Triton makes of launches with all kinds of values."""
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import create_function_from_signature

    found = {}
    for name in KERNELS:
        function = _build(name, KernelOptions()).function
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
    from blocktable_triton.driver import CompiledKernel

    builds = {name: _build(name, KernelOptions(features=ALL)) for name in KERNELS}
    made = {name: CompiledKernel(name, build) for name, build in builds.items()}
    before = {name: len(build.function.device_caches[0][0]) for name, build in builds.items()}
    made["map_slots"]((5, 2), ARGUMENTS, 77)
    return {
        "nodes": {name: _node(name, made[name]) for name in ("apply_changes", "step_batch")},
        "problems": [_problem("map_slots", made["map_slots"], extra) for extra in ([8, 8, 8], [4], None, [])],
        "refused": [_is_refused(made["map_slots"], place) for place in (3, 13)],
        "loaded": driver.loaded,
        "launches": driver.launches,
        "cached": {
            name: {"before": before[name], "after": len(build.function.device_caches[0][0])}
            for name, build in builds.items()
        },
    }


def _is_refused(kernel: Any, place: int) -> bool:
    """Say whether a launch with an argument beyond its type raises."""
    try:
        kernel((5, 2), [*ARGUMENTS[:place], 2**65, *ARGUMENTS[place + 1 :]], 77)
    except struct.error:
        return True
    return False


def _node(name: str, kernel: Any) -> dict[str, Any]:
    """Return what the fused step asks of a kernel, where the driver says the arguments that Triton gives it today."""
    _say_parameters([*map(struct.calcsize, SIGNATURES[name].layout), 8, 8])
    return {
        "problem": kernel.graph_problem(),
        "extra": kernel.num_extra,
        "function": kernel.function,
        "threads": kernel.num_threads,
        "shared": kernel.shared_bytes,
        "metadata_shared": kernel._compiled.metadata.shared,
    }


def _problem(name: str, kernel: Any, extra: list[int] | None) -> str | None:
    own = [*map(struct.calcsize, SIGNATURES[name].layout)]
    _say_parameters([] if extra is None else [*own, *extra])
    found: str | None = kernel.graph_problem()
    return found


def _say_parameters(sizes: list[int]) -> None:
    from cuda.bindings import driver

    def info(function: Any, index: int) -> tuple[int, int, int]:
        return (0, 0, sizes[index]) if index < len(sizes) else (1, 0, 0)

    driver.cuFuncGetParamInfo = info


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

    def _load_binary(self, name: str, *_: Any) -> tuple[int, int, int, int, int]:
        self.loaded.append(name)
        return 1, len(self.loaded), 32, 0, 1024

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 5  # asked for while compiling; a launch names its own

    def get_current_target(self) -> Any:
        return self.target

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            arguments = [getattr(value, "name", value) for value in rest[4:]]
            self.launches.append([self.loaded[function - 1], [x, y, z], stream, arguments])

        return launch


if __name__ == "__main__":
    main()
