"""Attention kernels that are not ours, over our tables: what each reads, and how it is launched."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from serving import NUM_HEADS, Inputs, Layer
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import blocktable as bt
from blocktable.typing import LayoutName

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ALL_DTYPES = ("float16", "bfloat16", "float32")
SHORT_DTYPES = ("float16", "bfloat16")
TILE = 128  # of FlexAttention's block masks
# The kernel for short queries takes the query heads of a KV head at once, and finds no tile for 96 tokens of two. The
# other one's usual tiles leave no room in an H200's shared memory for a mask that reads arrays.
KERNEL_OPTIONS: Any = {"FORCE_USE_FLEX_ATTENTION": True, "BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2}

Write = Callable[..., None]
"""Writes a step's keys and values through slots, with the arguments of vLLM's reshape_and_cache_flash."""


def as_tensor(array: Any) -> torch.Tensor:
    """Return a backend's array as a tensor over the same memory."""
    return torch.as_tensor(array, device=DEVICE)


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Calls:
    """What a consumer does in a step.

    Attributes:
        launch: over arrays that stay where they are, for a graph to capture.
        plan: on the host, before the step's changes are committed and before anything of it is launched.
        after: what follows each replay.
    """

    launch: Callable[[], None]
    plan: Callable[[], None] = nothing
    after: Callable[[], None] = nothing


class Consumer(Protocol):
    """Kernels that write a step's keys and values to a cache, and attend over it.

    Attributes:
        name: what runs.
        dtypes: of queries and caches that it takes.
        needs_finite: whether NaN in memory that no token was written to reaches the output of real tokens. None: it is
            not known here, and only reported.
    """

    name: str
    dtypes: tuple[str, ...]
    needs_finite: bool | None

    def bind(self, table: bt.BlockTable, layers: list[Layer], inputs: Inputs) -> Calls:
        """Return what a step over these arrays calls."""


class Step:
    """What every consumer begins with: tables, slots, and the keys and values written through them."""

    def __init__(self, table: bt.BlockTable, layers: list[Layer], inputs: Inputs, write: Write) -> None:
        self.table, self.layers, self.inputs = table, layers, inputs
        self._write = write
        self._slots = [as_tensor(array)[: inputs.num_tokens] for array in table.buffers.slot_mappings]
        self._one = torch.ones(1, device=DEVICE)
        self.scale = inputs.queries.shape[-1] ** -0.5
        self.max_query_len = 1 if inputs.num_tokens == inputs.num_reqs else inputs.num_tokens

    def tables(self, layout: LayoutName) -> list[torch.Tensor]:
        """Return each group's table in a layout that the batch table itself meets."""
        inputs = self.inputs
        batch = {"num_computed_tokens": inputs.num_computed_tokens}
        self.table.gather(inputs.idx_mapping, inputs.num_reqs, **batch)  # what is handed out holds this batch
        exports = (
            self.table.export(layout, inputs.idx_mapping, groups=group, **batch) for group in range(len(self.layers))
        )
        return [as_tensor(export.entries[0]) for export in exports]

    def read(self) -> None:
        """Write the batch's tables and slots, and its keys and values to every layer's cache."""
        inputs = self.inputs
        self.table.gather(inputs.idx_mapping, inputs.num_reqs, num_computed_tokens=inputs.num_computed_tokens)
        self.table.compute_slot_mappings(inputs.idx_mapping, inputs.query_start_loc, inputs.positions)
        for layer, slots in zip(self.layers, self._slots, strict=True):
            self._write(inputs.keys, inputs.values, layer.keys, layer.values, slots, "auto", self._one, self._one)

    def export(self, layout: LayoutName, group: int, out: bt.ExportBuffers) -> None:
        """Export the batch of one group."""
        self.table.export(
            layout,
            self.inputs.idx_mapping,
            groups=group,
            seq_lens=self.inputs.seq_lens,
            num_computed_tokens=self.inputs.num_computed_tokens,
            out=out,
        )


def write_with_torch(
    keys: torch.Tensor, values: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: Any, *_: Any
) -> None:
    """Write through slots, skipping PAD, where vLLM's kernel is not; a graph can capture it."""
    is_real, places = (slots >= 0)[:, None, None], slots.clamp(min=0)
    for cache, new in ((key_cache, keys), (value_cache, values)):
        flat = cache.flatten(0, 1)
        # Slot 0 is the NULL block's, so that no token has it: for PAD it gets what it holds.
        flat.index_copy_(0, places, torch.where(is_real, new, flat[places]))


