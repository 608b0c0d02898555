"""`headlong chat`: talk with a model, turn by turn."""

import argparse
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from threading import Event, Thread
from typing import TYPE_CHECKING

import headlong
from headlong.cli import commands, options, request, show
from headlong.cli.conversation import Conversation
from headlong.cli.lines import Lines, Said
from headlong.cli.session import Session
from headlong.engine.intake import requests_from
from headlong.errors import HeadlongError, UserError
from headlong.settings import Settings

if TYPE_CHECKING:
    from headlong.engine.engine import Engine

MAX_TOKENS = 1024  # of an answer: people stop one themselves when they have read enough
ROWS = 2  # one is in use; the pages of the other keep what was said before

PIPE = (
    "Without a terminal every line of standard input is a turn or a /command, answers go to standard output, and the "
    "first mistake ends the chat."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = PIPE
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a model's folder or a hub name; default: nano, the small model that comes with headlong",
    )
    parser.add_argument("--system", metavar="TEXT", type=options.text, help="a message before all others")
    request.add_arguments(parser)
    parser.set_defaults(max_tokens=MAX_TOKENS)
    options.add_machine_arguments(parser.add_argument_group("machine"))
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument("-v", "--verbose", action="store_true", help="more figures, and tracebacks of faults")
    loudness.add_argument("-q", "--quiet", action="store_true", help="the answers alone")


def run(args: argparse.Namespace) -> int:
    """Everything that can be refused is checked before the model is loaded."""
    request.check(args)
    wanted = request.options_of(args)
    requests_from("?", wanted)
    settings = options.settings_of(args, ROWS)
    lines = Lines(tuple(commands.COMMANDS))
    greets = lines.on_screen and not args.quiet
    with _loaded(args, settings, greets) as engine:
        session = Session(engine, Conversation(args.system), wanted, lines.typed, args.verbose - args.quiet)
        if greets:
            session.tell(f"{engine.name} on {engine.limits.device}; /help lists the commands, Ctrl-D leaves")
            session.tell_colours()
        _talk(session, lines)
    return 0


@contextmanager
def _loaded(args: argparse.Namespace, settings: Settings, greets: bool) -> "Iterator[Engine]":
    with show.loading(args.model or "nano") if greets else nullcontext():
        engine = headlong.load(args.model, require_draft=args.require_draft, **vars(settings))
    with closing(engine):
        if not engine.text.has_chat_template:
            raise UserError(f"{engine.name} has no chat template, so it cannot chat; use headlong generate.")
        yield engine


def _talk(session: Session, lines: Lines) -> None:
    while not session.over:
        try:
            with _resting(session.engine):
                said = lines.read()
            if said is None:
                return
            with lines.unechoed():
                _do(session, said)
        except KeyboardInterrupt:
            if not lines.typed:
                raise
            session.tell("\nCtrl-D or /quit leaves; Ctrl-C stops an answer")
        except HeadlongError as error:
            if not lines.typed:
                raise
            session.tell(str(error), show.MISTAKE)


def _do(session: Session, said: Said) -> None:
    if said.command:
        commands.run(session, said.text)
    elif said.text.strip():
        session.say(said.text)


@contextmanager
def _resting(engine: "Engine") -> Iterator[None]:
    """While somebody types, the engine prefills what was said, so that the next answer begins at once."""
    done = Event()

    def rest() -> None:
        while not done.is_set() and engine.rest():
            pass

    thread = Thread(target=rest, name="headlong rest", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
