"""Speed of two checkouts side by side: interleaved rounds, one worker process for each.

    python scripts/compare_versions.py ../before .
    python scripts/compare_versions.py ../before . --tasks augmentation --rounds 9

Prints a Markdown table: median time before and after, and the median of the ratios of neighboring
rounds. Only documented API is timed, so that both versions run the same code. Run it on a quiet
machine.
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
import contextlib, io, json, os, sys, time
from pathlib import Path
import numpy as np
import torch
import vitrail
from vitrail.data.preprocessing import Augmentation, preset
from vitrail.data.transforms import TrainTransform

folder = sys.argv[1]
images = torch.zeros
small = vitrail.create("ViT-Nano/8", num_classes=10, image_size=64)
base = vitrail.create("ViT-S/16", num_classes=1000)
batches = {"small": torch.randn(64, 3, 64, 64), "base": torch.randn(4, 3, 224, 224)}

def forward(model, batch):
    model.eval()
    with torch.inference_mode():
        model(batch)

def train_step(model, batch):
    model.train()
    labels = torch.zeros(len(batch), dtype=torch.long)
    torch.nn.functional.cross_entropy(model(batch), labels).backward()
    model.zero_grad()

def load():
    vitrail.load(folder + "/bundle")

def load_timm():
    vitrail.load(folder + "/timm")

def pipeline():
    vitrail.evaluate(folder + "/bundle-tiny", folder + "/images", workers=0)

def augment(size, data):
    policy = Augmentation(policy="randaugment", flavor="timm", magnitude=9, erasing=0.25)
    transform = TrainTransform(preprocessing=preset("timm", size), augmentation=policy)
    for number, image in enumerate(data):
        transform(image, np.random.default_rng(number))

files = [path.read_bytes() for path in sorted(Path(folder).glob("images/test/*/*.jpg"))]
pixels = np.random.default_rng(0).integers(0, 256, (1000, 32, 32, 3), dtype=np.uint8)

TASKS = {
    "ViT-S/16 at 224, forward": lambda: forward(base, batches["base"]),
    "ViT-S/16 at 224, training step": lambda: train_step(base, batches["base"]),
    "ViT-Nano/8 at 64, forward": lambda: forward(small, batches["small"]),
    "ViT-Nano/8 at 64, training step": lambda: train_step(small, batches["small"]),
    "load a bundle of ViT-S/16": load,
    "load a timm folder of ViT-S/16": load_timm,
    "decode and evaluate 96 images": pipeline,
    "augmentation in training, 96 files at 224": lambda: augment((224, 224), files),
    "augmentation in training, 1,000 arrays at 32": lambda: augment((32, 32), pixels),
}

print(json.dumps(list(TASKS)), flush=True)
for line in sys.stdin:
    task = TASKS[line.strip()]
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        task()
    print(time.perf_counter() - start, flush=True)
"""

PREPARE = """
import sys
from pathlib import Path
import numpy as np
from PIL import Image
import vitrail

folder = Path(sys.argv[1])
rng = np.random.default_rng(0)
for name in ("a", "b"):
    (folder / "images" / "test" / name).mkdir(parents=True)
    for number in range(48):
        pixels = rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize((640, 480), Image.Resampling.BICUBIC)
        image.save(folder / "images" / "test" / name / f"{number}.jpg")
model = vitrail.create("ViT-S/16", num_classes=1000)
vitrail.save(model, folder / "bundle")
vitrail.save(model, folder / "timm", "timm")
tiny = vitrail.create("ViT-Pico/8", num_classes=2, image_size=64)
vitrail.save(tiny, folder / "bundle-tiny", class_names=("a", "b"))
"""


def worker(checkout: Path, folder: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, folder],
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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(options.before.resolve() / "src")}
        subprocess.run([sys.executable, "-c", PREPARE, folder], env=environment, check=True)
        workers = [worker(options.before, folder), worker(options.after, folder)]

        def ask(process: "subprocess.Popen[str]", task: str) -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(task + "\n")
            process.stdin.flush()
            return float(process.stdout.readline())

        tasks, _ = (json.loads(p.stdout.readline()) for p in workers)  # type: ignore[union-attr]
        print("| | before, ms | after, ms | after / before |\n|---|---:|---:|---:|")
        for task in (task for task in tasks if options.tasks in task):
            for process in workers:
                ask(process, task)  # warm up
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
