"""Memory, streams and completion marks through torch: on a GPU, and on CPU tensors for Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch

from blocktable import ArgumentError, BlockTableError, DtypeError, address_of
from blocktable_triton.fused_step import HEADER, GraphRunner, HostRunner
from blocktable_triton.kernels import scatter_writes

PROBE_TILE = 32


class StagingSlot:
    """Host memory that one commit's or one step's inputs travel in.

    Attributes:
        host: [entries] int32. The host's view.
        header: its first entries: the counts of packed changes.
        address: where kernels read it.
    """

    def __init__(self, memory: torch.Tensor, mirror: torch.Tensor | None = None) -> None:
        self.memory = memory
        self.mirror = mirror  # the device's copy; None: kernels read the host's memory
        self.host: np.ndarray[Any, Any] = memory.numpy()
        self.header = self.host[:HEADER]
        self.address = (memory if mirror is None else mirror).data_ptr()


class EmulatedKernel:
    """One kernel in Triton's interpreter."""

    graph_problem = ""

    def __init__(self, function: Any, constants: tuple[Any, ...], num_warps: int) -> None:
        self._function = function
        self._constants = constants

    def __call__(self, grid: tuple[int, int, int], arguments: tuple[int, ...], stream: Any) -> None:
        self._function[grid](*arguments, *self._constants)


class CompiledKernel:
    """One kernel, compiled and loaded for the current GPU when this is made.

    A launch asks neither Triton's cache nor torch's current stream: it names the stream, and cannot compile.
    """

    def __init__(self, function: Any, constants: tuple[Any, ...], num_warps: int) -> None:
        self._constants = constants
        addresses_and_sizes = [0] * (len(function.arg_names) - len(constants))
        # No kernel has floating point; saying so keeps triton 3.9 from warning that its default will change.
        self._compiled = function.warmup(
            *addresses_and_sizes, *constants, grid=(1,), num_warps=num_warps, enable_fp_fusion=False
        )
        self._compiled[(1, 1, 1)]  # loads it: a first launch inside a capture could not
        kinds = [parameter.annotation for parameter in function.params if not parameter.is_constexpr]
        self._sizes = [{"i32": 4, "i64": 8}[kind] for kind in kinds]

    @cached_property
    def graph_problem(self) -> str:
        """Why it cannot be a node of a graph of ours, in a few words; empty: it can.

        Triton appends arguments of its own (pointers to scratch memory, unused here); the driver says which there are.
        """
        metadata = self._compiled.metadata
        for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"):
            if getattr(metadata, name, 0):
                return f"this Triton compiles with {name}"
        if getattr(metadata, "num_ctas", 1) != 1:
            return "this Triton compiles for clusters"
        sizes = _parameter_sizes(self.handle)
        own, more = sizes[: len(self._sizes)], sizes[len(self._sizes) :]
        if own != self._sizes or len(more) > 2 or any(size != 8 for size in more):
            return "this Triton's kernels take other arguments, or the driver does not say which"
        return ""

    @property
    def handle(self) -> int:
        """CUfunction."""
        return int(self._compiled.function)

    @cached_property
    def scratch(self) -> tuple[int, ...]:
        """What to hand over for Triton's own arguments."""
        return (0,) * (len(_parameter_sizes(self.handle)) - len(self._sizes))

    @property
    def layout(self) -> str:
        """All arguments as `struct` writes them."""
        return "".join({4: "i", 8: "q"}[size] for size in self._sizes) + "Q" * len(self.scratch)

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return 32 * int(self._compiled.metadata.num_warps)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return int(self._compiled.metadata.shared)

    def __call__(self, grid: tuple[int, int, int], arguments: tuple[int, ...], stream: Any) -> None:
        self._compiled[grid](*arguments, *self._constants, stream=stream.cuda_stream)


