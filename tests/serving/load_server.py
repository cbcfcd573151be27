"""Load-test a real server from a second process.

    python tests/serving/load_server.py runs/first             # several minutes
    python tests/serving/load_server.py runs/first --quick     # a minute
    python tests/serving/load_server.py runs/first --only hostile

    throughput   32 clients, compared with the same predictor offline on the same cores
    overload     four times the capacity: prompt 503s, bounded memory, recovery
    garbage      20,000 requests, 5 % of them malformed: no 500, no leak, no crash
    hostile      5 % hostile requests: p99 of the others at most doubled, memory flat
    vanishing    clients that disconnect while sending: no effect on others
    stopping     SIGTERM under load: every admitted request is answered

Run it on an otherwise idle machine. With --quick the measurements are short, and throughput and
memory are reported but not checked.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import io
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from raw_client import BOUNDARY, Results, closed_loop, form, head, milliseconds, open_loop, raw, run
from server_process import Server, serving

from vitrail.cli import SPIN

CLIENTS = 32
MIN_SHARE = 0.85  # of the offline throughput
MAX_GROWTH = 400 * 2**20  # bytes under overload; admitted requests take at most 256 MB
MAX_LEAK = 30 * 2**20  # bytes after thousands of requests
MAX_REJECTION_SECONDS = 0.5  # p99
MAX_SLOWDOWN = 2.0  # of the p99 of good requests
HOSTILE_IMAGES = Path(__file__).parents[1] / "data" / "hostile_images.py"

OFFLINE = """
import itertools, json, sys, time
from vitrail.prediction.predictor import Predictor
from vitrail.data.datasets import evaluation_split, open_dataset
model, data, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
source = open_dataset(data, evaluation_split(data) or "all")
rows = range(0, len(source), max(1, len(source) // 256))
pictures = [source[row].data for row in rows]
predictor, best = Predictor(model), 0.0
list(predictor.stream(pictures[:64]))
for size in (4, 8, 16, 32):
    begun, done = time.perf_counter(), 0
    while (taken := time.perf_counter() - begun) < seconds / 4:
        done += len(list(predictor.stream(pictures[:128], batch_size=size)))
    best = max(best, done / (time.perf_counter() - begun))
print(json.dumps({"pace": best, "engine": predictor.engine.name}))
"""


@dataclass
class Check:
    """One row of the table."""

    name: str
    value: str
    expected: str = ""
    passed: bool = True


def offline(model: str, data: str, seconds: float) -> float:
    """Images per second of the same predictor without a server, at its best batch size."""
    environment = os.environ | {"GOMP_SPINCOUNT": SPIN}  # as every command has it
    words = [sys.executable, "-c", OFFLINE, model, data, str(seconds)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["pace"]


def throughput(
    server: Server, requests: list[bytes], pace: float, seconds: float
) -> Iterator[Check]:
    """Closed loops with one client and with many."""
    alone = run(closed_loop(server.port, itertools.cycle(requests), clients=1, seconds=seconds / 4))
    yield Check("one client", summary(alone))
    many = itertools.cycle(requests)
    run(closed_loop(server.port, many, clients=CLIENTS, seconds=seconds / 4))  # warm up
    found = run(closed_loop(server.port, many, clients=CLIENTS, seconds=seconds))
    share = len(found.of(200)) / found.seconds / pace
    yield Check(f"{CLIENTS} clients", summary(found))
    yield Check(
        "of the offline throughput",
        f"{100 * share:.0f} % of {pace:.0f}/s",
        f">= {100 * MIN_SHARE:.0f} %",
        share >= MIN_SHARE,
    )
    yield Check("statuses", f"{found.counts()}", "200", found.counts().keys() == {200})


def overload(server: Server, requests: list[bytes], pace: float, seconds: float) -> Iterator[Check]:
    """Four times the capacity, then normal load."""
    before = server.memory()
    peak = [before]

    async def watched() -> Results:
        load = asyncio.ensure_future(
            open_loop(server.port, requests, rate=4 * pace, seconds=seconds, connections=700)
        )
        while not load.done():
            peak.append(server.memory())
            await asyncio.sleep(0.1)
        return await load

    found = run(watched())
    answered, rejected = found.of(200), found.of(503)
    asked = len(found.replies) / found.seconds
    yield Check("requests/s", f"{asked:.0f} = {asked / pace:.1f} times the capacity")
    yield Check("answered", summary(found))
    late = milliseconds(rejected, 0.99)
    yield Check(
        "rejected (503)",
        f"{len(rejected):,}: p50 {milliseconds(rejected, 0.5):.1f}, p99 {late:.1f} ms",
        f"some, p99 < {1000 * MAX_REJECTION_SECONDS:.0f} ms",
        bool(rejected) and late < 1000 * MAX_REJECTION_SECONDS,
    )
    odd = {s: n for s, n in found.counts().items() if s not in (200, 503)}
    yield Check("other statuses", f"{odd or 'none'}", "none", not odd)
    yield Check("answered at all", f"{len(answered):,}", "> 0", bool(answered))
    growth = max(peak) - before
    yield Check(
        "memory growth",
        f"{growth / 2**20:.0f} of {max(peak) / 2**20:.0f} MB",
        f"< {MAX_GROWTH / 2**20:.0f} MB",
        growth < MAX_GROWTH,
    )
    again = run(closed_loop(server.port, requests[:CLIENTS] * 4, clients=8))
    yield Check("afterwards", summary(again), "all 200", again.counts().keys() == {200})


def garbage(server: Server, requests: list[bytes], count: int) -> Iterator[Check]:
    """Good requests with 5 % malformed."""
    mixed = mixture(requests, count, seed=0)
    fifth = list(itertools.islice(mixed, count // 5))
    first = run(closed_loop(server.port, fifth, clients=CLIENTS))
    before = server.memory()
    rest = run(closed_loop(server.port, mixed, clients=CLIENTS))
    counts = {s: first.counts().get(s, 0) + n for s, n in rest.counts().items()}
    yield Check("statuses", f"{counts}", "no 500", not any(s >= 500 and s != 503 for s in counts))
    leak = server.memory() - before
    yield Check(
        "memory growth after a fifth",
        f"{leak / 2**20:+.1f} MB",
        f"< {MAX_LEAK / 2**20:.0f} MB",
        leak < MAX_LEAK,
    )
    yield Check("ready", f"{server.get('/ready')}", "ready", server.get("/ready")[0] == 200)


def mixture(requests: list[bytes], count: int, seed: int) -> Iterator[bytes]:
    """Good requests and 5 % malformed ones."""
    draw, bad = random.Random(seed), broken(requests, random.Random(seed + 1))
    for number in range(count):
        yield next(bad) if draw.random() < 0.05 else requests[number % len(requests)]


def broken(requests: list[bytes], draw: random.Random) -> Iterator[bytes]:
    """Endless malformed requests."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("1", (9000, 9000)).save(buffer, "PNG")  # 11 kB that decode to 81 megapixels
    bomb = buffer.getvalue()
    kind = f"multipart/form-data; boundary={BOUNDARY}"
    while True:
        body = draw.choice(requests).partition(b"\r\n\r\n")[2]
        cut = body[: draw.randrange(1, len(body))]
        noise = draw.randbytes(draw.randrange(1, 4000))
        place = draw.randrange(len(body))
        dented = body[:place] + noise[:8] + body[place + 8 :]
        yield draw.choice(
            (
                raw("/predict", noise),
                raw("/predict", cut),
                raw("/predict", dented),
                raw("/predict", bomb),
                raw("/predict", b""),
                raw("/predict", body, "application/json"),
                raw("/predict", body, "text/plain; charset=" + "x" * 500),
                raw("/predict?top=-1", body),
                raw("/predict?threshold=many&model=%00", body),
                raw("/explain?method=none", body),
                raw("/" + noise.hex()[:50], body),
                form("/predict", [noise, cut, bomb, body]),
                form("/predict", [body] * 65),
                form("/predict", [body], field="nothing"),
                head("/predict", len(cut), kind) + cut,
                head("/predict", len(noise), "multipart/form-data") + noise,
                head("/features", len(dented), kind) + dented,
            )
        )


def hostile(
    server: Server, requests: list[bytes], images: list[bytes], seconds: float
) -> Iterator[Check]:
    """Rounds of good requests alone and with 5 % hostile ones, with the same clients."""
    good = {id(request) for request in requests}
    paths = ("/predict", "/features", "/explain", "/attention")
    pools = (  # prebuilt, so that the client is not delayed
        list(itertools.islice(broken(requests, random.Random(0)), 200)),
        [raw(path, image) for image in images for path in paths],
    )
    alone, beside = Results(), Results()
    for turn in range(4):  # the first warms up
        for results, load in (
            (alone, itertools.cycle(requests)),
            (beside, sprinkled(requests, pools, seed=turn)),
        ):
            stop = threading.Event()
            rude = threading.Thread(target=misuse, args=(server.port, stop))
            if results is beside:
                rude.start()
            found = run(closed_loop(server.port, load, clients=CLIENTS, seconds=seconds / 3))
            stop.set()
            if results is beside:
                rude.join()
            if turn:
                results.replies += found.replies
                results.seconds += found.seconds
        if not turn:
            before = server.memory()
    yield Check("good requests alone", summary(alone))
    others = Results([reply for reply in beside.replies if id(reply.request) in good])
    others.seconds = beside.seconds
    count = len(beside.replies) - len(others.replies)
    yield Check(f"beside {count} hostile ones", summary(others))
    slowdown = milliseconds(others.of(200), 0.99) / max(milliseconds(alone.of(200), 0.99), 1e-9)
    yield Check(
        "p99 of good requests, ratio",
        f"{slowdown:.2f}",
        f"<= {MAX_SLOWDOWN:g}",
        slowdown <= MAX_SLOWDOWN,
    )
    yield Check(
        "statuses, good", f"{others.counts()}", "200, 503", {*others.counts()} <= {200, 503}
    )
    counts = beside.counts()
    odd = {status for status in counts if status >= 500 and status != 503}
    yield Check("statuses, all", f"{counts}", "no 5xx but 503", not odd)
    growth = server.memory() - before
    yield Check(
        "memory before and after",
        f"{before / 2**20:.0f} and {(before + growth) / 2**20:.0f} MB",
        f"< +{MAX_LEAK / 2**20:.0f} MB",
        growth < MAX_LEAK,
    )
    state = [server.get(path)[0] for path in ("/ready", "/health")]
    yield Check("/ready, /health", f"{state}", "200", state == [200, 200])


def sprinkled(
    requests: list[bytes], pools: Sequence[Sequence[bytes]], seed: int
) -> Iterator[bytes]:
    """Endless good requests, 5 % replaced by one of the pools."""
    draw = random.Random(seed)
    for request in itertools.cycle(requests):
        yield draw.choice(draw.choice(pools)) if draw.random() < 0.05 else request


def misuse(port: int, stop: threading.Event) -> None:
    """Violate HTTP ten times per second, over separate connections."""
    chunked = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    attacks = (
        b"GET /models HTTP/1.1\r\nhost: localhost\r\n\r\n" * 5000,
        chunked + b"1\r\nx\r\n0\r\na: " + b"b" * 2**20,
        chunked + b"1\r\nx\r\n0\r\nauthorization: Bearer x\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"y" * 2**20,
        bytes(range(256)) * 100,
    )
    for attack in itertools.cycle(attacks):
        if stop.wait(0.1):
            return
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=1) as link,
        ):
            link.sendall(attack)
            link.recv(2**16)


