"""Row changes as packets, and digests: equal tables after any history, refusals that change nothing (R45-R47)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import rule, run_state_machine_as_test

import blocktable as bt
from blocktable import ranks
from blocktable.findings import KINDS
from blocktable.packets import Packet, write_packet
from blocktable_conformance import profiles
from blocktable_conformance.subject import Subject
from blocktable_conformance.test_stateful import TableHistory

GROUPS = (
    bt.KVCacheGroup(block_size=4, num_blocks=900),
    bt.KVCacheGroup(block_size=8, kernel_block_size=4, null_block_id=-1, num_blocks=900),
)
MASK = 2**64 - 1


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def host_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "compiled":
        pytest.importorskip("blocktable_compiled.operations")
    monkeypatch.setenv("BLOCKTABLE_HOST_PATH", request.param)


def make(check: Any = "off", **options: Any) -> bt.BlockTable:
    settings: dict[str, Any] = {"max_num_reqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    config = bt.BlockTableConfig(**({"groups": GROUPS} | settings | options))
    return bt.BlockTable(config, "numpy", check=check)


def held(table: bt.BlockTable) -> list[list[list[int]]]:
    groups, rows = range(len(table.config.groups)), range(table.config.num_rows)
    return [[table.block_ids(row, group).tolist() for row in rows] for group in groups]


def mixed(number: int) -> int:
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK
    return number ^ number >> 31


def plain_digest(table: bt.BlockTable) -> int:
    """Return the digest that R47 says, entry by entry."""
    arena, total = table.config.arena, 0
    parts = [(0, table._rows.filled, 0)]
    parts += [(arena.group_offsets[g], table.host_table(g), filler) for g, filler in enumerate(arena.fillers)]
    for start, values, filler in parts:
        for entry, value in enumerate(values.ravel().tolist(), start):
            if value != filler:
                total += mixed(mixed(entry + 1) + value % 2**32 & MASK)
    return total & MASK


def assert_equal(first: bt.BlockTable, second: bt.BlockTable) -> None:
    for group in range(len(first.config.groups)):
        assert (first.host_table(group) == second.host_table(group)).all()
    assert (first.num_blocks_per_row == second.num_blocks_per_row).all()
    assert first.digest() == second.digest() == plain_digest(second)


def change(table: bt.BlockTable, chance: random.Random) -> None:
    """Make one row operation that fits."""
    rows = table.config.num_rows

    def ids() -> list[int]:
        return [chance.randrange(1, 900) for _ in range(chance.randint(0, 3))]

    calls: list[Callable[[], None]] = [
        lambda: table.append_row(chance.randrange(rows), [ids(), ids()]),
        lambda: table.append_rows(range(rows), [[5] * rows, [6] * rows], [1] * rows),
        lambda: table.set_row(chance.randrange(rows), [ids(), ids()]),
        lambda: table.move_row(chance.randrange(rows), chance.randrange(rows)),
        lambda: table.swap_rows(chance.randrange(rows), chance.randrange(rows)),
        lambda: table.truncate_row(chance.randrange(rows), chance.randint(0, 4)),
        lambda: table.remap_blocks(0, [5], [chance.randrange(6, 900)]),
        lambda: table.invalidate(),
    ]
    try:
        chance.choice(calls)()
    except bt.RowCapacityError:
        table.clear_row(chance.randrange(rows))


@pytest.mark.parametrize("seed", range(6))
def test_a_table_that_applies_every_packet_holds_the_same(seed: int) -> None:
    """Both commit when they like; a commit loses nothing for the next packet. Rules: R45-R47, R9.1."""
    chance = random.Random(seed)
    sender, receiver = make(), make(check=["off", "host", "device"][seed % 3])
    for _ in range(40):
        for _ in range(chance.randint(0, 4)):
            change(sender, chance)
            if chance.random() < 0.3:
                sender.commit()
        before = held(receiver)
        rows = receiver.apply_changes(sender.pack_changes()).tolist()
        assert_equal(sender, receiver)
        groups = list(zip(before, held(receiver), strict=True))
        assert rows == [row for row in range(4) if any(was[row] != now[row] for was, now in groups)]
        if chance.random() < 0.5:
            receiver.commit()
            receiver.verify()


def test_any_history_of_the_suite_reaches_another_table() -> None:
    """Every geometry and operation that the suite draws, refused ones too. Rules: R4-R9, R45-R47."""

    class PackedHistory(TableHistory):
        subject = Subject("numpy", bt.get_backend("numpy"))

        @rule(whole=st.booleans(), is_lost=st.booleans(), is_checked=st.booleans())
        def send(self, whole: bool, is_lost: bool, is_checked: bool) -> None:
            table = self.pair.table
            if not hasattr(self, "other"):
                kinds: Any = dict.fromkeys(KINDS, "report")
                self.other = bt.BlockTable(
                    self.config, "numpy", check="host" if is_checked else "off", check_kinds=kinds
                )
            packet = table.pack_changes(whole=whole)
            if is_lost:
                later = table.pack_changes()
                with pytest.raises(bt.ChangesError, match=r"packet \d+ is missing"):
                    self.other.apply_changes(later)
                packet = table.pack_changes(whole=True)
            self.other.apply_changes(packet)
            assert_equal(table, self.other)
            self.other.commit()
            self.other.verify()

    run_state_machine_as_test(PackedHistory, settings=profiles.current().settings(15))


def test_a_first_packet_holds_what_was_committed_before() -> None:
    """Rules: R45."""
    sender, receiver = make(), make()
    sender.set_row(2, [[7, 8], [0]])
    sender.commit()
    assert receiver.apply_changes(sender.pack_changes()).tolist() == [2]
    assert held(receiver) == held(sender)


def test_a_packet_of_nothing_compares() -> None:
    """Rules: R45, R46."""
    sender, receiver = make(), make()
    packet = sender.pack_changes()
    assert len(packet) == 64 + 24 * 2 + 8
    receiver.set_row(0, [[5], [5]])
    with pytest.raises(bt.ChangesError, match="differed before"):
        receiver.apply_changes(packet)
    receiver.clear_row(0)
    assert receiver.apply_changes(packet).size == 0


def test_packing_commits_nothing_and_bytes_follow_the_changes() -> None:
    """Rules: R45."""
    sender = make()
    sender.pack_changes()
    sender.append_row(1, [[5], []])
    assert len(sender.pack_changes()) == 64 + 24 * 2 + 2 * (12 + 4) + 8  # a count and a column
    assert not sender.backend.to_host(sender.device_table(0)).any()
    sender.commit()
    sender.verify()


# Refusals.


def refuse(table: bt.BlockTable, packet: Any, match: str, error: type[Exception] = bt.ChangesError) -> None:
    """Assert that a packet is refused in a sentence, and that nothing has changed: nothing is pending either."""
    before, digest, sent, calls = held(table), table.digest(), table.num_bytes_sent, table.num_row_changes
    with pytest.raises(error, match=match) as caught:
        table.apply_changes(packet)
    assert str(caught.value).endswith(".")
    table.commit()
    assert (held(table), table.digest(), table.num_bytes_sent, table.num_row_changes) == (before, digest, sent, calls)


def pair() -> tuple[bt.BlockTable, bt.BlockTable]:
    """Return a sender and a receiver of its first packet."""
    sender, receiver = make(), make()
    sender.set_row(0, [[1, 2], [3]])
    receiver.apply_changes(sender.pack_changes())
    receiver.commit()
    return sender, receiver


def next_packet(sender: bt.BlockTable, block: int) -> bytes:
    sender.append_row(0, [[block], []])
    return sender.pack_changes()


def test_lost_doubled_and_reordered_packets_are_refused_by_their_numbers() -> None:
    """Rules: R46."""
    sender, receiver = pair()
    second, third, fourth = (next_packet(sender, block) for block in (4, 5, 6))
    refuse(receiver, third, "Packet 2 came before its turn: packet 1 is missing")
    refuse(receiver, fourth, "Packet 3 came before its turn: packets 1 to 2 are missing")
    receiver.apply_changes(second)
    receiver.commit()
    refuse(receiver, second, "Packet 1 was applied here already, or came too late: packet 2 comes next")
    receiver.apply_changes(third)
    receiver.apply_changes(fourth)
    assert_equal(sender, receiver)


def test_a_whole_packet_makes_good_what_was_lost_and_is_not_taken_twice() -> None:
    """Rules: R45, R46."""
    sender, receiver = pair()
    next_packet(sender, 4)
    sender.move_row(0, 3)
    receiver.set_row(1, [[9], [9]])  # and it differs
    whole = sender.pack_changes(whole=True)
    assert receiver.apply_changes(whole).tolist() == [0, 1, 3]
    assert_equal(sender, receiver)
    receiver.commit()
    receiver.verify()
    refuse(receiver, whole, "Packet 2 was applied here already")
    receiver.apply_changes(next_packet(sender, 5))
    assert_equal(sender, receiver)


def test_truncated_packets_and_every_flipped_bit_are_refused() -> None:
    """Rules: R46."""
    sender, receiver = pair()
    packet = next_packet(sender, 4)
    for size in range(len(packet)):
        refuse(receiver, packet[:size], r"is damaged|not a packet of pack_changes")
    refuse(receiver, packet + b"\0", "is damaged")
    for bit in range(8 * len(packet)):
        flipped = bytearray(packet)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(bt.ChangesError, match=r"damaged|not a packet of|version"):
            receiver.apply_changes(flipped)
    receiver.apply_changes(packet)
    assert_equal(sender, receiver)


@pytest.mark.parametrize("given", [None, 7, "BTCH", [1, 2]], ids=str)
def test_what_is_no_bytes_is_refused(given: Any) -> None:
    """Rules: R46."""
    refuse(make(), given, "must be the bytes that pack_changes", bt.DtypeError)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda packet: np.frombuffer(packet, np.uint8)])
def test_bytes_come_in_any_form(kind: Callable[[bytes], Any]) -> None:
    """Rules: R46."""
    sender, receiver = make(), make()
    sender.set_row(3, [[1], [2]])
    receiver.apply_changes(kind(sender.pack_changes()))
    assert_equal(sender, receiver)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"groups": (GROUPS[1], GROUPS[0])}, r"config\.fingerprint"),
        ({"groups": GROUPS[:1]}, r"config\.fingerprint"),
        ({"context_parallel": bt.ContextParallel(world_size=2, rank=0, interleave_size=4)}, r"config\.fingerprint"),
        ({"max_num_rows": 5}, "num_rows is 4, and here it is 5"),
        ({"max_model_len": 80}, "capacity of group 0 is 16, and here it is 20"),
        ({"width_alignment": 1}, "width of group 0 is 32, and here it is 16"),
        (
            {"groups": (bt.KVCacheGroup(block_size=4, num_blocks=900, null_block_id=7), GROUPS[1])},
            "null_block_id of group 0 is 0, and here it is 7",
        ),
    ],
)
def test_another_geometry_is_refused(options: dict[str, Any], name: str) -> None:
    """Rules: R46."""
    sender = make()
    sender.set_row(0, [[1, 2], [3]])
    refuse(make(**options), sender.pack_changes(), name)


def test_ranks_and_what_is_no_geometry_may_differ() -> None:
    """Rules: R46."""
    sender, receiver = (
        make(
            context_parallel=bt.ContextParallel(world_size=2, rank=rank, interleave_size=2),
            max_num_reqs=4 - rank,
            max_num_rows=4,
            slot_dtype=("int64", "int32")[rank],
        )
        for rank in range(2)
    )
    sender.set_row(0, [[1, 2], [3]])
    receiver.apply_changes(sender.pack_changes())
    assert_equal(sender, receiver)


def test_a_block_that_a_cache_does_not_have_is_refused() -> None:
    """Rules: R7, R46."""
    receiver = make(groups=(bt.KVCacheGroup(block_size=4, num_blocks=50), GROUPS[1]))
    sender = make()
    sender.set_row(2, [[49, 50], [3]])
    refuse(receiver, sender.pack_changes(), r"holds 50 for row 2 of group 0, .* end before 50")


def forged(sender: bt.BlockTable, entries: list[int], values: list[int]) -> bytes:
    packet = Packet(0, 0, False, np.array(entries), np.array(values, np.int32))
    return write_packet(sender.config, packet)


def test_a_packet_that_reaches_outside_the_rows_is_refused() -> None:
    """Its checksum is right. Rules: R46."""
    table = make()
    arena = table.config.arena
    first, second = arena.group_offsets
    gap = first + 4 * arena.widths[0] if second > first + 4 * arena.widths[0] else 8
    for entry, value in [
        (8, 1),
        (gap, 1),
        (first + 16, 1),
        (arena.size - 1, 1),
        (0, 17),
        (0, -1),
        (first, -1),
        (4, 1000),
    ]:
        refuse(table, forged(table, [entry], [value]), "which this table cannot have")
    for entries in ([arena.size], [-1], [5, 4], [4, 4]):
        refuse(table, forged(table, entries, [1] * len(entries)), "is damaged")
    refuse(table, forged(table, [first, first + 1], [3, 4]), "does not fit what this table holds")


def test_a_divergence_is_refused_before_anything_is_changed() -> None:
    """Rules: R46, R47."""
    sender, receiver = pair()
    receiver.replace_blocks(0, 0, 1, [77])
    assert receiver.digest() != sender.digest()
    before, packet = held(receiver), next_packet(sender, 4)
    with pytest.raises(bt.ChangesError, match=f"the sender's is {sender.digest():016x}.*pack_changes.whole=True"):
        receiver.apply_changes(packet)
    assert held(receiver) == before
    receiver.replace_blocks(0, 0, 1, [2])
    receiver.apply_changes(packet)
    assert_equal(sender, receiver)


# Digests.


def test_a_digest_is_the_one_the_contract_says() -> None:
    """Rules: R47."""
    table = make()
    assert table.digest() == 0
    table.set_row(1, [[3, 4], [0]])
    assert table.digest() == plain_digest(table) == 0xDF766BD0BF49966D
    table.clear()
    assert table.digest() == 0


def test_a_digest_tells_rows_groups_and_places_apart() -> None:
    """Rules: R47."""
    held_rows: list[tuple[int, list[list[int]]]] = [
        (0, [[5], []]),
        (1, [[5], []]),
        (0, [[6], []]),
        (0, [[], [5]]),
        (0, [[5, 6], []]),
        (0, [[6, 5], []]),
    ]
    found = set()
    for row, blocks in held_rows:
        table = make()
        table.set_row(row, blocks)
        found.add(table.digest())
    assert len(found) == len(held_rows)


def test_the_order_of_changes_does_not_matter() -> None:
    """Rules: R47."""
    first, second = make(), make()
    first.set_row(0, [[1, 2], [3]])
    first.digest()
    first.set_row(1, [[4], []])
    second.set_row(1, [[9, 9, 9], [9]])
    second.digest()
    second.set_row(1, [[4], []])
    second.commit()
    second.append_row(0, [[1], [3]])
    second.append_row(0, [[2], []])
    assert_equal(first, second)


def test_large_appends_reach_packets_though_the_mirror_is_behind() -> None:
    """The compiled path only notes some steps of large appends. Rules: R45-R47."""
    options: dict[str, Any] = {"groups": GROUPS[:1], "max_num_rows": 300, "max_model_len": 256}
    sender, receiver = make(**options), make(**options)
    for block in range(1, 21):
        sender.append_rows(range(300), [[block + row for row in range(300)]], [1] * 300)
        if block % 7:
            receiver.apply_changes(sender.pack_changes())
            assert sender.digest() == receiver.digest()
        sender.commit()
    receiver.apply_changes(sender.pack_changes())
    assert_equal(sender, receiver)


@pytest.mark.parametrize("is_packing", [False, True])
def test_the_cost_follows_the_changes_and_not_the_table(is_packing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that are looked at: a count and a column for each row and group that was appended to. Rules: R45-R47."""
    looked_at: dict[int, list[int]] = {}
    right: Any = vars(ranks)["difference"]
    widths = 256, 1 << 16
    for width in widths:
        table, sizes = make(max_num_rows=64, max_model_len=width), looked_at.setdefault(width, [])

        def counted(held: Any, rows: Any, sizes: list[int] = sizes) -> Any:
            sizes.append(int(rows.pending_ranges()[1].sum()))
            return right(held, rows)

        table.digest()
        table.pack_changes()
        monkeypatch.setattr(ranks, "difference", counted)
        for block in range(1, 4):
            table.append_rows(range(64), [[block] * 64, [block] * 64], [1] * 64)
            assert len(table.pack_changes()) < 10000 if is_packing else table.digest()
            table.commit()
        assert table.digest() == plain_digest(table)
        monkeypatch.setattr(ranks, "difference", right)
    assert looked_at[widths[0]] == looked_at[widths[1]]
    assert max(looked_at[256]) == 64 * (1 + 1 + 1 + 2)  # the second group's blocks have two columns


