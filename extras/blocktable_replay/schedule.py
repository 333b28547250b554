"""Continuous batching: requests become row operations and steps, one step at a time.

The order of a step is that of the engines: running requests first, in the order they came in, each with as many
tokens as the budget leaves; where blocks run out the youngest is thrown out; then waiting requests come in. What a
step computed is settled at the beginning of the next one: sampled tokens, blocks for the prefix cache, ends, rollback,
eviction, forks.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from blocktable import BlockTableConfig, BlockTableError
from blocktable.backend import ranges
from blocktable.typing import IntArray
from blocktable_replay.layout import DenseRows, Operation, RowLayout, StableRows
from blocktable_replay.options import ReplayOptions, tokens_per_block
from blocktable_replay.plan import NO_REQUEST, Counters, StepPlan
from blocktable_replay.pool import BlockPool
from blocktable_replay.prefix import NO_BLOCKS, PrefixCache, PrefixIndex
from blocktable_replay.record import NULLED, BlockRecord
from blocktable_replay.requests import LiveRequests, Request
from blocktable_replay.sampling import num_accepted
from blocktable_replay.traces import Trace

WATERMARK = 0.01
"""Part of the cache that stays free when a request comes in beside others, so that it is not thrown out immediately."""

NUM_DUMMIES = 4
"""Dummy requests of a dummy step, one token each."""

TOKEN_ROUNDING = 8
"""`num_tokens_padded` is a multiple of it."""


class Scheduler:
    """Turns a trace into steps.

    Args:
        trace: the requests.
        options: how.

    Attributes:
        config: the table's configuration.
        record: manager blocks of each live request, by handle.
        pools: the allocator of each group.
        counters: what happened so far.
        clock_ms: the simulated time of the step last planned.
        running: handles of the live requests, in the order they came in.
        has_ended: whether the last step was planned.
    """

    def __init__(self, trace: Trace, options: ReplayOptions) -> None:
        config = options.config()
        self.config: BlockTableConfig = config
        self.options = options
        self.counters: Counters = Counters()
        max_live = min(config.max_num_reqs, config.num_rows)
        self.record: BlockRecord = BlockRecord(config, max_live)
        self.clock_ms: float = 0.0
        self.running: IntArray = np.empty(0, np.int64)
        self.has_ended: bool = False
        self._trace = trace
        self._live = LiveRequests(len(config.groups), max_live)
        self._waiting: deque[Request] = deque()
        self._next_arrival = 0
        self._num_uids = len(trace)
        self._layout: RowLayout = (DenseRows if options.rows == "dense" else StableRows)(config.num_rows)
        self._operations: list[Operation] = []
        self._buckets = _buckets(max_live)
        self._set_geometry()
        self._make_pools()
        self._last_handles: IntArray = np.empty(0, np.int64)  # of the step that is not settled yet
        self._last_tokens: IntArray = np.empty(0, np.int64)

    def _set_geometry(self) -> None:
        groups = self.config.groups
        self._sizes = [tokens_per_block(group, self.config.context_parallel) for group in groups]
        self._size_column = np.array(self._sizes)[:, None]
        self._windows = [group.sliding_window if group.slot_mode == "linear" else None for group in groups]
        self._has_windows = any(group.sliding_window is not None for group in groups)
        self._is_linear = np.array([group.slot_mode == "linear" for group in groups])
        self._fixed_blocks = [group.blocks_per_row or 0 for group in groups]

    def _make_pools(self) -> None:
        """A state group cannot be resumed in the middle of a prompt: then nothing is shared, as in the engines."""
        shares = self._trace.hash_ids is not None and self.options.share_prefixes and bool(self._is_linear.all())
        index = PrefixIndex(self._trace) if shares else None
        self.pools: list[BlockPool] = []
        for group, size in zip(self.config.groups, self._sizes, strict=True):
            assert group.num_blocks is not None
            num_keys = index.num_keys(size) if index else 0
            self.pools.append(BlockPool(group.num_blocks, num_keys, group.null_block_id))
        self._cache = PrefixCache(index, self.pools, self._sizes, self._windows) if index else None

    # The one entrance.

    def next_step(self) -> StepPlan | None:
        """Settle the last step and plan the next one; None when everything has been said.

        The last step has no requests: it takes the ends of the last ones to the device.
        """
        if self.has_ended:
            return None
        self._settle()
        self.counters.steps += 1
        if self._is_due(self.options.sleep_every):
            self._operations.append(("invalidate", ()))
            self.counters.sleeps += 1
        if self._is_due(self.options.dummy_every):
            return self._dummy_step()
        self._receive()
        self.has_ended = not self.running.size and not self._waiting
        plan = self._plan(self._schedule())
        self.clock_ms += self.options.step_ms
        return plan

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.counters.steps % every == 0

    def _receive(self) -> None:
        """Let requests in whose time has come; with no request there, the clock jumps to the next one."""
        arrivals = self._trace.arrivals
        if self._next_arrival >= arrivals.size:
            return
        if not self.running.size and not self._waiting:
            self.clock_ms = max(self.clock_ms, float(arrivals[self._next_arrival]))
        now = math.inf if self.options.all_at_once else self.clock_ms
        stop = int(np.searchsorted(arrivals, now, side="right"))
        self._waiting.extend(self._request(index) for index in range(self._next_arrival, stop))
        self._next_arrival = max(stop, self._next_arrival)

    def _request(self, index: int) -> Request:
        every = self.options.fork_every
        return Request(
            uid=index,
            index=index,
            input_length=int(self._trace.input_lengths[index]),
            output_length=int(self._trace.output_lengths[index]),
            must_fork=every > 0 and index % every == 0,
        )

    # Running.

    def _schedule(self) -> IntArray:
        """Give tokens and blocks to running requests, let waiting ones in, and write their rows.

        Returns:
            [running] int64. Tokens of each running request in this step.
        """
        num_preempted = self.counters.preemptions
        tokens = self._make_room(self._share_budget())
        needs = self._needed_blocks(self.running, tokens)
        grown, kept = self.running[needs.any(0)], self.record.counts[:, self.running[needs.any(0)]]
        self._grow(needs)
        new, resumed = list[int](), list[int]()
        if self.counters.preemptions == num_preempted:
            admitted = self._admit(self.config.max_num_batched_tokens - int(tokens.sum()), new, resumed)
            tokens = np.concatenate((tokens, np.array(admitted, np.int64)))
        self._layout.place(np.array(new + resumed, np.int64))
        self._order_batch(tokens)
        # Rows that have grown, and the empty ones of new requests, in one call.
        appended = np.concatenate((grown, np.array(new, np.int64)))
        self._write_rows("append_rows", appended, np.pad(kept, ((0, 0), (0, len(new)))))
        self._write_rows("set_rows", np.array(resumed, np.int64), np.zeros((len(self.pools), len(resumed)), np.int64))
        is_chunk = (tokens > 0) & (tokens < self._live.waiting_tokens(self.running))
        self.counters.chunked_prefills += int(np.count_nonzero(is_chunk))
        return tokens

    def _share_budget(self) -> IntArray:
        waiting = self._live.waiting_tokens(self.running)
        is_decode = (waiting == 1) & (self._live.generated[self.running] > 0)
        wanted = waiting + is_decode * self.options.lookahead
        before = wanted.cumsum() - wanted
        tokens: IntArray = np.clip(self.config.max_num_batched_tokens - before, 0, wanted)
        return tokens

    def _needed_blocks(self, handles: IntArray, tokens: IntArray) -> IntArray:
        """[num_groups, n] int64. Blocks that each request lacks for its tokens of this step."""
        ends = self._live.computed[handles] + tokens
        blocks = -(-ends // self._size_column) - self.record.counts[:, handles]
        blocks[~self._is_linear] = 0
        needed: IntArray = np.maximum(blocks, 0) * (tokens > 0)
        return needed

    def _make_room(self, tokens: IntArray) -> IntArray:
        """Throw the youngest out until the others' blocks are there; return the tokens of those that stay."""
        while True:
            totals = self._needed_blocks(self.running, tokens).sum(1).tolist()
            if all(total <= pool.num_free for total, pool in zip(totals, self.pools, strict=True)):
                return tokens
            if self.running.size == 1:
                raise BlockTableError(
                    f"Request {self._live.uids[self.running[0]]} alone needs more blocks than the cache has; give more "
                    "with --num-blocks."
                )
            self._preempt(int(self.running[-1]))
            self.running, tokens = self.running[:-1], tokens[:-1]

    def _grow(self, needs: IntArray) -> None:
        """Take the blocks that running requests lack."""
        for group, pool in enumerate(self.pools):
            counts = needs[group]
            blocks = pool.take(int(counts.sum()), np.repeat(self._live.uids[self.running], counts))
            self.record.extend(group, self.running, blocks, counts)

    def _preempt(self, handle: int) -> None:
        (request,) = self._release(np.array([handle]))
        request.was_preempted = True
        self._waiting.appendleft(request)
        self.counters.preemptions += 1

    def _release(self, handles: IntArray) -> list[Request]:
        """Give blocks, rows and handles back. A request's last blocks are reused first: they are shared least."""
        for handle in handles.tolist():
            for group, pool in enumerate(self.pools):
                pool.free(self.record.held(group, handle)[::-1])
        self.record.counts[:, handles] = 0
        self._operations += self._layout.release(handles)
        return [self._live.leave(handle) for handle in handles.tolist()]

    # Coming in.

    def _admit(self, budget: int, new: list[int], resumed: list[int]) -> list[int]:
        """Let waiting requests in, first come first served, while rows, blocks and the budget last.

        Returns:
            Tokens of each in this step.
        """
        tokens: list[int] = []
        while self._waiting and self._live.free_handles and budget > 0:
            request = self._waiting[0]
            hits, num_cached = self._find_prefix(request)
            count = min(request.num_known - num_cached, budget)
            lacking = self._lacking(hits, num_cached + count)
            if not self._fits(hits, lacking):
                break
            self._waiting.popleft()
            (resumed if request.was_preempted else new).append(self._enter(request, num_cached, hits, lacking))
            tokens.append(count)
            budget -= count
        return tokens

    def _find_prefix(self, request: Request) -> tuple[list[IntArray], int]:
        """Return the request's cached blocks and tokens; at least one token is left to compute."""
        if self._cache is None:
            return [NO_BLOCKS] * len(self.pools), 0
        if request.keys is None:
            request.keys = self._cache.keys(request.index)
        return self._cache.find(request.keys, request.num_known - 1)

    def _lacking(self, hits: list[IntArray], num_tokens: int) -> list[int]:
        blocks = np.where(self._is_linear, -(-num_tokens // self._size_column[:, 0]), self._fixed_blocks)
        return [count - found.size for count, found in zip(blocks.tolist(), hits, strict=True)]

    def _fits(self, hits: list[IntArray], lacking: list[int]) -> bool:
        for pool, found, count in zip(self.pools, hits, lacking, strict=True):
            reserve = int(WATERMARK * pool.num_blocks) if self.running.size else 0
            if count + pool.num_unheld(found) + reserve > pool.num_free:
                return False
        return True

    def _enter(self, request: Request, num_cached: int, hits: list[IntArray], lacking: list[int]) -> int:
        handle = self._start(request, num_cached)
        self._fill(handle, hits, lacking)
        if self._cache is not None:
            for group in range(len(self.pools)):
                self._live.evicted[group, handle] = self._cache.num_unseen(group, num_cached)
        self.counters.resumes += request.was_preempted
        request.was_preempted = False
        return handle

    def _fill(self, handle: int, shared: list[IntArray], lacking: list[int]) -> list[IntArray]:
        """Give a request its first blocks: shared ones, then as many of its own, which are returned."""
        taken = []
        for group, pool in enumerate(self.pools):
            pool.share(shared[group])
            taken.append(pool.take(lacking[group], int(self._live.uids[handle])))
            blocks = np.concatenate((shared[group], taken[-1]))
            self.record.extend(group, np.array([handle]), blocks, np.array([blocks.size]))
            self.counters.shared_blocks += int(np.count_nonzero(shared[group] != NULLED))
        return taken

    def _start(self, request: Request, num_computed: int) -> int:
        shares = self._cache is not None and request.keys is not None
        sharable = self._cache.sharable_tokens(request.keys) if shares else 0  # type: ignore[union-attr,arg-type]
        handle = self._live.enter(request, num_computed, sharable)
        self.running = np.append(self.running, handle)
        return handle

    # Rows and the batch.

    def _order_batch(self, tokens: IntArray) -> None:
        """Choose the batch and its order; rows may move."""
        is_prefill = self._live.waiting_tokens(self.running) > 1
        chosen = np.arange(tokens.size) if self.options.rows == "dense" else np.flatnonzero(tokens)
        order, self._idx_mapping, operations = self._layout.arrange(self.running[chosen], is_prefill[chosen])
        self._batch = chosen[order]
        self._operations += operations

    def _write_rows(self, operation: str, handles: IntArray, kept: IntArray) -> None:
        """Write what rows hold after `kept` [num_groups, n] blocks; a released one is the table's own null."""
        if not handles.size:
            return
        counts = self.record.counts[:, handles] - kept
        held = [self.record.take(group, handles, kept[group], counts[group]) for group in range(len(kept))]
        nulls = (group.null_block_id for group in self.config.groups)
        ids = [np.where(blocks == NULLED, null, blocks) for blocks, null in zip(held, nulls, strict=True)]
        self._operations.append((operation, (self._layout.row_of[handles], ids, counts)))

    def _plan(self, tokens: IntArray) -> StepPlan:
        handles, counts = self.running[self._batch], tokens[self._batch]
        computed = self._live.computed[handles]
        windows = computed.astype(np.int32) if self._has_windows else None
        # In the order of the running list, so that two row layouts settle, and free blocks, in one order.
        self._last_handles, self._last_tokens = self.running[tokens > 0], tokens[tokens > 0]
        self.counters.tokens += int(counts.sum())
        return self._step_plan(handles, self._idx_mapping, counts, ranges(computed, counts), windows)

    def _step_plan(
        self,
        handles: IntArray,
        idx_mapping: IntArray | None,
        counts: IntArray,
        positions: IntArray,
        num_computed_tokens: IntArray | None,
    ) -> StepPlan:
        query_start_loc = np.zeros(counts.size + 1, np.int32)
        counts.cumsum(out=query_start_loc[1:], dtype=np.int32)
        operations, self._operations = self._operations, []
        num_tokens = -(-positions.size // TOKEN_ROUNDING) * TOKEN_ROUNDING
        is_real = handles != NO_REQUEST
        return StepPlan(
            operations=operations,
            idx_mapping=idx_mapping,
            query_start_loc=query_start_loc,
            positions=positions,
            num_computed_tokens=num_computed_tokens,
            num_reqs_padded=int(self._buckets[np.searchsorted(self._buckets, handles.size)]),
            num_tokens_padded=min(num_tokens, self.config.max_num_batched_tokens),
            handles=handles,
            requests=np.where(is_real, self._live.uids[handles], NO_REQUEST),
            rows=np.where(is_real, self._layout.row_of[handles], NO_REQUEST),
        )

    def _dummy_step(self) -> StepPlan:
        """A step without a real request, as data-parallel ranks run to keep pace; row changes go along."""
        count = min(NUM_DUMMIES, self._buckets[-1], self.config.max_num_batched_tokens)
        self.counters.dummy_steps += 1
        nobody, once = np.full(count, NO_REQUEST, np.int64), np.ones(count, np.int64)
        return self._step_plan(nobody, nobody.astype(np.int32), once, np.zeros(count, np.int64), None)

    # Settling what the last step computed.

    def _settle(self) -> None:
        live, handles, tokens = self._live, self._last_handles, self._last_tokens
        if not handles.size:
            return
        self._last_handles = handles[:0]
        waiting = live.waiting_tokens(handles)
        num_drafts = np.maximum(tokens - waiting, 0)
        has_sampled = tokens >= waiting
        accepted = num_accepted(live, handles, num_drafts) if num_drafts.any() else num_drafts
        live.computed[handles] += tokens - num_drafts + accepted
        for counts in (live.generated, live.known):
            counts[handles] += has_sampled * (1 + accepted)
        self._remember_prefixes(handles)
        is_done = has_sampled & (live.generated[handles] >= live.outputs[handles])
        self._end(handles[is_done])
        self._roll_back(handles[~is_done & (num_drafts > 0)])
        self._evict(handles[~is_done])
        for parent in handles[~is_done & has_sampled & live.must_fork[handles]].tolist():
            self._fork(parent)

    def _remember_prefixes(self, handles: IntArray) -> None:
        """Put the blocks that the last step filled with prompt tokens into the prefix cache."""
        live = self._live
        for handle in handles[live.remembered[handles] < live.sharable[handles]].tolist():
            keys, before, computed = live[handle].keys, int(live.remembered[handle]), int(live.computed[handle])
            assert keys is not None
            assert self._cache is not None
            for group, group_keys in enumerate(keys):
                self._cache.remember(group, group_keys, self.record.blocks[group][handle], before, computed)
            live.remembered[handle] = computed

    def _end(self, handles: IntArray) -> None:
        if handles.size:
            self.running = self.running[~np.isin(self.running, handles)]
            self._release(handles)
            self.counters.requests += handles.size

    def _roll_back(self, handles: IntArray) -> None:
        """Give blocks back that only rejected drafts were in."""
        held = self.record.counts[:, handles]
        kept = -(-self._live.computed[handles] // self._size_column)
        kept[~self._is_linear] = held[~self._is_linear]
        is_over = (held > kept).any(0)
        if not is_over.any():
            return
        handles, kept = handles[is_over], np.minimum(kept, held)[:, is_over]
        for group, pool in enumerate(self.pools):
            pool.free(self.record.take(group, handles, kept[group], held[group, is_over] - kept[group]))
        self.record.counts[:, handles] = kept
        self._operations.append(("truncate_rows", (self._layout.row_of[handles], kept)))
        self.counters.rollbacks += handles.size

    def _evict(self, handles: IntArray) -> None:
        """Release the blocks that no token of a request's window lies in any more."""
        for group, window in enumerate(self._windows):
            if window is None:
                continue
            stops = np.maximum(self._live.computed[handles] - window + 1, 0) // self._sizes[group]
            starts = self._live.evicted[group, handles]
            is_behind = stops > starts
            left, starts, stops = handles[is_behind], starts[is_behind], stops[is_behind]
            if not left.size:
                continue
            self.pools[group].free(self.record.take(group, left, starts, stops - starts))
            self.record.put(group, left, starts, stops - starts, NULLED)
            self._live.evicted[group, left] = stops
            self._operations.append(("null_ranges", (self._layout.row_of[left], group, starts, stops)))
            self.counters.evictions += int((stops - starts).sum())

    # Forks.

    def _fork(self, parent: int) -> None:
        """Split the second sample off: full blocks are shared, the last one and any state are copied."""
        self._live.must_fork[parent] = False
        source = self._live[parent]
        child = Request(self._num_uids, source.index, source.input_length, source.output_length)
        self._num_uids += 1
        counts = self.record.counts[:, parent]
        kept = np.minimum(self._live.computed[parent] // self._size_column[:, 0], counts) * self._is_linear
        own = (counts - kept).tolist()
        has_room = all(size <= pool.num_free for size, pool in zip(own, self.pools, strict=True))
        if not self._live.free_handles or not has_room:
            self._waiting.appendleft(child)  # it comes in like any other request, when there is room
            return
        child.num_generated, child.keys = int(self._live.generated[parent]), source.keys
        handle = self._start(child, int(self._live.computed[parent]))
        self._live.evicted[:, handle] = self._live.evicted[:, parent]
        shared = [blocks[parent, :count] for blocks, count in zip(self.record.blocks, kept.tolist(), strict=True)]
        taken = self._fill(handle, shared, own)
        self.counters.forks += 1
        self._layout.place(np.array([handle]))
        rows = self._layout.row_of
        self._operations.append(("copy_row", (int(rows[parent]), int(rows[handle]))))
        self._operations += [
            ("replace_blocks", (int(rows[handle]), group, int(kept[group]), blocks))
            for group, blocks in enumerate(taken)
        ]


def _buckets(max_live: int) -> IntArray:
    """Return the batch sizes that graphs are captured for, as in the engines: 0, 1, 2, 4, then multiples of 8."""
    sizes = [size for size in (0, 1, 2, 4, *range(8, max_live, 8)) if size < max_live]
    return np.array([*sizes, max_live], np.int64)
