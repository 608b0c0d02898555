"""Who comes in and with how much; what those hear who do not; and that nothing of theirs stays."""

import http.client
import json
import logging
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest

from headlong.backends.fake import FakeBackend, fake_limits
from headlong.engine.engine import Engine
from headlong.engine.template import ChatTemplate
from headlong.engine.text import Text
from headlong.errors import UserError
from headlong.server import wire
from headlong.server.serving import Serving
from headlong.settings import Settings
from tests.engine.conftest import byte_tokenizer
from tests.server.conftest import QWEN_LIKE, running
from tests.server.test_completions import ASK, CHAT, chunks
from tests.server.test_openai_client import until

OPEN = ("/", "/page/page.js", "/health", "/ready", "/docs", "/openapi.json")
GUARDED = ("/v1/models", "/metrics")


def told(response):
    return response.json()["error"]["message"]


def test_a_key_guards_all_that_works(serve):
    server = serve(api_key="secret")
    assert [server.get(path).status_code for path in OPEN] == [200] * len(OPEN)
    for path in GUARDED:
        assert server.get(path).status_code == 401
        assert server.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
        assert server.get(path, headers={"authorization": "secret"}).status_code == 401
        assert server.get(path, headers={"authorization": "bearer secret"}).status_code == 200
        assert server.get(path, headers={"x-api-key": "secret"}).status_code == 200
    refused = server.post(CHAT, {"messages": ASK})
    assert told(refused) == "no API key was given; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
    assert server.get("/v1/nothing").status_code == 401


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org"])
def test_other_machines_need_a_key(host):
    with pytest.raises(UserError, match=f"{host} can be reached from other machines; give a key with --api-key"):
        Serving(host=host)
    assert Serving(host=host, api_key="k").api_key


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_needs_none(host):
    assert Serving(host=host).is_local


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:80", 200),
        ("LocalHost:80", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
    ],
)
def test_a_name_of_somebody_elses_is_refused_without_a_key(server, serve, host, status):
    assert server.get("/v1/models", headers={"host": host}).status_code == status
    with_key = serve(api_key="k").get("/v1/models", headers={"host": host, "x-api-key": "k"})
    assert with_key.status_code == 200


