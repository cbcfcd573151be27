from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tiny_runs import tiny_run, write_colors, write_folder
from vitrail import CheckpointError, ConfigError, DataError
from vitrail.cli import main
from vitrail.probing import teach as module
from vitrail.probing.ridge import fit_moments
from vitrail.probing.teach import ProbeMemory, fit_head, load_memory, save_memory

RNG = np.random.default_rng(0)
COLORS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "gray": (1, 1, 1)}


def paint(folder, name, count=6):
    """A folder of noisy pictures of one color."""
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
    """A file of weights that knows no classes."""
    torch.manual_seed(0)
    vitrail.save(vitrail.create("ViT-Mu/4", image_size=8, num_classes=0), home / "backbone")
    return home / "backbone"


def head(folder):
    found = vitrail.load(folder)
    return torch.cat([found.head.weight, found.head.bias[:, None]], 1)


def same(one, other):
    scale = one.abs().max()
    torch.testing.assert_close(one / scale, other / scale, rtol=0, atol=1e-6)


def test_classes_taught_one_by_one_are_as_if_taught_together(model, home):
    places = {name: paint(home / name, name) for name in COLORS}
    together = vitrail.teach(model, places, home / "together")
    first = dict(list(places.items())[:2])
    vitrail.teach(model, first, home / "steps")
    vitrail.teach(home / "steps", {"blue": places["blue"]})  # in place
    last = vitrail.teach(home / "steps", {"gray": places["gray"]})
    assert last.classes == together.classes == tuple(COLORS)
    assert vitrail.load(home / "steps").metadata.class_names == tuple(COLORS)
    same(head(home / "steps"), head(home / "together"))


def test_teaching_reports_progress_and_confirms_the_preprocessing(model, home):
    vitrail.save(vitrail.load(model), home / "assumed", provenance={"preprocessing": "assumed"})
    places, progress = {name: paint(home / name, name) for name in COLORS}, []
    vitrail.teach(
        home / "assumed", places, home / "out", progress=lambda *done: progress.append(done)
    )
    assert progress == [(6, 6)] * len(COLORS)
    assert "preprocessing" not in vitrail.load(home / "out").metadata.provenance


def test_a_class_learned_anew_forgets_only_its_own_pictures(model, home):
    wrong = {"red": paint(home / "wrong", "gray"), "green": paint(home / "green", "green")}
    vitrail.teach(model, wrong, home / "mended")
    taught = vitrail.teach(home / "mended", {"red": paint(home / "red", "red")})
    assert taught.replaced == ("red",)
    right = {"red": home / "red", "green": home / "green"}
    vitrail.teach(model, right, home / "right")
    same(head(home / "mended"), head(home / "right"))


def test_what_was_taught_is_recognized(model, home):
    places = {name: paint(home / "train" / name, name, 8) for name in ("red", "green", "blue")}
    taught = vitrail.teach(model, places, home / "taught")
    for name in places:
        paint(home / "test" / name, name)
    found = vitrail.evaluate(home / "taught", home / "test")
    assert found.accuracy > 0.9
    assert taught.accuracy is not None
    assert taught.accuracy > 0.9
    assert found.calibration is not None
    assert found.calibration.confidence[-1] > 0.5  # the scores were made into probabilities


def test_many_pictures_are_remembered_by_their_moments_with_the_same_result(home):
    """More pictures of a class than features: rows stand for them, and the solution is the same."""
    net = vitrail.create("ViT-Mu/4", image_size=8, num_classes=0)
    width = net.config.num_features
    values = RNG.normal(size=(3 * width, width)).astype(np.float32) + 1
    labels = np.array([0] * (2 * width) + [1] * width)
    memory = ProbeMemory.of(net, values, labels, ["a", "b"]).compressed()
    assert len(memory.rows) == 2 * width
    assert not memory.whole
    gram = torch.from_numpy(values).double().mT @ torch.from_numpy(values).double()
    sums = torch.stack([torch.from_numpy(values[labels == c]).double().sum(0) for c in (0, 1)])
    wanted = fit_moments(torch.tensor([2 * width, width]), sums, gram, memory.l2)
    headed, _, accuracy = fit_head(net, memory)
    assert accuracy is None
    same(headed.head.weight.double(), wanted.linear()[0])


def test_many_pictures_are_calibrated_and_go_on_to_be_so(model, home):
    """More pictures than features: l2 and temperature are chosen before they are made shorter."""
    net = vitrail.load(model)
    width = net.config.num_features
    values = RNG.normal(size=(4 * width, width)).astype(np.float32)
    labels = np.arange(4 * width) % 2
    values[:, 0] += 3 * labels
    _, memory, accuracy = fit_head(net, ProbeMemory.of(net, values, labels, ["a", "b"]))
    assert accuracy is not None
    assert memory.temperature < 0.7
    save_memory(memory, home)
    kept = load_memory(home, net)
    assert kept is not None
    assert not kept.whole
    assert fit_head(net, kept)[1].temperature == memory.temperature


