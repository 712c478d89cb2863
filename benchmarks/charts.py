"""Draws line charts with logarithmic axes as SVG files.

    python benchmarks/charts.py RESULT.json docs/

The first argument is what `benchmarks/scale.py --json` has written. It draws `scale-seconds.svg` and `scale-bytes.svg`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 80, 250, 40, 50
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")

Points = Sequence[tuple[float, float]]


def main() -> None:
    result, folder = Path(sys.argv[1]), Path(sys.argv[2])
    rows = sorted(json.loads(result.read_text())["worlds"], key=lambda row: row["world"])
    seconds = {
        "commit, rank 0": [(row["world"], row["saves"][-1]["cpu_s"]) for row in rows],
        "plan, same layout": [(row["world"], row["load"]["the same layout"]["cpu_s"]) for row in rows],
        "plan, another layout": [(row["world"], row["load"]["another layout"]["cpu_s"]) for row in rows],
    }
    (folder / "scale-seconds.svg").write_text(line_chart("CPU seconds, 100,000 tensors", "ranks", "s", seconds))
    nbytes = {
        "manifest": [(row["world"], row["saves"][-1]["manifest_bytes"]) for row in rows],
        "rank 0's memory in a commit": [(row["world"], row["saves"][-1]["peak_bytes"]) for row in rows],
        "rank 0 receives in a commit": [(row["world"], _received(row)) for row in rows],
        "indexes read, another layout": [(row["world"], row["load"]["another layout"]["index_bytes"]) for row in rows],
        "another rank sends": [(row["world"], row["saves"][-1]["other"]["sent"]) for row in rows],
    }
    (folder / "scale-bytes.svg").write_text(line_chart("Bytes, 100,000 tensors", "ranks", "B", nbytes))


def _received(row: Mapping[str, Any]) -> int:
    return row["saves"][-1]["commit_traffic"]["received"]


def line_chart(title: str, x_name: str, y_name: str, lines: Mapping[str, Points]) -> str:
    """Returns an SVG with one line for each name, on logarithmic axes. Values that are 0 are left out."""
    lines = {name: [(x, y) for x, y in points if x > 0 and y > 0] for name, points in lines.items()}
    xs, ys = ([point[axis] for points in lines.values() for point in points] for axis in (0, 1))
    horizontal = _Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    vertical = _Axis(10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys))), HEIGHT - BOTTOM, TOP)
    parts = [f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>']
    for x in sorted(set(xs)):
        at = horizontal.at(x)
        parts.append(_line((at, TOP), (at, HEIGHT - BOTTOM), "#ddd"))
        parts.append(f'<text x="{at:.0f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:,}</text>')
    for power in range(round(math.log10(vertical.low)), round(math.log10(vertical.high)) + 1):
        at = vertical.at(10.0**power)
        parts.append(_line((LEFT, at), (WIDTH - RIGHT, at), "#ddd"))
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.0f}" text-anchor="end">{_told(power)}{y_name}</text>')
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(horizontal.at(x), vertical.at(y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        at = TOP + 14 + 20 * number
        parts.append(_line((WIDTH - RIGHT + 12, at - 4), (WIDTH - RIGHT + 32, at - 4), colour))
        parts.append(f'<text x="{WIDTH - RIGHT + 38}" y="{at}">{escape(name)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 10}" text-anchor="middle">{x_name}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([f'{head} font-size="12">', background, *parts, "</svg>\n"])


class _Axis:
    """Maps values to places on the chart."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self.low, self.high = low, high
        self._first, self._last = first, last

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low) if self.high > self.low else 0.5
        return self._first + share * (self._last - self._first)


def _line(start: tuple[float, float], end: tuple[float, float], colour: str) -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="1.5"/>'


def _told(power: int) -> str:
    """Returns a power of ten with the letter of the unit, such as "10 k"."""
    if power < 0:
        return f"{10.0**power:.{-power}f} "
    letters = ("", "k", "M", "G", "T")
    return f"{10 ** (power % 3)} {letters[power // 3]}"


if __name__ == "__main__":
    main()
