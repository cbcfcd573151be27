"""One run of one library on one dataset, in its own process; prints the result as JSON.

    python benchmarks/runners.py timm cifar --variant "light, 1e-3" --seconds 90 --seed 0
    python benchmarks/runners.py vitrail cifar --seconds 45

The clock runs from the first to the last step and stops during evaluations; imports and opening the
data are not counted. vitrail's clock also includes inspecting the data, building the model,
planning and decoding images, which is done for the peers beforehand.
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
from race_models import with_equal_flops
from race_peers import Task, run_timm, run_vit_pytorch
from race_sets import DATASETS, default_model, test_split_of
from race_sets import reference as reference_of
from race_variants import VARIANTS
from vitrail import evaluate, load
from vitrail.data.datasets import open_dataset
from vitrail.planning.flops import cost_of
from vitrail.training.callbacks import read_rows
from vitrail.training.config import RunConfig, Settings
from vitrail.training.data_module import open_splits
from vitrail.training.memory import configure_malloc
from vitrail.training.recipes import METRICS
from vitrail.training.trainer import run

Result = dict[str, Any]

SPARE = 1.5  # of the 2 seconds that vitrail plans for saving and a report, which no peer writes


def run_vitrail(data: str, seconds: float, seed: int) -> Result:
    """`vitrail train` with the data, the time and the seed; then evaluate it.

    Its time budget ends with the last evaluation, which is left out here, and with saving.
    """
    settings = Settings(minutes=(seconds + SPARE) / 60, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        config = RunConfig(
            data=data,
            out=out,
            settings=settings,
            splits=replace(open_splits(data, settings), held_out={}),
        )
        done = run(config, started=time.monotonic())
        model = load(out)
        cost = cost_of(model.config)
        accuracy = evaluate(model, data, test_split_of(data)).accuracy
        last = [row["seconds"] for row in read_rows(out / METRICS) if "loss" in row][-1]
    return {
        "parameters": cost.parameters,
        "gflops": cost.forward / 1e9,
        "accuracy": accuracy,
        "seconds": last,
        "steps": done.step,
        "curve": [(last, accuracy)],
    }


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
    parser.add_argument("contender", choices=["vitrail", *VARIANTS])
    parser.add_argument("course", choices=list(DATASETS))
    parser.add_argument("--variant", default="")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.contender == "vitrail":
        configure_malloc()  # as the command does it
    data = reference_of(DATASETS[options.course])
    seconds, seed = options.seconds, options.seed
    if options.contender == "vitrail":
        result = run_vitrail(data, seconds, seed)
    else:
        source = open_dataset(data, "train")
        config = with_equal_flops(default_model(source))
        task = Task(
            data=data,
            config=config.change(num_classes=len(source.classes)),
            variant=VARIANTS[options.contender][options.variant],
            seconds=seconds,
            seed=seed,
        )
        result = run_peer(options.contender, task)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
