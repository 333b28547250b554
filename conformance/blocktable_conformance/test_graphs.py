"""Capture and replay of torch's CUDA graphs: a replay equals the eager call, whatever its inputs hold by then (R21)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from blocktable import BlockTableConfig, BlockTableError, KVCacheGroup
from blocktable_conformance.asserts import check
from blocktable_conformance.gpu import inputs, need, tensor
from blocktable_conformance.pair import Pair
from blocktable_conformance.subject import Subject

NUM_REQS = 4
NUM_TOKENS = 12


@pytest.fixture
def torch(subject: Subject) -> Any:
    """Return torch, for a backend whose calls can be captured."""
    return need(subject, "graph_capture")


class Captured:
    """A graph of gather and compute_slot_mappings over static inputs, as an engine holds one for each batch size."""

    def __init__(self, torch: Any, pair: Pair, *, by_step: bool = False) -> None:
        self.pair = pair
        self.idx, self.starts, self.positions = inputs(torch, [-1] * NUM_REQS, [0] * (NUM_REQS + 1), [0] * NUM_TOKENS)
        self.computed = tensor(torch, [0] * NUM_REQS, "int32")
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            if by_step:
                pair.table.step(
                    self.idx, self.starts, self.positions, num_reqs_padded=NUM_REQS, num_computed_tokens=self.computed
                )
            else:
                pair.table.gather(self.idx, NUM_REQS, num_computed_tokens=self.computed)
                pair.table.compute_slot_mappings(self.idx, self.starts, self.positions)

    def replay(self, idx: Sequence[int], starts: Sequence[int], positions: Sequence[int]) -> None:
        """Fill the static inputs as an engine does, replay, and compare whole buffers with the oracle."""
        pair, count = self.pair, len(idx)
        whole_idx = [*idx, *[-1] * (NUM_REQS - count)]
        whole_starts = [*starts, *[starts[-1]] * (NUM_REQS - count)]
        computed = [9] * NUM_REQS
        for target, values in (
            (self.idx, whole_idx),
            (self.starts, whole_starts),
            (self.positions, [*positions, *[0] * (NUM_TOKENS - len(positions))]),
            (self.computed, computed),
        ):
            target.copy_(target.new_tensor(list(values)))
        self.graph.replay()
        whole_positions = [*positions, *[0] * (NUM_TOKENS - len(positions))]
        pair.check_written(whole_idx, whole_starts, whole_positions, num_computed_tokens=computed)


def make(subject: Subject) -> Pair:
    config = BlockTableConfig(
        groups=[KVCacheGroup(block_size=4), KVCacheGroup(block_size=8, kernel_block_size=4, sliding_window=8)],
        max_num_reqs=6,
        max_num_batched_tokens=16,
        max_model_len=64,
    )
    pair = Pair(subject, config)
    for row in range(6):
        pair.do("set_row", row, ([10 * row + 1, 10 * row + 2, 10 * row + 3], [row + 1, row + 7]))
    pair.commit()
    pair.table.warmup()
    return pair


@pytest.mark.parametrize("by_step", [False, True])
def test_replays_follow_their_inputs_and_leave_nothing_behind(subject: Subject, torch: Any, by_step: bool) -> None:
    """Cases: M5. Rules: R10.6, R21."""
    captured = Captured(torch, make(subject), by_step=by_step)
    captured.replay([3, 1, 0, 5], [0, 1, 4, 6, 12], range(12))
    captured.replay([2], [0, 2], [8, 3])
    captured.replay([], [0], [])
    captured.replay([4, 9, -3], [0, 0, 3, 4], [0, 1, 2, 11])


def test_replays_see_committed_rows(subject: Subject, torch: Any) -> None:
    """Cases: M6. Rules: R9.2, R21."""
    pair = make(subject)
    captured = Captured(torch, pair)
    captured.replay([0], [0, 1], [5])
    pair.do("set_row", 0, ([9], [4]))
    captured.replay([0], [0, 1], [5])  # not committed yet
    pair.table.commit()
    pair.oracle.commit()
    captured.replay([0], [0, 1], [3])
    captured.replay([0], [0, 1], [3])


def test_row_changes_are_refused_inside_a_capture(subject: Subject, torch: Any) -> None:
    """Cases: M6. Rules: R21."""
    pair = make(subject)
    arrays = inputs(torch, [0], [0, 1], [5])
    pair.table.step(*arrays)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(BlockTableError, match="capture"):
            pair.table.commit()
        pair.table.set_row(0, ([9], [4]))
        with pytest.raises(BlockTableError, match="capture"):
            pair.table.step(*arrays)
        pair.table.gather(arrays[0], 1)
        pair.table.compute_slot_mappings(*arrays)
    pair.table.step(*arrays)  # what was pending still is
    graph.replay()
    got = subject.to_host(pair.table.buffers.block_tables[0])[0, :3].tolist()
    check(got == [9, 0, 0], "R21", f"after a refused step inside a capture row 0 is {got}.")


def test_host_arrays_are_refused_inside_a_capture(subject: Subject, torch: Any) -> None:
    """Rules: R21."""
    pair = make(subject)
    device = inputs(torch, [0], [0, 1], [5])
    host = np.array([0], np.int32)
    pair.table.step(*device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(BlockTableError, match="captur"):
            pair.table.compute_slot_mappings(host, device[1], device[2])
        pair.table.compute_slot_mappings(*device)


def test_a_capture_is_refused_before_the_table_has_seen_an_array(subject: Subject, torch: Any) -> None:
    """commit() notices a capture that torch has begun, even as the table's first call. Rules: R21, R22."""
    pair = Pair(subject, make(subject).config)
    graph, target = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        with pytest.raises(BlockTableError, match="capture"):
            pair.table.commit()
        target += 1
    graph.replay()
    check(target.tolist() == [1] * 4, "R21", "a refused commit broke the capture around it.")


