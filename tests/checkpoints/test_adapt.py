import pytest
import torch
import torch.nn.functional as F
from small_models import FAMILIES, VIT, awake, probe

from vitrail import NUMERICS, ConfigError, load, save
from vitrail.checkpoints.adapt import adapt


def told(changes):
    return [(change.part, change.change) for change in changes]


def test_nothing_asked_is_nothing_done():
    model = awake(VIT)
    assert adapt(model) == (model, [])
    assert adapt(model, num_classes=3, image_size=8)[1] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_a_new_head_starts_at_zero_on_the_old_features(name):
    model = awake(FAMILIES[name])
    adapted, changes = adapt(model, num_classes=7)
    images = probe(model.config)
    assert torch.equal(adapted(images), torch.zeros(2, 7))
    assert ("head", f"{model.config.num_classes} -> 7 classes") in told(changes)
    if name != "representation":
        assert torch.equal(adapted.features(images), model.features(images))


def test_no_classes_means_features():
    model = awake(VIT)
    adapted, _ = adapt(model, num_classes=0)
    images = probe(VIT)
    assert torch.equal(adapted(images), model.features(images))


def test_a_new_head_drops_the_representation_layer_unless_it_is_kept():
    model = awake(VIT.change(representation=5))
    dropped, changes = adapt(model, num_classes=4)
    assert dropped.representation is None
    assert told(changes) == [("pre_logits", "dropped"), ("head", "3 -> 4 classes")]
    kept, changes = adapt(model, num_classes=4, keep_representation=True)
    assert torch.equal(kept.representation.weight, model.representation.weight)
    assert told(changes) == [("head", "3 -> 4 classes")]


@pytest.mark.parametrize(
    "name", ["vit", "mean", "distilled", "registers", "sines", "relative", "2-D at every layer"]
)
def test_stretching_ahead_of_time_is_stretching_on_the_fly(name):
    model = awake(FAMILIES[name])
    adapted, changes = adapt(model, image_size=(16, 12))
    assert told(changes) == [("positions", "2 x 2 -> 4 x 3")]
    images = torch.randn(2, 3, 16, 12)
    torch.testing.assert_close(adapted(images), model(images), atol=1e-5, rtol=1e-5)
    assert adapted.metadata.preprocessing.size == (16, 12)


def test_gray_pictures_see_what_colored_ones_saw():
    model = awake(VIT)
    adapted, changes = adapt(model, channels=1)
    gray = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(adapted(gray), model(gray.expand(-1, 3, -1, -1)))
    assert told(changes) == [("channels", "3 -> 1")]
    assert adapted.metadata.preprocessing.mean == (0.5,)


def test_more_channels_keep_the_size_of_the_sum():
    model = awake(VIT)
    adapted, _ = adapt(model, channels=6)
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(adapted(images.repeat(1, 2, 1, 1)), model(images))


@pytest.mark.parametrize("name", ["hybrid", "bit", "mixer", "conv stem"])
def test_every_family_takes_other_channels(name):
    adapted, _ = adapt(awake(FAMILIES[name]), channels=1)
    assert adapted(probe(adapted.config)).shape == (2, 3)


def test_larger_patches_of_larger_pictures_give_the_same_tokens():
    """FlexiViT's promise: for enlarged pictures the resized kernels lose nothing."""
    model = awake(VIT.change(image_size=16))
    adapted, changes = adapt(model, patch_size=8, image_size=32)
    assert told(changes) == [("patches", "4 -> 8 pixels")]
    images = torch.randn(2, 3, 16, 16)
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4)  # enlarge each patch by itself, as the method
    grown = F.interpolate(patches.flatten(0, 3)[:, None], (8, 8), mode="bilinear", antialias=True)
    grown = grown.view(2, 3, 4, 4, 8, 8).permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 32, 32)
    torch.testing.assert_close(adapted(grown), model(images), atol=1e-4, rtol=1e-4)


def test_what_cannot_be_adapted_is_one_line():
    with pytest.raises(ConfigError, match="does not fit a Mixer trained at 8"):
        adapt(awake(FAMILIES["mixer"]), image_size=16)
    with pytest.raises(ConfigError, match="patch_size can only be changed for a ViT"):
        adapt(awake(FAMILIES["hybrid"]), patch_size=2)
    with pytest.raises(ConfigError, match="is not a whole number of 4-pixel patches"):
        adapt(awake(VIT), image_size=9)


def test_loading_tells_what_was_changed(tmp_path, capsys):
    save(awake(VIT.change(representation=5)), tmp_path / "model", class_names=["a", "b", "c"])
    lines = []
    model = load(tmp_path / "model", num_classes=7, image_size=16, log=lines.append)
    assert "from" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["positions", "pre_logits", "head"]
    assert "2 x 2 -> 4 x 4" in lines[1]
    assert "new, initialized to zero" in lines[3]
    assert model.metadata.class_names == ()
    load(tmp_path / "model", image_size=16)
    assert "interpolated (google)" in capsys.readouterr().err
    load(tmp_path / "model")
    assert capsys.readouterr().err == ""


def test_class_names_stay_with_their_head(tmp_path):
    save(awake(VIT), tmp_path, class_names=["a", "b", "c"])
    model = load(tmp_path, image_size=16, log=lambda line: None)
    assert model.metadata.class_names == ("a", "b", "c")


def test_weights_can_be_run_under_their_authors_numerics(tmp_path):
    config = VIT.change(numerics="transformers")
    save(awake(config), tmp_path / "model", "huggingface")
    lines = []
    model = load(tmp_path / "model", numerics="google", image_size=16, log=lines.append)
    authors, _ = adapt(awake(VIT), image_size=16)  # the same weights, in the authors' library
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
