"""Objectives: a model and its loss as one module; and the losses.

`forward(images, targets)` is the loss of one micro-batch, and the unit that DDP and FSDP wrap.
Images are normalized floats (B, C, H, W), targets class indices (B,) or, for mixed and multi-label
images, floats (B, K). `logits(images)` is used for evaluation; masked patches have none. With a
teacher's features, targets are (B, 1 + D): the class index, then the features.

Shapes: B images, C channels, H x W pixels, K classes, D features of a teacher.
"""

from contextlib import suppress
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.checkpoints.bundle import digest
from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.storage import atomic_path, cache_folder
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.models.config import pair, to_dict
from vitrail.models.vit import Model, VisionTransformer
from vitrail.training.config import (
    MIN_CLASS_IMAGES,
    LossSettings,
    MaskedSettings,
    MaskedTarget,
    Settings,
)

MASKED, SWAPPED = 0.8, 0.1  # fractions of the corrupted patches; the rest is kept
LEVELS = 8  # of a channel: 3 bits
MAX_CHANNELS = 3  # 8**3 = 512 colors; more channels make too many classes
MASK_STD = 0.02  # initialization of the mask embedding, as of position embeddings


# Cells along each side of a patch whose mean color is classified; None: regress the pixels.
COLOR_CELLS: dict[MaskedTarget, int | None] = {"mean-color": 1, "colors-4x4": 4, "pixels": None}


class Supervised(nn.Module):
    """What objectives with labels have in common."""

    def __init__(self, model: Model, loss: LossSettings) -> None:
        super().__init__()
        if not model.config.num_classes:
            raise ConfigError(
                "the model has no head (num_classes=0), so it cannot learn classes; "
                "give it one, or use objective='masked-patches'"
            )
        self.model, self.loss = model, loss

    def logits(self, images: Tensor) -> Tensor:
        return self.model(images)  # (B, K); with a distillation token, the mean of both heads


class Classification(Supervised):
    """Supervised classification; `prior` (K,) is added to the logits in the loss."""

    prior: Tensor | None

    def __init__(self, model: Model, loss: LossSettings, prior: Tensor | None = None) -> None:
        super().__init__(model, loss)
        self.register_buffer("prior", prior, persistent=False)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(images)
        logits = logits if self.prior is None else logits + self.prior
        return label_loss(logits, targets, self.loss)


class Distillation(Supervised):
    """Classification with a teacher: (1 - w) * labels + w * teacher, w = `loss.teacher_weight`.

    A model with a distillation token learns the labels with its class token and the teacher with
    that one (DeiT, Touvron et al. 2021, arXiv:2012.12877); any other learns both with one head.
    """

    def __init__(self, model: Model, loss: LossSettings, teacher: Model) -> None:
        super().__init__(model, loss)
        self.teacher = Teacher(teacher, model)  # not a module: not saved, trained or averaged

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        if isinstance(self.model, VisionTransformer) and self.model.config.distillation:
            logits, distilled = self.model.distillation_logits(images)
        else:
            logits = distilled = self.model(images)
        labels, teacher_logits = label_loss(logits, targets, self.loss), self.teacher(images)
        if self.loss.teaching == "soft":
            teaching = soft_distillation(distilled, teacher_logits, self.loss.temperature)
        else:
            teaching = hard_distillation(distilled, teacher_logits)
        weight = self.loss.teacher_weight
        return (1 - weight) * labels + weight * teaching


