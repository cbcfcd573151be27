import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiny_models
import vitrail
from vitrail import ConfigError, VisionTransformer, create
from vitrail.models.attention import ATTENTIONS, SelfAttention
from vitrail.models.config import REGISTERED
from vitrail.models.encoder import Branch, drop_path
from vitrail.models.init import initialize
from vitrail.models.resnet import pad_same
from vitrail.models.vit import build


def random_model(config):
    return tiny_models.random_model(config).double()


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 3, 8, 8, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(
    "kind", [{}, {"distillation": True}, {"position": "relative"}, {"qkv_bias": False}]
)
def test_computing_only_head_tokens_keeps_logits_and_gradients(images, tiny, kind):
    model = random_model(tiny.change(**kind))
    outcomes = []
    for read in (model.head_tokens, None):
        model.head_tokens = read
        model.zero_grad()
        logits = model(images)
        logits.square().sum().backward()
        outcomes.append([logits, *(p.grad.clone() for p in model.parameters())])
    for short, full in zip(*outcomes, strict=True):
        torch.testing.assert_close(short, full, atol=1e-9, rtol=1e-9)


def test_logits_are_the_mean_of_class_and_distillation_token(images, tiny):
    model = random_model(tiny.change(distillation=True))
    by_class, by_distillation = model.distillation_logits(images)
    torch.testing.assert_close(model(images), (by_class + by_distillation) / 2)
    torch.testing.assert_close(by_class, model.head(model.features(images)))


def test_attention_pool_is_weighted_mean_of_values(tiny):
    pool = random_model(tiny.change(pool="map", registers=2)).pool
    tokens = torch.randn(2, 7, 8, dtype=torch.float64)
    weights = pool.attention_map(tokens)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 2, 1, dtype=torch.float64))
    assert torch.equal(pool.attention_map(tokens, heads=[1]), weights[:, [1]])
    value = pool.key_value(tokens[:, 2:]).chunk(2, dim=-1)[1].unflatten(-1, (2, 4)).transpose(1, 2)
    pooled = pool.merge((weights @ value).flatten(1))
    torch.testing.assert_close(pool(tokens), pooled + pool.mlp(pool.norm(pooled)))


@pytest.mark.parametrize(
    ("family", "kind"), [("vit", "dropout"), ("vit", "drop_path"), ("mixer", "drop_path")]
)
def test_dropout_and_drop_path_are_active_in_training_only(tiny, family, kind):
    mixer = create("Mixer-S/16", depth=2, width=8, image_size=32, num_classes=3).config
    config = {"vit": tiny, "mixer": mixer}[family].change(**{kind: 0.5})
    model = random_model(config).float()
    images = torch.randn(8, 3, config.image_size, config.image_size)
    assert torch.equal(model(images), model(images))
    model.train()
    assert not torch.equal(model(images), model(images))


def test_each_dropout_affects_the_logits(tiny):
    """After adding positions, and after every dense layer but q, k and v (appendix B.1)."""
    block = [f"encoder.blocks.0.{part}.dropout" for part in ("branch1", "mlp", "branch2")]
    model = VisionTransformer(tiny.change(depth=1, dropout=0.5))
    places = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout)]
    assert places == ["dropout", *block]
    model, images = random_model(tiny.change(depth=1)), torch.randn(4, 3, 8, 8).double()
    before = model(images)
    for place in places:
        dropout = model.get_submodule(place).train()
        dropout.p = 0.9
        assert not torch.allclose(model(images), before)
        dropout.eval()


def test_conv_stem_matches_functional_ops(images, tiny):
    stem = random_model(tiny.change(stem="conv")).stem
    expected = images
    for index in (0, 3):
        expected = F.conv2d(expected, stem.layers[index].weight, stride=2, padding=1)
        norm = stem.layers[index + 1]
        expected = F.group_norm(expected, norm.num_groups, norm.weight, norm.bias, norm.eps)
        expected = F.relu(expected)
    expected = F.conv2d(expected, stem.projection.weight, stem.projection.bias)
    torch.testing.assert_close(stem(images), expected.permute(0, 2, 3, 1))


def test_autocast_keeps_residual_stream_in_float32(tiny):
    model = random_model(tiny).float()
    for images in (torch.randn(2, 3, 8, 8), torch.randn(2, 3, 12, 8)):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            assert {layer.dtype for layer in model.layers(images)} == {torch.float32}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(images).sum().backward()


def test_forward_hooks_see_unmodified_outputs(tiny):
    model = random_model(tiny).float()
    outputs = {}
    for name in ("attention", "mlp", "mlp.fc1"):
        module = model.encoder.blocks[0].get_submodule(name)
        module.register_forward_hook(lambda *args, name=name: outputs.update({name: args[2]}))
    model.encoder.blocks[0].register_forward_hook(lambda *args: None)
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        model(images)
        block = model.encoder.blocks[0]
        tokens = model.tokens(images)
        update = block.attention(block.norm1(tokens))
        torch.testing.assert_close(outputs["attention"], update)
        torch.testing.assert_close(outputs["mlp"], block.mlp(block.norm2(tokens + update)))
        hidden = F.linear(block.norm2(tokens + update), block.mlp.fc1.weight, block.mlp.fc1.bias)
        torch.testing.assert_close(outputs["mlp.fc1"], hidden)


