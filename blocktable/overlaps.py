"""Memory that a call both reads and writes, or writes twice: refused where addresses are known (R17)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from blocktable.arrays import Array
from blocktable.errors import ArgumentError, DtypeError
from blocktable.streams import address_of

Named = tuple[str, Array | None]
"""An argument's name, and the array."""


class Span(NamedTuple):
    """The bytes of an array, `start .. stop - 1`."""

    start: int
    stop: int


def span_of(array: Any) -> Span | None:
    """Return where a contiguous array lies; None: it is None or empty, or does not say."""
    if array is None:
        return None
    if isinstance(array, np.ndarray):
        start, size = array.__array_interface__["data"][0], array.nbytes
    else:
        try:
            start, shape = address_of(array), tuple(array.shape)
            dtype = array.dtype
        except (AttributeError, DtypeError, RuntimeError, TypeError):
            return None
        itemsize = getattr(dtype, "itemsize", None) or np.dtype(str(dtype).removeprefix("torch.")).itemsize
        size = prod(shape) * itemsize
    return Span(start, start + size) if size else None


def refuse_overlaps(outputs: Sequence[Named], inputs: Sequence[Named]) -> None:
    """Refuse outputs that share memory with one another or with an input.

    Raises:
        ArgumentError: two of them do.
    """
    taken: list[tuple[Span, str]] = []
    for name, array in outputs:
        span = span_of(array)
        if span is not None:
            _refuse(name, span, taken, "each output must have memory of its own")
            taken.append((span, name))
    for name, array in inputs:
        span = span_of(array)
        if span is not None:
            _refuse(name, span, taken, "the call would read what it writes; pass a copy of the input")


def _refuse(name: str, span: Span, taken: Sequence[tuple[Span, str]], reason: str) -> None:
    for other, other_name in taken:
        if span.start < other.stop and other.start < span.stop:
            raise ArgumentError(f"{name} shares memory with {other_name}: {reason}.")


class OutputMemory:
    """Where the outputs of a set lie, to be asked for in every step.

    Args:
        outputs: the arrays of the set, which do not overlap.
    """

    def __init__(self, outputs: Sequence[Named]) -> None:
        self._outputs = outputs
        spans = sorted(span for _, array in outputs if (span := span_of(array)) is not None)
        self._edges = [edge for span in spans for edge in span]
        # A numpy view names the array that owns its memory: by it most inputs are passed without their addresses.
        self._owners = {id(each) for _, array in outputs for each in _owners(array)}
        self._is_owner = any(isinstance(array, np.ndarray) and array.flags.owndata for _, array in outputs)

    def refuse(self, inputs: Sequence[Named]) -> None:
        """Refuse inputs that share memory with an output.

        Raises:
            ArgumentError: one does.
        """
        for _, array in inputs:
            if array is None or (type(array) is np.ndarray and not self.may_hold(array)):
                continue
            span = span_of(array)
            if span is not None and self.holds_any((span.start,), (span.stop - span.start,), (None,)):
                refuse_overlaps(self._outputs, inputs)

    def may_hold(self, array: np.ndarray[Any, Any]) -> bool:
        """Whether the address of a numpy array must be asked for: its memory has no owner of its own."""
        owner = array if array.base is None else array.base
        return id(owner) in self._owners or type(owner) is not np.ndarray

    def to_look_at(self, arrays: Sequence[Array | None]) -> tuple[int, ...]:
        """Return the places of the numpy arrays of which `may_hold` may say yes, or another thing in another step.

        What owns its memory, as its flags say, is not a view of an output.
        """
        return tuple(
            place for place, array in enumerate(arrays) if isinstance(array, np.ndarray) and self._varies(array)
        )

    def _varies(self, array: np.ndarray[Any, Any]) -> bool:
        return type(array) is not np.ndarray or self._is_owner or not array.flags.owndata

    def holds_any(self, addresses: Sequence[int | None], sizes: Sequence[int], passed: Sequence[int | None]) -> bool:
        """Whether one of some arrays shares memory with an output.

        Args:
            addresses: of the arrays. None: not known.
            sizes: of the arrays, in bytes.
            passed: addresses that were asked for before.
        """
        edges = self._edges
        for start, size, known in zip(addresses, sizes, passed, strict=True):
            if start is None or start == known:
                continue
            place = bisect_right(edges, start)
            if (place % 2 == 1 and size) or (place < len(edges) and edges[place] < start + size):
                return True
        return False


def _owners(array: Any) -> list[Any]:
    """Return a numpy array and what it is a view of."""
    found = []
    while isinstance(array, np.ndarray):
        found.append(array)
        array = array.base
    return found
