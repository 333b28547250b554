"""The `.btrace` format: calls of a `BlockTable` as frames, packed in chunks (docs/recording.md).

A file is a head, then chunks. Each chunk stands alone, so that a torn file can be read up to the tear.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from blocktable import BlockTableConfig, BlockTableError, ContextParallel, KVCacheGroup, ranges
from blocktable.observer import ROW_CALLS

MAGIC = b"\x89BTRACE\n"
VERSION = 2
"""Grows with every change that an older reader cannot take, or that gives a file another meaning.

1: before `copy_rows`, `replace_blocks`, `replace_block_ranges`, `remap_blocks` and the null blocks of each group.
"""

OUTPUT_CALLS = {
    "gather": ("idx_mapping", "num_reqs_padded", "num_reqs", "num_computed_tokens", "out"),
    "compute_slot_mappings": ("idx_mapping", "query_start_loc", "positions", "num_tokens_padded", "groups", "out"),
    "step": (
        *("idx_mapping", "query_start_loc", "positions"),
        *("num_reqs_padded", "num_tokens_padded", "num_computed_tokens", "out"),
    ),
}
"""Calls that put something out -> the parameters that a frame's values are the arguments of."""

ARRAYS = ("idx_mapping", "query_start_loc", "positions", "num_computed_tokens")
"""Those of these parameters that are arrays on the device."""

# A row operation's values are its arguments, in the order of its parameters. The last three are no calls of a table.
CALLS = (*ROW_CALLS, "commit", *OUTPUT_CALLS, "invalidate", "create_buffers", "raised", "digest", "end")
"""Name of each frame's kind; its place is the code in the file."""

CODES = {name: code for code, name in enumerate(CALLS)}

_HEAD = struct.Struct("<8sII")  # magic, version, bytes of JSON; after the JSON its CRC-32
_CRC = struct.Struct("<I")
_CHUNK = struct.Struct("<III")  # packed bytes, unpacked bytes, CRC-32 of the packed ones
_FRAME = struct.Struct("<BB")  # code, number of values
_INT = struct.Struct("<Bq")
_COUNT = struct.Struct("<BI")
_ARRAY = struct.Struct("<BBI")  # tag, dtype, entries; or runs: then their first entries, int64, and lengths, uint32
_MATRIX = struct.Struct("<BBII")

_NONE, _INTEGER, _ONE_DIMENSION, _RUNS_OF_ONE, _SEQUENCE, _TWO_DIMENSIONS, _BYTES, _FOREIGN = range(8)

