"""Engines of onnxruntime: opened from a file, or made of a model and kept."""

import onnx
import pytest
import torch
from exportable import BASE, CONFIGS

from tiny_models import awake
from vitrail import CheckpointError, ConfigError, DataError, Metadata, Preprocessing
from vitrail.export import sessions
from vitrail.export.onnx_file import to_onnx
from vitrail.export.sessions import OnnxEngine, engine_for


@pytest.fixture
def model():
    model = awake(BASE)
    model.metadata = Metadata(
        preprocessing=Preprocessing(size=(8, 8)), class_names=("ant", "bee", "cat")
    )
    return model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "onnx"


def test_an_engine_is_the_model_of_its_file(model, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(to_onnx(model))
    engine = OnnxEngine(path, threads=1)
    images = torch.randn(2, 3, 12, 8)
    with torch.inference_mode():
        torch.testing.assert_close(engine(images), model(images), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            engine.features(images), model.features(images), rtol=1e-4, atol=1e-5
        )
    assert engine.metadata == model.metadata
    assert engine.config == model.config
    assert (engine.name, engine.channels, engine.num_classes) == ("onnx", 3, 3)


def test_an_engine_takes_what_torch_takes(model):
    engine = OnnxEngine(to_onnx(model), threads=1)
    images = torch.randn(2, 3, 8, 8)
    turned = images.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    assert torch.equal(engine(turned), engine(images))


def test_an_engine_without_head_gives_features(model):
    engine = OnnxEngine(to_onnx(awake(CONFIGS["no head"])), threads=1)
    images = torch.randn(1, 3, 8, 8)
    assert torch.equal(engine(images), engine.features(images))


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("class token", (1, 1, 8, 8), "does not fit a model of 3 channels"),
        ("class token", (1, 3, 8, 9), "not a whole number of 4-pixel patches"),
        ("Mixer", (1, 3, 12, 12), "tied to image_size=8"),
    ],
)
def test_pictures_that_do_not_fit_are_refused_as_the_model_refuses_them(kind, shape, message):
    engine = OnnxEngine(to_onnx(awake(CONFIGS[kind])), threads=1)
    with pytest.raises(DataError, match=message):
        engine(torch.zeros(shape))


def test_a_broken_a_missing_and_a_foreign_file_are_one_line_each(model, tmp_path):
    path = tmp_path / "model.onnx"
    with pytest.raises(CheckpointError, match=r"there is no file .*model\.onnx"):
        OnnxEngine(path)
    for content in (b"", b"no graph at all", to_onnx(model)[:-300]):
        path.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            OnnxEngine(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    foreign = onnx.load_from_string(to_onnx(model))
    del foreign.metadata_props[:]
    path.write_bytes(foreign.SerializeToString())
    with pytest.raises(CheckpointError, match="is an ONNX file, but not of vitrail"):
        OnnxEngine(path)


@pytest.mark.parametrize(
    ("key", "text"), [("model", "{}"), ("model", "no json"), ("preprocessing", "[]")]
)
def test_a_file_that_tells_nonsense_about_itself_is_refused(model, key, text):
    changed = onnx.load_from_string(to_onnx(model))
    for each in changed.metadata_props:
        if each.key == key:
            each.value = text
    with pytest.raises(CheckpointError):
        OnnxEngine(changed.SerializeToString())


def test_a_file_that_prepares_pictures_itself_is_no_engine(model):
    with pytest.raises(CheckpointError, match="without --with-preprocessing"):
        OnnxEngine(to_onnx(model, preprocessing=True))


@pytest.mark.parametrize("kind", ["onnx", "onnx-int8"])
def test_the_second_time_the_engine_comes_from_the_cache(model, cache, kind, monkeypatch):
    heard = []
    first = engine_for(model, kind, tell=heard.append)
    assert len(heard) == 1
    assert len(list(cache.iterdir())) == 1
    second = engine_for(model, kind, tell=heard.append)
    assert len(heard) == 1
    assert first.name == second.name == kind
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(first(images), second(images))
    assert second.metadata == model.metadata


def test_other_weights_names_or_kinds_have_other_files(model, cache):
    engine_for(model, "onnx")
    engine_for(model, "onnx-int8")
    model.head.bias.data[0] += 1
    engine_for(model, "onnx")
    model.metadata = Metadata(
        preprocessing=model.metadata.preprocessing, class_names=("a", "b", "c")
    )
    assert engine_for(model, "onnx").metadata.class_names == ("a", "b", "c")
    assert len(list(cache.iterdir())) == 4


def test_a_cache_that_cannot_be_read_is_made_again(model, cache):
    engine_for(model, "onnx")
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    engine_for(model, "onnx")
    assert path.read_bytes() == whole


def test_where_nothing_can_be_kept_the_engine_works_all_the_same(model, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file"))
    images = torch.randn(1, 3, 8, 8)
    with torch.inference_mode():
        expected = model(images)
    torch.testing.assert_close(engine_for(model, "onnx")(images), expected, rtol=1e-4, atol=1e-5)


def test_an_engine_that_is_not_the_model_is_neither_given_nor_kept(model, cache, monkeypatch):
    other = to_onnx(awake(BASE, seed=1))
    monkeypatch.setattr("vitrail.export.onnx_file.to_onnx", lambda *given, **settings: other)
    with pytest.raises(CheckpointError, match="other numbers than the model"):
        engine_for(model, "onnx")
    assert not cache.exists()


def test_a_model_that_merges_tokens_has_no_engine_here(model):
    model.merge = 2
    with pytest.raises(ConfigError, match="token merging has no place in an export"):
        engine_for(model, "onnx")


def test_threads_are_torchs_unless_told_otherwise(model):
    content = to_onnx(model)
    for threads, expected in ((None, torch.get_num_threads()), (2, 2)):
        options = sessions.open_session(content, threads).get_session_options()
        assert options.intra_op_num_threads == expected
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
