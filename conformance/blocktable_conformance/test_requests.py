"""Rows for requests, over a backend: what was synced reaches the device, and so do the rows of a batch (R42-R44)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blocktable import BlockTableConfig, BlockTableError, KVCacheGroup, Requests, UnsupportedError
from blocktable_conformance.asserts import check
from blocktable_conformance.captures import Streams
from blocktable_conformance.gpu import as_tensor, held, need
from blocktable_conformance.subject import Subject, address

NUM_REQS = 6


def make(subject: Subject) -> Requests:
    groups = [KVCacheGroup(block_size=4), KVCacheGroup(block_size=8, kernel_block_size=4)]
    config = BlockTableConfig(
        groups=groups, max_num_reqs=NUM_REQS, max_num_batched_tokens=16, max_model_len=64, steps_in_flight=4
    )
    requests = Requests(subject.table(config))
    requests.table.warmup()
    requests.sync_batch("abcd", [([10 * i + 1, 10 * i + 2], [i + 1]) for i in range(4)])
    return requests


def on_device(requests: Requests, batch: str, size: int = NUM_REQS, **options: Any) -> Any:
    """Return the device's copy; a test is skipped where the backend keeps none, and says so."""
    try:
        return requests.idx_mapping(batch, size, on_device=True, **options)
    except UnsupportedError as error:
        check("put()" in str(error), "R44", f"the refusal must name what is missing, got: {error}")
        pytest.skip("the backend keeps no array up to date on its device")


def rows(requests: Requests, batch: str) -> list[int]:
    return [requests.row(key) for key in batch] + [-1] * (NUM_REQS - len(batch))


def test_a_step_shows_what_requests_were_given(subject: Subject) -> None:
    """Requests that grow, shrink, finish and come again. Rules: R42, R43."""
    requests = make(subject)
    blocks = {"a": ([1, 2, 7], [1]), "b": ([11], [2]), "d": ([31, 32], [4, 9])}
    requests.finish("c")
    requests.sync_batch(list(blocks), list(blocks.values()))
    requests.sync("e", ([41], [6]))
    step = requests.table.step(
        requests.idx_mapping("ea"), np.array([0, 1, 3], np.int32), np.array([0, 8, 11], np.int64), num_tokens_padded=4
    )
    slots = [subject.to_host(array).tolist() for array in step.slot_mappings]
    check(slots == [[164, 28, 31, -1], [48, -1, -1, -1]], "R42", f"slots are {slots}.")
    first = [subject.to_host(array)[:, :4].tolist() for array in step.block_tables]
    check(first == [[[41, 0, 0, 0], [1, 2, 7, 0]], [[12, 13, 0, 0], [2, 3, 0, 0]]], "R42", f"the tables are {first}.")
    requests.table.verify()


def test_the_copy_on_the_device_follows_each_batch(subject: Subject) -> None:
    """Rules: R44."""
    requests = make(subject)
    first = on_device(requests, "dcba")
    where = address(first)
    for batch in ("dcba", "a", "", "bd"):
        got = on_device(requests, batch)
        check(address(got) == where, "R44", "the copy on the device moved.")
        values = subject.to_host(got).tolist()
        check(values == rows(requests, batch), "R44", f"the copy holds {values}, not {rows(requests, batch)}.")
        check(len(subject.to_host(on_device(requests, batch, 4))) == 4, "R44", "the view has another size.")
    requests.table.step(on_device(requests, "ca", 2), *map_inputs(subject), num_reqs_padded=2)
    got = [subject.to_host(array)[:2, 0].tolist() for array in requests.table.buffers.block_tables]
    check(got == [[21, 1], [6, 2]], "R44", f"a step over the copy gathers rows that begin with {got}.")


def map_inputs(subject: Subject) -> tuple[Any, Any]:
    return subject.device_array([0, 1, 2], "int32"), subject.device_array([0, 0], "int64")


def test_a_capture_reads_the_batch_of_each_replay_and_refuses_to_fill(subject: Subject) -> None:
    """Rules: R21, R44."""
    streams = Streams(subject)
    requests = make(subject)
    table, stream = requests.table, streams.create()
    table.commit(stream=stream)
    mapping = on_device(requests, "a", stream=stream)
    table.gather(mapping, NUM_REQS, stream=stream)
    with streams.capture(stream) as captured:
        with pytest.raises(BlockTableError, match="captur"):
            requests.idx_mapping("b", on_device=True, stream=stream)
        table.gather(mapping, NUM_REQS, stream=stream)
    for batch in ("dcba", "b", "ca"):
        on_device(requests, batch, stream=stream)
        streams.synchronize()
        streams.replay(captured)
        got = subject.to_host(table.buffers.block_tables[0])[:, 0].tolist()
        expected = ["abcd".index(key) * 10 + 1 for key in batch] + [0] * (NUM_REQS - len(batch))
        check(got == expected, "R44", f"a replay for {batch!r} gathers rows that begin with {got}.")


def test_copies_follow_one_another_on_a_held_stream(subject: Subject) -> None:
    """Rules: R9.2, R9.3, R44."""
    torch = need(subject, "streams")
    requests = make(subject)
    stream = torch.cuda.Stream()
    requests.table.commit(stream=stream)
    mapping = as_tensor(torch, on_device(requests, "a", stream=stream))
    seen = []
    with held(torch, stream) as hold, torch.cuda.stream(stream):
        for batch in ("dcba", "b", "ca"):
            on_device(requests, batch, stream=stream)
            check(hold.is_busy, "R9.3, R44", "idx_mapping() waited for the device.")
            seen.append(mapping.clone())
    torch.cuda.synchronize()
    got = [copy.tolist() for copy in seen]
    expected = [rows(requests, batch) for batch in ("dcba", "b", "ca")]
    check(got == expected, "R9.2, R44", f"clones after each call hold {got}, not {expected}.")
