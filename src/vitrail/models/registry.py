"""Named models: the names used in the papers, and their configurations.

    ViT-B/16         size and patch size
    Axial-ViT-B/16   each block replaced by two, with attention along rows and along columns
    R50+ViT-B/16     hybrid; the number after the slash is the total stride
    BiT-R50x1        ResNet with 50 layers and width factor 1
    AxialResNet-50x1 the same with axial attention instead of 3x3 convolutions
    Mixer-B/16       MLP-Mixer

Names are case-insensitive, except that ViT-g and ViT-G are two models. Names describe the
architecture only: dropout is 0 here, although the authors trained some sizes with 0.1. This module
does not import torch; `create` and `build` are in `vit.py`.
"""

import re
from operator import attrgetter

from vitrail.errors import ConfigError, unknown
from vitrail.models.config import BitConfig, Config, MixerConfig, VitConfig

# B, L, H: table 1 of the paper. Ti, S: Steiner et al. 2022 (arXiv:2106.10270), table 2.
# g, G: Zhai et al. 2022 (arXiv:2106.04560), table 2. So400m: Alabdulmohsin et al. 2023
# (arXiv:2305.13035). M, Mu: sizes of big_vision. Femto, Pico, Nano: our own, for small images.
#           depth  width  mlp_width  heads
SIZES = {
    "Mu": (1, 32, 128, 2),  # for tests and debugging
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
PATCH_SIZES = {
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
SMALL_IMAGES = {"Mu", "Femto", "Pico", "Nano"}  # 32 pixels; all others 224

# Section 4.1 and appendix D of the paper, and Steiner et al. 2022. R+ViT-Ti/16 is the authors'
# name, although its total stride is 32: 4 from the root, 8 from the patches.
#                    size  blocks        patch size on the feature map
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
MIXER_PATCH_SIZES = {"S": (16, 32), "B": (16, 32), "L": (16, 32), "H": (14,)}

# The fields that determine a model's name; image size, classes and options do not.
VIT_FIELDS = ("depth", "width", "mlp_width", "heads", "patch_size")
MIXER_FIELDS = ("depth", "width", "tokens_mlp", "channels_mlp", "patch_size")
ARCHITECTURE = {
    VitConfig: attrgetter(*VIT_FIELDS, "attention", "stem", "resnet_blocks", "resnet_width"),
    BitConfig: attrgetter("blocks", "width_factor", "unit"),
    MixerConfig: attrgetter(*MIXER_FIELDS),
}


def configuration(name: str) -> Config:
    """Return the configuration of a named model: `configuration("ViT-B/16")`."""
    if not isinstance(name, str):
        raise ConfigError(f"a model name must be a string such as 'ViT-B/16', not {name!r}")
    if name in CONFIGURATIONS:
        return CONFIGURATIONS[name]
    matches = [known for known in CONFIGURATIONS if known.lower() == name.lower()]
    if len(matches) > 1:  # ViT-g or ViT-G: the case of the letter decides
        matches = [known for known in matches if known[4] == name[4]]
    if matches:
        return CONFIGURATIONS[matches[0]]
    if size := re.fullmatch(r"(?:vit-)?(\w+?)(?:/(\d+))?", name, re.I):
        prefix = f"vit-{size[1]}/".lower()
        if similar := [known for known in CONFIGURATIONS if known.lower().startswith(prefix)]:
            hint = "; for another patch size, pass patch_size=" if size[2] else ""
            raise ConfigError(f"unknown model {name!r}; available: {', '.join(similar)}{hint}")
    raise unknown("model", name, CONFIGURATIONS, where="`vitrail models` lists them all")


def name_of(config: Config) -> str:
    """Return the name of a model's architecture, or a description if it has no name."""
    architecture = ARCHITECTURE[type(config)]
    for name, known in CONFIGURATIONS.items():
        if type(known) is type(config) and architecture(known) == architecture(config):
            return name
    match config:
        case VitConfig():
            kind = {"patches": "ViT", "conv": "ViT with a convolutional stem", "resnet": "hybrid"}
            attention = "" if config.attention == "global" else f"{config.attention} "
            return (
                f"{attention}{kind[config.stem]} of {config.depth} blocks and width {config.width}"
            )
        case BitConfig():
            kind = {"conv": "BiT", "axial": "AxialResNet"}[config.unit]
            return f"{kind} of {sum(config.blocks)} units, {config.width_factor} times as wide"
        case MixerConfig():
            return f"Mixer of {config.depth} blocks and width {config.width}"


def all_configurations() -> dict[str, Config]:
    configs: dict[str, Config] = {}
    for size, patch_sizes in PATCH_SIZES.items():
        for patch_size in patch_sizes:
            values = dict(zip(VIT_FIELDS, (*SIZES[size], patch_size), strict=True))
            image_size = 32 if size in SMALL_IMAGES else 224
            configs[f"ViT-{size}/{patch_size}"] = VitConfig(**values, image_size=image_size)
    for patch_size in (16, 32):  # appendix D.6; it does not mention a class token
        values = dict(zip(VIT_FIELDS, (*SIZES["B"], patch_size), strict=True))
        values["depth"] *= 2
        configs[f"Axial-ViT-B/{patch_size}"] = VitConfig(**values, attention="axial", pool="mean")
    for name, (size, blocks, patch_size) in HYBRIDS.items():
        values = dict(zip(VIT_FIELDS, (*SIZES[size], patch_size), strict=True))
        configs[name] = VitConfig(**values, stem="resnet", resnet_blocks=blocks)
    for layers, factors in BIT_WIDTHS.items():
        for factor in factors:
            config = BitConfig(blocks=RESNETS[layers], width_factor=factor)
            configs[f"BiT-R{layers}x{factor}"] = config
    for factor in (1, 2):  # Axial-ResNet-S and -L of Wang et al. 2020 (arXiv:2003.07853)
        config = BitConfig(blocks=RESNETS[50], width_factor=factor, unit="axial")
        configs[f"AxialResNet-50x{factor}"] = config
    for size, patch_sizes in MIXER_PATCH_SIZES.items():
        for patch_size in patch_sizes:
            values = dict(zip(MIXER_FIELDS, (*MIXERS[size], patch_size), strict=True))
            configs[f"Mixer-{size}/{patch_size}"] = MixerConfig(**values)
    return configs


CONFIGURATIONS = all_configurations()
