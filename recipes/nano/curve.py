"""Draws a run's log as an SVG: the losses, and how often the head agreed with the trunk by depth.

python curve.py --log work/run/log.jsonl --out training.svg
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, GAP = 420, 260, 60
COLOURS = ("#1b6ca8", "#c2571a", "#2e8540", "#8a4fbf")
Series = list[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """The vertical one, and where the names of the lines begin."""

    title: str
    bottom: float
    top: float
    names: int


def panel(axis: Axis, left: int, lines: dict[str, Series]) -> list[str]:
    """One plot over tokens seen, in millions."""
    end = max(x for series in lines.values() for x, _ in series)

    def place(x: float, y: float) -> tuple[float, float]:
        share = (min(max(y, axis.bottom), axis.top) - axis.bottom) / (axis.top - axis.bottom)
        return round(left + x / end * WIDTH, 1), round(40 + (1 - share) * HEIGHT, 1)

    parts = [f'<text x="{left}" y="22" font-weight="bold">{axis.title}</text>']
    for step in range(5):
        value = axis.bottom + (axis.top - axis.bottom) * step / 4
        x, y = place(0, value)
        parts.append(f'<line x1="{x}" x2="{left + WIDTH}" y1="{y}" y2="{y}" stroke="#9995"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{value:.2g}</text>')
    for tokens in range(0, int(end) + 1, 100):
        parts.append(f'<text x="{place(tokens, 0)[0]}" y="{HEIGHT + 58}" text-anchor="middle">{tokens}</text>')
    for i, (name, series) in enumerate(lines.items()):
        points = " ".join("{},{}".format(*place(*point)) for point in series)
        at, colour = f'x="{left + WIDTH - 4}" y="{axis.names + 16 * i}"', COLOURS[i]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts.append(f'<text {at} text-anchor="end" fill="{colour}">{name}</text>')
    parts.append(f'<text x="{left + WIDTH / 2}" y="{HEIGHT + 76}" text-anchor="middle">million tokens</text>')
    return parts


def draw(entries: list[dict[str, Any]]) -> str:
    def series(entry_name: str) -> Series:
        return [(e["tokens"] / 1e6, e[entry_name]) for e in entries if entry_name in e]

    losses = {
        "training": series("loss"),
        "held-out code": series("heldout-code-loss"),
        "held-out documentation": series("heldout-docs-loss"),
    }
    agree = {f"draft {i}": series(f"heldout-code-agree-{i}") for i in range(1, 5)}
    width = 2 * WIDTH + 3 * GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT + 90}" '
            f'font-family="sans-serif" font-size="12" fill="#888">',
            *panel(Axis("Loss, nats a token", 1, 5, names=56), GAP, losses),
            *panel(Axis("Held-out code: drafts the trunk agrees with", 0.4, 1, names=200), WIDTH + 2 * GAP, agree),
            "</svg>\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(draw([json.loads(line) for line in args.log.read_text().splitlines()]))


if __name__ == "__main__":
    main()
