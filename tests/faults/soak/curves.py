"""Draws curves over time as an SVG picture, one panel below the other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 900, 110, 70, 12, 20, 34
FONT = 'font-family="sans-serif" font-size="12"'
COLOURS = ("#1f6f8b", "#c8553d")


@dataclass(frozen=True)
class Line:
    """Points of (seconds, value) that one line joins. `colour`: 0 or 1."""

    points: Sequence[tuple[float, float]]
    colour: int


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Sequence[Line]


def draw(panels: Sequence[Panel], seconds: float, marks: Sequence[float]) -> str:
    """`marks`: moments that get a tick below each panel."""
    height = TOP + len(panels) * (PANEL + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {FONT}>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, TOP + number * (PANEL + GAP), seconds, marks)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, top: float, seconds: float, marks: Sequence[float]) -> list[str]:
    highest = _round_up(max((value for line in panel.lines for _, value in line.points), default=1.0))
    inner = WIDTH - LEFT - RIGHT

    def x(second: float) -> float:
        return LEFT + inner * second / seconds

    def y(value: float) -> float:
        return top + PANEL * (1 - value / highest)

    parts = [f'<text x="{LEFT}" y="{top - 5}" font-weight="bold">{escape(panel.title)}</text>']
    for value in (0.0, highest / 2, highest):
        parts.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    ticks = "".join(f"M{x(mark):.1f} {top + PANEL}v4" for mark in marks)
    parts.append(f'<path d="{ticks}" stroke="black"/>')
    for line in panel.lines:
        points = " ".join(f"{x(second):.0f},{y(value):.1f}" for second, value in _thinned(line.points, seconds / inner))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[line.colour]}"/>')
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{top + PANEL + 16}" text-anchor="end">{seconds / 60:.0f} minutes</text>'
    )
    return parts


def _thinned(points: Sequence[tuple[float, float]], apart: float) -> list[tuple[float, float]]:
    """The highest point of each pixel, so that no peak is lost."""
    highest: dict[int, tuple[float, float]] = {}
    for second, value in points:
        pixel = int(second / apart)
        if pixel not in highest or value > highest[pixel][1]:
            highest[pixel] = (second, value)
    return list(highest.values())


def _round_up(value: float) -> float:
    """To 1, 2 or 5 and zeros."""
    power = 10 ** math.floor(math.log10(max(value, 1)))
    return next(float(step * power) for step in (1, 2, 5, 10) if step * power >= value)