def test_a_memory_that_is_too_large_is_not_kept_and_that_is_told(model, home, monkeypatch):
    places = {name: paint(home / name, name) for name in ("red", "green")}
    vitrail.teach(model, places, home / "one")
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    taught = vitrail.teach(home / "one", {"blue": paint(home / "blue", "blue")})
    assert "too many classes to remember" in taught.notes[-1]
    assert not (home / "one" / "probe.safetensors").exists()


def test_pictures_to_remind_a_model_must_show_all_it_knows(home):
    data = write_colors(home / "colors.npz")
    tiny_run(data, home / "run")
    two = write_colors(home / "two.npz", classes=2)
    gray = {"gray": paint(home / "gray", "gray")}
    with pytest.raises(ConfigError, match=r"two\.npz has no images of 'blue'"):
        vitrail.teach(home / "run", gray, home / "more", using=two)


def test_another_model_is_not_replaced_unasked(model, home):
    places = {name: paint(home / name, name) for name in ("red", "green")}
    vitrail.teach(model, places, home / "one")
    with pytest.raises(ConfigError, match="one already contains a model"):
        vitrail.teach(model, places, home / "one")
    vitrail.teach(model, places, home / "one", overwrite=True)


def test_a_class_name_that_cannot_be_written_is_refused_before_anything_is(model, home):
    places = {"red": paint(home / "red", "red"), "b\udcff": paint(home / "green", "green")}
    with pytest.raises(CheckpointError, match="is not valid text"):
        vitrail.teach(model, places, home / "one")
    assert not (home / "one").exists()


def test_a_trained_model_is_reminded_of_its_classes_by_its_data(home):
    data = write_colors(home / "colors.npz", train=90, test=30)
    tiny_run(data, home / "run", steps=40)
    before = vitrail.evaluate(home / "run", data).accuracy
    taught = vitrail.teach(home / "run", {"gray": paint(home / "gray", "gray")}, home / "more")
    assert taught.classes == ("red", "green", "blue", "gray")
    assert "90 images of the 3 known classes" in taught.notes[0]
    assert vitrail.evaluate(home / "more", data).accuracy >= before - 0.1


def test_what_was_kept_apart_stays_apart_when_a_model_is_taught(home):
    """Neither the pictures that remind it nor those of new classes are judged by in silence."""
    folder = write_folder(home / "pictures", 20)
    tiny_run(folder, home / "run", dev=0.3)
    gray = {"gray": paint(home / "gray", "gray")}
    taught = vitrail.teach(home / "run", gray, home / "more")
    assert "42 images of the 3 known classes" in taught.notes[0]
    found = vitrail.evaluate(home / "more", f"{folder}/")
    assert found.notes[0] == "split: val"
    assert found.samples == 18
    assert not [note for note in found.notes if "trained on" in note]
    vitrail.teach(home / "more", {"red": folder / "red"})
    notes = vitrail.evaluate(home / "more", folder).notes
    assert [note for note in notes if "the images used to teach 'red' are not recorded" in note]


def test_a_model_remembers_where_it_was_reminded(home):
    folder = write_folder(home / "pictures", 20)
    tiny_run(folder, home / "run")
    vitrail.save(vitrail.load(home / "run"), home / "x.npz", "google")
    net = vitrail.load(home / "x.npz")
    net.metadata = replace(net.metadata, provenance={})
    vitrail.save(net, home / "plain", class_names=net.metadata.class_names)
    gray = {"gray": paint(home / "gray", "gray")}
    vitrail.teach(home / "plain", gray, home / "more", using=folder)
    found = vitrail.evaluate(home / "more", f"{folder}/")
    assert found.notes[0] == "split: test"
    assert found.samples == 6


def test_without_its_data_a_trained_model_must_be_given_some_or_told_to_forget(home):
    data = write_colors(home / "colors.npz")
    tiny_run(data, home / "run")
    moved = data.rename(home / "moved.npz")
    gray = {"gray": paint(home / "gray", "gray")}
    with pytest.raises(ConfigError, match=r"knows 3 classes.*Dataset not found.*--using .*--only"):
        vitrail.teach(home / "run", gray, home / "more")
    assert len(vitrail.teach(home / "run", gray, home / "a", using=moved).classes) == 4
    gray["red"] = paint(home / "red", "red")
    assert vitrail.teach(home / "run", gray, home / "b", only=True).classes == ("gray", "red")


def test_a_memory_of_other_weights_is_refused(model, home):
    vitrail.teach(model, {n: paint(home / n, n) for n in ("red", "green")}, home / "one")
    torch.manual_seed(1)
    vitrail.save(vitrail.create("ViT-Mu/4", image_size=8, num_classes=2), home / "one")
    with pytest.raises(CheckpointError, match="features of other weights"):
        vitrail.teach(home / "one", {"blue": paint(home / "blue", "blue")})


def test_a_memory_that_cannot_be_read_is_named(model, home):
    places = {n: paint(home / n, n) for n in ("red", "green")}
    vitrail.teach(model, places, home / "one")
    path = home / "one" / "probe.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CheckpointError, match=r"probe\.safetensors cannot be read"):
        vitrail.teach(home / "one", places)


