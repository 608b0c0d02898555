"""The endpoints: what each takes, does and gives. Routes and the OpenAPI description are made of this list."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from headlong.server.anthropic.messages import MessageWriter
from headlong.server.anthropic.schema import CountBody, MessagesBody
from headlong.server.openai.chat import ChatWriter
from headlong.server.openai.chat_schema import ChatBody
from headlong.server.openai.completions import CompletionWriter
from headlong.server.openai.completions_schema import CompletionBody
from headlong.server.openai.responses import ResponseWriter
from headlong.server.openai.responses_schema import ResponsesBody
from headlong.server.refusal import stopping
from headlong.server.respond import answer, respond
from headlong.server.service import Service
from headlong.server.wire import Wire, read
from headlong.version import __version__

PROMETHEUS = "text/plain; version=0.0.4"

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """One path."""

    path: str
    handler: Handler
    summary: str
    body: type[Wire] | None = None  # of a POST; others are GETs
    streams: bool = False
    text: bool = False  # it answers in plain text

    @property
    def method(self) -> str:
        return "POST" if self.body else "GET"

    @property
    def described(self) -> str:
        """The path as OpenAPI writes it, without the kinds of its parameters."""
        return re.sub(r":\w+}", "}", self.path)


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def chat_completions(request: Request) -> Response:
    service = service_of(request)
    body = await read(request, ChatBody)
    asked = body.asked()
    writer = ChatWriter(service.check_model(body.model), service.engine.text, asked.answers, body.told)
    return await respond(request, asked, writer, bool(body.stream))


async def completions(request: Request) -> Response:
    service = service_of(request)
    body = await read(request, CompletionBody)
    asked = body.asked()
    name = service.check_model(body.model)
    writer = CompletionWriter(name, service.engine.text, len(body.prompts), asked.answers, body.told)
    return await respond(request, asked, writer, bool(body.stream))


async def responses(request: Request) -> Response:
    service = service_of(request)
    body = await read(request, ResponsesBody)
    writer = ResponseWriter(service.check_model(body.model), body)
    return await respond(request, body.asked(), writer, bool(body.stream))


async def messages(request: Request) -> Response:
    service = service_of(request)
    body = await read(request, MessagesBody)
    writer = MessageWriter(service.check_model(body.model))
    return await respond(request, body.asked(), writer, bool(body.stream))


async def count_tokens(request: Request) -> Response:
    service = service_of(request)
    body = await read(request, CountBody)
    service.check_model(body.model)
    with service.enter(body.asked()):
        ready = await service.make_ready(body.asked())
    return answer({"input_tokens": len(ready.prompts[0])})


async def models(request: Request) -> Response:
    service = service_of(request)
    return answer({"object": "list", "data": [_model(service, name) for name in service.names]})


async def model(request: Request) -> Response:
    service = service_of(request)
    return answer(_model(service, service.check_model(request.path_params["name"])))


def _model(service: Service, name: str) -> dict[str, Any]:
    limits = service.engine.limits
    return {
        "id": name,
        "object": "model",
        "created": service.began,
        "owned_by": "headlong",
        "headlong": {
            "max_depth": limits.depth,
            "drafts": not service.engine.no_draft_reason,
            "reason": service.engine.no_draft_reason,
            "context": limits.context,
            "version": __version__,
        },
    }


async def health(request: Request) -> Response:
    """The process runs."""
    return answer({"status": "ok", "version": __version__})


async def ready(request: Request) -> Response:
    """It takes requests."""
    service = service_of(request)
    if service.stopping:
        raise stopping()
    return answer({"status": "ready", "model": service.names[0]})


async def metrics(request: Request) -> Response:
    service = service_of(request)
    return PlainTextResponse(service.metrics.text(service.engine, service.names[0]), media_type=PROMETHEUS)


ENDPOINTS = (
    Endpoint("/v1/chat/completions", chat_completions, "Go on with a conversation (OpenAI).", ChatBody, streams=True),
    Endpoint("/v1/completions", completions, "Go on with a text (OpenAI).", CompletionBody, streams=True),
    Endpoint("/v1/responses", responses, "Go on with a conversation (OpenAI).", ResponsesBody, streams=True),
    Endpoint("/v1/messages", messages, "Go on with a conversation (Anthropic).", MessagesBody, streams=True),
    Endpoint("/v1/messages/count_tokens", count_tokens, "The tokens of a conversation (Anthropic).", CountBody),
    Endpoint("/v1/models", models, "The model that is served."),
    Endpoint("/v1/models/{name:path}", model, "The model that is served, by its name."),
    Endpoint("/health", health, "Whether the process runs."),
    Endpoint("/ready", ready, "Whether requests are taken."),
    Endpoint("/metrics", metrics, "Metrics, as Prometheus reads them.", text=True),
)
