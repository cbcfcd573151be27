import numpy as np
import pytest
import torch

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


def test_features_are_those_of_the_model_in_the_order_of_the_source(model, source):
    found = features_of(model, source, batch_size=7)
    pixels = torch.stack([torch.from_numpy(s.data).permute(2, 0, 1) for s in source])
    with torch.no_grad():
        wanted = model.eval().features(pixels / 127.5 - 1)
    torch.testing.assert_close(torch.from_numpy(found.values), wanted, rtol=1e-4, atol=1e-5)
    assert found.labels.tolist() == source.labels().tolist()


def test_the_second_time_no_picture_is_looked_at(model, source, monkeypatch):
    first = features_of(model, source)
    monkeypatch.setattr(module, "run_inference", None)
    second = features_of(model, source)
    assert (first.cached, second.cached) == (False, True)
    assert np.array_equal(first.values, second.values)


def test_another_head_finds_the_same_features_and_other_weights_do_not(model, source):
    features_of(model, source)
    width = model.config.num_features
    headed = with_head(model, torch.randn(5, width), torch.randn(5), "abcde")
    assert features_of(headed, source).cached
    with torch.no_grad():
        model.encoder.norm.weight.mul_(1.01)
    assert not features_of(model, source).cached


def test_features_of_merged_tokens_are_kept_apart(model, source):
    features_of(model, source)
    model.merge = 1
    assert not features_of(model, source).cached
    assert features_of(model, source).cached
    model.merge = 2
    assert not features_of(model, source).cached
    model.merge = 0
    assert features_of(model, source).cached


def test_other_pictures_or_another_preprocessing_have_other_features(model, source, tmp_path):
    features_of(model, source)
    other = open_dataset(write_colors(tmp_path / "other.npz", train=27), "train")
    assert not features_of(model, other).cached
    google = vitrail.Preprocessing(size=(8, 8), mean=(0.4,) * 3, std=(0.5,) * 3)
    assert not features_of(model, source, preprocessing=google).cached


def test_a_broken_file_in_the_cache_is_made_again(model, source, tmp_path):
    first = features_of(model, source)
    (kept,) = (tmp_path / "cache" / "features").iterdir()
    kept.write_bytes(kept.read_bytes()[:-40])
    again = features_of(model, source)
    assert not again.cached
    assert np.array_equal(first.values, again.values)
    assert features_of(model, source).cached


def test_without_the_cache_nothing_is_written(model, source, tmp_path):
    features_of(model, source, cache=False)
    assert not (tmp_path / "cache").exists()


def test_one_pixel_that_changes_makes_other_features(model, source, tmp_path):
    features_of(model, source)
    arrays = dict(np.load(tmp_path / "colors.npz"))
    arrays["x_train"][5, 0, 0, 0] ^= 1
    np.savez(tmp_path / "changed.npz", **arrays)
    assert not features_of(model, open_dataset(tmp_path / "changed.npz", "train")).cached


def test_where_nothing_can_be_kept_features_are_computed_all_the_same(
    model, source, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file"))
    assert not features_of(model, source).cached
    monkeypatch.delenv("VITRAIL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(module.Path, "home", nobody)
    assert not features_of(model, source).cached


def nobody():
    raise RuntimeError("could not determine home directory")


def test_features_of_a_set_with_unreadable_pictures_are_not_kept(model, tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    for name in ("a", "b"):
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "set" / name / "0.png")
    (tmp_path / "set" / "a" / "1.png").write_bytes(b"no picture")
    broken = open_dataset(tmp_path / "set", "all")
    assert list(features_of(model, broken).skipped) == ["a/1.png"]
    assert list(features_of(model, broken).skipped) == ["a/1.png"]


def test_weights_that_give_no_numbers_are_noticed(model, source):
    with torch.no_grad():
        model.encoder.norm.weight.fill_(torch.nan)
    with pytest.raises(DataError, match="features of train/0 are not finite"):
        features_of(model, source)


def test_pixels_are_features_too(source):
    found = pixels_of(source, side=4)
    assert found.values.shape == (30, 48)
    assert -1 <= found.values.min() < found.values.max() <= 1
