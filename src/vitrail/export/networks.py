"""A model as an ONNX graph: images (B, C, H, W) → features (B, D) and logits (B, K).

Everything is plain ONNX, with sizes that are known only when the graph runs. What each model does
is told by `vitrail.models`; this file follows it step by step, and every export is compared with
the model itself.

Shapes: B images, N tokens, D width, H heads, K channels per head or classes.
"""

import torch
from torch import Tensor, nn

from vitrail.export import layers
from vitrail.export.graph import Graph, real, whole
from vitrail.export.positions import Positions
from vitrail.export.resnets import bit, resnet
from vitrail.models.encoder import Block
from vitrail.models.mixer import MixerBlock, MlpMixer
from vitrail.models.patch_embed import ConvStem, PatchProjection
from vitrail.models.pooling import AttentionPool
from vitrail.models.resnet import BiT, ResNetStem
from vitrail.models.vit import Model, VisionTransformer


def network(graph: Graph, model: Model, images: str) -> tuple[str | None, str]:
    """Logits, if the model has a head, and features."""
    match model:
        case VisionTransformer():
            return vision_transformer(graph, model, images)
        case BiT():
            features = bit(graph, model, images)
        case MlpMixer():
            features = mixer(graph, model, images)
    return head(graph, model.head, features), features


def head(graph: Graph, layer: nn.Linear | None, features: str) -> str | None:
    """Not in whole numbers: it costs next to nothing, and a slip here is a wrong answer."""
    graph.part = "head"
    if layer is None:
        return None
    return layers.linear(graph, features, layer.weight, layer.bias, int8=False)


def vision_transformer(
    graph: Graph, model: VisionTransformer, images: str
) -> tuple[str | None, str]:
    config = model.config
    patches = stem(graph, model.stem, images)  # (B, h, w, D)
    graph.part = "tokens"
    positions = Positions(graph, patches)
    tokens = graph("Reshape", patches, whole(0, -1, config.width))  # (B, h * w, D)
    tokens = put_before(graph, tokens, model.cls_token, model.distillation_token)
    tokens = positions.placed(tokens, model.position)
    if model.registers is not None:
        placed = config.num_class_tokens
        rest = put_before(graph, layers.middle(graph, tokens, placed), model.registers)
        first = [layers.middle(graph, tokens, 0, placed)] if placed else []
        tokens = graph("Concat", *first, rest, axis=1) if first else rest
    tokens = encoder(graph, model, tokens, positions)
    graph.part = "pool"
    features = pooled(graph, model, tokens)
    if model.representation is not None:
        layer = model.representation
        features = graph("Tanh", layers.linear(graph, features, layer.weight, layer.bias))
    logits = head(graph, model.head, features)
    if model.distillation_head is not None and logits is not None:
        second = graph("Gather", tokens, torch.tensor(1), axis=1)  # (B, D)
        other = head(graph, model.distillation_head, second)
        assert other is not None
        logits = graph("Mul", graph("Add", logits, other), real(0.5))
    return logits, features


def stem(graph: Graph, module: nn.Module, images: str) -> str:
    graph.part = "stem"
    match module:
        case ConvStem():
            for layer in module.layers:
                match layer:
                    case nn.Conv2d():
                        images = layers.convolution(graph, images, layer.weight, 2, [1] * 4)
                    case nn.GroupNorm():
                        images = layers.group_norm(graph, images, layer)
                    case _:
                        images = graph("Relu", images)
        case ResNetStem():
            images = resnet(graph, module.resnet, images)
    assert isinstance(module.projection, PatchProjection)
    return patches_of(graph, module.projection, images)


def patches_of(graph: Graph, projection: PatchProjection, images: str) -> str:
    """Pictures (B, C, h * P, w * P) cut into patches and multiplied: (B, h, w, D)."""
    graph.part = "stem"
    _, channels, down, across = projection.weight.shape
    rows = graph("Div", layers.size(graph, images, 2), whole(down))
    columns = graph("Div", layers.size(graph, images, 3), whole(across))
    shape = graph("Concat", whole(0, channels), rows, whole(down), columns, whole(across), axis=0)
    cut = graph("Reshape", images, shape)  # (B, C, h, P, w, P)
    cut = graph("Transpose", cut, perm=[0, 2, 4, 1, 3, 5])  # (B, h, w, C, P, P)
    cut = graph("Reshape", cut, whole(0, 0, 0, channels * down * across))
    return layers.linear(graph, cut, projection.weight.flatten(1), projection.bias, int8=False)


def put_before(graph: Graph, tokens: str, *extra: Tensor | None) -> str:
    """Learned tokens (n, D) before the tokens of every image."""
    given = [part for part in extra if part is not None]
    if not given:
        return tokens
    images = graph("Concat", layers.size(graph, tokens, 0), whole(1, 1), axis=0)
    first = graph("Expand", torch.cat(given)[None], images)  # (B, n, D)
    return graph("Concat", first, tokens, axis=1)


