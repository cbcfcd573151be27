import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tiny_runs import tiny_run, write_colors, write_folder
from vitrail import CheckpointError, ConfigError
from vitrail.cli import main
from vitrail.probing import teach as module
from vitrail.probing.ridge import L2_GRID, fit_moments, fit_path
from vitrail.probing.teach import ProbeMemory, features_digest, fit_head, load_memory, save_memory

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
COLORS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "gray": (1, 1, 1)}


def paint(folder, name, count=6):
    """Write a folder of noisy images of one color."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = RNG.integers(0, 80, (8, 8, 3)) + 120 * np.array(COLORS[name])
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def model(home):
    """A bundle without classes."""
    torch.manual_seed(0)
    vitrail.save(vitrail.create("ViT-Mu/4", image_size=8, num_classes=0), home / "backbone")
    return home / "backbone"


@pytest.fixture
def folders(home):
    """A folder of images for each color."""
    return {name: paint(home / name, name) for name in COLORS}


def some(folders, *names):
    return {name: folders[name] for name in names}


@pytest.fixture
def taught(model, home, folders):
    """A bundle that was taught red and green."""
    vitrail.teach(model, some(folders, "red", "green"), home / "taught")
    return home / "taught"


def head(folder):
    loaded = vitrail.load(folder)
    return torch.cat([loaded.head.weight, loaded.head.bias[:, None]], 1)


def contents(place):
    return {path: path.read_bytes() for path in [place, *place.glob("*")] if path.is_file()}


def assert_same(one, other):
    scale = one.abs().max()
    torch.testing.assert_close(one / scale, other / scale, rtol=0, atol=1e-6)


def test_teaching_one_by_one_equals_teaching_together(model, taught, home, folders):
    together = vitrail.teach(model, folders, home / "together")
    vitrail.teach(taught, some(folders, "blue"))  # in place
    with pytest.raises(ConfigError, match="taught already contains a model"):
        vitrail.teach(model, folders, taught)
    (home / "other").mkdir()
    last = vitrail.teach(taught, some(folders, "gray"), home / "other" / ".." / "taught")
    assert last.classes == together.classes == tuple(COLORS)
    assert vitrail.load(taught).metadata.class_names == tuple(COLORS)
    assert_same(head(taught), head(home / "together"))


def test_replacing_a_class_forgets_only_its_own_images(model, taught, home, folders):
    wrong = {"red": folders["gray"], "green": folders["green"]}
    vitrail.teach(model, wrong, home / "wrong")
    result = vitrail.teach(home / "wrong", some(folders, "red"))
    assert result.replaced == ("red",)
    assert_same(head(home / "wrong"), head(taught))


def test_teaching_reports_progress_and_confirms_the_preprocessing(model, home, folders):
    vitrail.save(vitrail.load(model), home / "assumed", provenance={"preprocessing": "assumed"})
    calls = []
    progress = {"progress": lambda *done: calls.append(done)}
    vitrail.teach(home / "assumed", folders, home / "out", **progress)
    assert calls == [(6, 6)] * len(COLORS)
    assert "preprocessing" not in vitrail.load(home / "out").metadata.provenance


def test_taught_classes_are_recognized_with_calibrated_confidence(model, home):
    places = {name: paint(home / "train" / name, name, 8) for name in ("red", "green", "blue")}
    taught = vitrail.teach(model, places, home / "taught")
    for name in places:
        paint(home / "test" / name, name)
    result = vitrail.evaluate(home / "taught", home / "test")
    assert min(result.accuracy, taught.accuracy) > 0.9
    assert result.calibration.confidence[-1] > 0.5


def test_compressed_memory_gives_the_same_head():
    net = vitrail.create("ViT-Mu/4", image_size=8, num_classes=0)
    width = net.config.num_features
    values = RNG.normal(size=(3 * width, width)).astype(np.float32) + 1
    labels = np.array([0] * (2 * width) + [1] * width)
    memory = ProbeMemory.of(net, values, labels, ["a", "b"]).compressed()
    assert len(memory.rows) == 2 * width
    assert len(memory.rows) < memory.counts.sum()
    x = torch.from_numpy(values).double()
    sums = torch.stack([x[labels == c].sum(0) for c in (0, 1)])
    expected = fit_moments(torch.tensor([2 * width, width]), sums, x.mT @ x, memory.l2)
    headed, _, accuracy = fit_head(net, memory)
    assert accuracy is None
    assert_same(headed.head.weight.double(), expected.linear()[0])


def clusters(net, counts, distance=2.0, seed=0):
    """Return features with `counts` rows around a center for each class, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(counts)), counts)
    values = rng.normal(size=(len(labels), net.config.num_features)).astype(np.float32)
    values[np.arange(len(labels)), labels] += distance
    return values, labels


