"""The inputs of a call, checked once: a batch, and the plan of a step that may be used again (R10, R15, R17)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np

from blocktable.arrays import Array
from blocktable.checks import array_spec, int_scalar, non_negative, vector_length
from blocktable.config import BlockTableConfig, SlotDtype
from blocktable.errors import ArgumentError, DtypeError
from blocktable.exports import Export
from blocktable.host_path import HostPath
from blocktable.inputs import Reading, torch_modes_off, without_torch_modes
from blocktable.layouts import Layout
from blocktable.overlaps import OutputMemory
from blocktable.protocols import STEP_INPUTS, Backend, Batch, ExportBuffers, Step, StepBuffers
from blocktable.streams import current_stream_getter, stream_owner
from blocktable.views import BufferViews

MAX_KINDS = 64
"""Kinds of arrays that are remembered as right; an engine has one or two."""


class PlannedExport(NamedTuple):
    """One export: what to write where, and what the caller is given. No buffers: nothing is launched."""

    layout: Layout
    buffers: ExportBuffers | None
    result: Export


SeqLens = Any
"""[num_reqs] int32, or a tuple of one such array for each group; None: not given."""


class StepPlan:
    """What steps over inputs of one form, with one choice of sizes and one set of buffers, have in common.

    It holds no array of the caller's, whose memory would otherwise not be free for the next step's, and not the set.

    Args:
        batch: the first batch.
        step: what is returned.
        prepared: what a `PreparingStore` has made of the form.
        current_stream: says the current stream of the library that made `positions`. None: the table knows.
        views: places in `STEP_INPUTS` of the arrays whose memory must be looked at in each step.
        has_addresses: whether the arrays that tables are gathered by say their addresses.
        num_tokens_padded: as given.

    Attributes:
        has_padding_rows: whether rows of the table itself are padding: what they hold must be looked at each time.
        exports: what is exported after the step.
        addresses: those that were looked at last, in the order of `STEP_INPUTS`. None: none were.
        lens_addresses: the same for the lengths of `step_metadata`.
    """

    __slots__ = (
        *("addresses", "lens_addresses", "num_bytes", "views"),
        *("current_stream", "exports", "has_addresses", "has_padding_rows", "num_positions", "num_reqs"),
        *("num_reqs_padded", "num_tokens_padded", "prepared", "step", "needs_gather"),
    )

    def __init__(
        self,
        batch: Batch,
        step: Step,
        prepared: Any,
        current_stream: Callable[[], int | None] | None,
        *,
        views: tuple[int, ...],
        has_addresses: bool,
        num_tokens_padded: int | None = None,
    ) -> None:
        self.num_reqs: int = batch.num_reqs
        self.num_reqs_padded: int = batch.num_reqs_padded
        self.num_positions: int = batch.num_positions
        self.needs_gather: bool = batch.needs_gather
        self.has_padding_rows: bool = batch.idx_mapping is None and batch.num_reqs_padded > batch.num_reqs
        self.step: Step = step
        self.prepared: Any = prepared
        self.current_stream: Callable[[], int | None] | None = current_stream
        self.has_addresses: bool = has_addresses
        self.num_tokens_padded: int | None = num_tokens_padded
        self.exports: tuple[PlannedExport, ...] = ()
        self.views: tuple[int, ...] = views
        self.addresses: tuple[int | None, ...] | None = None
        self.lens_addresses: tuple[int | None, ...] | None = None
        starts = self.num_reqs + 1
        self.num_bytes: tuple[int, ...] = 4 * self.num_reqs, 4 * self.num_reqs, 4 * starts, 8 * self.num_positions

    def refuse_outputs(
        self,
        memory: OutputMemory,
        arrays: Sequence[Array | None],
        addresses: tuple[int | None, ...],
        *,
        is_certain: bool = True,
    ) -> None:
        """Refuse inputs that lie in the set that the step writes.

        Args:
            memory: of the set.
            arrays, addresses: in the order of `STEP_INPUTS`.
            is_certain: whether the addresses say all.
        """
        for name, address, size in zip(STEP_INPUTS, addresses, self.num_bytes, strict=True):
            if address == 0 and size:
                raise DtypeError(f"{name} has no memory that a kernel could read: its address is 0.")
        before = self.addresses
        if before is None or not is_certain or memory.holds_any(addresses, self.num_bytes, before):
            with torch_modes_off():
                memory.refuse(tuple(zip(STEP_INPUTS, arrays, strict=True)))
        self.addresses = addresses

    def batch(self, arrays: Sequence[Array | None], seq_lens: Array | None = None) -> Batch:
        """Return the batch of a step. arrays: in the order of `STEP_INPUTS`."""
        idx_mapping, num_computed_tokens, query_start_loc, positions = arrays
        return Batch(
            *(idx_mapping, query_start_loc, positions, self.num_reqs, self.num_reqs_padded, num_computed_tokens),
            *(self.num_positions, self.needs_gather, seq_lens),
        )


class BatchChecks:
    """What the contract demands of the arguments of gather, slots, steps and exports.

    Args:
        config: the geometry.
        backend: the backend.
        rows: the host's rows.
        sample: an array of the table, of its device.
    """

    def __init__(self, config: BlockTableConfig, backend: Backend, rows: HostPath, sample: Array) -> None:
        self._config, self._backend, self._rows = config, backend, rows
        self._has_windows = any(group.cut_window is not None for group in config.groups)
        has_streams = "streams" in backend.capabilities
        self._is_emulated = bool(getattr(backend, "is_emulated", False))
        # A tensor says where it is: a backend of several devices may have tables on the host beside those on a GPU.
        self._is_on_host = not getattr(sample, "is_cuda", has_streams and not self._is_emulated)
        # With an idx_mapping, and with the identity.
        self._most_padded = config.max_num_reqs, min(config.max_num_reqs, config.num_rows)
        self._has_numpy_arrays = isinstance(sample, np.ndarray)
        self._own_type = type(sample)
        self._owner = stream_owner(sample)
        self._taken: dict[Any, Callable[[], int | None] | None] = {}

    def step(
        self, arrays: Sequence[Array | None], reading: Reading, num_reqs_padded: int | None, seq_lens: SeqLens
    ) -> tuple[Batch, Callable[[], int | None] | None]:
        """Return the inputs of a step as a batch, and what says the current stream of who made `positions`, if known.

        Args:
            arrays: in the order of `STEP_INPUTS`.
            reading: what they are.
            num_reqs_padded, seq_lens: as given.

        Raises:
            ArgumentError, DtypeError: as `batch`.
        """
        idx_mapping, num_computed_tokens, query_start_loc, positions = arrays
        kinds, (num_mapped, num_computed, num_starts, num_positions), _ = reading
        if seq_lens is None and kinds in self._taken:  # then sizes are all that can be wrong
            num_reqs = num_starts - 1
            padded = num_reqs if num_reqs_padded is None else num_reqs_padded
            if (
                num_reqs >= 0
                and num_mapped in (None, num_reqs)
                and num_computed in (None, num_reqs)
                and type(padded) is int
                and num_reqs <= padded <= self._most_padded[idx_mapping is None]
            ):
                if idx_mapping is None and padded > num_reqs:
                    self.require_empty_rows(num_reqs, padded, will_commit=True)
                needs_gather = idx_mapping is not None or (num_computed is not None and self._has_windows)
                sizes = num_reqs, padded, num_computed_tokens, num_positions, needs_gather
                return Batch(idx_mapping, query_start_loc, positions, *sizes), self._taken[kinds]
        return self._checked_step(arrays, reading, num_reqs_padded, seq_lens)

    @without_torch_modes
    def _checked_step(
        self, arrays: Sequence[Array | None], reading: Reading, num_reqs_padded: int | None, seq_lens: SeqLens
    ) -> tuple[Batch, Callable[[], int | None] | None]:
        idx_mapping, num_computed_tokens, query_start_loc, positions = arrays
        require_tokens(query_start_loc, positions)
        first_lens = seq_lens[0] if isinstance(seq_lens, tuple) else seq_lens
        batch = self.batch(
            *(idx_mapping, query_start_loc, positions, None, num_reqs_padded, num_computed_tokens, first_lens),
            will_commit=True,
        )
        self.seq_lens(seq_lens, batch.num_reqs)
        owner = stream_owner(positions)
        getter = None if owner is None else current_stream_getter(owner)
        kinds, lengths, _ = reading
        # An array of one entry is contiguous whatever its stride is.
        if kinds is not None and all(length is None or length > 1 for length in lengths):
            if len(self._taken) >= MAX_KINDS:
                self._taken.clear()
            self._taken[kinds] = getter
        return batch, getter

    def batch(
        self,
        idx_mapping: Array | None,
        query_start_loc: Array | None,
        positions: Array | None,
        num_reqs: int | None,
        num_reqs_padded: int | None,
        num_computed_tokens: Array | None,
        seq_lens: Array | None = None,
        first_tokens: Array | None = None,
        *,
        most: int | None = None,
        will_commit: bool = False,
        is_host_call: bool = False,
    ) -> Batch:
        """Return the inputs of one call as a batch.

        Args:
            most: requests that it may have. None: `max_num_reqs`.
            will_commit: whether pending changes are committed before the batch is read.
            is_host_call: whether the backend gets none of the arrays, which all lie on the host.

        Raises:
            ArgumentError, DtypeError: something is wrong; the sentence says what.
        """
        arrays = idx_mapping, query_start_loc, positions, num_computed_tokens, seq_lens, first_tokens
        idx_mapping, query_start_loc, positions, num_computed_tokens, seq_lens, first_tokens = map(self._plain, arrays)
        is_of_a_set = most is not None
        most = self._config.max_num_reqs if most is None else most
        name = "the set's max_batch" if is_of_a_set else "max_num_reqs"
        requests = self._num_reqs(idx_mapping, query_start_loc, num_reqs, seq_lens)
        if requests > most:
            raise ArgumentError(f"A batch of {requests} requests is above {name} {most}.")
        padded = requests if num_reqs_padded is None else num_reqs_padded
        num_positions = 0 if positions is None else vector_length("positions", positions, "int64")
        for label, array in (("num_computed_tokens", num_computed_tokens), ("first_tokens", first_tokens)):
            length = requests if array is None else vector_length(label, array, "int32")
            if length != requests:
                raise ArgumentError(f"{label} must hold {requests} entries, one a request, got {length}.")
        padded = int_scalar("num_reqs_padded", padded)
        if not requests <= padded <= most:
            raise ArgumentError(
                f"num_reqs_padded {padded} must be at least the {requests} requests of the batch and at most "
                f"{name} {most}."
            )
        if idx_mapping is None and padded > self._config.num_rows:
            raise ArgumentError(
                f"num_reqs_padded {padded} is above the table's {self._config.num_rows} rows: with idx_mapping=None "
                "the batch is the table's own first rows; pass an idx_mapping."
            )
        if idx_mapping is None and padded > requests:
            self.require_empty_rows(requests, padded, will_commit=will_commit)
        for array in (idx_mapping, query_start_loc, positions, num_computed_tokens, seq_lens, first_tokens):
            if not is_host_call:
                self.require_device(array)
        # With the identity the batch's tables are the table's own rows, unless a window must be cut out of a copy.
        needs_gather = idx_mapping is not None or (num_computed_tokens is not None and self._has_windows)
        return Batch(
            *(idx_mapping, query_start_loc, positions, requests, padded, num_computed_tokens, num_positions),
            *(needs_gather, seq_lens, first_tokens),
        )

    def _plain(self, array: Array | None) -> Array | None:
        """Return a host array of a class derived from numpy's as numpy has it (R7)."""
        is_derived = isinstance(array, np.ndarray) and type(array) not in (np.ndarray, self._own_type)
        return np.asarray(array) if is_derived and not (self._is_emulated or np.ma.isMaskedArray(array)) else array

    def _num_reqs(
        self, idx_mapping: Array | None, query_start_loc: Array | None, num_reqs: int | None, seq_lens: Array | None
    ) -> int:
        found: dict[str, int] = {}
        if idx_mapping is not None:
            found["idx_mapping"] = vector_length("idx_mapping", idx_mapping, "int32")
        if query_start_loc is not None:
            entries = vector_length("query_start_loc", query_start_loc, "int32")
            if entries == 0:
                raise ArgumentError("query_start_loc must hold num_reqs + 1 entries, got none; no requests is [0].")
            found["query_start_loc"] = entries - 1
        if num_reqs is not None:
            found["num_reqs"] = non_negative("num_reqs", num_reqs)
        if seq_lens is not None:
            length = vector_length("seq_lens", seq_lens, "int32")
            expected = next(iter(found.values()), length)
            if length != expected:
                raise ArgumentError(f"seq_lens must hold {expected} entries, one a request, got {length}.")
            found["seq_lens"] = length
        if not found:
            raise ArgumentError("num_reqs is needed where idx_mapping is None.")
        requests = next(iter(found.values()))
        if len(set(found.values())) > 1:
            raise ArgumentError(
                "The numbers of requests disagree: " + ", ".join(f"{name} says {n}" for name, n in found.items()) + "."
            )
        return requests

    def matrix(self, name: str, array: Array, dtypes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the shape of a two-dimensional contiguous array of one of the dtypes."""
        found = array_spec(name, array)
        if found.dtype not in dtypes:
            raise DtypeError(f"{name} must be {' or '.join(dtypes)}, got {found.dtype}.")
        if len(found.shape) != 2 or not found.contiguous:
            raise ArgumentError(
                f"{name} must be two-dimensional and contiguous, got shape {found.shape}"
                f"{'' if found.contiguous else ', strided'}."
            )
        return found.shape

    def output(self, name: str, array: Array, shape: tuple[int, ...]) -> None:
        """Refuse what slots of a shape cannot be written to."""
        given = self.matrix(name, array, ("int32", "int64"))
        if given != shape:
            raise ArgumentError(f"{name} must have the shape of positions, {shape}, got {given}.")
        self.require_device(array)
        self._require_own_kind(name, array)

    def _require_own_kind(self, name: str, array: Array) -> None:
        """Refuse an output that is not where the backend writes, or is read-only."""
        is_foreign = self._is_emulated and hasattr(array, "__cuda_array_interface__")
        if isinstance(array, np.ndarray) != self._has_numpy_arrays and not is_foreign:
            raise DtypeError(
                f"{name} must be on the device of backend {self._backend.name!r}, got {type(array).__name__}."
            )
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise ArgumentError(f"{name} is read-only; pass an array that can be written.")

    def require_device(self, array: Array | None) -> None:
        """Refuse what lies elsewhere, before anything is committed."""
        if self._is_on_host:
            if getattr(array, "is_cuda", False):
                raise ArgumentError(f"Backend {self._backend.name!r} works on the host; an array on a GPU was given.")
            return
        if not getattr(array, "is_cuda", True):
            raise ArgumentError(
                "A torch tensor in the host's memory was given; pass it on the table's device, or as a numpy array, "
                "which is staged."
            )
        owner = stream_owner(array)
        if owner is not None and self._owner is not None and owner[1] != self._owner[1]:
            raise ArgumentError(f"An array on device {owner[1]} was given to a table on device {self._owner[1]}.")

    def require_empty_rows(self, start: int, stop: int, *, will_commit: bool) -> None:
        """Refuse rows that are padding where they hold blocks, now or as of the last commit."""
        occupied = np.flatnonzero(self._rows.filled[:, start:stop].any(0))
        if occupied.size:
            raise ArgumentError(
                f"Row {start + occupied[0]} is not empty: with idx_mapping=None the rows from num_reqs {start} to "
                f"num_reqs_padded {stop} are the batch's padding; clear it, move it, or pass an idx_mapping."
            )
        if will_commit:
            return
        occupied = np.flatnonzero(self._rows.committed_filled[:, start:stop].any(0))
        if occupied.size:
            raise ArgumentError(
                f"Row {start + occupied[0]} has changes that are not on the device yet: with idx_mapping=None the rows "
                f"from num_reqs {start} to num_reqs_padded {stop} are the batch's padding; commit first."
            )

    def seq_lens(self, given: SeqLens, num_reqs: int) -> None:
        """Refuse lengths of single groups that are not of one batch, or not where the table is."""
        for array in given if isinstance(given, tuple) else ():
            length = vector_length("seq_lens", array, "int32")
            if length != num_reqs:
                raise ArgumentError(f"seq_lens must hold {num_reqs} entries, one a request, got {length}.")
            self.require_device(array)

    def num_tokens(self, num_tokens: int, num_tokens_padded: int | None, size: int | None = None) -> None:
        """Refuse more tokens than a slot buffer has. size: of the caller's own; None: the table's."""
        entries = self._config.max_num_batched_tokens if size is None else size
        if num_tokens > entries:
            raise ArgumentError(f"positions holds {num_tokens} tokens, but the slot buffer has {entries} entries.")
        if num_tokens_padded is not None and non_negative("num_tokens_padded", num_tokens_padded) > entries:
            raise ArgumentError(f"num_tokens_padded {num_tokens_padded} is above the slot buffer's {entries} entries.")

    def slot_outputs(
        self,
        batch: Batch,
        buffers: StepBuffers | None,
        out: Any,
        groups: tuple[int, ...] | None,
        num_tokens_padded: int | None,
        views: BufferViews,
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Return where the slots of a batch go, one array for each group, and what the caller is given of them.

        Args:
            batch: the inputs.
            buffers: the set. None: `out` holds the caller's own arrays.
            out: as given.
            groups: those that are named. None: all.
            num_tokens_padded: entries to return. None: `len(positions)` of a set, all of the caller's own.
            views: of the sets.
        """
        num_tokens = batch.num_positions
        if buffers is None:
            num_groups = len(self._config.groups if groups is None else groups)
            arrays = self.slot_arrays(out, num_groups, num_tokens, num_tokens_padded)
            whole = num_tokens_padded is None
            return arrays, arrays if whole else tuple(array[:num_tokens_padded] for array in arrays)
        self.num_tokens(num_tokens, num_tokens_padded)
        arrays = buffers.slot_mappings
        returned = views.slot_mappings(buffers, num_tokens if num_tokens_padded is None else num_tokens_padded)
        if groups is None:
            return arrays, returned
        return tuple(arrays[group] for group in groups), tuple(returned[group] for group in groups)

    def slot_arrays(
        self, out: Any, num_groups: int, num_tokens: int, num_tokens_padded: int | None
    ) -> tuple[Array, ...]:
        """Return a caller's own slot arrays, one for each of the groups."""
        if not isinstance(out, Sequence) or len(out) != num_groups:
            raise ArgumentError(
                f"out must be a set of buffers from create_buffers(), or {num_groups} arrays, one a group."
            )
        if len({id(array) for array in out}) < num_groups:
            raise ArgumentError("out must hold another array for each group; one is given twice.")
        for group, array in enumerate(out):
            name = f"out[{group}]"
            self._check_slot_dtype(name, array)
            self.num_tokens(num_tokens, num_tokens_padded, vector_length(name, array, self._config.slot_dtype))
            self._require_own_kind(name, array)
        return tuple(out)

    def _check_slot_dtype(self, name: str, array: Any) -> None:
        """Refuse another dtype than the slots', which no conversion would help."""
        wanted = self._config.slot_dtype
        found = array_spec(name, array).dtype
        if found != wanted:
            other = f', or make the table with slot_dtype="{found}"' if found in get_args(SlotDtype) else ""
            raise DtypeError(
                f"{name} must be {wanted}, the slot_dtype of this table, got {found}; allocate it as {wanted}{other}."
            )


def require_tokens(query_start_loc: Array | None, positions: Array | None) -> None:
    """Refuse a call that maps slots without its arrays."""
    if query_start_loc is None:
        raise DtypeError("query_start_loc must be an int32 array of num_reqs + 1 entries, got None.")
    if positions is None:
        raise DtypeError("positions must be an int64 array of at least num_tokens entries, got None.")
