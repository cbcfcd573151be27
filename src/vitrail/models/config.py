"""Model configurations: one frozen dataclass per family, validated on construction.

This module does not import torch, so that the command line can parse and check options quickly.
"""

import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Real
from typing import Any, Literal, Self, get_args, get_origin

from vitrail.errors import ConfigError, unknown

Library = Literal["google", "big_transfer", "timm", "transformers", "torchvision"]
Gelu = Literal["tanh", "exact", "quick"]  # quick: x sigmoid(1.702 x)
ResizeMethod = Literal["google", "timm", "transformers", "torchvision", "bilinear", "flexivit"]
StemKind = Literal["patches", "conv", "resnet"]
PositionKind = Literal["none", "learned", "learned-2d", "relative", "sincos-2d", "rotary"]
PositionPlace = Literal["stem", "every-layer", "shared"]
Pool = Literal["cls", "mean", "map", "cls+mean"]
AttentionKind = Literal["global", "axial"]
UnitKind = Literal["conv", "axial"]
MlpKind = Literal["gelu", "swiglu"]
NormKind = Literal["layernorm", "rmsnorm"]
InitScheme = Literal["google", "big_vision", "timm", "quick"]
Size = int | tuple[int, int]  # pixels: one side of a square, or (height, width)

# The placements of table 8 of the paper; the first one is the default.
POSITION_PLACES: dict[PositionKind, tuple[PositionPlace, ...]] = {
    "none": ("stem",),
    "learned": ("stem", "every-layer", "shared"),
    "learned-2d": ("stem", "every-layer", "shared"),
    "relative": ("every-layer", "shared"),  # inside attention
    "sincos-2d": ("stem",),
    "rotary": ("shared",),  # inside attention
}

REGISTERED: dict[str, set[str]] = {"attention": set()}  # field → names added at run time
MAY_BE_ZERO = {"num_classes", "representation", "registers"}


def as_int(value: Any) -> int | None:
    """Convert integers, including numpy's, to int; return None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def as_number(value: Any) -> float | None:
    """Convert real numbers, including numpy's, to float or int; return None for anything else."""
    if isinstance(value, int | float):
        return value
    return float(value) if isinstance(value, Real) else None


