"""What a step makes small: labels alone, labels and a teacher, or masked patches."""

import copy

import pytest
import torch
import torch.nn.functional as F

from vitrail import CheckpointError, ConfigError, Metadata, Preprocessing, VisionTransformer, create
from vitrail.data.preprocessing import preset
from vitrail.data.transforms import normalize
from vitrail.training.losses import LOSSES, hard_teaching, soft_teaching
from vitrail.training.masked import MaskedPatches
from vitrail.training.objectives import Classification, Distillation, make_objective
from vitrail.training.settings import LossSettings, MaskedSettings, Settings

SOFTMAX = LossSettings(kind="softmax")


def awake(config, seed=0, **facts):
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
def test_classification_is_the_loss_of_the_logits(tiny, kind, soft):
    model, (images, labels) = awake(tiny), batch()
    targets = F.one_hot(labels, 3).float() if soft else labels
    objective = Classification(model, LossSettings(kind=kind, label_smoothing=0.1))
    assert torch.equal(objective.logits(images), model(images))
    expected = LOSSES[kind](model(images), targets, 0.1)
    torch.testing.assert_close(objective(images, targets), expected)
    assert objective(images, targets).shape == ()


def test_softmax_classification_is_cross_entropy(tiny):
    model, (images, labels) = awake(tiny), batch()
    loss = Classification(model, SOFTMAX)(images, labels)
    torch.testing.assert_close(loss, F.cross_entropy(model(images), labels))


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("teaching", ["soft", "hard"])
def test_a_plain_student_learns_labels_and_teacher_with_the_same_logits(tiny, teaching, weight):
    student, teacher, (images, labels) = awake(tiny), awake(tiny, seed=1).eval(), batch()
    loss = LossSettings(kind="softmax", teaching=teaching, teacher_weight=weight, temperature=2.0)
    logits, told = student(images), teacher(images)
    taught = soft_teaching(logits, told, 2.0) if teaching == "soft" else hard_teaching(logits, told)
    expected = (1 - weight) * F.cross_entropy(logits, labels) + weight * taught
    objective = Distillation(student, loss, teacher)
    torch.testing.assert_close(objective(images, labels), expected)
    assert torch.equal(objective.logits(images), logits)


def test_a_distillation_token_learns_the_teacher_and_the_class_token_the_labels(tiny):
    student, teacher = awake(tiny.change(distillation=True)), awake(tiny, seed=1)
    images, labels = batch()
    own, taught = student.distillation_logits(images)
    expected = 0.8 * F.cross_entropy(own, labels) + 0.2 * hard_teaching(taught, teacher(images))
    objective = Distillation(student, LossSettings(kind="softmax", teacher_weight=0.2), teacher)
    torch.testing.assert_close(objective(images, labels), expected)
    torch.testing.assert_close(objective.logits(images), (own + taught) / 2)


def test_the_teacher_is_not_seen_by_what_trains_and_saves(tiny):
    student, teacher = awake(tiny), awake(tiny.change(dropout=0.5), seed=1).train()
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


def test_the_teacher_follows_the_pictures_to_their_device(tiny):
    objective = Distillation(awake(tiny), SOFTMAX, awake(tiny, seed=1)).to("meta")
    images, labels = batch()
    assert objective(images.to("meta"), labels.to("meta")).is_meta
    assert {p.device.type for p in objective.teacher.model.parameters()} == {"meta"}


def test_the_teacher_sees_its_own_normalization(tiny):
    odd = Preprocessing(size=(8, 8), mean=(0.1, 0.5, 0.9), std=(0.2, 0.3, 1.0))
    student, teacher = awake(tiny), awake(tiny, seed=1, preprocessing=odd)
    objective = Distillation(student, SOFTMAX, teacher)
    pixels = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    images = normalize(pixels, preset("google", (8, 8)))
    torch.testing.assert_close(objective.teacher.pictures(images), normalize(pixels, odd))
    torch.testing.assert_close(objective.teacher(images), teacher(normalize(pixels, odd)))


