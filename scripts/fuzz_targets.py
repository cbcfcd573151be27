"""Fuzz targets, and the worker process that measures what one input costs.

    python scripts/fuzz_targets.py FOLDER      reads inputs from stdin, writes costs to stdout

A target takes bytes and passes them to one entry point of vitrail. `fuzz_cost.py` starts the
worker and kills nothing by hand: the worker limits its own CPU time and address space, so that a
hang or a runaway allocation ends it.
"""

import asyncio
import gc
import io
import json
import os
import resource
import struct
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from vitrail.errors import VitrailError

ROOT = Path(__file__).parents[1]
MAX_PIXELS = 4 * 2**20  # small, so that what an image may cost is small
ADDRESS_SPACE = 3 * 2**30  # bytes above what the worker has mapped when it starts
REFERENCE_SIDE = 1024
NOTEWORTHY = 3  # times the reference: smaller costs are noise
READ_SIZE = 2**18  # bytes that an event loop reads from a socket at once
DRIP_SIZE = 64
SETTLE_SECONDS = 5.0
FRAME = struct.Struct("<16sdQ")  # target, CPU limit in seconds, bytes that follow


def image(data: bytes, folder: Path) -> int:
    """Decode an image; its pixels, which decide how much memory it may take."""
    from vitrail.data.decode import decode

    height, width, _ = decode(data, max_pixels=MAX_PIXELS).shape
    return height * width


def data_set(name: str, beside: str = "") -> Callable[[bytes, Path], None]:
    """Open a data set of one file and read its first sample; `beside` is a second file."""

    def run(data: bytes, folder: Path) -> None:
        from vitrail.data.datasets import open_dataset

        path = folder / name
        path.write_bytes(data)
        path.with_name(f".{name}.index.npz").unlink(missing_ok=True)
        if beside:
            np.save(folder / beside, np.zeros(2, np.int64))
        source = open_dataset(path, "all")
        if not name.endswith(("csv", "jsonl")):
            source[0]

    return run


def idx(data: bytes, folder: Path) -> None:
    """MNIST's images, compressed, with two labels."""
    from vitrail.data.datasets import open_dataset

    target_folder = folder / "idx"
    target_folder.mkdir(exist_ok=True)
    (target_folder / "train-images-idx3-ubyte.gz").write_bytes(data)
    (target_folder / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x02\0\x01")
    open_dataset(target_folder, "all")[0]


def checkpoint(name: str) -> Callable[[bytes, Path], None]:
    def run(data: bytes, folder: Path) -> None:
        from vitrail import load

        (folder / name).write_bytes(data)
        load(folder / name, log=lambda line: None)

    return run


def config(data: bytes, folder: Path) -> None:
    """config.json of a model folder whose weights are good."""
    from vitrail import load

    target_folder = bundle(folder)
    (target_folder / "config.json").write_bytes(data)
    load(target_folder, log=lambda line: None)


@cache
def bundle(folder: Path) -> Path:
    import vitrail

    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=3)
    vitrail.save(model, folder / "bundle")
    return folder / "bundle"


def form(data: bytes, folder: Path) -> None:
    """A content type, a line end and the body of a form."""
    from starlette.exceptions import HTTPException

    from vitrail.serving.config import ServerConfig
    from vitrail.serving.limits import ApiError, parse_form

    kind, _, body = data.partition(b"\n")
    try:
        parse_form(kind.decode("latin-1"), body, ServerConfig().max_images)
    except (ApiError, HTTPException):
        raise VitrailError("refused") from None


class FakeTransport(asyncio.Transport):
    """The server's end of a connection whose client reads everything at once."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.closing = self.paused = False

    def write(self, data: Any) -> None:
        pass

    def close(self) -> None:
        self.closing = True

    abort = close

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An application that reads the body and answers."""
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def http(size: int, make: Callable[[], Any] = lambda: echo) -> Callable[[bytes, Path], None]:
    """Bytes of one connection, which arrive in pieces of this size."""

    def run(data: bytes, folder: Path) -> None:
        asyncio.run(converse(data, size, make()))

    return run


