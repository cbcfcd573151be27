"""What a served model looks at: an overlay to see, and maps for the page's sliders.

One picture at a time and one layer in memory at a time. Nothing about the model is changed: it is
in evaluation mode already, so that the modes which `inspection` sets are those that it finds, and
gradients are taken of attention and tokens, never of weights. So others may use the model at the
same time.

Shapes: L layers, H heads, h x w patches, N tokens, q queries, C channels.
"""

import base64
from collections import deque
from typing import Any

import torch
from torch import Tensor

from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.decoding import open_picture
from vitrail.data.thumbnails import to_png
from vitrail.errors import ConfigError, unknown
from vitrail.inspection.drawing import overlay
from vitrail.inspection.layers import Layer, grid_of, lag, walk, with_attention
from vitrail.inspection.pictures import Picture, as_seen, prepared, seen
from vitrail.inspection.relevance import FOR_CLASSES, GENERAL, METHODS
from vitrail.inspection.rollout import read_by_head, rollout
from vitrail.models.build import Model
from vitrail.models.vit import VisionTransformer

FEW = 20  # classes that an error may list
View = tuple[Tensor, list[float]]  # an image (C, H, W) as the model sees it, and the box of it


def methods_of(model: Model | None) -> tuple[str, ...]:
    """The maps that can be asked of a model, the most telling first; none without attention."""
    if not isinstance(model, VisionTransformer):
        return ()
    return GENERAL if model.head is None else FOR_CLASSES + GENERAL


def explain(model: Model, data: bytes | Picture, *, method: str | None, label: str | None) -> bytes:
    """The picture in gray, and warm colors where it counts, as a PNG.

    `method` is the most telling that the model has, if it is None; `label` is the class that is
    asked about, the likeliest if it is None. The image may be `prepared` already.
    """
    vit = unmerged(with_attention(model, "explanations"))
    method = method or methods_of(vit)[0]
    if method not in methods_of(vit):
        raise unknown("method", method, methods_of(vit))
    classes = None if label is None else asked(vit, method, label)
    picture = data if isinstance(data, Picture) else prepared(vit, data)
    values = METHODS[method](vit, picture.image[None], classes)[0]  # (h, w)
    values = values.float().cpu().numpy()
    return to_png(overlay(picture.pixels, values, picture.box, "heat", lag=lag(vit)))


def asked(vit: VisionTransformer, method: str, label: str) -> Tensor:
    """The number of a class, for a method that can be asked about classes: (1,)."""
    names = get_metadata(vit).names(vit.config.num_classes)
    if label not in names:
        raise unknown("class", label, names, "see /model" if len(names) > FEW else "")
    if method in GENERAL:
        raise ConfigError(
            f"{method} is the same for every class, so it cannot be asked about {label!r}; "
            f"leave the class out, or ask for {' or '.join(FOR_CLASSES)}"
        )
    return torch.tensor([names.index(label)])


@torch.inference_mode()
def attention(model: Model, data: bytes | View) -> dict[str, Any]:
    """Where what the head reads looks, in every layer and head, ready for JSON.

    `maps` is base64 of bytes (L, H, h, w), the largest of each map 255; `peaks` (L, H) is the
    attention that 255 stands for, so that heads can be averaged. `rollout` (h, w) follows all
    layers. `box` is the part of the picture that the model sees: top, left, height and width, as
    shares of its sides; `lag` is how far, in patches, what tokens see lies above and to the left of
    their patches. What the head reads is the class token, or the mean of the patches, or what
    attention pooling makes of them. The image may be a `view` already.
    """
    vit = unmerged(with_attention(model, "attention maps"))
    image, box = view(vit, data) if isinstance(data, bytes) else data
    image = image[None]  # (1, C, H, W)
    (last,) = deque(walk(vit, image), maxlen=1)
    read = read_by_head(vit, last.tokens, "mean")[0]  # (N,)
    grid, prefix = grid_of(vit, image), vit.config.num_prefix
    maps = torch.stack([looked_at(layer, read)[:, prefix:] for layer in walk(vit, image)])
    peaks = maps.amax(dim=-1)  # (L, H)
    return {
        "grid": list(grid),
        "layers": len(maps),
        "heads": maps.shape[1],
        "box": box,
        "lag": lag(vit),
        "maps": encoded(maps, peaks[..., None]),
        "peaks": [[round(peak, 6) for peak in row] for row in peaks.tolist()],
        "rollout": rolled_out(vit, image),
    }


def view(model: Model, data: bytes) -> View:
    """What `attention` needs of an image; all of its decoding."""
    return as_seen(model, data), box_of(model, data)


def unmerged(vit: VisionTransformer) -> VisionTransformer:
    """The model, or one of the same weights that keeps a token for each patch."""
    if not vit.merge:
        return vit
    with torch.device("meta"):
        twin = VisionTransformer(vit.config)
    twin.load_state_dict(vit.state_dict(keep_vars=True), assign=True)
    twin.metadata = vit.metadata
    return twin.eval()


def looked_at(layer: Layer, read: Tensor) -> Tensor:
    """Where the tokens that are read look, weighed by how much they are read: (H, N)."""
    found = layer.query.new_zeros(layer.query.shape[1], layer.query.shape[2])
    for image, rows in layer.slices():
        if read[rows].any():
            found += read[rows] @ layer.scores(image, rows).softmax(dim=-1)[0]  # (H, q, N)
    return found


def rolled_out(vit: VisionTransformer, image: Tensor) -> str:
    values = rollout(vit, image)[0]  # (h, w)
    return encoded(values, values.amax())


def encoded(values: Tensor, largest: Tensor) -> str:
    """Values as bytes, the largest 255, in letters that JSON can hold."""
    tiny = torch.finfo(values.dtype).tiny
    scaled = (255 * values / largest.clamp_min(tiny)).round().byte()
    return base64.b64encode(scaled.cpu().numpy().tobytes()).decode("ascii")


def box_of(vit: Model, data: bytes) -> list[float]:
    """The part of the picture that the model sees: top, left, height, width, in shares."""
    picture = open_picture(data)
    box = seen(get_metadata(vit).preprocessing, picture.height, picture.width)
    top, left = box.top / picture.height, box.left / picture.width
    high, wide = (box.bottom - box.top) / picture.height, (box.right - box.left) / picture.width
    return [round(part, 5) for part in (top, left, high, wide)]
