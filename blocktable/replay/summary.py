"""The numbers of a replay: as data for `--json` and the page, as a table for the terminal."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from blocktable import __version__
from blocktable.replay.lane import Lane
from blocktable.replay.run import ReplayResult

SCHEMA_VERSION = 1
"""Of `--json`; docs/replay.md describes it."""

SIDE_BY_SIDE = (
    "mismatches",
    "host_us_p50",
    "host_us_p99",
    "bytes_sent_per_step_mean",
    "bytes_sent_per_step_p99",
    "slot_digest",
)


def summarise(result: ReplayResult, command: str) -> dict[str, Any]:
    """Return everything a reader may want to know, ready for JSON.

    Args:
        command: the command line.
    """
    series, trace = result.series, result.trace
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "versions": versions(),
        "trace": {
            "source": trace.source,
            "format": trace.format,
            "requests": len(trace),
            "bad_lines": len(trace.bad_lines),
            "is_whole": result.is_whole,
        },
        "options": describe_options(result),
        "schedule": dict(result.counters.items())
        | {
            "blocks": result.num_blocks,
            "blocks_used_peak": max(series.blocks_used, default=0),
            "blocks_shared_peak": max(series.blocks_shared, default=0),
            "batch_size_peak": max(series.num_reqs, default=0),
            "tokens_per_step_mean": _mean(series.num_tokens),
            "full_copy_bytes_per_step_mean": _mean(series.full_copy_bytes),
            "simulated_seconds": series.clock_s[-1] if series.clock_s else 0.0,
        },
        "broken_invariants": {"count": result.broken.count, "shown": result.broken.shown},
        "backends": [_lane(lane) for lane in result.lanes],
        "mismatches": result.num_mismatches,
        "wall_seconds": round(result.wall_s, 3),
    }


def _lane(lane: Lane) -> dict[str, Any]:
    return {
        "name": lane.name,
        "description": lane.description,
        "mismatches": lane.findings.count,
        "shown": lane.findings.shown,
        "host_us_p50": _percentile(lane.host_us, 50),
        "host_us_p99": _percentile(lane.host_us, 99),
        "bytes_sent_per_step_mean": _mean(lane.bytes_sent),
        "bytes_sent_per_step_p99": _percentile(lane.bytes_sent, 99),
        "slot_digest": f"{lane.digest:016x}",
    }


def versions() -> dict[str, str]:
    """Return the versions that a number depends on."""
    return {"blocktable": __version__, "python": platform.python_version(), "numpy": np.__version__}


def describe_options(result: ReplayResult) -> dict[str, Any]:
    """Return the options in force, defaults filled in."""
    options, config = result.options, result.options.config()
    shard = options.context_parallel
    return {
        "groups": [describe_group(group) for group in config.groups],
        "max_num_reqs": options.max_num_reqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_model_len": options.max_model_len,
        "context_parallel": f"world_size={shard.world_size},rank={shard.rank},interleave_size={shard.interleave_size}",
        "rows": options.rows,
        "step_ms": options.step_ms,
        "all_at_once": options.all_at_once,
        "lookahead": options.lookahead,
        "share_prefixes": options.share_prefixes,
        "fork_every": options.fork_every,
        "sleep_every": options.sleep_every,
        "dummy_every": options.dummy_every,
    }


def describe_group(group: Any) -> str:
    """Return a group as `--group` takes it."""
    return ",".join(
        f"{field.name}={str(value).lower() if isinstance(value, bool) else value}"
        for field in fields(group)
        if (value := getattr(group, field.name)) != field.default
    )


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 1) if len(values) else 0.0


def _percentile(values: Sequence[float], percent: float) -> float:
    return round(float(np.percentile(values, percent)), 1) if len(values) else 0.0


def as_text(summary: dict[str, Any]) -> str:
    """Return the summary for the terminal: the schedule, the backends side by side, what is wrong, a verdict."""
    trace, schedule = summary["trace"], summary["schedule"]
    lines = [f"{trace['source']} ({trace['format']}, {trace['requests']:,} requests)"]
    if trace["bad_lines"]:
        lines.append(f"{trace['bad_lines']:,} bad lines skipped")
    if not trace["is_whole"]:
        lines.append(f"ended after {schedule['steps']:,} steps, before the trace did")
    lines += [
        "",
        *_columns([("schedule", [""]), *((_label(name), [_shown(value)]) for name, value in schedule.items())]),
    ]
    rows = [("backend", [lane["name"] for lane in summary["backends"]])]
    rows += [(_label(name), [_shown(lane[name]) for lane in summary["backends"]]) for name in SIDE_BY_SIDE]
    lines += ["", *_columns(rows), ""]
    for lane in summary["backends"]:
        lines += [f"{lane['description']}: {sentence}" for sentence in lane["shown"]]
    lines += [f"schedule: {sentence}" for sentence in summary["broken_invariants"]["shown"]]
    return "\n".join([*lines, verdict(summary)])


def verdict(summary: dict[str, Any]) -> str:
    """Return the last line: what was proved, or how much is wrong."""
    steps, wall = summary["schedule"]["steps"], summary["wall_seconds"]
    names = ", ".join(lane["description"] for lane in summary["backends"])
    if summary["mismatches"]:
        return f"FAILED: {summary['mismatches']:,} mismatches in {steps:,} steps ({names}, {wall:.1f} s)."
    return f"OK: every slot and every batch table entry of {steps:,} steps is right ({names}, {wall:.1f} s)."


def _label(name: str) -> str:
    return name.replace("_", " ").replace("host us", "host us per step,")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _columns(rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    first = max(len(label) for label, _ in rows)
    widths = [max(len(values[column]) for _, values in rows) for column in range(len(rows[0][1]))]
    return [
        f"{label:<{first}}  " + "  ".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))
        for label, values in rows
    ]
