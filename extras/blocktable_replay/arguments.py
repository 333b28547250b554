"""The arguments of `blocktable replay`, and what their words mean."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

from blocktable import ConfigError, ContextParallel, KVCacheGroup
from blocktable.cli import Parser
from blocktable_replay.options import ReplayOptions

EPILOG = """\
Without TRACE a small synthetic one is replayed that comes with the package, under options that make every feature
happen; options that you give replace these one by one:
  %s

examples:
  blocktable replay
  blocktable replay AzureLLMInferenceTrace_code.csv --rows dense --all-at-once
  blocktable replay conversation_trace.jsonl.gz --until 30m --group block_size=16 \\
      --group block_size=64,kernel_block_size=16,sliding_window=4096 --report report.html
  blocktable replay trace.csv --context-parallel world_size=4,rank=1,interleave_size=16

Exit status: 0 when every entry was right, 1 when one was not, 2 for a wrong call or a trace that cannot be read.
"""


def make_parser(exercise: str) -> Parser:
    """Return the parser.

    Args:
        exercise: the options that hold without TRACE, in words.
    """
    parser = Parser(
        prog="blocktable replay",
        description="Drive a block table with a serving trace, as an engine's continuous batching would, and compare "
        "every entry of every step with an independent statement of the contract.",
        epilog=EPILOG % exercise,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="Azure CSV, BurstGPT CSV, Mooncake JSONL (plain, gzip or zstd), or a recording (.btrace)",
    )
    _add_backends(parser)
    _add_table(parser)
    _add_schedule(parser)
    _add_trace(parser)
    _add_output(parser)
    return parser


def _add_backends(parser: Parser) -> None:
    group = parser.add_argument_group("backends")
    group.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help="a backend, or package.module:Class of one that is not installed; several stand side by side "
        "(default: numpy)",
    )
    group.add_argument("--device", metavar="DEVICE", help="what the backends call a device (default: theirs)")


def _add_table(parser: Parser) -> None:
    group = parser.add_argument_group("table")
    group.add_argument(
        "--group",
        action="append",
        type=_argument(parse_group),
        metavar="KEY=VALUE,...",
        help="a KV cache group, such as block_size=64,kernel_block_size=16,sliding_window=4096; repeat it for several "
        f"(keys: {', '.join(_fields(KVCacheGroup))}; default: block_size=16)",
    )
    group.add_argument(
        "--context-parallel",
        type=_argument(parse_context_parallel),
        metavar="KEY=VALUE,...",
        help="which rank of how many this is, such as world_size=4,rank=1,interleave_size=16",
    )
    group.add_argument(
        "--num-blocks",
        type=_count,
        metavar="N",
        help="blocks of each group's cache (default: enough for 524288 tokens)",
    )
    group.add_argument(
        "--null-block-id",
        type=int,
        metavar="N",
        help="the block of each group that stands for none; -1: there is none, and block 0 is given out (default: 0)",
    )
    group.add_argument(
        "--pad-slot-id", type=int, metavar="N", help="slot of a token that must not be written (default: -1)"
    )
    group.add_argument("--max-num-reqs", type=_count, metavar="N", help="requests of a batch (default: 256)")
    group.add_argument("--max-num-rows", type=_count, metavar="N", help="rows of the table (default: --max-num-reqs)")
    group.add_argument(
        "--max-num-batched-tokens", type=_count, metavar="N", help="token budget of a step (default: 8192)"
    )
    group.add_argument(
        "--max-model-len", type=_count, metavar="N", help="tokens of the longest request (default: 131072)"
    )
    group.add_argument(
        "--rows",
        choices=("stable", "dense"),
        help="stable: rows never move, idx_mapping names them; dense: rows move up, idx_mapping is None "
        "(default: stable)",
    )


def _add_schedule(parser: Parser) -> None:
    group = parser.add_argument_group("schedule")
    group.add_argument(
        "--step-ms", type=_positive, metavar="MS", help="what a step takes on the simulated clock (default: 30)"
    )
    group.add_argument("--all-at-once", action="store_true", default=None, help="let every request arrive at once")
    group.add_argument(
        "--lookahead",
        type=_count_or_none,
        metavar="N",
        help="draft tokens of a decode step; rejected ones roll back (default: 0)",
    )
    group.add_argument(
        "--no-prefix-sharing",
        dest="share_prefixes",
        action="store_false",
        default=None,
        help="ignore the hashes of a trace that has them",
    )
    for name, what in (
        ("fork", "every N-th request forks into two samples"),
        ("sleep", "every N-th step the device loses its memory, and gets all of it again"),
        ("dummy", "every N-th step is a dummy step"),
    ):
        group.add_argument(f"--{name}-every", type=_count_or_none, metavar="N", help=f"{what} (default: 0, never)")


def _add_trace(parser: Parser) -> None:
    group = parser.add_argument_group("part of the trace")
    group.add_argument("--limit", type=_count, metavar="N", help="the first N requests")
    group.add_argument("--max-steps", type=_count, metavar="N", help="end after N steps")
    group.add_argument(
        "--from",
        dest="start",
        type=_duration,
        metavar="TIME",
        help="requests from this time of the trace on (90, 90s, 5m, 1h)",
    )
    group.add_argument(
        "--until", dest="stop", type=_duration, metavar="TIME", help="requests before this time of the trace"
    )
    group.add_argument(
        "--on-bad-line",
        choices=("stop", "skip"),
        default="stop",
        help="skip: count lines that give no request (default: stop)",
    )


def _add_output(parser: Parser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--report", metavar="FILE", help="write a page with plots (HTML, all in one file)")
    group.add_argument("--json", metavar="FILE", help="write the numbers as JSON (docs/replay.md describes it)")
    group.add_argument(
        "--record", metavar="FILE", help="write every call of the first backend's table, to replay it again (.btrace)"
    )
    group.add_argument("--quiet", action="store_true", help="no progress")


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `ReplayOptions` that the command line says."""
    values = vars(arguments)
    given = {
        field.name: values[field.name]
        for field in dataclasses.fields(ReplayOptions)
        if values.get(field.name) is not None
    }
    if arguments.group:
        given["groups"] = tuple(arguments.group)
    return given


