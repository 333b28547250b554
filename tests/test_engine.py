"""The example engine gives the tokens of a dense cache, in every way to serve that it knows; faults in it are seen.

On a GPU in float32 over its backends, elsewhere in float64 over emulated ones, for which `tox -e torch` asks.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import blocktable as bt

torch: Any = pytest.importorskip("torch", reason="torch is not installed: tox -e torch")
pytestmark = pytest.mark.torch

ENGINE = Path(__file__).parents[1] / "examples/engine"
sys.path.append(str(ENGINE))  # stays: modules of the engine import one another late

# ruff: noqa: E402 - the modules lie on that path, and want torch.
import model_runner
import proof.variants
from attention import View, attend_in_torch
from encoder_decoder import CROSS, Queries, Server
from model import FULL, STATE, WINDOW
from model_runner import ModelRunner, Rank
from proof.encoder_decoder import report_encoder_decoder, run_encoder_decoder, table_config
from proof.variants import Variant, all_variants, run
from request import Request
from scheduler import Scheduler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EMULATED = {"triton": "TRITON_INTERPRET", "cupy": "BLOCKTABLE_CUPY_EMULATE", "numba": "NUMBA_ENABLE_CUDASIM"}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # the matrices are small


@pytest.mark.parametrize("variant", all_variants(DEVICE), ids=str)
def test_tokens_are_those_of_a_dense_cache(variant: Variant) -> None:
    """Rules: R4-R15, R17-R19, and R21 where there are graphs."""
    name = EMULATED.get(variant.backend)
    if DEVICE == "cpu" and name and os.environ.get(name) != "1":
        pytest.skip(f"wants a GPU, or {name}=1: tox -e torch")
    result = run(variant)
    assert result.is_pass, result.report(variant)
    assert result.num_requests == 22
    assert result.smallest_gap > 1e-4, "too close to call in float32"


CHECKED = dict.fromkeys(variant for variant in all_variants("cpu") if variant.backend == "numpy")


@pytest.mark.parametrize("mode", ["host", "device"])
@pytest.mark.parametrize("variant", CHECKED, ids=str)
def test_the_checker_finds_nothing(variant: Variant, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing, preemption, rollback, forks, windows and ranks, over the host's tables. Rules: R38-R41."""
    monkeypatch.setenv("BLOCKTABLE_CHECK", mode)
    result = run(variant)
    assert result.is_pass, result.report(variant)


