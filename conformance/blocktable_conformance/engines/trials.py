"""What is tried of each rule, as small histories: which calls it needs, how one is drawn, and what is looked at."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample, Unsatisfiable

from blocktable_conformance.engines import play
from blocktable_conformance.engines.adapter import AFTER, NUM_TOKENS, Engine, Shape, Span
from blocktable_conformance.engines.play import Call, History, Look
from blocktable_conformance.oracle import Slot

Draw = Callable[[Any], Any]
MAX_ID = 60
MAX_ROWS, MAX_BLOCKS = 2, 3
MAX_SPAN = 4


class Result(NamedTuple):
    """Of one trial on one engine.

    Attributes:
        verdict: "kept", "broken", "no such call" or "not tried".
        difference: what the history shows, or why it was not tried; empty otherwise.
        history: the smallest one that breaks the rule.
    """

    verdict: str
    difference: str = ""
    history: History | None = None


@dataclass(frozen=True)
class Trial:
    """One thing that a rule says.

    Attributes:
        rule: its number.
        what: it says, in a few words.
        calls, features: that an engine must have.
        draw: `(draw, engine)` -> a history.
        look: at the last call's result.
    """

    rule: str
    what: str
    calls: tuple[str, ...]
    features: tuple[str, ...]
    draw: Callable[[Draw, type[Engine]], History]
    look: Look

    def is_for(self, engine: type[Engine]) -> bool:
        """Say whether the engine has the calls."""
        return all(hasattr(engine, call) for call in self.calls) and engine.features.issuperset(self.features)

    def run(self, engine: type[Engine], examples: int) -> Result:
        """Try `examples` histories; the same ones each time."""
        for feature in set(self.features).intersection(engine.untried):
            return Result("not tried", engine.untried[feature])
        if not self.is_for(engine):
            return Result("no such call")
        try:
            history = find(
                st.composite(self.draw)(engine).map(partial(_without_commits, engine)),
                lambda drawn: play.play(engine, drawn, self.look) is not None,
                settings=settings(
                    max_examples=examples,
                    database=None,
                    deadline=None,
                    phases=(Phase.generate, Phase.shrink),
                    suppress_health_check=list(HealthCheck),
                ),
                random=random.Random(self.what),
            )
        except (NoSuchExample, Unsatisfiable):
            return Result("kept")
        return self.replay(engine, history)

    def replay(self, engine: type[Engine], history: History) -> Result:
        """Play one history."""
        difference = play.play(engine, history, self.look)
        return Result("kept") if difference is None else Result("broken", difference, history)


def _without_commits(engine: type[Engine], history: History) -> History:
    """Leave commits out for an engine that has none."""
    if hasattr(engine, "commit"):
        return history
    return History(history.shape, tuple(call for call in history.calls if call[0] != "commit"))


# Parts of histories.


def a_shape(draw: Draw, engine: type[Engine], **fixed: Any) -> Shape:
    """Draw sizes; those that an engine cannot have are 1."""
    shape: dict[str, Any] = {
        "block_size": draw(st.sampled_from(list(engine.block_sizes))),
        "rows": draw(st.integers(1, MAX_ROWS)),
        "blocks": draw(st.integers(1, MAX_BLOCKS)),
    }
    if "groups" in engine.features:
        shape["groups"] = draw(st.integers(1, 2))
    return Shape(**shape | fixed)


def some_ids(draw: Draw, engine: type[Engine], shape: Shape, count: int, taken: set[int]) -> list[list[int]]:
    """Draw `count` ids for each group, none of them twice in a history."""
    first = 0 if engine.null_block_id == -1 else 1
    wanted = st.integers(first, MAX_ID).filter(lambda block: block not in taken)
    ids = []
    for _ in range(shape.groups):
        ids.append(draw(st.lists(wanted, min_size=count, max_size=count, unique=True)))
        taken.update(ids[-1])
    return ids


def filled_rows(
    draw: Draw,
    engine: type[Engine],
    shape: Shape,
    taken: set[int],
    rows: Sequence[int] | None = None,
    *,
    whole: bool = False,
) -> list[Call]:
    """Draw what fills rows, each with at least one block; a ring, or where it is asked for, whole."""
    calls: list[Call] = []
    for row in range(shape.rows) if rows is None else rows:
        count = shape.blocks if shape.ring or whole else draw(st.integers(1, shape.blocks))
        calls.append(("set_row", row, some_ids(draw, engine, shape, count, taken)))
    return calls


def a_batch(draw: Draw, engine: type[Engine], shape: Shape) -> list[int]:
    """Draw the rows of a batch; the first ones where the engine knows no other."""
    size = draw(st.integers(1, shape.rows))
    if "any order" not in engine.features:
        return list(range(size))
    rows: list[int] = draw(st.lists(st.integers(0, shape.rows - 1), min_size=size, max_size=size, unique=True))
    return rows


def a_span(draw: Draw, engine: type[Engine], shape: Shape, row: int, first: int, last: int) -> Span:
    """Draw a request's tokens, at positions `first` to `last`."""
    start = draw(st.integers(first, last))
    if "aligned spans" in engine.features:
        start -= start % shape.block_size
    return Span(row, start, draw(st.integers(1, min(MAX_SPAN, last - start + 1))))


