import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tiny_runs import write_colors
from vitrail import DataError
from vitrail.checkpoints.load import with_head
from vitrail.data.datasets import open_dataset
from vitrail.probing import features as module
from vitrail.probing.features import features_of, pixels_of


@pytest.fixture
def model():
    torch.manual_seed(0)
    return vitrail.create("ViT-Mu/4", image_size=8, num_classes=3)


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return open_dataset(write_colors(tmp_path / "colors.npz"), "train")


def test_features_are_in_the_order_of_the_dataset(model, source):
    features = features_of(model, source, batch_size=7)
    pixels = torch.stack([torch.from_numpy(s.data).permute(2, 0, 1) for s in source])
    with torch.no_grad():
        expected = model.eval().features(pixels / 127.5 - 1)
    torch.testing.assert_close(torch.from_numpy(features.values), expected, rtol=1e-4, atol=1e-5)
    assert features.labels.tolist() == source.labels().tolist()


def test_cache_is_read_unless_it_is_damaged(model, source, tmp_path, monkeypatch):
    assert not features_of(model, source, cache=False).cached
    assert not (tmp_path / "cache").exists()
    first = features_of(model, source)
    with monkeypatch.context() as patch:
        patch.setattr(module, "collect_outputs", None)
        second = features_of(model, source)
    (path,) = (tmp_path / "cache" / "features").iterdir()
    path.write_bytes(path.read_bytes()[:-40])
    third = features_of(model, source)
    assert [one.cached for one in (first, second, third)] == [False, True, False]
    assert np.array_equal(first.values, second.values)
    assert np.array_equal(first.values, third.values)
    assert features_of(model, source).cached


def test_cache_is_not_used_for_a_replaced_module(model, source):
    features_of(model, source)
    model.pool.forward = lambda tokens, sizes: 2 * tokens[:, 0]
    features = features_of(model, source)
    assert not features.cached
    del model.pool.forward
    assert not np.array_equal(features_of(model, source).values, features.values)


def test_cache_depends_on_the_backbone_but_not_on_the_head(model, source):
    features_of(model, source)
    width = model.config.num_features
    headed = with_head(model, torch.randn(5, width), torch.randn(5), "abcde")
    assert features_of(headed, source).cached
    for merge, cached in ((1, False), (1, True), (2, False), (0, True)):
        model.merge = merge
        assert features_of(model, source).cached is cached
    with torch.no_grad():
        model.encoder.norm.weight.mul_(1.01)
    assert not features_of(model, source).cached


def test_cache_depends_on_images_and_preprocessing(model, source, tmp_path):
    features_of(model, source)
    arrays = dict(np.load(tmp_path / "colors.npz"))
    arrays["x_train"][5, 0, 0, 0] ^= 1  # one pixel
    np.savez(tmp_path / "changed.npz", **arrays)
    for other in (write_colors(tmp_path / "other.npz", train=27), tmp_path / "changed.npz"):
        assert not features_of(model, open_dataset(other, "train")).cached
    gray = vitrail.Preprocessing(size=(8, 8), mean=(0.4,) * 3, std=(0.5,) * 3)
    assert not features_of(model, source, preprocessing=gray).cached


def test_unwritable_cache_is_ignored(model, source, tmp_path, monkeypatch):
    def no_home():
        raise RuntimeError("could not determine home directory")

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file"))
    assert not features_of(model, source).cached
    monkeypatch.delenv("VITRAIL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", no_home)
    assert not features_of(model, source).cached


def test_unreadable_images_are_reported_from_the_cache(model, tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    for name in ("a", "b"):
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "set" / name / "0.png")
    (tmp_path / "set" / "a" / "1.png").write_bytes(b"no image")
    broken = open_dataset(tmp_path / "set", "all")
    for cached in (False, True):
        features = features_of(model, broken)
        assert list(features.skipped) == ["a/1.png"]
        assert features.cached is cached
        assert len(features) == 2
    with pytest.raises(DataError, match=r"1\.png"):
        features_of(model, broken, strict=True)
    with monkeypatch.context() as patch:  # of large datasets, not every byte is hashed
        patch.setattr(module, "content_hash", lambda source: "same")
        assert not features_of(model, broken).cached
        assert features_of(model, broken).cached
        Image.new("RGB", (8, 8)).save(tmp_path / "set" / "a" / "1.png")
        features = features_of(model, open_dataset(tmp_path / "set", "all"))
        assert not features.cached
        assert len(features) == 3


def test_features_that_are_not_finite_are_an_error(model, source):
    with torch.no_grad():
        model.encoder.norm.weight.fill_(torch.nan)
    with pytest.raises(DataError, match="features of train/0 are not finite"):
        features_of(model, source)


def test_pixels_as_features(source):
    features = pixels_of(source, side=4)
    assert features.values.shape == (30, 48)
    assert -1 <= features.values.min() < features.values.max() <= 1
