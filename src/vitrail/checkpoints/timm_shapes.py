"""The description of a ViT or hybrid, read from timm's names and shapes, and its config.json.

Shapes do not say how many heads a model has, nor which GELU. config.json may, in `model_args` or
by the architecture it names; without it, a model is what models of its width usually are.
"""

from dataclasses import replace

from vitrail.checkpoints.files import Weights
from vitrail.checkpoints.rules import Entries
from vitrail.checkpoints.shapes import count, shape, usual_heads
from vitrail.checkpoints.timm_names import BACKBONE, PATCHES, resnet_blocks, stride
from vitrail.checkpoints.timm_settings import (
    Settings,
    architecture,
    global_pool,
    image_size,
    model_args,
    usual_size,
)
from vitrail.errors import CheckpointError
from vitrail.models.config import NUMERICS, Gelu, Numerics, Pool, VitConfig
from vitrail.models.resnet import ROOT_WIDTH

FIRST_SCALE = 1e-5  # of LayerScale, as in DINOv2; trained weights no longer tell
ACTIVATIONS: dict[str, Gelu] = {"gelu": "exact", "gelu_tanh": "tanh"}
POOLS: dict[Pool, str] = {"cls": "token", "mean": "avg", "map": "map"}
# What a name of timm stands for beside the shapes, where that is not the usual.
HEADS = {"vit_base_patch16_gap": 16, "vit_giantopt": 16, "test_vit": 2}
TANH = (
    "vit_base_patch32_siglip_",
    "vit_so400m_patch16_siglip_",
    "vit_giantopt_",
    "vit_large_patch16_siglip_512",
    "vit_large_patch16_siglip_gap_512",
)


def describe(weights: Weights) -> VitConfig:
    """The description of a ViT or hybrid, from names, shapes and config.json if there is one."""
    entries, settings = weights.entries, weights.settings
    refuse_others(entries, settings)
    width, _, down, across = shape(entries, PATCHES, 4)
    root = root_name(entries)
    root_width, channels, _, _ = shape(entries, f"{root}.weight", 4)
    hybrid = root.startswith(BACKBONE)
    hidden, _ = shape(entries, "blocks.0.mlp.fc1.weight", 2)
    _, mlp_width = shape(entries, "blocks.0.mlp.fc2.weight", 2)
    swiglu = hidden == 2 * mlp_width
    return VitConfig(
        depth=count(entries, r"blocks\.(\d+)\."),
        width=width,
        mlp_width=mlp_width,
        heads=heads(width, settings),
        patch_size=(down, across),
        image_size=trained_size(entries, settings),
        channels=channels,
        num_classes=shape(entries, "head.weight", 2)[0] if "head.weight" in entries else 0,
        stem="resnet" if hybrid else "patches",
        resnet_blocks=resnet_blocks(entries) if hybrid else (),
        resnet_width=root_width // ROOT_WIDTH if hybrid else 1,
        position="learned" if "pos_embed" in entries else "none",
        pool=pool(entries),
        representation=shape(entries, "pre_logits.fc.weight", 2)[0]
        if "pre_logits.fc.weight" in entries
        else 0,
        registers=shape(entries, "reg_token", 3)[1] if "reg_token" in entries else 0,
        distillation="dist_token" in entries,
        layer_scale=first_scale(settings) if "blocks.0.ls1.gamma" in entries else None,
        qkv_bias="blocks.0.attn.qkv.bias" in entries,
        mlp="swiglu" if swiglu else "gelu",
        numerics=numerics(settings, swiglu),
    )


def refuse_others(entries: Entries, settings: Settings) -> None:
    """Say it in words where a model of timm's is no model of ours."""
    said = global_pool(settings)
    wrong = {
        "a norm before the encoder (norm_pre), as CLIP's have": "norm_pre.weight" in entries,
        "patches without a bias (patch_embed.proj.bias)": "patch_embed.proj.bias" not in entries,
        "a norm after the average (fc_norm), only with one before it; timm's models with "
        "fc_norm=False can be read": "fc_norm.weight" in entries,
        f"the pooling {said!r}": said not in (None, "", *POOLS.values()),
        "a pooling that reads the registers too (pool_include_prefix)": "reg_token" in entries
        and bool(model_args(settings).get("pool_include_prefix")),
        "a class token beside attention pooling": {"cls_token", "attn_pool.latent"}
        <= entries.keys(),
        "a class token that nothing reads, as config.json says by global_pool='avg'; the weights "
        "without config.json make a model that reads it": "cls_token" in entries and said == "avg",
    }
    for what, applies in wrong.items():
        if applies:
            raise CheckpointError(f"vitrail has no model with {what}")


def root_name(entries: Entries) -> str:
    """The convolution that sees the picture."""
    roots = (f"{BACKBONE}stem.conv", f"{BACKBONE}conv")  # the second where it is the whole ResNet
    if any(name.startswith(BACKBONE) for name in entries):
        return next((root for root in roots if f"{root}.weight" in entries), roots[0])
    return PATCHES.removesuffix(".weight")


def pool(entries: Entries) -> Pool:
    if "attn_pool.latent" in entries:
        return "map"
    return "cls" if "cls_token" in entries else "mean"


def trained_size(entries: Entries, settings: Settings) -> tuple[int, int]:
    """The pixels the position table was made for."""
    if "pos_embed" not in entries:
        return usual_size(stride(entries), settings)
    tokens = sum(
        shape(entries, name, 3)[1]
        for name in ("cls_token", "dist_token", "reg_token")
        if name in entries
    )
    return image_size(shape(entries, "pos_embed", 3)[1] - tokens, stride(entries), settings)


def heads(width: int, settings: Settings) -> int:
    """What the user, config.json or the architecture's name says, or else what is usual."""
    for said in (settings.get("heads"), model_args(settings).get("num_heads")):
        if said is not None:
            return said
    name = f"{architecture(settings)}_"
    known = [number for start, number in HEADS.items() if name.startswith(f"{start}_")]
    return known[0] if known else usual_heads(width)


def first_scale(settings: Settings) -> float:
    said = model_args(settings).get("init_values")
    return said if isinstance(said, float) and said > 0 else FIRST_SCALE


def numerics(settings: Settings, swiglu: bool) -> Numerics:
    """timm's, with the GELU that config.json or the architecture's name says."""
    tanh = architecture(settings).startswith(TANH)
    usual = "silu" if swiglu else "gelu_tanh" if tanh else "gelu"
    said = model_args(settings).get("act_layer") or usual
    if swiglu and said == "silu":
        return NUMERICS["timm"]
    for theirs, ours in ACTIVATIONS.items():
        if said == theirs and not swiglu:
            return replace(NUMERICS["timm"], gelu=ours)
    known = "silu" if swiglu else " and ".join(ACTIVATIONS)
    raise CheckpointError(f"vitrail has no model with act_layer={said!r}, only with {known}")
