"""The numbers of a replay: as data for `--json` and the page, as a table for the terminal."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from blocktable import KINDS
from blocktable_replay.lane import Lane
from blocktable_replay.options import as_pairs
from blocktable_replay.result import ReplayResult

SCHEMA_VERSION = 1
"""Of `--json`; docs/replay.md describes it."""

MAX_WIDTH = 40
"""Characters of a table's last column, beyond which it is sentences."""

SIZES = ("max_num_reqs", "num_rows", "max_num_batched_tokens", "max_model_len", "lookahead_tokens")
FINDING_COLUMNS = ("step", "group", "row", "position", "block_id", "message")
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
        "versions": {
            "blocktable": importlib.metadata.version("blocktable"),
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "trace": result.source | {"is_whole": result.is_whole},
        "options": result.options,
        "config": _config(result),
        "schedule": result.counters | _peaks(result),
        "backends": [_lane(lane) for lane in result.lanes],
        "findings": _engine(result),
        "broken_invariants": {"count": result.broken.count, "shown": result.broken.shown},
        "mismatches": result.num_mismatches,
        "notes": result.notes,
        "wall_seconds": round(result.wall_s, 3),
    }


def _config(result: ReplayResult) -> dict[str, Any]:
    config = result.config
    return {
        "groups": [as_pairs(group) for group in config.groups],
        "widths": list(config.arena.widths),
        **{name: getattr(config, name) for name in SIZES},
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
        "slot_digest": lane.slot_digest.hex() or None,
        "output_digest": lane.output_digest.hex() or None,
    }


def _engine(result: ReplayResult) -> dict[str, Any] | None:
    """Return the mistakes of the engine's; None where nothing looked for them."""
    if result.checker is None:
        return None
    by_kind = result.checker.num_engine_findings
    return {
        "count": by_kind.total(),
        "raised": sum(count for kind, count in by_kind.items() if KINDS[kind] == "raise"),
        "by_kind": dict(sorted(by_kind.items())),
        "shown": [asdict(finding) for finding in result.checker.engine_findings],
    }


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 1) if len(values) else 0.0


def _percentile(values: Sequence[float], percent: float) -> float:
    return round(float(np.percentile(values, percent)), 1) if len(values) else 0.0


def as_text(summary: dict[str, Any]) -> str:
    """Return the summary for the terminal: the schedule, the backends side by side, what is wrong, a verdict."""
    schedule = [("schedule", [""]), *((label(name), [shown(value)]) for name, value in summary["schedule"].items())]
    backends, engine = side_by_side(summary), finding_rows(summary)
    lines = [headline(summary), *summary["notes"], "", *columns(schedule), "", *columns(backends), ""]
    return "\n".join([*lines, *columns(engine), *[""] * bool(engine), *wrong_entries(summary), verdict(summary)])


def wrong_entries(summary: dict[str, Any]) -> list[str]:
    """Return what the backends, or the schedule, got wrong, in sentences."""
    sentences = [f"{lane['description']}: {sentence}" for lane in summary["backends"] for sentence in lane["shown"]]
    return sentences + [f"schedule: {sentence}" for sentence in summary["broken_invariants"]["shown"]]


def finding_rows(summary: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the engine's mistakes as the rows of a table, its head first; none where there are none."""
    if not summary["findings"] or not summary["findings"]["shown"]:
        return []
    found = summary["findings"]["shown"]
    return [("finding", [name.removesuffix("_id") for name in FINDING_COLUMNS])] + [
        (entry["kind"], [shown(entry[name]) for name in FINDING_COLUMNS]) for entry in found
    ]


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
    """Return what differs between backends: a label, and a value for each; rows without a value are left out."""
    lanes = summary["backends"]
    rows = [("backend", [lane["name"] for lane in lanes])]
    return rows + [
        (label(name), [shown(lane[name]) for lane in lanes])
        for name in SIDE_BY_SIDE
        if any(lane[name] is not None for lane in lanes)
    ]


def verdict(summary: dict[str, Any]) -> str:
    """Return the last line: what was proved, or how much is wrong."""
    steps, wall, engine = summary["schedule"]["steps"], summary["wall_seconds"], summary["findings"]
    names = ", ".join(lane["description"] for lane in summary["backends"])
    wrong = [f"{summary['mismatches']:,} mismatches"] * bool(summary["mismatches"])
    if engine and engine["count"]:
        wrong.append(f"{engine['count']:,} findings of the engine, {engine['raised']:,} of severity raise")
    if has_failed(summary):
        return f"FAILED: {' and '.join(wrong)} in {steps:,} steps ({names}, {wall:.1f} s)."
    right = f"every slot and every batch table entry of {steps:,} steps is right ({names}, {wall:.1f} s)"
    return f"OK: {right}{''.join(f'; {each}' for each in wrong)}."


def has_failed(summary: dict[str, Any]) -> bool:
    """Return whether an entry is wrong, or the engine made a mistake that is raised."""
    return bool(summary["mismatches"] or (summary["findings"] and summary["findings"]["raised"]))


def label(name: str) -> str:
    """Return a field's name in words."""
    return name.replace("_", " ").replace("host us", "host us per step,")


def shown(value: Any) -> str:
    """Return a value as people read it."""
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)


def columns(rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Return the lines of a table: names to the left, values to the right; sentences, which are last, as they are."""
    if not rows:
        return []
    first = max(len(name) for name, _ in rows)
    widths = [max(len(values[column]) for _, values in rows) for column in range(len(rows[0][1]))]
    if widths[-1] > MAX_WIDTH:
        widths[-1] = 0
    return [
        f"{name:<{first}}  " + "  ".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))
        for name, values in rows
    ]