def test_the_teacher_sees_its_own_size(tiny):
    student, teacher = awake(tiny), awake(tiny.change(image_size=16), seed=1)
    objective = Distillation(student, SOFTMAX, teacher)
    for size in (8, 12, 20):  # a run may begin with smaller pictures
        images = torch.randn(2, 3, size, size)
        resized = F.interpolate(images, (16, 16), mode="bilinear", antialias=True)
        torch.testing.assert_close(objective.teacher(images), teacher(resized))
    images = torch.randn(2, 3, 16, 16)
    assert objective.teacher.pictures(images) is images


def test_a_teacher_may_be_of_another_family(tiny):
    teacher = create("BiT-R50x1", blocks=(1,), num_classes=3, image_size=32)
    images, labels = batch()
    assert Distillation(awake(tiny), SOFTMAX, teacher)(images, labels).isfinite()
    student = create("Mixer-S/16", depth=1, width=8, image_size=16, num_classes=3)
    objective = Distillation(student, SOFTMAX, awake(tiny))
    assert objective(torch.randn(4, 3, 16, 16), labels).isfinite()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_classes": 5}, "the teacher knows 5 classes, the student learns 3; take a teacher"),
        ({"num_classes": 0}, "the teacher knows no classes"),
        ({"channels": 1}, "the teacher reads pictures of 1 channels.* load .* with channels=3"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(tiny, changes, message):
    with pytest.raises(CheckpointError, match=message):
        Distillation(awake(tiny), SOFTMAX, awake(tiny.change(**changes)))


def test_a_teacher_with_other_class_names_is_refused(tiny):
    student = awake(tiny, class_names=("ant", "bee", "cat"))
    teacher = awake(tiny, class_names=("ant", "cat", "bee"))
    with pytest.raises(CheckpointError, match="calls class 1 'cat', the student 'bee'; take"):
        Distillation(student, SOFTMAX, teacher)
    Distillation(student, SOFTMAX, awake(tiny))  # names that nobody knows are no other names
    Distillation(student, SOFTMAX, awake(tiny, class_names=("ant", "bee", "cat")))


def test_a_model_without_a_head_learns_no_classes(tiny):
    model = awake(tiny.change(num_classes=0))
    for make in (
        lambda: Classification(model, SOFTMAX),
        lambda: Distillation(model, SOFTMAX, awake(tiny)),
    ):
        with pytest.raises(ConfigError, match=r"no head \(num_classes=0\).*='masked-patches'"):
            make()


def test_settings_choose_the_objective(tiny):
    model, teacher = awake(tiny), awake(tiny, seed=1)
    plain = Settings(loss=SOFTMAX)
    assert type(make_objective(model, plain)) is Classification
    taught = Settings(loss=LossSettings(kind="softmax", teacher="a folder"))
    assert type(make_objective(model, taught, teacher=teacher)) is Distillation
    masked = Settings(objective="masked-patches", masked=MaskedSettings(predict="pixels"))
    headless = awake(tiny.change(num_classes=0))
    made = make_objective(headless, masked)
    assert type(made) is MaskedPatches
    assert made.head.out_features == 3 * 4 * 4
    with pytest.raises(ConfigError, match="teaches classes, and objective='masked-patches'"):
        make_objective(headless, masked, teacher=teacher)


@pytest.mark.parametrize("distilled", [False, True])
def test_every_weight_of_the_student_gets_a_gradient(tiny, distilled):
    student = awake(tiny.change(distillation=distilled, registers=2))
    images, labels = batch()
    for objective in (
        Classification(student, SOFTMAX),
        Distillation(student, SOFTMAX, awake(tiny, seed=1)),
    ):
        student.zero_grad()
        objective(images, labels).backward()
        assert all(p.grad is not None and p.grad.any() for p in objective.parameters())


def test_autocast_leaves_the_loss_exact(tiny):
    objective = Distillation(awake(tiny), SOFTMAX, awake(tiny, seed=1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = objective(*batch())
    assert loss.dtype == torch.float32
    loss.backward()
