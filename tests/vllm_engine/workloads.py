"""What is asked of an engine: each function serves requests with vLLM's `LLM` and returns what came out."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

Disturbance = Callable[[Any, int], None]
"""Takes vLLM's model runner and how often it was called before."""


def prompt(chance: random.Random, length: int) -> dict[str, Any]:
    """Return a prompt of random tokens."""
    return {"prompt_token_ids": [chance.randrange(3, 512) for _ in range(length)]}


def params(tokens: int | None, **more: Any) -> Any:
    """Return greedy sampling of so many tokens; None: to the end of the model's length."""
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False, **more})


def generate(llm: Any, prompts: list[Any], samplings: Any) -> Any:
    """Return the tokens of every sequence of every request."""
    found = llm.generate(prompts, samplings, use_tqdm=False)
    return [[list(each.token_ids) for each in request.outputs] for request in found]


def mixed(llm: Any, number: int = 9, longest: int = 120, most: int = 24) -> Any:
    """Serve requests of many lengths, more than run at a time."""
    chance = random.Random(1)
    prompts = [prompt(chance, chance.randrange(1, longest)) for _ in range(number)]
    return generate(llm, prompts, [params(chance.randrange(1, most)) for _ in prompts])


def shared(llm: Any, rounds: int = 2, number: int = 5) -> Any:
    """Serve prompts that begin alike, of the same round and of the one before."""
    chance, found = random.Random(3), []
    heads = [prompt(chance, length)["prompt_token_ids"] for length in (64, 96, 130)]
    for _ in range(rounds):
        prompts = [
            {"prompt_token_ids": chance.choice(heads) + prompt(chance, chance.randrange(1, 40))["prompt_token_ids"]}
            for _ in range(number)
        ]
        found += generate(llm, prompts, [params(chance.randrange(1, 16)) for _ in prompts])
    return found


def boundaries(llm: Any) -> Any:
    """Serve prompts and outputs that end at, before and after the end of a block."""
    chance, size = random.Random(5), 32
    lengths = [size * number + more for number in (1, 2, 3) for more in (-1, 0, 1)] + [1, 2]
    tokens = [size, size - 1, size + 1, 1, 2]
    return generate(llm, [prompt(chance, n) for n in lengths], [params(t) for t in (tokens * 3)[: len(lengths)]])


def to_the_end(llm: Any) -> Any:
    """Serve requests up to the model's length: the last column of a row."""
    chance, length = random.Random(6), int(llm.llm_engine.vllm_config.model_config.max_model_len)
    lengths = [length - less for less in (1, 2, 20, 33)]
    return generate(llm, [prompt(chance, n) for n in lengths], [params(None) for _ in lengths])


def repeating(llm: Any, number: int = 5, most: int = 24) -> Any:
    """Serve prompts that n-grams predict."""
    chance, prompts = random.Random(8), []
    for _ in range(number):
        part = prompt(chance, chance.randrange(3, 9))["prompt_token_ids"]
        prompts.append({"prompt_token_ids": (part * 60)[: chance.randrange(20, 100)]})
    return generate(llm, prompts, [params(chance.randrange(1, most)) for _ in prompts])


def sampled(llm: Any) -> Any:
    """Serve several sequences of each request, of seeds of their own."""
    chance = random.Random(9)
    samplings = params(16, n=3, temperature=1.0, seed=5)
    return generate(llm, [prompt(chance, chance.randrange(1, 100)) for _ in range(5)], samplings)


def logprobs(llm: Any) -> Any:
    """Serve requests that ask for the probabilities of prompts and tokens."""
    chance = random.Random(10)
    found = llm.generate(
        [prompt(chance, chance.randrange(1, 100)) for _ in range(6)],
        params(12, logprobs=3, prompt_logprobs=2),
        use_tqdm=False,
    )
    return [
        [[(token, repr(value.logprob)) for token, value in step.items()] for step in each.outputs[0].logprobs]
        for each in found
    ]


