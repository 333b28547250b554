"""The engines' own block tables, driven as those engines drive them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blocktable import BlockTableError
from blocktable_benchmarks.gpu import Gpu


@dataclass(frozen=True)
class PeerInfo:
    """A peer that can be tried.

    Attributes:
        name: of the lane.
        table: "V1" or "V2", vLLM's two generations of block tables.
        path: folder to import `vllm` from. None: as installed.
    """

    name: str
    table: str
    path: str | None


def find_peers(folder: str | None) -> list[PeerInfo]:
    """Return vLLM's tables: those of `folder/vllm-<version>/`, or of an installed vLLM.

    Raises:
        BlockTableError: the folder holds none.
    """
    if folder is None:
        if importlib.util.find_spec("vllm") is None:
            return []
        version = importlib.metadata.version("vllm")
        return [PeerInfo(f"vLLM {version} {table}", table, None) for table in ("V1", "V2")]
    places = sorted(Path(folder).glob("vllm-*/vllm"), key=_version)
    if not places:
        raise BlockTableError(f"--peers {folder} holds no vllm-<version>/vllm; leave it out to use an installed vLLM.")
    return [
        PeerInfo(f"vLLM {place.parent.name.removeprefix('vllm-')} {table}", table, str(place.parent.resolve()))
        for table in ("V1", "V2")
        for place in places
    ]


def _version(place: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", place.parent.name)]


def make_lane(table: str, gpu: Gpu | None) -> Any:
    """Return the adapter of a peer, from whichever vLLM this process imports."""
    if table == "V1":
        from blocktable_benchmarks.peers.vllm_v1 import VllmV1Lane

        return VllmV1Lane(gpu)
    from blocktable_benchmarks.peers.vllm_v2 import VllmV2Lane

    return VllmV2Lane(gpu)
