"""The torch backend: no call looks at what an array holds, and devices are named, found and refused."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable.backend import Batch

torch: Any = pytest.importorskip("torch", reason="torch is not installed: tox -e torch")
pytestmark = pytest.mark.torch

# ruff: noqa: E402 - these import torch.
from torch.utils._python_dispatch import TorchDispatchMode

from blocktable_torch import TorchBackend
from blocktable_torch.memory import Memory

PACKAGE = Path(__file__).parents[1] / "backends/blocktable_torch"
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "repeat_interleave"}
"""Operations whose result, or its shape, the host must wait for."""


class Watching(TorchDispatchMode):  # type: ignore[misc]
    """Notes every operation, and refuses one for which a host would wait for its device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen.append(name)
        assert name not in WAITS, f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), "a mask as an index waits"
        return func(*args, **(kwargs or {}))


CONFIG = bt.BlockTableConfig(
    groups=[
        bt.KVCacheGroup(block_size=4, num_blocks=90, sliding_window=6, null_is_pad=True),
        bt.KVCacheGroup(block_size=4, num_blocks=90, slot_mode="ring", blocks_per_row=3, null_block_id=-1),
        bt.KVCacheGroup(block_size=4, num_blocks=90, slot_mode="none", blocks_per_row=2),
    ],
    max_num_reqs=4,
    max_num_batched_tokens=16,
    max_model_len=32,
    context_parallel=bt.ContextParallel(world_size=2, rank=1, interleave_size=2),
)


@pytest.fixture
def table() -> bt.BlockTable:
    table = bt.BlockTable(CONFIG, TorchBackend())
    table.set_rows([0, 2], [[5, 6, 7], [1, 2, 3], [8, 9]], [[2, 1], [1, 2], [1, 1]])
    table.commit()
    return table


def tensors(table: bt.BlockTable, **values: Any) -> dict[str, Any]:
    dtypes = {"positions": np.int64}
    return {
        name: table.backend.from_host(np.array(value, dtypes.get(name, np.int32))) for name, value in values.items()
    }


def test_steps_wait_for_nothing(table: bt.BlockTable) -> None:
    """Rules: R9.3, R21."""
    given = tensors(
        table,
        idx_mapping=[2, -1, 0],
        query_start_loc=[0, 1, 1, 4],
        positions=[3, 1, 2, 9],
        num_computed_tokens=[0, 1, 9],
    )
    batch = Batch(num_reqs=3, num_reqs_padded=4, num_positions=4, **given)
    with Watching() as watching:
        table.store.gather(batch, table.buffers, stream=None)
        table.mapper.compute_slot_mappings(batch, table.buffers.slot_mappings, stream=None)
        rows, positions, out = (
            torch.zeros(2, dtype=torch.int32),
            torch.ones(2, 3, dtype=torch.int32),
            torch.zeros(2, 3).long(),
        )
        table.store.map_positions(rows, 0, positions, out, stream=None)  # type: ignore[attr-defined]
    assert {"index_select", "searchsorted", "where"} <= set(watching.seen)


KINDS: dict[str, bt.Layout] = {layout.kind: layout for layout in bt.LAYOUTS.values()}
GROUP_OF = {"ring": 1, "state": 2}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_exports_wait_for_nothing(table: bt.BlockTable, kind: str) -> None:
    """Rules: R9.3, R21, R25.10."""
    layout = replace(KINDS[kind], block_sizes=(), block_multiple=1, width_tokens=1)
    out = table.create_export(layout, GROUP_OF.get(kind, 0))
    given = tensors(
        table, idx_mapping=[2, -1, 0], query_start_loc=[0, 1, 1, 4], num_computed_tokens=[0, 1, 9], seq_lens=[3, 1, 9]
    )
    batch = Batch(num_reqs=3, num_reqs_padded=4, positions=None, **given)
    with Watching() as watching:
        table.store.export(layout, batch, out, stream=None)  # type: ignore[attr-defined]
    assert watching.seen


@pytest.mark.parametrize(
    "wait", [lambda tensor: tensor.max().item(), lambda tensor: tensor[tensor > 0], lambda tensor: bool(tensor[0])]
)
def test_the_watch_sees_who_waits(wait: Callable[[Any], Any]) -> None:
    with pytest.raises(AssertionError, match="waits"), Watching():
        wait(torch.arange(3))


def test_a_device_that_torch_has_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(bt.ArgumentError, match="torch has no device 'nonsense' here"):
        bt.BlockTable(CONFIG, TorchBackend(), "nonsense")
    monkeypatch.setenv("BLOCKTABLE_TORCH_DEVICE", "nonsense")
    assert "BLOCKTABLE_TORCH_DEVICE: torch has no device 'nonsense'" in (TorchBackend().why_unavailable() or "")
    monkeypatch.setenv("BLOCKTABLE_TORCH_DEVICE", "cpu")
    backend = TorchBackend()
    assert backend.why_unavailable() is None
    assert backend.description == "torch (cpu)"
    assert not {"streams", "graph_capture"} & backend.capabilities


def test_a_table_on_the_host_takes_tensors_where_the_default_device_is_a_gpu() -> None:
    """Rules: R22."""

    class Backend(TorchBackend):
        capabilities = TorchBackend().capabilities | {"streams", "graph_capture"}

    table = bt.BlockTable(CONFIG, Backend(), "cpu")
    table.set_row(1, [[5], [1], [8]])
    step = table.step(**tensors(table, idx_mapping=[1], query_start_loc=[0, 1], positions=[2]))
    assert step.slot_mappings[1].tolist() == [6]


def test_an_array_elsewhere_is_refused() -> None:
    with pytest.raises(bt.ArgumentError, match="The table is on cpu; got an array on meta"):
        Memory(torch.device("cpu")).tensor(torch.empty(3, device="meta"))
    with pytest.raises(bt.ArgumentError, match="torch cannot read a list without a copy"):
        Memory(torch.device("cpu")).tensor([1, 2])


def test_it_is_at_most_400_lines_of_code() -> None:
    """Without docstrings, comments and empty lines."""
    num_lines = 0
    for path in PACKAGE.glob("*.py"):
        source = path.read_text()
        prose: set[int] = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                prose.update(range(node.lineno, (node.end_lineno or 0) + 1))
        blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        num_lines += len({token.start[0] for token in tokens if token.type not in blank} - prose)
    assert num_lines <= 400
