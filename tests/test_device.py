"""The device layer over a fake device: what it promises to every backend, whatever its driver and its kernels are.

The device lags: work stays in its streams' queues until somebody waits for it, and the newest stream runs first.
"""

from __future__ import annotations

import ctypes
import gc
import struct
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import blocktable as bt
from blocktable.backend import Batch, Writes
from blocktable.device import (
    INT32_MAX,
    SIGNATURES,
    DeviceBackend,
    EmulatedDriver,
    EmulatedStreams,
    KernelArguments,
    signature_of,
    staging,
    store,
)
from blocktable.device.driver import mapped_memory_works

PLAIN, FUSED = frozenset[str](), frozenset({"step_batch"})
CONFIG = bt.BlockTableConfig(
    groups=[bt.KVCacheGroup(block_size=4), bt.KVCacheGroup(block_size=8, kernel_block_size=4)],
    max_num_reqs=4,
    max_num_batched_tokens=16,
    max_model_len=64,
)

# Kernels: a few lines of numpy over addresses. `a`: the arguments, by the names in the kernel's signature.


def ints(address: int, size: int, kind: Any = ctypes.c_int32) -> Any:
    assert address or not size
    return np.ctypeslib.as_array((kind * size).from_address(address)) if size else np.empty(0, np.int32)


def apply_changes(a: Any) -> None:
    memory, sizes = ints(a.arena, a.batch_entries), (a.num_singles, a.num_ranges, a.num_range_values)
    ends = np.cumsum([sizes[0], sizes[0], sizes[1], sizes[1], sizes[2], *2 * [a.num_constant_ranges]])
    places, values, *ranges, first, parts, constants = np.split(ints(a.changes, ends[-1] + a.num_constant_ranges), ends)
    memory[places] = values
    for offsets, starts, values in (
        ranges,
        (first, parts, np.repeat(constants, np.diff([*parts, a.num_constants]))),
    ):
        for offset, start, end in zip(offsets, starts, [*starts, values.size][1:], strict=True):
            memory[offset : offset + end - start] = values[start:end]
    if a.copy_parts:  # no counts are copied: an old batch is cleared without them here
        ints(a.last_mark, 1, ctypes.c_int64)[0] = a.mark


def null_stale_columns(a: Any) -> None:
    ints(a.batch, a.batch_entries)[a.num_groups * a.max_num_reqs :] = bt.NULL_BLOCK_ID


def gather_block_tables(a: Any) -> None:
    source, target, view = ints(a.arena, a.batch_entries), ints(a.batch, a.batch_entries), CONFIG.arena.view
    for group in range(a.num_groups):
        for i, row in enumerate(ints(a.idx_mapping, a.num_reqs)):
            if 0 <= row < a.max_num_rows:
                filled = view(source, -1)[group, row]
                view(target, group)[i, :filled] = view(source, group)[row, :filled]


def map_slots(a: Any) -> None:
    source, view = ints(a.arena, CONFIG.arena.size), CONFIG.arena.view
    starts, positions = ints(a.query_start_loc, a.num_reqs + 1), ints(a.positions, a.num_positions, ctypes.c_int64)
    for y in range(a.num_groups):
        out, group = ints(a.slots + 8 * a.slots_stride * y, a.num_slots, ctypes.c_int64), a.first_group + y
        out[:], size = bt.PAD_SLOT_ID, CONFIG.groups[group].tokens_per_column
        for i, row in enumerate(ints(a.idx_mapping, a.num_reqs)):
            for token in range(starts[i], starts[i + 1]):
                column, offset = divmod(positions[token], size)
                if 0 <= row < a.max_num_rows and column < view(source, -1)[group, row]:
                    out[token] = view(source, group)[row, column] * size + offset


def step_batch(a: Any) -> None:
    if a.gather_blocks:
        null_stale_columns(a)
        gather_block_tables(a)
    a.first_group, a.slots_stride = 0, a.num_slots
    map_slots(a)
    mark = ints(a.last_mark, 1, ctypes.c_int64)[0]
    if mark > 0:
        ints(a.shown_mark, 1, ctypes.c_int64)[0] = mark


