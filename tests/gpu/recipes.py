"""The recipes of docs/exports.md over a backend, with plain torch and with FlashInfer, against dense attention."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from attention_kernels import DEVICE, ON_GPU
from csr_kernels import append_with_torch
from serving import ERRORS, INFINITY

import blocktable as bt

PAGE = Path(__file__).parents[2] / "docs/exports.md"
BLOCK, CHUNK, HEADS, DIM = 16, 64, 4, 64 if ON_GPU else 16
NUM_ROWS, MAX_LEN, NUM_SEEDS = 4, 256, 4
WINDOWS = (1, 20, 64)


def page(*, has_flashinfer: bool = False) -> Any:
    """Return what the page's code defines; without FlashInfer its kernel is left out, and torch appends."""
    text = PAGE.read_text()
    names: dict[str, Any] = {"flashinfer": SimpleNamespace(append_paged_kv_cache=append_with_torch)}
    for mark in ("plain", "chunks", "cascade", "window", *(["flashinfer"] if has_flashinfer else []), "append"):
        (source,) = re.findall(rf"<!-- {mark} -->\n```python\n(.*?)```", text, re.DOTALL)
        exec(source, names)
    return SimpleNamespace(**names)


@dataclass(frozen=True)
class Case:
    """Requests in a table, and a step of them.

    Attributes:
        table: holds their rows.
        rows, num_computed_tokens, seq_lens: as lists, one for each request.
        cache: [blocks, 2, BLOCK, HEADS, DIM].
        query: [T, HEADS, DIM], of the tokens from num_computed_tokens on.
    """

    table: bt.BlockTable
    rows: list[int]
    num_computed_tokens: list[int]
    seq_lens: list[int]
    cache: torch.Tensor
    query: torch.Tensor

    @classmethod
    def draw(cls, table: bt.BlockTable, dtype: torch.dtype, seed: int, *, num_shared: int = 0, is_decode: bool) -> Case:
        """Fill some rows, which share their first `num_shared` blocks, and choose a step's tokens."""
        random_, made = random.Random(seed), torch.Generator().manual_seed(seed)
        num_blocks = table.config.groups[0].num_blocks or 0
        blocks = random_.sample(range(1, num_blocks), num_blocks - 1)
        shared = [blocks.pop() for _ in range(num_shared)]
        rows = random_.sample(range(NUM_ROWS), 3)
        counts = [1 if is_decode else random_.choice((1, 7, 40, 90)) for _ in rows]
        computed = [random_.randrange(num_shared * BLOCK, MAX_LEN - 90) for _ in rows]
        seq_lens = [first + count for first, count in zip(computed, counts, strict=True)]
        for row, seq_len in zip(rows, seq_lens, strict=True):
            table.set_row(row, [*shared, *(blocks.pop() for _ in range(-(-seq_len // BLOCK) - num_shared))])
        table.commit()
        shapes = (num_blocks, 2, BLOCK, HEADS, DIM), (sum(counts), HEADS, DIM)
        cache, query = (torch.randn(shape, generator=made).to(DEVICE, dtype) for shape in shapes)
        return cls(table, rows, computed, seq_lens, cache, query)

    @property
    def starts(self) -> np.ndarray:
        """First token of each request, [N + 1] int32."""
        counts = np.array(self.seq_lens) - self.num_computed_tokens
        return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)

    def error(self, output: torch.Tensor, is_seen: Callable[[Any, Any], Any]) -> float:
        """Return how far an output is from dense attention, in epsilons times the largest value of the cache."""
        dense = []
        for i, (row, seq_len) in enumerate(zip(self.rows, self.seq_lens, strict=True)):
            blocks = self.cache.cpu().double()[torch.from_numpy(self.table.host_row(0, row)).long()]
            key, value = (blocks[:, kind].flatten(0, 1)[:seq_len] for kind in (0, 1))
            query = self.query.cpu().double()[self.starts[i] : self.starts[i + 1]]
            token = torch.arange(seq_len)
            position = token[self.num_computed_tokens[i] :, None]
            hidden = ~is_seen(position, token) | (token > position)
            scores = torch.einsum("thd,shd->ths", query, key) / DIM**0.5
            weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
            dense.append(torch.einsum("ths,shd->thd", weights, value))
        distance = (output.cpu().double() - torch.cat(dense)).abs().max()
        return float(distance / (torch.finfo(output.dtype).eps * self.cache.abs().max()))


def make_table(backend: str) -> bt.BlockTable:
    """Return a table for the cases."""
    config = bt.BlockTableConfig(
        groups=[bt.KVCacheGroup(block_size=BLOCK, num_blocks=NUM_ROWS * MAX_LEN // BLOCK + 1)],
        max_num_reqs=NUM_ROWS,
        max_num_batched_tokens=MAX_LEN + 32,
        max_model_len=MAX_LEN,
    )
    return bt.BlockTable(config, backend, DEVICE)


def local_attention(code: Any, kernel: Any, table: bt.BlockTable, dtype: torch.dtype) -> float:
    """Attention inside chunks, over steps that begin and end anywhere."""
    made = kernel(table, capacity=NUM_ROWS * MAX_LEN // BLOCK, max_batch=16)
    worst = 0.0
    for seed in range(NUM_SEEDS):
        case = Case.draw(table, dtype, seed, is_decode=False)
        requests = case.rows, case.num_computed_tokens, case.seq_lens
        output = code.local_attention(made, case.query, case.cache, *requests, CHUNK)
        worst = max(worst, case.error(output, lambda query, key: query // CHUNK == key // CHUNK))
    return worst


def cascade(code: Any, kernel: Any, table: bt.BlockTable, dtype: torch.dtype) -> float:
    """Decode over a shared prefix of 0 to 5 blocks."""
    prefix, suffix = kernel(table), kernel(table)
    worst = 0.0
    for seed in range(NUM_SEEDS):
        case = Case.draw(table, dtype, seed, num_shared=(0, 1, 2, 5)[seed % 4], is_decode=True)
        output = code.cascade(prefix, suffix, case.query, case.cache, case.rows, case.seq_lens, BLOCK)
        worst = max(worst, case.error(output, lambda query, key: query >= key))
    return worst


def window_attention(code: Any, kernel: Any, table: bt.BlockTable, dtype: torch.dtype) -> float:
    """Attention inside windows, over lists as short as they are."""
    made = kernel(table)
    worst = 0.0
    for seed in range(NUM_SEEDS):
        case = Case.draw(table, dtype, seed, is_decode=seed % 2 == 1)
        requests = case.rows, case.num_computed_tokens, case.seq_lens
        for window in WINDOWS:
            output = code.window_attention(made, case.query, case.cache, *requests, BLOCK, window)
            worst = max(worst, case.error(output, partial(is_within, window)))
    return worst


def is_within(window: int, query: Any, key: Any) -> Any:
    """Return where a query sees a key through a window."""
    return query - key < window


def append(code: Any, _kernel: Any, table: bt.BlockTable, dtype: torch.dtype) -> float:
    """Keys and values written through the CSR and the request of each token, tokens of padding left out."""
    out = table.create_export("token_requests")
    for seed in range(NUM_SEEDS):
        case = Case.draw(table, dtype, seed, is_decode=False)
        rows, seq_lens = (np.array(numbers, np.int32) for numbers in (case.rows, case.seq_lens))
        spans = [range(*span) for span in zip(case.num_computed_tokens, case.seq_lens, strict=True)]
        new = torch.full((case.query.shape[0] + 5, 2, HEADS, DIM), INFINITY, dtype=dtype, device=DEVICE)
        new[:-5].normal_()
        expected = case.cache.clone()
        for row, span, first in zip(case.rows, spans, case.starts, strict=False):
            blocks = table.host_row(0, row)
            for i, position in enumerate(span):
                expected[blocks[position // BLOCK], :, position % BLOCK] = new[first + i]
        positions = torch.tensor([*(position for span in spans for position in span), *[0] * 5], device=DEVICE)
        pages = table.export("flashinfer", rows, seq_lens=seq_lens)
        code.append(table, pages, out, new[:, 0], new[:, 1], case.cache, rows, case.starts, positions)
        assert torch.equal(case.cache, expected), "the cache is not what it must be, bit for bit"
    return 0.0


RECIPES = (local_attention, cascade, window_attention, append)


def kernels(*, has_flashinfer: bool) -> list[str]:
    """Return the names of the page's kernels that can run."""
    return ["PlainTorch", *(["FlashInfer"] if has_flashinfer else [])]


def judge(kernel: str, backend: str) -> list[str]:
    """Return a line for each recipe; a failed one begins with FAIL."""
    is_flashinfer = kernel == "FlashInfer"
    dtype = "float16" if is_flashinfer else "float32"
    lines = []
    for recipe in RECIPES:
        label = f"{backend} {dtype}: {recipe.__name__} of docs/exports.md with {kernel}"
        try:
            code = page(has_flashinfer=is_flashinfer)
            worst = recipe(code, getattr(code, kernel), make_table(backend), getattr(torch, dtype))
        except bt.UnsupportedError as error:
            lines.append(f"ABSENT {label}: {error}")
        except Exception as error:  # one recipe must not hide what the others do
            lines.append(f"FAIL {label}: {type(error).__name__}: {' '.join(str(error).split())[:600]}")
        else:
            verdict = "PASS" if worst <= ERRORS[dtype] else "FAIL"
            lines.append(f"{verdict} {label}: worst error {worst:.2f} of {ERRORS[dtype]} epsilons")
    return lines