def lengths(calls: Sequence[Call], shape: Shape) -> dict[int, int]:
    """Return how many positions each row has that a call of `calls` has set."""
    turn = shape.block_size * shape.world_size
    return {call[1]: len(call[2][0]) * turn for call in calls if call[0] == "set_row"}


def spans_within(draw: Draw, engine: type[Engine], shape: Shape, calls: Sequence[Call], rows: Sequence[int]) -> Call:
    """Draw a step whose tokens all lie in their rows."""
    size = lengths(calls, shape)
    return ("slots", [a_span(draw, engine, shape, row, 0, size[row] - 1) for row in rows])


# Rows.


def _columns_after(*names: str) -> Callable[[Draw, type[Engine]], History]:
    """Return what draws rows, then one of these operations, and looks at the filled columns."""

    def history(draw: Draw, engine: type[Engine]) -> History:
        shape, taken = a_shape(draw, engine), set[int]()
        held = [0] * shape.rows
        calls = _some_rows(draw, engine, shape, taken, held) + _edits(draw, engine, shape, taken, held, names)
        return History(shape, (*calls, ("columns",)))

    return history


def _some_rows(draw: Draw, engine: type[Engine], shape: Shape, taken: set[int], held: list[int]) -> list[Call]:
    """Draw what fills some of the rows, and note in `held` how many blocks each has."""
    calls: list[Call] = []
    for row in range(shape.rows):
        held[row] = draw(st.integers(0, shape.blocks))
        if held[row]:
            calls.append(("set_row", row, some_ids(draw, engine, shape, held[row], taken)))
    return calls


def _edits(
    draw: Draw, engine: type[Engine], shape: Shape, taken: set[int], held: list[int], names: Sequence[str]
) -> list[Call]:
    """Draw operations that are allowed on rows of so many blocks."""
    calls: list[Call] = []
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(list(names)))
        row = draw(st.integers(0, shape.rows - 1))
        other = draw(st.integers(0, shape.rows - 1))
        if name == "append_row":
            count = draw(st.integers(0, shape.blocks - held[row]))
            calls.append((name, row, some_ids(draw, engine, shape, count, taken)))
            held[row] += count
        elif name == "set_row":
            held[row] = draw(st.integers(1, shape.blocks))
            calls.append((name, row, some_ids(draw, engine, shape, held[row], taken)))
        elif name == "clear_row":
            calls.append((name, row))
            held[row] = 0
        elif name == "truncate_row":
            held[row] = draw(st.integers(0, held[row]))
            calls.append((name, row, held[row]))
        elif row != other:
            calls.append((name, row, other))
            a, b = held[row], held[other]
            held[row], held[other] = {"move_row": (0, a), "swap_rows": (b, a), "copy_row": (a, a)}[name]
    return calls


