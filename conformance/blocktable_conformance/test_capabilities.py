"""Each capability twice: what it promises where it is declared, and that it is refused where it is not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from blocktable import BlockTable, KVCacheGroup, UnsupportedError
from blocktable.backend import CAPABILITIES, PROTOCOL_VERSION
from blocktable_conformance.asserts import check, must_raise
from blocktable_conformance.cases import make, one_request, small_config
from blocktable_conformance.subject import Subject

GROUP = KVCacheGroup(block_size=4, num_blocks=100)


def require(subject: Subject, capability: str) -> None:
    """Skip a test of a capability that the backend does not declare."""
    if not subject.declares(capability):
        pytest.skip(f"{subject.label} does not declare {capability}")


def require_absence(subject: Subject, capability: str) -> None:
    """Skip the twin, which holds backends to refuse what they do not declare."""
    if subject.declares(capability):
        pytest.skip(f"{subject.label} declares {capability}")


def must_be_refused(rules: str, what: str, call: Callable[[], Any]) -> None:
    """Check that a call raises UnsupportedError, in a sentence: the capability is not declared."""
    with must_raise(UnsupportedError, rules, what) as raised:
        call()
    check(len(raised.message.split()) > 5, rules, f"the refusal of {what} must be a sentence: {raised.message}")


def test_a_backend_describes_itself(subject_once: Subject) -> None:
    """Name, protocol version and known capabilities, and it can run here.

    Rules: R23.
    """
    backend = subject_once.backend
    check(bool(backend.name), "R23", f"name must be a word, got {backend.name!r}")
    check(backend.protocol_version == PROTOCOL_VERSION, "R23", f"protocol_version must be {PROTOCOL_VERSION}")
    unknown = set(backend.capabilities) - set(CAPABILITIES)
    check(not unknown, "R23", f"capabilities {unknown} do not exist.")
    check(backend.why_unavailable() is None, "R23", f"an available backend says {backend.why_unavailable()!r}.")
    backend.synchronize()


def test_arrays_survive_the_way_to_the_device_and_back(subject_once: Subject) -> None:
    """`from_host` and `to_host` keep dtype, shape and contents, of empty arrays too, and both copy.

    Rules: R22.
    """
    for dtype in (np.int32, np.int64):
        for values in ([], [1, -2, np.iinfo(dtype).max], [np.iinfo(dtype).min]):
            array = np.array(values, dtype)
            there = subject_once.backend.from_host(array)
            array[:] = 0
            back = subject_once.backend.to_host(there)
            check(back.dtype == dtype and back.tolist() == values, "R22", f"{values} came back as {back!r}")
            back[:] = 7
            check(subject_once.to_host(there).tolist() == values, "R22", "to_host must copy.")


def test_declared_capabilities_have_code_behind_them(subject_once: Subject) -> None:
    """A store has step() where `fused_step` is declared, and the methods of exports where `exports` and its parts are.

    Rules: R21.
    """
    store = make(subject_once, GROUP).table.store
    for capability, method in (
        ("fused_step", "step"),
        ("exports", "export"),
        ("exports", "reset_export"),
        ("export_parts", "map_positions"),
        ("device_checks", "collect_findings"),
        ("device_checks", "reset_checks"),
    ):
        declared = subject_once.declares(capability)
        check(
            not declared or callable(getattr(store, method, None)),
            "R21",
            f"{capability} is declared, but the block store has no {method}().",
        )


def test_int32_slots_are_refused_where_not_declared(subject_once: Subject) -> None:
    """Without `int32_slots` a table of int32 slots is refused.

    Rules: R16.
    """
    require_absence(subject_once, "int32_slots")
    must_be_refused("R16", 'slot_dtype="int32"', lambda: subject_once.table(small_config(GROUP, slot_dtype="int32")))


def test_a_fused_step_is_refused_where_not_declared(subject_once: Subject) -> None:
    """Without `fused_step` a table on that step path is refused.

    Rules: R21.
    """
    require_absence(subject_once, "fused_step")
    config = small_config(GROUP)
    must_be_refused("R21", 'step_path="fused"', lambda: BlockTable(config, subject_once.backend, step_path="fused"))


def test_a_fused_step_is_one_call(subject: Subject) -> None:
    """On the fused path a step asks the store once; on the separate path commit, gather and slots are three calls.

    Rules: R21.
    """
    pair = make(subject, GROUP, rows=[[5]])
    one_request(pair, [0])
    pair.do("append_row", 0, [6])
    before = subject.call_log.launches
    one_request(pair, [4])
    calls = subject.call_log.launches - before
    expected = 1 if subject.step_path == "fused" else 3
    check(calls == expected, "R21", f"a step on the {subject.step_path} path must make {expected} calls, made {calls}.")


def test_streams_are_refused_where_not_declared(subject: Subject) -> None:
    """Without `streams` every `stream=` but None is refused, before anything is launched.

    Rules: R22.
    """
    require_absence(subject, "streams")
    pair = make(subject, GROUP, rows=[[5]])
    inputs = [subject.device_array(v, d) for v, d in (([0], "int32"), ([0, 1], "int32"), ([0], "int64"))]
    launches = subject.call_log.launches
    for stream in (0, 1, 2):
        for call in (
            pair.table.commit,
            partial(pair.table.gather, inputs[0]),
            partial(pair.table.compute_slot_mappings, *inputs),
            partial(pair.table.step, *inputs),
        ):
            must_be_refused("R22", f"stream={stream}", partial(call, stream=stream))
    check(subject.call_log.launches == launches, "R22", "something was launched, or committed, before the refusal.")


def test_checks_of_kernels_are_refused_where_not_declared(subject_once: Subject) -> None:
    """Without `device_checks` a table is not checked by kernels, and says so.

    Rules: R41.7.
    """
    require_absence(subject_once, "device_checks")
    config = small_config(KVCacheGroup(block_size=4, num_blocks=8))
    must_be_refused("R41.7", 'check="device"', lambda: subject_once.table(config, check="device"))


def test_exports_of_parts_are_refused_where_not_declared(subject_once: Subject) -> None:
    """Without `export_parts` first tokens, sets of other sizes, rings, requests and positions are refused.

    Rules: R34, R35, R36.
    """
    require_absence(subject_once, "export_parts")
    require(subject_once, "exports")
    pair = make(subject_once, GROUP, rows=[[5]])
    table, one = pair.table, subject_once.device_array([0], "int32")
    positions = subject_once.device_array(np.zeros((1, 1)), "int32")
    for rules, what, call in (
        ("R34", "first_tokens", lambda: table.export("csr", one, seq_lens=one, first_tokens=one)),
        ("R34", "max_batch", lambda: table.create_export("csr", capacity=4, max_batch=6)),
        ("R35", "a set of requests", lambda: table.create_export("token_requests")),
        ("R35", "requests", lambda: table.export("token_requests", one, query_start_loc=one)),
        ("R36", "map_positions()", lambda: table.map_positions(one, 0, positions)),
    ):
        must_be_refused(rules, what, call)