_DTYPES = [np.dtype(name) for name in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")]
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_INT64_CODE = _DTYPE_CODES[np.dtype(np.int64)]

_NOTHING = np.empty(0, np.int8)
"""Stands for an empty array of a dtype that the format lacks: row operations take it, and other calls refuse both."""

RUNS_FROM = 64
"""Arrays of int64 this long are tried as runs of consecutive numbers: positions of a prefill are one."""

MAX_CHUNK_BYTES = 1 << 30
"""No chunk is larger, whatever a damaged file says."""


class RecordingError(BlockTableError, ValueError):
    """A recording cannot be written or read."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """An argument that a recording cannot hold: a float, a string, a device array where none belongs.

    Attributes:
        text: what it was.
    """

    text: str


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame.

    Attributes:
        name: one of `CALLS`.
        values: its arguments: None, ints, arrays, sequences of these, `Foreign`.
    """

    name: str
    values: tuple[Any, ...]


# Frames to bytes.


def put_frame(buffer: bytearray, name: str, values: Sequence[Any]) -> None:
    """Append one frame."""
    buffer += _FRAME.pack(CODES[name], len(values))
    for value in values:
        _put(buffer, value)


def _put(buffer: bytearray, value: Any) -> None:
    if type(value) is np.ndarray and (code := _DTYPE_CODES.get(value.dtype)) is not None and value.ndim in (1, 2):
        _put_array(buffer, value, code)
    elif value is None:
        buffer.append(_NONE)
    elif isinstance(value, int | np.integer) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
        buffer += _INT.pack(_INTEGER, value)
    elif isinstance(value, bytes):
        buffer += _COUNT.pack(_BYTES, len(value))
        buffer += value
    elif isinstance(value, list | tuple | range):
        _put_sequence(buffer, value)
    elif type(value) is np.ndarray and value.shape == (0,):
        _put_array(buffer, _NOTHING, _DTYPE_CODES[_NOTHING.dtype])
    else:
        _put_foreign(buffer, value)


def _put_array(buffer: bytearray, array: np.ndarray[Any, Any], code: int) -> None:
    if array.ndim == 2:
        buffer += _MATRIX.pack(_TWO_DIMENSIONS, code, *array.shape)
    elif array.size >= RUNS_FROM and array.itemsize == 8 and (runs := _runs(array)) is not None:
        starts, lengths = runs
        buffer += _ARRAY.pack(_RUNS_OF_ONE, code, starts.size)
        buffer += starts.tobytes() + lengths.tobytes()
        return
    else:
        buffer += _ARRAY.pack(_ONE_DIMENSION, code, array.size)
    buffer += array.tobytes()


def _runs(array: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """Return first entries and lengths of the runs of consecutive numbers, where these take less room."""
    values = array.view(np.int64) if array.flags.c_contiguous else array.astype(np.int64)
    firsts = np.flatnonzero(values[1:] - values[:-1] != 1) + 1
    if 2 * firsts.size >= values.size:
        return None
    firsts = np.concatenate(([0], firsts))
    return values[firsts], np.diff(firsts, append=values.size).astype(np.uint32)


def _put_sequence(buffer: bytearray, values: Sequence[Any]) -> None:
    if values and set(map(type, values)) == {int} and all(-(2**63) <= value < 2**63 for value in values):
        _put_array(buffer, np.array(values, np.int64), _INT64_CODE)
        return
    buffer += _COUNT.pack(_SEQUENCE, len(values))
    for value in values:
        _put(buffer, value)


def _put_foreign(buffer: bytearray, value: Any) -> None:
    text = (value.text if isinstance(value, Foreign) else f"{type(value).__name__} {value!r}")[:200].encode()
    buffer += _COUNT.pack(_FOREIGN, len(text))
    buffer += text


# Bytes to frames.


def frames_of(chunk: bytes) -> Iterator[Frame]:
    """Yield the frames of an unpacked chunk."""
    place = 0
    while place < len(chunk):
        code, count = _FRAME.unpack_from(chunk, place)
        values, place = _take_sequence(chunk, place + _FRAME.size, count)
        yield Frame(CALLS[code], tuple(values))


def _take(chunk: bytes, place: int) -> tuple[Any, int]:
    tag = chunk[place]
    if tag == _NONE:
        return None, place + 1
    if tag == _INTEGER:
        return _INT.unpack_from(chunk, place)[1], place + _INT.size
    if tag in (_ONE_DIMENSION, _TWO_DIMENSIONS, _RUNS_OF_ONE):
        return _take_array(chunk, place, tag)
    _, count = _COUNT.unpack_from(chunk, place)
    place += _COUNT.size
    if tag == _SEQUENCE:
        return _take_sequence(chunk, place, count)
    data = chunk[place : place + count]
    return data if tag == _BYTES else Foreign(data.decode(errors="replace")), place + count


def _take_sequence(chunk: bytes, place: int, count: int) -> tuple[list[Any], int]:
    values = []
    for _ in range(count):
        value, place = _take(chunk, place)
        values.append(value)
    return values, place


def _take_array(chunk: bytes, place: int, tag: int) -> tuple[np.ndarray[Any, Any], int]:
    if tag == _RUNS_OF_ONE:
        _, code, count = _ARRAY.unpack_from(chunk, place)
        place += _ARRAY.size
        starts = np.frombuffer(chunk, np.int64, count, place)
        lengths = np.frombuffer(chunk, np.uint32, count, place + 8 * count)
        return ranges(starts, lengths.astype(np.int64)).view(_DTYPES[code]), place + 12 * count
    if tag == _TWO_DIMENSIONS:
        _, code, *shape = _MATRIX.unpack_from(chunk, place)
        place += _MATRIX.size
    else:
        _, code, *shape = _ARRAY.unpack_from(chunk, place)
        place += _ARRAY.size
    dtype = _DTYPES[code]
    count = int(np.prod(shape))
    return np.frombuffer(chunk, dtype, count, place).reshape(shape), place + count * dtype.itemsize


# Files.


def write_head(file: IO[bytes], head: dict[str, Any]) -> None:
    """Write what stands before the chunks."""
    text = json.dumps(head).encode()
    file.write(_HEAD.pack(MAGIC, VERSION, len(text)) + text + _CRC.pack(zlib.crc32(text)))


def write_chunk(file: IO[bytes], frames: bytes | bytearray) -> None:
    """Write one chunk, so that it can be read even if nothing comes after it."""
    packed = zlib.compress(frames, 1)
    file.write(_CHUNK.pack(len(packed), len(frames), zlib.crc32(packed)) + packed)
    file.flush()


def is_recording(path: Path) -> bool:
    """Return whether a file begins as a recording does."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class Recording:
    """A recording on disk.

    Args:
        path: the file.

    Attributes:
        path: the file.
        head: what stands before the chunks: backend, versions, configuration.
        config: the table's configuration.
        tear: where and how it is torn, in words; None while nothing wrong was met. Known once `frames` is at its end.

    Raises:
        RecordingError: it is no recording, or one of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tear: str | None = None
        try:
            with path.open("rb") as file:
                self.head: dict[str, Any] = self._read_head(file)
                self._first_chunk = file.tell()
        except OSError as error:
            raise RecordingError(f"{path}: the file cannot be read: {error.strerror or error}.") from None
        self.config: BlockTableConfig = config_from(path, self.head.get("config"))

    def _read_head(self, file: IO[bytes]) -> dict[str, Any]:
        start = file.read(_HEAD.size)
        if len(start) < _HEAD.size or not start.startswith(MAGIC):
            raise RecordingError(f"{self.path}: the file is no recording: it does not begin with {MAGIC!r}.")
        _, version, size = _HEAD.unpack(start)
        if version != VERSION:
            raise RecordingError(
                f"{self.path}: the recording has version {version}, this blocktable reads version {VERSION}; use the "
                "blocktable that wrote it."
            )
        text, crc = file.read(size), file.read(_CRC.size)
        if len(crc) < _CRC.size or _CRC.unpack(crc)[0] != zlib.crc32(text):
            raise RecordingError(f"{self.path}: the recording's head is torn or damaged; nothing in it can be read.")
        head: dict[str, Any] = json.loads(text)
        return head

    def frames(self) -> Iterator[Frame]:
        """Yield every frame up to the end, or up to the tear."""
        self.tear = "it has no end mark: whoever wrote it did not close it"
        with self.path.open("rb") as file:
            file.seek(self._first_chunk)
            try:
                for chunk in _chunks(file):
                    for frame in frames_of(chunk):
                        if frame.name == "end":
                            self.tear = None
                            return
                        yield frame
            except _TornError as torn:
                self.tear = str(torn)


class _TornError(Exception):
    """A file ends, or is damaged, inside a chunk."""


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the chunks of a file, unpacked."""
    while start := file.read(_CHUNK.size):
        place = file.tell() - len(start)
        size, unpacked_size, crc = _CHUNK.unpack(start) if len(start) == _CHUNK.size else (0, -1, 0)
        packed = file.read(size) if size <= MAX_CHUNK_BYTES else b""
        if len(packed) < size or unpacked_size < 0:
            raise _TornError(f"byte {place}: a chunk is cut off")
        if zlib.crc32(packed) != crc:
            raise _TornError(f"byte {place}: a chunk is damaged")
        chunk = zlib.decompress(packed)
        if len(chunk) != unpacked_size:
            raise _TornError(f"byte {place}: a chunk is damaged")
        yield chunk


def config_from(path: Path, data: Any) -> BlockTableConfig:
    """Return the configuration that a head holds."""
    try:
        values = dict(data)
        groups = [KVCacheGroup(**group) for group in values.pop("groups")]
        shard = ContextParallel(**values.pop("context_parallel"))
        return BlockTableConfig(groups=groups, context_parallel=shard, **values)
    except (TypeError, KeyError, ValueError) as error:
        raise RecordingError(f"{path}: the recording's configuration cannot be used: {error}.") from None
