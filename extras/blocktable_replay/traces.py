"""Serving traces: when each request came, how long it was, what it shares with others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from blocktable import BlockTableError
from blocktable.typing import IntArray

HASH_BLOCK_SIZE = 512
"""Tokens that one hash of a Mooncake trace stands for."""

MAX_NUM_TOKENS = 2**31 - 1
"""No request is longer; a larger number in a file is a fault of that line."""


class TraceError(BlockTableError, ValueError):
    """A trace cannot be read; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that gave no request.

    Attributes:
        line: number in the file, the first is 1.
        reason: what is wrong with it.
    """

    line: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        source: the file, as the user named it.
        format: what the reader that took it calls it.
        arrivals: [n] float64, milliseconds since the trace began.
        input_lengths: [n] int64, tokens of the prompt, at least 1.
        output_lengths: [n] int64, tokens generated. 0: the prompt alone.
        lines: [n] int64, line in the file.
        hash_ids: one [ceil(input_length / HASH_BLOCK_SIZE)] int64 for each request: equal ids at the same place
            after equal ids stand for equal tokens. None: the format has no hashes.
        bad_lines: lines that were skipped.
        notes: sentences for the user, such as columns that nothing reads.
    """

    source: str
    format: str
    arrivals: np.ndarray[tuple[int], np.dtype[np.float64]]
    input_lengths: IntArray
    output_lengths: IntArray
    lines: IntArray
    hash_ids: tuple[IntArray, ...] | None = None
    bad_lines: tuple[BadLine, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return int(self.arrivals.size)

    def take(self, kept: IntArray) -> Trace:
        """Return the requests at the given indices (or under the given mask), in that order."""
        indices = np.flatnonzero(kept) if kept.dtype == np.bool_ else kept
        return replace(
            self,
            arrivals=self.arrivals[indices],
            input_lengths=self.input_lengths[indices],
            output_lengths=self.output_lengths[indices],
            lines=self.lines[indices],
            hash_ids=None if self.hash_ids is None else tuple(self.hash_ids[index] for index in indices.tolist()),
        )

    def between(self, start_s: float | None, stop_s: float | None, limit: int | None) -> Trace:
        """Return the requests that came from `start_s` up to, not including, `stop_s`, and of these the first `limit`.

        Args:
            start_s: seconds since the trace began. None: its beginning.
            stop_s: seconds since the trace began. None: its end.
            limit: requests. None: all.
        """
        kept = np.ones(len(self), np.bool_)
        if start_s is not None:
            kept &= self.arrivals >= start_s * 1000.0
        if stop_s is not None:
            kept &= self.arrivals < stop_s * 1000.0
        return self.take(np.flatnonzero(kept)[:limit])

    def without(self, wrong: dict[int, str]) -> Trace:
        """Return the trace without the requests at the given indices, each counted as a bad line with its reason."""
        kept = np.ones(len(self), np.bool_)
        kept[list(wrong)] = False
        bad = [BadLine(int(self.lines[index]), reason) for index, reason in wrong.items()]
        return replace(self.take(kept), bad_lines=tuple(sorted((*self.bad_lines, *bad), key=lambda entry: entry.line)))
