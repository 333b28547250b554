"""Reading traces: one small reader for each format, chosen by what the file's first line says."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from blocktable.typing import IntArray
from blocktable_replay.files import read_lines
from blocktable_replay.traces import HASH_BLOCK_SIZE, MAX_NUM_TOKENS, BadLine, Trace, TraceError

OnBadLine = Literal["stop", "skip"]

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
AZURE_TIME = re.compile(r"(.{,19}[^.+Z-]*)(?:\.([0-9]*))?([+Z-].*)?")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
BURSTGPT_OTHER_COLUMNS = ("Session ID", "Elapsed time", "Model", "Total tokens", "Log Type")
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")

KNOWN_FORMATS = (
    f"an Azure LLM inference CSV ({', '.join(AZURE_COLUMNS)}), a BurstGPT CSV ({', '.join(BURSTGPT_COLUMNS)}, ...) "
    f"or Mooncake JSONL ({', '.join(MOONCAKE_FIELDS)})"
)

MAX_BLANK_LINES = 1 << 18
"""Blank lines of a trace; a compressed file of a kilobyte can hold 30 million, which take half a minute to read."""

MAX_SHOWN = 80
"""Characters of a broken line that a message repeats."""


class _WrongLineError(ValueError):
    """A line gives no request; the reason alone, the place is known by the caller."""


Request = tuple[float, int, int, IntArray | None]
"""Arrival in milliseconds, tokens of the prompt, tokens generated, hashes."""


def read_trace(path: str | Path, *, on_bad_line: OnBadLine = "stop") -> Trace:
    """Read a trace of any known format, plain or compressed with gzip or zstd.

    Args:
        path: the file.
        on_bad_line: "stop" raises at the first line that gives no request, "skip" counts it in `Trace.bad_lines`.

    Raises:
        TraceError: no such file, an unknown format, no requests, or a bad line.
    """
    source, notes = str(path), list[str]()
    lines = _numbered(source, read_lines(Path(path)))
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{source}: the file is empty; a trace is {KNOWN_FORMATS}.")
    name, parse = _recognise(source, *first, notes)
    found, bad = list[tuple[Any, ...]](), list[BadLine]()
    for number, text in lines if name.endswith("CSV") else chain([first], lines):
        try:
            found.append((*parse(text), number))
        except _WrongLineError as error:
            if on_bad_line == "stop":
                raise TraceError(
                    f"{source}:{number}: {error}. Correct the line, or pass --on-bad-line skip to count such lines and "
                    "go on."
                ) from None
            bad.append(BadLine(number, str(error)))
    if not found:
        skipped = f" ({len(bad)} bad lines, the first is line {bad[0].line}: {bad[0].reason})" if bad else ""
        raise TraceError(f"{source}: the file holds no request{skipped}.")
    found.sort(key=itemgetter(0))  # a few public traces are not sorted
    arrivals, input_lengths, output_lengths, hash_ids, numbers = zip(*found, strict=True)
    return Trace(
        source=source,
        format=name,
        arrivals=np.array(arrivals, np.float64) - arrivals[0],
        input_lengths=np.array(input_lengths, np.int64),
        output_lengths=np.array(output_lengths, np.int64),
        lines=np.array(numbers, np.int64),
        hash_ids=None if hash_ids[0] is None else hash_ids,
        bad_lines=tuple(bad),
        notes=tuple(notes),
    )


def _numbered(source: str, lines: Iterator[str]) -> Iterator[tuple[int, str]]:
    """Number the lines from 1 and leave blank ones out."""
    num_blank = 0
    for number, line in enumerate(lines, 1):
        text = line.strip("\r\n\t ")
        if text:
            yield number, text
        elif (num_blank := num_blank + 1) > MAX_BLANK_LINES:
            raise TraceError(f"{source}:{number}: more than {MAX_BLANK_LINES} lines are blank; this is not a trace.")


def _recognise(source: str, number: int, text: str, notes: list[str]) -> tuple[str, Callable[[str], Request]]:
    """Choose the format by the file's first line; its name says nothing. Return its name, and what parses a line."""
    if text.startswith("{"):
        return "Mooncake JSONL", _mooncake_parser(source, notes)
    try:
        header = _fields(text.removeprefix("\ufeff"))
    except _WrongLineError:
        header = []
    for name, columns, others, to_ms in (
        ("Azure CSV", AZURE_COLUMNS, (), _azure_time),
        ("BurstGPT CSV", BURSTGPT_COLUMNS, BURSTGPT_OTHER_COLUMNS, _burstgpt_time),
    ):
        if set(columns) <= set(header):
            unknown = [column for column in header if column not in {*columns, *others}]
            if unknown:
                notes.append(f"{source}:{number}: nothing reads the columns {', '.join(map(repr, unknown))}.")
            return name, _csv_parser(header, columns, to_ms)
    raise TraceError(f"{source}:{number}: {_shown(text)} begins no known trace; a trace is {KNOWN_FORMATS}.")


