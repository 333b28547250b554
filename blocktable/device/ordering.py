"""On which stream a table works, and what it refuses there: the order of its calls, and captures (R21, R22)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from blocktable.errors import BlockTableError


class OrderedStreams(Protocol):
    """The streams of one device, as far as an order of calls needs them; a `Driver` is one."""

    def current(self) -> AbstractContextManager[Any]:
        """Make the device the current one for a while."""

    def stream(self, handle: int | None) -> int:
        """Return what a handle means; None: the library's current stream."""

    def is_capturing(self, stream: int) -> bool:
        """Say whether a stream is being captured, and break no capture."""

    def order(self, before: int, after: int) -> None:
        """Let one stream go on only after what is on another one now, without a wait of the host."""

    def check(self, stream: int) -> None:
        """Raise where the device has failed."""


class StreamOrder:
    """The streams that one table's calls have used.

    A stream that a table has used must live as long as the table: it may be asked about, or ordered after, later.

    Args:
        driver: the device.
    """

    def __init__(self, driver: OrderedStreams) -> None:
        self._driver = driver
        self._last: int | None = None  # of the last call outside captures
        self._handle: int | None = None  # what the last call was given,
        self._stream = 0  # and what it means
        self._captured: int | None = None  # of the last call inside one that has not ended, as far as is known

    def enter(self, handle: int | None) -> tuple[int, bool]:
        """Return the stream to work on, ordered after this table's last call, and whether it is capturing.

        Raises:
            BlockTableError: the last call's stream is being captured, and this is another one: an order between the two
                would draw this one into that capture.

        Rules: R22.
        """
        driver = self._driver
        if handle is None or handle != self._handle:
            self._handle, self._stream = handle, driver.stream(handle)
        stream = self._stream
        is_capturing = driver.is_capturing(stream)
        if self._captured is not None:
            if self._captured != stream:
                self._refuse_change(self._captured)
            self._captured = None  # that capture has ended, or is this one
        if is_capturing:
            self._captured = stream
        elif stream != self._last:
            if self._last is not None:
                self._refuse_change(self._last)
                with driver.current():
                    driver.order(self._last, stream)
            self._last = stream
        return stream, is_capturing

    def check(self) -> None:
        """Raise where the device has failed."""
        if self._last is not None:
            self._driver.check(self._last)

    def _refuse_change(self, other: int) -> None:
        if self._driver.is_capturing(other):
            raise BlockTableError(
                "A table's calls cannot change stream while the last one's is capturing: the capture would draw in the "
                "new one. Use one stream for them, or end the capture first."
            )


def refuse_capture(is_capturing: bool, what: str) -> None:
    """Raise where the stream is capturing (R21)."""
    if is_capturing:
        raise BlockTableError(
            f"{what} cannot be captured: row changes and host arrays are read once, not at every replay. Call commit() "
            "before the capture and before each replay, and give device arrays."
        )
