"""`blocktable explain`: the life of a row and of its blocks up to a step of a recording (docs/recording.md)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blocktable import get_backend
from blocktable.cli import Parser, UsageError, say, write_file
from blocktable_replay.arguments import COUNT_OR_NONE
from blocktable_replay.histories import NOBODY, BlockHistory, Historian, Holding, Life, Writing
from blocktable_replay.lane import Lane
from blocktable_replay.recorded import Recording

SCHEMA_VERSION = 1
MAX_FINDINGS = 8
"""Findings of the checker that are printed; JSON has more."""

MAX_BEFORE = 3
"""Earlier holders of a block that the table names; JSON has all."""

EPILOG = """\
A step is named by the number of commits before it, as `blocktable replay` names findings. A request, here, is what a
row holds from the call that sets it to the call that clears it or sets it again; a move takes it to another row.

example:
  blocktable explain run.btrace --step 120 --row 3 --block 17

Exit status: 0 when the table was printed, 2 for a wrong call or a file that cannot be read.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = Parser(
        prog="blocktable explain",
        description="Show the life of a row and of its blocks up to a step of a recording: who had each block before, "
        "who has it now, and who wrote it last.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("recording", metavar="RECORDING", help="what `table.record` or `blocktable replay --record` wrote (.btrace)")
    add("--step", type=COUNT_OR_NONE, metavar="N", help="the last step to look at (default: the whole recording)")
    add("--row", type=COUNT_OR_NONE, metavar="R", required=True, help="the row, at that step")
    add("--group", type=COUNT_OR_NONE, metavar="G", help="one group (default: all)")
    add("--block", type=COUNT_OR_NONE, metavar="B", help="one manager block, whether or not the row has it")
    add("--json", metavar="FILE", help="write everything as JSON (docs/recording.md describes it)")
    arguments = parser.parse_args(argv)
    if arguments.json is not None and Path(arguments.json).resolve() == Path(arguments.recording).resolve():
        raise UsageError(f"--json would replace the recording, {arguments.recording}; name another file.")
    with Recording(arguments.recording) as recording:
        story = explain(recording, arguments.step, arguments.row, arguments.group, arguments.block)
    say(as_text(story))
    if arguments.json is not None:
        write_file(arguments.json, json.dumps(story, indent=2) + "\n")
    return 0


def explain(
    recording: Recording, step: int | None, row: int, group: int | None = None, block: int | None = None
) -> dict[str, Any]:
    """Return the life of a row and of its blocks, ready for JSON.

    Args:
        recording: the file.
        step: the last step to look at. None: all.
        row: the row at that step; where it holds nothing then, the last request that it held.
        group: None: all groups.
        block: manager id of one block. None: all that the row has.

    Raises:
        UsageError: there is no such row or group, or the row has never held anything.
        RecordingError: a call makes no sense.
    """
    config = recording.config
    for name, value, size in (("row", row, config.num_rows), ("group", group, len(config.groups))):
        if value is not None and value >= size:
            raise UsageError(f"--{name} {value} is not there: the recorded table has {size} {name}s.")
    checker = Lane("checker", get_backend("numpy"), config, check="host")
    first = Historian(recording, step, checker=checker)
    followed = int(first.last_life_of[row])
    if followed == NOBODY:
        raise UsageError(f"Row {row} holds nothing up to step {first.last_step}, where the calls end.")
    groups = range(len(config.groups)) if group is None else [group]
    life = first.lives[followed]
    if life.ended_call is not None:  # its blocks are those that it had last
        first = Historian(recording, step, num_calls=life.ended_call)
    held = {each: _index_of_blocks(first, each, life.row) for each in groups}
    wanted = {each: [block] if block is not None else [*ids] for each, ids in held.items()}
    whole = Historian(recording, step, wanted, followed)
    rows = {event.row for event in whole.events}
    return {
        "schema_version": SCHEMA_VERSION,
        "recording": str(recording.path),
        "tear": recording.tear,
        "step": whole.last_step,
        "calls": whole.num_calls,
        "row": row,
        "life": asdict(life),
        "events": [asdict(event) for event in whole.events],
        "groups": [
            {
                "group": each,
                "blocks": [
                    {"index": held[each].get(number), "block_id": number} | _block(whole.lives, followed, history)
                    for number, history in whole.blocks[each].items()
                ],
            }
            for each in groups
        ],
        "findings": [
            asdict(finding)
            for finding in checker.engine_findings
            if (finding.row in rows or finding.other_row in rows)
            and finding.step >= life.began
            and finding.group in (None, *groups)
        ],
    }


def _index_of_blocks(history: Historian, group: int, row: int) -> dict[int, int]:
    """Return block -> its index in a row."""
    record = history.rows.host
    ids = record.blocks[group][row, : record.counts[group, row]].tolist()
    null = history.config.groups[group].null_block_id
    return {block: index for index, block in enumerate(ids) if block not in (null, NOBODY)}


def _block(lives: Sequence[Life], followed: int, history: BlockHistory) -> dict[str, Any]:
    """Return the story of one block, seen from the request that is followed."""
    own = [each for each in history.holdings if each.life == followed]
    others = [each for each in history.holdings if each.life != followed]
    since = own[-1].since if own else None
    mine = [each for each in history.writings if each.life == followed]
    return {
        "since": since,
        "how": own[-1].how if own else None,
        "holdings": [_named(lives, each) for each in history.holdings],
        "held_before_by": [_named(lives, each) for each in others if each.until is not None],
        "held_now_by": [_named(lives, each) for each in others if each.until is None],
        "written_here": [_named(lives, each) for each in mine],
        "written_last": _named(lives, history.writings[-1]) if history.writings else None,
        "written_by_others_meanwhile": [
            _named(lives, each) for each in history.writings if each.life != followed and _overlaps(own, each)
        ],
    }


def _overlaps(own: Sequence[Holding], writing: Writing) -> bool:
    """Return whether something was written while the followed request had the block."""
    return any(
        writing.last_step >= each.since and (each.until is None or writing.first_step < each.until) for each in own
    )


def _named(lives: Sequence[Life], entry: Holding | Writing) -> dict[str, Any]:
    """Return a holding or a writing with the row of its request, and when that began."""
    life = lives[entry.life]
    return {"row": life.row} | asdict(entry) | {"life_began": life.began, "life_ended": life.ended}


# For people.


def as_text(story: dict[str, Any]) -> str:
    """Return the story for the terminal: the row's life, its blocks, and what looks wrong."""
    life, end = story["life"], story["step"]
    over = "" if life["ended"] is None else f"; the request left the row at step {life['ended']}"
    lines = [f"{story['recording']}: row {story['row']} up to step {end}, after {story['calls']:,} calls{over}"]
    if story["tear"]:
        lines.append(f"The recording is torn ({story['tear']}); this is the story up to there.")
    events = [(str(each["step"]), each["call"], str(each["row"]), each["text"]) for each in story["events"]]
    lines += ["", "Life of the row", *_columns(("step", "call", "row", "what"), events)]
    for group in story["groups"]:
        lines += ["", f"Blocks of group {group['group']}" + ("" if life["ended"] is None else " when the request left")]
        rows = [_block_cells(entry) for entry in group["blocks"]]
        lines += _columns(BLOCK_COLUMNS, rows) if rows else ["none"]
    suspicions = [text for group in story["groups"] for text in _suspicions(story["row"], group)]
    suspicions += [f"Checker, step {each['step']}: {each['message']}" for each in story["findings"][:MAX_FINDINGS]]
    return "\n".join([*lines, "", *(suspicions or ["Nothing here looks wrong: no block has two writers."])])


BLOCK_COLUMNS = ("index", "block", "since", "held before by", "now also by", "written by this row", "written last by")


def _block_cells(entry: dict[str, Any]) -> tuple[str, ...]:
    before = [f"row {each['row']} ({each['since']}-{each['until']})" for each in entry["held_before_by"]]
    left_out = [f"{len(before) - MAX_BEFORE} more"] * (len(before) > MAX_BEFORE)
    last = entry["written_last"]
    is_mine = last is None or last in entry["written_here"]
    return (
        _shown(entry["index"]),
        str(entry["block_id"]),
        _shown(entry["since"]),
        ", ".join([*left_out, *before[-MAX_BEFORE:]]) or "-",
        ", ".join(f"row {each['row']} since {each['since']}" for each in entry["held_now_by"]) or "-",
        ", ".join(_span(each) for each in entry["written_here"]) or "-",
        "-" if last is None else ("" if is_mine else "! ") + f"row {last['row']}, {_span(last)}",
    )


def _span(writing: dict[str, Any]) -> str:
    steps = _range("step", writing["first_step"], writing["last_step"])
    return f"{steps} ({_range('position', writing['first_position'], writing['last_position'])})"


def _range(name: str, first: int, last: int) -> str:
    return f"{name} {first}" if first == last else f"{name}s {first}-{last}"


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)


def _suspicions(row: int, group: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each block that two requests have, and one of them writes."""
    for entry in group["blocks"]:
        name = f"Block {entry['block_id']} of group {group['group']}"
        name += f" (index {entry['index']} of row {row})" if entry["index"] is not None else ""
        for other in entry["written_by_others_meanwhile"]:
            yield (
                f"{name}: another request, in row {other['row']} since step {other['life_began']}, wrote it at "
                f"{_span(other)}, while this row had it, since step {entry['since']}."
            )
        for other in entry["held_now_by"]:
            both = None if entry["since"] is None else max(entry["since"], other["since"])
            written = [each for each in entry["written_here"] if both is not None and each["last_step"] >= both]
            if written:
                yield (
                    f"{name}: row {other['row']} has it too, both since step {both}, and this row wrote it at "
                    f"{', '.join(map(_span, written))}."
                )


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, all to the left."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]
