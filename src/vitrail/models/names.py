"""The names the papers use, and the descriptions they stand for.

    ViT-B/16         a size and a patch size
    R50+ViT-B/16     the hybrid; the number after the slash is the total stride
    BiT-R50x1        a ResNet of 50 layers, 1 times as wide
    Mixer-B/16       MLP-Mixer

Case does not matter, except that ViT-g and ViT-G are two models. A name says what a model is, not
how it is trained: dropout is 0 here, though the authors trained some sizes with 0.1.
"""

import re

from vitrail.errors import ConfigError, unknown
from vitrail.models.config import BitConfig, Config, MixerConfig, VitConfig

# B, L, H: table 1 of the paper. Ti, S: Steiner et al. 2022 (arXiv:2106.10270), table 2.
# g, G: Zhai et al. 2022 (arXiv:2106.04560), table 2. So400m: Alabdulmohsin et al. 2023
# (arXiv:2305.13035). M, Mu: sizes of big_vision. Femto, Pico, Nano: ours, for small pictures.
#           depth  width  mlp_width  heads
SIZES = {
    "Mu": (1, 32, 128, 2),  # the smallest there is: for trying things out
    "Femto": (4, 64, 256, 2),
    "Pico": (4, 96, 384, 3),
    "Nano": (6, 128, 512, 4),
    "Ti": (12, 192, 768, 3),
    "S": (12, 384, 1536, 6),
    "M": (12, 512, 2048, 8),
    "B": (12, 768, 3072, 12),
    "L": (24, 1024, 4096, 16),
    "So400m": (27, 1152, 4304, 16),
    "H": (32, 1280, 5120, 16),
    "g": (40, 1408, 6144, 16),
    "G": (48, 1664, 8192, 16),
}
PATCHES = {
    "Mu": (4, 8, 16),
    "Femto": (4, 8),
    "Pico": (4, 8, 16),
    "Nano": (4, 8),
    "Ti": (16,),
    "S": (8, 14, 16, 32),
    "M": (16, 32),
    "B": (8, 14, 16, 32),
    "L": (14, 16, 32),
    "So400m": (14,),
    "H": (14,),
    "g": (14,),
    "G": (14,),
}
SMALL_PICTURES = {"Mu", "Femto", "Pico", "Nano"}  # made for 32 pixels, where the others see 224

# Section 4.1 and appendix D of the paper, and Steiner et al. 2022. R+ViT-Ti/16 is the authors'
# name, yet its tokens are 32 pixels apart: the root shrinks by 4 and its patches by 8.
#                    size  blocks        patch on the feature map
HYBRIDS = {
    "R+ViT-Ti/16": ("Ti", (), 8),
    "R26+ViT-S/32": ("S", (2, 2, 2, 2), 1),
    "R26+ViT-B/32": ("B", (2, 2, 2, 2), 1),
    "R50+ViT-B/16": ("B", (3, 4, 9), 1),  # stage 4 removed, its 3 units appended to stage 3
    "R50+ViT-B/32": ("B", (3, 4, 6, 3), 1),
    "R50+ViT-L/16": ("L", (3, 4, 9), 1),
    "R50+ViT-L/32": ("L", (3, 4, 6, 3), 1),
}

# Kolesnikov et al. 2020 (arXiv:1912.11370).
RESNETS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
BIT_WIDTHS = {50: (1, 2, 3, 4), 101: (1, 2, 3, 4), 152: (1, 2, 3, 4), 200: (1, 2, 3)}

# Tolstikhin et al. 2021 (arXiv:2105.01601), table 1.
#        depth  width  tokens_mlp  channels_mlp
MIXERS = {
    "S": (8, 512, 256, 2048),
    "B": (12, 768, 384, 3072),
    "L": (24, 1024, 512, 4096),
    "H": (32, 1280, 640, 5120),
}
MIXER_PATCHES = {"S": (16, 32), "B": (16, 32), "L": (16, 32), "H": (14,)}


def configuration(name: str) -> Config:
    """The description a name stands for: `configuration("ViT-B/16")`."""
    if not isinstance(name, str):
        raise ConfigError(f"a model's name is a word such as 'ViT-B/16', not {name!r}")
    if name in CONFIGURATIONS:
        return CONFIGURATIONS[name]
    matches = [known for known in CONFIGURATIONS if known.lower() == name.lower()]
    if len(matches) > 1:  # g or G: the letter as typed decides
        matches = [known for known in matches if known[4] == name[4]]
    if not matches and (size := re.fullmatch(r"(?:vit-)?(\w+?)(?:/(\d+))?", name, re.I)):
        kin = [
            known for known in CONFIGURATIONS if known.lower().startswith(f"vit-{size[1]}/".lower())
        ]
        if kin:
            hint = "; for another patch give patch_size=" if size[2] else ""
            raise ConfigError(f"unknown model {name!r}; there is {' and '.join(kin)}{hint}")
    if not matches:
        raise unknown("model", name, CONFIGURATIONS, where="`vitrail models` lists them all")
    return CONFIGURATIONS[matches[0]]


def name_of(config: Config) -> str:
    """The name of a model's architecture, whatever its image size, classes and extras are."""

    def shape(one: Config) -> tuple[object, ...]:
        match one:
            case VitConfig():
                body = (one.depth, one.width, one.mlp_width, one.heads, one.patch_size)
                return (*body, one.stem, one.resnet_blocks, one.resnet_width)
            case BitConfig():
                return one.blocks, one.width_factor
            case MixerConfig():
                return one.depth, one.width, one.tokens_mlp, one.channels_mlp, one.patch_size

    for name, known in CONFIGURATIONS.items():
        if type(known) is type(config) and shape(known) == shape(config):
            return name
    match config:
        case VitConfig():
            kind = {"patches": "ViT", "conv": "ViT with a convolutional stem", "resnet": "hybrid"}
            return f"{kind[config.stem]} of {config.depth} blocks and width {config.width}"
        case BitConfig():
            return f"BiT of {sum(config.blocks)} units, {config.width_factor} times as wide"
        case MixerConfig():
            return f"Mixer of {config.depth} blocks and width {config.width}"


def vit(size: str, patch_size: int, **more: object) -> VitConfig:
    depth, width, mlp_width, heads = SIZES[size]
    config = VitConfig(
        depth=depth,
        width=width,
        mlp_width=mlp_width,
        heads=heads,
        patch_size=patch_size,
        image_size=32 if size in SMALL_PICTURES else 224,
    )
    return config.change(**more) if more else config


def mixer(size: str, patch_size: int) -> MixerConfig:
    depth, width, tokens_mlp, channels_mlp = MIXERS[size]
    return MixerConfig(
        depth=depth,
        width=width,
        tokens_mlp=tokens_mlp,
        channels_mlp=channels_mlp,
        patch_size=patch_size,
    )


def all_configurations() -> dict[str, Config]:
    vits = {f"ViT-{s}/{patch}": vit(s, patch) for s in SIZES for patch in PATCHES[s]}
    hybrids = {
        name: vit(size, patch, stem="resnet", resnet_blocks=blocks)
        for name, (size, blocks, patch) in HYBRIDS.items()
    }
    bits = {
        f"BiT-R{layers}x{factor}": BitConfig(blocks=RESNETS[layers], width_factor=factor)
        for layers, factors in BIT_WIDTHS.items()
        for factor in factors
    }
    mixers = {f"Mixer-{s}/{patch}": mixer(s, patch) for s in MIXERS for patch in MIXER_PATCHES[s]}
    return vits | hybrids | bits | mixers


CONFIGURATIONS = all_configurations()