def validate_fields(config: Any) -> None:
    """Check each field by its type, and convert equivalent spellings: 224 for (224, 224), tuples
    for lists, a Numerics for its name."""
    for f in fields(config):
        name, value = f.name, getattr(config, f.name)
        valid, expected, converted = True, "", value
        if get_origin(f.type) is Literal:
            choices = (*get_args(f.type), *REGISTERED.get(name, ()))
            if not any(value == choice for choice in choices):
                hint = f"register it first, or use {' or '.join(choices)}" * (name in REGISTERED)
                raise unknown(name, value, choices, hint)
        elif f.type in (bool, bool | None):
            valid = isinstance(value, bool) or (value is None and f.type is not bool)
            expected = "True or False"
        elif f.type is int:
            converted, minimum = as_int(value), 0 if name in MAY_BE_ZERO else 1
            valid = converted is not None and converted >= minimum
            expected = f"an integer >= {minimum}"
        elif f.type is float and name.endswith(("_eps", "_theta")):
            converted, expected = as_number(value), "a positive number"
            valid = converted is not None and converted > 0
        elif f.type is float:
            converted, expected = as_number(value), "a probability in [0, 1)"
            valid = converted is not None and 0 <= converted < 1
        elif f.type == Size:
            converted = normalize_size(name, value)
        elif f.type == tuple[int, ...]:
            units = value if isinstance(value, tuple | list) else (value,)
            converted = tuple(as_int(count) or 0 for count in units)
            valid, expected = min(converted, default=1) > 0, "positive integers, one per stage"
        elif name == "layer_scale" and value is not None:
            number, expected = as_number(value), "a number or None"
            valid, converted = number is not None, float(number or 0)
        elif f.type is Numerics:
            if isinstance(value, str) and value not in NUMERICS:
                raise unknown("numerics", value, NUMERICS)
            converted = NUMERICS[value] if isinstance(value, str) else value
            valid, expected = isinstance(converted, Numerics), "a name or a Numerics"
        if not valid:
            raise ConfigError(f"{name}={value!r} must be {expected}")
        object.__setattr__(config, name, converted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """Details in which implementations differ; the defaults are those of the authors' code.

    The same weights give different logits under different numerics.
    """

    gelu: Gelu = "tanh"
    norm_eps: float = 1e-6  # LayerNorm
    group_norm_eps: float = 1e-6  # GroupNorm
    conv_eps: float = 1e-5  # weight standardization
    conv_eps_inside_root: bool = False  # (w - m) / sqrt(var + eps) instead of / (std + eps)
    position_resize: ResizeMethod = "google"  # interpolation of position embeddings

    def __post_init__(self) -> None:
        validate_fields(self)


NUMERICS = {  # by the names in `Library`
    "google": Numerics(),
    "big_transfer": Numerics(group_norm_eps=1e-5, conv_eps=1e-10, conv_eps_inside_root=True),
    "timm": Numerics(
        gelu="exact",
        group_norm_eps=1e-5,
        conv_eps=1e-8,
        conv_eps_inside_root=True,
        position_resize="timm",
    ),
    "transformers": Numerics(gelu="exact", norm_eps=1e-12, position_resize="transformers"),
    "torchvision": Numerics(gelu="exact", position_resize="torchvision"),
}


class BaseConfig:
    """Shared by the three model families."""

    __slots__ = ()

    def change(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; the result is validated as a whole."""
        check_field_names(changes, type(self))
        if "position" in changes:  # the old placement may not exist for the new kind of position
            changes.setdefault("position_place", None)
        if "pool" in changes:  # the old class token setting may not fit the new pooling
            changes.setdefault("class_token", None)
        return replace(self, **changes)  # pyright: ignore[reportArgumentType]: subclasses are dataclasses


@dataclass(frozen=True, kw_only=True, slots=True)
class VitConfig(BaseConfig):
    """A Vision Transformer or a hybrid. Frozen: use `change` to get a modified copy."""

    depth: int  # encoder blocks, L in the paper
    width: int  # channels per token, D
    mlp_width: int  # hidden channels of each MLP
    heads: int  # k in the paper
    patch_size: Size  # P, in pixels; for a ResNet stem, in cells of its feature map
    image_size: Size = 224
    channels: int = 3
    num_classes: int = 1000  # 0: no head

    stem: StemKind = "patches"
    resnet_blocks: tuple[int, ...] = ()  # units per stage; (): root convolution only
    resnet_width: int = 1  # times 64 channels
    position: PositionKind = "learned"
    position_place: PositionPlace | None = None  # None: the first of POSITION_PLACES[position]
    rope_theta: float = 100.0  # longest period of rotary positions, in halves of an image side
    pool: Pool = "cls"  # cls+mean: the class token and the mean of the patches, concatenated
    class_token: bool | None = None  # None: if `pool` reads it
    attention: AttentionKind = "global"  # axial: along rows and columns in turn (appendix D.6)
    representation: int = 0  # channels of the tanh layer before the head; 0: no such layer

    registers: int = 0  # extra tokens without position embedding (Darcet et al. 2024)
    distillation: bool = False  # distillation token with its own head (DeiT)
    layer_scale: float | None = None  # initial value of LayerScale; None: no LayerScale
    qkv_bias: bool = True
    key_bias: bool = True  # False: only queries and values have a bias (DINOv3)
    qk_norm: bool = False  # normalize queries and keys of each head (Dehghani et al. 2023)
    mlp: MlpKind = "gelu"
    norm: NormKind = "layernorm"
    pre_norm: bool = False  # norm before the encoder, and no bias in the patch projection (CLIP)

    dropout: float = 0.0  # after every dense layer except q, k, v, and after the positions
    drop_path: float = 0.0  # stochastic depth rate of the last block; linear from 0
    patch_dropout: float = 0.0  # fraction of patches dropped in training (Liu et al. 2022)
    numerics: Numerics = field(default_factory=Numerics)

    def __post_init__(self) -> None:
        validate_fields(self)
        position_place = self.position_place or POSITION_PLACES[self.position][0]
        object.__setattr__(self, "position_place", position_place)
        if self.class_token is None:
            object.__setattr__(self, "class_token", self.pool in ("cls", "cls+mean"))
        if self.width % self.heads:
            raise ConfigError(f"width={self.width} does not split into heads={self.heads}")
        check_combinations(self)
        check_grid(self.image_size, self.stride)

    @property
    def stride(self) -> tuple[int, int]:
        """Pixels between neighboring tokens, vertically and horizontally."""
        height, width = pair(self.patch_size)
        scale = resnet_stride(self.resnet_blocks) if self.stem == "resnet" else 1
        return height * scale, width * scale

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches at `image_size`."""
        return patch_grid(self.image_size, self.stride)

    @property
    def num_class_tokens(self) -> int:
        """Class and distillation token: the prefix tokens with a position embedding."""
        return bool(self.class_token) + self.distillation

    @property
    def num_prefix(self) -> int:
        """All tokens before the patches: class, distillation and register tokens."""
        return self.num_class_tokens + self.registers

    @property
    def num_tokens(self) -> int:
        """Patches and prefix tokens, N in shape comments."""
        return self.grid[0] * self.grid[1] + self.num_prefix

    @property
    def head_width(self) -> int:
        """Channels per attention head, K in shape comments."""
        return self.width // self.heads

    @property
    def num_features(self) -> int:
        """Channels of `features`, the input of the head."""
        return self.representation or self.num_pooled

    @property
    def num_pooled(self) -> int:
        """Channels after pooling."""
        return self.width * (2 if self.pool == "cls+mean" else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class BitConfig(BaseConfig):
    """A BiT ResNet-v2 (Kolesnikov et al. 2020), the paper's baseline, or an AxialResNet."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)  # units per stage
    unit: UnitKind = "conv"  # axial: attention in place of 3x3 convolutions (appendix D.6)
    width_factor: int = 1  # the "x2" of R50x2
    image_size: Size = 224  # default resolution; other sizes work too
    channels: int = 3
    num_classes: int = 1000
    numerics: Numerics = NUMERICS["big_transfer"]

    def __post_init__(self) -> None:
        validate_fields(self)
        if not self.blocks:
            raise ConfigError("blocks=() must have at least one stage")
        check_grid(self.image_size, self.stride)

    @property
    def stride(self) -> tuple[int, int]:
        """Image sides must be divisible by this; 1 for convolutions."""
        stride = resnet_stride(self.blocks) if self.unit == "axial" else 1
        return stride, stride

    @property
    def expansion(self) -> int:
        """Ratio of output to inner channels of a bottleneck."""
        return 2 if self.unit == "axial" else 4

    @property
    def num_features(self) -> int:
        """Channels of `features`, the input of the head."""
        return 64 * self.expansion * self.width_factor * 2 ** (len(self.blocks) - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerConfig(BaseConfig):
    """An MLP-Mixer (Tolstikhin et al. 2021)."""

    depth: int
    width: int  # channels per token
    tokens_mlp: int  # hidden channels of the token-mixing MLP
    channels_mlp: int  # hidden channels of the channel-mixing MLP
    patch_size: Size
    image_size: Size = 224  # fixed: the token-mixing weights depend on the grid
    channels: int = 3
    num_classes: int = 1000
    drop_path: float = 0.0
    numerics: Numerics = field(default_factory=Numerics)

    def __post_init__(self) -> None:
        validate_fields(self)
        check_grid(self.image_size, pair(self.patch_size))

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return patch_grid(self.image_size, pair(self.patch_size))

    @property
    def num_tokens(self) -> int:
        """Patches, N in shape comments."""
        return self.grid[0] * self.grid[1]

    @property
    def num_features(self) -> int:
        """Channels of `features`, the input of the head."""
        return self.width


Config = VitConfig | BitConfig | MixerConfig
FAMILIES: dict[str, type[Config]] = {"vit": VitConfig, "bit": BitConfig, "mixer": MixerConfig}


def to_dict(config: Config) -> dict[str, Any]:
    """Return JSON-serializable values that `from_dict` accepts."""
    family = next(name for name, cls in FAMILIES.items() if isinstance(config, cls))
    return {"family": family} | asdict(config)


def from_dict(values: Mapping[str, Any]) -> Config:
    """Inverse of `to_dict`; unknown keys and invalid values raise ConfigError."""
    values = dict(values)
    family = values.pop("family", None)
    if family not in FAMILIES:
        raise unknown("model family", family, FAMILIES)
    check_field_names(values, FAMILIES[family])
    if isinstance(numerics := values.get("numerics"), Mapping):
        check_field_names(numerics, Numerics)
        values["numerics"] = Numerics(**numerics)
    try:
        return FAMILIES[family](**values)
    except TypeError as error:
        raise ConfigError(f"invalid {family} config: {error}") from None


def pair(size: Size) -> tuple[int, int]:
    """Return (height, width) of a size that may be a single number."""
    return (size, size) if isinstance(size, int) else size


def patch_grid(image_size: Size, stride: tuple[int, int]) -> tuple[int, int]:
    height, width = pair(image_size)
    return height // stride[0], width // stride[1]


def resnet_stride(blocks: tuple[int, ...]) -> int:
    """Total stride of a ResNet: 2 each for root, pooling and every stage but the first."""
    return 4 * 2 ** max(0, len(blocks) - 1)


def normalize_size(name: str, size: Any) -> Size:
    """Validate a size and return one number for squares, (height, width) otherwise."""
    sides = tuple(size) if isinstance(size, tuple | list) else (size, size)
    sides = tuple(as_int(side) or 0 for side in sides)
    if len(sides) != 2 or min(sides) < 1:
        raise ConfigError(f"{name}={size!r} must be a positive integer or (height, width)")
    return sides[0] if sides[0] == sides[1] else (sides[0], sides[1])


def check_field_names(values: Mapping[str, Any], cls: type) -> None:
    names = [f.name for f in fields(cls)]
    for name in values:
        if name not in names:
            raise unknown("setting", name, names)


def check_grid(image_size: Size, stride: tuple[int, int]) -> None:
    """Require a whole number of patches, and suggest the nearest valid image size."""
    sides = pair(image_size)
    if any(side % step for side, step in zip(sides, stride, strict=True)):
        nearest = [max(1, round(s / step)) * step for s, step in zip(sides, stride, strict=True)]
        patch = stride[0] if stride[0] == stride[1] else f"{stride[0]}x{stride[1]}"
        raise ConfigError(
            f"image_size={image_size} is not a whole number of {patch}-pixel patches; "
            f"try image_size={normalize_size('image_size', nearest)}"
        )


def check_combinations(config: VitConfig) -> None:
    """Reject combinations of options that do not work together."""
    places = POSITION_PLACES[config.position]
    if config.position_place not in places:
        raise ConfigError(
            f"position={config.position!r} has no placement {config.position_place!r}; "
            f"use {' or '.join(map(repr, places))}"
        )
    multiple = {"learned-2d": 2, "sincos-2d": 4}.get(config.position, 1)
    if config.width % multiple:
        raise ConfigError(
            f"width={config.width} must be a multiple of {multiple} "
            f"for position={config.position!r}"
        )
    if config.position == "rotary" and config.head_width % 4:
        raise ConfigError(
            f"width={config.width} with heads={config.heads} gives {config.head_width} channels "
            "per head, and position='rotary' needs a multiple of 4"
        )
    in_attention = config.position in ("relative", "rotary")
    if config.registers and config.position_place != "stem" and not in_attention:
        raise ConfigError("registers have no position; use them with position_place='stem'")
    if config.patch_dropout and config.position_place != "stem":
        raise ConfigError(
            f"patch_dropout={config.patch_dropout} removes tokens from the grid that "
            f"position={config.position!r} in the encoder layers needs; "
            "use position='learned' with position_place='stem', or patch_dropout=0"
        )
    if config.pool in ("cls", "cls+mean") and not config.class_token:
        raise ConfigError(f"pool={config.pool!r} needs a class token; use class_token=True")
    if config.attention == "axial" and (config.num_prefix or config.patch_dropout or in_attention):
        raise ConfigError(
            "attention='axial' needs whole rows and columns of patches: use pool='mean' or 'map', "
            "no class, distillation or register tokens, patch_dropout=0, and a position other than "
            "'relative' and 'rotary'"
        )
    if config.pre_norm and config.stem != "patches":
        raise ConfigError(f"pre_norm=True needs stem='patches', not stem={config.stem!r}")
    if config.distillation and (config.pool != "cls" or config.representation):
        raise ConfigError("a distillation token needs pool='cls' and representation=0")
    if config.stem == "conv":
        height, width = pair(config.patch_size)
        if height != width or height & (height - 1) or height < 2:
            raise ConfigError(
                f"patch_size={config.patch_size} with stem='conv' must be a power of two, "
                "because each convolution has stride 2; try patch_size=8"
            )
    if config.resnet_blocks and config.stem != "resnet":
        raise ConfigError("resnet_blocks requires stem='resnet'")
