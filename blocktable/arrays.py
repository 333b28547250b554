"""Which arrays and numbers the calls of a table take, as type hints: each is defined here alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt


class SupportsCudaArray(Protocol):
    """An array that says where it lies, as torch's, CuPy's and Numba's do; a tensor of torch's on the host is one too.

    An array that speaks DLPack alone is taken as well, but no type checker could tell it from a numpy array of floats.
    Hand it over as `Any`.
    """

    @property
    def __cuda_array_interface__(self) -> Any:
        """Address, shape, strides and dtype, as Numba defines them."""


AnyArray: TypeAlias = npt.NDArray[np.integer[Any]] | SupportsCudaArray
"""What a step, an export or a slot mapping reads: an array of integers on the host or on a device. Where a call wants
int32 or int64 it says so; nothing is converted."""

Int: TypeAlias = int | np.integer[Any]
"""One number."""

Ints: TypeAlias = Sequence[Int] | npt.NDArray[np.integer[Any]]
"""What a row operation takes, on the host: a list, a tuple, a range or a numpy array of any integer dtype."""

# One kind of sequence alone: of several mypy chooses none for a list of lists and arrays.
BlockIds: TypeAlias = Sequence[Int | Ints | None] | npt.NDArray[np.integer[Any]] | None
"""Manager block ids: a sequence of them for each group, None or an empty one for nothing; with one group also that
sequence itself."""

Counts: TypeAlias = Sequence[Int | Ints] | npt.NDArray[np.integer[Any]]
"""A number for each row of a call, the same in all groups; or such a sequence for each group."""

Array: TypeAlias = Any
"""What a call returns, an array of the backend's device; for a backend also a foreign one that it takes without a
copy."""

IntArray: TypeAlias = npt.NDArray[Any]
"""A numpy array of integers; the dtype is said where it is used."""
