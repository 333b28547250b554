"""One export of a table under test and the oracle's, compared in whole arrays at every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from blocktable import ArgumentError, Export, Layout
from blocktable_conformance.asserts import check, fail, joined, must_raise
from blocktable_conformance.oracle_exports import Exported, ExportOracle
from blocktable_conformance.pair import Pair
from blocktable_conformance.subject import HostArray, address

RULES = {
    "table": "R26",
    "placeholder": "R26",
    "csr": "R27",
    "lengths": "R27",
    "token_csr": "R28",
    "kv_offsets": "R29",
    "inverse_map": "R30",
    "state": "R31",
    "ring": "R35",
    "token_requests": "R35",
    "block_requests": "R35",
}
"""Kind of a layout -> the rule that says what it holds."""

ARRAYS = ("entries", "indptr", "last_page_lens", "lengths")


class ExportPair:
    """A set of one layout's buffers and what it must hold.

    Attributes:
        pair: the table and its oracle.
        layout: the layout.
        groups: the groups.
        out: the buffers.
        rules: the rule of its kind, which a wrong number breaks.
    """

    def __init__(
        self,
        pair: Pair,
        layout: Layout,
        groups: Sequence[int] = (0,),
        *,
        capacity: int | None = None,
        max_batch: int | None = None,
    ) -> None:
        self.pair = pair
        self.layout = layout
        self.groups = tuple(groups)
        self.out = pair.table.create_export(layout, self.groups, capacity=capacity, max_batch=max_batch)
        self.rules = RULES[layout.kind]
        self._addresses = self._current_addresses()
        self._num_cut = 0
        self.check_written([], query_start_loc=[0])

    def run(
        self,
        idx_mapping: Sequence[int] | None,
        seq_lens: Sequence[int] | None = None,
        *,
        num_reqs: int | None = None,
        num_reqs_padded: int | None = None,
        num_computed_tokens: Sequence[int] | None = None,
        first_tokens: Sequence[int] | None = None,
        query_start_loc: Sequence[int] | None = None,
        num_tokens_padded: int | None = None,
    ) -> Any:
        """Export a batch on both; check the whole arrays and the views.

        Where the capacity cuts it, host arrays must be refused; of device arrays what is cut is counted (R27).
        """
        subject = self.pair.subject
        requests = _first_length(idx_mapping, seq_lens, num_reqs)
        mapping = range(requests) if idx_mapping is None else idx_mapping
        extra: dict[str, Any] = {"first_tokens": first_tokens, "query_start_loc": query_start_loc}
        oracle = self._oracle(mapping, seq_lens, num_computed_tokens, **extra)
        num_cut = self._expected_of(oracle).num_cut
        is_boundary = all(map(oracle.is_boundary, oracle.batch))
        given = (idx_mapping, seq_lens, num_reqs, num_reqs_padded, num_computed_tokens)
        if (num_cut or not is_boundary) and self.is_on_host:
            with must_raise(ArgumentError, "R27, R34", f"an export that leaves out or rounds {num_cut}"):
                self._run_on_table(*given, **extra, num_tokens_padded=num_tokens_padded)
            return None
        result = self._run_on_table(*given, **extra, num_tokens_padded=num_tokens_padded)
        rules = "" if first_tokens is None else "R34"
        self.check_written(mapping, seq_lens, num_computed_tokens=num_computed_tokens, rules=rules, **extra)
        self.check_views(result, requests if num_reqs_padded is None else num_reqs_padded, num_tokens_padded)
        self._num_cut = min(self._num_cut + num_cut, 2**31 - 1)
        if self.out.num_cut is not None:
            got = subject.to_host(self.out.num_cut).tolist()
            check(got == [self._num_cut], "R27, R34", f"num_cut must be [{self._num_cut}], got {got}.")
        return result

    @property
    def is_on_host(self) -> bool:
        """Whether the suite's arrays are the host's own for this backend, whose contents the core sees."""
        return type(self.pair.subject.device_array([0], "int32")) is np.ndarray

    def _run_on_table(
        self,
        idx_mapping: Sequence[int] | None,
        seq_lens: Sequence[int] | None,
        num_reqs: int | None,
        num_reqs_padded: int | None,
        num_computed_tokens: Sequence[int] | None,
        *,
        first_tokens: Sequence[int] | None,
        query_start_loc: Sequence[int] | None,
        num_tokens_padded: int | None,
    ) -> Export:
        subject = self.pair.subject

        def given(values: Sequence[int] | None) -> Any:
            return None if values is None else subject.device_array(values, "int32")

        return self.pair.table.export(
            self.layout,
            given(idx_mapping),
            groups=self.groups,
            seq_lens=given(seq_lens),
            num_reqs=num_reqs,
            num_reqs_padded=num_reqs_padded,
            num_computed_tokens=given(num_computed_tokens),
            first_tokens=given(first_tokens),
            query_start_loc=given(query_start_loc),
            num_tokens_padded=num_tokens_padded,
            out=self.out,
        )

    def _oracle(
        self,
        idx_mapping: Sequence[int],
        seq_lens: Sequence[int] | None = None,
        num_computed_tokens: Sequence[int] | None = None,
        first_tokens: Sequence[int] | None = None,
        query_start_loc: Sequence[int] | None = None,
    ) -> ExportOracle:
        return ExportOracle(
            self.pair.oracle,
            self.pair.config,
            self.layout,
            self.groups,
            idx_mapping,
            seq_lens,
            num_computed_tokens,
            first_tokens,
            query_start_loc,
            max_batch=self.out.max_batch,
        )

    def _expected_of(self, oracle: ExportOracle) -> Exported:
        return oracle.run(capacity=self.out.capacity, num_kernel_blocks=self.out.num_kernel_blocks)

    def expected(
        self,
        idx_mapping: Sequence[int],
        seq_lens: Sequence[int] | None = None,
        num_computed_tokens: Sequence[int] | None = None,
    ) -> Exported:
        """Return the oracle's answer."""
        return self._expected_of(self._oracle(idx_mapping, seq_lens, num_computed_tokens))

    def check_written(
        self,
        idx_mapping: Sequence[int],
        seq_lens: Sequence[int] | None = None,
        *,
        num_computed_tokens: Sequence[int] | None = None,
        first_tokens: Sequence[int] | None = None,
        query_start_loc: Sequence[int] | None = None,
        rules: str = "",
    ) -> None:
        """Check the whole arrays against the oracle, whatever wrote them.

        Args:
            idx_mapping, seq_lens, num_computed_tokens, first_tokens, query_start_loc: the batch.
            rules: what a wrong entry breaks in addition to its part of R25 and the rule of the kind.
        """
        oracle = self._oracle(idx_mapping, seq_lens, num_computed_tokens, first_tokens, query_start_loc)
        expected = self._expected_of(oracle)
        num_entries = 0 if expected.indptr is None else expected.indptr[-1]
        for name in ARRAYS:
            array, wanted = getattr(self.out, name), getattr(expected, name)
            check(
                (array is None) == (wanted is None) or (name == "entries" and not wanted),
                self.rules,
                f"{self.layout.kind!r} must have {name} just where its rule says so.",
            )
            if array is not None:
                got = self.pair.subject.to_host(array)
                whole = np.array(wanted, self.layout.dtype if name == "entries" else "int32")
                place = self._first_wrong(name, got, whole)
                if place is not None:
                    is_fill = name == "entries" and whole[place] == self.out.fills[place[0]]
                    parts = self._parts_of(name, place, is_fill, oracle, num_entries)
                    self._fail(name, place, got, whole, joined(rules, parts, self.rules))
        check(self._current_addresses() == self._addresses, "R25.8", "an array of an export moved.")

    def check_views(self, result: Export, num_rows: int, num_tokens: int | None = None) -> None:
        """Check what a call returned: views of the buffers, as many batch rows, or tokens, as were asked for."""
        out, to_host = self.out, self.pair.subject.to_host
        is_csr = out.indptr is not None
        check(len(result.entries) == (0 if out.entries is None else len(self.groups)), "R25.15", "an array a group.")
        for index, view in enumerate(result.entries):
            whole = out.entries[index]  # type: ignore[index]
            if (num_rows or is_csr) and num_tokens != 0:
                check(
                    address(view) == address(whole), "R25.8", f"the entries of group {self.groups[index]} are a copy."
                )
            rows = to_host(whole)[:num_tokens] if is_csr else to_host(whole)[:num_rows]
            got = to_host(view)
            check(np.array_equal(got.reshape(rows.shape), rows), self.rules, f"the view of the entries is {got.shape}.")
        for name, length in (("indptr", num_rows + 1), ("last_page_lens", num_rows), ("lengths", num_rows)):
            view, whole = getattr(result, name), getattr(out, name)
            check((view is None) == (whole is None), self.rules, f"{name} must be there just where its rule says so.")
            if view is not None:
                check(np.array_equal(to_host(view), to_host(whole)[:length]), self.rules, f"the view {name} is wrong.")

    def _current_addresses(self) -> list[int]:
        arrays = (getattr(self.out, name) for name in ARRAYS)
        return [address(array) for array in arrays if array is not None]

    def _what(self, name: str) -> str:
        return f"{name} of layout {self.layout.name!r} ({self.layout.kind}) of groups {self.groups}"

    def _first_wrong(self, name: str, got: HostArray, wanted: HostArray) -> tuple[int, ...] | None:
        """Check dtype and shape of an array; return where its first wrong number is, or None."""
        what = self._what(name)
        check(got.dtype == wanted.dtype, self.rules, f"{what} must be {wanted.dtype}, got {got.dtype}.")
        check(got.shape == wanted.shape, self.rules, f"{what} must have shape {wanted.shape}, got {got.shape}.")
        wrong = np.argwhere(got != wanted)
        return tuple(int(index) for index in wrong[0]) if wrong.size else None

    def _parts_of(
        self, name: str, place: tuple[int, ...], is_fill: bool, oracle: ExportOracle, num_entries: int
    ) -> str:
        """Return the parts of R25 that a wrong number breaks.

        Args:
            name: of its array.
            place: where it is.
            is_fill: whether it must be the fill.
            oracle: of the batch.
            num_entries: entries of all requests, where they stand one request after another.
        """
        is_entry = name == "entries"
        if is_entry and self.out.indptr is not None:
            is_behind, is_dummy = place[1] >= num_entries, False
        else:
            request = place[1] if is_entry else max(0, place[0] - (name == "indptr"))
            is_behind, is_dummy = request >= oracle.num_reqs, oracle.is_dummy(oracle.batch[request])
        if is_behind:
            return "R25.6, R25.13"
        if is_dummy:
            return "R25.6"
        has_window = any(request.num_computed_tokens is not None for request in oracle.batch)
        return joined(
            "R25.5" if is_entry and (has_window or not is_fill) else "",
            "R25.7" if is_fill else "",
            "R25.15" if len(self.groups) > 1 else "",
        )

    def _fail(self, name: str, place: tuple[int, ...], got: HostArray, wanted: HostArray, rules: str) -> None:
        around = place[:-1]
        fail(
            rules,
            f"{self._what(name)} is wrong at {place}: expected {wanted[place]}, got {got[place]}; "
            f"{np.count_nonzero(got != wanted)} entries differ.\n"
            f"  expected {_shortened(wanted[around])}\n"
            f"  got      {_shortened(got[around])}",
        )


def _first_length(*given: Any) -> int:
    value = next(value for value in given if value is not None)
    return value if isinstance(value, int) else len(value)


def _shortened(values: HostArray) -> str:
    return str(values.tolist()[:40])
