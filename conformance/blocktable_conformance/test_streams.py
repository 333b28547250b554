"""Streams, races and memory on a GPU: what a held stream shows (R9, R17, R21, R22)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blocktable import BlockTableConfig, KVCacheGroup
from blocktable_conformance.asserts import check
from blocktable_conformance.gpu import as_tensor, held, inputs, need, tensor
from blocktable_conformance.pair import Pair
from blocktable_conformance.subject import Subject


@pytest.fixture
def torch(subject: Subject) -> Any:
    """Return torch, for a backend with streams."""
    return need(subject, "streams")


def two_groups(steps_in_flight: int = 8) -> BlockTableConfig:
    return BlockTableConfig(
        groups=[KVCacheGroup(block_size=4), KVCacheGroup(block_size=8, kernel_block_size=4, sliding_window=8)],
        max_num_reqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
        steps_in_flight=steps_in_flight,
    )


def warm_pair(subject: Subject, config: BlockTableConfig) -> Pair:
    pair = Pair(subject, config)
    pair.table.warmup()
    return pair


def test_no_call_waits_for_the_device(subject: Subject, torch: Any) -> None:
    """Every call returns while the stream is held, and the results are right after it. Rules: R9.3, R21, R22."""
    pair = warm_pair(subject, two_groups())
    stream = torch.cuda.Stream()
    idx, starts, positions = inputs(torch, [2, 0], [0, 2, 3], [0, 5, 3])
    computed = tensor(torch, [0, 3], "int32")
    pair.do("set_row", 2, ([7, 8], [3]))
    pair.table.step(idx, starts, positions, num_reqs_padded=3, stream=stream)
    with held(torch, stream) as hold:
        calls: dict[str, Callable[[], object]] = {
            "commit": lambda: pair.table.commit(stream=stream),
            "gather": lambda: pair.table.gather(idx, 3, num_computed_tokens=computed, stream=stream),
            "compute_slot_mappings": lambda: pair.table.compute_slot_mappings(idx, starts, positions, stream=stream),
            "step": lambda: pair.table.step(idx, starts, positions, num_reqs_padded=3, stream=stream),
        }
        for name, call in calls.items():
            pair.do("append_row", 0, ([9], [4]))
            call()
            check(hold.is_busy, "R9.3, R22", f"{name}() waited for the device.")
    pair.step([2, 0], [0, 2, 3], [0, 5, 3], num_reqs_padded=3)


def test_commits_wait_only_beyond_steps_in_flight(subject: Subject, torch: Any) -> None:
    """The first `steps_in_flight` unfinished commits do not wait, the next one may; none is lost. Rules: R9.1, R9.3."""
    pair = warm_pair(subject, two_groups(steps_in_flight=2))
    stream = torch.cuda.Stream()
    with held(torch, stream) as hold:
        for block_id in (1, 2):
            pair.do("append_row", 0, ([block_id], []))
            pair.table.commit(stream=stream)
            check(hold.is_busy, "R9.3", f"commit {block_id} of 2 in flight waited.")
        timer = hold.release_after(0.5)
        start = time.monotonic()
        for block_id in (3, 4, 5):
            pair.do("append_row", 0, ([block_id], []))
            pair.table.commit(stream=stream)
        timer.join()
        check(time.monotonic() - start < 5, "R9.3", "commits beyond steps_in_flight never came back.")
    pair.commit()


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("with_dummy", [False, True])
def test_a_queued_commit_never_sees_later_changes(subject: Subject, torch: Any, steps: int, with_dummy: bool) -> None:
    """Cases: M1, M2. Rules: R9.2."""
    pair = warm_pair(subject, two_groups())
    stream = torch.cuda.Stream()
    rows = as_tensor(torch, pair.table.device_table(0))
    dummy = inputs(torch, [-1], [0, 1], [0])
    seen = []
    with held(torch, stream), torch.cuda.stream(stream):
        for step in range(steps):
            pair.table.set_row(0, ([5 + step], []))
            pair.table.commit(stream=stream)
            pair.table.set_row(1, ([50 + step], []))  # on the host only: before the next commit is called
            if with_dummy:
                pair.table.step(*dummy, stream=stream)
            seen.append(rows[0].clone())
    got = [row[0].item() for row in seen]
    check(got == [5 + step for step in range(steps)], "R9.2", f"clones after each commit read {got}.")


def test_many_queued_commits_keep_their_order(subject: Subject, torch: Any) -> None:
    """Random changes committed to a slow stream: each commit shows the host as it was then. Rules: R9.1, R9.2."""
    pair = warm_pair(subject, two_groups(steps_in_flight=2))
    stream = torch.cuda.Stream()
    rng = np.random.default_rng(0)
    rows, seen, expected = as_tensor(torch, pair.table.device_table(0)), [], []
    with torch.cuda.stream(stream):
        for _ in range(40):
            torch.cuda._sleep(200_000)
            for row in rng.permutation(4)[:2].tolist():
                pair.table.set_row(row, (rng.integers(1, 99, rng.integers(0, 8)).tolist(), []))
            pair.table.commit(stream=stream)
            expected.append(pair.table.host_table(0).copy())
            seen.append(rows.clone())
    torch.cuda.synchronize()
    for step, (got, wanted) in enumerate(zip(seen, expected, strict=True)):
        check(
            np.array_equal(got.cpu().numpy(), wanted),
            "R9.1, R9.2",
            f"the table after commit {step} differs from the host's.",
        )
    pair.table.verify()


def test_a_change_of_stream_is_ordered_without_a_wait(subject: Subject, torch: Any) -> None:
    """Rules: R22."""
    pair = warm_pair(subject, two_groups())
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    idx, starts, positions = inputs(torch, [0], [0, 3], [0, 4, 5])
    with held(torch, first) as hold:
        pair.do("set_row", 0, ([7, 9], []))
        pair.table.commit(stream=first)
        slots = pair.table.compute_slot_mappings(idx, starts, positions, stream=second)[0]
        with torch.cuda.stream(second):
            copy = as_tensor(torch, slots).clone()
        check(hold.is_busy, "R22", "a change of stream waited for the device.")
        check(not second.query(), "R22", "the second stream did not wait for the first.")
    check(copy[:3].tolist() == [28, 36, 37], "R22", f"slots on the second stream are {copy[:3].tolist()}.")


@pytest.mark.parametrize("own_stream", [True, False])
def test_work_goes_to_torchs_current_stream(subject: Subject, torch: Any, own_stream: bool) -> None:
    """Write positions, compute, read, a thousand times, with no device-wide wait. Cases: K6. Rules: R22."""
    pair = warm_pair(subject, two_groups())
    pair.do("set_row", 1, ([3, 5, 2], []))
    pair.commit()
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    idx, starts, positions = inputs(torch, [1], [0, 12], range(12))
    expected = tensor(torch, [block * 4 + offset for block in (3, 5, 2) for offset in range(4)], "int64")
    mismatches = torch.zeros((), dtype=torch.int64, device="cuda")
    slots = as_tensor(torch, pair.table.buffers.slot_mappings[0])
    order = torch.arange(12, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for turn in range(1000):
            positions.copy_((order + turn) % 12)
            pair.table.compute_slot_mappings(idx, starts, positions)
            mismatches += (slots[:12] != expected[positions]).sum()
    torch.cuda.synchronize()
    check(mismatches.item() == 0, "R22", f"{mismatches.item()} slots are wrong on torch's current stream.")


def test_a_stream_may_be_named_in_every_form(subject: Subject, torch: Any) -> None:
    """Rules: R22."""
    pair = warm_pair(subject, two_groups())
    side = torch.cuda.Stream()

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, side.cuda_stream

    forms: list[Any] = [0, 1, 2, side.cuda_stream, side, Protocol(), *_library_streams()]
    for block_id, stream in enumerate(forms, start=1):
        pair.do("set_row", 0, ([block_id], [block_id]))
        pair.table.commit(stream=stream)
        pair.oracle.commit()
        pair.check_device()


def _library_streams() -> list[Any]:
    """Return a stream of each other library that is installed."""
    found: list[Any] = []
    try:
        import cupy

        found += [cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null]
    except ImportError:
        pass
    try:
        from numba import cuda

        found += [cuda.stream(), cuda.default_stream()]
    except ImportError:
        pass
    return found


class Interface:
    """Nothing but a `__cuda_array_interface__`."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": tuple(owner.shape),
            "typestr": {4: "<i4", 8: "<i8"}[owner.element_size()],
            "data": (owner.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def _foreign(torch: Any) -> dict[str, Any]:
    """Return name -> what turns a tensor into an array of that library."""
    makers: dict[str, Any] = {"torch": lambda x: x, "interface": Interface}
    try:
        import cupy

        makers["cupy"] = cupy.from_dlpack
    except ImportError:
        pass
    try:
        from numba import cuda

        makers["numba"] = lambda x: cuda.as_cuda_array(x, sync=False)
    except ImportError:
        pass
    return makers


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_foreign_arrays_come_in_at_any_offset(subject: Subject, torch: Any, offset: int) -> None:
    """Rules: R21, R22."""
    pair = warm_pair(subject, two_groups())
    pair.do("set_row", 2, ([7, 8, 9], [3, 4]))
    pair.commit()
    arguments = ([2, -1], [0, 5, 6], [0, 4, 11, 12, 3, 0])
    expected = pair.step(*arguments, num_reqs_padded=3, num_computed_tokens=[9, 0])
    shifted = [
        tensor(torch, [-9] * offset + list(values), dtype)[offset:]
        for values, dtype in zip((*arguments, [9, 0]), ("int32", "int32", "int64", "int32"), strict=True)
    ]
    for name, make in _foreign(torch).items():
        idx, starts, positions, computed = (make(array) for array in shifted)
        step = pair.table.step(idx, starts, positions, num_reqs_padded=3, num_computed_tokens=computed)
        for got, wanted in zip(step.block_tables, expected.block_tables, strict=True):
            check(np.array_equal(subject.to_host(got), wanted), "R22", f"the batch table over {name} arrays differs.")
        for got, wanted in zip(step.slot_mappings, expected.slot_mappings, strict=True):
            check(np.array_equal(subject.to_host(got), wanted), "R22", f"the slots over {name} arrays differ.")


def test_host_arrays_may_be_reused_at_once(subject: Subject, torch: Any) -> None:
    """Rules: R10.8, R15."""
    pair = warm_pair(subject, two_groups())
    pair.do("set_row", 1, ([7, 8], [3]))
    pair.step([1], [0, 2], [3, 4])
    stream = torch.cuda.Stream()
    host = np.array([1], np.int32), np.array([0, 3], np.int32), np.array([1, 4, 6], np.int64)
    pair.table.step(*host, stream=stream)
    with held(torch, stream) as hold:
        step = pair.table.step(*host, num_reqs_padded=2, num_tokens_padded=4, stream=stream)
        for array in host:
            array[:] = 99
        check(hold.is_busy, "R10.8", "a step over host arrays waited for the device.")
    got = subject.to_host(step.slot_mappings[0]).tolist()
    check(got == [29, 32, 34, -1], "R10.8, R15", f"slots over host arrays that were reused are {got}.")


def test_a_steady_step_allocates_nothing(subject: Subject, torch: Any) -> None:
    """Rules: R9.4, R17, R21."""
    pair = warm_pair(subject, two_groups(steps_in_flight=2))
    arrays = inputs(torch, [0, 1], [0, 1, 2], [3, 5])

    def step(count: int) -> Any:
        for turn in range(count):
            pair.table.set_rows([0, 1], [[1 + turn, 2, 3], [4]], [[1, 2], [0, 1]])
            found = pair.table.step(*arrays, num_reqs_padded=4, num_tokens_padded=8)
        return found

    def memory() -> tuple[int, int]:
        torch.cuda.synchronize()
        return torch.cuda.memory_stats().get("allocation.all.allocated", 0), torch.cuda.mem_get_info()[0]

    first, found = step(5), []
    # Other processes use the device too, so its free bytes must stay in one round of three; what leaks does so in all.
    for _ in range(3):
        before = memory()
        last = step(50)
        found.append((before, memory()))
    if not getattr(subject.backend, "costs_follow_width", False):  # those have temporaries, of their library's cache
        check(all(before[0] == after[0] for before, after in found), "R9.4, R21", f"steady steps allocated: {found}.")
    check(
        any(before[1] == after[1] for before, after in found),
        "R9.4, R21",
        f"(allocations, free bytes) changed: {found}.",
    )
    check(first is last, "R17", "a steady step must return the same Step.")


def test_the_current_device_stays(subject: Subject, torch: Any) -> None:
    """A table on the last GPU, used while the first is current. Rules: R22."""
    last = torch.cuda.device_count() - 1
    torch.cuda.set_device(0)
    pair = Pair(subject, two_groups())
    pair.table = type(pair.table)(pair.config, subject.backend, f"cuda:{last}", step_path=subject.step_path)  # type: ignore[arg-type]
    arrays = [array.to(f"cuda:{last}") for array in inputs(torch, [0], [0, 1], [5])]
    pair.table.set_row(0, ([7, 9], [1]))
    step = pair.table.step(*arrays)
    check(torch.cuda.current_device() == 0, "R22", "a step changed the current device.")
    check(subject.to_host(step.slot_mappings[0])[0] == 37, "R22", "a step on another device is wrong.")
    check(torch.cuda.current_device() == 0, "R22", "to_host changed the current device.")
