"""What authors of backends use: the protocols, what a backend is given, and helpers (docs/writing-a-backend.md).

A backend for a device stands on `blocktable.device` as well. No engine needs either.
"""

from blocktable.config import GROUP_FIELDS, Arena
from blocktable.constants import CAPABILITIES, PROTOCOL_VERSION
from blocktable.host_path import compiled_step
from blocktable.protocols import (
    Backend,
    Batch,
    BlockStore,
    CheckingStore,
    ExportingStore,
    PartsExportingStore,
    PuttingStore,
    SlotMapper,
    Writes,
    ranges,
)
from blocktable.streams import address_of, stream_handle

__all__ = [
    "CAPABILITIES",
    "GROUP_FIELDS",
    "PROTOCOL_VERSION",
    "Arena",
    "Backend",
    "Batch",
    "BlockStore",
    "CheckingStore",
    "ExportingStore",
    "PartsExportingStore",
    "PuttingStore",
    "SlotMapper",
    "Writes",
    "address_of",
    "compiled_step",
    "ranges",
    "stream_handle",
]
