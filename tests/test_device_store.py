"""The device layer's memory and launches, over an emulated device whose kernels only note their arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import blocktable as bt
from blocktable.backend import GROUP_FIELDS, Batch, Writes
from blocktable.device.emulation import EmulatedDriver, EmulatedKernel
from blocktable.device.signatures import Grid, KernelOptions, signature_of
from blocktable.device.store import DeviceStore

CONFIG = bt.BlockTableConfig(
    groups=[
        bt.KVCacheGroup(block_size=4, num_blocks=9),
        bt.KVCacheGroup(block_size=8, kernel_block_size=4, num_blocks=9, null_block_id=5, pad_slot_id=41),
        bt.KVCacheGroup(block_size=4, num_blocks=9, null_block_id=-1, pad_slot_id=-3),
        bt.KVCacheGroup(block_size=4, num_blocks=9, slot_mode="cross"),
        bt.KVCacheGroup(block_size=4, num_blocks=9, slot_mode="ring", blocks_per_row=2, sliding_window=5),
    ],
    max_num_reqs=3,
    max_num_rows=7,
    max_num_batched_tokens=6,
    max_model_len=24,
)
FILLERS, PADS = [0, 10, -1, 0, 0], [-1, 41, -3, -1, -1]


class NotingDriver(EmulatedDriver):
    """Its kernels do nothing.

    Attributes:
        launched: (name, argument -> value) of each launch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[str, dict[str, int]]] = []

    def kernel(self, name: str, options: KernelOptions) -> EmulatedKernel:
        names = [argument for _, argument in signature_of(name).arguments]

        def run(grid: Grid, arguments: Sequence[int]) -> None:
            self.launched.append((name, dict(zip(names, arguments, strict=True))))

        return EmulatedKernel(self, name, 64, run)


def one_request(driver: NotingDriver) -> Batch:
    row, starts, position = (driver.upload(np.array(values, np.int32)) for values in ([0], [0, 1], [0, 0]))
    return Batch(row, starts, position.view(np.int64), 1, 1, num_positions=1, seq_lens=row)


def check_memory(store: DeviceStore, out: Any) -> None:
    """Check that a table and a set hold fillers and pads alone."""
    for arena, memory in ((CONFIG.arena, store.arena), (CONFIG.batch_arena, out.batch)):
        assert np.array_equal(memory[: arena.size], arena.empty())
    assert [set(table.ravel().tolist()) for table in out.block_tables] == [{filler} for filler in FILLERS]
    assert [table.shape[0] for table in out.block_tables] == [3] * 5
    assert [set(slots.tolist()) for slots in out.slot_mappings] == [{pad} for pad in PADS]
    assert not store.table(-1).any()
    assert store.table(-1).shape == (5, 7)


def test_memory_holds_each_groups_filler_and_pad_when_it_is_made_and_after_a_reset() -> None:
    """Rules: R5, R13, R24."""
    store = DeviceStore(CONFIG, NotingDriver(), has_fused_step=False)
    out = store.create_buffers()
    check_memory(store, out)
    out.batch[...], out.slots[...] = 77, 77
    store.reset_buffers(out, stream=None)
    check_memory(store, out)


def test_the_first_positions_of_a_dtype_are_not_captured() -> None:
    """They load a kernel; the capture goes on, and holds the calls that follow one outside it. Rules: R21, R36."""
    driver = NotingDriver()
    store, stream = DeviceStore(CONFIG, driver, has_fused_step=False), driver.streams.create()
    rows, positions, out = (driver.upload(np.zeros(shape, np.int32)) for shape in (1, (1, 2), (1, 2)))
    capture = driver.streams.begin_capture(stream)
    with pytest.raises(bt.BlockTableError, match="loads a kernel"):
        store.map_positions(rows, 0, positions, out, stream=stream)
    driver.streams.end_capture(capture)
    store.map_positions(rows, 0, positions, out, stream=stream)
    capture = driver.streams.begin_capture(stream)
    store.map_positions(rows, 0, positions, out, stream=stream)
    driver.streams.end_capture(capture)
    assert [name for name, _ in driver.launched[-1:]] == ["map_positions"]
    assert len(capture.work) == 1


