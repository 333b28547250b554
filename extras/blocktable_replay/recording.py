"""Recording a table: every call that changes rows or makes a step goes to a file (docs/recording.md)."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from blocktable import ArgumentError, BlockTable, Step, StepBuffers
from blocktable.observer import Observation
from blocktable.typing import IntArray
from blocktable_replay.btrace import (
    ARRAYS,
    FORMAT,
    MAX_LINE,
    OUTPUT_CALLS,
    PARAMETERS,
    VERSION,
    Foreign,
    RecordingError,
    call_line,
    ending_line,
    write_member,
)
from blocktable_replay.digest import output_digest

MEMBER_CHARACTERS = 1 << 16
"""Lines go to the file when they have grown to this size,"""

MEMBER_SECONDS = 1.0
"""or when the first of them is this old: a crash costs no more."""

_ON_HOST = (np.ndarray, np.generic, int, type(None))

_recorded: weakref.WeakSet[BlockTable] = weakref.WeakSet()


class MemberWriter:
    """Packs and writes lines in a thread of its own, so that a step waits for neither.

    Args:
        path: the file; it is replaced.
        header: its first line.

    Attributes:
        error: what went wrong; nothing is written after it.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.error: Exception | None = None
        self._begun = time.monotonic()
        self._lines: list[str] = []
        self._size = 0
        try:
            self._file = _begin_file(path, header)
        except OSError as error:
            raise RecordingError(f"{path}: the recording cannot be written: {error.strerror or error}.") from None
        self._members: queue.SimpleQueue[list[str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="blocktable recording", daemon=True)
        self._thread.start()

    def add(self, line: str) -> None:
        """Add a line; hand all that are here over, if they are large or old."""
        if len(line) > MAX_LINE:
            self.error = RecordingError(f"a call takes {len(line)} characters, more than the {MAX_LINE} of a line")
            return
        self._lines.append(line)
        self._size += len(line)
        if self._size >= MEMBER_CHARACTERS or time.monotonic() - self._begun >= MEMBER_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Hand the lines over."""
        if self._lines:
            self._members.put(self._lines)
            self._lines, self._size = [], 0
        self._begun = time.monotonic()

    def close(self) -> None:
        """Write what is left, with the end mark if all before it was written, and close the file."""
        if self.error is None:
            self.add(ending_line("end", True))
        self.flush()
        self._members.put(None)
        if threading.current_thread() is not self._thread:  # which may be where a table is found to be gone
            self._thread.join()

    def _write(self) -> None:
        while (lines := self._members.get()) is not None:
            try:
                if self.error is None:
                    write_member(self._file, lines)
            except OSError as error:
                self.error = error
        try:
            self._file.close()
        except OSError as error:
            self.error = self.error or error


def _begin_file(path: Path, header: dict[str, Any]) -> IO[bytes]:
    file = path.open("wb")
    try:
        write_member(file, [json.dumps(header, separators=(",", ":")) + "\n"])
    except OSError:
        with contextlib.suppress(OSError):  # it flushes once more
            file.close()
        raise
    return file


class Recorder:
    """Writes down what a table is asked to do, from now until `close`: an observer of the table.

    What the table holds already is written first; changes that are pending count as committed. Arrays on a device are
    copied to the host, which waits for it; a step inside a capturing stream cannot be recorded. Where the file can no
    longer be written the recording ends with a warning, and the table goes on. The recording of a table that is gone
    is closed, and so is one that is open when the process ends.

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
        self._writer = MemberWriter(self.path, _header(table))
        self._close_writer = weakref.finalize(table, self._writer.close)  # at exit, too
        rows = np.flatnonzero(table.num_blocks_per_row.any(0))
        if rows.size:
            self._put_rows(table, rows)
            self._put(call_line("commit", {}))
        if self._is_open:
            _recorded.add(table)
            self._observation = table.observe(self)

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
        self._stop()
        if self._writer.error is not None:
            raise RecordingError(f"{self.path}: the recording is cut off: {self._writer.error}.")

    def flush(self) -> None:
        """Hand everything recorded so far to the thread that writes the file."""
        if self._is_open:
            self._writer.flush()

    def add_digest(self, digest: bytes) -> None:
        """Write down the digest of what the last call put out."""
        self._put(ending_line("digest", digest.hex()))

    # What the table tells.

    def before(self, call: str, arguments: Mapping[str, Any]) -> None:
        """Write the call down before it is made: one that never returns is the one to look for."""
        if call == "step_metadata":  # is a step, and exports, which are not written
            call = "step"
        if call in OUTPUT_CALLS:
            if self._digests:
                self._out, self._groups = arguments["out"], arguments.get("groups")
            self._put(call_line(call, self._as_written(call, arguments)))
        elif call in PARAMETERS and call != "create_buffers":
            self._put(call_line(call, arguments if PARAMETERS[call] else {}))  # commit: without its stream

    def after(self, call: str, result: Any) -> None:
        """Write down what came out."""
        if call == "create_buffers":
            self._sets.append(weakref.ref(result))
            self._put(call_line(call, {}))
        elif call == "apply_changes":
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
        if call == "step_metadata" or (call in PARAMETERS and call != "create_buffers"):
            self._put(ending_line("raised", type(error).__name__))

    # Arguments, as the format holds them.

    def _as_written(self, call: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        inputs = {name: arguments[name] for name in OUTPUT_CALLS[call][:-1]}
        values = {n: self._array(value) if n in ARRAYS else self._host(value) for n, value in inputs.items()}
        return values | {"out": self._set_number(arguments["out"])}

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

    def _put(self, line: str) -> None:
        if not self._is_open:
            return
        self._writer.add(line)
        if self._writer.error is not None:
            warnings.warn(f"{self.path}: the recording ends here: {self._writer.error}", RuntimeWarning, stacklevel=5)
            self._stop()

    def _stop(self) -> None:
        self._is_open = False
        table = self._table()
        if table is not None:
            _recorded.discard(table)
        if self._observation is not None:
            self._observation.close()
        self._close_writer()

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
        """Write down what rows hold, as calls that lead there. rows: [n] int64."""
        for row in rows.tolist():
            ids, holes = zip(
                *(_manager_blocks(table, group, row) for group in range(len(table.config.groups))), strict=True
            )
            self._put(call_line("set_row", {"row": row, "block_ids": ids}))
            for group, (start, stop) in ((group, hole) for group, found in enumerate(holes) for hole in found):
                self._put(call_line("null_range", {"row": row, "group": group, "start": start, "stop": stop}))


def _header(table: BlockTable) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "blocktable": importlib.metadata.version("blocktable"),
        "numpy": np.__version__,
        "backend": table.backend.name,
        "check": table.check,
        "fingerprint": table.config.fingerprint(),
        "config": {name: value for name, value in asdict(table.config).items() if name != "check_plan"},
    }


def _manager_blocks(table: BlockTable, group: int, row: int) -> tuple[IntArray, list[list[int]]]:
    """Return a row's manager ids, and (start, stop) of the holes to make in them.

    A group that takes its null block needs none to be made. In another one ids that the row has nowhere else stand in
    the holes, as long as there are such.
    """
    geometry, blocks = table.config.groups[group], table.block_ids(row, group).copy()
    is_null = blocks == geometry.null_block_id
    if geometry.allow_null or not is_null.any():
        return blocks, []
    first = 1 if geometry.null_block_id == 0 else 0
    stop = min(2 * blocks.size + 2, geometry.num_blocks or 2 * blocks.size + 2)
    free = np.setdiff1d(np.arange(first, stop), blocks)
    blocks[is_null] = np.resize(free if free.size else first, np.count_nonzero(is_null))
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_null, [False]))))
    return blocks, edges.reshape(-1, 2).tolist()