def test_pages_of_other_origins_are_let_in_by_name(server, serve):
    asks = {"origin": "https://friend.example", "access-control-request-method": "POST"}
    other = httpx.options(server.url + CHAT, headers=asks)
    assert "access-control-allow-origin" not in other.headers
    friendly = serve(cors_origins=("https://friend.example",))
    let = httpx.options(friendly.url + CHAT, headers={**asks, "access-control-request-headers": "content-type"})
    assert let.headers["access-control-allow-origin"] == "https://friend.example"
    stranger = httpx.options(friendly.url + CHAT, headers={**asks, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in stranger.headers


def test_a_body_has_a_longest(serve):
    server = serve(max_body=1000)
    long = json.dumps({"messages": [{"role": "user", "content": "x" * 2000}]}).encode()
    says = "the body is longer than 1000 bytes, which is the most here; send less."
    header = {"content-type": "application/json"}
    declared = httpx.post(server.url + CHAT, content=long, headers=header)
    streamed = httpx.post(server.url + CHAT, content=iter([long[:500], long[500:]]), headers=header)
    for refused in (declared, streamed):
        assert (refused.status_code, told(refused)) == (413, says)
    assert server.post(CHAT, {"messages": ASK, "max_tokens": 1}).status_code == 200


def test_a_prompt_has_a_longest(serve):
    server = serve(max_prompt=20)
    refused = server.post(CHAT, {"messages": [{"role": "user", "content": "word " * 40}]})
    assert refused.status_code == 400
    assert "tokens and may have 20 here; shorten it." in told(refused)
    assert "together more than the context of 2048" in told(server.post(CHAT, {"messages": ASK, "max_tokens": 2048}))


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (CHAT, b"{", 400, "the body is not JSON"),
        (CHAT, b"[]", 400, "the body is []; it should be an object."),
        (CHAT, b"{}", 400, "messages is missing; give it."),
        (CHAT, b'{"messages": []}', 400, "messages is []; it should have at least 1 item"),
        (
            CHAT,
            b'{"messages": [{"role": "user", "content": "a"}], "stop": [%s"a"]}' % (b'"a",' * 16),
            400,
            'stop is ["a", "a", "a", "a", "a", "a", "a", "a", "a", "a", "a", "a",…; it should have at most 16 items',
        ),
        (CHAT, b'{"messages": [{"role": "cat", "content": ""}]}', 400, "messages.0.role is 'cat'; it should be one of"),
        (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "the body is not JSON"),
        (CHAT, b"[" * 100_000, 400, "the body is not JSON"),
        (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "seed": 1.5}', 400, "seed is 1.5; it should be"),
        (
            CHAT,
            b'{"messages": [{"role": "user", "content": "a"}], "top_p": NaN}',
            400,
            "top_p is nan; it must be between 0 and 1.",
        ),
        (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "stop": ""}', 400, "a stop string is empty"),
        (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"a": 1}}', 400, "logit_bias has 'a'"),
        (
            CHAT,
            b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"99999": 1}}',
            400,
            "logit_bias holds token 99999",
        ),
        (
            CHAT,
            b'{"messages": [{"role": "user", "content": "a"}], "stream_options": {}}',
            400,
            "stream_options is for streams",
        ),
        (
            CHAT,
            b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": 1}}',
            400,
            "the model's chat template does not ask for x",
        ),
        (
            CHAT,
            b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "x", "function": '
            b'{"name": "f", "arguments": "{\\"a\\": \\"\\\\ud83d\\"}"}}]}]}',
            400,
            "the arguments of a call of 'f' are not a JSON object",
        ),
        ("/v1/completions", b'{"prompt": []}', 400, "prompt is []; it should have at least 1 item"),
        ("/v1/completions", b'{"prompt": ""}', 400, "the prompt has no tokens"),
        (
            "/v1/completions",
            b'{"prompt": "a", "echo": true}',
            400,
            "echo is not supported by this server; leave it out.",
        ),
        ("/v1/completions", b'{"prompt": [1, 99999]}', 400, "the prompt holds token 99999"),
        ("/v1/responses", b'{"input": "a", "store": true}', 400, "store is true; it should be False."),
        ("/v1/responses", b'{"input": [{"type": "web"}]}', 400, "input.0 is of type 'web'"),
    ],
)
def test_what_is_wrong_is_named(server, path, body, status, says):
    got = httpx.post(server.url + path, content=body, headers={"content-type": "application/json"})
    assert got.status_code == status
    assert told(got).startswith(says)
    assert told(got).endswith(".")
    assert "Traceback" not in got.text


def test_a_client_writes_no_line_of_its_own_in_the_log(server, caplog):
    caplog.set_level(logging.INFO, "headlong.server.access")
    server.post(CHAT, {"messages": ASK, "x\n12:00:00 a line\x1b[31m": 1})
    server.post(CHAT, {"messages": ASK, "model": "m" * 5000})
    server.get("/" + "p" * 5000)
    lines = [record.getMessage() for record in caplog.records if record.name == "headlong.server.access"]
    assert any("x\\n12:00:00 a line\\x1b[31m is not supported" in line for line in lines)
    assert all(line.isprintable() and len(line) < 1000 for line in lines)