def test_second_derivatives_with_unfused_attention(tiny):
    model = random_model(tiny.change(numerics="timm")).float()
    images = torch.randn(1, 3, 8, 8, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        (gradient,) = torch.autograd.grad(model(images).sum(), images, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), images)
    assert second.abs().sum() > 0


def test_backward_hooks_see_all_tokens_of_the_last_block(tiny, images):
    model, shapes = random_model(tiny), []
    block = model.encoder.blocks[-1]
    block.register_full_backward_hook(lambda *args: shapes.append(args[2][0].shape))
    model(images).sum().backward()
    assert shapes == [model.tokens(images).shape]


def test_forward_hooks_see_all_tokens_of_the_last_block(tiny, images):
    model = random_model(tiny)
    logits, block = model(images), model.encoder.blocks[-1]
    for name, module in {"norm": model.encoder.norm, "block": block, "mlp": block.mlp}.items():
        outputs = []
        hook = module.register_forward_hook(lambda *args, to=outputs: to.append(args[2]))
        torch.testing.assert_close(model(images), logits, atol=1e-9, rtol=1e-9)
        hook.remove()
        assert outputs[0].shape == model.tokens(images).shape, name
        if name == "norm":
            torch.testing.assert_close(outputs[0], model.encode(images))


@pytest.mark.parametrize("everywhere", [False, True])
def test_forward_pre_hooks_see_unmodified_inputs(tiny, everywhere):
    model = random_model(tiny).float()
    branch, inputs = model.encoder.blocks[0].branch1, []

    def hook(module, args):
        if module is branch:
            inputs.extend([args[0], args[0].clone()])

    registered = torch.nn.modules.module.register_module_forward_pre_hook
    handle = registered(hook) if everywhere else branch.register_forward_pre_hook(hook)
    try:
        with torch.no_grad():
            model(torch.randn(2, 3, 8, 8))
    finally:
        handle.remove()
    assert torch.equal(*inputs)


@pytest.mark.parametrize("kind", [{}, {"distillation": True}, {"pool": "map"}])
def test_replaced_qkv_layer_is_called(images, tiny, kind):
    model = random_model(tiny.change(**kind))
    expected = model(images)
    owner, name = model.encoder.blocks[-1].attention, "qkv"
    if model.config.pool == "map":
        owner, name = model.pool, "key_value"
    layer, calls = getattr(owner, name), []
    handle = layer.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(model(images), expected)
    assert calls == [1]
    handle.remove()
    forward = layer.forward
    layer.forward = lambda x: calls.append(2) or forward(x)  # as accelerate does
    torch.testing.assert_close(model(images), expected)
    assert calls == [1, 2]
    setattr(owner, name, torch.nn.Sequential(layer, torch.nn.Tanh()))  # as adapters do
    assert not torch.allclose(model(images), expected)


def test_attention_map_indices_are_validated(images, tiny):
    model = random_model(tiny)
    (last,) = model.attention_maps(images, layers=[-1], heads=[1])
    *_, every = model.attention_maps(images)
    assert torch.equal(last, every[:, [1]])
    with pytest.raises(ConfigError, match=r"layers=\[9\]: 9 is out of range; there are 2"):
        model.attention_maps(images, layers=[9])
    with pytest.raises(ConfigError, match="heads"):
        model.attention_maps(images, heads=[2])
    calls = []
    model.encoder.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    list(model.attention_maps(images, layers=[0]))
    assert calls == []  # only the first layer was needed


def test_drop_path_and_layer_scale(tiny):
    model = VisionTransformer(tiny.change(depth=3, drop_path=0.4))
    assert [block.branch1.drop_path for block in model.encoder.blocks] == [0.0, 0.2, 0.4]
    torch.manual_seed(0)
    out = drop_path(torch.ones(4000, 2, 3), 0.25)
    assert out.unique().tolist() == pytest.approx([0, 4 / 3])
    assert out.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(out[:, :1, :1].expand_as(out), out)  # per image, not per value
    branch = Branch(3, scale=0.1, dropout=0.0, drop_path=0.0)
    torch.testing.assert_close(branch(torch.ones(1, 2, 3)), torch.full((1, 2, 3), 0.1))


@pytest.mark.parametrize(
    ("size", "kernel", "edges"), [(224, 7, (2, 3)), (112, 3, (0, 1)), (7, 3, (1, 1))]
)
def test_same_padding_matches_tensorflow(size, kernel, edges):
    padded = pad_same(torch.ones(1, 1, size, size), kernel, 2)
    assert padded.shape[-1] == size + sum(edges)
    inside = padded[0, 0, edges[0] : size + edges[0], edges[0] : size + edges[0]]
    assert inside.all()
    assert padded.sum() == size * size  # zeros around it


