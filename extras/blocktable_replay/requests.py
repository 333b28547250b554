"""Requests: what waits, and the state of those that run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blocktable.typing import IntArray
from blocktable_replay.plan import NO_REQUEST


@dataclass(slots=True)
class Request:
    """A request that waits or runs.

    Attributes:
        uid: its number; below the trace's length its index there, above for forks.
        index: index in the trace.
        input_length: tokens of the prompt.
        output_length: tokens to generate.
        num_generated: tokens generated so far; kept when it is thrown out.
        was_preempted: whether it was thrown out and has not come back yet.
        must_fork: whether a second sample splits off once its prompt is computed.
        keys: for each group [n] int64, the prefix keys of its blocks. None: not looked up yet, or it shares nothing.
    """

    uid: int
    index: int
    input_length: int
    output_length: int
    num_generated: int = 0
    was_preempted: bool = False
    must_fork: bool = False
    keys: list[IntArray] | None = None

    @property
    def num_known(self) -> int:
        """Tokens that are there to be computed."""
        return self.input_length + self.num_generated


class LiveRequests:
    """State of the requests that run, in arrays by handle.

    Handles go out from the highest down, so that a handle is not the row of its request.

    Attributes:
        uids: [size] int64, `NO_REQUEST` where the handle is free.
        outputs: [size] int64, tokens to generate.
        generated: [size] int64.
        known: [size] int64, tokens that are there to be computed: the prompt and what was generated.
        computed: [size] int64, of these, in the cache.
        evicted: [num_groups, size] int64, blocks that the group's window has passed.
        remembered: [size] int64, tokens of the prompt that the prefix cache knows.
        sharable: [size] int64, tokens of the prompt that it may know.
        must_fork: [size] bool.
    """

    def __init__(self, num_groups: int, size: int) -> None:
        self.free_handles: list[int] = list(range(size))
        self.uids: IntArray = np.full(size, NO_REQUEST, np.int64)
        self.outputs: IntArray = np.zeros(size, np.int64)
        self.generated: IntArray = np.zeros(size, np.int64)
        self.known: IntArray = np.zeros(size, np.int64)
        self.computed: IntArray = np.zeros(size, np.int64)
        self.evicted: IntArray = np.zeros((num_groups, size), np.int64)
        self.remembered: IntArray = np.zeros(size, np.int64)
        self.sharable: IntArray = np.zeros(size, np.int64)
        self.must_fork: IntArray = np.zeros(size, np.bool_)
        self._requests: dict[int, Request] = {}

    def __getitem__(self, handle: int) -> Request:
        return self._requests[handle]

    def enter(self, request: Request, num_computed: int, sharable: int) -> int:
        """Give a request a handle and set its state."""
        handle = self.free_handles.pop()
        self._requests[handle] = request
        self.uids[handle] = request.uid
        self.outputs[handle] = request.output_length
        self.generated[handle] = request.num_generated
        self.known[handle] = request.num_known
        self.computed[handle] = num_computed
        self.evicted[:, handle] = 0
        self.remembered[handle] = num_computed
        self.sharable[handle] = sharable
        self.must_fork[handle] = request.must_fork
        return handle

    def leave(self, handle: int) -> Request:
        """Free a handle and return its request, which knows what it needs to come back."""
        request = self._requests.pop(handle)
        request.num_generated = int(self.generated[handle])
        request.must_fork = bool(self.must_fork[handle])
        self.uids[handle] = NO_REQUEST
        self.free_handles.append(handle)
        return request

    def waiting_tokens(self, handles: IntArray) -> IntArray:
        """[n] int64. Known tokens that are not computed."""
        waiting: IntArray = self.known[handles] - self.computed[handles]
        return waiting
