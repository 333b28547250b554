"""`blocktable replay`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from blocktable.cli import say, warn
from blocktable.registry import get_backend
from blocktable.replay.arguments import command_line, given_options, make_parser
from blocktable.replay.lane import Lane
from blocktable.replay.options import ReplayOptions
from blocktable.replay.progress import make_progress
from blocktable.replay.readers import OnBadLine, read_trace
from blocktable.replay.run import Replay, ReplayResult, unfit_requests
from blocktable.replay.summary import as_text, summarise
from blocktable.replay.traces import Trace, TraceError

MISMATCHES = 1


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    arguments = make_parser("").parse_args(argv)
    options = ReplayOptions(**given_options(arguments))
    options.config()  # a wrong option is said before a long file is read
    backends = [(name, get_backend(name)) for name in arguments.backend or ["numpy"]]
    trace = _fitting(_read(arguments), options, arguments.on_bad_line)
    lanes = [Lane(name, backend, options.config(), arguments.device) for name, backend in backends]
    for note in trace.notes:
        warn(note)
    result = _run(trace, options, lanes, arguments)
    say(as_text(summarise(result, command_line(argv))))
    return _status(result)


def _read(arguments: argparse.Namespace) -> Trace:
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


def _run(trace: Trace, options: ReplayOptions, lanes: list[Lane], arguments: argparse.Namespace) -> ReplayResult:
    progress = make_progress(len(trace), is_quiet=arguments.quiet)
    try:
        return Replay(trace, options, lanes).run(progress, arguments.max_steps)
    finally:
        progress.close()


def _status(result: ReplayResult) -> int:
    return MISMATCHES if result.num_mismatches else 0
