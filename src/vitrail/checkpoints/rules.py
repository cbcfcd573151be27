"""The rule engine: a foreign format is one table of rules, read in both directions.

Reading and writing cannot drift apart. Every tensor must be used and every weight must be set; a
partial load is an error, never a warning. A format is a `Format` with one `Table` per model family.

A table has one template per kind of tensor, and makes a rule of it for each tensor of a model:

    encoder.blocks.{i}.norm1.weight  <->  blocks.{i}.norm1.weight
    stages.{i}.{j}.conv1.weight      <->  body.block{I}.unit{J:02d}.conv1.weight

{i} and {j} are the first and second number in our name; {I} and {J} are the same, counted from one.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.checkpoints.files import Checkpoint, LazyTensor
from vitrail.checkpoints.metadata import Metadata
from vitrail.errors import CheckpointError
from vitrail.formatting import comma_list
from vitrail.models.config import BitConfig, Config, MixerConfig, Numerics, VitConfig
from vitrail.models.registry import SIZES
from vitrail.models.vit import Model, build

Tensors = Mapping[str, LazyTensor]

FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
HEAD_DIM = 64  # channels per head of nearly every published ViT
TINY_WIDTH = 192  # smaller sizes are vitrail's own and unknown to other libraries


class Rule(NamedTuple):
    """Our tensor `ours` is `pack` of their arrays; `unpack` is the inverse."""

    ours: str
    theirs: tuple[str, ...]
    pack: Callable[..., Tensor] = lambda array: array
    unpack: Callable[[Tensor], tuple[Tensor, ...]] = lambda tensor: (tensor,)


class Table(NamedTuple):
    """How a format stores one model family."""

    family: type[Config]
    matches: Callable[[Tensors], bool]  # recognizes the family by tensor names
    infer_config: Callable[[Checkpoint], Config]  # from names, shapes and settings
    templates: Callable[..., Iterable[Rule]]  # for a config; unused templates are ignored
    unsupported: Callable[..., list[str]]  # features of a config the format cannot express
    json_files: Callable[..., dict[str, Any]] = lambda config, metadata: {}  # next to the weights
    # the last step of writing: undo what the format's `normalize` does to a current file
    finish: Callable[..., dict[str, Tensor]] = lambda config, tensors: tensors

    def rules(self, config: Config) -> list[Rule]:
        """Return one rule for each tensor of a model."""
        if not isinstance(config, self.family):
            raise CheckpointError(
                f"a {type(config).__name__} does not fit the tensors of a {self.family.__name__}"
            )
        by_name = {template.ours: template for template in self.templates(config)}
        rules = []
        for name in meta_state_dict(config):
            template_name, numbers = name, {}
            for letter in "ij":
                if match := re.search(r"\.(\d+)\.", template_name):
                    template_name = template_name.replace(match[0], f".{{{letter}}}.", 1)
                    numbers |= {letter: int(match[1]), letter.upper(): int(match[1]) + 1}
            if template_name not in by_name:
                raise CheckpointError(f"the format has no tensor for {name} of the model")
            template = by_name[template_name]
            theirs = tuple(their.format(**numbers) for their in template.theirs)
            rules.append(template._replace(ours=name, theirs=theirs))
        return rules


class Format(NamedTuple):
    preprocessing: str  # the preset its models are trained with
    tables: tuple[Table, ...]
    normalize: Callable[[Checkpoint], Checkpoint] = lambda checkpoint: checkpoint  # old layouts
    read_metadata: Callable[..., Metadata | None] = lambda settings, config: None


# Templates that several formats share.


def same(ours: str, theirs: str) -> Rule:
    return Rule(ours, (theirs,))


def without_batch(ours: str, theirs: str) -> Rule:
    """Map (1, n, D) to (n, D): most libraries keep a batch axis."""
    return Rule(ours, (theirs,), lambda array: array.squeeze(0), lambda tensor: (tensor[None],))


def modules(names: Mapping[str, str]) -> Iterator[Rule]:
    """Map weight and bias of modules that differ in name only."""
    for ours, theirs in names.items():
        for kind in ("weight", "bias"):
            yield same(f"{ours}.{kind}", f"{theirs}.{kind}")


def resnet_units(ours: str, theirs: str, norm: str = "norm") -> Iterator[Rule]:
    """Map the convolutions and norms of residual units, without their shortcuts."""
    for i in (1, 2, 3):
        names = {f"{ours}.conv{i}": f"{theirs}.conv{i}", f"{ours}.norm{i}": f"{theirs}.{norm}{i}"}
        yield from modules(names)


def jax_layer(ours: str, theirs: str) -> Iterator[Rule]:
    """Map a kernel (I, O) or (P, P, I, O) of JAX to a weight (O, I) or (O, I, P, P)."""
    yield Rule(
        f"{ours}.weight",
        (f"{theirs}/kernel",),
        lambda k: k.permute(-1, -2, *range(k.ndim - 2)),
        lambda w: (w.permute(*range(2, w.ndim), 1, 0),),
    )
    yield same(f"{ours}.bias", f"{theirs}/bias")


def conv_head(theirs: str) -> Iterator[Rule]:
    """Map a head that is a 1x1 convolution (K, C, 1, 1) to a weight (K, C)."""
    kernel = (f"{theirs}.weight",)
    yield Rule("head.weight", kernel, lambda k: k[:, :, 0, 0], lambda w: (w[:, :, None, None],))
    yield same("head.bias", f"{theirs}.bias")


@lru_cache(maxsize=16)
def meta_state_dict(config: Config) -> dict[str, Tensor]:
    """Return the names and shapes of a model's weights, as meta tensors."""
    return dict(build(config).state_dict())