def test_a_table_that_is_never_asked_keeps_nothing() -> None:
    """Rules: R47."""
    table = make()
    table.set_row(0, [[1], [2]])
    table.commit()
    assert table._log is None


def test_what_no_packet_holds_stays_bounded() -> None:
    """Commits without packets: what is kept for the next one is at most the table. Rules: R45."""
    sender, receiver = make(), make()
    receiver.apply_changes(sender.pack_changes())
    for number in range(400):
        sender.set_row(number % 4, [[1 + number, 2 + number], [number]])
        sender.commit()
    assert sender._log is not None
    assert sender._log._unsent is not None
    assert sender._log._unsent.offsets.size < 300
    receiver.apply_changes(sender.pack_changes())
    assert_equal(sender, receiver)


def test_rows_of_requests_find_what_a_packet_has_changed() -> None:
    """Rules: R43, R46."""
    sender, receiver = make(), make()
    requests = bt.Requests(receiver)
    row = requests.sync("a", [[1, 2], [3]])
    sender.set_row(row, [[1, 9], [3]])
    receiver.apply_changes(sender.pack_changes(whole=True))
    assert held(receiver)[0][row] == [1, 9]
    requests.sync("a", [[1, 2], [3]])
    assert held(receiver)[0][row] == [1, 2]


def test_a_checked_table_takes_moves_and_new_requests_without_findings() -> None:
    """What the sender's rows do is right, and so are the receiver's steps. Rules: R38, R46."""
    sender, receiver = make(), make(check="host")
    starts, rows = np.array([0, 1], np.int32), np.array([0], np.int32)
    sender.set_row(0, [[1], [2]])
    for position in range(9):
        if position % 4 == 0 and position:
            sender.append_row(0, [[1 + position], [50] if position == 8 else []])
        receiver.apply_changes(sender.pack_changes())
        receiver.step(rows, starts, np.array([position]))
    sender.move_row(0, 3)
    sender.set_row(0, [[40], [41]])
    receiver.apply_changes(sender.pack_changes())
    receiver.step(np.array([3, 0], np.int32), np.array([0, 1, 2], np.int32), np.array([9, 0]))
    assert receiver.findings == ()
    sender.set_row(1, [[40], [42]])  # the sender's mistake: a block of another row
    receiver.apply_changes(sender.pack_changes())
    with pytest.raises(bt.CheckError, match="shared_block_written"):
        receiver.step(np.array([1], np.int32), starts, np.array([0]))
