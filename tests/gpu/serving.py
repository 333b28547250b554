"""A small engine for tests of attention kernels: it serves random requests and knows what each kernel must write.

What is expected owes nothing to the library: slots come from the engine's own lists of blocks, and attention is
computed from each request's own keys and values, dense and in float64.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch

import blocktable as bt

NUM_HEADS, NUM_KV_HEADS = 4, 2
INFINITY, NAN = float("inf"), float("nan")
ERRORS = {"float16": 2, "bfloat16": 2, "float32": 32}
"""Dtype -> how far an output may be from the dense one, in its epsilons times the largest value of the request.

In the short ones the weights and the output are rounded once each, by half an epsilon at most. In float32 scores are
sums over a head's dimensions, and as many roundings go into a weight.
"""


@dataclass(frozen=True)
class Sizes:
    """What one launch takes, and how long its requests get.

    Attributes:
        num_reqs: batch rows launched.
        num_tokens: tokens launched.
        num_blocks: blocks of 16 tokens in each group's cache; one group has blocks twice as large.
        head_size: dimensions of a head.
        num_steps: launches to check.
    """

    num_reqs: int
    num_tokens: int
    num_blocks: int
    head_size: int
    num_steps: int

    @property
    def num_rows(self) -> int:
        """Requests that are served at a time: more than a batch takes."""
        return self.num_reqs + 1

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request, so that the blocks suffice for as many as are served at a time."""
        return 32 * ((self.num_blocks // 2 - 1) // self.num_rows)


def table_config(sizes: Sizes) -> bt.BlockTableConfig:
    """Return the geometry: a group with smaller kernel blocks, and one with a sliding window."""
    return bt.BlockTableConfig(
        groups=[
            bt.KVCacheGroup(block_size=32, kernel_block_size=16, num_blocks=sizes.num_blocks // 2),
            bt.KVCacheGroup(block_size=16, num_blocks=sizes.num_blocks, sliding_window=20, allow_null=True),
        ],
        max_num_reqs=sizes.num_rows + 2,
        max_num_batched_tokens=sizes.num_tokens,
        max_model_len=sizes.max_model_len,
    )


@dataclass
class Request:
    """One request: its row, how many tokens it has in all and in the cache, and its blocks in each group."""

    row: int
    num_tokens: int
    num_computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Scheduled:
    """A request's share of one step: `count` tokens from batch token `start` on."""

    request: Request
    start: int
    count: int

    @property
    def tokens(self) -> slice:
        """Its tokens of the batch."""
        return slice(self.start, self.start + self.count)


@dataclass(frozen=True)
class Inputs:
    """What one launch reads, at addresses that never change.

    Attributes:
        idx_mapping: [num_reqs] int32. Batch index -> row; -1 for padding.
        query_start_loc: [num_reqs + 1] int32. First token of each request; the last entry repeats.
        positions: [num_tokens] int64.
        num_computed_tokens: [num_reqs] int32. Batch index -> tokens in the cache before this step.
        seq_lens: [num_reqs] int32. Batch index -> tokens with this step's; 0 for padding.
        queries: [num_tokens, NUM_HEADS, head_size].
        keys, values: [num_tokens, NUM_KV_HEADS, head_size]. Infinite behind the real tokens, as no cache ever is.
        outputs: [num_groups, num_tokens, NUM_HEADS, head_size], written.
        host: name -> what `set` last put into the array of that name, which the host so knows without a wait.
    """

    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    positions: torch.Tensor
    num_computed_tokens: torch.Tensor
    seq_lens: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    outputs: torch.Tensor
    host: dict[str, np.ndarray]

    @classmethod
    def empty(cls, sizes: Sizes, dtype: torch.dtype, num_groups: int, device: str) -> Inputs:
        """Return the inputs of a batch of no requests."""
        host: dict[str, np.ndarray] = {
            "idx_mapping": np.full(sizes.num_reqs, -1, np.int32),
            "query_start_loc": np.zeros(sizes.num_reqs + 1, np.int32),
            "positions": np.zeros(sizes.num_tokens, np.int64),
            "num_computed_tokens": np.zeros(sizes.num_reqs, np.int32),
            "seq_lens": np.zeros(sizes.num_reqs, np.int32),
        }
        heads = {"dtype": dtype, "device": device}
        return cls(
            **{name: torch.tensor(array, device=device) for name, array in host.items()},
            queries=torch.zeros(sizes.num_tokens, NUM_HEADS, sizes.head_size, **heads),
            keys=torch.full((sizes.num_tokens, NUM_KV_HEADS, sizes.head_size), INFINITY, **heads),
            values=torch.full((sizes.num_tokens, NUM_KV_HEADS, sizes.head_size), INFINITY, **heads),
            outputs=torch.zeros(num_groups, sizes.num_tokens, NUM_HEADS, sizes.head_size, **heads),
            host=host,
        )

    @property
    def num_reqs(self) -> int:
        """Batch rows launched."""
        return int(self.idx_mapping.numel())

    @property
    def num_tokens(self) -> int:
        """Tokens launched."""
        return int(self.positions.numel())

    def set(self, batch: list[Scheduled]) -> None:
        """Describe a batch; queries, keys and values of its tokens are new random numbers."""
        counts = np.array([scheduled.count for scheduled in batch])
        rows = np.array([scheduled.request.row for scheduled in batch])
        computed = np.array([scheduled.request.num_computed for scheduled in batch])
        positions = np.concatenate([first + np.arange(count) for first, count in zip(computed, counts, strict=True)])
        padding, total = self.num_reqs - len(batch), int(counts.sum())
        for name, values in (
            ("idx_mapping", np.pad(rows, (0, padding), constant_values=-1)),
            ("query_start_loc", np.concatenate(([0], np.cumsum(counts), np.full(padding, total)))),
            ("positions", np.pad(positions, (0, self.num_tokens - total), constant_values=3)),
            ("num_computed_tokens", np.pad(computed, (0, padding))),
            ("seq_lens", np.pad(computed + counts, (0, padding))),
        ):
            self.host[name][:] = values
            getattr(self, name).copy_(torch.from_numpy(self.host[name]))
        self.queries.normal_()
        for new in (self.keys, self.values):
            new.normal_()
            new[total:] = INFINITY


class Layer:
    """One attention layer: its cache on the device, and everything that was ever put there.

    Attributes:
        group: its group.
        keys, values: [num_kernel_blocks, Bk, NUM_KV_HEADS, head_size], what kernels read and write.
        expected: the same two, as they must be.
        history: row -> [num_computed, 2, NUM_KV_HEADS, head_size] on the host, the request's keys and values.
    """

    def __init__(self, group: bt.KVCacheGroup, sizes: Sizes, dtype: torch.dtype, device: str) -> None:
        self.group = group
        shape = (sizes.num_blocks, group.tokens_per_column, NUM_KV_HEADS, sizes.head_size)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.expected = [self.keys.clone(), self.values.clone()]
        self.history: dict[int, torch.Tensor] = {}

    def fill(self, unwritten: float, null_block: float) -> None:
        """Say what slots hold that no token was written to, and what those of the NULL block hold."""
        for cache in (self.keys, self.values):
            cache.fill_(unwritten)
            cache[: self.group.blocks_per_kv_block] = null_block
        self.expected = [self.keys.clone(), self.values.clone()]

    def take(self, scheduled: Scheduled, blocks: list[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Note the keys and values of a request's tokens, [count, NUM_KV_HEADS, head_size], and where they belong."""
        request, block_size = scheduled.request, self.group.block_size
        positions = range(request.num_computed, request.num_computed + scheduled.count)
        slots = [blocks[position // block_size] * block_size + position % block_size for position in positions]
        for expected, new in zip(self.expected, (keys, values), strict=True):
            expected.flatten(0, 1)[torch.tensor(slots, device=expected.device)] = new
        both = torch.stack((keys, values), 1).cpu()
        past = self.history.get(request.row)
        self.history[request.row] = both if past is None else torch.cat((past, both))

    def attend(self, scheduled: Scheduled, queries: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return dense attention, [count, NUM_HEADS, head_size] float64, and the largest value that it may mix."""
        keys, values = self.history[scheduled.request.row].double().unbind(1)
        output = attend_densely(queries, keys, values, self.group.sliding_window)
        return output, float(values.abs().max())


def attend_densely(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sliding_window: int | None
) -> torch.Tensor:
    """Return causal attention of a request's last tokens over all of its tokens, in float64.

    Args:
        queries: [count, NUM_HEADS, head_size], of the last `count` tokens.
        keys, values: [num_tokens, NUM_KV_HEADS, head_size].
        sliding_window: tokens, the current one included. None: all.
    """
    keys, values = (part.double().repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * queries.shape[-1] ** -0.5
    key_position = torch.arange(keys.shape[0], device=keys.device)
    position = key_position[keys.shape[0] - queries.shape[0] :, None]
    is_seen = key_position <= position
    if sliding_window is not None:
        is_seen &= key_position > position - sliding_window
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
    # What is not seen may hold anything: weights of 0 would not keep NaN out.
    seen = is_seen.any(0)
    return torch.einsum("hqk,khd->qhd", weights[..., seen], values[seen])


class Engine:
    """Serves random requests over one table, a batch at a time.

    Attributes:
        table: the table under test.
        sizes: of the largest launch.
        layers: one for each group.
    """

    def __init__(self, table: bt.BlockTable, sizes: Sizes, dtype: torch.dtype, device: str, seed: int) -> None:
        self.table = table
        self.sizes = sizes
        self.layers = [Layer(group, sizes, dtype, device) for group in table.config.groups]
        self._random = random.Random(seed)
        self._free = [list(range(1, group.num_blocks or 0)) for group in table.config.groups]
        self._requests: dict[int, Request] = {}

    def schedule(self, inputs: Inputs) -> list[Scheduled]:
        """Choose a batch that a launch takes, and give its rows the blocks that it needs; in decode a token each."""
        self._finish()
        if not self._requests or inputs.num_tokens > inputs.num_reqs:
            self._admit()
        waiting = list(self._requests.values())
        self._random.shuffle(waiting)
        batch: list[Scheduled] = []
        start = 0
        for request in waiting[: self._random.randint(inputs.num_reqs // 2, inputs.num_reqs)]:
            rest = min(request.num_tokens - request.num_computed, inputs.num_tokens - start)
            count = min(rest, self._random.choice((1, 7, 25, 40)) if inputs.num_tokens > inputs.num_reqs else 1)
            if rest > 0:
                self._grow(request, request.num_computed + count)
                batch.append(Scheduled(request, start, count))
                start += count
        return batch

    def take(self, batch: list[Scheduled], inputs: Inputs) -> None:
        """Note what a batch writes."""
        for scheduled in batch:
            new = inputs.keys[scheduled.tokens], inputs.values[scheduled.tokens]
            for layer, blocks in zip(self.layers, scheduled.request.blocks, strict=True):
                layer.take(scheduled, blocks, *new)

    def advance(self, batch: list[Scheduled]) -> None:
        """Count a batch's tokens as computed, and let go of the blocks that a window has left."""
        for scheduled in batch:
            request = scheduled.request
            request.num_computed += scheduled.count
            for group, layer in enumerate(self.layers):
                window, blocks = layer.group.sliding_window, request.blocks[group]
                if window is None:
                    continue
                gone = max(0, request.num_computed - window + 1) // layer.group.block_size
                freed = [block for block in blocks[:gone] if block]
                if freed:
                    self.table.null_range(request.row, group, 0, gone)
                    self._free[group].extend(freed)
                    blocks[:gone] = [0] * gone

    def _finish(self) -> None:
        for row, request in list(self._requests.items()):
            if request.num_computed == request.num_tokens:
                self.table.clear_row(row)
                for free, blocks in zip(self._free, request.blocks, strict=True):
                    free.extend(block for block in blocks if block)
                for layer in self.layers:
                    layer.history.pop(row, None)
                del self._requests[row]

    def _admit(self) -> None:
        """Give every free row a request."""
        for row in range(self.sizes.num_rows):
            if row not in self._requests:
                num_tokens = self._random.randint(self.sizes.max_model_len // 4, self.sizes.max_model_len)
                self._requests[row] = Request(row, num_tokens, blocks=[[] for _ in self.layers])

    def _grow(self, request: Request, num_tokens: int) -> None:
        new = []
        for free, blocks, layer in zip(self._free, request.blocks, self.layers, strict=True):
            missing = -(-num_tokens // layer.group.block_size) - len(blocks)
            new.append([free.pop(self._random.randrange(len(free))) for _ in range(missing)])
            blocks.extend(new[-1])
        self.table.append_row(request.row, new)
