"""An encoder-decoder over two groups: the decoder's own tokens, and the encoder's, which are written once.

The decoder attends to its own tokens through the first group (self-attention) and to the encoder's through the second
(cross-attention). All inputs are numpy arrays, which every backend takes.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import blocktable as bt
from attention import View
from model import FULL, Transformer
from model_runner import NEVER_WRITTEN
from pools import BlockPool
from request import Request

CROSS = 3
"""A kind of layers beside those of model.py."""
GROUPS = (FULL, CROSS)
"""The kind of the layers that share each KV cache group."""


class EncoderDecoder(Transformer):
    """A decoder whose layers of kind `CROSS` attend to what an encoder, one layer of attention, makes of a source."""

    def encode(self, source: Tensor, cache: Any) -> None:
        """Hand the cache the keys and values that each layer of kind `CROSS` attends to, [num_tokens, ...].

        Args:
            source: [num_tokens] int64. Token ids.
            cache: `keep(layer, key, value)`.
        """
        positions, hidden = torch.arange(len(source), device=source.device), self.embedding[source]
        query, key, value = self.heads(0, hidden, positions)
        scores = torch.einsum("thd,shd->hts", query, key) / self.config.head_size**0.5
        seen = torch.einsum("hts,shd->thd", torch.softmax(scores, -1), value)  # the whole source, to both sides
        hidden = hidden + seen.flatten(1) @ self.outputs[0]
        for layer in (layer for layer, kind in enumerate(self.config.layers) if kind == CROSS):
            cache.keep(layer, *self.heads(layer, hidden, positions)[1:])


@dataclass(eq=False)
class Task(Request):
    """A request of the decoder, with the tokens that the encoder reads."""

    source: list[int] = field(default_factory=list)


@dataclass
class Queries:
    """What the attention of a kind reads of a step's tokens, beside the table."""

    positions: Tensor  # [num_tokens] int64. The last place that a token sees
    requests: Tensor  # [num_tokens] int64. Which batch row a token belongs to
    query_start_loc: Tensor  # [num_reqs + 1] int32
    num_computed_tokens: Tensor  # [num_reqs] int32. What the cache held before this step


