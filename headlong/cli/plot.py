"""A bench's result as a picture, drawn by matplotlib where that is installed."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headlong.cli import tables
from headlong.cli.result import Result, about_machine, about_prompts
from headlong.engine.figures import Figures, Section
from headlong.errors import UserError

PANEL = (6.0, 3.8)  # inches
DOTS = 150  # an inch


def check() -> None:
    if find_spec("matplotlib") is None:
        raise UserError("--png needs matplotlib, which is not installed; pip install matplotlib, or use --html.")


def write(result: Result, path: Path) -> None:
    sections = result.report.sections
    figure = import_module("matplotlib.figure").Figure(
        figsize=(2 * PANEL[0], PANEL[1] * len(sections) + 0.7), layout="constrained"
    )
    figure.suptitle(f"headlong bench: {result.model}\n{about_machine(result)}\n{about_prompts(result)}", fontsize=9)
    panels = figure.subplots(len(sections), 2, squeeze=False)
    for section, (left, right) in zip(sections, panels, strict=True):
        _speedups(left, section)
        _kept(right, section)
    figure.savefig(path, format="png", dpi=DOTS)


def _speedups(panel: Any, section: Section) -> None:
    for place, (name, figures) in enumerate(tables.rows(section)):
        measured = [one for one in figures if one.speedup]
        panel.errorbar(
            [one.depth + 0.05 * place for one in measured],  # beside each other, or the bars would hide one another
            [one.gain for one in measured],
            yerr=_bars(measured),
            label=name,
            marker="o",
            markersize=3,
            capsize=2,
            **_look(name),
        )
    predicted = [one for one in section.all if one.predicted is not None]
    panel.plot(
        [one.depth for one in predicted], [one.predicted for one in predicted], "k--", linewidth=1, label="predicted"
    )
    panel.set_xticks([one.depth for one in section.all])
    panel.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    panel.set(title=f"{section.mode.name}: speed-up and quartiles", xlabel="depth", ylim=(0, None))
    panel.legend(fontsize=7)


def _bars(figures: list[Figures]) -> list[list[float]]:
    """Distances down and up from the median."""
    spreads = [one.speedup for one in figures if one.speedup]
    return [[one.value - one.low for one in spreads], [one.high - one.value for one in spreads]]


def _kept(panel: Any, section: Section) -> None:
    for name, figures in tables.rows(section):
        shares = figures[-1].accepted
        panel.plot(range(1, len(shares) + 1), shares, label=name, marker="o", markersize=3, **_look(name))
    depth = section.all[-1].depth
    panel.set(title=f"{section.mode.name}: drafts kept at depth {depth}", xlabel="position", ylim=(0, 1))
    panel.legend(fontsize=7)


def _look(name: str) -> dict[str, object]:
    return {"color": "black", "linewidth": 2} if name == "all" else {"linewidth": 1}