# vLLM's Triton kernels.


@contextmanager
def imported_from(folder: Path) -> Iterator[None]:
    """Import `vllm` from a folder inside the block, and forget it afterwards: another version comes next."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]


class VllmTriton:
    """vLLM's kernels, which read slots and the 2-D table.

    They load nothing behind a request's last token nor before its window's first tile, and of that tile they cut off
    what lies before the window: neither the NULL block nor unwritten slots need be finite.
    """

    needs_finite: bool | None = False
    num_segments = 16

    def __init__(self, folder: Path, dtypes: tuple[str, ...]) -> None:
        version = folder.name.removeprefix("consumers-")
        self.name = f"vLLM {version} reshape_and_cache_flash + unified_attention"
        # Triton's interpreter multiplies the bits of bfloat16 as if they were ints.
        self.dtypes: tuple[str, ...] = tuple(dtype for dtype in dtypes if ON_GPU or dtype != "bfloat16")
        with imported_from(folder):
            ops = "vllm.v1.attention.ops"
            self.write: Write = importlib.import_module(
                f"{ops}.triton_reshape_and_cache_flash"
            ).triton_reshape_and_cache_flash
            self._attend: Any = importlib.import_module(f"{ops}.triton_unified_attention").unified_attention

    def bind(self, table: bt.BlockTable, layers: list[Layer], inputs: Inputs) -> Calls:
        step = Step(table, layers, inputs, self.write)
        tables = step.tables("triton_unified")
        split = self._split(inputs) if step.max_query_len == 1 else {}

        def launch() -> None:
            step.read()
            for group, layer in enumerate(layers):
                window = layer.group.sliding_window
                self._attend(
                    q=inputs.queries,
                    k=layer.keys,
                    v=layer.values,
                    out=inputs.outputs[group],
                    cu_seqlens_q=inputs.query_start_loc,
                    max_seqlen_q=step.max_query_len,
                    seqused_k=inputs.seq_lens,
                    max_seqlen_k=table.config.max_model_len,
                    softmax_scale=step.scale,
                    causal=True,
                    window_size=(-1, -1) if window is None else (window - 1, 0),
                    block_table=tables[group],
                    softcap=0,
                    q_descale=None,
                    k_descale=None,
                    v_descale=None,
                    **split,
                )

        return Calls(launch)

    def _split(self, inputs: Inputs) -> dict[str, Any]:
        """Return the arguments that let decode split each request over several programs."""
        shape = (inputs.num_tokens, NUM_HEADS, self.num_segments)
        maximum, total = (torch.empty(shape, device=DEVICE) for _ in range(2))
        return {
            "seq_threshold_3D": 128,
            "num_par_softmax_segments": self.num_segments,
            "softmax_segm_output": torch.empty(*shape, inputs.queries.shape[-1], device=DEVICE),
            "softmax_segm_max": maximum,
            "softmax_segm_expsum": total,
        }


# FlexAttention.


class Flex:
    """torch's FlexAttention over the whole cache, its mask read from the inverse map.

    It multiplies the weights, 0 where the mask is off, with whatever lies there: all of the cache must be finite.
    """

    dtypes: tuple[str, ...] = ALL_DTYPES
    needs_finite: bool | None = True

    def __init__(self, write: Write, *, is_compiled: bool) -> None:
        self._write = write
        self._attend: Callable[..., Any] = flex_attention
        how = "eager"
        if is_compiled:
            self._attend, how = compiled_flex_attention()
        self.name = f"FlexAttention ({how})"

    def bind(self, table: bt.BlockTable, layers: list[Layer], inputs: Inputs) -> Calls:
        step = Step(table, layers, inputs, self._write)
        exports = [table.create_export("flex_attention", group) for group in range(len(layers))]
        batch_tokens = torch.arange(inputs.num_tokens, dtype=torch.int32, device=DEVICE)
        requests = torch.zeros_like(batch_tokens)
        masks = [
            paged_mask(layer, as_tensor(out.entries)[0], inputs, requests)
            for layer, out in zip(layers, exports, strict=True)
        ]

        def launch() -> None:
            step.read()
            torch.searchsorted(inputs.query_start_loc[1:], batch_tokens, right=True, out_int32=True, out=requests)
            requests.clamp_(max=inputs.num_reqs - 1)
            queries = inputs.queries.transpose(0, 1)[None]
            for group, layer in enumerate(layers):
                step.export("flex_attention", group, exports[group])
                keys, values = (cache.flatten(0, 1).transpose(0, 1)[None] for cache in (layer.keys, layer.values))
                output = self._attend(
                    queries, keys, values, block_mask=masks[group], enable_gqa=True, kernel_options=KERNEL_OPTIONS
                )
                inputs.outputs[group].copy_(output[0].transpose(0, 1))

        return Calls(launch)


def paged_mask(layer: Layer, inverse_map: torch.Tensor, inputs: Inputs, requests: torch.Tensor) -> BlockMask:
    """Return the mask of a step's tokens over the whole cache; every tile is visited, and masked within.

    Args:
        layer: whose cache.
        inverse_map: [max_num_reqs, num_kernel_blocks] int32. Kernel block -> column of the request; -1: not its own.
        inputs: the step's.
        requests: [num_tokens] int32. Token -> batch index.
    """
    block_size, window = layer.group.tokens_per_column, layer.group.sliding_window
    positions, seq_lens = inputs.positions, inputs.seq_lens
    # As a tensor: layers with and without a window then share what is compiled.
    left = torch.tensor(window if window is not None else 2**30, device=DEVICE)

    def is_seen(b: Any, h: Any, token: Any, place: Any) -> Any:
        request = requests[token]
        column = inverse_map[request, place // block_size]
        key_position = column * block_size + place % block_size
        position = positions[token]
        seen = (column >= 0) & (key_position < seq_lens[request]) & (key_position <= position)
        return seen & (key_position > position - left)

    lengths = inputs.num_tokens, layer.keys.shape[0] * block_size
    tiles = [-(-length // TILE) for length in lengths]
    counts = torch.full((1, 1, tiles[0]), tiles[1], dtype=torch.int32, device=DEVICE)
    every = torch.arange(tiles[1], dtype=torch.int32, device=DEVICE).expand(1, 1, tiles[0], -1).contiguous()
    return BlockMask.from_kv_blocks(counts, every, BLOCK_SIZE=TILE, mask_mod=is_seen, seq_lengths=lengths)


def compiled_flex_attention() -> tuple[Callable[..., Any], str]:
    """Return FlexAttention and how it runs: compiled, and where that fails eagerly, with the reason."""
    torch._dynamo.config.recompile_limit = 64  # one for each dtype and number of tokens
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    some = torch.zeros(1, 1, TILE, 64, dtype=torch.float16, device=DEVICE)
    try:
        compiled(some, some, some)
    except Exception as error:  # whatever inductor, Triton or a missing C compiler raise
        first_line = str(error).strip().partition("\n")[0]
        return flex_attention, f"eager: torch.compile failed with {type(error).__name__}: {first_line}"
    return compiled, "compiled"


# What runs where it is installed.


class PagedFlashAttention:
    """A FlashAttention that reads the 2-D table. What it does with NaN behind its masks is reported."""

    dtypes: tuple[str, ...] = SHORT_DTYPES
    needs_finite: bool | None = None

    def __init__(self, name: str, layout: LayoutName, write: Write, attend: Callable[..., torch.Tensor]) -> None:
        """attend: takes (inputs, layer, block_table, max_query_len, max_model_len, left) and returns the output."""
        self.name = name
        self._layout = layout
        self._write = write
        self._attend = attend

    def bind(self, table: bt.BlockTable, layers: list[Layer], inputs: Inputs) -> Calls:
        step = Step(table, layers, inputs, self._write)
        tables = step.tables(self._layout)

        def launch() -> None:
            step.read()
            for group, layer in enumerate(layers):
                window = layer.group.sliding_window
                sizes = step.max_query_len, table.config.max_model_len, -1 if window is None else window - 1
                inputs.outputs[group].copy_(self._attend(inputs, layer, tables[group], *sizes))

        return Calls(launch)


def vllm_flash_attention(folder: Path) -> Callable[..., torch.Tensor]:
    """Return FlashAttention 3 as vLLM builds it, unpacked from a laid-out folder.

    Raises:
        OSError: the library was built for another torch.
    """
    unpacked = tempfile.mkdtemp()
    with zipfile.ZipFile(folder / "fa3.zip") as archive:
        (library,) = archive.namelist()
        torch.ops.load_library(archive.extract(library, unpacked))
    with imported_from(folder):
        attend = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface").flash_attn_varlen_func

    def call(
        inputs: Inputs, layer: Layer, block_table: torch.Tensor, max_query_len: int, max_model_len: int, left: int
    ) -> torch.Tensor:
        output: torch.Tensor = attend(
            inputs.queries,
            layer.keys,
            layer.values,
            max_query_len,
            inputs.query_start_loc,
            max_model_len,
            seqused_k=inputs.seq_lens,
            causal=True,
            window_size=[left, -1 if left < 0 else 0],
            block_table=block_table,
            fa_version=3,
        )
        return output

    return call


def installed_flash_attention() -> Callable[..., torch.Tensor]:
    """Return FlashAttention 3 as its own package installs it."""
    attend = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache

    def call(
        inputs: Inputs, layer: Layer, block_table: torch.Tensor, max_query_len: int, max_model_len: int, left: int
    ) -> torch.Tensor:
        output: torch.Tensor = attend(
            inputs.queries,
            layer.keys,
            layer.values,
            cache_seqlens=inputs.seq_lens,
            page_table=block_table,
            cu_seqlens_q=inputs.query_start_loc,
            max_seqlen_q=max_query_len,
            causal=True,
            window_size=(left, -1 if left < 0 else 0),
        )
        return output

    return call


def torch_varlen_attention() -> Callable[..., torch.Tensor]:
    """Return torch's varlen_attn over a block table, with the FlashAttention 3 implementation."""
    from torch.nn.attention import activate_flash_attention_impl
    from torch.nn.attention.varlen import varlen_attn

    activate_flash_attention_impl("FA3")

    def call(
        inputs: Inputs, layer: Layer, block_table: torch.Tensor, max_query_len: int, max_model_len: int, left: int
    ) -> torch.Tensor:
        output: torch.Tensor = varlen_attn(
            inputs.queries,
            layer.keys,
            layer.values,
            inputs.query_start_loc,
            None,
            max_query_len,
            max_model_len,
            window_size=(left, 0),
            enable_gqa=True,
            seqused_k=inputs.seq_lens,
            block_table=block_table,
        )
        return output

    return call


