"""The truth: one request at a time, one token at a time, over a cache that grows. It shares the model alone."""

import torch
from torch import Tensor

from model import WINDOW, ModelConfig, Transformer


class DenseCache:
    """Keys and values of one request as they came, and the last state of each recurrence, by layer."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.states: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keys[layer] = key = torch.cat((self.keys.get(layer, key[:0]), key))
        self.values[layer] = value = torch.cat((self.values.get(layer, value[:0]), value))
        num_seen = self.config.window if self.config.layers[layer] == WINDOW else len(key)
        scores = (query * key[-num_seen:]).sum(-1) / self.config.head_size**0.5  # [num_seen, num_heads]
        return (torch.softmax(scores, 0)[:, :, None] * value[-num_seen:]).sum(0, keepdim=True)

    def scan(self, layer: int, decay: Tensor, update: Tensor) -> Tensor:
        self.states[layer] = decay * self.states.get(layer, torch.zeros_like(update)) + update
        return self.states[layer]


def generate(
    model: Transformer, prompt: list[int], num_new_tokens: int, sample: int = 0, cache: DenseCache | None = None
) -> list[int]:
    """Return the greedy continuation of a prompt that begins with the best token (sample 0), or the next best, ..."""
    device, cache, tokens = model.embedding.device, cache or DenseCache(model.config), list(prompt)
    for position in range(len(prompt) + num_new_tokens - 1):
        token = torch.tensor([tokens[position]], device=device)
        logits = model.forward(token, torch.tensor([position], device=device), cache)[0]
        if position == len(tokens) - 1:
            tokens.append(int(logits.argsort(descending=True)[sample if position == len(prompt) - 1 else 0]))
    return tokens[len(prompt) :]
