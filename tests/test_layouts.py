"""Layouts as data, the width that satisfies several of them, and the page of layouts. Rules: R25.2, R25.3, R26, R32."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

import blocktable as bt
from blocktable.layouts import KINDS
from blocktable.typing import LayoutName

ROOT = Path(__file__).parents[1]
VLLM = bt.LAYOUTS["vllm_table"]


def load_generator() -> Any:
    """Return docs/generate_layouts.py as a module: docs/ is no package."""
    spec = importlib.util.spec_from_file_location("generate_layouts", ROOT / "docs/generate_layouts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generator = load_generator()


def config(block_size: int, kernel_block_size: int, max_model_len: int, **options: Any) -> bt.BlockTableConfig:
    fields = {"width_alignment": options.pop("width_alignment", 1), "lookahead_tokens": options.pop("lookahead", 0)}
    share = options.pop("context_parallel", bt.ContextParallel())
    group = bt.KVCacheGroup(block_size=block_size, kernel_block_size=kernel_block_size, **options)
    return bt.BlockTableConfig(
        groups=[group],
        max_num_reqs=2,
        max_num_batched_tokens=8,
        max_model_len=max_model_len,
        context_parallel=share,
        **fields,
    )


# Descriptors.


def test_every_kind_has_a_layout() -> None:
    assert {layout.kind for layout in bt.LAYOUTS.values()} == set(KINDS)


def test_the_hint_of_names_has_all_of_them() -> None:
    assert get_args(LayoutName) == tuple(bt.LAYOUTS)


@pytest.mark.parametrize("layout", bt.LAYOUTS.values(), ids=lambda layout: layout.name)
def test_a_layout_says_who_reads_it_and_where_that_was_read(layout: bt.Layout) -> None:
    assert layout.consumer
    assert layout.source
    assert any(layout.takes_block_size(size) for size in (16, 32, 64, 128, 256))


# The consumers' sources, once more. name -> kind, dtype, shape, null, contiguity, which page sizes of ANY are taken,
# and what M must be a multiple of, for pages of the largest one taken up to 64 tokens (128 where there is none).
ANY = {1, 16, 24, 32, 64, 128, 256}
FACTS: dict[str, tuple[str, str, str, int | None, str, set[int], int]] = {
    "flash_attention_2": ("table", "int32", "B M", None, "rows", {256}, 1),
    "flash_attention_2_vllm": ("table", "int32", "B M", None, "rows", {16, 32, 64, 128, 256}, 1),
    "flash_attention_3": ("table", "int32", "B M", None, "rows", ANY, 1),
    "flash_attention_4": ("table", "int32", "B M", None, "rows", ANY, 1),
    "flashinfer": ("csr", "int32", "n", None, "strict", ANY, 1),
    "trtllm_gen": ("table", "int32", "B M", None, "strict", {16, 32, 64}, 1),
    "trtllm_gen_mla": ("table", "int32", "B M", None, "strict", {32, 64}, 2),
    "flash_mla": ("table", "int32", "B M", None, "rows", {64}, 1),
    "cutlass_mla": ("table", "int32", "B M", None, "strict", {128}, 1),
    "cudnn": ("table", "int32", "B 1 M 1", None, "strict", ANY - {24}, 1),
    "triton_unified": ("table", "int32", "B M", None, "rows", {16, 32, 64, 128, 256}, 1),
    "varlen_attn": ("table", "int32", "B M", None, "rows", ANY, 1),
    "flex_attention": ("inverse_map", "int32", "B N", -1, "rows", {16, 32, 64, 128, 256}, 1),
    "tensorrt_llm": ("kv_offsets", "int32", "B 2 M", None, "strict", ANY - {24}, 1),
    "aiter_mla": ("token_csr", "int32", "n", None, "strict", ANY, 1),
    "vllm_table": ("table", "int32", "B M", None, "rows", ANY, 2),
    "state": ("state", "int32", "B", -1, "rows", ANY, 1),
    "speculative_state": ("state", "int32", "B S", -1, "rows", ANY, 1),
    "aligned_state": ("state", "int32", "B S", -1, "rows", ANY, 1),
    "encoder_only": ("placeholder", "int32", "B 1", None, "rows", ANY, 1),
}


@pytest.mark.parametrize("name", FACTS)
def test_a_layout_holds_the_facts_of_its_consumer(name: str) -> None:
    kind, dtype, shape, null, contiguity, sizes, step = FACTS[name]
    layout = bt.LAYOUTS[name]
    assert (layout.kind, layout.dtype, " ".join(layout.shape), layout.null) == (kind, dtype, shape, null)
    assert layout.contiguity == contiguity
    assert {size for size in ANY if layout.takes_block_size(size)} == sizes
    assert layout.width_step(max((size for size in sizes if size <= 64), default=128)) == step
    assert not layout.exact_width
    assert bt.LAYOUTS["flash_attention_4_hd256"].exact_width


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "tables"},
        {"dtype": "int16"},
        {"null": 7},
        {"kind": "csr", "null": -1},
        {"kind": "csr", "dtype": "int64"},
        {"kind": "inverse_map"},
        {"kind": "lengths", "entry_scale": 2},
        {"value_offset": 1},
        {"kind": "kv_offsets", "value_offset": -1},
        {"state_columns": "last"},
        {"kind": "state", "state_columns": "middle"},
        {"kind": "state", "num_columns": 2},
        {"num_columns": 0},
        {"width_tokens": 0},
        {"block_multiple": True},
    ],
    ids=str,
)
def test_a_layout_that_means_nothing_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(bt.ConfigError, match="Layout 'mine'"):
        bt.Layout(**({"name": "mine", "consumer": "me", "kind": "table"} | fields))


# Widths.

GEOMETRIES = [
    (kernel * k, kernel, length)
    for kernel, k, length in product((1, 3, 8, 16, 24, 48, 64, 128, 144, 256), (1, 2, 3, 5), (1, 100, 1000, 9416))
]


def vllm_0_33_width(columns: int, kernel_block_size: int) -> int:
    """Columns to a multiple of 128 // gcd(128, block size): the fact, not the code."""
    step = 128 // math.gcd(128, kernel_block_size)
    return math.ceil(columns / step) * step


