"""Verification of exports: outputs on random images, and the accuracy of int8 on labeled ones."""

import copy
from collections.abc import Callable, Iterator
from os import PathLike, fspath
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.metadata import get_metadata
from vitrail.checkpoints.rules import replaced_module, unwrap_model
from vitrail.data.datasets import Dataset, ImageDataset
from vitrail.data.loader import Batch
from vitrail.data.transforms import EvalTransform, normalize
from vitrail.errors import CheckpointError, ConfigError, VitrailError, renamed_attribute
from vitrail.evaluation.dataset import match_classes, open_evaluation_split
from vitrail.evaluation.evaluate import Progress, run_inference
from vitrail.evaluation.metrics import score_samples
from vitrail.evaluation.results import no_readable_images
from vitrail.export.torch_program import ModelOutputs, Outputs
from vitrail.formatting import percent
from vitrail.models.config import MixerConfig, VitConfig, pair
from vitrail.models.vit import Model, eval_mode

TOLERANCE = 1e-4  # of the largest output; another order of summation makes 1e-6
INT8_TOLERANCE = 1.0  # rounded weights change the outputs; `measure_int8` measures the accuracy
PIXEL_TOLERANCE = 5e-2  # for resized images, whose pixels may round to the neighboring level
BIT_STEP = 32  # pixels by which the sizes of a BiT differ here; it takes any
BATCH_SIZE = 32

Run = Callable[[Tensor], Outputs]  # the exported model
Data = Dataset | str | PathLike[str]


def prepare_model(model: Model) -> Model:
    """Return the model as it is exported: in eval mode, float32, on the CPU; a copy if needed."""
    model = unwrap_model(model)
    if getattr(model, "merge", 0):
        raise ConfigError("token merging cannot be exported; set model.merge = 0")
    if next(model.parameters()).is_meta:
        raise CheckpointError("the model is on the meta device and has no weights to export")
    plain = all(p.is_cpu and p.dtype == torch.float32 for p in model.parameters())
    if plain and not model.training:
        return model
    metadata, model = model.metadata, copy.deepcopy(model).to("cpu", torch.float32).eval()
    model.metadata = metadata
    return model


