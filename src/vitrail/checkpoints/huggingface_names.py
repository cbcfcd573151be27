"""The names of transformers, of which there are several for the same tensor.

transformers 5 has two namings: files keep the old one, models in memory have a new one, which
`torch.save(model.state_dict())` stores. `tidy` turns all of these into the old names of ViT:

    vit.layers.0.attention.q_proj.weight    the new naming
    embeddings.…, encoder.…                 a model without a classifier: names without "vit."
    vit.embeddings.mask_token, decoder.…    pre-training with hidden patches: left out
    deit.…, cls_classifier.…                DeiT
    dinov2.…, …norm1, …mlp.fc1              DINOv2
"""

import re
from collections.abc import Container
from dataclasses import replace

import torch

from vitrail.checkpoints.files import Entry, Weights
from vitrail.checkpoints.huggingface_config import check_model_type
from vitrail.errors import CheckpointError

PREFIXES = ("vit.", "deit.", "dinov2.", "dinov2_with_registers.")
PATCHES = "embeddings.patch_embeddings.projection"
POSITION = "embeddings.position_embeddings"
DISTILLATION = "embeddings.distillation_token"
REGISTERS = "embeddings.register_tokens"
HEADS = ("classifier.", "distillation_classifier.")

OTHER_NAMES = (
    (r"^layers\.", "encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
    (r"\.mlp\.down_proj\.", ".mlp.weights_out."),
    (r"\.norm1\.", ".layernorm_before."),
    (r"\.norm2\.", ".layernorm_after."),
    (r"^cls_classifier\.", "classifier."),
)
GATE, UP, BOTH = ".mlp.gate_proj.", ".mlp.up_proj.", ".mlp.weights_in."  # DINOv2's gated MLP
PRE_TRAINING = {
    r"^embeddings\.mask_token$": "stands for hidden patches, in pre-training only",
    r"^decoder\.": "paints hidden patches, in pre-training only",
}
BESIDE_A_HEAD = {r"^pooler\.": "transformers' classifier does not read it"}


def tidy(weights: Weights) -> Weights:
    """The tensors under the names of ViT in files: those of a classifier, or of a bare model."""
    check_model_type(weights.settings)
    if not any(name.endswith(f"{PATCHES}.weight") for name in weights.entries):
        return weights  # not of transformers
    names = {name: old_name(name) for name in weights.entries}
    if len(set(names.values())) < len(names):
        raise CheckpointError("the file holds some tensors twice, under an old and a new name")
    headed = has_head(names.values())
    unneeded = PRE_TRAINING | (BESIDE_A_HEAD if headed else {})
    entries, left_out = {}, dict(weights.left_out)
    for name, old in names.items():
        if why := next((why for part, why in unneeded.items() if re.search(part, old)), None):
            left_out[name] = why
        else:
            entries[old] = weights.entries[name]
    entries = {
        name if name.startswith(HEADS) else above(headed) + name: entry
        for name, entry in without_idle_distillation(with_gates_joined(entries)).items()
    }
    return replace(weights, entries=entries, left_out=left_out)


def old_name(name: str) -> str:
    """A tensor's name in a file of ViTModel."""
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    name = name.removeprefix(prefix)
    for pattern, old in OTHER_NAMES:
        name = re.sub(pattern, old, name)
    return name


def has_head(names: Container[str]) -> bool:
    return "classifier.weight" in names


def above(headed: bool) -> str:
    """What a classifier puts before the names of the model below its head."""
    return "vit." if headed else ""


def with_gates_joined(entries: dict[str, Entry]) -> dict[str, Entry]:
    """The new naming splits the first layer of a gated MLP into two; files have one."""
    out = dict(entries)
    for name in entries:
        up_name, both = name.replace(GATE, UP), name.replace(GATE, BOTH)
        if GATE not in name or up_name not in out or both in out:
            continue
        gate, up = out.pop(name), out.pop(up_name)
        size = (gate.shape[0] + up.shape[0], *gate.shape[1:]) if gate.shape and up.shape else ()
        out[both] = Entry(size, lambda gate=gate, up=up: torch.cat([gate.read(), up.read()]))
    return out


def without_idle_distillation(entries: dict[str, Entry]) -> dict[str, Entry]:
    """DeiT without its second head: a token that nobody reads is a register with a position."""
    if DISTILLATION not in entries or "distillation_classifier.weight" in entries:
        return entries
    token, table = entries[DISTILLATION], entries.get(POSITION)
    if table is None or len(table.shape) != 3 or table.shape[1] < 2:
        return entries  # broken, and `read` will say how
    placed = Entry(token.shape, lambda: token.read().float() + table.read()[:, 1:2].float())
    others = table.map(lambda rows: torch.cat([rows[:, :1], rows[:, 2:]], dim=1))
    rest = {name: entry for name, entry in entries.items() if name != DISTILLATION}
    return rest | {REGISTERS: placed, POSITION: others}
