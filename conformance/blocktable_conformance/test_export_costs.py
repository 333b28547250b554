"""What exports cost: places far from the entries of a batch, and of the one before it, are not touched."""

from __future__ import annotations

import pytest

from blocktable import KVCacheGroup, Layout
from blocktable_conformance.asserts import check
from blocktable_conformance.cases import make
from blocktable_conformance.exports import ExportPair
from blocktable_conformance.subject import Subject
from blocktable_conformance.test_exports import CSR, INVERSE_MAP, KV, MISSING_IS_MINUS_1, SPOILED, TOKEN_CSR, spoil

FAR = 256
"""More places than a program of a GPU does in one turn."""


@pytest.mark.large
@pytest.mark.parametrize(
    "wanted", [CSR, TOKEN_CSR, KV, INVERSE_MAP, MISSING_IS_MINUS_1], ids=lambda wanted: wanted.kind
)
def test_an_export_leaves_far_places_alone(subject_once: Subject, wanted: Layout) -> None:
    """Two short rows in wide arrays: what stands far after their entries before an export stands there after it.

    Rules: R25.14.
    """
    if not subject_once.declares("exports"):
        pytest.skip(f"{subject_once.label} does not declare exports")
    if getattr(subject_once.backend, "costs_follow_width", False):
        pytest.skip(f"{subject_once.label} says costs_follow_width: it writes every place")
    group = KVCacheGroup(block_size=2, num_blocks=700)
    pair = make(subject_once, group, width=700, rows=[[5, 6, 7], [8]])
    pair.commit()
    export = ExportPair(pair, wanted)
    export.run([0, 1], [6, 2])
    spoil(export.out.entries)
    subject_once.backend.synchronize()
    inputs = [subject_once.device_array(values, "int32") for values in ([1, 0], [2, 6])]
    pair.table.export(wanted, inputs[0], seq_lens=inputs[1], out=export.out)
    far = subject_once.to_host(export.out.entries)[..., FAR:]
    touched = int((far != SPOILED).sum())
    check(touched == 0, "R25.14", f"{touched} of {far.size} places far from an entry were written.")
