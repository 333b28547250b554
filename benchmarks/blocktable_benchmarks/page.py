"""The HTML report: the tables, and plots of step times and scaling, in one file. Plots need matplotlib."""

from __future__ import annotations

import base64
import html
import importlib.util
import io
from pathlib import Path
from typing import Any

from blocktable import BlockTableError
from blocktable_benchmarks.cells import Results, Table, is_timed
from blocktable_benchmarks.tables import make_tables, sweep_points
from blocktable_benchmarks.workloads import SWEEPS

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem; color: #1d2430; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; display: block; overflow-x: auto; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #dde2ea; text-align: right; }
th:first-child, td:first-child { text-align: left; }
th { background: #f3f5f9; } img { max-width: 100%; } h2 { font-size: 1.05rem; margin-top: 2rem; }
"""


def require_matplotlib() -> None:
    """Say so before anything is measured.

    Raises:
        BlockTableError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BlockTableError("--report draws its plots with matplotlib; install blocktable[report].")


def write_report(results: Results, path: Path) -> None:
    """Write the report."""
    parts = [f"<style>{STYLE}</style><title>blocktable bench</title><h1>blocktable bench</h1>"]
    parts += [_section("Whole steps", _step_plot(results)), _section("Scaling", _sweep_plot(results))]
    parts += [_table(table) for table in make_tables(results)]
    path.write_text('<!doctype html><meta charset="utf-8">' + "\n".join(part for part in parts if part))


def _section(title: str, picture: str) -> str:
    return f'<h2>{title}</h2><img alt="{title}" src="data:image/svg+xml;base64,{picture}">' if picture else ""


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<h2>{html.escape(table.title)}</h2><table><tr>{head}</tr>{body}</table>"


def _figure(rows: int, columns: int, height: float) -> Any:
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(12, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _encoded(figure: Any) -> str:
    picture = io.BytesIO()
    figure.savefig(picture, format="svg")
    return base64.b64encode(picture.getvalue()).decode()


def _step_plot(results: Results) -> str:
    """Draw, for each workload, a bar for each lane: host time, and the time with a wait after it."""
    lanes = {name: lane["steps"] for name, lane in results["lanes"].items() if is_timed(lane) and lane.get("steps")}
    workloads = list(dict.fromkeys(workload for steps in lanes.values() for workload in steps))
    if not workloads:
        return ""
    figure, axes = _figure(-(-len(workloads) // 2), 2, 2.2 * -(-len(workloads) // 2))
    for place, workload in zip(axes.flat, workloads, strict=False):
        names = [name for name in reversed(lanes) if workload in lanes[name]]
        for key, colour, label in (("waited_us", "#c9d3e6", "with a wait"), ("host_us", "#2f5d9b", "host")):
            place.barh(names, [lanes[name][workload].get(key, 0) for name in names], color=colour, label=label)
        place.set_xscale("log")
        place.set_title(workload, fontsize=9)
        place.set_xlabel("µs a step", fontsize=8)
        place.tick_params(labelsize=8)
    axes[0][0].legend(fontsize=8)
    for place in axes.flat[len(workloads) :]:
        place.set_axis_off()
    return _encoded(figure)


def _sweep_plot(results: Results) -> str:
    """Draw, for each axis, the host's and the GPU's time of a step over it."""
    axes_found = [axis for axis in SWEEPS if any(sweep_points(results, axis).values())]
    if not axes_found:
        return ""
    figure, places = _figure(len(axes_found), 2, 2.6 * len(axes_found))
    for (left, right), axis in zip(places, axes_found, strict=True):
        for name, points in sweep_points(results, axis).items():
            if is_timed(results["lanes"][name]):
                _curve(left, name, points, "host_us")
                _curve(right, name, points, "gpu_us")
        for place, what in ((left, "host"), (right, "GPU")):
            place.set_xscale(
                "symlog" if axis.startswith("share") else "log",
                **({"linthresh": 1 / 64} if axis.startswith("share") else {}),
            )
            place.set_yscale("log")
            place.set_title(f"{what} µs over {axis}", fontsize=9)
            place.tick_params(labelsize=8)
    places[0][0].legend(fontsize=7)
    return _encoded(figure)


def _curve(place: Any, name: str, points: dict[float, dict[str, Any]], key: str) -> None:
    found = sorted((x, point[key]) for x, point in points.items() if point.get(key) is not None)
    if found:
        place.plot(*zip(*found, strict=True), marker=".", label=name)
