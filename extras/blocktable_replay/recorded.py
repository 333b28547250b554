"""Reading a recording: the calls of a table, in order, up to the end of the file or to its tear."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from blocktable import BlockTableConfig, ContextParallel, KVCacheGroup
from blocktable_replay.btrace import (
    FORMAT,
    MAX_LINE,
    OLD_BEGINNING,
    VERSION,
    RecordingError,
    TornError,
    parse_line,
    read_members,
)

MAX_TABLE_ENTRIES = 1 << 28
"""Entries of a table's rows, and of a set of its outputs, that a recording may ask for: 1 GiB each."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of a recorded table.

    Attributes:
        number: of the call in the file, from 0.
        step: commits before the call, as `Finding.step`; a `step` commits too.
        name: the method of `BlockTable`. `step_metadata` is written as `step`.
        arguments: parameter -> value, in the order of the method's parameters, without `stream` and exports: None, an
            int, a list of values, or a [n] or [n, m] array of integers; a list of ints is an int64 array. `out` is the
            number of the set of buffers (0: the table's own, then in the order of `create_buffers`), or the
            [n] int64 lengths of the caller's own arrays. `Foreign` stands for what a recording cannot hold.
        raised: name of the exception that it ended with. None: it returned.
        digest: BLAKE2b, 16 bytes, of what it put out. None: not recorded.
        has_effect: whether it did its work: it returned, or raised a finding (`CheckError`) of an earlier call, as
            `check="device"` does.
    """

    number: int
    step: int
    name: str
    arguments: Mapping[str, Any]
    raised: str | None = None
    digest: bytes | None = None
    has_effect: bool = True


class Recording:
    """A recording on disk, as `BlockTable.record` writes it. Iterating it gives its calls, each time from the first.

    Nothing is read ahead, and a file that is still being written, or was cut off, gives its calls up to there:
    `tear` then says where and why. Leaving a `with` block, or `close`, ends all iterations.

    Args:
        path: the file.

    Attributes:
        path: the file.
        header: its first line: `version`, `blocktable` and `numpy` (versions), `backend`, `check`, `fingerprint`,
            `config`.
        config: the configuration of the table.
        tear: where and how the file is torn, in words; None while nothing wrong was met. Known at the end of an
            iteration.

    Raises:
        RecordingError: the file cannot be read, is not a recording, or one of another version.
    """

    def __init__(self, path: str | Path) -> None:
        self.path: Path = Path(path)
        self.tear: str | None = None
        self._iterations: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_open = True
        self.header: Mapping[str, Any] = self._read_header()
        self.config: BlockTableConfig = self._read_config()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all iterations; another one raises `RecordingError`."""
        self._is_open = False
        for iteration in list(self._iterations):
            iteration.close()

    def __iter__(self) -> Iterator[RecordedCall]:
        if not self._is_open:
            raise RecordingError(f"{self.path}: the recording is closed; open another Recording of the file.")
        iteration = self._calls()
        self._iterations.add(iteration)
        return iteration

    def _read_header(self) -> Mapping[str, Any]:
        try:
            line = next(self._lines(), b"")
        except TornError:
            line = b""
        if line == OLD_BEGINNING:
            raise RecordingError(
                f"{self.path}: the recording has version 1 or 2, this blocktable reads version {VERSION}; use the "
                "blocktable that wrote it."
            )
        try:
            header = json.loads(line) if len(line) <= MAX_LINE else None
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise RecordingError(
                f"{self.path}: the file is not a recording, or its head is damaged: its first line must be a JSON "
                f'object whose "format" is "{FORMAT}".'
            )
        if header.get("version") != VERSION:
            raise RecordingError(
                f"{self.path}: the recording has version {str(header.get('version'))[:20]}, this blocktable reads "
                f"version {VERSION}; use the blocktable that wrote it."
            )
        return header

    def _read_config(self) -> BlockTableConfig:
        try:
            values = dict(self.header["config"])
            groups = [KVCacheGroup(**group) for group in values.pop("groups")]
            shard = ContextParallel(**values.pop("context_parallel"))
            config = BlockTableConfig(groups=groups, context_parallel=shard, **values)
            rows = max(config.max_num_reqs, config.num_rows)
            most = max(rows * sum(config.arena.widths), config.max_num_batched_tokens * len(config.groups))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, MemoryError) as error:
            reason = str(error).rstrip(".")
            raise RecordingError(f"{self.path}: the recording's configuration cannot be used: {reason}.") from None
        most = max(most, *(group.num_blocks or 0 for group in config.groups))
        if most > MAX_TABLE_ENTRIES:
            raise RecordingError(
                f"{self.path}: the recording's table would have arrays of {most} entries; {MAX_TABLE_ENTRIES} are the "
                "most that are made for a recording."
            )
        return config

    def _lines(self) -> Iterator[bytes]:
        """Yield every line, without its end."""
        try:
            with self.path.open("rb") as file:
                if file.read(len(OLD_BEGINNING)) == OLD_BEGINNING:
                    yield OLD_BEGINNING
                    return
                file.seek(0)
                for member in read_members(file):
                    yield from member.removesuffix(b"\n").split(b"\n")
        except OSError as error:
            raise RecordingError(f"{self.path}: the file cannot be read: {error.strerror or error}.") from None

    def _calls(self) -> Iterator[RecordedCall]:
        """Yield each call with what the lines after it say of its end."""
        self.tear = None
        waiting: dict[str, Any] | None = None
        number, step = -1, 0
        try:
            for entry in self._entries():
                if "end" in entry:
                    break
                if "call" in entry:
                    if waiting is not None:
                        yield (call := self._call(waiting, number, step))
                        step += call.has_effect and call.name in ("commit", "step")
                    waiting, number = entry, number + 1
                elif waiting is None or not waiting.keys().isdisjoint(entry):
                    raise TornError(f"after call {number}: a line says how a call ended, and none is there")
                else:
                    waiting |= entry
            else:
                self.tear = "it has no end mark: whoever wrote it did not close it"
        except TornError as torn:
            self.tear = str(torn)
        if waiting is not None:
            yield self._call(waiting, number, step)

    def _entries(self) -> Iterator[dict[str, Any]]:
        """Yield what each line after the first says."""
        for number, line in enumerate(self._lines(), 1):
            if number > 1:
                try:
                    yield parse_line(line)
                except TornError as error:
                    raise TornError(f"line {number}: {error}") from None

    def _call(self, entry: dict[str, Any], number: int, step: int) -> RecordedCall:
        name, raised, digest = entry.pop("call"), entry.pop("raised", None), entry.pop("digest", None)
        is_late = raised == "CheckError" and self.header.get("check") == "device"
        return RecordedCall(number, step, name, entry, raised, digest, raised is None or is_late)