def test_bfloat16_and_float64_models_run(tiny):
    for kind in ({}, {"position": "sincos-2d"}, {"position": "relative", "registers": 1}):
        for dtype in (torch.bfloat16, torch.float64):
            model = build(tiny.change(**kind), device="cpu")
            initialize(model)
            assert model.to(dtype)(torch.rand(1, 3, 8, 8, dtype=dtype)).dtype == dtype


class SigmoidAttention(SelfAttention):
    """Without a softmax (Ramapuram et al. 2024, arXiv:2409.04431)."""

    def weights(self, query, key, bias=None):
        scores = query @ key.mT / query.shape[-1] ** 0.5
        return torch.sigmoid(scores if bias is None else scores + bias) / key.shape[2]


@pytest.mark.parametrize("changes", [{}, {"pool": "mean", "position": "relative"}])
def test_attention_variant_is_used_by_every_path(images, tiny, changes):
    model = random_model(tiny.change(**changes))
    softmax = model(images)
    for block in model.encoder.blocks:
        block.attention.__class__ = SigmoidAttention
    logits = model(images)
    assert not torch.allclose(logits, softmax, rtol=0.01)
    torch.testing.assert_close(logits, model.run_head(model.encode(images))[1])
    tokens, grid = model.prepare_tokens(images)
    maps = list(model.attention_maps(images))
    for index, output in enumerate(model.layers(images)):
        block = model.encoder.blocks[index]
        tokens, relative = model.encoder.layer_inputs(index, tokens, grid)
        value = block.attention.query_key_value(block.norm1(tokens), relative)[2]
        mixed = block.attention.merge((maps[index] @ value).transpose(1, 2).flatten(2))
        torch.testing.assert_close(output, block.add_mlp(tokens + mixed))
        tokens = output
    assert torch.equal(next(model.attention_maps(images, layers=[0], heads=[1])), maps[0][:, [1]])
    assert torch.equal(next(model.attention_maps(images, layers=0, heads=1)), maps[0][:, [1]])


@pytest.fixture
def talking_heads():
    """An attention with weights of its own, registered for one test."""

    @vitrail.register_attention("talking")
    class TalkingHeads(vitrail.SelfAttention):
        def __init__(self, config):
            super().__init__(config)
            self.mixing = torch.nn.Linear(config.heads, config.heads)
            self.temperature = torch.nn.Parameter(torch.full((config.heads, 1, 1), 2.0))

        def weights(self, query, key, bias=None):
            scores = (query @ key.mT / self.temperature).movedim(1, -1)
            return self.mixing(scores).movedim(-1, 1).softmax(dim=-1)

    yield TalkingHeads
    del ATTENTIONS["talking"]
    REGISTERED["attention"].remove("talking")


@pytest.mark.slow
def test_registered_attention_is_created_adapted_trained_and_saved(talking_heads, tmp_path):
    sizes = {"width": 8, "heads": 2, "depth": 2, "image_size": 16, "num_classes": 10}
    models = [
        vitrail.create(
            "ViT-Pico/8", attention="talking", generator=torch.Generator().manual_seed(1), **sizes
        )
        for _ in range(2)
    ]
    for ours, same in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, same)
    assert models[0].encoder.blocks[1].attention.temperature.unique() == 2
    images = torch.randn(2, 3, 16, 16)
    vitrail.save(random_model(models[0].config.change(attention="global")).float(), tmp_path / "a")
    lines = []
    model = vitrail.load(tmp_path / "a", attention="talking", log=lines.append)
    assert any("6 new tensors, initialized" in line for line in lines)
    assert model(images).isfinite().all()
    vitrail.save(model, tmp_path / "b")
    assert torch.equal(vitrail.load(tmp_path / "b")(images), model(images))
    options = {"steps": 1, "batch_size": 4, "optim": {"kind": "adamw", "learning_rate": 1e-3}}
    for start in ({"start": tmp_path / "a"}, {}):
        changes = {} if start else {"name": "ViT-Pico/8", "depth": 2, "image_size": 16}
        changes["attention"], out = "talking", tmp_path / f"run{len(start)}"
        vitrail.train("builtin:sign-digits", out, model=changes, **start, **options)
        block = vitrail.load(out).encoder.blocks[0]
        assert isinstance(block.attention, talking_heads)
    with pytest.raises(ConfigError, match="did you mean 'talking'"):
        models[0].config.change(attention="talkin")
    with pytest.raises(ConfigError, match="exists"):
        vitrail.register_attention("global")(talking_heads)
    with pytest.raises(ConfigError, match="subclass of SelfAttention"):
        vitrail.register_attention("linear")(torch.nn.Linear)


def test_attention_maps_of_an_unknown_forward_pass_raise(tiny):
    class Uniform(SelfAttention):
        def forward(self, tokens, *args):
            return tokens.mean(dim=1, keepdim=True)

    model = random_model(tiny)
    model.encoder.blocks[1].attention.__class__ = Uniform
    with pytest.raises(ConfigError, match=r"blocks\.1\.attention is a Uniform .* `weights`"):
        list(model.attention_maps(torch.randn(1, 3, 8, 8, dtype=torch.float64)))
