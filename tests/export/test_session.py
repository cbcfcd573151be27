"""onnxruntime engines: opened from a file, or exported from a model and cached."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from exportable import SMALLEST, exported
from torch.testing import assert_close as close

from tiny_models import awake
from vitrail import CheckpointError, ConfigError, DataError, Metadata, Predictor, Preprocessing
from vitrail.export.onnx import to_onnx
from vitrail.export.session import OnnxEngine, engine_for, open_session
from vitrail.models.attention import SelfAttention

pytestmark = pytest.mark.slow

METADATA = Metadata(preprocessing=Preprocessing(size=(8, 8)), class_names=("ant", "bee", "cat"))


@pytest.fixture
def model():
    model = awake(SMALLEST)
    model.metadata = METADATA
    return model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "onnx"


@pytest.fixture(scope="module")
def content():
    model = awake(SMALLEST)
    model.metadata = METADATA
    return to_onnx(model)


def test_engine_of_a_file_equals_the_model(model, content, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    engine = OnnxEngine(path, threads=1)
    images = torch.randn(2, 3, 12, 8)
    with torch.inference_mode():
        close(engine(images), model(images), rtol=1e-4, atol=1e-5)
        close(engine.features(images), model.features(images), rtol=1e-4, atol=1e-5)
    assert engine.metadata == model.metadata
    assert engine.config == model.config
    assert (engine.name, engine.channels, engine.num_classes) == ("onnx", 3, 3)


def test_engine_takes_the_tensors_that_torch_takes_and_may_have_no_head(content):
    engine, images = OnnxEngine(content, threads=1), torch.randn(2, 3, 8, 8)
    transposed = images.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    assert torch.equal(engine(transposed), engine(images))
    headless = OnnxEngine(exported("no head"), threads=1)
    assert torch.equal(headless(images), headless.features(images))


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("class token", (1, 1, 8, 8), "does not fit a model of 3 channels"),
        ("class token", (1, 3, 8, 9), "not a whole number of 4-pixel patches"),
        ("Mixer", (1, 3, 12, 12), "tied to image_size=8"),
    ],
)
def test_images_that_do_not_fit_are_rejected_as_by_the_model(kind, shape, message):
    engine = OnnxEngine(exported(kind), threads=1)
    with pytest.raises(DataError, match=message):
        engine(torch.zeros(shape))


def test_missing_and_unsuitable_files_are_one_line_errors(content, tmp_path):
    with pytest.raises(CheckpointError, match="without --with-preprocessing"):
        OnnxEngine(exported("class token", preprocessing=True))
    path = tmp_path / "model.onnx"
    with pytest.raises(CheckpointError, match=r"file not found: .*model\.onnx"):
        OnnxEngine(path)
    for broken in (b"", b"no graph at all", content[:-300]):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError) as caught:
            OnnxEngine(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("vitrail", None, "is an ONNX file without vitrail's metadata"),
        ("model", "{}", "invalid metadata"),
        ("model", "no json", "invalid metadata"),
        ("preprocessing", "[]", "preprocessing"),
    ],
)
def test_files_with_missing_or_invalid_metadata_are_rejected(content, key, text, message):
    file = onnx.load_from_string(content)
    for index, each in reversed(list(enumerate(file.metadata_props))):
        if each.key == key and text is None:
            del file.metadata_props[index]
        elif each.key == key:
            each.value = text
    with pytest.raises(CheckpointError, match=message):
        OnnxEngine(file.SerializeToString())


def test_file_of_version_0_1_is_readable():
    predictor = Predictor(Path(__file__).with_name("vitrail-0.1.onnx"))
    assert predictor.metadata.preprocessing.mean == (0.4, 0.4, 0.4)
    assert predictor.metadata.provenance == {"data": "insects"}
    prediction = predictor(np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3))
    assert prediction.label == "cat"
    assert prediction.probability == pytest.approx(0.647274, abs=1e-5)


def test_engines_are_cached_by_weights_names_and_kind(model, cache):
    lines = []
    engine = engine_for(model, "onnx", log=lines.append)
    (path,) = cache.iterdir()
    again = engine_for(model, "onnx", log=lines.append)
    assert len(lines) == 1  # the second comes from the cache
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(engine(images), again(images))
    assert again.metadata == model.metadata
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])  # an unreadable file is written again
    engine_for(model, "onnx")
    assert path.read_bytes() == whole
    assert [engine_for(model, "onnx-int8").name for _ in range(2)] == ["onnx-int8"] * 2
    assert len(list(cache.iterdir())) == 2
    model.head.bias.data[0] += 1
    model.metadata = replace(METADATA, class_names=("a", "b", "c"))
    assert engine_for(model, "onnx").metadata.class_names == ("a", "b", "c")
    model.metadata = METADATA
    engine_for(model, "onnx")
    assert len(list(cache.iterdir())) == 4


class TalkingHeads(SelfAttention):
    """Mixes the logits of the heads (Shazeer et al. 2020, arXiv:2003.02436)."""

    def __init__(self, config):
        super().__init__(config)
        self.mixing = torch.nn.Parameter(torch.randn(config.heads, config.heads))

    def weights(self, query, key, bias=None):
        scores = query @ key.mT / query.shape[-1] ** 0.5
        return torch.einsum("gh,bhqn->bgqn", self.mixing, scores).softmax(dim=-1)


def test_replaced_attention_is_exported_and_not_cached(cache):
    model = awake(SMALLEST)
    for block in model.encoder.blocks:
        attention = TalkingHeads(SMALLEST)
        attention.load_state_dict(block.attention.state_dict(), strict=False)
        block.attention = attention
    engine_for(model, "onnx")  # verifies the outputs at several sizes
    assert not list(cache.rglob("*.onnx"))
    TalkingHeads.weights = lambda self, query, key, bias=None: (query @ key.mT).cumsum(dim=-1)
    with pytest.raises(ConfigError, match=r"uses aten.cumsum.default, which has no translation"):
        engine_for(model, "onnx")
    constant = torch.tensor
    TalkingHeads.weights = lambda self, q, key, bias=None: q @ key.mT / constant(float(key.size(2)))
    with pytest.raises(CheckpointError, match=r"blocks\.0\.attention, a TalkingHeads, a size-dep"):
        engine_for(model, "onnx")


def test_engine_works_without_a_writable_cache(model, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "file"))
    engine, images = engine_for(model, "onnx"), torch.randn(1, 3, 8, 8)
    with torch.inference_mode():
        close(engine(images), model(images), rtol=1e-4, atol=1e-5)


def test_engine_with_other_outputs_is_neither_returned_nor_cached(model, cache, monkeypatch):
    other = to_onnx(awake(SMALLEST, seed=1))
    monkeypatch.setattr("vitrail.export.onnx.to_onnx", lambda *_, **__: other)
    with pytest.raises(CheckpointError, match="differ from the model's"):
        engine_for(model, "onnx")
    model.merge = 2
    with pytest.raises(ConfigError, match="token merging cannot be exported"):
        engine_for(model, "onnx")
    assert not cache.exists()


def test_number_of_threads_is_torchs_by_default(content):
    for threads, expected in ((None, torch.get_num_threads()), (2, 2)):
        options = open_session(content, threads).get_session_options()
        assert options.intra_op_num_threads == expected
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_file_without_permission_is_named(content, tmp_path, monkeypatch):
    path = tmp_path / "private.onnx"
    path.write_bytes(content)
    monkeypatch.setattr("os.access", lambda *_: False)  # root may read all files
    with pytest.raises(CheckpointError, match=f"permission denied: {path}"):
        open_session(path)
