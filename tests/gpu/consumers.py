"""Attention kernels that are not ours read our tables as they are, on a GPU and as far as possible without one.

    python -m blocktable_benchmarks.peers.consumers .peers
    python tests/gpu/consumers.py triton cupy numba --peers .peers

vLLM's Triton kernels (slots and the 2-D table), torch's FlexAttention (the inverse map), FlashInfer's page table (CSR),
and FlashInfer, FlashAttention 3 and varlen_attn where they are here. Each runs over changing batches with padded rows
and tokens, PAD slots and NULL blocks, captured once as a CUDA graph and replayed (eagerly where there is no GPU): real
tokens must equal dense attention within the dtype's error, and the cache must be bit for bit what it was outside the
slots of real tokens.

What each kernel needs of memory that no token was written to is part of the check: one that takes anything there runs
with NaN in the NULL block and in every unwritten slot; of one that needs it finite it is shown that NaN comes through.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # else Triton rounds the factors of float32 products to ten bits

import torch
from attention_kernels import ALL_DTYPES, DEVICE, ON_GPU, Consumer, Flex, PlainCsr, VllmTriton, optional_consumers
from serving import NAN, Engine, Inputs, Scheduled, Sizes, table_config

import blocktable as bt

GPU_SIZES = {
    "mixed": Sizes(num_reqs=8, num_tokens=96, num_blocks=192, head_size=64, num_steps=8),
    "decode": Sizes(num_reqs=8, num_tokens=8, num_blocks=192, head_size=64, num_steps=5),
}
INTERPRETED_SIZES = {
    "mixed": Sizes(num_reqs=3, num_tokens=48, num_blocks=32, head_size=16, num_steps=6),
    "decode": Sizes(num_reqs=3, num_tokens=3, num_blocks=32, head_size=16, num_steps=3),
}
SIZES = GPU_SIZES if ON_GPU else INTERPRETED_SIZES

ERRORS = {"float16": 2, "bfloat16": 2, "float32": 32}
"""Dtype -> how far an output may be from the dense one, in its epsilons times the largest value of the request.

In the short ones the weights and the output are rounded once each, by half an epsilon at most. In float32 scores are
sums over a head's dimensions, and as many roundings go into a weight.
"""


class Launches:
    """One step's launches: a graph that was captured once, or where there is no GPU the calls themselves."""

    def __init__(self, launch: Callable[[], None], after: Callable[[], None]) -> None:
        self._launch = launch
        self._after = after
        self._graph: Any = None
        launch()  # compiles; over no requests
        if ON_GPU:
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream()):
                launch()

    def run(self) -> None:
        """Run them over what the inputs hold now."""
        if self._graph is None:
            self._launch()
        else:
            self._graph.replay()
        self._after()


@dataclass
class Report:
    """What a run showed.

    Attributes:
        num_launches: steps that were checked.
        num_tokens: real tokens in them, over all groups.
        num_evicted: requests of them some of whose blocks a window had let go of.
        num_nan: those of them whose output was not finite.
        worst: the largest error, in epsilons times the largest value of the request, of finite ones.
        problems: one sentence for each cache that is not what it must be.
    """

    num_launches: int = 0
    num_tokens: int = 0
    num_evicted: int = 0
    num_nan: int = 0
    worst: float = 0.0
    problems: list[str] = field(default_factory=list)


def run(consumer: Consumer, backend: str, dtype: str, *, unwritten: float, null_block: float) -> Report:
    """Serve requests through one consumer, and check every step.

    Args:
        consumer: the kernels.
        backend: whose tables they read.
        dtype: of queries and caches.
        unwritten: what slots hold that no token was written to.
        null_block: what the slots of the NULL block hold.
    """
    sizes, kind_of_number = SIZES["mixed"], getattr(torch, dtype)
    torch.manual_seed(1)
    table = bt.BlockTable(table_config(sizes), backend, DEVICE)
    table.warmup()
    engine = Engine(table, sizes, kind_of_number, DEVICE, seed=1)
    for layer in engine.layers:
        layer.fill(unwritten, null_block)
    kinds = {}
    for kind, kind_sizes in SIZES.items():
        inputs = Inputs.empty(kind_sizes, kind_of_number, len(engine.layers), DEVICE)
        kinds[kind] = inputs, Launches(*consumer.bind(table, engine.layers, inputs))
    report = Report()
    order = ["mixed"] * SIZES["mixed"].num_steps
    for place in range(SIZES["decode"].num_steps):
        order.insert(2 + 2 * place, "decode")
    for kind in order:
        inputs, launches = kinds[kind]
        batch = engine.schedule(inputs)
        inputs.set(batch)
        engine.take(batch, inputs)
        table.commit()
        launches.run()
        check(engine, batch, inputs, dtype, report)
        engine.advance(batch)
    return report


