"""preprocessor_config.json of transformers: how a picture is prepared, in its words and in ours."""

import math
from collections.abc import Mapping
from typing import Any

from vitrail.checkpoints.huggingface_config import number
from vitrail.data.preprocessing import Interpolation, Preprocessing
from vitrail.errors import CheckpointError

PROCESSOR = "preprocessor_config.json"
WHITE = 255  # the largest value of a pixel
# Pillow's numbers. 4 is its box filter, our "area", which their processors on tensors refuse.
RESAMPLE: dict[Interpolation, int] = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}
FILTERS: dict[object, Interpolation] = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
    4: "area",
}


def processor_settings(how: Preprocessing) -> dict[str, Any]:
    """The file for a preprocessing; what it cannot say is told by `cannot_prepare`."""
    before = how.resize_to or how.size
    short = how.resize == "short-side"
    settings: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": len(how.mean) == 3,
        "do_resize": True,
        "size": {"shortest_edge": max(before)} if short else sides(before),
        "resample": RESAMPLE.get(how.interpolation, RESAMPLE["bilinear"]),
        "do_rescale": True,
        "rescale_factor": 1 / WHITE,
        "do_normalize": True,
        "image_mean": list(how.mean),
        "image_std": list(how.std),
    }
    if short or how.resize_to is not None:
        settings |= {"do_center_crop": True, "crop_size": sides(how.size)}
    return settings


def cannot_prepare(how: Preprocessing) -> list[str]:
    """What of a preprocessing the file has no words for; it gets the nearest there is."""
    before = how.resize_to or how.size
    wrong = {
        "resizing without antialiasing": not how.antialias,
        f"the interpolation {how.interpolation!r}": how.interpolation not in RESAMPLE,
        f"a short side of {before[0]} or {before[1]} pixels": how.resize == "short-side"
        and before[0] != before[1],
    }
    return [what for what, applies in wrong.items() if applies]


def read_processor(
    values: Mapping[str, Any], image_size: tuple[int, int], channels: int
) -> Preprocessing:
    """What a processor of transformers does to a picture for a model of this size."""
    size, short = image_size, False
    if values.get("do_resize", True) and values.get("size") is not None:
        size, short = read_size("size", values["size"])
    cuts = values.get("crop_size") is not None and values.get("do_center_crop", True)
    resample = values.get("resample")
    resample = RESAMPLE["bilinear"] if resample is None else resample
    if not isinstance(resample, int) or resample not in FILTERS:
        raise CheckpointError(f"{PROCESSOR} says resample={resample!r}, a filter without a name")
    mean, std = read_statistics(values, channels)
    return Preprocessing(
        size=read_size("crop_size", values["crop_size"])[0] if cuts else size,
        resize="short-side" if short else "direct",
        resize_to=size if short or cuts else None,
        interpolation=FILTERS[resample],
        mean=mean,
        std=std,
    )


def read_size(name: str, value: Any) -> tuple[tuple[int, int], bool]:
    """Height and width, and whether they are those of the short side alone."""
    short = isinstance(value, Mapping) and "shortest_edge" in value
    both: list[Any] = value if isinstance(value, list) else [value, value]
    if isinstance(value, Mapping):
        names = ("shortest_edge",) * 2 if short else ("height", "width")
        both = [value.get(side) for side in names]
    if len(both) != 2 or not all(isinstance(side, int) and side > 0 for side in both):
        raise CheckpointError(f"{PROCESSOR} says {name}={value!r}, which is no height and width")
    return (both[0], both[1]), short


def read_statistics(
    values: Mapping[str, Any], channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of pixels / 255, though the processor may scale pixels otherwise."""
    factor = 1.0
    if values.get("do_rescale", True):
        factor = number(values, "rescale_factor", 1 / WHITE)
    scale = 1.0 if math.isclose(WHITE * factor, 1) else WHITE * factor
    if scale <= 0:
        raise CheckpointError(f"{PROCESSOR} says rescale_factor={factor}, which leaves no picture")
    mean, std = (0.0,) * channels, (1.0,) * channels
    if values.get("do_normalize", True):
        mean = per_channel(values, "image_mean", channels)
        std = per_channel(values, "image_std", channels)
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


def per_channel(values: Mapping[str, Any], name: str, channels: int) -> tuple[float, ...]:
    """One number for each channel; one for all, or the same for all, will do."""
    said = values.get(name, 0.5)
    found = [number({name: one}, name, 0) for one in (said if isinstance(said, list) else [said])]
    if len(found) == channels:
        return tuple(found)
    if len(set(found)) != 1:
        raise CheckpointError(
            f"{PROCESSOR} says {name}={said!r}; the model has {channels} channels"
        )
    return (found[0],) * channels


def sides(size: tuple[int, int]) -> dict[str, int]:
    return {"height": size[0], "width": size[1]}
