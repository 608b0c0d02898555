"""The real server over the default model, on a loopback port."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest
import uvicorn

import headlong
from headlong.backends.fake import FakeBackend, fake_limits
from headlong.engine.engine import Engine
from headlong.engine.template import ChatTemplate
from headlong.engine.text import Text
from headlong.server.app import make_app
from headlong.server.run import address, bind
from headlong.server.service import Service
from headlong.server.serving import Serving
from headlong.settings import Settings
from tests.engine.conftest import END, byte_tokenizer

PATIENCE = 60  # seconds after which a test gives up on what should come soon


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    url: str
    service: Service
    client: httpx.Client

    @property
    def engine(self) -> Engine:
        return self.service.engine

    def post(self, path: str, body: object, **options: object) -> httpx.Response:
        return self.client.post(self.url + path, json=body, **options)

    def get(self, path: str, **options: object) -> httpx.Response:
        return self.client.get(self.url + path, **options)


class Quiet(uvicorn.Server):
    """Says when it answers; signals are the tests' own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answers = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answers.set()


@contextmanager
def running(engine: Engine, **serving: object) -> Iterator[Running]:
    """A server in a thread of its own. Its engine is the caller's to close."""
    chosen = Serving(port=0, **serving)
    bound = bind(chosen)
    app = make_app(engine, chosen)
    server = Quiet(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
    thread.start()
    try:
        assert server.answers.wait(PATIENCE)
        with httpx.Client(timeout=PATIENCE, verify=False) as client:  # making a client that could is slow
            yield Running(address(bound), app.state.service, client)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        bound.close()


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with headlong.load(rows=4, queue=64) as engine:
        yield engine


@pytest.fixture(scope="session")
def server(engine: Engine) -> Iterator[Running]:
    with running(engine) as made:
        yield made


@pytest.fixture
def serve(engine: Engine) -> Iterator[Callable[..., Running]]:
    """A server with limits of its own, over the same engine."""
    with contextlib.ExitStack() as stack:
        yield lambda **serving: stack.enter_context(running(engine, **serving))


QWEN_LIKE = """{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif -%}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}<function={{ call.function.name }}>
    {{- call.function.arguments | tojson }}{% endfor %}
{%- endfor %}{% if thinking %}<assistant><think>
{% else %}<assistant>{% endif %}"""
SPOKEN, THINKS = "<assistant>", "<think>\n"


def speaks(answer: str, *, right: tuple[bool, ...] = (True,), template: str = QWEN_LIKE, rows: int = 4) -> Engine:
    """An engine that answers every conversation with the same text, one token a byte, in rounds of several."""
    text = Text(byte_tokenizer(), ChatTemplate(template, {}))
    end, marks, said = text.encode(END)[0], text.encode(SPOKEN), text.encode(answer)

    def script(history: tuple[int, ...]) -> int:
        begins = max(at for at in range(len(history)) if list(history[at : at + len(marks)]) == marks) + len(marks)
        opened = not answer.startswith(THINKS) and text.decode(history[begins:]).startswith(THINKS)
        place = len(history) - begins - len(THINKS) * opened
        return said[place] if place < len(said) else end

    limits = fake_limits(rows=rows, context=4096, page=64, chunk=64, vocab=300)
    return Engine(FakeBackend(script, right=right, limits=limits), text, "spoken", (end,), Settings(queue=16))


@pytest.fixture
def spoken() -> Iterator[Callable[..., Running]]:
    """A server whose model says what it is told."""
    with contextlib.ExitStack() as stack:

        def make(answer: str, serving: dict[str, object] | None = None, **options: object) -> Running:
            engine = stack.enter_context(speaks(answer, **options))
            return stack.enter_context(running(engine, **(serving or {})))

        yield make
