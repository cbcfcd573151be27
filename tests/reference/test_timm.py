"""timm's logits, its files here, and folders written here in timm."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from weights import TOLERANCE, difference, random_model, randomize, relative, to_peer

from tiny_runs import equal
from vitrail import NUMERICS, BitConfig, MixerConfig, VitConfig, save
from vitrail.checkpoints import timm as timm_format
from vitrail.checkpoints.files import Checkpoint, LazyTensor, read_json
from vitrail.checkpoints.load import open_reference
from vitrail.data.preprocessing import preset
from vitrail.models.config import pair
from vitrail.models.pos_embed import resize_grid
from vitrail.models.vit import build

timm = pytest.importorskip("timm")
pytestmark = [pytest.mark.reference, pytest.mark.slow]

SMALL = {"img_size": 64, "depth": 2, "num_classes": 5}
NARROW = {"embed_dim": 128, "num_heads": 2}
MEAN = {"global_pool": "avg", "class_token": False, "fc_norm": False}
MAP = {"global_pool": "map", "class_token": False}
VITS = {
    "ViT": ("vit_tiny_patch16_224", {}),
    "without a head": ("vit_tiny_patch16_224", {"num_classes": 0}),
    "gray": ("vit_tiny_patch16_224", {"in_chans": 1}),
    "no qkv bias": ("vit_tiny_patch16_224", {"qkv_bias": False}),
    "no positions": ("vit_tiny_patch16_224", {"pos_embed": "none", "img_size": 224}),
    "mean": ("vit_tiny_patch16_224", MEAN),
    "attention pooling": ("vit_tiny_patch16_224", MAP),
    "placed registers": ("vit_tiny_patch16_224", {"reg_tokens": 4, "img_size": 96}),
    "placed registers, mean": ("vit_tiny_patch16_224", MEAN | {"reg_tokens": 4}),
    "registers, no table rows": ("vit_tiny_patch16_224", {"reg_tokens": 4, "no_embed_class": True}),
    "DeiT": ("deit_tiny_patch16_224", {}),
    "distilled DeiT": ("deit_tiny_distilled_patch16_224", {}),
    "DeiT-III": ("deit3_small_patch16_224", {}),
    "DINOv2": ("vit_small_patch14_dinov2", {"img_size": 56, "num_classes": 0}),
    "DINOv2 giant": ("vit_giant_patch14_reg4_dinov2", {"img_size": 56} | NARROW),
    "hybrid": ("vit_small_r26_s32_224", {"img_size": 96}),
    "hybrid of the root alone": ("vit_tiny_r_s16_p8_224", {}),
}


def loaded(path):
    model, format, _, _ = open_reference(path)
    assert format == "timm"
    return model.eval()


@pytest.mark.parametrize("kind", VITS)
def test_vit_logits_match(tmp_path, kind):
    name, options = VITS[kind]
    theirs = randomize(timm.create_model(name, **SMALL | options))
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    ours = loaded(tmp_path / "model.safetensors")
    # A register and its position are added in float32.
    for dtype in [torch.float32] if "placed" in kind else TOLERANCE:
        assert difference(ours, theirs, dtype=dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {"act_layer": "gelu_tanh", "num_heads": 6}),
        ("vit_tiny_patch16_224", {"img_size": [32, 80]}),
        ("vit_tiny_patch16_224", {"img_size": [32, 80], "reg_tokens": 2, "no_embed_class": True}),
        ("deit3_small_patch16_224", {"img_size": [80, 32]}),
        ("vit_small_patch14_dinov2", {"img_size": 64}),  # eight pixels fill no patch
        ("vit_base_patch32_siglip_256", {"embed_dim": 192, "num_heads": 3}),
    ],
)
def test_config_json_determines_what_shapes_do_not(tmp_path, name, options):
    options = SMALL | options
    theirs = randomize(timm.create_model(name, **options))
    timm.models.save_for_hf(theirs, tmp_path, model_args=options, safe_serialization=True)
    ours = loaded(tmp_path)
    height, width = theirs.patch_embed.img_size
    images = torch.randn(2, 3, height, width)
    seen = images[:, :, : pair(ours.config.image_size)[0], : pair(ours.config.image_size)[1]]
    with torch.no_grad():
        assert relative(ours(seen), theirs(images)) <= TOLERANCE[torch.float32]
    assert ours.metadata.preprocessing.mean == theirs.pretrained_cfg["mean"]


@pytest.mark.parametrize(
    "name",
    [
        *("vit_base_patch16_gap_224", "vit_base_patch32_siglip_256"),
        *("vit_giantopt_patch16_siglip_256", "vit_large_patch16_siglip_384"),
        *("vit_large_patch16_siglip_512", "vit_so150m_patch16_reg4_map_256"),
        *("vit_so400m_patch14_siglip_378", "vit_so400m_patch16_siglip_256"),
        *("vit_giant_patch14_reg4_dinov2", "vit_gigantic_patch14_224"),
        *("vit_huge_patch14_224", "deit3_huge_patch14_224"),
        *("deit_base_distilled_patch16_384", "vit_large_r50_s32_384", "flexivit_small"),
    ],
)
def test_published_architectures(tmp_path, name):
    with torch.device("meta"):
        theirs = timm.create_model(name)
    timm.models._hub.save_config_for_hf(theirs, tmp_path / "config.json")
    shapes = {key: tuple(tensor.shape) for key, tensor in theirs.state_dict().items()}
    entries = {key: LazyTensor(shape, lambda: pytest.fail("read")) for key, shape in shapes.items()}
    config = timm_format.VIT.infer_config(
        timm_format.normalize(Checkpoint(entries, read_json(tmp_path / "config.json")))
    )
    block = theirs.blocks[0]
    tanh = type(block.mlp.act).__name__ == "GELUTanh"
    assert config.heads == block.attn.num_heads
    assert config.numerics.gelu == ("tanh" if tanh else "exact")
    assert config.grid == tuple(theirs.patch_embed.grid_size)
    assert timm_format.POOLS[config.pool] == theirs.global_pool
    assert sum(p.numel() for p in build(config).parameters()) == pytest.approx(
        sum(p.numel() for p in theirs.parameters()), abs=config.num_prefix * config.width
    )


def written(config, folder):
    """Return our model, and timm's after loading the folder we wrote."""
    model = randomize(build(config, device="cpu"))
    how = preset("timm", pair(config.image_size), config.channels)
    names = [f"class {index}" for index in range(config.num_classes)]
    save(model, folder, "timm", preprocessing=how, class_names=names)
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert theirs.state_dict().keys() == load_file(folder / "model.safetensors").keys()
    return model, theirs