def _split(draw: Draw, engine: type[Engine]) -> History:
    shape, taken = a_shape(draw, engine, block_size=2, split=2), set[int]()
    calls = filled_rows(draw, engine, shape, taken)
    return History(shape, (*calls, ("columns",)))


def _tails(last: str) -> Callable[[Draw, type[Engine]], History]:
    def history(draw: Draw, engine: type[Engine]) -> History:
        shape, taken = a_shape(draw, engine), set[int]()
        names = [name for name in ("set_row", "clear_row") if hasattr(engine, name)]
        held, commit = [shape.blocks] * shape.rows, [("commit",)] if last == "device_table" else []
        calls = filled_rows(draw, engine, shape, taken, whole=True) + commit
        calls += _edits(draw, engine, shape, taken, held, names) + commit
        return History(shape, (*calls, (last,)))

    return history


def _exact(engine: type[Engine]) -> dict[str, int]:
    """Return what makes a row as wide as its blocks, for `a_shape`."""
    return {} if engine.capacity_block_size is None else {"block_size": engine.capacity_block_size}


def _over_capacity(draw: Draw, engine: type[Engine]) -> History:
    shape, taken = a_shape(draw, engine, **_exact(engine)), set[int]()
    held = draw(st.integers(1, shape.blocks))
    more = shape.blocks - held + draw(st.integers(1, 2))
    first = ("set_row", 0, some_ids(draw, engine, shape, held, taken))
    return History(shape, (first, ("append_row", 0, some_ids(draw, engine, shape, more, taken)), ("columns",)))


def _second_group_over_capacity(draw: Draw, engine: type[Engine]) -> History:
    shape, taken = a_shape(draw, engine, groups=2, **_exact(engine)), set[int]()
    ids = some_ids(draw, engine, shape, shape.blocks, taken)
    more = some_ids(draw, engine, shape, 2, taken)
    # The first group has room for one block, the second has none.
    first = ("set_row", 0, [ids[0][:-1], ids[1]])
    return History(shape, (first, ("append_row", 0, [more[0][:1], more[1]]), ("columns",)))


def _wrong_id(draw: Draw, engine: type[Engine]) -> History:
    shape, taken = a_shape(draw, engine, groups=1), set[int]()
    wrong = draw(st.sampled_from([2**31, -5]))
    ids = some_ids(draw, engine, shape, draw(st.integers(0, shape.blocks - 1)), taken)
    return History(shape, (("set_row", 0, [[*ids[0], wrong]]), ("columns",)))


def _nothing(draw: Draw, engine: type[Engine]) -> History:
    shape, taken = a_shape(draw, engine), set[int]()
    calls = filled_rows(draw, engine, shape, taken)
    row = draw(st.integers(0, shape.rows - 1))
    return History(shape, (*calls, ("append_row", row, [[] for _ in range(shape.groups)]), ("columns",)))


def _committed(draw: Draw, engine: type[Engine]) -> History:
    shape, taken = a_shape(draw, engine), set[int]()
    names = [name for name in ("append_row", "set_row", "clear_row") if hasattr(engine, name)]
    held = [0] * shape.rows
    calls = [*_some_rows(draw, engine, shape, taken, held), ("commit",)]
    calls += [*_edits(draw, engine, shape, taken, held, names), ("commit",)]
    return History(shape, (*calls, ("device_table",)))


def _not_committed(draw: Draw, engine: type[Engine]) -> History:
    shape, taken = a_shape(draw, engine), set[int]()
    calls = [*filled_rows(draw, engine, shape, taken), ("commit",)]
    calls += filled_rows(draw, engine, shape, taken, [draw(st.integers(0, shape.rows - 1))])
    return History(shape, (*calls, ("device_table",)))


