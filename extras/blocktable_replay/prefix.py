"""Prefix sharing: which full manager blocks of two requests hold the same tokens after the same tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from blocktable.typing import IntArray
from blocktable_replay.pool import BlockPool
from blocktable_replay.record import NULLED
from blocktable_replay.traces import HASH_BLOCK_SIZE, Trace

NO_BLOCKS: IntArray = np.empty(0, np.int32)


class PrefixIndex:
    """Numbers every distinct chain of hashes of a trace, so that a number stands for all tokens up to there.

    A trace's hashes are chained by whoever made it; numbering the chains again costs little and keeps two requests
    apart that share a hash but not what comes before it.

    Attributes:
        num_chains: distinct chains.
    """

    def __init__(self, trace: Trace) -> None:
        self._chains: list[IntArray] = []
        numbers: dict[tuple[int, int], int] = {}
        for index, hash_ids in enumerate(trace.hash_ids or ()):
            num_full = int(trace.input_lengths[index]) // HASH_BLOCK_SIZE
            chain, parent = [], -1
            for hash_id in hash_ids[:num_full].tolist():
                parent = numbers.setdefault((parent, hash_id), len(numbers))
                chain.append(parent)
            self._chains.append(np.array(chain, np.int64))
        self.num_chains: int = len(numbers)

    def num_keys(self, tokens_per_block: int) -> int:
        """Return how many keys a group of this block size may need."""
        return self.num_chains * _ends_per_hash(tokens_per_block)

    def keys(self, request: int, tokens_per_block: int) -> IntArray:
        """Return the key of each block of a request's prompt that lies whole inside full hashes.

        Args:
            request: index in the trace.
            tokens_per_block: tokens of a request that one manager block stands for.

        Returns:
            [n] int64. Equal keys stand for equal tokens after equal tokens.
        """
        chain = self._chains[request]
        last_tokens = np.arange(1, chain.size * HASH_BLOCK_SIZE // tokens_per_block + 1) * tokens_per_block - 1
        place, offset = np.divmod(last_tokens, HASH_BLOCK_SIZE)
        keys: IntArray = chain[place] * _ends_per_hash(tokens_per_block) + offset // tokens_per_block
        return keys


def _ends_per_hash(tokens_per_block: int) -> int:
    """Return how many blocks may end inside one hash; two that do are `tokens_per_block` apart."""
    return -(-HASH_BLOCK_SIZE // tokens_per_block)


class PrefixCache:
    """Finds blocks that hold a beginning of a request already, and remembers new ones.

    Args:
        index: the keys.
        pools: the allocator of each group; it holds key -> block.
        tokens_per_block: of each group.
        windows: of each group, tokens; None: full attention.
    """

    def __init__(
        self,
        index: PrefixIndex,
        pools: Sequence[BlockPool],
        tokens_per_block: Sequence[int],
        windows: Sequence[int | None],
    ) -> None:
        self._index = index
        self._pools = pools
        self._sizes = tokens_per_block
        self._windows = windows
        self._alignment = math.lcm(*tokens_per_block)

    def keys(self, request: int) -> list[IntArray]:
        """Return the keys of a request's blocks, for each group [n] int64."""
        return [self._index.keys(request, size) for size in self._sizes]

    def sharable_tokens(self, keys: Sequence[IntArray]) -> int:
        """Return up to which token of a prompt the cache may remember blocks."""
        return max(group_keys.size * size for group_keys, size in zip(keys, self._sizes, strict=True))

    def find(self, keys: Sequence[IntArray], limit: int) -> tuple[list[IntArray], int]:
        """Return blocks that hold a beginning of a request, for each group, and how many tokens they hold.

        All groups hold the same tokens. A windowed group needs only the blocks that its window still sees: `NULLED`
        stands for those before.

        Args:
            keys: of the request's blocks, for each group.
            limit: at most so many tokens.
        """
        found = [pool.lookup(group_keys) for pool, group_keys in zip(self._pools, keys, strict=True)]
        longest = min(limit, *self._leading_tokens(found))
        candidates = np.arange(longest // self._alignment, 0, -1) * self._alignment
        for num_cached in candidates[self._sees_window(found, candidates)][:1].tolist():
            return [self._visible(group, blocks, num_cached) for group, blocks in enumerate(found)], num_cached
        return [NO_BLOCKS] * len(found), 0

    def num_unseen(self, group: int, num_tokens: int) -> int:
        """Return how many blocks of a row no later token sees, once `num_tokens` are computed."""
        window = self._windows[group]
        return 0 if window is None else max(0, num_tokens - window + 1) // self._sizes[group]

    def remember(self, group: int, keys: IntArray, blocks: IntArray, num_before: int, num_computed: int) -> None:
        """Let later requests find the blocks that tokens `num_before .. num_computed - 1` of a prompt filled.

        Args:
            keys: of the request's blocks in this group, [n] int64.
            blocks: of the request in this group, [at least n filled] int32.
        """
        start, stop = (min(tokens // self._sizes[group], keys.size) for tokens in (num_before, num_computed))
        self._pools[group].remember(keys[start:stop], blocks[start:stop])

    def _leading_tokens(self, found: Sequence[IntArray]) -> list[int]:
        """Return for each group how many tokens may be cached: up to the first missing block, a window aside."""
        tokens = []
        for blocks, window, size in zip(found, self._windows, self._sizes, strict=True):
            missing = np.flatnonzero(blocks == NULLED)
            whole = blocks.size if window is not None or not missing.size else int(missing[0])
            tokens.append(size * whole)
        return tokens

    def _sees_window(self, found: Sequence[IntArray], num_cached: IntArray) -> IntArray:
        """[n] bool. Whether every windowed group has all blocks its window sees, for each number of cached tokens."""
        is_there: IntArray = np.ones(num_cached.size, np.bool_)
        for blocks, window, size in zip(found, self._windows, self._sizes, strict=True):
            if window is not None:
                missing = np.concatenate(([0], (blocks == NULLED).cumsum()))
                first = np.maximum(num_cached - window + 1, 0) // size
                is_there &= missing[num_cached // size] == missing[first]
        return is_there

    def _visible(self, group: int, blocks: IntArray, num_cached: int) -> IntArray:
        visible = blocks[: num_cached // self._sizes[group]].copy()
        visible[: self.num_unseen(group, num_cached)] = NULLED
        return visible