@pytest.mark.parametrize("mode", ["host", "device"])
def test_the_checker_finds_nothing_in_the_encoder_decoder(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R38-R41."""
    monkeypatch.setenv("BLOCKTABLE_CHECK", mode)
    is_pass, report = report_encoder_decoder(Variant())
    assert is_pass, report


def test_a_finding_that_is_only_reported_fails_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy put in by two calls: the tokens are right, but to the checker some of the row is missing. Rules: R40."""
    change = ModelRunner.change

    def change_in_two(self: ModelRunner, operation: str, *arguments: Any) -> None:
        if operation != "replace_blocks":
            change(self, operation, *arguments)
            return
        row, group, first, ids = arguments
        counts = self.ranks[0].table.num_blocks_per_row[:, row].tolist()
        change(self, "truncate_row", row, [*counts[:group], first, *counts[group + 1 :]])
        change(self, "append_row", row, [ids if i == group else [] for i in range(len(counts))])

    monkeypatch.setenv("BLOCKTABLE_CHECK", "host")
    monkeypatch.setattr(ModelRunner, "change", change_in_two)
    result = run(Variant(), numbers=[2])
    assert not result.wrong
    assert {finding.kind for finding in result.findings} == {"position_gap"}
    assert not result.is_pass
    assert "position_gap: a token of row" in result.report(Variant())


@pytest.mark.parametrize("backend", ["numpy", "torch", *EMULATED])
def test_an_encoder_decoder_gets_the_tokens_of_a_dense_cache(backend: str) -> None:
    """Rules: R5, R12-R15, R33."""
    if DEVICE == "cpu" and backend in EMULATED and os.environ.get(EMULATED[backend]) != "1":
        pytest.skip(f"wants a GPU, or {EMULATED[backend]}=1: tox -e torch")
    is_pass, report = report_encoder_decoder(serving(backend=backend))
    assert is_pass, report
    assert "12 tasks, 133 new tokens" in report


@pytest.mark.parametrize(
    ("world_size", "interleave_size", "rows"), [(2, 1, "stable"), (2, 16, "dense"), (4, 8, "stable")]
)
def test_every_rank_of_real_ones_gets_the_tokens(world_size: int, interleave_size: int, rows: str) -> None:
    """Over gloo, or NCCL where there are as many GPUs; of four ranks two are decode ranks.

    Rank 0 alone changes rows; the others get its packets, and all compare digests in each step.
    Rules: R18-R20, R45-R47.
    """
    if DEVICE == "cuda" and torch.cuda.device_count() < world_size:
        pytest.skip(f"wants {world_size} GPUs")
    sizes = ["--world-size", str(world_size), "--interleave-size", str(interleave_size)]
    done = engine("--processes", *sizes, "--rows", rows, "--backend", "triton" if DEVICE == "cuda" else "numpy")
    assert done.returncode == 0, done.stdout + done.stderr
    # Not line by line: what gloo prints may stand on one with a report.
    verdicts = re.findall(r"rank (\d+) of (\d+): (\w+) ", done.stdout)
    assert sorted(verdicts) == [(str(rank), str(world_size), "PASS") for rank in range(world_size)]


def test_ranks_name_a_row_that_differs() -> None:
    """The last rank's table is made wrong in step 5, behind everyone's back. Rules: R46, R47."""
    if DEVICE == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("wants 2 GPUs")
    done = engine("--processes", "--world-size", "2", "--interleave-size", "16", "--diverge-at", "5")
    assert done.returncode == 1, done.stdout + done.stderr
    (found,) = set(
        re.findall(
            r"Step (\d+): rank 1 differs from rank 0: row \d of group 0 holds (\[.*?\]), and on rank 0 "
            r"(\[.*?\])\.",
            done.stdout,
        )
    )
    step, theirs, ours = found[0], *(json.loads(ids) for ids in found[1:])
    assert step == "5"
    assert [theirs[0] - 1, *theirs[1:]] == ours


def engine(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ENGINE), "--device", DEVICE, *arguments]
    # A rank that waits for one that is gone would wait for half an hour.
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_the_program_reports() -> None:
    done = engine("--rows", "dense", "--backend", "numpy")
    assert done.returncode == 0, done.stdout + done.stderr
    report, verdict = done.stdout.splitlines()
    assert report.startswith(f"PASS numpy on {DEVICE}, dense rows, graphs off, W 1, I 1")
    assert "smallest gap" in report
    assert verdict == "PASS: 1 of 1 as with a dense cache"


def test_the_program_fails_where_it_has_not_the_devices() -> None:
    done = engine("--device", "cuda", "--processes", "--world-size", "64")
    assert done.returncode == 1
    assert "FAIL 64 ranks want as many GPUs" in done.stdout


def test_a_feature_that_never_happened_fails() -> None:
    variant = serving()
    result = run(variant, numbers=[1])
    assert not result.wrong
    assert {"preemptions", "resumes", "forks", "copies on write"} <= set(result.missing)
    assert not result.is_pass
    assert "never happened" in result.report(variant)


def test_the_engine_can_be_read_in_one_sitting() -> None:
    """Its own files, without those of `proof`; blank lines, comments and docstrings do not count."""
    num_lines = sum(map(lines_of_code, ENGINE.glob("*.py")))
    assert num_lines < 760, num_lines


def lines_of_code(path: Path) -> int:
    source = path.read_text()
    texts = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    described = set(chain.from_iterable(texts))
    lines = enumerate(source.splitlines(), start=1)
    return sum(bool(line.strip()) and line.strip()[0] != "#" and number not in described for number, line in lines)


# The kernel of the attention: on a GPU in every test above, elsewhere here, by Triton's interpreter.


@pytest.fixture
def kernel() -> Any:
    """Return the launcher of the kernel, on the CPU."""
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("wants a GPU, or TRITON_INTERPRET=1: tox -e torch")
    pytest.importorskip("triton", reason="triton is not installed: tox -e torch")
    import attention_kernel

    return attention_kernel.attend_in_triton


