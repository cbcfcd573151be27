"""Small servers for tests: a tiny model, noise images, and work that can be blocked."""

import asyncio
import errno
import io
import socket
import threading
import time
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image
from starlette.testclient import TestClient

import vitrail
from vitrail.checkpoints.metadata import Metadata
from vitrail.data.preprocessing import preset
from vitrail.prediction.predictor import Predictor
from vitrail.serving.app import AppState, make_app
from vitrail.serving.config import ServerConfig
from vitrail.serving.server import make_server

CLASSES = ("red", "green", "blue")
COLORS = {"red": (200, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 200)}


def tiny_model(seed=0):
    torch.manual_seed(seed)
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=3)
    torch.nn.init.normal_(model.head.weight)
    model.metadata = Metadata(preprocessing=preset("google", (8, 8), 3), class_names=CLASSES)
    return model.eval()


def encoded_image(color="red", size=(8, 8), format="PNG", seed=0):
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 55, (*size, 3)) + np.array(COLORS[color])
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, format)
    return buffer.getvalue()


@contextmanager
def make_state(models=None, **options):
    """An `AppState` with models, by name."""
    # The test client's Host header is "testserver".
    options = {"batch": 4, "log": "off", "allow_host": ("testserver",), **options}
    state = AppState(ServerConfig(**options))
    try:
        for name, model in (models or {"tiny": tiny_model()}).items():
            state.add_model(name, Predictor(model, device="cpu"))
        yield state
    finally:
        state.close()


def make_client(state):
    """A client of the application, which is not warmed up."""
    return TestClient(make_app(state))


def post(client, path="/predict", data=None, headers=()):
    data = encoded_image() if data is None else data
    return client.post(path, content=data, headers={"content-type": "image/png"} | dict(headers))


@contextmanager
def running_server(state):
    """A real server in a thread of this process, and its port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = make_server(make_app(state), state)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server ended before it started"
                time.sleep(0.005)
            yield server, listener.getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


@contextmanager
def served(**options):
    """A state as of `make_state`, its running server, and the port."""
    with make_state(**options) as state, running_server(state) as (server, port):
        yield state, server, port


class Gate:
    """Work that blocks until it is opened, and records its batches."""

    def __init__(self, batch_size=4):
        self.batch_size, self.batches = batch_size, []
        self.started, self.open = threading.Semaphore(0), threading.Event()

    def __call__(self, items):
        self.batches.append(list(items))
        self.started.release()
        assert self.open.wait(60)
        return [(item, len(items)) for item in items]


@contextmanager
def blocked_batcher(state):
    """Keep the batch thread busy until the gate is opened, or to the end."""
    gate = Gate()

    async def submit():
        state.batcher.submit(gate, ["block"])

    asyncio.run(submit())
    assert gate.started.acquire(timeout=60)
    try:
        yield gate
    finally:
        gate.open.set()


class ClosedTerminal(io.StringIO):
    """Standard error after the terminal is gone."""

    def write(self, text):
        raise OSError(errno.EIO, "Input/output error")


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def is_idle(state):
    return state.admission.images == state.admission.bytes == state.in_flight == 0


def metric(state, name, **labels):
    if name == "vitrail_pictures_total":
        labels = {"model": state.registry.get(None).name} | labels
    return state.metrics.registry.get_sample_value(name, labels)
