"""Calls that mypy and pyright must take. Both run over this file; nothing in it is ever run."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

import blocktable as bt
from blocktable.typing import AnyArray, BlockIds, Ints, LayoutName


class Tensor:
    """The hint that matters of torch's tensors."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {}


class DeviceArray:
    """That of Numba's arrays: an attribute of whatever kind."""

    __cuda_array_interface__: Any


def change_one_row(table: bt.BlockTable, ids: npt.NDArray[np.uint16], anything: Any) -> None:
    table.append_row(0, [1, 2])
    table.append_row(0, (1, 2))
    table.append_row(0, range(3))
    table.append_row(0, deque([1]))
    table.append_row(0, ids)
    table.append_row(0, ids.tolist())
    table.append_row(0, [np.int64(3), 4])
    table.append_row(0, np.zeros((2, 3), np.int64))
    table.append_row(0, [])
    table.append_row(0, None)
    table.append_row(0, anything)
    table.set_row(0, [[1, 2], [3]])
    table.set_row(0, [[1, 2], None, ids, (4, 5), range(6, 9), []])
    table.truncate_row(0, 3)
    table.truncate_row(0, [3, 4])
    table.truncate_row(0, ids)
    table.replace_blocks(0, 1, 2, [3])
    table.replace_blocks(0, 1, 2, None)


def change_many_rows(table: bt.BlockTable, rows: npt.NDArray[np.int64], ids: list[list[int]]) -> None:
    table.append_rows([0, 1], [1, 2, 3], [1, 2])
    table.append_rows(rows, ids, rows)
    table.set_rows(range(2), [np.arange(3), None], [[1, 2], [0, 0]])
    table.set_rows(rows, ids, [rows, [1, 2]])
    table.clear_rows(rows)
    table.clear_rows(())
    table.truncate_rows(rows, np.zeros((2, 2), np.int32))
    table.null_ranges([0], 0, rows, (1,))
    table.replace_block_ranges(rows, 0, rows, rows, rows)
    table.remap_blocks(0, [1], rows)
    table.permute_rows(rows, [1])
    table.copy_rows((0, 0), rows)
    table.common_blocks(rows, 0)
    table.config.kernel_block_ids(0, rows)


def step(table: bt.BlockTable, of_torch: Tensor, of_numba: DeviceArray, anything: Any) -> None:
    of_numpy = np.zeros(3, np.int32)
    table.step(of_numpy, of_numpy, np.zeros(3, np.int64), num_computed_tokens=np.arange(3, dtype=np.int32))
    table.step(of_torch, of_torch, of_torch, num_computed_tokens=of_torch)
    table.step(of_numba, of_numba, of_numba)
    table.step(anything, anything, anything)
    table.step(None, of_torch, of_numpy)
    table.gather(of_torch, 4, out=table.create_buffers())
    table.gather(None, num_reqs=2)
    table.compute_slot_mappings(of_torch, of_torch, of_torch, out=[of_torch, of_torch])
    table.step_metadata(of_torch, of_torch, of_torch, of_torch, layouts="csr")
    table.step_metadata(of_torch, of_torch, of_torch, [of_torch], layouts=["csr", None, bt.LAYOUTS["state"]])
    table.map_positions(of_torch, 0, of_torch, out=of_torch)


def export(table: bt.BlockTable, batch: AnyArray, name: LayoutName, name_of_a_user: str) -> None:
    table.export("flashinfer", batch, seq_lens=batch)
    table.export(name, batch, groups=[0, 1])
    table.export(bt.LAYOUTS[name_of_a_user], batch)
    table.export_host("csr", batch, seq_lens=batch)
    table.create_export("csr", capacity=4)
    bt.plan_width(table.config, ["flash_mla", bt.LAYOUTS["csr"]])


def hand_on(requests: bt.Requests, ids: BlockIds, more: Ints) -> None:
    requests.sync("a", ids)
    requests.sync("a", [more, None])
    requests.sync_batch(["a", 7], [[1, 2], more])
    requests.table.set_row(requests.row("a"), ids)
