"""The engines, by name: where each adapter is. None is imported before its name is asked for."""

from __future__ import annotations

import importlib

from blocktable_conformance.engines.adapter import Engine

ENGINES = {
    "vllm-v1-0.25.1": "vllm_v1:VllmV1Old",
    "vllm-v1-0.33.0": "vllm_v1:VllmV1New",
    "vllm-v2-0.25.1": "vllm_v2:VllmV2Old",
    "vllm-v2-0.33.0": "vllm_v2:VllmV2New",
    "vllm-ascend": "vllm_ascend:VllmAscend",
    "transformers": "transformers:Transformers",
    "sglang": "sglang:SGLang",
    "flex-attention": "flex_attention:FlexAttention",
    "nano-vllm": "nano_vllm:NanoVllm",
    "blocktable": "own:OwnTable",
}
"""Name -> module of this package, and class."""


def load(name: str) -> type[Engine]:
    """Return the adapter of an engine, or that of `package.module:Class`."""
    module, _, kind = ENGINES.get(name, name).rpartition(":")
    found = importlib.import_module(f"{__package__}.{module}" if name in ENGINES else module)
    engine: type[Engine] = getattr(found, kind)
    return engine
