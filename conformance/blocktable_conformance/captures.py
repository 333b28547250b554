"""Streams and captures of the device under test: torch's on a GPU, the core's own where a backend is emulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from blocktable_conformance.gpu import need
from blocktable_conformance.subject import Subject


class Streams:
    """Streams as handles, and captures by whoever wants one.

    Args:
        subject: the backend; a test that asks for streams is skipped where it has none.
    """

    def __init__(self, subject: Subject) -> None:
        self._emulated: Any = getattr(subject.backend, "emulated_streams", None)
        if not subject.declares("streams") or not subject.declares("graph_capture"):
            pytest.skip(f"{subject.label} does not declare 'streams' and 'graph_capture'")
        self._torch: Any = None if self._emulated else need(subject, "graph_capture")
        self._kept: list[Any] = []

    def create(self) -> int:
        """Return a new stream, which lives as long as this object."""
        if self._emulated:
            return int(self._emulated.create())
        self._kept.append(self._torch.cuda.Stream())
        return int(self._kept[-1].cuda_stream)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._torch:
            self._torch.cuda.synchronize()

    @contextmanager
    def capture(self, stream: int) -> Iterator[Any]:
        """Capture what happens on a stream; an end that fails fails the test. Yields what `replay` takes."""
        if self._emulated:
            captured = self._emulated.begin_capture(stream)
            try:
                yield captured
            finally:
                self._emulated.end_capture(captured)
            return
        graph = self._torch.cuda.CUDAGraph()
        native = next(kept for kept in self._kept if kept.cuda_stream == stream)
        something = self._torch.zeros(4, device="cuda")
        self.synchronize()
        with self._torch.cuda.graph(graph, stream=native):
            self._kept.append((graph, something + 1))  # no capture is empty
            yield graph
        self.synchronize()

    def replay(self, captured: Any) -> None:
        """Replay a capture and wait. It goes to the current stream: what was launched on others comes first."""
        self.synchronize()
        captured.replay()
        self.synchronize()
