"""Everything that can be set about a training run, as frozen values.

The same dataclasses give the recipe files (TOML) and the options of the command. A field that is
None is chosen by looking at the data (`choices.py`), and the choice is told with its reason. This
file does not import torch, so that help answers at once.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from vitrail.data.variation import Crop, Flavor, MixStyle, Policy
from vitrail.errors import ConfigError
from vitrail.models.config import InitScheme, Library, Pool, PositionKind, PositionPlace, StemKind

Objective = Literal["classify", "masked-patches"]
Optimizer = Literal["adamw", "adam", "sgd", "lion", "adafactor", "muon"]
Decay = Literal["linear", "cosine", "rsqrt", "constant-linear", "staircase", "constant"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]
Strategy = Literal["ddp", "fsdp"]
Prediction = Literal["mean-color", "colors-4x4", "pixels"]
HeadInit = Literal["probe", "zeros"]


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model; a field that is given overrules what the name stands for."""

    name: str | None = None
    """A name from `vitrail models`. Without one, chosen to fit the data."""
    image_size: int | None = None
    """Pixels along each side of the pictures the model sees."""
    patch_size: int | None = None
    """Pixels along each side of a patch."""
    depth: int | None = None
    """Encoder blocks."""
    width: int | None = None
    """Channels per token."""
    mlp_width: int | None = None
    """Channels inside each MLP."""
    heads: int | None = None
    """Attention heads."""
    channels: int | None = None
    """3 for color, 1 for gray."""
    stem: StemKind | None = None
    """How pictures become tokens: cut into patches, by a few convolutions, or by a ResNet."""
    resnet_blocks: tuple[int, ...] | None = None
    """Hybrid: units in each stage of the ResNet under the Transformer."""
    blocks: tuple[int, ...] | None = None
    """BiT: units in each stage."""
    width_factor: int | None = None
    """BiT: times as wide as a ResNet usually is."""
    tokens_mlp: int | None = None
    """Mixer: channels inside the MLPs that mix tokens."""
    channels_mlp: int | None = None
    """Mixer: channels inside the MLPs that mix channels."""
    position: PositionKind | None = None
    """How tokens know their place."""
    position_place: PositionPlace | None = None
    """Where positions are added."""
    pool: Pool | None = None
    """What the head reads: the class token, the mean of the patches, or attention over them."""
    representation: int | None = None
    """Channels of the tanh layer before the head; 0 leaves it off."""
    dropout: float | None = None
    """Share of values dropped after dense layers."""
    drop_path: float | None = None
    """Chance that the last block is skipped; earlier blocks less."""
    patch_dropout: float | None = None
    """Share of the patches that are left out in training."""
    layer_scale: float | None = None
    """First value of a learned factor on each branch."""
    distillation: bool | None = None
    """A second class token that learns from a teacher (DeiT)."""
    numerics: Library | None = None
    """Whose GELU, epsilons and stretching of positions; a file of weights has those it was for."""
    init: InitScheme | None = None
    """Whose first values the weights get, google's if not given; quick is for short training."""
    head_bias: float = 0.0
    """First value of the head's bias: -10 or -6.9 with a sigmoid loss over many classes."""

    def changes(self) -> dict[str, Any]:
        """The fields of the model's description that were given."""
        apart = ("name", "init", "head_bias")
        return {name: value for name, value in given(self).items() if name not in apart}


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer, its learning rate over time, and what it leaves alone."""

    kind: Optimizer | None = None
    """Muon turns the encoder's matrices and leaves the rest to AdamW."""
    learning_rate: float | None = None
    """Peak, after the warm-up."""
    muon_learning_rate: float = 0.02
    """Peak for the matrices that Muon turns."""
    schedule: Decay | None = None
    """How the learning rate falls."""
    warmup_steps: int | None = None
    """Steps of linear rise; it multiplies the decay, as in the authors' code."""
    warmup: float = 0.05
    """The same as a share of the run, where warmup_steps is not given."""
    end: float = 0.0
    """The learning rate at which a linear schedule ends."""
    timescale: int = 10_000
    """rsqrt: steps over which the rate falls to 1 / sqrt(2) of its peak."""
    cooldown: float | None = None
    """rsqrt, constant-linear: the last share of the run, which falls to zero; 0.2 if not given."""
    stairs: tuple[float, ...] = (0.3, 0.6, 0.9)
    """staircase: shares of the run after which the rate is divided by ten."""
    weight_decay: float | None = None
    """Taken from kernels only, times the learning rate, as AdamW does."""
    betas: tuple[float, float] | None = None
    """Adam's memory, 0.9 0.999 if not given; Lion's, 0.9 0.99."""
    eps: float = 1e-8
    """Adam's guard against division by zero."""
    momentum: float = 0.9
    """SGD's memory; Muon's is 0.8."""
    clip_norm: float | None = None
    """Scale gradients down to this norm, all together."""
    layer_decay: float | None = None
    """Factor on the learning rate for each block further from the head; 1 for none."""
    freeze: tuple[str, ...] = ()
    """Patterns of weights that stay as they are, such as stem.* or *.mlp.*"""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "muon_learning_rate", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"optim.{name}={value} must be a positive number")
        if self.weight_decay is not None and self.weight_decay < 0:
            raise ConfigError(f"optim.weight_decay={self.weight_decay} must not be negative")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ConfigError(f"optim.layer_decay={self.layer_decay} must be in (0, 1]")
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"optim.warmup={self.warmup} must be a share of the run, below 1")
        if self.cooldown is not None and not 0 <= self.cooldown <= 1:
            raise ConfigError(f"optim.cooldown={self.cooldown} must be a share, from 0 to 1")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ConfigError(f"optim.warmup_steps={self.warmup_steps} must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What is made small."""

    kind: Literal["softmax", "sigmoid"] | None = None
    """One class of many, or a yes or no for each class."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes."""
    teacher: str = ""
    """A model to learn from as well: any model reference."""
    teaching: Literal["soft", "hard"] = "hard"
    """Learn the teacher's probabilities, or its first choice."""
    teacher_weight: float = 0.5
    """How much the teacher counts beside the labels."""
    temperature: float = 3.0
    """Soft teaching: how far the teacher's probabilities are evened out."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1 or not 0 <= self.teacher_weight <= 1:
            raise ConfigError("loss.label_smoothing and loss.teacher_weight must be shares")
        if self.temperature <= 0:
            raise ConfigError(f"loss.temperature={self.temperature} must be above zero")


@dataclass(frozen=True, kw_only=True)
class AugmentSettings:
    """How each training picture is varied; what is not given is chosen by the size of the set."""

    crop: Crop | None = None
    """A random part of the picture, the picture shifted within a border, or all of it."""
    crop_area: tuple[float, float] | None = None
    """Smallest and largest share of the picture that an inception crop takes."""
    padding: int | None = None
    """Pixels of border for the padded crop."""
    flip: bool | None = None
    """Mirror half of the pictures, left to right."""
    policy: Policy | None = None
    """Which random changes of color and shape."""
    count: int | None = None
    """RandAugment: how many of them."""
    magnitude: float | None = None
    """RandAugment: how strong; up to 30, or 10 in timm's flavors."""
    flavor: Flavor | None = None
    """RandAugment: whose."""
    spread: float | None = None
    """RandAugment: standard deviation of the magnitude."""
    color_jitter: float | None = None
    """How much brightness, contrast and saturation may vary."""
    erasing: float | None = None
    """Chance that a random rectangle is blotted out."""


@dataclass(frozen=True, kw_only=True)
class MixSettings:
    """How pictures of a batch are mixed with each other, and their labels with them."""

    mixup: float | None = None
    """How evenly two pictures are blended: the alpha of mixup; 0 leaves it out."""
    cutmix: float | None = None
    """How large the part of another picture is: the alpha of cutmix; 0 leaves it out."""
    chance: float | None = None
    """Share of the batches that are mixed."""
    style: MixStyle | None = None
    """Mixup as timm has it, or as big_vision has it, where a picture keeps the larger share."""
    after: float | None = None
    """Epochs before mixing begins."""


@dataclass(frozen=True, kw_only=True)
class MaskedSettings:
    """Masked patch prediction, appendix B.1.2 of the paper."""

    share: float = 0.5
    """Share of the patches that are corrupted."""
    predict: Prediction = "mean-color"
    """The patch's mean color in 3 bits a channel, its 4 x 4 colors so, or its pixels."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"masked.share={self.share} must be a share of the patches above 0")


@dataclass(frozen=True, kw_only=True)
class MachineSettings:
    """How it is computed. What is learned stays, but for rounding and a micro-batch's draws."""

    workers: int | None = None
    """Processes that read pictures."""
    micro_batch: int | None = None
    """Pictures at once on one device; the rest of a batch is accumulated."""
    parts: int | None = None
    """Parts of a batch that the cores of a processor work on side by side; 1 keeps it whole."""
    precision: Precision = "auto"
    """Of the matrix products."""
    compile: bool = False
    """Let torch compile the step, if a few steps show that it pays; that takes a minute."""
    checkpointing: bool = False
    """Compute activations twice instead of keeping them: less memory."""
    strategy: Strategy = "ddp"
    """Several processes: a copy of the model for each, or each a part of it."""
    device: str = ""
    """cpu, cuda, mps; chosen if not given."""

    def __post_init__(self) -> None:
        if self.parts is not None and self.parts < 1:
            raise ConfigError(f"machine.parts={self.parts} must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training run."""

    epochs: float | None = None
    """Times that every training picture is seen."""
    steps: int | None = None
    """Steps of the optimizer, in place of epochs."""
    minutes: float | None = None
    """Plan the run to end after this time, final evaluation included."""
    until_accuracy: float | None = None
    """Stop once this share of the val pictures is named rightly; dev cuts a val out of train."""
    batch_size: int | None = None
    """Pictures per step, over all devices."""
    seed: int = 0
    """Decides everything random."""
    image_sizes: tuple[tuple[float, int], ...] = ()
    """Begin with smaller pictures: pairs of (share of the run, pixels), such as 0 32 0.5 64."""
    average: float = 0.0
    """Decay of a running average of the weights, which then is the result; 0 for none."""
    repeats: int = 1
    """Times a picture comes in a row, each time varied anew."""
    dev: float | None = None
    """Share of the training pictures to keep apart and evaluate on, where there is no val."""
    strict: bool = False
    """Stop at the first picture that cannot be read, instead of taking another."""
    evaluate_every: float | None = None
    """Epochs between evaluations."""
    save_minutes: float = 5.0
    """Minutes between saves of the resumable state."""
    retries: int = 0
    """Times to go back and halve the learning rate when the loss explodes."""
    objective: Objective = "classify"
    """Learn classes, or learn to fill in masked patches without any."""
    head_init: HeadInit | None = None
    """Fine-tuning: start a new head as a closed-form linear probe, or at zero."""
    preprocessing: str | None = None
    """How pictures are prepared: google, big_vision, timm, torchvision or transformers."""
    model: ModelSettings = field(default_factory=ModelSettings)
    optim: Optim = field(default_factory=Optim)
    loss: LossSettings = field(default_factory=LossSettings)
    augment: AugmentSettings = field(default_factory=AugmentSettings)
    mix: MixSettings = field(default_factory=MixSettings)
    masked: MaskedSettings = field(default_factory=MaskedSettings)
    machine: MachineSettings = field(default_factory=MachineSettings)

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "minutes", "batch_size", "evaluate_every"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value} must be above zero")
        if self.epochs is not None and self.steps is not None:
            raise ConfigError("epochs and steps both say how long to train; give one of them")
        if self.until_accuracy is not None and not 0 < self.until_accuracy <= 1:
            raise ConfigError(f"until_accuracy={self.until_accuracy} must be a share, such as 0.9")
        if not 0 <= self.average < 1:
            raise ConfigError(f"average={self.average} must be 0, or a decay below 1")
        if self.dev is not None and not 0 <= self.dev < 1:
            raise ConfigError(f"dev={self.dev} must be a share of the training pictures, below 1")
        if self.seed < 0 or self.repeats < 1 or self.retries < 0:
            raise ConfigError("seed and retries must be 0 or more, and repeats 1 or more")
        starts = [start for start, _ in self.image_sizes]
        if starts and (starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= 1):
            raise ConfigError(
                f"image_sizes={self.image_sizes} must begin at 0 and rise, below 1; "
                "such as 0 32 0.5 64"
            )


def given(settings: Any) -> dict[str, Any]:
    """The fields that were not left to be chosen."""
    values = {f.name: getattr(settings, f.name) for f in fields(settings)}
    return {name: value for name, value in values.items() if value is not None}
