"""`vitrail serve`: models over HTTP, with a web page to try them."""

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import tyro

from vitrail.cli.console import VERBOSITY, log
from vitrail.cli.options import EngineOptions, Int8Data, MaxDrop
from vitrail.errors import ConfigError
from vitrail.export import MAX_DROP
from vitrail.serving.config import ServerConfig, parse_models

TOKEN = "VITRAIL_TOKEN"


@dataclass(frozen=True, kw_only=True)
class Serve(ServerConfig, EngineOptions):
    """Serve models over HTTP; open the address in a browser to try them."""

    models: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="MODEL|NAME=MODEL")
    ]
    """Bundles, weights files, hf:owner/name, or .onnx files; the first is the default model."""
    data: Int8Data = None
    max_drop: MaxDrop = MAX_DROP

    def run(self) -> None:
        if self.merge and self.allow_teach:
            raise ConfigError(
                "--merge changes the features that classes are taught from; omit --merge or "
                "--allow-teach"
            )
        references = parse_models(self.models)
        from vitrail.serving.server import serve

        token = os.environ.get(TOKEN) if self.token is None else self.token
        config = replace(self, token=token, log="off" if VERBOSITY.quiet else self.log)
        load = partial(self.open_predictor, data=self.data, max_drop=self.max_drop, log=log)
        serve(references, config, predictor=load, log=partial(print, flush=True))
