"""Runs the model over a batch: a block table and a cache for each rank of this process, decodes by CUDA graphs."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import blocktable as bt
from attention import Part, View, attend_in_torch, merge
from model import STATE, WINDOW, Transformer
from request import Request

NEVER_WRITTEN = 7.0
"""What an unwritten cell holds: whoever reads one by mistake gets other tokens out."""
TABLE_INPUTS = ("idx_mapping", "query_start_loc", "positions", "num_computed_tokens")


@dataclass
class Batch:
    """The inputs of a step, padded: padding entries without tokens after its requests, zeros after its tokens."""

    idx_mapping: Tensor  # [num_reqs] int32
    num_computed_tokens: Tensor  # [num_reqs] int32
    state_columns: Tensor  # [num_reqs] int64
    query_start_loc: Tensor  # [num_reqs + 1] int32
    tokens: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    max_query_len: int
    requests: Any = None  # [num_tokens] int64. Which batch row a token belongs to


class Rank:
    """What one context-parallel rank holds: its table, and its share of each layer's cache."""

    def __init__(self, config: bt.BlockTableConfig, backend: str, model: Transformer) -> None:
        self.table = bt.BlockTable(config, backend)
        self.table.warmup()
        self.device, self.views, self.caches = model.embedding.device, list[View](), list[Tensor]()
        # The numpy backend serves a GPU too: its outputs then travel there in each step.
        self.is_on_host = self.device.type == "cpu" or isinstance(self.table.buffers.slot_mappings[0], np.ndarray)
        self.tensors: dict[int, tuple[Any, Tensor]] = {}
        # State layers read their blocks as a layout of their own, here with entries that index a tensor as they are.
        columns, layout = config.groups[STATE].blocks_per_row or 1, bt.LAYOUTS["speculative_state"]
        self.states = replace(layout, dtype="int64", null=None, num_columns=columns)
        self.state_buffers = self.table.create_export(self.states, STATE)
        self.state_blocks = torch.empty(0)  # [num_reqs, columns] int64
        for group in (config.groups[kind] for kind in model.config.layers):
            # Keys and values of each slot, or one state for each block: [1 or 2, num_slots, num_heads, head_size].
            num_slots = (group.num_blocks or 0) * group.block_size
            shape = (1 if group.slot_mode == "none" else 2, num_slots, model.config.num_heads, model.config.head_size)
            self.caches.append(torch.full(shape, NEVER_WRITTEN, dtype=model.embedding.dtype, device=self.device))

    def tensor(self, array: Any) -> Tensor:
        """Return one of the table's outputs as a tensor: its own memory where that is on the device, else a copy."""
        if self.is_on_host:
            return torch.from_numpy(self.table.backend.to_host(array)).to(self.device)
        if id(array) not in self.tensors:  # the array is kept too, so that no other one gets its id
            self.tensors[id(array)] = array, torch.as_tensor(array, device=self.device)
        return self.tensors[id(array)][1]

    def step(self, inputs: dict[str, Any], num_reqs: int, num_tokens: int) -> None:
        """Let the table make its step, and the layers read what comes out."""
        config, idx_mapping = self.table.config, inputs["idx_mapping"]
        step = self.table.step(**inputs, num_tokens_padded=num_tokens)
        states = self.table.export(self.states, idx_mapping, groups=STATE, num_reqs=num_reqs, out=self.state_buffers)
        self.state_blocks = self.tensor(states.entries[0])
        self.views = [
            View(self.tensor(block_table), self.tensor(slots), group.tokens_per_column, config.context_parallel)
            for group, block_table, slots in zip(config.groups, step.block_tables, step.slot_mappings, strict=True)
        ]


