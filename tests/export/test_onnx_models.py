"""Every kind of model in ONNX is the model, at any number of images and any size."""

import numpy as np
import onnx
import pytest
import torch
from exportable import BASE, CONFIGS

from tiny_models import awake
from vitrail import ConfigError, MixerConfig, VitConfig
from vitrail.export import graph as graphs
from vitrail.export import resizing
from vitrail.export.graph import Graph, whole
from vitrail.export.onnx_file import to_onnx
from vitrail.export.positions import resize_of
from vitrail.export.sessions import open_session
from vitrail.models.config import pair
from vitrail.models.pos_embed import RESIZE_METHODS, interpolation_matrix


def sizes(config):
    """The model's own, one smaller across and larger down, and a single patch."""
    own = pair(config.image_size)
    if isinstance(config, MixerConfig):
        return [own]
    down, across = config.stride if isinstance(config, VitConfig) else (9, 13)
    return [own, (3 * down, 5 * across), (down, across)]


@pytest.mark.parametrize("kind", CONFIGS)
def test_one_file_gives_the_models_numbers_at_any_size_and_number_of_images(kind):
    config = CONFIGS[kind]
    model = awake(config)
    session = open_session(to_onnx(model), 1)
    names = ["logits", "features"] if config.num_classes else ["features"]
    assert [output.name for output in session.get_outputs()] == names
    for size in sizes(config):
        for count in (1, 2, 5):
            images = torch.randn(count, config.channels, *size)
            with torch.no_grad():
                expected = [model(images), model.features(images)][-len(names) :]
            for found, wanted in zip(
                session.run(names, {"images": images.numpy()}), expected, strict=True
            ):
                difference = np.abs(found - wanted.numpy()).max() / wanted.abs().max()
                assert difference < 2e-5, (size, count)


@pytest.mark.parametrize("method", RESIZE_METHODS)
@pytest.mark.parametrize("old", [1, 2, 7, 14, 37])
def test_matrices_of_the_graph_are_those_of_the_model(method, old):
    graph = Graph()
    new_size = graph.reads("new", torch.int64, (1,))
    made = resizing.matrix(graph, whole(old), new_size, resize_of(method))
    graph.gives("matrix", made, ("new", old))
    session = open_session(graph.written({}), 1)
    # Torch's are float32: a place is rounded to eps of `old`, and the terms of its cubic add up
    # to 36 (0.75 |x^3 - 5 x^2 + 8 x - 4|, each for itself, at x = 2) before they cancel.
    bound = torch.finfo(torch.float32).eps * (
        old + (36 if resize_of(method).filter == "cubic" else 1)
    )
    for new in (*range(1, 40), 64, 100, 391):
        (found,) = session.run(None, {"new": np.array([new])})
        expected = interpolation_matrix(old, new, method, like=torch.zeros(1)).numpy()
        assert np.abs(found - expected).max() < bound, new


def test_batch_height_and_width_are_words_and_a_mixers_sides_are_numbers():
    shapes = [
        open_session(to_onnx(awake(CONFIGS[kind])), 1).get_inputs()[0].shape
        for kind in ("class token", "BiT", "Mixer")
    ]
    assert shapes == [["batch", 3, "height", "width"]] * 2 + [["batch", 3, 8, 8]]


def operations(content):
    return [node.op_type for node in onnx.load_from_string(content).graph.node]


def test_the_graph_has_the_operations_of_the_paper_and_no_others_in_its_blocks():
    content = to_onnx(awake(BASE.change(depth=3)))
    nodes = onnx.load_from_string(content).graph.node
    found = sorted(node.op_type for node in nodes if node.name.startswith("block.1/"))
    dense = ["Add"] * 4 + ["MatMul"] * 4
    attention = ["MatMul"] * 2 + ["Reshape"] * 4 + ["Softmax", "Split"] + ["Transpose"] * 4
    rest = ["Add"] * 2 + ["Gelu"] + ["LayerNormalization"] * 2
    assert found == sorted(dense + attention + rest)


def test_the_last_block_computes_only_what_is_read():
    model = onnx.load_from_string(to_onnx(awake(BASE)))
    gelus = [node for node in model.graph.node if node.op_type == "Gelu"]
    for gelu in gelus:
        model.graph.output.append(onnx.ValueInfoProto(name=gelu.output[0]))
    session = open_session(model.SerializeToString(), 1)
    found = session.run([gelu.output[0] for gelu in gelus], {"images": np.zeros((2, 3, 8, 8), "f")})
    assert [values.shape for values in found] == [(2, 5, 24), (2, 1, 24)]


def test_standardized_kernels_are_folded():
    assert "Sqrt" not in operations(to_onnx(awake(CONFIGS["BiT"])))
    convolutions = [n for n in operations(to_onnx(awake(CONFIGS["BiT"]))) if n == "Conv"]
    assert len(convolutions) == 9  # a root, and two units of three with a shortcut each


def test_older_runtimes_understand_the_file():
    model = onnx.load_from_string(to_onnx(awake(BASE)))
    assert model.ir_version <= 10
    assert [(each.domain, each.version) for each in model.opset_import] == [("", graphs.OPSET)]
    assert graphs.OPSET <= 23  # onnxruntime 1.23
    assert not model.graph.value_info


def test_weights_beyond_what_a_file_holds_are_refused(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_BYTES", 1000)
    with pytest.raises(
        ConfigError, match="than the 2 GiB that one ONNX file holds; export to int8"
    ):
        to_onnx(awake(BASE))
