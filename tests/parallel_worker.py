"""The processes that `test_parallel.py` starts with torchrun; one start serves many checks.

    torchrun --standalone --nproc_per_node=2 tests/parallel_worker.py FOLDER

The test itself calls the same functions in one process. Results are saved to FOLDER/results.pt.
"""

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from vitrail import BitConfig, MixerConfig, VitConfig, distributed
from vitrail.errors import CheckpointError
from vitrail.models.vit import build
from vitrail.training.checkpoint import first_nonfinite, load_state, save_state
from vitrail.training.optim import Adafactor, Muon

SIZE, CLASSES, BATCH, STEPS, HALF = 8, 3, 8, 8, 4
COMMON = {"depth": 2, "patch_size": 4, "image_size": SIZE, "num_classes": CLASSES}
# 33 does not split into two; the gradient of a key's bias is rounding, which Adam would blow up.
VIT = VitConfig(width=32, mlp_width=33, heads=2, qkv_bias=False, **COMMON)
MODELS = {
    "checkpointed": VIT,
    "mixer": MixerConfig(width=8, tokens_mlp=5, channels_mlp=12, **COMMON),
    "bit": BitConfig(blocks=(1, 1), width_factor=1, num_classes=CLASSES),
}


class Objective(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images, targets):
        return F.cross_entropy(self.logits(images), targets)

    def logits(self, images):
        return self.model(images)


@dataclass(frozen=True)
class Setup:
    """Settings with which one and several processes must agree."""

    optimizer: str
    accumulate: int = 1
    clip: float | None = None
    frozen: str = ""
    close: float = 1e-5


SETUPS = {
    "adamw": Setup("adamw"),
    "accumulated and clipped": Setup("adamw", accumulate=2, clip=0.3),
    "muon": Setup("muon", accumulate=2, clip=0.3, frozen="model.stem"),
    "sgd": Setup("sgd", frozen="model.encoder.blocks.0"),
    "adafactor": Setup("adafactor", close=1e-3),  # its momentum is rounded to 8 bits
}
RESUMED = {name: SETUPS[name] for name in ("muon", "sgd", "adafactor")}


def objective_of(config, frozen="") -> Objective:
    torch.manual_seed(1 + distributed.rank())  # rank 0 decides the initialization
    objective = Objective(build(config, device="cpu"))
    for name, parameter in objective.named_parameters():
        nn.init.normal_(parameter, std=0.2)  # a head of zeros would hide mistakes for a step
        parameter.requires_grad_(not frozen or not name.startswith(frozen))
    return objective


