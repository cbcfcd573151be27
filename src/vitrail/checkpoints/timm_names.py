"""Whatever was built on timm's names, under timm's names of today.

    module., backbone., model., _orig_mod.   wrappers: data parallel, DINO, Lightning, torch.compile
    head.mlp.…, head.last_layer.…            DINO's projection: left out, with mask_token
    decoder_blocks.…, decoder_embed.…        MAE's decoder: left out
    blocks.<chunk>.<i>.…                     DINOv2 where it was split among devices
    register_tokens, mlp.w12, mlp.w3         DINOv2's own
    blocks.<i>.gamma_1                       DeiT-III's own

Positions come with a row for each token (timm), for patches alone (DeiT-III, timm's DINOv2 with
registers), or for class token and patches (DINOv2's own). They become the first, which is what
`timm_vit` writes; a token without a row has one of zeros.

Shapes: T tokens before the patches, R of them registers, N patches, D width.
"""

import re

import torch
from torch import Tensor

from vitrail.checkpoints.files import Entry, Weights
from vitrail.checkpoints.rules import Entries
from vitrail.checkpoints.shapes import count, is_square, shape
from vitrail.checkpoints.timm_settings import Settings, grids
from vitrail.models.config import resnet_stride

WRAPPERS = r"^(?:(?:module|model|backbone|_orig_mod)\.)+"
TODAY = (
    (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),
    (r"^(blocks\.\d+)\.gamma_(\d)$", r"\1.ls\2.gamma"),
    (r"^register_tokens$", "reg_token"),
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
)
LEFT_OUT = (
    (r"^mask_token$", "stands for hidden patches, in pre-training only"),
    (r"^decoder_(?:embed|blocks|norm|pred|pos_embed)", "MAE's decoder, for pre-training"),
    (r"^(?:head|dino_head|ibot_head)\.(?:mlp|last_layer)\.", "DINO's projection, for pre-training"),
)
PATCHES = "patch_embed.proj.weight"
BACKBONE = "patch_embed.backbone."  # the ResNet of a hybrid
OURS = "vitrail"  # how settings begin that say the file is from here, and laid out as we do


def tidy(weights: Weights) -> Weights:
    """The tensors under today's names, without what only pre-training needs."""
    entries, left_out = {}, dict(weights.left_out)
    for name, entry in unwrapped(weights.entries).items():
        found = next(((p, why) for p, why in LEFT_OUT if re.match(p, name)), None)
        if found is None:
            today = todays(name)
            entries[name if today in entries else today] = entry  # reading finds it left over
        else:
            left_out[re.sub(rf"({found[0]}).+", r"\1*", name)] = found[1]  # one line for a module
    ours = any(key.startswith(OURS) for key in weights.settings)
    guessed = dict(weights.guessed)
    if not ours and {PATCHES, "pos_embed"} <= entries.keys():
        before = entries["pos_embed"].shape
        entries = placed(entries, weights.settings)
        if entries["pos_embed"].shape != before and not grids(weights.settings, stride(entries)):
            guessed["positions"] = f"the {before[1]} rows are taken to be all for patches"
    return Weights(entries, weights.settings, left_out, guessed)


def todays(name: str) -> str:
    for pattern, today in TODAY:
        name = re.sub(pattern, today, name)
    return name


def unwrapped(entries: dict[str, Entry]) -> dict[str, Entry]:
    """The names without wrappers, unless two would become the same."""
    names = {name: re.sub(WRAPPERS, "", name) for name in entries}
    if len(set(names.values())) < len(names):
        return entries
    return {names[name]: entry for name, entry in entries.items()}


def placed(entries: dict[str, Entry], settings: Settings) -> dict[str, Entry]:
    """The entries with a row of positions for every token."""
    table, registers = entries["pos_embed"], entries.get("reg_token")
    if len(table.shape) != 3 or (registers is not None and len(registers.shape) != 3):
        return entries  # reading says what is wrong
    start = ("cls_token" in entries) + ("dist_token" in entries)
    stop = start + (registers.shape[1] if registers is not None else 0)
    rows = placed_tokens(table.shape[1], (stop, start, 0), entries, settings)
    if rows < stop:
        return entries | {"pos_embed": table.map(lambda t: with_zeros(t, rows, rows, stop - rows))}
    if registers is None:
        return entries
    # What is learned twice is one sum: a register and its position.
    sums = Entry(
        registers.shape, lambda: registers.read().float() + table.read()[:, start:stop].float()
    )
    rest = table.map(lambda t: with_zeros(t, start, stop, stop - start))
    return entries | {"reg_token": sums, "pos_embed": rest}


def placed_tokens(
    total: int, choices: tuple[int, ...], entries: dict[str, Entry], settings: Settings
) -> int:
    """How many of the rows are for tokens before the patches: the rest must make a grid."""
    counts = {height * width for height, width in grids(settings, stride(entries))}
    for is_grid in (counts.__contains__, is_square):
        for rows in choices:
            if is_grid(total - rows):
                return rows
    return choices[0]


def with_zeros(table: Tensor, start: int, stop: int, count: int) -> Tensor:
    """The table (1, T + N, D) with `count` rows of zeros for those from `start` to `stop`."""
    zeros = table.new_zeros(table.shape[0], count, table.shape[2])
    return torch.cat([table[:, :start], zeros, table[:, stop:]], dim=1)


def stride(entries: Entries) -> tuple[int, int]:
    """Pixels between neighboring tokens."""
    _, _, down, across = shape(entries, PATCHES, 4)
    is_hybrid = any(name.startswith(BACKBONE) for name in entries)
    shrink = resnet_stride(resnet_blocks(entries)) if is_hybrid else 1
    return max(1, down) * shrink, max(1, across) * shrink


def resnet_blocks(entries: Entries) -> tuple[int, ...]:
    """Units of each stage of a hybrid's ResNet."""
    stages = rf"{re.escape(BACKBONE)}stages"
    number = count(entries, rf"{stages}\.(\d+)\.")
    return tuple(count(entries, rf"{stages}\.{i}\.blocks\.(\d+)\.") for i in range(number))
