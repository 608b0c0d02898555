"""A server's life as a process: started by the command, drained by a signal, killed and started again."""

import gc
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import headlong
import headlong.server.run
from headlong.cli.main import entrypoint
from headlong.cli.serve import _log
from tests.server.conftest import PATIENCE
from tests.server.test_completions import ASK, CHAT, chunks

ROOT = Path(__file__).parents[2]
LONG = {"messages": ASK, "max_tokens": 1500, "ignore_eos": True, "stream": True}


class Process:
    """`headlong serve`, once it says where it is."""

    def __init__(self, *flags: str) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        environment.pop("HEADLONG_API_KEY", None)
        command = [sys.executable, "-m", "headlong", "serve", "--port", "0", "--rows", "2", *flags]
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        ready = self.wait_for(" is ready at ")
        self.url = ready.rpartition(" ")[2].strip()
        until_ready(self.url)
        self.took = time.monotonic() - self.began

    def wait_for(self, words: str) -> str:
        assert self.process.stderr
        for line in self.process.stderr:
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError("".join(self.lines))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


def until_ready(url: str) -> None:
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"{url} never was ready")


@contextmanager
def started(*flags: str) -> Iterator[Process]:
    made = Process(*flags)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait(PATIENCE)
        made.process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_answers_under_way_end(number):
    with started() as server:
        with httpx.stream("POST", server.url + CHAT, json={**LONG, "max_tokens": 300}, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.signal(number)
            server.wait_for("stopping once 1 answers are complete; a second signal stops at once")
            rest = list(lines)
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{server.url}/health")
        assert rest[-2] == "data: [DONE]"
        assert server.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(number):
    with started() as server, httpx.stream("POST", server.url + CHAT, json=LONG, timeout=PATIENCE) as answer:
        lines = answer.iter_lines()  # closed where nobody holds it
        next(lines)
        server.signal(number)
        server.wait_for("a second signal stops at once")
        server.signal(number)
        assert server.process.wait(PATIENCE) == 128 + number


def test_killed_and_started_again():
    with started() as server:
        port = re.search(r":(\d+)$", server.url)[1]
        with httpx.stream("POST", server.url + CHAT, json=LONG, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.signal(signal.SIGKILL)
            server.process.wait(PATIENCE)
    with started("--port", port) as again:
        assert again.url == server.url
        body = {"messages": ASK, "max_tokens": 5}
        assert httpx.post(again.url + CHAT, json=body, timeout=PATIENCE).status_code == 200


def test_flags_reach_the_engine():
    flags = ("--speculative-config", '{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}', "--api-key", "k")
    with started(*flags, "--served-model-name", "mine", "--temperature", "0.5", "--max-body", "3000") as server:
        key = {"x-api-key": "k"}
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert httpx.get(f"{server.url}/v1/models", headers=key).json()["data"][0]["id"] == "mine"
        body = {"model": "mine", "messages": ASK, "max_tokens": 8, "stream": True}
        got = httpx.post(server.url + CHAT, json=body, headers=key, timeout=PATIENCE)
        assert chunks(got)[-1]["speculative"]["depth"] == 2
        assert chunks(got)[-1]["speculative"]["requested"] == "mtp"
        assert httpx.post(server.url + CHAT, content=b" " * 4000, headers=key).status_code == 413


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (
            ("--host", "0.0.0.0"),
            2,
            "0.0.0.0 can be reached from other machines; give a key with --api-key or HEADLONG_API_KEY",
        ),
        (("--port", "99999"), 2, "port is 99999; it must be at most 65535."),
        (("--host", "192.0.2.1", "--api-key", "k"), 2, "192.0.2.1:8000 cannot be served on ("),
        (("--depth", "9"), 2, "depth is 9; it must be auto or between 0 and 8."),
        (("--speculative-config", "{"), 2, "is not JSON"),
        (
            ("--speculative-config", '{"model": "x"}'),
            2,
            "'model' is not supported; give method and num_speculative_tokens",
        ),
        (("--speculative-config", '{"method": "eagle"}'), 2, "method 'eagle' is not supported; give mtp or ngram"),
        (("--require-draft", "--no-mtp"), 3, "--require-draft was given and drafting is turned off"),
        (("--request-timeout", "nan"), 2, "request_s is nan; it must be at least 0."),
        (("--api-key", "a b"), 2, "the API key holds spaces"),
        (("--temperature", "101"), 2, "temperature is 101.0; it must be between 0 and 100."),
        (("--enable-mtp", "--no-mtp"), 2, "--no-mtp: not allowed with argument --enable-mtp"),
        (("--speculative-config", '{"method": "mtp"}', "--draft-kind", "ngram"), 2, "not allowed with argument"),
        (
            ("--speculative-config", '{"num_speculative_tokens": 2}', "--depth", "3"),
            2,
            "--depth and num_speculative_tokens mean the same; leave one out.",
        ),
        (["--budget", "-1"], 2, "budget is -1; it must be at least 0 (0: chosen for you)."),
    ],
)
def test_flags_that_are_refused(capsys, monkeypatch, flags, code, says):
    monkeypatch.delenv("HEADLONG_API_KEY", raising=False)
    assert entrypoint(["serve", *flags]) == code
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1


def test_limits_reach_the_engine(monkeypatch):
    asked = []
    monkeypatch.setattr(headlong, "load", lambda model, **settings: asked.append(settings))
    monkeypatch.setattr(headlong.server.run, "serve", lambda engine, serving, bound: bound.close())
    monkeypatch.setattr(gc, "freeze", lambda: asked.append("frozen"))
    assert entrypoint(["serve", "--port", "0", "--budget", "40", "--queue", "7", "--rows", "3"]) == 0
    settings, frozen = asked
    assert (settings["budget"], settings["queue"], settings["rows"], frozen) == (40, 7, 3, "frozen")


def test_a_port_that_is_taken(capsys, server):
    assert entrypoint(["serve", "--port", server.url.rpartition(":")[2]]) == 2
    assert "cannot be served on (Address already in use); choose" in capsys.readouterr().err


@pytest.mark.parametrize(("verbose", "lines"), [(False, 1), (True, 4)])
def test_what_broke_is_in_the_log(capsys, verbose, lines):
    with _log(quiet=False, verbose=verbose):
        try:
            raise RuntimeError("a cable\nwas cut, 100%")
        except RuntimeError:
            logging.getLogger("headlong.server").exception("a fault in %s", "here")
    told = capsys.readouterr().err
    assert re.match(r"\d\d:\d\d:\d\d a fault in here", told)
    assert told.count("\n") >= lines
    if not verbose:
        assert told.endswith(" a fault in here: RuntimeError: a cable was cut, 100%; serve with -v to see where\n")
