"""Bodies on the wire: read, checked against their schema, and refused by the name of the field that is wrong."""

import asyncio
import json
import re
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from headlong.server.refusal import Refusal

BODY_S = 30  # for a client to send what it asks
LONGEST_SHOWN = 60  # characters of a wrong value
SUBJECT = re.compile(r"^(Input|List|String|Dictionary) should")  # of pydantic's sentences
EXTRA, MISSING, NOT_JSON = "extra_forbidden", "missing", "json_invalid"


class Wire(BaseModel):
    """A part of a body. What it does not name is refused, and nothing is made of what has another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Body = TypeVar("Body", bound=Wire)


async def read(request: Request, schema: type[Body]) -> Body:
    """The body of a request; a Refusal says what is wrong with it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        found = f"is {kind}" if kind else "is missing"
        message = f"the content type {found}; send JSON, as application/json."
        raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, code="content_type")
    try:
        async with asyncio.timeout(BODY_S):
            raw = await request.body()
    except TimeoutError:
        message = f"the body did not come within {BODY_S} s; send it faster."
        raise Refusal(HTTPStatus.REQUEST_TIMEOUT, message, code="body_timeout") from None
    try:
        return schema.model_validate_json(raw)
    except ValidationError as error:
        raise _refusal(error, raw) from None


def _refusal(error: ValidationError, raw: bytes) -> Refusal:
    found = error.errors(include_url=False)
    if found[0]["type"] == NOT_JSON:
        reason = found[0]["ctx"]["error"]
        return Refusal(HTTPStatus.BAD_REQUEST, f"the body is not JSON ({reason}); send a JSON object.", code=NOT_JSON)
    data = json.loads(raw)
    paths = [_path(each, data) for each in found]
    path, worst = max(zip(paths, found, strict=True), key=_fit)
    param = ".".join(path)
    return Refusal(HTTPStatus.BAD_REQUEST, _sentence(worst, param or "the body"), param or None, worst["type"])


def _fit(pair: tuple[list[str], ErrorDetails]) -> tuple[bool, int, bool]:
    """Where several kinds were tried, the one that fits furthest is meant, and of those the one of the right type."""
    path, error = pair
    return error["type"] == EXTRA, len(path), not error["type"].endswith("_type")


def _sentence(error: ErrorDetails, param: str) -> str:
    if error["type"] == EXTRA:
        return f"{param} is not supported by this server; leave it out."
    if error["type"] == MISSING:
        return f"{param} is missing; give it."
    if error["type"] == "union_tag_invalid":
        field, tag, tags = (error["ctx"][name] for name in ("discriminator", "tag", "expected_tags"))
        return f"{param}.{field.strip(chr(39))} is {tag!r}; it should be one of {tags}."
    if error["type"] == "value_error":
        return f"{param} {error['ctx']['error']}"
    shown = json.dumps(error["input"], ensure_ascii=False, default=repr)
    shown = shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}…"
    return f"{param} is {shown}; {SUBJECT.sub('it should', error['msg'])}."


def _path(error: ErrorDetails, data: Any) -> list[str]:
    """The way to a field, without the names that pydantic gives to the kinds it tried."""
    path = []
    for place, step in enumerate(error["loc"]):
        if _has(data, step):
            data = data[step]
            path.append(str(step))
        elif place == len(error["loc"]) - 1 and error["type"] == MISSING:
            path.append(str(step))
    return path


def _has(data: Any, step: int | str) -> bool:
    if isinstance(data, list):
        return isinstance(step, int) and step < len(data)
    return isinstance(data, dict) and step in data
