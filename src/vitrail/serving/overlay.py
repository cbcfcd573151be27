"""Explanations of a served model: overlay images, and attention maps for the page.

One image and one layer in memory at a time. The model is never changed: it is in eval mode, and
gradients are taken of attention and tokens, never of weights. So other threads may use it.

Shapes: L layers, H heads, h x w patches, N tokens, q queries, C channels.
"""

import base64
from collections import deque

import torch
from torch import Tensor

from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.decode import open_image, to_png
from vitrail.errors import ConfigError, unknown
from vitrail.inspection.drawing import overlay
from vitrail.inspection.layers import grid_of, lag, walk, with_attention
from vitrail.inspection.pictures import Picture, as_seen, prepared, seen
from vitrail.inspection.relevance import FOR_CLASSES, GENERAL, METHODS
from vitrail.inspection.rollout import read_by_head, rollout
from vitrail.models.vit import Model, VisionTransformer
from vitrail.serving.schemas import AttentionResponse

MAX_LISTED_CLASSES = 20  # in an error message
View = tuple[Tensor, list[float]]  # the model's input (C, H, W), and its box within the image


def methods_of(model: Model | None) -> tuple[str, ...]:
    """Return the explanation methods of a model, the default first; none without attention."""
    if not isinstance(model, VisionTransformer):
        return ()
    return GENERAL if model.head is None else FOR_CLASSES + GENERAL


def explain(model: Model, data: bytes | Picture, *, method: str | None, label: str | None) -> bytes:
    """Return a PNG of the image in gray, with a heat map where it supports the class.

    `method` defaults to the model's first, `label` to the predicted class. `data` may be the
    result of `inspection.pictures.prepared`.
    """
    vit = without_merging(with_attention(model, "explanations"))
    method = method or methods_of(vit)[0]
    if method not in methods_of(vit):
        raise unknown("method", method, methods_of(vit))
    classes = None
    if label is not None:
        names = get_metadata(vit).names(vit.config.num_classes)
        if label not in names:
            raise unknown(
                "class", label, names, "see /model" if len(names) > MAX_LISTED_CLASSES else ""
            )
        if method in GENERAL:
            raise ConfigError(
                f"{method} is the same for every class; leave class={label} out, "
                f"or use {' or '.join(FOR_CLASSES)}"
            )
        classes = torch.tensor([names.index(label)])
    picture = data if isinstance(data, Picture) else prepared(vit, data)
    values = METHODS[method](vit, picture.image[None], classes)[0]  # (h, w)
    values = values.float().cpu().numpy()
    return to_png(overlay(picture.pixels, values, picture.box, "heat", lag=lag(vit)))


@torch.inference_mode()
def attention(model: Model, data: bytes | View) -> AttentionResponse:
    """Return where the tokens that the head reads attend, for every layer and head.

    The head reads the class token, the mean of the patches, or the output of attention pooling.
    `data` may be the result of `view`.
    """
    vit = without_merging(with_attention(model, "attention maps"))
    image, box = view(vit, data) if isinstance(data, bytes) else data
    image = image[None]  # (1, C, H, W)
    (last,) = deque(walk(vit, image), maxlen=1)
    weights = read_by_head(vit, last.tokens, "mean")[0]  # (N,)
    grid, prefix = grid_of(vit, image), vit.config.num_prefix
    layers = []
    for layer in walk(vit, image):
        attended = layer.query.new_zeros(layer.query.shape[1], layer.query.shape[2])  # (H, N)
        for part, rows in layer.slices():
            if weights[rows].any():
                attended += weights[rows] @ layer.scores(part, rows).softmax(dim=-1)[0]  # (H, q, N)
        layers.append(attended[:, prefix:])
    maps = torch.stack(layers)  # (L, H, h * w)
    peaks = maps.amax(dim=-1)  # (L, H)
    rolled = rollout(vit, image)[0]  # (h, w)
    return AttentionResponse(
        grid=list(grid),
        layers=len(maps),
        heads=maps.shape[1],
        box=box,
        lag=lag(vit),
        maps=to_base64(maps, peaks[..., None]),
        peaks=[[round(peak, 6) for peak in row] for row in peaks.tolist()],
        rollout=to_base64(rolled, rolled.amax()),
    )


def view(model: Model, data: bytes) -> View:
    """Decode what `attention` needs of an image."""
    picture = open_image(data)
    height, width = picture.height, picture.width
    box = seen(get_metadata(model).preprocessing, height, width)
    sides = (box.top / height, box.left / width)
    sides += ((box.bottom - box.top) / height, (box.right - box.left) / width)
    return as_seen(model, data), [round(side, 5) for side in sides]


def without_merging(vit: VisionTransformer) -> VisionTransformer:
    """Return the model, or a twin that shares its weights and does not merge tokens."""
    if not vit.merge:
        return vit
    with torch.device("meta"):
        twin = VisionTransformer(vit.config)
    twin.load_state_dict(vit.state_dict(keep_vars=True), assign=True)
    twin.metadata = vit.metadata
    return twin.eval()


def to_base64(values: Tensor, largest: Tensor) -> str:
    """Encode values as base64 of bytes, with `largest` as 255."""
    tiny = torch.finfo(values.dtype).tiny
    scaled = (255 * values / largest.clamp_min(tiny)).round().byte()
    return base64.b64encode(scaled.cpu().numpy().tobytes()).decode("ascii")
