"""Packets of row changes, as bytes: how one is laid out, and which ones a table refuses (R45, R46)."""

from __future__ import annotations

import hashlib
import struct
from typing import Any, NamedTuple

import numpy as np

from blocktable.arrays import IntArray
from blocktable.config import BlockTableConfig
from blocktable.errors import ChangesError, DtypeError
from blocktable.protocols import ranges
from blocktable.rows import runs_of

MAGIC = b"BTCH"
VERSION = 1
IS_WHOLE = 1
"""Flag of a packet that holds all rows of its sender."""

HEAD: struct.Struct = struct.Struct("<4sHHQQ16sIIQQ")
"""Magic, version, flags, number, digest, fingerprint, groups, rows, ranges, values."""

CHECKSUM_SIZE = 8


class Packet(NamedTuple):
    """Entries of the arena, filled counts among them, and what they hold.

    Attributes:
        number: packets of the sender before this one.
        digest: of the sender's mirror with these changes.
        is_whole: whether all entries that are not here are empty.
        entries: [n] int64, ascending.
        values: [n] int32.
    """

    number: int
    digest: int
    is_whole: bool
    entries: IntArray
    values: IntArray


def write_packet(config: BlockTableConfig, packet: Packet) -> bytes:
    """Return a packet as bytes, little-endian: `HEAD`, the groups' geometry, ranges, values, checksum."""
    offsets, lengths = runs_of(packet.entries)
    head = HEAD.pack(
        MAGIC,
        VERSION,
        IS_WHOLE * packet.is_whole,
        packet.number,
        packet.digest,
        bytes.fromhex(config.fingerprint()),
        len(config.groups),
        config.num_rows,
        offsets.size,
        packet.values.size,
    )
    parts = [_geometry(config), offsets.astype("<i8"), lengths.astype("<i4"), packet.values.astype("<i4")]
    body = head + b"".join(part.tobytes() for part in parts)
    return body + _checksum(body)


def read_packet(config: BlockTableConfig, changes: Any) -> Packet:
    """Return a packet that a table of this configuration may take.

    Raises:
        ChangesError: it is damaged, of another version, of a table of another geometry, or holds what no row of this
            table may hold.
        DtypeError: these are not bytes.
    """
    try:
        data = memoryview(changes).cast("B")
    except TypeError:
        raise DtypeError(
            f"changes must be the bytes that pack_changes() returned, got {type(changes).__name__}."
        ) from None
    if bytes(data[: len(MAGIC)]) != MAGIC:
        raise ChangesError(f"These {len(data)} bytes are not a packet of pack_changes(), which begins with {MAGIC!r}.")
    if len(data) < HEAD.size + CHECKSUM_SIZE:
        raise _damaged(len(data))
    _, version, flags, number, digest, fingerprint, num_groups, num_rows, num_ranges, num_values = HEAD.unpack_from(
        data
    )
    if version != VERSION:
        raise ChangesError(
            f"The packet has version {version}, and this blocktable reads version {VERSION}; install the same "
            "version on all ranks."
        )
    sizes = 24 * num_groups, 8 * num_ranges, 4 * num_ranges, 4 * num_values
    is_whole_file = len(data) == HEAD.size + sum(sizes) + CHECKSUM_SIZE
    if not is_whole_file or bytes(data[-CHECKSUM_SIZE:]) != _checksum(data[:-CHECKSUM_SIZE]):
        raise _damaged(len(data))
    starts = HEAD.size + np.cumsum((0, *sizes))
    geometry, offsets, lengths, values = (
        np.frombuffer(data[start : start + size], dtype)
        for start, size, dtype in zip(starts.tolist(), sizes, ("<i8", "<i8", "<i4", "<i4"), strict=False)
    )
    _check_geometry(config, fingerprint.hex(), num_rows, geometry.reshape(-1, 3))
    ends = offsets + lengths
    if (
        (lengths < 1).any()
        or (offsets[1:] < ends[:-1]).any()
        or lengths.sum(dtype=np.int64) != values.size
        or (offsets.size and (offsets[0] < 0 or ends[-1] > config.arena.num_table_entries))
    ):
        raise _damaged(len(data))
    packet = Packet(number, digest, bool(flags & IS_WHOLE), ranges(offsets, lengths), values)
    _check_values(config, packet)
    return packet


def _checksum(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECKSUM_SIZE).digest()


def _damaged(size: int) -> ChangesError:
    return ChangesError(
        f"The packet of {size} bytes is damaged: it is cut off, or its checksum is wrong. Nothing was changed; send "
        "it again."
    )


def _geometry(config: BlockTableConfig) -> IntArray:
    """[num_groups, 3] int64: capacity, width and null block of each group."""
    groups = enumerate(config.groups)
    return np.array([(config.capacity(i), config.width(i), group.null_block_id) for i, group in groups], "<i8")


def _check_geometry(config: BlockTableConfig, fingerprint: str, num_rows: int, geometry: IntArray) -> None:
    if fingerprint != config.fingerprint():
        raise _other_table("config.fingerprint()", fingerprint, config.fingerprint())
    if num_rows != config.num_rows:
        raise _other_table("num_rows", num_rows, config.num_rows)
    own = _geometry(config)
    for group, column in np.argwhere(geometry != own)[:1].tolist():
        name = ("capacity", "width", "null_block_id")[column]
        raise _other_table(f"{name} of group {group}", geometry[group, column], own[group, column])


def _other_table(name: str, theirs: Any, own: Any) -> ChangesError:
    return ChangesError(
        f"The packet is of another kind of table: its {name} is {theirs}, and here it is {own}. Tables that exchange "
        "changes have the same groups, rows, capacities and null blocks."
    )


def _check_values(config: BlockTableConfig, packet: Packet) -> None:
    """Refuse what no row of this table may hold, such as a block that its cache does not have."""
    arena = config.arena
    groups, rows, columns = arena.coordinates(packet.entries)
    of_counts = groups < 0
    indices = np.where(of_counts, np.minimum(columns, arena.num_groups - 1), groups)
    expansions = np.array([group.blocks_per_kv_block for group in config.groups])[indices]
    most_columns = np.array([config.capacity(i) for i in range(arena.num_groups)])[indices] * expansions
    limits = np.where(
        of_counts, most_columns + 1, np.array([group.block_id_limit for group in config.groups])[indices] * expansions
    )
    is_right = (packet.values >= 0) & (packet.values < limits)
    is_right |= ~of_counts & (packet.values == np.array(arena.fillers)[indices])
    is_right &= (rows < arena.num_rows) & np.where(of_counts, columns < arena.num_groups, columns < most_columns)
    for i in np.flatnonzero(~is_right)[:1].tolist():
        raise ChangesError(
            f"The packet holds {packet.values[i]} for row {rows[i]} of group {indices[i]}, which this table cannot "
            f"have: values there end before {limits[i]}. Nothing was changed; give the group the same num_blocks on "
            "all ranks."
        )
