"""The synthetic trace that comes with the package, and the options under which it makes every feature happen.

`python -m blocktable_replay.synthetic FILE` writes it again. It is Mooncake JSONL: conversations of one to six turns
that begin with one of four system prompts; each turn repeats everything said before it. Lengths, pauses and arrivals
are exponential. Only `random.Random.random` is used, whose numbers are the same in every version of Python.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Conversation:
    hash_ids: list[int]  # of the full blocks said so far
    num_tokens: int
    now_ms: float
    turns: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)


class Generator:
    """Writes conversations, from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._next_hash = 0
        self._system_prompts = [self._new_hashes(count) for count in SYSTEM_PROMPT_HASHES]

    def lines(self) -> Iterator[str]:
        """Yield the lines of the trace in the order of their time."""
        requests, now = [], 0.0
        for _ in range(NUM_CONVERSATIONS):
            requests += self._conversation(now)
            now += self._exponential(MEAN_BETWEEN_CONVERSATIONS_MS)
        for request in sorted(requests, key=lambda entry: int(entry["timestamp"])):
            yield json.dumps(request)

    def _exponential(self, mean: float) -> float:
        return -mean * math.log(1.0 - self._random.random())

    def _new_hashes(self, count: int) -> list[int]:
        self._next_hash += count
        return list(range(self._next_hash - count, self._next_hash))

    def _conversation(self, start_ms: float) -> list[dict[str, Any]]:
        chosen = self._system_prompts[int(len(self._system_prompts) * self._random.random() ** 2)]
        talk = _Conversation(list(chosen), len(chosen) * HASH_BLOCK_SIZE, start_ms)
        while talk.turns < MAX_TURNS:
            self._turn(talk)
            if self._random.random() > CHANCE_OF_ANOTHER_TURN:
                break
        return talk.lines

    def _turn(self, talk: _Conversation) -> None:
        talk.turns += 1
        talk.num_tokens += 1 + int(self._exponential(MEAN_USER_TOKENS))
        num_full, rest = divmod(talk.num_tokens, HASH_BLOCK_SIZE)
        talk.hash_ids += self._new_hashes(num_full - len(talk.hash_ids))
        output = min(1 + int(self._exponential(MEAN_OUTPUT_TOKENS)), MAX_OUTPUT_TOKENS)
        talk.lines.append(
            {
                "timestamp": int(talk.now_ms),
                "input_length": talk.num_tokens,
                "output_length": output,
                "hash_ids": talk.hash_ids + (self._new_hashes(1) if rest else []),
            }
        )
        talk.num_tokens += output
        talk.now_ms += output * MS_PER_OUTPUT_TOKEN + self._exponential(MEAN_PAUSE_MS)


def write(path: Path, seed: int = 1) -> None:
    """Write the trace."""
    path.write_text("".join(f"{line}\n" for line in Generator(seed).lines()), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED)