def recalls(headed, values, labels):
    with torch.no_grad():
        right = headed.head(torch.from_numpy(values)).argmax(1).numpy() == labels
    return [float(right[labels == c].mean()) for c in np.unique(labels)]


@pytest.mark.parametrize("counts", [(8, 8, 8, 160), (160, 160, 8), (2, 40), (1, 1, 30)])
def test_class_with_more_images_has_no_advantage(counts):
    net = vitrail.create("ViT-Mu/4", image_size=8, num_classes=0)
    distance = 2.0 if min(counts) == 8 else 3.0
    test = clusters(net, [300] * len(counts), distance, seed=1)
    memory = ProbeMemory.of(
        net, *clusters(net, counts, distance), [str(c) for c in range(len(counts))]
    )
    plain, _, before = fit_head(net, memory, adjust=False)
    headed, chosen, held_out = fit_head(net, memory)
    plain, after = recalls(plain, *test), recalls(headed, *test)
    assert np.mean(after) > np.mean(plain) + 0.08
    assert np.ptp(after) < np.ptp(plain) - 0.2
    if min(counts) == 8:
        assert held_out.balanced_accuracy > before.balanced_accuracy + 0.1
        assert held_out.balanced_accuracy == pytest.approx(np.mean(after), abs=0.12)
        assert held_out.accuracy < before.accuracy
    again, _, _ = fit_head(net, chosen.compressed())  # the largest class as a triangle
    assert_same(headed.head.bias, again.head.bias)


@pytest.mark.parametrize("count", [1, 7, 30])
def test_balanced_classes_are_not_adjusted(count):
    net = vitrail.create("ViT-Mu/4", image_size=8, num_classes=0)
    memory = ProbeMemory.of(net, *clusters(net, [count] * 3), ["a", "b", "c"])
    headed, _, held_out = fit_head(net, memory)
    plain, _, _ = fit_head(net, memory, adjust=False)
    torch.testing.assert_close(headed.head.weight, plain.head.weight, rtol=0, atol=0)
    torch.testing.assert_close(headed.head.bias, plain.head.bias, rtol=0, atol=1e-6)
    path = fit_path(memory.rows, memory.owners, 3, l2=sorted({memory.l2, *L2_GRID}))
    assert held_out.accuracy == pytest.approx(path.accuracies[path.best])
    assert held_out.balanced_accuracy == pytest.approx(held_out.accuracy)


def test_class_without_images_is_not_adjusted():
    net = vitrail.create("ViT-Mu/4", image_size=8, num_classes=0)
    values, labels = clusters(net, (8, 0, 40))
    memory = ProbeMemory.of(net, values, labels, ["a", "b", "c"])
    headed, _, held_out = fit_head(net, memory)
    plain, _, _ = fit_head(net, memory, adjust=False)
    assert headed.head.bias[1] == plain.head.bias[1]
    assert headed.head.bias.isfinite().all()
    assert 0 < held_out.balanced_accuracy <= 1


def test_command_prints_balanced_accuracy_of_imbalanced_classes(model, home, capsys):
    """Classes that cannot be told apart: their recalls are equal only if both are 0 or 1."""
    words = [f"{name}={paint(home / name, 'gray', n)}" for name, n in (("red", 3), ("blue", 11))]
    assert main(["teach", str(model), *words, "--out", str(home / "out")]) == 0
    assert re.search(r"accuracy \d+\.\d %, balanced \d+\.\d %\n", capsys.readouterr().out)