@pytest.mark.parametrize(("block_size", "kernel_block_size", "max_model_len"), GEOMETRIES)
def test_plan_width_is_the_rule_of_vllm_0_33(block_size: int, kernel_block_size: int, max_model_len: int) -> None:
    """And the config makes rows of that width when it is given the plan's alignment."""
    plain = config(block_size, kernel_block_size, max_model_len)
    columns = plain.capacity(0) * (block_size // kernel_block_size)
    plan = bt.plan_width(plain, [VLLM])
    assert plan.width == vllm_0_33_width(columns, kernel_block_size)
    assert replace(plain, width_alignment=plan.width_alignment).width(0) == plan.width
    assert ("vllm_table" in plan.rule) == (plan.width > columns)


@pytest.mark.parametrize(("block_size", "kernel_block_size", "max_model_len"), GEOMETRIES)
def test_vllm_0_25_1_agrees_wherever_it_keeps_its_own_rule(
    block_size: int, kernel_block_size: int, max_model_len: int
) -> None:
    """Its width is the plan's for every power of two, and never less than the plan's where it keeps 128 tokens."""
    plain = config(block_size, kernel_block_size, max_model_len)
    theirs = generator.vllm_0_25_1_width(plain.capacity(0), block_size, kernel_block_size)
    ours = bt.plan_width(plain, [VLLM]).width
    is_power = block_size & (block_size - 1) == 0
    if is_power:
        assert theirs == ours
    if theirs * kernel_block_size % 128 == 0:
        assert theirs >= ours


@pytest.mark.parametrize("block_size", [48, 80, 144])
def test_where_vllm_0_25_1_is_wrong(block_size: int) -> None:
    """Allocation blocks of 48, 80 and 144 tokens with kernel blocks of 16: 0.25.1 makes no multiple of 128 tokens."""
    wrong = []
    for num_blocks in range(1, 20):
        theirs = generator.vllm_0_25_1_width(num_blocks, block_size, 16)
        ours = bt.plan_width(config(block_size, 16, num_blocks * block_size), [VLLM]).width
        assert ours * 16 % 128 == 0
        wrong.append(theirs * 16 % 128 != 0)
    assert sum(wrong) >= 14


PROBE = """
import json, sys
import torch
from vllm.v1.worker.block_table import MultiGroupBlockTable

widths = []
for capacity, block_size, kernel_block_size, max_model_len in json.load(sys.stdin):
    if sys.argv[1] == "0.25.1":
        arguments = (2, max_model_len, 8, False, torch.device("cpu"), [block_size], [kernel_block_size])
    else:
        columns = capacity * (block_size // kernel_block_size)
        arguments = (2, 8, False, torch.device("cpu"), [kernel_block_size], [columns])
    widths.append(MultiGroupBlockTable(*arguments)[0].max_num_blocks_per_req)
print(json.dumps(widths))
"""


@pytest.mark.torch
@pytest.mark.parametrize("version", ["0.25.1", "0.33.0"])
def test_the_rules_are_those_of_the_engines_own_classes(version: str) -> None:
    """Where vLLM's files lie in .peers, its tables have the widths that this page and `plan_width` give."""
    folder = ROOT / f".peers/vllm-{version}"
    if not folder.is_dir():
        pytest.skip(f"no vLLM {version} in .peers: tox -e torch")
    cases, expected = [], []
    for block_size, kernel_block_size, max_model_len in GEOMETRIES:
        plain = config(block_size, kernel_block_size, max_model_len)
        capacity = plain.capacity(0)
        cases.append((capacity, block_size, kernel_block_size, max_model_len))
        theirs = generator.vllm_0_25_1_width(capacity, block_size, kernel_block_size)
        expected.append(theirs if version == "0.25.1" else bt.plan_width(plain, [VLLM]).width)
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROBE, version],
        input=json.dumps(cases),
        env=os.environ | {"PYTHONPATH": str(folder), "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_the_capacity_binds_where_nothing_rounds() -> None:
    plan = bt.plan_width(config(48, 16, 96), ["flash_attention_3", "flashinfer", "flex_attention"])
    assert (plan.width, plan.width_alignment) == (6, 1)
    assert "R3" in plan.rule


def test_several_rules_give_their_common_multiple() -> None:
    """Both are named; one that another implies is not."""
    odd = bt.Layout(name="odd", consumer="me", kind="table", width_tokens=96)
    half = bt.Layout(name="half", consumer="me", kind="table", width_tokens=64)
    plan = bt.plan_width(config(16, 16, 30 * 16), [half, VLLM, odd])
    assert (plan.width, plan.width_alignment) == (48, 384)
    assert ("vllm_table" in plan.rule, "odd" in plan.rule, "half" in plan.rule) == (True, True, False)
    # 18 columns keep the rule of 96 tokens by themselves, 8 that of 128: what was rounded for one is asked again.
    assert bt.plan_width(config(16, 16, 18 * 16), [odd, VLLM]).width == 24
    assert bt.plan_width(config(16, 16, 8 * 16), [odd, VLLM]).width == 24


def test_a_sharded_group_and_lookahead_are_counted() -> None:
    share = bt.ContextParallel(world_size=4, rank=1, interleave_size=16)
    plan = bt.plan_width(config(16, 16, 1000, context_parallel=share, lookahead=25), ["trtllm_gen", VLLM])
    assert plan.width == math.ceil(math.ceil(1025 / 64) / 8) * 8
    exact = bt.plan_width(config(64, 64, 1024, context_parallel=share), ["flash_attention_4_hd256"])
    assert exact.width == 4
    assert "flash_attention_4_hd256" in exact.rule


@pytest.mark.parametrize(
    ("geometry", "layouts", "named"),
    [
        (
            (256, 64, 1024),
            ["flash_mla", "flash_attention_2"],
            ["flash_mla: 64", "flash_attention_2: a multiple of 256"],
        ),
        ((48, 16, 1024), ["flash_attention_3", "flash_mla"], ["(R1)", "flash_mla: 64"]),
        ((256, 32, 1024), ["flash_mla"], ["flash_mla takes: 64", "choose 64"]),
        ((64, 64, 700), ["flash_attention_4_hd256", "trtllm_gen_mla"], ["flash_attention_4_hd256", "trtllm_gen_mla"]),
        ((64, 16, 600), ["flash_attention_4_hd256"], ["(R3)", "flash_attention_4_hd256"]),
    ],
)
def test_what_is_impossible_names_the_two_rules(
    geometry: tuple[int, int, int], layouts: list[LayoutName], named: list[str]
) -> None:
    with pytest.raises(bt.ConfigError) as raised:
        bt.plan_width(config(*geometry), layouts)
    assert not [part for part in named if part not in str(raised.value)], str(raised.value)


def test_fixed_capacities_clash_with_rounding_and_with_states() -> None:
    fixed = config(16, 16, 100, blocks_per_row=3)
    with pytest.raises(bt.ConfigError, match=r"R3.*vllm_table"):
        bt.plan_width(fixed, [VLLM])
    assert bt.plan_width(config(16, 16, 100, blocks_per_row=8), [VLLM]).width == 8
    with pytest.raises(bt.ConfigError, match=r"R3.*flash_attention_4_hd256.*which are 7"):
        bt.plan_width(fixed, ["flash_attention_4_hd256"])
    states = replace(bt.LAYOUTS["aligned_state"], num_columns=4)
    with pytest.raises(bt.ConfigError, match=r"R3.*aligned_state: 4 columns"):
        bt.plan_width(fixed, [states])
    with pytest.raises(bt.ConfigError, match="no layout 'nobody'"):
        bt.plan_width(fixed, ["nobody"])  # type: ignore[list-item]
    with pytest.raises(bt.ConfigError, match="group 1 does not exist"):
        bt.plan_width(fixed, [VLLM], 1)


def test_no_size_for_all_of_several_layouts_that_agree_in_pairs() -> None:
    def reader(name: str, *sizes: int) -> bt.Layout:
        return bt.Layout(name=name, consumer="me", kind="table", block_sizes=sizes)

    with pytest.raises(bt.ConfigError, match=r"all of these rules together: a: 16 or 32; b: 32 or 64; c: 16 or 64"):
        bt.plan_width(config(64, 16, 100), [reader("a", 16, 32), reader("b", 32, 64), reader("c", 16, 64)])


# The page.


def test_the_page_names_every_layout_and_every_kind() -> None:
    page = generator.page()
    assert not [name for name in bt.LAYOUTS if f"\n| `{name}` |" not in page]
    assert not [kind for kind in KINDS if f"\n| {kind} |" not in page]


def test_the_page_shows_the_wrong_widths() -> None:
    lines = [line for line in generator.vllm_widths().splitlines() if "no multiple" in line]
    assert {line.split("|")[1].strip() for line in lines} == {"48", "80", "144"}


def test_the_example_on_the_page_prints_what_it_says() -> None:
    source = generator.page().partition("```python\n")[2].partition("```")[0]
    promised = [line.partition("  # ")[2] for line in source.splitlines() if line.startswith("print(")]
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == promised
