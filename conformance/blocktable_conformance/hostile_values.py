"""Hostile arguments, each with what it stands for: what a call does that takes one is then known."""

from __future__ import annotations

from collections import UserList, deque
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from random import Random
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

AnyArray = npt.NDArray[Any]


class Meaning(Enum):
    """Of an argument that stands for no plain value."""

    REFUSED = "no call takes it"
    OPEN = "a call may take it for anything that its checks allow"


REFUSED, OPEN = Meaning.REFUSED, Meaning.OPEN


class Given(NamedTuple):
    """An argument, and what it stands for: plain ints and lists, or a `Meaning`."""

    value: Any
    meaning: Any


class Raised(Exception):
    """What methods of the caller's own objects raise: a call lets it through, and has changed nothing."""


class Raising:
    """Every question raises."""

    def _raise(self, *_arguments: Any) -> NoReturn:
        raise Raised

    __len__ = __getitem__ = __iter__ = __index__ = __int__ = __bool__ = __array__ = __str__ = _raise
    __hash__ = __eq__ = __lt__ = __getattr__ = __fspath__ = _raise


class RaisingList(list[Any]):
    """A list whose items cannot be read."""

    __len__ = __getitem__ = __iter__ = Raising._raise


class Index:
    """No int, but numpy would take it for one."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


class OwnInt(int):
    """An int of a class of the caller's own, which compares in its own way."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True


class OwnArray(np.ndarray[Any, Any]):
    """An array that says of its entries what a check wants to hear."""

    def __lt__(self, other: Any) -> Any:
        return np.zeros(self.shape, np.bool_)

    __gt__ = __ge__ = __eq__ = __ne__ = __lt__


