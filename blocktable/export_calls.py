"""The exports of a table: its batch in the layouts that attention kernels read, on the device and on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blocktable.arrays import AnyArray, Array
from blocktable.batches import BatchChecks, PlannedExport
from blocktable.checks import array_spec, non_negative, refuse_mask, vector_length
from blocktable.config import INT32_LIMIT
from blocktable.errors import ArgumentError, DtypeError
from blocktable.exports import (
    RING_AND_REQUEST_KINDS,
    Export,
    ExportSets,
    check_first_tokens,
    check_groups,
    require_inputs,
)
from blocktable.host_exports import check_capacity, export_on_host
from blocktable.inputs import without_torch_modes
from blocktable.inspection import Inspection
from blocktable.layouts import Layout, LayoutName, find_layout
from blocktable.overlaps import refuse_overlaps
from blocktable.protocols import Batch, ExportBuffers, StepBuffers
from blocktable.views import BufferViews


class ExportCalls(Inspection):
    """What hands a table's rows to kernels in other forms than the batch table."""

    _checks: BatchChecks
    _views: BufferViews
    _exports: ExportSets
    _num_commits: int

    def _stream(self, stream: Any, array: Array | None) -> int | None:
        raise NotImplementedError

    def _buffers(self, out: StepBuffers | None) -> StepBuffers:
        raise NotImplementedError

    @without_torch_modes
    def create_export(
        self,
        layout: LayoutName | Layout,
        groups: int | Sequence[int] = 0,
        *,
        capacity: int | None = None,
        max_batch: int | None = None,
    ) -> ExportBuffers:
        """Allocate buffers of one layout, and compile what writes them. Waits for the device; not inside a capture.

        Args:
            layout: a layout, or the name of one of `LAYOUTS`.
            groups: a group, or several of one geometry, whose counts are then computed once.
            capacity: "csr", "block_requests": kernel blocks of the largest batch; "token_csr", "token_requests": its
                tokens. None: enough for any batch of `max_num_reqs`; with `max_batch` it must be given.
            max_batch: requests of the largest batch, more or fewer than `max_num_reqs`. None: that.

        Returns:
            A set for `export(out=)`. Keep the object itself: `invalidate` refills the sets that live.

        Raises:
            UnsupportedError: the backend does not declare `exports`; or `export_parts`, for `max_batch` and the kinds
                "ring", "block_requests" and "token_requests".
            ArgumentError, ConfigError: the groups cannot be exported in this layout.

        Rules: R25-R31.
        """
        found, chosen = find_layout(layout), check_groups(self.config, groups)
        self._require_exports("create_export()", found)
        if max_batch is not None:
            self._require("export_parts", "create_export(max_batch=)")
        self._exports.refuse_capture(found, self._stream(None, None))
        return self._exports.create(found, chosen, capacity, max_batch)

    @without_torch_modes
    def export(
        self,
        layout: LayoutName | Layout,
        idx_mapping: AnyArray | None,
        *,
        groups: int | Sequence[int] = 0,
        seq_lens: AnyArray | None = None,
        first_tokens: AnyArray | None = None,
        query_start_loc: AnyArray | None = None,
        num_reqs: int | None = None,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
        num_computed_tokens: AnyArray | None = None,
        out: ExportBuffers | StepBuffers | None = None,
        stream: Any = None,
    ) -> Export:
        """Write the batch, as of the last commit, in the layout that an attention kernel reads. Modifies no row.

        A layout of kind "table" that the batch table itself meets is that batch table: nothing is launched, and the set
        must hold this batch, as its last `gather` or `step` wrote it, with no commit of changes after that. Device
        arrays are told apart by their addresses: one that was refilled in place since then is not seen.

        Args:
            layout: a layout, or the name of one of `LAYOUTS`.
            idx_mapping: [num_reqs] int32. As `gather`; None: the identity.
            groups: a group, or several of one geometry.
            seq_lens: [num_reqs] int32. Tokens of each sequence, over all ranks, this step's included. Needed for CSR,
                lengths, the inverse map and aligned states.
            first_tokens: [num_reqs] int32. The token that each entry's part of its row begins with, a block boundary;
                `seq_lens` go on counting from the sequence's start. None: every part is the row from its start.
            query_start_loc: [num_reqs + 1] int32. "token_requests": first token of each request.
            num_reqs: requests; needed where `idx_mapping` is None and nothing else says it.
            num_reqs_padded: batch rows of the result, the further ones without entries. None: `num_reqs`.
            num_tokens_padded: "token_requests": entries to return. None: all of the set.
            num_computed_tokens: [num_reqs] int32. As `gather`.
            out: what `create_export` made for this layout and these groups; or a set of this table's buffers, to which
                one such set for each layout belongs, made at the first call. None: the table's own set of buffers.
            stream: as `gather`.

        Returns:
            Views, the same object for the same sizes. Valid until the next call that writes the same buffers.

        Raises:
            UnsupportedError: the backend does not declare `exports`; or `export_parts`, for `first_tokens` and the
                kinds "ring", "block_requests" and "token_requests".
            BlockTableError: the first export into a set that belongs to one of buffers, or host arrays, on a capturing
                stream.
            ArgumentError: the batch table is what was asked for, and it holds another batch; or the arrays are the
                host's, and hold more entries than `capacity`, or first tokens that are not boundaries: those of device
                arrays are counted in `ExportBuffers.num_cut`.
            ArgumentError, ConfigError, DtypeError: a bad argument. Nothing was launched.

        Rules: R25-R31, R34, R35.
        """
        found, chosen = find_layout(layout), check_groups(self.config, groups)
        self._require_exports("export()", found)
        if first_tokens is not None:
            self._require("export_parts", "export(first_tokens=)")
        require_inputs(found, seq_lens, query_start_loc, num_tokens_padded)
        batch = self._checks.batch(
            *(idx_mapping, query_start_loc, None, num_reqs, num_reqs_padded, num_computed_tokens),
            *(seq_lens, first_tokens),
            most=out.max_batch if isinstance(out, ExportBuffers) else None,
        )
        check_first_tokens(self.config, found, chosen, batch)
        inputs = (idx_mapping, seq_lens, query_start_loc, num_computed_tokens)
        handle = self._stream(stream, next((array for array in inputs if array is not None), None))
        planned = self._plan_export(found, chosen, batch, out, handle, num_tokens_padded)
        self._refuse_outputs(planned, batch)
        if planned.buffers is None:
            buffers = self._buffers(out)  # type: ignore[arg-type]
            self._views.require_held(buffers, batch, self._num_commits, found, chosen)
            if self._checker is not None and not all(self._views.is_own_rows(group, batch) for group in chosen):
                self._checker.before_export(found, chosen, batch, buffers, handle)
        else:
            check_capacity(self.config, self._rows.committed_filled, batch, planned.buffers)
            if self._checker is not None:
                self._checker.before_export(found, chosen, batch, planned.buffers, handle)
        self._run_export(planned, batch, handle)
        if self._checker is not None:
            self._checker.after_call()
        return planned.result

    def export_host(
        self,
        layout: LayoutName | Layout,
        idx_mapping: AnyArray | None,
        *,
        groups: int | Sequence[int] = 0,
        seq_lens: AnyArray | None = None,
        first_tokens: AnyArray | None = None,
        query_start_loc: AnyArray | None = None,
        num_reqs: int | None = None,
        num_reqs_padded: int | None = None,
        num_tokens_padded: int | None = None,
        num_computed_tokens: AnyArray | None = None,
    ) -> Export:
        """Return what `export` would write after a commit, from the host's rows, in new numpy arrays.

        Calls nothing of the backend, waits for nothing and changes nothing: for a planner that wants `indptr` on the
        host. `seq_lens` may be upper bounds where only the device knows the lengths.

        Arguments are those of `export`; all arrays are on the host, numpy or what DLPack hands over without a copy.

        Returns:
            As `export`, of a batch of any size. The caller's own.

        Raises:
            ArgumentError, ConfigError, DtypeError: as `export`, and for an array that is not on the host.

        Rules: R37.
        """
        found, chosen = find_layout(layout), check_groups(self.config, groups)
        require_inputs(found, seq_lens, query_start_loc, num_tokens_padded)
        arrays = [
            _on_host(name, array)
            for name, array in (
                *(("idx_mapping", idx_mapping), ("query_start_loc", query_start_loc)),
                *(("num_computed_tokens", num_computed_tokens), ("seq_lens", seq_lens), ("first_tokens", first_tokens)),
            )
        ]
        mapping, starts, computed, lens, firsts = arrays
        batch = self._checks.batch(
            *(mapping, starts, None, num_reqs, num_reqs_padded, computed, lens, firsts),
            most=INT32_LIMIT - 1,
            will_commit=True,
            is_host_call=True,
        )
        check_first_tokens(self.config, found, chosen, batch)
        if num_tokens_padded is not None:
            non_negative("num_tokens_padded", num_tokens_padded)
        try:
            return export_on_host(self.config, self._rows, found, chosen, batch, num_tokens_padded)
        except MemoryError as error:
            raise ArgumentError(f"{found.name!r} of this batch does not fit the host's memory: {error}.") from error

    @without_torch_modes
    def map_positions(
        self, rows: AnyArray, group: int, positions: AnyArray, *, out: AnyArray | None = None, stream: Any = None
    ) -> Array:
        """Write the slot of every position of every token's row, -1 where it has none. Modifies no row.

        For sparse attention: the positions that a top-k chose become the slots that a kernel reads.

        Args:
            rows: [T] int32. Token -> its row; one outside the table stands for none.
            group: the group.
            positions: [T, K] int32. Positions in the token's sequence, in any order.
            out: [T, K] int32 or int64, contiguous, on the table's device. None: a new array of the slot dtype, which
                allocates and so is refused on a capturing stream.
            stream: as `gather`, where `rows` names none.

        Returns:
            `out`, or the new array.

        Raises:
            UnsupportedError: the backend does not declare `export_parts`.
            ArgumentError, DtypeError: a bad argument, a group without slots, or slots that int32 cannot hold.

        Rules: R36.
        """
        self._require("export_parts", "map_positions()")
        index = self._group_index(group)
        spec = self.config.groups[index]
        if spec.slot_mode == "none":
            raise ArgumentError(f'group {index} has slot_mode="none": its positions have no slots.')
        num_tokens, shape = (
            vector_length("rows", rows, "int32"),
            self._checks.matrix("positions", positions, ("int32",)),
        )
        if shape[0] != num_tokens:
            raise ArgumentError(f"positions must be [{num_tokens}, K], one line for each of rows, got {shape}.")
        self._checks.require_device(rows)
        self._checks.require_device(positions)
        handle = self._stream(stream, rows)
        if out is None:
            self._exports.refuse_capture(None, handle)
            dtype: Any = self.config.slot_dtype
            target = self.backend.from_host(np.full(shape, -1, dtype), self.device)
        else:
            target = out
            self._checks.output("out", out, shape)
            refuse_overlaps([("out", out)], [("rows", rows), ("positions", positions)])
            dtype = array_spec("out", out).dtype
        if dtype == "int32" and spec.block_id_limit * spec.block_size > INT32_LIMIT:
            hint = "set num_blocks, or " if spec.num_blocks is None else ""
            raise DtypeError(f"slots of group {index} may not fit int32; {hint}allocate out as int64.")
        if 0 not in shape:
            store: Any = self.store
            store.map_positions(rows, index, positions, target, stream=handle)
        return target

    def _require_exports(self, call: str, layout: Layout) -> None:
        self._require("exports", call)
        if layout.kind in RING_AND_REQUEST_KINDS:
            self._require("export_parts", f"{call} of kind {layout.kind!r}")

    def _plan_export(
        self,
        layout: Layout,
        groups: tuple[int, ...],
        batch: Batch,
        out: ExportBuffers | StepBuffers | None,
        stream: int | None,
        num_tokens: int | None = None,
    ) -> PlannedExport:
        """Say where an export goes; buffers that belong to a set are made at the first call."""
        capacity = out.capacity if isinstance(out, ExportBuffers) else self.config.max_num_batched_tokens
        if num_tokens is not None and non_negative("num_tokens_padded", num_tokens) > capacity:
            raise ArgumentError(f"num_tokens_padded {num_tokens} is above the {capacity} entries of the set.")
        if isinstance(out, ExportBuffers):
            self._exports.check_own(out, layout, groups)
            return self._planned(layout, batch, out, num_tokens)
        buffers = self._buffers(out)
        if batch.first_tokens is None and self._exports.is_batch_table(layout, groups):
            tables = self._views.block_tables(buffers, batch)
            return PlannedExport(layout, None, self._exports.batch_tables(layout, groups, buffers, tables))
        target = self._exports.find(layout, groups, buffers)
        if target is None:
            self._exports.refuse_capture(layout, stream)
            target = self._exports.create(layout, groups)
            self._exports.keep(target, buffers)
        return self._planned(layout, batch, target, num_tokens)

    def _planned(self, layout: Layout, batch: Batch, out: ExportBuffers, num_tokens: int | None) -> PlannedExport:
        return PlannedExport(layout, out, self._exports.view(out, batch.num_reqs_padded, num_tokens))

    def _refuse_outputs(self, planned: PlannedExport, batch: Batch) -> None:
        if planned.buffers is not None:
            self._exports.refuse_outputs(planned.buffers, batch)

    def _run_export(self, planned: PlannedExport, batch: Batch, stream: int | None) -> None:
        if planned.buffers is not None and planned.layout.kind != "placeholder":
            self.store.export(planned.layout, batch, planned.buffers, stream=stream)  # type: ignore[attr-defined]


def _on_host(name: str, array: Any) -> Any:
    """Return a host array as numpy has it, without a copy."""
    refuse_mask(name, array)
    if array is None or type(array) is np.ndarray:
        return array
    try:
        return np.from_dlpack(array)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise DtypeError(f"{name} must be an array on the host, got {type(array).__name__}: {error}.") from error