def join_gates(
    tensors: Tensors, gates: Iterable[tuple[str, str]], joined_name: str
) -> dict[str, LazyTensor]:
    """Concatenate gate and value of SwiGLU, where the names of a pair are separate tensors."""
    joined = dict(tensors)
    for gate_name, value_name in gates:
        for name in tensors:
            other, target = (
                name.replace(gate_name, value_name),
                name.replace(gate_name, joined_name),
            )
            if gate_name not in name or other not in joined or target in joined:
                continue
            parts = joined.pop(name), joined.pop(other)
            shapes = [part.shape for part in parts]
            rows = sum(shape[0] for shape in shapes) if all(shapes) else 0
            shape = (rows, *shapes[0][1:]) if rows else ()
            joined[target] = LazyTensor(
                shape, lambda parts=parts: torch.cat([part.read() for part in parts])
            )
    return joined


# Reading and writing.


def read(tensors: Tensors, rules: Sequence[Rule], config: Config) -> Model:
    """Build the model and load every tensor; missing and unexpected tensors are errors.

    All names and shapes are checked before any value is read: `unpack` of a meta tensor yields the
    expected shapes.
    """
    expected = {name for rule in rules for name in rule.theirs}
    if missing := sorted(expected - tensors.keys()):
        raise CheckpointError(f"missing tensors: {comma_list(missing)}")
    if unexpected := sorted(tensors.keys() - expected):
        raise CheckpointError(f"unexpected tensors: {comma_list(unexpected)}")
    parameters = meta_state_dict(config)
    for rule in rules:
        for name, part in zip(rule.theirs, rule.unpack(parameters[rule.ours]), strict=True):
            if tensors[name].shape != tuple(part.shape):
                raise CheckpointError(
                    f"shape mismatch: {name} is {tensors[name].shape}, expected {tuple(part.shape)}"
                )
    state = {}
    for rule in rules:
        parts = [tensors[name].read() for name in rule.theirs]
        for name, part in zip(rule.theirs, parts, strict=True):
            if part.dtype not in FLOATS:
                raise CheckpointError(
                    f"{name} has dtype {part.dtype}; expected floating-point weights"
                )
        state[rule.ours] = rule.pack(*parts).to(torch.float32).contiguous()
    model = build(config)
    model.load_state_dict(state, assign=True)
    return model


