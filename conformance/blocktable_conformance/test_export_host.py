"""Exports on the host: the twin of what the device exports (R37)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktable import ArgumentError, BlockTableConfig, BlockTableError, Export, KVCacheGroup, Layout
from blocktable.exports import RING_AND_REQUEST_KINDS
from blocktable_conformance.asserts import check, check_values, must_raise
from blocktable_conformance.cases import make
from blocktable_conformance.exports import ARRAYS, RULES, ExportPair
from blocktable_conformance.pair import Pair
from blocktable_conformance.strategies import batches, configs
from blocktable_conformance.subject import HostArray, Subject
from blocktable_conformance.test_export_parts import ALL, PARTS, filled_pair
from blocktable_conformance.test_exports import FULL, is_allowed, three_rows


@pytest.fixture(autouse=True)
def exporting(request: pytest.FixtureRequest) -> None:
    """Skip for a backend that does not declare exports."""
    found: Subject = request.getfixturevalue("subject_once")
    if not found.declares("exports"):
        pytest.skip(f"{found.label} does not declare exports")


def may_export(wanted: Layout, pair: Pair, group: int) -> bool:
    """Say whether a group may be exported in a layout of this suite."""
    shape = pair.oracle.shapes[group]
    if wanted.kind == "ring":
        return shape.slot_mode == "ring"
    if wanted.kind == "block_requests":
        return shape.slot_mode != "none"
    return is_allowed(wanted, pair.config.groups[group], shape)


def check_host_twin(pair: Pair, result: Export, twin: Export) -> None:
    """Check that the host's export is the device's, entry by entry."""
    host = pair.subject.to_host
    check(len(result.entries) == len(twin.entries), "R37", "the host's export must have as many arrays.")
    for name in ARRAYS:
        ours, theirs = (getattr(each, name) for each in (result, twin))
        check((ours is None) == (theirs is None), "R37", f"{name} must be there just where the device has it.")
        pairs = zip(ours, theirs, strict=True) if name == "entries" else [(ours, theirs)] * (ours is not None)
        for device, copy in pairs:
            wanted = host(device)
            check(type(copy) is np.ndarray, "R37", f"{name} must be a numpy array, got {type(copy).__name__}.")
            same = wanted.dtype == copy.dtype and wanted.shape == copy.shape and np.array_equal(wanted, copy)
            what = f"{name} of {result.layout.kind} must be {wanted.tolist()}, got {copy.tolist()}."
            check(same, f"R37, {RULES[result.layout.kind]}", what)


@given(data=st.data(), config=configs())
def test_exports_on_the_host_are_the_devices(
    subject_once: Subject, data: st.DataObject, config: BlockTableConfig
) -> None:
    """Any layout of any group over any batch and any boundaries: host, device and oracle agree; parts of linear groups.

    Rules: R34, R35, R37.
    """
    pair = filled_pair(subject_once, data, config)
    has_export_parts = subject_once.declares("export_parts")
    wanted = data.draw(
        st.sampled_from([each for each in ALL if has_export_parts or each.kind not in RING_AND_REQUEST_KINDS])
    )
    group = data.draw(st.integers(0, len(config.groups) - 1))
    if not may_export(wanted, pair, group):
        with must_raise(BlockTableError, "R37", f"{wanted.kind} of {config.groups[group]} on the host"):
            pair.table.export_host(wanted, np.zeros(1, np.int32), groups=group, seq_lens=np.zeros(1, np.int32))
        return
    shape = pair.oracle.shapes[group]
    world_size = shape.share.world_size if shape.share else 1
    # This many tokens are a boundary whatever the ranks share.
    boundary = shape.kernel_block_size * (world_size * shape.share.interleave_size if shape.share else 1)
    batch: Any = data.draw(batches(config, pair.oracle))
    mapping, num_reqs = batch.idx_mapping, batch.num_reqs
    first, stride = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 2))
    may_begin_anywhere = has_export_parts and wanted in PARTS and shape.slot_mode == "linear"
    has_parts = may_begin_anywhere and data.draw(st.booleans())
    firsts = [boundary * ((first + stride * i) % 4) for i in range(num_reqs)] if has_parts else None
    reach = shape.width * shape.kernel_block_size * world_size
    lens = [(data.draw(st.integers(0, reach + 5)) + 7 * i) % (reach + 5) for i in range(num_reqs)]
    export = ExportPair(pair, wanted, (group,))
    options: dict[str, Any] = {"num_reqs_padded": batch.num_reqs_padded}
    result = export.run(mapping, lens, first_tokens=firsts, num_computed_tokens=batch.num_computed_tokens, **options)

    def on_host(values: Sequence[int] | None) -> Any:
        return None if values is None else np.array(values, np.int32)

    launches = subject_once.call_log.launches
    twin = pair.table.export_host(
        wanted,
        on_host(mapping),
        groups=group,
        seq_lens=on_host(lens),
        first_tokens=on_host(firsts),
        num_computed_tokens=on_host(batch.num_computed_tokens),
        **options,
    )
    check(subject_once.call_log.launches == launches, "R37", "the backend was called.")
    check_host_twin(pair, result, twin)


def test_the_host_sees_pending_changes(subject_once: Subject) -> None:
    """Changes that are not committed are there, requests of tokens too, and the batch may be of any size.

    Rules: R35, R37.
    """
    pair = three_rows(subject_once, FULL)
    pair.do("append_row", 1, [30])
    pair.do("clear_row", 0)

    def i32(*values: int) -> HostArray:
        return np.array(values, np.int32)

    launches = subject_once.call_log.launches
    result = pair.table.export_host("csr", i32(1, 0, 2), seq_lens=i32(6, 12, 8), num_reqs_padded=4)
    check_values(result.indptr, [0, 2, 2, 4, 4], "R37", "indptr")  # type: ignore[arg-type]
    check_values(result.entries[0][:5], [14, 30, 18, 19, 0], "R37", "the indices")
    check(len(result.entries[0]) == 16, "R37", "the indices are as long as a set has them.")
    many = pair.table.export_host("csr", np.ones(9, np.int32), seq_lens=np.full(9, 8, np.int32))
    check_values(many.entries[0], [14, 30] * 9, "R37", "the indices of a batch above max_num_reqs")
    tokens = pair.table.export_host(
        "token_requests", i32(1, 2), query_start_loc=i32(0, 2, 3), num_reqs_padded=4, num_tokens_padded=6
    )
    check_values(tokens.entries[0], [0, 0, 1, -1, -1, -1], "R37", "the requests")
    check_values(tokens.indptr, [0, 2, 3, 3, 3], "R37", "the starts")  # type: ignore[arg-type]
    with must_raise(ArgumentError, "R37", "a first token inside a block"):
        pair.table.export_host("csr", i32(1), seq_lens=i32(6), first_tokens=i32(3))
    check(subject_once.call_log.launches == launches, "R37", "the backend was called.")
    pair.commit()
    array = subject_once.device_array
    device = pair.table.export("csr", array([1, 0, 2], "int32"), seq_lens=array([6, 12, 8], "int32"), num_reqs_padded=4)
    check_host_twin(pair, device, result)


def test_a_set_that_could_not_be_so_long(subject_once: Subject) -> None:
    """Where a set would need 2**31 entries the host's export is as long as it is used; groups are refused as anywhere.

    Rules: R25.15, R37.
    """
    pair = make(subject_once, KVCacheGroup(block_size=2**20, num_blocks=2047), width=1024, rows=[[5, 6]])
    row, lens = np.zeros(1, np.int32), np.full(1, 3, np.int32)
    result = pair.table.export_host("token_csr", row, seq_lens=lens)
    check_values(result.entries[0], [5 * 2**20 + token for token in range(3)], "R37", "the tokens")
    wrong: tuple[Any, ...] = (np.array(0), np.array([[0]]), np.array([0.0]))
    for groups in wrong:
        with must_raise(BlockTableError, "R25.15", f"groups {groups!r}"):
            pair.table.export_host("csr", row, seq_lens=lens, groups=groups)
