"""Attention through a block table, and writes of keys and values through a slot mapping: in plain torch.

It gives one context-parallel rank's part: the mean over the keys that this rank holds, and the log of the sum of their
weights, by which `merge` puts the parts together. In a world of one the part is the whole.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import blocktable as bt

Part = tuple[Tensor, Tensor]
"""Mean [num_tokens, num_heads, head_size], log of the sum of weights [num_tokens, num_heads]."""


@dataclass
class View:
    """What the layers of a group read of its table in one step; `shard` says which positions this rank holds."""

    block_table: Tensor  # [num_reqs, width] int32. Batch row -> kernel blocks
    slots: Tensor  # [num_tokens] int64. Where a token's key and value go; -1: nowhere on this rank
    tokens_per_column: int
    shard: bt.ContextParallel


def attend_in_torch(query: Tensor, key: Tensor, value: Tensor, kv: Tensor, view: View, batch: Any, window: int) -> Part:
    """Write, then attend to what is in the cache. For the CPU: it looks at values; a GPU has attention_kernel.py.

    Args:
        query, key, value: [num_tokens, num_heads, head_size]. The query is scaled.
        kv: [2, num_slots, num_heads, head_size]. The layer's cache.
        view: the group's table.
        batch: model_runner.Batch.
        window: tokens that a query sees, its own included.
    """
    kept = view.slots >= 0
    kv[:, view.slots[kept]] = torch.stack((key[kept], value[kept]))
    world, rank, turn = view.shard.world_size, view.shard.rank, view.shard.interleave_size
    local = torch.arange(view.shard.local_lengths(int(batch.positions.max()) + 1), device=query.device)
    positions = local // turn * (world * turn) + rank * turn + local % turn  # the inverse of R12
    columns = view.block_table[:, local // view.tokens_per_column].long()  # [num_reqs, num_local]
    slots = columns * view.tokens_per_column + local % view.tokens_per_column
    keys, values = kv[:, slots[batch.requests]]  # [num_tokens, num_local, num_heads, head_size] each
    age = batch.positions[:, None] - positions  # [num_tokens, num_local]
    is_seen = (age >= 0) & (age < window)
    scores = torch.einsum("thd,tlhd->thl", query, keys).masked_fill(~is_seen[:, None, :], -torch.inf)
    log_sums = torch.logsumexp(scores, -1)
    weights = (scores - log_sums[..., None]).exp().nan_to_num(0.0)  # none of a token's keys may be here
    return torch.einsum("thl,tlhd->thd", weights, values), log_sums


def merge(parts: list[Part]) -> Tensor:
    """Put the ranks' parts together: each counts as much as the sum of its weights."""
    means, log_sums = (torch.stack(column) for column in zip(*parts, strict=True))
    return (torch.softmax(log_sums, 0)[..., None] * means).sum(0)