def optional_consumers(folders: list[Path], write: Write) -> tuple[list[Consumer], list[str]]:
    """Return the consumers that can run here besides, and a sentence on each that cannot."""
    if not ON_GPU:
        return [], ["FlashAttention 3 and varlen_attn are absent: there is no GPU."]
    found: list[Consumer] = []
    absent: list[str] = []
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    packed = [folder for folder in folders if (folder / "fa3.zip").exists()]
    if not is_hopper:
        absent.append("FlashAttention 3 is absent: it is for GPUs of compute capability 9.")
    elif importlib.util.find_spec("flash_attn_interface") is not None:
        attend = installed_flash_attention()
        found.append(PagedFlashAttention("FlashAttention 3", "flash_attention_3", write, attend))
    elif not packed:
        absent.append("FlashAttention 3 is absent: it is neither installed nor laid out.")
    else:
        try:
            attend = vllm_flash_attention(packed[0])
        except OSError as error:
            absent.append(f"FlashAttention 3 is absent: the one laid out cannot be loaded: {error}")
        else:
            name = f"FlashAttention 3 of {packed[0].name.replace('consumers-', 'vLLM ')}"
            found.append(PagedFlashAttention(name, "flash_attention_3", write, attend))
    problem = varlen_problem()
    if problem is None:
        found.append(PagedFlashAttention("varlen_attn", "varlen_attn", write, torch_varlen_attention()))
    else:
        absent.append(problem)
    return found, absent


def varlen_problem() -> str | None:
    """Return why torch's varlen_attn reads no block table here, or None."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"varlen_attn is absent: torch {torch.__version__} has none."
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return f"varlen_attn is absent: that of torch {torch.__version__} takes no block_table."
    if importlib.util.find_spec("flash_attn_3") is None:
        return "varlen_attn is absent: with a block_table it wants FlashAttention 3, which is not installed."
    return None