# Batches.


def _gather(draw: Draw, engine: type[Engine]) -> History:
    shape, taken = a_shape(draw, engine), set[int]()
    calls = [*filled_rows(draw, engine, shape, taken), ("commit",)]
    rows = a_batch(draw, engine, shape)
    return History(shape, (*calls, ("gather", rows, len(rows))))


def _gather_padding_entries(draw: Draw, engine: type[Engine]) -> History:
    shape, taken = a_shape(draw, engine), set[int]()
    calls = [*filled_rows(draw, engine, shape, taken), ("commit",)]
    rows = a_batch(draw, engine, shape)
    rows[draw(st.integers(0, len(rows) - 1))] = -1
    return History(shape, (*calls, ("gather", rows, len(rows))))


def _gather_twice(*, padded: bool) -> Callable[[Draw, type[Engine]], History]:
    def history(draw: Draw, engine: type[Engine]) -> History:
        shape, taken = a_shape(draw, engine), set[int]()
        calls = filled_rows(draw, engine, shape, taken, whole=True)
        calls += [("commit",), ("gather", list(range(shape.rows)), shape.rows)]
        calls += filled_rows(draw, engine, shape, taken, [draw(st.integers(0, shape.rows - 1))])
        rows = a_batch(draw, engine, shape)
        # An engine whose batch is its table's first rows empties those of requests that have left.
        calls += [("clear_row", row) for row in range(shape.rows) if row not in rows and hasattr(engine, "clear_row")]
        size = draw(st.integers(len(rows), shape.rows)) if padded else len(rows)
        return History(shape, (*calls, ("commit",), ("gather", rows, size)))

    return history


def _window(draw: Draw, engine: type[Engine]) -> History:
    shape, taken = a_shape(draw, engine, window=draw(st.integers(1, 6))), set[int]()
    calls = filled_rows(draw, engine, shape, taken)
    rows = a_batch(draw, engine, shape)
    size = lengths(calls, shape)
    computed = [draw(st.integers(0, size[row])) for row in rows]
    return History(shape, (*calls, ("commit",), ("gather", rows, len(rows), computed)))


# Slots.


def _slots(**fixed: Any) -> Callable[[Draw, type[Engine]], History]:
    def history(draw: Draw, engine: type[Engine]) -> History:
        shape, taken = a_shape(draw, engine, **fixed), set[int]()
        calls = [*filled_rows(draw, engine, shape, taken), ("commit",)]
        step = spans_within(draw, engine, shape, calls, a_batch(draw, engine, shape))
        return History(shape, (*calls, step))

    return history


def _sharded(draw: Draw, engine: type[Engine]) -> History:
    world = draw(st.integers(2, 3))
    size = draw(st.sampled_from(list(engine.block_sizes)))
    interleave = draw(st.sampled_from([i for i in range(1, size + 1) if size % i == 0]))
    rank = draw(st.integers(0, world - 1))
    shape = a_shape(draw, engine, block_size=size, world_size=world, rank=rank, interleave_size=interleave)
    calls = [*filled_rows(draw, engine, shape, set()), ("commit",)]
    return History(shape, (*calls, spans_within(draw, engine, shape, calls, a_batch(draw, engine, shape))))


def _padded_tokens(draw: Draw, engine: type[Engine]) -> History:
    shape, taken = a_shape(draw, engine), set[int]()
    calls = [*filled_rows(draw, engine, shape, taken), ("commit",)]
    rows = a_batch(draw, engine, shape)
    spans = list(spans_within(draw, engine, shape, calls, rows)[1])
    where = draw(st.integers(0, len(spans) - 1))
    spans[where] = spans[where]._replace(row=-1)
    return History(shape, (*calls, ("slots", spans)))


