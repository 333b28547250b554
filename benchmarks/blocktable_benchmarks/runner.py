"""Runs the lanes one after the other, each in a process of its own, and keeps what they say."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blocktable_benchmarks.machine import describe_machine, package_versions

DEPTH = 4
"""How deep a figure lies in the results: lanes, lane, section, key."""

SCHEMA = 1
KILL_AFTER = 60.0
"""Seconds beyond its time after which a lane that does not answer is ended."""


@dataclass
class Lane:
    """One process.

    Attributes:
        name: as results show it.
        plan: for the worker.
        path: folder to put before every other one a module is imported from.
        environment: what is added to the environment.
    """

    name: str
    plan: dict[str, Any]
    path: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


class Results:
    """What has been measured so far; written after every record, so that nothing is lost with the run.

    Args:
        command: what the user typed.
        path: of the JSON file. None: it is only kept.
    """

    def __init__(self, command: str, path: Path | None) -> None:
        self.path = path
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "command": command,
            "date": time.strftime("%Y-%m-%d"),
            "machine": describe_machine(),
            "versions": package_versions(),
            "lanes": {},
            "errors": [],
            "not_run": [],
        }

    def begin(self, lane: Lane) -> None:
        """Start a lane."""
        if lane.plan["kind"] != "machine":
            self.data["lanes"][lane.name] = {"kind": lane.plan["kind"], "is_quick": lane.plan["is_quick"]}
        self.data["is_quick"] = lane.plan["is_quick"]

    def take(self, lane: Lane, record: dict[str, Any]) -> None:
        """Keep one record."""
        section, key = record["section"], record["key"]
        if "error" in record:
            self.fail(lane, f"{section}: {key}", record["error"], record.get("traceback"))
            return
        if "not_run" in record:
            self.skip(lane, f"{section}: {key}", record["not_run"])
        elif section == "machine":
            self.data["machine"].update(record["value"])
        elif section == "lane":
            self.data["lanes"][lane.name].update(record["value"])
        else:
            self.data["lanes"][lane.name].setdefault(section, {})[key] = record["value"]
        self.write()

    def fail(self, lane: Lane, where: str, error: str, traceback: str | None = None) -> None:
        """Keep a failure."""
        self.data["errors"].append({"lane": lane.name, "where": where, "error": error, "traceback": traceback})
        self.write()

    def skip(self, lane: Lane, where: str, reason: str) -> None:
        """Keep what was not run, which is not a failure."""
        self.data["not_run"].append({"lane": lane.name, "where": where, "reason": reason})
        self.write()

    def write(self) -> None:
        """Write the JSON file, whole or not at all."""
        if self.path is None:
            return
        unfinished = self.path.with_name(self.path.name + ".part")
        unfinished.write_text(as_lines(self.data))
        unfinished.replace(self.path)


def as_lines(results: dict[str, Any]) -> str:
    """Return results as JSON with one line for each figure of a lane, and for each entry of a list."""

    def text(value: Any, depth: int) -> str:
        if not value or depth == DEPTH or not isinstance(value, (dict, list)):
            return json.dumps(value)
        inner = ",\n".join(
            [f"{' ' * depth}{json.dumps(key)}: {text(each, depth + 1)}" for key, each in value.items()]
            if isinstance(value, dict)
            else [f"{' ' * depth}{json.dumps(each)}" for each in value]
        )
        opened, closed = "{}" if isinstance(value, dict) else "[]"
        return f"{opened}\n{inner}\n{closed}"

    return text(results, 0) + "\n"


def merge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first run's results, and what they lack of the later ones'; no figure of the first is replaced.

    Ratios are of one run: the lanes of the first run that has a drop-in also stay as they were, as `drop_in_lanes`, and
    the first run that measured callers as `caller_run`.
    """
    merged, *others = runs
    drop_in_run = next((run for run in runs if any(lane["kind"] == "drop-in" for lane in run["lanes"].values())), None)
    if drop_in_run is not None:
        merged["drop_in_lanes"] = copy.deepcopy(drop_in_run["lanes"])
    caller_run = next((run for run in runs if any("callers" in lane for lane in run["lanes"].values())), None)
    if caller_run is not None:
        merged["caller_run"] = copy.deepcopy({key: caller_run[key] for key in ("lanes", "machine", "command", "date")})
    for other in others:
        merged.setdefault("further_commands", []).append(f"{other['command']} ({other['date']})")
        for name, lane in other["lanes"].items():
            mine = merged["lanes"].setdefault(name, {})
            for section, found in lane.items():
                if isinstance(found, dict):
                    mine[section] = {**found, **mine.get(section, {})}
                else:
                    mine.setdefault(section, found)
        filled = {
            (name, f"{section}: {key}")
            for name, lane in merged["lanes"].items()
            for section, found in lane.items()
            if isinstance(found, dict)
            for key in found
        }
        merged["errors"] += other["errors"]
        merged["not_run"] = [
            entry for entry in [*merged["not_run"], *other["not_run"]] if (entry["lane"], entry["where"]) not in filled
        ]
    return merged


def run_lane(lane: Lane, results: Results, say: Callable[[str], None]) -> None:
    """Run one lane to its end, or to the end of its time."""
    results.begin(lane)
    paths = [lane.path, os.environ.get("PYTHONPATH")]
    environment = {**os.environ, **lane.environment, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    with subprocess.Popen(
        # -P: what lies in the current folder must not stand before what is installed.
        [sys.executable, "-P", "-m", "blocktable_benchmarks.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        guard = threading.Timer(lane.plan["seconds"] + KILL_AFTER, process.kill)
        guard.start()
        try:
            for record in _records(process, lane.plan):
                results.take(lane, record)
                say(_progress(lane, record))
            status = process.wait()
        finally:
            guard.cancel()
            process.kill()
    if status:
        results.fail(lane, "process", f"ended with status {status} before its plan was done")
        say(f"{lane.name}: its process ended with status {status}")


def _records(process: subprocess.Popen[str], plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Hand the plan over, and return the records as they come."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # it ended before it read: its status says so
        process.stdin.write(json.dumps(plan))
        process.stdin.close()
    for line in process.stdout:
        yield json.loads(line)


def _progress(lane: Lane, record: dict[str, Any]) -> str:
    text = record.get("error", record.get("not_run"))
    if text is None:
        value = record["value"]
        text = value.get("absent", "done") if isinstance(value, dict) else "done"
    return f"{lane.name}: {record['section']}: {record['key']}: {text}"
