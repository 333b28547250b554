"""Argument checks: what the contract allows, refused in a sentence that says what was expected (R7, R10, R15)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from blocktable.arrays import IntArray
from blocktable.errors import ArgumentError, DtypeError, RowIndexError

_NUMPY_DTYPES = {name: np.dtype(name) for name in ("int32", "int64")}
_TENSOR_TYPES: set[type] = set()  # torch's classes and dtypes, as they are met: the core imports no torch
_TENSOR_DTYPES: dict[Any, str] = {}

COUNT_LIMIT = 2**31
"""More blocks than any row may hold."""

TEXT = str | bytes | bytearray
"""Sequences that are not lists of numbers."""

_NO_IDS: IntArray = np.empty(0, np.int32)


def _is_int_type(kind: type) -> bool:
    """Whether values of a type are ints; numpy calls a span of time one."""
    return issubclass(kind, int | np.integer) and not issubclass(kind, bool | np.timedelta64)


def int_scalar(name: str, value: Any) -> int:
    """Return `value` as an int; booleans, floats, spans of time and arrays are refused."""
    if not _is_int_type(type(value)):
        raise DtypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}.")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """Return `value` as a bool; what is only taken for true or false is refused."""
    if not isinstance(value, bool | np.bool_):
        raise DtypeError(f"{name} must be True or False, got {type(value).__name__}.")
    return bool(value)


def non_negative(name: str, value: Any) -> int:
    """Return `value` as an int of at least 0."""
    number = int_scalar(name, value)
    if number < 0:
        raise ArgumentError(f"{name} must be at least 0, got {number}.")
    return number


def row_index(name: str, value: Any, num_rows: int) -> int:
    """Return `value` as a row of a table of `num_rows` rows; negative ones do not count from the end."""
    row = int_scalar(name, value)
    if not 0 <= row < num_rows:
        raise RowIndexError(f"{name} {row} is outside the table: rows go from 0 to {num_rows - 1}.")
    return row


def refuse_mask(name: str, array: Any) -> None:
    """Refuse a masked array, whose comparisons leave entries out that a kernel or a table would read."""
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise DtypeError(f"{name} is a masked array, and no entry may be masked here; pass array.filled(value).")


def int_array(name: str, values: Any) -> IntArray:
    """Return a host sequence of ints as a one-dimensional integer array, a copy that no other code can change.

    Args:
        values: [n] integers. A numpy array of any integer dtype, a list, a tuple or a range.
    """
    if isinstance(values, np.ndarray):
        refuse_mask(name, values)
        array = values if type(values) is np.ndarray else np.asarray(values)  # a class may compare in its own way
    elif isinstance(values, Sequence) and not isinstance(values, TEXT):
        array = _from_sequence(name, values)
    else:
        raise DtypeError(
            f"{name} must be a list, tuple, range or numpy array of ints on the host, got {type(values).__name__}."
        )
    if array.ndim != 1:
        raise ArgumentError(f"{name} must be one-dimensional, got shape {array.shape}.")
    if array.dtype.kind not in "iu":
        if array.size == 0:
            return _NO_IDS
        raise DtypeError(f"{name} must hold integers, got dtype {array.dtype}.")
    return np.array(array) if isinstance(values, np.ndarray) else array


def is_within(array: IntArray, first: int, last: int) -> bool:
    """Whether all entries of an array that has some lie in `first .. last`; `array.min()` takes half as long again."""
    return bool(np.minimum.reduce(array) >= first and np.maximum.reduce(array) <= last)


def _from_sequence(name: str, values: Sequence[Any]) -> IntArray:
    if isinstance(values, range) and values[COUNT_LIMIT:]:
        raise ArgumentError(f"{name} must hold at most {COUNT_LIMIT} ints, got {values}.")
    values = _snapshot(values)
    for kind in set(map(type, values)):
        if not _is_int_type(kind):
            raise DtypeError(f"{name} must hold ints, got one of type {kind.__name__}.")
    try:
        return np.array(values, np.int64)
    except OverflowError:
        raise ArgumentError(f"{name} holds an int that does not fit 64 bits.") from None


def _snapshot(values: Any) -> Any:
    """Return a sequence as a copy: another thread, or an item's own `__index__`, may change it while it is read."""
    is_fixed = isinstance(values, TEXT | range) or not isinstance(values, Sequence)
    return values if is_fixed else tuple(values)


