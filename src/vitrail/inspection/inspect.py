"""`vitrail.inspect_model`: what a model has learned, and what it attends to.

Shapes: L layers, H heads, N tokens of which h x w are patches, T merged tokens, P x P pixels of a
patch, C channels.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import islice
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.checkpoints.load import Reference, load
from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.datasets import ImageDataset
from vitrail.data.storage import read_file
from vitrail.errors import ConfigError, DataError, renamed_attribute, renamed_keyword, unknown
from vitrail.evaluation.dataset import open_evaluation_split
from vitrail.evaluation.results import no_readable_images
from vitrail.extras import install_hint
from vitrail.formatting import comma_list, duration
from vitrail.inspection.attention import (
    AttentionStats,
    attention_for_browser,
    attention_stats,
    batch_size_for,
    require_attention,
    token_offset,
)
from vitrail.inspection.faithfulness import (
    BASELINES,
    STEPS,
    Faithfulness,
    evaluate_faithfulness,
    predict_classes,
)
from vitrail.inspection.images import (
    Box,
    InputImage,
    evenly_spaced,
    find_images,
    load_image,
    load_samples,
)
from vitrail.inspection.relevance import CLASS_AGNOSTIC, CLASS_SPECIFIC, METHODS, Fuse, rollout
from vitrail.inspection.representations import (
    Neighbor,
    Scatter,
    compare_with_dataset,
    filter_components,
    position_similarity,
    token_colors,
    token_mixing,
)
from vitrail.models.config import pair
from vitrail.models.mixer import MlpMixer
from vitrail.models.registry import name_of
from vitrail.models.vit import Model, VisionTransformer, eval_mode, resolve_indices

logger = logging.getLogger(__name__)
DEFAULT_IMAGES = 6  # of the dataset, if none are given
MAX_IMAGES = 24  # inspected one by one
MAX_BROWSED = 4  # images with an attention browser
TOP_PREDICTIONS = 5
TOP_CLASS_MAPS = 2  # predicted classes with maps, if no classes are given
SCORED_IMAGES = 128  # of the dataset, for insertion and deletion
MAX_LISTED_FILES = 3  # unreadable files in a note

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class ImageInspection:
    """Predictions and maps of one image."""

    name: str
    pixels: np.ndarray  # uint8 (height, width, 3): the image as it is
    box: Box  # the part of it that the model sees
    predictions: tuple[tuple[str, float], ...]  # class and probability, most probable first
    label: str = ""  # true class, if known
    token_offset: float = 0.0  # of receptive fields up and left of their patches, in patches
    maps: dict[str, np.ndarray] = field(default_factory=dict)  # method → (h, w), 0 to 1
    class_maps: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    # method → class → (h, w), 0 to 1
    token_colors: np.ndarray | None = None  # (h, w, 3), 0 to 1: PCA of patch tokens
    attention: np.ndarray | None = None  # uint8 (L, H, T, T), the maximum of each row is 255
    peaks: np.ndarray | None = None  # float32 (L, H, T): the attention that 255 stands for
    grid: tuple[int, int] = (0, 0)  # of the patches in `attention`, which follow the prefix tokens
    layers: dict[int, np.ndarray] = field(default_factory=dict)  # layer → (H, N, N), on request
    neighbors: tuple[Neighbor, ...] = ()

    classes = renamed_attribute("classes", "predictions")
    colors = renamed_attribute("colors", "token_colors")
    lag = renamed_attribute("lag", "token_offset")


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Result of `inspect_model`; what does not apply to a model is None or empty."""

    title: str
    facts: Mapping[str, str]
    multi_label: bool = False  # probabilities are sigmoids
    prefix: tuple[str, ...] = ()  # names of the tokens before the patches
    filters: np.ndarray | None = None  # (n, P, P, C) principal components of the first layer
    filters_explained: np.ndarray | None = None  # (n,) their shares of the variance
    positions: Mapping[str, np.ndarray] = field(default_factory=dict)  # name → (h, w, h, w)
    position_kind: str = "learned"  # as in the model's config
    mixing: np.ndarray | None = None  # (n, h, w) token-mixing weights of a Mixer's first layer
    attention: AttentionStats | None = None
    images: tuple[ImageInspection, ...] = ()
    faithfulness: Faithfulness | None = None
    scatter: Scatter | None = None
    notes: tuple[str, ...] = ()

    looks = renamed_attribute("looks", "images")
    study = renamed_attribute("study", "attention")
    trust = renamed_attribute("trust", "faithfulness")


