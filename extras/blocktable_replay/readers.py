"""Reading traces: one small reader for each format, chosen by what the file's first line says."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from blocktable import IntArray
from blocktable_replay.files import read_lines
from blocktable_replay.traces import HASH_BLOCK_SIZE, MAX_NUM_TOKENS, BadLine, Trace, TraceError

OnBadLine = Literal["stop", "skip"]

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
BURSTGPT_OTHER_COLUMNS = ("Session ID", "Elapsed time", "Model", "Total tokens", "Log Type")
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")

KNOWN_FORMATS = (
    f"an Azure LLM inference CSV ({', '.join(AZURE_COLUMNS)}), a BurstGPT CSV ({', '.join(BURSTGPT_COLUMNS)}, ...) "
    f"or Mooncake JSONL ({', '.join(MOONCAKE_FIELDS)})"
)

MAX_SHOWN = 80
"""Characters of a broken line that a message repeats."""


class _WrongLineError(ValueError):
    """A line gives no request; the reason alone, the place is known by the caller."""


@dataclass(slots=True)
class _Columns:
    """What a reader collects, a value for each good line."""

    arrivals: list[float] = field(default_factory=list)
    input_lengths: list[int] = field(default_factory=list)
    output_lengths: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    hash_ids: list[IntArray] = field(default_factory=list)


Request = tuple[float, int, int, IntArray | None]
"""Arrival in milliseconds, tokens of the prompt, tokens generated, hashes."""


@dataclass(frozen=True, slots=True)
class _Format:
    """How to read one format; `notes` grows while lines are parsed."""

    name: str
    parse: Callable[[str], Request]
    has_header: bool
    has_hashes: bool = False
    notes: list[str] = field(default_factory=list)


def read_trace(path: str | Path, *, on_bad_line: OnBadLine = "stop") -> Trace:
    """Read a trace of any known format, plain or compressed with gzip or zstd.

    Args:
        path: the file.
        on_bad_line: "stop" raises at the first line that gives no request, "skip" counts it in `Trace.bad_lines`.

    Raises:
        TraceError: no such file, an unknown format, no requests, or a bad line.
    """
    source = str(path)
    lines = _numbered(read_lines(Path(path)))
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{source}: the file is empty; a trace is {KNOWN_FORMATS}.")
    form = _recognise(source, *first)
    columns, bad = _Columns(), []
    rest = lines if form.has_header else _chain(first, lines)
    for number, text in rest:
        try:
            request = form.parse(text)
        except _WrongLineError as error:
            if on_bad_line == "stop":
                raise TraceError(
                    f"{source}:{number}: {error}. Correct the line, or pass --on-bad-line skip to count such lines and "
                    "go on."
                ) from None
            bad.append(BadLine(number, str(error)))
            continue
        _add(columns, number, request)
    if not columns.lines:
        skipped = f" ({len(bad)} bad lines, the first is line {bad[0].line}: {bad[0].reason})" if bad else ""
        raise TraceError(f"{source}: the file holds no request{skipped}.")
    return _trace(source, form, columns, bad)


def _numbered(lines: Iterator[str]) -> Iterator[tuple[int, str]]:
    """Number the lines from 1 and leave blank ones out."""
    for number, line in enumerate(lines, 1):
        text = line.strip("\r\n\t ")
        if text:
            yield number, text


def _chain(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _add(columns: _Columns, number: int, request: Request) -> None:
    arrival, input_length, output_length, hash_ids = request
    columns.arrivals.append(arrival)
    columns.input_lengths.append(input_length)
    columns.output_lengths.append(output_length)
    columns.lines.append(number)
    if hash_ids is not None:
        columns.hash_ids.append(hash_ids)


def _trace(source: str, form: _Format, columns: _Columns, bad: list[BadLine]) -> Trace:
    arrivals = np.array(columns.arrivals, np.float64)
    order = np.argsort(arrivals, kind="stable")  # a few public traces are not sorted
    trace = Trace(
        source=source,
        format=form.name,
        arrivals=arrivals - arrivals.min(),
        input_lengths=np.array(columns.input_lengths, np.int64),
        output_lengths=np.array(columns.output_lengths, np.int64),
        lines=np.array(columns.lines, np.int64),
        hash_ids=tuple(columns.hash_ids) if form.has_hashes else None,
        bad_lines=tuple(bad),
        notes=tuple(form.notes),
    )
    return trace.take(order)


def _recognise(source: str, number: int, text: str) -> _Format:
    """Choose the reader by the file's first line; its name says nothing."""
    if text.startswith("{"):
        notes: list[str] = []
        return _Format(
            "Mooncake JSONL", _mooncake_parser(source, notes), has_header=False, has_hashes=True, notes=notes
        )
    try:
        header = _fields(text.removeprefix("\ufeff"))
    except _WrongLineError:
        header = []
    for name, needed, others, make_parser in (
        ("Azure CSV", AZURE_COLUMNS, (), _azure_parser),
        ("BurstGPT CSV", BURSTGPT_COLUMNS, BURSTGPT_OTHER_COLUMNS, _burstgpt_parser),
    ):
        if set(needed) <= set(header):
            unknown = [column for column in header if column not in needed and column not in others]
            said = [f"{source}:{number}: nothing reads the columns {', '.join(map(repr, unknown))}."] if unknown else []
            return _Format(name, make_parser(header), has_header=True, notes=said)
    raise TraceError(f"{source}:{number}: {_shown(text)} begins no known trace; a trace is {KNOWN_FORMATS}.")


