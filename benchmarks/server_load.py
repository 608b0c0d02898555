"""Load on a server of its own, on this machine: many clients, some of whom leave early or ask for nonsense.

    python benchmarks/server_load.py [--clients 200] [--seconds 120] [--rows 8] [--seed 0] [-- FLAGS OF headlong serve]

Every client asks one thing after the other. A quarter of the requests are left at a random moment, a tenth are
malformed, the others are read to their end, streamed or whole. Checked: no answer is a 5xx, every finished text is the
one that the same request gives alone, afterwards no row and no page is held and the memory has not grown. Told: times
to the first text and between tokens, as clients see them. Then the server is killed with SIGKILL and started again.
The last line is one JSON object; the exit code is 1 where a check fails.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from headlong.cli.machine import cpu_name

CHAT = "/v1/chat/completions"
LEAVE, MALFORMED = 0.25, 0.10
KINDS = 40  # different requests
GROWTH = 1.10  # of memory, from the second quarter of the time to the last
PATIENCE_S = 300.0
TOPICS = ("adds two numbers", "reads a file", "sorts a list", "counts words", "opens a socket", "parses a date")
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"]}
NONSENSE: tuple[bytes, ...] = (
    b"{",
    b"[]",
    b"\xff\xfe",
    b'{"messages": []}',
    b'{"messages": [{"role": "user", "content": 5}]}',
    b'{"messages": [{"role": "user", "content": "a"}], "temperature": "hot"}',
    b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 99999}',
    b'{"messages": [{"role": "user", "content": "a"}], "colour": "red"}',
    b'{"messages": [{"role": "user", "content": "a"}], "speculative": {"depth": 99}}',
    b'{"messages": [{"role": "user", "content": "' + b"long " * 3000 + b'"}]}',
)


@dataclass
class Seen:
    """What clients saw."""

    statuses: Counter[int] = field(default_factory=Counter)
    finished: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    tokens: int = 0


class Served:
    """`headlong serve` as a process."""

    def __init__(self, flags: Sequence[str], port: int = 0) -> None:
        began = time.monotonic()
        command = [sys.executable, "-m", "headlong", "serve", "--port", str(port), "-q", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{port}" if port else self._find()
        self._wait()
        self.ready_s = time.monotonic() - began
        self.memory = psutil.Process(self.process.pid)

    def _find(self) -> str:
        """The port that it took: -q says nothing, the system knows."""
        while self.process.poll() is None:
            for connection in psutil.Process(self.process.pid).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    return f"http://127.0.0.1:{connection.laddr.port}"
            time.sleep(0.02)
        raise SystemExit(f"the server ended: {self.process.stderr.read() if self.process.stderr else ''}")

    def _wait(self) -> None:
        ends = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends:
            try:
                httpx.get(f"{self.url}/ready", timeout=PATIENCE_S)
                return
            except httpx.TransportError:
                time.sleep(0.02)
        raise SystemExit("the server never was ready")

    def metrics(self) -> dict[str, float]:
        """Samples by their name and label."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text
        found = re.findall(r'^headlong:(\w+){model_name="[^"]*"(?:,\w+="([^"]*)")?} (\S+)$', text, re.MULTILINE)
        return {f"{name} {label}".strip(): float(value) for name, label, value in found}


def bodies(seed: int) -> list[dict[str, Any]]:
    """Requests of many kinds, each with a seed or greedy, so that its text is its own."""
    draw = random.Random(seed)
    made = []
    for place in range(KINDS):
        ask = f"Write a function that {TOPICS[place % len(TOPICS)]}, number {place}."
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": ask}],
            "max_tokens": draw.choice((8, 24, 48, 64)),
        }
        body |= draw.choice(
            ({}, {"temperature": 0.8, "top_p": 0.95, "seed": place}, {"temperature": 1.2, "seed": place})
        )
        body |= draw.choice(({}, {}, {"speculative": {"kind": "none"}}, {"speculative": {"kind": "mtp", "depth": 3}}))
        if place % 10 == 9:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
        made.append(body)
    return made


