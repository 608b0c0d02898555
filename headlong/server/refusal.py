"""Refusals: what a client is told when there is no answer, and in which form."""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from headlong.errors import HeadlongError, QueueFull, UserError

RETRY_S = 1  # when to ask again if rows are taken
ANTHROPIC_PATH = "/v1/messages"
# The kinds of both APIs, by status; the first fits all others.
OPENAI_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
ANTHROPIC_KINDS = {
    **OPENAI_KINDS,
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


@dataclass(eq=False)
class Refusal(Exception):
    """One sentence for a client, with its HTTP status."""

    status: int
    message: str
    param: str | None = None  # the field that is at fault
    code: str | None = None  # for programs
    retry_s: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_s is None else {"retry-after": str(self.retry_s)}

    def body(self, path: str) -> dict[str, Any]:
        """The error as the API of a path has it."""
        if path.startswith(ANTHROPIC_PATH):
            kind = ANTHROPIC_KINDS.get(self.status, ANTHROPIC_KINDS[400])
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = OPENAI_KINDS.get(self.status, OPENAI_KINDS[400])
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refusal_of(error: HeadlongError) -> Refusal:
    """What a client may know of an error; what broke inside is for the log."""
    if isinstance(error, QueueFull):
        return too_many(str(error))
    if isinstance(error, UserError):
        return Refusal(HTTPStatus.BAD_REQUEST, str(error))
    return broken()


def too_many(message: str) -> Refusal:
    return Refusal(HTTPStatus.TOO_MANY_REQUESTS, message, code="queue_full", retry_s=RETRY_S)


def broken() -> Refusal:
    message = "something broke inside the server, and its log says what; ask again, or report it."
    return Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="internal_error")


def stopping() -> Refusal:
    message = "the server is stopping; ask again once it is back."
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, message, code="stopping", retry_s=RETRY_S)
