"""The scheduler's own record: which manager blocks each live request has. The checker believes this, not the table."""

from __future__ import annotations

import numpy as np

from blocktable import BlockTableConfig
from blocktable.backend import ranges
from blocktable.typing import IntArray

NULLED = -1
"""A block that the engine gave up (`null_ranges`): all its columns are NULL. One handed in may stand under its id."""


class BlockRecord:
    """Manager blocks of up to `size` live requests, each under a handle of its own choosing.

    Attributes:
        blocks: for each group [size, capacity] int32. Manager ids; entries at and after the count mean nothing.
        counts: [num_groups, size] int64. Manager blocks of each request.
    """

    def __init__(self, config: BlockTableConfig, size: int) -> None:
        num_groups = len(config.groups)
        self.blocks: tuple[IntArray, ...] = tuple(
            np.zeros((size, config.capacity(group)), np.int32) for group in range(num_groups)
        )
        self.counts: IntArray = np.zeros((num_groups, size), np.int64)
        self._nulls = [group.null_block_id for group in config.groups]

    def extend(self, group: int, handles: IntArray, block_ids: IntArray, counts: IntArray) -> None:
        """Put `counts[i]` more blocks after those of `handles[i]`; arguments as `put`."""
        held = self.counts[group, handles]
        self.put(group, handles, held, counts, block_ids)
        self.counts[group, handles] = held + counts

    def put(self, group: int, handles: IntArray, starts: IntArray, counts: IntArray, block_ids: IntArray | int) -> None:
        """Exchange `counts[i]` blocks of each handle from `starts[i]` on.

        Args:
            handles: [n] distinct.
            starts, counts: [n] int64.
            block_ids: [sum(counts)] int32, or one for all: `NULLED` gives them up.
        """
        blocks = self.blocks[group]
        blocks.reshape(-1)[ranges(handles * blocks.shape[1] + starts, counts)] = block_ids

    def take(self, group: int, handles: IntArray, starts: IntArray, counts: IntArray) -> IntArray:
        """Return `counts[i]` blocks of each handle from `starts[i]` on, one after the other, [sum(counts)] int32."""
        blocks = self.blocks[group]
        return blocks.reshape(-1)[ranges(handles * blocks.shape[1] + starts, counts)]

    def copy(self, other: BlockRecord, src: IntArray, dst: IntArray) -> None:
        """Replace what each handle dst[i] has by what src[i] has in another record, or in this one before the call."""
        counts = other.counts[:, src]
        for blocks, theirs, sizes in zip(self.blocks, other.blocks, counts, strict=True):
            longest = int(sizes.max(initial=0))
            blocks[dst, :longest] = theirs[src, :longest]
        self.counts[:, dst] = counts

    def remap(self, group: int, old_ids: IntArray, new_ids: IntArray) -> None:
        """Make block `old_ids[i]` block `new_ids[i]` wherever it stands, all together.

        Args:
            old_ids: [n] distinct, no null block.
            new_ids: [n].
        """
        if not old_ids.size:
            return
        blocks, order = self.blocks[group], np.argsort(old_ids)
        places = order[np.minimum(np.searchsorted(old_ids[order], blocks), old_ids.size - 1)]
        is_found = old_ids[places] == blocks
        blocks[is_found] = new_ids[places[is_found]]

    def held(self, group: int, handle: int) -> IntArray:
        """Return a handle's blocks, without NULL and released ones, [n] int32."""
        blocks = self.blocks[group][handle, : self.counts[group, handle]]
        held: IntArray = blocks[(blocks >= 0) & (blocks != self._nulls[group])]
        return held

    def holders(self, group: int, handles: IntArray, num_blocks: int = 0) -> IntArray:
        """[at least num_blocks] int64. How many of the handles hold each block; NULL belongs to none."""
        held = [self.held(group, handle) for handle in handles.tolist()]
        return np.bincount(np.concatenate([np.empty(0, np.int32), *held]), minlength=num_blocks)