class ModelRunner:
    """The model, its ranks, and the inputs of a step at fixed addresses; to the model it is the cache.

    Args:
        model: its device and dtype are the caches' too.
        configs: of the ranks that live in this process: all of them (simulated), or one.
        backend: of the tables.
        is_dense: whether the batch is rows 0 .. n - 1 of the table, so that no `idx_mapping` is needed.
        num_best: tokens to return for each position, the best first.
        attention: `attend_in_torch`, or what does the same.
        graph_sizes: batch sizes to capture a decode step for. A CPU has no graphs: there a replay is the call itself.
        exchange: takes this process's parts of an attention and returns all ranks' parts.
        link: a RankLink, which brings the row changes of another process's table; None: they are made here.
    """

    def __init__(
        self,
        model: Transformer,
        configs: Sequence[bt.BlockTableConfig],
        backend: str,
        *,
        is_dense: bool,
        num_best: int,
        attention: Callable[..., Part] = attend_in_torch,
        graph_sizes: Sequence[int] = (),
        exchange: Callable[[list[Part]], list[Part]] = list,
        link: Any = None,
    ) -> None:
        self.model, self.is_dense, self.attention, self.exchange = model, is_dense, attention, exchange
        self.link = link
        self.ranks, self.counts = [Rank(config, backend, model) for config in configs], Counter[str]()
        config, device = configs[0], model.embedding.device
        self.max_decode_len = config.groups[STATE].blocks_per_row or 1  # a token and its drafts
        num_reqs, num_tokens = config.max_num_reqs, config.max_num_batched_tokens
        int32 = {"idx_mapping": num_reqs, "num_computed_tokens": num_reqs, "query_start_loc": num_reqs + 1}
        int64 = {"state_columns": num_reqs, "tokens": num_tokens, "positions": num_tokens}
        self.host = {name: torch.zeros(size, dtype=torch.int32) for name, size in int32.items()}
        self.host |= {name: torch.zeros(size, dtype=torch.int64) for name, size in int64.items()}
        if device.type == "cuda":
            self.host = {name: array.pin_memory() for name, array in self.host.items()}
        self.inputs = {name: array.to(device) for name, array in self.host.items()}  # on a CPU the same arrays
        self.best = torch.zeros(num_tokens, num_best, dtype=torch.int64, device=device)
        self.best_logits = self.best.to(model.embedding.dtype)
        self.graphs: dict[int, Callable[[], None]] = {}
        if graph_sizes and device.type == "cuda" and self.ranks[0].is_on_host:
            raise ValueError(f"The tables of backend {backend!r} are on the host, where no CUDA graph reaches them.")
        for size in graph_sizes:
            self.capture(size)

    def change(self, operation: str, *arguments: Any) -> None:
        """Change rows, on each rank alike: the ranks hold the same block ids, each for its own tokens."""
        self.counts[operation] += 1
        if self.link is None or self.link.is_sender:
            for rank in self.ranks:
                getattr(rank.table, operation)(*arguments)

    def share_rows(self) -> None:
        """Let the other processes' tables hold what rank 0's holds."""
        if self.link is not None:
            for rank in self.ranks:
                self.link.share(rank.table)

    def copy_blocks(self, group: int, sources: list[int], targets: list[int]) -> None:
        """Copy what blocks hold, in each layer of a group."""
        for rank in self.ranks:
            for cache in (rank.caches[i] for i, kind in enumerate(self.model.config.layers) if kind == group):
                blocks = cache.unflatten(1, (-1, rank.table.config.groups[group].block_size))
                blocks[:, targets] = blocks[:, sources]

    def execute(self, work: Sequence[tuple[Request, int]]) -> tuple[Any, Any]:
        """Run so many tokens of each request; return the best next ones and their logits, [num_tokens, num_best]."""
        self.share_rows()
        num_tokens, longest = sum(count for _, count in work), max(count for _, count in work)
        fitting = [size for size in self.graphs if size >= len(work) and longest <= self.max_decode_len]
        if fitting:
            self.fill(work, min(fitting), min(fitting) * self.max_decode_len, self.max_decode_len)
            for rank in self.ranks:
                rank.table.commit()  # before the graph and never in it
            self.graphs[min(fitting)]()
            self.counts["graph replays"] += 1
        else:
            self.run(self.fill(work, len(work), num_tokens, longest))
        return self.best[:num_tokens].cpu().numpy(), self.best_logits[:num_tokens].cpu().numpy()

    def capture(self, size: int) -> None:
        """Capture a decode step of `size` requests; what the rows and inputs hold is read at every replay."""
        batch = self.fill([], size, size * self.max_decode_len, self.max_decode_len)
        self.run(batch)  # compiles and allocates, which a capture must not
        self.graphs[size] = lambda: self.run(batch)
        if batch.tokens.is_cuda:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.run(batch)
            self.graphs[size] = graph.replay

    def fill(self, work: Sequence[tuple[Request, int]], num_reqs: int, num_tokens: int, max_query_len: int) -> Batch:
        """Put a step into the inputs. The last step has ended: its results were fetched."""
        starts = np.cumsum([0, *(count for _, count in work)])
        values: dict[str, Any] = {
            "idx_mapping": [request.row for request, _ in work],
            "num_computed_tokens": [request.num_computed for request, _ in work],
            "state_columns": [request.state_column for request, _ in work],
            "query_start_loc": starts,
            "tokens": [token for request, count in work for token in request.to_run[:count]],
            "positions": [request.num_computed + i for request, count in work for i in range(count)],
        }
        padding = {"idx_mapping": -1, "query_start_loc": starts[-1]}
        sizes = {"query_start_loc": num_reqs + 1, "tokens": num_tokens, "positions": num_tokens}
        for name, array in self.host.items():
            array.fill_(padding.get(name, 0))
            array.numpy()[: len(values[name])] = values[name]
            self.inputs[name].copy_(array, non_blocking=True)
        arrays = {name: array[: sizes.get(name, num_reqs)] for name, array in self.inputs.items()}
        return Batch(**arrays, max_query_len=max_query_len)

    def run(self, batch: Batch) -> None:
        """Let each rank's table make its step, and the model use it. All of it can be captured."""
        for rank in self.ranks:
            inputs: dict[str, Any] = {name: getattr(batch, name) for name in TABLE_INPUTS}
            if rank.is_on_host:
                inputs = {name: self.host[name].numpy()[: len(array)] for name, array in inputs.items()}
            if self.is_dense:
                inputs["idx_mapping"] = None
            rank.step(inputs, len(batch.idx_mapping), len(batch.tokens))
        self.batch = batch
        every_token = torch.arange(len(batch.tokens), dtype=torch.int32, device=batch.tokens.device)
        # Padding counts as the last request's; its slots are -1 and nobody looks at its logits.
        requests = torch.searchsorted(batch.query_start_loc[1:], every_token, right=True)
        batch.requests = requests.clamp(max=len(batch.idx_mapping) - 1)
        logits = self.model.forward(batch.tokens, batch.positions, self)
        self.best_logits[: len(logits)], self.best[: len(logits)] = logits.topk(self.best.shape[1])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend through the tables of all ranks."""
        kind, config = self.model.config.layers[layer], self.model.config
        window, query = config.window if kind == WINDOW else 2**31, query / config.head_size**0.5
        parts = [
            self.attention(query, key, value, rank.caches[layer], rank.views[kind], self.batch, window)
            for rank in self.ranks
        ]
        return merge(self.exchange(parts))

    def scan(self, layer: int, decay: Tensor, update: Tensor) -> Tensor:
        """Advance the states. Token j of a step leaves its state in column `j % columns`: drafts can be undone."""
        batch, results = self.batch, []
        starts, ends = batch.query_start_loc[:-1].long(), batch.query_start_loc[1:].long()
        for rank in self.ranks:  # the group is replicated
            blocks, cache = rank.state_blocks, rank.caches[layer][0].flatten(1)  # [num_blocks, width]
            state = cache[blocks.gather(1, batch.state_columns[:, None])[:, 0]]
            state = torch.where((batch.num_computed_tokens > 0)[:, None], state, 0.0)
            states = []
            for j in range(batch.max_query_len):
                is_live, token = starts + j < ends, (starts + j).clamp(max=len(decay) - 1)
                state = torch.where(is_live[:, None], decay[token] * state + update[token], state)
                # Requests that have no such token write to block 0, which belongs to none.
                cache[torch.where(is_live, blocks[:, j % blocks.shape[1]], bt.NULL_BLOCK_ID)] = state
                states.append(state)
            nth = torch.arange(len(decay), device=decay.device) - starts[batch.requests]
            results.append(torch.stack(states)[nth.clamp(max=len(states) - 1), batch.requests])
        return torch.stack(results).mean(0)  # of equal results; one that is not shows
