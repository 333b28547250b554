"""The block table of paged-KV LLM inference: one contract, several kernel backends, one conformance suite.

`BlockTable` is what an engine uses, and `get_backend` finds the kernels that it runs on. "Rules: R9" in a docstring
names a rule of the contract: docs/spec.md in the sources, blocktable/spec.md in a wheel.

Here stands what engines use. `blocktable.backend` and `blocktable.device` are for authors of backends,
`blocktable.observer` is for those of observers, and `blocktable.typing` has what stands in type hints.
"""

from blocktable.checking.reasons import SlotReason
from blocktable.config import BlockTableConfig, KVCacheGroup
from blocktable.constants import NULL_BLOCK_ID, PAD_SLOT_ID
from blocktable.context_parallel import ContextParallel
from blocktable.errors import (
    ArgumentError,
    BackendUnavailableError,
    BlockTableError,
    ChangesError,
    CheckError,
    ConfigError,
    DtypeError,
    NoFreeRowError,
    RowCapacityError,
    RowIndexError,
    UnknownBackendError,
    UnsupportedError,
)
from blocktable.exports import Export
from blocktable.findings import KINDS, Finding
from blocktable.inspection import SlotLocation
from blocktable.layouts import LAYOUTS, Layout, plan_width
from blocktable.metadata import GroupMetadata, StepMetadata
from blocktable.protocols import ExportBuffers, Step, StepBuffers
from blocktable.registry import get_backend, list_backends
from blocktable.requests import Requests
from blocktable.table import BlockTable

__version__ = "0.1.0"

__all__ = [
    "KINDS",
    "LAYOUTS",
    "NULL_BLOCK_ID",
    "PAD_SLOT_ID",
    "ArgumentError",
    "BackendUnavailableError",
    "BlockTable",
    "BlockTableConfig",
    "BlockTableError",
    "ChangesError",
    "CheckError",
    "ConfigError",
    "ContextParallel",
    "DtypeError",
    "Export",
    "ExportBuffers",
    "Finding",
    "GroupMetadata",
    "KVCacheGroup",
    "Layout",
    "NoFreeRowError",
    "Requests",
    "RowCapacityError",
    "RowIndexError",
    "SlotLocation",
    "SlotReason",
    "Step",
    "StepBuffers",
    "StepMetadata",
    "UnknownBackendError",
    "UnsupportedError",
    "get_backend",
    "list_backends",
    "plan_width",
]