class Liar(Sequence[int]):
    """A sequence that is another one each time it is read, and longer than it says."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values = list(values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        if len(self.values) < 99:
            self.values.append(10**6)
        return self.values[index]


class Shrinking(list[int]):
    """A list that loses an item whenever it is gone through."""

    def __iter__(self) -> Iterator[int]:
        for value in super().__iter__():
            yield value
            self.pop()


ODD_INTS = (-1, 2**31 - 1, 2**31, -(2**31), 2**32 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, -(10**30))


def recursive() -> list[Any]:
    """Return a list that holds itself."""
    values: list[Any] = []
    values.append(values)
    return values


JUNK: Sequence[Callable[[], Any]] = (
    *(object, Raising, dict, set, lambda: {1: 2}, lambda: {1}, lambda: (i for i in (1, 2)), lambda: iter([1])),
    *(lambda: 1.0, lambda: float("nan"), lambda: 1j, lambda: Decimal(1), lambda: Fraction(1), lambda: Index(1)),
    *(lambda: True, lambda: np.True_, lambda: np.float64(1), lambda: np.timedelta64(1), lambda: np.datetime64("2026")),
    *(lambda: "1", lambda: "", lambda: b"12", lambda: bytearray(b"12"), lambda: np.bytes_(b"1"), lambda: np.str_("1")),
    *(lambda: ..., lambda: NotImplemented, lambda: int, lambda: len, lambda: np.int32, lambda: np.ma.masked),
    *(lambda: np.array(1.5), lambda: np.array("a"), lambda: np.array(None), lambda: np.void(b"12"), recursive),
    *(lambda: [True, False], lambda: ["0", "1"], lambda: [1.0], lambda: [[1], [2], [3], [4], [5]], lambda: [None] * 9),
    *(lambda: [Index(1)], lambda: [np.timedelta64(1)], lambda: np.ma.array([1, 2], mask=[False, True]), RaisingList),
)
"""What fits nowhere."""


def with_dtype(values: Sequence[int], dtype: Any) -> AnyArray:
    """Return values as an array of a dtype that they fit, else as one of int64 or of objects."""
    try:
        return np.array(values, dtype)
    except OverflowError:
        return np.array(values)


def shifted(values: AnyArray) -> AnyArray:
    """Return a copy that begins one byte off."""
    memory = np.zeros(values.nbytes + 1, np.uint8)
    copy = memory[1:].view(values.dtype)
    copy[:] = values
    return copy


def read_only(values: AnyArray) -> AnyArray:
    """Return an array that cannot be written."""
    values.flags.writeable = False
    return values


def every_other(values: AnyArray) -> AnyArray:
    """Return the same values two entries apart."""
    return np.repeat(values, 2)[::2]


def backwards(values: AnyArray) -> AnyArray:
    """Return the same values in memory that runs backwards."""
    return values[::-1].copy()[::-1]


INT_FORMS: Sequence[Callable[[int], Any]] = (int, int, int, lambda n: with_dtype([n], np.int32)[0], OwnInt)

LIST_FORMS: Sequence[Callable[[Sequence[int]], Any]] = (
    *(list, list, tuple, UserList, deque, lambda xs: list(map(OwnInt, xs)), lambda xs: [np.int64(x) for x in xs]),
    *(lambda xs: with_dtype(xs, np.int64), lambda xs: with_dtype(xs, np.int32), lambda xs: with_dtype(xs, ">i8")),
    *(lambda xs: every_other(np.array(xs, np.int64)), lambda xs: backwards(np.array(xs, np.int32))),
    *(lambda xs: shifted(np.array(xs, np.int64)), lambda xs: read_only(np.array(xs, np.int64))),
    *(lambda xs: np.array(xs, np.int64).view(OwnArray), lambda xs: np.array(xs, np.int64).data),
)
"""Ints that fit 32 bits -> a sequence of them that every call takes."""

WRONG_LISTS: Sequence[Callable[[Sequence[int]], Any]] = (
    *(lambda xs: np.array(xs, np.float32), lambda xs: np.array(xs, np.bool_), lambda xs: np.array(xs, object)),
    *(lambda xs: np.array(xs, "m8[s]"), lambda xs: np.array(xs, "M8[s]"), lambda xs: np.array(xs, complex)),
    *(lambda xs: np.array(list(map(str, xs))), lambda xs: np.array([(x, x) for x in xs], "i4,i4")),
    *(
        lambda xs: np.ma.array(xs, np.int32),
        lambda xs: np.ma.array(xs, mask=True),
        lambda xs: np.array(xs).view(np.matrix),
    ),
    *(lambda xs: [*xs[:-1], xs[-1] + 0.0], lambda xs: [*xs[:-1], None], lambda xs: [*xs[:-1], Index(xs[-1])]),
    *(lambda xs: [*xs[:-1], True], lambda xs: [*xs[:-1], "1"], lambda xs: [*xs[:-1], np.timedelta64(1)]),
    *(lambda xs: [*xs[:-1], float("nan")], lambda xs: [*xs[:-1], np.array(xs)], lambda xs: [*xs[:-1], Raising()]),
    *(
        iter,
        set,
        dict.fromkeys,
        lambda xs: (x for x in xs),
        lambda xs: map(int, xs),
        lambda xs: np.array(xs).data.hex(),
    ),
    *(
        lambda xs: bytes(len(xs)),
        lambda xs: bytearray(len(xs)),
        lambda xs: np.array(xs[0]),
        lambda xs: dict(enumerate(xs)),
    ),
)
"""At least one int -> what looks like a list of them."""

VECTOR_FORMS: Sequence[Callable[[AnyArray], Any]] = (lambda a: a, read_only, lambda a: a.view(OwnArray))
"""An array [n] of the right dtype, on the host -> what every call takes for it."""

WRONG_VECTORS: Sequence[Callable[[AnyArray], Any]] = (
    *(lambda a: a.astype(np.int16), lambda a: a.astype(np.uint32), lambda a: a.astype(np.float32)),
    *(
        lambda a: a.astype(np.int64 if a.dtype == np.int32 else np.int32),
        lambda a: a.astype(">i8"),
        lambda a: a.astype(object),
    ),
    *(lambda a: a.astype(np.bool_), lambda a: a.astype("m8[s]"), lambda a: a.astype(complex), lambda a: a.astype(str)),
    *(
        lambda a: a[None],
        lambda a: a[:, None],
        lambda a: np.array(0, a.dtype),
        np.ma.array,
        lambda a: np.ma.array(a, mask=True),
    ),
    *(
        lambda a: np.zeros(a.shape, [("x", a.dtype)]),
        lambda a: a.tolist(),
        lambda a: tuple(a.tolist()),
        lambda a: a.tobytes(),
    ),
    *(lambda a: memoryview(a.copy()), lambda a: bytearray(a.tobytes()), lambda a: iter(a), lambda a: range(len(a))),
)
"""The same -> what no call takes for it."""


def mutated(rng: Random, values: Sequence[int]) -> list[int]:
    """Return a list that differs a little: an odd int, one more, one fewer, one twice."""
    changed, odd = list(values), rng.choice(ODD_INTS)
    place = rng.randrange(len(changed) + 1)
    if rng.random() < 0.5 and changed:
        changed[place - 1] = rng.choice([odd, changed[0]])
    elif rng.random() < 0.5 and changed:
        del changed[place - 1]
    else:
        changed.insert(place, odd)
    return changed


def hostile_int(rng: Random, number: int) -> Given:
    """Return something in place of an int."""
    if rng.random() < 0.5:
        odd = rng.choice(ODD_INTS)
        return Given(odd, odd)
    wrong = (float, str, bool, Index, np.timedelta64, np.float32, np.array, lambda n: [n], lambda n: (n,))
    make: Callable[[], Any] = rng.choice([*JUNK, *((lambda make=make: make(number)) for make in wrong)])
    return Given(make(), REFUSED)


def right_list(rng: Random, values: Sequence[int]) -> Given:
    """Return ints in one of many forms; ints that do not fit 32 bits in a list."""
    fit = all(-(2**31) <= value < 2**31 for value in values)
    return Given(rng.choice(LIST_FORMS)(values) if fit else list(values), list(values))


def hostile_list(rng: Random, values: Sequence[int]) -> Given:
    """Return something in place of a list of ints."""
    kind = rng.randrange(10)
    if kind < 3:
        return right_list(rng, mutated(rng, values))
    if kind < 7 and values:
        return Given(rng.choice(WRONG_LISTS)(values), REFUSED)
    if kind == 7:
        return Given(rng.choice([Liar, Shrinking])(values), OPEN)
    return Given(rng.choice(JUNK)(), REFUSED)


def hostile_vector(rng: Random, values: Sequence[int], dtype: str) -> Given:
    """Return something in place of an array of one dimension: never a right one."""
    array = with_dtype(values, dtype)
    kind = rng.randrange(8)
    if kind < 5:
        return Given(rng.choice(WRONG_VECTORS)(array), REFUSED)
    if kind == 5 and len(values) > 1:
        return Given(rng.choice([every_other, backwards, shifted])(array), REFUSED)
    return Given(rng.choice(JUNK)(), REFUSED)