@pytest.mark.parametrize("window", [2**31, 5])
@pytest.mark.parametrize(("world_size", "interleave_size"), [(1, 1), (2, 1), (3, 4)])
def test_the_kernel_attends_and_writes_as_torch_does(
    kernel: Any, window: int, world_size: int, interleave_size: int
) -> None:
    """Requests of many, one and no tokens, with much, some and nothing before; padded tokens behind them."""
    generator = torch.Generator().manual_seed(3)
    num_computed, lengths, num_tokens, size = [37, 0, 9, 70], [3, 5, 0, 1], 12, 12
    starts = np.cumsum([0, *lengths])
    positions = [first + i for first, count in zip(num_computed, lengths, strict=True) for i in range(count)]
    batch = SimpleNamespace(
        positions=torch.tensor(positions + [0] * (num_tokens - len(positions))),
        requests=torch.tensor(np.repeat([*range(4), 3], [*lengths, num_tokens - starts[-1]])),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        num_computed_tokens=torch.tensor(num_computed, dtype=torch.int32),
    )
    query, key, value = torch.randn(3, num_tokens, 2, 16, generator=generator, dtype=torch.float64)
    for rank in range(world_size):
        shard = bt.ContextParallel(world_size=world_size, rank=rank, interleave_size=interleave_size)
        config = bt.BlockTableConfig(
            groups=[bt.KVCacheGroup(block_size=size, kernel_block_size=4, num_blocks=60)],
            max_num_reqs=4,
            max_num_batched_tokens=num_tokens,
            max_model_len=7 * size * world_size,
            context_parallel=shard,
        )
        table = bt.BlockTable(config, "numpy")
        for row in range(4):
            table.set_row(row, [1 + 7 * i + row for i in range(7)])
        step = table.step(None, batch.query_start_loc.numpy(), batch.positions.numpy())
        view = View(torch.from_numpy(step.block_tables[0]), torch.from_numpy(step.slot_mappings[0]), 4, shard)
        caches = [torch.randn(2, 60 * size, 2, 16, generator=generator, dtype=torch.float64)]
        caches.append(caches[0].clone())
        expected, log_sums = attend_in_torch(query, key, value, caches[0], view, batch, window)
        got, got_log_sums = (
            part.cpu() for part in on_device(kernel, query, key, value, caches[1], view, batch, window)
        )
        real = slice(0, int(starts[-1]))
        assert torch.equal(caches[0], caches[1]), "the caches differ"
        torch.testing.assert_close(got[real], expected[real])
        torch.testing.assert_close(got_log_sums[real], log_sums[real].clamp(min=-1e30))  # where a rank has none


def on_device(kernel: Any, *arguments: Any) -> Any:
    """Call the kernel with copies on the test's device, and bring the cache back."""
    *tensors, kv, view, batch, window = arguments
    moved = [tensor.to(DEVICE) for tensor in (*tensors, kv)]
    view = View(view.block_table.to(DEVICE), view.slots.to(DEVICE), view.tokens_per_column, view.shard)
    batch = SimpleNamespace(**{name: tensor.to(DEVICE) for name, tensor in vars(batch).items()})
    result = kernel(*moved, view, batch, window)
    kv.copy_(moved[-1])
    return result


def test_the_engine_over_the_kernel(kernel: Any) -> None:
    """A small case: the interpreter takes minutes for all requests."""
    result = run(serving(attention="triton", world_size=2), numbers=[1, 8])
    assert not result.wrong
    assert result.counts["rollbacks"]


def test_the_encoder_decoder_over_the_kernel(kernel: Any) -> None:
    assert not run_encoder_decoder(serving(attention="triton"))


def test_the_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """Where there is none; TRITON_INTERPRET would leave nothing to compile, hence a process of its own."""
    pytest.importorskip("triton", reason="triton is not installed: tox -e torch")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join((str(ENGINE), *sys.path))}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ".target sm_90" in done.stdout


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attention_kernel import _paged_attention

kinds = dict.fromkeys(_paged_attention.arg_names, "*fp32")
kinds |= dict.fromkeys(("slots", "positions", "requests"), "*i64")
kinds |= dict.fromkeys(("block_table", "query_start_loc", "num_computed_tokens"), "*i32")
kinds |= dict.fromkeys(("values_start", "table_stride", "world_size", "rank", "interleave_size"), "i32")
constants = {"tokens_per_column": 4, "head_size": 16, "tile": 32}
kinds |= {"window": "i64"} | dict.fromkeys(constants, "constexpr")
source = ASTSource(_paged_attention, kinds, constexprs=constants)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


