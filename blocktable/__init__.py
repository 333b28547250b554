"""The block table of paged-KV LLM inference: one contract, several kernel backends, one conformance suite.

`BlockTable` is what an engine uses, `get_backend` finds the kernels behind it, and docs/spec.md holds the rules.
"""

from blocktable.config import Arena, BlockTableConfig, KVCacheGroup, row_capacity, row_width
from blocktable.constants import CAPABILITIES, NULL_BLOCK_ID, PAD_SLOT_ID, PROTOCOL_VERSION
from blocktable.context_parallel import ContextParallel
from blocktable.errors import (
    ArgumentError,
    BackendUnavailableError,
    BlockTableError,
    ConfigError,
    DtypeError,
    RowCapacityError,
    RowIndexError,
    UnknownBackendError,
    UnsupportedError,
)
from blocktable.protocols import Array, Backend, Batch, BlockStore, SlotMapper, Step, StepBuffers, Writes, ranges
from blocktable.registry import BackendInfo, get_backend, list_backends
from blocktable.streams import stream_handle
from blocktable.table import BlockTable, SlotLocation

__version__ = "0.1.0"

__all__ = [
    "CAPABILITIES",
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
    "ConfigError",
    "ContextParallel",
    "DtypeError",
    "KVCacheGroup",
    "RowCapacityError",
    "RowIndexError",
    "SlotLocation",
    "SlotMapper",
    "Step",
    "StepBuffers",
    "UnknownBackendError",
    "UnsupportedError",
    "Writes",
    "get_backend",
    "list_backends",
    "ranges",
    "row_capacity",
    "row_width",
    "stream_handle",
]
