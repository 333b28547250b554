"""The same in one Triton kernel: writes through the slot mapping, and attention through the block table."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention import Part, View


@triton.jit
def _attend_to_tile(query, keys, values, is_seen, best, total, mean):
    """One step of an online softmax."""
    scores = tl.where(is_seen, tl.sum(keys * query[None, :], 1), -float("inf"))
    new_best = tl.maximum(best, tl.max(scores, 0))
    weights, shrink = tl.exp(scores - new_best), tl.exp(best - new_best)
    return new_best, total * shrink + tl.sum(weights, 0), mean * shrink + tl.sum(weights[:, None] * values, 0)


# fmt: off
@triton.jit
def _paged_attention(
    out, log_sums,  # [num_tokens, num_heads, head_size], [num_tokens, num_heads]
    query, key, value,  # [num_tokens, num_heads, head_size]
    kv, values_start,  # [2, num_slots, num_heads, head_size]; where its second half begins
    block_table, table_stride,  # [num_reqs, width] int32
    slots, positions, requests,  # [num_tokens] int64; a request is a batch row
    query_start_loc, num_computed_tokens,  # [num_reqs + 1] int32; [num_reqs] int32, tokens before this step
    window, world_size, rank, interleave_size,
    tokens_per_column: tl.constexpr, head_size: tl.constexpr, tile: tl.constexpr,
):
    """One token and one head. No program reads what another one writes in this launch."""
    # fmt: on
    token, head, num_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    dims, lanes = tl.arange(0, head_size), tl.arange(0, tile)
    own = (token * num_heads + head) * head_size + dims
    # step 1: keep this token's key and value where its slot says
    slot = tl.load(slots + token + 0 * dims)  # one for all lanes: the interpreter of triton 3.9 cannot spread a mask
    kept = kv + (slot * num_heads + head) * head_size + dims
    tl.store(kept, tl.load(key + own), mask=slot >= 0)
    tl.store(kept + values_start, tl.load(value + own), mask=slot >= 0)
    # step 2: attend to what earlier steps have left in the cache, through the block table
    request, position, scaled = tl.load(requests + token), tl.load(positions + token), tl.load(query + own)
    computed = tl.load(num_computed_tokens + request).to(tl.int64)
    turn = world_size * interleave_size
    rest = tl.minimum(tl.maximum(computed % turn - rank * interleave_size, 0), interleave_size)
    num_local = computed // turn * interleave_size + rest  # R19
    mean = scaled * 0.0
    total = tl.sum(mean, 0)
    best = total - 1e30  # finite: a tile in which nothing is seen must not give inf - inf
    start = computed * 0
    while start < num_local:
        local = start + lanes
        there = local // interleave_size * turn + rank * interleave_size + local % interleave_size
        is_seen = (local < num_local) & (position - there < window)
        block = tl.load(block_table + request * table_stride + local // tokens_per_column, mask=is_seen, other=0)
        place = block.to(tl.int64) * tokens_per_column + local % tokens_per_column
        cells = kv + ((place * num_heads + head) * head_size)[:, None] + dims[None, :]
        keys = tl.load(cells, mask=is_seen[:, None], other=0.0)
        values = tl.load(cells + values_start, mask=is_seen[:, None], other=0.0)
        best, total, mean = _attend_to_tile(scaled, keys, values, is_seen, best, total, mean)
        start += tile
    # step 3: and to this step's tokens up to its own, as far as this rank keeps them
    start = tl.load(query_start_loc + request).to(tl.int64)
    while start <= token:
        other = start + lanes
        is_seen = (other <= token) & (token - other < window)
        is_seen = is_seen & (tl.load(slots + other, mask=is_seen, other=-1) >= 0)
        cells = ((other * num_heads + head) * head_size)[:, None] + dims[None, :]
        keys = tl.load(key + cells, mask=is_seen[:, None], other=0.0)
        values = tl.load(value + cells, mask=is_seen[:, None], other=0.0)
        best, total, mean = _attend_to_tile(scaled, keys, values, is_seen, best, total, mean)
        start += tile
    total = tl.where(total > 0, total, 1.0)  # none of the token's keys may be here
    tl.store(out + own, mean / total)
    tl.store(log_sums + token * num_heads + head, best + tl.log(total))


def attend_in_triton(
    query: Tensor, key: Tensor, value: Tensor, kv: Tensor, view: View, batch: Any, window: int
) -> Part:
    """As `attend_in_torch`, in one launch that waits for nothing. TRITON_INTERPRET=1 runs it on the CPU."""
    (num_tokens, num_heads, head_size), shard = query.shape, view.shard
    out, log_sums = torch.empty_like(query), query.new_empty(num_tokens, num_heads)
    # fmt: off
    _paged_attention[(num_tokens, num_heads)](
        out, log_sums, query.contiguous(), key.contiguous(), value.contiguous(), kv, kv.stride(0),
        view.block_table, view.block_table.stride(0), view.slots, batch.positions, batch.requests,
        batch.query_start_loc, batch.num_computed_tokens, window, shard.world_size, shard.rank, shard.interleave_size,
        tokens_per_column=view.tokens_per_column, head_size=head_size, tile=32,
    )
    # fmt: on
    return out, log_sums
