"""One contender, one data set, one run, in a process of its own; what came out is printed as JSON.

    python benchmarks/runners.py timm cifar --variant "light, 1e-3" --seconds 90 --seed 0
    python benchmarks/runners.py vitrail digits --start .bench/pretrained --seconds 45

The clock runs from before the first step to after the last and stands still while a model is
judged; imports and opening the data come before it. vitrail is called as anyone would call it: its
clock includes looking at the data, building the model, planning and decoding pictures, which are
done for the peers beforehand.
"""

import argparse
import json
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # or torch would do so within the time of whoever needs it first
import torch.distributed.checkpoint

from peers import make_torchvision_importable
from race_models import of_equal_work
from race_peers import Task, run_timm, run_vit_pytorch
from race_sets import COURSES, DIGITS, default_model, judged_by
from race_sets import reference as reference_of
from race_variants import FINETUNING, VARIANTS
from vitrail import evaluate, load, save, train
from vitrail.data.datasets import open_dataset
from vitrail.planning.cost import cost_of
from vitrail.training.folder import METRICS
from vitrail.training.material import open_material
from vitrail.training.memory import keep_memory
from vitrail.training.records import read_rows
from vitrail.training.run import run
from vitrail.training.settings import Settings
from vitrail.training.setup import Order

Result = dict[str, Any]

SPARE = 1.5  # of the 2 seconds that vitrail plans for saving and a report, which no peer writes
PRETRAINED = {"name": "ViT-Nano/4", "image_size": 32, "channels": 3, "pool": "cls"}


def run_vitrail(data: str, seconds: float, seed: int, start: Path | None = None) -> Result:
    """`vitrail train` or `finetune` with the data, the time and the seed; judged when it is done.

    Its time budget ends with the last evaluation, which is left out here, and with saving.
    """
    settings = Settings(minutes=(seconds + SPARE) / 60, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        order = Order(
            data=data,
            out=out,
            settings=settings,
            start=str(start / "bundle") if start else "",
            material=replace(open_material(data, settings), judged={}),
        )
        done = run(order, begun=time.monotonic())
        model = load(out)
        cost = cost_of(model.config)
        accuracy = evaluate(model, data, judged_by(data)).accuracy
        last = [row["seconds"] for row in read_rows(out / METRICS) if "loss" in row][-1]
    return {
        "parameters": cost.parameters,
        "gflops": cost.forward / 1e9,
        "accuracy": accuracy,
        "seconds": last,
        "steps": done.step,
        "curve": [(last, accuracy)],
    }


def pretrain(data: str, seconds: float, seed: int, out: Path) -> Result:
    """A plain ViT with a class token, trained by vitrail and written for each library."""
    done = train(data, out / "bundle", minutes=seconds / 60, seed=seed, model=PRETRAINED)
    model = load(out / "bundle")
    save(model, out / "timm", "timm")
    save(model, out / "huggingface", "huggingface")
    return {"accuracy": done.outcomes[judged_by(data)].accuracy}


def run_peer(contender: str, task: Task) -> Result:
    """One peer, from its seed on."""
    make_torchvision_importable()
    random.seed(task.seed)
    torch.manual_seed(task.seed)
    if contender == "transformers":
        from race_trainer import run_transformers

        return run_transformers(task)
    return {"timm": run_timm, "vit-pytorch": run_vit_pytorch}[contender](task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contender", choices=["vitrail", "pretrain", *VARIANTS])
    parser.add_argument("course", choices=[*COURSES, "digits"])
    parser.add_argument("--variant", default="")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="the folder of a pre-trained model")
    parser.add_argument("--out", type=Path, help="where to put a pre-trained model")
    options = parser.parse_args()
    if options.contender in ("vitrail", "pretrain"):
        keep_memory()  # as the command does it
    data = reference_of(COURSES.get(options.course, DIGITS))
    seconds, seed, start = options.seconds, options.seed, options.start
    if options.contender == "vitrail":
        result = run_vitrail(data, seconds, seed, start)
    elif options.contender == "pretrain":
        result = pretrain(data, seconds, seed, options.out)
    else:
        table = FINETUNING if start else VARIANTS
        source = open_dataset(data, "train")
        config = load(start / "bundle").config if start else of_equal_work(default_model(source))
        task = Task(
            data=data,
            config=config.change(num_classes=len(source.classes)),
            variant=table[options.contender][options.variant],
            seconds=seconds,
            seed=seed,
            start=start,
        )
        result = run_peer(options.contender, task)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
