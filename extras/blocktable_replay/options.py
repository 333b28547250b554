"""What a replay is asked to do."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from blocktable import NULL_BLOCK_ID, PAD_SLOT_ID, BlockTableConfig, ConfigError, ContextParallel, KVCacheGroup

RowStyle = Literal["stable", "dense"]

DEFAULT_CACHE_TOKENS = 524_288
"""Tokens that each group's cache holds where `num_blocks` is not given: 64 GiB at 128 KiB a token."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """How a trace becomes steps.

    Attributes:
        groups: the KV cache groups.
        num_blocks: manager blocks of every group that does not say its own. None: as many as hold
            `DEFAULT_CACHE_TOKENS` tokens.
        null_block_id: that of every group that does not say its own. -1: block 0 is given out like the others.
        pad_slot_id: that of every group that does not say its own.
        max_num_reqs: requests of a batch, at most.
        max_num_rows: rows of the table. None: `max_num_reqs`. Either bounds the live requests.
        max_num_batched_tokens: token budget of a step.
        max_model_len: tokens of the longest request.
        context_parallel: which rank of how many this is.
        rows: "stable" drives the table with an `idx_mapping`, "dense" moves rows so that batch index and row are one.
        step_ms: milliseconds that a step takes on the simulated clock.
        all_at_once: whether every request is there from the start.
        lookahead: draft tokens that a decode step verifies beside the next token; rejected ones are rolled back.
        share_prefixes: whether requests share full blocks of equal hashes, where the trace has them.
        fork_every: every so many requests one asks for two samples, the second forks off. 0: none.
        sleep_every: every so many steps the device loses its memory. 0: never.
        dummy_every: every so many steps a dummy step runs. 0: never.
    """

    groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(block_size=16),)
    num_blocks: int | None = None
    null_block_id: int = NULL_BLOCK_ID
    pad_slot_id: int = PAD_SLOT_ID
    max_num_reqs: int = 256
    max_num_rows: int | None = None
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131_072
    context_parallel: ContextParallel = field(default_factory=ContextParallel)
    rows: RowStyle = "stable"
    step_ms: float = 30.0
    all_at_once: bool = False
    lookahead: int = 0
    share_prefixes: bool = True
    fork_every: int = 0
    sleep_every: int = 0
    dummy_every: int = 0

    def config(self) -> BlockTableConfig:
        """Return the table's configuration; every group has its `num_blocks`.

        Raises:
            ConfigError: a value is impossible, or two of them clash.
        """
        for index, group in enumerate(self.groups):
            if group.slot_mode != "linear" and group.blocks_per_row is None:
                raise ConfigError(
                    f'group {index}: with slot_mode="{group.slot_mode}" each request has a fixed state; say how many '
                    "blocks it takes with blocks_per_row."
                )
        return BlockTableConfig(
            groups=[self._sized(group) for group in self.groups],
            max_num_reqs=self.max_num_reqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            lookahead_tokens=self.lookahead,
            context_parallel=self.context_parallel,
            max_num_rows=self.max_num_rows,
        )

    def _sized(self, group: KVCacheGroup) -> KVCacheGroup:
        null, pad = group.null_block_id, group.pad_slot_id
        return dataclasses.replace(
            group,
            num_blocks=self._num_blocks(group),
            null_block_id=self.null_block_id if null == NULL_BLOCK_ID else null,
            pad_slot_id=self.pad_slot_id if pad == PAD_SLOT_ID else pad,
            # Requests begin with holes where a window has let cached blocks go.
            allow_null=group.allow_null or group.sliding_window is not None,
        )

    def _num_blocks(self, group: KVCacheGroup) -> int:
        num_blocks = self.num_blocks if group.num_blocks is None else group.num_blocks
        if num_blocks is None and group.slot_mode != "linear":
            return (group.blocks_per_row or 1) * self.max_num_reqs + 1
        if num_blocks is None:
            return -(-DEFAULT_CACHE_TOKENS // tokens_per_block(group, self.context_parallel)) + 1
        return num_blocks


def tokens_per_block(group: KVCacheGroup, context_parallel: ContextParallel) -> int:
    """Return how many tokens of a request one manager block stands for, those on other ranks counted."""
    return group.block_size * (context_parallel.world_size if group.is_sharded else 1)


def describe_options(options: ReplayOptions) -> dict[str, Any]:
    """Return the options that are not in the table's configuration."""
    in_config = {field.name for field in dataclasses.fields(BlockTableConfig)}
    in_groups = {field.name for field in dataclasses.fields(KVCacheGroup)}
    return {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if field.name not in in_config | in_groups
    }


def as_pairs(values: Any) -> str:
    """Return the fields of a dataclass that are not their defaults, as `key=value,...`."""
    return ",".join(
        f"{field.name}={str(value).lower() if isinstance(value, bool) else value}"
        for field in dataclasses.fields(values)
        if (value := getattr(values, field.name)) != field.default
    )
