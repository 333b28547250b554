"""The sets of buffers of one table, and the views of them that steady steps hand out again (R17)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from blocktable.config import BlockTableConfig
from blocktable.errors import ArgumentError
from blocktable.protocols import Array, Batch, BlockStore, Step, StepBuffers

MAX_CACHED_VIEWS = 1024
"""Views and steps kept for each set of buffers, those used last; an engine that pads uses a few dozen."""


@dataclass(slots=True)
class Views:
    """What is known of one set of buffers.

    Attributes:
        held: the batch that its tables hold, as `batch_key` names it. None: none.
        held_commits: the table's commits with changes at that time.
    """

    block_tables: dict[tuple[int, bool, bool], tuple[Array, ...]] = field(default_factory=dict)
    slot_mappings: dict[int, tuple[Array, ...]] = field(default_factory=dict)
    steps: dict[tuple[int, bool, bool, int], Step] = field(default_factory=dict)
    held: Any = None
    held_commits: int = 0


class BufferViews:
    """Views of the sets of buffers of a table, the same objects for the same sizes.

    Args:
        config: the geometry.
        store: the table's memory.
    """

    def __init__(self, config: BlockTableConfig, store: BlockStore) -> None:
        self._config, self._store = config, store
        self._sets: weakref.WeakKeyDictionary[StepBuffers, Views] = weakref.WeakKeyDictionary()

    def __iter__(self) -> Iterator[StepBuffers]:
        """Go through the sets that live."""
        return iter(list(self._sets))

    def create(self) -> StepBuffers:
        """Return a new set."""
        buffers = self._store.create_buffers()
        self._sets[buffers] = Views()
        return buffers

    def of(self, buffers: StepBuffers) -> Views:
        """Return what is known of a set."""
        return self._sets[buffers]

    def forget_batches(self) -> None:
        """Note that no set holds a batch any more."""
        for views in self._sets.values():
            views.held = None

    def require(self, buffers: Any) -> None:
        """Refuse what is no set of this table."""
        if not isinstance(buffers, StepBuffers) or buffers not in self._sets:
            raise ArgumentError("out must be a set of buffers that this table's create_buffers() made.")

    def block_tables(self, buffers: StepBuffers, batch: Batch) -> tuple[Array, ...]:
        """Return the batch tables of a batch; with the identity they are the table's own first rows (R10)."""
        views = self._sets[buffers]
        key = _view_key(batch)

        def make() -> tuple[Array, ...]:
            tables = enumerate(buffers.block_tables)
            return tuple(
                (self._store.table(group) if self.is_own_rows(group, batch) else table)[: batch.num_reqs_padded]
                for group, table in tables
            )

        return _cached(views.block_tables, key, make)

    def is_own_rows(self, group: int, batch: Batch) -> bool:
        """Say whether a batch's table of a group is the table's own first rows: identity, and no window to cut out."""
        is_cut = batch.num_computed_tokens is not None and self._config.groups[group].cut_window is not None
        return batch.idx_mapping is None and not is_cut

    def slot_mappings(self, buffers: StepBuffers, num_tokens_padded: int) -> tuple[Array, ...]:
        """Return the first slots of each group."""

        def make() -> tuple[Array, ...]:
            return tuple(slots[:num_tokens_padded] for slots in buffers.slot_mappings)

        return _cached(self._sets[buffers].slot_mappings, num_tokens_padded, make)

    def step(self, buffers: StepBuffers, batch: Batch, num_tokens_padded: int) -> Step:
        """Return what a step hands out."""

        def make() -> Step:
            return Step(self.block_tables(buffers, batch), self.slot_mappings(buffers, num_tokens_padded))

        return _cached(self._sets[buffers].steps, (*_view_key(batch), num_tokens_padded), make)


def _view_key(batch: Batch) -> tuple[int, bool, bool]:
    return batch.num_reqs_padded, batch.idx_mapping is None, batch.num_computed_tokens is not None


def _cached(cache: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """Return what is kept for a key, or make it; an engine that never pads asks for every size, so the oldest goes."""
    found = cache.pop(key, None)
    if found is None:
        found = make()
        if len(cache) >= MAX_CACHED_VIEWS:
            del cache[next(iter(cache))]
    cache[key] = found
    return found