SIZES = {"width": 24, "mlp_width": 53, "heads": 2, "patch_size": 8, "image_size": 32}
TINY = VitConfig(depth=2, num_classes=5, numerics=NUMERICS["timm"], **SIZES)
HYBRID = {"stem": "resnet", "patch_size": 1, "image_size": 64}
VIT_CHANGES = [
    {},
    {"num_classes": 0},
    {"channels": 1},
    {"channels": 4, "patch_size": (4, 8), "image_size": (24, 48)},
    {"numerics": "google"},
    {"pool": "mean", "registers": 3},
    {"pool": "map", "mlp_width": 31},
    {"position": "none", "qkv_bias": False},
    {"distillation": True, "layer_scale": 0.1},
    {"registers": 4, "layer_scale": 1e-5, "mlp": "swiglu"},
    {"mlp": "swiglu", "pool": "mean", "mlp_width": 7},
    HYBRID | {"patch_size": 2},
    HYBRID | {"resnet_blocks": (2, 2, 2, 2), "channels": 1},
    HYBRID | {"resnet_blocks": (3, 4, 9), "image_size": (32, 64), "registers": 2},
    HYBRID | {"resnet_blocks": (3, 4, 6, 3), "pool": "mean"},
]
TIMM = {"image_size": 64, "numerics": NUMERICS["timm"]}
MIXER = MixerConfig(depth=8, width=512, tokens_mlp=7, channels_mlp=51, patch_size=32)
FOLDERS = {str(changes): TINY.change(**changes) for changes in VIT_CHANGES} | {
    "BiT of two stages": BitConfig(blocks=(3, 4), num_classes=5, **TIMM),
    "wide and gray BiT": BitConfig(blocks=(3, 8), width_factor=3, channels=1, **TIMM),
    "BiT without a head": BitConfig(blocks=(3, 4, 6), width_factor=2, num_classes=0, **TIMM),
    "BiT-R101x1": BitConfig(blocks=(3, 4, 23, 3), **TIMM),
    "Mixer": MIXER.change(num_classes=5, **TIMM | {"image_size": (64, 96)}),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_timm_loads_our_folders(tmp_path, kind):
    ours, theirs = written(FOLDERS[kind], tmp_path)
    # On small images, GroupNorm over few values loses digits in float32.
    convolutional = getattr(ours.config, "stem", "") == "resnet" or "BiT" in kind
    dtype = torch.float64 if convolutional else torch.float32
    assert difference(ours, theirs, dtype=dtype) <= TOLERANCE[dtype]
    again = loaded(tmp_path)
    assert again.config == ours.config.change(numerics=again.config.numerics)
    if isinstance(ours.config, VitConfig):
        assert again.config.numerics.gelu == ours.config.numerics.gelu
    assert equal(again.state_dict(), ours.float().state_dict())


def test_timm_reads_preprocessing_class_names_and_replaces_the_head(tmp_path):
    _, theirs = written(TINY, tmp_path)
    how = timm.data.resolve_model_data_config(theirs)
    expected = preset("timm", (32, 32))
    assert how["input_size"] == [3, 32, 32]
    assert (tuple(how["mean"]), tuple(how["std"])) == (expected.mean, expected.std)
    resize = timm.data.create_transform(**how).transforms[0]
    assert expected.resize_to == (resize.size, resize.size)
    assert theirs.pretrained_cfg["label_names"][4] == "class 4"
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=2)
    assert theirs(torch.zeros(1, 3, 32, 32)).shape == (1, 2)


