"""Server options and limits. Imports nothing heavy, so that they can be checked at once."""

import re
import socket
from dataclasses import dataclass, field
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from vitrail.errors import ConfigError

LogFormat = Literal["text", "json", "off"]
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
HOST_NAME = re.compile(r"[\w.-]+", re.ASCII)
MAX_PIXELS = 64 * 2**20  # the decoder's own limit: 8192 x 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the server accepts. Anything above is rejected at once, so memory stays bounded."""

    body: int = 20 * 2**20  # bytes per request
    images: int = 64  # per request
    pixels: int = MAX_PIXELS  # per image
    queue: int = 256  # images admitted and not yet answered
    heavy: int = 8  # /explain, /attention and /teach requests admitted and not yet answered
    memory: int = 256 * 2**20  # bytes of all admitted requests
    timeout: float = 30.0  # seconds for the body to arrive, and again for the response

    def __post_init__(self) -> None:
        for name in ("body", "images", "pixels", "queue", "heavy", "timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be greater than 0")
        if self.images > self.queue:
            raise ConfigError(
                f"a request of {self.images} images never fits into a queue of {self.queue}; "
                "allow fewer images per request, or a longer queue"
            )
        if self.body > self.memory:
            raise ConfigError(
                f"a body of {self.body:,} bytes exceeds the {self.memory:,} bytes that all "
                "requests share; allow smaller bodies"
            )
        if self.pixels > MAX_PIXELS:
            raise ConfigError(
                f"images of {self.pixels:,} pixels are never decoded; give at most {MAX_PIXELS}"
            )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of `vitrail serve`."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    token: str = ""  # bearer token that clients must send; empty: none
    allow_origins: tuple[str, ...] = ()  # other sites whose pages may send requests; "*" for all
    allow_hosts: tuple[str, ...] = ()  # accepted Host headers besides the server's own
    allow_teach: bool = False  # clients may add classes
    teach_to: Path | None = None  # where taught models are saved
    using: str | None = None  # images of a model's known classes, for teaching
    examples: str = ""  # data set of the example images; empty: see `examples_from`; or "none"
    batch_size: int = 0  # images per batch; 0: measured
    grace: float = 30.0  # seconds to finish admitted requests on shutdown
    watchdog: float = 120.0  # seconds after which a thread at the same work counts as stuck
    log: LogFormat = "text"
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port={self.port} is out of range; give 1 to 65535, or 0 for any")
        if self.batch_size < 0 or self.grace < 0:
            raise ConfigError("batch and grace must be 0 or more")
        if self.watchdog < self.limits.timeout:
            raise ConfigError(
                f"watchdog={self.watchdog:g} would abandon work that clients still wait for; "
                f"give at least timeout={self.limits.timeout:g}"
            )
        if self.token and not (self.token.isascii() and self.token.isprintable()):
            raise ConfigError("the token must consist of printable ASCII characters")
        for name in self.allow_hosts:
            if not HOST_NAME.fullmatch(name) and not is_ip_address(name):
                raise ConfigError(
                    f"{name!r} is not a host name; --allow-host takes one such as "
                    "example.org, without http:// and port"
                )
        if self.teach_to is not None and not self.allow_teach:
            raise ConfigError("--teach-to saves taught models; it needs --allow-teach")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        return is_ip_address(self.host) and ip_address(self.host).is_loopback

    @property
    def is_public(self) -> bool:
        """Whether every host that can reach the machine may use the server."""
        return not self.is_loopback and not self.token

    @cached_property
    def host_names(self) -> frozenset[str]:
        """Accepted Host headers; off loopback, IP addresses are accepted besides.

        Cached, because a machine's names may need the DNS.
        """
        names = {*LOOPBACK_NAMES, self.host, *self.allow_hosts}
        if not self.is_loopback:
            names |= {socket.gethostname(), socket.getfqdn()}
        return frozenset(name.lower() for name in names if name)

    def accepts_host(self, name: str) -> bool:
        """Whether a request with this Host header is answered.

        With DNS rebinding, a foreign web page resolves its own name to this machine and then
        counts as same-origin. It cannot know the token, so the check is for servers without one.
        """
        if self.token or name in self.host_names:
            return True
        return not self.is_loopback and is_ip_address(name)


def is_ip_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def parse_models(arguments: tuple[str, ...]) -> dict[str, str]:
    """Map names to references, from arguments such as `runs/a` and `digits=runs/b`."""
    if not arguments:
        raise ConfigError("no model to serve; give a bundle, a weights file, or hf:owner/name")
    references: dict[str, str] = {}
    for argument in arguments:
        name, equals, reference = argument.partition("=")
        if not equals or Path(argument).exists():
            path = Path(argument)
            name, reference = path.resolve().name if path.exists() else argument, argument
            name = name.rpartition("/")[2].rpartition(":")[2].removesuffix(".onnx")
        if not (name and reference and name.isprintable()):
            raise ConfigError(
                f"{argument!r} is not a model; write runs/first, or digits=runs/first"
            )
        if name in references:
            raise ConfigError(
                f"two models are called {name!r}: {references[name]} and {reference}; "
                f"give one another name, such as other={reference}"
            )
        references[name] = reference
    return references
