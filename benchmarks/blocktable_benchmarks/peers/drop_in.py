"""Our tables with vLLM's calls: the drop-ins, driven exactly as vLLM's own tables are."""

from __future__ import annotations

from typing import Any

from blocktable_benchmarks.gpu import Gpu
from blocktable_benchmarks.peers.base import Impossible
from blocktable_benchmarks.peers.vllm_v1 import VllmV1Lane
from blocktable_benchmarks.peers.vllm_v2 import VllmV2Lane
from blocktable_benchmarks.workloads import Inputs
from blocktable_vllm import drop_in, drop_in_v2

PROFILE, V2_PROFILE = "0.25.1", "0.33.0"
"""Whose signatures: the calls of a step are the same in every version."""

MODES = ("fast", "strict", "v2")


def make_drop_in_lane(mode: str, backend: str, gpu: Gpu | None) -> Any:
    """Return the lane of a drop-in. mode: "fast" or "strict" of the V1 runner's, or "v2"."""
    return StableDropInLane(backend, gpu) if mode == "v2" else DropInLane(mode, backend, gpu)


class DropInLane(VllmV1Lane):
    """The drop-in's `MultiGroupBlockTable`.

    Args:
        mode: "fast" or "strict".
        backend: name of the backend.
        gpu: where the tables are; None: on the host.
    """

    def __init__(self, mode: str, backend: str, gpu: Gpu | None) -> None:
        super().__init__(gpu)
        self.mode = mode
        self.backend = backend

    def _names(self) -> tuple[Any, Any]:
        from blocktable_vllm import home

        return home, drop_in(PROFILE, self.mode, self.backend).MultiGroupBlockTable

    @property
    def queued_steps(self) -> int:
        """Steps that surely queue up on a busy device without a wait."""
        from blocktable_vllm.memory import COMMITS_IN_FLIGHT  # imports torch

        return COMMITS_IN_FLIGHT - 2

    @property
    def bytes_sent(self) -> int:
        """Bytes of all commits so far."""
        return int(self.table.__blocktable__.num_bytes_sent)


class StableDropInLane(VllmV2Lane):
    """The drop-in's `BlockTables`.

    Args:
        backend: name of the backend.
        gpu: where the tables are; None: on the host.
    """

    launches_per_step = 3

    def __init__(self, backend: str, gpu: Gpu | None) -> None:
        super().__init__(gpu)
        self.backend = backend

    def open(self, inputs: Inputs, steps_in_flight: int = 2) -> None:
        """Make the table and fill its rows."""
        if inputs.workload.rolls_back:
            raise Impossible("vLLM's V2 runner takes no block back: a row grows until it is overwritten")
        super().open(inputs, steps_in_flight)

    def _table_type(self) -> Any:
        return drop_in_v2(V2_PROFILE, self.backend)

    def rewind(self) -> None:
        """Make every row what it was: there is no call that sets a count back."""
        self.reset()

    @property
    def queued_steps(self) -> int:
        """Steps that surely queue up after a busy device without a wait."""
        from blocktable_vllm.memory import COMMITS_IN_FLIGHT  # imports torch

        return COMMITS_IN_FLIGHT - 2

    @property
    def bytes_sent(self) -> int:
        """Bytes of all commits so far."""
        return int(self.table.__rows__.num_bytes_sent)