def ids_per_group(block_ids: Any, num_groups: int) -> list[IntArray]:
    """Split `block_ids` into one integer array for each group; nothing (None, []) becomes an empty one (R7, R8)."""
    if block_ids is None:
        return [_NO_IDS] * num_groups
    block_ids = _snapshot(block_ids)
    if isinstance(block_ids, np.ndarray):
        refuse_mask("block_ids", block_ids)
        if block_ids.size == 0 and block_ids.ndim == 1:
            return [_NO_IDS] * num_groups
        if block_ids.ndim == 0 or (num_groups == 1 and block_ids.ndim == 1):
            return [int_array("block_ids", block_ids)]
        if block_ids.ndim > 1 and block_ids.shape[0] != num_groups:
            raise ArgumentError(f"block_ids must be {_expected(num_groups)}, got an array of shape {block_ids.shape}.")
    elif not isinstance(block_ids, Sequence) or isinstance(block_ids, TEXT):
        raise DtypeError(f"block_ids must be {_expected(num_groups)}, got {type(block_ids).__name__}.")
    elif not block_ids:
        return [_NO_IDS] * num_groups
    if num_groups == 1 and not _is_nested(block_ids[0]):
        return [int_array("block_ids", block_ids)]
    if num_groups > 1 and (isinstance(block_ids, range) or not any(map(_is_nested, block_ids))):
        raise ArgumentError(f"block_ids must be {_expected(num_groups)}, got one flat sequence.")
    if len(block_ids) != num_groups:
        raise ArgumentError(f"block_ids must be {_expected(num_groups)}, got {len(block_ids)} sequences.")
    return [
        _NO_IDS if ids is None else int_array(f"block_ids of group {group}", ids) for group, ids in enumerate(block_ids)
    ]


def _expected(num_groups: int) -> str:
    if num_groups == 1:
        return "one flat sequence of block ids (in bulk calls counts says how many go to each row)"
    return f"one sequence of block ids for each of the {num_groups} groups"


def _is_nested(value: Any) -> bool:
    return value is None or hasattr(value, "__len__")


def ints_per_row(name: str, values: Any, num_rows: int) -> IntArray:
    """Return one int for each row of a call, `[num_rows]` integers."""
    array = int_array(name, values)
    if array.size != num_rows:
        raise ArgumentError(f"{name} must hold one int for each of the {num_rows} rows, got {array.size}.")
    return array


def bounded(counts: IntArray) -> IntArray:
    """Return counts as int64, those above every capacity cut down to COUNT_LIMIT: their sums must fit."""
    if counts.dtype.itemsize == 8:
        counts = np.minimum(counts, counts.dtype.type(COUNT_LIMIT))
    return counts.astype(np.int64, copy=False)


