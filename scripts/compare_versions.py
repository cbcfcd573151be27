"""Speed of two checkouts side by side: interleaved rounds, one worker process for each.

    python scripts/compare_versions.py ../before .
    python scripts/compare_versions.py ../before . --tasks augmentation --rounds 9

Prints a Markdown table: median time before and after, and the median of the ratios of neighboring
rounds. Only documented API is timed, so that both versions run the same code; both must be 0.1 or
later. `make bench` compares with 0.1 (benchmarks/versions.py). Run it on a quiet machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS = 15

WORKER = """
import atexit, contextlib, http.client, io, json, os, socket, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
import numpy as np
import torch
from PIL import Image
import vitrail
from vitrail.data.preprocessing import preset
from vitrail.data.transforms import TrainTransform
try:
    from vitrail.data.preprocessing import Augmentation
except ImportError:  # 0.1
    from vitrail.data.variation import Augmentation

folder, out = sys.argv[1], sys.argv[2]  # shared by both versions, and of this one
os.environ["VITRAIL_CACHE"] = out + "/cache"

# What tasks need is made at the first use. The version before is asked first, so that both read
# the files that it has written.

@cache
def nano():
    model = vitrail.create("ViT-Nano/8", num_classes=10, image_size=64)
    return model, torch.randn(64, 3, 64, 64)

@cache
def small():
    return vitrail.create("ViT-S/16", num_classes=1000), torch.randn(4, 3, 224, 224)

@cache
def images():
    rng, root = np.random.default_rng(0), Path(folder, "images")
    for name in ("a", "b") if not root.exists() else ():
        (root / "test" / name).mkdir(parents=True)
        for number in range(48):
            pixels = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
            photo = pixels.resize((640, 480), Image.Resampling.BICUBIC)
            photo.save(root / "test" / name / f"{number}.jpg")
    return [path.read_bytes() for path in sorted(root.glob("test/*/*.jpg"))]

@cache
def saved(name, format="bundle"):
    path = Path(folder, f"{name}-{format}")
    if not path.exists() and name == "tiny":
        tiny = vitrail.create("ViT-Pico/8", num_classes=2, image_size=64)
        vitrail.save(tiny, path, class_names=("a", "b"))
    elif not path.exists():
        vitrail.save(small()[0], path, format)
    return str(path)

def forward(model, batch):
    model.eval()
    with torch.inference_mode():
        model(batch)

def train_step(model, batch):
    model.train()
    labels = torch.zeros(len(batch), dtype=torch.long)
    torch.nn.functional.cross_entropy(model(batch), labels).backward()
    model.zero_grad()

def evaluate():
    images()
    vitrail.evaluate(saved("tiny"), folder + "/images", workers=0)

def augment(size, data):
    policy = Augmentation(policy="randaugment", flavor="timm", magnitude=9, erasing=0.25)
    transform = TrainTransform(preprocessing=preset("timm", size), augmentation=policy)
    for number, image in enumerate(data):
        transform(image, np.random.default_rng(number))

def export():
    vitrail.export_model(saved("small"), out + "/model.onnx", overwrite=True)

@cache
def onnx():
    return vitrail.Predictor(saved("small"), engine="onnx")

@cache
def server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", saved("tiny"), "--port", str(port), "--log", "off", "--quiet"]
    words = [sys.executable, "-m", "vitrail", *words, "--examples", "none", "--batch", "8"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(lambda: (process.terminate(), process.wait()))
    while process.poll() is None:
        with contextlib.suppress(OSError):
            link = http.client.HTTPConnection("127.0.0.1", port)
            link.request("GET", "/ready")
            if link.getresponse().status == 200:
                return port
        time.sleep(0.1)
    raise RuntimeError("vitrail serve exited")

def request_images(clients=32, each=8):
    port, bodies = server(), images()[:each]
    def client(_):
        link = http.client.HTTPConnection("127.0.0.1", port)
        for body in bodies:
            link.request("POST", "/predict", body, {"Content-Type": "image/jpeg"})
            reply = link.getresponse()
            assert reply.status == 200, reply.read()
            reply.read()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))

pixels = np.random.default_rng(0).integers(0, 256, (1000, 32, 32, 3), dtype=np.uint8)

TASKS = {
    "ViT-S/16 at 224, forward": lambda: forward(*small()),
    "ViT-S/16 at 224, training step": lambda: train_step(*small()),
    "ViT-Nano/8 at 64, forward": lambda: forward(*nano()),
    "ViT-Nano/8 at 64, training step": lambda: train_step(*nano()),
    "load a bundle of ViT-S/16": lambda: vitrail.load(saved("small")),
    "load a timm folder of ViT-S/16": lambda: vitrail.load(saved("small", "timm")),
    "decode and evaluate 96 images": evaluate,
    "augmentation in training, 96 files at 224": lambda: augment((224, 224), images()),
    "augmentation in training, 1,000 arrays at 32": lambda: augment((32, 32), pixels),
    "serving, 32 clients, 256 images": request_images,
    "export ViT-S/16 to ONNX": export,
    "ViT-S/16 in onnxruntime, 16 images": lambda: onnx()(images()[:16]),
}

print(json.dumps(list(TASKS)), flush=True)
for line in sys.stdin:
    task, start = TASKS[line.strip()], time.perf_counter()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            task()
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)
    else:
        print(time.perf_counter() - start, flush=True)
"""


def worker(checkout: Path, folder: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, folder, tempfile.mkdtemp(dir=folder)],
        env=os.environ | {"PYTHONPATH": str(checkout.resolve() / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tasks", default="", help="only tasks whose name contains this")
    parser.add_argument("--names", nargs=2, default=("before", "after"), help="of the columns")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workers = [worker(options.before, folder), worker(options.after, folder)]

        def ask(process: "subprocess.Popen[str]", task: str) -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(task + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            result = json.loads(line) if line else "the worker exited"
            if isinstance(result, str):
                raise RuntimeError(result)
            return float(result)

        tasks, _ = (json.loads(p.stdout.readline()) for p in workers)  # type: ignore[union-attr]
        before, after = options.names
        print(f"| | {before}, ms | {after}, ms | {after} / {before} |\n|---|---:|---:|---:|")
        for task in (task for task in tasks if options.tasks in task):
            try:
                for process in workers:
                    ask(process, task)  # warm up
            except RuntimeError as error:  # for example a missing extra
                print(f"{task}: {error}", file=sys.stderr, flush=True)
                continue
            times: list[list[float]] = [[], []]
            for round_number in range(options.rounds):
                order = (0, 1) if round_number % 2 else (1, 0)
                for which in order:
                    times[which].append(ask(workers[which], task))
            ratio = statistics.median(after / before for before, after in zip(*times, strict=True))
            before, after = (1000 * statistics.median(column) for column in times)
            print(f"| {task} | {before:.1f} | {after:.1f} | {ratio:.3f} |", flush=True)
        for process in workers:
            process.stdin.close()  # type: ignore[union-attr]
            process.wait()


if __name__ == "__main__":
    main()
