"""Objectives: classification, distillation, masked patches; and their losses."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from vitrail import CheckpointError, ConfigError, Metadata, Preprocessing, VisionTransformer, create
from vitrail.data.preprocessing import preset
from vitrail.data.transforms import normalize
from vitrail.training.config import LossSettings, MaskedSettings, Settings
from vitrail.training.objectives import (
    Classification,
    Distillation,
    MaskedPatches,
    hard_distillation,
    label_loss,
    make_objective,
    soft_distillation,
)

KINDS = ("softmax", "sigmoid")
SOFTMAX = LossSettings(kind="softmax")
LOGITS = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)) * 3
LABELS = torch.tensor([0, 3, 1, 1, 2])
ONE_HOT = F.one_hot(LABELS, 4).float()
MIXED = 0.7 * ONE_HOT + 0.3 * ONE_HOT.flip(0)
SEVERAL = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1], [0, 1, 0, 1]])


def random_model(config, seed=0, **facts):
    torch.manual_seed(seed)
    model = VisionTransformer(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    if facts:
        size = (config.image_size, config.image_size)
        model.metadata = Metadata(**{"preprocessing": preset("google", size)} | facts)
    return model


def batch():
    torch.manual_seed(7)
    return torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 1])


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("soft", [False, True])
def test_classification_loss(tiny, kind, soft):
    model, (images, labels) = random_model(tiny), batch()
    targets = F.one_hot(labels, 3).float() if soft else labels
    objective = Classification(model, LossSettings(kind=kind, label_smoothing=0.1))
    assert torch.equal(objective.logits(images), model(images))
    expected = loss_of(kind, model(images), targets, 0.1)
    torch.testing.assert_close(objective(images, targets), expected)
    assert objective(images, targets).shape == ()


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("teaching", ["soft", "hard"])
def test_distillation_without_token_shares_logits(tiny, teaching, weight):
    student, teacher = random_model(tiny), random_model(tiny, seed=1).eval()
    images, labels = batch()
    loss = LossSettings(kind="softmax", teaching=teaching, teacher_weight=weight, temperature=2.0)
    logits, teacher_logits = student(images), teacher(images)
    teaching_loss = hard_distillation(logits, teacher_logits)
    if teaching == "soft":
        teaching_loss = soft_distillation(logits, teacher_logits, 2.0)
    expected = (1 - weight) * F.cross_entropy(logits, labels) + weight * teaching_loss
    objective = Distillation(student, loss, teacher)
    torch.testing.assert_close(objective(images, labels), expected)
    assert torch.equal(objective.logits(images), logits)


def test_distillation_token_learns_the_teacher(tiny):
    student, teacher = random_model(tiny.change(distillation=True)), random_model(tiny, seed=1)
    images, labels = batch()
    own, teaching_loss = student.distillation_logits(images)
    expected = 0.8 * F.cross_entropy(own, labels)
    expected += 0.2 * hard_distillation(teaching_loss, teacher(images))
    objective = Distillation(student, LossSettings(kind="softmax", teacher_weight=0.2), teacher)
    torch.testing.assert_close(objective(images, labels), expected)
    torch.testing.assert_close(objective.logits(images), (own + teaching_loss) / 2)


def test_teacher_is_not_a_submodule(tiny):
    student, teacher = random_model(tiny), random_model(tiny.change(dropout=0.5), seed=1).train()
    before = copy.deepcopy(teacher.state_dict())
    objective = Distillation(student, SOFTMAX, teacher).train()
    names = {f"model.{name}" for name in student.state_dict()}
    assert set(objective.state_dict()) == names == set(dict(objective.named_parameters()))
    assert not any(module is teacher for module in objective.modules())
    assert not teacher.training  # though its student trains
    images, labels = batch()
    objective(images, labels).backward()
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())


def test_teacher_gets_its_own_device_size_and_normalization(tiny):
    odd = Preprocessing(size=(8, 8), mean=(0.1, 0.5, 0.9), std=(0.2, 0.3, 1.0))
    student, teacher = random_model(tiny), random_model(tiny, seed=1, preprocessing=odd)
    objective = Distillation(student, SOFTMAX, teacher)
    pixels = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    images = normalize(pixels, preset("google", (8, 8)))
    torch.testing.assert_close(objective.teacher.preprocess(images), normalize(pixels, odd))
    torch.testing.assert_close(objective.teacher(images), teacher(normalize(pixels, odd)))
    teacher = random_model(tiny.change(image_size=16), seed=1)
    objective = Distillation(student, SOFTMAX, teacher)
    for size in (8, 12, 20):  # progressive resizing
        images = torch.randn(2, 3, size, size)
        resized = F.interpolate(images, (16, 16), mode="bilinear", antialias=True)
        torch.testing.assert_close(objective.teacher(images), teacher(resized))
    images = torch.randn(2, 3, 16, 16)
    assert objective.teacher.preprocess(images) is images
    objective.to("meta")
    images, labels = batch()
    assert objective(images.to("meta"), labels.to("meta")).is_meta
    assert {p.device.type for p in teacher.parameters()} == {"meta"}


def test_teacher_of_another_family(tiny):
    teacher = create("BiT-R50x1", blocks=(1,), num_classes=3, image_size=32)
    images, labels = batch()
    assert Distillation(random_model(tiny), SOFTMAX, teacher)(images, labels).isfinite()
    student = create("Mixer-S/16", depth=1, width=8, image_size=16, num_classes=3)
    objective = Distillation(student, SOFTMAX, random_model(tiny))
    assert objective(torch.randn(4, 3, 16, 16), labels).isfinite()


@pytest.mark.parametrize(
    ("changes", "names", "message"),
    [
        ({"num_classes": 5}, (), "the teacher has 5 classes, the student 3 classes; use a teacher"),
        ({"num_classes": 0}, (), "the teacher has no head"),
        ({"channels": 1}, (), "the teacher takes images of 1 channels.* load .* with channels=3"),
        ({}, "acb", "class 1 is 'c' for the teacher and 'b' for the student; use"),
        ({}, (), None),  # unknown names are accepted
        ({}, "abc", None),
    ],
)
def test_incompatible_teacher_raises(tiny, changes, names, message):
    student = random_model(tiny, class_names=tuple("abc"))
    teacher = random_model(tiny.change(**changes), class_names=tuple(names))
    with nullcontext() if message is None else pytest.raises(CheckpointError, match=message):
        Distillation(student, SOFTMAX, teacher)


def test_model_without_head_raises(tiny):
    model = random_model(tiny.change(num_classes=0))
    for kind, teacher in ((Classification, []), (Distillation, [random_model(tiny)])):
        with pytest.raises(ConfigError, match=r"no head \(num_classes=0\).*='masked-patches'"):
            kind(model, SOFTMAX, *teacher)


def test_make_objective(tiny):
    model, teacher = random_model(tiny), random_model(tiny, seed=1)
    plain = Settings(loss=SOFTMAX)
    assert type(make_objective(model, plain)) is Classification
    teaching_loss = Settings(loss=LossSettings(kind="softmax", teacher="a folder"))
    assert type(make_objective(model, teaching_loss, teacher=teacher)) is Distillation
    masked = Settings(objective="masked-patches", masked=MaskedSettings(predict="pixels"))
    headless = random_model(tiny.change(num_classes=0))
    made = make_objective(headless, masked)
    assert type(made) is MaskedPatches
    assert made.head.out_features == 3 * 4 * 4
    with pytest.raises(ConfigError, match="needs classes, and objective='masked-patches'"):
        make_objective(headless, masked, teacher=teacher)


@pytest.mark.parametrize("distilled", [False, True])
def test_every_student_weight_gets_a_gradient(tiny, distilled):
    student = random_model(tiny.change(distillation=distilled, registers=2))
    images, labels = batch()
    taught = Distillation(student, SOFTMAX, random_model(tiny, seed=1))
    for objective in (Classification(student, SOFTMAX), taught):
        student.zero_grad()
        objective(images, labels).backward()
        assert all(p.grad is not None and p.grad.any() for p in objective.parameters())


def loss_of(kind, logits, targets, smoothing):
    return label_loss(logits, targets, LossSettings(kind=kind, label_smoothing=smoothing))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_match_torch_and_the_formula(smoothing):
    for targets in (LABELS, MIXED):
        expected = F.cross_entropy(LOGITS, targets, label_smoothing=smoothing)
        assert torch.equal(loss_of("softmax", LOGITS, targets, smoothing), expected)
    for targets in (ONE_HOT, MIXED, SEVERAL):  # summed over classes, averaged over images
        smooth = targets * (1 - smoothing) + smoothing / 4
        chance = LOGITS.double().sigmoid()
        each = -(smooth * chance.log() + (1 - smooth) * (1 - chance).log())
        loss = loss_of("sigmoid", LOGITS, targets, smoothing)
        torch.testing.assert_close(loss.double(), each.sum(dim=1).mean(), atol=1e-6, rtol=1e-6)
    for kind in KINDS:
        by_index, one_hot = (loss_of(kind, LOGITS, x, smoothing) for x in (LABELS, ONE_HOT))
        torch.testing.assert_close(by_index, one_hot)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_and_extreme_logits(kind):
    half = LOGITS.bfloat16()
    for targets in (LABELS, MIXED.bfloat16()):
        loss = loss_of(kind, half, targets, 0.1)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, loss_of(kind, half.float(), targets.clone(), 0.1))
    logits = torch.tensor([[1e4, -1e4, 0.0, 3.0]], requires_grad=True)
    loss = loss_of(kind, logits, torch.tensor([1]), 0.0)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


def test_distillation_formulas():
    teacher = LOGITS.roll(1, 0)
    p, q = (teacher.double() / 3).softmax(1), (LOGITS.double() / 3).softmax(1)
    expected = 9 * (p * (p / q).log()).sum(dim=1).mean()
    loss = soft_distillation(LOGITS, teacher, 3.0)
    torch.testing.assert_close(loss.double(), expected, atol=1e-6, rtol=1e-6)
    assert soft_distillation(LOGITS, LOGITS + 5, 2.0).item() == pytest.approx(0, abs=1e-6)
    expected = F.cross_entropy(LOGITS, teacher.argmax(1))
    assert torch.equal(hard_distillation(LOGITS, teacher), expected)
