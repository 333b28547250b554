"""One step as the scheduler wants it, before any table has seen it."""

from __future__ import annotations

from dataclasses import dataclass

from blocktable.typing import IntArray
from blocktable_replay.layout import Operation

NO_REQUEST = -1


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Row operations, and the inputs of the step that follows them.

    Attributes:
        operations: row operations in their order.
        idx_mapping: [num_reqs] int32. Batch index -> row. None: identity.
        query_start_loc: [num_reqs + 1] int32.
        positions: [num_tokens] int64.
        num_computed_tokens: [num_reqs] int32. None: no group has a window.
        num_reqs_padded: batch rows.
        num_tokens_padded: slots of the returned view.
        handles: [num_reqs] int64. Each request's line in the scheduler's record; `NO_REQUEST` for a padding entry.
        requests: [num_reqs] int64. Each request's number; `NO_REQUEST` for a padding entry.
        rows: [num_reqs] int64. Each request's row.
    """

    operations: list[Operation]
    idx_mapping: IntArray | None
    query_start_loc: IntArray
    positions: IntArray
    num_computed_tokens: IntArray | None
    num_reqs_padded: int
    num_tokens_padded: int
    handles: IntArray
    requests: IntArray
    rows: IntArray


@dataclass(slots=True)
class Counters:
    """What a schedule did, in the order the summary shows it.

    Attributes:
        requests: requests that finished.
        steps: steps, dummy ones and the last, empty one included.
        tokens: tokens computed; those computed again after a preemption count again.
        chunked_prefills: pieces of a prompt that were not its last.
        preemptions: requests thrown out because blocks ran out.
        resumes: of these, how many came back.
        shared_blocks: blocks that a request got from the prefix cache or a fork, without computing them.
        evictions: blocks that a sliding window has passed.
        rollbacks: requests that gave a block back because draft tokens were rejected.
        forks: samples that split off another request.
        dummy_steps: steps without a real request.
        sleeps: times the device lost its memory.
    """

    requests: int = 0
    steps: int = 0
    tokens: int = 0
    chunked_prefills: int = 0
    preemptions: int = 0
    resumes: int = 0
    shared_blocks: int = 0
    evictions: int = 0
    rollbacks: int = 0
    forks: int = 0
    dummy_steps: int = 0
    sleeps: int = 0
