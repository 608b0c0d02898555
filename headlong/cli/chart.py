"""A line chart as SVG, coloured by the page it stands on: `--ink`, `--grid` and a variable for each line."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 340, 230
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 30, 38
STEPS = (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
MOST_TICKS = 6


@dataclass(frozen=True)
class Point:
    x: int
    y: float
    low: float | None = None  # the band around the line
    high: float | None = None


@dataclass(frozen=True)
class Line:
    name: str
    colour: str  # a CSS variable's name
    points: Sequence[Point]
    dashed: bool = False


@dataclass(frozen=True)
class Axes:
    """What the numbers mean. The vertical axis begins at 0."""

    title: str
    x_label: str
    xs: Sequence[int]
    top: float  # of the vertical axis, at least
    form: str = ".1f"
    mark: float | None = None  # a height that matters, drawn across

    @property
    def step(self) -> float:
        return next((step for step in STEPS if self.top / step <= MOST_TICKS), self.top)

    @property
    def ticks(self) -> list[float]:
        return [place * self.step for place in range(math.ceil(round(self.top / self.step, 6)) + 1)]

    def x(self, value: float) -> float:
        first, last = self.xs[0], self.xs[-1]
        share = (value - first) / (last - first) if last > first else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.ticks[-1] * (HEIGHT - TOP - BOTTOM)


def draw(axes: Axes, lines: Sequence[Line]) -> str:
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(axes.title)}">',
        _text(LEFT, 16, axes.title, "title"),
        *(part for tick in axes.ticks for part in _tick(axes, tick)),
        *(_text(axes.x(x), HEIGHT - BOTTOM + 15, str(x), "tick middle") for x in axes.xs),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, axes.x_label, "tick middle"),
    ]
    if axes.mark is not None:
        parts.append(_across(axes, axes.mark, "mark"))
    parts += [_band(axes, line) for line in lines]
    parts += [part for line in lines for part in _line(axes, line)]
    return "\n".join([*parts, "</svg>"])


def _tick(axes: Axes, tick: float) -> tuple[str, str]:
    return _across(axes, tick, "grid"), _text(LEFT - 6, axes.y(tick) + 4, f"{tick:{axes.form}}", "tick end")


def _across(axes: Axes, height: float, kind: str) -> str:
    y = axes.y(height)
    return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _band(axes: Axes, line: Line) -> str:
    around = [(point.x, point.low, point.high) for point in line.points if point.low is not None]
    if not around:
        return ""
    edge = [(x, high) for x, _, high in around] + [(x, low) for x, low, _ in reversed(around)]
    path = " ".join(f"{axes.x(x):.1f},{axes.y(y or 0.0):.1f}" for x, y in edge)
    return f'<polygon class="band" fill="var({line.colour})" points="{path}"/>'


def _line(axes: Axes, line: Line) -> list[str]:
    places = [(axes.x(point.x), axes.y(point.y)) for point in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashes = ' stroke-dasharray="5 4"' if line.dashed else ""
    parts = [f'<polyline class="line" stroke="var({line.colour})"{dashes} points="{path}"/>']
    for point, (x, y) in zip(line.points, places, strict=True):
        told = escape(f"{line.name}, {axes.x_label} {point.x}: {point.y:{axes.form if '%' in axes.form else '.2f'}}")
        fill = "var(--paper)" if line.dashed else f"var({line.colour})"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{fill}" stroke="var({line.colour})">'
            f"<title>{told}</title></circle>"
        )
    return parts
