"""The same Vision Transformer in five libraries.

Each function takes a `Shape` and returns a module from images to logits. Only tests and benchmarks
import the peers; vitrail itself never does.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Shape:
    """A ViT with a class token, learned positions and a head, as all five can build it."""

    image_size: int
    patch_size: int
    width: int
    depth: int
    heads: int
    mlp_width: int
    classes: int
    channels: int = 3

    @property
    def tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2 + 1

    def forward_flops(self) -> float:
        """Operations of all matrix products for one image: two for each multiply and add."""
        n, d = self.tokens, self.width
        patches = (n - 1) * d * self.channels * self.patch_size**2
        block = n * (4 * d * d + 2 * d * self.mlp_width) + 2 * n * n * d
        return 2.0 * (patches + self.depth * block + d * self.classes)


def vitrail(shape: Shape) -> nn.Module:
    from vitrail import VisionTransformer, VitConfig

    return VisionTransformer(
        VitConfig(
            depth=shape.depth,
            width=shape.width,
            mlp_width=shape.mlp_width,
            heads=shape.heads,
            patch_size=shape.patch_size,
            image_size=shape.image_size,
            num_classes=shape.classes,
        )
    )


def timm(shape: Shape, **more: Any) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=shape.image_size,
        patch_size=shape.patch_size,
        in_chans=shape.channels,
        embed_dim=shape.width,
        depth=shape.depth,
        num_heads=shape.heads,
        mlp_ratio=shape.mlp_width / shape.width,
        num_classes=shape.classes,
        **more,
    )


def hugging_face(shape: Shape) -> nn.Module:
    """transformers' own, which gives more than logits."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=shape.image_size,
            patch_size=shape.patch_size,
            num_channels=shape.channels,
            hidden_size=shape.width,
            num_hidden_layers=shape.depth,
            num_attention_heads=shape.heads,
            intermediate_size=shape.mlp_width,
            num_labels=shape.classes,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def transformers(shape: Shape) -> nn.Module:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = hugging_face(shape)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.model(images).logits

    return Logits()


def torchvision(shape: Shape) -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        image_size=shape.image_size,
        patch_size=shape.patch_size,
        num_layers=shape.depth,
        num_heads=shape.heads,
        hidden_dim=shape.width,
        mlp_dim=shape.mlp_width,
        num_classes=shape.classes,
    )


def vit_pytorch(shape: Shape) -> nn.Module:
    from vit_pytorch import ViT

    return ViT(
        image_size=shape.image_size,
        patch_size=shape.patch_size,
        channels=shape.channels,
        num_classes=shape.classes,
        dim=shape.width,
        depth=shape.depth,
        heads=shape.heads,
        mlp_dim=shape.mlp_width,
        dim_head=shape.width // shape.heads,
    )


LIBRARIES: dict[str, Callable[[Shape], nn.Module]] = {
    "vitrail": vitrail,
    "timm": timm,
    "transformers": transformers,
    "torchvision": torchvision,
    "vit-pytorch": vit_pytorch,
}


def make_torchvision_importable() -> None:
    """Give torchvision the two operators its CPU-only import misses.

    A torchvision that was built for CUDA cannot load its compiled part beside a CPU torch, and
    then neither timm nor transformers can be imported. Its models and transforms need none of it.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        make_torchvision_importable.keep = library  # keeps the operators registered
