"""Google's .npz files: google-research/vision_transformer, big_vision and big_transfer.

Over the years the same weights were stored under several layouts. `tidy` turns all of them
into one, that of today's vision_transformer; after it, a family is one table.

    params/…, opt/target/…, params/img/…       training states: what is beside the weights is left
    Transformer/encoderblock/…                 scanned: all layers in one array
    MultiHeadDotProductAttention_1, MlpBlock_3 before 2021 a block counted all its parts together
    Transformer/posembed_input/pos_embedding, Transformer/pos_embedding, pos_embedding
    (N + 1) or N rows of positions             with the class token's, or added before it came
    probe, MlpBlock_0, …                       the MAP head without a name of its own
"""

import re
from dataclasses import replace

import torch

from vitrail.checkpoints import google_bit, google_mixer, google_vit
from vitrail.checkpoints.files import Entry, Weights
from vitrail.checkpoints.google_vit import POSITION
from vitrail.errors import CheckpointError

PREFIXES = ("params/img/", "params/", "opt/target/img/", "opt/target/", "target/", "")
MOST_LAYERS = 1000  # of a scanned file; more is a mistake or an attack
SCANNED = "Transformer/encoderblock/"
POSITION_PLACES = ("Transformer/pos_embedding", "pos_embedding")
MAP_PARTS = ("probe", "MlpBlock_0/", "MultiHeadDotProductAttention_0/", "LayerNorm_0/")
EARLY_NAMES = {
    "/MultiHeadDotProductAttention_1/": "/MultiHeadDotProductAttention_0/",
    "/LayerNorm_2/": "/LayerNorm_1/",
    "/MlpBlock_3/": "/MlpBlock_0/",
}


def tidy(weights: Weights) -> Weights:
    """The arrays under the names of today's vision_transformer."""
    if not any(name.endswith("/kernel") for name in weights.entries):
        return weights  # not Google's
    inside = without_prefix(weights.entries)
    left_out = dict(weights.left_out)
    if len(inside) < len(weights.entries):
        count = len(weights.entries) - len(inside)
        left_out["beside"] = f"{count} arrays that are not under the model's prefix"
    return replace(weights, entries=renamed(inside), left_out=left_out)


def renamed(entries: dict[str, Entry]) -> dict[str, Entry]:
    if any(name.startswith(("resnet/", "root_block/")) for name in entries):
        return google_bit.renamed(entries)
    if any(name.startswith("Mixer/") for name in entries):
        return google_mixer.renamed(entries)
    entries = unscanned(entries)
    if any("/MultiHeadDotProductAttention_1/" in name for name in entries):
        entries = {with_late_name(name): entry for name, entry in entries.items()}
    for place in POSITION_PLACES:
        if place in entries:
            entries[POSITION] = entries.pop(place)
    if POSITION in entries:
        entries[POSITION] = google_vit.with_class_row(entries)
    if "probe" in entries:
        entries = {
            f"MAPHead_0/{name}" if name.startswith(MAP_PARTS) else name: entry
            for name, entry in entries.items()
        }
    return {
        name: entry.map(torch.flatten) if re.search(r"gn\w+/(scale|bias)$", name) else entry
        for name, entry in entries.items()  # GroupNorm's may be (1, 1, 1, C)
    }


def without_prefix(entries: dict[str, Entry]) -> dict[str, Entry]:
    for prefix in PREFIXES:
        if any(name.startswith(prefix) for name in entries):
            return {
                name.removeprefix(prefix): entry
                for name, entry in entries.items()
                if name.startswith(prefix)
            }
    return entries


def unscanned(entries: dict[str, Entry]) -> dict[str, Entry]:
    """One array for each layer, where the file has one for all of them."""
    out = {}
    for name, entry in entries.items():
        if not name.startswith(SCANNED):
            out[name] = entry
            continue
        layers = entry.shape[0] if entry.shape else 0
        if not 0 < layers <= MOST_LAYERS:
            raise CheckpointError(f"{name} is {entry.shape}: no number of layers")
        for index in range(layers):
            layer = entry.map(lambda all_layers, index=index: all_layers[index])
            out[f"Transformer/encoderblock_{index}/{name.removeprefix(SCANNED)}"] = layer
    return out


def early_name(name: str) -> str:
    """What an array was called before 2021."""
    for early, late in EARLY_NAMES.items():
        name = re.sub(rf"(encoderblock_\d+){late}", rf"\1{early}", name)
    return name


def with_late_name(name: str) -> str:
    for early, late in EARLY_NAMES.items():
        name = name.replace(early, late)
    return name