class FeatureDistillation(Supervised):
    """Classification by one head, while a projection of the same features learns a teacher's.

    The loss is (1 - w) * labels + w * (regression + soft distillation), w = `loss.teacher_weight`:
    the squared error of the predicted teacher features and, if the teacher has a head, soft
    distillation between its logits for the predicted and for its own features. So the teacher's
    classes may differ from the student's. The projection is not part of the model.
    """

    def __init__(self, model: Model, loss: LossSettings, teacher: "Teacher") -> None:
        super().__init__(model, loss)
        self.teacher = teacher  # not a module, as above
        self.projection = nn.Linear(model.config.num_features, teacher.model.config.num_features)
        nn.init.eye_(self.projection.weight)  # a student initialized from its teacher starts close
        nn.init.zeros_(self.projection.bias)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        model, targets = self.model, at_least_float32(targets)
        if isinstance(model, VisionTransformer):  # with a distillation token, both heads
            tokens = model.run_encoder(*model.prepare_tokens(images))
            features, logits = model.run_head(*tokens)
        else:
            features = model.features(images)
            logits = None if model.head is None else model.head(features)
        assert logits is not None
        labels = label_loss(logits, targets[:, 0].long(), self.loss)
        predicted, expected = at_least_float32(self.projection(features)), targets[:, 1:]
        error = (predicted - expected).square().sum(1) / expected.square().sum(1).clamp(min=1e-6)
        teaching = error.mean()
        if (head := self.teacher.model.head) is not None:
            temperature = self.loss.temperature
            teaching = teaching + soft_distillation(head(predicted), head(expected), temperature)
        weight = self.loss.teacher_weight
        return (1 - weight) * labels + weight * teaching


class Teacher:
    """A frozen model that takes images preprocessed for its student.

    It is not a module, so that nothing that saves, trains or averages modules finds it; it follows
    the images to their device.
    """

    def __init__(self, model: Model, student: Model, *, same_classes: bool = True) -> None:
        config, student_config = model.config, student.config
        metadata, student_metadata = get_metadata(model), get_metadata(student)
        if same_classes and config.num_classes != student_config.num_classes:
            count = f"{config.num_classes} classes" if config.num_classes else "no head"
            raise CheckpointError(
                f"the teacher has {count}, the student {student_config.num_classes} classes; "
                "use a teacher that was trained on the same classes, or loss.teaching='features'"
            )
        # Class names are empty if they are unknown.
        names = zip(metadata.class_names, student_metadata.class_names, strict=False)
        for index, (teacher_name, student_name) in enumerate(names if same_classes else ()):
            if teacher_name != student_name:
                raise CheckpointError(
                    f"class {index} is {teacher_name!r} for the teacher and {student_name!r} for "
                    "the student; use a teacher that was trained on the same classes in the same "
                    "order"
                )
        if config.channels != student_config.channels:
            raise CheckpointError(
                f"the teacher takes images of {config.channels} channels, the student of "
                f"{student_config.channels}; load the teacher with "
                f"channels={student_config.channels}"
            )
        self.model = model.eval().requires_grad_(False)
        self.size = pair(model.config.image_size)
        before, after = student_metadata.preprocessing, metadata.preprocessing
        # From (pixel - mean) / std of the student to that of the teacher.
        self.scale = [std / new for std, new in zip(before.std, after.std, strict=True)]
        channels = zip(before.mean, after.mean, after.std, strict=True)
        self.shift = [(mean - new) / std for mean, new, std in channels]

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return the teacher's logits (B, K)."""
        return self.model(self.preprocess(images))

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Return the teacher's features (B, D)."""
        return self.model.features(self.preprocess(images))

    def preprocess(self, images: Tensor) -> Tensor:
        """Convert the student's images to the teacher's size and normalization."""
        if next(self.model.parameters()).device != images.device:
            self.model.to(images.device)
        if images.shape[-2:] != self.size:
            images = F.interpolate(images, self.size, mode="bilinear", antialias=True)
        if self.scale == [1] * len(self.scale) and self.shift == [0] * len(self.shift):
            return images
        scale = torch.tensor(self.scale, device=images.device)[:, None, None]
        shift = torch.tensor(self.shift, device=images.device)[:, None, None]
        return images * scale + shift