def test_other_content_is_refused(server):
    got = httpx.post(server.url + CHAT, content=b"{}", headers={"content-type": "text/plain"})
    assert (got.status_code, told(got)) == (415, "the content type is text/plain; send JSON, as application/json.")


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/page/../app.py",
        "/page/%2e%2e%2fapp.py",
        "/page/.hidden",
        "/page/",
        "/page/%00",
        "/page/" + "a" * 5000,
    ],
)
def test_there_is_nothing_elsewhere(server, path):
    host, port = urlsplit(server.url).netloc.split(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.request("GET", path)  # as it is, where httpx would tidy it up
    got = connection.getresponse()
    assert got.status == 404
    assert json.loads(got.read())["error"]["type"] == "not_found_error"
    connection.close()


def test_the_page_and_the_description_ask_nothing_of_elsewhere(server):
    for path in ("/", "/docs"):
        got = server.get(path)
        assert got.headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in got.headers["content-security-policy"]
        assert "://" not in got.text.replace("http://www.w3.org", "")
    assert server.get("/page/page.js").headers["content-type"].startswith("text/javascript")
    described = server.get("/openapi.json").json()
    assert set(described["paths"]) >= {CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/metrics", "/ready"}


def test_a_full_house_says_when_to_come_back(engine):
    """As many answers run or wait as may; the next is refused at once, and taken once there is room."""
    with running(engine, max_concurrent=2) as server:
        long = {"messages": ASK, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", server.url + CHAT, json={**long, "n": 2}, timeout=60) as first:
            lines = first.iter_lines()  # closed where nobody holds it
            next(lines)
            refused = server.post(CHAT, {"messages": ASK})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert told(refused) == "2 answers run or wait and 2 may; try again later."
            assert refused.json()["error"]["type"] == "rate_limit_error"
        until(lambda: server.service.gate.inside == 0)
        assert server.post(CHAT, {"messages": ASK, "max_tokens": 1}).status_code == 200
        never = server.post(CHAT, {"messages": ASK, "n": 3})
        assert (never.status_code, told(never)) == (
            400,
            "3 answers were asked for and 2 may run or wait here; ask for fewer.",
        )


def test_a_request_has_its_time(serve):
    server = serve(request_s=0.3)
    began = time.monotonic()
    got = server.post(CHAT, {"messages": ASK, "max_tokens": 1900, "ignore_eos": True}).json()
    assert got["choices"][0]["finish_reason"] == "length"
    assert 0 < got["usage"]["completion_tokens"] < 1900
    assert time.monotonic() - began < 30


def test_a_client_that_leaves_before_its_answer_frees_its_row(server):
    """Not streamed: the connection is closed while the server works."""
    host, port = urlsplit(server.url).netloc.split(":")
    body = json.dumps({"messages": ASK, "max_tokens": 1900, "ignore_eos": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.replace("host: x", "host: localhost").encode() + body)
        until(lambda: server.engine.load.running == 1)
    until(lambda: not server.engine.busy)
    assert server.service.gate.inside == 0
    assert server.engine.totals.requests["cancelled"] >= 1


class Faulty(FakeBackend):
    def round(self, plan):
        if len(self.rounds) >= 3:
            raise RuntimeError("a secret of the inside")
        return super().round(plan)


def test_what_breaks_inside_stays_inside(caplog):
    text = Text(byte_tokenizer(), ChatTemplate(QWEN_LIKE, {}))
    limits = fake_limits(rows=2, context=512, page=64, chunk=64, vocab=300)
    with (
        Engine(Faulty(lambda history: 7, limits=limits), text, "faulty", (256,), Settings()) as engine,
        running(engine) as server,
    ):
        asked = {"messages": ASK, "max_tokens": 200, "speculative": {"kind": "none"}}
        got = server.post(CHAT, asked)
        assert got.status_code == 500
        assert got.json()["error"]["code"] == "internal_error"
        assert "secret" not in got.text
        streamed = chunks(server.post(CHAT, {**asked, "stream": True}))
        assert streamed[-1]["error"]["code"] == "internal_error"
        assert "secret" not in str(streamed)
        events = server.post("/v1/messages", {**asked, "stream": True}).text
        assert '"type":"api_error"' in events.split("event: error")[1]
        assert server.get("/health").status_code == 200
    assert "a secret of the inside" in caplog.text


def test_a_mistake_of_ours_is_told_without_its_trace(server, monkeypatch, caplog):
    monkeypatch.setattr(server.service, "check_model", lambda name: 1 / 0)
    with caplog.at_level(logging.INFO):
        got = server.post(CHAT, {"messages": ASK})
    assert got.status_code == 500
    assert got.json()["error"]["message"].startswith("something broke inside the server")
    until(lambda: "ZeroDivisionError" in caplog.text)  # it is logged after the answer was sent
    assert any(" POST /v1/chat/completions 500 " in message for message in caplog.messages)


def test_a_body_that_does_not_come_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr(wire, "BODY_S", 0.1)
    host, port = urlsplit(server.url).netloc.split(":")
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode() + b'{"mess')
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_threads_at_once_get_what_each_gets_alone(server):
    """Different requests side by side; answers do not depend on who else is there."""
    bodies = [
        {
            "messages": [{"role": "user", "content": f"Count to {place}."}],
            "max_tokens": 20,
            "temperature": place % 3 / 2,
            "seed": place,
        }
        for place in range(12)
    ]
    alone = [server.post(CHAT, body).json()["choices"] for body in bodies]
    together = [None] * len(bodies)

    def ask(place):
        together[place] = server.post(CHAT, bodies[place]).json()["choices"]

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