def test_several_graphs_in_any_order_with_eager_steps_between(subject: Subject, torch: Any) -> None:
    """Rules: R10.6, R21."""
    pair = make(subject)
    first, second = Captured(torch, pair), Captured(torch, pair, by_step=True)
    first.replay([3, 1, 0, 5], [0, 1, 4, 6, 12], range(12))
    second.replay([1], [0, 3], [0, 4, 9])
    pair.step([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6], [1] * 6, num_reqs_padded=6)
    first.replay([2], [0, 1], [0])
    pair.do("append_row", 2, ([77], []))
    pair.step([2], [0, 1], [13])
    second.replay([2, 0], [0, 1, 2], [13, 1])
    first.replay([], [0], [])


def test_graphs_outlive_sleep_and_wake(subject: Subject, torch: Any) -> None:
    """Rules: R21, R24."""
    pair = make(subject)
    captured = Captured(torch, pair)
    captured.replay([3, 1, 0, 5], [0, 1, 4, 6, 12], range(12))
    pair.invalidate()
    captured.replay([5, 2], [0, 1, 4], [0, 3, 7, 11])


def test_a_change_of_stream_inside_a_capture_is_refused(subject: Subject, torch: Any) -> None:
    """Rules: R22."""
    pair = make(subject)
    arrays = inputs(torch, [0], [0, 1], [5])
    pair.table.step(*arrays)
    main, other = torch.cuda.Stream(), torch.cuda.Stream()  # torch has few, and may give a capture one of them
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=main):
        pair.table.compute_slot_mappings(*arrays)
        other.wait_stream(main)
        with torch.cuda.stream(other), pytest.raises(BlockTableError, match="stream"):
            pair.table.compute_slot_mappings(*arrays)
        main.wait_stream(other)


def test_nothing_is_compiled_after_warmup(subject: Subject, torch: Any) -> None:
    """Cases: K4. Rules: R21."""
    config = BlockTableConfig(
        groups=[KVCacheGroup(block_size=4), KVCacheGroup(block_size=16, kernel_block_size=8)],
        max_num_reqs=16,
        max_num_batched_tokens=64,
        max_model_len=64,
    )
    table = subject.table(config)
    table.warmup()
    compiled = getattr(subject.backend, "num_compilations", None)
    check(compiled is not None, "R21", f"{subject.label} must say num_compilations: how many kernels it has compiled.")
    for num_reqs in (1, 2, 16):
        for num_tokens in (1, 2, 16, 17, 33):
            starts = np.minimum(np.arange(num_reqs + 1) * num_tokens, num_tokens)
            arrays = inputs(torch, range(num_reqs), starts.tolist(), range(num_tokens))
            shifted = [torch.cat((array[:1], array))[1:] for array in arrays]
            table.append_rows(np.arange(num_reqs), [np.ones(num_reqs, np.int32)] * 2, np.ones(num_reqs, np.int64))
            for these in (arrays, shifted):
                table.step(*these, num_reqs_padded=num_reqs)
            table.step(None, arrays[1], arrays[2])
            table.clear()
    torch.cuda.synchronize()
    now = subject.backend.num_compilations  # type: ignore[attr-defined]
    check(now == compiled, "R21", f"{now - compiled} kernels were compiled after warmup().")