def hostile_images(path: Path) -> list[bytes]:
    """The images of a module with `hostile_images()`; without it, a few truncated ones."""
    if path.is_file():
        sys.path.insert(0, str(path.parent))  # for its imports
        spec = importlib.util.spec_from_file_location("hostile_images", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return list(module.hostile_images().values())
    from PIL import Image

    images = []
    for format, mode in (("PNG", "RGBA"), ("BMP", "1"), ("GIF", "P"), ("JPEG", "RGB")):
        buffer = io.BytesIO()
        Image.new(mode, (1000, 1000)).save(buffer, format)
        images.append(buffer.getvalue()[: buffer.tell() // 2])  # cut short: cannot be read
    return images


def vanishing(server: Server, requests: list[bytes], count: int) -> Iterator[Check]:
    """Clients that disconnect while sending, beside others that do not."""
    draw = random.Random(0)

    def disconnect() -> None:
        for _ in range(count):
            request = draw.choice(requests)
            with socket.create_connection(("127.0.0.1", server.port)) as link:
                link.sendall(request[: draw.randrange(1, len(request) + 1)])

    async def scenario() -> Results:
        rude = asyncio.create_task(asyncio.to_thread(disconnect))
        found = await closed_loop(server.port, requests[:200] * 2, clients=8)
        await rude
        return found

    found = run(scenario())
    yield Check(
        f"beside {count} that disconnected", summary(found), "all 200", {*found.counts()} == {200}
    )
    text = ""
    for _ in range(100):
        text = server.get("/metrics")[1].decode()
        if "vitrail_queue_pictures 0.0\n" in text and "vitrail_requests_in_flight 1.0\n" in text:
            break
        time.sleep(0.1)
    yield Check("queue empty", "queue 0", "queue 0", "vitrail_queue_pictures 0.0\n" in text)


def stopping(server: Server, requests: list[bytes]) -> Iterator[Check]:
    """SIGTERM under load."""

    async def scenario() -> tuple[Results, float]:
        endless = itertools.cycle(requests)
        load = asyncio.create_task(closed_loop(server.port, endless, clients=CLIENTS, leave=True))
        await asyncio.sleep(2)
        begun = time.perf_counter()
        server.terminate()
        return await load, begun

    found, begun = run(scenario())
    code = server.process.wait(timeout=60)
    took = time.perf_counter() - begun
    waiting = [reply for reply in found.replies if reply.sent < begun < reply.sent + reply.seconds]
    answered = sum(reply.status == 200 for reply in waiting)
    counts = found.counts()
    yield Check("in flight at the signal", f"{len(waiting)}, of which {answered} were answered")
    yield Check("statuses", f"{counts}", "200, 503", counts.keys() <= {200, 503})
    yield Check("exit", f"{code} after {took:.1f} s", "0", code == 0)


def summary(found: Results) -> str:
    good = found.of(200)
    pace = len(good) / found.seconds if found.seconds else 0.0
    p50, p99 = milliseconds(good, 0.5), milliseconds(good, 0.99)
    return f"{pace:.0f}/s, p50 {p50:.1f}, p99 {p99:.1f} ms"


def pictures_of(data: str) -> list[bytes]:
    """Up to 256 encoded test images."""
    from vitrail.data.datasets import evaluation_split, open_dataset

    source = open_dataset(data, evaluation_split(data) or "all")
    rows = range(0, len(source), max(1, len(source) // 256))
    return [found for row in rows if isinstance(found := source[row].data, bytes)]


def data_of(model: str) -> str:
    settings = json.loads((Path(model) / "config.json").read_text())
    return settings["provenance"]["data"]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Load a real server.")
    parser.add_argument("model", help="a bundle")
    parser.add_argument("--data", help="images to send; default: the model's data")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--quick", action="store_true", help="a minute instead of many")
    parser.add_argument("--only", action="append", metavar="PART", help="of the parts above")
    parser.add_argument("--images", type=Path, default=HOSTILE_IMAGES, help="hostile_images.py")
    options = parser.parse_args(words)
    quick, data = options.quick, options.data or data_of(options.model)
    requests = [raw("/predict", picture) for picture in pictures_of(data)]
    print(
        f"{len(requests)} pictures of {data}, {sum(map(len, requests)) / len(requests):.0f} bytes"
    )
    timed = not options.only or {"throughput", "overload"} & {*options.only}
    pace = offline(options.model, data, 4 if quick else 20) if timed else 0.0
    images = hostile_images(options.images)
    serve = (options.model, "--engine", options.engine, "--log", "off", "--examples", "none")
    failed = 0
    with serving(*serve) as server:
        parts = {
            "throughput": throughput(server, requests, pace, 4 if quick else 20),
            "overload": overload(server, requests, pace, 4 if quick else 20),
            "garbage": garbage(server, requests, 600 if quick else 20_000),
            "hostile": hostile(server, requests, images, 6 if quick else 60),
            "vanishing": vanishing(server, requests, 50 if quick else 500),
            "stopping": stopping(server, requests),
        }
        for name, checks in parts.items():
            if options.only and name not in options.only:
                continue
            print(f"\n{name}")
            for check in checks:
                timing = name == "throughput" or "memory" in check.name or "ratio" in check.name
                informative = quick and timing
                outcome = "ok" if check.passed else "info" if informative else "FAILED"
                mark = outcome if check.expected else ""
                failed += mark == "FAILED"
                expected = f"  expected: {check.expected}" if check.expected else ""
                print(f"  {check.name:36} {check.value}{expected}  {mark}", flush=True)
    print(f"\n{failed} checks failed" if failed else "\nall checks passed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
