"""The convolutional networks in ONNX: the hybrid's ResNet, and BiT.

Shapes: B images, D features.
"""

from torch import nn

from vitrail.export import layers
from vitrail.export.graph import Graph, real, whole
from vitrail.models.resnet import BiT, Bottleneck, PreActBottleneck, ResNet, StandardizedConv2d

# onnxruntime moves a padding with zeros into the pooling after it, where padding never counts; in
# a BiT it counts. A padding with something else is left alone.
ALMOST_ZERO = 1e-30


def resnet(graph: Graph, module: ResNet, images: str) -> str:
    """The hybrid's ResNet v1: pictures → a feature map."""
    images = layers.standardized(graph, images, module.root)
    images = graph("Relu", layers.group_norm(graph, images, module.norm))
    images = graph("MaxPool", images, kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1])
    for stage in module.stages:
        assert isinstance(stage, nn.Sequential)
        for unit in stage:
            assert isinstance(unit, Bottleneck)
            images = resnet_unit(graph, unit, images)
    return images


def resnet_unit(graph: Graph, unit: Bottleneck, images: str) -> str:
    inner = images
    for conv, norm in ((unit.conv1, unit.norm1), (unit.conv2, unit.norm2)):
        normed = layers.group_norm(graph, layers.standardized(graph, inner, conv), norm)
        inner = graph("Relu", normed)
    inner = layers.group_norm(graph, layers.standardized(graph, inner, unit.conv3), unit.norm3)
    if unit.shortcut is not None:
        conv, norm = unit.shortcut
        assert isinstance(conv, StandardizedConv2d)
        assert isinstance(norm, nn.GroupNorm)
        images = layers.group_norm(graph, layers.standardized(graph, images, conv), norm)
    return graph("Relu", graph("Add", images, inner))


def bit(graph: Graph, model: BiT, images: str) -> str:
    """The mean over all cells of the last feature map (B, D)."""
    graph.part = "root"
    images = layers.standardized(graph, images, model.root)
    images = graph("Pad", images, whole(0, 0, 1, 1, 0, 0, 1, 1), real(ALMOST_ZERO))
    images = graph("MaxPool", images, kernel_shape=[3, 3], strides=[2, 2])
    for index, stage in enumerate(model.stages):
        graph.part = f"stage.{index}"
        for unit in stage:
            assert isinstance(unit, PreActBottleneck)
            images = bit_unit(graph, unit, images)
    images = graph("Relu", layers.group_norm(graph, images, model.norm))
    return graph("ReduceMean", images, whole(2, 3), keepdims=0)


def bit_unit(graph: Graph, unit: PreActBottleneck, images: str) -> str:
    active = graph("Relu", layers.group_norm(graph, images, unit.norm1))
    if unit.shortcut is not None:
        images = layers.standardized(graph, active, unit.shortcut)
    inner = layers.standardized(graph, active, unit.conv1)
    for norm, conv in ((unit.norm2, unit.conv2), (unit.norm3, unit.conv3)):
        inner = graph("Relu", layers.group_norm(graph, inner, norm))
        inner = layers.standardized(graph, inner, conv)
    return graph("Add", images, inner)
