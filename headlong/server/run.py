"""A server's life: bound, ready, draining, gone."""

import logging
import os
import socket
from types import FrameType

import uvicorn

from headlong.engine.engine import Engine
from headlong.errors import UserError
from headlong.server.app import make_app
from headlong.server.service import Service
from headlong.server.serving import Serving

LOG = logging.getLogger("headlong.server")
BACKLOG = 1024  # connections that the system may keep waiting


class Server(uvicorn.Server):
    """The first signal lets the answers under way end, the second ends the process where it is."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)  # nothing on disk waits to be written
        self.should_exit = self._service.stopping = True
        running = self._service.gate.inside
        LOG.info("stopping once %d answers are complete; a second signal stops at once", running)


def bind(serving: Serving) -> socket.socket:
    """A socket at the server's address, which does not listen yet."""
    bound = socket.socket(socket.AF_INET6 if ":" in serving.host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((serving.host, serving.port))
    except OSError as error:
        bound.close()
        where = f"{serving.host}:{serving.port}"
        raise UserError(
            f"{where} cannot be served on ({error.strerror}); choose others with --host or --port."
        ) from error
    return bound


def address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(engine: Engine, serving: Serving, bound: socket.socket) -> None:
    """Answer until a signal comes. The engine is closed afterwards."""
    app = make_app(engine, serving)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        backlog=BACKLOG,
    )
    LOG.info("%s is ready at %s", " or ".join(app.state.service.names), address(bound))
    Server(config, app.state.service).run(sockets=[bound])
    LOG.info("stopped")