def write(model: Model, rules: Sequence[Rule]) -> dict[str, Tensor]:
    """Return the model's weights under the names and shapes of a foreign format."""
    tensors = float32_state_dict(model)
    arrays = {}
    for rule in rules:
        arrays |= zip(rule.theirs, rule.unpack(tensors[rule.ours]), strict=True)
    return {name: array.contiguous() for name, array in arrays.items()}


def float32_state_dict(model: Model) -> dict[str, Tensor]:
    """Return the weights as float32 on the CPU, after checking the model against its config."""
    expected = meta_state_dict(model.config)
    tensors = model.state_dict()
    for name in sorted(expected.keys() | tensors.keys()):
        shapes = [tuple(s[name].shape) if name in s else None for s in (tensors, expected)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"the model does not match its config: {name} is {shapes[0]}, expected {shapes[1]};"
                " change a model with vitrail.load(…, num_classes=…), or change its config too"
            )
        if tensors[name].is_meta:
            raise CheckpointError("cannot save a model on the meta device: it has no values")
    if module := replaced_module(model):
        raise CheckpointError(
            f"cannot save {module}: the config does not describe its forward pass, so that the "
            "weights would be loaded into another model; use torch.save(model.state_dict(), …)"
        )
    return {n: t.detach().to("cpu", torch.float32).contiguous() for n, t in tensors.items()}


def replaced_module(model: Model) -> str:
    """Return the name and class of a module that does not compute what the config describes.

    These are other classes, subclasses that override a method, and modules whose `forward` was
    replaced, except by accelerate, which calls the old one.
    """
    expected = dict(build(model.config).named_modules())
    for name, module in model.named_modules():
        kinds = type(expected.get(name, module)).__mro__[:-2]  # without nn.Module and object
        methods = {k: v for kind in kinds[::-1] for k, v in vars(kind).items()}
        own = vars(module)
        if ("forward" in own and "_old_forward" not in own) or any(
            getattr(type(module), method, None) is not function
            for method, function in methods.items()
            if isinstance(function, FunctionType) and not method.startswith("__")
        ):
            return f"{name or 'the model'}, a {type(module).__name__}"
    return ""


def unwrap_model(model: Any) -> Model:
    """Return the model inside torch.compile and (Distributed)DataParallel wrappers."""
    inner = model
    while not hasattr(inner, "config") or hasattr(inner, "_orig_mod"):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
        if inner is None:
            raise CheckpointError(f"a {type(model).__name__} is not a vitrail model")
    return inner


# Reading a config from names and shapes.


def check_layers(config: Config, tensors: Tensors) -> None:
    """Reject a stated config with more layers than tensors before it is built."""
    layers = sum(config.blocks) if isinstance(config, BitConfig) else config.depth
    if isinstance(config, VitConfig):
        layers += sum(config.resnet_blocks)
    if layers > len(tensors):
        raise CheckpointError(f"the config has {layers} layers, the file {len(tensors)} tensors")


def substitute(name: str, patterns: Iterable[tuple[str, str]]) -> str:
    """Apply regular expressions and their replacements in order."""
    for pattern, replacement in patterns:
        name = re.sub(pattern, replacement, name)
    return name


def is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number


def square_image(patches: int, stride: tuple[int, int], hint: str) -> tuple[int, int]:
    """Return the image size of a square grid of patches that are `stride` pixels apart."""
    if not is_square(patches):
        raise CheckpointError(f"the {patches} patch positions are not a square grid; {hint}")
    side = math.isqrt(patches)
    return side * stride[0], side * stride[1]


