"""Somebody at a terminal: types at a command, and reads what it shows."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

from tests.cli.conftest import ROOT, plain_environment

PATIENCE_S = 60
REACTION_S = 0.1
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
NOT_COLOURS = re.compile(r"\x1b\[\?\d+[hl]|\x1b\[[A-DK]|\r")  # what line editing does


class Terminal:
    """A command whose three streams are a terminal, except those given."""

    def __init__(self, *command, environment=None, **streams):
        self._ours, theirs = pty.openpty()
        self.child = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=plain_environment() | {"COLUMNS": "200"} | (environment or {}),
            preexec_fn=lambda: _take_terminal(theirs),
            **{"stdin": theirs, "stdout": theirs, "stderr": theirs} | streams,
        )
        os.close(theirs)
        self.shown = ""  # since the last time something was waited for

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.child.kill()
        self.child.wait()
        os.close(self._ours)

    def type(self, text):
        """Later than what was waited for: a prompt that is shown may not wait for keys yet."""
        time.sleep(REACTION_S)
        os.write(self._ours, text.encode())

    def wait_for(self, text):
        """What was shown up to and with this text."""
        until = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            if not self._read(until):
                raise AssertionError(f"{text!r} did not come; this did: {self.shown!r}")
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def leave(self):
        """Wait for the end: the exit code, and what was shown last."""
        until = time.monotonic() + PATIENCE_S
        while self._read(until):
            pass
        return self.child.wait(timeout=1), self.shown

    def _read(self, until):
        """Whether there was something to read."""
        if not select.select([self._ours], [], [], max(0.0, until - time.monotonic()))[0]:
            return False
        try:
            read = os.read(self._ours, 4096)
        except OSError:  # Linux says so when the other end is closed
            return False
        self.shown += NOT_COLOURS.sub("", read.decode(errors="replace"))
        return bool(read)


def _take_terminal(theirs):
    """Ctrl-C reaches the processes whose terminal it is, unless who started them has it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    keep = [os.dup(number) for number in range(3)]
    os.login_tty(os.dup(theirs))
    for number, stream in enumerate(keep):
        os.dup2(stream, number)
        os.close(stream)
