"""Mutants of the core: one method replaced, the numpy backend, the suite's row, call and geometry cases, or exports.

`python wrong_core.py FOLDER` writes one verdict for each mutant, and one for the core as it is, in one process:
importing pytest anew for each would take longer than the runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import blocktable.export_calls
import blocktable.exports
import blocktable.metadata
import blocktable.table
from blocktable import BlockTableConfig, ContextParallel, KVCacheGroup, RowCapacityError
from blocktable.backend import Writes
from blocktable.batches import BatchChecks, StepPlan
from blocktable.exports import ExportSets
from blocktable.host_exports import export_on_host as export_on_host_of_the_core
from blocktable.inputs import read_step as step_inputs
from blocktable.metadata import MetadataPlan, SharedExport
from blocktable.overlaps import OutputMemory
from blocktable.requests import Requests
from blocktable.rows import NumpyRows
from blocktable.table import BlockTable
from blocktable.views import BufferViews
from blocktable_conformance.__main__ import main as conformance

Patch = Callable[[pytest.MonkeyPatch], None]

MUTANTS: dict[str, tuple[str, Patch]] = {}
"""Mutant -> the rule that a failed assertion must name, and what it replaces."""

CASES = "(test_cases or test_requests) and not partition"
EXPORT_CASES = (
    "(test_exports.py or test_export_parts.py or test_export_host.py) "
    "and not on_the_host_are and not equal and not any_history and not long_rows"
)
EXPORT_MUTANTS: set[str] = set()
"""Those that the cases of exports must catch."""


def _mutant(rule: str) -> Callable[[Patch], Patch]:
    def register(patch: Patch) -> Patch:
        MUTANTS[patch.__name__] = rule, patch
        return patch

    return register


def _export_mutant(rule: str) -> Callable[[Patch], Patch]:
    def register(patch: Patch) -> Patch:
        EXPORT_MUTANTS.add(patch.__name__)
        return _mutant(rule)(patch)

    return register


@_mutant("R4")
def move_leaves_its_source(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockTable, "move_row", BlockTable.copy_row)


@_mutant("R4")
def repeated_rows_are_taken(patch: pytest.MonkeyPatch) -> None:
    right = NumpyRows.check_rows
    patch.setattr(NumpyRows, "check_rows", lambda self, name, rows, advice="": right(self, name, rows, advice=None))


@_mutant("R4")
def copies_read_what_they_wrote(patch: pytest.MonkeyPatch) -> None:
    def copy_rows(self: BlockTable, src: Any, dst: Any) -> None:
        checked = self._rows.check_rows("dst", dst)
        for source, target in zip(self._rows.check_rows("src", src, advice=None).tolist(), checked, strict=False):
            self.copy_row(source, int(target))

    patch.setattr(BlockTable, "copy_rows", copy_rows)


@_mutant("R4")
def remaps_chain(patch: pytest.MonkeyPatch) -> None:
    right = NumpyRows.remap

    def remap(self: NumpyRows, group: int, old_ids: Any, new_ids: Any) -> None:
        for old, new in zip(*self.check_mapping(group, old_ids, new_ids), strict=True):
            right(self, group, [int(old)], [int(new)])

    patch.setattr(NumpyRows, "remap", remap)


@_mutant("R4")
def replacements_may_pass_the_end(patch: pytest.MonkeyPatch) -> None:
    right = NumpyRows.replace

    def replace(self: NumpyRows, rows: Any, group: int, starts: Any, block_ids: Any, counts: Any) -> None:
        filled = self.filled
        self.filled = np.full_like(filled, self._max_columns.min())
        try:
            right(self, rows, group, starts, block_ids, counts)
        finally:
            self.filled = filled

    patch.setattr(NumpyRows, "replace", replace)


@_mutant("R4")
def holes_are_common(patch: pytest.MonkeyPatch) -> None:
    def common_blocks(self: BlockTable, rows: Any, group: int) -> int:
        ids = [self.block_ids(int(row), group).tolist() for row in self._rows.check_rows("rows", rows, advice=None)]
        index = self._group_index(group)
        count = 0
        for blocks in zip(*ids, strict=False):
            if len(set(blocks)) > 1:
                break
            count += 1
        return count if index >= 0 else 0

    patch.setattr(BlockTable, "common_blocks", common_blocks)


@_mutant("R9.8")
def a_row_set_again_is_sent_whole(patch: pytest.MonkeyPatch) -> None:
    right = NumpyRows._replace

    def replace(self: NumpyRows, rows: Any, columns: Any, values: Any) -> None:
        right(self, rows, columns, values)
        self.journal.mark(self._starts(rows), columns)

    patch.setattr(NumpyRows, "_replace", replace)


@_mutant("R5")
def tails_stay(patch: pytest.MonkeyPatch) -> None:
    nothing = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int32)
    patch.setattr(NumpyRows, "_nulls", lambda self, starts, columns: nothing)


@_mutant("R6")
def one_id_too_many_is_lost(patch: pytest.MonkeyPatch) -> None:
    """As numpy does: a list of one broadcasts into an empty slice."""
    right = NumpyRows.append

    def append(self: NumpyRows, rows: Any, block_ids: Any, counts: Any) -> None:
        try:
            right(self, rows, block_ids, counts)
        except RowCapacityError:
            if counts is not None or block_ids is None or len(block_ids) != 1:
                raise

    patch.setattr(NumpyRows, "append", append)


@_mutant("R6")
def groups_change_one_by_one(patch: pytest.MonkeyPatch) -> None:
    right = NumpyRows.append

    def append(self: NumpyRows, rows: Any, block_ids: Any, counts: Any) -> None:
        num_groups = self.arena.num_groups
        if num_groups == 1 or counts is not None or block_ids is None or len(block_ids) != num_groups:
            right(self, rows, block_ids, counts)
            return
        for group, ids in enumerate(block_ids):
            right(self, rows, [ids if index == group else None for index in range(num_groups)], None)

    patch.setattr(NumpyRows, "append", append)


@_mutant("R6")
def alignment_is_room(patch: pytest.MonkeyPatch) -> None:
    right = NumpyRows.__init__

    def init(self: NumpyRows, config: BlockTableConfig) -> None:
        right(self, config)
        self._max_columns = self._widths

    patch.setattr(NumpyRows, "__init__", init)


@_mutant("R7")
def any_id_is_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NumpyRows, "_refuse_ids", lambda self, group, ids, name="": None)


@_mutant("R8")
def nothing_appended_clears(patch: pytest.MonkeyPatch) -> None:
    right = BlockTable.append_row

    def append_row(self: BlockTable, row: int, block_ids: Any) -> None:
        if block_ids is None:
            self.clear_row(row)
        else:
            right(self, row, block_ids)

    patch.setattr(BlockTable, "append_row", append_row)


@_mutant("R2")
def a_block_repeats_its_first_kernel_block(patch: pytest.MonkeyPatch) -> None:
    def kernel_ids(self: NumpyRows, ids: Any, blocks: Any) -> Any:
        expansion = np.repeat(self.columns_per_block.ravel(), blocks.sum(1))
        return np.repeat(ids * expansion, expansion)

    patch.setattr(NumpyRows, "_kernel_ids", kernel_ids)


@_mutant("R9.6")
def a_commit_sends_everything(patch: pytest.MonkeyPatch) -> None:
    def writes(self: NumpyRows) -> Writes:
        size = self.arena.size
        return Writes(self.arena, np.zeros(1, np.int64), np.array([size], np.int32), self.mirror)

    patch.setattr(NumpyRows, "writes", writes)


@_mutant("R9.9")
def a_failed_commit_forgets(patch: pytest.MonkeyPatch) -> None:
    right = NumpyRows.writes

    def writes(self: NumpyRows) -> Writes:
        pending = right(self)
        self.journal.clear()
        return pending

    patch.setattr(NumpyRows, "writes", writes)


@_mutant("R10.10")
def occupied_padding_rows_are_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchChecks, "require_empty_rows", lambda self, start, stop, **options: None)


@_mutant("R15")
def tokens_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchChecks, "num_tokens", lambda self, num_tokens, num_tokens_padded, size=None: None)


@_mutant("R16")
def int32_slots_of_any_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockTableConfig, "_check_int32_slots", lambda self, index, group: None)


@_mutant("R10.10")
def padding_rows_are_looked_at_once(patch: pytest.MonkeyPatch) -> None:
    right = StepPlan.__init__

    def init(self: StepPlan, *arguments: Any, **options: Any) -> None:
        right(self, *arguments, **options)
        self.has_padding_rows = False

    patch.setattr(StepPlan, "__init__", init)


@_mutant("R17")
def arrays_of_one_length_are_one_kind(patch: pytest.MonkeyPatch) -> None:
    right = step_inputs

    def read_step(arrays: Any) -> Any:
        _, lengths, addresses = right(arrays)
        return "any", lengths, addresses

    patch.setattr(blocktable.table, "read_step", read_step)


@_mutant("R17")
def the_same_objects_are_the_same_arrays(patch: pytest.MonkeyPatch) -> None:
    right, seen = step_inputs, {}

    def read_step(arrays: Any) -> Any:
        key = tuple(map(id, arrays))
        if key not in seen:
            seen[key] = arrays, right(arrays)
        return seen[key][1]

    patch.setattr(blocktable.table, "read_step", read_step)


@_mutant("R17")
def true_is_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(blocktable.table, "type", lambda size: None, raising=False)


@_mutant("R17")
def a_plan_keeps_its_arrays(patch: pytest.MonkeyPatch) -> None:
    right, kept = StepPlan.__init__, []

    def init(self: StepPlan, batch: Any, *arguments: Any, **options: Any) -> None:
        kept.append(batch)
        right(self, batch, *arguments, **options)

    patch.setattr(StepPlan, "__init__", init)


@_mutant("R17")
def inputs_may_lie_in_outputs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OutputMemory, "refuse", lambda self, inputs: None)


@_mutant("R18")
def any_interleave_is_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockTableConfig, "_check_interleave", lambda self, index, group: None)


@_mutant("R19")
def every_rank_is_the_first(patch: pytest.MonkeyPatch) -> None:
    right = ContextParallel.local_lengths

    def local_lengths(self: ContextParallel, seq_lens: Any) -> Any:
        first = ContextParallel(world_size=self.world_size, interleave_size=self.interleave_size)
        return right(first, seq_lens)

    patch.setattr(ContextParallel, "local_lengths", local_lengths)


@_mutant("R24")
def waking_up_sends_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NumpyRows, "invalidate", lambda self: None)


# Exports.


@_export_mutant("R24")
def waking_up_leaves_exports(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ExportSets, "reset", lambda self, stream: None)


@_export_mutant("R25.18")
def any_group_is_exported(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(blocktable.exports, "_check_group", lambda *arguments: None)


@_export_mutant("R26")
def every_table_is_the_batch_table(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(blocktable.exports, "is_batch_table", lambda config, layout, groups: layout.kind == "table")


@_export_mutant("R26")
def no_table_is_the_batch_table(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(blocktable.exports, "is_batch_table", lambda config, layout, groups: False)


@_export_mutant("R28")
def entries_of_any_size(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(blocktable.exports, "_check_int32", lambda *arguments: None)


@_export_mutant("R33")
def each_group_counts_for_itself(patch: pytest.MonkeyPatch) -> None:
    right = blocktable.metadata.make_plan

    def make_plan(config: BlockTableConfig, layouts: Any, lengths_from: Any) -> MetadataPlan:
        plan = right(config, layouts, lengths_from)
        shared_exports: list[SharedExport] = []
        export_of_group: list[tuple[int, int] | None] = []
        for group, place in enumerate(plan.export_of_group):
            export_of_group.append(None if place is None else (len(shared_exports), 0))
            if place is not None:
                shared_exports.append(SharedExport(plan.shared_exports[place[0]].layout, (group,)))
        lengths: list[int | None] = []
        for index in plan.lengths:
            lengths.append(None if index is None else len(shared_exports))
            if index is not None:
                shared_exports.append(plan.shared_exports[index])
        return MetadataPlan(tuple(shared_exports), tuple(export_of_group), tuple(lengths))

    patch.setattr(blocktable.metadata, "make_plan", make_plan)


@_export_mutant("R33")
def lengths_of_another_batch_are_taken(patch: pytest.MonkeyPatch) -> None:
    right = BatchChecks._num_reqs

    def wrong(self: BatchChecks, idx_mapping: Any, query_start_loc: Any, num_reqs: Any, seq_lens: Any) -> int:
        is_alone = idx_mapping is query_start_loc is num_reqs is None
        return right(self, idx_mapping, query_start_loc, num_reqs, seq_lens if is_alone else None)

    patch.setattr(BatchChecks, "_num_reqs", wrong)


@_export_mutant("R26")
def any_batch_is_handed_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BufferViews, "require_held", lambda self, *arguments: None)


@_export_mutant("R34")
def boundaries_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    def is_boundary(config: BlockTableConfig, spec: KVCacheGroup, tokens: Any) -> Any:
        local = config.context_parallel.local_lengths(tokens) if spec.is_sharded else tokens
        return local % spec.tokens_per_column == 0

    patch.setattr(blocktable.exports, "is_boundary", is_boundary)


@_export_mutant("R34")
def any_first_token_is_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(blocktable.export_calls, "check_first_tokens", lambda *arguments: None)


@_export_mutant("R37")
def the_host_exports_the_last_commit(patch: pytest.MonkeyPatch) -> None:
    right = export_on_host_of_the_core

    def export_on_host(config: BlockTableConfig, rows: Any, *arguments: Any) -> Any:
        committed: Any = SimpleNamespace(mirror=rows.mirror, filled=rows.committed_filled)
        return right(config, committed, *arguments)

    patch.setattr(blocktable.export_calls, "export_on_host", export_on_host)


@_export_mutant("R37")
def a_host_export_commits(patch: pytest.MonkeyPatch) -> None:
    right = BlockTable.export_host

    def export_host(self: BlockTable, *arguments: Any, **options: Any) -> Any:
        self.commit()
        return right(self, *arguments, **options)

    patch.setattr(BlockTable, "export_host", export_host)


@_export_mutant("R36")
def positions_of_any_group_are_mapped(patch: pytest.MonkeyPatch) -> None:
    right = BlockTable.map_positions

    def map_positions(self: BlockTable, rows: Any, group: int, *arguments: Any, **options: Any) -> Any:
        return right(self, rows, 0, *arguments, **options)

    patch.setattr(BlockTable, "map_positions", map_positions)


@_mutant("R42")
def a_request_that_grew_gets_all_of_its_list_again(patch: pytest.MonkeyPatch) -> None:
    right = Requests._new_ids
    patch.setattr(Requests, "_new_ids", lambda self, kept, ids: ids if right(self, kept, ids) else None)


@_mutant("R44")
def a_mapping_keeps_rows_of_a_longer_batch(patch: pytest.MonkeyPatch) -> None:
    right = Requests.idx_mapping

    def idx_mapping(self: Requests, requests: Any, *arguments: Any, **options: Any) -> Any:
        before = self._idx_mapping.copy()
        made = right(self, requests, *arguments, **options)
        self._idx_mapping[len(requests) :] = before[len(requests) :]
        return made

    patch.setattr(Requests, "idx_mapping", idx_mapping)


def main(folder: Path) -> None:
    """Run the suite once over the right core, and the tests of its rule over each mutant."""
    _run(folder / "right.json", f"({CASES}) or ({EXPORT_CASES})")
    for name, (rule, patched) in MUTANTS.items():
        with pytest.MonkeyPatch.context() as patch:
            patched(patch)
            _run(folder / f"{name}.json", EXPORT_CASES if name in EXPORT_MUTANTS else CASES, f"--rule={rule}")


def _run(verdict: Path, selection: str, *options: str) -> None:
    conformance(["numpy", *options, f"--verdict={verdict}", "-q", "--tb=no", "-k", selection])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
