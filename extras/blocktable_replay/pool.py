"""The engine's allocator for one group: reference-counted blocks, the least recently freed one goes out first."""

from __future__ import annotations

import numpy as np

from blocktable import NULL_BLOCK_ID
from blocktable.typing import IntArray
from blocktable_replay.record import NULLED

NO_KEY = -1
NOT_QUEUED = -1
NO_OWNER = -1


class BlockPool:
    """The blocks of one group except its null block, which is never given out.

    A freed block keeps its key until it is given out again, so that a later request with the same prefix can have it.
    The free blocks stand in a queue in the order they were freed; one taken from the middle leaves a stale entry there.

    Args:
        num_blocks: manager blocks in the cache, the null block included.
        num_keys: prefix keys are `0 .. num_keys - 1`.
        null_block_id: the block that stands for none; -1: every block goes out.

    Attributes:
        references: [num_blocks] int32. Live requests that hold the block.
        owners: [num_blocks] int64. The one request that may write the block, by its uid.
        num_usable: blocks that may go out.
        num_free: of these, blocks that no request holds.
    """

    def __init__(self, num_blocks: int, num_keys: int = 0, null_block_id: int = NULL_BLOCK_ID) -> None:
        free = np.delete(np.arange(num_blocks), [null_block_id] if null_block_id >= 0 else [])
        self.num_blocks = num_blocks
        self.num_usable: int = free.size
        self.num_free: int = free.size
        self.references: IntArray = np.zeros(num_blocks, np.int32)
        self.owners: IntArray = np.full(num_blocks, NO_OWNER, np.int64)
        self._keys: IntArray = np.full(num_blocks, NO_KEY, np.int64)
        self._cached: IntArray = np.full(num_keys, NULLED, np.int32)  # key -> block that holds it
        self._queue: IntArray = np.empty(2 * num_blocks + 1, np.int32)
        self._queue[: free.size] = free
        self._head, self._tail = 0, free.size
        self._queue_index: IntArray = np.full(num_blocks, NOT_QUEUED, np.int64)  # block -> its valid place in the queue
        self._queue_index[free] = np.arange(free.size)

    @property
    def num_used(self) -> int:
        """Blocks that live requests hold."""
        return self.num_usable - self.num_free

    def take(self, count: int, owners: IntArray | int) -> IntArray:
        """Return `count` free blocks, [count] int32, which only their owners may write.

        The caller has looked at `num_free`.

        Args:
            owners: [count] int64 or one int. Uid of the request that each block goes to.
        """
        assert count <= self.num_free
        stop, indexes, blocks = self._head, self._queue[:0], self._queue[:0]
        while blocks.size < count:
            start, stop = stop, stop + count - blocks.size
            indexes = np.arange(start, stop)
            found = self._queue[start:stop]
            valid = found[self._queue_index[found] == indexes]
            blocks = valid if blocks.size == 0 else np.concatenate((blocks, valid))
        blocks = blocks.copy()
        self._head = stop
        self.num_free -= count
        self._queue_index[blocks] = NOT_QUEUED
        self.references[blocks] = 1
        self.owners[blocks] = owners
        self._forget_keys(blocks)
        return blocks

    def share(self, blocks: IntArray) -> None:
        """Give distinct blocks one more holder; free ones leave the queue. `NULLED` among them means nothing."""
        held = blocks[blocks != NULLED]
        self.num_free -= int(np.count_nonzero(self.references[held] == 0))
        self._queue_index[held] = NOT_QUEUED
        self.references[held] += 1

    def free(self, blocks: IntArray) -> None:
        """Take one holder from each block, as often as it stands there. `NULLED` means nothing."""
        given = blocks[blocks != NULLED]
        np.subtract.at(self.references, given, 1)
        unheld = given[self.references[given] == 0]
        order = np.arange(unheld.size)
        self._queue_index[unheld] = order
        # Once each: one that stands here twice, where it stands last.
        unheld = unheld[self._queue_index[unheld] == order]
        if self._tail + unheld.size > self._queue.size:
            self._queue_index[unheld] = NOT_QUEUED
            self._compact()
        end = self._tail + unheld.size
        self._queue[self._tail : end] = unheld
        self._queue_index[unheld] = np.arange(self._tail, end)
        self.num_free += unheld.size
        self.owners[unheld] = NO_OWNER
        self._tail = end

    def lookup(self, keys: IntArray) -> IntArray:
        """Return the block that holds each key's tokens, [n] int32; `NULLED` where none does."""
        return self._cached[keys]

    def num_unheld(self, blocks: IntArray) -> int:
        """Return how many of these blocks no request holds: sharing them takes as many from `num_free`."""
        return int(np.count_nonzero((self.references[blocks] == 0) & (blocks != NULLED)))

    def remember(self, keys: IntArray, blocks: IntArray) -> None:
        """Let later requests find blocks, now full, by their keys; a key that is found already stays where it is."""
        new = (self._cached[keys] == NULLED) & (blocks != NULLED)
        self._cached[keys[new]] = blocks[new]
        self._keys[blocks[new]] = keys[new]

    def _forget_keys(self, blocks: IntArray) -> None:
        keys = self._keys[blocks]
        known = keys[keys != NO_KEY]
        if known.size:
            self._cached[known] = NULLED
            self._keys[blocks] = NO_KEY

    def _compact(self) -> None:
        queued = self._queue[self._head : self._tail]
        valid = queued[self._queue_index[queued] == np.arange(self._head, self._tail)]
        self._head, self._tail = 0, valid.size
        self._queue[: valid.size] = valid
        self._queue_index[valid] = np.arange(valid.size)
