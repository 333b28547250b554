"""Serves a set of requests in one way of many, and holds the result against the dense cache, token for token."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import torch

import blocktable as bt
from attention import Part, attend_in_torch
from model import ModelConfig, Transformer
from model_runner import ModelRunner
from proof.dense_cache import generate
from proof.rank_link import RankLink
from scheduler import Scheduler

NUM_DRAFTS = 3
NUM_BEST = 4
FEATURES = (
    "mixed batches",
    "chunked prefills",
    "shared blocks",
    "preemptions",
    "resumes",
    "drafts accepted",
    "rollbacks",
    "blocks rolled back",
    "forks",
    "copies on write",
    "copies of states",
    "evictions",
)
"""What must have happened at least once, in whatever way the requests are served."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to serve. `world_size`: context-parallel ranks, all in this process; `attention`: "torch" or "triton"."""

    backend: str = "numpy"
    rows: str = "stable"
    graphs: str = "off"
    device: str = "cpu"
    world_size: int = 1
    interleave_size: int = 1
    attention: str = "torch"

    def __str__(self) -> str:
        return (
            f"{self.backend} on {self.device}, {self.rows} rows, graphs {self.graphs}, W {self.world_size}, "
            f"I {self.interleave_size}, attention in {self.attention}"
        )

    @property
    def features(self) -> tuple[str, ...]:
        dense = ("move_row", "permute_rows") if self.rows == "dense" else ()
        return (*FEATURES, *dense, *(("graph replays",) if self.graphs == "on" else ()))


@dataclass
class Result:
    """What came of a variant: the requests whose tokens differ, what never happened, blocks that nobody gave back.

    `findings`: what the tables' checkers found, where BLOCKTABLE_CHECK has them look.
    """

    wrong: list[tuple[int, int]]
    missing: list[str]
    num_leaked: int
    findings: list[bt.Finding]
    counts: Counter[str]
    smallest_gap: float
    seconds: float
    num_requests: int
    num_tokens: int
    finished: dict[tuple[int, int], list[int]]

    @property
    def is_pass(self) -> bool:
        return not (self.wrong or self.missing or self.num_leaked or self.findings)

    def report(self, variant: Variant) -> str:
        """Return a verdict, what was served, and how often each feature was used."""
        counts = ", ".join(f"{feature.replace('_', ' ')} {self.counts[feature]}" for feature in variant.features)
        return (
            f"{'PASS' if self.is_pass else 'FAIL'} {variant}: {self.num_requests} requests, {self.num_tokens} new "
            f"tokens, {self.counts['steps']} steps in {self.seconds:.1f} s; smallest gap of the two best logits "
            f"{self.smallest_gap:.1e}; {counts}"
            + (f"; other tokens in requests {self.wrong}" if self.wrong else "")
            + (f"; never happened: {', '.join(self.missing)}" if self.missing else "")
            + (f"; blocks still held: {self.num_leaked}" if self.num_leaked else "")
            + "".join(f"\nstep {finding.step}: {finding.message}" for finding in self.findings)
        )


def all_variants(device: str) -> list[Variant]:
    """Return every backend with both kinds of rows, without and with graphs, and each way to share tokens."""
    own = Variant(device=device, attention="torch" if device == "cpu" else "triton")
    every_backend = [
        replace(own, backend=backend, rows=rows, graphs=graphs)
        for backend in ("numpy", "triton", "cupy", "numba")
        for rows in ("stable", "dense")
        for graphs in ("off", "on")
        if (device, backend, graphs) != ("cuda", "numpy", "on")  # its tables are on the host
    ]
    every_share = [
        replace(own, backend="numpy" if device == "cpu" else "triton", world_size=size, interleave_size=turn, rows=rows)
        for size in (1, 2, 4)
        for turn in (1, 16)
        for rows in ("stable", "dense")
    ]
    shared = [replace(own, backend=backend, world_size=2, interleave_size=16) for backend in ("cupy", "numba")]
    return every_backend + every_share + shared


@cache
def requests() -> tuple[tuple[list[int], int, int], ...]:
    """Return the prompt, the number of new tokens and the number of samples of each request."""
    chooser = random.Random(10)

    def tokens(least: int, most: int) -> list[int]:
        return [chooser.randrange(ModelConfig.vocab_size) for _ in range(chooser.randint(least, most))]

    system_prompt = tokens(64, 64)
    made = []
    for number in range(16):
        prompt = system_prompt + tokens(4, 40) if number % 3 == 0 else tokens(4, 50)
        made.append((prompt, chooser.randint(8, 40), 3 if number in (2, 4, 9) else 1))
    return tuple(made)