async def converse(data: bytes, size: int, app: Any) -> None:
    from uvicorn import Config
    from uvicorn.server import ServerState

    from vitrail.serving.protocol import LimitedProtocol

    config = Config(app, http=LimitedProtocol, ws="none", lifespan="off", log_config=None)
    config.load()
    state, transport = ServerState(), FakeTransport()
    protocol = LimitedProtocol(config, state, {})
    protocol.connection_made(transport)
    until = time.monotonic() + SETTLE_SECONDS

    async def settled() -> None:
        """Let the application work for as long as the server does not want to read."""
        await asyncio.sleep(0)
        while state.tasks and transport.paused and time.monotonic() < until:
            await asyncio.sleep(0.001 if app is not echo else 0)

    for start in range(0, len(data), size):
        if transport.closing:
            break
        protocol.data_received(data[start : start + size])
        await settled()
    while state.tasks and not transport.closing and time.monotonic() < until:
        await asyncio.sleep(0.001 if app is not echo else 0)
        if not protocol.pipeline and protocol.cycle.more_body:
            break  # the rest of the body never comes
    protocol.connection_lost(None)
    for task in state.tasks:
        task.cancel()
    await asyncio.gather(*state.tasks, return_exceptions=True)


@cache
def server_app() -> Any:
    """The whole application around a tiny model."""
    sys.path.append(str(ROOT / "tests" / "serving"))
    from serving_helpers import make_state

    from vitrail.serving.app import make_app

    entered = make_state()
    state = entered.__enter__()
    server_app.kept = entered  # type: ignore[attr-defined]
    return make_app(state)


TARGETS: dict[str, Callable[[bytes, Path], int | None]] = {
    "image": image,
    "tar": data_set("set.tar"),
    "csv": data_set("set.csv"),
    "jsonl": data_set("set.jsonl"),
    "npz": data_set("set.npz"),
    "npy": data_set("images.npy", beside="labels.npy"),
    "idx": idx,
    "form": form,
    "http": http(READ_SIZE),
    "http-drip": http(DRIP_SIZE),
    "server": http(READ_SIZE, server_app),
    "weights-npz": checkpoint("model.npz"),
    "safetensors": checkpoint("model.safetensors"),
    "torch": checkpoint("model.pth"),
    "config": config,
}


def reference_file() -> bytes:
    """A JPEG of one megapixel."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize((REFERENCE_SIDE, REFERENCE_SIDE)).save(out, "JPEG")
    return out.getvalue()


def reference_seconds(data: bytes) -> float:
    """CPU time of decoding it with Pillow: the unit of all bounds."""
    times = []
    for _ in range(3):
        started = time.process_time()
        np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).sum()
        times.append(time.process_time() - started)
    return min(times)


def status(key: str) -> int:
    """A line of /proc/self/status in bytes; 0 where there is no such file."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(x.split()[1]) * 1024 for x in text.splitlines() if x.startswith(key)), 0)


def reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # not Linux, or not allowed: the peak since the start stays


def measure(target: str, data: bytes, folder: Path, seconds: float) -> dict[str, Any]:
    """Run one input; its CPU seconds, peak memory and outcome."""
    gc.collect()
    reset_peak()
    soft = int(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
    before, outcome, pixels = status("VmRSS"), "accepted", None
    started = time.process_time()
    try:
        pixels = TARGETS[target](data, folder)
    except VitrailError:
        outcome = "refused"
    except MemoryError:
        outcome = "crash: MemoryError"
    except Exception as error:
        outcome = f"crash: {type(error).__name__}: {str(error)[:200]}"
    cpu = time.process_time() - started
    resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    memory = max(0, status("VmHWM") - before)
    return {"cpu": cpu, "memory": memory, "outcome": outcome, "pixels": pixels}


def work(folder: Path, requests: BinaryIO, replies: BinaryIO) -> None:
    """Measure inputs until there are no more. A target is warmed up by its first input."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reference, warm = reference_file(), set[str]()
    unit = reference_seconds(reference)
    while head := requests.read(FRAME.size):
        name, seconds, size = FRAME.unpack(head)
        target, data = name.rstrip(b"\0").decode(), requests.read(size)
        if target not in warm:
            warm.add(target)
            found = measure(target, data, folder, seconds + 60)
            gc.freeze()
            room = status("VmSize") + ADDRESS_SPACE
            resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
        else:
            found = measure(target, data, folder, seconds)
        if found["cpu"] > NOTEWORTHY * unit:  # the machine may be slower now
            unit = max(unit, reference_seconds(reference))
        found["reference"] = unit
        replies.write(json.dumps(found).encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    sys.path.append(str(ROOT / "tests" / "data"))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever else prints
    work(Path(sys.argv[1]), sys.stdin.buffer, answers)