def _shown(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "...")


def _fields(text: str) -> list[str]:
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text], strict=True), [])
    except csv.Error as error:
        raise _WrongLineError(f"{_shown(text)} is not a line of a CSV file: {error}") from None


def _csv_parser(
    header: Sequence[str], columns: Sequence[str], to_ms: Callable[[str], float]
) -> Callable[[str], Request]:
    """Return what parses a line. columns: those of the time, the prompt's length and the output's length."""
    places = [header.index(column) for column in columns]

    def parse(text: str) -> Request:
        values = _fields(text)
        if len(values) != len(header):
            raise _WrongLineError(f"{_shown(text)} has {len(values)} columns, the header names {len(header)}")
        stamp, prompt, output = (values[place].strip() for place in places)
        return to_ms(stamp), _length(columns[1], prompt, 1), _length(columns[2], output, 0), None

    return parse


def _burstgpt_time(stamp: str) -> float:
    return _finite("Timestamp", stamp) * 1000.0


def _azure_time(stamp: str) -> float:
    """Return milliseconds since 1970 of a time such as `2023-11-16 18:17:03.9799600`, UTC where no zone is written.

    The fraction has seven digits, one more than `datetime` keeps: it is read apart.
    """
    found = AZURE_TIME.fullmatch(stamp)
    try:
        whole, digits, zone = found.groups("") if found else ("", "", "")
        moment = datetime.fromisoformat(whole + zone)
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise _WrongLineError(f"TIMESTAMP {_shown(stamp)} is not a time such as 2023-11-16 18:17:03.9799600") from None
    return seconds * 1000.0 + float(f"0.{digits or 0}") * 1000.0


def _mooncake_parser(source: str, notes: list[str]) -> Callable[[str], Request]:
    known = set(MOONCAKE_FIELDS)

    def parse(text: str) -> Request:
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _WrongLineError(f"{_shown(text)} is no JSON: {error}") from None
        if not isinstance(entry, dict):
            raise _WrongLineError(f"{_shown(text)} is no JSON object")
        unknown = [name for name in entry if name not in known]
        if unknown:
            known.update(unknown)
            notes.append(f"{source}: nothing reads the fields {', '.join(map(_shown, unknown))}.")
        missing = [name for name in MOONCAKE_FIELDS if name not in entry]
        if missing:
            raise _WrongLineError(f"the object lacks {', '.join(missing)}; its fields are {', '.join(MOONCAKE_FIELDS)}")
        input_length = _length("input_length", entry["input_length"], 1)
        output_length = _length("output_length", entry["output_length"], 0)
        arrival = _finite("timestamp", entry["timestamp"])
        return arrival, input_length, output_length, _hash_ids(entry["hash_ids"], input_length)

    return parse


def _hash_ids(values: Any, input_length: int) -> IntArray:
    if not isinstance(values, list) or any(type(value) is not int or not 0 <= value < 2**63 for value in values):
        raise _WrongLineError("hash_ids must be a list of integers from 0 to 2**63 - 1")
    full, needed = input_length // HASH_BLOCK_SIZE, -(-input_length // HASH_BLOCK_SIZE)
    if len(values) not in (full, needed):  # some files leave the last, partial block out
        raise _WrongLineError(
            f"hash_ids has {len(values)} entries, but an input_length of {input_length} has {needed} blocks of "
            f"{HASH_BLOCK_SIZE} tokens"
        )
    return np.array(values, np.int64)


def _finite(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise _WrongLineError(f"{name} {_shown(str(value))} is not a number") from None
    # Milliseconds beyond 2**53 have no place on a float64 clock.
    if not math.isfinite(number) or not 0 <= number < 2**43:
        raise _WrongLineError(f"{name} {_shown(str(value))} is not a time: it must be a number from 0 to 2**43")
    return number


def _length(name: str, value: Any, minimum: int) -> int:
    if isinstance(value, str):
        digits = value[1:] if value[:1] in {"+", "-"} else value
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
            raise _WrongLineError(f"{name} {_shown(value)} is not a whole number")
        value = int(value)
    if type(value) is not int:
        raise _WrongLineError(f"{name} {_shown(str(value))} is not a whole number")
    if not minimum <= value <= MAX_NUM_TOKENS:
        raise _WrongLineError(f"{name} {_shown(str(value))} is not from {minimum} to {MAX_NUM_TOKENS}")
    return value
