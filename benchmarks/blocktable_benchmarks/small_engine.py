"""How a small engine prepares a decode step on the CPU: list comprehensions and the tensors made of them, or our table.

Both return the same four arrays for the same requests: positions, slots, context lengths, block tables.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

import blocktable as bt
from blocktable_benchmarks.agreement import WrongResult
from blocktable_benchmarks.timing import Pace, host_time

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
NO_BLOCK = -1
"""Fills the block tables; block 0 is a block like the others."""

SIZES = [(8, 200), (32, 400), (256, 2000)]
"""Requests, and tokens that each of them has."""

WANTED = {8: 2.0, 32: 1.0, 256: 1.0}
"""Requests -> our time, at most, as a multiple of the lists'."""

STEPS, RUNS, PATIENCE = 32, 9, 1.0
"""Steps of a run (each request begins two blocks), runs, seconds to wait for a calm processor."""

Prepared = tuple[Any, Any, Any, Any]


class Sequence:
    """A request that decodes one token a step.

    Args:
        row: of the table.
        num_tokens: at first; the blocks for them are its own.
    """

    def __init__(self, row: int, num_tokens: int) -> None:
        self.row = row
        self.num_tokens = num_tokens
        self.block_table = [self._block(number) for number in range(-(-num_tokens // BLOCK_SIZE))]

    def _block(self, number: int) -> int:
        return self.row * (MAX_MODEL_LEN // BLOCK_SIZE) + number

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def last_block_num_tokens(self) -> int:
        """Tokens in its last block."""
        return self.num_tokens - (len(self.block_table) - 1) * BLOCK_SIZE

    def advance(self) -> None:
        """Take one more token, and a block for it where the last one is full."""
        self.num_tokens += 1
        if self.num_tokens > len(self.block_table) * BLOCK_SIZE:
            self.block_table.append(self._block(len(self.block_table)))


def make_sequences(num_reqs: int, num_tokens: int) -> list[Sequence]:
    """Return requests at different places of a block, so that one in 16 begins a block in each step."""
    return [Sequence(row, num_tokens + row % BLOCK_SIZE) for row in range(num_reqs)]


class Engine(Protocol):
    """What prepares a step."""

    def begin(self, sequences: list[Sequence]) -> None:
        """Take the requests as they are now."""

    def prepare(self, sequences: list[Sequence]) -> Prepared:
        """Return positions, slots, context lengths and block tables of the step."""


class ListEngine:
    """Builds everything again from lists.

    Args:
        make_tensor: takes a list.
    """

    def __init__(self, make_tensor: Callable[[Any], Any]) -> None:
        self.make_tensor = make_tensor

    def begin(self, sequences: list[Sequence]) -> None:
        """Keep nothing."""

    def prepare(self, sequences: list[Sequence]) -> Prepared:
        """Return positions, slots, context lengths and block tables of the step."""
        positions = [len(sequence) - 1 for sequence in sequences]
        context_lens = [len(sequence) for sequence in sequences]
        slots = [sequence.block_table[-1] * BLOCK_SIZE + sequence.last_block_num_tokens - 1 for sequence in sequences]
        width = max(len(sequence.block_table) for sequence in sequences)
        tables = [sequence.block_table + [NO_BLOCK] * (width - len(sequence.block_table)) for sequence in sequences]
        make = self.make_tensor
        return make(positions), make(slots), make(context_lens), make(tables)


class TableEngine:
    """Keeps a table over the numpy backend, and tells it what changed.

    Args:
        num_reqs: requests.
        view: takes a numpy array.
    """

    def __init__(self, num_reqs: int, view: Callable[[Any], Any]) -> None:
        group = bt.KVCacheGroup(block_size=BLOCK_SIZE, null_block_id=NO_BLOCK)
        config = bt.BlockTableConfig(
            groups=[group], max_num_reqs=num_reqs, max_num_batched_tokens=num_reqs, max_model_len=MAX_MODEL_LEN
        )
        self.table = bt.BlockTable(config, "numpy")
        self.table.warmup()
        self.view = view
        self.query_start_loc = np.arange(num_reqs + 1, dtype=np.int32)  # of every decode step

    def begin(self, sequences: list[Sequence]) -> None:
        """Take the requests as they are now."""
        for sequence in sequences:
            self.table.set_row(sequence.row, sequence.block_table)
        self.table.commit()

    def prepare(self, sequences: list[Sequence]) -> Prepared:
        """Return positions, slots, context lengths and block tables of the step."""
        grown = [sequence for sequence in sequences if sequence.last_block_num_tokens == 1]
        if grown:
            rows, ids = [sequence.row for sequence in grown], [sequence.block_table[-1] for sequence in grown]
            self.table.append_rows(rows, ids, [1] * len(grown))
        context_lens = np.array([len(sequence) for sequence in sequences], np.int32)
        positions = np.array([len(sequence) - 1 for sequence in sequences], np.int64)
        idx_mapping = np.array([sequence.row for sequence in sequences], np.int32)
        step = self.table.step(idx_mapping, self.query_start_loc[: len(sequences) + 1], positions)
        view = self.view
        return view(positions), view(step.slot_mappings[0]), view(context_lens), view(step.block_tables[0])


class Decode:
    """Requests that decode step by step, one engine preparing; the clock sees its part alone."""

    def __init__(self, engine: Engine, num_reqs: int, num_tokens: int) -> None:
        self.engine = engine
        self.size = num_reqs, num_tokens
        self.untimed = 0.0
        self.rewind()

    def rewind(self) -> None:
        """Begin again."""
        self.sequences = make_sequences(*self.size)
        self.engine.begin(self.sequences)

    def step(self, turn: int) -> Prepared:
        """Take a token for each request, and prepare its step."""
        start = time.perf_counter()
        for sequence in self.sequences:
            sequence.advance()
        self.untimed += time.perf_counter() - start
        return self.engine.prepare(self.sequences)

    def synchronize(self) -> None:
        """Wait for nothing."""


def measure_small_engine(
    attempt: Callable[[str, str, Callable[[], Any]], object], pace: Pace, *, is_quick: bool
) -> None:
    """Measure every size.

    Args:
        attempt: takes a section, a key and a function that measures it.
        pace: of the processor.
        is_quick: the least size, and few steps.
    """
    for num_reqs, num_tokens in SIZES[:1] if is_quick else SIZES:
        key = f"{num_reqs} requests x {num_tokens} tokens"
        attempt("small_engine", key, partial(_measure, num_reqs, num_tokens, pace, is_quick=is_quick))


def _measure(num_reqs: int, num_tokens: int, pace: Pace, *, is_quick: bool) -> dict[str, Any]:
    make_tensor, view, library = _library()
    engines: list[Engine] = [ListEngine(make_tensor), TableEngine(num_reqs, view)]
    decodes = [Decode(engine, num_reqs, num_tokens) for engine in engines]
    for turn in range(BLOCK_SIZE):
        _check(*(decode.step(turn) for decode in decodes))
    steps, runs, patience = (3, 2, 0.0) if is_quick else (STEPS, RUNS, PATIENCE)
    found: dict[str, Any] = {"num_reqs": num_reqs, "library": library}
    for name, decode in zip(("lists", "table"), decodes, strict=True):
        found[f"{name}_us"] = host_time(
            decode,
            steps,
            runs,
            pace,
            patience,
            lambda decode=decode: decode.untimed,  # type: ignore[misc]
        )
    return found


def _library() -> tuple[Callable[[Any], Any], Callable[[Any], Any], str]:
    """Return what makes a tensor of a list, what makes one of a numpy array, and the library's name."""
    if importlib.util.find_spec("torch") is None:
        return np.array, np.asarray, "numpy"
    import torch

    return torch.tensor, torch.from_numpy, "torch"


def _check(lists: Prepared, table: Prepared) -> None:
    """Compare the two; our table may be wider.

    Raises:
        WrongResult: they differ.
    """
    for name, expected, got in zip(("positions", "slots", "context lengths", "tables"), lists, table, strict=True):
        right, found = np.asarray(expected), np.asarray(got)
        if not (found[..., : right.shape[-1]] == right).all() or (found[..., right.shape[-1] :] != NO_BLOCK).any():
            raise WrongResult(f"the small engine's {name} differ from the table's.")
