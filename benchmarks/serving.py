"""Inference over HTTP: `vitrail serve` against a plain server of a timm model and of a pipeline.

    python benchmarks/serving.py                   the section of benchmarks/README.md
    python benchmarks/serving.py timm FOLDER       the plain server, for the clients to ask

The plain servers are FastAPI and uvicorn in one process, which answer each request alone: in the
event loop, and for timm also in FastAPI's thread pool. Clients and the process under load share the
cores, as in tests/serving.
"""

import io
import itertools
import json
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from PIL import Image

import vitrail
from peers import make_torchvision_importable
from prediction import SIZE, random_model
from timing import claim
from vitrail.data.datasets import open_dataset

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "serving"))
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from raw_client import Results, closed_loop, milliseconds, raw, run
from server_process import Server, serving, wait

from load_server import offline, pictures_of

MODEL = "ViT-Ti/16"
CLIENTS = (1, 8, 32)
ROUNDS, SECONDS = 3, 4.0
PHOTOGRAPHS = 64
OURS = "vitrail serve"

Loads = dict[tuple[str, int], list[Results]]  # by server and clients, a result for each round


def report() -> str:
    """The section of benchmarks/README.md, measured now."""
    make_torchvision_importable()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        write_photographs(folder / "photographs")
        with ExitStack() as stack:
            servers = {OURS: stack.enter_context(our_server(folder / "vitrail"))}
            for peer in PLAIN:
                servers[f"FastAPI and {peer}"] = stack.enter_context(plain_server(peer, folder))
            loads, paces = loaded(servers, folder)
    return "\n".join(["## Serving", "", *page(loads, paces), ""])


def write_models(folder: Path) -> None:
    """The same weights for each library."""
    model = random_model(MODEL)
    vitrail.save(model, folder / "vitrail")
    vitrail.save(model, folder / "timm", "timm")
    vitrail.save(model, folder / "transformers", "huggingface")


def write_photographs(folder: Path) -> None:
    """Real images, enlarged to the size of photographs on the web."""
    (folder / "test" / "hands").mkdir(parents=True)
    source = open_dataset("builtin:sign-digits", "all")
    for number in range(PHOTOGRAPHS):
        image = Image.open(io.BytesIO(source[number].data)).convert("RGB")
        path = folder / "test" / "hands" / f"{number}.jpg"
        image.resize(SIZE, Image.Resampling.BICUBIC).save(path, quality=90)


def loaded(servers: dict[str, Server], folder: Path) -> tuple[Loads, list[float]]:
    """Load one server at a time with each number of clients; and measure in each round the images
    per second of the same predictor without a server."""
    model, photographs = str(folder / "vitrail"), str(folder / "photographs")
    endless = itertools.cycle([raw("/predict", data) for data in pictures_of(photographs)])
    loads: Loads = {(name, clients): [] for clients in CLIENTS for name in servers}
    paces = []
    for server in servers.values():
        run(closed_loop(server.port, endless, clients=2, seconds=1))
    for turn in range(ROUNDS):
        print(f"  round {turn + 1} of {ROUNDS}", flush=True)
        paces.append(offline(model, photographs, SECONDS))
        for name, clients in loads:
            port = servers[name].port
            results = run(closed_loop(port, endless, clients=clients, seconds=SECONDS))
            assert results.counts().keys() == {200}, f"{name}: {results.counts()}"
            loads[name, clients].append(results)
    return loads, paces


def page(loads: Loads, paces: list[float]) -> list[str]:
    """Claims, words and the table."""
    most = max(CLIENTS)
    peer = max((n for n, _ in loads if n != OURS), key=lambda n: median_rate(loads[n, most]))
    pairs = zip(loads[OURS, most], paces, strict=True)
    share = statistics.median(rate(results) / pace for results, pace in pairs)
    return [
        claim(
            f"HTTP requests per second, {most} clients, {MODEL}",
            f"{ratio(loads, peer, most):.2f} times the faster plain server",
        ),
        claim(
            f"HTTP requests per second, {most} clients, relative to the predictor without a server",
            f"{share:.0%}",
        ),
        "",
        f"{MODEL} at 224 pixels on JPEGs of {SIZE[0]} x {SIZE[1]}, one per request over keep-alive",
        "connections; each client sends its next request after a response. One process per server;",
        "the plain ones classify images one at a time with all cores, or with *thread pool* up to",
        f"40 at once. They share the cores with clients. {ROUNDS} rounds of {SECONDS:.0f} seconds,",
        "interleaved; rates are medians over rounds, latencies over all requests. *Ratio* is the",
        "median over rounds of vitrail's rate divided by this server's. Without a server, the same",
        "predictor classifies",
        f"{statistics.median(paces):.1f} images per second, at its best batch size.",
        "",
        "| clients | server | requests per second | ratio | p50, ms | p99, ms |",
        "|---|---|---|---|---|---|",
        *(row(loads, name, clients) for name, clients in loads),
    ]


