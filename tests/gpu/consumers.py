"""Attention kernels that are not ours read our tables as they are, on a GPU and as far as possible without one.

    python -m blocktable_benchmarks.peers.consumers .peers
    python tests/gpu/consumers.py triton cupy numba --peers .peers

vLLM's Triton kernels (slots and the 2-D table), torch's FlexAttention (the inverse map), FlashInfer's page table (CSR),
and FlashInfer (prefill, decode, append), FlashAttention 3 and varlen_attn where they are here. Each runs over changing
batches with padded rows and tokens, PAD slots and NULL blocks, captured once as a CUDA graph and replayed (eagerly
where there is no GPU): real tokens must equal dense attention within the dtype's error, and the cache must be bit for
bit what it was outside the slots of real tokens. Then come the recipes of docs/exports.md, and on a GPU the question
whether a step's calls make the host wait.

What each kernel needs of memory that no token was written to is part of the check: one that takes anything there runs
with NaN in the NULL block and in every unwritten slot; of one that needs it finite it is shown that NaN comes through.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # else Triton rounds the factors of float32 products to ten bits

import recipes
import torch
from attention_kernels import (
    ALL_DTYPES,
    DEVICE,
    ON_GPU,
    Calls,
    Consumer,
    Flex,
    VllmTriton,
    optional_consumers,
    write_with_torch,
)
from csr_kernels import Pages, flashinfer_consumers, plain_consumers
from serving import ERRORS, NAN, Engine, Inputs, Scheduled, Sizes, table_config

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
BUSY_CYCLES = 2 * 10**8  # a tenth of a second


class Launches:
    """One step's calls, its launches a graph that was captured once, or where there is no GPU the calls themselves."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._graph: Any = None
        self.plan()
        calls.launch()  # compiles; over no requests
        if ON_GPU:
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream()):
                calls.launch()

    def plan(self) -> None:
        """Do what comes before the step's commit."""
        self._calls.plan()

    def launch(self) -> None:
        """Launch over what the inputs hold now."""
        if self._graph is None:
            self._calls.launch()
        else:
            self._graph.replay()

    def after(self) -> None:
        """Do what follows the launches."""
        self._calls.after()


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
        kinds[kind] = inputs, Launches(consumer.bind(table, engine.layers, inputs))
    report = Report()
    order = ["mixed"] * SIZES["mixed"].num_steps
    for place in range(SIZES["decode"].num_steps):
        order.insert(2 + 2 * place, "decode")
    for kind in order:
        inputs, launches = kinds[kind]
        batch = engine.schedule(inputs)
        inputs.set(batch)
        engine.take(batch, inputs)
        launches.plan()
        table.commit()
        launches.launch()
        launches.after()
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
    except bt.UnsupportedError as error:
        return [f"ABSENT {label}: {error}"]
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


def judge_waits(consumer: Consumer, backend: str) -> list[str]:
    """Return a line for each kind of step: does any call of ours return only when the device is through?

    The device is kept busy in front of each step, for much longer than the host needs. What the consumer does on its
    own is noted too.
    """
    lines = []
    for kind, sizes in SIZES.items():
        label = f"{backend} {kind}: {consumer.name}"
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                lines += _judge_waits(consumer, backend, sizes, label)
        except Exception as error:
            lines.append(f"FAIL {label}: {type(error).__name__}: {' '.join(str(error).split())[:600]}")
    return lines


