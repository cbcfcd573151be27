"""What a model is, as a value: one frozen description per family.

A description cannot exist in a wrong state: an impossible field is refused with a sentence that
says what would work. This file does not import torch, so that commands can read and check
settings in no time.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

from vitrail.errors import ConfigError, unknown
from vitrail.models.checks import (
    Size,
    check_chances,
    check_choices,
    check_counts,
    check_flags,
    check_grid,
    check_known,
    pair,
    tidy_size,
    whole_number,
)

Library = Literal["google", "big_transfer", "timm", "transformers", "torchvision"]
Gelu = Literal["tanh", "exact"]
ResizeMethod = Literal["google", "timm", "transformers", "torchvision", "bilinear", "flexivit"]
StemKind = Literal["patches", "conv", "resnet"]
PositionKind = Literal["none", "learned", "learned-2d", "relative", "sincos-2d"]
PositionPlace = Literal["stem", "every-layer", "shared"]
Pool = Literal["cls", "mean", "map"]
MlpKind = Literal["gelu", "swiglu"]
Scheme = Literal["google", "big_vision", "timm", "quick"]  # of first values

# Where table 8 of the paper has a number, a placement exists; the first one is the default.
PLACES: dict[PositionKind, tuple[PositionPlace, ...]] = {
    "none": ("stem",),
    "learned": ("stem", "every-layer", "shared"),
    "learned-2d": ("stem", "every-layer", "shared"),
    "relative": ("every-layer", "shared"),  # inside attention: a table per layer, or one for all
    "sincos-2d": ("stem",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """The small choices on which faithful-looking implementations differ.

    The same weights under other numerics give other logits. The defaults are the authors'.
    """

    gelu: Gelu = "tanh"
    norm_eps: float = 1e-6  # of every LayerNorm
    group_norm_eps: float = 1e-6  # of every GroupNorm in a ResNet
    conv_eps: float = 1e-5  # of weight standardization
    conv_eps_inside_root: bool = False  # (w - m) / sqrt(var + eps) rather than / (std + eps)
    position_resize: ResizeMethod = "google"  # how a position table meets another grid

    def __post_init__(self) -> None:
        check_choices(self, gelu=Gelu, position_resize=ResizeMethod)
        for name in ("norm_eps", "group_norm_eps", "conv_eps"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or value <= 0:
                raise ConfigError(f"{name}={value!r} must be a positive number")


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


class Description:
    """What the three families share."""

    __slots__ = ()

    def change(self, **changes: Any) -> Self:
        """This description with some fields changed, checked as a whole."""
        check_known(changes, type(self))
        if "position" in changes:  # the old placement may not exist for the new kind
            changes.setdefault("position_place", None)
        return replace(self, **changes)  # pyright: ignore[reportArgumentType]: subclasses are dataclasses


@dataclass(frozen=True, kw_only=True, slots=True)
class VitConfig(Description):
    """One Vision Transformer. Frozen: to change a field, make another with `change`."""

    depth: int  # encoder blocks, L in the paper
    width: int  # channels per token, D
    mlp_width: int  # channels inside each MLP
    heads: int  # k in the paper
    patch_size: Size  # P: pixels along a patch; for a ResNet stem, cells of its feature map
    image_size: Size = 224
    channels: int = 3
    num_classes: int = 1000  # 0 leaves the head off

    stem: StemKind = "patches"
    resnet_blocks: tuple[int, ...] = ()  # units per stage; () is the root convolution alone
    resnet_width: int = 1  # times 64 channels
    position: PositionKind = "learned"
    position_place: PositionPlace | None = None  # None: the first of PLACES[position]
    pool: Pool = "cls"
    representation: int = 0  # channels of the tanh layer before the head; 0 leaves it off

    registers: int = 0  # extra tokens without a position or a reader (Darcet et al. 2024)
    distillation: bool = False  # a second class token with its own head (DeiT)
    layer_scale: float | None = None  # first value of a learned factor on each branch
    qkv_bias: bool = True
    mlp: MlpKind = "gelu"

    dropout: float = 0.0  # after every dense layer but q, k, v, and after adding positions
    drop_path: float = 0.0  # chance that the last block is skipped; earlier blocks less
    patch_dropout: float = 0.0  # share of the patches left out in training (Liu et al. 2022)
    numerics: Numerics = field(default_factory=Numerics)

    def __post_init__(self) -> None:
        tidy(self)
        check_choices(self, stem=StemKind, position=PositionKind, pool=Pool, mlp=MlpKind)
        set_place = self.position_place or PLACES[self.position][0]
        object.__setattr__(self, "position_place", set_place)
        check_flags(self, "distillation", "qkv_bias")
        check_counts(self, "depth", "width", "mlp_width", "heads", "channels", "resnet_width")
        check_counts(self, "num_classes", "representation", "registers", least=0)
        check_chances(self, "dropout", "drop_path", "patch_dropout")
        if self.width % self.heads:
            raise ConfigError(f"width={self.width} does not split into heads={self.heads}")
        check_vit_parts(self)
        check_grid(self.image_size, self.stride)

    @property
    def stride(self) -> tuple[int, int]:
        """Pixels between neighboring tokens, down and across."""
        down, across = pair(self.patch_size)
        shrink = resnet_shrink(self.resnet_blocks) if self.stem == "resnet" else 1
        return down * shrink, across * shrink

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across, at the size the model is made for."""
        (height, width), (down, across) = pair(self.image_size), self.stride
        return height // down, width // across

    @property
    def placed_prefix(self) -> int:
        """Tokens before the patches that have a position: class and distillation."""
        return (self.pool == "cls") + self.distillation

    @property
    def num_prefix(self) -> int:
        """All tokens before the patches."""
        return self.placed_prefix + self.registers

    @property
    def layer_positions(self) -> int:
        """Position tables inside the encoder: none, one for all layers, or one for each."""
        return {"shared": 1, "every-layer": self.depth}.get(self.position_place or "stem", 0)

    @property
    def num_tokens(self) -> int:
        """Patches and what stands before them: N in every shape comment."""
        return self.grid[0] * self.grid[1] + self.num_prefix

    @property
    def head_width(self) -> int:
        """Channels per attention head, K in every shape comment."""
        return self.width // self.heads

    @property
    def num_features(self) -> int:
        """Channels of `features`: what the head reads."""
        return self.representation or self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class BitConfig(Description):
    """One BiT ResNet-v2 (Kolesnikov et al. 2020), the paper's baseline."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)  # units per stage
    width_factor: int = 1  # the "x2" of R50x2
    image_size: Size = 224  # what it is usually given; any other size works too
    channels: int = 3
    num_classes: int = 1000
    numerics: Numerics = NUMERICS["big_transfer"]

    def __post_init__(self) -> None:
        tidy(self)
        check_counts(self, "width_factor", "channels")
        check_counts(self, "num_classes", least=0)
        if not self.blocks or min(self.blocks) < 1:
            raise ConfigError(f"blocks={self.blocks} must be one or more units for each stage")

    @property
    def num_features(self) -> int:
        """Channels of `features`: what the head reads."""
        return 256 * self.width_factor * 2 ** (len(self.blocks) - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerConfig(Description):
    """One MLP-Mixer (Tolstikhin et al. 2021)."""

    depth: int
    width: int  # channels per token
    tokens_mlp: int  # channels inside the MLP that mixes tokens
    channels_mlp: int  # channels inside the MLP that mixes channels
    patch_size: Size
    image_size: Size = 224  # fixed: the token-mixing weights are tied to the grid
    channels: int = 3
    num_classes: int = 1000
    drop_path: float = 0.0
    numerics: Numerics = field(default_factory=Numerics)

    def __post_init__(self) -> None:
        tidy(self)
        check_counts(self, "depth", "width", "tokens_mlp", "channels_mlp", "channels")
        check_counts(self, "num_classes", least=0)
        check_chances(self, "drop_path")
        check_grid(self.image_size, pair(self.patch_size))

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        (height, width), (down, across) = pair(self.image_size), pair(self.patch_size)
        return height // down, width // across

    @property
    def num_tokens(self) -> int:
        """Patches: N in every shape comment."""
        return self.grid[0] * self.grid[1]

    @property
    def num_features(self) -> int:
        """Channels of `features`: what the head reads."""
        return self.width


Config = VitConfig | BitConfig | MixerConfig
FAMILIES: dict[str, type[Config]] = {"vit": VitConfig, "bit": BitConfig, "mixer": MixerConfig}


def to_dict(config: Config) -> dict[str, Any]:
    """Plain values for a JSON file; `from_dict` reads them back."""
    family = next(name for name, cls in FAMILIES.items() if isinstance(config, cls))
    return {"family": family} | asdict(config)


def from_dict(values: Mapping[str, Any]) -> Config:
    """The description `to_dict` wrote; an unknown key or value is refused."""
    values = dict(values)
    family = values.pop("family", None)
    if family not in FAMILIES:
        raise unknown("model family", family, FAMILIES)
    check_known(values, FAMILIES[family])
    if isinstance(numerics := values.get("numerics"), Mapping):
        check_known(numerics, Numerics)
        values["numerics"] = Numerics(**numerics)
    try:
        return FAMILIES[family](**values)
    except TypeError as error:
        raise ConfigError(f"not a {family} description: {error}") from None


def resnet_shrink(blocks: tuple[int, ...]) -> int:
    """Pixels per cell of a ResNet's map: the root halves, the pool halves, later stages halve."""
    return 4 * 2 ** max(0, len(blocks) - 1)