def check(engine: Engine, batch: list[Scheduled], inputs: Inputs, dtype: str, report: Report) -> None:
    """Compare a step's outputs and caches with what they must be."""
    report.num_launches += 1
    outputs, queries = inputs.outputs.cpu().double(), inputs.queries.cpu()
    epsilon = torch.finfo(getattr(torch, dtype)).eps
    for group, layer in enumerate(engine.layers):
        for name, cache, expected in zip(("keys", "values"), (layer.keys, layer.values), layer.expected, strict=True):
            is_wrong = (bits(cache) != bits(expected)).flatten(0, 1).flatten(1).any(1)
            if is_wrong.any():
                slots = is_wrong.nonzero().flatten()[:4].tolist()
                report.problems.append(f"launch {report.num_launches}, group {group}: {name} are wrong at {slots} ..")
        for scheduled in batch:
            dense, largest = layer.attend(scheduled, queries[scheduled.tokens])
            errors = (outputs[group, scheduled.tokens] - dense).abs().flatten(1).amax(1) / (epsilon * largest)
            report.num_tokens += scheduled.count
            report.num_evicted += 0 in scheduled.request.blocks[group]
            report.num_nan += int((~errors.isfinite()).sum())
            report.worst = max(report.worst, float(errors.nan_to_num(0, 0, 0).max()))


def bits(array: torch.Tensor) -> torch.Tensor:
    """Return an array's bits as integers: NaN equals itself, and 0 differs from -0."""
    return array.view(torch.int16 if array.element_size() == 2 else torch.int32)


def judge(consumer: Consumer, backend: str, dtype: str) -> list[str]:
    """Return a line for each run; a failed one begins with FAIL."""
    label = f"{backend} {dtype}: {consumer.name}"
    try:
        with torch.cuda.stream(torch.cuda.Stream() if ON_GPU else None):  # its own: a failed capture may spoil one
            return _judge(consumer, backend, dtype, label)
    except Exception as error:  # a kernel that cannot be launched must not hide what the others do
        return [f"FAIL {label}: {type(error).__name__}: {' '.join(str(error).split())[:600]}"]


def _judge(consumer: Consumer, backend: str, dtype: str, label: str) -> list[str]:
    seconds = time.perf_counter()
    takes_anything = consumer.needs_finite is False
    unwritten, null_block = (NAN, NAN) if takes_anything else (0.5, 0.0)
    report = run(consumer, backend, dtype, unwritten=unwritten, null_block=null_block)
    problems = list(report.problems)
    if report.worst > ERRORS[dtype]:
        problems.append(f"an output is {report.worst:.2f} epsilons off, {ERRORS[dtype]} are allowed")
    if report.num_nan:
        problems.append(f"{report.num_nan} of {report.num_tokens} tokens are not finite")
    if not report.num_evicted:
        problems.append("no window let go of a block: NULL columns were not read")
    how = f"{report.num_launches} {'replays' if ON_GPU else 'eager launches'}, {report.num_tokens} tokens, "
    how += f"{report.num_evicted} times behind a window"
    memory = "NaN in the NULL block and in unwritten slots" if takes_anything else "finite memory"
    seconds = time.perf_counter() - seconds
    error = f"worst error {report.worst:.2f} of {ERRORS[dtype]} epsilons"
    lines = [f"{'FAIL' if problems else 'PASS'} {label}: {how}, {memory}, {error} ({seconds:.1f} s)"]
    lines += [f"  {problem}" for problem in problems[:5]]
    if not takes_anything:
        shown = run(consumer, backend, dtype, unwritten=0.5, null_block=NAN)
        found = f"with NaN in the NULL block {shown.num_nan} of {shown.num_tokens} tokens are not finite"
        verdict = "NOTE" if consumer.needs_finite is None else "PASS" if shown.num_nan else "FAIL"
        needs = "" if consumer.needs_finite is None else "needs the NULL block finite: "
        lines.append(f"{verdict} {label}: {needs}{found}")
    return lines


def main() -> int:
    """Run every consumer that is here over every backend, and return 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("backends", nargs="+")
    parser.add_argument("--peers", type=Path, default=Path(".peers"))
    parser.add_argument("--dtypes", nargs="+", default=ALL_DTYPES, choices=ALL_DTYPES)
    parser.add_argument("--only", default="", help="run those whose name has this in it")
    parser.add_argument("--eager-flex", action="store_true", help="do not compile FlexAttention")
    arguments = parser.parse_args()
    folders = sorted(arguments.peers.glob("consumers-*"))
    if not folders:
        sys.stdout.write(f"FAIL no vLLM under {arguments.peers}: python -m blocktable_benchmarks.peers.consumers\n")
        return 1
    # Each dtype is half a minute of compilation: the older versions take one.
    kernels = [VllmTriton(folder, ALL_DTYPES if folder == folders[-1] else ALL_DTYPES[:1]) for folder in folders]
    write = kernels[-1].write
    others, absent = optional_consumers(folders, write)
    flex = Flex(write, is_compiled=ON_GPU and not arguments.eager_flex)
    required: list[Consumer] = [*kernels, flex, PlainCsr(write)]
    num_failed, num_run = 0, 0
    for consumers in (required, others):
        for backend, dtype, consumer in product(arguments.backends, arguments.dtypes, consumers):
            if dtype in consumer.dtypes and arguments.only in consumer.name:
                lines = judge(consumer, backend, dtype)
                sys.stdout.write("\n".join(lines) + "\n")
                sys.stdout.flush()
                num_failed += sum(line.startswith("FAIL") for line in lines)
                num_run += 1
    sys.stdout.write("".join(f"ABSENT {sentence}\n" for sentence in absent))
    is_passed = num_run > 0 and num_failed == 0
    sys.stdout.write(f"{'PASS' if is_passed else 'FAIL'}: {num_run} consumers and dtypes, {num_failed} failed\n")
    return 0 if is_passed else 1


if __name__ == "__main__":
    sys.exit(main())