@pytest.mark.parametrize("num_ranges", [1, 90])
def test_what_travels_by_value_is_never_shorter_than_its_kernel_takes(num_ranges: int) -> None:
    """A launch copies all of it: beyond a shorter block lies memory of somebody else. Rules: R9."""
    driver = NotingDriver()
    driver.change_sizes = (1000,)
    sizes: list[int] = []
    make = driver.host_block

    def host_block(entries: int) -> Any:
        sizes.append(entries)
        return make(entries)

    driver.host_block = host_block  # type: ignore[method-assign]
    store = DeviceStore(CONFIG, driver, has_fused_step=False)
    assert store.lend(None).size >= 1000
    del sizes[:]
    offsets, lengths = np.arange(num_ranges) * 2, np.ones(num_ranges, np.int32)
    store.write(Writes(CONFIG.arena, offsets, lengths, lengths), stream=None)
    assert driver.launched[-1][0] == "apply_changes_1000"
    assert min([*sizes, *(block.host.size for block in [next(store._changes.blocks)])]) >= 1000


@pytest.mark.parametrize("groups", [None, (3,), (0, 1, 2), (2, 0)])
def test_a_call_that_names_its_groups_reads_cross_groups_as_linear_ones(groups: tuple[int, ...] | None) -> None:
    """And groups that follow one another, over arrays equally far apart, are one launch. Rules: R14."""
    driver = NotingDriver()
    store = DeviceStore(CONFIG, driver, has_fused_step=False)
    out = store.create_buffers()
    batch = one_request(driver)
    driver.launched.clear()
    chosen = range(5) if groups is None else groups
    store.compute_slot_mappings(batch, [out.slot_mappings[group] for group in chosen], stream=None, groups=groups)
    assert len(driver.launched) == (2 if groups == (2, 0) else 1)
    for _, arguments in driver.launched:
        first, number = arguments["first_group"], arguments["num_groups"]
        assert [*range(first, first + number)] == [*chosen] or number == 1
        assert arguments["max_num_rows"] == 7
        size = 5 * len(GROUP_FIELDS)
        address = arguments["groups"]
        fields = np.ctypeslib.as_array((ctypes.c_int64 * size).from_address(address)).reshape(5, -1)
        mode = fields[3, GROUP_FIELDS.index("slot_mode")]
        assert mode == (2 if groups is None else 0)


def test_fields_of_groups() -> None:
    """Rules: R5, R11, R13, R14."""
    fields = {name: CONFIG.group_fields()[:, i].tolist() for i, name in enumerate(GROUP_FIELDS)}
    assert fields["filler"] == FILLERS
    assert fields["pad_slot_id"] == PADS
    assert fields["null_start"] == [0, 10, -1, 0, 0]
    assert fields["null_is_pad"] == [0, 0, 1, 0, 0]
    assert fields["sliding_window"] == [0] * 5
    assert fields["batch_start"] == [*CONFIG.batch_arena.group_offsets]
    assert fields["table_start"] == [*CONFIG.arena.group_offsets]
    for start, k, entry in ((10, 2, 11), (-1, 1, -1), (0, 4, 3)):
        assert np.uint32((entry - start) % 2**32) < k


def test_every_launch_has_the_arguments_of_its_signature() -> None:
    """Rules: R9, R10, R25."""
    driver = NotingDriver()
    store = DeviceStore(CONFIG, driver, has_fused_step=False)
    out = store.create_buffers()
    batch = one_request(driver)
    store.gather(batch, out, stream=None)
    gathered = driver.launched[-1][1]
    assert (gathered["max_num_reqs"], gathered["max_num_rows"]) == (3, 7)
    assert gathered["batch_entries"] == CONFIG.batch_arena.size
    table = bt.BlockTable(CONFIG, "numpy")
    kinds = [bt.LAYOUTS[name] for name in ("flashinfer", "aiter_mla", "trtllm_gen_kv", "torch_paged_attention")]
    for layout in kinds:
        layout = bt.Layout(
            name=layout.name, consumer="", kind=layout.kind, null=layout.null, dtype=layout.dtype, shape=layout.shape
        )
        made = table.create_export(layout, 2)
        store.export(layout, batch, made, stream=None)
        made.entries[...] = 77  # type: ignore[index]
        store.reset_export(made, stream=None)
        assert set(made.entries.ravel().tolist()) == {*made.fills}  # type: ignore[union-attr]
    names = {name for name, _ in driver.launched}
    assert {"count_entries", "start_requests", "write_indices", "write_table", "gather_block_tables"} <= names
    nulls = {arguments["null"] for _, arguments in driver.launched if "null" in arguments}
    assert nulls == {0, -1}
