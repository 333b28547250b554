"""The backend under test: tables over it, arrays to and from it, and a count of the kernels it was asked to launch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from blocktable import BlockTable, BlockTableConfig
from blocktable.backend import Backend, BlockStore, SlotMapper, Writes

HostArray = npt.NDArray[Any]

LAUNCHING = frozenset(
    {"write", "commit", "gather", "step", "run_step", "export", "put", "reset_buffers", "create_buffers"}
)
"""Calls of a block store that start work on the device."""

HEADER = 5
"""Counts before packed changes: single values, ranges, range values, constant ranges, their entries."""


@dataclass
class SentWrites:
    """What one commit sent, as ranges: a copy of a `Writes`, or packed changes read back."""

    offsets: list[int]
    lengths: list[int]
    values: list[int]

    @classmethod
    def of_packed(cls, block: HostArray) -> SentWrites:
        """Read packed changes (`Writes.pack_changes`), in the order of their offsets."""
        singles, ranges, values, constants, entries = block[:HEADER].tolist()
        sizes = [singles, singles, ranges, ranges, values, constants, constants, constants]
        parts = np.split(block[HEADER:], np.cumsum(sizes))
        found = [(offset, [value]) for offset, value in zip(parts[0].tolist(), parts[1].tolist(), strict=True)]
        ends = [*parts[3][1:].tolist(), values]
        for offset, start, end in zip(parts[2].tolist(), parts[3].tolist(), ends[: ranges or 0], strict=True):
            found.append((offset, parts[4][start:end].tolist()))
        ends = [*parts[6][1:].tolist(), entries]
        found += [(int(parts[5][i]), [int(parts[7][i])] * (ends[i] - int(parts[6][i]))) for i in range(constants)]
        found.sort()
        contents = [value for _, written in found for value in written]
        return cls([offset for offset, _ in found], [len(written) for _, written in found], contents)


@dataclass
class CallLog:
    """What passed between the core and the backend.

    Attributes:
        launches: calls that start work on the device, since the session began.
        sent: the writes of each commit, while recording; else None.
        fail_next_write: an error that the next write raises instead of being done.
        lent: memory that the store has lent for changes; held weakly, since to free it may wait for the device.
    """

    launches: int = 0
    sent: list[SentWrites] | None = None
    fail_next_write: BaseException | None = None
    lent: weakref.ref[HostArray] | None = None

    def before(self, name: str, args: tuple[Any, ...]) -> None:
        """Note one call of the store; a write of nothing prepares a later one (R21)."""
        self.launches += name != "write" or args[0].num_ranges > 0
        if name not in ("write", "commit", "step", "run_step"):
            return
        if self.fail_next_write is not None:
            error, self.fail_next_write = self.fail_next_write, None
            raise error
        if self.sent is None:
            return
        if name == "write":
            writes: Writes = args[0]
            self.sent.append(SentWrites(writes.offsets.tolist(), writes.lengths.tolist(), writes.values.tolist()))
        elif args[0]:  # entries of packed changes
            lent = None if self.lent is None else self.lent()
            assert lent is not None
            self.sent.append(SentWrites.of_packed(lent))

    def lend(self, block: HostArray) -> HostArray:
        """Note what the store has lent."""
        self.lent = weakref.ref(block)
        return block


class WatchedStore:
    """A block store that tells `call_log` of each call; everything else is the backend's own."""

    def __init__(self, store: BlockStore, call_log: CallLog) -> None:
        self._watched = store
        self._call_log = call_log

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._watched, name)
        if name == "lend":
            return lambda stream: self._call_log.lend(value(stream))
        return self._noted(name, value) if name in LAUNCHING else value

    def _noted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._call_log.before(name, args)
            return call(*args, **kwargs)

        return noted


class WatchedMapper:
    """A slot mapper that tells `call_log` of each call."""

    def __init__(self, mapper: SlotMapper, call_log: CallLog) -> None:
        self._watched = mapper
        self._call_log = call_log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._watched, name)

    def compute_slot_mappings(self, *args: Any, **kwargs: Any) -> Any:
        """Count the launch and hand it on."""
        self._call_log.before("compute_slot_mappings", args)
        return self._watched.compute_slot_mappings(*args, **kwargs)


class WatchedBackend:
    """A backend whose stores and mappers are watched."""

    def __init__(self, backend: Backend, call_log: CallLog) -> None:
        self._watched = backend
        self._call_log = call_log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._watched, name)

    def create_block_store(self, config: BlockTableConfig, device: Any = None) -> Any:
        """Return the backend's store, watched."""
        return WatchedStore(self._watched.create_block_store(config, device), self._call_log)

    def create_slot_mapper(self, store: Any) -> Any:
        """Return the backend's mapper, watched; the backend gets the store that it made itself."""
        return WatchedMapper(self._watched.create_slot_mapper(store._watched), self._call_log)


@dataclass(repr=False)
class Subject:
    """One backend on one step path: what each test is run for.

    Attributes:
        label: what the backend was asked for by.
        backend: the backend, as it is.
        step_path: "separate" or "fused".
        call_log: what passed between the core and the backend.
    """

    label: str
    backend: Backend
    step_path: str = "separate"
    call_log: CallLog = field(default_factory=CallLog)

    def __repr__(self) -> str:
        return f"<{self.label}, {self.step_path} step path>"

    def declares(self, capability: str) -> bool:
        """Say whether the backend declares a capability."""
        return capability in self.backend.capabilities

    def table(self, config: BlockTableConfig, **options: Any) -> BlockTable:
        """Return a new table over the watched backend. options: how it is checked (R38); left out, it is not."""
        watched: Any = WatchedBackend(self.backend, self.call_log)
        path: Any = self.step_path
        return BlockTable(config, watched, step_path=path, **({"check": "off"} | options))

    def device_array(self, values: Sequence[int] | HostArray, dtype: str) -> Any:
        """Return `values` as an array of the backend's device, of exactly `dtype`."""
        return self.backend.from_host(np.array(values, dtype))

    def to_host(self, array: Any) -> HostArray:
        """Wait, and return a copy on the host."""
        return self.backend.to_host(array)

    @contextmanager
    def recording(self) -> Iterator[list[SentWrites]]:
        """Collect what each commit sends."""
        sent: list[SentWrites] = []
        self.call_log.sent = sent
        try:
            yield sent
        finally:
            self.call_log.sent = None


def address(array: Any) -> int:
    """Return where an array's first entry lies, on the host or on a device."""
    if hasattr(array, "data_ptr"):
        return int(array.data_ptr())
    for protocol in ("__cuda_array_interface__", "__array_interface__"):
        interface = getattr(array, protocol, None)
        if interface is not None:
            return int(interface["data"][0])
    raise TypeError(
        f"{type(array).__name__} says its address by none of data_ptr(), __cuda_array_interface__, __array_interface__."
    )
