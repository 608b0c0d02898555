"""The server's door: who may come in, how much they may bring, and one line in the log for each."""

import hmac
import ipaddress
import logging
from http import HTTPStatus
from time import monotonic

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headlong.errors import HeadlongError
from headlong.server.metrics import Metrics
from headlong.server.refusal import Refusal, refusal_of
from headlong.server.respond import answer
from headlong.server.service import Visit
from headlong.server.serving import Serving

GUARDED = ("/v1", "/metrics")
LONGEST_LENGTH = 18  # digits of a body's length that are worth reading
LONGEST_USER = 64  # characters in the log
LONGEST_TOLD = 300  # of what clients write in paths and refusals
GONE = 499  # the client left before its answer was there, as nginx has it
LOG = logging.getLogger("headlong.server.access")


class Door:
    """Middleware around the whole app."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self.app, self.serving = app, serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        visit = scope["visit"] = Visit()
        status: int | None = None

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check(scope)
            await self.app(scope, _limited(receive, self.serving.max_body), sending)
            status = status or GONE
        except (Refusal, HeadlongError) as error:
            refusal = error if isinstance(error, Refusal) else refusal_of(error)
            visit.refused = refusal.message
            await answer(refusal.body(scope["path"]), refusal.status, refusal.headers)(scope, receive, sending)
        except ClientDisconnect:
            status = GONE
        finally:
            _record(scope, status or HTTPStatus.INTERNAL_SERVER_ERROR, visit)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if not self.serving.api_key:
            _check_host(headers.get("host", ""))
        elif scope["path"].startswith(GUARDED) and scope["method"] != "OPTIONS":
            self._check_key(headers)
        length = headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > LONGEST_LENGTH or int(length) > self.serving.max_body):
            raise _too_large(self.serving.max_body)

    def _check_key(self, headers: Headers) -> None:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode(), self.serving.api_key.encode()):
            found = "the API key is wrong" if given else "no API key was given"
            message = f"{found}; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            raise Refusal(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key")


def _check_host(host: str) -> None:
    """Where no key is asked for, a web page must not come in under a name of its own that leads to this machine."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        if name and name.lower() != "localhost":
            message = f"the server was called {name!r}; without an API key it answers to localhost and addresses only."
            raise Refusal(HTTPStatus.FORBIDDEN, message, code="host") from None


def _limited(receive: Receive, most: int) -> Receive:
    """`receive`, up to so many bytes of a body, whatever its headers said."""
    taken = 0

    async def receiving() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > most:
            raise _too_large(most)
        return message

    return receiving


def _too_large(most: int) -> Refusal:
    message = f"the body is longer than {most} bytes, which is the most here; send less."
    return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")


def _record(scope: Scope, status: int, visit: Visit) -> None:
    metrics: Metrics = scope["app"].state.service.metrics
    metrics.statuses[status] += 1
    if visit.prompt_tokens:
        metrics.request.observe(monotonic() - visit.began)
    LOG.info(_line(scope, status, visit))


def _line(scope: Scope, status: int, visit: Visit) -> str:
    client = scope["client"][0] if scope.get("client") else "-"
    path = _shown(scope["raw_path"].decode("latin-1"))
    parts = [client, scope["method"], path, str(status), f"{monotonic() - visit.began:.3f} s"]
    if visit.prompt_tokens:
        parts.append(f"{visit.prompt_tokens} prompt tokens")
    if visit.first is not None:
        parts.append(f"first after {visit.first - visit.began:.3f} s")
    if visit.tokens:
        parts.append(f"{visit.tokens} tokens, {visit.accepted} of {visit.drafted} drafts accepted")
    if visit.finish:
        parts.append(visit.finish)
    if visit.user:
        parts.append(f"user {visit.user[:LONGEST_USER]!r}")
    if visit.refused:
        parts.append(_shown(visit.refused))
    return " ".join(parts[:5]) + "".join(f", {part}" for part in parts[5:])


def _shown(text: str) -> str:
    """In one line and not endless: clients choose some of the words, and must not write lines of their own."""
    cut = text if len(text) <= LONGEST_TOLD else f"{text[:LONGEST_TOLD]}…"
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in cut)
