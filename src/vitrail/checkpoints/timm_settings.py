"""timm's config.json: what it says about a model and its pictures, read and written.

    architecture     a name timm builds, with `model_args` changing what the name stands for
    global_pool      "token", "avg" or "map"
    pretrained_cfg   how pictures are prepared, what the classes are called

A file of weights without it is read as well: then names and shapes must say everything.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vitrail.checkpoints.facts import Facts
from vitrail.checkpoints.shapes import square
from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.config import Config, pair

Settings = Mapping[str, Any]
UNKNOWN_SIZE = 224  # pixels, where neither positions nor settings say for which size a model is
ORIGIN = ("license", "origin_url")  # of the weights, as timm calls it
# timm's words for resampling. Two have no word here: the nearest filter is taken, and bilinear is
# one of the two that "random" draws from.
INTERPOLATIONS = {"box": "area", "hamming": "bilinear", "random": "bilinear"}


def model_args(settings: Settings) -> Settings:
    """What config.json changes in the architecture it names."""
    return mapping(settings.get("model_args"))


def architecture(settings: Settings) -> str:
    """The name timm builds the model by, or nothing."""
    name = settings.get("architecture")
    return name.split(".")[0] if isinstance(name, str) else ""


def global_pool(settings: Settings) -> str | None:
    """How the settings say that tokens become one vector, if they do."""
    for place in (model_args(settings), settings, pretrained(settings)):
        if isinstance(name := place.get("global_pool"), str):
            return name
    return None


def pretrained(settings: Settings) -> Settings:
    """What belongs to the weights; older files have it among everything else."""
    flat = settings if "architecture" in settings else {}
    return mapping(settings.get("pretrained_cfg", flat))


def mapping(value: Any) -> Settings:
    return value if isinstance(value, Mapping) else {}


def image_sizes(settings: Settings) -> list[tuple[int, int]]:
    """The sizes the settings name, likeliest first."""
    size, input_size = model_args(settings).get("img_size"), pretrained(settings).get("input_size")
    named = [(size, size) if isinstance(size, int) else size]
    if isinstance(input_size, Sequence):
        named.append(input_size[1:])  # after the channels
    return [
        (sides[0], sides[1])
        for sides in named
        if isinstance(sides, Sequence)
        and len(sides) == 2
        and all(isinstance(side, int) and side > 0 for side in sides)
    ]


def grids(settings: Settings, stride: tuple[int, int]) -> list[tuple[int, int]]:
    """Patches down and across at the sizes the settings name."""
    down, across = stride
    return [(height // down, width // across) for height, width in image_sizes(settings)]


def image_size(patches: int, stride: tuple[int, int], settings: Settings) -> tuple[int, int]:
    """The pixels that give so many patches: as the settings say, or else a square."""
    down, across = stride
    for height, width in grids(settings, stride):
        if height * width == patches:
            return height * down, width * across  # pixels that fill no patch are not looked at
    hint = "how many go into a row must be said by model_args.img_size of a config.json beside it"
    return square(patches, stride, hint)


def usual_size(stride: tuple[int, int], settings: Settings) -> tuple[int, int]:
    """The pixels of a model whose weights do not tell."""
    height, width = next(iter(image_sizes(settings)), (UNKNOWN_SIZE, UNKNOWN_SIZE))
    down, across = stride
    return max(1, height // down) * down, max(1, width // across) * across


def ratio(hidden: int, width: int) -> float:
    """The factor that timm must be given to arrive at `hidden` channels after rounding down."""
    factor = hidden / width
    return factor if int(width * factor) == hidden else math.nextafter(factor, math.inf)


def config_json(
    name: str,
    arguments: dict[str, Any],
    config: Config,
    facts: Facts,
    *,
    pool: str,
    first_conv: str,
    classifier: str | list[str],
    fixed_size: bool = True,
) -> dict[str, dict[str, Any]]:
    """The file from which timm builds the model `name` with these arguments."""
    settings: dict[str, Any] = {
        "architecture": name,
        "num_classes": config.num_classes,
        "num_features": config.num_features,
        "global_pool": pool,
        "model_args": {"in_chans": config.channels, **arguments},
        "pretrained_cfg": {
            "input_size": [config.channels, *pair(config.image_size)],
            "fixed_input_size": fixed_size,
            **to_data_config(facts.preprocessing),
            "num_classes": config.num_classes,
            # timm would adapt the first convolution of any model that does not see in color, as if
            # its weights were for three channels
            "first_conv": first_conv if config.channels == 3 else None,
            "classifier": classifier,
            **{key: facts.provenance[key] for key in ORIGIN if key in facts.provenance},
        },
    }
    if facts.class_names:
        settings["label_names"] = list(facts.class_names)
    return {"config.json": settings}


def to_data_config(how: Preprocessing) -> dict[str, Any]:
    """A preprocessing in timm's words; its resizing always smooths before it shrinks."""
    return {
        "mean": list(how.mean),
        "std": list(how.std),
        "interpolation": "box" if how.interpolation == "area" else how.interpolation,
        "crop_pct": crop_share(how.resize_to or how.size, how.size),
        "crop_mode": "center" if how.resize == "short-side" else "squash",
    }


def crop_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    """The shortest number with which timm, which rounds down, resizes to `before` pixels."""
    largest = min(cut / whole for cut, whole in zip(after, before, strict=True))
    for share in (round(largest, digits) for digits in range(1, 17)):
        if share and before == (math.floor(after[0] / share), math.floor(after[1] / share)):
            return share
    return math.nextafter(largest, 0)


def read_facts(settings: Settings, config: Config) -> Facts | None:
    """What config.json says about pictures and classes; None if it says nothing.

    Nothing is said either where the pictures it means have other channels than the model's.
    """
    given = pretrained(settings)
    if not given:
        return None
    try:
        how = from_data_config(given, pair(config.image_size))
    except (TypeError, ValueError, ArithmeticError, ConfigError) as error:
        raise CheckpointError(f"config.json describes no preprocessing: {error}") from None
    if len(how.mean) != config.channels:
        return None
    provenance = {key: given[key] for key in ORIGIN if isinstance(given.get(key), str)}
    return Facts(preprocessing=how, class_names=label_names(settings), provenance=provenance)


def from_data_config(given: Settings, size: tuple[int, int]) -> Preprocessing:
    """timm's evaluation: what is not said has its defaults."""
    mode = given.get("crop_mode", "center")
    if mode not in ("center", "squash"):
        raise ConfigError(f"crop_mode={mode!r} is not known; 'center' and 'squash' are")
    share = float(given.get("crop_pct") or 0.875)
    name = given.get("interpolation", "bicubic")
    before = math.floor(size[0] / share), math.floor(size[1] / share)
    return Preprocessing(
        size=size,
        resize="short-side" if mode == "center" else "direct",
        resize_to=None if mode == "squash" and before == size else before,  # nothing to cut off
        interpolation=INTERPOLATIONS.get(name, name),  # pyright: ignore[reportArgumentType]: checked there
        mean=tuple(map(float, given.get("mean", IMAGENET_MEAN))),
        std=tuple(map(float, given.get("std", IMAGENET_STD))),
    )


def label_names(settings: Settings) -> tuple[str, ...]:
    """What the classes are called: a list, or a mapping from numbers."""
    given = pretrained(settings)
    names = settings.get("label_names") or given.get("label_names") or given.get("labels") or ()
    if isinstance(names, Mapping):
        numbers = sorted(names, key=lambda key: (len(str(key)), str(key)))  # 9 before 10
        names = [names[number] for number in numbers]
    return tuple(map(str, names)) if isinstance(names, Sequence) else ()
