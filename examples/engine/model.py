"""A decoder-only transformer of random weights, in plain torch: full attention, a sliding window, and a recurrence.

What a token sees of earlier ones is the business of the cache that `forward` is given.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

FULL, WINDOW, STATE = 0, 1, 2
"""Kinds of layers; also the number of the KV cache group that the layers of a kind share."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the model. `layers`: the kind of each; `window`: tokens, the current one included."""

    layers: tuple[int, ...] = (FULL, WINDOW, STATE, FULL, WINDOW)
    vocab_size: int = 96
    num_heads: int = 2
    head_size: int = 16
    window: int = 12
    seed: int = 7


class Transformer:
    """The model. A batch is a flat run of tokens; which request each belongs to only the cache knows."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config, width = config, config.num_heads * config.head_size
        generator = torch.Generator().manual_seed(config.seed)

        def weights(rows: int, columns: int, gain: float = 1.0) -> list[Tensor]:
            shape, scale = (len(config.layers), rows, columns), gain / rows**0.5
            values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
            return list(values.to(device, dtype))

        # The gains make attention peaked and its result large: one wrong key shows, and is not averaged away.
        self.mixers, self.outputs = weights(width, 3 * width, gain=1.7), weights(width, width, gain=2.0)
        self.expanders, self.reducers = weights(width, 2 * width), weights(2 * width, width)
        self.unembedding = weights(width, config.vocab_size)[0]
        self.embedding = weights(width, config.vocab_size, gain=width**0.5)[0].T.contiguous()
        half = config.head_size // 2
        self.frequencies = (10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)).to(device, dtype)

    def forward(self, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Return [num_tokens, vocab_size]: the logits after each token.

        Args:
            tokens: [num_tokens] int64. Token ids.
            positions: [num_tokens] int64. Each token's index in its request.
            cache: `attend(layer, query, key, value)`, all [num_tokens, num_heads, head_size], keeps key and value and
                attends; `scan(layer, decay, update)`, all [num_tokens, width], returns each token's new state, which
                is decay * the state before it + update.
        """
        hidden = self.embedding[tokens]
        for layer, kind in enumerate(self.config.layers):
            if kind == STATE:
                first, second, third = (_normalised(hidden) @ self.mixers[layer]).chunk(3, dim=-1)
                decay = torch.sigmoid(first + 1.0)
                mixed = cache.scan(layer, decay, (1.0 - decay) * second) * silu(third)
            else:
                mixed = cache.attend(layer, *self.heads(layer, hidden, positions)).flatten(1)
            hidden = hidden + mixed @ self.outputs[layer]
            hidden = hidden + silu(_normalised(hidden) @ self.expanders[layer]) @ self.reducers[layer]
        return _normalised(hidden) @ self.unembedding

    def heads(self, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's query, key and value of each token, [num_tokens, num_heads, head_size] each."""
        parts = (_normalised(hidden) @ self.mixers[layer]).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.config.num_heads, -1)) for part in parts)
        angles = (positions[:, None] * self.frequencies)[:, None, :]
        return _rotated(query, angles), _rotated(key, angles), value


def _normalised(hidden: Tensor) -> Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)


def _rotated(heads: Tensor, angles: Tensor) -> Tensor:
    """Turn each head by its token's position (RoPE). heads: [num_tokens, num_heads, head_size]."""
    (left, right), cosine, sine = heads.chunk(2, dim=-1), angles.cos(), angles.sin()
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)