def apply_changes_by_value(a: Any) -> None:
    counts = zip(
        ("num_singles", "num_ranges", "num_range_values", "num_constant_ranges", "num_constants"),
        ints(a.changes, 5),
        strict=True,
    )
    a.changes += 20
    vars(a).update(counts)
    apply_changes(a)


KERNELS = (apply_changes, null_stale_columns, gather_block_tables, map_slots, step_batch, apply_changes_by_value)


class Kernel:
    tile = 8

    def __init__(self, driver: FakeDriver, name: str, function: Callable[[Any], None] | None = None) -> None:
        self.name, self._driver, self._signature = name, driver, signature_of(name)
        self._arguments = KernelArguments(self._signature.layout)
        self._function = function or {kernel.__name__: kernel for kernel in KERNELS}[self._signature.name]

    def __call__(self, grid: tuple[int, int], arguments: Sequence[int], stream: int) -> None:
        self._driver.launches.append(self.name)
        self._arguments.set(arguments)  # raises where one does not fit
        names = [name for _, name in self._signature.arguments]
        a, size = SimpleNamespace(**dict(zip(names, arguments, strict=True))), self.name.rpartition("_")[2]
        if size.isdecimal():  # by value: the launch keeps a copy
            a.copy = ints(a.changes, int(size)).copy()
            a.changes = a.copy.ctypes.data
        self._driver.streams.run(stream, lambda: self._function(a))


# The device.


class LaggingStreams(EmulatedStreams):
    def __init__(self) -> None:
        super().__init__()
        self.queues: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        self.done: Counter[int] = Counter()

    def run(self, stream: int, work: Callable[[], None]) -> None:
        super().run(stream, work) if self.capture_of(stream) else self.queues[stream].append(work)

    def run_until(self, stream: int, position: int) -> None:
        while self.done[stream] < position:
            self.done[stream] += 1
            self.queues[stream][self.done[stream] - 1]()

    def drain(self) -> None:
        for stream in sorted(self.queues, reverse=True):
            self.run_until(stream, len(self.queues[stream]))

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) - self.done[stream] for stream, queue in self.queues.items())