@renamed_keyword("pictures", "paths")
@renamed_keyword("images", "num_images")
def inspect_model(
    model: Model | Reference,
    paths: Sequence[str | PathLike[str]] = (),
    *,
    out: str | PathLike[str] | None = None,
    data: ImageDataset | str | PathLike[str] | None = None,
    num_images: int = 128,
    methods: Sequence[str] | None = None,
    classes: Sequence[str] = (),
    layers: Sequence[int] = (),
    fuse: Fuse = "mean",
    discard: float = 0.0,
    score: bool = False,
    progress: Progress | None = None,
) -> Inspection:
    """Inspect a model: return arrays, and write a report into the folder `out` if it is given.

    >>> result = inspect_model("runs/first", ["cat.jpg"], out="inside", data="photos", score=True)
    >>> result.attention.distance["patches"]  # (layers, heads), in pixels
    >>> result.images[0].class_maps["relevance"]["cat"]  # (h, w)
    >>> result.faithfulness.curves["rollout"].insertion_area

    `paths` are files or folders; without any, some images of `data` are used, which also provides
    `num_images` for attention statistics, from the split that `evaluate` would choose.
    `methods` are names from `METHODS`; `classes` those for which class-specific maps are made, by
    default the predicted ones. Attention maps of `layers` are returned in full. Rollout fuses heads
    by `fuse`, and may `discard` the smallest fraction of each map. `score` evaluates the
    faithfulness of the maps. `progress` is called with the current stage, the number of images
    done, and their total.
    """
    model = model if isinstance(model, nn.Module) else load(model)
    names = get_metadata(model).names(model.config.num_classes)
    if score:
        require_attention(model, "map to score")
        if fuse != "mean" or discard:
            raise ConfigError("score evaluates rollout with its defaults; omit fuse and discard")
    if num_images < 1:
        raise ConfigError(f"images={num_images} must be at least 1")
    for name in methods or ():
        require_attention(model, name)
        if name not in METHODS:
            raise unknown("method", name, METHODS)
    if methods is None:
        has_attention = isinstance(model, VisionTransformer)
        methods = (*CLASS_AGNOSTIC, *CLASS_SPECIFIC) if has_attention else ()
    for name in classes:
        if name not in names:
            raise unknown("class", name, names)
    indices = [names.index(name) for name in classes]
    if layers:
        depth = require_attention(model, "attention map").config.depth
        layers = resolve_indices("layers", layers, depth)
    dataset: Any = data
    split_notes: Sequence[str] = ()
    if isinstance(data, str | PathLike):
        dataset, split_notes = open_evaluation_split(data, None, get_metadata(model))
    files = find_images(paths)
    progress = progress or (lambda what, done, total: None)

    skipped: dict[str, str] = {}
    with eval_mode(model):
        inputs = []
        for path in files[:MAX_IMAGES]:
            try:
                inputs.append(load_image(model, read_file(fspath(path)), name=path.name))
            except DataError as error:
                raise DataError(f"{path}: {error}") from None
        if not inputs and dataset is not None:
            rows = evenly_spaced(len(dataset), DEFAULT_IMAGES)
            inputs = list(load_samples(model, dataset, rows, skipped))
        inspected = []
        for number, image in enumerate(inputs):
            progress("maps", number, len(inputs))
            one = inspect_image(model, image, methods, indices, layers, fuse, discard)
            if isinstance(model, VisionTransformer) and number < MAX_BROWSED:
                attention, peaks, grid = attention_for_browser(model, image.tensor)
                one = replace(one, attention=attention, peaks=peaks, grid=grid)
            inspected.append(one)
        result, notes = inspect_weights(model), [*split_notes]
        if isinstance(model, VisionTransformer):
            if inputs:
                attention, grid = inspected[0].attention, inspected[0].grid
                if grid != model.config.grid:
                    (rows, columns), (merged_rows, merged_columns) = model.config.grid, grid
                    notes.append(
                        f"attention browser: {rows} x {columns} patches are merged to "
                        f"{merged_rows} x {merged_columns}"
                    )
                if attention is not None and attention.shape[1] < model.config.heads:
                    notes.append("attention browser: heads are averaged")
                colors = token_colors(model, torch.stack([image.tensor for image in inputs]))
                inspected = [
                    replace(one, token_colors=color)
                    for one, color in zip(inspected, colors, strict=True)
                ]

            def samples(count: int) -> Iterator[InputImage]:
                """Yield images of the dataset, or else the inspected ones."""
                if dataset is None:
                    return iter(inputs[:count])
                return load_samples(model, dataset, evenly_spaced(len(dataset), count), skipped)

            stats = faithfulness = None
            if total := min(num_images, len(inputs if dataset is None else dataset)):
                stats = collect_attention_stats(model, samples(total), total, progress, skipped)
            if score:
                faithfulness = score_maps(model, samples(SCORED_IMAGES), methods, progress)
            result = replace(result, attention=stats, faithfulness=faithfulness)
        else:
            notes.append("the model has no attention: only predictions and weights are shown")
        if len(files) > MAX_IMAGES:
            notes.append(f"only {MAX_IMAGES} of {len(files):,} images are shown")
        if dataset is not None and not dataset.multi_label:
            scatter, neighbors, used = compare_with_dataset(
                model, dataset, inputs, progress, skipped
            )
            inspected = [
                replace(one, neighbors=near) for one, near in zip(inspected, neighbors, strict=True)
            ]
            result = replace(result, scatter=scatter)
            if find_spec("sklearn") is None:
                notes.append(install_hint("scikit-learn", extra="inspect", feature="t-SNE"))
            if used < len(dataset):
                notes.append(f"scatter plot and neighbors use {used:,} of {len(dataset):,} images")
    if skipped:
        listed = comma_list(
            [f"{name} ({reason})" for name, reason in skipped.items()], MAX_LISTED_FILES
        )
        noun = "image" if len(skipped) == 1 else "images"
        notes.append(f"{len(skipped):,} unreadable {noun} skipped: {listed}")
    result = replace(result, images=tuple(inspected), notes=tuple(notes))
    if out is not None:
        from vitrail.reports.inspection import write_inspection

        write_inspection(Path(out), result)
    return result