class Server:
    """Serves tasks: `add` them, then `step` until it returns False. To the model it is the cache.

    Args:
        model: its device and dtype are the caches' too.
        config: of the table: a group for each of `GROUPS`.
        backend: of the table.
        attention: as ModelRunner's.
    """

    def __init__(self, model: EncoderDecoder, config: bt.BlockTableConfig, backend: str, attention: Any) -> None:
        self.model, self.attention, self.device = model, attention, model.embedding.device
        self.table = bt.BlockTable(config, backend)
        self.table.warmup()
        self.pools = [BlockPool(group.num_blocks or 0) for group in config.groups]
        self.free_rows = list(range(config.num_rows))
        self.waiting, self.running, self.finished = list[Task](), list[Task](), dict[tuple[int, int], list[int]]()
        self.caches = list[Tensor]()
        for group in (config.groups[GROUPS.index(kind)] for kind in model.config.layers):
            num_slots = (group.num_blocks or 0) * group.block_size
            shape = (2, num_slots, model.config.num_heads, model.config.head_size)
            self.caches.append(torch.full(shape, NEVER_WRITTEN, dtype=model.embedding.dtype, device=self.device))

    def tensor(self, array: Any) -> Tensor:
        """Return an input or an output of the table as a tensor on the model's device."""
        if self.device.type == "cpu" and not isinstance(array, np.ndarray):
            array = self.table.backend.to_host(array)  # of a backend that is emulated
        return torch.as_tensor(array, device=self.device)

    def take(self, task: Task, group: int, num_tokens: int) -> list[int]:
        """Take the blocks that a task lacks to hold so many tokens of a group."""
        size, held = self.table.config.groups[group].block_size, task.blocks[group]
        new = self.pools[group].take(-(-num_tokens // size) - len(held))
        held += new
        return new

    def start(self, task: Task) -> None:
        """Give a task a row and the blocks of its source, and write the source there, once."""
        task.row, task.blocks, cross = self.free_rows.pop(), [[], []], GROUPS.index(CROSS)
        self.take(task, cross, len(task.source))
        self.table.set_row(task.row, task.blocks)
        self.table.commit()
        positions = np.arange(len(task.source))
        starts = np.array([0, len(task.source)], np.int32)
        # A cross group has slots for a call that names it, and PAD in a step.
        (slots,) = self.table.compute_slot_mappings(np.array([task.row], np.int32), starts, positions, groups=[cross])
        self.source_slots = self.tensor(slots)
        self.model.encode(torch.tensor(task.source, device=self.device), self)
        self.running.append(task)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write what the encoder has made for a layer."""
        self.caches[layer][:, self.source_slots] = torch.stack((key, value))

    def step(self) -> bool:
        """Start tasks while there are rows, run every task's next tokens, and take in what comes out."""
        while self.waiting and self.free_rows:
            self.start(self.waiting.pop(0))
        if not self.running:
            return False
        self.fill()
        tokens = torch.tensor([token for task in self.running for token in task.to_run], device=self.device)
        best = self.model.forward(tokens, self.queries[FULL].positions, self).argmax(-1).tolist()
        for task in list(self.running):
            new, best = best[: len(task.to_run)], best[len(task.to_run) :]
            task.num_computed = len(task.tokens)
            task.tokens.append(new[-1])
            if len(task.tokens) == task.max_len:
                self.finish(task)
        return True

    def fill(self) -> None:
        """Let the table make the step, and the layers read what comes out."""
        tasks = self.running
        rows = np.array([task.row for task in tasks], np.int32)
        counts = [len(task.to_run) for task in tasks]
        starts = np.cumsum([0, *counts], dtype=np.int32)
        places = np.concatenate([np.arange(task.num_computed, len(task.tokens)) for task in tasks])
        new = [self.take(task, GROUPS.index(FULL), len(task.tokens)) for task in tasks]
        self.table.append_rows(rows, [np.concatenate(new).astype(np.int32), None], [len(ids) for ids in new])
        seq_lens = [[len(task.tokens) for task in tasks], [len(task.source) for task in tasks]]
        lengths = [np.array(lens, np.int32) for lens in seq_lens]
        metadata = self.table.step_metadata(rows, starts, places, lengths)
        requests, query_start_loc = self.tensor(np.repeat(np.arange(len(tasks)), counts)), self.tensor(starts)
        self.views, self.queries = dict[int, View](), dict[int, Queries]()
        for kind, group, found in zip(GROUPS, self.table.config.groups, metadata.groups, strict=True):
            lens, seen = self.tensor(found.seq_lens), self.tensor(places)
            computed = lens - query_start_loc.diff()
            if kind == CROSS:  # all of the source is there, and every token sees its last place
                computed, seen = lens, lens[requests].long() - 1
            tables = self.tensor(found.block_table), self.tensor(found.slot_mapping)
            self.views[kind] = View(*tables, group.tokens_per_column, self.table.config.context_parallel)
            self.queries[kind] = Queries(seen, requests, query_start_loc, computed)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend through the table of the layer's group; a decoder's token has no slot in the cross group."""
        kind, query = self.model.config.layers[layer], query / self.model.config.head_size**0.5
        mean, _ = self.attention(query, key, value, self.caches[layer], self.views[kind], self.queries[kind], 2**31)
        return mean

    def finish(self, task: Task) -> None:
        for pool, ids in zip(self.pools, task.blocks, strict=True):
            pool.release(ids)
        self.table.clear_row(task.row)
        self.free_rows.append(task.row)
        self.running.remove(task)
        self.finished[task.name] = task.tokens[task.num_prompt :]
