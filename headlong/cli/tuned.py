"""What rounds cost on a machine, as tables or one JSON object, and the depths that follow from it."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headlong.cli.machine import about
from headlong.cli.show import NOTHING, digits, new_table
from headlong.engine.depth import DepthController, RowDepth
from headlong.engine.request import Limits
from headlong.engine.roundcost import KINDS, RoundCosts
from headlong.engine.scene import HEAD
from headlong.engine.tuning import batches, widths

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

ACCEPTANCES = (0.5, 0.7, 0.9)
NAMES = {"plain": "greedy", "sampled": "sampled"}


@dataclass(frozen=True)
class Cost:
    """The target's pass in rounds of so many rows with so many tokens each."""

    kind: str
    rows: int
    width: int
    seconds: float
    steps: float  # in rounds of as many rows with one token each


@dataclass(frozen=True)
class DraftCost:
    """The head's first step after a round, which takes the window's pairs too, and each further one."""

    kind: str
    rows: int
    first_s: float
    further_s: float


@dataclass(frozen=True)
class Choice:
    """What depth auto begins with, if this share of drafts is kept at every position."""

    kind: str
    rows: int
    acceptance: float
    depth: float  # drafts a row
    speedup: float  # over plain decoding of as many rows


class Steady(RowDepth):
    """A row of which it is known how many drafts are kept."""

    def __init__(self, rate: float, deepest: int) -> None:
        super().__init__(deepest=deepest)
        self._rate = rate

    def reach(self, drafter: str, depth: int) -> list[float]:
        return [self._rate ** (place + 1) for place in range(depth)]


@dataclass(frozen=True)
class Tuned:
    model: str
    limits: Limits
    machine: Mapping[str, str | int]
    path: Path
    costs: RoundCosts

    # --- figures -------------------------------------------------------------------------------------------------

    def rounds(self, kind: str) -> list[Cost]:
        """Only of sizes that were measured."""
        found = []
        for rows in self._batches(kind):
            curve = self.costs.of(kind).verify_of(rows)
            for width in widths(self.limits):
                if curve.knot(rows * width):
                    seconds = curve.value(rows * width)
                    found.append(Cost(kind, rows, width, seconds, seconds / curve.value(rows)))
        return found

    def drafts(self, kind: str) -> list[DraftCost]:
        curves = self.costs.of(kind)
        return [
            DraftCost(kind, rows, curves.first.value(rows), curves.further.value(rows))
            for rows in self._batches(kind)
            if curves.first.knot(rows)
        ]

    def choices(self, kind: str) -> list[Choice]:
        if self.limits.drafter != HEAD:
            return []
        return [self._choice(kind, rows, rate) for rows in self._batches(kind) for rate in ACCEPTANCES]

    def _batches(self, kind: str) -> list[int]:
        return [rows for rows in batches(self.limits.rows) if self.costs.of(kind).verify_of(rows).knot(rows)]

    def _choice(self, kind: str, count: int, rate: float) -> Choice:
        rows = [Steady(rate, self.limits.depth) for _ in range(count)]
        sizes = self.limits.sizes
        DepthController(self.costs, self.limits.depth, self.limits.depths, sizes).plan(rows, kind)
        depths = [row.now for row in rows]  # what is chosen; the plan itself may try something else
        tokens = count + sum(sum(row.reach(HEAD, depth)) for row, depth in zip(rows, depths, strict=True))
        run = sizes.rows(count)
        cost = self.costs.verify(kind, sizes.tokens(depths), run) + self.costs.draft(kind, sizes.steps(depths))
        plain = self.costs.verify(kind, run, run) + self.costs.draft(kind, [])
        return Choice(kind, count, rate, sum(depths) / count, (tokens / cost) / (count / plain))

    def record(self) -> dict[str, Any]:
        """What --json prints."""
        return {
            "model": self.model,
            "device": self.limits.device,
            "machine": dict(self.machine),
            "path": str(self.path),
            "no_draft_reason": self.limits.no_draft_reason,
            "rounds": [asdict(one) for kind in KINDS for one in self.rounds(kind)],
            "drafts": [asdict(one) for kind in KINDS for one in self.drafts(kind)],
            "choices": [asdict(one) for kind in KINDS for one in self.choices(kind)],
            "costs": self.costs.to_json(),
        }

    # --- tables --------------------------------------------------------------------------------------------------

    def show(self, console: "Console") -> None:
        from rich.text import Text

        console.print(Text(self.model, "bold"))
        console.print(Text(about(self.limits.device, self.machine)))
        for title, table in self._tables():
            console.print()
            console.print(Text(title, "bold"))
            console.print(table)
        if self.limits.drafter != HEAD:
            console.print(Text(f"\nNo depths to choose: {self.limits.no_draft_reason}"))

    def _tables(self) -> Iterator[tuple[str, "Table"]]:
        for kind in KINDS:
            title = f"{NAMES[kind]}: ms of a round by rows and tokens a row, and in plain steps of as many rows"
            yield title, self._round_table(kind)
        if self.limits.drafter == HEAD:
            title = "depth auto, by the share of drafts kept: drafts a row, and how many times plain decoding's speed"
            yield title, self._auto_table()

    def _round_table(self, kind: str) -> "Table":
        rounds = {(one.rows, one.width): one for one in self.rounds(kind)}
        drafts = {one.rows: one for one in self.drafts(kind)}
        table = new_table(["rows", *map(str, widths(self.limits)), "first draft", "further"])
        for rows in self._batches(kind):
            passes = [rounds.get((rows, width)) for width in widths(self.limits)]
            cells = [
                _ms(one.seconds) + (f" ({one.steps:.2f})" if one.width > 1 else "") if one else NOTHING
                for one in passes
            ]
            steps = drafts.get(rows)
            table.add_row(str(rows), *cells, *([_ms(steps.first_s), _ms(steps.further_s)] if steps else [NOTHING] * 2))
        return table

    def _auto_table(self) -> "Table":
        names = [f"{NAMES[kind]} {rate:.0%}" for kind in KINDS for rate in ACCEPTANCES]
        table = new_table(["rows", *names])
        for rows in self._batches(KINDS[0]):
            chosen = [one for kind in KINDS for one in self.choices(kind) if one.rows == rows]
            table.add_row(str(rows), *(f"{one.depth:.1f} ({one.speedup:.2f})" for one in chosen))
        return table


def _ms(seconds: float) -> str:
    return digits(seconds * 1e3)
