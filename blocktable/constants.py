"""The sentinels, the protocol version and the capabilities of the contract (docs/spec.md)."""

from typing import Final

PAD_SLOT_ID: Final = -1
"""Slot of a token that must not be written, unless its group says otherwise (R13, R15)."""

NULL_BLOCK_ID: Final = 0
"""Block that is never allocated, unless its group says otherwise: filler of table entries without a block (R5)."""

NO_NULL_BLOCK: Final = -1
"""A group's `null_block_id` where every block is real; also the filler then (R5)."""

PROTOCOL_VERSION: Final = 2
"""Version of the backend protocols in this package; a backend written for another one is refused."""

CAPABILITIES: Final = {
    "graph_capture": "gather, compute_slot_mappings and export can be captured in CUDA graphs and replayed (R21).",
    "streams": "Work goes to a stream the caller names; the call returns before the device is done (R22).",
    "int32_slots": "Slot mappings can be int32 (R16).",
    "fused_step": "The block store has step(): commit, gather and slot mappings in one call.",
    "exports": "The block store has export(): tables in the layouts that attention kernels read.",
    "export_parts": "Exports of parts of rows, of rings and of requests, in sets of any batch; slots of any positions.",
    "device_checks": 'Kernels look for an engine\'s mistakes, without a wait: `check="device"`.',
}
"""Everything optional a backend may declare: name -> the sentence that says what it promises."""