def infer_heads(width: int, *stated: Any) -> int:
    """Return the first stated number of heads, or that of published ViTs of this width."""
    for heads in stated:
        if heads is not None:
            return heads
    for _, known_width, _, heads in SIZES.values():
        if width == known_width and width >= TINY_WIDTH:
            return heads
    if width % HEAD_DIM:
        raise CheckpointError(
            f"the file does not state the number of heads, and width {width} is not a multiple of "
            f"{HEAD_DIM}; pass heads=…"
        )
    return width // HEAD_DIM


# What cannot be read, and what a format cannot express.

NAFLEX = "NaFlex, images of any aspect ratio as sequences of patches; use a fixed resolution"
ARCHITECTURES = {  # part of a name of transformers or timm → why it is not supported
    "siglip2": f"{NAFLEX}, which transformers calls 'siglip' for SigLIP 2 too",
    "naflex": NAFLEX,
    "sam": "windowed attention with decomposed relative positions",  # before mvit: samvit
    "swin": "hierarchical windowed attention",
    "hiera": "a hierarchical model",
    "mvit": "a hierarchical model",
    "pvt": "a hierarchical model",
    "levit": "a hierarchical model",
    "vitdet": "windowed attention with decomposed relative positions",
    "beit": "relative position biases",
    "data2vec": "relative position biases",
    "convnext": "a convolutional network",
    "resnet": "a convolutional network",
}


def unsupported_reason(name: str) -> str:
    """Return why the architectures of this name are not supported, or nothing."""
    return next((reason for part, reason in ARCHITECTURES.items() if part in name), "")


class NumericsLoss(str):
    """A loss of numerics only; any other unsupported feature would lose weights."""

    __slots__ = ()


def unsupported_numerics(config: Config, theirs: Numerics) -> list[str]:
    """Return the numerics in which a config differs from a library with fixed ones.

    Position resizing is ignored: it does not matter at the model's own image size.
    """
    names = []
    if not isinstance(config, BitConfig):
        names.append("norm_eps")
    if isinstance(config, MixerConfig) or (isinstance(config, VitConfig) and config.mlp == "gelu"):
        names.append("gelu")
    if isinstance(config, BitConfig) or (isinstance(config, VitConfig) and config.stem == "resnet"):
        names += ["group_norm_eps", "conv_eps", "conv_eps_inside_root"]
    return [
        NumericsLoss(f"{name}={ours!r} (it uses {getattr(theirs, name)!r})")
        for name in names
        if (ours := getattr(config.numerics, name)) != getattr(theirs, name)
    ]


def unsupported_features(
    config: VitConfig,
    *,
    stems: Sequence[str] = ("patches",),
    positions: Sequence[str] = ("learned",),
    pools: Sequence[str] = ("cls",),
    qkv_bias: bool = True,
    pre_norm: bool = False,
) -> list[str]:
    """Return the features that a library with plain ViTs and these options cannot express."""
    features = {
        f"stem={config.stem!r}": config.stem not in stems,
        f"position={config.position!r}": config.position not in positions,
        f"position_place={config.position_place!r}": config.position_place != "stem",
        f"pool={config.pool!r}": config.pool not in pools,
        "register tokens": config.registers,
        "a distillation token": config.distillation,
        "LayerScale": config.layer_scale is not None,
        "qkv_bias=False": qkv_bias and not config.qkv_bias,
        "SwiGLU": config.mlp != "gelu",
        "a norm before the encoder": config.pre_norm and not pre_norm,
        f"norm={config.norm!r}": config.norm != "layernorm",
        "qk_norm=True": config.qk_norm,
        "key_bias=False": config.qkv_bias and not config.key_bias,
        "a class token that the head does not read": config.class_token
        and config.pool not in ("cls", "cls+mean"),
    }
    return applicable(features)


def applicable(features: Mapping[str, Any]) -> list[str]:
    """Return the descriptions whose condition holds."""
    return [description for description, applies in features.items() if applies]
