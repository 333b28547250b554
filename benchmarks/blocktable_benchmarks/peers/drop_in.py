"""Our tables behind vLLM's V1 calls: the drop-in, driven exactly as vLLM's own table is."""

from __future__ import annotations

from typing import Any

from blocktable_benchmarks.gpu import Gpu
from blocktable_benchmarks.peers.vllm_v1 import VllmV1Lane
from blocktable_vllm import drop_in

PROFILE = "0.25.1"
"""Whose signatures: the calls of a step are the same in every version."""

MODES = ("fast", "strict")


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
        """Steps that surely queue up behind a busy device without a wait."""
        from blocktable_vllm.memory import COMMITS_IN_FLIGHT  # imports torch

        return COMMITS_IN_FLIGHT - 2

    @property
    def bytes_sent(self) -> int:
        """Bytes of all commits so far."""
        return int(self.table.__blocktable__.num_bytes_sent)
