"""`vitrail.inspect_model`: what a model has learned, and what it looks at."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from vitrail.checkpoints.load import Reference, load
from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.datasets import ImageDataset, evaluation_split, open_dataset
from vitrail.errors import ConfigError, DataError, unknown
from vitrail.evaluation.results import no_readable_images
from vitrail.formatting import comma_list
from vitrail.inspection.attention import attention_for_browser, study
from vitrail.inspection.findings import Inspection, Look, Study, Trust
from vitrail.inspection.folder import write_folder
from vitrail.inspection.layers import at_once, lag, with_attention
from vitrail.inspection.pictures import Picture, files, from_paths, from_source, spaced
from vitrail.inspection.relatives import related
from vitrail.inspection.relevance import FOR_CLASSES, GENERAL, METHODS
from vitrail.inspection.rollout import Fuse, rollout
from vitrail.inspection.scoring import score as score_methods
from vitrail.inspection.tokens import token_colors
from vitrail.inspection.weights import filters, mixing, position_similarity
from vitrail.models.config import pair
from vitrail.models.mixer import MlpMixer
from vitrail.models.registry import name_of
from vitrail.models.vit import Model, VisionTransformer, eval_mode, resolve_indices

SHOWN = 6  # pictures, where none are named
MOST_SHOWN = 24  # pictures, where many are
BROWSED = 4  # pictures whose attention can be walked through
TOLD = 5  # classes whose probability is told
ASKED = 2  # classes asked about in each picture, where none are named
SCORED = 128  # pictures that explanations are tested with
NAMED = 3  # pictures that could not be read

Progress = Callable[[str, int, int], None]


def inspect_model(
    model: Model | Reference,
    pictures: Sequence[str | PathLike[str]] = (),
    *,
    out: str | PathLike[str] | None = None,
    data: ImageDataset | str | PathLike[str] | None = None,
    images: int = 128,
    methods: Sequence[str] | None = None,
    classes: Sequence[str] = (),
    layers: Sequence[int] = (),
    fuse: Fuse = "mean",
    discard: float = 0.0,
    score: bool = False,
    progress: Progress | None = None,
) -> Inspection:
    """Look inside a model. Everything comes as arrays, and drawn in the folder `out`, if given.

    >>> found = inspect_model("runs/first", ["cat.jpg"], out="inside", data="pictures", score=True)
    >>> found.study.distance["patches"]  # (layers, heads), in pixels
    >>> found.looks[0].class_maps["relevance"]["cat"]  # (h, w)
    >>> found.trust.curves["rollout"].insertion_area

    `pictures` are files or folders; without any, some of the test split of `data` are taken, which
    also gives the `images` that attention is averaged over. `methods` are some of those that
    `METHODS` has; `classes` what the class-specific ones ask about, in place of the likeliest.
    The attention maps of `layers` are kept as they are. Rollout joins heads by `fuse`, and may
    `discard` the smallest share of each map. `score` tests whether the maps tell the truth.
    `progress` hears what is being done, and how far it is.
    """
    model = model if isinstance(model, nn.Module) else load(model)
    if score:
        check_score(model, fuse, discard)
    question = Question(
        methods=check_methods(model, methods),
        classes=check_classes(model, classes),
        layers=check_layers(model, layers),
        fuse=fuse,
        discard=discard,
        score=score,
        images=images,
    )
    source, paths = opened(data), files(pictures)
    with eval_mode(model):
        found = inspected(model, paths, source, question, progress or no_progress)
    if out is not None:
        list(write_folder(Path(out), found))
    return found


def inspected(
    model: Model,
    paths: Sequence[Path],
    source: ImageDataset | None,
    question: "Question",
    tell: Progress,
) -> Inspection:
    """All that is asked, of a model that stands still."""
    unread: dict[str, str] = {}
    shown = list(from_paths(model, paths[:MOST_SHOWN]))
    if not shown and source is not None:
        shown = list(from_source(model, source, spaced(len(source), SHOWN), unread))
    looks = list(look_at_each(model, shown, question, tell))
    found, notes = of_weights(model), list(coarse(model, looks))
    if isinstance(model, VisionTransformer):
        study = studied(model, source, shown, question.images, tell, unread)
        trust = None
        if question.score:
            trust = trusted(model, source, shown, question.methods, tell, unread)
        found = replace(found, study=study, trust=trust)
    else:
        notes.append("it has no attention, so there are no maps; its filters are shown")
    if len(paths) > MOST_SHOWN:
        notes.append(f"{len(paths) - MOST_SHOWN:,} more pictures were named than are shown")
    scatter = None
    if source is not None and not source.multi_label:
        scatter, looks, more = related(model, source, shown, looks, tell, unread)
        notes += more
    notes += left_out(unread)
    return replace(found, looks=tuple(looks), scatter=scatter, notes=tuple(notes))


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked."""

    methods: tuple[str, ...]
    classes: tuple[int, ...]  # empty: the likeliest
    layers: tuple[int, ...]
    fuse: Fuse
    discard: float
    score: bool  # whether the maps tell the truth
    images: int  # that attention is averaged over


