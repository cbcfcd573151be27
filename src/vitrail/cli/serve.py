"""`vitrail serve`: a model over HTTP, and a page to try it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitrail.cli.arguments import DataOptions, Preset
from vitrail.cli.text import MANNER, tell
from vitrail.errors import ConfigError
from vitrail.export.kinds import MOST_DROP, EngineKind
from vitrail.formatting import MIB
from vitrail.serving.config import MAX_PIXELS

MODEL = tyro.conf.arg(metavar="MODEL|NAME=MODEL")
TOKEN = "VITRAIL_TOKEN"


@dataclass(frozen=True, kw_only=True)
class Serve(DataOptions):
    """Answer pictures over HTTP; open its address in a browser to try it."""

    models: Annotated[tyro.conf.Positional[tuple[str, ...]], MODEL]
    """Bundles, files of weights, hf:owner/name, or .onnx files; the first is meant by default."""
    host: str = "127.0.0.1"
    """0.0.0.0 lets other machines in; then give a --token."""
    port: int = 8000
    """0 takes any that is free."""
    preprocessing: Preset = None
    engine: EngineKind | None = None
    """What runs the models: torch unless told otherwise; auto measures and takes the fastest."""
    merge: int = 0
    """Tokens to merge in each layer, for more speed at a small loss; torch only."""
    data: str | None = None
    """For int8: pictures with labels, to measure what it loses; else those of the training."""
    max_drop: float = MOST_DROP
    """For int8: the largest share of accuracy that it may lose."""
    device: str = ""
    """cpu, cuda, mps; chosen if not given."""
    batch: int = 0
    """Pictures at once at most; 0 measures what is best."""
    queue: int = 256
    """Pictures that may wait; who comes when it is full gets status 503."""
    timeout: float = 30.0
    """Seconds for a request to arrive, and again to be answered."""
    grace: float = 30.0
    """Seconds to finish what has begun, when told to stop."""
    watchdog: float = 120.0
    """Seconds after which a batch, explanation or lesson counts as stuck and its thread is
    replaced; at least --timeout. With three stuck threads, or one for five times as long, the
    server ends with status 70, to be restarted."""
    max_megabytes: float = 20.0
    """Size of a request."""
    max_pictures: int = 64
    """Pictures in a request."""
    max_pixels: int = MAX_PIXELS
    """Pixels of a picture."""
    token: str | None = None
    """What clients must show; better given in the environment, as VITRAIL_TOKEN."""
    allow_origin: tuple[str, ...] = ()
    """Web sites whose pages may ask, such as https://example.org."""
    allow_host: tuple[str, ...] = ()
    """Host names to answer to, such as example.org behind a proxy. Without a token, only IP
    addresses and the machine's own names are accepted besides (DNS rebinding)."""
    allow_teach: bool = False
    """Let clients teach classes by a few pictures."""
    teach_to: Path | None = None
    """A folder to keep what was taught, as a bundle; the model's own only if it remembers."""
    using: str | None = None
    """For teaching: pictures of the classes a model knows, where it does not remember any."""
    examples: str = ""
    """Data to take pictures to try from, or none. If not given: the data a model was trained on,
    while only this machine can ask."""
    log: Literal["text", "json", "off"] = "text"
    """A line for each request, on standard error."""

    def run(self) -> None:
        if self.merge and self.allow_teach:
            raise ConfigError(
                "--merge changes the features that classes are taught by; leave it or --allow-teach"
            )
        from vitrail.prediction.engines import AccuracyGuard
        from vitrail.prediction.predictor import Predictor
        from vitrail.serving.config import Limits, ServerConfig, parse_models
        from vitrail.serving.server import serve

        config = ServerConfig(
            host=self.host,
            port=self.port,
            token=os.environ.get(TOKEN, "") if self.token is None else self.token,
            allow_origins=self.allow_origin,
            allow_hosts=self.allow_host,
            allow_teach=self.allow_teach,
            teach_to=self.teach_to,
            using=self.using,
            examples=self.examples,
            batch_size=self.batch,
            grace=self.grace,
            watchdog=self.watchdog,
            log="off" if MANNER.quiet else self.log,
            limits=Limits(
                body=round(self.max_megabytes * MIB),
                images=self.max_pictures,
                pixels=self.max_pixels,
                queue=self.queue,
                timeout=self.timeout,
            ),
        )

        guard = AccuracyGuard(data=self.data, max_drop=self.max_drop)

        def opened(reference: str) -> Predictor:
            return Predictor(
                reference,
                engine=self.engine or "",
                merge=self.merge,
                preprocessing=self.preprocessing,
                guard=guard,
                device=self.device,
                log=tell,
            )

        serve(parse_models(self.models), config, predictor=opened, log=say)


def say(line: str) -> None:
    print(line, flush=True)
