"""`blocktable replay`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from blocktable import BlockTableConfig, get_backend
from blocktable.cli import INTERRUPTED, UsageError, say, write_file
from blocktable_replay.arguments import given_options, make_parser
from blocktable_replay.btrace import RecordingError, is_recording
from blocktable_replay.lane import Lane
from blocktable_replay.options import ReplayOptions, as_pairs
from blocktable_replay.player import Player
from blocktable_replay.progress import make_progress
from blocktable_replay.ranks import Ranks
from blocktable_replay.readers import OnBadLine, read_trace
from blocktable_replay.recorded import Recording
from blocktable_replay.recording import Recorder
from blocktable_replay.result import ReplayResult
from blocktable_replay.run import Replay, unfit_requests
from blocktable_replay.summary import as_text, has_failed, summarise
from blocktable_replay.synthetic import EXERCISE, SHIPPED
from blocktable_replay.traces import Trace, TraceError

MISMATCHES = 1

NOT_FOR_RECORDINGS = ("limit", "start", "stop", "record", "ranks")


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    arguments = make_parser(_exercise_in_words()).parse_args(argv)
    says_all = arguments.ranks is None or os.environ.get("RANK", "0") == "0"
    if not says_all:  # files and progress are those of rank 0
        arguments.report = arguments.json = arguments.record = None
        arguments.quiet = True
    _check_files(arguments)
    write_page = _page_writer(arguments)
    if arguments.trace is not None and is_recording(Path(arguments.trace)):
        result = _replay_recording(arguments)
    else:
        result = _replay_trace(arguments)
    summary = summarise(result, shlex.join(["blocktable", "replay", *argv]))
    if says_all or result.num_mismatches:
        say(as_text(summary))
    if arguments.json is not None:
        write_file(arguments.json, json.dumps(summary, indent=2) + "\n")
    if write_page is not None:
        write_file(arguments.report, write_page(summary, result))
    return MISMATCHES if has_failed(summary) else INTERRUPTED if result.was_interrupted else 0


def _exercise_in_words() -> str:
    """Return the options that hold without TRACE as one would type them."""
    plain = ReplayOptions()
    words = [f"--group {as_pairs(group)}" for group in EXERCISE.groups]
    for field in dataclasses.fields(ReplayOptions):
        value = getattr(EXERCISE, field.name)
        if field.name != "groups" and value != getattr(plain, field.name):
            words.append(f"--{field.name.replace('_', '-')} {value}")
    return "\n  ".join(words)


def _check_files(arguments: argparse.Namespace) -> None:
    """Refuse to write two files into one, or into the one that is read."""
    files: dict[Path, str] = {}
    for name in ("trace", "record", "json", "report"):
        if (path := getattr(arguments, name)) is not None:
            place, option = Path(path).resolve(), name.upper() if name == "trace" else f"--{name}"
            if place in files and (place.is_file() or not place.exists()):
                raise UsageError(f"{files[place]} and {option} are one file, {path}; give each a file of its own.")
            files[place] = option


def _page_writer(arguments: argparse.Namespace) -> Callable[[dict[str, Any], ReplayResult], str] | None:
    """Return what makes the page, or None; a missing library is said before the work, not after it."""
    if arguments.report is None:
        return None
    try:
        from blocktable_replay.page import make_page
    except ImportError as error:
        raise UsageError(
            f'--report needs matplotlib ({error}); install it with: pip install "blocktable[report]".'
        ) from None
    return make_page


def _lanes(arguments: argparse.Namespace, config: BlockTableConfig) -> list[Lane]:
    backends = [(name, get_backend(name)) for name in arguments.backend or ["numpy"]]
    return [Lane(name, backend, config, arguments.device) for name, backend in backends]


def _checker(arguments: argparse.Namespace, config: BlockTableConfig) -> Lane | None:
    return None if arguments.check == "off" else Lane("checker", get_backend("numpy"), config, check="host")


# A trace.


def _replay_trace(arguments: argparse.Namespace) -> ReplayResult:
    defaults = EXERCISE if arguments.trace is None else ReplayOptions()
    given = given_options(arguments)
    if "num_blocks" in given and "groups" not in given:  # those of the default groups give way
        given["groups"] = tuple(dataclasses.replace(group, num_blocks=None) for group in defaults.groups)
    ranks = None if arguments.ranks is None else Ranks(arguments.ranks)
    if ranks is not None:
        given["context_parallel"] = ranks.share(given.get("context_parallel", defaults.context_parallel))
    options = dataclasses.replace(defaults, **given)
    config = options.config()  # a wrong option is said before a long file is read
    if ranks is not None:
        ranks.require_sharded(config)
    lanes = _lanes(arguments, config)
    trace = _fitting(_read(arguments), options, arguments.on_bad_line)
    progress = make_progress(len(trace), "requests", is_quiet=arguments.quiet)
    try:
        path, checker = arguments.record, _checker(arguments, config)
        with nullcontext() if path is None else Recorder(lanes[0].table, path) as recorder:
            result = Replay(trace, options, lanes, recorder, checker, ranks).run(progress, arguments.max_steps)
    finally:
        progress.close()
    if ranks is not None:
        ranks.close()
        result.notes.append(ranks.note())
    return result


def _read(arguments: argparse.Namespace) -> Trace:
    if arguments.trace is None:
        trace = dataclasses.replace(read_trace(SHIPPED), source="the synthetic trace")
    else:
        trace = read_trace(arguments.trace, on_bad_line=arguments.on_bad_line)
    part = trace.between(arguments.start, arguments.stop, arguments.limit)
    if not len(part):
        raise TraceError(
            f"{trace.source}: no request lies in the part that --from, --until and --limit choose; the trace has "
            f"{len(trace)} requests in {trace.arrivals[-1] / 1000:.0f} s."
        )
    return part


def _fitting(trace: Trace, options: ReplayOptions, on_bad_line: OnBadLine) -> Trace:
    """Return the trace without the requests that do not fit, or raise for the first of them."""
    wrong = unfit_requests(trace, options)
    if not wrong:
        return trace
    first = min(wrong)
    if on_bad_line == "stop":
        raise TraceError(
            f"{trace.source}:{trace.lines[first]}: {wrong[first]}. Raise --max-model-len or --num-blocks, or pass "
            "--on-bad-line skip to count such requests and go on."
        )
    kept = trace.without(wrong)
    if not len(kept):
        raise TraceError(f"{trace.source}: no request fits; the first is line {trace.lines[first]}: {wrong[first]}.")
    return kept


# A recording.


def _replay_recording(arguments: argparse.Namespace) -> ReplayResult:
    useless = [
        *given_options(arguments),
        *(name for name in NOT_FOR_RECORDINGS if getattr(arguments, name) is not None),
    ]
    if useless:
        names = ", ".join(name.replace("_", "-") for name in useless)
        raise UsageError(
            f"{arguments.trace} is a recording, which says its own table and steps; leave out what would set {names}."
        )
    recording = Recording(Path(arguments.trace))
    lanes = _lanes(arguments, recording.config)
    progress = make_progress(None, "steps", is_quiet=arguments.quiet)
    try:
        result = Player(recording, lanes, _checker(arguments, recording.config)).run(progress, arguments.max_steps)
    finally:
        progress.close()
    if not (result.counters["steps"] or result.was_interrupted):
        reason = f": {recording.tear}" if recording.tear else ""
        raise RecordingError(f"{recording.path}: the recording holds no step{reason}.")
    return result
