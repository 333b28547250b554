"""Our own table by an adapter's calls: what keeps every rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import blocktable as bt
from blocktable_conformance.engines.adapter import FEATURES, Engine, Rows, Shape, Span, as_rows, flatten


class OwnTable(Engine):
    """`blocktable.BlockTable` over the numpy backend."""

    label = "blocktable"
    version = bt.__version__
    features = frozenset(FEATURES) - {"aligned spans"}

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.table = bt.BlockTable(shape.config(type(self)), "numpy")
        self.out = self.table.create_buffers()

    def append_row(self, row: int, ids: list[list[int]]) -> None:
        """R4."""
        self.table.append_row(row, ids)

    def set_row(self, row: int, ids: list[list[int]]) -> None:
        """R4."""
        self.table.set_row(row, ids)

    def clear_row(self, row: int) -> None:
        """R4."""
        self.table.clear_row(row)

    def move_row(self, src: int, dst: int) -> None:
        """R4."""
        self.table.move_row(src, dst)

    def swap_rows(self, a: int, b: int) -> None:
        """R4."""
        self.table.swap_rows(a, b)

    def copy_row(self, src: int, dst: int) -> None:
        """R4."""
        self.table.copy_row(src, dst)

    def truncate_row(self, row: int, num_blocks: int) -> None:
        """R4."""
        self.table.truncate_row(row, num_blocks)

    def commit(self) -> None:
        """R9."""
        self.table.commit()

    def columns(self) -> Rows:
        """The filled columns."""
        groups = range(self.shape.groups)
        return as_rows([[self.table.host_row(group, row) for row in range(self.shape.rows)] for group in groups])

    def host_table(self) -> Rows:
        """The mirror."""
        return as_rows([self.table.host_table(group) for group in range(self.shape.groups)])

    def device_table(self) -> Rows:
        """The committed rows."""
        return as_rows([self.table.device_table(group) for group in range(self.shape.groups)])

    def gather(self, rows: Sequence[int], padded: int, computed: Sequence[int] | None = None) -> Rows:
        """R10, R11."""
        given = None if computed is None else np.array(computed, np.int32)
        self.table.gather(np.array(rows, np.int32), padded, num_computed_tokens=given, out=self.out)
        return as_rows(self.out.block_tables)

    def slots(self, spans: Sequence[Span]) -> list[list[int]]:
        """R12 to R15."""
        rows, starts, positions = flatten(spans)
        self.table.compute_slot_mappings(
            np.array(rows, np.int32), np.array(starts, np.int32), np.array(positions, np.int64), out=self.out
        )
        return [[int(slot) for slot in slots] for slots in self.out.slot_mappings]
