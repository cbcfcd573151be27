"""Linear probing, then fine-tuning (Kumar et al. 2022, arXiv:2202.10054).

A new head starts as the closed-form probe of the frozen backbone, scaled to calibrated logits, so
that the first steps do not have to distort the features to make up for a bad head. The probe is
also the result to beat: a run that ends below it on held-out images returns the probe instead.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from vitrail.checkpoints.adapt import HEADS, with_head
from vitrail.checkpoints.files import write_file
from vitrail.data.samples import Samples
from vitrail.evaluation.outcome import Outcome
from vitrail.models.build import Model
from vitrail.probing.features import Features, features_of
from vitrail.probing.ridge import fit, fit_path

PROBE_HEAD = "probe_head.safetensors"  # in the run's folder, until the run is finished


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeHead:
    """A closed-form head: the initialization of a run, and the result that it has to beat."""

    init: dict[str, Tensor]  # head weights, fitted without the dev images
    final: dict[str, Tensor]  # the same, fitted to all training images
    dev: str = ""  # the split it was evaluated on; "" if no image could be held out
    accuracy: float = 0.0  # on dev
    loss: float = 0.0  # on dev
    images: int = 0  # in dev

    def beats(self, tuned: Outcome) -> bool:
        """Whether the probe is better on dev than the fine-tuned model; a tie goes to the loss."""
        return (self.accuracy, -self.loss) > (tuned.accuracy, -tuned.loss)

    def save(self, folder: Path) -> None:
        tensors = {f"init.{name}": x for name, x in self.init.items()}
        tensors |= {f"final.{name}": x.clone() for name, x in self.final.items()}
        numbers = [self.accuracy, self.loss, float(self.images)]
        tensors["numbers"] = torch.tensor(numbers, dtype=torch.float64)
        write_file(folder / PROBE_HEAD, tensors, {"dev": self.dev})


def read_probe_head(folder: Path) -> ProbeHead | None:
    """What `ProbeHead.save` wrote; None if there is none, and the run goes on without."""
    try:
        with safe_open(folder / PROBE_HEAD, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            dev = (file.metadata() or {}).get("dev", "")
    except (OSError, ValueError, RuntimeError):
        return None
    accuracy, loss, images = tensors.pop("numbers").tolist()
    heads = {
        group: {n.partition(".")[2]: x for n, x in tensors.items() if n.startswith(f"{group}.")}
        for group in ("init", "final")
    }
    return ProbeHead(**heads, dev=dev, accuracy=accuracy, loss=loss, images=int(images))


def fit_probe_head(
    model: Model, train: Samples, dev: Samples | None, dev_name: str, *, cut: bool, **how: Any
) -> ProbeHead:
    """Fit the probe to frozen features of `train` and evaluate it on `dev`.

    `cut` says that dev was taken out of the training set; the final probe then learns from it too.
    `how` is what `features_of` takes besides.
    """
    seen = features_of(model, train, **how)
    classes = len(seen.classes)
    path = fit_path(seen.values, seen.labels, classes)
    probe = path.probes[path.best]
    init = head_tensors(model, *probe.linear(), path.scale)
    if dev is None:
        return ProbeHead(init=init, final=init)
    held_out = features_of(model, dev, **how)
    logits = path.scale * probe.scores(held_out.values)
    labels = torch.from_numpy(held_out.labels)
    final = init
    if cut:
        final = head_tensors(model, *fit(*joined(seen, held_out), probe.l2).linear(), path.scale)
    return ProbeHead(
        init=init,
        final=final,
        dev=dev_name,
        accuracy=float((logits.argmax(1) == labels).double().mean()),
        loss=float(F.cross_entropy(logits, labels)),
        images=len(held_out),
    )


def joined(*parts: Features) -> tuple[np.ndarray, np.ndarray, int]:
    values = np.concatenate([part.values for part in parts])
    return values, np.concatenate([part.labels for part in parts]), len(parts[0].classes)


def head_tensors(model: Model, weight: Tensor, bias: Tensor, scale: float) -> dict[str, Tensor]:
    """The head's weights by name, so that its logits are scale * (features @ weight.T + bias)."""
    changed = with_head(model, scale * weight, scale * bias)
    return {
        name: tensor.detach().clone()
        for name, tensor in changed.state_dict().items()
        if name.split(".")[0] in HEADS
    }


@torch.no_grad()
def set_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy weights into a model in place; what is not named stays."""
    own = module.state_dict()
    for name, tensor in weights.items():
        own[name].copy_(tensor)
