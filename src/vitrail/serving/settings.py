"""What can be set of a server. Nothing here is heavy, so that options can be checked at once."""

import re
import socket
from dataclasses import dataclass, field
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from vitrail.errors import ConfigError

Log = Literal["text", "json", "off"]
OWN = ("localhost", "127.0.0.1", "::1")  # what a machine calls itself
NAME = re.compile(r"[\w.-]+", re.ASCII)  # of a machine
MOST_PIXELS = 64 * 2**20  # what decoding refuses anyway: 8192 x 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How much is taken in. What is more gets an error at once, so memory stays bounded."""

    body: int = 20 * 2**20  # bytes of one request
    pictures: int = 64  # in one request
    pixels: int = MOST_PIXELS  # of one picture
    queue: int = 256  # pictures that are let in and not yet answered
    heavy: int = 8  # explanations and lessons that are let in and not yet answered
    memory: int = 256 * 2**20  # bytes of all requests that are let in
    timeout: float = 30.0  # seconds for a body to arrive, and again for its answer

    def __post_init__(self) -> None:
        for name in ("body", "pictures", "pixels", "queue", "heavy", "timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} lets nothing in; give more than 0")
        if self.pictures > self.queue:
            raise ConfigError(
                f"a request of {self.pictures} pictures never fits into a queue of {self.queue}; "
                "allow fewer in a request, or a longer queue"
            )
        if self.body > self.memory:
            raise ConfigError(
                f"a body of {self.body:,} bytes never fits into the {self.memory:,} bytes that "
                "all requests may take together; allow smaller ones"
            )
        if self.pixels > MOST_PIXELS:
            raise ConfigError(
                f"pictures of {self.pixels:,} pixels are never decoded; give at most {MOST_PIXELS}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a server behaves."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    token: str = ""  # what a client must show; empty: nothing
    origins: tuple[str, ...] = ()  # web pages elsewhere that may ask; "*" for all
    hosts: tuple[str, ...] = ()  # names it may be called by, beside its own
    teach: bool = False  # clients may teach classes
    teach_to: Path | None = None  # where what was taught is kept
    using: str | None = None  # pictures of the classes a model knows, for teaching
    examples: str = ""  # data to take pictures to try from; empty: see `examples.given`; or "none"
    batch: int = 0  # pictures at once; 0: measured
    grace: float = 30.0  # seconds to finish what was let in, when told to stop
    watchdog: float = 120.0  # seconds after which a thread at the same work is stuck
    log: Log = "text"
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port={self.port} does not exist; give 1 to 65535, or 0 for any")
        if self.batch < 0 or self.grace < 0:
            raise ConfigError("batch and grace are numbers from 0 up")
        if self.watchdog < self.limits.timeout:
            raise ConfigError(
                f"watchdog={self.watchdog:g} would abandon work that clients still wait for; "
                f"give at least timeout={self.limits.timeout:g}"
            )
        if self.token and not (self.token.isascii() and self.token.isprintable()):
            raise ConfigError("the token must be plain letters, digits and signs")
        for name in self.hosts:
            if not NAME.fullmatch(name) and not is_address(name):
                raise ConfigError(
                    f"{name!r} is no name of a machine; --allow-host takes one such as "
                    "example.org, without http:// and port"
                )
        if self.teach_to is not None and not self.teach:
            raise ConfigError("--teach-to keeps what is taught; it needs --allow-teach")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can ask."""
        if self.host == "localhost":
            return True
        return is_address(self.host) and ip_address(self.host).is_loopback

    @property
    def names(self) -> frozenset[str] | None:
        """Host headers that are accepted; None accepts any.

        Under DNS rebinding, a web page elsewhere lets its own name resolve to this machine, and
        would pass for a page of this server. It cannot know the token, so the check is for servers
        without one: off loopback, IP addresses are accepted besides these names (`allows_host`).
        """
        if self.token:
            return None
        names = {*OWN, self.host, *self.hosts}
        if not self.is_loopback:
            names |= machine_names()
        return frozenset(name.lower() for name in names if name)

    def allows_host(self, name: str, names: frozenset[str]) -> bool:
        """Whether a request with this host name is answered; `names` are those of `names`."""
        return name in names or (not self.is_loopback and is_address(name))

    @property
    def is_open(self) -> bool:
        """Whether anybody who reaches the machine may use it."""
        return not self.is_loopback and not self.token


@cache
def machine_names() -> frozenset[str]:
    """What this machine calls itself; asks the DNS, so only once."""
    return frozenset((socket.gethostname(), socket.getfqdn()))


def is_address(host: str) -> bool:
    """Whether this is an IP address."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def by_name(words: tuple[str, ...]) -> dict[str, str]:
    """What each model is called, and where it is, of words such as `runs/a` and `digits=runs/b`."""
    if not words:
        raise ConfigError("serve what? Give a bundle, a file of weights, or hf:owner/name")
    places: dict[str, str] = {}
    for word in words:
        name, equals, place = word.partition("=")
        if not equals or Path(word).exists():
            name, place = Path(word).resolve().name if Path(word).exists() else word, word
            name = name.rpartition("/")[2].rpartition(":")[2].removesuffix(".onnx")
        if not (name and place and name.isprintable()):
            raise ConfigError(f"{word!r} names no model; write runs/first, or digits=runs/first")
        if name in places:
            raise ConfigError(
                f"two models are called {name!r}: {places[name]} and {place}; "
                f"give one another name, such as other={place}"
            )
        places[name] = place
    return places