def inspect_weights(model: Model) -> Inspection:
    """Return everything that needs no image."""
    config = model.config
    height, width = pair(config.image_size)
    facts = {
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "image size": f"{height} x {width} pixels",
    }
    components, explained = filter_components(model)
    result = Inspection(
        title=name_of(config),
        facts=facts,
        multi_label=get_metadata(model).multi_label,
        filters=components,
        filters_explained=explained,
        mixing=token_mixing(model) if isinstance(model, MlpMixer) else None,
    )
    if not isinstance(model, VisionTransformer):
        return result
    config, (rows, columns) = model.config, model.config.grid
    facts["patches"] = f"{rows} x {columns} of {config.stride[0]} pixels"
    facts["layers and heads"] = f"{config.depth} and {config.heads}"
    facts["positions"] = config.position
    facts["pooling"] = config.pool
    prefix = ["class token"] * bool(config.class_token)
    prefix += ["distillation token"] * config.distillation
    prefix += [f"register {number}" for number in range(config.registers)]
    return replace(
        result,
        prefix=tuple(prefix),
        positions=position_similarity(model),
        position_kind=config.position,
    )


def inspect_image(
    model: Model,
    image: InputImage,
    methods: Sequence[str],
    classes: Sequence[int],
    layers: Sequence[int],
    fuse: Fuse,
    discard: float,
) -> ImageInspection:
    """Return predictions, maps of each method, and attention of `layers`."""
    names = get_metadata(model).names(model.config.num_classes)
    batch, predictions = image.tensor[None], ()  # (1, C, H, W)
    if names:
        with torch.inference_mode():
            logits = model(batch)
        probabilities = get_metadata(model).probabilities(logits)[0]
        best = probabilities.topk(min(TOP_PREDICTIONS, len(names)))
        predictions = tuple(
            (names[index], value)
            for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        )
        if not classes:  # names need not be unique, so classes are indices
            classes = logits[0].topk(min(TOP_CLASS_MAPS, len(names))).indices.tolist()
    result = ImageInspection(
        name=image.name,
        pixels=image.pixels,
        box=image.box,
        token_offset=token_offset(model),
        predictions=predictions,
        label=image.label if image.label in names else "",
    )
    if not isinstance(model, VisionTransformer):
        return result
    for name in methods:
        if name == "rollout":
            values = rollout(model, batch, fuse=fuse, discard=discard)
            result.maps[name] = values[0].cpu().numpy()
        elif name not in CLASS_SPECIFIC:
            result.maps[name] = METHODS[name](model, batch, None)[0].cpu().numpy()
        elif classes:
            result.class_maps[name] = {}
            for index in classes:
                chosen = torch.tensor([index], device=batch.device)
                values = METHODS[name](model, batch, chosen)
                result.class_maps[name][names[index]] = values[0].cpu().numpy()
    with torch.inference_mode():
        maps = model.attention_maps(batch, layers=layers)
        for number, values in zip(sorted(layers), maps, strict=True):
            result.layers[number] = values[0].cpu().numpy()
    return result


def collect_attention_stats(
    model: VisionTransformer,
    source: Iterator[InputImage],
    total: int,
    progress: Progress,
    skipped: Mapping[str, str],
) -> AttentionStats:
    """Compute attention statistics over up to `total` images."""
    batch_size = batch_size_for(model, get_metadata(model).preprocessing.size)

    def batches() -> Iterator[Tensor]:
        done = 0
        while batch := [image.tensor for image in islice(source, batch_size)]:
            progress("attention", done, total)
            yield torch.stack(batch)
            done += len(batch)
        if not done:
            raise no_readable_images(total, skipped)

    return attention_stats(model, batches())


def score_maps(
    model: VisionTransformer,
    source: Iterator[InputImage],
    methods: Sequence[str],
    progress: Progress,
) -> Faithfulness:
    """Evaluate faithfulness, and log before how long it will take."""
    if not model.config.num_classes:
        raise ConfigError("score needs class probabilities; this model has no classification head")
    tensors = [image.tensor for image in source]
    if not tensors:
        raise DataError("score needs images; pass some, or a dataset with --data")
    images, methods, started = torch.stack(tensors), (*methods, *BASELINES), time.monotonic()
    classes = predict_classes(model, images)
    passes = 2 * (STEPS + 1) * len(methods)  # of each image
    logger.info(
        f"scoring {len(methods)} methods on {len(images):,} images: {passes * len(images):,} "
        f"forward passes, about {duration(passes * (time.monotonic() - started))}; fewer --methods "
        "take less"
    )
    return evaluate_faithfulness(model, images, classes, methods, progress)