def _beyond(draw: Draw, engine: type[Engine]) -> History:
    """Of rows that held more before."""
    shape, taken = a_shape(draw, engine), set[int]()
    calls = filled_rows(draw, engine, shape, taken, whole=True)
    calls += filled_rows(draw, engine, shape, taken, [draw(st.integers(0, shape.rows - 1))])
    size = lengths(calls, shape)
    rows = a_batch(draw, engine, shape)
    spans = [a_span(draw, engine, shape, row, 0, size[row] - 1) for row in rows]
    where = draw(st.integers(0, len(rows) - 1))
    row = rows[where]
    if "aligned spans" in engine.features:
        spans[where] = Span(row, size[row], 1)
    else:
        spans[where] = a_span(draw, engine, shape, row, size[row], size[row] + shape.block_size)
    return History(shape, (*calls, ("commit",), ("slots", spans)))


def _negative(draw: Draw, engine: type[Engine]) -> History:
    """Row 1 is asked, so that what an engine reads before its columns is row 0."""
    shape, taken = a_shape(draw, engine, rows=2), set[int]()
    calls = [*filled_rows(draw, engine, shape, taken), ("commit",)]
    spans = list(spans_within(draw, engine, shape, calls, [0, 1])[1])
    spans[1] = Span(1, -1, 1)
    return History(shape, (*calls, ("slots", spans)))


def _ring(*, long: bool) -> Callable[[Draw, type[Engine]], History]:
    def history(draw: Draw, engine: type[Engine]) -> History:
        shape, taken = a_shape(draw, engine, ring=True, groups=1, rows=1), set[int]()
        calls = [*filled_rows(draw, engine, shape, taken), ("commit",)]
        size = shape.block_size * shape.blocks
        start = draw(st.integers(0, 3 * size))
        count = draw(st.integers(size + 1, size + 3)) if long else draw(st.integers(1, size))
        return History(shape, (*calls, ("slots", [Span(0, start, min(count, NUM_TOKENS))])))

    return history


def _shorter_step(draw: Draw, engine: type[Engine]) -> History:
    shape, taken = a_shape(draw, engine), set[int]()
    calls = [*filled_rows(draw, engine, shape, taken), ("commit",)]
    rows = a_batch(draw, engine, shape)
    steps = [spans_within(draw, engine, shape, calls, rows), spans_within(draw, engine, shape, calls, rows[:1])]
    return History(shape, (*calls, *steps))


def _large_id(draw: Draw, engine: type[Engine]) -> History:
    shape = a_shape(draw, engine, groups=1, rows=1)
    block = draw(st.sampled_from([2**30, 2**31 - 1]))
    offset = 0 if "aligned spans" in engine.features else draw(st.integers(0, shape.block_size - 1))
    return History(shape, (("set_row", 0, [[block]]), ("commit",), ("slots", [Span(0, offset, 1)])))


def _has_slot(slot: Slot) -> bool:
    return slot.block_id is not None and slot.rule != "R13"


def _is_real(slot: Slot) -> bool:
    return slot.rule != "R15"


_SETS = ("set_row", "columns")
_REAL = play.batch_rows(lambda rows, padded, size: range(len(rows)))

