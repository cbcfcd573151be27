"""Small servers for tests: a tiny model, pictures of one color, and work that can be held up."""

import asyncio
import io
import socket
import threading
import time
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image

import vitrail
from vitrail.checkpoints.metadata import Metadata
from vitrail.data.preprocessing import preset
from vitrail.prediction.predictor import Predictor
from vitrail.serving.app import make_app
from vitrail.serving.house import House
from vitrail.serving.run import stoppable
from vitrail.serving.settings import Limits, Settings
from vitrail.serving.shelf import Served

CLASSES = ("red", "green", "blue")
COLORS = {"red": (200, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 200)}


def tiny_model(seed=0):
    """A ViT that has an opinion, if no good one."""
    torch.manual_seed(seed)
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=3)
    torch.nn.init.normal_(model.head.weight)
    model.metadata = Metadata(preprocessing=preset("google", (8, 8), 3), class_names=CLASSES)
    return model.eval()


def picture(color="red", size=(8, 8), format="PNG", seed=0):
    """The bytes of a noisy picture."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 55, (*size, 3)) + np.array(COLORS[color])
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, format)
    return buffer.getvalue()


@contextmanager
def a_house(models=None, *, batch=4, limits=None, **settings):
    """A house with models, by name."""
    settings = {"hosts": ("testserver",), **settings}  # what the test client calls it
    house = House(Settings(batch=batch, log="off", limits=limits or Limits(), **settings))
    try:
        for name, model in (models or {"tiny": tiny_model()}).items():
            house.add(Served(name, Predictor(model, device="cpu"), house.tools))
        yield house
    finally:
        house.close()


@contextmanager
def listening_to(house):
    """The port of a real server around a house, in a thread of this process."""
    with a_server(house) as (_, port):
        yield port


@contextmanager
def a_server(house):
    """That server, and its port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = stoppable(make_app(house), house)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.005)
            yield server, listener.getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


class Gate:
    """Work that waits until it is let go, and notes what it was given."""

    def __init__(self, most=4):
        self.most, self.batches = most, []
        self.begun, self.open = threading.Semaphore(0), threading.Event()

    def __call__(self, pieces):
        self.batches.append(list(pieces))
        self.begun.release()
        assert self.open.wait(60)
        return [(piece, len(pieces)) for piece in pieces]


@contextmanager
def held(house):
    """The batcher is busy with something else, until the gate is opened or at the end."""
    gate = Gate()

    async def hold():
        house.batcher.submit(gate, ["hold"])

    asyncio.run(hold())
    assert gate.begun.acquire(timeout=60)
    try:
        yield gate
    finally:
        gate.open.set()


def wait_for(condition, seconds=60):
    """Wait until something is true; so long only where it never will be."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)