def verify_images(
    model: Model, run: Run, tolerance: float = TOLERANCE, *, any_size: bool = True
) -> float:
    """Compare outputs on noise of several shapes; return the largest relative difference."""
    config = model.config
    height, width = pair(config.image_size)
    shapes = [(1, height, width), (3, height, width)]
    if any_size and not isinstance(config, MixerConfig):
        down, across = config.stride if isinstance(config, VitConfig) else (BIT_STEP, BIT_STEP)
        shapes.append((2, height + down, max(across, width // 2 // across * across)))
        shapes.append((1, max(down, height // 2 // down * down), width + 3 * across))
    else:
        shapes.append((2, height, width))
    rng = torch.Generator().manual_seed(0)
    batches = (torch.randn(n, config.channels, h, w, generator=rng) for n, h, w in shapes)
    return check_difference(model, run, ((images, images) for images in batches), tolerance)


def verify_pixels(model: Model, run: Run, tolerance: float = TOLERANCE) -> float:
    """The same for a file with preprocessing; `tolerance` is for images that are not resized."""
    preprocessing = get_metadata(model).preprocessing
    height, width = preprocessing.resize_to or preprocessing.size
    transform = EvalTransform(preprocessing=preprocessing, channels=model.config.channels)
    rng = np.random.default_rng(0)

    def batches(*shapes: tuple[int, int, int]) -> Iterator[tuple[Tensor, Tensor]]:
        for shape in shapes:
            pixels = rng.integers(0, 256, (*shape, model.config.channels), dtype=np.uint8)
            images = torch.stack([transform(image) for image in pixels])
            yield normalize(images, preprocessing), torch.from_numpy(pixels)

    same_size = batches(*((n, height, width) for n in (1, 2, 3)))
    difference = check_difference(model, run, same_size, tolerance)
    resized = batches(
        (2, 2 * height + 7, width + 40), (1, max(1, height // 2 - 3), max(1, width // 3))
    )
    check_difference(model, run, resized, max(tolerance, PIXEL_TOLERANCE))
    return difference


def check_difference(
    model: Model, run: Run, batches: Iterator[tuple[Tensor, Tensor]], tolerance: float
) -> float:
    """Return the largest relative difference; raise CheckpointError beyond the tolerance.

    A batch holds the images for the model and the input of the export.
    """
    differences = [0.0]
    for images, inputs in batches:
        with torch.inference_mode():
            expected, outputs = ModelOutputs(model)(images), run(inputs)
        if {k: x.shape for k, x in outputs.items()} != {k: x.shape for k, x in expected.items()}:
            differences.append(float("inf"))
            continue
        for key, value in expected.items():
            largest = value.abs().max().clamp(min=1e-30)
            differences.append(float((outputs[key] - value).abs().max() / largest))
    difference = float(np.max(differences))  # NaN if any is
    if not difference <= tolerance:
        reason = "This is a bug in vitrail or in a library it uses"
        if module := replaced_module(model):
            reason = f"In {module}, a size-dependent value may have been traced as a constant"
        raise CheckpointError(
            f"the outputs of the export differ from the model's by {difference:.1e} of the "
            f"largest; nothing was written. {reason}"
        )
    return difference


class Int8Accuracy(NamedTuple):
    """Accuracy of a model and of its int8 version on the same images."""

    accuracy: float
    int8_accuracy: float
    images: int
    data: str  # name of the dataset
    notes: tuple[str, ...] = ()

    pictures = renamed_attribute("pictures", "images")

    def __str__(self) -> str:
        return (
            f"int8 accuracy {percent(self.int8_accuracy)}, float {percent(self.accuracy)} "
            f"(n={self.images:,}, {self.data})"
        )

    def check(self, max_drop: float) -> None:
        if self.accuracy - self.int8_accuracy > max_drop:
            raise CheckpointError(
                f"{self}: the drop exceeds max_drop={max_drop:g}; allow more with --max-drop, or "
                "use float"
            )


def measure_int8(
    model: Model,
    engine: Callable[[Tensor], Tensor],
    data: Data | None = None,
    *,
    max_images: int | None = None,
    progress: Progress | None = None,
) -> Int8Accuracy:
    """Evaluate both on the test split of `data`, or of the training data, or on part of it."""
    metadata = get_metadata(model)
    hint = "pass --data with labeled images that the model was not trained on"
    if data is not None:
        name = fspath(data) if isinstance(data, str | PathLike) else "the given images"
        source, notes = open_evaluation_split(data, None, metadata)
    elif name := metadata.local_data:
        try:
            source, notes = open_evaluation_split(name, None, metadata)
        except VitrailError as error:
            raise ConfigError(
                "the accuracy of int8 must be measured, but the training data cannot be opened: "
                f"{error}; {hint}"
            ) from None
    else:
        raise ConfigError(f"int8 rounds weights, and its accuracy must be measured; {hint}")
    if max_images and isinstance(source, ImageDataset) and len(source) > max_images:
        source = source.subset(np.linspace(0, len(source) - 1, max_images).astype(np.int64))
    matched = match_classes(metadata.class_names, model.config.num_classes, source)
    correct: list[Tensor] = []  # (2, B)

    def predict(images: Tensor) -> Tensor:
        return torch.stack([model(images), engine(images)])  # (2, B, K)

    def update(logits: Tensor, batch: Batch) -> None:
        columns = logits if matched.columns is None else logits[..., matched.columns]
        loss = "sigmoid" if matched.source.multi_label else "softmax"
        scores = [score_samples(each.cpu(), batch.labels, loss) for each in columns]
        correct.append(torch.stack([one.rank == 0 for one in scores]))

    with eval_mode(model):
        skipped = run_inference(
            predict,
            matched.source,
            metadata.preprocessing,
            update,
            channels=model.config.channels,
            batch_size=BATCH_SIZE,
            progress=progress,
        )
    if not correct:
        raise no_readable_images(len(source), skipped)
    images = torch.cat(correct, dim=1).double()  # (2, N)
    notes = (*notes, *matched.notes)
    accuracy, int8_accuracy = images.mean(1).tolist()
    return Int8Accuracy(accuracy, int8_accuracy, images.shape[1], name, notes)
