"""Kernels that read our CSR: FlashInfer's page table in plain Python, and FlashInfer where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from attention_kernels import (
    ALL_DTYPES,
    DEVICE,
    ON_GPU,
    SHORT_DTYPES,
    Calls,
    Consumer,
    Step,
    Write,
    as_tensor,
    write_with_torch,
)
from serving import NUM_HEADS, NUM_KV_HEADS, Inputs, Layer, attend_densely

import blocktable as bt

Append = Callable[..., None]
"""Writes a step's keys and values through a CSR, with the arguments of FlashInfer's append_paged_kv_cache."""


def append_with_torch(
    keys: torch.Tensor,
    values: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    caches: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    indices: torch.Tensor,
    indptr: torch.Tensor,
    last_page_lens: torch.Tensor,
) -> None:
    """Append as FlashInfer's kernel does: to page and offset of `indptr * page_size + position`, last pages unread."""
    both = caches if isinstance(caches, tuple) else caches.unbind(1)
    page_size = both[0].shape[1]
    assert indptr.shape[0] == last_page_lens.shape[0] + 1
    assert bool((batch_indices >= 0).all()), "FlashInfer reads indptr at -1 for these tokens"
    places = indptr[batch_indices].long() * page_size + positions
    for cache, new in zip(both, (keys, values), strict=True):
        cache[indices[places // page_size].long(), places % page_size] = new


class Pages(Step):
    """A step whose kernels read the CSR of each group, and its twin on the host.

    Keys and values are written through slots, or with `append` through the CSR and the request of each token.
    """

    def __init__(
        self, table: bt.BlockTable, layers: list[Layer], inputs: Inputs, write: Write, append: Append | None
    ) -> None:
        super().__init__(table, layers, inputs, write)
        self.exports = [table.create_export("flashinfer", group) for group in range(len(layers))]
        self._append = append
        self._requests = None if append is None else table.create_export("token_requests")

    @property
    def num_reqs(self) -> int:
        """Requests of the batch, without padding."""
        return int((self.inputs.host["idx_mapping"] >= 0).sum())

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch, without padding."""
        return int(self.inputs.host["query_start_loc"][-1])

    def planned(self, group: int) -> bt.Export:
        """Return what the CSR of a group will hold, from the host's rows alone."""
        names = ("idx_mapping", "seq_lens", "num_computed_tokens")
        mapping, seq_lens, computed = (self.inputs.host[name] for name in names)
        return self.table.export_host(
            "flashinfer", mapping, groups=group, seq_lens=seq_lens, num_computed_tokens=computed
        )

    def launch(self) -> None:
        """Export the batch, and write its keys and values where slots say where they go."""
        inputs = self.inputs
        if self._requests is None:
            self.read()
        else:
            self.table.export(
                "token_requests", inputs.idx_mapping, query_start_loc=inputs.query_start_loc, out=self._requests
            )
        for group, out in enumerate(self.exports):
            self.export("flashinfer", group, out)

    def append(self) -> None:
        """Append the keys and values where it is FlashInfer's to write them.

        FlashInfer takes every token for a real one, and reads `indptr[-1]` where the request is -1: it gets those
        before the padding, which the host counts. Of no tokens it would launch an empty grid, which is an error.
        """
        inputs, count = self.inputs, self.num_tokens
        if self._append is None or self._requests is None or count == 0:
            return
        requests = as_tensor(self._requests.entries)[0, :count]
        new = inputs.keys[:count], inputs.values[:count]
        for layer, out in zip(self.layers, self.exports, strict=True):
            csr = as_tensor(out.entries)[0], as_tensor(out.indptr), as_tensor(out.last_page_lens)
            self._append(*new, requests, inputs.positions[:count], (layer.keys, layer.values), *csr)


class PlainCsr:
    """FlashInfer's published page table, read in plain Python, its attention dense.

    Request i has the pages `indices[indptr[i] : indptr[i + 1]]`; its last one holds `last_page_len[i]` tokens, 1 to
    page_size, the others page_size each (docs.flashinfer.ai, tutorials/kv_layout; `flashinfer.page.get_seq_lens`).
    """

    dtypes: tuple[str, ...] = ALL_DTYPES
    needs_finite: bool | None = False

    def __init__(self, write: Write, append: Append | None = None) -> None:
        how = "" if append is None else ", which it appends through"
        self.name = f"FlashInfer's page table in plain Python{how}"
        self._write = write
        self._append = append

    def bind(self, table: bt.BlockTable, layers: list[Layer], inputs: Inputs) -> Calls:
        pages = Pages(table, layers, inputs, self._write, self._append)
        planned: list[bt.Export] = []

        def plan() -> None:
            planned[:] = [pages.planned(group) for group in range(len(layers))]

        def attend() -> None:
            pages.append()
            for group, layer in enumerate(layers):
                for name in ("indptr", "last_page_lens"):
                    on_host = getattr(planned[group], name).tolist()
                    on_device = as_tensor(getattr(pages.exports[group], name))[: len(on_host)].tolist()
                    assert on_device == on_host, f"group {group}: {name} differ from those planned"
                self._attend(layer, pages.exports[group], inputs, inputs.outputs[group])

        return Calls(pages.launch, plan, attend)

    def _attend(self, layer: Layer, out: bt.ExportBuffers, inputs: Inputs, output: torch.Tensor) -> None:
        page_size = layer.group.tokens_per_column
        indptr, last_page_lens = as_tensor(out.indptr).tolist(), as_tensor(out.last_page_lens).tolist()
        indices, starts = as_tensor(out.entries)[0].tolist(), inputs.query_start_loc.tolist()
        for request in range(inputs.num_reqs):
            pages = indices[indptr[request] : indptr[request + 1]]
            seq_len = max(len(pages) - 1, 0) * page_size + last_page_lens[request]
            assert seq_len == int(inputs.seq_lens[request]), f"request {request} has {seq_len} tokens"
            tokens = slice(starts[request], starts[request + 1])
            if tokens.start < tokens.stop:
                keys, values = (cache[pages].flatten(0, 1)[:seq_len] for cache in (layer.keys, layer.values))
                dense = attend_densely(inputs.queries[tokens], keys, values, layer.group.sliding_window)
                output[tokens] = dense.to(output.dtype)


class FlashInferPrefill:
    """FlashInfer's paged prefill kernels, planned on the host for each step; their wrapper wants no capture.

    Each group has a wrapper of its own: plan() fills host memory of the wrapper, which the device copies later.
    """

    dtypes: tuple[str, ...] = SHORT_DTYPES
    needs_finite: bool | None = None
    kind = "prefill"

    def __init__(self, write: Write, append: Append | None = None) -> None:
        self._write = write
        self._append = append
        self._flashinfer: Any = importlib.import_module("flashinfer")
        appends = "" if append is None else " + append_paged_kv_cache"
        self.name = f"FlashInfer {self._flashinfer.__version__} {self.kind}{appends}"

    def bind(self, table: bt.BlockTable, layers: list[Layer], inputs: Inputs) -> Calls:
        pages = Pages(table, layers, inputs, self._write, self._append)
        workspace = torch.zeros(128 * 2**20, dtype=torch.uint8, device=DEVICE)
        wrappers = [
            self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2") for _ in layers
        ]
        starts = torch.from_numpy(inputs.host["query_start_loc"])

        def plan() -> None:
            num_reqs = pages.num_reqs
            if num_reqs == 0:  # the launch that compiles; a plan wants a request
                return
            for group, wrapper in enumerate(wrappers):
                planned: Any = pages.planned(group)
                wrapper.plan(
                    starts[: num_reqs + 1],
                    torch.from_numpy(planned.indptr[: num_reqs + 1]),
                    as_tensor(pages.exports[group].entries)[0],
                    torch.from_numpy(planned.last_page_lens[:num_reqs]),
                    *self._sizes(layers[group], inputs),
                    causal=True,
                    window_left=self._window_left(table, layers[group]),
                    q_data_type=inputs.queries.dtype,
                )

        def attend() -> None:
            pages.append()
            count = pages.num_tokens
            for group, (wrapper, layer) in enumerate(zip(wrappers, layers, strict=True)):
                output = wrapper.run(inputs.queries[:count], (layer.keys, layer.values))
                inputs.outputs[group, :count] = output

        return Calls(pages.launch, plan, attend)

    @staticmethod
    def _sizes(layer: Layer, inputs: Inputs) -> tuple[int, int, int, int]:
        return NUM_HEADS, NUM_KV_HEADS, inputs.queries.shape[-1], layer.group.tokens_per_column

    @staticmethod
    def _window_left(table: bt.BlockTable, layer: Layer) -> int:
        """Return it, never -1: kernels with and without a window would both have to be compiled."""
        window = layer.group.sliding_window
        return table.config.max_model_len if window is None else window - 1


class FlashInferDecode(FlashInferPrefill):
    """FlashInfer's paged decode kernels for steps of a token each, captured with our exports; prefill for others.

    plan() copies `indptr` and last pages to memory of the wrapper, which the kernel may read before the launch in front
    of it is through (it is launched as a dependent one); indices are read after that, from the export itself.
    """

    kind = "decode"

    def bind(self, table: bt.BlockTable, layers: list[Layer], inputs: Inputs) -> Calls:
        if inputs.num_tokens > inputs.num_reqs:
            return super().bind(table, layers, inputs)
        pages = Pages(table, layers, inputs, self._write, self._append)
        workspace = torch.zeros(128 * 2**20, dtype=torch.uint8, device=DEVICE)
        counts = {"dtype": torch.int32, "device": DEVICE}
        wrappers = [
            self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                paged_kv_indptr_buffer=torch.zeros(inputs.num_reqs + 1, **counts),
                paged_kv_indices_buffer=as_tensor(out.entries)[0],
                paged_kv_last_page_len_buffer=torch.zeros(inputs.num_reqs, **counts),
            )
            for out in pages.exports
        ]
        none = torch.empty(0, **counts)

        def plan() -> None:
            for group, wrapper in enumerate(wrappers):
                planned: Any = pages.planned(group)
                wrapper.plan(
                    torch.from_numpy(planned.indptr),
                    none,  # the export writes them
                    torch.from_numpy(planned.last_page_lens),
                    *self._sizes(layers[group], inputs),
                    window_left=self._window_left(table, layers[group]),
                    q_data_type=inputs.queries.dtype,
                )

        def launch() -> None:
            pages.launch()
            for group, (wrapper, layer) in enumerate(zip(wrappers, layers, strict=True)):
                wrapper.run(inputs.queries, (layer.keys, layer.values), out=inputs.outputs[group])

        return Calls(launch, plan)


def flashinfer_consumers(write: Write) -> tuple[list[Consumer], list[str]]:
    """Return FlashInfer's consumers that can run here, and a sentence on why there are none."""
    if not ON_GPU:
        return [], ["FlashInfer is absent: there is no GPU."]
    if importlib.util.find_spec("flashinfer") is None:
        return [], ["FlashInfer is absent: it is not installed."]
    try:
        flashinfer: Any = importlib.import_module("flashinfer")
    except Exception as error:  # whatever a module that it imports raises
        return [], [f"FlashInfer is absent: it cannot be imported: {type(error).__name__}: {error}"]
    append = flashinfer.append_paged_kv_cache
    return [FlashInferPrefill(write), FlashInferDecode(write), FlashInferPrefill(write, append)], []


def plain_consumers(write: Write) -> list[Consumer]:
    """Return those that run anywhere."""
    return [PlainCsr(write), PlainCsr(write_with_torch, append_with_torch)]
