"""The checker that looks at every call on the host, before anything of it reaches the device (R39)."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from blocktable.arrays import Array, IntArray
from blocktable.checking.base import BaseChecker
from blocktable.checking.calls import StartsCheck, check_starts, find_unset_rows
from blocktable.checking.lives import UNMARKED, RowLives
from blocktable.checking.tokens import GroupTokens, LocatedTokens, Tokens, make_tokens, runs
from blocktable.checking.written import GroupFinder
from blocktable.config import BlockTableConfig
from blocktable.errors import ArgumentError, BlockTableError
from blocktable.exports import check_first_tokens
from blocktable.findings import Finding, Findings
from blocktable.host_exports import check_capacity
from blocktable.host_path import HostPath
from blocktable.layouts import Layout
from blocktable.protocols import Backend, Batch, BlockStore, ExportBuffers, StepBuffers, no_writes

MAX_MARK = 1 << 62
"""Marks stay below, so that nothing added to one passes 64 bits."""


class HostChecker(BaseChecker):
    """Finds every kind, in the call that does the harm; it brings device arrays to the host, and waits for them.

    Args:
        config, backend, device, findings: as `BaseChecker`.
        store: refuses a commit on a capturing stream.

    Rules: R38, R39.
    """

    lives: RowLives

    def __init__(
        self, config: BlockTableConfig, backend: Backend, device: Any, store: BlockStore, findings: Findings
    ) -> None:
        super().__init__(config, backend, device, store, findings, RowLives(config))
        self._can_capture = "graph_capture" in backend.capabilities
        self._quick: Any = None
        self._is_used = False  # until the first row operation: warm-up and profiling
        self._is_ahead = False  # whether `holders` are what a step that is running will have committed
        self._has_new_lives = False
        self._batches: weakref.WeakKeyDictionary[StepBuffers, tuple[Any, ...]] = weakref.WeakKeyDictionary()
        groups = [i for i, group in enumerate(config.groups) if group.slot_mode in ("linear", "ring")]
        self._groups = {group: GroupTokens(config, group, self.holders.arena) for group in groups}
        self._finders = {
            group: GroupFinder(config, group, tokens, self.holders, findings, self.lives)
            for group, tokens in self._groups.items()
        }

    # What the table tells.

    def checked_rows(self, rows: HostPath) -> HostPath:
        checked = super().checked_rows(rows)
        self._quick = self._make_quick(getattr(rows, "token_check", None))
        return checked

    def on_row_call(self) -> None:
        self._is_used = self._has_new_lives = True
        self._settle()

    def has_replaced(self, rows: IntArray, group: int, ids: IntArray) -> None:
        pool = self.holders.pools[group]
        pool.writers[pool.index(ids)] = 0

    def before_committed(self, rows: HostPath) -> None:
        if not self._is_ahead:
            self.holders.take(self.num_commits - 1)
        self._is_ahead = False
        self.holders.hand_ins[1] = self.holders.hand_ins[0]
        self._keep_lives()

    def before_commit(self, stream: int | None) -> None:
        self._settle()
        self.count_commit()

    def before_gather(self, batch: Batch, out: StepBuffers, stream: int | None) -> None:
        if self._is_used:
            self._refuse_capture(stream)
            self._note_batch(batch, out)

    def before_slots(
        self, batch: Batch, num_tokens_padded: int | None, groups: tuple[int, ...] | None, stream: int | None
    ) -> None:
        if self._is_used:
            self._refuse_capture(stream)
            self._settle()
            self._check(batch, num_tokens_padded, groups)

    def before_step(self, batch: Batch, num_tokens_padded: int | None, out: StepBuffers, stream: int | None) -> None:
        if not self._is_used:
            self.count_commit()
            return
        self._refuse_capture(stream)
        self._settle()
        if self._rows.has_changes:
            self.holders.take(self.num_commits)
            self._is_ahead = True
        before = self.lives.committed.copy() if self._has_new_lives else None
        self._keep_lives()
        try:
            self._check(batch, num_tokens_padded, None)
        except BaseException:
            self._settle()
            if before is not None:
                self.lives.committed[:], self._has_new_lives = before, True
            raise
        self._note_batch(batch, out)
        self.count_commit()

    def before_export(
        self,
        layout: Layout,
        groups: tuple[int, ...],
        batch: Batch,
        out: ExportBuffers | StepBuffers,
        stream: int | None,
    ) -> None:
        if not self._is_used:
            return
        self._refuse_capture(stream)
        if isinstance(out, ExportBuffers):
            self._check_cut(layout, groups, batch, out)
        else:
            self._check_held(layout, groups, batch, out)

    # Exports.

    def _check_cut(self, layout: Layout, groups: tuple[int, ...], batch: Batch, out: ExportBuffers) -> None:
        on_host = batch._replace(
            idx_mapping=self._values(batch.idx_mapping),
            query_start_loc=self._values(batch.query_start_loc),
            seq_lens=self._values(batch.seq_lens),
            first_tokens=self._values(batch.first_tokens),
        )
        try:
            check_first_tokens(self.config, layout, groups, on_host)
            check_capacity(self.config, self._rows.committed_filled, on_host, out)
        except ArgumentError as error:
            message = f"export_cut: {error} Attention would leave these tokens out."
            self.findings.add([Finding("export_cut", message, self.num_commits, group=groups[0])])

    def _check_held(self, layout: Layout, groups: tuple[int, ...], batch: Batch, out: StepBuffers) -> None:
        if batch.idx_mapping is None and batch.num_computed_tokens is None:
            return
        held, given = self._batches.get(out), self._batch_values(batch)
        is_cut = any(self.config.groups[group].cut_window is not None for group in groups)
        if held is None or held[: 2 + is_cut] == given[: 2 + is_cut]:
            return
        message = (
            f"stale_batch: {layout.name!r} hands out the batch table, which holds the last batch that was gathered; "
            "idx_mapping or num_computed_tokens hold other values since: attention would read other requests' "
            "blocks. Gather this batch first, or pass the result of create_export() as out=."
        )
        self.findings.add([Finding("stale_batch", message, self.num_commits, group=groups[0])])

    def _note_batch(self, batch: Batch, out: StepBuffers) -> None:
        if batch.needs_gather:
            self._batches[out] = self._batch_values(batch)

    def _batch_values(self, batch: Batch) -> tuple[Any, ...]:
        arrays = self._values(batch.idx_mapping), self._values(batch.num_computed_tokens)
        return batch.num_reqs, *(None if array is None else array.tobytes() for array in arrays)

    # Tokens.

    def _check(self, batch: Batch, num_tokens_padded: int | None, groups: tuple[int, ...] | None) -> None:
        """Look at the tokens of a call as of `holders`; note what they write where nothing is raised."""
        given = (batch.idx_mapping, batch.query_start_loc, batch.positions)
        mapping, starts, positions = (self._values(array) for array in given)
        assert starts is not None
        assert positions is not None
        is_on_host = type(given[1]) is type(given[2]) is np.ndarray
        if self._quick is not None and groups is None and not self._has_new_lives:
            padded = -1 if num_tokens_padded is None else num_tokens_padded
            if self._quick.is_clean(mapping, starts, positions, padded, is_on_host and padded < 0):
                return
        found, is_usable = check_starts(
            StartsCheck(starts, positions.size, num_tokens_padded, is_on_host), self.num_commits
        )
        if found:
            self.findings.add(found)
        if not is_usable:
            return
        tokens = make_tokens(mapping, starts, positions, self.config.num_rows)
        chosen = self._groups if groups is None else [group for group in groups if group in self._groups]
        if not self._groups or not chosen:
            return
        found = []
        unset = find_unset_rows(self.config, mapping, starts, positions, self.holders.filled, self.num_commits)
        if unset:
            found += [finding for finding, _ in unset]
            unset_rows = np.array([request for _, request in unset])
            tokens = tokens.part(~np.isin(tokens.request, unset_rows))
        found += self._find_gaps(tokens, starts, chosen)
        written: list[tuple[Any, LocatedTokens]] = []
        for group in chosen:
            located = self._groups[group].locate(tokens)
            found += self._finders[group].find(located, runs(located), self.num_commits)
            written.append((group, located))
        if found:
            self.findings.add(found)
        self._note_written(tokens, written)

    def _find_gaps(self, tokens: Tokens, starts: IntArray, groups: Any) -> list[Finding]:
        if not tokens.row.size:
            return []
        marks = self.lives.marks[tokens.row]
        if tokens.is_single:
            is_above = tokens.position > marks
        else:
            offset = tokens.index - starts[tokens.request]
            is_above = tokens.position - offset > marks
        if not is_above.any():
            return []
        # A row that becomes another's with the next commit has that one's mark already.
        is_above &= self.lives.lives[tokens.row] == self.lives.committed[tokens.row]
        owned = np.zeros(tokens.row.size, np.bool_)
        for group in groups:
            owned |= np.isin(tokens.index, self._groups[group].owned(tokens).index)
        found = []
        above = np.flatnonzero(is_above & owned)
        for i in above[np.unique(tokens.request[above], return_index=True)[1]].tolist():
            row, position = int(tokens.row[i]), int(tokens.position[i])
            message = (
                f"position_gap: a token of row {row} is written at position {position}, but the row has been written "
                f"up to position {int(marks[i]) - 1} only: attention reads what the positions between them hold."
            )
            found.append(Finding("position_gap", message, self.num_commits, row=row, position=position))
        return found

    def _note_written(self, tokens: Tokens, written: list[tuple[Any, LocatedTokens]]) -> None:
        if not tokens.row.size:
            return
        for group, located in written:
            self._finders[group].note_writers(located)
        if tokens.is_single:
            rows, ends = tokens.row, tokens.position
        else:
            rows, ends = tokens.row[tokens.firsts], np.maximum.reduceat(tokens.position, tokens.firsts)
        if self._has_new_lives:
            is_same = self.lives.lives[rows] == self.lives.committed[rows]
            rows, ends = rows[is_same], ends[is_same]
        ends = np.minimum(ends, MAX_MARK) + 1
        marks = self.lives.marks
        if tokens.has_distinct_slots:
            old = marks[rows]
            marks[rows] = np.where(old == UNMARKED, ends, np.maximum(old, ends))
        else:
            marks[rows[marks[rows] == UNMARKED]] = 0
            np.maximum.at(marks, rows, ends)

    def _make_quick(self, token_check: Any) -> Any:
        """Return the compiled look at a whole call; None where there is none, or not for such a table."""
        if self.holders.compiled is None or not self._groups:
            return None
        shard, fields = self.config.context_parallel, []
        for group in self._groups:
            shape, is_lenient = self.config.groups[group], self._finders[group].is_lenient
            share = (shard.world_size, shard.rank, shard.interleave_size) if shape.is_sharded else (1, 0, 1)
            fields.append((group, shape.tokens_per_column, shape.slot_mode == "ring", *share, is_lenient))
        return token_check(self.holders.compiled, np.array(fields, np.int64), self.lives.marks, self.lives.committed)

    # Between the table and what is known.

    def _settle(self) -> None:
        """Take back what a step would have committed that never came to it."""
        if self._is_ahead:
            self.holders.undo(self.num_commits)
            self._is_ahead = False

    def _keep_lives(self) -> None:
        if self._has_new_lives:
            self.lives.committed[:] = self.lives.lives
            self._has_new_lives = False

    def _values(self, array: Array | None) -> IntArray | None:
        if array is None or type(array) is np.ndarray:
            return array
        self._backend.synchronize(self._device)  # whoever writes it may do so on a stream of its own
        return self._host(array)

    def _refuse_capture(self, stream: int | None) -> None:
        if not self._can_capture:
            return
        store: Any = self._store
        try:  # what changes would be sent by says so, for nothing too (R21)
            if hasattr(store, "lend"):
                store.lend(stream)
            else:
                store.write(no_writes(self.config.arena), stream=stream)
        except BlockTableError as error:
            raise BlockTableError(
                'check="host" looks at every call on the host, and a capturing stream cannot be waited for: capture '
                'with check="device" or "off".'
            ) from error
