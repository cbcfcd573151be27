"""Everything that can be configured about a training run, as frozen dataclasses.

The same classes define recipe files (TOML) and command-line options. A field that is None is chosen
automatically from the data (`auto_config.py`), and the reason is logged. This file does not import
torch, so that `--help` is fast.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.data.preprocessing import Augmentation, Mixing
from vitrail.errors import ConfigError
from vitrail.models.config import (
    AttentionKind,
    InitScheme,
    Library,
    MlpKind,
    NormKind,
    Pool,
    PositionKind,
    PositionPlace,
    StemKind,
    UnitKind,
)

if TYPE_CHECKING:
    from vitrail.training.data_module import DataSplits

ObjectiveKind = Literal["classify", "masked-patches"]
OptimizerKind = Literal["adamw", "adam", "sgd", "lion", "adafactor", "muon"]
ScheduleKind = Literal["linear", "cosine", "rsqrt", "constant-linear", "staircase", "constant"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]
Strategy = Literal["ddp", "fsdp"]
MaskedTarget = Literal["mean-color", "colors-4x4", "pixels"]
HeadInit = Literal["probe", "zeros"]

MIN_CLASS_IMAGES = 5  # classes with fewer are too small to learn, and to call a dataset imbalanced


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model; fields that are set override those of the named model."""

    name: str | None = None
    """A name from `vitrail models` (default: chosen to fit the data)."""
    image_size: int | None = None
    """Height and width of the input images in pixels."""
    patch_size: int | None = None
    """Height and width of a patch in pixels."""
    depth: int | None = None
    """Number of encoder blocks."""
    width: int | None = None
    """Embedding dimension."""
    mlp_width: int | None = None
    """Hidden dimension of each MLP."""
    heads: int | None = None
    """Number of attention heads."""
    channels: int | None = None
    """Input channels: 3 for color, 1 for grayscale."""
    stem: StemKind | None = None
    """Patch embedding: one linear projection, a few convolutions, or a ResNet."""
    resnet_blocks: tuple[int, ...] | None = None
    """Hybrid: units in each stage of the ResNet below the Transformer."""
    resnet_width: int | None = None
    """Hybrid: width multiplier of the ResNet."""
    blocks: tuple[int, ...] | None = None
    """BiT: units in each stage."""
    unit: UnitKind | None = None
    """BiT: 3x3 convolutions, or axial attention."""
    width_factor: int | None = None
    """BiT: width multiplier."""
    tokens_mlp: int | None = None
    """Mixer: hidden dimension of the token-mixing MLPs."""
    channels_mlp: int | None = None
    """Mixer: hidden dimension of the channel-mixing MLPs."""
    position: PositionKind | None = None
    """Kind of position embedding."""
    position_place: PositionPlace | None = None
    """Where position embeddings are added."""
    rope_theta: float | None = None
    """Rotary positions: longest period (RoPE theta), in units of half an image side."""
    attention: AttentionKind | None = None
    """Self-attention over all tokens, or alternately along rows and columns (axial)."""
    qkv_bias: bool | None = None
    """Add a bias to queries, keys and values."""
    key_bias: bool | None = None
    """Add a bias to keys too, if queries and values have one."""
    qk_norm: bool | None = None
    """Normalize the queries and keys of each head."""
    mlp: MlpKind | None = None
    """MLP with GELU, or gated (SwiGLU)."""
    norm: NormKind | None = None
    """LayerNorm or RMSNorm."""
    pre_norm: bool | None = None
    """Norm before the first block, and no bias in the patch projection (CLIP)."""
    registers: int | None = None
    """Register tokens: extra tokens without position embedding."""
    class_token: bool | None = None
    """Add a class token (default: only if the pooling uses it)."""
    pool: Pool | None = None
    """Input of the head: the class token, the mean of the patches, or attention pooling."""
    representation: int | None = None
    """Width of the tanh layer before the head; 0 disables it."""
    dropout: float | None = None
    """Dropout rate after dense layers."""
    drop_path: float | None = None
    """Stochastic depth rate of the last block; it grows linearly with depth."""
    patch_dropout: float | None = None
    """Fraction of the patches dropped in training."""
    layer_scale: float | None = None
    """Initial value of LayerScale."""
    distillation: bool | None = None
    """Add a distillation token that is trained by a teacher (DeiT)."""
    numerics: Library | None = None
    """Match this library's numerics (default: the checkpoint's)."""
    init: InitScheme | None = None
    """Weight initialization (default: google); quick is for short training."""
    head_bias: float = 0.0
    """Initial bias of the head: -10 or -6.9 with a sigmoid loss over many classes."""

    def changes(self) -> dict[str, Any]:
        """Return the fields of the model's configuration that are set."""
        names = [f.name for f in fields(self) if f.name not in ("name", "init", "head_bias")]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """Optimizer, learning rate schedule, weight decay, and frozen weights."""

    kind: OptimizerKind | None = None
    """Muon updates the encoder's matrices and leaves the rest to AdamW."""
    learning_rate: float | None = None
    """Peak learning rate, after warmup."""
    muon_learning_rate: float | None = None
    """Peak learning rate of the matrices that Muon updates (default: 0.02, or 0.003 for pre-trained
    weights)."""
    muon_momentum: float = 0.8
    """Muon's momentum: 0.95 for runs of many thousand steps."""
    schedule: ScheduleKind | None = None
    """How the learning rate decays."""
    warmup_steps: int | None = None
    """Linear warmup steps; the warmup factor multiplies the decayed rate, as in the authors'
    code."""
    warmup: float = 0.05
    """Warmup as a fraction of the run, if warmup_steps is not given."""
    end: float = 0.0
    """Final learning rate of a linear schedule."""
    timescale: int = 10_000
    """rsqrt: steps after which the rate has fallen to 1 / sqrt(2) of its peak."""
    cooldown: float | None = None
    """rsqrt, constant-linear: final fraction of the run that decays to zero (default: 0.2)."""
    stairs: tuple[float, ...] = (0.3, 0.6, 0.9)
    """staircase: fractions of the run after which the rate is divided by ten."""
    weight_decay: float | None = None
    """Weight decay, for kernels only; L2 regularization with adam and sgd, else decoupled."""
    betas: tuple[float, float] | None = None
    """Adam's betas (default: 0.9 0.999; Lion: 0.9 0.99)."""
    eps: float = 1e-8
    """Adam's epsilon."""
    momentum: float = 0.9
    """SGD momentum."""
    clip_norm: float | None = None
    """Clip the global gradient norm to this value."""
    layer_decay: float | None = None
    """Layer-wise learning rate decay: factor per block, from the head down; 1 disables it."""
    freeze: tuple[str, ...] = ()
    """Patterns of weights to freeze, such as stem.* or *.mlp.*"""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "muon_learning_rate", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"optim.{name}={value} must be a positive number")
        if not 0 <= self.muon_momentum < 1:
            raise ConfigError(f"optim.muon_momentum={self.muon_momentum} must be in [0, 1)")
        if self.weight_decay is not None and self.weight_decay < 0:
            raise ConfigError(f"optim.weight_decay={self.weight_decay} must not be negative")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ConfigError(f"optim.layer_decay={self.layer_decay} must be in (0, 1]")
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"optim.warmup={self.warmup} must be a fraction of the run, below 1")
        if self.cooldown is not None and not 0 <= self.cooldown <= 1:
            raise ConfigError(f"optim.cooldown={self.cooldown} must be a fraction, from 0 to 1")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ConfigError(f"optim.warmup_steps={self.warmup_steps} must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Training loss."""

    kind: Literal["softmax", "sigmoid"] | None = None
    """Cross-entropy over all classes, or binary cross-entropy for each class."""
    label_smoothing: float = 0.0
    """Fraction of the target that is spread over all classes."""
    logit_adjustment: float | None = None
    """Add this multiple of the log class frequencies to the logits in the loss, for balanced
    accuracy (Menon et al. 2021; default: 1 if classes are imbalanced, else 0)."""
    teacher: str = ""
    """Distillation: the teacher, any model reference."""
    teacher_size: int | None = None
    """Image size at which the teacher runs (default: its own)."""
    teaching: Literal["soft", "hard", "features"] = "hard"
    """Distillation targets: the teacher's probabilities, its argmax, or its features; features also
    work if the teacher's classes differ, and are cached on disk with augment.views."""
    teacher_weight: float = 0.5
    """Weight of the distillation loss; the label loss gets the rest."""
    temperature: float = 3.0
    """Soft distillation: softmax temperature."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1 or not 0 <= self.teacher_weight <= 1:
            raise ConfigError("loss.label_smoothing and loss.teacher_weight must be fractions")
        if self.logit_adjustment is not None and self.logit_adjustment < 0:
            raise ConfigError(f"loss.logit_adjustment={self.logit_adjustment} must be 0 or more")
        if self.temperature <= 0:
            raise ConfigError(f"loss.temperature={self.temperature} must be above zero")


@dataclass(frozen=True, kw_only=True)
class MaskedSettings:
    """Masked patch prediction, appendix B.1.2 of the paper."""

    share: float = 0.5
    """Fraction of the patches that are corrupted."""
    predict: MaskedTarget = "mean-color"
    """Target: 3-bit mean color of the patch, 3-bit colors of 4 x 4 cells, or its pixels."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(
                f"masked.share={self.share} must be a fraction of the patches above 0"
            )


