"""Draw docs/images/step-times.svg: what a step costs the host, over our backends and with vLLM's own tables.

python docs/draw_step_times.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RUN = ROOT / "benchmarks/results/performance_h200_callers.json"
PICTURE = ROOT / "docs/images/step-times.svg"
COMMAND = "python docs/draw_step_times.py"

CASES = ("256 requests, 1 group", "256 requests, 8 groups")
KEYS = {"backend": "single", "peer": "steady"}
"""Kind of lane -> the figure that is drawn: both make one call for each request that grows, then the step."""

WIDTH, LABEL, VALUE, BAR, GAP, HEAD = 720, 130, 60, 16, 7, 34
COLOURS = {"backend": "#3f51b5", "peer": "#b0b7c3"}


def times(run: dict[str, Any], case: str) -> dict[str, tuple[str, float]]:
    """Return lane -> kind, microseconds of a step: our GPU backends, then the engines' tables."""
    return {
        name: (lane["kind"], lane["callers"][f"{case}: {KEYS[lane['kind']]}"]["host_us"])
        for name, lane in run["lanes"].items()
        if name != "numpy" and lane["kind"] in KEYS
    }


def panel(run: dict[str, Any], case: str, top: int) -> list[str]:
    """Draw one case: a bar for each lane, on a scale of its own that begins at 0."""
    found = times(run, case)
    scale = (WIDTH - LABEL - VALUE) / max(time for _, time in found.values())
    lines = [f'<text x="0" y="{top + 16}" font-weight="600">{case}: host us of a step</text>']
    for index, (name, (kind, time)) in enumerate(found.items()):
        y = top + HEAD + index * (BAR + GAP)
        ours = f"blocktable, {name}" if kind == "backend" else name
        lines += [
            f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end">{ours}</text>',
            f'<rect x="{LABEL}" y="{y}" width="{max(1, time * scale):.1f}" height="{BAR}" fill="{COLOURS[kind]}"/>',
            f'<text x="{LABEL + max(1, time * scale) + 6:.1f}" y="{y + 12}">{time:,.1f}</text>',
        ]
    return lines


def draw(run: dict[str, Any]) -> str:
    """Return the picture."""
    height = HEAD + len(times(run, CASES[0])) * (BAR + GAP) + 16
    total = len(CASES) * height + 22
    source = f"{run['machine']['gpu']}, {run['date']}; drawn by `{COMMAND}` from {RUN.relative_to(ROOT).as_posix()}"
    style = 'font-family="system-ui, sans-serif" font-size="12" fill="#1d2430" role="img"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 -8 {WIDTH + 24} {total + 16}" {style}>',
        f"<title>Host time of a step of 256 requests, of which 16 get a block ({source})</title>",
        f'<rect x="-12" y="-8" width="{WIDTH + 24}" height="{total + 16}" fill="#fff"/>',
    ]
    for index, case in enumerate(CASES):
        parts += panel(run, case, index * height)
    parts += [f'<text x="0" y="{total - 4}" font-size="10" fill="#5c6675">{source}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(json.loads(RUN.read_text())))
    sys.stdout.write(f"{PICTURE} is up to date.\n")
