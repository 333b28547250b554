"""The sets of buffers of one table, and the views of them that steady steps hand out again (R17)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from blocktable.config import BlockTableConfig
from blocktable.errors import ArgumentError
from blocktable.protocols import Array, Batch, BlockStore, Step, StepBuffers

MAX_CACHED_VIEWS = 4096
"""Views and steps kept for each set of buffers; an engine that pads uses a few dozen."""


@dataclass(slots=True)
class _Views:
    block_tables: dict[tuple[int, bool, bool], tuple[Array, ...]] = field(default_factory=dict)
    slot_mappings: dict[int, tuple[Array, ...]] = field(default_factory=dict)
    steps: dict[tuple[int, bool, bool, int], Step] = field(default_factory=dict)


class BufferViews:
    """Views of the sets of buffers of a table, the same objects for the same sizes.

    Args:
        config: the geometry.
        store: the table's memory.
    """

    def __init__(self, config: BlockTableConfig, store: BlockStore) -> None:
        self._config, self._store = config, store
        self._sets: weakref.WeakKeyDictionary[StepBuffers, _Views] = weakref.WeakKeyDictionary()

    def __iter__(self) -> Iterator[StepBuffers]:
        """Go through the sets that live."""
        return iter(list(self._sets))

    def create(self) -> StepBuffers:
        """Return a new set."""
        buffers = self._store.create_buffers()
        self._sets[buffers] = _Views()
        return buffers

    def require(self, buffers: Any) -> None:
        """Refuse what is no set of this table."""
        if not isinstance(buffers, StepBuffers) or buffers not in self._sets:
            raise ArgumentError("out must be a set of buffers that this table's create_buffers() made.")

    def block_tables(self, buffers: StepBuffers, batch: Batch) -> tuple[Array, ...]:
        """Return the batch tables of a batch; with the identity they are the table's own first rows (R10)."""
        views = self._sets[buffers]
        num_rows, identity, windowed = key = _view_key(batch)
        found = views.block_tables.get(key)
        if found is None:
            found = tuple(
                (self._store.table(index) if identity and not (windowed and group.sliding_window) else table)[:num_rows]
                for index, (group, table) in enumerate(zip(self._config.groups, buffers.block_tables, strict=True))
            )
            _remember(views.block_tables, key, found)
        return found

    def slot_mappings(self, buffers: StepBuffers, num_tokens_padded: int | None) -> tuple[Array, ...]:
        """Return the first slots of each group; None: all."""
        if num_tokens_padded is None:
            return buffers.slot_mappings
        views = self._sets[buffers]
        found = views.slot_mappings.get(num_tokens_padded)
        if found is None:
            found = tuple(slots[:num_tokens_padded] for slots in buffers.slot_mappings)
            _remember(views.slot_mappings, num_tokens_padded, found)
        return found

    def step(self, buffers: StepBuffers, batch: Batch, num_tokens_padded: int | None) -> Step:
        """Return what a step hands out."""
        views = self._sets[buffers]
        key = (*_view_key(batch), -1 if num_tokens_padded is None else num_tokens_padded)
        found = views.steps.get(key)
        if found is None:
            found = Step(self.block_tables(buffers, batch), self.slot_mappings(buffers, num_tokens_padded))
            _remember(views.steps, key, found)
        return found


def _view_key(batch: Batch) -> tuple[int, bool, bool]:
    return batch.num_reqs_padded, batch.idx_mapping is None, batch.num_computed_tokens is not None


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    if len(cache) >= MAX_CACHED_VIEWS:  # an engine that never pads asks for every size
        cache.clear()
    cache[key] = value
