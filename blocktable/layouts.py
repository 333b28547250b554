"""What attention kernels demand of a block table, as data, and the width that satisfies all who read one (R25.2, R32).

A `Layout` describes the array that one consumer reads; `LAYOUTS` holds those of the kernels people use. Versions move:
compare with the one that you run. docs/layouts.md is written from here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from types import MappingProxyType
from typing import Any, Literal, get_args

from blocktable.config import BlockTableConfig, KVCacheGroup
from blocktable.errors import ConfigError

Kind = Literal[
    "table",
    "kv_offsets",
    "csr",
    "token_csr",
    "lengths",
    "inverse_map",
    "state",
    "placeholder",
    "ring",
    "token_requests",
    "block_requests",
]
StateColumns = Literal["first", "last", "aligned"]

LayoutName = Literal[
    "flash_attention_2",
    "flash_attention_2_vllm",
    "flash_attention_3",
    "flash_attention_4",
    "flash_attention_4_hd256",
    "flashinfer",
    "trtllm_gen",
    "trtllm_gen_mla",
    "trtllm_gen_kv",
    "flash_mla",
    "flashinfer_mla",
    "cutlass_mla",
    "cudnn",
    "triton_unified",
    "varlen_attn",
    "flex_attention",
    "torch_paged_attention",
    "tensorrt_llm",
    "aiter_mla",
    "cpu_attention",
    "tpu_ragged",
    "vllm_table",
    "state",
    "speculative_state",
    "aligned_state",
    "encoder_only",
    "local_lengths",
    "csr",
    "token_csr",
    "ring",
    "token_requests",
    "block_requests",
]
"""Names in `LAYOUTS`. Where a name is known only when the engine runs, pass `LAYOUTS[name]`."""

KINDS: dict[Kind, tuple[str, str]] = {
    "table": ("B M", "a row of block ids for each request"),
    "kv_offsets": ("B 2 M", "two such rows, one for K and one for V"),
    "csr": ("n", "all requests' blocks in one row, and where each request's begin"),
    "token_csr": ("n", "all requests' slots in one row, and where each request's begin"),
    "lengths": ("B", "how many tokens of each request this rank holds"),
    "inverse_map": ("B N", "for each request, the column of every block of the cache"),
    "state": ("B S", "the blocks that hold each request's states"),
    "placeholder": ("B 1", "zeros, for layers that read no cache"),
    "ring": ("B M", "a ring as attention reads it: its columns repeated over true positions"),
    "token_requests": ("T", "the request of each token, and where each request's tokens begin"),
    "block_requests": ("n", "the request of each block of a CSR"),
}
"""Kind of a layout -> the shape of its entries where it says no other, and what it holds."""

ALWAYS_MINUS_1: tuple[Kind, ...] = ("inverse_map", "token_requests", "block_requests")
"""Kinds whose `null` is -1: 0 is one of their entries."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The array that one consumer reads in place of a block table.

    Args:
        name: such as "flashinfer".
        consumer: who reads it.
        kind: what it holds; one of `KINDS`.
        source: where its rules were read.
        dtype: of the entries.
        shape: of a group's entries; empty: as `KINDS` says. B batch rows, M columns, N kernel blocks of the cache, S
            state columns, n entries, T tokens.
        null: entry of a place that holds no block. -1: the consumer tests for it. None: it reads entries past the
            length, and needs a valid address there: the group's filler, or kernel block 0 where that is -1.
        block_multiple: `kernel_block_size` must be a multiple of it.
        block_sizes: the values that `kernel_block_size` may have; empty: any.
        power_of_two: whether `kernel_block_size` must be a power of two.
        width_tokens: tokens; `M * kernel_block_size` must be a multiple of it.
        exact_width: whether M must be just the columns of `max_model_len + lookahead_tokens`.
        contiguity: "strict": contiguous with canonical strides; "rows": entries of a row lie side by side.
        entry_scale: what block ids are multiplied by.
        value_offset: "kv_offsets": what must be added to a K entry to make the V entry.
        state_columns: "state": the first column, the last `num_columns` filled ones, or `num_columns` from the one that
            holds the sequence's last token.
        num_columns: "state": columns for each request (1 + the speculative tokens).
        note: what else the consumer needs.

    Raises:
        ConfigError: a value is impossible.
    """

    name: str
    consumer: str
    kind: Kind
    source: str = ""
    dtype: Literal["int32", "int64"] = "int32"
    shape: tuple[str, ...] = ()
    null: int | None = None
    block_multiple: int = 1
    block_sizes: tuple[int, ...] = ()
    power_of_two: bool = False
    width_tokens: int = 1
    exact_width: bool = False
    contiguity: Literal["rows", "strict"] = "rows"
    entry_scale: int = 1
    value_offset: int = 0
    state_columns: StateColumns = "first"
    num_columns: int = 1
    note: str = ""

    def __post_init__(self) -> None:
        for name, allowed in (("kind", get_args(Kind)), ("dtype", ("int32", "int64")), ("null", (None, -1))):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"Layout {self.name!r}: {name} must be one of {allowed}, got {getattr(self, name)!r}."
                )
        if self.state_columns not in get_args(StateColumns):
            raise ConfigError(f"Layout {self.name!r}: state_columns must be one of {get_args(StateColumns)}.")
        for name in ("block_multiple", "width_tokens", "entry_scale", "num_columns"):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"Layout {self.name!r}: {name} must be an int of at least 1, got {value!r}.")
        if self.value_offset < 0:
            raise ConfigError(f"Layout {self.name!r}: value_offset must be at least 0, got {self.value_offset}.")
        self._check_kind()
        if not self.shape:
            object.__setattr__(self, "shape", tuple(KINDS[self.kind][0].split()))

    def _check_kind(self) -> None:
        """Refuse fields that the kind does not know: they would be ignored."""
        kind = self.kind
        wrong = {
            "dtype": self.dtype != "int32" and kind not in ("table", "state", "ring"),
            "null": (self.null is not None and kind not in ("table", "state", "ring", *ALWAYS_MINUS_1))
            or (kind in ALWAYS_MINUS_1 and self.null != -1),
            "entry_scale": self.entry_scale != 1 and kind not in ("table", "kv_offsets"),
            "value_offset": self.value_offset != 0 and kind != "kv_offsets",
            "state_columns": self.state_columns != "first" and kind != "state",
            "num_columns": self.num_columns != 1 and (kind != "state" or self.state_columns == "first"),
        }
        for name, is_wrong in wrong.items():
            if is_wrong:
                reason, value = ".", getattr(self, name)
                if name == "dtype":
                    what = "a CSR is int32" if kind in ("csr", "token_csr") else f"kind {kind!r} is int32"
                    reason = f": {what}, and its consumers read no other; leave dtype out."
                raise ConfigError(f"Layout {self.name!r}: {name} {value} means nothing to kind {kind!r}{reason}")

    def takes_block_size(self, size: int) -> bool:
        """Say whether the consumer reads kernel blocks of `size` tokens."""
        is_power = size & (size - 1) == 0
        is_listed = not self.block_sizes or size in self.block_sizes
        return size % self.block_multiple == 0 and is_listed and (is_power or not self.power_of_two)

    def width_step(self, kernel_block_size: int) -> int:
        """Return what M must be a multiple of."""
        return self.width_tokens // math.gcd(self.width_tokens, kernel_block_size)

    @property
    def block_rule(self) -> str:
        """Which kernel block sizes the consumer takes, in words."""
        parts = []
        if self.block_multiple > 1:
            parts.append(f"a multiple of {self.block_multiple}")
        if self.block_sizes:
            parts.append(" or ".join(map(str, self.block_sizes)))
        if self.power_of_two:
            parts.append("a power of two")
        return ", ".join(parts) or "any"

    @property
    def width_rule(self) -> str:
        """What the consumer asks of the width, in words."""
        parts = []
        if self.exact_width:
            parts.append("just the columns of max_model_len + lookahead_tokens")
        if self.width_tokens > 1:
            parts.append(f"M * kernel_block_size a multiple of {self.width_tokens} tokens")
        return ", ".join(parts) or "any"


# The kernels people use. `source` says where the facts stand; STRICT: vLLM asserts canonical strides before the call.

FLASH_ATTENTION_2 = Layout(
    name="flash_attention_2",
    consumer="FlashAttention 2, flash_attn_varlen_func and flash_attn_with_kvcache",
    kind="table",
    block_multiple=256,
    source="Dao-AILab/flash-attention: csrc/flash_attn/flash_api.cpp",
    note="M * page size must reach the longest sequence, which is checked on the host",
)
FLASH_ATTENTION_2_VLLM = Layout(
    name="flash_attention_2_vllm",
    consumer="FlashAttention 2 as vLLM builds it",
    kind="table",
    block_multiple=16,
    source="vllm-project/flash-attention: csrc/flash_attn/flash_api.cpp",
    note="M * page size must reach the longest sequence, which is checked on the host",
)
FLASH_ATTENTION_3 = Layout(
    name="flash_attention_3",
    consumer="FlashAttention 3",
    kind="table",
    source="Dao-AILab/flash-attention: hopper/flash_api.cpp",
    note="block 0 must be readable; loads by TMA where the page size is a multiple of its tile",
)
FLASH_ATTENTION_4 = Layout(
    name="flash_attention_4",
    consumer="FlashAttention 4 (CuTe)",
    kind="table",
    source="Dao-AILab/flash-attention: flash_attn/cute/interface.py",
    note="SM90 and SM100; no cu_seqlens_k beside it; loads by TMA at page size 128",
)
FLASH_ATTENTION_4_HD256 = Layout(
    name="flash_attention_4_hd256",
    consumer="FlashAttention 4 (CuTe), head dimension 256",
    kind="table",
    exact_width=True,
    source="Dao-AILab/flash-attention: flash_attn/cute/interface.py",
    note="M must be the call's max_seqlen_k / page size; a slice of that many columns serves too",
)
FLASHINFER = Layout(
    name="flashinfer",
    consumer="FlashInfer, BatchDecode/BatchPrefill/BatchMLA wrappers with a paged cache (FA2 and FA3)",
    kind="csr",
    contiguity="strict",
    source="flashinfer-ai/flashinfer: flashinfer/decode.py, flashinfer/prefill.py",
    note="plan() needs indptr on the host too; under CUDA graphs the indices' buffer stays the same",
)
TRTLLM_GEN = Layout(
    name="trtllm_gen",
    consumer="trtllm-gen attention, through FlashInfer",
    kind="table",
    block_sizes=(16, 32, 64),
    contiguity="strict",
    source="flashinfer-ai/flashinfer: flashinfer/decode.py; vLLM: v1/attention/backends/flashinfer.py",
    note="counters and workspace zeroed; 128 and more on some GPUs",
)
TRTLLM_GEN_MLA = Layout(
    name="trtllm_gen_mla",
    consumer="trtllm-gen MLA decode, through FlashInfer",
    kind="table",
    block_sizes=(32, 64),
    width_tokens=128,
    contiguity="strict",
    source="flashinfer-ai/flashinfer: flashinfer/mla",
    note="counters and workspace zeroed",
)
TRTLLM_GEN_KV = Layout(
    name="trtllm_gen_kv",
    consumer="trtllm-gen attention with separate K and V entries, through FlashInfer",
    kind="kv_offsets",
    block_sizes=(16, 32, 64),
    contiguity="strict",
    source="flashinfer-ai/flashinfer: flashinfer/decode.py",
    note="set entry_scale and value_offset to the cache's: 2 and 1 where K and V blocks take turns",
)
FLASH_MLA = Layout(
    name="flash_mla",
    consumer="FlashMLA",
    kind="table",
    block_sizes=(64,),
    source="deepseek-ai/FlashMLA: flash_mla/flash_mla_interface.py",
)
FLASHINFER_MLA = Layout(
    name="flashinfer_mla",
    consumer="FlashInfer MLA decode in vLLM",
    kind="table",
    block_sizes=(32, 64),
    source="vLLM: v1/attention/backends/mla/flashinfer_mla.py",
)
CUTLASS_MLA = Layout(
    name="cutlass_mla",
    consumer="CUTLASS MLA decode in vLLM",
    kind="table",
    block_sizes=(128,),
    width_tokens=128,
    contiguity="strict",
    source="vLLM: v1/attention/backends/mla/cutlass_mla.py",
)
CUDNN = Layout(
    name="cudnn",
    consumer="cuDNN paged SDPA",
    kind="table",
    shape=("B", "1", "M", "1"),
    power_of_two=True,
    contiguity="strict",
    source="NVIDIA/cudnn-frontend: docs/operations/Attention.md",
)
TRITON_UNIFIED = Layout(
    name="triton_unified",
    consumer="vLLM's triton_unified_attention",
    kind="table",
    block_multiple=16,
    source="vLLM: v1/attention/ops/triton_unified_attention.py",
    note="the row's stride is passed; whole tiles of it are read after a sequence's last token; block 0 may hold NaN",
)
VARLEN_ATTN = Layout(
    name="varlen_attn",
    consumer="torch.nn.attention.varlen.varlen_attn, block_table with seqused_k (torch 2.12 and newer)",
    kind="table",
    source="pytorch/pytorch: torch/nn/attention/varlen.py",
    note="with the FlashAttention 3 implementation",
)
FLEX_ATTENTION = Layout(
    name="flex_attention",
    consumer="FlexAttention as vLLM uses it: the mask asks which column a block is",
    kind="inverse_map",
    null=-1,
    block_multiple=16,
    source="vLLM: v1/attention/backends/flex_attention.py",
    note="columns past the sequence's length are not in it; the whole cache must be finite, block 0 too",
)
TORCH_PAGED_ATTENTION = Layout(
    name="torch_paged_attention",
    consumer="torch.nn.attention.experimental's PagedAttention, page_table",
    kind="table",
    dtype="int64",
    null=-1,
    source="pytorch/pytorch: torch/nn/attention/experimental/_paged_attention.py",
)
TENSORRT_LLM = Layout(
    name="tensorrt_llm",
    consumer="TensorRT-LLM attention, kv_cache_block_offsets [pools, B, 2, M]",
    kind="kv_offsets",
    power_of_two=True,
    contiguity="strict",
    source="NVIDIA/TensorRT-LLM: cpp/include/tensorrt_llm/kernels/kvCacheIndex.h",
    note="groups are pools: export several together; the sign bit is the kernel's, so entries must fit 31 bits",
)
AITER_MLA = Layout(
    name="aiter_mla",
    consumer="AITER MLA decode (ROCm): page size 1, expanded",
    kind="token_csr",
    contiguity="strict",
    source="vLLM: v1/attention/backends/mla/rocm_aiter_mla.py",
)
CPU_ATTENTION = Layout(
    name="cpu_attention",
    consumer="vLLM's CPU attention",
    kind="table",
    block_multiple=32,
    source="vLLM: v1/attention/backends/cpu_attn.py",
)
TPU_RAGGED = Layout(
    name="tpu_ragged",
    consumer="TPU ragged paged attention",
    kind="table",
    shape=("B*M",),
    contiguity="strict",
    source="vllm-project/tpu-inference: tpu_inference/kernels/ragged_paged_attention",
    note="one flat array of all rows that the table has",
)
VLLM_TABLE = Layout(
    name="vllm_table",
    consumer="vLLM's model runner, whatever backend reads the table",
    kind="table",
    width_tokens=128,
    source="vLLM 0.33: v1/worker/block_table.py, get_block_table_width",
)
STATE = Layout(
    name="state",
    consumer="Mamba, GDN and other state layers: one state for each request",
    kind="state",
    shape=("B",),
    null=-1,
    source="vLLM: v1/attention/backends/mamba_attn.py",
    note="kernels skip index -1; set null to None for those that skip the null block instead",
)
SPECULATIVE_STATE = Layout(
    name="speculative_state",
    consumer="state layers with speculative decoding: a state for each token that may be accepted",
    kind="state",
    null=-1,
    state_columns="last",
    source="vLLM: v1/attention/backends/gdn_attn.py",
    note="set num_columns to 1 + the speculative tokens",
)
ALIGNED_STATE = Layout(
    name="aligned_state",
    consumer="state layers with prefix caching: the state at the sequence's last token, and the ones after it",
    kind="state",
    null=-1,
    state_columns="aligned",
    source="vLLM: v1/attention/backends/utils.py, mamba_get_block_table_tensor",
    note="set num_columns to 1 + the speculative tokens",
)
ENCODER_ONLY = Layout(
    name="encoder_only",
    consumer="encoder-only layers, which read no cache",
    kind="placeholder",
    source="vLLM: v1/worker/gpu_model_runner.py",
)
LOCAL_LENGTHS = Layout(
    name="local_lengths",
    consumer="decode context parallelism: sequence lengths of this rank",
    kind="lengths",
    source="vLLM: v1/attention/backends/utils.py, get_dcp_local_seq_lens",
)
# Plain names: what an attention kernel of your own reads, with no rule of anybody's.

CSR = Layout(
    name="csr",
    consumer="any kernel that walks the blocks of all requests by a CSR",
    kind="csr",
    contiguity="strict",
    source="this contract, R27",
)
TOKEN_CSR = Layout(
    name="token_csr",
    consumer="any kernel that walks the slots of all requests by a CSR",
    kind="token_csr",
    contiguity="strict",
    source="this contract, R28",
    note="its capacity counts tokens: create_export(capacity=...) of the largest batch",
)
RING = Layout(
    name="ring",
    consumer="attention over a ring group, by true positions",
    kind="ring",
    source="this contract, R35",
    note="what the ring has overwritten is not in it, nor what the window has passed by num_computed_tokens",
)
TOKEN_REQUESTS = Layout(
    name="token_requests",
    consumer="kernels that want the request of each token, such as FlashInfer's append_paged_kv_cache (batch_indices)",
    kind="token_requests",
    null=-1,
    contiguity="strict",
    source="this contract, R35",
    note="export takes query_start_loc and num_tokens_padded; indptr holds the padded starts",
)
BLOCK_REQUESTS = Layout(
    name="block_requests",
    consumer="kernels that walk blocks and want the request of each, beside a CSR of the same batch",
    kind="block_requests",
    null=-1,
    contiguity="strict",
    source="this contract, R35",
)

_ALL = [value for value in list(globals().values()) if isinstance(value, Layout)]
LAYOUTS: MappingProxyType[str, Layout] = MappingProxyType({layout.name: layout for layout in _ALL})
"""Name -> layout, in the order of the page."""


def find_layout(layout: LayoutName | Layout) -> Layout:
    """Return a layout by its name, or the one that was given.

    Raises:
        ConfigError: there is none of that name.
    """
    if isinstance(layout, Layout):
        return layout
    found = LAYOUTS.get(str(layout))
    if found is None:
        raise ConfigError(f"There is no layout {layout!r}; there are {', '.join(LAYOUTS)}, and any Layout of your own.")
    return found


@dataclass(frozen=True)
class WidthPlan:
    """The least width of a group's rows that satisfies all who read them.

    Attributes:
        width: columns.
        width_alignment: tokens; `BlockTableConfig` makes rows of that width when it is given this.
        rule: the rule that bound it, in words.
    """

    width: int
    width_alignment: int
    rule: str


def plan_width(config: BlockTableConfig, layouts: Sequence[LayoutName | Layout], group: int = 0) -> WidthPlan:
    """Return the least width of a group's rows that satisfies every layout, and which rule bound it.

    What `config.width_alignment` says is left aside: the plan tells what it has to be.

    Args:
        config: the geometry.
        layouts: what will read the group's table; names or layouts.
        group: the group.

    Raises:
        ConfigError: no width or no block size satisfies all; the message names the two rules that clash.

    Rules: R3, R32.
    """
    wanted = [find_layout(layout) for layout in layouts]
    capacity = config.capacity(group)  # refuses a group that does not exist
    spec = config.groups[group]
    check_block_size(spec, wanted)
    size, columns = spec.tokens_per_column, capacity * spec.blocks_per_kv_block
    held = f"the capacity of a row (R3): {columns} columns"
    for layout in wanted:
        if layout.kind == "state" and layout.num_columns > columns:
            raise _clash(held, f"{layout.name}: {layout.num_columns} columns for each request")
    readers = [layout for layout in wanted if layout.kind in ("table", "kv_offsets")]
    steps = {layout: layout.width_step(size) for layout in readers if columns % layout.width_step(size)}
    width = -(-columns // math.lcm(*steps.values())) * math.lcm(*steps.values())
    # A rule that the capacity meets by itself may fail once the others have rounded.
    for _ in readers:
        steps |= {layout: layout.width_step(size) for layout in readers if width % layout.width_step(size)}
        width = -(-columns // math.lcm(*steps.values())) * math.lcm(*steps.values())
    for layout in readers:
        if layout.exact_width:
            _check_exact(layout, exact_width(config, group), columns, held, steps)
    if steps and spec.has_fixed_capacity:
        raise _clash(
            f"a group with blocks_per_row or without slots is as wide as its capacity (R3): {columns} columns",
            _width_sentence(next(iter(steps)), size),
        )
    if steps:
        sizes = set(steps.values())
        largest = [layout for layout, step in steps.items() if not any(s % step == 0 and s > step for s in sizes)]
        rule = " and ".join(_width_sentence(layout, size) for layout in largest)
    else:
        exact = [layout for layout in readers if layout.exact_width]
        rule = f"{exact[0].name}: {exact[0].width_rule}" if exact else held
    return WidthPlan(width, math.lcm(*(layout.width_tokens for layout in steps)), rule)


def exact_width(config: BlockTableConfig, group: int) -> int:
    """Return how many columns hold `max_model_len + lookahead_tokens`, of this rank's share of them."""
    spec = config.groups[group]
    ranks = config.context_parallel.world_size if spec.is_sharded else 1
    return -(-(config.max_model_len + config.lookahead_tokens) // (spec.tokens_per_column * ranks))


def _check_exact(layout: Layout, exact: int, columns: int, held: str, steps: dict[Layout, int]) -> None:
    rule = f"{layout.name}: {layout.width_rule}, which are {exact}"
    if columns != exact:
        raise _clash(held, rule)
    for other, step in steps.items():
        raise _clash(rule, f"{other.name}: {other.width_rule}, a multiple of {step} columns")


def _width_sentence(layout: Layout, size: int) -> str:
    return f"{layout.name}: {layout.width_rule}, so M a multiple of {layout.width_step(size)}"


def _clash(one: str, other: str) -> ConfigError:
    return ConfigError(f"No width satisfies both of these rules: {one}; {other}.")


def check_block_size(group: KVCacheGroup, layouts: Sequence[Layout]) -> None:
    """Refuse a kernel block size that a layout does not take.

    Raises:
        ConfigError: naming the rules that clash, or the sizes that all take.
    """
    size = group.tokens_per_column
    refused = [layout for layout in layouts if not layout.takes_block_size(size)]
    if not refused:
        return
    choices = [choice for choice in range(1, group.block_size + 1) if group.block_size % choice == 0]
    good = [choice for choice in choices if all(layout.takes_block_size(choice) for layout in layouts)]
    given = f"kernel_block_size {size} of a group with block_size {group.block_size}"
    if good:
        raise ConfigError(
            f"{given} is not what {refused[0].name} takes: {refused[0].block_rule}; choose {good[-1]}, which all take."
        )
    pair = next(_block_size_clashes(choices, layouts), None)
    if pair is None:  # each two of them agree on a size, but not all
        rules = "; ".join(f"{layout.name}: {layout.block_rule}" for layout in layouts)
        raise ConfigError(f"No kernel block size satisfies all of these rules together: {rules}.")
    one, other = pair
    if one is other:
        raise ConfigError(
            f"No kernel block size satisfies both of these rules: it divides block_size {group.block_size} (R1); "
            f"{one.name}: {one.block_rule}."
        )
    raise ConfigError(
        f"No kernel block size that divides block_size {group.block_size} satisfies both of these rules: "
        f"{one.name}: {one.block_rule}; {other.name}: {other.block_rule}."
    )


def _block_size_clashes(choices: Sequence[int], layouts: Sequence[Layout]) -> Iterator[tuple[Layout, Layout]]:
    """Yield pairs of layouts that no block size serves; a layout with itself first."""
    for one, other in chain(zip(layouts, layouts, strict=True), combinations(layouts, 2)):
        if not any(one.takes_block_size(choice) and other.takes_block_size(choice) for choice in choices):
            yield one, other
