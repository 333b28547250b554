"""The block table of paged-KV LLM inference: one contract, several kernel backends, one conformance suite.

`BlockTable` is what an engine uses, and `get_backend` finds the kernels that it runs on. "Rules: R9" in a docstring
names a rule of the contract: docs/spec.md in the sources, blocktable/spec.md in a wheel.
"""

from blocktable.checking import CheckMode
from blocktable.checking.reasons import SlotReason
from blocktable.config import GROUP_FIELDS, Arena, BlockTableConfig, KVCacheGroup, row_capacity, row_width
from blocktable.constants import CAPABILITIES, NULL_BLOCK_ID, PAD_SLOT_ID, PROTOCOL_VERSION
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
from blocktable.findings import KINDS, CheckKinds, Finding, Severity
from blocktable.host_path import compiled_step
from blocktable.inspection import SlotLocation
from blocktable.layouts import LAYOUTS, Layout, WidthPlan, plan_width
from blocktable.metadata import GroupMetadata, StepMetadata
from blocktable.observer import Observation, Observer, OpenRecording
from blocktable.protocols import (
    Array,
    Backend,
    Batch,
    BlockStore,
    CheckingStore,
    ExportBuffers,
    ExportingStore,
    IntArray,
    PartsExportingStore,
    PuttingStore,
    SlotMapper,
    Step,
    StepBuffers,
    Writes,
    ranges,
)
from blocktable.registry import BackendInfo, get_backend, list_backends
from blocktable.requests import Requests
from blocktable.streams import address_of, stream_handle
from blocktable.table import BlockTable

__version__ = "0.1.0"

__all__ = [
    "CAPABILITIES",
    "GROUP_FIELDS",
    "KINDS",
    "LAYOUTS",
    "NULL_BLOCK_ID",
    "PAD_SLOT_ID",
    "PROTOCOL_VERSION",
    "Arena",
    "ArgumentError",
    "Array",
    "Backend",
    "BackendInfo",
    "BackendUnavailableError",
    "Batch",
    "BlockStore",
    "BlockTable",
    "BlockTableConfig",
    "BlockTableError",
    "ChangesError",
    "CheckError",
    "CheckKinds",
    "CheckMode",
    "CheckingStore",
    "ConfigError",
    "ContextParallel",
    "DtypeError",
    "Export",
    "ExportBuffers",
    "ExportingStore",
    "Finding",
    "GroupMetadata",
    "IntArray",
    "KVCacheGroup",
    "Layout",
    "NoFreeRowError",
    "Observation",
    "Observer",
    "OpenRecording",
    "PartsExportingStore",
    "PuttingStore",
    "Requests",
    "RowCapacityError",
    "RowIndexError",
    "Severity",
    "SlotLocation",
    "SlotMapper",
    "SlotReason",
    "Step",
    "StepBuffers",
    "StepMetadata",
    "UnknownBackendError",
    "UnsupportedError",
    "WidthPlan",
    "Writes",
    "address_of",
    "compiled_step",
    "get_backend",
    "list_backends",
    "plan_width",
    "ranges",
    "row_capacity",
    "row_width",
    "stream_handle",
]
