"""Row changes from rank to rank as bytes, and a digest by which ranks compare what they hold (R45-R47)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from blocktable.arrays import IntArray
from blocktable.checks import flag
from blocktable.config import Arena, BlockTableConfig
from blocktable.errors import ChangesError
from blocktable.host_path import Difference, HostPath, difference
from blocktable.packets import Packet, read_packet, write_packet
from blocktable.protocols import ranges
from blocktable.row_operations import RowOperations
from blocktable.rows import Journal, runs_of

_MASK = 2**64 - 1


class ChangeLog:
    """The mirror as it was looked at last, its digest, and what of it no packet holds yet.

    Args:
        config: the geometry.
        rows: what it follows.

    Attributes:
        num_packed: packets made so far.
        num_applied: the number of the packet that comes next.
    """

    def __init__(self, config: BlockTableConfig, rows: HostPath) -> None:
        self.num_packed: int = 0
        self.num_applied: int = 0
        self._config, self._rows = config, rows
        self._held: IntArray = self._empty()
        self._digest = 0
        self._unsent: Journal | None = None  # None: nothing was packed yet
        mirror = rows.mirror[: self._held.size]
        entries = np.flatnonzero(mirror != self._held)
        self._take(Difference(entries, self._held[entries], mirror[entries]))

    def committed(self) -> int:
        """Do what `HostPath.committed` does, after a look at what it will forget."""
        self._follow()
        return self._rows.committed()

    def digest(self) -> int:
        """Return the digest of the mirror."""
        self._follow()
        return self._digest

    def pack(self, *, whole: bool) -> bytes:
        """Return what has changed since the last packet; of the first one, and with `whole`, all that is not empty."""
        self._follow()
        if self._unsent is None or whole:
            entries = np.flatnonzero(self._held != self._empty())
        else:
            entries = ranges(*self._unsent.merge())
        packet = Packet(self.num_packed, self._digest, whole, entries, self._held[entries])
        made = write_packet(self._config, packet)
        self._unsent = Journal(64)
        self.num_packed += 1
        return made

    def accept(self, packet: Packet) -> tuple[IntArray, IntArray]:
        """Return the entries of the mirror that a packet changes, [n] int64, and their new values, [n] int32.

        Changes nothing.

        Raises:
            ChangesError: another packet comes next, or what is held here is not what the sender held before it.
        """
        self._follow()
        self._check_number(packet)
        entries, new = packet.entries, packet.values
        if packet.is_whole:
            rows = self._empty()
            rows[entries] = new
            entries = np.flatnonzero(rows != self._held)
            new = rows[entries]
        old = self._held[entries]
        differs = old != new
        change = Difference(entries[differs], old[differs], new[differs])
        after = self._digest_after(change)
        if after != packet.digest:
            raise ChangesError(
                f"Packet {packet.number} does not fit what this table holds: with it the digest would be {after:016x}, "
                f"and the sender's is {packet.digest:016x}. The tables differed before; here rows were changed by "
                "something that is not a packet of this sender. Nothing was changed; a packet of "
                "pack_changes(whole=True) replaces all rows."
            )
        return change.entries, change.new

    def _check_number(self, packet: Packet) -> None:
        number, expected = packet.number, self.num_applied
        if number < expected:
            raise ChangesError(
                f"Packet {number} was applied here already, or came too late: packet {expected} comes next. Nothing "
                "was changed; drop it."
            )
        if number > expected and not packet.is_whole:
            missing = f"packet {expected} is" if number == expected + 1 else f"packets {expected} to {number - 1} are"
            raise ChangesError(
                f"Packet {number} came before its turn: {missing} missing. Nothing was changed; apply what is missing "
                "first, or ask the sender for pack_changes(whole=True)."
            )

    def _empty(self) -> IntArray:
        """[num_table_entries] int32. What an empty table holds, without what kernels check with."""
        arena = self._config.arena
        return arena.empty()[: arena.num_table_entries]

    def _follow(self) -> None:
        """Look at what is pending; the cost follows it."""
        self._take(difference(self._held, self._rows))

    def _take(self, change: Difference) -> None:
        if not change.entries.size:
            return
        if self._unsent is not None:
            self._unsent.mark(*runs_of(change.entries))
        self._digest = self._digest_after(change)
        self._held[change.entries] = change.new

    def _digest_after(self, change: Difference) -> int:
        arena = self._config.arena
        old, new = (int(terms(arena, change.entries, values).sum()) for values in (change.old, change.new))
        return (self._digest + new - old) & _MASK


class RankCalls(RowOperations):
    """What keeps the tables of several ranks equal, and shows that they are."""

    _log: ChangeLog | None = None
    _committed: Callable[[], int]

    def pack_changes(self, *, whole: bool = False) -> bytes:
        """Return the row changes that no packet of this table holds yet, committed or not, for `apply_changes`.

        The first packet holds what differs from an empty table. Packets are numbered, and each carries this table's
        digest: one of no changes is worth sending. Changes no row and commits nothing.

        Args:
            whole: hold all rows, for a table that has lost a packet or differs: it takes this one in any case.

        Returns:
            About 80 bytes, 24 for each group, 12 for each range of entries that changed, and 4 for each entry.

        Raises:
            DtypeError: `whole` is no bool.

        Rules: R45.
        """
        return self._changes.pack(whole=flag("whole", whole))

    def apply_changes(self, changes: bytes | bytearray | memoryview | IntArray) -> IntArray:
        """Make the row changes of a packet, all of them or none; the next commit sends them.

        Args:
            changes: what `pack_changes` returned on a table of the same geometry, in anything that lends its bytes.

        Returns:
            [n] int64. The rows that have changed, ascending.

        Raises:
            ChangesError: the packet is damaged, lost a predecessor, came before, is of another geometry, or does not
                fit what this table holds. Nothing is changed.
            DtypeError: no bytes.

        Rules: R6, R46.
        """
        packet, log = read_packet(self.config, changes), self._changes
        entries, values = log.accept(packet)
        if entries.size:
            self._changing.exchange(entries, values)
        log.num_applied = packet.number + 1
        rows: IntArray = np.unique(self.config.arena.coordinates(entries)[1])
        return rows

    def digest(self) -> int:
        """Return a digest of what all rows hold now on the host, pending changes included; 0 for an empty table.

        Tables of the same rows, capacities and null blocks that hold the same have the same digest. The first call
        reads the whole table and takes memory for a copy of it; later ones cost what has changed.

        Returns:
            0 .. 2**64 - 1.

        Rules: R47.
        """
        return self._changes.digest()

    @property
    def _changes(self) -> ChangeLog:
        if self._log is None:
            self._log = ChangeLog(self.config, self._rows)
            self._committed = self._log.committed
        return self._log


def terms(arena: Arena, entries: IntArray, values: IntArray) -> IntArray:
    """Return what each entry adds to a digest: 0 where it holds what an empty table holds there.

    Args:
        arena: the layout.
        entries: [n] int64.
        values: [n] int32.

    Returns:
        [n] uint64.
    """
    fillers = np.array((0, *arena.fillers))[np.searchsorted(arena.group_offsets, entries, "right")]
    found = _mix(_mix(entries.astype(np.uint64) + np.uint64(1)) + values.astype(np.uint32))
    found[values == fillers] = 0
    return found


def _mix(numbers: IntArray) -> IntArray:
    """Spread every bit of [n] uint64 over all bits, one to one."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: IntArray = numbers ^ (numbers >> np.uint64(31))
    return mixed
