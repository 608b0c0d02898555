"""A bench's result as tables, for a terminal or a log."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from headlong.cli import result as told
from headlong.cli.result import Result
from headlong.cli.show import NOTHING, digits, new_table
from headlong.engine.costs import Costs
from headlong.engine.figures import Figures, Section, Spread

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

BEST = "bold green"
WRONG = "bold red"
SPEEDS = ("depth", "tok/s", "quartiles", "speed-up", "quartiles", "predicted", "tok/round", "verify", "draft")
PLAIN_SPEEDS = 3  # columns that say something where only plain decoding ran


def show(console: "Console", result: Result, every_set: bool) -> None:
    from rich.text import Text

    def say(sentence: str, style: str = "") -> None:
        if sentence:
            console.print(Text(sentence, style))

    say(result.model, "bold")
    say(told.about_machine(result))
    say(told.about_prompts(result))
    say(told.about_plain(result))
    for section in result.report.sections:
        for place, (title, table) in enumerate(_tables(section, every_set)):
            console.print()
            say(title, "bold")
            console.print(table)
            if not place:
                say(told.about_costs(section), "dim")
    console.print()
    say(told.about_fastest(result), BEST)
    say(told.about_texts(result), WRONG if result.report.differences else "")
    say(told.about_run(result))


def _tables(section: Section, every_set: bool) -> Iterator[tuple[str, "Table"]]:
    """Each with its title."""
    name, several, deepest = section.mode.name, len(section.sets) > 1, section.all[-1]
    yield f"{name}, all sets" if several else name, _speeds(section.all, section.costs)
    if several and deepest.depth:
        yield f"{name}: speed-up by set and depth", _speedups(section)
    if deepest.accepted:
        yield f"{name}: drafts kept by position, at depth {deepest.depth}", _kept(section)
    if several and every_set:
        for set_name, figures in section.sets.items():
            yield f"{name}, {set_name}", _speeds(figures, section.costs)


def _speeds(figures: Sequence[Figures], costs: Costs | None) -> "Table":
    columns = SPEEDS if len(figures) > 1 else SPEEDS[:PLAIN_SPEEDS]
    best = max(one.gain for one in figures)
    table = new_table(columns)
    for one in figures:
        table.add_row(*speed_cells(one, costs)[: len(columns)], style=BEST if one.depth and one.gain == best else "")
    return table


def speed_cells(figures: Figures, costs: Costs | None) -> list[str]:
    """A row under SPEEDS."""
    depth = figures.depth
    return [
        str(depth) if depth else "plain",
        middle(figures.speed),
        quartiles(figures.speed),
        middle(figures.speedup),
        quartiles(figures.speedup) if depth else "",
        f"{figures.predicted:.2f}" if figures.predicted is not None else "",
        f"{figures.tokens_a_round:.2f}" if figures.rounds else NOTHING,
        _at(depth, costs.verify) if costs else "",
        _at(depth, costs.draft) if costs else "",
    ]


def _at(depth: int, costs: Mapping[int, float]) -> str:
    return f"{costs[depth]:.2f}" if depth in costs else ""


def _speedups(section: Section) -> "Table":
    from rich.markup import escape

    table = new_table(["set", "plain tok/s", *(str(one.depth) for one in section.all if one.depth)])
    for name, figures in rows(section):
        drafting = [one for one in figures if one.depth]
        table.add_row(escape(name), middle(figures[0].speed), *(middle(one.speedup) for one in drafting))
    return table


def _kept(section: Section) -> "Table":
    from rich.markup import escape

    positions = range(1, max(len(figures[-1].accepted) for _, figures in rows(section)) + 1)
    table = new_table(["set", "tok/round", *map(str, positions)])
    for name, figures in rows(section):
        deepest = figures[-1]
        each = f"{deepest.tokens_a_round:.2f}" if deepest.rounds else NOTHING
        table.add_row(escape(name), each, *(f"{share:.0%}" for share in deepest.accepted))
    return table


def rows(section: Section) -> list[tuple[str, tuple[Figures, ...]]]:
    """Every set's figures and, where there are several, those of all together."""
    sets = list(section.sets.items())
    return [*sets, ("all", section.all)] if len(sets) > 1 else sets


def middle(spread: Spread | None) -> str:
    return digits(spread.value) if spread else NOTHING


def quartiles(spread: Spread | None) -> str:
    return f"{digits(spread.low)}-{digits(spread.high)}" if spread else NOTHING
