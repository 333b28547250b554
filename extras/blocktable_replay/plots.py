"""The plots of the report, as SVG. Needs matplotlib (the `report` extra)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from blocktable_replay.result import ReplayResult, Series

Floats = npt.NDArray[np.float64]

MAX_STRETCHES = 400
"""Stretches of time that a line is drawn in."""

WIDTH_INCHES, HEIGHT_INCHES = 6.0, 2.9

BLUE, ORANGE, GREEN, RED, GREY = "#2a6fbb", "#d9822b", "#3a8f5c", "#b3435a", "#9aa3ad"
LANE_COLOURS = (BLUE, ORANGE, GREEN, RED, "#7a5bb0", "#5d6d7e")
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it is small, can be searched, and takes the page's font
    "svg.hashsalt": "blocktable",  # one run, one file
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "grid.color": "#e6e9ed",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def draw_all(result: ReplayResult) -> list[tuple[str, str, str]]:
    """Return (title, what it shows, SVG) of each plot; there is none before the first step."""
    if not result.series.clock_s:
        return []
    series, unit = result.series, "step" if not result.options else "simulated seconds"
    time = np.asarray(series.clock_s, np.float64)
    num_blocks = sum(group.num_blocks or 0 for group in result.config.groups)
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]  # the stubs know fewer keys than matplotlib has
        return [
            (
                "Blocks in use",
                "Blocks that live requests hold, all groups together; shared ones are held by more than one request.",
                _blocks(time, unit, series, num_blocks),
            ),
            ("Batch", "Requests of a step, and tokens of a step.", _batch(time, unit, series)),
            (
                "Bytes sent",
                "Bytes that a step's commit sends, against what sending every row of the batch whole would cost.",
                _bytes(time, unit, result),
            ),
            (
                "Host time of a step",
                "Row operations, commit, gather and slots, until the call returns: how many took at most so long.",
                _host_time(result),
            ),
        ]


def _figure(rows: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES))
    return figure, list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _blocks(time: Floats, unit: str, series: Series, num_blocks: int) -> str:
    figure, (axes,) = _figure()
    _line(axes, time, series.blocks_used, BLUE, "in use")
    if any(series.blocks_shared):
        _line(axes, time, series.blocks_shared, ORANGE, "shared")
    if num_blocks:
        axes.axhline(num_blocks, color=GREY, linestyle="--", label="cache")
    axes.set(xlabel=unit, ylabel="blocks", ylim=(0, 1.18 * max(num_blocks, *series.blocks_used)))
    axes.legend(loc="upper right", ncols=3)
    return _svg(figure)


def _batch(time: Floats, unit: str, series: Series) -> str:
    figure, (requests, tokens) = _figure(rows=2)
    _line(requests, time, series.num_reqs, GREEN, "")
    _line(tokens, time, series.num_tokens, BLUE, "")
    requests.set(ylabel="requests", ylim=(0, None))
    tokens.set(xlabel=unit, ylabel="tokens", ylim=(0, None))
    return _svg(figure)


def _bytes(time: Floats, unit: str, result: ReplayResult) -> str:
    figure, (axes,) = _figure()
    _line(axes, time, result.series.full_copy_bytes, GREY, "full copy", has_range=False)
    for lane, colour in zip(result.lanes, _colours(result), strict=True):
        _line(axes, time, lane.bytes_sent, colour, lane.name, has_range=len(result.lanes) == 1)
    axes.set(xlabel=unit, ylabel="bytes a step")
    axes.set_yscale("symlog", linthresh=100.0)
    axes.set_ylim(0, None)
    axes.legend(loc="upper right", ncols=4)
    return _svg(figure)


def _host_time(result: ReplayResult) -> str:
    figure, (axes,) = _figure()
    percent = np.concatenate((np.linspace(0, 99, 298), np.linspace(99, 100, 21)[1:]))
    for lane, colour in zip(result.lanes, _colours(result), strict=True):
        p50, p99 = np.percentile(lane.host_us, (50, 99))
        name = f"{lane.description}: p50 {p50:,.0f}, p99 {p99:,.0f}"
        axes.plot(np.percentile(lane.host_us, percent), percent, color=colour, label=name)
        axes.plot([p50, p99], [50, 99], "o", color=colour, markersize=4)
    axes.set_xscale("log")
    axes.set(xlabel="microseconds", ylabel="% of steps", ylim=(0, 101))
    axes.legend(loc="lower right")
    return _svg(figure)


def _colours(result: ReplayResult) -> list[str]:
    return [LANE_COLOURS[index % len(LANE_COLOURS)] for index in range(len(result.lanes))]


def _line(axes: Axes, time: Floats, values: Sequence[float], colour: str, name: str, *, has_range: bool = True) -> None:
    """Draw the mean of a stretch of time over a band from its lowest to its highest step; idle time stays empty."""
    heights = np.asarray(values, np.float64)
    edges = np.linspace(time[0], time[-1] + 1e-9, min(MAX_STRETCHES, time.size) + 1)
    firsts = np.searchsorted(time, edges[:-1])
    sizes = np.diff(firsts, append=time.size)
    is_empty, firsts = sizes == 0, np.minimum(firsts, time.size - 1)
    mean = np.add.reduceat(heights, firsts) / np.maximum(sizes, 1)
    axes.stairs(np.where(is_empty, np.nan, mean), edges, baseline=None, color=colour, label=name, linewidth=1.2)
    if has_range:
        bounds = (np.where(is_empty, np.nan, bound.reduceat(heights, firsts)) for bound in (np.minimum, np.maximum))
        lowest, highest = (np.append(bound, bound[-1]) for bound in bounds)
        axes.fill_between(edges, lowest, highest, step="post", color=colour, alpha=0.22, linewidth=0)
