"""The three kinds of attention of docs/exports.md, run as they stand, against dense attention. Rules: R34, R37."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blocktable as bt

torch: Any = pytest.importorskip("torch", reason="torch is not installed: tox -e torch")
pytestmark = pytest.mark.torch

GPU_TESTS = str(Path(__file__).parent / "gpu")
sys.path.insert(0, GPU_TESTS)
try:
    import recipes
finally:
    sys.path.remove(GPU_TESTS)

BLOCK, CHUNK, HEADS, DIM, WIDTH = 4, 8, 2, 6, 12
NUM_ROWS, MAX_LEN = 4, 40


page = recipes.page()


def make_table() -> bt.BlockTable:
    config = bt.BlockTableConfig(
        groups=[bt.KVCacheGroup(block_size=BLOCK, num_blocks=60)],
        max_num_reqs=NUM_ROWS,
        max_num_batched_tokens=64,
        max_model_len=MAX_LEN,
    )
    return bt.BlockTable(config, "numpy")


def dense(query: Any, key: Any, value: Any, hidden: Any) -> Any:
    scores = torch.einsum("thd,shd->ths", query, key) / DIM**0.5
    return torch.einsum("ths,shd->thd", scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1), value)


class Model:
    """Two layers of attention with random weights, in double precision."""

    def __init__(self, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.layers = torch.randn(2, 3, WIDTH, HEADS * DIM, generator=made, dtype=torch.float64)
        self.back = torch.randn(2, HEADS * DIM, WIDTH, generator=made, dtype=torch.float64)
        self.embedding = torch.randn(50, WIDTH, generator=made, dtype=torch.float64)

    def run(self, tokens: Sequence[int], attention: Any) -> Any:
        """Return what comes after the last layer. attention: of (layer, query, key, value), [T, HEADS, DIM] each."""
        hidden = self.embedding[list(tokens)]
        for layer in range(2):
            parts = (hidden @ self.layers[layer]).unflatten(-1, (HEADS, DIM))
            hidden = hidden + torch.tanh(attention(layer, *parts).flatten(1) @ self.back[layer])
        return hidden


def dense_run(model: Model, tokens: Sequence[int], is_seen: Any) -> Any:
    position = torch.arange(len(tokens))
    hidden = ~is_seen(position[:, None], position) | (position > position[:, None])
    return model.run(tokens, lambda _layer, query, key, value: dense(query, key, value, hidden))


class PagedRun:
    """Requests that run step by step, in pieces of any size, over a table and one cache a layer."""

    def __init__(self, requests: Sequence[Sequence[int]], seed: int) -> None:
        self.table, self.requests, self.draw = make_table(), requests, random.Random(seed)
        self.caches = torch.full((2, 60, 2, BLOCK, HEADS, DIM), torch.nan, dtype=torch.float64)
        self.free = self.draw.sample(range(1, 60), 59)
        self.rows = self.draw.sample(range(NUM_ROWS), len(requests))
        self.done = [0] * len(requests)

    def step(self, model: Model, attention: Any) -> list[Any]:
        """Run a piece of each request; return what came out, one [piece, WIDTH] for each."""
        computed = list(self.done)
        for i, request in enumerate(self.requests):
            piece = self.draw.choice([1, 1, 2, 7, 11])
            self.done[i] = min(len(request), computed[i] + piece)
            held = self.table.num_blocks_per_row[0, self.rows[i]]
            self.table.append_row(self.rows[i], [self.free.pop() for _ in range(-(-self.done[i] // BLOCK) - held)])
        spans = [range(*span) for span in zip(computed, self.done, strict=True)]
        starts = np.cumsum([0, *map(len, spans)]).astype(np.int32)
        positions = np.array([position for span in spans for position in span], np.int64)
        step = self.table.step(np.array(self.rows, np.int32), starts, positions)
        slots = torch.from_numpy(step.slot_mappings[0]).clone()

        def paged(layer: int, query: Any, key: Any, value: Any) -> Any:
            for kind, part in enumerate((key, value)):
                self.caches[layer][slots // BLOCK, kind, slots % BLOCK] = part
            return attention(query, self.caches[layer], self.rows, computed, self.done)

        tokens = [self.requests[i][position] for i, span in enumerate(spans) for position in span]
        return list(model.run(tokens, paged).split([*map(len, spans)]))

    @property
    def is_done(self) -> bool:
        return self.done == [*map(len, self.requests)]


def check_paged_run(attention: Any, is_seen: Any, seed: int) -> None:
    draw, model = random.Random(seed), Model(seed)
    requests = [[draw.randrange(50) for _ in range(draw.choice([1, 8, 15, 33, MAX_LEN]))] for _ in range(3)]
    run = PagedRun(requests, seed)
    found: list[list[Any]] = [[] for _ in requests]
    paged = attention(run.table)
    while not run.is_done:
        for parts, part in zip(found, run.step(model, paged), strict=True):
            parts.append(part)
    for request, parts in zip(requests, found, strict=True):
        torch.testing.assert_close(torch.cat(parts), dense_run(model, request, is_seen))


@pytest.mark.parametrize("seed", range(4))
def test_chunked_local_attention_is_dense_attention_inside_chunks(seed: int) -> None:
    def attention(table: bt.BlockTable) -> Any:
        kernel = page.PlainTorch(table, capacity=64, max_batch=24)
        return lambda *args: page.local_attention(kernel, *args, CHUNK)

    check_paged_run(attention, lambda query, key: query // CHUNK == key // CHUNK, seed)


@pytest.mark.parametrize("window", [1, 3, 4, 9])
def test_a_compact_window_list_is_dense_attention_inside_the_window(window: int) -> None:
    def attention(table: bt.BlockTable) -> Any:
        kernel = page.PlainTorch(table)
        return lambda *args: page.window_attention(kernel, *args, BLOCK, window)

    check_paged_run(attention, lambda query, key: query - key < window, window)


def test_a_compact_window_list_is_short() -> None:
    table = make_table()
    table.set_row(0, range(1, 11))
    table.commit()
    row, lens = np.zeros(1, np.int32), np.array([40], np.int32)
    whole = table.export_host("csr", row, seq_lens=lens)
    compact = table.export_host("csr", row, seq_lens=lens, first_tokens=np.array([36 - 8], np.int32))
    assert whole.indptr is not None
    assert compact.indptr is not None
    assert (whole.indptr[-1], compact.indptr[-1]) == (10, 3)


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_a_cascade_is_dense_attention(prefix: int) -> None:
    table, made = make_table(), torch.Generator().manual_seed(prefix)
    cache = torch.randn(60, 2, BLOCK, HEADS, DIM, generator=made, dtype=torch.float64)
    shared, seq_lens = [*range(40, 40 + prefix)], [4 * prefix + 1, 4 * prefix + 9, 4 * prefix + 4]
    rows = [2, 0, 3]
    for i, row in enumerate(rows):
        table.set_row(row, [*shared, 10 * i + 1, 10 * i + 2, 10 * i + 3])
    table.commit()
    query = torch.randn(3, HEADS, DIM, generator=made, dtype=torch.float64)
    got = page.cascade(page.PlainTorch(table), page.PlainTorch(table), query, cache, rows, seq_lens, BLOCK)
    for i, (row, seq_len) in enumerate(zip(rows, seq_lens, strict=True)):
        blocks = cache[torch.from_numpy(table.host_row(0, row)).long()]
        key, value = (blocks[:, kind].flatten(0, 1)[:seq_len] for kind in (0, 1))
        none = torch.zeros(1, seq_len, dtype=torch.bool)
        torch.testing.assert_close(got[i : i + 1], dense(query[i : i + 1], key, value, none))


def test_a_cascade_of_more_requests_than_its_prefix_has_tokens() -> None:
    table, made = make_table(), torch.Generator().manual_seed(1)
    cache = torch.randn(60, 2, BLOCK, HEADS, DIM, generator=made, dtype=torch.float64)
    query = torch.randn(NUM_ROWS * 2, HEADS, DIM, generator=made, dtype=torch.float64)
    for row in range(NUM_ROWS):
        table.set_row(row, [50, row + 1])
    table.commit()
    sizes = {"capacity": 32, "max_batch": NUM_ROWS * 2}
    kernels = page.PlainTorch(table, **sizes), page.PlainTorch(table, **sizes)
    got = page.cascade(*kernels, query, cache, [*range(NUM_ROWS)] * 2, [6] * NUM_ROWS * 2, BLOCK)
    for i in range(NUM_ROWS * 2):
        key, value = (cache[[50, i % NUM_ROWS + 1]][:, kind].flatten(0, 1)[:6] for kind in (0, 1))
        none = torch.zeros(1, 6, dtype=torch.bool)
        torch.testing.assert_close(got[i : i + 1], dense(query[i : i + 1], key, value, none))


def test_a_cascade_over_rows_that_share_every_block_leaves_each_its_own_token() -> None:
    table, made = make_table(), torch.Generator().manual_seed(1)
    cache = torch.randn(60, 2, BLOCK, HEADS, DIM, generator=made, dtype=torch.float64)
    table.set_row(0, [5, 6])
    table.copy_row(0, 1)
    table.commit()
    query = torch.randn(2, HEADS, DIM, generator=made, dtype=torch.float64)
    got = page.cascade(page.PlainTorch(table), page.PlainTorch(table), query, cache, [0, 1], [8, 8], BLOCK)
    key, value = (cache[[5, 6]][:, kind].flatten(0, 1) for kind in (0, 1))
    torch.testing.assert_close(got, dense(query, key, value, torch.zeros(2, 8, dtype=torch.bool)))
