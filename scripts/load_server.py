"""Load-test a real server from a second process.

    python scripts/load_server.py runs/first             # several minutes
    python scripts/load_server.py runs/first --quick     # a minute
    python scripts/load_server.py runs/first --only hostile

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
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "serving"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "data"))

from hostile_images import hostile_images
from raw_client import Results, closed_loop, connect, malformed, milliseconds, raw, run
from server_process import Server, serving

from vitrail.cli import SPIN
from vitrail.data.datasets import evaluation_split, open_dataset

CLIENTS = 32
MIN_SHARE = 0.85  # of the offline throughput
MAX_GROWTH = 400 * 2**20  # bytes under overload; admitted requests take at most 256 MB
MAX_LEAK = 30 * 2**20  # bytes after thousands of requests
MAX_REJECTION_SECONDS = 0.5  # p99
MAX_SLOWDOWN = 2.0  # of the p99 of good requests

OFFLINE = """
import json, sys, time
from vitrail.prediction.predictor import Predictor
sys.path.insert(0, sys.argv[4])
from load_server import pictures_of
pictures, seconds = pictures_of(sys.argv[2]), float(sys.argv[3])
predictor, best = Predictor(sys.argv[1]), 0.0
list(predictor.stream(pictures[:64]))
for size in (4, 8, 16, 32):
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds / 4:
        done += len(list(predictor.stream(pictures[:128], batch_size=size)))
    best = max(best, done / (time.perf_counter() - start))
