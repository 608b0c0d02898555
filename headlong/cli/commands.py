"""The /commands of a chat."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headlong.cli import options, request
from headlong.cli.session import Session
from headlong.cli.summary import count
from headlong.errors import UserError
from headlong.settings import MAX_DEPTH

NOTES = (
    'A line that ends in \\ goes on in the next; three quotes (""") begin and end a message of several lines.',
    "Ctrl-C stops an answer, which stays as far as it came; Ctrl-D leaves.",
)


@dataclass(frozen=True)
class Command:
    takes: str  # nothing, or what its value can be
    does: str
    run: Callable[[Session, str], None]


def run(session: Session, line: str) -> None:
    """Do what a line that begins with a slash says."""
    name, _, value = line.partition(" ")
    command, value = COMMANDS.get(name), value.strip()
    if command is None:
        raise UserError(f"{name} is not a command; /help lists them, and a space before the / says it to the model.")
    if value and not command.takes:
        raise UserError(f"{name} takes no value; leave {value!r} out.")
    try:
        command.run(session, value)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{error}; give {name} {command.takes}.") from error


def _help(session: Session, value: str) -> None:
    forms = {f"{name} {command.takes}".strip(): command.does for name, command in COMMANDS.items()}
    width = max(map(len, forms))
    session.tell("\n".join([*(f"{form:{width}}  {does}" for form, does in forms.items()), *NOTES]))
    session.tell_colours()


def _quit(session: Session, value: str) -> None:
    session.over = True


def _reset(session: Session, value: str) -> None:
    session.conversation.messages = []
    kept = "" if session.conversation.system is None else "; the system message stays"
    session.tell(f"a new conversation{kept}")


def _system(session: Session, value: str) -> None:
    if value:
        session.conversation.system = None if value == "none" else value
    system = session.conversation.system
    session.tell("no system message" if system is None else f"system message: {system}")


def _depth(session: Session, value: str) -> None:
    if value:
        session.change(depth=0 if value == "off" else request.depth(value))
    depth = session.options["depth"]
    session.tell(f"depth: {'auto' if depth is None else depth or 'off'}")


def _temperature(session: Session, value: str) -> None:
    if value:
        session.change(temperature=options.number(value))
    session.tell(f"temperature: {session.options['temperature']:g}")


def _seed(session: Session, value: str) -> None:
    if value:
        session.change(seed=None if value == "none" else options.whole(value))
    seed = session.options["seed"]
    session.tell(f"seed: {'none' if seed is None else seed}")


def _max(session: Session, value: str) -> None:
    if value:
        session.change(max_tokens=options.whole(value))
    session.tell(f"an answer has at most {count(session.options['max_tokens'], 'token')}")


def _retry(session: Session, value: str) -> None:
    session.retry()


def _undo(session: Session, value: str) -> None:
    session.tell(f"taken back: {session.conversation.undo()}")


def _save(session: Session, value: str) -> None:
    session.tell(f"saved {count(session.conversation.save(_file(value)), 'message')} in {value}")


def _load(session: Session, value: str) -> None:
    session.tell(f"loaded {count(session.conversation.load(_file(value)), 'message')} from {value}")


def _file(value: str) -> Path:
    if not value:
        raise argparse.ArgumentTypeError("no file was named")
    return Path(value).expanduser()


def _stats(session: Session, value: str) -> None:
    session.stats()


def _race(session: Session, value: str) -> None:
    session.race()


# Those with a value tell the one they have when they are given none.
COMMANDS = {
    "/help": Command("", "this list", _help),
    "/quit": Command("", "leave, as Ctrl-D does", _quit),
    "/reset": Command("", "begin a new conversation", _reset),
    "/retry": Command("", "answer the last question again", _retry),
    "/undo": Command("", "take the last turn back", _undo),
    "/race": Command("", "answer the last question plain and with drafts, and compare text and speed", _race),
    "/stats": Command("", "the figures of all answers, and how full the context is", _stats),
    "/system": Command("TEXT|none", "the message that stands before all others", _system),
    "/depth": Command(f"1..{MAX_DEPTH}|auto|off", "tokens drafted in a round", _depth),
    "/temperature": Command("X", "0 takes the likeliest token, more draws among them", _temperature),
    "/seed": Command("N|none", "the same seed draws the same text", _seed),
    "/max": Command("N", "tokens that an answer may have", _max),
    "/save": Command("FILE", "write the messages as JSON", _save),
    "/load": Command("FILE", "go on with the messages of a file", _load),
}
