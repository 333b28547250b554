"""The metadata of a step, whole: what an attention backend takes for each group (R33)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blocktable.arrays import Array
from blocktable.batches import SeqLens, StepPlan
from blocktable.config import BlockTableConfig
from blocktable.errors import ArgumentError
from blocktable.exports import Export
from blocktable.layouts import LOCAL_LENGTHS, Layout, LayoutName, find_layout


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """One group's part of a step.

    Attributes:
        block_table: [num_reqs_padded, width] int32. The batch table.
        slot_mapping: [num_tokens_padded] of the slot dtype.
        seq_lens: [num_reqs] int32 as given; for a group that ranks share [num_reqs_padded], this rank's lengths.
        export: the batch in the layout that was asked for; None where none was. Groups of one geometry have one.
        entries: this group's array of the export; None for no export, and for lengths, which have none.
    """

    block_table: Array
    slot_mapping: Array
    seq_lens: Array
    export: Export | None
    entries: Array | None


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """A step as an attention backend takes it. Valid until the next call that writes the same set of buffers.

    Attributes:
        num_reqs: requests.
        num_reqs_padded: batch rows.
        query_start_loc: [num_reqs + 1] int32, as given. First token of each request.
        seq_lens: [num_reqs] int32, as given: tokens of each sequence, over all ranks; or a tuple of one for each group.
        groups: one for each group.
        max_query_len: tokens of the longest query in this step, as given; a host number, None where it was not.
        max_seq_len: tokens of the longest sequence, as given; a host number, None where it was not.
    """

    num_reqs: int
    num_reqs_padded: int
    query_start_loc: Array
    seq_lens: SeqLens
    groups: tuple[GroupMetadata, ...]
    max_query_len: int | None = None
    max_seq_len: int | None = None


@dataclass(frozen=True)
class SharedExport:
    """Groups that one export serves: of one layout, one geometry and one array of lengths.

    Attributes:
        layout: the layout.
        groups: the groups.
    """

    layout: Layout
    groups: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class MetadataPlan:
    """Which exports a step makes for some layouts.

    Attributes:
        shared_exports: the exports.
        export_of_group: group -> (its export, its place there); None where it has no export.
        lengths: group -> the export that brings this rank's lengths of it; None where ranks do not share it.
    """

    shared_exports: tuple[SharedExport, ...]
    export_of_group: tuple[tuple[int, int] | None, ...]
    lengths: tuple[int | None, ...]


Layouts = LayoutName | Layout | None | Sequence[LayoutName | Layout | None]
"""One layout for all groups, or one for each; None: no export."""


def layouts_per_group(config: BlockTableConfig, layouts: Layouts) -> tuple[Layout | None, ...]:
    """Return one layout, or None, for each group.

    Raises:
        ArgumentError: a sequence of another length.
        ConfigError: there is no layout of that name.
    """
    num_groups = len(config.groups)
    given: Any = [layouts] * num_groups if layouts is None or isinstance(layouts, str | Layout) else layouts
    if not isinstance(given, Sequence) or len(given) != num_groups:
        raise ArgumentError(f"layouts must be one layout, or one (or None) for each of the {num_groups} groups.")
    return tuple(None if layout is None else find_layout(layout) for layout in given)


def is_split_over_ranks(config: BlockTableConfig, group: int) -> bool:
    """Say whether context-parallel ranks share a group's tokens."""
    return config.groups[group].is_sharded and config.context_parallel.world_size > 1


def lengths_per_group(config: BlockTableConfig, seq_lens: Any) -> tuple[SeqLens, tuple[int, ...]]:
    """Return lengths as a step keeps them, and for each group the first one whose array it shares.

    Args:
        seq_lens: [num_reqs] int32, or a list or tuple of one such array for each group.

    Raises:
        ArgumentError: another number of arrays.
    """
    num_groups = len(config.groups)
    if not isinstance(seq_lens, list | tuple):
        return seq_lens, (0,) * num_groups
    if len(seq_lens) != num_groups:
        raise ArgumentError(
            f"seq_lens must be one array, or one for each of the {num_groups} groups; got {len(seq_lens)}."
        )
    first_with = [next(i for i, other in enumerate(seq_lens) if other is array) for array in seq_lens]
    return tuple(seq_lens), tuple(first_with)


