"""Three steps of a toy engine over the numpy backend: a prefill, a decode, and a request that finishes.

Run it: python examples/quickstart.py
"""

import numpy as np

import blocktable as bt

config = bt.BlockTableConfig(
    groups=[
        bt.KVCacheGroup(block_size=16),
        # The attention kernel of these layers works in blocks of 16, and looks back 64 tokens.
        bt.KVCacheGroup(block_size=32, kernel_block_size=16, sliding_window=64),
    ],
    max_num_reqs=4,
    max_num_batched_tokens=64,
    max_model_len=256,
)
table = bt.BlockTable(config, backend="numpy")


def show(title: str, step: bt.Step) -> None:
    """Print what an attention kernel and a cache writer of each group would read."""
    print(title)
    for group, (block_table, slots) in enumerate(zip(step.block_tables, step.slot_mappings, strict=True)):
        print(f"  group {group}: block table {block_table[:, :4].tolist()}, slots {slots[:6].tolist()} ...")


# Requests take rows 2 and 0. Each gets blocks from the engine's own allocator: one list for each group.
table.set_row(2, ([7, 8], [3]))
table.set_row(0, ([5], [4]))

# Prefill: 20 tokens of the request in row 2, then 3 of the one in row 0. Batch index -> row is idx_mapping.
positions = np.concatenate((np.arange(20), np.arange(3)))
step = table.step(np.array([2, 0], np.int32), np.array([0, 20, 23], np.int32), positions)
show("prefill", step)

# Decode: one token each, padded to four requests and eight tokens as a CUDA graph would want.
step = table.step(
    np.array([2, 0], np.int32),
    np.array([0, 1, 2], np.int32),
    np.array([20, 3], np.int64),
    num_reqs_padded=4,
    num_tokens_padded=8,
)
show("decode, padded", step)

# Where does a slot come from? Useful when a cache holds what it should not.
print(table.locate(0, int(step.slot_mappings[0][0])))

# The request in row 2 finishes. Its blocks are free, and the device hears of it at the next commit.
table.clear_row(2)
table.commit()
table.verify()
print("blocks per row:", table.num_blocks_per_row.tolist())
