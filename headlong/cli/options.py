"""Flags that commands share, and the kinds of values that flags take."""

import argparse
from pathlib import Path

from headlong.cli.prompts import decode, read_file
from headlong.settings import DTYPES, MAX_DEPTH, Settings


def add_machine_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--device", default=Settings.device, help="auto, cpu, cuda or cuda:N; default: %(default)s")
    group.add_argument("--dtype", default=Settings.dtype, help=f"{', '.join(DTYPES)}; default: %(default)s")
    group.add_argument(
        "--threads",
        type=whole,
        default=Settings.threads,
        metavar="N",
        help="CPU threads; 0: as many as torch takes; default: %(default)s",
    )
    group.add_argument(
        "--context",
        type=whole,
        default=Settings.context,
        metavar="N",
        help="longest prompt and text in tokens; 0: the model's own limit, at most 16384; default: %(default)s",
    )
    group.add_argument(
        "--memory-fraction",
        type=number,
        default=Settings.memory_fraction,
        metavar="X",
        help="of a GPU's memory, for weights, cache and rounds together; default: %(default)s",
    )


def add_rows_argument(group: argparse._ArgumentGroup, default: int) -> None:
    group.add_argument(
        "--rows", type=whole, default=default, metavar="N", help="sequences that run at once; default: %(default)s"
    )


def settings_of(args: argparse.Namespace, rows: int) -> Settings:
    """The machine's flags and the draft kind, as an engine takes them."""
    return Settings(
        device=args.device,
        dtype=args.dtype,
        rows=rows,
        context=args.context,
        memory_fraction=args.memory_fraction,
        draft_kind=args.draft_kind,
        threads=args.threads,
    )


def text(given: str) -> str:
    """A command line may hold bytes that are no text."""
    return decode(given.encode(errors="surrogateescape"), f"the argument {given!a}")


def text_or_file(given: str) -> str:
    if not given.startswith("@"):
        return text(given)
    return decode(read_file(Path(given[1:]), "name a file after @, or give the text itself"), given[1:])


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them, each once."""
    return tuple(dict.fromkeys(number(part) for part in text.split(",")))


def depths(text: str) -> tuple[int, ...]:
    """Whole numbers and ranges of them with commas between, such as 0,1,4 or 0-4; sorted, each once."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if whole(last or first) > MAX_DEPTH:
            raise argparse.ArgumentTypeError(f"{part!r} is past the deepest, {MAX_DEPTH}")
        found |= set(range(whole(first), whole(last or first) + 1))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names no depth; give some such as 0,1,4 or 0-4")
    return tuple(sorted(found))
