"""The server process: models, socket, signals, exit status. Loads without the `serve` extra."""

import hashlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.checkpoints.bundle import CONFIG
from vitrail.errors import ConfigError, VitrailError
from vitrail.extras import require
from vitrail.prediction.predictor import Predictor
from vitrail.serving.config import ServerConfig

if TYPE_CHECKING:
    from vitrail.serving.app import AppState
    from vitrail.serving.protocol import DrainingServer

BACKLOG = 1024  # connections that the system queues
KEEP_ALIVE = 15  # seconds that a connection may be idle
STUCK_STATUS = 70  # EX_SOFTWARE of sysexits.h
REQUIRED = (
    *("httptools", "prometheus_client", "pydantic"),
    *("python_multipart", "starlette", "uvicorn"),
)
SWITCH_INTERVAL = 5e-4  # seconds; Python's default of 5 ms delays the event loop


def serve(
    models: Mapping[str, str],
    config: ServerConfig,
    *,
    predictor: Callable[[str], Predictor] = Predictor,
    log: Callable[[str], None] = print,
) -> None:
    """Serve models until a signal arrives. `predictor` loads one; `log` gets progress lines."""
    require(*REQUIRED, extra="serve", feature="serving")
    from vitrail.serving.app import AppState, make_app
    from vitrail.serving.metrics import log_event

    with bind(config) as listener:  # first, because it fails fastest
        state = AppState(config)
        try:
            # In a temporary thread: OpenMP keeps a thread pool for every thread that has computed,
            # and with too many of them the batch thread's pool would be preempted.
            with ThreadPoolExecutor(1) as executor:
                for name, reference in models.items():
                    arguments = (state, name, reference, predictor, log)
                    executor.submit(load_model, *arguments, several=len(models) > 1).result()
            listener.listen(BACKLOG)
            host, port = listener.getsockname()[:2]
            if not (config.is_loopback or config.token):
                names = ", ".join(sorted(config.host_names))
                for text in (
                    "other machines can use this server without a token; set one with --token",
                    f"accepted Host headers: IP addresses, {names}; "
                    "add others with --allow-host, or set a token",
                ):
                    log_event(text, config.log)
            host = "127.0.0.1" if host == "0.0.0.0" else host
            log(f"http://{f'[{host}]' if ':' in host else host}:{port}")
            sys.setswitchinterval(SWITCH_INTERVAL)
            make_server(make_app(state), state).run([listener])
        finally:
            state.close()
    if state.unrecoverable or state.pool.busy or state.batcher.abandoned:
        # The interpreter would wait for stuck threads; a supervisor restarts on this status.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(STUCK_STATUS if state.unrecoverable else 0)


def bind(config: ServerConfig) -> socket.socket:
    """Return a bound socket; it listens only once the models are loaded."""
    host, port = config.host or "0.0.0.0", config.port
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise ConfigError(f"cannot resolve address {host!r}; try 127.0.0.1, or 0.0.0.0") from None
    listener = socket.socket(family, kind)
    try:
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {reason}; choose another with --port or --host"
        ) from None
    return listener


def load_model(
    state: "AppState",
    name: str,
    reference: str,
    predictor: Callable[[str], Predictor],
    log: Callable[[str], None],
    *,
    several: bool,
) -> None:
    """Load a model and register it; `several` if it is not the only one."""
    from vitrail.serving.registry import examples_from, find_examples, folder_for, load_memory

    config = state.config
    try:
        loaded, memory = predictor(reference), None
    except VitrailError as error:
        raise type(error)(str(error) if reference in str(error) else f"{name}: {error}") from None
    if loaded.channels not in (1, 3):
        raise ConfigError(
            f"{reference} takes images of {loaded.channels} channels, and the server decodes gray "
            "and color images only; use vitrail.Predictor in Python, which takes arrays"
        )
    if config.allow_teach:
        memory, notes = load_memory(loaded, reference, config.using)
        state.teach_folders[name] = folder_for(config.teach_to, name, reference, several=several)
        for note in notes:
            log(f"{name}: {note}")
    if data := examples_from(config, reference):
        state.examples[name] = find_examples(loaded.metadata, data)
    path = Path(reference)
    path = path / CONFIG if path.is_dir() else path  # has the class names, and a digest of weights
    digest = ""
    if path.is_file():
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    state.add_model(name, loaded, memory, digest)
    classes = len(loaded.classes)
    hint = ""
    if not classes:
        hint = "; add two or more in the page" if memory else "; to add some, pass --allow-teach"
    log(f"{name}: {classes:,} class{'es' * (classes != 1)}, engine {loaded.engine.name}{hint}")


def make_server(app: Any, state: "AppState") -> "DrainingServer":
    """Return a uvicorn server that drains on a signal and runs the watchdog."""
    from uvicorn import Config

    from vitrail.serving.protocol import DrainingServer, LimitedProtocol

    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # requests are logged by us
    config = Config(
        app,
        http=LimitedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(state.config.grace)),
    )
    return DrainingServer(config, state)
