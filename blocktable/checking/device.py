"""The checker whose kernels look, without a wait: what the host tells them, what it makes of their records (R41)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from blocktable.arrays import IntArray
from blocktable.check_plan import DEVICE_KINDS, MAX_INT32, MAX_RECORDS, RECORD, REQUEST_KINDS, CheckPlan
from blocktable.checking.base import BaseChecker
from blocktable.checking.calls import StartsCheck, check_starts
from blocktable.checking.lives import positions_per_block
from blocktable.checking.reasons import slot_reason
from blocktable.config import BlockTableConfig
from blocktable.errors import ConfigError
from blocktable.findings import Finding, Findings
from blocktable.layouts import Layout
from blocktable.protocols import Backend, Batch, BlockStore, ExportBuffers, StepBuffers


def plan_checks(config: BlockTableConfig, findings: Findings) -> CheckPlan:
    """Return what the kernels of a table check.

    Args:
        config: the geometry.
        findings: says which kinds are off.

    Raises:
        ConfigError: a group with slots does not say how many blocks it has.

    Rules: R39.
    """
    names: list[Any] = []
    pools: list[int] = []
    num_blocks: list[int] = []
    for index, group in enumerate(config.groups):
        if group.slot_mode not in ("linear", "ring"):
            pools.append(-1)
            continue
        if group.num_blocks is None:
            raise ConfigError(
                f'check="device" keeps a few bytes for each block: set num_blocks in every group that has slots; group '
                f"{index} has none."
            )
        name = index if group.pool is None else group.pool
        if name not in names:
            names.append(name)
            num_blocks.append(0)
        pool = names.index(name)
        num_blocks[pool] = max(num_blocks[pool], group.num_blocks)
        pools.append(pool)
    with_windows = {pool for pool, group in zip(pools, config.groups, strict=True) if group.cut_window is not None}
    kinds = tuple(
        frozenset(
            kind
            for kind in DEVICE_KINDS
            if kind in REQUEST_KINDS or pools[index] >= 0
            if findings.severity(kind, None if kind in REQUEST_KINDS else index) != "off"
        )
        for index in range(len(config.groups))
    )
    has_owners = tuple(config.stale_rows or pool in with_windows for pool in pools)
    return CheckPlan(kinds, tuple(pools), tuple(num_blocks), has_owners)


class DeviceLives:
    """Lives and marks as kernels are told of them: numbers in the mirror, which a commit sends (`CheckRegions`).

    A mark lies on the device, at a place that follows its row; a copy begins without one.

    Args:
        config: with a `check_plan`.
    """

    def __init__(self, config: BlockTableConfig) -> None:
        self._regions, self._num_rows = config.check_regions, config.num_rows
        self._reach = positions_per_block(config)
        # Rows whose life is another one since the last commit, and whether there are any.
        self._touched: IntArray = np.zeros(self._num_rows, np.uint8)
        self._has_touched: IntArray = np.zeros(1, np.int64)
        self._is_told = False

    def attach(self, mirror: IntArray, journal: Any) -> None:
        """Take the mirror and the journal that changes of it are noted in."""
        self._journal = journal
        regions, num_rows = self._regions, self._num_rows
        self._lives, self._restarts, self._caps = (
            mirror[start : start + num_rows] for start in (regions.lives, regions.restarts, regions.caps)
        )

    def tell(self) -> None:
        """Give every row its first life, when the first row operation comes."""
        if not self._is_told:
            self._is_told = True
            self._lives[:] = -np.arange(self._num_rows) - self._num_rows
            self._restarts[:] = np.arange(self._num_rows) + self._num_rows
            self._caps[:] = -1
            self._journal.mark(np.array([self._regions.lives]), np.array([3 * self._num_rows]))

    def numbers(self, rows: IntArray) -> IntArray:
        """Return the numbers of lives."""
        numbers: IntArray = np.abs(self._lives[rows])
        return numbers

    def begin(self, rows: IntArray) -> None:
        """Begin a life for each row, unmarked."""
        self._lives[rows] = self._following(np.abs(self._lives[rows]))
        self._touch(rows)
        self.unmark(rows)

    def unmark(self, rows: IntArray) -> None:
        """Let the next tokens of rows have any position."""
        self._restart(rows, -1)

    def copy(self, src: IntArray, dst: IntArray, *, vacate: bool) -> None:
        """Follow a copy of rows, or with `vacate` a move; arguments as `HostPath.copy`."""
        if not vacate:
            self.begin(dst[src != dst])
            return
        emptied, replaced = src[~np.isin(src, dst)], dst[~np.isin(dst, src)]
        # Rows that were vacated get what the replaced ones had, so that no two rows have the same place.
        target, source = np.concatenate((dst, emptied)), np.concatenate((src, replaced))
        for region in (self._lives, self._restarts, self._caps):
            region[target] = region[source]
        self._touch(target)
        self._mark(target)
        self.begin(emptied)

    def truncate(self, rows: IntArray, before: IntArray, after: IntArray) -> None:
        """Let marks fall to what is left; rows that became empty begin a life. Arguments as `RowLives.truncate`."""
        is_emptied = before.any(0) & ~after.any(0)
        if is_emptied.any():
            self.begin(rows[is_emptied])
        left = np.where((after < before) & (self._reach > 0), after * self._reach, MAX_INT32).min(0)
        falls = ~is_emptied & (left < MAX_INT32)
        if falls.any():
            self._restart(rows[falls], left[falls])

    @property
    def arrays(self) -> tuple[IntArray, IntArray]:
        """What the compiled path changes too, beside the mirror: touched rows, and whether there are any."""
        return self._touched, self._has_touched

    def note_counts(self, rows: IntArray, filled: IntArray) -> None:
        """Note which rows hold blocks, of those whose counts or lives have changed.

        Args:
            rows: [n] int64. Rows whose counts have changed; they may repeat.
            filled: [num_groups, num_rows] int32.
        """
        rows = np.unique(np.concatenate((rows, np.flatnonzero(self._touched))))
        self._touched[:] = self._has_touched[:] = 0
        before = self._lives[rows]
        self._lives[rows] = after = np.where(filled[:, rows].any(0), np.abs(before), -np.abs(before))
        rows = rows[before != after]
        if rows.size:
            self._journal.mark(self._regions.lives + rows, np.ones_like(rows))

    def _touch(self, rows: IntArray) -> None:
        self._touched[rows] = self._has_touched[0] = 1

    def _following(self, numbers: IntArray) -> IntArray:
        """Return new numbers; modulo num_rows they stay what they are, so that no two rows have the same."""
        is_last = numbers > MAX_INT32 - self._num_rows
        following: IntArray = np.where(is_last, numbers % self._num_rows, numbers) + self._num_rows
        return following

    def _restart(self, rows: IntArray, caps: Any) -> None:
        """Give marks new numbers: those kept under the numbers before fall to `caps`; -1: they are forgotten."""
        self._restarts[rows] = self._following(self._restarts[rows])
        self._caps[rows] = caps
        self._mark(rows)

    def _mark(self, rows: IntArray) -> None:
        regions = self._regions
        starts = np.array([regions.lives, regions.restarts, regions.caps])[:, None] + rows
        self._journal.mark(starts, np.ones_like(starts))


class DeviceChecker(BaseChecker):
    """Finds every kind but "stale_batch": what tokens do in kernels, what rows do on the host.

    A finding of a kernel's is known when a later call looks, or at `collect`. Its step is that of the last commit that
    changed anything: kernels know no other.

    Args:
        config: with a `check_plan`.
        backend, device, findings: as `BaseChecker`.
        store: its kernels check.

    Rules: R38, R41.
    """

    lives: DeviceLives

    def __init__(
        self, config: BlockTableConfig, backend: Backend, device: Any, store: BlockStore, findings: Findings
    ) -> None:
        super().__init__(config, backend, device, store, findings, DeviceLives(config))
        self._has_rows = False  # until the first row operation: warm-up and profiling
        self._is_told = False  # until a commit after it: kernels know of no row before
        self._records: IntArray = self._store.findings
        self._next = 0  # number of the first record that was not read
        plan, regions = config.check_plan, config.check_regions
        assert plan is not None
        self._copies = [regions.copies[pool] if pool >= 0 else 0 for pool in plan.pools]
        self._bits = self.holders.bits(plan, regions)
        self._cuts: weakref.WeakKeyDictionary[ExportBuffers, list[Any]] = weakref.WeakKeyDictionary()

    # What the table tells.

    def on_row_call(self) -> None:
        self._has_rows = True
        self.lives.tell()

    def has_replaced(self, rows: IntArray, group: int, ids: IntArray) -> None:
        if self._copies[group]:
            entries = self._copies[group] + ids
            self._mirror[entries] = self.lives.numbers(rows)
            self._rows.journal.mark(entries, np.ones_like(entries))

    def before_commit(self, stream: int | None) -> None:
        self.count_commit()
        self._is_told = self._has_rows
        self._tell()

    def before_slots(
        self, batch: Batch, num_tokens_padded: int | None, groups: tuple[int, ...] | None, stream: int | None
    ) -> None:
        starts = batch.query_start_loc
        if self._is_told and type(starts) is np.ndarray:
            is_on_host = type(batch.positions) is np.ndarray
            call = StartsCheck(starts, batch.num_positions, num_tokens_padded, is_on_host)
            # Kernels look at each request's; without requests nothing else looks.
            is_wrong = starts[0] != 0 or starts[-1] > batch.num_positions or bool((starts[1:] < starts[:-1]).any())
            is_seen = batch.num_reqs > 0 and is_wrong
            found = [
                each for each in check_starts(call, self.num_commits)[0] if each.kind != "bad_starts" or not is_seen
            ]
            self.findings.add(found)

    def before_step(self, batch: Batch, num_tokens_padded: int | None, out: StepBuffers, stream: int | None) -> None:
        self._is_told = self._has_rows
        if type(batch.query_start_loc) is np.ndarray:
            self.before_slots(batch, num_tokens_padded, None, stream)
        self._tell()
        self.count_commit()

    def before_export(
        self,
        layout: Layout,
        groups: tuple[int, ...],
        batch: Batch,
        out: ExportBuffers | StepBuffers,
        stream: int | None,
    ) -> None:
        if isinstance(out, ExportBuffers) and out.num_cut is not None and out not in self._cuts:
            self._cuts[out] = [layout.name, groups[0], 0]

    def after_call(self) -> None:
        if self._records[0] != self._next:
            self._look()

    def collect(self) -> None:
        self._store.collect_findings()
        found = []
        for out, cut in self._cuts.items():
            count = int(self._host(out.num_cut)[0])
            if count > cut[2]:
                message = (
                    f"export_cut: exports in layout {cut[0]!r} have left out {count - cut[2]} entries for which there "
                    "was no room, or parts that began inside a block: attention reads less than the sequences hold. "
                    "Make the set by create_export() with a larger capacity."
                )
                found.append(Finding("export_cut", message, self.num_commits, group=cut[1]))
            cut[2] = count  # less after invalidate()
        self._look(found)

    # What kernels are told.

    def _tell(self) -> None:
        """Write what pending changes mean to kernels into the mirror, as changes of the same commit."""
        if self.holders.compiled is not None:
            self.holders.compiled.tell(self.num_commits)
        elif self._rows.has_changes:
            self._tell_by_numpy()

    def _tell_by_numpy(self) -> None:
        holders, mirror, arena = self.holders, self._mirror, self.config.arena
        holders.take(self.num_commits)
        holders.hand_ins[1] = holders.hand_ins[0]
        counts = holders.taken.entries[: int(holders.taken.entries.searchsorted(arena.num_groups * arena.num_rows))]
        self.lives.note_counts(counts % arena.num_rows, holders.filled)
        marks = [np.array([self.config.check_regions.step])]
        mirror[marks[0]] = self.num_commits
        for move in holders.moves(holders.taken):
            pool = holders.pools[move.group]
            if pool not in self._bits:
                continue
            start, number = self._bits[pool]
            ids, is_shared = pool.switched(np.concatenate((move.released, move.held)))
            ids, is_shared = ids[ids < number], is_shared[ids < number]
            words, bits = start + (ids >> 5), np.left_shift(np.uint32(1), (ids & 31).astype(np.uint32))
            entries = mirror.view(np.uint32)
            np.bitwise_or.at(entries, words[is_shared], bits[is_shared])
            np.bitwise_and.at(entries, words[~is_shared], ~bits[~is_shared])
            marks.append(words)
        entries = np.unique(np.concatenate(marks))
        self._rows.journal.mark(entries, np.ones_like(entries))

    # What they have found.

    def _look(self, more: Sequence[Finding] = ()) -> None:
        """Read the records that are there; when all that there is room for are, the rest is only counted."""
        found, count = [*more], int(self._records[0])
        end = min(count, self._next + MAX_RECORDS)
        while self._next < end:
            record = self._records[RECORD * (1 + self._next % MAX_RECORDS) :][:RECORD].tolist()
            if record[-1] != self._next + 1:
                break  # on its way
            found.append(self._finding(record))
            self._next += 1
        if self._next == end < count:
            self.findings.count += count - end
            self._next = count
        self._records[1] = self._next
        self.findings.add(found)

    def _finding(self, record: Sequence[int]) -> Finding:
        code, row, token, low, high, entry, step, _ = record
        kind, group = DEVICE_KINDS[code % 16 - 1], code // 16 - 1
        position = (high << 32) | (low & 0xFFFFFFFF)
        if kind == "bad_starts":
            message = (
                f"bad_starts: query_start_loc is wrong: request {row} has the tokens {token} to {position}; it begins "
                "with 0, never falls, and ends at most at the number of positions."
            )
            return Finding(kind, message, step)
        if kind == "unset_row":
            num_rows = self.config.num_rows
            what = (
                "holds no blocks in any group" if 0 <= row < num_rows else f"is outside the table (0 to {num_rows - 1})"
            )
            message = (
                f"unset_row: a token at position {position} is not written, since its row {row} {what}. Set the row "
                "before the step, or pass -1 for a padding entry."
            )
            return Finding(kind, message, step, row=row, position=position)
        if kind == "position_gap":
            message = (
                f"position_gap: a token of row {row} is written at position {position}, but the row has not been "
                "written up to there: attention reads what the positions between hold."
            )
            return Finding(kind, message, step, row=row, position=position)
        return self._written(kind, group, row, position, entry, step)

    def _written(self, kind: str, group: int, row: int, position: int, entry: int, step: int) -> Finding:
        geometry, where = self.config.groups[group], f"at position {position} of row {row}, group {group}"
        if kind == "missing_block":
            why = slot_reason(self.config, self._mirror, row, group, position).message
            message = (
                f"missing_block: a token {where} is not written: the row held no block for it. Append the blocks "
                f"before the step. Now: {why}"
            )
            return Finding(kind, message, step, group=group, row=row, position=position)
        block = entry // geometry.blocks_per_kv_block
        slot: int | None = (
            entry * geometry.tokens_per_column + self._local(group, position) % geometry.tokens_per_column
        )
        other_row = None
        if kind == "null_written":
            is_pad = geometry.null_is_pad or geometry.null_block_id < 0
            block, slot = geometry.null_block_id, None if is_pad else slot
            message = f"null_written: a token {where} lies in a hole: " + (
                "it is not written." if is_pad else f"it is written into the null block {block}, and lost."
            )
        elif kind == "shared_block_written":
            other = self.holders.other_cell(group, row, block)
            other_row = None if other is None else other[1]
            also = "another row" if other is None else f"row {other[1]}" + f" of group {other[0]}" * (other[0] != group)
            message = (
                f"shared_block_written: a token {where} is written into block {block} (slot {slot}), which {also} "
                "holds too. Each row reads what the other one wrote last; give it a block of its own (a copy, and "
                "replace_blocks), or take it from the row that has ended."
            )
        else:
            message = (
                f"slot_written_twice: a token {where} is written into slot {slot} (block {block}), which another token "
                "of the same call has too. Only one of them stays, and which is not specified."
            )
        return Finding(
            kind,
            message,
            step,
            group=group,
            row=row,
            position=position,
            block_id=block,
            slot=slot,
            other_row=other_row,
        )

    def _local(self, group: int, position: int) -> int:
        """Return a position's place among the tokens of this rank."""
        shard = self.config.context_parallel
        if not self.config.groups[group].is_sharded:
            return position
        turn = position // (shard.world_size * shard.interleave_size)
        return turn * shard.interleave_size + position % shard.interleave_size
