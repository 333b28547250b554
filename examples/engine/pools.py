"""Who holds which block: counted references for each KV cache group, and prefixes kept for requests to come."""

from collections.abc import Iterable

from blocktable import NULL_BLOCK_ID

Blocks = list[list[int]]
"""Block ids of a request or a prefix, one list for each group; `NULL_BLOCK_ID` where a window has passed."""


class BlockPool:
    """The blocks of one group. A block is free when nobody holds it; what was freed last is taken first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_holders = [0] * num_blocks
        self.free = [block for block in reversed(range(num_blocks)) if block != NULL_BLOCK_ID]

    def take(self, count: int) -> list[int]:
        taken = [self.free.pop() for _ in range(count)]
        self.hold(taken)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.num_holders[block] += block != NULL_BLOCK_ID

    def release(self, blocks: Iterable[int]) -> None:
        for block in (block for block in blocks if block != NULL_BLOCK_ID):
            self.num_holders[block] -= 1
            if self.num_holders[block] == 0:
                self.free.append(block)


class PrefixCache:
    """Prefixes whose blocks are kept, the least recently used first. The tokens are the key, so nothing can collide."""

    def __init__(self, pools: list[BlockPool]) -> None:
        self.pools = pools
        self.entries: dict[tuple[int, ...], Blocks] = {}

    def insert(self, tokens: list[int], blocks: Blocks) -> None:
        self.entries[tuple(tokens)] = blocks
        for pool, ids in zip(self.pools, blocks, strict=True):
            pool.hold(ids)

    def longest(self, tokens: list[int], unit: int) -> tuple[int, Blocks]:
        """Return the length and the blocks of the longest kept prefix that leaves a token to compute."""
        for length in range((len(tokens) - 1) // unit * unit, 0, -unit):
            prefix = tuple(tokens[:length])
            if prefix in self.entries:
                self.entries[prefix] = self.entries.pop(prefix)  # now the last one used
                return length, self.entries[prefix]
        return 0, [[] for _ in self.pools]

    def evict(self, group: int) -> bool:
        """Release the prefix not used for longest that alone holds a block of the group; False: there is none."""
        holders = self.pools[group].num_holders
        for prefix, blocks in self.entries.items():
            if any(holders[block] == 1 for block in blocks[group]):
                del self.entries[prefix]
                for pool, ids in zip(self.pools, blocks, strict=True):
                    pool.release(ids)
                return True
        return False
