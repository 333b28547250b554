"""Which arrays and numbers the calls of a table take, as type hints: each is defined here alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt


class SupportsCudaArray(Protocol):
    """An array that says where it lies, as torch's, CuPy's and Numba's do.

    A tensor of torch's has the attributes wherever it lies. An array that speaks DLPack alone is taken too, but a type
    checker could not tell it from a numpy array of floats: hand it over as `Any`.
    """

    @property
    def shape(self) -> Any:
        """Entries along each dimension."""

    @property
    def dtype(self) -> Any:
        """What an entry is, in words of the array's library."""

    @property
    def __cuda_array_interface__(self) -> Any:
        """Address, shape, strides and dtype, as Numba defines them."""


AnyArray: TypeAlias = npt.NDArray[np.integer[Any]] | SupportsCudaArray
"""What a step, an export or a slot mapping reads: an array of integers on the host or on a device. Where a call wants
int32 or int64 it says so; nothing is converted."""

Ints: TypeAlias = Sequence[int] | Sequence[np.integer[Any]] | npt.NDArray[np.integer[Any]]
"""What a row operation takes, on the host: a list, a tuple, a range or a numpy array of any integer dtype."""

BlockIds: TypeAlias = Ints | Sequence[Ints | None] | None
"""Manager block ids: a sequence for each group, None or an empty one for nothing; with one group also that sequence
itself."""

Counts: TypeAlias = Ints | Sequence[Ints]
"""A number for each row of a call, the same in all groups; or such a sequence for each group."""

Array: TypeAlias = Any
"""What a call returns, an array of the backend's device; for a backend also a foreign one that it takes without a
copy."""

IntArray: TypeAlias = npt.NDArray[Any]
"""A numpy array of integers; the dtype is said where it is used."""