def test_memory_is_saved_with_l2_and_temperature(model, home):
    net = vitrail.load(model)
    width = net.config.num_features
    values = RNG.normal(size=(4 * width, width)).astype(np.float32)
    labels = np.arange(4 * width) % 2
    values[:, 0] += 3 * labels
    whole = ProbeMemory.of(net, values[:6], np.arange(6) // 3, ["über", "b"])
    save_memory(whole, home)
    loaded = load_memory(home, net)
    for name, value in vars(whole).items():
        other = getattr(loaded, name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
    _, memory, accuracy = fit_head(net, ProbeMemory.of(net, values, labels, ["a", "b"]))
    assert accuracy is not None
    assert memory.temperature < 0.7
    save_memory(memory, home)
    loaded = load_memory(home, net)
    assert len(loaded.rows) < loaded.counts.sum()
    assert fit_head(net, loaded)[1].temperature == memory.temperature


def test_memory_that_is_too_large_is_deleted_with_a_note(taught, folders, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    result = vitrail.teach(taught, some(folders, "blue"))
    assert "too many classes to store" in result.notes[-1]
    assert not (taught / "probe.safetensors").exists()


def test_memory_that_does_not_fit_is_refused(taught, folders):
    memory, blue = taught / "probe.safetensors", some(folders, "blue")
    old = memory.read_bytes()
    vitrail.teach(taught, blue)
    memory.write_bytes(old)  # killed between the two
    with pytest.raises(CheckpointError, match=r"older than the model .* lacks 'blue'"):
        vitrail.teach(taught, blue)
    memory.write_bytes(old[:50])
    with pytest.raises(CheckpointError, match=r"probe\.safetensors cannot be read"):
        vitrail.teach(taught, folders)
    memory.write_bytes(old)
    torch.manual_seed(1)
    vitrail.save(vitrail.create("ViT-Mu/4", image_size=8, num_classes=2), taught)
    with pytest.raises(CheckpointError, match="made with other weights"):
        vitrail.teach(taught, blue)


@pytest.mark.parametrize("too_large", [True, False])
def test_full_disk_leaves_the_bundle_unchanged(taught, folders, monkeypatch, too_large):
    before = contents(taught)
    if too_large:
        monkeypatch.setattr(module, "MAX_BYTES", 100)

    def full(*_: object, **__: object) -> None:
        raise CheckpointError("cannot write model.safetensors: No space left on device")

    monkeypatch.setattr(module, "save", full)  # there was room for the memory
    with pytest.raises(CheckpointError, match="No space left"):
        vitrail.teach(taught, some(folders, "blue"))
    assert contents(taught) == before


def test_trained_model_takes_its_classes_from_its_data(home, folders):
    data = write_colors(home / "colors.npz", train=90, test=30)
    tiny_run(data, home / "run", steps=40)
    before = vitrail.evaluate(home / "run", data).accuracy
    taught = vitrail.teach(home / "run", some(folders, "gray"), home / "more")
    assert taught.classes == ("red", "green", "blue", "gray")
    assert "90 images of the 3 known classes" in taught.notes[0]
    assert vitrail.evaluate(home / "more", data).accuracy >= before - 0.1


def test_trained_model_without_its_data_needs_using_or_only(home, folders):
    data = write_colors(home / "colors.npz")
    tiny_run(data, home / "run")
    moved = data.rename(home / "moved.npz")
    gray = some(folders, "gray")
    with pytest.raises(ConfigError, match=r"knows 3 classes.*Dataset not found.*--using .*--only"):
        vitrail.teach(home / "run", gray, home / "more")
    two = write_colors(home / "two.npz", classes=2)
    with pytest.raises(ConfigError, match=r"two\.npz has no images of 'blue'"):
        vitrail.teach(home / "run", gray, home / "more", using=two)
    assert len(vitrail.teach(home / "run", gray, home / "a", using=moved).classes) == 4
    only = vitrail.teach(home / "run", some(folders, "gray", "red"), home / "b", only=True)
    assert only.classes == ("gray", "red")


def test_held_out_images_stay_held_out(home, folders):
    data = write_folder(home / "pictures", 20)
    tiny_run(data, home / "run", dev=0.3)
    taught = vitrail.teach(home / "run", some(folders, "gray"), home / "more")
    assert "42 images of the 3 known classes" in taught.notes[0]
    result = vitrail.evaluate(home / "more", f"{data}/")
    assert result.notes[0] == "split: val"
    assert result.samples == 18
    assert not [note for note in result.notes if "trained on" in note]
    vitrail.teach(home / "more", {"red": data / "red"})
    notes = vitrail.evaluate(home / "more", data).notes
    assert [note for note in notes if "the images used to teach 'red' are not recorded" in note]


def test_images_of_using_are_recorded(home, folders):
    data = write_folder(home / "pictures", 20)
    tiny_run(data, home / "run")
    vitrail.save(vitrail.load(home / "run"), home / "x.npz", "google")
    net = vitrail.load(home / "x.npz")
    net.metadata = replace(net.metadata, provenance={})
    vitrail.save(net, home / "plain", class_names=net.metadata.class_names)
    vitrail.teach(home / "plain", some(folders, "gray"), home / "more", using=data)
    result = vitrail.evaluate(home / "more", f"{data}/")
    assert result.notes[0] == "split: test"
    assert result.samples == 6


def test_unknown_classes_of_using_are_not_taught(home, folders):
    data = write_colors(home / "colors.npz")
    tiny_run(data, home / "run")
    for name in ("gray", "blue", "azure", "red", "green"):
        paint(home / "set" / name, name if name in COLORS else "gray")
    more = vitrail.teach(home / "run", some(folders, "gray"), home / "more", using=home / "set")
    assert more.classes == ("blue", "green", "red", "gray")
    assert more.replaced == ()
    assert "images of the 3 known classes" in more.notes[0]
    three = home / "three"
    three.mkdir()
    for name in ("blue", "red", "green"):
        (home / "set" / name).rename(three / name)
    same = vitrail.teach(home / "run", some(folders, "gray"), home / "same", using=three)
    assert same.classes == more.classes
    assert same.notes[0].partition(" come from")[0] == more.notes[0].partition(" come from")[0]
    weights = [vitrail.load(home / name).state_dict() for name in ("more", "same")]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name])


@pytest.mark.parametrize("kind", ["file", "transformers", "run"])
def test_model_without_a_memory_is_not_changed_in_place(home, folders, capsys, kind):
    place = home / ("x.npz" if kind == "file" else "folder")
    net = vitrail.create("ViT-B/16", image_size=32, depth=1, width=32, mlp_width=64, heads=2)
    if kind == "file":
        vitrail.save(net, place, "google")
    elif kind == "transformers":
        vitrail.save(net, place, "huggingface", allow_loss=True)
    else:
        tiny_run(write_colors(home / "colors.npz"), place)
    before = contents(place)
    words = ["teach", str(place), f"gray={folders['gray']}", f"red={folders['red']}"]
    for options in ([], ["--only"]):
        assert main([*words, *options]) == 2
        error = capsys.readouterr().err
        assert "folder for the taught model, such as --out taught" in error
        assert error.count("\n") == 1
        if kind != "file":
            assert main([*words, *options, "--out", f"{place}/"]) == 2
            assert "already contains a model" in capsys.readouterr().err
    assert contents(place) == before


def test_command(model, home, folders, capsys):
    words = [f"{name}={folders[name]}" for name in ("red", "green")]
    single = next(folders["green"].iterdir())
    (folders["red"] / "broken.png").write_bytes(b"no image")
    out = str(home / "out")
    assert main(["teach", str(model), *words, f"green={single}", "--out", out]) == 0
    output = capsys.readouterr().out
    for text in ("red: added, 6 images", "green: added, 7 images", "unreadable:"):
        assert text in output
    assert "2 classes, leave-one-out accuracy" in output
    net = vitrail.load(out)
    net.metadata = replace(net.metadata, conformal={"error_rate": 0.05})
    vitrail.save(net, out)
    capsys.readouterr()
    assert main(["teach", out, f"blue={folders['blue']}", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert 0 <= result["balanced_accuracy"] <= 1
    (note,) = result["notes"]
    assert note.endswith(f": vitrail calibrate {out} DATA --out {out}")
    assert main(["teach", str(model), f"blue={folders['blue']}s"]) == 2
    assert f"not found; did you mean '{folders['blue']}'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["red"], "'red' is not CLASS=IMAGES, such as thumb=folder"),
        (["red="], "'red=' is not CLASS=IMAGES"),
        (["red=nowhere"], "red=nowhere: not found"),
        (["red=empty"], "red=empty: contains no images"),
        (["red=broken"], "none of 1 images could be read"),
        (["red=red"], "'red' is the only class"),
        (["red=red", "b\udcff=red"], "is not valid text"),
    ],
)
def test_invalid_classes_are_one_line(model, home, capsys, monkeypatch, words, message):
    monkeypatch.chdir(home)
    paint(home / "red", "red")
    (home / "empty").mkdir()
    (home / "broken").mkdir()
    (home / "broken" / "0.png").write_bytes(b"no image")
    assert main(["teach", str(model), *words, "--out", str(home / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (home / "out").exists()


def test_classes_taught_with_version_0_1_stay_valid():
    folder = Path(__file__).parents[1] / "checkpoints" / "bundle-0.1"
    model = vitrail.load(folder)
    assert features_digest(model) == "0d3136242ec463b09830a6028c18e88b"  # written by 0.1
    for change in ({"pre_norm": True}, {"pool": "mean", "attention": "axial"}):
        changed = vitrail.create("ViT-Mu/4").config.change(**change)
        model.config = vitrail.create("ViT-Mu/4").config
        before = features_digest(model)
        model.config = changed
        assert features_digest(model) != before
