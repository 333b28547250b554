"""The numbers of a replay: as data for `--json` and the page, as a table for the terminal."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np

from blocktable_replay.lane import Lane
from blocktable_replay.options import as_pairs
from blocktable_replay.result import ReplayResult

SCHEMA_VERSION = 1
"""Of `--json`; docs/replay.md describes it."""

SIDE_BY_SIDE = (
    "mismatches",
    "host_us_p50",
    "host_us_p99",
    "bytes_sent_per_step_mean",
    "bytes_sent_per_step_p99",
    "slot_digest",
    "output_digest",
)


def summarise(result: ReplayResult, command: str) -> dict[str, Any]:
    """Return everything a reader may want to know, ready for JSON.

    Args:
        command: the command line.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "versions": versions(),
        "trace": result.source | {"is_whole": result.is_whole},
        "options": result.options,
        "config": _config(result),
        "schedule": result.counters | _peaks(result),
        "backends": [_lane(lane) for lane in result.lanes],
        "broken_invariants": {"count": result.broken.count, "shown": result.broken.shown},
        "mismatches": result.num_mismatches,
        "notes": result.notes,
        "wall_seconds": round(result.wall_s, 3),
    }


def versions() -> dict[str, str]:
    """Return the versions that a number depends on."""
    return {
        "blocktable": importlib.metadata.version("blocktable"),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _config(result: ReplayResult) -> dict[str, Any]:
    config = result.config
    return {
        "groups": [as_pairs(group) for group in config.groups],
        "widths": list(config.arena.widths),
        "max_num_reqs": config.max_num_reqs,
        "num_rows": config.num_rows,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": config.max_model_len,
        "lookahead_tokens": config.lookahead_tokens,
        "context_parallel": as_pairs(config.context_parallel) or "none",
        "fingerprint": config.fingerprint(),
    }


def _peaks(result: ReplayResult) -> dict[str, float]:
    series = result.series
    return {
        "blocks": sum(group.num_blocks or 0 for group in result.config.groups),
        "blocks_used_peak": max(series.blocks_used, default=0),
        "blocks_shared_peak": max(series.blocks_shared, default=0),
        "batch_size_peak": max(series.num_reqs, default=0),
        "batch_size_mean": _mean(series.num_reqs),
        "tokens_per_step_mean": _mean(series.num_tokens),
        "full_copy_bytes_per_step_mean": _mean(series.full_copy_bytes),
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
        "slot_digest": f"{lane.slot_digest:016x}" if lane.slot_digest else None,
        "output_digest": lane.output_digest.hex() or None,
    }


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 1) if len(values) else 0.0


def _percentile(values: Sequence[float], percent: float) -> float:
    return round(float(np.percentile(values, percent)), 1) if len(values) else 0.0


def as_text(summary: dict[str, Any]) -> str:
    """Return the summary for the terminal: the schedule, the backends side by side, what is wrong, a verdict."""
    schedule = [("schedule", [""]), *((label(name), [shown(value)]) for name, value in summary["schedule"].items())]
    backends = side_by_side(summary)
    lines = [headline(summary), *summary["notes"], "", *_columns(schedule), "", *_columns(backends), ""]
    return "\n".join([*lines, *findings(summary), verdict(summary)])


def findings(summary: dict[str, Any]) -> list[str]:
    """Return what is wrong, in sentences."""
    sentences = [f"{lane['description']}: {sentence}" for lane in summary["backends"] for sentence in lane["shown"]]
    return sentences + [f"schedule: {sentence}" for sentence in summary["broken_invariants"]["shown"]]


def headline(summary: dict[str, Any]) -> str:
    """Return what was replayed, in a line."""
    trace, steps = summary["trace"], summary["schedule"]["steps"]
    facts = [str(trace["format"])]
    if "requests" in trace:
        facts.append(f"{trace['requests']:,} requests")
    if trace.get("bad_lines"):
        facts.append(f"{trace['bad_lines']:,} bad lines skipped")
    if not trace["is_whole"]:
        facts.append(f"ended after {steps:,} steps, before it was over")
    return f"{trace['source']} ({', '.join(facts)})"


def side_by_side(summary: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Return what differs between backends: a label, and a value for each; rows that nobody filled are left out."""
    lanes = summary["backends"]
    rows = [("backend", [lane["name"] for lane in lanes])]
    return rows + [
        (label(name), [shown(lane[name]) for lane in lanes])
        for name in SIDE_BY_SIDE
        if any(lane[name] is not None for lane in lanes)
    ]


def verdict(summary: dict[str, Any]) -> str:
    """Return the last line: what was proved, or how much is wrong."""
    steps, wall = summary["schedule"]["steps"], summary["wall_seconds"]
    names = ", ".join(lane["description"] for lane in summary["backends"])
    if summary["mismatches"]:
        return f"FAILED: {summary['mismatches']:,} mismatches in {steps:,} steps ({names}, {wall:.1f} s)."
    return f"OK: every slot and every batch table entry of {steps:,} steps is right ({names}, {wall:.1f} s)."


def label(name: str) -> str:
    """Return a field's name in words."""
    return name.replace("_", " ").replace("host us", "host us per step,")


def shown(value: Any) -> str:
    """Return a value as people read it."""
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)


def _columns(rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    first = max(len(name) for name, _ in rows)
    widths = [max(len(values[column]) for _, values in rows) for column in range(len(rows[0][1]))]
    return [
        f"{name:<{first}}  " + "  ".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))
        for name, values in rows
    ]
