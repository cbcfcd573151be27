"""What can be set of a server. Nothing here is heavy, so that options can be checked at once."""

from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

from vitrail.errors import ConfigError

Log = Literal["text", "json", "off"]
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
    teach: bool = False  # clients may teach classes
    teach_to: Path | None = None  # where what was taught is kept
    using: str | None = None  # pictures of the classes a model knows, for teaching
    examples: str = ""  # data to take pictures to try from; empty: see `examples.given`; or "none"
    batch: int = 0  # pictures at once; 0: measured
    grace: float = 30.0  # seconds to finish what was let in, when told to stop
    log: Log = "text"
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port={self.port} does not exist; give 1 to 65535, or 0 for any")
        if self.batch < 0 or self.grace < 0:
            raise ConfigError("batch and grace are numbers from 0 up")
        if self.token and not (self.token.isascii() and self.token.isprintable()):
            raise ConfigError("the token must be plain letters, digits and signs")
        if self.teach_to is not None and not self.teach:
            raise ConfigError("--teach-to keeps what is taught; it needs --allow-teach")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can ask."""
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_open(self) -> bool:
        """Whether anybody who reaches the machine may use it."""
        return self.host in ("", "0.0.0.0", "::") and not self.token
