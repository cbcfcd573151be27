"""Server options and limits. Imports nothing heavy, so that they can be checked at once."""

import os
import re
import socket
from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from vitrail.errors import ConfigError
from vitrail.formatting import MIB

LogFormat = Literal["text", "json", "off"]
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
HOST_NAME = re.compile(r"[\w.-]+", re.ASCII)
MAX_PIXELS = 64 * 2**20  # the decoder's own limit: 8192 x 8192
MAX_MEMORY = 256 * MIB  # of the bodies of all admitted requests
MAX_HEAVY = 8  # /explain, /attention and /teach requests admitted and not yet answered


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of `vitrail serve`. Requests beyond a limit are rejected, so memory is bounded."""

    host: str = "127.0.0.1"
    """Address to bind; 0.0.0.0 allows access from other machines: set a --token."""
    port: int = 8000
    """Port; 0 selects a free one."""
    batch: int = 0
    """Maximum batch size; 0 tunes it at startup."""
    queue: int = 256
    """Maximum number of queued images; requests beyond it get status 503."""
    timeout: float = 30.0
    """Time limit in seconds to receive a request, and the same again to process it."""
    grace: float = 30.0
    """Seconds to finish open requests at shutdown."""
    watchdog: float = 120.0
    """Seconds after which a batch, explanation or teaching request is considered stuck and its
    thread is replaced; at least --timeout. With three stuck threads, or one stuck for five times as
    long, the server exits with status 70 so that a supervisor can restart it."""
    max_megabytes: float = 20.0
    """Maximum size of a request."""
    max_images: int = 64
    """Maximum number of images per request."""
    max_pixels: int = MAX_PIXELS
    """Maximum number of pixels per image."""
    token: str | None = None
    """Bearer token that clients must send; prefer the environment variable VITRAIL_TOKEN."""
    allow_origin: tuple[str, ...] = ()
    """Origins that may send requests from a browser (CORS), such as https://example.org."""
    allow_host: tuple[str, ...] = ()
    """Accepted Host headers, such as example.org behind a proxy. Without a token, only IP addresses
    and the machine's own names are accepted by default, to prevent DNS rebinding."""
    allow_teach: bool = False
    """Let clients teach classes from a few images."""
    teach_to: Path | None = None
    """Folder where taught classes are saved as a bundle; may be the model's own if it stores
    training statistics."""
    using: str | None = None
    """Teaching: dataset with images of the existing classes, if the model stores no statistics."""
    examples: str = ""
    """Dataset for the example images on the web page, or none (default: the training data, while
    only this machine can connect)."""
    log: LogFormat = "text"
    """Format of the access log on standard error."""

    def __post_init__(self) -> None:
        for name in ("queue", "timeout", "max_megabytes", "max_images", "max_pixels"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be greater than 0")
        if self.max_images > self.queue:
            raise ConfigError(
                f"a request of {self.max_images} images never fits into a queue of {self.queue}; "
                "allow fewer images per request, or a longer queue"
            )
        if self.max_body > MAX_MEMORY:
            raise ConfigError(
                f"a body of {self.max_body:,} bytes exceeds the {MAX_MEMORY:,} bytes that all "
                "requests share; allow smaller bodies"
            )
        if self.max_pixels > MAX_PIXELS:
            raise ConfigError(
                f"max_pixels={self.max_pixels} exceeds the decoder's limit of {MAX_PIXELS}"
            )
        if not 0 <= self.port <= 65_535:
            raise ConfigError(
                f"port={self.port} is out of range; use 1 to 65535, or 0 for any free port"
            )
        if self.batch < 0 or self.grace < 0:
            raise ConfigError("batch and grace must be 0 or more")
        if self.watchdog < self.timeout:
            raise ConfigError(
                f"watchdog={self.watchdog:g} would abandon work that clients still wait for; "
                f"use at least timeout={self.timeout:g}"
            )
        if self.token and not (self.token.isascii() and self.token.isprintable()):
            raise ConfigError("the token must consist of printable ASCII characters")
        for name in self.allow_host:
            if not HOST_NAME.fullmatch(name) and not is_ip_address(name):
                raise ConfigError(
                    f"{name!r} is not a host name; --allow-host takes one such as "
                    "example.org, without http:// and port"
                )

    @cached_property
    def max_body(self) -> int:
        """Largest request body in bytes."""
        return round(self.max_megabytes * MIB)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        return is_ip_address(self.host) and ip_address(self.host).is_loopback

    @cached_property
    def host_names(self) -> frozenset[str]:
        """Accepted Host headers; unless bound to loopback, IP addresses are accepted too.

        Cached, because looking up a machine's names may query the DNS.
        """
        names = {*LOOPBACK_NAMES, self.host, *self.allow_host}
        if not self.is_loopback:
            names |= {socket.gethostname(), socket.getfqdn()}
        return frozenset(name.lower() for name in names if name)


def is_ip_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def parse_models(arguments: tuple[str, ...]) -> dict[str, str]:
    """Map names to references, from arguments such as `runs/a` and `digits=runs/b`."""
    if not arguments:
        raise ConfigError("no model to serve; pass a bundle, a weights file, or hf:owner/name")
    references: dict[str, str] = {}
    for argument in arguments:
        name, equals, reference = argument.partition("=")
        if not equals or Path(argument).exists():
            exists = Path(argument).exists()  # the name of a link, not that of its target
            name, reference = os.path.abspath(argument) if exists else argument, argument
            name = name.rpartition("/")[2].rpartition(":")[2].removesuffix(".onnx")
        if not (name and reference and name.isprintable()):
            raise ConfigError(
                f"{argument!r} is not a model; write runs/first, or digits=runs/first"
            )
        if name in references:
            raise ConfigError(
                f"two models are called {name!r}: {references[name]} and {reference}; "
                f"rename one of them, such as other={reference}"
            )
        references[name] = reference
    return references