def load(name, weights, **options):
    model = timm.create_model(name, **options)
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize(
    ("name", "their_name", "size", "options"),
    [
        ("ViT-Ti/16", "vit_tiny_patch16_224", (224, 224), {}),
        ("R26+ViT-S/32", "vit_small_r26_s32_224", (224, 224), {"depth": 2}),
        ("BiT-R50x1", "resnetv2_50x1_bit", (161, 192), {}),
        ("Mixer-S/32", "mixer_s32_224", (224, 224), {}),
    ],
)
def test_logits_of_named_models_match(name, their_name, size, options):
    ours = random_model(name, **options, numerics="timm")
    theirs = load(their_name, to_peer(ours, "timm"), **options)
    for dtype, tolerance in TOLERANCE.items():
        assert difference(ours, theirs, size=size, dtype=dtype) <= tolerance


@pytest.mark.parametrize("size", [(384, 384), (112, 448), (96, 320)], ids=str)
def test_logits_match_at_another_image_size(size):
    ours = random_model("ViT-Ti/16", depth=2, numerics="timm")
    theirs = load("vit_tiny_patch16_224", to_peer(ours, "timm"), depth=2, dynamic_img_size=True)
    assert difference(ours, theirs, size=size) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("choice", ["gelu", "group_norm_eps", "conv_eps", "conv_eps_inside_root"])
def test_each_numeric_of_timm_matters(choice):
    google = getattr(NUMERICS["google"], choice)
    numerics = replace(NUMERICS["timm"], **{choice: google})
    ours = random_model("R26+ViT-S/32", depth=1, image_size=64, numerics=numerics)
    theirs = load("vit_small_r26_s32_224", to_peer(ours, "timm"), depth=1, img_size=64)
    error = difference(ours, theirs, dtype=torch.float64)
    assert error > TOLERANCE[torch.float64]


@pytest.mark.parametrize("grid", [(24, 24), (7, 28), (6, 20)], ids=str)
@pytest.mark.parametrize(
    ("method", "options"),
    [("timm", {}), ("bilinear", {"interpolation": "bilinear", "antialias": False})],
)
def test_position_resize_matches(grid, method, options):
    table = torch.randn(14, 14, 192, generator=torch.Generator().manual_seed(0))
    resample = partial(timm.layers.resample_abs_pos_embed, num_prefix_tokens=0, **options)
    theirs = resample(table.flatten(0, 1)[None], grid, (14, 14))[0].unflatten(0, grid)
    assert relative(resize_grid(table, grid, method), theirs) <= TOLERANCE[torch.float32]