def no_progress(what: str, done: int, total: int) -> None:
    """Nobody wants to hear of it."""


def of_weights(model: Model) -> Inspection:
    """What can be said without a picture."""
    placed = isinstance(model, VisionTransformer)
    return Inspection(
        title=name_of(model.config),
        facts=about(model),
        multi_label=get_metadata(model).multi_label,
        prefix=prefix_names(model) if placed else (),
        filters=filters(model),
        positions=position_similarity(model) if placed else (),
        mixing=mixing(model) if isinstance(model, MlpMixer) else None,
    )


def check_score(model: Model, fuse: Fuse, discard: float) -> None:
    """Refuse to test what there is not, or what would not be what is shown."""
    with_attention(model, "explanations to test")
    if fuse != "mean" or discard:
        raise ConfigError("score tests rollout as it is; leave fuse and discard out, or score")


def check_methods(model: Model, methods: Sequence[str] | None) -> tuple[str, ...]:
    """The maps to make; refused where a model has no attention."""
    if not isinstance(model, VisionTransformer):
        if methods:
            with_attention(model, methods[0])
        return ()
    for name in methods or ():
        if name not in METHODS:
            raise unknown("method", name, METHODS)
    return tuple(methods) if methods is not None else (*GENERAL, *FOR_CLASSES)


def check_layers(model: Model, layers: Sequence[int]) -> tuple[int, ...]:
    """The layers by their numbers from 0."""
    if not layers:
        return ()
    depth = with_attention(model, "maps of its layers").config.depth
    return tuple(resolve_indices("layers", layers, depth))


def check_classes(model: Model, classes: Sequence[str]) -> tuple[int, ...]:
    """The numbers of classes that are asked about."""
    names = class_names(model)
    for name in classes:
        if name not in names:
            raise unknown("class", name, names)
    return tuple(names.index(name) for name in classes)


def class_names(model: Model) -> tuple[str, ...]:
    """What the classes are called; by their numbers, if nobody knows."""
    return get_metadata(model).names(model.config.num_classes)


def opened(data: ImageDataset | str | PathLike[str] | None) -> ImageDataset | None:
    if data is None or not isinstance(data, str | PathLike):
        return data
    return open_dataset(data, evaluation_split(data) or "all")


def about(model: Model) -> dict[str, str]:
    config = model.config
    height, width = pair(config.image_size)
    told = {"parameters": f"{sum(p.numel() for p in model.parameters()):,}"}
    told["image size"] = f"{height} x {width} pixels"
    if isinstance(model, VisionTransformer):
        high, wide = model.config.grid
        told["patches"] = f"{high} x {wide} of {model.config.stride[0]} pixels"
        told["layers and heads"] = f"{model.config.depth} and {model.config.heads}"
        told["positions"] = model.config.position
        told["what the head reads"] = model.config.pool
    return told


def coarse(model: Model, looks: Sequence[Look]) -> Iterator[str]:
    """What was put together so that attention can be browsed."""
    browsed = [look for look in looks if look.attention is not None]
    if not browsed or not isinstance(model, VisionTransformer):
        return
    (high, wide), (down, across) = model.config.grid, browsed[0].grid
    if (high, wide) != (down, across):
        yield f"to browse attention, {high} x {wide} patches are put together to {down} x {across}"
    assert browsed[0].attention is not None
    if browsed[0].attention.shape[1] < model.config.heads:
        yield "to browse attention, its heads are averaged"


def left_out(unread: Mapping[str, str]) -> Iterator[str]:
    """How many pictures of the data could not be read, and the first of them by name."""
    if not unread:
        return
    named = [f"{name} ({reason})" for name, reason in unread.items()]
    pictures = "1 picture" if len(unread) == 1 else f"{len(unread):,} pictures"
    yield f"{pictures} of the data could not be read: {comma_list(named, NAMED)}"


def prefix_names(model: VisionTransformer) -> tuple[str, ...]:
    """What the tokens before the patches are called."""
    config = model.config
    named = ["class token"] * (config.pool == "cls") + ["distillation token"] * config.distillation
    return (*named, *(f"register {number}" for number in range(config.registers)))