def lengths_of(seq_lens: SeqLens, group: int) -> Array:
    """Return the array of a group."""
    return seq_lens[group] if isinstance(seq_lens, tuple) else seq_lens


def make_plan(config: BlockTableConfig, layouts: Sequence[Layout | None], lengths_from: Sequence[int]) -> MetadataPlan:
    """Put groups of one layout, geometry and array of lengths together, in the order of their first group.

    This rank's lengths depend on no block size: one export brings them for all groups that ranks share.

    Args:
        lengths_from: group -> the first group whose array of lengths it shares.
    """
    members: dict[tuple[Any, ...], list[int]] = {}
    for group, layout in enumerate(layouts):
        if layout is not None:
            geometry = (config.groups[group].tokens_per_column, is_split_over_ranks(config, group), config.width(group))
            members.setdefault((layout, lengths_from[group], *geometry), []).append(group)
    shared_exports = [SharedExport(layout, tuple(groups)) for (layout, *_), groups in members.items()]
    lengths: list[int | None] = [None] * len(config.groups)
    brought: dict[int, int] = {}  # first group with an array of lengths -> the export that brings this rank's
    for index, shared in enumerate(shared_exports):
        if shared.layout.kind in ("csr", "token_csr", "lengths") and is_split_over_ranks(config, shared.groups[0]):
            brought.setdefault(lengths_from[shared.groups[0]], index)
    for group in range(len(config.groups)):
        if is_split_over_ranks(config, group):
            if lengths_from[group] not in brought:
                brought[lengths_from[group]] = len(shared_exports)
                shared_exports.append(SharedExport(LOCAL_LENGTHS, (group,)))
            lengths[group] = brought[lengths_from[group]]
    export_of_group: list[tuple[int, int] | None] = [None] * len(config.groups)
    for index, shared in enumerate(shared_exports[: len(members)]):
        for place, group in enumerate(shared.groups):
            export_of_group[group] = (index, place)
    return MetadataPlan(tuple(shared_exports), tuple(export_of_group), tuple(lengths))


class MetadataPlans:
    """The plans of a table's steps, made once for each choice of layouts and shared lengths.

    Args:
        config: the geometry.
    """

    def __init__(self, config: BlockTableConfig) -> None:
        self._config = config
        self._plans: dict[tuple[tuple[Layout | None, ...], tuple[int, ...]], MetadataPlan] = {}

    def plan(self, layouts: Layouts, seq_lens: Any) -> tuple[MetadataPlan, SeqLens]:
        """Return which exports a step makes, and its lengths: one array, or a tuple of one for each group."""
        chosen = layouts_per_group(self._config, layouts)
        lens, lengths_from = lengths_per_group(self._config, seq_lens)
        found = self._plans.get((chosen, lengths_from))
        if found is None:
            found = self._plans[chosen, lengths_from] = make_plan(self._config, chosen, lengths_from)
        return found, lens


def make_metadata(
    plan: MetadataPlan,
    planned: StepPlan,
    query_start_loc: Array,
    *,
    seq_lens: SeqLens,
    max_query_len: int | None,
    max_seq_len: int | None,
) -> StepMetadata:
    """Bundle what a step and its exports made."""
    exports, step = planned.exports, planned.step
    groups = []
    for group, place in enumerate(plan.export_of_group):
        export = entries = None
        if place is not None:
            export = exports[place[0]].result
            entries = export.entries[place[1]] if export.entries else None
        index = plan.lengths[group]
        lens = lengths_of(seq_lens, group) if index is None else exports[index].result.lengths
        groups.append(GroupMetadata(step.block_tables[group], step.slot_mappings[group], lens, export, entries))
    return StepMetadata(
        *(planned.num_reqs, planned.num_reqs_padded, query_start_loc, seq_lens, tuple(groups)),
        *(max_query_len, max_seq_len),
    )
