"""The model at step 0: created or loaded, with whitening stem filters or a linear-probe head.

Fine-tuning starts from a linear probe (LP-FT, Kumar et al. 2022, arXiv:2202.10054): a new head is
initialized with the closed-form probe of the frozen backbone, scaled to calibrated logits, so that
the first steps do not distort the features to make up for a bad head. The probe is also the result
to beat: a run that ends below it on held-out images returns the probe instead.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vitrail import distributed
from vitrail.checkpoints import builtin
from vitrail.checkpoints.files import write_file
from vitrail.checkpoints.load import HEADS, REGULARIZATION, adapt, load, with_head
from vitrail.checkpoints.metadata import Metadata, get_metadata
from vitrail.data.datasets import ImageDataset
from vitrail.data.preprocessing import Preprocessing, preset
from vitrail.data.transforms import EvalTransform, normalize
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.metrics import score_samples
from vitrail.evaluation.results import EvaluationResult, summarize
from vitrail.formatting import percent
from vitrail.models.config import REGISTERED, VitConfig, pair
from vitrail.models.init import whiten
from vitrail.models.lora import adaptable_layers
from vitrail.models.patch_embed import ConvStem
from vitrail.models.vit import Model, VisionTransformer, build, create
from vitrail.probing.features import features_of
from vitrail.probing.ridge import fit, fit_path
from vitrail.training.auto_config import (
    USUAL_BATCH,
    AutoConfig,
    DatasetStats,
    dataset_stats,
    is_automatic,
    sample_indices,
    suggests_transfer,
    tunes_with_muon,
    uses_whitening,
)
from vitrail.training.budget import plan_finetuning, seconds_per_image
from vitrail.training.callbacks import Callback
from vitrail.training.config import Settings
from vitrail.training.data_module import DataSplits, hold_out_dev, subsample
from vitrail.training.objectives import log_prior

# What loading can change.
ADAPTABLE = ("image_size", "patch_size", "channels", "numerics", "attention")
PROBE_HEAD = "probe_head.safetensors"  # in the run's folder, until the run is finished
PROBE_RESULT = ("dev", "accuracy", "loss", "images", "balanced")


def build_model(
    settings: Settings,
    splits: DataSplits,
    start: str,
    device: torch.device,
    log: Callable[[str], None],
    *,
    started: float | None = None,
) -> tuple[Model, AutoConfig]:
    """Complete the settings, and create the model or load it; a time budget runs from `started`.

    The model's metadata have the preprocessing and the classes.
    """
    train = splits.train
    stats = dataset_stats(train)
    classes = tuple(train.classes) if settings.objective == "classify" else ()
    if settings.model.distillation and not settings.loss.teacher:
        raise ConfigError("model.distillation needs a teacher; set loss.teacher")
    if start:
        model, auto = start_from(start, settings, splits, stats, classes, device, log, started)
        preprocessing = get_metadata(model).preprocessing
    else:
        if suggests_transfer(settings, stats) and builtin.references():
            log(
                f"note: for {stats.images:,} photographs, fine-tuning the built-in model may "
                f'be better: `vitrail finetune`, in Python start="{builtin.DEFAULT}"'
            )
        auto = AutoConfig(settings, stats, gpu=device.type == "cuda", start=None)
        chosen = auto.settings.model
        assert chosen.name is not None
        model = create(
            chosen.name,
            init=chosen.init or "google",
            head_bias=chosen.head_bias,
            generator=torch.Generator().manual_seed(settings.seed),
            **(chosen.changes() | {"num_classes": len(classes)}),
        )
        preprocessing = Preprocessing(
            size=pair(model.config.image_size),
            mean=(0.5,) * model.config.channels,
            std=(0.5,) * model.config.channels,
        )
    if settings.preprocessing is not None:
        size, channels = pair(model.config.image_size), model.config.channels
        preprocessing = preset(settings.preprocessing, size, channels)
    if not start and isinstance(model, VisionTransformer) and uses_whitening(auto.settings.model):
        transform = EvalTransform(preprocessing=preprocessing, channels=len(preprocessing.mean))
        images = []
        for index in sample_indices(train):
            with suppress(DataError):
                images.append(transform(train[index].data))
        whiten(cast(ConvStem, model.stem), normalize(torch.stack(images), preprocessing))
    if settings.lora is not None:
        if settings.model.attention in REGISTERED["attention"]:
            raise ConfigError(
                f"lora={settings.lora} freezes all weights but the head, so new ones of "
                f"model.attention={settings.model.attention!r} would not be trained; leave out lora"
            )
        adaptable_layers(model, settings.lora)  # raises before the head is fitted
    multi_label = train.multi_label and bool(classes)
    model.metadata = Metadata(
        preprocessing=preprocessing, class_names=classes, multi_label=multi_label
    )
    return model, auto


def start_from(
    start: str,
    settings: Settings,
    splits: DataSplits,
    stats: DatasetStats,
    classes: tuple[str, ...],
    device: torch.device,
    log: Callable[[str], None],
    started: float | None,
) -> tuple[Model, AutoConfig]:
    """Load the model to fine-tune; with a time budget, plan how much of it, from its speed."""
    if settings.model.name is not None:
        raise ConfigError(f"model.name={settings.model.name!r} and --from both name a model")
    lines: list[str] = []
    model = load_pretrained(start, settings, classes, lines.append)
    config, plan = model.config, None
    open_length = settings.minutes is not None and is_automatic(settings.optim)
    if open_length and isinstance(config, VitConfig) and len({*pair(config.image_size)}) == 1:
        fit_images, _, dev = hold_out_dev(splits)
        test = sum(len(samples) for samples in splits.held_out.values() if samples is not dev)
        elapsed = 0.0 if started is None else time.monotonic() - started
        forward = distributed.broadcast_object(seconds_per_image(model, device))
        batch = settings.batch_size or USUAL_BATCH
        plan = plan_finetuning(
            config,
            seconds=60 * (settings.minutes or 0.0) - distributed.broadcast_object(elapsed),
            forward=forward / distributed.world_size(),
            read=distributed.broadcast_object(stats.seconds),
            train=len(fit_images),
            dev=len(dev),
            test=test,
            muon_batch=batch if tunes_with_muon(settings, config) else None,
        )
    auto = AutoConfig(
        settings,
        stats,
        gpu=device.type == "cuda",
        start=config,
        new_head=get_metadata(model).class_names != classes,
        plan=plan,
        weights=[name for name, _ in model.named_parameters()],
    )
    if auto.settings.model.image_size != settings.model.image_size:
        lines.clear()
        model = load_pretrained(start, auto.settings, classes, lines.append)
    for line in lines:
        log(line)
    return model, auto


def load_pretrained(
    start: str, settings: Settings, classes: tuple[str, ...], log: Callable[[str], None]
) -> Model:
    """Load a model with a head for these classes, at the configured image size."""
    changes = settings.model.changes()
    for name in changes:
        if name not in (*ADAPTABLE, *REGULARIZATION):
            raise ConfigError(
                f"model.{name} is fixed by {start} and cannot be changed when fine-tuning; "
                f"settings that can: {', '.join((*ADAPTABLE, *REGULARIZATION))}"
            )
    model = load(
        start,
        num_classes=len(classes),
        preprocessing=settings.preprocessing,
        log=log,
        **{name: changes[name] for name in ADAPTABLE if name in changes},
    )
    if get_metadata(model).class_names not in ((), classes):  # as many, but others
        model, _ = adapt(adapt(model, num_classes=0)[0], num_classes=len(classes))
        log("  head        new, initialized to zero: the dataset has other classes")
    regularization = {name: changes[name] for name in REGULARIZATION if name in changes}
    if not regularization:
        return model
    changed = build(model.config.change(**regularization))
    changed.load_state_dict(model.state_dict(), assign=True)
    changed.metadata = model.metadata
    return changed


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeHead:
    """A closed-form head: the initialization of a run, and the result that it has to beat."""

    init: dict[str, Tensor]  # head weights, fitted without dev
    final: dict[str, Tensor]  # the same, fitted to all training images
    dev: str = ""  # the split it was evaluated on; "" if no image could be held out
    accuracy: float = 0.0  # on dev; balanced if the classes are adjusted for their frequencies
    loss: float = 0.0  # on dev
    images: int = 0  # in dev
    balanced: bool = False
    skipped: dict[str, str] = field(default_factory=dict)  # unreadable images; not saved

    def beats(self, tuned: EvaluationResult) -> bool:
        """Return whether fine-tuning is no improvement on dev: in accuracy, at a tie in loss."""
        losses = -round(self.loss, 4), -round(tuned.loss, 4)  # products round differently
        return (self.accuracy, losses[0]) >= (self.accuracy_of(tuned), losses[1])

    def comparison(self, tuned: EvaluationResult) -> str:
        """`dev accuracy (n=60): fine-tuned 71.7 %, linear probe 73.3 %`"""
        metric = "balanced accuracy" if self.balanced else "accuracy"
        return (
            f"{self.dev} {metric} (n={self.images:,}): fine-tuned "
            f"{percent(self.accuracy_of(tuned))}, linear probe {percent(self.accuracy)}"
        )

    def accuracy_of(self, tuned: EvaluationResult) -> float:
        return tuned.balanced_accuracy if self.balanced else tuned.accuracy

    def save(self, folder: Path) -> None:
        tensors = {f"init.{name}": x for name, x in self.init.items()}
        tensors |= {f"final.{name}": x.clone() for name, x in self.final.items()}
        result = {name: getattr(self, name) for name in PROBE_RESULT}
        write_file(folder / PROBE_HEAD, tensors, {"result": json.dumps(result)})


def read_probe_head(folder: Path) -> ProbeHead | None:
    """Return what `ProbeHead.save` wrote; None if it is missing or damaged."""
    try:
        with safe_open(folder / PROBE_HEAD, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            result = json.loads(file.metadata()["result"])
    except (OSError, ValueError, LookupError, TypeError, SafetensorError):
        return None
    heads = {
        group: {n.partition(".")[2]: x for n, x in tensors.items() if n.startswith(f"{group}.")}
        for group in ("init", "final")
    }
    return ProbeHead(**heads, **result)


def probe_init(
    model: Model, splits: DataSplits, auto: AutoConfig, callback: Callback, resume_from: Path | None
) -> tuple[DataSplits, ProbeHead | None]:
    """Hold dev out of the training set and initialize the head with a probe of the rest.

    A resumed run reads the probe from its folder, and has the head in its state.
    """
    train, name, dev = hold_out_dev(splits)
    dev_from_train = train is not splits.train
    if len(dev):
        splits = replace(splits, train=train, held_out={name: dev} | splits.held_out)
    if resume_from is not None:
        return splits, read_probe_head(resume_from)
    probe = fit_probe_head(
        model,
        train if auto.probe_images is None else subsample(train, auto.probe_images),
        dev if len(dev) else None,
        name,
        dev_from_train=dev_from_train,
        prior=log_prior(splits.train.class_counts(), auto.settings.loss),
        preprocessing=get_metadata(model).preprocessing,
        workers=auto.settings.machine.workers,
        strict=auto.settings.strict,
        progress=callback.on_progress,
    )
    set_weights(model, probe.init)
    splits.skipped.update(probe.skipped)
    if probe.dev:
        metric = "balanced accuracy" if probe.balanced else "accuracy"
        accuracy = f"{percent(probe.accuracy)} (n={probe.images:,})"
        callback.log(f"linear probe of the frozen model: {name} {metric} {accuracy}")
    return splits, probe


def fit_probe_head(
    model: Model,
    train: ImageDataset,
    dev: ImageDataset | None,
    dev_name: str,
    *,
    dev_from_train: bool,
    prior: Tensor | None = None,
    **options: Any,
) -> ProbeHead:
    """Fit a probe to frozen features of `train` and evaluate it on `dev`.

    If dev was held out of the training set, the final probe is fitted to both. `prior` (K,), the
    log class frequencies, is subtracted from the logits of classes with images, unless that lowers
    the balanced accuracy on dev. `options` are those of `features_of`.
    """
    features = features_of(model, train, **options)
    classes = len(features.classes)
    if prior is not None:
        present = torch.from_numpy(np.bincount(features.labels, minlength=classes) > 0)
        prior = torch.where(present, prior, 0.0)
    path = fit_path(features.values, features.labels, classes)
    probe = path.probes[path.best]
    if dev is None:
        init = head_weights(model, *probe.linear(), path.scale, prior)
        return ProbeHead(init=init, final=init, skipped=features.skipped)
    held_out = features_of(model, dev, **options)

    def evaluate(logits: Tensor) -> EvaluationResult:
        scores = score_samples(logits, torch.from_numpy(held_out.labels), "softmax")
        return summarize(scores, held_out.labels, held_out.indices, classes, dev, held_out.skipped)

    logits = path.scale * probe.scores(held_out.values)
    result, balanced = evaluate(logits), prior is not None
    if prior is not None:
        adjusted = evaluate(logits - prior)
        if adjusted.balanced_accuracy >= result.balanced_accuracy:
            result = adjusted
        else:
            prior = None
    init = final = head_weights(model, *probe.linear(), path.scale, prior)
    if dev_from_train:
        values = np.concatenate([features.values, held_out.values])
        all_labels = np.concatenate([features.labels, held_out.labels])
        refit = fit(values, all_labels, classes, probe.l2)
        final = head_weights(model, *refit.linear(), path.scale, prior)
    return ProbeHead(
        init=init,
        final=final,
        dev=dev_name,
        accuracy=result.balanced_accuracy if balanced else result.accuracy,
        loss=result.loss,
        images=result.samples,
        balanced=balanced,
        skipped=features.skipped | held_out.skipped,
    )


def head_weights(
    model: Model, weight: Tensor, bias: Tensor, scale: float, prior: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the head's weights for logits of scale * (features @ weight.T + bias) - prior."""
    changed = with_head(model, scale * weight, scale * bias - (0.0 if prior is None else prior))
    return {
        name: tensor.detach().clone()
        for name, tensor in changed.state_dict().items()
        if name.split(".")[0] in HEADS
    }


@torch.no_grad()
def set_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy weights into a model in place; others are unchanged."""
    state = module.state_dict()
    for name, tensor in weights.items():
        state[name].copy_(tensor)
