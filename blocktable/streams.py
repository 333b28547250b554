"""Streams and foreign arrays: whatever names one, as a handle or an address (R22)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from blocktable.errors import DtypeError


def stream_handle(stream: Any) -> int:
    """Return the handle of a stream without importing the library that made it.

    Args:
        stream: an int handle (0 and 1 the legacy default stream, 2 the per-thread one), an object with
            `__cuda_stream__`, or a torch, CuPy or Numba stream.

    Raises:
        DtypeError: it names no stream.

    Rules: R22.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr"):  # torch; CuPy
        if isinstance(getattr(stream, attribute, None), int):
            return int(getattr(stream, attribute))
    handle = getattr(stream, "handle", None)  # Numba
    if handle is not None:
        return int(getattr(handle, "value", handle) or 0)
    raise DtypeError(
        f"stream must be an int handle, an object with __cuda_stream__, or a torch, CuPy or Numba stream, got "
        f"{type(stream).__name__}."
    )


def address_of(array: Any) -> int:
    """Return the address of a device array's first entry, without a copy and without a wait.

    Args:
        array: torch, CuPy, Numba, or anything with `__cuda_array_interface__`.

    Raises:
        DtypeError: it says no address.

    Rules: R22.
    """
    if hasattr(array, "data_ptr"):  # torch
        return int(array.data_ptr())
    data: Any = getattr(array, "data", None)
    if hasattr(data, "ptr"):  # CuPy; its interface costs 3.9 us
        return int(data.ptr)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        raise DtypeError(f"{type(array).__module__}.{type(array).__name__} says no device address.")
    return int(interface["data"][0])


def stream_owner(array: Any) -> tuple[str, int] | None:
    """Return the library whose current stream an array's work belongs to, and the device; None where there is none."""
    library = type(array).__module__.partition(".")[0]
    if library == "torch" and array.is_cuda:
        return "torch", array.device.index
    if library == "cupy":
        return "cupy", array.device.id
    return None


def current_stream_getter(owner: tuple[str, int] | None) -> Callable[[], int | None]:
    """Return what says the handle of a library's current stream; None: the backend's own.

    Where no library is known yet, a capture that torch has begun on the current device is still noticed: work on
    another stream would break it.
    """
    if owner is None:
        return _capturing_stream_of_torch
    library, device = owner
    if library == "torch":
        # The raw handle costs 0.2 us, torch.cuda.current_stream() 4 to 8.
        return partial(sys.modules["torch"]._C._cuda_getCurrentRawStream, device)
    cuda = sys.modules["cupy"].cuda
    return lambda: int(cuda.get_current_stream().ptr)


def _capturing_stream_of_torch() -> int | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or not torch.cuda.is_current_stream_capturing():
        return None
    return int(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))