def encoder(graph: Graph, model: VisionTransformer, tokens: str, positions: Positions) -> str:
    """All tokens after the last block; only the first few, if nobody reads the others."""
    modules = model.encoder
    last = len(modules.blocks) - 1
    for index, block in enumerate(modules.blocks):
        graph.part = f"block.{index}"
        position = None
        if modules.positions:
            position = modules.positions[index % len(modules.positions)]
            if not modules.relative:
                tokens = positions.placed(tokens, position)
        read = model.head_tokens if index == last else None
        relative = position if modules.relative else None
        seen = attention(graph, block, tokens, read, relative, positions)
        tokens = graph("Add", layers.middle(graph, tokens, 0, read), seen)
        normed = layers.layer_norm(graph, tokens, block.norm2)
        tokens = graph("Add", tokens, layers.mlp(graph, normed, block.mlp, block.branch2))
    graph.part = "encoder"
    return layers.layer_norm(graph, tokens, modules.norm)


def attention(
    graph: Graph,
    block: Block,
    tokens: str,
    read: int | None,
    relative: nn.Module | None,
    positions: Positions,
) -> str:
    """What the first `read` tokens, or all, have seen: (B, N, D)."""
    part = block.attention
    width, heads = part.merge.in_features, part.heads
    scale = (width // heads) ** -0.5
    weight, bias = part.qkv.weight.clone(), None if part.qkv.bias is None else part.qkv.bias.clone()
    weight[:width] *= scale  # so that nothing need be scaled in the graph
    if bias is not None:
        bias[:width] *= scale
    normed = layers.layer_norm(graph, tokens, block.norm1)
    if read is None:
        together = layers.linear(graph, normed, weight, bias)
        query, key, value = graph.several("Split", 3, together, axis=-1, num_outputs=3)
    else:
        bias_q, bias_kv = (None, None) if bias is None else (bias[:width], bias[width:])
        first = layers.middle(graph, normed, 0, read)
        query = layers.linear(graph, first, weight[:width], bias_q)
        together = layers.linear(graph, normed, weight[width:], bias_kv)
        key, value = graph.several("Split", 2, together, axis=-1, num_outputs=2)
    query = layers.in_heads(graph, query, heads)
    key = layers.in_heads(graph, key, heads, key=True)
    value = layers.in_heads(graph, value, heads)
    bias = None if relative is None else positions.scores(query, relative)
    mixed = layers.attend(graph, query, key, value, bias)
    return layers.linear(graph, mixed, *layers.scaled(part.merge, block.branch1))


def pooled(graph: Graph, model: VisionTransformer, tokens: str) -> str:
    """The encoder's tokens → one vector for each image (B, D)."""
    if isinstance(model.pool, AttentionPool):
        return attention_pool(graph, model.pool, tokens)
    if model.config.pool == "cls":
        return graph("Gather", tokens, torch.tensor(0), axis=1)
    patches = layers.middle(graph, tokens, model.config.num_prefix)
    return graph("ReduceMean", patches, whole(1), keepdims=0)


def attention_pool(graph: Graph, pool: AttentionPool, tokens: str) -> str:
    patches = layers.middle(graph, tokens, pool.prefix)
    together = layers.linear(graph, patches, pool.key_value.weight, pool.key_value.bias)
    key, value = graph.several("Split", 2, together, axis=-1, num_outputs=2)
    query = pool.query(pool.probe).unflatten(-1, (pool.heads, 1, -1))  # (1, H, 1, K)
    query = query * query.shape[-1] ** -0.5
    key = layers.in_heads(graph, key, pool.heads, key=True)
    mixed = layers.attend(graph, query, key, layers.in_heads(graph, value, pool.heads))
    merged = layers.linear(graph, mixed, pool.merge.weight, pool.merge.bias)
    merged = graph("Reshape", merged, whole(0, -1))  # (B, D)
    normed = layers.layer_norm(graph, merged, pool.norm)
    return graph("Add", merged, layers.mlp(graph, normed, pool.mlp))


def mixer(graph: Graph, model: MlpMixer, images: str) -> str:
    """The mean over all tokens (B, D)."""
    tokens = patches_of(graph, model.stem, images)
    tokens = graph("Reshape", tokens, whole(0, -1, model.config.width))  # (B, N, D)
    for index, block in enumerate(model.blocks):
        graph.part = f"block.{index}"
        assert isinstance(block, MixerBlock)
        turned = layers.layer_norm(graph, tokens, block.norm1)
        turned = layers.mlp(graph, graph("Transpose", turned, perm=[0, 2, 1]), block.token_mixing)
        tokens = graph("Add", tokens, graph("Transpose", turned, perm=[0, 2, 1]))
        normed = layers.layer_norm(graph, tokens, block.norm2)
        tokens = graph("Add", tokens, layers.mlp(graph, normed, block.channel_mixing))
    graph.part = "pool"
    return graph("ReduceMean", layers.layer_norm(graph, tokens, model.norm), whole(1), keepdims=0)
