"""A numpy store whose whole step is one compiled call, where the compiled host path is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from blocktable import BlockTableConfig, StepBuffers
from blocktable.backend import Batch, Writes
from blocktable_numpy.block_store import NumpyBlockStore, NumpyBuffers
from blocktable_numpy.kernels import Ints


@dataclass(frozen=True, eq=False)
class FusedBuffers(NumpyBuffers):
    """Outputs, and what the compiled step remembers of them.

    Attributes:
        outputs: which rows their batch tables show.
    """

    outputs: Any


class FusedNumpyStore(NumpyBlockStore):
    """The same memory; a compiled step copies only the rows that a batch does not show yet.

    Args:
        config: the geometry.
        make_step: what `blocktable.backend.compiled_step` returned.
    """

    def __init__(self, config: BlockTableConfig, make_step: Callable[..., Any]) -> None:
        super().__init__(config)
        self._step = make_step(self.arena, config.group_fields(), config.num_rows, config.max_num_reqs)
        arena = config.arena
        # One block and a count for each row and group, and a row of each group: more goes through `write`.
        columns = arena.num_rows * sum(2 + group.blocks_per_kv_block for group in config.groups) + sum(arena.widths)
        self._block: Ints = np.empty(2 * columns + 64, np.int32)

    def lend(self, stream: int | None) -> Ints:
        return self._block

    def commit(self, used: int, *, stream: int | None) -> None:
        if used:
            self._step.commit(self._block)

    def write(self, writes: Writes, *, stream: int | None) -> None:
        super().write(writes, stream=stream)
        self._step.note_writes()

    def create_buffers(self) -> FusedBuffers:
        plain = super().create_buffers()
        outputs = self._step.outputs(plain.batch, plain.slot_mappings)
        return FusedBuffers(plain.block_tables, plain.slot_mappings, plain.batch, plain.held, outputs)

    def reset_buffers(self, out: StepBuffers, *, stream: int | None) -> None:
        assert isinstance(out, FusedBuffers)
        super().reset_buffers(out, stream=stream)
        out.outputs.forget()

    def gather(self, batch: Batch, out: StepBuffers, *, stream: int | None) -> None:
        assert isinstance(out, FusedBuffers)
        super().gather(batch, out, stream=stream)
        out.outputs.forget()

    def step(self, used: int, batch: Batch, out: StepBuffers, *, stream: int | None) -> None:
        assert isinstance(out, FusedBuffers)
        if used:
            self._step.commit(self._block)
        self._step.step(batch, out.outputs)
