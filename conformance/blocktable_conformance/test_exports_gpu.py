"""Exports on a GPU: captured once and replayed over changing batches, with no wait, allocation or compilation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blocktable import BlockTableConfig, BlockTableError, KVCacheGroup
from blocktable_conformance.asserts import check
from blocktable_conformance.exports import ARRAYS, ExportPair
from blocktable_conformance.gpu import as_tensor, held, need, tensor
from blocktable_conformance.pair import Pair
from blocktable_conformance.subject import Subject, address
from blocktable_conformance.test_exports import (
    ALIGNED_STATES,
    CSR,
    FIRST_STATE,
    INVERSE_MAP,
    KV,
    LAST_STATES,
    LENGTHS,
    MISSING_IS_MINUS_1,
    TOKEN_CSR,
    WIDE,
)

NUM_REQS = 5
BY_GROUPS: list[tuple[Any, tuple[int, ...]]] = [
    *((wanted, (0,)) for wanted in (CSR, TOKEN_CSR, KV, INVERSE_MAP, MISSING_IS_MINUS_1, WIDE, LENGTHS)),
    *((wanted, (1,)) for wanted in (CSR, INVERSE_MAP)),
    *((wanted, (1, 0)) for wanted in (CSR, TOKEN_CSR, KV)),
    *((wanted, (2,)) for wanted in (FIRST_STATE, LAST_STATES, ALIGNED_STATES)),
]
"""Layouts and the groups that each of them exports."""


def make(subject: Subject) -> Pair:
    """Return a table whose rows hold blocks, warm."""
    window = KVCacheGroup(block_size=8, kernel_block_size=4, sliding_window=9, num_blocks=60)
    config = BlockTableConfig(
        groups=[
            KVCacheGroup(block_size=4, num_blocks=120),
            window,
            KVCacheGroup(block_size=4, slot_mode="none", blocks_per_row=4),
        ],
        max_num_reqs=8,
        max_num_batched_tokens=16,
        max_model_len=64,
    )
    pair = Pair(subject, config)
    for row in range(8):
        blocks = [[1 + (7 * row + 3 * i) % 50 for i in range(count)] for count in (2 * (row % 4), row % 4, row % 5)]
        pair.do("set_row", row, blocks)
    pair.commit()
    pair.table.warmup()
    return pair


class Captured:
    """A graph of exports over static inputs, as an engine holds one for each batch size."""

    def __init__(self, torch: Any, pair: Pair) -> None:
        self.pair = pair
        self.exports = [ExportPair(pair, wanted, groups) for wanted, groups in BY_GROUPS]
        self.idx, self.lens, self.computed = (tensor(torch, [value] * NUM_REQS, "int32") for value in (-1, 0, 0))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.record()

    def record(self) -> None:
        """Export everything."""
        for export in self.exports:
            self.pair.table.export(
                export.layout,
                self.idx,
                groups=export.groups,
                seq_lens=self.lens,
                num_computed_tokens=self.computed,
                out=export.out,
            )

    def fill(self, idx: Sequence[int], lens: Sequence[int], computed: Sequence[int]) -> tuple[list[int], ...]:
        """Fill the static inputs as an engine does; return what they hold."""
        padded = [*idx, *[-1] * (NUM_REQS - len(idx))], *([*v, *[0] * (NUM_REQS - len(v))] for v in (lens, computed))
        for target, values in zip((self.idx, self.lens, self.computed), padded, strict=True):
            target.copy_(target.new_tensor(values))
        return padded

    def check(self, idx: list[int], lens: list[int], computed: list[int]) -> None:
        """Compare every array of every export with the oracle."""
        for export in self.exports:
            export.check_written(idx, lens, num_computed_tokens=computed)

    def replay(self, idx: Sequence[int], lens: Sequence[int], computed: Sequence[int]) -> None:
        """Fill, replay and compare."""
        padded = self.fill(idx, lens, computed)
        self.graph.replay()
        self.check(*padded)


@pytest.fixture
def torch(subject_once: Subject) -> Any:
    """Return torch, for a backend that exports inside a capture."""
    if not subject_once.declares("exports"):
        pytest.skip(f"{subject_once.label} does not declare exports")
    return need(subject_once, "graph_capture")


def test_replays_follow_their_inputs(subject_once: Subject, torch: Any) -> None:
    """Captured once, replayed over growing and shrinking batches, garbage and changed rows.

    Rules: R21, R25.11, R25.12.
    """
    pair = make(subject_once)
    captured = Captured(torch, pair)
    captured.replay([3, 1, 7, 0, 6], [24, 5, 23, 9, 13], [20, 4, 22, 0, 12])
    captured.replay([2], [3], [2])
    captured.replay([], [], [])
    captured.replay([7, 7, -9, 8, 3], [2**31 - 1, 1, 9, 9, -4], [2**31 - 1, -1, 0, 3, 2])
    pair.do("set_row", 3, ([90, 91, 92], [31, 32], [5]))
    captured.replay([3, 2], [12, 15], [11, 14])  # not committed yet
    pair.table.commit()
    pair.oracle.commit()
    captured.replay([3, 2], [12, 15], [11, 14])
    for export in captured.exports:  # eager calls between replays
        export.run([0, 3, 6, 7, 5], [1, 2, 3, 4, 5], num_computed_tokens=[0, 1, 2, 3, 4])
    captured.replay([6, 3], [9, 9], [1, 1])
    for export in captured.exports:
        for name in (*ARRAYS, "counts", "mapped"):
            if getattr(export.out, name) is not None:
                as_tensor(torch, getattr(export.out, name)).fill_(77)
    pair.invalidate()
    captured.replay([1, 7], [9, 24], [8, 20])


def test_random_replays(subject_once: Subject, torch: Any) -> None:
    """A hundred replays over random batches and row changes. Rules: R21, R25.11."""
    pair, generator = make(subject_once), np.random.default_rng(7)
    captured = Captured(torch, pair)
    for _ in range(100):
        row = int(generator.integers(8))
        counts = generator.integers(0, 4, 3)
        pair.do("set_row", row, [[int(b) for b in generator.integers(1, 50, count)] for count in counts])
        pair.table.commit()
        pair.oracle.commit()
        num_reqs = int(generator.integers(NUM_REQS + 1))
        idx, lens, computed = (generator.integers(-1, high, num_reqs).tolist() for high in (9, 30, 30))
        captured.replay(idx, lens, computed)


def test_no_export_waits_allocates_or_compiles(subject_once: Subject, torch: Any) -> None:
    """With the stream held every export returns; nothing is allocated or compiled. Rules: R21, R22, R25.10."""
    pair = make(subject_once)
    captured = Captured(torch, pair)
    stream = torch.cuda.Stream()
    padded = captured.fill([5, 2, 7, 1], [9, 24, 13, 2], [8, 20, 12, 1])
    backend: Any = subject_once.backend
    shifted = [torch.cat((array[:1], array))[1:] for array in (captured.idx, captured.lens, captured.computed)]
    batches = shifted, (captured.idx, captured.lens, captured.computed)

    def export(which: Any, batch: Any) -> Any:
        idx, lens, computed = batch
        options = {"groups": which.groups, "seq_lens": lens, "num_computed_tokens": computed, "out": which.out}
        return pair.table.export(which.layout, idx, stream=stream, **options)

    results = [export(which, batches[0]) for which in captured.exports]
    torch.cuda.synchronize()
    compiled, has_stayed = backend.num_compilations, False
    for _ in range(3):  # other processes use the device too: its free bytes must stay in one round
        free = torch.cuda.mem_get_info()[0]
        for which, result in zip(captured.exports, results, strict=True):
            with held(torch, stream) as hold:  # each again: a stream queues so many launches only
                for batch in batches:
                    again = export(which, batch)
                    check(hold.is_busy, "R22, R25.10", f"an export of {which.layout.kind} waited for the device.")
                    check(again is result, "R25.10", f"an export of {which.layout.kind} made new views.")
        has_stayed = has_stayed or torch.cuda.mem_get_info()[0] >= free
    check(
        backend.num_compilations == compiled,
        "R21, R25.10",
        "something was compiled after an export's buffers were made.",
    )
    check(has_stayed, "R25.10", "an export allocated memory on the device.")
    captured.check(*padded)


def test_buffers_are_not_made_inside_a_capture(subject_once: Subject, torch: Any) -> None:
    """The first export into a set, and create_export, raise there; the capture around them goes on.

    Rules: R21, R25.11.
    """
    pair = make(subject_once)
    idx, lens = tensor(torch, [2, 1], "int32"), tensor(torch, [9, 4], "int32")
    made = ExportPair(pair, CSR)
    made.run([3], [9])
    pair.table.gather(idx)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(BlockTableError, match="capture"):
            pair.table.export(TOKEN_CSR, idx, seq_lens=lens)
        with pytest.raises(BlockTableError, match="capture"):
            pair.table.create_export(KV)
        with pytest.raises(BlockTableError, match="captur"):
            pair.table.export(CSR, idx, seq_lens=np.array([9, 4], np.int32), out=made.out)
        pair.table.export(CSR, idx, seq_lens=lens, out=made.out)
    graph.replay()
    made.check_written([2, 1], [9, 4])


def test_exports_follow_the_current_stream(subject_once: Subject, torch: Any) -> None:
    """On a side stream of torch, after changes queued there, without any device-wide wait. Rules: R22, R25.4."""
    pair = make(subject_once)
    exports = [ExportPair(pair, wanted, groups) for wanted, groups in BY_GROUPS[:4]]
    idx, lens = tensor(torch, [0, 0], "int32"), tensor(torch, [0, 0], "int32")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for turn in range(20):
        rows, lengths = [turn % 8, (3 * turn + 1) % 8], [turn, 2 * turn]
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000)
            idx.copy_(torch.tensor(rows, dtype=torch.int32).pin_memory(), non_blocking=True)
            lens.copy_(torch.tensor(lengths, dtype=torch.int32).pin_memory(), non_blocking=True)
            for export in exports:
                pair.table.export(export.layout, idx, groups=export.groups, seq_lens=lens, out=export.out)
        side.synchronize()
        for export in exports:
            export.check_written(rows, lengths)


def test_two_sets_of_one_layout(subject_once: Subject, torch: Any) -> None:
    """Two captures over sets of their own, in any order. Rules: R17, R21, R25.9, R25.11."""
    pair = make(subject_once)
    first, second = Captured(torch, pair), Captured(torch, pair)
    one, other = ([3, 1, 7], [24, 5, 23], [20, 4, 22]), ([6, 2], [1, 11], [0, 9])
    first.replay(*one)
    second.replay(*other)
    whole = ([*one[0], -1, -1], [*one[1], 0, 0], [*one[2], 0, 0])
    first.check(*whole)
    check(
        address(first.exports[0].out.entries) != address(second.exports[0].out.entries),
        "R17, R25.9",
        "two sets are one.",
    )
    wanted = replace(KV, entry_scale=3)
    third = ExportPair(pair, wanted)
    third.run([4, 5])
    first.check(*whole)
