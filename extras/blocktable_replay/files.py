"""Files of a trace, plain or compressed: told apart by their first bytes, never by their name."""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from blocktable_replay.traces import TraceError

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

MAX_LINE_CHARACTERS = 1 << 24
"""No line of a trace is longer; a file without line ends must not fill the memory."""


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, unpacked where it is compressed; the file is closed at the end.

    Raises:
        TraceError: it cannot be read, is torn, or is no text.
    """
    number = 0
    try:
        with path.open("rb") as raw, _unpacked(path, raw) as unpacked, io.TextIOWrapper(unpacked, "utf-8") as text:
            while line := text.readline(MAX_LINE_CHARACTERS):
                number += 1
                if len(line) == MAX_LINE_CHARACTERS:
                    raise TraceError(f"{path}:{number}: the line is longer than {MAX_LINE_CHARACTERS} characters.")
                yield line
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}:{number + 1}: the file is no UTF-8 text from here on: {error.reason}.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}:{number + 1}: the compressed file is torn or damaged: {error}.") from None
    except OSError as error:
        raise TraceError(f"{path}: the file cannot be read: {error.strerror or error}.") from None


def _unpacked(path: Path, raw: IO[bytes]) -> Any:
    magic = raw.read(4)
    raw.seek(0)
    if magic[:2] == GZIP_MAGIC:
        return gzip.GzipFile(fileobj=raw)
    if magic == ZSTD_MAGIC:
        return io.BufferedReader(_ZstdReader(raw, _zstd_decompressor(path)))
    return raw


def _zstd_decompressor(path: Path) -> Callable[[], Any]:
    """Return what makes a decompressor of one frame: Python 3.14 brings zstd, older ones need the zstandard package."""
    try:
        make: Callable[[], Any] = importlib.import_module("compression.zstd").ZstdDecompressor
        return make
    except ImportError:
        pass
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ImportError:
        raise TraceError(
            f"{path}: the file is compressed with zstd, which needs Python 3.14 or the zstandard package; "
            'install it with: pip install "blocktable[report]".'
        ) from None
    return lambda: zstandard.ZstdDecompressor().decompressobj()


class _ZstdReader(io.RawIOBase):
    """Frames of a zstd file, one after the other; unlike zstandard's own reader it takes no torn one for whole."""

    CHUNK = 1 << 16

    def __init__(self, raw: IO[bytes], make_frame: Callable[[], Any]) -> None:
        self._raw = raw
        self._make_frame = make_frame
        self._frame: Any = None
        self._packed = b""
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._raw.read(self.CHUNK)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends inside a zstd frame")
                return 0
            self._unpack()
        part, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)

    def _unpack(self) -> None:
        self._frame = self._frame or self._make_frame()
        try:
            self._ready = self._frame.decompress(self._packed)
        except Exception as error:  # ZstdError, a plain Exception in either library
            raise EOFError(str(error)) from error
        self._packed = b""
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, None
