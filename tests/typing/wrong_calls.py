"""Calls that mypy and pyright must both refuse, each on its line. Both run over this file; nothing in it is ever run.

A line that one of them takes is an error as well: an ignored error that there is not.
"""

from __future__ import annotations

import numpy as np

import blocktable as bt


def change_one_row(table: bt.BlockTable) -> None:
    table.append_row("3", [1])  # type: ignore[arg-type]
    table.append_row(0, "12")  # type: ignore[arg-type]
    table.append_row(0, 12)  # type: ignore[arg-type]
    table.append_row(0, [1.5])  # type: ignore[list-item]
    table.append_row(0, np.zeros(2))  # type: ignore[arg-type]
    table.append_row(0, {1, 2})  # type: ignore[arg-type]
    table.append_row(0, {1: 2})  # type: ignore[arg-type]
    table.append_row(0, ["1", "2"])  # type: ignore[list-item]
    table.set_row(0, [[1.0], [2]])  # type: ignore[list-item]
    table.set_row(None, [1])  # type: ignore[arg-type]
    table.truncate_row(0, 1.0)  # type: ignore[arg-type]
    table.truncate_row(0, None)  # type: ignore[arg-type]
    table.replace_blocks(0, 0, 0, [[1]])  # type: ignore[list-item]
    table.null_range(0, 0, 0, "1")  # type: ignore[arg-type]


def change_many_rows(table: bt.BlockTable) -> None:
    halves = np.zeros(2, np.float32)  # inside a call mypy would choose what fits from numpy's overloads
    table.append_rows(0, [1], [1])  # type: ignore[arg-type]
    table.append_rows([0], [1], None)  # type: ignore[arg-type]
    table.append_rows([0], "1", [1])  # type: ignore[arg-type]
    table.clear_rows("0")  # type: ignore[arg-type]
    table.clear_rows(None)  # type: ignore[arg-type]
    table.clear_rows(halves)  # type: ignore[arg-type]
    table.truncate_rows([0], 1)  # type: ignore[arg-type]
    table.null_ranges([0], 0, 0, [1])  # type: ignore[arg-type]
    table.remap_blocks(0, [1], {2})  # type: ignore[arg-type]
    table.copy_rows([0], 1)  # type: ignore[arg-type]
    table.common_blocks(0, 0)  # type: ignore[arg-type]
    table.config.kernel_block_ids(0, [0.5])  # type: ignore[list-item]


def step(table: bt.BlockTable) -> None:
    ids, starts, flags = np.zeros(1, np.int32), np.zeros(2, np.int32), np.zeros(1, np.bool_)
    table.step([1], np.zeros(2), "nonsense")  # type: ignore[arg-type]
    table.step([1], starts, ids)  # type: ignore[arg-type]
    table.step(ids, np.zeros(2), ids)  # type: ignore[arg-type]
    table.step(ids, starts, "nonsense")  # type: ignore[arg-type]
    table.step(ids, starts, None)  # type: ignore[arg-type]
    table.step(ids, starts, ids, num_computed_tokens=[0])  # type: ignore[arg-type]
    table.step(ids, starts, ids, num_reqs_padded="4")  # type: ignore[arg-type]
    table.step(ids, starts, ids, out=ids)  # type: ignore[arg-type]
    table.gather(1.5)  # type: ignore[arg-type]
    table.gather(flags)  # type: ignore[arg-type]
    table.compute_slot_mappings(ids, (0, 1), ids)  # type: ignore[arg-type]
    table.compute_slot_mappings(ids, starts, ids, groups="0")  # type: ignore[arg-type]
    table.step_metadata(ids, starts, ids, 7)  # type: ignore[arg-type]
    table.step_metadata(ids, starts, ids, ids, layouts="paged")  # type: ignore[arg-type]
    table.map_positions([0], 0, ids)  # type: ignore[arg-type]


def export(table: bt.BlockTable, name_of_a_user: str) -> None:
    ids = np.zeros(1, np.int32)
    table.export("paged", ids)  # type: ignore[arg-type]
    table.export(name_of_a_user, ids)  # type: ignore[arg-type]
    table.export("csr", [0])  # type: ignore[arg-type]
    table.export("csr", ids, seq_lens=[3])  # type: ignore[arg-type]
    table.export("csr", ids, groups=None)  # type: ignore[arg-type]
    table.export_host("paged", ids)  # type: ignore[arg-type]
    table.create_export("paged")  # type: ignore[arg-type]
    bt.plan_width(table.config, "csr")  # type: ignore[arg-type]


def make(config: bt.BlockTableConfig) -> None:
    bt.BlockTable(config, "numpy", step_path="quick")  # type: ignore[arg-type]
    bt.BlockTable(config, "numpy", check=True)  # type: ignore[arg-type]
    bt.BlockTable("config", "numpy")  # type: ignore[arg-type]
    bt.Requests(config)  # type: ignore[arg-type]


def name_requests(requests: bt.Requests) -> None:
    requests.sync(["a"], [1])  # type: ignore[arg-type]
    requests.sync("a", "1")  # type: ignore[arg-type]
    requests.sync_batch(["a"], [1])  # type: ignore[list-item]
