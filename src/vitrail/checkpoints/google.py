"""Google's .npz files: google-research/vision_transformer, big_vision and big_transfer.

Over the years the same weights were stored under several layouts. `canonical` turns all of them
into one, that of today's vision_transformer; after it, a family is one table.

    params/…, opt/target/…, params/img/…       training states: what is beside the weights is left
    Transformer/encoderblock/…                 scanned: all layers in one array
    MultiHeadDotProductAttention_1, MlpBlock_3 before 2021 a block counted all its parts together
    Transformer/posembed_input/pos_embedding, Transformer/pos_embedding, pos_embedding
    (N + 1) or N rows of positions             with the class token's, or added before it came
    probe, MlpBlock_0, …                       the MAP head without a name of its own
"""

import re
from pathlib import Path

from torch import Tensor

from vitrail.checkpoints import google_bit, google_mixer, google_vit
from vitrail.checkpoints.npz import read_npz
from vitrail.checkpoints.rules import read
from vitrail.errors import CheckpointError
from vitrail.models.build import Model

PREFIXES = ("params/img/", "params/", "opt/target/img/", "opt/target/", "target/", "")
SCANNED = "Transformer/encoderblock/"
POSITION_PLACES = ("Transformer/posembed_input/pos_embedding", "Transformer/pos_embedding")
MAP_PARTS = ("probe", "MlpBlock_0/", "MultiHeadDotProductAttention_0/", "LayerNorm_0/")
EARLY_NAMES = {
    "/MultiHeadDotProductAttention_1/": "/MultiHeadDotProductAttention_0/",
    "/LayerNorm_2/": "/LayerNorm_1/",
    "/MlpBlock_3/": "/MlpBlock_0/",
}
# Each family by an array that no other has.
FAMILIES = {
    "resnet/root_block/standardized_conv2d/kernel": google_bit,
    "stem/kernel": google_mixer,
    "embedding/kernel": google_vit,
}


def load_google(path: Path) -> Model:
    """The model of a Google .npz file; everything is read from names and shapes."""
    arrays = canonical(read_npz(path))
    for key, family in FAMILIES.items():
        if key in arrays:
            config = family.describe(arrays)
            return read(arrays, family.rules(config), config)
    raise CheckpointError(
        f"{path} holds no ViT, hybrid, BiT or Mixer of Google's: "
        f"none of {', '.join(FAMILIES)} is in it"
    )


def canonical(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays under the names of today's vision_transformer."""
    arrays = without_prefix(arrays)
    if any(name.startswith(("resnet/", "root_block/")) for name in arrays):
        return google_bit.canonical(arrays)
    if any(name.startswith("Mixer/") for name in arrays):
        return google_mixer.canonical(arrays)
    arrays = unscanned(arrays)
    if any("/MultiHeadDotProductAttention_1/" in name for name in arrays):
        arrays = {with_late_name(name): array for name, array in arrays.items()}
    for place in POSITION_PLACES:
        if place in arrays:
            arrays["pos_embedding"] = arrays.pop(place)
    if "pos_embedding" in arrays:
        arrays["pos_embedding"] = google_vit.with_class_row(arrays)
    if "probe" in arrays:
        arrays = {
            f"MAPHead_0/{name}" if name.startswith(MAP_PARTS) else name: array
            for name, array in arrays.items()
        }
    return {
        name: array.flatten() if re.search(r"gn\w+/(scale|bias)$", name) else array
        for name, array in arrays.items()  # GroupNorm's may be (1, 1, 1, C)
    }


def without_prefix(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    for prefix in PREFIXES:
        if any(name.startswith(prefix) for name in arrays):
            return {
                name.removeprefix(prefix): array
                for name, array in arrays.items()
                if name.startswith(prefix)
            }
    return arrays


def unscanned(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """One array for each layer, where the file has one for all of them."""
    out = {}
    for name, array in arrays.items():
        if not name.startswith(SCANNED):
            out[name] = array
            continue
        for index, layer in enumerate(array):
            out[f"Transformer/encoderblock_{index}/{name.removeprefix(SCANNED)}"] = layer
    return out


def with_late_name(name: str) -> str:
    for early, late in EARLY_NAMES.items():
        name = name.replace(early, late)
    return name
