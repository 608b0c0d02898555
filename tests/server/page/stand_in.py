"""A stand-in for the server: it serves the real page, and answers it in ways that the real server never should."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

PAGE = Path(__file__).parents[3] / "headlong" / "server" / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
CUT = "cut"  # among chunks: the connection closes here
ABOUT = {"max_depth": 8, "drafts": True, "reason": "", "context": 2048, "version": "0"}


@dataclass(frozen=True)
class Refused:
    status: int
    body: str
    headers: dict[str, str] = field(default_factory=dict)


Chunk = dict[str, Any] | float | str  # seconds are waited
Reply = Iterable[Chunk] | Refused


def tokens(*pieces: tuple[str, int], part: str = "content", finish: str | None = None) -> Chunk:
    """One chunk of an answer: texts, each with the position of its draft."""
    origins = [{"text": text, "position": position} for text, position in pieces]
    delta = {part: "".join(text for text, _ in pieces)}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, "origins": origins}]}


def end(count: int, milliseconds: float, accepted: tuple[int, ...] = ()) -> Chunk:
    """The last chunk: what the answer took."""
    rounds = count - sum(accepted)
    speculative = {
        "requested": "mtp" if accepted else "none",
        "used": "mtp" if accepted else "none",
        "reason": "" if accepted else "the request asked for plain decoding",
        "depth": len(accepted),
        "rounds": rounds,
        "drafted": rounds * len(accepted),
        "accepted": sum(accepted),
        "accepted_by_position": accepted,
        "mean_length": count / rounds,
    }
    timings = {"predicted_n": count, "predicted_ms": milliseconds, "predicted_per_second": 1000 * count / milliseconds}
    usage = {"prompt_tokens": 9, "completion_tokens": count, "total_tokens": count + 9}
    return {"choices": [], "usage": usage, "speculative": speculative, "timings": timings}


class StandIn(ThreadingHTTPServer):
    """Answers every chat with what `reply` makes of its body; `bodies` are those it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.reset()
        Thread(target=self.serve_forever, daemon=True).start()

    def reset(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.hung_up = False  # whether a client went away in the middle
        self.reply: Callable[[dict[str, Any]], Reply] = lambda body: []

    def handle_error(self, request: Any, client_address: Any) -> None:
        self.hung_up = True


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.send(200, json.dumps({"data": [{"id": "stand-in", "headlong": ABOUT}]}), "application/json")
            return
        path = PAGE / ("index.html" if self.path == "/" else Path(self.path).name)
        if path.is_file():
            self.send(200, path.read_text("utf-8"), TYPES[path.suffix])
        else:
            self.send(404, "", "text/plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        reply = self.server.reply(body)
        if isinstance(reply, Refused):
            self.send(reply.status, reply.body, "application/json", reply.headers)
        else:
            self.stream(reply)

    def stream(self, reply: Iterable[Chunk]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for chunk in reply:
            if chunk == CUT:
                return
            if isinstance(chunk, float):
                time.sleep(chunk)
            else:
                self.write(chunk if isinstance(chunk, str) else json.dumps(chunk))
        self.write("[DONE]")

    def write(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def send(self, status: int, body: str, kind: str, headers: dict[str, str] | None = None) -> None:
        data = body.encode()
        self.send_response(status)
        own = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(data))}
        policy = {"Content-Security-Policy": "default-src 'self'"}
        for name, value in {**own, **policy, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