# The comparison sees faults.

Fault = Callable[[pytest.MonkeyPatch], Variant]


def serving(**options: Any) -> Variant:
    return replace(all_variants(DEVICE)[0], **options)


def torch_attention_replaced(monkeypatch: pytest.MonkeyPatch, attend: Callable[..., Any]) -> None:
    if DEVICE == "cuda":
        pytest.skip("a fault of attention in plain torch")
    monkeypatch.setattr(proof.variants, "attend_in_torch", attend)


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, change: Callable[[Rank], None]) -> None:
    """Let a rank's views be changed in one step, after its table has made them."""
    step, num_calls = Rank.step, 0

    def step_and_change(rank: Rank, *arguments: Any) -> None:
        nonlocal num_calls
        step(rank, *arguments)
        rank.state_blocks = rank.state_blocks.clone()
        for view in rank.views:  # never the table's own memory
            view.block_table, view.slots = view.block_table.clone(), view.slots.clone()
        num_calls += 1
        if num_calls == number:
            change(rank)

    monkeypatch.setattr(Rank, "step", step_and_change)


def wrong_slot(group: int, by: int) -> Fault:
    def plant(monkeypatch: pytest.MonkeyPatch) -> Variant:
        def change(rank: Rank) -> None:
            slots = rank.views[group].slots
            (kept,) = torch.nonzero(slots >= 0, as_tuple=True)
            slots[kept[0]] += by  # of the oldest request, which is never preempted

        at_step(monkeypatch, 6, change)
        return serving()

    return plant


def lost_slot(monkeypatch: pytest.MonkeyPatch) -> Variant:
    at_step(monkeypatch, 6, lambda rank: rank.views[FULL].slots.__setitem__(3, -1))
    return serving()


def wrong_block(group: int) -> Fault:
    def plant(monkeypatch: pytest.MonkeyPatch) -> Variant:
        def change(rank: Rank) -> None:
            table = rank.views[group].block_table
            row, column = torch.nonzero(table[:1])[0]  # the first block of the oldest request
            table[row, column] = table[1].max()

        at_step(monkeypatch, 6, change)
        return serving()

    return plant


def wrong_state(monkeypatch: pytest.MonkeyPatch) -> Variant:
    def change(rank: Rank) -> None:
        rank.state_blocks[[0, 1]] = rank.state_blocks[[1, 0]]

    at_step(monkeypatch, 6, change)
    return serving()


def padding_written(monkeypatch: pytest.MonkeyPatch) -> Variant:
    """Slots of -1 are written, into whatever block is the last one."""

    def attend(query: Any, key: Any, value: Any, kv: Any, view: View, *rest: Any) -> Any:
        kv[:, view.slots] = torch.stack((key, value))
        return attend_in_torch(query, key, value, kv, view, *rest)

    torch_attention_replaced(monkeypatch, attend)
    return serving(graphs="on", world_size=2)


def rank_ignored(monkeypatch: pytest.MonkeyPatch) -> Variant:
    """Each rank takes itself for the first one when it attends."""

    def attend(query: Any, key: Any, value: Any, kv: Any, view: View, *rest: Any) -> Any:
        shard = bt.ContextParallel(world_size=view.shard.world_size, interleave_size=view.shard.interleave_size)
        return attend_in_torch(
            query, key, value, kv, View(view.block_table, view.slots, view.tokens_per_column, shard), *rest
        )

    torch_attention_replaced(monkeypatch, attend)
    return serving(world_size=2)


def parts_averaged(monkeypatch: pytest.MonkeyPatch) -> Variant:
    """The ranks' parts count alike, whatever their weights."""
    monkeypatch.setattr(model_runner, "merge", lambda parts: sum(mean for mean, _ in parts) / len(parts))
    return serving(world_size=2)


def method_replaced(name: str, change: Callable[..., Any]) -> Fault:
    def plant(monkeypatch: pytest.MonkeyPatch) -> Variant:
        original = getattr(Scheduler, name)
        monkeypatch.setattr(Scheduler, name, lambda self, *args: change(original, self, *args))
        return serving()

    return plant


def written_where_shared(original: Any, self: Scheduler, request: Request, group: int) -> None:
    """No copy on write of keys and values."""
    if group == STATE:
        original(self, request, group)


