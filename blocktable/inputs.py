"""What a step's arrays are, read in a microsecond: by it the plan of a step is found (R17)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

Reading = tuple[Any, tuple[Any, ...], tuple[int | None, ...]]
"""What some arrays are, but not what they hold.

- Kinds, hashable: all that matters beside lengths and addresses. Libraries, dtypes, dimensions, strides, devices, and
  which are None. None in place of them all: it cannot be said.
- Lengths: entries of each array; None where that is None.
- Addresses: of each array; None where that is None, is on the host, or only the backend can say it.
"""

Reader = Callable[[Any], tuple[Any, int | None, int | None]]
"""Array -> its kind, length and address."""

_READERS: dict[type, Reader] = {}
_TENSORS: dict[type, Callable[[], AbstractContextManager[Any]]] = {}
"""torch.Tensor, once there has been one -> what keeps torch's modes out."""


def read_step(arrays: tuple[Any, Any, Any, Any]) -> Reading:
    """Return what the arrays of a step are, in the order of `STEP_INPUTS`.

    All of it is looked at each time: an array may be reshaped, or given other memory, in place.
    """
    idx_mapping, num_computed_tokens, starts, positions = arrays
    library = type(positions)
    without_modes = _TENSORS.get(library)
    if not without_modes or num_computed_tokens is not None or not type(idx_mapping) is library is type(starts):
        return read_each(arrays)
    # Most steps. Without a call for each array, which would double the time; written out, since a star costs more.
    try:
        with without_modes():
            kinds = (
                library,
                idx_mapping.stride(),
                idx_mapping.dtype,
                idx_mapping.device,
                starts.stride(),
                starts.dtype,
                starts.device,
                positions.stride(),
                positions.dtype,
                positions.device,
            )
            lengths = idx_mapping.numel(), None, starts.numel(), positions.numel()
            return kinds, lengths, (idx_mapping.data_ptr(), None, starts.data_ptr(), positions.data_ptr())
    except RuntimeError:  # such as a sparse one, which has no strides: the checks say what is wrong
        return _unknown(arrays)


def read_each(arrays: tuple[Any, ...]) -> Reading:
    """Return what any arrays are."""
    try:
        found = [(_READERS.get(type(array)) or _find_reader(type(array)))(array) for array in arrays]
    except (AttributeError, KeyError, RuntimeError, TypeError):  # the checks say what is wrong
        return _unknown(arrays)
    return tuple([each[0] for each in found]), tuple([each[1] for each in found]), tuple([each[2] for each in found])


def _unknown(arrays: tuple[Any, ...]) -> Reading:
    nothing = (None,) * len(arrays)
    return None, nothing, nothing


def torch_modes_off() -> AbstractContextManager[Any]:
    """Return what keeps torch's modes away from calls of torch's, where it is imported.

    `torch.set_default_device` puts a function of its own before each of them, even before a tensor's `dtype`: 2 us.
    """
    switch = getattr(getattr(sys.modules.get("torch"), "_C", None), "DisableTorchFunction", nullcontext)
    context: AbstractContextManager[Any] = switch()
    return context


def without_torch_modes(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Do a call as if no mode of torch's were active."""

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with torch_modes_off():
            return function(*args, **kwargs)

    return call


def _find_reader(library: type) -> Reader:
    """Choose how arrays of a type are read, and remember it.

    Raises:
        TypeError: it is not known.
    """
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if library is type(None):
        reader = _read_nothing
    elif issubclass(library, np.ndarray):  # of the host, or of an emulated device
        reader = _read_numpy
    elif torch is not None and issubclass(library, torch.Tensor):
        _TENSORS[library] = torch._C.DisableTorchFunction
        reader = _read_torch
    elif all(hasattr(library, name) for name in ("data_ptr", "numel", "stride")):  # what speaks like torch
        reader = _read_tensor
    elif cupy is not None and issubclass(library, cupy.ndarray):
        reader = _read_cupy
    elif hasattr(library, "device_ctypes_pointer"):  # Numba, whose interface costs 4 us
        reader = _read_numba
    elif hasattr(library, "__cuda_array_interface__"):
        reader = _read_interface
    else:
        raise TypeError(library)
    _READERS[library] = reader
    return reader


def _read_nothing(array: Any) -> tuple[Any, int | None, int | None]:
    return None, None, None


def _read_numpy(array: Any) -> tuple[Any, int | None, int | None]:
    return (type(array), array.ndim, array.flags.num, array.dtype), array.size, None


def _read_torch(array: Any) -> tuple[Any, int | None, int | None]:
    with _TENSORS[type(array)]():
        return _read_tensor(array)


def _read_tensor(array: Any) -> tuple[Any, int | None, int | None]:
    return (type(array), array.stride(), array.dtype, array.device), array.numel(), array.data_ptr()


def _read_cupy(array: Any) -> tuple[Any, int | None, int | None]:
    memory = array.data
    return (type(array), array.strides, array.dtype, memory.device_id), array.size, memory.ptr


def _read_numba(array: Any) -> tuple[Any, int | None, int | None]:
    return (type(array), array.strides, array.dtype), array.size, array.device_ctypes_pointer.value or 0


def _read_interface(array: Any) -> tuple[Any, int | None, int | None]:
    interface = array.__cuda_array_interface__
    shape, strides = interface["shape"], interface.get("strides")
    length = shape[0] if len(shape) == 1 else None
    return (type(array), len(shape), strides and tuple(strides), interface["typestr"]), length, interface["data"][0]
