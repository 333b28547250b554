"""The movers of docs/integrating.md: engines moved onto a table give the tokens that they gave before.

transformers' own package is what is moved: `tox -e torch` installs it.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blocktable as bt

PAGE = Path(__file__).parents[1] / "docs/integrating.md"

TRANSFORMERS = """
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

def tokens():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=1, attn_implementation="sdpa", **sizes)
    model = LlamaForCausalLM(config).eval()
    batching = ContinuousBatchingConfig(page_size=4, num_blocks=24, max_batch_tokens=16)
    generation = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [[1, 2, 3], list(range(4, 24)), [1, 2, 3], list(range(4, 17)), [11], list(range(1, 10))]
    found = model.generate_batch(
        prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=False, warmup=False
    )
    assert len(found) == len(prompts)
    return [result.generated_tokens for result in found.values()]

calls = []
before = tokens()
move(8, 64, "numpy")
indices = Moved.indices
Moved.indices = lambda self, *args: calls.append(args) or indices(self, *args)
after = tokens()
assert all(len(row) == 9 for row in before), before
assert after == before, (before, after)
print(len(calls), "calls")
"""


def code_of(mover: str) -> str:
    (found,) = re.findall(rf"<!-- mover: {mover} -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


def test_the_patch_of_transformers_is_short() -> None:
    assert sum(1 for line in code_of("transformers").splitlines() if line.strip()) <= 50


@pytest.mark.torch
def test_transformers_gives_the_same_tokens(tmp_path: Path) -> None:
    """In a process of its own: it patches a class of the package."""
    script = tmp_path / "mover.py"
    script.write_text(f"import numpy as np\nimport blocktable as bt\n{code_of('transformers')}\n{TRANSFORMERS}")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 50  # the patch was used


class Seq:
    """A sequence of an engine of lists."""

    ids = count()

    def __init__(self, tokens: list[int], length: int) -> None:
        self.seq_id, self.tokens, self.stop = next(self.ids), tokens, length
        self.block_table: list[int] = []
        self.num_cached = 0

    def __len__(self) -> int:
        return len(self.tokens)


class ListTables:
    """The tables of an engine of lists, made of lists in every step."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def prepare(self, seqs: list[Seq], num_new_tokens: Sequence[int]) -> tuple[list[list[int]], list[int]]:
        width = max(len(seq.block_table) for seq in seqs)
        tables = [seq.block_table + [-1] * (width - len(seq.block_table)) for seq in seqs]
        size = self.block_size
        slots = [
            seq.block_table[position // size] * size + position % size
            for seq, new in zip(seqs, num_new_tokens, strict=True)
            for position in range(len(seq) - new, len(seq))
        ]
        return tables, slots

    def finish(self, seq: Seq) -> None:
        pass


class ListEngine:
    """Prefill first, then decode; the last sequence is preempted where blocks run out. Its model hashes its cache."""

    def __init__(self, tables: Any, block_size: int, num_blocks: int) -> None:
        self.tables, self.block_size = tables, block_size
        self.free = list(range(num_blocks))
        self.cache = np.zeros(num_blocks * block_size, np.int64)
        self.preempted = 0

    def run(self, prompts: list[list[int]], length: int) -> list[list[int]]:
        waiting = [Seq(list(prompt), len(prompt) + length) for prompt in prompts]
        everything, running = list(waiting), list[Seq]()
        while waiting or running:
            batch = self.admit(waiting, running) or self.grow(running, waiting)
            new = [len(seq) - seq.num_cached for seq in batch]
            tables, slots = self.step(batch, new)
            self.cache[slots] = [token for seq, n in zip(batch, new, strict=True) for token in seq.tokens[-n:]]
            for seq, table in zip(batch, tables, strict=True):
                seq.num_cached = len(seq)
                seq.tokens.append(self.sample(table, len(seq)))
                if len(seq) == seq.stop:
                    running.remove(seq)
                    self.release(seq)
        return [seq.tokens for seq in everything]

    def step(self, batch: list[Seq], new: list[int]) -> tuple[Any, Any]:
        found = self.tables.prepare(batch, new)
        if isinstance(found, bt.Step):
            return found.block_tables[0], found.slot_mappings[0]
        tables, slots = found
        return tables, slots

    def sample(self, table: Sequence[int], length: int) -> int:
        token = 7
        for position in range(length):
            slot = table[position // self.block_size] * self.block_size + position % self.block_size
            token = (token * 31 + int(self.cache[slot])) % 97
        return token

    def admit(self, waiting: list[Seq], running: list[Seq]) -> list[Seq]:
        batch = []
        while waiting and len(running) < 4 and self.hold(waiting[0]):
            batch.append(waiting.pop(0))
            running.append(batch[-1])
        return batch

    def grow(self, running: list[Seq], waiting: list[Seq]) -> list[Seq]:
        for seq in list(running):
            while seq in running and not self.hold(seq):
                victim = running.pop()
                self.release(victim)
                victim.num_cached = 0
                waiting.insert(0, victim)
                self.preempted += 1
        return list(running)

    def hold(self, seq: Seq) -> bool:
        needed = -(-len(seq) // self.block_size) - len(seq.block_table)
        if needed > len(self.free):
            return False
        seq.block_table += [self.free.pop(0) for _ in range(needed)]
        return True

    def release(self, seq: Seq) -> None:
        if seq.num_cached:
            self.tables.finish(seq)
        self.free += seq.block_table
        seq.block_table = []


@pytest.mark.parametrize("seed", range(3))
def test_an_engine_of_lists_gives_the_same_tokens(seed: int) -> None:
    """Block 0 is given out, blocks are reused, and sequences are preempted."""
    names: dict[str, Any] = {"np": np, "bt": bt, "Sequence": Sequence}
    exec(compile(code_of("lists"), str(PAGE), "exec"), names)
    chance = random.Random(seed)
    prompts = [[chance.randrange(97) for _ in range(chance.randint(1, 9))] for _ in range(9)]
    lists = ListEngine(ListTables(4), 4, 9)
    moved = ListEngine(names["Runner"](4, 4, 64, 64, "numpy"), 4, 9)
    expected = lists.run(prompts, 10)
    assert lists.preempted > 0
    assert moved.run(prompts, 10) == expected
    assert len(moved.tables.free_rows) == 4