@dataclass(frozen=True, kw_only=True)
class MachineSettings:
    """How the run is executed; results agree up to rounding and the random numbers of each
    micro-batch."""

    workers: int | None = None
    """Data loading processes."""
    micro_batch: int | None = None
    """Images per forward pass on one device; gradients are accumulated over the batch."""
    parts: int | None = None
    """CPU data parallelism: shards of a batch computed concurrently; 1 disables it."""
    precision: Precision = "auto"
    """Precision of matrix products."""
    compile: bool = False
    """Use torch.compile if a few measured steps show that it is faster; takes a minute."""
    checkpointing: bool = False
    """Activation checkpointing: recompute activations to save memory."""
    strategy: Strategy = "ddp"
    """Several processes: replicate the model (ddp) or shard it (fsdp)."""
    device: str = ""
    """cpu, cuda or mps (default: the best available)."""

    def __post_init__(self) -> None:
        if self.parts is not None and self.parts < 1:
            raise ConfigError(f"machine.parts={self.parts} must be 1 or more")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one training run."""

    epochs: float | None = None
    """Passes over the training set."""
    steps: int | None = None
    """Optimizer steps, in place of epochs."""
    minutes: float | None = None
    """Time budget of the run, including the final evaluation."""
    patience: int | None = None
    """Early stopping: stop after this many evaluations without a better val accuracy, and keep the
    best weights; --dev holds out a val split from train."""
    until_accuracy: float | None = None
    """Stop at this val accuracy; --dev holds out a val split from train."""
    batch_size: int | None = None
    """Images per step, over all devices."""
    seed: int = 0
    """Random seed."""
    image_sizes: tuple[tuple[float, int], ...] = ()
    """Progressive resizing: pairs of (fraction of the run, pixels), such as 0 32 0.5 64."""
    average: float = 0.0
    """Decay of an exponential moving average (EMA) of the weights, used as the final model; 0
    disables it."""
    repeats: int = 1
    """Repeated augmentation: number of consecutive augmented copies of each image."""
    balance: float | None = None
    """Class-balanced sampling: 0 draws every image equally often, 1 every class."""
    dev: float | None = None
    """Fraction of the training images to hold out for evaluation, if there is no val split."""
    strict: bool = False
    """Fail on the first unreadable image instead of skipping it."""
    evaluate_every: float | None = None
    """Epochs between evaluations."""
    save_minutes: float = 5.0
    """Minutes between checkpoints."""
    retries: int = 0
    """Maximum restarts from the last checkpoint, halving the learning rate, if the loss
    diverges."""
    objective: ObjectiveKind = "classify"
    """Classification, or self-supervised masked patch prediction."""
    head_init: HeadInit | None = None
    """Fine-tuning: initialize a new head with a closed-form linear probe, or with zeros."""
    lora: int | None = None
    """Fine-tuning: train low-rank updates of this rank (LoRA) and the head; all else is frozen."""
    lora_alpha: float = 16.0
    """LoRA: an update is multiplied by lora_alpha / lora."""
    preprocessing: str | None = None
    """Preprocessing preset, such as google, timm, torchvision, deit or clip."""
    model: ModelSettings = field(default_factory=ModelSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    augment: Augmentation = field(default_factory=Augmentation)
    mix: Mixing = field(default_factory=Mixing)
    masked: MaskedSettings = field(default_factory=MaskedSettings)
    machine: MachineSettings = field(default_factory=MachineSettings)

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "minutes", "batch_size", "evaluate_every", "patience"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value} must be above zero")
        if self.epochs is not None and self.steps is not None:
            raise ConfigError("epochs and steps both set the length of the run; pass one of them")
        if self.until_accuracy is not None and not 0 < self.until_accuracy <= 1:
            raise ConfigError(
                f"until_accuracy={self.until_accuracy} must be a fraction, such as 0.9"
            )
        if self.patience is not None and self.machine.strategy == "fsdp":
            raise ConfigError(f"patience={self.patience} needs whole weights; use ddp, not fsdp")
        if self.lora is not None and self.lora < 1:
            raise ConfigError(f"lora={self.lora} must be a rank of 1 or more, such as 8")
        if not 0 < self.lora_alpha < float("inf"):
            raise ConfigError(f"lora_alpha={self.lora_alpha} must be a positive number")
        if self.balance is not None and not 0 <= self.balance <= 1:
            raise ConfigError(f"balance={self.balance} must be from 0 to 1")
        if not 0 <= self.average < 1:
            raise ConfigError(f"average={self.average} must be 0, or a decay below 1")
        if self.dev is not None and not 0 <= self.dev < 1:
            raise ConfigError(f"dev={self.dev} must be a fraction of the training images, below 1")
        if self.seed < 0 or self.repeats < 1 or self.retries < 0:
            raise ConfigError("seed and retries must be 0 or more, and repeats 1 or more")
        starts = [start for start, _ in self.image_sizes]
        if starts and (starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= 1):
            raise ConfigError(
                f"image_sizes={self.image_sizes} must start at 0 and increase, below 1; "
                "such as 0 32 0.5 64"
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run: data, settings, initialization, and output folder."""

    data: str
    out: Path
    settings: Settings
    start: str = ""  # model reference to fine-tune; "" trains from scratch
    resume: bool = False
    overwrite: bool = False  # replace an earlier run in `out`
    splits: "DataSplits | None" = None  # in place of those that `data` refers to
