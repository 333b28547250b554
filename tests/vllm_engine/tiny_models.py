"""Models of a few hundred thousand random weights, so strong that greedy tokens depend on every block of a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 2}),
    # Windows of 64 tokens in two layers of three: several KV cache groups.
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "sliding_window": 64,
            "query_pre_attn_scalar": 32,
        },
    ),
    "gptoss": (
        "gpt_oss",
        {
            "head_dim": 64,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_scaling": None,
        },
    ),
    # Groups of recurrent state beside groups of attention.
    "lfm2": (
        "lfm2",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "conv_dim": 128,
            "block_dim": 128,
            "conv_L_cache": 3,
        },
    ),
    "qwen3next": (
        "qwen3_next",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "full_attention_interval": 2,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    # No KV cache at all: tables of no groups.
    "bert": ("bert", {"num_hidden_layers": 2, "type_vocab_size": 2}),
}
POOLED = ("bert", "llama")
"""vLLM's pooling wants a tokenizer."""


def make(name: str, folder: Path) -> None:
    """Write a model to a folder. The same name gives the same weights."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM

    kind, options = MODELS[name]
    torch.manual_seed(7)
    config = CONFIG_MAPPING[kind](**{**COMMON, **options}, dtype="float32")
    model = (AutoModel if kind == "bert" else AutoModelForCausalLM).from_config(config).float()
    # One matrix for words in and out: large, it makes every token follow itself, whatever attention says.
    of_word = 0.05 if config.tie_word_embeddings else 0.7
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim >= 2:
                of_words = "embed" in key or "lm_head" in key
                torch.nn.init.normal_(weight, std=of_word if of_words else 1.4 / weight.shape[-1] ** 0.5)
                if "q_proj" in key or "k_proj" in key:
                    weight.mul_(1.8)  # sharp attention: one wrong key shows
    model.save_pretrained(folder)
    if name in POOLED:
        _make_tokenizer(folder)


def _make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0").save_pretrained(folder)
