"""Fitting a model to another task: classes, image size, channels, patch size.

Weights that still fit are kept, the others are made from the old ones or start at zero. Each
change is told: nothing happens behind the user's back.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from vitrail.checkpoints.facts import Facts, facts_of
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import ConfigError
from vitrail.models.build import Model, build
from vitrail.models.config import NUMERICS, MixerConfig, Numerics, Size, VitConfig, pair
from vitrail.models.pos_embed import POS_EMBEDS, interpolation_matrix
from vitrail.models.vit import VisionTransformer

HEADS = ("head", "distillation_head")


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that was done to a model on the user's behalf."""

    part: str
    what: str
    how: str

    def __str__(self) -> str:
        return f"  {self.part:<11} {self.what:<25} {self.how}".rstrip()


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
    """The model with some things changed, and what was changed. What is None stays as it is."""
    old = model.config
    wishes = {
        "num_classes": num_classes,
        "image_size": image_size,
        "channels": channels,
        "patch_size": patch_size,
    }
    changes = {name: wish for name, wish in wishes.items() if wish is not None}
    if "patch_size" in changes and (not isinstance(old, VitConfig) or old.stem != "patches"):
        raise ConfigError("patch_size can only be changed where patches are cut from the picture")
    new_head_wanted = num_classes not in (None, 0, old.num_classes)
    if isinstance(old, VitConfig) and new_head_wanted and not keep_representation:
        changes["representation"] = 0
    new = old.change(**changes)
    if isinstance(new, MixerConfig) and isinstance(old, MixerConfig) and new.grid != old.grid:
        raise ConfigError(
            f"image_size={new.image_size} does not fit a Mixer trained at {old.image_size}: "
            "its token-mixing weights are tied to the grid"
        )
    if new == old:
        return model, []
    state: dict[str, Tensor] = dict(model.state_dict())
    told = [
        *new_patches(state, old, new),
        *new_channels(state, old, new),
        *new_positions(state, model, new),
        *new_head(state, old, new),
    ]
    adapted = build(new)
    adapted.load_state_dict(state, assign=True)
    adapted.facts = new_facts(facts_of(model), old, new)
    return adapted.train(model.training), told


def under_numerics(model: Model, numerics: str | Numerics | None) -> tuple[Model, list[Change]]:
    """The same weights computed in another library's way, and what was changed. None: as it is."""
    old = model.config
    new = old if numerics is None else old.change(numerics=numerics)
    if new == old:
        return model, []
    changed = build(new)
    changed.load_state_dict(model.state_dict(), assign=True)
    changed.facts = model.facts
    what = f"{called(old.numerics)} -> {called(new.numerics)}"
    return changed.train(model.training), [Change("numerics", what, "the weights stay")]


def called(numerics: Numerics) -> str:
    """Whose numerics these are."""
    return next((name for name, known in NUMERICS.items() if known == numerics), "others")


def new_head(state: dict[str, Tensor], old: Any, new: Any) -> list[Change]:
    told = []
    if isinstance(old, VitConfig) and old.representation and not new.representation:
        for name in ("representation.weight", "representation.bias"):
            del state[name]
        told.append(Change("pre_logits", "left out", "not used when fine-tuning (section 3.2)"))
    if old.num_classes == new.num_classes:
        return told
    for head in HEADS:
        for part in ("weight", "bias"):
            state.pop(f"{head}.{part}", None)
        distilled = isinstance(new, VitConfig) and new.distillation
        if new.num_classes and (head == "head" or distilled):
            state[f"{head}.weight"] = torch.zeros(new.num_classes, new.num_features, device="cpu")
            state[f"{head}.bias"] = torch.zeros(new.num_classes, device="cpu")
    how = "new, starts at zero" if new.num_classes else "left off: the model gives features"
    return [*told, Change("head", f"{old.num_classes} -> {new.num_classes} classes", how)]


def new_positions(state: dict[str, Tensor], model: Model, new: Any) -> list[Change]:
    if not isinstance(model, VisionTransformer) or model.config.grid == new.grid:
        return []
    stretched = 0
    for name, module in model.named_modules():
        if isinstance(module, tuple(POS_EMBEDS.values())):
            tables = cast(Any, module).resized_parameters(new.grid)
            state |= {f"{name}.{table}": values for table, values in tables.items()}
            stretched += len(tables)
    (h, w), (high, wide) = model.config.grid, new.grid
    how = f"stretched ({new.numerics.position_resize}'s way)" if stretched else "computed anew"
    return [Change("positions", f"{h} x {w} -> {high} x {wide}", how)]


def new_channels(state: dict[str, Tensor], old: Any, new: Any) -> list[Change]:
    """Channels are summed into one, or repeated and weighed down to the same total."""
    if old.channels == new.channels:
        return []
    name = first_kernel(state)
    weight = state[name]  # (D, C, P, P)
    if new.channels == 1:
        state[name] = weight.sum(dim=1, keepdim=True)
        how = "kernels summed"
    else:
        order = torch.arange(new.channels) % old.channels
        state[name] = weight[:, order] * (old.channels / new.channels)
        how = "kernels repeated, weighed down" if new.channels > old.channels else "first ones kept"
    return [Change("channels", f"{old.channels} -> {new.channels}", how)]


def new_patches(state: dict[str, Tensor], old: Any, new: Any) -> list[Change]:
    """Kernels that give a resized patch what the old ones give the patch (Beyer et al. 2023).

    If a patch is resized by y = B x, the kernel v for y with <v, B x> = <w, x> is the
    pseudo-inverse of B's transpose times w (FlexiViT, arXiv:2212.08013).
    """
    if isinstance(old, MixerConfig) or getattr(old, "patch_size", 0) == getattr(
        new, "patch_size", 0
    ):
        return []
    name = first_kernel(state)
    weight = state[name].double()
    for axis, (before, after) in enumerate(
        zip(pair(old.patch_size), pair(new.patch_size), strict=True), start=2
    ):
        resize = interpolation_matrix(before, after, "flexivit", like=weight)  # (after, before)
        inverse = torch.linalg.pinv(resize.mT)  # (after, before)
        weight = (weight.movedim(axis, -1) @ inverse.mT).movedim(-1, axis)
    state[name] = weight.float().contiguous()
    sizes = f"{old.patch_size} -> {new.patch_size} pixels"
    return [Change("patches", sizes, "resized (pseudo-inverse)")]


def first_kernel(state: dict[str, Tensor]) -> str:
    """The convolution that reads the picture."""
    names = (
        "stem.resnet.root.weight",
        "stem.layers.0.weight",
        "root.weight",
        "stem.projection.weight",
        "stem.weight",
    )
    return next(name for name in names if name in state)


def new_facts(facts: Facts, old: Any, new: Any) -> Facts:
    """Preprocessing for the new size and channels; class names if the head was kept."""
    was, size = pair(old.image_size), pair(new.image_size)
    before = facts.preprocessing
    cut = before.resize_to
    if cut is not None:
        cut = (cut[0] * size[0] // was[0], cut[1] * size[1] // was[1])
    mean, std = before.mean, before.std
    if old.channels != new.channels:
        mean = (sum(mean) / len(mean),) * new.channels
        std = (sum(std) / len(std),) * new.channels
    preprocessing: Preprocessing = replace(before, size=size, resize_to=cut, mean=mean, std=std)
    kept = facts.class_names if old.num_classes == new.num_classes else ()
    return replace(facts, preprocessing=preprocessing, class_names=kept)
