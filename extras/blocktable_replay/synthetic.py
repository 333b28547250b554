"""The synthetic trace that comes with the package, and the options under which it makes every feature happen.

`python -m blocktable_replay.synthetic FILE` writes it again. It is Mooncake JSONL: conversations of one to six turns
that begin with one of four system prompts; each turn repeats everything said before it. Lengths, pauses and arrivals
are exponential. Only `random.Random.random` is used, whose numbers are the same in every version of Python.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

from blocktable import KVCacheGroup
from blocktable_replay.options import ReplayOptions
from blocktable_replay.traces import HASH_BLOCK_SIZE

SHIPPED = Path(__file__).with_name("synthetic.jsonl")

NUM_CONVERSATIONS = 150
SYSTEM_PROMPT_HASHES = (2, 3, 5, 8)
"""Hash blocks of each system prompt; the first ones are chosen most."""

MEAN_BETWEEN_CONVERSATIONS_MS = 130.0
MEAN_PAUSE_MS = 3000.0
MS_PER_OUTPUT_TOKEN = 35.0
"""A user reads what the last turn said before the next one."""

MEAN_USER_TOKENS = 350.0
MEAN_OUTPUT_TOKENS = 90.0
MAX_OUTPUT_TOKENS = 400
CHANCE_OF_ANOTHER_TURN = 0.65
MAX_TURNS = 6

EXERCISE = ReplayOptions(
    groups=(
        KVCacheGroup(block_size=16, num_blocks=1400),
        KVCacheGroup(block_size=64, kernel_block_size=16, sliding_window=1024, num_blocks=300),
    ),
    max_num_reqs=64,
    max_num_batched_tokens=1024,
    max_model_len=16_384,
    lookahead=3,
    fork_every=9,
    sleep_every=400,
    dummy_every=100,
)
"""Two groups, one with a window; caches small enough for preemption; drafts, forks, sleeps and dummy steps."""


def requests(seed: int) -> list[dict[str, Any]]:
    """Return the lines of the trace in the order of their time."""
    chance, next_hash = random.Random(seed).random, itertools.count()
    found: list[dict[str, Any]] = []

    def exponential(mean: float) -> float:
        return -mean * math.log(1.0 - chance())

    def new_hashes(count: int) -> list[int]:
        return list(itertools.islice(next_hash, count))

    prompts = [new_hashes(count) for count in SYSTEM_PROMPT_HASHES]
    start_ms = 0.0
    for _ in range(NUM_CONVERSATIONS):
        hash_ids = list(prompts[int(len(prompts) * chance() ** 2)])  # of the full blocks said so far
        num_tokens, now_ms = len(hash_ids) * HASH_BLOCK_SIZE, start_ms
        for _ in range(MAX_TURNS):
            num_tokens += 1 + int(exponential(MEAN_USER_TOKENS))
            num_full, rest = divmod(num_tokens, HASH_BLOCK_SIZE)
            hash_ids += new_hashes(num_full - len(hash_ids))
            output = min(1 + int(exponential(MEAN_OUTPUT_TOKENS)), MAX_OUTPUT_TOKENS)
            last = new_hashes(1) if rest else []
            lengths = {"input_length": num_tokens, "output_length": output}
            found.append({"timestamp": int(now_ms), **lengths, "hash_ids": hash_ids + last})
            num_tokens += output
            now_ms += output * MS_PER_OUTPUT_TOKEN + exponential(MEAN_PAUSE_MS)
            if chance() > CHANCE_OF_ANOTHER_TURN:
                break
        start_ms += exponential(MEAN_BETWEEN_CONVERSATIONS_MS)
    return sorted(found, key=itemgetter("timestamp"))


def write(path: Path, seed: int = 1) -> None:
    """Write the trace."""
    path.write_text("".join(f"{json.dumps(request)}\n" for request in requests(seed)), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED)
