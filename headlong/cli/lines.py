"""What somebody says: typed at a prompt that remembers, or line by line through a pipe."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headlong.cli.prompts import decode
from headlong.errors import UserError

PROMPT, MORE = "> ", "... "
QUOTES = '"""'
MOST_REMEMBERED = 1000


@dataclass(frozen=True)
class Said:
    text: str
    command: bool  # it began with a slash, and not between quotes


class Lines:
    """Reads messages and commands.

    A line that ends in a backslash goes on in the next, and three quotes begin and end a message of several lines.
    """

    def __init__(self, commands: Sequence[str]) -> None:
        self.typed = sys.stdin is not None and sys.stdin.isatty()
        self.on_screen = self.typed and sys.stdout.isatty()
        self._remember = _open_history(commands) if self.on_screen else lambda: None
        self._modes = _terminal_modes() if self.on_screen else []

    def read(self) -> Said | None:
        """The next one; None at the end of the input."""
        line = self._line(PROMPT)
        if line is None:
            return None
        if line.lstrip().startswith(QUOTES):
            return Said(self._quoted(line.lstrip().removeprefix(QUOTES)), command=False)
        parts = [line]
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1].removesuffix("\\")
            parts.append(self._line(MORE) or "")
        text = "\n".join(parts)
        return Said(text, text.startswith("/"))

    @contextmanager
    def unechoed(self) -> Iterator[None]:
        """Keys pressed meanwhile do not show up in the middle of an answer; they wait for the next prompt."""
        if not self.on_screen:
            yield
            return
        import termios  # not on every system

        *others, local, input_speed, output_speed, keys = self._modes
        try:
            quiet = [*others, local & ~termios.ECHO, input_speed, output_speed, keys]
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
            yield
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._modes)

    def _quoted(self, text: str) -> str:
        while not text.rstrip().endswith(QUOTES):
            line = self._line(MORE)
            if line is None:
                return text.strip("\n")
            text += f"\n{line}"
        return text.rstrip().removesuffix(QUOTES).strip("\n")

    def _line(self, prompt: str) -> str | None:
        if not self.typed:
            line = sys.stdin.buffer.readline() if sys.stdin is not None else b""
            return decode(line, "standard input").rstrip("\r\n") if line else None
        try:
            typed = input(prompt if self.on_screen else "")
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise UserError(f"what was typed is not UTF-8 (byte {error.start}); type it again.") from error
        self._remember()
        return decode(typed.encode(errors="surrogateescape"), "what was typed")


def _terminal_modes() -> list[Any]:
    import termios  # not on every system

    return termios.tcgetattr(sys.stdin)


def _open_history(commands: Sequence[str]) -> Callable[[], None]:
    """Lines can be edited and found again from now on; what is given back keeps the newest one for the next time."""
    try:
        import readline
    except ImportError:  # not on every system
        return lambda: None
    edits_like_bsd = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if edits_like_bsd else "tab: complete")
    readline.parse_and_bind("set enable-bracketed-paste on")  # several pasted lines are one message
    readline.set_completer_delims(" \t\n")
    readline.set_completer(lambda begun, number: _completed(begun, commands, number))
    path = _history_file()
    with suppress(OSError):  # it goes on without
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        readline.read_history_file(path)
        readline.set_history_length(MOST_REMEMBERED)
        readline.write_history_file(path)
        path.chmod(0o600)
        readline.set_history_length(-1)  # or every line would have the file cut
    known = readline.get_current_history_length()

    def remember() -> None:
        nonlocal known
        new, known = readline.get_current_history_length() - known, readline.get_current_history_length()
        with suppress(OSError):
            if new > 0 and hasattr(readline, "append_history_file"):
                readline.append_history_file(new, path)
            elif new > 0:
                readline.write_history_file(path)

    return remember


def _history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "headlong" / "chat_history"


def _completed(begun: str, commands: Sequence[str], number: int) -> str | None:
    fitting = [f"{name} " for name in commands if begun.startswith("/") and name.startswith(begun)]
    return fitting[number] if number < len(fitting) else None
