"""The engine's loop of docs/integrating.md, run as it stands: on a GPU, and elsewhere with stand-ins for torch.cuda.

A stand-in records the calls inside a capture instead of doing them, and does them at each replay: all that a reader of
the page may rely on, but for the GPU's own order of things.
"""

from __future__ import annotations

import builtins
import gc
import importlib.util
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import blocktable as bt

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/integrating.md"
BLOCK_SIZE = 4
CONFIG = bt.BlockTableConfig(
    groups=[bt.KVCacheGroup(block_size=BLOCK_SIZE)], max_num_reqs=12, max_num_batched_tokens=48, max_model_len=64
)
NUM_BLOCKS = 12 * 16
SIZES = (1, 4, 8)

torch: Any = pytest.importorskip("torch", reason="torch is not installed: tox -e torch")
pytestmark = pytest.mark.torch
ON_GPU = torch.cuda.is_available()
EMULATED = {"triton": "TRITON_INTERPRET", "cupy": "BLOCKTABLE_CUPY_EMULATE", "numba": "NUMBA_ENABLE_CUDASIM"}


# The stand-ins.


class CapturedCalls:
    """A CUDAGraph of the CPU: the calls that were made while it was capturing."""

    active: CapturedCalls | None = None

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def replay(self) -> None:
        for call in self.calls:
            call()


@contextmanager
def capturing(graph: CapturedCalls) -> Iterator[None]:
    CapturedCalls.active = graph
    try:
        yield
    finally:
        CapturedCalls.active = None


def captured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that is recorded while something captures, as a kernel launch would be."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if CapturedCalls.active is None:
            return function(*args, **kwargs)
        CapturedCalls.active.calls.append(partial(function, *args, **kwargs))
        return None

    return call