print(json.dumps(best))
"""


async def open_loop(
    port: int, requests: Iterable[bytes], *, rate: float, seconds: float, connections: int
) -> Results:
    """Send at a fixed rate; a request without a free connection is skipped.

    Many connections, so that the server and not the client is the bottleneck.
    """
    results, source = Results(), itertools.cycle(requests)
    free = [await connect(port) for _ in range(connections)]
    tasks, start, number = set(), time.perf_counter(), 0

    async def once(connection, request):
        if connection.transport.is_closing():  # idle connections are closed
            connection = await connect(port)
        results.replies.append(await connection.send(request))
        free.append(await connect(port) if connection.closed else connection)

    while (now := time.perf_counter() - start) < seconds:
        while number < now * rate:
            number += 1
            if free:
                task = asyncio.ensure_future(once(free.pop(), next(source)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        await asyncio.sleep(0.002)
    await asyncio.gather(*tasks)
    results.seconds = time.perf_counter() - start
    return results


class Report:
    """Prints a line per check and counts failures; with `quick`, `timing` ones do not count."""

    def __init__(self, quick: bool) -> None:
        self.quick, self.failed = quick, 0

    def __call__(
        self,
        name: str,
        value: object,
        expected: str = "",
        passed: bool = True,
        timing: bool = False,
    ) -> None:
        outcome = "ok" if passed else "info" if self.quick and timing else "FAILED"
        self.failed += outcome == "FAILED"
        expectation = f"  expected: {expected}  {outcome}" if expected else ""
        print(f"  {name:36} {value}{expectation}", flush=True)


def offline(model: str, data: str, seconds: float) -> float:
    """Images per second of the same predictor without a server, at its best batch size."""
    environment = os.environ | {"GOMP_SPINCOUNT": SPIN}  # as every command has it
    here = str(Path(__file__).parent)
    words = [sys.executable, "-c", OFFLINE, model, data, str(seconds), here]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def throughput(
    report: Report, server: Server, requests: list[bytes], pace: float, seconds: float
) -> None:
    """Closed loops with one client and with many."""
    endless = itertools.cycle(requests)
    report(
        "one client",
        summary(run(closed_loop(server.port, endless, clients=1, seconds=seconds / 4))),
    )
    run(closed_loop(server.port, endless, clients=CLIENTS, seconds=seconds / 4))  # warm up
    results = run(closed_loop(server.port, endless, clients=CLIENTS, seconds=seconds))
    share = len(results.of(200)) / results.seconds / pace
    report(f"{CLIENTS} clients", summary(results))
    least, text = f">= {MIN_SHARE:.0%}", f"{share:.0%} of {pace:.0f}/s"
    report("of the offline throughput", text, least, share >= MIN_SHARE, timing=True)
    report("statuses", results.counts(), "200", results.counts().keys() == {200})


def overload(
    report: Report, server: Server, requests: list[bytes], pace: float, seconds: float
) -> None:
    """Four times the capacity, then normal load."""
    memory = [server.memory()]

    async def watched() -> Results:
        load = asyncio.ensure_future(
            open_loop(server.port, requests, rate=4 * pace, seconds=seconds, connections=700)
        )
        while not load.done():
            memory.append(server.memory())
            await asyncio.sleep(0.1)
        return await load

    results = run(watched())
    rejected, rate = results.of(503), len(results.replies) / results.seconds
    report("requests/s", f"{rate:.0f} = {rate / pace:.1f} times the capacity")
    report("answered", summary(results), "some", bool(results.of(200)))
    late = milliseconds(rejected, 0.99)
    text = f"{len(rejected):,}: p50 {milliseconds(rejected, 0.5):.1f}, p99 {late:.1f} ms"
    most = 1000 * MAX_REJECTION_SECONDS
    report("rejected (503)", text, f"some, p99 < {most:.0f} ms", bool(rejected) and late < most)
    odd = {s: n for s, n in results.counts().items() if s not in (200, 503)}
    report("other statuses", odd or "none", "none", not odd)
    check_memory(report, memory[0], max(memory), MAX_GROWTH)
    again = run(closed_loop(server.port, requests[:CLIENTS] * 4, clients=8))
    report("afterwards", summary(again), "all 200", again.counts().keys() == {200})


def garbage(report: Report, server: Server, requests: list[bytes], count: int) -> None:
    """Good requests with 5 % malformed."""
    mixed = itertools.islice(mixture(requests, [malformed(requests, random.Random(1))], 0), count)
    first = run(
        closed_loop(server.port, list(itertools.islice(mixed, count // 5)), clients=CLIENTS)
    )
    before = server.memory()
    rest = run(closed_loop(server.port, mixed, clients=CLIENTS))
    counts = Results(first.replies + rest.replies).counts()
    odd = [status for status in counts if not status or (status >= 500 and status != 503)]
    report("statuses", counts, "no 500", not odd)
    check_memory(report, before, server.memory(), MAX_LEAK)
    report("ready", server.get("/ready"), "ready", server.get("/ready")[0] == 200)


def mixture(requests: list[bytes], pools: Sequence[Iterator[bytes]], seed: int) -> Iterator[bytes]:
    """Endless good requests, 5 % replaced by the next of one of the pools."""
    draw = random.Random(seed)
    for request in itertools.cycle(requests):
        yield next(draw.choice(pools)) if draw.random() < 0.05 else request


def hostile(report: Report, server: Server, requests: list[bytes], seconds: float) -> None:
    """Rounds of good requests alone and with 5 % hostile ones, with the same clients."""
    good = {id(request) for request in requests}
    paths = ("/predict", "/features", "/explain", "/attention")
    pools = [  # prebuilt, so that the client is not delayed
        itertools.cycle(itertools.islice(malformed(requests, random.Random(0)), 200)),
        itertools.cycle(raw(path, image) for image in hostile_images().values() for path in paths),
    ]
    alone, beside, before = Results(), Results(), 0
    for turn in range(4):  # the first warms up
        for results in (alone, beside):
            stop = threading.Event()
            rude = threading.Thread(target=misuse, args=(server.port, stop))
            load = itertools.cycle(requests)
            if results is beside:
                load = mixture(requests, pools, seed=turn)
                rude.start()
            part = run(closed_loop(server.port, load, clients=CLIENTS, seconds=seconds / 3))
            stop.set()
            if results is beside:
                rude.join()
            if turn:
                results.replies += part.replies
                results.seconds += part.seconds
        before = before or server.memory()
    others = Results([x for x in beside.replies if id(x.request) in good], beside.seconds)
    report("good requests alone", summary(alone))
    count = len(beside.replies) - len(others.replies)
    report(f"beside {count} hostile ones", summary(others))
    slowdown = milliseconds(others.of(200), 0.99) / max(milliseconds(alone.of(200), 0.99), 1e-9)
    text, passed = f"<= {MAX_SLOWDOWN:g}", slowdown <= MAX_SLOWDOWN
    report("p99 of good requests, ratio", f"{slowdown:.2f}", text, passed, timing=True)
    counts, every = others.counts(), beside.counts()
    report("statuses, good", counts, "200, 503", {*counts} <= {200, 503})
    odd = {status for status in every if status >= 500 and status != 503}
    report("statuses, all", every, "no 5xx but 503", not odd)
    check_memory(report, before, server.memory(), MAX_LEAK)
    state = [server.get(path)[0] for path in ("/ready", "/health")]
    report("/ready, /health", state, "200", state == [200, 200])


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


def vanishing(report: Report, server: Server, requests: list[bytes], count: int) -> None:
    """Clients that disconnect while sending, beside others that do not."""
    draw = random.Random(0)

    def disconnect() -> None:
        for _ in range(count):
            request = draw.choice(requests)
            with socket.create_connection(("127.0.0.1", server.port)) as link:
                link.sendall(request[: draw.randrange(1, len(request) + 1)])

    async def scenario() -> Results:
        rude = asyncio.create_task(asyncio.to_thread(disconnect))
        results = await closed_loop(server.port, requests[:200] * 2, clients=8)
        await rude
        return results

    results, text = run(scenario()), ""
    name = f"beside {count} that disconnected"
    report(name, summary(results), "all 200", {*results.counts()} == {200})
    for _ in range(100):
        text = server.get("/metrics")[1].decode()
        if "vitrail_queue_pictures 0.0\n" in text and "vitrail_requests_in_flight 1.0\n" in text:
            break
        time.sleep(0.1)
    report("queue empty", "queue 0", "queue 0", "vitrail_queue_pictures 0.0\n" in text)


def stopping(report: Report, server: Server, requests: list[bytes]) -> None:
    """SIGTERM under load."""

    async def scenario() -> tuple[Results, float]:
        endless = itertools.cycle(requests)
        load = asyncio.create_task(closed_loop(server.port, endless, clients=CLIENTS, leave=True))
        await asyncio.sleep(2)
        start = time.perf_counter()
        server.terminate()
        return await load, start

    results, start = run(scenario())
    code = server.process.wait(timeout=60)
    seconds = time.perf_counter() - start
    waiting = [x for x in results.replies if x.sent < start < x.sent + x.seconds]
    answered = sum(reply.status == 200 for reply in waiting)
    counts = results.counts()
    report("in flight at the signal", f"{len(waiting)}, of which {answered} were answered")
    report("statuses", counts, "200, 503", counts.keys() <= {200, 503})
    report("exit", f"{code} after {seconds:.1f} s", "0", code == 0)


def check_memory(report: Report, before: int, after: int, limit: int) -> None:
    text = f"{before / 2**20:.0f} and {after / 2**20:.0f} MB"
    most = f"< +{limit / 2**20:.0f} MB"
    report("memory before and after", text, most, after - before < limit, timing=True)


def summary(results: Results) -> str:
    good = results.of(200)
    pace = len(good) / results.seconds if results.seconds else 0.0
    p50, p99 = milliseconds(good, 0.5), milliseconds(good, 0.99)
    return f"{pace:.0f}/s, p50 {p50:.1f}, p99 {p99:.1f} ms"


def pictures_of(data: str) -> list[bytes]:
    """Up to 256 encoded test images."""
    source = open_dataset(data, evaluation_split(data) or "all")
    rows = range(0, len(source), max(1, len(source) // 256))
    return [image for row in rows if isinstance(image := source[row].data, bytes)]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Load a real server.")
    parser.add_argument("model", help="a bundle")
    parser.add_argument("--data", help="images to send; default: the model's data")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--quick", action="store_true", help="a minute instead of many")
    parser.add_argument("--only", action="append", metavar="PART", help="of the parts above")
    options = parser.parse_args(words)
    config = json.loads((Path(options.model) / "config.json").read_text())
    quick, data = options.quick, options.data or config["provenance"]["data"]
    requests = [raw("/predict", picture) for picture in pictures_of(data)]
    print(f"{len(requests)} images of {data}, {sum(map(len, requests)) / len(requests):.0f} bytes")
    timed = not options.only or {"throughput", "overload"} & {*options.only}
    pace = offline(options.model, data, 4 if quick else 20) if timed else 0.0
    serve = (options.model, "--engine", options.engine, "--log", "off", "--examples", "none")
    report = Report(quick)
    with serving(*serve) as server:
        target, seconds = (report, server, requests), 4 if quick else 20
        parts = {
            "throughput": lambda: throughput(*target, pace, seconds),
            "overload": lambda: overload(*target, pace, seconds),
            "garbage": lambda: garbage(*target, 600 if quick else 20_000),
            "hostile": lambda: hostile(*target, 6 if quick else 60),
            "vanishing": lambda: vanishing(*target, 50 if quick else 500),
            "stopping": lambda: stopping(*target),
        }
        for name, part in parts.items():
            if not options.only or name in options.only:
                print(f"\n{name}")
                part()
    print(f"\n{report.failed} checks failed" if report.failed else "\nall checks passed")
    return int(report.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
