"""The format of recordings: JSON lines in members of a gzip file, one line a call (docs/recording.md).

Each member stands alone and has a checksum of its own, so that a torn file can be read up to the tear.
"""

from __future__ import annotations

import gzip
import inspect
import json
import zlib
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from blocktable import BlockTable, BlockTableError
from blocktable.backend import ranges
from blocktable.observer import ROW_CALLS
from blocktable.typing import IntArray

FORMAT = "blocktable recording"
VERSION = 3
"""Grows with every change that an older reader cannot take, or that gives a file another meaning.

1 and 2 were binary.
"""

OLD_BEGINNING = b"\x89BTRACE\n"

OUTPUT_CALLS = {
    "gather": ("idx_mapping", "num_reqs_padded", "num_reqs", "num_computed_tokens", "out"),
    "compute_slot_mappings": ("idx_mapping", "query_start_loc", "positions", "num_tokens_padded", "groups", "out"),
    "step": (
        *("idx_mapping", "query_start_loc", "positions"),
        *("num_reqs_padded", "num_tokens_padded", "num_computed_tokens", "out"),
    ),
}
"""Calls that put something out -> the parameters that a recording has."""

ARRAYS = ("idx_mapping", "query_start_loc", "positions", "num_computed_tokens")
"""Those of these parameters that are arrays on the device."""

PARAMETERS: Mapping[str, tuple[str, ...]] = {
    **{name: tuple(inspect.signature(getattr(BlockTable, name)).parameters)[1:] for name in ROW_CALLS},
    **OUTPUT_CALLS,
    **dict.fromkeys(("commit", "invalidate", "create_buffers"), ()),
}
"""Call -> its parameters, in their order."""

ENDINGS = ("raised", "digest", "end")
"""What a line that is not a call has: how the call before it ended, or that the recording does."""

DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NAMES = {np.dtype(name).str: name for name in DTYPES}
"""`dtype.str`, which is found faster than a dtype -> its name in the file."""

RUNS_FROM = 64
"""Arrays this long are tried as runs of consecutive numbers: positions of a prefill are one."""

NUMBERS_UP_TO = 16
"""Longer arrays are written in base64: numbers that no one will read take four times the time."""

MAX_LINE = 1 << 24
"""Characters of a line, and entries of its arrays together: a damaged file must not fill the memory."""

MAX_MEMBER = 1 << 26
"""Unpacked bytes of a member."""


class RecordingError(BlockTableError, ValueError):
    """A recording cannot be written or read."""


class TornError(Exception):
    """A file ends, or is damaged, at some place: the sentence says where and how."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """An argument that a recording cannot hold: a float, a string, a device array where none belongs.

    Attributes:
        text: what it was.
    """

    text: str


# Calls to lines.


def call_line(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the line of a call."""
    values = "".join([f',"{parameter}":{_text(value)}' for parameter, value in arguments.items()])
    return f'{{"call":"{name}"{values}}}\n'


def ending_line(name: str, value: Any) -> str:
    """Return a line that is not a call; `name` is one of `ENDINGS`."""
    return f'{{"{name}":{json.dumps(value)}}}\n'


def _text(value: Any) -> str:
    """Return an argument as JSON. The order of the questions is that of how often they are asked."""
    kind = type(value)
    if kind is np.ndarray:
        if (dtype := NAMES.get(value.dtype.str)) is not None and value.ndim in (1, 2):
            return _array_text(value, dtype)
        if value.shape == (0,):  # row operations take it whatever its dtype, and other calls refuse both
            return '{"int8":[]}'
    elif value is None:
        return "null"
    elif isinstance(value, int | np.integer) and kind is not bool and -(2**63) <= value < 2**63:
        return str(int(value))
    elif isinstance(value, list | tuple | range):
        if set(map(type, value)) == {int} and all(-(2**63) <= item < 2**63 for item in value):
            return str(list(value))
        return f"[{','.join(map(_text, value))}]"
    text = value.text if kind is Foreign else f"{kind.__name__} {value!r}"
    return json.dumps({"foreign": text[:200]})


