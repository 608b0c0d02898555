"""How things look: streamed text, whole answers, JSON records, progress and tables."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol, TextIO

from headlong.cli.summary import Asked, record
from headlong.engine.channels import CLOSES, OPENS, Channels, Piece
from headlong.engine.request import Emitted, Output

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Whose tokens are whose: the target's own, then drafts it agreed with, by their position; the last is for deeper ones.
ORIGINS = ("", "green", "cyan", "bright_blue", "magenta", "yellow")
ASIDE = "dim"
MISTAKE = "red"
# A model's text must not steer the terminal: controls other than newline and tab become visible signs.
HARMLESS = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | dict.fromkeys(range(127, 160), 0xFFFD)
NOTHING = "-"  # in a table, where there is no figure
HEADER_PROMPT = 60  # characters of a prompt shown over its answer


def open_console(stderr: bool = False, log_width: int | None = None) -> "Console":
    """`log_width` is for where there is no terminal to ask."""
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal or log_width is None else Console(stderr=stderr, width=log_width)


@contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error, if that is a terminal; call what is given with each step's name as it begins."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = open_console(stderr=True)
    if not console.is_terminal:
        yield lambda name: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    # Without a thread that redraws it: that would take its share of what is being measured.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task, done = bar.add_task("", total=steps), itertools.count()
        yield lambda name: bar.update(task, description=name, completed=next(done), refresh=True)


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Says on a terminal that there is something to wait for."""
    from rich.text import Text

    console = open_console(stderr=True)
    with console.status(Text(f"loading {name}")) if console.is_terminal else nullcontext():
        yield


class View(Protocol):
    """Where answers go. `answer` is called once for each, in their order."""

    def piece(self, emitted: Emitted) -> None: ...

    def answer(self, number: int, output: Output) -> None: ...


class Live:
    """One answer, shown as it comes."""

    def __init__(self, console: "Console") -> None:
        self.console = console
        self.shown = 0

    def piece(self, emitted: Emitted) -> None:
        write(self.console, emitted.text, origin(emitted.position))
        self.shown += len(emitted.text)

    def answer(self, number: int, output: Output) -> None:
        """End the text; when it was cut short, characters may still have been held back."""
        write(self.console, output.text[self.shown :])
        end_line(self.console, output.text)


class Talk:
    """One answer of a conversation, shown as it comes, with its reasoning between marks."""

    def __init__(self, console: "Console", channels: Channels) -> None:
        self.console, self.channels = console, channels
        self.reasoning = self.content = ""
        self._taken = 0

    def piece(self, emitted: Emitted) -> None:
        self._taken += len(emitted.text)
        self._show(self.channels.push(emitted.text, emitted.position))

    def answer(self, number: int, output: Output) -> None:
        self._show([*self.channels.push(output.text[self._taken :]), *self.channels.flush()])
        end_line(self.console, self.content or self.reasoning)

    def _show(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if piece.reasoning:
                write(self.console, "" if self.reasoning else f"{OPENS}\n", ASIDE)
                write(self.console, piece.text, f"{ASIDE} {origin(piece.position)}")
                self.reasoning += piece.text
            else:
                write(self.console, f"\n{CLOSES}\n" if self.reasoning and not self.content else "", ASIDE)
                write(self.console, piece.text, origin(piece.position))
                self.content += piece.text


class Whole:
    """Several answers, each shown when it is complete; on a terminal under the prompt it belongs to."""

    def __init__(self, console: "Console", asked: Asked) -> None:
        self.console = console
        self.asked = asked

    def piece(self, emitted: Emitted) -> None:
        """Nothing is shown before an answer is complete."""

    def answer(self, number: int, output: Output) -> None:
        if self.console.is_terminal:
            write(self.console, f"{header(number, self.asked)}\n", ASIDE)
        write(self.console, output.text)
        end_line(self.console, output.text)


class Json:
    """One object a line, for programs."""

    def __init__(self, file: TextIO, model: str, load_s: float, logprobs: bool) -> None:
        self.file = file
        self.model = model
        self.load_s = load_s
        self.logprobs = logprobs

    def piece(self, emitted: Emitted) -> None:
        """The object holds the whole text."""

    def answer(self, number: int, output: Output) -> None:
        content = record(self.model, output, self.load_s, self.logprobs)
        self.file.write(json.dumps(content, ensure_ascii=False) + "\n")
        self.file.flush()


def write(console: "Console", text: str, style: str = "") -> None:
    """Text as the model gave it: never wrapped, and plain unless a terminal wants colour."""
    if not text:
        return
    if console.is_terminal:
        text = text.translate(HARMLESS)
    if style and console.is_terminal and not console.no_color:
        from rich.segment import Segment, Segments
        from rich.style import Style

        console.print(Segments([Segment(text, Style.parse(style))]), end="", soft_wrap=True)
    else:
        console.file.write(text)
    console.file.flush()


def origin(position: int) -> str:
    """The colour of a token that was a draft at this position of its round; 0: the target's own."""
    return ORIGINS[min(position, len(ORIGINS) - 1)]


def legend(console: "Console") -> None:
    """What the colours mean, where there are any."""
    if console.is_terminal and not console.no_color:
        write(console, "tokens: the model's own", origin(0))
        for position in range(1, len(ORIGINS)):
            write(console, f", draft {position}", origin(position))
        write(console, " and deeper\n", origin(len(ORIGINS)))


def end_line(console: "Console", text: str) -> None:
    if not text.endswith("\n"):
        write(console, "\n")


def header(number: int, asked: Asked) -> str:
    """Which prompt, and which answer to it where there are several."""
    place, answer = divmod(number, asked.completions)
    prompt = " ".join(asked.prompts[place].split())
    if len(prompt) > HEADER_PROMPT:
        prompt = prompt[: HEADER_PROMPT - 1] + "…"
    parts = [f"{place + 1}/{len(asked.prompts)}"] if len(asked.prompts) > 1 else []
    if asked.completions > 1:
        parts.append(f"answer {answer + 1} of {asked.completions}")
    return f"[{', '.join(parts)}] {prompt}"


def digits(value: float) -> str:
    """Three that count, or all before the point."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def new_table(columns: Sequence[str]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    return table