def row(loads: Loads, name: str, clients: int) -> str:
    replies = [reply for results in loads[name, clients] for reply in results.replies]
    return (
        f"| {clients} | {name} | {median_rate(loads[name, clients]):.1f} "
        f"| {ratio(loads, name, clients):.2f} "
        f"| {milliseconds(replies, 0.5):.0f} | {milliseconds(replies, 0.99):.0f} |"
    )


def ratio(loads: Loads, name: str, clients: int) -> float:
    pairs = zip(loads[OURS, clients], loads[name, clients], strict=True)
    return statistics.median(rate(ours) / rate(other) for ours, other in pairs)


def median_rate(rounds: list[Results]) -> float:
    return statistics.median(map(rate, rounds))


def rate(results: Results) -> float:
    return len(results.replies) / results.seconds


def our_server(bundle: Path):
    return serving(str(bundle), "--log", "off", "--examples", "none")


@contextmanager
def plain_server(peer: str, folder: Path) -> Iterator[Server]:
    """Start this file as a server process, wait until it responds, and stop it at the end."""
    output = folder / f"{peer}.log"
    with output.open("wb") as file:
        words = [sys.executable, __file__, peer, str(folder)]
        process = subprocess.Popen(words, stdout=file, stderr=file)
    try:
        yield Server(process, wait(process, output), output)
    finally:
        process.kill()
        process.wait()


def run_plain_server(peer: str, folder: Path) -> None:
    """Serve one model with FastAPI and uvicorn."""
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.concurrency import run_in_threadpool

    app, answer = FastAPI(), PLAIN[peer](folder)

    @app.get("/ready")
    async def ready() -> str:
        return "ready"

    @app.post("/predict")
    async def predict(request: Request) -> list[dict[str, object]]:
        data = await request.body()
        return await run_in_threadpool(reply, data) if peer.endswith(THREADS) else reply(data)

    def reply(data: bytes) -> list[dict[str, object]]:
        return answer(Image.open(io.BytesIO(data)).convert("RGB"))

    listener = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


Answer = Callable[[Image.Image], list[dict[str, object]]]


def by_timm(folder: Path) -> Answer:
    """As in the model cards of timm."""
    import timm
    from timm.data import create_transform, resolve_model_data_config

    settings = json.loads((folder / "timm" / "config.json").read_text())
    weights = next((folder / "timm").glob("*.safetensors"))
    model = timm.create_model(
        settings["architecture"],
        num_classes=1000,
        checkpoint_path=str(weights),
        **settings.get("model_args", {}),
    ).eval()
    transform = create_transform(**resolve_model_data_config(model), is_training=False)

    @torch.inference_mode()
    def answer(image: Image.Image) -> list[dict[str, object]]:
        best = model(transform(image).unsqueeze(0)).softmax(dim=1)[0].topk(5)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [{"label": label, "score": score} for label, score in pairs]

    return answer


def by_transformers(folder: Path) -> Answer:
    """Its image-classification pipeline."""
    from transformers import AutoImageProcessor, ViTForImageClassification, pipeline

    folder = folder / "transformers"
    ask = pipeline(
        "image-classification",
        model=ViTForImageClassification.from_pretrained(folder),
        image_processor=AutoImageProcessor.from_pretrained(folder),
        device="cpu",
    )
    return lambda image: ask(image, top_k=5)


THREADS = ", thread pool"
PLAIN: dict[str, Callable[[Path], Answer]] = {
    "timm": by_timm,
    f"timm{THREADS}": by_timm,
    "transformers": by_transformers,
}


if __name__ == "__main__":
    if sys.argv[1:]:
        make_torchvision_importable()
        run_plain_server(sys.argv[1], Path(sys.argv[2]))
    else:
        print(report())
