"""ONNX files have the outputs of the model for any batch and image size."""

from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from exportable import BASE, CONFIGS, WIDE, exported, run, session_of
from torch.export import Dim

from tiny_models import awake
from vitrail import ConfigError, MixerConfig
from vitrail.export import onnx as onnx_export
from vitrail.export.onnx import INT8_LEVELS, OPSET, to_onnx
from vitrail.export.session import OnnxEngine, open_session
from vitrail.models.config import pair
from vitrail.models.pos_embed import RESIZE_METHODS, interpolation_matrix

pytestmark = pytest.mark.slow


def sizes(config):
    """The model's own, smaller down and larger across, larger both ways, and a single patch."""
    own = pair(config.image_size)
    if isinstance(config, MixerConfig):
        return [own]
    down, across = (9, 13) if config.stride == (1, 1) else config.stride
    # A GroupNorm over two values, as in an AxialResNet of a single cell, magnifies rounding errors
    # a thousand times, in torch too.
    cells = 1 + (getattr(config, "unit", "") == "axial")
    return [own, (3 * down, 5 * across), (7 * down, 6 * across), (cells * down, cells * across)]


@pytest.mark.parametrize("kind", CONFIGS)
def test_outputs_equal_the_models_at_any_size_and_batch(kind):
    config = CONFIGS[kind]
    model = awake(config)
    session = open_session(exported(kind), 1)
    names = ["logits", "features"] if config.num_classes else ["features"]
    assert [output.name for output in session.get_outputs()] == names
    for size in sizes(config):
        for count in (1, 2, 5):
            images = torch.randn(count, config.channels, *size)
            with torch.no_grad():
                expected = [model(images), model.features(images)][-len(names) :]
            outputs = session.run(names, {"images": images.numpy()})
            for found, wanted in zip(outputs, expected, strict=True):
                difference = np.abs(found - wanted.numpy()).max() / wanted.abs().max()
                assert difference < 2e-5, (size, count)


OLD_SIZES = (1, 2, 7, 14, 37)


class Interpolation(torch.nn.Module):
    """The matrices that resize lines of several lengths to the length of the input."""

    def __init__(self, method):
        super().__init__()
        self.method = method

    def forward(self, x):
        return [interpolation_matrix(old, x.shape[0], self.method, like=x) for old in OLD_SIZES]


@pytest.mark.parametrize("method", RESIZE_METHODS)
def test_interpolation_matrices_equal_the_models(method):
    session = session_of(Interpolation(method), torch.zeros(9), {0: Dim("new")})
    cubic = RESIZE_METHODS[method]["mode"] == "bicubic"
    for new in (*range(1, 40), 64, 100, 391):
        for old, found in zip(OLD_SIZES, run(session, torch.zeros(new)), strict=True):
            # In float32 a position is rounded to eps of `old`, and the terms of the cubic filter
            # add up to 36 (0.75 |x^3 - 5 x^2 + 8 x - 4|, each for itself, at x = 2) before they
            # cancel.
            bound = torch.finfo(torch.float32).eps * (old + (36 if cubic else 1))
            expected = interpolation_matrix(old, new, method, like=torch.zeros(1))
            assert (found - expected).abs().max() < bound, (old, new)


def test_a_block_has_no_superfluous_operations():
    nodes = onnx.load_from_string(to_onnx(awake(BASE.change(depth=3)))).graph.node
    found = Counter(node.op_type for node in nodes if node.name.startswith("encoder.blocks.1"))
    dense = {"MatMul": 4 + 2, "Add": 4 + 2}  # with bias; and attention, residual connections
    attention = {"Mul": 1, "Reshape": 4, "Softmax": 1, "Split": 1, "Transpose": 5}
    assert found == {**dense, **attention, "Gelu": 1, "LayerNormalization": 2}


def test_the_last_block_computes_only_the_class_token():
    model = onnx.load_from_string(exported("class token"))
    gelus = [node for node in model.graph.node if node.op_type == "Gelu"]
    for gelu in gelus:
        model.graph.output.append(onnx.ValueInfoProto(name=gelu.output[0]))
    session = open_session(model.SerializeToString(), 1)
    found = session.run([gelu.output[0] for gelu in gelus], {"images": np.zeros((2, 3, 8, 8), "f")})
    assert [values.shape for values in found] == [(2, 5, 24), (2, 1, 24)]


def test_standardized_kernels_are_constants_and_paddings_are_merged():
    for kind, convolutions, pads in (("BiT", 9, 1), ("hybrid", 9, 0)):
        nodes = onnx.load_from_string(exported(kind)).graph.node
        operations = Counter(node.op_type for node in nodes)
        assert operations["Conv"] == convolutions  # a root, two units of three, their shortcuts
        assert operations["Pad"] == pads
        assert not operations["Sqrt"] + operations["ReduceL2"]


def test_files_open_in_older_runtimes():
    model = onnx.load_from_string(exported("class token"))
    assert model.ir_version <= 10
    assert [(each.domain, each.version) for each in model.opset_import] == [("", OPSET)]
    assert OPSET <= 23  # onnxruntime 1.23
    assert not model.graph.value_info


def test_weights_beyond_the_limit_of_a_file_and_int8_convolutions_are_rejected(monkeypatch):
    monkeypatch.setattr(onnx_export, "MAX_BYTES", 1000)
    with pytest.raises(ConfigError, match="exceed the 2 GiB that one ONNX file can hold"):
        to_onnx(awake(BASE))
    with pytest.raises(ConfigError, match="consists of convolutions; export it as float"):
        to_onnx(awake(CONFIGS["BiT"]), int8=True)


# int8


def test_int8_weights_take_a_quarter_and_seven_bits():
    """Two products of 8 by 8 bits overflow the 16 bits in which CPUs without VNNI add them."""
    wide = awake(WIDE)
    content = to_onnx(wide, int8=True)
    assert len(content) < 0.4 * len(to_onnx(wide))
    tensors = onnx.load_from_string(content).graph.initializer
    rounded = [each for each in tensors if each.data_type == onnx.TensorProto.INT8]
    largest = max(np.abs(onnx.numpy_helper.to_array(each).astype(int)).max() for each in rounded)
    assert largest == INT8_LEVELS
    assert 2 * 255 * INT8_LEVELS < 2**15


@pytest.mark.parametrize("kind", ["class token", "map", "swiglu", "conv stem", "hybrid", "Mixer"])
def test_int8_features_are_close_and_stem_and_head_are_float(kind):
    model = awake(CONFIGS[kind])
    content = exported(kind, int8=True)
    engine = OnnxEngine(content, threads=1)
    images = torch.randn(3, 3, *pair(model.config.image_size))
    with torch.no_grad():
        expected = model.features(images)
    found = engine.features(images)
    assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.99
    assert not torch.equal(found, expected)
    nodes = onnx.load_from_string(content).graph.node
    quantized = {node.name.split("/")[0] for node in nodes if node.op_type == "MatMulInteger"}
    assert any("mlp" in name or "mixing" in name for name in quantized)
    assert not any(name.startswith(("stem", "head")) for name in quantized)
