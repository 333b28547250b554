"""The engines, by name: where each adapter is, and its package. No adapter is imported before its name is asked for."""

from __future__ import annotations

import importlib

from blocktable_conformance.engines.adapter import Engine
from blocktable_conformance.engines.packages import NANO_VLLM, SGLANG, TRANSFORMERS, VLLM, VLLM_ASCEND, Package

ENGINES: dict[str, tuple[str, Package | None]] = {
    "vllm-v1-0.25.1": ("vllm_v1:VllmV1Old", VLLM["0.25.1"]),
    "vllm-v1-0.33.0": ("vllm_v1:VllmV1New", VLLM["0.33.0"]),
    "vllm-v2-0.25.1": ("vllm_v2:VllmV2Old", VLLM["0.25.1"]),
    "vllm-v2-0.33.0": ("vllm_v2:VllmV2New", VLLM["0.33.0"]),
    "vllm-ascend": ("vllm_ascend:VllmAscend", VLLM_ASCEND),
    "transformers": ("transformers:Transformers", TRANSFORMERS),
    "sglang": ("sglang:SGLang", SGLANG),
    "flex-attention": ("flex_attention:FlexAttention", None),
    "nano-vllm": ("nano_vllm:NanoVllm", NANO_VLLM),
    "blocktable": ("own:OwnTable", None),
}
"""Name -> module of this package and class, and what is laid out for it; None: it is installed."""


def package_of(name: str) -> Package | None:
    """Return what is laid out for an engine; None for one that is installed."""
    return ENGINES[name][1] if name in ENGINES else None


def load(name: str) -> type[Engine]:
    """Return the adapter of an engine, or that of `package.module:Class`."""
    module, _, kind = (ENGINES[name][0] if name in ENGINES else name).rpartition(":")
    found = importlib.import_module(f"{__package__}.{module}" if name in ENGINES else module)
    engine: type[Engine] = getattr(found, kind)
    return engine