TRIALS = [
    Trial("R2", "the kernel blocks of a block", _SETS, ("split",), _split, play.filled_columns),
    *(
        Trial("R4", name, ("set_row", name, "columns"), (), _columns_after(name), play.filled_columns)
        for name in ("append_row", "set_row", "clear_row", "move_row", "swap_rows", "copy_row", "truncate_row")
    ),
    Trial("R5", "tails are NULL on the host", ("set_row", "host_table"), (), _tails("host_table"), play.tails),
    Trial("R5", "tails are NULL on the device", ("set_row", "device_table"), (), _tails("device_table"), play.tails),
    Trial(
        "R6",
        "blocks over the capacity are refused",
        (*_SETS, "append_row"),
        ("capacity",),
        _over_capacity,
        play.filled_columns,
    ),
    Trial(
        "R6",
        "a refusal changes no group",
        (*_SETS, "append_row"),
        ("capacity", "groups"),
        _second_group_over_capacity,
        play.filled_columns,
    ),
    Trial("R7", "ids that are none are refused", _SETS, ("any id",), _wrong_id, play.filled_columns),
    Trial("R8", "appending nothing", (*_SETS, "append_row"), (), _nothing, play.filled_columns),
    Trial(
        "R9.1",
        "after a commit the device has the rows",
        ("set_row", "commit", "device_table"),
        (),
        _committed,
        play.committed_columns,
    ),
    Trial(
        "R9.2",
        "later changes wait for a commit",
        ("set_row", "commit", "device_table"),
        (),
        _not_committed,
        play.committed_columns,
    ),
    Trial("R10.1", "a batch's rows, then NULL", ("set_row", "gather"), (), _gather, _REAL),
    Trial(
        "R10.2",
        "the rows of padding entries are NULL",
        ("set_row", "gather"),
        ("padding entries",),
        _gather_padding_entries,
        play.batch_rows(lambda rows, padded, size: [i for i, row in enumerate(rows) if row < 0]),
    ),
    Trial(
        "R10.3",
        "the rows of padding are NULL",
        ("set_row", "gather"),
        ("padding",),
        _gather_twice(padded=True),
        play.batch_rows(lambda rows, padded, size: range(len(rows), padded)),
    ),
    Trial(
        "R10.6",
        "nothing of an earlier batch in a row",
        ("set_row", "gather"),
        (),
        _gather_twice(padded=False),
        _REAL,
    ),
    Trial(
        "R10.6",
        "nothing of an earlier batch after the batch",
        ("set_row", "gather"),
        ("whole buffer",),
        _gather_twice(padded=False),
        play.batch_rows(lambda rows, padded, size: range(padded, size)),
    ),
    Trial("R11", "blocks that a window has left are NULL", ("set_row", "gather"), ("window",), _window, _REAL),
    Trial("R12", "the slot of a token", ("set_row", "slots"), (), _slots(), play.tokens(_has_slot)),
    Trial(
        "R12",
        "the slot in a kernel block",
        ("set_row", "slots"),
        ("split",),
        _slots(block_size=2, split=2),
        play.tokens(_has_slot),
    ),
    Trial(
        "R13",
        "a token of a padding entry is PAD",
        ("set_row", "slots"),
        ("padded tokens",),
        _padded_tokens,
        play.tokens(lambda slot: slot.row == -1),
    ),
    Trial(
        "R13",
        AFTER,
        ("set_row", "slots"),
        (),
        _beyond,
        play.tokens(lambda slot: slot.rule == "R13"),
    ),
    Trial(
        "R13",
        "a position below 0 is PAD",
        ("set_row", "slots"),
        ("negative positions",),
        _negative,
        play.tokens(lambda slot: slot.rule == "R13"),
    ),
    Trial(
        "R14", "positions wrap around a ring", ("set_row", "slots"), ("ring",), _ring(long=False), play.tokens(_is_real)
    ),
    Trial("R14", "a step longer than a ring", ("set_row", "slots"), ("ring",), _ring(long=True), play.tokens(_is_real)),
    Trial(
        "R15",
        "PAD from the last token on",
        ("set_row", "slots"),
        ("slot buffer",),
        _shorter_step,
        play.tokens(lambda slot: slot.rule == "R15"),
    ),
    Trial(
        "R16",
        "slots of 2**31 and more",
        ("set_row", "slots"),
        ("any id",),
        _large_id,
        play.tokens(_has_slot),
    ),
    Trial(
        "R18",
        "the slots of a rank's own tokens",
        ("set_row", "slots"),
        ("context parallel",),
        _sharded,
        play.tokens(_has_slot),
    ),
    Trial(
        "R18",
        "another rank's token is PAD",
        ("set_row", "slots"),
        ("context parallel",),
        _sharded,
        play.tokens(lambda slot: slot.rule == "R13, R18"),
    ),
]
"""In the order of the rules."""
