"""The arguments of `blocktable replay`, and what their words mean."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
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
  torchrun --nproc-per-node 4 -m blocktable replay trace.csv --ranks 4 --context-parallel interleave_size=16

Exit status: 0 when every entry was right, 1 when one was not or the engine made a mistake of severity "raise", 2 for a
wrong call or a trace that cannot be read.
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
    _add_table(parser)
    _add_schedule(parser)
    _add_trace(parser)
    add = parser.add_argument_group("output").add_argument
    add("--report", metavar="FILE", help="write a page with plots (HTML, all in one file)")
    add("--json", metavar="FILE", help="write the numbers as JSON (docs/replay.md describes it)")
    add("--record", metavar="FILE", help="write every call of the first backend's table, to replay it again (.btrace)")
    add("--quiet", action="store_true", help="no progress")
    add(
        "--check",
        choices=("off", "host"),
        default="host",
        help="host: look for mistakes of the engine that makes these calls, too, in a numpy table of its own "
        "(default: host)",
    )
    return parser


def _add_table(parser: Parser) -> None:
    add = parser.add_argument_group("backends").add_argument
    add(
        "--backend",
        action="append",
        metavar="NAME",
        help="a backend, or package.module:Class of one that is not installed; several stand side by side "
        "(default: numpy)",
    )
    add("--device", metavar="DEVICE", help="what the backends call a device (default: theirs)")
    add = parser.add_argument_group("table").add_argument
    add(
        "--group",
        dest="groups",
        action="append",
        type=_described(KVCacheGroup),
        metavar="KEY=VALUE,...",
        help="a KV cache group, such as block_size=64,kernel_block_size=16,sliding_window=4096; repeat it for several "
        f"(keys: {', '.join(_fields(KVCacheGroup))}; default: block_size=16)",
    )
    add(
        "--context-parallel",
        type=_described(ContextParallel),
        metavar="KEY=VALUE,...",
        help="which rank of how many this is, such as world_size=4,rank=1,interleave_size=16",
    )
    add(
        "--ranks",
        type=_COUNT,
        metavar="N",
        help="under torchrun, each process is one of N context-parallel ranks: each token must have one owner among "
        "them",
    )
    for name, kind, what in (
        ("num-blocks", _COUNT, "blocks of each group's cache (default: enough for 524288 tokens)"),
        (
            "null-block-id",
            int,
            "the block of each group that stands for none; -1: there is none, and block 0 is given out (default: 0)",
        ),
        ("pad-slot-id", int, "slot of a token that must not be written (default: -1)"),
        ("max-num-reqs", _COUNT, "requests of a batch (default: 256)"),
        ("max-num-rows", _COUNT, "rows of the table (default: --max-num-reqs)"),
        ("max-num-batched-tokens", _COUNT, "token budget of a step (default: 8192)"),
        ("max-model-len", _COUNT, "tokens of the longest request (default: 131072)"),
    ):
        add(f"--{name}", type=kind, metavar="N", help=what)
    add(
        "--rows",
        choices=("stable", "dense"),
        help="stable: rows never move, idx_mapping names them; dense: rows move up, idx_mapping is None "
        "(default: stable)",
    )


def _add_schedule(parser: Parser) -> None:
    add = parser.add_argument_group("schedule").add_argument
    add("--step-ms", type=_POSITIVE, metavar="MS", help="what a step takes on the simulated clock (default: 30)")
    add("--all-at-once", action="store_true", default=None, help="let every request arrive at the start")
    add(
        "--no-prefix-sharing",
        dest="share_prefixes",
        action="store_false",
        default=None,
        help="ignore the hashes of a trace that has them",
    )
    for name, what in (
        ("lookahead", "draft tokens of a decode step; rejected ones roll back (default: 0)"),
        ("fork-every", "every N-th request forks into two samples (default: 0, never)"),
        ("sleep-every", "every N-th step the device loses its memory, and gets all of it again (default: 0, never)"),
        ("dummy-every", "every N-th step is a dummy step (default: 0, never)"),
    ):
        add(f"--{name}", type=COUNT_OR_NONE, metavar="N", help=what)


def _add_trace(parser: Parser) -> None:
    add = parser.add_argument_group("part of the trace").add_argument
    add("--limit", type=_COUNT, metavar="N", help="the first N requests")
    add("--max-steps", type=_COUNT, metavar="N", help="end after N steps")
    add(
        "--from",
        dest="start",
        type=_TIME,
        metavar="TIME",
        help="requests from this time of the trace on (90, 90s, 5m, 1h)",
    )
    add("--until", dest="stop", type=_TIME, metavar="TIME", help="requests before this time of the trace")
    add(
        "--on-bad-line",
        choices=("stop", "skip"),
        default="stop",
        help="skip: count lines that give no request (default: stop)",
    )


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `ReplayOptions` that the command line says."""
    values = {name: getattr(arguments, name) for name in _fields(ReplayOptions)}
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if value is not None
    }


# What words mean.


def _number(kind: Callable[[str], float], is_right: Callable[[float], bool], what: str) -> Callable[[str], float]:
    """Return what reads a number of an option."""

    def parse(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not is_right(number):
            raise argparse.ArgumentTypeError(f"{text!r} is not a {what}")
        return number

    return parse


def _seconds(text: str) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    return float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text)


_COUNT = _number(int, lambda number: 1 <= number < 2**31, "whole number from 1 to 2**31 - 1")
COUNT_OR_NONE = _number(int, lambda number: 0 <= number < 2**31, "whole number from 0 to 2**31 - 1")
_POSITIVE = _number(float, lambda number: 0 < number < math.inf, "number above 0")
_TIME = _number(
    _seconds,
    lambda number: 0 <= number < math.inf,
    "time; say seconds, or a number with s, m or h after it",
)


def _described(kind: type[Any]) -> Callable[[str], Any]:
    """Return what makes a `kind` of `key=value,...`, such as `block_size=64,sliding_window=4096`."""

    def parse(text: str) -> Any:
        try:
            return kind(**_pairs(kind, text))
        except ConfigError as error:  # argparse names the option before the sentence
            raise argparse.ArgumentTypeError(str(error).rstrip(".")) from error

    return parse


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