def _shown(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "...")


def _fields(text: str) -> list[str]:
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text], strict=True), [])
    except csv.Error as error:
        raise _WrongLineError(f"{_shown(text)} is no line of a CSV file: {error}") from None


def _azure_parser(header: Sequence[str]) -> Callable[[str], Request]:
    places = [header.index(column) for column in AZURE_COLUMNS]

    def parse(text: str) -> Request:
        stamp, context, generated = _pick(text, places, len(header))
        return (
            _azure_time(stamp),
            _length("ContextTokens", context, 1),
            _length("GeneratedTokens", generated, 0),
            None,
        )

    return parse


def _burstgpt_parser(header: Sequence[str]) -> Callable[[str], Request]:
    places = [header.index(column) for column in BURSTGPT_COLUMNS]

    def parse(text: str) -> Request:
        stamp, request, response = _pick(text, places, len(header))
        return (
            _finite("Timestamp", stamp) * 1000.0,
            _length("Request tokens", request, 1),
            _length("Response tokens", response, 0),
            None,
        )

    return parse


def _pick(text: str, places: Sequence[int], num_columns: int) -> list[str]:
    values = _fields(text)
    if len(values) != num_columns:
        raise _WrongLineError(f"{_shown(text)} has {len(values)} columns, the header names {num_columns}")
    return [values[place].strip() for place in places]


def _azure_time(stamp: str) -> float:
    """Return milliseconds since 1970 of a time such as `2023-11-16 18:17:03.9799600`, UTC where no zone is written.

    The fraction has seven digits, one more than `datetime` keeps: it is read apart.
    """
    text, zone = stamp, ""
    for index in range(len("YYYY-MM-DD HH:MM:SS"), len(stamp)):
        if stamp[index] in "+-Z":
            text, zone = stamp[:index], stamp[index:]
            break
    whole, _, digits = text.partition(".")
    if digits and not (digits.isascii() and digits.isdigit()):
        raise _WrongLineError(f"TIMESTAMP {_shown(stamp)} is no time such as 2023-11-16 18:17:03.9799600")
    try:
        moment = datetime.fromisoformat(whole + zone)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        seconds = moment.timestamp()
    except (ValueError, OverflowError):
        raise _WrongLineError(f"TIMESTAMP {_shown(stamp)} is no time such as 2023-11-16 18:17:03.9799600") from None
    return seconds * 1000.0 + (float(f"0.{digits}") * 1000.0 if digits else 0.0)


def _mooncake_parser(source: str, notes: list[str]) -> Callable[[str], Request]:
    known = set(MOONCAKE_FIELDS)

    def parse(text: str) -> Request:
        entry = _json_object(text)
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


def _json_object(text: str) -> dict[str, Any]:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _WrongLineError(f"{_shown(text)} is no JSON: {error}") from None
    if not isinstance(entry, dict):
        raise _WrongLineError(f"{_shown(text)} is no JSON object")
    return entry


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
        raise _WrongLineError(f"{name} {_shown(str(value))} is no number") from None
    # Milliseconds beyond 2**53 have no place on a float64 clock.
    if not math.isfinite(number) or not 0 <= number < 2**43:
        raise _WrongLineError(f"{name} {_shown(str(value))} is no time: it must be a number from 0 to 2**43")
    return number


def _length(name: str, value: Any, minimum: int) -> int:
    if isinstance(value, str):
        digits = value[1:] if value[:1] in {"+", "-"} else value
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
            raise _WrongLineError(f"{name} {_shown(value)} is no whole number")
        value = int(value)
    if type(value) is not int:
        raise _WrongLineError(f"{name} {_shown(str(value))} is no whole number")
    if not minimum <= value <= MAX_NUM_TOKENS:
        raise _WrongLineError(f"{name} {_shown(str(value))} is not from {minimum} to {MAX_NUM_TOKENS}")
    return value
