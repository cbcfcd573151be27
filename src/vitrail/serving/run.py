"""The server process: models and socket, from the first word to the last."""

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from vitrail.errors import ConfigError
from vitrail.extras import require
from vitrail.prediction.predictor import Predictor
from vitrail.serving.settings import Settings

if TYPE_CHECKING:
    from vitrail.serving.connection import Stoppable
    from vitrail.serving.house import House

BACKLOG = 1024  # connections that the system keeps until they are looked at
KEEP_ALIVE = 15  # seconds a connection may be idle
STUCK_STATUS = 70  # EX_SOFTWARE of sysexits.h
NEEDED = ("fastapi", "httptools", "python_multipart", "uvicorn")
SWITCH_SECONDS = 5e-4  # Python's threads take turns faster than usual, so that none waits for long


def serve(
    models: Mapping[str, str],
    settings: Settings,
    *,
    predictor: Callable[[str], Predictor] = Predictor,
    say: Callable[[str], None] = print,
) -> None:
    """Serve models until a signal comes. `predictor` opens one; `say` hears what is going on."""
    check_installed()
    from vitrail.serving.app import make_app
    from vitrail.serving.house import House

    with bound(settings) as listener:  # first, because it is the quickest to fail
        house = House(settings)
        try:
            # In a thread that ends: OpenMP keeps helpers for every thread that has computed, and
            # with more of them than cores the batcher's would sleep instead of being at hand.
            with ThreadPoolExecutor(1) as passing:
                for name, reference in models.items():
                    words = (house, name, reference, predictor, say)
                    passing.submit(open_model, *words, several=len(models) > 1).result()
            listener.listen(BACKLOG)
            host, port = listener.getsockname()[:2]
            if settings.is_open:
                warning = "anybody who reaches this machine may use the server; --token would ask"
                print(f"vitrail: {warning} who they are", file=sys.stderr)
                names = ", ".join(sorted(settings.names or ()))
                print(
                    f"vitrail: accepted Host headers: IP addresses, {names}; "
                    "add others with --allow-host, or set a token",
                    file=sys.stderr,
                )
            say(f"http://{f'[{host}]' if ':' in host else told_host(host)}:{port}")
            sys.setswitchinterval(SWITCH_SECONDS)
            stoppable(make_app(house), house).run([listener])
        finally:
            house.close()
    if house.lost or house.readers.busy or house.batcher.abandoned:
        # The interpreter would wait for stuck threads; a supervisor restarts on this status.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(STUCK_STATUS if house.lost else 0)


def check_installed() -> None:
    require(*NEEDED, extra="serve", feature="serving")


def told_host(host: str) -> str:
    """Where to look: on all interfaces, this machine's own will do."""
    return "127.0.0.1" if host == "0.0.0.0" else host


def bound(settings: Settings) -> socket.socket:
    """A socket that nobody else has; it listens only when the models are there."""
    host, port = settings.host or "0.0.0.0", settings.port
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise ConfigError(f"there is no address {host!r}; try 127.0.0.1, or 0.0.0.0") from None
    listener = socket.socket(family, kind)
    try:
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        why = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {why}; choose another with --port or --host"
        ) from None
    return listener


def open_model(
    house: "House",
    name: str,
    reference: str,
    predictor: Callable[[str], Predictor],
    say: Callable[[str], None],
    *,
    several: bool,
) -> None:
    """Load a model and put it on the shelf."""
    from vitrail.serving import examples, lessons
    from vitrail.serving.shelf import Served

    settings = house.settings
    opened, memory = predictor(reference), None
    if opened.channels not in (1, 3):
        raise ConfigError(
            f"{reference} takes pictures of {opened.channels} channels, and those that are sent "
            "are gray or in color; use vitrail.Predictor in Python, which takes arrays"
        )
    if settings.teach:
        memory, notes = lessons.ready(opened, reference, settings.using)
        house.places[name] = lessons.place_for(settings.teach_to, name, reference, several=several)
        for note in notes:
            say(f"{name}: {note}")
    if given := examples.given(settings, reference):
        house.examples[name] = examples.find_examples(opened.metadata, given)
    house.add(Served(name, opened, house.tools, memory=memory))
    classes = len(opened.classes)
    say(f"{name}: {classes:,} class{'es' * (classes != 1)}, run by {opened.engine.name}")


def stoppable(app: Any, house: "House") -> "Stoppable":
    """A server that answers until it is told to stop, and then those whom it has let in."""
    from uvicorn import Config

    from vitrail.serving.connection import Connection, Stoppable

    def drain() -> None:
        house.draining = True

    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # what it would say, our log does
    config = Config(
        app,
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(house.settings.grace)),
    )
    return Stoppable(config, drain, house.watch)
