"""The scenarios: a model, an engine, what is asked of it, and the fault that shows it to prove something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from workloads import (
    boundaries,
    dummy_batch,
    first_column_replaced,
    logprobs,
    mixed,
    pooled,
    repeating,
    sampled,
    served,
    shared,
    tables_cleared,
    to_the_end,
    v1_disturbances,
    v2_disturbances,
)

Work = Callable[[Any], Any]


class Scenario(NamedTuple):
    """What one engine serves.

    Attributes:
        work: takes vLLM's `LLM`, returns what came out.
        options: of the engine, beside `ENGINE`; "model" names one of `tiny_models`.
        fault: the name of a fault in `faults` that must change what comes out. None: there are no tables to be wrong.
        v2_work: the same for the V2 runner, where that is something else. None: the V2 runner cannot do it.
        is_chosen: whether it is one of those that CI runs.
    """

    work: Work
    options: dict[str, Any]
    fault: str | None
    v2_work: Work | None
    is_chosen: bool


ENGINE: dict[str, Any] = {
    "model": "llama",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "block_size": 32,  # the smallest that vLLM's attention has on CPUs
    "num_gpu_blocks_override": 200,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "seed": 0,
}
"""In every scenario, but for what that says itself."""

FEW = {"num_gpu_blocks_override": 10}
"""Blocks of fewer tokens than four requests have: some are preempted."""
NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 1,
    }
}
GEMMA = {"model": "gemma3"}
GPTOSS = {"model": "gptoss", "dtype": "bfloat16"}
LFM2 = {"model": "lfm2", "block_size": None, "dtype": "bfloat16"}
QWEN3NEXT = {"model": "qwen3next", "block_size": None, "dtype": "bfloat16"}
CACHED = {"enable_prefix_caching": True}
POOLING = {"runner": "pooling", "skip_tokenizer_init": False}

GENERAL = "the first request is written to the block before, or the token beside"
SAME: Any = object()


def _scenario(
    work: Work, options: dict[str, Any] | None = None, fault: str | None = GENERAL, v2_work: Any = SAME
) -> Scenario:
    is_chosen = fault not in (GENERAL, None)
    return Scenario(work, {**ENGINE, **(options or {})}, fault, work if v2_work is SAME else v2_work, is_chosen)


def _disturbed(disturb: Any) -> Work:
    return lambda llm: served(llm, disturb=disturb)


SCENARIOS: dict[str, Scenario] = {
    # Chosen.
    "mixed": _scenario(mixed, {}, "a row that should move stays; or the batch is taken for the rows"),
    "chunked": _scenario(
        lambda llm: mixed(llm, number=5, longest=200, most=12),
        {"max_num_batched_tokens": 48, "enable_prefix_caching": False},
        "a chunk of a prompt is written where the prompt begins",
    ),
    "prefix": _scenario(shared, {}, "a block that another row holds too is lost"),
    "preempt": _scenario(
        lambda llm: mixed(llm, number=7, longest=80, most=50), FEW, "a row keeps the first block of its last request"
    ),
    "served": _scenario(
        lambda llm: served(llm, samples=True), {}, "a row that should move stays; or the batch is taken for the rows"
    ),
    "ngram": _scenario(repeating, NGRAM, "drafts are written where the token before them is"),
    "end": _scenario(to_the_end, {}, "the last column is taken for the one before it"),
    "gemma3_preempt": _scenario(
        lambda llm: mixed(llm, number=5, longest=150, most=30),
        {**GEMMA, "num_gpu_blocks_override": 30, "max_num_batched_tokens": 64},
        "the second group gets the first one's blocks",
    ),
    "lfm2_align": _scenario(
        lambda llm: shared(llm, rounds=2, number=3), {**LFM2, **CACHED}, "all requests have one state"
    ),
    "disturbed": _scenario(
        _disturbed(v1_disturbances),
        {},
        "what others write to the tables is lost; or their dummy batch clears the rows",
        _disturbed(v2_disturbances),
    ),
    # The others.
    "mixed_bs128": _scenario(mixed, {"block_size": None}),
    "no_prefix": _scenario(mixed, {"enable_prefix_caching": False}),
    "sync": _scenario(mixed, {"async_scheduling": False}),
    "preempt_chunked": _scenario(
        lambda llm: mixed(llm, number=10, longest=120, most=60), {**FEW, "max_num_batched_tokens": 40}
    ),
    "ngram_preempt": _scenario(repeating, {**NGRAM, **FEW}),
    "ngram_end": _scenario(to_the_end, NGRAM),
    "boundaries": _scenario(boundaries),
    "end_odd": _scenario(to_the_end, {"max_model_len": 250}),
    "served_preempt": _scenario(lambda llm: served(llm, longest=80, most=60), FEW),
    "served_priority": _scenario(
        lambda llm: served(llm, longest=80, most=60, has_priorities=True), {**FEW, "scheduling_policy": "priority"}
    ),
    "served_ngram": _scenario(lambda llm: served(llm, steps=30, longest=80), {**NGRAM, **FEW}),
    "served_cleared": _scenario(_disturbed(tables_cleared), {}, v2_work=None),
    "served_column": _scenario(_disturbed(first_column_replaced), {}, v2_work=None),
    "served_idle": _scenario(_disturbed(dummy_batch)),
    "gemma3_cleared": _scenario(_disturbed(tables_cleared), GEMMA, v2_work=None),
    "gemma3_column": _scenario(_disturbed(first_column_replaced), GEMMA, v2_work=None),
    "sampled": _scenario(sampled),
    "logprobs": _scenario(logprobs),
    "many": _scenario(
        lambda llm: mixed(llm, number=60, longest=80, most=20), {"max_num_seqs": 32, "max_num_batched_tokens": 1024}
    ),
    "decode": _scenario(lambda llm: mixed(llm, number=16, longest=40, most=60), {"max_num_seqs": 16}),
    "gemma3_decode": _scenario(lambda llm: mixed(llm, number=16, longest=40, most=60), {**GEMMA, "max_num_seqs": 16}),
    "gemma3": _scenario(mixed, GEMMA),
    "gemma3_prefix": _scenario(shared, GEMMA),
    "gemma3_served": _scenario(served, GEMMA),
    "gemma3_ngram": _scenario(repeating, {**GEMMA, **NGRAM}),
    "gptoss": _scenario(mixed, GPTOSS),
    "gptoss_preempt": _scenario(
        lambda llm: mixed(llm, number=8, longest=120, most=40), {**GPTOSS, "num_gpu_blocks_override": 30}
    ),
    "lfm2": _scenario(lambda llm: mixed(llm, number=6, most=20), LFM2),
    "bert": _scenario(pooled, {**POOLING, "model": "bert", "block_size": None}, None),
    "llama_pooled": _scenario(pooled, {**POOLING, "convert": "embed"}, None),
    "qwen3next": _scenario(lambda llm: mixed(llm, number=6, most=20), QWEN3NEXT),
    "qwen3next_align": _scenario(
        lambda llm: shared(llm, rounds=2, number=4), {**QWEN3NEXT, **CACHED, "max_num_batched_tokens": 1024}
    ),
    "qwen3next_served": _scenario(lambda llm: served(llm, steps=20, most=20), QWEN3NEXT),
}
