"""Every option of a server, its default and its check, in one frozen dataclass."""

import ipaddress
from dataclasses import dataclass

from headlong.engine.request import Sampling
from headlong.errors import UserError

LEAST = {"port": 0, "max_body": 1, "max_prompt": 0, "max_concurrent": 0, "request_s": 0.0}


@dataclass(frozen=True)
class Serving:
    """How an engine is served. How it runs is in `Settings`."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: one that is free
    api_key: str = ""  # empty: none is asked for
    names: tuple[str, ...] = ()  # the model is known by; none: the engine's own
    cors_origins: tuple[str, ...] = ()  # web pages from elsewhere that may use the server
    max_body: int = 4 << 20  # bytes of a request
    max_prompt: int = 0  # tokens; 0: as many as the context holds
    max_concurrent: int = 0  # answers that run or wait; 0: all that the engine takes
    request_s: float = 600.0  # after which an answer ends where it is; 0: never
    depth: int | None = None  # drafts a round for requests that do not say; None: chosen for you
    temperature: float = 0.0  # for requests that do not say

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if not value >= least:  # true for NaN too
                raise UserError(f"{name} is {value}; it must be at least {least:g}.")
        Sampling(temperature=self.temperature)
        if self.port > 65535:
            raise UserError(f"port is {self.port}; it must be at most 65535.")
        if self.api_key and (not self.api_key.isascii() or not self.api_key.isprintable() or " " in self.api_key):
            raise UserError("the API key holds spaces or other characters than ASCII's; choose one without.")
        if not self.is_local and not self.api_key:
            raise UserError(
                f"{self.host} can be reached from other machines; give a key with --api-key or HEADLONG_API_KEY, "
                "or serve on 127.0.0.1."
            )

    @property
    def is_local(self) -> bool:
        """Whether only programs of this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