class HostDevice:
    """The emulation: arrays are CPU tensors, and everything is done when a call returns.

    Args:
        place: what `place` returns.
        staging: "mapped" or "copy", both within the host's memory; "auto" probes, as on a GPU.
    """

    kernel_type: Callable[..., Any] = EmulatedKernel
    step_runner: Callable[..., Any] = HostRunner
    graph_problem = ""
    can_overlap = False  # whether a kernel may start while the one before it runs

    def __init__(self, place: int = 0, staging: str = "auto") -> None:
        self.device = torch.device("cpu")
        self.choose_staging(staging)

    @staticmethod
    def place(device: Any) -> int:
        """Return the number of the device that is meant; there is one."""
        if str(device) not in ("None", "cpu"):
            raise ArgumentError(f'The interpreter runs on the host: device must be None or "cpu", got {device!r}.')
        return 0

    def choose_staging(self, staging: str) -> None:
        """Let kernels read pinned memory where it lies, or copy it first ("copy", or "auto" where a probe says so)."""
        if staging == "params":
            raise ArgumentError(
                "BLOCKTABLE_STAGING=params needs kernels that take changes by value, which Triton has not; "
                "choose auto, mapped or copy."
            )
        self.is_mapped = staging != "copy"
        if staging == "auto":
            self.is_mapped = mapped_memory_works(self)

    @property
    def staging(self) -> str:
        """How changes travel."""
        return "mapped pinned memory" if self.is_mapped else "pinned memory and copies"

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def is_current(self) -> bool:
        return True

    def full(self, size: int, value: int, dtype: str) -> torch.Tensor:
        return torch.full((size,), value, dtype=getattr(torch, dtype), device=self.device)

    def fill(self, array: torch.Tensor, value: int, stream: Any) -> None:
        with self.on(stream):
            array.fill_(value)

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.tensor(array, device=self.device)

    def download(self, array: Any) -> np.ndarray[Any, Any]:
        self.synchronize()  # the work may be on any stream
        with self.current():
            host: np.ndarray[Any, Any] = torch.as_tensor(array, device=self.device).cpu().numpy()
        return host.copy()

    def synchronize(self) -> None:
        """Everything is done."""

    def kernel(self, function: Any, *constants: Any, num_warps: int = 4) -> Any:
        """Return a kernel that is ready to launch, with its compile-time arguments."""
        with self.current():
            return self.kernel_type(function, constants, num_warps)

    def address(self, array: Any) -> int:
        """Return where kernels find an array's entries, without a copy and without a wait."""
        if not isinstance(array, torch.Tensor):
            try:
                return address_of(array)
            except DtypeError:
                array = torch.from_dlpack(array)
        if array.device != self.device:  # Triton would not look: it gets a number
            raise DtypeError(
                f"An array is on {array.device}, but this table is on {self.device}; move it there, or give a numpy "
                "array, which is staged."
            )
        return int(array.data_ptr())

    def staging_slot(self, entries: int) -> StagingSlot:
        with self.current():
            memory = self.host_memory(entries)
            if self.is_mapped:
                return StagingSlot(memory)
            return StagingSlot(memory, torch.empty(entries, dtype=torch.int32, device=self.device))

    def host_memory(self, entries: int) -> torch.Tensor:
        """Return memory that both the host and kernels reach by one address."""
        return torch.empty(entries, dtype=torch.int32)

    def stream(self, handle: int | None) -> Any:
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make `stream` torch's current one."""
        return nullcontext()

    def is_capturing(self, stream: Any) -> bool:
        return False

    def send(self, slot: StagingSlot, entries: int, stream: Any) -> None:
        """Bring the first entries of a slot to where kernels read them."""
        if slot.mirror is not None:
            with self.on(stream):
                slot.mirror[:entries].copy_(slot.memory[:entries], non_blocking=True)

    def copy_in(self, values: np.ndarray[Any, Any], target: torch.Tensor, stream: Any) -> None:
        """Copy host memory into part of a device array, and wait for it."""
        source = torch.from_numpy(values if values.flags.writeable else values.copy())
        with self.on(stream):
            target.copy_(source)
        self.wait(self.mark(stream))

    def mark(self, stream: Any) -> Any:
        return None

    def wait(self, mark: Any) -> None:
        """Everything is done."""

    def check(self, stream: Any) -> None:
        """Nothing can have failed."""

    def order(self, before: Any, after: Any) -> None:
        """There is one stream."""