def _array_text(array: IntArray, dtype: str) -> str:
    if array.ndim == 2:
        return f'{{"{dtype}":{_entries_text(array.ravel())},"shape":{list(array.shape)}}}'
    if array.size >= RUNS_FROM and (runs := _runs(array)) is not None:
        return f'{{"{dtype}":{_entries_text(runs[0])},"lengths":{_entries_text(runs[1])}}}'
    return f'{{"{dtype}":{_entries_text(array)}}}'


def _entries_text(array: IntArray) -> str:
    if array.size <= NUMBERS_UP_TO:
        return str(array.tolist())
    return f'"{b2a_base64(np.ascontiguousarray(array).data, newline=False).decode()}"'


def _runs(array: IntArray) -> tuple[IntArray, IntArray] | None:
    """Return first entries, and lengths as int64, of the runs of consecutive numbers, where these take less room."""
    (ends,) = (array[1:] - array[:-1] != 1).nonzero()
    if 4 * ends.size >= array.size:
        return None
    edges = np.concatenate(((0,), ends + 1, (array.size,)))
    return array[edges[:-1]], edges[1:] - edges[:-1]


# Lines to calls.


def parse_line(line: bytes) -> dict[str, Any]:
    """Return what a line says: a call with its arguments in the order of its parameters, or one of `ENDINGS`.

    Raises:
        TornError: it is not a line of a recording.
    """
    if len(line) > MAX_LINE:
        raise TornError(f"the line is longer than {MAX_LINE} characters")
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TornError(f"the line is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise TornError("the line is no JSON object")
    name = data.get("call")
    if name is None:
        return _ending(data)
    parameters = PARAMETERS.get(name) if isinstance(name, str) else None
    if parameters is None:
        raise TornError(f"there is no call {_short(name)}")
    if len(data) != len(parameters) + 1 or not all(map(data.__contains__, parameters)):
        raise TornError(f"{name} has the arguments {', '.join(parameters) or 'none'}, not {_short([*data][1:])}")
    room = [MAX_LINE]
    call = {"call": name} | {parameter: _value(data[parameter], room) for parameter in parameters}
    if name in OUTPUT_CALLS:
        _check_outputs(call)
    return call


def _ending(data: dict[str, Any]) -> dict[str, Any]:
    raised = data.get("raised")
    if data == {"end": True} or (len(data) == 1 and isinstance(raised, str) and raised.isidentifier()):
        return data
    try:
        if len(data) == 1 and len(digest := bytes.fromhex(data["digest"])) == 16:
            return {"digest": digest}
    except (KeyError, TypeError, ValueError):
        pass
    raise TornError(f"the line is neither a call nor one of {', '.join(ENDINGS)}")


def _value(data: Any, room: list[int]) -> Any:
    """Return an argument. room: entries that the line's arrays may still have."""
    if data is None or (type(data) is int and -(2**63) <= data < 2**63):
        return data
    if isinstance(data, list):
        if data and set(map(type, data)) == {int}:
            return _entries(data, "int64", room)
        return [_value(item, room) for item in data]
    if isinstance(data, dict):
        if isinstance(data.get("foreign"), str) and len(data) == 1:
            return Foreign(data["foreign"])
        for dtype in DTYPES:
            if dtype in data:
                return _array(data, dtype, room)
    raise TornError(f"{_short(data)} is not an argument")


def _array(data: dict[str, Any], dtype: str, room: list[int]) -> IntArray:
    entries = _entries(data[dtype], dtype, room)
    shape = data.get("shape")
    if "lengths" in data and len(data) == 2:
        return _from_runs(entries, _entries(data["lengths"], "int64", room), room)
    if isinstance(shape, list) and list(map(type, shape)) == [int, int] and len(data) == 2:
        if not all(0 <= size < 2**31 for size in shape) or shape[0] * shape[1] != entries.size:
            raise TornError(f"an array of {entries.size} entries cannot have the shape {_short(shape)}")
        return entries.reshape(shape)
    if len(data) != 1:
        raise TornError(f"{_short(data)} is not an array")
    return entries


def _from_runs(firsts: IntArray, lengths: IntArray, room: list[int]) -> IntArray:
    if firsts.size != lengths.size or (lengths < 0).any() or (lengths > room[0]).any():
        raise TornError("an array's runs make no sense")
    _take(int(lengths.sum()), room)
    return ranges(firsts.astype(np.int64), lengths).astype(firsts.dtype, copy=False)


def _entries(data: Any, dtype: str, room: list[int]) -> IntArray:
    """Return [n] entries: numbers, or the bytes of an array in base64."""
    try:
        if isinstance(data, str):
            array: IntArray = np.frombuffer(a2b_base64(data, strict_mode=True), dtype)
        elif isinstance(data, list) and set(map(type, data)) <= {int}:
            array = np.array(data, dtype)
        else:
            raise TornError(f"{_short(data)} are no entries of an array")
    except (Base64Error, ValueError, OverflowError) as error:
        raise TornError(f"the entries of an array of {dtype} make no sense: {error}") from None
    _take(array.size, room)
    return array


def _take(size: int, room: list[int]) -> None:
    room[0] -= size
    if room[0] < 0:
        raise TornError(f"the line's arrays have more than {MAX_LINE} entries")


def _check_outputs(call: dict[str, Any]) -> None:
    """Refuse what a recorder never writes of a call that puts something out."""
    for name in ARRAYS:
        value = call.get(name)
        if not (value is None or isinstance(value, Foreign) or (isinstance(value, np.ndarray) and value.ndim == 1)):
            raise TornError(f"{name} is no [n] array")
    out = call["out"]
    if isinstance(out, list) and not out:
        call["out"] = out = np.empty(0, np.int64)
    if isinstance(out, np.ndarray) and ((out < 0).any() or out.sum(dtype=np.float64) > MAX_LINE):
        raise TornError("out has impossible lengths")
    if not isinstance(out, int | np.ndarray | Foreign):
        raise TornError("out is neither the number of a set of buffers nor the lengths of arrays")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


# Files.


def write_member(file: IO[bytes], lines: Sequence[str]) -> None:
    """Write lines as one member, so that it can be read even if nothing comes after it."""
    file.write(gzip.compress("".join(lines).encode(), 1, mtime=0))
    file.flush()


def read_members(file: IO[bytes]) -> Iterator[bytes]:
    """Yield each member of a gzip file, unpacked, once its checksum is found right.

    Raises:
        TornError: the file ends, or is damaged, inside one, or one is larger than `MAX_MEMBER`.
    """
    data, start = b"", 0
    while data := data or file.read(1 << 16):
        inflate, parts, size = zlib.decompressobj(31), list[bytes](), 0  # 31: a gzip member
        while True:
            try:
                parts.append(inflate.decompress(data, MAX_MEMBER + 1 - size))
            except zlib.error:
                raise TornError(f"byte {start}: a chunk is damaged") from None
            size += len(parts[-1])
            if size > MAX_MEMBER:
                raise TornError(f"byte {start}: a chunk has more than {MAX_MEMBER} bytes")
            if inflate.eof:
                break
            data = inflate.unconsumed_tail or file.read(1 << 16)
            if not data:
                raise TornError(f"byte {start}: a chunk is cut off")
        data = inflate.unused_data
        start = file.tell() - len(data)
        yield b"".join(parts)


def is_recording(path: Path) -> bool:
    """Return whether a file begins as a recording does, one of an older format included."""
    try:
        with path.open("rb") as file:
            start = file.read(1 << 10)
        first = zlib.decompressobj(31).decompress(start, 80) if start[:2] == b"\x1f\x8b" else start
        return first.startswith(OLD_BEGINNING) or f'"{FORMAT}"'.encode() in first
    except (OSError, zlib.error):
        return False
