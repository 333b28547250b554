"""Context parallelism in earnest: a process and a device for each rank, over torch.distributed.

Rank 0 changes rows; the others get its packets, and all compare digests in each step.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import blocktable as bt
from attention import Part
from proof.rank_link import RankLink
from proof.variants import Variant, run


class Planted(RankLink):
    """Changes a row of the last rank without telling the others, in one step: the ranks must name it."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def compare(self, table: bt.BlockTable) -> None:
        if self.num_steps == self.step and dist.get_rank() == dist.get_world_size() - 1:
            row = int(table.num_blocks_per_row[0].argmax())
            table.replace_blocks(row, 0, 0, [table.block_ids(row, 0)[0] + 1])
        super().compare(table)


def serve(rank: int, variant: Variant, meeting_place: str, diverge_at: int | None) -> None:
    """Serve all requests as one rank, which holds its own tokens' keys and values alone; fails if a token differs."""
    world = variant.world_size
    if variant.device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if variant.device == "cuda" else "gloo", init_method=meeting_place, rank=rank, world_size=world
    )
    # Of four ranks or more, two share the decode dimension and the others the prefill dimension, as in larger engines.
    decode_size = 2 if world % 2 == 0 else world
    decode_groups = [dist.new_group(list(range(i, i + decode_size))) for i in range(0, world, decode_size)]
    prefill_groups = [dist.new_group(list(range(i, world, decode_size))) for i in range(decode_size)]
    shard = bt.ContextParallel.from_process_groups(
        dcp=decode_groups[rank // decode_size],
        pcp=prefill_groups[rank % decode_size],
        interleave_size=variant.interleave_size,
    )

    def all_ranks(parts: list[Part]) -> list[Part]:
        ((mean, log_sum),) = parts
        own = torch.cat((mean, log_sum[..., None]), -1)
        gathered = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(gathered, own)
        return [(part[..., :-1], part[..., -1]) for part in gathered]

    try:
        link = RankLink() if diverge_at is None else Planted(diverge_at)
        result = run(variant, [shard], all_ranks, link=link)
        print(f"rank {shard.rank} of {shard.world_size}: {result.report(variant)}", flush=True)
    finally:
        dist.destroy_process_group()
    if not result.is_pass:
        raise SystemExit(1)


def run_ranks(variant: Variant, diverge_at: int | None = None) -> bool:
    """Start a process for each rank and wait; say whether all of them got the dense cache's tokens.

    Args:
        variant: how to serve.
        diverge_at: the step in which the last rank's table is made wrong. None: none.
    """
    if variant.device == "cuda" and torch.cuda.device_count() < variant.world_size:
        print(f"FAIL {variant.world_size} ranks want as many GPUs; torch sees {torch.cuda.device_count()}.")
        return False
    with tempfile.TemporaryDirectory() as folder:
        meeting_place = (Path(folder) / "ranks").as_uri()
        if sys.platform == "linux":  # all ranks are on this host, whose name may lead nowhere
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            mp.spawn(serve, (variant, meeting_place, diverge_at), nprocs=variant.world_size)
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
            print(f"FAIL a rank ended: {error}")
            return False
    return True
