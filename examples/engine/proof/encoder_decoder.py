"""Serves an encoder-decoder through two groups, and holds its tokens against a dense cache, token for token."""

import random
from functools import cache

import torch
from torch import Tensor

import blocktable as bt
from encoder_decoder import CROSS, EncoderDecoder, Server, Task
from model import FULL, ModelConfig
from proof.dense_cache import DenseCache, generate
from proof.variants import Variant, attention


class DenseSource(DenseCache):
    """Its cross-attention sees the source's keys and values, and keeps none of a decoder's tokens."""

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.keys[layer], self.values[layer] = key, value

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.config.layers[layer] == CROSS:
            key, value = key[:0], value[:0]
        return super().attend(layer, query, key, value)


@cache
def tasks() -> tuple[tuple[list[int], list[int], int], ...]:
    """Return the source, the decoder's first tokens and the number of new ones of each task."""
    chooser = random.Random(13)

    def tokens(least: int, most: int) -> list[int]:
        return [chooser.randrange(ModelConfig.vocab_size) for _ in range(chooser.randint(least, most))]

    return tuple((tokens(1, 40), tokens(1, 9), chooser.randint(4, 20)) for _ in range(12))


@cache
def model_and_truth(device: str) -> tuple[EncoderDecoder, list[list[int]]]:
    """Return the model and what the dense cache generates; in float64 on a CPU, in float32 on a GPU."""
    dtype = torch.float64 if device == "cpu" else torch.float32
    model = EncoderDecoder(ModelConfig(layers=(FULL, CROSS, FULL, CROSS)), torch.device(device), dtype)
    truth = []
    for source, prompt, num_new_tokens in tasks():
        dense = DenseSource(model.config)
        model.encode(torch.tensor(source, device=device), dense)
        truth.append(generate(model, prompt, num_new_tokens, cache=dense))
    return model, truth


def table_config() -> bt.BlockTableConfig:
    """Return the geometry: fewer rows than tasks, so that rows and blocks have had other owners."""
    return bt.BlockTableConfig(
        groups=[
            bt.KVCacheGroup(block_size=4, num_blocks=40),
            bt.KVCacheGroup(block_size=8, kernel_block_size=4, slot_mode="cross", num_blocks=24, blocks_per_row=5),
        ],
        max_num_reqs=4,
        max_num_batched_tokens=40,
        max_model_len=32,
    )


def run_encoder_decoder(variant: Variant, config: bt.BlockTableConfig | None = None) -> list[int]:
    """Serve the tasks and return those whose tokens differ from the dense cache's."""
    model, truth = model_and_truth(variant.device)
    server = Server(model, config or table_config(), variant.backend, attention(variant.attention))
    for number, (source, prompt, num_new_tokens) in enumerate(tasks()):
        task = Task((number, 0), list(prompt), len(prompt), len(prompt) + num_new_tokens, source=source)
        server.waiting.append(task)
    while server.step():
        pass
    server.table.commit()
    server.table.verify()
    if any(sum(pool.num_holders) for pool in server.pools) or server.table.num_blocks_per_row.any():
        raise RuntimeError("A task that has ended still holds blocks.")
    if found := server.table.collect_findings():
        raise RuntimeError(f"step {found[0].step}: {found[0].message}")
    return [number for number, tokens in enumerate(truth) if server.finished[number, 0] != tokens]


def report_encoder_decoder(variant: Variant) -> tuple[bool, str]:
    """Return whether all tokens are the dense cache's, and a verdict to print."""
    wrong, tokens = run_encoder_decoder(variant), model_and_truth(variant.device)[1]
    served = f"{len(tokens)} tasks, {sum(map(len, tokens))} new tokens"
    return not wrong, (
        f"{'FAIL' if wrong else 'PASS'} encoder-decoder, {variant.backend} on {variant.device}, attention in "
        f"{variant.attention}: {served}" + (f"; other tokens in tasks {wrong}" if wrong else "")
    )
