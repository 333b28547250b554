"""Recording a table: every call that changes rows or makes a step goes to a file (docs/recording.md)."""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import inspect
import queue
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np

from blocktable.errors import ArgumentError
from blocktable.protocols import IntArray, StepBuffers
from blocktable.replay.btrace import CALLS, RecordingError, config_as_data, put_frame, write_chunk, write_head
from blocktable.replay.digest import output_digest

if TYPE_CHECKING:
    from blocktable.table import BlockTable

CHUNK_BYTES = 1 << 16
"""A chunk goes to the file when it has grown to this size,"""

CHUNK_SECONDS = 1.0
"""or when its first frame is this old: a crash costs no more."""

_NO_ARGUMENTS = ("commit", "invalidate", "clear")
_OUTPUTS = ("gather", "compute_slot_mappings", "step")
_ROW_CALLS = tuple(name for name in CALLS if name.endswith(("row", "rows", "range", "ranges")))


class ChunkWriter:
    """Packs and writes chunks in a thread of its own, so that a step waits for neither.

    Args:
        path: the file; it is replaced.
        head: what stands before the chunks.

    Attributes:
        buffer: frames that are in no chunk yet.
        error: what went wrong in the thread; nothing is written after it.
    """

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self.buffer: bytearray = bytearray()
        self.error: OSError | None = None
        self._begun = time.monotonic()
        try:
            self._file = _begin_file(path, head)
        except OSError as error:
            raise RecordingError(f"{path}: the recording cannot be written: {error.strerror or error}.") from None
        self._chunks: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="blocktable recording", daemon=True)
        self._thread.start()

    def end_frame(self) -> None:
        """Hand the buffer over, if it is large or old."""
        if len(self.buffer) >= CHUNK_BYTES or time.monotonic() - self._begun >= CHUNK_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Hand the buffer over."""
        if self.buffer:
            self._chunks.put(self.buffer)
            self.buffer = bytearray()
        self._begun = time.monotonic()

    def close(self) -> None:
        """Write what is left and close the file."""
        self.flush()
        self._chunks.put(None)
        self._thread.join()
        try:
            self._file.close()
        except OSError as error:
            self.error = self.error or error

    def _write(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            try:
                if self.error is None:
                    write_chunk(self._file, chunk)
            except OSError as error:
                self.error = error


def _begin_file(path: Path, head: dict[str, Any]) -> IO[bytes]:
    file = path.open("wb")
    try:
        write_head(file, head)
        file.flush()
    except OSError:
        with contextlib.suppress(OSError):  # it flushes once more
            file.close()
        raise
    return file


class Recorder:
    """Writes down what a table is asked to do, from now until `close`.

    What the table holds already is written first; changes that are pending count as committed. Arrays on a device are
    copied to the host, which waits for it; a step inside a capturing stream cannot be recorded. Where the file can no
    longer be written the recording ends with a warning, and the table goes on.

    Args:
        table: the table; its own calls are watched, what it does inside them is not.
        path: the file; it is replaced.
        digests: whether to fetch the outputs of every step and write their digest down. Slow: for hunting a fault.

    Raises:
        RecordingError: the file cannot be written.
        ArgumentError: the table is being recorded already.
    """

    def __init__(self, table: BlockTable, path: str | Path, *, digests: bool = False) -> None:
        if "step" in vars(table):
            raise ArgumentError("The table is being recorded already; close that recording first.")
        self.path: Path = Path(path)
        self._table = table
        self._digests = digests
        self._is_inside = False
        self._is_open = True
        self._sets: list[StepBuffers] = [table.buffers]
        self._writer = ChunkWriter(self.path, _head(table))
        self._put_rows()
        self._watch()
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the recording; the table goes on without it.

        Raises:
            RecordingError: the file could not be written to its end.
        """
        if not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self.close)
        self._unwatch()
        put_frame(self._writer.buffer, "end", ())
        self._writer.close()
        if self._writer.error is not None:
            raise RecordingError(f"{self.path}: the recording is cut off: {self._writer.error}.")

    def flush(self) -> None:
        """Hand everything recorded so far to the thread that writes the file."""
        if self._is_open:
            self._writer.flush()

    def add_digest(self, digest: bytes) -> None:
        """Write down the digest of what the last call put out."""
        self._put("digest", (digest,))

    # Watching.

    def _watch(self) -> None:
        """Put a wrapper before each method of this one table: a table that nobody records pays nothing."""
        for name in (*_ROW_CALLS, *_NO_ARGUMENTS):
            setattr(self._table, name, self._wrap(name, _plain(getattr(self._table, name))))
        for name, arguments in (
            ("gather", self._gather_arguments),
            ("compute_slot_mappings", self._slot_arguments),
            ("step", self._step_arguments),
        ):
            setattr(self._table, name, self._wrap(name, arguments))
        setattr(self._table, "create_buffers", self._wrap_create_buffers())  # noqa: B010 - a method is assigned to

    def _unwatch(self) -> None:
        for name in (*_ROW_CALLS, *_NO_ARGUMENTS, *_OUTPUTS, "create_buffers"):
            delattr(self._table, name)

    def _wrap(self, name: str, arguments: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
        method = getattr(self._table, name)
        wants_digest = self._digests and name in _OUTPUTS

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return method(*args, **kwargs)
            try:
                values = arguments(*args, **kwargs)
            except TypeError:
                return method(*args, **kwargs)  # no call of this method: it says so itself
            self._is_inside = True
            try:
                self._put(name, values)  # before the call: one that never returns is the one to look for
                result = method(*args, **kwargs)
                if wants_digest:
                    self._put_digest(name, result, kwargs.get("out"))
                return result
            except Exception as error:
                self._put("raised", (type(error).__name__.encode(),))
                raise
            finally:
                self._is_inside = False

        return recorded

    def _wrap_create_buffers(self) -> Callable[[], StepBuffers]:
        method = self._table.create_buffers

        def recorded() -> StepBuffers:
            buffers = method()
            self._sets.append(buffers)
            self._put("create_buffers", ())
            return buffers

        return recorded

    # Arguments, in the order in which the format lists them.

    def _gather_arguments(self, idx_mapping: Any, num_reqs_padded: Any = None, **options: Any) -> Sequence[Any]:
        return (
            self._host(idx_mapping),
            num_reqs_padded,
            options.get("num_reqs"),
            self._host(options.get("num_computed_tokens")),
            self._set_number(options.get("out")),
        )

    def _slot_arguments(self, idx_mapping: Any, query_start_loc: Any, positions: Any, **options: Any) -> Sequence[Any]:
        inputs = (self._host(idx_mapping), self._host(query_start_loc), self._host(positions))
        return (*inputs, options.get("num_tokens_padded"), self._set_number(options.get("out")))

    def _step_arguments(self, idx_mapping: Any, query_start_loc: Any, positions: Any, **options: Any) -> Sequence[Any]:
        return (
            self._host(idx_mapping),
            self._host(query_start_loc),
            self._host(positions),
            options.get("num_reqs_padded"),
            options.get("num_tokens_padded"),
            self._host(options.get("num_computed_tokens")),
            self._set_number(options.get("out")),
        )

    def _host(self, array: Any) -> Any:
        """Return an input as the format holds it; what is no array stays what it is, and the call will refuse it."""
        if array is None or isinstance(array, np.ndarray) or not hasattr(array, "shape"):
            return array
        return self._table.backend.to_host(array)

    def _set_number(self, out: Any) -> int | list[int]:
        """Return which set of buffers is meant: its number, or the lengths of the caller's own arrays."""
        if out is None:
            return 0
        for number, buffers in enumerate(self._sets):
            if buffers is out:
                return number
        return [int(array.shape[0]) for array in out] if isinstance(out, Sequence) else -1

    # Writing.

    def _put(self, name: str, values: Sequence[Any]) -> None:
        if not self._is_open:
            return
        put_frame(self._writer.buffer, name, values)
        self._writer.end_frame()
        if self._writer.error is not None:
            warnings.warn(f"{self.path}: the recording ends here: {self._writer.error}", RuntimeWarning, stacklevel=4)
            self._is_open = False
            self._unwatch()
            self._writer.close()

    def _put_digest(self, name: str, result: Any, out: Any) -> None:
        """Fetch what a call put out and write its digest."""
        to_host = self._table.backend.to_host
        tables = () if name == "compute_slot_mappings" else result if name == "gather" else result.block_tables
        buffers = self._table.buffers if out is None else out
        slots = () if name == "gather" else buffers.slot_mappings if isinstance(buffers, StepBuffers) else buffers
        self.add_digest(output_digest([to_host(array) for array in (*tables, *slots)]))

    def _put_rows(self) -> None:
        """Write down what the table holds already, as calls that lead there."""
        table = self._table
        counts = table.num_blocks_per_row
        rows = np.flatnonzero(counts.any(0))
        if not rows.size:
            return
        held = [_manager_blocks(table, group, rows, counts[group, rows]) for group in range(len(counts))]
        self._put("set_rows", (rows, [ids for ids, _ in held], counts[:, rows]))
        for group, (_, gaps) in enumerate(held):
            for row, start, stop in gaps:
                self._put("null_range", (row, group, start, stop))
        self._put("commit", ())


def _head(table: BlockTable) -> dict[str, Any]:
    return {
        "blocktable": importlib.metadata.version("blocktable"),
        "numpy": np.__version__,
        "backend": table.backend.name,
        "fingerprint": table.config.fingerprint(),
        "config": config_as_data(table.config),
    }


def _plain(method: Callable[..., Any]) -> Callable[..., Sequence[Any]]:
    """Return a row operation's arguments in the order of its parameters; `stream` of commit is not one of them."""
    signature = inspect.signature(method)

    def arguments(*args: Any, **kwargs: Any) -> Sequence[Any]:
        kwargs.pop("stream", None)
        return signature.bind(*args, **kwargs).args if kwargs else args

    return arguments


def _manager_blocks(
    table: BlockTable, group: int, rows: IntArray, counts: IntArray
) -> tuple[IntArray, list[tuple[int, int, int]]]:
    """Return the manager ids of rows, one after the other, and (row, start, stop) of what is NULL in them."""
    geometry = table.config.groups[group]
    expansion = geometry.blocks_per_kv_block
    ids, gaps = [], []
    # Not by host_table: the host's appends would write through for ever, for the sake of its view.
    mirror = table.config.arena.view(table._rows.mirror, group)
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        columns = mirror[row, : count * expansion].reshape(count, expansion)
        # A NULL block that was handed in stands as 0 .. expansion - 1; with one column the two are the same.
        is_null = ~columns.any(1)
        edges = np.flatnonzero(np.diff(np.concatenate(([False], is_null, [False]))))
        gaps += [(row, int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
        placeholder = 0 if geometry.takes_null else 1
        ids.append(np.where(is_null, placeholder, columns[:, 0] // expansion))
    return np.concatenate(ids).astype(np.int32), gaps
