"""What a backend brings to the device layer: a driver (memory, streams, completion marks) and its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from blocktable.arrays import Array, IntArray
from blocktable.device.signatures import Grid, KernelOptions
from blocktable.errors import ArgumentError, BlockTableError
from blocktable.protocols import CHANGES_HEADER


@dataclass(eq=False)
class HostBlock:
    """Host memory that a commit's changes or a step's host arrays travel in.

    Attributes:
        host: [entries] int32. The host's view.
        address: where kernels read it: the host's memory itself, or the device's copy.
        copy: the device's copy at `address`. None: kernels read the host's memory.
        owner: whatever must live as long as the block.
        host_address: of the host's memory.
        header: its first entries, the counts of packed changes.
        mark: until when it is in use: a mark of the driver, or the number of a fused step. None: it is free.
    """

    host: IntArray
    address: int
    copy: Array | None = None
    owner: Any = None

    def __post_init__(self) -> None:
        self.host_address: int = self.host.ctypes.data
        self.header: IntArray = self.host[:CHANGES_HEADER]
        self.mark: Any = None


class Kernel(Protocol):
    """A kernel that is loaded and ready to launch; what the step's graph needs of it comes with `GraphKernel`.

    Attributes:
        name: as `Driver.kernel` was asked for it.
        tile: entries along the grid's first axis that one block takes.
    """

    name: str
    tile: int

    def __call__(self, grid: Grid, arguments: Sequence[int], stream: int) -> None:
        """Launch it. Compiles nothing and waits for nothing.

        Args:
            grid: blocks along x and y.
            arguments: as its `Signature` lists them; arrays as addresses.
            stream: what `Driver.stream` returned.
        """


class GraphKernel(Kernel, Protocol):
    """A kernel that can be a node of a CUDA graph.

    Attributes:
        function: CUfunction.
        num_threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        num_extra: arguments of 8 bytes that the compiler has added after those of the signature; they get 0.
    """

    function: int
    num_threads: int
    shared_bytes: int
    num_extra: int


class Driver(Protocol):
    """One device. Streams are handles: ints. Nothing here decides anything that the contract says.

    The layer makes the device the current one before it calls, except `current`, `is_current`, `stream`,
    `is_capturing` and `address`, which find any.

    Attributes:
        is_emulated: whether the "device" is the host and every call is done when it returns.
        is_mapped: whether kernels read what the host writes to a `HostBlock`; otherwise `send` copies it.
        overlaps: whether the second kernel of a fused step may start before the first has ended.
        many_slots: slots of a launch above which the kernels for long ones are used; about one for each thread that the
            device keeps resident.
        change_sizes: int32 entries of packed changes that the kernels "apply_changes_<entries>" take in their own
            parameters, ascending. (): there are none.
        variants: names of further kernels that it has: "map_slots_long", "step_batch", "step_batch_long".
    """

    is_emulated: bool
    is_mapped: bool
    overlaps: bool
    many_slots: int
    change_sizes: tuple[int, ...]
    variants: frozenset[str]

    # Memory.

    def full(self, size: int, value: int, dtype: str) -> Array:
        """Return a new array [size], filled on the current stream."""

    def fill(self, array: Array, value: int, stream: int) -> None:
        """Fill an array that `full` or `upload` made, or a slice of one along its first axis, in stream order."""

    def upload(self, array: IntArray) -> Array:
        """Return a device copy that any stream may use."""

    def download(self, array: Array) -> IntArray:
        """Wait for the device and return a host copy."""

    def address(self, array: Array) -> int:
        """Return where kernels find the entries of an array of any library, without a copy and without a wait.

        Raises:
            DtypeError: it says no address, or is on another device.
        """

    def host_block(self, entries: int) -> HostBlock:
        """Return memory of [entries] int32, 8-byte aligned."""

    def send(self, block: HostBlock, entries: int, stream: int) -> None:
        """Bring the first entries to `block.address`, in stream order; nothing where kernels read the host's memory."""

    def copy_in(self, values: IntArray, target: Array, stream: int) -> None:
        """Copy host memory [n] int32 into part of a device array, and wait for it."""

    # Streams.

    def current(self) -> AbstractContextManager[Any]:
        """Make this device the current one."""

    def is_current(self) -> bool:
        """Say whether it is."""

    def stream(self, handle: int | None) -> int:
        """Return the one handle that stands for a stream. None: the library's current one."""

    def is_capturing(self, stream: int) -> bool:
        """Say whether the stream is being captured; asking breaks no capture."""

    def order(self, before: int, after: int) -> None:
        """Make what comes on stream `after` wait for what is on stream `before`, without a host wait."""

    def mark(self, stream: int) -> Any:
        """Return a completion mark of what is on the stream now; no int, which the layer's own marks are."""

    def wait(self, mark: Any) -> None:
        """Wait for a mark."""

    def check(self, stream: int) -> None:
        """Raise where the device has failed."""

    def synchronize(self) -> None:
        """Wait for all work of the device."""

    # Kernels.

    def kernel(self, name: str, options: KernelOptions) -> Kernel:
        """Return a kernel, compiled and loaded: a name of `SIGNATURES` or one of `variants` and `change_sizes`."""

    def gather_blocks(self, num_rows: int, num_groups: int, width: int) -> int:
        """Return on how many blocks "step_batch" gathers, where `variants` has it.

        Args:
            num_rows: batch rows of each group.
            num_groups: groups.
            width: columns of the widest row.
        """


def device_index(device: Any, backend: str) -> int | None:
    """Return the index of the GPU that is meant; None: the current one.

    Args:
        device: an index, "cuda", "cuda:1", or an object with an `index` or an `id`.
        backend: its name, for the sentence.

    Raises:
        ArgumentError: it names no GPU.
    """
    if isinstance(device, str) or hasattr(device, "type"):  # torch.device names its kind
        kind, _, index = str(device).partition(":")
        if kind != "cuda" or not (index == "" or index.isdecimal()):
            raise ArgumentError(f'The {backend} backend runs on "cuda" or "cuda:<index>", got {str(device)!r}.')
        return int(index) if index else None
    index = getattr(device, "index", getattr(device, "id", device))
    if index is not None and (isinstance(index, bool) or not isinstance(index, int)):
        raise ArgumentError(f'device must be an index, "cuda:<index>" or a device object, got {device!r}.')
    return index


def mapped_memory_works(driver: Driver) -> bool:
    """Say whether a kernel sees what the host writes to a mapped block after an earlier kernel has read it.

    It does not where there is no such memory, as in a container that may pin none.

    Args:
        driver: with `is_mapped` set; its device is the current one.
    """
    try:
        block = driver.host_block(2)
    except (BlockTableError, MemoryError, RuntimeError):  # libraries raise errors of their own, made of RuntimeError
        return False
    target = driver.full(1, 0, "int32")
    kernel = driver.kernel("apply_changes", KernelOptions())
    block.host[0] = 0  # the offset, which never changes: read too early it is still inside the target
    address = driver.address(target)
    for value in (1, 2):
        block.host[1] = value
        kernel((1, 1), (block.address, 1, 0, 0, 0, 0, address, 0, 0, 1, address, 0, 0, 0, address), driver.stream(None))
        if driver.download(target)[0] != value:
            return False
    return True
