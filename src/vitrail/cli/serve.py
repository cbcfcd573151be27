"""`vitrail serve`: models over HTTP, with a web page to try them."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitrail.cli.console import VERBOSITY, log
from vitrail.cli.options import EngineOptions, Int8Data, MaxDrop, options_of
from vitrail.errors import ConfigError
from vitrail.export import MAX_DROP
from vitrail.formatting import MIB
from vitrail.serving.config import MAX_PIXELS

TOKEN = "VITRAIL_TOKEN"


@dataclass(frozen=True, kw_only=True)
class Serve(EngineOptions):
    """Serve models over HTTP; open the address in a browser to try them."""

    models: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="MODEL|NAME=MODEL")
    ]
    """Bundles, weights files, hf:owner/name, or .onnx files; the first is the default model."""
    host: str = "127.0.0.1"
    """Address to bind; 0.0.0.0 allows access from other machines: set a --token."""
    port: int = 8000
    """Port; 0 selects a free one."""
    data: Int8Data = None
    max_drop: MaxDrop = MAX_DROP
    batch: int = 0
    """Maximum batch size; 0 tunes it at startup."""
    queue: int = 256
    """Maximum number of queued images; requests beyond it get status 503."""
    timeout: float = 30.0
    """Seconds to receive a request, and seconds to process it."""
    grace: float = 30.0
    """Seconds to finish open requests at shutdown."""
    watchdog: float = 120.0
    """Seconds after which a batch, explanation or teaching request is considered stuck and its
    thread is replaced; at least --timeout. With three stuck threads, or one for five times as long,
    the server exits with status 70, to be restarted."""
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
    and the machine's own names are accepted otherwise (DNS rebinding)."""
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
    log: Literal["text", "json", "off"] = "text"
    """Format of the access log on standard error."""

    def run(self) -> None:
        if self.merge and self.allow_teach:
            raise ConfigError(
                "--merge changes the features that classes are taught from; omit --merge or "
                "--allow-teach"
            )
        from vitrail.serving.config import Limits, ServerConfig, parse_models
        from vitrail.serving.server import serve

        config = ServerConfig(
            **options_of(self, "host", "port", "allow_teach", "teach_to", "using", "examples"),
            **options_of(self, "grace", "watchdog"),
            token=os.environ.get(TOKEN, "") if self.token is None else self.token,
            allow_origins=self.allow_origin,
            allow_hosts=self.allow_host,
            batch_size=self.batch,
            log="off" if VERBOSITY.quiet else self.log,
            limits=Limits(
                body=round(self.max_megabytes * MIB),
                images=self.max_images,
                pixels=self.max_pixels,
                queue=self.queue,
                timeout=self.timeout,
            ),
        )
        load = partial(self.open_predictor, data=self.data, max_drop=self.max_drop, log=log)
        references = parse_models(self.models)
        serve(references, config, predictor=load, log=partial(print, flush=True))
