"""Distillation of a teacher's features, which may have other classes than the student."""

from dataclasses import replace

import pytest
import torch

import vitrail
from tiny_models import awake
from tiny_runs import TINY, equal, tiny_run, weights
from vitrail import ConfigError
from vitrail.data.preprocessing import Augmentation, Mixing
from vitrail.models.config import VitConfig
from vitrail.training.config import LossSettings, MachineSettings, OptimSettings
from vitrail.training.objectives import FeatureDistillation, Teacher, TeacherFeatures

pytestmark = pytest.mark.slow

TEACHER = VitConfig(
    image_size=16, patch_size=8, width=24, mlp_width=32, heads=2, depth=1, num_classes=5
)
VIEWS = Augmentation(crop="padded", padding=1, flip=True, views=2)


@pytest.fixture
def teacher(tmp_path):
    vitrail.save(awake(TEACHER), tmp_path / "teacher")
    return LossSettings(teacher=str(tmp_path / "teacher"), teaching="features")


def test_loss_is_zero_if_the_student_equals_its_teacher():
    model = awake(replace(TEACHER, num_classes=3))
    loss = LossSettings(kind="softmax", teaching="features", teacher_weight=1.0)
    objective = FeatureDistillation(model, loss, Teacher(model, model))
    torch.nn.init.eye_(objective.projection.weight)
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 1])
    targets = torch.cat([labels[:, None], objective.teacher.features(images)], dim=1)
    assert objective(images, targets).item() == pytest.approx(0, abs=1e-6)
    torch.nn.init.zeros_(objective.projection.weight)
    assert objective(images, targets).item() > 0.9  # the relative error is 1
    objective.loss = replace(loss, teacher_weight=0.0)
    expected = torch.nn.functional.cross_entropy(model(images), labels)
    torch.testing.assert_close(objective(images, targets), expected)


def test_both_heads_of_a_distillation_token_learn_the_labels():
    model = awake(replace(TEACHER, num_classes=3, distillation=True))
    loss = LossSettings(kind="softmax", teaching="features", teacher_weight=0.0)
    teacher = Teacher(awake(TEACHER), model, same_classes=False)
    objective = FeatureDistillation(model, loss, teacher)
    images, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 1])
    targets = torch.cat([labels[:, None], teacher.features(images)], dim=1)
    value = objective(images, targets)
    torch.testing.assert_close(value, torch.nn.functional.cross_entropy(model(images), labels))
    value.backward()
    for head in (model.head, model.distillation_head):
        assert head.weight.grad.abs().sum() > 0


def test_teacher_sees_each_view_once(colors, teacher, tmp_path, monkeypatch):
    seen = []
    features = Teacher.features

    def count(self, images):
        seen.append(len(images))
        return features(self, images)

    monkeypatch.setattr(Teacher, "features", count)
    monkeypatch.setattr(TeacherFeatures, "PART", 20)
    options = {"steps": 30, "loss": teacher, "augment": VIEWS, "save_minutes": 1e6}
    tiny_run(colors, tmp_path / "run", **options)  # 6 epochs of 30 images
    assert sum(seen) <= 60
    first, seen[:] = sum(seen), []
    again = {**options, "model": replace(TINY, depth=1)}
    tiny_run(colors, tmp_path / "again", **again)  # another student reads the same cache
    assert first > 40
    assert not seen
    (part, *_) = (tmp_path / "cache/teachers").rglob("*.npz")
    part.write_bytes(b"damaged")
    tiny_run(colors, tmp_path / "third", **options)
    assert sum(seen) >= 20
    assert equal(weights(tmp_path / "run"), weights(tmp_path / "third"))


def test_cache_depends_on_the_numerics_of_the_teacher(colors):
    teachers = [awake(TEACHER.change(numerics=name)) for name in ("google", "timm")]
    caches = [TeacherFeatures(Teacher(model, model), cached=True) for model in teachers]
    assert caches[0].folder != caches[1].folder


