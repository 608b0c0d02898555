"""Draws a run's log as an SVG: the losses, and how often the head agreed with the trunk by depth.

python curve.py --log work/run/log.jsonl --out training.svg
"""

import argparse
import json
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, GAP = 420, 260, 60
COLOURS = ("#1b6ca8", "#c2571a", "#2e8540", "#8a4fbf")
Series = list[tuple[float, float]]


def panel(title: str, left: int, lines: dict[str, Series], bottom: float, top: float) -> list[str]:
    """One plot over tokens seen, in millions."""
    end = max(x for series in lines.values() for x, _ in series)

    def place(x: float, y: float) -> str:
        share = (min(max(y, bottom), top) - bottom) / (top - bottom)
        return f"{left + x / end * WIDTH:.1f},{40 + (1 - share) * HEIGHT:.1f}"

    parts = [f'<text x="{left}" y="22" font-weight="bold">{title}</text>']
    for step in range(5):
        y = bottom + (top - bottom) * step / 4
        (x1, y1), (x2, _) = (place(x, y).split(",") for x in (0, end))
        parts.append(f'<line x1="{x1}" x2="{x2}" y1="{y1}" y2="{y1}" stroke="#9995"/>')
        parts.append(f'<text x="{left - 6}" y="{float(y1) + 4:.1f}" text-anchor="end">{y:.2g}</text>')
        parts.append(
            f'<text x="{left + WIDTH * step / 4}" y="{HEIGHT + 58}" text-anchor="middle">{end * step / 4:.0f}</text>'
        )
    for i, (name, series) in enumerate(lines.items()):
        points = " ".join(place(x, y) for x, y in series)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[i]}" stroke-width="1.6"/>')
        parts.append(
            f'<text x="{left + WIDTH - 4}" y="{56 + 16 * i}" text-anchor="end" fill="{COLOURS[i]}">{name}</text>'
        )
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
            *panel("Loss, nats a token", GAP, losses, 1.0, 5.0),
            *panel("Held-out code: drafts that agree, those before them right", WIDTH + 2 * GAP, agree, 0.4, 1.0),
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
