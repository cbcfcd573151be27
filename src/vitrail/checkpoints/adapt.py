"""Adapt a model to another task: classes, image size, channels, patch size, head, numerics.

Weights that still fit are kept; the others are derived from the old ones or start at zero. Every
change is reported as a `Change`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from vitrail.checkpoints.metadata import Metadata, get_metadata
from vitrail.errors import ConfigError
from vitrail.models.build import Model, build
from vitrail.models.config import NUMERICS, MixerConfig, Numerics, Size, VitConfig, pair
from vitrail.models.pos_embed import POS_EMBEDS, interpolation_matrix
from vitrail.models.vit import VisionTransformer

HEADS = ("head", "distillation_head")


@dataclass(frozen=True, slots=True)
class Change:
    """A change to a model that was made on the user's behalf."""

    part: str
    change: str
    detail: str

    def __str__(self) -> str:
        return f"  {self.part:<11} {self.change:<25} {self.detail}".rstrip()


@torch.no_grad()
def adapt(
    model: Model,
    *,
    num_classes: int | None = None,
    image_size: Size | None = None,
    channels: int | None = None,
    patch_size: Size | None = None,
    keep_representation: bool = False,
) -> tuple[Model, list[Change]]:
    """Return the adapted model and the list of changes. None keeps a field as it is."""
    old = model.config
    fields = {
        "num_classes": num_classes,
        "image_size": image_size,
        "channels": channels,
        "patch_size": patch_size,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    if patch_size is not None and (not isinstance(old, VitConfig) or old.stem != "patches"):
        raise ConfigError("patch_size can only be changed for a ViT with stem='patches'")
    has_new_head = num_classes not in (None, 0, old.num_classes)
    if isinstance(old, VitConfig) and has_new_head and not keep_representation:
        fields["representation"] = 0
    new = old.change(**fields)
    if isinstance(new, MixerConfig) and isinstance(old, MixerConfig) and new.grid != old.grid:
        raise ConfigError(
            f"image_size={new.image_size} does not fit a Mixer trained at {old.image_size}: "
            "its token-mixing weights are tied to the grid"
        )
    if new == old:
        return model, []
    state: dict[str, Tensor] = dict(model.state_dict())
    changes = [
        *adapt_patches(state, old, new),
        *adapt_channels(state, old, new),
        *adapt_positions(state, model, new),
        *adapt_head(state, old, new),
    ]
    metadata = adapt_metadata(get_metadata(model), old, new)
    return rebuild(model, new, state, metadata), changes


def set_numerics(model: Model, numerics: str | Numerics | None) -> tuple[Model, list[Change]]:
    """Run the same weights under another library's numerics. None keeps them."""
    old = model.config
    new = old if numerics is None else old.change(numerics=numerics)
    if new == old:
        return model, []
    before, after = (
        next((name for name, known in NUMERICS.items() if known == config.numerics), "custom")
        for config in (old, new)
    )
    changed = rebuild(model, new, model.state_dict(), model.metadata)
    return changed, [Change("numerics", f"{before} -> {after}", "weights unchanged")]


@torch.no_grad()
def with_head(model: Model, weight: Tensor, bias: Tensor, class_names: Sequence[str] = ()) -> Model:
    """Return the model with logits = features @ weight.T + bias; weight is (K, D), bias (K,).

    All other weights are shared with `model`, which does not change.
    """
    config = model.config.change(num_classes=len(bias))
    state = {name: x for name, x in model.state_dict().items() if name.split(".")[0] not in HEADS}
    like = next(model.parameters())
    weight, bias = (x.detach().to(like.device, like.dtype) for x in (weight, bias))
    if isinstance(config, VitConfig) and config.distillation:
        # The two heads are averaged: double the first and zero the second.
        state |= {"head.weight": 2 * weight, "head.bias": 2 * bias}
        state["distillation_head.weight"] = torch.zeros_like(weight)
        state["distillation_head.bias"] = torch.zeros_like(bias)
    else:
        state |= {"head.weight": weight, "head.bias": bias}
    metadata = replace(get_metadata(model), class_names=tuple(class_names))
    return rebuild(model, config, state, metadata)


@torch.no_grad()
def with_temperature(model: Model, temperature: float) -> Model:
    """Return the model with its head divided by a temperature.

    The calibration is then part of the weights and survives every format.
    """
    if model.head is None:
        raise ConfigError("the model has no head, and so no logits to divide by a temperature")
    state = {
        name: x / temperature if name.split(".")[0] in HEADS else x
        for name, x in model.state_dict().items()
    }
    metadata = get_metadata(model)
    total = round(metadata.provenance.get("temperature", 1.0) * temperature, 6)
    metadata = replace(metadata, provenance=dict(metadata.provenance) | {"temperature": total})
    return rebuild(model, model.config, state, metadata)


def rebuild(model: Model, config: Any, state: dict[str, Tensor], metadata: Any) -> Model:
    """Build a model with this state; it shares tensors with `state` and the mode of `model`."""
    rebuilt = build(config)
    rebuilt.load_state_dict(state, assign=True)
    rebuilt.metadata = metadata
    return rebuilt.train(model.training)


def adapt_head(state: dict[str, Tensor], old: Any, new: Any) -> list[Change]:
    changes = []
    if isinstance(old, VitConfig) and old.representation and not new.representation:
        for name in ("representation.weight", "representation.bias"):
            del state[name]
        changes.append(Change("pre_logits", "dropped", "not used in fine-tuning (section 3.2)"))
    if old.num_classes == new.num_classes:
        return changes
    for head in HEADS:
        for part in ("weight", "bias"):
            state.pop(f"{head}.{part}", None)
        distilled = isinstance(new, VitConfig) and new.distillation
        if new.num_classes and (head == "head" or distilled):
            state[f"{head}.weight"] = torch.zeros(new.num_classes, new.num_features, device="cpu")
            state[f"{head}.bias"] = torch.zeros(new.num_classes, device="cpu")
    detail = (
        "new, initialized to zero" if new.num_classes else "removed: the model returns features"
    )
    return [*changes, Change("head", f"{old.num_classes} -> {new.num_classes} classes", detail)]


def adapt_positions(state: dict[str, Tensor], model: Model, new: Any) -> list[Change]:
    if not isinstance(model, VisionTransformer) or model.config.grid == new.grid:
        return []
    detail = "recomputed"
    for name, module in model.named_modules():
        if isinstance(module, tuple(POS_EMBEDS.values())):
            for table, values in cast(Any, module).resized_parameters(new.grid).items():
                state[f"{name}.{table}"] = values
                detail = f"interpolated ({new.numerics.position_resize})"
    sizes = " -> ".join(f"{height} x {width}" for height, width in (model.config.grid, new.grid))
    return [Change("positions", sizes, detail)]


def adapt_channels(state: dict[str, Tensor], old: Any, new: Any) -> list[Change]:
    """Sum the kernels over channels, or repeat and rescale them to the same total."""
    if old.channels == new.channels:
        return []
    name = first_kernel(state)
    weight = state[name]  # (D, C, P, P)
    if new.channels == 1:
        state[name] = weight.sum(dim=1, keepdim=True)
        detail = "kernels summed"
    else:
        order = torch.arange(new.channels) % old.channels
        state[name] = weight[:, order] * (old.channels / new.channels)
        more = new.channels > old.channels
        detail = "kernels repeated and rescaled" if more else "first channels, rescaled"
    return [Change("channels", f"{old.channels} -> {new.channels}", detail)]


def adapt_patches(state: dict[str, Tensor], old: Any, new: Any) -> list[Change]:
    """Resize the patch kernels by pseudo-inverse (FlexiViT, arXiv:2212.08013).

    If a patch is resized by y = B x, the kernel v for y with <v, B x> = <w, x> is the
    pseudo-inverse of B's transpose times w.
    """
    sizes = getattr(old, "patch_size", 0), getattr(new, "patch_size", 0)
    if isinstance(old, MixerConfig) or sizes[0] == sizes[1]:
        return []
    name = first_kernel(state)
    weight = state[name].double()
    for axis, (before, after) in enumerate(zip(*map(pair, sizes), strict=True), start=2):
        resize = interpolation_matrix(before, after, "flexivit", like=weight)  # (after, before)
        inverse = torch.linalg.pinv(resize.mT)  # (after, before)
        weight = (weight.movedim(axis, -1) @ inverse.mT).movedim(-1, axis)
    state[name] = weight.float().contiguous()
    return [Change("patches", f"{sizes[0]} -> {sizes[1]} pixels", "resized (pseudo-inverse)")]


def first_kernel(state: dict[str, Tensor]) -> str:
    """Return the name of the convolution that reads the image."""
    names = (
        "stem.resnet.root.weight",
        "stem.layers.0.weight",
        "root.weight",
        "stem.projection.weight",
        "stem.weight",
    )
    return next(name for name in names if name in state)


def adapt_metadata(metadata: Metadata, old: Any, new: Any) -> Metadata:
    """Fit the preprocessing to the new size and channels; keep class names with their head."""
    old_size, size = pair(old.image_size), pair(new.image_size)
    preprocessing = metadata.preprocessing
    resize_to = preprocessing.resize_to
    if resize_to is not None:
        resize_to = (resize_to[0] * size[0] // old_size[0], resize_to[1] * size[1] // old_size[1])
    mean, std = preprocessing.mean, preprocessing.std
    if old.channels != new.channels:
        mean = (sum(mean) / len(mean),) * new.channels
        std = (sum(std) / len(std),) * new.channels
    return replace(
        metadata,
        preprocessing=replace(preprocessing, size=size, resize_to=resize_to, mean=mean, std=std),
        class_names=metadata.class_names if old.num_classes == new.num_classes else (),
    )
