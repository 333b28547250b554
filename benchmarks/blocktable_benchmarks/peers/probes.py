"""Where a peer differs from our contract: small cases whose right answer the contract says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blocktable import NULL_BLOCK_ID, PAD_SLOT_ID
from blocktable_benchmarks.gpu import Gpu
from blocktable_benchmarks.table_lane import TableLane
from blocktable_benchmarks.workloads import Inputs, Workload, make_inputs

HOLD_US = 20_000

SMALL = Workload(name="probe", num_reqs=4, max_model_len=1024, share=1 / 4, filled=4, max_num_batched_tokens=64)


def probe(make_lane: Callable[[], Any], gpu: Gpu | None) -> list[dict[str, Any]]:
    """Return one finding for each case: its rule, what the contract says, and whether the peer does so."""
    cases: list[tuple[str, str, Callable[[Any], bool]]] = [
        ("R13", "a token after the row's last block gets PAD, not a slot of block 0", _token_beyond_the_row),
        ("R5", "a row replaced by a shorter one leaves only NULL after it in the batch table", _shorter_row),
    ]
    if gpu is not None:
        cases += [
            (
                "R9.2",
                "a change made after a step was called waits for the next one",
                lambda lane: _late_change(lane, gpu),
            ),
            ("R9.1", "four steps queued on a busy device all arrive", lambda lane: _queued_steps(lane, gpu)),
        ]
    return [{"rule": rule, "contract": contract, **_ask(make_lane, case)} for rule, contract, case in cases]


def _ask(make_lane: Callable[[], Any], case: Callable[[Any], bool]) -> dict[str, Any]:
    try:
        return {"kept": case(make_lane())}
    except Exception as error:  # a stranger's table may raise anything
        return {"kept": False, "raised": f"{type(error).__name__}: {error}"}


def _step(lane: Any, inputs: Inputs) -> Any:
    lane.open(inputs)
    lane.step(0)
    lane.synchronize()
    return lane


def _token_beyond_the_row(lane: Any) -> bool:
    beyond = SMALL.block_size * (SMALL.filled + 5)
    inputs = make_inputs(SMALL)
    _step(lane, inputs._replace(positions=np.full_like(inputs.positions, beyond)))
    return bool((lane.slots()[0][: SMALL.num_reqs] == PAD_SLOT_ID).all())


def _shorter_row(lane: Any) -> bool:
    inputs = make_inputs(SMALL)
    _step(lane, inputs)
    (changed,) = {row for row, _ in inputs.turns[1].requests}
    lane.set_row(changed, ([7],))
    lane.step(0)
    lane.synchronize()
    (place,) = np.flatnonzero(inputs.idx_mapping == changed)
    return bool((lane.tables()[0][place, 1:] == NULL_BLOCK_ID).all())


def _late_change(lane: Any, gpu: Gpu) -> bool:
    _step(lane, make_inputs(SMALL))
    gpu.hold(HOLD_US)
    lane.step(1)
    lane.append(2)
    lane.synchronize()
    return _agrees(lane, turns=2)


def _queued_steps(lane: Any, gpu: Gpu) -> bool:
    _step(lane, make_inputs(SMALL))
    gpu.hold(HOLD_US)
    for turn in range(1, 5):
        lane.step(turn)
    lane.synchronize()
    return _agrees(lane, turns=5)


def _agrees(lane: Any, turns: int) -> bool:
    reference = TableLane("numpy", None)
    reference.open(make_inputs(SMALL))
    for turn in range(turns):
        reference.step(turn)
    expected = reference.tables()[0]
    return bool((lane.tables()[0][:, : expected.shape[1]] == expected).all())
