"""A bench's result as one HTML file: plots and tables, nothing fetched from anywhere."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from itertools import chain

from headlong.cli import chart, tables
from headlong.cli import result as told
from headlong.cli.result import Result
from headlong.engine.figures import Figures, Section

COLOURS = 6  # lines that page.css has a colour for


def render(result: Result) -> str:
    style = files("headlong.cli").joinpath("page.css").read_text("utf-8")
    wrong = bool(result.report.differences)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>headlong bench: {escape(result.model)}</title>",
        f"<style>\n{style}</style></head><body>",
        f"<h1>headlong bench: {escape(result.model)}</h1>",
        _paragraph(told.about_machine(result), "soft"),
        _paragraph(told.about_prompts(result), "soft"),
        _paragraph(told.about_plain(result), "soft"),
        _paragraph(told.about_fastest(result), "good"),
        _paragraph(told.about_texts(result), "bad" if wrong else ""),
        *(_section(section) for section in result.report.sections),
        f"<h2>Run</h2>{_paragraph(told.about_run(result))}",
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if text else ""


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.mode.name.capitalize())}</h2>"]
    if section.all[-1].depth:
        parts += _charts(section)
    parts.append(_table(section.all, section))
    parts.append(_paragraph(told.about_costs(section), "soft"))
    if len(section.sets) > 1:
        each = (f"<h3>{escape(name)}</h3>{_table(figures, section)}" for name, figures in section.sets.items())
        parts.append(f"<details><summary>Tables by set</summary>{''.join(each)}</details>")
    return "\n".join(parts)


# --- charts ------------------------------------------------------------------------------------------------------


def _charts(section: Section) -> list[str]:
    rows = _rows(section)
    top = max(chain.from_iterable(_heights(figures) for _, figures in rows))
    charts = [_speedups(name, figures, top) for name, figures in rows]
    if section.all[-1].accepted:
        charts.append(_kept(section))
    return [
        _legend([("measured speed-up, band: quartiles", "--measured", False), ("predicted", "--predicted", True)]),
        f'<div class="charts">{"".join(charts)}</div>',
        _legend([(f"drafts kept, {name}", _colour(place), False) for place, (name, _) in enumerate(rows)]),
    ]


def _rows(section: Section) -> list[tuple[str, tuple[Figures, ...]]]:
    """As in the tables, with all sets together first: that one is looked at most."""
    rows = tables.rows(section)
    return rows[-1:] + rows[:-1]


def _heights(figures: Sequence[Figures]) -> list[float]:
    measured = [one.speedup.high for one in figures if one.speedup]
    return [1.0, *measured, *(one.predicted for one in figures if one.predicted)]


def _speedups(name: str, figures: Sequence[Figures], top: float) -> str:
    measured = [
        chart.Point(one.depth, one.speedup.value, one.speedup.low, one.speedup.high) for one in figures if one.speedup
    ]
    predicted = [chart.Point(one.depth, one.predicted) for one in figures if one.predicted is not None]
    axes = chart.Axes(f"{name}: speed-up", "depth", [one.depth for one in figures], top, mark=1.0)
    lines = [chart.Line("measured", "--measured", measured)]
    return chart.draw(axes, [*lines, chart.Line("predicted", "--predicted", predicted, dashed=True)])


def _kept(section: Section) -> str:
    """One line a set, at the greatest depth."""
    deepest = [(name, figures[-1]) for name, figures in _rows(section)]
    positions = range(1, max(len(one.accepted) for _, one in deepest) + 1)
    title = f"drafts kept by position, at depth {section.all[-1].depth}"
    axes = chart.Axes(title, "position", positions, 1.0, ".0%")
    lines = [
        chart.Line(name, _colour(place), [chart.Point(x, share) for x, share in enumerate(one.accepted, 1)])
        for place, (name, one) in enumerate(deepest)
    ]
    return chart.draw(axes, lines)


def _colour(place: int) -> str:
    return f"--line-{place % COLOURS}"


def _legend(entries: Sequence[tuple[str, str, bool]]) -> str:
    shown = (
        f'<span><i class="{"dashed" if dashed else ""}" style="border-color: var({colour})"></i>{escape(name)}</span>'
        for name, colour, dashed in entries
    )
    return f'<div class="legend">{"".join(shown)}</div>'


# --- tables ------------------------------------------------------------------------------------------------------


def _table(figures: Sequence[Figures], section: Section) -> str:
    """The terminal's columns, and each depth's drafts kept by position."""
    best = max(one.gain for one in figures)
    head = "".join(f"<th>{name}</th>" for name in (*tables.SPEEDS, "drafts kept by position"))
    body = []
    for one in figures:
        cells = [*tables.speed_cells(one, section.costs), " ".join(f"{share:.0%}" for share in one.accepted)]
        kind = ' class="best"' if one.depth and one.gain == best else ""
        body.append(f"<tr{kind}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(body)}</table></div>'