class Client:
    """One of many: asks until the time is over."""

    def __init__(self, url: str, expected: Sequence[tuple[dict[str, Any], str]], seen: Seen, seed: int) -> None:
        self.url, self.expected, self.seen = url + CHAT, expected, seen
        self.draw = random.Random(seed)

    async def run(self, http: httpx.AsyncClient, ends: float) -> None:
        while time.monotonic() < ends:
            chance = self.draw.random()
            try:
                if chance < MALFORMED:
                    await self._nonsense(http)
                elif chance < MALFORMED + LEAVE:
                    await self._leave(http)
                else:
                    await self._finish(http)
            except httpx.HTTPError as error:
                self.seen.broken.append(f"{type(error).__name__}: {error}")

    async def _nonsense(self, http: httpx.AsyncClient) -> None:
        header = {"content-type": "application/json"}
        got = await http.post(self.url, content=self.draw.choice(NONSENSE), headers=header)
        self.seen.statuses[got.status_code] += 1
        if not 400 <= got.status_code < 500 or "error" not in got.json():
            self.seen.broken.append(f"nonsense was answered with {got.status_code}")

    async def _leave(self, http: httpx.AsyncClient) -> None:
        """Whole answers are left at some moment, streams after some of their lines."""
        body, _ = self.draw.choice(self.expected)
        streamed = self.draw.random() < 0.5
        task = asyncio.create_task(self._read(http, {**body, "stream": streamed}, self.draw.randrange(12)))
        await asyncio.wait([task], timeout=None if streamed else self.draw.random() * 3.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.seen.left += 1

    async def _read(self, http: httpx.AsyncClient, body: dict[str, Any], lines: int) -> None:
        async with http.stream("POST", self.url, json=body) as got:
            self.seen.statuses[got.status_code] += 1
            async for _ in got.aiter_lines():
                lines -= 1
                if lines <= 0:
                    return

    async def _finish(self, http: httpx.AsyncClient) -> None:
        body, text = self.draw.choice(self.expected)
        told = self._streamed if self.draw.random() < 0.7 else self._whole
        status, found = await told(http, body)
        self.seen.statuses[status] += 1
        if status == 200:
            self.seen.finished += 1
            if found != text:
                self.seen.wrong.append(f"{body}: {found!r} and alone {text!r}")
        elif status != 429:
            self.seen.broken.append(f"{status} for {body}: {found}")

    async def _whole(self, http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, str]:
        got = await http.post(self.url, json=body)
        return got.status_code, text_of(got.json()) if got.status_code == 200 else got.text

    async def _streamed(self, http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, str]:
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        began, first, last, text, tokens = time.monotonic(), 0.0, 0.0, "", 0
        async with http.stream("POST", self.url, json=asked) as got:
            async for line in got.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                piece = "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))
                if piece:
                    last = time.monotonic()
                    first = first or last
                    text += piece
        if first:
            self.seen.first_s.append(first - began)
            self.seen.tokens += tokens
            if tokens > 1:
                self.seen.token_s.append((last - first) / (tokens - 1))
        return got.status_code, text


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


async def load(served: Served, args: argparse.Namespace) -> tuple[Seen, list[float]]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.clients)
    seen, memory = Seen(), []
    async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as http:
        made = bodies(args.seed)
        alone = [text_of((await http.post(served.url + CHAT, json=body)).json()) for body in made]
        expected = list(zip(made, alone, strict=True))
        ends = time.monotonic() + args.seconds
        clients = [Client(served.url, expected, seen, args.seed + place) for place in range(args.clients)]
        running = asyncio.gather(*(client.run(http, ends) for client in clients))
        while time.monotonic() < ends:
            memory.append(served.memory.memory_info().rss / 2**20)
            await asyncio.sleep(1.0)
        await running
    return seen, memory


def settled(served: Served) -> dict[str, float]:
    """The metrics once nothing runs any more, or as they are when patience is over."""
    ends = time.monotonic() + 30.0
    found = served.metrics()
    while time.monotonic() < ends and (found["num_requests_running"] or found["num_requests_waiting"]):
        time.sleep(0.2)
        found = served.metrics()
    return found


def growth(memory: Sequence[float]) -> float:
    """Median memory of the last quarter over that of the second."""
    quarter = max(1, len(memory) // 4)
    return statistics.median(memory[-quarter:]) / statistics.median(memory[quarter : 2 * quarter] or memory)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ranked = sorted(seconds)
    if not ranked:
        return {"p50": 0.0, "p99": 0.0}
    return {
        name: ranked[min(len(ranked) - 1, int(share * len(ranked)))] for name, share in (("p50", 0.5), ("p99", 0.99))
    }


def restarted(served: Served, flags: Sequence[str]) -> float:
    """Seconds from the start to ready, after a kill in the midst of an answer."""
    with httpx.Client(timeout=PATIENCE_S) as http:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with http.stream("POST", served.url + CHAT, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGKILL)
            served.process.wait()
    again = Served(flags, int(served.url.rpartition(":")[2]))
    again.process.terminate()
    again.process.wait()
    return again.ready_s


def report(
    seen: Seen, memory: Sequence[float], after: dict[str, float], restart_s: float, seconds: float
) -> dict[str, Any]:
    checks = {
        "no 5xx": not any(status >= 500 for status in seen.statuses),
        "nothing else broken": not seen.broken,
        "every finished text as alone": not seen.wrong,
        "no row left": after["num_requests_running"] == after["num_requests_waiting"] == 0,
        "no page left": after["kv_cache_pages row"] == 0,
        "memory flat": growth(memory) < GROWTH,
        "ready within 5 s after a kill": restart_s < 5.0,
    }
    return {
        "checks": checks,
        "statuses": {str(status): count for status, count in sorted(seen.statuses.items())},
        "finished": seen.finished,
        "left": seen.left,
        "wrong": len(seen.wrong),
        "first_text_s": percentiles(seen.first_s),
        "per_token_s": percentiles(seen.token_s),
        "tokens_per_s": after["generation_tokens_total"] / seconds,
        "rounds": int(after["rounds_total"]),
        "busy_s": {stage: after[f"round_seconds_total {stage}"] for stage in ("prefill", "verify", "draft", "host")},
        "memory_mb": [round(memory[0]), round(max(memory)), round(memory[-1])],
        "memory_growth": growth(memory),
        "restart_s": restart_s,
        "cpu": cpu_name(),
    }


def show(found: dict[str, Any], seen: Seen) -> None:
    for name, value in found.items():
        if name != "checks":
            print(f"{name:16} {value}")
    for name, held in found["checks"].items():
        print(f"{'ok' if held else 'FAILED':16} {name}")
    for told in [*seen.broken[:5], *seen.wrong[:5]]:
        print(f"  {told}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*", help="of headlong serve, after --")
    args = parser.parse_args()
    flags = ["--rows", str(args.rows), *args.flags]
    served = Served(flags)
    try:
        before = served.metrics()["generation_tokens_total"]
        began = time.monotonic()
        seen, memory = asyncio.run(load(served, args))
        seconds = time.monotonic() - began
        after = settled(served)
        after["generation_tokens_total"] -= before
        restart_s = restarted(served, flags)
    finally:
        served.process.kill()
    found = {"clients": args.clients, "rows": args.rows, **report(seen, memory, after, restart_s, seconds)}
    show(found, seen)
    print(json.dumps(found))
    return 0 if all(found["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