def optimizers_of(kind: str, objective: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = [p for p in objective.parameters() if p.requires_grad]
    if kind == "sgd":
        return [torch.optim.SGD(parameters, lr=0.1, momentum=0.9)]
    if kind == "adafactor":
        return [Adafactor(parameters, lr=0.003)]
    if kind == "adamw":
        return [torch.optim.AdamW(parameters, lr=0.01, fused=True)]
    matrices = [p for p in objective.model.encoder.parameters() if p.ndim == 2 and p.requires_grad]
    rest = [p for p in parameters if all(p is not m for m in matrices)]
    return [Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this process's shard of the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)
    targets = torch.randint(CLASSES, (BATCH,), generator=generator)
    mine = slice(distributed.rank(), None, distributed.world_size())
    return images[mine], targets[mine]


class Run:
    """An objective, its parallelized form and its optimizers, as in the training loop."""

    def __init__(self, setup: Setup, strategy="ddp", config=VIT) -> None:
        self.setup = setup
        self.objective = objective_of(config, setup.frozen)
        self.parallel = distributed.parallelize(self.objective, strategy)
        self.optimizers = optimizers_of(setup.optimizer, self.objective)
        self.average = {n: p.detach().clone() for n, p in self.objective.named_parameters()}

    def train(self, start: int = 0, stop: int = STEPS) -> list[float]:
        """Return the mean loss and the gradient norm of each step, alternating."""
        values = []
        for step in range(start, stop):
            losses = []
            parts = list(zip(*(x.chunk(self.setup.accumulate) for x in batch(step)), strict=True))
            for part, (images, targets) in enumerate(parts):
                last = part == len(parts) - 1
                with distributed.sync_gradients(self.parallel, enabled=last):
                    loss = self.parallel(images, targets) / len(parts)
                    loss.backward()
                losses.append(loss.detach())
            norm = distributed.clip_grad_norm(self.parallel.parameters(), self.setup.clip)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for name, parameter in self.objective.named_parameters():
                self.average[name].lerp_(parameter.detach(), 0.5)
            values += [float(distributed.all_reduce_mean(torch.stack(losses).sum())), float(norm)]
        return values

    def save(self, folder: Path, step: int) -> None:
        save_state(folder, extra={"step": step, "who": distributed.world_size()}, **self.parts)

    def load(self, folder: Path) -> dict:
        return load_state(folder, **self.parts)

    @property
    def parts(self) -> dict:
        return {"objective": self.objective, "optimizers": self.optimizers, "average": self.average}

    def evaluate(self) -> torch.Tensor:
        """Return the logits of fixed images."""
        images = torch.randn(4, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(99))
        self.objective.eval()
        with torch.no_grad():
            logits = self.objective.logits(images)
        self.objective.train()
        return logits

    def averaged(self) -> dict[str, torch.Tensor]:
        return {k: distributed.full_tensor(v).clone() for k, v in self.average.items()}


def whole_run(setup: Setup, strategy: str, folder: Path) -> dict:
    """Train for half a run, save and evaluate; then train the other half."""
    run = Run(setup, strategy)
    first = run.train(0, HALF)
    run.save(folder, HALF)
    weights = distributed.gather_state_dict(run.objective)
    result = {"logits": run.evaluate(), "weights": weights, "average": run.averaged()}
    return result | {"losses": first + run.train(HALF, STEPS)}


def resumed(setup: Setup, strategy: str, folder: Path) -> dict:
    """Train the other half of a run from a saved state."""
    run = Run(setup, strategy)
    with torch.no_grad():
        for parameter in run.objective.parameters():
            parameter.zero_()  # everything must come from the state
    extra = run.load(folder)
    weights = distributed.gather_state_dict(run.objective)
    result = {"extra": extra, "weights": weights, "average": run.averaged()}
    return result | {"losses": run.train(HALF, STEPS)}


def one_step(family: str, strategy: str) -> dict:
    run = Run(SETUPS["adamw"], strategy, MODELS[family])
    run.objective.model.checkpointing = family == "checkpointed"
    return {"losses": run.train(0, 2), "logits": run.evaluate()}


def gradient_norms() -> dict:
    """Return the gradient norm of a block after a micro-batch without and with synchronization."""
    norms = {}
    for strategy in ("ddp", "fsdp"):
        run = Run(SETUPS["adamw"], strategy)
        for name, enabled in ((strategy, False), (f"{strategy} summed", True)):
            with distributed.sync_gradients(run.parallel, enabled=enabled):
                run.parallel(*batch(0)).backward()
            weight = run.objective.model.encoder.blocks[0].mlp.fc1.weight
            norms[name] = None
            if weight.grad is not None:
                norms[name] = float(distributed.full_tensor(weight.grad).norm())
    return norms


def collectives() -> dict:
    rank = distributed.rank()
    weights = distributed.gather_state_dict(objective_of(VIT))
    return {
        "rank": rank,
        "size": distributed.world_size(),
        "sum": float(distributed.all_reduce_sum(torch.tensor(rank + 1.0))),
        "mean": float(distributed.all_reduce_mean(torch.tensor(rank + 1.0))),
        "any": distributed.all_reduce_any(rank == 1),
        "none": distributed.all_reduce_any(False),
        "objects": distributed.all_gather_object(f"from {rank}"),
        "first": distributed.broadcast_object(f"from {rank}"),
        "weights on rank 0 only": bool(weights) == (rank == 0),
    }


def failed_save(folder: Path) -> str:
    """Save into a folder that cannot be written; return the message."""
    folder.mkdir(exist_ok=True)
    (folder / "state").touch()
    try:
        Run(SETUPS["adamw"]).save(folder, 1)
    except CheckpointError as error:
        return str(error)
    return ""


def nonfinite() -> str:
    """Look for the cause of a divergence; only the images of the second process are not finite."""
    images, targets = batch(0)
    images = images * torch.nan if distributed.rank() else images
    return first_nonfinite(Run(SETUPS["adamw"], "fsdp").objective, images, targets)


def everything(folder: Path) -> dict:
    results: dict = {}
    for strategy in ("ddp", "fsdp"):
        for name, setup in SETUPS.items():
            results[strategy, name] = whole_run(setup, strategy, folder / f"two-{strategy}-{name}")
        for family in MODELS:
            results[strategy, family] = one_step(family, strategy)
    for strategy, other in (("ddp", "two-fsdp"), ("fsdp", "two-ddp"), ("fsdp", "one")):
        for name, setup in RESUMED.items():
            state = folder / f"{other}-{name}"
            results["resumed", strategy, other, name] = resumed(setup, strategy, state)
    return results


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert distributed.init("cpu") == distributed.init("cpu") == torch.device("cpu")
        results = everything(folder)
        results["apart"] = distributed.all_gather_object(gradient_norms())
        results["talk"] = distributed.all_gather_object(collectives())
        results["failures"] = distributed.all_gather_object(failed_save(folder / "taken"))
        results["nonfinite"] = distributed.all_gather_object(nonfinite())
    results["warnings"] = [str(warning.message) for warning in seen]
    if distributed.is_main():
        torch.save(results, folder / "results.pt")
    distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    distributed.exit_process(0)