def per_group_counts(name: str, counts: Any, num_groups: int, num_rows: int) -> IntArray:
    """Return counts `[num_rows]` shared by all groups, or one such array per group, as `[num_groups, num_rows]` int64.

    The result may be a read-only view that repeats one array.
    """
    counts = _snapshot(counts)
    if isinstance(counts, np.ndarray):
        refuse_mask(name, counts)
        is_nested = counts.ndim == 2
    else:
        is_nested = isinstance(counts, tuple) and bool(counts) and _is_nested(counts[0])
    arrays = list(counts) if is_nested else [counts]
    expected = f"{name} must be [{num_rows}] ints, or one such array for each of the {num_groups} groups"
    if is_nested and len(arrays) != num_groups:
        raise ArgumentError(f"{expected}; got {len(arrays)} arrays.")
    checked = [bounded(int_array(name, array)) for array in arrays]
    for array in checked:
        if array.size != num_rows:
            raise ArgumentError(f"{expected}; got {array.size}, but rows has {num_rows}.")
        if num_rows and np.minimum.reduce(array) < 0:
            raise ArgumentError(f"{name} must be at least 0, got {array.min()}.")
    if num_groups == 1:
        return checked[0].reshape(1, num_rows)
    if len(checked) == 1:
        return np.broadcast_to(checked[0], (num_groups, num_rows))
    return np.stack(checked)


class ArraySpec(NamedTuple):
    """What the core must know of an array, wherever it lives."""

    dtype: str
    shape: tuple[int, ...]
    contiguous: bool


def array_spec(name: str, array: Any) -> ArraySpec:
    """Describe a host or device array without moving it: numpy, torch, CuPy, Numba, `__cuda_array_interface__`, DLPack.

    Raises:
        DtypeError: it is not an array.
    """
    if isinstance(array, np.ndarray):
        refuse_mask(name, array)
        # A foreign byte order or a misaligned start is nothing a kernel can read.
        name_of_dtype = array.dtype.name if array.dtype.isnative else array.dtype.str
        return ArraySpec(name_of_dtype, array.shape, array.flags.c_contiguous and array.flags.aligned)
    dtype, shape = getattr(array, "dtype", None), getattr(array, "shape", None)
    if shape is not None and hasattr(array, "is_contiguous"):  # torch, and anything that speaks like it
        spec = ArraySpec(str(dtype).removeprefix("torch."), tuple(shape), bool(array.is_contiguous()))
        if type(array).__module__ == "torch":
            _TENSOR_TYPES.add(type(array))
            _TENSOR_DTYPES[dtype] = spec.dtype
        return spec
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        kind = np.dtype(interface["typestr"])
        name_of_dtype = kind.name if kind.isnative else kind.str
        strides, shape = interface.get("strides"), tuple(interface["shape"])
        dense = strides is None or 0 in shape or tuple(strides) == _dense_strides(shape, kind.itemsize)
        return ArraySpec(name_of_dtype, shape, dense)
    if dtype is not None and shape is not None and hasattr(array, "__dlpack__"):
        return ArraySpec(str(dtype), tuple(shape), True)
    raise DtypeError(
        f"{name} must be a numpy array or a device array (torch, CuPy, Numba, __cuda_array_interface__ or DLPack), got "
        f"{type(array).__name__}."
    )


def _dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))[-len(shape) :] if shape else ()


def vector_length(name: str, array: Any, dtype: str) -> int:
    """Return the length of a one-dimensional contiguous array of exactly `dtype`.

    Raises:
        DtypeError: another dtype; it is never converted.
        ArgumentError: another number of dimensions, or strided.
    """
    # The common cases first: this runs for every input of every step.
    kind = type(array)
    if kind is np.ndarray:
        if array.dtype == _NUMPY_DTYPES[dtype] and array.ndim == 1 and array.flags.carray:
            return int(array.size)
    elif (
        kind in _TENSOR_TYPES
        and _TENSOR_DTYPES.get(array.dtype) == dtype
        and array.dim() == 1
        and array.is_contiguous()
    ):
        return int(array.numel())
    spec = array_spec(name, array)
    if spec.dtype != dtype:
        raise DtypeError(f"{name} must be {dtype}, got {spec.dtype}; convert it once, outside the step.")
    if len(spec.shape) != 1:
        raise ArgumentError(f"{name} must be one-dimensional, got shape {spec.shape}.")
    if not spec.contiguous:
        raise ArgumentError(f"{name} must be contiguous and aligned, got a strided or shifted view; pass a copy.")
    return spec.shape[0]
