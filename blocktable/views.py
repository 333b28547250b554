"""The sets of buffers of one table, and the views of them that steady steps hand out again (R17)."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from blocktable.arrays import Array
from blocktable.config import BlockTableConfig
from blocktable.errors import ArgumentError, ConfigError, DtypeError
from blocktable.inputs import torch_modes_off
from blocktable.layouts import Layout
from blocktable.overlaps import OutputMemory
from blocktable.protocols import Batch, BlockStore, Step, StepBuffers
from blocktable.streams import address_of

if TYPE_CHECKING:  # a plan is made of the views
    from blocktable.batches import StepPlan

Kept = TypeVar("Kept")

MAX_CACHED_VIEWS = 1024
"""Views kept for each set of buffers, those used last; an engine that pads uses a few dozen."""
MAX_PLANS = 256
"""Plans of steps kept for each set of buffers, some 2 KB each; the oldest goes. As many as most engines decode requests
in one step."""


def batch_key(num_reqs: int, idx_mapping: Array | None, num_computed_tokens: Array | None) -> tuple[Any, Any]:
    """Return what tells the batch tables of two batches apart: requests and rows, and what cuts windows out.

    By the values of host arrays, and by the address of device arrays: looking into those would wait.
    """
    return (num_reqs, _array_key(idx_mapping)), _array_key(num_computed_tokens)


def _array_key(array: Array | None) -> Any:
    if array is None:
        return None
    if type(array) is np.ndarray:
        return array.tobytes()
    try:
        if isinstance(array, np.ndarray):  # of an emulated device
            return int(array.ctypes.data)
        return address_of(array)
    except DtypeError:
        return object()  # it says no address: no batch is taken for this one


@dataclass(slots=True)
class Views:
    """What is known of one set of buffers.

    Attributes:
        memory: where its arrays lie.
        plans: of the steps that write it, by what the inputs are and what is asked for.
        held: the batch that its tables hold, as `batch_key` names it. None: none.
        held_commits: the table's commits with changes at that time.
    """

    memory: OutputMemory
    plans: OrderedDict[Any, StepPlan] = field(default_factory=OrderedDict)
    block_tables: OrderedDict[tuple[int, bool, bool], tuple[Array, ...]] = field(default_factory=OrderedDict)
    slot_mappings: OrderedDict[int, tuple[Array, ...]] = field(default_factory=OrderedDict)
    held: Any = None
    held_commits: int = 0

    def keep_plan(self, key: Any, plan: StepPlan) -> None:
        """Keep a plan in place of the oldest one. key: its first part is None for arrays whose form is not known."""
        if key[0] is None:
            return
        if len(self.plans) >= MAX_PLANS:
            self.plans.popitem(last=False)  # a dict would search for its first item
        self.plans[key] = plan


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
        try:
            buffers = self._store.create_buffers()
        except MemoryError as error:
            raise ConfigError(
                f"A set of buffers does not fit the memory: {len(self._config.groups)} groups of "
                f"{self._config.max_num_batched_tokens} slots, and {self._config.max_num_reqs} batch rows; lower "
                "max_num_batched_tokens or max_num_reqs."
            ) from error
        named = (("block_tables", buffers.block_tables), ("slot_mappings", buffers.slot_mappings))
        outputs = [
            (f"the set's {name}[{group}]", array) for name, arrays in named for group, array in enumerate(arrays)
        ]
        self._sets[buffers] = Views(OutputMemory(outputs))
        return buffers

    def of(self, buffers: Any) -> Views:
        """Return what is known of a set, and refuse what is not a set of this table."""
        try:
            return self._sets[buffers]
        except (KeyError, TypeError, ValueError):  # what is not hashable, or takes no weak reference
            raise ArgumentError("out must be a set of buffers that this table's create_buffers() made.") from None

    def forget_batches(self) -> None:
        """Note that no set holds a batch any more."""
        for views in self._sets.values():
            views.held = None

    def block_tables(self, buffers: StepBuffers, batch: Batch) -> tuple[Array, ...]:
        """Return the batch tables of a batch; with the identity they are the table's own first rows (R10.9)."""
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

    def require_held(
        self, buffers: StepBuffers, batch: Batch, num_commits: int, layout: Layout, groups: Sequence[int]
    ) -> None:
        """Refuse to hand out batch tables, as an export, that hold another batch (R26).

        Args:
            buffers: the set.
            batch: what is exported.
            num_commits: the table's commits with changes so far.
            layout: of the export.
            groups: its groups.
        """
        if all(self.is_own_rows(group, batch) for group in groups):
            return
        views = self._sets[buffers]
        parts = 2 if any(self._config.groups[group].cut_window is not None for group in groups) else 1
        key = batch_key(batch.num_reqs, batch.idx_mapping, batch.num_computed_tokens)
        is_same = views.held is not None and views.held[:parts] == key[:parts]
        if is_same and views.held_commits == num_commits:
            return
        what = "holds the batch as it was before the last commit" if is_same else "holds another batch, or none"
        raise ArgumentError(
            f"{layout.name!r} reads the batch table itself, which {what}: gather or step this batch into the set first "
            "(the same idx_mapping and num_computed_tokens, and no commit of changes since), or pass the result of "
            "create_export() as out=, a copy that is right for any batch."
        )

    def slot_mappings(self, buffers: StepBuffers, num_tokens_padded: int) -> tuple[Array, ...]:
        """Return the first slots of each group."""

        def make() -> tuple[Array, ...]:
            return tuple(slots[:num_tokens_padded] for slots in buffers.slot_mappings)

        return _cached(self._sets[buffers].slot_mappings, num_tokens_padded, make)

    def step(self, buffers: StepBuffers, batch: Batch, num_tokens_padded: int) -> Step:
        """Return what a step hands out."""
        return Step(self.block_tables(buffers, batch), buffers.slot_mappings, num_tokens_padded)


def _view_key(batch: Batch) -> tuple[int, bool, bool]:
    return batch.num_reqs_padded, batch.idx_mapping is None, batch.num_computed_tokens is not None


def _cached(cache: OrderedDict[Any, Kept], key: Any, make: Callable[[], Kept]) -> Kept:
    """Return what is kept for a key, or make it; an engine that never pads asks for every size, so the oldest goes."""
    found = cache.get(key)
    if found is not None:
        cache.move_to_end(key)
        return found
    with torch_modes_off():
        found = cache[key] = make()
    if len(cache) > MAX_CACHED_VIEWS:
        cache.popitem(last=False)
    return found