def pooled(llm: Any) -> Any:
    """Return digests of embeddings."""
    chance = random.Random(12)
    prompts = [prompt(chance, chance.randrange(2, 120)) for _ in range(12)]
    found = llm.encode(prompts, pooling_task="embed", use_tqdm=False)
    return [hashlib.sha1(each.outputs.data.contiguous().numpy().tobytes()).hexdigest() for each in found]


def served(
    llm: Any,
    steps: int = 30,
    longest: int = 100,
    most: int = 20,
    *,
    samples: bool = False,
    has_priorities: bool = False,
    disturb: Disturbance | None = None,
) -> Any:
    """Let requests come, finish and be aborted while the engine steps.

    Args:
        llm: the engine.
        steps: during which requests come.
        longest, most: tokens of a prompt and of an output.
        samples: whether some requests have three sampled sequences.
        has_priorities: whether requests have them.
        disturb: called before every fourth step.
    """
    chance, engine = random.Random(11), llm.llm_engine
    done: dict[str, Any] = {}
    living: list[str] = []
    step = number = 0
    while step < steps or engine.has_unfinished_requests():
        while step < steps and chance.random() < 0.3:
            name, several = f"r{number}", samples and chance.random() < 0.3
            more = {"n": 3, "temperature": 1.0, "seed": number} if several else {}
            order = {"priority": chance.randrange(3), "arrival_time": float(number)} if has_priorities else {}
            request = prompt(chance, chance.randrange(1, longest))
            engine.add_request(name, request, params(chance.randrange(1, most), **more), **order)
            living.append(name)
            number += 1
        if step < steps and living and chance.random() < 0.1:
            name = living.pop(chance.randrange(len(living)))
            engine.abort_request([name])
            done[name] = "aborted"
        if disturb is not None and step % 4 == 3:
            disturb(model_runner(llm), step // 4)
        for each in engine.step():
            if each.finished:
                done[each.request_id] = [list(output.token_ids) for output in each.outputs]
                if each.request_id in living:
                    living.remove(each.request_id)
        step += 1
    return sorted(done.items())


def model_runner(llm: Any) -> Any:
    """Return vLLM's model runner, which lives in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


# What else an engine does with its tables, between two steps.


def dummy_batch(runner: Any, number: int) -> None:
    """Run a batch of no requests, as an engine of a data-parallel group does that has none."""
    runner._dummy_run(4, uniform_decode=True)


def tables_cleared(runner: Any, number: int) -> None:
    """Run a batch under tables that are cleared, and restored: vLLM's elastic expert parallelism."""
    multi = runner.input_batch.block_table
    saved = [(each.block_table.gpu.clone(), each.block_table.cpu.clone()) for each in multi.block_tables]
    multi.clear()
    runner._dummy_run(4, force_attention=True)
    for each, (gpu, cpu) in zip(multi.block_tables, saved, strict=True):
        each.block_table.gpu.copy_(gpu)
        each.block_table.cpu.copy_(cpu)


def first_column_replaced(runner: Any, number: int) -> None:
    """Write blocks into the first column and commit them, and back: vLLM 0.33.0's warm-up of a Mamba kernel."""
    multi, rows = runner.input_batch.block_table, runner.max_num_reqs
    saved = [each.block_table.np[:rows, 0].copy() for each in multi.block_tables]
    for each in multi.block_tables:
        each.block_table.np[:rows, 0] = range(1, rows + 1)
    multi.commit_block_table(rows)
    for each, block_ids in zip(multi.block_tables, saved, strict=True):
        each.block_table.np[:rows, 0] = block_ids
    multi.commit_block_table(rows)


def dummy_states(runner: Any, number: int) -> None:
    """Run a batch whose dummy rows get states of their own, in the first column: the V2 runner's warm-ups."""
    runner._dummy_run(4, valid_dummy_state_slots=True)


def v1_disturbances(runner: Any, number: int) -> None:
    """Do one of what the V1 runner may do."""
    (dummy_batch, tables_cleared, first_column_replaced)[number % 3](runner, number)


def v2_disturbances(runner: Any, number: int) -> None:
    """Do one of what the V2 runner may do."""
    (dummy_batch, dummy_states)[number % 2](runner, number)