def test_a_memory_comes_back_as_it_was(model, home):
    net = vitrail.load(model)
    values = RNG.normal(size=(6, net.config.num_features)).astype(np.float32)
    memory = ProbeMemory.of(net, values, np.arange(6) // 3, ["über", "b"])
    save_memory(memory, home)
    back = load_memory(home, net)
    assert isinstance(back, ProbeMemory)
    for name, value in vars(memory).items():
        other = getattr(back, name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


def test_the_command_teaches_and_tells(model, home, capsys):
    words = [f"{name}={paint(home / name, name)}" for name in ("red", "green")]
    single = next((home / "green").iterdir())
    (home / "red" / "broken.png").write_bytes(b"no picture")
    out = str(home / "out")
    assert main(["teach", str(model), *words, f"green={single}", "--out", out]) == 0
    told = capsys.readouterr().out
    assert "red: added, 6 images" in told
    assert "green: added, 7 images" in told
    assert "unreadable:" in told
    assert "2 classes, leave-one-out accuracy" in told
    assert main(["teach", out, f"blue={paint(home / 'blue', 'blue')}", "--json"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["red"], "'red' is not CLASS=IMAGES, such as thumb=folder"),
        (["red="], "'red=' is not CLASS=IMAGES"),
        (["red=nowhere"], "red=nowhere: not found"),
        (["red=empty"], "red=empty: contains no images"),
    ],
)
def test_what_cannot_be_taught_is_one_line(model, home, capsys, monkeypatch, words, said):
    monkeypatch.chdir(home)
    (home / "empty").mkdir()
    assert main(["teach", str(model), *words, "--out", str(home / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (home / "out").exists()


def test_one_class_alone_is_refused(model, home):
    with pytest.raises(ConfigError, match="'red' is the only class"):
        vitrail.teach(model, {"red": paint(home / "red", "red")}, home / "out")


def contents(place):
    return {path: path.read_bytes() for path in [place, *place.glob("*")] if path.is_file()}


@pytest.mark.parametrize("only", [True, False])
@pytest.mark.parametrize("kind", ["file", "transformers", "run"])
def test_a_model_that_remembers_nothing_is_not_changed_in_place(home, capsys, kind, only):
    place = home / ("x.npz" if kind == "file" else "folder")
    net = vitrail.create("ViT-B/16", image_size=32, depth=1, width=32, mlp_width=64, heads=2)
    if kind == "file":
        vitrail.save(net, place, "google")
    elif kind == "transformers":
        vitrail.save(net, place, "huggingface", allow_loss=True)
    else:
        tiny_run(write_colors(home / "colors.npz"), place)
    before = contents(place)
    words = [f"{name}={paint(home / name, name)}" for name in ("gray", "red")]
    words = ["teach", str(place), *words, *(["--only"] if only else [])]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "folder for the taught model, such as --out taught" in error
    assert error.count("\n") == 1
    if kind != "file":
        assert main([*words, "--out", f"{place}/"]) == 2
        assert "already contains a model" in capsys.readouterr().err
    assert contents(place) == before


def test_a_model_that_remembers_is_changed_in_place_however_that_is_spelled(model, home):
    vitrail.teach(model, {n: paint(home / n, n) for n in ("red", "green")}, home / "one")
    gray = {"gray": paint(home / "gray", "gray")}
    (home / "other").mkdir()
    taught = vitrail.teach(home / "one", gray, home / "other" / ".." / "one")
    assert taught.classes == ("red", "green", "gray")
    assert vitrail.load(home / "one").metadata.class_names == taught.classes


def test_pictures_that_cannot_be_read_at_all_are_an_error(model, home):
    (home / "red").mkdir()
    (home / "red" / "0.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"none of 1 images could be read"):
        vitrail.teach(model, {"red": home / "red"}, home / "out")


@pytest.mark.parametrize("too_large", [True, False])
def test_a_full_disk_leaves_the_memory_as_it_was(model, home, monkeypatch, too_large):
    places = {name: paint(home / name, name) for name in ("red", "green")}
    vitrail.teach(model, places, home / "one")
    before = {path.name: path.read_bytes() for path in (home / "one").iterdir()}
    if too_large:
        monkeypatch.setattr(module, "MAX_BYTES", 100)

    def full(*_: object, **__: object) -> None:
        raise CheckpointError("cannot write model.safetensors: No space left on device")

    monkeypatch.setattr("vitrail.probing.teach.save", full)  # there was room for the memory
    with pytest.raises(CheckpointError, match="No space left"):
        vitrail.teach(home / "one", {"blue": paint(home / "blue", "blue")})
    assert {path.name: path.read_bytes() for path in (home / "one").iterdir()} == before


def test_a_memory_that_is_older_than_its_model_is_refused(model, home):
    places = {name: paint(home / name, name) for name in ("red", "green")}
    vitrail.teach(model, places, home / "one")
    old = (home / "one" / "probe.safetensors").read_bytes()
    vitrail.teach(home / "one", {"blue": paint(home / "blue", "blue")})
    (home / "one" / "probe.safetensors").write_bytes(old)  # killed between the two
    with pytest.raises(CheckpointError, match=r"older than the model .* lacks 'blue'"):
        vitrail.teach(home / "one", {"blue": home / "blue"})