class FakeDriver(EmulatedDriver):
    newest: FakeDriver
    streams: LaggingStreams
    many_slots = INT32_MAX

    def __init__(self, variants: frozenset[str] = PLAIN, change_sizes: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.streams = LaggingStreams()
        self.variants, self.change_sizes = variants, change_sizes
        self.launches: list[str] = []
        self.num_waits = self.depth = 0
        FakeDriver.newest = self

    def kernel(self, name: str, options: Any) -> Any:
        return Kernel(self, name)

    def download(self, array: Any) -> Any:
        self.streams.drain()
        return super().download(array)

    def synchronize(self) -> None:
        self.streams.drain()

    def send(self, block: Any, entries: int, stream: int) -> None:
        self.streams.run(stream, lambda: EmulatedDriver.send(self, block, entries, stream))

    def copy_in(self, values: Any, target: Any, stream: int) -> None:
        self.streams.run(stream, lambda: EmulatedDriver.copy_in(self, values, target, stream))
        self.wait(self.mark(stream))

    def order(self, before: int, after: int) -> None:
        super().order(before, after)
        position = len(self.streams.queues[before])
        self.streams.run(after, lambda: self.streams.run_until(before, position))

    def mark(self, stream: int) -> Any:
        return (*super().mark(stream), stream, len(self.streams.queues[stream]))

    def wait(self, mark: Any) -> None:
        super().wait(mark)
        self.num_waits += self.streams.done[mark[1]] < mark[2]
        self.streams.run_until(*mark[1:])

    @contextmanager
    def current(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def is_current(self) -> bool:
        return self.depth > 0


class FakeBackend(DeviceBackend):
    name = "fake"
    has_exports = False

    def __init__(self, *arguments: Any, kind: type[FakeDriver] = FakeDriver) -> None:
        super().__init__(is_emulated=True)
        self._kind, self._arguments = kind, arguments

    def why_unavailable(self) -> str | None:
        return None

    def place(self, device: Any) -> Any:
        return None

    def make_driver(self, place: Any) -> Any:
        return self._kind(*self._arguments)


def make(*arguments: Any, step_path: Any = "auto", **kwargs: Any) -> tuple[bt.BlockTable, Any]:
    backend = FakeBackend(*arguments, **kwargs)
    table = bt.BlockTable(CONFIG, backend, step_path=step_path)
    return table, backend.driver(None)


@pytest.fixture(autouse=True)
def naps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the device go on while the host sleeps: where it waits for the number of a step."""

    def nap(seconds: float) -> None:
        FakeDriver.newest.num_waits += 1
        assert FakeDriver.newest.num_waits < 1000, "the host waits for what nobody shows it"
        FakeDriver.newest.streams.drain()

    monkeypatch.setattr(time, "sleep", nap)


def device_inputs(table: bt.BlockTable, *values: Any) -> list[Any]:
    dtypes = (np.int32, np.int32, np.int64)
    return [table.backend.from_host(np.array(x, dtype)) for x, dtype in zip(values, dtypes, strict=True)]


def everything(table: bt.BlockTable) -> list[Any]:
    arrays = [table.device_table(group) for group in (0, 1)]
    arrays += [*table.buffers.block_tables, *table.buffers.slot_mappings]
    return [table.backend.to_host(array).tolist() for array in arrays]


@pytest.mark.parametrize("staged", ["auto", "mapped", "copy"])
@pytest.mark.parametrize("change_sizes", [(), (16, 64)])
@pytest.mark.parametrize(
    ("variants", "step_path"),
    [(PLAIN, "separate"), (PLAIN, "fused"), (FUSED, "fused")],
    ids=["separate", "plain", "fused"],
)
def test_a_device_that_lags_ends_as_numpy_does(
    staged: str,
    change_sizes: tuple[int, ...],
    variants: frozenset[str],
    step_path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random changes on changing streams, none of which a later one may overwrite. Rules: R9.1, R9.2, R22."""
    monkeypatch.setenv("BLOCKTABLE_STAGING", staged)
    table, driver = make(variants, change_sizes, step_path=step_path)
    truth, rng = bt.BlockTable(CONFIG, "numpy"), np.random.default_rng(0)
    streams, kept = [driver.streams.create() for _ in range(3)], []
    for turn in range(60):
        row, stream = int(rng.integers(4)), streams[rng.integers(3)]
        ids = [rng.integers(1, 99, rng.integers(0, 7)).tolist(), rng.integers(1, 99, rng.integers(0, 4)).tolist()]
        num_tokens = rng.integers(0, 4, 2)
        inputs = (rng.integers(-1, 4, 2), [0, num_tokens[0], num_tokens.sum()], rng.integers(0, 30, num_tokens.sum()))
        host = [np.array(x, dtype) for x, dtype in zip(inputs, (np.int32, np.int32, np.int64), strict=True)]
        arrays = host if turn % 3 else device_inputs(table, *inputs)
        kept.append(arrays)  # the device has yet to read them
        for each in (table, truth):
            if turn % 5:
                each.set_row(row, ids)
        table.step(*arrays, stream=stream)
        truth.step(*host)
        for array in host:
            array[:] = 0  # the caller's again
        if turn % 4 == 0:
            assert everything(table) == everything(truth)
    assert everything(table) == everything(truth)
    assert driver.is_mapped == (staged != "copy")
    expected = {"apply_changes_16", "apply_changes_64"} if change_sizes and staged == "auto" else set()
    assert {name for name in driver.launches if name[-1].isdigit()} == expected
    assert ("step_batch" in driver.launches) == (variants == FUSED)
    assert ("map_slots" in driver.launches) == (variants != FUSED)


@pytest.mark.parametrize(("variants", "change_sizes"), [(PLAIN, ()), (FUSED, ()), (FUSED, (64,))])
@pytest.mark.parametrize("call", ["commit", "step"])
def test_a_host_waits_only_beyond_the_steps_in_flight(
    call: str, variants: frozenset[str], change_sizes: tuple[int, ...]
) -> None:
    """Rules: R9.3."""
    table, driver = make(variants, change_sizes)
    inputs = device_inputs(table, [0], [0, 1], [5])
    for _ in range(CONFIG.steps_in_flight):  # so that each block has been used once
        table.set_row(0, ([9], []))
        table.step(*inputs)
    driver.streams.drain()
    for turn in range(CONFIG.steps_in_flight + 1):
        assert driver.num_waits == 0
        table.set_row(0, ([turn + 1], []))
        table.commit() if call == "commit" else table.step(*inputs)
        if turn == 0:
            table.commit()  # of nothing, which takes no block
    assert driver.num_waits == (0 if change_sizes else 1)
    assert table.backend.to_host(table.device_table(0))[0, 0] == turn + 1


def test_a_commit_of_nothing_launches_nothing() -> None:
    """Rules: R9.6."""
    table, driver = make()
    before = list(driver.launches)
    table.commit()
    table.store.commit(0, stream=None)  # type: ignore[attr-defined]
    assert driver.launches == before
    assert driver.streams.num_waiting == 0


@pytest.mark.parametrize("variants", [PLAIN, FUSED], ids=["plain", "fused"])
def test_host_arrays_are_read_at_every_step(variants: frozenset[str]) -> None:
    """Rules: R15."""
    table, driver = make(variants)
    table.set_row(1, ([7, 9], [3]))
    table.commit()
    positions, memory = np.array([0]), cast(Any, table.store)
    batch = Batch(np.array([1], np.int32), np.array([0, 1], np.int32), positions, 1, 1, None, 1)
    for position, slot in ((0, 28), (5, 37)):
        positions[0] = position
        memory.step(0, batch, table.buffers, stream=None)
        assert driver.download(table.buffers.slot_mappings[0])[0] == slot


@pytest.mark.parametrize("staged", ["auto", "copy"])
@pytest.mark.parametrize("variants", [PLAIN, FUSED], ids=["plain", "fused"])
def test_host_arrays_travel_in_one_copy_to_one_place(
    variants: frozenset[str], staged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the launches of a step stay as they are, and kernels read no host memory. Rules: R9.2, R10.8, R21."""
    monkeypatch.setenv("BLOCKTABLE_STAGING", staged)
    table, driver = make(variants)
    table.set_row(1, ([7, 9], [3]))
    table.commit()
    sent: list[tuple[int, int]] = []
    right = driver.send

    def send(block: Any, entries: int, stream: int) -> None:
        sent.append((block.address, entries))
        right(block, entries, stream)

    monkeypatch.setattr(driver, "send", send)
    launches = []
    for turn in range(4 * CONFIG.steps_in_flight):
        position = turn % 8
        host = np.array([1], np.int32), np.array([0, 1], np.int32), np.array([position])
        table.step(*host)
        launches.append(next(iter(table._own_views.plans.values())).prepared.launches)
        for array in host:
            array[:] = 0  # the caller's again
        if turn % 3 == 0:
            slot = 28 + position if position < 4 else 32 + position
            assert driver.download(table.buffers.slot_mappings[0])[0] == slot
    assert set(sent) == {(sent[0][0], 5)}  # a position of 8 bytes, a row, two starts
    assert len(sent) == len(launches)
    assert all(each is launches[0] for each in launches)
    assert len(table._own_views.plans) == 1


# Streams and captures.


@pytest.mark.parametrize(
    "before", ["eager on A", "eager and captured on A", "captured on A", "captured on A, eager on C"]
)
def test_a_table_does_not_leave_a_stream_that_is_capturing(before: str) -> None:
    """Rules: R21, R22."""
    table, driver = make()
    streams = driver.streams
    a, b, c = (streams.create() for _ in range(3))
    inputs = device_inputs(table, [0], [0, 1], [0])
    table.append_row(0, ([7], []))
    if "eager" in before:
        table.commit(stream=c if before.endswith("C") else a)
    capture = streams.begin_capture(a)
    if "captured" in before:
        table.compute_slot_mappings(*inputs, stream=a)
    table.append_row(0, ([8], []))
    for call in (lambda: table.commit(stream=b), lambda: table.step(*inputs, stream=b)):
        with pytest.raises(bt.BlockTableError, match="cannot change stream while"):
            call()
    with pytest.raises(bt.BlockTableError, match="cannot be captured"):
        table.commit(stream=a)
    streams.end_capture(capture)  # nothing has broken it
    table.commit(stream=b)  # and nothing was lost
    assert table.backend.to_host(table.device_table(0))[0, :3].tolist() == [7, 8, 0]
    capture.replay()
    assert table.backend.to_host(table.buffers.slot_mappings[0])[0] == (28 if "captured" in before else -1)


def test_a_step_inside_a_capture_is_its_plain_kernels() -> None:
    """Rules: R21."""
    table, driver = make(FUSED)
    inputs, stream = device_inputs(table, [1], [0, 2], [3, 4]), driver.streams.create()
    table.set_row(1, ([7, 9], [3]))
    table.commit(stream=stream)
    capture = driver.streams.begin_capture(stream)
    first = len(driver.launches)
    table.step(*inputs, stream=stream)
    with pytest.raises(bt.BlockTableError, match="host arrays cannot be captured"):
        table.compute_slot_mappings(*(np.array(array) for array in inputs), stream=stream)
    driver.streams.end_capture(capture)
    assert driver.launches[first:] == ["null_stale_columns", "gather_block_tables", "map_slots"]
    driver.streams.drain()
    capture.replay()
    slots = table.backend.to_host(table.buffers.slot_mappings[0])
    assert slots[:3].tolist() == [31, 36, -1]


# Sizes.


@pytest.mark.parametrize("staged", ["auto", "copy"])
def test_changes_beyond_the_largest_offset_are_cut(staged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R9.5."""
    monkeypatch.setenv("BLOCKTABLE_STAGING", staged)
    monkeypatch.setattr(store, "LARGEST_OFFSET", 50)
    table, driver = make()
    memory: Any = table.store
    size, first = CONFIG.arena.size, len(driver.launches)
    values = np.arange(1, size + 1, dtype=np.int32)
    for offsets in (np.arange(0, size, 2), np.arange(1, size, 2)):
        changes = values[offsets]
        memory.write(Writes(CONFIG.arena, offsets, np.ones_like(changes), changes), stream=None)
        changes[:] = -5  # the core's again
    assert driver.launches[first:] == ["apply_changes"] * 2 * -(-size // 50)
    assert table.backend.to_host(memory.arena).tolist() == values.tolist()


@pytest.mark.parametrize("staged", ["auto", "copy"])
def test_a_commit_of_more_than_a_block_is_done_when_it_returns(staged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its long ranges are copied as they are, the others scattered. Rules: R9.5."""
    monkeypatch.setenv("BLOCKTABLE_STAGING", staged)
    monkeypatch.setattr(Writes.split_long, "__defaults__", (100,))
    table, driver = make()
    memory: Any = table.store
    size, first, stream = CONFIG.arena.size, len(driver.launches), driver.streams.create()
    offsets = np.array([0, 120, 123])
    lengths = np.array([110, 2, size - 123], np.int32)
    values = np.arange(1, lengths.sum() + 1, dtype=np.int32)
    assert values.size > staging.steady_entries(CONFIG)
    memory.write(Writes(CONFIG.arena, offsets, lengths, values.copy()), stream=stream)
    assert driver.streams.num_waiting == 0
    assert driver.launches[first:] == ["apply_changes"]
    expected = np.zeros(size, np.int32)
    expected[:110], expected[120:122], expected[123:] = np.split(values, [110, 112])
    assert table.backend.to_host(memory.arena).tolist() == expected.tolist()


def test_host_inputs_larger_than_the_ring_are_staged_aside() -> None:
    """Slots may be asked for in longer arrays than the table's own. Rules: R15."""
    table, driver = make()
    num_tokens, out = 500, [table.backend.from_host(np.zeros(500, np.int64)) for _ in range(2)]
    table.set_row(2, (list(range(1, 17)), []))
    table.commit()
    positions = np.arange(num_tokens) % 64
    host = np.array([2], np.int32), np.array([0, num_tokens], np.int32), positions.copy()
    table.compute_slot_mappings(*host, out=out)
    assert driver.streams.num_waiting == 0
    for array in host:
        array[:] = 0
    expected = (positions // 4 + 1) * 4 + positions % 4
    assert table.backend.to_host(out[0]).tolist() == expected.tolist()
    assert set(table.backend.to_host(out[1])) == {bt.PAD_SLOT_ID}


# The device, and its memory.


class Elsewhere(FakeDriver):
    """A device that is not the current one: whatever is asked of it must come inside `current()`."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in vars(FakeDriver) | vars(EmulatedDriver) and callable(found) and not name.startswith("__"):
            is_free = name in ("current", "is_current", "stream", "is_capturing", "address")
            assert self.depth or is_free, f"{name}() was called for another device"
        return found


@pytest.mark.parametrize("staged", ["auto", "copy"])
@pytest.mark.parametrize("variants", [PLAIN, FUSED], ids=["plain", "fused"])
def test_a_device_is_made_current_around_every_call(
    variants: frozenset[str], staged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules: R22."""
    monkeypatch.setenv("BLOCKTABLE_STAGING", staged)
    table, driver = make(variants, kind=Elsewhere)
    table.warmup()
    streams = [driver.streams.create() for _ in range(2)]
    inputs = device_inputs(table, [0], [0, 1], [0])
    for turn in range(6):
        table.set_row(0, ([turn + 1], [2]))
        table.commit(stream=streams[turn % 2])
        table.set_row(1, ([turn + 1], [2]))
        table.step(*inputs, stream=streams[0])
        table.gather(inputs[0], stream=streams[1])
        table.compute_slot_mappings(*inputs)
    table.step(*(np.array(array) for array in inputs))
    table.invalidate()
    table.commit()
    assert everything(table)[0][0][0] == turn + 1
    table.backend.synchronize()
    assert driver.depth == 0


@pytest.mark.parametrize("step_path", ["separate", "fused"])
@pytest.mark.parametrize("variants", [PLAIN, FUSED], ids=["plain", "fused"])
def test_a_dropped_table_frees_its_memory_without_the_collector(variants: frozenset[str], step_path: str) -> None:
    table, driver = make(variants, step_path=step_path)
    inputs = device_inputs(table, [0], [0, 1], [0])
    table.set_row(0, ([1], [2]))
    table.step(*inputs)
    table.step(*(np.array(array) for array in inputs))
    driver.streams.drain()
    driver.streams.queues.clear()
    memory: Any = table.store
    blocks = [next(ring.blocks).host for ring in (memory._changes, memory._inputs) for _ in range(4)]
    owned = [weakref.ref(array) for array in (memory.arena, table.buffers.batch, table.buffers.slots, *blocks)]  # type: ignore[attr-defined]
    gc.collect()
    gc.disable()
    try:
        del table, memory, blocks
        assert not [ref for ref in owned if ref() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("is_seen", [True, False])
def test_mapped_memory_is_used_where_kernels_see_what_the_host_writes(is_seen: bool) -> None:
    """Rules: R9.1."""
    driver = FakeDriver()
    if not is_seen:  # a device that keeps what it has read once
        kept: list[Any] = []

        def apply_once(a: Any) -> None:
            kept.append(kept[0] if kept else ints(a.changes, 2).copy())
            a.changes = kept[-1].ctypes.data
            apply_changes(a)

        driver.kernel = lambda name, options: Kernel(driver, name, apply_once)  # type: ignore[method-assign]
    assert mapped_memory_works(driver) == is_seen


class Pageable(FakeDriver):
    """A device whose host may pin no memory: none of it is mapped."""

    is_emulated = False

    def host_block(self, entries: int) -> Any:
        if self.is_mapped:
            raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
        return super().host_block(entries)


def test_changes_are_copied_where_no_mapped_memory_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R9.1."""
    backend = FakeBackend(kind=Pageable)
    backend.is_emulated = False
    monkeypatch.setattr(backend, "graph_problem", lambda: "a fake has none")
    table = bt.BlockTable(CONFIG, backend)
    assert backend.fallbacks == (
        "changes travel in pinned memory and copies: mapped memory is not used here",
        "steps are separate launches: a fake has none",
    )
    table.set_row(1, ([5, 6], [7]))
    table.commit()
    table.verify()
    monkeypatch.setenv("BLOCKTABLE_STAGING", "mapped")
    with pytest.raises(RuntimeError, match="out of memory"):
        bt.BlockTable(CONFIG, backend)


@pytest.mark.parametrize("staged", ["auto", "copy"])
def test_a_kernel_writes_to_the_host_only_where_memory_is_mapped(staged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules: R9.1."""
    monkeypatch.setenv("BLOCKTABLE_STAGING", staged)
    table, driver = make(FUSED)
    inputs = device_inputs(table, [0], [0, 1], [0])
    for block_id in range(1, 6):
        table.set_row(0, ([block_id], [block_id]))
        table.step(*inputs)
    driver.streams.drain()
    memory: Any = table.store
    assert (memory._marks.shown[0] > 0) == (staged == "auto")


def test_changes_by_value_are_refused_where_no_kernel_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKTABLE_STAGING", "params")
    with pytest.raises(bt.ArgumentError, match="'fake' does not have"):
        make()
    make(PLAIN, (16,))


# Arguments and grids.


@pytest.fixture(params=["numpy", "auto"])
def host_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack arguments on each host path."""
    monkeypatch.setenv("BLOCKTABLE_HOST_PATH", request.param)


@pytest.mark.usefixtures("host_path")
def test_arguments_are_packed_where_a_launch_looks_for_them() -> None:
    arguments = KernelArguments("iQqi")
    arguments.set((-1, 2**64 - 1, -(2**63), 7))
    kinds = ctypes.c_int32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32
    places = ints(arguments.pointers, 4, ctypes.c_uint64).tolist()
    assert [kind.from_address(place).value for kind, place in zip(kinds, places, strict=True)] == [
        *(-1, 2**64 - 1, -(2**63), 7)
    ]
    assert [place % ctypes.alignment(kind) for kind, place in zip(kinds, places, strict=True)] == [0, 0, 0, 0]


@pytest.mark.usefixtures("host_path")
def test_a_structure_is_pointed_at_where_it_lies() -> None:
    arguments = KernelArguments("Si")
    arguments.set((4096, 7))
    structure, number = ints(arguments.pointers, 2, ctypes.c_uint64).tolist()
    assert (structure, ctypes.c_int32.from_address(number).value) == (4096, 7)


@pytest.mark.parametrize(
    ("layout", "value"), [("i", 2**31), ("i", -(2**31) - 1), ("q", 2**63), ("Q", 2**64), ("Q", -1), ("i", None)]
)
@pytest.mark.usefixtures("host_path")
def test_an_argument_that_does_not_fit_is_refused(layout: str, value: int) -> None:
    with pytest.raises(struct.error):
        KernelArguments(layout).set((value,))


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("map_slots", {"num_slots": 17, "num_groups": 3}, (3, 3)),
        ("map_slots", {"num_slots": 16, "num_groups": 1}, (2, 1)),
        ("map_slots", {"num_slots": 0, "num_groups": 1}, (1, 1)),
        ("map_slots", {"num_slots": INT32_MAX, "num_groups": 70000}, (32, 65535)),  # below 2**31 threads
        ("null_stale_columns", {"num_reqs_padded": 17, "num_groups": 2}, (17, 2)),  # a block for each row
        ("write_indices", {"capacity": 10**6, "num_members": 2}, (2048, 2)),
        ("gather_state_indices", {"max_batch": 3, "num_columns": 6, "num_members": 2}, (3, 2)),
    ],
)
def test_a_grid_covers_its_entries_and_groups(name: str, sizes: dict[str, int], expected: tuple[int, int]) -> None:
    signature = SIGNATURES[name]
    arguments = [sizes.get(argument, -1) for _, argument in signature.arguments]
    assert signature.grid(arguments, 8) == expected