def _judge_waits(consumer: Consumer, backend: str, sizes: Sizes, label: str) -> list[str]:
    table = bt.BlockTable(table_config(SIZES["mixed"]), backend, DEVICE)
    table.warmup()
    engine = Engine(table, SIZES["mixed"], torch.float16, DEVICE, seed=1)
    inputs = Inputs.empty(sizes, torch.float16, len(engine.layers), DEVICE)
    launches = Launches(consumer.bind(table, engine.layers, inputs))
    pages = Pages(table, engine.layers, inputs, write_with_torch, None)
    calls: dict[str, Callable[[], object]] = {
        "export_host()": lambda: [pages.planned(group) for group in range(len(engine.layers))],
        "its plan": launches.plan,
        "commit()": table.commit,
        "the replay": launches.launch,
        "what follows": launches.after,
    }
    seconds, who_waited = dict.fromkeys(calls, 0.0), set[str]()
    for step in range(6):
        batch = engine.schedule(inputs)
        inputs.set(batch)
        engine.take(batch, inputs)
        torch.cuda.synchronize()
        is_measured, is_over = step >= 2, torch.cuda.Event()  # the first two compile
        if is_measured:
            torch.cuda._sleep(BUSY_CYCLES)
        is_over.record()
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if is_measured:
                seconds[name] = max(seconds[name], time.perf_counter() - start)
                if is_over.query():
                    who_waited.add(name)
                    is_measured = False  # what comes later could wait for nothing
        torch.cuda.synchronize()
        engine.advance(batch)
    ours = ("export_host()", "commit()", "the replay")
    shown = ", ".join(f"{name} {seconds[name] * 1e3:.2f} ms" for name in calls)
    verdict = "FAIL" if who_waited.intersection(ours) else "NOTE" if who_waited else "PASS"
    how = f"{' and '.join(sorted(who_waited)) or 'nothing'} waited"
    return [f"{verdict} {label}: {how} while the device was busy ({shown})"]


def runs(arguments: argparse.Namespace) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Yield a name and what returns its lines, for everything there is; what may break the process comes last."""
    folders = sorted(arguments.peers.glob("consumers-*"))
    if not folders:
        sentence = f"FAIL no vLLM under {arguments.peers}: python -m blocktable_benchmarks.peers.consumers"
        yield "vLLM", partial(list, (sentence,))
    # Each dtype is half a minute of compilation: the older versions take one.
    kernels = [VllmTriton(folder, ALL_DTYPES if folder == folders[-1] else ALL_DTYPES[:1]) for folder in folders]
    write = kernels[-1].write if kernels else write_with_torch
    flex = Flex(write, is_compiled=ON_GPU and not arguments.eager_flex)
    required: list[Consumer] = [*kernels, flex, *plain_consumers(write)]
    others, absent = optional_consumers(folders, write)
    flashinfer, why = flashinfer_consumers(write)
    for consumers in (required, others, flashinfer):
        for backend, dtype, consumer in product(arguments.backends, arguments.dtypes, consumers):
            if dtype in consumer.dtypes:
                yield consumer.name, partial(judge, consumer, backend, dtype)
    waiting = [*kernels[-1:], *flashinfer] if ON_GPU else []
    for backend, consumer in product(arguments.backends, waiting):
        yield f"waits: {consumer.name}", partial(judge_waits, consumer, backend)
    for backend, kernel in product(arguments.backends, recipes.kernels(has_flashinfer=bool(flashinfer))):
        yield f"recipes: {kernel}", partial(recipes.judge, kernel, backend)
    for sentence in (*absent, *why):
        yield sentence, partial(list, (f"ABSENT {sentence}",))


def main() -> int:
    """Run every consumer that is here over every backend, and return 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("backends", nargs="+")
    parser.add_argument("--peers", type=Path, default=Path(".peers"))
    parser.add_argument("--dtypes", nargs="+", default=ALL_DTYPES, choices=ALL_DTYPES)
    parser.add_argument("--only", default="", help="run those whose name has this in it")
    parser.add_argument("--eager-flex", action="store_true", help="do not compile FlexAttention")
    arguments = parser.parse_args()
    num = {"PASS": 0, "FAIL": 0, "ABSENT": 0}
    for name, call in runs(arguments):
        if arguments.only in name:
            for line in call():
                sys.stdout.write(f"{line}\n")
                verdict = line.partition(" ")[0]
                num[verdict] = num.get(verdict, 0) + 1
            sys.stdout.flush()
    is_passed = num["PASS"] > 0 and num["FAIL"] == 0
    shown = f"{num['PASS']} passed, {num['FAIL']} failed, {num['ABSENT']} absent"
    sys.stdout.write(f"{'PASS' if is_passed else 'FAIL'}: {shown}\n")
    return 0 if is_passed else 1


if __name__ == "__main__":
    sys.exit(main())