def test_resumed_run_is_bit_identical(colors, teacher, tmp_path):
    options = {"loss": teacher, "augment": VIEWS, "balance": 1.0, "steps": 12}
    tiny_run(colors, tmp_path / "whole", **options)

    class Stop(vitrail.Callback):
        def on_step(self, row):
            if row["step"] == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_run(colors, tmp_path / "parts", callback=Stop(), save_minutes=0.0, **options)
    tiny_run(colors, tmp_path / "parts", resume=True, **options)
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_shards_of_a_batch_give_the_same_run(colors, teacher, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrail.training.cpu_parallel.MIN_SHARD", 1)
    sgd = OptimSettings(kind="sgd", learning_rate=0.01)  # Adam amplifies rounding
    options = {"loss": teacher, "augment": VIEWS, "optim": sgd}
    for parts in (1, 2):
        tiny_run(colors, tmp_path / f"{parts}", machine=MachineSettings(parts=parts), **options)
    one, two = weights(tmp_path / "1"), weights(tmp_path / "2")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-5, rtol=1e-4)


def test_teacher_runs_at_a_given_size(colors, teacher, tmp_path, monkeypatch):
    shapes = set()
    preprocess = Teacher.preprocess

    def record(self, images):
        shapes.add(tuple(preprocess(self, images).shape[-2:]))
        return preprocess(self, images)

    monkeypatch.setattr(Teacher, "preprocess", record)
    tiny_run(colors, tmp_path / "run", steps=2, loss=replace(teacher, teacher_size=24))
    assert shapes == {(24, 24)}


def test_teacher_sees_full_size_images_while_the_student_grows(
    colors, teacher, tmp_path, monkeypatch
):
    sizes, features, forward = {"teacher": [], "student": []}, Teacher.features, None

    def teach(self, images):
        sizes["teacher"] += [images.shape[-1]] * len(images)
        return features(self, images)

    def learn(self, images, targets):
        sizes["student"].append(images.shape[-1])
        return forward(self, images, targets)

    forward = FeatureDistillation.forward
    monkeypatch.setattr(Teacher, "features", teach)
    monkeypatch.setattr(FeatureDistillation, "forward", learn)
    options = {"image_sizes": ((0.0, 4), (0.5, 8)), "machine": MachineSettings(parts=1)}
    tiny_run(colors, tmp_path / "run", steps=20, loss=teacher, augment=VIEWS, **options)
    assert sizes["student"] == [4] * 10 + [8] * 10
    assert set(sizes["teacher"]) == {8}
    assert len(sizes["teacher"]) <= 60  # once for each view of 30 images, whatever the size


def test_teacher_is_on_the_device_before_its_first_features(colors, teacher, tmp_path, monkeypatch):
    """Its head is part of the loss, also if all of its features come from the cache."""
    events, features = [], Teacher.features

    def load(reference, **options):
        model = vitrail.load(reference, **options)
        model.to = lambda device: events.append(device) or model
        return model

    def compute(self, images):
        events.append("features")
        return features(self, images)

    monkeypatch.setattr("vitrail.training.trainer.load", load)
    monkeypatch.setattr(Teacher, "features", compute)
    tiny_run(colors, tmp_path / "run", steps=2, loss=teacher)
    assert events[:2] == [torch.device("cpu"), "features"]


def test_time_budget(colors, teacher, tmp_path):
    options = {"steps": None, "minutes": 0.01, "optim": OptimSettings(kind="adamw")}
    assert tiny_run(colors, tmp_path / "run", loss=teacher, augment=VIEWS, **options).finished


@pytest.mark.parametrize(
    ("teaching", "mix", "error", "message"),
    [
        ("features", Mixing(mixup=0.2), ConfigError, "excludes mixup and CutMix"),
        ("soft", Mixing(), vitrail.CheckpointError, r"loss\.teaching='features'"),  # other classes
    ],
)
def test_impossible_teaching_raises(colors, teacher, tmp_path, teaching, mix, error, message):
    with pytest.raises(error, match=message):
        tiny_run(colors, tmp_path / "run", loss=replace(teacher, teaching=teaching), mix=mix)
