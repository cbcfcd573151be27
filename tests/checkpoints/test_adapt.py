import pytest
import torch
import torch.nn.functional as F
from small_models import FAMILIES, VIT, random_images, random_model

from vitrail import NUMERICS, ConfigError, Metadata, load, save
from vitrail.checkpoints.load import adapt, with_head
from vitrail.data.preprocessing import preset

pytestmark = pytest.mark.slow


def summary(changes):
    return [(part, change) for part, change, _ in changes]


def test_adapt_without_changes_returns_the_model():
    model = random_model(VIT)
    assert adapt(model) == (model, [])
    assert adapt(model, num_classes=3, image_size=8)[1] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_new_head_is_zero_and_features_are_kept(name):
    model = random_model(FAMILIES[name])
    adapted, changes = adapt(model, num_classes=7)
    images = random_images(model.config)
    assert torch.equal(adapted(images), torch.zeros(2, 7))
    assert ("head", f"{model.config.num_classes} -> 7 classes") in summary(changes)
    if name != "representation":
        assert torch.equal(adapted.features(images), model.features(images))
        assert torch.equal(adapt(model, num_classes=0)[0](images), model.features(images))


def test_new_head_is_not_multi_label():
    model = random_model(VIT)
    model.metadata = Metadata(preprocessing=preset("google", (8, 8)), multi_label=True)
    headed = with_head(model, torch.zeros(2, 8), torch.zeros(2), ("a", "b"))
    for other in (headed, adapt(model, num_classes=5)[0], adapt(model, num_classes=0)[0]):
        assert not other.metadata.multi_label
    assert headed.metadata.class_names == ("a", "b")
    assert adapt(model, image_size=16)[0].metadata.multi_label  # the same head


def test_new_head_drops_representation_unless_kept():
    model = random_model(VIT.change(representation=5))
    dropped, changes = adapt(model, num_classes=4)
    assert dropped.representation is None
    assert summary(changes) == [("pre_logits", "dropped"), ("head", "3 -> 4 classes")]
    kept, changes = adapt(model, num_classes=4, keep_representation=True)
    assert torch.equal(kept.representation.weight, model.representation.weight)
    assert summary(changes) == [("head", "3 -> 4 classes")]


@pytest.mark.parametrize(
    "name", ["vit", "mean", "distilled", "registers", "sincos", "relative", "2-D at every layer"]
)
def test_adapted_positions_equal_interpolation_in_forward(name):
    model = random_model(FAMILIES[name])
    adapted, changes = adapt(model, image_size=(16, 12))
    assert summary(changes) == [("positions", "2 x 2 -> 4 x 3")]
    images = torch.randn(2, 3, 16, 12)
    torch.testing.assert_close(adapted(images), model(images), atol=1e-5, rtol=1e-5)
    assert adapted.metadata.preprocessing.size == (16, 12)


@pytest.mark.parametrize("name", ["vit", "relative", "2-D at every layer"])
def test_updating_interpolated_positions_leaves_the_original_as_it_was(name):
    model, images = random_model(FAMILIES[name]), torch.randn(2, 3, 16, 12)
    with torch.no_grad():
        expected = model(images)
        adapted, _ = adapt(model, image_size=(16, 12))
        for key, parameter in adapted.named_parameters():
            if "position" in key:
                parameter.zero_()
        assert torch.equal(model(images), expected)


def test_channels_preserve_the_sum():
    model = random_model(VIT)
    adapted, changes = adapt(model, channels=1)
    images, gray = torch.randn(2, 3, 8, 8), torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(adapted(gray), model(gray.expand(-1, 3, -1, -1)))
    assert summary(changes) == [("channels", "3 -> 1")]
    assert adapted.metadata.preprocessing.mean == (0.5,)
    adapted, _ = adapt(model, channels=6)
    torch.testing.assert_close(adapted(images.repeat(1, 2, 1, 1)), model(images))


@pytest.mark.parametrize("name", ["hybrid", "bit", "mixer", "conv stem"])
def test_every_family_adapts_to_one_channel(name):
    adapted, _ = adapt(random_model(FAMILIES[name]), channels=1)
    assert adapted(random_images(adapted.config)).shape == (2, 3)


def test_flexivit_resize_preserves_tokens():
    """For enlarged patches, the resized kernels compute the same tokens."""
    model = random_model(VIT.change(image_size=16))
    adapted, changes = adapt(model, patch_size=8, image_size=32)
    assert summary(changes) == [("patches", "4 -> 8 pixels")]
    images = torch.randn(2, 3, 16, 16)
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4)  # enlarge each patch by itself, as the method
    grown = F.interpolate(patches.flatten(0, 3)[:, None], (8, 8), mode="bilinear", antialias=True)
    grown = grown.view(2, 3, 4, 4, 8, 8).permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 32, 32)
    torch.testing.assert_close(adapted(grown), model(images), atol=1e-4, rtol=1e-4)


def test_impossible_adaptations_raise():
    with pytest.raises(ConfigError, match="does not fit a Mixer trained at 8"):
        adapt(random_model(FAMILIES["mixer"]), image_size=16)
    with pytest.raises(ConfigError, match="patch_size can only be changed for a ViT"):
        adapt(random_model(FAMILIES["hybrid"]), patch_size=2)
    with pytest.raises(ConfigError, match="is not a whole number of 4-pixel patches"):
        adapt(random_model(VIT), image_size=9)


def test_load_logs_changes(tmp_path, caplog, capsys):
    save(
        random_model(VIT.change(representation=5)), tmp_path / "model", class_names=["a", "b", "c"]
    )
    lines = []
    model = load(tmp_path / "model", num_classes=7, image_size=16, log=lines.append)
    assert "from" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["positions", "pre_logits", "head"]
    assert "2 x 2 -> 4 x 4" in lines[1]
    assert "new, initialized to zero" in lines[3]
    assert model.metadata.class_names == ()
    caplog.set_level("INFO", logger="vitrail")
    model = load(tmp_path / "model", image_size=16)
    assert model.metadata.class_names == ("a", "b", "c")
    assert "interpolated (google)" in caplog.text
    assert {record.levelname for record in caplog.records} == {"INFO"}
    caplog.clear()
    load(tmp_path / "model")
    assert not caplog.records
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "")


def test_load_overrides_numerics(tmp_path):
    config = VIT.change(numerics="transformers")
    save(random_model(config), tmp_path / "model", "huggingface")
    lines = []
    model = load(tmp_path / "model", numerics="google", image_size=16, log=lines.append)
    authors, _ = adapt(random_model(VIT), image_size=16)
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(images), authors(images))
    assert not torch.allclose(load(tmp_path / "model", image_size=16)(images), authors(images))
    assert [line.split()[:4] for line in lines[1:]] == [
        ["numerics", "transformers", "->", "google"],
        ["positions", "2", "x", "2"],
    ]
    assert lines[-1].endswith("interpolated (google)")
    assert load(tmp_path / "model", numerics=NUMERICS["timm"]).config.numerics == NUMERICS["timm"]
    with pytest.raises(ConfigError, match="unknown numerics 'googel'; did you mean 'google'"):
        load(tmp_path / "model", numerics="googel")
