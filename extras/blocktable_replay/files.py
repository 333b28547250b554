"""Files of a trace, plain or compressed: told apart by their first bytes, never by their name."""

from __future__ import annotations

import gzip
import importlib
import io
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blocktable_replay.traces import TraceError

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"

MAX_LINE_CHARACTERS = 1 << 24
"""No line of a trace is longer; a file without line ends must not fill the memory."""


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, unpacked where it is compressed; the file is closed at the end.

    Raises:
        TraceError: it cannot be read, is torn, or is not text.
    """
    number = 0
    torn: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    try:
        with path.open("rb") as raw:
            magic = raw.peek(4)[:4]
            file: Any = raw
            if magic == ZSTD_MAGIC:
                zstd = _zstd(path)
                file, torn = zstd.ZstdFile(raw), (*torn, zstd.ZstdError)
            elif magic[:2] == GZIP_MAGIC:
                file = gzip.GzipFile(fileobj=raw)
            with file, io.TextIOWrapper(file, "utf-8") as text:
                while line := text.readline(MAX_LINE_CHARACTERS):
                    number += 1
                    if len(line) == MAX_LINE_CHARACTERS:
                        raise TraceError(f"{path}:{number}: the line is longer than {MAX_LINE_CHARACTERS} characters.")
                    yield line
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}:{number + 1}: the file is no UTF-8 text from here on: {error.reason}.") from None
    except torn as error:
        raise TraceError(f"{path}:{number + 1}: the compressed file is torn or damaged: {error}.") from None
    except OSError as error:
        raise TraceError(f"{path}: the file cannot be read: {error.strerror or error}.") from None


def _zstd(path: Path) -> Any:
    try:
        return importlib.import_module(ZSTD)
    except ImportError:
        raise TraceError(
            f"{path}: the file is compressed with zstd, which needs Python 3.14 or the package {ZSTD}; "
            'install it with: pip install "blocktable[report]".'
        ) from None
