"""Where requests live in the table: rows that never move, as vLLM's V2 runner has them, or a dense batch, as V1 has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import numpy as np

from blocktable.typing import IntArray

Operation = tuple[str, tuple[Any, ...]]
"""A row operation: the name of a method of `BlockTable`, and its arguments."""

NO_ROW = -1


class RowLayout(ABC):
    """Gives rows to requests, which it knows by their handles.

    Attributes:
        row_of: [num_rows] int64. Row of each handle, `NO_ROW` where it has none.
    """

    def __init__(self, num_rows: int) -> None:
        self.row_of: IntArray = np.full(num_rows, NO_ROW, np.int64)

    @abstractmethod
    def place(self, handles: IntArray) -> None:
        """Give each handle a row that is empty."""

    def release(self, handles: IntArray) -> list[Operation]:
        """Take the rows away and empty them."""
        rows = self.row_of[handles]
        self.row_of[handles] = NO_ROW
        self._free(rows)
        return [("clear_rows", (rows,))]

    @abstractmethod
    def _free(self, rows: IntArray) -> None:
        """Note that rows are empty."""

    @abstractmethod
    def arrange(self, handles: IntArray, is_prefill: IntArray) -> tuple[IntArray, IntArray | None, list[Operation]]:
        """Put a batch into its order.

        Args:
            handles: [num_reqs]. Live requests that have tokens in the step or, in a dense batch, all live ones.
            is_prefill: [num_reqs] bool.

        Returns:
            The permutation of `handles` that is the batch's order; `idx_mapping` [num_reqs] int32, or None where batch
            index and row are one; and the row operations that this takes.
        """


class StableRows(RowLayout):
    """A row is a request's for life; `idx_mapping` says which rows a batch has. The row freed first is used first."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self._empty = deque(range(num_rows))

    def place(self, handles: IntArray) -> None:
        """Give each handle the row that has been empty for longest."""
        for handle in handles.tolist():
            self.row_of[handle] = self._empty.popleft()

    def _free(self, rows: IntArray) -> None:
        self._empty.extend(rows.tolist())

    def arrange(self, handles: IntArray, is_prefill: IntArray) -> tuple[IntArray, IntArray | None, list[Operation]]:
        """Keep the order."""
        return np.arange(handles.size), self.row_of[handles].astype(np.int32), []


class DenseRows(RowLayout):
    """Batch index and row are one: after requests leave, others move up, and decodes stand before prefills."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self._handle_in: IntArray = np.full(num_rows, NO_ROW, np.int64)
        self._end = 0  # rows at and after it are empty

    def place(self, handles: IntArray) -> None:
        """Give each handle an empty row."""
        holes = np.flatnonzero(self._handle_in[: self._end] == NO_ROW)[: handles.size]
        rows = np.concatenate((holes, np.arange(self._end, self._end + handles.size - holes.size)))
        self._end += handles.size - holes.size
        self._put(handles, rows)

    def _free(self, rows: IntArray) -> None:
        self._handle_in[rows] = NO_ROW

    def arrange(self, handles: IntArray, is_prefill: IntArray) -> tuple[IntArray, IntArray | None, list[Operation]]:
        """Return the order, the mapping and the row operations it takes."""
        operations = self._condense() + self._decodes_first(handles, is_prefill)
        return np.argsort(self.row_of[handles]), None, operations

    def _put(self, handles: IntArray, rows: IntArray) -> None:
        self.row_of[handles] = rows
        self._handle_in[rows] = handles

    def _condense(self) -> list[Operation]:
        """Move the last rows into the holes."""
        occupied = np.flatnonzero(self._handle_in[: self._end] != NO_ROW)
        holes = np.flatnonzero(self._handle_in[: occupied.size] == NO_ROW)
        self._end = occupied.size
        if not holes.size:
            return []
        movers = occupied[-holes.size :][::-1].copy()
        handles = self._handle_in[movers]
        self._handle_in[movers] = NO_ROW
        self._put(handles, holes)
        if holes.size == 1:
            return [("move_row", (int(movers[0]), int(holes[0])))]
        return [("permute_rows", (movers, holes))]

    def _decodes_first(self, handles: IntArray, is_prefill: IntArray) -> list[Operation]:
        """Exchange prefills that stand among the decodes with decodes that stand after them."""
        num_decodes = handles.size - int(np.count_nonzero(is_prefill))
        in_front = self.row_of[handles] < num_decodes
        prefills, decodes = handles[is_prefill & in_front], handles[~is_prefill & ~in_front]
        if not prefills.size:
            return []
        prefill_rows, decode_rows = self.row_of[prefills], self.row_of[decodes]
        self._put(prefills, decode_rows)
        self._put(decodes, prefill_rows)
        if prefills.size == 1:
            return [("swap_rows", (int(prefill_rows[0]), int(decode_rows[0])))]
        src, dst = np.concatenate((prefill_rows, decode_rows)), np.concatenate((decode_rows, prefill_rows))
        return [("permute_rows", (src, dst))]
