"""The peers' models, with the FLOPs of a vitrail configuration: plain patches and a class token."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import peers
from vitrail.models.config import VitConfig
from vitrail.planning.flops import cost_of

STEP = 8  # channels


def with_equal_flops(config: VitConfig) -> VitConfig:
    """Plain patches and a class token, with MLPs so wide that a forward pass costs the same."""
    plain = config.change(stem="patches", pool="cls")
    wider = plain.change(mlp_width=plain.mlp_width + STEP)
    missing = cost_of(config).forward - cost_of(plain).forward
    steps = round(missing / (cost_of(wider).forward - cost_of(plain).forward))
    return plain.change(mlp_width=plain.mlp_width + steps * STEP)


def timm_model(config: VitConfig, *, drop_path: float = 0.0, pool: str = "token") -> nn.Module:
    how = {"drop_path_rate": drop_path, "global_pool": pool, "class_token": pool == "token"}
    return peers.timm(shape_of(config), **how)


def transformers_model(config: VitConfig) -> nn.Module:
    return peers.hugging_face(shape_of(config))


def vit_pytorch_model(config: VitConfig) -> nn.Module:
    return peers.vit_pytorch(shape_of(config))


def shape_of(config: VitConfig) -> peers.Shape:
    return peers.Shape(
        image_size=config.stride[0] * config.grid[0],
        patch_size=config.stride[0],
        width=config.width,
        depth=config.depth,
        heads=config.heads,
        mlp_width=config.mlp_width,
        classes=config.num_classes,
        channels=config.channels,
    )


def size_of(model: nn.Module, config: VitConfig) -> dict[str, float]:
    """Parameters, and billions of operations of a forward pass of one image at full size."""
    counter = FlopCounterMode(display=False)
    image = torch.zeros(1, config.channels, *(config.stride[0] * side for side in config.grid))
    # every attention as plain products: the counter does not know the one for processors
    plain = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with torch.no_grad(), plain, counter:
        model.eval()(image)
    model.train()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "gflops": counter.get_total_flops() / 1e9}