@cache
def model_of(device: str) -> Transformer:
    """Return the model; in float64 on a CPU, in float32 on a GPU."""
    return Transformer(ModelConfig(), torch.device(device), torch.float64 if device == "cpu" else torch.float32)


@cache
def truth(device: str, number: int) -> dict[tuple[int, int], list[int]]:
    """Return what the dense cache generates for the samples of a request, by (number, sample)."""
    prompt, num_new_tokens, num_samples = requests()[number]
    return {
        (number, sample): generate(model_of(device), prompt, num_new_tokens, sample) for sample in range(num_samples)
    }


def attention(library: str) -> Callable[..., Part]:
    """Return the attention in plain torch, or the one in Triton, which not every machine has."""
    if library == "torch":
        return attend_in_torch
    from attention_kernel import attend_in_triton

    return attend_in_triton


def table_config(shard: bt.ContextParallel) -> bt.BlockTableConfig:
    """Return the geometry: caches too small for all requests together, in blocks that the ranks can share."""
    turn = shard.interleave_size
    size, window_size = (8, 4) if turn == 1 else (turn, turn)
    num_blocks = [2 + max(8, 280 // (block_size * shard.world_size)) for block_size in (size, window_size)]
    return bt.BlockTableConfig(
        groups=[
            bt.KVCacheGroup(block_size=size, kernel_block_size=size // 2, num_blocks=num_blocks[0]),
            bt.KVCacheGroup(
                block_size=window_size, sliding_window=ModelConfig.window, num_blocks=num_blocks[1], allow_null=True
            ),
            bt.KVCacheGroup(block_size=1, slot_mode="none", blocks_per_row=1 + NUM_DRAFTS, num_blocks=40),
        ],
        max_num_reqs=8,
        max_num_batched_tokens=40,
        max_model_len=150,
        lookahead_tokens=NUM_DRAFTS,
        context_parallel=shard,
    )


def run(
    variant: Variant,
    shards: Sequence[bt.ContextParallel] | None = None,
    exchange: Callable[[list[Part]], list[Part]] = list,
    numbers: Iterable[int] | None = None,
    link: RankLink | None = None,
    record: str | None = None,
) -> Result:
    """Serve the requests and compare.

    Args:
        variant: how.
        shards: of the ranks in this process. None: all ranks.
        exchange: as ModelRunner's.
        numbers: which requests. None: all.
        link: as ModelRunner's.
        record: file for a recording of the first rank's table.
    """
    size, turn = variant.world_size, variant.interleave_size
    shards = shards or [bt.ContextParallel(world_size=size, rank=rank, interleave_size=turn) for rank in range(size)]
    model = model_of(variant.device)
    numbers = sorted(range(len(requests())) if numbers is None else set(numbers))
    wanted = {name: tokens for number in numbers for name, tokens in truth(variant.device, number).items()}
    started = time.perf_counter()
    runner = ModelRunner(
        model,
        [table_config(shard) for shard in shards],
        variant.backend,
        is_dense=variant.rows == "dense",
        num_best=NUM_BEST,
        attention=attention(variant.attention),
        graph_sizes=(2, 4, 8) if variant.graphs == "on" else (),
        exchange=exchange,
        link=link,
    )
    scheduler = Scheduler(runner, max_chunk=16)
    for number in numbers:
        scheduler.add(number, *requests()[number])
    with nullcontext() if record is None else runner.ranks[0].table.record(record):
        while scheduler.step():
            pass
    seconds = time.perf_counter() - started
    while any(scheduler.prefixes.evict(group) for group in scheduler.groups):
        pass
    runner.share_rows()
    for rank in runner.ranks:
        rank.table.commit()
        rank.table.verify()
    return Result(
        wrong=[name for name, tokens in wanted.items() if scheduler.finished.get(name) != tokens],
        missing=[feature for feature in variant.features if not runner.counts[feature]],
        num_leaked=sum(sum(pool.num_holders) for pool in scheduler.pools)
        + sum(int(rank.table.num_blocks_per_row.sum()) for rank in runner.ranks),
        counts=runner.counts,
        smallest_gap=scheduler.smallest_gap,
        seconds=seconds,
        findings=[finding for rank in runner.ranks for finding in rank.table.collect_findings()],
        num_requests=len(wanted),
        num_tokens=sum(map(len, wanted.values())),
        finished=scheduler.finished,
    )
