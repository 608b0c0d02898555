"""`headlong tune`: measure what rounds cost on this machine, and keep it for every later load of the model."""

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import headlong
from headlong.cli import machine, options, show
from headlong.cli.tuned import Tuned
from headlong.engine import tuning
from headlong.errors import UserError
from headlong.settings import Settings

if TYPE_CHECKING:
    from headlong.engine.engine import Engine
    from headlong.engine.roundcost import RoundCosts

ROWS = 16
LOG_WIDTH = 100  # columns where no terminal says how many it has
ABOUT = (
    "Times rounds of many sizes on the idle machine, which takes about half a minute with the model that comes with "
    "headlong, and keeps what they cost: from then on depth auto starts from it, and goes on learning. It is kept for "
    "these weights on this device, in this dtype and with this number of threads; with others, run it again."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ABOUT
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a model's folder or a hub name; default: nano, the small model that comes with headlong",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--show", action="store_true", help="what is kept; nothing is measured")
    instead.add_argument("--forget", action="store_true", help="delete what is kept; nothing is measured")
    group = parser.add_argument_group("machine")
    options.add_machine_arguments(group)
    options.add_rows_argument(group, ROWS)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("-v", "--verbose", action="store_true", help="tracebacks of faults")


def run(args: argparse.Namespace) -> int:
    """The model is loaded in any case: only a backend can say what it runs on, which is part of the file's name."""
    if args.model == "":
        raise UserError("the model's name is empty; name a folder or a hub name, or leave it out.")
    with closing(headlong.load(args.model, **vars(_settings(args)))) as engine:
        path = tuning.where(tuning.folder_of(engine.name), engine.limits)
        if args.forget:
            return _forget(engine.name, path, args.json)
        costs = _kept(engine.name, path) if args.show else _measure(engine)
        tuned = Tuned(engine.name, engine.limits, machine.describe(), path, costs)
    console = show.open_console(log_width=LOG_WIDTH)
    if args.json:
        sys.stdout.write(json.dumps(tuned.record(), ensure_ascii=False) + "\n")
    else:
        tuned.show(console)
    if not args.show:
        tuning.write(path, costs, {"model": tuned.model, "device": tuned.limits.device})
    if not args.json:
        show.write(console, f"\nKept in {path}\n")
    return 0


def _settings(args: argparse.Namespace) -> Settings:
    """Rows are measured at their beginning, so that no memory is taken for their whole context."""
    return Settings(
        device=args.device,
        dtype=args.dtype,
        rows=args.rows,
        context=args.context,
        memory_fraction=args.memory_fraction,
        cache_tokens=max(0, args.rows) * tuning.POSITIONS,
        prefix_bytes=0,
        threads=args.threads,
    )


def _measure(engine: "Engine") -> "RoundCosts":
    with engine.idle_backend() as backend:
        measured = tuning.Tuning(backend)
        with show.progress(measured.steps) as advance:
            for name in measured.measure():
                advance(name)
        return measured.costs()


def _kept(name: str, path: Path) -> "RoundCosts":
    costs = tuning.read(path)
    if costs is None:
        raise UserError(f"nothing is kept for {name} on this machine; measure it with 'headlong tune', without --show.")
    return costs


def _forget(name: str, path: Path, as_json: bool) -> int:
    there = path.is_file()
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be deleted ({error.strerror}); delete it yourself.") from error
    told = f"Deleted {path}" if there else f"Nothing was kept for {name} on this machine"
    found = json.dumps({"model": name, "path": str(path), "deleted": there})
    sys.stdout.write(f"{found if as_json else told}\n")
    return 0
