"""The command line's door: finds the command, and turns what goes wrong into one line and an exit code."""

import argparse
import importlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from headlong.errors import HeadlongError, UserError
from headlong.version import __version__

# Each command is a module with add_arguments(parser) and run(args) -> exit code, imported only when it is chosen.
COMMANDS = {
    "generate": ("headlong.cli.generate", "write text from a prompt"),
    "chat": ("headlong.cli.chat", "talk with a model, turn by turn"),
    "serve": ("headlong.cli.serve", "put a model behind the APIs of OpenAI and Anthropic, with a page to try it"),
    "bench": ("headlong.cli.bench", "measure plain decoding and every depth, and check that the text stays the same"),
    "tune": ("headlong.cli.tune", "measure what rounds cost on this machine, so that depth auto starts from knowledge"),
    "check": ("headlong.cli.check", "say what this machine has, which path every operation takes, and its bandwidth"),
    "inspect": ("headlong.cli.inspect", "say what a model folder holds, and whether its head can draft"),
}
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
PIPE_CLOSED = 141  # 128 + SIGPIPE


def entrypoint(argv: Sequence[str] | None = None) -> int:
    """Run one command. The only place where an error becomes an exit code."""
    argv = sys.argv[1:] if argv is None else argv
    verbose = any(flag in argv for flag in ("-v", "--verbose"))
    try:
        status = _run(argv)
        sys.stdout.flush()
    except HeadlongError as error:
        return _report(str(error), error.exit_code, verbose and not isinstance(error, UserError))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return PIPE_CLOSED
    except Exception as error:  # noqa: BLE001, the CLI's one door
        hint = "" if verbose else "; run it again with -v to see where"
        return _report(f"internal error: {type(error).__name__}: {error}{hint}", HeadlongError.exit_code, verbose)
    return status


def _run(argv: Sequence[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a narrow locale must not end a text midway
    try:
        args = _parse(argv)
    except SystemExit as done:  # argparse has shown the help or the version
        return int(done.code or 0)
    module = importlib.import_module(COMMANDS[args.command][0])
    with _warnings_on_stderr(quiet=getattr(args, "quiet", False), verbose=getattr(args, "verbose", False)):
        return int(module.run(args))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    top = Parser(prog="headlong", description="Runs language models with their own multi-token-prediction heads.")
    top.add_argument("--version", action="version", version=f"headlong {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    chosen = argv[0] if argv else ""
    for name, (module, summary) in COMMANDS.items():
        parser = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == chosen:
            importlib.import_module(module).add_arguments(parser)
    if not chosen:
        raise UserError(f"no command was given; {_choices()}")
    if not chosen.startswith("-") and chosen not in COMMANDS:
        raise UserError(f"{chosen!r} is not a command; {_choices()}")
    args, unknown = top.parse_known_args(argv)
    if unknown:
        where = f"headlong {args.command}" if args.command else "headlong"
        raise UserError(f"{unknown[0]!r} is not an option of {where}; run '{where} --help' for those it has.")
    if args.command is None:
        raise UserError(f"no command was given; {_choices()}")
    return args


def _choices() -> str:
    return f"give one of {', '.join(COMMANDS)}, or run 'headlong --help'."


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are one sentence, and which takes no shortened flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; run '{self.prog} --help' for what it takes.")


@contextmanager
def _warnings_on_stderr(quiet: bool, verbose: bool) -> Iterator[None]:
    """Show what the package logs; a level of the handler, not the logger, so that nothing else hears less.

    Faults are logged with their tracebacks where they are caught; the command tells of them itself, in a sentence.
    """
    handler = logging.StreamHandler()
    handler.setLevel(logging.CRITICAL if quiet else logging.WARNING)
    handler.addFilter(lambda record: verbose or not record.exc_info)
    handler.setFormatter(logging.Formatter("headlong: warning: %(message)s"))
    logger = logging.getLogger("headlong")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _report(sentence: str, exit_code: int, with_traceback: bool) -> int:
    if with_traceback:
        traceback.print_exc()
    sys.stderr.write(f"headlong: {sentence}\n")
    return exit_code


def _drop_stdout() -> None:
    """The reader has gone: send what is still buffered nowhere, or the interpreter complains of it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
