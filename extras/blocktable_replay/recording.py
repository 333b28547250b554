"""Recording a table: every call that changes rows or makes a step goes to a file (docs/recording.md)."""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from blocktable import ArgumentError, BlockTable, IntArray, Observation, Step, StepBuffers
from blocktable.observer import ROW_CALLS
from blocktable_replay.btrace import (
    ARRAYS,
    OUTPUT_CALLS,
    Foreign,
    RecordingError,
    put_frame,
    write_chunk,
    write_head,
)
from blocktable_replay.digest import output_digest

CHUNK_BYTES = 1 << 16
"""A chunk goes to the file when it has grown to this size,"""

CHUNK_SECONDS = 1.0
"""or when its first frame is this old: a crash costs no more."""

_ROW_CALLS = frozenset(ROW_CALLS)
_NO_ARGUMENTS = ("commit", "invalidate")
_ON_HOST = (np.ndarray, np.generic, int, type(None))

_recorded: weakref.WeakSet[BlockTable] = weakref.WeakSet()


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
    """Writes down what a table is asked to do, from now until `close`: an observer of the table.

    What the table holds already is written first; changes that are pending count as committed. Arrays on a device are
    copied to the host, which waits for it; a step inside a capturing stream cannot be recorded. Where the file can no
    longer be written the recording ends with a warning, and the table goes on.

    Args:
        table: the table; its own calls are watched, what it does inside them is not. The recorder does not keep it.
        path: the file; it is replaced.
        digests: whether to fetch the outputs of every step and write their digest down. Slow: for hunting a fault.

    Raises:
        RecordingError: the file cannot be written.
        ArgumentError: the table is being recorded already.
    """

    def __init__(self, table: BlockTable, path: str | Path, *, digests: bool = False) -> None:
        if table in _recorded:
            raise ArgumentError("The table is being recorded already; close that recording first.")
        self.path: Path = Path(path)
        self._table = weakref.ref(table)
        self._to_host = table.backend.to_host
        self._digests = digests
        self._is_open = True
        self._sets = [weakref.ref(table.buffers)]  # in the order in which they were made
        self._out: Any = None  # of the call that goes on, where its digest is wanted
        self._groups: Any = None  # whose slots it writes; None: all
        self._observation: Observation | None = None
        self._writer = ChunkWriter(self.path, _head(table))
        rows = np.flatnonzero(table.num_blocks_per_row.any(0))
        if rows.size:
            self._put_rows(table, rows)
            self._put("commit", ())
        if self._is_open:
            _recorded.add(table)
            self._observation = table.observe(self)
            atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the recording; the table goes on without it.

        Raises:
            RecordingError: the file could not be written to its end.
        """
        if not self._is_open:
            return
        atexit.unregister(self.close)
        self._stop()
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

    # What the table tells.

    def before(self, call: str, arguments: Mapping[str, Any]) -> None:
        """Write the call down before it is made: one that never returns is the one to look for."""
        if call == "step_metadata":  # is a step, and exports, which are not written
            call = "step"
        if call in _ROW_CALLS:
            self._put(call, tuple(arguments.values()))
        elif call in OUTPUT_CALLS:
            if self._digests:
                self._out, self._groups = arguments["out"], arguments.get("groups")
            self._put(call, self._as_written(call, arguments))
        elif call in _NO_ARGUMENTS:
            self._put(call, ())

    def after(self, call: str, result: Any) -> None:
        """Write down what came out."""
        if call == "create_buffers":
            self._sets.append(weakref.ref(result))
            self._put(call, ())
        elif call == "apply_changes" and result.size:
            table = self._table()
            assert table is not None
            self._put_rows(table, result)
        elif self._digests and call == "step_metadata":
            tables, slots = zip(*((group.block_table, group.slot_mapping) for group in result.groups), strict=True)
            self._put_digest("step", Step(tables, slots))
        elif self._digests and call in OUTPUT_CALLS:
            self._put_digest(call, result)

    def failed(self, call: str, error: Exception) -> None:
        """Write down the error's name."""
        self._out = self._groups = None
        if call == "step_metadata" or call in _ROW_CALLS or call in OUTPUT_CALLS or call in _NO_ARGUMENTS:
            self._put("raised", (type(error).__name__.encode(),))

    # Arguments, as the format holds them.

    def _as_written(self, call: str, arguments: Mapping[str, Any]) -> list[Any]:
        inputs = [(name, arguments[name]) for name in OUTPUT_CALLS[call][:-1]]
        values = (self._array(value) if name in ARRAYS else self._host(value) for name, value in inputs)
        return [*values, self._set_number(arguments["out"])]

    def _array(self, value: Any) -> Any:
        """Return an argument that must be an array, on the host; what the call will refuse for its form is foreign."""
        found = self._host(value)
        is_array = isinstance(found, np.ndarray) and found.flags.c_contiguous
        return found if found is None or is_array else Foreign(f"{type(value).__name__} {value!r}")

    def _host(self, value: Any) -> Any:
        """Return a device array on the host; anything else stays what it is, and the call will refuse what is wrong."""
        if isinstance(value, _ON_HOST) or not hasattr(value, "shape"):
            return value
        try:
            return self._to_host(value)
        except Exception:  # a backend's own, of what is no array of its device: the call says so
            return Foreign(f"{type(value).__name__} {value!r}")

    def _set_number(self, out: Any) -> int | list[int] | Foreign:
        """Return which set of buffers is meant: its number, or the lengths of the caller's own arrays."""
        if out is None:
            return 0
        for number, buffers in enumerate(self._sets):
            if buffers() is out:
                return number
        shapes: list[Any] = [getattr(array, "shape", ()) for array in out] if isinstance(out, list | tuple) else [()]
        if any(len(shape) != 1 for shape in shapes):
            return Foreign(f"{type(out).__name__} {out!r}")
        return [int(shape[0]) for shape in shapes]

    # Writing.

    def _put(self, name: str, values: Sequence[Any]) -> None:
        if not self._is_open:
            return
        put_frame(self._writer.buffer, name, values)
        self._writer.end_frame()
        if self._writer.error is not None:
            warnings.warn(f"{self.path}: the recording ends here: {self._writer.error}", RuntimeWarning, stacklevel=5)
            self._stop()
            self._writer.close()

    def _stop(self) -> None:
        self._is_open = False
        table = self._table()
        if table is not None:
            _recorded.discard(table)
        if self._observation is not None:
            self._observation.close()

    def _put_digest(self, name: str, result: Any) -> None:
        """Fetch what a call put out and write its digest."""
        out, groups, self._out, self._groups = self._out, self._groups, None, None
        tables = () if name == "compute_slot_mappings" else result if name == "gather" else result.block_tables
        buffers: Any = self._sets[0]() if out is None else out
        slots = () if name == "gather" else buffers
        if isinstance(slots, StepBuffers):  # of the groups that the call names: the others hold what is older than it
            slots = slots.slot_mappings
            slots = slots if groups is None else [slots[group] for group in np.atleast_1d(groups).tolist()]
        self.add_digest(output_digest([self._to_host(array) for array in (*tables, *slots)]))

    def _put_rows(self, table: BlockTable, rows: IntArray) -> None:
        """Write down what rows hold, as calls that lead there. rows: [n] int64, at least one."""
        counts = table.num_blocks_per_row
        held = [_manager_blocks(table, group, rows) for group in range(len(counts))]
        self._put("set_rows", (rows, [ids for ids, _ in held], counts[:, rows]))
        for group, (_, holes) in enumerate(held):
            for row, start, stop in holes:
                self._put("null_range", (row, group, start, stop))


def _head(table: BlockTable) -> dict[str, Any]:
    return {
        "blocktable": importlib.metadata.version("blocktable"),
        "numpy": np.__version__,
        "backend": table.backend.name,
        "fingerprint": table.config.fingerprint(),
        "config": asdict(table.config),
    }


def _manager_blocks(table: BlockTable, group: int, rows: IntArray) -> tuple[IntArray, list[tuple[int, int, int]]]:
    """Return the manager ids of rows, one after the other, and (row, start, stop) of the holes to make in them.

    A group that takes its null block needs none to be made. In another one an id that it can have stands in each hole.
    """
    geometry = table.config.groups[group]
    placeholder = 1 if geometry.null_block_id == 0 else 0
    ids, holes = [], []
    for row in rows.tolist():
        blocks = table.block_ids(row, group)
        is_null = blocks == geometry.null_block_id
        if not geometry.allow_null and is_null.any():
            edges = np.flatnonzero(np.diff(np.concatenate(([False], is_null, [False]))))
            holes += [(row, int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
            blocks[is_null] = placeholder
        ids.append(blocks)
    return np.concatenate(ids), holes