def parse_group(text: str) -> KVCacheGroup:
    """Return the group that `block_size=64,sliding_window=4096` and the like describe."""
    return KVCacheGroup(**_pairs(KVCacheGroup, text))


def parse_context_parallel(text: str) -> ContextParallel:
    """Return what `world_size=4,rank=1,interleave_size=16` and the like describe."""
    return ContextParallel(**_pairs(ContextParallel, text))


def _fields(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _pairs(kind: type[Any], text: str) -> dict[str, Any]:
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or name not in hints:
            raise ConfigError(f"{pair!r} is no KEY=VALUE of {kind.__name__}; its keys are {', '.join(_fields(kind))}.")
        if name in values:
            raise ConfigError(f"{name} is said twice in {text!r}.")
        values[name] = _value(name, value, hints[name])
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        raise ConfigError(f"{text!r} must say {', '.join(missing)}.")
    return values


def _value(name: str, text: str, hint: Any) -> Any:
    kinds = getattr(hint, "__args__", (hint,))
    if bool in kinds:
        if text.lower() not in {"true", "false"}:
            raise ConfigError(f"{name} must be true or false, got {text!r}.")
        return text.lower() == "true"
    if int in kinds:
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"{name} must be a whole number, got {text!r}.") from None
    return text


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse name the option before the sentence."""

    def parse_argument(text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error).rstrip(".")) from error

    return parse_argument


def _count(text: str) -> int:
    return _whole(text, 1)


def _count_or_none(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, minimum: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = minimum - 1
    if not minimum <= number < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {minimum} to 2**31 - 1")
    return number


def _positive(text: str) -> float:
    number = _float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def _duration(text: str) -> float:
    """Return seconds."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number = _float(text[:-1]) * units[text[-1]] if text[-1:] in units else _float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; say seconds, or a number with s, m or h behind it")
    return number


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def command_line(argv: Sequence[str]) -> str:
    """Return the command as a user would type it."""
    return shlex.join(["blocktable", "replay", *argv])
