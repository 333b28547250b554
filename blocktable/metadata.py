"""The metadata of a step, whole: what an attention backend takes for each group (R33)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blocktable.config import BlockTableConfig
from blocktable.errors import ArgumentError
from blocktable.exports import Export
from blocktable.layouts import LOCAL_LENGTHS, Layout, find_layout
from blocktable.protocols import Array, Batch, Step


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
        seq_lens: [num_reqs] int32, as given. Tokens of each sequence, over all ranks.
        groups: one for each group.
        max_query_len: tokens of the longest query in this step, as given; a host number, None where it was not.
        max_seq_len: tokens of the longest sequence, as given; a host number, None where it was not.
    """

    num_reqs: int
    num_reqs_padded: int
    query_start_loc: Array
    seq_lens: Array
    groups: tuple[GroupMetadata, ...]
    max_query_len: int | None = None
    max_seq_len: int | None = None


@dataclass(frozen=True)
class Family:
    """Groups that one export serves: of one layout and one geometry.

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
        families: the exports.
        places: group -> (its family, its place there); None where it has no export.
        lengths: the family whose lengths are those of every group that ranks share; None where no group is.
    """

    families: tuple[Family, ...]
    places: tuple[tuple[int, int] | None, ...]
    lengths: int | None


Layouts = str | Layout | None | Sequence[str | Layout | None]
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


def is_shared_out(config: BlockTableConfig, group: int) -> bool:
    """Say whether context-parallel ranks share a group's tokens."""
    return config.groups[group].is_sharded and config.context_parallel.world_size > 1


def make_plan(config: BlockTableConfig, layouts: Sequence[Layout | None]) -> MetadataPlan:
    """Put groups of one layout and geometry together, in the order of their first group.

    This rank's lengths depend on no block size: one export brings them for all groups that ranks share.
    """
    members: dict[tuple[Any, ...], list[int]] = {}
    for group, layout in enumerate(layouts):
        if layout is not None:
            geometry = (config.groups[group].tokens_per_column, is_shared_out(config, group), config.width(group))
            members.setdefault((layout, *geometry), []).append(group)
    families = [Family(layout, tuple(groups)) for (layout, *_), groups in members.items()]
    shared_out = [group for group in range(len(config.groups)) if is_shared_out(config, group)]
    lengths = None
    if shared_out:
        bring_them = [
            index
            for index, family in enumerate(families)
            if family.layout.kind in ("csr", "token_csr", "lengths") and family.groups[0] in shared_out
        ]
        if not bring_them:
            families.append(Family(LOCAL_LENGTHS, (shared_out[0],)))
        lengths = bring_them[0] if bring_them else len(families) - 1
    places: list[tuple[int, int] | None] = [None] * len(config.groups)
    for index, family in enumerate(families[: len(members)]):
        for place, group in enumerate(family.groups):
            places[group] = (index, place)
    return MetadataPlan(tuple(families), tuple(places), lengths)


def make_metadata(
    plan: MetadataPlan,
    step: Step,
    exports: Sequence[Export],
    batch: Batch,
    *,
    config: BlockTableConfig,
    max_query_len: int | None,
    max_seq_len: int | None,
) -> StepMetadata:
    """Bundle what a step and its exports made."""
    groups = []
    for group, place in enumerate(plan.places):
        export = entries = None
        if place is not None:
            export = exports[place[0]]
            entries = export.entries[place[1]] if export.entries else None
        lens = batch.seq_lens
        if plan.lengths is not None and is_shared_out(config, group):
            lens = exports[plan.lengths].lengths
        groups.append(GroupMetadata(step.block_tables[group], step.slot_mappings[group], lens, export, entries))
    return StepMetadata(
        *(batch.num_reqs, batch.num_reqs_padded, batch.query_start_loc, batch.seq_lens, tuple(groups)),
        *(max_query_len, max_seq_len),
    )
