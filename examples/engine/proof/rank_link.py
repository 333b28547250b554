"""Keeps the tables of several processes equal: rank 0 changes rows and sends packets, all ranks compare digests."""

from typing import Any

import torch.distributed as dist

import blocktable as bt


class RankLink:
    """This process's end. Each step costs one broadcast and one gathering of numbers.

    Attributes:
        is_sender: whether row changes are made here; elsewhere they come in packets.
        num_steps: how often rows were shared.
    """

    def __init__(self) -> None:
        self.is_sender, self.num_steps = dist.get_rank() == 0, 0

    def share(self, table: bt.BlockTable) -> None:
        """Bring a table up to date with rank 0's, on all ranks in the same step, before its commit."""
        box = [table.pack_changes() if self.is_sender else b""]
        dist.broadcast_object_list(box)
        if not self.is_sender:
            table.apply_changes(box[0])
        self.compare(table)
        self.num_steps += 1

    def compare(self, table: bt.BlockTable) -> None:
        """Raise on every rank where the digests differ, and name a row."""
        digests = gathered(table.digest())
        wrong = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if not wrong:
            return
        tables, rank = gathered(rows_of(table)), wrong[0]
        (row, group), theirs, ours = next(
            (key, blocks, tables[0][key]) for key, blocks in tables[rank].items() if blocks != tables[0][key]
        )
        raise RuntimeError(
            f"Step {self.num_steps}: rank {rank} differs from rank 0: row {row} of group {group} holds {theirs}, and "
            f"on rank 0 {ours}."
        )


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def rows_of(table: bt.BlockTable) -> dict[tuple[int, int], list[int]]:
    """Return the blocks of each row and group."""
    groups, rows = range(len(table.config.groups)), range(table.config.num_rows)
    return {(row, group): table.block_ids(row, group).tolist() for row in rows for group in groups}
