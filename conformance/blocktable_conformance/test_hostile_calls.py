"""Every public call with hostile arguments: taken as the oracle says, or refused without a trace."""

from __future__ import annotations

import pytest

from blocktable import BackendUnavailableError
from blocktable.host_path import HOST_PATH_VARIABLE, rows_maker
from blocktable_conformance import profiles
from blocktable_conformance.api_fuzz import CALLS_OF_A_HISTORY, run
from blocktable_conformance.subject import Subject

HOST_PATHS = ("numpy", "compiled")
PARTS = 4
"""Of the calls of a path, so that the workers of a parallel run share them."""


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("host_path", HOST_PATHS)
def test_hostile_calls(subject: Subject, host_path: str, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure names the seed of its history, which runs again alone.

    Rules: R6, R7, R8, R10.4, R15, R17, R25.18, R42, R46.
    """
    monkeypatch.setenv(HOST_PATH_VARIABLE, host_path)
    try:
        rows_maker()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    if subject.step_path == "fused" and not subject.declares("fused_step"):
        pytest.skip("On this host path the backend has no fused step.")
    num_paths = 2 if subject.declares("fused_step") else 1
    num_calls = profiles.current().hostile_calls // (num_paths * len(HOST_PATHS) * PARTS)
    # An emulated kernel takes a millisecond or more: there most calls are refused before one is launched.
    launches = 0.05 if getattr(subject.backend, "is_emulated", False) else 0.5
    first = part * (num_calls // CALLS_OF_A_HISTORY + 1)
    run(subject, num_calls, first + 1000 * HOST_PATHS.index(host_path), launches)