class TorchDevice(HostDevice):
    """One GPU through torch.

    Args:
        place: its index.
        staging: "mapped" or "copy"; "auto" probes.
    """

    kernel_type = CompiledKernel
    step_runner = GraphRunner

    def __init__(self, place: int = 0, staging: str = "auto") -> None:
        self.index = place
        self.device = torch.device("cuda", place)
        self._streams: dict[int, torch.cuda.Stream] = {}
        self.choose_staging(staging)

    @staticmethod
    def place(device: Any) -> int:
        """Return the index of the GPU that is meant.

        Args:
            device: an index, "cuda:1", or an object with an `index` or an `id`. None: torch's current device.
        """
        if isinstance(device, str):
            kind, _, number = device.partition(":")
            if kind != "cuda" or not (number == "" or number.isdecimal()):
                raise ArgumentError(f'The triton backend runs on "cuda" or "cuda:<index>", got {device!r}.')
            index = int(number) if number else None
        elif getattr(device, "type", "cuda") != "cuda":
            raise ArgumentError(f'The triton backend runs on "cuda" or "cuda:<index>", got {device!r}.')
        else:
            index = getattr(device, "index", getattr(device, "id", device))
        if index is None:
            return int(torch.cuda.current_device())
        if isinstance(index, bool) or not isinstance(index, int):
            raise ArgumentError(f'device must be an index, "cuda:<index>" or a device object, got {device!r}.')
        if not 0 <= index < torch.cuda.device_count():
            raise ArgumentError(f"There is no GPU {index}: torch sees {torch.cuda.device_count()}.")
        return index

    def current(self) -> AbstractContextManager[Any]:
        """Make this GPU the current one; a no-op where it is, which is what an engine does."""
        return nullcontext() if self.is_current() else torch.cuda.device(self.index)

    def is_current(self) -> bool:
        return int(torch._C._cuda_getDevice()) == self.index  # torch.cuda.current_device() costs some 2 us

    @cached_property
    def can_overlap(self) -> bool:  # type: ignore[override]
        """Whether a kernel may start while the one before it runs: NVIDIA GPUs of compute capability 9 and newer."""
        return torch.version.hip is None and torch.cuda.get_device_capability(self.index)[0] >= 9

    @cached_property
    def graph_problem(self) -> str:  # type: ignore[override]
        """Why steps are separate launches here, in a few words; empty: they are a graph."""
        problem: str = self.kernel(scatter_writes, PROBE_TILE).graph_problem
        return problem

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def host_memory(self, entries: int) -> torch.Tensor:
        return torch.empty(entries, dtype=torch.int32, pin_memory=True)

    def stream(self, handle: int | None) -> torch.cuda.Stream:
        """Return torch's object for a handle; None: torch's current stream on this GPU."""
        if handle is None:
            handle = self._current_handle()
        elif handle == 1:
            handle = 0  # both are the legacy default stream
        found = self._streams.get(handle)
        if found is None:
            # As an external stream 0 would become another one, of torch's pool.
            found = self._streams[handle] = (
                torch.cuda.ExternalStream(handle, device=self.index)
                if handle
                else torch.cuda.default_stream(self.index)
            )
        return found

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        # Switching costs several microseconds, and in an engine the stream is torch's current one.
        return nullcontext() if stream.cuda_stream == self._current_handle() else torch.cuda.stream(stream)

    def is_capturing(self, stream: torch.cuda.Stream) -> bool:
        # The legacy default stream cannot be captured, and asking about it breaks a capture elsewhere.
        if stream.cuda_stream == 0:
            return False
        with self.on(stream):
            return bool(torch.cuda.is_current_stream_capturing())

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def check(self, stream: torch.cuda.Stream) -> None:
        """Raise where the device has failed."""
        stream.query()

    def order(self, before: torch.cuda.Stream, after: torch.cuda.Stream) -> None:
        """Make what comes on stream `after` wait for what is on stream `before`, without a host wait."""
        after.wait_event(self.mark(before))

    def _current_handle(self) -> int:
        # 0.2 us, where torch.cuda.current_stream() costs 4 to 8.
        return int(torch._C._cuda_getCurrentRawStream(self.index))


def _parameter_sizes(function: int) -> list[int]:
    """Return the bytes of each parameter of a loaded kernel, as the driver says them; nothing where it does not."""
    from cuda.bindings import driver

    sizes: list[int] = []
    try:
        while True:
            error, _, size = driver.cuFuncGetParamInfo(driver.CUfunction(function), len(sizes))
            if error:
                return sizes
            sizes.append(int(size))
    except (AttributeError, RuntimeError):  # bindings or a driver of before CUDA 12.4
        return []


def mapped_memory_works(device: HostDevice) -> bool:
    """Whether a kernel sees what the host writes to mapped memory after an earlier kernel has read it."""
    device.is_mapped = True
    slot, target = device.staging_slot(1), device.full(1, 0, "int32")
    zeros = device.full(1, 0, "int64")  # only the value is mapped: what a kernel sees there may be anything
    scatter = device.kernel(scatter_writes, PROBE_TILE)
    for value in (1, 2):
        slot.host[0] = value
        with device.current():
            arguments = (zeros.data_ptr(), zeros.data_ptr(), slot.address, 1, 1, target.data_ptr())
            scatter((1, 1, 1), arguments, device.stream(None))
        if device.download(target)[0] != value:
            return False
    return True


def refuse_capture(capturing: bool, what: str) -> None:
    """Raise where the stream is capturing (R21)."""
    if capturing:
        raise BlockTableError(
            f"{what} cannot be captured: row changes and host arrays are read once, not at every replay. Call commit() "
            "before the capture and before each replay, and give device arrays."
        )
