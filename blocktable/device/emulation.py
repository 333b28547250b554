"""A device on the host: its memory, and streams whose captures behave as CUDA's, for kernels that run emulated.

What a backend's emulation is made of: it adds how its kernels run. Work is done when its call returns, except for
captured work, which runs at each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from blocktable.arrays import IntArray
from blocktable.device.driver import HostBlock
from blocktable.device.signatures import Grid, KernelOptions
from blocktable.errors import ArgumentError, DtypeError
from blocktable.streams import address_of

MANY_SLOTS = 32
"""Few enough that the suite's batches go both ways."""


class DeviceArray(np.ndarray[Any, Any]):
    """An array of an emulated device: a numpy array that is not taken for one of the host's."""


class EmulatedCapture:
    """A graph in the making: the work of its streams, in order.

    Attributes:
        origin: the stream that it began on.
        joined: every stream whose work is part of it now.
        problem: what has broken it, in CUDA's words; empty: nothing.
        work: what a replay does, in order.
    """

    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.joined: set[int] = {origin}
        self.unjoined: set[int] = set()
        self.problem = ""
        self.work: list[Callable[[], None]] = []

    def replay(self) -> None:
        """Run the graph."""
        for work in self.work:
            work()


class EmulatedStreams:
    """The streams of an emulated device, and the captures that are under way.

    Attributes:
        current: the stream that is meant where none is named.
    """

    def __init__(self) -> None:
        self.current: int = 1
        self._last = 100
        self._captures: list[EmulatedCapture] = []

    def create(self) -> int:
        """Return a new stream."""
        self._last += 1
        return self._last

    def capture_of(self, stream: int) -> EmulatedCapture | None:
        """Return the capture that a stream's work goes into; None: it is done as it comes."""
        return next((capture for capture in self._captures if stream in capture.joined), None)

    def begin_capture(self, stream: int) -> EmulatedCapture:
        """Begin a capture on a stream."""
        self._captures.append(EmulatedCapture(stream))
        return self._captures[-1]

    def end_capture(self, capture: EmulatedCapture) -> None:
        """End it.

        Raises:
            RuntimeError: something has broken it, or a stream was drawn into it and never ordered back.
        """
        self._captures.remove(capture)
        if capture.problem:
            raise RuntimeError(f"the capture was invalidated: {capture.problem}")
        if capture.unjoined:
            raise RuntimeError("capturing stream has unjoined work")

    def run(self, stream: int, work: Callable[[], None]) -> None:
        """Do a piece of work on a stream, or keep it for the replays."""
        capture = self.capture_of(stream)
        if capture is None:
            work()
            return
        if stream != capture.origin:
            capture.unjoined.add(stream)
        capture.work.append(work)

    def wait_for(self, stream: int, event: EmulatedCapture | None, origin: int) -> None:
        """Make a stream wait for an event on the stream `origin`: the capture that its work went into."""
        capture = self.capture_of(stream)
        if event is None:
            if capture is not None:
                capture.problem = "dependency created on uncaptured work in another stream"
                raise RuntimeError(capture.problem)
        elif capture is None:
            event.joined.add(stream)  # from here on its work is part of that capture,
            event.unjoined.add(stream)  # until the capture's first stream waits for it
        elif stream == event.origin:
            event.unjoined.discard(origin)

    def synchronize(self, event: EmulatedCapture | None) -> None:
        """Make the host wait for an event."""
        if event is not None:
            event.problem = "operation not permitted when stream is capturing"
            raise RuntimeError(event.problem)


class EmulatedDriver:
    """A driver whose device is the host. A backend's emulation derives from it and adds `kernel`.

    Args:
        device: None or "cpu".
        staging: how changes travel, `staging_mode`.
    """

    is_emulated = True
    overlaps = False
    many_slots = MANY_SLOTS
    change_sizes: tuple[int, ...] = ()
    variants: frozenset[str] = frozenset()

    def __init__(self, device: Any = None, staging: str = "auto") -> None:
        if str(device) not in ("None", "cpu"):
            raise ArgumentError(f'The emulation runs on the host: device must be None or "cpu", got {device!r}.')
        self.is_mapped: bool = staging != "copy"
        self.streams: EmulatedStreams = EmulatedStreams()

    # Memory.

    def full(self, size: int, value: int, dtype: str) -> Any:
        return np.full(size, value, dtype).view(DeviceArray)

    def fill(self, array: Any, value: int, stream: int) -> None:
        def fill() -> None:
            array[...] = value

        self.streams.run(stream, fill)

    def upload(self, array: IntArray) -> Any:
        return np.array(array).view(DeviceArray)

    def download(self, array: Any) -> IntArray:
        return np.array(np.from_dlpack(array) if not isinstance(array, np.ndarray) else array, subok=False)

    def address(self, array: Any) -> int:
        if isinstance(array, np.ndarray):
            return int(array.ctypes.data)
        try:
            return address_of(array)
        except DtypeError:
            if not hasattr(array, "__dlpack__"):
                raise
        return int(np.from_dlpack(array).ctypes.data)

    def host_block(self, entries: int) -> HostBlock:
        host = np.empty(entries, np.int32)
        if self.is_mapped:
            return HostBlock(host, self.address(host), owner=host)
        copy = self.full(entries, 0, "int32")
        return HostBlock(host, self.address(copy), copy)

    def send(self, block: HostBlock, entries: int, stream: int) -> None:
        if block.copy is not None:
            block.copy[:entries] = self.upload(block.host[:entries])

    def copy_in(self, values: IntArray, target: Any, stream: int) -> None:
        target[...] = self.upload(values)

    # Streams.

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def is_current(self) -> bool:
        return True

    def stream(self, handle: int | None) -> int:
        return self.streams.current if handle is None else handle or 1

    def is_capturing(self, stream: int) -> bool:
        return self.streams.capture_of(stream) is not None

    def order(self, before: int, after: int) -> None:
        self.streams.wait_for(after, self.streams.capture_of(before), before)

    def mark(self, stream: int) -> Any:
        return (self.streams.capture_of(stream),)

    def wait(self, mark: Any) -> None:
        self.streams.synchronize(mark[0])

    def check(self, stream: int) -> None:
        """Nothing can have failed."""

    def synchronize(self) -> None:
        """Everything is done."""

    # Kernels.

    def kernel(self, name: str, options: KernelOptions) -> Any:
        """Return a kernel that runs on the host; made of `EmulatedKernel`."""
        raise NotImplementedError

    def gather_blocks(self, num_rows: int, num_groups: int, width: int) -> int:
        return max(num_rows, 1) * num_groups


class EmulatedKernel:
    """A kernel of an emulation: it runs when it is launched, or at each replay of the graph that it is captured in.

    Args:
        driver: the device.
        name: the kernel's.
        tile: entries that a block takes.
        run: runs it over a grid, given the arguments of its signature.
    """

    def __init__(
        self, driver: EmulatedDriver, name: str, tile: int, run: Callable[[Grid, Sequence[int]], None]
    ) -> None:
        self.name: str = name
        self.tile: int = tile
        self._streams, self._run = driver.streams, run

    def __call__(self, grid: Grid, arguments: Sequence[int], stream: int) -> None:
        self._streams.run(stream, lambda: self._run(grid, arguments))
