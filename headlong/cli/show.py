"""How things look: streamed text, whole answers, JSON records and the line of figures."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from headlong.engine.request import Emitted, Output, Speculative

if TYPE_CHECKING:
    from rich.console import Console

DRAFTED = "green"  # drafts the target agreed with
ASIDE = "dim"
# A model's text must not steer the terminal: controls other than newline and tab become visible signs.
HARMLESS = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | dict.fromkeys(range(127, 160), 0xFFFD)
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


class View(Protocol):
    """Where answers go. `answer` is called once per prompt, in the prompts' order."""

    def piece(self, emitted: Emitted) -> None: ...

    def answer(self, number: int, output: Output) -> None: ...


class Live:
    """One answer, shown as it comes."""

    def __init__(self, console: "Console") -> None:
        self.console = console
        self.shown = 0

    def piece(self, emitted: Emitted) -> None:
        write(self.console, emitted.text, DRAFTED if emitted.drafted else "")
        self.shown += len(emitted.text)

    def answer(self, number: int, output: Output) -> None:
        """End the text; when it was cut short, characters may still have been held back."""
        write(self.console, output.text[self.shown :])
        end_line(self.console, output.text)


class Whole:
    """Several answers, each shown when it is complete; on a terminal under the prompt it belongs to."""

    def __init__(self, console: "Console", prompts: Sequence[str]) -> None:
        self.console = console
        self.prompts = prompts

    def piece(self, emitted: Emitted) -> None:
        """Nothing is shown before an answer is complete."""

    def answer(self, number: int, output: Output) -> None:
        if self.console.is_terminal:
            write(self.console, f"{header(number, self.prompts)}\n", ASIDE)
        write(self.console, output.text)
        end_line(self.console, output.text)


class Json:
    """One object a line, for programs."""

    def __init__(self, file: TextIO, model: str, load_s: float) -> None:
        self.file = file
        self.model = model
        self.load_s = load_s

    def piece(self, emitted: Emitted) -> None:
        """The object holds the whole text."""

    def answer(self, number: int, output: Output) -> None:
        self.file.write(json.dumps(record(self.model, output, self.load_s), ensure_ascii=False) + "\n")
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


def end_line(console: "Console", text: str) -> None:
    if not text.endswith("\n"):
        write(console, "\n")


def header(number: int, prompts: Sequence[str]) -> str:
    prompt = " ".join(prompts[number].split())
    if len(prompt) > HEADER_PROMPT:
        prompt = prompt[: HEADER_PROMPT - 1] + "…"
    return f"[{number + 1}/{len(prompts)}] {prompt}"


def record(model: str, output: Output, load_s: float) -> dict[str, Any]:
    """What --json prints for one answer."""
    speculative, timings = output.speculative, output.timings
    return {
        "model": model,
        "prompt_tokens": output.prompt_tokens,
        "tokens": output.tokens,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "speculative": {**asdict(speculative), "mean_length": speculative.mean_length},
        "timings": {
            "load_s": load_s,
            "prefill_s": timings.prefill_s,
            "decode_s": timings.decode_s,
            "prompt_tps": timings.prompt_tps,
            "decode_tps": timings.decode_tps,
            "draft_n": speculative.drafted,
            "draft_n_accepted": speculative.accepted,
        },
    }


def figures(outputs: Sequence[Output], seconds: float) -> str:
    """What the rounds gave, in one line. `seconds` is the time all the outputs took together."""
    tokens = sum(len(output.tokens) for output in outputs)
    total = combine([output.speculative for output in outputs])
    speed = outputs[0].timings.decode_tps if len(outputs) == 1 else tokens / seconds
    each = tokens / total.rounds if total.rounds else 0.0
    parts = [f"{count(tokens, 'token')} in {count(total.rounds, 'round')} ({each:.2f} a round)"]
    if len(outputs) > 1:
        parts.insert(0, count(len(outputs), "prompt"))
    parts.append(f"{speed:.1f} tok/s")
    parts.append(drafting(total))
    return ", ".join(parts)


def drafting(total: Speculative) -> str:
    if total.used == "none" or not total.depth:
        return f"no drafts: {total.reason or 'the depth is 0'}"
    pairs = zip(total.accepted_by_position, total.drafted_by_position, strict=True)
    rates = [f"{accepted / drafted:.0%}" for accepted, drafted in pairs if drafted]
    accepted = f", accepted by position: {' '.join(rates)}" if rates else ""
    return f"{total.used} at depth {total.depth}{accepted}"


def combine(parts: Sequence[Speculative]) -> Speculative:
    """Several requests' drafting as if it were one's."""
    drafting = next((part for part in parts if part.used != "none"), parts[0])

    def sums(rows: list[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(sum(column) for column in itertools.zip_longest(*rows, fillvalue=0))

    return Speculative(
        requested=drafting.requested,
        used=drafting.used,
        reason=drafting.reason,
        depth=max(part.depth for part in parts),
        rounds=sum(part.rounds for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        drafted_by_position=sums([part.drafted_by_position for part in parts]),
        accepted_by_position=sums([part.accepted_by_position for part in parts]),
    )


def details(model: str, load_s: float, device: str, outputs: Sequence[Output]) -> str:
    """What -v adds: the load and the prompt."""
    prompt_tokens = sum(output.prompt_tokens for output in outputs)
    speeds = " ".join(f"{output.timings.prompt_tps:.1f}" for output in outputs)
    return f"{model} on {device}, loaded in {load_s:.2f} s, prompt {count(prompt_tokens, 'token')} at {speeds} tok/s"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
