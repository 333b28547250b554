"""Packets between tables, over a backend: what was applied reaches the device with the next commit (R45-R47)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from blocktable import BlockTable, BlockTableConfig, ChangesError, KVCacheGroup
from blocktable_conformance.asserts import check
from blocktable_conformance.subject import Subject


def make(subject: Subject) -> BlockTable:
    groups = [KVCacheGroup(block_size=4), KVCacheGroup(block_size=8, kernel_block_size=4, null_block_id=-1)]
    config = BlockTableConfig(groups=groups, max_num_reqs=6, max_num_batched_tokens=16, max_model_len=64)
    return subject.table(config)


def test_packets_reach_the_device_with_the_next_step(subject: Subject) -> None:
    """The sender commits when it likes; a packet that is lost is refused by its number. Rules: R9.1, R45, R46, R47."""
    sender, receiver = make(subject), make(subject)
    batch = np.array([2, 0], np.int32), np.array([0, 1, 3], np.int32), np.array([9, 0, 5], np.int64)
    changes: tuple[Callable[[], None], ...] = (
        lambda: sender.set_rows([0, 2], [[1, 2, 3, 4, 5], [0, 7, 8]], [[2, 3], [1, 2]]),
        lambda: sender.append_row(0, [[9], []]),
        lambda: sender.commit(),
        lambda: sender.move_row(0, 5),
        lambda: sender.swap_rows(2, 0),
        lambda: sender.null_range(0, 0, 0, 1),
        lambda: sender.remap_blocks(0, [4, 2], [2, 4]),
        lambda: sender.truncate_row(5, 1),
        lambda: sender.clear(),
    )
    for number, change in enumerate(changes):
        change()
        receiver.apply_changes(sender.pack_changes())
        check(receiver.digest() == sender.digest(), "R47", f"the digests differ after change {number}.")
        expected, got = sender.step(*batch), receiver.step(*batch)
        sender.verify()
        receiver.verify()
        for group in range(2):
            same = subject.to_host(expected.slot_mappings[group]) == subject.to_host(got.slot_mappings[group])
            check(same.all(), "R46", f"slots of group {group} differ after change {number}.")
    sender.pack_changes()
    try:
        receiver.apply_changes(sender.pack_changes())
    except ChangesError as error:
        check("is missing" in str(error), "R46", f"the refusal must say what is missing, got: {error}")
    else:
        check(False, "R46", "a lost packet was not noticed.")
