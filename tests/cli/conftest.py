"""Running a command: in this process, with what it wrote caught, or as a process of its own."""

import io
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import headlong
from headlong.cli.main import entrypoint
from tests.cli import stub

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command line on the scripted engine."""
    monkeypatch.setattr(headlong, "load", stub.load, raising=False)

    def run(*argv: str, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = entrypoint(argv)
        caught = capsys.readouterr()
        return Ran(code, caught.out, caught.err)

    return run


@pytest.fixture
def process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a Python module as a command, with a bare environment for colours and width."""

    def run(module: str, *argv: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", module, *argv],
            cwd=ROOT,
            env=plain_environment() | environment,
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            timeout=120,
        )

    return run


def on_terminal(command: Sequence[str], **environment: str) -> tuple[int, str]:
    """Run with standard output and error on a terminal: the exit code, and what it showed."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=plain_environment() | environment,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            read = os.read(ours, 4096)
        except OSError:  # Linux says so when the other end is closed
            break
        if not read:
            break
        shown += read
    os.close(ours)
    return child.wait(timeout=60), shown.decode().replace("\r\n", "\n")


def plain_environment() -> dict[str, str]:
    unset = ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS")
    return {name: value for name, value in os.environ.items() if name not in unset} | {"TERM": "xterm"}