class TeacherFeatures:
    """Features of a teacher, cached by the content of the images.

    With `augment.views` the same pixels return after some epochs; the teacher sees them once. The
    cache is files in ~/.cache/vitrail/teachers, one for every few thousand images, which later runs
    with the same teacher, views and image size read as well.
    """

    PART = 8192  # images per file

    def __init__(self, teacher: Teacher, *, cached: bool) -> None:
        self.teacher, self.cached = teacher, cached
        self.rows: dict[bytes, np.ndarray] = {}  # by digest of the image; float16 (D,)
        self.unsaved: list[bytes] = []
        folder = cache_folder("teachers") if cached else None
        about: dict[str, Any] = {"model": to_dict(teacher.model.config), "size": teacher.size}
        about |= {"scale": teacher.scale, "shift": teacher.shift}
        self.folder = folder and folder / digest(teacher.model.state_dict(), about)
        for part in sorted(self.folder.glob("*.npz")) if self.folder else []:
            with suppress(OSError, ValueError, KeyError), np.load(part) as arrays:
                keys = [bytes(key) for key in arrays["keys"]]
                self.rows |= dict(zip(keys, arrays["features"], strict=True))

    def __call__(self, pixels: Tensor, images: Tensor) -> Tensor:
        """Return the features (B, D) of normalized images, whose bytes are `pixels`."""
        if not self.cached:
            return self.teacher.features(images)
        keys = [blake2b(image.numpy().tobytes(), digest_size=16).digest() for image in pixels]
        missing = [index for index, key in enumerate(keys) if key not in self.rows]
        if missing:
            computed = self.teacher.features(images[missing]).half().cpu().numpy()
            for index, row in zip(missing, computed, strict=True):
                self.rows[keys[index]] = row
            self.unsaved += [keys[index] for index in missing]
        if len(self.unsaved) >= self.PART:
            self.save()
        return torch.from_numpy(np.stack([self.rows[key] for key in keys])).to(images)

    def save(self) -> None:
        if self.folder is not None and self.unsaved:
            keys = np.frombuffer(b"".join(self.unsaved), np.uint8).reshape(len(self.unsaved), -1)
            rows = np.stack([self.rows[key] for key in self.unsaved])
            name = blake2b(keys.tobytes(), digest_size=16).hexdigest()
            path = self.folder / f"{name}.npz"
            with suppress(DataError), atomic_path(path) as temporary, temporary.open("wb") as file:
                np.savez(file, keys=keys, features=rows)
        self.unsaved = []


