"""What a training step makes small: a loss around a model, as a module.

An objective holds its model as `model`; `forward(images, targets)` is the loss of one micro-batch,
and all that several processes must agree on. Images are normalized floats (B, C, H, W), targets
class numbers (B,) or, for mixed pictures and several labels, floats (B, K). `logits(images)` is
what evaluation looks at; masked patches (`masked.py`) have none.

Shapes: B pictures, C channels, H x W pixels, K classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.checkpoints.metadata import get_metadata
from vitrail.errors import CheckpointError, ConfigError
from vitrail.models.build import Model
from vitrail.models.config import pair
from vitrail.models.vit import VisionTransformer
from vitrail.training.losses import LOSSES, hard_teaching, soft_teaching
from vitrail.training.masked import MaskedPatches
from vitrail.training.settings import LossSettings, Settings


class Classification(nn.Module):
    """Name what a picture shows."""

    def __init__(self, model: Model, loss: LossSettings) -> None:
        super().__init__()
        check_head(model)
        self.model = model
        self.loss = loss

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        return label_loss(self.logits(images), targets, self.loss)

    def logits(self, images: Tensor) -> Tensor:
        return self.model(images)  # (B, K)


class Distillation(nn.Module):
    """Name what a picture shows, and say what a teacher says.

    The loss is (1 - w) * labels + w * teacher with w = `loss.teacher_weight`. A model with a
    distillation token learns the labels with its class token and the teacher with that one
    (DeiT, Touvron et al. 2021, arXiv:2012.12877); any other learns both with the same logits.
    """

    def __init__(self, model: Model, loss: LossSettings, teacher: Model) -> None:
        super().__init__()
        check_head(model)
        self.model = model
        self.loss = loss
        self.teacher = Teacher(teacher, model)  # no module: not saved, not trained, not averaged

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        own, taught = self.opinions(images)
        labels = label_loss(own, targets, self.loss)
        teaching = teaching_loss(taught, self.teacher(images), self.loss)
        weight = self.loss.teacher_weight
        return (1 - weight) * labels + weight * teaching

    def opinions(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The logits that learn the labels, and those that learn the teacher's."""
        if isinstance(self.model, VisionTransformer) and self.model.config.distillation:
            return self.model.distillation_logits(images)
        logits = self.model(images)
        return logits, logits

    def logits(self, images: Tensor) -> Tensor:
        return self.model(images)  # (B, K), the mean of both where there are two


class Teacher:
    """A model that does not learn, asked about pictures that were made ready for its student.

    It is no module, so that nothing that saves, trains or averages modules finds it; it follows
    the pictures to their device.
    """

    def __init__(self, model: Model, student: Model) -> None:
        check_teacher(model, student)
        self.model = model.eval().requires_grad_(False)
        self.size = pair(model.config.image_size)
        here, there = get_metadata(student).preprocessing, get_metadata(model).preprocessing
        of_channels = list(zip(here.mean, here.std, there.mean, there.std, strict=True))
        # (pixel - mean) / std of one model from that of the other
        self.scale = [std / its_std for _, std, _, its_std in of_channels]
        self.shift = [(mean - its) / its_std for mean, _, its, its_std in of_channels]

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """The teacher's logits (B, K)."""
        if next(self.model.parameters()).device != images.device:
            self.model.to(images.device)
        return self.model(self.pictures(images))

    def pictures(self, images: Tensor) -> Tensor:
        """The student's pictures in the teacher's size and colors."""
        if images.shape[-2:] != self.size:
            images = F.interpolate(images, self.size, mode="bilinear", antialias=True)
        if self.scale == [1] * len(self.scale) and self.shift == [0] * len(self.shift):
            return images
        scale = torch.tensor(self.scale, device=images.device)[:, None, None]
        shift = torch.tensor(self.shift, device=images.device)[:, None, None]
        return images * scale + shift


Objective = Classification | Distillation | MaskedPatches


def make_objective(model: Model, settings: Settings, *, teacher: Model | None = None) -> Objective:
    """The objective that the settings ask for, once `choices.py` has decided on all of them."""
    if settings.objective == "masked-patches":
        if teacher is not None or settings.loss.teacher:
            raise ConfigError(
                f"loss.teacher={settings.loss.teacher!r} teaches classes, and "
                "objective='masked-patches' learns none; leave one of them out"
            )
        return MaskedPatches(model, settings.masked, settings.seed)
    if teacher is None:
        assert not settings.loss.teacher, "the teacher is loaded before"
        return Classification(model, settings.loss)
    return Distillation(model, settings.loss, teacher)


def label_loss(logits: Tensor, targets: Tensor, loss: LossSettings) -> Tensor:
    """How far the logits are from the labels."""
    assert loss.kind is not None, "the kind of loss is chosen before"
    return LOSSES[loss.kind](logits, targets, loss.label_smoothing)


def teaching_loss(logits: Tensor, teacher_logits: Tensor, loss: LossSettings) -> Tensor:
    """How far the logits are from the teacher's."""
    if loss.teaching == "soft":
        return soft_teaching(logits, teacher_logits, loss.temperature)
    return hard_teaching(logits, teacher_logits)


def check_head(model: Model) -> None:
    if not model.config.num_classes:
        raise ConfigError(
            "the model has no head (num_classes=0), so it cannot learn classes; "
            "give it one, or use objective='masked-patches'"
        )


def check_teacher(teacher: Model, student: Model) -> None:
    """Refuse a teacher that talks of other classes or cannot see the student's pictures."""
    its, own = teacher.config, student.config
    if its.num_classes != own.num_classes:
        what = f"{its.num_classes} classes" if its.num_classes else "no classes (it has no head)"
        raise CheckpointError(
            f"the teacher knows {what}, the student learns {own.num_classes}; "
            "take a teacher that was trained on the same classes"
        )
    names = zip(get_metadata(teacher).class_names, get_metadata(student).class_names, strict=False)
    for number, (theirs, ours) in enumerate(names):  # none where nobody knows the names
        if theirs != ours:
            raise CheckpointError(
                f"the teacher calls class {number} {theirs!r}, the student {ours!r}; "
                "take a teacher that was trained on the same classes in the same order"
            )
    if its.channels != own.channels:
        raise CheckpointError(
            f"the teacher reads pictures of {its.channels} channels, the student of "
            f"{own.channels}; load the teacher with channels={own.channels}"
        )