def window_too_small(original: Any, self: Scheduler, request: Request, count: int) -> None:
    """Blocks are evicted a block too early."""
    self.window -= 4
    original(self, request, count)
    self.window += 4


def state_not_rolled_back(original: Any, self: Scheduler, request: Request) -> None:
    """After refused drafts the state is the one behind them."""
    request.state_column = len(request.drafts)
    original(self, request)


def state_shared(original: Any, self: Scheduler, request: Request) -> None:
    """A prefix keeps a state that moves on."""
    copy_blocks = self.runner.copy_blocks
    self.runner.copy_blocks = lambda *args: None  # type: ignore[method-assign]
    original(self, request)
    self.runner.copy_blocks = copy_blocks  # type: ignore[method-assign]


FAULTS: dict[str, Fault] = {
    "a slot off by one": wrong_slot(FULL, 1),
    "a slot off by minus one": wrong_slot(FULL, -1),
    "a slot of the window off by one": wrong_slot(WINDOW, 1),
    "a slot lost": lost_slot,
    "a block of another request": wrong_block(FULL),
    "a block of another request in the window": wrong_block(WINDOW),
    "another request's state": wrong_state,
    "padding written": padding_written,
    "rank ignored": rank_ignored,
    "parts averaged": parts_averaged,
    "no copy on write": method_replaced("copy_shared", written_where_shared),
    "evicted too early": method_replaced("advance", window_too_small),
    "state not rolled back": method_replaced("roll_back", state_not_rolled_back),
    "state of a prefix moves on": method_replaced("keep_prefix", state_shared),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = FAULTS[name](monkeypatch)
    result = run(variant)
    assert result.wrong, f"{name} changed no token"
    assert not result.is_pass
    assert result.report(variant).startswith("FAIL")


# And faults in the encoder-decoder.


def ordinary_group(monkeypatch: pytest.MonkeyPatch) -> bt.BlockTableConfig:
    """The cross group is an ordinary one: a decoder's tokens have slots there, and overwrite the source."""
    groups = list(table_config().groups)
    groups[1] = replace(groups[1], slot_mode="linear")
    return replace(table_config(), groups=groups)


def source_misplaced(monkeypatch: pytest.MonkeyPatch) -> bt.BlockTableConfig:
    """The source is written one slot too far."""
    keep = Server.keep

    def keep_elsewhere(self: Server, layer: int, key: Any, value: Any) -> None:
        self.caches[layer] = self.caches[layer].roll(-1, 1)
        keep(self, layer, key, value)
        self.caches[layer] = self.caches[layer].roll(1, 1)

    monkeypatch.setattr(Server, "keep", keep_elsewhere)
    return table_config()


def queries_changed(change: Callable[[Server, Queries], None]) -> Callable[..., bt.BlockTableConfig]:
    """The cross-attention reads something else than what the table says."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> bt.BlockTableConfig:
        fill = Server.fill

        def fill_and_change(self: Server) -> None:
            fill(self)
            change(self, self.queries[CROSS])

        monkeypatch.setattr(Server, "fill", fill_and_change)
        return table_config()

    return plant


def lengths_of_the_decoder(self: Server, queries: Queries) -> None:
    self.queries[CROSS] = self.queries[FULL]


def last_token_unseen(self: Server, queries: Queries) -> None:
    queries.positions, queries.num_computed_tokens = queries.positions - 1, queries.num_computed_tokens - 1


def table_of_the_decoder(self: Server, queries: Queries) -> None:
    view = self.views[CROSS]
    self.views[CROSS] = replace(view, block_table=self.views[FULL].block_table[:, : view.block_table.shape[1]])


ENCODER_DECODER_FAULTS: dict[str, Callable[[pytest.MonkeyPatch], bt.BlockTableConfig]] = {
    "an ordinary group": ordinary_group,
    "the source misplaced": source_misplaced,
    "lengths of the decoder": queries_changed(lengths_of_the_decoder),
    "the last token of the source unseen": queries_changed(last_token_unseen),
    "the table of the decoder": queries_changed(table_of_the_decoder),
}


@pytest.mark.parametrize("name", ENCODER_DECODER_FAULTS)
def test_a_planted_fault_in_the_encoder_decoder_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ENCODER_DECODER_FAULTS[name](monkeypatch)
    assert run_encoder_decoder(serving(), config), f"{name} changed no token"