def tidy(config: Any) -> None:
    """One spelling for each value: 224 for (224, 224), tuples for lists, a profile for its name."""
    for name in ("image_size", "patch_size"):
        if hasattr(config, name):
            object.__setattr__(config, name, tidy_size(name, getattr(config, name)))
    for name in ("blocks", "resnet_blocks"):
        if hasattr(config, name):
            given = getattr(config, name)
            units = tuple(given) if isinstance(given, tuple | list) else (given,)
            if not all(whole_number(unit) for unit in units):
                raise ConfigError(f"{name}={given!r} must be positive numbers of units per stage")
            object.__setattr__(config, name, units)
    if getattr(config, "layer_scale", None) is not None:
        if not isinstance(config.layer_scale, int | float):
            raise ConfigError(f"layer_scale={config.layer_scale!r} must be a number, or None")
        object.__setattr__(config, "layer_scale", float(config.layer_scale))
    if not isinstance(config.numerics, str | Numerics):
        raise ConfigError(f"numerics={config.numerics!r} must be a name or a Numerics")
    if isinstance(config.numerics, str):
        if config.numerics not in NUMERICS:
            raise unknown("numerics", config.numerics, NUMERICS)
        object.__setattr__(config, "numerics", NUMERICS[config.numerics])


def check_vit_parts(config: VitConfig) -> None:
    """Refuse parts that do not go together."""
    places = PLACES[config.position]
    if config.position_place not in places:
        raise ConfigError(
            f"position={config.position!r} has no placement {config.position_place!r}; "
            f"use {' or '.join(map(repr, places))}"
        )
    multiple = {"learned-2d": 2, "sincos-2d": 4}.get(config.position, 1)
    if config.width % multiple:
        raise ConfigError(
            f"width={config.width} does not split into {multiple} equal parts, "
            f"which position={config.position!r} needs"
        )
    if config.registers and config.position_place != "stem" and config.position != "relative":
        raise ConfigError("registers have no position; use them with position_place='stem'")
    if config.patch_dropout and config.position_place != "stem":
        raise ConfigError(
            f"patch_dropout={config.patch_dropout} leaves tokens without the grid that "
            f"position={config.position!r} in the encoder's layers needs; "
            "use position='learned' with position_place='stem', or patch_dropout=0"
        )
    if config.distillation and (config.pool != "cls" or config.representation):
        raise ConfigError("a distillation token needs pool='cls' and representation=0")
    if config.stem == "conv":
        down, across = pair(config.patch_size)
        if down != across or down & (down - 1) or down < 2:
            raise ConfigError(
                f"patch_size={config.patch_size} with stem='conv' must be a power of two, "
                "because each of its convolutions halves the picture; try patch_size=8"
            )
    if config.resnet_blocks and config.stem != "resnet":
        raise ConfigError("resnet_blocks describe stem='resnet'; set that too")
    if any(units < 1 for units in config.resnet_blocks):
        raise ConfigError(f"resnet_blocks={config.resnet_blocks} must be positive")