class CapturableTable(bt.BlockTable):
    """A table whose launches a stand-in can capture; a commit in a capture raises, as on a GPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gather = captured(super().gather)  # type: ignore[method-assign]
        self.compute_slot_mappings = captured(super().compute_slot_mappings)  # type: ignore[method-assign]

    def commit(self, *, stream: Any = None) -> None:
        if CapturedCalls.active is not None:
            raise bt.BlockTableError("a commit cannot be captured.")
        super().commit(stream=stream)


class FakeStream:
    """A stream of the CPU, where everything is done when a call returns."""

    def wait_stream(self, other: FakeStream) -> None:
        assert isinstance(other, FakeStream)


class FakeTorch:
    """torch, but for torch.cuda."""

    cuda = SimpleNamespace(
        CUDAGraph=CapturedCalls,
        graph=capturing,
        Stream=FakeStream,
        stream=nullcontext,
        current_stream=FakeStream,
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def page_names() -> dict[str, Any]:
    """Return what the page's code defines, after running it; off a GPU its imports give the stand-ins."""
    fake_bt = SimpleNamespace(**{**vars(bt), "BlockTable": CapturableTable})
    instead: dict[str, Any] = {} if ON_GPU else {"torch": FakeTorch(), "blocktable": fake_bt}

    def import_module(name: str, *args: Any, **kwargs: Any) -> Any:
        return instead.get(name) or builtins.__import__(name, *args, **kwargs)

    names: dict[str, Any] = {"__builtins__": {**vars(builtins), "__import__": import_module}, "__name__": "page"}
    found = re.findall(r"<!-- engine -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(found) == 4
    for code in found:
        exec(compile(code, str(PAGE), "exec"), names)
    return names


# What the loop is checked with.


class Cache:
    """A model that writes each token's tag where its slot says, at fixed addresses; and what must be there."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.tags = torch.zeros(48, dtype=torch.int64, device=device)
        self.cells = torch.zeros(NUM_BLOCKS * BLOCK_SIZE + 1, dtype=torch.int64, device=device)
        self.call = self.write if ON_GPU else captured(self.write)

    def write(self, block_tables: list[Any], slot_mappings: list[Any]) -> None:
        """Write the tags: index -1 of a padded token is the cell behind the cache."""
        slots = slot_mappings[0]
        self.cells.index_copy_(0, torch.where(slots < 0, len(self.cells) - 1, slots), self.tags[: len(slots)])

    def set_tags(self, tags: Sequence[int]) -> None:
        self.tags.fill_(-7)
        self.tags[: len(tags)] = torch.tensor(tags, device=self.device)


class Engine:
    """A schedule over the page's runner, and a plain account of which token lies where."""

    def __init__(self, names: dict[str, Any], backend: str) -> None:
        device = torch.device("cuda" if ON_GPU else "cpu")
        self.names = names
        self.cache = Cache(device)
        self.runner = names["ModelRunner"](CONFIG, backend, device, self.cache.call)
        self.free = list(range(1, NUM_BLOCKS))
        self.blocks: dict[int, list[int]] = {}
        self.length: dict[int, int] = {}

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def tag(self, row: int, position: int) -> int:
        return 1000 * self.blocks[row][0] + position + 1

    def prefill(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            self.blocks[row], self.length[row] = self.take(-(-length // BLOCK_SIZE)), length
            self.runner.table.set_row(row, self.blocks[row])
        tokens = [(row, position) for row, length in zip(rows, lengths, strict=True) for position in range(length)]
        self.cache.set_tags([self.tag(*token) for token in tokens])
        self.runner.execute(rows, lengths, [position for _, position in tokens])
        self.check(rows)

    def decode(self, rows: Sequence[int]) -> None:
        positions = [self.length[row] for row in rows]
        new = []
        for row, position in zip(rows, positions, strict=True):
            if position % BLOCK_SIZE == 0:
                new += self.take(1)
                self.blocks[row].append(new[-1])
            self.length[row] += 1
        self.cache.set_tags([self.tag(row, position) for row, position in zip(rows, positions, strict=True)])
        self.names["decode"](self.runner, rows, positions, np.array(new, np.int32))
        self.check(rows)

    def finish(self, row: int) -> None:
        self.free += self.blocks.pop(row)
        del self.length[row]
        self.runner.table.clear_row(row)

    def check(self, rows: Sequence[int]) -> None:
        """Check the batch tables, to the end of the buffer, and every cell of every live request."""
        table = self.runner.block_tables[0].cpu().numpy()
        expected = np.zeros_like(table)
        for index, row in enumerate(rows):
            expected[index, : len(self.blocks[row])] = self.blocks[row]
        assert np.array_equal(table, expected)
        cells = self.cache.cells.cpu().numpy()
        for row, length in self.length.items():
            slots = [self.blocks[row][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(length)]
            assert cells[slots].tolist() == [self.tag(row, position) for position in range(length)]


@pytest.fixture(params=["numpy", "triton", "cupy", "numba"])
def engine(request: pytest.FixtureRequest) -> Engine:
    backend: str = request.param
    if backend == "numpy" and ON_GPU:
        pytest.skip("the page's tensors are on the GPU")
    if backend != "numpy" and not ON_GPU and (backend != "triton" or os.environ.get(EMULATED[backend]) != "1"):
        pytest.skip("wants a GPU" + (f" or {EMULATED[backend]}=1" if backend == "triton" else ""))
    if backend == "triton" and not importlib.util.find_spec("triton"):
        pytest.skip("triton is not installed: tox -e torch")
    gc.collect()  # memory of the test before this one, freed in the middle of a capture, would break it
    return Engine(page_names(), backend)


def test_the_loop_of_the_page(engine: Engine) -> None:
    """Prefill, then decode by graphs over batches that grow, shrink and change their rows.

    Rules: R9.1, R10.1, R10.3, R15, R21.
    """
    engine.prefill([3, 0, 7], [5, 1, 9])
    engine.runner.capture(SIZES)
    assert set(engine.runner.graphs) == set(SIZES)
    for rows in ([3, 0, 7], [7, 3], [0], [3, 7, 0]):
        engine.decode(rows)
    engine.finish(0)
    engine.prefill([1, 2, 4, 5, 6], [2, 3, 4, 5, 6])
    for rows in ([1, 2, 3, 4, 5, 6, 7], [7, 1, 2], [5]):
        engine.decode(rows)


def test_its_steps_find_their_plans(engine: Engine, plans: list[Any]) -> None:
    """The page's runner slices its inputs anew for each step: a step of a size that came before is planned already.

    Rules: R17.
    """
    engine.prefill([3, 0, 7], [5, 1, 9])
    for turn in range(5):
        for rows in ([3, 0, 7], [7, 3], [0]):
            engine.decode(rows)
        if turn == 0:
            assert plans
            plans.clear()
    assert not plans


def test_a_batch_above_the_largest_graph_runs_eagerly(engine: Engine) -> None:
    engine.runner.capture((2,))
    engine.prefill([0, 1, 2], [3, 4, 1])
    engine.decode([0, 1, 2])
    engine.decode([1, 2])


def test_many_random_steps(engine: Engine) -> None:
    engine.runner.capture(SIZES)
    chooser = random.Random(5)
    for _ in range(30):
        live = list(engine.blocks)
        if live and (chooser.random() < 0.2 or max(engine.length.values()) > 56):
            engine.finish(max(live, key=lambda row: engine.length[row]))
        elif len(live) < 8 and chooser.random() < 0.4:
            row = next(row for row in range(12) if row not in live)
            engine.prefill([row], [chooser.randint(2, 12)])
        elif live:
            engine.decode(chooser.sample(live, chooser.randint(1, len(live))))


def test_a_draft_model_on_its_own_stream(engine: Engine) -> None:
    """Its set of buffers holds its batch, the target's still holds the target's. Rules: R17, R22."""
    engine.prefill([3, 0, 7], [5, 1, 9])
    engine.runner.capture(SIZES)
    seen: list[tuple[Any, Any]] = []

    def model(block_tables: list[Any], slot_mappings: list[Any]) -> None:
        seen.append((block_tables[0].clone(), slot_mappings[0].clone()))

    draft = engine.names["DraftRunner"](engine.runner, model)
    engine.decode([3, 0, 7])
    draft.execute([7], [8])
    engine.check([3, 0, 7])
    tables, slots = (found.cpu().tolist() for found in seen[0])
    assert tables[0][:3] == engine.blocks[7]
    assert slots == [engine.blocks[7][2] * BLOCK_SIZE]
    engine.decode([0, 7])


def test_sleep_and_wake(engine: Engine) -> None:
    """Rules: R24."""
    engine.prefill([3, 0, 7], [5, 1, 9])
    engine.runner.capture(SIZES)
    engine.decode([3, 0, 7])
    runner = engine.runner
    device_table = torch.as_tensor(runner.table.device_table(0), device=runner.positions.device)
    for memory in (device_table, *runner.block_tables, *runner.slot_mappings):
        memory.fill_(5)  # whatever is there when it is mapped again
    engine.names["wake"](runner)
    assert runner.slot_mappings[0].unique().tolist() == [-1]
    engine.check([])
    engine.decode([7, 0, 3])


def test_the_gpu_example_of_the_readme_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands on a GPU; elsewhere over tensors of the CPU, in Triton's interpreter."""
    if not ON_GPU and os.environ.get(EMULATED["triton"]) != "1":
        pytest.skip(f"wants a GPU or {EMULATED['triton']}=1")
    pytest.importorskip("triton", reason="triton is not installed: tox -e torch")
    (source,) = re.findall(r"<!-- gpu -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(source if ON_GPU else source.replace('device="cuda"', 'device="cpu"'), {})
    promised = re.findall(r"^print\(.*\)  # (.*)$", source, re.MULTILINE)
    assert len(promised) == 2
    assert capsys.readouterr().out.splitlines() == promised


@pytest.mark.skipif(ON_GPU, reason="a stand-in's own test")
def test_a_stand_in_refuses_a_commit_in_a_capture(engine: Engine) -> None:
    with capturing(CapturedCalls()), pytest.raises(bt.BlockTableError, match="captured"):
        engine.runner.table.commit()