def look_at_each(
    model: Model,
    shown: Sequence[Picture],
    question: Question,
    tell: Progress,
) -> Iterator[Look]:
    """What the model says of each picture, and where it looks."""
    colors = None
    if isinstance(model, VisionTransformer) and shown:
        colors = token_colors(model, torch.stack([picture.image for picture in shown]))
    for place, picture in enumerate(shown):
        tell("maps", place, len(shown))
        found = first_look(model, picture)
        if isinstance(model, VisionTransformer):
            assert colors is not None
            found = replace(
                found,
                colors=colors[place],
                **maps_of(model, picture.image[None], question),
            )
            if place < BROWSED:
                attention, peaks, grid = attention_for_browser(model, picture.image)
                found = replace(found, attention=attention, peaks=peaks, grid=grid)
        yield found


@torch.inference_mode()
def first_look(model: Model, picture: Picture) -> Look:
    """The picture and the likeliest classes."""
    likeliest = ()
    if model.config.num_classes:
        names = class_names(model)
        chances = get_metadata(model).probabilities(model(picture.image[None]))[0]
        best = chances.topk(min(TOLD, len(names)))
        likeliest = tuple(
            (names[index], chance)
            for chance, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        )
    return Look(
        name=picture.name,
        pixels=picture.pixels,
        box=picture.box,
        lag=lag(model),
        classes=likeliest,
        label=picture.label if picture.label in class_names(model) else "",
    )


def maps_of(model: VisionTransformer, image: Tensor, question: Question) -> dict[str, dict]:
    """Maps of one picture (1, C, H, W): by method, by method and class, and by layer."""
    classes, names = question.classes, class_names(model)
    with torch.inference_mode():
        if not classes and names:
            classes = model(image)[0].topk(min(ASKED, len(names))).indices.tolist()
        raw = model.attention_maps(image, layers=question.layers)
        layers = {
            n: maps[0].cpu().numpy() for n, maps in zip(sorted(question.layers), raw, strict=True)
        }
    maps, class_maps = {}, {}
    for name in question.methods:
        if name == "rollout":
            found = rollout(model, image, fuse=question.fuse, discard=question.discard)
            maps[name] = found[0].cpu().numpy()
        elif name in GENERAL:
            maps[name] = METHODS[name](model, image, None)[0].cpu().numpy()
        elif classes:
            class_maps[name] = {
                names[c]: METHODS[name](model, image, torch.tensor([c], device=image.device))[0]
                .cpu()
                .numpy()
                for c in classes
            }
    return {"maps": maps, "class_maps": class_maps, "layers": layers}


def studied(
    model: VisionTransformer,
    source: ImageDataset | None,
    shown: Sequence[Picture],
    images: int,
    tell: Progress,
    unread: dict[str, str],
) -> Study | None:
    """Attention over many pictures: those of the data, or else those that are shown."""
    if images < 1:
        raise ConfigError(f"images={images} leaves nothing to look at; give 1 or more")
    if source is None:
        total, many = min(images, len(shown)), iter(shown[:images])
    else:
        rows = spaced(len(source), images)
        total, many = len(rows), from_source(model, source, rows, unread)
    if not total:
        return None
    together = at_once(model, get_metadata(model).preprocessing.size)

    def batches() -> Iterator[Tensor]:
        done = None
        for done, batch in batched(many, together):
            tell("attention", done, total)
            yield batch
        if done is None:
            raise no_readable_images(total, unread)

    return study(model, batches())


def batched(pictures: Iterator[Picture], together: int) -> Iterator[tuple[int, Tensor]]:
    """Images (B, C, H, W), and how many came before them."""
    done, held = 0, []
    for picture in pictures:
        held.append(picture.image)
        if len(held) == together:
            yield done, torch.stack(held)
            done, held = done + len(held), []
    if held:
        yield done, torch.stack(held)


def trusted(
    model: VisionTransformer,
    source: ImageDataset | None,
    shown: Sequence[Picture],
    methods: Sequence[str],
    tell: Progress,
    unread: dict[str, str],
) -> Trust:
    """Whether the maps tell the truth, on some pictures of the data or on those that are shown."""
    if not model.config.num_classes:
        raise ConfigError("explanations are tested by a class's probability; this model has none")
    found = [picture.image for picture in shown]
    if source is not None:
        rows = spaced(len(source), SCORED)
        found = [picture.image for picture in from_source(model, source, rows, unread)]
    if not found:
        raise DataError("there is no picture to test explanations with; name some, or give --data")
    methods = (*methods, "random", "center")
    return score_methods(model, torch.stack(found), methods=methods, progress=tell)
