"""The app: endpoints, the page and the door, around one engine."""

import asyncio
import mimetypes
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

from headlong.engine.engine import Engine
from headlong.server import openapi
from headlong.server.api import ENDPOINTS
from headlong.server.door import Door
from headlong.server.pulse import Pulse
from headlong.server.refusal import Refusal, broken
from headlong.server.respond import answer
from headlong.server.service import Service
from headlong.server.serving import Serving

PAGE = Path(__file__).parent / "page"
# The page loads nothing from elsewhere, and nobody else frames it.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def make_app(engine: Engine, serving: Serving) -> Starlette:
    """The app lets go of the engine when it shuts down."""
    routes = [Route(each.path, each.handler, methods=[each.method]) for each in ENDPOINTS]
    routes += [
        Route("/", _index),
        Route("/page/{name}", _page_file),
        Route("/docs", _docs),
        Route("/openapi.json", _description),
    ]
    middleware = [Middleware(Door, serving=serving)]
    if serving.cors_origins:
        middleware.insert(0, _cors(serving.cors_origins))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _http_error, Exception: _fault},
        lifespan=_lifespan,
    )
    app.state.service = Service(engine, serving)
    return app


def _cors(origins: Sequence[str]) -> Middleware:
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["retry-after"],
    )


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    pulse = asyncio.create_task(Pulse(app.state.service.engine).beat())
    try:
        yield
    finally:
        pulse.cancel()
        await asyncio.to_thread(app.state.service.engine.close)


async def _index(request: Request) -> Response:
    return _file("index.html")


async def _page_file(request: Request) -> Response:
    return _file(request.path_params["name"])


def _file(name: str) -> Response:
    """A file of the page's folder, and of no other."""
    if name.startswith(".") or name not in {path.name for path in PAGE.iterdir()}:
        raise HTTPException(HTTPStatus.NOT_FOUND)
    return FileResponse(PAGE / name, media_type=mimetypes.guess_type(name)[0], headers=PAGE_HEADERS)


async def _description(request: Request) -> Response:
    return answer(openapi.description(request.app.state.service.names[0]))


async def _docs(request: Request) -> Response:
    return HTMLResponse(openapi.page(openapi.description(request.app.state.service.names[0])), headers=PAGE_HEADERS)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: paths and methods that are not there."""
    status = error.status_code if isinstance(error, HTTPException) else HTTPStatus.INTERNAL_SERVER_ERROR
    path, method = request.url.path, request.method
    told = {
        HTTPStatus.NOT_FOUND: f"there is nothing at {path}; /docs lists what is here.",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{path} does not take {method}; /docs says what it takes.",
    }
    refusal = Refusal(status, told.get(HTTPStatus(status), f"{HTTPStatus(status).phrase.lower()}."))
    headers = dict(getattr(error, "headers", None) or {})
    return answer(refusal.body(path), status, headers)


async def _fault(request: Request, error: Exception) -> Response:
    """Something of ours broke. The log tells what; the client learns no more than that."""
    refusal = broken()
    return answer(refusal.body(request.url.path), refusal.status)
