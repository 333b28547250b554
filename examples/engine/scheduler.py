"""Decides what runs in each step, and keeps the rows of the block table in step with who holds which block.

Continuous batching with a token budget, chunked prefill, shared prefixes, preemption and resume, drafts and their
rollback, forks with copies on write, blocks that a sliding window lets go.
"""

import math
from itertools import chain

import numpy as np

from blocktable import NULL_BLOCK_ID
from model import FULL, STATE, WINDOW
from model_runner import ModelRunner
from pools import BlockPool, Blocks, PrefixCache
from request import Request, guess
from rows import DenseRows, StableRows


class Scheduler:
    """The engine's loop: `add` requests, then `step` until it returns False.

    Args:
        runner: what the batches run on.
        max_chunk: tokens that one request may run in a step.

    Attributes:
        finished: the new tokens of each request that has come to its end, by its name.
        counts: how often what happened.
        smallest_gap: between the logit of a token that was chosen and the next best.
    """

    def __init__(self, runner: ModelRunner, max_chunk: int) -> None:
        self.runner, self.max_chunk, self.counts = runner, max_chunk, runner.counts
        self.config, window = runner.ranks[0].table.config, runner.model.config.window
        groups, world = self.config.groups, self.config.context_parallel.world_size
        self.window, self.groups, self.num_states = window, range(len(groups)), runner.max_decode_len
        self.pools = [BlockPool(group.num_blocks or 0) for group in groups]
        self.prefixes = PrefixCache(self.pools)
        # A block id stands for a block on each rank.
        self.tokens_per_block = [group.block_size * (world if group.is_sharded else 1) for group in groups]
        self.share_unit = math.lcm(self.tokens_per_block[FULL], self.tokens_per_block[WINDOW])
        self.rows = (DenseRows if runner.is_dense else StableRows)(runner, self.config.max_num_reqs)
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # the oldest first
        self.preempted: set[Request] = set()
        self.finished: dict[tuple[int, int], list[int]] = {}
        self.smallest_gap = math.inf

    def add(self, number: int, prompt: list[int], num_new_tokens: int, num_samples: int = 1) -> None:
        self.waiting.append(Request((number, 0), list(prompt), len(prompt), len(prompt) + num_new_tokens, num_samples))

    def step(self) -> bool:
        """Schedule, run, and take in what came out; False: nothing was left to do."""
        if not (self.waiting or self.running):
            return False
        num_tokens = self.schedule()
        is_decode = {len(request.tokens) - request.num_computed == 1 for request in num_tokens}
        self.counts.update(["steps", *["mixed batches"] * (len(is_decode) == 2)])
        work = [(request, num_tokens.get(request, 0)) for request in self.rows.arrange(num_tokens)]
        best, logits = self.runner.execute(work)
        ends = np.cumsum([count for _, count in work])
        for (request, count), end in zip(work, ends, strict=True):
            if count:
                self.take_in(request, best[end - count : end], logits[end - count : end])
        return True

    # Before the model runs: who runs how many tokens, in which blocks.

    def schedule(self) -> dict[Request, int]:
        """Return how many tokens each request of this step runs; the table has blocks for them when it returns."""
        num_tokens: dict[Request, int] = {}
        new_blocks: list[Blocks] = []
        budget, num_preemptions = self.config.max_num_batched_tokens, self.counts["preemptions"]
        for request in list(self.running):
            count = self.chunk(request, budget)
            if request in self.running and count and self.make_room(request, count, may_preempt=True):
                num_tokens[request], budget = count, budget - count
                new_blocks.append(self.grow(request, count))
        # What a preemption has freed is for those who run.
        while self.waiting and budget and self.has_row() and self.counts["preemptions"] == num_preemptions:
            request = self.waiting.pop(0)
            self.start(request)
            count = self.chunk(request, budget)
            if not self.make_room(request, count, may_preempt=False):
                self.stop(request)
                self.waiting.insert(0, request)
                break
            self.counts["shared blocks"] += sum(block != NULL_BLOCK_ID for ids in request.blocks for block in ids)
            self.counts["resumes"] += request in self.preempted
            self.preempted.discard(request)
            num_tokens[request], budget = count, budget - count
            new_blocks.append(self.grow(request, count))
        ids = [np.array(list(chain.from_iterable(new[group] for new in new_blocks)), np.int32) for group in self.groups]
        counts = [np.array([len(new[group]) for new in new_blocks], np.int64) for group in self.groups]
        self.runner.change("append_rows", np.array([request.row for request in num_tokens], np.int64), ids, counts)
        return num_tokens

    def chunk(self, request: Request, budget: int) -> int:
        """Return how many tokens a request may run. A part of them ends where its blocks can be shared, if it can."""
        wanted = len(request.to_run)
        count = min(wanted, budget, self.max_chunk)
        shareable = (request.num_computed + count) // self.share_unit * self.share_unit - request.num_computed
        return shareable if count < wanted and shareable > 0 else count

    def has_row(self) -> bool:
        return len(self.running) < self.config.max_num_reqs

    def start(self, request: Request) -> None:
        """Give a request a row, with the blocks of the longest prefix that is kept."""
        num_computed, blocks = self.prefixes.longest(request.tokens, self.share_unit)
        self.occupy(request, num_computed, 0, blocks)
        self.runner.change("set_row", request.row, request.blocks)

    def occupy(self, request: Request, num_computed: int, state_column: int, blocks: Blocks) -> None:
        """Let a request run in a row of its own, from a state that others share."""
        self.running.append(request)
        self.rows.take(request)
        request.num_computed, request.state_column = num_computed, state_column
        request.blocks = [list(ids) for ids in blocks]
        for pool, ids in zip(self.pools, blocks, strict=True):
            pool.hold(ids)

    def stop(self, request: Request) -> None:
        """Take a request's row and blocks away; of what it has computed, the prefixes that are kept remain."""
        for pool, ids in zip(self.pools, request.blocks, strict=True):
            pool.release(ids)
        self.rows.give_back(request)
        self.running.remove(request)
        request.blocks, request.drafts, request.num_computed = [], [], 0

    def make_room(self, request: Request, count: int, *, may_preempt: bool) -> bool:
        """Free blocks until `count` more tokens fit: kept prefixes first, then the youngest request, be it this one."""
        while lacking := [g for g in self.groups if self.num_missing(request, count, g) > len(self.pools[g].free)]:
            if self.prefixes.evict(lacking[0]):
                continue
            if self.running == [request]:
                raise RuntimeError(f"Request {request.name} does not fit into the cache, though it is alone there.")
            if not may_preempt:
                return False
            victim = self.running[-1]
            self.stop(victim)
            self.waiting.insert(0, victim)
            self.preempted.add(victim)
            self.counts["preemptions"] += 1
            if victim is request:
                return False
        return True

    def first_written(self, request: Request, group: int) -> int:
        """Return the index of the first block that the request's next step writes; of states it may write all."""
        return 0 if group == STATE else request.num_computed // self.tokens_per_block[group]

    def num_blocks(self, num_tokens: int, group: int) -> int:
        return self.num_states if group == STATE else -(-num_tokens // self.tokens_per_block[group])

    def num_missing(self, request: Request, count: int, group: int) -> int:
        held, holders = request.blocks[group], self.pools[group].num_holders
        num_copies = sum(holders[block] > 1 for block in held[self.first_written(request, group) :])
        return num_copies + self.num_blocks(request.num_computed + count, group) - len(held)

    def grow(self, request: Request, count: int) -> Blocks:
        """Take blocks for `count` more tokens and return them; the table does not have them yet."""
        new: Blocks = []
        for group, pool in enumerate(self.pools):
            self.copy_shared(request, group)
            new.append(pool.take(self.num_blocks(request.num_computed + count, group) - len(request.blocks[group])))
            request.blocks[group] += new[group]
        return new

    def copy_shared(self, request: Request, group: int) -> None:
        """Copy on write: the blocks that the next step writes must be the request's own."""
        pool, first = self.pools[group], self.first_written(request, group)
        shared = request.blocks[group][first:]
        if any(pool.num_holders[block] > 1 for block in shared):
            request.blocks[group][first:] = copies = pool.take(len(shared))
            self.runner.copy_blocks(group, shared, copies)
            pool.release(shared)
            self.runner.change("replace_blocks", request.row, group, first, copies)
            self.counts["copies of states" if group == STATE else "copies on write"] += 1

    # After the model ran: what it says, and what that does to rows and blocks.

    def take_in(self, request: Request, best: np.ndarray, logits: np.ndarray) -> None:
        """Take in what the model says after each token of a request; best, logits: [num_tokens, num_best]."""
        num_known, num_accepted = len(request.tokens) - request.num_computed, 0  # the other tokens are drafts
        if len(best) < num_known:
            self.counts["chunked prefills"] += 1
            self.advance(request, len(best))
            return
        best, logits = best[num_known - 1 :], logits[num_known - 1 :]
        while num_accepted < len(best) - 1 and best[num_accepted, 0] == request.drafts[num_accepted]:
            num_accepted += 1
        chosen = logits[: num_accepted + 1, : request.num_samples + 1]
        self.smallest_gap = min(self.smallest_gap, float((chosen[:, :-1] - chosen[:, 1:]).min()))
        self.counts["drafts accepted"] += num_accepted
        self.advance(request, num_known + num_accepted)
        if num_accepted < len(best) - 1:
            self.roll_back(request)
        self.fork(request, best[num_accepted])
        new = best[: num_accepted + 1, 0].tolist()
        request.tokens += new[: request.max_len - len(request.tokens)]
        if len(request.tokens) < request.max_len:
            request.drafts = guess(request.tokens, min(self.num_states, request.max_len - len(request.tokens)) - 1)
        else:
            self.finished[request.name] = request.tokens[request.num_prompt :]
            self.stop(request)

    def advance(self, request: Request, count: int) -> None:
        """Count tokens as computed; release what the window has passed; keep a prefix that others may share."""
        request.num_computed += count
        request.state_column = (count - 1) % self.num_states
        ids = request.blocks[WINDOW]
        stop = max(0, request.num_computed - self.window + 1) // self.tokens_per_block[WINDOW]
        start = next((i for i, block in enumerate(ids) if block != NULL_BLOCK_ID), stop)
        if start < stop:
            self.runner.change("null_range", request.row, WINDOW, start, stop)
            self.pools[WINDOW].release(ids[start:stop])
            ids[start:stop] = [NULL_BLOCK_ID] * (stop - start)
            self.counts["evictions"] += stop - start
        if request.num_computed % self.share_unit == 0 and request.num_computed <= request.num_prompt:
            self.keep_prefix(request)

    def keep_prefix(self, request: Request) -> None:
        prefix, states = request.tokens[: request.num_computed], self.pools[STATE]
        if tuple(prefix) not in self.prefixes.entries and states.free:
            state = states.take(1)  # a copy: the request's own will move on
            self.runner.copy_blocks(STATE, [request.blocks[STATE][request.state_column]], state)
            kept = [request.blocks[group][: self.num_blocks(len(prefix), group)] for group in (FULL, WINDOW)]
            self.prefixes.insert(prefix, [*kept, state])
            states.release(state)

    def roll_back(self, request: Request) -> None:
        """Give up the blocks of refused drafts. Their states are in columns that nobody will read."""
        kept = [self.num_blocks(request.num_computed, group) for group in self.groups]
        self.runner.change("truncate_row", request.row, kept)
        self.counts["rollbacks"] += 1
        for pool, ids, count in zip(self.pools, request.blocks, kept, strict=True):
            self.counts["blocks rolled back"] += len(ids) - count
            pool.release(ids[count:])
            del ids[count:]

    def fork(self, request: Request, choices: np.ndarray) -> None:
        """Make requests of the further samples: sample i goes on with the i-th best token. They share all blocks."""
        for sample in range(1, request.num_samples):
            tokens = [*request.tokens, int(choices[sample])]
            other = Request((request.name[0], sample), tokens, request.num_prompt, request.max_len)
            if self.has_row():
                self.occupy(other, request.num_computed, request.state_column, request.blocks)
                self.runner.change("copy_row", request.row, other.row)
                self.counts["forks"] += 1
            else:
                self.waiting.append(other)
        request.num_samples = 1