class MaskedPatches(nn.Module):
    """Masked patch prediction: self-supervised pre-training (appendix B.1.2 of the paper).

    Half of the patch embeddings are corrupted, and the model predicts the corrupted patches from
    the rest: 80 % are replaced by a learned mask embedding, 10 % by the embedding of a random other
    patch of the batch, and 10 % are kept. All random numbers come from torch's generator. The
    model's head is not used; its metadata provide the normalization from which colors are
    recovered. Shapes: N = h * w patches, M of them corrupted, D width, S cells of a patch.
    """

    def __init__(self, model: Model, settings: MaskedSettings, seed: int = 0) -> None:
        super().__init__()
        if not isinstance(model, VisionTransformer):
            raise ConfigError(
                "objective='masked-patches' needs a Vision Transformer, and the model is a "
                f"{type(model).__name__}; use another model, or objective='classify'"
            )
        config = model.config
        if config.patch_dropout:
            raise ConfigError(
                f"patch_dropout={config.patch_dropout} drops patches that "
                "objective='masked-patches' must predict; use patch_dropout=0"
            )
        self.model = model
        self.share = settings.share
        self.preprocessing = get_metadata(model).preprocessing
        self.side = COLOR_CELLS[settings.predict]
        if self.side is not None and config.channels > MAX_CHANNELS:
            raise ConfigError(
                f"masked.predict needs colors, and {config.channels} channels have "
                f"{LEVELS}^{config.channels} of them; use masked.predict='pixels'"
            )
        outputs = config.channels * config.stride[0] * config.stride[1]
        if self.side is not None:
            outputs = self.side**2 * LEVELS**config.channels
        rng = torch.Generator().manual_seed(seed)
        self.mask = nn.Parameter(torch.empty(config.width).normal_(std=MASK_STD, generator=rng))
        self.head = nn.Linear(config.width, outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        for part in (model.pool, model.representation, model.head, model.distillation_head):
            if part is not None:  # unused: DDP would wait for their gradients
                part.requires_grad_(False)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the loss over the corrupted patches of a batch; `targets` are ignored."""
        model = self.model
        patches = model.embed_patches(images)  # (B, h, w, D)
        masked = random_patches(patches.flatten(1, 2), self.share)  # (B, M)
        corrupted = corrupt(patches.flatten(1, 2), masked, self.mask).view_as(patches)
        tokens = model.encoder(*model.assemble_tokens(corrupted))  # (B, prefix + N, D)
        features = gather(tokens[:, model.config.num_prefix :], masked)  # (B, M, D)
        return self.loss(self.head(features), gather(self.targets(images), masked))

    def loss(self, predicted: Tensor, targets: Tensor) -> Tensor:
        if self.side is None:
            return F.mse_loss(predicted.float(), targets)
        cells = predicted.float().unflatten(-1, (self.side**2, -1))  # (B, M, S, 8^C)
        return F.cross_entropy(cells.flatten(0, 2), targets.flatten())

    def targets(self, images: Tensor) -> Tensor:
        """Return normalized pixels (B, N, C * P * P), or color indices of the cells (B, N, S).

        A color index has base 8 over the channels.
        """
        stride = self.model.config.stride
        if self.side is None:
            cells = patchify(images.float(), stride)  # (B, h, w, C, P, P)
            return cells.flatten(3).flatten(1, 2)
        mean = torch.tensor(self.preprocessing.mean, device=images.device)[:, None, None]
        std = torch.tensor(self.preprocessing.std, device=images.device)[:, None, None]
        cells = cell_means(images.float() * std + mean, stride, self.side)  # (B, N, S, C)
        levels = (cells * LEVELS).floor().long().clamp(0, LEVELS - 1)
        index = torch.zeros_like(levels[..., 0])
        for level in levels.unbind(-1):
            index = LEVELS * index + level
        return index


def random_patches(patches: Tensor, share: float) -> Tensor:
    """Return the indices of the patches to corrupt, the same number in each image: (B, M)."""
    batch, count = patches.shape[:2]
    corrupted = max(1, round(share * count))
    return torch.rand(batch, count, device=patches.device).argsort(dim=1)[:, :corrupted]


def corrupt(patches: Tensor, indices: Tensor, mask: Tensor) -> Tensor:
    """Return patches (B, N, D) where those at `indices` are masked, swapped or kept."""
    batch, count = patches.shape[:2]
    draw = torch.rand(indices.shape, device=indices.device)[..., None]  # (B, M, 1)
    # A step from each to another patch of the batch, by their indices among all B * N.
    own = count * torch.arange(batch, device=indices.device)[:, None] + indices  # (B, M)
    step = torch.randint(1, max(2, batch * count), indices.shape, device=indices.device)
    other = patches.flatten(0, 1)[(own + step) % (batch * count)]  # (B, M, D)
    replaced = torch.where(draw < MASKED + SWAPPED, other, gather(patches, indices))
    replaced = torch.where(draw < MASKED, mask.to(patches.dtype), replaced)
    return patches.scatter(1, indices[..., None].expand_as(replaced), replaced)


def gather(patches: Tensor, indices: Tensor) -> Tensor:
    """Select (B, M, …) of (B, N, …) at indices (B, M)."""
    return patches.gather(1, indices[..., None].expand(-1, -1, patches.shape[2]))


def cell_means(images: Tensor, stride: tuple[int, int], side: int) -> Tensor:
    """Downsample each patch to side x side cells: (B, N, S, C)."""
    height, width = (images.shape[2] // stride[0], images.shape[3] // stride[1])
    means = F.adaptive_avg_pool2d(images, (side * height, side * width))  # cells end with patches
    cells = patchify(means, (side, side)).movedim(3, 5)  # (B, h, w, side, side, C)
    return cells.flatten(3, 4).flatten(1, 2)


def patchify(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Split images (B, C, H, W) into patches of pixels: (B, h, w, C, P, P)."""
    height, width = patch
    patches = images.unfold(2, height, height).unfold(3, width, width)  # (B, C, h, w, P, P)
    return patches.movedim(1, 3)


Objective = Classification | Distillation | FeatureDistillation | MaskedPatches


def make_objective(
    model: Model,
    settings: Settings,
    *,
    teacher: Model | None = None,
    class_counts: np.ndarray | None = None,
) -> Objective:
    """Create the objective of complete settings (see `auto_config.py`)."""
    if settings.objective == "masked-patches":
        if teacher is not None or settings.loss.teacher:
            raise ConfigError(
                f"loss.teacher={settings.loss.teacher!r} needs classes, and "
                "objective='masked-patches' has none; leave one of them out"
            )
        return MaskedPatches(model, settings.masked, settings.seed)
    if teacher is None:
        assert not settings.loss.teacher, "the caller loads the teacher"
        return Classification(model, settings.loss, log_prior(class_counts, settings.loss))
    if settings.loss.teaching == "features":
        return FeatureDistillation(
            model, settings.loss, Teacher(teacher, model, same_classes=False)
        )
    return Distillation(model, settings.loss, teacher)


def log_prior(class_counts: np.ndarray | None, loss: LossSettings) -> Tensor | None:
    """Return the log class frequencies for logit adjustment (Menon et al. 2021, arXiv:2007.07314).

    A model trained with them added to its logits does not favor a class for being frequent. Tiny
    classes count as larger ones: after a large adjustment, a class that was never learned would
    take images from all others.
    """
    if class_counts is None or not loss.logit_adjustment:
        return None
    counts = torch.from_numpy(class_counts).float().clamp(min=MIN_CLASS_IMAGES)
    return loss.logit_adjustment * (counts / counts.sum()).log()


# Losses: logits (B, K) and targets → the mean over the images of a batch, in float32 at least.


def label_loss(logits: Tensor, targets: Tensor, loss: LossSettings) -> Tensor:
    """Cross-entropy, or binary cross-entropy summed over the classes as in the authors' code."""
    logits = at_least_float32(logits)
    targets = targets.to(logits.dtype) if targets.ndim == 2 else targets
    if loss.kind == "softmax":
        return F.cross_entropy(logits, targets, label_smoothing=loss.label_smoothing)
    assert loss.kind == "sigmoid", "set by auto_config"
    if targets.ndim == 1:
        targets = torch.zeros_like(logits).scatter_(1, targets[:, None], 1.0)
    if smoothing := loss.label_smoothing:
        targets = targets * (1 - smoothing) + smoothing / logits.shape[1]
    summed = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
    return summed / len(logits)


def soft_distillation(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """KL(teacher || student) T^2, equation 2 of Touvron et al. 2021, averaged over images.

    T^2 compensates for the gradients that the temperature makes smaller. (DeiT's code also divides
    by K, which makes the teacher negligible for many classes.)
    """
    student = F.log_softmax(at_least_float32(logits) / temperature, dim=1)
    teacher = F.log_softmax(at_least_float32(teacher_logits) / temperature, dim=1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def hard_distillation(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Cross-entropy with the teacher's argmax (equation 3 of Touvron et al. 2021)."""
    return F.cross_entropy(at_least_float32(logits), teacher_logits.argmax(dim=1))


def at_least_float32(logits: Tensor) -> Tensor:
    """Half precision is too coarse for sums over thousands of classes."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
